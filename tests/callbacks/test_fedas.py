"""FedAS (section 2a.6)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pflight.callbacks import FedAS
from pflight.states.head import EXTRA
from pflight.states.updates import ClientUpdates
from tests import networks_reference as reference
from tests.runs import ENGINES, assert_same, quiet_trainer, run
from tests.worlds import assert_rows, body, client_t, world_t

FISHER = f"{EXTRA}.fisher"


class Telling(FedAS):
    """Keeps what clients send."""

    def receive(self, updates: Any) -> None:
        super().receive(updates)
        self.told = updates.states


@ENGINES
@pytest.mark.parametrize("fisher", ["batch", "sample"])
def test_f1(engine: str, fisher: Any) -> None:
    """The first round leaves the models of world T, and the server then sends another body."""
    callback, data = Telling(align_lr=0.1, fisher=fisher), world_t()
    federation = run(client_t(), data, callback, 1, engine=engine)
    received = torch.tensor([[1.2, 0], [0.1, 0.9]], dtype=torch.float64)
    federation.server.tensors(0)["network.0.weight"].data.copy_(received)
    quiet_trainer(1, callback).fit(federation, datamodule=data)
    first, second = (federation.client_state(i) for i in range(2))
    assert_rows(body(first), [[1.200006, -0.008683], [0.080320, 0.935435]])
    assert_rows(body(second), [[1.138561, -0.012284], [0.154778, 0.934684]])
    expected = [0.180125, 0.416770] if fisher == "batch" else [0.369131, 0.837983]
    assert_rows(callback.told[FISHER], expected)
    if fisher == "batch":
        server = federation.server_states()[0]
        assert_rows(body(server), [[1.157104, -0.011197], [0.132309, 0.934911]])


@pytest.mark.parametrize("align", ["sample", "class"])
def test_f1s_alignment(align: Any) -> None:
    callback, data = FedAS(align, align_lr=0.1), world_t()
    federation = run(client_t(), data, callback, 1)
    received = torch.tensor([[1.2, 0], [0.1, 0.9]], dtype=torch.float64)
    federation.server.tensors(0)["network.0.weight"].data.copy_(received)
    both, clients = torch.arange(2), federation.clients
    starts = clients.outer_method.before_training(clients, both, callback.broadcast(both))
    aligned = starts["network.0.weight"]
    assert_rows(aligned[0], [[1.182124, -0.000773], [0.089227, 0.912124]])
    expected = [[1.143172, 0.009905], [0.121736, 0.904049]]
    if align == "class":
        expected = [[1.173172, -0.020095], [0.101736, 0.924049]]
    assert_rows(aligned[1], expected)


@pytest.mark.short("*-sequential")
@ENGINES
@pytest.mark.parametrize("align", ["sample", "class"])
def test_several_rounds(engine: str, align: Any) -> None:
    data, client, epochs = reference.data(), reference.client(), 2
    callback = FedAS(align, align_lr=0.3)
    federation = run(client, data, callback, 4, engine=engine, local_epochs=epochs)
    server, kept = copy.deepcopy(client.network), dict[int, nn.Sequential]()
    for round_, cohort in enumerate(reference.cohorts(federation)):
        models, weights = [], []
        for i in cohort:
            model, own = copy.deepcopy(server), data.samples(i, "train")
            order = reference.batches(data, round_, i, epochs)
            if i in kept:
                means = reference.class_means(kept[i], own)
                model[-1] = copy.deepcopy(kept[i][-1])
                align_to(model, own, order[: len(order) // epochs], means, align)
            reference.train(model, own, order, reference.cross_entropy)
            weights.append(fisher(model, own, data.batch_size))
            models.append(model)
            kept[i] = model
        initial, server = server[-1], reference.average(models, weights)
        server[-1] = initial
    reference.assert_network(federation.server_states()[0], server)
    for i in range(6):
        reference.assert_network(federation.client_state(i), kept.get(i, server))


def align_to(
    model: nn.Sequential,
    samples: tuple[Tensor, Tensor],
    order: list[Any],
    means: dict[int, Tensor],
    align: str,
) -> None:
    model.eval()
    parameters = list(model[:-1].parameters())
    for batch in order:
        x, y = (part[torch.as_tensor(batch)] for part in samples)
        z, loss = model[:-1](x), torch.zeros((), dtype=torch.float64)
        for k in y.unique().tolist():
            own = z[y == k]
            own = own.mean(0, keepdim=True) if align == "class" else own
            loss = loss + (own - means[k]).square().sum() / (len(own) * z.shape[1])
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= 0.3 * gradient


def fisher(model: nn.Sequential, samples: tuple[Tensor, Tensor], size: int | None) -> float:
    model = copy.deepcopy(model).eval()
    total = 0.0
    for x, y in zip(*(part.split(size or len(part)) for part in samples), strict=True):
        slopes = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
        total += sum(float(slope.square().sum()) for slope in slopes)
    return total


def test_without_gradients_bodies_are_weighted_by_samples() -> None:
    federation = run(reference.client(), reference.data(), callback := FedAS(), 1)
    both = torch.arange(2)
    states = federation.clients.completed(both, callback.broadcast(both))
    states = states.select(*callback.sent_names)
    states[FISHER] = torch.zeros(2, dtype=torch.float64)
    states["network.0.bias"] = torch.tensor([[1.0] * 3, [4.0] * 3], dtype=torch.float64)
    callback.on_round_start()
    callback.receive(ClientUpdates(both, states, torch.tensor([1, 2])))
    assert callback.mean.compute()[0]["network.0.bias"].tolist() == pytest.approx([3, 3, 3])


def test_newcomers_have_the_initial_head() -> None:
    data = reference.data(holdout_clients=0.34)
    federation = run(reference.client(), data, FedAS(), 2)
    newcomer = int(federation.clients.newcomers[0])
    assert_same(federation.client_state(newcomer), federation.server_states()[0])


def test_what_travels() -> None:
    client = reference.client()
    size = sum(v.nbytes for n, v in client.state_dict().items() if not n.startswith("network.3."))
    (entry,) = run(client, reference.data(), FedAS(), 1).history
    assert (entry.bytes_down, entry.bytes_up) == (3 * size, 3 * (size + 8))
