"""How much of each layer that a client gets is its own model's, in runs of pFedLA.

    python benchmarks/layer_weights.py runs/papers/pfedla/noniid1_cifar10_10/pfedla_0.5/0

A client gets each layer as a mean over all clients' models, with weights that its hypernetwork
gives. The table has the weight of its own model after the last round, in percent: the mean over
clients, and the least and the greatest. Nothing is trained; the data set must be where it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

from run_table import print_table
from torch import Tensor

from pflight.callbacks import PFedLA
from pflight.command.cli import FederationCLI


def own_weights(folder: Path) -> dict[str, Tensor]:
    """Return the weights of clients' own models in a run's last checkpoint, by layer ``[C]``."""
    last = (folder / "checkpoints" / "last.ckpt").resolve()
    with TemporaryDirectory() as scratch, redirect_stdout(StringIO()):
        root = f"--trainer.default_root_dir={scratch}"
        cli = FederationCLI(["fit", f"--config={folder}/config.yaml", f"--ckpt_path={last}", root])
    callback = cli.model.callback
    if not isinstance(callback, PFedLA):
        raise SystemExit(f"{folder} is not of pFedLA")
    weights = callback.layer_weights(range(cli.datamodule.num_clients))
    return {layer: of_clients.diagonal() for layer, of_clients in weights.items()}


def of_run(folder: Path) -> Iterator[str]:
    """Yield a run's lines of the table."""
    for layer, weights in own_weights(folder).items():
        shown = (f"{100 * each:.0f}" for each in (weights.mean(), weights.min(), weights.max()))
        yield f"| {folder} | {layer} | {' | '.join(shown)} |"


def main() -> None:
    """Print the table."""
    print_table(__doc__, ["run", "layer", "mean", "least", "greatest"], of_run)


if __name__ == "__main__":
    main()
