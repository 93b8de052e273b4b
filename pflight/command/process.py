"""The output and the end of a process of the command line."""

from __future__ import annotations

import logging
import sys
import time
import warnings
from typing import NoReturn

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from pflight.errors import ConfigurationError
from pflight.messages import one_line
from pflight.runs.files import causes

_RANK_0_FIRST = 5.0  # seconds


def _format_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    return f"warning: {one_line(str(message))}\n"


def quieten() -> None:
    """Silence startup messages of libraries, and print pflight's warnings in one line."""
    warnings.formatwarning = _format_warning
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("lightning.pytorch.pflight").setLevel(logging.INFO)
    for message in (
        r".*does not have many workers",
        r".*isinstance\(treespec, LeafSpec\).*",
        r".*Checkpoint directory .* exists and is not empty",
        r".*GPU available but not used",
        r".*Checkpoint\(monitor='val/macro_\w+'\)` could not find",  # before the first validation
        r".*The number of training batches .* is smaller than the logging interval",
    ):
        warnings.filterwarnings("ignore", message=message)
    warnings.filterwarnings("ignore", category=DeprecationWarning, module="lightning")


def fail(message: str, status: int = 2) -> NoReturn:
    """Print one line and exit. Other ranks wait first: rank 0 ends them if it fails as well."""
    rank = getattr(rank_zero_only, "rank", None) or 0
    if rank:
        time.sleep(_RANK_0_FIRST)
        message = f"rank {rank}: {message}"
    sys.stderr.write(f"pflight: error: {one_line(message)}\n")
    sys.exit(status)


def configuration_error(error: BaseException) -> BaseException | None:
    """Return the configuration error, of pflight or Lightning, that caused an exception."""
    kinds = (ConfigurationError, MisconfigurationException)
    return next((cause for cause in causes(error) if isinstance(cause, kinds)), None)


@rank_zero_only
def say(line: str) -> None:
    """Print a line about the run, on rank 0."""
    print(f"pflight: {one_line(line)}", flush=True)
