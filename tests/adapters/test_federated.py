"""Federations of adapters give the numbers of arithmetic by hand, in double precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

pytest.importorskip("peft")

import peft

from pflight import Federation
from pflight.adapters.pairs import find_pairs
from pflight.adapters.product_mean import ProductMean
from pflight.callbacks import IFCA, FedAvg, FedNova, FeSEM
from pflight.callbacks.methods.registry import Method
from pflight.errors import ConfigurationError
from pflight.modifiers import Frozen, Private
from tests.adapters.worlds import A, B, Regressor, clients, regressor, trained
from tests.algorithm_tester import shipped
from tests.runs import ENGINES, Adapted, batchnorm_client, run, small_data

LOCAL = {0: ((0, -0.0875, -0.175), (1.0075, 0.50375)), 1: ((-0.33, 0, -0.66), (1.03, 0.53))}
WEIGHTS = (2 / 3, 1 / 3)


def close(state: dict[str, Tensor], b: Any, a: Any) -> None:
    """Compare the factors of a state with printed numbers."""
    torch.testing.assert_close(state[B].flatten(), torch.tensor(b).double(), atol=6e-7, rtol=0)
    torch.testing.assert_close(state[A].flatten(), torch.tensor(a).double(), atol=6e-7, rtol=0)


@ENGINES
def test_fedit(engine: str) -> None:
    """Factors have plain means; FedAvg over adapters is FedIT."""
    (state,) = trained(FedAvg(), engine=engine).server_states()
    close(state, (-0.11, -0.058333, -0.336667), (1.015, 0.5125))


@ENGINES
def test_the_mean_of_products(engine: str) -> None:
    (state,) = trained(FedAvg(aggregate="product"), engine=engine).server_states()
    close(state, (0.198512, 0.102366, 0.601756), (-0.571842, -0.291536))


def test_a_rank_that_suffices_gives_the_mean_product_itself() -> None:
    """At rank 2, two clients' products have no error."""
    module = regressor(r=2, lora_alpha=4)
    before = module.state_dict()
    found = trained(FedAvg(aggregate="product"), module=module)
    alone = [trained(FedAvg(), module=_with(before, module), data=(i,)) for i in (0, 1)]
    ideal = sum(
        w * 2 * one.server_states()[0][B] @ one.server_states()[0][A]
        for w, one in zip(WEIGHTS, alone, strict=True)
    )
    state = found.server_states()[0]
    torch.testing.assert_close(2 * state[B] @ state[A], ideal, atol=1e-12, rtol=0)


def _with(state: dict[str, Tensor], module: Any) -> Any:
    module.load_state_dict(state)
    return module


@ENGINES
def test_one_client_has_its_own_product(engine: str) -> None:
    one = trained(FedAvg(aggregate="product"), data=(1,), engine=engine).server_states()[0]
    plain = trained(FedAvg(), data=(1,), engine=engine).server_states()[0]
    torch.testing.assert_close(one[B] @ one[A], plain[B] @ plain[A], atol=1e-12, rtol=0)


def test_without_steps_nothing_changes() -> None:
    """All products are 0 then: the factors are as they were sent."""
    (state,) = trained(FedAvg(aggregate="product"), module=regressor(lr=0.0)).server_states()
    close(state, (0, 0, 0), (1, 0.5))


def test_ffa_lora() -> None:
    """A is frozen and never travels."""
    federation = trained(FedAvg(modifiers=[Frozen("*lora_A*")]))
    close(federation.server_states()[0], (-0.11, -0.058333, -0.336667), (1, 0.5))
    assert federation.history[0].bytes_up == 2 * 3 * 8


def test_fedsa_lora() -> None:
    """A is shared, and each client keeps its own B."""
    federation = trained(FedAvg(modifiers=[Private("*lora_B*")]))
    for client, (b, _) in LOCAL.items():
        close(federation.client_state(client), b, (1.015, 0.5125))
    assert federation.history[0].bytes_up == federation.history[0].bytes_down == 2 * 2 * 8


