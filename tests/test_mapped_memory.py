"""Client memory on disk is what client memory in RAM is, whenever a run is killed."""

import copy
import errno
import multiprocessing
import os
import random
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import hypothesis.strategies as st
import lightning as L
import numpy as np
import pytest
import torch
import xxhash
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from tensordict import TensorDict
from torch import Tensor

from pflight import Federation
from pflight.callbacks import Local, Reptile
from pflight.errors import ConfigurationError
from pflight.models import ElasticClient
from pflight.runs.checkpoint import AtomicCheckpointIO, read_checkpoint
from pflight.runs.folder import RunFolder
from pflight.runs.memory import MappedMemory
from pflight.runs.memory_files import Row, is_needed
from tests import training_script
from tests.runs import assert_same, dropout_client, quiet_trainer, run, small_data

pytestmark = [
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed from:UserWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* is not empty:UserWarning"),
]


def memory_in(folder: Path) -> MappedMemory:
    memory = MappedMemory()
    memory.open(str(folder))
    return memory


def stack(*values: float) -> TensorDict:
    return TensorDict({"w": torch.tensor(values, dtype=torch.float64)}, [len(values)])


def keep(memory: MappedMemory, **values: float) -> None:
    """Write one number for each client; clients are named ``c0``, ``c1``, ..."""
    clients = torch.tensor([int(name[1:]) for name in values])
    memory.write("a", clients, stack(*values.values()))


def kept(memory: MappedMemory, *clients: int) -> list[float]:
    default = stack(*[-1.0] * len(clients))
    return memory.read("a", torch.tensor(clients), default)["w"].tolist()


def save(memory: MappedMemory, path: Path) -> None:
    checkpoint = {
        "state_dict": {},
        "pytorch-lightning_version": L.__version__,
        "pflight": {"memory": memory.save()},
    }
    AtomicCheckpointIO().save_checkpoint(checkpoint, path)


def load(memory: MappedMemory, path: Path) -> MappedMemory:
    memory.load(read_checkpoint(path)["pflight"]["memory"])
    return memory


def killed_before(suffix: str) -> Callable[[Path, Path], None]:
    """Return an ``os.replace`` that does not come to files with a suffix."""
    replace = os.replace

    def replace_some(source: Path, target: Path) -> None:
        if target.suffix == suffix:
            raise ZeroDivisionError
        replace(source, target)

    return replace_some


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("memory/*/*.rows"))


# Rows


def test_a_row_is_a_client_a_checksum_and_aligned_numbers(tmp_path: Path) -> None:
    memory = memory_in(tmp_path)
    states = {"b": torch.tensor([[7], [8]], dtype=torch.int8), "a": torch.tensor([1.5, 2.5])}
    memory.write("a", torch.tensor([3, 9]), TensorDict(states, [2]))
    (file,) = files(tmp_path)
    raw = file.read_bytes()
    first = np.float32(1.5).tobytes() + bytes(12) + bytes([7]) + bytes(15)
    second = np.float32(2.5).tobytes() + bytes(12) + bytes([8]) + bytes(15)
    assert raw[16:48] == first
    assert raw[64:] == second
    for start, client, state in ((0, 3, first), (48, 9, second)):
        assert np.frombuffer(raw, "<i8", 1, start) == client
        assert raw[start + 8 : start + 16] == xxhash.xxh3_64_digest(state)[::-1]


@pytest.mark.parametrize(
    "value",
    [
        torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)),
        torch.tensor([1.0, -2.0], dtype=torch.bfloat16),
        torch.tensor([[1 + 2j], [3 - 1j]]),
        torch.tensor([2**62, -1]),
        torch.tensor([[True, False, True], [False, False, True]]),
        torch.empty(2, 0, 3),
        torch.arange(12.0).view(2, 2, 3).transpose(1, 2),
        torch.arange(2.0).view(1, 2).t(),
    ],
    ids=["float32", "bfloat16", "complex", "int64", "bool", "empty", "transposed", "column"],
)
def test_any_tensor_comes_back(value: Tensor, tmp_path: Path) -> None:
    memory = memory_in(tmp_path)
    states = TensorDict({"z.first": torch.tensor([3, 4]), "value": value}, [2])
    memory.write("a", torch.tensor([5, 0]), states)
    default = TensorDict({name: torch.zeros_like(leaf) for name, leaf in states.items()}, [2])
    back = memory.read("a", torch.tensor([5, 0]), default)
    assert_same(dict(back.items()), dict(states.items()))


