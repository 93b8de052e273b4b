from __future__ import annotations

import gzip
import io
import os
import subprocess
import sys
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image

from pflight.datamodules import (
    IID,
    ByUser,
    ClassesPerClient,
    Digits,
    FashionMNIST,
    Omniglot,
)
from pflight.datamodules.sources.idx import read_idx
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
        (lambda: Digits(ByUser()).setup(), "who made each sample"),
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


def header(*shape: int) -> bytes:
    return bytes([0, 0, 8, len(shape)]) + np.array(shape, dtype=">u4").tobytes()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (idx(np.zeros((5, 9))) + b"0", "promises 45 values of shape .5, 9., it has more"),
        (header(2**31, 28, 28), "promises 1683627180032 values .* more than any data set"),
        (header(2**20, 2**10), "promises 1073741824 values .* it has 0"),
        (header(2**32 - 1) * 2, "more than any data set"),
        (header(*[2**32 - 1] * 255), "more than any data set"),
        (header(3, 3)[:-1], "not an idx file"),
    ],
)
@pytest.mark.parametrize("zipped", [False, True])
def test_headers_that_promise_too_much_or_too_little_are_named(tmp_path, content, message, zipped):
    path = tmp_path / ("file.gz" if zipped else "file")
    path.write_bytes(gzip.compress(content) if zipped else content)
    with pytest.raises(ConfigurationError, match=f"{path} is .*{message}"):
        read_idx(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content[:-1],
        lambda content: content + b"garbage",
        lambda content: content[:-8] + bytes(4) + content[-4:],
        lambda content: content[:30] + bytes(8) + content[38:],
    ],
    ids=["cut", "garbage", "checksum", "zeros"],
)
def test_a_damaged_gzip_is_named(tmp_path, change):
    path = tmp_path / "file.gz"
    array = np.random.default_rng(0).integers(0, 256, (20, 28, 28))
    path.write_bytes(change(gzip.compress(idx(array))))
    with pytest.raises(ConfigurationError, match=f"{path} is damaged: "):
        read_idx(path)


def test_of_a_gzip_no_more_is_read_than_its_header_promises(tmp_path):
    path = tmp_path / "file.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(idx(np.zeros((5, 9))))
        for _ in range(64):
            file.write(bytes(1 << 20))

    tracemalloc.start()
    with pytest.raises(ConfigurationError, match=f"{path} is damaged: .*45 values.*it has more"):
        read_idx(path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to(path.name)])
def test_what_is_no_file_is_named(fashion, make):
    path = fashion / "train-labels-idx1-ubyte.gz"
    path.unlink()
    make(path)
    with pytest.raises(ConfigurationError, match=f"{path} is not a file"):
        read_idx(path)
    with pytest.raises(ConfigurationError, match=f"{path} is not a file"):
        FashionMNIST(str(fashion)).prepare_data()


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


@pytest.mark.parametrize("folder", ["FashionMNIST/raw", "fashion-mnist"])
def test_fashion_mnist_reads_a_folder_of_its_own_and_skips_the_download(fashion, folder):
    raw = fashion / "somewhere" / folder
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
    assert data.client_names == ["1", "2", "3", "4"]
    x, y = data.samples(1, "train")
    assert y.tolist() == [0, 1, 2, 3]
    assert x.shape == (4, 1, 7, 7)
    # Drawer 2's first character: a block of 15 x 15 ink at (30, 0), of cells of 15 x 15 pixels.
    expected = torch.zeros(7, 7)
    expected[0, 2] = 1
    torch.testing.assert_close(x[0, 0], expected)


def test_omniglots_drawers_may_be_people_of_one_alphabet(omniglot):
    data = Omniglot(str(omniglot), drawer="person", val_fraction=0, test_fraction=0)
    data.setup()
    assert data.num_clients == 8
    assert data.class_counts().tolist() == 4 * [[1, 1, 0, 0]] + 4 * [[0, 0, 1, 1]]
    assert data.client_names[0].endswith(" 01")
    assert len(set(data.client_names)) == 8
    number = Omniglot(str(omniglot), val_fraction=0, test_fraction=0)
    number.setup()
    both = torch.cat([data.samples(0, "train")[0], data.samples(4, "train")[0]])
    assert torch.equal(both, number.samples(0, "train")[0])


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


def test_omniglot_reads_a_folder_of_its_own(omniglot):
    own = omniglot / "data" / "omniglot"
    own.mkdir(parents=True)
    for file in omniglot.glob("*.zip"):
        file.rename(own / file.name)
    data = Omniglot(str(omniglot / "data"))
    data.prepare_data()
    assert data.num_classes == 4


