from __future__ import annotations

import gzip
import io
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image

from pflight.datamodules import (
    IID,
    ClassesPerClient,
    Digits,
    FashionMNIST,
    Natural,
    Omniglot,
)
from pflight.datamodules.idx import read_idx
from pflight.errors import ConfigurationError


def idx(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, dtype=">u4").tobytes()
    return header + array.astype(np.uint8).tobytes()


def png(ink: tuple[int, int]) -> bytes:
    """Draw one black block on white paper, one bit a pixel as in Omniglot."""
    image = Image.new("1", (105, 105), 1)
    image.paste(0, (ink[0], ink[1], ink[0] + 15, ink[1] + 15))
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


# Digits


def test_digits_are_all_of_scikit_learns():
    data = Digits()
    data.setup()
    assert data.num_clients == 20
    assert sum(int(data.num_samples(split).sum()) for split in ("train", "val", "test")) == 1797
    x, y = data.samples(3, "train")
    assert x.shape[1:] == (1, 8, 8)
    assert x.dtype == torch.float32
    assert 0 <= x.min() < x.max() <= 1
    for split in ("train", "val", "test"):
        assert len(data.samples(3, split)[1].unique()) == 2
    assert len(y.unique()) == 2


def test_splits_are_disjoint_and_setup_changes_nothing_twice():
    data = Digits(IID(), num_clients=7)
    data.setup("fit")
    first = data.samples(2, "test")[0].clone()
    data.setup("test")
    assert torch.equal(first, data.samples(2, "test")[0])
    again = Digits(IID(), num_clients=7)
    again.setup()
    assert torch.equal(first, again.samples(2, "test")[0])
    indices = torch.cat([torch.cat(parts) for parts in data._indices.values()])
    assert len(indices.unique()) == len(indices) == 1797
    other = Digits(IID(), num_clients=7, seed=1)
    other.setup()
    assert not torch.equal(first, other.samples(2, "test")[0])


def test_centralized_gathers_what_the_clients_hold():
    data = Digits(num_clients=5, batch_size=64)
    data.setup()
    x, y = (torch.cat(parts) for parts in zip(*data.centralized().train_dataloader(), strict=True))
    assert x.shape == (int(data.num_samples().sum()), 1, 8, 8)
    assert torch.equal(y.bincount(), data.class_counts().sum(dim=0))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Digits(val_fraction=1.0), "val_fraction"),
        (lambda: Digits(test_fraction=-0.1), "test_fraction"),
        (lambda: Digits(val_fraction=0.5, test_fraction=0.5), "leave no training data"),
        (lambda: Digits(num_clients=0), "num_clients"),
        (lambda: Digits(num_clients=2000).setup(), "1797 samples are too few for 2000 clients"),
        (lambda: Digits(Natural()).setup(), "who made each sample"),
        (lambda: Digits(cohort_size=21).setup(), "cohort_size is 21, but only 20"),
        (lambda: Digits().samples(0, "train"), r"call Digits.setup\(\)"),
    ],
)
def test_bad_options_are_named(build, message):
    with pytest.raises(ConfigurationError, match=message):
        build()


# idx files and Fashion-MNIST


@given(array=hnp.arrays(np.uint8, hnp.array_shapes(max_dims=4, max_side=5)), zipped=st.booleans())
def test_idx_files_come_back_as_written(tmp_path_factory, array, zipped):
    path = tmp_path_factory.mktemp("idx") / ("file.gz" if zipped else "file")
    path.write_bytes(gzip.compress(idx(array)) if zipped else idx(array))
    assert np.array_equal(read_idx(path), array)


@given(content=st.binary(max_size=40), zipped=st.booleans(), cut=st.integers(0, 60))
def test_any_other_bytes_are_a_clear_error(tmp_path_factory, content, zipped, cut):
    path = tmp_path_factory.mktemp("idx") / ("file.gz" if zipped else "file")
    whole = gzip.compress(idx(np.zeros((5, 9)))) if zipped else idx(np.zeros((5, 9)))
    for damaged in (content, whole[: min(cut, len(whole) - 1)]):
        path.write_bytes(damaged)
        with pytest.raises(ConfigurationError, match=str(path)):
            read_idx(path)


