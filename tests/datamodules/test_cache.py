from __future__ import annotations

import os
import re
import resource
import time
import warnings
from multiprocessing import get_context
from multiprocessing.process import BaseProcess as Process
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pflight.datamodules.cache import CachedSamples, SampleWriter, cached_samples
from pflight.errors import ConfigurationError

X = np.arange(24, dtype=np.float32).reshape(6, 2, 2)
Y = np.array([3, 1, 4, 1, 5, 9])


def write(writer: SampleWriter) -> None:
    writer.add(X[:2], Y[:2], "zoe")
    writer.add(X[2:5], Y[2:5], "adam")
    writer.add(X[5:], Y[5:], "zoe", test=True)


def refuse(_writer: SampleWriter) -> None:
    raise AssertionError("the cache is built again")


def opened(folder: Path, build=refuse, **options) -> CachedSamples:
    source = folder / "source.json"
    if not source.exists():
        source.touch()
    return cached_samples(folder / "cache", "data", [source], options, build)


def caches(folder: Path) -> list[Path]:
    return [path for path in (folder / "cache").iterdir() if path.is_dir()]


def check(samples: CachedSamples) -> None:
    assert torch.equal(samples.x, torch.from_numpy(X))
    assert samples.y.tolist() == Y.tolist()
    assert [samples.names[group] for group in samples.groups] == ["zoe"] * 2 + ["adam"] * 3 + [
        "zoe"
    ]
    assert samples.test.tolist() == [False] * 5 + [True]


def test_a_cache_is_built_once_and_returns_what_was_written(tmp_path):
    check(opened(tmp_path, write))
    check(opened(tmp_path))
    assert opened(tmp_path).names == ["adam", "zoe"]
    (path,) = caches(tmp_path)
    assert np.load(path / "x.npy").dtype == np.float32


def test_a_changed_source_replaces_its_cache_and_other_options_keep_theirs(tmp_path):
    opened(tmp_path, write)
    opened(tmp_path, write, size=8)
    kept = set(caches(tmp_path))
    (tmp_path / "source.json").write_text("more")
    check(opened(tmp_path, write))
    assert len(caches(tmp_path)) == 2
    assert len(kept.intersection(caches(tmp_path))) == 1
    check(opened(tmp_path))


def test_a_folder_stands_for_the_files_in_it(tmp_path):
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    (pictures / "1.png").write_bytes(b"one")

    def built() -> int:
        before = len(builds)
        cached_samples(tmp_path / "cache", "data", [pictures], {}, builds.append_and_write)
        return len(builds) - before

    class Builds(list):
        def append_and_write(self, writer: SampleWriter) -> None:
            self.append(writer)
            write(writer)

    builds = Builds()
    assert [built(), built()] == [1, 0]
    with (pictures / "1.png").open("r+b") as file:  # in place, which the folder does not show
        file.write(b"two")
    os.utime(pictures / "1.png", ns=(0, 0))
    assert [built(), built()] == [1, 0]


def test_a_source_that_is_gone_is_named(tmp_path):
    (tmp_path / "source.json").symlink_to(tmp_path / "nowhere.json")
    with pytest.raises(ConfigurationError, match=f"can't read {tmp_path}/source.json: No such"):
        cached_samples(tmp_path / "cache", "data", [tmp_path / "source.json"], {}, write)


def test_features_are_mapped_and_writing_to_them_leaves_the_file_alone(tmp_path):
    opened(tmp_path, write).x.zero_()
    check(opened(tmp_path))


def test_without_test_samples_there_is_no_test_mask(tmp_path):
    assert opened(tmp_path, lambda writer: writer.add(X, Y, "zoe")).test is None


@given(
    x=hnp.arrays(
        st.sampled_from([np.uint8, np.float32]),
        st.tuples(st.integers(1, 12), st.integers(1, 3), st.integers(0, 3)),
        elements=st.integers(0, 255),
    ),
    data=st.data(),
)
@settings(max_examples=30, deadline=None)
def test_any_parts_come_back_in_order(tmp_path_factory, x, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(x)), max_size=4)))
    parts = np.split(np.arange(len(x)), cuts)
    names = data.draw(st.lists(st.text(), min_size=len(parts), max_size=len(parts)))

    def build(writer: SampleWriter) -> None:
        for part, name in zip(parts, names, strict=True):
            writer.add(x[part], part, name)

    samples = opened(tmp_path_factory.mktemp("data"), build)
    assert np.array_equal(samples.x.numpy(), x)
    assert samples.x.numpy().dtype == x.dtype
    assert samples.y.tolist() == list(range(len(x)))
    owners = [name for part, name in zip(parts, names, strict=True) for _ in part]
    assert [samples.names[group] for group in samples.groups] == owners
    assert list(samples.names) == sorted(set(names))


def test_another_source_or_option_is_another_cache(tmp_path):
    opened(tmp_path, write, size=84)
    with pytest.raises(AssertionError, match="built again"):
        opened(tmp_path, size=42)
    opened(tmp_path, size=84)
    os.utime(tmp_path / "source.json", ns=(0, 1))
    with pytest.raises(AssertionError, match="built again"):
        opened(tmp_path, size=84)
    opened(tmp_path, write, size=84)
    (tmp_path / "source.json").write_text("longer")
    os.utime(tmp_path / "source.json", ns=(0, 1))
    with pytest.raises(AssertionError, match="built again"):
        opened(tmp_path, size=84)


