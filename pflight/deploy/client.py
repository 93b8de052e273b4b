"""A node of a deployed federation. It holds one client and answers messages of the server."""

from __future__ import annotations

import argparse
import math
import secrets
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L

from pflight.command.cli import FederationCLI
from pflight.command.process import quieten
from pflight.errors import ConfigurationError
from pflight.federation import Federation
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
from .node import Node
from .processes import ProcessEndedError, ended_by_signals
from .supernode import LostServerError, serve, supernode

_REFUSED = "Failed to activate SuperNode"
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
        secret = own / "secret"
        write_private(secret, secrets.token_hex(32).encode())
        paths = {"ca": own / "ca.pem", "certificate": own / "server.pem", "key": own / "server.key"}
        there = given.folder, given.server, given.ca, given.key, paths, secret
        print(f"pflight: starting flower-supernode for {given.server}, log in {given.folder}")
        failing = 0.0
        while True:
            wait_for(given.server, given.ca)
            begun = time.monotonic()
            try:
                with Watch(given.server, given.ca) as watch, supernode(*there) as started:
                    process, address = started
                    print("pflight: connecting", flush=True)
                    where = paths["ca"], address, secret.read_bytes()
                    serve(node.answer, process, *where, watch.misses)
            except LostServerError:
                failing = 0.0
            except ProcessEndedError as error:
                time.sleep(_AGAIN)
                lasted, refused = time.monotonic() - begun, _REFUSED in str(error)
                failing = failing + lasted if refused or lasted < _SHORT else 0.0
                _say_why(str(error), given.key, failing)


class Watch:
    """Watches the server in the background, since a SuperNode without it may wait forever.

    Args:
        server: The address of the server.
        ca: The certificate of the server's authority.
    """

    def __init__(self, server: str, ca: Path) -> None:
        self._where = server, ca
        self._seen = time.monotonic()
        self._done = threading.Event()

    def __enter__(self) -> Watch:
        """Start watching."""
        threading.Thread(target=self._look, name="watch", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop watching."""
        self._done.set()

    def _look(self) -> None:
        while not self._done.wait(_WATCH):
            with suppress(ConfigurationError):  # the next connection meets the same error
                if check_server(*self._where):
                    self._seen = time.monotonic()

    def misses(self) -> bool:
        """Return whether the server was away for so long that it has lost this node, too."""
        return time.monotonic() - self._seen > _REMIND


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