def test_a_number_of_one_client_comes_back(tmp_path: Path) -> None:
    memory = memory_in(tmp_path)
    count = torch.tensor(7).expand(1)  # contiguous, and of stride 0
    memory.write("a", torch.tensor([5]), TensorDict({"count": count}, [1]))
    back = memory.read("a", torch.tensor([5]), TensorDict({"count": torch.zeros_like(count)}, [1]))
    assert back["count"].tolist() == [7]


def test_what_is_read_may_be_changed(tmp_path: Path) -> None:
    memory = memory_in(tmp_path)
    keep(memory, c0=1)
    memory.read("a", torch.tensor([0]), stack(0))["w"].zero_()
    assert kept(memory, 0, 1) == [1, -1]


def test_slots_and_layouts_have_files_of_their_own(tmp_path: Path) -> None:
    memory = memory_in(tmp_path)
    keep(memory, c0=1)
    memory.write("b", torch.tensor([0]), stack(2))
    memory.write("a", torch.tensor([1]), TensorDict({"w": torch.tensor([3.0])}, [1]))
    assert len(files(tmp_path)) == 3
    assert kept(memory, 0, 1) == [1, 3]
    assert memory.read("b", torch.tensor([0]), stack(0))["w"].item() == 2


def test_clients_in_several_files_are_read_together(tmp_path: Path) -> None:
    first = memory_in(tmp_path)
    keep(first, c0=1, c1=2, c2=3)
    save(first, tmp_path / "last.ckpt")
    second = load(memory_in(tmp_path), tmp_path / "last.ckpt")  # its files are its own
    keep(second, c1=4)
    assert len(files(tmp_path)) == 2
    assert kept(second, 2, 3, 1, 0) == [3, -1, 4, 1]


# What is written again, and what is not


def row_bytes(memory: MappedMemory, folder: Path) -> int:
    return sum(file.stat().st_size for file in files(folder)) // 32


def test_without_checkpoints_the_file_does_not_grow(tmp_path: Path) -> None:
    memory = memory_in(tmp_path)
    for value in range(20):
        keep(memory, c0=value, c1=-value)
    assert row_bytes(memory, tmp_path) == 3
    assert kept(memory, 0, 1) == [19, -19]


def test_with_a_checkpoint_a_round_it_holds_two_states_a_client(tmp_path: Path) -> None:
    memory = memory_in(tmp_path)
    for value in range(20):
        keep(memory, c0=value, c1=-value)
        save(memory, tmp_path / "last.ckpt")
    assert row_bytes(memory, tmp_path) == 4
    assert len(list(tmp_path.glob("memory/tables/*"))) == 1


def test_a_kept_checkpoint_keeps_its_rows_until_it_is_removed(tmp_path: Path) -> None:
    memory = memory_in(tmp_path)
    for value in range(6):
        keep(memory, c0=value)
        save(memory, tmp_path / f"{value}.ckpt")
    for value in range(6):
        other = load(MappedMemory(), tmp_path / f"{value}.ckpt")
        assert kept(other, 0) == [value]
    for value in range(5):
        AtomicCheckpointIO().remove_checkpoint(tmp_path / f"{value}.ckpt")
    for value in range(6, 20):
        keep(memory, c0=value)
        save(memory, tmp_path / "5.ckpt")
    assert row_bytes(memory, tmp_path) == 6
    assert len(list(tmp_path.glob("memory/tables/*"))) == 1


