"""Federated algorithms once more, plainly, in float64 NumPy: what the real ones must compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Batches = Callable[[int, int], Sequence[NDArray[np.int64]]]
"""(round, client) -> the positions of the samples in each batch of local training."""


class World(Protocol):
    """Clients with losses of one parameter vector."""

    counts: NDArray[np.int64]

    def gradient(self, theta: Vector, client: int, batch: NDArray[np.int64]) -> Vector:
        """Return the gradient of a client's mean loss over some of its samples."""


class SoftmaxRegression:
    """Mean cross-entropy of logits ``W x + b``; theta is ``W`` row by row, then ``b``."""

    def __init__(self, samples: Sequence[tuple[Vector, NDArray[np.int64]]], classes: int) -> None:
        self.samples = [(np.asarray(x, np.float64), np.asarray(y)) for x, y in samples]
        self.counts = np.array([len(y) for _, y in self.samples])
        self.classes = classes

    def gradient(self, theta: Vector, client: int, batch: NDArray[np.int64]) -> Vector:
        x, y = (part[batch] for part in self.samples[client])
        weight = theta[: -self.classes].reshape(self.classes, -1)
        logits = x @ weight.T + theta[-self.classes :]
        excess = np.exp(logits - logits.max(axis=1, keepdims=True))
        excess /= excess.sum(axis=1, keepdims=True)
        excess[np.arange(len(y)), y] -= 1
        excess /= len(y)
        return np.concatenate([(excess.T @ x).ravel(), excess.sum(axis=0)])


class Quadratics:
    """World Q: half of ``sum a (theta - b)^2``."""

    def __init__(self, a: Sequence, b: Sequence, counts: Sequence[int]) -> None:
        self.a, self.b = np.array(a, np.float64), np.array(b, np.float64)
        self.counts = np.array(counts)

    def gradient(self, theta: Vector, client: int, batch: NDArray[np.int64]) -> Vector:
        return self.a[client] * (theta - self.b[client])


class NormalisedNetwork:
    """Mean cross-entropy of ``V relu(g norm(W x + b) + h) + c``, normalised over each batch.

    Theta is ``W`` row by row, ``b``, ``g``, ``h``, ``V`` row by row and ``c``.
    """

    def __init__(
        self, samples: Sequence[tuple[Vector, NDArray[np.int64]]], hidden: int, classes: int
    ) -> None:
        self.samples = [(np.asarray(x, np.float64), np.asarray(y)) for x, y in samples]
        self.counts = np.array([len(y) for _, y in self.samples])
        inputs = self.samples[0][0].shape[1]
        vector = (hidden,)
        self.shapes = [(hidden, inputs), vector, vector, vector, (classes, hidden), (classes,)]

    def parts(self, theta: Vector) -> list[Vector]:
        """Return W, b, g, h, V and c."""
        ends = np.cumsum([np.prod(shape) for shape in self.shapes])[:-1]
        pieces = zip(np.split(theta, ends), self.shapes, strict=True)
        return [piece.reshape(shape) for piece, shape in pieces]

    def gradient(self, theta: Vector, client: int, batch: NDArray[np.int64]) -> Vector:
        weight, bias, scale, shift, head, offset = self.parts(theta)
        x, y = (part[batch] for part in self.samples[client])
        inputs = x @ weight.T + bias
        deviation = np.sqrt(inputs.var(axis=0) + 1e-5)
        norm = (inputs - inputs.mean(axis=0)) / deviation
        active = scale * norm + shift
        hidden = np.maximum(active, 0)
        logits = hidden @ head.T + offset
        excess = np.exp(logits - logits.max(axis=1, keepdims=True))
        excess /= excess.sum(axis=1, keepdims=True)
        excess[np.arange(len(y)), y] -= 1
        excess /= len(y)
        back = (excess @ head) * (active > 0)
        through = back * scale
        through = through - through.mean(axis=0) - norm * (through * norm).mean(axis=0)
        through /= deviation
        parts = (
            *(through.T @ x, through.sum(axis=0), (back * norm).sum(axis=0), back.sum(axis=0)),
            *(excess.T @ hidden, excess.sum(axis=0)),
        )
        return np.concatenate([part.ravel() for part in parts])

    def statistics(self, theta: Vector, client: int, batch: NDArray[np.int64]) -> Vector:
        """Return mean and unbiased variance of what is normalised."""
        weight, bias, *_ = self.parts(theta)
        inputs = self.samples[client][0][batch] @ weight.T + bias
        return np.concatenate([inputs.mean(axis=0), inputs.var(axis=0, ddof=1)])


