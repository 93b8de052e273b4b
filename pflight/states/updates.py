"""What an engine gives back after local training or evaluation of some clients."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from textwrap import shorten
from typing import Any, NamedTuple

from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from tensordict import TensorDict
from torch import Tensor

from pflight.errors import Stopped, described, said_by
from pflight.history import Logs

STOPS = (KeyboardInterrupt, Stopped, SIGTERMException, MisconfigurationException)
"""What ends a run wherever it is raised: a signal, or a mistake that is not one client's. All else
is the failure of the client that raises it, ``SystemExit`` as well."""
_REASON = 500  # characters


@dataclass(frozen=True)
class ClientFailure:
    """What a client was asked for in vain: it raised, or its result is not finite."""

    client: int
    reason: str
    error: BaseException | None = None

    @classmethod
    def of(cls, client: int, error: BaseException) -> ClientFailure:
        """Return the failure of a client that raised."""
        said, lines = described(error), said_by(error).splitlines()
        if "DataLoader worker process" in said:  # whose traceback ends with what was raised there
            said = lines[-1]
        return cls(client, shorten(said, _REASON, placeholder=" ..."), error)

    def forget_frames(self) -> None:
        """Drop the frames in which it was raised, which hold the client's copy of the module."""
        error, seen = self.error, set[int]()
        while error is not None and id(error) not in seen:
            seen.add(id(error))
            error.__traceback__ = None
            error = error.__cause__ or error.__context__


class Kept(NamedTuple):
    """What some clients kept from earlier participations."""

    states: TensorDict
    """``[C]``: what a client kept or, if nothing, those entries of the state it starts from."""
    seen: Tensor
    """Which of the clients kept anything ``[C]``."""


@dataclass(frozen=True)
class ClientUpdates:
    """The clients of a chunk that answered, and what they return.

    Attributes:
        clients: Ids ``[C]``, ascending.
        states: Stacked states ``[C]``: the trained models or, from an engine's ``gradients``, the
            gradients under the parameters' names and the updated buffers under theirs.
        num_samples: Training samples of each client ``[C]``.
        failures: The clients that were asked and gave nothing.
        logs: What the clients logged: name to (sum over samples, number of samples).
        kept: What they keep for themselves ``[C]``, where their module keeps a memory.
        bytes_saved: Bytes by which a transform makes each client's message smaller.
        changes: The updates ``[C, d]`` that a smaller message holds; see
            :class:`~pflight.transforms.Pipeline`.
    """

    clients: Tensor
    states: TensorDict
    num_samples: Tensor
    failures: list[ClientFailure] = field(default_factory=list)
    logs: Logs = field(default_factory=dict)
    kept: TensorDict | None = None
    bytes_saved: int = 0
    changes: Tensor | None = None

    def where(self, mask: Tensor) -> ClientUpdates:
        """Return the updates of some of the clients, by a mask ``[C]``."""
        if mask.all():
            return self
        rows = mask.to(self.clients.device).nonzero().flatten()
        return replace(
            self,
            clients=self.clients[rows],
            states=self.states[rows],
            num_samples=self.num_samples[rows.cpu()],
            kept=None if self.kept is None else self.kept[rows],
        )


Predictions = list[tuple[int, list[Any]]]
"""Pairs of a client's id and what its own ``predict_step`` gives for each batch."""


class Evaluation(NamedTuple):
    """The outputs of some clients' models on their own samples, ``B`` samples in all."""

    clients: Tensor
    """Whose sample it is ``[B]``."""
    outputs: Tensor
    """What their models give ``[B, ...]``, such as logits."""
    targets: Tensor
    """What is right ``[B, ...]``, such as classes."""
    losses: Tensor
    """Of each sample ``[B]``."""

    @property
    def logits(self) -> Tensor:
        """The outputs, where they are logits ``[B, num_classes]``."""
        return self.outputs
