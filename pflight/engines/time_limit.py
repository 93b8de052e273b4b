"""A time limit for a client's code, as far as Python can interrupt it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from pflight.errors import ConfigurationError

_AGAIN = 1.0  # seconds until the next try, if a client has caught the exception


class ClientTimeout(BaseException):
    """A client took too long. The client's own ``except Exception`` does not catch this."""


def check_timer() -> None:
    """Raise unless code can be interrupted here.

    Raises:
        ConfigurationError: Outside of the main thread, or without the timers of POSIX.
    """
    if not hasattr(signal, "setitimer"):
        raise ConfigurationError(
            "client_timeout needs the timers of POSIX, which this system lacks"
        )
    if threading.current_thread() is not threading.main_thread():
        raise ConfigurationError(
            "client_timeout needs the main thread, in which alone Python handles signals"
        )


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise :class:`ClientTimeout` in code that takes longer. An earlier timer goes on afterwards.

    Python code is interrupted, and so are calls that wait, such as ``time.sleep`` or reading a
    socket. A call into a C library ends first. A client that catches the exception has failed too:
    the exception is raised again at the end.

    Args:
        seconds: The limit, or ``None`` for no limit.

    Raises:
        ClientTimeout: When the time is over, and again at the end if it was caught inside.
    """
    if seconds is None:
        yield
        return

    over: list[ClientTimeout] = []

    def interrupt(*_: Any) -> NoReturn:
        over.append(ClientTimeout(f"took longer than client_timeout, {seconds:g} s"))
        raise over[-1]

    began, (left, interval) = time.monotonic(), signal.getitimer(signal.ITIMER_REAL)
    handler = signal.signal(signal.SIGALRM, interrupt)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN)
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:  # also if the timer goes off in the line above
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:
            left = max(left - (time.monotonic() - began), 1e-3)
            signal.setitimer(signal.ITIMER_REAL, left, interval)
    if over:
        raise over[0]
