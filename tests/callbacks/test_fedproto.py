"""FedProto (section 2a.3)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pflight.callbacks import FedProto, Local
from pflight.datamodules import TensorClients
from pflight.errors import ConfigurationError
from pflight.models import Regressor
from pflight.states.head import EXTRA
from tests import networks_reference as reference
from tests.runs import (
    CLASSES,
    ENGINES,
    assert_same,
    batchnorm_client,
    quiet_trainer,
    run,
    samples,
    small_data,
)
from tests.worlds import assert_rows, body, client_t, world_t

MEANS, COUNTS = f"{EXTRA}.means", f"{EXTRA}.counts"


@ENGINES
class TestWorldT:
    def test_a2(self, engine: str) -> None:
        """The first round is plain, and the second is pulled to the means of the first."""
        one = run(client_t(), world_t(), FedProto(), 1, engine=engine)
        assert_rows(body(one.client_state(0)), [[1.021239, -0.007735], [-0.007735, 1.021239]])
        assert_rows(body(one.client_state(1)), [[0.998707, -0.022215], [0.037197, 1.027819]])
        prototypes = one.server.tensors(0)[MEANS]
        expected = [[1.021239, -0.007735], [0.308110, 1.380631], [-0.998707, -0.037197]]
        assert_rows(prototypes, expected)
        two = run(client_t(), world_t(), FedProto(lam=1.0), 2, engine=engine)
        assert_rows(body(two.client_state(0)), [[1.042105, 0.000259], [-0.015533, 1.060075]])
        assert_rows(body(two.client_state(1)), [[0.976704, -0.039787], [0.082966, 1.019246]])

    def test_uniform(self, engine: str) -> None:
        federation = run(client_t(), world_t(), FedProto(weighting="uniform"), engine=engine)
        prototypes = federation.server.tensors(0)[MEANS]
        assert_rows(prototypes[1], [0.229149, 1.290783])


@pytest.mark.short("*-sequential")
@ENGINES
@pytest.mark.parametrize("align", ["sample", "class"])
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_several_rounds(engine: str, align: Any, weighting: Any) -> None:
    data, client, epochs, lam = reference.data(), reference.client(), 2, 1.5
    callback = FedProto(lam, align, weighting)
    federation = run(client, data, callback, 4, engine=engine, local_epochs=epochs)
    models = [copy.deepcopy(client.network) for _ in range(6)]
    prototypes: dict[int, Tensor] = {}
    for round_, cohort in enumerate(reference.cohorts(federation)):
        known = dict(prototypes)

        def loss(
            network: nn.Sequential, x: Tensor, y: Tensor, known: dict[int, Tensor] = known
        ) -> Tensor:
            z = network[:-1](x)
            distance = torch.zeros((), dtype=torch.float64)
            for k in known.keys() & {*y.tolist()}:
                if align == "sample":
                    distance += (z[y == k] - known[k]).square().sum() / (len(y) * z.shape[1])
                else:
                    distance += (z[y == k].mean(0) - known[k]).square().mean()
            return F.cross_entropy(network[-1](z), y) + lam * distance

        sent: dict[int, list[tuple[int, Tensor]]] = {}
        for i in cohort:
            own = data.samples(i, "train")
            reference.train(models[i], own, reference.batches(data, round_, i, epochs), loss)
            for k, mean in reference.class_means(models[i], own).items():
                count = int((own[1] == k).sum()) if weighting == "samples" else 1
                sent.setdefault(k, []).append((count, mean))
        for k, parts in sent.items():
            total = sum(count for count, _ in parts)
            prototypes[k] = sum(count * mean for count, mean in parts) / total
    for i, model in enumerate(models):
        reference.assert_network(federation.client_state(i), model)
    state = federation.server.tensors(0)
    for k, mean in prototypes.items():
        torch.testing.assert_close(state[MEANS][k], mean, rtol=1e-10, atol=1e-12)


def test_without_the_distance_it_is_local() -> None:
    one = run(batchnorm_client(), small_data(cohort_size=3), FedProto(lam=0), 3)
    other = run(batchnorm_client(), small_data(cohort_size=3), Local(), 3)
    for i in range(6):
        assert_same(one.client_state(i), other.client_state(i))


def of_classes(*classes: list[int], **options: Any) -> TensorClients:
    """Return clients that have these labels."""
    pairs = [
        (samples(len(own), i, torch.float64)[0], torch.tensor(own)) for i, own in enumerate(classes)
    ]
    return TensorClients(pairs, test=pairs, val=pairs, num_classes=CLASSES, batch_size=4, **options)


@ENGINES
class TestClasses:
    def test_one_that_nobody_has(self, engine: str) -> None:
        data = of_classes([0, 0, 1], [1, 1], [0, 1, 1, 1])
        federation = run(reference.client(), data, FedProto(), 2, engine=engine)
        state = federation.server.tensors(0)
        assert state[COUNTS].tolist() == [3, 6, 0]
        assert not state[MEANS][2].any()
        assert federation.history[-1].failed == []

    @pytest.mark.short("sequential")
    def test_one_that_nobody_sends_any_more_keeps_its_prototype(self, engine: str) -> None:
        data = of_classes([0, 0], [1, 1], [2, 2], cohort_size=1)
        one, two = (
            run(reference.client(), data, FedProto(), rounds, engine=engine) for rounds in (3, 4)
        )
        before, after = (federation.server.tensors(0) for federation in (one, two))
        (sender,) = two.history[-1].clients
        kept = [k for k in range(3) if k != sender]
        assert (before[COUNTS][kept] > 0).any()
        assert after[MEANS][kept].equal(before[MEANS][kept])
        assert not after[MEANS][sender].equal(before[MEANS][sender])

    @pytest.mark.short("sequential")
    def test_predictions_by_prototype(self, engine: str) -> None:
        """Only a client's own classes are predicted, and those that have a prototype."""
        data = of_classes([0, 0, 1, 1], [1, 2, 2, 1], [2, 0, 0, 0])
        federation = run(reference.client(), data, FedProto(), 2, engine=engine)
        state = federation.server.tensors(0)
        right = []
        for i, own in enumerate(({0, 1}, {1, 2}, {0, 2})):
            model = copy.deepcopy(federation.client_module(i)).network.eval()
            x, y = data.samples(i, "test")
            distances = torch.cdist(model[:-1](x), state[MEANS])
            distances[:, [k for k in range(3) if k not in own]] = torch.inf
            right.append((distances.argmin(1) == y).double().mean())
        (values,) = quiet_trainer().test(federation, datamodule=data, verbose=False)
        assert values["test/prototype/macro_acc"] == pytest.approx(torch.stack(right).mean().item())

    @pytest.mark.short("*-sequential")
    @pytest.mark.parametrize("epochs", [0, 3])
    def test_predictions_of_clients_that_never_trained(self, engine: str, epochs: int) -> None:
        """They have classes of their own as well, and are fine-tuned first."""
        labels = [0, 0, 1, 1], [1, 2, 2, 1], [2, 0, 0, 0], [0, 2, 2, 0]
        data = of_classes(*labels, cohort_size=1, holdout_clients=0.25)
        options = {"engine": engine, "finetune_epochs": epochs}
        federation = run(reference.client(), data, FedProto(), 2, **options)
        state, right = federation.server.tensors(0), []
        for i, own in enumerate(labels):
            model = copy.deepcopy(federation.client_module(i)).network.eval()
            x, y = data.samples(i, "test")
            distances = torch.cdist(model[:-1](x), state[MEANS])
            known = {*own} & {*state[COUNTS].nonzero().flatten().tolist()}
            known = known or {*state[COUNTS].nonzero().flatten().tolist()}
            distances[:, [k for k in range(3) if k not in known]] = torch.inf
            right.append((distances.argmin(1) == y).double().mean())
        quiet_trainer().test(federation, datamodule=data, verbose=False)
        found = federation.client_metrics("test", "prototype/")["acc"]
        torch.testing.assert_close(found.double(), torch.stack(right))


def test_traffic() -> None:
    data = of_classes([0, 0, 1], [1, 1], [0, 1, 1, 1])
    federation = run(reference.client(), data, FedProto(), 2)
    first, second = federation.history
    row, initial = 3 * 8, sum(p.nbytes for p in reference.client().parameters())
    assert (first.bytes_down, second.bytes_down) == (3 * initial, 3 * 2 * row)
    assert first.bytes_up == second.bytes_up == 5 * (row + 8 + 8)


def test_a_module_without_classes_is_refused() -> None:
    pairs = [(torch.zeros(4, 2), torch.zeros(4, 1))] * 2
    client = Regressor(nn.Linear(2, 1))
    with pytest.raises(ConfigurationError, match="Regressor has no num_classes"):
        run(client, TensorClients(pairs, test=pairs, val=pairs), FedProto())
