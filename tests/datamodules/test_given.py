"""Partitions given by files, as other libraries have them, and pickles that become JSON."""

from __future__ import annotations

import json
import os
import pickle
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch

from pflight.__main__ import main
from pflight.datamodules import IID, Digits, Given, PartitionedDataModule, Samples
from pflight.datamodules.partitions import index_pickles
from pflight.datamodules.partitions.partition import Partition
from pflight.errors import ConfigurationError

ONE, TWO = [*range(0, 60, 2)], [*range(1, 40, 2)]
SPLITS = "train", "val", "test"
FL_BENCH = {
    "separation": {"train": [0, 1], "val": [0, 1], "test": [0, 1], "total": 2},
    "data_indices": [
        {"train": np.arange(40), "val": np.array([], np.int64), "test": np.arange(40, 50)},
        {"train": np.arange(60, 80, dtype=np.int32), "val": [], "test": np.arange(90, 95)},
    ],
}
"""What FL-bench's `partition.pkl` holds."""


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def saved(content, name: str = "partition.json") -> str:
    Path(name).write_text(json.dumps(content))
    return name


def dealt(path: str, num_clients: int = 2, **options) -> Digits:
    data = Digits(partition=Given(path), num_clients=num_clients, **options)
    data.setup()
    return data


def held(data: PartitionedDataModule, client: int) -> list[list[int]]:
    return [sorted(data._indices[split][client].tolist()) for split in SPLITS]


class TestFormats:
    @pytest.mark.parametrize(
        "content",
        [
            [ONE, TWO],
            {"0": ONE, "1": TWO},
            {"1": TWO, "0": ONE},
            {"data_indices": [ONE, TWO], "separation": None},
        ],
    )
    def test_json_has_lists_of_positions(self, content):
        data = dealt(saved(content))
        assert [sorted(chain(*held(data, client))) for client in (0, 1)] == [ONE, TWO]
        assert data.num_samples("test").tolist() == [6, 4]

    def test_npz_has_an_array_for_each_client(self):
        np.savez("partition.npz", **{"0": np.array(ONE), "1": np.array(TWO)})
        np.savez_compressed("small.npz", **{"1": np.array(TWO), "0": np.array(ONE)})
        for path in ("partition.npz", "small.npz"):
            data = dealt(path)
            assert [sorted(chain(*held(data, client))) for client in (0, 1)] == [ONE, TWO]

    def test_splits_are_kept(self):
        parts = [{"train": [5, 1], "val": [2], "test": [7, 9]}, {"train": [3], "test": [4]}]
        data = dealt(saved(parts))
        assert held(data, 0) == [[1, 5], [2], [7, 9]]
        assert held(data, 1) == [[3], [], [4]]

    def test_training_samples_validate_if_no_others_do(self):
        data = dealt(saved(index_pickles.plain(FL_BENCH)), val_fraction=0.25)
        train, val, test = held(data, 0)
        assert sorted(train + val) == [*range(40)]
        assert len(val) == 10
        assert test == [*range(40, 50)]

    def test_clients_of_another_users_split_are_newcomers(self):
        parts = [{"train": ONE}, {"train": [], "val": [], "test": TWO}]
        data = dealt(saved(parts))
        assert data.new_clients.tolist() == [1]
        assert held(data, 1) == [[], [], TWO]

    def test_the_command_line_takes_it(self, capsys):
        path = saved([ONE, TWO])
        configs = "--config=configs/data/digits.yaml", "--config=configs/algorithm/local.yaml"
        given = "--data.partition=Given", f"--data.partition.path={path}"
        with pytest.raises(SystemExit) as exit_:
            main(["fit", *configs, *given, "--print_config"])
        assert exit_.value.code == 0
        assert "class_path: pflight.datamodules.Given" in capsys.readouterr().out


class WithTests(PartitionedDataModule):
    """Sixty samples; the last twenty are for testing."""

    def __init__(self, partition: Partition, **options):
        options = {"official_test": True, "num_clients": 2, **options}
        super().__init__(num_classes=2, partition=partition, **options)

    def load(self) -> Samples:
        x = np.arange(60, dtype=np.float32)[:, None]
        return Samples(torch.from_numpy(x), torch.arange(60) % 2, test=np.arange(60) >= 40)


