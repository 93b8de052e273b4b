"""Modifiers: what can be added to any method, such as private layers or a further term of the loss.

A server callback takes them as its option ``modifiers``:

>>> from pflight.callbacks import FeSEM
>>> FeSEM(num_clusters=4, modifiers=[Private("head"), Proximal(mu=0.1)]).modifiers
{'private': Private(layers='head', keep=True), 'proximal': Proximal(mu=0.1, scaling='plain')}
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from lightning import LightningModule
from torch import Tensor, nn

from .errors import ConfigurationError
from .local_client import LocalClient, Passed
from .messages import listed
from .options import NonNegativeFloat, checked
from .states.head import EXTRA
from .states.layers import Layers, own_head
from .states.state import StateLayout

_NORMS = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
)


CONSTRAINT = "fedec/constraint"
"""The tag of the mean of FedEC's constraint."""
_SHOWN = 60  # letters of what was given instead, in messages


class Modifier:
    """Something that is added to a method; it holds options alone.

    A server callback has at most one modifier of a name. Modifiers with the same options are equal.

    Attributes:
        name: Its name in configurations and results, by default that of the class in lower case.
        kind: ``"private"``, ``"term"`` or ``"transform"``: what methods accept or refuse.
        replaces: ``"step"`` if it takes the place of the training step. At most one may.
    """

    name: ClassVar[str]
    kind: ClassVar[Literal["private", "term", "transform"] | None] = None
    replaces: ClassVar[Literal["step"] | None] = None

    def __init_subclass__(cls) -> None:
        """Name a modifier after its class, unless the class itself defines a name."""
        if "name" not in vars(cls):
            cls.name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()

    @property
    def neutral(self) -> bool:
        """Whether it changes nothing. It is then left out, so that no bit differs."""
        return False

    @property
    def needs_head(self) -> bool:
        """Whether the head of the clients' network has to be known."""
        return False

    @property
    def title(self) -> str:
        """Its name in tables of results, such as ``"private head"``."""
        return self.name.replace("_", " ")

    def __eq__(self, other: object) -> bool:
        """Return whether two modifiers are of one class and have the same options."""
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(type(self))

    def __repr__(self) -> str:
        """Return the class with its options, as in Python."""
        options = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({options})"


LayerNames = str | Layers | Sequence[str | Layers]
"""What :class:`Private` and :class:`Frozen` take."""


class OfLayers(Modifier):
    """A modifier of some layers of the user's module.

    Args:
        layers: ``"head"``, ``"body"`` for all but the head, ``"norms"`` for all layers that
            normalise, a pattern of names such as ``"*lora_B*"``, a selection of
            :class:`~pflight.Layers`, or a list of these. A pattern matches names of entries, or of
            modules with all that is in them.
    """

    def __init__(self, layers: LayerNames) -> None:
        chosen = layers if isinstance(layers, str | Layers) else [*layers]
        name = type(self).__name__
        if not chosen:
            raise ConfigurationError(f"{name}: name the layers")
        for one in chosen if isinstance(chosen, list) else []:
            if not isinstance(one, str | Layers):
                raise ConfigurationError(f"{name}: layers must be names or Layers, got {one!r}")
        if isinstance(chosen, list):  # whose order and repetitions mean nothing
            first, *others = sorted(dict.fromkeys(chosen), key=str)
            chosen = [first, *others] if others else first
        self.layers = chosen

    @property
    def title(self) -> str:
        """Its name and the layers."""
        words = [one if isinstance(one, str) else "layers" for one in self._chosen]
        return f"{self.name} {' and '.join(words)}"

    @property
    def _chosen(self) -> list[str | Layers]:
        return [self.layers] if isinstance(self.layers, str | Layers) else [*self.layers]

    @property
    def needs_head(self) -> bool:
        """Whether the head is among the layers, or all but the head."""
        return any(
            one.head if isinstance(one, Layers) else one in ("head", "body") for one in self._chosen
        )

    def names(self, module: nn.Module, layout: StateLayout) -> set[str]:
        """Return the names of these entries of the user's module.

        Args:
            module: The client module.
            layout: The layout of its state.

        Raises:
            ConfigurationError: If one of the patterns matches nothing.
        """
        added = {*layout.own, *layout.extra}
        own = {
            layer: names
            for layer, names in layout.layers.items()
            if layer != EXTRA and not layer.startswith(f"{EXTRA}.") and added.isdisjoint(names)
        }
        return set().union(*(self._find(one, module, layout, own) for one in self._chosen))

    def _find(
        self,
        chosen: str | Layers,
        module: nn.Module,
        layout: StateLayout,
        layers: Mapping[str, tuple[str, ...]],
    ) -> set[str]:
        """Return the names of the entries that one selection or pattern means."""
        every = {name for names in layers.values() for name in names}
        if isinstance(chosen, Layers):
            found = {n for layer in chosen.of(module) for n in layers.get(layer, ())}
            reason = f"{chosen} selects no layer with a tensor"
        elif chosen in ("head", "body"):
            head = f"{own_head(module)}."
            found = {name for name in every if name.startswith(head) == (chosen == "head")}
            reason = f"{type(module).__name__} has no {chosen}"
        elif chosen == "norms":
            found = {
                n
                for layer, names in layers.items()
                if isinstance(module.get_submodule(layer), _NORMS)
                for n in names
            }
            reason = f"{type(module).__name__} has no layer that normalises"
        else:
            inside = f"{chosen}.*"
            first = {name: name for name in every} | layout.aliases
            found = {
                first[name]
                for name in first
                if fnmatchcase(name, chosen) or fnmatchcase(name, inside)
            }
            reason = f"{chosen!r} matches none of {listed(sorted(every), chosen)}"
        if not found:
            raise ConfigurationError(f"{type(self).__name__}: {reason}")
        return found


