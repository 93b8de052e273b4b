"""The papers' own experiments, with as many rounds as they say, beside the figures that they print.

    python benchmarks/papers.py run fedec --columns cifar10_100_2 --methods fedec_wo fedec_1 \
        --seeds 0 --root data --out runs/papers
    python benchmarks/papers.py write --out runs/papers

``papers.yaml`` has the experiments. A run is what ``pflight fit`` makes of a column's and a
method's configuration, in a run folder of its own, ``OUT/fedec/cifar10_100_2/fedec_1/0``. As they
were after each of the last rounds all clients are tested, and what each of them reached becomes a
file in the folder ``tests`` there. A run that was killed goes on with the same command; one that is
done is not made again. ``write`` puts the figures of the runs that are done into
``docs/papers.csv``, and makes the tables of ``docs/papers.md`` and of its appendix from these.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import yaml
from cells import cell
from claims import ENDS, Figure, all_published, claims_table, details_table, pairs
from lightning.pytorch.callbacks import LambdaCallback
from numpy.typing import NDArray
from quiet import quiet

from pflight.command.cli import FederationCLI
from pflight.errors import ConfigurationError
from pflight.experiments.statistics import differences

Test = dict[str, Any]
"""The tests after a round: its clients, and each client's accuracy and F1 by model."""
Values = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Values of clients, and what each weighs in their mean."""

CONFIGS = Path(str(files("pflight.configs")))
EXPERIMENTS: dict[str, Any] = yaml.safe_load(
    Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
)
MODELS = {"own": "", "server": "server/", "adapted": "finetuned/"}
FIGURE = ("experiment", "column", "method", "seed", "measure", "value")
MOST_SEEDS = 10
DIGITS = 4  # decimals in the csv, from which the tables are made
TABLE = re.compile(
    r"(<!-- (\w+)(?:/(\w+))?(?:: ([\w.]+ - [\w.]+|claims|details))? -->\n).*?(<!-- end -->)",
    re.DOTALL,
)
PAGES = [Path("docs/papers.md"), Path("docs/papers-appendix.md")]
QUIET = [
    "--trainer.accelerator=cpu",
    "--trainer.enable_progress_bar=false",
]


@dataclass(frozen=True)
class Run:
    """A method in a column of a paper's table, at one seed.

    Attributes:
        experiment: Its name in ``papers.yaml``.
        column: Likewise.
        method: Likewise.
        seed: Of partition, network, batches and cohorts.
        folder: Of all runs.
        rounds: How many there are.
    """

    experiment: str
    column: str
    method: str
    seed: int
    folder: Path
    rounds: int

    @property
    def path(self) -> Path:
        """The run folder."""
        return self.folder / self.experiment / self.column / self.method / str(self.seed)

    @property
    def tested(self) -> Path:
        """The folder of the tests."""
        return self.path / "tests"

    @property
    def tests(self) -> list[Test]:
        """The tests so far, by round."""
        return tests_in(self.tested)

    @property
    def missing(self) -> list[int]:
        """The rounds after which the clients are still to be tested."""
        tested = {test["round"] for test in self.tests}
        first = max(1, self.rounds - EXPERIMENTS[self.experiment]["tested"] + 1)
        return [last for last in range(first, self.rounds + 1) if last not in tested]

    def make(self, options: Sequence[str]) -> None:
        """Make the run, or what is left of it.

        Args:
            options: What is said beside the configurations.
        """
        missing = self.missing
        if not missing:
            return
        experiment = EXPERIMENTS[self.experiment]
        column, method = experiment["columns"][self.column], experiment["methods"][self.method]
        settings = [part.get("set", []) for part in (column, method)]
        settings.append(column.get("of", {}).get(self.method, []))
        command = [
            "fit",
            *(f"--config=configs/{part['config']}.yaml" for part in (column, method)),
            *(f"--{setup}" for setup in flat(settings)),
            *QUIET,
            *options,
            f"--seed_everything={self.seed}",
            f"--trainer.default_root_dir={self.path}",
            f"--trainer.max_epochs={self.rounds}",
            "--ckpt_path=last",
        ]
        started = time.process_time()
        with redirect_stdout(StringIO()):
            cli = TestedCLI(command, missing, self.tested)
        seconds = (time.process_time() - started) / cli.trained if cli.trained else None
        device = cli.trainer.strategy.root_device.type
        adapts = "adapted" in experiment["measures"]
        for last in missing[::-1]:
            is_last, kept = last == self.rounds, self.tested / f"{last}.ckpt"
            if not (len(cli.model.history) == last if is_last else kept.is_file()):
                raise SystemExit(f"{self.path} is past round {last}, which was not tested")
            with redirect_stdout(StringIO()):
                found = judged(cli, None if is_last else kept, is_last and adapts)
            clients = cli.model.history[-1].clients
            made = {"round": last, "clients": clients, "device": device, "seconds": seconds}
            test = {**made, **found}
            file = self.tested / f"{last}.json"
            file.parent.mkdir(exist_ok=True)
            unfinished = file.with_suffix(".partial")
            unfinished.write_text(json.dumps(test))
            unfinished.rename(file)
            kept.unlink(missing_ok=True)
            reached = f"round {last}: {mean(values_of(test, 'own')):.2f}"
            print(f"{time.strftime('%H:%M')} {self.path}, {reached}", flush=True)


class TestedCLI(FederationCLI):
    """Keeps the federation as it was after the rounds that are to be tested.

    Args:
        args: Of the command.
        rounds: The rounds.
        folder: Of what is kept, ``91.ckpt`` after round 91; the last round is not.

    Attributes:
        trained: Rounds that this process has trained.
    """

    def __init__(self, args: list[str], rounds: Sequence[int], folder: Path) -> None:
        self.rounds, self.kept, self.trained = rounds, folder, 0
        super().__init__(args)

    def before_fit(self) -> None:
        """Have the Trainer count and keep."""

        def keep(trainer: L.Trainer, _: L.LightningModule) -> None:
            self.trained += 1
            done = trainer.current_epoch + 1
            if done in self.rounds and done < trainer.max_epochs:
                trainer.save_checkpoint(self.kept / f"{done}.ckpt")

        self.trainer.callbacks.insert(0, LambdaCallback(on_train_epoch_end=keep))


def tests_in(folder: Path) -> list[Test]:
    """Return the tests in a folder, by round."""
    found = [json.loads(file.read_text()) for file in folder.glob("*.json")]
    return sorted(found, key=lambda test: test["round"])


def flat(names: list[Any]) -> list[str]:
    """Return the strings in a list and in the lists in it, which YAML can't join."""
    return [each for name in names for each in (flat(name) if isinstance(name, list) else [name])]


