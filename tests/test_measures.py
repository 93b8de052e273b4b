"""The scripts that measure what docs/papers.md and docs/datasets.md say of runs and data."""

from __future__ import annotations

import importlib
import io
import json
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from pflight.__main__ import main

ROOT = Path(__file__).parents[1]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.chdir(ROOT)
    return importlib.import_module


def fit(folder: Path, algorithm: str, *options: str) -> None:
    configs = "--config=configs/data/digits.yaml", f"--config=configs/algorithm/{algorithm}.yaml"
    said = "--trainer.max_epochs=1", "--trainer.enable_progress_bar=false", "--data.num_clients=5"
    main(["fit", *configs, *said, f"--trainer.default_root_dir={folder}", *options])


def test_clusters_of_equal_clients_have_all_variance_between_them(script: Any) -> None:
    between = script("clusters").between
    frequencies = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    assert between(frequencies, np.array([0, 0, 1, 1])) == pytest.approx(1)
    assert between(frequencies, np.array([0, 1, 0, 1])) == pytest.approx(0)
    # One of two clients strays: means 3/4 and 1/4 of 1 in place of 1 and 0.
    frequencies = np.array([[1.0, 0.0], [0.5, 0.5], [0.5, 0.5], [0.0, 1.0]])
    assert between(frequencies, np.array([0, 0, 1, 1])) == pytest.approx(0.5)


def test_clusters_of_a_run_are_those_of_its_checkpoint(script: Any, tmp_path: Path) -> None:
    fit(tmp_path, "fesem", "--trainer.callbacks.num_clusters=2")
    state = torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)["callbacks"]
    (assigned,) = (own["assignments"] for own in state.values() if "assignments" in own)
    sizes = sorted(torch.bincount(assigned[assigned >= 0]).tolist(), reverse=True)
    cells = script("clusters").of_run(tmp_path).split(" | ")
    assert cells[1] == ", ".join(map(str, sizes))


def test_what_has_no_clusters_or_no_hypernetworks_is_an_error(script: Any, tmp_path: Path) -> None:
    fit(tmp_path, "fedavg")
    with pytest.raises(SystemExit, match=f"{tmp_path} is of a method without clusters"):
        script("clusters").of_run(tmp_path)
    with pytest.raises(SystemExit, match=f"{tmp_path} is not of pFedLA"):
        script("layer_weights").own_weights(tmp_path)


@pytest.mark.long
def test_layers_are_shared_evenly_until_a_hypernetwork_steps(script: Any, tmp_path: Path) -> None:
    own_weights = script("layer_weights").own_weights
    for lr, is_even in ((0, True), (50, False)):
        fit(tmp_path / str(lr), "pfedla", f"--trainer.callbacks.lr={lr}", "--trainer.max_epochs=3")
        before = sorted((tmp_path / str(lr)).rglob("*"))
        weights = torch.stack([*own_weights(tmp_path / str(lr)).values()])
        assert weights.shape[1] == 5
        assert torch.allclose(weights, torch.tensor(0.2), atol=1e-6) == is_even
        assert sorted((tmp_path / str(lr)).rglob("*")) == before


def after(number: int, clients: list[int], accuracies: list[float]) -> dict[str, Any]:
    own = {"acc": accuracies}
    return {"round": number, "clients": clients, "own": own, "samples": [4, 4, 0]}


def test_what_a_round_takes_is_of_its_own_clients_with_test_samples(
    script: Any, tmp_path: Path
) -> None:
    forgetting = script("forgetting")
    tests = [
        after(9, [0], [0.5, 0.25, 0.0]),
        after(10, [0], [0.75, 1.0, 0.0]),  # client 1 was not in the round
        after(11, [1, 2], [0.0, 0.5, 1.0]),  # and client 2 has no test samples
    ]
    assert forgetting.gains(tests).tolist() == [0.25, -0.5]
    with pytest.raises(ValueError, match="round 10 was not tested"):
        forgetting.gains([tests[0], tests[2]])

    folder = tmp_path / "fedec/cifar10_100_2/fedec_wo/0"
    (folder / "tests").mkdir(parents=True)
    with pytest.raises(SystemExit, match=f"{folder}: it takes the tests after two rounds"):
        forgetting.of_run(folder)
    for test in tests:
        (folder / f"tests/{test['round']}.json").write_text(json.dumps(test))
    assert forgetting.of_run(folder).endswith("| -12.50 | 50 % |")  # no interval of two pairs
    for number in range(12, 16):
        test = after(number, [1], [0.0, 0.25 + (number % 2) / 2, 1.0])
        (folder / f"tests/{number}.json").write_text(json.dumps(test))
    *_, shown, lost, _ = forgetting.of_run(folder).split("|")
    mean, low, high = (float(part) for part in re.findall(r"-?\d+\.\d+", shown))
    assert (mean, lost) == (0, " 50 % ")  # 0.25, -0.5, -0.25, 0.5, -0.5 and 0.5
    assert -50 <= low < 0 < high <= 50


def archive(path: Path, order: dict[str, list[int]]) -> None:
    """Draw blocks, each drawer's of a width of its own in all characters of an alphabet."""
    with zipfile.ZipFile(path, "w") as file:
        for alphabet, widths in order.items():
            for character in range(2):
                for drawer, width in enumerate(widths, 1):
                    image, png = Image.new("1", (105, 105), 1), io.BytesIO()
                    image.paste(0, (5, 5, 5 + width, 15 + width // (character + 1)))
                    image.save(png, "PNG")
                    name = f"{alphabet}/character{character:02}/0000_{drawer:02}.png"
                    file.writestr(f"{path.stem}/{name}", png.getvalue())


def test_drawers_are_told_by_their_habits(script: Any, tmp_path: Path) -> None:
    drawers = script("drawers")
    same, other = [10, 20, 40, 80], [20, 80, 10, 40]
    archive(tmp_path / "images_background.zip", {"A": same, "B": same, "C": other})
    a, b, c = drawers.habits_of(str(tmp_path)).values()
    assert drawers.correlations(a[:1], a[1:])[0] == pytest.approx(1)
    assert drawers.correlations(a, b)[0] == pytest.approx(1)
    assert drawers.correlations(a, c)[0] == pytest.approx(0)
