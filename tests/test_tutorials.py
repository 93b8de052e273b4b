"""Every tutorial runs, and what it shows is true."""

from __future__ import annotations

import importlib.util
import runpy
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from matplotlib import pyplot

from pflight.experiments.jobs import Jobs
from tests.experiments.small import finish
from tests.pages import ROOT

FOLDER = ROOT / "docs" / "tutorials"
SHOWN: dict[str, Callable[[dict[str, Any]], bool]] = {
    "start": lambda found: found["personal"].mean() > found["shared"].mean() + 0.02,
    "module": lambda found: (
        found["errors"]["Ditto"] < min(found["errors"][name] for name in ("Local", "FedAvg"))
    ),
    "hospitals": lambda found: found["found"]["Ditto"] > max(*found["found"].values()) - 1e-6,
    "lora": lambda found: found["before"] < found["shared"] - 0.1 < found["personal"] - 0.2,
    "clusters": lambda found: (
        found["federation"].history[-1].metrics["fesem/rand_index"] == 1
        and found["four"] > found["one"] + 0.1
    ),
    "compare": lambda found: found["sections"][1].splitlines()[4].startswith("| FeSEM |"),
    "method": lambda found: (
        found["values"]["Neighbours"] > max(found["values"]["Local"], found["values"]["FedAvg"])
        and abs(found["one"] - found["many"]) < 0.01
        and found["alone"] == pytest.approx(found["values"]["Local"], abs=0.01)
    ),
    "deploy": lambda found: (
        found["status"] == 0
        and found["deployed"].keys() == found["simulated"].keys()
        and all(found["deployed"][n].equal(value) for n, value in found["simulated"].items())
    ),
    "watch": lambda found: found["points"][-1].value == found["last"].bytes_up,
    "migrate": lambda found: (
        found["found"]["test/micro_acc"] > found["found"]["test/server/micro_acc"] + 0.1
    ),
}
"""By tutorial, whether its variables have the values that its text promises."""


class Forked:
    """A process of ``python -m pflight``, forked from one that has imported what it needs."""

    def __init__(self, command: list[str], stdout: Any, stderr: int) -> None:
        from tests.deploy.machines import forks, run_here

        words = command[command.index("pflight") + 1 :]
        given = str(Path(stdout.name).absolute()), words, str(Path.cwd())
        self.process = forks.Process(target=run_here, args=given)
        self.process.start()

    def terminate(self) -> None:
        self.process.terminate()

    def wait(self) -> int | None:
        self.process.join(300)
        return self.process.exitcode


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.py")))
def test_it_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pyplot, "show", lambda: None)
    # Runs in this process save the imports of others.
    monkeypatch.setattr(Jobs, "work", lambda self: finish(self.comparison))
    if name == "lora":
        pytest.importorskip("peft")
    if name == "deploy":
        pytest.importorskip("flwr")
        pytest.importorskip("trustme")
        monkeypatch.setattr(subprocess, "Popen", Forked)
    matplotlib.use("Agg")
    try:  # not as __main__, which each fork would run again
        assert SHOWN[name](runpy.run_path(str(FOLDER / f"{name}.py"), run_name=name))
    finally:
        pyplot.close("all")


def test_a_page_of_other_code_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jupytext")
    path = ROOT / "benchmarks" / "tutorials.py"
    spec = importlib.util.spec_from_file_location("tutorials", path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    monkeypatch.setattr(made, "FOLDER", tmp_path)
    for suffix in ("py", "md", "ipynb"):
        (tmp_path / f"start.{suffix}").write_text((FOLDER / f"start.{suffix}").read_text())
    assert made.stale("start") == []
    page = tmp_path / "start.md"
    text = page.read_text()
    assert "```text\n" in text
    page.write_text(text.replace("one model for all:", "one model for everybody:"))
    assert made.stale("start") == [page]
    page.write_text(text.replace("```text\none model for all: ", "```text\n"))  # an output
    assert made.stale("start") == []
