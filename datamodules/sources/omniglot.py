"""Omniglot, read from its zip archives; its drawers are natural clients."""

from __future__ import annotations

import re
import zipfile
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pflight.datamodules.partitions.partition import ByUser, Partition
from pflight.datamodules.partitions.partitioned import PartitionedDataModule
from pflight.datamodules.partitions.samples import Samples
from pflight.errors import ConfigurationError
from pflight.options import PositiveInt, checked

from .parquet import decode_image
from .root import absence, announce_download, check_root, is_file

_Drawing = tuple[str, str, str]
"""Alphabet, character and drawer."""

_COMPLETE = ["images_background", "images_evaluation"]
_ARCHIVES = [*_COMPLETE, "images_background_small1", "images_background_small2"]
_MEMBER = re.compile(r"[^/.]+/(?P<alphabet>[^/.]+)/(?P<character>[^/.]+)/\d+_(?P<drawer>\d+)\.png")
_MOST_BYTES = 1 << 16  # of a drawing; Omniglot's have some 200
_METHODS = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED


@checked
class Omniglot(PartitionedDataModule):
    """Handwritten characters of up to 50 alphabets, each drawn by 20 people (Lake et al., 2015).

    Images are read straight from the zip archives and kept as bytes; strokes are 1 on a ground of
    0: features are float32 ``[n, 1, image_size, image_size]`` in [0, 1]. An image that is in two
    archives counts once. With ``ByUser()`` each drawer is a client. A person has drawn each
    character only once. So a drawer is tested on characters that only others train on.

    The archives number the 20 drawers of each alphabet. A number is not one person: width, height
    and blackness of drawings agree between characters of one alphabet, and not between alphabets
    (``benchmarks/drawers.py``). With ``drawer="number"`` a client has the drawings of one number in
    all alphabets, with ``"person"`` in one alphabet.

    Args:
        root: Folder with the image archives (``images_background.zip``, ``images_evaluation.zip``,
            ``images_background_small1.zip``, ``images_background_small2.zip``), or with a folder
            ``omniglot`` or torchvision's ``omniglot-py`` that has them.
        download: Whether to fetch archives that are missing into ``root/omniglot-py``.
        archives: Names of the archives to read, without ``.zip``; ``null`` means all that are
            there, and the two complete ones if they have to be fetched.
        target: The label: the ``character``, or its ``alphabet``.
        drawer: One drawer is a ``number`` in all alphabets, or a ``person``: a number in one
            alphabet.
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
        drawer: Literal["number", "person"] = "number",
        image_size: PositiveInt = 28,
        partition: Partition = ByUser(),  # noqa: B008 (a frozen value object)
        num_clients: int | None = None,
        val_fraction: float = 0.1,
        test_fraction: float = 0.2,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            num_classes=None,
            partition=partition,
            num_clients=num_clients,
            val_fraction=val_fraction,
            test_fraction=test_fraction,
            **kwargs,
        )
        self.root = root
        self.download = download
        self.archives = archives
        self.target = target
        self.drawer = drawer
        self.image_size = image_size

    @cached_property
    def num_classes(self) -> int:  # type: ignore[override]
        """Number of characters, or of alphabets; asking for it fetches missing archives."""
        self.prepare_data()
        return len({self._class_of(drawing) for drawing in self._drawings})

    def prepare_data(self) -> None:
        """Download the archives that are missing, if ``download`` allows it."""
        found = self._found()
        missing = set(self.archives) - set(found) if self.archives else set(_COMPLETE)
        if not self.download or not missing or (found and not self.archives):
            return
        from torchvision import datasets
        from torchvision.datasets.utils import download_url

        source, note = datasets.Omniglot, absence(self.root)
        announce_download("Omniglot", self.root)
        for name in sorted(missing):
            url = f"{source.download_url_prefix}/{name}.zip"
            try:
                download_url(url, self._folders()[-1], f"{name}.zip", source.zips_md5.get(name))
            except (OSError, RuntimeError) as error:
                raise ConfigurationError(
                    f"could not download {url} to {self.root}{note}: {error}"
                ) from error

    def load(self) -> Samples:
        """See :meth:`PartitionedDataModule.load`."""
        classes = sorted({self._class_of(drawing) for drawing in self._drawings})
        number = {kind: label for label, kind in enumerate(classes)}
        images = np.empty((len(self._drawings), 1, self.image_size, self.image_size), np.uint8)
        by_archive: dict[Path, list[tuple[int, str]]] = {}
        for position, (path, member) in enumerate(self._drawings.values()):
            by_archive.setdefault(path, []).append((position, member))
        for path, members in by_archive.items():
            with _opened(path) as archive:
                for position, member in members:
                    images[position] = self._read(archive, member)
        labels = [number[self._class_of(drawing)] for drawing in self._drawings]
        if self.drawer == "person":
            people = [f"{alphabet} {number}" for alphabet, _, number in self._drawings]
            names, drawers = np.unique(people, return_inverse=True)
        else:
            numbers = [int(number) for _, _, number in self._drawings]
            names, drawers = np.unique(numbers, return_inverse=True)
            names = names.astype(str)
        columns = torch.from_numpy(images), torch.tensor(labels), drawers
        return Samples(*columns, names=names.tolist())

    def transform(self, x: Tensor) -> Tensor:
        """Scale bytes to [0, 1]."""
        return x.float().div_(255)

    @cached_property
    def _drawings(self) -> dict[_Drawing, tuple[Path, str]]:
        """Archive and member of each (alphabet, character, drawer), sorted."""
        found = self._found()
        missing = [name for name in self.archives or [] if name not in found]
        if missing or not found:
            folders = " and ".join(str(folder) for folder in self._folders())
            wanted = ", ".join(f"{name}.zip" for name in missing or _ARCHIVES)
            raise ConfigurationError(
                f"Omniglot's {wanted} not found in {folders}{absence(self.root)}; download=True "
                "fetches them in prepare_data()"
            )
        drawings: dict[_Drawing, tuple[Path, str]] = {}
        for path in found.values():
            drawings |= {drawing: (path, member) for drawing, member in _members(path).items()}
        if not drawings:
            raise ConfigurationError(f"{', '.join(map(str, found.values()))}: no Omniglot images")
        return dict(sorted(drawings.items()))

    def _class_of(self, drawing: tuple[str, str, str]) -> tuple[str, ...]:
        return drawing[:1] if self.target == "alphabet" else drawing[:2]

    def _read(self, archive: zipfile.ZipFile, member: str) -> NDArray[np.uint8]:
        """Decode and scale one image, strokes white on black."""
        from PIL import Image, ImageOps

        content = _content(archive, member)
        image = Image.fromarray(decode_image(content, f"{archive.filename}: {member}", "L"))
        size = self.image_size, self.image_size
        return np.asarray(ImageOps.invert(image).resize(size, Image.Resampling.BOX))

    def _folders(self) -> list[Path]:
        return [Path(self.root), Path(self.root, "omniglot"), Path(self.root, "omniglot-py")]

    def _found(self) -> dict[str, Path]:
        """Return the archives to read that are there."""
        check_root(self.root)
        paths = [
            folder / f"{name}.zip"
            for name in self.archives or _ARCHIVES
            for folder in reversed(self._folders())
        ]
        return {path.stem: path for path in paths if is_file(path)}


def _opened(path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except Exception as error:  # zipfile raises many kinds of errors on damaged archives.
        raise ConfigurationError(f"{path} is damaged: {error}") from error


def _members(path: Path) -> dict[_Drawing, str]:
    """Return each drawing's member of an archive."""
    members: dict[_Drawing, str] = {}
    with _opened(path) as archive:
        infos = archive.infolist()
        if len(infos) != _num_members(path):  # a damaged length can hide some
            raise ConfigurationError(f"{path} is damaged: its directory lacks members")
        for info in infos:
            name = info.orig_filename  # as stored: the other one ends at a NUL byte
            folder = name.endswith("/") and not info.file_size
            if folder or name.endswith(".DS_Store") or name.startswith("__MACOSX/"):
                continue
            if "\0" in name or not (found := _MEMBER.fullmatch(name)):
                raise ConfigurationError(f"{path}: {name!r} is not the name of a drawing")
            drawing = found["alphabet"], found["character"], found["drawer"]
            if drawing in members:
                raise ConfigurationError(
                    f"{path}: {name} is the same drawing as {members[drawing]}"
                )
            members[drawing] = name
    return members


def _num_members(path: Path) -> int:
    """Return an archive's number of members by the record at its end."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - (1 << 16)))
        record = file.read().rpartition(b"PK\5\6")[2]
    return int.from_bytes(record[6:8], "little")


def _content(archive: zipfile.ZipFile, member: str) -> bytes:
    """Return the content of a member of an archive. The archive is not trusted."""
    info = archive.getinfo(member)
    trouble = f"{archive.filename}: {member}"
    if info.flag_bits & 1:
        raise ConfigurationError(f"{trouble} is encrypted")
    if info.compress_type not in _METHODS:
        raise ConfigurationError(
            f"{trouble} is compressed by method {info.compress_type}, which is not Omniglot's"
        )
    try:
        with archive.open(info) as file:
            content = file.read(_MOST_BYTES + 1)
    except Exception as error:
        raise ConfigurationError(f"{archive.filename} is damaged: {member}: {error}") from error
    if max(info.file_size, len(content)) > _MOST_BYTES:
        raise ConfigurationError(f"{trouble} is too large for a drawing: {info.file_size} bytes")
    return content
