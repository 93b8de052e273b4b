"""Matched averaging: align the neurons of several networks, then average their weights.

A permutation of hidden neurons does not change a network's function. So neuron 3 of one client may
do the work of neuron 7 of another. FedMA (Wang et al. 2020) matches the neurons layer by layer, by
the MAP estimate of a Beta-Bernoulli process (BBP-MAP), and averages matched neurons.

Networks must be :mod:`chains <pflight.callbacks.methods.chains>` of layers. A network's *places*
are the new positions of its neurons, for each layer but the last: neuron ``l`` becomes neuron
``places[layer][l]``.

References:
    Wang et al., Federated Learning with Matched Averaging, ICLR 2020,
    https://arxiv.org/abs/2002.06440.

    Yurochkin et al., Bayesian Nonparametric Federated Learning of Neural Networks, ICML 2019,
    https://arxiv.org/abs/1905.12022.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from tensordict import TensorDict
from tensordict.utils import expand_as_right
from torch import Tensor

from pflight.errors import ConfigurationError
from pflight.options import NonNegativeInt, PositiveFloat, checked
from pflight.randomness import Purpose, generator
from pflight.runs.distributed import gather

from .chains import Chain

State = Mapping[str, Tensor]


@checked
@dataclass(frozen=True)
class BBPMAP:
    r"""Options of the matching.

    Neurons are normal, :math:`w \sim N(\theta_i, \sigma)`, around global ones,
    :math:`\theta_i \sim N(\mu_0, \sigma_0)`; both sigmas are variances.

    Args:
        gamma: Mass of the Beta-Bernoulli process: the larger, the more global neurons.
        sigma: Variance of a neuron around its global neuron.
        sigma0: Variance of the global neurons.
        mu0: Mean of the global neurons.
        bias_mu0: Mean of their biases, by default ``mu0``; FedMA's code has 0.1.
        passes: How often each network's neurons are matched again, in random order.
        estimate: Value of a matched neuron's weights and bias: their ``"mean"``, or the ``"map"``
            estimate, which shrinks the mean towards the prior.
        grow: Whether a neuron may become a new global one, so that the result may be wider. If not,
            all networks must have the same width.
        compat_ibm: With ``grow``, whether to weigh a neuron's popularity as IBM's code does: once
            instead of twice, with counts of at most 10.


    Example:
        >>> BBPMAP(estimate="map").passes
        5
    """

    gamma: PositiveFloat = 7.0
    sigma: PositiveFloat = 1.0
    sigma0: PositiveFloat = 1.0
    mu0: float = 0.0
    bias_mu0: float | None = None
    passes: NonNegativeInt = 5
    estimate: Literal["mean", "map"] = "mean"
    grow: bool = False
    compat_ibm: bool = False


# Moving and matching neurons


def permute(
    state: State, chain: Chain, places: Sequence[Tensor], widths: Sequence[int] | None = None
) -> dict[str, Tensor]:
    """Return a copy of a state with permuted neurons and the same function.

    Args:
        state: The state of one network.
        chain: Its layers.
        places: For each layer but the last, the new positions of its neurons ``[width]``.
        widths: Widths of the layers of the copy, if it is wider; new neurons are zeros.

    Example:
        >>> from torch import nn
        >>> from pflight.callbacks.methods.chains import find_chain
        >>> chain = find_chain(nn.Sequential(nn.Conv2d(1, 2, 1), nn.Flatten(), nn.Linear(4, 1)))
        >>> state = {"0.weight": torch.tensor([[[[5.0]]], [[[6.0]]]]), "0.bias": torch.zeros(2),
        ...     "2.weight": torch.tensor([[1.0, 2.0, 3.0, 4.0]]), "2.bias": torch.zeros(1)}
        >>> permute(state, chain, [torch.tensor([1, 0])])["2.weight"]
        tensor([[3., 4., 1., 2.]])
    """
    moved = dict(state)
    sizes = [len(place) for place in places] if widths is None else widths
    for (layer, following), place, width in zip(pairwise(chain), places, sizes, strict=True):
        for name in layer.tensors:
            moved[name] = _move(moved[name], place, width)
        moved[following.weight] = _move_inputs(moved[following.weight], place, width)
    return moved


def match(
    states: Sequence[State],
    chain: Chain,
    options: BBPMAP = BBPMAP(),
    random: torch.Generator | None = None,
) -> list[tuple[Tensor, ...]]:
    """Match the neurons of several networks layer by layer.

    A layer's inputs are permuted like the neurons of the layer before. Then its neurons, rows of
    incoming weights and bias, are matched by :func:`match_rows`.

    Args:
        states: A state of each of the J networks.
        chain: Their layers.
        options: Options of the matching.
        random: Generator for the order of repeated matchings.

    Returns:
        The places of each network: for each layer but the last, the global neurons.
    """
    places: list[list[Tensor]] = []
    weights = [state[chain[0].weight] for state in states]
    for layer, following in pairwise(chain):
        rows = [weight.flatten(1) for weight in weights]
        if layer.bias is not None:
            biases = [state[layer.bias].unsqueeze(1) for state in states]
            rows = [torch.cat(pair, dim=1) for pair in zip(rows, biases, strict=True)]
        found = match_rows(rows, options, random, biased=layer.bias is not None)
        width = 1 + max(int(place.max()) for place in found)
        weights = [
            _move_inputs(state[following.weight], place, width)
            for state, place in zip(states, found, strict=True)
        ]
        places.append(found)
    return list(zip(*places, strict=True)) or [()] * len(states)


def match_rows(
    rows: Sequence[Tensor],
    options: BBPMAP = BBPMAP(),
    random: torch.Generator | None = None,
    biased: bool = False,
) -> list[Tensor]:
    """Match the rows of J matrices by BBP-MAP.

    The matrices are matched one after the other, from the widest to the narrowest. Then each matrix
    is taken out and matched again, ``passes`` times in random order. Each time its rows take the
    places with the greatest sum of :func:`matching_scores`; new neurons keep their order.

    Args:
        rows: Matrices ``[L_j, D]``, a neuron in each row.
        options: Options of the matching.
        random: Generator for the order of the passes; by default torch's global one.
        biased: Whether the last column is the neurons' biases.

    Returns:
        For each matrix, the global neuron of each row ``[L_j]``.

    Raises:
        ConfigurationError: If the widths differ and ``options.grow`` is not set.

    Example:
        >>> rows = [torch.tensor([[2.0, 0.0], [0.0, 2.0]]), torch.tensor([[0.1, 2.1], [1.9, -0.1]])]
        >>> [places.tolist() for places in match_rows(rows)]
        [[0, 1], [1, 0]]
    """
    from scipy.optimize import linear_sum_assignment

    widths = [len(matrix) for matrix in rows]
    if len(set(widths)) > 1 and not options.grow:
        raise ConfigurationError(
            f"BBPMAP: networks of different widths {sorted(set(widths))} need grow=True"
        )
    first, *others = sorted(range(len(rows)), key=lambda j: -widths[j])
    places = {first: torch.arange(widths[first])}
    sums = rows[first].double().cpu()
    counts = torch.ones(widths[first], dtype=torch.double)
    if others:
        for _ in range(options.passes):
            others += torch.randperm(len(rows), generator=random).tolist()
    for j in others:
        matrix = rows[j].double().cpu()
        if j in places:
            place = places.pop(j)
            counts = counts.index_add(0, place, -torch.ones(len(place), dtype=torch.double))
            sums = sums.index_add(0, place, -matrix)
            stay = counts > 0
            sums, counts = sums[stay], counts[stay]
            places = {other: stay.cumsum(0)[place] - 1 for other, place in places.items()}
        scores = matching_scores(matrix, sums, counts, len(rows), options, biased)
        place = torch.from_numpy(linear_sum_assignment(scores.numpy(), maximize=True)[1])
        new = place >= len(sums)
        place[new] = place[new].sort().values  # the order of new neurons does not matter
        blank = int(new.sum())
        sums = torch.cat([sums, sums.new_zeros(blank, sums.shape[1])]).index_add(0, place, matrix)
        counts = torch.cat([counts, counts.new_zeros(blank)])
        counts = counts.index_add(0, place, torch.ones(len(place), dtype=torch.double))
        places[j] = place
    return [places[j] for j in range(len(rows))]


def matching_scores(
    rows: Tensor,
    sums: Tensor,
    counts: Tensor,
    networks: int,
    options: BBPMAP,
    biased: bool = False,
) -> Tensor:
    r"""Return the score of matching each row of a network with each global neuron.

    Global neuron :math:`i` has :math:`c_i` members among the J networks without this one. With
    :math:`S_i = \mu_0/\sigma_0 + \sum w/\sigma` and :math:`Q_i = 1/\sigma_0 + c_i/\sigma`, row
    :math:`w` scores :math:`\|S_i + w/\sigma\|^2 / (Q_i + 1/\sigma) - \|S_i\|^2 / Q_i`. With
    ``grow`` the popularity :math:`2 \ln(c_i / (J - c_i))` is added, and further columns are new
    neurons :math:`l = 1, 2, \dots` without members, with :math:`2 \ln(\gamma / (J l))` instead.

    Args:
        rows: The network's neurons ``[L_j, D]``.
        sums: Sum of the rows in each global neuron ``[L, D]``.
        counts: Number of those rows ``[L]``.
        networks: J, the number of networks.
        options: Options of the matching.
        biased: Whether the last column is the neurons' biases.

    Returns:
        Scores ``[L_j, L]`` or, with ``grow``, ``[L_j, L + L_j]``.
    """

    def gain(sums: Tensor, precisions: Tensor) -> Tensor:
        squares = sums.square().sum(1)
        joint = squares + 2 * scaled @ sums.T + scaled.square().sum(1, keepdim=True)
        return joint / (precisions + 1 / options.sigma) - squares / precisions

    scaled = rows / options.sigma
    prior = torch.full_like(rows[:1], options.mu0 / options.sigma0)
    if biased and options.bias_mu0 is not None:
        prior[:, -1] = options.bias_mu0 / options.sigma0
    old = gain(prior + sums / options.sigma, 1 / options.sigma0 + counts / options.sigma)
    if not options.grow:  # all neurons are equally popular then
        return old
    popularity = 2 * (counts / (networks - counts)).log()
    if options.compat_ibm:
        capped = counts.clamp(max=10)
        popularity = (capped / (networks - capped)).log()
    ranks = torch.arange(1, len(rows) + 1).to(rows)
    new = gain(prior, torch.full_like(rows[0, :1], 1 / options.sigma0))
    return torch.cat([old + popularity, new + 2 * (options.gamma / networks / ranks).log()], dim=1)


def _move(tensor: Tensor, place: Tensor, width: int) -> Tensor:
    """Move block i of the first dimension to ``place[i]`` of ``width``; other places are zeros."""
    blocks = tensor.reshape(len(place), -1)
    moved = blocks.new_zeros(width, blocks.shape[1])
    moved[place] = blocks
    return moved.reshape(-1, *tensor.shape[1:])


def _move_inputs(weight: Tensor, place: Tensor, width: int) -> Tensor:
    """Move the inputs of a layer ``[width, inputs, ...]``, a block for each neuron before it."""
    return _move(weight.transpose(0, 1), place, width).transpose(0, 1)


# Averaging


def align(state: State, center: State, chain: Chain) -> dict[str, Tensor]:
    """Return a copy of a state with its neurons permuted to be nearest to another state's.

    In each layer, the sum of squared distances between rows is minimal.
    """
    _, places = match([center, state], chain, BBPMAP(passes=0))
    return permute(state, chain, places)


def matched_mean(
    states: Sequence[State],
    chain: Chain,
    class_counts: Tensor | None = None,
    options: BBPMAP = BBPMAP(),
    random: torch.Generator | None = None,
) -> dict[str, Tensor]:
    r"""Average the states of J networks after matching their neurons.

    A neuron's value is the mean over the networks that have it. The last layer, including its bias,
    is averaged for each class with weights by samples,
    :math:`\sum_j n_{jc} w_{jc} / \sum_j n_{jc}`, or without weights if no network has samples of
    the class. Integer buffers take their maximum, all other entries the plain mean.

    Args:
        states: The states of the networks.
        chain: Their layers.
        class_counts: Training samples of each class ``[J, classes]``, by default equal ones.
        options: Options of the matching.
        random: As in :func:`match_rows`.

    Returns:
        One state, which is wider if ``options.grow`` has added neurons.
    """
    places = match(states, chain, options, random)
    networks, widths = len(states), []
    weights: dict[str, Tensor] = {}  # the share of each network in each neuron, [J, width]
    for layer, found in zip(chain, zip(*places, strict=True), strict=False):
        widths.append(1 + max(int(place.max()) for place in found))
        members = torch.zeros(networks, widths[-1], dtype=torch.double)
        for row, place in zip(members, found, strict=True):
            row[place] = 1
        weights |= dict.fromkeys(layer.tensors, members)
    hidden = dict(weights)
    if class_counts is not None:
        counts = class_counts.double()
        counts = torch.where(counts.sum(0) > 0, counts, 1.0)
        weights |= dict.fromkeys(chain[-1].weights, counts)
    moved = [permute(s, chain, p, widths) for s, p in zip(states, places, strict=True)]
    plain = torch.ones(networks, 1, dtype=torch.double)
    mean = {
        name: _mean(torch.stack([state[name] for state in moved]), weights.get(name, plain))
        for name in moved[0]
    }
    if options.estimate == "map":
        for layer in chain[:-1]:
            for name in layer.weights:
                prior = options.mu0
                if name == layer.bias and options.bias_mu0 is not None:
                    prior = options.bias_mu0
                mean[name] = _shrink(mean[name], hidden[name].sum(0), prior, options)
    return mean


class MatchedMean:
    """Collects stacks of states in groups, and averages each group with :func:`matched_mean`.

    It is used in place of :class:`~pflight.states.state.WeightedMean`, but keeps all states until
    the end.

    Args:
        chain: The layers of the networks.
        class_counts: Training samples of every client by class ``[num_clients, classes]``.
        groups: Number of means.
        options: Options of the matching.
        keys: Keys of the random order of the matching, such as seed and round.
    """

    def __init__(
        self, chain: Chain, class_counts: Tensor, groups: int, options: BBPMAP, keys: Sequence[int]
    ) -> None:
        self.chain = chain
        self.class_counts = class_counts
        self.options = options
        self.keys = keys
        self.weights = torch.zeros(groups)
        self._added: list[tuple[Tensor, Tensor, TensorDict]] = []

    def add(self, states: TensorDict, clients: Tensor, groups: Tensor) -> None:
        """Add the states ``[C]`` of clients ``[C]`` to groups ``[C]``."""
        self._added.append((clients.cpu(), groups.cpu(), states.cpu()))

    def all_reduce(self) -> None:
        """Gather the states of all ranks; every rank has to call it."""
        self._added = [added for rank in gather(self._added) for added in rank]
        for _, groups, _ in self._added:
            self.weights += groups.bincount(minlength=len(self.weights))

    def compute(self) -> dict[int, TensorDict]:
        """Return the mean of each group with members, matched in the order of their ids."""
        members: dict[int, dict[int, State]] = {}
        for clients, groups, states in self._added:
            for row, client in enumerate(clients.tolist()):
                members.setdefault(int(groups[row]), {})[client] = states[row]
        means = {}
        for group, held in sorted(members.items()):
            ids = sorted(held)
            mean = matched_mean(
                [held[client] for client in ids],
                self.chain,
                self.class_counts[ids],
                self.options,
                generator(Purpose.SERVER, *self.keys, group),
            )
            means[group] = TensorDict(mean)
        return means


def _mean(values: Tensor, weights: Tensor) -> Tensor:
    """Average tensors ``[J, width * block, ...]`` with weights ``[J, width]``; or the maximum."""
    if not values.is_floating_point():
        return values.amax(dim=0)
    shares = weights / weights.sum(0)
    blocks = values.reshape(*weights.shape, -1).to(torch.promote_types(values.dtype, torch.float32))
    mean = (shares.to(blocks).unsqueeze(2) * blocks).sum(0)
    return mean.to(values.dtype).reshape(values.shape[1:])


def _shrink(mean: Tensor, counts: Tensor, prior: float, options: BBPMAP) -> Tensor:
    """Return the MAP estimate of each neuron from the mean of its ``counts`` members."""
    precision = expand_as_right((counts / options.sigma).to(mean), mean)
    return (prior / options.sigma0 + precision * mean) / (1 / options.sigma0 + precision)
