"""The command ``pflight compare``."""

from __future__ import annotations

import argparse

from .catalogue import no_method
from .combined import no_modifier, parts_of
from .shipped import find_config, no_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add = parser.add_argument
    add(
        "--config",
        "-c",
        nargs="+",
        action="extend",
        required=True,
        type=_config,
        metavar="FILE",
        help="configurations of data, clients and trainer: all but the method",
    )
    add(
        "--methods",
        "-m",
        nargs="+",
        action="extend",
        required=True,
        type=_method,
        metavar="METHOD",
        help="names, as `pflight list methods` shows them, `all` of these, or configurations of "
        "your own; with modifiers as in fesem+private_head (`pflight list modifiers`)",
    )
    add("--seeds", type=_count, default=3, metavar="N", help="how many, from 0 (default: 3)")
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
    add("--jobs", "-j", type=_count, default=1, metavar="N", help="runs side by side (default: 1)")
    add("--out", default="results", metavar="FOLDER", help="where all is kept (default: results)")
    add_to_report(parser)


def add_to_report(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for the contents of a table."""
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
    from pflight.experiments.comparing import compare_and_print

    compare_and_print(options)


def _config(path: str) -> str:
    if find_config(path) is None:
        raise argparse.ArgumentTypeError(no_config(path))
    return path


def _method(name: str) -> str:
    method, modifiers = parts_of(name)
    for one in modifiers:
        if reason := no_modifier(one):
            raise argparse.ArgumentTypeError(reason)
    if method != "all" and find_config(f"configs/algorithm/{method}.yaml") is None:
        if not method.endswith((".yaml", ".yml")):
            raise argparse.ArgumentTypeError(no_method(method))
        _config(method)
    return name


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {text!r}")
    return int(text)
