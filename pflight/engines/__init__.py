"""How a cohort's local training runs."""

from .sequential import SequentialEngine
from .updates import ClientFailure, ClientUpdates, Evaluation, Kept

__all__ = ["ClientFailure", "ClientUpdates", "Evaluation", "Kept", "SequentialEngine"]
