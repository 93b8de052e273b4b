"""Find the mistake in arguments that the parser of a run has refused.

The options are checked one by one, in their order. If no mistake is found, the parser's own
message is used.
"""

from __future__ import annotations

import collections.abc
import functools
import inspect
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from pkgutil import resolve_name
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args, get_origin

import lightning as L
import yaml  # type: ignore[import-untyped]
from jsonargparse import ArgumentError, ArgumentParser, Namespace
from lightning.pytorch.loggers import Logger
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pflight.data.augmentation import Augmentation
from pflight.datamodules.partitions.partition import Partition
from pflight.errors import ConfigurationError, UnknownOptionError
from pflight.messages import OF_THE_PARSER, closest, no_class, no_option, one_line, too_early
from pflight.modifiers import Modifier
from pflight.options import annotation, in_words

from .built import cause_of
from .config_files import MODE, load
from .defaults import default_of, named, specs

_KINDS = (  # base classes of classes in a configuration
    L.Callback,
    L.LightningDataModule,
    nn.Module,
    Optimizer,
    LRScheduler,
    Logger,
    Partition,
    Augmentation,
    Modifier,
)
_PLAIN = (NoneType, bool, int, float, str, list, tuple, dict, Path)
_OF_A_RUN: dict[str, Any] = {
    "model": L.LightningModule,
    "data": L.LightningDataModule,
    "seed_everything": bool | int,
}
_PATH = re.compile(r"[A-Za-z_]\w*([.:][A-Za-z_]\w*)*")
_FLAGS = ("-h", "--help", "--print_config")
_LONGEST = 250  # letters of a message of the parser


class Given(NamedTuple):
    """An option from the command line or a file.

    Attributes:
        where: The file with the option; empty for the command line.
        name: The full name of the option.
        value: The value; a text if from the command line.
    """

    where: str
    name: str
    value: Any

    def said(self, message: str) -> str:
        """Return a message with the name of the file."""
        return f"{self.where}: {message}" if self.where else message


class _Part(NamedTuple):
    """The options of a class or function, or of the run itself."""

    kind: Any
    names: list[str]

    def annotation(self, option: str) -> Any:
        """Return the annotation of an option, if it is known."""
        return _OF_A_RUN.get(option) if self.kind is None else annotation(self.kind, option)

    @property
    def required(self) -> list[str]:
        """The names of the options without a default."""
        found = self.names if self.kind is not None else []
        return [name for name in found if default_of(self.kind, name) is inspect.Parameter.empty]


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
    try:
        _Options(parser, config or parser.get_defaults()).check([*_given(args)])
    except ConfigurationError as found:
        return found
    except (OSError, UnicodeDecodeError, yaml.YAMLError):  # in the file of an option
        pass
    said = one_line(str(error))
    return ConfigurationError(said if len(said) <= _LONGEST else f"{said[:_LONGEST]}...")


class _Options:
    """The options of a run, updated for each class in the arguments.

    Args:
        parser: The parser of the command.
        config: The configuration before the arguments.
    """

    def __init__(self, parser: ArgumentParser, config: Namespace) -> None:
        self._now: dict[str, _Part] = {}
        self._all: dict[str, None] = {}  # names of options, also of replaced classes
        self._set = {
            f"{name}.{option}"
            for name, spec in specs(config)
            for option, value in vars(spec.get("init_args") or Namespace()).items()
            if value is not None
        }
        self._add("", _Part(None, [*vars(parser.get_defaults())]))
        self._add("trainer", _part(L.Trainer, later=False))
        for name, spec in specs(config):
            if kind := named(spec.class_path):
                self._add(name, _part(kind, later=issubclass(kind, Optimizer | LRScheduler)))

    def _add(self, prefix: str, part: _Part | None) -> None:
        if part is None:
            self._now.pop(prefix, None)
            return
        self._now[prefix] = part
        self._all |= dict.fromkeys(f"{prefix}.{name}".lstrip(".") for name in part.names)

    def check(self, given: Sequence[Given]) -> None:
        """Raise for the first mistake.

        Raises:
            UnknownOptionError: There is no option of that name.
            ConfigurationError: There is no such class, or an option does not accept its value.
        """
        for i, one in enumerate(given):
            if not self._has(one.name):
                for later in given[i:]:
                    self._note(later)
                raise self._unknown(one)
            self._note(one, check=True)
        names = self._set | {*self._now} | {one.name for one in given}
        for prefix, part in self._now.items():
            required = [f"{prefix}.{option}" for option in part.required]
            missing = [one for one in required if not any(_is_in(name, one) for name in names)]
            if missing and prefix != "trainer":
                raise ConfigurationError(f"{prefix} requires {', '.join(missing)}")

    def _has(self, name: str) -> bool:
        """Return whether an option may exist. It may if its class is unknown."""
        prefix = ""
        for part in name.split("."):
            by_name = self._of_each(prefix) is not None
            if not by_name:
                if prefix not in self._now or part == "dict_kwargs":
                    return self._of_each(prefix.rpartition(".")[0]) is None  # else it has no class
                if part not in self._now[prefix].names:
                    return False
            prefix = f"{prefix}.{part}".lstrip(".")
        return True

    def _of_each(self, name: str) -> Any:
        """Return the type of an option's values by user-given names, as for modifiers, or None."""
        prefix, _, option = name.rpartition(".")
        hint = self._now[prefix].annotation(option) if prefix and prefix in self._now else None
        kinds = (get_args(one)[-1] for one in (hint, *get_args(hint)) if get_origin(one) is dict)
        return next((kind for kind in kinds if kind not in (Any, *_PLAIN)), None)

    def _unknown(self, one: Given) -> UnknownOptionError:
        parent = one.name.rpartition(".")[0]
        beside = [name for name in self._all if name.rpartition(".")[0] == parent]
        said = no_option(one.name, [*beside, *self._all, *OF_THE_PARSER])
        said = too_early(one.name) if one.name in self._all else said
        if parent not in self._now and self._of_each(parent.rpartition(".")[0]) is not None:
            said = f"{parent} has no class: give --{parent} CLASS before {one.name}"
        return UnknownOptionError(one.said(said), [one.name])

    def _note(self, one: Given, check: bool = False) -> None:
        """Note a given class, or check the value of an option."""
        prefix, _, option = one.name.rpartition(".")
        part, hint = self._now.get(prefix), self._of_each(prefix)
        if (part or hint) is None or (one.value is None and one.name in self._now):
            return
        if part is not None:
            hint = part.annotation(option)
        kinds, text = (*_classes(hint),), str(one.value)
        wrong = check and hint is not None and not _fits(hint, one.value)
        got = "null" if one.value is None else one.value
        said = f"expected {in_words(hint, one.value)}, got {got}"
        if kinds and one.value is not None and _PATH.fullmatch(text):
            try:
                kind = _found(text)
            except ConfigurationError as error:
                raise ConfigurationError(one.said(f"{one.name}: {error}")) from error
            fits = kind is not None and not (isinstance(kind, type) and not issubclass(kind, kinds))
            later = _is_function(hint)
            if fits and later and not isinstance(kind, type):  # a function is used as it is
                self._add(one.name, _Part(kind, []))
                if wrong:
                    said = f"{text} can't be used: is it a function that declares what it returns?"
            elif fits:
                self._add(one.name, _part(kind, later))
                return
            elif not (text.islower() and any(part in _PLAIN[1:] for part in get_args(hint))):
                other = f"{text} is not a class that this option takes"
                said = _no_class(text) if kind is None else other
        if wrong:
            raise ConfigurationError(one.said(f"{one.name}: {said}"))


