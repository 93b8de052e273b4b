"""The command ``pflight list``."""

from __future__ import annotations

import argparse
import os

from .catalogue import entries

_UNLIMITED = 1000  # columns
_SECTIONS = {
    "methods": "--config configs/algorithm/NAME.yaml",
    "modifiers": "--methods METHOD+NAME of pflight compare",
    "data": "--data NAME",
    "partitions": "--data.partition NAME",
    "networks": "--model.client.network pflight.models.NAME",
    "configs": "--config configs/NAME.yaml",
}


def add_list(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.set_defaults(function="pflight.command.list_command:print_choices")
    parser.add_argument(
        "section",
        nargs="?",
        choices=[*_SECTIONS],
        metavar="section",
        help=f"one of {', '.join(_SECTIONS)}",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, also with class paths")


def print_choices(options: argparse.Namespace) -> None:
    """Print the available choices, one on each line.

    Lines are cut to the width of the terminal, unless one section is requested.
    """
    from rich.console import Console  # a slow import
    from rich.table import Table
    from rich.text import Text

    chosen = [options.section] if options.section else [*_SECTIONS]
    found = {section: entries(section) for section in chosen}
    console = Console()
    if options.json:
        known = {
            section: [{key: value for key, value in one._asdict().items() if value} for one in rows]
            for section, rows in found.items()
        }
        console.print_json(data=known)
        return
    if not (console.width and (console.is_terminal or "COLUMNS" in os.environ)):
        console.width = _UNLIMITED
    for section, rows in found.items():
        if section == "configs" and "methods" in found:  # the methods' configs are listed already
            rows = [one for one in rows if not one.name.startswith("algorithm/")]
        table = Table.grid(padding=(0, 2))
        names = 2 + max((len(one.name) for one in rows), default=0)
        table.add_column(width=names, no_wrap=True)
        left = max(console.width - names - 2, 1)
        table.add_column(max_width=left, no_wrap=not options.section, overflow="ellipsis")
        for one in rows:
            table.add_row(Text(f"  {one.name}", "bold"), Text(one.summary))
        if section != chosen[0]:
            console.print()
        console.print(Text.assemble((section, "bold"), f": {_SECTIONS[section]}"))
        console.print(table)
