"""Does FeSEM find known groups by its clients' adapters? Each distance, over some seeds.

    python benchmarks/adapter_clusters.py --seeds 0 1 2

A small network is trained on half of scikit-learn's digits, unchanged. Its layers are frozen and
get a LoRA. The clients have the other half in four known groups. The table has the adjusted Rand
index of the clusters with the groups, and the accuracy of clients, as means over seeds.
"""

from __future__ import annotations

import argparse
import copy
import logging
import warnings
from typing import Any

import lightning as L
import peft
import torch
from torch import nn

import pflight
from pflight.callbacks import FeSEM
from pflight.datamodules import IID, Digits, KnownClusters, TensorClients
from pflight.models import MLP, Classifier

DISTANCES = ("l2", "product", "subspace", "cosine_B")


def pretrained(seed: int) -> tuple[nn.Module, TensorClients]:
    """Return a network trained on one half of the digits, and the other half as 20 clients."""
    digits = Digits(partition=IID(), num_clients=40, val_fraction=0, test_fraction=0.3, seed=seed)
    digits.setup()
    parts = [[digits.samples(i, split) for i in range(40)] for split in ("train", "test")]
    x, y = (torch.cat(values) for values in zip(*parts[0][:20], strict=True))
    torch.manual_seed(seed)
    network = MLP(64, [64], 10)
    optimizer = torch.optim.Adam(network.parameters(), 1e-2)
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x), y).backward()
        optimizer.step()
    train, test = (part[20:] for part in parts)
    return network, TensorClients(train, test=test, num_classes=10)


def adapted(network: nn.Module, rank: int) -> Any:
    """Return a copy of the network with a LoRA on each of its linear layers."""
    names = [name for name, part in network.named_modules() if isinstance(part, nn.Linear)]
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names)
    return peft.get_peft_model(copy.deepcopy(network), config)


def found(difference: str, distance: Any, seed: int, options: argparse.Namespace) -> list[float]:
    """Return the Rand index and the accuracy of one run."""
    network, clients = pretrained(seed)
    data = KnownClusters(clients, 4, difference=difference, seed=seed, batch_size=10)
    torch.manual_seed(seed)
    client = Classifier(
        adapted(network, options.rank), 10, optimizer=lambda p: torch.optim.SGD(p, lr=options.lr)
    )
    federation = pflight.Federation(client, local_epochs=options.epochs, seed=seed)
    trainer = L.Trainer(
        max_epochs=options.rounds, accelerator="cpu", callbacks=[FeSEM(4, distance=distance)],
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(federation, datamodule=data)
    (metrics,) = trainer.test(federation, datamodule=data, verbose=False)
    rand = federation.history[-1].metrics["fesem/rand_index"]
    return [float(rand), float(metrics["test/macro_acc"])]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=20, help="of local training in a round")
    parser.add_argument("--lr", type=float, default=0.1)
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    print("| groups by | distance | Rand index | macro acc. |\n|---|---|---|---|")
    for difference in ("labels", "rotation", "features"):
        for distance in DISTANCES:
            runs = [found(difference, distance, seed, options) for seed in options.seeds]
            rand, accuracy = torch.tensor(runs).mean(0).tolist()
            print(f"| {difference} | `{distance}` | {rand:.2f} | {accuracy:.3f} |", flush=True)


if __name__ == "__main__":
    main()
