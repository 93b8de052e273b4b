"""The programs in the folder examples/ run, on small plays and with small networks."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from tests.made_plays import WORDS, write_plays
from tests.pages import ROOT

pytest.importorskip("peft")
pytest.importorskip("transformers")


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_shakespeare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = write_plays(tmp_path, roles=3, length=160)
    small = ["--root", root, "--width", "16", "--rounds", "1", "--clients", "4"]
    rows = example("shakespeare").main(small)
    assert all(1 < value < 97 for value in rows.values())
    assert rows["roles, fedsa_lora"] < rows["roles, before"]
    assert f"newcomers, before {rows['newcomers, before']:18.3f}" in capsys.readouterr().out


def tiny_bert(folder: Path) -> str:
    """Write a random encoder with a tokenizer of whole words, as MiniLM's folder has them."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = ["[PAD]", "[UNK]", *sorted({*" ".join(WORDS).lower().split()})]
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, "[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = tokenizers.normalizers.Lowercase()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]"}
    whole = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    whole.save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=len(words),
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=16,
    )
    transformers.BertModel(config).save_pretrained(folder)
    return str(folder)


def test_two_plays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    model, root = tiny_bert(tmp_path / "model"), write_plays(tmp_path, roles=4, length=160)
    small = ["--model", model, "--root", root, "--passages", "4", "--rounds", "1"]
    small += ["--plays", "play0", "play1", "play2"]
    found = example("two_plays").main(small)
    assert all(0 <= accuracy <= 1 for accuracy in found.values())
    said = capsys.readouterr().out
    factors, head = 4 * 4 * 8 * 16, 4 * (16 + 1) * 2  # A, or B, of two layers at rank 8
    assert f"{(2 * factors + head) / 1000:.1f} kB up a participation" in said
    assert f"{factors / 1000:.1f} kB up a participation" in said
