"""A full disk is one line, leaves no half of a file, and the run goes on once there is room."""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pflight import Federation
from pflight.callbacks import Local
from pflight.callbacks.monitors.pictures.picture import new_figure
from pflight.command.cli import main
from pflight.command.commands import parser as front_door
from pflight.experiments.comparing import compare_and_print
from pflight.experiments.jobs import Jobs
from pflight.experiments.worker import make
from pflight.runs.checkpoint import AtomicCheckpointIO
from pflight.runs.files import causes, full_disk
from tests.event_files import read_events
from tests.experiments.small import comparison, data_config, finish
from tests.pages import DIGITS

OPTIONS = [f"--config={DIGITS}", "--data.num_clients=6", "--model.local_epochs=1"]


class Disk:
    """A file system of its own, of a size that can be changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mount("-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder))

    def mount(self, *args: str) -> None:
        subprocess.run(["mount", *args], check=True, capture_output=True)

    def fill(self, left: int = 0) -> None:
        """Leave so many bytes, in blocks of 4096."""
        used = sum(-(-p.stat().st_size // 4096) * 4 for p in self.folder.rglob("*") if p.is_file())
        self.mount("-o", f"remount,size={max(4, used + left // 1024)}k", str(self.folder))

    def make_room(self) -> None:
        self.mount("-o", "remount,size=64m", str(self.folder))


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        disk = Disk(folder)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs the right to mount")
    monkeypatch.chdir(tmp_path)
    yield disk
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def pflight(command: str, *args: str, rounds: int = 4, root: str = "disk/run") -> None:
    shared = [f"--trainer.default_root_dir={root}", f"--trainer.max_epochs={rounds}"]
    main([command, *OPTIONS, *shared, *args])


def filling(
    monkeypatch: pytest.MonkeyPatch, disk: Disk, owner: Any, method: str, call: int, left: int
) -> None:
    """Fill the disk in the given call of a method."""
    original: Callable[..., Any] = getattr(owner, method)
    calls = 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            disk.fill(left)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, method, wrapped)


def assert_one_line(capfd: pytest.CaptureFixture[str], run: Callable[[], None]) -> str:
    """Run what fails for want of room, and return its line."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as exit_:
        run()
    assert exit_.value.code == 1
    errors = capfd.readouterr().err.splitlines()
    errors = [line for line in errors if "engine, " not in line]
    assert len(errors) == 1, errors
    (line,) = errors
    assert line.startswith("pflight: error: ")
    assert "No space left on device" in line
    assert not list(Path().rglob("*.partial"))
    return line


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that always had room."""
    root = tmp_path_factory.mktemp("straight")
    pflight("fit", root=str(root))
    return root


class TestFit:
    @pytest.mark.short("50000-ram")
    @pytest.mark.parametrize(("left", "memory"), [(0, "ram"), (50_000, "ram"), (50_000, "disk")])
    def test_in_a_checkpoint(self, left, memory, disk, straight, monkeypatch, capfd):
        with monkeypatch.context() as patch:
            filling(patch, disk, AtomicCheckpointIO, "save_checkpoint", call=5, left=left)
            options = ["fit", f"--model.client_memory={memory}"]
            line = assert_one_line(capfd, lambda: pflight(*options))
        assert line.endswith("rounds: --ckpt_path last continues the run in disk/run")
        disk.make_room()
        pflight(*options, "--ckpt_path=last")
        assert_same_runs(Path("disk/run"), straight)

    @pytest.mark.parametrize("call", [1, 3])
    @pytest.mark.long
    def test_before_a_round(self, call, disk, straight, monkeypatch, capfd):
        """What is logged of it does not fit."""
        with monkeypatch.context() as patch:
            filling(patch, disk, Federation, "training_step", call=call, left=0)
            assert_one_line(capfd, lambda: pflight("fit"))
        disk.make_room()
        pflight("fit", "--ckpt_path=last")
        assert_same_runs(Path("disk/run"), straight)

    @pytest.mark.long
    def test_in_client_memory(self, disk, monkeypatch, capfd):
        options = ["fit", "--config=configs/data/digits.yaml", "--model.client_memory=disk"]
        options += ["--config=configs/algorithm/local.yaml", "--trainer.accelerator=cpu"]
        options += ["--data.num_clients=6", "--trainer.max_epochs=4"]
        with monkeypatch.context() as patch:
            filling(patch, disk, Local, "round", call=2, left=0)
            there = "--trainer.default_root_dir=disk/run"
            line = assert_one_line(capfd, lambda: main([*options, there]))
        assert "client memory" in line
        disk.make_room()
        main([*options, there, "--ckpt_path=last"])
        main([*options, "--trainer.default_root_dir=straight"])
        assert_same_runs(Path("disk/run"), Path("straight"))

    @pytest.mark.parametrize("left", [0, 8192])
    @pytest.mark.long
    def test_in_the_set_up(self, left, disk, straight, capfd):
        disk.fill(left)
        assert_one_line(capfd, lambda: pflight("fit"))
        disk.make_room()
        pflight("fit", "--ckpt_path=last")
        assert_same_runs(Path("disk/run"), straight)

    @pytest.mark.long
    def test_in_a_picture(self, disk, monkeypatch, capfd):
        picture = "--trainer.callbacks+=pflight.callbacks.monitors.pictures.ConvergencePlot"
        pflight("fit", picture, rounds=1)
        filling(monkeypatch, disk, type(new_figure()), "draw", call=1, left=0)
        assert_one_line(capfd, lambda: pflight("fit", picture, "--ckpt_path=last", rounds=2))


@pytest.mark.long
def test_a_run_of_a_comparison(disk, tmp_path, monkeypatch):
    (tmp_path / "out").symlink_to(disk.folder)
    found = comparison(tmp_path, ["fedavg"])
    (task,) = found.due()
    folder = Path(task.folder).resolve()
    with monkeypatch.context() as patch:
        filling(patch, disk, AtomicCheckpointIO, "save_checkpoint", call=3, left=0)
        answer = make(task, lambda _: None)
    assert Path(answer["full"]).resolve().is_relative_to(folder)
    disk.make_room()
    finish(found)
    assert found.results().findings.finished
    (tmp_path / "out").unlink()
    straight = comparison(tmp_path, ["fedavg"])
    finish(straight)
    assert_same_runs(folder, Path(task.folder))


@pytest.mark.long
def test_a_comparison_stops_at_its_first_run(disk, tmp_path, capfd):
    """What fails for want of room is no failure of a method; the same command goes on."""
    data, out = data_config(tmp_path), tmp_path / "disk" / "results"
    options = front_door()[0].parse_args(
        ["compare", f"--config={data}", "--methods", "fedavg", "local", "--seeds=1", f"--out={out}"]
    )
    disk.fill(left=40_000)
    line = assert_one_line(capfd, lambda: compare_and_print(options))
    assert line.endswith(": the same command continues")
    assert len([*out.glob("*/seed-*")]) == 1
    assert not [*out.glob("*/seed-*/failure.json")]
    disk.make_room()
    compare_and_print(options)
    assert len([*out.glob("*/seed-*/results.json")]) == 2


@pytest.mark.short("comparison.json-True")
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("where", ["comparison.json", "table.csv"])
def test_the_files_of_a_comparison(where, named, tmp_path, monkeypatch, capfd):
    def full(path: Path, *args: Any, **options: Any) -> Any:
        if where in path.name:
            raise OSError(errno.ENOSPC, "No space left on device", *[str(path)] * named)
        return write(path, *args, **options)

    write = Path.open
    monkeypatch.setattr(Path, "open", full)
    monkeypatch.setattr(Jobs, "work", lambda _: None)
    data, out = data_config(tmp_path), tmp_path / "results"
    options = front_door()[0].parse_args(
        ["compare", f"--config={data}", "--methods", "fedavg", "--seeds=1", f"--out={out}"]
    )
    line = assert_one_line(capfd, lambda: compare_and_print(options))
    assert line.endswith(": the same command continues")


@pytest.mark.long
def test_predictions(disk, capfd):
    pflight("fit", rounds=1)
    pflight("predict", "--ckpt_path=last", rounds=1)
    before = Path("disk/run/predictions.csv").read_bytes()
    disk.fill()
    assert_one_line(capfd, lambda: pflight("predict", "--ckpt_path=last", rounds=1))
    assert Path("disk/run/predictions.csv").read_bytes() == before


def assert_same_runs(one: Path, other: Path) -> None:
    left, right = (
        torch.load(root / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        for root in (one, other)
    )
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert read_events(one).values == read_events(other).values


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_the_cause_of_an_error_is_found_however_its_causes_hang_together(number):
    full = OSError(number, "full")
    torch_error = RuntimeError("unexpected pos")
    torch_error.__context__ = full
    full.__context__ = second = OSError(errno.EIO, "another")
    second.__context__ = torch_error  # a cycle
    assert full_disk(torch_error) is full
    assert list(causes(torch_error)) == [torch_error, full, second]
    assert full_disk(ValueError()) is None
