"""FedDPA (section 3a.8)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

pytest.importorskip("peft")

import peft
from transformers.pytorch_utils import Conv1D

from pflight import Federation
from pflight.adapters.export import write_model
from pflight.adapters.pairs import find_pairs
from pflight.callbacks import FedAvg, FedDPA, Local
from pflight.callbacks.methods.feddpa import LocalAdapters, TwoAdapters
from pflight.errors import ConfigurationError
from pflight.models import Classifier
from pflight.states.head import EXTRA
from pflight.states.state import with_state
from tests.adapters.worlds import A, B, Regressor, clients, regressor, trained
from tests.runs import (
    ENGINES,
    Adapted,
    assert_same,
    dropout_client,
    network_client,
    quiet_trainer,
    run,
    sgd,
    small_data,
)

LOCAL_A, LOCAL_B = (
    f"{EXTRA}.layers.network_base_model_model_lin_default.{factor}.weight" for factor in "ab"
)


def close(value: Tensor, *expected: float) -> None:
    """Compare a factor, or losses, with printed numbers."""
    torch.testing.assert_close(
        value.flatten().double(), torch.tensor(expected).double(), atol=6e-7, rtol=0
    )


class OneStepFromRoundOn(L.Callback):
    """Has clients take two steps in the first round, and one in the next."""

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        steps = 2 if trainer.current_epoch == 0 else 1
        pl_module.clients.training = replace(pl_module.clients.training, steps=steps)


@ENGINES
def test_the_second_round_of_a_small_world(engine: str) -> None:
    """The local adapter starts at ``B = 0`` beside FedIT's factors."""
    federation, callback = Federation(regressor(), local_steps=2, engine=engine), FedDPA()
    trainer = quiet_trainer(2, callback, OneStepFromRoundOn())
    trainer.fit(federation, datamodule=clients())
    server, own = federation.server_states()[0], callback.personalize(torch.arange(2))
    close(server[B], -0.158650, -0.064297, -0.445227)
    close(server[A], 1.045987, 0.533565)
    close(own[LOCAL_B][0], 0.006992, -0.021292, -0.028601)
    close(own[LOCAL_B][1], -0.124796, 0.013366, -0.222861)
    close(own[LOCAL_A], 1, 0.5, 1, 0.5)
    losses = []
    for client in (0, 1):
        (x, y), module = clients().samples(client, "train"), federation.client_module(client)
        losses.append(0.5 * (y - module.network(x)).square().sum(1).mean())
    close(torch.stack(losses), 0.317743, 0.624516)
    # Five factors of the pair travel each way, to two clients.
    assert [entry.bytes_up for entry in federation.history] == [2 * 5 * 8] * 2
    assert [entry.bytes_down for entry in federation.history] == [2 * 5 * 8] * 2


LAYERS: dict[str, tuple[Callable[[], nn.Module], Tensor, dict[str, Any]]] = {
    "linear": (lambda: nn.Linear(4, 3), torch.randn(5, 2, 4), {}),
    "conv1d": (lambda: Conv1D(3, 4), torch.randn(5, 2, 4), {"fan_in_fan_out": True}),
    "embedding": (lambda: nn.Embedding(7, 3), torch.arange(6).view(2, 3), {}),
    "conv2d": (lambda: nn.Conv2d(2, 3, 2, stride=2), torch.randn(5, 2, 4, 4), {}),
    "ranks": (lambda: nn.Linear(4, 3), torch.randn(5, 4), {"rank_pattern": {"0": 3}}),
    "rslora": (lambda: nn.Linear(4, 3), torch.randn(5, 4), {"use_rslora": True}),
    "dropout": (lambda: nn.Linear(4, 3), torch.randn(5, 4), {"lora_dropout": 0.5}),
}


def adapted(kind: str, share: float = 0.3) -> tuple[Any, LocalAdapters, Tensor]:
    """Return a layer with random adapters, its local adapters, and an input."""
    make, x, options = LAYERS[kind]
    torch.manual_seed(0)
    config = peft.LoraConfig(**{"r": 2, "lora_alpha": 5, "target_modules": ["0"], **options})
    network = peft.get_peft_model(nn.Sequential(make()), config).double()
    local = LocalAdapters(network)
    network.add_module(EXTRA, local)
    for name, value in network.named_parameters():
        if "lora_" in name or name.startswith(EXTRA):
            nn.init.normal_(value)
    local.share.fill_(share)
    return network, local, x if x.dtype == torch.long else x.double()


