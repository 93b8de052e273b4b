"""A table of test results, with a row for each client."""

from __future__ import annotations

import csv
import io
import math
import warnings
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import lightning as L
from rich.console import Console

from pflight.federation import Federation
from pflight.messages import cell, markdown, one_line
from pflight.runs.files import replacing
from pflight.runs.folder import CLIENTS

_Row = Sequence[int | float | str]


class ClientTable(L.Callback):
    """Writes each client's metrics to ``clients.csv`` and ``clients.md`` when ``test`` ends.

    Both files are in ``trainer.default_root_dir``. A row holds a client's number, name, number of
    test samples, and each metric of each judged model, such as ``server/acc``. Missing metrics are
    empty. A client that was not judged has 0 samples. If clients are held out of training, a column
    marks them.

    If a file can't be written, there is a warning.
    """

    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the metrics of the clients of all ranks."""
        if not isinstance(pl_module, Federation) or "test" not in pl_module.evaluators:
            return
        columns = _columns(pl_module)
        if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        rows = [list(row) for row in zip(*columns.values(), strict=True)]
        paths = [Path(trainer.default_root_dir, name) for name in CLIENTS]
        try:
            for path, write in zip(paths, (_csv, _markdown), strict=True):
                path.parent.mkdir(parents=True, exist_ok=True)
                with replacing(path) as partial:
                    text = write(columns, rows).encode(errors="backslashreplace")
                    partial.write_bytes(text)
        except OSError as error:
            warnings.warn(f"the table of clients can't be written: {error}", stacklevel=2)
            return
        Console().print(
            f"each client's metrics in {paths[0]} and {paths[1].name}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


def _columns(federation: Federation) -> dict[str, Sequence[Any]]:
    """Return the columns by heading. All ranks have to call it."""
    data, clients = federation.clients.attached_data, range(federation.num_clients)
    found = {model: federation.client_metrics("test", model) for model in _models(federation)}
    newcomers = set(federation.clients.newcomers.tolist())
    return {
        "client": clients,
        "name": data.client_names or [""] * len(clients),
        **({"newcomer": ["yes" * (i in newcomers) for i in clients]} if newcomers else {}),
        "num_samples": found[""]["num_samples"].tolist(),
        **{
            f"{model}{name}": values.tolist()
            for model, metrics in found.items()
            for name, values in metrics.items()
            if name != "num_samples"
        },
    }


def _models(federation: Federation) -> list[str]:
    """Return the judged models, the clients' own first."""
    return sorted(federation.evaluators["test"].models, key=bool)


def _csv(titles: Collection[str], rows: Sequence[_Row]) -> str:
    """Return a table with exact values. NaN is an empty cell."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(map(cell, titles))
    writer.writerows([cell("" if _is_nan(value) else value) for value in row] for row in rows)
    return file.getvalue()


def _markdown(titles: Collection[str], rows: Sequence[_Row]) -> str:
    """Return a table with four decimals. NaN is an empty cell."""
    lines = [[*map(_shown, titles)], ["---"] * len(titles)]
    lines += [[*map(_shown, row)] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _shown(value: float | str) -> str:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.4f}"
    return markdown(one_line(str(value)))


def _is_nan(value: float | str) -> bool:
    return isinstance(value, float) and math.isnan(value)
