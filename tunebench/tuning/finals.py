"""The finals: the best of the search, their defaults and the libraries are timed again, in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, wait

from tunebench.db.record import NewMeasurement
from tunebench.errors import ClusterLost
from tunebench.executor import Executor, PlaceLost, Stopped
from tunebench.measure.baseline import Baseline
from tunebench.measure.comparison import Comparison, compare
from tunebench.outcome import Measured
from tunebench.task import Task
from tunebench.tuning.audit import Audit
from tunebench.tuning.finalist import ROUNDS, Settled, Timed, settle, verdict
from tunebench.tuning.library import Libraries
from tunebench.tuning.logbook import Logbook

__all__ = ["Finals"]

BEGINNINGS = 3
"""How often the finals of a cluster begin before they are given up."""


class Finals:
    """What timing finalists again has shown.

    Args:
        logbook: Is written to.
        audit: Holds every run against its bound.
        libraries: Are timed after each round.
        make_task: Turns a finalist into what the executor takes.
        tell: Is told of the phase, of what is done and of what there is to do.
    """

    def __init__(
        self,
        logbook: Logbook,
        audit: Audit,
        libraries: Libraries,
        *,
        make_task: Callable[[Timed], Task],
        tell: Callable[[str, int, int], None],
    ) -> None:
        self._logbook, self._audit, self._libraries = logbook, audit, libraries
        self._make_task, self._tell = make_task, tell
        self.finalists: list[Timed] = []
        """Those with a verdict: all that went through to the end."""

    @property
    def failures(self) -> dict[str, str]:
        """Why libraries have no times, by name; those of all under `baselines`."""
        return self._libraries.failures

    def baselines(self) -> tuple[Baseline, ...]:
        """Return what the libraries took, fastest first."""
        return self._libraries.baselines()

    def rerun_finalists(self, executor: Executor[Task], finalists: Sequence[Timed], seed: int | None) -> None:
        """Time all again, in turn: a lucky sample wins no more. Ctrl-C passes through, without a verdict.

        Every second round goes backwards, so that a drift within a round meets all alike too. All rounds are
        in one place; where that is lost, they begin again in another.

        Args:
            executor: Compiles and runs.
            finalists: Who takes part.
            seed: Of the libraries' inputs; None times no libraries.
        """
        with self._libraries:
            for begun in range(1, BEGINNINGS + 1):
                try:
                    with executor.together():
                        self._rounds(executor, finalists, seed)
                    break
                except PlaceLost:
                    self._forget(finalists)
                    if begun == BEGINNINGS:
                        raise ClusterLost(f"the finals lost their worker {BEGINNINGS} times") from None
                except (KeyboardInterrupt, Stopped, CancelledError, ClusterLost):
                    self._forget(finalists)
                    raise
        self._settle([timed for timed in finalists if timed.again and not timed.failed])

    def _forget(self, finalists: Sequence[Timed]) -> None:
        """Take back rounds that are no verdict: what the search timed goes on speaking."""
        self._libraries.forget()
        for timed in finalists:
            timed.again.clear()

    def _rounds(self, executor: Executor[Task], finalists: Sequence[Timed], seed: int | None) -> None:
        for turn in range(ROUNDS):
            self._round(executor, finalists, turn)
            if seed is not None:
                self._tell("baselines", turn, ROUNDS)
                self._libraries.time(seed)

    def _round(self, executor: Executor[Task], finalists: Sequence[Timed], turn: int) -> None:
        done, total = turn * len(finalists), ROUNDS * len(finalists)
        for position, timed in enumerate(finalists if turn % 2 == 0 else finalists[::-1]):
            self._tell("finalists", done + position, total)
            self._time_again(executor, timed, turn)

    def _time_again(self, executor: Executor[Task], timed: Timed, turn: int) -> None:
        if timed.failed:
            return
        future = executor.submit(self._make_task(timed))
        wait([future])
        result = future.result()
        if isinstance(result.outcome, Measured):
            timed.again[turn] = result
            self._audit.check(timed.search, timed.config, result.outcome, timed.bound_us)
        else:  # right in the search and not now: it speaks no more
            timed.failed = True
            key = self._logbook.key(timed.search, timed.config)
            self._logbook.record(key, result, "finalist", timed.bound_us)

    def _settle(self, finalists: list[Timed]) -> None:
        settled = settle(finalists)
        if settled is None:
            return
        self.finalists = finalists
        self._logbook.record_finalists(
            [
                NewMeasurement(
                    key=self._logbook.key(timed.search, timed.config),
                    result=timed.pooled(),
                    purpose="finalist",
                    bound_us=timed.bound_us,
                    verdict=verdict(timed, finalists, settled, self._against_libraries(timed)),
                )
                for timed in finalists
            ]
        )

    def versus(self, settled: Settled) -> dict[str, Comparison]:
        """Return how the best stands to others, the fastest library among them."""
        found, baselines = dict(settled.versus), self.baselines()
        libraries = self._against_libraries(settled.best)
        if baselines and baselines[0].name in libraries:
            found["baseline"] = libraries[baselines[0].name]
        return found

    def _against_libraries(self, timed: Timed) -> dict[str, Comparison]:
        """Compare a finalist with each library by the rounds of both; those that failed once are left out."""
        found = {}
        for name in (baseline.name for baseline in self.baselines()):
            rounds = {
                turn: library[name]
                for turn, library in enumerate(self._libraries.rounds)
                if name in library and turn in timed.again
            }
            if rounds:
                mine = [timed.samples_us(turn) for turn in rounds]
                found[name] = compare(mine, [library.samples_us for library in rounds.values()])
        return found
