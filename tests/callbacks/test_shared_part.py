"""Partial sharing: FedPer, LG-FedAvg and FedBN (sections 5.1, 5.2 and 5.4)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock

from pflight import Federation
from pflight.callbacks import FedAvg, ServerCallback, SharedPart
from pflight.datamodules import TensorClients
from pflight.errors import ConfigurationError
from pflight.local_client import LocalClient
from pflight.method import ClientMethod
from pflight.models import Classifier
from pflight.states.layers import Layers
from tests import reference
from tests.runs import (
    CLASSES,
    ENGINES,
    FEATURES,
    assert_same,
    batches_of,
    batchnorm_client,
    dropout_client,
    failing,
    flat,
    linear_client,
    network_client,
    run,
    sgd,
    small_data,
)

HEAD = Layers(last=1)
BATCHNORM = Layers(types=nn.modules.batchnorm._BatchNorm)


class Factor(nn.Module):
    """Multiplies by one number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


class ProductClient(Classifier):
    """Half of ``(h b - y)^2``, with ``b`` in layer 0 and ``h`` in layer 1; a sample is ``y``."""

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        y, _ = batch
        return (self.network(torch.ones_like(y)) - y).square().mean() / 2


def product_client(kind: type[Classifier] = ProductClient, **options: Any) -> Classifier:
    network = nn.Sequential(Factor(), Factor())
    return kind(network, num_classes=1, **{"optimizer": sgd(0.1), **options})


def product_world() -> TensorClients:
    train = [
        (torch.tensor([[y]], dtype=torch.float64), torch.zeros(1, dtype=torch.long))
        for y in (2.0, -1.0)
    ]
    return TensorClients(train, num_classes=1, batch_size=None)


@ENGINES
def test_s1_fedper(engine: str) -> None:
    federation = run(product_client(), product_world(), SharedPart(HEAD), engine=engine)
    assert flat(federation.server_states()[0]) == pytest.approx([0.95, 1], abs=1e-12)
    assert flat(federation.client_state(0)) == pytest.approx([0.95, 1.1], abs=1e-12)
    assert flat(federation.client_state(1)) == pytest.approx([0.95, 0.8], abs=1e-12)


@ENGINES
def test_s1_lg_fedavg(engine: str) -> None:
    callback = SharedPart(shared=HEAD)
    federation = run(product_client(), product_world(), callback, engine=engine)
    assert flat(federation.server_states()[0]) == pytest.approx([1, 0.95], abs=1e-12)
    assert flat(federation.client_state(0)) == pytest.approx([1.1, 0.95], abs=1e-12)
    assert flat(federation.client_state(1)) == pytest.approx([0.8, 0.95], abs=1e-12)


class Answering(ClientMethod):
    """Returns vector S3, whatever it was sent."""

    def after_training(self, c: LocalClient) -> None:
        first = bool(c.num_samples == 1)
        c.weights["network.0.weight"].fill_(2 if first else 6)
        c.weights["network.1.weight"].fill_(1 if first else 3)
        c.buffers["network.1.running_mean"].fill_(4 if first else 0)
        c.buffers["network.1.num_batches_tracked"].fill_(5 if first else 9)


def s3(callback: ServerCallback) -> Federation:
    network = nn.Sequential(
        nn.Linear(FEATURES, 1, bias=False), nn.BatchNorm1d(1), nn.Linear(1, CLASSES)
    )
    client = network_client(network)
    client.client_method = Answering()
    return run(client, small_data((1, 3)), callback, engine="sequential")


def entries_of_s3(state: dict[str, Tensor]) -> list[float]:
    names = ("0.weight", "1.weight", "1.running_mean", "1.num_batches_tracked")
    return [state[f"network.{name}"].flatten()[0].item() for name in names]


def test_s3_fedbn() -> None:
    plain = s3(FedAvg())
    assert entries_of_s3(plain.server_states()[0]) == pytest.approx([5, 2.5, 1, 9])
    federation = s3(SharedPart(BATCHNORM))
    assert entries_of_s3(federation.client_state(0)) == pytest.approx([5, 1, 4, 5])
    assert entries_of_s3(federation.client_state(1)) == pytest.approx([5, 3, 0, 9])
    assert entries_of_s3(federation.server_states()[0]) == pytest.approx([5, 1, 0, 0])


