"""What a client finds behind ``self.trainer`` while it trains inside a federation.

There is no Trainer per client: building one costs more than a small client's whole training. This
object answers what a LightningModule asks its trainer for, so that ``self.optimizers()``,
``self.lr_schedulers()``, ``self.manual_backward()``, ``self.clip_gradients()``, ``self.log()`` and
``self.current_epoch`` work as they do under a Trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any, NoReturn

import lightning as L
import torch
from lightning.pytorch.core.optimizer import (
    LightningOptimizer,
    _configure_optimizers,
    _configure_schedulers_automatic_opt,
    _configure_schedulers_manual_opt,
)
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import Metric

from pflight.errors import ConfigurationError
from pflight.history import Logs, add_logs

FOREIGN = "its configure_optimizers() gives an optimizer of parameters that are not its own"


def steps_others(optimizer: Optimizer, own: Container[int]) -> bool:
    """Return whether an optimizer has parameters other than a client's own, by their ``id``."""
    return any(id(p) not in own for group in optimizer.param_groups for p in group["params"])


class LocalTrainer:
    """The trainer of the client that is trained at the moment; one object serves them all.

    Args:
        client: The module that is trained, one client after the other.
        precision: The precision plugin of the federation's Trainer.
        device: Where the client trains.
    """

    logger = None
    loggers: tuple[()] = ()
    callbacks: tuple[()] = ()
    gradient_clip_val = None
    gradient_clip_algorithm = None
    accumulate_grad_batches = 1
    training = True
    validating = testing = predicting = sanity_checking = False
    world_size = num_nodes = num_devices = 1
    global_rank = local_rank = node_rank = 0
    is_global_zero = True

    def __init__(self, client: L.LightningModule, precision: Precision) -> None:
        self.lightning_module = self.model = client
        self.precision_plugin = precision
        self._own = set(map(id, client.parameters()))
        self.start(max_epochs=0, num_batches=0)

    def start(
        self, max_epochs: int | None, num_batches: int, max_batches: int | None = None
    ) -> None:
        """Forget the previous client; train the next for some epochs or some batches.

        Args:
            max_epochs: Local epochs, or ``None`` for as many as ``max_batches`` takes.
            num_batches: Batches in one epoch.
            max_batches: Batches in all.
        """
        self.max_epochs = max_epochs
        self.num_training_batches = num_batches
        self.max_batches = max_batches
        self.current_epoch = 0
        self.global_step = 0
        self.batches_seen = 0
        self.without_loss = 0
        self.batch_size = 0
        self.optimizers: list[Optimizer] = []
        self.lr_scheduler_configs: list[LRSchedulerConfig] = []
        self._wrapped: list[LightningOptimizer] = []
        self.logs: Logs = {}
        self.callback_metrics: dict[str, Tensor] = {}
        self._epoch_logs: Logs = {}

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"a client that trains inside a federation has no Trainer of its own: "
            f"`trainer.{name}` is not available to it"
        )

    @property
    def estimated_stepping_batches(self) -> int:
        """Batches of this client's whole local training."""
        if self.max_batches is not None:
            return self.max_batches
        return (self.max_epochs or 0) * self.num_training_batches

    @property
    def finished(self) -> bool:
        """Whether all epochs or batches have been trained on."""
        if self.max_batches is not None:
            return self.batches_seen >= self.max_batches
        return self.max_epochs is not None and self.current_epoch >= self.max_epochs

    def step_schedulers(self, interval: str, index: int, plateau: bool = False) -> None:
        """Step the schedulers that are due, those of ``ReduceLROnPlateau`` apart from the others.

        Args:
            interval: ``"step"`` or ``"epoch"``.
            index: Number of the batch in its epoch, or of the epoch, from 0.
            plateau: Whether it is the turn of those that wait for a metric.
        """
        if not self.lightning_module.automatic_optimization:
            return
        for config in self.lr_scheduler_configs:
            due = config.interval == interval and (index + 1) % config.frequency == 0
            if due and config.reduce_on_plateau == plateau:
                metric = self._monitored(config) if plateau else None
                self.lightning_module.lr_scheduler_step(config.scheduler, metric)

    def end_epoch(self) -> None:
        """Step the schedulers that wait for a metric of the epoch, and count the epoch."""
        self.callback_metrics |= {
            n: total / count for n, (total, count) in self._epoch_logs.items()
        }
        self._epoch_logs = {}
        self.step_schedulers("epoch", self.current_epoch, plateau=True)
        self.current_epoch += 1

    # What the client's own methods reach through `trainer.strategy`.

    @property
    def strategy(self) -> LocalTrainer:
        """The object itself: a client has no strategy of its own."""
        return self

    @property
    def _lightning_optimizers(self) -> list[LightningOptimizer]:
        if not self._wrapped:
            self._wrapped = [
                LightningOptimizer._to_lightning_optimizer(optimizer, self)  # type: ignore[arg-type]
                for optimizer in self.optimizers
            ]
        return self._wrapped

    def configure_optimizers(self) -> None:
        """Ask the client for its optimizers and schedulers, in any form that Lightning takes."""
        configured = self.lightning_module.configure_optimizers()
        if isinstance(configured, Optimizer):
            self.optimizers = [configured]
            self._check_optimizers()
            return
        if configured is None:
            raise ConfigurationError("the client's configure_optimizers() returned None")
        self.optimizers, schedulers, monitor = _configure_optimizers(configured)  # type: ignore[arg-type]
        self._check_optimizers()
        if self.lightning_module.automatic_optimization:
            if len(self.optimizers) > 1:
                raise ConfigurationError(
                    "a client with several optimizers needs automatic_optimization = False"
                )
            self.lr_scheduler_configs = _configure_schedulers_automatic_opt(schedulers, monitor)
        else:
            self.lr_scheduler_configs = _configure_schedulers_manual_opt(schedulers)

    def _check_optimizers(self) -> None:
        if any(steps_others(optimizer, self._own) for optimizer in self.optimizers):
            raise RuntimeError(FOREIGN)

    def backward(
        self, loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> None:
        """Run the backward pass with the client's hooks around it."""
        client = self.lightning_module
        client.on_before_backward(loss)
        client.backward(loss, *args, **kwargs)
        client.on_after_backward()

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Step an optimizer of a manually optimized client, with the client's hook before it."""

        def closure_and_hook() -> Any:
            result = closure()
            self.lightning_module.on_before_optimizer_step(optimizer)
            return result

        self.global_step += 1
        return optimizer.step(closure=closure_and_hook, **kwargs)

    def _monitored(self, config: LRSchedulerConfig) -> Tensor:
        if config.monitor not in self.callback_metrics:
            raise ConfigurationError(
                f"the client's ReduceLROnPlateau monitors {config.monitor!r}, which it did not "
                f"log; it logged {sorted(self.callback_metrics)}"
            )
        return self.callback_metrics[config.monitor]

    # `self.log(...)` of the client.

    def log(
        self,
        name: str,
        value: Tensor | float | Metric,
        *_: Any,
        on_epoch: bool | None = None,
        batch_size: int | None = None,
        **__: Any,
    ) -> None:
        """Add a value to this client's sample-weighted mean of that name.

        A scheduler that monitors it sees the last value or, with ``on_epoch``, the epoch's mean.
        """
        if isinstance(value, Metric):
            value = value.compute() if value._forward_cache is None else value._forward_cache
        count = batch_size or self.batch_size or 1
        value = value.detach() if isinstance(value, Tensor) else torch.tensor(value)
        if value.numel() != 1:
            raise ValueError(f"it logs {name!r} of shape {list(value.shape)}, and not one number")
        added = {name: (value * count, count)}
        add_logs(self.logs, added)
        self.callback_metrics[name] = value
        if on_epoch:
            add_logs(self._epoch_logs, added)

    def log_dict(
        self, dictionary: Mapping[str, Tensor | float | Metric], *_: Any, **kwargs: Any
    ) -> None:
        """Log several values."""
        for name, value in dictionary.items():
            self.log(name, value, **kwargs)
