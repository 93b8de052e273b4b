"""The parser of the command line, whose errors are one line."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import yaml  # type: ignore[import-untyped]
from jsonargparse import ArgumentError, Namespace
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pflight.data.augmentation import Augmentation
from pflight.datamodules.partitions.partition import Partition
from pflight.errors import ConfigurationError, UnknownOptionError
from pflight.messages import OF_THE_PARSER, closest, no_class, no_option, too_early

from .built import UNEXPECTED, cause_of
from .by_class import split
from .config_files import groups_in
from .defaults import default_of, named

__all__ = ["FederationParser", "drop_untold_defaults", "refusal"]

_KINDS = (  # classes that a configuration may name
    L.Callback,
    L.LightningDataModule,
    nn.Module,
    Optimizer,
    LRScheduler,
    Logger,
    Partition,
    Augmentation,
)
_WORDS = {
    "NoneType": "null",
    "bool": "true/false",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "list": "a list",
    "tuple": "a list",
    "Sequence": "a list",
    "Iterable": "a list",
    "dict": "a mapping",
    "Mapping": "a mapping",
}
_NOISE = (
    "Does not validate",
    "Subtypes:",
    "Errors:",
    "Given value type",
    "Expected a path but",
    "Subclass types expect",
    "a class path (str)",
    "a dict with",
)
_KEY = re.compile(r'Parser key "(?P<name>[^"]+)"[^:]*:\s*(?P<rest>.*)')
_CLASS = re.compile(r"Problem with given class_path '(?P<name>[^']+)':\s*(?P<rest>.*)")
_UNKNOWN_OPTIONS = (
    re.compile(r"Option '(?P<name>[^']+)' is not accepted.*"),
    re.compile(r"(?:Subcommand|Group) '[^']+' does not accept option '(?P<name>[^']+)'.*"),
    re.compile(r"unrecognized arguments: --(?P<name>[^\s=]+).*"),
)
_UNKNOWN_CLASSES = (
    re.compile(r"(?:.*: )?(?:Expected a dot|Unexpected) import path \w+: (?P<name>.*)"),
    re.compile(r"module '(?P<module>[^']+)' has no attribute '(?P<name>[^']+)'.*"),
)
_ANNOTATED = re.compile(r"Expected '([^']+)' to be a function that returns <class '(\w+)'>\.?")
_ANNOTATE = r"\1 must say that it returns \2: def \1(...) -> \2"
_NO_VALUE = re.compile(r"(?<=argument )--\S+(?=: expected one argument)")


class FederationParser(LightningArgumentParser):
    """A parser whose errors are one line, with the option that may have been meant.

    It accepts ``None`` as ``null``: jsonargparse reads the value of
    ``--model.client.constraint null`` and passes it to the parser of the client's options as the
    text ``None``.

    Where a class has a ``seed`` that is 0 by default, the default is ``None`` here: that of the
    run.
    """

    def add_class_arguments(self, theclass: type, *more: Any, **options: Any) -> list[str]:
        """Add the arguments of a class as usual."""
        added: list[str] = super().add_class_arguments(theclass, *more, **options)
        if "seed" in added and self.get_default("seed") == 0:
            self.set_defaults(seed=None)
        return added

    def get_defaults(self, skip_validation: bool = False, **options: Any) -> Namespace:
        """Return the defaults.

        jsonargparse skips the validation when it is about to parse arguments. It then gets the name
        of a default class without the defaults of its options: another class would inherit them.
        It adds the defaults of the class that is chosen in the end.
        """
        defaults = super().get_defaults(skip_validation=skip_validation, **options)
        if skip_validation:
            for name, value in vars(defaults).items():
                if isinstance(value, Namespace) and "class_path" in value:
                    defaults[name] = _spec(self.get_default(name))
        return defaults

    def dump(self, cfg: Namespace, *more: Any, **options: Any) -> str:
        """Return the configuration as text, without defaults that text can't express."""
        cfg = cfg.clone()
        drop_untold_defaults(cfg)
        return str(super().dump(cfg, *more, **options))

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, *more: Any, **options: Any
    ) -> Namespace:
        """Parse arguments as usual."""
        if args is not None:
            args = [re.sub("(^|=)None$", r"\1null", arg) for arg in args]
        return super().parse_args(args, *more, **options)

    def parse_run(self, args: Sequence[str], commands: Mapping[str, FederationParser]) -> Namespace:
        """Parse the arguments of a run.

        Options of a callback by its class are set last, whatever their place on the line.

        Args:
            args: The arguments.
            commands: The parser of each command.

        Raises:
            UnknownOptionError: There is no option of that name.
            ConfigurationError: An argument is wrong.
        """
        args, by_class = split(args)
        shown = [arg for arg in args if by_class and arg.startswith("--print_config")]
        config = self._parsed([arg for arg in args if arg not in shown], commands)
        if by_class:
            parser = commands[config.subcommand]

            def parse(args: list[str], config: Namespace) -> Namespace:
                return parser._parsed(args, {}, namespace=config, defaults=False)

            for option in by_class:
                option.put(config[config.subcommand], parse)
            if shown:
                self.parse_args([config.subcommand, *shown], namespace=config)
        return config

    def _parsed(
        self,
        args: Sequence[str],
        commands: Mapping[str, FederationParser],
        **options: Any,
    ) -> Namespace:
        """Parse arguments, and explain an error with the options that ``commands`` have."""
        try:
            return self.parse_args(args, **options)
        except ArgumentError as error:
            complaint = _complaint(_with_whole_name(str(error), args))
            reason = complaint.in_words()
            option, *others = _unknown(complaint.unknown_option, args, commands)
            if not option:
                raise ConfigurationError(reason) from error
            if others:
                reason = f"there are no options {', '.join([option, *others])}"
            else:
                known = [*complaint.siblings, *OF_THE_PARSER]
                known += self._options(args, option, commands) if commands else []
                reason = too_early(option) if option in known else no_option(option, known)
            raise UnknownOptionError(reason, [option, *others]) from error

    def _options(
        self, args: Sequence[str], option: str, commands: Mapping[str, FederationParser]
    ) -> list[str]:
        """Return the names of a run's options, after removing the unknown ones."""
        args = [arg for arg in args if not re.match(r"--(print_config|help|.*\.help)|-h$", arg)]
        unknown = [option]
        while option:
            try:
                config = self.parse_args(_without(unknown, args))
            except ArgumentError as error:
                found = _complaint(str(error)).unknown_option
                option = "" if found is None or found in unknown else found
                unknown.append(option)
            else:
                return [*_names(config[config.subcommand])]
        command = next((arg for arg in args if arg in commands), None)
        return [*_names(commands[command].get_defaults())] if command else []


