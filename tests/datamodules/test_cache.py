from __future__ import annotations

import copy
import json
import os
import pickle
import re
import resource
import shutil
import time
import warnings
import zlib
from multiprocessing import get_context
from multiprocessing.process import BaseProcess as Process
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pflight.datamodules.partitions.samples import Samples
from pflight.datamodules.sources.cache import SampleWriter, cached_samples
from pflight.errors import ConfigurationError

X = np.arange(24, dtype=np.float32).reshape(6, 2, 2)
Y = np.array([3, 1, 4, 1, 5, 9])


def write(writer: SampleWriter) -> None:
    writer.add(X[:2], Y[:2], "zoe")
    writer.add(X[2:5], Y[2:5], "adam")
    writer.add(X[5:], Y[5:], "zoe", test=True)


def refuse(_writer: SampleWriter) -> None:
    raise AssertionError("the cache is built again")


def opened(folder: Path, build=refuse, **options) -> Samples:
    source = folder / "source.json"
    if not source.exists():
        source.touch()
    return cached_samples(folder / "cache", "data", [source], options, build, num_labels=12)


def features(samples: Samples) -> torch.Tensor:
    return samples.x[torch.arange(len(samples.y))]


def caches(folder: Path) -> list[Path]:
    return [path for path in (folder / "cache").iterdir() if path.is_dir()]


def check(samples: Samples) -> None:
    assert torch.equal(features(samples), torch.from_numpy(X))
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
        cached_samples(tmp_path / "cache", "data", [pictures], {}, builds.append_and_write, 10)
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
        cached_samples(tmp_path / "cache", "data", [tmp_path / "source.json"], {}, write, 10)


def test_writing_to_features_leaves_the_file_alone(tmp_path):
    samples = opened(tmp_path, write)
    features(samples).zero_()
    check(samples)
    check(opened(tmp_path))


def test_without_test_samples_there_is_no_test_mask(tmp_path):
    assert opened(tmp_path, lambda writer: writer.add(X, Y, "zoe")).test is None


@pytest.mark.long
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
    assert np.array_equal(features(samples).numpy(), x)
    assert features(samples).numpy().dtype == x.dtype
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
    cached_samples(tmp_path / "old" / "cache", "data", [source], {}, write, 10)
    (tmp_path / "old").rename(tmp_path / "new")
    moved = tmp_path / "new" / "train" / "a.json"
    check(cached_samples(tmp_path / "new" / "cache", "data", [moved], {}, refuse, 10))


def test_two_data_sets_may_share_a_folder_of_caches(tmp_path, monkeypatch):
    def opened(name: str, build) -> Samples:
        sources = [tmp_path / name / "train" / "a.json"]
        return cached_samples(tmp_path / "cache", "data", sources, {}, build, 10)

    for name in ("one", "two"):
        (tmp_path / name / "train").mkdir(parents=True)
        (tmp_path / name / "train" / "a.json").write_text(name * len(name))
        opened(name, write)
    for name in ("one", "two"):
        check(opened(name, refuse))
    monkeypatch.chdir(tmp_path)
    check(cached_samples(Path("cache"), "data", [Path("one/train/a.json")], {}, refuse, 10))


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


# Damage

FILES = ["x.npy", "y.npy", "groups.npy", "test.npy", "names.json", "checksums.json"]
LARGE = np.random.default_rng(0).integers(0, 256, (1000, 1000), dtype=np.uint8)  # four blocks


def write_large(writer: SampleWriter) -> None:
    writer.add(LARGE, np.arange(1000) % 10, "zoe")


def check_large(samples: Samples) -> None:
    for rows in torch.randperm(1000, generator=torch.manual_seed(0)).split(100):
        assert np.array_equal(samples.x[rows].numpy(), LARGE[rows])


def flip(path: Path, at: float = 0.5) -> None:
    """Flip one bit."""
    content = bytearray(path.read_bytes())
    content[int(at * len(content))] ^= 4
    path.write_bytes(content)


def swap(path: Path, first: int, second: int, length: int) -> None:
    """Swap two parts of a file."""
    content = bytearray(path.read_bytes())
    one, other = slice(first, first + length), slice(second, second + length)
    content[one], content[other] = content[other], content[one]
    path.write_bytes(content)


def put(path: Path, make) -> None:
    """Put something else in a file's place."""
    path.unlink()
    make(path)


