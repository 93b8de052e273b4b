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
    """An option does not exist.

    Attributes:
        options: Full names of the unknown options.
    """

    def __init__(self, message: str, options: Sequence[str]) -> None:
        super().__init__(message)
        self.options = tuple(options)


class TakenError(ConfigurationError):
    """Another process is doing the same work in a run folder."""


class ClientError(RuntimeError):
    """A client failed with ``on_client_error="raise"``, or all clients failed in all rounds."""


class Stopped(BaseException):
    """Ends a run after a signal. Code that catches clients' errors lets it pass."""


def said_by(error: BaseException) -> str:
    """Return the message of an exception. A user's own exception may raise instead of giving one.

    Example:
        >>> said_by(ValueError("no such image"))
        'no such image'
    """
    try:
        return str(error).strip()
    except Exception:
        return ""


def described(error: BaseException) -> str:
    """Return the class and the message of an exception in one line.

    Example:
        >>> described(ValueError("no  such image")), described(MemoryError())
        ('ValueError: no such image', 'MemoryError')
    """
    return f"{type(error).__name__}: {one_line(said_by(error))}".removesuffix(": ")
