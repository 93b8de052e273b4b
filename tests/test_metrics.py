"""ClientMetrics against hand-worked values, scikit-learn, torchmetrics and two real processes."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sklearn.metrics import accuracy_score, f1_score
from torch import Tensor
from torch.testing import assert_close
from torchmetrics.functional.classification import (
    multiclass_accuracy,
    multiclass_f1_score,
    multiclass_stat_scores,
)

from pflight.errors import ConfigurationError
from pflight.metrics.collection import ClientMetrics

NAN = float("nan")

untimed = settings(deadline=None)

# Client 0 has labels 0, 0, 1, 2 and predictions 0, 1, 1, 1; client 1 one correct sample of class 3.
E1 = (
    torch.tensor([0, 0, 0, 0, 1]),
    torch.tensor([0, 1, 1, 1, 3]),
    torch.tensor([0, 0, 1, 2, 3]),
)

pytestmark = pytest.mark.fast


def approx(value: float) -> object:
    return pytest.approx(value, abs=1e-7)


@st.composite
def batches(draw: st.DrawFn, num_clients: int = 5, num_classes: int = 4) -> tuple[Tensor, ...]:
    """Draw clients, predictions, labels and losses of up to 60 samples."""
    size = draw(st.integers(1, 60))

    def integers(high: int) -> Tensor:
        return torch.from_numpy(draw(arrays(np.int64, size, elements=st.integers(0, high - 1))))

    loss = torch.from_numpy(draw(arrays(np.float64, size, elements=st.floats(0, 10, width=32))))
    return integers(num_clients), integers(num_classes), integers(num_classes), loss


def counted(batch: tuple[Tensor, ...], **options: str) -> ClientMetrics:
    metrics = ClientMetrics(num_clients=5, num_classes=4, **options)
    metrics.update(*batch)
    return metrics


def by_client(batch: tuple[Tensor, ...]) -> dict[int, tuple[Tensor, ...]]:
    """Split predictions, labels and losses by client."""
    clients, *values = batch
    return {
        int(client): tuple(value[clients == client] for value in values)
        for client in clients.unique()
    }


class TestWorkedExample:
    def test_means_over_clients(self) -> None:
        metrics = ClientMetrics(num_clients=2, num_classes=4)
        metrics.update(*E1)
        values = {name: value.item() for name, value in metrics.compute().items()}
        assert np.isnan(values.pop("loss"))
        assert values == {
            "micro_acc": approx(0.6),
            "macro_acc": approx(0.75),
            "micro_f1": approx(0.5111111),
            "macro_f1": approx(0.6944444),
            "pooled_acc": approx(0.6),
            "worst_decile_acc": approx(0.5),
        }

    @pytest.mark.parametrize(
        ("f1_average", "num_classes", "expected"),
        [
            ("union", 62, [7 / 18, 1.0]),  # classes 0, 1, 2: F1 of 2/3, 1/2 and 0
            ("true", 62, [7 / 18, 1.0]),
            ("all", 62, [0.0188172, 1 / 62]),
        ],
    )
    def test_f1_average(self, f1_average: str, num_classes: int, expected: list[float]) -> None:
        metrics = ClientMetrics(2, num_classes, f1_average=f1_average)
        metrics.update(*E1)
        assert metrics.per_client()["f1"].tolist() == [approx(value) for value in expected]

    def test_a_class_only_predicted_counts_in_the_union_but_not_in_true(self) -> None:
        batch = (torch.zeros(2).long(), torch.tensor([0, 1]), torch.tensor([0, 0]))
        f1 = {
            name: counted(batch, f1_average=name).per_client()["f1"][0]
            for name in ("union", "true")
        }
        assert f1 == {"union": approx(1 / 3), "true": approx(2 / 3)}

    def test_binary_counts_class_one_alone(self) -> None:
        metrics = ClientMetrics(num_clients=3, num_classes=2, f1_average="binary")
        clients = torch.tensor([0, 0, 0, 0, 1, 1])
        metrics.update(clients, torch.tensor([1, 1, 0, 0, 0, 0]), torch.tensor([1, 0, 1, 0, 0, 0]))
        assert_close(
            metrics.per_client()["f1"], torch.tensor([0.5, 0, NAN]).double(), equal_nan=True
        )

    def test_loss_is_a_mean_over_samples(self) -> None:
        metrics = ClientMetrics(num_clients=3, num_classes=4)
        metrics.update(*E1, loss=torch.tensor([1.0, 2.0, 3.0, 4.0, 0.5]))
        expected = torch.tensor([2.5, 0.5, NAN]).double()
        assert_close(metrics.per_client()["loss"], expected, equal_nan=True)
        assert metrics.compute()["loss"].item() == approx(2.1)


@pytest.mark.parametrize(("num_clients", "worst"), [(10, 1), (11, 2), (20, 2), (21, 3)])
def test_the_worst_decile_is_rounded_up(num_clients: int, worst: int) -> None:
    """Client i of N has i hits in N samples; one more client has no samples and doesn't count."""
    metrics = ClientMetrics(num_clients + 1, num_classes=2)
    clients = torch.arange(num_clients).repeat_interleave(num_clients)
    hit = torch.arange(num_clients).repeat(num_clients) < clients
    metrics.update(clients, hit, torch.ones_like(clients))
    expected = sum(range(worst)) / worst / num_clients
    assert metrics.compute()["worst_decile_acc"].item() == approx(expected)


