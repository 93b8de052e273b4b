"""Lightning without messages and warnings, so that a benchmark prints its table alone."""

from __future__ import annotations

import logging
import warnings


def quiet() -> None:
    """Let Lightning, and pflight in it, say nothing but errors."""
    for name in ("lightning.fabric", "lightning.pytorch", "lightning.pytorch.pflight"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