class _Complaint(NamedTuple):
    """An error of jsonargparse about one key, with a line for each type that it could have."""

    key: str
    kind: str | None
    lines: list[str]
    value: str | None

    @property
    def siblings(self) -> list[str]:
        """The full names of the options of the key's class."""
        if self.kind is None:
            return []
        module, _, name = self.kind.rpartition(".")
        parser = LightningArgumentParser()
        parser.add_class_arguments(getattr(import_module(module), name))
        return [f"{self.key}.{option}" for option in vars(parser.get_defaults())]

    @property
    def unknown_option(self) -> str | None:
        """The full name of the unknown option, if the error is about one."""
        found = _first(_UNKNOWN_OPTIONS, self.lines)
        name = found and ".".join(filter(None, (self.key, found["name"])))
        return name and name.replace(".init_args", "")

    def in_words(self) -> str:
        """Return the error as one line."""
        expected = [words for line in self.lines for words in _expected(line)]
        others = [_ANNOTATED.sub(_ANNOTATE, line) for line in self.lines if not _expected(line)]
        unknown = _first(_UNKNOWN_CLASSES, self.lines)
        if unknown and (not {*expected} - {"null"} or not unknown["name"].islower()):
            name = ".".join(filter(None, (unknown.groupdict().get("module"), unknown["name"])))
            said = _no_class(name)
        elif expected and (unknown or not others):
            if unknown and "a number" not in expected:  # which could be a tensor's class, too
                expected.append("a class")
            *others, last = sorted(dict.fromkeys(expected), key="null".__eq__)
            said = f"expected {', '.join(others)}{' or ' if others else ''}{last}"
            if str(self.value).lower() in ("nan", "inf", "-inf"):
                said = said.replace("a number", "a finite number")
            said += "" if self.value is None else f", got {self.value}"
        else:
            said = re.sub(r"(required: )\w+\.", r"\1", "; ".join(dict.fromkeys(others)))
        return f"{self.key}: {said}" if self.key else said


