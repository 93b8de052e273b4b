"""The runs of a comparison: methods by settings by seeds."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, reduce
from itertools import chain, product
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import yaml  # type: ignore[import-untyped]
from jsonargparse import Namespace
from lightning.pytorch.cli import ArgsType

from pflight.command import catalogue
from pflight.command.cli import FederationCLI
from pflight.command.combined import MODIFIERS, Named, no_modifier, parts_of
from pflight.command.config_files import config_file, load
from pflight.command.defaults import specs
from pflight.command.shipped import find_config, summary
from pflight.command.version import __version__
from pflight.errors import ConfigurationError, UnknownOptionError
from pflight.modifiers import Modifier
from pflight.options import described
from pflight.server_callback import ServerCallback

from .outcome import Tuned

APART = ("config", "seed_everything", "search_space", "ckpt_path")
"""Options that make no other run."""
_PLACE = "trainer.default_root_dir"
_MOST = 60  # characters of settings in the name of a folder


@dataclass(frozen=True)
class Method:
    """A method that is compared.

    Attributes:
        name: Its name on the command line and in the names of folders.
        title: Its name in tables: the start of the first line of its configuration.
        config: Its configuration.
        space: The search space that the configuration declares.
        modifiers: The arguments of ``pflight fit`` that add modifiers.
    """

    name: str
    title: str
    config: Path
    space: Mapping[str, Any] = field(default_factory=dict)
    modifiers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """A method with settings: a row of the table, with a run for each seed.

    Attributes:
        method: The method.
        settings: Options that differ from other rows of its method.
        fixed: Options that are the same in all rows that have them.
        arguments: The arguments of ``pflight fit``, without seed and run folder.
        config: All options, as plain Python, without options that differ from run to run.
        tuned: How its settings were chosen, if they were.
    """

    method: Method
    settings: Mapping[str, Any]
    fixed: Mapping[str, Any]
    arguments: Sequence[str]
    config: Mapping[str, Any]
    tuned: Tuned | None = None

    @cached_property
    def key(self) -> str:
        """A hash of its method's name and of its options."""
        return key_of({"method": self.method.name, **self.config})

    @property
    def folder(self) -> str:
        """The name of the folder of its runs, unique among rows."""
        told = ",".join(f"{n.rpartition('.')[2]}={_text(v)}" for n, v in self.settings.items())
        name = ",".join(filter(None, [self.method.name, told[:_MOST]]))
        return re.sub(r"[^\w.,=+-]", "_", f"{name}-{self.key[:8]}")

    def trial(self, settings: Mapping[str, Any]) -> Row:
        """Return the row with settings of a trial. Its runs will check them."""
        return Row(
            self.method,
            {**self.settings, **settings},
            self.fixed,
            [*self.arguments, *_told(settings)],
            {**self.config, "tried": dict(settings)},
        )


