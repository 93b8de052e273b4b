"""What all methods with personal models stand, whatever they compute."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pflight import Federation
from pflight.callbacks import APFL, L2GD, Ditto, PerFedAvg, PFedMe, ServerCallback
from pflight.models import Classifier
from tests.runs import (
    assert_same,
    batchnorm_client,
    dropout_client,
    failing_at_the_end,
    linear_client,
    run,
    small_data,
)

Method = Callable[[], ServerCallback]

METHODS: dict[str, Method] = {
    "Ditto": partial(Ditto, lam=0.5),
    "APFL": partial(APFL, alpha_lr=0.1),
    "pFedMe": partial(PFedMe, lam=2.0, personal_steps=2),
    "L2GD": partial(L2GD, lam=2.0),
    "Per-FedAvg": partial(PerFedAvg, alpha=0.1, hessian=True),
}
ALL = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
AS_FEDAVG = [name for name in METHODS if name != "L2GD"]


def fit(
    method: Method,
    rounds: int = 3,
    make: Callable[..., Classifier] = batchnorm_client,
    data: Any = None,
    **options: Any,
) -> Federation:
    data = small_data(cohort_size=3) if data is None else data
    return run(make(), data, method(), rounds, **options)


@pytest.mark.short("APFL")
@ALL
def test_both_engines_agree(method: Method) -> None:
    data = small_data(cohort_size=4, dtype=torch.float64)
    one, other = (
        fit(method, 4, lambda: batchnorm_client().double(), data, local_epochs=2, engine=engine)
        for engine in ("sequential", "vectorized")
    )
    assert other.clients.attached_engine.obstacle is None
    pairs = [(one.server_states()[0], other.server_states()[0])]
    pairs += [(one.client_state(i), other.client_state(i)) for i in range(6)]
    for left, right in pairs:
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-10)


@pytest.mark.short("L2GD")
@ALL
def test_a_resumed_run_knows_all_personal_models(method: Method, tmp_path: Path) -> None:
    fit(method, 2, dropout_client).trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed = fit(method, 4, dropout_client, ckpt_path=tmp_path / "half.ckpt")
    whole = fit(method, 4, dropout_client)
    assert_same(resumed.server_states()[0], whole.server_states()[0])
    for i in range(6):
        assert_same(resumed.client_state(i), whole.client_state(i))


@pytest.mark.short("Ditto", "Per-FedAvg")
@pytest.mark.parametrize("name", AS_FEDAVG)
def test_only_the_network_travels(name: str) -> None:
    network = batchnorm_client().state_dict()
    for entry in fit(METHODS[name]).history:
        size = sum(value.nbytes for value in network.values())
        assert entry.bytes_down == entry.bytes_up == 3 * size


@pytest.mark.short("Ditto", "APFL", "Per-FedAvg")
@ALL
def test_a_clients_module_predicts_with_its_personal_model(method: Method) -> None:
    data = small_data(cohort_size=3)
    federation = fit(method, data=data)
    federation.trainer.test(federation, datamodule=data, verbose=False)
    judged = federation.client_metrics("test")
    states = [federation.client_state(i)["network.0.weight"] for i in range(6)]
    assert not torch.equal(states[0], states[1])
    for i in range(6):
        x, y = data.samples(i, "test")
        logits = federation.client_module(i)(x)
        loss = torch.nn.functional.cross_entropy(logits, y)
        torch.testing.assert_close(judged["loss"][i].float(), loss)


@pytest.mark.parametrize("method", [METHODS["Ditto"], METHODS["APFL"]], ids=["Ditto", "APFL"])
def test_newcomers_have_the_servers_model(method: Method) -> None:
    data = small_data(holdout_clients=0.34)
    federation = fit(method, data=data)
    server = federation.server_states()[0]
    for i in data.new_clients.tolist():
        torch.testing.assert_close(federation.client_state(i), server)


@pytest.mark.short("Ditto", "L2GD", "Per-FedAvg")
@ALL
@pytest.mark.filterwarnings("ignore:.*client . failed:UserWarning")
def test_a_client_that_always_fails_keeps_nothing(method: Method) -> None:
    client = linear_client(failing_at_the_end())
    federation = run(client, small_data(), method(), 3, engine="sequential")
    assert all(entry.failed == [3] for entry in federation.history)
    for slot in ("private", "memory"):
        assert not federation.clients.memory.seen(slot, torch.tensor([3])).any()
    assert all(value.isfinite().all() for value in federation.client_state(3).values())


@ALL
def test_a_cohort_of_one_and_clients_of_one_sample(method: Method) -> None:
    data = small_data(counts=[1, 0, 5, 1, 8, 6], cohort_size=1)
    federation = fit(method, 5, data=data)
    states = [federation.client_state(i) for i in range(6)]
    assert all(value.isfinite().all() for state in states for value in state.values())


@pytest.mark.short("Ditto", "APFL", "Per-FedAvg")
@ALL
def test_fine_tuning_goes_on_from_the_personal_model_with_the_task_alone(method: Method) -> None:
    def loss(federation: Federation) -> Tensor:
        modules = [federation.client_module(i) for i in range(6)]
        batches = [data.samples(i, "train") for i in range(6)]
        return torch.stack([Classifier.loss(m, b) for m, b in zip(modules, batches, strict=True)])

    data = small_data(batch_size=None)
    plain = fit(method, make=linear_client, data=data)
    tuned = fit(method, make=linear_client, data=data, finetune_epochs=1)
    assert_same(plain.server_states()[0], tuned.server_states()[0])
    assert (loss(tuned) < loss(plain)).all()
