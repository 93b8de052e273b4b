"""The hyper-parameters that TensorBoard shows to distinguish runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pkgutil import resolve_name
from typing import Any

import lightning as L
from jsonargparse import Namespace

from pflight.federation import Federation
from pflight.options import as_list
from pflight.server_callback import ServerCallback

Primitive = bool | int | float | str


def hparams_of_config(config: Namespace) -> dict[str, Primitive]:
    """Flatten the options that distinguish runs: algorithm, client, data, optimizer, rounds."""
    trainer, model, data = (config[name].as_dict() for name in ("trainer", "model", "data"))
    flat: dict[str, Primitive] = {"rounds": trainer["max_epochs"] or 0}
    for spec in as_list(trainer["callbacks"]):
        kind = resolve_name(spec["class_path"])
        if isinstance(kind, type) and issubclass(kind, ServerCallback):
            flat.update(_flatten("algorithm", spec))
    options = dict(model.get("init_args") or {})
    if (client := options.pop("client", None)) is not None:
        flat.pop("algorithm", None)  # the federation knows a better name
        flat.update(_flatten("client", client))
        flat.update(_flatten("federation", options))
    else:
        flat.update(_flatten("model", model))
    return flat | dict(_flatten("data", data))


def hparams_of_objects(trainer: L.Trainer) -> dict[str, Primitive]:
    """Return the hyper-parameters known from the objects of a run: class names and options."""
    module, data = trainer.lightning_module, getattr(trainer, "datamodule", None)
    described: dict[str, Primitive] = {"rounds": trainer.max_epochs or 0}
    if isinstance(module, Federation):
        described["client"] = type(module.client).__name__
    else:
        described["model"] = type(module).__name__
    if data is not None:
        described["data"] = type(data).__name__
    options = {k: v for k, v in module.hparams.items() if isinstance(v, Primitive)}
    return described | options


def _flatten(key: str, value: Any) -> Iterator[tuple[str, Primitive]]:
    if isinstance(value, Mapping) and "class_path" in value:
        yield key, value["class_path"].rpartition(".")[2]
        value = {**(value.get("init_args") or {}), **(value.get("dict_kwargs") or {})}
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from _flatten(f"{key}/{name}", part)
    elif isinstance(value, list):
        yield key, str(value)
    elif isinstance(value, Primitive):
        yield key, value
