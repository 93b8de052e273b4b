"""Short federations for the tests: clients, data and a quiet stock Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.plugins import Precision
from torch import Tensor, nn
from torch.optim import SGD

from pflight import Federation
from pflight.callbacks import ServerCallback
from pflight.data.loaders import Split
from pflight.datamodules import FederatedDataModule, TensorClients
from pflight.engines.alone.client import SCALARS, AloneClient
from pflight.engines.alone.copies import Copies
from pflight.errors import ClientError
from pflight.local_client import LocalClient
from pflight.method import ClientMethod
from pflight.models import Classifier, LoRA
from pflight.states.state import StateLayout
from tests import reference

FEATURES, CLASSES = 4, 3
ENGINES = pytest.mark.parametrize("engine", ["sequential", "vectorized"])


def quiet_trainer(rounds: int = 1, *callbacks: L.Callback, **options: Any) -> L.Trainer:
    """Return a stock Trainer on the CPU that writes nothing unless it is asked to."""
    quiet = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": any(
            isinstance(callback, L.pytorch.callbacks.Checkpoint) for callback in callbacks
        ),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return L.Trainer(max_epochs=rounds, callbacks=list(callbacks), **{**quiet, **options})


def run(
    client: Classifier,
    data: FederatedDataModule,
    callback: ServerCallback | None = None,
    rounds: int = 1,
    *callbacks: L.Callback,
    trainer: dict[str, Any] | None = None,
    ckpt_path: Any = None,
    all_may_fail: bool = False,
    **options: Any,
) -> Federation:
    """Fit a federation and return it."""
    federation = Federation(client, **options)
    servers = [] if callback is None else [callback]
    fitter = quiet_trainer(rounds, *servers, *callbacks, **(trainer or {}))
    with suppress(ClientError) if all_may_fail else nullcontext():
        fitter.fit(federation, datamodule=data, ckpt_path=ckpt_path)
    return federation


def sgd(lr: float = 0.1, **options: Any) -> Callable[[Iterable[nn.Parameter]], SGD]:
    return partial(SGD, lr=lr, **options)


class ByHand(Classifier):
    """A module that optimizes manually."""

    automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


def linear_client(
    kind: type[Classifier] = Classifier, double: bool = False, **options: Any
) -> Classifier:
    """Return a softmax regression with the same initial weights every time."""
    torch.manual_seed(7)
    client = kind(nn.Linear(FEATURES, CLASSES), CLASSES, **{"optimizer": sgd(), **options})
    return client.double() if double else client


def network_client(
    network: nn.Module, kind: type[Classifier] = Classifier, seed: int = 7, **options: Any
) -> Classifier:
    """Return a client whose network's weights come from ``seed``."""
    torch.manual_seed(seed)
    for module in network.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return kind(network, CLASSES, **{"optimizer": sgd(), **options})


def dropout_client(kind: type[Classifier] = Classifier, **options: Any) -> Classifier:
    layers = nn.Linear(FEATURES, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, CLASSES)
    return network_client(nn.Sequential(*layers), kind, **options)


def batchnorm_client(kind: type[Classifier] = Classifier, **options: Any) -> Classifier:
    layers = nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, CLASSES)
    return network_client(nn.Sequential(*layers), kind, **options)


class Adapted(Classifier):
    """A client whose network has low-rank adapters. A normalization, if any, trains as well."""

    def __init__(self, network: nn.Module, *args: Any, **options: Any) -> None:
        linear = [name for name, part in network.named_modules() if isinstance(part, nn.Linear)]
        normal = [n for n, part in network.named_modules() if isinstance(part, nn.BatchNorm1d)]
        adapted = LoRA(network, linear, rank=2, alpha=1, trained=normal)
        super().__init__(adapted, *args, **options)


