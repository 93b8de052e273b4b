from __future__ import annotations

import copy
import io
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from pflight.callbacks import FedAvg
from pflight.datamodules import IID, ByUser
from pflight.datamodules.sources.leaf import LeafCelebA, LeafFEMNIST
from pflight.errors import ConfigurationError
from pflight.models import MLP, Classifier
from tests.runs import quiet_trainer, run

SPLITS = ("train", "val", "test")


def person(count: int, seed: int, num_labels: int = 62) -> dict[str, list]:
    random = np.random.default_rng(seed)
    x = random.integers(0, 256, (count, 784)) / 255
    return {"x": x.tolist(), "y": random.integers(0, num_labels, count).tolist()}


def leaf(people: dict[str, dict[str, list]]) -> dict[str, object]:
    """Lay people's samples out as a file of LEAF's."""
    counts = [len(data["y"]) for data in people.values()]
    return {"users": list(people), "num_samples": counts, "user_data": people}


def dump(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def samples_of(data: LeafFEMNIST | LeafCelebA, client: int, *splits: str) -> tuple[list, list]:
    """Return a client's images and labels as sorted pairs, to compare with those of a file."""
    pairs = [data.samples(client, split) for split in splits or SPLITS]
    return [torch.cat(parts).numpy() for parts in zip(*pairs, strict=True)]


def same(data: LeafFEMNIST, client: int, written: dict[str, list], *splits: str) -> None:
    """Check that a client holds exactly the samples of a file, in any order."""
    x, y = samples_of(data, client, *splits)
    held = sorted((label, *image.ravel().tolist()) for image, label in zip(x, y, strict=True))
    expected = np.array(written["x"], dtype=np.float32).tolist()
    assert held == sorted((y, *x) for x, y in zip(expected, written["y"], strict=True))


TRAIN = {f"f{name:04}": person(count, name) for name, count in ((2, 7), (0, 5), (1, 9))}
TEST = {name: person(2, 100 + seed) for seed, name in enumerate(TRAIN)}


@pytest.fixture
def femnist(tmp_path) -> Path:
    """Three writers in three files, split by LEAF."""
    first = {name: TRAIN[name] for name in ("f0002", "f0000")}
    dump(tmp_path / "train" / "all_data_0_niid_0_keep_0_train_8.json", leaf(first))
    last = {"f0001": TRAIN["f0001"]}
    dump(tmp_path / "train" / "all_data_1_niid_0_keep_0_train_8.json", leaf(last))
    dump(tmp_path / "test" / "all_data_0_niid_0_keep_0_test_8.json", leaf(TEST))
    return tmp_path


def opened(root: Path, **options) -> LeafFEMNIST:
    data = LeafFEMNIST(str(root), download=False, **options)
    data.prepare_data()
    data.setup()
    return data


# Layouts


def test_leafs_split_is_kept_and_the_numbers_are_the_files(femnist):
    data = opened(femnist, val_fraction=0)
    assert data.users == data.client_names == ["f0000", "f0001", "f0002"]
    assert data.num_clients == 3
    for client, user in enumerate(data.users):
        same(data, client, TRAIN[user], "train")
        same(data, client, TEST[user], "test")
    x, y = data.samples(0, "train")
    assert (x.dtype, x.shape[1:], y.dtype) == (torch.float32, (1, 28, 28), torch.int64)
    assert not len(data.samples(0, "val")[0])
    assert data.fill == 1


def test_validation_comes_out_of_leafs_training_samples(femnist):
    data = opened(femnist, val_fraction=0.4)
    assert data.num_samples("val").tolist() == [2, 4, 3]
    same(data, 1, TRAIN["f0001"], "train", "val")


def test_leafs_split_can_be_pooled(femnist):
    data = opened(femnist, official_test=False, val_fraction=0, test_fraction=0.5)
    assert (data.num_samples("train") + data.num_samples("test")).tolist() == [7, 11, 9]
    assert data.num_samples("test").tolist() != [2, 2, 2]


@pytest.mark.parametrize("folder", ["all_data", "data/all_data"])
def test_unsplit_files_are_split_for_each_writer(tmp_path, folder):
    dump(tmp_path / folder / "all_data_0.json", leaf(TRAIN))
    data = opened(tmp_path, val_fraction=0, test_fraction=0.2)
    assert data.num_samples("test").tolist() == [1, 2, 1]
    for client, user in enumerate(data.users):
        same(data, client, TRAIN[user])
    with pytest.raises(ConfigurationError, match="no test set of its own"):
        opened(tmp_path, official_test=True)


def test_leafs_own_nesting_is_found_and_goes_before_unsplit_files(femnist):
    (femnist / "data").mkdir()
    for part in ("train", "test"):
        (femnist / part).rename(femnist / "data" / part)
    dump(femnist / "data" / "all_data" / "all_data_0.json", {})
    assert opened(femnist).num_clients == 3


def test_setup_alone_builds_the_cache(femnist):
    data = LeafFEMNIST(str(femnist), val_fraction=0)
    data.setup()
    same(data, 0, TRAIN["f0000"], "train")
    assert list((femnist / "cache").glob("femnist-*"))


def test_the_cache_may_be_elsewhere_and_is_used_again(femnist, tmp_path_factory, monkeypatch):
    elsewhere = tmp_path_factory.mktemp("cache")
    opened(femnist, cache_dir=str(elsewhere))
    assert not (femnist / "cache").exists()
    monkeypatch.setattr("pflight.datamodules.sources.leaf.people", None)
    same(opened(femnist, cache_dir=str(elsewhere), val_fraction=0), 1, TRAIN["f0001"], "train")


def test_a_damaged_cache_is_built_anew_when_a_client_reads_it(femnist):
    opened(femnist)
    (x,) = (femnist / "cache").glob("femnist-*/x.npy")
    x.write_bytes(x.read_bytes()[:-4] + np.float32(7).tobytes())
    data = opened(femnist, val_fraction=0)
    with pytest.warns(UserWarning, match=f"{x.parent} is damaged .*building it again"):
        same(data, 1, TEST["f0001"], "test")
    for client, user in enumerate(data.users):
        same(data, client, TRAIN[user], "train")


def test_a_changed_file_is_read_again(femnist):
    opened(femnist)
    changed = copy.deepcopy(TEST)
    changed["f0001"]["x"][0] = [0.5] * 784
    dump(femnist / "test" / "all_data_0_niid_0_keep_0_test_8.json", leaf(changed))
    same(opened(femnist), 1, changed["f0001"], "test")


# Options


def test_fewer_clients_are_a_seeded_draw_that_knows_its_users(femnist):
    data = opened(femnist, num_clients=2, val_fraction=0)
    assert data.num_clients == len(data.users) == 2
    for client, user in enumerate(data.users):
        same(data, client, TRAIN[user], "train")
    drawn = {tuple(opened(femnist, num_clients=2, seed=seed).users) for seed in range(20)}
    assert len(drawn) == 3


def test_people_with_few_samples_are_left_out(femnist):
    assert opened(femnist, min_samples=8).users == ["f0001", "f0002"]
    with pytest.raises(ConfigurationError, match=r"0 people in .* have 12 .*\(min_samples\)"):
        opened(femnist, min_samples=12)


def test_another_partition_mixes_users(femnist):
    data = opened(femnist, partition=IID(), num_clients=5)
    assert data.num_clients == 5
    with pytest.raises(ConfigurationError, match=r"ByUser\(\) only, not with IID\(\)"):
        _ = data.users


def test_repeats_of_a_writer_are_dropped_training_samples_kept(femnist):
    train, test = copy.deepcopy(TRAIN), copy.deepcopy(TEST)
    image = train["f0000"]["x"][0]
    train["f0000"]["x"][3], train["f0000"]["y"][3] = image, train["f0000"]["y"][0]
    train["f0000"]["x"][4], train["f0000"]["y"][4] = image, train["f0000"]["y"][0] ^ 1
    test["f0000"]["x"][1], test["f0000"]["y"][1] = image, train["f0000"]["y"][0]
    test["f0001"]["x"][0], test["f0001"]["y"][0] = image, train["f0000"]["y"][0]
    dump(femnist / "train" / "all_data_0_niid_0_keep_0_train_8.json", leaf(train))
    (femnist / "train" / "all_data_1_niid_0_keep_0_train_8.json").unlink()
    dump(femnist / "test" / "all_data_0_niid_0_keep_0_test_8.json", leaf(test))
    options = {"val_fraction": 0}
    assert opened(femnist, **options).num_samples("train").tolist() == [5, 9, 7]
    data = opened(femnist, dedupe_first=True, **options)
    assert data.num_samples("train").tolist() == [4, 9, 7]
    assert data.num_samples("test").tolist() == [1, 2, 2]
    kept = {key: values[:3] + values[4:] for key, values in train["f0000"].items()}
    same(data, 0, kept, "train")


def test_chosen_classes_are_relabelled_in_the_order_given(tmp_path):
    people = {"a": person(4, 0) | {"y": [40, 7, 40, 10]}, "b": person(2, 1) | {"y": [7, 3]}}
    dump(tmp_path / "all_data" / "all_data_0.json", leaf(people | {"c": person(1, 2) | {"y": [0]}}))
    data = opened(tmp_path, classes=[40, 7], val_fraction=0, test_fraction=0)
    assert data.num_classes == 2
    assert data.users == ["a", "b"]
    assert sorted(data.samples(0, "train")[1].tolist()) == [0, 0, 1]
    wanted = {"x": [people["a"]["x"][i] for i in (0, 1, 2)], "y": [0, 1, 0]}
    same(data, 0, wanted)
    same(data, 1, {"x": people["b"]["x"][:1], "y": [1]})


def test_samples_per_class_is_a_seeded_draw_over_all_writers(tmp_path):
    y = [0] * 30 + [1] * 10 + [2] * 3
    people = {"a": person(43, 0) | {"y": y}, "b": person(43, 1) | {"y": y}}
    dump(tmp_path / "all_data" / "all_data_0.json", leaf(people))
    options = {"classes": [0, 1, 2], "samples_per_class": 15, "val_fraction": 0}
    data = opened(tmp_path, test_fraction=0, **options)
    assert data.class_counts().sum(dim=0).tolist() == [15, 15, 6]
    assert (data.class_counts()[:, 0] > 0).all()
    again, other = (opened(tmp_path, test_fraction=0, seed=seed, **options) for seed in (0, 1))
    x = samples_of(data, 0, "train")[0]
    assert np.array_equal(x, samples_of(again, 0, "train")[0])
    assert not np.array_equal(x, samples_of(other, 0, "train")[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_samples": 0}, "min_samples"),
        ({"classes": []}, "classes"),
        ({"classes": [3, 3]}, "classes"),
        ({"classes": [62]}, "classes"),
        ({"samples_per_class": 0}, "samples_per_class"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ConfigurationError, match=message):
        LeafFEMNIST(**options)


def test_a_bad_image_size_is_named():
    with pytest.raises(ConfigurationError, match="image_size"):
        LeafCelebA(image_size=0)


# Bad files: the error names the file and the user, and the next run with a mended file works


def edited(change) -> dict:
    content = copy.deepcopy(leaf(TEST))
    change(content)
    return content


def set_x(value):
    return lambda content: content["user_data"]["f0001"]["x"].__setitem__(1, value)


def set_y(value):
    return lambda content: content["user_data"]["f0001"].update(y=value)


BAD_CONTENTS = {
    "no users": (lambda c: c.pop("users"), '"users" must be a list'),
    "users of numbers": (lambda c: c.update(users=[1, 2, 3]), '"users" must be a list'),
    "users twice": (lambda c: c.update(users=["f0001", "f0001", "f0000"]), "'f0001' .*twice"),
    "no counts": (lambda c: c.pop("num_samples"), '"num_samples" must be a list of 3'),
    "a count too many": (lambda c: c["num_samples"].append(2), '"num_samples" must be a list of 3'),
    "half a count": (lambda c: c.update(num_samples=[2, 2.5, 2]), '"num_samples" must be'),
    "another count": (lambda c: c.update(num_samples=[2, 3, 2]), "has 2 x and 2 y, but 3"),
    "a user without data": (lambda c: c["user_data"].pop("f0001"), "'f0001' has no"),
    "no data": (lambda c: c.pop("user_data"), "'f0002' has no"),
    "data as a list": (lambda c: c.update(user_data=[]), "'f0002' has no"),
    "data of nobody": (lambda c: c["user_data"].update(eve=person(2, 0)), "'eve' is not in"),
    "x without y": (lambda c: c["user_data"]["f0001"].pop("y"), '\'f0001\': "x" and "y"'),
    "no object": (lambda c: c["user_data"].update(f0001=[1]), '\'f0001\': "x" and "y"'),
    "more y than x": (set_y([1, 2, 3]), "'f0001' has 2 x and 3 y"),
    "783 numbers": (set_x([0.5] * 783), "'f0001': each \"x\" must be 784 numbers"),
    "a word in x": (set_x([0.5] * 783 + ["1"]), "'f0001': each \"x\" must be 784 numbers"),
    "a null in x": (set_x([0.5] * 783 + [None]), "'f0001': each \"x\" must be 784 numbers"),
    "where null is": (set_x([0.5] * 9 + [None] * 775), r"'f0001': .*\"x\"\[1\]\[9\] is null"),
    "null as label": (set_y([1, None]), "'f0001': labels must be .*, got null"),
    "a truth in x": (set_x([0.5] * 783 + [True]), "'f0001': each \"x\" must be 784 numbers"),
    "a number as x": (set_x(3), "'f0001': each \"x\" must be 784 numbers"),
    "an immense number": (set_x([1e300] * 784), "'f0001': \"x\"\\[1\\]\\[0\\] is not finite"),
    "label 62": (set_y([62, 1]), "'f0001': labels must be whole numbers of 0 to 61, got 62"),
    "label -1": (set_y([1, -1]), "'f0001': labels must be whole"),
    "half a label": (set_y([1, 1.5]), "'f0001': labels must be whole"),
    "a word as label": (set_y(["1", "2"]), "'f0001': labels must be whole"),
    "a list as label": (set_y([[1], [2]]), "'f0001': labels must be whole"),
    "nobody": (
        lambda c: c.update(users=[], num_samples=[], user_data={}),
        "no user has samples",
    ),
}


@pytest.mark.parametrize("name", BAD_CONTENTS)
def test_a_bad_file_is_an_error_and_the_mended_one_works(femnist, name):
    change, message = BAD_CONTENTS[name]
    path = femnist / "test" / "all_data_0_niid_0_keep_0_test_8.json"
    dump(path, edited(change))
    with pytest.raises(ConfigurationError, match=f"{femnist}/t.*json.*{message}") as caught:
        opened(femnist)
    assert "\n" not in str(caught.value)
    dump(path, leaf(TEST))
    assert opened(femnist).num_clients == 3


@pytest.mark.short("0-NaN-*", "8190--Infinity-x")
@pytest.mark.parametrize("part", ["users", "x", "y", "num_samples"])
@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize("padding", [0, 8190, 8191])
def test_what_is_no_finite_number_is_called_by_its_name(femnist, part, word, padding):
    path = femnist / "test" / "all_data_0_niid_0_keep_0_test_8.json"
    number = float(word)
    change, where = {
        "users": (lambda c: c["users"].append(number), r'"users"\[3\]'),
        "x": (set_x([0.5] * 700 + [number] * 84), r"user 'f0001': \"x\"\[1\]\[700\]"),
        "y": (set_y([1, number]), r"user 'f0001': \"y\"\[1\]"),
        "num_samples": (lambda c: c.update(num_samples=[number]), r'"num_samples"\[0\]'),
    }[part]
    content = json.dumps(edited(change))
    path.write_text(" " * (padding - content.index(word) % 8192) + content)
    with pytest.raises(ConfigurationError, match=f"^{path}: {where} is {word}, but must be a fin"):
        opened(femnist)


def test_nan_in_the_names_of_pictures_is_called_nan(celeba):
    path = celeba / "data" / "all_data" / "all_data.json"
    dump(path, leaf({"12": {"x": ["0.jpg", float("nan")], "y": [1, 0]}}))
    with pytest.raises(ConfigurationError, match=rf"{path}: user '12': \"x\"\[1\] is NaN"):
        celebrities(celeba)


# Users with samples in a part only, or without any

EMPTY: dict[str, list] = {"x": [], "y": []}


def test_users_without_samples_are_left_out_and_counted(femnist):
    dump(femnist / "train" / "more.json", leaf({"eve": EMPTY, "bob": EMPTY}))
    content = leaf({"eve": EMPTY, "dan": EMPTY})
    del content["user_data"]["dan"]
    dump(femnist / "test" / "more.json", content)
    message = f"^{femnist}: 3 of 6 users have no samples and are left out$"
    with pytest.warns(UserWarning, match=message) as caught:
        data = opened(femnist)
    assert len(caught) == 1
    assert data.users == ["f0000", "f0001", "f0002"]
    assert len(opened(femnist).new_clients) == 0


def test_old_files_have_data_of_unlisted_users_without_samples(femnist):
    """As LEAF's script wrote them before March 2020."""
    for part in ("train", "test"):
        content = leaf({"zoe": person(2, 3)})
        content["user_data"]["eve"] = EMPTY
        dump(femnist / part / "old.json", content)
    with pytest.warns(UserWarning, match="1 of 5 users have no samples"):
        assert opened(femnist).users == ["f0000", "f0001", "f0002", "zoe"]


def test_users_without_samples_are_left_out_of_unsplit_files(tmp_path):
    dump(tmp_path / "all_data" / "all_data_0.json", leaf(TRAIN | {"eve": EMPTY}))
    with pytest.warns(UserWarning, match="1 of 4 users have no samples"):
        assert opened(tmp_path).users == ["f0000", "f0001", "f0002"]


def test_users_of_test_samples_alone_are_newcomers(femnist):
    """Whether they are missing in the training files or have empty lists there."""
    dump(femnist / "train" / "more.json", leaf({"eve": EMPTY, "zoe": person(2, 0)}))
    dump(femnist / "test" / "more.json", leaf({"eve": person(3, 1), "a": person(1, 2)}))
    data = opened(femnist, val_fraction=0)
    assert data.users == ["a", "eve", "f0000", "f0001", "f0002", "zoe"]
    assert data.new_clients.tolist() == [0, 1]
    assert data.train_clients.tolist() == [2, 3, 4, 5]
    assert data.num_samples("test").tolist() == [1, 3, 2, 2, 2, 0]
    assert "2 clients held out as newcomers" in data.summary()
    more = opened(femnist, holdout_clients=0.5)
    assert {0, 1} < set(more.new_clients.tolist())
    assert len(more.new_clients) == len(more.new_clients.unique())
    pooled = opened(femnist, official_test=False)
    assert len(pooled.new_clients) == 0
    assert pooled.train_clients.tolist() == [0, 1, 2, 3, 4, 5]
    mixed = opened(femnist, partition=IID(), num_clients=3)
    assert len(mixed.new_clients) == 0


@pytest.mark.short("vectorized")
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_leafs_split_by_user_trains_on_some_and_tests_newcomers(tmp_path, engine):
    dump(tmp_path / "train" / "a.json", leaf(TRAIN))
    dump(tmp_path / "test" / "a.json", leaf({"eve": person(3, 1), "zoe": person(1, 2)}))
    client = Classifier(MLP(784, [], 62), num_classes=62)
    data = LeafFEMNIST(str(tmp_path), download=False)
    federation = run(client, data, FedAvg(), engine=engine, finetune_epochs=1)
    (means,) = quiet_trainer(1, FedAvg()).test(federation, datamodule=data, verbose=False)
    assert means["test/new/micro_acc"] == means["test/new/finetuned/micro_acc"]
    assert data.new_clients.tolist() == [0, 4]


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b'{"users": []}}', b"\xef\xbb\xbf{}", b'{"users": "\xff"}', b"[" * 99_999],
    ids=["empty", "list", "bracket", "mark", "latin", "deep"],
)
def test_what_is_no_json_of_leafs_is_named(femnist, content):
    path = femnist / "train" / "zzz.json"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=f"^{path}"):
        opened(femnist)


