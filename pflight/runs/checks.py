"""Checks before a run starts. Each message suggests an alternative."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import lightning as L
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import callbacks
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from torch import Tensor, nn
from torch.utils.data import DataLoader

from pflight.data.client_names import check_names
from pflight.data.data_module import FederatedDataModule
from pflight.data.loaders import warn_of_loader_options
from pflight.errors import ConfigurationError
from pflight.messages import OWN_BATCHES
from pflight.modifiers import Modifier
from pflight.options import described, differing, whole

from .checkpoint import AtomicCheckpointIO
from .memory import ClientMemory, MappedMemory

_PROCESSES_PER_CORE = 4
_HERE = ("127.0.0.1", "localhost")  # no other machine can reach these
_OF_ONE_MODEL = (
    callbacks.BaseFinetuning,
    callbacks.BatchSizeFinder,
    callbacks.GradientAccumulationScheduler,
    callbacks.LearningRateFinder,
    callbacks.ModelPruning,
    callbacks.SpikeDetection,
    callbacks.StochasticWeightAveraging,
    callbacks.WeightAveraging,
)
"""Callbacks that copy, change or watch the Trainer's single model."""


def check_trainer(trainer: L.Trainer, client: L.LightningModule) -> None:
    """Raise on Trainer options without meaning for a federation of such clients."""
    name = type(client).__name__
    if trainer.gradient_clip_val is not None:
        remedy = (
            f"give it to {name} (--model.client.gradient_clip_val)"
            if hasattr(client, "gradient_clip_val")
            else f"let {name} define configure_gradient_clipping(), which calls clip_gradients()"
        )
        raise ConfigurationError(
            f"gradient_clip_val is an option of the client, not of the Trainer: {remedy}"
        )
    if trainer.accumulate_grad_batches != 1:
        raise ConfigurationError(
            "accumulate_grad_batches has no meaning for rounds: set the data's batch_size, or let "
            f"{name} set automatic_optimization = False and step its optimizer in training_step()"
        )
    environment = getattr(trainer.strategy, "cluster_environment", None)
    alone = isinstance(environment, LightningEnvironment) and environment.main_address in _HERE
    if trainer.num_nodes > 1 and alone:
        raise ConfigurationError(
            f"num_nodes={trainer.num_nodes} waits for processes on as many machines: start it on "
            "each with MASTER_ADDR, MASTER_PORT and NODE_RANK, or leave num_nodes out"
        )
    given: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    if astray := [one for one in given if isinstance(one, Modifier)]:
        given[:] = [one for one in given if one not in astray]  # Lightning would call their hooks
        raise ConfigurationError(
            f"{type(astray[0]).__name__} is no callback of the Trainer, but a modifier: give it to "
            f"the server callback, as in FedAvg(modifiers=[{astray[0]!r}])"
        )
    for callback in given:
        if isinstance(callback, _OF_ONE_MODEL):
            raise ConfigurationError(
                f"the Trainer's {type(callback).__name__} works on the one model of a training, "
                "where a federation has models of a server and of clients: leave it out, or do "
                "the like in a server callback (docs/own-methods.md)"
            )
    _check_limit("overfit_batches", trainer.overfit_batches)  # type: ignore[attr-defined]
    for name in ("train", "val", "test", "predict"):
        _check_limit(f"limit_{name}_batches", getattr(trainer, f"limit_{name}_batches"))
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        raise ConfigurationError(
            f"precision {trainer.precision} scales gradients, which does not work with the "
            "server's pseudo-gradients: use bf16-mixed"
        )
    check_strategy(trainer.strategy)
    _check_validation(trainer.check_val_every_n_epoch, trainer.val_check_interval)
    if trainer.log_every_n_steps < 0:  # type: ignore[attr-defined]
        raise ConfigurationError(
            f"log_every_n_steps must be at least 0, got {trainer.log_every_n_steps}"  # type: ignore[attr-defined]
        )


def settings_of(module: L.LightningModule) -> dict[str, Any]:
    """Return the settings of a module by name: plain attributes and the versions of tensors."""
    found: dict[str, Any] = {}
    for name, part in module.named_modules(prefix="client"):
        own = {**vars(part), **getattr(part, "_hparams", {})}
        found |= {
            f"{name}.{key}": value
            for key, value in own.items()
            if key[0] != "_" and key != "training" and _is_plain(value)
        }
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and not tensor.is_inference():
            found[f"client.{name}"] = f"{id(tensor)} {tensor._version}"  # set, or changed in place
    return found


