"""How FedEC's clients move, how FeSEM's centers settle, and what pFedLA sends.

    python benchmarks/mechanisms.py movement --config configs/comparison/digits.yaml \
        --set data.cohort_size=5 --target 0.9
    python benchmarks/mechanisms.py centers --config configs/comparison/rotated_digits.yaml \
        --work model.local_epochs=5 model.local_epochs=1 model.local_steps=1
    python benchmarks/mechanisms.py traffic

``movement`` compares the model of a client after each participation with its model after the
participation before, on the client's test samples. It also has the first round after which the mean
validation accuracy of all clients reaches a target. ``centers`` shows by round the mean distance of
clients to their centers, equation 6 of FeSEM, and how many clients changed their cluster. Its first
table has where each kind of local work ends. Values are means over seeds. ``traffic`` has the
megabytes of pFedLA's table 3, counted in rounds of ten clients with the paper's networks.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from io import StringIO
from tempfile import TemporaryDirectory

import lightning as L
import numpy as np
import torch
from cells import cell
from pfedla import fit
from quiet import quiet
from scipy import stats
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax

from pflight import Federation, keep_freed_memory
from pflight.callbacks import PFedLA
from pflight.command.cli import FederationCLI
from pflight.datamodules import TensorClients
from pflight.models import Classifier, PFedHNCNN

METHODS = {
    "FedEC-wo": ("fedec_wo", []),
    "FedEC(0.1)": ("fedec", ["trainer.callbacks.alpha=0.1"]),
    "FedEC(1)": ("fedec", []),
}
COLUMNS = {
    "changed": "changed predictions, %",
    "divergence": "divergence",
    "fluctuation": "change of accuracy",
    "reached": "rounds to target",
    "test": "test accuracy",
}
TABLE_3 = {
    "EMNIST": ((1, 28, 28), ["third dense", "first dense"], [491.08, 488.65, 312.52]),
    "CIFAR-10": (
        (3, 32, 32),
        ["first dense", "second convolution", "third dense"],
        [693.98, 418.97, 382.25, 379.82],
    ),
}
"""The shape of an image, the layers in the order in which clients retain them, and megabytes."""
PARAMETERS = {
    ("third dense", 28): 850,
    ("first dense", 28): 61_560,
    ("first dense", 32): 96_120,
    ("second convolution", 32): 12_832,
    ("third dense", 32): 850,
}


class Movement(L.Callback):
    """Compares a client's predictions after each participation with those after the last one.

    Attributes:
        found: For each participation but a client's first: the percentage of test samples with
            another predicted class, the divergence of equation 6, and the absolute change of
            accuracy in points.
    """

    def __init__(self) -> None:
        self.found: list[tuple[float, float, float]] = []
        self._before: dict[int, Tensor] = {}

    @torch.no_grad()
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Add the participations of a round."""
        assert isinstance(pl_module, Federation)
        entry = pl_module.history[-1]
        for client in {*entry.clients} - {*entry.failed}:
            x, y = trainer.datamodule.samples(client, "test")
            if len(y):
                now = log_softmax(pl_module.client_module(client)(x), dim=1)
                if client in self._before:
                    self.found.append(moved(self._before[client], now, y))
                self._before[client] = now


def moved(before: Tensor, now: Tensor, labels: Tensor) -> tuple[float, float, float]:
    """Return how far predictions moved.

    Args:
        before: Logarithms of probabilities, ``[samples, classes]``.
        now: Likewise, later.
        labels: Of the samples.

    Returns:
        Changed classes in percent, the mean divergence, and the absolute change of accuracy in
        points.
    """
    earlier, later = before.argmax(dim=1), now.argmax(dim=1)
    change = (later == labels).double().mean() - (earlier == labels).double().mean()
    divergence = kl_div(now, before, reduction="batchmean", log_target=True)
    changed = (earlier != later).double().mean()
    return 100 * float(changed), float(divergence), 100 * abs(float(change))


class WatchedCLI(FederationCLI):
    """Runs a fit with one more callback.

    Args:
        args: Of the command.
        callback: Is told of each round.
    """

    def __init__(self, args: list[str], callback: L.Callback) -> None:
        self.callback = callback
        super().__init__(args)

    def before_fit(self) -> None:
        """Add the callback."""
        self.trainer.callbacks.insert(0, self.callback)


