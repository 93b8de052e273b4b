"""What all clients with personal models have in common, and their losses under ``vmap``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pflight.engines.joint import JointClient
from pflight.models import APFLClient, ClientModule, DittoClient, PerFedAvgClient, PFedMeClient
from pflight.models.personal import PersonalClient
from pflight.state import StateLayout, StateModule, state_tensors
from tests.runs import (
    CLASSES,
    FEATURES,
    assert_same,
    batchnorm_client,
    linear_client,
    network_client,
    quiet_trainer,
    small_data,
)

CLIENTS: dict[str, Callable[..., ClientModule]] = {
    "Ditto": lambda make: make(DittoClient, lam=0.5),
    "APFL": lambda make: make(APFLClient, alpha=0.75),
    "APFL-adaptive": lambda make: make(APFLClient, alpha=0.75, alpha_lr=0.1),
    "pFedMe": lambda make: make(PFedMeClient, lam=2.0, personal_steps=3),
    "Per-FedAvg": lambda make: make(PerFedAvgClient, alpha=0.2),
    "Per-FedAvg-Hessian": lambda make: make(PerFedAvgClient, alpha=0.2, hessian=True),
}
ALL = pytest.mark.parametrize("name", CLIENTS)


def changed(client: ClientModule, seed: int) -> dict[str, Tensor]:
    """Return a client's state with other numbers in it."""
    random = torch.Generator().manual_seed(seed)
    return {
        name: t + 0.3 * torch.rand(t.shape, generator=random) if t.is_floating_point() else t + seed
        for name, t in state_tensors(client).items()
    }


def batches(count: int, size: int = 9) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(3)
    x = torch.randn(count, size, FEATURES, generator=random, dtype=torch.float64)
    return x, torch.randint(CLASSES, (count, size), generator=random)


@ALL
def test_many_at_once_have_the_gradients_and_buffers_of_each_alone(name: str) -> None:
    client = CLIENTS[name](batchnorm_client).double()
    layout = StateLayout.of(client)
    anchor = {n: layout.template[n] for n in layout.parameters}
    states = [changed(client, seed) for seed in range(3)]
    x, y = batches(3)

    alone = []
    for row, state in enumerate(states):
        single = CLIENTS[name](batchnorm_client).double()
        single.load_state_dict(state)
        single.anchor = StateModule(anchor, persistent=False)
        loss = single.loss((x[row], y[row]))
        loss.backward()
        alone.append((loss.detach(), single))

    joint = JointClient(client, layout)
    joint.prepare(anchored=True, remembers=False)
    stack = {n: torch.stack([state[n] for state in states]) for n in layout.names}
    parameters = {n: stack[n] for n in layout.parameters}
    others = {n: value for n, value in stack.items() if n not in parameters}
    others |= {f"anchor.{n}": value.expand(3, *value.shape) for n, value in anchor.items()}
    gradients, losses = joint.gradients(parameters, others, x, y)
    for row, (loss, single) in enumerate(alone):
        torch.testing.assert_close(losses[row], loss)
        for parameter_name, parameter in single.named_parameters():
            gradient = gradients[parameter_name][row]
            expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)
        for buffer_name in layout.buffers:
            after = state_tensors(single)[buffer_name]
            torch.testing.assert_close(others[buffer_name][row], after, rtol=1e-10, atol=1e-12)


@ALL
@pytest.mark.parametrize("make", [linear_client, batchnorm_client])
def test_without_an_anchor_it_is_a_plain_client(name: str, make: Callable[..., object]) -> None:
    data = small_data(counts=[12])
    client, plain = CLIENTS[name](make), make()
    for module in (client, plain):
        torch.manual_seed(0)
        quiet_trainer(2).fit(module, datamodule=data.client(0))
    state = client.state_dict()
    assert_same({n: state[n] for n in plain.state_dict()}, dict(plain.state_dict()))


def networks() -> dict[str, nn.Module]:
    tied = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, FEATURES))
    tied[2].weight = tied[0].weight
    frozen = nn.Sequential(nn.Linear(FEATURES, 5), nn.BatchNorm1d(5), nn.Linear(5, CLASSES))
    frozen[0].requires_grad_(False)
    return {"tied": nn.Sequential(tied, nn.Linear(FEATURES, CLASSES)), "frozen": frozen}


@ALL
@pytest.mark.parametrize("kind", ["tied", "frozen"])
def test_tied_and_frozen_weights(name: str, kind: str) -> None:
    client = CLIENTS[name](lambda *a, **k: network_client(networks()[kind], *a, **k)).double()
    layout = StateLayout.of(client)
    client.anchor = StateModule({n: layout.template[n] for n in layout.parameters})
    before = {n: value.clone() for n, value in client.state_dict().items()}
    optimizer = client.configure_optimizers()
    x, y = batches(2)
    for batch in zip(x, y, strict=True):
        optimizer.zero_grad()
        client.loss(batch).backward()
        optimizer.step()
    state = client.state_dict()
    if kind == "tied":
        assert torch.equal(state["network.0.0.weight"], state["network.0.2.weight"])
        assert not torch.equal(state["network.0.0.weight"], before["network.0.0.weight"])
        assert "personal.0.2.weight" not in state
    else:
        assert torch.equal(state["network.0.weight"], before["network.0.weight"])
        assert "personal.0.weight" not in state


def test_the_personal_model_is_a_copy_of_all_that_may_change() -> None:
    client = batchnorm_client(PersonalClient)
    state = client.state_dict()
    network = [n for n in state if n.startswith("network.")]
    assert {f"personal.{n.removeprefix('network.')}" for n in network} == state.keys() - {*network}
    for n in network:
        own = state[n.replace("network", "personal")]
        assert torch.equal(own, state[n])
        assert own.data_ptr() != state[n].data_ptr()
