"""The version of this package, as in its metadata."""

__version__ = "0.1.0"
