"""FedALT (section 3a.9)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

pytest.importorskip("peft")

import peft

from pflight import Federation
from pflight.adapters.export import write_model
from pflight.adapters.second import second_names
from pflight.callbacks import FedALT, Local
from pflight.callbacks.methods.fedalt import RestOfTheWorld
from pflight.client_work import MEMORY
from pflight.datamodules import TensorClients
from pflight.errors import ConfigurationError
from pflight.models import Classifier
from pflight.modifiers import Private
from pflight.states.head import EXTRA
from tests.adapters.worlds import A, B, Regressor, clients, matrix, regressor, trained
from tests.runs import (
    ENGINES,
    Adapted,
    assert_same,
    batchnorm_client,
    quiet_trainer,
    run,
    small_data,
)

LAYER = f"{EXTRA}.layers.network_base_model_model_lin_default"
R_A, R_B, G = f"{LAYER}.a.weight", f"{LAYER}.b.weight", f"{LAYER}.weigh.g.weight"


def close(value: Tensor, *expected: float) -> None:
    """Compare a factor, or losses, with printed numbers."""
    torch.testing.assert_close(
        value.flatten().double(), torch.tensor(expected).double(), atol=6e-7, rtol=0
    )


class FromFedIT(L.Callback):
    """Has clients and server know the clients' trained adapters of FedIT's first round."""

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        a = matrix([[1.0075, 0.50375], [1.03, 0.53]]).view(2, 1, 2)
        b = matrix([[0, -0.0875, -0.175], [-0.33, 0, -0.66]]).view(2, 3, 1)
        callback, ids = pl_module.server_callback, torch.arange(2)
        pl_module.clients.memory.write(MEMORY, ids, TensorDict({A: a, B: b}, [2]))
        for name, value in ((A, a), (B, b)):
            callback.stored.tensors()[name].copy_(value)
        callback.received[:], callback.uploaded[:] = True, 0


@ENGINES
def test_a_round_of_a_small_world(engine: str) -> None:
    """One step without a mixer; with two clients, R is the other's adapter."""
    federation = Federation(regressor(), local_steps=1, engine=engine)
    callback = FedALT(mixer=False)
    quiet_trainer(1, callback, FromFedIT()).fit(federation, datamodule=clients())
    own = callback.personalize(torch.arange(2))
    close(own[B][0], 0.021528, -0.107136, -0.171217)
    close(own[A][0], 1.008373, 0.504100)
    close(own[B][1], -0.405691, 0.020629, -0.770125)
    close(own[A][1], 1.092603, 0.592603)
    losses = []
    for client in (0, 1):
        (x, y), module = clients().samples(client, "train"), federation.client_module(client)
        losses.append(0.5 * (y - module.network(x)).square().sum(1).mean())
        for mine, others in ((A, R_A), (B, R_B)):
            torch.testing.assert_close(
                own[others][client], own[mine][1 - client], atol=1e-15, rtol=0
            )
    close(torch.stack(losses), 0.362651, 0.167182)
    assert federation.algorithm == "FedALT (no mixer)"


def test_the_printed_output() -> None:
    """World V: ``x = (1, 1)``, and ``G`` has the weights 1/4 and 3/4."""
    network = nn.Sequential()
    network.add_module("lin", nn.Linear(2, 3, bias=False))
    config = peft.LoraConfig(r=1, lora_alpha=2, target_modules=["lin"])
    model = peft.get_peft_model(network, config).double()
    others = RestOfTheWorld(model, mixer=True)
    layer, (rest,) = model.base_model.model.lin, others.layers.values()
    with torch.no_grad():
        layer.base_layer.weight.zero_()
        layer.lora_A["default"].weight.copy_(matrix([[1, 0]]))
        layer.lora_B["default"].weight.copy_(matrix([[1], [0], [2]]))
        rest.a.weight.copy_(matrix([[1, 2]]))
        rest.b.weight.copy_(matrix([[0], [1], [1]]))
        rest.weigh.g.weight.copy_(matrix([[0, 0], [math.log(3), 0]]))
    close(model(torch.ones(1, 2).double()).detach(), 1.5, 1.5, 4.5)


