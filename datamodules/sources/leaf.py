"""LEAF's FEMNIST and CelebA: one client for each writer and each celebrity."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pflight.datamodules.partitions.dealing import Bools, Ints
from pflight.datamodules.partitions.partition import ByUser, Partition
from pflight.datamodules.partitions.partitioned import PartitionedDataModule
from pflight.datamodules.partitions.samples import Samples
from pflight.errors import ConfigurationError
from pflight.options import PositiveInt, checked
from pflight.randomness import Purpose, numpy_generator
from pflight.runs.locks import held

from .cache import SampleWriter, cached_samples
from .leaf_json import one_line, people
from .parquet import decode_image, parquet_files, read_parquet
from .root import absence, announce_download, check_root, is_file

_UNFINISHED = "hub.partial"
_MOST_BYTES = 1 << 26  # of a picture

_Part = tuple[str, NDArray[Any], Ints, bool]
"""A person's name, features ``[n, C, H, W]``, labels ``[n]``, and whether they are for testing."""


@checked
class LeafDataModule(PartitionedDataModule):
    """Samples of many people, as LEAF (Caldas et al., 2018) or Hugging Face stores them.

    LEAF's ``train/*.json`` with ``test/*.json`` are looked for in ``root`` and in ``root/data``,
    then its ``all_data/*.json``, then Hugging Face's ``*.parquet`` at any depth of ``root``. The
    first use parses them into a cache, from which only the clients in use are read. People without
    samples are left out, and a warning says how many. Where LEAF's split is kept and each person is
    a client, those with test samples alone are newcomers.

    Args:
        root: Folder of the data set.
        download: Whether to fetch a data set that is not there from Hugging Face, into
            ``root/hub``.
        cache_dir: Folder of the cache; ``null`` means ``root/cache``.
        min_samples: People with fewer samples are left out.
        dedupe_first: Whether to keep only the first of a person's samples that are equal, training
            samples before test samples. LEAF repeats about 3,500 of FEMNIST's images.
        partition: How samples are dealt to clients.
        num_clients: Number of clients; ``null`` means everybody.
        official_test: Whether LEAF's test samples stay test samples; otherwise all are pooled and
            split by ``test_fraction``. ``null`` means where there are some.
        **kwargs: Further arguments of :class:`PartitionedDataModule`.

    Raises:
        ConfigurationError: An option is out of its range.
    """

    _title: ClassVar[str]
    """The data set's name."""

    _num_labels: ClassVar[int]
    """Labels in the files are ``0 .. num_labels - 1``."""

    _repository: ClassVar[str]
    """The data set's name on Hugging Face."""

    _hub_files: ClassVar[str]
    """Which of the repository's files to fetch."""

    _columns: ClassVar[tuple[str, str, str]]
    """Names of the columns with the image, the person and the label on Hugging Face."""

    def __init__(
        self,
        root: str,
        download: bool = True,
        cache_dir: str | None = None,
        min_samples: PositiveInt = 1,
        dedupe_first: bool = False,
        partition: Partition = ByUser(),  # noqa: B008 (a frozen value object)
        num_clients: int | None = None,
        official_test: bool | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            partition=partition,
            num_clients=num_clients,
            official_test=bool(official_test),
            **kwargs,
        )
        self.root = root
        self.download = download
        self.cache_dir = cache_dir
        self.min_samples = min_samples
        self.dedupe_first = dedupe_first
        self._finds_test = official_test is None

    @property
    def users(self) -> list[str]:
        """Names of the clients' people, in order of the clients' ids."""
        self._held()
        if not self.client_names:
            raise ConfigurationError(
                f"clients are users with partition ByUser() only, not with {self.partition}"
            )
        return [*self.client_names]

    def prepare_data(self) -> None:
        """Download the data set if it is not there and ``download`` allows it; build its cache."""
        if self.download and self._files() is None:
            announce_download(self._title, self.root)
            self._fetch()
        self._cached()

    def load(self) -> Samples:
        """See :meth:`PartitionedDataModule.load`; nothing but labels is read from the disk."""
        samples = self._chosen(self._cached())
        assert samples.groups is not None
        has_enough = np.bincount(samples.groups, minlength=1) >= self.min_samples
        if not has_enough.all():
            samples = samples.where(has_enough[samples.groups])
        wanted = getattr(self, "num_clients", 1) if isinstance(self.partition, ByUser) else 1
        if has_enough.sum() < wanted:
            raise ConfigurationError(
                f"{has_enough.sum()} people in {self.root} have {self.min_samples} of the wanted "
                f"samples (min_samples), too few for num_clients {wanted}"
            )
        if self._finds_test:
            self.official_test = samples.test is not None
        return samples

    def _chosen(self, samples: Samples) -> Samples:
        """Return the wanted samples; by default, all."""
        return samples

    def _files(self) -> _Files | None:
        """Find the data set's files."""
        check_root(self.root)
        root = Path(self.root)
        for folder in (root, root / "data"):
            train, test = (sorted(folder.glob(f"{part}/*.json")) for part in ("train", "test"))
            if train and test:
                return _Files(train, test)
            if train or test:
                there, missing = ("train", "test") if train else ("test", "train")
                raise ConfigurationError(f"{folder} has {there}/*.json, but no {missing}/*.json")
        found = [
            sorted(root.glob("all_data/*.json")),
            sorted(root.glob("data/all_data/*.json")),
            parquet_files(root, unfinished=root / _UNFINISHED),
        ]
        return next((_Files(files, []) for files in found if files), None)

    def _fetch(self) -> None:
        """Download the data set into ``root/hub``, which is there when it is complete."""
        try:
            from huggingface_hub import snapshot_download
        except ImportError as error:
            raise ConfigurationError(
                f'{self._not_found()}; to fetch it: pip install "pflight[hf]"'
            ) from error
        root, note = Path(self.root), absence(self.root)
        try:
            root.mkdir(parents=True, exist_ok=True)
            with held(root / "hub.lock"):
                if self._files() is None:
                    snapshot_download(
                        self._repository,
                        repo_type="dataset",
                        allow_patterns=self._hub_files,
                        local_dir=root / _UNFINISHED,
                    )
                    (root / _UNFINISHED).rename(root / "hub")
        except Exception as error:  # The hub's client raises many kinds of errors.
            raise ConfigurationError(
                f"could not download {self._repository} from Hugging Face to {self.root}{note}: "
                f"{one_line(error)}"
            ) from error

    def _not_found(self) -> str:
        return (
            f"{self._title} not found: {self.root} has neither train/*.json and test/*.json nor "
            f"all_data/*.json, directly or in data/, nor *.parquet{absence(self.root)}"
        )

    def _cached(self) -> Samples:
        """Open the cache; build it if it is not there."""
        files = self._files()
        if files is None:
            raise ConfigurationError(
                f"{self._not_found()}; download=True fetches {self._repository} in prepare_data()"
            )
        folder = Path(self.root, "cache") if self.cache_dir is None else Path(self.cache_dir)
        sources = [*files.train, *files.test, *self._image_folders(files)]
        options = {"dedupe_first": self.dedupe_first, **self._cache_options()}
        build, name = partial(self._build, files), self._title.lower()
        return cached_samples(folder, name, sources, options, build, self._num_labels)

    def _image_folders(self, files: _Files) -> list[Path]:
        """Return the folders with images that the files name; by default, none."""
        return []

    def _cache_options(self) -> dict[str, Any]:
        """Return further options that determine the cached samples; by default, none."""
        return {}

    def _images(self) -> _Images:
        """Return the decoder of the data set's images."""
        raise NotImplementedError(f"{type(self).__name__} must define _images()")

    def _features(self, files: _Files) -> Callable[[list[Any], str], NDArray[Any]]:
        """Return a function from a person's ``x`` to features ``[n, C, H, W]``, or to an error."""
        raise NotImplementedError(f"{type(self).__name__} must define _features()")

    def _build(self, files: _Files, writer: SampleWriter) -> None:
        """Write everybody's samples to the cache."""
        seen: set[bytes] = set()
        for name, x, y, test in (
            self._read_parquet(files) if files.parquet else self._read_json(files)
        ):
            if self.dedupe_first:
                is_first = _first_of_equals(name, x, y, seen)
                x, y = x[is_first], y[is_first]
            writer.add(x, y, name, test)

    def _read_json(self, files: _Files) -> Iterator[_Part]:
        features = self._features(files)
        everybody: set[str] = set()
        sampled: set[str] = set()
        for test, paths in ((False, files.train), (True, files.test)):
            owners: dict[str, Path] = {}
            found: set[str] = set()
            for path in paths:
                for name, x, y in people(path):
                    where = f"{path}: user {name!r}"
                    if name in owners:
                        raise ConfigurationError(f"{where} is in {owners[name]} too")
                    owners[name] = path
                    if x:
                        found.add(name)
                        labels = _labels(y, self._num_labels, where)
                        yield name, features(x, where), labels, test
            if files.test and not found:
                raise ConfigurationError(f"{paths[0].parent}/*.json: no user has samples")
            everybody |= owners.keys()
            sampled |= found
        if empty := len(everybody - sampled):
            message = f"{empty} of {len(everybody)} users have no samples and are left out"
            warnings.warn(f"{self.root}: {message}", stacklevel=2)

    def _read_parquet(self, files: _Files) -> Iterator[_Part]:
        image, owner, label = self._columns
        images = self._images()
        for path in files.train:
            first_row = 0
            for batch in read_parquet(path, self._columns):
                names = [f"{path}: row {first_row + row}" for row in range(len(batch[image]))]
                x = images.decode(batch[image], names)
                first_row += len(names)
                rows: dict[str, list[int]] = {}
                for row, name in enumerate(batch[owner]):
                    rows.setdefault(str(name), []).append(row)
                for name, chosen in rows.items():
                    y = [batch[label][row] for row in chosen]
                    y = [int(value) if isinstance(value, bool) else value for value in y]
                    labels = _labels(y, self._num_labels, f"{path}: {owner} {name!r}")
                    yield name, x[chosen], labels, False


