"""What a deployed round costs, and whether it is the simulated one, with nodes on this machine.

    python benchmarks/deployment.py [--nodes 5] [--rounds 5] [method ...]

A method is a configuration in configs/algorithm, by default those of six kinds. Each is run by
``pflight deploy`` over TLS with a node for every client, and by ``pflight fit``; the table has the
largest difference between the weights of the two, seconds a round and bytes. The method ``flower``
is Flower's own FedAvg, as its quickstart has it, with as many nodes, over TLS as well.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import torch
from flwr.proto.control_pb2 import RegisterNodeRequest
from options import at_least
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pflight.deploy.certificates import check_server, make_certificates, make_key, node_key
from pflight.deploy.flower import APP, ControlHttpClient, start_run
from pflight.deploy.processes import Process, free_port

METHODS = ("fedavg", "fesem", "fedec", "ditto", "pfedla", "scaffold")


def largest_difference(one: Path, other: Path) -> float:
    """Return the largest difference between the server's weights in two run folders."""
    states = [
        torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        for folder in (one, other)
    ]
    assert states[0].keys() == states[1].keys()
    return max(
        float((states[0][n].double() - states[1][n].double()).abs().max()) for n in states[0]
    )


def seconds_a_round(folder: Path) -> float:
    """Return the mean time from the end of a round to that of the next."""
    events = EventAccumulator(str(folder))
    events.Reload()
    ends = [point.wall_time for point in events.Scalars("clients/sampled")]
    return (ends[-1] - ends[0]) / (len(ends) - 1)


def seconds_of_flower(nodes: int, rounds: int, folder: Path) -> float:
    """Return what :func:`seconds_a_round` does, of Flower's own FedAvg."""
    certificates, log = folder / "certificates", folder / "rounds"
    make_certificates(certificates, [])
    tls = {name: str(certificates / f"{name}.pem") for name in ("ca", "server")}
    link = f"localhost:{free_port()}"
    given = {"FEDAVG_NODES": nodes, "FEDAVG_ROUNDS": rounds, "FEDAVG_LOG": log}
    given["PYTHONPATH"] = Path(__file__).parent
    os.environ.update({name: str(value) for name, value in given.items()})
    words = ["flower-superlink", "--host=127.0.0.1", f"--port={link.rpartition(':')[2]}"]
    words += ["--ssl-ca-certfile", tls["ca"], "--ssl-certfile", tls["server"]]
    words += ["--ssl-keyfile", str(certificates / "server.key"), "--enable-supernode-auth"]
    app = APP.replace("none:", "flower_fedavg:")
    with ExitStack() as until_done:
        process = Process(words, folder / "link", "superlink")
        until_done.callback(process.stop)
        while not check_server(link, certificates / "ca.pem"):
            process.check()
            time.sleep(0.5)
        root = str(certificates / "ca.pem")
        control = ControlHttpClient.from_server_address(link, False, root, [])
        for place in range(nodes):
            key = folder / f"{place}.key"
            public = node_key(make_key(key))
            control.RegisterNode(RegisterNodeRequest(public_key=public))
            words = ["flower-supernode", "--superlink", link, "--root-certificates", tls["ca"]]
            words += ["--auth-supernode-private-key", str(key), f"--port={free_port()}"]
            words += ["--host=127.0.0.1", f"--node-config=place={place} nodes={nodes}"]
            node = Process(words, folder / f"node{place}", "supernode")
            until_done.callback(node.stop)
        start_run(control, app)
        while len(ends := log.read_text().split() if log.exists() else []) <= rounds:
            process.check()
            time.sleep(0.5)
    return (float(ends[-1]) - float(ends[1])) / (rounds - 1)  # the first is before all rounds


def command(*arguments: object) -> str:
    """Run a command of pflight, and return what it prints."""
    words = [sys.executable, "-m", "pflight", *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("methods", nargs="*", default=METHODS)
    parser.add_argument("--nodes", type=at_least(2), default=5)
    parser.add_argument("--rounds", type=at_least(2), default=5)
    options = parser.parse_args()
    print("| method | difference | seconds a round | simulated | bytes carried to train |")
    print("|---|---|---|---|---|", flush=True)
    for method in options.methods:
        if method == "flower":
            with tempfile.TemporaryDirectory() as folder:
                seconds = seconds_of_flower(options.nodes, options.rounds, Path(folder))
            print(f"| Flower's FedAvg | | {seconds:.2f} | | |", flush=True)
            continue
        with tempfile.TemporaryDirectory() as folder:
            deployed, simulated = Path(folder, "deployed"), Path(folder, "simulated")
            given = ["--config", "configs/data/digits.yaml", "--trainer.max_epochs", options.rounds]
            given += ["--config", f"configs/algorithm/{method}.yaml", "--trainer.accelerator=cpu"]
            demo = "deploy", "demo", "--nodes", options.nodes, "--folder", deployed
            said = command(*demo, *given)
            clients = f"--data.init_args.num_clients={options.nodes}"
            root = f"--trainer.default_root_dir={simulated}"
            command("fit", *given, clients, root, "--model.engine=sequential")
            runs = deployed / "run", simulated
            carried = re.search(r"messages to train carried (.*)", said)
            assert carried is not None
            times = " | ".join(f"{seconds_a_round(run):.2f}" for run in runs)
            row = method, f"{largest_difference(*runs):.1e}", times, carried[1]
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