def authors(x: Tensor, dropped: Tensor, base: Any, at: dict[str, Tensor], s: float) -> Tensor:
    """Return the output of the authors' layer for tokens ``[n, T, k]``: its forward pass."""
    route_weight = F.softmax(x @ at["g"].T, dim=-1)
    result = base(x)
    for i, (a, b) in enumerate([(at["ra"], at["rb"]), (at["a"], at["b"])]):
        result = result + route_weight[:, :, i].unsqueeze(-1) * (dropped @ a.T @ b.T) * s
    return result


LAYERS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "linear": (lambda: nn.Linear(4, 3), torch.randn(5, 2, 4)),
    "embedding": (lambda: nn.Embedding(7, 3), torch.arange(6).view(2, 3)),
    "conv1d": (lambda: nn.Conv1d(2, 3, 2), torch.randn(5, 2, 4)),
    "conv2d": (lambda: nn.Conv2d(2, 3, 2, stride=2, padding=1), torch.randn(5, 2, 4, 4)),
}


def adapted(kind: str, **options: Any) -> tuple[Any, Any, Tensor]:
    """Return a network of one layer with random adapters, its second adapter, and an input."""
    make, x = LAYERS[kind]
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, lora_alpha=5, target_modules=["0"], **options)
    network = peft.get_peft_model(nn.Sequential(make()), config).double()
    others = RestOfTheWorld(network, mixer=True)
    network.add_module(EXTRA, others)
    tensors = network.state_dict()
    for name, value in tensors.items():
        if "lora_" in name or name.startswith(EXTRA):
            nn.init.normal_(value)
    (rest,) = others.layers.values()
    return network, rest, x if x.dtype == torch.long else x.double()


def test_a_layer_is_that_of_the_authors() -> None:
    network, rest, x = adapted("linear")
    layer = network.base_model.model[0]
    at = {"a": layer.lora_A["default"].weight, "b": layer.lora_B["default"].weight}
    at |= {"ra": rest.a.weight, "rb": rest.b.weight, "g": rest.weigh.g.weight}
    expected = authors(x, x, layer.base_layer, at, 2.5)
    torch.testing.assert_close(network(x), expected, atol=1e-12, rtol=0)
    assert not rest.a.weight.requires_grad
    assert [name for name, value in rest.named_parameters()] == ["weigh.g.weight"]


def test_weights_come_from_the_input_before_dropout() -> None:
    network, rest, x = adapted("linear", lora_dropout=0.5)
    layer, seen = network.base_model.model[0], []
    layer.lora_A["default"].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    found = network.train()(x)
    at = {"a": layer.lora_A["default"].weight, "b": layer.lora_B["default"].weight}
    at |= {"ra": rest.a.weight, "rb": rest.b.weight, "g": rest.weigh.g.weight}
    assert not torch.equal(seen[0], x)
    expected = authors(x, seen[0], layer.base_layer, at, 2.5)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