@functools.cache
def _part(kind: Any, later: bool) -> _Part | None:
    """Return the options of a class or function, without the first one if ``later``."""
    parser = ArgumentParser(exit_on_error=False, parser_mode=MODE)
    add = parser.add_class_arguments if isinstance(kind, type) else parser.add_function_arguments
    try:
        add(kind, skip={1} if later else None)
    except (TypeError, ValueError):  # an unreadable constructor
        return None
    return _Part(kind, [*vars(parser.get_defaults())])


def _fits(hint: Any, value: Any) -> bool:
    """Return whether an annotation accepts a value."""
    parser = ArgumentParser(exit_on_error=False, parser_mode=MODE)
    parser.add_argument("--option", type=hint)
    try:
        parser.parse_object({"option": value})
    except ArgumentError:
        return False
    return True


def _is_in(name: str, option: str) -> bool:
    return f"{name}.".startswith(f"{option}.")


def _given(args: Sequence[str]) -> Iterator[Given]:
    """Yield the options of the arguments and of their files.

    Raises:
        ConfigurationError: If an option lacks its value.
    """
    rest = [*args]
    while rest:
        option, equals, text = rest.pop(0).partition("=")
        if option in _FLAGS or not option.startswith("-"):
            continue
        if not equals and rest and not rest[0].startswith("--"):
            equals, text = "=", rest.pop(0)
        name = option.lstrip("-").removesuffix(".help")
        if option in ("--config", "-c"):
            name = ""
        if equals:
            parts = (part.rstrip("+") for part in name.split(".") if part != "init_args")
            yield from _inside(*_read(text, not name), ".".join(parts))
        elif not option.endswith(".help"):
            raise ConfigurationError(f"{name or 'config'}: a value is missing")


def _read(text: str, is_config: bool) -> tuple[str, Any]:
    """Return the file of a value, if it is read from a file, and the value."""
    if (is_config or text.endswith((".yaml", ".yml"))) and os.path.isfile(text):
        return text, load(Path(text).read_text("utf-8-sig"))
    plain = not is_config and not text.startswith(("{", "["))
    return "", None if text in ("null", "None") else text if plain else load(text)


def _inside(where: str, value: Any, name: str) -> Iterator[Given]:
    """Yield the options inside the value of another option, each class before its options."""
    if isinstance(value, dict):
        for key in sorted(value, key="class_path".__ne__):
            inner = "" if key in ("class_path", "init_args") else str(key).rstrip("+")
            yield from _inside(where, value[key], ".".join(filter(None, (name, inner))))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for item in value:
            yield from _inside(where, item, name)
    else:
        yield Given(where, name, value)


def _found(path: str) -> Any:
    """Return the object of an import path or short name, or ``None``.

    Raises:
        ConfigurationError: If the module can't be imported.
    """
    if path.isidentifier():
        return {kind.__name__: kind for kind in _subclasses(_KINDS)}.get(path)
    try:
        return resolve_name(path)
    except AttributeError:
        return None
    except Exception as error:
        raise ConfigurationError(cause_of(error)) from error


def _no_class(name: str) -> str:
    """Return a message that a class does not exist, with a similar name."""
    module, _, last = name.rpartition(".")
    known = {kind.__name__: kind.__name__ for kind in _subclasses(_KINDS)}
    if module:
        there = named(module)
        known = (
            {n: f"{module}.{n}" for n, value in vars(there).items() if callable(value)}
            if there
            else {}
        )
    return no_class(name, [known[close] for close in closest(last, known)])


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


def _is_function(hint: Any) -> bool:
    """Return whether an annotation accepts a function. Then a class is called later."""
    kinds = (hint, *get_args(hint))
    return any(get_origin(kind) is collections.abc.Callable for kind in kinds)
