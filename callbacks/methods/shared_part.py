"""Partial sharing: the server averages some layers, and the others stay with the clients."""

from __future__ import annotations

from itertools import chain
from typing import Any, Literal

import lightning as L
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from pflight.errors import ConfigurationError
from pflight.fedavg import FedAvg
from pflight.models.client_methods.fedrep import HeadFirst
from pflight.options import checked
from pflight.server_callback import chosen_client_method
from pflight.states.layers import Layers
from pflight.states.state import StateLayout

from .registry import Method


@checked
class SharedPart(FedAvg):
    r"""FedAvg over a part of the network, while the other part stays with each client.

    A client's model is :math:`(\theta, v_i)`, the shared part and its private part. It trains both
    together and sends :math:`\theta_i`; the server takes the mean
    :math:`\theta \leftarrow \sum_{i \in S} w_i \theta_i`. All private parts start as in the client
    module and never travel; buffers belong to their layer. A client is judged by the server's
    :math:`\theta` together with its :math:`v_i`. A newcomer has the initial private part, and
    trains it with ``finetune_epochs``.

    - FedPer (Arivazhagan et al. 2019): the head is private, ``private=Layers(head=True)``, or the
      last layers, ``private=Layers(last=2)``.
    - LG-FedAvg (Liang et al. 2020): all but the head is private, ``shared=Layers(head=True)``, or
      the first layers, with ``shared=Layers(last=2)``.
    - FedBN (Li et al. 2021): normalisation is private, ``private=Layers(types=nn.BatchNorm2d)``.

    With nothing private it is FedAvg. Nothing shared is an error: take
    :class:`~pflight.callbacks.Local`.

    Args:
        private: The layers that stay with the clients; by default all that are not ``shared``.
        shared: The layers that the server averages; by default all that are not ``private``.
        weighting: As in :class:`FedAvg`.
        buffers: As in :class:`ServerCallback`, for the shared layers.

    Raises:
        ConfigurationError: If neither part is given, or both are and a layer is not in exactly one,
            or no parameter of the shared layers is trained.

    Example:
        >>> callback = SharedPart(private=Layers(head=True))

    References:
        Arivazhagan et al., Federated Learning with Personalization Layers, 2019,
        https://arxiv.org/abs/1912.00818; Liang et al., Think Locally, Act Globally: Federated
        Learning with Local and Global Representations, 2020, https://arxiv.org/abs/2001.01523;
        Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization,
        ICLR 2021, https://arxiv.org/abs/2102.07623.
    """

    _kept: list[str]

    def __init__(
        self,
        private: Layers | None = None,
        shared: Layers | None = None,
        weighting: Literal["samples", "uniform"] = "samples",
        buffers: Literal["shared", "local", "reset"] = "shared",
    ) -> None:
        super().__init__(weighting, buffers)
        if private is None and shared is None:
            raise ConfigurationError(
                "SharedPart: give the layers that are private, or those that are shared"
            )
        self.private_layers = private
        self.shared_layers = shared

    @property
    def parts(self) -> dict[str, str]:
        """``"private"`` or ``"shared"`` for every layer by name."""
        return self._divide(self.clients.module, self.clients.layout)

    @property
    def algorithm_name(self) -> str:
        """FedPer, LG-FedAvg or FedBN, if it is one of these, else SharedPart."""
        private, shared = (
            [] if layers is None else [by for by, value in vars(layers).items() if value]
            for layers in (self.private_layers, self.shared_layers)
        )
        if (private, shared) in ((["last"], []), (["head"], [])):
            return "FedPer"
        if (private, shared) in (([], ["last"]), ([], ["head"])):
            return "LG-FedAvg"
        if (private, shared) == (["types"], []) and self.private_layers is not None:
            types: Any = self.private_layers.types
            kinds = types if isinstance(types, list | tuple) else [types]
            if all(issubclass(kind, nn.modules.batchnorm._BatchNorm) for kind in kinds):
                return "FedBN"
        return "SharedPart"

    @property
    def needs_head(self) -> bool:
        """Whether the head is among the named layers."""
        given = self.private_layers, self.shared_layers
        return super().needs_head or any(layers is not None and layers.head for layers in given)

    def private_names(self, module: L.LightningModule, layout: StateLayout) -> set[str]:
        """Return the names of the entries of private layers."""
        parts = self._divide(module, layout)
        private = [names for layer, names in layout.layers.items() if parts[layer] == "private"]
        return super().private_names(module, layout).union(*private)

    def layers_in(self, module: L.LightningModule) -> tuple[Layers | None, Layers | None]:
        """Return the private and the shared layers of a client module."""
        return self.private_layers, self.shared_layers

    def _warn_if_it_is_fedavg(self) -> None:
        """Warn if layers are named, but no private parameter is trained."""
        if all(layers in (None, Layers()) for layers in self.layers_in(self.clients.module)):
            return
        layout, parts = self.clients.layout, self.parts
        layers = [names for layer, names in layout.layers.items() if parts[layer] == "private"]
        held = [*chain.from_iterable(layers)]
        if {*layout.parameters}.isdisjoint(held):
            rank_zero_warn(
                f"{self.name_in_results} is FedAvg here: its private part has no parameter that is "
                f"trained; it has {', '.join(held) or 'no tensor'}"
            )

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print which layers are shared and which are private, and warn if these train nothing."""
        self._warn_if_it_is_fedavg()
        if not trainer.is_global_zero:
            return
        from rich.console import Console
        from rich.table import Table

        layout, parts, stay = self.clients.layout, self.parts, {*self.private}
        parts |= {layer: "private" for layer, names in layout.layers.items() if stay >= {*names}}
        table = Table("part", "layers", "parameters", title=type(self).__name__)
        for part in ("shared", "private"):
            layers = [layer for layer in parts if parts[layer] == part]
            names = {name for layer in layers for name in layout.layers[layer]}
            size = sum(layout.template[n].numel() for n in layout.parameters if n in names)
            table.add_row(part, ", ".join(layers), f"{size:,}")
        Console().print(table)

    def setup_server(self) -> None:
        """Make the server's model, and note the private layers."""
        super().setup_server()
        self.add_state("_kept", [*self.private])

    def on_state_loaded(self) -> None:
        """Check that the checkpoint has the same private layers."""
        if differing := {*self._kept} ^ {*self.private}:
            raise ConfigurationError(
                f"{type(self).__name__}: the checkpoint has other private layers; they differ in "
                f"{', '.join(sorted(differing))}"
            )

    def _divide(self, module: L.LightningModule, layout: StateLayout) -> dict[str, str]:
        """Return the part of every layer."""
        layers = layout.layers
        private, shared = (
            None if given is None else {*given.of(module)} for given in self.layers_in(module)
        )
        if private is None:
            private = {*layers} - (shared or set())
        for layer in layers:
            if shared is not None and (layer in private) == (layer in shared):
                which = "both private and shared" if layer in private else "in neither part"
                raise ConfigurationError(f"SharedPart: layer {layer} is {which}")
        return {layer: "private" if layer in private else "shared" for layer in layers}


