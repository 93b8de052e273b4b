"""Metrics of every client, and their micro and macro means over clients."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Literal, get_args

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torchmetrics import Metric

from pflight.errors import ConfigurationError, described
from pflight.runs.distributed import gather

from .means import micro, worst_decile
from .pooling import Pool, Seen

F1Average = Literal["union", "true", "all", "binary"]
Direction = Literal["max", "min"]
"""Whether the highest or the lowest value of a metric is the best."""


class ClientMetrics(Metric):
    """Accuracy, F1 and loss of all clients, from counts per client and class.

    From the true positives, false positives and false negatives of client ``i`` and class ``c``,
    ``acc_i = sum_c tp_ic / n_i``. ``f1_i`` is the mean over classes of
    ``2 tp_ic / (2 tp_ic + fp_ic + fn_ic)``, or 0 if the denominator is 0. Over clients, *micro* is
    the mean weighted by their sample counts ``n_i``. *Macro* is the plain mean over the clients
    with samples. These are not scikit-learn's micro and macro.

    The counts are exact and summed over processes. One update takes the samples of many clients at
    once. Memory grows with ``num_clients * num_classes``, not with the samples.

    Args:
        num_clients: Number of clients; their ids are ``0, ..., num_clients - 1``.
        num_classes: Number of classes of labels and predictions.
        f1_average: The classes in the average of a client's F1. ``"union"``: the classes among its
            labels or its predictions, as is scikit-learn's default. ``"true"``: the classes among
            its labels. ``"all"``: all ``num_classes``. ``"binary"``: class 1 alone.

    Raises:
        ConfigurationError: An argument is out of its range.

    Example:
        >>> import torch
        >>> metrics = ClientMetrics(num_clients=3, num_classes=4)
        >>> metrics.update(
        ...     clients=torch.tensor([0, 0, 0, 0, 1]),
        ...     preds=torch.tensor([0, 1, 1, 1, 3]),
        ...     target=torch.tensor([0, 0, 1, 2, 3]),
        ... )
        >>> metrics.per_client()["f1"]
        tensor([0.3889, 1.0000,    nan], dtype=torch.float64)
        >>> {name: round(value.item(), 4) for name, value in metrics.compute().items()}
        {'micro_acc': 0.6, 'macro_acc': 0.75, 'micro_f1': 0.5111, 'macro_f1': 0.6944,
         'pooled_acc': 0.6, 'worst_decile_acc': 0.5, 'loss': nan}

    References:
        Long et al., Multi-Center Federated Learning: Clients Clustering for Better
        Personalization, World Wide Web 2023, https://arxiv.org/abs/2108.08647.
    """

    is_differentiable = False
    full_state_update = False
    directions: Mapping[str, Direction | None] = {"acc": "max", "f1": "max", "loss": "min"}
    weigh: Callable[[Tensor], Tensor] | None = None  # caps numbers of samples that may be false

    tp: Tensor
    fp: Tensor
    fn: Tensor
    loss_sum: Tensor

    def __init__(
        self, num_clients: int, num_classes: int, *, f1_average: F1Average = "union"
    ) -> None:
        # The cache would return the value of all clients for compute(newcomers).
        super().__init__(compute_with_cache=False)
        if num_clients < 1:
            raise ConfigurationError(f"num_clients must be at least 1, not {num_clients}")
        if num_classes < 1:
            raise ConfigurationError(f"num_classes must be at least 1, not {num_classes}")
        if f1_average not in get_args(F1Average):
            raise ConfigurationError(
                f"f1_average must be one of {', '.join(get_args(F1Average))}, not {f1_average!r}"
            )
        if f1_average == "binary" and num_classes != 2:
            raise ConfigurationError(
                f"f1_average='binary' needs num_classes=2, not num_classes={num_classes}"
            )
        self.num_clients = num_clients
        self.num_classes = num_classes
        self.f1_average = f1_average
        for name in ("tp", "fp", "fn"):
            counts = torch.zeros(num_clients, num_classes, dtype=torch.int64)
            self.add_state(name, counts, dist_reduce_fx="sum")
        loss_sum = torch.zeros(num_clients, dtype=torch.float64)
        self.add_state("loss_sum", loss_sum, dist_reduce_fx="sum")

    def update(
        self, clients: Tensor, preds: Tensor, target: Tensor, loss: Tensor | None = None
    ) -> None:
        """Count a batch of samples, which may belong to many clients.

        Args:
            clients: The client of each sample ``[B]``.
            preds: Predicted class of each sample ``[B]``.
            target: True class of each sample ``[B]``.
            loss: Loss of each sample ``[B]``; without it these clients' mean loss is NaN.

        Raises:
            ConfigurationError: Shapes differ, or an id or a class is out of range.
        """
        loss = torch.full(target.shape, torch.nan, device=target.device) if loss is None else loss
        if clients.ndim != 1 or not clients.shape == preds.shape == target.shape == loss.shape:
            raise ConfigurationError(
                "clients, preds, target and loss must be vectors of one length, not of shapes "
                f"{[tuple(values.shape) for values in (clients, preds, target, loss)]}"
            )
        clients, preds, target = clients.long(), preds.long(), target.long()
        _check_range("client", clients, self.num_clients)
        _check_range("predicted class", preds, self.num_classes)
        _check_range("label", target, self.num_classes)
        hit = preds == target
        for counts, classes, counted in (
            (self.tp, target, hit),
            (self.fp, preds, ~hit),
            (self.fn, target, ~hit),
        ):
            counts.index_put_((clients, classes), counted.long(), accumulate=True)
        self.loss_sum.index_add_(0, clients, loss.detach().double())

    def per_client(self) -> dict[str, Tensor]:
        """Return every client's ``acc``, ``f1``, ``loss`` and ``num_samples``.

        Returns:
            Tensors ``[num_clients]``: the number of samples, and float64 values that are NaN for a
            client without samples.
        """
        with self.sync_context(
            dist_sync_fn=self.dist_sync_fn,
            should_sync=self._to_sync,
            should_unsync=self._should_unsync,
        ):
            return self._per_client()

    def compute(self, clients: Tensor | None = None) -> dict[str, Tensor]:
        """Return the means over clients.

        Args:
            clients: Ids of the clients to report; all of them by default.

        Returns:
            Scalars, NaN if none of the clients has samples. They are ``micro_acc``, ``macro_acc``,
            ``micro_f1`` and ``macro_f1``. ``pooled_acc`` is the accuracy over all samples together.
            ``worst_decile_acc`` is the mean accuracy of the worst tenth of the clients with
            samples, rounded up. ``loss`` is the mean over samples.

        Raises:
            ConfigurationError: The id of a client is out of range.
        """
        values = self._per_client()
        chosen = values["num_samples"] > 0
        if clients is not None:
            _check_range("client", clients, self.num_clients)
            chosen &= torch.zeros_like(chosen).index_fill(0, clients.to(chosen.device), True)
        num_samples, acc, f1, loss = (
            values[name][chosen].double() for name in ("num_samples", "acc", "f1", "loss")
        )
        pooled_acc = self._right()[chosen].sum() / num_samples.sum()
        if self.weigh is not None:
            num_samples = self.weigh(num_samples)
        micro_acc = micro(acc, num_samples)
        return {
            "micro_acc": micro_acc,
            "macro_acc": acc.mean(),
            "micro_f1": micro(f1, num_samples),
            "macro_f1": f1.mean(),
            "pooled_acc": pooled_acc if self.weigh is None else micro_acc,
            "worst_decile_acc": worst_decile(acc, "max"),
            "loss": micro(loss, num_samples),
        }

    def reset(self) -> None:
        """Set all counts to zero.

        They stay ordinary tensors, even if Lightning resets them in inference mode.
        """
        with torch.inference_mode(mode=False):
            super().reset()

    def _per_client(self) -> dict[str, Tensor]:
        num_samples = self._count()
        return {
            "acc": self._right().double() / num_samples,
            "f1": torch.where(num_samples > 0, self._f1(), torch.nan),
            "loss": self.loss_sum / num_samples,
            "num_samples": num_samples,
        }

    def scores(self, client: int) -> dict[str, Tensor]:
        """Return one client's numbers without numbers of classes, for :class:`ClientScores`."""
        count, right = self._count()[client], self._right()[client]
        f1 = torch.where(count > 0, self._f1()[client], 0.0)
        return {"count": count, "right": right, "f1": f1, "loss_sum": self.loss_sum[client]}

    def _count(self) -> Tensor:
        """Return every client's number of samples ``[num_clients]``."""
        return (self.tp + self.fn).sum(dim=1)

    def _right(self) -> Tensor:
        """Return every client's number of right answers ``[num_clients]``."""
        return self.tp.sum(dim=1)

    def _f1(self) -> Tensor:
        """Return every client's F1 ``[num_clients]``, averaged over the classes in use."""
        labels = self.tp + self.fn
        denominator = labels + self.tp + self.fp
        f1 = 2 * self.tp.double() / denominator.clamp(min=1)
        match self.f1_average:
            case "union":
                counts = denominator > 0
            case "true":
                counts = labels > 0
            case "all":
                counts = torch.ones_like(labels, dtype=torch.bool)
            case "binary":
                return f1[:, 1]
        return (f1 * counts).sum(dim=1) / counts.sum(dim=1)


