"""The finalist rounds: the best of the search, their defaults and the baselines are timed again in turn."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, wait

from tunebench._figure import significant
from tunebench.db.figures import BaselineComparison, Figures
from tunebench.db.record import NewMeasurement
from tunebench.errors import ClusterLost, EnvironmentFault, WorkerUnusable
from tunebench.executor import ExecutorClosed, WorkerExecutor, WorkerLost
from tunebench.measure.comparison import compare
from tunebench.outcome import Measured, failure_of
from tunebench.search.optimality_proof import is_impossible
from tunebench.task import Task
from tunebench.tuning.audit import BoundAudit
from tunebench.tuning.baseline_rounds import BaselineRounds
from tunebench.tuning.finalist import (
    DISAGREEMENT,
    ROUNDS,
    TimedConfig,
    select_best,
    ties_of,
    verdict,
    with_time,
)
from tunebench.tuning.known_outcome import made_under_load
from tunebench.tuning.run_recorder import RunRecorder

__all__ = ["FATAL", "FinalistRounds"]

FATAL = (ClusterLost, EnvironmentFault, WorkerUnusable)
"""Faults of the machines that measure: they end a run, which keeps its results and is resumed later."""

ATTEMPTS = 3
"""Attempts to run all rounds on one worker of a cluster, and of a finalist that times out under load."""


class FinalistRounds:
    """Times finalists and baselines in rounds, and records the finalists.

    Args:
        recorder: Writes to the database.
        audit: Compares runs with their bounds.
        baselines: Timed after each round of the finalists.
        timed: All configurations that succeeded, among which ties of the best are found.
        search: Bound and variants of the search, to record with each finalist.
        make_task: Turns a finalist into a task.
        on_progress: Called with the phase, its finished trials and its total trials.

    Attributes:
        baselines: The times of the baselines.
        finalists: The finalists that succeeded in all rounds; empty until the rounds are complete.
    """

    def __init__(
        self,
        recorder: RunRecorder,
        audit: BoundAudit,
        baselines: BaselineRounds,
        *,
        timed: Sequence[TimedConfig],
        search: Figures,
        make_task: Callable[[TimedConfig], Task],
        on_progress: Callable[[str, int, int], None],
    ) -> None:
        self._recorder, self._audit, self.baselines = recorder, audit, baselines
        self._timed, self._search = timed, search
        self._make_task, self._on_progress = make_task, on_progress
        self.finalists: list[TimedConfig] = []

    def run(
        self, executor: WorkerExecutor[Task], finalists: Sequence[TimedConfig], *, with_baselines: bool
    ) -> None:
        """Time all finalists in turn, so that one lucky sample cannot win. Ctrl-C passes through.

        If the best's times in the search and in the rounds differ by more than the factor `DISAGREEMENT`, all
        rounds are repeated once.

        Every second round runs backwards, so that a drift within a round affects all alike. All rounds run on
        one worker; if it dies, they start again on another.

        Args:
            executor: Compiles and measures.
            finalists: The configurations to time.
            with_baselines: Whether to time the baselines.

        Raises:
            ClusterLost: if the worker dies `ATTEMPTS` times.
        """
        # One worker for all rounds: times of different processes or devices do not compare.
        for attempt in range(1, ATTEMPTS + 1):
            try:
                with executor.same_worker():
                    self._rounds(executor, finalists, with_baselines=with_baselines)
                    if self._disagrees(finalists):
                        self._discard(finalists)
                        self._rounds(executor, finalists, with_baselines=with_baselines)
                break
            except WorkerLost:
                self._discard(finalists)
                if attempt == ATTEMPTS:
                    raise ClusterLost(f"the finalist rounds lost their worker {ATTEMPTS} times") from None
            except (KeyboardInterrupt, ExecutorClosed, CancelledError, *FATAL):
                self._discard(finalists)
                raise
        self._record([timed for timed in finalists if timed.rounds and not timed.failed])

    @staticmethod
    def _disagrees(finalists: Sequence[TimedConfig]) -> bool:
        """Return whether the best took a much longer or shorter time in the search: the machine was busy."""
        selected = select_best([timed for timed in finalists if timed.rounds and not timed.failed])
        return selected is not None and selected.best.disagreement > DISAGREEMENT

    def _discard(self, finalists: Sequence[TimedConfig]) -> None:
        """Discard incomplete rounds; the times of the search remain."""
        self.baselines.discard()
        for timed in finalists:
            timed.rounds.clear()

    def _rounds(
        self, executor: WorkerExecutor[Task], finalists: Sequence[TimedConfig], *, with_baselines: bool
    ) -> None:
        for number in range(ROUNDS):
            done, total = number * len(finalists), ROUNDS * len(finalists)
            # Backwards in every second round: a drift within a round then affects all finalists equally.
            for position, timed in enumerate(finalists if number % 2 == 0 else finalists[::-1]):
                self._on_progress("finalists", done + position, total)
                self._time(executor, timed, number)
            if with_baselines:
                self._on_progress("baselines", number, ROUNDS)
                self.baselines.time()

    def _time(self, executor: WorkerExecutor[Task], timed: TimedConfig, number: int) -> None:
        if timed.failed:
            return
        for _ in range(ATTEMPTS):
            future = executor.submit(self._make_task(timed))
            wait([future])
            result = future.result()
            if not made_under_load(result.outcome):
                break
        self._audit.check(timed.search, timed.config, result.outcome, timed.bound_us)
        if isinstance(result.outcome, Measured) and not is_impossible(result.outcome, timed.bound_us):
            timed.rounds[number] = result
        else:  # it succeeded in the search and fails now: it can no longer win
            timed.failure = (
                failure_of(result.outcome) or f"below its lower bound of {significant(timed.bound_us, 6)} us"
            )
            key = self._recorder.key(timed.search.key, timed.config)
            self._recorder.record(
                NewMeasurement(key=key, result=result, purpose="finalist", bound_us=timed.bound_us)
            )

    def _record(self, finalists: list[TimedConfig]) -> None:
        selected = select_best(finalists)
        if selected is None:
            return
        self.finalists = finalists
        ties = ties_of(selected.best, self._timed)
        self._recorder.record(
            *(
                NewMeasurement(
                    key=self._recorder.key(timed.search.key, timed.config),
                    # All finalists in one transaction: with a part of them, a lookup could rank a slower one
                    # first.
                    result=timed.pooled(),
                    purpose="finalist",
                    bound_us=timed.bound_us,
                    verdict=verdict(
                        timed,
                        finalists,
                        selected,
                        search=dataclasses.replace(self._search, baselines=self._versus_baselines(timed)),
                        ties=ties,
                    ),
                )
                for timed in finalists
            )
        )

    def _versus_baselines(self, timed: TimedConfig) -> dict[str, BaselineComparison]:
        """Return the comparison of a finalist with each baseline in their common rounds, by name."""
        comparisons = {}
        for baseline in self.baselines.baselines():
            rounds = {
                number: times[baseline.name]
                for number, times in enumerate(self.baselines.rounds)
                if baseline.name in times and number in timed.rounds
            }
            if rounds:
                samples = [timed.samples_us(number) for number in rounds]
                versus = compare(samples, [times.samples_us for times in rounds.values()])
                comparisons[baseline.name] = with_time(versus, baseline.median_us, baseline.ci_us)
        return comparisons