def test_a_failed_omniglot_download_names_the_address(tmp_path, monkeypatch):
    from torchvision.datasets import utils

    def fail(*_args, **_kwargs):
        raise OSError("no route")

    monkeypatch.setattr(utils, "download_url", fail)
    with pytest.raises(ConfigurationError, match=r"https://.*background.zip to .*: no route"):
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
        file.writestr("Greek/", "")
    with pytest.raises(ConfigurationError, match="no Omniglot images"):
        Omniglot(str(omniglot), archives=[path.stem]).setup()


def rezip(path: Path, name: str | None = None, content: bytes | None = None, **facts) -> str:
    """Write an archive again, with another name, content or header for its second member."""
    with zipfile.ZipFile(path) as file:
        members = {member: file.read(member) for member in file.namelist()}
    changed = list(members)[1]
    with zipfile.ZipFile(path, "w") as file:
        for member, held in members.items():
            info = zipfile.ZipInfo(name or member if member == changed else member)
            info.compress_type = zipfile.ZIP_DEFLATED
            if member == changed:
                info.compress_type = facts.pop("method", zipfile.ZIP_DEFLATED)
                held = held if content is None else content
            file.writestr(info, held)
            if member == changed:
                for fact, value in facts.items():
                    setattr(info, fact, value)
    return name or changed


def large_image() -> bytes:
    file = io.BytesIO()
    Image.new("1", (5000, 5000)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"flag_bits": 1}, "{name} is encrypted"),
        ({"compress_type": 99}, "{name} is compressed by method 99"),
        ({"method": zipfile.ZIP_BZIP2}, "{name} is compressed by method 12"),
        ({"content": bytes(1 << 20)}, "{name} is too large for a drawing: 1048576 bytes"),
        ({"content": bytes(1 << 20), "file_size": 300}, "is damaged: {name}: Bad CRC-32"),
        ({"file_size": 1 << 30}, "{name} is too large for a drawing: 1073741824 bytes"),
        ({"CRC": 1}, "is damaged: {name}: Bad CRC-32"),
        ({"content": large_image()}, "{name} is an image of 5000 x 5000 pixels"),
        ({"content": b""}, "{name} is not an image"),
        ({"name": "../../Greek/character01/0000_02.png"}, "'{name}' is not the name of a drawing"),
        ({"name": "/a/Greek/character01/0000_02.png"}, "'{name}' is not the name of a drawing"),
        ({"name": "../Greek/character01/0000_02.png"}, "'{name}' is not the name of a drawing"),
        ({"name": "a/Greek/character01/0000_02.pnf"}, "'{name}' is not the name of a drawing"),
        ({"name": "a/Greek/character01/0001_01.png"}, "{name} is the same drawing as .*0000_01"),
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_omniglot_does_not_trust_its_archives(omniglot, changes, message):
    path = omniglot / "images_background_small1.zip"
    name = rezip(path, **changes)
    with pytest.raises(ConfigurationError, match=f"{path}.*{message.format(name=name)}") as caught:
        Omniglot(str(omniglot), archives=[path.stem]).setup()
    assert "\n" not in str(caught.value)


def test_omniglot_leaves_out_what_an_archiver_adds(omniglot):
    path = omniglot / "images_background_small1.zip"
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("__MACOSX/a/._b", "")
        file.writestr("images_background_small1/.DS_Store", "")
    assert Omniglot(str(omniglot), archives=[path.stem]).num_classes == 3


@given(at=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255), cut=st.booleans())
@example(at=0.744140625, byte=0, cut=False)  # a name that ends early
@settings(deadline=None)
def test_a_damaged_archive_is_read_as_it_was_or_refused(tmp_path_factory, at, byte, cut):
    folder = tmp_path_factory.mktemp("omniglot")
    path = folder / "images_background_small1.zip"
    archive(path, {"Greek": ["character01"]}, drawers=2)
    right = Omniglot(str(folder), download=False).load()
    content = bytearray(path.read_bytes())
    content[int(at * len(content))] = byte
    path.write_bytes(content[: int(at * len(content))] if cut else content)
    refusal = ""
    try:
        samples = Omniglot(str(folder), download=False).load()
    except ConfigurationError as error:
        refusal = str(error)
    if refusal:
        assert str(path) in refusal
    else:
        assert torch.equal(samples.x, right.x)
        assert torch.equal(samples.y, right.y)
        assert samples.groups.tolist() == right.groups.tolist()


@pytest.mark.parametrize("options", [{"target": "drawer"}, {"image_size": 0}])
def test_bad_omniglot_options_are_named(options):
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        Omniglot(**options)


@pytest.mark.long
def test_importing_the_data_modules_loads_no_heavy_library():
    code = """
import sys, lightning
before = set(sys.modules)
import pflight.datamodules
loaded = {"sklearn", "torchvision", "matplotlib.pyplot"} & (set(sys.modules) - before)
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True)
