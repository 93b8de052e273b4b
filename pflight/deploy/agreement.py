"""The options that the server and its nodes must share before training starts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from pflight.command.version import __version__
from pflight.data.data_module import FederatedDataModule
from pflight.data.fingerprint import bytes_of
from pflight.errors import ConfigurationError
from pflight.fedavg import FedAvg
from pflight.federation import Federation
from pflight.options import as_list, described
from pflight.server_callback import ServerCallback

from .messages import quoted, shown

_OF_DATA = ("batch_size", "eval_batch_size", "seed", "augmentation")
_OF_TRAINING = {"epochs": "local_epochs", "steps": "local_steps", "lr_decay": "client_lr_decay"}
_OUTCOMES = ("network", "initial model")  # they follow from other options
_OF_HERE = ("engine", "clients_at_once", "client_timeout", "client_memory", "allow_other_data")


def agreement_on(
    federation: Federation,
    callback: ServerCallback,
    data: FederatedDataModule,
    config: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return a digest of each option that both sides must share, by option.

    Args:
        federation: The federation, with its client module.
        callback: The server callback.
        data: The data of the run. Only its options of local training count.
        config: Options of the model, by name, as text.

    Raises:
        ConfigurationError: If newcomers have an option, since a deployment holds no client out; or
            if the server has a side path of adapters, which nodes don't get.
    """
    if callback.has_side_path:
        raise ConfigurationError(
            f"{type(callback).__name__} with aggregate={callback.aggregation!r}: the nodes of a "
            "deployment don't get the server's side path: take 'factors' or 'product'"
        )
    training = asdict(federation.clients.training)
    training.pop("on_client_error")
    if training["newcomer_epochs"] is not None:
        raise ConfigurationError(
            "model.newcomer_epochs: a deployment holds no client out of training: leave it out"
        )
    form = federation.layout.describe()
    parts: dict[str, Any] = {
        "algorithm": type(callback).__name__,
        **{f"algorithm.{name}": described(value) for name, value in callback._given.items()},
        "network": f"{type(federation.client).__name__} {sorted(form.items())}",
        **{f"model.{_OF_TRAINING.get(name, name)}": value for name, value in training.items()},
        **{f"data.{name}": described(getattr(data, name)) for name in _OF_DATA},
        **(config or {}),
    }
    digests = {name: _digest(str(part).encode()) for name, part in parts.items()}
    template = federation.layout.template
    start = b"".join(bytes_of(template[name]) for name in sorted(template))
    return {"pflight": __version__, **digests, "initial model": _digest(start)}


def check_agreement(here: Mapping[str, str], there: Mapping[str, str], whose: str) -> None:
    """Raise unless two sides agree.

    Args:
        here: The digests of this side.
        there: The digests of the other side.
        whose: The name of the other side.

    Raises:
        ConfigurationError: If any differ. The message names all of them.
    """
    if (version := there.get("pflight")) != here["pflight"]:
        raise ConfigurationError(
            f"{whose} has pflight {quoted(version or 'of an unknown version')}, and here is "
            f"{here['pflight']}: install the same version on both sides"
        )
    names = sorted(name for name in {*here, *there} if here.get(name) != there.get(name))
    if names:
        raise ConfigurationError(
            f"{whose} has other options than here: {shown(', '.join(_causes(names)))}; give both "
            "sides the same"
        )


def _causes(names: list[str]) -> list[str]:
    """Return the names of causes, without their consequences, such as the options of a class."""
    causes = [name for name in names if name not in _OUTCOMES] or names
    return [name for name in causes if not any(name.startswith(f"{one}.") for one in causes)]


def digest_of(agreement: Mapping[str, str]) -> str:
    """Return one digest of the whole agreement."""
    return _digest(str(sorted(agreement.items())).encode())


def server_callback(callbacks: Iterable[Any] | Any) -> ServerCallback:
    """Return the server callback of a configuration, by default FedAvg."""
    given = (one for one in as_list(callbacks) if isinstance(one, ServerCallback))
    return next(given, None) or FedAvg()


def text_of_model(config: Any) -> dict[str, str]:
    """Return the options of the model that both sides must share, by name, as text."""
    model = config.model.clone()
    for name in _OF_HERE:
        model.init_args.pop(name, None)
    flat = model.as_flat().__dict__
    return {
        f"model.{name}".replace(".init_args", "").removesuffix(".class_path"): described(value)
        for name, value in flat.items()
    }


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
