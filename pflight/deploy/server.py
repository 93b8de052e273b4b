"""The server of a deployed federation: the run that was simulated, whose clients are nodes."""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from pflight.cli import FederationCLI
from pflight.cli import main as command_line
from pflight.errors import ConfigurationError
from pflight.federation import Federation
from pflight.host import readable
from pflight.signals import StopBetweenRounds

from .agreement import agreement_on, server_callback, text_of_model
from .data import OPTIONS, NodeData
from .flower import GridPost, keys_in, superlink
from .remote import Roster, ask_nodes

_DATA = f"{NodeData.__module__}.{NodeData.__name__}"
_LOOK = 2.0  # seconds from one look at who is there to the next
_REMIND = 15.0  # seconds from one line on who is missing to the next


class ServerCLI(FederationCLI):
    """``pflight fit`` with clients that are nodes.

    Args:
        args: Arguments, with ``fit`` as the first.
        stop: Ends a run when a signal comes.
        post: Carries messages to the nodes.
    """

    def __init__(
        self, args: list[str] | None, stop: StopBetweenRounds | None, post: GridPost
    ) -> None:
        self._post = post
        super().__init__(args, stop)

    def before_instantiate_classes(self) -> None:
        """Take only those options of the data that the server needs, which has no samples."""
        super().before_instantiate_classes()
        config = self.config[self.config.subcommand]
        given = (config.data or {}).get("init_args") or {}
        known = {name: given[name] for name in OPTIONS if name in given and name != "num_classes"}
        config.data = Namespace(class_path=_DATA, init_args=Namespace(**known))

    def fit(self, **kwargs: Any) -> None:
        """Meet the nodes, and train with them."""
        config, trainer = self.config[self.config.subcommand], self.trainer
        if not isinstance(self.model, Federation):
            raise ConfigurationError("deploy is for a federation: the model must be a Federation")
        if trainer.world_size > 1:
            raise ConfigurationError(
                f"trainer.devices asks for {trainer.world_size} processes, but the server of nodes "
                "is a single one: set trainer.devices to 1"
            )
        callback = server_callback(trainer.callbacks)  # type: ignore[attr-defined]
        agreement = agreement_on(self.model, callback, self.datamodule, text_of_model(config))
        clients = ask_nodes(self.model, self._post)
        self._wait()
        failed = clients.meet(self.datamodule, len(self._post.keys), agreement)
        if failed:
            raise ConfigurationError(
                "; ".join(f"client {client}'s node says: {said}" for client, said in failed.items())
            )
        names = {client: key.decode() for client, key in enumerate(self._post.keys)}
        trainer.callbacks.insert(0, Roster(clients, names))  # type: ignore[attr-defined]
        super().fit(**kwargs)

    def _wait(self) -> None:
        """Wait until all nodes are connected."""
        begun = said = time.monotonic()
        while len(online := self._post.online()) < len(self._post.keys):
            now = time.monotonic()
            missing = [client for client in range(len(self._post.keys)) if client not in online]
            if now - begun > self._post.patience:
                raise ConfigurationError(
                    f"the nodes of clients {missing} did not connect within "
                    f"{self._post.patience:g} s: start them, or give more --patience"
                )
            if said == begun or now - said > _REMIND:
                said = now
                print(f"pflight: waiting for the nodes of clients {missing}", flush=True)
            time.sleep(_LOOK)


def run(given: argparse.Namespace) -> None:
    """Start a SuperLink, and run a federation with the nodes that connect to it.

    Args:
        given: What ``pflight deploy server`` was given.

    Raises:
        ConfigurationError: If certificates or keys are missing, or the port is taken.
    """
    certificates: Path = given.certificates
    for name in ("ca.pem", "server.pem", "server.key"):
        if not (certificates / name).is_file():
            raise ConfigurationError(
                f"there is no {certificates / name}: make it with pflight deploy certificates"
            )
    keys = keys_in(certificates / "nodes")
    for client, name in enumerate(keys):
        print(f"pflight: client {client} is the node with {name}")
    folder = certificates / "superlink"
    print(f"pflight: starting flower-superlink at {given.host}:{given.port}, log in {folder}")
    held = list(keys.values())
    with superlink(folder, given.host, given.port, certificates, held) as grid:
        post = GridPost(grid, held, given.round_timeout, given.patience)
        cli = partial(ServerCLI, post=post)
        command_line(["fit", *given.run_options], cli)
    for work, carried in post.carried.items():
        sizes = " and ".join(f"{readable(carried[way])} {way}" for way in ("down", "up"))
        print(f"pflight: {carried['messages']:,} messages to {work} carried {sizes}, all in all")
