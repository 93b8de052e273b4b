"""Clients' samples, checked when they are read: any client may return anything."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import (
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_unflatten,
)

from pflight.data.data_module import FederatedDataModule
from pflight.errors import ConfigurationError
from pflight.states.updates import STOPS, ClientFailure

from .time_limit import time_limit

_ASKED = 5  # clients whose samples are read; one or two may be unusual


class Kind(NamedTuple):
    """Shape and type of one of the tensors of a sample."""

    shape: torch.Size
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} of shape {list(self.shape)}"


class Form(NamedTuple):
    """The common structure of all clients' samples.

    Samples are any nesting of tensors ``[n, ...]``, most often a pair of features and labels.
    """

    names: tuple[str, ...]
    """Names of the tensors."""
    kinds: tuple[Kind, ...]
    """Kinds of the tensors of a single sample."""
    spec: TreeSpec

    @classmethod
    def of(cls, samples: Any) -> Form:
        """Return the form of some samples."""
        named, spec = tree_flatten_with_path(samples)
        kinds = tuple(Kind(leaf.shape[1:], leaf.dtype) for _, leaf in named)
        if _is_pair(samples):
            return cls(("features", "labels"), kinds, spec)
        return cls(tuple(f"samples{keystr(path)}" for path, _ in named), kinds, spec)

    def fits_pair(self, samples: Any) -> bool:
        """Return whether the samples are features and as many labels of this form. It is fast."""
        if len(self.kinds) != 2 or not _is_pair(samples):
            return False
        (x, y), (of_x, of_y) = samples, self.kinds
        return (
            x.shape[1:] == of_x.shape
            and y.shape[1:] == of_y.shape
            and x.dtype == of_x.dtype
            and y.dtype == of_y.dtype
            and x.dim() > 0 < y.dim()
            and x.shape[0] == y.shape[0]
            and self.names[0] == "features"
        )

    def fitted(self, samples: Any) -> list[Tensor]:
        """Return the tensors of samples of this form. No samples at all also fit.

        Raises:
            ValueError: If the samples have another form.
        """
        leaves, _ = tree_flatten(samples)
        form = Form.of(samples)
        if form.names != self.names:
            raise ValueError(
                f"its samples hold {', '.join(form.names)}, those of other clients "
                f"{', '.join(self.names)}"
            )
        if form.kinds == self.kinds:
            return leaves
        if not len(leaves[0]):
            return [
                leaf.new_empty((0, *shape), dtype=dtype)
                for leaf, (shape, dtype) in zip(leaves, self.kinds, strict=True)
            ]
        parts = zip(self.names, form.kinds, self.kinds, strict=True)
        name, own, usual = next(part for part in parts if part[1] != part[2])
        raise ValueError(f"its {name} are {own}, those of other clients {usual}")

    def batch(self, leaves: list[Tensor]) -> Any:
        """Return samples made of tensors in the order of :attr:`names`."""
        return tuple(leaves) if self.names[0] == "features" else tree_unflatten(leaves, self.spec)


def _is_pair(samples: Any) -> bool:
    return (
        isinstance(samples, tuple | list)
        and len(samples) == 2
        and all(isinstance(part, Tensor) for part in samples)
    )


def checked(samples: Any, of_pairs: bool = True) -> Any:
    """Return a client's samples, checked: tensors of one length.

    Args:
        samples: The client's samples.
        of_pairs: Whether the samples have to be features and labels.

    Raises:
        TypeError: If the samples are not a pair of tensors or, without ``of_pairs``, a nesting.
        ValueError: If the tensors have different lengths.
    """
    leaves = tree_leaves(samples)
    if of_pairs and not _is_pair(samples):
        of_parts = isinstance(samples, tuple | list)
        kinds = [type(part).__name__ for part in samples] if of_parts else []
        got = f"({', '.join(kinds[:3])}{', ...' * (len(kinds) > 3)})" if kinds else ""
        raise TypeError(
            f"samples() must return a pair of tensors, features and labels, "
            f"not {got or type(samples).__name__}"
        )
    odd = next((leaf for leaf in leaves if not isinstance(leaf, Tensor)), None)
    if odd is not None or not leaves:
        what = f"with a {type(odd).__name__} in it" if leaves else "that holds nothing"
        raise TypeError(f"samples() must return tensors, not a {type(samples).__name__} {what}")
    if not all(leaf.dim() and len(leaf) == len(leaves[0]) for leaf in leaves):
        shapes = [list(leaf.shape) for leaf in leaves]
        if _is_pair(samples):
            raise ValueError(
                f"samples() must return as many labels as features, not features of shape "
                f"{shapes[0]} and labels of shape {shapes[1]}"
            )
        raise ValueError(f"samples() must return tensors of one length, not of shapes {shapes}")
    return samples


def check_order(count: int, order: Tensor) -> None:
    """Raise a ``ValueError`` unless this is an order of ``count`` samples."""
    if len(order) != count:
        raise ValueError(f"order() gives {len(order)} positions for {count} training samples")


def usual_samples(
    data: FederatedDataModule, of_pairs: bool = True, timeout: float | None = None
) -> Any:
    """Return the training samples of a client, in the most frequent form.

    Only the first clients are read. Finite samples are preferred. Any of these clients may differ,
    fail, or take longer than ``timeout`` seconds.

    Raises:
        ConfigurationError: If all these clients fail.
    """
    found: list[Any] = []
    failures: list[ClientFailure] = []
    for client in data.train_clients[:_ASKED].tolist():
        try:
            with time_limit(timeout):
                found.append(checked(data.samples(client, "train"), of_pairs))
        except STOPS:
            raise
        except BaseException as error:
            failures.append(ClientFailure.of(client, error))
    if not found:
        first = failures[0]
        whose = f"client {data.numbered(first.client)}"
        raise ConfigurationError(
            f"the training samples of {whose} can't be used: {first.reason}"
        ) from first.error
    forms = [Form.of(samples)[:2] for samples in found]
    (form, _), *_ = Counter(forms).most_common(1)
    usual = [samples for samples, own in zip(found, forms, strict=True) if own == form]
    return next(filter(are_finite, usual), usual[0])


def are_finite(samples: Any) -> bool:
    """Return whether results on these samples can be compared."""
    try:
        return all(bool(leaf.isfinite().all()) for leaf in tree_leaves(samples))
    except Exception:  # tensors without elements or rows
        return False