def test_a_moved_folder_keeps_its_cache(tmp_path):
    (tmp_path / "old").mkdir()
    source = tmp_path / "old" / "train" / "a.json"
    source.parent.mkdir()
    source.touch()
    cached_samples(tmp_path / "old" / "cache", "data", [source], {}, write)
    (tmp_path / "old").rename(tmp_path / "new")
    moved = tmp_path / "new" / "train" / "a.json"
    check(cached_samples(tmp_path / "new" / "cache", "data", [moved], {}, refuse))


@pytest.mark.parametrize("name", ["x.npy", "y.npy", "groups.npy", "test.npy", "names.json"])
@pytest.mark.parametrize("keep", [None, 0, 0.9])
def test_a_damaged_cache_is_named_and_built_anew(tmp_path, name, keep):
    opened(tmp_path, write)
    (path,) = caches(tmp_path)
    content = (path / name).read_bytes()
    if keep is None:
        (path / name).unlink()
    else:
        (path / name).write_bytes(content[: int(keep * len(content))])
    with pytest.warns(UserWarning, match=f"{path} is damaged .*built anew"):
        check(opened(tmp_path, write))
    check(opened(tmp_path))


@given(at=st.integers(0, 127), byte=st.integers(0, 255))
@settings(max_examples=50, deadline=None)
@pytest.mark.filterwarnings("ignore:.* is damaged")
def test_a_changed_byte_of_a_header_never_stops_a_run(tmp_path_factory, at, byte):
    folder = tmp_path_factory.mktemp("data")
    opened(folder, write)
    (path,) = caches(folder)
    content = bytearray((path / "y.npy").read_bytes())
    content[at] = byte
    (path / "y.npy").write_bytes(content)
    assert len(opened(folder, write).y) == len(Y)


@pytest.mark.parametrize(
    ("name", "values"),
    [("y.npy", np.arange(5)), ("groups.npy", np.full(6, 2)), ("test.npy", np.zeros(7, bool))],
)
def test_columns_that_do_not_fit_are_damage(tmp_path, name, values):
    opened(tmp_path, write)
    np.save(caches(tmp_path)[0] / name, values)
    with pytest.warns(UserWarning, match="don't fit"):
        check(opened(tmp_path, write))


def test_an_error_while_building_leaves_nothing_behind(tmp_path):
    def fail(writer: SampleWriter) -> None:
        write(writer)
        raise ConfigurationError("bad.json is damaged")

    with pytest.raises(ConfigurationError, match=r"^bad.json is damaged$"):
        opened(tmp_path, fail)
    assert caches(tmp_path) == []
    check(opened(tmp_path, write))


def test_no_samples_are_an_error(tmp_path):
    with pytest.raises(ConfigurationError, match=f"no samples in {tmp_path}"):
        opened(tmp_path, lambda writer: None)
    assert caches(tmp_path) == []


def test_samples_of_another_shape_are_refused(tmp_path):
    def build(writer: SampleWriter) -> None:
        writer.add(X, Y, "zoe")
        writer.add(X[:, :1], Y, "zoe")

    with pytest.raises(ValueError, match=r"shape \(6, 2, 2\).*got \(6, 1, 2\)"):
        opened(tmp_path, build)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(ConfigurationError, match=f"the cache {tmp_path}/cache: .*cache_dir"):
        opened(tmp_path, write)


# Other processes


def start(work) -> Process:
    process = get_context("fork").Process(target=work)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*multi-threaded", DeprecationWarning)
        process.start()
    return process


def finish(process: Process) -> None:
    process.join()
    assert process.exitcode == 0


def test_a_full_disk_is_a_clear_error_and_the_next_run_works(tmp_path):
    rows = np.zeros((100, 784), np.float32)

    def build(writer: SampleWriter) -> None:
        for _ in range(9):
            writer.add(rows, np.zeros(100, int), "zoe")

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))
        with pytest.raises(
            ConfigurationError,
            match=f"can't write the cache {tmp_path}/cache/data-.*: File too large; cache_dir",
        ):
            opened(tmp_path, build)
        assert caches(tmp_path) == []

    finish(start(work))
    check(opened(tmp_path, write))


def test_of_two_processes_one_builds_and_the_other_waits(tmp_path):
    (tmp_path / "source.json").touch()

    def build(writer: SampleWriter) -> None:
        with (tmp_path / "builds").open("a") as file:
            file.write("built\n")
        time.sleep(0.3)
        write(writer)

    for process in [start(lambda: check(opened(tmp_path, build))) for _ in range(3)]:
        finish(process)
    assert (tmp_path / "builds").read_text() == "built\n"
    check(opened(tmp_path))


def test_what_a_killed_build_leaves_is_removed(tmp_path):
    (tmp_path / "source.json").touch()

    def build(writer: SampleWriter) -> None:
        write(writer)
        (tmp_path / "half").touch()
        time.sleep(60)

    process = start(lambda: opened(tmp_path, build))
    while not (tmp_path / "half").exists():
        time.sleep(0.01)
    process.kill()
    process.join()
    assert [path.suffix for path in caches(tmp_path)] == [".partial"]
    opened(tmp_path, write, another="cache")
    check(opened(tmp_path, write))
    assert {path.suffix for path in caches(tmp_path)} == {""}


def test_only_what_is_read_takes_memory(tmp_path):
    rows = np.ones((64, 1024, 256), np.float32)
    opened(tmp_path, lambda writer: writer.add(rows, np.arange(64), "zoe"))

    def work() -> None:
        samples = opened(tmp_path)
        assert samples.x[torch.arange(0, 50, 5)].sum() == 10 * 1024 * 256
        mapped = Path("/proc/self/smaps").read_text().partition("/x.npy\n")[2]
        resident = re.search(r"^Rss: +(\d+) kB", mapped, re.MULTILINE)
        assert 10 <= int(resident[1]) >> 10 < 32  # MiB, of 64

    finish(start(work))
