"""Nodes that lie, fall silent, come too late or start again, and a server that does."""

from __future__ import annotations

import io
import warnings
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from flwr.app import RecordDict
from jsonargparse import Namespace
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from pflight.callbacks import (
    APFL,
    Ditto,
    FedAvg,
    FedEC,
    FedRep,
    FeSEM,
    ServerCallback,
    SharedPart,
)
from pflight.deploy.agreement import digest_of, text_of_model
from pflight.deploy.memory import NEVER, NodeMemory, new_id
from pflight.deploy.messages import entries_of, packed
from pflight.deploy.node import COUNTS, STATE
from pflight.deploy.remote import Asked
from pflight.errors import ConfigurationError
from pflight.states.layers import Layers
from pflight.task import plain_sgd
from tests.deploy.in_process import Deployed
from tests.runs import assert_same, batchnorm_client, small_data

LIAR = 2
MODELS = ("", "server/")
KEEPERS = {  # what clients keep from one round to the next: a memory, a private model, both
    "FedEC": FedEC,
    "Ditto": Ditto,
    "FedPer": lambda: SharedPart(Layers(last=1)),
}


def deployed(
    folder: Path, callback: Callable[[], ServerCallback] = FedAvg, **options: Any
) -> Deployed:
    data = small_data((5, 12, 7, 9))
    return Deployed(batchnorm_client, data, callback, folder, **options)


def state_of(answer: RecordDict) -> dict[str, Tensor]:
    """Return the state that an answer has."""
    like = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    like["network.1.num_batches_tracked"] = torch.tensor(0)
    return entries_of(answer, STATE, like)


SHAPES = {name: tensor.shape for name, tensor in batchnorm_client().state_dict().items()}


def with_state(answer: RecordDict, change: Callable[[Tensor], Tensor]) -> RecordDict:
    """Return an answer whose first entry is changed."""
    state = state_of(answer)
    state["network.0.weight"] = change(state["network.0.weight"])
    return repacked(answer, state)


def without(answer: RecordDict) -> RecordDict:
    """Return an answer without one of its entries."""
    state = state_of(answer)
    del state["network.0.weight"]
    return repacked(answer, state)


def repacked(answer: RecordDict, state: dict[str, Tensor]) -> RecordDict:
    return packed({STATE: state}, answer.metric_records["numbers"])


def rigged(name: str, value: Any) -> Callable[[RecordDict], RecordDict]:
    """Return what sets a number of an answer."""

    def change(answer: RecordDict) -> RecordDict:
        answer.metric_records["numbers"][name] = value
        return answer

    return change


LIES = {
    "its network.0.weight is NaN": lambda a: with_state(a, lambda w: w * torch.nan),
    "its .* is NaN or infinite": lambda a: with_state(a, lambda w: w / 0),
    "as float32 of shape": lambda a: with_state(a, lambda w: w[:1]),
    "as float64": lambda a: with_state(a, lambda w: w.double()),
    "it sent no network": without,
    "it sent no number answered": lambda _: RecordDict(),
    "it logged train/loss in a form": rigged("logs.train/loss", 3),
    "out of paper": lambda _: packed(words={"failed": "out of\npaper"}),
    "its node did not answer": lambda _: "its node did not answer within 3 s",
}


@pytest.mark.short("*NaN or infinite*")
@pytest.mark.parametrize("said", LIES)
def test_a_node_that_lies_is_left_out_and_named(said: str, tmp_path: Path) -> None:
    """The others' result is that of a round in which its node was not connected."""
    results = []
    for lie in (LIES[said], lambda _: "its node is not connected"):
        run = deployed(tmp_path / str(len(results)))

        def on_answer(asked: Asked, answer: RecordDict, lie: Any = lie) -> RecordDict | str:
            lies = asked.client == LIAR and asked.work == "train" and asked.round == 1
            return lie(answer) if lies else answer

        run.post.on_answer = on_answer
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            federation = run.server(3)
        assert [entry.failed for entry in federation.history] == [[], [LIAR], []]
        results.append((federation, [str(warning.message) for warning in caught]))
    (lied, messages), (absent, _) = results
    with pytest.warns(UserWarning, match=rf"round 1: client {LIAR} failed: .*{said}"):
        warnings.warn("; ".join(messages), stacklevel=1)
    assert_same(lied.server_states()[0], absent.server_states()[0])
    assert lied.history[1].metrics["clients/failed"] == 1