@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_adds_both_outputs(kind: str) -> None:
    """The sum of the base weight and of peft's own deltas is the oracle."""
    network, local, x = adapted(kind)
    network.eval()
    layer = network.base_model.model[0]
    base, (own,) = layer.get_base_layer(), local.layers.values()
    change = 0.7 * layer.get_delta_weight("default")
    embeds = kind == "embedding"
    factors = layer.lora_embedding_A if embeds else layer.lora_A["default"]
    others = layer.lora_embedding_B if embeds else layer.lora_B["default"]
    given = [v.detach().clone() for v in (*factors.parameters(), *others.parameters())]
    found = network(x)
    with torch.no_grad():  # peft's delta of the local factors
        for value, mine in zip(
            (*factors.parameters(), *others.parameters()), own.parameters(), strict=True
        ):
            value.copy_(mine)
        change = change + 0.3 * layer.get_delta_weight("default")
        weight = base.weight + change
    expected = functional_call(base, {"weight": weight}, x)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    assert not torch.equal(given[0], next(own.parameters()))


@pytest.mark.parametrize("kind", [kind for kind in LAYERS if kind != "dropout"])
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_the_ends_of_the_mixture(kind: str, share: float) -> None:
    """At 0 a layer gives what it gave without a local adapter, to the bit."""
    network, local, x = adapted(kind, share)
    found = network(x)
    for part in network.modules():
        part._forward_hooks.clear()
        part._forward_pre_hooks.clear()
    if share:
        layer, (own,) = network.base_model.model[0], local.layers.values()
        embeds = kind == "embedding"
        factors = layer.lora_embedding_A if embeds else layer.lora_A["default"]
        others = layer.lora_embedding_B if embeds else layer.lora_B["default"]
        given = *factors.parameters(), *others.parameters()
        for value, mine in zip(given, own.parameters(), strict=True):
            value.data.copy_(mine)
    expected = network(x)
    if share and kind == "embedding":  # its own adapter's output is taken off again
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    else:
        assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", [kind for kind in LAYERS if kind != "dropout"])
def test_gradients_of_a_stack(kind: str) -> None:
    network, _, x = adapted(kind)
    stacks = {
        name: torch.stack([value + i * torch.randn_like(value) for i in range(3)])
        for name, value in network.named_parameters()
        if value.requires_grad
    }
    shares = torch.tensor([0.0, 0.3, 1.0]).double()

    def loss(tensors: dict[str, Tensor], share: Tensor) -> Tensor:
        output = functional_call(network, {**tensors, f"{EXTRA}.share": share}, x)
        return output.square().sum()

    found = vmap(grad(loss))(stacks, shares)
    for i in range(3):
        alone = grad(loss)({name: value[i] for name, value in stacks.items()}, shares[i])
        for name, value in alone.items():
            torch.testing.assert_close(found[name][i], value, atol=1e-11, rtol=1e-12)
    assert all(f[1].any() for name, f in found.items())


def test_the_printed_output() -> None:
    """World V: ``x = (1, 1)`` and a share of 0.3."""
    network = nn.Sequential()
    network.add_module("lin", nn.Linear(2, 3, bias=False))
    config = peft.LoraConfig(r=1, lora_alpha=2, target_modules=["lin"])
    model = peft.get_peft_model(network, config).double()
    local = LocalAdapters(model)
    layer, (own,) = model.base_model.model.lin, local.layers.values()
    with torch.no_grad():
        layer.base_layer.weight.zero_()
        layer.lora_A["default"].weight.copy_(torch.tensor([[1.0, 2]]))
        layer.lora_B["default"].weight.copy_(torch.tensor([[0.0], [1], [1]]))
        own.a.weight.copy_(torch.tensor([[1.0, 0]]))
        own.b.weight.copy_(torch.tensor([[1.0], [0], [2]]))
        local.share.fill_(0.3)
    close(model(torch.ones(1, 2).double()).detach(), 0.6, 4.2, 5.4)


OPTIMIZERS = {
    "sgd": sgd(0.1, momentum=0.9, weight_decay=0.1),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
}


