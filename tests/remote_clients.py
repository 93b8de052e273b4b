"""Clients on machines of their own: each holds one client, and gets what is sent as bytes."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from pflight.clients import STORED, Clients
from pflight.data.loaders import Split
from pflight.engines.client_setup import ClientSetup
from pflight.history import merge_logs
from pflight.runs.memory import ClientMemory
from pflight.states.server_models import ServerModels
from pflight.states.updates import ClientUpdates

HERE: list[int] = []
"""The client on whose machine something is going on, if on any."""


class OfServer(ClientMemory):
    """What the server's machine keeps: what its callback stores, and nothing of its clients."""

    def read(self, slot: str, clients: Tensor, default: TensorDict) -> TensorDict:
        assert slot == STORED, f"the server read {slot!r} in the memory of its clients"
        return super().read(slot, clients, default)

    def write(self, slot: str, clients: Tensor, states: TensorDict) -> None:
        assert slot == STORED, f"the server wrote {slot!r} into the memory of its clients"
        super().write(slot, clients, states)


class RemoteClients(Clients):
    """Asks clients on their machines, where there are their memory and the initial model."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.memory = OfServer()
        self.memories: dict[int, ClientMemory] = {}

    def each(
        self,
        work: Callable[..., Any],
        clients: Tensor,
        sent: TensorDict,
        *how: Any,
        **more: Any,
    ) -> list[Any]:
        """Have every one of the clients do something with what it is sent."""
        answers = []
        for row, client in enumerate(clients.tolist()):
            machine = copy.copy(self)
            machine.__class__ = Clients
            machine.memory = self.memories.setdefault(client, ClientMemory())
            machine.server = ServerModels(self.layout)
            machine.server.add(1)
            HERE.append(client)
            try:
                own = across(sent[row : row + 1])
                answers.append(work(machine, clients[row : row + 1], own, *how, **more))
            finally:
                HERE.pop()
        return answers

    def updates(
        self, work: Callable[..., ClientUpdates], clients: Tensor, sent: TensorDict, *how: Any
    ) -> ClientUpdates:
        """Return in one what the clients answer, of which private entries are no part."""
        assert self.callback is not None
        names = self.callback.sent_names
        parts = self.each(work, clients, sent, *how)
        states = [across(part.states.select(*names)) for part in parts]
        return ClientUpdates(
            torch.cat([clients[:0], *(part.clients for part in parts)]),
            torch.cat([self.server.expand(0, names, 0), *states]),
            torch.cat([clients[:0], *(part.num_samples for part in parts)]),
            [failure for part in parts for failure in part.failures],
            merge_logs(part.logs for part in parts),
            bytes_saved=max([0, *(part.bytes_saved for part in parts)]),
        )

    def train_chunk(
        self, *asked: Any, epochs: int | None = None, keep: bool = True
    ) -> ClientUpdates:
        return self.updates(Clients.train_chunk, *asked, epochs, keep)

    def gradients_of_chunk(self, *asked: Any, batches: int | None = None) -> ClientUpdates:
        return self.updates(Clients.gradients_of_chunk, *asked, batches)

    def train_aside(
        self,
        clients: Tensor,
        sent: TensorDict,
        round_index: int | None = None,
        epochs: int | None = None,
        returns: Collection[str] | None = None,
    ) -> ClientUpdates:
        found = self.updates(Clients.train_aside, clients, sent, round_index, epochs, returns)
        names = found.states.keys() if returns is None else returns
        return replace(found, states=found.states.select(*names))

    def losses(self, clients: Tensor, sent: TensorDict, split: Split = "train") -> Tensor:
        return torch.cat(self.each(Clients.losses, clients, sent, split))

    def judged(self, clients: Tensor, sent: TensorDict) -> TensorDict:
        return torch.cat(self.each(Clients.judged, clients, sent))

    def has_memory(self, clients: Tensor) -> Tensor:
        nothing = TensorDict({}, batch_size=[len(clients)])
        has = self.each(lambda machine, ids, _: machine.has_memory(ids), clients, nothing)
        return torch.cat([torch.empty(0, dtype=torch.bool), *has])


def across(states: TensorDict) -> TensorDict:
    """Return what arrives of a stack that is sent over a wire."""
    wire = io.BytesIO()
    torch.save({name: value.clone() for name, value in states.items()}, wire)
    wire.seek(0)
    return TensorDict(torch.load(wire, weights_only=True), batch_size=states.batch_size)


def ask_remote_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have federations from now on ask clients on machines of their own."""
    read = ClientSetup.samples

    def samples(setup: ClientSetup, client: int, split: Split) -> list[Tensor]:
        judged = split in ("val", "test")  # by the federation, and not by a server callback
        assert judged or [client] == HERE, f"client {client}'s samples at {HERE or 'the server'}"
        return read(setup, client, split)

    monkeypatch.setattr(ClientSetup, "samples", samples)
    monkeypatch.setattr("pflight.federation.Clients", RemoteClients)