class TestReferences:
    @untimed
    @given(batches())
    @pytest.mark.long
    def test_scikit_learn_per_client(self, batch: tuple[Tensor, ...]) -> None:
        values = counted(batch).per_client()
        of_all = counted(batch, f1_average="all").per_client()["f1"]
        of_true = counted(batch, f1_average="true").per_client()["f1"]
        parts = by_client(batch)
        for client, (preds, target, loss) in parts.items():
            f1 = {
                name: f1_score(target, preds, labels=labels, average="macro", zero_division=0)
                for name, labels in {
                    "union": None,
                    "true": target.unique(),
                    "all": range(4),
                }.items()
            }
            assert values["num_samples"][client] == len(target)
            assert values["acc"][client].item() == approx(accuracy_score(target, preds))
            assert values["loss"][client].item() == approx(loss.mean().item())
            assert values["f1"][client].item() == approx(f1["union"])
            assert of_true[client].item() == approx(f1["true"])
            assert of_all[client].item() == approx(f1["all"])
        absent = [client for client in range(5) if client not in parts]
        assert (values["num_samples"][absent] == 0).all()
        for name in ("acc", "f1", "loss"):
            assert values[name][absent].isnan().all()
        assert of_all[absent].isnan().all()

    @untimed
    @given(batches())
    def test_torchmetrics_per_client(self, batch: tuple[Tensor, ...]) -> None:
        metrics = counted(batch)
        values = metrics.per_client()
        for client, (preds, target, _) in by_client(batch).items():
            counts = multiclass_stat_scores(preds, target, num_classes=4, average="none")
            assert_close(metrics.tp[client], counts[:, 0])
            assert_close(metrics.fp[client], counts[:, 1])
            assert_close(metrics.fn[client], counts[:, 3])
            accuracy = multiclass_accuracy(preds, target, num_classes=4, average="micro")
            assert values["acc"][client].item() == approx(accuracy.item())
            f1 = multiclass_f1_score(preds, target, num_classes=4, average="macro")
            assert values["f1"][client].item() == approx(f1.item())

    @untimed
    @given(batches())
    def test_means_over_clients(self, batch: tuple[Tensor, ...]) -> None:
        metrics = counted(batch)
        values, means = metrics.per_client(), metrics.compute()
        present = values["num_samples"] > 0
        weights = values["num_samples"][present].numpy()
        for name in ("acc", "f1"):
            each = values[name][present].numpy()
            assert means[f"micro_{name}"].item() == approx(np.average(each, weights=weights))
            assert means[f"macro_{name}"].item() == approx(each.mean())
        _, preds, target, loss = batch
        assert means["pooled_acc"].item() == approx(accuracy_score(target, preds))
        assert means["loss"].item() == approx(loss.mean().item())
        assert means["worst_decile_acc"] == values["acc"][present].min()


