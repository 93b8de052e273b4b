"""Whatever a node sends is used as a whole, or it is left out, named, and leaves no traces."""

from __future__ import annotations

import ast
import math
import pickle
import random
import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from pflight import Federation
from pflight.callbacks import FedAvg
from pflight.datamodules import FederatedDataModule
from pflight.deploy.messages import entries_of, packed
from pflight.deploy.node import COUNTS, STATE
from pflight.deploy.remote import Asked
from pflight.errors import ConfigurationError
from tests.algorithm_tester import ALGORITHMS
from tests.deploy.in_process import Deployed, across
from tests.runs import assert_same, batchnorm_client, small_data
from tests.test_any_method import Diabetes, in_memory

LIARS = (1, 2, 4)
BIG = 2**62
ABSENT = "its node is not connected"
Lie = Callable[[RecordDict], RecordDict | None]
"""Changes an answer in place, or returns another one."""
pytestmark = pytest.mark.filterwarnings("ignore")


def client_data() -> FederatedDataModule:
    return small_data((5, 12, 7, 9, 3, 10))


METHODS: dict[str, tuple[Any, Any, Any]] = {
    name: (partial(batchnorm_client, method.client), client_data, method.callback)
    for name, method in ALGORITHMS.items()
}
METHODS["Diabetes"] = Diabetes, in_memory, FedAvg


def deployed(name: str, folder: Path) -> Deployed:
    make, data, callback = METHODS[name]
    return Deployed(make, data(), callback, folder)


# What can be changed in an answer


def numbers(**given: Any) -> Lie:
    """Set numbers, in whose names a dot is written as two underscores."""
    return lambda answer: answer.metric_records["numbers"].update(_dotted(given))


def words(**given: Any) -> Lie:
    return lambda answer: answer.config_records["words"].update(_dotted(given))


def _dotted(given: dict[str, Any]) -> dict[str, Any]:
    return {name.replace("__", "."): value for name, value in given.items()}


def named(name: str, value: Any) -> Lie:
    return lambda answer: answer.metric_records["numbers"].update({name: value})


def dropped(record: str, name: str | None = None) -> Lie:
    def lie(answer: RecordDict) -> None:
        if name is None:
            del answer[record]
        else:
            del answer[record][name]

    return lie


def set_record(name: str, record: Any) -> Lie:
    return lambda answer: RecordDict({**answer, name: record})


def group(answer: RecordDict, name: str) -> dict[str, Tensor]:
    """Return a group of an answer's entries."""
    said = answer.config_records["words"]
    like = {}
    for entry, kind in zip(said[f"{name}.names"], said[f"{name}.kinds"], strict=True):
        dtype, _, shape = kind.partition(" of shape ")
        like[entry] = torch.zeros(ast.literal_eval(shape), dtype=getattr(torch, dtype))
    return entries_of(answer, name, like)


def entries(change: Callable[[dict[str, Tensor]], Any], *names: str) -> Lie:
    """Change the entries of groups."""

    def lie(answer: RecordDict) -> None:
        for name in names or (STATE,):
            changed = group(answer, name)
            change(changed)
            other = packed({name: changed})
            answer[name] = other[name]
            answer.config_records["words"].update(other.config_records["words"])

    return lie


def nth(index: int, change: Callable[[Tensor], Tensor | None]) -> Lie:
    """Change one of the entries of a state; or leave it out, where that gives ``None``."""

    def change_one(state: dict[str, Tensor]) -> None:
        name = [*state][index % len(state)]
        changed = change(state.pop(name))
        if changed is not None:
            state[name] = changed

    return entries(change_one)


def array(record: str = STATE, **other: Any) -> Lie:
    """Change what a record says of its array."""

    def lie(answer: RecordDict) -> None:
        was = answer.array_records[record]["bytes"]
        own = {"dtype": was.dtype, "shape": was.shape, "stype": was.stype, "data": was.data}
        answer.array_records[record]["bytes"] = Array(*{**own, **other}.values())

    return lie


def renamed(record: str) -> Lie:
    def lie(answer: RecordDict) -> None:
        answer[record] = ArrayRecord({"other": answer.array_records[record]["bytes"]})

    return lie


