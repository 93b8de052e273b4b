"""The visits to a client for training and evaluation, and the batches of each visit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from pflight.data.loaders import Split, Visit
from pflight.engines.client_setup import ClientSetup, check_order
from pflight.task import Task

GRADIENT_BATCH = 512  # samples in one pass, if their number does not matter

Plan = Callable[[int], list[Visit]]
"""Returns the visits to a client, by its id."""


def training_visits(
    setup: ClientSetup, client: int, round_index: int, epochs: int, steps: int | None
) -> list[Visit]:
    """Return the local epochs of a client: ``epochs`` or, if given, as many as ``steps`` take."""
    data, visits = setup.data, []
    count = int(data.num_samples("train")[client])
    sizes = setup.batch_sizes(count)
    left = steps if steps is not None else epochs * len(sizes)
    for epoch in range(-(-left // len(sizes)) if sizes else 0):
        used = sizes[: min(left, len(sizes))]
        order = data.order(client, round_index, epoch)
        check_order(count, order)
        visits.append(Visit(client, round_index, epoch, order[: sum(used)].split(used)))
        left -= len(sizes)
    return visits


def gradient_visits(
    setup: ClientSetup, client: int, round_index: int, batches: int | None
) -> list[Visit]:
    """Return a visit to a client: some of its batches, or all its samples in their own order."""
    sizes = setup.batch_sizes(int(setup.data.num_samples("train")[client]))[:batches]
    order = torch.arange(sum(sizes))
    if batches is not None:
        order = setup.data.order(client, round_index, 0)[: sum(sizes)]
    # If a module mixes the samples of a batch, it needs all samples at once.
    size = max(sum(sizes), 1) if setup.mixes_samples else GRADIENT_BATCH
    return [Visit(client, round_index, 0, order.split(size) if sizes else ())]


def evaluation_visits(
    setup: ClientSetup, client: int, split: Split, batch_size: int | None = None
) -> list[Visit]:
    """Return a visit to a client for evaluation, if it has samples in the split."""
    count = int(setup.data.num_samples(split)[client])
    size = batch_size or setup.data.eval_batch_size or max(count, 1)
    parts = torch.arange(count).split(size)
    return [Visit(client, None, 0, parts)] if count else []


Visits = Callable[[int], Iterator[tuple[Visit, Iterator[Any]]]]
"""Yields the visits to a client, each with its batches. It is called once for each client."""


def visits_to(clients: Tensor, setup: ClientSetup, split: Split, plan: Plan) -> Visits:
    """Return the visits to the clients ``[C]``, to be asked for in the order of the clients."""
    if setup.form is None:
        everyone = [visit for client in clients.tolist() for visit in plan(client)]
        return StreamedVisits(setup, split, everyone)

    def visits(client: int) -> Iterator[tuple[Visit, Iterator[Any]]]:
        found = plan(client)
        leaves = setup.samples(client, split) if found else []
        if found and isinstance(setup.client, Task) and setup.has_loss_of_its_kind:
            setup.client.check_targets(leaves[1])
        for visit in found:
            seen = leaves
            if visit.round is not None:
                seen = setup.augmented(leaves, client, visit.round, visit.epoch)
            yield visit, _cut(setup, seen, visit)

    return visits


def _cut(setup: ClientSetup, leaves: list[Tensor], visit: Visit) -> Iterator[Any]:
    """Yield the batches of a visit as slices of a client's samples, which are in memory."""
    assert setup.form is not None
    if not visit.parts:
        return
    order, sizes = torch.cat(list(visit.parts)), list(map(len, visit.parts))
    order = order.to(setup.device)
    for part in zip(*(leaf[order].split(sizes) for leaf in leaves), strict=True):
        yield setup.form.batch(list(part))


class StreamedVisits:
    """Batches from the data module's loader. It collates them and reads ahead."""

    def __init__(self, setup: ClientSetup, split: Split, visits: list[Visit]) -> None:
        self._data = setup.data
        self._split = split
        self._visits = visits
        self._of: dict[int, list[int]] = {}
        for place, visit in enumerate(visits):
            self._of.setdefault(visit.client, []).append(place)
        self._iterator: Iterator[Any] | None = None
        self._next = 0, 0  # the iterator's next visit and part

    def __call__(self, client: int) -> Iterator[tuple[Visit, Iterator[Any]]]:
        """See :data:`Visits`."""
        for place in self._of.get(client, ()):
            yield self._visits[place], self._batches(place)

    def _batches(self, place: int) -> Iterator[Any]:
        for part in range(len(self._visits[place].parts)):
            if self._iterator is None or (place, part) != self._next:
                # The previous client has failed, or has skipped the rest of its epoch.
                assert part == 0
                self._iterator = iter(self._data.batches(self._split, self._visits[place:]))
            try:
                batch = next(self._iterator)
            except BaseException:
                self._iterator = None
                raise
            last = part + 1 == len(self._visits[place].parts)
            self._next = (place + 1, 0) if last else (place, part + 1)
            yield batch