def test_rows_of_a_killed_run_are_written_again(tmp_path: Path) -> None:
    memory = memory_in(tmp_path)
    keep(memory, c0=1, c1=2)
    save(memory, tmp_path / "last.ckpt")
    for value in range(5):  # each time killed before a checkpoint
        keep(memory, c0=value, c1=value)
        memory = load(memory_in(tmp_path), tmp_path / "last.ckpt")
        assert kept(memory, 0, 1) == [1, 2]
    assert len(files(tmp_path)) == 1
    assert row_bytes(memory, tmp_path) == 4


def test_a_checkpoint_that_was_renamed_is_kept_from_when_a_run_goes_on_from_it(
    tmp_path: Path,
) -> None:
    memory = memory_in(tmp_path)
    keep(memory, c0=1, c1=2)
    save(memory, tmp_path / "last.ckpt")
    del memory
    renamed = (tmp_path / "last.ckpt").rename(tmp_path / "renamed.ckpt")
    (one, other) = memory_in(tmp_path), memory_in(tmp_path)  # two ranks
    for rank, memory in enumerate((one, other)):
        memory.load(read_checkpoint(renamed)["pflight"]["memory"], clients={rank})
    for value in range(3):
        keep(one, c0=value)
    assert kept(other, 1) == [2]
    assert kept(load(MappedMemory(), renamed), 0, 1) == [1, 2]


def test_what_clients_have_stays_when_its_checkpoint_is_removed(tmp_path: Path) -> None:
    memory = memory_in(tmp_path)
    keep(memory, c0=1, c1=2)
    save(memory, tmp_path / "last.ckpt")
    AtomicCheckpointIO().remove_checkpoint(tmp_path / "last.ckpt")
    keep(memory, c1=3)
    assert kept(memory, 0, 1) == [1, 3]


def test_what_is_loaded_stays_even_if_it_was_free_before(tmp_path: Path) -> None:
    memory = memory_in(tmp_path)
    keep(memory, c0=1, c1=2, c2=3)
    save(memory, tmp_path / "last.ckpt")
    renamed = (tmp_path / "last.ckpt").rename(tmp_path / "renamed.ckpt")
    keep(memory, c0=4, c1=5)
    save(memory, tmp_path / "last.ckpt")
    keep(memory, c2=6)  # takes the row that client 0 had; that of client 1 is free
    memory.load(read_checkpoint(renamed)["pflight"]["memory"], clients={1})
    keep(memory, c2=7)
    assert kept(memory, 0, 1, 2) == [-1, 2, 7]


def test_a_checkpoint_whose_successor_was_never_complete_keeps_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = memory_in(tmp_path)
    keep(memory, c0=1)
    save(memory, tmp_path / "best.ckpt")
    keep(memory, c0=2)
    save(memory, tmp_path / "last.ckpt")
    keep(memory, c0=3)
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", killed_before(".ckpt"))
        with pytest.raises(ZeroDivisionError):
            save(memory, tmp_path / "last.ckpt")
    del memory
    memory = load(memory_in(tmp_path), tmp_path / "best.ckpt")
    for value in range(4, 7):
        keep(memory, c0=value)
    assert kept(load(MappedMemory(), tmp_path / "last.ckpt"), 0) == [2]
    assert kept(load(MappedMemory(), tmp_path / "best.ckpt"), 0) == [1]


def test_memory_that_is_in_use_is_left_to_its_owner(tmp_path: Path) -> None:
    first = memory_in(tmp_path)
    keep(first, c0=1)
    save(first, tmp_path / "last.ckpt")
    second = load(memory_in(tmp_path), tmp_path / "last.ckpt")
    keep(second, c0=2)
    keep(first, c0=3)
    third = memory_in(tmp_path)
    keep(third, c0=4)
    assert [kept(memory, 0) for memory in (first, second, third)] == [[3], [2], [4]]
    assert len(files(tmp_path)) == 3


