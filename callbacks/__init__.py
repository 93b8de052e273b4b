"""The server half of each algorithm, one file per algorithm, and the monitors that draw."""

from .fedavg import FedAvg
from .fedsgd import FedSGD
from .fesem import FeSEM
from .local import Local
from .server import ServerCallback

__all__ = ["FeSEM", "FedAvg", "FedSGD", "Local", "ServerCallback"]
