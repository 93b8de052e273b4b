"""Client modules that are the client half of an algorithm themselves."""

from .client import ClientModule
from .corrected import CorrectedClient
from .elastic import ElasticClient
from .fedrep import FedRepClient
from .personal import RelocatedClient
from .proximal import ProximalClient


def is_half(client: ClientModule) -> bool:
    """Return whether a client module is a client half of an algorithm itself."""
    halves = CorrectedClient, ElasticClient, FedRepClient, ProximalClient, RelocatedClient
    return isinstance(client, halves)
