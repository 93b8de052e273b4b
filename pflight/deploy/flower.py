"""Flower's private interfaces: everything that pflight uses and Flower does not document.

Other modules import them from here. ``tests/deploy/test_flower.py`` checks each of them, so a
release of Flower with changes fails there.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any, TypeVar

import httpx
from flwr.app import Message, RecordDict
from flwr.cli.build import build_fab_from_files
from flwr.common.constant import SubStatus
from flwr.common.serde import context_from_proto, fab_to_proto, run_from_proto
from flwr.proto.control_pb2 import RegisterNodeRequest, StartRunRequest
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullAppMessagesRequest,
    PullTaskInputRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, TaskType
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, iterate_object_tree
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    ObjectUnavailableError,
    inflate_object_from_contents,
    pull_objects,
)
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.primitives.asymmetric import public_key_to_bytes as public_key_to_bytes
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid
from flwr.supernode.runtime.run_clientapp import push_message, push_task_output

from pflight.errors import ConfigurationError

LOOK = 0.2
"""Seconds between two looks for arrived messages."""
APP = """\
[project]
name = "pflight-federation"
version = "1.0.0"
description = "A federation of pflight, whose code is installed on all machines"
license = "Apache-2.0"

[tool.flwr.app]
publisher = "pflight"

[tool.flwr.app.components]
serverapp = "none:server"
clientapp = "none:client"
"""
"""A Flower app without code, since both sides run their installed code."""
ACTIVATE = "/v1/fleet/activate-node"
FLEET = frozenset(
    f"/v1/fleet/{call}"
    for call in (
        "activate-node",
        "deactivate-node",
        "send-node-heartbeat",
        "pull-messages",
        "push-messages",
        "get-run",
        "get-fab",
        "push-object",
        "pull-object",
        "confirm-message-received",
    )
)
"""The calls of nodes to a SuperLink."""
KEY_HEADER = FLEET_HTTP_PUBLIC_KEY_HEADER.encode()
"""The header with a node's public key, in base64. Its signature is in another header."""
_ACQUIRE = frozenset({"/flwr.proto.Runtime/AcquireTask"})
_HERE = "http://localhost"
_TIMEOUT = 30.0  # seconds, as in Flower
_START = 120.0  # seconds until a run of Flower has started

C = TypeVar("C", ControlHttpClient, RuntimeHttpClient)


def runtime_of_node(
    address: str, root: Path, secret: bytes | None = None, token: str = ""
) -> RuntimeHttpClient:
    """Return a connection to the runtime of a SuperNode.

    Args:
        address: The address of the runtime.
        root: The certificate of the authority that makes the connection trusted, as PEM.
        secret: The secret of the task executor; needed to acquire a task.
        token: The token of a task; needed to work on it.
    """
    interceptors = [_version()]
    if secret is not None:
        interceptors.append(_executor(secret))
    if token:
        interceptors.append(RuntimeTokenHttpInterceptor(token))
    return RuntimeHttpClient.from_server_address(address, False, str(root), interceptors)


class Owner:
    """Connections to this process's own SuperLink, through a private socket.

    Args:
        path: The Unix socket.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def runtime(self, secret: bytes) -> RuntimeHttpClient:
        """Return a connection to the runtime, which acquires tasks."""
        interceptors = [_version(), _executor(secret)]
        return self._through(RuntimeHttpClient(_HERE, interceptors=interceptors))

    def control(self) -> ControlHttpClient:
        """Return a connection to the control API."""
        return self._through(ControlHttpClient(_HERE, interceptors=[_version()]))

    def grid(self, token: str) -> HttpGrid:
        """Return the grid of the task with a token."""
        grid = HttpGrid("localhost", True, token=token)
        grid._client = self.task(token, grid._retry_invoker)
        return grid

    def task(self, token: str, retry: Any = None) -> RuntimeHttpClient:
        """Return a connection for the task with a token. By default, nothing is retried."""
        interceptors = [_version(), RuntimeTokenHttpInterceptor(token)]
        client = RuntimeHttpClient(_HERE, interceptors=interceptors, retry_invoker=retry)
        return self._through(client)

    @contextmanager
    def acting(self, secret: bytes, run_id: int) -> Iterator[HttpGrid]:
        """Act as the server process of a run, and yield the grid of its nodes.

        Args:
            secret: The secret of the task executor.
            run_id: The run, as :func:`start_run` returns it.

        Raises:
            ConfigurationError: If the run does not start in time.
        """
        end, token = time.monotonic() + _START, ""
        with self.runtime(secret) as executor:
            while not token:
                acquired = _acquired(executor, TaskType.SERVER_APP)
                if acquired.token and acquired.task.run_id == run_id:
                    token = acquired.token
                elif time.monotonic() > end:
                    raise ConfigurationError("the SuperLink did not start the run")
                else:
                    time.sleep(LOOK)
        with self.task(token) as client:
            status = SubStatus.FAILED
            try:
                with Heartbeat(client):
                    given = client.PullTaskInput(PullTaskInputRequest())
                    run = run_from_proto(given.run)
                    TaskIdentity.task_id, TaskIdentity.run_id = given.task_id, run.run_id
                    TaskIdentity.node_id = given.context.node_id
                    with closing(self.grid(token)) as grid:
                        grid.set_run(run)
                        yield grid
                status = SubStatus.COMPLETED
            finally:
                with suppress(httpx.HTTPError):
                    client.PushTaskOutput(PushTaskOutputRequest(sub_status=status, details=""))

    def _through(self, client: C) -> C:
        client._client.close()
        transport = httpx.HTTPTransport(uds=str(self._path))
        client._client = httpx.Client(transport=transport, timeout=_TIMEOUT)
        return client


def _version() -> Any:
    return RuntimeVersionHttpInterceptor(component_name="pflight")


def _executor(secret: bytes) -> Any:
    return SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=_ACQUIRE)


def _acquired(executor: RuntimeHttpClient, kind: str) -> Any:
    return executor.AcquireTask(AcquireTaskRequest(supported_task_types=[kind]))


def superlink_app(secret: bytes) -> tuple[Any, Callable[[bytes], bool]]:
    """Return a SuperLink as an ASGI app, and a function that tells whether a public key is known.

    The app checks the signatures of nodes, and stores nothing on disk.

    Args:
        secret: The secret of the executor of its tasks.
    """
    from flwr.superlink.main import create_app  # a node does not need this import

    app = create_app()
    app.state.enable_supernode_auth = True
    app.state.superexec_auth_secret = secret

    def knows(key: bytes) -> bool:
        return app.state.linkstate_factory.state().get_node_id_by_public_key(key) is not None

    return app, knows


def start_run(control: ControlHttpClient, app: str = APP) -> int:
    """Start a run from the text of an app's ``pyproject.toml``, and return the run's id."""
    content, _ = build_fab_from_files({"pyproject.toml": app.encode()})
    fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
    return int(control.StartRun(StartRunRequest(fab=fab_to_proto(fab))).run_id)


def register_node(control: ControlHttpClient, key: bytes) -> None:
    """Let the node with a public key connect."""
    control.RegisterNode(RegisterNodeRequest(public_key=key))


class Heartbeat:
    """Tells Flower that a task is alive. Unlike Flower's own, it never interrupts the process.

    As a context manager it stops at the end of the block.

    Args:
        client: The connection to the task's runtime.
        every: Seconds between two beats. Flower tolerates five missing beats.
    """

    def __init__(self, client: RuntimeHttpClient, every: float = 10.0) -> None:
        self._client, self._every, self._done = client, every, Event()
        self._thread = Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def __enter__(self) -> Heartbeat:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _beat(self) -> None:
        while True:
            with suppress(httpx.HTTPError):  # the next call to Flower reports the loss
                self._client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
            if self._done.wait(self._every):
                return

    def stop(self) -> None:
        """Stop the heartbeat."""
        self._done.set()
        self._thread.join()


def bytes_of(content: RecordDict) -> int:
    """Return the size of a message's content in bytes, as Flower sends it."""
    return sum(len(part.deflate()) for part in get_all_nested_objects(content).values())