class TestOfficialTest:
    def test_positions_count_in_the_training_samples(self):
        path = saved([[*range(20)], [*range(20, 40)]])  # as NIID-Bench's net_dataidx_map
        data = WithTests(Given(path))
        data.setup()
        train, val, test = held(data, 0)
        assert sorted(train + val) == [*range(20)]
        assert len(test) == 10
        assert min(test) >= 40

    @pytest.mark.parametrize("position", [40, -1])
    def test_a_position_among_the_test_samples_is_refused(self, position):
        data = WithTests(Given(saved([[0, 1], [2, position]])))
        said = f"^partition.json gives client 1 sample {position}, of 40 training samples$"
        with pytest.raises(ConfigurationError, match=said):
            data.setup()

    def test_an_own_partition_is_checked_too(self):
        class Own(IID):
            def split(self, labels, num_clients, seed, groups=None):
                return [np.array([0, 1]), np.array([1, 2])]

        with pytest.raises(ConfigurationError, match=r"^Own gives sample 1 to client 0 and to cl"):
            WithTests(Own()).setup()

    def test_splits_of_the_file_exclude_it(self):
        data = WithTests(Given(saved([{"train": [0]}, {"train": [1]}])))
        with pytest.raises(ConfigurationError, match="official_test must be false"):
            data.setup()


class TestBadFiles:
    @pytest.mark.parametrize(
        ("content", "said"),
        [
            ([[1, 2], [2]], "gives sample 2 to client 0 and to client 1"),
            ([[1, 1], [2]], "gives client 0 a sample twice"),
            ([[1, 5000], [2]], "gives client 0 sample 5000, of 1797 samples"),
            ([{"train": [1], "test": [1]}, {"train": [2]}], "gives client 0 a sample twice"),
            ([{"train": [1]}, {"test": [1]}], "gives sample 1 to client 0 and to client 1"),
            ([[1], [2], [3]], "gives 3 clients, not 2: set num_clients to 3"),
            ([[1.5], [2]], ": client 0 has no list of whole numbers"),
            ([["a"], [2]], ": client 0 has no list of whole numbers"),
            ([[1], [True]], ": client 1 has no list of whole numbers"),
            ([[1], [2, True]], ": client 1 has no list of whole numbers"),
            ([{"train": [True, 2]}, {}], ": client 0, train has no list of whole numbers"),
            ([[1], [[2], [3, 4]]], ": client 1 has no list of whole numbers"),
            ([[1], 2], ": client 1 has no list of whole numbers"),
            ([{"train": [1]}, {"train": "all"}], ": client 1, train has no list of whole numbers"),
            ([{"train": [1]}, [2]], ": some clients have splits, and others have none"),
            ([{"train": [1]}, {"tests": [2]}], ": client 1 has tests; splits are train, val and"),
            ([{"train": [1]}, {}], ": client 1 has nothing; splits are"),
            ({"0": [1], "2": [2]}, ": clients must be numbered from 0, without gaps; it has 0, 2"),
            ({"a": [1], "b": [2]}, ": clients must be numbered from 0, without gaps; it has a, b"),
            ([], " has no lists of positions, one for each client"),
            ("0, 1", " has no lists of positions"),
            (7, " has no lists of positions"),
        ],
    )
    def test_other_content_is_one_line(self, content, said):
        path = saved(content)
        with pytest.raises(ConfigurationError) as error:
            dealt(path)
        assert str(error.value).startswith(path + ("" if said[0] == ":" else " ") + said.strip())
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ('{"0": [0, 1], "1": [4], "0": [2, 3]}', "client 0"),
            ('[{"train": [0], "train": [1]}, {"test": [2]}]', "train"),
        ],
    )
    def test_a_key_is_there_once(self, text, said):
        Path("partition.json").write_text(text)
        with pytest.raises(ConfigurationError, match=rf"^partition\.json has {said} twice$"):
            dealt("partition.json")

    @pytest.mark.parametrize("text", ["", "[[1], [2]", "[" * 100_000, "\x00\x01", "PK\x03\x04"])
    def test_damaged_files_are_named(self, text):
        Path("partition.json").write_text(text)
        with pytest.raises(ConfigurationError, match=r"^partition\.json is damaged: "):
            dealt("partition.json")

    def test_files_that_are_not_there_are_named(self):
        with pytest.raises(ConfigurationError, match=r"^can't read nowhere\.json: No such file"):
            dealt("nowhere.json")
        with pytest.raises(ConfigurationError, match=r"^can't read \.: Is a directory"):
            dealt(".")

    def test_samples_of_pflib_are_refused(self):
        np.savez_compressed("0.npz", data={"x": np.zeros((2, 3)), "y": np.zeros(2)})
        with pytest.raises(ConfigurationError, match=r"^0\.npz holds pickled samples or lists"):
            dealt("0.npz")

    def test_a_pickle_is_not_loaded(self):
        names = {"partition.pkl": "partition", "partition": "partition", "a.json": "a.indices"}
        for name, out in names.items():
            Path(name).write_bytes(pickle.dumps([Harmful(), [1]]))
            with pytest.raises(ConfigurationError) as error:
                dealt(name)
            assert f"`pflight prepare partition {name} --out {out}.json`" in str(error.value)
        assert not Path("harmed").exists()


