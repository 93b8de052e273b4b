"""One real Trainer that trains and evaluates client after client, stepped by hand.

Lightning's own loops run each batch. So hooks, optimizers, schedulers, manual optimization,
``self.log`` and ``self.trainer`` work as under a module's own Trainer. Lightning's other work (data
loaders, signals, checkpoints, set-up) is done once, not once for each client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeVar

import lightning as L
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.loops import _EvaluationLoop
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from lightning.pytorch.loops.prediction_loop import _PredictionLoop
from lightning.pytorch.plugins import Precision
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.trainer.call import _call_lightning_module_hook
from lightning.pytorch.trainer.connectors.data_connector import _DataHookSelector
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.optim import Optimizer

from pflight.errors import ConfigurationError
from pflight.history import Logs
from pflight.local_client import Batches
from pflight.metrics.pooling import Seen
from pflight.states.head import step_extra

from .lightning_parts import (
    Feed,
    Loader,
    LocalStrategy,
    Penalty,
    Results,
    Step,
    needing_optimizers,
    penalise,
    quiet,
)

_BATCH_HOOKS = "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"
STEP_HOOKS = (
    *_BATCH_HOOKS,
    "on_train_batch_start",
    "on_before_zero_grad",
    "optimizer_zero_grad",
    "on_before_backward",
    "backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "optimizer_step",
    "on_train_batch_end",
)
"""Hooks of a module around a step, apart from gradient clipping."""
LossT = TypeVar("LossT")


class ModuleTrainer:
    """Trains copies of a module, one after the other.

    Args:
        precision: The precision plugin of the federation's Trainer.
        device: Where the copies train.

    Attributes:
        trainer: The ``self.trainer`` of the copies.
        penalty: Returns the addition to the loss under manual optimization.
        logs: Logged values of the copy's training: name to (sum over samples, number of samples).
    """

    def __init__(self, precision: Precision, device: torch.device) -> None:
        self._strategy = LocalStrategy(precision, device)
        self._bare: bool | None = None
        self._only_moves = False  # whether a batch is only moved before a step
        self.penalty: Penalty = lambda: None
        with quiet():
            self.trainer = L.Trainer(
                devices=[device.index or 0] if device.type == "cuda" else 1,
                strategy=self._strategy,
                plugins=[LightningEnvironment()],
                logger=False,
                limit_val_batches=0,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
        # Frozen modules are in evaluation mode, and a filter against Lightning's hint at them would
        # make Python repeat all other warnings.
        self.trainer.fit_loop._warn_if_modules_in_eval_mode = nothing  # type: ignore[method-assign]
        self._results = Results(training=True)
        self.trainer.fit_loop.epoch_loop._results = self._results
        self.trainer.state.status = TrainerStatus.RUNNING
        self._feed = Feed()

    @property
    def logs(self) -> Logs:
        """Logged values of the copy's training."""
        return self._results.logs

    @property
    def global_step(self) -> int:
        """Optimizer steps of the copy so far."""
        return self.trainer.global_step

    @property
    def should_stop(self) -> bool:
        """Whether the copy has asked for the end of its training."""
        return self.trainer.should_stop

    def attach(self, module: L.LightningModule) -> None:
        """Set the copy to train or evaluate next. Forget the one before."""
        trainer, loop = self.trainer, self.trainer.fit_loop
        module._trainer = trainer
        self._strategy.connect(module)
        self._strategy._lightning_module = module
        self._strategy.optimizers = []
        self._strategy.lr_scheduler_configs = []
        trainer._data_connector._datahook_selector = _DataHookSelector(module, None)
        trainer.should_stop = False
        epochs = loop.epoch_loop
        for progress in (
            loop.epoch_progress,
            epochs.batch_progress,
            epochs.scheduler_progress,
            epochs.automatic_optimization.optim_progress,
            epochs.manual_optimization.optim_step_progress,
        ):
            progress.reset()
        epochs._batches_that_stepped = 0
        trainer._logger_connector.reset_metrics()
        self._forget_logs()
        if self._bare is None:
            self._bare = self._is_bare(module)
            self._only_moves = type(self._strategy.precision_plugin) is Precision and not any(
                is_overridden(hook, module) for hook in _BATCH_HOOKS
            )

    def _forget_logs(self) -> None:
        """Forget the logged values, and the metric objects of another copy."""
        self._results.clear()
        self._results.logs = {}

    def _is_bare(self, module: L.LightningModule) -> bool:
        """Return whether a module has no own hooks around its training steps."""
        return (
            module.automatic_optimization
            and type(self._strategy.precision_plugin) is Precision
            and not any(
                is_overridden(hook, module) for hook in (*STEP_HOOKS, "configure_gradient_clipping")
            )
        )

    # Training

    def start(
        self,
        num_samples: int,
        max_epochs: int | None,
        num_batches: int,
        max_batches: int | None,
        step: Step,
        optimizer: Optimizer | None,
        extra_options: Mapping[str, Any],
        may_be_muted: bool,
        constant: bool,
    ) -> None:
        """Ask the copy for its optimizers, and begin its training.

        Args:
            num_samples: Number of the copy's training samples, the weight of its epochs.
            max_epochs: Local epochs, or ``None`` for as many as ``max_batches`` takes.
            num_batches: Batches in one epoch.
            max_batches: Batches in all.
            step: A client method's replacement of the module's own step.
            optimizer: An optimizer that replaces the module's own optimizers.
            extra_options: Options in the first optimizer, for the parameters of a client method's
                own module.
            may_be_muted: Whether the client method may run the module's steps without logs.
            constant: Whether the learning rate has to be constant.

        Raises:
            ConfigurationError: If there is no optimizer, or several without manual optimization, or
                one steps tensors that are not the copy's own.
        """
        trainer, loop, module = self.trainer, self.trainer.fit_loop, self.trainer.lightning_module
        self._results.num_samples = num_samples
        self._set_out(max_epochs, num_batches, max_batches)
        self._strategy.step = step
        loop._combined_loader = CombinedLoader([None] * num_batches, "max_size_cycle")
        loop._data_fetcher = self._feed
        if optimizer is None:
            try:
                with needing_optimizers(module):
                    self._strategy.setup_optimizers(trainer)
            except RuntimeError as error:
                if "multiple optimizers" not in str(error):
                    raise
                raise ConfigurationError(
                    f"{type(module).__name__}.configure_optimizers() gives several optimizers, "
                    "which takes manual optimization: set automatic_optimization=False"
                ) from error
            for own_optimizer in self._strategy.optimizers[:1]:
                step_extra(module, own_optimizer, extra_options)
            if constant and self._strategy.lr_scheduler_configs:
                raise ConfigurationError(
                    f"client_lr_decay can't lower the steps of a {type(module).__name__}, which "
                    "has a schedule of its own: let its configure_optimizers() use "
                    "self.round_index instead"
                )
            for schedule in self._strategy.lr_scheduler_configs:
                if may_be_muted or str(schedule.monitor).startswith("val"):
                    schedule.strict = False  # its metric is not logged while clients train
        else:
            self._strategy.optimizers, self._strategy.lr_scheduler_configs = [optimizer], []
            # The optimizer is unknown to the module.
            module.configure_gradient_clipping = nothing  # type: ignore[method-assign]
        own = {id(parameter) for parameter in module.parameters()}
        for optimizer in self._strategy.optimizers:
            for group in optimizer.param_groups:
                if any(id(parameter) not in own for parameter in group["params"]):
                    raise ConfigurationError(
                        f"{type(module).__name__}.configure_optimizers() gives an optimizer of "
                        "parameters that are not the module's own: each client trains a copy of "
                        "the module, so take them from self.parameters()"
                    )
            if not module.automatic_optimization and isinstance(optimizer, Optimizer):
                penalise(optimizer, self.penalty)
        _call_lightning_module_hook(trainer, "on_fit_start")
        loop.on_run_start()

    def _set_out(self, max_epochs: int | None, num_batches: int, max_batches: int | None) -> None:
        loop = self.trainer.fit_loop
        self.trainer.state.fn = TrainerFn.FITTING
        self.trainer.training = True
        loop.max_epochs = -1 if max_epochs is None else max_epochs
        loop.epoch_loop.max_steps = -1 if max_batches is None else max_batches
        loop.max_batches = num_batches

    @property
    def batch_idx(self) -> int:
        """Index of the current step's batch in its epoch."""
        return self.trainer.fit_loop.epoch_loop.batch_idx

    @contextmanager
    def watching(
        self, max_epochs: int | None, num_batches: int, max_batches: int | None
    ) -> Iterator[Callable[[int, int, int], None]]:
        """Let the copy see and log its training, while other code takes the steps.

        Args:
            max_epochs: As in :meth:`start`, like the others.
            num_batches: Batches in one epoch.
            max_batches: Batches in all.

        Yields:
            A function to call before each step, with the epoch, the number of steps so far and the
            size of the batch.
        """
        module, loop, results = self.trainer.lightning_module, self.trainer.fit_loop, self._results
        self._set_out(max_epochs, num_batches, max_batches)
        epochs, steps = loop.epoch_progress.current, loop.epoch_loop.automatic_optimization
        taken = steps.optim_progress.optimizer.step.total
        self._forget_logs()

        def tell(epoch: int, step: int, size: int) -> None:
            epochs.completed, taken.completed, results.batch_size = epoch, step, size

        module._current_fx_name = "training_step"
        try:
            yield tell
        finally:
            module._current_fx_name = None

    @contextmanager
    def epoch(self) -> Iterator[None]:
        """Run the hooks around a local epoch."""
        loop = self.trainer.fit_loop
        loop.on_advance_start()
        loop.epoch_loop.reset()
        loop.epoch_loop.on_run_start(self._feed)
        yield
        loop.on_advance_end()

    def step(self, batch: Any, size: int, last: bool) -> bool:
        """Train on a batch. Return whether the epoch goes on.

        Args:
            batch: A batch for the module's ``training_step``.
            size: Number of samples in the batch.
            last: Whether the batch is the last of its epoch.
        """
        loop = self.trainer.fit_loop.epoch_loop
        self._strategy.batch_size = size
        if self._bare:
            self._bare_step(batch, last)
            return True
        self._feed.offer(batch, last)
        try:
            loop.advance(self._feed)
            loop.on_advance_end(self._feed)
        except StopIteration:  # the module skips the rest of its epoch
            return False
        finally:
            loop.on_iteration_done()
        return True

    def _bare_step(self, batch: Any, last: bool) -> None:
        """Run Lightning's step for a module without hooks, and nothing else."""
        trainer, strategy, module = self.trainer, self._strategy, self.trainer.lightning_module
        loop, (optimizer,) = trainer.fit_loop.epoch_loop, strategy.optimizers
        progress, steps = loop.batch_progress, loop.automatic_optimization.optim_progress.optimizer
        batch = move_data_to_device(batch, strategy.root_device)
        progress.is_last_batch = last
        progress.increment_ready()
        trainer._logger_connector.on_batch_start(batch)
        progress.increment_started()
        arguments = step_arguments(module, batch, loop.batch_idx)

        def step() -> ClosureResult:
            module._current_fx_name = "training_step"
            output = strategy.training_step(*arguments)
            module._current_fx_name = None
            return ClosureResult.from_training_step_output(output)

        steps.step.increment_ready()
        optimizer.step(Closure(step, Tensor.backward, optimizer.zero_grad))  # type: ignore[arg-type]
        steps.step.increment_completed()
        progress.increment_processed()
        if strategy.lr_scheduler_configs:
            loop.update_lr_schedulers("step", update_plateau_schedulers=False)
            if last:
                loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        trainer._logger_connector.on_batch_end()
        progress.increment_completed()
        if strategy.lr_scheduler_configs:
            loop.update_lr_schedulers("step", update_plateau_schedulers=True)
        loop._batches_that_stepped += 1
        loop.on_iteration_done()

    def end(self) -> None:
        """Run the hooks at the end of the training."""
        self.trainer.fit_loop.on_run_end()
        _call_lightning_module_hook(self.trainer, "on_fit_end")

    # Evaluation

    def evaluate(
        self, split: str, parts: Sequence[Sized], batches: Iterable[Any]
    ) -> tuple[dict[str, Tensor], dict[str, bool], dict[str, Seen]]:
        """Run the copy's validation or test. Return its logged values.

        Args:
            split: ``"val"`` or ``"test"``.
            parts: The samples of each batch; only their number is used.
            batches: The batches for the copy's step.

        Returns:
            The values by logged name; whether higher is better, for metrics of torchmetrics; and
            the states of metric objects.
        """
        trainer = self.trainer
        loop = trainer.test_loop if split == "test" else trainer.validate_loop
        trainer.state.fn = TrainerFn.TESTING if split == "test" else TrainerFn.VALIDATING
        if split == "test":
            trainer.testing = True
        else:
            trainer.validating = True
        loop.verbose = False
        loop._results = results = Results(training=False)
        limits = trainer.limit_val_batches, trainer.limit_test_batches
        trainer.limit_val_batches = trainer.limit_test_batches = 1.0
        try:
            self._run(loop, parts, batches)
        finally:
            trainer.limit_val_batches, trainer.limit_test_batches = limits
        values = dict(trainer.callback_metrics)
        for name in [n for n in values if n.endswith("_epoch") and n[: -len("_epoch")] in values]:
            del values[name]
        return values, results.directions, results.seen

    def predict(self, parts: Sequence[Sized], batches: Iterable[Any]) -> list[Any]:
        """Return the results of the copy's ``predict_step`` for each batch, on the CPU.

        Args:
            parts: The samples of each batch; only their number is used.
            batches: The batches for the copy's step.
        """
        trainer, loop = self.trainer, self.trainer.predict_loop
        trainer.state.fn = TrainerFn.PREDICTING
        trainer.predicting = loop.return_predictions = True
        return self._run(loop, parts, batches)

    def _run(
        self,
        loop: _EvaluationLoop | _PredictionLoop,
        parts: Sequence[Sized],
        batches: Iterable[Any],
    ) -> Any:
        """Run a loop without gradients over batches. Return its result."""
        loop.inference_mode = torch.is_inference_mode_enabled()  # as in the federation's Trainer
        loop._data_source.instance = Loader(self._sized(parts, batches), len(parts))
        try:
            return loop.run()
        finally:
            loop._data_source.instance = loop._combined_loader = None

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The groups of parameters of all optimizers."""
        return [
            group for optimizer in self._strategy.optimizers for group in optimizer.param_groups
        ]

    def loss(self, batch: Any, size: int, loss: Callable[[Any], LossT]) -> LossT:
        """Return a loss of the copy on a batch, outside of its training."""
        trainer = self.trainer
        trainer.state.fn = TrainerFn.FITTING
        trainer.training = True
        self._strategy.batch_size = size
        with self._strategy.precision_plugin.train_step_context():
            return loss(self._moved(batch))

    def look(
        self, sizes: Sequence[int], batches: Iterable[Any], find: Callable[[Batches], LossT]
    ) -> LossT:
        """Return the result of ``find`` for some batches, outside of the copy's training."""
        trainer = self.trainer
        trainer.state.fn = TrainerFn.FITTING
        trainer.training = True

        def moved() -> Iterator[Any]:
            for size, batch in zip(sizes, batches, strict=True):
                self._strategy.batch_size = size
                yield self._moved(batch)

        with self._strategy.precision_plugin.train_step_context():
            return find(Batches(sizes, moved()))

    def _moved(self, batch: Any) -> Any:
        if self._only_moves:
            return move_data_to_device(batch, self._strategy.root_device)
        torch.clear_autocast_cache()  # cached casts have no gradients, but some may be needed
        batch = self._strategy.precision_plugin.convert_input(batch)
        batch = self.trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
        return self._strategy.batch_to_device(batch, dataloader_idx=0)

    def _sized(self, parts: Sequence[Sized], batches: Iterable[Any]) -> Iterator[Any]:
        for part, batch in zip(parts, batches, strict=True):
            self._strategy.batch_size = len(part)
            yield batch


def nothing(*_: Any, **__: Any) -> None:
    """Do nothing, in place of a method."""


def step_arguments(module: L.LightningModule, batch: Any, index: int) -> tuple[Any, ...]:
    """Return the arguments of a module's training step: the batch, and its index if required."""
    step = module.training_step
    takes_index = _takes_index(getattr(step, "__func__", step))
    return (batch, index) if takes_index else (batch,)


@lru_cache(maxsize=64)
def _takes_index(step: Callable[..., Any]) -> bool:
    """Return whether a step takes the batch's index. Lightning checks this at every step."""
    return is_param_in_hook_signature(step, "batch_idx", min_args=2)


def loss_of(output: Any) -> Tensor | None:
    """Return the loss in the output of a ``training_step``, or ``None`` for a skipped step.

    Raises:
        TypeError: If Lightning does not accept the output.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if output is not None and not isinstance(loss, Tensor):
        raise TypeError(
            "its training_step must return a tensor, a dictionary with its 'loss' or None, not "
            f"{type(output).__name__}"
        )
    return loss
