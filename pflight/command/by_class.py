"""Options of a callback or logger by its class, such as ``trainer.callbacks.FeSEM.k``."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jsonargparse import Namespace

from pflight.errors import ConfigurationError, UnknownOptionError
from pflight.messages import closest, question
from pflight.options import as_list

_OPTION = re.compile(r"--(trainer\.(callbacks|logger))\.([A-Z]\w*)\.([^=]+)(=.*)?", re.DOTALL)


class OptionByClass(NamedTuple):
    """An option of the only callback or logger of a class.

    Attributes:
        whose: The list with the object, such as ``trainer.callbacks``.
        kind: The name of the class.
        option: The name of the option.
        value: The arguments after the option; ``None`` if it is already set.
    """

    whose: str
    kind: str
    option: str
    value: Sequence[str] | None

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
        argument = [f"--{self.whose}.{self.option}{self.value[0]}", *self.value[1:]]
        try:
            changed = as_list(parse(argument, alone)[self.whose])[-1]
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


def split(args: Sequence[str]) -> tuple[list[str], list[OptionByClass]]:
    """Split arguments into all others and options by class.

    An option after its class stays in the arguments, as an option of the last callback.

    Example:
        >>> rest, (option,) = split(["fit", "--trainer.callbacks.FeSEM.num_clusters", "3", "-h"])
        >>> rest, option.kind, option.option, option.value
        (['fit', '-h'], 'FeSEM', 'num_clusters', ['', '3'])
        >>> split(["--trainer.callbacks+=FeSEM", "--trainer.callbacks.FeSEM.num_clusters=3"])[0]
        ['--trainer.callbacks+=FeSEM', '--trainer.callbacks.num_clusters=3']
    """
    left, found, rest = [], [], [*args]
    last: dict[str, str] = {}
    while rest:
        arg = rest.pop(0)
        match = _OPTION.fullmatch(arg)
        name, equals, text = arg.partition("=")
        if match is None:
            left.append(arg)
            if name in ("--config", "-c"):
                last = {}
            elif not equals and rest and not rest[0].startswith("--"):
                text = rest[0]
            last[name.removeprefix("--").removesuffix("+")] = text.rpartition(".")[2]
            continue
        whose, _, kind, option, given = match.groups()
        value = [given or ""]
        if given is None and rest and not re.match(r"-[^\d.]", rest[0]):
            value.append(rest.pop(0))
        follows = last.get(whose) == kind
        if follows:
            left += [f"--{whose}.{option}{value[0]}", *value[1:]]
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