def test_files_with_a_second_name_are_not_written_to(tmp_path: Path) -> None:
    before = tmp_path / "run"
    memory = memory_in(before)
    keep(memory, c0=1)
    save(memory, before / "last.ckpt")
    after = tmp_path / "copy"
    shutil.copytree(before, after, copy_function=os.link)
    keep(memory, c0=2)  # while it goes on in the first folder
    save(memory, before / "last.ckpt")
    keep(memory, c0=3)
    assert kept(load(MappedMemory(), after / "last.ckpt"), 0) == [1]
    copied = load(memory_in(after), after / "last.ckpt")
    for value in (4, 5, 6):
        keep(copied, c0=value)
        save(copied, after / "last.ckpt")
    assert kept(load(MappedMemory(), before / "last.ckpt"), 0) == [2]
    assert kept(load(MappedMemory(), after / "last.ckpt"), 0) == [6]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", flock)
    first = memory_in(tmp_path)
    keep(first, c0=1)
    save(first, tmp_path / "last.ckpt")
    second = load(memory_in(tmp_path), tmp_path / "last.ckpt")
    keep(second, c0=2)
    assert [kept(memory, 0) for memory in (first, second)] == [[1], [2]]
    assert len(files(tmp_path)) == 2


def test_what_nobody_needs_is_removed_by_the_next_run(tmp_path: Path) -> None:
    for path in ("kept.ckpt", "removed.ckpt", None):
        memory = memory_in(tmp_path)
        keep(memory, c0=1)
        if path:
            save(memory, tmp_path / path)
        del memory
    (tmp_path / "removed.ckpt").unlink()
    keep(memory := memory_in(tmp_path), c0=2)
    assert len(files(tmp_path)) == 2
    assert len(list(tmp_path.glob("memory/tables/*"))) == 1
    assert kept(load(memory, tmp_path / "kept.ckpt"), 0) == [1]


def test_a_copy_writes_elsewhere(tmp_path: Path) -> None:
    memory = memory_in(tmp_path)
    keep(memory, c0=1)
    other = copy.deepcopy(memory)
    keep(other, c0=2)
    assert kept(memory, 0) == [1]
    assert kept(other, 0) == [2]


class KillsAndRestores(RuleBasedStateMachine):
    """Whatever is written, saved, removed and killed: a checkpoint's states are what they were."""

    clients = st.sets(st.integers(0, 4), min_size=1)
    paths = st.sampled_from(["last.ckpt", "checkpoints/best.ckpt", "epoch=0.ckpt"])

    def __init__(self) -> None:
        super().__init__()
        self.temporary = TemporaryDirectory()
        self.folder = Path(self.temporary.name)
        self.memory = memory_in(self.folder)
        self.model: dict[int, float] = {}
        self.saved: dict[str, dict[int, float]] = {}
        self.value = 0.0

    def teardown(self) -> None:
        self.memory = MappedMemory()
        self.temporary.cleanup()

    @rule(clients=clients)
    def write(self, clients: set[int]) -> None:
        for client in clients:
            self.value += 1
            self.model[client] = self.value
        keep(self.memory, **{f"c{client}": self.model[client] for client in clients})

    @rule(path=paths)
    def save(self, path: str) -> None:
        save(self.memory, self.folder / path)
        self.saved[path] = dict(self.model)

    @rule(path=paths)
    def save_and_be_killed_before_the_file_is_replaced(self, path: str) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("os.replace", killed_before(".ckpt"))
            with pytest.raises(ZeroDivisionError):
                save(self.memory, self.folder / path)
        self.kill()

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def kill_and_restore(self, data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(sorted(self.saved)))
        self.kill()
        load(self.memory, self.folder / path)
        self.model = dict(self.saved[path])

    @rule()
    def kill(self) -> None:
        self.memory = memory_in(self.folder)
        self.model = {}

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(sorted(self.saved)))
        AtomicCheckpointIO().remove_checkpoint(self.folder / path)
        del self.saved[path]

    @rule()
    def move(self) -> None:
        self.memory = MappedMemory()
        moved = self.folder.with_name(self.folder.name + ".1")
        shutil.move(self.folder, moved)
        shutil.move(moved, self.folder)
        self.kill()

    @invariant()
    def every_state_is_there(self) -> None:
        clients = range(5)
        assert kept(self.memory, *clients) == [self.model.get(i, -1.0) for i in clients]
        for path, states in self.saved.items():
            memory = load(MappedMemory(), self.folder / path)
            assert kept(memory, *clients) == [states.get(i, -1.0) for i in clients]

    @invariant()
    def little_is_kept_that_nobody_needs(self) -> None:
        assert sum(file.stat().st_size for file in files(self.folder)) // 32 <= 5 * 8


