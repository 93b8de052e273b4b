"""FedDBE (section 2a.5)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pflight.callbacks import FedAvg, FedDBE
from pflight.states.head import EXTRA
from tests import networks_reference as reference
from tests.runs import (
    CLASSES,
    ENGINES,
    FEATURES,
    assert_same,
    failing,
    network_client,
    run,
    sgd,
    small_data,
)
from tests.worlds import assert_rows, body, client_t, head, world_t

BIAS, MEAN = f"{EXTRA}.bias", f"{EXTRA}.mean"


@ENGINES
class TestWorldT:
    def test_d1(self, engine: str) -> None:
        """Its vector has one step in the first training, and two in the round."""
        callback = Later(kappa=1.0, mu=0.5)
        federation = run(client_t(), world_t(), callback, engine=engine, local_epochs=2)
        assert_rows(federation.server.tensors(0)[MEAN], [0.189372, 0.819392])
        server = federation.server_states()[0]
        assert_rows(body(server), [[1.014831, -0.025991], [0.041754, 1.059151]])
        expected = [[0.998975, -0.037392], [0.018483, 1.043347], [-1.017458, -1.005955]]
        assert_rows(head(server), expected)
        own = federation.callback.personalize(torch.arange(2))[BIAS]
        assert_rows(own, [[0.026134, 0.025834], [-0.062047, 0.006804]])

    def test_d1_of_the_last_batch_alone(self, engine: str) -> None:
        callback = Later(kappa=1.0, mu=1.0)
        federation = run(client_t(), world_t(), callback, engine=engine, local_epochs=2)
        server = federation.server_states()[0]
        assert_rows(body(server), [[1.009843, -0.025177], [0.043079, 1.043736]])
        own = federation.callback.personalize(torch.arange(2))[BIAS]
        assert_rows(own[0], [0.026390, 0.025791])


class Later(FedDBE):
    """Has clients train for one epoch before the first round, whatever they do in it."""

    def round(self, cohort: Tensor) -> None:
        train = self.clients.train

        def once(*args: Any, **options: Any) -> Any:
            return train(
                *args, **options, **({"epochs": 1} if not options.get("keep", True) else {})
            )

        self.clients.train = once  # type: ignore[method-assign]
        super().round(cohort)
        self.clients.train = train  # type: ignore[method-assign]


@pytest.mark.short("*-sequential")
@ENGINES
@pytest.mark.parametrize("init", ["all", "cohort"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_several_rounds(engine: str, init: Any, momentum: float) -> None:
    data, epochs, kappa, mu = reference.data(), 2, 3.0, 0.4
    client = reference.client(optimizer=sgd(0.1, momentum=momentum, weight_decay=0.1 * momentum))
    callback = FedDBE(kappa, mu, init=init)
    federation = run(client, data, callback, 4, engine=engine, local_epochs=epochs)
    server = copy.deepcopy(client.network)
    cohorts = reference.cohorts(federation)
    own = [torch.zeros(3, dtype=torch.float64, requires_grad=True) for _ in range(6)]
    sums, count = torch.zeros(3, dtype=torch.float64), 0
    for i in range(6) if init == "all" else cohorts[0]:
        model, samples = copy.deepcopy(server), data.samples(i, "train")
        steps(model, samples, reference.batches(data, 0, i, epochs), momentum)
        sums += reference.judged_features(model, samples[0]).sum(0)
        count += len(samples[1])
    target = sums / count
    torch.testing.assert_close(federation.server.tensors(0)[MEAN], target, rtol=1e-10, atol=0)
    for round_, cohort in enumerate(cohorts):
        models = []
        for i in cohort:
            models.append(model := copy.deepcopy(server))
            order = reference.batches(data, round_, i, epochs)
            samples = data.samples(i, "train")
            steps(model, samples, order, momentum, own[i], kappa, mu, target)
        server = reference.average(models, data.num_samples()[cohort].tolist())
    reference.assert_network(federation.server_states()[0], server)
    for i in range(6):
        module, x = federation.client_module(i), data.samples(i, "test")[0]
        expected = server[-1](server.eval()[:-1](x) + own[i])
        torch.testing.assert_close(module(x), expected, rtol=1e-9, atol=1e-9)


def steps(
    network: nn.Sequential,
    samples: tuple[Tensor, Tensor],
    order: list[Any],
    momentum: float,
    own: Tensor | None = None,
    kappa: float = 0.0,
    mu: float = 0.0,
    target: Tensor | float = 0.0,
) -> None:
    """Train the network by SGD with momentum and a tenth of it as decay, and the bias plainly."""
    parameters = [*network.parameters()]
    velocities = [torch.zeros_like(p) for p in parameters]
    running = torch.zeros(3, dtype=torch.float64)
    network.train()
    for batch in order:
        x, y = (part[torch.as_tensor(batch)] for part in samples)
        z = network[:-1](x)
        running = (1 - mu) * running.detach() + mu * z.mean(0)
        logits = network[-1](z if own is None else z + own)
        loss = F.cross_entropy(logits, y) + kappa / 6 * (running - target).square().sum()
        stepped = parameters if own is None else [*parameters, own]
        gradients = torch.autograd.grad(loss, stepped)
        with torch.no_grad():
            for p, v, g in zip(parameters, velocities, gradients, strict=False):
                v.mul_(momentum).add_(g + 0.1 * momentum * p)
                p -= 0.1 * v
            if own is not None:
                own -= 0.1 * gradients[-1]


@pytest.mark.short("sequential")
@ENGINES
def test_without_mean_and_bias_it_is_fedavg(engine: str) -> None:
    callback = FedDBE(kappa=0, bias_lr=0)
    one = run(reference.client(), reference.data(), callback, 3, engine=engine)
    other = run(reference.client(), reference.data(), FedAvg(), 3, engine=engine)
    torch.testing.assert_close(one.server_states()[0], other.server_states()[0], rtol=0, atol=1e-15)


def test_what_travels() -> None:
    client = reference.client()
    size = sum(value.nbytes for value in client.state_dict().values())
    federation = run(client, reference.data(), FedDBE(), 3)
    first, *others = federation.history
    mean = 3 * 8
    assert first.bytes_down == 6 * size + 3 * mean  # they have the first model already
    assert first.bytes_up == 6 * mean + 3 * size
    seen = {*reference.cohorts(federation)[0]}
    for entry in others:
        new = {*entry.clients} - seen
        seen |= new
        assert entry.bytes_down == 3 * size + len(new) * mean
        assert entry.bytes_up == 3 * size


def test_a_newcomer_has_no_bias() -> None:
    data = reference.data(holdout_clients=0.34)
    federation = run(reference.client(), data, FedDBE(), 2)
    assert not federation.callback.personalize(federation.clients.newcomers)[BIAS].any()
    sent = federation.server_states()[0]
    assert_same(federation.client_state(int(federation.clients.newcomers[0])), sent)


@pytest.mark.filterwarnings("ignore:.*out of battery:UserWarning")
def test_a_round_in_which_nobody_succeeds_leaves_the_server_as_it_was() -> None:
    client = network_client(nn.Sequential(nn.Linear(FEATURES, 4), nn.Linear(4, CLASSES)), failing())
    states: list[dict[str, Tensor]] = []

    class Watched(FedDBE):
        def round(self, cohort: Tensor) -> None:
            states.append(copy.deepcopy(self.server.tensors(0)))
            super().round(cohort)

    federation = run(client, small_data(cohort_size=1), Watched(), 8, engine="sequential")
    empty = next(entry.index for entry in federation.history[:-1] if entry.clients == [3])
    assert_same(states[empty + 1], states[empty])
