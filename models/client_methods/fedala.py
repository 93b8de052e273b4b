"""FedALA's clients: each learns its share of the server's model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import lightning as L
import torch
from tensordict import TensorDict
from torch import Tensor
from torch.optim import Optimizer

from pflight.engines.alone.client import task_loss
from pflight.engines.alone.copies import ready
from pflight.errors import ConfigurationError
from pflight.local_client import LocalWork
from pflight.method import OWN, ClientMethod, Model
from pflight.options import Interval, NonNegativeFloat, PositiveInt, checked
from pflight.states.state import StateLayout, StateModule, call_with, entries, state_tensors

_SLOT = "fedala"  # of the clients' kept entries


@checked
class AdaptiveMixture(ClientMethod):
    r"""Starts clients from a mixture of their own and the server's model, by learned weights.

    A client that has trained before keeps its last model :math:`\theta_i` and weights :math:`W_i`.
    It takes the lower layers of the server's model :math:`\theta` as they are. In the last
    :math:`p` layers it starts from a mixture,

    .. math:: \hat\theta_i = \theta_i + (\theta - \theta_i) \odot W_i, \qquad
        W_i \leftarrow \operatorname{clip}(W_i - \eta \nabla_{W_i} f_i(\hat\theta_i), 0, 1)

    with a weight in [0, 1] for every number (Zhang et al. 2023, algorithm 1). All weights are 1 at
    first. They are learned before the client trains, on a share of an epoch's batches in each
    round. When a client first has its own model, it learns for several such epochs. Models and
    weights are of parameters, not buffers.

    A client is judged by the mixture of its own model and the server's current one, with the
    weights that it learned last. Before its second participation, this is the server's model.

    Args:
        layers: :math:`p`, the number of last layers with parameters to mix.
        lr: :math:`\eta`, the step of the weights; 0 takes the server's model.
        share: Share of an epoch's batches that train the weights in a round, in (0, 1]; at least
            one batch.
        start_epochs: Epochs of learning the first time, each with this share. The paper learns
            until the loss does not change any more.


    References:
        Zhang et al., FedALA: Adaptive Local Aggregation for Personalized Federated Learning, AAAI
        2023, https://arxiv.org/abs/2212.01197.
    """

    def __init__(
        self,
        layers: PositiveInt = 1,
        lr: NonNegativeFloat = 1.0,
        share: Annotated[float, Interval("(0, 1]")] = 0.8,
        start_epochs: PositiveInt = 10,
    ) -> None:
        self.layers = layers
        self.lr = lr
        self.share = share
        self.start_epochs = start_epochs

    def mixed(self, layout: StateLayout) -> list[str]:
        """Return the names of the parameters that are mixed, of the last layers that travel.

        Raises:
            ConfigurationError: If there are not so many layers.
        """
        parameters = {*layout.shared_parameters}
        layers = [[n for n in names if n in parameters] for names in layout.layers.values()]
        layers = [names for names in layers if names]
        if self.layers > len(layers):
            raise ConfigurationError(
                f"FedALA: layers={self.layers} exceeds the number of layers ({len(layers)})"
            )
        return [name for names in layers[-self.layers :] for name in names]

    def before_training(self, work: LocalWork, clients: Tensor, sent: TensorDict) -> TensorDict:
        """Return mixtures with newly learned weights. The clients keep these weights."""
        kept = self.learn(work, clients, sent, self.kept(work, clients, sent))
        starts = work.start_states(clients, self.mixtures(work, sent, kept))
        return starts.update({f"{OWN}{name}": value for name, value in entries(kept)})

    def keep(
        self, work: LocalWork, clients: Tensor, starts: TensorDict, trained: TensorDict
    ) -> None:
        """Keep weights and trained models."""
        kept = {"times": starts[f"{OWN}times"] + 1}
        for name in self.mixed(work.layout):
            weights = f"weights.{name}"
            kept |= {f"own.{name}": trained[name], weights: starts[f"{OWN}{weights}"]}
        work.write(_SLOT, clients, TensorDict(kept, batch_size=[len(clients)]))

    def models(self) -> dict[str, Model]:
        """Judge clients by the mixtures with the last learned weights."""
        return {"": self._mixed_again}

    def _mixed_again(
        self, work: LocalWork, clients: Tensor, sent: TensorDict, states: TensorDict
    ) -> TensorDict:
        kept = self.kept(work, clients, sent)
        return states.update(self.mixtures(work, sent, kept).select(*self.mixed(work.layout)))

    def kept(self, work: LocalWork, clients: Tensor, sent: TensorDict) -> TensorDict:
        """Return the clients' kept entries ``[C]``: under ``own.`` and ``weights.``, and ``times``.

        ``times`` counts how often a client has trained. New clients have the model that is sent,
        with weights of 1.
        """
        start = {"times": torch.zeros(len(clients), dtype=torch.long, device=clients.device)}
        for name in self.mixed(work.layout):
            start |= {f"own.{name}": sent[name], f"weights.{name}": torch.ones_like(sent[name])}
        return work.read(_SLOT, clients, TensorDict(start, batch_size=[len(clients)]))

    def mixtures(self, work: LocalWork, sent: TensorDict, kept: TensorDict) -> TensorDict:
        """Return the sent models ``[C]``, mixed with the kept ones."""
        mixed = {
            name: torch.lerp(kept[f"own.{name}"], sent[name], kept[f"weights.{name}"])
            for name in self.mixed(work.layout)
        }
        return TensorDict({**sent, **mixed}, batch_size=sent.batch_size)

    def learn(
        self, work: LocalWork, clients: Tensor, sent: TensorDict, kept: TensorDict
    ) -> TensorDict:
        """Return the clients' kept entries ``[C]``, with newly learned weights."""
        names, times = self.mixed(work.layout), kept["times"].cpu()
        epochs = torch.where(times == 1, self.start_epochs, 1)
        batches = self.share * work.num_batches(clients) * epochs
        steps = batches.round().clamp(min=1).long() * (times > 0)
        whole = entries(work.start_states(clients, sent))
        states = {f"module.{name}": value for name, value in whole}
        starts = TensorDict({**states, **kept.exclude("times")}, batch_size=[len(clients)])
        learned = kept.clone()
        for count in steps[steps > 0].unique().tolist():
            group = (steps == count).to(clients.device)
            trained = work.learn(
                lambda module: Mixing(module, names, self.lr),
                clients[group],
                starts[group],
                steps=count,
                doing="to learn its weights",
            )
            for name in names:
                learned[f"weights.{name}"][group] = trained[f"weights.{name}"]
        return learned


