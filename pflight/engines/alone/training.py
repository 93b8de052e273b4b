"""The local training of one client."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.sgd import sgd

from pflight.data.loaders import Visit
from pflight.engines.base import means_of, paced, resting
from pflight.history import Logs, add_logs
from pflight.method import ClientMethod, Phase
from pflight.states.head import step_extra

from .client import AloneClient, LocalModels

_OPTIONS = (
    "lr",
    "momentum",
    "dampening",
    "weight_decay",
    "nesterov",
    "maximize",
    "foreach",
    "fused",
)
_NO_LOSS = "its training_step returned no loss for any batch"
Batches = Iterator[tuple[Visit, Iterator[Any]]]
"""The visits to a client, each with its batches."""


def steps_only(optimizer: Optimizer, own: Container[int]) -> bool:
    """Return whether an optimizer steps only these parameters, given by ``id``."""
    return all(id(p) in own for group in optimizer.param_groups for p in group["params"])


class Descent:
    """Takes a client's steps of SGD with the arithmetic of ``zero_grad``, ``backward``, ``step``.

    PyTorch's calls look for hooks, profilers and graphs. This takes longer than the step of a small
    network itself. Here gradients are never stored in the parameters.

    Args:
        optimizer: The client's optimizer. It must pass :meth:`suits`.

    Example:
        >>> w = torch.nn.Parameter(torch.tensor([3.0]))
        >>> Descent(SGD([w], lr=0.5)).step((w - 1).square().sum())
        >>> w.detach()
        tensor([1.])
    """

    def __init__(self, optimizer: Optimizer) -> None:
        groups = optimizer.param_groups
        self._parameters = [parameter for group in groups for parameter in group["params"]]
        self._groups = [(len(group["params"]), _options(group)) for group in groups]
        self._momenta: list[Tensor | None] = [None] * len(self._parameters)

    @staticmethod
    def suits(optimizer: Any) -> bool:
        """Return whether this is a plain SGD of torch, and nothing waits for its steps."""
        return (
            type(optimizer) is SGD
            and "step" not in vars(optimizer)  # a learning-rate scheduler counts the steps
            and not optimizer._optimizer_step_pre_hooks
            and not optimizer._optimizer_step_post_hooks
            and not any(group["differentiable"] for group in optimizer.param_groups)
            # A fused step needs gradients with their parameters' strides, as backward() makes them.
            and not any(group["fused"] for group in optimizer.param_groups)
            and all(p.requires_grad for group in optimizer.param_groups for p in group["params"])
        )

    @property
    def options(self) -> list[dict[str, Any]]:
        """The options of the groups of parameters."""
        return [options for _, options in self._groups]

    def step(self, loss: Tensor) -> None:
        """Step along the gradient of a scalar. Independent parameters don't change."""
        awake = [place for place, p in enumerate(self._parameters) if p.requires_grad]
        found = torch.autograd.grad(
            loss, [self._parameters[place] for place in awake], allow_unused=True
        )
        gradients = dict(zip(awake, found, strict=True))
        first = 0
        with torch.no_grad():
            for count, options in self._groups:
                places = range(first, first + count)
                first = places.stop
                used = [place for place in places if gradients.get(place) is not None]
                momenta = [self._momenta[place] for place in used]
                sgd(
                    [self._parameters[place] for place in used],
                    [gradients[place] for place in used],
                    momenta,
                    has_sparse_grad=any(gradients[place].is_sparse for place in used),
                    **options,
                )
                for place, momentum in zip(used, momenta, strict=True):
                    self._momenta[place] = momentum


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group. ``foreach`` is PyTorch's own choice."""
    options = {name: group[name] for name in _OPTIONS}
    if options["foreach"] is None and all(p.device.type == "cpu" for p in group["params"]):
        options["foreach"] = False  # as PyTorch decides in every step
    return options