def check_unchanged(module: L.LightningModule, before: Mapping[str, Any]) -> None:
    """Raise if a setting of the client module has changed. The clients' copies would lack it.

    Args:
        module: The client module.
        before: The result of :func:`settings_of` when the copies were made.

    Raises:
        ConfigurationError: Naming the changed setting.
    """
    now = settings_of(module)
    changed = [
        name
        for name, value in now.items()
        if name not in before or described(before[name]) != described(value)
    ]
    if changed:
        raise ConfigurationError(
            f"federation.{min(changed)} was set while the federation trains, which its clients "
            "don't get to know, since they train copies: lower their step size by "
            "client_lr_decay, or let the module use self.round_index (docs/modules.md)"
        )


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float | partial)


def check_strategy(strategy: object) -> None:
    """Raise unless a federation can run with this strategy, an object or a name."""
    if isinstance(strategy, str):
        fits = strategy == "auto" or strategy.startswith("ddp")
    else:
        fits = isinstance(strategy, SingleDeviceStrategy | DDPStrategy)
    if not fits:
        name = strategy if isinstance(strategy, str) else type(strategy).__name__
        raise ConfigurationError(
            f"a federation runs on one device or with strategy ddp, not with strategy {name}"
        )


def check_processes(trainer: L.Trainer, num_clients: int | None) -> None:
    """Raise if processes don't start as programs, or if there are far too many.

    Args:
        trainer: The Trainer.
        num_clients: Number of clients, if known.
    """
    if isinstance(trainer.strategy.launcher, _MultiProcessingLauncher):
        raise ConfigurationError(
            "trainer.strategy: the command line starts each rank as a program of its own: take ddp"
        )
    if not isinstance(trainer.accelerator, CPUAccelerator) or trainer.world_size == 1:
        return
    cores = os.cpu_count() or 1
    if trainer.num_devices > _PROCESSES_PER_CORE * cores:
        raise ConfigurationError(
            f"trainer.devices asks for {trainer.num_devices:,} processes on {cores} CPU cores: "
            f"give at most {_PROCESSES_PER_CORE * cores}"
        )
    if num_clients is not None and trainer.world_size > num_clients:
        raise ConfigurationError(
            f"trainer.devices and num_nodes ask for {trainer.world_size:,} processes, but there "
            f"are only {num_clients:,} clients"
        )


def check_data(data: object, client: L.LightningModule) -> FederatedDataModule:
    """Return the Trainer's data module. Raise unless it is federated and fits the client."""
    if not isinstance(data, FederatedDataModule):
        raise ConfigurationError(
            "a federation needs federated data: pass a pflight.datamodules.FederatedDataModule "
            f"as datamodule=, got {type(data).__name__}"
        )
    name = type(data).__name__
    check_names(name, data.client_names, data.num_clients)
    if type(data).train_dataloader is not FederatedDataModule.train_dataloader:
        loader: Any = data.train_dataloader()
        if isinstance(loader, DataLoader) and not isinstance(loader.dataset, Tensor | Sequence):
            raise ConfigurationError(
                f"{name}.train_dataloader() returns a DataLoader of samples, where a federation "
                f"takes ids of clients: leave it out. {OWN_BATCHES}"
            )
    warn_of_loader_options(data, name)
    has, needs = getattr(data, "num_classes", None), getattr(client, "num_classes", None)
    if None not in (needs, has) and needs != has:
        raise ConfigurationError(
            f"the client has num_classes={needs}, but the data have num_classes={has}"
        )
    return data


def check_same_options(kind: str, here: Mapping[str, Any], there: Mapping[str, Any]) -> None:
    """Raise unless a Trainer's server callback has the same options as at the federation's start.

    Args:
        kind: The callbacks' class.
        here: Options of the callback that set the federation up.
        there: Options of the Trainer's callback.
    """
    if names := differing(here, there):
        raise ConfigurationError(
            f"this federation was trained with {_call(kind, here, names)}, but this Trainer has "
            f"{_call(kind, there, names)}: give the Trainer the same options or "
            "federation.callback itself, or make a new Federation"
        )


def other_options(kind: str, saved: Mapping[str, str], here: Mapping[str, Any]) -> str | None:
    """Return a message on the differences of a server callback's options from a checkpoint's.

    Args:
        kind: The callbacks' class.
        saved: Options in the checkpoint, as :func:`~pflight.options.described`.
        here: Options of the callback.

    Returns:
        The message, or ``None`` if they are equal. Different options are allowed.
    """
    now = {name: described(value) for name, value in here.items()}
    if not (names := differing(saved, now)):
        return None
    return (
        f"the checkpoint was made with {_call(kind, saved, names, str)}; the run goes on with "
        f"{_call(kind, now, names, str)}, but the state of the server optimizer, including its lr, "
        "is the checkpoint's"
    )


