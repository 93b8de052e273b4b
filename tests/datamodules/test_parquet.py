from __future__ import annotations

import io
import sys
from contextlib import suppress

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from pyarrow import parquet

from pflight.datamodules.parquet import (
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


@given(keep=st.floats(0, 0.999))
def test_a_truncated_file_is_named(tmp_path_factory, keep):
    path = write(tmp_path_factory.mktemp("cut") / "a.parquet", label=list(range(100)))
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content))])
    for read in (parquet_columns, lambda path: list(read_parquet(path, ["label"]))):
        with pytest.raises(ConfigurationError, match=r"a\.parquet is damaged"):
            read(path)


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


def test_a_truncated_image_is_named():
    content = encoded(np.zeros((16, 16), dtype=np.uint8))
    with pytest.raises(ConfigurationError, match=r"row 3 is a damaged image: .*truncated"):
        decode_image(content[:45], "row 3", "L")


@pytest.mark.parametrize("content", [b"", b"not an image"])
def test_what_is_no_image_is_named(content):
    with pytest.raises(ConfigurationError, match="row 3 is not an image"):
        decode_image(content, "row 3", "L")