class Shift(nn.Module):
    """Adds a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.full((CLASSES,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


def regression_client(kind: type[Classifier] = Classifier, **options: Any) -> Classifier:
    """Return a softmax regression whose weight and bias are two layers."""
    network = nn.Sequential(nn.Linear(FEATURES, CLASSES, bias=False), Shift())
    return network_client(network, kind, **options).double()


def regression_world(data: TensorClients) -> reference.SoftmaxRegression:
    samples = [data.samples(i, "train") for i in range(data.num_clients)]
    return reference.SoftmaxRegression(samples, CLASSES)


def shared_part(
    world: reference.World,
    theta: np.ndarray,
    private: slice,
    cohorts: list[list[int]],
    batches: reference.Batches,
    lr: float,
    weighting: str,
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return what the server has, and the models that clients are judged by."""
    own = {i: theta[private].copy() for i in range(len(world.counts))}

    def model(i: int) -> np.ndarray:
        composed = theta.copy()
        composed[private] = own[i]
        return composed

    for round_, cohort in enumerate(cohorts):
        initial = theta[private].copy()
        models = [
            reference.local_training(world, model(i), i, batches(round_, i), lr) for i in cohort
        ]
        weights = world.counts[cohort] if weighting == "samples" else None
        theta = np.average(models, axis=0, weights=weights)
        theta[private] = initial
        own.update((i, trained[private]) for i, trained in zip(cohort, models, strict=True))
    return theta, [model(i) for i in own]


@pytest.mark.short("*-sequential")
@ENGINES
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.parametrize("private", ["head", "body"])
def test_several_rounds_with_partial_participation(
    engine: str, weighting: Any, private: str
) -> None:
    layers = Layers(**{"last" if private == "head" else "first": 1})
    data = small_data(cohort_size=2, dtype=torch.float64)
    callback = SharedPart(layers, weighting=weighting)
    client = regression_client()
    federation = run(client, data, callback, rounds=6, local_epochs=2, engine=engine)
    server, models = shared_part(
        regression_world(data),
        flat(client.state_dict()),
        slice(-CLASSES, None) if private == "head" else slice(-CLASSES),
        [entry.clients for entry in federation.history],
        lambda t, i: batches_of(data, t, i, 2),
        lr=0.1,
        weighting=weighting,
    )
    assert flat(federation.server_states()[0]) == pytest.approx(server, rel=1e-12, abs=1e-14)
    for i, model in enumerate(models):
        assert flat(federation.client_state(i)) == pytest.approx(model, rel=1e-12, abs=1e-14)


@pytest.mark.short("*-sequential")
@ENGINES
@pytest.mark.parametrize("layers", [Layers(), BATCHNORM])
def test_with_nothing_private_it_is_fedavg(engine: str, layers: Layers) -> None:
    data = small_data(cohort_size=3, dtype=torch.float64)
    options = {"rounds": 3, "local_epochs": 2, "engine": engine}
    client = linear_client(double=True)
    part, whole = (
        run(client, data, callback, **options) for callback in (SharedPart(layers), None)
    )
    assert_same(part.server_states()[0], whole.server_states()[0])
    for i in range(6):
        assert_same(part.client_state(i), whole.client_state(i))
    assert [(r.bytes_down, r.bytes_up) for r in part.history] == [
        (r.bytes_down, r.bytes_up) for r in whole.history
    ]


def test_either_part_can_be_named() -> None:
    data = small_data(cohort_size=3)
    first, last = Layers(first=1), Layers(last=2)
    callbacks = [SharedPart(first), SharedPart(shared=last), SharedPart(first, last)]
    federations = [run(batchnorm_client(), data, callback, 3) for callback in callbacks]
    for federation in federations[1:]:
        for i in range(6):
            assert_same(federation.client_state(i), federations[0].client_state(i))
    assert callbacks[1].parts == {
        "network.0": "private",
        "network.1": "shared",
        "network.3": "shared",
    }


@pytest.mark.parametrize("buffers", ["shared", "local", "reset"])
def test_buffers_go_with_their_layer(buffers: Any) -> None:
    network = nn.Sequential(
        nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.BatchNorm1d(6), nn.Linear(6, CLASSES)
    )
    client = network_client(network)
    callback = SharedPart(Layers("network.1"), buffers=buffers)
    federation = run(client, small_data((12, 12)), callback, 3)
    own, other = federation.client_state(0), federation.client_state(1)
    for name in ("weight", "running_mean", "running_var"):
        assert not torch.equal(own[f"network.1.{name}"], other[f"network.1.{name}"])
    same = torch.equal(own["network.2.running_mean"], other["network.2.running_mean"])
    assert same == (buffers != "local")
    for state in (own, other, federation.server_states()[0]):
        assert state["network.1.num_batches_tracked"].dtype == torch.long
    assert own["network.1.num_batches_tracked"] == 9  # three rounds of three batches
    assert own["network.2.num_batches_tracked"] == (0 if buffers == "reset" else 9)
    start = client.state_dict()
    for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
        held = federation.server_states()[0][f"network.1.{name}"]
        assert torch.equal(held, start[f"network.1.{name}"])


def test_only_what_is_shared_travels() -> None:
    data = small_data(cohort_size=3)
    head = 4 * (6 * CLASSES + CLASSES)
    norm = 4 * 4 * 6 + 8
    whole = run(batchnorm_client(), data, rounds=2).history
    for layers, stays in ((HEAD, head), (BATCHNORM, norm)):
        part = run(batchnorm_client(), data, SharedPart(layers), 2).history
        for mine, all_ in zip(part, whole, strict=True):
            assert mine.bytes_down == mine.bytes_up == all_.bytes_down - 3 * stays


