"""What Flower carries, and how its failures are met."""

from __future__ import annotations

import stat
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import PullObjectRequest, PullObjectResponse
from flwr.proto.node_pb2 import Node, NodeInfo
from flwr.proto.runtime_pb2 import (
    PullAppMessagesRequest,
    PullAppMessagesResponse,
    SendTaskHeartbeatRequest,
    SendTaskHeartbeatResponse,
)
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid

from pflight.deploy.certificates import make_certificates
from pflight.deploy.client import wait_for, watching
from pflight.deploy.demo import demonstrate
from pflight.deploy.flower import Heartbeat, Owner
from pflight.deploy.link import SECRET
from pflight.deploy.messages import numbers_of, packed
from pflight.deploy.processes import Process, ProcessEndedError, free_port
from pflight.deploy.remote import Asked
from pflight.deploy.superlink import GridPost, address_of, give_up_with, superlink
from pflight.errors import ConfigurationError
from tests.deploy.test_faults import AfterRound, deployed


class Flower:
    """A grid and its runtime, where nodes answer some seconds after they were asked.

    Args:
        delays: After which seconds each client's answer comes.
        halves: The clients whose answer never comes as a whole.
        pull: Seconds that it takes to pull a part of an answer.
        given_up: Whether Flower has stopped waiting for the rest of a half.
    """

    node = Node(node_id=1)
    run = SimpleNamespace(run_id=1)

    def __init__(
        self,
        delays: dict[int, float],
        halves: Iterable[int] = (),
        pull: float = 0.0,
        given_up: bool = False,
    ) -> None:
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
        self.delays, self.client_methods, self.pull = delays, {*halves}, pull
        self.given_up = given_up
        self.parts: dict[str, bytes] = {}
        self._runtime_client = SimpleNamespace(
            PullMessages=self.pull_answers,
            PullObject=self.pull_part,
            ConfirmMessageReceived=lambda request: None,
        )
        self._answers: dict[str, tuple[float, Message]] = {}

    def post(self, timeout: float) -> GridPost:
        """Return what carries messages to the nodes."""
        post = GridPost(self, timeout, 1.0, control=None)  # type: ignore[arg-type]
        post.keys = {client: bytes([client]) for client in self.delays}
        return post

    def get_nodes(self) -> list[NodeInfo]:
        return [NodeInfo(node_id=10 + i, public_key=bytes([i])) for i in self.delays]

    def push_messages(self, messages: list[Message]) -> list[str]:
        for message in messages:
            message.metadata.__dict__["_message_id"] = id_ = message.object_id
            client = message.metadata.dst_node_id - 10
            answer = Message(packed({}, {"client": client}), reply_to=message)
            answer.metadata.__dict__["_message_id"] = answer.object_id
            self._answers[id_] = time.monotonic() + self.delays[client], answer
        return [message.metadata.message_id for message in messages]

    def pull_answers(self, request: PullAppMessagesRequest) -> PullAppMessagesResponse:
        response = PullAppMessagesResponse()
        for id_ in request.message_ids:
            if self._answers[id_][0] > time.monotonic():
                continue
            answer = self._answers.pop(id_)[1]
            parts = get_all_nested_objects(answer)
            self.parts |= {name: part.deflate() for name, part in parts.items()}
            if answer.metadata.src_node_id - 10 in self.client_methods:
                self.parts[answer.object_id] = b""
                self.parts.pop(answer.object_id if self.given_up else "", None)
            response.message_object_trees.append(get_object_tree(answer))
            response.messages_list.append(message_to_proto(remove_content_from_message(answer)))
        return response

    def pull_part(self, request: PullObjectRequest) -> PullObjectResponse:
        time.sleep(self.pull)
        content = self.parts.get(request.object_id)
        return PullObjectResponse(
            object_found=content is not None,
            object_available=bool(content),
            object_content=content or b"",
        )


def answers(post: GridPost, clients: Iterable[int]) -> list[Any]:
    """Ask all clients, and return which have answered, or why not."""
    post.send(Asked(client, "train", 0, packed()) for client in clients)
    received = (post.receive(client) for client in clients)
    return [one if isinstance(one, str) else numbers_of(one)["client"] for one in received]


LATE = "its node did not answer within 3 s"


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("0.0.0.0", "localhost:9"),
        ("::", "localhost:9"),
        ("::1", "[::1]:9"),
        ("10.0.0.1", "10.0.0.1:9"),
    ],
)
def test_the_address_of_what_listens_here(host: str, address: str) -> None:
    assert address_of(host, 9) == address


