from __future__ import annotations

import io
import os
import sys
import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from pyarrow import parquet

from pflight.datamodules.sources.parquet import (
    decode_image,
    parquet_columns,
    parquet_files,
    read_parquet,
)
from pflight.errors import ConfigurationError


def encoded(pixels: np.ndarray, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def write(path, **columns):
    parquet.write_table(pa.table(columns), path, row_group_size=1500)
    return path


def test_files_are_found_in_folders_and_sorted(tmp_path):
    for name in ("b/2.parquet", "b/1.parquet", "a.parquet", "c.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    names = [str(path.relative_to(tmp_path)) for path in parquet_files(tmp_path)]
    assert names == ["a.parquet", "b/1.parquet", "b/2.parquet"]
    assert parquet_files(tmp_path / "nowhere") == []


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_shard_that_is_missing_is_named(tmp_path, lost):
    names = [f"train-0000{number}-of-00003.parquet" for number in range(3)]
    for name in names:
        (tmp_path / name).touch()
    assert len(parquet_files(tmp_path)) == 3
    (tmp_path / names[lost]).unlink()
    with pytest.raises(ConfigurationError, match=f"{names[lost]} is missing: train-0000"):
        parquet_files(tmp_path)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["data/train-00000-of-00001"], ["old/train-00000-of-00001"]),
        (["train-00000-of-00001"], ["train-00000-of-00002", "train-00001-of-00002"]),
        (["a/train-00000-of-00002", "a/train-00001-of-00002"], ["b/train-00000-of-00001"]),
        (["a/0000"], ["b/0000"]),
    ],
)
def test_data_that_are_there_twice_are_refused(tmp_path, one, other):
    paths = [tmp_path / f"{name}.parquet" for name in one + other]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    first, second = paths[0], paths[len(one)]
    with pytest.raises(ConfigurationError, match=f"^{first} and {second} are the same data twice"):
        parquet_files(tmp_path)
    for path in paths[len(one) :]:
        path.unlink()
    assert parquet_files(tmp_path) == paths[: len(one)]


def test_other_data_may_have_the_same_name_in_another_folder(tmp_path):
    for split, rows in (("train", 3), ("test", 2)):
        (tmp_path / split).mkdir()
        write(tmp_path / split / "0000.parquet", label=list(range(rows)) * 100)
    assert len(parquet_files(tmp_path)) == 2


def test_files_of_an_unfinished_download_do_not_count(tmp_path):
    whole, part = tmp_path / "hub", tmp_path / "hub.partial"
    for folder, name in ((whole, "train"), (part, "train"), (part, "train-00000-of-00003")):
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.parquet").touch()
    assert parquet_files(tmp_path, unfinished=part) == [whole / "train.parquet"]


def test_columns_come_back_in_the_order_of_the_rows(tmp_path):
    images = [{"bytes": b"%d" % row, "path": None} for row in range(4000)]
    path = write(tmp_path / "a.parquet", img=images, label=list(range(4000)), other=[0.5] * 4000)
    assert parquet_columns(path) == ["img", "label", "other"]
    batches = list(read_parquet(path, ["label", "img"]))
    assert len(batches) > 1
    assert set(batches[0]) == {"label", "img"}
    assert [label for batch in batches for label in batch["label"]] == list(range(4000))
    assert [image for batch in batches for image in batch["img"]] == [
        image["bytes"] for image in images
    ]


def test_a_missing_column_is_named_with_those_there_are(tmp_path):
    path = write(tmp_path / "a.parquet", image=["x"], character=[1])
    with pytest.raises(
        ConfigurationError, match=r"a\.parquet has no column label; .* image, character"
    ):
        next(read_parquet(path, ["image", "label"]))


@pytest.mark.parametrize(
    "columns",
    [
        {"label": [1] * 2000 + [None]},
        {"label": [{"bytes": b"1", "path": None}] * 2000 + [{"bytes": None, "path": "1.png"}]},
    ],
)
def test_a_missing_value_is_named_by_its_row(tmp_path, columns):
    path = write(tmp_path / "a.parquet", **columns)
    with pytest.raises(ConfigurationError, match=r"a\.parquet: row 2000 has no label"):
        list(read_parquet(path, ["label"]))


def test_nan_is_called_nan(tmp_path):
    path = write(tmp_path / "a.parquet", label=[1.0] * 2000 + [float("nan")])
    with pytest.raises(ConfigurationError, match=r"a\.parquet: label of row 2000 is NaN"):
        list(read_parquet(path, ["label"]))


@given(keep=st.floats(0, 0.999))
def test_a_truncated_file_is_named(tmp_path_factory, keep):
    path = write(tmp_path_factory.mktemp("cut") / "a.parquet", label=list(range(100)))
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content))])
    for read in (parquet_columns, lambda path: list(read_parquet(path, ["label"]))):
        with pytest.raises(ConfigurationError, match=r"a\.parquet is damaged"):
            read(path)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to(path.name)])
def test_what_is_no_file_is_named(tmp_path, make):
    make(tmp_path / "train-00000-of-00001.parquet")
    with pytest.raises(ConfigurationError, match=r"of-00001\.parquet is not a file"):
        parquet_files(tmp_path)


