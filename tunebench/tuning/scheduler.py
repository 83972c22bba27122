"""The division of one budget of trials between the workloads of a suite, which share one executor.

`SharedBudget` prepares, searches and finishes each workload by the functions of `tunebench.tuning.run`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence

from tunebench.errors import ClusterLost, DatabaseError, TunebenchError
from tunebench.executor import WorkerExecutor
from tunebench.outcome import time_us
from tunebench.search.loop import optimality_proof, share_of
from tunebench.task import Task
from tunebench.tuning import run
from tunebench.tuning.baseline_rounds import stage_for
from tunebench.tuning.budget_scheduler import ROUND, BudgetScheduler, TaskState
from tunebench.tuning.run_context import RunContext, TuningSetup
from tunebench.tuning.run_report import finish, stored_best
from tunebench.tuning.summary import TuningSummary, WorkloadResult, WorkloadStatus, with_shares
from tunebench.tuning.warm import FARTHEST, RELATED, distance
from tunebench.tuning.weighted_workload import WeightedWorkload
from tunebench.tuning.workload_report import Progress, ProgressCallback, Report

__all__ = ["SharedBudget"]

LEAST_ROUNDS = 4
"""Rounds that each workload could get if all got equally many; a limit on the length of a round."""

FIRST_TRIAL_S = 2.0
"""Assumed seconds per trial, until the first round shows how long trials take."""


class SharedBudget:
    """One run of `tune_suite`: rounds of one budget of trials go where they save the most time.

    All workloads are prepared at the beginning and share one executor, so a round continues the search of its
    workload without starting workers.

    Args:
        setup: Device, plan and database; `Plan.trials` and `Plan.minutes` are for all workloads together.
        name: Name of the suite.
        workloads: The workloads, whose variants are found.
        on_progress: Called after every trial.
    """

    def __init__(
        self,
        setup: TuningSetup,
        name: str,
        workloads: Sequence[WeightedWorkload],
        on_progress: ProgressCallback,
    ) -> None:
        self._setup, self._name, self._on_progress = setup, name, on_progress
        self._all = workloads
        self._workloads = {str(weighted.workload): weighted for weighted in workloads if weighted.variants}
        self._began = time.monotonic()
        minutes = setup.plan.minutes
        self._until = self._began + 60 * minutes if minutes is not None else None
        self._interrupted = self._cut_short = False
        self._stopped: str | None = None

    @property
    def _done(self) -> int:
        return sum(
            weighted.context.budget.done
            for weighted in self._workloads.values()
            if weighted.context is not None
        )

    def run(self, executor: WorkerExecutor[Task]) -> None:
        """Search and time finalists; Ctrl-C and a lost cluster end the run and keep all results."""
        try:
            for weighted in self._workloads.values():
                self._prepare(weighted)
            self._search(executor)
            if not self._interrupted and not self._setup.predicts:
                self._time_finalists(executor)
        except KeyboardInterrupt:
            self._interrupted = True

    def _prepare(self, weighted: WeightedWorkload) -> None:
        on_progress = functools.partial(self._report_progress, weighted)
        try:
            context = run.prepare(self._setup, weighted, on_progress, self._until)
        except TunebenchError as error:
            _fail(weighted, error)
            return
        # No trials until the scheduler assigns a round.
        context.budget.trials = context.budget.done
        context.recorder.pause()
        weighted.context = context
        weighted.before = stored_best(context)
        weighted.task_state = TaskState(count=weighted.count, expected_us=weighted.expected_us)
        self._update_task_state(weighted, context, closed=False)

    # -- the search -------------------------------------------------------------------------------

    def _search(self, executor: WorkerExecutor[Task]) -> None:
        """Spend the budget, one round at a time."""
        states = {
            text: weighted.task_state
            for text, weighted in self._workloads.items()
            if weighted.task_state is not None
        }
        total = self._setup.plan.trial_budget
        shared = total // (LEAST_ROUNDS * max(1, len(states)))
        scheduler = BudgetScheduler(
            states, total, round_trials=max(ROUND, min(shared, executor.capacity // 2))
        )
        resumed, began = self._done, time.monotonic()
        while not self._interrupted:
            done, now = self._done, time.monotonic()
            trial_s = (now - began) / (done - resumed) if done > resumed else FIRST_TRIAL_S
            turn = scheduler.next(total - done, min(total, done + self._affordable(now, trial_s)))
            if turn is None:
                return
            if self._until is not None and now >= self._until:
                self._cut_short = True
                return
            text, trials = turn
            self._round(self._workloads[text], executor, trials)

    def _affordable(self, now: float, trial_s: float) -> int:
        """Return how many trials the remaining time allows, at a number of seconds per trial."""
        if self._until is None:
            return self._setup.plan.trial_budget
        return int(max(0.0, self._until - now) / max(trial_s, 1e-3))

    def _round(self, weighted: WeightedWorkload, executor: WorkerExecutor[Task], trials: int) -> None:
        """Run up to `trials` further trials of one workload."""
        assert weighted.context is not None
        context, budget = weighted.context, weighted.context.budget
        if run.takes_hints(context):
            self._start_from_related(weighted, context)
        budget.trials = budget.done + trials
        self._work(weighted, context, lambda: run.search(context, executor))
        # The search ended before its trials were used up: nothing is open any more.
        short = budget.done < budget.trials and not budget.is_overdue
        budget.trials = budget.done
        self._update_task_state(weighted, context, closed=short or bool(weighted.error))

    def _start_from_related(self, weighted: WeightedWorkload, context: RunContext) -> None:
        """Begin with what is fastest for the nearest workloads of the suite, and with their variants."""
        related = self._related(weighted)
        for nearby in related:
            for search in context.searches:
                candidates = [timed for timed in nearby.state.timed if timed.search.key == search.key]
                if candidates:
                    search.first(min(candidates, key=lambda candidate: candidate.search_us).config)
        for search in context.searches:
            best_us = related[0].best_us_of(search.key) if related else math.inf
            # A library takes no time to compile, and no answer may be slower than it.
            if math.isfinite(best_us) and context.variants[search.key].variant.is_predictable:
                search.share = share_of(best_us, related[0].best_us)

    def _related(self, weighted: WeightedWorkload) -> list[RunContext]:
        """Return the runs of the nearest workloads that have a time, the nearest first."""
        near = [
            (distance(weighted.workload, other.workload), other.context)
            for other in self._workloads.values()
            if other is not weighted and other.context is not None and math.isfinite(other.best_us)
        ]
        near = sorted((run for run in near if run[0] <= FARTHEST), key=lambda run: run[0])
        return [context for _, context in near[:RELATED]]

    def _work(self, weighted: WeightedWorkload, context: RunContext, work: Callable[[], None]) -> None:
        """Work on one workload; an error ends this workload, an interruption ends all."""
        # The database is shared, but each workload has its own policy.
        self._setup.store.retry_policy = context.retry_policy
        context.recorder.resume()
        try:
            work()
        except TunebenchError as error:
            _fail(weighted, error)
        context.recorder.pause()
        if context.state.interrupted:
            self._interrupted, self._stopped = True, context.state.stopped

    def _update_task_state(self, weighted: WeightedWorkload, context: RunContext, *, closed: bool) -> None:
        assert weighted.task_state is not None
        weighted.task_state.update(
            trials=context.state.cached + sum(context.state.outcomes.values()),
            best_us=weighted.best_us,
            floor_us=self._floor_us(context, weighted.best_us),
            closed=closed,
        )

    def _floor_us(self, context: RunContext, best_us: float) -> float:
        """Return a lower bound of all open configurations; of predictions, the lowest prediction."""
        if not self._setup.predicts:
            return optimality_proof(context.searches, best_us).floor_us
        return min(
            best_us, *(context.variants[search.key].least_us(search.open) for search in context.searches)
        )

    # -- after the search -------------------------------------------------------------------------

    def _time_finalists(self, executor: WorkerExecutor[Task]) -> None:
        """Time the finalists of workloads that were searched, or whose best is not a finalist yet."""
        device = self._setup.target.device
        with contextlib.ExitStack() as stack:
            caller = None
            if device.kind == "cpu":  # on a GPU, the memory of a workload would be missing for the next
                caller = stack.enter_context(executor.caller(stage_for(device)))
            for weighted in sorted(self._workloads.values(), key=lambda weighted: -weighted.now_us):
                context = weighted.context
                if context is None or weighted.error or not context.state.timed:
                    continue
                best = stored_best(context)
                # Otherwise nothing new was tried, and the best was already timed as a finalist.
                if context.budget.done or best is None or best.purpose != "finalist":
                    time_them = functools.partial(run.time_finalists, context, executor, caller)
                    self._work(weighted, context, time_them)
                if self._interrupted:
                    raise KeyboardInterrupt  # stops the processes of the baselines

    def _report_progress(self, weighted: WeightedWorkload, progress: Progress) -> None:
        self._on_progress(
            dataclasses.replace(
                progress,
                count=len(self._workloads),
                trials_done=self._done,
                trials_total=self._setup.plan.trial_budget,
                model_us=sum(weighted.now_us for weighted in self._workloads.values()),
                predicted=sum(math.isinf(weighted.best_us) for weighted in self._workloads.values()),
            )
        )

    def finish(self) -> TuningSummary:
        """Close all runs, and return the summary."""
        return TuningSummary(
            kind="suite",
            name=self._name,
            device=self._setup.target.device.key,
            database=str(self._setup.store.location),
            how="predicted" if self._setup.predicts else "measured",
            results=with_shares([self._result(weighted) for weighted in self._all]),
            total=self._setup.plan.trial_budget,
            interrupted=self._interrupted,
            stopped=self._stopped,
            cut_short=self._cut_short,
            wall_s=time.monotonic() - self._began,
        )

    def _result(self, weighted: WeightedWorkload) -> WorkloadResult:
        report, context = None, weighted.context
        if context is not None:  # workloads that were stopped together are resumed together
            context.state.interrupted = context.state.interrupted or self._interrupted
            context.state.cut_short = self._cut_short
            report = finish(context)
        return WorkloadResult(
            workload=str(weighted.workload),
            layers=weighted.layers,
            count=weighted.count,
            state=_status(weighted, report),
            reason=weighted.refused or weighted.error,
            trials=context.budget.done if context is not None else 0,
            before_us=_before_us(weighted),
            after_us=report.median_us if report is not None else None,
            report=report,
        )


def _fail(weighted: WeightedWorkload, error: TunebenchError) -> None:
    """End one workload and continue with the others, unless the database or the cluster is lost."""
    if isinstance(error, DatabaseError | ClusterLost):
        raise error
    weighted.error = str(error)


def _status(weighted: WeightedWorkload, report: Report | None) -> WorkloadStatus:
    done = weighted.context is not None and weighted.context.budget.done > 0
    if weighted.refused:
        return "unsuited"
    if weighted.error:
        return "failed"
    if report is not None and report.config is not None:
        return "tuned" if done else "known"
    return "failed" if done else "left"


def _before_us(weighted: WeightedWorkload) -> float | None:
    """Return the time of the best record before the run, in the finalist rounds or as recorded."""
    if weighted.context is None:
        return None
    if weighted.before is None:  # without tuning, the default would run
        variant = weighted.variants[0].variant.key
        config = weighted.context.defaults[variant]
    else:
        variant, config = weighted.before.key.variant, weighted.before.key.config
    for timed in weighted.context.state.timed:
        if (timed.search.key, timed.config) == (variant, config) and (
            timed.rounds or (weighted.before is None and math.isfinite(timed.search_us))
        ):
            return timed.median()[0]
    return time_us(weighted.before.result.outcome) if weighted.before is not None else None
