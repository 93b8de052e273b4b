"""Two ranks: each trains its own clients, and the first draws them all."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from pflight.callbacks import ClusterPlot, ConvergencePlot, EmbeddingTrajectory, Local
from tests.runs import dropout_client, run, small_data


def watched_run(folder: Path, **options: Any) -> dict[str, Any]:
    pictures = [ClusterPlot(), EmbeddingTrajectory(max_clients=4), ConvergencePlot()]
    root = {"default_root_dir": folder, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(dropout_client(), small_data(), Local(), 2, *pictures, trainer=root)
    return {"models": pictures[0].state_dict(), "features": pictures[1].state_dict()}


@pytest.mark.long
def test_two_ranks_draw_what_one_does(tmp_path):
    command = [sys.executable, "-m", "tests.callbacks.test_pictures_on_ranks", str(tmp_path)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    one = watched_run(tmp_path / "one")
    for rank in (0, 1):
        two = torch.load(tmp_path / f"rank{rank}.pt")
        assert_close(two["features"], one["features"], rtol=1e-5, atol=1e-6)
        states = (one["models"], two["models"])
        first, second = (dict(zip(s["clients"].tolist(), s["models"], strict=True)) for s in states)
        assert_close(second, first, rtol=1e-5, atol=1e-6)
    names = [
        sorted(p.name for p in Path(tmp_path, f, "pictures").iterdir()) for f in ("one", "two")
    ]
    assert names[0] == names[1]
    assert len(names[0]) == 4


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    known = watched_run(folder / "two", strategy="ddp", devices=2)
    torch.save(known, folder / f"rank{torch.distributed.get_rank()}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
