"""FedALA: each client learns how much of the server's model to take, number by number."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

import lightning as L
import torch
from tensordict import TensorDict
from torch import Tensor
from torch.optim import Optimizer

from pflight.engines.sequential import SequentialEngine
from pflight.errors import ConfigurationError
from pflight.fedavg import FedAvg
from pflight.half import Half
from pflight.local.client import task_loss
from pflight.local.copies import ready
from pflight.local.setting import Setting
from pflight.options import check_range, checked
from pflight.randomness import Purpose
from pflight.state import StateLayout, StateModule, call_with, entries, state_tensors
from pflight.updates import ClientUpdates

if TYPE_CHECKING:
    pass

_SLOT = "fedala"


@checked
class FedALA(FedAvg):
    r"""Federated learning with adaptive local aggregation (Zhang et al. 2023, algorithm 1).

    The server is FedAvg's. A client that has trained before keeps its last model :math:`\theta_i`
    and weights :math:`W_i`. It takes the lower layers of the server's model :math:`\theta` as they
    are and in the last :math:`p` layers starts from a mixture,

    .. math:: \hat\theta_i = \theta_i + (\theta - \theta_i) \odot W_i, \qquad
        W_i \leftarrow \operatorname{clip}(W_i - \eta \nabla_{W_i} f_i(\hat\theta_i), 0, 1)

    with a weight in [0, 1] for every number. All weights are 1 at first. They are learned before
    the client trains, on batches of its training samples: a share of an epoch's in each round, and
    as much for several epochs when it first has a model of its own. What is trained from
    :math:`\hat\theta_i` is sent back. Models and weights are of parameters, not buffers.

    A client is judged by the mixture of its own model with the server's as it is now, by the
    weights that it learned last; before its second participation that is the server's model.

    Args:
        layers: :math:`p`, the number of last layers with parameters to mix.
        lr: :math:`\eta`, the step of the weights; 0 is FedAvg.
        share: Share of an epoch's batches on which weights are learned in a round, in (0, 1]; at
            least one batch.
        start_epochs: Epochs of which this share is taken the first time; the paper learns until
            the loss does not change any more.
        weighting: As in :class:`FedAvg`.
        buffers: As in :class:`~pflight.callbacks.ServerCallback`.

    Raises:
        ConfigurationError: If an option is out of range, or there are fewer layers.

    Example:
        >>> FedALA(layers=2).weighting
        'samples'

    References:
        Zhang et al., FedALA: Adaptive Local Aggregation for Personalized Federated Learning, AAAI
        2023, https://arxiv.org/abs/2212.01197.
    """

    def __init__(
        self,
        layers: int = 1,
        lr: float = 1.0,
        share: float = 0.8,
        start_epochs: int = 10,
        weighting: Literal["samples", "uniform"] = "samples",
        buffers: Literal["shared", "local", "reset"] = "shared",
    ) -> None:
        super().__init__(weighting, buffers)
        check_range(self, "[1, inf)", layers=layers, start_epochs=start_epochs)
        check_range(self, "[0, inf)", lr=lr)
        check_range(self, "(0, 1]", share=share)
        self.layers = layers
        self.lr = lr
        self.share = share
        self.start_epochs = start_epochs

    def setup_server(self) -> None:
        """Make the server's model, and find the layers to mix."""
        super().setup_server()
        parameters = {*self.clients.layout.parameters}
        owned = (
            [n for n in names if n in parameters] for names in self.clients.layout.layers.values()
        )
        layers = [names for names in owned if names]
        if self.layers > len(layers):
            raise ConfigurationError(
                f"FedALA: layers={self.layers} exceeds the number of layers ({len(layers)})"
            )
        self.mixed = [name for names in layers[-self.layers :] for name in names]

    @property
    def bytes_kept(self) -> int:
        """Bytes that a client keeps: the layers that it mixes, and a weight for each number."""
        template = self.clients.layout.template
        return super().bytes_kept + 2 * sum(template[name].nbytes for name in self.mixed)

    def on_before_configure_optimizers(self, trainer: L.Trainer) -> None:
        """Get ready to learn weights as clients train, by an engine for them alone."""
        setting = self.clients.attached_engine.setting
        mixing = Mixing(setting.client, self.mixed, self.lr)
        layout = StateLayout.of(mixing)
        settings = setting.data, setting.precision, setting.device, setting.seed
        learning = Setting(mixing, Half(), layout, *settings)
        learning.mixes_samples = setting.mixes_samples  # as where the module trains
        self.learner = SequentialEngine(learning)
        self.learner.check_input()

    def round(self, cohort: Tensor) -> None:
        """Run one round; clients mix what they are sent with what they kept, then train."""
        self.on_round_start()
        for updates in self.clients.train(cohort, self.send):
            asked, learned = self._learned
            self.keep(updates, learned[torch.isin(asked, updates.clients)])
            self.receive(updates)
        self.step()

    def send(self, clients: Tensor) -> TensorDict:
        """Return what the clients ``[C]`` train from: mixtures, by weights that they learn now."""
        sent = self.broadcast(clients)
        self._learned = clients, self.learn(clients, sent, self.kept(clients, sent))
        return self.mixtures(sent, self._learned[1])

    def kept(self, clients: Tensor, sent: TensorDict) -> TensorDict:
        """Return what the clients keep, ``[C]``: under ``own.`` and ``weights.``, and ``times``.

        ``times`` is how often a client has trained so far. What was not kept yet is the model that
        is sent, with weights of 1.
        """
        start = {"times": torch.zeros(len(clients), dtype=torch.long, device=clients.device)}
        for name in self.mixed:
            start |= {f"own.{name}": sent[name], f"weights.{name}": torch.ones_like(sent[name])}
        default = TensorDict(start, batch_size=[len(clients)])
        return self.clients.memory.read(_SLOT, clients, default)

    def mixtures(self, sent: TensorDict, kept: TensorDict) -> TensorDict:
        """Return the models ``[C]`` that mix what is sent with what is kept."""
        mixed = {n: torch.lerp(kept[f"own.{n}"], sent[n], kept[f"weights.{n}"]) for n in self.mixed}
        return TensorDict({**sent, **mixed}, batch_size=sent.batch_size)

    def learn(self, clients: Tensor, sent: TensorDict, kept: TensorDict) -> TensorDict:
        """Return what the clients ``[C]`` keep, with the weights that they learn now."""
        data, times = self.learner.setting.data, kept["times"].cpu()
        counts = data.num_samples("train")[clients.cpu()].double()
        batches = (counts / (data.batch_size or counts)).ceil()
        epochs = torch.where(times == 1, self.start_epochs, 1)
        steps = (self.share * batches * epochs).round().clamp(min=1).long() * (times > 0)
        whole = entries(self.clients.start_states(clients, sent))
        states = {f"module.{name}": value for name, value in whole}
        starts = TensorDict({**states, **kept.exclude("times")}, batch_size=[len(clients)])
        learned = kept.clone()
        for count in steps[steps > 0].unique().tolist():
            group = (steps == count).to(clients.device)
            updates = self.learner.train(
                clients[group],
                starts[group],
                round_index=self.clients.current.entry.index,
                steps=count,
                purpose=Purpose.FINETUNE,
            )
            self.clients.note_failures(updates.failures, "to learn its weights")
            done = torch.isin(clients, updates.clients)
            for name in self.mixed:
                learned[f"weights.{name}"][done] = updates.states[f"weights.{name}"]
        return learned

    def keep(self, updates: ClientUpdates, learned: TensorDict) -> None:
        """Keep weights and trained models for the clients of a chunk that answered."""
        own = {f"own.{name}": updates.states[name] for name in self.mixed}
        kept = TensorDict({**learned, **own}, batch_size=learned.batch_size)
        kept["times"] = learned["times"] + 1
        self.clients.memory.write(_SLOT, updates.clients, kept)

    def personalize(self, clients: Tensor) -> TensorDict:
        """Return each client's mixture, of the server's model as it is now."""
        sent = self.broadcast(clients)
        return self.clients.start_states(clients, self.mixtures(sent, self.kept(clients, sent)))


class Mixing(L.LightningModule):
    r"""Learns how to mix two models of a client module, number by number.

    In the parameters with the given names it mixes a model :math:`\theta_i` of the client's own
    with one that it was sent, :math:`\theta`, by weights :math:`W` in [0, 1], the only parameters
    that it trains:

    .. math:: \hat\theta = \theta_i + (\theta - \theta_i) \odot W, \qquad
        W \leftarrow \operatorname{clip}(W - \eta \nabla_W f_i(\hat\theta), 0, 1)

    (FedALA, Zhang et al. 2023, algorithm 1). All other tensors are those that were sent. The loss
    is the given module's, :math:`f_i`.

    Args:
        module: Whose copy the loss is taken of, with what was sent.
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
        """Let BatchNorm normalise by batches where it trains in the module, and there alone."""
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