EVIL = Array("object", (1,), "numpy.ndarray", pickle.dumps(print))
ODD_NAME = "\x1b[2J\nname"
ANY: dict[str, Lie] = {  # of whatever kind of answer
    "nothing": lambda _: RecordDict(),
    "no numbers": dropped("numbers"),
    "no words": dropped("words"),
    "numbers of another kind": lambda a: set_record("numbers", ConfigRecord({"a": 1}))(
        RecordDict({name: record for name, record in a.items() if name != "numbers"})
    ),
    "words of another kind": lambda a: set_record("words", MetricRecord({"a": 1}))(
        RecordDict({name: record for name, record in a.items() if name != "words"})
    ),
    "another record": set_record("more", MetricRecord({"a": 1})),
    "other words": set_record("more", ConfigRecord({"a": 1})),
    "a pickle": set_record("more", ArrayRecord({"bytes": EVIL})),
    "another number": numbers(more=1),
    "an odd name": named(ODD_NAME, 1),
    "a huge list": numbers(more=[0.0] * 100_000),
    "another word": words(more="more"),
    "bytes": words(more=b"\x80"),
    "failed": words(failed=f"out of {ODD_NAME}"),
    "failed in lists": words(failed=["a", "b"]),
    "failed without a word": words(failed=""),
    "failed in bytes": words(failed=b"\x80"),
}
UPDATE: dict[str, Lie] = {
    **{f"answered {value}": numbers(answered=value) for value in (0, 2, -1, 2**62, 2**64 - 1)},
    **{f"answered {value}": numbers(answered=value) for value in (1.0, math.inf, [1], [])},
    "not answered": dropped("numbers", "answered"),
    **{
        f"logged {str(value)[:40]}": named("logs.train/loss", value)
        for value in (
            [math.inf, 1.0],
            [math.nan, 1.0],
            [1.0, math.inf],
            [1.0, math.nan],
            [1e305, 1.0],
            [1.0, 0.0],
            [1.0, -1.0],
            [1.0, 0.5],
            [1, 2**62],
            [1.0],
            [1.0, 1.0, 1.0],
            [],
            [0.0] * 100_000,
            1.0,
            math.inf,
        )
    },
    **{
        f"logged {name[:20]!r}": named(f"logs.{name}", [1.0, 1.0])
        for name in (ODD_NAME, "", " ", "a" * 300, "val/macro_acc", "clients/failed", "num_samples")
    },
    "logged much": lambda a: a.metric_records["numbers"].update(
        {f"logs.{i}": [1.0, 1.0] for i in range(5_000)}
    ),
    **{f"NaN in {i}": nth(i, lambda w: w.double().mul(torch.nan).to(w)) for i in range(2)},
    "another shape": nth(0, lambda w: w[..., None]),
    "another type": nth(0, lambda w: w.double() if w.dtype is torch.float32 else w.float()),
    "one less": nth(0, lambda w: None),
    "one more": entries(lambda state: state.update(more=torch.zeros(3))),
    "an odd entry": entries(lambda state: state.update({ODD_NAME: torch.zeros(3)})),
    "no entries": entries(lambda state: state.clear()),
    "no state": dropped(STATE),
    "a shape of its own": array(shape=(-1, -4)),
    "an array of float32": array(dtype="float32"),
    "an array of NumPy": array(stype="numpy.ndarray"),
    "too few bytes": array(data=b"", shape=(0,)),
    "too many bytes": array(data=bytes(2**20), shape=(2**20,)),
    "another name of the array": renamed(STATE),
    "an empty group": set_record(STATE, ArrayRecord()),
    "a pickle beside it": lambda a: a.array_records[STATE].update(more=EVIL),
    "names in text": words(state__names="network.0.weight"),
    "names twice": lambda a: words(
        state__names=[*a.config_records["words"]["state.names"]] * 2,
        state__kinds=[*a.config_records["words"]["state.kinds"]] * 2,
    )(a),
    "no kinds": dropped("words", "state.kinds"),
    "huge kinds": words(state__kinds=["float32 of shape [99999999999, -1]"] * 50_000),
}
EACH: dict[str, Lie] = {  # of each of the entries that a method shares
    f"{how} {i}": nth(i, change)
    for i in range(12)
    for how, change in {
        "not finite": lambda w: w.double().mul(torch.nan).to(w) if w.is_floating_point() else None,
        "left out": lambda w: None,
        "retyped": lambda w: w.half(),
    }.items()
}
TRACKED: dict[str, Lie] = {
    "a huge count": entries(lambda state: state["network.1.num_batches_tracked"].fill_(BIG)),
    "a huge negative": entries(
        lambda state: state["network.1.num_batches_tracked"].fill_(-(2**63))
    ),
}
LOSS: dict[str, Lie] = {
    f"loss {str(value)[:20]}": numbers(loss=value)
    for value in (math.inf, -math.inf, math.nan, 1e305, [0.1], [], [0.1] * 100_000)
}
JUDGED = tuple(f"{model}{COUNTS}" for model in ("", "server/"))


