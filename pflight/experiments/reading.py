"""Run folders that no comparison has made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from pflight.config_files import check_config_file, load
from pflight.errors import ConfigurationError, described
from pflight.runs import CONFIG, RESULTS, RunFolder

from .measuring import ReadRun, Task, measured
from .outcome import Failure, Outcome, ResultError
from .plan import flat, key_of, without_place


def read_run(folder: Path) -> Outcome | Failure:
    """Return what a run has reached; its clients are tested if they have not been since.

    The settings are all of its options.
    """
    check_config_file(str(folder / CONFIG))
    config = load((folder / CONFIG).read_text("utf-8-sig"))
    if any(not isinstance(config.get(name), Mapping) for name in ("model", "data", "trainer")):
        raise ConfigurationError(f"{folder / CONFIG} is not that of a run: it lacks options")
    seed, options = int(config.get("seed_everything") or 0), without_place(config)
    for part in (options["model"], options["data"]):
        if (part.get("init_args") or {}).get("seed") == seed:  # as the command line passes it on
            part["init_args"] = {**part["init_args"], "seed": 0}
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
        names = dict.fromkeys(name for settings in same for name in settings)
        differing = [n for n in names if any(s.get(n) != same[0].get(n) for s in same)]
        settings = {name: run.settings.get(name) for name in differing}
        found.append(replace(run, settings=settings))
    return found
