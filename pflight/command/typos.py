"""Finds misspelt options of a run in the source of its classes, before anything is imported.

What is right is never refused: where the source does not settle it, the parser of the run does.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from pflight.messages import OF_THE_PARSER, closest, no_class, no_option

from .shipped import find_config, no_config
from .signatures import PACKAGES, Source, defined_names, find, names

_OF_A_RUN = ("seed_everything", "trainer", "model", "data", "monitor", "mode", "search_space")
_TRAINER = "lightning.pytorch.trainer.trainer.Trainer"
_DEFAULTS = {"model": "pflight.Federation", "model.client": "pflight.models.Classifier"}
_KNOWN_BY_SHORT_NAMES = (
    "pflight",
    "pflight.callbacks",
    "pflight.datamodules",
    "pflight.models",
    "torch.optim",
    "lightning.pytorch.callbacks",
    "lightning.pytorch.loggers",
)
_GIVEN_LATER = {
    "params": "torch.optim.optimizer.Optimizer",
    "optimizer": "torch.optim.lr_scheduler.LRScheduler",
}
_PARTS = {"model", "datamodule", "dataloaders", "train_dataloaders", "val_dataloaders"}
_OF_CLASSES = ("data", "data.partition", "model", "model.client", "trainer.callbacks")
_BY_CLASS = ("trainer.callbacks", "trainer.logger")  # whose options may follow a class
_CLASS_PATH = re.compile(r"([A-Za-z_]\w*)(\.[A-Za-z_]\w*)+")
_DEEPEST = 100  # level of a configuration, beyond which libyaml may crash


def complaint(command: str, args: Sequence[str], besides: Sequence[str] = ()) -> str | None:
    """Return what is wrong with the names of a run's options and configurations.

    Args:
        command: ``fit``, say.
        args: What follows it on the line.
        besides: Further options, which are not among the arguments but may have been meant.

    Returns:
        The message of the run's own parser, or ``None`` if only that parser can tell.
    """
    if any(re.fullmatch(r"-h|--|--(.*\.)?help(=.*)?", arg) for arg in args):
        return None
    try:
        options = Options(command, args)
    except FileNotFoundError as error:
        return no_config(str(error.filename))
    except UnclearError:
        return None
    unknown = next(filter(options.lack, options.given), None)
    if unknown is None:
        return options.wrong_class()
    names = [*options.names()]
    parent = unknown.rpartition(".")[0]
    siblings = [*besides, *(name for name in names if name.rpartition(".")[0] == parent)]
    said = no_option(unknown, [*siblings, *names, *OF_THE_PARSER])
    return said if said.endswith("?") or not options.foreign else None  # which may be meant


class UnclearError(Exception):
    """Only the parser of a run can read its options."""


class Options:
    """The options of a run, as far as the source of its classes has them.

    Args:
        command: ``fit``, say.
        args: What follows it on the line.

    Raises:
        FileNotFoundError: There is no such configuration.
        UnclearError: The arguments or a configuration are not as usual.
    """

    def __init__(self, command: str, args: Sequence[str]) -> None:
        trainer = find(_TRAINER)
        own = trainer.arguments(command) if trainer else []
        if not own:
            raise UnclearError
        self._of_run = [*_OF_A_RUN, *(name for name in own if name not in _PARTS)]
        self._classes: dict[str, list[str]] = defaultdict(list)  # named anywhere for an option
        self.foreign = False
        """Whether classes of other packages are named."""
        self.given: list[str] = []
        """The full names of the options on the line."""
        for arg, option, value in _pairs(args):
            if option == "config":
                self._note("", _document(_config(value)))
                continue
            name = ".".join(part.rstrip("+") for part in option.split(".") if part != "init_args")
            if not re.search(r"\s", arg):  # otherwise it is the value of the option before it
                self.given.append(name)
            if name == "trainer":
                raise UnclearError
            text = value or ""
            nested = text.startswith(("{", "["))
            self._note(name.removesuffix(".class_path"), _loaded(text) if nested else text)

    def lack(self, option: str) -> bool:
        """Return whether the run has no such option for certain, whichever class it is of."""
        parts = option.split(".")
        if {"help", "class_path", "dict_kwargs"} & {*parts}:
            return False
        prefix = ""
        for part in parts:
            if prefix in _BY_CLASS and part[:1].isupper():
                return False  # the parser looks for the one callback of this class
            named = [*self._classes[prefix], *filter(None, [_DEFAULTS.get(prefix)])]
            known = self._known(prefix, named)
            if known is None:
                return False
            if part not in known:
                return bool(prefix) or part not in OF_THE_PARSER
            prefix = f"{prefix}.{part}".removeprefix(".")
        return False

    def wrong_class(self) -> str | None:
        """Return a message about a class that is in no package, but is spelt like one that is."""
        for option in _OF_CLASSES:
            for name in self._classes[option]:
                short = name.isidentifier() and not name.islower() and not os.path.exists(name)
                if short and not (self.foreign or self._find(name) or name in defined_names()):
                    known = chain.from_iterable(map(names, _KNOWN_BY_SHORT_NAMES))
                    if meant := closest(name, (one for one in known if one[0].isupper())):
                        return f"{option}: {no_class(name, meant)}"
        return None

    def names(self, prefix: str = "") -> Iterator[str]:
        """Yield the full names of all options that are known."""
        named = self._classes[prefix] or [*filter(None, [_DEFAULTS.get(prefix)])]
        for name in self._known(prefix, named) or ():
            full = f"{prefix}.{name}".removeprefix(".")
            yield full
            yield from self.names(full)

    def _known(self, prefix: str, classes: Sequence[str]) -> list[str] | None:
        """Return the names of the options of a part of the run, if all its classes are known."""
        if not prefix:
            return self._of_run
        classes = [_TRAINER] if prefix == "trainer" else classes
        options: dict[str, None] = {}
        for source in map(self._find, classes):
            own = None if source is None else _of_a_configuration(source)
            if own is None:
                return None
            options |= dict.fromkeys(own)
        return [*options] if classes else None

    def _find(self, name: str) -> Source | None:
        if "." in name:
            return find(name)
        if self.foreign:  # another package may have a class of this name
            return None
        paths = (f"{package}.{name}" for package in _KNOWN_BY_SHORT_NAMES)
        return next(filter(None, map(find, paths)), None)

    def _note(self, name: str, value: Any) -> None:
        """Note the classes in the value of an option, or in its parts."""
        if isinstance(value, dict):
            if "<<" in value:
                raise UnclearError
            for key, part in value.items():
                if key in ("class_path", "init_args"):
                    self._note(name, part)
                elif key != "dict_kwargs":
                    self._note(f"{name}.{key.rstrip('+')}".removeprefix("."), part)
        elif isinstance(value, list):
            for part in value:
                self._note(name, part)
        elif value not in ("", "~", "null", "None"):
            self._classes[name].append(value)
            path = _CLASS_PATH.fullmatch(value)
            self.foreign |= path is not None and path[1] not in PACKAGES


def _of_a_configuration(source: Source) -> list[str] | None:
    """Return the options of a class without the first, if that is given when it is built later."""
    options = source.options
    later = _GIVEN_LATER.get(options[0]) if options else None
    return options[1:] if options and later and source.is_a(later) else options


def _pairs(args: Sequence[str]) -> Iterator[tuple[str, str, str | None]]:
    """Yield an argument, the option that it names, and the option's value, if there is one."""
    rest = [*args]
    while rest:
        arg = rest.pop(0)
        option, equals, value = arg.partition("=")
        if not option.startswith("--") and option != "-c":
            raise UnclearError
        if not equals and rest and not re.match(r"-[^\d.]", rest[0]):
            equals, value = "=", rest.pop(0)
        name = "config" if option == "-c" else option.removeprefix("--")
        yield arg, name, value if equals else None


def _config(path: str | None) -> Path:
    if path is None:
        raise UnclearError
    found = find_config(path)
    if found is None:
        raise FileNotFoundError(2, "no such configuration", path)
    return Path(found)


def _document(config: Path) -> dict[str, Any]:
    if not config.is_file():  # a pipe, say, which can be read once
        raise UnclearError
    try:
        document = _loaded(config.read_text("utf-8-sig"))
    except (OSError, UnicodeDecodeError):
        raise UnclearError from None
    if not isinstance(document, dict) or not isinstance(document.get("trainer", {}), dict):
        raise UnclearError
    return document


def _loaded(text: str) -> Any:
    """Return a YAML text with scalars as they are written."""
    depth = 0
    try:
        for event in yaml.parse(text, yaml.CBaseLoader):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST or isinstance(event, yaml.AliasEvent):
                raise UnclearError
        return yaml.load(text, yaml.CBaseLoader)
    except yaml.YAMLError:
        raise UnclearError from None
