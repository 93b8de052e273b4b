"""What becomes of updates before they travel: the numbers, what is remembered, and the bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from pflight import Federation
from pflight.callbacks import SCAFFOLD, FedALA, FedAvg, FedDANE, FedDyn, FedSGD, FeSEM
from pflight.callbacks.methods.feddyn import Dynamic
from pflight.clients import Clients
from pflight.errors import ConfigurationError
from pflight.method import ClientMethod
from pflight.modifiers import Modifier, Private
from pflight.randomness import Purpose, generator
from pflight.states.state import StateLayout
from pflight.states.updates import ClientUpdates
from pflight.transforms.base import Draw, Transform
from pflight.transforms.clip import Clip
from pflight.transforms.pipeline import Pipeline
from pflight.transforms.top_k import TopK
from tests.algorithm_tester import assert_equal
from tests.runs import (
    CLASSES,
    ENGINES,
    FEATURES,
    assert_same,
    batchnorm_client,
    dropout_client,
    linear_client,
    quadratic_client,
    run,
    small_data,
    world_q,
)

D = FEATURES * CLASSES + CLASSES
"""Parameters of :func:`linear_client`."""


def rows(*values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def no_draw(updates: Tensor) -> Draw:
    return Draw([], updates)


def applied(transform: Transform, updates: Tensor) -> Tensor:
    return transform(updates, no_draw(updates))


class Recorded:
    """The messages of all rounds by round and client: what is trained, sent down, and sent up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rounds: list[dict[int, tuple[dict[str, Tensor], ...]]] = []
        plain = Clients.transformed

        def transformed(
            clients: Clients,
            ids: Tensor,
            sent: TensorDict,
            updates: ClientUpdates,
            *args: Any,
            **options: Any,
        ) -> ClientUpdates:
            message = plain(clients, ids, sent, updates, *args, **options)
            while len(self.rounds) <= clients.current.entry.index:
                self.rounds.append({})
            for row, client in enumerate(updates.clients.tolist()):
                place = ids.tolist().index(client)
                self.rounds[-1][client] = tuple(
                    {n: v.clone() for n, v in part.items()}
                    for part in (updates.states[row], sent[place], message.states[row])
                )
            return message

        monkeypatch.setattr(Clients, "transformed", transformed)

    def changes(self, names: Sequence[str]) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield each client with its update ``[d]``, and with what it has sent of it."""
        for round_ in self.rounds:
            for client, (trained, before, message) in round_.items():
                yield (
                    client,
                    torch.cat([(trained[n] - before[n]).flatten() for n in names]),
                    torch.cat([(message[n] - before[n]).flatten() for n in names]),
                )


# The numbers


def test_top_2_by_hand() -> None:
    """Vectors 10 of the specification."""
    top = TopK(0.5)
    first = applied(top, rows((1, -3, 0.5, 2)))
    assert first.tolist() == [[0, -3, 0, 2]]
    left = rows((1, -3, 0.5, 2)) - first
    assert left.tolist() == [[1, 0, 0.5, 0]]
    with_memory = rows((1, 1, 0.1, 0)) + left
    second = applied(top, with_memory)
    assert second.tolist() == [[2, 1, 0, 0]]
    torch.testing.assert_close(with_memory - second, rows((0, 0, 0.6, 0)))


def test_top_2_with_memory_in_a_pipeline() -> None:
    layout = StateLayout.of(nn.Linear(4, 1, bias=False))
    pipeline = Pipeline([TopK(0.5)], layout, layout.names)
    sent = TensorDict({"weight": torch.full((1, 1, 4), 7.0)}, batch_size=[1])
    memory = pipeline.empty_memory(1, torch.device("cpu"))
    for update, message, left in (
        ((1, -3, 0.5, 2), (0, -3, 0, 2), (1, 0, 0.5, 0)),
        ((1, 1, 0.1, 0), (2, 1, 0, 0), (0, 0, 0.6, 0)),
    ):
        states = {"weight": sent["weight"] + torch.tensor(update).view(1, 1, 4)}
        updates = ClientUpdates(
            torch.tensor([3]), TensorDict(states, batch_size=[1]), torch.tensor([5])
        )
        out, memory = pipeline.run(sent, updates, memory, lambda client: torch.Generator())
        assert memory is not None
        torch.testing.assert_close(
            (out.states["weight"] - 7).flatten(), torch.tensor(message, dtype=torch.float)
        )
        torch.testing.assert_close(
            memory["error"].flatten(), torch.tensor(left, dtype=torch.float), atol=1e-6, rtol=0
        )
        assert out.bytes_saved == 16 - (2 * 4 + 1)
        assert out.changes is not None


@pytest.mark.parametrize(
    ("update", "kept"),
    [
        ((1, 1, 1, 1), (1, 1, 0, 0)),
        ((-1, 2, 1, 1), (-1, 2, 0, 0)),
        ((0, 0, 0, 0), (0, 0, 0, 0)),
        ((0, 0, 0, -2), (0, 0, 0, -2)),
        ((3, -3, 3, 4), (3, 0, 0, 4)),
    ],
)
def test_among_equals_the_first_counts(update: Any, kept: Any) -> None:
    assert applied(TopK(0.5), rows(update)).tolist() == [[*kept]]


def test_rows_are_independent() -> None:
    updates = torch.randn(5, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for one in (TopK(0.3), Clip(2.0)):
        together = applied(one, updates)
        alone = torch.cat([applied(one, row[None]) for row in updates])
        assert_same({"": together}, {"": alone})


@pytest.mark.parametrize(
    ("fraction", "size", "count"),
    [(0.1, 30, 3), (0.1, 31, 4), (0.3, 10, 3), (0.7, 10, 7), (1e-9, 10, 1), (1.0, 7, 7)],
)
def test_k_is_exact(fraction: float, size: int, count: int) -> None:
    """In floating point, 0.1 * 30 is more than 3."""
    assert TopK(fraction).count(size) == count


@pytest.mark.parametrize(
    ("fraction", "size", "nbytes"),
    [
        (0.5, 4, 2 * 4 + 1),  # a bit each
        (0.01, 1000, 10 * 4 + 40),  # a number each
        (0.1, 1000, 100 * 4 + 125),
        (0.99, 100, 99 * 4 + 4 - 4 + 4),  # as without: all of them
        (0.5, 1, 4),
    ],
)
def test_bytes_are_those_of_values_and_places(fraction: float, size: int, nbytes: int) -> None:
    k = TopK(fraction).count(size)
    assert TopK(fraction).nbytes(size, 4) == nbytes
    assert nbytes == min(4 * size, 4 * k + min(4 * k, math.ceil(size / 8)))
    parts = TopK(fraction).pack(applied(TopK(fraction), torch.randn(1, size))[0])
    assert sum(part.nbytes for part in (parts or {"": torch.zeros(size)}).values()) == nbytes


@pytest.mark.parametrize("fraction", [0.01, 0.2, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_packed_is_what_is_unpacked(fraction: float, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(1)
    top = TopK(fraction)
    for update in (torch.randn(300, generator=random, dtype=dtype), torch.zeros(300, dtype=dtype)):
        changed = applied(top, update[None])[0]
        parts = top.pack(changed)
        assert parts is not None
        like = top.packed_like(300, dtype)
        assert {n: (v.shape, v.dtype) for n, v in parts.items()} == {
            n: (v.shape, v.dtype) for n, v in like.items()
        }
        assert_same({"": top.unpack(parts, 300)}, {"": changed})


@pytest.mark.parametrize(
    "parts",
    [
        {"values": torch.ones(2), "places": torch.tensor([1, 1], dtype=torch.int32)},
        {"values": torch.ones(2), "places": torch.tensor([1, 300], dtype=torch.int32)},
        {"values": torch.ones(2), "places": torch.tensor([-1, 3], dtype=torch.int32)},
        {"values": torch.ones(2), "bits": torch.full((38,), 255, dtype=torch.uint8)},
    ],
)
def test_what_nobody_packed_is_refused(parts: dict[str, Tensor]) -> None:
    with pytest.raises(ValueError, match="places"):
        TopK(0.01).unpack(parts, 300)


def test_clipped_norms_are_exact() -> None:
    random = torch.Generator().manual_seed(1)
    updates = torch.randn(6, 1000, generator=random) * torch.logspace(-3, 3, 6)[:, None]
    clipped = applied(Clip(3.0), updates)
    for before, after in zip(updates.double(), clipped.double(), strict=True):
        norm = before.norm()
        if norm <= 3:
            assert torch.equal(before, after)
        else:
            torch.testing.assert_close(after, before * (3 / norm), rtol=1e-7, atol=0)
    assert applied(Clip(1.0), torch.zeros(1, 3)).tolist() == [[0, 0, 0]]
    large = torch.full((1, 4), 1e30)  # whose square is infinite in float32
    torch.testing.assert_close(applied(Clip(2.0), large), torch.ones(1, 4))


@ENGINES
def test_a_clip_is_joint_over_layers_and_floating_buffers(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = Recorded(monkeypatch)
    federation = run(
        batchnorm_client(), small_data(), FedAvg(modifiers=[Clip(0.3)]), 2, engine=engine
    )
    layout = federation.layout
    names = [*layout.parameters, *layout.averaged]
    assert "network.1.running_var" in names
    lengths = [
        (full.double().norm(), short.double().norm()) for _, full, short in recorded.changes(names)
    ]
    assert any(full > 0.4 for full, _ in lengths)
    for full, short in lengths:
        torch.testing.assert_close(short, full.clamp(max=0.3), rtol=1e-5, atol=1e-6)
    for round_ in recorded.rounds:
        for trained, _, message in round_.values():
            counter = "network.1.num_batches_tracked"
            assert torch.equal(trained[counter], message[counter])


def test_a_short_update_is_sent_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded(monkeypatch)
    federation = run(dropout_client(), small_data(), FedAvg(modifiers=[Clip(0.15)]), 3)
    names, lengths = federation.layout.parameters, []
    for round_ in recorded.rounds:
        for trained, before, message in round_.values():
            length = torch.cat([(trained[n] - before[n]).flatten() for n in names]).double().norm()
            lengths.append(float(length))
            same = all(torch.equal(trained[n], message[n]) for n in names)
            assert same == (length <= 0.15)
    assert min(lengths) < 0.15 < max(lengths)


# In a federation


@ENGINES
@pytest.mark.parametrize("clip", [[], [Clip(0.3)]])
def test_what_is_left_out_comes_later(
    engine: str, clip: list[Modifier], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a clip, messages and memory add up to the updates, also of absent clients."""
    recorded = Recorded(monkeypatch)
    data = small_data(cohort_size=3, dropout=0.4, dtype=torch.float64)
    federation = run(
        batchnorm_client().double(),
        data,
        FedAvg(modifiers=[*clip, TopK(0.1)]),
        12,
        engine=engine,
    )
    names = federation.layout.parameters
    size = sum(federation.layout.template[name].numel() for name in names)
    full, sent = torch.zeros(6, size).double(), torch.zeros(6, size).double()
    for client, update, message in recorded.changes(names):
        full[client] += update
        sent[client] += message
        moved = int((message.abs() > 1e-15).sum())
        assert moved == TopK(0.1).count(size)
    assert {len(entry.failed) for entry in federation.history} > {0}
    empty = TensorDict({"error": torch.zeros(6, size).double()}, batch_size=[6])
    left = federation.clients.memory.read("transforms", torch.arange(6), empty)["error"]
    if clip:
        assert (left.norm(dim=1) < 0.3).all()
        assert (full - sent - left).abs().max() > 0.01
    else:
        torch.testing.assert_close(sent + left, full, rtol=0, atol=1e-12)


