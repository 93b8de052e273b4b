"""What nobody should do to a run is one line, and nothing is lost or wrong in silence."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from pflight.command import cli, process
from pflight.command.cli import main
from pflight.engines.time_limit import ClientTimeout, time_limit
from pflight.errors import ConfigurationError
from pflight.models import Classifier
from pflight.runs.callbacks import RunCheckpoint
from pflight.runs.checkpoint import AtomicCheckpointIO
from pflight.runs.memory_files import RowFile, _read_table
from tests.pages import DIGITS

OPTIONS = [
    f"--config={DIGITS}",
    "--data.num_clients=6",
    "--model.local_epochs=1",
    "--model.client.network.hidden=[4]",
]


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def pflight(command: str, *args: str, rounds: int = 1, root: str = "run") -> None:
    shared = [f"--trainer.default_root_dir={root}", f"--trainer.max_epochs={rounds}"]
    main([command, *OPTIONS, *shared, *args])


@pytest.fixture(scope="module")
def run_of_one_round(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("trained")
    pflight("fit", root=str(root))
    return root


@pytest.fixture
def trained(run_of_one_round: Path, _in_folder: None) -> None:
    """A run of one round in the folder ``run``."""
    shutil.copytree(run_of_one_round, "run")


def refused(capfd: pytest.CaptureFixture[str], args: list[str], status: int = 2) -> str:
    """Return the line that a command ends with."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as exit_:
        main(args)
    assert exit_.value.code == status
    (line,) = [x for x in capfd.readouterr().err.splitlines() if "engine, " not in x]
    return line.removeprefix("pflight: error: ")


def fit_refused(capfd: pytest.CaptureFixture[str], *args: str, root: str = "run") -> str:
    return refused(capfd, ["fit", *OPTIONS, f"--trainer.default_root_dir={root}", *args])


class TestAliases:
    """Of YAML."""

    @pytest.mark.short("*x: ?*")
    @pytest.mark.parametrize("text", ["trainer: &a\n  callbacks: *a\n", "trainer: &a\n  x: [*a]\n"])
    def test_that_lead_back_to_themselves(self, text, capfd):
        Path("own.yaml").write_text(text)
        said = refused(capfd, ["fit", "--config=own.yaml"])
        assert said == "the config file own.yaml contains itself through an alias (line 1)"
        assert fit_refused(capfd, "--trainer=own.yaml").startswith("YAML contains itself")

    @pytest.mark.parametrize("value", ["&a {x: *a}", "&a [*a]"])
    def test_on_the_command_line(self, value, capfd):
        assert "trainer.callbacks" in fit_refused(capfd, f"--trainer.callbacks={value}")

    @pytest.mark.long
    def test_that_are_sound(self):
        text = "data: {init_args: {seed: &n 1}}\nmodel: {init_args: {local_epochs: *n, seed: *n}}\n"
        Path("own.yaml").write_text(text)
        pflight("fit", "--config=own.yaml")
        config = yaml.safe_load(Path("run/config.yaml").read_text())
        assert config["data"]["init_args"]["seed"] == config["model"]["init_args"]["seed"] == 1


def test_groups_that_there_are_not_are_named_before_what_is_missing(capfd):
    Path("own.yaml").write_text("aa: [1]\ntrainer.max_epochs: 3\nbb: 2\n")
    said = refused(capfd, ["fit", "--config=own.yaml"])
    assert said.startswith("own.yaml: there is no option aa")
    Path("own.yaml").write_text("trainr: {max_epochs: 3}\n")
    said = refused(capfd, ["fit", "--config", "own.yaml"])
    assert (
        said == "own.yaml: there is no option trainr.max_epochs: did you mean trainer.max_epochs?"
    )


@pytest.mark.short("?a?: 3*", "!!python*")
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[a]: 3\n", "has a sequence as the name of an option (line 1)"),
        ("trainer: {max_epochs: !!timestamp x}", "is not YAML: AttributeError"),
        ("trainer: {max_epochs: !!bool x}", "is not YAML: KeyError"),
        ("!!python/object:os.x a: 3\n", "is not YAML: could not determine a constructor"),
    ],
)
def test_yaml_that_can_not_be_made(text, said, capfd):
    Path("own.yaml").write_text(text)
    assert said in refused(capfd, ["fit", "--config=own.yaml"])
    if "max_epochs" in text:
        value = text.removeprefix("trainer: {max_epochs: ").removesuffix("}")
        assert "trainer.max_epochs" in fit_refused(capfd, f"--trainer.max_epochs={value}")


