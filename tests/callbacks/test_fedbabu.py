"""FedBABU (section 2a.1)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import nn

from pflight.callbacks import FedAvg, FedBABU, FedRep
from pflight.datamodules import TensorClients
from pflight.errors import ConfigurationError
from pflight.models import Classifier
from pflight.states.layers import Layers
from tests import own_methods
from tests.callbacks.test_shared_part import product_client, product_world
from tests.runs import (
    CLASSES,
    ENGINES,
    FEATURES,
    Normalised,
    assert_same,
    batchnorm_client,
    flat,
    linear_client,
    network_client,
    parameters,
    run,
    sgd,
    small_data,
    statistics,
)


def world_t(clients: Sequence[int] = (0, 1)) -> TensorClients:
    """Return the clients of world T, each in one batch."""
    train = [
        (torch.tensor([[1.0, 0], [0, 1]], dtype=torch.double), torch.tensor([0, 1])),
        (torch.tensor([[1.0, 1], [0, 2], [-1, 0]], dtype=torch.double), torch.tensor([1, 1, 2])),
    ]
    train = [train[i] for i in clients]
    return TensorClients(train, val=train, num_classes=3, batch_size=None)


def client_t() -> Classifier:
    """Return a client with a linear body, the identity at first, and a linear head."""
    body, head = nn.Linear(2, 2, bias=False), nn.Linear(2, 3, bias=False)
    client = Classifier(nn.Sequential(body, head), 3, optimizer=sgd(0.1)).double()
    with torch.no_grad():
        body.weight.copy_(torch.eye(2))
        head.weight.copy_(torch.tensor([[1.0, 0], [0, 1], [-1, -1]]))
    return client


@ENGINES
def test_b1(engine: str) -> None:
    last = Layers(last=1)
    federation = run(product_client(), product_world(), FedBABU(head=last), engine=engine)
    assert flat(federation.server_states()[0]) == pytest.approx([0.95, 1], abs=1e-12)
    options = {"engine": engine, "finetune_epochs": 1}
    tuned = run(product_client(), product_world(), FedBABU(head=last), **options)
    assert flat(tuned.client_state(0)) == pytest.approx([1.055, 1.09975], abs=1e-12)


B2 = {"full": [0.376122, 0.347257], "head": [0.385760, 0.369207], "body": [0.385188, 0.366834]}


@ENGINES
@pytest.mark.parametrize("part", B2)
def test_b2(part: str, engine: str) -> None:
    options = {"engine": engine, "local_steps": 2, "finetune_epochs": 1}
    callback = FedBABU(finetune=part)
    federation = run(client_t(), world_t(), callback, **options)
    body = federation.server_states()[0]["network.0.weight"].flatten().tolist()
    assert body == pytest.approx([1.015349, -0.032048, 0.037494, 1.049257], abs=1e-6)
    losses = federation.client_metrics("val", "server/")["loss"].tolist()
    assert losses == pytest.approx([0.394771, 0.389402], abs=1e-6)
    losses = federation.client_metrics("val")["loss"].tolist()
    assert losses == pytest.approx(B2[part], abs=1e-6)


def test_b2_of_each_client_alone() -> None:
    expected = [1.042031, -0.015351, -0.015351, 1.042031], [0.997561, -0.043180, 0.072724, 1.054074]
    for client, body in enumerate(expected):
        federation = run(client_t(), world_t([client]), FedBABU(), local_steps=2)
        weights = federation.server_states()[0]["network.0.weight"].flatten().tolist()
        assert weights == pytest.approx(body, abs=1e-6)


@pytest.mark.short("sequential")
@ENGINES
def test_three_rounds(engine: str) -> None:
    """With momentum and weight decay, which leave the head where it is."""
    case = Normalised.make()
    optimizer = sgd(0.1, momentum=0.5, weight_decay=0.01)
    client = batchnorm_client(optimizer=optimizer)
    federation = case.run(FedBABU(), client=client, engine=engine)
    theta, norms = case.theta, case.statistics
    head = np.arange(len(theta)) >= len(theta) - CLASSES * 7  # weights of six and a bias each
    for round_, entry in enumerate(federation.history):
        ends = []
        for i in entry.clients:
            w, s, velocity = theta.copy(), norms, 0.0
            for batch in case.batches(round_, i):
                s = 0.9 * s + 0.1 * case.world.statistics(w, i, batch)
                velocity = 0.5 * velocity + case.world.gradient(w, i, batch) + 0.01 * w
                w = w - 0.1 * np.where(head, 0, velocity)
            ends.append((w, s))
        counts = case.world.counts[entry.clients]
        theta = np.average([w for w, _ in ends], axis=0, weights=counts)
        norms = np.average([s for _, s in ends], axis=0, weights=counts)
    state = federation.server_states()[0]
    assert parameters(state) == pytest.approx(theta, rel=1e-9, abs=1e-11)
    assert statistics(state) == pytest.approx(norms, rel=1e-9, abs=1e-11)
    assert (parameters(state)[head] == case.theta[head]).all()


@ENGINES
def test_the_head_does_not_travel(engine: str) -> None:
    client, data = batchnorm_client(), small_data(cohort_size=3)
    federation = run(client, data, FedBABU(), 2, engine=engine)
    start = client.state_dict()
    head = sum(value.nbytes for name, value in start.items() if name.startswith("network.3."))
    whole = sum(value.nbytes for value in start.values())
    for entry in federation.history:
        assert entry.bytes_down == entry.bytes_up == 3 * (whole - head)


def test_normalisation_without_weights_learns_its_statistics() -> None:
    norm = nn.BatchNorm1d(6, affine=False)
    network = nn.Sequential(nn.Linear(FEATURES, 6), norm, nn.Linear(6, CLASSES))
    one, other = (
        run(network_client(network), small_data(), callback).server_states()[0]
        for callback in (FedBABU(), FedAvg())
    )
    assert one["network.1.running_var"].ne(1).all()
    assert one["network.1.num_batches_tracked"] == other["network.1.num_batches_tracked"]


def test_normalisation_in_the_head_rests() -> None:
    head = Layers("network.1")
    client = batchnorm_client()
    state = run(client, small_data(), FedBABU(head=head), 2).server_states()[0]
    start = {name: value for name, value in client.state_dict().items() if ".1." in name}
    assert_same({name: state[name] for name in start}, start)


def test_it_is_fedrep_without_epochs_of_the_head() -> None:
    data = small_data()
    one = run(batchnorm_client(), data, FedBABU(), 3, local_epochs=2)
    other = run(batchnorm_client(), data, FedRep(head_epochs=0), 3, local_epochs=2)
    assert_same(one.server_states()[0], other.server_states()[0])


def test_with_no_head_it_is_fedavg() -> None:
    one = run(batchnorm_client(), small_data(), FedBABU(head=Layers()), 3)
    other = run(batchnorm_client(), small_data(), FedAvg(), 3)
    assert_same(one.server_states()[0], other.server_states()[0])


def test_it_is_what_the_page_on_own_methods_builds() -> None:
    data = small_data(cohort_size=3)
    one, other = (
        run(batchnorm_client(), data, callback, 3, finetune_epochs=1)
        for callback in (FedBABU(), own_methods.MyFedBABU())
    )
    for i in range(6):
        assert_same(one.client_state(i), other.client_state(i))


def test_what_does_not_fit_is_refused_before_training() -> None:
    with pytest.raises(ConfigurationError, match="FedBABU: the body has no parameter that is"):
        run(linear_client(), small_data(), FedBABU())
    with pytest.raises(ConfigurationError, match="FedBABU: the head has no parameter that is"):
        run(linear_client(), small_data(), FedBABU(head=Layers(), finetune="head"))
    with pytest.raises(ConfigurationError, match="FedBABU: finetune must be 'full', 'head'"):
        FedBABU(finetune="all")