def test_clusters_have_the_mean_product_of_their_members() -> None:
    """With a cluster for each client, centers are the clients' own products."""
    for callback in (FeSEM(2, aggregate="product"), FeSEM(2)):
        federation = trained(callback, rounds=1)
        for client, (b, a) in LOCAL.items():
            state = federation.client_state(client)
            product = torch.tensor(b).double()[:, None] * torch.tensor(a).double()
            torch.testing.assert_close(state[B] @ state[A], product, atol=1e-6, rtol=0)


# Private layers, or a network that can be traced.
OTHERS = "FedAS", "FeSEM-MA", "GPFL", "pFedFDA", "FedPer", "LG-FedAvg", "FedRep"
AGGREGATING = [
    pytest.param(method, options, id=f"{method.name}-{tag}" if tag else method.name)
    for method in shipped()
    if getattr(method.callback, "aggregates", False)
    for tag, options in method.tested.items()
    if method.name not in OTHERS and "aggregate" not in options
]


@pytest.mark.short("FedAvg", "HetLoRA", "IFCA*")
@pytest.mark.parametrize(("method", "options"), AGGREGATING)
def test_a_method_with_the_option_heeds_it(method: Method, options: dict[str, Any]) -> None:
    def sent(**aggregate: Any) -> list[dict[str, Tensor]]:
        callback = method.callback(**options, **aggregate)
        return run(batchnorm_client(Adapted), small_data(), callback, 2).server_states()

    one, other = sent(), sent(aggregate="product")
    assert any(not torch.equal(x[n], y[n]) for x, y in zip(one, other, strict=True) for n in x)


def test_methods_of_one_mean_agree() -> None:
    """One cluster is the mean of all, by the same weights."""
    one = trained(IFCA(1, aggregate="product"), rounds=3).server_states()[0]
    other = trained(FedAvg("samples", aggregate="product"), rounds=3).server_states()[0]
    uniform = trained(FedAvg("uniform", aggregate="product"), rounds=3).server_states()[0]
    same = [torch.allclose(one[B] @ one[A], x[B] @ x[A]) for x in (other, uniform)]
    assert any(same)


def test_the_option_is_part_of_name_and_record(tmp_path: Path) -> None:
    federation = trained(FedAvg(aggregate="product"))
    assert federation.algorithm == "FedAvg + product aggregation"
    trainer = L.Trainer(accelerator="cpu", callbacks=[FedAvg()], logger=False, max_epochs=2)
    with pytest.raises(ConfigurationError, match="aggregate"):
        trainer.fit(federation, datamodule=clients())


@pytest.mark.parametrize(
    ("make", "module", "said"),
    [
        (
            lambda: FedAvg(aggregate="product", modifiers=[Private("*lora_B*")]),
            regressor,
            r"FedAvg with aggregate='product' needs both factors .*lora_B.* does not travel",
        ),
        (
            lambda: FedAvg(aggregate="product", modifiers=[Frozen("*lora_A*")]),
            regressor,
            r"needs both factors of an adapter, and '.*lora_A.*' does not travel",
        ),
        (
            lambda: FedAvg(aggregate="product"),
            lambda: Regressor(torch.nn.Linear(2, 3)).double(),
            "needs low-rank adapters, and Regressor has none",
        ),
        (
            lambda: FedAvg(aggregate="product"),
            lambda: regressor(use_dora=True),
            "can't use the adapter of 'network.base_model.model.lin': it is a Dora",
        ),
    ],
)
def test_what_has_no_product_is_refused(make: Any, module: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        trained(make(), module=module())


def _merged() -> Regressor:
    module = regressor()
    module.network.merge_adapter()  # type: ignore[operator]
    return module


def test_merged_adapters_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="are merged into its weights"):
        trained(FedAvg(), module=_merged())


def test_a_frozen_factor_of_zeros_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"lora_B.* is 0 and frozen, so .* never learn"):
        trained(FedAvg(modifiers=[Frozen("*lora_B*")]))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda: regressor(lora_alpha=3), r"the scale of .*lora_A.* is 2.0 in .* and 3.0 here"),
        (lambda: regressor(r=2), r"lora_A.* is \(1, 2\) .* and \(2, 2\)"),
        (lambda: _of_another_base(), "trained on other frozen weights: .*base_layer.* differs"),
    ],
)
def test_other_adapters_or_another_base_are_refused(change: Any, said: str, tmp_path: Path) -> None:
    federation = trained(FedAvg())
    federation.trainer.save_checkpoint(tmp_path / "run.ckpt")
    with pytest.raises(ConfigurationError, match=said):
        Federation.load_from_checkpoint(tmp_path / "run.ckpt", client=change(), callback=FedAvg())


