"""The server's requests to a node. Each request is checked as a whole before it is run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Literal, NamedTuple, cast, get_args

from flwr.app import RecordDict

from pflight.data.loaders import SPLITS, Split

from .memory import NEVER
from .messages import MessageError, check_parts, count_of, list_of, nth, number_of, words_of

SENT, JUDGED = "sent", "judged"
"""Groups of entries that the server sends: for training, and for evaluation."""
Work = Literal["describe", "train", "gradients", "aside", "losses", "evaluate"]
_ROUNDS, _CLIENTS = 2**31, 2**20  # at most
_COUNTS = {"client": (0, _CLIENTS), "clients": (1, _CLIENTS), "after": (NEVER, _ROUNDS)}
_COUNTS |= dict.fromkeys(("round", "rounds", "epochs", "batches", "as_round"), (0, _ROUNDS))
"""The smallest and the largest value of each whole number."""


class _Form(NamedTuple):
    """The parts that one kind of request has in addition to the common ones."""

    numbers: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    groups: tuple[str, ...] = (SENT,)


_COMMON = _Form(
    ("client", "clients", "round", "rounds", "after", "mean_samples"),
    ("do", "run", "session", "after_session", "agreement"),
)
_FORMS: Mapping[Work, _Form] = {
    "describe": _Form((), ("names", "digests"), ()),
    "train": _Form(("epochs",), ("returns",)),
    "gradients": _Form(("batches",), ("returns",)),
    "aside": _Form(("epochs", "as_round"), ("returns",)),
    "losses": _Form((), ("split",)),
    "evaluate": _Form((), ("split",), (SENT, JUDGED)),
}


@dataclass(frozen=True)
class Request:
    """A request without its tensors.

    Attributes:
        work: The requested work.
        run: The run's id.
        session: The id of the current session.
        agreed: A digest of the options that both sides must share.
        client: The client's id.
        clients: The number of clients.
        round: The current round.
        rounds: The number of past rounds.
        after: The client continues from its memory after this round.
        after_session: The id of the session of that round.
        mean_samples: Mean number of training samples of the clients that may train.
        epochs: Epochs of local training; 0 for the federation's own number.
        batches: Number of batches for the gradient; 0 for all samples.
        as_round: The round that keys the random numbers of a training aside.
        returns: Names of the entries to send back.
        split: The split of the samples.
        agreement: Digests of the server's options, by name.
    """

    work: Work
    run: str
    session: str
    agreed: str
    client: int
    clients: int
    round: int
    rounds: int
    after: int
    after_session: str
    mean_samples: float
    epochs: int
    batches: int
    as_round: int
    returns: tuple[str, ...]
    split: Split
    agreement: Mapping[str, str]

    @classmethod
    def of(cls, content: RecordDict) -> Request:
        """Return the request that a message holds.

        Raises:
            MessageError: If the request is invalid, with the reason.
        """
        asked = words_of(content, "do")
        if asked not in get_args(Work):
            raise MessageError(f"there is nothing that is called {asked!r}")
        work = cast(Work, asked)
        numbers, words, groups = _FORMS[work]
        groups = (*models_in(content), *groups) if work == "losses" else groups
        check_parts(content, (*_COMMON.numbers, *numbers), (*_COMMON.words, *words), groups)
        known = {*_COMMON.numbers, *numbers}
        counts = {
            name: count_of(content, name, *limits) if name in known else 0
            for name, limits in _COUNTS.items()
        }
        if counts["client"] >= counts["clients"]:
            raise MessageError(f"there is no client {counts['client']} among {counts['clients']}")
        if (mean_samples := number_of(content, "mean_samples")) < 0:
            raise MessageError(f"its mean_samples is {mean_samples:g}")
        return cls(
            work,
            words_of(content, "run"),
            words_of(content, "session"),
            words_of(content, "agreement"),
            **counts,
            after_session=words_of(content, "after_session"),
            mean_samples=mean_samples,
            returns=tuple(list_of(content, "returns")),
            split=_split_of(content, work),
            agreement=_agreement_of(content),
        )


def models_in(content: RecordDict) -> list[str]:
    """Return the names of the groups that hold the sent models, one or several."""
    places = takewhile(lambda place: nth(SENT, place) in content, count())
    return [nth(SENT, place) for place in places]


def _split_of(content: RecordDict, work: Work) -> Split:
    split = words_of(content, "split")
    if work == "evaluate" and split not in ("val", "test"):
        raise MessageError(f"clients are not judged on {split!r} samples")
    if work == "losses" and split not in (*SPLITS, "held_out"):
        raise MessageError(f"there are no samples that are called {split!r}")
    return cast(Split, split)


def _agreement_of(content: RecordDict) -> dict[str, str]:
    names, digests = list_of(content, "names"), list_of(content, "digests")
    if len(names) != len(digests) or len({*names}) < len(names):
        raise MessageError("it does not say what it wants to agree on")
    return dict(zip(names, digests, strict=True))