def test_a_user_in_two_files_is_named(femnist):
    path = femnist / "train" / "all_data_2.json"
    dump(path, leaf({"f0001": person(2, 0)}))
    with pytest.raises(ConfigurationError, match=f"{path}: user 'f0001' is in {femnist}/train/all"):
        opened(femnist)


def test_a_missing_part_of_the_split_is_named(femnist):
    for file in (femnist / "test").iterdir():
        file.unlink()
    with pytest.raises(ConfigurationError, match=rf"{femnist} has train/\*.json, but no test/"):
        opened(femnist)


def test_files_without_anybody_are_an_error(tmp_path):
    dump(tmp_path / "all_data" / "all_data_0.json", leaf({}))
    with pytest.raises(ConfigurationError, match=f"no samples in {tmp_path}/all_data"):
        opened(tmp_path)


def test_without_files_the_error_says_where_they_are_looked_for(tmp_path):
    for use in (LeafFEMNIST.setup, LeafFEMNIST.prepare_data):
        with pytest.raises(ConfigurationError, match=r"train/\*.json.*all_data.*parquet.*download"):
            use(LeafFEMNIST(str(tmp_path), download=False))


# Fuzz

WHOLE = json.dumps(leaf({"a": person(2, 0), "b": person(1, 1)})).encode()
SCALARS = st.none() | st.booleans() | st.integers(-3, 70) | st.floats() | st.text(max_size=3)
ROW = st.just([0.25] * 784) | st.just([0, 1] * 392) | st.lists(SCALARS, max_size=3)
LABEL = st.integers(0, 61) | st.sampled_from([1.0, 3.5, True, 62, None, "1"])
DATA = st.fixed_dictionaries(
    {},
    optional={
        "x": st.lists(ROW, max_size=2) | SCALARS,
        "y": st.lists(LABEL, max_size=2) | SCALARS,
    },
)
NAMES = st.sampled_from(["a", "b", "", "é\n"])
ANY = st.fixed_dictionaries(
    {},
    optional={
        "users": st.lists(NAMES | SCALARS, max_size=2) | SCALARS,
        "num_samples": st.lists(st.integers(0, 2) | SCALARS, max_size=2) | SCALARS,
        "user_data": st.dictionaries(NAMES, DATA | SCALARS, max_size=2) | SCALARS,
        "hierarchies": SCALARS,
    },
)