def trained(
    config: str, algorithm: str, settings: Sequence[str], seed: int, callback: L.Callback
) -> tuple[Federation, float]:
    """Train a federation, and return it with its accuracy on test samples, in percent.

    Args:
        config: The file of data, clients and Trainer.
        algorithm: The name of the method's configuration.
        settings: Options, as ``name=value``.
        seed: Of the run.
        callback: Is told of each round.
    """
    with TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        files = [f"--config={config}", f"--config=configs/algorithm/{algorithm}.yaml"]
        quietly = ["--trainer.enable_progress_bar=false", "--trainer.check_val_every_n_epoch=1"]
        said = [f"--trainer.default_root_dir={folder}", f"--seed_everything={seed}"]
        cli = WatchedCLI(
            ["fit", *files, *quietly, *(f"--{one}" for one in settings), *said], callback
        )
        (values,) = cli.trainer.test(cli.model, datamodule=cli.datamodule, verbose=False)
    return cli.model, 100 * values["test/macro_acc"]


class OwnLayers(PFedLA):
    """HeurpFedLA with clients that weigh their own models most in given layers.

    Args:
        parameters: The numbers of parameters of these layers, the heaviest first.
    """

    def __init__(self, parameters: Sequence[int]) -> None:
        super().__init__(retain=len(parameters), lr=0.0)
        self.parameters = parameters

    def setup_server(self) -> None:
        """Set the hypernetworks' outputs, which no step changes."""
        super().setup_server()
        stored = self.stored.tensors()
        sizes = [
            sum(stored[name][0].numel() for name in names if name in stored)
            for names in self.layers.values()
        ]
        for client in range(len(self.hypernetworks)):
            logits = self.hypernetworks[client]["output.bias"].zero_().view(len(sizes), -1)
            for rank, size in enumerate(self.parameters):
                logits[sizes.index(size), client] = len(self.parameters) - rank


def megabytes(image: tuple[int, int, int], parameters: Sequence[int]) -> tuple[float, float]:
    """Return the traffic of 75 rounds of ten clients, down and up, in MiB.

    Args:
        image: The shape of an image. Colour images have the network with BatchNorm.
        parameters: The numbers of parameters of the layers that all clients retain.

    Returns:
        The traffic after the first round, and with it: then clients are sent all layers.
    """
    samples = torch.zeros(2, *image), torch.tensor([0, 1])
    network = PFedHNCNN(10, image[0], image[1], batch_norm=image[0] == 3)
    federation = Federation(Classifier(network, num_classes=10))
    fit(federation, OwnLayers(parameters), TensorClients([samples] * 10, num_classes=10), 2)
    first, later = (entry.bytes_down + entry.bytes_up for entry in federation.history)
    return 75 * later / 2**20, (first + 74 * later) / 2**20


def print_traffic(options: argparse.Namespace) -> None:
    """Print table 3 of pFedLA beside the counted traffic."""
    print("| data | k | retained layers | paper | here | with the first round |")
    print("|---|---|---|---|---|---|")
    for data, (image, layers, printed) in TABLE_3.items():
        for retained, paper in enumerate(printed):
            parameters = [PARAMETERS[layer, image[1]] for layer in layers[:retained]]
            later, all_rounds = megabytes(image, parameters)
            cells = f"{', '.join(layers[:retained])} | {paper} | {later:.2f} | {all_rounds:.2f}"
            print(f"| {data} | {retained} | {cells} |", flush=True)


def first_round(accuracies: Sequence[float], target: float) -> float:
    """Return how many rounds it took to reach a target, or NaN if it was not reached."""
    reached = [number for number, value in enumerate(accuracies, 1) if value >= target]
    return float(reached[0]) if reached else float("nan")


def shown(values: Sequence[float], digits: int = 1) -> str:
    """Return the cell of values, without those that are NaN, and how many these are."""
    known = [value for value in values if value == value]
    never = len(values) - len(known)
    return cell(known, digits) + (f" (never at {never} of {len(values)} seeds)" if never else "")