def left_out(spec: Mapping[str, Any], column: str) -> list[str]:
    """Return the methods that a column has only if they are asked for."""
    return flat(spec["columns"][column].get("without", []))


def is_no_reading(spec: Mapping[str, Any], column: str, method: str) -> bool:
    """Return whether a method, which is a reading of another one's run, is another one here."""
    return "run" in spec["methods"][method] and method in left_out(spec, column)


def judged(cli: FederationCLI, kept: Path | None, adapt: bool) -> Test:
    """Test all clients, and return each one's samples, and its accuracy and F1 by model.

    Args:
        cli: A run that has been trained.
        kept: The checkpoint of an earlier round to test in its place.
        adapt: Whether to test copies of what the server sends too, trained as in one more round.
    """
    federation, found = cli.model, {}
    training = federation.clients.training
    for models, epochs in ((("own", "server"), 0), (("adapted",), training.epochs)):
        if epochs and not adapt:
            break
        federation.clients.training = replace(training, finetune_epochs=epochs)
        cli.trainer.test(federation, datamodule=cli.datamodule, ckpt_path=kept, verbose=False)
        for model in models:
            metrics = federation.client_metrics("test", MODELS[model])
            found[model] = {name: metrics[name].tolist() for name in ("acc", "f1")}
            found["samples"] = metrics["num_samples"].tolist()
    return found


