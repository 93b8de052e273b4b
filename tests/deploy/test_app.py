"""The Flower app that docs/deployment.md describes, on a SuperLink, gives the simulated run."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sysconfig
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from pflight.deploy.certificates import check_server
from pflight.deploy.processes import Process, ProcessEndedError, free_port
from tests.deploy.machines import LONG, Machines, history, left_behind

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "deployment.md"
NODES, ROUNDS = 2, 2


def test_the_app_of_the_page_is_the_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files and commands, of which only the places are others; clients remember in FedEC."""
    machines = Machines(tmp_path, "{class_path: FedEC}", NODES)
    text = machines.config.read_text()
    machines.config.write_text(text.replace("max_epochs: 5", f"max_epochs: {ROUNDS}"))
    places = {
        "fl.example.org": "localhost",
        "0.0.0.0": "127.0.0.1",
        "9092": f"{machines.port}",
        "/srv": f"{tmp_path}",
        " certificates/": f" {tmp_path}/certificates/",
        " ca.pem": f" {tmp_path}/certificates/ca.pem",
        "keys/": f"{tmp_path}/",
    }
    section = PAGE.read_text().split("\n## A Flower app\n")[1].split("\n## ")[0]
    for there, here in places.items():
        section = section.replace(there, here)
    project, connection = re.findall(r"^```toml.*?\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    superlink, register, supernode, run = re.findall(r"^\$ (.*)", section, re.MULTILINE)
    for name, content in {"app/pyproject.toml": project, "flwr/config.toml": connection}.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", sysconfig.get_path("scripts"), prepend=os.pathsep)
    monkeypatch.setenv("FLWR_HOME", f"{tmp_path}/flwr")
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "0")
    monkeypatch.setenv("FLWR_DISABLE_UPDATE_CHECK", "1")
    started, last = list[Process](), machines.last("runs/default")

    def start(command: str, name: str) -> Process:
        started.append(Process(shlex.split(command), tmp_path / name, name))
        return started[-1]

    try:
        address, root = f"localhost:{machines.port}", machines.certificates / "ca.pem"
        start(superlink, "superlink").wait_until(lambda: check_server(address, root))
        for client in range(NODES):
            command = shlex.split(register.replace("hospital-a", f"node{client}"))
            done = subprocess.run(command, capture_output=True, text=True, timeout=LONG)
            assert done.returncode == 0, done.stdout + done.stderr
            own = supernode.replace("hospital-a", f"node{client}")
            own = own.replace('/state"', f'/state{client}" client={client}')
            start(f"{own} --port {free_port()}", f"node{client}")
        monkeypatch.chdir(tmp_path / "app")
        flwr = start(run, "flwr")
        machines.wait(lambda: history(last), "there is no checkpoint")
        machines.wait(lambda: len(history(last)) == ROUNDS, "the rounds do not end")
        with pytest.raises(ProcessEndedError, match="flwr ended with status 0"):
            machines.wait(flwr.check, "flwr run does not end with the run")
    finally:
        for process in reversed(started):
            process.stop()
        for line in left_behind(tmp_path):  # what the SuperLink starts has a session of its own
            with suppress(ProcessLookupError):
                os.kill(int(line.split()[0]), signal.SIGKILL)
    assert f"{NODES * ROUNDS} messages to train carried" in flwr.log.read_text()
    deployed = torch.load(last, weights_only=True)["state_dict"]
    simulated = machines.simulate()["state_dict"]
    torch.testing.assert_close(deployed, simulated, rtol=0, atol=0)
    assert [(entry.clients, entry.failed) for entry in history(last)] == [([0, 1], [])] * ROUNDS
