"""The folder of a run: what is in it, what continues it, and where an earlier run goes."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from .checkpoint import is_whole, steps_so_far
from .errors import ConfigurationError
from .memory_files import MEMORY, clear, is_needed

CHECKPOINTS = "checkpoints"
CONFIG = "config.yaml"
PICTURES = "pictures"
PREDICTIONS = "predictions.csv"
_EVENTS = "events.out.tfevents.*"
_NAMED = ("last", "best")


class RunFolder:
    """A folder that holds one run: its config, TensorBoard events, checkpoints and predictions.

    It also holds the clients' memory where that is kept on disk. Files of other names are nobody's
    business: they are neither looked at nor moved.

    Args:
        path: The folder, ``trainer.default_root_dir``; it need not exist yet.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._aside: Path | None = None

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / CHECKPOINTS

    def events(self, suffix: str = "") -> list[Path]:
        """Return the event files in the folder whose names end in ``suffix``."""
        return sorted(self.path.glob(_EVENTS + suffix))

    def requeued(self) -> list[Path]:
        """Return the checkpoints that Lightning saved when it had SLURM requeue the job."""
        return sorted(self.path.glob("hpc_ckpt_*.ckpt"))

    def has_run(self) -> bool:
        """Return whether a round has left a trace here, a checkpoint or a logged scalar.

        What a start-up writes before the first round, such as the config, is not a run. Memory is
        one if a checkpoint needs it, wherever that is.
        """
        return (
            self._has_checkpoint()
            or is_needed(self.path / MEMORY)
            or any(True for path in self.events() for _ in _steps(path))
        )

    def resolve(self, checkpoint: str, may_start: bool = False) -> Path | None:
        """Return the file of a checkpoint: ``"last"`` and ``"best"`` are those of this folder.

        In place of a ``last.ckpt`` that is missing, damaged or not the newest, ``"last"`` is the
        newest checkpoint of the folder that is whole, which a warning says.

        Args:
            checkpoint: ``"last"``, ``"best"``, or the path of a file.
            may_start: Return ``None`` for ``"last"`` where the folder is empty, but for what a run
                writes before its first round is complete.

        Raises:
            ConfigurationError: If there is no such checkpoint.
        """
        path = self.checkpoints / f"{checkpoint}.ckpt" if checkpoint in _NAMED else Path(checkpoint)
        if checkpoint == "last" and (newest := self._newest(path)):
            return newest
        if path.is_file():
            return path
        if may_start and checkpoint == "last" and self._is_empty():
            return None
        if checkpoint not in _NAMED:
            raise ConfigurationError(f"there is no checkpoint {checkpoint}")
        others = ", ".join(sorted(path.name for path in self.checkpoints.glob("*.ckpt")))
        state = f"holds {others}" if others else "holds other files"
        state = "is empty" if self._is_empty() else f"{state}, but not this one"
        raise ConfigurationError(
            f"there is no {checkpoint!r} checkpoint: looked for {path}, and {self.path} {state}"
        )

    def set_aside(self) -> Path | None:
        """Make room for a new run: move an earlier one to ``<folder>.1``, ``.2``, ...

        What a start-up that never came to a round left behind is removed.

        Returns:
            Where the earlier run is now; ``None`` if there was none.
        """
        if not self.has_run():
            self._clear()
            return None
        folder = self.path.resolve()
        numbered = (folder.with_name(f"{folder.name}.{n}") for n in count(1))
        target = next(path for path in numbered if not path.exists())
        target.mkdir()
        _move(self._own(), target)
        self._aside = target
        shown = self.path.with_name(target.name) if self.path.name else target
        _point_config(target, shown)
        return shown

    def put_back(self) -> None:
        """Undo :meth:`set_aside` if the new run never came to its first round."""
        if self._aside is not None and not self.has_run():
            self._clear()
            _move(list(self._aside.iterdir()), self.path)
            _point_config(self.path, self.path)
            self._aside.rmdir()
            self._aside = None

    def _newest(self, last: Path) -> Path | None:
        """Return the newest whole checkpoint to go on from; of equally new ones it is ``last``."""
        files = [*sorted(self.checkpoints.glob("*.ckpt")), *self.requeued()]
        steps = {path: steps_so_far(path) for path in files}
        damaged = [path for path in files if steps[path] is None and not is_whole(path)]
        found = [(step, path == last, path) for path, step in steps.items() if step is not None]
        newest = None
        for _, _, path in sorted(found, reverse=True):
            if is_whole(path):
                newest = path
                break
            damaged.append(path)
        why = [f"{path.name} is damaged" for path in sorted(damaged)]
        if newest is None:
            if why:
                where = self.checkpoints
                raise ConfigurationError(
                    f"there is no whole checkpoint in {where}: {', '.join(why)}"
                )
            return None
        if newest != last and last not in damaged:
            why.append(f"{last.name} is older" if last in steps else f"there is no {last.name}")
        if why:
            which = f"{newest.name}, the newest whole checkpoint in {newest.parent}"
            rank_zero_warn(f"{', '.join(why)}: taking {which}")
        return newest

    def _has_checkpoint(self) -> bool:
        return any(self.checkpoints.glob("*.ckpt"))

    def _is_empty(self) -> bool:
        # A run that is killed in its first round may have logged it, and saved no checkpoint yet.
        if any(step > 0 for path in self.events() for step in _steps(path)):
            return False
        found = {path.name for path in self.path.glob("*")} - {path.name for path in self._own()}
        return not found and not self._has_checkpoint()

    def _own(self) -> list[Path]:
        names = (CHECKPOINTS, CONFIG, MEMORY, PREDICTIONS, "hparams.yaml")
        own = [p for name in names if (p := self.path / name).exists()]
        return own + self.events() + self.requeued()

    def _clear(self) -> None:
        for path in [*self.events(), self.path / "hparams.yaml"]:
            path.unlink(missing_ok=True)
        clear(self.path / MEMORY)
        if self.checkpoints.is_dir() and not any(self.checkpoints.iterdir()):
            self.checkpoints.rmdir()


def _move(paths: list[Path], folder: Path) -> None:
    for path in paths:
        shutil.move(path, folder / path.name)


def _point_config(folder: Path, root: Path) -> None:
    """Make the config in a folder that was moved name the folder where it is now."""
    config = folder / CONFIG
    if config.exists():
        text = config.read_text()
        line = re.compile(r"^( *default_root_dir:).*$", re.MULTILINE)
        config.write_text(line.sub(lambda found: f"{found[1]} {root}", text, count=1))


def _steps(events: Path) -> Iterator[int]:
    """Yield the step of every scalar in an event file."""
    from tensorboard.backend.event_processing import (  # type: ignore[import-untyped]
        event_file_loader,
    )

    for event in event_file_loader.EventFileLoader(str(events)).Load():
        for value in event.summary.value:
            if value.metadata.plugin_data.plugin_name == "scalars":
                yield event.step
