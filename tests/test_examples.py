"""The programs in the folder examples/ run, on small plays and with small networks."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from tests.made_plays import write_plays
from tests.pages import ROOT

pytest.importorskip("peft")
pytest.importorskip("transformers")


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_shakespeare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = write_plays(tmp_path, roles=3, length=160)
    small = ["--root", root, "--width", "16", "--rounds", "1", "--clients", "4"]
    rows = example("shakespeare").main(small)
    assert all(1 < value < 97 for value in rows.values())
    assert rows["roles, fedsa_lora"] < rows["roles, before"]
    assert f"newcomers, before {rows['newcomers, before']:18.3f}" in capsys.readouterr().out
