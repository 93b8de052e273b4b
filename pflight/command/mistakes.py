"""Find the mistake in arguments that the parser of a run has refused.

The parser gets the options one by one, until it refuses one.
"""

from __future__ import annotations

import collections.abc
import functools
import inspect
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from pkgutil import resolve_name
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import lightning as L
from jsonargparse import ArgumentError, ArgumentParser, Namespace
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pflight.errors import ConfigurationError, UnknownOptionError
from pflight.messages import OF_THE_PARSER, closest, no_option, one_line, question, too_early
from pflight.options import annotation, in_words

from .built import cause_of
from .by_class import FLAGS
from .config_files import MODE, load
from .defaults import default_of, named, specs

_PLAIN = (NoneType, bool, int, float, str, list, tuple, dict, Path)
_OF_A_RUN: dict[str, Any] = {
    "model": L.LightningModule,
    "data": L.LightningDataModule,
    "seed_everything": bool | int,
}
_PATH = re.compile(r"[A-Za-z_]\w*([.:][A-Za-z_]\w*)*")
_LONGEST = 250  # letters of a message of the parser

Given = tuple[str, str, Any]
"""The file of an option, empty for the command line; its full name; and its value."""


def mistake(
    error: Exception, args: Sequence[str], parser: ArgumentParser, config: Namespace | None = None
) -> ConfigurationError:
    """Return in one line why the arguments of a run are wrong.

    Args:
        error: The parser's exception.
        args: The arguments.
        parser: The parser of their command.
        config: The configuration before the arguments; by default the parser's defaults.
    """
    with suppress(Exception):  # then the parser's own message is used
        try:
            _Replay(parser, config or parser.get_defaults()).check([*_given(args)])
        except ConfigurationError as found:
            return found
    return ConfigurationError(_short(error))


class _Replay:
    """Gives the options of a run to its parser one by one.

    Args:
        parser: The parser of the command.
        config: The configuration before the options.
    """

    def __init__(self, parser: ArgumentParser, config: Namespace) -> None:
        self._parser = parser
        self._config = config
        self._known: dict[str, None] = {}  # names of options, also of replaced classes
        self._note()

    def check(self, given: Sequence[Given]) -> None:
        """Raise for the first mistake.

        Raises:
            UnknownOptionError: There is no option of that name.
            ConfigurationError: There is no such class, or an option does not accept its value.
        """
        for i, (file, name, value) in enumerate(given):
            try:
                self._give(name, value)
            except ArgumentError as error:
                said = self._why(name.rstrip("+"), value, given[i + 1 :]) or (
                    f"{name}: {_short(error)}"
                )
                said = f"{file}: {said}" if file else said
                if self._has(name.rstrip("+")):
                    raise ConfigurationError(said) from error
                raise UnknownOptionError(said, [name]) from error
        for prefix, spec in specs(self._config):
            options: Any = spec.get("init_args") or {}
            kind = named(spec.class_path)
            missing = [
                f"{prefix}.{name}"
                for name in _names(kind)
                if default_of(kind, name) is inspect.Parameter.empty and options.get(name) is None
            ]
            if missing:
                raise ConfigurationError(f"{prefix} requires {', '.join(missing)}")

    def _give(self, name: str, value: Any) -> None:
        """Let the parser set an option. Its classes may lack options that come later."""
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        self._config = self._parser.parse_args(
            [f"--{name}={text}"],
            namespace=self._config.clone(),
            defaults=False,
            _skip_validation=True,
        )
        self._note()

    def _note(self) -> None:
        """Note the classes of the configuration and their options."""
        self._kinds = {"": None, "trainer": L.Trainer}
        self._kinds |= {name: named(spec.class_path) for name, spec in specs(self._config)}
        for prefix, kind in self._kinds.items():
            names = _names(kind) if prefix else vars(self._config)
            self._known |= dict.fromkeys(f"{prefix}.{name}".lstrip(".") for name in names)

    def _has(self, name: str) -> bool:
        """Return whether there is an option of a class, or an entry by a user-given name."""
        prefix, _, option = name.rpartition(".")
        kind = self._kinds.get(prefix)
        return option in (_names(kind) if prefix else vars(self._config)) or bool(
            self._each(prefix)
        )

    def _hint(self, name: str) -> Any:
        """Return the annotation of an option, if it is known."""
        prefix, _, option = name.rpartition(".")
        if not prefix:
            return _OF_A_RUN.get(option)
        kind = self._kinds.get(prefix)
        return self._each(prefix) if kind is None else annotation(kind, option)

    def _each(self, name: str) -> Any:
        """Return the type of an option's values by user-given names, as for modifiers, or None."""
        hint = self._hint(name) if "." in name else None
        kinds = (get_args(one)[-1] for one in (hint, *get_args(hint)) if get_origin(one) is dict)
        return next((kind for kind in kinds if kind not in (Any, *_PLAIN)), None)

    def _why(self, name: str, value: Any, later: Sequence[Given]) -> str | None:
        """Return why an option is wrong, if the parser's reason is not needed.

        Args:
            name: The name of the option.
            value: The value.
            later: The options that follow. Their classes may have this option.
        """
        parent = name.rpartition(".")[0]
        if not self._has(name):
            if self._each(parent.rpartition(".")[0]) is not None and parent not in self._kinds:
                return f"{parent} has no class: give --{parent} CLASS before {name}"
            for _, other, its in later:
                with suppress(ArgumentError):
                    self._give(other, its)
            beside = [one for one in self._known if one.rpartition(".")[0] == parent]
            known = [*beside, *self._known, *OF_THE_PARSER]
            return too_early(name) if name in self._known else no_option(name, known)
        hint, text = self._hint(name), str(value)
        kinds = tuple(_classes(hint))
        plain = text.islower() and any(part in _PLAIN[1:] for part in get_args(hint))
        if kinds and value is not None and _PATH.fullmatch(text) and not plain:
            return f"{name}: {_why_no_class(text, kinds)}"
        got = "null" if value is None else value
        return hint and f"{name}: expected {in_words(hint, value)}, got {got}"


