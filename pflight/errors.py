"""The exceptions that pflight raises."""

from collections.abc import Sequence

from lightning.pytorch.utilities.exceptions import MisconfigurationException

from .messages import one_line


class ConfigurationError(MisconfigurationException, ValueError):
    """Wrong options, data or files; the message names the option, client or file.

    It is both a Lightning ``MisconfigurationException`` and a ``ValueError``. The command line
    prints its message as one line, without a traceback.
    """


class UnknownOptionError(ConfigurationError):
    """There are no options of these names.

    Attributes:
        options: Their full names.
    """

    def __init__(self, message: str, options: Sequence[str]) -> None:
        super().__init__(message)
        self.options = tuple(options)


class TakenError(ConfigurationError):
    """Another process is doing the same work in a run folder."""


class ClientError(RuntimeError):
    """A client failed, and ``on_client_error`` is ``"raise"``; or all clients in all rounds did."""


class Stopped(BaseException):
    """Raised to end a run after a signal; what catches all that a client raises lets it pass."""


def said_by(error: BaseException) -> str:
    """Return what an exception says, if it can: one of a user's own may raise another.

    Example:
        >>> said_by(ValueError("no such image"))
        'no such image'
    """
    try:
        return str(error).strip()
    except Exception:
        return ""


def described(error: BaseException) -> str:
    """Return what an exception is and says, in one line.

    Example:
        >>> described(ValueError("no  such image")), described(MemoryError())
        ('ValueError: no such image', 'MemoryError')
    """
    return f"{type(error).__name__}: {one_line(said_by(error))}".removesuffix(": ")
