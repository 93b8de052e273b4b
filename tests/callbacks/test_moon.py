"""MOON (section C.1)."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pflight.callbacks import MOON, FedAvg
from pflight.callbacks.methods.moon import Contrastive
from pflight.errors import ConfigurationError
from pflight.models import Classifier
from tests import networks_reference as reference
from tests.runs import (
    ENGINES,
    assert_same,
    batchnorm_client,
    network_client,
    one_client,
    run,
    sgd,
    small_data,
)

START = torch.eye(2, dtype=torch.float64)
HEAD = torch.tensor([[1, 0], [0, 1], [-1, -1]], dtype=torch.float64)


def world_f(lr: float = 0.1) -> Classifier:
    """Return the client of world F: features ``W x``, logits ``V z + c``."""
    network = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 3)).double()
    with torch.no_grad():
        network[0].weight.copy_(START)
        network[1].weight.copy_(HEAD)
        network[1].bias.zero_()
    return Classifier(network, 3, optimizer=sgd(lr))


BATCH = torch.tensor([[1.0, 0], [0, 1], [1, 1]], dtype=torch.float64), torch.tensor([0, 0, 1])


def trained(past: Tensor, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """Return losses and weights of client A after steps from the start."""
    module = world_f()
    held = {name: value.clone() for name, value in module.state_dict().items()}
    client = one_client(module, client_method := Contrastive(), {**held, "network.0.weight": past})
    client.set_anchor(held)
    losses = []
    for _ in range(steps):
        loss = client_method.loss(client, BATCH)
        losses.append(loss.item())
        gradients = torch.autograd.grad(loss, list(client.weights.values()))
        with torch.no_grad():
            for weight, gradient in zip(client.weights.values(), gradients, strict=True):
                weight -= 0.1 * gradient
    return losses, {name: w.detach() for name, w in client.weights.items()}


def test_f1() -> None:
    past = torch.tensor([[1, 0], [0.5, 1]], dtype=torch.float64)
    losses, weights = trained(past, 1)
    assert losses == pytest.approx([1.497716], abs=5e-7)
    body = weights["network.0.weight"].flatten().tolist()
    assert body == pytest.approx([1.001913, 0.015930, -0.003820, 0.995502], abs=5e-7)
    head = [0.994897, 0.008914, 0.008914, 0.994897, -1.003811, -1.003811]
    assert weights["network.1.weight"].flatten().tolist() == pytest.approx(head, abs=5e-7)
    bias = [0.020073, -0.013261, -0.006812]
    assert weights["network.1.bias"].tolist() == pytest.approx(bias, abs=5e-7)
    body = trained(past, 2)[1]["network.0.weight"].flatten().tolist()
    assert body == pytest.approx([1.003073, 0.030730, -0.007154, 0.991862], abs=5e-7)


def test_an_old_model_that_is_the_servers_has_no_effect() -> None:
    losses, weights = trained(START, 1)
    assert losses == pytest.approx([1.537463], abs=5e-7)
    body = weights["network.0.weight"].flatten().tolist()
    assert body == pytest.approx([0.998707, 0.012725, 0.012725, 0.998707], abs=5e-7)


@pytest.mark.short("sequential")
@ENGINES
def test_several_rounds(engine: str) -> None:
    data, client, epochs, mu, tau = reference.data(), reference.client(), 2, 2.0, 0.3
    callback = MOON(mu=mu, tau=tau)
    federation = run(client, data, callback, 4, engine=engine, local_epochs=epochs)
    assert federation.clients.attached_engine.setup.mixes_samples
    server = copy.deepcopy(client.network)
    kept: dict[int, nn.Sequential] = {}
    for round_, cohort in enumerate(reference.cohorts(federation)):
        models = []
        for i in cohort:
            model, sent = copy.deepcopy(server), copy.deepcopy(server).eval()
            past = copy.deepcopy(kept.get(i, server)).eval()

            def loss(
                network: nn.Sequential,
                x: Tensor,
                y: Tensor,
                sent: nn.Sequential = sent,
                past: nn.Sequential = past,
            ) -> Tensor:
                z = network[:-1](x)
                near, far = (
                    torch.exp(F.cosine_similarity(z, other[:-1](x).detach(), dim=1) / tau)
                    for other in (sent, past)
                )
                contrast = -(near / (near + far)).log().mean()
                return F.cross_entropy(network[-1](z), y) + mu * contrast

            order = reference.batches(data, round_, i, epochs)
            reference.train(model, data.samples(i, "train"), order, loss)
            models.append(model)
            kept[i] = model
        server = reference.average(models, data.num_samples()[cohort].tolist())
    reference.assert_network(federation.server_states()[0], server)
    assert len(kept) < 12  # some took part twice


def test_without_the_contrast_it_is_fedavg() -> None:
    one = run(batchnorm_client(), small_data(cohort_size=3), MOON(mu=0), 3)
    other = run(batchnorm_client(), small_data(cohort_size=3), FedAvg(), 3)
    assert_same(one.server_states()[0], other.server_states()[0])


@pytest.mark.short("sequential")
@ENGINES
def test_first_participations_are_fedavg(engine: str) -> None:
    one = run(reference.client(), reference.data(cohort_size=6), MOON(mu=5.0), 1, engine=engine)
    other = run(reference.client(), reference.data(cohort_size=6), FedAvg(), 1, engine=engine)
    torch.testing.assert_close(one.server_states()[0], other.server_states()[0])


def test_features_of_zero() -> None:
    """Units that are all silent have no direction."""
    module = world_f()
    with torch.no_grad():
        module.network[0].weight.zero_()
    held = {name: value.clone() for name, value in module.state_dict().items()}
    client = one_client(module, client_method := Contrastive(), {**held, "network.0.weight": START})
    client.set_anchor({**held, "network.0.weight": START + 1})
    loss = client_method.loss(client, BATCH)
    assert loss.item() == pytest.approx(math.log(3) + math.log(2))
    gradient = torch.autograd.grad(loss, [client.weights["network.0.weight"]])[0]
    assert gradient.abs().max() < 1


def test_a_network_without_a_head_is_refused() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 3, 4), nn.Flatten())
    with pytest.raises(ConfigurationError, match="Classifier has no linear layer"):
        run(network_client(network), small_data(), MOON())
