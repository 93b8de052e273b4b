"""Layers with several low-rank experts, which a router mixes for each input."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pflight.errors import ConfigurationError
from pflight.states.state import state_tensors

from .hooks import ChangedOutput
from .pairs import Pair, adapted_layers, plain_pairs


class Experts(nn.Module):
    r"""Adds the experts of other clusters to each adapter of a module, and mixes all of them.

    The adapter itself is the client's own expert c, which trains. The others are frozen. A layer
    that added :math:`s B A x` then adds :math:`s \sum_m g_m(x) B_m A_m x`. With M experts, the
    router :math:`\omega` ``[2M - 1, k]`` gives weights to slots,
    :math:`p = \mathrm{softmax}(\omega x)`. Slots 0 to M - 1 are the experts. All further slots are
    expert c again. The M slots with the largest weights are kept, the lower slot on ties. Their
    weights are divided by their sum. The weight :math:`g_m` is the sum over the slots of expert m
    (FedLEASE, Wang et al. 2025). The router sees x before dropout.

    All experts are computed for all inputs, so that clients can be stacked. M may be smaller than
    the number for which there is room. Slots without an expert have no weight. With one expert the
    layer is what it was.

    Args:
        module: The module. Hooks are added to its adapters.
        room: Largest number of experts.
        owner: Who needs them, for messages.

    Attributes:
        count: M, a scalar; 0 counts as 1.
        own: The own expert c, a scalar.
        bank: Factors of the experts by number of the adapter: ``a0`` ``[room, rank, k]``, ``b0``
            ``[room, d, rank]``.
        router: The router of each adapter ``[2 room - 1, k]``.

    Raises:
        ConfigurationError: If there is no adapter, or one is not a plain LoRA of a linear layer.
    """

    count: Tensor
    own: Tensor
    not_exported = "it mixes several experts anew for each input, which no adapter of peft can do"

    def __init__(self, module: nn.Module, room: int, owner: str) -> None:
        super().__init__()
        self.room = room
        self.pairs = linear_pairs(module, owner)
        self.bank, self.router = nn.Module(), nn.ModuleList()
        for name in ("count", "own"):
            self.register_buffer(name, torch.tensor(0))
        tensors = state_tensors(module)
        for index, pair in enumerate(self.pairs):
            a, b = tensors[pair.a].detach(), tensors[pair.b].detach()
            self.bank.register_buffer(f"a{index}", a.new_zeros(room, *a.shape))
            self.bank.register_buffer(f"b{index}", b.new_zeros(room, *b.shape))
            self.router.append(nn.Linear(a.shape[1], 2 * room - 1, bias=False).to(a))
            layer = module.get_submodule(pair.layer)
            ChangedOutput(layer, pair.adapter, partial(self._mixed, index))

    def weights(self, index: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weight of the own expert ``[..., 1]``, and those of the others.

        Args:
            index: Number of the adapter.
            x: Inputs of the layer ``[..., k]``.

        Returns:
            The own weight, and all others ``[..., room]`` with 0 for the own expert.
        """
        logits = self.router[index](x)
        slot = torch.arange(2 * self.room - 1, device=x.device)
        count = self.count.clamp(min=1)
        used = torch.where(slot < self.room, slot, slot - self.room + 1) < count
        kind = torch.promote_types(logits.dtype, torch.float32)
        shares = logits.masked_fill(~used, -torch.inf).softmax(-1, dtype=kind)
        order = shares.detach().argsort(dim=-1, descending=True, stable=True)
        top = order.argsort(dim=-1) < count
        shares = torch.where(top, shares, 0.0)
        shares = (shares / shares.sum(-1, keepdim=True)).to(x.dtype)
        experts, further = shares[..., : self.room], shares[..., self.room :]
        mine = torch.arange(self.room, device=x.device) == self.own
        own = (experts * mine).sum(-1, keepdim=True) + further.sum(-1, keepdim=True)
        return own, experts * ~mine

    def _mixed(self, index: int, x: Tensor, dropped: Tensor, output: Tensor) -> Tensor:
        """Return the mixture of all experts ``[..., d]``, without the scale.

        Args:
            index: Number of the adapter.
            x: Inputs of the layer ``[..., k]``.
            dropped: The same after dropout.
            output: Output of the own expert ``[..., d]``.
        """
        a, b = getattr(self.bank, f"a{index}"), getattr(self.bank, f"b{index}")
        own, others = self.weights(index, x)
        inner = F.linear(dropped, a.flatten(0, 1)).unflatten(-1, a.shape[:2])
        inner = (inner * others.unsqueeze(-1)).flatten(-2)
        return own * output + F.linear(inner, b.movedim(0, 1).flatten(1))


def linear_pairs(module: nn.Module, owner: str) -> list[Pair]:
    """Return the low-rank pairs of a module, all of them plain LoRA of linear layers.

    Args:
        module: The module.
        owner: Who needs them, for messages.

    Raises:
        ConfigurationError: If there is none, or one is of another kind.
    """
    pairs = plain_pairs(module, owner)
    for part, pair in adapted_layers(module):
        if pair.adapter not in part.lora_A or not isinstance(part.lora_A[pair.adapter], nn.Linear):
            raise ConfigurationError(
                f"{owner} routes the inputs of linear layers, and {pair.layer!r} is none: leave it "
                "out of the adapters' targets"
            )
        if part.lora_B[pair.adapter].bias is not None:
            raise ConfigurationError(
                f"{owner} can't use the adapter of {pair.layer!r}: it has a bias (lora_bias)"
            )
        if pair not in pairs:
            raise ConfigurationError(
                f"{owner} can't use the adapter of {pair.layer!r}: another layer has the same "
                "factors"
            )
    return pairs