class Plan:
    """The shared part of all runs of a comparison, and the rows that follow.

    Args:
        configs: Configurations of the data, the client and the trainer, without a method.
        options: Further arguments of ``pflight fit``, as ``--trainer.max_epochs=30``.

    Raises:
        ConfigurationError: If a configuration is wrong, or chooses a method.
    """

    def __init__(self, configs: Sequence[str], options: Sequence[str] = ()) -> None:
        if not configs:
            raise ConfigurationError(
                "compare needs a configuration with the data and the clients: give --config"
            )
        self.configs = [config_file(path) for path in configs]
        self.arguments = [*(f"--config={path}" for path in self.configs), *options]
        config = _parser().options(self.arguments)
        for name, spec in specs(config):
            kind = resolve_name(spec.class_path)
            if isinstance(kind, type) and issubclass(kind, ServerCallback):
                raise ConfigurationError(
                    f"the configuration of a comparison leaves the method to --methods, but "
                    f"{name} has {kind.__name__}"
                )
        if config.get("data") is None:
            raise ConfigurationError("the configuration of a comparison has no data")
        self.space = declared(self.configs)
        self._rows: dict[tuple[str, ...], Row] = {}
        self.data = _plain(config)["data"]

    def rows(self, methods: Iterable[Method], settings: Mapping[str, Sequence[Any]]) -> list[Row]:
        """Return a row for each method and each combination of settings that it has.

        Args:
            methods: The methods.
            settings: Values of options by their names.

        Raises:
            UnknownOptionError: If no method has a setting.
            ConfigurationError: If an option can't have a value.
        """
        if reserved := sorted({*settings} & {*APART, _PLACE}):
            raise ConfigurationError(
                f"--set {reserved[0]}: a comparison gives each run its own (see --seeds and --out)"
            )
        rows: dict[str, Row] = {}
        lacking: dict[str, UnknownOptionError] = {}
        used: set[str] = set()
        for method in methods:
            absent: set[str] = set()
            for values in product(*settings.values()):
                chosen = dict(zip(settings, values, strict=True))
                while True:
                    own = {name: v for name, v in chosen.items() if name not in absent}
                    try:
                        fixed = {n: v for n, v in own.items() if len(settings[n]) == 1}
                        row = self.row(method, {n: own[n] for n in own if n not in fixed}, fixed)
                        break
                    except UnknownOptionError as error:
                        missing = {*error.options} & {*own}
                        if not missing:
                            raise
                        absent |= missing
                        lacking |= dict.fromkeys(missing, error)
                used |= {*own}
                rows.setdefault(row.key, row)
        for name, why in lacking.items():
            if name not in used:
                raise UnknownOptionError(f"--set {name}: no method has it: {why}", [name])
        return list(rows.values())

    def row(self, method: Method, settings: Mapping[str, Any], fixed: Mapping[str, Any]) -> Row:
        """Return the row of a method with some settings."""
        options = {**fixed, **settings}
        given = f"--config={method.config}", *method.modifiers
        arguments = [*self.arguments, *given, *_told(options)]
        known = (*arguments, *settings)
        if known not in self._rows:  # parsing takes a while
            config = _plain(_parser().options(arguments))
            self._rows[known] = Row(method, settings, fixed, arguments, config)
        return self._rows[known]


def methods_of(names: Sequence[str]) -> list[Method]:
    """Return methods by the names of shipped configurations, or by the paths of others.

    ``all`` names all shipped ones but those for adapters.

    Raises:
        ConfigurationError: If there is no such method, or two have one name.
    """
    found: dict[str, Method] = {}
    shipped = [one.name for one in catalogue.methods() if one.needs != "adapters"]
    names = [*chain.from_iterable(shipped if name == "all" else [name] for name in names)]
    for name in names:
        method = _method(name)
        if found.setdefault(method.name, method) != method:
            raise ConfigurationError(
                f"two methods are called {method.name}: {found[method.name].config} and "
                f"{method.config}; rename a file"
            )
    titles = Counter(method.title for method in found.values())
    return [
        replace(method, title=method.name)  # a copy of a shipped configuration, say
        if titles[method.title] > 1 and method.name not in names
        else method
        for method in found.values()
    ]


def _method(name: str) -> Method:
    plain, modifiers = parts_of(name)
    return reduce(_modified, modifiers, _plain_method(plain))


def _modified(method: Method, name: str) -> Method:
    """Return a method with a modifier, by its name or by its class."""
    if reason := no_modifier(name):
        raise ConfigurationError(reason)
    named = MODIFIERS.get(name) or Named(name, "")
    kind: Any = None
    with suppress(ValueError, ImportError, AttributeError):
        kind = resolve_name(named.kind)
    if not (isinstance(kind, type) and issubclass(kind, Modifier)):
        raise ConfigurationError(f"there is no modifier class {name!r} that can be imported")
    option = f"trainer.callbacks.modifiers.{kind.name}"
    told = {option: f"{kind.__module__}.{kind.__qualname__}"}
    told |= {f"{option}.{n}": value for n, value in named.options.items()}
    if [given for given in method.modifiers if given.startswith(f"--{option}=")]:
        raise ConfigurationError(
            f"{method.name}+{name}: a method takes one {kind.__name__}; give a method of your own, "
            "in a .yaml file, the options of both"
        )
    return Method(
        f"{method.name}+{name}",
        f"{method.title} + {kind(**named.options).title}",
        method.config,
        {**method.space, **{f"{option}.{n}": values for n, values in named.space.items()}},
        (*method.modifiers, *_told(told)),
    )


def _plain_method(name: str) -> Method:
    found = find_config(f"configs/algorithm/{name}.yaml")
    if found is None and name.endswith((".yaml", ".yml")):
        found = config_file(name)
    if found is None:
        raise ConfigurationError(catalogue.no_method(name))
    path = Path(found)
    title, colon, _ = summary(path).partition(":")
    return Method(path.stem, title if colon else path.stem, path, declared([path]))


