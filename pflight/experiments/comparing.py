"""Comparisons and reports, from Python and from the command line."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from pflight.command.process import fail, quieten
from pflight.command.shipped import find_config
from pflight.errors import ConfigurationError
from pflight.runs.files import full_disk
from pflight.runs.folder import CONFIG

from .comparison import FILE, Comparison, Described, Ended, runs_of
from .jobs import Jobs
from .outcome import ResultError
from .plan import Method, Plan, methods_of, of_data, values_of
from .progress import RunsProgress
from .reading import read_run, tell_rows_apart, told_apart
from .results import Results
from .tuning import Tuning

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def compare(
    configs: Paths,
    methods: Sequence[str],
    *,
    seeds: int = 3,
    settings: Mapping[str, Sequence[Any]] | None = None,
    tuning: Tuning | None = None,
    out: str | os.PathLike[str] = "results",
    jobs: int = 1,
    baseline: str | None = None,
    target: float | None = None,
    console: Console | None = None,
) -> Results:
    """Compare methods: each is trained with every setting and seed, as by ``pflight fit``.

    At a seed all methods have the same partition, initial weights, cohorts and batches. Each run
    has its own folder in ``out``. Finished runs are not repeated. A stopped or killed comparison
    continues from the last round of each run. Methods, settings and seeds can be added. Several
    processes, also on several machines, can work on the same comparison.

    Args:
        configs: Configurations of data, clients and trainer, all but the method.
        methods: Names of shipped methods, or paths of other methods' configurations.
        seeds: Number of seeds, from 0.
        settings: Values of options, such as ``{"model.local_epochs": [1, 5]}``; each combination is
            a row of the table, for the methods that have the options. Options of the data have one
            value.
        tuning: How the options in the methods' search spaces are chosen; by default not at all.
        out: The folder.
        jobs: Number of parallel runs, each in its own process.
        baseline: The method to compare the others with, by default the best.
        target: A value of the metric that chooses rounds. The table shows the rounds and bytes
            until this value.
        console: The console for progress; standard output by default.

    Returns:
        The results. They are also saved in ``out``, as tables and figures.

    Raises:
        ConfigurationError: If an option, a configuration or the folder is wrong. Then nothing has
            been started. A run that fails later becomes a row with the reason.
    """
    chosen = methods_of(methods)
    fixed, varied = of_data(settings or {})
    comparison = Comparison(
        Plan([str(path) for path in _listed(configs)], fixed),
        chosen,
        varied,
        seeds=seeds,
        tuning=tuning,
        folder=Path(os.path.expanduser(out)),
        jobs=jobs,
    )
    baseline = _title(baseline, chosen)
    comparison.results(baseline=baseline)  # raises if there is no such row
    comparison.save()
    comparison.forget_failures()
    with RunsProgress(comparison.count, lambda: comparison.ended, console or Console()) as shown:
        if comparison.left_out:
            shown.say(
                f"not tuned, since no run has it: {', '.join(comparison.left_out)}; the ranges of "
                "your own module's options go into search_space in your configuration"
            )
        Jobs(comparison, jobs, shown).work()
    results = comparison.results(baseline=baseline, target=target)
    results.save(comparison.folder)
    return results


def report(folders: Paths, *, baseline: str | None = None, target: float | None = None) -> Results:
    """Return the results of run folders or of comparisons.

    Runs of one configuration with several seeds are a row of the table. The names of a method's
    rows contain the differing options. A run outside of any comparison is tested first, after its
    last round and at its best one. The results are kept in its folder.

    Args:
        folders: Run folders, with their ``config.yaml`` and checkpoints, or those of comparisons.
        baseline: As in :func:`compare`.
        target: As in :func:`compare`.

    Raises:
        ConfigurationError: If a folder has neither a run nor a comparison.
    """
    comparisons: dict[Path, Described] = {}
    single: list[Ended] = []
    for folder in (Path(os.path.expanduser(folder)) for folder in _listed(folders)):
        if (folder / FILE).is_file():
            comparisons[folder] = Described.read(folder / FILE)
        elif (folder / CONFIG).is_file():
            single.append(read_run(folder))
        else:
            raise ConfigurationError(f"{folder} has neither a {CONFIG} of a run nor a {FILE}")
    found = told_apart(single)
    for folder, described in tell_rows_apart(comparisons).items():
        found += runs_of(described, folder)
    if find_config(f"configs/algorithm/{baseline}.yaml"):
        baseline = _title(baseline, methods_of([str(baseline)]))
    return Results(found, baseline=baseline, target=target)


def _title(name: str | None, methods: Iterable[Method]) -> str | None:
    """Return the title in tables of a method, by its name; without a title, the name."""
    return next((method.title for method in methods if method.name == name), name)


def _listed(paths: Paths) -> Sequence[str | os.PathLike[str]]:
    return [paths] if isinstance(paths, str | os.PathLike) else paths


def compare_and_print(options: argparse.Namespace) -> None:
    """Run ``pflight compare``. The exit status is 1 if every run failed."""
    console = Console()
    with _in_one_line():
        results = compare(
            options.config,
            options.methods,
            seeds=options.seeds,
            settings=values_of(options.set),
            tuning=None if options.tune is None else Tuning.of(options.tune),
            out=options.out,
            jobs=options.jobs,
            baseline=options.baseline,
            target=options.target,
            console=console,
        )
    console.print(results)
    console.print(
        f"pflight: tables and figures are in {options.out}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    if not results.findings.finished:
        raise SystemExit(1)


def report_and_print(options: argparse.Namespace) -> None:
    """Run ``pflight report``."""
    quieten()
    with _in_one_line():
        results = report(options.folders, baseline=options.baseline, target=options.target)
        if options.out is not None:
            results.save(Path(options.out))
    Console().print(results)


@contextmanager
def _in_one_line() -> Iterator[None]:
    """Print an error that a user can fix as one line, and exit with status 2."""
    try:
        yield
    except (ConfigurationError, ResultError) as error:
        fail(str(error))
    except OSError as error:
        full = full_disk(error) is not None
        if not (full or error.filename):
            raise
        where = f" ({error.filename})" if error.filename else ""
        more = ": the same command continues" if full else ""
        fail(f"{error.strerror}{where}{more}", 1 if full else 2)
