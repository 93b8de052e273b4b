"""Servers and nodes as processes on the loopback interface, over TLS, which are killed."""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from pflight.deploy.certificates import make_certificates, make_key
from pflight.deploy.messages import packed
from tests.deploy.machines import LONG, Machines, history, left_behind

pytestmark = pytest.mark.long


class Eavesdropper:
    """Passes connections on to a server, and records all that is said in them.

    Args:
        port: Of the server, on the loopback interface.
    """

    def __init__(self, port: int) -> None:
        self.server = port
        self.heard = bytearray()
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._door.getsockname()[1])
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                near, _ = self._door.accept()
            except OSError:  # it is closed
                return
            try:
                far = socket.create_connection(("127.0.0.1", self.server))
            except OSError:  # there is no server now
                near.close()
                continue
            for ends in ((near, far), (far, near)):
                threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while said := source.recv(65536):
                self.heard += said
                sink.sendall(said)
        except OSError:  # the other end is gone
            pass
        finally:
            for end in (source, sink):
                end.close()

    def close(self) -> None:
        self._door.close()


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """Three nodes that are started once, and wait for one server after the other."""
    machines = Machines(tmp_path_factory.mktemp("machines"), "{class_path: FedEC}", 3)
    with ExitStack() as until_done:
        until_done.callback(machines.stop)
        until_done.enter_context(closing(ear := Eavesdropper(machines.port)))
        machines.way, machines.heard = ear.port, ear.heard
        for client in range(3):
            machines.node(client)
        yield machines


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_run_whose_server_is_killed_is_the_simulated_one(machines: Machines) -> None:
    last = machines.last("run")
    machines.server("run")
    machines.wait(lambda: len(history(last)) >= 2, "there is no checkpoint")
    machines.kill("server")
    machines.wait(lambda: not listens(machines.port), "the SuperLink outlives its server")
    before = len(history(last))
    assert before < 5
    machines.server("run", "--ckpt_path", "last")
    assert machines.ended("server") == 0, machines.said("server")
    assert f"continuing with round {before}" in machines.said("server")
    one, other = (
        torch.load(last, weights_only=True)["state_dict"],
        machines.simulate()["state_dict"],
    )
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    carried = re.search(r"(\d+) messages to train carried", machines.said("server"))
    assert carried is not None
    assert int(carried[1]) == 3 * (5 - before)
    assert list((machines.folder / "run").glob("events.out.tfevents.*"))


def test_a_simulated_run_goes_on_deployed_without_what_its_clients_kept(machines: Machines) -> None:
    """Two servers are started for it at one moment, of which one does all of it."""
    begun = machines.last("simulated")
    assert len(history(begun)) == 5
    given = "--ckpt_path", begun, "--trainer.max_epochs", 6, "--model.allow_other_data", "true"
    machines.server("one", *given)
    first = machines.processes["server"]
    machines.server("other", *given)
    second = machines.ended("server")
    first.join(LONG)
    said = machines.said("server")
    assert sorted([first.exitcode, second]) == [0, 2], said
    assert re.search(r"error: (another server is running in|the server can't listen at)", said)
    assert "what its clients have kept from one round to the next is not at the nodes" in said
    assert "continuing with round 5" in said


def test_an_eavesdropper_learns_nothing(machines: Machines) -> None:
    """What the run before has sent, in the clear, is in none of the bytes on the way."""
    state = torch.load(machines.last("run"), weights_only=True)["state_dict"]
    (weights,) = (value for value in state.values() if value.shape == (16, 64))
    names = [b"network.0.weight", b"numbers", b"bytes", b"pflight", b"train", b"HTTP/1", b"POST "]
    content = packed({"sent": {"network.0.weight": weights}}, {"round": 1}, {"do": "train"})
    parts = get_all_nested_objects(content).values()
    plain = b"".join(part.deflate() for part in parts)
    telling = [*names[:3], weights.numpy().tobytes()[:64]]
    assert all(part in plain for part in telling)  # which it would hear otherwise
    heard = bytes(machines.heard)
    assert len(heard) > 30 * weights.nbytes
    assert [part for part in [*names, *telling] if part in heard] == []


def test_nodes_outlive_the_superlink_and_the_loss_of_a_key(machines: Machines) -> None:
    """Flower's own process is killed; then a key is missing, until it is put back."""
    last, endless = machines.last("outlived"), ("--trainer.max_epochs", 10_000)
    machines.server("outlived", *endless)
    machines.wait(lambda: history(last), "there is no checkpoint")
    (superlink,) = (
        line for line in left_behind(machines.certificates) if "pflight.deploy.link" in line
    )
    os.kill(int(superlink.split()[0]), signal.SIGKILL)
    assert machines.ended("server") == 2
    assert "error: superlink ended with status -9" in machines.said("server").splitlines()[-1]
    key = machines.certificates / "nodes" / "node2.pub"
    key.rename(machines.folder / key.name)
    machines.server("outlived", *endless, "--ckpt_path", "last")
    machines.wait(lambda: history(last)[-1].failed == [2], "the node without a key takes part")
    machines.register(machines.folder / key.name)
    machines.wait(lambda: history(last)[-1].failed == [], "the node does not come back")
    assert "client 2 is back" in machines.said("server")


