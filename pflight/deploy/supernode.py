"""A SuperNode of Flower's, and the answers to the messages that come to it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import NamedTuple

import httpx
from flwr.app import Context, Message, RecordDict

from pflight.errors import ConfigurationError
from pflight.runs.host import readable

from .certificates import check_server
from .flower import (
    LOOK,
    AcquireTaskRequest,
    Authority,
    Heartbeat,
    Node,
    PullAppMessagesRequest,
    PullTaskInputRequest,
    RuntimeHttpClient,
    SubStatus,
    TaskIdentity,
    TaskType,
    context_from_proto,
    pull_message,
    push_message,
    push_task_output,
)
from .messages import tensor_bytes_of
from .processes import Process, free_port

_LOST = "SSL/TLS handshake error detected"  # a SuperNode's last words; it does not end then
_UNSENT = "Failed to send message "  # followed by the message's id, a colon and why


class LostServerError(ConfigurationError):
    """A SuperNode has lost its server."""


@contextmanager
def supernode(
    folder: Path, address: str, root: Path, key: Path, own: Mapping[str, Path], secret: Path
) -> Iterator[tuple[Process, str]]:
    """Start a SuperNode; yield its process and the address of its runtime.

    Args:
        folder: Where it keeps its things.
        address: Of the server.
        root: Certificate of the authority that the server is trusted by.
        key: The node's private key.
        own: Certificates for what the SuperNode and this process say to each other.
        secret: A file with what both of them know.

    Raises:
        ProcessEndedError: If it ends at once, as when another process takes its port meanwhile.
    """
    port = free_port()
    command = ["flower-supernode", "--superlink", address, "--root-certificates", str(root)]
    command += ["--auth-supernode-private-key", str(key), "--isolation", "process"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--ssl-ca-certfile", str(own["ca"]), "--ssl-certfile", str(own["certificate"])]
    command += ["--ssl-keyfile", str(own["key"]), "--superexec-auth-secret-file", str(secret)]
    process, runtime = Process(command, folder, "supernode"), f"127.0.0.1:{port}"

    def ready() -> bool:
        try:
            return check_server(runtime, own["ca"])
        except ConfigurationError:  # what answers was faster to take the port: this one ends
            return False

    try:
        process.wait_until(ready)
        yield process, runtime
    finally:
        process.stop()


def serve(
    answer: Callable[[RecordDict], RecordDict],
    process: Process,
    authority: Authority,
    address: str,
    secret: bytes,
    lost: Callable[[], bool],
) -> None:
    """Answer the messages that come to a SuperNode, until it ends.

    The code that Flower sends along with a run is neither installed nor looked at.

    Args:
        answer: Gives the answer to a message.
        process: The SuperNode.
        authority: By which its runtime is trusted.
        address: Of its runtime.
        secret: Which lets this process take messages.
        lost: Says whether the server was not there for long.

    Raises:
        LostServerError: When it has lost its server.
        ProcessEndedError: When it has ended, with what it said.
    """
    with authority.runtime(address, secret) as executor:  # for which an ending SuperNode waits
        request = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])
        letters: SimpleQueue[Letter] = SimpleQueue()
        size = 0
        while True:
            process.check()
            if lost():
                raise LostServerError(f"{process.name} has lost the server")
            with suppress(httpx.HTTPError):  # it is about to end
                acquired = executor.AcquireTask(request)
                if acquired.token:
                    client = authority.runtime(address, token=acquired.token)
                    Thread(target=_open, args=(client, letters), daemon=True).start()
            letter = None
            with suppress(Empty):
                letter = letters.get(timeout=LOOK)
            for line in process.news():  # of the answer before, so that its size is the right one
                if _LOST in line:
                    raise LostServerError(f"{process.name} has lost the server")
                if _UNSENT in line:
                    warnings.warn(_unsent(line, size), stacklevel=2)
            if letter is not None:
                size = _answer(letter, answer)


class Letter(NamedTuple):
    """A message that has arrived as a whole, and what its answer needs."""

    message: Message
    context: Context
    client: RuntimeHttpClient
    heartbeat: Heartbeat


def _unsent(line: str, size: int) -> str:
    """Return why a SuperNode could not send an answer, with so many bytes of tensors."""
    reason = line.partition(_UNSENT)[2].partition(": ")[2]
    if " '413 " in reason:
        return (
            f"this node's answer with {readable(size)} of tensors was not sent: it is larger than "
            "what the server, or a proxy before it, takes (status 413); have the proxy pass larger "
            "messages, in nginx by client_max_body_size"
        )
    return f"this node's answer with {readable(size)} of tensors was not sent: {reason}"


def _answer(letter: Letter, answer: Callable[[RecordDict], RecordDict]) -> int:
    """Answer a message that has arrived; return how many bytes of tensors it sends."""
    TaskIdentity.run_id = letter.context.run_id
    TaskIdentity.node_id = letter.context.node_id
    size = 0
    try:
        content = answer(letter.message.content)
        size = tensor_bytes_of(content)
        reply = Message(content, reply_to=letter.message)
        push_message(letter.client, reply, letter.context)
        push_task_output(letter.client, letter.context, SubStatus.COMPLETED, "")
    except httpx.HTTPError as error:
        warnings.warn(f"an answer could not be sent: {error}", stacklevel=2)
    finally:
        letter.heartbeat.stop()
        letter.client.close()
    return size


def _open(client: RuntimeHttpClient, letters: SimpleQueue[Letter]) -> None:
    """Wait until a message has arrived as a whole: one of a run that has ended never does."""
    heartbeat = Heartbeat(client)
    try:
        message, context = _pulled(client)
    except Exception as error:  # of many kinds: it is gone, or its run is
        heartbeat.stop()
        client.close()
        warnings.warn(f"a message did not arrive: {error}", stacklevel=2)
    else:
        letters.put(Letter(message, context, client, heartbeat))


def _pulled(client: RuntimeHttpClient) -> tuple[Message, Context]:
    """Return the message of a task: as Flower's own executor, but sooner, and without its code."""
    context = context_from_proto(client.PullTaskInput(PullTaskInputRequest()).context)
    (tree,) = client.PullMessages(PullAppMessagesRequest()).message_object_trees
    node = Node(node_id=context.node_id)
    return pull_message(node, context.run_id, client, tree), context
