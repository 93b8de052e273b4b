"""What each client keeps between the rounds in which it takes part."""

from __future__ import annotations

from collections.abc import Collection

import torch
from tensordict import TensorDict
from torch import Tensor

from .distributed import gather, gather_to_first
from .state import entries

Slots = dict[str, dict[int, dict[str, Tensor]]]
"""Slot to client to name to tensor."""


class ClientMemory:
    """Named slots of states, one per client, held in RAM on the rank that owns the client.

    A slot is created for a client the first time it is written; until then reading it gives the
    default. Values are copied in and live on the CPU.

    Example:
        >>> memory = ClientMemory()
        >>> memory.write("private", torch.tensor([4]), TensorDict({"w": torch.ones(1, 2)}, [1]))
        >>> default = TensorDict({"w": torch.zeros(2, 2)}, [2])
        >>> memory.read("private", torch.tensor([4, 5]), default)["w"]
        tensor([[1., 1.],
                [0., 0.]])
    """

    def __init__(self) -> None:
        self._slots: Slots = {}

    def write(self, slot: str, clients: Tensor, states: TensorDict) -> None:
        """Keep the states of a stack ``[C]`` for the clients ``[C]``, replacing what was kept."""
        kept = self._slots.setdefault(slot, {})
        columns = {name: leaf.detach().cpu() for name, leaf in entries(states)}
        for row, client in enumerate(clients.tolist()):
            kept[client] = {name: column[row].clone() for name, column in columns.items()}

    def read(self, slot: str, clients: Tensor, default: TensorDict) -> TensorDict:
        """Return what the clients ``[C]`` kept; an unwritten slot gives its row of ``default``."""
        kept = self._slots.get(slot, {})
        ids = clients.tolist()
        if not any(client in kept for client in ids):
            return default
        columns = {
            name: torch.stack(
                [
                    kept[client][name].to(leaf.device) if client in kept else leaf[row]
                    for row, client in enumerate(ids)
                ]
            )
            for name, leaf in entries(default)
        }
        return TensorDict(columns, batch_size=[len(ids)])

    def seen(self, slot: str, clients: Tensor) -> Tensor:
        """Return a mask ``[C]`` of the clients whose slot has been written."""
        kept = self._slots.get(slot, {})
        return torch.tensor([client in kept for client in clients.tolist()], dtype=torch.bool)

    def state_dict(self) -> Slots:
        """Return all slots as plain dicts of tensors, keyed by slot, client and name."""
        return {slot: dict(clients) for slot, clients in self._slots.items()}

    def state_of_all_ranks(self, first_only: bool = False) -> Slots:
        """Return the slots of all ranks together; all ranks have to call it.

        Args:
            first_only: Only rank 0 needs the result: the others get their own slots.
        """
        states = gather_to_first(self.state_dict()) if first_only else gather(self.state_dict())
        merged: Slots = {}
        for rank, state in enumerate(states):
            for slot, clients in state.items():
                kept = merged.setdefault(slot, {})
                for client, entry in clients.items():
                    if client not in kept or client % len(states) == rank:  # the owner knows best
                        kept[client] = entry
        return merged

    def load_state_dict(self, state: Slots, clients: Collection[int] | None = None) -> None:
        """Replace all slots by ``state``, keeping only those of ``clients`` if it is given."""
        self._slots = {
            slot: {
                int(client): {name: value.cpu() for name, value in kept.items()}
                for client, kept in held.items()
                if clients is None or int(client) in clients
            }
            for slot, held in state.items()
        }
