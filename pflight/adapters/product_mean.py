"""The mean of products of low-rank factors, in place of the mean of the factors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from tensordict import TensorDict
from torch import Tensor

from pflight.runs.distributed import gather
from pflight.states.state import WeightedMean

from .low_rank import LowRank, Split
from .pairs import Pair, factor_names, matrix, zero_first


class PairMean(WeightedMean):
    r"""Weighted means of all entries that also know the mean product of each pair.

    In each group this product is :math:`D^* = \sum_i p_i s B_i A_i`. Factors of it are kept, and
    are compressed as they grow, so memory does not depend on the number of added states.

    Args:
        sent: The model that was sent, for each group.
        pairs: The pairs.
        measures: Whether :meth:`compute` also sets :attr:`error`.

    Attributes:
        terms: What the server adds to the frozen weights of layers, of the first group.
        error: Distance of the sent products from the mean products, relative to the latter, over
            all pairs and groups; 0 if all mean products are 0. ``None`` before :meth:`compute`.
    """

    def __init__(
        self, sent: Sequence[Mapping[str, Tensor]], pairs: Sequence[Pair], measures: bool = False
    ) -> None:
        super().__init__(sent[0], len(sent))
        self.pairs = pairs
        self.measures = measures
        self.terms: dict[Pair, LowRank] = {}
        self.error: float | None = None
        self._sent = [
            {name: state[name].detach().clone() for name in factor_names(pairs)} for state in sent
        ]
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
        """Return the means ``[groups]``. The mean of a group with zero weight is meaningless."""
        means = super().compute()
        self._combine(means)
        if self.measures:
            self.error = self._error(means)
        return means

    def _combine(self, means: TensorDict) -> None:
        """Replace the means of factors ``[groups]`` in place, and set :attr:`terms`."""

    def ideal(self, group: int, pair: Pair) -> LowRank | None:
        """Return the mean product of a group, or ``None`` if it has zero weight."""
        if pair not in self._products[group]:
            return None
        return 1 / float(self.weights[group]) * self._products[group][pair]

    def _zero(self, pair: Pair) -> float:
        """Return which part of the largest singular value counts as 0."""
        return 1e-12 if self._sent[0][pair.a].dtype == torch.float64 else 1e-7

    def _floor(self, pair: Pair, ideal: LowRank) -> Tensor:
        """Return up to which number a singular value of a term counts as 0."""
        return self._zero(pair) * ideal.svd()[1][0]

    def _error(self, means: TensorDict) -> float:
        away = size = 0.0
        for group in range(len(self._sent)):
            for pair in self.pairs:
                if (ideal := self.ideal(group, pair)) is None:
                    continue
                sent = pair.product(means[group])
                if pair in self.terms:
                    sent = sent + self.terms[pair]
                away += float((sent - ideal).norm()) ** 2
                size += float(ideal.norm()) ** 2
        return math.sqrt(away / size) if size else 0.0


class ProductMean(PairMean):
    r"""Weighted means in which each pair has the mean of the clients' products.

    In each group :math:`\sum_i p_i s B_i A_i` is split into factors of the pair's rank
    (FlexLoRA, Bai et al. 2024). All other entries have plain means.

    Args:
        sent: As in :class:`PairMean`.
        pairs: As in :class:`PairMean`.
        measures: As in :class:`PairMean`.
        split: Which factor gets the singular values, as in
            :meth:`~pflight.adapters.low_rank.LowRank.split`.

    References:
        Bai et al., Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and
        Client Resources, NeurIPS 2024, https://arxiv.org/abs/2402.11505.
    """

    def __init__(
        self,
        sent: Sequence[Mapping[str, Tensor]],
        pairs: Sequence[Pair],
        measures: bool = False,
        split: Split = "balanced",
    ) -> None:
        super().__init__(sent, pairs, measures)
        self.split = split

    def _combine(self, means: TensorDict) -> None:
        for pair in self.pairs:
            parts = [self._mean_of(group, pair) for group in range(len(self._sent))]
            for name, values in zip((pair.b, pair.a), zip(*parts, strict=True), strict=True):
                like = self._sent[0][name]
                means[name] = torch.stack([value.view_as(like).to(like.dtype) for value in values])

    def _mean_of(self, group: int, pair: Pair) -> tuple[Tensor, Tensor]:
        """Return B and A of a group's mean, as matrices; as they were sent for zero weight."""
        sent = self._sent[group]
        factors = matrix(sent[pair.b]), matrix(sent[pair.a])
        mean = self.ideal(group, pair)
        if mean is None:
            return factors
        return mean.split(pair.rank, pair.scale, factors, self._zero(pair), self.split)


class ResidualMean(PairMean):
    r"""Weighted means of the factors, and what their product lacks of the mean product.

    The terms are :math:`D^* - s B A` with the means B and A (FedEx-LoRA, Singhal et al. 2025).

    Args:
        sent: The model that was sent.
        pairs: As in :class:`PairMean`.
        measures: As in :class:`PairMean`.
        rank: The largest rank of a term; ``None`` for any.

    References:
        Singhal et al., FedEx-LoRA: Exact Aggregation for Federated and Efficient Fine-Tuning of
        Large Language Models, ACL 2025, https://arxiv.org/abs/2410.09432.
    """

    def __init__(
        self,
        sent: Mapping[str, Tensor],
        pairs: Sequence[Pair],
        measures: bool = False,
        rank: int | None = None,
    ) -> None:
        super().__init__([sent], pairs, measures)
        self.rank = rank

    def _combine(self, means: TensorDict) -> None:
        for pair in self.pairs:
            if (ideal := self.ideal(0, pair)) is not None:
                residual = ideal - pair.product(means[0])
                self.terms[pair] = residual.reduced(self._floor(pair, ideal), self.rank)


class StackMean(PairMean):
    """Weighted means of all entries but pairs. The mean products become terms.

    Of each pair, one factor is 0 then, and the other as it was sent (FLoRA, Wang et al. 2024).

    Args:
        sent: The model that was sent.
        pairs: As in :class:`PairMean`.
        measures: As in :class:`PairMean`.
        start: The model at the start. The factor of a pair that was 0 there is 0 again, by default
            B. In an embedding it is A.

    References:
        Wang et al., FLoRA: Federated Fine-Tuning Large Language Models with Heterogeneous
        Low-Rank Adaptations, NeurIPS 2024, https://arxiv.org/abs/2409.05976.
    """

    def __init__(
        self,
        sent: Mapping[str, Tensor],
        pairs: Sequence[Pair],
        measures: bool,
        start: Mapping[str, Tensor],
    ) -> None:
        super().__init__([sent], pairs, measures)
        self._start = start

    def _combine(self, means: TensorDict) -> None:
        for pair in self.pairs:
            zero, other = zero_first(pair, self._start)
            means[other] = self._sent[0][other][None]
            if (ideal := self.ideal(0, pair)) is None:
                means[zero] = self._sent[0][zero][None]
                continue
            means[zero] = torch.zeros_like(self._sent[0][zero][None])
            self.terms[pair] = ideal.reduced(self._floor(pair, ideal))
