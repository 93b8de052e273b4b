"""The methods of ``configs/algorithm`` on Digits and Fashion-MNIST: a page of tables and figures.

    python benchmarks/methods.py --root data --page docs/comparison.md
    python benchmarks/methods.py --tasks digits --partitions classes4 --seeds 1 --methods pfedme \
        --set trainer.callbacks.lam=1

A run is what ``pflight fit`` makes of a data set's and a method's configuration. At a seed, all
methods see the same partition, initial network and batches. Of 25 clients, 20 train and five are
the newcomers of the test. Clients are tested after the last round, and once more with the
checkpoint of the round with the best macro validation accuracy.

Each run that ends is a line of the file ``--out``, from which the page is written, and is not made
again as long as its configuration stays the same: a command may be stopped and started again. With
``--set``, methods run with other settings, to be chosen by the validation accuracy that is printed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import statistics
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib.resources import files
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

import yaml
from accuracy import cell
from peers.table import save

from pflight.cli import FederationCLI
from pflight.federation import Federation

Result = dict[str, Any]
"""A line of the file: of which run, its cost, and what it reached at both moments."""

CONFIGS = Path(str(files("pflight.configs")))
LOCAL, TUNED, BELOW, MACRO = "Local", "FedAvg + fine-tuning", "below Local", "test/macro_acc"
EPOCHS, TUNING, CLUSTERS = 2, 5, 8
EVERY = 5  # rounds between validations
VARIANTS = (
    "apfl_adaptive",
    "fedec_l2",
    "fedec_wo",
    "fedrod_hyper",
    "fesem_auto",
    "perfedavg_hf",
    "pfedhn_pc",
)
# These networks have no BatchNorm, without which FedBN is FedAvg; fedavg is fine-tuned as well.
LEFT_OUT = {"fedbn", "fedavg_ft", *VARIANTS}
AS_WELL = {"fedavg": TUNED}
INSTEAD = {"reptile": "Reptile + fine-tuning"}  # a start for a few steps, judged after them
CLUSTERED = "fesem", "fesem_ma", "ifca", "trimmed_kmeans"
OPTIONS = {  # what configurations leave to the data set; chosen on validation, as by --set
    **{name: [f"trainer.callbacks.num_clusters={CLUSTERS}"] for name in CLUSTERED},
    TUNED: [f"model.finetune_epochs={TUNING}"],
    "reptile": [f"model.finetune_epochs={TUNING}"],
    "fedrep": [f"model.local_epochs={3 * EPOCHS}", f"trainer.callbacks.head_epochs={2 * EPOCHS}"],
}
PARTS = {"perfedavg": 2, "perfedavg_hf": 3}  # of a batch, which is larger by so much
COMMON = [
    "data.num_clients=25",
    "data.holdout_clients=0.2",
    "data.val_fraction=0.2",
    "data.test_fraction=0.3",
    "data.cohort_size=null",
    f"model.local_epochs={EPOCHS}",
]
QUIET = [
    "--trainer.accelerator=cpu",
    "--trainer.logger=false",
    "--trainer.enable_progress_bar=false",
    "--trainer.profiler=simple",
]
PARTITIONS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "classes4": ("4 classes each", "ClassesPerClient", {"k": 4}),
    "dominant2": ("2 dominant classes", "DominantClasses", {"k": 2}),
    "dirichlet": ("Dirichlet(0.5)", "Dirichlet", {"alpha": 0.5}),
}
MOMENTS = {"chosen": "round chosen on validation", "last": "last round"}
MEASURES = {
    "macro acc.": MACRO,
    "micro acc.": "test/micro_acc",
    "macro F1": "test/macro_f1",
    "micro F1": "test/micro_f1",
    "worst decile": "test/worst_decile_acc",
    "newcomers": "test/new/macro_acc",
}
COSTS = {"megabytes": "MB", "seconds": "s"}


@dataclass(frozen=True)
class Task:
    """A data set, with the network of its clients."""

    title: str
    rounds: int
    batch_size: int
    samples: int | None
    options: Sequence[str] = ()


TASKS = {
    "digits": Task("Digits", 40, 10, None),
    "fashion_mnist": Task(
        "Fashion-MNIST",
        25,
        20,
        200,
        [
            "model.client.optimizer.lr=0.1",
            "model.client.network=pflight.models.MLP",
            "model.client.network.in_features=784",
            "model.client.network.hidden=[100]",
            "model.client.network.num_classes=10",
        ],
    ),
}


@dataclass(frozen=True)
class Method:
    """A configuration, with the settings that it leaves to the data set."""

    title: str
    config: Path
    options: Sequence[str] = ()


def methods_of(names: Iterable[str] | None) -> list[Method]:
    """Return the methods of configurations, by default most; their first lines have the titles."""
    found = []
    for config in sorted((CONFIGS / "algorithm").glob("*.yaml")):
        name = config.stem
        if name in LEFT_OUT if names is None else name not in names:
            continue
        title = config.read_text().partition(":")[0].removeprefix("# ")
        found.append(Method(INSTEAD.get(name, title), config, OPTIONS.get(name, ())))
        if name in AS_WELL:
            found.append(Method(AS_WELL[name], config, OPTIONS[AS_WELL[name]]))
    return found


def results_of(options: argparse.Namespace) -> list[Result]:
    """Make the runs that the file lacks, and return all that are asked for."""
    lines = options.out.read_text().splitlines() if options.out.is_file() else []
    done = {line["id"]: line for line in map(json.loads, lines)}
    found = []
    methods = methods_of(options.methods)
    for seed, name, partition, method in product(
        range(options.seeds), options.tasks, options.partitions, methods
    ):
        task = TASKS[name]
        arguments = arguments_of(task, partition, method, options.set)
        rounds = options.rounds or task.rounds
        arguments += [f"--trainer.max_epochs={rounds}", f"--seed_everything={seed}"]
        arguments += [f"--trainer.check_val_every_n_epoch={min(EVERY, rounds)}"]
        data = CONFIGS / "data" / f"{name}.yaml"
        configs = [yaml.safe_load(path.read_text()) for path in (data, method.config)]
        known = json.dumps([configs, arguments])
        key = hashlib.sha256(known.encode()).hexdigest()[:16]
        if key not in done:
            root = [f"--data.root={options.root}"] if name == "fashion_mnist" else []
            what = {"id": key, "task": name, "partition": partition, "method": method.title}
            with tempfile.TemporaryDirectory() as folder:
                both = [f"--config={data}", f"--config={method.config}"]
                made = run([*both, *arguments, *root], folder)
            done[key] = {**what, "seed": seed, "set": options.set, **made}
            with options.out.open("a") as file:
                file.write(json.dumps(done[key]) + "\n")
        found.append({**done[key], "method": method.title})
        best, last = (100 * done[key][moment]["val/macro_acc"] for moment in MOMENTS)
        print(
            f"{name}, {partition}, seed {seed}, {method.title}: validation {best:.1f} after "
            f"{done[key]['chosen']['round']} rounds, {last:.1f} after the last",
            flush=True,
        )
    return found


def arguments_of(task: Task, partition: str, method: Method, changes: list[str]) -> list[str]:
    """Return what is said beside the configurations of a data set and a method."""
    _, kind, options = PARTITIONS[partition]
    options = {**options, "samples_per_client": task.samples}
    batch_size = task.batch_size * PARTS.get(method.config.stem, 1)
    settings = [*COMMON, f"data.batch_size={batch_size}", *task.options, *method.options, *changes]
    dealt = json.dumps({"class_path": kind, "init_args": options})
    return [f"--data.partition={dealt}", *(f"--{setting}" for setting in settings)]


def run(arguments: list[str], folder: str) -> Result:
    """Train as ``pflight fit`` does; test after the last round and at the best of validation."""
    with redirect_stdout(StringIO()):
        cli = FederationCLI(["fit", *arguments, *QUIET, f"--trainer.default_root_dir={folder}"])
        history = list(cli.model.history)
        seconds = cli.trainer.profiler.recorded_durations["run_training_batch"]
        last = judge(cli, None)
        chosen = judge(cli, str(Path(folder, "checkpoints", "best.ckpt")))
    moved = sum(entry.bytes_down + entry.bytes_up for entry in history)
    return {
        "megabytes": moved / sum(len(entry.clients) for entry in history) / 1e6,
        "seconds": statistics.median(seconds),
        "failed": sum(len(entry.failed) for entry in history),
        "last": last,
        "chosen": chosen,
    }


def judge(cli: FederationCLI, checkpoint: str | None) -> Result:
    """Return the measures on test samples, and the accuracy of each client that trained."""
    federation: Federation = cli.model
    (values,) = cli.trainer.test(
        federation, datamodule=cli.datamodule, ckpt_path=checkpoint, verbose=False
    )
    accuracies = federation.client_metrics("test")["acc"]
    return {
        "round": len(federation.history),
        "val/macro_acc": federation.history[-1].metrics["val/macro_acc"],
        "clients": accuracies[federation.clients.trainable].tolist(),
        **{tag: values[tag] for tag in MEASURES.values()},
    }


class Comparison:
    """The results on one data set: tables, sentences and a figure.

    Args:
        results: Lines of all its methods, partitions and seeds.
    """

    def __init__(self, results: list[Result]) -> None:
        self.lines = {(r["method"], r["partition"], r["seed"]): r for r in results}
        names, partitions, seeds = (
            list(dict.fromkeys(keys)) for keys in zip(*self.lines, strict=True)
        )
        self.partitions, self.seeds = partitions, seeds
        self.measures = {**MEASURES, **({BELOW: BELOW} if LOCAL in names else {})}
        means = {name: statistics.mean(self.average(name, MACRO)) for name in names}
        self.methods = sorted(names, key=lambda name: -means[name])

    def at_seeds(
        self, method: str, partition: str, measure: str, moment: str = "chosen"
    ) -> list[float]:
        """Return a measure of a method at each seed; shares are in percent."""
        found = []
        for seed in self.seeds:
            line = self.lines[method, partition, seed]
            if measure == BELOW:
                alone = self.lines[LOCAL, partition, seed][moment]["clients"]
                pairs = zip(line[moment]["clients"], alone, strict=True)
                found.append(100 * statistics.mean(own < other for own, other in pairs))
            else:
                found.append(100 * line[moment][measure])
        return found

    def average(self, method: str, measure: str, moment: str = "chosen") -> list[float]:
        """Return the mean over partitions of a measure at each seed."""
        columns = [self.at_seeds(method, part, measure, moment) for part in self.partitions]
        return [statistics.mean(values) for values in zip(*columns, strict=True)]

    def summary(self) -> list[str]:
        """Return the macro accuracy on each partition, and means over partitions."""
        averaged = [name for name in self.measures if name not in ("macro acc.", "micro acc.")]
        titles = [PARTITIONS[part][0] for part in self.partitions]
        lines = header(["method", *titles, "last round", *averaged, *COSTS.values()])
        for method in self.methods:
            cells = [cell(self.at_seeds(method, part, MACRO)) for part in self.partitions]
            cells.append(cell(self.average(method, MACRO, "last")))
            cells += [cell(self.average(method, self.measures[name])) for name in averaged]
            runs = [self.lines[key] for key in self.lines if key[0] == method]
            for cost in COSTS:
                cells.append(f"{statistics.median(line[cost] for line in runs):.3f}")
            lines.append(f"| {method} | {' | '.join(cells)} |")
        return lines

    def whole(self, partition: str, moment: str) -> list[str]:
        """Return all measures on one partition, at one of the two moments."""
        lines = header(["method", *self.measures])
        for method in self.methods:
            tags = self.measures.values()
            cells = [cell(self.at_seeds(method, partition, tag, moment)) for tag in tags]
            lines.append(f"| {method} | {' | '.join(cells)} |")
        return lines

    def sentences(self, rival: str) -> list[str]:
        """Say which methods are below one that every method should beat."""
        lines = [f"Below {rival}, in macro accuracy:", ""]
        for part in self.partitions:
            mean = {
                name: statistics.mean(self.at_seeds(name, part, MACRO)) for name in self.methods
            }
            below = [name for name in mean if mean[name] < mean[rival]]
            counted = f"{len(below)} of {len(mean) - 1}"
            lines.append(f"- {PARTITIONS[part][0]}, {counted}: {', '.join(below) or 'none'}.")
        return lines

    def draw(self, path: Path) -> None:
        """Draw the macro accuracy of all methods, with its range over seeds."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 1.6 + 0.23 * len(self.methods)), layout="constrained")
        axes = figure.subplots(1, len(self.partitions), sharey=True, squeeze=False)[0]
        for panel, part in zip(axes, self.partitions, strict=True):
            for rival, color, style in ((LOCAL, "#555555", "--"), (TUNED, "#d55e00", "-")):
                if rival in self.methods:
                    mean = statistics.mean(self.at_seeds(rival, part, MACRO))
                    panel.axvline(mean, color=color, linestyle=style, linewidth=1, label=rival)
            for place, method in enumerate(self.methods):
                values = self.at_seeds(method, part, MACRO)
                last = statistics.mean(self.at_seeds(method, part, MACRO, "last"))
                panel.plot([min(values), max(values)], [place] * 2, color="#56b4e9", linewidth=2.5)
                panel.plot(last, place, "o", mfc="none", mec="#0072b2", label="last round")
                chosen = "round chosen on validation"
                panel.plot(statistics.mean(values), place, "o", color="#0072b2", label=chosen)
            panel.set_title(PARTITIONS[part][0], fontsize=10)
            panel.grid(axis="x", alpha=0.25)
            panel.spines[["top", "right"]].set_visible(False)
        axes[0].set_yticks(range(len(self.methods)), self.methods)
        axes[0].set_ylim(len(self.methods) - 0.4, -0.6)
        figure.supxlabel("macro test accuracy, %", fontsize=10)
        handles, labels = axes[0].get_legend_handles_labels()
        named = dict(zip(labels, handles, strict=True))
        options = {"loc": "outside upper center", "ncols": 4, "frameon": False}
        figure.legend(list(named.values()), list(named), **options)
        figure.savefig(path, dpi=110)