KillsAndRestores.TestCase.settings = settings(
    max_examples=60, stateful_step_count=20, deadline=None
)
TestKillsAndRestores = KillsAndRestores.TestCase


# What can go wrong


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    memory = memory_in(tmp_path)
    keep(memory, c0=1, c7=2)
    path = tmp_path / "checkpoints" / "last.ckpt"
    save(memory, path)
    return path


def test_a_row_that_was_cut_off(saved: Path) -> None:
    (file,) = files(saved.parents[1])
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - 1)
    with pytest.raises(ConfigurationError, match=r"client 7's memory is not in .*/memory/.*rows"):
        load(MappedMemory(), saved)


def test_a_row_that_was_overwritten_as_its_checkpoint_was_renamed(saved: Path) -> None:
    renamed = saved.rename(saved.with_name("renamed.ckpt"))
    reader = load(MappedMemory(), renamed)
    memory = load(memory_in(saved.parents[1]), renamed)
    for value in (3, 4):
        keep(memory, c0=value)
        save(memory, saved)
    with pytest.raises(ConfigurationError, match="client 0's memory is not in"):
        load(MappedMemory(), renamed)
    with pytest.raises(ConfigurationError, match="client 0's memory is not in"):
        kept(reader, 0)
    assert kept(reader, 7) == [2]


@pytest.mark.parametrize("damage", ["deleted", "a folder", "cut off"])
def test_a_file_that_is_lost_while_a_run_goes_on(saved: Path, damage: str) -> None:
    memory = load(MappedMemory(), saved)
    (file,) = files(saved.parents[1])
    if damage == "cut off":
        with file.open("r+b") as opened:
            opened.truncate(file.stat().st_size - 1)
    else:
        file.unlink()
    if damage == "a folder":
        file.mkdir()
    lost = 7 if damage == "cut off" else 0
    with pytest.raises(ConfigurationError, match=f"client {lost}'s memory is not in"):
        kept(memory, 0, 7)


def test_a_damaged_row_is_noticed_when_it_is_read(saved: Path) -> None:
    (file,) = files(saved.parents[1])
    raw = bytearray(file.read_bytes())
    raw[16] ^= 1
    file.write_bytes(raw)
    memory = load(MappedMemory(), saved)
    assert kept(memory, 7) == [2]
    with pytest.raises(ConfigurationError, match=r"client 0's memory .* overwritten or damaged"):
        kept(memory, 0)


def test_numbers_that_changed_places_are_noticed(tmp_path: Path) -> None:
    memory = memory_in(tmp_path)
    numbers = torch.arange(8, dtype=torch.float64).view(1, 8)
    memory.write("a", torch.tensor([3]), TensorDict({"w": numbers}, [1]))
    (file,) = files(tmp_path)
    raw = file.read_bytes()
    file.write_bytes(raw[:16] + raw[24:32] + raw[16:24] + raw[32:])
    with pytest.raises(ConfigurationError, match=r"client 3's memory .* overwritten or damaged"):
        memory.read("a", torch.tensor([3]), TensorDict({"w": 0 * numbers}, [1]))


