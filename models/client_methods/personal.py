"""The client method of methods with a personal model beside the shared one."""

from __future__ import annotations

from lightning import LightningModule
from tensordict import TensorDict
from torch import Tensor

from pflight.local_client import LocalWork
from pflight.method import PERSONAL, ClientMethod, Model
from pflight.options import checked
from pflight.states.state import StateLayout


@checked
class Personal(ClientMethod):
    """Trains a personal copy of each client's module beside the shared one, on the same batches.

    The shared model trains plainly. The copy has its own optimizers, buffers, clipping and client
    method, and never travels. The client is judged by the result of that client method, by default
    the copy. A newcomer's copy starts as the shared model.

    Args:
        personal: The client method of the personal copy; its anchor is the server's model.
    """

    def __init__(self, personal: ClientMethod) -> None:
        self.personal = personal

    def check(self, module: LightningModule) -> None:
        """Raise if the module does not fit the personal client method."""
        assert self.personal is not None
        self.personal.check(module)

    def start_states(self, work: LocalWork, clients: Tensor, sent: TensorDict) -> TensorDict:
        """Have new personal models start as the sent model."""
        return super().start_states(work, clients, _twice(work.layout, sent))

    def models(self) -> dict[str, Model]:
        """Judge clients by their personal models."""
        return {"": self._personal_models}

    def _personal_models(
        self, work: LocalWork, clients: Tensor, sent: TensorDict, states: TensorDict
    ) -> TensorDict:
        """Return the clients' states, with the judged models as their networks ``[C]``."""
        assert self.personal is not None
        value = self.personal.personal_value
        names = _personal(work.layout)
        return states.update({shared: value(states, shared, own) for shared, own in names})


def _personal(layout: StateLayout) -> list[tuple[str, str]]:
    """Return the names in a network, each with its name in the personal copy."""
    copied = [name for name in layout.own if name.startswith(PERSONAL)]
    return [(name.removeprefix(PERSONAL), name) for name in copied]


def _twice(layout: StateLayout, sent: TensorDict) -> TensorDict:
    """Return the sent entries, also under the names of the personal model."""
    there = {*sent.keys()}
    copies = {own: sent[shared] for shared, own in _personal(layout) if shared in there}
    return TensorDict({**copies, **sent}, batch_size=sent.batch_size)