def counted(*groups: str, **parts: Any) -> Lie:
    """Add to what was counted, in all groups or in some."""

    def change(counts: dict[str, Tensor]) -> None:
        for name, more in parts.items():
            counts[name] += torch.tensor(more).to(counts[name])

    return entries(change, *(groups or JUDGED))


COUNTED: dict[str, Lie] = {
    "2**62 right": counted(right=BIG),
    "more right than samples": counted(right=5),
    "fewer right than none": counted(right=-5),
    "another model's samples": counted("counts", count=1),
    "one more sample": counted(count=1),
    "no samples": entries(lambda c: [part.zero_() for part in c.values()], *JUDGED),
    **{f"loss {x}": counted(loss_sum=x) for x in (math.inf, -math.inf, math.nan, 1e305)},
    **{f"F1 {x}": counted(f1=x) for x in (2.0, -2.0, math.nan, 1e305)},
    "one model alone": dropped("server/counts"),
    "half a model": entries(lambda c: c.pop("right"), "server/counts"),
    "counts of another type": entries(lambda c: c.update(right=c["right"].double()), "counts"),
    "classes": entries(lambda c: c.update(right=torch.zeros(4, dtype=torch.long)), "counts"),
    "a shape of its own": array("counts", shape=(-1,)),
    "a pickle beside it": lambda a: a.array_records["counts"].update(more=EVIL),
    "further values": numbers(value__mae=1.0),
    "higher": words(higher=["acc"]),
}
VALUES: dict[str, Lie] = {
    **{
        f"mae {str(value)[:20]}": numbers(value__mae=value)
        for value in ([1.0], [], [1.0] * 100_000, 1e305, -1e305)
    },
    **{
        f"logged {name[:20]!r}": named(f"value.{name}", 1.0)
        for name in (ODD_NAME, "", " ", "a" * 300, "num_samples")
    },
    "logged much": lambda a: a.metric_records["numbers"].update(
        {f"value.{i}": 1.0 for i in range(5_000)}
    ),
    "logged nothing": dropped("numbers", "value.mae"),
    "logged nothing of the server": dropped("numbers", "server/value.mae"),
    "a further model": named("finetuned/value.mae", 1.0),
    "better of nothing": words(higher=["other"]),
    "better both ways": words(higher=["mae"], lower=["mae"]),
    "better twice": words(lower=["mae", "mae"]),
    "better otherwise": words(higher=["mae"], lower=[]),
    "better unknown": words(lower=[]),
    "better in text": words(lower="mae"),
    "better by number": words(lower=[1.0]),
    "counts": lambda a: RecordDict({**a, **packed({"counts": {"tp": torch.zeros(3)}})}),
}


class Kind(NamedTuple):
    """A method with a kind of answer, and the lies about that."""

    method: str
    work: str
    lies: dict[str, Lie]


KINDS = [
    Kind("FedAvg", "train", ANY | UPDATE | TRACKED),
    Kind("FedSGD", "gradients", ANY | UPDATE),
    Kind("SCAFFOLD", "train", EACH),
    Kind("FedProto", "train", EACH),
    Kind("FedPAC", "train", EACH),
    Kind("IFCA", "losses", ANY | LOSS),
    Kind("FedAvg", "evaluate", ANY | COUNTED),
    Kind("Diabetes", "evaluate", ANY | VALUES),
]
OF_KIND = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.method}-{kind.work}")