class TestTimeLimit:
    def test_a_client_that_catches_it_has_failed(self):
        went_on = []

        def persist() -> None:
            with time_limit(0.01):
                try:
                    time.sleep(600)
                except BaseException:
                    went_on.append(True)

        with pytest.raises(ClientTimeout, match=r"took longer than client_timeout, 0\.01 s"):
            persist()
        assert went_on

    def test_another_exception_after_it_is_not_hidden(self):
        def fail() -> None:
            with time_limit(0.01):
                try:
                    time.sleep(600)
                except BaseException:
                    raise ValueError("its own") from None

        with pytest.raises(ValueError, match="its own"):
            fail()


class TestRunFolder:
    @pytest.mark.parametrize("name", ["", " "])
    def test_without_a_name(self, name, capfd):
        Path("checkpoints").mkdir()
        assert fit_refused(capfd, root=name).startswith("the run folder has no name: give another")
        assert [path.name for path in Path().iterdir()] == ["checkpoints"]

    @pytest.mark.short("link/run")
    @pytest.mark.parametrize("root", ["link", "link/run"])
    def test_behind_a_link_to_nothing(self, root, capfd):
        Path("link").symlink_to("nowhere")
        assert "link is a link that leads nowhere" in fit_refused(capfd, root=root)

    @pytest.mark.short("checkpoints/theirs.bin-run")
    @pytest.mark.parametrize("root", [".", "run"])
    @pytest.mark.parametrize("name", ["checkpoints/theirs.bin", "pictures/cat.png"])
    def test_what_others_wrote_is_not_moved(self, name, root, capfd):
        theirs = Path(root, name)
        theirs.parent.mkdir(parents=True)
        theirs.write_text("theirs")
        said = fit_refused(capfd, root=root)
        assert f"would have to move {theirs.parent}, but without a config.yaml" in said
        assert theirs.read_text() == "theirs"
        assert not Path(f"{Path(root).resolve()}.1").exists()

    @pytest.mark.long
    def test_checkpoints_without_a_config_are_not_moved_but_a_run_may_go_on(self, capfd):
        pflight("fit")
        Path("run/config.yaml").unlink()
        assert "would have to move run/checkpoints, but" in fit_refused(capfd)
        pflight("fit", "--ckpt_path=last", rounds=2)
        pflight("fit")
        assert Path("run.1/config.yaml").is_file()

    @pytest.mark.long
    def test_files_of_others_that_a_start_up_could_have_left_stay(self):
        for name in ("hparams.yaml", "events.out.tfevents.1"):
            Path("run").mkdir(exist_ok=True)
            Path("run", name).write_bytes(b"")
        pflight("fit")
        assert Path("run/hparams.yaml").read_bytes() == b""
        assert Path("run/events.out.tfevents.1").exists()

    @pytest.mark.short("resume0-events*", "resume1-checkpoints/best*")
    @pytest.mark.parametrize(
        "name",
        [
            "checkpoints/last.ckpt",
            "checkpoints/best.ckpt",
            "checkpoints/.last.ckpt.partial",
            "events.out.tfevents.1",
            "hparams.yaml",
            ".fit.lock",
        ],
    )
    @pytest.mark.parametrize("resume", [[], ["--ckpt_path=last"]])
    def test_a_folder_in_the_place_of_a_file(self, name, resume, trained, capfd):
        path = Path("run", name)
        path.unlink(missing_ok=True)
        path.mkdir()
        said = fit_refused(capfd, *resume)
        assert said.startswith(
            f"{path} is a folder, but the run needs a file of that name: move it, or give"
        )

    @pytest.mark.short("memory/tables")
    @pytest.mark.parametrize("name", ["checkpoints", "memory", "memory/tables", "pictures"])
    def test_a_file_in_the_place_of_a_folder(self, name, capfd):
        path = Path("run", name)
        path.parent.mkdir(parents=True)
        path.touch()
        assert fit_refused(capfd).startswith(
            f"{path} is a file, but the run needs a folder of that name: move it"
        )

    @pytest.mark.parametrize(
        ("command", "name"), [("test", ".test.lock"), ("predict", "predictions.csv")]
    )
    def test_a_folder_in_the_place_of_a_result(self, command, name, trained, capfd):
        Path("run", name).mkdir()
        args = [command, *OPTIONS, "--trainer.default_root_dir=run"]
        assert f"run/{name}" in refused(capfd, args)