def refusal(error: BaseException, config: Namespace) -> str | None:
    """Return in one line why the Trainer, or what makes a class, rejects its options.

    jsonargparse's own message is about all types that a value could have; its cause is the error of
    the first of them.

    Args:
        error: What was raised when the classes of a run were made.
        config: The configuration of the run.

    Returns:
        The line, or ``None`` if there is a clear message already, or for a bug.
    """
    root, name = error, None
    while not isinstance(root, MisconfigurationException) and root.__cause__ is not None:
        made = re.search(r"Given value: Namespace\(class_path='([^']+)'", str(root))
        root, name = root.__cause__, made[1] if made else name
    if isinstance(root, MisconfigurationException):
        return None
    if unexpected := UNEXPECTED.fullmatch(str(root)):
        for option, spec in specs(config):
            if unexpected["name"] in (spec.get("dict_kwargs") or {}):
                return no_option(f"{option}.dict_kwargs.{unexpected['name']}", ())
    return f"{name or 'trainer'}: {cause_of(root)}"


def _with_whole_name(message: str, args: Sequence[str]) -> str:
    """Return an error with the option that has no value; argparse names the one that it is of."""

    def whole(part: re.Match[str]) -> str:
        given = (one for one, after in pairwise([*args, "--"]) if after.startswith("--"))
        return next((one for one in given if f"{one}.".startswith(f"{part[0]}.")), part[0])

    return _NO_VALUE.sub(whole, message)


def _complaint(message: str) -> _Complaint:
    """Return the error that goes deepest into jsonargparse's indented tree of alternatives."""
    places: list[tuple[int, str, bool]] = []  # column, name, and whether it is a key or a class
    found: dict[tuple[tuple[int, str, bool], ...], _Complaint] = {}
    for line in filter(None, message.splitlines()):
        text = line.lstrip(" -")
        column = len(line) - len(text)
        text = re.sub(r"Type .* expects a function or a callable class: ", "", text)
        places = [place for place in places if place[0] < column]
        for pattern in (_KEY, _CLASS):
            if match := pattern.match(text):
                places.append((column, match["name"], pattern is _KEY))
                text = match["rest"]
        text, *values = text.split(". Got value: ")
        value = values[0] if values else ""
        if text.startswith("Given value: "):
            text, value = "", text.removeprefix("Given value: ")
        if value or (text and not text.startswith(_NOISE)):
            key = ".".join(name for _, name, is_key in places if is_key)
            kind = next((name for _, name, is_key in reversed(places) if not is_key), None)
            said = found.get(tuple(places), _Complaint(key, kind, [], None))
            if value and not value.startswith(("NestedArg", "Namespace")):
                said = said._replace(value=value)
            found[tuple(places)] = said._replace(lines=[*said.lines, *filter(None, [text])])
    depths = {places: len(places) for places, said in found.items() if said.lines}
    if not depths:
        return _Complaint("", None, [" ".join(message.split())], None)
    return found[max(depths, key=depths.__getitem__)]


def _first(patterns: Sequence[re.Pattern[str]], lines: Sequence[str]) -> re.Match[str] | None:
    matches = (pattern.fullmatch(line) for pattern in patterns for line in lines)
    return next(filter(None, matches), None)


def _expected(line: str) -> list[str]:
    """Return what a line says was expected, in words, if it says so."""
    if match := re.fullmatch(r"Not a valid subclass of (\w+).*", line):
        return [f"a {match[1]}"]
    if line.startswith("Expected a dot import path") or not line.startswith("Expected a"):
        return []
    if match := re.search(r"Literal\[(.*)\]", line):
        return match[1].split(", ")
    if match := re.search(r"<class '([^']+)'>", line):
        name = match[1].rpartition(".")[2]
        return [_WORDS.get(name, f"a {name}")]
    return ["a class" if "import path" in line else line.removeprefix("Expected ")]


def _no_class(name: str) -> str:
    """Return a message that a class is unknown, with the one that may have been meant."""
    module, _, last = name.rpartition(".")
    try:
        there = vars(import_module(module))
        known = {n: f"{module}.{n}" for n, value in there.items() if isinstance(value, type)}
    except (ImportError, ValueError):
        known = {kind.__name__: kind.__name__ for kind in _kinds(_KINDS)}
    if last in known:
        return f"{name} is not a class that this option takes"
    return no_class(name, [known[close] for close in closest(last, known)])


def _kinds(kinds: Iterable[type]) -> Iterator[type]:
    """Yield classes and all their subclasses, except the many modules of other packages."""
    for kind in kinds:
        if not kind.__module__.startswith(("torch.nn.", "torchvision.", "torchmetrics.")):
            yield kind
        yield from _kinds(kind.__subclasses__())


