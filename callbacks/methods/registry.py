"""The entry of each shipped method, in addition to its class.

The module of a method ends with its entries, ``METHODS``. ``python benchmarks/ship.py`` writes
lists and tables from them without an import, so all values but ``tested`` are literals.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from pflight.fedavg import FedAvg
from pflight.server_callback import ServerCallback


class Method(NamedTuple):
    """The entry of one method.

    Args:
        name: The method's usual name. The first line of its configuration begins with it.
        callback: Its server callback.
        used: How to write it in Python.
        gives: The model that a client ends with.
        needs: What the client module must have: a head, classes, or low-rank adapters.
        manual: Whether the client module may optimize manually.
        tested: Options for its runs in ``tests/algorithm_tester.py``. A test's name is the method's
            name, a hyphen and the key, or only the method's name if the key is empty.
        tolerance: Largest difference between both engines in these tests.
    """

    name: str
    callback: type[ServerCallback]
    used: str
    gives: str
    needs: Literal["", "a head", "a head and classes", "adapters"] = ""
    manual: bool = False
    tested: Mapping[str, Mapping[str, Any]] = MappingProxyType({"": {}})
    tolerance: float = 1e-9


# The entries of FedAvg, whose class belongs to the core.
METHODS = (
    Method(
        "FedAvg",
        FedAvg,
        "FedAvg(weighting)",
        "the server's model",
        manual=True,
        tested={
            "": {},
            "uniform": {"weighting": "uniform"},
            "local-buffers": {"buffers": "local"},
            "reset-buffers": {"buffers": "reset"},
        },
    ),
    Method(
        "FedAvg + fine-tuning",
        FedAvg,
        "`FedAvg()`, and `Federation(finetune_epochs=5)`",
        "a fine-tuned copy",
        manual=True,
        tested={},
    ),
    Method(
        "FedAvgM",
        FedAvg,
        "`FedAvg()` with another server optimizer",
        "the server's model",
        manual=True,
        tested={},
    ),
    Method(
        "FedAdam",
        FedAvg,
        "`FedAvg()` with another server optimizer",
        "the server's model",
        manual=True,
        tested={},
    ),
    Method(
        "FedYogi",
        FedAvg,
        "`FedAvg()` with another server optimizer",
        "the server's model",
        manual=True,
        tested={},
    ),
    Method(
        "FedIT",
        FedAvg,
        "`FedAvg()` over adapters",
        "the server's adapters",
        needs="adapters",
        manual=True,
        tested={},
    ),
    Method(
        "FFA-LoRA",
        FedAvg,
        '`FedAvg(modifiers=[Frozen("*lora_A*")])`',
        "the server's adapters",
        needs="adapters",
        manual=True,
        tested={},
    ),
    Method(
        "FedSA-LoRA",
        FedAvg,
        '`FedAvg(modifiers=[Private("*lora_B*")])`',
        "the server's A, its own B",
        needs="adapters",
        manual=True,
        tested={},
    ),
)