@pytest.mark.long
def test_a_consent_to_other_data_is_for_one_resume(trained, capfd):
    other = ["--data.partition=IID", "--ckpt_path=last", "--trainer.max_epochs=2"]
    assert "made with other data" in fit_refused(capfd, *other)
    pflight("fit", *other, "--model.allow_other_data=true", rounds=2)
    config = yaml.safe_load(Path("run/config.yaml").read_text())
    assert config["model"]["init_args"]["allow_other_data"] is False
    again = ["--config=run/config.yaml", "--ckpt_path=last", "--trainer.max_epochs=3"]
    main(["fit", *again])
    said = refused(capfd, ["fit", *again, "--trainer.max_epochs=4", "--data.seed=7"])
    assert "made with other data" in said


class TestFullDisk:
    """Which is what the given call of a method says."""

    @pytest.fixture
    def full(self, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
        def at(owner: Any, method: str, call: int) -> None:
            original, calls = getattr(owner, method), []

            def wrapped(*args: Any, **kwargs: Any) -> Any:
                calls.append(1)
                if len(calls) >= call:
                    raise OSError(28, "No space left on device")
                return original(*args, **kwargs)

            monkeypatch.setattr(owner, method, wrapped)

        return at

    def test_after_a_checkpoint_of_the_first_round(self, full, capfd):
        full(AtomicCheckpointIO, "save_checkpoint", call=2)
        said = refused(capfd, ["fit", *OPTIONS, "--trainer.default_root_dir=run"], status=1)
        assert [path.name for path in Path("run/checkpoints").glob("*.ckpt")] == ["best.ckpt"]
        went_on = "after 1 round: --ckpt_path last continues the run in run"
        assert said == f"No space left on device {went_on}"

    @pytest.mark.long
    def test_before_any(self, full, trained, capfd):
        full(AtomicCheckpointIO, "save_checkpoint", call=1)
        said = refused(capfd, ["fit", *OPTIONS, "--trainer.default_root_dir=run"], status=1)
        assert said.endswith(
            "before the end of the first round in run: start it again with the same command"
        )

    @pytest.mark.parametrize(
        ("owner", "method"), [("pflight.federation.Federation", "setup"), (None, "save_checkpoint")]
    )
    @pytest.mark.long
    def test_when_a_run_goes_on(self, owner, method, full, capfd):
        pflight("fit", rounds=2)
        full(cli.Federation if owner else AtomicCheckpointIO, method, call=1)
        args = ["--trainer.default_root_dir=run", "--ckpt_path=last", "--trainer.max_epochs=4"]
        said = refused(capfd, ["fit", *OPTIONS, *args], status=1)
        assert said.endswith("after 2 rounds: --ckpt_path last continues the run in run")

    @pytest.mark.short("test")
    @pytest.mark.parametrize("command", ["test", "predict", "validate"])
    def test_in_other_commands(self, command, full, trained, capfd):
        full(cli.Federation, "setup", call=1)
        said = refused(capfd, [command, *OPTIONS, "--trainer.default_root_dir=run"], status=1)
        assert said == f"No space left on device during {command} in run"


@pytest.mark.short("options0-*", "options2-*", "options5-*")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--model.client.optimizer.lr=null"],
            "model.client.optimizer: the client's optimizer can't be built: SGD: lr can't be null",
        ),
        (
            ["--model.client.optimizer.lr=nan"],
            "model.client.optimizer.lr: expected a finite number",
        ),
        (
            ["--model.client.optimizer.lr=-1"],
            "model.client.optimizer: the client's optimizer can't be built: Invalid learning rate",
        ),
        (
            ["--model.server_optimizer=Adam", "--model.server_optimizer.betas=null"],
            "model.server_optimizer: the server's optimizer can't be built: Adam: betas can't be",
        ),
        (["--trainer.devices=99999"], "trainer.devices asks for 99,999 processes on"),
        (["--trainer.strategy=ddp_spawn"], "trainer.strategy: the command line starts each rank"),
        (["--trainer.devices=7"], "ask for 7 processes, but there are only 6 clients"),
    ],
)
def test_options(options, said, monkeypatch, capfd):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert said in fit_refused(capfd, "--trainer.accelerator=cpu", *options)


def test_a_schedule_that_can_not_step(capfd):
    schedule = ["--model.server_scheduler=StepLR", "--model.server_scheduler.step_size=0"]
    said = fit_refused(capfd, *schedule, "--trainer.max_epochs=1")
    assert said.startswith("server_scheduler: StepLR can't step: ZeroDivisionError")