def _call(
    kind: str,
    options: Mapping[str, Any],
    names: list[str],
    text: Callable[[Any], str] = described,
) -> str:
    chosen = [f"{name}={text(options[name])}" for name in names if name in options]
    return f"{kind}({', '.join(chosen)})"


def check_given(record: Mapping[str, Any], client: object, callback: object) -> None:
    """Raise if an argument of ``load_from_checkpoint`` is missing. The message names it.

    Args:
        record: The checkpoint's record of its federation.
        client: The client module, or ``None``.
        callback: The server callback, or ``None`` for FedAvg.
    """
    if client is None:
        raise ConfigurationError(
            "load_from_checkpoint needs client=, a client module with the network that was "
            "trained: checkpoints hold neither modules nor frozen weights"
        )
    kind = record.get("callback", "FedAvg")
    if callback is None and kind != "FedAvg":
        saved = record.get("options", {})
        raise ConfigurationError(
            f"load_from_checkpoint needs callback={_call(kind, saved, list(saved), str)}, the "
            "server callback that trained this federation; the default is FedAvg"
        )


def open_memory(memory: ClientMemory, trainer: L.Trainer) -> None:
    """Open the client memory in a Trainer's folder, and make checkpoints atomic.

    Raises:
        ConfigurationError: If the memory is on disk and another plugin writes the checkpoints.
    """
    strategy = trainer.strategy
    if type(strategy.checkpoint_io) is TorchCheckpointIO:
        strategy.checkpoint_io = AtomicCheckpointIO()
    atomic = isinstance(strategy.checkpoint_io, AtomicCheckpointIO)
    if isinstance(memory, MappedMemory) and not atomic:
        raise ConfigurationError(
            "client_memory='disk' needs pflight's own checkpoint plugin, but the Trainer has "
            f"{type(strategy.checkpoint_io).__name__}: leave that plugin out, or set "
            "client_memory='ram'"
        )
    memory.open(trainer.default_root_dir)


def check_record(record: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raise unless a checkpoint's record of a federation agrees with the current federation.

    Args:
        record: The checkpoint's record; empty if the checkpoint is of another module.
        here: The current federation's record: ``callback``, ``num_clients``, ``server_models``,
            ``layout``, a mapping from the names of the network's tensors to shape and dtype, and
            ``scales`` of low-rank adapters.
    """
    if not record:
        raise ConfigurationError("the checkpoint is not that of a federation")
    for name in ("callback", "num_clients", "server_models"):
        _check_equal(name, record.get(name), here[name])
    saved, wanted = record["layout"], here["layout"]
    saved, wanted = {**saved, **record.get("scales", {})}, {**wanted, **here["scales"]}
    for name in sorted(saved.keys() | wanted.keys()):
        _check_equal(name, saved.get(name, "missing"), wanted.get(name, "missing"))


def check_modules(
    saved: Mapping[str, Tensor], modules: Mapping[str, nn.Module], owner: str
) -> None:
    """Raise if a checkpoint lacks a server callback's module, or has it with other shapes.

    Args:
        saved: The tensors of the checkpoint by name.
        modules: The modules of the server callback by name.
        owner: Name of the server callback.
    """
    for part, module in modules.items():
        here = {f"{part}.{name}": tensor for name, tensor in module.state_dict().items()}
        if here and not any(name.startswith(f"{part}.") for name in saved):
            raise ConfigurationError(
                f"the checkpoint does not fit this federation: it has no {part} of {owner}, which "
                "was trained with other options"
            )
        for name in here.keys() & saved.keys():
            _check_equal(name, tuple(saved[name].shape), tuple(here[name].shape))


def _check_equal(name: str, saved: object, here: object) -> None:
    if saved != here:
        raise ConfigurationError(
            f"the checkpoint does not fit this federation: {name} is {saved} in the checkpoint "
            f"and {here} here"
        )


def _check_validation(every: int | None, interval: object) -> None:
    """Raise unless there is a whole number of rounds between validations."""
    name = "check_val_every_n_epoch"
    rounds: float | None = every
    if every is None and isinstance(interval, int | float):
        name, rounds = "val_check_interval", interval
    elif isinstance(interval, int | float) and interval != 1:
        raise ConfigurationError(
            f"val_check_interval={interval} would validate within a round: set "
            "check_val_every_n_epoch instead"
        )
    if rounds is not None and not whole(rounds) >= 1:
        raise ConfigurationError(f"{name} must be a whole number of at least 1, got {rounds}")


def _check_limit(name: str, limit: float) -> None:
    if isinstance(limit, float) and limit not in (0.0, 1.0):
        raise ConfigurationError(
            f"{name}={limit} is a fraction of the batches, but a batch of a federation is a cohort "
            "of clients: give an integer, or set the data's cohort_size or participation"
        )