@st.composite
def near_misses(draw) -> dict:
    """Draw a file that is right but for, at most, one thing."""
    people = draw(st.dictionaries(NAMES, st.integers(1, 2), min_size=1, max_size=2))
    label = st.integers(0, 61) | st.just(4.0)
    content = leaf(
        {
            name: {"x": [[0.5] * 784] * n, "y": draw(st.lists(label, min_size=n, max_size=n))}
            for name, n in people.items()
        }
    )
    name = draw(st.sampled_from(list(people)))
    place: list | dict = draw(
        st.sampled_from([content, *content.values(), content["user_data"][name]])
    )
    if draw(st.booleans()):
        key = draw(st.sampled_from(list(place) if isinstance(place, dict) else range(len(place))))
        place[key] = draw(SCALARS | st.lists(SCALARS, max_size=2))
    return content


def agrees_with_json(root: Path, content: bytes) -> bool:
    """Load a file if it can be; check it against ``json``; say whether it could be."""
    path = root / "all_data" / "all_data_0.json"
    path.parent.mkdir()
    path.write_bytes(content)
    refusal = ""
    try:
        data = opened(root, val_fraction=0, test_fraction=0)
    except ConfigurationError as error:
        refusal = str(error)
    if refusal:
        assert str(root) in refusal
        return False
    # The parser also takes vertical tabs and form feeds for spaces.
    written = json.loads(content.replace(b"\v", b" ").replace(b"\f", b" "))["user_data"]
    expected = {name: samples for name, samples in written.items() if samples["y"]}
    assert data.users == sorted(expected)
    for client, user in enumerate(data.users):
        same(data, client, expected[user])
    return True


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*users have no samples")
@given(content=ANY | near_misses())
@settings(max_examples=150, deadline=None)
def test_any_json_is_loaded_as_it_is_or_refused(tmp_path_factory, content):
    agrees_with_json(tmp_path_factory.mktemp("leaf"), json.dumps(content).encode())


