"""Completion in a shell, by argcomplete."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from glob import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from . import catalogue
from .commands import OF_A_RUN, RUNS, CommandParser, parser
from .shipped import configs, find_config

_CLASSES = {
    "data": "data",
    "partition": "partitions",
    "network": "networks",
    "callbacks": "methods",
}  # sections of `pflight list`, by the last names of options
_CLASSES_OF_A_RUN = ("data.partition", "model.client.network", "trainer.callbacks")


def complete() -> None:
    """Answer a shell's request for completions, and exit."""
    import argcomplete
    from argcomplete.lexers import split_line

    front, commands = parser()
    *_, words, _ = split_line(os.environ["COMP_LINE"], int(os.environ["COMP_POINT"]))
    command, *args = words[1:] or [""]
    if command in RUNS:
        _add_options(commands[command], args)
    elif command in commands:
        part = _part(commands[command], args[:1])
        offer_values(part)
        if part.takes_a_run:
            _add_options(part, args[1:])
    argcomplete.autocomplete(front)


def offer_values(command: CommandParser) -> None:
    """Complete options that take a METHOD, or a FILE with a configuration."""
    for action in command._actions:
        if action.metavar in _VALUES:
            completed: Any = action
            completed.completer = _VALUES[action.metavar]


def _part(command: CommandParser, names: list[str]) -> CommandParser:
    """Return the parser of a subcommand, if it exists."""
    groups = (one.choices for one in command._actions if isinstance(one.choices, dict))
    return next((group[name] for group in groups for name in names if name in group), command)


def _add_options(run: CommandParser, args: list[str]) -> None:
    """Add the options of a run, as far as its arguments are given."""
    for flag in ("--print_config",) if run.add_help else ("--help", "--print_config"):
        run.add_argument(flag, action="store_true")
    config: Any = run.add_argument("--config", "-c", action="append")
    config.completer = _config_files
    for name in dict.fromkeys([*OF_A_RUN, *_CLASSES_OF_A_RUN, *_options(args)]):
        kind = name.rpartition(".")[2]
        flags = (f"--{name}", f"--{name}+") if kind == "callbacks" else (f"--{name}",)
        action: Any = run.add_argument(*flags)
        if kind in _CLASSES:
            help_: Any = run.add_argument(f"--{name}.help", nargs="?")
            action.completer = help_.completer = partial(_classes, kind)


def _options(args: list[str]) -> Iterator[str]:
    """Yield the option names of all classes in the arguments and their files."""
    yield from _of("trainer", "Trainer")
    yield from _of("model", "Federation")
    yield from _of("model.client", "Classifier")
    words = [word for arg in args for word in arg.split("=", 1)]
    for option, value in pairwise(words):
        if option in ("--config", "-c"):
            with suppress(OSError, yaml.YAMLError):
                yield from _in(
                    yaml.load(Path(str(find_config(value))).read_text(), yaml.CBaseLoader)
                )
        elif option.startswith("--"):
            yield from _of(option.strip("-+"), value)


def _in(value: Any, name: str = "") -> Iterator[str]:
    """Yield the option names of a configuration and its classes."""
    if isinstance(value, list):
        for item in value:
            yield from _in(item, name)
    elif isinstance(value, dict):
        for key, part in value.items():
            of_class = key in ("class_path", "init_args")
            yield from _in(part, name if of_class else f"{name}.{key.rstrip('+')}".lstrip("."))
    else:
        yield name
        yield from _of(name, str(value))


def _of(name: str, kind: str) -> Iterator[str]:
    return (f"{name}.{option}" for option in catalogue.options(kind.rpartition(".")[2]))


def _classes(kind: str, **_: Any) -> list[str]:
    paths = [str(one.class_path) for one in catalogue.entries(_CLASSES[kind])]
    whole = kind == "network"  # torchvision has classes with the same names
    return paths if whole else [path.rpartition(".")[2] for path in paths]


def _methods(**_: Any) -> list[str]:
    return [one.name for one in catalogue.methods()]


def _config_files(prefix: str, **_: Any) -> set[str]:
    """Return shipped configurations and files with a prefix, up to the next folder."""
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
