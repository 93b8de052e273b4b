"""Methods with modifiers that tests of ranks, resumes and deployments share."""

from __future__ import annotations

from collections.abc import Callable

from pflight.callbacks import IFCA, SCAFFOLD, FedAvg, FedDyn, FeSEM, PFedLA, ServerCallback
from pflight.modifiers import Elastic, Private, Proximal
from pflight.states.layers import Layers
from pflight.transforms import Clip, TopK

COMBINATIONS: dict[str, Callable[[], ServerCallback]] = {
    "FeSEM + private head": lambda: FeSEM(2, modifiers=[Private("head")]),
    "IFCA + proximal": lambda: IFCA(2, modifiers=[Proximal(0.1, "eq7")]),
    "SCAFFOLD + private norms": lambda: SCAFFOLD(modifiers=[Private("norms"), TopK(0.3)]),
    "FedDyn + top k": lambda: FedDyn(modifiers=[TopK(0.1)]),
    "FedAvg + elastic": lambda: FedAvg(modifiers=[Elastic(0.5), Clip(0.5), TopK(0.3)]),
    "pFedLA + private output": lambda: PFedLA(modifiers=[Private(Layers(last=1))]),
}
