"""Clients' samples, checked when they are read: any client may hand out anything."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pflight.data_module import FederatedDataModule
from pflight.errors import ConfigurationError
from pflight.loaders import Split
from pflight.models.client import Batch

from .updates import STOPS, ClientFailure

_ASKED = 5  # clients, of which one or two may be odd


class Form(NamedTuple):
    """What the samples of all clients have in common."""

    x: torch.Size
    x_dtype: torch.dtype
    y: torch.Size
    y_dtype: torch.dtype

    @classmethod
    def of(cls, batch: Batch) -> Form:
        """Return the shapes of a sample and of a label, and their types."""
        x, y = batch
        return cls(x.shape[1:], x.dtype, y.shape[1:], y.dtype)

    def fitted(self, batch: Batch) -> Batch:
        """Return samples of this form, which nothing at all has.

        Raises:
            ValueError: If they are of another.
        """
        x, y = batch
        same_types = x.dtype == self.x_dtype and y.dtype == self.y_dtype
        if same_types and x.shape[1:] == self.x and y.shape[1:] == self.y:
            return batch
        if not len(y):
            empty = x.new_empty((0, *self.x), dtype=self.x_dtype)
            return empty, y.new_empty((0, *self.y), dtype=self.y_dtype)
        form = Form.of(batch)
        parts = ("features", form[:2], self[:2]), ("labels", form[2:], self[2:])
        what, own, usual = next(part for part in parts if part[1] != part[2])
        raise ValueError(f"its {what} are {_kind(*own)}, those of other clients {_kind(*usual)}")


def _kind(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} of shape {list(shape)}"


def read_samples(data: FederatedDataModule, client: int, split: Split) -> Batch:
    """Return a client's samples, features and as many labels.

    Raises:
        TypeError: If they are anything but a pair of tensors.
        ValueError: If these are not of one length.
    """
    pair: Any = data.samples(client, split)
    of_two = isinstance(pair, tuple | list) and len(pair) == 2
    if not of_two or not (isinstance(pair[0], Tensor) and isinstance(pair[1], Tensor)):
        kinds = [type(part).__name__ for part in pair] if isinstance(pair, tuple | list) else []
        got = f"({', '.join(kinds[:3])}{', ...' * (len(kinds) > 3)})" if kinds else ""
        raise TypeError(
            f"samples() must return a pair of tensors, features and labels, "
            f"not {got or type(pair).__name__}"
        )
    x, y = pair
    if not x.dim() or not y.dim() or x.shape[0] != y.shape[0]:
        raise ValueError(
            f"samples() must return as many labels as features, not features of shape "
            f"{list(x.shape)} and labels of shape {list(y.shape)}"
        )
    return x, y


def check_count(count: int, y: Tensor, order: Tensor) -> None:
    """Raise a ``ValueError`` unless there are ``count`` samples and an order of them."""
    if len(y) != count:
        raise ValueError(f"it has {len(y)} training samples, but num_samples() says {count}")
    if len(order) != count:
        raise ValueError(f"order() gives {len(order)} positions for {count} training samples")


def check_labels(y: Tensor, num_classes: int) -> None:
    """Raise a ``ValueError`` unless labels ``[n]`` are classes."""
    if y.dim() != 1 or y.is_floating_point() or y.is_complex():
        dtype = str(y.dtype).removeprefix("torch.")
        raise ValueError(f"its labels must be classes [n], not {dtype} of shape {list(y.shape)}")
    if len(y) == 0:
        return
    smallest, largest = (int(bound) for bound in y.aminmax())
    if smallest < 0 or largest >= num_classes:
        raise ValueError(
            f"its labels go from {smallest} to {largest}, but num_classes is {num_classes}"
        )


def usual_samples(data: FederatedDataModule) -> Batch:
    """Return the training samples of a client that has them in the most frequent form.

    Of the first clients; any of these may differ, or fail to hand out its own.

    Raises:
        ConfigurationError: If all of them fail.
    """
    found: list[Batch] = []
    failures: list[ClientFailure] = []
    for client in data.train_clients[:_ASKED].tolist():
        try:
            found.append(read_samples(data, client, "train"))
        except STOPS:
            raise
        except BaseException as error:
            failures.append(ClientFailure.of(client, error))
    if not found:
        first = failures[0]
        raise ConfigurationError(
            f"the training samples of client {first.client} can't be used: {first.reason}"
        ) from first.error
    forms = [Form.of(batch) for batch in found]
    return found[forms.index(Counter(forms).most_common(1)[0][0])]
