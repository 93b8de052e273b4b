"""The results of a comparison: its tables, and the files of tables and figures."""

from __future__ import annotations

import base64
import io
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from pflight.runs.files import replacing

from .figures import Figures
from .findings import Findings
from .footer import footer
from .lines import to_csv
from .outcome import Run
from .rows import MOMENTS, TAGS, Row, settings_text
from .statistics import DRAWS, floats, median
from .tables import DASH, Bold, Table, html_notes, html_page, latex_notes, markdown_notes
from .units import COUNT, PERCENT, unit_of_bytes, unit_of_seconds

if TYPE_CHECKING:
    from rich.console import Group

_TITLE = "Comparison of methods"
_LAST = "last round"


class Results:
    """The results of a comparison of methods: they print as tables, and are saved with figures.

    A row of the tables is a method with some settings. Rows are sorted by the macro mean of the
    metric that chose rounds. They are compared at the round that was chosen on validation samples
    if all runs kept it, and otherwise after the last round.

    Args:
        runs: The runs: finished, failed, planned or running.
        baseline: A row, by its label or its method. Differences from it are reported, too.
            Differences from the best row are always reported.
        target: A value of the metric that chooses rounds, in its own unit (0.8 for 80 %). Rounds
            and bytes until this value are counted.
        draws: Number of draws of the bootstrap.

    Attributes:
        findings: The numbers.
        figures: The figures.

    Raises:
        ResultError: If runs are judged by different metrics, if a configuration has two runs with
            one seed, or if there is no such baseline.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        baseline: str | None = None,
        target: float | None = None,
        draws: int = DRAWS,
    ) -> None:
        self.findings = Findings(runs, baseline, target, draws)
        self.figures = Figures(self.findings)

    def table(self) -> Table:
        """Return the main table."""
        found, metric = self.findings, self.findings.metric
        if not found.finished:
            rows = [[row.label, self._seeds(row)] for row in found.rows]
            return Table("Results", ["method", "seeds"], rows)
        unit = found.units[metric]
        columns = {"method": [row.label for row in found.rows]}
        columns["seeds"] = [self._seeds(row) for row in found.rows]
        for mean in TAGS:
            heading = unit.of(f"{mean} {metric}" if mean in ("macro", "micro") else _title(mean))
            cells = [unit.cell(row.means(mean, metric, found.when)) for row in found.rows]
            if mean == "macro":
                bold = zip(found.rows, cells, strict=True)
                columns[heading] = [
                    Bold(cell) if found.is_bold(row) else cell for row, cell in bold
                ]
                if found.when == "chosen":
                    last = [unit.cell(row.means(mean, metric, "last")) for row in found.rows]
                    columns[_LAST] = last
            elif {*cells} != {DASH}:
                columns[heading] = cells
        below = [PERCENT.cell([*found.below_local(row).values()]) for row in found.rows]
        return _table("Results", {**columns, "below Local, %": below})

    def tables(self, whole: bool = True) -> list[Table]:
        """Return the tables that are not empty, first the main one.

        Args:
            whole: Whether to add a table of all means of each metric.
        """
        found = self.findings
        tables = [self._failures()]
        tables += [self._differences(reference) for reference in found.references]
        tables += [self._whole(metric) for metric in found.metrics if whole]
        tables += [self._costs(), self._tuning()]
        return [self.table(), *(table for table in tables if table.rows)]

    def _seeds(self, row: Row) -> str:
        number = f"{len(row.runs)} of {len(self.findings.seeds)}"
        return f"{number}, {len(row.failures)} failed" if row.failures else number

    def _whole(self, metric: str) -> Table:
        """Return all means of a metric, at both moments."""
        found, unit = self.findings, self.findings.units[metric]
        columns = {"method": [row.label for row in found.finished]}
        for mean in TAGS:
            title = _title(mean)
            for when in MOMENTS:
                cells = [unit.cell(row.means(mean, metric, when)) for row in found.finished]
                if {*cells} != {DASH}:
                    columns[title if when == "chosen" else f"{title}, {_LAST}"] = cells
        return _table(unit.of(f"Test {metric}"), columns)

    def _differences(self, reference: Row) -> Table:
        """Return the differences of the other rows from one."""
        found, unit = self.findings, self.findings.units[self.findings.metric]
        corrected = found.corrected(reference)
        rows = []
        for row in found.finished:
            difference = found.differences.get((row.key, reference.key))
            if difference is None:
                rows += [[row.label, *[DASH] * 6]] if row is not reference else []
                continue
            low, high = (unit.text(end, more=1) for end in (difference.low, difference.high))
            better = difference.above if found.mode == "max" else difference.below
            rows.append(
                [
                    row.label,
                    unit.text(difference.mean, more=1),
                    DASH if low == high == DASH else f"{low} to {high}",
                    f"{difference.p:.4f}",
                    f"{corrected[row.key]:.4f}",
                    f"{better} of {difference.seeds}",
                    f"{difference.clients:,}",
                ]
            )
        roles = {"the best": found.best, "the baseline": found.baseline}
        role = " and ".join(name for name, row in roles.items() if row is reference)
        points = f", {unit.name} points" if unit.name else ""
        title = f"Difference from {reference.label}, {role}, in macro {found.metric}{points}"
        columns = ["method", "difference", "95 % interval", "p", "p, Holm", "better at", "pairs"]
        return Table(title, columns, rows)

    def _costs(self) -> Table:
        """Return traffic and time, and the costs of reaching the target."""
        rows = self.findings.finished
        runs = [[*row.runs.values()] for row in rows]
        parts = [fmean(run.bytes_of_participation for run in by_seed) for by_seed in runs]
        wholes = [fmean(run.bytes for run in by_seed) for by_seed in runs]
        times = [row.seconds for row in rows]
        part, whole, time = unit_of_bytes(parts), unit_of_bytes(wholes), unit_of_seconds(times)
        columns = {
            "method": [row.label for row in rows],
            part.of("a participation"): [part.text(size) for size in parts],
            whole.of("in all"): [whole.text(size) for size in wholes],
            time.of("a round"): [time.text(seconds) for seconds in times],
            "threads": [_range([run.threads for run in by_seed]) for by_seed in runs],
            "jobs": [_range([run.beside for run in by_seed]) for by_seed in runs],
        }
        if self.findings.target is not None:
            reached = [[*self.findings.to_target(row).values()] for row in rows]
            rounds = [median([trained for trained, _ in by_seed]) for by_seed in reached]
            sizes = [median([size for _, size in by_seed]) for by_seed in reached]
            until = unit_of_bytes(sizes)
            columns["rounds to target"] = [COUNT.text(number) for number in rounds]
            columns[until.of("until then")] = [until.text(size) for size in sizes]
        return _table("Costs", columns)

    def _tuning(self) -> Table:
        """Return the choices of tuning."""
        unit = self.findings.units.get(self.findings.metric, PERCENT)
        rows = []
        for row in self.findings.rows:
            if (tuned := row.tuned) is not None:
                trials = f"{tuned.trials}, {tuned.sampler}"
                seeds = ", ".join(map(str, tuned.seeds))
                value = unit.text(float(floats(tuned.validation)))
                rows.append([row.label, settings_text(tuned.chosen), trials, seeds, value])
        columns = ["method", "chosen", "trials", "seeds", unit.of("validation")]
        return Table("Tuning", columns, rows, text=2)

    def _failures(self) -> Table:
        """Return the failed runs, and the reasons."""
        rows = [
            [row.label, str(seed), failure.reason, failure.log]
            for row in self.findings.rows
            for seed, failure in row.failures.items()
        ]
        return Table("Runs that failed", ["method", "seed", "why", "log"], rows, text=4)

    def __rich__(self) -> Group:
        """Return the text for the terminal: all but the means of each metric."""
        from rich.console import Group
        from rich.text import Text

        notes = Text("\n".join(f"- {note}" for note in footer(self.findings)))
        return Group(*self.tables(whole=False), notes)

    def __str__(self) -> str:
        from rich.console import Console

        width = shutil.get_terminal_size((140, 24)).columns
        console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False)
        with console.capture() as capture:
            console.print(self)
        return capture.get().rstrip()

    def _repr_html_(self) -> str:
        """Return the HTML for a notebook."""
        tables = "\n".join(table.to_html() for table in self.tables())
        return f"{tables}\n{html_notes(footer(self.findings))}"

    def to_markdown(self) -> str:
        """Return all tables and their notes as Markdown."""
        tables = [table.to_markdown() for table in self.tables()]
        notes = markdown_notes(footer(self.findings))
        return "\n\n".join([f"# {_TITLE}", *tables, "## Notes", notes]) + "\n"

    def to_latex(self) -> str:
        """Return all tables as LaTeX, for a document that uses the package ``booktabs``."""
        tables = "\n\n".join(table.to_latex() for table in self.tables())
        return f"% \\usepackage{{booktabs}}\n{tables}\n\n{latex_notes(footer(self.findings))}\n"

    def to_html(self) -> str:
        """Return all tables and figures as a page of HTML that needs no other file."""
        return self._page(self.figures.pngs())

    def _page(self, pngs: dict[str, bytes]) -> str:
        images = (
            f'<p><img alt="{name}" src="data:image/png;base64,{text}"></p>'
            for name, text in ((name, base64.b64encode(png).decode()) for name, png in pngs.items())
        )
        return html_page(_TITLE, "\n".join([self._repr_html_(), *images]))

    def to_csv(self) -> str:
        """Return all numbers, one in a line, in their own units (0.8 rather than 80 %)."""
        return to_csv(self.findings)

    def save(self, folder: Path) -> list[Path]:
        """Write ``table.md``, ``table.tex``, ``table.csv``, ``table.html`` and the figures.

        Args:
            folder: The folder to write to. It is made if it does not exist. Files of an earlier
                table are replaced.

        Returns:
            The paths of the files.
        """
        folder = Path(os.path.expanduser(folder))
        folder.mkdir(parents=True, exist_ok=True)
        written = []
        for name, content in self._files():
            written.append(folder / name)
            with replacing(written[-1], shared=True) as partial:
                partial.write_bytes(content)
        return written

    def _files(self) -> Iterator[tuple[str, bytes]]:
        """Yield the names and contents of the files; texts come before figures are drawn."""
        yield "table.md", self.to_markdown().encode()
        yield "table.tex", self.to_latex().encode()
        yield "table.csv", self.to_csv().encode()
        pngs = self.figures.pngs()
        yield "table.html", self._page(pngs).encode()
        for name, png in pngs.items():
            yield f"{name}.png", png


def _table(title: str, columns: dict[str, list[str]]) -> Table:
    return Table(title, [*columns], [[*cells] for cells in zip(*columns.values(), strict=True)])


def _range(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def _title(mean: str) -> str:
    return mean.replace("_", " ")