@checked
class FedRep(SharedPart):
    r"""FedRep (Collins et al. 2021, algorithm 1): a shared body, and a head for each client.

    The head :math:`h_i` is private, the body :math:`\phi` shared. A client trains first its head
    and then the body, as in :class:`~pflight.models.client_methods.HeadFirst`. A newcomer has the
    initial head. With ``finetune_epochs`` up to ``head_epochs`` it trains only the head, as the
    authors do before they test.

    Args:
        weighting: As in :class:`FedAvg`.
        buffers: As in :class:`ServerCallback`, for the body.
        head: The layers of the head; by default as in :func:`~pflight.states.head.head_of`, or as
            in the client module's own client method.
        head_epochs: Local epochs of the head; by default 1.

    Raises:
        ConfigurationError: If the client module names another client method, if ``local_epochs`` is
            below ``head_epochs``, or if there is no body.

    References:
        Collins et al., Exploiting Shared Representations for Personalized Federated Learning, ICML
        2021, https://arxiv.org/abs/2102.07078.
    """

    def __init__(
        self,
        weighting: Literal["samples", "uniform"] = "samples",
        buffers: Literal["shared", "local", "reset"] = "shared",
        *,
        head: Layers | None = None,
        head_epochs: int | None = None,
    ) -> None:
        super().__init__(private=Layers(), weighting=weighting, buffers=buffers)  # see layers_in
        self.use_client_method(HeadFirst, head=head, head_epochs=head_epochs)

    @property
    def needs_head(self) -> bool:
        """Whether the head is private, and not other layers."""
        layers = getattr(self.client_method, "head", None)
        return layers is None or layers.head

    def layers_in(self, module: L.LightningModule) -> tuple[Layers | None, Layers | None]:
        """Return the client's head as the private layers."""
        client_method = chosen_client_method(self, module)
        assert isinstance(client_method, HeadFirst)
        return client_method.head_in(module), None

    def setup_server(self) -> None:
        """Make the server's model."""
        client_method = self.clients.client_method
        assert isinstance(client_method, HeadFirst)
        if self.clients.training.steps is not None:
            raise ConfigurationError(
                "FedRep counts local epochs: give local_epochs instead of local_steps"
            )
        if self.clients.training.epochs < client_method.head_epochs:
            raise ConfigurationError(
                f"FedRep: local_epochs={self.clients.training.epochs} must be at least "
                f"head_epochs={client_method.head_epochs}"
            )
        super().setup_server()


METHODS = (
    Method(
        "FedPer",
        SharedPart,
        "SharedPart(private=Layers(head=True))",
        "shared body, own head",
        manual=True,
        tested={"": {"private": Layers(last=1)}},
    ),
    Method(
        "LG-FedAvg",
        SharedPart,
        "SharedPart(shared=Layers(head=True))",
        "own body, shared head",
        manual=True,
        tested={"": {"shared": Layers(last=1)}},
    ),
    Method(
        "FedBN",
        SharedPart,
        "SharedPart(private=Layers(types=nn.BatchNorm2d))",
        "shared model, own BatchNorm",
        manual=True,
        tested={"": {"private": Layers(types=nn.modules.batchnorm._BatchNorm)}},
    ),
    Method("FedRep", FedRep, "FedRep(head_epochs=1)", "shared body, own head"),
)