class ClientScores(ClientMetrics):
    """The same metrics, if clients count their answers themselves and send only the sums.

    Attributes:
        count: Number of samples of each client ``[num_clients]``.
        right: Number of right answers of each client.
        f1: F1 of each client.
        loss_sum: Sum of losses of each client.
    """

    count: Tensor
    right: Tensor
    f1: Tensor

    def __init__(self, num_clients: int) -> None:
        super().__init__(num_clients, num_classes=1)  # classes are not distinguished
        for name in ("count", "right"):
            whole = torch.zeros(num_clients, dtype=torch.int64)
            self.add_state(name, whole, dist_reduce_fx="sum")
        self.add_state("f1", torch.zeros(num_clients, dtype=torch.float64), dist_reduce_fx="sum")

    def _count(self) -> Tensor:
        return self.count

    def _right(self) -> Tensor:
        return self.right

    def _f1(self) -> Tensor:
        return self.f1


class ClientValues:
    """The metrics that some clients' modules logged for a model: by client and short name."""

    def __init__(self) -> None:
        self.clients: list[int] = []
        self.values: dict[str, dict[int, float]] = {}
        self.higher_is_better: dict[str, bool] = {}
        self.pools: dict[str, Pool] = {}

    def add(
        self,
        client: int,
        split: str,
        logged: Mapping[str, Tensor],
        higher_is_better: Mapping[str, bool],
        seen: Mapping[str, Seen],
    ) -> None:
        """Add one client's logged values. ``val/dice`` and ``val_dice`` both become ``dice``.

        Args:
            client: The client.
            split: The split of the client's samples.
            logged: The values by logged name.
            higher_is_better: Whether higher is better, for some values.
            seen: The states of the metric objects behind some values.

        Raises:
            ConfigurationError: If two values get the same short name, or one a reserved name.
        """
        self.clients.append(client)
        shorts: dict[str, str] = {}
        for name, value in logged.items():
            short = name.removeprefix(f"{split}/").removeprefix(f"{split}_")
            if short == "num_samples":
                raise ConfigurationError(
                    f"the client logs {name!r}, but num_samples is its number of samples: "
                    "log it under another name"
                )
            if short in shorts:
                raise ConfigurationError(
                    f"the client logs {shorts[short]!r} and {name!r}; both are {short!r} of "
                    f"its {split} samples: log one of them under another name"
                )
            shorts[short] = name
            self.values.setdefault(short, {})[client] = float(value)
            if name in higher_is_better:
                self.higher_is_better[short] = higher_is_better[name]
            if name in seen and seen[name].state:
                if short not in self.pools:
                    self.pools[short] = Pool(seen[name].metric)
                self.pools[short].add(client, seen[name])

    def without(self, clients: Collection[int]) -> ClientValues:
        """Return the values without those of some clients."""
        rest = ClientValues()
        rest.clients = [client for client in self.clients if client not in clients]
        rest.values = {
            name: {client: value for client, value in values.items() if client not in clients}
            for name, values in self.values.items()
        }
        rest.higher_is_better = self.higher_is_better
        rest.pools = {name: pool.without(clients) for name, pool in self.pools.items()}
        return rest

    def update(self, other: ClientValues) -> None:
        """Add the values of other clients."""
        self.clients += other.clients
        for name, values in other.values.items():
            self.values.setdefault(name, {}).update(values)
        self.higher_is_better |= other.higher_is_better
        for name, pool in other.pools.items():
            if name in self.pools:
                self.pools[name].update(pool)
            else:
                self.pools[name] = pool.without(())


