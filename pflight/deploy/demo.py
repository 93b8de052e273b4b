"""A demonstration: a server and its nodes on one machine."""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from .certificates import make_certificates, make_folder, make_key
from .processes import end_with_parent, ended_by_signals, free_port

_OPTIONS = ("--config", "configs/data/digits.yaml", "--config", "configs/algorithm/ditto.yaml")
_ROUNDS = ("--trainer.max_epochs", "5")
_PATIENCE = 20.0  # seconds until all processes have ended


def demonstrate(num_nodes: int, folder: Path | None, rest: Sequence[str]) -> int:
    """Run a federation on this machine, and return the server's exit status.

    Args:
        num_nodes: Number of nodes. Each is a client of the same data.
        folder: The folder for all files; by default a temporary one, removed at the end.
        rest: Options of ``pflight fit``; by default five rounds of Ditto on handwritten digits.
    """
    with ExitStack() as until_done:
        if folder is None:
            temporary = tempfile.TemporaryDirectory(prefix="pflight-demo-")
            folder = Path(until_done.enter_context(temporary))
        make_folder(folder)
        running: list[subprocess.Popen[bytes]] = []
        until_done.callback(_end, running)
        certificates = folder / "certificates"
        make_certificates(certificates, [])
        nodes = certificates / "nodes"
        shutil.rmtree(nodes, ignore_errors=True)  # an earlier run may have had more
        nodes.mkdir()
        port = free_port()
        given = rest or [*_OPTIONS, *_ROUNDS]
        options = [*given, "--data.init_args.num_clients", str(num_nodes)]
        for client in range(num_nodes):
            own = folder / f"node{client:03}"
            key = own / "node.key"
            if not key.exists():
                make_key(key)
            shutil.copy(key.with_suffix(".pub"), nodes / f"{own.name}.pub")
            where = ["--server", f"localhost:{port}", "--ca", certificates / "ca.pem"]
            whose = ["--key", key, "--folder", own, "--client", client]
            print(f"pflight: starting node {client}, log in {own / 'node.log'}", flush=True)
            log = until_done.enter_context((own / "node.log").open("ab"))
            running.append(_start(["client", *where, *whose, *options], log))
        where = ["--certificates", certificates, "--host", "127.0.0.1", "--port", port]
        root = [] if "--trainer.default_root_dir" in given else ["--trainer.default_root_dir"]
        server = _start(["server", *where, *options, *root, *[folder / "run"][: len(root)]], None)
        until_done.callback(_end, [server])
        return server.wait()


def _start(arguments: Sequence[object], log: IO[bytes] | None) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "pflight", "deploy", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,  # Ctrl-C then ends them one after the other
        preexec_fn=end_with_parent,
    )


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End all processes at the same time."""
    for process in processes:
        process.send_signal(signal.SIGTERM)
    end = time.monotonic() + _PATIENCE
    for process in processes:
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def run(given: argparse.Namespace) -> None:
    """Run a federation on this machine, and exit with its server's status.

    Args:
        given: The options of ``pflight deploy demo``.
    """
    with ended_by_signals():
        sys.exit(demonstrate(given.nodes, given.folder, given.run_options))
