"""The exceptions that pflight raises."""

from lightning.pytorch.utilities.exceptions import MisconfigurationException


class ConfigurationError(MisconfigurationException, ValueError):
    """What was asked for can't be done; the message names the client, file or option.

    It is both Lightning's ``MisconfigurationException`` and a ``ValueError``. The command line
    prints its message as one line, without a traceback.
    """


class ClientError(RuntimeError):
    """A client failed and the federation's ``on_client_error`` is ``"raise"``."""