DAMAGES = {
    "gone": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: os.truncate(path, path.stat().st_size * 9 // 10),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"0"),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "first bit": lambda path: flip(path, 0),
    "a bit": flip,
    "last bit": lambda path: flip(path, 0.999),
    "folder": lambda path: put(path, Path.mkdir),
    "pipe": lambda path: put(path, os.mkfifo),
    "loop": lambda path: put(path, lambda path: path.symlink_to(path.name)),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_is_named_and_built_anew(tmp_path, name, damage):
    opened(tmp_path, write)
    (path,) = caches(tmp_path)
    DAMAGES[damage](path / name)
    with pytest.warns(UserWarning, match=f"{path} is damaged .*building it again"):
        check(opened(tmp_path, write))
    check(opened(tmp_path))


@pytest.mark.parametrize(
    ("first", "second", "length"), [(128, 262_128, 262_000), (128, 132, 4), (300_000, 900_000, 8)]
)
def test_swapped_blocks_and_words_are_damage(tmp_path, first, second, length):
    opened(tmp_path, write_large)
    swap(caches(tmp_path)[0] / "x.npy", first, second, length)
    with pytest.warns(UserWarning, match=r"block \d of x.npy does not match its checksum.*again"):
        check_large(opened(tmp_path, write_large))
    check_large(opened(tmp_path))


@pytest.mark.parametrize("damage", ["empty", "cut", "zeros", "last bit"])
@pytest.mark.parametrize("seen", [0, 100])
def test_damage_done_to_an_open_cache_is_seen(tmp_path, damage, seen):
    samples = opened(tmp_path, write_large)
    assert len(samples.x[torch.arange(seen)]) == seen
    DAMAGES[damage](caches(tmp_path)[0] / "x.npy")
    with pytest.warns(UserWarning, match=r"x.npy.*building it again"):
        assert np.array_equal(samples.x[torch.tensor([999, 500])].numpy(), LARGE[[999, 500]])
    check_large(samples)
    check_large(opened(tmp_path))


def test_a_cut_ends_no_process_that_has_verified_all(tmp_path):
    samples = opened(tmp_path, write_large)
    check_large(samples)
    os.truncate(caches(tmp_path)[0] / "x.npy", 4096)
    with pytest.warns(UserWarning, match="x.npy is cut off.*building it again"):
        check_large(samples)


def test_only_blocks_that_are_read_are_verified(tmp_path):
    opened(tmp_path, write_large)
    flip(caches(tmp_path)[0] / "x.npy", 0.9)
    samples = opened(tmp_path)
    assert np.array_equal(samples.x[torch.arange(500)].numpy(), LARGE[:500])
    with (
        pytest.warns(UserWarning, match="block 3 of x.npy"),
        pytest.raises(AssertionError, match="built again"),
    ):
        _ = samples.x[torch.tensor([999, 0])]


def test_each_number_of_the_checksums_is_verified_too(tmp_path):
    opened(tmp_path, write_large)
    path = caches(tmp_path)[0] / "checksums.json"
    content = path.read_text()
    for number in re.finditer(r"\d+", content):
        path.write_text(content[: number.end() - 1] + content[number.end() :])
        with pytest.warns(UserWarning, match="is damaged .*building it again"):
            opened(tmp_path, write_large)
        assert path.read_text() == content


@pytest.mark.parametrize("whole", [True, False])
def test_files_of_another_cache_are_damage(tmp_path, whole):
    opened(tmp_path, write)
    other = tmp_path / "other"
    other.mkdir()
    opened(other, lambda writer: writer.add(X[::-1], Y[::-1], "eve"))
    for name in FILES if whole else ["x.npy"]:
        (caches(tmp_path)[0] / name).write_bytes((caches(other)[0] / name).read_bytes())
    with pytest.warns(UserWarning, match="damaged .*(files of data-|its checksum).*again"):
        check(opened(tmp_path, write))


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("y.npy", np.arange(5), "don't fit one another"),
        ("groups.npy", np.full(6, 2), "don't fit one another"),
        ("test.npy", np.zeros(7, bool), "don't fit one another"),
        ("y.npy", np.arange(6) - 1, "labels -1 to 4, expected 0 to 11"),
        ("y.npy", np.arange(6) + 7, "labels 7 to 12, expected 0 to 11"),
    ],
)
def test_files_with_checksums_that_do_not_fit_are_damage(tmp_path, name, values, message):
    opened(tmp_path, write)
    (path,) = caches(tmp_path)
    np.save(path / name, values)
    checksums = json.loads((path / "checksums.json").read_bytes())
    content = (path / name).read_bytes()
    written = checksums["written"]
    written["columns"][name] = [len(content), zlib.crc32(content)]
    checksums["checksum"] = zlib.crc32(json.dumps(written).encode())
    (path / "checksums.json").write_text(json.dumps(checksums))
    with pytest.warns(UserWarning, match=message):
        check(opened(tmp_path, write))


@given(
    name=st.sampled_from(FILES),
    at=st.floats(0, 1, exclude_max=True),
    other=st.floats(0, 1, exclude_max=True),
    byte=st.integers(0, 255),
    length=st.integers(1, 64),
)
@settings(max_examples=30, deadline=None)
@pytest.mark.filterwarnings("ignore:.* is damaged")
def test_changed_bytes_are_never_read(tmp_path_factory, name, at, other, byte, length):
    folder = tmp_path_factory.mktemp("data")
    opened(folder, write)
    path = caches(folder)[0] / name
    size = path.stat().st_size
    swap(path, int(at * size), int(other * size), length)
    check(opened(folder, write))
    content = bytearray(path.read_bytes())
    content[int(at * size)] = byte
    path.write_bytes(content[: int((at + other) * size)])
    check(opened(folder, write))