@checked
class LeafFEMNIST(LeafDataModule):
    """LEAF's FEMNIST: 805,263 handwritten digits and letters of 3,550 writers.

    Labels are 0 to 9 for digits, 10 to 35 for upper case and 36 to 61 for lower case. Features are
    float32 ``[n, 1, 28, 28]`` in [0, 1], dark ink on a ground of 1, as in the files. Hugging Face's
    ``flwrlabs/femnist`` has 814,277 images, unsplit.

    Args:
        root: Folder of the data set.
        classes: Labels to keep; they become 0, 1, ... in this order. ``null`` keeps all.
        samples_per_class: At most so many samples of each class are kept, drawn by the seed from
            all writers; ``null`` keeps all.
        **kwargs: Further arguments of :class:`LeafDataModule`.

    Raises:
        ConfigurationError: An option is out of its range.
    """

    _title = "FEMNIST"
    _num_labels = 62
    _repository = "flwrlabs/femnist"
    _hub_files = "data/train-*.parquet"
    _columns = ("image", "writer_id", "character")

    def __init__(
        self,
        root: str = "data/femnist",
        classes: list[int] | None = None,
        samples_per_class: PositiveInt | None = None,
        **kwargs: Any,
    ) -> None:
        known = range(self._num_labels)
        kept = list(known) if classes is None else classes
        if not kept or len(set(kept)) < len(kept) or not set(kept) <= set(known):
            raise ConfigurationError(
                f"LeafFEMNIST: classes must be distinct labels of 0 to 61, got {classes}"
            )
        super().__init__(root=root, num_classes=len(kept), **kwargs)
        self.classes = kept
        self.samples_per_class = samples_per_class
        self.fill = torch.tensor(1.0)

    def transform(self, x: Tensor) -> Tensor:
        """Scale the bytes of Hugging Face's images to [0, 1], as LEAF's numbers are."""
        return x.float().div_(255) if x.dtype == torch.uint8 else x

    def _chosen(self, samples: Samples) -> Samples:
        if self.classes != list(range(self._num_labels)):
            number = torch.full((self._num_labels,), -1)
            number[self.classes] = torch.arange(len(self.classes))
            y = number[samples.y]
            samples = replace(samples, y=y).where((y >= 0).numpy())
        if self.samples_per_class is not None:
            random = numpy_generator(Purpose.PARTITION, self.seed, 5)
            samples = samples.where(_at_most(self.samples_per_class, samples.y.numpy(), random))
        return samples

    def _images(self) -> _Images:
        return _Images("L", size=(28, 28))

    def _features(self, files: _Files) -> Callable[[list[Any], str], NDArray[Any]]:
        return _pixels