@pytest.mark.filterwarnings("ignore:.*users have no samples")
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_any_change_of_the_bytes_is_loaded_as_it_is_or_refused(tmp_path_factory, data):
    at = data.draw(st.integers(0, len(WHOLE) - 1) | st.integers(0, 60))
    length = data.draw(st.integers(0, 3))
    changed = WHOLE[:at] + data.draw(st.binary(max_size=3)) + WHOLE[at + length :]
    agrees_with_json(tmp_path_factory.mktemp("leaf"), changed)


@pytest.mark.filterwarnings("ignore:.*users have no samples")
@given(cut=st.integers(0, len(WHOLE) - 1))
@settings(max_examples=40, deadline=None)
def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path_factory, cut):
    assert not agrees_with_json(tmp_path_factory.mktemp("leaf"), WHOLE[:cut])


def test_the_file_that_the_fuzz_changes_is_right(tmp_path):
    assert agrees_with_json(tmp_path, WHOLE)


# CelebA


def picture(seed: int, size: tuple[int, int] = (22, 18)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


PICTURES = "data/raw/img_align_celeba"


@pytest.fixture
def celeba(tmp_path) -> Path:
    """Two people with three and two pictures."""
    images = tmp_path / PICTURES
    images.mkdir(parents=True)
    for number in range(5):
        (images / f"{number}.jpg").write_bytes(png(picture(number)))
    people = {
        "12": {"x": ["0.jpg", "3.jpg", "1.jpg"], "y": [1.0, 0.0, 1.0]},
        "7": {"x": ["2.jpg", "4.jpg"], "y": [0, 1]},
    }
    dump(tmp_path / "data" / "all_data" / "all_data.json", leaf(people))
    return tmp_path


def celebrities(root: Path, **options) -> LeafCelebA:
    data = LeafCelebA(str(root), val_fraction=0, test_fraction=0, download=False, **options)
    data.setup()
    return data


@pytest.mark.parametrize("scale", [True, False])
def test_pictures_are_scaled_as_pillow_scales(celeba, scale):
    data = celebrities(celeba, scale=scale)
    assert data.users == ["12", "7"]
    assert data.num_classes == 2
    x, y = data.samples(0, "train")
    assert (x.shape, x.dtype) == ((3, 3, 84, 84), torch.float32)
    assert y.tolist() == [1, 0, 1]
    for image, number in zip(x, (0, 3, 1), strict=True):
        expected = np.asarray(Image.fromarray(picture(number)).resize((84, 84)))
        pixels = torch.from_numpy(expected.copy()).permute(2, 0, 1).float()
        assert torch.equal(image, pixels / 255 if scale else pixels)


def test_another_size_is_another_cache_and_scale_is_not(celeba):
    assert celebrities(celeba, image_size=10).samples(1, "train")[0].shape == (2, 3, 10, 10)
    celebrities(celeba)
    celebrities(celeba, scale=False)
    assert len(list((celeba / "cache").glob("celeba-*"))) == 2


def test_pictures_may_be_elsewhere(celeba, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("pictures") / "here"
    (celeba / "data" / "raw" / "img_align_celeba").rename(elsewhere)
    with pytest.raises(ConfigurationError, match=r"pictures not found in .*/images.*image_dir"):
        celebrities(celeba)
    assert celebrities(celeba, image_dir=str(elsewhere)).num_clients == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "user '7': can't read .*/4.jpg"),
        (png(picture(4))[:100], "/4.jpg is .*image"),
        (b"", "/4.jpg is .*image"),
        (png(picture(4, (22, 17))), "/4.jpg: the image has 22 x 17 pixels, .*/0.jpg 22 x 18"),
    ],
    ids=["missing", "truncated", "empty", "another size"],
)
def test_a_bad_picture_is_named_and_the_mended_one_is_read(celeba, content, message):
    path = celeba / "data" / "raw" / "img_align_celeba" / "4.jpg"
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=message):
        celebrities(celeba)
    path.write_bytes(png(picture(4)))
    assert celebrities(celeba).num_clients == 2


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to(path.name)])
@pytest.mark.parametrize("name", ["data/all_data/all_data.json", f"{PICTURES}/4.jpg"])
def test_what_is_no_file_is_named(celeba, make, name):
    path = celeba / name
    path.unlink()
    make(path)
    with pytest.raises(ConfigurationError, match=f"{path}"):
        celebrities(celeba)


