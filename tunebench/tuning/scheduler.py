"""The division of one budget of trials between the workloads of a suite, which share one executor.

`SharedBudget` prepares, searches and finishes each workload by the functions of `tunebench.tuning.run`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence

from tunebench.errors import ClusterLost, DatabaseError, TunebenchError
from tunebench.executor import WorkerExecutor
from tunebench.outcome import time_us
from tunebench.search.loop import optimality_proof
from tunebench.task import Task
from tunebench.tuning import run
from tunebench.tuning.budget_scheduler import ROUND, BudgetScheduler, TaskState
from tunebench.tuning.report import Progress, ProgressCallback, Report
from tunebench.tuning.run_context import RunContext, TuningSetup
from tunebench.tuning.run_report import finish, stored_best
from tunebench.tuning.summary import TuningSummary, WorkloadResult, WorkloadStatus, with_shares
from tunebench.tuning.weighted_workload import WeightedWorkload

__all__ = ["SharedBudget"]

LEAST_ROUNDS = 4
"""Rounds that each workload could get if all got equally many; a limit on the length of a round."""


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
        self._workloads = {str(one.workload): one for one in workloads if one.variants}
        self._began = time.monotonic()
        minutes = setup.plan.minutes
        self._until = self._began + 60 * minutes if minutes is not None else None
        self._interrupted = self._cut_short = False
        self._stopped: str | None = None

    @property
    def _done(self) -> int:
        return sum(one.context.budget.done for one in self._workloads.values() if one.context is not None)

    def run(self, executor: WorkerExecutor[Task]) -> None:
        """Search and time finalists; Ctrl-C and a lost cluster end the run and keep all results."""
        try:
            for one in self._workloads.values():
                self._prepare(one)
            self._search(executor)
            if not self._interrupted and not self._setup.predicts:
                self._time_finalists(executor)
        except KeyboardInterrupt:
            self._interrupted = True

    def _prepare(self, one: WeightedWorkload) -> None:
        on_progress = functools.partial(self._report_progress, one)
        try:
            context = run.prepare(self._setup, one, on_progress, self._until)
        except TunebenchError as error:
            _fail(one, error)
            return
        # No trials until the scheduler assigns a round.
        context.budget.trials = context.budget.done
        context.recorder.pause()
        one.context = context
        one.before = stored_best(context)
        one.task_state = TaskState(count=one.count, expected_us=one.expected_us)
        self._update_task_state(one, context, closed=False)

    # -- the search -------------------------------------------------------------------------------

    def _search(self, executor: WorkerExecutor[Task]) -> None:
        """Spend the budget, one round at a time."""
        states = {text: one.task_state for text, one in self._workloads.items() if one.task_state is not None}
        total = self._setup.plan.trials
        shared = total // (LEAST_ROUNDS * max(1, len(states)))
        scheduler = BudgetScheduler(
            states, total, round_trials=max(ROUND, min(shared, executor.capacity // 2))
        )
        while not self._interrupted:
            turn = scheduler.next(total - self._done)
            if turn is None:
                return
            if self._until is not None and time.monotonic() >= self._until:
                self._cut_short = True
                return
            text, trials = turn
            self._round(self._workloads[text], executor, trials)

    def _round(self, one: WeightedWorkload, executor: WorkerExecutor[Task], trials: int) -> None:
        """Run up to `trials` further trials of one workload."""
        assert one.context is not None
        context, budget = one.context, one.context.budget
        budget.trials = budget.done + trials
        self._work(one, context, lambda: run.search(context, executor))
        # The search ended before its trials were used up: nothing is open any more.
        short = budget.done < budget.trials and not budget.is_overdue
        budget.trials = budget.done
        self._update_task_state(one, context, closed=short or bool(one.error))

    def _work(self, one: WeightedWorkload, context: RunContext, work: Callable[[], None]) -> None:
        """Work on one workload; an error ends this workload, an interruption ends all."""
        self._setup.store.retry_policy = context.retry_policy
        context.recorder.resume()
        try:
            work()
        except TunebenchError as error:
            _fail(one, error)
        context.recorder.pause()
        if context.state.interrupted:
            self._interrupted, self._stopped = True, context.state.stopped

    def _update_task_state(self, one: WeightedWorkload, context: RunContext, *, closed: bool) -> None:
        assert one.task_state is not None
        one.task_state.update(
            trials=context.state.cached + sum(context.state.outcomes.values()),
            best_us=one.best_us,
            floor_us=self._floor_us(context, one.best_us),
            closed=closed,
        )

    def _floor_us(self, context: RunContext, best_us: float) -> float:
        """Return a lower bound of all open configurations; of predictions, the lowest prediction."""
        if not self._setup.predicts:
            return optimality_proof(context.searches, best_us).floor_us
        return min(best_us, *(context.variants[one.key].least_us(one.open) for one in context.searches))

    # -- after the search -------------------------------------------------------------------------

    def _time_finalists(self, executor: WorkerExecutor[Task]) -> None:
        """Time the finalists of workloads that were searched, or whose best is not a finalist yet."""
        for one in sorted(self._workloads.values(), key=lambda one: -one.now_us):
            context = one.context
            if context is None or one.error or not context.state.timed:
                continue
            best = stored_best(context)
            if context.budget.done or best is None or best.purpose != "finalist":
                self._work(one, context, functools.partial(run.time_finalists, context, executor))
            if self._interrupted:
                return

    def _report_progress(self, one: WeightedWorkload, progress: Progress) -> None:
        self._on_progress(
            dataclasses.replace(
                progress,
                count=len(self._workloads),
                trials_done=self._done,
                trials_total=self._setup.plan.trials,
                model_us=sum(one.now_us for one in self._workloads.values()),
                predicted=sum(math.isinf(one.best_us) for one in self._workloads.values()),
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
            results=with_shares([self._result(one) for one in self._all]),
            total=self._setup.plan.trials,
            interrupted=self._interrupted,
            stopped=self._stopped,
            cut_short=self._cut_short,
            wall_s=time.monotonic() - self._began,
        )

    def _result(self, one: WeightedWorkload) -> WorkloadResult:
        report, context = None, one.context
        if context is not None:  # workloads that were stopped together are resumed together
            context.state.interrupted = context.state.interrupted or self._interrupted
            context.state.cut_short = self._cut_short
            report = finish(context)
        return WorkloadResult(
            workload=str(one.workload),
            layers=one.layers,
            count=one.count,
            state=_status(one, report),
            reason=one.refused or one.error,
            trials=context.budget.done if context is not None else 0,
            before_us=_before_us(one),
            after_us=report.median_us if report is not None else None,
            report=report,
        )


def _fail(one: WeightedWorkload, error: TunebenchError) -> None:
    """End one workload and continue with the others, unless the database or the cluster is lost."""
    if isinstance(error, DatabaseError | ClusterLost):
        raise error
    one.error = str(error)


def _status(one: WeightedWorkload, report: Report | None) -> WorkloadStatus:
    done = one.context is not None and one.context.budget.done > 0
    if one.refused:
        return "unsuited"
    if one.error:
        return "failed"
    if report is not None and report.config is not None:
        return "tuned" if done else "known"
    return "failed" if done else "left"


def _before_us(one: WeightedWorkload) -> float | None:
    """Return the time of the best record before the run, in the finalist rounds or as recorded."""
    if one.context is None:
        return None
    if one.before is None:  # without tuning, the default would run
        variant = one.variants[0].variant.key
        config = one.context.defaults[variant]
    else:
        variant, config = one.before.key.variant, one.before.key.config
    for timed in one.context.state.timed:
        if (timed.search.key, timed.config) == (variant, config) and (
            timed.rounds or (one.before is None and math.isfinite(timed.search_us))
        ):
            return timed.median()[0]
    return time_us(one.before.result.outcome) if one.before is not None else None
