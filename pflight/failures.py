"""What becomes of clients that fail, on all ranks alike."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from itertools import chain

import torch

from .distributed import gather, is_distributed
from .errors import ClientError
from .updates import ClientFailure


class Failures:
    """The clients that failed at something: left out of it with a warning, or the end of the run.

    With several ranks the run ends when all of them :meth:`raise_together`: none waits for another.

    Args:
        round_index: In or after which round.
        consequence: What becomes of them, where the run goes on.
        on_client_error: ``"skip"`` or ``"raise"``.
        together: Whether all ranks will :meth:`raise_together`; else each stops by itself.

    Attributes:
        clients: Their ids.
    """

    def __init__(
        self, round_index: int, consequence: str, on_client_error: str, together: bool = True
    ) -> None:
        self.round_index = round_index
        self.consequence = consequence
        self.stop = on_client_error == "raise" or torch.is_anomaly_enabled()
        self.together = together and is_distributed()
        self.clients: set[int] = set()
        self._errors: list[ClientError] = []

    def note(self, failures: Iterable[ClientFailure], doing: str = "") -> None:
        """Warn of clients that failed, of each for its first failure, or stop the run.

        Args:
            failures: Clients of this rank.
            doing: What they did when they failed, after "failed".

        Raises:
            ClientError: To stop the run, unless ranks do so together.
        """
        for failure in failures:
            if failure.client in self.clients:
                continue
            self.clients.add(failure.client)
            failed = f"failed {doing}".rstrip()
            message = (
                f"round {self.round_index}: client {failure.client} {failed}: {failure.reason}"
            )
            if not self.stop:
                warnings.warn(f"{message}; {self.consequence}", stacklevel=2)
                continue
            error = ClientError(message)
            error.__cause__ = failure.error
            if not self.together:
                raise error
            self._errors.append(error)

    def raise_together(self) -> None:
        """Stop all ranks where a client of any of them failed; each rank has to call it.

        Raises:
            ClientError: The same on every rank.
        """
        if not (self.stop and self.together):
            return
        said = chain.from_iterable(gather([str(error) for error in self._errors]))
        if (first := next(said, None)) is not None:
            own = (error for error in self._errors if str(error) == first)
            raise next(own, ClientError(first))
