"""Buffers that may have no meaningful mean over clients."""

from __future__ import annotations

import torch
from lightning.pytorch.utilities import rank_zero_warn
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from .state import StateLayout
from .updates import ClientUpdates


def unit_vectors(module: nn.Module) -> list[str]:
    """Return the names of the buffers with spectral norm's vectors of length 1.

    Example:
        >>> unit_vectors(nn.utils.parametrizations.spectral_norm(nn.Linear(2, 3)))
        ['parametrizations.weight.0._u', 'parametrizations.weight.0._v']
    """
    found = [
        f"{name}.{own}"
        for name, part in module.named_modules()
        for own in (
            *(("_u", "_v") if isinstance(part, _SpectralNorm) else ()),
            *(
                f"{hook.name}{end}"
                for hook in part._forward_pre_hooks.values()
                if isinstance(hook, SpectralNorm)
                for end in ("_u", "_v")
            ),
        )
    ]
    buffers = dict(module.named_buffers())
    return [name for name in (one.removeprefix(".") for one in found) if name in buffers]


class BufferWatch:
    """Warns once of buffers that clients change and that are no statistics of a norm.

    Single numbers, such as a counter, are not watched.

    Args:
        module: The client module.
        layout: Its state layout.
    """

    def __init__(self, module: nn.Module, layout: StateLayout) -> None:
        known = {*unit_vectors(module)}
        for name, part in module.named_modules():
            if isinstance(part, _NormBase):
                start = f"{name}." if name else ""
                known |= {f"{start}{own}" for own, _ in part.named_buffers(recurse=False)}
        own = {*layout.own, *layout.extra}
        vectors = {name for name, tensor in layout.template.items() if tensor.numel() > 1}
        self._names = vectors.intersection([*layout.averaged, *layout.counters]) - known - own

    def look(
        self, clients: Tensor, sent: TensorDict, updates: ClientUpdates, round_index: int
    ) -> None:
        """Compare the buffers that the clients ``[C]`` received and returned."""
        states = updates.states
        names = sorted(self._names.intersection(sent.keys(), states.keys()))
        if not names:
            return
        rows = torch.isin(clients, updates.clients)
        changed = [name for name in names if self._differ(sent[name][rows], states[name])]
        if not changed:
            return
        self._names.clear()
        rank_zero_warn(
            f"round {round_index}: clients change the buffer {changed[0]}"
            f"{f' and {len(changed) - 1} more' if len(changed) > 1 else ''}, and the server takes "
            "their mean, or the maximum of whole numbers; if that makes no sense, as for a "
            "codebook or a mask, give the server callback buffers='local'"
        )

    @staticmethod
    def _differ(before: Tensor, after: Tensor) -> bool:
        return not torch.equal(before.nan_to_num(), after.nan_to_num())
