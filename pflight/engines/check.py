"""Checks before the start: whether a module can be a client, and how many operations it has."""

from __future__ import annotations

import copy
import math
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import torch
from lightning import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from pflight.errors import ConfigurationError, described, said_by
from pflight.options import check_optimizer
from pflight.states.updates import STOPS
from pflight.task import Task, trains_as_a_task

from .client_setup import ClientSetup
from .time_limit import time_limit

OF_A_MODULE = {*vars(nn.Module()), *vars(LightningModule())} | {"_hparams", "_trainer"}
"""Attributes that every LightningModule has."""
_THIN = 4  # input channels
_DEEPEST = 20  # searched levels of attributes
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


class Operations(NamedTuple):
    """Floating-point operations of a forward pass."""

    total: float
    """Operations of matrix products and convolutions. They are most of all operations."""
    thin: float
    """Operations of convolutions with at most four input channels, such as of an image."""


def count_operations(
    network: nn.Module, x: Tensor, function: Callable[..., Any] = operator.call
) -> Operations:
    """Count the operations of a forward pass in evaluation mode.

    Args:
        network: The network; a copy of it is run.
        x: The network's input ``[batch, ...]``.
        function: A function of the copy and the input to run instead of a forward pass.

    Returns:
        The operations for all samples. They are infinite if they can't be counted: the network may
        have any size.

    Example:
        >>> count_operations(nn.Conv1d(2, 3, kernel_size=4), torch.ones(1, 2, 13))
        Operations(total=480.0, thin=480.0)
    """
    from torch.utils.flop_counter import FlopCounterMode

    convolution = torch.ops.aten.convolution
    network = copy.deepcopy(network).eval()
    first = next(network.parameters(), x)
    if x.is_floating_point():
        x = x.to(first.dtype)
    everything = FlopCounterMode(display=False)
    thin = FlopCounterMode(display=False, custom_mapping={convolution: _thin_operations})
    try:
        # Without gradients, transformers take other paths.
        with everything, thin, torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the module warns again when it trains
            function(network, x.to(first.device))
    except KeyboardInterrupt:
        raise
    except BaseException:  # a user's network may raise anything
        return Operations(math.inf, math.inf)
    return Operations(
        float(everything.get_total_flops()),
        float(thin.get_flop_counts().get("Global", {}).get(convolution, 0)),
    )


def _thin_operations(x: Any, weight: Any, *_: Any, out_shape: Any, **__: Any) -> int:
    return 2 * math.prod(out_shape) * math.prod(weight[1:]) if weight[1] <= _THIN else 0


class Findings(NamedTuple):
    """Properties of a task's network, found by running it."""

    operations: float = math.inf
    """Operations of a sample's forward pass; infinite if they can't be counted."""
    changes_input: bool = False
    """Whether the network changes its input in place."""


def check_client(setup: ClientSetup, copied: LightningModule) -> Findings:
    """Raise unless module, client method and data fit together. Warn of hooks that are not called.

    Args:
        setup: The client module, its client method, and its data.
        copied: A copy of the module to run.

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
    findings = _run(setup, module, copied) if setup.example else Findings()
    try:
        check_optimizer(Task.configure_optimizers(module))
    except (KeyboardInterrupt, SIGTERMException):
        raise
    except BaseException as error:
        reason = " ".join(said_by(error).split()) or type(error).__name__
        raise ConfigurationError(f"the client's optimizer can't be built: {reason}") from error
    return findings


def _run(setup: ClientSetup, task: Task, copied: LightningModule) -> Findings:
    """Run a task's network on samples."""
    network: Any = copied.eval()
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


def set_up(module: LightningModule) -> LightningModule:
    """Return a copy of a client module after a Trainer's set-up calls.

    Raises:
        ConfigurationError: If it has an attribute that can't be copied.
    """
    module = _copied(module)
    module.prepare_data()
    module.setup(stage="fit")
    module.configure_model()
    if any(is_overridden(hook, module) for hook in ("prepare_data", "setup", "configure_model")):
        _copied(module)
    return module


def _copied(module: LightningModule) -> LightningModule:
    try:
        return copy.deepcopy(module)
    except Exception as error:  # an attribute may raise anything
        raise ConfigurationError(_why_not_copied(module, error)) from error


def _why_not_copied(module: LightningModule, error: Exception) -> str:
    """Return a message: the attribute of a module that can't be copied, and the remedy."""
    for prefix, part in module.named_modules():
        where = ".".join(filter(None, ["client", prefix]))
        for name, value in _attributes(part):
            try:
                copy.deepcopy(value)
            except Exception as own:
                name, value = _innermost(f"{where}.{name}", value)
                return (
                    f"{name}, of type {type(value).__name__}, can't be copied, and each client "
                    f"trains a copy of the module: {_remedy(part, value, own)}"
                )
    name = type(module).__name__
    return f"{name} can't be copied, and each client trains a copy of it: {described(error)}"


def _attributes(part: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a module itself, its buffers, hyperparameters and hooks."""
    for name, value in vars(part).items():
        if name not in OF_A_MODULE:
            yield name, value
        elif name == "_buffers" or (name.endswith("_hooks") and isinstance(value, Mapping)):
            hooks = "" if name == "_buffers" else f"{name}."
            yield from ((f"{hooks}{key}", one) for key, one in value.items())
        elif name == "_hparams":
            yield "hparams", value


def _innermost(name: str, value: Any, outside: tuple[int, ...] = ()) -> tuple[str, Any]:
    """Return the innermost value in an object that can't be copied, with its name."""
    if isinstance(value, Mapping):
        inner = ((f"{name}[{key!r}]", one) for key, one in value.items())
    elif isinstance(value, list | tuple):
        inner = ((f"{name}[{place}]", one) for place, one in enumerate(value))
    else:
        inner = ((f"{name}.{key}", one) for key, one in getattr(value, "__dict__", {}).items())
    if isinstance(value, ModuleType | type) or len(outside) > _DEEPEST:
        return name, value
    for inner_name, one in inner:
        try:
            copy.deepcopy(one)
        except Exception:
            if id(one) not in outside:
                return _innermost(inner_name, one, (*outside, id(value)))
    return name, value


def _remedy(part: nn.Module, value: Any, error: Exception) -> str:
    if any("WeightNorm" in type(hook).__name__ for hook in part._forward_pre_hooks.values()):
        return "use torch.nn.utils.parametrizations.weight_norm in place of the hook"
    if isinstance(value, Tensor):
        return "it is the result of a computation that is differentiated: detach() it"
    if isinstance(value, ModuleType):
        return "import it at the top of the file"
    return f"make it in the method that uses it ({described(error)})"
