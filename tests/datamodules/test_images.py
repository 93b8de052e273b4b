from __future__ import annotations

import gzip
import hashlib
import io
import pickle
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from pyarrow import parquet
from torchvision import datasets

from pflight.datamodules.partitions.partition import IID
from pflight.datamodules.sources.cifar import CIFAR10, CIFAR100
from pflight.datamodules.sources.emnist import EMNIST
from pflight.datamodules.sources.fashion_mnist import FashionMNIST
from pflight.errors import ConfigurationError

ALL = {"partition": IID(), "num_clients": 1, "val_fraction": 0, "test_fraction": 0}


def held(data, split="train"):
    """Set up a data module and return what its only client holds, sorted by label."""
    data.prepare_data()
    data.setup()
    x, y = data.samples(0, split)
    order = y.argsort(stable=True)
    return x[order], y[order]


def normalised(pixels, data):
    mean, std = (torch.tensor(value).view(-1, 1, 1) for value in (data.usual_mean, data.usual_std))
    return (torch.from_numpy(pixels) / 255 - mean) / std


def photographs(count, classes, seed=0):
    """Return random images ``[count, 3, 32, 32]`` and labels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (count, 3, 32, 32), dtype=np.uint8)
    return pixels, np.arange(count) % classes


# CIFAR from parquet files


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels.transpose(1, 2, 0)).save(file, "PNG")
    return file.getvalue()


def write_parquet(path: Path, pixels, labels, image="img", label="label") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    images = [{"bytes": png(picture), "path": f"{i}.png"} for i, picture in enumerate(pixels)]
    parquet.write_table(pa.table({image: images, label: labels}), path)
    return path


@pytest.fixture
def rows(tmp_path) -> Path:
    pixels, labels = photographs(30, 10)
    write_parquet(tmp_path / "train-00000-of-00002.parquet", pixels[:12], labels[:12])
    write_parquet(tmp_path / "train-00001-of-00002.parquet", pixels[12:20], labels[12:20])
    write_parquet(tmp_path / "test-00000-of-00001.parquet", pixels[20:], labels[20:])
    return tmp_path


def test_cifar10_reads_and_normalises_parquet_files(rows):
    data = CIFAR10(str(rows), **ALL)
    x, y = held(data)
    pixels, labels = photographs(30, 10)
    order = labels.argsort(kind="stable")
    assert x.dtype == torch.float32
    torch.testing.assert_close(x, normalised(pixels[order], data), rtol=0, atol=1e-5)
    assert y.tolist() == labels[order].tolist()


def test_cifar10s_own_test_set_can_stay_one(rows):
    data = CIFAR10(str(rows), official_test=True, **ALL)
    x, y = held(data, "test")
    assert y.tolist() == list(range(10))
    torch.testing.assert_close(x, normalised(photographs(30, 10)[0][20:], data), rtol=0, atol=1e-5)


@pytest.mark.parametrize("folder", ["cifar100", "cifar100/cifar100", "cifar100/data", "data"])
def test_cifar100_is_found_where_hugging_face_puts_it(tmp_path, folder):
    pixels, labels = photographs(100, 100)
    for part in ("train", "test"):
        path = tmp_path / folder / f"{part}-0.parquet"
        write_parquet(path, pixels, labels, "image", "fine_label")
    data = CIFAR100(str(tmp_path), **ALL)
    assert held(data)[1].tolist() == sorted([*range(100), *range(100)])
    assert data.num_classes == 100


def test_decoded_images_are_kept_in_cache_dir(rows, monkeypatch):
    cache = str(rows / "cache")
    first = held(CIFAR10(str(rows), cache_dir=cache, **ALL))
    monkeypatch.setattr("pflight.datamodules.sources.cifar.decode_image", None)
    again = CIFAR10(str(rows), cache_dir=cache, official_test=True, **ALL)
    x, y = held(again)
    test_x, test_y = again.samples(0, "test")
    assert len(y) == 20
    assert torch.equal(torch.cat([y, test_y]).sort().values, first[1])
    assert torch.equal(torch.cat([x, test_x]).sum((1, 2, 3)).sort().values,
                       first[0].sum((1, 2, 3)).sort().values)  # fmt: skip


@pytest.mark.parametrize("name", ["x.npy", "y.npy"])
def test_a_damaged_cache_is_decoded_anew(rows, name):
    first = held(CIFAR10(str(rows), cache_dir=str(rows / "cache"), **ALL))
    (path,) = (rows / "cache").glob(f"cifar10-*/{name}")
    path.write_bytes(path.read_bytes()[:-1] + b"\x63")
    with pytest.warns(UserWarning, match=f"{path.parent} is damaged .*building it again"):
        again = held(CIFAR10(str(rows), cache_dir=str(rows / "cache"), **ALL))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])


def test_a_cache_that_cant_be_written_is_named(rows):
    (rows / "cache").touch()
    with pytest.raises(ConfigurationError, match="cache_dir"):
        CIFAR10(str(rows), cache_dir=str(rows / "cache"), **ALL).setup()


@pytest.mark.parametrize(
    ("image", "label", "options", "message"),
    [
        (b"no image", 0, {}, "row 2 is not an image"),
        (png(np.zeros((3, 28, 30), np.uint8)), 0, {}, "row 2 is an image of 30 x 28 pixels"),
        (None, 10, {}, "is not CIFAR-10: labels 0 to 10; expected 0 to 9"),
        (None, -1, {}, "is not CIFAR-10: labels -1 to 1; expected 0 to 9"),
        (None, 0.5, {}, "label must have whole numbers, got 0.0"),
        (None, 0, {"label": "fine_label"}, "has no column label; its columns are img, fine_label"),
        (None, 0, {"image": "picture"}, "has no column image; its columns are picture, label"),
    ],
)
def test_bad_rows_are_named(rows, image, label, options, message):
    pixels, labels = photographs(3, 10)
    names = {"image": "img", "label": "label"} | options
    good = [{"bytes": png(picture), "path": None} for picture in pixels[:2]]
    last = {"bytes": image or png(pixels[2]), "path": None}
    table = {names["image"]: [*good, last], names["label"]: [*labels[:2].tolist(), label]}
    if isinstance(label, float):
        table[names["label"]] = [0.0, 1.0, label]
    path = rows / "train-00001-of-00002.parquet"
    parquet.write_table(pa.table(table), path)
    with pytest.raises(ConfigurationError, match=rf"{path.name}.*{message}"):
        CIFAR10(str(rows), **ALL).setup()


def test_a_damaged_parquet_file_is_named_and_the_next_run_works(rows):
    path = rows / "test-00000-of-00001.parquet"
    content = path.read_bytes()
    path.write_bytes(content[:-9])
    with pytest.raises(ConfigurationError, match=f"{path} is damaged"):
        CIFAR10(str(rows), cache_dir=str(rows / "cache"), **ALL).setup()
    path.write_bytes(content)
    assert len(held(CIFAR10(str(rows), cache_dir=str(rows / "cache"), **ALL))[1]) == 30


def test_a_parquet_file_without_rows_is_named(rows):
    path = write_parquet(rows / "test-00000-of-00001.parquet", [], [])
    parquet.write_table(parquet.read_table(rows / "train-00000-of-00002.parquet")[:0], path)
    with pytest.raises(ConfigurationError, match=f"{path} has no rows"):
        CIFAR10(str(rows), **ALL).setup()


# CIFAR from torchvision's files


@pytest.fixture
def published(tmp_path, monkeypatch) -> Path:
    """Let torchvision's CIFAR-10 be small files in ``tmp_path``, beside their archive."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    pixels, labels = photographs(30, 10)

    def write(name, content):
        (folder / name).write_bytes(pickle.dumps(content))
        return hashlib.md5((folder / name).read_bytes()).hexdigest()

    def batch(start):
        part = slice(start, start + 5)
        return {"data": pixels[part].reshape(5, 3072), "labels": labels[part].tolist()}

    source = datasets.CIFAR10
    lists = {
        "train_list": [
            [f"data_batch_{i}", write(f"data_batch_{i}", batch(5 * i))] for i in range(5)
        ],
        "test_list": [["test_batch", write("test_batch", batch(25))]],
        "meta": {**source.meta, "md5": write("batches.meta", {"label_names": [*"abcdefghij"]})},
    }
    archive = tmp_path / source.filename
    with tarfile.open(archive, "w:gz") as file:
        file.add(folder, folder.name)
    lists["tgz_md5"] = hashlib.md5(archive.read_bytes()).hexdigest()
    for name, value in lists.items():
        monkeypatch.setattr(source, name, value)
    return tmp_path


