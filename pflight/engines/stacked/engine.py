"""Many clients at once: their parameters are stacked, and one pass trains them all."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from functools import partial

from tensordict import TensorDict
from torch import Tensor

from pflight.data.loaders import Split
from pflight.engines.alone.copies import ready
from pflight.engines.alone.engine import Samples, SequentialEngine
from pflight.engines.alone.visits import GRADIENT_BATCH
from pflight.engines.base import are_one, finite_rows
from pflight.engines.client_setup import ClientSetup
from pflight.local_client import Pass
from pflight.metrics.collection import ClientValues
from pflight.randomness import Purpose
from pflight.states.updates import (
    STOPS,
    ClientFailure,
    ClientUpdates,
    Evaluation,
    Kept,
)

from .audit import Audit
from .evaluation import StackedEvaluation, same
from .probe import Probe, trial_batches, trial_samples
from .reasons import reason_of
from .stack import Mode, Stack
from .steps import Plan, Workspace, rows_per_call
from .training import Chunk, StackedCohort, StackedTraining, Work


class VectorizedEngine(SequentialEngine):
    """Trains and evaluates clients in chunks. Their parameters are stacked and stepped together.

    One call of the module's training step under ``vmap`` gives the losses of a chunk, as the client
    method changes them. One optimizer steps the stacked parameters. Clients see the same batches as
    in the sequential engine and get its results to float tolerance. Clients with batches of one
    size share a call. A finished client drops out of the stack.

    Clients that can't be stacked run one by one, for the reason in :attr:`obstacle`. So does a
    client that raises or has a result that is not finite: then failures read the same.

    Args:
        setup: The client module, its client method, and its data.
        chunk: Largest number of clients that are trained at once.
        warned: Warnings about clients that are not stacked. They are not repeated.

    Attributes:
        obstacle: Why clients are trained one by one, or ``None``; known after
            :meth:`check_input`.
        stacks_evaluation: Whether clients' own models are evaluated at once; known then, too.
    """

    def __init__(self, setup: ClientSetup, chunk: int, warned: set[str] | None = None) -> None:
        super().__init__(setup)
        self.chunk = chunk
        self.obstacle: str | None = None
        self.stacks_evaluation = setup.task is not None
        module = ready(setup.client)
        setup.precision.convert_module(module).to(setup.device)
        self._stacked = Stack(module, setup.client_method, setup.layout)
        self._probe = Probe(self._stacked, self.models)
        self._audit = Audit(self._probe.reference)
        workspace = Workspace(setup.device)
        self._trainer = StackedTraining(setup, self._stacked, self._audit, workspace)
        self._evaluation = StackedEvaluation(setup, self._stacked, chunk, workspace)
        self._alone: set[type[Pass]] = set()  # passes that are no longer stacked
        self._warned = set() if warned is None else warned
        self._not_at_once = ""  # why clients of an evaluation ran one by one

    # Before the start

    def check_input(self) -> None:
        """See :class:`SequentialEngine`; find out whether clients can be stacked."""
        super().check_input()
        if self.setup.form is None:
            self.obstacle = "its samples are no tensors that lie in memory"
            self.stacks_evaluation = False
            return
        samples = self._trainer.samples = trial_samples(self.setup)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the module warns again when it trains
            try:
                self.obstacle = self._find_obstacle(samples)
            except STOPS:
                raise
            except BaseException as error:
                self.obstacle = f"trying it fails: {reason_of(error)}"
            if self.stacks_evaluation:
                self.stacks_evaluation = self._probe.predicts_each_alone(samples[0])

    def _find_obstacle(self, samples: list[Tensor]) -> str | None:
        data, client_method, probe = self.setup.data, self.setup.client_method, self._probe
        counts = data.num_samples("train")[data.train_clients].unique().tolist()
        if obstacle := probe.declared_obstacle():
            return obstacle
        batches = trial_batches(self.setup, samples, counts)
        if obstacle := probe.training_step(batches):
            return obstacle
        for anchored in (True, False):
            mode = Mode(anchored, anchored and client_method.remembers)
            if obstacle := probe.obstacle(mode, batches):
                return obstacle
            dependence = probe.dependence(mode, batches, unequal=len(counts) > 1)
            self._trainer.dependence[anchored] = dependence
        return None

    @property
    def fills_batches(self) -> bool:
        """Whether batches of unequal size share a call."""
        return all(dependence.weighs_samples for dependence in self._trainer.dependence.values())

    def rows_per_call(self) -> float:
        """Return how many of a chunk's clients share a call, on average."""
        data = self.setup.data
        clients = data.train_clients[: min(self.chunk, data.cohorts.size)]
        counts = data.num_samples("train")[clients].sort(descending=True).values.tolist()
        sizes = [tuple(self.setup.batch_sizes(count)) for count in counts]
        plans = [Plan(own, len(own)) for own in sizes]
        return rows_per_call(plans, self.fills_batches)

    # Training

    def train(
        self,
        clients: Tensor,
        starts: TensorDict,
        *,
        round_index: int,
        epochs: int = 1,
        steps: int | None = None,
        purpose: Purpose = Purpose.TRAIN,
        kept: Kept | None = None,
        on_client_end: Callable[[int], None] | None = None,
    ) -> ClientUpdates:
        """See :class:`SequentialEngine`."""
        self.setup.round_index = round_index

        one_by_one = partial(
            super().train,
            round_index=round_index,
            epochs=epochs,
            steps=steps,
            purpose=purpose,
            on_client_end=on_client_end,
        )

        def plan(count: int) -> Plan:
            sizes = tuple(self.setup.batch_sizes(count))
            whole = epochs * len(sizes) if steps is None else steps
            return Plan(sizes, whole if sizes else 0)

        mode = Mode(purpose is Purpose.TRAIN, kept is not None)
        phases = None if self.obstacle else self.setup.phases(epochs, mode.anchored)
        if phases and steps is not None:
            return one_by_one(clients, starts, kept=kept)
        work = Work(
            round_index,
            mode,
            plan,
            one_by_one,
            phases=phases or [None],
            on_client_end=on_client_end,
        )
        return self._in_chunks(clients, starts, kept, work)

    def gradients(
        self, clients: Tensor, states: TensorDict, *, round_index: int, batches: int | None = None
    ) -> ClientUpdates:
        """See :class:`SequentialEngine`."""

        def one_by_one(clients: Tensor, states: TensorDict, kept: Kept | None) -> ClientUpdates:
            return SequentialEngine.gradients(
                self, clients, states, round_index=round_index, batches=batches
            )

        def plan(count: int) -> Plan:
            whole = sum(self.setup.batch_sizes(count)[:batches])
            part = max(whole, 1) if self.setup.mixes_samples else GRADIENT_BATCH
            sizes = [part] * (whole // part) + [whole % part] * (whole % part > 0)
            return Plan(tuple(sizes), len(sizes))

        mode, shuffled = Mode(anchored=True, remembers=False), batches is not None
        work = Work(round_index, mode, plan, one_by_one, shuffled, steps=False)
        return self._in_chunks(clients, states, None, work)

    def _in_chunks(
        self, clients: Tensor, starts: TensorDict, kept: Kept | None, work: Work
    ) -> ClientUpdates:
        """Do a work for the clients ``[C]``, longest first. Repeat failed clients one by one."""
        if self.obstacle or not len(clients):
            return work.one_by_one(clients, starts, kept=kept)
        cohort = StackedCohort(self.setup, self._stacked, clients, starts, kept, work)
        self._audit.begin(work.round_index)
        self._stacked.take_frozen(cohort.everyone.starts)
        failed: dict[int, BaseException | None] = {}  # by row of the stack
        for first, chunk in cohort.chunks(self.chunk):
            cause = None
            try:
                self._trainer.run(chunk, work)
                finite = self._are_finite(chunk)
            except STOPS:
                raise
            except BaseException as error:  # the code below finds the client
                cause, finite = error, [False] * len(chunk.clients)
            for row, client in enumerate(chunk.clients):
                if not finite[row]:
                    failed[first + row] = cause
                elif work.on_client_end is not None:
                    work.on_client_end(client)
        again = None
        if failed:
            *those, memory = cohort.some(failed)
            again = work.one_by_one(*those, kept=memory)
            causes = {cohort.everyone.clients[row]: cause for row, cause in failed.items()}
            self._warn_of_fallbacks(causes, again.failures)
        names: Collection[str] = ("train/loss",)
        if work.steps:
            names = self._stacked.logged(work.mode)
        return cohort.updates(names, failed, again)

    def _are_finite(self, chunk: Chunk) -> list[bool]:
        """Return for each client of a chunk whether its result and memory are finite."""
        its_state = self.setup.client_method.remembers_its_state
        stacks = [chunk.results] if its_state else [chunk.results, chunk.kept]
        return finite_rows(*(TensorDict(s, batch_size=[len(chunk.clients)]) for s in stacks))

    def _warn_of_fallbacks(
        self, causes: dict[int, BaseException | None], failures: list[ClientFailure]
    ) -> None:
        """Warn of clients that fail together, if none of them fails alone.

        Args:
            causes: By client, the error of its chunk, or ``None`` for a result with NaN.
            failures: The clients that failed alone.
        """
        alone = {failure.client for failure in failures}
        for cause in set(causes.values()):
            clients = {client for client, why in causes.items() if why is cause}
            if cause is None:
                clients -= alone
            if not clients or clients & alone:
                continue
            reason = "a result that is NaN or infinite"
            if cause is not None:
                reason = f"{type(cause).__name__}: {reason_of(cause)}"
            self.warn_once(
                f"clients that can't be trained together, but one by one: {reason}; "
                "engine='sequential' does so from the start"
            )

    # Evaluation

    def evaluate(
        self, clients: Tensor, states: TensorDict, split: Split
    ) -> tuple[Evaluation | ClientValues, list[ClientFailure]]:
        """See :class:`SequentialEngine`."""
        self._not_at_once = ""
        evaluation, failures = super().evaluate(clients, states, split)
        if self._not_at_once and not failures:  # otherwise the failed clients are the cause
            name = type(self.setup.client).__name__
            self.warn_once(f"{name} is evaluated one by one from here on: {self._not_at_once}")
            self.stacks_evaluation = False
        return evaluation, failures

    def outputs_at_once(self, states: TensorDict, samples: Samples) -> dict[int, Tensor] | None:
        """Return the outputs of clients by row, also of different models; else ``None``."""
        names = self.setup.layout.names
        if not self.stacks_evaluation or are_one(states[name] for name in names):
            return super().outputs_at_once(states, samples)
        try:
            return self._evaluation.outputs(states, samples)
        except STOPS:
            raise
        except BaseException as error:
            self._not_at_once = reason_of(error)
            return None

    # Passes

    def run(
        self, look: Pass, clients: Tensor, states: TensorDict, *, round_index: int
    ) -> tuple[list[dict[str, Tensor]], list[ClientFailure]]:
        """See :class:`SequentialEngine`.

        Clients with equally many samples share a call. One client of each call is also computed
        alone. If it gets another result, or the call fails, all run one by one.
        """

        def one_by_one(
            rows: list[int],
        ) -> tuple[list[dict[str, Tensor]], list[ClientFailure]]:
            return SequentialEngine.run(
                self, look, clients[rows], states[rows], round_index=round_index
            )

        groups = self._groups(look, clients)
        if not groups:
            return super().run(look, clients, states, round_index=round_index)
        found: list[dict[str, Tensor]] = [{} for _ in clients]
        stacked: set[int] = set()
        reasons: dict[str, set[int]] = {}  # why clients did not share a call, with their rows
        for rows in groups:
            alike, reason = False, "clients together get other results than one alone"
            try:
                together = self._evaluation.found(look, clients[rows], states[rows])
                place = round_index % len(rows)
                (alone,), failed = one_by_one(rows[place : place + 1])
                alike = not failed and same(together[place], alone)
            except STOPS:
                raise
            except BaseException as error:  # the code below finds the client
                reason = reason_of(error)
            if alike:
                stacked.update(rows)
                for row, own in zip(rows, together, strict=True):
                    found[row] = own
            else:
                reasons.setdefault(reason, set()).update(clients[rows].tolist())
        rest = [row for row in range(len(clients)) if row not in stacked]
        given, failures = one_by_one(rest)
        for row, own in zip(rest, given, strict=True):
            found[row] = own
        faulty = {failure.client for failure in failures}
        for reason, asked in reasons.items():
            if not asked & faulty:
                self._alone.add(type(look))
                self.warn_once(
                    f"{type(look).__name__} runs for one client after the other: {reason}; "
                    "stacks=False does so from the start"
                )
        return found, failures

    def _groups(self, look: Pass, clients: Tensor) -> list[list[int]]:
        """Return the rows of the clients ``[C]`` that share a call: with equally many samples.

        If a client's batches keep a CPU busy, the client shares no call.
        """
        if self.obstacle or not look.stacks or type(look) in self._alone:
            return []
        data, rows_of = self.setup.data, dict[int, list[int]]()
        for row, count in enumerate(data.num_samples(look.split)[clients.cpu()].tolist()):
            size = min(look.batch_size or data.eval_batch_size or count, count)
            if count and (self.device.type != "cpu" or self._is_small(size)):
                rows_of.setdefault(count, []).append(row)
        parts = (
            rows[first : first + self.chunk]
            for rows in rows_of.values()
            for first in range(0, len(rows), self.chunk)
        )
        return [rows for rows in parts if len(rows) > 1]

    def warn_once(self, message: str) -> None:
        """Warn, but only once."""
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=2)
