"""Files of a trained model that other programs load: adapters for ``peft``, or all weights."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pflight.errors import ConfigurationError, described
from pflight.states.head import EXTRA

from .second import SecondAdapter

EXTRA_FILE = "extra.safetensors"
MODEL_FILE = "model.safetensors"
_OTHER_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


def write_model(
    module: nn.Module, folder: str | Path, trained: Collection[str] | None = None
) -> list[Path]:
    """Write a module's weights into a new folder, and return the files.

    A ``PeftModel`` inside the module is written by its ``save_pretrained``, so that
    ``PeftModel.from_pretrained(base, folder)`` loads it. Several are written into folders by their
    names. Other trained entries go to ``extra.safetensors``. A module without a ``PeftModel`` has
    all its entries in ``model.safetensors``. Two adapters with constant weights are written as one
    of twice the rank.

    Args:
        module: The module.
        folder: The folder; it must be empty if it exists.
        trained: Names of the entries that training may have changed, by default those of the
            trainable parameters.

    Raises:
        ConfigurationError: If the folder has files, a package is missing, or the adapters belong
            to another base than the module was made with.
    """
    folder = Path(folder)
    if trained is None:
        trained = [name for name, value in module.named_parameters() if value.requires_grad]
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigurationError(f"--out: {folder} exists already and is not empty")
    adapted = _peft_models(module)
    second = [part for part in module.modules() if isinstance(part, SecondAdapter)]
    for name, model in adapted.items():
        _check_base(name, model)
    for part in second:
        _check_sum(part)
    folder.mkdir(parents=True, exist_ok=True)
    if not adapted:
        _save(module.state_dict(), folder / MODEL_FILE)
        return [folder / MODEL_FILE]
    written: set[str] = set()
    for name, model in adapted.items():
        own = folder if len(adapted) == 1 else folder / name
        try:
            with _summed(name, model, second) as sums:
                model.save_pretrained(str(own), save_embedding_layers=False, **sums)
        except (ImportError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"peft can't write the adapters{_of(name)}: {described(error)}"
            ) from error
        (own / "README.md").unlink(missing_ok=True)  # an empty form
        written |= _entries_of_adapters(name, model)
    tensors = module.state_dict()
    if second:
        written |= {entry for entry in tensors if entry.startswith(f"{EXTRA}.")}
    if extra := {entry: tensors[entry] for entry in trained if entry not in written}:
        _save(extra, folder / EXTRA_FILE)
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _peft_models(module: nn.Module) -> dict[str, Any]:
    """Return the PeftModels of a module by name; the name of the module itself is empty."""
    peft = sys.modules.get("peft")  # whoever made a PeftModel has imported it
    kind = () if peft is None else peft.PeftModel
    return {name: part for name, part in module.named_modules() if isinstance(part, kind)}


def _of(name: str) -> str:
    """Return whose adapters they are, for messages."""
    return f" of {name!r}" if name else ""


def _check_base(name: str, model: Any) -> None:
    """Raise if an adapter's start has changed the frozen weights."""
    for config in model.peft_config.values():
        start = getattr(config, "init_lora_weights", True)
        if isinstance(start, str) and start.startswith(_OTHER_BASE):
            raise ConfigurationError(
                f"the adapters{_of(name)} began with init_lora_weights={start!r}, which changes "
                "the base: they fit no base that others have"
            )


def _check_sum(part: SecondAdapter) -> None:
    """Raise if the sum of two adapters of a layer is no adapter."""
    if part.constant_weights is None:
        raise ConfigurationError(
            f"the two adapters of {part.pair.layer!r} have weights that depend on the input, so "
            "they are no single adapter: export the server's model, or use the client module"
        )
    if getattr(part.b, "bias", None) is not None:
        raise ConfigurationError(
            f"the two adapters of {part.pair.layer!r} have biases, and can't be written as one"
        )


@contextmanager
def _summed(
    name: str, model: Any, second: Collection[SecondAdapter]
) -> Iterator[dict[str, dict[str, Tensor]]]:
    """Yield what ``save_pretrained`` takes to write both adapters of each layer as one.

    Their factors stand side by side. Meanwhile the configuration has twice the rank, and the same
    scale.
    """
    prefix = f"{name}." if name else ""
    state, configs = dict(model.state_dict()), model.peft_config
    sums = []
    for part in second:
        if part.pair.a.removeprefix(prefix) not in state or not part.constant_weights:
            continue
        (own, other), (a, b) = part.constant_weights, part.factors
        if other == 0:
            continue
        sums.append(part)
        first, last = (entry.removeprefix(prefix) for entry in part.pair.names)
        state[first] = torch.cat([state[first], a])
        state[last] = torch.cat([own * state[last], other * b], dim=1)
    if not sums:
        yield {}
        return
    model.peft_config = {
        adapter: _widened(config) if any(p.pair.adapter == adapter for p in sums) else config
        for adapter, config in configs.items()
    }
    try:
        yield {"state_dict": state}
    finally:
        model.peft_config = configs


def _widened(config: Any) -> Any:
    """Return the configuration of adapters with twice the rank and the same scale."""
    config, factor = copy.deepcopy(config), math.sqrt(2) if config.use_rslora else 2
    config.r, config.lora_alpha = 2 * config.r, factor * config.lora_alpha
    config.rank_pattern = {layer: 2 * rank for layer, rank in config.rank_pattern.items()}
    config.alpha_pattern = {layer: factor * alpha for layer, alpha in config.alpha_pattern.items()}
    return config


def _entries_of_adapters(name: str, model: Any) -> set[str]:
    """Return the names of the module's entries that ``save_pretrained`` writes."""
    from peft import get_peft_model_state_dict

    ours = {tensor.data_ptr(): entry for entry, tensor in model.state_dict(keep_vars=True).items()}
    prefix = f"{name}." if name else ""
    found = set()
    for adapter in model.peft_config:
        saved = get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)
        found |= {f"{prefix}{ours[t.data_ptr()]}" for t in saved.values() if t.data_ptr() in ours}
    return found


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    try:
        from safetensors.torch import save_file
    except ImportError:
        raise ConfigurationError(
            "safetensors is missing, which writes the files: pip install 'pflight[peft]'"
        ) from None
    save_file({name: t.detach().cpu().clone().contiguous() for name, t in tensors.items()}, path)