def samples(count: int, seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(count, FEATURES, generator=random, dtype=torch.float64)
    return x.to(dtype), torch.randint(CLASSES, (count,), generator=random)


def small_data(
    counts: Iterable[int] = (5, 12, 7, 9, 3, 10), dtype: torch.dtype = torch.float32, **options: Any
) -> TensorClients:
    """Return unequal clients of random samples, with samples to validate and to test on."""
    counts = list(counts)
    splits = [
        [samples(count, 100 * index + client, dtype) for client, count in enumerate(sizes)]
        for index, sizes in enumerate((counts, [6] * len(counts), [4] * len(counts)))
    ]
    train, test, val = splits
    options = {"num_classes": CLASSES, "batch_size": 4, **options}
    return TensorClients(train, test=test, val=val, **options)


class Watching(ClientMethod):
    """Has a function look at each client that trains, or fail in its place."""

    def __init__(self, look: Callable[[LocalClient], Any]) -> None:
        self.look = look

    def loss(self, c: LocalClient, batch: Any) -> Tensor:
        self.look(c)
        return super().loss(c, batch)


def watched(client: Classifier, look: Callable[[LocalClient], Any]) -> Classifier:
    """Return a client module at whose clients a function looks in each step of their training."""
    client.client_method = Watching(look)
    return client


def failing(kind: type[Classifier] = Classifier, value: float | None = None) -> Any:
    """Return a kind of client of which one, number 3 of :func:`small_data`, raises in its loss.

    With a ``value`` that is what its loss is multiplied by instead.
    """

    class Failing(kind):
        def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            loss = super().loss(batch)
            if value is not None:
                return loss * torch.where(is_of_client_3(batch), value, 1.0)
            if is_of_client_3(batch):
                raise RuntimeError("out of battery")
            return loss

    return Failing


def failing_at_the_end(kind: type[Classifier] = Classifier) -> Any:
    """Return a kind of client of which one, number 3 of :func:`small_data`, fails once trained."""

    class Failing(kind):
        def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            self.fails = bool(is_of_client_3(batch))
            return super().loss(batch)

        def on_train_end(self) -> None:
            if self.fails:
                raise RuntimeError("out of battery")

    return Failing


def is_of_client_3(batch: tuple[Tensor, Tensor]) -> Tensor:
    """Tell by its samples whether a training batch of :func:`small_data` is client 3's."""
    return (batch[0].float().unsqueeze(1) == _FEATURES_OF_CLIENT_3).all(dim=-1).any()


_FEATURES_OF_CLIENT_3 = samples(9, 3)[0]


def one_client(
    module: Classifier, client_method: ClientMethod, memory: Mapping[str, Tensor] | None = None
) -> AloneClient:
    """Return a client as a client method sees it in local training, with what it remembers."""
    layout, cpu = StateLayout.of(module), torch.device("cpu")
    scalars = {name: torch.tensor(0.0 if memory is None else 1.0) for name in SCALARS}
    copies = Copies(module, layout, Precision(), cpu)
    client = AloneClient(copies, client_method, {}, scalars, received=None)
    client.memory = memory
    return client


def owner(
    data: FederatedDataModule, client: int, split: Split = "train"
) -> Callable[[Tensor], bool]:
    """Return what tells whether inputs are a client's own, for modules that do odd things then."""
    own = data.samples(client, split)[0]
    return lambda x: bool((own == x[0]).flatten(1).all(1).any())


def batches_of(data: FederatedDataModule, round: int, client: int, epochs: int) -> list[np.ndarray]:
    """Return the positions of the samples in each local batch, in the order of training."""
    size = data.batch_size or int(data.num_samples()[client])
    return [
        batch.numpy()
        for epoch in range(epochs)
        for batch in data.order(client, round, epoch).split(size)
    ]


class Normalised(NamedTuple):
    """Unequal clients with BatchNorm in float64, three of six in a round, and their reference."""

    data: TensorClients
    world: reference.NormalisedNetwork
    theta: np.ndarray
    """Where the parameters start."""
    statistics: np.ndarray
    """Where BatchNorm's running mean and variance start."""

    @classmethod
    def make(cls, **options: Any) -> Normalised:
        counts = (6, 12, 7, 10, 3, 8)  # no last batch of a single sample
        data = small_data(counts, torch.float64, **{"cohort_size": 3, **options})
        pairs = [data.samples(i, "train") for i in range(len(counts))]
        start = batchnorm_client().double().state_dict()
        world = reference.NormalisedNetwork(pairs, 6, CLASSES)
        return cls(data, world, parameters(start), statistics(start))

    def batches(self, round: int, client: int) -> list[np.ndarray]:
        """Return the positions of the samples in each batch of two local epochs."""
        return batches_of(self.data, round, client, 2)

    def train(
        self,
        round: int,
        client: int,
        theta: np.ndarray,
        statistics: np.ndarray,
        more: Callable[[np.ndarray], Any] = lambda theta: 0.0,
        lr: float = 0.1,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return what a client's parameters and statistics come to in a round."""
        batches = self.batches(round, client)
        known = self.world, theta, statistics, client, batches, lr, more
        return reference.normalised_training(*known)

    def run(self, callback: ServerCallback, rounds: int = 3, **options: Any) -> Federation:
        """Fit a federation of it."""
        client = options.pop("client", batchnorm_client())
        return run(client.double(), self.data, callback, rounds, **{"local_epochs": 2, **options})


def parameters(state: dict[str, Tensor]) -> np.ndarray:
    """Return the parameters of a state of :func:`batchnorm_client` as one vector."""
    return flat({n: v for n, v in state.items() if n.endswith(("weight", "bias"))})


def statistics(state: dict[str, Tensor]) -> np.ndarray:
    """Return BatchNorm's running mean and variance likewise."""
    return flat({name: value for name, value in state.items() if "running" in name})


def flat(state: dict[str, Tensor]) -> np.ndarray:
    """Return a state as one vector of float64, in its own order."""
    return torch.cat([value.detach().double().flatten() for value in state.values()]).numpy()


def network(state: dict[str, Tensor]) -> np.ndarray:
    """Return those entries of a client's or the server's state that are its network's."""
    return flat({name: value for name, value in state.items() if name.startswith("network.")})


def shared(federation: Federation) -> np.ndarray:
    """Return the network of the server's model."""
    return network(federation.server_states()[0])


def judged(federation: Federation, client: int) -> np.ndarray:
    """Return the network that a client is judged by."""
    return network(federation.client_state(client))


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Compare two states bit for bit."""
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


# World Q: client i's loss is half the sum over d of a_id (theta_d - b_id)^2.


class Point(nn.Module):
    """Two parameters, which are also the logits of every sample."""

    def __init__(self, start: tuple[float, float] = (0.0, 0.0)) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.tensor(start, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.theta.expand(len(x), 2)


class QuadraticClient(Classifier):
    """A client of world Q; a sample carries its client's ``a`` and ``b``."""

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        a, b = batch[0].split(2, dim=1)
        return (a / 2 * (self.network.theta - b).square()).sum(1).mean()


def quadratic_client(start: tuple[float, float] = (0.0, 0.0), lr: float = 0.1) -> Classifier:
    return QuadraticClient(Point(start), num_classes=2, optimizer=sgd(lr))


A = ((1.0, 2.0), (2.0, 1.0), (1.0, 1.0))
B = ((1.0, -1.0), (3.0, 1.0), (-2.0, 4.0))
N = (1, 3, 2)


def world_q(clients: Iterable[int] = (0, 1, 2), counts: Iterable[int] = N) -> TensorClients:
    """Return the data of world Q: every sample of a client carries ``a`` and ``b``."""
    counts = list(counts)
    train = [
        (
            torch.tensor([[*A[i], *B[i]]] * counts[i], dtype=torch.float64),
            torch.zeros(counts[i], dtype=torch.long),
        )
        for i in clients
    ]
    return TensorClients(train, num_classes=2, batch_size=None)