@checked
class Private(OfLayers):
    """Keeps entries of the model with each client: they never travel.

    With FedAvg, a private head is FedPer, private normalisation is FedBN, and a private body is
    LG-FedAvg. Buffers of private layers are private as well, whatever ``buffers`` says of others.

    Args:
        layers: As in :class:`OfLayers`.
        keep: Whether a client keeps these entries. With ``False`` they start anew in each
            participation.

    Raises:
        ConfigurationError: Before the start, if a pattern matches nothing.

    Example:
        >>> network = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        >>> sorted(Private("head").names(network, StateLayout.of(network)))
        ['2.bias', '2.weight']
    """

    kind = "private"

    def __init__(self, layers: LayerNames = "head", keep: bool = True) -> None:
        super().__init__(layers)
        self.keep = keep

    @property
    def title(self) -> str:
        """``"private"`` and the layers."""
        return super().title + " (not kept)" * (not self.keep)


@checked
class Frozen(OfLayers):
    """Keeps layers as they are in the client module: nobody trains them, and they never travel.

    With FedAvg and fine-tuning, a frozen head is FedBABU. ``"*lora_A*"`` is FFA-LoRA. As for any
    frozen layer, checkpoints hold digests of these weights.

    Args:
        layers: As in :class:`OfLayers`.

    Raises:
        ConfigurationError: Before the start, if a pattern matches nothing, or nothing is left to
            train.
    """

    def __init__(self, layers: LayerNames = "head") -> None:
        super().__init__(layers)


class Term(Modifier):
    """Adds a term to the loss that each client minimises.

    It sees entries that travel and the model as the server sent it. Several terms add up. Those of
    a method with a personal copy are added to the copy that is shared.

    Attributes:
        averages_samples: Whether it is a mean over samples or independent of them. Only then may
            batches be padded.
        needs_mean_samples: Whether it looks at the mean number of samples of all clients.
        needs_logits: Whether it looks at :attr:`~pflight.local_client.Passed.logits`. The method's
            loss must then make one pass of a batch.
        remembers: Whether clients keep the model that they have after training, for
            ``c.memory_of(self)`` in their next participation.
        judges: Whether clients are judged by this model, unless the method has its own rule.
        notes: Tags of the scalars that it notes in a step, with
            :meth:`~pflight.local_client.LocalClient.note`.
    """

    kind = "term"
    averages_samples: ClassVar[bool] = True
    remembers: ClassVar[bool] = False
    judges: ClassVar[bool] = False
    notes: ClassVar[tuple[str, ...]] = ()

    @property
    def needs_mean_samples(self) -> bool:
        """Whether it looks at the mean number of samples of all clients."""
        return False

    @property
    def needs_logits(self) -> bool:
        """Whether it looks at the logits of the client's pass."""
        return False

    def check(self, module: LightningModule) -> None:
        """Raise if a module lacks what it needs.

        Raises:
            ConfigurationError: In one line, before the start.
        """

    def value(self, c: Passed) -> Tensor | None:
        """Return a scalar, a function of tensors; ``None`` for nothing."""
        raise NotImplementedError(f"{type(self).__name__} does not define value()")