class Harmful:
    """A pickle of this class runs a command when it is loaded."""

    def __reduce__(self):
        return os.mkdir, ("harmed",)


class TestPickles:
    @pytest.mark.parametrize("protocol", range(3, pickle.HIGHEST_PROTOCOL + 1))
    def test_fl_benchs_partition_becomes_json(self, protocol, capsys):
        Path("partition.pkl").write_bytes(pickle.dumps(FL_BENCH, protocol))
        index_pickles.main("partition.pkl")
        content = json.loads(capsys.readouterr().out)
        saved(content)
        assert content["data_indices"][1]["test"] == [*range(90, 95)]
        assert held(dealt("partition.json", val_fraction=0.0), 1)[0] == [*range(60, 80)]

    def test_maps_of_indices_become_json(self, capsys):
        Path("map.pkl").write_bytes(pickle.dumps({0: np.array(ONE), 1: [np.int64(1), 3]}))
        index_pickles.main("map.pkl")
        assert json.loads(capsys.readouterr().out) == {"0": ONE, "1": [1, 3]}

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (pickle.dumps([Harmful()]), r"it uses (posix|nt)\.mkdir, which is not for index lists"),
            (pickle.dumps(Path("x")), "it uses pathlib"),
            (pickle.dumps([b"abc"], 4), "it holds a bytes"),
            (pickle.dumps({0: [1], "0": [2]}), "a key is there as a number and as text"),
            (b"\x80\x04garbage", "is no pickle of index lists: "),
            (b"", "is no pickle of index lists: "),
        ],
    )
    def test_other_pickles_are_refused(self, content, said):
        Path("partition.pkl").write_bytes(content)
        with pytest.raises(SystemExit, match=said):
            index_pickles.main("partition.pkl")
        assert not Path("harmed").exists()

    def test_the_command_reads_it_in_a_process_of_its_own(self, capfd):
        Path("partition.pkl").write_bytes(pickle.dumps(FL_BENCH))
        main(["prepare", "partition", "partition.pkl", "--out", "partition.json"])
        assert capfd.readouterr().out.endswith(
            "wrote partition.json: use it by --data.partition Given "
            "--data.partition.path partition.json --data.num_clients 2\n"
        )
        assert held(dealt("partition.json", val_fraction=0.0), 1)[0] == [*range(60, 80)]

    @pytest.mark.parametrize(
        ("content", "out", "said"),
        [
            ([Harmful()], "new.json", "is no pickle of index lists: it uses "),
            (7, "new.json", "has no lists of positions"),
            ([[1.5], [2]], "new.json", ": client 0 has no list of whole numbers"),
            ([[1], [2, True]], "new.json", ": client 1 has no list of whole numbers"),
            ({0: [1], 2: [2]}, "new.json", ": clients must be numbered from 0, without gaps"),
            ([[1, 2], [2]], "new.json", "gives sample 2 to client 0 and to client 1"),
            ([[1], [-1, 1 << 60]], "new.json", "gives client 1 sample -1"),
            (FL_BENCH, "there.json", "there.json exists: remove it, or give another --out"),
            (FL_BENCH, "in.pkl", "in.pkl exists: remove it, or give another --out"),
            (FL_BENCH, "nowhere/new.json", "can't write nowhere/new.json: No such file"),
        ],
    )
    def test_the_command_writes_what_the_partition_takes(self, content, out, said, capfd):
        given = pickle.dumps(content)
        Path("in.pkl").write_bytes(given)
        Path("there.json").write_text("mine")
        with pytest.raises(SystemExit) as exit_:
            main(["prepare", "partition", "in.pkl", "--out", out])
        assert exit_.value.code == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert line.startswith("pflight: error: ")
        assert said in line
        assert sorted(path.name for path in Path().iterdir()) == ["in.pkl", "there.json"]
        assert Path("in.pkl").read_bytes() == given
        assert Path("there.json").read_text() == "mine"

    def test_a_missing_pickle_is_named(self):
        with pytest.raises(SystemExit, match=r"can't read nothing\.pkl: No such file"):
            index_pickles.main("nothing.pkl")
