"""Checks of configuration files before any option is read; messages name the file and line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from jsonargparse import get_loader, set_loader

from pflight.errors import ConfigurationError

from .shipped import find_config, no_config

MODE = "bounded yaml"
"""The parser mode of jsonargparse that limits what YAML aliases may expand to."""

_DEEPEST = 100
_MOST_BY_ALIASES = 10_000  # nodes that aliases may add to those written in the text


def config_file(path: str) -> str:
    """Return the path of a config file, which may be one of those that come with pflight.

    Raises:
        ConfigurationError: If there is none, or it can't be read.
    """
    found = find_config(path)
    if found is None:
        raise ConfigurationError(no_config(path))
    if found == path:
        check_config_file(path)
    return found


def with_shipped_configs(args: Sequence[str]) -> list[str]:
    """Return the arguments, with paths of shipped configs for config files that don't exist.

    Lists that a file replaces, of callbacks or loggers, are emptied before. Otherwise jsonargparse
    gives the options of an earlier callback to the one that takes its place.
    """
    found, rest = [], list(args)
    while rest:
        arg = rest.pop(0)
        option, equals, value = arg.partition("=")
        if option in ("--config", "-c") and (equals or rest):
            path = config_file(value if equals else rest.pop(0))
            inside_a_command = not args[0].startswith("-")
            found += _emptied(path) if inside_a_command else []
            found += [f"{option}={path}"] if equals else [option, path]
        else:
            found.append(arg)
    return found


def _emptied(path: str) -> list[str]:
    """Return arguments that empty the lists of the Trainer which a file gives as a whole."""
    trainer = load(Path(path).read_text("utf-8-sig")).get("trainer")
    options = trainer if isinstance(trainer, dict) else {}
    lists = (name for name in ("callbacks", "logger") if isinstance(options.get(name), list))
    return [f"--trainer.{name}=null" for name in lists]


def check_config_file(path: str) -> None:
    """Raise unless a file is YAML with options by name, each given once.

    Raises:
        ConfigurationError: If it is not; the message names the file and the line.
    """
    with _read_errors(path):
        text = Path(path).read_text("utf-8-sig")
        _check_depth(path, text)
        document = yaml.compose(text, yaml.CSafeLoader)
    if document is None:
        raise _error(path, "is empty")
    if not isinstance(document, yaml.MappingNode):
        raise _error(path, f"has a {document.id} where a mapping of options is expected")
    _check_once(path, document, set())
    _Extent(path).of(document)
    with _read_errors(path):
        load(text)
    for key, value in document.value:  # jsonargparse would ignore such a value
        if key.value == "trainer" and not value.tag.endswith((":map", ":str", ":null")):
            raise _error(path, "has no mapping of options under trainer", value.start_mark)


@contextmanager
def _read_errors(path: str) -> Iterator[None]:
    """Turn errors from reading a file into a ConfigurationError that names the file."""
    try:
        yield
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise _error(path, f"is not UTF-8 text: it has the byte {byte:#x}") from error
    except OSError as error:
        raise _error(path, f"can't be read: {error.strerror}") from error
    except yaml.MarkedYAMLError as error:
        raise _error(path, f"is not YAML: {error.problem}", error.problem_mark) from error
    except yaml.YAMLError as error:
        raise _error(path, f"is not YAML: {str(error).splitlines()[0]}") from error


def _check_depth(path: str, text: str) -> None:
    """Raise if options are nested so deeply that libyaml would crash the process."""
    depth = 0
    for event in yaml.parse(text, yaml.CSafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            raise _error(path, f"is nested more than {_DEEPEST} levels deep", event.start_mark)


def groups_in(path: str) -> list[str]:
    """Return the top-level names of a checked file, each up to its first dot."""
    document = yaml.compose(Path(path).read_text("utf-8-sig"), yaml.CSafeLoader)
    names = (key.value for key, _ in document.value if not key.tag.endswith(":merge"))
    return [name.partition(".")[0].removesuffix("+") for name in names]


def load(text: str) -> Any:
    """Return the content of a YAML text, as jsonargparse reads it.

    Raises:
        ConfigurationError: If an alias contains itself, or aliases repeat too much.
    """
    if "*" in text and "&" in text:
        _check_depth("", text)
        _Extent("").of(yaml.compose(text, yaml.CSafeLoader))
    try:
        return get_loader("yaml")(text)
    except yaml.YAMLError:
        raise
    except Exception as error:  # tags raise many kinds of errors on values that don't fit them
        raise yaml.YAMLError(f"{type(error).__name__}: {error}") from error


set_loader(MODE, load, (yaml.YAMLError,))


class _Extent:
    """Measures how deep and how large a document is once its aliases are expanded.

    Args:
        path: The file, for messages.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._found: dict[yaml.Node, tuple[int, int]] = {}
        self._open: set[yaml.Node] = set()

    def of(self, node: yaml.Node) -> tuple[int, int]:
        """Return the depth and the number of nodes below a node.

        Raises:
            ConfigurationError: If the node contains itself, or there are too many nodes.
        """
        if node in self._open:
            raise _error(self.path, "contains itself through an alias", node.start_mark)
        if node not in self._found:  # an alias may lead back to it
            self._open.add(node)
            parts = [self.of(part) for part in _parts(node)]
            self._open.remove(node)
            depth = 1 + max((depth for depth, _ in parts), default=0)
            size = 1 + sum(size for _, size in parts)
            self._found[node] = depth, size
            if depth > _DEEPEST + 1:
                more = f"is nested more than {_DEEPEST} levels deep"
                raise _error(self.path, more, node.start_mark)
            if size - len(self._found) > _MOST_BY_ALIASES:
                more = f"repeats more than {_MOST_BY_ALIASES:,} nodes through aliases"
                raise _error(self.path, more, node.start_mark)
        return self._found[node]


def _parts(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else []


def _check_once(path: str, node: yaml.Node, seen: set[yaml.Node]) -> None:
    """Raise if a mapping has a key twice: YAML silently takes the last one."""
    if node in seen or isinstance(node, yaml.ScalarNode):
        return
    seen.add(node)  # an alias may lead back to it
    if isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _check_once(path, value, seen)
        return
    keys = set()
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise _error(path, f"has a {key.id} as the name of an option", key.start_mark)
        name = str(key.value)
        if name in keys:
            raise _error(path, f"has the option {name} twice", key.start_mark)
        keys.add(name)
        _check_once(path, value, seen)


def _error(path: str, message: str, mark: yaml.Mark | None = None) -> ConfigurationError:
    where = f" (line {mark.line + 1})" if mark else ""
    whose = f"the config file {path}" if path else "YAML"
    return ConfigurationError(f"{whose} {message}{where}")