@pytest.fixture
def fashion(tmp_path) -> Path:
    random = np.random.default_rng(0)
    for part, count in (("train", 60), ("t10k", 40)):
        images = random.integers(0, 256, (count, 28, 28))
        (tmp_path / f"{part}-images-idx3-ubyte").write_bytes(idx(images))
        labels = gzip.compress(idx(np.arange(count) % 10))
        (tmp_path / f"{part}-labels-idx1-ubyte.gz").write_bytes(labels)
    return tmp_path


def test_fashion_mnist_pools_and_normalises(fashion):
    data = FashionMNIST(
        str(fashion), num_clients=1, val_fraction=0, test_fraction=0, download=False
    )
    data.prepare_data()
    data.setup()
    x, y = data.samples(0, "train")
    raw = np.concatenate(
        [read_idx(fashion / f"{part}-images-idx3-ubyte") for part in ("train", "t10k")]
    )
    # One client of two classes: classes without a client stay out.
    kept = np.isin(np.r_[np.arange(60) % 10, np.arange(40) % 10], y.unique().numpy())
    expected = (torch.from_numpy(raw[kept]).float() / 255 - 0.2860) / 0.3530
    torch.testing.assert_close(x.squeeze(1), expected, rtol=0, atol=1e-5)
    assert len(y.unique()) == 2
    loaded, _ = next(iter(data.centralized().val_dataloader() or data.client(0).train_dataloader()))
    assert loaded.dtype == torch.float32


def test_fashion_mnists_own_test_set_can_stay_one(fashion):
    data = FashionMNIST(str(fashion), partition=IID(), num_clients=2, official_test=True)
    data.setup()
    assert data.class_counts("test").sum(dim=0).tolist() == [4] * 10


def test_fashion_mnist_reads_torchvisions_folder_and_skips_the_download(fashion):
    raw = fashion / "somewhere" / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for file in fashion.glob("*ubyte*"):
        file.rename(raw / file.name)
    data = FashionMNIST(str(fashion / "somewhere"), partition=IID(), num_clients=4)
    data.prepare_data()
    data.setup()
    assert data.class_counts().sum() + data.class_counts("val").sum() < 100
    assert data.num_clients == 4


def test_fashion_mnist_says_where_it_looked(tmp_path):
    with pytest.raises(ConfigurationError, match=r"not found in .*download=True.*dataset-fashion"):
        FashionMNIST(str(tmp_path / "nowhere"), download=False).setup()


def test_fashion_mnist_names_a_damaged_file(fashion):
    path = fashion / "t10k-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConfigurationError, match="t10k-images-idx3-ubyte is damaged"):
        FashionMNIST(str(fashion), num_clients=2).setup()
    path.write_bytes(idx(np.zeros((40, 8, 8))))
    with pytest.raises(ConfigurationError, match="not Fashion-MNIST"):
        FashionMNIST(str(fashion), num_clients=2).setup()


def test_a_failed_download_is_one_line(tmp_path, monkeypatch):
    from torchvision import datasets

    def fail(*_args, **_kwargs):
        raise RuntimeError("Error downloading:\nno route")

    monkeypatch.setattr(datasets, "FashionMNIST", fail)
    with pytest.raises(ConfigurationError, match=r"could not download .* no route"):
        FashionMNIST(str(tmp_path)).prepare_data()


# Omniglot

SMALL = {"Greek": ["character01", "character02"], "Latin": ["character01"]}


def archive(path: Path, alphabets: dict[str, list[str]], drawers: int = 4) -> None:
    with zipfile.ZipFile(path, "w") as file:
        for a, (alphabet, characters) in enumerate(alphabets.items()):
            for c, character in enumerate(characters):
                for drawer in range(1, drawers + 1):
                    name = f"{path.stem}/{alphabet}/{character}/{a:02}{c:02}_{drawer:02}.png"
                    file.writestr(name, png((15 * drawer, 15 * c)))