def test_an_embedding_has_weights_for_each_id() -> None:
    network, rest, ids = adapted("embedding")
    layer, x = network.base_model.model[0], F.one_hot(torch.arange(6).view(2, 3), 7).double()
    at = {name: own["default"] for name, own in (("a", layer.lora_embedding_A),)}
    at |= {"b": layer.lora_embedding_B["default"], "ra": rest.a, "rb": rest.b, "g": rest.weigh.g}
    expected = authors(x, x, lambda x: x @ layer.base_layer.weight, at, 2.5)
    torch.testing.assert_close(network(ids), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", ["conv1d", "conv2d"])
def test_an_image_has_weights_at_each_place(kind: str) -> None:
    """A convolution is a linear layer of each of its patches."""
    network, rest, x = adapted(kind)
    layer = network.base_model.model[0]
    base = layer.base_layer
    flat = {
        "a": layer.lora_A["default"].weight.flatten(1),
        "b": layer.lora_B["default"].weight.flatten(1),
        "ra": rest.a.weight.flatten(1),
        "rb": rest.b.weight.flatten(1),
        "g": rest.weigh.g.weight.flatten(1),
    }
    if kind == "conv1d":
        patches = x.unfold(2, 2, 1).permute(0, 2, 1, 3).flatten(2)
    else:
        patches = F.unfold(x, 2, stride=2, padding=1).mT

    def linear(x: Tensor) -> Tensor:
        return F.linear(x, base.weight.flatten(1), base.bias)

    expected = authors(patches, patches, linear, flat, 2.5).mT
    found = network(x)
    torch.testing.assert_close(found.flatten(2), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", LAYERS)
def test_gradients_of_a_stack(kind: str) -> None:
    network, _, x = adapted(kind)
    trains = {name for name, value in network.named_parameters() if value.requires_grad}
    stacks = {
        name: torch.stack([value.detach() + i * torch.randn_like(value) for i in range(3)])
        for name, value in network.state_dict().items()
        if name in trains or name.startswith(EXTRA)
    }
    others = {name: value for name, value in stacks.items() if name not in trains}
    own = {name: value for name, value in stacks.items() if name in trains}

    def loss(tensors: dict[str, Tensor], others: dict[str, Tensor]) -> Tensor:
        return functional_call(network, {**tensors, **others}, x).square().sum()

    found = vmap(grad(loss))(own, others)
    for i in range(3):
        alone = grad(loss)(*({name: v[i] for name, v in part.items()} for part in (own, others)))
        for name, value in alone.items():
            torch.testing.assert_close(found[name][i], value, atol=1e-10, rtol=1e-10)
            assert value.any()


WORLD = [(3, 1), (2, 2), (4, 3), (1, 4)]  # samples, and a seed


def world(**options: Any) -> TensorClients:
    draws = [(count, torch.Generator().manual_seed(seed)) for count, seed in WORLD]
    pairs = [
        (
            torch.randn(count, 2, generator=draw).double(),
            torch.randn(count, 3, generator=draw).double(),
        )
        for count, draw in draws
    ]
    return TensorClients(pairs, num_classes=None, batch_size=None, **options)


@ENGINES
@pytest.mark.parametrize("max_age", [None, 1])
@pytest.mark.parametrize("mixer", [True, False])
def test_several_rounds(engine: str, mixer: bool, max_age: int | None) -> None:
    """Two of four clients take part in a round; a plain loop is the oracle."""
    data, callback = world(cohort_size=2), FedALT(mixer=mixer, max_age=max_age)
    federation, module = Federation(regressor(lr=0.05), local_epochs=2, engine=engine), regressor()
    quiet_trainer(5, callback).fit(federation, datamodule=data)
    if engine == "vectorized":
        assert federation.clients.attached_engine.obstacle is None
    start = {name: module.state_dict()[name].clone() for name in (A, B)}
    start["g"] = federation.layout.template.get(G, torch.zeros(2, 2).double())
    w0 = module.state_dict()["network.base_model.model.lin.base_layer.weight"]
    own = [dict(start) for _ in WORLD]
    last: dict[int, int] = {}

    def others(client: int, now: int) -> tuple[Tensor, Tensor]:
        heard = [m for m, t in last.items() if m != client]
        heard = [m for m in heard if max_age is None or now - last[m] <= max_age]
        if not heard:
            return start[A], start[B]
        return tuple(torch.stack([own[m][n] for m in heard]).mean(0) for n in (A, B))  # type: ignore[return-value]

    def output(x: Tensor, at: dict[str, Tensor], rest: tuple[Tensor, Tensor]) -> Tensor:
        weights = (x @ at["g"].T).softmax(1)
        rows = [(rest[0], rest[1]), (at[A], at[B])]
        return x @ w0.T + sum(
            weights[:, i, None] * 2 * (x @ a.T @ b.T) for i, (a, b) in enumerate(rows)
        )

    for now, entry in enumerate(federation.history):
        fresh = {}
        for client in entry.clients:
            (x, y), rest = data.samples(client, "train"), others(client, now)
            at = {name: value.clone().requires_grad_() for name, value in own[client].items()}
            for _ in range(2):
                loss = 0.5 * (y - output(x, at, rest)).square().sum(1).mean()
                names = [A, B, "g"] if mixer else [A, B]
                found = torch.autograd.grad(loss, [at[name] for name in names])
                for name, gradient in zip(names, found, strict=True):
                    at[name] = (at[name] - 0.05 * gradient).detach().requires_grad_()
            fresh[client] = {name: value.detach() for name, value in at.items()}
        for client, at in fresh.items():
            own[client], last[client] = at, now
        assert (entry.bytes_up, entry.bytes_down) == (2 * 5 * 8, 2 * 5 * 8)
    assert len(last) > 2
    judged = callback.personalize(torch.arange(4))
    for client in range(4):
        rest = others(client, 5)
        for name, value in (
            (A, own[client][A]),
            (B, own[client][B]),
            (R_A, rest[0]),
            (R_B, rest[1]),
        ):
            torch.testing.assert_close(judged[name][client], value, atol=1e-12, rtol=0)
        if mixer:
            torch.testing.assert_close(judged[G][client], own[client]["g"], atol=1e-12, rtol=0)


@ENGINES
def test_one_client_without_a_mixer_is_local_at_half_the_scale(engine: str) -> None:
    options = {"data": (0,), "engine": engine}
    alt = trained(FedALT(mixer=False), 3, **options)
    local = trained(Local(), 3, module=regressor(lora_alpha=1), **options)
    own, state = alt.client_state(0), local.client_state(0)
    assert torch.equal(own[A], state[A])
    assert torch.equal(own[B], state[B])
    x = clients().samples(0, "train")[0]
    assert torch.equal(*(one.client_module(0).network(x) for one in (alt, local)))


def test_equal_uploads_are_their_mean() -> None:
    federation, callback = Federation(regressor(), local_steps=2), FedALT(mixer=False)
    one = clients().samples(1, "train")
    data = TensorClients([one] * 4, num_classes=None, batch_size=None)
    quiet_trainer(1, callback).fit(federation, datamodule=data)
    judged = callback.personalize(torch.arange(4))
    for own, other in ((A, R_A), (B, R_B)):
        torch.testing.assert_close(judged[own], judged[other], atol=1e-15, rtol=0)
    assert judged[B].any()


class WithoutPreference(L.Callback):
    """Sets all mixers to 0 before the first round."""

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        for index in range(len(pl_module.server)):
            pl_module.server.tensors(index)[G].data.zero_()


@ENGINES
def test_a_mixer_of_0_takes_the_same_first_step(engine: str) -> None:
    runs = []
    for callback in (FedALT(), FedALT(mixer=False)):
        federation = Federation(regressor(), local_steps=1, engine=engine)
        more = [WithoutPreference()] if callback.client_method.mixer else []
        quiet_trainer(1, callback, *more).fit(federation, datamodule=clients())
        runs.append(callback.stored.tensors())
    for name in (A, B):
        torch.testing.assert_close(runs[0][name], runs[1][name], atol=1e-15, rtol=0)


def test_mixers_start_as_linear_layers_do() -> None:
    torch.manual_seed(1)
    first = trained(FedALT(), 0).layout.template[G]
    torch.manual_seed(2)
    second = trained(FedALT(), 0).layout.template[G]
    assert torch.equal(first, second)
    assert 0.1 < first.abs().max() <= 2**-0.5
    assert not torch.equal(first, trained(FedALT(), 0, seed=5).layout.template[G])


def test_newcomers_have_the_mean_of_all() -> None:
    data, callback = small_data(holdout_clients=0.34, cohort_size=2), FedALT()
    federation = run(batchnorm_client(Adapted), data, callback, 2)
    judged, known = callback.personalize(torch.arange(6)), callback.uploaded >= 0
    new = data.new_clients
    assert not known[new].any()
    assert 2 < known.sum() <= 4
    server = callback.server_states()[0]
    initial = federation.layout.template
    for own, other in second_names(federation.client).items():
        mean = callback.stored.tensors()[own][known].mean(0)
        for client in new.tolist():
            torch.testing.assert_close(judged[other][client], mean)
            assert torch.equal(judged[own][client], initial[own])
        torch.testing.assert_close(server[other], mean)
        assert torch.equal(server[own], initial[own])


@ENGINES
@pytest.mark.parametrize("head", ["private", "shared"])
def test_the_head(head: Any, engine: str) -> None:
    """All that trains beside adapters is the client's own, or a plain mean."""
    callback = FedALT(head=head, buffers="local")
    data = small_data(counts=(6, 12, 10), dtype=torch.float64)
    federation = run(batchnorm_client(Adapted).double(), data, callback, 2, engine=engine)
    norms = [name for name in federation.layout.parameters if "modules_to_save" in name]
    assert len(norms) == 2
    size = 8 * sum(federation.layout.template[name].numel() for name in callback.stored_names)
    extra = 0 if head == "private" else 8 * 2 * 6
    assert federation.history[0].bytes_up == federation.history[0].bytes_down == 3 * (size + extra)
    states = [federation.client_state(i) for i in range(3)]
    for name in norms:
        same = torch.equal(states[0][name], states[1][name])
        assert same == (head == "shared")
        assert torch.equal(states[0][name], federation.layout.template[name]) is False
        assert (name in callback.private) == (head == "private")


def test_a_shared_head_is_the_plain_mean() -> None:
    updates = []
    callback = FedALT(head="shared")
    receive = callback.receive

    def note(one: Any) -> None:
        updates.append(one)
        receive(one)

    federation = Federation(batchnorm_client(Adapted), engine="sequential")
    vars(callback)["receive"] = note
    quiet_trainer(1, callback).fit(federation, datamodule=small_data(counts=(6, 12, 10)))
    for name in callback.head_names:
        sent = torch.cat([one.states[name] for one in updates])
        torch.testing.assert_close(federation.server_states()[0][name], sent.mean(0))
    assert len(callback.head_names) == 2


def test_frozen_factors_stay() -> None:
    """With a frozen A, only B travels; the others' A is the same."""
    module = regressor()
    module.get_parameter(A).requires_grad_(False)
    federation = trained(FedALT(), 2, module=module)
    assert federation.history[0].bytes_up == federation.history[0].bytes_down == 2 * 3 * 8
    state = federation.client_module(0).state_dict()
    assert torch.equal(state[R_A], state[A])
    assert not torch.equal(state[R_B], state[B])


@pytest.mark.parametrize(
    ("module", "options", "said"),
    [
        (lambda: Regressor(nn.Linear(2, 3)).double(), {}, "FedALT needs low-rank adapters"),
        (lambda: regressor(use_dora=True), {}, "FedALT can't use the adapter of .*lin': it is a"),
        (
            lambda: regressor(),
            {"modifiers": [Private("*lora_B*")]},
            "FedALT: Private can't keep .*lora_B.*, which FedALT itself keeps",
        ),
    ],
)
def test_what_it_can_not_do(module: Any, options: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        trained(FedALT(**options), module=module())


def test_biases_of_adapters_are_refused() -> None:
    network = nn.Sequential(nn.Linear(2, 3))
    config = peft.LoraConfig(r=1, target_modules=["0"], lora_bias=True)
    with pytest.raises(ConfigurationError, match=r"FedALT can't use the adapter of .*: lora_bias"):
        trained(FedALT(), module=Regressor(peft.get_peft_model(network, config)).double())


def test_export(tmp_path: Path) -> None:
    """With a mixer there is no single adapter; without one there is."""

    def network() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))

    def client() -> Classifier:
        config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=["0", "1"])
        return Classifier(peft.get_peft_model(network(), config), 3)

    mixed = run(client(), small_data(), FedALT(), 2).client_module(1)
    with pytest.raises(ConfigurationError, match="have weights that depend on the input"):
        write_model(mixed, tmp_path / "mixed")
    module = run(client(), small_data(), FedALT(mixer=False), 2).client_module(1)
    write_model(module, tmp_path / "halves")
    loaded = peft.PeftModel.from_pretrained(network(), tmp_path / "halves").eval()
    x = torch.randn(5, 4)
    torch.testing.assert_close(loaded(x), module(x), atol=1e-6, rtol=0)


def test_fine_tuning_trains_its_own_adapter_and_mixer() -> None:
    federation = trained(FedALT(), 2)
    before = federation.client_module(0).state_dict()
    federation.clients.training = replace(federation.clients.training, finetune_epochs=1)
    after = federation.client_module(0).state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {A, B, G}


def test_resuming_is_exact(tmp_path: Path) -> None:
    def fit(rounds: int, path: Any = None) -> Federation:
        federation = Federation(regressor(lr=0.05), local_epochs=2)
        trainer = quiet_trainer(rounds, FedALT(max_age=2))
        trainer.fit(federation, datamodule=world(cohort_size=2), ckpt_path=path)
        trainer.save_checkpoint(tmp_path / f"{rounds}.ckpt")
        return federation

    whole = fit(6)
    fit(3)
    resumed = fit(6, tmp_path / "3.ckpt")
    for i in range(4):
        states = (one.client_module(i).state_dict() for one in (whole, resumed))
        assert_same(*states)
