"""Random numbers that depend on their purpose, never on the order of execution.

Every draw of a run comes from a generator keyed by a purpose and by integers such as
``(seed, round, client)``. So both engines, any number of ranks and a resumed run get the same
numbers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


class Purpose(IntEnum):
    """The purpose of a stream of random numbers. Streams of two purposes are independent."""

    # Keyed by the seed of the data module
    PARTITION = 0  # who has which samples, and who is a newcomer
    COHORT = 1  # who trains in a round
    DROPOUT = 2  # who does not answer in a round
    ORDER = 3  # the batches of a client in an epoch
    SAMPLE = 7  # which clients or samples are looked at
    AUGMENT = 8
    DATA = 9  # generated samples

    # Keyed by the seed of the federation
    TRAIN = 4  # dropout layers and the like, of a client in a round
    FINETUNE = 5
    SERVER = 6  # what server callbacks draw
    LOCAL_WORK = 10  # what a client method draws outside of training
    PASS = 11
    TRANSFORM = 12
    RESTART = 13  # the adapters of a new side path


def derive_seed(purpose: Purpose, *keys: int) -> int:
    """Hash a purpose and non-negative integers into one 63-bit seed.

    Keys that differ only in zeros at the end give the same seed.

    Example:
        >>> derive_seed(Purpose.ORDER, 0, 1) == derive_seed(Purpose.ORDER, 0, 1)
        True
        >>> derive_seed(Purpose.ORDER, 0, 1) == derive_seed(Purpose.ORDER, 1, 0)
        False
    """
    state = np.random.SeedSequence([int(purpose), *keys]).generate_state(1, np.uint64)
    return int(state[0]) >> 1


def generator(purpose: Purpose, *keys: int) -> torch.Generator:
    """Return a CPU generator keyed by a purpose and integers such as ``(seed, round, client)``."""
    return torch.Generator().manual_seed(derive_seed(purpose, *keys))


def numpy_generator(purpose: Purpose, *keys: int) -> np.random.Generator:
    """Return a NumPy generator keyed like :func:`generator`."""
    return np.random.default_rng([int(purpose), *keys])


def shuffled(
    counts: Sequence[int], purpose: Purpose, *keys: int, streams: Sequence[int]
) -> list[Tensor]:
    """Return a permutation ``[count]`` for each stream.

    A permutation depends only on the stream's number and count, the purpose and the keys. Items
    are sorted by 64 random bits: a counter of stream and item, mixed as in SplitMix64 (Steele et
    al., 2014).

    Args:
        counts: The number of items of each stream.
        purpose: The purpose of the permutations.
        keys: Further keys.
        streams: The streams' numbers.

    Example:
        >>> one, two = shuffled([100, 80], Purpose.ORDER, 0, streams=[5, 6])
        >>> torch.equal(two, shuffled([80], Purpose.ORDER, 0, streams=[6])[0])
        True
    """
    sizes = np.array(counts)
    ends = sizes.cumsum()
    items = np.arange(sizes.sum()) - np.repeat(ends - sizes, sizes)
    counter = np.repeat(np.array(streams, dtype=np.uint64) << np.uint64(32), sizes)
    bits = (counter | items.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
    bits += np.uint64(derive_seed(purpose, *keys))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits ^= bits >> np.uint64(shift)
        bits *= np.uint64(factor)
    bits ^= bits >> np.uint64(31)
    parts = np.split(bits, ends[:-1])
    return [torch.from_numpy(part.argsort(kind="stable")) for part in parts]


def seed_everything(seed: int, device: torch.device) -> None:
    """Seed the global generators of torch (CPU and ``device``), NumPy and Python.

    Dropout layers and users' own augmentations draw from these generators.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def generators_of(module: nn.Module) -> list[Any]:
    """Return the random generators of torch, NumPy and Python that are attributes of a module."""
    kinds = torch.Generator, np.random.Generator, random.Random
    return [
        value
        for part in module.modules()
        for value in vars(part).values()
        if isinstance(value, kinds)
    ]


def seed_own(module: nn.Module, seed: int) -> None:
    """Seed the generators of a module, each with different numbers."""
    for place, own in enumerate(generators_of(module)):
        if isinstance(own, np.random.Generator):
            fresh = np.random.default_rng([seed, place])
            own.bit_generator.state = type(own.bit_generator)(fresh.integers(2**63)).state
        elif isinstance(own, torch.Generator):
            own.manual_seed(seed + place)
        else:
            own.seed(seed + place)


@contextmanager
def isolated(device: torch.device) -> Iterator[None]:
    """Restore the global generators at the end, after any draw or seeding inside."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