def test_newcomers_have_the_initial_private_part_and_may_train_it() -> None:
    data = small_data(holdout_clients=0.34)
    client = batchnorm_client()
    federation = run(client, data, SharedPart(HEAD), 3)
    newcomers = data.new_clients.tolist()
    server = federation.server_states()[0]
    for i in newcomers:
        assert_same(federation.client_state(i), server)
        assert torch.equal(server["network.3.weight"], client.state_dict()["network.3.weight"])
    tuned = run(client, data, SharedPart(HEAD), 3, finetune_epochs=2)
    assert_same(tuned.server_states()[0], server)
    for i in newcomers:
        state = tuned.client_state(i)
        assert not torch.equal(state["network.3.weight"], server["network.3.weight"])


@ENGINES
@pytest.mark.filterwarnings("ignore:.*round .*failed:UserWarning")
def test_a_client_that_fails_keeps_its_part(engine: str) -> None:
    client = batchnorm_client(failing(value=torch.nan))
    data = small_data(cohort_size=3)
    federation = run(client, data, SharedPart(HEAD), 5, engine=engine)
    assert any(entry.failed == [3] for entry in federation.history)
    initial = batchnorm_client().state_dict()["network.3.weight"]
    assert torch.equal(federation.client_state(3)["network.3.weight"], initial)
    seen = {i for entry in federation.history for i in set(entry.clients) - set(entry.failed)}
    for i in seen:
        assert not torch.equal(federation.client_state(i)["network.3.weight"], initial)


def test_a_resumed_run_has_all_private_parts(tmp_path: Path) -> None:
    def fit(rounds: int, layers: Layers = BATCHNORM, **options: Any) -> Federation:
        data = small_data(cohort_size=3)
        return run(batchnorm_client(), data, SharedPart(layers), rounds, **options)

    saved = tmp_path / "half.ckpt"
    fit(2).trainer.save_checkpoint(saved)
    resumed, whole = fit(4, ckpt_path=saved), fit(4)
    assert_same(resumed.server_states()[0], whole.server_states()[0])
    for i in range(6):
        assert_same(resumed.client_state(i), whole.client_state(i))
    with pytest.raises(
        ConfigurationError, match=r"the checkpoint has other private layers; .* in network.1.bias, "
    ):
        fit(4, HEAD, ckpt_path=saved)


def test_parameters_that_are_not_trained_are_in_neither_traffic_nor_memory() -> None:
    client = dropout_client()
    client.network[0].requires_grad_(False)
    callback = SharedPart(Layers(first=1))
    federation = run(client, small_data(), callback, 2)
    assert callback.private == ()
    assert_same(federation.client_state(0), federation.server_states()[0])
    with pytest.raises(ConfigurationError, match="SharedPart: nothing is sent"):
        run(client, small_data(), SharedPart(shared=Layers(first=1)))


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (lambda: SharedPart(), "SharedPart: give the layers that are private, or those"),
        (lambda: SharedPart(HEAD, Layers(first=1)), "layer network.1 is in neither part"),
        (lambda: SharedPart(HEAD, Layers(last=3)), "layer network.3 is both private and shared"),
        (
            lambda: SharedPart(shared=Layers()),
            "SharedPart: nothing is sent, since all parameters that are trained stay",
        ),
        (
            lambda: SharedPart(Layers("output")),
            "'output' matches none of the 3 layers: network.0",
        ),
        (lambda: SharedPart(Layers(first=4)), "first=4, but there are only 3 layers"),
        (lambda: SharedPart(HEAD, weighting="size"), "SharedPart: weighting must be 'samples' or "),
    ],
)
def test_what_does_not_fit_is_refused_before_training(callback: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        run(batchnorm_client(), small_data(), callback())


def test_the_parts_are_printed_when_training_starts(capsys: pytest.CaptureFixture[str]) -> None:
    run(batchnorm_client(), small_data(), SharedPart(HEAD))
    lines = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if "│" in line]
    assert [[cell.strip() for cell in line] for line in lines] == [
        ["shared", "network.0, network.1", "42"],
        ["private", "network.3", "21"],
    ]


def test_fedbn_keeps_all_normalisation_of_a_residual_block() -> None:
    """Also ``downsample.1``, whose name doesn't tell."""
    shortcut = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))
    block = BasicBlock(1, 2, downsample=shortcut)
    network = nn.Sequential(nn.Unflatten(1, (1, 2, 2)), block, nn.Flatten(), nn.Linear(8, CLASSES))
    client = network_client(network)
    federation = run(client, small_data((8, 8)), SharedPart(BATCHNORM))
    one, other = federation.client_state(0), federation.client_state(1)
    assert "network.1.downsample.1.weight" in one
    for name, value in one.items():
        module = client.get_submodule(name.rpartition(".")[0])
        differs = not torch.equal(value, other[name])
        private = isinstance(module, nn.BatchNorm2d) and "tracked" not in name
        assert differs == private, name
