"""Reptile: the server takes a step towards the mean of the clients' models."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import lightning as L
import torch
from tensordict import TensorDict
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from pflight.errors import ConfigurationError
from pflight.fedavg import FedAvg
from pflight.models.client_methods.elastic import Elastic
from pflight.options import PositiveFloat, checked

from .registry import Method

_CONSTRAINED = {"kl": "FedEC", "l2": "FedEC-l2", None: "FedEC-wo"}


@checked
class Reptile(FedAvg):
    r"""Reptile across clients; with :class:`~pflight.models.ElasticClient` it is FedEC.

    The server's model moves by

    .. math:: \phi \leftarrow \phi + \varepsilon \sum_{i \in S} w_i (\theta_i - \phi)

    (Nichol et al. 2018, algorithm 2; FedEC, Lan et al. 2023, eq. 8). The pseudo-gradient is
    FedAvg's, and :math:`\varepsilon` is the step size of the server optimizer. So ``lr=1`` is
    FedAvg with the same weights. Floating-point buffers move by the same step. FedDist is
    ``Reptile(lr=0.6)``, FedDWS is ``Reptile("samples", lr=0.6)``.

    Args:
        weighting: ``"uniform"`` for :math:`w_i = 1 / |S|`, ``"samples"`` for
            :math:`w_i = n_i / \sum_{j \in S} n_j`; both over the clients that answered.
        lr: Step size :math:`\varepsilon` of the default server optimizer, SGD.
        decay: ``"linear"`` lowers the step size to 0 over the Trainer's ``max_epochs``; ``None``
            keeps it constant.
        buffers: As in :class:`~pflight.callbacks.ServerCallback`.


    Example:
        >>> Reptile("samples", lr=0.6).weighting
        'samples'

    References:
        Nichol et al., On First-Order Meta-Learning Algorithms, 2018,
        https://arxiv.org/abs/1803.02999.
    """

    aggregates = False

    def __init__(
        self,
        weighting: Literal["uniform", "samples"] = "uniform",
        lr: PositiveFloat = 1.0,
        decay: Literal["linear"] | None = None,
        buffers: Literal["shared", "local", "reset"] = "shared",
    ) -> None:
        super().__init__(weighting, buffers)
        self.lr = lr
        self.decay = decay

    @property
    def algorithm_name(self) -> str:
        """FedEC with an elastic client, FedDist or FedDWS with their options, else Reptile."""
        if isinstance(client_method := self.clients.client_method, Elastic):
            return _CONSTRAINED[client_method.constraint]
        if (self.lr, self.decay, self.server.build_optimizer) == (0.6, None, None):
            return "FedDist" if self.weighting == "uniform" else "FedDWS"
        return "Reptile"

    def on_before_configure_optimizers(self, trainer: L.Trainer) -> None:
        """Note how many rounds there will be."""
        self._rounds = trainer.max_epochs

    def configure_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Return SGD with the server's step size."""
        return torch.optim.SGD(parameters, lr=self.lr)

    def configure_scheduler(self, optimizer: Optimizer) -> LRScheduler | None:
        """Return the linear decay over all rounds, if there is one."""
        if self.decay is None:
            return None
        rounds = self._rounds
        if rounds is None or rounds < 1:
            raise ConfigurationError("Reptile: a linear decay needs the Trainer's max_epochs")
        return LambdaLR(optimizer, lambda round: max(0.0, 1 - round / rounds))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Use this run's decay, if the run that is resumed had another number of rounds."""
        scheduler = pl_module.lr_schedulers()
        if isinstance(scheduler, LambdaLR):
            (decay,), (base,) = scheduler.lr_lambdas, scheduler.base_lrs
            scheduler.optimizer.param_groups[0]["lr"] = base * decay(scheduler.last_epoch)

    def aggregate(self, mean: TensorDict) -> TensorDict:
        """Return the mean, after moving floating-point buffers by the optimizer's step as well."""
        for name, buffer in self.server.tensors(0, self.clients.layout.averaged).items():
            if name in self.sent_names:
                mean[name] = torch.lerp(buffer, mean[name], self.server.lr)
        return mean


METHODS = (
    Method(
        "Reptile",
        Reptile,
        "Reptile(weighting, lr)",
        "the server's model, or a fine-tuned copy",
        manual=True,
        tested={},
    ),
    Method(
        "FedDist",
        Reptile,
        "Reptile(lr=0.6)",
        "the server's model, or a fine-tuned copy",
        manual=True,
        tested={"": {"lr": 0.6}},
    ),
    Method(
        "FedDWS",
        Reptile,
        'Reptile("samples", lr=0.6)',
        "the server's model, or a fine-tuned copy",
        manual=True,
        tested={"": {"weighting": "samples", "lr": 0.6}},
    ),
)
