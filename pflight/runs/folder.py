"""The folder of a run: its files, the checkpoint to resume from, and earlier runs."""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from tempfile import TemporaryFile
from textwrap import indent

import yaml  # type: ignore[import-untyped]
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from pflight.errors import ConfigurationError, TakenError

from .checkpoint import is_whole, progress
from .files import partial_of, replacing
from .locks import hold, holder, release
from .memory_files import MEMORY, TABLES, clear, is_needed

CHECKPOINTS = "checkpoints"
CONFIG = "config.yaml"
PICTURES = "pictures"
PREDICTIONS = "predictions.csv"
CLIENTS = ("clients.csv", "clients.md")
RESULTS = "results.json"
FAILURE = "failure.json"
LOG = "log.txt"
_EVENTS = "events.out.tfevents.*"
_HPARAMS = "hparams.yaml"
HEADER = "# Written by pflight: all options of the run in this folder.\n"
_LOCK = ".lock"  # the suffix
_NAMED = ("last", "best")
_ANOTHER = "give another --trainer.default_root_dir"
_MOVE = f"move it, or {_ANOTHER}"


class RunFolder:
    """The folder of one run: config, TensorBoard events, checkpoints, pictures, tables.

    It also holds the clients' memory on disk, if used. Files with other names are neither read nor
    moved.

    Args:
        path: The folder, ``trainer.default_root_dir``, by default the current one. It need not
            exist yet.

    Raises:
        ConfigurationError: If the path is not a folder, or not on a file system.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        if "://" in str(path):
            raise ConfigurationError(
                f"the run folder must be on a file system, not {path}: {_ANOTHER}"
            )
        if path is not None and not str(path).strip():
            raise ConfigurationError(
                f"the run folder has no name: {_ANOTHER}; a dot means the current folder"
            )
        self.path = Path(os.path.expanduser(path or "."))  # as the Trainer does
        for part in (self.path, *self.path.parents):
            if os.path.islink(part) and not os.path.exists(part):
                raise ConfigurationError(
                    f"the run folder {self.path} can't be made: {part} is a link that leads "
                    f"nowhere; {_ANOTHER}"
                )
        if os.path.exists(self.path) and not os.path.isdir(self.path):
            raise ConfigurationError(f"the run folder {self.path} is a file: {_ANOTHER}")
        self._found: list[Path] | None = None  # files at the time of the lock
        self._aside: Path | None = None

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / CHECKPOINTS

    def events(self, suffix: str = "") -> list[Path]:
        """Return the event files in the folder with names that end in ``suffix``."""
        return sorted(self.path.glob(_EVENTS + suffix))

    def requeued(self) -> list[Path]:
        """Return the checkpoints that Lightning saved when SLURM requeued the job."""
        return sorted(self.path.glob("hpc_ckpt_*.ckpt"))

    def rounds_saved(self) -> int | None:
        """Return the number of rounds, or epochs, before the newest checkpoint, if any."""
        found = map(progress, [*self.checkpoints.glob("*.ckpt"), *self.requeued()])
        return max((one[1] for one in found if one is not None), default=None)

    def has_run(self) -> bool:
        """Return whether there are results of a round: a checkpoint, a logged scalar, a picture.

        Files from before the first round, such as the config, do not count. Client memory counts if
        a checkpoint anywhere needs it.
        """
        return (
            self._has_checkpoint()
            or any((self.path / PICTURES).glob("*.png"))
            or is_needed(self.path / MEMORY)
            or any(True for path in self.events() for _ in _steps(path))
        )

    def resolve(self, checkpoint: str, may_start: bool = False) -> Path | None:
        """Return the path of a checkpoint. ``"last"`` and ``"best"`` mean this folder's.

        If ``last.ckpt`` is missing, damaged or not the newest, ``"last"`` means the newest
        undamaged checkpoint of the folder, with a warning.

        Args:
            checkpoint: ``"last"``, ``"best"``, or the path of a file.
            may_start: Whether to return ``None`` for ``"last"`` if no round is complete in this
                folder.

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

    @contextmanager
    def claimed(self, work: str) -> Iterator[None]:
        """Lock this folder inside the context against other processes with the same work.

        Reading needs no lock. The lock ends with the process, even after a kill. The folder is
        created if needed, and removed again if it stays empty. If it can't be locked, there is a
        warning.

        Args:
            work: The work that writes: ``"fit"`` or ``"test"``.

        Raises:
            TakenError: If another process has the lock.
            ConfigurationError: If the folder is not writable.
        """
        try:
            made = [path for path in (self.path, *self.path.parents) if not path.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=self.path).close()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigurationError(
                f"the run folder {self.path} can't be written: {reason}; {_ANOTHER}"
            ) from error
        file = self.path / f".{work}{_LOCK}"
        lock = None
        try:
            lock = hold(file)
        except BlockingIOError as error:
            raise TakenError(
                f"another {work} is running in {self.path}, in {holder(file) or 'another process'}:"
                f" wait until it ends, or {_ANOTHER}"
            ) from error
        except OSError as error:
            warnings.warn(
                f"{self.path} can't be locked ({error}): make sure that no other process writes "
                "there",
                stacklevel=2,
            )
        self._found = self._own()
        try:
            yield
        finally:
            if lock is not None:
                release(lock)
            for path in made:
                with suppress(OSError):  # it is not empty
                    path.rmdir()

    def check_kinds(self, work: str) -> None:
        """Raise if a folder is in the place of a file that a command writes, or the reverse.

        Args:
            work: The command, such as ``"fit"``.
        """
        if not os.path.isdir(self.path):  # pathlib raises if a name is too long
            return
        files, folders = [self.path / f".{work}{_LOCK}", *self.events()], []
        if work == "test":
            files += [self.path / name for name in CLIENTS]
        if work == "fit":
            replaced = [self.checkpoints / f"{name}.ckpt" for name in _NAMED]
            replaced.append(self.path / CONFIG)
            files += [*replaced, *map(partial_of, replaced), self.path / _HPARAMS]
            memory = self.path / MEMORY
            folders += [self.checkpoints, self.path / PICTURES, memory, memory / TABLES]
        for path in files:
            if path.is_dir():
                raise ConfigurationError(
                    f"{path} is a folder, but the run needs a file of that name: {_MOVE}"
                )
        for path in folders:
            if os.path.lexists(path) and not path.is_dir():
                raise ConfigurationError(
                    f"{path} is a file, but the run needs a folder of that name: {_MOVE}"
                )

    def check_config(self) -> None:
        """Raise if a run would overwrite a config that pflight did not write."""
        if self._has_own_config() is False:
            raise ConfigurationError(
                f"a run in {self.path} would overwrite {self.path / CONFIG}, which pflight did not "
                f"write: {_MOVE}"
            )

    def check_origin(self) -> None:
        """Raise if a new run would move files aside that don't seem to be pflight's.

        Every run writes its config before any other file that is worth keeping.
        """
        others = (self.checkpoints, self.path / PICTURES)
        foreign = [path for path in others if path.is_dir() and any(path.iterdir())]
        if self._has_own_config() is None and (foreign or self.has_run()):
            what = foreign[0] if foreign else f"the run in {self.path}"
            raise ConfigurationError(
                f"a new run would have to move {what}, but without a {CONFIG} that pflight wrote, "
                f"these may be somebody else's files: {_MOVE}"
            )

    def _has_own_config(self) -> bool | None:
        """Return whether pflight wrote the config here; ``None`` if there is none."""
        try:
            text = (self.path / CONFIG).read_bytes()
        except FileNotFoundError:
            return None
        except OSError:
            return False
        if not text.strip():
            return None
        return text.startswith(HEADER.encode())

    def save_config(self, text: str) -> None:
        """Write the config, unless it is unchanged. A kill leaves the old file or the new one."""
        text = HEADER + text
        config = self.path / CONFIG
        if not config.is_file() or config.read_text(encoding="utf-8", errors="replace") != text:
            _replace(config, text)

    def set_aside(self) -> Path | None:
        """Make room for a new run: move an earlier one to ``<folder>.1``, ``.2``, ...

        If a run ended before its first round, its files are removed. Files newer than the lock
        stay.

        Returns:
            The new path of the earlier run; ``None`` if there was none.

        Raises:
            ConfigurationError: If the earlier run can't be moved.
        """
        found = self._own() if self._found is None else self._found
        if not self.has_run():
            self._clear(found if self._has_own_config() else ())
            return None
        folder = self.path.resolve()
        numbered = (folder.with_name(f"{folder.name}.{n}") for n in count(1))
        target = next(path for path in numbered if not os.path.exists(path))
        try:
            target.mkdir()
            _move(found, target)
        except OSError as error:
            with suppress(OSError):
                _move(target.iterdir(), self.path)
                target.rmdir()
            raise ConfigurationError(
                f"the earlier run in {self.path} can't be moved to {target}: {error.strerror}; "
                f"{_ANOTHER}"
            ) from error
        self._aside = target
        shown = self.path.with_name(target.name) if self.path.name else target
        _point_config(target, shown)
        return shown

    def put_back(self) -> bool:
        """Undo :meth:`set_aside` if the new run has no results of a round.

        Returns:
            Whether an earlier run is back.
        """
        if self._aside is None or self.has_run():
            return False
        self._clear(self._own())
        _move(self._aside.iterdir(), self.path)
        _point_config(self.path, self.path)
        self._aside.rmdir()
        self._aside = None
        return True

    def drop_empty_events(self) -> None:
        """Remove event files without a scalar that are newer than the lock.

        With them TensorBoard could drop rounds that were not repeated.
        """
        for path in {*self.events()}.difference(self._found or ()):
            if not any(True for _ in _steps(path)):
                path.unlink(missing_ok=True)

    def _newest(self, last: Path) -> Path | None:
        """Return the newest undamaged checkpoint to resume from; if equally new, ``last``."""
        files = [*sorted(self.checkpoints.glob("*.ckpt")), *self.requeued()]
        steps = {path: done[0] for path in files if (done := progress(path)) is not None}
        damaged = [path for path in files if path not in steps and not is_whole(path)]
        found = [(step, path == last, path) for path, step in steps.items()]
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
                    f"there is no undamaged checkpoint in {where}: {', '.join(why)}"
                )
            return None
        if newest != last and last not in damaged:
            why.append(f"{last.name} is older" if last in files else f"there is no {last.name}")
        if why:
            which = f"{newest.name}, the newest undamaged checkpoint in {newest.parent}"
            rank_zero_warn(f"{', '.join(why)}: using {which}")
        return newest

    def _has_checkpoint(self) -> bool:
        return any(self.checkpoints.glob("*.ckpt"))

    def _is_empty(self) -> bool:
        # A run that is killed in its first round may have logged it before its first checkpoint.
        if any(step > 0 for path in self.events() for step in _steps(path)):
            return False
        others = {*self.path.glob("*")} - {*self._own()} - {*self.path.glob(f".*{_LOCK}*")}
        return not others and not self._has_checkpoint()

    def _own(self) -> list[Path]:
        names = (
            CHECKPOINTS,
            CONFIG,
            MEMORY,
            PICTURES,
            PREDICTIONS,
            *CLIENTS,
            RESULTS,
            FAILURE,
            LOG,
            _HPARAMS,
        )
        own = [p for name in names if (p := self.path / name).exists()]
        return own + self.events() + self.requeued()

    def _clear(self, paths: Iterable[Path]) -> None:
        """Remove a start-up's files among ``paths``, and empty folders."""
        for path in {*self.events(), self.path / _HPARAMS}.intersection(paths):
            path.unlink(missing_ok=True)
        clear(self.path / MEMORY)
        if self.checkpoints.is_dir() and not any(self.checkpoints.iterdir()):
            self.checkpoints.rmdir()


def _replace(path: Path, text: str) -> None:
    """Write a file atomically."""
    with replacing(path, durable=True) as partial:
        partial.write_text(text, encoding="utf-8")


def _move(paths: Iterable[Path], folder: Path) -> None:
    for path in paths:
        shutil.move(path, folder / path.name)


def _point_config(folder: Path, root: Path) -> None:
    """Update ``default_root_dir`` in the config of a folder that was moved."""
    config = folder / CONFIG
    if config.exists():
        entry = re.compile(r"^( *)default_root_dir:.*\n(\1 +.*\n)*", re.MULTILINE)  # may be folded
        here = yaml.safe_dump({"default_root_dir": str(root)}, allow_unicode=True)
        text = config.read_text(encoding="utf-8")
        _replace(config, entry.sub(lambda found: indent(here, found[1]), text, count=1))


def _steps(events: Path) -> Iterator[int]:
    """Yield the step of every scalar in an event file."""
    from tensorboard.backend.event_processing import (  # type: ignore[import-untyped]
        event_file_loader,
    )

    for event in event_file_loader.EventFileLoader(str(events)).Load():
        for value in event.summary.value:
            if value.metadata.plugin_data.plugin_name == "scalars":
                yield event.step
