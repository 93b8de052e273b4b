"""Checks before the start whether a module can be a client."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from lightning import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from pflight.errors import ConfigurationError, said_by
from pflight.options import check_optimizer
from pflight.states.updates import STOPS
from pflight.task import Task, trains_as_a_task

from .client_setup import ClientSetup
from .operations import count_operations
from .time_limit import time_limit

_IGNORED_HOOKS = {
    "configure_callbacks": "the federation's Trainer has the callbacks",
    "on_save_checkpoint": "the federation's Trainer writes the checkpoints",
    "on_load_checkpoint": "the federation's Trainer reads the checkpoints",
    "train_dataloader": "the data module gives the batches",
    "val_dataloader": "the data module gives the batches",
    "test_dataloader": "the data module gives the batches",
    "predict_dataloader": "the data module gives the batches",
    "teardown": "the module is set up once, and its copies come and go",
}
"""Hooks that no client calls, each with the reason."""


class Findings(NamedTuple):
    """Properties of a task's network, found by running it."""

    operations: float = math.inf
    """Operations of a sample's forward pass; infinite if they can't be counted."""
    changes_input: bool = False
    """Whether the network changes its input in place."""


def check_client(setup: ClientSetup, copy: LightningModule) -> Findings:
    """Raise unless module, client method and data fit together. Warn of hooks that are not called.

    Args:
        setup: The client module, its client method, and its data.
        copy: A copy of the module to run.

    Raises:
        ConfigurationError: Naming the part that does not fit.
    """
    module, client_method = setup.client, setup.client_method
    if setup.mixes_samples and setup.data.batch_size == 1:
        raise ConfigurationError("batch_size=1 can't train a network with BatchNorm")
    client_method.check(module)
    for term in client_method.terms:
        term.check(module)
        if term.needs_logits and not client_method.one_pass:
            raise ConfigurationError(
                f"{type(term).__name__} looks at the logits of one pass of a batch, but "
                f"{type(client_method).__name__} makes several"
            )
    if setup.lr_decay != 1 and client_method.needs_constant_lr:
        raise ConfigurationError(
            f"client_lr_decay={setup.lr_decay}: {type(client_method).__name__} needs a step size "
            "that is the same in all rounds"
        )
    needs_loss = not client_method.only_adds or any(t.needs_logits for t in client_method.terms)
    if needs_loss and not module.automatic_optimization:
        raise ConfigurationError(
            f"the algorithm replaces the loss of its clients, which "
            f"{type(module).__name__} with manual optimization does not hand out"
        )
    if not is_overridden("training_step", module):
        raise ConfigurationError(
            f"{type(module).__name__} has no training_step: a client trains by its own"
        )
    for hook, reason in _IGNORED_HOOKS.items():
        if is_overridden(hook, module):
            rank_zero_warn(f"{type(module).__name__}.{hook} is ignored: {reason}")
    if any(isinstance(part, nn.SyncBatchNorm) for part in module.modules()):
        raise ConfigurationError(
            "SyncBatchNorm would mix clients of different ranks: use BatchNorm"
        )
    if not isinstance(module, Task):
        return Findings()
    findings = _run(setup, module, copy) if setup.example else Findings()
    try:
        check_optimizer(Task.configure_optimizers(module))
    except (KeyboardInterrupt, SIGTERMException):
        raise
    except BaseException as error:
        reason = " ".join(said_by(error).split()) or type(error).__name__
        raise ConfigurationError(f"the client's optimizer can't be built: {reason}") from error
    return findings


def _run(setup: ClientSetup, task: Task, copy: LightningModule) -> Findings:
    """Run a task's network on samples."""
    network: Any = copy.eval()
    evaluated = any(setup.data.num_samples(split).any() for split in ("val", "test"))
    x, y = (leaf.clone() for leaf in setup.example)
    judged = evaluated and setup.task is not None
    asked = judged or setup.has_loss_of_its_kind
    try:
        with time_limit(setup.client_timeout), torch.no_grad(), setup.forward_context():
            outputs = network(x) if asked else None
            changes_input = not torch.equal(x, setup.example[0])
            if not asked and trains_as_a_task(task):
                network.loss((x, y))
    except STOPS:
        raise
    except BaseException as error:
        reason = said_by(error).split("\n")[0] or type(error).__name__
        raise ConfigurationError(
            f"the network can't take the data's samples of shape {tuple(x.shape[1:])} "
            f"({str(x.dtype).removeprefix('torch.')}): {reason}"
        ) from error
    if outputs is not None:
        if not isinstance(outputs, Tensor):
            raise ConfigurationError(
                f"the network gives {type(outputs).__name__}; it must give a tensor"
            )
        try:
            task.check_outputs(outputs, y)
        except ValueError as error:
            reason = str(error).replace("its model", "the network", 1)
            raise ConfigurationError(reason) from error
    return Findings(count_operations(network, x[:1]).total, changes_input)