@pytest.mark.parametrize("suffix", [".json", ".next"])
@pytest.mark.parametrize("damage", ["no text", "another row", "cut off", "empty", "a list"])
def test_a_table_that_is_damaged(saved: Path, damage: str, suffix: str) -> None:
    folder = saved.parents[1]
    (table,) = folder.glob("memory/tables/*")
    content = {
        "no text": b"\xff\xfe" + table.read_bytes(),
        "another row": table.read_bytes().replace(b"[0, 1]", b"[0, 2]"),
        "cut off": table.read_bytes()[:-1],
        "empty": b"",
        "a list": b"[]",
    }[damage]
    assert content != table.read_bytes()
    table.unlink()
    table = table.with_name(f"damaged{suffix}")
    table.write_bytes(content)
    for use in (lambda: keep(memory_in(folder), c0=3), lambda: is_needed(folder / "memory")):
        with pytest.raises(ConfigurationError) as error:
            use()
        assert str(error.value).startswith(f"{table} is damaged: it lists the client memory")
        assert "\n" not in str(error.value)
    table.unlink()
    memory = load(memory_in(folder), saved)
    keep(memory, c7=3)
    assert kept(load(MappedMemory(), saved), 0, 7) == [1, 2]


def test_a_table_that_was_never_completed(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = load(memory_in(saved.parents[1]), saved)
    keep(memory, c0=3)
    tables = saved.parents[1] / "memory" / "tables"
    (table,) = tables.glob("*")
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", killed_before(".next"))
        with pytest.raises(ZeroDivisionError):
            save(memory, saved)
    assert [*tables.glob("*")] == [table]
    (tables / f".{table.stem}.next.partial").write_text("{")  # of a process that was killed
    memory = load(memory_in(saved.parents[1]), saved)
    assert kept(memory, 0, 7) == [1, 2]
    save(memory, saved)
    assert len(list(tables.glob("*"))) == 1


def test_a_folder_that_is_gone(saved: Path) -> None:
    shutil.rmtree(saved.parents[1] / "memory")
    with pytest.raises(ConfigurationError, match=r"last\.ckpt needs .* not in .*/memory") as error:
        read_checkpoint(saved)
    assert "\n" not in str(error.value)


def test_a_full_disk(tmp_path: Path) -> None:
    memory = memory_in(tmp_path)
    keep(memory, c0=1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40, before[1]))
    try:
        with pytest.raises(ConfigurationError, match=r"can't write .* memory in .*: File"):
            keep(memory, c0=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert kept(memory, 0) == [1]
    keep(memory, c0=3)
    assert kept(memory, 0) == [3]


def test_a_folder_that_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"default_root_dir on a file system, got s3://bucket"
    ):
        MappedMemory().open("s3://bucket")
    (tmp_path / "memory").write_text("mine")
    with pytest.raises(ConfigurationError, match="can't write the client memory"):
        keep(memory_in(tmp_path), c0=1)


# Federations


def data() -> Any:
    return small_data(cohort_size=3, dropout=0.2)


def local(rounds: int, folder: Path, *callbacks: L.Callback, **options: Any) -> Federation:
    options = {"client_memory": "disk", "finetune_epochs": 1, **options}
    trainer = {"default_root_dir": folder, **options.pop("trainer", {})}
    return run(dropout_client(), data(), Local(), rounds, *callbacks, trainer=trainer, **options)


def every_round(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder / "checkpoints", "{epoch}", save_top_k=-1)


def assert_equal_runs(one: Federation, other: Federation) -> None:
    for client in range(6):
        assert_same(one.client_state(client), other.client_state(client))
    assert [entry.metrics for entry in one.history] == [entry.metrics for entry in other.history]


