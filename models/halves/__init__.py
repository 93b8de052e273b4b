"""The client halves of the algorithms, one file each."""

from .elastic import Elastic
from .personal import Personal
from .proximal import Proximal

__all__ = ["Elastic", "Personal", "Proximal"]
