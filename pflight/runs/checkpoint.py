"""Checkpoints that survive a kill at any time, and errors that name the file."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from pflight.errors import ConfigurationError

from .files import full_disk, replacing
from .memory_files import locate, named_by


def read_checkpoint(path: str | os.PathLike[str], map_location: Any = "cpu") -> dict[str, Any]:
    """Read a checkpoint of tensors and primitives.

    Raises:
        ConfigurationError: If the file is missing, damaged or no checkpoint, or if the clients'
            memory on disk is missing.
    """
    if not Path(path).is_file():
        raise ConfigurationError(f"there is no checkpoint {path}")
    try:
        if not is_whole(path):  # torch.load does not check the checksums
            raise zipfile.BadZipFile
        checkpoint = torch.load(path, map_location=map_location, weights_only=True)
    except Exception as error:
        raise ConfigurationError(
            f"the checkpoint {path} can't be read: it is damaged or not a checkpoint"
        ) from error
    for entry in ("state_dict", "pytorch-lightning_version"):
        if not isinstance(checkpoint, dict) or entry not in checkpoint:
            raise ConfigurationError(f"{path} is not a Lightning checkpoint: it has no {entry}")
    locate(memory_of(checkpoint), Path(path))
    return checkpoint


def is_whole(path: str | os.PathLike[str]) -> bool:
    """Return whether a checkpoint file is complete and undamaged, by its checksums."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except Exception:  # zipfile raises many kinds of errors on damaged files
        return False


def rounds_so_far(path: str | os.PathLike[str]) -> int | None:
    """Return the number of rounds of :func:`progress`."""
    found = progress(path)
    return found and found[1]


def progress(path: str | os.PathLike[str]) -> tuple[int, int] | None:
    """Return the steps and the rounds before an undamaged checkpoint.

    If the checkpoint is not of a federation, its epochs count as rounds. If a run can't be resumed
    from the checkpoint, return ``None``.
    """
    try:
        checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        if "loops" not in checkpoint:
            return None
        steps = int(checkpoint["global_step"])
        return steps, steps if "pflight" in checkpoint else int(checkpoint["epoch"]) + 1
    except Exception:  # not a checkpoint
        return None


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint to a file beside the target, then renames it. A kill can't damage it."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Write ``checkpoint`` to ``path``. A kill leaves the old file or the new one.

        Raises:
            OSError: If the disk is full or not writable. The old file stays.
        """
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        named = named_by(target, memory_of(checkpoint))
        with named, replacing(target, durable=True) as partial:
            try:
                with partial.open("wb") as file:
                    torch.save(checkpoint, file)
            except RuntimeError as error:  # torch's form of an OSError
                raise full_disk(error) or error from None

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = lambda storage, loc: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read a checkpoint by :func:`read_checkpoint`."""
        return read_checkpoint(path, map_location)


def memory_of(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's record of the clients' memory; empty for other modules."""
    return (checkpoint.get("pflight") or {}).get("memory", {})