@functools.cache
def _names(kind: Any) -> list[str]:
    """Return the options of a class or function, without what an optimizer is made for."""
    parser = ArgumentParser(exit_on_error=False, parser_mode=MODE)
    later = isinstance(kind, type) and issubclass(kind, Optimizer | LRScheduler)
    try:
        if isinstance(kind, type):
            parser.add_class_arguments(kind, skip={1} if later else None)
    except (TypeError, ValueError):  # an unreadable constructor
        return []
    return [*vars(parser.get_defaults())]


def _given(args: Sequence[str]) -> Iterator[Given]:
    """Yield the options of the arguments and of their files.

    Raises:
        ConfigurationError: If an option lacks its value.
    """
    for arg in args:
        option, equals, text = arg.partition("=")
        if option in FLAGS or not option.startswith("-"):
            continue
        name = "" if option == "--config" else option.lstrip("-").removesuffix(".help")
        if equals:
            parts = (part for part in name.split(".") if part != "init_args")
            yield from _inside(*_read(text, not name), ".".join(parts))
        elif not option.endswith(".help"):
            raise ConfigurationError(f"{name or 'config'}: a value is missing")


def _read(text: str, is_config: bool) -> tuple[str, Any]:
    """Return the file of a value, if it is read from a file, and the value."""
    if (is_config or text.endswith((".yaml", ".yml"))) and os.path.isfile(text):
        return text, load(Path(text).read_text("utf-8-sig"))
    plain = not is_config and not text.startswith(("{", "["))
    return "", None if text in ("null", "None") else text if plain else load(text)


def _inside(file: str, value: Any, name: str) -> Iterator[Given]:
    """Yield the options inside the value of another option, each class before its options."""
    if isinstance(value, dict):
        for key in sorted(value, key="class_path".__ne__):
            if key == "class_path":
                yield file, name, value[key]
            else:
                whose = name.rstrip("+")
                parts = (whose, "" if key == "init_args" else str(key))
                yield from _inside(file, value[key], ".".join(filter(None, parts)))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        if not name.endswith("+"):
            yield file, name, None
        for item in value:
            yield from _inside(file, item, f"{name.rstrip('+')}+")
    else:
        yield file, name, value


def _why_no_class(path: str, kinds: tuple[type, ...]) -> str:
    """Return why an option can't take an import path or short name, with a similar name.

    Args:
        path: The import path or short name.
        kinds: The classes that the option takes.
    """
    known = {kind.__name__: kind.__name__ for kind in _subclasses(kinds)}
    module, _, last = path.rpartition(".")
    if module:
        try:
            found = resolve_name(path)
        except AttributeError:
            found = None
        except Exception as error:  # a module may raise anything
            return cause_of(error)
        if inspect.isfunction(found):
            return f"{path} can't be used: is it a function that declares what it returns?"
        there = vars(named(module) or object)
        known = {name: f"{module}.{name}" for name, value in there.items() if callable(value)}
    known.pop(last, None)
    meant = question([known[close] for close in closest(last, known)])
    return f"{path} is not a class that this option takes{meant}"


def _subclasses(kinds: Iterable[type]) -> Iterator[type]:
    """Yield classes and all their subclasses, without the modules of other packages."""
    for kind in kinds:
        if not kind.__module__.startswith(("torch.nn.", "torchvision.", "torchmetrics.")):
            yield kind
        yield from _subclasses(kind.__subclasses__())


def _classes(hint: Any) -> Iterator[type]:
    """Yield the classes that an annotation accepts: for a function, its result's class."""
    if get_origin(hint) is collections.abc.Callable:
        yield from _classes(get_args(hint)[-1])
    elif isinstance(hint, type) and hint not in _PLAIN:
        yield hint
    elif get_origin(hint) is not Literal:
        for part in get_args(hint):
            yield from _classes(part)


def _short(error: Exception) -> str:
    said = one_line(str(error))
    return said if len(said) <= _LONGEST else f"{said[:_LONGEST]}..."
