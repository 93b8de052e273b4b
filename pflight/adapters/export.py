"""Files of a trained model that other programs load: adapters for ``peft``, or all weights."""

from __future__ import annotations

import copy
import math
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pflight.errors import ConfigurationError, described
from pflight.states.head import EXTRA

from .pairs import adapted_layers
from .second import SecondAdapter
from .side_path import Addend, addends_of

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
    all its entries in ``model.safetensors``. A side path, or a second adapter with a constant
    weight, becomes part of the adapter, whose rank grows.

    Args:
        module: The module.
        folder: The folder; it must be empty if it exists.
        trained: Names of the entries that training may have changed, by default those of the
            trainable parameters.

    Raises:
        ConfigurationError: If the folder has files, a package is missing, the adapters belong to
            another base than the module was made with, or a method has changed what they do.
    """
    for part in module.modules():
        if reason := getattr(part, "not_exported", ""):
            raise ConfigurationError(f"this model can't be exported: {reason}")
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
            with _summed(name, model, second) as tensors:
                options = {"state_dict": tensors, "save_embedding_layers": False}
                model.save_pretrained(str(own), **options)
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
            "they are no single adapter: use Federation.client_module in Python"
        )
    if getattr(part.b, "bias", None) is not None:
        raise ConfigurationError(
            f"the two adapters of {part.pair.layer!r} have biases, and can't be written as one"
        )


@contextmanager
def _summed(
    name: str, model: Any, second: Collection[SecondAdapter]
) -> Iterator[dict[str, Tensor] | None]:
    """Yield the entries of a PeftModel with what stands beside its adapters, if anything does.

    With its weight u, second adapters and a side path, an adapter of scale s becomes
    ``[u B, v B', L / s]`` and ``[A; A'; M]``. Meanwhile, the model's configurations have the ranks
    of these adapters.
    """
    if not second and not any(addend.factors for addend in addends_of(model)):
        yield None
        return
    prefix = f"{name}." if name else ""
    others: dict[str, list[SecondAdapter]] = {}
    for part in second:
        others.setdefault(part.pair.a.removeprefix(prefix), []).append(part)
    plain, before = model.state_dict(), model.peft_config
    tensors, configs = dict(plain), copy.deepcopy(before)
    for layer, pair in adapted_layers(model):
        b, a = plain[pair.b], plain[pair.a]
        columns, rows = [b.flatten(1)], [a.flatten(1)]
        for part in others.get(pair.a, ()):
            weights = part.constant_weights
            if weights is None or weights[1] == 0:
                continue
            other_a, other_b = part.factors
            columns = [weights[0] * column for column in columns]
            columns.append(weights[1] * other_b.flatten(1))
            rows.append(other_a.flatten(1))
        for left, right in _side_paths(layer, pair.adapter):
            columns.append(left.to(b) / pair.scale)
            rows.append(right.to(a))
        if len(rows) == 1:
            continue
        wide, long = torch.cat(columns, dim=1), torch.cat(rows)
        config, rank = configs[pair.adapter], len(long)
        wide, long = wide.reshape(len(b), -1, *b.shape[2:]), long.reshape(-1, *a.shape[1:])
        for old, new in ((b, wide), (a, long)):  # tied layers have several names
            names = [entry for entry, t in plain.items() if t.data_ptr() == old.data_ptr()]
            tensors.update(dict.fromkeys(names, new))
        key = f"^{re.escape(pair.layer.removeprefix('base_model.model.'))}"
        alpha = pair.scale * (math.sqrt(rank) if config.use_rslora else rank)
        config.rank_pattern = {key: rank, **config.rank_pattern}
        config.alpha_pattern = {key: alpha, **config.alpha_pattern}
    model.peft_config = configs
    try:
        yield tensors
    finally:
        model.peft_config = before


def _side_paths(layer: Any, adapter: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the side path of an adapter in a layer as two factors, unless it is 0."""
    for hook in layer._forward_hooks.values():
        if isinstance(hook, Addend) and hook.pair.adapter == adapter and hook.factors:
            if len(hook.factors) == 2:
                yield hook.factors[0], hook.factors[1]
            else:
                (matrix,) = hook.factors
                u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
                zero = 1e-12 if matrix.dtype == torch.float64 else 1e-7
                rank = int((s > zero * s[0]).sum())
                yield u[:, :rank] * s[:rank], v[:rank]


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