@pytest.mark.parametrize("name", [3, None, "\0", "", "nowhere/1.jpg", "../1.jpg", "/1", "a" * 300])
def test_a_bad_name_of_a_picture_is_an_error(celeba, name):
    path = celeba / "data" / "all_data" / "all_data.json"
    dump(path, leaf({"12": {"x": [name], "y": [1]}}))
    with pytest.raises(ConfigurationError, match=f"{path}: user '12'"):
        celebrities(celeba)


# Hugging Face


def parquet(path: Path, **columns: list) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet as files

    path.parent.mkdir(parents=True, exist_ok=True)
    columns["image"] = [{"bytes": content, "path": None} for content in columns["image"]]
    files.write_table(arrow.table(columns), path)


def test_femnist_of_hugging_face(tmp_path):
    pixels = [np.full((28, 28), 51 * i, dtype=np.uint8) for i in range(6)]
    for part in range(2):
        parquet(
            tmp_path / "data" / f"train-{part:05}-of-00002.parquet",
            image=[png(image) for image in pixels[3 * part : 3 * part + 3]],
            writer_id=["f1", "f0", "f1"],
            hsf_id=["hsf_0"] * 3,
            character=[61, 0, part],
        )
    data = opened(tmp_path, val_fraction=0, test_fraction=0)
    assert data.users == ["f0", "f1"]
    x, y = data.samples(1, "train")
    assert y.tolist() == [61, 0, 61, 1]
    expected = torch.tensor([0.0, 0.4, 0.6, 1.0]).view(4, 1, 1, 1).expand(-1, 1, 28, 28)
    torch.testing.assert_close(x, expected)


