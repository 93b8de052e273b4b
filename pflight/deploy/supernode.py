"""Flower's SuperNode, and the answers to its messages."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread

import httpx
from flwr.app import RecordDict

from pflight.errors import ConfigurationError
from pflight.runs.host import readable

from .certificates import check_server
from .flower import LOOK, Letter, RuntimeHttpClient, runtime_of_node, task_with_message
from .messages import tensor_bytes_of
from .processes import Process, free_port

_LOST = "SSL/TLS handshake error detected"  # a SuperNode's last log line; it does not end
_UNSENT = "Failed to send message "  # followed by the message's id, a colon and the reason


class LostServerError(ConfigurationError):
    """A SuperNode has lost its server."""


@contextmanager
def supernode(
    folder: Path, address: str, root: Path, key: Path, own: Mapping[str, Path], secret: Path
) -> Iterator[tuple[Process, str]]:
    """Start a SuperNode, and yield its process and the address of its runtime.

    Args:
        folder: The folder of its files.
        address: The address of the server.
        root: The certificate of the server's authority.
        key: The node's private key.
        own: Certificates for the connection between the SuperNode and this process.
        secret: A file with the secret that both of them share.

    Raises:
        ProcessEndedError: If it ends at once, such as when another process has taken its port.
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
        except ConfigurationError:  # another process has taken the port, so this one ends
            return False

    try:
        process.wait_until(ready)
        yield process, runtime
    finally:
        process.stop()


def serve(
    answer: Callable[[RecordDict], RecordDict],
    process: Process,
    root: Path,
    address: str,
    secret: bytes,
    lost: Callable[[], bool],
) -> None:
    """Answer the messages of a SuperNode until it ends.

    Flower sends code with each run. It is neither installed nor read.

    Args:
        answer: Returns the answer to a message.
        process: The process of the SuperNode.
        root: The certificate of the authority of its runtime.
        address: The address of the runtime.
        secret: The secret that allows this process to take messages.
        lost: Returns whether the server was away for long.

    Raises:
        LostServerError: When the SuperNode has lost its server.
        ProcessEndedError: When the SuperNode has ended, with its last output.
    """
    letters: SimpleQueue[Letter] = SimpleQueue()
    size = 0
    with runtime_of_node(address, root, secret) as executor:  # an ending SuperNode waits for it
        while True:
            process.check()
            if lost():
                raise LostServerError(f"{process.name} has lost the server")
            with suppress(httpx.HTTPError):  # it is about to end
                if token := task_with_message(executor):
                    client = runtime_of_node(address, root, token=token)
                    Thread(target=_open, args=(client, letters), daemon=True).start()
            letter = None
            with suppress(Empty):
                letter = letters.get(timeout=LOOK)
            for line in process.news():  # about the previous answer, of this size
                if _LOST in line:
                    raise LostServerError(f"{process.name} has lost the server")
                if _UNSENT in line:
                    warnings.warn(_unsent(line, size), stacklevel=2)
            if letter is None:
                continue
            try:
                with closing(letter):
                    content = answer(letter.content)
                    size = tensor_bytes_of(content)
                    letter.answer(content)
            except httpx.HTTPError as error:
                warnings.warn(f"an answer could not be sent: {error}", stacklevel=2)


def _unsent(line: str, size: int) -> str:
    """Return the reason why an answer with ``size`` bytes of tensors was not sent."""
    reason = line.partition(_UNSENT)[2].partition(": ")[2]
    if " '413 " in reason:
        return (
            f"this node's answer with {readable(size)} of tensors was not sent: it is larger than "
            "what the server, or a proxy before it, takes (status 413); have the proxy pass larger "
            "messages, in nginx by client_max_body_size"
        )
    return f"this node's answer with {readable(size)} of tensors was not sent: {reason}"


def _open(client: RuntimeHttpClient, letters: SimpleQueue[Letter]) -> None:
    """Wait until a message is complete."""
    try:
        letters.put(Letter(client))
    except Exception as error:  # many kinds: the message or its run is gone
        warnings.warn(f"a message did not arrive: {error}", stacklevel=2)
