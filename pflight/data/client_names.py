"""The clients' names, such as names of hospitals: their check, and their form for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from pflight.errors import ConfigurationError
from pflight.messages import one_line

_LONGEST = 30  # characters


def check_names(whose: str, names: Sequence[str], num_clients: int) -> Sequence[str]:
    """Return the names of clients, if all have different ones or none has one.

    Args:
        whose: The class of the data, for the message.
        names: The names; empty if clients have none.
        num_clients: Number of clients.

    Raises:
        ConfigurationError: Names that are no strings, empty or not unique, or another number than
            that of clients.
    """
    what = f"{whose}: client_names"
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise ConfigurationError(f"{what} must be a list of str, got {_shortened(repr(names))}")
    if not names:
        return ()
    if len(names) != num_clients:
        raise ConfigurationError(
            f"{what} has {len(names)} names, but there are {num_clients} clients"
        )
    for client, name in enumerate(names):
        if not isinstance(name, str) or not one_line(name):
            raise ConfigurationError(
                f"{what} must be strings that are not empty, got {_shortened(repr(name))} for "
                f"client {client}"
            )
    name, count = Counter(names).most_common(1)[0]
    if count > 1:
        first, second, *_ = (client for client, one in enumerate(names) if one == name)
        raise ConfigurationError(
            f"{what} must differ, but clients {first} and {second} are both {_shortened(name)!r}"
        )
    return names


def numbered(names: Sequence[str], client: int) -> str:
    """Return a client's number, with its name in one line, shortened, if it has one.

    Example:
        >>> numbered(["Charité", "Mayo"], 1), numbered([], 1)
        ('1 (Mayo)', '1')
    """
    if not 0 <= client < len(names):
        return str(client)
    name = str(names[client]).encode(errors="backslashreplace").decode()  # a lone surrogate
    return f"{client} ({_shortened(one_line(name))})"


def drawn(label: str) -> str:
    """Return a label that Matplotlib draws literally, without formulas."""
    return label.replace("$", r"\$")


def room_for(labels: Iterable[str]) -> float:
    """Return the inches that labels need in a picture, beyond the width of numbers."""
    return 0.08 * max(0, max(map(len, labels)) - 4)


def _shortened(name: str) -> str:
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…"