@pytest.mark.filterwarnings("ignore:round .*client 2 failed on its val samples")
@pytest.mark.parametrize("name", ["count", "right"])
def test_who_miscounts_is_not_counted(name: str, tmp_path: Path) -> None:
    run = deployed(tmp_path)

    def on_answer(asked: Asked, answer: RecordDict) -> RecordDict:
        if asked.client == LIAR and asked.work == "evaluate":
            whole, real = torch.tensor(0), torch.tensor(0.0, dtype=torch.double)
            like = {"count": whole, "right": whole, "f1": real, "loss_sum": real}
            counts = {model: entries_of(answer, f"{model}{COUNTS}", like) for model in MODELS}
            for own in counts.values():
                own[name] += 9
            return packed({f"{model}{COUNTS}": own for model, own in counts.items()})
        return answer

    run.post.on_answer = on_answer
    federation = run.server(1)
    counts = federation.client_metrics("val")["num_samples"]
    assert counts[LIAR] == 0
    assert counts.sum() == 3 * 4


class AfterRound(L.Callback):
    """Does something after a round."""

    def __init__(self, round: int, work: Callable[[], None]) -> None:
        self.round, self.work = round, work

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch == self.round:
            self.work()


@pytest.mark.short("FedPer")
@pytest.mark.parametrize("name", KEEPERS)
def test_a_node_that_starts_again_goes_on(name: str, tmp_path: Path) -> None:
    whole = deployed(tmp_path / "whole", KEEPERS[name]).server(4)
    run = deployed(tmp_path / "broken", KEEPERS[name])

    def restart() -> None:
        run.post.nodes[1] = run.node(1)

    broken = run.server(4, AfterRound(1, restart))
    assert_same(whole.server_states()[0], broken.server_states()[0])
    assert whole.history[-1].metrics == broken.history[-1].metrics


@pytest.mark.long
@pytest.mark.parametrize("name", KEEPERS)
def test_a_node_that_was_too_late_goes_on_from_what_was_used(name: str, tmp_path: Path) -> None:
    """It has trained in round 1, which the server knows nothing of."""
    runs = [deployed(tmp_path / part, KEEPERS[name]) for part in ("late", "absent")]

    def late(asked: Asked, answer: RecordDict) -> RecordDict | str:
        missed = asked.client == 1 and asked.round == 1 and asked.work == "train"
        return "its node did not answer within 3 s" if missed else answer

    runs[0].post.on_answer = late
    answer = runs[1].post.nodes[1].answer

    def absent(content: RecordDict) -> RecordDict:
        asked = content.config_records["words"]["do"], content.metric_records["numbers"]["round"]
        return packed(words={"failed": "no"}) if asked == ("train", 1) else answer(content)

    runs[1].post.nodes[1].answer = absent  # type: ignore[method-assign]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        left, right = (run.server(4) for run in runs)
    assert [entry.failed for entry in left.history] == [[], [1], [], []]
    assert_same(left.server_states()[0], right.server_states()[0])
    assert left.history[-1].metrics == right.history[-1].metrics


@pytest.mark.short("FedPer")
@pytest.mark.filterwarnings("ignore:Checkpoint directory", "ignore::FutureWarning")
@pytest.mark.parametrize("name", KEEPERS)
def test_a_server_that_resumes_finds_its_nodes_as_they_were(name: str, tmp_path: Path) -> None:
    """They have gone on meanwhile, to rounds that nobody knows of any more."""
    whole = deployed(tmp_path / "whole", KEEPERS[name]).server(4)
    run = deployed(tmp_path / "broken", KEEPERS[name])
    every = partial(ModelCheckpoint, tmp_path, filename="{epoch}", save_top_k=-1)
    run.server(3, every())
    resumed = run.server(4, every(), ckpt_path=tmp_path / "epoch=1.ckpt")
    assert_same(whole.server_states()[0], resumed.server_states()[0])
    assert whole.history == resumed.history


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_a_checkpoint_of_another_release_is_refused(tmp_path: Path) -> None:
    run = deployed(tmp_path)
    run.server(1, ModelCheckpoint(tmp_path, filename="old"))
    checkpoint = torch.load(tmp_path / "old.ckpt", weights_only=True)
    del checkpoint["callbacks"]["Roster"]["sessions"]
    torch.save(checkpoint, tmp_path / "old.ckpt")
    with pytest.raises(ConfigurationError, match=r"another release .* does not save sessions"):
        run.server(2, ckpt_path=tmp_path / "old.ckpt")


