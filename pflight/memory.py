"""What each client keeps between the rounds in which it takes part."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from tensordict import TensorDict
from torch import Tensor

from .state import entries


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
        self._slots: dict[str, dict[int, dict[str, Tensor]]] = {}

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

    def state_dict(self) -> dict[str, dict[int, dict[str, Tensor]]]:
        """Return all slots as plain dicts of tensors, keyed by slot, client and name."""
        return {slot: dict(clients) for slot, clients in self._slots.items()}

    def load_state_dict(
        self,
        state: Mapping[str, Mapping[int, Mapping[str, Tensor]]],
        owned: Collection[int] | None = None,
    ) -> None:
        """Replace all slots by ``state``, keeping only the clients in ``owned`` if it is given."""
        self._slots = {
            slot: {
                int(client): {name: value.cpu() for name, value in kept.items()}
                for client, kept in clients.items()
                if owned is None or int(client) in owned
            }
            for slot, clients in state.items()
        }