class Outcome(NamedTuple):
    """A run, and who was named in which round."""

    federation: Federation
    named: set[tuple[int, int]]


def lied_to(
    kind: Kind, folder: Path, change: Callable[[Asked, RecordDict], Any], rounds: int
) -> Outcome:
    """Run a federation some of whose nodes lie, but for the first round."""
    run = deployed(kind.method, folder)

    def on_answer(asked: Asked, answer: RecordDict) -> RecordDict | str:
        lies = asked.client in LIARS and asked.work == kind.work and asked.round
        return change(asked, answer) if lies else answer

    run.post.on_answer = on_answer
    judges = kind.work in ("losses", "evaluate")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        federation = run.server(rounds, **({} if judges else {"limit_val_batches": 0}))
    lines = [line for line in map(str, (warning.message for warning in caught)) if "client" in line]
    assert all(line.isprintable() and len(line) < 3_000 for line in lines)
    found = [re.match(r"round (\d+): client (\d+) failed", line) for line in lines]
    return Outcome(federation, {(int(one[1]), int(one[2])) for one in found if one})


def told(lie: Lie, answer: RecordDict) -> RecordDict:
    """Return what arrives of a lie."""
    changed = across(answer)
    other = lie(changed)
    return across(changed if other is None else other)


def assert_same_outcome(one: Outcome, other: Outcome) -> None:
    """Compare what two runs lead to."""
    left, right = one.federation, other.federation
    for mine, yours in zip(left.server_states(), right.server_states(), strict=True):
        assert_same(mine, yours)
    for mine, yours in zip(left.history, right.history, strict=True):
        assert (mine.clients, mine.failed) == (yours.clients, yours.failed)
        assert mine.metrics == pytest.approx(yours.metrics, rel=1e-12, nan_ok=True)
    assert torch.equal(left.clients.after, right.clients.after)