@pytest.mark.short("Adagrad")
@pytest.mark.parametrize("optimizer", ["Adam", "Adagrad"])
def test_a_checkpoint_of_another_server_optimizer(optimizer, trained, capfd):
    other = f"--model.server_optimizer={optimizer}", "--model.server_optimizer.lr=0.1"
    said = fit_refused(capfd, *other, "--ckpt_path=last", "--trainer.max_epochs=2")
    assert f"its server optimizer is not a {optimizer}, which has " in said


def test_a_checkpoint_knows_its_score_as_before(tmp_path):
    before, after = (RunCheckpoint(dirpath=tmp_path, monitor="val/loss") for _ in range(2))
    before.current_score = torch.tensor(0.5)
    after.load_state_dict(before.state_dict())
    assert after.state_dict() == before.state_dict()


@pytest.mark.long
def test_client_memory_that_can_not_be_read(capfd):
    """As a folder in its place can't be, or, for who is not root, a file without the right."""
    options = ["--config=configs/data/digits.yaml", "--config=configs/algorithm/local.yaml"]
    options += ["--data.num_clients=6", "--model.client_memory=disk", "--trainer.accelerator=cpu"]
    options += ["--trainer.default_root_dir=run"]
    main(["fit", *options, "--trainer.max_epochs=1"])
    table, *_ = Path("run/memory/tables").glob("*.json")
    kept = table.rename("kept")
    table.mkdir()
    _read_table.cache_clear()  # as in another process
    resume = ["--ckpt_path=last", "--trainer.max_epochs=2"]
    said = refused(capfd, ["fit", *options, *resume])
    assert said == f"can't read the client memory in {table.resolve()}: Is a directory"
    table.rmdir()
    kept.rename(table)
    main(["fit", *options, *resume])


def test_rows_of_client_memory_that_can_not_be_read():
    file = RowFile(Path("it.rows"), (("weight", "float32", (1,)),))
    file.path.mkdir()
    with pytest.raises(ConfigurationError, match=r"can't read .* memory in it\.rows: Is a dir"):
        file.headers(np.zeros(1, np.int64))


class TestRanks:
    def test_an_error_of_one_rank_alone_is_said(self, monkeypatch, capfd):
        monkeypatch.setattr(rank_zero_only, "rank", 1)
        monkeypatch.setattr(process, "_RANK_0_FIRST", 0.0)
        assert refused(capfd, ["fit", "--config=nowhere.yaml"]).startswith(
            "rank 1: there is no con"
        )

    @pytest.mark.long
    def test_an_error_of_all_is_said_once(self):
        command = [sys.executable, "-m", "pflight", "fit", *OPTIONS, "--trainer.accelerator=cpu"]
        command += ["--trainer.devices=2", "--trainer.strategy=ddp"]
        command += ["--trainer.default_root_dir=run", "--model.client.network.in_features=63"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert done.returncode == 2
        assert done.stderr.count("pflight: error: ") == 1
        assert "rank 1" not in done.stderr


class OwnClient(Classifier):
    """Has another default than the class that it replaces."""

    def __init__(self, *args: Any, gradient_clip_val: float | None = 3.0, **options: Any) -> None:
        super().__init__(*args, gradient_clip_val=gradient_clip_val, **options)


@pytest.mark.long
def test_a_class_in_place_of_one_in_config_yaml_has_its_own_defaults(trained, monkeypatch, capfd):
    """The file has all options, also those that nobody gave."""
    monkeypatch.setitem(sys.modules, "own_client", sys.modules[__name__])
    monkeypatch.setattr(OwnClient, "__module__", "own_client")

    def client(*args: str) -> Any:
        capfd.readouterr()
        with pytest.raises(SystemExit):
            main(["fit", "--config=run/config.yaml", *args, "--print_config"])
        return yaml.safe_load(capfd.readouterr().out)

    same, other = client(), client("--model.client=own_client.OwnClient")
    assert same["model"]["init_args"]["client"]["init_args"]["gradient_clip_val"] is None
    options = other["model"]["init_args"]["client"]["init_args"]
    assert options["gradient_clip_val"] == 3.0
    assert options["network"]["init_args"]["hidden"] == [4]
    assert other["data"] == same["data"]
    assert other["trainer"] == same["trainer"]
    assert {**same, "model": other["model"]} == other
    assert client("--model.client.gradient_clip_val=null") == same
