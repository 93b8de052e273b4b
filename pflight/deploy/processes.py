"""Child processes that end with this one, and their ports."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from pflight.errors import ConfigurationError
from pflight.messages import one_line

_LOOK = 0.2  # seconds between two looks at a process
_START = 120.0  # seconds until a process has started
_PATIENCE = 10.0  # seconds until it has ended after a signal
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux
_CHATTER = re.compile(r"(\x1b\[[\d;]*m)?(INFO|(ERROR:\s+)?Traceback )|\s|For more information")
_LINES, _CHARACTERS = 8, 600  # of the last output of a process, at most


class ProcessEndedError(ConfigurationError):
    """A process of Flower has ended by itself."""


class Process:
    """A command of Flower as a child process. It ends with this process.

    Args:
        command: The name and arguments of the command.
        folder: The folder for Flower's files and for the log.
        name: The name of the log file, also used in messages.
    """

    def __init__(self, command: list[str], folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.name = name
        self.log = folder / f"{name}.log"
        self._begun = self._read = self.log.stat().st_size if self.log.exists() else 0
        own = {
            "FLWR_HOME": str(folder),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
        }
        path = Path(sysconfig.get_path("scripts"), command[0])
        program = str(path) if path.is_file() else command[0]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [program, *command[1:]],
                env={**os.environ, **own},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )

    def check(self) -> None:
        """Raise if the process has ended.

        Raises:
            ProcessEndedError: If it has, with its last output.
        """
        if (code := self._process.poll()) is not None:
            raise ProcessEndedError(
                f"{self.name} ended with status {code}: {self.said()} (see {self.log})"
            )

    def said(self) -> str:
        """Return the last output in one line, without the frames of tracebacks."""
        lines = self._written(self._begun).decode(errors="replace").splitlines()
        told = [line for line in lines if line.strip() and not _CHATTER.match(line)]
        for word in ("Exit Code", "ERROR"):  # the first is Flower's own reason
            if places := [place for place, line in enumerate(told) if word in line]:
                told = told[places[-1] :][:_LINES]
                break
        return one_line(" ".join(told[-_LINES:]))[:_CHARACTERS]

    def news(self) -> list[str]:
        """Return the complete lines written since the last call."""
        whole, end, _ = self._written(self._read).rpartition(b"\n")
        self._read += len(whole + end)
        return whole.decode(errors="replace").splitlines()

    def _written(self, start: int) -> bytes:
        with self.log.open("rb") as log:
            log.seek(start)
            return log.read()

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Wait until the process has started.

        Args:
            ready: Returns whether it has started.

        Raises:
            ConfigurationError: If it does not start in time, or has ended.
        """
        end = time.monotonic() + _START
        while not ready():
            self.check()
            if time.monotonic() > end:
                raise ConfigurationError(f"{self.name} did not start: {self.said()}")
            time.sleep(_LOOK)

    def stop(self) -> None:
        """End the process and its children."""
        for signum in (signal.SIGTERM, signal.SIGKILL):  # the second ends the whole group
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signum)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_PATIENCE)


def end_with_parent() -> None:
    """End the calling process when its parent is killed, where the system supports it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Make a signal interrupt the block, clean up, and then end this process."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(signum)  # not caught as a failure of a client

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, interrupt)
    try:
        yield
    except KeyboardInterrupt as stop:
        signum = stop.args[0] if stop.args else signal.SIGINT
        print(f"pflight: stopped by {signal.Signals(signum).name}", flush=True)
        sys.exit(128 + signum)


def check_port(host: str, port: int) -> None:
    """Raise if nothing can listen at a port.

    Raises:
        ConfigurationError: If the port is in use or not allowed. The message names it.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            taken = "end what listens there, or give another --port"
            mend = {errno.EADDRINUSE: taken, errno.EACCES: "give another --port"}
            raise ConfigurationError(
                f"the server can't listen at {host}:{port}: {error.strerror}; "
                f"{mend.get(error.errno or 0, 'give an address of this machine as --host')}"
            ) from error


def free_port() -> int:
    """Return a port of the loopback interface that is currently free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
