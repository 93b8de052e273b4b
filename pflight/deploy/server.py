"""The server of a deployed federation: a run with nodes as clients."""

from __future__ import annotations

import argparse
import signal
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from jsonargparse import Namespace

from pflight.command.cli import FederationCLI
from pflight.command.cli import main as command_line
from pflight.data.wrapped import OPTIONS
from pflight.errors import ConfigurationError
from pflight.federation import Federation
from pflight.runs.checkpoint import memory_of, read_checkpoint
from pflight.runs.host import readable
from pflight.runs.signals import StopBetweenRounds
from pflight.server_callback import ServerCallback

from .agreement import agreement_on, server_callback, text_of_model
from .bounds import Bounds
from .certificates import check_pair, keys_in, trusting
from .data import NodeData
from .processes import check_port
from .remote import ask_nodes
from .roster import Roster
from .superlink import GridPost, superlink

_LET_IN = 90.0  # seconds until a killed node can connect again
_DATA = f"{NodeData.__module__}.{NodeData.__name__}"


class ServerCLI(FederationCLI):
    """``pflight fit``, ``validate`` and ``test`` with nodes as clients.

    Args:
        args: Arguments. The first is the command.
        stop: Ends a run when a signal arrives.
        connect: Opens the connection that carries messages to the nodes.
        folder: The folder with the nodes' public keys.
        places: As in :meth:`~pflight.deploy.roster.Roster.meet`.
        bounds: Bounds for the updates and weights of nodes.
    """

    def __init__(
        self,
        args: list[str] | None,
        stop: StopBetweenRounds | None,
        connect: Callable[[], AbstractContextManager[GridPost]],
        folder: Path,
        places: int | None = None,
        bounds: Bounds | None = None,
    ) -> None:
        self._connect, self._keys, self._places = connect, folder, places
        self._bounds = bounds or Bounds()
        if stop is not None:
            stop.at_once = frozenset(signal.valid_signals())
        super().__init__(args, stop)

    def before_instantiate_classes(self) -> None:
        """Keep only the data options that the server needs, since it has no samples."""
        super().before_instantiate_classes()
        config = self.config[self.config.subcommand]
        given = (config.data or {}).get("init_args") or {}
        known = {name: given[name] for name in OPTIONS if name in given and name != "num_classes"}
        config.data = Namespace(class_path=_DATA, init_args=Namespace(**known))
        config.trainer.reload_dataloaders_every_n_epochs = 1  # for nodes that join

    def _run_subcommand(self, subcommand: str) -> None:
        """Wait for the nodes, and train or evaluate with them."""
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
        path = config.get("ckpt_path")
        checkpoint = {} if path is None else read_checkpoint(path)
        saved = checkpoint.get("callbacks", {}).get(Roster.__qualname__)
        if saved is None:
            check_method(callback)
            if memory_of(checkpoint):
                warnings.warn(
                    f"{path} is of a run that was simulated: what its clients have kept from one "
                    "round to the next is not at the nodes, which begin without",
                    stacklevel=2,
                )
        with self._connect() as post:
            try:
                clients = ask_nodes(self.model, post, self._bounds)
                roster = Roster(clients, self.datamodule, post, self._keys, agreement)
                roster.meet(self._places, saved)
                post.patience = post.timeout or post.patience  # for nodes that join during a run
                trainer.callbacks.insert(0, roster)  # type: ignore[attr-defined]
                super()._run_subcommand(subcommand)
            finally:
                for kind, carried in post.carried.items():
                    print(f"pflight: {_told(kind, carried)}", flush=True)


def check_method(callback: ServerCallback) -> None:
    """Raise if a method needs data that nodes do not reveal.

    Args:
        callback: The method.

    Raises:
        ConfigurationError: If it does. The message names the option.
    """
    name, given = type(callback).__name__, callback._given
    if given.get("matching") is not None:
        raise ConfigurationError(
            f"{name}(matching=...) needs to know how many samples of each class a client has, "
            "which stays with its node: leave matching out"
        )
    if given.get("num_clusters") == "auto":
        raise ConfigurationError(
            f'{name}(num_clusters="auto") trains several times, and nodes train once: give a '
            "number of clusters"
        )


def _told(kind: str, carried: Mapping[str, int]) -> str:
    """Return a sentence with the number and size of the messages of a kind."""
    down, up, *around = (
        readable(carried[name]) for name in ("down", "up", "around down", "around up")
    )
    return (
        f"{carried['messages']:,} messages to {kind} carried {down} down and {up} up, of which "
        f"{' and '.join(around)} are around the tensors"
    )


def run(given: argparse.Namespace) -> None:
    """Start a SuperLink, and run a federation with its nodes.

    Args:
        given: The options of ``pflight deploy server``.

    Raises:
        ConfigurationError: If certificates or keys are missing.
    """
    certificates: Path = given.certificates
    for name in ("ca.pem", "server.pem", "server.key"):
        if not (certificates / name).is_file():
            raise ConfigurationError(
                f"there is no {certificates / name}: make it with pflight deploy certificates"
            )
    check_pair(certificates / "server.pem", certificates / "server.key")
    trusting(certificates / "ca.pem")
    folder = certificates / "nodes"
    keys_in(folder)
    check_port(given.host, given.port)
    if given.patience < _LET_IN:
        warnings.warn(
            f"--patience {given.patience:g} is short: Flower lets a node that was killed in again "
            f"after about a minute, so that {_LET_IN:g} s are advisable",
            stacklevel=2,
        )
    where = given.host, given.port, certificates
    connect = partial(superlink, *where, given.round_timeout, given.patience)
    bounds = Bounds(given.max_samples, given.max_share)
    cli = partial(ServerCLI, connect=connect, folder=folder, places=given.places, bounds=bounds)
    command_line([given.run, *given.run_options], cli)