class TestStates:
    @untimed
    @given(batches(), st.integers(0, 60))
    def test_parts_merge_to_the_whole(self, batch: tuple[Tensor, ...], cut: int) -> None:
        whole = counted(batch)
        first = counted(tuple(values[:cut] for values in batch))
        first.merge_state(counted(tuple(values[cut:] for values in batch)))
        assert_close(first.metric_state, whole.metric_state)
        assert_close(first.compute(), whole.compute(), equal_nan=True)

    @untimed
    @given(batches(), st.randoms(use_true_random=False))
    def test_order_does_not_matter(self, batch: tuple[Tensor, ...], random: object) -> None:
        order = list(range(len(batch[0])))
        random.shuffle(order)
        shuffled = counted(tuple(values[order] for values in batch))
        assert_close(shuffled.metric_state, counted(batch).metric_state)

    @untimed
    @given(batches(), st.sets(st.integers(0, 4)))
    def test_restriction_equals_the_metrics_of_these_clients(
        self, batch: tuple[Tensor, ...], chosen: set[int]
    ) -> None:
        metrics = counted(batch)
        everyone = metrics.compute()
        subset = torch.tensor(sorted(chosen), dtype=torch.int64)
        kept = torch.isin(batch[0], subset)
        alone = counted(tuple(values[kept] for values in batch))
        assert_close(metrics.compute(subset), alone.compute(), equal_nan=True)
        assert_close(metrics.compute(), everyone, equal_nan=True)

    def test_reset_clone_and_pickle(self) -> None:
        metrics = ClientMetrics(num_clients=2, num_classes=4, f1_average="all")
        metrics.update(*E1)
        expected = metrics.compute()
        copies = [metrics.clone(), pickle.loads(pickle.dumps(metrics))]
        metrics.reset()
        assert not any(state.any() for state in metrics.metric_state.values())
        for copy in copies:
            assert_close(copy.compute(), expected, equal_nan=True)
            copy.update(*E1)
            assert_close(copy.tp.sum(), torch.tensor(6))

    def test_counts_are_exact_and_grow_with_clients_and_classes_only(self) -> None:
        metrics = ClientMetrics(num_clients=2, num_classes=4)
        for _ in range(3):
            metrics.update(*E1)
        assert metrics.tp.tolist() == [[3, 3, 0, 0], [0, 0, 0, 3]]
        assert metrics.fp.tolist() == [[0, 6, 0, 0], [0, 0, 0, 0]]
        assert metrics.fn.tolist() == [[3, 0, 3, 0], [0, 0, 0, 0]]
        assert {state.dtype for state in (metrics.tp, metrics.fp, metrics.fn)} == {torch.int64}

    def test_it_is_usable_after_a_reset_in_inference_mode(self) -> None:
        metrics = ClientMetrics(num_clients=2, num_classes=4)
        with torch.inference_mode():
            metrics.update(*E1)
            metrics.reset()
        metrics.update(*E1)
        assert metrics.compute()["macro_acc"].item() == approx(0.75)

    def test_half_precision_losses_are_summed_in_double(self) -> None:
        metrics = ClientMetrics(num_clients=1, num_classes=2)
        zeros = torch.zeros(4096, dtype=torch.int64)
        metrics.update(zeros, zeros, zeros, torch.ones(4096, dtype=torch.bfloat16))
        assert metrics.loss_sum.tolist() == [4096.0]

    def test_an_empty_batch_changes_nothing(self) -> None:
        metrics = ClientMetrics(num_clients=2, num_classes=4)
        metrics.update(*(values[:0] for values in E1))
        assert not any(state.any() for state in metrics.metric_state.values())

    def test_no_clients_with_samples_give_nan(self) -> None:
        metrics = ClientMetrics(num_clients=3, num_classes=4)
        metrics.update(*E1)
        assert all(value.isnan() for value in metrics.compute(torch.tensor([2])).values())


