"""FedRoD (section 2a.2)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pflight.callbacks import FedAvg, FedRoD
from pflight.states.head import EXTRA
from tests import networks_reference as reference
from tests.runs import ENGINES, assert_same, quiet_trainer, run
from tests.worlds import assert_rows, body, client_t, close, world_t

PHI = f"{EXTRA}.phi.weight"


@ENGINES
class TestWorldT:
    def test_r1(self, engine: str) -> None:
        data = world_t()
        federation = run(client_t(), data, FedRoD(), engine=engine)
        server = federation.server_states()[0]
        assert_rows(body(server), [[1.014342, -0.004530], [0.012548, 1.007076]])
        own = federation.callback.personalize(torch.arange(2))[PHI]
        assert_rows(own[0], [[0.016738, -0.012236], [-0.012236, 0.016738], [-0.004502, -0.004502]])
        assert_rows(own[1], [[-0.013261, -0.024083], [0.025229, 0.025951], [-0.011968, -0.001868]])
        quiet_trainer().validate(federation, datamodule=data, verbose=False)
        personal, generic = (federation.client_metrics("val", m) for m in ("", "server/"))
        assert personal["loss"].tolist() == [close(0.392278), close(0.389749)]
        assert generic["loss"].tolist() == [close(0.401158), close(0.411213)]


def _extra(federation: Any) -> dict[str, Tensor]:
    """Return the parameters beside the network, as leaves."""
    layout = federation.layout
    names = [name for name in layout.extra if name in layout.parameters]
    return {
        name.removeprefix(f"{EXTRA}."): layout.template[name].clone().double().requires_grad_()
        for name in names
    }


def phi(extra: dict[str, Tensor], counts: Tensor, z: Tensor) -> Tensor:
    """Return what a personal head gives: its own, or that of two layers of the class shares."""
    if "phi.weight" in extra:
        return z @ extra["phi.weight"].T + extra["phi.bias"]
    hidden = extra["network.0.weight"] @ (counts / counts.sum()) + extra["network.0.bias"]
    made = extra["network.2.weight"] @ hidden.relu() + extra["network.2.bias"]
    made = made.view(len(counts), -1)
    return z @ made[:, :-1].T + made[:, -1]


@pytest.mark.short("*-sequential")
@ENGINES
@pytest.mark.parametrize("personal", ["linear", "hyper"])
@pytest.mark.parametrize("gamma", [0.5, 1.0])
def test_several_rounds(engine: str, personal: Any, gamma: float) -> None:
    data, client, epochs = reference.data(), reference.client(), 2
    callback = FedRoD(gamma, personal, hidden=5)
    start = _extra(run(client, data, FedRoD(gamma, personal, hidden=5), 0, engine=engine))
    federation = run(client, data, callback, 4, engine=engine, local_epochs=epochs)
    server, hyper = copy.deepcopy(client.network), copy.deepcopy(start)
    own = [copy.deepcopy(start) for _ in range(6)]
    counts = data.class_counts("train").double()
    for round_, cohort in enumerate(reference.cohorts(federation)):
        models, networks = [], []
        for i in cohort:
            model = copy.deepcopy(server)
            extra = own[i] if personal == "linear" else copy.deepcopy(hyper)

            def loss(
                network: nn.Sequential,
                x: Tensor,
                y: Tensor,
                i: int = i,
                extra: dict[str, Tensor] = extra,
            ) -> Tensor:
                z = network[:-1](x)
                generic = network[-1](z)
                weighted = generic.exp() * counts[i] ** gamma
                balanced = -(weighted[range(len(y)), y] / weighted.sum(1)).log().mean()
                own_logits = generic.detach() + phi(extra, counts[i], z.detach())
                return balanced + F.cross_entropy(own_logits, y)

            order = reference.batches(data, round_, i, epochs)
            also = extra.values()
            reference.train(model, data.samples(i, "train"), order, loss, also=also)
            models.append(model)
            networks.append(extra)
        weights = data.num_samples()[cohort].tolist()
        server = reference.average(models, weights)
        share = [weight / sum(weights) for weight in weights]
        hyper = {
            name: sum(s * n[name].detach() for s, n in zip(share, networks, strict=True))
            for name in hyper
        }
        hyper = {name: value.clone().requires_grad_() for name, value in hyper.items()}
    reference.assert_network(federation.server_states()[0], server)
    for i in range(6):
        module, x = federation.client_module(i), data.samples(i, "test")[0]
        z = server.eval()[:-1](x)
        extra = own[i] if personal == "linear" else hyper
        torch.testing.assert_close(module(x), server[-1](z) + phi(extra, counts[i], z))


def test_gamma_0_is_fedavg_for_the_generic_model() -> None:
    one = run(reference.client(), reference.data(), FedRoD(gamma=0), 3)
    other = run(reference.client(), reference.data(), FedAvg(), 3)
    torch.testing.assert_close(one.server_states()[0], other.server_states()[0])


@ENGINES
def test_a_client_of_one_class_leaves_the_generic_model_as_it_is(engine: str) -> None:
    data = reference.data(cohort_size=6)
    for i in range(6):
        data.samples(i, "train")[1].fill_(1)
    client = reference.client()
    federation = run(client, data, FedRoD(), 1, engine=engine)
    parameters = dict(client.named_parameters())
    for name, value in federation.server_states()[0].items():
        if name in parameters:
            torch.testing.assert_close(value, parameters[name].data, rtol=0, atol=0)
    assert federation.callback.personalize(torch.arange(6))[PHI].abs().amax((1, 2)).min() > 0


@pytest.mark.short("sequential")
@ENGINES
def test_fine_tuning_trains_the_personal_head_alone(engine: str) -> None:
    data = reference.data(holdout_clients=0.34)
    federation = run(reference.client(), data, FedRoD(), 2, engine=engine, finetune_epochs=1)
    sent = federation.server_states()[0]
    for i in range(6):
        assert_same(federation.client_state(i), sent)
    newcomers = federation.clients.newcomers
    assert not federation.callback.personalize(newcomers)[PHI].any()
    x = data.samples(int(newcomers[0]), "test")[0]
    tuned, generic = federation.client_module(int(newcomers[0])), reference.client().eval()
    generic.load_state_dict(sent)
    assert (tuned(x) - generic(x)).abs().max() > 1e-4


def test_what_travels() -> None:
    size = sum(value.nbytes for value in reference.client().state_dict().values())
    linear = run(reference.client(), reference.data(), FedRoD(), 1).history[0]
    assert linear.bytes_down == linear.bytes_up == 3 * size
    hyper = run(reference.client(), reference.data(), FedRoD(personal="hyper", hidden=5), 1)
    network = 8 * (5 * 3 + 5 + 5 * 12 + 12)
    assert hyper.history[0].bytes_up == 3 * (size + network)
