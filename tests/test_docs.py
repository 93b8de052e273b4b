"""The pages keep their word: Python blocks run, commands and configurations are understood."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

import pytest
import yaml

from pflight.command.cli import main
from pflight.command.commands import RUNS, parser
from tests.pages import ROOT, blocks, files

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

TUTORIALS = ROOT / "docs" / "tutorials"
RUN_BEFORE = {"cli.md": ["--config", "configs/quickstart.yaml", "--trainer.max_epochs", "1"]}
"""By page, the run whose checkpoint its Python blocks load."""

NAMED = re.compile(r"\b(?:configs/[\w./-]+\.yaml|(?:benchmarks|examples)/\w+\.py)\b")


def python_blocks(page: Path) -> Iterator[CodeType]:
    """Compile the page's Python blocks so that tracebacks show the page's own line numbers."""
    for code, lines_above in blocks(page, "python"):
        yield compile("\n" * lines_above + code, page, "exec")


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the arguments of every ``pflight`` command in the page's console blocks."""
    for code, _ in blocks(page, "console"):
        for line in code.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            starts = [i for i, word in enumerate(words) if Path(word).name == "pflight"]
            yield from (words[start + 1 :] for start in starts)


def having(language: str) -> pytest.MarkDecorator:
    """Return the pages with such blocks. Tutorials have a test of their own."""
    chosen = [page for page in PAGES if any(blocks(page, language)) and page.parent != TUTORIALS]
    return pytest.mark.parametrize("page", chosen, ids=lambda page: str(page.relative_to(ROOT)))


def resolved(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the configuration with which a command would run."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_:
        main([*arguments, "--print_config"])
    printed = capsys.readouterr()
    assert not exit_.value.code, f"pflight {shlex.join(arguments)}: {printed.err}"
    return printed.out


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def write_files(page: Path) -> None:
    """Write what the page shows as files of the reader's into the empty folder."""
    for name, text in files(page).items():
        Path(name).write_text(text)


@pytest.mark.short(
    "README.md",
    "docs/algorithms.md",
    "docs/cli.md",
    "docs/data.md",
    "docs/deployment.md",
    "docs/fedec.md",
    "docs/methods/*",
    "docs/own-methods.md",
    "docs/speed.md",
)
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@having("python")
def test_the_python_blocks_run(page: Path) -> None:
    write_files(page)
    if page.name in RUN_BEFORE:
        main(["fit", *RUN_BEFORE[page.name]])
    namespace = {"__name__": "__main__"}
    for block in python_blocks(page):
        exec(block, namespace)


@having("console")
@pytest.mark.long
def test_the_commands_are_understood(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_files(page)
    for arguments in commands(page):
        if arguments[0] not in RUNS:
            options = parser()[0].parse_args(arguments)
            if not getattr(options, "run_options", []):
                continue
            arguments = ["fit", *options.run_options]
        config = resolved(arguments, capsys)
        if arguments[0] == "fit":  # what a run leaves for the commands that follow
            folder = Path(yaml.safe_load(config)["trainer"]["default_root_dir"])
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "config.yaml").write_text(config)


@pytest.mark.short("docs/cli.md", "docs/own-methods.md")
@having("yaml")
def test_the_yaml_blocks_are_configurations(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_files(page)
    for text, _ in blocks(page, "yaml"):
        Path("own.yaml").write_text(text)
        configs = ("configs/data/digits.yaml", "configs/algorithm/fedavg.yaml", "own.yaml")
        resolved(["fit", *(f"--config={config}" for config in configs)], capsys)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_named_configurations_and_programs_exist(page: Path) -> None:
    named = set(NAMED.findall(page.read_text(encoding="utf-8")))
    assert [path for path in sorted(named) if not (ROOT / path).is_file()] == []


def test_the_first_page_has_the_numbers_of_the_quick_start() -> None:
    config = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text(encoding="utf-8"))
    rounds, data, model = (config[name] for name in ("trainer", "data", "model"))
    home = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert f"the same federation for {rounds['max_epochs']} rounds" in home
    options = data["init_args"] | data["init_args"]["data"]["init_args"]
    for name in ("num_clients", "batch_size", "val_fraction", "test_fraction", "num_clusters"):
        assert f"{name}={options[name]}" in home
    assert f"local_epochs={model['local_epochs']}" in home


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 150
