"""The commands ``compare`` and ``report``, with one line for each error that a user can fix."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from pflight.command.process import fail, quieten
from pflight.errors import ConfigurationError
from pflight.runs.files import full_disk

from .comparing import compare, report
from .outcome import ResultError
from .plan import values_of
from .tuning import Tuning


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
