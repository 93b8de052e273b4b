"""FedCAC (section 2b.4)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from pflight import Federation
from pflight.callbacks import FedAvg, FedCAC
from pflight.errors import ConfigurationError
from tests.runs import (
    ENGINES,
    Normalised,
    assert_same,
    batchnorm_client,
    dropout_client,
    judged,
    parameters,
    quadratic_client,
    run,
    shared,
    small_data,
    world_q,
)


class Late(FedCAC):
    """Counts two rounds of the first and one of each other."""

    def collaborators(self, clients):
        rounds = self.clients.rounds
        beta, self.beta = self.beta, self.beta * (rounds + 1) / (2 * rounds + 1)
        found = super().collaborators(clients)
        self.beta = beta
        return found


def fit(callback: FedCAC, rounds: int, **options) -> Federation:
    return run(quadratic_client(), world_q(), callback, rounds, local_steps=2, **options)


@ENGINES
def test_k1(engine: str) -> None:
    callback = FedCAC(tau=0.5, beta=2.0)
    one = fit(callback, 1, engine=engine)
    assert callback.masks.tensors()["network.theta"].tolist() == [[0, 1], [1, 0], [0, 1]]
    overlaps = callback.overlaps(torch.arange(3))
    assert overlaps.fill_diagonal_(0).tolist() == [[0, 0, 1], [0, 0, 0], [1, 0, 0]]
    for i, start in enumerate([(0.445, 0.2), (1.08, 0.2883333), (0.445, 0.2)]):
        assert judged(one, i) == pytest.approx(start, abs=1e-6)
    two = fit(FedCAC(tau=0.5, beta=2.0), 2, engine=engine)
    for i, start in enumerate([(0.970825, 0.345), (1.7712, 0.4804417), (0.970825, 0.345)]):
        assert judged(two, i) == pytest.approx(start, abs=1e-6)


def test_k1_what_clients_returned() -> None:
    federation = fit(FedCAC(tau=0.5, beta=2.0, judged="local"), 2)
    for i, own in enumerate([(0.55045, -0.232), (1.7712, 0.42355), (-0.01955, 0.922)]):
        assert judged(federation, i) == pytest.approx(own, abs=1e-6)


def test_k1_once_the_threshold_is_over_all_overlaps_everybody_is_alone() -> None:
    federation = fit(Late(tau=0.5, beta=2.0), 2)  # its second round has t = 3
    assert judged(federation, 0) == pytest.approx([0.970825, -0.232], abs=1e-6)


@pytest.mark.short("sequential")
@ENGINES
def test_three_rounds(engine: str) -> None:
    """Parameters of a client depend on its own statistics alone, which are not mixed."""
    case = Normalised.make()
    callback = FedCAC(tau=0.15, beta=4.0)  # no bias before BatchNorm, which rounding moves
    federation = case.run(callback, 4, engine=engine)
    names = [n for n, _ in batchnorm_client().named_parameters()]
    sizes = [p.numel() for p in batchnorm_client().parameters()]
    ends = np.cumsum(sizes)
    counts, common = case.world.counts, case.theta
    masks, customised, norms, grouped = {}, {}, {}, []
    for round_, entry in enumerate(federation.history):
        trained = {}
        for i in entry.clients:
            start = common if i not in masks else np.where(masks[i], customised[i], common)
            statistics = norms.get(i, case.statistics)
            trained[i], norms[i] = case.train(round_, i, start, statistics)
            masks[i] = np.zeros(len(start), bool)
            for size, end in zip(sizes, ends, strict=True):
                part = slice(end - size, end)
                values = np.abs((trained[i] - start)[part] * trained[i][part])
                chosen = np.argsort(-values, kind="stable")[: int(0.15 * size)]
                masks[i][end - size + chosen[values[chosen] > 0]] = True
        overlap = {
            (i, j): 1 - (masks[i] ^ masks[j]).sum() / (2 * masks[i].sum())
            for i in trained
            for j in trained
            if i != j
        }
        values = np.array(list(overlap.values()))
        threshold = values.mean() + (round_ + 1) / 4 * (values.max() - values.mean())
        for i in trained:
            group = [j for j in trained if j == i or overlap[i, j] >= threshold - 1e-6]
            customised[i] = np.mean([trained[j] for j in group], axis=0)
            grouped.append(len(group))
        weights = counts[entry.clients]
        common = np.average(list(trained.values()), axis=0, weights=weights)
    assert {*grouped} >= {1, 2}
    assert len(masks) < 6 or round_ == 3
    assert parameters(federation.server_states()[0]) == pytest.approx(common, rel=1e-9, abs=1e-11)
    for i in range(6):
        start = common if i not in masks else np.where(masks[i], customised[i], common)
        state = federation.client_state(i)
        assert parameters(state) == pytest.approx(start, rel=1e-9, abs=1e-11)
        own = np.concatenate([state["network.1.running_mean"], state["network.1.running_var"]])
        assert own == pytest.approx(norms.get(i, case.statistics), rel=1e-9, abs=1e-11)
    assert list(callback.masks.tensors()) == names


def test_with_no_critical_parameters_it_is_fedavg() -> None:
    data = small_data(cohort_size=3, dtype=torch.float64)
    one, other = (
        run(batchnorm_client().double(), data, callback, 3)
        for callback in (FedCAC(tau=0), FedAvg(buffers="local"))
    )
    for i in range(6):
        left, right = one.client_state(i), other.client_state(i)
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-14)


def test_with_all_parameters_critical_it_is_uniform_fedavg() -> None:
    """Since all masks are equal, everybody collaborates, in any round."""
    one = fit(FedCAC(tau=1, beta=1.0), 3)
    other = run(quadratic_client(), world_q(), FedAvg("uniform"), 3, local_steps=2)
    for i in range(3):
        assert judged(one, i) == pytest.approx(shared(other), rel=1e-9)


def test_a_tensor_that_stays_zero_has_nothing_critical() -> None:
    callback = FedCAC()
    start = torch.tensor([[0.0, 0, 1, 2], [1.0, 1, 1, 1]])
    trained = torch.tensor([[0.0, 0, 1, 2], [2.0, 2, 2, 2]])
    assert callback.critical(start, trained).long().tolist() == [[0, 0, 0, 0], [1, 1, 0, 0]]


@pytest.mark.short("bias-dtype0", "zero bias-dtype1")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("zero", [False, True], ids=["bias", "zero bias"])
def test_rounding_makes_nothing_critical(zero: bool, dtype: torch.dtype) -> None:
    """A bias before BatchNorm has no gradient but rounding, of which each engine has its own."""
    federations = []
    for engine in "sequential", "vectorized":
        client, callback = batchnorm_client().to(dtype), FedCAC()
        if zero:
            torch.nn.init.zeros_(client.network[0].bias)
        data = small_data((6, 12, 7, 10, 3, 8), dtype)
        federations.append(run(client, data, callback, 3, local_epochs=2, engine=engine))
        assert not callback.masks.tensors()["network.0.bias"].any()
    for i in range(6):
        torch.testing.assert_close(*(federation.client_state(i) for federation in federations))


def test_who_is_alone_collaborates_with_nobody() -> None:
    federation = run(batchnorm_client(), small_data(cohort_size=1), FedCAC(judged="local"), 1)
    (client,) = federation.history[0].clients
    own, ids = federation.client_state(client), torch.tensor([client])
    sent = federation.callback.broadcast(ids)[0]
    names = federation.layout.parameters
    assert_same({name: sent[name] for name in names}, {name: own[name] for name in names})


def test_a_resumed_run_knows_masks_and_models(tmp_path: Path) -> None:
    def train(rounds: int, **options) -> Federation:
        return run(dropout_client(), small_data(cohort_size=3), FedCAC(), rounds, **options)

    train(2).trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed, whole = train(4, ckpt_path=tmp_path / "half.ckpt"), train(4)
    for i in range(6):
        assert_same(resumed.client_state(i), whole.client_state(i))


def test_parameters_travel_each_way() -> None:
    data = small_data(cohort_size=3)
    one, other = (run(batchnorm_client(), data, c, 2) for c in (FedCAC(), FedAvg(buffers="local")))
    for left, right in zip(one.history, other.history, strict=True):
        assert (left.bytes_down, left.bytes_up) == (right.bytes_down, right.bytes_up)


def test_bad_options_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"FedCAC: tau must be in \[0, 1\], got 2"):
        FedCAC(tau=2)
    with pytest.raises(ConfigurationError, match="FedCAC: beta must be over 0, got 0"):
        FedCAC(beta=0)


@pytest.mark.parametrize(("tau", "size", "largest"), [(0.7, 90, 63), (0.29, 100, 29), (0.5, 7, 3)])
def test_the_share_of_critical_values_is_not_rounded_off(tau: float, size: int, largest: int):
    trained = torch.arange(1.0, size + 1).unsqueeze(0)
    mask = FedCAC(tau=tau).critical(torch.zeros_like(trained), trained)
    assert mask.nonzero()[:, 1].tolist() == list(range(size - largest, size))
