"""Entries that stay with the clients: nothing is computed of them but by the client."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
from torch import Tensor

from pflight.callbacks import SCAFFOLD, FedAvg, FedDANE, FedDyn, FedRep, FedSGD, Local, SharedPart
from pflight.errors import ConfigurationError
from pflight.local_client import LocalClient
from pflight.models import ProximalClient
from pflight.modifiers import Private
from pflight.states.layers import Layers
from pflight.states.state import StateLayout
from tests.algorithm_tester import assert_equal
from tests.runs import (
    ENGINES,
    assert_same,
    batchnorm_client,
    dropout_client,
    linear_client,
    run,
    small_data,
    watched,
)

HEAD = {"network.3.weight", "network.3.bias"}


@pytest.mark.parametrize(
    "callback",
    [SharedPart(Layers("network")), SharedPart(shared=Layers()), FedRep(head=Layers("network"))],
)
def test_if_nothing_is_sent_it_is_said(callback: FedAvg) -> None:
    with pytest.raises(ConfigurationError, match=r"nothing is sent, since all .* take Local"):
        run(batchnorm_client(), small_data(), callback, local_epochs=2)


def test_methods_without_a_model_to_send_need_no_shared_parameter() -> None:
    assert run(linear_client(), small_data(), Local()).layout.shared_parameters == ()


@ENGINES
def test_the_anchor_has_no_private_entries(engine: str) -> None:
    seen: list[tuple[set[str], set[str], bool]] = []

    def look(c: LocalClient) -> None:
        if c.anchor is not None and c.received is not None:
            inside = "network.3.weight" in c.anchor or "network.3.weight" not in c.received
            seen.append(({*c.anchor}, {*c.weights}, inside))

    client = watched(batchnorm_client(), look)
    run(client, small_data(), FedAvg(modifiers=[Private([*HEAD])]), engine=engine)
    assert seen
    for anchor, weights, inside in seen:
        assert weights - anchor == HEAD
        assert not inside


@ENGINES
def test_a_proximal_term_leaves_private_entries_alone(engine: str) -> None:
    """With a pull that holds all that it sees, the private part still learns."""
    client = batchnorm_client(ProximalClient, mu=9.9)
    federation = run(client, small_data(), SharedPart(Layers(last=1)), 2, engine=engine)
    again = run(client, small_data(), FedAvg(modifiers=[Private([*HEAD])]), 2, engine=engine)
    assert_equal(federation, again)


@pytest.mark.filterwarnings("ignore:FedSGD . P:UserWarning")
@pytest.mark.parametrize("kind", [FedSGD, FedDANE])
def test_a_gradient_is_not_kept_as_a_private_parameter(kind: type[FedAvg]) -> None:
    federation = run(dropout_client(), small_data(), kind(modifiers=[Private([*HEAD])]), 2)
    own, initial = federation.client_state(0), dropout_client().state_dict()
    if kind is FedSGD:
        assert_same({n: own[n] for n in HEAD}, {n: initial[n] for n in HEAD})
    for name in HEAD:
        assert (own[name] - initial[name]).abs().max() < 1


@pytest.mark.parametrize("kind", [SCAFFOLD, FedDyn, FedDANE])
def test_own_entries_are_of_shared_parameters(kind: type[FedAvg]) -> None:
    federation = run(dropout_client(), small_data(), kind(modifiers=[Private([*HEAD])]), 2)
    assert not [name for name in federation.layout.own if name.endswith(tuple(HEAD))]
    assert [name for name in federation.layout.own if name.endswith("network.0.weight")]


def test_a_later_run_knows_nothing_of_an_earlier_one() -> None:
    def plain() -> Any:
        return run(batchnorm_client(ProximalClient), small_data(), FedAvg(), 2)

    before = plain()
    run(batchnorm_client(ProximalClient), small_data(), FedAvg(modifiers=[Private([*HEAD])]), 2)
    assert_equal(before, plain())


class Leaking(FedAvg):
    """Says that the head is private, and sends it."""

    def private_names(self, module: L.LightningModule, layout: StateLayout) -> set[str]:
        return HEAD

    @property
    def sent_names(self) -> tuple[str, ...]:
        return self.clients.layout.names


class Asking(Leaking):
    """Asks for it alone."""

    sent_names = FedAvg.sent_names

    def round(self, cohort: Tensor) -> None:
        for _ in self.clients.train(cohort, self.broadcast, returns=HEAD):
            pass


@pytest.mark.parametrize("callback", [Leaking(), Asking()])
def test_what_is_private_does_not_travel(callback: FedAvg) -> None:
    said = f"{type(callback).__name__} sends what stays with the clients: network.3.bias, network"
    with pytest.raises(ConfigurationError, match=said):
        run(batchnorm_client(), small_data(), callback)
