"""The files in configs/algorithm name callbacks that take their options."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from jsonargparse import ArgumentParser

import pflight.callbacks  # noqa: F401, so that short names are known
from pflight.server_callback import ServerCallback
from tests.pages import ROOT

FILES = sorted((ROOT / "configs" / "algorithm").glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_callback_is_made(path: Path) -> None:
    callbacks = yaml.safe_load(path.read_text())["trainer"].get("callbacks+", [])
    for given in callbacks:
        parser = ArgumentParser()
        parser.add_argument("--callback", type=ServerCallback)
        config = parser.parse_object({"callback": given})
        assert isinstance(parser.instantiate(config).callback, ServerCallback)
