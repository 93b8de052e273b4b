from __future__ import annotations

import pickle

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pflight.datamodules import DatasetClients, TensorClients
from pflight.errors import ConfigurationError


def pair(n: int = 6, features: int = 3, num_classes: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n)
    return torch.randn(n, features, generator=generator), torch.arange(n) % num_classes


def test_tensors_are_kept_without_a_copy_and_in_their_type():
    x, y = torch.randn(5, 2, dtype=torch.float64), torch.tensor([0, 1, 1, 0, 1])
    data = TensorClients([(x, y)], test=[(x, y)], num_classes=2)
    for split in ("train", "test"):
        features, labels = data.samples(0, split)
        assert features is x
        assert labels.data_ptr() == y.data_ptr()
    assert len(data.samples(0, "val")[0]) == 0
    batch = next(iter(data.client(0).train_dataloader()))
    assert batch[0].dtype == torch.float64


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.uint16, torch.uint64, torch.int32, torch.float32, torch.bool]
)
def test_labels_of_whole_numbers_are_cast(dtype):
    x, y = pair()
    data = TensorClients([(x, y.to(dtype))], num_classes=2)
    assert torch.equal(data.samples(0, "train")[1], y)


def test_everything_is_known_before_setup():
    data = TensorClients([pair(4), pair(8), pair(2)], num_classes=2, cohort_size=2)
    assert data.num_clients == 3
    assert data.num_samples().tolist() == [4, 8, 2]
    assert data.train_clients.tolist() == [0, 1, 2]
    assert data.new_clients.tolist() == []
    assert data.class_counts().tolist() == [[2, 2], [4, 4], [1, 1]]
    before = data.cohorts
    data.setup("fit")
    data.setup("fit")
    assert data.cohorts is before


def test_a_client_may_be_empty_but_never_trains():
    nothing = torch.empty(0), torch.empty(0)
    data = TensorClients(
        [pair(4), nothing, pair(4)], test=[nothing, pair(4), nothing], num_classes=2
    )
    assert data.train_clients.tolist() == [0, 2]
    assert data.num_samples().tolist() == [4, 0, 4]
    x, y = data.samples(1, "train")
    assert x.shape == (0, 3)
    assert y.dtype == torch.int64
    assert [ids.tolist() for ids in data.test_dataloader()] == [[1]]
    assert data.val_dataloader() == []
    assert len(data.client(1).train_dataloader()) == 0
    assert len(data.centralized().train_dataloader().dataset) == 8


GOOD = pair()
X, Y = GOOD


@pytest.mark.parametrize(
    ("train", "options", "message"),
    [
        ([], {}, "train is empty"),
        ([(X[:0], Y[:0])], {}, "train is empty"),
        ([(X[:0], Y[:0])], {"test": [GOOD]}, "no client can train"),
        ([GOOD, (X, Y + 1)], {}, r"client 1, train: labels go from 1 to 2, but num_classes is 2"),
        ([GOOD, (X, Y - 1)], {}, r"client 1, train: labels go from -1 to 0"),
        ([GOOD, (X, Y + 0.5)], {}, r"client 1, train: labels must be whole numbers"),
        ([GOOD, (X, Y * torch.nan)], {}, r"client 1, train: labels must be whole numbers"),
        ([GOOD, (X[:5], Y)], {}, r"client 1, train: features of shape \[5, 3\]"),
        ([GOOD, (X, Y[:, None])], {}, r"client 1, train: .* labels of shape \[6, 1\]"),
        ([GOOD, (X[:, :2], Y)], {}, r"client 1, train: features are torch.float32 of shape \[2\]"),
        ([GOOD, (X.double(), Y)], {}, r"client 1, train: features are torch.float64"),
        ([GOOD, (X * torch.nan, Y)], {}, r"client 1, train: features contain NaN"),
        ([GOOD, (X, Y.tolist())], {}, r"client 1, train: .* must be tensors, got Tensor and list"),
        ([GOOD, X], {}, r"client 1, train: expected a pair"),
        ([GOOD], {"test": [GOOD, GOOD]}, "test has 2 clients, but train has 1"),
        ([GOOD], {"test": [(X, Y + 1)]}, "client 0, test: labels"),
        ([GOOD], {"val": [(X[:, :1], Y)]}, "client 0, val: features"),
        ([GOOD], {"cohort_size": 2}, "cohort_size is 2, but only 1 clients"),
        ([GOOD], {"cohort_size": 0}, "cohort_size"),
        ([GOOD], {"participation": 0.0}, "participation"),
        ([GOOD], {"batch_size": 0}, "batch_size"),
        ([GOOD], {"eval_chunk": 0}, "eval_chunk"),
        ([GOOD], {"holdout_clients": 1.0}, "holdout_clients"),
        ([GOOD], {"holdout_clients": 0.9}, "no client can train: all are held out"),
        ([GOOD], {"seed": -1}, "seed"),
    ],
)
def test_bad_data_are_named(train, options, message):
    with pytest.raises(ConfigurationError, match=message) as caught:
        TensorClients(train, num_classes=2, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("client", [-1, 3])
def test_an_unknown_client_is_named(client):
    data = TensorClients([GOOD] * 3, num_classes=2)
    for ask in (lambda: data.samples(client, "train"), lambda: data.client(client)):
        with pytest.raises(ConfigurationError, match=f"unknown client {client}: .* 0 to 2"):
            ask()


def test_data_survive_pickling():
    data = TensorClients([GOOD] * 3, num_classes=2, cohort_size=2)
    copy = pickle.loads(pickle.dumps(data))
    assert torch.equal(copy.cohorts.sample(1), data.cohorts.sample(1))
    assert torch.equal(copy.samples(2, "train")[0], X)
    assert len(pickle.loads(pickle.dumps(data.client(1).train_dataloader()))) == 1


MANY = 40_000  # values of a client, of which some thirty are checked at once


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, y: (x.index_fill(0, torch.tensor(1), torch.inf), y), "features contain NaN or"),
        (lambda x, y: (x, y + 1), "labels go from 1 to 2, but num_classes is 2"),
        (lambda x, y: (x, y / 3), "labels must be whole numbers, got torch.float32"),
        (lambda x, y: (x, y + 0j), "labels must be whole numbers, got torch.complex64"),
        (lambda x, y: (x[:, 1:], y), "features are torch.float32 of shape"),
    ],
)
@pytest.mark.parametrize("client", [0, 26, 27, 99])
def test_one_bad_client_among_many_is_named(client, change, message):
    x, y = torch.zeros(2, MANY // 2), torch.tensor([0, 1])
    clients = [(x, y)] * 100
    clients[client] = change(x, y)
    with pytest.raises(ConfigurationError, match=message) as caught:
        TensorClients([(x, y)] * 100, val=clients, num_classes=2)
    assert str(caught.value).startswith(f"client {client}, val: ")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64])