def test_half_an_answer_that_flower_has_given_up_is_none() -> None:
    flower = Flower({0: 0.0}, halves=[0], given_up=True)
    assert answers(flower.post(timeout=60.0), [0]) == [
        "its node did not send its answer as a whole"
    ]


@pytest.mark.parametrize("made_up", [b"junk", b"Array 4\0junk", b"RecordDict 2\0{]"])
def test_an_answer_that_flower_cannot_read_is_none(made_up: bytes) -> None:
    flower = Flower({0: 0.0, 1: 0.0})
    post = flower.post(timeout=60.0)
    post.send(Asked(client, "train", 0, packed()) for client in (0, 1))
    post._look()
    flower.parts[post._arrived[0].object_id] = made_up
    said = post.receive(0)
    assert isinstance(said, str)
    assert said.startswith("its node sent an answer that Flower can't read: ")
    assert numbers_of(post.receive(1))["client"] == 1


@pytest.mark.parametrize("halves", [(), (0,)], ids=["slow", "half an answer"])
def test_who_has_answered_counts_whoever_else_is_slow(halves: tuple[int, ...]) -> None:
    """Two are asked after the one that took all the time, and what they sent takes time itself."""
    flower = Flower({0: 0.1 if halves else 60.0, 1: 0.0, 2: 0.2}, halves, pull=0.1)
    begun = time.monotonic()
    late = "its node did not send its answer as a whole within 3 s" if halves else LATE
    assert answers(flower.post(timeout=3.0), [0, 1, 2]) == [late, 1, 2]
    assert time.monotonic() - begun < 30


def test_who_is_back_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = deployed(tmp_path)
    nodes = run.post.nodes
    away: dict[int, Any] = {}
    leave = AfterRound(0, lambda: away.update({2: nodes.pop(2)}))
    come = AfterRound(2, lambda: nodes.update(away))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "round .* client 2 failed")
        federation = run.server(5, leave, come)
    assert [entry.failed for entry in federation.history] == [[], [2], [2], [], []]
    said = capsys.readouterr().out
    assert [line for line in said.splitlines() if "is back" in line] == [
        "pflight: round 3: client 2 is back"
    ]
    assert "pflight: asking the nodes of clients [0, 1, 2, 3] what they have" in said


def test_a_key_that_was_taken_away_may_be_put_back() -> None:
    """Flower takes a key once, and fails to take one away that it has not."""
    registered: list[bytes] = []
    control = SimpleNamespace(RegisterNode=lambda request: registered.append(request.public_key))
    post = GridPost(Flower({}), None, 1.0, control)  # type: ignore[arg-type]
    for keys in ({b"a", b"b"}, {b"a"}, {b"a", b"b"}):
        post.register(keys)
    assert sorted(registered) == [b"a", b"b"]


def test_two_servers_keep_apart_what_their_superlinks_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[Path, bytes]] = []  # where each writes its log, and its secret

    class Started(Process):
        def __init__(self, command: list[str], folder: Path, name: str) -> None:
            secret = Path(command[-1], SECRET)
            started.append((folder, secret.read_bytes()))
            raise ProcessEndedError("it has ended")

    monkeypatch.setattr("pflight.deploy.superlink.Process", Started)
    for port in (9092, 9093):
        with pytest.raises(ProcessEndedError), superlink("127.0.0.1", port, tmp_path, None, 1.0):
            pass
    assert all(len({*parts}) == 2 for parts in zip(*started, strict=True))
    assert all(stat.S_IMODE(folder.stat().st_mode) == 0o700 for folder, _ in started)


class Connection:
    """A connection to a SuperLink that starts a run, and then is gone."""

    def __init__(self) -> None:
        self.is_open = True

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.is_open = False

    def AcquireTask(self, request: Any) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(token="token", task=SimpleNamespace(run_id=7))

    def __getattr__(self, name: str) -> Any:
        raise httpx.ConnectError("gone")


