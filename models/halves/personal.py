"""The client half of methods with a personal model beside the shared one."""

from __future__ import annotations

from lightning import LightningModule

from pflight.half import Half
from pflight.options import checked


@checked
class Personal(Half):
    """Trains a personal copy of each client's module beside the shared one, on the same batches.

    The shared model trains plainly. The copy has optimizers, buffers and clipping of its own, and
    a half of its own; the client is judged by it, and it never travels.

    Args:
        personal: The half of the personal copy; its anchor is what the server sent.
    """

    def __init__(self, personal: Half) -> None:
        self.personal = personal

    def check(self, module: LightningModule) -> None:
        """Raise if the module lacks what the personal half needs."""
        assert self.personal is not None
        self.personal.check(module)
