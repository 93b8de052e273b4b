"""Read run folders outside of comparisons, and rows of several comparisons."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pflight.command.config_files import check_config_file, load
from pflight.errors import ConfigurationError, described
from pflight.runs.checkpoint import read_checkpoint
from pflight.runs.folder import CONFIG, RESULTS, RunFolder

from .comparison import FILE, Described, DescribedRow, Ended
from .measuring import ReadRun, Task, measured
from .outcome import Failure, Outcome, ResultError, Waiting
from .plan import flat, key_of, without_place


def read_run(folder: Path) -> Ended:
    """Return a run's results, and test its clients first if necessary.

    Its settings are all its options. A run with rounds left counts as waiting.
    """
    seed, options = _options_in(folder)
    settings, task = dict(flat(options)), Task(key_of(options), "", {}, seed, [], str(folder))
    compared = any((above / FILE).is_file() for above in folder.resolve().parents)
    with suppress(ResultError):
        known = Outcome.read(folder / RESULTS)
        tested = known.last.per_client and (compared or known.key == task.key)  # trials are not
        if tested and known.last.round == RunFolder(folder).rounds_saved():
            return replace(known, settings=settings)
    whose = task.key, folder.name, dict[str, Any](), seed
    try:
        run = ReadRun(folder)
        if left := _left_of(run):
            warnings.warn(
                f"{folder} counts as running: {left} of its rounds are missing; --ckpt_path last "
                "continues it",
                stacklevel=2,
            )
            return Waiting(*whose)
        outcome = measured(run, task, run.config.test.ckpt_path)
    except Exception as error:
        return Failure(*whose, described(error), str(folder))
    if not compared:  # a comparison keeps its own results
        with suppress(OSError):  # the folder may be somebody else's
            outcome.write(folder / RESULTS)
    return replace(outcome, settings=settings)


def _left_of(run: ReadRun) -> int:
    """Return the number of a run's missing rounds; 0 if it was stopped early.

    A run that does not save each round may be complete.
    """
    if not (run.folder.checkpoints / "last.ckpt").is_file():
        return 0
    saved = read_checkpoint(run.config.test.ckpt_path)
    stopped = [state.get("stopped_epoch") for state in saved["callbacks"].values()]
    if saved["epoch"] and saved["epoch"] in stopped:
        return 0
    limits = (run.trainer.max_epochs, run.trainer.max_steps)
    rounds = min((n for n in limits if n is not None and n >= 0), default=0)
    return max(0, rounds - saved["global_step"])


def told_apart(runs: Sequence[Ended]) -> list[Ended]:
    """Return runs, with the options that differ between runs of their method as settings.

    Example:
        >>> told_apart([])
        []
    """
    found: list[Ended] = []
    for run in runs:
        same = [one.settings for one in runs if one.method == run.method]
        found.append(replace(run, settings=_differing(run.settings, same)))
    return found


def tell_rows_apart(comparisons: Mapping[Path, Described]) -> dict[Path, Described]:
    """Return comparisons with other settings for rows that would look the same in one table.

    These are the options that differ between their configurations.

    Args:
        comparisons: The comparisons of a table, by their folders.
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
    """Return the seed of a run, and its options without seed and place."""
    check_config_file(str(folder / CONFIG))
    config = load((folder / CONFIG).read_text("utf-8-sig"))
    if any(not isinstance(config.get(name), Mapping) for name in ("model", "data", "trainer")):
        raise ConfigurationError(f"{folder / CONFIG} is not of a run: it lacks options")
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
    """Return the options that are not the same in all."""
    names = dict.fromkeys(name for one in same for name in one)
    return {n: options.get(n) for n in names if any(one.get(n) != same[0].get(n) for one in same)}
