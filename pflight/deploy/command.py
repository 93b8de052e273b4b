"""Run ``pflight deploy``, with one line for each error that a user can fix."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pkgutil import resolve_name

from pflight.command.process import configuration_error, fail
from pflight.errors import ConfigurationError
from pflight.runs.allocator import keep_freed_memory


def deploy(options: argparse.Namespace) -> None:
    """Run ``pflight deploy``. A command imports Flower only if it needs it."""
    keep_freed_memory()  # this process belongs to the run
    try:
        if not (find_spec("flwr") and find_spec("trustme")):
            raise ConfigurationError("pflight deploy needs Flower: pip install 'pflight[flower]'")
        resolve_name(f"pflight.deploy.{options.work}:run")(options)
    except Exception as error:
        if (cause := configuration_error(error)) is None:
            raise
        fail(str(cause))
