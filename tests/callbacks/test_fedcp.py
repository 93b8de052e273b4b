"""FedCP (section 2b.1)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pflight.callbacks import FedCP
from pflight.callbacks.methods.fedcp import Policed
from pflight.errors import ConfigurationError
from pflight.method import add_what_it_needs
from pflight.models import Classifier
from pflight.states.head import EXTRA
from tests import networks_reference as reference
from tests.runs import ENGINES, one_client, run, sgd
from tests.worlds import assert_rows, close

POLICY = ("policy.weight", "policy.bias", "norm.weight", "norm.bias")


def double(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_cp1() -> None:
    network = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2)).double()
    module, client_method = Classifier(network, 2, optimizer=sgd(0.1)), Policed(lam=5)
    add_what_it_needs(client_method, module, seed=0)
    sent = {name: value.clone() for name, value in module.state_dict().items()}
    sent["network.0.weight"] = torch.eye(2, dtype=torch.float64)
    values = {
        "network.0.weight": [[1, 0.5], [0, 1]],
        "network.1.weight": [[1, 0], [0, 1]],
        "network.1.bias": [0.1, 0],
        f"{EXTRA}.head.weight": [[1, -1], [0.5, 2]],
        f"{EXTRA}.head.bias": [0, 0.2],
        f"{EXTRA}.policy.weight": [[0.2, 0.3], [-0.3, -0.4], [0.4, 0.5], [-0.5, -0.6]],
        f"{EXTRA}.policy.bias": [0.1, 0, -0.1, 0.2],
        f"{EXTRA}.context": [1.5, 1],
    }
    module.load_state_dict({**module.state_dict(), **{n: double(v) for n, v in values.items()}})
    client, batch = (
        one_client(module, client_method),
        (double([[1, 2], [2, -1]]), torch.tensor([0, 1])),
    )
    client.set_anchor(sent)
    assert client.task_loss(batch).item() == close(2.794784)
    assert_rows(client.module(batch[0]), [[1.1, 3.616091], [2.1, -0.844509]])
    loss = client_method.loss(client, batch)
    assert loss.item() == close(2.948407)
    trained = {n: w for n, w in client.weights.items() if not n.startswith("network.1.")}
    gradients = torch.autograd.grad(loss, list(trained.values()))
    with torch.no_grad():
        for weight, gradient in zip(trained.values(), gradients, strict=True):
            weight -= 0.1 * gradient
    own = client.extra
    assert_rows(trained["network.0.weight"], [[0.874943, 0.566327], [0.071015, 0.731026]])
    assert_rows(own["head.weight"], [[0.995228, -0.929987], [0.504773, 1.929987]])
    assert_rows(own["head.bias"], [-0.001237, 0.201237])
    assert_rows(own["policy.bias"], [0.141071, 0.008604, -0.155716, 0.206040])
    assert client_method.loss(client, batch).item() == close(1.984949)


@pytest.mark.short("*-sequential")
@ENGINES
@pytest.mark.parametrize("upload_head", ["half", "personal"])
def test_several_rounds(engine: str, upload_head: Any) -> None:
    data, client, epochs, lam = reference.data(), reference.client(), 2, 3.0
    start = run(client, data, FedCP(), 0, engine=engine).layout.template
    callback = FedCP(lam, upload_head)
    federation = run(client, data, callback, 4, engine=engine, local_epochs=epochs)
    server = copy.deepcopy(client.network)
    policy = {name: start[f"{EXTRA}.{name}"].clone() for name in POLICY}
    heads: dict[int, nn.Module] = {}
    for round_, cohort in enumerate(reference.cohorts(federation)):
        models, policies = [], []
        for i in cohort:
            model, sent = copy.deepcopy(server), copy.deepcopy(server).eval()
            own = heads[i] = copy.deepcopy(heads.get(i, server[-1]))
            rules = {name: value.clone().requires_grad_() for name, value in policy.items()}
            context = own.weight.detach().sum(0)

            def loss(
                network: nn.Sequential,
                x: Tensor,
                y: Tensor,
                own: nn.Module = own,
                rules: dict[str, Tensor] = rules,
                context: Tensor = context,
                sent: nn.Sequential = sent,
            ) -> Tensor:
                h = network[:-1](x)
                logits = predict(own, network[-1], rules, context, h)
                return F.cross_entropy(logits, y) + lam * mmd(h, sent[:-1](x).detach())

            order = reference.batches(data, round_, i, epochs)
            also = [*own.parameters(), *rules.values()]
            rest = model[-1].parameters()
            reference.train(model, data.samples(i, "train"), order, loss, also=also, rest=rest)
            with torch.no_grad():
                for shared, mine in zip(model[-1].parameters(), own.parameters(), strict=True):
                    shared.copy_(mine if upload_head == "personal" else (mine + shared) / 2)
            models.append(model)
            policies.append(rules)
        weights = data.num_samples()[cohort].tolist()
        server = reference.average(models, weights)
        policy = {
            name: sum(n * rules[name].detach() for n, rules in zip(weights, policies, strict=True))
            / sum(weights)
            for name in POLICY
        }
    reference.assert_network(federation.server_states()[0], server)
    server.eval()
    for i in range(6):
        own, x = heads.get(i, server[-1]), data.samples(i, "test")[0]
        context = own.weight.detach().sum(0)
        expected = predict(own, server[-1], policy, context, server[:-1](x))
        torch.testing.assert_close(federation.client_module(i)(x), expected)


def predict(own: Any, shared: Any, rules: dict[str, Tensor], context: Tensor, h: Tensor) -> Tensor:
    a = F.linear(h * context / context.norm(), rules["policy.weight"], rules["policy.bias"])
    a = F.layer_norm(a, a.shape[1:], rules["norm.weight"], rules["norm.bias"]).relu()
    first, second = a.exp().chunk(2, dim=1)
    s = first / (first + second)
    return own(s * h) + shared((1 - s) * h)


def mmd(x: Tensor, y: Tensor) -> Tensor:
    def kernel(u: Tensor, w: Tensor) -> Tensor:
        squares = (u.unsqueeze(1) - w.unsqueeze(0)).square().sum(2)
        return sum((-squares / (2 * t)).exp() for t in (10, 15, 20, 50))

    return (kernel(x, x) + kernel(y, y) - 2 * kernel(x, y)).mean()


def test_a_newcomers_heads_are_the_same() -> None:
    """So that the policy cancels, and the bias counts twice."""
    data = reference.data(holdout_clients=0.34)
    federation = run(reference.client(), data, FedCP(), 2)
    newcomer, client = int(federation.clients.newcomers[0]), reference.client().eval()
    client.load_state_dict(federation.server_states()[0])
    x = data.samples(newcomer, "test")[0]
    expected = client(x) + client.network[-1].bias
    torch.testing.assert_close(federation.client_module(newcomer)(x), expected)


def test_what_travels() -> None:
    size = sum(value.nbytes for value in reference.client().state_dict().values())
    (entry,) = run(reference.client(), reference.data(), FedCP(), 1).history
    assert entry.bytes_down == entry.bytes_up == 3 * (size + 8 * (2 * 3**2 + 6 * 3))


def test_a_head_of_several_layers_is_refused() -> None:
    client = reference.client()
    client.network.head = "2"
    with pytest.raises(ConfigurationError, match="has to be a linear layer, not Tanh"):
        run(client, reference.data(), FedCP())
