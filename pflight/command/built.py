"""Classes of a configuration that can't be made: the errors name the class and the real cause."""

from __future__ import annotations

import re
from pathlib import Path
from traceback import extract_tb
from typing import Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pflight.errors import ConfigurationError, described, said_by
from pflight.messages import one_line

UNEXPECTED = re.compile(r".* got an unexpected keyword argument '(?P<name>\w+)'.*")
"""What Python says of an argument that a function has not."""

_CLEAR = (ImportError, OSError, RuntimeError, ValueError)  # whose text alone says what is wrong


def built(kind: type, /, *args: Any, **options: Any) -> Any:
    """Make an object, and name its class if it can't be made.

    Optimizers are made later, by what names them in its own errors.

    Raises:
        ConfigurationError: If the class raises any exception.
    """
    try:
        return kind(*args, **options)
    except MisconfigurationException:
        raise  # its message is clear by itself
    except (Exception, SystemExit) as error:
        unknown = UNEXPECTED.fullmatch(said_by(error))  # if it was given, in dict_kwargs
        if issubclass(kind, Optimizer | LRScheduler) or (unknown and unknown["name"] in options):
            raise
        name = f"{kind.__module__}.{kind.__qualname__}"
        raise ConfigurationError(f"{name}: {cause_of(error)}") from error


def cause_of(error: BaseException) -> str:
    """Return in one line what an exception says; where it came from, unless its text is enough.

    Example:
        >>> cause_of(ValueError("size is 0")), cause_of(KeyError("size"))
        ('size is 0', "KeyError: 'size'")
    """
    if isinstance(error, _CLEAR) and said_by(error):
        return one_line(said_by(error))
    places = extract_tb(error.__traceback__)
    where = f" ({Path(places[-1].filename).name}, line {places[-1].lineno})" if places else ""
    return f"{described(error)}{where}"
