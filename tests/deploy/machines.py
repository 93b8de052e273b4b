"""A server and its nodes as processes on the loopback interface, over TLS."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from pflight.__main__ import main
from pflight.deploy.certificates import make_certificates, make_key
from pflight.deploy.processes import free_port
from pflight.history import Round, load_history

LONG = 600.0  # seconds; a busy machine needs minutes
CONFIG = """
trainer:
  max_epochs: 5
  accelerator: cpu
  enable_progress_bar: false
  callbacks+:
    - {callback}
model:
  client:
    class_path: Classifier
    init_args:
      network:
        class_path: pflight.models.MLP
        init_args: {{in_features: 64, hidden: [16], num_classes: 10}}
      num_classes: 10
      optimizer: {{class_path: torch.optim.SGD, init_args: {{lr: 0.1}}}}
data:
  class_path: Digits
  init_args: {{num_clients: {clients}, batch_size: 64}}
"""
forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(  # what takes long to import
    ["pflight.callbacks", "pflight.datamodules", "pflight.deploy.client", "pflight.deploy.server"]
)


def run_here(log: str, arguments: list[str], folder: str = ".") -> None:
    """Run a command of ``pflight`` in this process and in a folder; it writes to a file."""
    os.chdir(folder)
    Thread(target=_end_with_parent, daemon=True).start()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    main(arguments)


def _end_with_parent() -> None:
    """Wait for the end of the tests, which may be killed."""
    tests = multiprocessing.parent_process()
    assert tests is not None
    tests.join()
    os.kill(os.getpid(), signal.SIGKILL)


class Machines:
    """A server and its nodes, each of them some processes on this machine.

    Args:
        folder: Where all of them keep their things.
        callback: The server callback, in YAML.
        nodes: How many there are.

    Attributes:
        port: Where the server listens.
        way: Where the nodes look for it.
        heard: What an eavesdropper has heard on that way, if there is one.
    """

    def __init__(self, folder: Path, callback: str, nodes: int) -> None:
        self.folder = folder
        self.port = self.way = free_port()
        self.heard = bytearray()
        self.certificates = folder / "certificates"
        self.config = folder / "run.yaml"
        self.config.write_text(CONFIG.format(callback=callback, clients=nodes))
        make_certificates(self.certificates, ["localhost"])
        (self.certificates / "nodes").mkdir()
        for client in range(nodes):
            self.register(make_key(folder / f"node{client}.key"))
        self.processes: dict[str, ForkServerProcess] = {}

    def register(self, public: Path) -> None:
        """Let the server know a node's public key."""
        public.rename(self.certificates / "nodes" / public.name)

    def start(self, name: str, *arguments: object) -> None:
        """Start a command of ``pflight deploy``."""
        words = ["deploy", *map(str, arguments)]
        self.processes[name] = forks.Process(target=run_here, args=(str(self.log(name)), words))
        self.processes[name].start()

    def node(self, client: int, name: str = "", key: Path | None = None) -> None:
        """Start a node.

        Args:
            client: Which client's data it has.
            name: Of the process and of its folder.
            key: Its private key.
        """
        name = name or f"node{client}"
        where = "--server", f"localhost:{self.way}", "--ca", self.certificates / "ca.pem"
        own = "--key", key or self.folder / f"{name}.key", "--folder", self.folder / name
        self.start(name, "client", *where, *own, "--client", client, "--config", self.config)

    def server(self, run: str, *more: object) -> None:
        """Start a server, with a run folder of this name."""
        where = "--certificates", self.certificates, "--host", "127.0.0.1", "--port", self.port
        root = "--trainer.default_root_dir", self.folder / run
        self.start("server", "server", *where, "--config", self.config, *root, *more)

    def simulate(self, *more: str) -> dict[str, Any]:
        """Run the federation in this process; return its last checkpoint."""
        folder = self.folder / "simulated"
        given = ["--config", str(self.config), f"--trainer.default_root_dir={folder}"]
        main(["fit", *given, "--model.engine=sequential", *more])
        return torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)

    def last(self, run: str) -> Path:
        """Return where the last checkpoint of a run is."""
        return self.folder / run / "checkpoints" / "last.ckpt"

    def log(self, name: str) -> Path:
        """Return what a process writes to."""
        return self.folder / f"{name}.log"

    def said(self, name: str) -> str:
        """Return what a process has written."""
        return self.log(name).read_text() if self.log(name).exists() else ""

    def wait(self, what: Callable[[], Any], why: str) -> Any:
        """Wait until something holds."""
        end = time.monotonic() + LONG
        while not (found := what()):
            assert time.monotonic() < end, f"{why}\n" + "\n".join(
                f"{path.name}: {path.read_text()[-1500:]}" for path in self.folder.rglob("*.log")
            )
            time.sleep(0.2)
        return found

    def ended(self, name: str) -> int:
        """Wait for a process, and return its status."""
        process = self.processes[name]
        process.join(LONG)
        assert process.exitcode is not None, f"{name} does not end: {self.said(name)}"
        return process.exitcode

    def signal(self, name: str, signum: int) -> None:
        """Send a signal to a process."""
        pid = self.processes[name].pid
        assert pid is not None
        os.kill(pid, signum)

    def kill(self, name: str) -> None:
        """Kill a process, and nothing that it has started."""
        self.processes[name].kill()
        self.processes[name].join(20)

    def stop(self) -> None:
        """End all processes."""
        for name, process in self.processes.items():
            process.terminate()
            if process.is_alive():
                self.signal(name, signal.SIGCONT)
        for process in self.processes.values():
            process.join(20)
            if process.exitcode is None:
                process.kill()
                process.join(20)
        assert not left_behind(self.folder)


def left_behind(folder: Path) -> list[str]:
    """Return the processes whose command names a folder."""
    found = subprocess.run(["ps", "-wweo", "pid,args"], capture_output=True, text=True, check=True)
    return [line for line in found.stdout.splitlines() if str(folder) in line]


def history(checkpoint: Path) -> list[Round]:
    """Return the rounds of a checkpoint."""
    if not checkpoint.is_file():
        return []
    return load_history(torch.load(checkpoint, weights_only=True)["pflight"]["history"])
