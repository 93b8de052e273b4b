"""A client's memory on the disk of its node, after each of its last rounds."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from zipfile import BadZipFile

import torch

from pflight.errors import ConfigurationError
from pflight.runs.checkpoint import is_whole
from pflight.runs.files import replacing, sync
from pflight.runs.memory import ClientMemory
from pflight.runs.memory_files import Slots

from .messages import MessageError

NEVER = -1
"""In place of a round: no answer of the client has been used yet."""
_KEPT = 20
_FILE = "round-{}-{}.pt"
_ID = re.compile("[0-9a-f]{16}")


def new_id() -> str:
    """Return a unique id for a run or a session."""
    return secrets.token_hex(8)


class NodeMemory(ClientMemory):
    """The memory of one client, with a file for each of the last rounds.

    The server requests the memory after a certain round: the last one with a used answer of the
    client. So both sides stay consistent if an answer is late or a server resumes.

    Each run has its own folder, so no run continues from the memory of another. Each start of a
    server is a session. So two sessions that resume from one checkpoint don't share memories.

    Args:
        folder: The folder that contains the folders of the runs.
        client: The client's id.
    """

    def __init__(self, folder: Path, client: int) -> None:
        super().__init__()
        self.root = self.folder = folder
        self._client, self._session = client, ""
        self._at: Path | None = None

    def enter(self, run: str, session: str) -> None:
        """Become the memory of a session of a run.

        Args:
            run: The run's id, as :func:`new_id` returns one.
            session: The session's id, likewise.

        Raises:
            MessageError: If an id is invalid.
        """
        _check_id(run, "run")
        _check_id(session, "session")
        self.folder, self._session = self.root / run, session

    def go_to(self, round: int, session: str, required: bool, anew: bool = False) -> bool:
        """Restore the memory after a round.

        Args:
            round: Its index, or :data:`NEVER`.
            session: The session of that round.
            required: Whether the memory must exist.
            anew: Whether to start with an empty memory if the file can't be read.

        Returns:
            Whether the memory was lost and starts empty.

        Raises:
            ConfigurationError: If the memory is missing or can't be read.
            MessageError: If the session's id is invalid.
        """
        _check_id(session, "session")
        path = self.folder / _FILE.format(round, session)
        if path == self._at:
            return False
        self._at, lost = None, False
        slots: Slots = {}
        if round != NEVER and (required or path.is_file()):
            try:
                slots = _read(path, self._whose(round))
            except ConfigurationError:
                if not anew:
                    raise
                lost = True
        self.load_state_dict(slots)
        self._at = path
        return lost

    def keep(self, round: int) -> None:
        """Write the memory after a round, and delete old rounds.

        The memory from which this round started stays, since the server may request it again.
        """
        begun = self._at
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / _FILE.format(round, self._session)
        with replacing(path) as partial:
            with partial.open("wb") as file:
                torch.save({**self._whose(round), "slots": self.state_dict()}, file)
            sync(partial)
        sync(self.folder)
        self._at = path
        every = self.folder.glob(_FILE.format("*", "*"))
        files = {path: int(path.stem.split("-")[1]) for path in every}
        old = sorted({index for index in files.values() if index < round})[:-_KEPT]
        for path, index in files.items():
            if index in old and path != begun:
                path.unlink(missing_ok=True)

    def forget_changes(self) -> None:
        """Discard changes: the next :meth:`go_to` reads the memory from disk again."""
        self._at = None

    def _whose(self, round: int) -> dict[str, int]:
        return {"client": self._client, "round": round}


def _check_id(given: str, whose: str) -> None:
    if not _ID.fullmatch(given):
        raise MessageError(f"the server sent no id of its {whose}")


def _read(path: Path, whose: Mapping[str, int]) -> Slots:
    try:
        if path.is_file() and not is_whole(path):  # torch.load ignores checksums
            raise BadZipFile
        saved = torch.load(path, map_location="cpu", weights_only=True)
        slots: Slots = saved.pop("slots")
        if saved == whose:
            return slots
        reason = "is another client's or another round's"
    except FileNotFoundError:
        reason = "is not there"
    except Exception as error:  # torch.load raises many kinds for a damaged file
        reason = f"can't be read ({type(error).__name__})"
    raise ConfigurationError(
        f"its memory after round {whose['round']} {reason} in {path.parent}: put it back from a "
        "backup, or start its node with --anew, as a client that has never trained"
    )
