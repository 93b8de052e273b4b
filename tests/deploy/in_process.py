"""Nodes in this process, which get what is sent to them as the bytes of Flower's messages."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lightning as L
from flwr.app import RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

from pflight import Federation
from pflight.callbacks import ServerCallback
from pflight.datamodules import FederatedDataModule
from pflight.deploy.agreement import agreement_on
from pflight.deploy.data import OPTIONS, NodeData
from pflight.deploy.messages import bytes_of
from pflight.deploy.node import Node
from pflight.deploy.remote import Asked, Roster, ask_nodes
from tests.runs import quiet_trainer


def across(content: RecordDict) -> RecordDict:
    """Return what arrives of a message."""
    parts = {id_: part.deflate() for id_, part in get_all_nested_objects(content).items()}
    return inflate_object_from_contents(content.object_id, parts)


class InProcess:
    """Carries messages to nodes in this process.

    Attributes:
        nodes: The nodes, by client.
        on_answer: Changes an answer, as a node that lies does, or says why there is none.
        carried: Bytes of what was sent and of what was answered, by kind of work.
    """

    def __init__(self, nodes: dict[int, Node]) -> None:
        self.nodes = nodes
        self.on_answer: Callable[[Asked, RecordDict], RecordDict | str] = lambda _, answer: answer
        self.carried: dict[str, list[tuple[int, int]]] = {}
        self._answers: dict[int, RecordDict | str] = {}

    def send(self, messages: Iterable[Asked]) -> None:
        for asked in messages:
            assert asked.client not in self._answers, "a client is asked before it has answered"
            answer = across(self.nodes[asked.client].answer(across(asked.content)))
            sizes = bytes_of(asked.content), bytes_of(answer)
            self.carried.setdefault(asked.work, []).append(sizes)
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

    def node(self, client: int) -> Node:
        """Start a client's node."""
        federation = Federation(self.make(), **self.options)
        how = {"accelerator": "cpu"}
        data = copy.deepcopy(self.data)
        return Node(federation, self.callback(), data, self.folder / f"{client}", how, client)

    def server(self, rounds: int, *callbacks: L.Callback, **trainer: Any) -> Federation:
        """Run the server for some rounds."""
        federation, server = Federation(self.make(), **self.options), self.callback()
        known = NodeData(**{n: getattr(self.data, n) for n in OPTIONS if n != "num_classes"})
        self.clients = ask_nodes(federation, self.post)
        agreement = agreement_on(federation, server, known)
        failed = self.clients.meet(known, len(self.post.nodes), agreement)
        assert not failed, failed
        ckpt_path = trainer.pop("ckpt_path", None)
        roster = Roster(self.clients, {client: str(client) for client in self.post.nodes})
        fitter = quiet_trainer(rounds, server, roster, *callbacks, **trainer)
        fitter.fit(federation, datamodule=known, ckpt_path=ckpt_path)
        return federation
