"""Tests of the clients that fail on one of several ranks."""

from __future__ import annotations

import pytest

from pflight.errors import ClientError
from pflight.runs import failures
from pflight.runs.failures import Failures
from pflight.states.updates import ClientFailure


def test_a_rank_ends_with_the_others_and_with_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noting a failure raises nothing yet: the other rank would wait for ever."""
    monkeypatch.setattr(failures, "is_distributed", lambda: True)
    monkeypatch.setattr(failures, "gather", lambda own: [[], own])  # the other rank comes first
    noted, cause = Failures(4, "it is left out", "raise"), ValueError("no such word")
    noted.note([ClientFailure(3, "no such word", cause)], "to train")
    with pytest.raises(
        ClientError, match=r"^round 4: client 3 failed to train: no such word$"
    ) as it:
        noted.raise_together()
    assert it.value.__cause__ is cause