def test_a_folder_may_be_called_like_a_file(tmp_path):
    (tmp_path / "all.parquet").mkdir()
    (tmp_path / "all.parquet" / "part-0.parquet").touch()
    assert parquet_files(tmp_path) == [tmp_path / "all.parquet" / "part-0.parquet"]


def test_large_rows_are_read_a_few_at_once_and_larger_ones_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("pflight.datamodules.sources.parquet._BYTES_AT_ONCE", 1 << 20)
    path = tmp_path / "a.parquet"
    large = pa.table({"image": [bytes(1 << 18)] * 4})
    parquet.write_table(large, path, compression="zstd", use_dictionary=False)
    assert [len(batch["image"]) for batch in read_parquet(path, ["image"])] == [3, 1]
    larger = pa.table({"image": [bytes(3 << 20)]})
    parquet.write_table(larger, path, compression="zstd", use_dictionary=False)
    assert path.stat().st_size < 1 << 16
    with pytest.raises(ConfigurationError, match=r"a\.parquet has rows of 3 MiB"):
        next(read_parquet(path, ["image"]))


def test_text_that_is_none_is_damage(tmp_path):
    path = write(tmp_path / "a.parquet", label=["Grieg"] * 3)
    path.write_bytes(path.read_bytes().replace(b"Grieg", b"\xff\xfe\xfd\xfc\xfb"))
    with pytest.raises(ConfigurationError, match=r"a\.parquet is damaged: .*utf-8"):
        list(read_parquet(path, ["label"]))


def test_checksums_of_pages_are_verified(tmp_path):
    path = tmp_path / "a.parquet"
    table = pa.table({"label": list(range(1000))})
    parquet.write_table(
        table, path, write_page_checksum=True, compression="none", use_dictionary=False
    )
    content = bytearray(path.read_bytes())
    content[4000] ^= 1
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"a\.parquet is damaged: .*CRC"):
        list(read_parquet(path, ["label"]))


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigurationError, match=r'a\.parquet .*pip install "pflight\[hf\]"'):
        next(read_parquet(tmp_path / "a.parquet", ["label"]))


def test_images_are_decoded_to_gray_or_colours():
    pixels = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)
    assert np.array_equal(decode_image(encoded(pixels), "a.png", "RGB"), pixels)
    gray = pixels[..., 0]
    assert np.array_equal(decode_image(encoded(gray), "a.png", "L"), gray)
    assert np.array_equal(
        decode_image(encoded(gray), "a.png", "RGB"), np.stack([gray] * 3, axis=-1)
    )
    assert decode_image(encoded(pixels, "JPEG"), "a.jpg", "L").shape == (4, 5)


@given(
    kind=st.sampled_from(["PNG", "JPEG"]),
    position=st.integers(0, 10_000),
    value=st.integers(0, 255),
)
def test_a_damaged_image_decodes_or_is_refused(kind, position, value):
    noise = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    content = bytearray(encoded(noise, kind))
    content[position % len(content)] = value
    for damaged in (bytes(content), bytes(content[: position % len(content)])):
        with suppress(ConfigurationError):
            assert decode_image(damaged, "row 3", "RGB").dtype == np.uint8


@given(position=st.integers(8, 900), bit=st.integers(0, 7))
def test_a_damaged_png_is_never_another_picture(position, bit):
    noise = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    content = bytearray(encoded(noise))
    content[position % len(content)] ^= 1 << bit
    with suppress(ConfigurationError):
        assert np.array_equal(decode_image(bytes(content), "row 3", "RGB"), noise)


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_images_of_another_size_or_too_many_pixels_are_not_decoded(kind, monkeypatch):
    content = encoded(np.zeros((4100, 4100), dtype=np.uint8), kind)
    monkeypatch.setattr(Image.Image, "convert", None)
    for size, expected in ((None, "at most 16 million"), ((28, 30), "30 x 28")):
        with pytest.raises(
            ConfigurationError,
            match=f"row 3 is an image of 4100 x 4100 pixels, expected {expected}",
        ):
            decode_image(content, "row 3", "L", size)


def test_an_image_that_pillow_takes_for_a_bomb_is_named():
    content = bytearray(encoded(np.zeros((16, 16), dtype=np.uint8)))
    content[16:24] = (1 << 20).to_bytes(4, "big") * 2
    content[29:33] = zlib.crc32(content[12:29]).to_bytes(4, "big")
    with pytest.raises(ConfigurationError, match=r"row 3 is a damaged image: .*bomb"):
        decode_image(bytes(content), "row 3", "L")


def test_a_truncated_image_is_named():
    content = encoded(np.zeros((16, 16), dtype=np.uint8))
    with pytest.raises(ConfigurationError, match=r"row 3 is a damaged image: .*truncated"):
        decode_image(content[:45], "row 3", "L")


@pytest.mark.parametrize("content", [b"", b"not an image"])
def test_what_is_no_image_is_named(content):
    with pytest.raises(ConfigurationError, match="row 3 is not an image"):
        decode_image(content, "row 3", "L")
