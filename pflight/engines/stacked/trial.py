"""The samples for trying clients before they train."""

from __future__ import annotations

import torch
from torch import Tensor

from pflight.engines.client_setup import ClientSetup
from pflight.engines.samples import are_finite
from pflight.states.updates import STOPS

_TRIAL = 8  # samples for trying a client
_SIZES, _LARGEST = 8, 64  # number of tried batch sizes, and the largest size


def trial_samples(setup: ClientSetup) -> list[Tensor]:
    """Return a few samples of the largest client; if they can't be used, the example."""
    data = setup.data
    clients = data.train_clients
    largest = clients[data.num_samples("train")[clients].argmax()]
    try:
        leaves = [leaf[:_TRIAL] for leaf in setup.samples(int(largest), "train")]
    except STOPS:
        raise
    except BaseException:  # training will report it
        leaves = setup.example
    if not are_finite(leaves):
        leaves = setup.example
    return [leaf[:_TRIAL].clone() for leaf in leaves]


def trial_batches(
    setup: ClientSetup, samples: list[Tensor], counts: list[int]
) -> list[list[Tensor]]:
    """Return batches of sizes in use, mostly small ones: there clients may differ.

    Args:
        setup: The client module, its client method, and its data.
        samples: The samples of the batches.
        counts: The clients' numbers of samples.
    """
    found = {min(size, _LARGEST) for count in counts for size in setup.batch_sizes(count)}
    sizes = sorted(found or {1})
    places = (torch.arange(size) % len(samples[0]) for size in {*sizes[:_SIZES], sizes[-1]})
    return [[leaf[place] for leaf in samples] for place in places]