def test_without_memory_what_is_left_out_is_lost() -> None:
    federation = run(
        linear_client(), small_data(), FedAvg(modifiers=[TopK(0.2, error_feedback=False)]), 2
    )
    assert not federation.clients.memory.seen("transforms", torch.arange(6)).any()
    assert federation.callback.bytes_kept == 0


class Noise(Transform):
    """Adds numbers that are drawn."""

    stage = "noise"

    def __call__(self, updates: Tensor, draw: Draw) -> Tensor:
        return updates + 0.1 * draw.normal() + 0.01 * draw.uniform()


EVERY = [Clip(0.3), Noise(), TopK(0.3)]


def trained(modifiers: Sequence[Modifier] = EVERY, **options: Any) -> Federation:
    data = small_data(cohort_size=5, dtype=torch.float64)
    callback = FedAvg(modifiers=modifiers)
    return run(batchnorm_client().double(), data, callback, 3, local_epochs=2, **options)


def assert_close(one: Federation, other: Federation) -> None:
    pairs = [*zip(one.server_states(), other.server_states(), strict=True)]
    pairs += [(one.client_state(i), other.client_state(i)) for i in range(6)]
    for left, right in pairs:
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-9)


def test_neither_engine_nor_chunk_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    one = trained(engine="sequential")
    assert_close(one, trained(engine="vectorized"))
    assert_close(one, trained(engine="vectorized", clients_at_once=2))
    monkeypatch.setattr("pflight.clients._CHUNK_BYTES", 1)
    assert_close(one, trained(engine="sequential"))
    assert_close(one, trained(engine="vectorized", clients_at_once=1))


