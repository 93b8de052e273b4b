"""What there is to choose from, read from the source and the configurations without an import."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import yaml  # type: ignore[import-untyped]

from pflight.messages import closest, question

from .shipped import configs, summary
from .signatures import Source, exported

_METHODS = "configs/algorithm/"
_DATA = "pflight.data.data_module.FederatedDataModule"
_WRAPPED = "pflight.data.wrapped.WrappedData"
_PARTITION = "pflight.datamodules.partitions.partition.Partition"


class Entry(NamedTuple):
    """One thing to choose.

    Args:
        name: The name to choose it by.
        summary: What it is, in one sentence.
        class_path: Its class, if it is or uses one.
        config: Its configuration, if it is or has one.
    """

    name: str
    summary: str
    class_path: str | None = None
    config: str | None = None


@functools.cache
def methods() -> list[Entry]:
    """Return the methods, by the names of their configurations."""
    return [
        Entry(file.stem, summary(file), _callback(file), path)
        for path, file in configs().items()
        if path.startswith(_METHODS)
    ]


def no_method(name: str) -> str:
    """Return a message that there is no such method, with one that may have been meant."""
    meant = question(closest(name, [entry.name for entry in methods()]))
    return (
        f"there is no method {name!r}{meant} (`pflight list methods` names all; the file of one of "
        "your own ends in .yaml)"
    )


@functools.cache
def data() -> list[Entry]:
    """Return the data sets, and the classes for data of one's own.

    What wraps data that are set up already is for algorithms.
    """
    found = [one for one in _derived("pflight.datamodules", _DATA) if not one.is_a(_WRAPPED)]
    return _entries(one for one in found if not one.name.endswith("DataModule"))  # base classes


@functools.cache
def partitions() -> list[Entry]:
    """Return the partitions of a data set's samples among clients."""
    return _entries(_derived("pflight.datamodules", _PARTITION))


@functools.cache
def networks() -> list[Entry]:
    """Return the networks."""
    found = exported("pflight.models")
    return _entries(one for one in found if one.module.startswith("pflight.models.networks."))


@functools.cache
def shipped() -> list[Entry]:
    """Return the shipped configurations, by their paths without ``configs/`` and ``.yaml``."""
    return [
        Entry(path[len("configs/") : -len(".yaml")], summary(file), config=path)
        for path, file in configs().items()
    ]


def _derived(package: str, base: str) -> Iterator[Source]:
    return (one for one in exported(package) if one.path != base and one.is_a(base))


def _entries(classes: Iterable[Source]) -> list[Entry]:
    """Return entries by name, with the short class paths that configurations use."""
    return [
        Entry(one.name, _plain(one.summary), ".".join([*one.path.split(".")[:2], one.name]))
        for one in sorted(classes, key=lambda one: one.name)
    ]


def _plain(docstring: str) -> str:
    """Return a line of a docstring without markup."""
    return re.sub(r"(:\w+:)?`+~?([^`]*)`+", r"\2", docstring)


def _callback(config: Path) -> str:
    """Return the class of a configuration's method."""
    callbacks = yaml.load(config.read_text("utf-8"), yaml.CSafeLoader)["trainer"]["callbacks+"]
    return f"pflight.callbacks.{callbacks[-1]['class_path']}"
