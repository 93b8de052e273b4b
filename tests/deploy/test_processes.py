"""Servers and nodes as processes on the loopback interface, over TLS, which are killed."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pflight.cli import main
from pflight.deploy.certificates import make_certificates, make_key
from pflight.deploy.flower import end_with_parent, free_port
from pflight.history import load_history

pytestmark = pytest.mark.slow

LONG = 150.0  # seconds
CONFIG = """
trainer:
  max_epochs: 5
  accelerator: cpu
  enable_progress_bar: false
  callbacks+:
    - class_path: FedEC
model:
  client:
    class_path: Classifier
    init_args:
      network:
        class_path: pflight.models.MLP
        init_args: {in_features: 64, hidden: [16], num_classes: 10}
      num_classes: 10
      optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.1}}
data:
  class_path: Digits
  init_args: {num_clients: 3, batch_size: 64}
"""


class Machines:
    """A server and three nodes, each of them some processes on this machine.

    Args:
        folder: Where all of them keep their things.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.certificates = folder / "certificates"
        self.config = folder / "run.yaml"
        self.config.write_text(CONFIG)
        make_certificates(self.certificates, ["localhost"])
        for client in range(3):
            public = make_key(folder / f"node{client}.key")
            (self.certificates / "nodes").mkdir(exist_ok=True)
            public.rename(self.certificates / "nodes" / public.name)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *arguments: object) -> None:
        """Start a command of ``pflight deploy`` in a process group of its own."""
        with self.log(name).open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "pflight", "deploy", *map(str, arguments)],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=end_with_parent,  # also where the tests are killed
            )

    def node(self, client: int, *more: object, key: Path | None = None) -> None:
        key = key or self.folder / f"node{client}.key"
        where = "--server", f"localhost:{self.port}", "--ca", self.certificates / "ca.pem"
        own = "--key", key, "--folder", self.folder / f"node{client}", "--client", client
        self.start(f"node{client}", "client", *where, *own, "--config", self.config, *more)

    def server(self, run: str, *more: object) -> None:
        where = "--certificates", self.certificates, "--host", "127.0.0.1", "--port", self.port
        root = "--trainer.default_root_dir", self.folder / run
        self.start("server", "server", *where, "--config", self.config, *root, *more)

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def said(self, name: str) -> str:
        return self.log(name).read_text() if self.log(name).exists() else ""

    def wait(self, what: Callable[[], Any], why: str) -> Any:
        """Wait until something holds."""
        end = time.monotonic() + LONG
        while not (found := what()):
            assert time.monotonic() < end, f"{why}\n" + "\n".join(
                f"{path.name}: {path.read_text()[-1500:]}" for path in self.folder.glob("*.log")
            )
            time.sleep(0.2)
        return found

    def ended(self, name: str) -> int:
        """Wait for a process, and return its status."""
        process = self.processes[name]
        self.wait(lambda: process.poll() is not None, f"{name} does not end")
        return int(process.returncode)

    def kill(self, name: str) -> None:
        """Kill a process, and nothing that it has started."""
        self.processes[name].kill()
        self.processes[name].wait()

    def stop(self) -> None:
        """End all processes."""
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """Three nodes that are started once, and wait for one server after the other."""
    machines = Machines(tmp_path_factory.mktemp("machines"))
    try:
        for client in range(3):
            machines.node(client)
        yield machines
    finally:
        machines.stop()
    assert not left_behind(machines.folder)


def left_behind(folder: Path) -> list[str]:
    """Return the processes whose command names a folder."""
    found = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True)
    return [line for line in found.stdout.splitlines() if str(folder) in line]


def rounds(checkpoint: Path) -> int:
    """Return how many rounds a checkpoint has."""
    if not checkpoint.is_file():
        return 0
    return int(torch.load(checkpoint, weights_only=True)["global_step"])


def test_a_run_whose_server_is_killed_is_the_simulated_one(
    machines: Machines, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    last = machines.folder / "run" / "checkpoints" / "last.ckpt"
    machines.server("run")
    machines.wait(lambda: rounds(last) >= 2, "there is no checkpoint")
    with socket.create_connection(("localhost", machines.port)) as plain:
        plain.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert b"HTTP" not in plain.recv(1000)  # nothing is said but in TLS
    machines.kill("server")
    machines.wait(lambda: not listens(machines.port), "the SuperLink outlives its server")
    before = rounds(last)
    assert before < 5
    machines.server("run", "--ckpt_path", "last")
    assert machines.ended("server") == 0, machines.said("server")
    assert f"continuing with round {before}" in machines.said("server")
    simulated = machines.folder / "simulated"
    options = [f"--trainer.default_root_dir={simulated}", "--model.engine=sequential"]
    main(["fit", "--config", str(machines.config), *options])
    one, other = (
        torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        for folder in (machines.folder / "run", simulated)
    )
    torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    carried = re.search(r"(\d+) messages to train carried", machines.said("server"))
    assert carried is not None
    assert int(carried[1]) == 3 * (5 - before)
    assert list((machines.folder / "run").glob("events.out.tfevents.*"))


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def failures(checkpoint: Path) -> list[list[int]]:
    """Return who failed in each round of a checkpoint."""
    record = torch.load(checkpoint, weights_only=True)["pflight"]
    return [entry.failed for entry in load_history(record["history"])]


def test_a_node_that_is_killed_is_left_out_until_it_is_back(machines: Machines) -> None:
    last = machines.folder / "killed" / "checkpoints" / "last.ckpt"
    machines.server("killed", "--round-timeout", 5, "--trainer.max_epochs", 10_000)
    machines.wait(lambda: rounds(last) >= 1, "there is no checkpoint")
    machines.kill("node1")
    machines.wait(lambda: failures(last)[-1] == [1], "nobody misses the node")
    assert re.search(r"round \d+: client 1 failed: its node", machines.said("server"))
    machines.node(1)
    machines.wait(lambda: failures(last)[-1] == [], "the node does not come back")
    machines.processes["server"].send_signal(signal.SIGTERM)
    assert machines.ended("server") == 143
    assert "--ckpt_path last continues the run" in machines.said("server")
    assert failures(last)[0] == []


def test_what_is_wrong_is_said_where_it_can_be_mended(machines: Machines) -> None:
    machines.wait(lambda: not listens(machines.port), "the server before is still there")
    with socket.create_server(("127.0.0.1", machines.port)):
        machines.server("taken")
        assert machines.ended("server") == 2
    assert f"can't listen at 127.0.0.1:{machines.port}" in machines.said("server")
    keep = machines.processes["node1"]
    machines.node(1)
    assert machines.ended("node1") == 2
    assert "another node is running in" in machines.said("node1").splitlines()[-1]
    machines.processes["node1"] = keep
