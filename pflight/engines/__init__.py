"""Engines: they run the local training of a cohort."""

from pflight.engines.alone.engine import Engine, SequentialEngine
from pflight.engines.stacked.engine import VectorizedEngine
from pflight.states.updates import ClientFailure, ClientUpdates, Evaluation, Kept

from .choice import Choice, EngineName, build_engine
from .client_setup import ClientSetup

__all__ = [
    "Choice",
    "ClientFailure",
    "ClientSetup",
    "ClientUpdates",
    "Engine",
    "EngineName",
    "Evaluation",
    "Kept",
    "SequentialEngine",
    "VectorizedEngine",
    "build_engine",
]