def test_whatever_is_in_the_place_of_a_cache_is_replaced(tmp_path):
    opened(tmp_path, write)
    (path,) = caches(tmp_path)
    for make in (Path.touch, os.mkfifo, lambda path: path.symlink_to(path.name)):
        shutil.rmtree(path)
        make(path)
        with pytest.warns(UserWarning, match=f"{path} is damaged .*building it again"):
            check(opened(tmp_path, write))


def test_a_damaged_cache_whose_source_is_gone_or_damaged_is_an_error(tmp_path):
    samples = opened(tmp_path, write_large)
    (path,) = caches(tmp_path)
    flip(path / "x.npy")

    def fail(_writer: SampleWriter) -> None:
        raise ConfigurationError("source.json is damaged")

    with (
        pytest.warns(UserWarning, match="building it again"),
        pytest.raises(
            ConfigurationError,
            match=rf"^{path} is damaged \(block 1 of x.npy.*\) and can't be built again: source",
        ),
    ):
        check_large(opened(tmp_path, fail))
    assert caches(tmp_path) == [path]
    (tmp_path / "source.json").unlink()
    with (
        pytest.warns(UserWarning, match="building it again"),
        pytest.raises(
            ConfigurationError, match=rf"^{path} is damaged .* again: can't read .*source.json: No"
        ),
    ):
        check_large(samples)


def test_a_damaged_cache_whose_source_has_changed_asks_for_another_start(tmp_path):
    samples = opened(tmp_path, write_large)
    flip(caches(tmp_path)[0] / "x.npy")
    (tmp_path / "source.json").write_text("more")
    with (
        pytest.warns(UserWarning, match="building it again"),
        pytest.raises(ConfigurationError, match="have changed; start again"),
    ):
        check_large(samples)


def test_samples_that_come_out_otherwise_ask_for_another_start(tmp_path):
    content = LARGE.copy()
    samples = opened(tmp_path, lambda writer: writer.add(content, np.arange(1000) % 10, "zoe"))
    flip(caches(tmp_path)[0] / "x.npy")
    content[0] += 1
    with (
        pytest.warns(UserWarning, match="building it again"),
        pytest.raises(ConfigurationError, match="not what was opened; start again"),
    ):
        check_large(samples)


def test_labels_that_are_out_of_range_when_they_are_built_are_an_error(tmp_path):
    with pytest.raises(ConfigurationError, match="labels 7 to 12, expected 0 to 11"):
        opened(tmp_path, lambda writer: writer.add(X, np.arange(6) + 7, "zoe"))


def test_samples_can_be_pickled_and_copied(tmp_path):
    samples = cached_samples(tmp_path, "data", [], {}, write, num_labels=10)
    for twin in (pickle.loads(pickle.dumps(samples)), copy.deepcopy(samples)):
        check(twin)
        flip(next(tmp_path.glob("data-*/x.npy")), 0.9)
        with pytest.warns(UserWarning, match="building it again"):
            check(cached_samples(tmp_path, "data", [], {}, write, num_labels=10))


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


def test_of_processes_that_find_damage_one_builds_and_the_others_wait(tmp_path):
    opened(tmp_path, write_large)

    def build(writer: SampleWriter) -> None:
        with (tmp_path / "builds").open("a") as file:
            file.write("built\n")
        time.sleep(0.3)
        write_large(writer)

    def work() -> None:
        samples = opened(tmp_path, build)
        (tmp_path / str(os.getpid())).touch()
        while not (tmp_path / "damaged").exists():
            time.sleep(0.01)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check_large(samples)

    processes = [start(work) for _ in range(3)]
    while not all((tmp_path / str(process.pid)).exists() for process in processes):
        time.sleep(0.01)
    flip(caches(tmp_path)[0] / "x.npy")
    (tmp_path / "damaged").touch()
    for process in processes:
        finish(process)
    assert (tmp_path / "builds").read_text() == "built\n"
    check_large(opened(tmp_path))


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
    opened(tmp_path, lambda writer: writer.add(rows, np.zeros(64, int), "zoe"))

    def work() -> None:
        samples = opened(tmp_path)
        assert samples.x[torch.arange(0, 50, 5)].sum() == 10 * 1024 * 256
        mapped = Path("/proc/self/smaps").read_text().partition("/x.npy\n")[2]
        resident = re.search(r"^Rss: +(\d+) kB", mapped, re.MULTILINE)
        assert 10 <= int(resident[1]) >> 10 < 32  # MiB, of 64

    finish(start(work))