def smooth_client(optimizer: Any) -> Adapted:
    network = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    return network_client(network, Adapted, optimizer=optimizer).double()  # type: ignore[return-value]


@ENGINES
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("options", [{}, {"variant": "F"}, {"personal_epochs": 3, "weight": 0.8}])
def test_the_global_adapter_is_fedits(options: dict[str, Any], optimizer: str, engine: str) -> None:
    data = small_data(cohort_size=4, dtype=torch.float64)
    known = {"engine": engine, "local_epochs": 2, "trainer": {"limit_val_batches": 0}}
    one, other = (
        run(smooth_client(OPTIMIZERS[optimizer]), data, callback, 3, **known)
        for callback in (FedDPA(**options), FedAvg())
    )
    if engine == "vectorized":
        assert one.clients.attached_engine.obstacle is None
    assert_same(one.server_states()[0], other.server_states()[0])
    assert [e.bytes_up for e in one.history] == [e.bytes_up for e in other.history]
    own = one.callback.personalize(torch.arange(6))
    moved = any(own[name].any() for name, _ in own.items() if name.endswith("b.weight"))
    assert moved == (options.get("variant") != "F")


def test_it_is_fedits_with_dropout_too() -> None:
    """The local adapter draws no random numbers of the training."""
    data, known = small_data(cohort_size=4), {"engine": "sequential", "local_epochs": 2}
    one, other = (
        run(dropout_client(Adapted), data, callback, 3, **known)
        for callback in (FedDPA(), FedAvg())
    )
    assert_same(one.server_states()[0], other.server_states()[0])


def test_a_weight_of_0_is_fedit() -> None:
    data = small_data(cohort_size=4, dtype=torch.float64)
    one, other = (
        run(smooth_client(sgd()), data, callback, 3) for callback in (FedDPA(weight=0), FedAvg())
    )
    x = data.samples(0, "test")[0]
    for client in range(6):
        modules = one.client_module(client), other.client_module(client)
        assert torch.equal(*(module(x) for module in modules))


@ENGINES
def test_a_weight_of_1_is_local_one_round_later(engine: str) -> None:
    """In the second round, the local adapter trains alone for the first time."""
    options = {"engine": engine, "steps": 1}
    dpa, local = trained(FedDPA(weight=1), 3, **options), trained(Local(), 2, **options)
    own = dpa.callback.personalize(torch.arange(2))
    for client in (0, 1):
        state = local.client_state(client)
        torch.testing.assert_close(own[LOCAL_A][client], state[A], atol=1e-15, rtol=0)
        torch.testing.assert_close(own[LOCAL_B][client], state[B], atol=1e-15, rtol=0)
        x = clients().samples(client, "train")[0]
        outputs = [one.client_module(client).network(x) for one in (dpa, local)]
        torch.testing.assert_close(*outputs, atol=1e-15, rtol=0)


def test_both_adapters_train_jointly() -> None:
    """In the first round the global adapter has half of its output, beside a local one of 0."""
    joint = trained(FedDPA(joint=True), 1, steps=2).server_states()[0]
    half = trained(FedAvg(), 1, steps=2, module=regressor(lora_alpha=1)).server_states()[0]
    assert torch.equal(joint[A], half[A])
    assert torch.equal(joint[B], half[B])
    assert trained(FedDPA(joint=True), 1).algorithm == "FedDPA-T (joint)"


@ENGINES
def test_fine_tuning_trains_the_local_adapter_alone(engine: str) -> None:
    """Variant F: once after the federation, with the global adapter in the sum."""
    federation = trained(FedDPA(variant="F"), 1, engine=engine, finetune_epochs=1)
    server = federation.server_states()[0]
    for client, expected in enumerate(
        [(0.006992, -0.021292, -0.028601), (-0.124796, 0.013366, -0.222861)]
    ):
        state = federation.client_module(client).state_dict()
        close(state[LOCAL_B], *expected)
        assert torch.equal(state[B], server[B])
        assert state[f"{EXTRA}.share"] == 0.5


