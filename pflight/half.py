"""The client half of an algorithm: what it adds to the training of a client's own module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from lightning import LightningModule
from torch import Tensor

from .errors import ConfigurationError


PERSONAL = "half.personal."
"""What the names of a client's personal copy of its module begin with."""


class LocalClient(Protocol):
    """One client in local training, as an engine hands it to a :class:`Half`.

    Tensors are those of one client, also where an engine trains many at once.
    """

    module: LightningModule
    """A copy of the client module, in which this client trains."""
    weights: Mapping[str, Tensor]
    """Its trainable parameters, by their names in ``module.state_dict()``."""
    anchor: Mapping[str, Tensor] | None
    """The same parameters as the server sent them; ``None`` in fine-tuning."""
    memory: Mapping[str, Tensor] | None
    """What the half remembered after this client's last participation; ``None`` at the first."""
    num_samples: Tensor
    """Number of this client's training samples."""
    mean_samples: Tensor
    """Mean number of training samples over all clients that may train."""

    def task_loss(self, batch: Any) -> Tensor:
        """Return the scalar loss of the client's own module on a batch."""

    def task_loss_and_logits(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the module's loss on a batch, and what its ``forward`` gave on the way."""

    def logits_with(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return what ``forward`` gives for the same inputs with other tensors.

        Without gradients and in evaluation mode, for the inputs of the last
        :meth:`task_loss_and_logits`.
        """

    def state(self) -> dict[str, Tensor]:
        """Return the tensors of the client's model, by name."""


class Half:
    """What an algorithm asks of its clients, beside their own module; this one asks for nothing.

    A half holds options alone, so that it can be pickled, written in YAML and shared by all
    clients. Nothing of it is mixed into the user's module: the engine calls it from outside. A
    subclass overrides what differs from plain training, most often :meth:`penalty`.

    Attributes:
        keeps_memory: Whether clients remember something from one participation to the next.
        judged_by_memory: Whether a client is judged by the model that it remembers.
        personal: The half by which each client trains a second, personal copy of its module on the
            same batches, by which it is judged and which never travels; ``None`` for no copy.
    """

    keeps_memory: bool = False
    judged_by_memory: bool = False
    personal: Half | None = None

    def check(self, module: LightningModule) -> None:
        """Raise if a module lacks what this half needs.

        Raises:
            ConfigurationError: In one line, before the start.
        """

    def penalty(self, c: LocalClient) -> Tensor | None:
        """Return a scalar that is added to the loss, a function of tensors; ``None`` for none."""
        return None

    def loss(self, c: LocalClient, batch: Any) -> Tensor:
        """Return the scalar that the client minimises on a batch: its own loss plus the penalty."""
        loss, penalty = c.task_loss(batch), self.penalty(c)
        return loss if penalty is None else loss + penalty

    def remember(self, c: LocalClient) -> Mapping[str, Tensor]:
        """Return what a client keeps after its training, by default its whole model."""
        return c.state()

    @property
    def only_adds(self) -> bool:
        """Whether it adds a penalty and nothing else, which manual optimization allows."""
        return type(self).loss is Half.loss


def check_manual(half: Half, module: LightningModule) -> None:
    """Raise if a module that optimizes manually meets a half that has a loss of its own.

    Raises:
        ConfigurationError: Naming both.
    """
    if not module.automatic_optimization and not half.only_adds:
        raise ConfigurationError(
            f"{type(half).__name__} replaces the loss of its clients, which "
            f"{type(module).__name__} with manual optimization does not hand out"
        )
