"""Make the classes of a configuration, with errors that name the class and the cause."""

from __future__ import annotations

from pathlib import Path
from traceback import extract_tb
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pflight.errors import ConfigurationError, described, said_by
from pflight.messages import one_line

from .defaults import specs

_CLEAR = (ImportError, OSError, RuntimeError, ValueError)  # their texts are clear by themselves


def built(failures: list[ConfigurationError], kind: type, /, *args: Any, **options: Any) -> Any:
    """Make an object, and name its class on failure.

    Optimizers are made later, with their own errors.

    Args:
        failures: Where an error is noted, since jsonargparse drops it if it then tries other types.
        kind: The class of the object.
        *args: Its arguments.
        **options: Its options.

    Raises:
        ConfigurationError: If the class raises any exception.
    """
    try:
        return kind(*args, **options)
    except MisconfigurationException:
        raise  # its message is clear
    except (Exception, SystemExit) as error:
        if issubclass(kind, Optimizer | LRScheduler):
            raise
        name = f"{kind.__module__}.{kind.__qualname__}"
        failures.append(ConfigurationError(f"{name}: {cause_of(error)}"))
        raise failures[-1] from error


def cause_of(error: BaseException) -> str:
    """Return an exception's text in one line, with its origin unless the text is clear.

    Example:
        >>> cause_of(ValueError("size is 0")), cause_of(KeyError("size"))
        ('size is 0', "KeyError: 'size'")
    """
    if isinstance(error, _CLEAR) and said_by(error):
        return one_line(said_by(error))
    places = extract_tb(error.__traceback__)
    where = f" ({Path(places[-1].filename).name}, line {places[-1].lineno})" if places else ""
    return f"{described(error)}{where}"


def refusal(
    error: BaseException, failures: list[ConfigurationError], config: Namespace, made: str
) -> ConfigurationError | None:
    """Say in one line why the Trainer or a class rejects its options.

    Args:
        error: The exception from making the classes of a run.
        failures: What :func:`built` noted.
        config: The configuration of the run.
        made: The object being made, if it is not a class.

    Returns:
        The error to raise, or ``None`` if the message is already clear.
    """
    root = error
    while root.__cause__ is not None and not isinstance(root, MisconfigurationException):
        root = root.__cause__
    failure = failures[-1] if failures else ConfigurationError(f"{made}: {cause_of(root)}")
    if isinstance(failure.__cause__ or root.__cause__ or root, TypeError):
        for name, part in specs(config):
            if part.get("dict_kwargs"):
                said = failure if failures else cause_of(root)
                return ConfigurationError(f"{name}.dict_kwargs: {said}")
    return None if isinstance(root, MisconfigurationException) else failure
