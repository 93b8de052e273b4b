"""pfl (Apple's pfl-research), with its simulated backend in one process.

What differs: it doesn't shuffle, so that a client's batches are the same in every round. Its random
sampler draws with replacement; to have as many clients in a round as everybody else, cohorts go
through a permutation of the clients instead.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn

from .networks import make_network, weights_of
from .workloads import Record, Task, Weights


class Classifier(nn.Module):
    """A network with the loss that pfl asks for."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.train()
        return F.cross_entropy(self.network(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, float]:
        return {}


class Ends(TrainingProcessCallback):
    """Records the end of every round."""

    def __init__(self, record: Record) -> None:
        self.record = record

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        self.record.end_round()
        return False, Metrics()


def run(task: Task, rounds: int, record: Record) -> Weights:
    workload = task.workload
    x, y = list(map(torch.from_numpy, task.x)), list(map(torch.from_numpy, task.y))
    users = np.random.default_rng(0).permutation(workload.clients).tolist()
    data = FederatedDataset(
        lambda user: Dataset((x[user], y[user]), user_id=user),
        get_user_sampler("minimize_reuse", users),
    )
    network = make_network(workload, record)
    classifier = Classifier(network)
    model = PyTorchModel(
        classifier,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(classifier.parameters(), lr=1.0),
    )
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=rounds + 1,
            train_cohort_size=workload.cohort,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(data, data, postprocessors=[WeightByDatapoints()]),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1,
            local_learning_rate=workload.lr,
            local_batch_size=workload.batch_size,
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[Ends(record)],
    )
    return weights_of(network)
