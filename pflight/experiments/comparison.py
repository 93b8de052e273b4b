"""Comparisons of methods: their runs, their progress and their results."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from pflight.command.by_class import without_class
from pflight.command.shipped import configs
from pflight.errors import ConfigurationError
from pflight.messages import no_option
from pflight.runs.files import PARTIAL, full_disk
from pflight.runs.folder import CONFIG, FAILURE

from .measuring import Task, ended_in
from .outcome import VERSION, Failure, Outcome, Record, Tuned, Waiting
from .plan import Method, Plan, Row, declared, flat
from .results import Results
from .tuning import FIRST_SEED, Study, Tuning

FILE = "comparison.json"
Ended = Outcome | Failure | Waiting
"""A run, finished or not."""
TRIALS = "tuning"
"""The folder of the trials."""
_UNJUDGED = "the metric that chooses rounds has no value on validation samples"


@dataclass(frozen=True)
class DescribedRow:
    """A row, for readers of the results.

    Attributes:
        key: As in :class:`~pflight.experiments.outcome.Outcome`, like the next two.
        method: Its method's title.
        settings: Options that differ from its method's configuration.
        tuned: How these settings were chosen, if they were tuned.
        folder: The folder of its runs; ``None`` while its settings are being chosen.
        failed: Why the choice failed.
    """

    key: str
    method: str
    settings: dict[str, Any]
    tuned: Tuned | None
    folder: str | None
    failed: str | None


@dataclass(frozen=True)
class Described(Record):
    """The parts of a comparison: ``comparison.json`` in its folder.

    Attributes:
        data: The options of its data.
        seeds: Its seeds.
        rows: Its rows.
        version: Version of this format.
    """

    title: ClassVar[str] = "comparison"
    remedy: ClassVar[str] = "delete it, and the command of the comparison writes it anew"

    data: dict[str, Any]
    seeds: list[int]
    rows: list[DescribedRow]
    version: int = VERSION


@dataclass
class Entry:
    """A row of a comparison. Its settings may be chosen by trials, on seeds that are not reported.

    Attributes:
        row: The row with its method's own settings.
        space: The options to choose.
        study: The trials, if settings are chosen.
        tuned: The row with the chosen settings.
        failure: Why a trial failed, if one did.
    """

    row: Row
    space: Mapping[str, Any] = field(default_factory=dict)
    study: Study | None = None
    tuned: Row | None = None
    failure: str = ""

    @property
    def reported(self) -> Row | None:
        """The row whose runs are reported; ``None`` while its settings are being chosen."""
        return self.tuned if self.study else self.row


class Comparison:
    """All runs of a comparison: an agenda for jobs.

    Progress is read only from the files in the run folders. So any number of processes can work on
    one comparison, and any of them can be killed.

    Args:
        plan: The plan that all runs share.
        methods: The methods.
        settings: Values of options by name; each combination is a row for the methods with these
            options.
        seeds: Number of seeds, from 0.
        tuning: How to choose further settings; ``None`` for no tuning.
        folder: The folder of the comparison.
        jobs: Number of parallel runs.

    Raises:
        ConfigurationError: If an option is wrong, or the folder has another comparison.
    """

    def __init__(
        self,
        plan: Plan,
        methods: Iterable[Method],
        settings: Mapping[str, Sequence[Any]],
        *,
        seeds: int,
        tuning: Tuning | None,
        folder: Path,
        jobs: int = 1,
    ) -> None:
        if not 1 <= seeds <= FIRST_SEED:
            raise ConfigurationError(f"--seeds must be from 1 to {FIRST_SEED}, got {seeds}")
        if jobs < 1:
            raise ConfigurationError(f"--jobs must be at least 1, got {jobs}")
        self.plan = plan
        self.seeds = range(seeds)
        self.tuning = tuning
        self.folder = folder
        self.jobs = jobs
        self._check_folder()
        rows = plan.rows(methods, settings)
        self._check_names(rows)
        self.rows = [self._entry(row) for row in rows]
        self._check_own_space()
        self._ended: dict[str, Outcome | Failure] = {}
        self._folders: dict[tuple[Path, str], Path] = {}

    def _entry(self, row: Row) -> Entry:
        # Declarations for all methods come first, and replace methods' own.
        space = self.plan.space | {
            o: t for o, t in row.method.space.items() if o not in self.plan.space
        }
        options = dict(flat(row.config))
        given = {*map(without_class, [*row.settings, *row.fixed])}
        # A user's module may lack options that shipped methods name.
        space = {o: told for o, told in space.items() if o in options and o not in given}
        if self.tuning is None or not space:
            return Entry(row)
        return Entry(row, space, Study(self.tuning, space, options, row.method.name))

    def _check_names(self, rows: Sequence[Row]) -> None:
        """Raise for options in search spaces that no run has, if they may be misspelt.

        A user's module may lack options that shipped methods name.
        """
        known = dict.fromkeys(option for row in rows for option, _ in flat(row.config))
        shipped = {path.resolve() for path in configs().values()}
        of_methods = dict.fromkeys(row.method.config for row in rows)
        own = [path for path in of_methods if path.resolve() not in shipped]
        for path in [*map(Path, self.plan.configs), *own]:
            for option in sorted({*declared([path])}.difference(known)):
                said = no_option(option, known)
                if path not in own or said.endswith("?"):
                    raise ConfigurationError(f"{path}: search_space: {said}")

    def _check_own_space(self) -> None:
        """Raise for values in the search space of the data's configuration that no option has."""
        for option in self.plan.space:
            entry = next((entry for entry in self.rows if option in entry.space), None)
            if entry and entry.study:
                row = entry.row
                for value in entry.study.limits(option):
                    self.plan.row(row.method, {**row.settings, option: value}, row.fixed)

    @property
    def left_out(self) -> list[str]:
        """Options that search spaces name and no run has, if they are searched."""
        if self.tuning is None:
            return []
        rows = [entry.row for entry in self.rows]
        named = {option for row in rows for option in row.method.space}
        return sorted(named.difference(*(dict(flat(row.config)) for row in rows)))

    # Work to do

    def due(self) -> list[Task]:
        """Return the unfinished runs that can be made now, in their order."""
        self._advance()
        return [task for task in self._tasks() if self._result(task) is None]

    @property
    def count(self) -> int:
        """Number of all runs, including trials."""
        trials = self.tuning.trials * self.tuning.seeds if self.tuning else 0
        choices = sum(entry.study is not None for entry in self.rows)
        return len(self.rows) * len(self.seeds) + choices * trials

    @property
    def ended(self) -> int:
        """Number of runs that have ended."""
        self._advance()
        told = sum(entry.study.told for entry in self.rows if entry.study)
        trials = told * self.tuning.seeds if self.tuning else 0
        return trials + sum(self._result(task) is not None for task in self._tasks())

    def forget_failures(self) -> None:
        """Repeat the runs that failed in earlier work on the comparison."""
        for path in self.folder.glob(f"*/**/{FAILURE}"):
            path.unlink(missing_ok=True)

    def _tasks(self) -> Iterator[Task]:
        """Yield the runs that are known so far: first trials, then runs that wait for no trial."""
        for entry in self.rows:
            if entry.study and not entry.study.done:
                for settings in entry.study.pending():
                    yield from self._trial(entry.row, settings)
        for entry in self.rows:
            if entry.reported:
                yield from self._tasks_of(entry.reported, self.folder, self.seeds)

    def _trial(self, row: Row, settings: Mapping[str, Any]) -> list[Task]:
        """Return the runs of a trial, one for each of its seeds."""
        assert self.tuning is not None
        root = self.folder / TRIALS
        return self._tasks_of(row.trial(settings), root, self.tuning.used_seeds, tests=False)

    def _tasks_of(
        self, row: Row, root: Path, seeds: Iterable[int], tests: bool = True
    ) -> list[Task]:
        """Return the runs of a row, one for each seed. A run that has begun continues."""
        place = self._folder_of(row, root)
        return [
            Task(
                key=row.key,
                method=row.method.title,
                settings=dict(row.settings),
                tuned=None if row.tuned is None else asdict(row.tuned),
                seed=seed,
                arguments=[
                    *row.arguments,
                    f"--seed_everything={seed}",
                    f"--trainer.default_root_dir={place / f'seed-{seed}'}",
                    "--ckpt_path=last",
                ],
                folder=str(place / f"seed-{seed}"),
                tests=tests,
                beside=self.jobs,
            )
            for seed in seeds
        ]

    def _folder_of(self, row: Row, root: Path) -> Path:
        """Return the folder of a row's runs. Its name may be from earlier settings of the row."""
        place = root, row.key
        if place not in self._folders:
            known = [root / row.folder, *sorted(root.glob(f"*-{row.key[:8]}"))]
            self._folders[place] = next((path for path in known if path.is_dir()), known[0])
        return self._folders[place]

    def _advance(self) -> None:
        """Tell each study its trials' results, and take the settings that it chooses."""
        for entry in self.rows:
            if entry.study and not entry.study.done:
                self._tell(entry, entry.study)

    def _tell(self, entry: Entry, study: Study) -> None:
        while not study.done:
            ended = [self._result(task) for task in self._trial(entry.row, study.pending()[0])]
            if None in ended:
                return
            reached = [_worth(result) for result in ended if isinstance(result, Outcome)]
            failed = [result.reason for result in ended if isinstance(result, Failure)]
            worth = math.nan if failed else sum(reached) / len(reached)
            if math.isnan(worth):
                entry.failure = entry.failure or [*failed, _UNJUDGED][0]
            study.tell(worth)
        if study.best is not None:
            entry.tuned = self._chosen(entry, *study.best)
        self.save()  # for readers of the results meanwhile

    def _chosen(self, entry: Entry, settings: dict[str, Any], worth: float) -> Row:
        """Return a row with the chosen settings, which reached a value in their trial."""
        assert self.tuning is not None
        row = entry.row
        first = self._result(self._trial(row, settings)[0])
        assert isinstance(first, Outcome)
        tuned = Tuned(
            trials=self.tuning.trials,
            sampler=self.tuning.sampler,
            seeds=self.tuning.used_seeds,
            chosen=settings,
            validation=worth if first.mode == "max" else -worth,
            space=dict(entry.space),
        )
        chosen = self.plan.row(row.method, {**row.settings, **settings}, row.fixed)
        return replace(chosen, tuned=tuned)

    def _result(self, task: Task) -> Outcome | Failure | None:
        """Return a run's outcome; ``None`` if it has not ended."""
        known = self._ended.get(task.folder) or ended_in(Path(task.folder), task.key)
        if known is not None:
            self._ended[task.folder] = known
        return known

    # Results so far

    def results(self, **options: Any) -> Results:
        """Return the results so far.

        Args:
            **options: Further arguments of :class:`~pflight.experiments.results.Results`.
        """
        return Results(runs_of(self._described(), self.folder), **options)

    def save(self) -> None:
        """Save the rows and seeds, so that others can read the results.

        Raises:
            ConfigurationError: If the file can't be written.
            OSError: If the disk is full.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._described().write(self.folder / FILE, shared=True)
        except OSError as error:
            if full_disk(error):
                raise
            raise ConfigurationError(
                f"the comparison can't be written to {self.folder}: {error.strerror}"
            ) from error

    def _described(self) -> Described:
        rows = []
        for entry in self.rows:
            row, failed = entry.tuned or entry.row, None
            if entry.study and entry.study.done and entry.tuned is None:
                failed = f"all {entry.study.tuning.trials} trials failed: {entry.failure}"
            rows.append(
                DescribedRow(
                    key=row.key,
                    method=row.method.title,
                    settings=dict(row.settings),
                    tuned=row.tuned,
                    folder=self._folder_of(row, self.folder).name if entry.reported else None,
                    failed=failed,
                )
            )
        return Described(self.plan.data, [*self.seeds], rows)

    def _check_folder(self) -> None:
        """Raise if the folder has a comparison on other data, or something else."""
        if not self.folder.exists():
            return
        if not self.folder.is_dir():
            raise ConfigurationError(f"--out {self.folder} is a file: give a folder")
        if not (self.folder / FILE).is_file():
            others = [path for path in self.folder.iterdir() if path.suffix != PARTIAL]
            if others and not any(self.folder.glob(f"*/seed-*/{CONFIG}")):
                raise ConfigurationError(
                    f"--out {self.folder} holds other files, and no comparison: give another folder"
                )
            return
        if differing := _difference(Described.read(self.folder / FILE).data, self.plan.data):
            raise ConfigurationError(
                f"--out {self.folder} holds a comparison on other data ({differing}): give "
                "another folder"
            )


def runs_of(described: Described, folder: Path) -> list[Ended]:
    """Return all runs of a comparison, finished or not.

    Args:
        described: Its parts.
        folder: Where its runs are.
    """
    found: list[Ended] = []
    for row in described.rows:
        for seed in described.seeds:
            whose = row.key, row.method, row.settings, seed
            ended: Ended | None = None
            if row.failed:
                ended = Failure(*whose, reason=row.failed, log=str(folder / TRIALS))
            elif row.folder:
                ended = ended_in(folder / row.folder / f"seed-{seed}", row.key)
            if isinstance(ended, Outcome):  # other settings may give the same run
                ended = replace(ended, method=row.method, settings=row.settings, tuned=row.tuned)
            found.append(ended or Waiting(*whose))
    return found


def _worth(outcome: Outcome) -> float:
    """Return a trial's value on validation samples; higher is better."""
    moment = outcome.chosen or outcome.last
    if moment.validation is None:
        return math.nan
    return moment.validation if outcome.mode == "max" else -moment.validation


def _difference(saved: Any, here: Any, name: str = "data") -> str:
    """Return the first option that differs; nothing if none does."""
    if isinstance(saved, Mapping) and isinstance(here, Mapping):
        parts = (
            _difference(saved.get(key), here.get(key), f"{name}.{key}".replace(".init_args", ""))
            for key in {**saved, **here}
        )
        return next(filter(None, parts), "")
    return "" if saved == here else f"{name} is {saved} there and {here} here"