@checked
class LeafCelebA(LeafDataModule):
    """LEAF's CelebA: is a celebrity smiling? 200,288 pictures of 9,343 people (Liu et al., 2015).

    Features are float32 ``[n, 3, image_size, image_size]``, kept as bytes; label 1 is a smile.
    Hugging Face's ``flwrlabs/celeba`` also has the people with fewer than 5 pictures, whom LEAF
    leaves out; ``min_samples=5`` does so, too.

    Args:
        root: Folder of the data set.
        image_size: Width and height that pictures are scaled to.
        image_dir: Folder of the pictures that LEAF's files name; ``null`` means the first of
            ``raw/img_align_celeba``, ``img_align_celeba`` and ``images`` in ``root`` or
            ``root/data``.
        scale: Whether to scale pixels to [0, 1]; LEAF leaves them at 0 to 255.
        **kwargs: Further arguments of :class:`LeafDataModule`.

    Raises:
        ConfigurationError: An option is out of its range.
    """

    _title = "CelebA"
    _num_labels = 2
    _repository = "flwrlabs/celeba"
    _hub_files = "img_align+identity+attr/*.parquet"
    _columns = ("image", "celeb_id", "Smiling")

    def __init__(
        self,
        root: str = "data/celeba",
        image_size: PositiveInt = 84,
        image_dir: str | None = None,
        scale: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(root=root, num_classes=2, **kwargs)
        self.image_size = image_size
        self.image_dir = image_dir
        self.scale = scale

    def transform(self, x: Tensor) -> Tensor:
        """Turn bytes into floats, in [0, 1] with ``scale``."""
        return x.float().div_(255) if self.scale else x.float()

    def _image_folders(self, files: _Files) -> list[Path]:
        if files.parquet:
            return []
        names = ("raw/img_align_celeba", "img_align_celeba", "images")
        folders = [Path(self.root, inner, name) for inner in ("", "data") for name in names]
        if self.image_dir is not None:
            folders = [Path(self.image_dir)]
        found = [folder for folder in folders if folder.is_dir()]
        if not found:
            looked = ", ".join(map(str, folders))
            raise ConfigurationError(f"CelebA's pictures not found in {looked}; see image_dir")
        return found[:1]

    def _cache_options(self) -> dict[str, Any]:
        return {"image_size": self.image_size}

    def _images(self) -> _Images:
        return _Images("RGB", scaled_to=self.image_size)

    def _features(self, files: _Files) -> Callable[[list[Any], str], NDArray[Any]]:
        return partial(_pictures, self._image_folders(files)[0], self._images())


@dataclass(frozen=True)
class _Files:
    """A data set's files; ``test`` is empty if the files are not split."""

    train: list[Path]
    test: list[Path]

    @property
    def parquet(self) -> bool:
        return self.train[0].suffix == ".parquet"


class _Images:
    """Decodes images, which must all have one size: the one given, or the first one's.

    Args:
        mode: Pillow's ``"L"`` or ``"RGB"``.
        size: Height and width of all images.
        scaled_to: Height and width after scaling, as Pillow scales; ``None`` leaves them.
    """

    def __init__(
        self,
        mode: Literal["L", "RGB"],
        size: tuple[int, int] | None = None,
        scaled_to: int | None = None,
    ) -> None:
        self._mode = mode
        self._wanted = size
        self._size: tuple[int, ...] | None = size
        self._scaled_to = scaled_to

    def decode(self, contents: Sequence[bytes], names: Sequence[str]) -> NDArray[np.uint8]:
        """Return images ``[n, C, H, W]``; an error has the image's name."""
        with ThreadPoolExecutor() as pool:
            decoded = list(pool.map(self._decode, contents, names))
        for (size, _), name in zip(decoded, names, strict=True):
            if self._size is None:
                self._size, self._sized_by = size, name
            if size != self._size:
                found, wanted = (" x ".join(map(str, shape)) for shape in (size, self._size))
                raise ConfigurationError(
                    f"{name}: the image has {found} pixels, {self._sized_by} {wanted}"
                )
        return np.stack([image for _, image in decoded])

    def _decode(self, content: bytes, name: str) -> tuple[tuple[int, ...], NDArray[np.uint8]]:
        """Return the size that an image had, and the scaled image ``[C, H, W]``."""
        from PIL import Image

        pixels = decode_image(content, name, self._mode, self._wanted)
        size = pixels.shape[:2]
        if self._scaled_to is not None:
            scaled = Image.fromarray(pixels).resize((self._scaled_to, self._scaled_to))
            pixels = np.asarray(scaled)
        return size, np.moveaxis(np.atleast_3d(pixels), -1, 0)


def _pixels(rows: list[Any], where: str) -> NDArray[np.float32]:
    """Return images ``[n, 1, 28, 28]`` of rows of 784 numbers."""
    for position, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != 784 or not {*map(type, row)} <= {int, float}:
            has_null = isinstance(row, list) and None in row
            null = f', but "x"[{position}][{row.index(None)}] is null' if has_null else ""
            raise ConfigurationError(f'{where}: each "x" must be 784 numbers{null}')
    with np.errstate(over="ignore"):
        pixels = np.array(rows, dtype=np.float32)
    if len(odd := np.argwhere(~np.isfinite(pixels))):
        raise ConfigurationError(
            f'{where}: "x"[{odd[0][0]}][{odd[0][1]}] is not finite as a float32 number'
        )
    return pixels.reshape(-1, 1, 28, 28)


def _pictures(folder: Path, images: _Images, names: list[Any], where: str) -> NDArray[np.uint8]:
    """Return the pictures ``[n, 3, H, W]`` of a list of file names."""
    if not {*map(type, names)} <= {str} or any(Path(name).name != name for name in names):
        raise ConfigurationError(f'{where}: each "x" must be the name of a picture')
    paths = [folder / name for name in names]
    contents = []
    for path in paths:
        try:
            if not is_file(path):
                raise FileNotFoundError("there is no such file")
            with path.open("rb") as file:
                contents.append(file.read(_MOST_BYTES))
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"{where}: can't read {path}: {one_line(error)}") from error
    return images.decode(contents, [str(path) for path in paths])