def count_on_rank(rank: int, folder: Path) -> None:
    """Count every second sample of E1, and save what this rank reports."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=2
    )
    metrics = ClientMetrics(num_clients=2, num_classes=4)
    metrics.update(*(values[rank::2] for values in E1))
    report = (metrics.compute(), metrics.per_client(), metrics.tp.sum())
    torch.save(report, folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.long
def test_two_processes_report_the_sum_of_their_counts(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(count_on_rank, args=(tmp_path,), nprocs=2)
    alone = ClientMetrics(num_clients=2, num_classes=4)
    alone.update(*E1)
    for rank, own_hits in enumerate([3, 0]):
        means, each, hits = torch.load(tmp_path / f"{rank}.pt")
        assert_close(means, alone.compute(), equal_nan=True)
        assert_close(each, alone.per_client(), equal_nan=True)
        assert hits == own_hits


class TestBadInput:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"num_clients": 0, "num_classes": 2}, "num_clients must be at least 1, not 0"),
            ({"num_clients": 1, "num_classes": 0}, "num_classes must be at least 1, not 0"),
            ({"num_clients": 1, "num_classes": 2, "f1_average": "macro"}, "not 'macro'"),
            ({"num_clients": 1, "num_classes": 3, "f1_average": "binary"}, "not num_classes=3"),
        ],
    )
    def test_arguments(self, arguments: dict[str, object], message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            ClientMetrics(**arguments)

    @pytest.mark.parametrize(
        ("position", "value", "message"),
        [
            (0, 2, r"client 2 is out of range: it must lie in 0\.\.1"),
            (0, -1, "client -1"),
            (1, 4, r"predicted class 4 is out of range: it must lie in 0\.\.3"),
            (2, -1, "label -1"),
        ],
    )
    def test_out_of_range(self, position: int, value: int, message: str) -> None:
        batch = [values.clone() for values in E1]
        batch[position][3] = value
        metrics = ClientMetrics(num_clients=2, num_classes=4)
        with pytest.raises(ConfigurationError, match=message):
            metrics.update(*batch)
        assert not metrics.tp.any()

    def test_shapes(self) -> None:
        clients, preds, target = E1
        metrics = ClientMetrics(num_clients=2, num_classes=4)
        with pytest.raises(ConfigurationError, match="vectors of one length"):
            metrics.update(clients, torch.nn.functional.one_hot(preds), target)
        with pytest.raises(ConfigurationError, match="vectors of one length"):
            metrics.update(clients, preds, target, loss=torch.tensor(0.5))

    def test_unknown_client_in_a_restriction(self) -> None:
        metrics = ClientMetrics(num_clients=2, num_classes=4)
        metrics.update(*E1)
        with pytest.raises(ConfigurationError, match="client 7"):
            metrics.compute(torch.tensor([7]))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_counts_on_the_gpu_equal_those_on_the_cpu() -> None:
    metrics = ClientMetrics(num_clients=2, num_classes=4)
    metrics.update(*E1)
    on_gpu = ClientMetrics(num_clients=2, num_classes=4).to("cuda")
    on_gpu.update(*(values.to("cuda") for values in E1))
    restricted = on_gpu.compute(torch.tensor([0]))
    assert_close(
        {name: value.cpu() for name, value in restricted.items()},
        metrics.compute(torch.tensor([0])),
        equal_nan=True,
    )
