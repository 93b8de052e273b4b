"""The server optimizer and its schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from pflight.clients import Clients
from pflight.errors import ConfigurationError, described
from pflight.options import check_optimizer

Schedule = Callable[[Optimizer], LRScheduler | ReduceLROnPlateau | None]


def build_optimizer(
    parameters: Iterable[nn.Parameter],
    build: Callable[[Iterable[nn.Parameter]], Optimizer],
    schedule: Schedule,
) -> tuple[Optimizer, LRScheduler | ReduceLROnPlateau | None]:
    """Build the server optimizer and, if there is one, its scheduler.

    Raises:
        ConfigurationError: If they can't be built.
    """
    try:
        optimizer = build(list(parameters))
        check_optimizer(optimizer)
        return optimizer, schedule(optimizer)
    except (TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigurationError(f"the server's optimizer can't be built: {reason}") from error


def monitored(scheduler: object) -> str | None:
    """Return the metric that a scheduler watches, or ``None``."""
    plateau = isinstance(scheduler, ReduceLROnPlateau)
    return getattr(scheduler, "monitor", "val/macro_acc") if plateau else None


def step_schedule(scheduler: Any) -> None:
    """Step a scheduler at the end of a round, unless it watches a metric.

    Raises:
        ConfigurationError: If the scheduler can't step.
    """
    if isinstance(scheduler, LRScheduler) and monitored(scheduler) is None:
        try:
            scheduler.step()
        except Exception as error:
            raise ConfigurationError(
                f"server_scheduler: {type(scheduler).__name__} can't step: {described(error)}"
            ) from error


class WaitingSchedule(L.Callback):
    """Steps a server's scheduler that watches a metric, when the round has the metric.

    It also checks the server optimizer after a checkpoint was loaded.

    Args:
        clients: The clients with the history of the metrics.
    """

    def __init__(self, clients: Clients) -> None:
        self.clients = clients

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Raise if the checkpoint has the state of an optimizer of another class.

        Raises:
            ConfigurationError: Naming the missing options.
        """
        for optimizer in trainer.optimizers:
            # When PyTorch loads a state, it adds "differentiable" to the defaults only.
            expected = optimizer.defaults.keys() - {"differentiable"}
            if missing := sorted(expected - optimizer.param_groups[0].keys()):
                raise ConfigurationError(
                    f"the checkpoint does not fit this federation: its server optimizer is not a "
                    f"{type(optimizer).__name__}, which has {', '.join(missing)}"
                )

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Step the scheduler with the round's metric."""
        scheduler: Any = pl_module.lr_schedulers()
        values = self.clients.history[-1].metrics
        if (monitor := monitored(scheduler)) in values:
            scheduler.step(values[monitor])

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Warn if no round had the metric."""
        monitor, history = monitored(pl_module.lr_schedulers()), self.clients.history
        if monitor and history and not any(monitor in entry.metrics for entry in history):
            rank_zero_warn(
                f"no round had {monitor!r}, which the server's ReduceLROnPlateau watches: the step "
                "size was never reduced"
            )
