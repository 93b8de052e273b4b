"""kNN-Per (section 2b.6)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pflight.callbacks import FedAvg, KNNPer
from pflight.callbacks.methods.knn_per import Neighbours, mixture
from pflight.datamodules import TensorClients
from pflight.states.head import EXTRA
from tests import networks_reference as reference
from tests.runs import CLASSES, ENGINES, assert_same, quiet_trainer, run, samples
from tests.worlds import assert_rows

STORE = torch.tensor([[0.0, 0], [2, 0], [1, 1], [3, 1]], dtype=torch.float64)
QUERY = torch.tensor([[1.2, 0.6]], dtype=torch.float64)
BIAS = torch.tensor([0.2, 0.0], dtype=torch.float64)


def neighbours(k: int, share: float, kernel: Any = "squared", store: Tensor = STORE) -> Neighbours:
    """Return N1's store of four samples, with room for two more."""
    module = Neighbours(2, 2, 6, k, 1.0, kernel).double()
    module.store[: len(store)] = store
    module.labels[: len(store)] = torch.tensor([0, 0, 1, 1])[: len(store)]
    module.share.fill_(share)
    return module


class TestN1:
    @pytest.mark.parametrize(
        ("k", "kernel", "expected"),
        [
            (2, "squared", [0.401312, 0.598688]),
            (3, "squared", [0.528224, 0.471776]),
            (3, "distance", [0.496015, 0.503985]),
        ],
    )
    def test_votes(self, k: int, kernel: Any, expected: list[float]) -> None:
        assert_rows(neighbours(k, 1.0, kernel).votes(QUERY)[0], expected)

    def test_predictions(self) -> None:
        def predict(share: float) -> Tensor:
            return neighbours(2, share)(QUERY, lambda z: z + BIAS)[0]

        assert_rows(predict(0.0).softmax(0), [0.689974, 0.310026])
        assert_rows(predict(0.5).exp(), [0.545643, 0.454357])
        assert_rows(predict(0.8).exp(), [0.459045, 0.540955])
        assert predict(0.0).equal((QUERY + BIAS)[0])

    def test_ties_go_to_the_first(self) -> None:
        store = torch.tensor([[1.0, 0], [1, 0], [1, 0]], dtype=torch.float64)
        assert_rows(neighbours(2, 1.0, store=store).votes(QUERY)[0], [1, 0])

    def test_fewer_samples_than_neighbours(self) -> None:
        assert_rows(neighbours(6, 1.0).votes(QUERY)[0], neighbours(4, 1.0).votes(QUERY)[0])

    def test_far_away(self) -> None:
        """All similarities underflow, and the nearest sample decides."""
        far = QUERY + 1e6
        assert_rows(neighbours(3, 1.0).votes(far)[0], [0, 1])

    def test_without_a_store_the_head_predicts(self) -> None:
        empty = Neighbours(2, 2, 3, 2, 1.0, "squared").double()
        assert empty(QUERY, lambda z: z + BIAS).equal(QUERY + BIAS)