def _of_another_base() -> Regressor:
    module = regressor()
    module.state_dict()["network.base_model.model.lin.base_layer.weight"].add_(1)
    return module


def test_a_checkpoint_holds_the_adapters_alone(tmp_path: Path) -> None:
    """A frozen base of 4 MB leaves no trace in the size."""
    network = torch.nn.Sequential(torch.nn.Linear(2, 1000), torch.nn.Linear(1000, 1000))
    network.append(torch.nn.Linear(1000, 3))
    config = peft.LoraConfig(r=1, target_modules=["0", "2"])
    federation = trained(FeSEM(2), module=Regressor(peft.get_peft_model(network, config)).double())
    federation.trainer.save_checkpoint(tmp_path / "run.ckpt")
    adapters = sum(t.nbytes for n, t in federation.server_states()[0].items() if "lora_" in n)
    assert (tmp_path / "run.ckpt").stat().st_size <= 1.1 * 2 * adapters + 64_000


def test_methods_with_a_mean_of_their_own_have_no_such_option() -> None:
    with pytest.raises(TypeError, match="aggregate"):
        FedNova(aggregate="product")  # type: ignore[call-arg]


def test_resuming_is_exact(tmp_path: Path) -> None:
    def fit(rounds: int, path: str | None = None) -> Federation:
        federation = Federation(regressor(), local_steps=2, engine="sequential")
        trainer = L.Trainer(
            max_epochs=rounds,
            accelerator="cpu",
            callbacks=[FedAvg(aggregate="product")],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        )
        trainer.fit(federation, datamodule=clients(), ckpt_path=path)
        trainer.save_checkpoint(tmp_path / f"{rounds}.ckpt")
        return federation

    whole = fit(4).server_states()[0]
    fit(2)
    resumed = fit(4, str(tmp_path / "2.ckpt")).server_states()[0]
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_products_of_all_ranks_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two ranks has the clients of the first, with twice the weight."""
    module = regressor()
    sent = {name: module.state_dict()[name] for name in (A, B)}
    states = TensorDict({name: torch.ones(2, *t.shape).double() for name, t in sent.items()}, [2])
    states[B][1] = torch.tensor([[1.0], [-1.0], [0.0]])
    one, alone = (ProductMean([sent], find_pairs(module)) for _ in range(2))
    one.add(states[:1], torch.ones(1))
    alone.add(states, torch.ones(2))

    def of_two(own: Any) -> list[Any]:
        pair, (_, right) = next(iter(own[0].items()))
        return [own, [{pair: (pair.scale * states[B][1], right)}]]

    monkeypatch.setattr("pflight.adapters.product_mean.gather", of_two)
    monkeypatch.setattr("pflight.states.state.all_sum", lambda total: total.mul_(2))
    one.all_reduce()
    found, expected = one.compute()[0], alone.compute()[0]
    torch.testing.assert_close(found[B] @ found[A], expected[B] @ expected[A])


def test_many_clients_are_compressed_without_loss() -> None:
    module = regressor()
    pairs = find_pairs(module)
    sent = {name: module.state_dict()[name] for name in (A, B)}
    draw = torch.Generator().manual_seed(0)
    states = TensorDict(
        {n: torch.randn(150, *t.shape, generator=draw).double() for n, t in sent.items()}, [150]
    )
    weights = torch.arange(1.0, 151)
    mean = ProductMean([sent], pairs)
    for chunk in range(0, 150, 10):
        mean.add(states[chunk : chunk + 10], weights[chunk : chunk + 10])
    found = mean.compute()[0]
    ideal = (weights.double()[:, None, None] * (states[B] @ states[A])).sum(0) / weights.sum()
    u, s, v = torch.linalg.svd(ideal)
    torch.testing.assert_close(found[B] @ found[A], s[0] * u[:, :1] @ v[:1], atol=1e-10, rtol=0)
