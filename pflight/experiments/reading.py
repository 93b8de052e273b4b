"""Run folders that no comparison has made, and rows of several comparisons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pflight.config_files import check_config_file, load
from pflight.errors import ConfigurationError, described
from pflight.runs import CONFIG, RESULTS, RunFolder

from .comparison import Described, DescribedRow
from .measuring import ReadRun, Task, measured
from .outcome import Failure, Outcome, ResultError
from .plan import flat, key_of, without_place


def read_run(folder: Path) -> Outcome | Failure:
    """Return what a run has reached; its clients are tested if they have not been since.

    The settings are all of its options.
    """
    seed, options = _options_in(folder)
    settings = dict(flat(options))
    with suppress(ResultError):
        known = Outcome.read(folder / RESULTS)
        tested = known.last.per_client  # trials are not
        if tested and known.last.round == RunFolder(folder).rounds_saved():
            return replace(known, settings=settings)
    task = Task(key_of(options), "", {}, seed, [], str(folder))
    try:
        run = ReadRun(folder)
        outcome = measured(run, task, run.config.test.ckpt_path)
    except Exception as error:
        return Failure(task.key, folder.name, {}, seed, described(error), str(folder))
    with suppress(OSError):  # the folder may be somebody else's
        outcome.write(folder / RESULTS)
    return replace(outcome, settings=settings)


def told_apart(runs: Sequence[Outcome | Failure]) -> list[Outcome | Failure]:
    """Return runs with those options as settings by which runs of their method differ.

    Example:
        >>> told_apart([])
        []
    """
    found: list[Outcome | Failure] = []
    for run in runs:
        same = [one.settings for one in runs if one.method == run.method]
        found.append(replace(run, settings=_differing(run.settings, same)))
    return found


def tell_rows_apart(comparisons: Mapping[Path, Described]) -> dict[Path, Described]:
    """Return comparisons with other settings for rows that would look the same in one table.

    These are the options in which their configurations differ.

    Args:
        comparisons: Those of a table, by their folders.
    """
    rows = [(folder, row) for folder, found in comparisons.items() for row in found.rows]
    options = {row.key: _options_of(folder, row) for folder, row in rows}

    def apart(row: DescribedRow) -> DescribedRow:
        alike = {
            other.key: options[other.key]
            for _, other in rows
            if (other.method, other.settings) == (row.method, row.settings) and options[other.key]
        }
        if len(alike) < 2 or row.key not in alike:
            return row
        return replace(row, settings=_differing(alike[row.key], [*alike.values()]))

    return {
        folder: replace(found, rows=[apart(row) for row in found.rows])
        for folder, found in comparisons.items()
    }


def _options_of(folder: Path, row: DescribedRow) -> dict[str, Any]:
    """Return all options of a row's runs; none as long as there is no run."""
    runs = sorted((folder / row.folder).glob(f"*/{CONFIG}")) if row.folder else []
    return dict(flat(_options_in(runs[0].parent)[1])) if runs else {}


def _options_in(folder: Path) -> tuple[int, dict[str, Any]]:
    """Return the seed of a run, and its options but for that and its place."""
    check_config_file(str(folder / CONFIG))
    config = load((folder / CONFIG).read_text("utf-8-sig"))
    if any(not isinstance(config.get(name), Mapping) for name in ("model", "data", "trainer")):
        raise ConfigurationError(f"{folder / CONFIG} is not that of a run: it lacks options")
    seed = int(config.get("seed_everything") or 0)
    return seed, _without_seed(without_place(config), seed)


def _without_seed(value: Any, seed: int) -> Any:
    """Return options without the seed of the run, which the command line has passed on."""
    if isinstance(value, list):
        return [_without_seed(item, seed) for item in value]
    if not isinstance(value, Mapping):
        return value
    left = {name: _without_seed(part, seed) for name, part in value.items()}
    return left | {"seed": None} if left.get("seed") == seed else left


def _differing(options: dict[str, Any], same: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return those options that are not the same in all."""
    names = dict.fromkeys(name for one in same for name in one)
    return {n: options.get(n) for n in names if any(one.get(n) != same[0].get(n) for one in same)}
