"""The base classes of pictures. They define when pictures are drawn and where they are saved."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import lightning as L
import numpy as np
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from pflight.federation import Federation
from pflight.options import PositiveInt, checked
from pflight.runs.files import replacing
from pflight.runs.folder import PICTURES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DPI = 150


class Picture(L.Callback):
    """Draws when a fit ends, if it has completed a round.

    Figures go to TensorBoard as images ``pictures/<name>``, at the step of the last round, and to
    ``<default_root_dir>/pictures/<name>-<round>.png``. A file appears when it is complete. Only
    runs of a federation have pictures.

    A subclass for your own picture defines :meth:`figures`.
    """

    def __init__(self) -> None:
        self._undrawn = False

    def start(self, federation: Federation) -> None:
        """Prepare before the first round. Raise a ConfigurationError if drawing is impossible."""

    def observe(self, federation: Federation) -> None:
        """Record the values to draw. All ranks call it before each drawing."""

    def figures(self, federation: Federation) -> Mapping[str, Figure]:
        """Return the figures by name, or none. Called on rank 0 only."""
        raise NotImplementedError(f"{type(self).__name__} must define figures(federation)")

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Prepare, before the first round."""
        if isinstance(pl_module, Federation):
            self.start(pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Record that a round has not been drawn yet."""
        self._undrawn = isinstance(pl_module, Federation)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw the last round, unless it has been drawn."""
        if self._undrawn and isinstance(pl_module, Federation):
            self.draw(trainer, pl_module)

    def draw(self, trainer: L.Trainer, federation: Federation) -> None:
        """Draw the state after the last round. All ranks have to call it."""
        self.observe(federation)
        self._undrawn = False
        if trainer.is_global_zero:
            for name, figure in self.figures(federation).items():
                _write(trainer, name, federation.history[-1].index, figure)


@checked
class RepeatedPicture(Picture):
    """Draws regularly while a federation is trained, and after its last round.

    Args:
        every: Number of rounds between two pictures; by default the Trainer's
            ``check_val_every_n_epoch``, so that there is one with each evaluation.

    Raises:
        ConfigurationError: If ``every`` is below 1.
    """

    def __init__(self, every: PositiveInt | None = None) -> None:
        super().__init__()
        self.every = every

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw the round if it is due."""
        super().on_train_epoch_end(trainer, pl_module)
        if not isinstance(pl_module, Federation):
            return
        if self.every is None:  # with the evaluations, which count the epochs of this Trainer
            done, every = trainer.current_epoch + 1, trainer.check_val_every_n_epoch or 1
        else:
            done, every = pl_module.history[-1].index + 1, self.every
        if done % every == 0:
            self.draw(trainer, pl_module)


def stacked(by_round: Mapping[int, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of many rounds as two tensors. Checkpoints save them faster."""
    if not by_round:
        return {}
    return {"rounds": torch.tensor([*by_round]), "values": torch.stack([*by_round.values()])}


def unstacked(state: Mapping[str, Tensor]) -> dict[int, Tensor]:
    """Return the tensors by round that :func:`stacked` joined."""
    return dict(zip(state["rounds"].tolist(), state["values"], strict=True)) if state else {}


def new_figure(width: float = 7.0, height: float = 4.5) -> Figure:
    """Return a figure without a window, of a size in inches, with nothing cut off."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=_DPI, layout="constrained")


def _write(trainer: L.Trainer, name: str, step: int, figure: Figure) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.image import imsave

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        return
    pixels = np.asarray(canvas.buffer_rgba())[..., :3]
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_image(f"pictures/{name}", pixels, step, dataformats="HWC")
    path = Path(trainer.default_root_dir, PICTURES, f"{name.replace('/', '-')}-{step:04}.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial:
        imsave(partial, pixels, format="png", dpi=_DPI)
