"""A torch Dataset per client: each sample is read once an epoch, and drawn by its own seed."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    default_collate,
    random_split,
)
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from pflight import ClientError, Federation
from pflight.callbacks import FedAvg
from pflight.data.loaders import Visit
from pflight.datamodules import CropAndFlip, DatasetClients, TensorClients
from pflight.errors import ConfigurationError
from pflight.messages import OWN_BATCHES, no_option
from pflight.models import Classifier
from tests.runs import CLASSES, FEATURES, assert_same, linear_client, quiet_trainer, run

pytestmark = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"
)
WORKERS = pytest.mark.parametrize("workers", [0, 2])


class Network(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.LazyLinear(2))
        self.net(torch.zeros(1, 3, 4, 4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        noise = np.random.normal() + random.random()  # as mixing samples draws it
        return nn.functional.cross_entropy(self.net(x) + noise * torch.randn(len(x), 2), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val/loss", nn.functional.cross_entropy(self.net(x), y))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def network() -> Network:
    torch.manual_seed(0)
    return Network()


class CountingFolder(ImageFolder):
    """Counts how often each image is decoded, in whatever process."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.reads = torch.zeros(len(self), dtype=torch.long).share_memory_()

    def __getitem__(self, index: int) -> Any:
        self.reads[index] += 1
        return super().__getitem__(index)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of JPEGs: two hospitals, two classes."""
    root = tmp_path_factory.mktemp("hospitals")
    drawn = np.random.default_rng(0)
    for hospital, count in (("north", 5), ("south", 7)):
        for number in range(count):
            folder = root / hospital / ("ill" if number % 2 else "well")
            folder.mkdir(parents=True, exist_ok=True)
            pixels = drawn.integers(256, size=(6, 6, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.jpeg")
    return root


def hospitals(root: Path, workers: int, **options: Any) -> DatasetClients:
    change = v2.Compose(
        [
            v2.ToImage(),
            v2.RandomCrop(4),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
        ]
    )
    train, val = (
        [CountingFolder(root / name, change) for name in ("north", "south")] for _ in range(2)
    )
    return DatasetClients(train, val=val, batch_size=3, num_workers=workers, **options)


@pytest.mark.short("0")
@WORKERS
def test_an_image_is_decoded_once_an_epoch_and_never_to_be_counted(
    root: Path, workers: int
) -> None:
    data = hospitals(root, workers)
    federation = Federation(network(), local_epochs=2)
    assert data.num_samples("train").tolist() == [5, 7]
    quiet_trainer(3, FedAvg()).fit(federation, datamodule=data)
    assert [folder.reads.unique().tolist() for folder in data.datasets["train"]] == [[6], [6]]
    assert [folder.reads.unique().tolist() for folder in data.datasets["val"]] == [[3], [3]]


def unreadable(samples: list[Any]) -> Any:
    raise OSError("no such image")


@pytest.mark.short("True")
@pytest.mark.parametrize("fails", [False, True])
def test_no_worker_outlives_its_data(root: Path, fails: bool) -> None:
    def fit() -> None:
        failed = pytest.raises(ClientError, match="client 0 failed: OSError: no such image")
        data = hospitals(root, 2)
        if fails:
            data.collate_fn = unreadable
        with failed if fails else nullcontext():
            run(network(), data, FedAvg(), on_client_error="raise")

    fit()
    gc.collect()
    assert multiprocessing.active_children() == []


def mixed(samples: list[Any]) -> Any:
    """Collate as MixUp does, by random numbers."""
    x, y = default_collate(samples)
    return x + torch.rand(()) * x.roll(1, 0) + np.random.rand() + random.random(), y


@pytest.mark.short("None")
@pytest.mark.parametrize("collate_fn", [None, mixed])
def test_random_images_are_the_same_with_workers_and_when_resumed(
    root: Path, collate_fn: Any, tmp_path: Path
) -> None:
    def fit(workers: int, rounds: int, **others: Any) -> Federation:
        data = hospitals(root, workers, collate_fn=collate_fn)
        return run(network(), data, FedAvg(), rounds, local_epochs=2, **others)

    whole = fit(0, 3)
    fit(2, 1).trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed = fit(2, 3, ckpt_path=tmp_path / "half.ckpt")
    assert_same(resumed.server_states()[0], whole.server_states()[0])


class Draws(Dataset[Any]):
    """Samples that are nothing but random numbers."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return torch.rand(()).item(), np.random.rand(), random.random(), np.random.normal()