def difference(ours: Sequence[float], theirs: Sequence[float], digits: int = 1) -> str:
    """Return the mean of paired differences, with its 95 % interval of t over the pairs."""
    pairs = [one - other for one, other in zip(ours, theirs, strict=True) if one == one]
    pairs = [pair for pair in pairs if pair == pair]
    if len(pairs) < 2:
        return cell(pairs, digits)
    mean, error = float(np.mean(pairs)), stats.sem(pairs)
    low, high = (
        stats.t.interval(0.95, len(pairs) - 1, loc=mean, scale=error) if error else (mean,) * 2
    )
    return f"{mean:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def print_movement(options: argparse.Namespace) -> None:
    """Print how far clients move by each method."""
    runs: dict[str, dict[str, list[float]]] = {}
    for name in options.methods:
        algorithm, settings = METHODS[name]
        rows = runs[name] = {column: [] for column in COLUMNS}
        for seed in range(options.seeds):
            watch = Movement()
            asked = [*options.set, *settings]
            federation, test = trained(options.config, algorithm, asked, seed, watch)
            curve = [entry.metrics["val/macro_acc"] for entry in federation.history]
            means = np.mean(watch.found, axis=0)
            values = (*means, first_round(curve, options.target), test)
            for column, value in zip(COLUMNS, values, strict=True):
                rows[column].append(float(value))
    print(f"| method | {' | '.join(COLUMNS.values())} |\n|---{'|---' * len(COLUMNS)}|")
    for name, found in runs.items():
        print_row(name, {column: shown(found[column], digits(column)) for column in COLUMNS})
    base, *others = runs
    for name in others:
        pairs = {
            column: difference(runs[name][column], runs[base][column], digits(column))
            for column in COLUMNS
        }
        print_row(f"{name} \N{MINUS SIGN} {base}", pairs)


def digits(column: str) -> int:
    """Return the decimals of a column."""
    return 3 if column == "divergence" else 1


def print_row(name: str, cells: Mapping[str, str]) -> None:
    """Print a row of a table."""
    print(f"| {name} | {' | '.join(cells.values())} |", flush=True)


def print_centers(options: argparse.Namespace) -> None:
    """Print where FeSEM ends with each kind of local work, and the way there by round."""
    tags = {"objective": "fesem/objective", "moved": "fesem/moved", "groups": "fesem/rand_index"}
    ends, ways = [], []
    for work in options.work:
        curves: dict[str, list[list[float]]] = {name: [] for name in (*tags, "accuracy")}
        tests = []
        for seed in range(options.seeds):
            asked = [*options.set, *work.split(",")]
            federation, test = trained(options.config, "fesem", asked, seed, L.Callback())
            tests.append(test)
            for name, tag in {**tags, "accuracy": "val/macro_acc"}.items():
                curves[name].append(
                    [entry.metrics.get(tag, np.nan) for entry in federation.history]
                )
        by_round = {name: np.array(values) for name, values in curves.items()}
        moves = by_round["moved"].sum(axis=0)
        last_move = max((number for number, count in enumerate(moves, 1) if count), default=0)
        agreement = by_round["groups"][:, -1]
        known = "" if np.isnan(agreement).any() else f"{(agreement == 1).sum()} of {options.seeds}"
        cells = [known, str(last_move) if last_move else "none", shown(tests)]
        ends.append(f"| {work} | {by_round['moved'].shape[1]} | {' | '.join(cells)} |")
        for number in options.rounds:
            if number > by_round["moved"].shape[1]:
                continue
            objective, moves, accuracy = (
                by_round[name][:, number - 1].mean() for name in ("objective", "moved", "accuracy")
            )
            ways.append(
                f"| {work} | {number} | {objective:.3g} | {moves:.1f} | {100 * accuracy:.1f} |"
            )
    print("| local work | rounds | groups found | last round with a move | test accuracy |")
    print("|---|---|---|---|---|")
    print("\n".join(ends))
    print("\n| local work | after round | objective | moved | validation accuracy |")
    print("|---|---|---|---|---|")
    print("\n".join(ways), flush=True)


def main() -> None:
    """Print the table that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True)
    movement, centers = commands.add_parser("movement"), commands.add_parser("centers")
    commands.add_parser("traffic").set_defaults(run=print_traffic)
    for command in (movement, centers):
        command.add_argument("--config", required=True, help="of data, clients and Trainer")
        command.add_argument("--set", nargs="+", default=[], metavar="OPTION=VALUE")
        command.add_argument("--seeds", type=int, default=5)
    movement.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    movement.add_argument("--target", type=float, default=0.9, help="mean validation accuracy")
    movement.set_defaults(run=print_movement)
    centers.add_argument(
        "--work",
        nargs="+",
        default=["model.local_epochs=5"],
        metavar="OPTION=VALUE,...",
        help="kinds of local work",
    )
    centers.add_argument("--rounds", type=int, nargs="+", default=[1, 2, 3, 5, 10, 20, 30])
    centers.set_defaults(run=print_centers)
    options = parser.parse_args()
    keep_freed_memory()
    quiet()
    options.run(options)


if __name__ == "__main__":
    main()
