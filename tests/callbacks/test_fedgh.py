"""FedGH (section C.6)."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pflight.callbacks import FedGH
from pflight.datamodules import TensorClients
from pflight.errors import ConfigurationError
from pflight.models import Classifier
from tests import networks_reference as reference
from tests.runs import CLASSES, ENGINES, FEATURES, run, samples, sgd
from tests.worlds import assert_rows

SAMPLES = (
    (torch.tensor([[1.0, 0], [0, 1], [1, 1]], dtype=torch.float64), torch.tensor([0, 0, 1])),
    (torch.tensor([[1.0, -1], [2, 0]], dtype=torch.float64), torch.tensor([2, 2])),
)


@ENGINES
@pytest.mark.parametrize("batch", [1, 3])
def test_f3(engine: str, batch: int) -> None:
    network = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 3)).double()
    with torch.no_grad():
        network[0].weight.copy_(torch.eye(2))
        network[1].weight.copy_(torch.tensor([[1, 0], [0, 1], [-1, -1]]))
        network[1].bias.zero_()
    client = Classifier(network, 3, optimizer=sgd(0.1))
    data = TensorClients(SAMPLES, num_classes=3, batch_size=None)
    callback = FedGH(server_lr=0.1, server_batch=batch)
    state = run(client, data, callback, engine=engine).server_states()[0]
    if batch == 3:
        assert_rows(state["network.1.bias"], [-0.021697, -0.001769, 0.023466])
        return
    assert_rows(state["network.1.bias"], [-0.069897, -0.000739, 0.070636])
    expected = [[0.896626, 0.026646], [0.021230, 1.042718], [-0.917856, -1.069364]]
    assert_rows(state["network.1.weight"], expected)


@pytest.mark.short("sequential")
@ENGINES
def test_several_rounds(engine: str) -> None:
    data, client, epochs, lr = reference.data(), reference.client(), 2, 0.3
    callback = FedGH(server_lr=lr, server_epochs=2)
    federation = run(client, data, callback, 4, engine=engine, local_epochs=epochs)
    head = copy.deepcopy(client.network[-1])
    models = [copy.deepcopy(client.network) for _ in range(6)]
    seen = set()
    for round_, cohort in enumerate(reference.cohorts(federation)):
        pairs = []
        for i in cohort:
            models[i][-1] = copy.deepcopy(head)
            own = data.samples(i, "train")
            order = reference.batches(data, round_, i, epochs)
            reference.train(models[i], own, order, reference.cross_entropy)
            pairs += sorted(reference.class_means(models[i], own).items())
        seen |= {*cohort}
        for k, mean in [*pairs, *pairs]:
            loss = F.cross_entropy(head(mean), torch.tensor(k))
            slopes = torch.autograd.grad(loss, list(head.parameters()))
            with torch.no_grad():
                for parameter, slope in zip(head.parameters(), slopes, strict=True):
                    parameter -= lr * slope
    server = federation.server_states()[0]
    torch.testing.assert_close(server["network.3.weight"], head.weight.detach())
    torch.testing.assert_close(server["network.3.bias"], head.bias.detach())
    received = federation.clients.model(
        "received/", torch.arange(6), *2 * [callback.broadcast(torch.arange(6))]
    )
    for i in range(6):
        if i not in seen:
            models[i][-1] = head
        reference.assert_network(federation.client_state(i), models[i])
        torch.testing.assert_close(received["network.3.weight"][i], head.weight.detach())
        torch.testing.assert_close(received["network.0.weight"][i], models[i][0].weight.detach())


@ENGINES
def test_a_step_of_0_keeps_clients_apart(engine: str) -> None:
    data = reference.data(cohort_size=6)
    federation = run(reference.client(), data, FedGH(server_lr=0), 2, engine=engine)
    server, client = federation.server_states()[0], reference.client().state_dict()
    torch.testing.assert_close(server, dict(client), rtol=0, atol=0)


def test_missing_classes_and_traffic() -> None:
    pairs = [
        (samples(len(own), i, torch.float64)[0], torch.tensor(own))
        for i, own in enumerate(([0, 0, 1], [1, 1], [1]))
    ]
    data = TensorClients(pairs, test=pairs, num_classes=CLASSES, batch_size=4)
    client = Classifier(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3)), 3, optimizer=sgd())
    client = client.double()
    federation = run(client, data, FedGH(server_lr=0.1), 2)
    head = sum(value.nbytes for name, value in client.state_dict().items() if "1." in name)
    assert federation.history[0].bytes_down == 3 * head
    assert federation.history[0].bytes_up == 4 * (3 * 8 + 8)
    bias = federation.server_states()[0]["network.1.bias"]
    assert bias[2] < client.network[1].bias[2]  # a class that nobody has only loses ground


class Named(nn.Sequential):
    """A body, and a head of several layers."""

    head = "1"


def test_a_head_of_feature_maps_is_an_error_before_the_start() -> None:
    body = nn.Sequential(nn.Unflatten(1, (1, -1)), nn.Conv1d(1, 4, 1))
    network = Named(body, nn.Sequential(nn.AdaptiveAvgPool1d(2), nn.Flatten(), nn.Linear(8, 3)))
    client = Classifier(network.double(), 3, optimizer=sgd(0.1))
    with pytest.raises(ConfigurationError, match=r"mean features, vectors of 16 .* 'network.1'"):
        run(client, reference.data(), FedGH())


def test_batchnorm_and_dropout_in_the_head() -> None:
    """The server trains its parameters alone, by its buffers of the start and without dropout."""
    torch.manual_seed(0)
    head = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, CLASSES))
    network = Named(nn.Sequential(nn.Linear(FEATURES, 3), nn.Tanh()), head).double()
    client = Classifier(network, CLASSES, optimizer=sgd(0.1))
    data = reference.data()
    federation = run(client, data, FedGH(server_lr=0.1))
    model, pairs = copy.deepcopy(network), []
    for i in sorted(federation.history[0].clients):
        x, y = data.samples(i, "train")
        own = copy.deepcopy(federation.client_module(i)).network[0].eval()
        pairs += [
            (k, own(x[y == k]).mean(0, keepdim=True).detach()) for k in sorted(set(y.tolist()))
        ]
    head = model[1].eval()
    for k, mean in pairs:
        slopes = torch.autograd.grad(
            F.cross_entropy(head(mean), torch.tensor([k])), [*head.parameters()]
        )
        with torch.no_grad():
            for parameter, slope in zip(head.parameters(), slopes, strict=True):
                parameter -= 0.1 * slope
    state = federation.server_states()[0]
    for name, value in head.state_dict().items():
        torch.testing.assert_close(state[f"network.1.{name}"], value)
