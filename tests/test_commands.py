"""The front door: what answers before Lightning is imported, and what completes in a shell."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib import import_module
from importlib.resources import files
from pathlib import Path

import pytest
import yaml

import pflight
from pflight.__main__ import main
from pflight.command.commands import CommandParser
from pflight.command.completion import offer_values
from pflight.command.version import __version__
from pflight.datamodules import FederatedDataModule, Partition

SECTIONS = ["methods", "modifiers", "data", "partitions", "networks", "configs"]
QUICKSTART = "configs/quickstart.yaml"
BIN = Path(sys.executable).parent
WITHOUT_LIGHTNING = """
import sys

from pflight.__main__ import main

for line in sys.stdin:
    try:
        main(line.split())
    except SystemExit as exit_:
        print(f"status {exit_.code}", flush=True)
heavy = {"torch", "lightning", "jsonargparse", "numpy", "matplotlib"} & {*sys.modules}
print(f"imported: {heavy or 'nothing'}")
"""


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """Return the one line that a command ends with."""
    with pytest.raises(SystemExit) as exit_:
        main(args)
    captured = capsys.readouterr()
    assert exit_.value.code == 2
    assert not captured.out
    (line,) = captured.err.splitlines()
    assert line.startswith("pflight: error: ")
    return line.removeprefix("pflight: error: ")


def listed(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    capsys.readouterr()
    main(["list", *args])
    return capsys.readouterr().out


def test_what_needs_no_lightning_does_not_import_it() -> None:
    lines = [
        "--version",
        "--help",
        "list",
        "list --json",
        "deploy server --help",
        "fot",
        "list netwroks",
        f"compare --config {QUICKSTART} --methods local fedavgg",
        "compare --config configs/quikstart.yaml --methods all",
    ]
    command = [sys.executable, "-c", WITHOUT_LIGHTNING]
    done = subprocess.run(
        command, input="\n".join(lines), capture_output=True, text=True, check=True
    )
    said = done.stdout.splitlines()
    assert said[-1] == "imported: nothing"
    exits = [line for line in said if line.startswith("status")]
    assert exits == ["status 0"] * 3 + ["status 2"] * 4
    assert len(done.stderr.splitlines()) == 4
    assert all("did you mean" in line for line in done.stderr.splitlines())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["fot"], "there is no command fot: did you mean fit?"),
        (["lsit", "--json"], "there is no command lsit: did you mean list?"),
        (["xyzzy"], "there is no command xyzzy: choose fit, validate, test, predict, "),
        ([], "no command is given: choose fit, validate, test, predict, "),
        (["--verion"], "there is no option verion: did you mean version?"),
        (["list", "netwroks"], "there is no section netwroks: did you mean networks?"),
        (["list", "--jsno"], "there is no option jsno: did you mean json?"),
        (["list", "data", "more"], "unrecognized arguments: more"),
        (
            ["compare", "-c", QUICKSTART, "-m", "all", "--seeds", "0"],
            "argument --seeds: 0 is no positive number",
        ),
        (
            ["compare", "-c", QUICKSTART, "-m", "mine.yaml"],
            "argument --methods/-m: there is no config file 'mine.yaml'",
        ),
        *(
            (
                ["compare", "-c", QUICKSTART, "-m", "fedavg", "--set", "b=1", text],
                f"argument --set: {text!r} is no OPTION=VALUE or OPTION=VALUE,VALUE",
            )
            for text in ("a", "a=", "a=1,", "=1")
        ),
        (
            ["compare", "-c", QUICKSTART, "-m", "fedavg", "--trainer.max_epochs=3"],
            "there is no option trainer.max_epochs: give options of runs by --set ",
        ),
        (["deploy", "sever"], "there is no command sever: did you mean server?"),
        (["deploy", "demo", "--nodes=0"], "argument --nodes: 0 is no positive number"),
        (["deploy", "demo", "--noeds=3"], "there is no option noeds: did you mean nodes?"),
        (["deploy", "demo", "--traner=x"], "there is no option traner: did you mean trainer?"),
        (["deploy", "client", "--ca=ca.pem"], "the following arguments are required: --server, "),
        (
            ["deploy", "certificates", "a", "--dyas=3"],
            "there is no option dyas: did you mean days?",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_one_line(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, *args).startswith(message)


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--version", "--help"):
        with pytest.raises(SystemExit) as exit_:
            main([option])
        assert not exit_.value.code
    version, *lines = capsys.readouterr().out.splitlines()
    assert version == f"pflight {__version__}"
    described = {line.split()[0] for line in lines if line.startswith("    ")}
    assert {"fit", "validate", "test", "predict", "list"} <= described


@pytest.mark.parametrize(
    "args", [["fit"], ["--config", QUICKSTART, "fit"], ["--print_config", "fit"]]
)
def test_a_run_gets_the_whole_line(args: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[str]] = []
    monkeypatch.setattr("pflight.command.cli.main", given.append)
    main([*args, "--data=own.Data"])
    assert given == [[*args, "--data=own.Data"]]


class TestList:
    def test_all_that_there_is(self, capsys):
        found = json.loads(listed(capsys, "--json"))
        assert [*found] == SECTIONS
        shipped = files("pflight.configs")
        for name, configs in (("methods", "algorithm"), ("configs", "")):
            there = [*Path(str(shipped / configs)).rglob("*.yaml")]
            assert len(found[name]) == len(there) > 30
        exported = {
            kind: {
                name
                for name in pflight.datamodules.__all__
                if isinstance(one := getattr(pflight.datamodules, name), type)
                and issubclass(one, kind)
                and one.__name__ == name != kind.__name__
            }
            for kind in (FederatedDataModule, Partition)
        }
        data = {one["name"] for one in found["data"]}
        bases = {"CIFARDataModule", "ImageDataModule", "LeafDataModule", "PartitionedDataModule"}
        assert data == exported[FederatedDataModule] - bases - {"HeldOut"}  # of data in Python
        assert {one["name"] for one in found["partitions"]} == exported[Partition]
        assert {"MLP", "McMahanCNN", "ResNet18"} <= {one["name"] for one in found["networks"]}

    def test_every_entry_is_told_apart_and_exists(self, capsys):
        found = json.loads(listed(capsys, "--json"))
        for section, entries in found.items():
            assert len({one["name"] for one in entries}) == len(entries)
            for one in entries:
                assert len(one["summary"].split()) > 2, one
                assert not any(mark in one["summary"] for mark in ("``", ":class:", "#", "\n"))
                if "class_path" in one:
                    module, _, name = one["class_path"].rpartition(".")
                    kind = getattr(import_module(module), name)
                    if section == "modifiers":  # one class with other options
                        assert issubclass(kind, pflight.modifiers.Modifier)
                    elif section != "methods":
                        line = (kind.__doc__ or "").splitlines()[0]
                        assert line.replace("`", "").split()[:2] == one["summary"].split()[:2]
                if "config" in one:
                    path = files("pflight.configs") / one["config"].removeprefix("configs/")
                    text = path.read_text()
                    assert text.startswith(f"# {one['summary'][:40]}")
                    if section == "methods":
                        (callback,) = yaml.safe_load(text)["trainer"]["callbacks+"]
                        assert callback["class_path"] == name

    def test_a_line_each(self, capsys):
        found = json.loads(listed(capsys, "--json"))
        lines = [line.strip() for line in listed(capsys).splitlines()]
        for section in SECTIONS:
            for one in found[section]:
                if section != "configs" or not one["name"].startswith("algorithm/"):
                    named = [line for line in lines if line.startswith(f"{one['name']} ")]
                    (_,) = (line for line in named if line.endswith(one["summary"]))

    def test_in_80_columns(self, capsys, monkeypatch):
        whole = listed(capsys).splitlines()
        monkeypatch.setenv("COLUMNS", "80")
        cut = listed(capsys).splitlines()
        assert len(cut) == len(whole)
        assert max(map(len, cut)) <= 80 < max(map(len, whole))
        assert "…" in cut[1]
        wrapped = listed(capsys, "methods")
        assert max(map(len, wrapped.splitlines())) <= 80
        for one in json.loads(listed(capsys, "methods", "--json"))["methods"]:
            assert f"{one['name']} {one['summary']}" in " ".join(wrapped.split())

    def test_where_the_width_is_unknown(self, capsys, monkeypatch):
        whole = listed(capsys)
        monkeypatch.setenv("COLUMNS", "0")
        assert listed(capsys) == whole

    def test_one_section(self, capsys):
        assert [*json.loads(listed(capsys, "networks", "--json"))] == ["networks"]
        assert "algorithm/fesem " in listed(capsys, "configs")
        assert "Digits" not in listed(capsys, "partitions")


def completions(*lines: str) -> list[set[str]]:
    """Return what bash offers at the end of each line, once it knows the command."""
    script = f'eval "$({BIN}/register-python-argcomplete pflight)"\n'
    for line in lines:
        script += f"COMP_LINE='{line}' COMP_POINT={len(line)} COMP_TYPE=9\n"
        script += "_python_argcomplete pflight; (IFS=' '; echo \"${COMPREPLY[*]}\")\n"
    paths = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash"], input=script, capture_output=True, text=True, check=True, env=paths
    )
    return [{*answer.split()} for answer in done.stdout.splitlines()]


def test_completion_of_methods_and_files() -> None:
    command = CommandParser()
    methods = command.add_argument("--methods", metavar="METHOD")
    config = command.add_argument("--config", metavar="FILE")
    offer_values(command)
    assert {"fesem", "fedavg", "pfedla"} <= {*methods.completer(prefix="fe")}
    assert config.completer(prefix="configs/data/di") == {"configs/data/digits.yaml"}
    Path("configs/mine").mkdir(parents=True)
    assert {"configs/mine/", "configs/data/"} <= config.completer(prefix="configs/")


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_completion_in_bash() -> None:
    Path("own.yaml").touch()
    commands, sections, configs, methods, joined, trainer, data, values, deploy, node = completions(
        "pflight ",
        "pflight list ",
        "pflight fit --config ",
        "pflight fit --config configs/algorithm/fese",
        "pflight fit --config=configs/q",
        "pflight test --trainer.max_e",
        f"pflight fit --config {QUICKSTART} --data.num_cl",
        "pflight fit --data.partition Dir",
        "pflight deploy ",
        "pflight deploy client --server here:1 --data.partition Dir",
    )
    assert {"fit", "validate", "test", "predict", "list"} <= commands
    assert {*SECTIONS} <= sections
    assert {"configs/", "own.yaml"} <= configs
    assert methods == {f"configs/algorithm/fesem{end}.yaml" for end in ("", "_auto", "_ma")}
    assert joined == {"configs/quickstart.yaml"}
    assert trainer == {"--trainer.max_epochs"}
    assert "--data.num_clusters" in data
    assert values == node == {"Dirichlet"}
    assert {"server", "client", "demo", "certificates"} <= deploy
    inner, partition, callbacks = completions(
        f"pflight fit --config {QUICKSTART} --data.data Dig",
        f"pflight fit --config {QUICKSTART} --data.data.partition Dir",
        "pflight fit --trainer.callbacks+ FedPr",
    )
    assert (inner, partition) == ({"Digits"}, {"Dirichlet"})
    assert {"FedProx"} <= callbacks


def test_completion_as_zsh_asks_for_it() -> None:
    asked = {"COMP_LINE": "pflight li", "COMP_POINT": "10", "_ARGCOMPLETE_SHELL": "zsh"}
    asked |= {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_SUPPRESS_SPACE": "1"}
    asked |= {"_ARGCOMPLETE_STDOUT_FILENAME": "answer"}
    subprocess.run([BIN / "pflight"], check=True, env=os.environ | asked)
    assert Path("answer").read_text().startswith("list:show methods, data sets, ")
