"""One thread for every process of the tests: their tensors are tiny, and sums keep their order."""
# ruff: noqa: E402

import gc

gc.disable()  # until all tests are collected: a fifth of the time of the imports

import atexit
import logging
import os
import signal
import warnings
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import torch
from lightning.pytorch.trainer.connectors import callback_connector

os.environ["OMP_NUM_THREADS"] = "1"  # inherited by the processes that tests start
torch.set_num_threads(1)
LEFT_OUT = {*(Path(__file__).parent / "left_out.txt").read_text().splitlines()}
LONGEST = ("test_ranks.py", "test_algorithms.py")
CHOSEN = os.environ.get("PFLIGHT_METHOD")  # `./check method` makes the tests of one alone
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a script
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Each Trainer looks through all installed packages for these, which takes longer than a round.
callback_connector._load_external_callbacks = cache(callback_connector._load_external_callbacks)


def pytest_collection_finish() -> None:
    """Collect garbage from now on, without another look at what the imports have made."""
    gc.freeze()
    atexit.register(gc.unfreeze)
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what `./check` leaves out, and whole runs: coverage makes them half as long again."""
    items.sort(key=lambda item: item.path.name not in LONGEST)  # else they end alone
    unmatched: dict[str, set[str]] = {}
    covers = config.pluginmanager.hasplugin("pytest_cov")
    for item in items:
        if item.nodeid in LEFT_OUT:
            item.add_marker(pytest.mark.long)
        if short := item.get_closest_marker("short"):
            matching = {pattern for pattern in short.args if fnmatchcase(item.callspec.id, pattern)}
            if not matching:
                item.add_marker(pytest.mark.long)
            patterns = unmatched.setdefault(item.nodeid.partition("[")[0], {*short.args})
            patterns -= matching
        alike, fast = item.get_closest_marker("alike"), item.get_closest_marker("fast")
        if alike and not item.get_closest_marker("each"):
            item.add_marker(pytest.mark.long)
        if covers and item.path.parent == Path(__file__).parent and (alike or not fast):
            item.add_marker(pytest.mark.no_cover)
    wrong = {test: patterns for test, patterns in unmatched.items() if patterns}
    if wrong and not CHOSEN and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(f"the mark short names parameters that there are not: {wrong}")


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Undo what the command line, and Lightning after a Ctrl-C, do in a process of their own.

    Lightning's launcher also leaves LOCAL_RANK in the environment: ranks that a later test starts
    would wait for others.
    """
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    names = ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.pflight")
    loggers = [logging.getLogger(name) for name in names]
    for logger in loggers:
        logger.propagate = True  # to caplog; Lightning does so only if pytest is new
    levels, form = [logger.level for logger in loggers], warnings.formatwarning
    with mock.patch.dict(os.environ):
        yield
    warnings.formatwarning = form
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
    for signum, handler in handlers.items():
        signal.signal(signum, handler)
