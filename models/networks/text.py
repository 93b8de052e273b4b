"""Networks for text: a small causal transformer, and adapters for any network."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated

import torch
from torch import Tensor, nn

from pflight.errors import ConfigurationError, described
from pflight.options import Interval, PositiveFloat, PositiveInt, checked


@checked
class CausalTransformer(nn.Module):
    """A small GPT-2 that predicts the next token, from the library transformers.

    It has no dropout. A token sees itself and the tokens before it. So a padded end changes nothing
    before it, and no mask is needed.

    Args:
        vocabulary: Number of tokens.
        length: Tokens of the longest sequence.
        width: Numbers that represent a token; a multiple of ``heads``.
        layers: Number of blocks.
        heads: Heads of attention in a block.

    Raises:
        ConfigurationError: transformers is missing, or an option is out of range.

    Example:
        >>> import torch
        >>> network = CausalTransformer(vocabulary=97, length=64, width=16, layers=2, heads=2)
        >>> network(torch.zeros(5, 64, dtype=torch.long)).shape
        torch.Size([5, 64, 97])
    """

    def __init__(
        self,
        vocabulary: PositiveInt,
        length: PositiveInt,
        width: PositiveInt = 128,
        layers: PositiveInt = 4,
        heads: PositiveInt = 4,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ConfigurationError(
                f"CausalTransformer: width must be a multiple of heads={heads}, got {width}"
            )
        transformers = _library("transformers", type(self).__name__)
        config = transformers.GPT2Config(
            vocab_size=vocabulary,
            n_positions=length,
            n_embd=width,
            n_layer=layers,
            n_head=heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
        self.model = transformers.GPT2LMHeadModel(config)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits ``[batch, length, vocabulary]`` of the tokens after ``ids``."""
        return self.model(input_ids=ids, use_cache=False).logits


@checked
class LoRA(nn.Module):
    """Adapters of low rank on the frozen layers of a network, from the library peft.

    Only the adapters train, and so only they travel. Their entries are called ``lora_A`` and
    ``lora_B`` (Hu et al., LoRA, ICLR 2022).

    Args:
        network: The network.
        targets: Names of the layers that get adapters, or their last parts, such as
            ``[query, value]``.
        rank: Rank of each adapter.
        alpha: The adapters' output is multiplied by ``alpha / rank``.
        dropout: Dropout of the adapters' inputs in training.
        trained: Names of further layers that train as a whole, such as a head.
        weights: A file with the network's weights: a checkpoint of a Trainer's run whose module has
            it as ``network``, or safetensors, also those of ``pflight export RUN --server``.
            ``null`` leaves the network as it is.

    Raises:
        ConfigurationError: peft is missing, or can't adapt these layers. The file of weights is
            missing, can't be read, or is of another network.

    Attributes:
        model: The network as a ``PeftModel``.

    Example:
        >>> import torch
        >>> network = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
        >>> adapted = LoRA(network, targets=["0"], rank=2, trained=["1"])
        >>> sum(p.numel() for p in adapted.parameters() if p.requires_grad)
        50
    """

    def __init__(
        self,
        network: nn.Module,
        targets: Sequence[str],
        rank: PositiveInt = 8,
        alpha: PositiveFloat = 16.0,
        dropout: Annotated[float, Interval("[0, 1)")] = 0.0,
        trained: Sequence[str] = (),
        weights: str | None = None,
    ) -> None:
        super().__init__()
        if weights is not None:
            _load(network, Path(weights))
        peft = _library("peft", type(self).__name__)
        config = peft.LoraConfig(
            r=rank,
            lora_alpha=alpha,
            lora_dropout=dropout,
            target_modules=[*targets],
            modules_to_save=[*trained] or None,
        )
        try:
            with warnings.catch_warnings():  # peft turns the matrices of GPT-2's Conv1D itself
                warnings.filterwarnings("ignore", "fan_in_fan_out", UserWarning)
                self.model = peft.get_peft_model(network, config)
        except ValueError as error:
            raise ConfigurationError(f"LoRA: {described(error)}") from error

    def forward(self, x: Tensor) -> Tensor:
        """Return the network's outputs ``[batch, ...]``."""
        return self.model(x)


def _library(name: str, user: str) -> ModuleType:
    """Import a library that is not among pflight's dependencies.

    Raises:
        ConfigurationError: It is not installed.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"{user} needs {name}: install it by `pip install 'pflight[peft]'`"
        ) from error


def _load(network: nn.Module, path: Path) -> None:
    """Load the weights of a network from a file that is not trusted.

    Raises:
        ConfigurationError: See :class:`LoRA`.
    """
    if not path.is_file():
        raise ConfigurationError(f"LoRA: there is no file of weights {path}")
    try:
        if path.suffix == ".safetensors":
            saved = _library("safetensors.torch", "LoRA").load_file(path)
        else:
            saved = torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
        first = "network."
        inner = {name.removeprefix(first): saved[name] for name in saved if name.startswith(first)}
        saved = inner or saved
        entries = network.state_dict()
        given = {entries[name].data_ptr(): saved[name] for name in entries if name in saved}
        tied = {
            name: given[one.data_ptr()] for name, one in entries.items() if one.data_ptr() in given
        }
        network.load_state_dict({**tied, **saved})
    except ConfigurationError:
        raise
    except Exception as error:  # of damaged files, and of other networks' weights
        raise ConfigurationError(f"LoRA: can't load {path}: {described(error)}") from error
