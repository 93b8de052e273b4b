"""Parts of a client's Trainer that replace Lightning's own, and its penalties of manual steps."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator
from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import Metric

from pflight.errors import ConfigurationError
from pflight.history import Logs, add_logs
from pflight.metrics.pooling import Seen, is_undefined, own_value, value_of

Step = Callable[[Callable[[], Any], Any], Any]
"""Gets the module's own training step and its batch; returns the output to use instead."""


_OF_AN_EPOCH = {"on_train_start", "on_train_epoch_start", "on_train_epoch_end", "on_train_end"}
Penalty = Callable[[], Tensor | None]
"""Returns the scalar to add to the loss, or nothing."""


class LocalStrategy(SingleDeviceStrategy):
    """Lets a client method change every training step, outside of the user's module."""

    def __init__(self, precision: Precision, device: torch.device) -> None:
        accelerator = CUDAAccelerator() if device.type == "cuda" else CPUAccelerator()
        super().__init__(device, accelerator=accelerator, precision_plugin=precision)
        self.step: Step = lambda own_step, _: own_step()
        self.batch_size = 0

    def own_step(self, batch: Any, *args: Any) -> Any:
        """Run the module's training step."""
        self._note_batch_size()
        return super().training_step(batch, *args)

    def training_step(self, batch: Any, *args: Any) -> Any:
        """Run the module's training step as the client method changes it."""
        return self.step(lambda: self.own_step(batch, *args), batch)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's validation step."""
        self._note_batch_size()
        return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's test step."""
        self._note_batch_size()
        return super().test_step(*args, **kwargs)

    def _note_batch_size(self) -> None:
        assert self.lightning_module is not None
        results = self.lightning_module.trainer._results
        if results is not None:  # Lightning could only guess the size of a user's own batch
            results.batch_size = self.batch_size


class Results(_ResultCollection):
    """Holds the logged values of a module, and their sample-weighted sums during training.

    The weight of a step's value is the step's batch size. The weight of an epoch's value is the
    number of the client's samples. A metric object counts with its result at the end of an epoch.

    Attributes:
        logs: The sums.
        num_samples: Number of the client's samples.
        directions: Whether higher is better, by name; only for metric objects that know it.
        seen: In an evaluation, the states of the metric objects by name.
    """

    def __init__(self, training: bool) -> None:
        super().__init__(training)
        self.logs: Logs = {}
        self.num_samples = 1
        self.directions: dict[str, bool] = {}
        self.seen: dict[str, Seen] = {}

    def log(self, fx: str, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Take a value as Lightning does, and add it to the sums."""
        super().log(fx, name, value, *args, **kwargs)
        if isinstance(value, Metric):
            if value.higher_is_better is not None:
                self.directions[name] = value.higher_is_better
        elif self.training and isinstance(value, Tensor):
            count = kwargs.get("batch_size") or self.batch_size or 1
            self._note(name, value, self.num_samples if fx in _OF_AN_EPOCH else count)

    def reset(self, metrics: bool | None = None, fx: str | None = None) -> None:
        """Add the metric objects' results to the sums, then forget values as Lightning does."""
        for item in self.values() if self.training and metrics is not False else ():
            known = not item.is_tensor and item.value.update_called
            if known and fx in (None, item.meta.fx) and not is_undefined(item.value):
                self._note(item.meta.name, value_of(item.value), self.num_samples)
        super().reset(metrics, fx)

    def _get_cache(self, item: Any, on_step: bool) -> Tensor | None:  # type: ignore[override]
        """Return an item's value as Lightning does, except for metrics with an own value."""
        of_an_epoch = not (self.training or on_step or item.is_tensor) and item.meta.on_epoch
        if of_an_epoch and item._computed is None:  # only once: Lightning asks several times
            self.seen[item.meta.name] = Seen.by(item.value)
            item._computed = own_value(item.value)
        return super()._get_cache(item, on_step)

    def _note(self, name: str, value: Any, count: int) -> None:
        if isinstance(value, Tensor) and value.numel() == 1:
            add_logs(self.logs, {name: (value.detach() * count, count)})


class Feed(_DataFetcher):
    """Gives Lightning's loop the one batch that was offered."""

    def offer(self, batch: Any, last: bool) -> None:
        """Offer the next batch to the loop."""
        self._batch, self.done = batch, last

    def __iter__(self) -> Feed:
        return self

    def __next__(self) -> Any:
        return self._batch, 0, 0


class Loader:
    """A loader of known length, so that Lightning need not guess it."""

    def __init__(self, batches: Iterator[Any], count: int) -> None:
        self._batches, self._count = batches, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        return self._batches


@contextmanager
def needing_optimizers(module: L.LightningModule) -> Iterator[None]:
    """Raise if a copy gives no optimizer. Lightning would only warn, once for each client."""
    given, is_own = module.configure_optimizers, "configure_optimizers" in vars(module)

    def asked() -> Any:
        optimizers = given()
        if optimizers is None and module.automatic_optimization:
            raise ConfigurationError(
                f"{type(module).__name__}.configure_optimizers() gives no optimizer, without which "
                "a client learns nothing"
            )
        return optimizers

    module.configure_optimizers = asked  # type: ignore[method-assign]
    try:
        yield
    finally:
        del module.configure_optimizers
        if is_own:
            module.configure_optimizers = given  # type: ignore[method-assign]


@contextmanager
def quiet() -> Iterator[None]:
    """Create a Trainer without messages on the machine. The federation's Trainer has given them."""
    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def penalise(optimizer: Optimizer, penalty: Penalty) -> None:
    """Add a penalty's gradient to an optimizer's steps: after its closure, if it has one."""

    def penalised(
        _: Optimizer, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        closure = options.get("closure") or next(iter(args[1:]), None)
        if closure is None:
            _add_gradient(optimizer, penalty)
            return None

        def with_penalty() -> Any:
            output = closure()
            _add_gradient(optimizer, penalty)
            return output

        return args[:1], {**options, "closure": with_penalty}

    optimizer.register_step_pre_hook(penalised)


@torch.enable_grad()
def _add_gradient(optimizer: Optimizer, penalty: Penalty) -> None:
    """Add the gradient of a penalty to the gradients of an optimizer's parameters."""
    value = penalty()
    if value is None:
        return
    parameters = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad
    ]
    gradients = torch.autograd.grad(value, parameters, allow_unused=True)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None:
            held = parameter.grad
            parameter.grad = gradient if held is None else held + gradient
