"""What a client remembers at its node, on its disk, as of each of its last rounds."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from zipfile import BadZipFile

import torch

from pflight.errors import ConfigurationError
from pflight.runs.checkpoint import is_whole
from pflight.runs.files import replacing
from pflight.runs.memory import ClientMemory
from pflight.runs.memory_files import Slots, sync

from .messages import MessageError

NEVER = -1
"""In place of a round: before the first one in which a client's answer was used."""
_KEPT = 20
_FILE = "round-{}-{}.pt"
_ID = re.compile("[0-9a-f]{16}")


def new_id() -> str:
    """Return an id for a run or a session, which no other one has."""
    return secrets.token_hex(8)


class NodeMemory(ClientMemory):
    """One client's memory, of which a file is kept for each of the last rounds.

    The server says after which round a client's memory is asked for: the last one of which it has
    used the client's answer. So a client that was too late, or whose server was killed and has
    resumed from a checkpoint, goes on from what the server knows it by.

    Each run has a folder of its own there, so that no run goes on from what another one has kept.
    A run has a session for each start of its server, so that neither does one of two sessions that
    resume from the same checkpoint.

    Args:
        folder: Where the runs' folders are.
        client: The client's id.
    """

    def __init__(self, folder: Path, client: int) -> None:
        super().__init__()
        self.root = self.folder = folder
        self._client, self._session = client, ""
        self._at: Path | None = None

    def enter(self, run: str, session: str) -> None:
        """Be the memory of a session of a run.

        Args:
            run: The run's id, as :func:`new_id` returns one.
            session: The session's, likewise.

        Raises:
            MessageError: If one is no such id.
        """
        _check_id(run, "run")
        _check_id(session, "session")
        self.folder, self._session = self.root / run, session

    def go_to(self, round: int, session: str, required: bool, anew: bool = False) -> bool:
        """Be as after a round.

        Args:
            round: Its index, or :data:`NEVER`.
            session: In which that was.
            required: Whether there must be something.
            anew: Whether to be as before all rounds where there is nothing that can be read.

        Returns:
            Whether that was so.

        Raises:
            ConfigurationError: If there is no such memory here.
            MessageError: If there can be no such session.
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
        """Write the memory down as that after a round, and forget rounds of long ago.

        That which the client has gone on from stays: the server may ask for it again.
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
        files = {path: _round_of(path) for path in self.folder.glob(_FILE.format("*", "*"))}
        old = sorted({index for index in files.values() if index < round})[:-_KEPT]
        for path, index in files.items():
            if index in old and path != begun:
                path.unlink(missing_ok=True)

    def forget_changes(self) -> None:
        """Read the memory again before it is used: something came in between."""
        self._at = None

    def _whose(self, round: int) -> dict[str, int]:
        return {"client": self._client, "round": round}


def _check_id(given: str, whose: str) -> None:
    if not _ID.fullmatch(given):
        raise MessageError(f"the server sent no id of its {whose}")


def _round_of(path: Path) -> int:
    return int(path.stem.split("-")[1])


def _read(path: Path, whose: Mapping[str, int]) -> Slots:
    try:
        if path.is_file() and not is_whole(path):  # torch.load does not check the checksums
            raise BadZipFile
        saved = torch.load(path, map_location="cpu", weights_only=True)
        slots: Slots = saved.pop("slots")
        if saved == whose:
            return slots
        reason = "is another client's or another round's"
    except FileNotFoundError:
        reason = "is not there"
    except Exception as error:  # whatever torch.load raises for a damaged file
        reason = f"can't be read ({type(error).__name__})"
    raise ConfigurationError(
        f"its memory after round {whose['round']} {reason} in {path.parent}: put it back from a "
        "backup, or start its node with --anew, as a client that has never trained"
    )