def specs(value: Any, prefix: str = "") -> Iterator[tuple[str, Namespace]]:
    """Yield the parts of a configuration that name a class, with the names of their options."""
    if isinstance(value, list):
        for item in value:
            yield from specs(item, prefix)
    elif isinstance(value, Namespace):
        if value.get("class_path"):
            yield prefix, value
        for name, part in vars(value).items():
            inner = name not in ("init_args", "dict_kwargs")
            yield from specs(part, ".".join(filter(None, (prefix, name))) if inner else prefix)


def _spec(value: Any) -> Any:
    """Return a value in which all that names a class is a Namespace."""
    if not isinstance(value, dict | Namespace) or "class_path" not in value:
        return deepcopy(value)
    options: Any = value.get("init_args") or {}
    named = options if isinstance(options, dict) else vars(options)
    own = Namespace(**{name: _spec(option) for name, option in named.items()})
    return Namespace(class_path=value["class_path"], init_args=own)


def drop_untold_defaults(config: Namespace) -> None:
    """Drop, in place, options that have a default that jsonargparse can't read from text.

    These are objects, such as a tensor or a module, and functions without an annotated result: of
    a default function jsonargparse keeps the name, which it then does not take for a function. The
    class fills its defaults in.
    """
    for _, spec in specs(config):
        made_by, options = named(spec.class_path), spec.get("init_args")
        for name, value in [*vars(options).items()] if options and made_by else []:
            default = default_of(made_by, name)
            only_a_name = isinstance(value, str) and callable(default) and named(value) is default
            if only_a_name or (value is default and not _readable(value)):
                del options[name]


def _readable(value: Any) -> bool:
    """Return whether a value can be written to a configuration, and read again."""
    if value is None or isinstance(value, bool | int | float | str):
        return True
    if isinstance(value, list | tuple):
        return all(map(_readable, value))
    if isinstance(value, dict):
        return all(map(_readable, value.values()))
    name = getattr(value, "__qualname__", None)
    return name is not None and named(f"{value.__module__}:{name}") is value


def _names(value: Any, prefix: str = "") -> Iterator[str]:
    """Yield the names of all options in a configuration, without ``init_args``."""
    if isinstance(value, list):
        for item in value:
            yield from _names(item, prefix)
    elif isinstance(value, Namespace | dict):
        for name, part in (value if isinstance(value, dict) else vars(value)).items():
            if name in ("init_args", "dict_kwargs"):
                yield from _names(part, prefix)
            elif name != "class_path":
                key = f"{prefix}.{name}" if prefix else name
                yield key
                yield from _names(part, key)


def _unknown(
    first: str | None, args: Sequence[str], commands: Mapping[str, FederationParser]
) -> list[str]:
    """Return the first unknown option, and the unknown top-level names in config files."""
    groups = {name for parser in commands.values() for name in vars(parser.get_defaults())}
    groups |= {*commands, (first or "").partition(".")[0]}
    strangers = [
        group
        for option, path in pairwise(part for arg in args for part in arg.split("=", 1))
        if option in ("--config", "-c") and os.path.isfile(path)
        for group in groups_in(path)
        if group not in groups
    ]
    return [first or "", *strangers] if first or not strangers else strangers


def _without(options: Sequence[str], args: Sequence[str]) -> list[str]:
    """Return arguments without those that set some options or their parts, also in config files."""
    left, rest = [], list(args)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if name.startswith("-") and not equals and rest and not rest[0].startswith("--"):
            equals, value = "=", rest.pop(0)
        if name in ("--config", "-c") and os.path.isfile(value):
            config = yaml.safe_load(Path(value).read_text())
            value = yaml.safe_dump(functools.reduce(_pruned, options, config))
        key = name.removeprefix("--").removesuffix("+").replace(".init_args", "")
        if not f"{key}.".startswith(tuple(f"{option}." for option in options)):
            left.append(f"{name}{equals}{value}")
    return left


def _pruned(config: Any, option: str) -> Any:
    """Return a configuration without an option, also inside ``init_args`` and lists."""
    if isinstance(config, list):
        return [_pruned(item, option) for item in config]
    if not isinstance(config, dict):
        return config
    left = {}
    for name, value in config.items():
        key = str(name).removesuffix("+")
        if key == "init_args":
            left[name] = _pruned(value, option)
        elif option != key:
            inside = option.startswith(f"{key}.")
            left[name] = _pruned(value, option.removeprefix(f"{key}.")) if inside else value
    return left