def test_celeba_of_hugging_face_pools_the_parts(tmp_path):
    for number, part in enumerate(("test", "train", "valid")):
        parquet(
            tmp_path / "hub" / "img_align+identity+attr" / f"{part}-00000-of-00001.parquet",
            image=[png(picture(2 * number)), png(picture(2 * number + 1))],
            celeb_id=[5, 10 + number],
            Smiling=[True, False],
            Young=[True, True],
        )
    data = celebrities(tmp_path, image_size=18, min_samples=2)
    assert data.users == ["5"]
    x, y = data.samples(0, "train")
    assert y.tolist() == [1, 1, 1]
    expected = np.asarray(Image.fromarray(picture(2)).resize((18, 18)))
    assert torch.equal(x[1] * 255, torch.from_numpy(expected.copy()).permute(2, 0, 1).float())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"character": [62]}, "writer_id 'f0': labels must be whole numbers of 0 to 61"),
        ({"character": ["A"]}, "writer_id 'f0': labels must be whole numbers"),
        (
            {"image": [png(picture(0, (27, 28)))]},
            "row 0 is .* 28 x 27 pixels, expected 28 x 28",
        ),
        ({"image": [b"nothing"]}, "row 0 is .*image"),
        ({"writer_id": [None]}, "row 0 has no writer_id"),
    ],
)
def test_a_bad_row_is_named_and_the_mended_file_works(tmp_path, change, message):
    path = tmp_path / "train-00000-of-00001.parquet"
    right = {"image": [png(picture(0, (28, 28)))], "writer_id": ["f0"], "character": [1]}
    parquet(path, **right | change)
    with pytest.raises(ConfigurationError, match=f"{path}: {message}"):
        opened(tmp_path)
    parquet(path, **right)
    assert opened(tmp_path).users == ["f0"]