def test_a_run_that_can_not_begin_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Connection] = []

    def connect(*_: Any, **__: Any) -> Connection:
        made.append(Connection())
        return made[-1]

    for kind in "control", "runtime", "task":
        monkeypatch.setattr(Owner, kind, connect)
    monkeypatch.setattr("pflight.deploy.superlink.check_server", lambda *_: True)
    monkeypatch.setattr("pflight.deploy.superlink.start_run", lambda *_: 7)
    monkeypatch.setattr(
        "pflight.deploy.superlink.Process",
        lambda *_: Process(["sleep", "60"], tmp_path, "superlink"),
    )
    gone = pytest.raises(
        ConfigurationError, match="superlink does not do what it is asked: ConnectError: gone"
    )
    with gone, superlink("127.0.0.1", 9092, tmp_path, None, 1.0):
        pass
    assert [connection.is_open for connection in made] == [False] * 3
    assert "heartbeat" not in {thread.name for thread in threading.enumerate()}


def test_the_end_of_the_superlink_ends_the_wait_for_it(tmp_path: Path) -> None:
    """Flower itself tries to reach it for ever."""
    make_certificates(tmp_path, [])
    process = Process(["sleep", "0.5"], tmp_path, "flower-superlink")
    root = (tmp_path / "ca.pem").read_bytes()
    grid = HttpGrid(f"127.0.0.1:{free_port()}", False, root, token="token")
    give_up_with(grid, process)
    begun = time.monotonic()
    with pytest.raises(ProcessEndedError, match="flower-superlink ended with status 0"):
        grid.get_nodes()
    assert 0.5 < time.monotonic() - begun < 60


def test_the_end_of_a_run_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower itself sends SIGINT to this process."""
    grid = HttpGrid("localhost:1", False, token="token")
    over = httpx.Response(401, request=httpx.Request("POST", "https://localhost:1"))
    monkeypatch.setattr(grid._runtime_client._client, "send", lambda *_, **__: over)
    give_up_with(grid, SimpleNamespace(check=lambda: None))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="has ended the run, or it was stopped"):
        grid.get_nodes()


def test_a_heartbeat_outlives_its_server() -> None:
    """Flower's own sends SIGINT to this process where a task is over, and ends with most errors."""
    beats: list[object] = []

    def beat(request: SendTaskHeartbeatRequest) -> SendTaskHeartbeatResponse:
        beats.append(request)
        if len(beats) == 1:
            return SendTaskHeartbeatResponse(success=False)
        raise httpx.HTTPStatusError("gone", request=None, response=None)  # type: ignore[arg-type]

    heartbeat = Heartbeat(SimpleNamespace(SendTaskHeartbeat=beat), every=0.05)  # type: ignore[arg-type]
    end = time.monotonic() + 30
    while len(beats) <= 3:
        assert time.monotonic() < end
        time.sleep(0.05)
    heartbeat.stop()


def test_nodes_of_a_demo_end_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = "import signal, sys, time; signal.signal(15, lambda *_: (time.sleep(3), sys.exit())); "
    begun = []

    def start(arguments: Sequence[object], log: object) -> subprocess.Popen[bytes]:
        if arguments[0] == "server":
            begun.append(time.monotonic())
            return subprocess.Popen(["true"])
        code = f"{slow}print(flush=True); time.sleep(60)"
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert process.stdout is not None
        with process.stdout as output:
            output.readline()  # from now on it is slow to end
        return process

    monkeypatch.setattr("pflight.deploy.demo._start", start)
    assert demonstrate(4, tmp_path, []) == 0
    assert 3 < time.monotonic() - begun[0] < 11


def test_a_node_says_how_long_it_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half a minute passes from one look to the next."""
    now = 0.0
    looks = iter([False] * 5)

    def sleep(seconds: float) -> None:
        nonlocal now
        now += 30

    clock = SimpleNamespace(monotonic=lambda: now, sleep=sleep)
    monkeypatch.setattr("pflight.deploy.client.time", clock)
    monkeypatch.setattr("pflight.deploy.client.check_server", lambda *_: next(looks, True))
    wait_for("host:1", tmp_path / "ca.pem")
    assert capsys.readouterr().out.splitlines() == [
        f"pflight: waiting for the server host:1{since}"
        for since in ("", ", for 60 s", ", for 120 s")
    ]


def test_a_server_that_is_gone_for_long_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pflight.deploy.client._REMIND", 0.3)
    monkeypatch.setattr("pflight.deploy.client._WATCH", 0.05)
    here = True
    monkeypatch.setattr("pflight.deploy.client.check_server", lambda *_: here)
    with watching("host:1", Path("ca.pem")) as lost:
        time.sleep(0.5)
        assert not lost()
        here = False
        time.sleep(0.5)
        assert lost()
