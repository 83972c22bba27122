"""One run of `tune_suite`: a budget of trials for many problems, given to those where it saves most.

Each problem has a session of its own, open from the beginning to the end, and all share one executor: a round
goes on where the problem's last one stopped, and costs no start of workers.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable

from tunebench.db.record import Record
from tunebench.db.store import Store
from tunebench.errors import ClusterLost, DatabaseError, TunebenchError
from tunebench.executor import Executor
from tunebench.outcome import Measured, time_us
from tunebench.search.loop import optimality_proof
from tunebench.task import Task
from tunebench.tuning.budget_scheduler import ROUND, BudgetScheduler, TaskState
from tunebench.tuning.candidate import Target
from tunebench.tuning.finalist import settle
from tunebench.tuning.plan import Plan
from tunebench.tuning.report import Progress, Report
from tunebench.tuning.session import Session
from tunebench.tuning.suite import Member, Suite
from tunebench.tuning.workload_result import State, SuiteProgress, SuiteReport, SuiteWatcher, WorkloadResult

__all__ = ["SuiteSession"]

LEAST_ROUNDS = 4
"""Rounds that each problem could have if all had as many: rounds that were longer would be shares again."""


class SuiteSession:
    """One run of `tune_suite`.

    Args:
        suite: The problems, which have been looked into.
        target: Where.
        plan: How; `Plan.trials` and `Plan.minutes` are for all together.
        store: Where records go.
        watcher: Is told of the progress.
    """

    def __init__(self, suite: Suite, target: Target, plan: Plan, store: Store, watcher: SuiteWatcher) -> None:
        self.suite, self.target, self.plan, self.store, self.watcher = suite, target, plan, store, watcher
        self.members = {str(member.problem): member for member in suite.members if member.found}
        self.began = time.monotonic()
        self.until = self.began + 60 * plan.minutes if plan.minutes is not None else None
        self.interrupted = self.cut_short = False
        self.stopped: str | None = None

    @property
    def _predicts(self) -> bool:
        return self.target.runner == "offline"

    @property
    def done(self) -> int:
        """Trials that were made, by interrupted runs that this one takes up as well."""
        return sum(one.session.budget.done for one in self.members.values() if one.session is not None)

    def run(self, executor: Executor[Task]) -> None:
        """Search and time finalists; Ctrl-C ends it and keeps everything, so does the loss of a cluster."""
        try:
            for member in self.members.values():
                self._begin(member)
            self._search(executor)
            if not self.interrupted and not self._predicts:
                self._time_finalists(executor)
        except KeyboardInterrupt:
            self.interrupted = True

    def _begin(self, member: Member) -> None:
        """Begin a run for a problem, which takes up what the database knows of it."""
        try:
            session = Session(
                member.problem,
                self.target,
                self.plan,
                self.store,
                member.found,
                lambda progress: self._tell(member, progress),
            )
        except TunebenchError as error:
            _fail(member, error)
            return
        session.budget.trials, session.budget.until = session.budget.done, self.until
        session.logbook.leave()
        member.session = session
        member.before = self._served(session)
        member.account = TaskState(count=member.count, expected_us=member.expected_us)
        self._settle(member, session, closed=False)

    # -- the search -------------------------------------------------------------------------------

    def _search(self, executor: Executor[Task]) -> None:
        """Give out the budget, a round at a time."""
        accounts = {text: one.account for text, one in self.members.items() if one.account is not None}
        shared = self.plan.trials // (LEAST_ROUNDS * max(1, len(accounts)))
        allotment = BudgetScheduler(
            accounts, self.plan.trials, round_trials=max(ROUND, min(shared, executor.capacity // 2))
        )
        while not self.interrupted:
            turn = allotment.next(self.plan.trials - self.done)
            if turn is None:
                return
            if self.until is not None and time.monotonic() >= self.until:
                self.cut_short = True
                return
            text, trials = turn
            self._turn(self.members[text], executor, trials)

    def _turn(self, member: Member, executor: Executor[Task], trials: int) -> None:
        """Let one problem make so many trials, or as many as it has left."""
        session = member.session
        assert session is not None
        budget = session.budget
        budget.trials = budget.done + trials
        self._take_turn(member, session, lambda: session.search(executor))
        short = budget.done < budget.trials and not budget.is_overdue
        budget.trials = budget.done
        self._settle(member, session, closed=short or bool(member.error))

    def _take_turn(self, member: Member, session: Session, work: Callable[[], None]) -> None:
        """Do some of a problem's work; an error ends it for this problem, an interruption for all."""
        self.store.retry_policy = session.retry_policy
        session.logbook.come_back()
        try:
            work()
        except TunebenchError as error:
            _fail(member, error)
        session.logbook.leave()
        if session.interrupted:
            self.interrupted, self.stopped = True, session.stopped

    def _settle(self, member: Member, session: Session, *, closed: bool) -> None:
        """Tell the account of a problem where that stands."""
        assert member.account is not None
        member.account.tell(
            trials=session.cached + sum(session.outcomes.values()),
            best_us=member.best_us,
            floor_us=self._floor_us(session, member.best_us),
            closed=closed,
        )

    def _floor_us(self, session: Session, best_us: float) -> float:
        """Return a time that nothing open can beat; where times are predicted, it is predicted, too."""
        if not self._predicts:
            return optimality_proof(session.searches, best_us).floor_us
        return min(best_us, *(session.candidates[one.key].least_us(one.open) for one in session.searches))

    # -- the finals -------------------------------------------------------------------------------

    def _time_finalists(self, executor: Executor[Task]) -> None:
        """Time the best again: of what was searched, and of what has not been through finals yet."""
        for member in sorted(self.members.values(), key=lambda one: -one.now_us):
            session = member.session
            if session is None or member.error or not session.timed:
                continue
            served = self._served(session)
            if session.budget.done or served is None or served.purpose != "finalist":
                self._take_turn(member, session, functools.partial(session.time_finalists, executor))
            if self.interrupted:
                return

    def _served(self, session: Session) -> Record | None:
        """Return what a lookup finds of a problem now, of what this run would find again."""
        cache = self.plan.protocol.cache
        for entry in self.store.best(str(session.problem), self.target.device.key):
            candidate, outcome = session.candidates.get(entry.key.variant), entry.result.outcome
            if candidate is None or candidate.table.row(entry.key.config) is None:
                continue
            stands = session.revisions[entry.key.variant](entry.key.config) == entry.key.revision
            if stands and (outcome.cache == cache if isinstance(outcome, Measured) else self._predicts):
                return entry
        return None

    # -- what is told -----------------------------------------------------------------------------

    def _tell(self, member: Member, progress: Progress) -> None:
        self.watcher(
            SuiteProgress(
                workload=str(member.problem),
                done=self.done,
                total=self.plan.trials,
                model_us=sum(one.now_us for one in self.members.values()),
                predicted=sum(math.isinf(one.best_us) for one in self.members.values()),
                progress=progress,
            )
        )

    def report(self) -> SuiteReport:
        """Close the books."""
        parts = [self._part(member) for member in self.suite.members]
        total_us = sum(part.time_us for part in parts)
        shared = [
            dataclasses.replace(part, share=part.time_us / total_us) if part.after_us is not None else part
            for part in parts
        ]
        return SuiteReport(
            suite=self.suite.name,
            device=self.target.device.key,
            database=str(self.store.location),
            how="predicted" if self._predicts else "measured",
            parts=tuple(sorted(shared, key=lambda part: -part.time_us)),
            total=self.plan.trials,
            interrupted=self.interrupted,
            stopped=self.stopped,
            cut_short=self.cut_short,
            wall_s=time.monotonic() - self.began,
        )

    def _part(self, member: Member) -> WorkloadResult:
        report = self._close(member)
        done = member.session.budget.done if member.session is not None else 0
        return WorkloadResult(
            workload=str(member.problem),
            layers=member.layers,
            count=member.count,
            state=_state(member, done, report),
            reason=member.refused or member.error,
            trials=done,
            before_us=_before_us(member),
            after_us=self._after_us(member),
            report=report,
        )

    def _after_us(self, member: Member) -> float | None:
        """Return what the best took in the finals, or what is served where there were none."""
        session = member.session
        if session is None:
            return None
        settled = settle(session.finals.finalists) if session.finals is not None else None
        served = self._served(session)
        if settled is not None:
            return settled.best.median()[0]
        return time_us(served.result.outcome) if served is not None else None

    def _close(self, member: Member) -> Report | None:
        """Close the books of a problem: what was not finished together is taken up together."""
        session = member.session
        if session is None:
            return None
        session.interrupted = session.interrupted or self.interrupted
        session.cut_short = self.cut_short
        return session.report(member.skipped)


def _fail(member: Member, error: TunebenchError) -> None:
    """Let a problem go, and the others on; a database or a cluster that is gone is no matter of one."""
    if isinstance(error, DatabaseError | ClusterLost):
        raise error
    member.error = str(error)


def _state(member: Member, done: int, report: Report | None) -> State:
    if member.refused:
        return "unsuited"
    if member.error:
        return "failed"
    if report is not None and report.config is not None:
        return "tuned" if done else "known"
    return "failed" if done else "left"


def _before_us(member: Member) -> float | None:
    """Return what a problem took: as what was served then does in the finals, or did when it was timed."""
    if member.session is None:
        return None
    if member.before is None:  # what one would ship untuned
        variant = member.found[0].variant.key
        config = member.session.defaults[variant]
    else:
        variant, config = member.before.key.variant, member.before.key.config
    timed = [one for one in member.session.timed if (one.search.key, one.config) == (variant, config)]
    for one in timed:
        if one.again or (member.before is None and math.isfinite(one.search_us)):
            return one.median()[0]
    return time_us(member.before.result.outcome) if member.before is not None else None
