"""The mean of products of low-rank factors, in place of the mean of the factors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from tensordict import TensorDict
from torch import Tensor

from pflight.runs.distributed import gather
from pflight.states.state import WeightedMean

from .low_rank import LowRank
from .pairs import Pair, matrix


class ProductMean(WeightedMean):
    r"""Weighted means in which each pair has the mean of the clients' products.

    In each group :math:`\sum_i p_i s B_i A_i` is split into factors of the pair's rank
    (FlexLoRA, Bai et al. 2024). All other entries have plain means. Factors are kept, and are
    compressed as they grow, so memory does not depend on the number of added states.

    Args:
        sent: The model that was sent, for each group.
        pairs: The pairs; entries that are in none have plain means.

    References:
        Bai et al., Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and
        Client Resources, NeurIPS 2024, https://arxiv.org/abs/2402.11505.
    """

    def __init__(self, sent: Sequence[Mapping[str, Tensor]], pairs: Sequence[Pair]) -> None:
        paired = {name for pair in pairs for name in pair.names}
        super().__init__({n: t for n, t in sent[0].items() if n not in paired}, len(sent))
        self.pairs = pairs
        self._sent = [{name: state[name].detach().clone() for name in paired} for state in sent]
        self._products: list[dict[Pair, LowRank]] = [{} for _ in sent]

    def add(self, states: TensorDict, weights: Tensor, groups: Tensor | None = None) -> None:
        """Add ``C`` states with weights ``[C]`` to groups ``[C]``, by default to the first."""
        super().add(states, weights, groups)
        of_clients = [0] * len(weights) if groups is None else groups.tolist()
        for row, (weight, group) in enumerate(zip(weights.tolist(), of_clients, strict=True)):
            for pair in self.pairs if weight else ():
                self._add(group, pair, weight * pair.product(states[row]))

    def _add(self, group: int, pair: Pair, term: LowRank) -> None:
        products = self._products[group]
        total = products[pair] + term if pair in products else term
        products[pair] = total.compressed() if total.width > 4 * pair.rank + 64 else total

    def all_reduce(self) -> None:
        """Add up the sums of all ranks. Every rank has to call it."""
        super().all_reduce()
        device = self.weights.device
        of_ranks = gather(
            [{p: (x.left.cpu(), x.right.cpu()) for p, x in own.items()} for own in self._products]
        )
        self._products = [{} for _ in self._products]
        for of_groups in of_ranks:
            for group, products in enumerate(of_groups):
                for pair, (left, right) in products.items():
                    self._add(group, pair, LowRank([(left.to(device), right.to(device))]))

    def compute(self) -> TensorDict:
        """Return the means ``[groups]``. The pairs of a group with zero weight are as sent."""
        means = super().compute()
        for pair in self.pairs:
            parts = [self._mean_of(group, pair) for group in range(len(self._sent))]
            for name, values in zip((pair.b, pair.a), zip(*parts, strict=True), strict=True):
                like = self._sent[0][name]
                means[name] = torch.stack([value.view_as(like).to(like.dtype) for value in values])
        return means

    def _mean_of(self, group: int, pair: Pair) -> tuple[Tensor, Tensor]:
        """Return B and A of a group's mean, as matrices."""
        sent = self._sent[group]
        factors = matrix(sent[pair.b]), matrix(sent[pair.a])
        if pair not in self._products[group]:
            return factors
        mean = 1 / float(self.weights[group]) * self._products[group][pair]
        zero = 1e-12 if sent[pair.a].dtype == torch.float64 else 1e-7
        return mean.split(pair.rank, pair.scale, factors, zero)