@pytest.mark.long
@pytest.mark.filterwarnings(
    "ignore:Checkpoint directory", "ignore:Be aware that when using", "ignore::FutureWarning"
)
@pytest.mark.parametrize("name", KEEPERS)
def test_a_node_keeps_its_memory_by_run(name: str, tmp_path: Path) -> None:
    """Another run of the same configuration comes in between, on the nodes' same folders."""
    whole = deployed(tmp_path / "whole", KEEPERS[name]).server(4)
    run = deployed(tmp_path / "two", KEEPERS[name])
    run.server(2, ModelCheckpoint(tmp_path, filename="one"))
    other = run.server(3)
    resumed = run.server(4, ckpt_path=tmp_path / "one.ckpt")
    assert whole.history[:3] == other.history
    assert_same(whole.server_states()[0], resumed.server_states()[0])
    assert whole.history == resumed.history


@pytest.mark.long
@pytest.mark.filterwarnings(
    "ignore:Checkpoint directory",
    "ignore:Be aware that when using",
    "ignore:round 2. client 2 failed",
    "ignore::FutureWarning",
)
@pytest.mark.parametrize("name", KEEPERS)
def test_two_sessions_from_one_checkpoint_keep_memories_of_their_own(
    name: str, tmp_path: Path
) -> None:
    """Client 2 fails in round 2 of the other one, so that all go on to something else there."""
    whole = deployed(tmp_path / "whole", KEEPERS[name]).server(5)
    run = deployed(tmp_path / "forked", KEEPERS[name])
    every = partial(ModelCheckpoint, tmp_path, filename="{epoch}", save_top_k=-1)
    run.server(4, every())

    def silent(asked: Asked, answer: RecordDict) -> RecordDict | str:
        return "gone" if (asked.client, asked.round) == (2, 2) else answer

    run.post.on_answer = silent
    run.server(5, ckpt_path=tmp_path / "epoch=1.ckpt")
    resumed = run.server(5, ckpt_path=tmp_path / "epoch=3.ckpt")
    assert_same(whole.server_states()[0], resumed.server_states()[0])
    assert whole.history == resumed.history


def test_a_memory_that_is_asked_for_stays_however_many_answers_were_not_used(
    tmp_path: Path,
) -> None:
    memory, session = NodeMemory(tmp_path, 0), new_id()
    memory.enter(new_id(), session)
    memory.go_to(NEVER, session, required=False)
    memory.keep(0)
    for round in range(1, 40):
        memory.go_to(0, session, required=True)
        memory.keep(round)
    memory.go_to(0, session, required=True)
    assert len([*memory.folder.iterdir()]) <= 22


