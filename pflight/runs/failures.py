"""Failed clients: they are left out with a warning, or the run stops on all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from itertools import chain

import torch

from pflight.errors import ClientError
from pflight.states.updates import ClientFailure

from .distributed import gather, is_distributed


class Failures:
    """Collects the clients that failed, and warns of them or stops the run.

    With several ranks the run ends when all ranks call :meth:`raise_together`. So no rank waits for
    a rank that has ended.

    Args:
        round_index: The round of the failures, or the round before.
        consequence: Consequence for a failed client if the run goes on, for the warning.
        on_client_error: ``"skip"`` or ``"raise"``.
        together: Whether all ranks will call :meth:`raise_together`. Otherwise each rank stops by
            itself.
        numbered: Returns a client's number for messages, with its name if it has one.

    Attributes:
        clients: Ids of the failed clients.
        sound: Number of clients that did not fail, if it is counted.
    """

    def __init__(
        self,
        round_index: int,
        consequence: str,
        on_client_error: str,
        together: bool = True,
        numbered: Callable[[int], str] = str,
    ) -> None:
        self.round_index = round_index
        self.consequence = consequence
        self.stop = on_client_error == "raise" or torch.is_anomaly_enabled()
        self.together = together and is_distributed()
        self.numbered = numbered
        self.clients: set[int] = set()
        self._errors: list[ClientError] = []
        self._first = ""
        self.sound = 0

    def note(self, failures: Iterable[ClientFailure], doing: str = "") -> None:
        """Warn of each client's first failure, or stop the run.

        Args:
            failures: Failures of this rank's clients.
            doing: The clients' activity, for the message after "failed".

        Raises:
            ClientError: If failures stop the run, and the ranks do not stop together.
        """
        for failure in failures:
            if not self.stop:
                failure.forget_frames()
            if failure.client in self.clients:
                continue
            self.clients.add(failure.client)
            client, failed = self.numbered(failure.client), f"failed {doing}".rstrip()
            self._first = self._first or f"client {client}: {failure.reason}"
            message = f"round {self.round_index}: client {client} {failed}: {failure.reason}"
            if not self.stop:
                warnings.warn(f"{message}; {self.consequence}", stacklevel=2)
                continue
            error = ClientError(message)
            error.__cause__ = failure.error
            if not self.together:
                raise error
            self._errors.append(error)

    def end(self, doing: str) -> None:
        """Raise as :meth:`raise_together`, or if all clients failed. Every rank has to call it.

        Args:
            doing: The clients' activity, for the message after "no client could be".

        Raises:
            ClientError: The same error on every rank, with the first failure.
        """
        self.raise_together()
        ranks = gather((self.sound, len(self.clients), self._first))
        failed = sum(count for _, count, _ in ranks)
        if failed and not sum(count for count, _, _ in ranks):
            first = next(first for *_, first in ranks if first)
            raise ClientError(f"no client could be {doing}: all {failed:,} failed, first {first}")

    def raise_together(self) -> None:
        """Stop all ranks if a client of any rank failed and failures stop the run.

        Every rank has to call it.

        Raises:
            ClientError: The same error on every rank.
        """
        if not (self.stop and self.together):
            return
        said = chain.from_iterable(gather([str(error) for error in self._errors]))
        if (first := next(said, None)) is not None:
            own = (error for error in self._errors if str(error) == first)
            raise next(own, ClientError(first))