@checked
class Proximal(Term):
    r"""Pulls a client's parameters towards those that the server sent.

    The term is :math:`\frac{\mu}{2}\|w - \theta\|^2` (FedProx, Li et al. 2020, eq. 2) over the
    parameters that travel. With FedAvg it is FedProx.

    Args:
        mu: Weight :math:`\mu`; with 0 there is no term.
        scaling: ``"plain"``, or ``"eq7"`` for the weight of FeSEM (Long et al. 2022, eq. 7):
            :math:`\mu\,\bar n / n_i` in place of :math:`\mu / 2`, where :math:`n_i` is the client's
            number of samples and :math:`\bar n` the mean number.

    References:
        Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020,
        https://arxiv.org/abs/1812.06127.
    """

    def __init__(
        self, mu: NonNegativeFloat = 0.1, scaling: Literal["plain", "eq7"] = "plain"
    ) -> None:
        self.mu = mu
        self.scaling = scaling

    @property
    def neutral(self) -> bool:
        """Whether there is no pull."""
        return self.mu == 0

    @property
    def needs_mean_samples(self) -> bool:
        """Whether the weight depends on the mean number of samples."""
        return self.scaling == "eq7"

    def value(self, c: Passed) -> Tensor | None:
        """Return the scalar term; none if nothing was sent, as in fine-tuning."""
        return pull(c, self.mu, self.scaling)


def pull(c: LocalClient | Passed, mu: float, scaling: str) -> Tensor | None:
    """Return :class:`Proximal`'s term of a client, a scalar; ``None`` if nothing was sent."""
    if c.anchor is None:
        return None
    distance = squared_distance(c.weights, c.anchor)
    if scaling == "plain":
        return mu / 2 * distance
    return mu * c.mean_samples / c.num_samples * distance


@checked
class Elastic(Term):
    r"""Holds a client to the model that it had after its last participation.

    This is FedEC's constraint (Lan et al. 2023, eq. 6). With Reptile it is FedEC. A client that has
    taken part before adds :math:`\alpha\,\mathrm{KL}(\hat p \,\|\, p)`, a mean over the batch. Here
    :math:`p` are the predictions of its network and :math:`\hat p` those of its historical model.
    With ``constraint="l2"`` the term is :math:`\frac{\alpha}{2}\|w - \hat w\|^2` over all
    parameters that travel. Clients are judged by their historical models.

    Args:
        alpha: Weight :math:`\alpha`.
        constraint: ``"kl"``, which needs logits; ``"l2"``; or ``None`` for no term. With ``None``
            clients are still judged by their historical models.

    References:
        Lan et al., Elastically-Constrained Meta-Learner for Federated Learning, 2023,
        https://arxiv.org/abs/2306.16703.
    """

    remembers = True
    judges = True
    notes = (CONSTRAINT,)

    def __init__(
        self, alpha: NonNegativeFloat = 1.0, constraint: Literal["kl", "l2"] | None = "kl"
    ) -> None:
        self.alpha = alpha
        self.constraint = constraint

    @property
    def title(self) -> str:
        """Its name, with the constraint if it is not the usual one."""
        return "elastic" if self.constraint == "kl" else f"elastic {self.constraint or 'without'}"

    @property
    def needs_logits(self) -> bool:
        """Whether it compares predictions."""
        return self.constraint == "kl" and self.alpha > 0

    def check(self, module: LightningModule) -> None:
        """Raise if predictions are to be compared for a module without classes."""
        check_classes(self.constraint, module)

    def value(self, c: Passed) -> Tensor | None:
        """Return the scalar term; none without a history."""
        if not self.alpha or self.constraint is None:
            return None
        if (history := c.memory_of(self)) is None:
            return None
        if self.constraint == "l2":
            return to_history(c, history, self.alpha)
        return to_predictions(c, c.logits, history, self.alpha)


