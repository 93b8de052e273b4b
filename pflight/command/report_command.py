"""The command ``pflight report``."""

from __future__ import annotations

import argparse

from .compare_command import add_to_report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "folders",
        nargs="+",
        metavar="FOLDER",
        help="run folders, or those of comparisons, which may go on",
    )
    parser.add_argument(
        "--out", metavar="FOLDER", help="where tables and figures are written (default: nowhere)"
    )
    add_to_report(parser)


def run(options: argparse.Namespace) -> None:
    """Print the table."""
    from pflight.experiments.comparing import report_and_print

    report_and_print(options)
