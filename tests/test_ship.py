"""To ship a method, write five files: all else is made from the entry in its module."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pflight.callbacks.methods.registry import Method
from pflight.command import catalogue
from pflight.errors import ConfigurationError
from tests.algorithm_tester import shipped
from tests.pages import ROOT
from tests.runs import CLASSES, FEATURES, ByHand, batchnorm_client, network_client, run, small_data

METHODS = list(shipped())
MADE = {
    "callbacks/__init__.py",
    "README.md",
    "docs/algorithms.md",
    "docs/api/callbacks.md",
    "docs/api/models.md",
    "pflight/command/catalogue.json",
}
WRITTEN = {
    "callbacks/methods/halved.py": '''"""Halved: clients halve their loss."""

from __future__ import annotations

from torch import Tensor

from pflight.fedavg import FedAvg
from pflight.local_client import LocalClient
from pflight.method import ClientMethod

from .registry import Method


class HalfLoss(ClientMethod):
    """Halves a client's loss."""

    only_adds = False

    def loss(self, c: LocalClient, batch: object) -> Tensor:
        """Return half of it."""
        return c.task_loss(batch) / 2


class Halved(FedAvg):
    """FedAvg of clients that halve their loss."""

    client_method = HalfLoss()


METHODS = (
    Method(
        "Halved-FL",
        Halved,
        "Halved(weighting)",
        "half of the server's model",
        tested={"": {}, "uniform": {"weighting": "uniform"}},
    ),
)
''',
    "configs/algorithm/halved.yaml": """# Halved-FL: clients halve their loss.
trainer:
  callbacks+:
    - class_path: Halved
""",
    "tests/callbacks/test_halved.py": """from pflight.callbacks import Halved
from pflight.callbacks.methods.halved import HalfLoss


def test_its_clients_halve_their_loss() -> None:
    assert isinstance(Halved().client_method, HalfLoss)
""",
    "docs/methods/personal.md": "\n## Halved-FL\n\nClients halve their loss.\n",
    "CHANGELOG.md": "\n- Halved-FL.\n",
}
"""The five files of a made-up method, or what is added to them."""


def ship(root: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/ship.py", *options]
    return subprocess.run(command, cwd=root, capture_output=True, text=True)


def test_what_is_made_is_that_of_the_entries() -> None:
    result = ship(ROOT, "--check")
    assert (result.returncode, result.stderr) == (0, "")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A checkout in which Python finds all packages of pflight."""
    root = tmp_path / "checkout"
    root.mkdir()
    packages = ("callbacks", "configs", "datamodules", "models")
    for name in (*packages, "pflight", "docs", "tests", "benchmarks"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("README.md", "CHANGELOG.md", "mkdocs.yml", "pyproject.toml"):
        shutil.copy(ROOT / name, root)
    for name in packages:
        (root / "pflight" / name).symlink_to(root / name)
    return root


def changed(root: Path) -> set[str]:
    """Return the files of a copy that differ from this checkout's."""
    found = set()
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in names:
            path = (Path(folder) / name).relative_to(root)
            here = ROOT / path
            if not here.exists() or here.read_bytes() != (root / path).read_bytes():
                found.add(path.as_posix())
    return found


@pytest.mark.long
def test_five_files_ship_a_method(copy: Path) -> None:
    for name, text in WRITTEN.items():
        with (copy / name).open("a", encoding="utf-8") as file:
            file.write(text)
    assert ship(copy, "--check").returncode == 1
    assert changed(copy) == {*WRITTEN}
    assert {*ship(copy).stdout.split()} == MADE
    assert changed(copy) == {*WRITTEN} | MADE
    assert ship(copy, "--check").returncode == 0

    assert '"Halved",\n' in (copy / "callbacks/__init__.py").read_text()
    (row,) = (line for line in (copy / "README.md").read_text().splitlines() if "Halved" in line)
    assert row.startswith("| algorithms | Local, ")
    assert ", Per-FedAvg, Halved-FL, pFedHN, " in row
    rows = (copy / "docs/algorithms.md").read_text()
    link = "[Halved-FL](methods/personal.md#halved-fl)"
    assert f"| {link} | `Halved(weighting)` | half of the server's model |\n" in rows
    assert "::: pflight.callbacks.Halved\n" in (copy / "docs/api/callbacks.md").read_text()
    client_method = "::: pflight.callbacks.methods.halved.HalfLoss\n"
    assert client_method in (copy / "docs/api/models.md").read_text()

    listed = [sys.executable, "-m", "pflight", "list", "methods", "--json"]
    output = subprocess.run(listed, cwd=copy, capture_output=True, check=True).stdout
    (found,) = (one for one in json.loads(output)["methods"] if one["name"] == "halved")
    assert found["class_path"] == "pflight.callbacks.Halved"
    assert found["summary"] == "Halved-FL: clients halve their loss."
    same = "tests/test_algorithms.py::TestAlgorithms::test_the_same_seed_gives_the_same_run"
    tests = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", same]
    result = subprocess.run(
        [*tests, "tests/callbacks/test_halved.py"],
        cwd=copy,
        env={**os.environ, "PFLIGHT_METHOD": "Halved-FL"},
        capture_output=True,
        text=True,
    )
    for name in (
        f"{same}[Halved-FL]",
        f"{same}[Halved-FL-uniform]",
        "tests/callbacks/test_halved.py::test_its_clients_halve_their_loss",
    ):
        assert f"{name} PASSED" in result.stdout, result.stdout
    assert "3 passed" in result.stdout


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        ("docs/methods/personal.md", "## Halved-FL", "## Half", "no heading .* names Halved-FL"),
        ("callbacks/methods/halved.py", '"Halved-FL"', "str(1)", "halved.py, line 31: this is no"),
    ],
)
def test_what_is_missing_is_said(copy: Path, name: str, old: str, new: str, said: str) -> None:
    for file, text in WRITTEN.items():
        with (copy / file).open("a", encoding="utf-8") as opened:
            opened.write(text.replace(old, new) if file == name else text)
    result = ship(copy)
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert re.search(said, line)


def test_methods_and_configurations_have_each_other() -> None:
    title_of = {entry.name: entry.summary.partition(":")[0] for entry in catalogue.methods()}
    for entry in catalogue.methods():
        name = str(entry.class_path).rpartition(".")[2]
        named = [
            method
            for method in METHODS
            if method.callback.__name__ == name and title_of[entry.name].startswith(method.name)
        ]
        assert named, f"{entry.config} is of no entry's method"
    for method in METHODS:
        assert any(title.startswith(method.name) for title in title_of.values()), method.name
    (row,) = re.findall(r"^\| algorithms \| (.+) \|$", (ROOT / "README.md").read_text(), re.M)
    assert sorted(row.split(", ")) == sorted(method.name for method in METHODS)


class Times(nn.Module):
    """A linear map that is no linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(FEATURES, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


TESTED = [method for method in METHODS if method.tested]


@pytest.mark.parametrize("method", TESTED, ids=lambda method: method.name)
@pytest.mark.long
def test_entries_say_what_methods_need(method: Method) -> None:
    callback = method.callback(**method.tested[""])
    assert callback.client_method.needs_classes == (method.needs == "a head and classes")
    said = None if method.manual else "manual optimization"
    with refusal(said):
        run(batchnorm_client(ByHand), small_data(), method.callback(**method.tested[""]))
    said = "no linear layer that could be its head" if method.needs else None
    if method.name == "FeSEM-MA":  # whose matching asks for more
        said = "matching needs a chain"
    with refusal(said):
        network = nn.Sequential(nn.BatchNorm1d(FEATURES), Times())
        run(network_client(network), small_data(), callback)


def refusal(said: str | None) -> AbstractContextManager[object]:
    return nullcontext() if said is None else pytest.raises(ConfigurationError, match=said)
