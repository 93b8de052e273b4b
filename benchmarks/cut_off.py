"""A deployed federation in network namespaces, where a node is slow, and cut off for a while.

    sudo python benchmarks/cut_off.py [--nodes 3] [--delay 100] [options of pflight fit]

Server and nodes have a network namespace each, connected by a bridge. All nodes' packets are
delayed by ``tc netem``; after two rounds node 1 is cut off until the server misses it. What is
printed is who failed in which round. It needs root, ``ip`` and, for a delay, ``tc`` and netem.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch
from options import at_least

from pflight.deploy.certificates import make_certificates, make_key
from pflight.history import Round, load_history

SERVER = "10.77.0.1"
OPTIONS = ("--config=configs/data/digits.yaml", "--config=configs/algorithm/fedavg.yaml")
LONG = 600.0  # seconds
CUT = 1  # the node


def done(*command: object) -> None:
    words = [str(word) for word in command]
    if subprocess.run(words).returncode:
        raise SystemExit(f"{' '.join(words)} failed; --help says what it takes")


ip = partial(done, "ip")


@contextmanager
def namespace(name: str, address: str, net: str) -> Iterator[None]:
    """Make a network namespace with one address, connected to the bridge of another."""
    ip("netns", "add", name)
    try:
        veth = "link", "add", f"{name}-0", "netns", net, "type", "veth"
        ip(*veth, "peer", "name", "eth0", "netns", name)
        ip("-n", net, "link", "set", f"{name}-0", "master", "bridge", "up")
        ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            ip("-n", name, "link", "set", device, "up")
        yield
    finally:
        ip("netns", "delete", name)


def start(where: str, log: Path, *arguments: object) -> subprocess.Popen[bytes]:
    words = ["ip", "netns", "exec", where, sys.executable, "-m", "pflight", "deploy"]
    with log.open("ab") as output:
        return subprocess.Popen([*words, *map(str, arguments)], stdout=output, stderr=output)


def end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    process.wait(60)


def history(checkpoint: Path) -> list[Round]:
    if not checkpoint.is_file():
        return []
    return load_history(torch.load(checkpoint, weights_only=True)["pflight"]["history"])


def wait(
    checkpoint: Path, holds: Callable[[list[Round]], object], server: subprocess.Popen[bytes]
) -> int:
    """Wait until something holds of the rounds so far; return how many there are."""
    until = time.monotonic() + LONG
    while not holds(rounds := history(checkpoint)):
        if server.poll() is not None or time.monotonic() > until:
            raise SystemExit("the server does not come so far")
        time.sleep(1)
    return len(rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=at_least(2), default=3)
    parser.add_argument("--delay", type=at_least(0), default=100, help="milliseconds; 0 for none")
    options, rest = parser.parse_known_args()
    given = [*(rest or OPTIONS), f"--data.init_args.num_clients={options.nodes}"]
    given.append("--trainer.max_epochs=10000")
    with ExitStack() as until_done:
        folder = Path(until_done.enter_context(tempfile.TemporaryDirectory()))
        certificates, net = folder / "certificates", "pflight-net"
        make_certificates(certificates, [SERVER])
        (certificates / "nodes").mkdir()
        ip("netns", "add", net)
        until_done.callback(ip, "netns", "delete", net)
        ip("-n", net, "link", "add", "bridge", "type", "bridge")
        ip("-n", net, "link", "set", "bridge", "up")
        until_done.enter_context(namespace("pf-server", SERVER, net))
        for client in range(options.nodes):
            name, key = f"pf-node{client}", folder / f"{client}.key"
            until_done.enter_context(namespace(name, f"10.77.0.{10 + client}", net))
            if options.delay:
                queue = "tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", "netem"
                done(*queue, "delay", f"{options.delay}ms")
            make_key(key).rename(certificates / "nodes" / f"{client:03}.pub")
            where = "--server", f"{SERVER}:9092", "--ca", certificates / "ca.pem", "--key", key
            own = "--folder", folder / name, "--client", client
            log = folder / f"{name}.log"
            until_done.callback(end, start(name, log, "client", *where, *own, *given))
        run = folder / "run"
        where = "--certificates", certificates, "--host", SERVER, "--round-timeout", 20
        root = f"--trainer.default_root_dir={run}"
        server = start("pf-server", folder / "server.log", "server", *where, root, *given)
        until_done.callback(end, server)
        last = run / "checkpoints" / "last.ckpt"
        made = wait(last, lambda rounds: len(rounds) >= 2, server)
        ip("-n", f"pf-node{CUT}", "link", "set", "eth0", "down")
        print(f"node {CUT} is cut off after {made} rounds", flush=True)
        made = wait(last, lambda rounds: rounds[-1].failed, server)
        ip("-n", f"pf-node{CUT}", "link", "set", "eth0", "up")
        print(f"node {CUT} is connected again after {made} rounds", flush=True)
        wait(last, lambda rounds: not rounds[-1].failed, server)
        for entry in history(last):
            print(f"round {entry.index}: {entry.failed or 'nobody'} failed")


if __name__ == "__main__":
    main()
