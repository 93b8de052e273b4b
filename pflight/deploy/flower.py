"""What both sides of a federation need of Flower: connections, heartbeats, messages."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
from flwr.app import Message
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import SendTaskHeartbeatRequest
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
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
from flwr.supercore.runtime import RuntimeHttpClient

LOOK = 0.2
"""Seconds from one look at what has arrived to the next."""
_ACQUIRE = frozenset({"/flwr.proto.Runtime/AcquireTask"})


class Authority:
    """A certificate authority, by which connections are trusted.

    Args:
        root: Its certificate, PEM.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def runtime(
        self, address: str, secret: bytes | None = None, token: str = ""
    ) -> RuntimeHttpClient:
        """Return a connection to a runtime: of a SuperLink, or of a SuperNode.

        Args:
            address: Of the runtime.
            secret: What only the executor of tasks knows, to acquire one.
            token: Of a task, to work on it.
        """
        interceptors: list[Any] = [RuntimeVersionHttpInterceptor(component_name="pflight")]
        if secret is not None:
            auth = SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=_ACQUIRE)
            interceptors.append(auth)
        if token:
            interceptors.append(RuntimeTokenHttpInterceptor(token))
        return RuntimeHttpClient.from_server_address(address, False, str(self.root), interceptors)

    def control(self, address: str) -> ControlHttpClient:
        """Return a connection to a SuperLink's control."""
        interceptors = [RuntimeVersionHttpInterceptor(component_name="pflight")]
        return ControlHttpClient.from_server_address(address, False, str(self.root), interceptors)


class Heartbeat:
    """Tells Flower that a task goes on; unlike Flower's own, it never interrupts the process.

    As a context manager it does so until the end.

    Args:
        client: The connection to the task's runtime.
        every: Seconds from one to the next, of which Flower misses five.
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
            with suppress(httpx.HTTPError):  # who sends or asks next sees that Flower is gone
                self._client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
            if self._done.wait(self._every):
                return

    def stop(self) -> None:
        """End it."""
        self._done.set()
        self._thread.join()


def pull_message(
    node: Node, run_id: int, client: RuntimeHttpClient, tree: ObjectTree, end: float = math.inf
) -> Message:
    """Return a message whose parts have come or, until the end, are about to come.

    Flower itself waits minutes for the rest of one whose node was killed as it sent it.
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
    message.metadata.__dict__["_message_id"] = tree.object_id  # which it does not carry itself
    make_confirm_message_received_fn_protobuf(client.ConfirmMessageReceived, node, run_id)(
        tree.object_id
    )
    return message
