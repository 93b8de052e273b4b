"""The process of a node. It runs Flower's SuperNode, and answers the server's messages."""

from __future__ import annotations

import argparse
import math
import secrets
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import httpx
import lightning as L
from flwr.app import RecordDict

from pflight.command.cli import FederationCLI
from pflight.command.process import quieten
from pflight.errors import ConfigurationError
from pflight.federation import Federation
from pflight.runs.host import readable
from pflight.runs.locks import hold, holder, release

from .agreement import server_callback, text_of_model
from .certificates import (
    check_name,
    check_private_key,
    check_server,
    make_certificates,
    make_folder,
    trusting,
    write_private,
)
from .flower import LOOK, Letter, RuntimeHttpClient, runtime_of_node, task_with_message
from .messages import tensor_bytes_of
from .node import Node
from .processes import Process, ProcessEndedError, ended_by_signals, free_port

_REFUSED = "Failed to activate SuperNode"
_LOST = "SSL/TLS handshake error detected"  # a SuperNode's last log line; it does not end
_UNSENT = "Failed to send message "  # followed by the message's id, a colon and the reason
_SECRET = "secret"  # a file beside the certificates of a SuperNode
_SHORT = 30.0  # seconds until a SuperNode that can't run has ended
_LOOK = 2.0  # seconds between two looks for the server
_WATCH = 10.0  # likewise, while a SuperNode is connected
_REMIND = 60.0  # seconds between two messages about a missing server
_AGAIN, _PATIENCE = 5.0, 120.0  # seconds between two attempts to connect, and for all of them


