"""GPFL (section 2b.2)."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pflight.callbacks import GPFL
from pflight.callbacks.methods.gpfl import Valved
from pflight.errors import ConfigurationError
from pflight.method import add_what_it_needs
from pflight.models import Classifier
from pflight.states.head import EXTRA, step_extra
from tests import networks_reference as reference
from tests.runs import ENGINES, one_client, quiet_trainer, run, sgd
from tests.worlds import assert_rows, close

VALVE = tuple(
    f"{branch}.{layer}.{part}"
    for branch in ("gamma", "beta")
    for layer in (0, 2)
    for part in ("weight", "bias")
)


def double(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_gp1() -> None:
    network = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(3, 2)).double()
    module, client_method = Classifier(network, 2, optimizer=sgd(0.1)), Valved(lam=0.1, mu=0.1)
    add_what_it_needs(client_method, module, seed=0)
    r, c = torch.meshgrid(torch.arange(1.0, 4), torch.arange(1.0, 4), indexing="ij")
    values = {
        "network.0.weight": double([[1, 0], [0, 1], [1, 1]]),
        "network.1.weight": double([[1, 0, -1], [0, 1, 1]]),
        "network.1.bias": double([0, 0]),
        f"{EXTRA}.embedding": double([[1, 0, 0.5], [0, 1, -0.5]]),
        f"{EXTRA}.gamma.0.weight": 0.1 * (r + c),
        f"{EXTRA}.gamma.0.bias": double([0, 0.1, 0.3]),
        f"{EXTRA}.beta.0.weight": 0.1 * (r - c),
        f"{EXTRA}.beta.0.bias": double([0.3, 0, -0.2]),
        f"{EXTRA}.general": double([0.5, 0.5, 0]),
        f"{EXTRA}.personal": double([2 / 3, 1 / 3, 1 / 6]),
    }
    for branch in ("gamma", "beta"):
        values[f"{EXTRA}.{branch}.2.weight"] = torch.full((3,), 0.5)
        values[f"{EXTRA}.{branch}.2.bias"] = torch.zeros(3)
    values = {name: value.double() for name, value in values.items()}
    values = {**module.state_dict(), **values}
    module.load_state_dict(values)
    batch = double([[1, 2], [2, -1], [1, 1]]), torch.tensor([0, 1, 0])
    client = one_client(module, client_method)
    client.set_anchor({name: value.clone() for name, value in values.items()})
    h = client.task_loss_and_features(batch)[1]
    assert_rows(client.predict(h, lambda z: z, general=True)[0], [1.126360, 1.606442, 4.483715])
    assert_rows(client.predict(h, lambda z: z)[0], [1.121262, 1.626383, 4.469860])
    assert client.task_loss(batch).item() == close(5.016033)
    loss = client_method.loss(client, batch)
    assert loss.item() == close(6.066715)
    optimizer = client.module.configure_optimizers()
    step_extra(client.module, optimizer, client_method.extra_options)
    loss.backward()
    optimizer.step()
    weights = client.weights
    expected = [[1.020367, 0.049541], [-0.068778, 0.896976], [0.826374, 0.630314]]
    assert_rows(weights["network.0.weight"], expected)
    embedding = [[0.986384, 0.005025, 0.502233], [0.013203, 0.988019, -0.498962]]
    assert_rows(client.extra["embedding"], embedding)
    assert_rows(weights["network.1.bias"], [0.056166, -0.056166])
    assert client_method.loss(client, batch).item() == close(2.064663)


@pytest.mark.short("sequential")
@ENGINES
def test_several_rounds(engine: str) -> None:
    data, client, epochs, lam, mu = reference.data(), reference.client(), 2, 0.5, 0.2
    start = run(client, data, GPFL(), 0, engine=engine).layout.template
    federation = run(client, data, GPFL(lam, mu), 4, engine=engine, local_epochs=epochs)
    server = copy.deepcopy(client.network)
    common = {n: start[f"{EXTRA}.{n}"].clone() for n in ("embedding", *VALVE)}
    heads = [copy.deepcopy(client.network[-1]) for _ in range(6)]
    counts = data.class_counts("train").double()
    shares = counts / counts.sum(1, keepdim=True)
    for round_, cohort in enumerate(reference.cohorts(federation)):
        models, extras = [], []
        for i in cohort:
            model = copy.deepcopy(server)
            model[-1] = heads[i]
            extra = {name: value.clone().requires_grad_() for name, value in common.items()}

            def loss(
                network: nn.Sequential,
                x: Tensor,
                y: Tensor,
                i: int = i,
                extra: dict[str, Tensor] = extra,
                sent: Tensor = common["embedding"],
            ) -> Tensor:
                h = network[:-1](x)
                own, general = (
                    valve(extra, condition, h) for condition in (shares[i] @ sent, sent.mean(0))
                )
                cosines = F.cosine_similarity(general.unsqueeze(1), extra["embedding"], dim=2)
                distance = (general - sent[y]).norm(dim=1).mean()
                decay = mu / 2 * sum(value.square().sum() for value in extra.values())
                terms = F.cross_entropy(network[-1](own), y) + F.cross_entropy(cosines, y)
                return terms + lam * distance + decay

            order = reference.batches(data, round_, i, epochs)
            also = extra.values()
            reference.train(model, data.samples(i, "train"), order, loss, also=also)
            models.append(model)
            extras.append(extra)
        weights = data.num_samples()[cohort].tolist()
        server = reference.average(models, weights)
        common = {
            name: sum(n * e[name].detach() for n, e in zip(weights, extras, strict=True))
            / sum(weights)
            for name in common
        }
    server.eval()
    for i in range(6):
        x = data.samples(i, "test")[0]
        condition = shares[i] @ common["embedding"]
        expected = heads[i](valve(common, condition, server[:-1](x)))
        torch.testing.assert_close(federation.client_module(i)(x), expected)
    # What the server sends is judged under the client's condition, too, with the first head.
    losses = []
    for i in range(6):
        x, y = data.samples(i, "test")
        own = valve(common, shares[i] @ common["embedding"], server[:-1](x))
        losses.append(F.cross_entropy(client.network[-1](own), y))
    (values,) = quiet_trainer().test(federation, datamodule=data, verbose=False)
    assert values["test/server/loss"] == pytest.approx(torch.stack(losses).mean().item())


def valve(extra: dict[str, Tensor], condition: Tensor, h: Tensor) -> Tensor:
    def branch(name: str) -> Tensor:
        z = F.linear(condition, extra[f"{name}.0.weight"], extra[f"{name}.0.bias"]).relu()
        return F.layer_norm(z, z.shape, extra[f"{name}.2.weight"], extra[f"{name}.2.bias"])

    return ((branch("gamma") + 1) * h + branch("beta")).relu()


def test_what_travels() -> None:
    client = reference.client()
    size = sum(v.nbytes for n, v in client.state_dict().items() if not n.startswith("network.3."))
    (entry,) = run(client, reference.data(), GPFL(), 1).history
    assert entry.bytes_down == entry.bytes_up == 3 * (size + 8 * (3 * 3 + 2 * 3**2 + 6 * 3))


def test_an_optimizer_without_weight_decay() -> None:
    client = reference.client(optimizer=partial(torch.optim.Rprop, lr=0.01))
    run(client, reference.data(), GPFL(mu=0.0))
    with pytest.raises(ConfigurationError, match=r"Rprop has no weight_decay, .* sets to 0.1"):
        run(client, reference.data(), GPFL())
