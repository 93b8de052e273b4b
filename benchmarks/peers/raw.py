"""What one would write without a library, as fast as it gets with little code."""

from __future__ import annotations

import multiprocessing
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from .networks import make_network
from .workloads import Record, Task, Weights


class Clients:
    """Trains clients one after another on one network, and adds their models up.

    Args:
        task: Workload and data.
        channels_last: Keep the network's weights in the memory format that convolutions like best.
        foreach: Take gradients with ``autograd.grad`` and update all weights in one call, instead
            of ``backward`` and an optimizer.
        device: Where everything lies.
    """

    def __init__(
        self,
        task: Task,
        channels_last: bool = False,
        foreach: bool = False,
        device: str = "cpu",
    ) -> None:
        self.workload, self.foreach, self.device = task.workload, foreach, device
        self.x, self.y = (
            [torch.from_numpy(part).to(device) for part in parts] for parts in (task.x, task.y)
        )
        self.network: nn.Module = make_network(task.workload).to(device)
        if channels_last:
            self.network.to(memory_format=torch.channels_last)
        self.parameters: list[Tensor] = list(self.network.parameters())

    def train(
        self,
        clients: np.ndarray,
        order: list[np.ndarray],
        server: list[Tensor],
        total: list[Tensor],
    ) -> tuple[int, int]:
        """Add trained models to ``total``, by samples; return the numbers of samples and steps."""
        samples = steps = 0
        for client, positions in zip(clients, order, strict=True):
            with torch.no_grad():
                torch._foreach_copy_(self.parameters, server)
            batches = torch.from_numpy(positions).to(self.device).split(self.workload.batch_size)
            optimizer = torch.optim.SGD(self.parameters, lr=self.workload.lr)
            for batch in batches:
                self.step(self.x[client][batch], self.y[client][batch], optimizer)
            with torch.no_grad():
                torch._foreach_add_(total, self.parameters, alpha=len(positions))
            samples += len(positions)
            steps += len(batches)
        return samples, steps

    def step(self, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Do one local step."""
        loss = F.cross_entropy(self.network(x), y)
        if self.foreach:
            gradients = torch.autograd.grad(loss, self.parameters)
            with torch.no_grad():
                torch._foreach_add_(self.parameters, gradients, alpha=-self.workload.lr)
        else:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def loop(task: Task, rounds: int, record: Record, **options: Any) -> Weights:
    """Train one client after another in one process; ``options`` as in :class:`Clients`."""
    workload, clients = task.workload, Clients(task, **options)
    server = [parameter.detach().clone() for parameter in clients.parameters]
    for index in range(rounds):
        total = [torch.zeros_like(tensor) for tensor in server]
        samples, steps = clients.train(*workload.draw(index), server, total)
        record.count(samples, steps)
        server = list(torch._foreach_div(total, samples))
        record.end_round()
    return [tensor.cpu().numpy() for tensor in server]


channels_last = partial(loop, channels_last=True)
foreach = partial(loop, foreach=True)
channels_last_foreach = partial(loop, channels_last=True, foreach=True)


def two_processes(task: Task, rounds: int, record: Record) -> Weights:
    """Train every other client in a second process, each process with one thread."""
    torch.set_num_threads(1)
    server = [torch.from_numpy(weight) for weight in task.workload.initial_weights()]
    totals = [[torch.zeros_like(tensor) for tensor in server] for _ in range(2)]
    for tensor in (*server, *totals[0], *totals[1]):
        tensor.share_memory_()
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    other = context.Process(target=_second, args=(task, theirs, server, totals[1]), daemon=True)
    other.start()
    clients = Clients(task)
    for index in range(rounds):
        torch._foreach_zero_(totals[0])
        ours.send(index)
        cohort, order = task.workload.draw(index)
        counts = clients.train(cohort[::2], order[::2], server, totals[0]), ours.recv()
        samples, steps = map(sum, zip(*counts, strict=True))
        record.count(samples, steps)
        torch._foreach_copy_(server, torch._foreach_add(*totals))
        torch._foreach_div_(server, samples)
        record.end_round()
    return [tensor.numpy() for tensor in server]


def _second(task: Task, pipe: Connection, server: list[Tensor], total: list[Tensor]) -> None:
    clients = Clients(task)
    while True:
        cohort, order = task.workload.draw(pipe.recv())
        torch._foreach_zero_(total)
        pipe.send(clients.train(cohort[1::2], order[1::2], server, total))


def vectorized(
    task: Task, rounds: int, record: Record, chunk: int | None = None, device: str = "cpu"
) -> Weights:
    """Train a chunk of clients of equal size at once, all of a round by default, with ``vmap``.

    What is as large as a chunk is allocated once and written in place.
    """
    workload = task.workload
    chunk = chunk or workload.cohort
    x, y = (torch.from_numpy(np.concatenate(parts)).to(device) for parts in (task.x, task.y))
    network = make_network(workload).to(device)
    names = [name for name, _ in network.named_parameters()]

    def loss(parameters: list[Tensor], x: Tensor, y: Tensor) -> Tensor:
        named = dict(zip(names, parameters, strict=True))
        return F.cross_entropy(functional_call(network, named, (x,)), y)

    gradients = vmap(grad(loss))
    server = [parameter.detach().clone() for parameter in network.parameters()]
    stacks = [tensor.new_empty(chunk, *tensor.shape) for tensor in server]
    inputs = x.new_empty(chunk, workload.samples, *x.shape[1:])
    labels = y.new_empty(chunk, workload.samples)
    for index in range(rounds):
        clients, order = workload.draw(index)
        total = [torch.zeros_like(tensor) for tensor in server]
        places = clients[:, np.newaxis] * workload.samples + np.stack(order)
        positions = torch.from_numpy(places).to(device)
        for rows in positions.split(chunk):
            models = [stack[: len(rows)] for stack in stacks]
            torch._foreach_copy_(models, server)
            torch.index_select(x, 0, rows.flatten(), out=inputs[: len(rows)].flatten(0, 1))
            torch.index_select(y, 0, rows.flatten(), out=labels[: len(rows)].flatten(0, 1))
            for batch in range(0, workload.samples, workload.batch_size):
                part = slice(0, len(rows)), slice(batch, batch + workload.batch_size)
                steps = gradients(models, inputs[part], labels[part])
                torch._foreach_add_(models, steps, alpha=-workload.lr)
                record.count(labels[part].numel(), len(rows))
            torch._foreach_add_(total, [model.sum(0) for model in models])
        server = list(torch._foreach_div(total, workload.cohort))
        record.end_round()
    return [tensor.cpu().numpy() for tensor in server]


chunks_of_10 = partial(vectorized, chunk=10)
