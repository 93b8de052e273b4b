"""Which models of a client are judged, and the tags under which their quality is logged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from .distributed import owned
from .engines.updates import Evaluation
from .errors import ConfigurationError
from .metrics import ClientMetrics, ClientValues, LoggedMetrics
from .randomness import Purpose
from .server_callback import ServerCallback
from .task import Task

if TYPE_CHECKING:
    from .federation import Federation

Judged = Literal["", "server/", "finetuned/"]
"""Tag prefixes: the model that a client would use, what the server would send it, and the former
after fine-tuning, where there is any."""


class Evaluator:
    """Judges the models of all clients in one pass over their samples of a split.

    Args:
        federation: Whose clients are judged.
        split: ``"val"`` or ``"test"``; also the prefix of the tags.
    """

    def __init__(self, federation: Federation, split: Literal["val", "test"]) -> None:
        self.federation = federation
        self.split = split
        self.failures = federation.failures_of(
            federation.last_round, f"it is left out of the {split} metrics"
        )
        models: tuple[Judged, ...] = ("", "server/")
        if federation.finetune_epochs:
            models += ("finetuned/",)
        with torch.inference_mode(False):
            self._metrics = {model: self._new_metrics() for model in models}

    def judge(self, clients: Tensor) -> None:
        """Run all models of those of the clients ``[C]`` that this rank owns."""
        federation = self.federation
        clients = owned(clients)
        if not len(clients):
            return
        with federation.noting(self.failures):
            outputs = self._outputs(clients)
        for model, evaluation in outputs.items():
            self._add(model, evaluation)

    def _outputs(self, clients: Tensor) -> dict[Judged, Evaluation | ClientValues]:
        federation = self.federation
        callback = federation.attached_callback
        parts = [
            self._evaluate(group, federation.complete(group, sent))
            for group, sent in callback.broadcast_groups(clients)
        ]
        server = _joined(parts)
        outputs: dict[Judged, Evaluation | ClientValues] = {"server/": server, "": server}
        if callback.personalizes or federation.finetune_epochs:
            models = ClientModels.of(federation, clients)
            outputs[""] = self._evaluate(clients, models.used)
            if models.finetuned is models.used:
                outputs["finetuned/"] = outputs[""]
            elif models.finetuned is not None:
                outputs["finetuned/"] = self._evaluate(clients, models.finetuned)
        return outputs

    def _evaluate(self, clients: Tensor, states: TensorDict) -> Evaluation | ClientValues:
        engine = self.federation.attached_engine
        outputs, failures = engine.evaluate(clients, states, self.split)
        self.federation.note_failures(failures, f"on its {self.split} samples")
        return outputs

    def means(self) -> dict[str, float]:
        """Return all metrics by tag, over the clients of all ranks, newcomers apart as ``new/``.

        Raises:
            ClientError: On all ranks, if a client of any of them failed and that stops the run.
        """
        self.failures.settle()
        newcomers = self.federation.attached_data.new_clients
        everyone = torch.arange(self.federation.num_clients)
        groups = {"": everyone[~torch.isin(everyone, newcomers)]}
        if self.split == "test" and len(newcomers):
            groups["new/"] = newcomers
        return {
            f"{self.split}/{group}{model}{name}": value.item()
            for group, clients in groups.items()
            for model, metrics in self._metrics.items()
            for name, value in metrics.compute(clients).items()
        }

    def per_client(self, model: Judged = "") -> dict[str, Tensor]:
        """Return every client's ``acc``, ``f1``, ``loss`` and ``num_samples`` ``[num_clients]``."""
        if model not in self._metrics:
            raise ConfigurationError(f"no model {model!r} was judged, only {list(self._metrics)}")
        return {name: value.cpu() for name, value in self._metrics[model].per_client().items()}

    def _new_metrics(self) -> ClientMetrics | LoggedMetrics:
        federation, client = self.federation, self.federation.client
        if isinstance(client, Task):
            counting = client.client_metrics(federation.num_clients, federation.f1_average)
            if counting is not None and federation.attached_engine.setting.task is not None:
                return counting.to(federation.device)
        counts = federation.attached_data.num_samples(self.split)
        return LoggedMetrics(counts, self.split, getattr(client, "lower_is_better", ()))

    def _add(self, model: Judged, outputs: Evaluation | ClientValues) -> None:
        """Add the outputs of all but failed clients, for all models of the same."""
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
        """Return what a task says of each client's outputs."""
        task, values = self.federation.client, ClientValues()
        assert isinstance(task, Task)
        clients, counts = outputs.clients.unique_consecutive(return_counts=True)
        parts = [column.split(counts.tolist()) for column in outputs[1:]]
        for client, own, targets, losses in zip(clients.tolist(), *parts, strict=True):
            measured = {**task.measure(own, targets), "loss": losses.mean()}
            values.add(client, self.split, measured, task.higher_is_better)
        return values


def _joined(parts: list[Any]) -> Any:
    """Return one for all of what an engine gave for groups of clients."""
    if isinstance(parts[0], Evaluation):
        return Evaluation(*map(torch.cat, zip(*parts, strict=True)))
    joined = ClientValues()
    for part in parts:
        joined.update(part)
    return joined


class ClientModels(NamedTuple):
    """The models by which some clients are judged."""

    used: TensorDict
    """What each client would use ``[C]``."""
    finetuned: TensorDict | None
    """Fine-tuned models ``[C]``, with ``finetune_epochs``; these are used, except by clients that
    are judged by what they remember, whatever the server callback."""

    @classmethod
    def of(cls, federation: Federation, clients: Tensor) -> ClientModels:
        """Return the models of the clients ``[C]``."""
        callback = federation.attached_callback
        if not federation.finetune_epochs:
            return cls(callback.personalize(clients), None)
        own = type(callback).personalize is not ServerCallback.personalize
        if own or not federation.client_half.judged_by_memory:
            tuned = finetune(federation, clients, callback.personalize(clients))
            return cls(tuned, tuned)
        starts = federation.lay_over(clients, callback.broadcast(clients))
        tuned = finetune(federation, clients, starts)
        return cls(
            federation.complete(clients, federation.remembered(clients, tuned).states), tuned
        )


def finetune(federation: Federation, clients: Tensor, states: TensorDict) -> TensorDict:
    """Return copies of the models ``[C]`` trained on the clients' training samples.

    The loss is the task's alone: without an anchor, penalties vanish. A client whose training fails
    keeps its model.
    """
    updates = federation.attached_engine.train(
        clients,
        states,
        round_index=len(federation.history),
        epochs=federation.finetune_epochs,
        purpose=Purpose.FINETUNE,
    )
    federation.note_failures(updates.failures, "to be fine-tuned")
    if not updates.failures:
        return updates.states
    tuned = states.clone()
    tuned[torch.isin(clients, updates.clients)] = updates.states
    return tuned