def check_classes(constraint: str | None, module: LightningModule) -> None:
    """Raise if FedEC's divergence is chosen for a module without classes.

    Raises:
        ConfigurationError: With another choice.
    """
    if constraint == "kl" and not hasattr(module, "num_classes"):
        raise ConfigurationError(
            "FedEC's constraint 'kl' compares logits, but "
            f"{type(module).__name__} has no num_classes, so its forward may give none: "
            "use constraint='l2'"
        )


def to_history(c: LocalClient | Passed, history: Mapping[str, Tensor], alpha: float) -> Tensor:
    """Return half of the squared distance of the parameters that travel to a history, weighted."""
    names = c.weights if c.anchor is None else c.anchor
    value = alpha / 2 * c.seen * squared_distance(c.weights, {n: history[n] for n in names})
    c.note(CONSTRAINT, value, c.seen)
    return value


def to_predictions(
    c: LocalClient | Passed, logits: Tensor, history: Mapping[str, Tensor], alpha: float
) -> Tensor:
    """Return the divergence of predictions from those of a history, a mean, weighted."""
    before = c.logits_with(history)
    parts = F.kl_div(
        logits.log_softmax(dim=1), before.log_softmax(dim=1), log_target=True, reduction="none"
    )
    value = alpha * c.seen * c.mean(parts)
    c.note(CONSTRAINT, value, c.seen)
    return value


def squared_distance(weights: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> Tensor:
    """Return the squared L2 distance, a scalar, of parameters to others, over their names."""
    distance = torch.zeros((), device=next(iter(weights.values())).device)
    for name in others:
        distance = distance + (weights[name] - others[name]).square().sum()
    return distance


def by_name(
    owner: str, given: Mapping[str, Modifier] | Iterable[Modifier] | None
) -> dict[str, Modifier]:
    """Return modifiers by name, sorted.

    Args:
        owner: The server callback, for messages.
        given: Modifiers in a list, or by name.

    Raises:
        ConfigurationError: If two have the same name, one is under another name than its own, or
            something else is given.
    """
    if not isinstance(given, Mapping | list | tuple | None):
        raise ConfigurationError(
            f"{owner}: modifiers must be a list, or a mapping by name, got {_short(given)}"
        )
    pairs = [*given.items()] if isinstance(given, Mapping) else [(None, one) for one in given or ()]
    found: dict[str, Modifier] = {}
    for key, one in pairs:
        if not isinstance(one, Modifier):
            raise ConfigurationError(
                f"{owner}: modifiers must be objects of pflight.modifiers, got {_short(one)}"
            )
        if key not in (None, one.name):
            raise ConfigurationError(
                f"{owner}: the modifier {type(one).__name__} is called {one.name}, not {key}"
            )
        if one.name in found:
            raise ConfigurationError(
                f"{owner}: two modifiers are called {one.name}: give one that does all"
            )
        found[one.name] = one
    return {name: found[name] for name in sorted(found)}


def _short(value: object) -> str:
    words = repr(value)
    return words if len(words) <= _SHOWN else f"{words[:_SHOWN]}..."


def check_owners(
    owner: str, what: str, names: Collection[str], owned: Collection[str], layout: StateLayout
) -> None:
    """Raise if a method has a rule of its own for a parameter that a modifier takes.

    Args:
        owner: The server callback.
        what: What the modifier can't do to them.
        names: Entries that the modifier takes.
        owned: Entries of which the method decides.
        layout: The layout of the module's state.

    Raises:
        ConfigurationError: Naming them.
    """
    if both := sorted({*names} & {*owned} & {*layout.parameters}):
        raise ConfigurationError(
            f"{owner}: {what} {', '.join(both)}, which {owner} itself keeps or replaces"
        )


def private_in(
    modifiers: Iterable[Modifier], module: LightningModule, layout: StateLayout
) -> set[str]:
    """Return the names of all entries that modifiers keep with the clients."""
    private = (one.names(module, layout) for one in modifiers if isinstance(one, Private))
    return set().union(*private)
