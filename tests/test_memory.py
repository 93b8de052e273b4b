from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from pflight.runs.memory import ClientMemory, MappedMemory

Make = Callable[[], ClientMemory]


@pytest.fixture(params=[ClientMemory, MappedMemory], ids=["ram", "disk"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    def make() -> ClientMemory:
        memory = request.param()
        memory.open(str(tmp_path))
        return memory

    return make


def states(*rows: float) -> TensorDict:
    return TensorDict({"w": torch.tensor(rows).view(-1, 1)}, [len(rows)])


def ids(*clients: int) -> Tensor:
    return torch.tensor(clients)


def test_what_was_never_written_reads_as_its_default(make: Make) -> None:
    memory = make()
    memory.write("a", ids(4, 2), states(40, 20))
    assert memory.read("a", ids(2, 3, 4), states(-2, -3, -4))["w"].flatten().tolist() == [
        20,
        -3,
        40,
    ]
    assert memory.read("b", ids(2), states(-2))["w"].item() == -2
    assert memory.seen("a", ids(2, 3, 4)).tolist() == [True, False, True]
    assert not memory.seen("b", ids(2)).any()


def test_types_do_not_depend_on_who_else_is_read(make: Make) -> None:
    memory, default = make(), TensorDict({"w": torch.zeros(2, 1, dtype=torch.int64)}, [2])
    memory.write("a", ids(1), states(0.5))
    read = memory.read("a", ids(0, 1), default)["w"]
    assert read.dtype == torch.float32
    assert read.flatten().tolist() == [0, 0.5]


def test_the_last_value_counts_and_only_for_its_client(make: Make) -> None:
    memory = make()
    memory.write("a", ids(0, 1), states(1, 2))
    memory.write("a", ids(1), states(3))
    assert memory.read("a", ids(0, 1), states(0, 0))["w"].flatten().tolist() == [1, 3]


def test_values_are_copied_in_and_out(make: Make) -> None:
    memory, value = make(), states(1.0, 2.0)
    memory.write("a", ids(0, 1), value)
    value["w"].zero_()
    memory.read("a", ids(0, 1), states(0, 0))["w"].zero_()
    assert memory.read("a", ids(0, 1), states(0, 0))["w"].flatten().tolist() == [1, 2]


def test_one_row_of_a_large_stack_keeps_no_more_than_itself() -> None:
    memory = ClientMemory()
    memory.write("a", ids(7), TensorDict({"w": torch.zeros(1000, 10)}, [1000])[:1])
    (kept,) = memory.state_dict()["a"].values()
    assert kept["w"].untyped_storage().nbytes() == 40


def test_it_is_saved_as_plain_tensors_and_restored() -> None:
    memory = ClientMemory()
    memory.write("a", ids(0, 5), states(1, 2))
    saved = memory.state_dict()
    assert type(saved["a"][5]["w"]) is Tensor
    other = ClientMemory()
    other.write("old", ids(3), states(9))
    other.load_state_dict(saved)
    assert other.read("a", ids(0, 5), states(0, 0))["w"].flatten().tolist() == [1, 2]
    assert not other.seen("old", ids(3)).any()


def test_a_rank_keeps_the_clients_that_it_owns(make: Make) -> None:
    memory = make()
    memory.write("a", ids(0, 1, 2), states(1, 2, 3))
    other = make()
    other.load_state_dict(memory.state_dict(), clients={0, 2})
    assert other.seen("a", ids(0, 1, 2)).tolist() == [True, False, True]


def test_what_was_saved_does_not_change_when_training_goes_on() -> None:
    memory = ClientMemory()
    memory.write("a", ids(0), states(1))
    saved = memory.state_dict()
    memory.write("a", ids(0, 1), states(2, 3))
    assert saved["a"][0]["w"].item() == 1
    assert list(saved["a"]) == [0]


def test_states_that_were_not_saved_are_replaced_in_place() -> None:
    """Else rows that are freed one by one leave gaps, which take as much memory again."""
    memory = ClientMemory()
    memory.write("a", ids(0), states(1))
    (kept,) = memory._slots["a"].values()
    memory.write("a", ids(0), states(2))
    assert kept["w"].item() == 2
    saved = memory.state_dict()["a"][0]["w"]
    memory.write("a", ids(0), states(3).double())
    assert saved.item() == 2
    read = memory.read("a", ids(0), states(0).double())["w"]
    assert read.item() == 3
    assert read.dtype == torch.float64