def drawn(seed: int, visit: Visit, workers: int = 0) -> list[list[float]]:
    data = DatasetClients(
        [Draws(), Draws()], num_workers=workers, collate_fn=list, batch_size=2, seed=seed
    )
    return [list(sample) for batch in data.batches("train", [visit]) for sample in batch]


def test_what_a_sample_draws_depends_on_seed_round_client_epoch_and_index() -> None:
    parts = torch.tensor([0, 1]), torch.tensor([2, 3])
    given = drawn(1, Visit(0, 2, 0, parts))
    assert len({number for sample in given for number in sample}) == 16
    others = [
        drawn(2, Visit(0, 2, 0, parts)),
        drawn(1, Visit(1, 2, 0, parts)),
        drawn(1, Visit(0, 3, 0, parts)),
        drawn(1, Visit(0, 2, 1, parts)),
    ]
    for other in others:
        assert not {number for sample in given for number in sample}.intersection(
            number for sample in other for number in sample
        )
    turned = drawn(1, Visit(0, 2, 0, (torch.tensor([3, 1, 0]), torch.tensor([2]))), workers=2)
    assert turned == [given[index] for index in (3, 1, 0, 2)]


@WORKERS
def test_the_reader_of_batches_keeps_its_own_random_numbers(workers: int) -> None:
    def own() -> list[float]:
        torch.manual_seed(5)
        np.random.seed(5)
        random.seed(5)
        data = DatasetClients([Draws()], num_workers=workers, collate_fn=list)
        numbers = []
        for _ in data.batches("train", [Visit(0, 0, 0, torch.arange(4).split(1))]):
            numbers += [float(torch.rand(())), np.random.rand(), random.random()]
        return numbers

    expected = own()
    assert len(set(expected)) == 12
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    drawn_alone = []
    for _ in range(4):
        drawn_alone += [float(torch.rand(())), np.random.rand(), random.random()]
    assert expected == drawn_alone


def test_one_client_and_all_of_them_are_ordinary_data() -> None:
    sizes = 5, 3
    samples = [TensorDataset(torch.full((size, 2), 1.0 * size)) for size in sizes]
    data = DatasetClients(samples, val=samples, batch_size=4)
    alone, everybody = data.client(1), data.centralized()
    (batch,) = next(iter(alone.train_dataloader()))
    assert torch.equal(batch, torch.full((3, 2), 3.0))
    batches = torch.cat([x for (x,) in everybody.train_dataloader()])
    assert sorted(batches[:, 0].tolist()) == [3.0] * 3 + [5.0] * 5
    assert len(next(iter(alone.val_dataloader()))[0]) == 3


@WORKERS
def test_images_are_augmented_as_those_of_tensors(workers: int) -> None:
    pairs = [(torch.rand(count, 1, 6, 6), torch.arange(count) % 2) for count in (7, 5)]
    options: Any = {"batch_size": 3, "augmentation": CropAndFlip(1)}
    data = DatasetClients([TensorDataset(*pair) for pair in pairs], num_workers=workers, **options)
    tensors = TensorClients(pairs, num_classes=2, **options)
    visits = [
        Visit(client, round, epoch, data.order(client, round or 0, epoch).split(3))
        for client, round, epoch in ((0, 2, 1), (1, None, 0), (0, 2, 0), (1, 0, 0))
    ]
    seen = list(data.batches("train", visits))
    for (x, y), (expected, labels) in zip(seen, tensors.batches("train", visits), strict=True):
        assert torch.equal(x, expected)
        assert torch.equal(y, labels)
    alone = torch.cat([x for x, _ in data.client(1).train_dataloader()])
    assert torch.equal(torch.cat([x for x, _ in seen[-2:]]), alone)
    data.teardown()