def header(columns: list[str]) -> list[str]:
    """Return the first two lines of a table."""
    return [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]


def write(options: argparse.Namespace, results: list[Result]) -> None:
    """Write the summaries with their figures, and the tables of all measures."""
    page, tables = [], []
    (options.page.parent / "images").mkdir(exist_ok=True)
    for name in options.tasks:
        comparison = Comparison([line for line in results if line["task"] == name])
        title, image = TASKS[name].title, f"images/comparison-{name}.png"
        comparison.draw(options.page.parent / image)
        page += [f"## {title}", "", f"![Macro accuracy of all methods on {title}]({image})", ""]
        page += [*comparison.summary(), ""]
        for rival in (TUNED, LOCAL):
            page += [*comparison.sentences(rival), ""] if rival in comparison.methods else []
        for part in options.partitions:
            for moment, moment_title in MOMENTS.items():
                tables += [f"## {title}, {PARTITIONS[part][0]}, {moment_title}", ""]
                tables += [*comparison.whole(part, moment), ""]
    save(options.page, page[:-1])
    save(options.page.with_stem(f"{options.page.stem}-tables"), tables[:-1])


def main() -> None:
    """Make the runs, and write the pages and figures if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--partitions", nargs="+", choices=PARTITIONS, default=list(PARTITIONS))
    parser.add_argument(
        "--methods", nargs="+", help="names of configurations, by default all but variants"
    )
    parser.add_argument("--set", nargs="+", default=[], metavar="OPTION=VALUE")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, help="by default those of the data set")
    parser.add_argument("--root", default="data", help="folder of Fashion-MNIST")
    parser.add_argument("--out", type=Path, default=Path("methods.jsonl"), help="results so far")
    parser.add_argument("--page", type=Path, help="PAGE.md: with PAGE-tables.md and images/")
    options = parser.parse_args()
    for name in ("lightning.fabric", "lightning.pytorch", "lightning.pytorch.pflight"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    results = results_of(options)
    if options.page:
        write(options, results)


if __name__ == "__main__":
    main()
