"""The client methods of the algorithms: their additions to the training of a client's module."""

from .apfl import Mixed
from .corrected import Controlled, Corrected, Dane
from .elastic import Elastic
from .fedala import AdaptiveMixture
from .fedrep import HeadFirst
from .l2gd import StepsToMean
from .per_fedavg import Adapted
from .personal import Personal
from .pfedme import MoreauEnvelope
from .proximal import Proximal

__all__ = [
    "Adapted",
    "AdaptiveMixture",
    "Controlled",
    "Corrected",
    "Dane",
    "Elastic",
    "HeadFirst",
    "Mixed",
    "MoreauEnvelope",
    "Personal",
    "Proximal",
    "StepsToMean",
]
