"""The clients that take part in a round or an evaluation, and the clients that answer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from pflight.errors import ConfigurationError
from pflight.options import check_range, checked
from pflight.randomness import Purpose, generator


def check_cohort_options(
    owner: object,
    size: int | None = None,
    participation: float | None = None,
    availability: float = 1.0,
    dropout: float = 0.0,
) -> None:
    """Raise for cohort options that are out of range for any number of clients.

    Raises:
        ConfigurationError: Names the option as the data modules do.
    """
    if size is not None and participation is not None:
        raise ConfigurationError(
            f"{type(owner).__name__}: give cohort_size or participation, not both: got "
            f"cohort_size={size} and participation={participation}"
        )
    check_range(owner, "[1, inf)", cohort_size=size)
    check_range(owner, "[1e-09, 1]", participation=participation, availability=availability)
    check_range(owner, "[0, 1)", dropout=dropout)


def sample_clients(clients: Tensor, size: int, seed: int) -> Tensor:
    """Return a seeded sample of at most ``size`` of the clients ``[N]``, ascending."""
    order = torch.randperm(len(clients), generator=generator(Purpose.SAMPLE, seed))
    return clients[order[:size]].sort().values


@checked
class CohortSampler:
    r"""Draws the cohort of a round as a pure function of ``(seed, round)``.

    The cohort has ``s = max(1, floor(participation * N + 0.5))`` of the ``N`` clients, or ``size``.
    Each available client draws an exponential waiting time, with its weight (1, or its sample
    count) as the rate. The ``s`` clients with the shortest times are the cohort. This is uniform
    sampling without replacement, or successive sampling in proportion to the data (Efraimidis and
    Spirakis, 2006).

    Args:
        clients: Ids of the clients that may be sampled, ``[N]``.
        num_samples: Their numbers of training samples, ``[N]``.
        size: Number of clients in a cohort; ``None`` with ``participation=None`` means all.
        participation: Share of the ``N`` clients in a cohort, from a billionth to 1.
        sampling: ``"uniform"``, or ``"samples"`` to sample in proportion to the data.
        availability: Probability that a client can be sampled in a round. If fewer than ``s``
            clients can, the cohort is smaller; at least one always can.
        dropout: Probability that a participating client does not answer; at least one of a cohort
            always does.
        seed: Seed of all draws.

    Raises:
        ConfigurationError: An option is out of its range, or ``size`` exceeds ``N``.

    Example:
        >>> cohorts = CohortSampler(torch.arange(10), torch.ones(10), participation=0.25)
        >>> cohorts.size
        3
        >>> torch.equal(cohorts.sample(7), cohorts.sample(7))
        True
    """

    def __init__(
        self,
        clients: Tensor,
        num_samples: Tensor,
        size: int | None = None,
        participation: float | None = None,
        sampling: Literal["uniform", "samples"] = "uniform",
        availability: float = 1.0,
        dropout: float = 0.0,
        seed: int = 0,
    ) -> None:
        check_cohort_options(self, size, participation, availability, dropout)
        if len(clients) == 0:
            raise ConfigurationError(
                "no client can train: all are held out or without training samples"
            )
        if size is not None and size > len(clients):
            raise ConfigurationError(
                f"cohort_size is {size}, but only {len(clients)} clients can be sampled"
            )
        self.clients, order = clients.sort()
        self.num_samples = num_samples[order]
        if participation is not None:
            size = max(1, math.floor(participation * len(clients) + 0.5))
        self.size = len(clients) if size is None else size
        self.sampling = sampling
        self.availability = availability
        self.dropout = dropout
        self.seed = seed

    def sample(self, round: int) -> Tensor:
        """Return the sorted ids of this round's cohort, ``[s]``."""
        random = generator(Purpose.COHORT, self.seed, round)
        luck = torch.rand(len(self.clients), generator=random, dtype=torch.float64)
        wait = torch.empty_like(luck).exponential_(generator=random)
        if self.sampling == "samples":
            wait /= self.num_samples
        available = luck <= self.availability
        available[luck.argmin()] = True
        wait[~available] = torch.inf
        first = wait.argsort()[: min(self.size, int(available.sum()))]
        return self.clients[first.sort().values]

    def answers(self, round: int, clients: Tensor) -> Tensor:
        """Return whether clients answer if they take part.

        It depends on ``(seed, round, client)`` alone. The client with the highest draw in the
        round's cohort always answers.

        Args:
            round: Index of the round.
            clients: Ids of any of the clients that may be sampled, ``[C]``.

        Returns:
            A BoolTensor ``[C]``.
        """
        random = generator(Purpose.DROPOUT, self.seed, round)
        luck = torch.rand(int(self.clients[-1]) + 1, generator=random, dtype=torch.float64)
        answers = luck[clients] >= self.dropout
        if not answers.all():
            cohort = self.sample(round)
            answers |= clients == cohort[luck[cohort].argmax()]
        return answers


class CohortLoader:
    """Yields the cohort of one round: an epoch of training is a round.

    It is not a torch DataLoader, so that Lightning does not replace its sampler under any strategy.
    It is its own ``sampler``. Lightning calls the sampler's ``set_epoch`` before each epoch.

    Attributes:
        round: The round of the next iteration's cohort. The federation sets it, since it knows the
            number of past rounds under any Trainer.
    """

    def __init__(self, cohorts: CohortSampler) -> None:
        self.cohorts = cohorts
        self.round = 0

    @property
    def sampler(self) -> CohortLoader:
        """The object with the ``set_epoch`` for Lightning: the loader itself."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Set the round to the Trainer's epoch."""
        self.round = epoch

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Tensor]:
        yield self.cohorts.sample(self.round)


class ClientLoader:
    """Yields client ids in chunks, for evaluation.

    It is not a torch DataLoader, so that Lightning does not replace its sampler under any strategy.

    Args:
        clients: The ids to yield, ``[N]``.
        chunk_size: Number of ids in a chunk; the last may have fewer.
    """

    def __init__(self, clients: Tensor, chunk_size: int) -> None:
        self.clients = clients
        self.chunk_size = chunk_size

    def __len__(self) -> int:
        return math.ceil(len(self.clients) / self.chunk_size)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.clients.split(self.chunk_size))