class NodeCLI(FederationCLI):
    """Reads the configuration of a run at a node, without training.

    Args:
        args: Arguments. The first is ``fit``.
        folder: The folder of the client's memory.
        own: The index of this node's client in the configured data.
        anew: As in :class:`~pflight.deploy.node.Node`.

    Attributes:
        node: The node, which answers messages.
    """

    node: Node

    def __init__(self, args: list[str], folder: Path, own: int, anew: bool = False) -> None:
        self._node_folder, self._own, self._anew = folder, own, anew
        super().__init__(args)

    def before_instantiate_classes(self) -> None:
        """Pass the seed on. A node has no run folder."""
        self._pass_seed()

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Make a Trainer that does nothing, since the node makes its own."""
        return L.Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False)

    def fit(self, **kwargs: Any) -> None:
        """Make the node instead of training."""
        config = self.config[self.config.subcommand]
        given = self._get(self.config_init, "trainer")
        if not isinstance(self.model, Federation):
            raise ConfigurationError("deploy is for a federation: the model must be a Federation")
        self.node = Node(
            self.model,
            server_callback(given.callbacks),
            self.datamodule,
            self._node_folder,
            {"accelerator": given.accelerator, "devices": 1, "precision": given.precision},
            self._own,
            text_of_model(config),
            self._anew,
        )


def run(given: argparse.Namespace) -> None:
    """Run a node until a signal arrives.

    Args:
        given: The options of ``pflight deploy client``.

    Raises:
        ConfigurationError: If files are missing, or the server is not trusted or refuses.
    """
    check_name(given.server)
    trusting(given.ca)
    check_private_key(given.key)
    quieten()
    make_folder(given.folder)
    file = given.folder / ".node.lock"
    try:
        lock = hold(file)
    except BlockingIOError as error:
        who = holder(file) or "another process"
        raise ConfigurationError(f"another node is running in {given.folder}, in {who}") from error
    try:
        where = given.folder / "memory", given.client, given.anew
        node = NodeCLI(["fit", *given.run_options], *where).node
        node.check_salt()
        node.check_samples()
        with ended_by_signals():
            _serve(node, given)
    finally:
        release(lock)


def _serve(node: Node, given: argparse.Namespace) -> None:
    """Answer messages whenever the server is available."""
    with tempfile.TemporaryDirectory(prefix="pflight-") as folder:
        own = Path(folder)
        make_certificates(own, [], days=3650)
        write_private(own / _SECRET, secrets.token_hex(32).encode())
        there = given.folder, given.server, given.ca, given.key, own
        print(f"pflight: starting flower-supernode for {given.server}, log in {given.folder}")
        failing = 0.0
        while True:
            wait_for(given.server, given.ca)
            begun = time.monotonic()
            try:
                with (
                    watching(given.server, given.ca) as lost,
                    supernode(*there) as (process, address),
                ):
                    print("pflight: connecting", flush=True)
                    serve(node.answer, process, address, own, lost)
            except LostServerError:
                failing = 0.0
            except ProcessEndedError as error:
                time.sleep(_AGAIN)
                lasted, refused = time.monotonic() - begun, _REFUSED in str(error)
                failing = failing + lasted if refused or lasted < _SHORT else 0.0
                _say_why(str(error), given.key, failing)


@contextmanager
def watching(server: str, ca: Path) -> Iterator[Callable[[], bool]]:
    """Watch the server in the background, since a SuperNode without it may wait forever.

    Args:
        server: The address of the server.
        ca: The certificate of the server's authority.

    Yields:
        A function that returns whether the server was away for so long that it has lost this node.
    """
    seen, done = time.monotonic(), threading.Event()

    def look() -> None:
        nonlocal seen
        while not done.wait(_WATCH):
            with suppress(ConfigurationError):  # the next connection meets the same error
                if check_server(server, ca):
                    seen = time.monotonic()

    threading.Thread(target=look, name="watch", daemon=True).start()
    try:
        yield lambda: time.monotonic() - seen > _REMIND
    finally:
        done.set()


def wait_for(server: str, ca: Path) -> None:
    """Wait until the server answers.

    Args:
        server: The address of the server.
        ca: The certificate of the server's authority.

    Raises:
        ConfigurationError: If the server is not trusted.
    """
    begun, said = time.monotonic(), -math.inf
    while not check_server(server, ca):
        if (waited := round(time.monotonic() - begun)) - said >= _REMIND:
            said = waited
            since = f", for {waited} s" if waited else ""
            print(f"pflight: waiting for the server {server}{since}", flush=True)
        time.sleep(_LOOK)


def _say_why(said: str, key: Path, failing: float) -> None:
    """Print why a node is not connected, or raise after too many attempts.

    A node that was killed can return once the server has noticed its loss.
    """
    refused = _REFUSED in said
    if refused:
        said = (
            f"the server does not let this node in: another one with the key {key} is connected, "
            f"or was until now, or the server does not know it; end the other one, or send "
            f"{key.with_suffix('.pub').name} to the server's operator"
        )
    if failing >= _PATIENCE:
        raise ConfigurationError(said)
    print(f"pflight: {said if refused else 'the connection has ended'}; trying again", flush=True)


class LostServerError(ConfigurationError):
    """A SuperNode has lost its server."""


@contextmanager
def supernode(
    folder: Path, address: str, root: Path, key: Path, own: Path
) -> Iterator[tuple[Process, str]]:
    """Start a SuperNode, and yield its process and the address of its runtime.

    Args:
        folder: The folder of its files.
        address: The address of the server.
        root: The certificate of the server's authority.
        key: The node's private key.
        own: The folder with the certificates of the connection between the SuperNode and this
            process, and with the secret that both of them share.

    Raises:
        ProcessEndedError: If it ends at once, such as when another process has taken its port.
    """
    port = free_port()
    command = ["flower-supernode", "--superlink", address, "--root-certificates", str(root)]
    command += ["--auth-supernode-private-key", str(key), "--isolation", "process"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--ssl-ca-certfile", str(own / "ca.pem")]
    command += ["--ssl-certfile", str(own / "server.pem")]
    command += ["--ssl-keyfile", str(own / "server.key")]
    command += ["--superexec-auth-secret-file", str(own / _SECRET)]
    process, runtime = Process(command, folder, "supernode"), f"127.0.0.1:{port}"

    def ready() -> bool:
        try:
            return check_server(runtime, own / "ca.pem")
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
    address: str,
    own: Path,
    lost: Callable[[], bool],
) -> None:
    """Answer the messages of a SuperNode until it ends.

    Flower sends code with each run. It is neither installed nor read.

    Args:
        answer: Returns the answer to a message.
        process: The process of the SuperNode.
        address: The address of its runtime.
        own: As in :func:`supernode`.
        lost: Returns whether the server was away for long.

    Raises:
        LostServerError: When the SuperNode has lost its server.
        ProcessEndedError: When the SuperNode has ended, with its last output.
    """
    letters: SimpleQueue[Letter] = SimpleQueue()
    root, secret, size = own / "ca.pem", (own / _SECRET).read_bytes(), 0
    with runtime_of_node(address, root, secret) as executor:  # an ending SuperNode waits for it
        while True:
            process.check()
            if lost():
                raise LostServerError(f"{process.name} has lost the server")
            with suppress(httpx.HTTPError):  # it is about to end
                if token := task_with_message(executor):
                    client = runtime_of_node(address, root, token=token)
                    threading.Thread(target=_open, args=(client, letters), daemon=True).start()
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
