"""Arguments of a run as text: one for each option, and options of a callback by its class."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jsonargparse import Namespace

from pflight.errors import ConfigurationError, UnknownOptionError
from pflight.messages import closest, question
from pflight.options import as_list

FLAGS = ("-h", "--help", "--print_config")
"""Options without a value."""
_OPTION = re.compile(r"--(trainer\.(callbacks|logger))\.([A-Z]\w*)\.([^=]+)(=.*)?", re.DOTALL)


class OptionByClass(NamedTuple):
    """An option of the only callback or logger of a class.

    Attributes:
        whose: The list with the object, such as ``trainer.callbacks``.
        kind: The name of the class.
        option: The name of the option.
        value: The text after the option, with ``=``; ``None`` if it is already set.
    """

    whose: str
    kind: str
    option: str
    value: str | None

    def put(self, config: Namespace, parse: Callable[[list[str], Namespace], Namespace]) -> None:
        """Set the option in the configuration of a command.

        Args:
            config: The configuration, which is changed.
            parse: Adds arguments to a configuration. They refer to the last object of a list.

        Raises:
            UnknownOptionError: There is no such option, or no object of the class.
            ConfigurationError: There are several of the class, or the value is wrong.
        """
        name = f"{self.whose}.{self.kind}.{self.option}"
        given = as_list(config[self.whose])
        made = [one for one in given if isinstance(one, Namespace)]
        kinds = [one.class_path.rpartition(".")[2] for one in made]
        if (count := kinds.count(self.kind)) > 1:
            raise ConfigurationError(
                f"{name}: {self.whose} has {count} objects of class {self.kind}: give each its "
                "options in a file"
            )
        if not count:
            meant = question(closest(self.kind, kinds)) or (
                f", but {', '.join(kinds)}" if kinds else ""
            )
            raise UnknownOptionError(f"{name}: {self.whose} has no {self.kind}{meant}", [name])
        if self.value is None:
            return
        chosen = made[kinds.index(self.kind)]
        alone = config.clone()
        alone[self.whose] = [chosen] if isinstance(config[self.whose], list) else chosen
        try:
            argument = f"--{self.whose}.{self.option}{self.value}"
            changed = as_list(parse([argument], alone)[self.whose])[-1]
        except UnknownOptionError as error:
            options = map(self._whole, error.options)
            raise UnknownOptionError(self._whole(str(error)), [*options]) from error
        except ConfigurationError as error:
            raise ConfigurationError(self._whole(str(error))) from error
        for part, value in vars(changed).items():
            chosen[part] = value

    def _whole(self, text: str) -> str:
        """Return a text with the name of the class in the options of the list."""
        return text.replace(f"{self.whose}.", f"{self.whose}.{self.kind}.")


def joined(args: Sequence[str]) -> list[str]:
    """Return arguments with each option and its value in one.

    Example:
        >>> joined(["fit", "-c", "run.yaml", "--data.seed", "-1", "--data.num_clients=3", "--help"])
        ['fit', '--config=run.yaml', '--data.seed=-1', '--data.num_clients=3', '--help']
    """
    found: list[str] = []
    for arg in args:
        before = found[-1] if found else ""
        takes_value = before.startswith("-") and "=" not in before and before not in FLAGS
        if takes_value and not re.match(r"-[^\d.]", arg):
            found[-1] = f"{before}={arg}"
        else:
            found.append(re.sub("^-c(?==|$)", "--config", arg))
    return found


def split(args: Sequence[str]) -> tuple[list[str], list[OptionByClass]]:
    """Split :func:`joined` arguments into all others and options by class.

    An option after its class stays in the arguments, as an option of the last callback.

    Example:
        >>> rest, (option,) = split(["fit", "--trainer.callbacks.FeSEM.num_clusters=3", "-h"])
        >>> rest, option.kind, option.option, option.value
        (['fit', '-h'], 'FeSEM', 'num_clusters', '=3')
        >>> split(["--trainer.callbacks+=FeSEM", "--trainer.callbacks.FeSEM.num_clusters=3"])[0]
        ['--trainer.callbacks+=FeSEM', '--trainer.callbacks.num_clusters=3']
    """
    left, found = [], []
    last: dict[str, str] = {}
    for arg in args:
        match = _OPTION.fullmatch(arg)
        if match is None:
            left.append(arg)
            name, _, text = arg.partition("=")
            last = {} if name == "--config" else last
            last[name.removeprefix("--").removesuffix("+")] = text.rpartition(".")[2]
            continue
        whose, _, kind, option, value = match.groups(default="")
        follows = last.get(whose) == kind
        if follows:
            left.append(f"--{whose}.{option}{value}")
        found.append(OptionByClass(whose, kind, option, None if follows else value))
    return left, found


def without_class(option: str) -> str:
    """Return an option without its class, as an option of the last callback.

    Example:
        >>> without_class("trainer.callbacks.FeSEM.num_clusters")
        'trainer.callbacks.num_clusters'
    """
    match = _OPTION.fullmatch(f"--{option}")
    return option if match is None else f"{match[1]}.{match[4]}"
