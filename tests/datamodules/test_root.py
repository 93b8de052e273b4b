from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from torchvision import datasets
from torchvision.datasets import utils

from pflight.datamodules import (
    CIFAR10,
    CIFAR100,
    EMNIST,
    FashionMNIST,
    LeafCelebA,
    LeafFEMNIST,
    Omniglot,
)
from pflight.errors import ConfigurationError

WITH_A_ROOT = [CIFAR10, CIFAR100, EMNIST, FashionMNIST, LeafCelebA, LeafFEMNIST, Omniglot]


@pytest.fixture
def unreachable(monkeypatch):
    """Let every download fail at once, as without a network."""

    def fail(*_args, **_kwargs):
        raise OSError("no route")

    for name in ("CIFAR10", "CIFAR100", "EMNIST", "FashionMNIST"):
        monkeypatch.setattr(getattr(datasets, name), "download", fail)
    monkeypatch.setattr(utils, "download_url", fail)
    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)


@pytest.mark.parametrize("build", WITH_A_ROOT)
def test_a_root_that_does_not_exist_is_said_before_the_download(
    tmp_path, build, unreachable, caplog
):
    root = tmp_path / "typo"
    with pytest.raises(ConfigurationError, match=rf"{root} \(root does not exist\): no route"):
        build(str(root)).prepare_data()
    assert caplog.record_tuples[0][1] == logging.INFO
    assert f"root {root} does not exist: downloading" in caplog.messages[0]


@pytest.mark.parametrize("build", WITH_A_ROOT)
def test_nothing_is_said_of_a_root_that_exists(tmp_path, build, unreachable, caplog):
    with pytest.raises(ConfigurationError, match="no route") as caught:
        build(str(tmp_path)).prepare_data()
    assert "exist" not in str(caught.value)
    assert caplog.messages == []


@pytest.mark.parametrize("build", WITH_A_ROOT)
def test_without_a_download_a_missing_root_is_named(tmp_path, build):
    for root, missing in ((tmp_path / "typo", True), (tmp_path, False)):
        data = build(str(root), download=False)
        with pytest.raises(ConfigurationError, match=f"not found.*{root}") as caught:
            data.setup()
        assert ("(root does not exist)" in str(caught.value)) == missing


@pytest.mark.parametrize("build", WITH_A_ROOT)
@pytest.mark.parametrize("make", [Path.touch, os.mkfifo, lambda path: path.symlink_to(path.name)])
def test_a_root_that_is_no_folder_is_named_before_the_download(tmp_path, build, make):
    root = tmp_path / "root"
    make(root)
    for use in (build.prepare_data, build.setup):
        with pytest.raises(ConfigurationError, match=f"root {root} is not a folder"):
            use(build(str(root)))


def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    path = tmp_path / "images_background.zip"
    path.touch()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) == tmp_path)
    with pytest.raises(ConfigurationError, match=f"can't read {path}: Permission denied"):
        Omniglot(str(tmp_path)).prepare_data()


@pytest.mark.parametrize("build", WITH_A_ROOT)
def test_a_root_that_cannot_be_read_is_named_before_the_download(tmp_path, build, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: path != str(tmp_path))
    with pytest.raises(ConfigurationError, match=f"can't read the folder root {tmp_path}"):
        build(str(tmp_path)).prepare_data()
