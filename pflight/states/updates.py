"""An engine's results of local training or evaluation of some clients."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from textwrap import shorten
from typing import Any, NamedTuple

from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from tensordict import TensorDict
from torch import Tensor

from pflight.errors import Stopped, described, said_by
from pflight.history import Logs

STOPS = (KeyboardInterrupt, Stopped, SIGTERMException, MisconfigurationException)
"""Exceptions that end a run wherever they are raised: a signal, or a mistake of no single client.
Any other one, even ``SystemExit``, is the failure of the client that raises it."""
_REASON = 500  # characters


@dataclass(frozen=True)
class ClientFailure:
    """The failure of a client: it raised, or its result is not finite."""

    client: int
    reason: str
    error: BaseException | None = None

    @classmethod
    def of(cls, client: int, error: BaseException) -> ClientFailure:
        """Return the failure of a client that raised."""
        said, lines = described(error), said_by(error).splitlines()
        if "DataLoader worker process" in said:  # its last line is the error there
            said = lines[-1]
        return cls(client, shorten(said, _REASON, placeholder=" ..."), error)

    def forget_frames(self) -> None:
        """Drop the error's frames. They hold the client's copy of the module."""
        error, seen = self.error, set[int]()
        while error is not None and id(error) not in seen:
            seen.add(id(error))
            error.__traceback__ = None
            error = error.__cause__ or error.__context__


class Kept(NamedTuple):
    """Memory of some clients from earlier participations."""

    states: TensorDict
    """Memory ``[C]``. A client without memory has the entries of its start state."""
    seen: Tensor
    """Mask ``[C]`` of the clients with memory."""


@dataclass(frozen=True)
class ClientUpdates:
    """The clients of a chunk that answered, and their results.

    Attributes:
        clients: Ids ``[C]``, ascending.
        states: Stacked states ``[C]``: the trained models or, from an engine's ``gradients``, the
            gradients under the parameters' names and the updated buffers under theirs.
        num_samples: Number of training samples of each client ``[C]``.
        failures: The clients without a result.
        logs: Logged values of the clients: name to (sum over samples, number of samples).
        kept: New memory of the clients ``[C]``, if their client method keeps one.
        bytes_saved: Number of bytes that a transform saves in each client's message.
        changes: The updates ``[C, d]`` in a smaller message; see
            :class:`~pflight.transforms.Pipeline`.
    """

    clients: Tensor
    states: TensorDict
    num_samples: Tensor
    failures: list[ClientFailure] = field(default_factory=list)
    logs: Logs = field(default_factory=dict)
    kept: TensorDict | None = None
    bytes_saved: int = 0
    changes: Tensor | None = None

    def where(self, mask: Tensor) -> ClientUpdates:
        """Return the updates of some of the clients, by a mask ``[C]``."""
        if mask.all():
            return self
        rows = mask.to(self.clients.device).nonzero().flatten()
        return replace(
            self,
            clients=self.clients[rows],
            states=self.states[rows],
            num_samples=self.num_samples[rows.cpu()],
            kept=None if self.kept is None else self.kept[rows],
            changes=None if self.changes is None else self.changes[rows],
        )


Predictions = list[tuple[int, list[Any]]]
"""Pairs of a client's id and the results of its own ``predict_step`` for each batch."""


class Evaluation(NamedTuple):
    """The outputs of some clients' models on their own samples, ``B`` samples in all."""

    clients: Tensor
    """The client of each sample ``[B]``."""
    outputs: Tensor
    """The models' outputs ``[B, ...]``, such as logits."""
    targets: Tensor
    """The true values ``[B, ...]``, such as classes."""
    losses: Tensor
    """The loss of each sample ``[B]``."""

    @property
    def logits(self) -> Tensor:
        """The outputs, if they are logits ``[B, num_classes]``."""
        return self.outputs