def _labels(values: list[Any], num_labels: int, where: str) -> Ints:
    """Return labels as whole numbers ``[n]``."""
    allowed = set(range(num_labels))
    for value in values:
        if type(value) not in (int, float) or value not in allowed:
            got = "null" if value is None else repr(value)
            raise ConfigurationError(
                f"{where}: labels must be whole numbers of 0 to {num_labels - 1}, got {got}"
            )
    return np.array(values, dtype=np.int64)


def _first_of_equals(name: str, x: NDArray[Any], y: Ints, seen: set[bytes]) -> Bools:
    """Mask the samples of a person that are not yet in ``seen``, and add them to it."""
    is_first = np.zeros(len(y), dtype=bool)
    for position, (image, label) in enumerate(zip(x, y, strict=True)):
        content = repr((name, int(label))).encode() + image.tobytes()
        digest = hashlib.blake2b(content, digest_size=16).digest()
        is_first[position] = digest not in seen
        seen.add(digest)
    return is_first


def _at_most(limit: int, labels: Ints, random: np.random.Generator) -> Bools:
    """Mask ``limit`` random samples of each class, or all that there are."""
    by_class = np.lexsort((random.random(len(labels)), labels))
    sizes = np.bincount(labels)
    kept = np.empty(len(labels), dtype=bool)
    kept[by_class] = np.arange(len(labels)) < np.repeat(sizes.cumsum() - sizes + limit, sizes)
    return kept