def normalised_training(
    world: NormalisedNetwork,
    theta: Vector,
    statistics: Vector,
    client: int,
    batches: Sequence[NDArray[np.int64]],
    lr: float,
    more: Callable[[Vector], Vector | float] = lambda theta: 0.0,
) -> tuple[Vector, Vector]:
    """Return weights and running statistics after SGD along the gradient and something more."""
    for batch in batches:
        seen = world.statistics(theta, client, batch)
        theta = theta - lr * (world.gradient(theta, client, batch) + more(theta))
        statistics = 0.9 * statistics + 0.1 * seen
    return theta, statistics


def local_training(
    world: World,
    start: Vector,
    client: int,
    batches: Sequence[NDArray[np.int64]],
    lr: float,
    pull: float = 0.0,
) -> Vector:
    """Return the weights after SGD over the batches, each step pulled to the start."""
    theta = start.copy()
    for batch in batches:
        theta -= lr * (world.gradient(theta, client, batch) + pull * (theta - start))
    return theta


def fedavg(
    world: World,
    theta: Vector,
    cohorts: Sequence[Sequence[int]],
    batches: Batches,
    lr: float,
    weighting: str = "samples",
    mu: float = 0.0,
) -> Vector:
    """Return the server's weights after FedAvg, or with ``mu`` after FedProx."""
    for round_, cohort in enumerate(cohorts):
        models = [local_training(world, theta, i, batches(round_, i), lr, pull=mu) for i in cohort]
        weights = world.counts[list(cohort)] if weighting == "samples" else np.ones(len(cohort))
        theta = np.average(models, axis=0, weights=weights)
    return theta


def fedsgd(
    world: World,
    theta: Vector,
    cohorts: Sequence[Sequence[int]],
    lr: float,
    weighting: str = "samples",
) -> Vector:
    """Return the server's weights after steps along the mean of full gradients."""
    for cohort in cohorts:
        gradients = [world.gradient(theta, i, np.arange(world.counts[i])) for i in cohort]
        weights = world.counts[list(cohort)] if weighting == "samples" else np.ones(len(cohort))
        theta = theta - lr * np.average(gradients, axis=0, weights=weights)
    return theta


def local(
    world: World,
    theta: Vector,
    cohorts: Sequence[Sequence[int]],
    batches: Batches,
    lr: float,
) -> list[Vector]:
    """Return every client's weights after training alone in the rounds in which it was drawn."""
    models = [theta.copy() for _ in world.counts]
    for round_, cohort in enumerate(cohorts):
        for i in cohort:
            models[i] = local_training(world, models[i], i, batches(round_, i), lr)
    return models


def fesem(
    world: World,
    centers: Sequence[Vector],
    cohorts: Sequence[Sequence[int]],
    batches: Batches,
    lr: float,
    strength: float = 0.0,
    scaling: str = "eq7",
    assignments: Sequence[int] | None = None,
    first_round: int = 0,
) -> tuple[list[Vector], list[int]]:
    """Return centers and assignments (-1: not seen) after rounds of stochastic EM."""
    centers = [np.array(center, np.float64) for center in centers]
    assignments = [-1] * len(world.counts) if assignments is None else list(assignments)
    for round_, cohort in enumerate(cohorts, start=first_round):
        totals = np.zeros(len(centers))
        for client, center in enumerate(assignments):
            if center >= 0:
                totals[center] += world.counts[client]
        newcomer = np.average(centers, axis=0, weights=totals if totals.any() else None)
        members: dict[int, list[Vector]] = {}
        nearest: dict[int, int] = {}
        for i in cohort:
            start = newcomer if assignments[i] < 0 else centers[assignments[i]]
            pull = strength
            if scaling == "eq7":
                pull = 2 * strength * world.counts[world.counts > 0].mean() / world.counts[i]
            model = local_training(world, start, i, batches(round_, i), lr, pull)
            nearest[i] = int(np.argmin([((model - center) ** 2).sum() for center in centers]))
            members.setdefault(nearest[i], []).append(model)
        for i, center in nearest.items():
            assignments[i] = center
        for center, models in members.items():
            centers[center] = np.mean(models, axis=0)
    return centers, assignments