@pytest.mark.short("*-sequential")
@ENGINES
@pytest.mark.parametrize("capacity", [50, 4])
def test_several_rounds(engine: str, capacity: int) -> None:
    """Predictions are those of the neighbours by the server's model; training is FedAvg's."""
    data, k, scale = reference.data(), 3, 0.5
    callback = KNNPer(k=k, scale=scale, capacity=capacity)
    federation = run(reference.client(), data, callback, 3, engine=engine)
    plain = run(reference.client(), data, FedAvg(), 3, engine=engine)
    server = federation.server_states()[0]
    torch.testing.assert_close(server, plain.server_states()[0], rtol=1e-12, atol=1e-14)
    client = reference.client().eval()
    client.load_state_dict(server)
    body, head = client.network[:-1], client.network[-1]
    states = federation.callback.personalize(torch.arange(6))
    for i in range(6):
        x, y = data.samples(i, "train")
        labels = states[f"{EXTRA}.labels"][i]
        count = min(capacity, len(y))
        assert (labels >= 0).sum() == count
        store = body(x)
        if capacity < len(y):  # some of them, drawn without replacement
            places = [int((store - row).abs().sum(1).argmin()) for row in
                      states[f"{EXTRA}.store"][i, :count]]  # fmt: skip
            assert len({*places}) == count
            x, y = x[places], y[places]

        def probabilities(inputs: Tensor, lam: float, x: Tensor = x, y: Tensor = y) -> Tensor:
            found = []
            for h in body(inputs):
                squares = (body(x) - h).square().sum(1)
                weights, votes = (-squares / (3 * scale)).exp(), torch.zeros(CLASSES).double()
                for j in squares.argsort()[:k].tolist():
                    votes[y[j]] += weights[j]
                found.append(lam * votes / votes.sum() + (1 - lam) * head(h).softmax(0))
            return torch.stack(found)

        held_out, right = data.samples(i, "val"), []
        for lam in range(11):
            chosen = probabilities(held_out[0], lam / 10).argmax(1)
            right.append(int((chosen == held_out[1]).sum()))
        lam = right.index(max(right)) / 10
        assert float(states[f"{EXTRA}.share"][i]) == pytest.approx(lam)
        inputs = data.samples(i, "test")[0]
        given = federation.client_module(i)(inputs)
        torch.testing.assert_close(given.softmax(1), probabilities(inputs, lam))


def test_lam_0_is_fedavg() -> None:
    federation = run(reference.client(), reference.data(), KNNPer(lam=0.0), 2)
    x = reference.data().samples(1, "test")[0]
    client = reference.client().eval()
    client.load_state_dict(federation.server_states()[0])
    assert federation.client_module(1)(x).equal(client(x))


def test_all_neighbours_alike_are_the_class_frequencies() -> None:
    data = reference.data()
    callback = KNNPer(k=50, scale=1e12, lam=1.0)
    federation = run(reference.client(), data, callback, 2)
    counts = data.class_counts("train").double()
    for i in range(6):
        given = federation.client_module(i)(data.samples(i, "test")[0]).exp()
        expected = (counts[i] / counts[i].sum()).expand_as(given)
        torch.testing.assert_close(given, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.short("sequential")
@ENGINES
def test_without_validation_samples_and_without_any(engine: str) -> None:
    counts = (5, 0, 1)
    train = [samples(count, i, torch.float64) for i, count in enumerate(counts)]
    test = [samples(4, 9, torch.float64)] * 3
    data = TensorClients(train, test=test, num_classes=CLASSES, batch_size=4)
    federation = run(reference.client(), data, KNNPer(), 2, engine=engine)
    assert federation.callback.personalize(torch.arange(3))[f"{EXTRA}.share"].tolist() == [
        0.5,
        0,
        0.5,
    ]
    (values,) = quiet_trainer().test(federation, datamodule=data, verbose=False)
    assert 0 <= values["test/macro_acc"] <= 1


def test_after_fine_tuning_the_store_is_filled_anew() -> None:
    data = reference.data()
    federation = run(reference.client(), data, KNNPer(lam=0.5), 2, finetune_epochs=1)
    module = federation.client_module(0)
    body, x = module.network[:-1], data.samples(0, "train")[0]
    torch.testing.assert_close(module.pflight_extra.store[: len(x)], body(x).detach())


@pytest.mark.long
def test_nothing_travels() -> None:
    one = run(reference.client(), reference.data(), KNNPer(), 2)
    other = run(reference.client(), reference.data(), FedAvg(), 2)
    for left, right in zip(one.history, other.history, strict=True):
        assert (left.bytes_down, left.bytes_up) == (right.bytes_down, right.bytes_up)
    assert_same(one.client_state(0), one.server_states()[0])


def test_mixtures_have_no_zeros() -> None:
    found = mixture(torch.tensor(1.0), torch.tensor([[1.0, 0]]), torch.tensor([[0.5, 0.5]]))
    assert found.log().isfinite().all()
