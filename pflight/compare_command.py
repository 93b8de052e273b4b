"""The command ``pflight compare``."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add = parser.add_argument
    add(
        "--config",
        "-c",
        nargs="+",
        action="extend",
        required=True,
        metavar="FILE",
        help="configurations of data, clients and trainer: all but the method",
    )
    add(
        "--methods",
        "-m",
        nargs="+",
        action="extend",
        required=True,
        metavar="METHOD",
        help="names, as `pflight list methods` shows them, `all` of these, or configurations of "
        "your own",
    )
    add("--seeds", type=int, default=3, metavar="N", help="how many, from 0 (default: 3)")
    add(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="OPTION=VALUE,...",
        help="an option of all runs or, with several values, one that tells rows apart: "
        "trainer.max_epochs=30 model.local_epochs=1,5",
    )
    add(
        "--tune",
        nargs="+",
        metavar="trials=N",
        help="choose each method's options by N trials on validation samples of other seeds; "
        "also seeds=N (default: 1) and sampler=tpe or random",
    )
    add("--jobs", "-j", type=int, default=1, metavar="N", help="runs side by side (default: 1)")
    add("--out", default="results", metavar="FOLDER", help="where all is kept (default: results)")
    add_to_report(parser)


def add_to_report(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say what a table has."""
    parser.add_argument(
        "--baseline",
        metavar="METHOD",
        help="with which the others are compared (default: the best)",
    )
    parser.add_argument(
        "--target",
        type=float,
        metavar="VALUE",
        help="of the metric that chooses rounds: when is it reached, after how many bytes?",
    )


def run(options: argparse.Namespace) -> None:
    """Compare, and print the table."""
    from .experiments.command import compare_and_print

    compare_and_print(options)
