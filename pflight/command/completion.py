"""Completion of the line in a shell, by argcomplete."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from glob import escape
from pathlib import Path
from typing import Any

from . import catalogue
from .commands import RUNS, CommandParser, parser
from .shipped import configs
from .typos import Options, UnclearError

_CLASSES: dict[str, Callable[[], list[catalogue.Entry]]] = {
    "data": catalogue.data,
    "partition": catalogue.partitions,
    "network": catalogue.networks,
    "callbacks": catalogue.methods,
}
_OF_EVERY_RUN = ("data", "data.partition", "model.client.network", "trainer.callbacks")


def complete() -> None:
    """Answer the shell that asks, and exit."""
    import argcomplete
    from argcomplete.lexers import split_line

    front, commands = parser()
    *_, words, _ = split_line(os.environ["COMP_LINE"], int(os.environ["COMP_POINT"]))
    command, *args = words[1:] or [""]
    if command in RUNS:
        _add_options(commands[command], command, args)
    elif command in commands:
        part = _part(commands[command], args[:1])
        offer_values(part)
        if part.takes_a_run:
            _add_options(part, "fit", args[1:])
    argcomplete.autocomplete(front)


def offer_values(command: CommandParser) -> None:
    """Complete the options of a command that take a METHOD, or a FILE with a configuration."""
    for action in command._actions:
        if action.metavar in _VALUES:
            completed: Any = action
            completed.completer = _VALUES[action.metavar]


def _part(command: CommandParser, names: list[str]) -> CommandParser:
    """Return the parser of a command of a command, if there is one of this name."""
    groups = (one.choices for one in command._actions if isinstance(one.choices, dict))
    return next((group[name] for group in groups for name in names if name in group), command)


def _add_options(run: CommandParser, command: str, args: list[str]) -> None:
    """Add the options that a run has, as far as its line goes."""
    try:
        options = Options(command, args)
    except (FileNotFoundError, UnclearError):
        options = Options(command, [])
    for flag in ("--print_config",) if run.add_help else ("--help", "--print_config"):
        run.add_argument(flag, action="store_true")
    config: Any = run.add_argument("--config", "-c", action="append")
    config.completer = _config_files
    for name in dict.fromkeys([*options.names(), *_OF_EVERY_RUN]):
        kind = name.rpartition(".")[2]
        flags = (f"--{name}", f"--{name}+") if kind == "callbacks" else (f"--{name}",)
        action: Any = run.add_argument(*flags)
        if kind in _CLASSES:
            help_: Any = run.add_argument(f"--{name}.help", nargs="?")
            action.completer = help_.completer = partial(_classes, kind)


def _classes(kind: str, **_: Any) -> list[str]:
    paths = [str(one.class_path) for one in _CLASSES[kind]()]
    whole = kind == "network"  # torchvision has classes of the same names
    return paths if whole else [path.rpartition(".")[2] for path in paths]


def _methods(**_: Any) -> list[str]:
    return [one.name for one in catalogue.methods()]


def _config_files(prefix: str, **_: Any) -> set[str]:
    """Return shipped configurations and files that begin with a prefix, up to the next folder."""
    folder, slash, start = prefix.rpartition("/")
    beside = Path(folder or slash or ".").glob(f"{escape(start)}*")
    found = {f"{folder}{slash}{one.name}{'/' * one.is_dir()}" for one in beside}
    found = {path for path in found if path.endswith(("/", ".yaml", ".yml"))}
    for path in configs():
        if path.startswith(prefix):
            name, end = path[len(prefix) :].partition("/")[:2]
            found.add(f"{prefix}{name}{end}")
    return found


_VALUES = {"METHOD": _methods, "FILE": _config_files}
