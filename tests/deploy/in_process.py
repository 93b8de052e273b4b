"""Nodes in this process, which get what is sent to them as the bytes of Flower's messages."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Set
from pathlib import Path
from typing import Any

import lightning as L
import torch
from flwr.app import RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

from pflight import Federation
from pflight.callbacks import ServerCallback
from pflight.data.wrapped import OPTIONS
from pflight.datamodules import FederatedDataModule
from pflight.deploy.agreement import agreement_on
from pflight.deploy.bounds import Bounds
from pflight.deploy.certificates import make_key
from pflight.deploy.data import NodeData
from pflight.deploy.flower import bytes_of
from pflight.deploy.messages import tensor_bytes_of
from pflight.deploy.node import Node
from pflight.deploy.remote import Asked, ask_nodes
from pflight.deploy.roster import Roster
from tests.runs import quiet_trainer


def across(content: RecordDict) -> RecordDict:
    """Return what arrives of a message."""
    parts = {id_: part.deflate() for id_, part in get_all_nested_objects(content).items()}
    return inflate_object_from_contents(content.object_id, parts)


class InProcess:
    """Carries messages to nodes in this process.

    Attributes:
        nodes: The nodes that are connected, by client.
        keys: Their public keys, likewise.
        on_answer: Changes an answer, as a node that lies does, or says why there is none.
        carried: Bytes of what was sent and of what was answered, by kind of work.
        tensors: Those of them that are tensors.
    """

    patience = 0.0

    def __init__(self, nodes: dict[int, Node]) -> None:
        self.nodes = nodes
        self.keys: dict[int, bytes] = {}
        self.on_answer: Callable[[Asked, RecordDict], RecordDict | str] = lambda _, answer: answer
        self.carried: dict[str, list[tuple[int, int]]] = {}
        self.tensors: dict[str, list[tuple[int, int]]] = {}
        self._answers: dict[int, RecordDict | str] = {}

    def online(self) -> dict[int, int]:
        return {client: client for client in self.keys if client in self.nodes}

    def register(self, keys: Set[bytes]) -> None:
        assert keys == {*self.keys.values()}

    def send(self, messages: Iterable[Asked]) -> None:
        for asked in messages:
            assert asked.client not in self._answers, "a client is asked before it has answered"
            if asked.client not in self.online():
                self._answers[asked.client] = "its node is not connected"
                continue
            answer = across(self.nodes[asked.client].answer(across(asked.content)))
            for count, size in ((self.carried, bytes_of), (self.tensors, tensor_bytes_of)):
                sizes = size(asked.content), size(answer)
                count.setdefault(asked.work, []).append(sizes)
            self._answers[asked.client] = self.on_answer(asked, answer)

    def receive(self, client: int) -> RecordDict | str:
        return self._answers.pop(client)


class Deployed:
    """A federation with a node for each client, in this process.

    Args:
        make: Makes the client module.
        data: Everybody's data, of which each node uses one client's.
        callback: Makes the server callback.
        folder: Where the nodes keep things.
        **options: Of the federation.
    """

    def __init__(
        self,
        make: Callable[[], L.LightningModule],
        data: FederatedDataModule,
        callback: Callable[[], ServerCallback],
        folder: Path,
        **options: Any,
    ) -> None:
        self.make, self.folder, self.options = make, folder, options
        self.data, self.callback = data, callback
        self.post = InProcess({i: self.node(i) for i in range(data.num_clients)})
        for client in self.post.nodes:
            make_key(self.keys / f"{client}.key")

    @property
    def keys(self) -> Path:
        """Where the nodes' keys are."""
        return self.folder / "keys"

    def node(self, client: int) -> Node:
        """Start a client's node."""
        federation = Federation(self.make(), **self.options)
        how = {"accelerator": "cpu"}
        data = copy.deepcopy(self.data)
        return Node(federation, self.callback(), data, self.folder / f"{client}", how, client)

    def server(
        self,
        rounds: int,
        *callbacks: L.Callback,
        places: int | None = None,
        ckpt_path: Path | None = None,
        max_share: float | None = None,
        **trainer: Any,
    ) -> Federation:
        """Run the server for some rounds."""
        federation, server = Federation(self.make(), **self.options), self.callback()
        known = self.known = NodeData(
            **{n: getattr(self.data, n) for n in OPTIONS if n != "num_classes"}
        )
        self.clients = ask_nodes(federation, self.post, Bounds(max_share=max_share))
        agreement = agreement_on(federation, server, known)
        self.roster = Roster(self.clients, known, self.post, self.keys, agreement)
        saved = torch.load(ckpt_path, weights_only=True)["callbacks"] if ckpt_path else {}
        self.roster.meet(places, saved.get("Roster"))
        options = {"reload_dataloaders_every_n_epochs": 1, **trainer}
        fitter = quiet_trainer(rounds, server, self.roster, *callbacks, **options)
        fitter.fit(federation, datamodule=known, ckpt_path=ckpt_path)
        return federation
