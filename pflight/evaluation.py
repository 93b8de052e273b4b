"""Evaluation: the judged models of a client, and the tags of the logged values."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch
from lightning.pytorch.utilities import rank_zero_warn
from tensordict import TensorDict
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from .client_work import Aside
from .clients import Clients
from .errors import ConfigurationError
from .metrics.collection import ClientMetrics, ClientValues, Direction, F1Average, LoggedMetrics
from .metrics.pooling import Seen
from .runs.distributed import owned
from .server_callback import ServerCallback
from .states.server_models import server_work
from .states.state import entries
from .states.updates import Evaluation, Predictions
from .task import Task

WhichModel = str
"""The judged model of a client, as a prefix of tags: ``""``, the client's own model;
``"server/"``, the model that the server would send to the client; ``"finetuned/"``, the client's
own model after fine-tuning; or a further one of the client method's ``models``."""


class Evaluator:
    """Judges the models of all clients in one pass over their samples of a split.

    Args:
        clients: The clients.
        callback: The server callback. It returns each client's model.
        split: ``"val"`` or ``"test"``; also the prefix of the tags.
        f1_average: As in :class:`~pflight.metrics.collection.ClientMetrics`.
    """

    def __init__(
        self,
        clients: Clients,
        callback: ServerCallback,
        split: Literal["val", "test"],
        f1_average: F1Average,
    ) -> None:
        self.clients = clients
        self.callback = callback
        self.split = split
        self.f1_average: F1Average = f1_average
        self.failures = clients.failures_of(
            clients.last_round, f"it is left out of the {split} metrics"
        )
        clients.attached_engine.setup.round_index = clients.last_round
        clients.at_round(clients.last_round)
        clients.aside = Aside()
        models: tuple[WhichModel, ...] = ("", "server/")
        if clients.training.finetune_epochs:
            models += ("finetuned/",)
        models += clients.outer_method.further_models
        with torch.inference_mode(False):
            self._metrics = {model: self._new_metrics() for model in models}

    def judge(self, ids: Tensor) -> None:
        """Evaluate all models of the clients ``[C]`` that belong to this rank."""
        ids = owned(ids)
        if not len(ids):
            return
        for group, epochs in self.clients.by_tuning(ids):
            with self.clients.noting(self.failures):
                outputs = self._outputs(group, epochs)
            for model, evaluation in outputs.items():
                self._add(model, evaluation)

    def _outputs(self, ids: Tensor, epochs: int) -> dict[WhichModel, Evaluation | ClientValues]:
        """Return what the models of the clients ``[C]`` give, some after fine-tuning."""
        clients, callback = self.clients, self.callback
        parts = [
            self._evaluate(group, self._as_sent(group, sent))
            for group, sent in callback.broadcast_groups(ids)
        ]
        server = _joined(parts)
        outputs: dict[WhichModel, Evaluation | ClientValues] = {"server/": server, "": server}
        models: ClientModels | None = None
        if callback.personalizes or epochs:
            models = ClientModels.of(clients, callback, ids, epochs)
            outputs[""] = self._evaluate(ids, models.used)
        if clients.training.finetune_epochs:
            outputs["finetuned/"] = outputs[""]
            if models is not None and models.finetuned is not models.used:
                outputs["finetuned/"] = self._evaluate(ids, models.finetuned)
        for name in clients.outer_method.further_models:
            sent = callback.broadcast(ids)
            used = clients.judged(ids, sent) if models is None else models.used
            states = clients.model(name, ids, sent, used.copy())
            outputs[name] = self._evaluate(ids, states)
        return outputs

    def _as_sent(self, ids: Tensor, sent: TensorDict) -> TensorDict:
        """Return the full states ``[C]`` of the tags ``server/``."""
        return self.clients.model("server/", ids, sent, self.clients.completed(ids, sent))

    def _evaluate(self, ids: Tensor, states: TensorDict) -> Evaluation | ClientValues:
        outputs, failures = self.clients.attached_engine.evaluate(ids, states, self.split)
        self.clients.note_failures(failures, f"on its {self.split} samples")
        return outputs

    def means(self, required: bool = True) -> dict[str, float]:
        """Return all metrics by tag over the clients of all ranks; newcomers are under ``new/``.

        Args:
            required: Whether at least one client must have been judged. This is always so if the
                names of the metrics are not known otherwise.

        Raises:
            ClientError: On all ranks. A client of any rank failed and ``on_client_error`` is
                ``"raise"``, or all clients failed and at least one must have been judged.
            ConfigurationError: If no client's module logged anything.
        """
        self.failures.raise_together()
        own = self._metrics[""]
        if required or (isinstance(own, LoggedMetrics) and own.has_nothing):
            self.end()
        for model, logged in self._metrics.items():
            if isinstance(logged, LoggedMetrics):
                self._check_logged(model, logged)
        newcomers = self.clients.newcomers
        everyone = torch.arange(self.clients.num_clients)
        groups = {"": everyone[~torch.isin(everyone, newcomers)]}
        if self.split == "test" and len(newcomers):
            groups["new/"] = newcomers
        means: dict[str, float] = {
            f"{self.split}/{group}{model}{name}": value.item()
            for group, clients in groups.items()
            for model, metrics in self._metrics.items()
            for name, value in metrics.compute(clients).items()
        }
        aside = self.clients.aside.take()
        if aside.down:
            means[f"{self.split}/bytes_down"] = aside.down
            means[f"{self.split}/bytes_up"] = aside.up
        return means

    def end(self) -> None:
        """Raise if clients failed and no client could be judged. Every rank has to call it.

        Raises:
            ClientError: On all ranks, with the first failure.
        """
        judged = self._metrics[""].per_client()["num_samples"]
        self.failures.sound = int((judged > 0).sum())
        self.failures.end(f"judged on its {self.split} samples")

    def _check_logged(self, model: WhichModel, metrics: LoggedMetrics) -> None:
        """Raise if nothing was logged. Warn once of the clients that a metric leaves out."""
        if metrics.is_empty:
            step = "test_step" if self.split == "test" else "validation_step"
            raise ConfigurationError(
                f"{type(self.clients.module).__name__}.{step} logs nothing to judge clients by: "
                f"call self.log('{self.split}/...', value) in it"
            )
        if isinstance(self.clients.module, Task):  # a task reports undefined values as NaN
            return
        for name, clients in metrics.not_finite().items():
            tag = f"{self.split}/{name}"
            if tag not in self.clients.warned_metrics:
                self.clients.warned_metrics.add(tag)
                more = f" and {len(clients) - 1:,} others" if len(clients) > 1 else ""
                rank_zero_warn(
                    f"round {self.clients.last_round}: {self.split}/{model}{name} of client "
                    f"{self.clients.numbered(clients[0])}{more} is undefined, NaN or infinite, and "
                    "left out of that metric; this is said once"
                )

    def per_client(self, model: WhichModel = "") -> dict[str, Tensor]:
        """Return every client's ``acc``, ``f1``, ``loss`` and ``num_samples`` ``[num_clients]``."""
        if model not in self._metrics:
            raise ConfigurationError(
                f"no model {model!r} was evaluated: model must be one of {list(self._metrics)}"
            )
        return {name: value.cpu() for name, value in self._metrics[model].per_client().items()}

    @property
    def models(self) -> tuple[WhichModel, ...]:
        """The models that are judged."""
        return tuple(self._metrics)

    @property
    def directions(self) -> Mapping[str, Direction | None]:
        """Whether the highest or the lowest values of each metric are best, if known."""
        return self._metrics[""].directions

    def _new_metrics(self) -> ClientMetrics | LoggedMetrics:
        clients, module = self.clients, self.clients.module
        task = clients.attached_engine.setup.task
        if task is not None:
            counting = task.client_metrics(clients.num_clients, self.f1_average)
            if counting is not None:
                return counting.to(clients.device)
        counts = clients.attached_data.num_samples(self.split)
        return LoggedMetrics(counts, self.split, getattr(module, "lower_is_better", ()))

    def _add(self, model: WhichModel, outputs: Evaluation | ClientValues) -> None:
        """Add the outputs of the clients that did not fail to the metrics of a model."""
        metrics, failed = self._metrics[model], self.failures.clients
        if isinstance(outputs, Evaluation) and isinstance(metrics, LoggedMetrics):
            outputs = self._measured(outputs)
        if isinstance(outputs, ClientValues):
            assert isinstance(metrics, LoggedMetrics)
            metrics.update(outputs.without(failed))
            return
        assert isinstance(metrics, ClientMetrics)
        if failed:
            left_out = torch.tensor(sorted(failed), device=outputs.clients.device)
            sound = ~torch.isin(outputs.clients, left_out)
            outputs = Evaluation(*(column[sound] for column in outputs))
        predictions = outputs.outputs.argmax(dim=1) if len(outputs.outputs) else outputs.targets
        metrics.update(outputs.clients, predictions, outputs.targets, outputs.losses)

    def _measured(self, outputs: Evaluation) -> ClientValues:
        """Return the metrics of a task for each client's outputs."""
        task, values = self.clients.module, ClientValues()
        assert isinstance(task, Task)
        clients, counts = outputs.clients.unique_consecutive(return_counts=True)
        parts = [column.split(counts.tolist()) for column in outputs[1:]]
        for client, own, targets, losses in zip(clients.tolist(), *parts, strict=True):
            objects: MetricCollection | dict[str, Metric] = getattr(task, "metrics", {})
            if isinstance(objects, MetricCollection):
                objects.reset()
            measured = {**task.measure(own, targets), "loss": losses.mean()}
            seen = {name: Seen.by(metric) for name, metric in objects.items()}
            values.add(client, self.split, measured, task.higher_is_better, seen)
        return values


