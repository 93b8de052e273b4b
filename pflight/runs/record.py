"""A checkpoint's record of a federation, besides the server's models and their optimizer."""

from __future__ import annotations

import logging
from functools import cached_property
from typing import Any

import torch
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_only

from pflight.adapters.pairs import scales_of
from pflight.clients import Clients
from pflight.engines.choice import Choice
from pflight.errors import ConfigurationError
from pflight.history import Journal, Traffic, load_history
from pflight.options import described
from pflight.server_callback import ServerCallback
from pflight.states.frozen import check_frozen, digests_of
from pflight.states.head import marked
from pflight.states.server_models import check_finite

from .checks import check_modules, check_record, other_options
from .distributed import owned
from .same_data import difference, record_of

_log = logging.getLogger("lightning.pytorch.pflight")


class RunRecord:
    """Writes and reads the record for a resumed run, as tensors and primitives.

    Args:
        clients: The clients of the federation.
        allow_other_data: Whether a run may be resumed with other data of as many clients.

    Attributes:
        choice: The engine and the reason of its choice; ``None`` before it is known.
    """

    def __init__(self, clients: Clients, allow_other_data: bool) -> None:
        self.clients = clients
        self.allow_other_data = allow_other_data
        self.choice: Choice | None = None
        self._journal = Journal()
        self._data: dict[str, Any] | None = None
        self._frozen: dict[str, str] | None = None

    def save(self, callback: ServerCallback) -> dict[str, Any]:
        """Return the record."""
        clients = self.clients
        check_finite(callback.state_dict(), type(callback).__name__, clients.last_round)
        return {
            **self._must_agree(callback),
            "modifiers": self._modifiers(callback),
            "engine": self._engine(),
            "head": marked(clients.module),
            "frozen": self._digests(),
            "history": self._journal.dump(clients.history),
            "memory": clients.memory.save(),
            "data": self._record_of_data(),
        }

    def check(self, checkpoint: dict[str, Any], callback: ServerCallback, goes_on: bool) -> None:
        """Raise unless a checkpoint belongs to this federation. Warn of different options.

        Args:
            checkpoint: The checkpoint.
            callback: The server callback of this run.
            goes_on: Whether the clients will continue training, with the data of this run.

        Raises:
            ConfigurationError: Naming the difference.
        """
        record = checkpoint.get("pflight", {})
        check_record(record, self._must_agree(callback))
        saved, here = record.get("modifiers", []), self._modifiers(callback)
        if saved != here:
            raise ConfigurationError(
                f"the checkpoint does not fit this federation: it was made with modifiers "
                f"{' and '.join(saved) or 'none'}, and here they are {' and '.join(here) or 'none'}"
            )
        frozen = record.get("frozen", {})
        if any(f"server.0.{name}" not in checkpoint["state_dict"] for name in frozen):
            check_frozen(frozen, self._digests())
        check_modules(checkpoint["state_dict"], callback.modules, type(callback).__name__)
        if goes_on:
            self._check_same_data(record.get("data"))
        options = record.get("options", {})
        if others := other_options(type(callback).__name__, options, callback._given):
            rank_zero_only(_log.warning)(others)

    def keep_engine(self, record: dict[str, Any], strategy: Strategy) -> None:
        """Keep the engine of the run's start, even if the rule would now choose another."""
        here, saved = self._engine(), record.get("engine")
        if saved in (None, here):
            return
        at_once = saved["clients_at_once"] if saved["name"] == "vectorized" else None
        reason = "as in the checkpoint"
        self.choice = self.clients.choose_engine(saved["name"], at_once, strategy, None, reason)

    def load(self, record: dict[str, Any]) -> None:
        """Load the history and this rank's client memory."""
        clients = self.clients
        clients.history[:] = load_history(record["history"])
        clients.traffic = Traffic(clients.history)
        if clients.history:
            clients.current.entry = clients.history[-1]  # named in messages
        if clients.data is not None:
            clients.at_round(clients.last_round)
        mine = owned(torch.arange(clients.num_clients)).tolist()
        clients.memory.load(record["memory"], clients=set(mine))

    def _must_agree(self, callback: ServerCallback) -> dict[str, Any]:
        clients = self.clients
        return {
            "callback": type(callback).__name__,
            "options": {name: described(value) for name, value in callback._given.items()},
            "num_clients": clients.num_clients,
            "server_models": len(clients.server),
            "layout": clients.layout.describe(),
            "scales": self._scales,
        }

    @staticmethod
    def _modifiers(callback: ServerCallback) -> list[str]:
        return [repr(one) for one in callback.active_modifiers]

    def _engine(self) -> dict[str, Any] | None:
        """Return the choice of the engine. A run's last bits depend on it."""
        if self.choice is None:
            return None
        return {"name": self.choice.engine, "clients_at_once": self.choice.chunk}

    @cached_property
    def _scales(self) -> dict[str, float]:
        """The scales of low-rank adapters. They are read once, not with each checkpoint."""
        return scales_of(self.clients.module)

    def _digests(self) -> dict[str, str]:
        """Return the digests of the frozen weights. They are computed once."""
        if self._frozen is None:
            self._frozen = digests_of(self.clients.layout)
        return self._frozen

    def forget_data(self) -> None:
        """Forget the record of the data, since they are about to change."""
        self._data = None

    def _record_of_data(self) -> dict[str, Any] | None:
        if self._data is None and self.clients.data is not None:
            self._data = record_of(self.clients.data)
            self.clients.at_round(self.clients.data_round)
        return self._data

    def _check_same_data(self, saved: dict[str, Any] | None) -> None:
        """Raise if a run would be resumed with other data and this is not allowed."""
        here = self._record_of_data()
        if saved and here and (renewed := [*self.clients.renewed]):
            known = saved["fingerprint"].clone()
            known[renewed] = here["fingerprint"][renewed]
            saved = {**saved, "fingerprint": known}
        differing = difference(saved, here, self.clients.numbered) if saved and here else None
        if differing and not self.allow_other_data:
            raise ConfigurationError(
                f"the checkpoint was made with other data: {differing}; give the data that the run "
                "began with or, if you mean to change them, allow_other_data=True "
                f"(--model.allow_other_data true){self.clients.if_data_are_lost}"
            )
        if differing:
            rank_zero_only(_log.info)(
                f"continuing with other data than the checkpoint's: {differing}"
            )
