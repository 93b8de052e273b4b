"""Omniglot, read from its zip archives; its 20 drawers are natural clients."""

from __future__ import annotations

import io
import re
import zipfile
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pflight.errors import ConfigurationError

from .partition import Ints, Natural, Partition
from .partitioned import PartitionedDataModule

_COMPLETE = ("images_background", "images_evaluation")
_ARCHIVES = (*_COMPLETE, "images_background_small1", "images_background_small2")
_MEMBER = re.compile(r"[^/]+/(?P<alphabet>[^/]+)/(?P<character>[^/]+)/\d+_(?P<drawer>\d+)\.png")


class _Drawing(NamedTuple):
    alphabet: str
    character: str
    drawer: int
    archive: Path
    member: str


class Omniglot(PartitionedDataModule):
    """Handwritten characters of up to 50 alphabets, each drawn once by 20 people (Lake et al., 2015).

    Images are read straight from the zip archives and kept as bytes; strokes are 1 on a ground of
    0: features are float32 ``[n, 1, image_size, image_size]`` in [0, 1]. An image that is in two
    archives counts once. With ``Natural()`` each drawer is a client. As a person has drawn each
    character only once, the characters in a drawer's test samples are ones that this drawer does
    not train on, but others do.

    Args:
        root: Folder with the image archives (``images_background.zip``, ``images_evaluation.zip``,
            ``images_background_small1.zip``, ``images_background_small2.zip``), or with
            torchvision's ``omniglot-py`` that has them.
        download: Whether to fetch archives that are missing into ``root/omniglot-py``.
        archives: Names of the archives to read, without ``.zip``; ``null`` means all that are
            there, and the two complete ones if they have to be fetched.
        target: What a label is: the ``character``, or its ``alphabet``.
        image_size: Width and height that the 105 x 105 pixels are scaled to.
        partition: How samples are dealt to clients.
        num_clients: Number of clients; ``null`` means all drawers.
        val_fraction: Share of each client's samples for validation.
        test_fraction: Share of each client's samples for testing.
        **kwargs: Further arguments of :class:`FederatedDataModule`.
    """

    def __init__(
        self,
        root: str = "data",
        download: bool = True,
        archives: list[str] | None = None,
        target: Literal["character", "alphabet"] = "character",
        image_size: int = 28,
        partition: Partition = Natural(),  # noqa: B008 (a frozen value object)
        num_clients: int | None = None,
        val_fraction: float = 0.1,
        test_fraction: float = 0.2,
        **kwargs: Any,
    ) -> None:
        self.root = root
        self.download = download
        self.archives = archives
        self.target = target
        self.image_size = image_size
        super().__init__(
            num_classes=1,
            partition=partition,
            num_clients=num_clients,
            val_fraction=val_fraction,
            test_fraction=test_fraction,
            **kwargs,
        )
