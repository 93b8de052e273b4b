"""The folder that a data set is read from and downloaded to."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from pflight.errors import ConfigurationError

_log = logging.getLogger("lightning.pytorch.pflight")  # Lightning's handler shows it


def check_root(root: str) -> None:
    """Check that a data set's folder can be read, if it is there.

    Args:
        root: The folder.

    Raises:
        ConfigurationError: It is something else, or can't be read.
    """
    if not os.path.lexists(root):
        return
    if not os.path.isdir(root):
        raise ConfigurationError(f"root {root} is not a folder")
    if not os.access(root, os.R_OK | os.X_OK):
        raise ConfigurationError(f"can't read the folder root {root}: Permission denied")


def announce_download(title: str, root: str) -> None:
    """Say before a download that its folder does not exist: its name may have a mistake."""
    if not os.path.isdir(root):
        _log.info(f"root {root} does not exist: downloading {title} to it")


def absence(root: str) -> str:
    """Return an addition to an error about missing files: their folder is missing, if so."""
    return "" if os.path.isdir(root) else " (root does not exist)"


def is_file(path: Path) -> bool:
    """Tell whether a file is there, and can be read.

    Raises:
        ConfigurationError: Something else is in its place, such as a folder or a broken link, or
            it may not be read.
    """
    if not os.path.lexists(path):
        return False
    if not os.path.isfile(path):
        raise ConfigurationError(f"{path} is not a file")
    if not os.access(path, os.R_OK):
        raise ConfigurationError(f"can't read {path}: Permission denied")
    return True