def _joined(parts: list[Any]) -> Any:
    """Join an engine's results for several groups of clients."""
    if isinstance(parts[0], Evaluation):
        return Evaluation(*map(torch.cat, zip(*parts, strict=True)))
    joined = ClientValues()
    for part in parts:
        joined.update(part)
    return joined


class ClientModels(NamedTuple):
    """The judged models of some clients."""

    used: TensorDict
    """Each client's own model ``[C]``."""
    finetuned: TensorDict
    """The models ``[C]`` after fine-tuning, if there is any. They are also :attr:`used`, unless
    clients are judged by their memory."""

    @classmethod
    def of(
        cls, clients: Clients, callback: ServerCallback, ids: Tensor, epochs: int
    ) -> ClientModels:
        """Return the models of the clients ``[C]``, fine-tuned for some epochs."""
        if not epochs:
            used = callback.personalize(ids)
            return cls(used, used)
        outer = clients.outer_method
        rules = outer.models()
        if callback.judges_otherwise or "" in rules or outer.judging_memory is None:
            tuned = clients.finetune(ids, callback.personalize(ids), epochs=epochs)
            if "finetuned/" in rules:
                tuned = clients.model("finetuned/", ids, callback.broadcast(ids), tuned)
            return cls(tuned, tuned)
        starts = outer.start_states(clients, ids, callback.broadcast(ids))
        tuned = clients.finetune(ids, starts, epochs=epochs)
        return cls(clients.historical(ids, tuned), tuned)