def values_of(
    test: Test, model: str, name: str = "acc", kind: str = "macro", ids: Sequence[int] | None = None
) -> Values:
    """Return the values of a metric of a model at the clients with test samples.

    Args:
        test: The tests after a round.
        model: ``"own"``, ``"server"`` or ``"adapted"``.
        name: ``"acc"`` or ``"f1"``.
        kind: ``"macro"``, or ``"micro"`` if clients weigh by their samples.
        ids: The clients, by default all.
    """
    values, samples = np.array(test[model][name]), np.array(test["samples"], dtype=np.float64)
    chosen = samples > 0
    if ids is not None:
        chosen &= np.isin(np.arange(len(values)), ids)
    return values[chosen], samples[chosen] if kind == "micro" else np.ones(chosen.sum())


def over_rounds(tests: Sequence[Test], model: str) -> Values:
    """Return the values of all clients, means over tests."""
    values, weights = zip(*(values_of(test, model) for test in tests), strict=True)
    return np.mean(values, axis=0), weights[0]


def in_the_round(tests: Sequence[Test], model: str) -> Values:
    """Return the values after each round of the clients that took part in it."""
    found = [values_of(test, model, ids=test["clients"]) for test in tests]
    values, weights = (np.concatenate(part) for part in zip(*found, strict=True))
    return values, weights


def after_last(tests: Sequence[Test], model: str, name: str, kind: str) -> Values:
    """Return the values of all clients after the last round."""
    return values_of(tests[-1], model, name, kind)


def mean(values: Values) -> float:
    """Return the mean of values, in percent."""
    return float(100 * np.average(values[0], weights=values[1]))


MEASURES: dict[str, tuple[str, Callable[[Sequence[Test], str], Values]]] = {
    "trained": ("trained in the round", in_the_round),
    "own": ("all clients", over_rounds),
    "adapted": ("adapted", lambda tests, _: after_last(tests, "adapted", "acc", "macro")),
    "last": ("last round", partial(after_last, name="acc", kind="macro")),
    **{
        f"{kind}_{name}": (f"{kind} {title}", partial(after_last, name=name, kind=kind))
        for kind, (name, title) in product(("micro", "macro"), {"acc": "acc.", "f1": "F1"}.items())
    },
}


def measured(run: Run) -> dict[Figure, float]:
    """Return what was measured of a run, for each method whose figures are those of the run."""
    spec, tests, found = EXPERIMENTS[run.experiment], run.tests, {}
    for name, method in spec["methods"].items():
        if method.get("run", name) == run.method and not is_no_reading(spec, run.column, name):
            model = method.get("model", "own")
            values = {
                measure: mean(MEASURES[measure][1](tests, model)) for measure in spec["measures"]
            }
            on_gpu = any(test.get("device") == "cuda" for test in tests)
            seconds = [test["seconds"] for test in tests if test["seconds"]]
            if on_gpu:
                values["gpu"] = 1.0
            elif seconds:
                values["seconds"] = min(seconds)  # none if it was stopped before its only test
            for measure, value in values.items():
                found[run.experiment, run.column, name, str(run.seed), measure] = value
    return found


def compared(one: Run, other: Run) -> dict[Figure, float]:
    """Return by how much a run is above another one of the same seed, which has the same cohorts.

    With the ends of a 95 % interval, if there are enough pairs of clients for one, by bootstrap
    over the pairs, which count alike: measures that weigh them are left out.
    """
    found, tests = {}, (one.tests, other.tests)
    for measure in EXPERIMENTS[one.experiment]["measures"]:
        (ours, weights), (theirs, _) = (MEASURES[measure][1](test, "own") for test in tests)
        if np.ptp(weights):
            continue
        (difference,) = differences([[100 * (ours - theirs)]])
        where = one.experiment, one.column, f"{one.method} - {other.method}", str(one.seed)
        found[*where, measure] = difference.mean
        if math.isfinite(difference.low):
            found |= {(*where, f"{measure}_{end}"): getattr(difference, end) for end in ENDS}
    return found


def with_interval(mean: float, low: float | None, high: float | None) -> str:
    """Return a mean with its interval, if it has one."""
    known = low is not None and high is not None and math.isfinite(low)
    return f"{mean:.2f}" + (f" ({low:.2f} to {high:.2f})" if known else "")


