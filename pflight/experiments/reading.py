"""Run folders that no comparison has made."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pflight.config_files import check_config_file, load
from pflight.errors import ConfigurationError, described
from pflight.runs import CONFIG, RESULTS, RunFolder

from .comparison import Ended
from .measuring import ReadRun, Task, measured
from .outcome import Failure, Outcome, ResultError
from .plan import APART, key_of

def read_run(folder: Path) -> Outcome | Failure:
    """Return what a run has reached; its clients are tested if they have not been since."""
    check_config_file(str(folder / CONFIG))
    config = load((folder / CONFIG).read_text("utf-8-sig"))
    seed = int(config.get("seed_everything") or 0)
    rounds = RunFolder(folder).rounds_saved()
    with suppress(ResultError):
        known = Outcome.read(folder / RESULTS)
        if known.last.round == rounds:
            return known
    options = _options(config)
    task = Task(key_of(options), "", options, seed, [], str(folder))
    try:
        run = ReadRun(folder)
        outcome = measured(run, task, run.config.test.ckpt_path)
    except Exception as error:
        return Failure(task.key, folder.name, {}, seed, described(error), str(folder))
    with suppress(OSError):  # the folder may be somebody else's
        outcome.write(folder / RESULTS)
    return outcome
