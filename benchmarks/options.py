"""Values of options on the command line, which are refused before anything is measured."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable
from pathlib import Path


def at_least(least: int) -> Callable[[str], int]:
    """Return a type of numbers that are not smaller."""

    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise ArgumentTypeError(f"{value} is less than {least}")
        return value

    return number


def known(names: Iterable[str]) -> Callable[[str], str]:
    """Return a type of names that are among the given ones."""
    names = list(names)

    def name(text: str) -> str:
        if text not in names:
            raise ArgumentTypeError(f"{text!r} is none of {', '.join(names)}")
        return text

    return name


def folder(text: str) -> Path:
    """Return the path of a folder that exists."""
    if not Path(text).is_dir():
        raise ArgumentTypeError(f"there is no folder {text}")
    return Path(text)