def flipped(content: bytes) -> bytes:
    """Return what a file has after a bit of a tensor has changed."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/data/0"))
        tensor = archive.read(name)
    return content.replace(tensor, bytes([tensor[0] ^ 1]) + tensor[1:])


@pytest.mark.short("*another client's*")
@pytest.mark.filterwarnings(
    "ignore:round .*client 1 failed on its val samples", "ignore::FutureWarning"
)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda own, others: b"damaged", "can't be read"),
        (lambda own, others: own[:-1000], "can't be read"),
        (lambda own, others: flipped(own), "can't be read"),
        (lambda own, others: others, "is another client's"),
    ],
)
def test_a_lost_memory_is_said(
    change: Callable[[bytes, bytes], bytes], said: str, tmp_path: Path
) -> None:
    run = deployed(tmp_path, FedEC)

    def lose() -> None:
        for path in (tmp_path / "1").glob("*/round-*.pt"):
            others = tmp_path / "2" / path.relative_to(tmp_path / "1")
            path.write_bytes(change(path.read_bytes(), others.read_bytes()))
        run.post.nodes[1] = run.node(1)

    with pytest.warns(UserWarning, match=f"client 1 failed: its memory after round 0 {said}"):
        federation = run.server(3, AfterRound(0, lose))
    assert [entry.failed for entry in federation.history] == [[], [1], [1]]


@pytest.mark.short("FedRep")
@pytest.mark.parametrize("callback", [Ditto, APFL, FedRep, KEEPERS["FedPer"]])
def test_what_is_private_never_leaves(callback: Any, tmp_path: Path) -> None:
    run = deployed(tmp_path, callback)
    left: set[str] = set()

    def note(asked: Asked, answer: RecordDict) -> RecordDict:
        left.update(answer.config_records["words"].get(f"{STATE}.names", ()))
        return answer

    run.post.on_answer = note
    federation = run.server(2)
    private = {*federation.server_callback.private}
    assert private
    assert left == {*federation.clients.layout.names} - private
    with pytest.raises(ConfigurationError, match="client 0 is on its own machine"):
        federation.client_state(0)
    asked = {"clients": 4, "client": 1, "round": 2, "rounds": 2, "mean_samples": 8, "after": 1}
    words = {"do": "train", "returns": sorted(private)}
    session = {"session": run.clients.session, "after_session": run.clients.session}
    words |= {"run": run.clients.run_id, "agreement": run.clients.agreement, **session}
    entries = {"sent": {name: federation.layout.template[name] for name in left}}
    reply = run.post.nodes[1].answer(packed(entries, {**asked, "epochs": 1}, words))
    assert "is not among what leaves this node" in reply.config_records["words"]["failed"]
    assert not reply.array_records


ASKED = {"clients": 4, "client": 0, "round": 0, "rounds": 0, "mean_samples": 8, "after": -1}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"do": "run"}, "nothing that is called 'run'"),
        ({"do": "evaluate", "split": "train"}, "not judged on 'train' samples"),
        ({"do": "losses", "split": "all"}, "no samples that are called 'all'"),
        ({"do": "losses", "split": "train", "run": "../../keys"}, "no id of its run"),
        ({"do": "losses", "split": "train", "session": "../../keys"}, "no id of its session"),
        ({"do": "losses", "split": "train", "after_session": "/keys"}, "no id of its session"),
    ],
)
def test_a_node_does_nothing_else(change: dict[str, str], said: str, tmp_path: Path) -> None:
    node = deployed(tmp_path).post.nodes[0]
    ids = {name: new_id() for name in ("run", "session", "after_session")}
    change = {**ids, "agreement": digest_of(node.agreement), **change}
    reply = node.answer(packed({"sent": {}}, ASKED, change))
    assert said in reply.config_records["words"]["failed"]
    assert node.answer(RecordDict()).config_records["words"]["failed"]


def test_a_node_tells_what_it_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = deployed(tmp_path)
    run.server(1)
    said = capsys.readouterr().out
    assert "pflight: connected, as client 3 of 4\n" in said
    assert said.count("pflight: round 0: trained\n") == 4
    node = run.post.nodes[0]
    node.answer(packed({}, {**ASKED, "round": 2}, {"do": "losses", "split": "train"}))
    node.answer(RecordDict())
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("pflight: no answer to 'losses' in round 2: this node was started")
    assert said[1].startswith("pflight: no answer to a message: there is nothing that")


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "algorithm": ({"callback": lambda: FedAvg("uniform")}, "algorithm.weighting;"),
    "epochs": ({"options": {"local_epochs": 2}}, "model.local_epochs;"),
    "two": ({"options": {"local_epochs": 2, "seed": 3}}, "model.local_epochs, model.seed;"),
    "class": ({"callback": Ditto}, "algorithm;"),
    "batches": ({"data": small_data((5, 12, 7, 9), batch_size=2)}, "data.batch_size;"),
}


@pytest.mark.parametrize("name", [*OTHERS])
def test_a_node_with_another_configuration_is_told(name: str, tmp_path: Path) -> None:
    run, (change, said) = deployed(tmp_path), OTHERS[name]
    before = {part: getattr(run, part) for part in change}
    vars(run).update(change)
    run.post.nodes[3] = run.node(3)
    vars(run).update(before)
    says = rf"client 3's node says: the server has other options than here: {said}"
    with pytest.raises(ConfigurationError, match=says):
        run.server(1)


def test_a_default_that_is_a_function_is_the_same_in_all_processes() -> None:
    client = Namespace(class_path="Classifier", init_args=Namespace(optimizer=plain_sgd))
    config = Namespace(model=Namespace(class_path="Federation", init_args=Namespace(client=client)))
    assert text_of_model(config)["model.client.optimizer"] == "plain_sgd"


@pytest.mark.filterwarnings(
    "ignore:round .*client 3 failed on its val samples", "ignore::FutureWarning"
)
def test_a_node_that_starts_again_with_another_configuration_is_told(tmp_path: Path) -> None:
    run = deployed(tmp_path)

    def restart() -> None:
        run.options = {"local_epochs": 2}
        run.post.nodes[3] = run.node(3)
        run.options = {}

    with pytest.warns(UserWarning, match="client 3 failed: this node was started with another"):
        federation = run.server(2, AfterRound(0, restart))
    assert [entry.failed for entry in federation.history] == [[], [3]]


def test_a_node_with_another_version_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = deployed(tmp_path)
    monkeypatch.setattr("pflight.deploy.agreement.__version__", "9.9")
    with pytest.raises(ConfigurationError, match=r"the server has pflight 9\.9, and here is"):
        run.server(1)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Checkpoint directory", "ignore::FutureWarning")
@pytest.mark.parametrize("name", ["FedAvg", "FedEC", "FeSEM"])
def test_a_newcomer_joins_between_rounds_and_keeps_its_id(name: str, tmp_path: Path) -> None:
    """Its key is the first by name, but it is the last client, also for a server that resumes."""
    callback = {"FedAvg": FedAvg, "FedEC": FedEC, "FeSEM": lambda: FeSEM(2)}[name]
    whole, broken = (deployed(tmp_path / part, callback) for part in ("whole", "broken"))
    for run in (whole, broken):
        late = run.keys / "3.pub"
        late.rename(tmp_path / "late.pub")
        key = (tmp_path / "late.pub").read_bytes()

        def arrive(run: Deployed = run, key: bytes = key) -> None:
            (run.keys / "0-late.pub").write_bytes(key)

        every = partial(ModelCheckpoint, run.folder, filename="{epoch}", save_top_k=-1)
        rounds = 5 if run is whole else 3
        run.server(rounds, AfterRound(0, arrive), every(), places=5)
        if run is broken:
            run.server(5, every(), ckpt_path=run.folder / "epoch=2.ckpt")
        assert [*run.post.online()] == [0, 1, 2, 3]
    history = whole.roster.clients.history
    assert [entry.clients for entry in history] == [[0, 1, 2]] * 2 + [[0, 1, 2, 3]] * 3
    assert [entry.failed for entry in history] == [[]] * 5
    assert history == broken.roster.clients.history
    assert whole.roster.nodes == {**dict(enumerate(whole.roster.nodes.values()))}


@pytest.mark.filterwarnings(
    "ignore:Checkpoint directory", "ignore:round .*client 1 failed", "ignore::FutureWarning"
)
def test_a_run_goes_on_without_a_node_that_is_not_back(tmp_path: Path) -> None:
    run = deployed(tmp_path)
    last = partial(ModelCheckpoint, tmp_path, filename="last", enable_version_counter=False)
    run.server(2, last())
    gone = run.post.nodes.pop(1)
    with pytest.warns(UserWarning, match=r"clients \[1\] did not connect .* goes on without them"):
        federation = run.server(3, last(), ckpt_path=tmp_path / "last.ckpt")
    assert [entry.failed for entry in federation.history] == [[], [], [1]]
    run.post.nodes[1] = gone
    with pytest.raises(ConfigurationError, match=r"there are 4 keys in .*, but 3 places"):
        run.server(1, places=3)


@pytest.mark.filterwarnings("ignore:round .* failed on its val samples", "ignore::FutureWarning")
def test_who_may_not_take_part_any_more_is_left_out(tmp_path: Path) -> None:
    run = deployed(tmp_path)
    with pytest.warns(UserWarning, match="client 2 failed: its node is not connected"):
        federation = run.server(3, AfterRound(0, (run.keys / "2.pub").unlink))
    assert [entry.failed for entry in federation.history] == [[], [], [2]]