def model_of(
    clients: Clients, client: int, callback: ServerCallback, device: torch.device
) -> dict[str, Tensor]:
    """Return a client's judged model; without fine-tuning if the client fails in it."""
    failures = clients.failures_of(clients.rounds, "its model is taken as it is", together=False)
    with server_work(device, clients.seed, clients.rounds), clients.noting(failures):
        ((ids, epochs),) = clients.by_tuning(torch.tensor([client], device=device))
        used = ClientModels.of(clients, callback, ids, epochs).used
        return {name: value[0] for name, value in entries(used)}


def predict(clients: Clients, callback: ServerCallback, ids: Tensor) -> Evaluation | Predictions:
    """Return the predictions of the clients' models ``[C]`` on their test samples."""
    clients.attached_engine.setup.round_index = clients.last_round
    clients.at_round(clients.last_round)
    parts: list[Any] = []
    for group, epochs in clients.by_tuning(ids):
        states = ClientModels.of(clients, callback, group, epochs).used
        predictions, failures = clients.attached_engine.predict(group, states, "test")
        clients.note_sound(len(group) - len(failures))
        clients.note_failures(failures, "to predict")
        parts.append(predictions)
    if isinstance(parts[0], Evaluation):
        return Evaluation(*(values.cpu() for values in _joined(parts)))
    return list(chain.from_iterable(parts))
