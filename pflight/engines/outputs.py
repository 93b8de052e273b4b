"""The outputs of tasks' clients on their own samples, for their evaluation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from pflight.data.loaders import Split
from pflight.states.updates import STOPS, ClientFailure, Evaluation
from pflight.task import Task

from .base import ONE_THREAD, threads
from .client_setup import ClientSetup

Samples = dict[int, list[Tensor]]
"""Clients' inputs and targets, by row."""
Attempt = Callable[[int, list[ClientFailure]], AbstractContextManager[None]]
"""Notes the failure of a client, by its id."""


@torch.no_grad()
def evaluate_task(
    setup: ClientSetup,
    clients: Tensor,
    split: Split,
    *,
    attempt: Attempt,
    at_once: Callable[[Samples], dict[int, Tensor] | None],
    alone: Callable[[int, Tensor], Tensor],
    operations: float,
) -> tuple[Evaluation, list[ClientFailure]]:
    """Return the outputs of the clients ``[C]``, and the failures of the clients without outputs.

    A client fails if its samples can't be read, its targets are wrong, its model raises an error,
    or its losses are not finite.

    Args:
        setup: The setup of a task.
        clients: Ids ``[C]``.
        split: The split of the samples.
        attempt: Notes failures.
        at_once: Returns the outputs of all clients, or ``None`` if this is impossible. It is not
            called if clients have a time limit.
        alone: Returns the outputs of one client, given its row and its inputs.
        operations: Operations of a sample's forward pass.
    """
    task = setup.task
    assert task is not None
    ids, failures = clients.tolist(), list[ClientFailure]()
    count = int(setup.data.num_samples(split)[clients.cpu()].sum())
    few = operations * max(count, 1) < ONE_THREAD
    with threads(1 if few else torch.get_num_threads()):
        samples = _samples_of_all(setup, task, ids, split, attempt, failures)
        outputs = at_once(samples) if samples and setup.client_timeout is None else None
        if outputs is None:
            outputs = {}
            for row, (x, y) in samples.items():
                with attempt(ids[row], failures):
                    given = alone(row, x)
                    task.check_outputs(given, y)
                    outputs[row] = given
        evaluation = _joined(setup, task, clients, samples, outputs)
    finite = evaluation.losses.isfinite()
    if not finite.all():
        odd = evaluation.clients[~finite].unique()
        reason = "the outputs of its model, or their losses, are NaN or infinite"
        failures += [ClientFailure(client, reason) for client in odd.tolist()]
        sound = ~torch.isin(evaluation.clients, odd)
        evaluation = Evaluation(*(column[sound] for column in evaluation))
    return evaluation, failures


def _samples_of_all(
    setup: ClientSetup,
    task: Task,
    ids: list[int],
    split: Split,
    attempt: Attempt,
    failures: list[ClientFailure],
) -> Samples:
    """Return the samples of some clients by row, and note the clients that fail."""
    samples: Samples = {}
    if setup.client_timeout is None:
        try:
            samples = {row: setup.samples(client, split) for row, client in enumerate(ids)}
            if samples:
                task.check_targets(torch.cat([y for _, y in samples.values()]))
            return samples
        except STOPS:
            raise
        except BaseException:  # the loop below finds the client
            samples = {}
    for row, client in enumerate(ids):
        with attempt(client, failures):
            x, y = setup.samples(client, split)
            task.check_targets(y)
            samples[row] = [x, y]
    return samples


def _joined(
    setup: ClientSetup, task: Task, clients: Tensor, samples: Samples, outputs: dict[int, Tensor]
) -> Evaluation:
    """Return the outputs of all clients as one."""
    counts = torch.tensor([len(part) for part in outputs.values()], dtype=torch.long)
    owners = clients.cpu()[list(outputs)].repeat_interleave(counts).to(setup.device)
    if not outputs:
        nothing = torch.empty(0, device=setup.device)
        return Evaluation(owners, nothing, setup.example[1][:0], nothing)
    given = torch.cat(list(outputs.values()))
    if given.dtype.itemsize < 4:  # bfloat16 loses too much of a loss
        given = given.float()
    targets = torch.cat([samples[row][1] for row in outputs])
    return Evaluation(owners, given, targets, task.losses(given, targets))