def test_cifar10_reads_torchvisions_files(published):
    data = CIFAR10(str(published), download=False, **ALL)
    x, y = held(data)
    pixels, labels = photographs(30, 10)
    order = labels.argsort(kind="stable")
    torch.testing.assert_close(x, normalised(pixels[order], data), rtol=0, atol=1e-5)
    assert y.tolist() == labels[order].tolist()


def test_a_damaged_file_of_torchvisions_is_named_or_unpacked_again(published):
    path = published / "cifar-10-batches-py" / "data_batch_3"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(
        ConfigurationError, match=f"data_batch_3 missing or damaged in {path.parent}"
    ):
        CIFAR10(str(published), download=False, **ALL).setup()
    assert len(held(CIFAR10(str(published), **ALL))[1]) == 30


def test_cifar10s_archive_is_unpacked(published):
    shutil.rmtree(published / "cifar-10-batches-py")
    data = CIFAR10(str(published), official_test=True, **ALL)
    assert len(held(data)[1]) == 25
    assert len(data.samples(0, "test")[1]) == 5


# EMNIST


def idx(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, dtype=">u4").tobytes()
    return header + array.astype(np.uint8).tobytes()


def write_emnist(folder: Path, split, classes, first_label=0, zipped=False) -> np.ndarray:
    """Write two upright images of each class, one a test image, as EMNIST stores them."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = (2 * classes, 28, 28)
    upright = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    for position, part in enumerate(("train", "test")):
        images = upright[position * classes :][:classes].swapaxes(1, 2)
        labels = np.arange(classes) + first_label
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            path = folder / f"emnist-{split}-{part}-{kind}-ubyte{'.gz' * zipped}"
            path.write_bytes(gzip.compress(idx(array)) if zipped else idx(array))
    return upright


@pytest.mark.parametrize(
    ("split", "classes", "folder"),
    [
        ("byclass", 62, ""),
        ("bymerge", 47, "gzip"),
        ("balanced", 47, "EMNIST/raw"),
        ("letters", 26, ""),
        ("digits", 10, "gzip"),
        ("mnist", 10, "EMNIST/raw"),
    ],
)
def test_emnist_stands_upright_with_labels_from_0(tmp_path, split, classes, folder):
    first_label = 1 if split == "letters" else 0
    upright = write_emnist(tmp_path / folder, split, classes, first_label, folder == "gzip")
    data = EMNIST(str(tmp_path), split=split, download=False, official_test=True, **ALL)
    for part, expected in (("train", upright[:classes]), ("test", upright[classes:])):
        x, y = held(data, part)
        assert y.tolist() == list(range(classes))
        torch.testing.assert_close(x, normalised(expected[:, None], data), rtol=0, atol=1e-5)
    assert data.num_classes == classes


def test_emnist_names_files_with_labels_out_of_range(tmp_path):
    write_emnist(tmp_path, "digits", 10, first_label=1)
    with pytest.raises(
        ConfigurationError,
        match=r"with emnist-digits-train-labels-idx1-ubyte is not EMNIST: labels 0 to 10; "
        r"expected 0 to 9",
    ):
        EMNIST(str(tmp_path), "digits", **ALL).setup()


def test_emnist_names_a_truncated_file(tmp_path):
    write_emnist(tmp_path, "digits", 10)
    path = tmp_path / "emnist-digits-test-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConfigurationError, match=f"{path} is damaged"):
        EMNIST(str(tmp_path), "digits", **ALL).setup()


def test_emnist_knows_its_splits():
    with pytest.raises(
        ConfigurationError, match=r"split must be 'balanced', .* or 'mnist', got 'capitals'"
    ):
        EMNIST(split="capitals")


# All of them


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (CIFAR10, r"CIFAR-10 .*data_batch_1.*{root}/cifar-10-batches-py; download=True"),
        (CIFAR100, r"CIFAR-100 .*parquet in {root}.*{root}/cifar-100-python; download=True"),
        (EMNIST, r"EMNIST's emnist-balanced-train.* not found in {root} .*EMNIST/raw; download="),
        (FashionMNIST, r"Fashion-MNIST's train-images.* not found in {root} .*; download=True"),
    ],
)
def test_what_is_missing_is_named_with_where_it_was_looked_for(tmp_path, build, message):
    data = build(str(tmp_path), download=False)
    data.prepare_data()
    with pytest.raises(ConfigurationError, match=message.format(root=tmp_path)):
        data.setup()


@pytest.mark.parametrize("build", [CIFAR10, CIFAR100, EMNIST])
def test_a_failed_download_names_data_set_and_root(tmp_path, monkeypatch, build):
    monkeypatch.setattr(getattr(datasets, build.__name__), "url", "file:///nowhere/archive.tar.gz")
    data = build(str(tmp_path / "new"))
    with pytest.raises(ConfigurationError, match=f"to {tmp_path}/new .root does not exist.: ."):
        data.prepare_data()


def test_mean_and_deviation_may_be_chosen(rows):
    data = CIFAR10(str(rows), mean=[0.5, 0.25, 0.0], std=[0.5, 0.25, 1.0], **ALL)
    x, _ = held(data)
    low, high = x.amin((0, 2, 3)), x.amax((0, 2, 3))
    torch.testing.assert_close(low, torch.tensor([-1.0, -1.0, 0.0]), rtol=0, atol=0.02)
    torch.testing.assert_close(high, torch.tensor([1.0, 3.0, 1.0]), rtol=0, atol=0.02)


def test_what_lies_outside_of_an_image_is_black():
    data = CIFAR10()
    black = data.transform(torch.zeros(1, 3, 32, 32, dtype=torch.uint8))[0]
    assert torch.equal(data.fill.expand(3, 32, 32), black)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mean": [0.5]}, r"mean must have one value for each channel, 3, got \[0.5\]"),
        ({"std": [1.0, 0.0, 1.0]}, r"std must be over 0, got \[1.0, 0.0, 1.0\]"),
        ({"std": [1.0, float("nan"), 1.0]}, "std must be a list of float or null"),
    ],
)
def test_bad_means_and_deviations_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        CIFAR10(**options)