def test_a_second_sigterm_ends_at_once(machines: Machines) -> None:
    """The server waits for a node that says nothing, and that ends as soon, once it can."""
    machines.signal("node0", signal.SIGSTOP)
    before = len(history(machines.last("outlived")))
    time.sleep(5)
    machines.signal("server", signal.SIGTERM)
    machines.wait(lambda: "a second SIGTERM stops" in machines.said("server"), "it is not heard")
    time.sleep(0.5)  # two in a moment may be one, of a terminal and of a parent
    machines.signal("server", signal.SIGTERM)
    assert machines.ended("server") == 143
    machines.signal("node0", signal.SIGTERM)
    machines.signal("node0", signal.SIGCONT)
    assert machines.ended("node0") == 143
    assert len(history(machines.last("outlived"))) <= before + 1
    machines.node(0)


def test_nodes_are_missed_until_they_are_back_and_others_may_join(machines: Machines) -> None:
    """One is killed, one falls silent, one joins; a stranger and a twin are not let in."""
    last = machines.last("long")

    def failed() -> list[int]:
        return history(last)[-1].failed

    endless = "--trainer.max_epochs", 10_000, "--trainer.check_val_every_n_epoch", 10_000
    machines.server("long", "--round-timeout", 15, "--places", 4, *endless)
    machines.wait(lambda: history(last), "there is no checkpoint")
    machines.signal("node2", signal.SIGSTOP)
    machines.wait(lambda: 2 in failed(), "nobody misses the node that is silent")
    machines.signal("node2", signal.SIGCONT)
    machines.kill("node1")
    make_key(machines.folder / "stranger.key")
    machines.node(0, "stranger")
    machines.node(0, "twin", machines.folder / "node0.key")
    machines.wait(lambda: failed() == [1], "nobody misses the node that was killed")
    assert re.search(r"round \d+: client 1 failed: its node", machines.said("server"))
    machines.node(1)
    machines.register(make_key(machines.folder / "a-newcomer.key"))
    machines.node(0, "a-newcomer")
    machines.wait(lambda: history(last)[-1].clients == [0, 1, 2, 3], "nobody joins")
    machines.wait(lambda: failed() == [], "the node does not come back")
    assert "client 3 is the node with a-newcomer.pub" in machines.said("server")
    refusal = "the server does not let this node in"
    for name in ("stranger", "twin"):
        assert refusal in machines.said(name)
        machines.kill(name)
    machines.signal("server", signal.SIGTERM)
    assert machines.ended("server") == 143
    assert "--ckpt_path last continues the run" in machines.said("server")


def test_what_is_wrong_is_said_where_it_can_be_mended(machines: Machines) -> None:
    machines.wait(lambda: not listens(machines.port), "the server before is still there")
    with socket.create_server(("127.0.0.1", machines.port)):
        machines.server("taken")
        assert machines.ended("server") == 2
    assert f"can't listen at 127.0.0.1:{machines.port}" in machines.said("server")
    running = machines.processes["node1"]
    machines.node(1)
    assert machines.ended("node1") == 2
    assert "another node is running in" in machines.said("node1").splitlines()[-1]
    machines.processes["node1"] = running
    make_certificates(machines.certificates, ["localhost"], days=-1)
    machines.server("expired")
    assert machines.ended("server") == 2
    assert "certificate has expired" in machines.said("server").splitlines()[-1]


class Narrow(BaseHTTPRequestHandler):
    """Passes calls on, but for those with more than so many bytes."""

    protocol_version = "HTTP/1.1"
    limit = 3000
    port: int
    trust: ssl.SSLContext

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        status, kind, content = 413, "text/html", b"<html>Request Entity Too Large</html>"
        if len(body) <= self.limit:
            there = http.client.HTTPSConnection("localhost", self.port, context=self.trust)
            with closing(there):
                there.request("POST", self.path, body, dict(self.headers))
                answer = there.getresponse()
                status, kind = answer.status, answer.headers["content-type"] or ""
                content = answer.read()
        self.send_response(status)
        for name, value in (("content-type", kind), ("content-length", str(len(content)))):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)


def test_an_answer_that_a_proxy_finds_too_large_is_named_with_its_size(tmp_path: Path) -> None:
    machines = Machines(tmp_path, "{class_path: FedAvg}", 2)
    Narrow.port = machines.port
    Narrow.trust = ssl.create_default_context(cafile=str(machines.certificates / "ca.pem"))
    own = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    own.load_cert_chain(machines.certificates / "server.pem", machines.certificates / "server.key")
    with ExitStack() as until_done:
        proxy = until_done.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), Narrow))
        proxy.socket = own.wrap_socket(
            proxy.socket, server_side=True, do_handshake_on_connect=False
        )
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        until_done.callback(proxy.shutdown)
        until_done.callback(machines.stop)
        machines.node(0)
        machines.way = proxy.server_address[1]
        machines.node(1)
        machines.server("run", "--round-timeout", 10, "--trainer.max_epochs", 1)
        assert machines.ended("server") == 0, machines.said("server")
        (said,) = (line for line in machines.said("node1").splitlines() if "was not sent" in line)
    assert "warning: this node's answer with 4.8 kB of tensors was not sent" in said
    assert "(status 413)" in said
    whole = "client 1 failed: its node did not send its answer as a whole within 10 s"
    assert whole in machines.said("server")