def printed_titles(spec: Mapping[str, Any], column: str, titles: Sequence[str]) -> list[str]:
    """Return the heads of a paper's figures in the table of a column.

    Args:
        spec: The experiment's part of ``papers.yaml``.
        column: Has figures of its own, names the column that it takes the place of, or neither.
        titles: Of the experiment's measures.
    """
    if "published" in spec["columns"][column]:
        return [spec["published_title"]]
    count = max(len(all_published(spec, column, name)) for name in spec["methods"])
    return ["paper"] * count if count < 2 else [f"paper, {title}" for title in titles[:count]]


def table(experiment: str, column: str, figures: dict[Figure, float]) -> str:
    """Return the table of a column, in which a method has a line once a run of it is done."""
    spec = EXPERIMENTS[experiment]
    titles = [MEASURES[measure][0] for measure in spec["measures"]]
    papers = printed_titles(spec, column, titles)
    head = ["method", *papers, *titles, "seeds", "s a round"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, method in spec["methods"].items():
        made: dict[str, list[float]] = {}
        for (*where, _, measure), value in figures.items():
            if where == [experiment, column, name]:
                made.setdefault(measure, []).append(value)
        if not made:
            continue
        cells = [method["title"]]
        figures_there = all_published(spec, column, name)[: len(papers)]
        cells += [*figures_there, *[""] * (len(papers) - len(figures_there))]
        found = [made.get(measure, []) for measure in spec["measures"]]
        cells += [cell(values, digits=2) for values in found]
        on_gpu = len(made.get("gpu", []))
        cells.append(f"{max(map(len, found))}{f' ({on_gpu} on a GPU)' if on_gpu else ''}")
        seconds = min(made.get("seconds", []), default=None)
        cells.append("" if seconds is None else f"{seconds:.{0 if seconds >= 10 else 1}f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def difference_table(experiment: str, column: str, pair: str, figures: dict[Figure, float]) -> str:
    """Return the table of the differences between two methods, with a line for each seed."""
    spec = EXPERIMENTS[experiment]
    lines = [["seed", *(MEASURES[measure][0] for measure in spec["measures"])]]
    lines.append(["---"] * len(lines[0]))
    by_measure: dict[str, list[float]] = {measure: [] for measure in spec["measures"]}
    for seed in sorted({where[3] for where in figures if where[:3] == (experiment, column, pair)}):
        cells = [seed]
        for measure, values in by_measure.items():
            where = experiment, column, pair, seed
            if (*where, measure) not in figures:
                cells.append("")
                continue
            values.append(figures[*where, measure])
            ends = (figures.get((*where, f"{measure}_{end}")) for end in ENDS)
            cells.append(with_interval(values[-1], *ends))
        lines.append(cells)
    if len(lines) > 3:  # below the head, several seeds
        lines.append(["mean", *(cell(values, digits=2) for values in by_measure.values())])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def write(options: argparse.Namespace) -> None:
    """Add the figures of all runs that are done to those of earlier ones, and make the tables."""
    kept = options.page[0].with_suffix(".csv")
    figures = figures_in(kept) if kept.is_file() else {}
    for experiment in EXPERIMENTS:
        spec = EXPERIMENTS[experiment]
        runs = runs_of(experiment, None, spec["methods"], range(MOST_SEEDS), options)
        done = {(run.column, run.method, run.seed): run for run in runs if not run.missing}
        asked = {
            (column, *pair) for column in spec["columns"] for pair in spec.get("differences", [])
        }
        asked |= {*pairs(spec)}
        for (column, method, seed), run in done.items():
            figures |= measured(run)
            for where, one, other in asked:
                if (where, one) == (column, method) and (column, other, seed) in done:
                    figures |= compared(run, done[column, other, seed])
    figures = {figure: round(value, DIGITS) for figure, value in sorted(figures.items())}
    with kept.open("w", newline="", encoding="utf-8") as file:
        rows = [(*figure, f"{value:.{DIGITS}f}") for figure, value in figures.items()]
        csv.writer(file, lineterminator="\n").writerows([FIGURE, *rows])

    for page in options.page:
        page.write_text(filled(page.read_text(encoding="utf-8"), figures), encoding="utf-8")


def figures_in(file: Path) -> dict[Figure, float]:
    """Return the figures in a file that :func:`write` has written."""
    with file.open(newline="", encoding="utf-8") as lines:
        return {tuple(row[:5]): float(row[5]) for row in list(csv.reader(lines))[1:]}


def filled(page: str, figures: dict[Figure, float]) -> str:
    """Return the text of a page with its tables made from figures."""

    def made(match: re.Match[str]) -> str:
        start, experiment, column, kind, end = match.groups()
        spec = EXPERIMENTS[experiment]
        if kind == "claims":
            titles = [MEASURES[measure][0] for measure in spec["claims"]["measures"]]
            content = claims_table(experiment, spec, figures, titles)
        elif kind == "details":
            titles = [MEASURES[measure][0] for measure in spec["measures"]]
            content = details_table(experiment, column, spec, figures, titles)
        elif kind:
            content = difference_table(experiment, column, kind, figures)
        else:
            content = table(experiment, column, figures)
        return f"{start}\n{content}\n\n{end}"

    return TABLE.sub(made, page)


def runs_of(
    experiment: str,
    columns: Sequence[str] | None,
    methods: Collection[str] | None,
    seeds: Sequence[int],
    options: argparse.Namespace,
) -> list[Run]:
    """Return the runs of an experiment, by default of all its columns and methods."""
    spec, found = EXPERIMENTS[experiment], []
    for seed, column in product(seeds, columns or spec["columns"]):
        without = left_out(spec, column)
        asked = methods or [name for name in spec["methods"] if name not in without]
        names = dict.fromkeys(
            spec["methods"][name].get("run", name)
            for name in asked
            if not is_no_reading(spec, column, name)
        )
        config = CONFIGS / f"{spec['columns'][column]['config']}.yaml"
        rounds = options.rounds or spec["columns"][column].get("rounds", spec.get("rounds"))
        rounds = rounds or yaml.safe_load(config.read_text())["trainer"]["max_epochs"]
        found += [Run(experiment, column, name, seed, options.out, rounds) for name in names]
    return found


def make(options: argparse.Namespace) -> None:
    """Make the runs that are asked for."""
    for kind in ("columns", "methods"):
        known = EXPERIMENTS[options.experiment][kind]
        if unknown := {*(getattr(options, kind) or ())} - {*known}:
            raise SystemExit(f"{options.experiment} has no {min(unknown)}: {kind} are {[*known]}")
    columns = EXPERIMENTS[options.experiment]["columns"]
    runs = runs_of(options.experiment, options.columns, options.methods, options.seeds, options)
    if not runs:
        raise SystemExit(f"{options.columns} leave out all of {options.methods}")
    for run in runs:
        folder = options.root and Path(options.root, columns[run.column].get("folder", ""))
        root = [f"data.root={folder}"] if folder else []
        run.make([f"--{setup}" for setup in (*root, *options.set)])


def main() -> None:
    """Make runs, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True)
    running, writing = commands.add_parser("run"), commands.add_parser("write")
    for command in (running, writing):
        command.add_argument("--out", type=Path, default=Path("runs/papers"))
        command.add_argument("--rounds", type=int, help="by default the experiment's own")
    running.add_argument("experiment", choices=EXPERIMENTS)
    running.add_argument("--columns", nargs="+", help="by default all")
    running.add_argument("--methods", nargs="+", help="by default all")
    running.add_argument("--seeds", type=int, nargs="+", default=[0])
    running.add_argument(
        "--root",
        help="folder of the data sets, by default data; LEAF's are in its femnist and celeba",
    )
    running.add_argument("--set", nargs="+", default=[], metavar="OPTION=VALUE")
    running.set_defaults(do=make)
    writing.add_argument(
        "--page", type=Path, nargs="+", default=PAGES, help="the csv is beside the first"
    )
    writing.set_defaults(do=write)
    options = parser.parse_args()
    quiet()
    try:
        options.do(options)
    except ConfigurationError as error:
        raise SystemExit(f"papers.py: error: {error}") from None


if __name__ == "__main__":
    main()