@pytest.fixture(scope="module")
def in_ram(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    folder = tmp_path_factory.mktemp("ram")
    return local(5, folder, every_round(folder), client_memory="ram")


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    folder = tmp_path_factory.mktemp("disk")
    return local(5, folder, every_round(folder))


def checkpoint(federation: Federation, epoch: int) -> Path:
    return Path(federation.trainer.default_root_dir, "checkpoints", f"epoch={epoch}.ckpt")


def test_disk_equals_ram_bit_for_bit(in_ram: Federation, on_disk: Federation) -> None:
    assert_equal_runs(in_ram, on_disk)
    assert isinstance(on_disk.clients.memory, MappedMemory)
    one, other = (run.trainer.predict(run, datamodule=data()) for run in (in_ram, on_disk))
    for left, right in zip(one, other, strict=True):
        assert torch.equal(left.logits, right.logits)


def test_what_client_modules_remember_is_on_disk_too(tmp_path: Path) -> None:
    one, other = (
        run(
            dropout_client(ElasticClient, alpha=1.0),
            data(),
            Reptile(),
            4,
            trainer={"default_root_dir": tmp_path},
            client_memory=kind,
        )
        for kind in ("ram", "disk")
    )
    assert_equal_runs(one, other)
    (slot,) = other.clients.memory.state_dict().values()
    assert all(isinstance(entry, Row) for entry in slot.values())


@pytest.mark.parametrize("epoch", [0, 2, 4])
def test_a_resumed_run_is_one_that_was_not_stopped(
    epoch: int, in_ram: Federation, on_disk: Federation
) -> None:
    folder = Path(on_disk.trainer.default_root_dir)
    resumed = local(5, folder, ckpt_path=checkpoint(on_disk, epoch))
    for client in range(6):
        assert_same(resumed.client_state(client), in_ram.client_state(client))


def test_a_checkpoint_holds_a_table_instead_of_states(
    in_ram: Federation, on_disk: Federation
) -> None:
    saved = read_checkpoint(checkpoint(on_disk, 4))
    assert saved["hyper_parameters"]["client_memory"] == "disk"
    (table,) = saved["pflight"]["memory"]["rows"].values()
    assert table.shape == (len(in_ram.clients.memory.state_dict()["private"]), 4)


@pytest.mark.parametrize("kinds", [("ram", "disk"), ("disk", "ram")])
def test_a_run_changes_from_one_to_the_other(
    kinds: tuple[str, str], in_ram: Federation, tmp_path: Path
) -> None:
    before, after = kinds
    local(2, tmp_path, every_round(tmp_path), client_memory=before)
    path = tmp_path / "checkpoints" / "epoch=1.ckpt"
    middle = local(3, tmp_path, every_round(tmp_path), client_memory=after, ckpt_path=path)
    resumed = local(5, tmp_path, client_memory=after, ckpt_path=checkpoint(middle, 2))
    for client in range(6):
        assert_same(resumed.client_state(client), in_ram.client_state(client))
    assert ("folder" in read_checkpoint(checkpoint(middle, 2))["pflight"]["memory"]) == (
        after == "disk"
    )


def test_another_folder_gets_all_that_the_run_needs(in_ram: Federation, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    local(2, first, every_round(first))
    path = first / "checkpoints" / "epoch=1.ckpt"
    local(3, second, every_round(second), ckpt_path=path)
    shutil.rmtree(first)
    path = second / "checkpoints" / "epoch=2.ckpt"
    resumed = local(5, second, ckpt_path=path)
    for client in range(6):
        assert_same(resumed.client_state(client), in_ram.client_state(client))


def test_a_run_that_was_moved(in_ram: Federation, tmp_path: Path) -> None:
    before, after = tmp_path / "run", tmp_path / "run.1"
    local(2, before, every_round(before))
    shutil.move(before, after)
    local(1, before, every_round(before), seed=1)  # takes its place
    resumed = local(5, after, ckpt_path=after / "checkpoints" / "epoch=1.ckpt")
    for client in range(6):
        assert_same(resumed.client_state(client), in_ram.client_state(client))


def test_it_is_loaded_without_data(tmp_path: Path) -> None:
    trained = local(3, tmp_path, finetune_epochs=0)
    trained.trainer.save_checkpoint(tmp_path.parent / f"{tmp_path.name}-elsewhere.ckpt")
    for kind in ("disk", "ram"):
        loaded = Federation.load_from_checkpoint(
            tmp_path.parent / f"{tmp_path.name}-elsewhere.ckpt",
            client=dropout_client(),
            callback=Local(),
            client_memory=kind,
        )
        for client in range(6):
            assert_same(loaded.client_state(client), trained.client_state(client))


def test_runs_one_after_the_other_in_one_folder(in_ram: Federation, tmp_path: Path) -> None:
    one, two = local(5, tmp_path), local(5, tmp_path, seed=1)
    assert_equal_runs(one, in_ram)
    assert_equal_runs(two, local(5, tmp_path, seed=1, client_memory="ram"))


def test_a_run_goes_on_after_it_ended(in_ram: Federation, tmp_path: Path) -> None:
    federation = local(2, tmp_path, every_round(tmp_path))
    trainer = quiet_trainer(5, federation.callback, default_root_dir=tmp_path / "other")
    path = tmp_path / "checkpoints" / "epoch=1.ckpt"
    trainer.fit(federation, datamodule=data(), ckpt_path=path)
    for client in range(6):
        assert_same(federation.client_state(client), in_ram.client_state(client))


def test_bad_options(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="client_memory must be 'ram' or 'disk'"):
        local(1, tmp_path, client_memory="tape")

    class Own(TorchCheckpointIO):
        pass

    with pytest.raises(ConfigurationError, match="the Trainer has Own: leave that plugin out"):
        local(1, tmp_path, trainer={"plugins": Own()})


@pytest.fixture(scope="module")
def processes() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.training_script"])
    return context


@pytest.mark.long
def test_a_run_killed_again_and_again_is_one_that_was_not(processes: Any, tmp_path: Path) -> None:
    rounds, chance, kills = 30, random.Random(1), 0
    last, arguments = tmp_path / "last.ckpt", ("local on disk", str(rounds), str(tmp_path))
    while not (tmp_path / "result.pt").exists():
        process = processes.Process(target=training_script.main, args=arguments)
        process.start()
        before = last.stat().st_mtime_ns if last.exists() else 0
        while process.is_alive() and not (last.exists() and last.stat().st_mtime_ns > before):
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.15))
        if kills < 3:
            process.kill()
        process.join()
        kills += process.exitcode == -9
        assert process.exitcode in (0, -9)
    assert kills >= 2
    result = torch.load(tmp_path / "result.pt", weights_only=True)
    assert result["resumed_from"] > 0
    expected = training_script.summary(training_script.fit("local", rounds))
    assert_same(result["weights"], expected["weights"])
    assert result["clients"] == expected["clients"]
    assert len(files(tmp_path)) <= kills


