"""The assignment of nodes to clients in a deployed federation."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L

from pflight.data.loaders import SPLITS
from pflight.errors import ConfigurationError
from pflight.federation import Federation
from pflight.history import Round

from .certificates import keys_in
from .data import NodeData
from .remote import Post, RemoteClients

_LOOK = 2.0  # seconds between two looks for connected nodes
_REMIND = 15.0  # seconds between two messages about missing nodes


class Roster(L.Callback):
    """Registers the nodes, and lets others join between rounds. Checkpoints contain it.

    A node is identified by its key. The first nodes are clients 0, 1, ... in the order of the names
    of their keys. A later node gets the next id. Ids never change.

    Args:
        clients: The clients.
        data: The known numbers of their samples.
        post: Carries messages to the nodes.
        folder: The folder with the public keys of the allowed nodes.
        agreement: Digests of the options that all sides must share.
    """

    def __init__(
        self,
        clients: RemoteClients,
        data: NodeData,
        post: Post,
        folder: Path,
        agreement: Mapping[str, str],
    ) -> None:
        self.clients, self.data, self.post = clients, data, post
        self.folder, self.agreement = folder, agreement
        self.nodes: dict[int, bytes] = {}
        self.met: set[int] = set()
        self.missed: set[int] = set()

    def meet(self, places: int | None, saved: dict[str, Any] | None) -> None:
        """Wait for the nodes, and ask for descriptions of their data.

        Args:
            places: The maximum number of clients; by default the number of keys.
            saved: The roster's state in a checkpoint, if a run is resumed. It describes the data
                of absent nodes.

        Raises:
            ConfigurationError: If nodes are missing, disagree, or outnumber the places.
        """
        here = keys_in(self.folder)
        if saved is None:
            self.nodes = dict(enumerate(here.values()))
            self.clients.on_num_clients(len(here) if places is None else places)
        else:
            self.clients.on_num_clients(len(saved["after"]))
            self.load_state_dict(saved)
        self.data.num_clients = self.clients.num_clients
        if len(here) > self.clients.num_clients:
            raise ConfigurationError(
                f"there are {len(here)} keys in {self.folder}, but {self.clients.num_clients} "
                "places for clients: give --places when a run is started anew"
            )
        names = {key: name for name, key in here.items()}
        for client, key in self.nodes.items():
            whose = f"the node with {names[key]}" if key in names else "a node whose key is gone"
            print(f"pflight: client {client} is {whose}", flush=True)
        self._let_in(here)
        self._wait(required=saved is None)
        for client in sorted(self.data.known):
            self._say_what_it_has(client)
        self._warn_of_weight()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Let nodes with new keys join from the next round on."""
        assert isinstance(pl_module, Federation)
        self._note_missed(pl_module.history[-1])
        try:
            here = keys_in(self.folder)
        except ConfigurationError as error:
            warnings.warn(f"nobody joins: {error}", stacklevel=2)
            return
        for name, key in here.items():
            if key in self.nodes.values():
                continue
            client = len(self.nodes)
            if client == self.clients.num_clients:
                warnings.warn(f"there is no place for {name}: give --places", stacklevel=2)
                continue
            self.nodes[client] = key
            print(f"pflight: client {client} is the node with {name}, which may join", flush=True)
        self._let_in(here)
        known = dict(self.data.known)
        for client, refusal in self._ask().items():
            if refusal:
                warnings.warn(f"client {client} can't take part: {refusal}", stacklevel=2)
            elif known.get(client) != self.data.known[client]:
                pl_module.record.forget_data()
                print(f"pflight: client {client} takes part from the next round on", flush=True)
                self._say_what_it_has(client)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors and primitives."""
        nodes = {client: key.decode() for client, key in self.nodes.items()}
        own = {name: getattr(self.clients, name) for name in ("after", "sessions")}
        return {"run": self.clients.run_id, **own, "nodes": nodes, "known": self.data.known}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned.

        Raises:
            ConfigurationError: If another release of pflight has saved the state.
        """
        if missing := self.state_dict().keys() - state_dict.keys():
            raise ConfigurationError(
                "the checkpoint is of a run that another release of pflight has deployed, which "
                f"does not save {', '.join(sorted(missing))}: go on with that release"
            )
        self.nodes = {client: key.encode() for client, key in state_dict["nodes"].items()}
        self.clients.run_id = state_dict["run"]
        self.clients.sessions = dict(state_dict["sessions"])
        self.clients.after.copy_(state_dict["after"])
        for client in [*self.clients.renewed]:
            self.clients.renew(client)
        for client, known in state_dict["known"].items():
            if client not in self.data.known:  # a node's own description is newer
                self.data.know(client, *known)

    def _say_what_it_has(self, client: int) -> None:
        sizes, _ = self.data.known[client]
        has = ", ".join(f"{sizes[split]:,} {split}" for split in SPLITS)
        everyone = self.data.num_samples("train")
        share = int(everyone[client]) / max(int(everyone.sum()), 1)
        print(
            f"pflight: client {client} has {has} samples, {share:.1%} of those to train on",
            flush=True,
        )

    def _warn_of_weight(self) -> None:
        """Warn if a node claims more than half of all samples, and so of the weight."""
        heavy = []
        for split in SPLITS:
            counts = self.data.num_samples(split)
            if len(self.data.known) > 1 and 2 * int(counts.max()) > int(counts.sum()):
                heavy.append((int(counts.argmax()), split))
        if heavy and self.clients.bounds.max_share is None:
            splits = ", ".join(split for _, split in heavy)
            warnings.warn(
                f"client {heavy[0][0]} says that it has more than half of all {splits} samples, "
                "and weighs as much: --max-share bounds a node's weight",
                stacklevel=2,
            )

    def _note_missed(self, entry: Round) -> None:
        """Note the clients that failed in a round, and print those that returned."""
        back = sorted(self.missed.intersection(entry.clients) - {*entry.failed})
        for client in back:
            print(f"pflight: round {entry.index}: client {client} is back", flush=True)
        self.missed = (self.missed - {*back}) | {*entry.failed}

    def _let_in(self, here: Mapping[str, bytes]) -> None:
        keys = {client: key for client, key in self.nodes.items() if key in here.values()}
        if keys != self.post.keys:
            self.post.keys = keys
            self.post.register({*keys.values()})

    def _ask(self) -> dict[int, str]:
        """Ask the newly connected nodes; return each client's refusal, empty if it takes part."""
        new = [client for client in self.post.online() if client not in self.met]
        if not new:
            return {}
        print(f"pflight: asking the nodes of clients {new} what they have", flush=True)
        said = self.clients.describe(new, self.data, self.agreement)
        self.met |= {client for client, refusal in said.items() if not refusal}
        return said

    def _wait(self, required: bool) -> None:
        """Wait until all nodes have described their data."""
        begun = said = time.monotonic()
        while True:
            if refused := {client: why for client, why in self._ask().items() if why}:
                whose = (f"client {client}'s node says: {why}" for client, why in refused.items())
                raise ConfigurationError("; ".join(whose))
            if not (missing := sorted(self.post.keys.keys() - self.met)):
                return
            now = time.monotonic()
            if now - begun > self.post.patience:
                late = f"clients {missing} did not connect within {self.post.patience:g} s"
                if required:
                    raise ConfigurationError(
                        f"the nodes of {late}: start them, or give more --patience"
                    )
                warnings.warn(f"the nodes of {late}: the run goes on without them", stacklevel=2)
                return
            if said == begun or now - said > _REMIND:
                said = now
                print(f"pflight: waiting for the nodes of clients {missing}", flush=True)
            time.sleep(_LOOK)
