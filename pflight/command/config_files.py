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

MODE = "yaml of pflight"
"""The parser mode of jsonargparse that reads YAML by :func:`load`."""


def config_file(path: str) -> str:
    """Return the path of a config file of the user or of pflight.

    Raises:
        ConfigurationError: If the file is missing or unreadable.
    """
    found = find_config(path)
    if found is None:
        raise ConfigurationError(no_config(path))
    if found == path:
        check_config_file(path)
    return found


def with_shipped_configs(args: Sequence[str]) -> list[str]:
    """Return the arguments ``--option=value``, with shipped configs in place of missing files.

    Before a file replaces a list of callbacks or loggers, the list is emptied. Otherwise
    jsonargparse gives an earlier callback's options to its replacement.
    """
    found = []
    for arg in args:
        if arg.startswith("--config="):
            path = config_file(arg.partition("=")[2])
            inside_a_command = not args[0].startswith("-")
            found += _emptied(path) if inside_a_command else []
            arg = f"--config={path}"
        found.append(arg)
    return found


def _emptied(path: str) -> list[str]:
    """Return arguments that empty the Trainer's lists that a file replaces."""
    trainer = load(Path(path).read_text("utf-8-sig")).get("trainer")
    options = trainer if isinstance(trainer, dict) else {}
    lists = (name for name in ("callbacks", "logger") if isinstance(options.get(name), list))
    return [f"--trainer.{name}=null" for name in lists]


def check_config_file(path: str) -> None:
    """Raise unless a file is YAML with options by name, without duplicates.

    Raises:
        ConfigurationError: If it is not. The message names the file and the line.
    """
    with _read_errors(path):
        text = Path(path).read_text("utf-8-sig")
        document = yaml.compose(text, yaml.SafeLoader)  # libyaml crashes on deep nesting
    if document is None:
        raise _error(path, "is empty")
    if not isinstance(document, yaml.MappingNode):
        raise _error(path, f"has a {document.id} where a mapping of options is expected")
    with _read_errors(path):
        _check_nodes(path, document)
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
    except RecursionError as error:
        raise _error(path, "is nested too deeply") from error


def load(text: str) -> Any:
    """Parse a YAML text as jsonargparse does.

    Raises:
        YAMLError: If the text is not YAML, or a tag does not fit its value.
        ConfigurationError: If an alias contains itself. jsonargparse would not terminate.
    """
    if "&" in text:
        _check_nodes("", yaml.compose(text, yaml.SafeLoader))
    try:
        return get_loader("yaml")(text)
    except yaml.YAMLError:
        raise
    except Exception as error:  # tags raise many kinds of errors for wrong values
        raise yaml.YAMLError(f"{type(error).__name__}: {error}") from error


set_loader(MODE, load, (yaml.YAMLError,))


def _check_nodes(path: str, node: yaml.Node, above: tuple[yaml.Node, ...] = ()) -> None:
    """Raise if a mapping has duplicate keys or contains itself."""
    if node in above:
        raise _error(path, "contains itself through an alias", node.start_mark)
    names: set[str] = set()
    for part in [] if isinstance(node, yaml.ScalarNode) else node.value:
        key, value = part if isinstance(part, tuple) else (None, part)
        if key is not None:
            if not isinstance(key, yaml.ScalarNode):
                raise _error(path, f"has a {key.id} as the name of an option", key.start_mark)
            if key.value in names:
                raise _error(path, f"has the option {key.value} twice", key.start_mark)
            names.add(key.value)
        _check_nodes(path, value, (*above, node))


def _error(path: str, message: str, mark: yaml.Mark | None = None) -> ConfigurationError:
    where = f" (line {mark.line + 1})" if mark else ""
    whose = f"the config file {path}" if path else "YAML"
    return ConfigurationError(f"{whose} {message}{where}")
