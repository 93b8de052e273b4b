"""A client whose node has lost its folder begins anew, if its operator says so."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from pflight import Federation
from pflight.callbacks import FedEC
from pflight.deploy.node import Node
from pflight.errors import ConfigurationError
from tests.deploy.in_process import Deployed
from tests.deploy.test_faults import AfterRound, deployed

LOST = 1
pytestmark = pytest.mark.filterwarnings("ignore")


def all_of_it(folder: Path, backup: Path) -> None:
    shutil.rmtree(folder)


def newer_rounds(folder: Path, backup: Path) -> None:
    """Put back what there was after the first round."""
    shutil.rmtree(folder)
    shutil.copytree(backup, folder)


def salt(folder: Path, backup: Path) -> None:
    (folder / "salt").unlink()


def again(run: Deployed, anew: bool) -> Node:
    """Start the node again."""
    node = Node(
        Federation(run.make(), **run.options),
        run.callback(),
        run.data,
        run.folder / f"{LOST}",
        {"accelerator": "cpu"},
        LOST,
        anew=anew,
    )
    run.post.nodes[LOST] = node
    return node


@pytest.mark.short("False-all_of_it", "True-newer_rounds")
@pytest.mark.parametrize("lose", [all_of_it, newer_rounds])
@pytest.mark.parametrize("anew", [False, True])
def test_a_node_that_has_lost_its_memory(
    lose: Callable[[Path, Path], None],
    anew: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = deployed(tmp_path / "run", FedEC)
    own, backup = tmp_path / "run" / f"{LOST}", tmp_path / "backup"

    def fail() -> None:
        lose(own, backup)
        again(run, anew)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        federation = run.server(
            4, AfterRound(0, lambda: shutil.copytree(own, backup)), AfterRound(1, fail)
        )
    failed, said = [entry.failed for entry in federation.history], capsys.readouterr().out
    if anew:
        assert failed == [[], [], [], []]
        assert said.count(f"client {LOST} begins anew: its node has lost its memory") == 1
        assert "the client begins anew" in said
    else:
        assert failed == [[], [], [LOST], [LOST]]
        assert any("or start its node with --anew" in str(w.message) for w in caught)


@pytest.mark.short("salt")
@pytest.mark.parametrize("lose", [all_of_it, newer_rounds, salt])
def test_a_run_that_is_resumed_without_a_nodes_memory(
    lose: Callable[[Path, Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = deployed(tmp_path / "run", FedEC)
    own, backup = tmp_path / "run" / f"{LOST}", tmp_path / "backup"
    saved = tmp_path / "saved.ckpt"
    keep = AfterRound(0, lambda: shutil.copytree(own, backup))
    run.server(2, keep).trainer.save_checkpoint(saved)
    lose(own, backup)
    node = again(run, anew=False)
    if lose is salt:
        with pytest.raises(ConfigurationError, match=r"salt is lost.*start the node with --anew"):
            node.check_salt()
    elif lose is all_of_it:
        with pytest.raises(ConfigurationError, match=r"has lost its folder, start it with --anew"):
            run.server(3, ckpt_path=saved)
        shutil.rmtree(own)
    again(run, anew=True).check_salt()
    federation = run.server(4, ckpt_path=saved)
    assert [entry.failed for entry in federation.history] == [[], [], [], []]
    assert f"client {LOST} begins anew" in capsys.readouterr().out