def test_a_newcomer_has_the_global_adapter() -> None:
    data = small_data(holdout_clients=0.34, dtype=torch.float64)
    federation = run(smooth_client(sgd()), data, FedDPA(), 3)
    new, known = int(data.new_clients[0]), int(data.train_clients[0])
    assert federation.client_module(new).state_dict()[f"{EXTRA}.share"] == 0
    assert federation.client_module(known).state_dict()[f"{EXTRA}.share"] == 0.5
    federation.clients.training = replace(federation.clients.training, newcomer_epochs=2)
    tuned = federation.client_module(new).state_dict()
    assert tuned[f"{EXTRA}.share"] == 0.5
    assert any(tuned[name].any() for name in tuned if name.endswith("b.weight"))


@ENGINES
def test_products_of_the_global_adapter(engine: str) -> None:
    """``aggregate`` is the global adapter's alone."""
    one, other = (trained(kind(aggregate="product"), 2, engine=engine) for kind in (FedDPA, FedAvg))
    assert_same(one.server_states()[0], other.server_states()[0])


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (lambda: Regressor(nn.Linear(2, 3)).double(), "FedDPA needs low-rank adapters"),
        (lambda: regressor(use_dora=True), "FedDPA can't use the adapter of .*lin': it is a Dora"),
    ],
)
def test_what_has_no_second_adapter_is_refused(module: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        trained(FedDPA(), module=module())


def test_shared_factors_are_refused() -> None:
    config = peft.LoraConfig(r=1, target_modules=["0", "1"])
    network = peft.get_peft_model(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), config)
    first, second = network.base_model.model  # type: ignore[misc]
    second.lora_A["default"].weight = first.lora_A["default"].weight
    with pytest.raises(ConfigurationError, match=r"FedDPA can't use .* is the same tensor"):
        LocalAdapters(network)


def test_a_decaying_step_size_is_refused() -> None:
    """It would not reach the local adapters."""
    with pytest.raises(ConfigurationError, match="TwoAdapters needs a step size"):
        trained(FedDPA(), client_lr_decay=0.9)
    trained(FedDPA(variant="F"), client_lr_decay=0.9)


def test_the_users_module_may_name_it() -> None:
    module = regressor()
    module.client_method = TwoAdapters(weight=0.25)  # type: ignore[assignment]
    federation = trained(FedDPA(), 2, module=module)
    assert federation.client_module(0).state_dict()[f"{EXTRA}.share"] == 0.25


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True},
        {"rank_pattern": {"hidden": 3}, "alpha_pattern": {"hidden": 5}},
    ],
)
def test_peft_loads_the_sum_of_both(options: dict[str, Any], tmp_path: Path) -> None:
    """A client's adapters are written as one, of twice the rank; the server's as it is."""

    def network() -> nn.Sequential:
        torch.manual_seed(0)
        layers = nn.Sequential()
        layers.add_module("hidden", nn.Linear(4, 6))
        layers.add_module("out", nn.Linear(6, 3))
        return layers

    config = {"r": 2, "lora_alpha": 3, "target_modules": ["hidden", "out"], **options}
    adapters = peft.get_peft_model(network(), peft.LoraConfig(**config))
    federation = run(Classifier(adapters, 3), small_data(), FedDPA(weight=0.3), 3)
    module, x = federation.client_module(1), torch.randn(5, 4)
    before = module(x)
    write_model(module, tmp_path / "one")
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    loaded = peft.PeftModel.from_pretrained(network(), tmp_path / "one").eval()
    torch.testing.assert_close(loaded(x), before, atol=1e-6, rtol=0)
    assert torch.equal(module(x), before)
    own, written = ([pair.rank for pair in find_pairs(model)] for model in (adapters, loaded))
    assert written == [2 * rank for rank in own]
    server = with_state(federation.client, federation.callback.server_states()[0]).eval()
    write_model(server, tmp_path / "server")
    loaded = peft.PeftModel.from_pretrained(network(), tmp_path / "server").eval()
    assert torch.equal(loaded(x), server(x))
    assert loaded.peft_config["default"].r == 2


def test_layers_of_similar_names_have_their_own_local_adapters() -> None:
    inner = nn.ModuleDict({"b_c": nn.Linear(2, 3)}), nn.ModuleDict({"c": nn.Linear(2, 3)})
    network = nn.ModuleDict({"a": inner[0], "a_b": inner[1]})
    config = peft.LoraConfig(r=1, target_modules=["b_c", "c"])
    adapters = LocalAdapters(peft.get_peft_model(network, config))
    assert len(adapters.layers) == 2
