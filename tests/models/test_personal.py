"""What all halves with personal models have in common, and their losses under ``vmap``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from lightning.pytorch.plugins import Precision
from torch import Tensor, nn

from pflight import Federation
from pflight.callbacks import APFL, Ditto, PerFedAvg, PFedMe, ServerCallback
from pflight.engines.alone.client import LocalModels
from pflight.engines.alone.copies import ready
from pflight.engines.client_setup import ClientSetup
from pflight.engines.stacked.stack import ANCHOR, Stack
from pflight.method import OWN, PERSONAL, ClientMethod, layout_with
from pflight.models import Classifier
from pflight.models.client_methods import Personal
from pflight.states.state import StateLayout
from tests.runs import (
    CLASSES,
    FEATURES,
    assert_same,
    batchnorm_client,
    network_client,
    run,
    small_data,
)

METHODS: dict[str, Callable[[], ServerCallback]] = {
    "Ditto": lambda: Ditto(lam=0.5),
    "APFL": lambda: APFL(alpha=0.75),
    "APFL-adaptive": lambda: APFL(alpha=0.75, alpha_lr=0.1),
    "pFedMe": lambda: PFedMe(lam=2.0, personal_steps=3),
    "Per-FedAvg": lambda: PerFedAvg(alpha=0.2),
    "Per-FedAvg-Hessian": lambda: PerFedAvg(alpha=0.2, hessian=True),
}
ALL = pytest.mark.parametrize("name", METHODS)
SCALARS = ("num_samples", "mean_samples", "seen", "num_steps")


def setting_of(client: Classifier, client_method: ClientMethod) -> ClientSetup:
    layout, data = (
        layout_with(client_method, StateLayout.of(client)),
        small_data(dtype=torch.float64),
    )
    return ClientSetup(
        client, client_method, layout, data, Precision(), torch.device("cpu"), seed=0
    )


def changed(layout: StateLayout, seed: int) -> dict[str, Tensor]:
    """Return a client's state with other numbers in it."""
    random = torch.Generator().manual_seed(seed)
    return {
        name: t + 0.3 * torch.rand(t.shape, generator=random) if t.is_floating_point() else t + seed
        for name, t in layout.template.items()
    }


def batches(count: int, size: int = 9) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(3)
    x = torch.randn(count, size, FEATURES, generator=random, dtype=torch.float64)
    return x, torch.randint(CLASSES, (count, size), generator=random)


@ALL
def test_many_at_once_have_the_gradients_and_buffers_of_each_alone(name: str) -> None:
    client, client_method = batchnorm_client().double(), METHODS[name]().client_method
    setup = setting_of(client, client_method)
    layout = setup.layout
    states = [changed(layout, seed) for seed in range(3)]
    x, y = batches(3)

    models = LocalModels(setup)
    alone: list[tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]] = []
    for row, state in enumerate(states):
        models.load(state, anchored=True)
        gradients, total = {}, torch.zeros((), dtype=torch.float64)
        for model in models.clients:
            loss = model.client_method.loss(model, (x[row], y[row]))
            prefix = "" if model.shared is None else PERSONAL
            found = torch.autograd.grad(loss, list(model.weights.values()), allow_unused=True)
            named = zip(model.weights.items(), found, strict=True)
            gradients |= {
                f"{prefix}{n}": torch.zeros_like(w) if g is None else g for (n, w), g in named
            }
            total = total + loss.detach()
        alone.append((gradients, total, {n: t.clone() for n, t in models.state().items()}))

    stacked = Stack(ready(client), client_method, layout)
    stack = {n: torch.stack([state[n] for state in states]) for n in layout.names}
    parameters = {n: stack[n] for n in stacked.trained()}
    others = {n: value for n, value in stack.items() if n not in parameters}
    others |= {f"{ANCHOR}{n}": stack[n].clone() for n in stacked.parameters}
    others |= {n: torch.zeros(3, dtype=torch.float64) for n in SCALARS}
    gradients, losses, *_ = stacked.gradients(parameters, others, (x, y))
    for row, (expected, loss, after) in enumerate(alone):
        torch.testing.assert_close(losses[row], loss)
        for n, gradient in expected.items():
            torch.testing.assert_close(gradients[n][row], gradient, rtol=1e-10, atol=1e-12)
        for n in layout.buffers:
            torch.testing.assert_close(others[n][row], after[n], rtol=1e-10, atol=1e-12)


@ALL
def test_without_an_anchor_their_loss_is_the_clients_own(name: str) -> None:
    """As when they are fine-tuned."""
    client, client_method = batchnorm_client().double(), METHODS[name]().client_method
    pairs = [
        LocalModels(setting_of(client, client_method))
        for client_method in (client_method, ClientMethod())
    ]
    x, y = (part[0] for part in batches(1))
    results = []
    for models in pairs:
        state = changed(StateLayout.of(client), 1)
        template = models.setup.layout.template
        models.load({**template, **state}, anchored=False)
        (model,) = models.clients
        loss = model.client_method.loss(model, (x, y))
        loss.backward()
        results.append({n: w.grad.clone() for n, w in model.weights.items()} | {"loss": loss})
    assert_same(*results)


def networks() -> dict[str, nn.Module]:
    tied = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, FEATURES))
    tied[2].weight = tied[0].weight
    frozen = nn.Sequential(nn.Linear(FEATURES, 5), nn.BatchNorm1d(5), nn.Linear(5, CLASSES))
    frozen[0].requires_grad_(False)
    return {"tied": nn.Sequential(tied, nn.Linear(FEATURES, CLASSES)), "frozen": frozen}


@pytest.mark.short(
    "tied-Ditto",
    "tied-APFL",
    "tied-Per-FedAvg-Hessian",
    "frozen-APFL-adaptive",
    "frozen-pFedMe",
    "frozen-Per-FedAvg",
)
@ALL
@pytest.mark.parametrize("kind", ["tied", "frozen"])
def test_tied_and_frozen_weights(name: str, kind: str) -> None:
    client = network_client(networks()[kind]).double()
    before = {n: value.clone() for n, value in client.state_dict().items()}

    def fit(engine: str) -> Federation:
        data = small_data(dtype=torch.float64)
        return run(client, data, METHODS[name](), 2, local_epochs=2, engine=engine)

    one, many = fit("sequential"), fit("vectorized")
    assert many.clients.attached_engine.obstacle is None
    for i in range(6):
        state = one.client_state(i)
        torch.testing.assert_close(state, many.client_state(i), rtol=1e-9, atol=1e-10)
        if kind == "tied":
            assert torch.equal(state["network.0.0.weight"], state["network.0.2.weight"])
            assert not torch.equal(state["network.0.0.weight"], before["network.0.0.weight"])
        else:
            assert torch.equal(state["network.0.weight"], before["network.0.weight"])
    copied = [n for n in one.layout.names if n.startswith((PERSONAL, f"{OWN}theta."))]
    held = "network.0.2.weight" if kind == "tied" else "network.0.weight"
    assert not any(n.endswith(held) for n in copied)


def test_the_personal_model_is_a_copy_of_all_that_may_change() -> None:
    client = batchnorm_client()
    client.network[0].requires_grad_(False)
    plain = StateLayout.of(client)
    layout = layout_with(Personal(ClientMethod()), plain)
    live = [n for n in plain.names if n not in plain.frozen]
    assert {n for n in layout.own if n.startswith(PERSONAL)} == {f"{PERSONAL}{n}" for n in live}
    for n in live:
        own = layout.template[f"{PERSONAL}{n}"]
        assert torch.equal(own, layout.template[n])