def declared(configs: Iterable[str | Path]) -> dict[str, Any]:
    """Return the search space that configurations declare, the last one for each option."""
    space: dict[str, Any] = {}
    for path in configs:
        found = yaml.safe_load(Path(path).read_text("utf-8-sig")).get("search_space")
        if found is not None and not isinstance(found, Mapping):
            raise ConfigurationError(f"{path}: search_space must have a range for each option")
        space |= found or {}
    return space


class _Parser(FederationCLI):
    """Parses and checks the arguments of a fit, without making any object."""

    def options(self, arguments: Sequence[str]) -> Any:
        """Return the options of a fit with such arguments, defaults included."""
        super().parse_arguments(self.parser, ["fit", *arguments])
        return self.config.fit

    def parse_arguments(self, parser: Any, args: ArgsType) -> None:
        self.config = Namespace(subcommand="fit")

    def _set_seed(self) -> None:
        pass

    def before_instantiate_classes(self) -> None:
        pass

    def instantiate_classes(self) -> None:
        pass

    def _run_subcommand(self, subcommand: str) -> None:
        pass


@cache
def _parser() -> _Parser:
    return _Parser([])  # making it takes as long as parsing a configuration


def key_of(config: Mapping[str, Any]) -> str:
    """Return a hash of plain options."""
    text = json.dumps({"pflight": __version__, **config}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _plain(config: Any) -> dict[str, Any]:
    """Return the options that identify a run, as plain Python."""
    return without_place(json.loads(json.dumps(config.as_dict(), default=_in_words)))


def _in_words(value: Any) -> str:
    """Return an object as text that is the same in every process."""
    words = str(value)
    return described(value) if " at 0x" in words else words


def without_place(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return plain options without a run's folder and seed."""
    left = {name: value for name, value in options.items() if name not in APART}
    left["trainer"] = {n: v for n, v in options["trainer"].items() if n != "default_root_dir"}
    return left


def _told(options: Mapping[str, Any]) -> list[str]:
    """Return options as arguments."""
    return [f"--{name}={_text(value)}" for name, value in options.items()]


def _text(value: Any) -> str:
    """Return a value as an argument."""
    return value if isinstance(value, str) else json.dumps(value)


def of_data(settings: Mapping[str, Sequence[Any]]) -> tuple[list[str], dict[str, Sequence[Any]]]:
    """Return the settings of the data as arguments for all runs, and the other settings.

    Raises:
        ConfigurationError: If an option of the data has several values.
    """
    fixed, varied = [], {}
    for name, values in settings.items():
        if name.partition(".")[0] != "data":
            varied[name] = values
        elif len(values) == 1:
            fixed.append(f"--{name}={_text(values[0])}")
        else:
            raise ConfigurationError(
                f"--set {name}: methods are compared on the same data: give one value, and each "
                "of the others in a comparison with an --out of its own"
            )
    return fixed, varied


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield options of a plain configuration, by their names on the command line.

    Example:
        >>> config = {"trainer": {"callbacks": [{"class_path": "FedProx", "init_args": {"mu": 1}}]}}
        >>> dict(flat(config))
        {'trainer.callbacks.class_path': 'FedProx', 'trainer.callbacks.mu': 1}
    """
    if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        value = value[-1]  # the command line means this, too
    if isinstance(value, Mapping):
        for key, part in value.items():
            inner = name if key in ("init_args", "dict_kwargs") else f"{name}.{key}".lstrip(".")
            yield from flat(part, inner)
    else:
        yield name, value


def values_of(settings: Iterable[str]) -> dict[str, list[Any]]:
    """Return the values of ``option=value,value`` by option.

    Commas inside brackets and quotes belong to a value.

    Raises:
        ConfigurationError: If a value is not YAML, or an option comes twice.

    Example:
        >>> values_of(["model.local_epochs=1,5", "data.partition={class_path: IID}"])
        {'model.local_epochs': [1, 5], 'data.partition': [{'class_path': 'IID'}]}
    """
    found: dict[str, list[Any]] = {}
    for setup in settings:
        name, _, text = setup.removeprefix("--").partition("=")
        if name in found:
            raise ConfigurationError(f"--set has {name} twice: give its values in one list")
        try:
            found[name] = load(f"[{text}]")
        except yaml.YAMLError as error:
            reason = str(error).splitlines()[0]
            raise ConfigurationError(f"--set {setup}: a value is not YAML: {reason}") from error
    return found