@pytest.fixture
def omniglot(tmp_path) -> Path:
    archive(tmp_path / "images_background_small1.zip", SMALL)
    archive(tmp_path / "images_background_small2.zip", {"Latin": ["character01", "character02"]})
    return tmp_path


def test_omniglot_has_a_client_for_each_drawer(omniglot):
    data = Omniglot(str(omniglot), image_size=7, val_fraction=0, test_fraction=0)
    assert data.num_classes == 4
    data.prepare_data()
    data.setup()
    assert data.num_clients == 4
    assert data.num_samples().tolist() == [4] * 4
    x, y = data.samples(1, "train")
    assert y.tolist() == [0, 1, 2, 3]
    assert x.shape == (4, 1, 7, 7)
    # Drawer 2's first character: a block of 15 x 15 ink at (30, 0), of cells of 15 x 15 pixels.
    expected = torch.zeros(7, 7)
    expected[0, 2] = 1
    torch.testing.assert_close(x[0, 0], expected)


def test_omniglots_labels_may_be_alphabets(omniglot):
    data = Omniglot(
        str(omniglot), target="alphabet", partition=ClassesPerClient(1), num_clients=2,
        archives=["images_background_small1"], val_fraction=0,
    )  # fmt: skip
    data.setup()
    assert data.num_classes == 2
    assert sorted(data.class_counts().sum(dim=1).tolist()) == [3, 6]


def test_omniglot_fetches_what_is_missing(omniglot, monkeypatch):
    from torchvision.datasets import utils

    fetched = []

    def download(url, root, filename, md5):
        fetched.append((url.rsplit("/", 1)[1], md5 is None))
        Path(root).mkdir(parents=True, exist_ok=True)
        archive(Path(root) / filename, SMALL)

    monkeypatch.setattr(utils, "download_url", download)
    Omniglot(str(omniglot)).prepare_data()
    assert fetched == []
    data = Omniglot(str(omniglot / "new"), partition=IID(), num_clients=2)
    assert data.num_classes == 3
    assert fetched == [("images_background.zip", False), ("images_evaluation.zip", False)]
    data.setup()
    assert data.num_clients == 2


def test_a_failed_omniglot_download_names_the_address(tmp_path, monkeypatch):
    from torchvision.datasets import utils

    def fail(*_args, **_kwargs):
        raise OSError("no route")

    monkeypatch.setattr(utils, "download_url", fail)
    with pytest.raises(ConfigurationError, match=r"download https://.*background.zip: no route"):
        Omniglot(str(tmp_path)).prepare_data()


def test_omniglot_says_where_it_looked(omniglot):
    with pytest.raises(
        ConfigurationError, match=r"images_background.zip.* not found in .*download"
    ):
        Omniglot(str(omniglot / "nowhere"), download=False).setup()
    with pytest.raises(ConfigurationError, match=r"images_evaluation.zip not found"):
        Omniglot(str(omniglot), archives=["images_evaluation"], download=False).setup()


def test_omniglot_names_a_damaged_archive(omniglot):
    path = omniglot / "images_background_small1.zip"
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    with pytest.raises(ConfigurationError, match=r"small1.zip is damaged"):
        Omniglot(str(omniglot)).setup()
    start = whole.index(b"IDAT")
    path.write_bytes(whole[:start] + b"\0" * 8 + whole[start + 8 :])
    with pytest.raises(ConfigurationError, match=r"small1.zip is damaged: .*_01.png"):
        Omniglot(str(omniglot)).setup()
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("readme.txt", "")
    with pytest.raises(ConfigurationError, match="no Omniglot images"):
        Omniglot(str(omniglot), archives=[path.stem]).setup()


@pytest.mark.parametrize("options", [{"target": "drawer"}, {"image_size": 0}])
def test_bad_omniglot_options_are_named(options):
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        Omniglot(**options)


def test_importing_the_data_modules_loads_no_heavy_library():
    code = """
import sys, lightning
before = set(sys.modules)
import pflight.datamodules
loaded = {"sklearn", "torchvision", "matplotlib.pyplot"} & (set(sys.modules) - before)
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True)
