"""Training where the Trainer's device is not the CPU, as on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from pflight import Federation
from pflight.datamodules import TensorClients
from tests.algorithm_tester import ALGORITHMS, Algorithm, of_each_kind
from tests.other_device import ELSEWHERE, FarTensor, other_device, strategy
from tests.runs import CLASSES, FEATURES, batchnorm_client, quiet_trainer

SIZES = [5, 3, 5]
OWN_TRAINER = "FeSEM-auto"  # its Trainers ask Lightning for the device by name
# What these do beside training, FarTensor does not follow: nested gradients, products of stacks.
NOT_FOLLOWED = {"FedRoD-hyper", "GPFL", "kNN-Per", "pFedFDA"}
CASES = [
    pytest.param(case.id, "vectorized", marks=case.marks)
    for case in of_each_kind(ALGORITHMS)
    if case.id not in {OWN_TRAINER, *NOT_FOLLOWED}
]
CASES += [(name, "sequential") for name in ("FedAvg", "FeSEM", "FedEC", "HeurpFedLA", "SCAFFOLD")]


def unequal_data() -> TensorClients:
    random = torch.Generator().manual_seed(5)

    def samples(count: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, FEATURES, generator=random, dtype=torch.double)
        return x, torch.randint(CLASSES, (count,), generator=random)

    train, test, val = ([samples(size) for size in sizes] for sizes in (SIZES, [3] * 3, [4] * 3))
    return TensorClients(train, test=test, val=val, num_classes=CLASSES, batch_size=4)


def trained(algorithm: Algorithm, engine: str, folder: Path, **options: Any) -> list[dict]:
    """Train a round, resume for a second, test.

    Return all models, the metrics, and how far clients were stacked. The options are the Trainer's.
    """
    checkpoint = None
    for rounds in (1, 2):
        torch.manual_seed(1)
        client = batchnorm_client(algorithm.client).double()
        federation = Federation(client, engine=engine, finetune_epochs=1, on_client_error="raise")  # type: ignore[arg-type]
        trainer = quiet_trainer(rounds, algorithm.callback(), default_root_dir=folder, **options)
        trainer.fit(federation, datamodule=unequal_data(), ckpt_path=checkpoint)
        checkpoint = folder / "last.ckpt"
        trainer.save_checkpoint(checkpoint)
    metrics = trainer.test(federation, datamodule=unequal_data(), verbose=False)
    states = [*federation.server_states(), *map(federation.client_state, range(len(SIZES)))]
    runner = federation.clients.attached_engine
    names = "obstacle", "fills_batches", "_stacks_evaluation"
    return [*states, *metrics, {name: str(getattr(runner, name, None)) for name in names}]


@pytest.mark.short(
    "FeSEM-vectorized", "FedAvg-sequential", "HeurpFedLA-sequential", "SCAFFOLD-sequential"
)
@pytest.mark.parametrize(("name", "engine"), CASES)
def test_devices_agree(
    name: str, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "pflight.engines.stacked.stack._OFTEN", 10**9
    )  # wrapped tensors can't be traced
    expected = trained(ALGORITHMS[name], engine, tmp_path)
    with other_device(monkeypatch):
        elsewhere = {"strategy": strategy(), "accelerator": "auto"}
        results = trained(ALGORITHMS[name], engine, tmp_path, **elsewhere)
    assert_agree(results, expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("engine", ["vectorized", "sequential"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_gpu_agrees(name: str, engine: str, tmp_path: Path) -> None:
    expected = trained(ALGORITHMS[name], engine, tmp_path)
    results = trained(ALGORITHMS[name], engine, tmp_path, accelerator="gpu", devices=1)
    assert_agree(results, expected)


def assert_agree(results: list[dict], expected: list[dict]) -> None:
    """Compare models and metrics, wherever they lie, up to rounding, and what else there is."""
    for own, reference in zip(results, expected, strict=True):
        for key, value in own.items():
            if isinstance(value, str):
                assert value == reference[key]
            else:
                near = getattr(value, "near", value)
                assert_close(near, reference[key], equal_nan=True, check_device=False)


def test_devices_do_not_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    with other_device(monkeypatch):
        far = torch.ones(3).to(ELSEWHERE)
        assert isinstance(far, FarTensor)
        assert far.device == ELSEWHERE
        assert (far + 1).sum().item() == 6
        with pytest.raises(RuntimeError, match="same device"):
            far + torch.ones(3)
        with pytest.raises(TypeError, match="numpy"):
            far.numpy()
