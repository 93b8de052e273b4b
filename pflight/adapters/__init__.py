"""Low-rank adapters: their pairs, sums and distances, in the form of the package ``peft``."""

from .distances import AdapterDistance
from .low_rank import LowRank
from .pairs import Pair, find_pairs

__all__ = ["AdapterDistance", "LowRank", "Pair", "find_pairs"]