def test_features_may_be_as_large_as_their_type_holds(dtype):
    largest = torch.full((4, 2), torch.finfo(dtype).max, dtype=dtype)
    data = TensorClients([(largest, torch.zeros(4))] * 3, num_classes=2)
    assert data.num_samples().tolist() == [4, 4, 4]
    with pytest.raises(ConfigurationError, match="client 1, train: features contain NaN"):
        TensorClients([(largest, Y[:4]), (largest * 2, Y[:4])], num_classes=2)


def test_labels_are_checked_where_there_are_no_features():
    with pytest.raises(ConfigurationError, match="client 1, train: labels go from 0 to 2"):
        TensorClients([(torch.zeros(3, 0), torch.arange(3) % n) for n in (2, 3)], num_classes=2)


def test_labels_of_several_types_are_checked_together():
    y = torch.tensor([0, 1, 1])
    kinds = torch.uint8, torch.int64, torch.float64, torch.bool, torch.uint16
    data = TensorClients([(torch.zeros(3, 2), y.to(kind)) for kind in kinds], num_classes=2)
    assert all(torch.equal(data.labels(client, "train"), y) for client in range(5))


def test_what_is_checked_of_many_clients_is_checked_at_once():
    class Operations(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.count = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.count += function is not torch.ops.aten.detach.default
            return function(*args, **(kwargs or {}))

    def operations(clients):
        with Operations() as counted:
            TensorClients([GOOD] * clients, num_classes=2)
        return counted.count

    assert operations(2000) <= operations(20)


def test_classes_are_counted_together():
    counts = [4, 0, 7, 1]
    clients = [pair(n, num_classes=3) if n else (X[:0], Y[:0]) for n in counts]
    data = TensorClients(clients, num_classes=3)
    expected = [labels.bincount(minlength=3).tolist() for _, labels in clients]
    assert data.class_counts().tolist() == expected
    assert data.class_counts("val").tolist() == [[0, 0, 0]] * 4


@pytest.mark.parametrize("label", [-1, 2])
def test_a_label_that_is_no_class_is_not_counted_as_another(label):
    class Mislabelled(TensorClients):
        def labels(self, client, split):
            y = super().labels(client, split)
            return torch.where(y > 0, label, y) if client == 1 else y

    data = Mislabelled([GOOD] * 3, num_classes=2)
    message = f"client 1 has the label {label} among its train samples"
    with pytest.raises(ConfigurationError, match=message):
        data.class_counts()


def test_without_classes_targets_are_kept_as_they_are():
    x, y = torch.randn(5, 4), torch.randn(5, 2, dtype=torch.float64)
    data = TensorClients([(x, y), (x[:0], y[:0, 0])])
    assert data.samples(0, "train")[1] is y
    assert data.samples(1, "train")[1].shape == (0, 2)
    assert not data.knows_classes
    with pytest.raises(ConfigurationError, match="client 1, train: targets contain NaN"):
        TensorClients([(x, y), (x, y / 0 * 0)])
    with pytest.raises(ConfigurationError, match=r"client 0, train: features of shape \[5, 4\]"):
        TensorClients([(x, y[:3])])


@pytest.mark.parametrize(
    ("usual", "odd", "said"),
    [
        (torch.zeros(6), torch.zeros(6, 1), "float32 of shape [1], {}float32 of shape []"),
        (torch.zeros(6, 1), torch.zeros(6, 2), "float32 of shape [2], {}float32 of shape [1]"),
        (Y, Y.to(torch.uint16), "uint16 of shape [], {}int64 of shape []"),
    ],
)
def test_targets_of_another_kind_are_named(usual, odd, said):
    with pytest.raises(ConfigurationError) as caught:
        TensorClients([(X, usual), (X[:0], odd[:0]), (X, odd)])
    said = said.format("but those of client 0, train are torch.")
    assert str(caught.value) == f"client 2, train: targets are torch.{said}"


@pytest.mark.parametrize("kind", [TensorClients, DatasetClients])
def test_splits_are_given_by_name(kind: type) -> None:
    with pytest.raises(ConfigurationError, match=r"only train can be given.*val=.*test="):
        kind([GOOD], [GOOD])
