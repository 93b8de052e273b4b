"""FedDyn and FedBABU, which the documentation builds (sections C.2 and 2a.1)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pflight.callbacks import FedAvg, FedProx, FedRep
from pflight.command.cli import main
from pflight.errors import ConfigurationError
from pflight.federation import Federation
from pflight.method import ClientMethod
from pflight.states.layers import Layers
from tests.algorithm_tester import assert_finite
from tests.callbacks.test_shared_part import product_client, product_world
from tests.own_methods import CarefulFedAvg, Halfway, MyFedBABU, MyFedDyn, Scaled
from tests.pages import ROOT, files
from tests.runs import (
    ENGINES,
    assert_same,
    batchnorm_client,
    flat,
    judged,
    linear_client,
    quadratic_client,
    quiet_trainer,
    run,
    sgd,
    shared,
    small_data,
    world_q,
)
from tests.test_any_module import Regression, hospitals

PAGE = ROOT / "docs" / "own-methods.md"


@pytest.mark.parametrize("name", ["my_feddyn.py", "my_fedbabu.py"])
def test_a_method_is_forty_lines_of_code(name: str) -> None:
    code = [line for line in files(PAGE)[name].splitlines() if line.strip()]
    assert len(code) <= 40


@pytest.mark.parametrize("kind", [MyFedDyn, MyFedBABU, Halfway, Scaled, CarefulFedAvg])
def test_they_take_a_module_that_has_never_heard_of_them(kind: type[FedAvg]) -> None:
    assert_finite(run(Regression(), hospitals(), kind(), 2, on_client_error="raise"))


class TestFedDyn:
    @ENGINES
    def test_d1(self, engine: str) -> None:
        callback = MyFedDyn(a=0.5)
        one = run(quadratic_client(), world_q(), callback, 1, local_steps=2, engine=engine)
        assert shared(one) == pytest.approx([0.576666667, 0.383333333], abs=1e-8)
        assert callback.h["network.theta"].tolist() == pytest.approx([0.288333, 0.191667], abs=1e-6)
        kept = one.clients.start_states(torch.arange(3), callback.broadcast(torch.arange(3)))
        (name,) = callback.private
        assert kept[name][0].tolist() == pytest.approx([-0.0925, 0.175], abs=1e-12)
        two = run(quadratic_client(), world_q(), MyFedDyn(a=0.5), 2, local_steps=2, engine=engine)
        assert shared(two) == pytest.approx([1.115025, 0.737708], abs=1e-6)

    def test_it_comes_to_rest_where_the_mean_of_the_losses_does(self) -> None:
        options = {"local_steps": 12, "trainer": {"limit_val_batches": 0}}
        federation = run(quadratic_client(), world_q(), MyFedDyn(a=0.5), 50, **options)
        assert shared(federation) == pytest.approx([1.25, 0.75], abs=1e-4)
        plain = run(quadratic_client(), world_q(), FedAvg("uniform"), 20, **options)
        assert np.abs(shared(plain) - [1.25, 0.75]).max() > 0.1

    def test_without_what_it_keeps_it_is_fedprox(self) -> None:
        class Forgetful(MyFedDyn):
            def aggregate(self, mean):
                return mean

        callback = Forgetful(a=0.7)
        callback.client_method.after_training = lambda c: None
        data = small_data(cohort_size=3)
        frozen = run(batchnorm_client(), data, callback, 3, local_epochs=2)
        proximal = FedProx(mu=0.7, weighting="uniform")
        other = run(batchnorm_client(), data, proximal, 3, local_epochs=2)
        torch.testing.assert_close(frozen.server_states()[0], other.server_states()[0])


def test_careful_clients_are_the_same_in_both_engines() -> None:
    data, runs = small_data((6, 6, 9, 9)), []
    for engine in ("sequential", "vectorized"):
        client = linear_client(optimizer=sgd(3.0))
        federation = run(client, data, CarefulFedAvg(), 2, engine=engine)
        runs.append(federation.server_states()[0])
    plain = run(client, data, FedAvg(), 2).server_states()[0]
    torch.testing.assert_close(*runs)
    assert not torch.allclose(plain["network.weight"], runs[0]["network.weight"])


def test_halfway_is_where_clients_are_judged() -> None:
    federation = run(quadratic_client(), world_q(), Halfway())
    assert shared(federation) == pytest.approx([0.25, 0.15], abs=1e-12)
    halves = [
        (0.175, -0.025),
        (0.425, 0.125),
        (0.025, 0.275),
    ]  # own: (.1, -.2), (.6, .1), (-.2, .4)
    for i, client_method in enumerate(halves):
        assert judged(federation, i) == pytest.approx(client_method, abs=1e-12)


class TestFedBABU:
    @ENGINES
    def test_b1(self, engine: str) -> None:
        federation = run(product_client(), product_world(), MyFedBABU(), engine=engine)
        assert flat(federation.server_states()[0]) == pytest.approx([0.95, 1], abs=1e-12)
        options = {"engine": engine, "finetune_epochs": 1}
        tuned = run(product_client(), product_world(), MyFedBABU(), **options)
        assert flat(tuned.client_state(0)) == pytest.approx([1.055, 1.09975], abs=1e-12)

    @ENGINES
    def test_the_head_neither_moves_nor_travels(self, engine: str) -> None:
        decayed = sgd(0.1, momentum=0.9, weight_decay=0.1)
        client, data = batchnorm_client(optimizer=decayed), small_data(cohort_size=3)
        federation = run(client, data, MyFedBABU(), 2, local_steps=9, engine=engine)
        state, start = federation.server_states()[0], client.state_dict()
        assert_same({"w": state["network.3.weight"]}, {"w": start["network.3.weight"]})
        assert not torch.equal(state["network.0.weight"], start["network.0.weight"])
        head = sum(value.nbytes for name, value in start.items() if name.startswith("network.3."))
        whole = sum(value.nbytes for value in start.values())
        assert federation.history[-1].bytes_down == 3 * (whole - head)

    def test_it_is_fedrep_without_epochs_of_the_head(self) -> None:
        data = small_data()
        one = run(batchnorm_client(), data, MyFedBABU(), 3, local_epochs=2)
        other = run(batchnorm_client(), data, FedRep(head_epochs=0), 3, local_epochs=2)
        assert_same(one.server_states()[0], other.server_states()[0])

    def test_a_network_of_one_layer_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="FedBABU: no parameter of the body is"):
            run(linear_client(), small_data(), MyFedBABU())

    def test_with_no_head_it_is_fedavg(self) -> None:
        one = run(batchnorm_client(), small_data(), MyFedBABU(Layers()), 3)
        assert_same(
            one.server_states()[0],
            run(batchnorm_client(), small_data(), FedAvg(), 3).server_states()[0],
        )


@pytest.mark.long
@pytest.mark.parametrize("name", ["my_feddyn", "my_fedbabu"])
def test_from_the_command_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for file, text in files(PAGE).items():
        Path(file).write_text(text)
    configs = [f"--config={config}" for config in ("configs/data/digits.yaml", f"{name}.yaml")]
    small = ["--data.num_clients=4", "--trainer.default_root_dir=run", "--trainer.accelerator=cpu"]
    main(["fit", *configs, *small, "--trainer.max_epochs=1"])
    main(["fit", *configs, *small, "--trainer.max_epochs=2", "--ckpt_path=last"])
    assert "continuing with round 1" in capsys.readouterr().out


def test_a_method_of_an_earlier_version_is_refused() -> None:
    class Mixin:
        def judged(self, work: Any, clients: Any, sent: Any) -> Any:
            return sent

    with pytest.raises(TypeError, match=r"Old.judged is of an earlier version: .* models\(\)"):

        class Old(Mixin, ClientMethod):
            pass


@pytest.mark.parametrize("tag", ["", "server/"])
def test_a_rule_that_changes_tensors_in_place_is_refused(tag: str) -> None:
    class InPlace(ClientMethod):
        def models(self) -> dict[str, Any]:
            return {tag: self.halved}

        def halved(self, work: Any, clients: Any, sent: Any, states: Any) -> Any:
            states["network.weight"].mul_(0.5)
            return states

    client = linear_client()
    client.client_method = InPlace()
    federation, data, trainer = Federation(client), small_data([5]), quiet_trainer(1, FedAvg())
    with pytest.raises(ConfigurationError, match=r"InPlace.*the rule of .* tensors in place"):
        trainer.fit(federation, datamodule=data)


@pytest.mark.parametrize("tag", ["local", "new/"])
def test_a_further_model_needs_a_tag_of_its_own(tag: str) -> None:
    class Odd(ClientMethod):
        def models(self) -> dict[str, Any]:
            return {tag: lambda work, clients, sent, states: states}

    client = linear_client()
    client.client_method = Odd()
    with pytest.raises(ConfigurationError, match=r"Odd.models\(\): a further model needs a tag"):
        run(client, small_data(), FedAvg())
