"""What algorithms are called: a server callback and a client, by the name that the field has."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pflight.models.halves import Elastic, Proximal
from pflight.optim import Yogi

from .apfl import APFL
from .cfl import FedCluster
from .fedavg import FedAvg
from .fedec import FedEC
from .fesem import FeSEM
from .hypocluster import HypoCluster
from .per_fedavg import PerFedAvg
from .pfedhn import PFedHN
from .pfedla import PFedLA
from .pfedme import PFedMe
from .reptile import Reptile
from .robust import Robust
from .shared_part import SharedPart

if TYPE_CHECKING:
    from pflight.federation import Federation

_CONSTRAINED = {"kl": "FedEC", "l2": "FedEC-l2", None: "FedEC-wo"}
_STEPPED = {torch.optim.Adam: "FedAdam", torch.optim.Adagrad: "FedAdagrad", Yogi: "FedYogi"}


def algorithm_name(federation: Federation) -> str:
    """Return what a federation's algorithm is called, by its callback, client and options.

    What has no name of its own, such as a user's callback, is called as its class.
    """
    callback = federation.attached_callback
    name = _NAMES.get(type(callback), lambda federation, callback: type(callback).__name__)
    tuned = federation.finetune_epochs > 0 and not callback.personalizes
    return name(federation, callback) + " + fine-tuning" * tuned


def _fedavg(federation: Federation, callback: Any) -> str:
    names = ["FedProx"] if type(federation.client_half) is Proximal else []
    if federation.server_optimizer is not None:
        optimizer = federation.server_optimizer(list(federation.server.parameters()))
        names += [_STEPPED[type(optimizer)]] if type(optimizer) in _STEPPED else []
        sgd = type(optimizer) is torch.optim.SGD
        names += ["FedAvgM"] if sgd and optimizer.defaults["momentum"] else []
    return " + ".join(names) or "FedAvg"


def _apfl(federation: Federation, callback: Any) -> str:
    mixture: Any = federation.client_half.personal
    return "APFL" + " (adaptive)" * (mixture.alpha_lr is not None)


def _per_fedavg(federation: Federation, callback: Any) -> str:
    half: Any = federation.client_half
    return f"Per-FedAvg ({'HF' if half.hessian else 'FO'})"


def _reptile(federation: Federation, callback: Any) -> str:
    if isinstance(half := federation.client_half, Elastic):
        return _CONSTRAINED[half.constraint]
    if (callback.lr, callback.decay, federation.server_optimizer) == (0.6, None, None):
        return "FedDist" if callback.weighting == "uniform" else "FedDWS"
    return "Reptile"


def _shared_part(federation: Federation, callback: Any) -> str:
    private, shared = (
        [] if layers is None else [by for by, value in vars(layers).items() if value]
        for layers in (callback.private_layers, callback.shared_layers)
    )
    if (private, shared) == (["last"], []):
        return "FedPer"
    if (private, shared) == ([], ["last"]):
        return "LG-FedAvg"
    if (private, shared) == (["types"], []):
        types = callback.private_layers.types
        kinds = types if isinstance(types, list | tuple) else [types]
        if all(issubclass(kind, nn.modules.batchnorm._BatchNorm) for kind in kinds):
            return "FedBN"
    return "SharedPart"


def _fesem(federation: Federation, callback: Any) -> str:
    chosen = " (K chosen)" * (callback._given.get("num_clusters") == "auto")
    return ("FeSEM" if callback.matching is None else "FeSEM-MA") + chosen


_NAMES: dict[type, Callable[[Any, Any], str]] = {
    APFL: _apfl,
    FedAvg: _fedavg,
    FedEC: lambda federation, _: _CONSTRAINED[federation.client_half.constraint],
    FedCluster: lambda *_: "CFL (FedCluster)",
    FeSEM: _fesem,
    HypoCluster: lambda *_: "HypoCluster (IFCA)",
    PerFedAvg: _per_fedavg,
    PFedHN: lambda _, callback: "pFedHN" + "-PC" * (callback.private_layers > 0),
    PFedLA: lambda _, callback: f"HeurpFedLA({callback.retain})" if callback.retain else "pFedLA",
    PFedMe: lambda *_: "pFedMe",
    Reptile: _reptile,
    Robust: lambda *_: "Robust(TKM)",
    SharedPart: _shared_part,
}
