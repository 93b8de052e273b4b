"""The exceptions that pflight raises."""

from lightning.pytorch.utilities.exceptions import MisconfigurationException


class ConfigurationError(MisconfigurationException, ValueError):
    """Wrong options, data or files; the message names the option, client or file.

    It is both a Lightning ``MisconfigurationException`` and a ``ValueError``. The command line
    prints its message as one line, without a traceback.
    """


class ClientError(RuntimeError):
    """A client failed, and the federation's ``on_client_error`` is ``"raise"``."""
