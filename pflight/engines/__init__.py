"""How a cohort's local training runs."""

from .choice import Choice, EngineName, build_engine
from .modules import ModuleEngine
from .sequential import SequentialEngine
from .updates import ClientFailure, ClientUpdates, Evaluation, Kept
from .vectorized import VectorizedEngine

__all__ = [
    "Choice",
    "ClientFailure",
    "ClientUpdates",
    "EngineName",
    "Evaluation",
    "Kept",
    "ModuleEngine",
    "SequentialEngine",
    "VectorizedEngine",
    "build_engine",
]
