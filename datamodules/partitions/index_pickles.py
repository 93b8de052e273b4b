"""Turn a pickle with index lists into JSON: a program that imports neither pflight nor PyTorch.

``pflight prepare partition`` runs it in a process of its own, and checks and writes what it prints.

A pickle may name any function, and loading it calls the function. Here only the functions are found
from which dicts, lists and NumPy's arrays are made. Other names are errors.
"""

from __future__ import annotations

import json
import pickle
import sys
from importlib import import_module
from typing import Any

import numpy as np

ALLOWED = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("collections", "OrderedDict"),
    ("collections", "defaultdict"),
    ("builtins", "list"),  # of a defaultdict
    ("builtins", "dict"),
    *((f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")),
    *((f"numpy.{core}.multiarray", "scalar") for core in ("core", "_core")),
    *((f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")),
}
"""Modules and names that a pickle may use."""


class IndexUnpickler(pickle.Unpickler):
    """Loads dicts, lists, numbers and NumPy's arrays, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Return an allowed class or function.

        Raises:
            UnpicklingError: The pickle names another one.
        """
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it uses {module}.{name}, which is not for index lists")
        return getattr(import_module(module.replace("numpy.core", "numpy._core")), name)


def plain(content: Any) -> Any:
    """Return dicts, lists and arrays as JSON has them."""
    if isinstance(content, dict):
        found = {str(key): plain(value) for key, value in content.items()}
        if len(found) < len(content):
            raise ValueError("a key is there as a number and as text")
        return found
    if isinstance(content, np.ndarray | np.generic):
        return plain(content.tolist())
    if isinstance(content, list | tuple | set | range):
        return [plain(value) for value in content]
    if content is None or isinstance(content, int | float | str):
        return content
    raise TypeError(f"it holds a {type(content).__name__}, which is not for index lists")


def main(source: str) -> None:
    """Read a pickle and print it as a line of JSON."""
    try:
        with open(source, "rb") as file:
            content = plain(IndexUnpickler(file).load())
    except OSError as error:
        sys.exit(f"can't read {source}: {error.strerror}")
    except Exception as error:  # of any kind, in a damaged pickle
        sys.exit(f"{source} is no pickle of index lists: {' '.join(str(error).split())}")
    print(json.dumps(content))


if __name__ == "__main__":
    main(*sys.argv[1:])