class ClientTraining:
    """Trains one client by its module's steps and hooks, and by the client method's loss.

    Lightning's loops take the steps. A ready-made task without own hooks, with SGD, trains without
    Lightning's work around a step.

    Args:
        models: The client's models.
    """

    def __init__(self, models: LocalModels) -> None:
        self.models = models
        self.setup = models.setup

    def train(
        self, count: int, visits: Batches, epochs: int, steps: int | None
    ) -> tuple[Logs, int]:
        """Train. Return the client's logged values and its number of steps.

        Args:
            count: The client's number of training samples.
            visits: The client's local epochs.
            epochs: Number of epochs, unless steps are given.
            steps: Batches in all.

        Raises:
            RuntimeError: If the module gives no loss, or the loss does not depend on the weights.
        """
        setup, models = self.setup, self.models
        sizes = setup.batch_sizes(count)
        limits = None if steps is not None else epochs, len(sizes), steps
        models.client.num_samples.fill_(count)
        optimizers = [self._own_optimizer(client) for client in models.clients]
        if models.plain and (descents := self._descents(optimizers)):
            return self._descend(visits, descents, epochs, limits)
        for client, optimizer in zip(models.clients, optimizers, strict=True):
            client.num_skipped = 0
            client.trainer.attach(client.module)
            client.trainer.start(
                count,
                *limits,
                client.step,
                optimizer,
                setup.client_method.extra_options,
                may_be_muted=type(client.client_method).loss is not ClientMethod.loss,
                constant=setup.lr_decay != 1,
            )
            self._pace(client.trainer.groups)
        for visit, batches in visits:
            if self._stopped():
                break
            phase = self._phase_of(visit, epochs)
            if phase is not None and not phase.names:
                continue
            with ExitStack() as stack:
                for client in models.clients:
                    stack.enter_context(resting(client.module, setup.layout, phase))
                    stack.enter_context(paced(client.trainer.groups, phase, self._pace))
                    stack.enter_context(client.trainer.epoch())
                for index, (part, batch) in enumerate(zip(visit.parts, batches, strict=False)):
                    if self._stopped():
                        break
                    last = index + 1 == len(sizes)
                    goes_on = [
                        client.trainer.step(batch, len(part), last) for client in models.clients
                    ]
                    if not all(goes_on):
                        break
        for client in models.clients:
            client.trainer.end()
        steps = models.client.trainer.global_step
        if models.client.module.automatic_optimization and steps:
            self._check_gradients()
        return self._logs(), steps - models.client.num_skipped

    def gradient(self, count: int, visits: Batches) -> tuple[dict[str, Tensor], Logs]:
        """Return the gradients of the parameters over the samples of some visits, and the logs."""
        logs: Logs = {}
        client = self.models.client
        client.num_samples.fill_(count)
        for weight in client.weights.values():
            weight.grad = None
        for visit, batches in visits:
            taken = sum(map(len, visit.parts))
            for part, batch in zip(visit.parts, batches, strict=True):
                if (loss := client.loss(batch, len(part))) is None:
                    continue
                (loss * (len(part) / taken)).backward()
                add_logs(logs, {"train/loss": (loss.detach() * len(part), len(part))})
            if taken and not logs:
                raise RuntimeError(_NO_LOSS)
        zero = torch.zeros((), device=self.setup.device)
        gradients = {
            name: (zero if weight.grad is None else weight.grad.to_dense()).expand_as(weight)
            for name, weight in client.weights.items()
        }
        return gradients, logs

    def _descents(self, optimizers: list[Optimizer | None]) -> list[Descent] | None:
        """Return the descents that take the client's steps, if plain SGD is enough."""
        found = []
        for client, chosen in zip(self.models.clients, optimizers, strict=True):
            optimizer: Any = client.module.configure_optimizers() if chosen is None else chosen
            if chosen is None and isinstance(optimizer, Optimizer):
                step_extra(client.module, optimizer, self.setup.client_method.extra_options)
            own = {id(parameter) for parameter in client.module.parameters()}
            if not Descent.suits(optimizer) or not steps_only(optimizer, own):
                return None
            found.append(Descent(optimizer))
        return found

    def _descend(
        self,
        visits: Batches,
        descents: list[Descent],
        epochs: int,
        limits: tuple[int | None, int, int | None],
    ) -> tuple[Logs, int]:
        """Train a client without own hooks."""
        losses: Logs = {}
        taken, clients = 0, self.models.clients
        for descent in descents:
            self._pace(descent.options)
        with ExitStack() as watching:
            tells = [watching.enter_context(client.trainer.watching(*limits)) for client in clients]
            models = list(zip(clients, descents, tells, strict=True))
            for visit, batches in visits:
                phase = self._phase_of(visit, epochs)
                if phase is not None and not phase.names:
                    continue
                with ExitStack() as stack:
                    for client in clients if phase is not None else ():
                        stack.enter_context(resting(client.module, self.setup.layout, phase))
                    for descent in descents:
                        stack.enter_context(paced(descent.options, phase, self._pace))
                    for size, batch in zip(map(len, visit.parts), batches, strict=True):
                        found = []
                        for client, descent, tell in models:
                            tell(visit.epoch, taken, size)
                            with self.setup.forward_context():
                                loss = client.client_method.objective(client, batch)
                            descent.step(loss)
                            found.append(loss.detach())
                        add_logs(losses, {"train/loss": (found[0] * size, size)})
                        taken += 1
        return {**self._logs(), **losses}, taken

    def _pace(self, groups: Iterable[dict[str, Any]]) -> None:
        """Multiply learning rates by the round's decay."""
        self.setup.pace(groups, self.models.client.anchor is not None)

    def _stopped(self) -> bool:
        return any(client.trainer.should_stop for client in self.models.clients)

    def _own_optimizer(self, client: AloneClient) -> Optimizer | None:
        parameters = [p for p in client.module.parameters() if p.requires_grad]
        return self.setup.client_method.optimizer(parameters, client.anchor is not None)

    def _phase_of(self, visit: Visit, epochs: int) -> Phase | None:
        """Return the phase of a local epoch."""
        phases = self.setup.phases(epochs, self.models.client.anchor is not None)
        begun = [phase for phase in phases or () if phase.first <= visit.epoch]
        return begun[-1] if begun else None

    def _logs(self) -> Logs:
        """Return a client's logged values. If it has two models, they are the personal one's."""
        merged: Logs = {}
        for client in reversed(self.models.clients):
            merged.update(client.trainer.logs)
            merged.update(means_of(client.noted))
        return merged

    def _check_gradients(self) -> None:
        client = self.models.client
        if not client.has_loss:
            raise RuntimeError(_NO_LOSS)
        if not client.skipped and all(w.grad is None for w in client.weights.values()):
            raise RuntimeError(
                "its loss depends on none of its weights: it replaced them, or a function that it "
                "keeps still holds the module that was given, where every client trains a copy"
            )
