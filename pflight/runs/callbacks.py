"""Callbacks that write the files of a run folder: its configuration and its checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
from jsonargparse import Namespace
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, SaveConfigCallback

from .folder import RunFolder


class RunCheckpoint(ModelCheckpoint):
    """A ModelCheckpoint that finds its files again after the run folder was moved.

    If it is not ``strict``, it ignores a missing metric.
    """

    strict = False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state with the files' current paths."""

        def here(path: str) -> str:
            return str(Path(str(self.dirpath), Path(path).name)) if path else path

        paths = ("best_model_path", "kth_best_model_path", "last_model_path")
        moved = {name: here(state_dict[name]) for name in paths}
        best = {here(path): score for path, score in state_dict["best_k_models"].items()}
        super().load_state_dict(
            {**state_dict, **moved, "best_k_models": best, "dirpath": self.dirpath}
        )
        self.current_score = state_dict["current_score"]  # the next checkpoint has it, too


class SaveRunConfig(SaveConfigCallback):
    """Saves the configuration of a ``fit`` to the run folder, without ``ckpt_path``.

    It saves right before training, after all checks.

    Args:
        make_room: Called first. It moves an earlier run out of the way.
    """

    def __init__(
        self, parser: LightningArgumentParser, config: Namespace, make_room: Callable[[], None]
    ) -> None:
        super().__init__(parser, config)
        self.make_room = make_room

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Write nothing yet."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write ``config.yaml``. The other ranks wait for it."""
        if trainer.is_global_zero:
            self.make_room()
            RunFolder(trainer.default_root_dir).save_config(dumped(self.parser, self.config))
        trainer.strategy.barrier()


def dumped(parser: Any, config: Namespace) -> str:
    """Return the configuration as YAML, without ``ckpt_path`` and ``allow_other_data``."""
    config = config.clone()
    config.ckpt_path = None
    options: Any = config.model.get("init_args") or {}
    if options.get("allow_other_data"):
        options.allow_other_data = False  # it holds for one resume only
    with warnings.catch_warnings():  # jsonargparse 4.49 renamed the argument
        warnings.simplefilter("ignore", DeprecationWarning)
        return parser.dump(config, skip_none=False)
