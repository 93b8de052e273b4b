"""What TensorBoard reads from a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData


@dataclass
class Events:
    """The steps of the points by tag; hyper-parameters, and the metrics they are compared by."""

    scalars: dict[str, list[int]]
    values: dict[str, list[float]]
    images: dict[str, list[int]]
    histograms: dict[str, list[int]]
    texts: dict[str, list[int]]
    hparams: dict[str, Any]
    compared: set[str]


def read_events(folder: str | Path) -> Events:
    """Read all event files of a folder as TensorBoard does, points that were purged left out.

    The points of a tag lie in the order of their times. TensorBoard takes files by their names,
    where of two that one process opened in the same second its tenth precedes its ninth.
    """
    kept = dict.fromkeys(("scalars", "tensors", "histograms", "images"), 0)
    found = EventAccumulator(str(folder), size_guidance=kept)
    found.Reload()
    tags = found.Tags()
    suffix = "/text_summary"
    texts = [tag for tag in tags["tensors"] if tag.endswith(suffix)]
    scalars = _points(found.Scalars, tags["scalars"])
    hparams: dict[str, Any] = {}
    compared: set[str] = set()
    for content in found.PluginTagToContent("hparams").values() if _has_hparams(found) else ():
        record = HParamsPluginData.FromString(content)
        compared |= {info.name.tag for info in record.experiment.metric_infos}
        for name, value in record.session_start_info.hparams.items():
            hparams[name] = getattr(value, value.WhichOneof("kind"))
    return Events(
        scalars=_steps(scalars),
        values={tag: [point.value for point in points] for tag, points in scalars.items()},
        images=_steps(_points(found.Images, tags["images"])),
        histograms=_steps(_points(found.Histograms, tags["histograms"])),
        texts={
            tag.removesuffix(suffix): steps
            for tag, steps in _steps(_points(found.Tensors, texts)).items()
        },
        hparams=hparams,
        compared=compared,
    )


def _points(read: Callable[[str], Iterable[Any]], tags: Iterable[str]) -> dict[str, list[Any]]:
    """Return the points of each tag, in the order of their times."""
    return {tag: sorted(read(tag), key=attrgetter("wall_time")) for tag in tags}


def _steps(points: dict[str, list[Any]]) -> dict[str, list[int]]:
    """Return the steps of the points of each tag."""
    return {tag: [point.step for point in found] for tag, found in points.items()}


def _has_hparams(found: EventAccumulator) -> bool:
    return "hparams" in {d.plugin_data.plugin_name for d in found.summary_metadata.values()}
