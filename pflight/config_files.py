"""Configuration files: what is wrong with one is said of the file, before any option is read."""

from __future__ import annotations

from pathlib import Path

import yaml  # type: ignore[import-untyped]

from .errors import ConfigurationError

_DEEPEST = 100


def check_config_file(path: str) -> None:
    """Raise unless a file is YAML that holds options by name, each once.

    Raises:
        ConfigurationError: If it isn't; the message names the file and the line.
    """
    try:
        text = Path(path).read_text("utf-8-sig")
        _check_depth(path, text)
        document = yaml.compose(text, yaml.CSafeLoader)
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise _error(path, f"is not UTF-8 text: it has a byte {byte:#x}") from error
    except OSError as error:
        raise _error(path, f"can't be read: {error.strerror}") from error
    except yaml.MarkedYAMLError as error:
        raise _error(path, f"is not YAML: {error.problem}", error.problem_mark) from error
    except yaml.YAMLError as error:
        raise _error(path, f"is not YAML: {str(error).splitlines()[0]}") from error
    if document is None:
        raise _error(path, "is empty")
    if not isinstance(document, yaml.MappingNode):
        raise _error(path, f"holds a {document.id}, not options by name")
    _check_once(path, document, set())
    for key, value in document.value:  # which jsonargparse would pass over
        if key.value == "trainer" and not value.tag.endswith((":map", ":str", ":null")):
            raise _error(path, "has no options by name under trainer", value.start_mark)


def _check_depth(path: str, text: str) -> None:
    """Raise if options are nested so deeply that libyaml would end the process."""
    depth = 0
    for event in yaml.parse(text, yaml.CSafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            raise _error(path, f"is nested more than {_DEEPEST} deep", event.start_mark)


def _check_once(path: str, node: yaml.Node, seen: set[yaml.Node]) -> None:
    """Raise if there is a key twice in a mapping: YAML takes the last and forgets the others."""
    if node in seen or isinstance(node, yaml.ScalarNode):
        return
    seen.add(node)  # an alias may lead back to it
    if isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _check_once(path, value, seen)
        return
    keys = set()
    for key, value in node.value:
        name = str(key.value)
        if name in keys:
            raise _error(path, f"has {name} twice", key.start_mark)
        keys.add(name)
        _check_once(path, value, seen)


def _error(path: str, message: str, mark: yaml.Mark | None = None) -> ConfigurationError:
    where = f" (line {mark.line + 1})" if mark else ""
    return ConfigurationError(f"the config {path} {message}{where}")