class Mixing(L.LightningModule):
    r"""Learns how to mix two models of a client module, number by number.

    In the parameters with the given names it mixes the client's own model :math:`\theta_i` with a
    model :math:`\theta` that was sent. It trains only the weights :math:`W` of this mixture, in [0,
    1]:

    .. math:: \hat\theta = \theta_i + (\theta - \theta_i) \odot W, \qquad
        W \leftarrow \operatorname{clip}(W - \eta \nabla_W f_i(\hat\theta), 0, 1)

    (FedALA, Zhang et al. 2023, algorithm 1). All other tensors are as sent. The loss :math:`f_i` is
    the given module's.

    Args:
        module: Client module with the sent tensors; a copy of it gives the loss.
        names: The parameters to mix, as in ``module.state_dict()``; the weights are in ``weights``,
            and the own ones in ``own``, under the same names.
        lr: :math:`\eta`.

    Example:
        >>> import pflight
        >>> module = pflight.models.Classifier(torch.nn.Linear(4, 2), num_classes=2)
        >>> Mixing(module, ["network.bias"], lr=1.0).weights.tensors()["network.bias"]
        Parameter containing:
        tensor([1., 1.], requires_grad=True)
    """

    def __init__(self, module: L.LightningModule, names: Iterable[str], lr: float) -> None:
        super().__init__()
        self.module = ready(module)
        self._modes = tuple(part.training for part in self.module.modules())
        self.module.requires_grad_(False)
        own = {name: state_tensors(module)[name] for name in names}
        self.own = StateModule(own)
        self.weights = StateModule({n: torch.ones_like(v) for n, v in own.items()}, parameters=own)
        self.lr = lr

    def on_train_start(self) -> None:
        """Let BatchNorm normalise by batches only where it trains in the module."""
        for part, mode in zip(self.module.modules(), self._modes, strict=True):
            part.training = mode

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the module's loss at the mixture."""
        sent, weights = dict(self.module.named_parameters()), self.weights.tensors()
        tensors = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        for name, own in self.own.tensors().items():
            tensors[name] = torch.lerp(own, sent[name], weights[name])
        return call_with(self.module, tensors, task_loss, batch)

    def configure_optimizers(self) -> Optimizer:
        """Return SGD that keeps the weights in their range."""
        return _BoundedSGD(self.weights.parameters(), lr=self.lr)


class _BoundedSGD(torch.optim.SGD):
    """SGD that puts every number back into [0, 1] after its step."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.detach().clamp_(0, 1)
        return loss
