"""The options of a client's SGD, for methods that draw conclusions from its steps."""

from __future__ import annotations

import copy
from typing import NamedTuple

from lightning import LightningModule
from lightning.pytorch.core.optimizer import _configure_optimizers
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import SGD

from pflight.errors import ConfigurationError
from pflight.options import number

_ROUNDS = (0, 1, 10, 1000)


class Descending(NamedTuple):
    """The options of a client's SGD, the same for all its parameters."""

    lr: float
    momentum: float
    nesterov: bool


def sgd_of(
    module: LightningModule, needs: str, otherwise: str = "", momentum: bool = False
) -> Descending:
    """Return the options of a module's SGD.

    Args:
        module: The client module.
        needs: The method and its need, for the message.
        otherwise: What to do if the module has anything else, for the message.
        momentum: Whether there may be momentum.

    Raises:
        ConfigurationError: If there is no single SGD with one positive, constant step, or gradients
            are clipped or dampened.
    """
    instead = f"; {otherwise}" if otherwise else ""
    try:
        built = module.configure_optimizers()
        changes = _changes_over_rounds(module)
    except Exception as error:  # it may need a Trainer, which it has in training
        raise ConfigurationError(
            f"{needs}, which {type(module).__name__}.configure_optimizers() does not give before "
            f"the start ({error}){instead}"
        ) from error
    optimizers, schedulers, _ = _configure_optimizers(built)  # type: ignore[arg-type]
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    reason = ""
    if len(optimizers) != 1:
        reason = f"{len(optimizers)} optimizers"
    elif schedulers:
        reason = "a scheduler"
    elif changes:
        reason = "a step that depends on round_index"
    elif type(optimizers[0]) is not SGD:
        reason = type(optimizers[0]).__name__
    elif any(group["momentum"] for group in groups) and not momentum:
        reason = f"momentum={max(group['momentum'] for group in groups)}"
    elif len({group["momentum"] for group in groups}) > 1:
        reason = f"momentum={', '.join(str(group['momentum']) for group in groups)}"
    elif any(group["momentum"] and group["dampening"] for group in groups):
        reason = f"dampening={max(group['dampening'] for group in groups)}"
    elif any(group["maximize"] for group in groups):
        reason = "maximize=True"
    elif len(steps := {float(g["lr"]) for g in groups}) > 1 or not min(map(number, steps)) > 0:
        reason = f"lr={', '.join(map(str, sorted(steps)))}"
    elif getattr(module, "gradient_clip_val", None) is not None:
        reason = f"gradient_clip_val={module.gradient_clip_val}"
    elif not hasattr(module, "gradient_clip_val") and is_overridden(
        "configure_gradient_clipping", module
    ):
        reason = "its own configure_gradient_clipping"
    if reason:
        raise ConfigurationError(f"{needs}, got {reason}{instead}")
    group = groups[0]
    return Descending(float(group["lr"]), float(group["momentum"]), bool(group["nesterov"]))


def _changes_over_rounds(module: LightningModule) -> bool:
    """Return whether a module that knows its round has other learning rates in later rounds."""
    if not hasattr(module, "round_index"):
        return False
    module, found = copy.copy(module), set[str]()
    for index in _ROUNDS:
        vars(module)["round_index"] = index
        optimizers, *_ = _configure_optimizers(module.configure_optimizers())  # type: ignore[arg-type]
        found.add(
            str([group["lr"] for optimizer in optimizers for group in optimizer.param_groups])
        )
    return len(found) > 1