def named(samples: list[Any]) -> Any:
    return dict(zip(("image", "class"), default_collate(samples), strict=True))


@WORKERS
def test_batches_that_are_no_pairs_are_not_augmented_but_refused(root: Path, workers: int) -> None:
    data = hospitals(root, workers, collate_fn=named, augmentation=CropAndFlip(1))
    with pytest.raises(
        ConfigurationError, match=r"^DatasetClients: .* pairs .* the batches are not$"
    ):
        run(network(), data, FedAvg())


@pytest.mark.short("0")
@WORKERS
@pytest.mark.filterwarnings("ignore:round .*failed:UserWarning")
def test_readers_go_on_after_an_image_that_cannot_be_read(root: Path, workers: int) -> None:
    data = hospitals(root, workers, collate_fn=None)
    data.datasets["train"][0].samples[1] = (str(root / "lost.jpeg"), 0)
    federation = run(network(), data, FedAvg(), 2)
    assert [entry.failed for entry in federation.history] == [[0], [0]]
    sound = hospitals(root, 0)
    sound.datasets["train"][0].samples[1] = (str(root / "lost.jpeg"), 0)
    again = run(network(), sound, FedAvg(), 2)
    assert_same(federation.server_states()[0], again.server_states()[0])


class Breaks(Dataset[Any]):
    """Samples, of which one is the end of a worker, or keeps it for ever."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        if self.how == "raises":
            raise ValueError
        if index == 1 and torch.utils.data.get_worker_info():
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "hangs":
                time.sleep(600)
            if self.how == "exits":
                raise SystemExit(3)
        return torch.full((3, 4, 4), 1.0 * index), index % 2


@pytest.mark.short("exits-*")
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("how", "workers", "said"),
    [
        ("killed", 2, "the worker that read its samples ended with status -9"),
        ("exits", 1, "the worker that read its samples ended with status 3"),
        ("hangs", 1, "took longer than client_timeout, 3 s"),
    ],
)
def test_a_worker_that_is_lost_is_replaced_and_costs_one_client(how, workers, said) -> None:
    """Whatever the workers had read ahead for others."""

    def trained(bad: Dataset[Any], workers: int) -> Federation:
        sound = Breaks("not at all")
        data = DatasetClients([sound, bad, sound, sound], batch_size=2, num_workers=workers)
        limit = 3.0 if workers and how == "hangs" else None
        return run(network(), data, FedAvg(), 1, client_timeout=limit)

    with pytest.warns(UserWarning, match=f"round 0: client 1 failed: .*{said}"):
        federation = trained(Breaks(how), workers)
    assert [entry.failed for entry in federation.history] == [[1]]
    with pytest.warns(UserWarning, match="round 0: client 1 failed: ValueError"):
        expected = trained(Breaks("raises"), workers=0)
    assert_same(federation.server_states()[0], expected.server_states()[0])
    gc.collect()
    assert multiprocessing.active_children() == []


class Uncountable(TensorDataset):
    def __init__(self, length: Any) -> None:
        super().__init__(torch.zeros(2, 1))
        self.length = length

    def __len__(self) -> int:
        return self.length() if callable(self.length) else self.length


@pytest.mark.parametrize(
    ("length", "said"),
    [
        (-1, r"can't be told: ValueError: __len__\(\) should return >= 0"),
        (None, "can't be told: TypeError: 'NoneType'"),
        (dict, "can't be told: TypeError: 'dict'"),
        (2**40, r"must be below 2\*\*32, got 1099511627776"),
    ],
)
def test_a_length_that_is_none_is_an_error(length: Any, said: str) -> None:
    sound = Uncountable(2)
    with pytest.raises(ConfigurationError, match=f"client 1, val: the length of Unc.* {said}"):
        DatasetClients([sound, sound], val=[sound, Uncountable(length)])


@WORKERS
def test_classes_are_read_once_if_they_are_asked_for(root: Path, workers: int) -> None:
    data = hospitals(root, workers)
    for _ in range(2):
        assert data.class_counts("train", 2).tolist() == [[2, 3], [3, 4]]
    assert [one.reads.tolist() for one in data.datasets["train"]] == [[1] * 5, [1] * 7]
    data.teardown()


def test_a_client_without_samples_has_no_classes() -> None:
    table = TensorDataset(torch.zeros(3, 2), torch.tensor([0, 1, 1]))
    data = DatasetClients([table, Subset(table, [])], num_classes=2)
    assert data.class_counts().tolist() == [[1, 2], [0, 0]]
    assert data.class_counts("val").tolist() == [[0, 0], [0, 0]]
    assert len(data.partition_figure().axes[0].patches) > 0


def dealt(seed: int) -> DatasetClients:
    """One table, of which each client has other rows for training and validation."""
    table = TensorDataset(torch.arange(24.0).view(12, 2), torch.arange(12) % 3)
    random = torch.Generator().manual_seed(seed)
    halves = random_split(table, [0.5, 0.5], random)
    train, val = zip(
        *(random_split(client_method, [4, 2], random) for client_method in halves), strict=True
    )
    return DatasetClients(train, val=val, batch_size=2)


def test_other_rows_are_other_data(tmp_path: Path) -> None:
    assert torch.equal(dealt(0).fingerprint(), dealt(0).fingerprint())
    assert (dealt(0).fingerprint() != dealt(1).fingerprint()).all()
    x, y = torch.zeros(4, 2), torch.arange(4)
    one, other = (DatasetClients([TensorDataset(x, labels)]) for labels in (y, y.flip(0)))
    assert one.fingerprint() != other.fingerprint()
    words: Any = Subset({"a": 1, "b": 2}, ["a", "b"])  # type: ignore[arg-type]
    assert DatasetClients([words]).fingerprint().tolist() == [0]


@pytest.mark.parametrize(
    ("indices", "said"),
    [
        ([[0, 4]], "4 of a TensorDataset of 4"),
        ([[0, -5]], "-5 of a TensorDataset of 4"),
        ([[3, 1], [0, 2]], "2 of a Subset of 2"),
        ([[3, 9], [1]], "9 of a TensorDataset of 4"),
    ],
)
def test_rows_that_there_are_not_are_an_error(indices: list[list[int]], said: str) -> None:
    table = TensorDataset(torch.zeros(4, 2), torch.arange(4))
    subset: Dataset[Any] = table
    for rows in indices:
        subset = Subset(subset, rows)
    with pytest.raises(ConfigurationError, match=f"^client 1, val: the Subset has sample {said}$"):
        DatasetClients([table] * 2, val=[Subset(table, [-4, 3]), subset])


def test_a_run_goes_on_with_the_same_rows_alone(tmp_path: Path) -> None:
    federation = run(Classifier(nn.Linear(2, 3), 3), dealt(0), FedAvg(), 1)
    federation.trainer.save_checkpoint(tmp_path / "one.ckpt")
    for seed in (0, 1):
        with nullcontext() if seed == 0 else pytest.raises(ConfigurationError, match="selection"):
            again = Classifier(nn.Linear(2, 3), 3)
            run(again, dealt(seed), FedAvg(), 2, ckpt_path=tmp_path / "one.ckpt")


class TestTables:
    def parts(self) -> list[Subset[Any]]:
        x, y = torch.arange(40.0).view(20, 2), torch.arange(20) % 3
        whole = Subset(TensorDataset(x, y), range(19, -1, -1))
        return [Subset(whole, range(5 * i, 5 * i + 5 - i)) for i in range(4)]

    def test_their_tensors_are_taken_as_they_are(self) -> None:
        parts = self.parts()
        data = DatasetClients(parts, val=[*parts[:3], Subset(parts[0], [])], batch_size=2)
        assert data.holds_tensors
        for client, part in enumerate(parts):
            x, y = data.samples(client, "train")
            assert torch.equal(x, torch.stack([part[i][0] for i in range(len(part))]))
            assert y.tolist() == [int(part[i][1]) for i in range(len(part))]
        assert [len(leaf) for leaf in data.samples(3, "val")] == [0, 0]
        assert [len(leaf) for leaf in data.samples(0, "test")] == [0, 0]

    @pytest.mark.parametrize("how", ["collate_fn", "a class of its own", "one that is read"])
    def test_what_is_read_is_not_taken(self, how: str) -> None:
        parts: list[Any] = self.parts()
        if how == "a class of its own":
            parts[1] = type("Own", (TensorDataset,), {})(torch.zeros(5, 2), torch.zeros(5).long())
        elif how == "one that is read":
            parts[1] = [(torch.zeros(2), 1)] * 5
        collate_fn = default_collate if how == "collate_fn" else None
        data = DatasetClients(parts, collate_fn=collate_fn)
        assert not data.holds_tensors
        with pytest.raises(ConfigurationError, match="read one by one"):
            data.samples(0, "train")

    def test_clients_are_stacked_and_get_what_they_get_one_by_one(self) -> None:
        states = []
        for engine in ("vectorized", "sequential"):
            torch.manual_seed(0)
            module = Classifier(nn.Linear(2, 3), 3)
            data = DatasetClients(self.parts(), batch_size=2)
            federation = run(module, data, FedAvg(), 3, engine=engine)
            states.append(federation.server_states())
            assert federation.clients.attached_engine.chunk > 1 or engine == "sequential"
        torch.testing.assert_close(*states)


@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
class TestOptionsOfALoader:
    """They are named, and are of no effect: pflight makes the batches."""

    def test_on_the_line(self):
        said = no_option("data.drop_last", ["data.dropout", "data.batch_size"])
        assert said == f"there is no option data.drop_last: {OWN_BATCHES}"
        assert no_option("data.sampler", []) == f"there is no option data.sampler: {OWN_BATCHES}"

    def test_of_a_given_loader(self):
        loader = DataLoader(tables()[0], batch_size=2, drop_last=True)
        said = "client 0, train: give the dataset of this DataLoader.*drop_last"
        with pytest.raises(ConfigurationError, match=said):
            DatasetClients([loader])

    def test_of_a_dataset(self):
        class Drawn(TensorDataset):
            sampler = SubsetRandomSampler([0, 1])

        with pytest.warns(UserWarning, match=r"client 0, train: Drawn\.sampler has no effect: pfl"):
            DatasetClients([Drawn(*one.tensors) for one in tables()])

    def test_of_the_data(self):
        class Dropping(DatasetClients):
            def __init__(self, *args: Any, drop_last: bool, **options: Any) -> None:
                super().__init__(*args, **options)
                self.drop_last = drop_last

        with pytest.warns(UserWarning, match=r"^Dropping\.drop_last has no effect: pflight makes"):
            run(linear_client(), Dropping(tables(), drop_last=True), FedAvg())
        run(linear_client(), Dropping(tables(), drop_last=False), FedAvg())

    def test_of_an_own_loader(self):
        class Loading(DatasetClients):
            def train_dataloader(self) -> Any:
                return DataLoader(self.datasets["train"][0], batch_size=2, drop_last=True)

        said = r"Loading\.train_dataloader\(\) returns a DataLoader of samples.*: leave it out"
        with pytest.raises(ConfigurationError, match=said):
            run(linear_client(), Loading(tables()), FedAvg())

    def test_a_loader_of_ids_is_one_of_cohorts(self):
        class Pairs(DatasetClients):
            def train_dataloader(self) -> Any:
                return DataLoader(torch.arange(2), batch_size=2)

        assert run(linear_client(), Pairs(tables()), FedAvg()).history[0].clients == [0, 1]


def tables() -> list[TensorDataset]:
    """Return the samples of three clients of :func:`linear_client`."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(3, 6, FEATURES, generator=random)
    return [TensorDataset(one, torch.arange(6) % CLASSES) for one in x]