@pytest.mark.short("SCAFFOLD-train")
@OF_KIND
def test_a_liar_is_left_out_and_named(kind: Kind, tmp_path: Path) -> None:
    """The others' result is that of rounds in which the liar was not connected."""
    names, many = [*kind.lies], len(LIARS)
    rounds = 1 + -(-len(names) // many)

    def number(round: int, client: int) -> int:
        return (many * (round - 1) + LIARS.index(client)) % len(names)

    def lie(asked: Asked, answer: RecordDict) -> RecordDict:
        return told(kind.lies[names[number(asked.round, asked.client)]], answer)

    lied = lied_to(kind, tmp_path / "lied", lie, rounds)
    absent = lied_to(kind, tmp_path / "absent", lambda *_: ABSENT, rounds)
    everyone = {(round, client) for round in range(1, rounds) for client in LIARS}
    assert not {names[number(*one)] for one in everyone - lied.named}
    assert_same_outcome(lied, absent)


NUMBERS = [0, -1, 1, 2**32, 2**62, 2**64 - 1, 0.5, math.inf, math.nan, 1e308, [], [1], [0] * 9]
TEXTS = ["", "x", ODD_NAME, "x" * 9_000, [], ["a", "b"], True, 1, 2.5, b"\x80", [b"x"], [1, 2]]
ARRAYS = [EVIL, Array("uint8", (-1,), "raw", b""), Array("uint8", (3,), "raw", b"abc")]


def fuzzed(draw: random.Random, answer: RecordDict) -> RecordDict:
    """Return an answer in which a few things are replaced, dropped, added or of another kind."""
    records: dict[str, Any] = dict(across(answer))
    for _ in range(draw.choice([1, 1, 2, 5])):
        name = draw.choice([*records, "more"])
        kind = draw.choice([MetricRecord, ConfigRecord, ArrayRecord])
        record = records.get(name, kind())
        how = draw.choice(["replace", "drop", "add", "retype", "forget"])
        if how == "forget":
            records.pop(name, None)
        elif how == "retype":
            records[name] = kind()
        else:
            of = {MetricRecord: NUMBERS, ConfigRecord: TEXTS, ArrayRecord: ARRAYS}[type(record)]
            own = draw.choice([*record, "more"]) if how != "add" else f"more{draw.random()}"
            if how == "drop":
                record.pop(own, None)
            else:
                record[own] = draw.choice(of)
            records[name] = record
    return across(RecordDict(records))


@OF_KIND
@pytest.mark.long
def test_random_lies_are_used_or_leave_no_traces(kind: Kind, tmp_path: Path) -> None:
    def fuzz(asked: Asked, answer: RecordDict) -> RecordDict:
        return fuzzed(random.Random(100 * asked.round + asked.client), answer)

    def same(asked: Asked, answer: RecordDict) -> RecordDict | str:
        used = (asked.round, asked.client) not in lied.named
        return fuzz(asked, answer) if used else ABSENT

    lied = lied_to(kind, tmp_path / "lied", fuzz, 8)
    assert len(lied.named) > 10
    assert_same_outcome(lied, lied_to(kind, tmp_path / "same", same, 8))


HEAD = "network.3"
DESCRIBED: dict[str, Lie] = {
    **{
        f"{name} {str(value)[:20]}": named(name, value)
        for name in ("samples.train", "samples.val", "samples.test", "fingerprint")
        for value in (-1, 2**62, 2**64 - 1, 1.0, math.inf, math.nan, [1], [])
    },
    "fingerprint of more bits": numbers(fingerprint=2**32),
    **{f"counted {value}": numbers(counted=value) for value in (0, 2, -1, 1.0, [1])},
    **{f"no {name}": dropped("numbers", name) for name in ("samples.val", "fingerprint", "head")},
    "an odd split": named("samples.odd", 1),
    **{
        f"head {str(shape)[:30]}": numbers(head=shape)
        for shape in ([6, 4], [0, 0], [12, 3], [-6, -3], [2**40, 2**39], [6], [], [6.0, 3.0], 6)
    },
    "another head": lambda a: (words(head="network.0")(a), numbers(head=[4, 6])(a))[0],
    **{
        f"head {name[:20]!r}": words(head=name)
        for name in ("", "network.0", "network.1", "other", ODD_NAME, "network." * 500)
    },
    "heads": words(head=[HEAD]),
}


@pytest.mark.long
def test_a_liar_does_not_take_part(tmp_path: Path) -> None:
    run = deployed("FedProto", tmp_path)
    run.server(1)
    clients, known = run.clients, dict(run.known.known)
    before = clients.counted, clients._head
    for name, lie in (ANY | DESCRIBED).items():
        run.post.on_answer = lambda _, answer, lie=lie: told(lie, answer)
        said = clients.describe([LIARS[0]], run.known, run.roster.agreement)
        assert said[LIARS[0]], name
        assert said[LIARS[0]].isprintable()
        assert (clients.counted, clients._head, run.known.known) == (*before, known)


def test_who_lies_before_the_first_round_is_named(tmp_path: Path) -> None:
    run = deployed("FedAvg", tmp_path)
    lie = named("samples.train", 2**62)
    run.post.on_answer = lambda asked, answer: told(lie, answer) if asked.client == 1 else answer
    with pytest.raises(ConfigurationError, match=r"^client 1's node says: its samples.train is"):
        run.server(1)


@pytest.mark.long
def test_a_liar_finds_no_place(tmp_path: Path) -> None:
    run = deployed("FedAvg", tmp_path)
    federation, clients = run.server(1), torch.tensor([0, LIARS[0]])
    after = run.clients.after.clone()
    for name, lie in (ANY | UPDATE).items():
        run.post.on_answer = lambda asked, answer, lie=lie: (
            told(lie, answer) if asked.client in LIARS else answer
        )
        sent = federation.server_callback.broadcast(clients)
        updates = run.clients.train_aside(clients, sent)
        assert updates.clients.tolist() == [0], name
        assert [failure.client for failure in updates.failures] == [LIARS[0]]
        assert torch.equal(run.clients.after, after)


# What a server sends


ASKED: dict[str, Lie] = {
    **{
        f"{name} {str(value)[:20]}": named(name, value)
        for name in ("client", "clients", "round", "rounds", "after")
        for value in (-2, 2**32, BIG, 2**64 - 1, 1.0, math.inf, math.nan, [1], [])
    },
    **{f"mean_samples {x}": numbers(mean_samples=x) for x in (-1.0, math.inf, math.nan, [1.0])},
    "one too many": numbers(client=6),
    "no clients": numbers(clients=0),
    "another work": words(do="run"),
    "works": words(do=["train"]),
    "a path": words(do="../../describe"),
}
OF_RUN: dict[str, Lie] = {
    **{f"run {str(value)[:20]}": words(run=value) for value in ("", "other", ["other"], b"\x80")},
    "nothing sent": dropped("sent"),
    "something else sent": set_record("judging", ArrayRecord({"bytes": EVIL})),
    "a shape of its own": array("sent", shape=(-1, -4)),
    "an array of NumPy": array("sent", stype="numpy.ndarray"),
    "too few bytes": array("sent", data=b"", shape=(0,)),
    "a pickle beside it": lambda a: a.array_records["sent"].update(more=EVIL),
    "one more": entries(lambda sent: sent.update(more=torch.zeros(3)), "sent"),
    "a table": entries(lambda sent: sent.update({"pflight_own.x": torch.zeros(3)}), "sent"),
}
TO_RETURN: dict[str, Lie] = {
    **{
        f"epochs {str(value)[:20]}": numbers(epochs=value) for value in (-1, BIG, 0.5, math.inf, [])
    },
    **{f"returns {str(value)[:20]}": words(returns=value) for value in ("a", [ODD_NAME], [1])},
}
OF_SPLIT: dict[str, Lie] = {
    f"split {value!r}": words(split=value) for value in ("", "all", "../val", ["val"], b"val")
}
TO_AGREE: dict[str, Lie] = {
    "nothing": words(names=[], digests=[]),
    "an odd name": words(names=["pflight", ODD_NAME], digests=["1", "2"]),
    "names twice": words(names=["pflight"] * 2, digests=["1"] * 2),
    "one digest": words(digests=["1"]),
    "text": words(names="pflight", digests="1"),
}
REQUESTS = {
    "describe": ANY | ASKED | TO_AGREE,
    "train": ANY | ASKED | OF_RUN | TO_RETURN,
    "losses": ANY | ASKED | OF_RUN | OF_SPLIT,
    "evaluate": ANY | ASKED | OF_RUN | OF_SPLIT | {"training samples": words(split="train")},
}


def asked_of(run: Deployed, client: int) -> dict[str, RecordDict]:
    """Run a federation; return what a client was asked, the last request of each kind."""
    requests: dict[str, RecordDict] = {}

    def note(asked: Asked, answer: RecordDict) -> RecordDict:
        if asked.client == client:
            requests[asked.work] = asked.content
        return answer

    run.post.on_answer = note
    run.server(2)
    return requests


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def check_refusal(reply: RecordDict, what: str) -> None:
    """Check that an answer is nothing but a reason, which is not that of a program's mistake."""
    failed = reply.config_records["words"]["failed"]
    assert isinstance(failed, str)
    assert failed, what
    assert failed.isprintable(), what
    assert not re.match(r"\w+(Error|Exception)\b", failed), (what, failed)
    assert not reply.array_records
    assert not reply.metric_records["numbers"]


@pytest.mark.parametrize("work", REQUESTS)
@pytest.mark.long
def test_a_node_refuses_what_is_no_request(work: str, tmp_path: Path) -> None:
    run = deployed("IFCA", tmp_path)
    request = asked_of(run, 0)[work]
    node = run.post.nodes[0]
    honest, before = node.answer(across(request)), contents(tmp_path)
    for name, lie in REQUESTS[work].items():
        check_refusal(node.answer(told(lie, request)), name)
        assert contents(tmp_path) == before
    assert node.answer(across(request)).object_id == honest.object_id


@pytest.mark.long
def test_random_requests_are_done_or_refused(tmp_path: Path) -> None:
    run = deployed("IFCA", tmp_path)
    requests, node = asked_of(run, 0), run.post.nodes[0]
    others = {path: said for path, said in contents(tmp_path).items() if "0" not in path.parts}
    for number in range(150):
        request = fuzzed(random.Random(number), requests[[*requests][number % len(requests)]])
        reply = node.answer(request)
        if "failed" in reply.config_records["words"]:
            check_refusal(reply, str(number))
    now = {path: said for path, said in contents(tmp_path).items() if "0" not in path.parts}
    assert now == others
