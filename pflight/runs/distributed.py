"""Exchange between ranks. With one process every function returns its input."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from tensordict.utils import expand_as_right
from torch import Tensor


def is_distributed() -> bool:
    """Return whether there are several ranks in a process group."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def owned(clients: Tensor) -> Tensor:
    """Return this rank's clients among ``[C]``. The rank trains, evaluates and remembers them."""
    if not is_distributed():
        return clients
    return clients[clients % dist.get_world_size() == dist.get_rank()]


def all_sum(tensor: Tensor) -> Tensor:
    """Add a tensor up over all ranks, in place."""
    return _all_reduce(tensor, dist.ReduceOp.SUM)


def all_max(tensor: Tensor) -> Tensor:
    """Take the elementwise maximum of a tensor over all ranks, in place."""
    return _all_reduce(tensor, dist.ReduceOp.MAX)


def share_owned(table: Tensor, clients: Tensor) -> None:
    """Copy the rows of clients ``[C]`` in a table ``[N, ...]`` from their owners to all ranks."""
    if is_distributed():
        rows = table.index_select(0, clients)
        mine = expand_as_right(torch.isin(clients, owned(clients)), rows)
        set_by_owners = torch.where(mine, rows, 0)
        table.index_copy_(0, clients, all_sum(set_by_owners))


def gather(value: Any) -> list[Any]:
    """Return the picklable values of all ranks, in order."""
    if not is_distributed():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def gather_to_first(value: Any) -> list[Any]:
    """Return the picklable values of all ranks on rank 0, and only the own value elsewhere."""
    if not is_distributed():
        return [value]
    values = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, values)
    return [value] if values is None else values


def lost_rank(error: BaseException | None) -> bool:
    """Return whether an exception was raised because another rank has ended."""
    kinds = (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)
    return dist.is_available() and (
        isinstance(error, kinds) or (isinstance(error, RuntimeError) and "gloo" in str(error))
    )


def _all_reduce(tensor: Tensor, op: Any) -> Tensor:
    if is_distributed():
        needs_gpu = dist.get_backend() == "nccl" and not tensor.is_cuda
        moved = tensor.cuda() if needs_gpu else tensor
        dist.all_reduce(moved, op=op)
        tensor.copy_(moved)
    return tensor