def test_drawn_numbers_are_of_seed_round_and_client(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded(monkeypatch)
    federation = trained([Noise()], engine="sequential")
    names = federation.layout.parameters
    size = sum(federation.layout.template[name].numel() for name in names)
    found = iter(recorded.changes(names))
    for index, round_ in enumerate(recorded.rounds):
        for client in round_:
            random = generator(Purpose.TRANSFORM, 0, index, client)
            normal = torch.randn(size, generator=random, dtype=torch.float64)
            uniform = torch.rand(size, generator=random, dtype=torch.float64)
            same, update, message = next(found)
            assert same == client
            torch.testing.assert_close(message - update, 0.1 * normal + 0.01 * uniform)
    for before, after in zip(recorded.rounds[0].values(), recorded.rounds[0].values(), strict=True):
        assert torch.equal(before[0]["network.1.running_var"], after[2]["network.1.running_var"])


def test_stages_run_in_their_order_whatever_the_list() -> None:
    for order in (EVERY[::-1], [EVERY[1], EVERY[0], EVERY[2]]):
        assert_equal(trained(order), trained())


def test_noise_and_sparse_updates_leave_buffers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded(monkeypatch)
    trained([Noise(), TopK(0.1)])
    for round_ in recorded.rounds:
        for full, _, message in round_.values():
            for name in ("running_mean", "running_var", "num_batches_tracked"):
                assert torch.equal(full[f"network.1.{name}"], message[f"network.1.{name}"])


def test_private_and_frozen_entries_are_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms, numbers of entries and bytes are of what travels."""
    recorded = Recorded(monkeypatch)
    client = batchnorm_client()
    client.network[0].bias.requires_grad_(False)
    callback = FedAvg(modifiers=[Private("head"), Clip(0.2), TopK(0.5)])
    federation = run(client, small_data(), callback, 2)
    names = federation.callback.shared_parameters
    assert [*names] == ["network.0.weight", "network.1.weight", "network.1.bias"]
    size = 6 * FEATURES + 12
    for trained_, before, message in (p for r in recorded.rounds for p in r.values()):
        assert torch.equal(trained_["network.3.weight"], message["network.3.weight"])
        short = torch.cat([(message[n] - before[n]).flatten() for n in names])
        assert short.norm() <= 0.2 * (1 + 1e-5)
        assert int((short.abs() > 1e-7).sum()) <= size // 2
    buffers = 6 * 4 * 2 + 8
    packed = size // 2 * 4 + math.ceil(size / 8)
    assert federation.history[0].bytes_up == 6 * (packed + buffers)
    assert federation.callback.bytes_kept == 4 * size + 21 * 4


@pytest.mark.parametrize("fraction", [0.05, 0.3, 0.6])
@ENGINES
def test_bytes_of_a_sparse_upload(fraction: float, engine: str) -> None:
    plain = run(linear_client(), small_data(), FeSEM(2), 3, engine=engine)
    callback = FeSEM(2, modifiers=[TopK(fraction)])
    federation = run(linear_client(), small_data(), callback, 3, engine=engine)
    k = math.ceil(fraction * D)
    packed = 4 * k + min(4 * k, math.ceil(D / 8))
    for one, other in zip(plain.history, federation.history, strict=True):
        assert other.bytes_down == one.bytes_down
        assert one.bytes_up == len(other.clients) * 4 * D
        assert other.bytes_up == len(other.clients) * packed


def test_what_the_clients_remember_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    check = Clients.check_memory_of_rounds
    monkeypatch.setattr(
        Clients,
        "check_memory_of_rounds",
        lambda clients, size, rounds: (asked.append(size), check(clients, size, rounds)),
    )
    run(linear_client(), small_data(), FedAvg(modifiers=[TopK(0.2)]), 1)
    run(linear_client(double=True), small_data(dtype=torch.float64), FedAvg(modifiers=[TopK(0.2)]))
    run(linear_client(), small_data(), FedAvg(modifiers=[Clip(1.0)]), 1)
    assert asked == [4 * D, 8 * D, 0]


def test_memory_on_disk_is_the_same(tmp_path: Path) -> None:
    on_disk = trained(client_memory="disk", trainer={"default_root_dir": tmp_path})
    assert_equal(on_disk, trained())


@ENGINES
@pytest.mark.parametrize("batches", [None, 1])
def test_gradients_are_changed_as_they_are(
    engine: str, batches: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are no models: nothing is taken off before."""
    grown = run(
        linear_client(),
        small_data(),
        FedSGD(batches=batches, modifiers=[Clip(1e-3)]),
        1,
        engine=engine,
    )
    plain = run(linear_client(), small_data(), FedSGD(batches=batches), 1, engine=engine)
    start = linear_client().state_dict()
    moves = [
        torch.cat([(one.server_states()[0][n] - start[n]).flatten() for n in start]).norm()
        for one in (grown, plain)
    ]
    assert 0 < moves[0] <= 0.01 * 1e-3 * (1 + 1e-3)
    assert moves[1] > 10 * moves[0]
    callback = FedSGD(batches=batches, modifiers=[TopK(0.2)])
    sparse = run(linear_client(), small_data(), callback, 2, engine=engine)
    k = TopK(0.2).count(D)
    assert sparse.history[0].bytes_up == 6 * (4 * k + 2)
    assert sparse.callback.bytes_kept == 4 * D
    assert sparse.clients.memory.seen("transforms.gradients", torch.arange(6)).all()


def test_the_gradients_of_feddane_travel_whole() -> None:
    """Its server adds them up to lead the clients; models are what is compressed."""
    plain = run(linear_client(), small_data(), FedDANE(same_set=True), 2)
    sparse = run(linear_client(), small_data(), FedDANE(same_set=True, modifiers=[TopK(0.2)]), 2)
    saved = 6 * (4 * D - 4 * TopK(0.2).count(D) - 2)
    for one, other in zip(plain.history, sparse.history, strict=True):
        assert one.bytes_up - other.bytes_up == saved


def test_the_client_keeps_what_it_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """FedALA mixes a client's own model, and not what it sent of it."""
    recorded = Recorded(monkeypatch)
    callback = FedALA(modifiers=[TopK(0.1)])
    federation = run(dropout_client(), small_data(), callback, 2, engine="sequential")
    everybody = torch.arange(6)
    kept = callback.outer_method.kept(federation.clients, everybody, callback.broadcast(everybody))
    mixed = callback.outer_method.mixed(federation.layout)
    for client, (full, _, message) in recorded.rounds[-1].items():
        for name in mixed:
            assert torch.equal(kept[f"own.{name}"][client], full[name])
        assert any(not torch.equal(full[name], message[name]) for name in mixed)


def test_a_method_that_asks_for_what_it_did_not_send_is_told() -> None:
    class Silent(FedAvg):
        def broadcast(self, clients: Tensor) -> TensorDict:
            return super().broadcast(clients).exclude("network.bias")

    with pytest.raises(ConfigurationError) as error:
        run(linear_client(), small_data(), Silent(modifiers=[Clip(0.1)]))
    assert str(error.value) == (
        "clip changes what clients send by what they were sent, but they were not sent network.bias"
    )


# World Q, whose optimum is (1.25, 0.75)


OPTIMUM = (1.25, 0.75)


def on_q(callback: FedAvg, rounds: int) -> np.ndarray:
    how = {"engine": "sequential", "trainer": {"limit_val_batches": 0}}
    federation = run(quadratic_client(), world_q(), callback, rounds, local_steps=2, **how)
    return federation.server_states()[0]["network.theta"].numpy()


@pytest.mark.parametrize(
    ("modifier", "rounds"),
    [(TopK(0.5, error_feedback=False), 200), (TopK(0.5), 120), (Clip(0.05), 240)],
    ids=repr,
)
def test_feddyn_reaches_the_optimum(modifier: Modifier, rounds: int) -> None:
    """A client's gradient follows what it has sent."""
    found = on_q(FedDyn(0.5, modifiers=[modifier]), rounds)
    np.testing.assert_allclose(found, OPTIMUM, atol=2e-5)


@pytest.mark.parametrize(
    ("modifier", "found"),
    [
        (TopK(0.5, error_feedback=False), (1.809382, 0.081911)),
        (Clip(0.05), (1.044709, 0.252515)),
    ],
    ids=repr,
)
def test_feddyn_would_miss_it_if_it_followed_what_was_trained(
    modifier: Modifier, found: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Dynamic, "mirror", ClientMethod.mirror)
    callback = FedDyn(0.5, modifiers=[modifier])
    np.testing.assert_allclose(on_q(callback, 140), found, atol=2e-6)


@pytest.mark.parametrize(
    ("modifier", "rounds"),
    [(TopK(0.5, error_feedback=False), 200), (TopK(0.5), 200), (Clip(0.05), 200)],
    ids=repr,
)
def test_scaffold_reaches_the_optimum(modifier: Modifier, rounds: int) -> None:
    found = on_q(SCAFFOLD(modifiers=[modifier]), rounds)
    np.testing.assert_allclose(found, OPTIMUM, atol=2e-5)
