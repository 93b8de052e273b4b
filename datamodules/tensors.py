"""Clients with samples as tensors in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pflight.data.client_names import check_names
from pflight.data.data_module import FederatedDataModule
from pflight.data.loaders import SPLITS, Split
from pflight.errors import ConfigurationError
from pflight.options import checked

Pair = tuple[Tensor, Tensor]
Pairs = Sequence[Pair]

_AT_ONCE = 2**20  # values that are checked together


@checked
class TensorClients(FederatedDataModule):
    """Clients given as pairs of tensors, which are kept without a copy.

    A client may have no samples in a split; without training samples it never trains. Data types
    are kept, so that float64 features stay float64; labels are cast to int64.

    Args:
        train: For each client its training features ``[n, ...]`` and labels ``[n]``.
        val: The same for validation, in the same order of clients; ``None`` means none.
        test: The same for testing.
        num_classes: Number of classes; labels are ``0 .. num_classes - 1``. ``None`` for other
            targets ``[n, ...]`` of one shape and type, which are kept as they are.
        client_names: The clients' names, one for each, such as hospitals; by default none.
        cohort_size: Clients that train in a round; with neither this nor ``participation``, all.
        batch_size: Samples in a local training batch; ``None`` means all of the client's.
        seed: Seed of the cohorts, the newcomers and the order of the samples.
        **kwargs: Further arguments of :class:`FederatedDataModule`.

    Raises:
        ConfigurationError: Data or options that can't be used; the message names the client.

    Example:
        >>> pair = torch.zeros(5, 4), torch.tensor([0, 1, 1, 0, 1])
        >>> data = TensorClients([pair, pair, pair], num_classes=2, cohort_size=2)
        >>> data.num_clients, data.cohorts.size, data.num_samples().tolist()
        (3, 2, [5, 5, 5])
    """

    def __init__(
        self,
        train: Pairs,
        *,
        val: Pairs | None = None,
        test: Pairs | None = None,
        num_classes: int | None = None,
        client_names: Sequence[str] = (),
        cohort_size: int | None = None,
        batch_size: int | None = 32,
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            num_classes=num_classes,
            cohort_size=cohort_size,
            batch_size=batch_size,
            seed=seed,
            **kwargs,
        )
        self.num_clients = len(train)
        if self.num_clients == 0:
            raise ConfigurationError(
                f"{type(self).__name__}: train is empty: a federation needs at least one client"
            )
        names = check_names(type(self).__name__, client_names, self.num_clients)
        self.client_names = names
        self._pairs: dict[Split, list[Pair]] = {}
        for split, pairs in zip(SPLITS, (train, val, test), strict=True):
            given = [] if pairs is None else list(pairs)
            if pairs is not None and len(given) != self.num_clients:
                raise ConfigurationError(
                    f"{type(self).__name__}: {split} has {len(given)} clients, but train has "
                    f"{self.num_clients}"
                )
            for client, pair in enumerate(given):
                _check_form(pair, f"client {self.numbered(client)}, {split}", num_classes)
            self._pairs[split] = given if num_classes is None else [*map(_with_int_labels, given)]
        x, y = self._check_shapes()
        nothing = x[:0], y[:0]
        for split, given in self._pairs.items():
            _check_values(given, split, num_classes, self.numbered)
            kept = [pair if pair[0].shape[0] else nothing for pair in given]
            self._pairs[split] = kept or [nothing] * self.num_clients
        self.setup()

    def samples(self, client: int, split: Split) -> tuple[Tensor, Tensor]:
        """See :meth:`FederatedDataModule.samples`."""
        self.check_client(client)
        return self._pairs[split][client]

    def _check_shapes(self) -> Pair:
        """Raise unless features and targets have one shape and dtype; return the first samples."""
        first: Pair | None = None
        origin = ""
        compared = ("features",) if self.knows_classes else ("features", "targets")
        for split, pairs in self._pairs.items():
            for client, pair in enumerate(pairs):
                if pair[0].shape[0] == 0:
                    continue
                if first is None:
                    first, origin = pair, f"client {self.numbered(client)}, {split}"
                for name, own, usual in zip(compared, pair, first, strict=False):
                    if own.shape[1:] != usual.shape[1:] or own.dtype != usual.dtype:
                        who = f"client {self.numbered(client)}, {split}"
                        raise ConfigurationError(
                            f"{who}: {name} are {own.dtype} of shape {list(own.shape[1:])}, but "
                            f"those of {origin} are {usual.dtype} of shape "
                            f"{list(usual.shape[1:])}"
                        )
        if first is None:
            raise ConfigurationError("train is empty: no client has a sample")
        return first


def _check_form(pair: Pair, name: str, num_classes: int | None) -> None:
    """Raise unless these are features and a label for each of them."""
    if not (isinstance(pair, tuple | list) and len(pair) == 2):
        raise ConfigurationError(f"{name}: expected a pair of features and labels")
    x, y = pair
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
        raise ConfigurationError(
            f"{name}: features and labels must be tensors, got {type(x).__name__} and "
            f"{type(y).__name__}"
        )
    labels = y.ndim == 1 or (num_classes is None and y.ndim > 0)
    if not labels or x.ndim == 0 or x.shape[0] != y.shape[0]:
        raise ConfigurationError(
            f"{name}: features of shape {list(x.shape)} and labels of shape {list(y.shape)}; "
            "expected [n, ...] and [n]"
        )


def _check_values(
    pairs: Pairs, split: Split, num_classes: int | None, numbered: Callable[[int], str]
) -> None:
    """Raise unless features are finite and labels in range; many clients at once, for speed."""
    for block in _blocks(pairs):
        columns = [
            [tensor.cpu() for tensor in column] for column in zip(*block.values(), strict=True)
        ]
        x, y = (torch.cat(column) if len(column) > 1 else column[0] for column in columns)
        if _fault_of(x, y, num_classes) is None:
            continue
        for client, pair in block.items():
            if fault := _fault_of(*pair, num_classes):
                raise ConfigurationError(f"client {numbered(client)}, {split}: {fault}")


def _blocks(pairs: Pairs) -> Iterator[dict[int, Pair]]:
    """Divide the clients with samples into blocks of features that can be copied at once."""
    block: dict[int, Pair] = {}
    size = 0
    for client, pair in enumerate(pairs):
        if pair[0].shape[0]:
            block[client] = pair
            size += pair[0].numel()
        if size >= _AT_ONCE:
            yield block
            block, size = {}, 0
    if block:
        yield block


def _with_int_labels(pair: Pair) -> Pair:
    """Return features and int64 labels; labels that are no whole numbers stay as they are."""
    x, y = pair
    if y.dtype is torch.long or y.is_complex():
        return pair
    labels = y.long()
    whole = not y.is_floating_point() or bool((y == labels).all())
    return (x, labels) if whole else pair


def _fault_of(x: Tensor, y: Tensor, num_classes: int | None) -> str | None:
    """Return the first error in features and labels of some clients, if any."""
    if not _finite(x):
        return "features contain NaN or infinite values"
    if num_classes is None:
        return None if _finite(y) else "targets contain NaN or infinite values"
    if y.dtype is not torch.long:
        return f"labels must be whole numbers, got {y.dtype}"
    smallest, largest = (int(bound) for bound in y.aminmax())
    if smallest < 0 or largest >= num_classes:
        return f"labels go from {smallest} to {largest}, but num_classes is {num_classes}"
    return None


def _finite(x: Tensor) -> bool:
    """Return whether all values are finite. If their sum is, all are; it is faster to check."""
    if not (x.is_floating_point() or x.is_complex()):
        return True
    total = x.sum(dtype=torch.promote_types(x.dtype, torch.float32))
    return bool(total.isfinite()) or bool(x.isfinite().all())
