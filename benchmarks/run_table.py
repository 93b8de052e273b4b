"""A table of run folders, which a command names."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from quiet import quiet


def print_table(doc: str, head: Sequence[str], lines: Callable[[Path], Iterable[str]]) -> None:
    """Print the table.

    Args:
        doc: Of the command; its first line is what it does.
        head: Of the table.
        lines: Gets a run folder, and returns what the table has of it.
    """
    parser = argparse.ArgumentParser(description=doc.split("\n")[0])
    parser.add_argument("runs", type=Path, nargs="+", help="run folders")
    quiet()
    print(f"| {' | '.join(head)} |\n{'|---' * len(head)}|")
    for folder in parser.parse_args().runs:
        for line in lines(folder):
            print(line, flush=True)