def pull_message(
    node: Node, run_id: int, client: RuntimeHttpClient, tree: ObjectTree, end: float = math.inf
) -> Message:
    """Return a message, and wait for its parts until ``end``.

    Flower itself waits minutes for the rest of a message if the sending node was killed.
    """
    pull = make_pull_object_fn_protobuf(client.PullObject, node, run_id)

    def pull_in_time(id_: str) -> bytes:
        try:
            return pull(id_)
        except ObjectUnavailableError:
            if time.monotonic() > end:
                raise ObjectPullError(id_, "it has not come in time") from None
            raise

    contents = pull_objects(
        [part.object_id for part in iterate_object_tree(tree)],
        pull_in_time,
        max_tries_per_object=None,
        initial_backoff=LOOK / 4,
        backoff_cap=1.0,
    )
    message = inflate_object_from_contents(tree.object_id, contents)
    assert isinstance(message, Message)
    message.metadata.__dict__["_message_id"] = tree.object_id  # the message does not carry its id
    make_confirm_message_received_fn_protobuf(client.ConfirmMessageReceived, node, run_id)(
        tree.object_id
    )
    return message


def arrived(grid: HttpGrid, ids: Collection[str]) -> dict[str, ObjectTree]:
    """Return the answers that have arrived at a grid, without their contents.

    Args:
        grid: The grid.
        ids: The ids of messages without an answer so far.
    """
    found = grid._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=[*ids]))
    letters = zip(found.messages_list, found.message_object_trees, strict=True)
    return {letter.metadata.reply_to_message_id: tree for letter, tree in letters}


def task_with_message(executor: RuntimeHttpClient) -> str:
    """Return the token of a task with a message for a node; an empty text if there is none."""
    return str(_acquired(executor, TaskType.CLIENT_APP).token)


class Letter:
    """A complete message to a node, which can be answered.

    Args:
        client: The connection for the task of the message. It is closed with the letter, and if the
            message does not arrive. In a run that has ended, it never does.

    Attributes:
        content: The content of the message.
    """

    def __init__(self, client: RuntimeHttpClient) -> None:
        self._client, self._heartbeat = client, Heartbeat(client)
        try:  # as Flower's executor does, but sooner and without code
            self._context = context_from_proto(client.PullTaskInput(PullTaskInputRequest()).context)
            (tree,) = client.PullMessages(PullAppMessagesRequest()).message_object_trees
            node = Node(node_id=self._context.node_id)
            self._message = pull_message(node, self._context.run_id, client, tree)
        except Exception:
            self.close()
            raise
        self.content: RecordDict = self._message.content

    def answer(self, content: RecordDict) -> None:
        """Send the answer."""
        TaskIdentity.run_id, TaskIdentity.node_id = self._context.run_id, self._context.node_id
        push_message(self._client, Message(content, reply_to=self._message), self._context)
        push_task_output(self._client, self._context, SubStatus.COMPLETED, "")

    def close(self) -> None:
        """Close the connection."""
        self._heartbeat.stop()
        self._client.close()
