"""The command ``pflight deploy``."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from pathlib import Path

MAX_SAMPLES = 10**7
"""The default limit for the number of samples that a node declares in a split."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands: server, client, certificates and a demo."""
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
        type=_share,
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


def _positive(kind: Callable[[str], float]) -> Callable[[str], float]:
    """Return a type for positive numbers."""

    def number(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is no positive number")
        return value

    return number


def _name(text: str) -> str:
    """Return a name without folders, so that its file is in the folder."""
    if not re.fullmatch(r"\w[\w.@+-]*", text):
        raise argparse.ArgumentTypeError(
            f"{text} is no name of a key: give letters, digits and . _ - @ +, as in hospital-a"
        )
    return text


def _share(text: str) -> float:
    """Return a share, above 0 and at most 1."""
    if (share := _positive(float)(text)) > 1:
        raise argparse.ArgumentTypeError(f"{text} is no share: give a number over 0, and at most 1")
    return share


def _port(text: str) -> int:
    """Return the number of a port."""
    if not (text.isdecimal() and 0 < int(text) < 2**16):
        raise argparse.ArgumentTypeError(f"{text} is no port: give a number from 1 to 65535")
    return int(text)


def _address(text: str) -> str:
    """Return the address of a server. IPv6 addresses are in brackets."""
    found = re.fullmatch(r"(\[[^\s\[\]]+\]|[^\s:\[\]]+):(.*)", text)
    if not found:
        raise argparse.ArgumentTypeError(
            f"{text} is no HOST:PORT, such as fl.example.org:9092 or [2001:db8::1]:9092"
        )
    return f"{found[1]}:{_port(found[2])}"


def run(options: argparse.Namespace) -> None:
    """Run a subcommand."""
    from pflight.deploy.command import deploy

    deploy(options)
