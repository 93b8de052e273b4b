"""The command ``pflight prepare``: files from others, turned into files that pflight reads.

Packages and files that hold pickles are read in a process of its own, since a pickle may run code.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from pflight.datamodules.partitions import index_pickles
from pflight.datamodules.partitions.given import Given
from pflight.datamodules.sources import natural_sets
from pflight.datamodules.sources.natural_sets import FOLDER, SETS
from pflight.errors import ConfigurationError
from pflight.runs.files import replacing

from .process import fail, say


def prepare(options: argparse.Namespace) -> None:
    """Write the files that the options name."""
    try:
        {"natural": _natural, "partition": _partition}[options.work](options)
    except ConfigurationError as error:
        fail(str(error))


def _natural(options: argparse.Namespace) -> None:
    """Write the files of natural clients, and say what they are."""
    for line in _output(natural_sets, options.root):
        name, rows, clients, found = json.loads(line)
        one = SETS[name]
        path = Path(options.root, FOLDER, f"{name}.parquet")
        say(f"wrote {path}: {one.title}, {rows:,} rows of {clients} clients (each a {one.client})")
        print(f"    predicts {one.target}")
        print(f"    not for {one.not_for}")
        print(f"    licence: {one.licence}")
        print(f"    cite {one.citation}", flush=True)
        if found != one.fingerprint:
            print("    other data than those of docs/natural.md: figures and splits may differ")


def _partition(options: argparse.Namespace) -> None:
    """Turn a pickle with index lists into JSON that ``Given`` takes."""
    if os.path.lexists(options.out):
        raise ConfigurationError(f"{options.out} exists: remove it, or give another --out")
    (line,) = _output(index_pickles, options.file)
    given = Given(options.file)
    clients = given.clients(json.loads(line))
    given.disjoint([np.concatenate([*parts.values()]) for parts in clients])
    try:
        with replacing(Path(options.out)) as unfinished:
            unfinished.write_text(line, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"can't write {options.out}: {error.strerror}") from error
    say(
        f"wrote {options.out}: use it by --data.partition Given --data.partition.path "
        f"{shlex.quote(options.out)} --data.num_clients {len(clients)}"
    )


def _output(module: ModuleType, *args: Any) -> list[str]:
    """Run a module's file as a process of its own, and return the lines that it prints.

    Raises:
        ConfigurationError: The process fails; the message is its last line of errors.
    """
    command = [sys.executable, "-P", str(module.__file__), *map(str, args)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        said = process.stderr.strip().splitlines()
        raise ConfigurationError(said[-1] if said else "the process that reads has been killed")
    return process.stdout.splitlines()