class LoggedMetrics:
    """Means over clients of the metrics that their own modules log in an evaluation.

    A metric that a module logs as ``val/X`` gives means over the clients that logged a number. They
    are NaN if clients logged only NaN or infinity. ``micro_X`` is the mean weighted by the clients'
    samples, and ``macro_X`` the plain mean. If it is known whether higher is better,
    ``worst_decile_X`` is the mean of the worst tenth of the clients, rounded up. ``X`` itself is
    the same as ``micro_X``, unless it is the name of such a mean. If it was logged as a
    torchmetrics object, ``pooled_X`` is its value over the samples of all clients together. This
    differs from ``micro_X`` unless the metric is a mean over samples.

    Args:
        num_samples: Number of samples of each client in the judged split ``[N]``.
        split: ``"val"`` or ``"test"``.
        lower_is_better: Names of metrics, with or without the split. Lower values are better, and
            torchmetrics does not know this.
    """

    weigh: Callable[[Tensor], Tensor] | None = None

    def __init__(
        self, num_samples: Tensor, split: str, lower_is_better: Collection[str] = ()
    ) -> None:
        self.num_samples = num_samples
        self.split = split
        self._lower = {name.removeprefix(f"{split}/") for name in lower_is_better}
        self.values = ClientValues()
        self._all: ClientValues | None = None

    def update(self, values: ClientValues) -> None:
        """Add the logged values of more clients."""
        self.values.update(values)
        self._all = None

    @property
    def directions(self) -> Mapping[str, Direction | None]:
        """Whether the highest or lowest values are best, by name; ``None`` where not known."""
        gathered = self._gathered()
        words: dict[bool | None, Direction | None] = {True: "max", False: "min", None: None}
        known = {**gathered.higher_is_better, **dict.fromkeys(self._lower, False)}
        return {name: words[known.get(name)] for name in gathered.values}

    @property
    def is_empty(self) -> bool:
        """Whether clients were judged, but no client logged anything."""
        gathered = self._gathered()
        return bool(gathered.clients) and not gathered.values

    @property
    def has_nothing(self) -> bool:
        """Whether no value is known, perhaps because no client was judged."""
        return not self._gathered().values

    def not_finite(self) -> dict[str, list[int]]:
        """Return the clients with values that are not finite, by name."""
        odd = {
            name: sorted(client for client, value in values.items() if not math.isfinite(value))
            for name, values in self._gathered().values.items()
        }
        return {name: clients for name, clients in odd.items() if clients}

    def per_client(self) -> dict[str, Tensor]:
        """Return every client's values and ``num_samples`` ``[N]``; NaN if there is none."""
        gathered, judged = self._gathered(), torch.zeros_like(self.num_samples)
        judged[gathered.clients] = self.num_samples[gathered.clients]
        columns = {}
        for name, values in gathered.values.items():
            columns[name] = torch.full(self.num_samples.shape, torch.nan, dtype=torch.double)
            columns[name][list(values)] = torch.tensor(list(values.values()), dtype=torch.double)
        return {**columns, "num_samples": judged}

    def compute(self, clients: Tensor) -> dict[str, Tensor]:
        """Return the means over some clients ``[C]``."""
        directions, columns, logged = self.directions, self.per_client(), self._gathered().values
        chosen = torch.zeros(len(self.num_samples), dtype=torch.bool)
        chosen[clients.cpu()] = True
        means: dict[str, Tensor] = {}
        plain: dict[str, Tensor] = {}
        for name in sorted(directions):
            if not chosen[[*logged[name]]].any():
                continue
            known = chosen & columns[name].isfinite()
            values, counts = columns[name][known], columns["num_samples"][known].double()
            counts = counts if self.weigh is None else self.weigh(counts)
            means[f"micro_{name}"] = micro(values, counts)
            means[f"macro_{name}"] = values.mean()
            if (best := directions[name]) is not None:
                means[f"worst_decile_{name}"] = worst_decile(values, best)
            if (pool := self._gathered().pools.get(name)) is not None:
                means |= self._pooled(name, pool, clients)
            plain[name] = means[f"micro_{name}"]
        for name in plain.keys() & means.keys():
            rank_zero_warn(
                f"{self.split}/{name} is the mean over clients of another value, and not what the "
                f"client logs under this name, which is {self.split}/micro_{name}"
            )
        return {**means, **{name: mean for name, mean in plain.items() if name not in means}}

    def _pooled(self, name: str, pool: Pool, clients: Tensor) -> dict[str, Tensor]:
        """Return the metric of all samples of the clients ``[C]``, unless it can't be merged."""
        try:
            return {f"pooled_{name}": pool.value(clients.tolist())}
        except Exception as error:
            rank_zero_warn(
                f"there is no {self.split}/pooled_{name}: merging the clients' metrics raises "
                f"{described(error)}"
            )
            return {}

    def _gathered(self) -> ClientValues:
        """Return the values of all ranks; all ranks have to call it."""
        if self._all is None:
            self._all = ClientValues()
            for values in gather(self.values):
                self._all.update(values)
        return self._all


def _check_range(name: str, values: Tensor, size: int) -> None:
    outside = (values < 0) | (values >= size)
    if outside.any():
        raise ConfigurationError(
            f"{name} {int(values[outside][0])} is out of range: it must lie in 0..{size - 1}"
        )
