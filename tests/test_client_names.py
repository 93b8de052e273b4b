"""Clients' names: what they may be, and where they are shown beside the numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from pflight import ClientError, Federation
from pflight.callbacks import FedAvg, Local
from pflight.data.client_names import numbered
from pflight.data.loaders import Split
from pflight.datamodules import (
    IID,
    ByUser,
    DatasetClients,
    FederatedDataModule,
    HeldOut,
    KnownClusters,
    PartitionedDataModule,
    Samples,
    TensorClients,
)
from pflight.deploy.data import OwnData
from pflight.errors import ConfigurationError
from tests.runs import (
    CLASSES,
    batchnorm_client,
    failing,
    linear_client,
    quiet_trainer,
    run,
    samples,
    small_data,
)

NAMES = ["Amager", "Bari", "Cork", "Charité", "Delft", "Évora"]

pytestmark = pytest.mark.filterwarnings("ignore:.isinstance:FutureWarning")  # Lightning's own


class Own(FederatedDataModule):
    """Data whose names nobody has checked."""

    def __init__(self, names: Any, **options: Any) -> None:
        super().__init__(num_classes=CLASSES, **options)
        self.num_clients, self.client_names = 3, names

    def samples(self, client: int, split: Split) -> tuple[Tensor, Tensor]:
        return samples(4, client)


class People(PartitionedDataModule):
    """Samples of three people."""

    def load(self) -> Samples:
        x, y = samples(12, 0)
        return Samples(x, y, np.arange(12) % 3, names=["Zoë", "Ann", "Bo"])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("abc", "client_names must be a list of str, got 'abc'"),
        (None, "client_names must be a list of str, got (None|null)"),
        (np.array(["a", "b", "c"]), "client_names must be a list of str, got array"),
        (["a", "b"], "client_names has 2 names, but there are 3 clients"),
        (["a", "b", 7], "client_names must be (a list of str|strings that are not empty), got .*7"),
        (["a", " ", "b"], "client_names must be strings that are not empty, got ' ' for client 1"),
        (["a", "b", "a"], "client_names must differ, but clients 0 and 2 are both 'a'"),
    ],
)
def test_names_that_can_not_be_are_an_error_before_training(names: Any, message: str) -> None:
    pair = samples(4, 0)
    with pytest.raises(ConfigurationError, match=f"TensorClients: {message}"):
        TensorClients([pair] * 3, num_classes=CLASSES, client_names=names)
    with pytest.raises(ConfigurationError, match=f"DatasetClients: {message}"):
        DatasetClients([TensorDataset(*pair)] * 3, client_names=names)
    client = linear_client(failing())
    with pytest.raises(ConfigurationError, match=f"Own: {message}"):
        run(client, Own(names), FedAvg())


def test_a_number_stays_beside_its_name() -> None:
    data = small_data(client_names=NAMES)
    assert [data.numbered(i) for i in (0, 3)] == ["0 (Amager)", "3 (Charité)"]
    assert small_data().numbered(3) == "3"
    assert small_data().client_names == ()
    odd = ["\x1b[31ma\nb", "x" * 99, "\ud800"]
    assert numbered(odd, 0) == "0 (a b)"
    assert numbered(odd, 1) == f"1 ({'x' * 29}…)"
    assert numbered(odd, 2) == "2 (\\ud800)"


def test_a_client_that_fails_is_named() -> None:
    data = small_data(client_names=NAMES)
    with pytest.warns(UserWarning, match=r"round 0: client 3 \(Charité\) failed: "):
        run(linear_client(failing()), data, FedAvg())
    with pytest.raises(ClientError, match=r"client 3 \(Charité\) failed: "):
        run(linear_client(failing()), data, FedAvg(), on_client_error="raise")


def test_samples_that_can_not_be_used_are_those_of_a_named_client() -> None:
    pairs, bad = [samples(4, 0)] * 2, (torch.full((4, 4), torch.nan), samples(4, 0)[1])
    with pytest.raises(ConfigurationError, match=r"client 2 \(c\), train: features contain NaN"):
        TensorClients([*pairs, bad], num_classes=CLASSES, client_names=["a", "b", "c"])
    sets = [TensorDataset(*pairs[0]), object()]
    with pytest.raises(ConfigurationError, match=r"client 1 \(b\), train: object is not a map"):
        DatasetClients(sets, client_names=["a", "b"])  # type: ignore[list-item]
    with pytest.raises(ConfigurationError, match=r"client 0 \(a\) has the label 2 among"):
        Own(["a", "b", "c"]).class_counts(num_classes=2)


def test_a_checkpoint_of_other_data_names_the_client(tmp_path: Any) -> None:
    fitter = quiet_trainer(1, FedAvg())
    fitter.fit(Federation(linear_client()), datamodule=small_data(client_names=NAMES))
    fitter.save_checkpoint(tmp_path / "a.ckpt")
    other = small_data((5, 12, 7, 8, 3, 10), client_names=NAMES)
    with pytest.raises(ConfigurationError, match=r"client 3 \(Charité\) has 8 training samples, 9"):
        run(linear_client(), other, FedAvg(), 2, ckpt_path=tmp_path / "a.ckpt")


def test_clients_with_a_single_sample_are_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    run(batchnorm_client(), small_data((5, 1, 7), client_names=["a", "b", "c"]), Local())
    assert "carry no weight: 1 (b)" in caplog.text


def test_people_who_are_clients_bring_their_names() -> None:
    options = {"val_fraction": 0.25, "test_fraction": 0.25, "num_classes": CLASSES}
    data = People(partition=ByUser(), **options)
    assert data.client_names == ()
    data.setup()
    assert data.client_names == ["Zoë", "Ann", "Bo"]
    fewer = People(partition=ByUser(), num_clients=1, **options)
    fewer.setup()
    (name,) = fewer.client_names
    whole, own = data.client_names.index(name), fewer.samples(0, "train")[0]
    assert torch.isin(own, torch.cat([data.samples(whole, s)[0] for s in ("train", "val")])).any()
    mixed = People(partition=IID(), num_clients=2, **options)
    mixed.setup()
    assert mixed.client_names == ()


def test_data_in_other_data_keep_their_names() -> None:
    data = small_data(client_names=NAMES)
    assert list(HeldOut(data, 0.2).client_names) == NAMES
    assert HeldOut(small_data(), 0.2).client_names == ()
    assert list(KnownClusters(data, num_clusters=2, difference="rotation").client_names) == NAMES


def test_a_node_of_a_deployment_does_not_tell_its_name() -> None:
    assert OwnData(small_data(client_names=NAMES), own=3, place=0, num_clients=2).numbered(0) == "0"