def test_an_unreachable_hub_is_named_and_the_next_run_works(tmp_path, monkeypatch):
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    root = tmp_path / "femnist"
    with pytest.raises(
        ConfigurationError,
        match=rf"^could not .* flwrlabs/femnist .* {root} \(root does not exist\): .+$",
    ):
        LeafFEMNIST(str(root)).prepare_data()
    dump(root / "all_data" / "all_data_0.json", leaf(TRAIN))
    assert opened(root).num_clients == 3


def hub(monkeypatch, download) -> None:
    """Stand in for the hub's client, which can't be reached from everywhere."""
    module = type(sys)("huggingface_hub")
    module.snapshot_download = download
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)


def test_an_interrupted_download_is_not_taken_for_the_data_set(tmp_path, monkeypatch):
    right = {"image": [png(picture(0, (28, 28)))], "character": [1]}

    def download(repository, *, repo_type, allow_patterns, local_dir):
        assert (repository, repo_type) == ("flwrlabs/femnist", "dataset")
        assert allow_patterns == "data/train-*.parquet"
        parts = sorted(Path(local_dir).rglob("*.parquet"))
        parquet(local_dir / "data" / f"train-{len(parts)}.parquet", writer_id=["f0"], **right)
        if not parts:
            raise ConnectionError("the line went dead\nin the middle")

    hub(monkeypatch, download)
    root = tmp_path / "femnist"
    data = LeafFEMNIST(str(root), test_fraction=0, val_fraction=0)
    with pytest.raises(ConfigurationError, match=r"flwrlabs/femnist .*the line went dead$"):
        data.prepare_data()
    with pytest.raises(ConfigurationError, match="FEMNIST not found"):
        data.setup()
    data.prepare_data()
    data.setup()
    assert data.num_samples().tolist() == [2]
    data.prepare_data()
    assert len(list(root.rglob("*.parquet"))) == 2


def test_without_the_hubs_client_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigurationError, match=r'not found.*pip install "pflight\[hf\]"'):
        LeafFEMNIST(str(tmp_path / "femnist")).prepare_data()


def test_the_default_partition_is_natural():
    assert LeafFEMNIST().partition == LeafCelebA().partition == ByUser()