# The folder of a run


class TestRunFolder:
    def test_the_memory_moves_with_the_run(self, in_ram: Federation, tmp_path: Path) -> None:
        folder = tmp_path / "run"
        local(2, folder, every_round(folder))
        assert RunFolder(folder).set_aside() == tmp_path / "run.1"
        assert not folder.joinpath("memory").exists()
        aside = tmp_path / "run.1"
        resumed = local(5, aside, ckpt_path=aside / "checkpoints" / "epoch=1.ckpt")
        for client in range(6):
            assert_same(resumed.client_state(client), in_ram.client_state(client))

    def test_memory_of_a_start_up_is_removed(self, tmp_path: Path) -> None:
        keep(memory_in(tmp_path), c0=1)
        (tmp_path / "memory" / "notes").mkdir()
        folder = RunFolder(tmp_path)
        assert not folder.has_run()
        assert folder.set_aside() is None
        assert [path.name for path in (tmp_path / "memory").iterdir()] == ["notes"]
        (tmp_path / "memory" / "notes").rmdir()
        keep(memory_in(tmp_path), c0=1)
        folder.set_aside()
        assert not (tmp_path / "memory").exists()

    def test_memory_that_a_checkpoint_elsewhere_needs_is_a_run(self, tmp_path: Path) -> None:
        memory = memory_in(tmp_path / "run")
        keep(memory, c0=1)
        save(memory, tmp_path / "mine" / "it.ckpt")
        folder = RunFolder(tmp_path / "run")
        assert folder.has_run()
        assert folder.set_aside() == tmp_path / "run.1"
        failed = memory_in(tmp_path / "run")
        keep(failed, c0=2)
        folder.put_back()
        assert kept(load(MappedMemory(), tmp_path / "mine" / "it.ckpt"), 0) == [1]
