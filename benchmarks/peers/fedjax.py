"""FedJAX, with its FedAvg, compiled by JAX.

What differs: its batches all have the same size, so that the last of an epoch is filled up with
samples of a second pass. Convolutions have their channels last, which JAX prefers. FedJAX calls
``jax.tree_map``, which newer releases of JAX no longer have; it is put back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import fedjax
import jax
import jax.numpy as jnp
import numpy as np
from fedjax.algorithms import fed_avg
from jax import Array, lax

from .workloads import Record, Task, Weights

Parameters = list[Array]

jax.tree_map = jax.tree.map


def logits(parameters: Parameters, x: Array) -> Array:
    """Run the workload's network, with weights ``[size, size, in, out]`` and ``[in, out]``."""
    layers = list(zip(parameters[::2], parameters[1::2], strict=True))
    x = x.transpose(0, 2, 3, 1)
    for weight, bias in layers:
        if weight.ndim == 4:
            x = lax.conv_general_dilated(
                x, weight, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = jax.nn.relu(x + bias)
            x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
            continue
        if x.ndim == 4:
            x = x.transpose(0, 3, 1, 2).reshape(len(x), -1)
        x = x @ weight + bias
        if weight is not layers[-1][0]:
            x = jax.nn.relu(x)
    return x


def loss(parameters: Parameters, batch: Mapping[str, Array], rng: Array) -> Array:
    """Return every sample's cross-entropy ``[n]``."""
    scores = jax.nn.log_softmax(logits(parameters, batch["x"]))
    return -jnp.take_along_axis(scores, batch["y"][:, None], axis=1)[:, 0]


def run(task: Task, rounds: int, record: Record) -> Weights:
    workload = task.workload

    def count(batch: Mapping[str, Any]) -> Mapping[str, Any]:
        record.count(len(batch["y"]))
        return batch

    samples = {
        client: {"x": x, "y": y.astype(np.int32)}
        for client, (x, y) in enumerate(zip(task.x, task.y, strict=True))
    }
    preprocessor = fedjax.BatchPreprocessor([count])
    data = fedjax.InMemoryFederatedData(samples, preprocess_batch=preprocessor)
    record.samples = record.steps = 0  # every client has been looked at
    sampler = fedjax.client_samplers.UniformGetClientSampler(data, workload.cohort, seed=0)
    algorithm = fed_avg.federated_averaging(
        fedjax.grad(loss),
        fedjax.optimizers.sgd(learning_rate=workload.lr),
        fedjax.optimizers.sgd(learning_rate=1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=workload.batch_size),
    )
    weights = workload.initial_weights()
    state = algorithm.init([jnp.asarray(_to_jax(weight)) for weight in weights])
    for _ in range(rounds):
        state, _ = algorithm.apply(state, sampler.sample())
        jax.block_until_ready(state)
        record.end_round()
    return [_from_jax(np.asarray(parameter)) for parameter in state.params]


def _to_jax(weight: np.ndarray) -> np.ndarray:
    """Turn ``[out, in, ...]`` into ``[..., in, out]``."""
    return weight.transpose(2, 3, 1, 0) if weight.ndim == 4 else weight.T


def _from_jax(weight: np.ndarray) -> np.ndarray:
    return weight.transpose(3, 2, 0, 1) if weight.ndim == 4 else weight.T
