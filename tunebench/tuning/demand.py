"""`tune_recorded`: tuning what programs were seen to run, the most worth it first.

What a problem is worth is the time that was spent on it, less what no configuration can do without: its bound
times its calls.
"""

from __future__ import annotations

import dataclasses
import heapq
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tunebench import kernels
from tunebench.db.record import Demand, Record
from tunebench.db.store import Store, open_store
from tunebench.device import Device
from tunebench.errors import InputError, TunebenchError
from tunebench.tuning import candidate
from tunebench.tuning.candidate import Target
from tunebench.tuning.plan import Plan
from tunebench.tuning.report import Progress, Report, Watcher
from tunebench.workload import Workload
from tunebench.workloads import parse

__all__ = ["DemandReport", "Item", "Turn", "run"]

State = Literal["tuned", "known", "unsuited", "left"]
"""What became of a problem: tuned now; tuned before; nothing of ours runs it; not come to."""

Tuner = Callable[[Workload, Plan, Watcher], Report]
"""Tunes one problem."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Which problem is being tuned.

    Attributes:
        place: Its number, from 1.
        total: How many there are to tune at most.
        workload: Canonical text.
    """

    place: int
    total: int
    workload: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One problem that was recorded.

    Attributes:
        workload: Canonical text.
        calls: How often programs ran it.
        time_us: How long that took, all calls together.
        state: What became of it.
        reason: Why it is unsuited; empty otherwise.
        report: What its run found, if it was tuned now.
    """

    workload: str
    calls: int
    time_us: float
    state: State
    reason: str = ""
    report: Report | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DemandReport:
    """What was recorded for a device, and what became of it.

    Attributes:
        device: Key of the device.
        database: Where the records are.
        items: The problems: those tuned now in the order in which they were, then the most time first.
        interrupted: Whether it was stopped by hand.
        wall_s: How long it took.
    """

    device: str
    database: str
    items: tuple[Item, ...]
    interrupted: bool
    wall_s: float

    def of(self, state: State) -> tuple[Item, ...]:
        """Return the problems of which a state became."""
        return tuple(item for item in self.items if item.state == state)

    @property
    def time_us(self) -> float:
        """Time that was recorded in all."""
        return sum(item.time_us for item in self.items)

    @property
    def covered(self) -> float:
        """Share of the recorded time that went into problems that are tuned now or were before."""
        done_us = sum(item.time_us for item in (*self.of("tuned"), *self.of("known")))
        return done_us / self.time_us if self.time_us else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        items = [
            {
                **{name: getattr(item, name) for name in ("workload", "calls", "time_us", "state", "reason")},
                "report": item.report.to_json() if item.report is not None else None,
            }
            for item in self.items
        ]
        return {
            "device": self.device,
            "database": self.database,
            "time_us": self.time_us,
            "covered": self.covered,
            "items": items,
            "interrupted": self.interrupted,
            "wall_s": self.wall_s,
        }


def run(
    tuner: Tuner,
    *,
    device: Device | str | None,
    db: str | Path | None,
    plan: Plan,
    again: bool,
    watcher: Callable[[Turn, Progress], None],
) -> DemandReport:
    """Tune what was recorded for a device (see `tunebench.tune_recorded`)."""
    began = time.monotonic()
    if plan.variants or plan.variant_files:
        raise InputError("what was recorded is of many operators: variants cannot be chosen for all of them")
    if plan.cluster is not None:
        raise InputError("what was recorded is tuned on this machine: leave the cluster out")
    target = candidate.target(device, offline=plan.offline)
    with open_store(db) as store:
        queue = _Queue(store, target, again=again)
        place = str(store.location)
    tuned: list[Item] = []
    interrupted = False
    try:
        for demand, problem in queue:
            left = None if plan.minutes is None else plan.minutes - (time.monotonic() - began) / 60
            if left is not None and left <= 0:
                break
            turn = Turn(place=len(tuned) + 1, total=len(tuned) + len(queue), workload=demand.workload)
            item = _tune(tuner, demand, problem, dataclasses.replace(plan, minutes=left), turn, watcher)
            tuned.append(item)
            queue.drop_first()
            if item.report is not None and item.report.interrupted:
                interrupted = True
                break
    except KeyboardInterrupt:
        interrupted = True
    return DemandReport(
        device=target.device.key,
        database=place,
        items=(*tuned, *queue.rest()),
        interrupted=interrupted,
        wall_s=time.monotonic() - began,
    )


def _tune(
    tuner: Tuner,
    demand: Demand,
    problem: Workload,
    plan: Plan,
    turn: Turn,
    watcher: Callable[[Turn, Progress], None],
) -> Item:
    report = tuner(problem, plan, lambda progress: watcher(turn, progress))
    if report.config is not None:
        return _item(demand, "tuned", report=report)
    state: State = "left" if report.interrupted or plan.minutes is not None else "unsuited"
    return _item(demand, state, "no configuration succeeded" if state == "unsuited" else "", report)


def _item(demand: Demand, state: State, reason: str = "", report: Report | None = None) -> Item:
    return Item(
        workload=demand.workload,
        calls=demand.calls,
        time_us=demand.time_us,
        state=state,
        reason=reason,
        report=report,
    )


class _Queue:
    """Recorded problems by what they are worth, the most first.

    To tell what one is worth, its spaces must be laid out. Since it is never worth more than its time, that
    is done for those alone that are next by their time.
    """

    def __init__(self, store: Store, target: Target, *, again: bool) -> None:
        self._target = target
        self._settled: list[Item] = []
        self._heap: list[tuple[float, int, bool]] = []
        self._demands = store.demand(target.device.key)
        self._problems: dict[int, Workload] = {}
        if not self._demands:
            raise InputError(
                f"nothing was recorded for {target.device.key} in database {store.location}: run a program "
                "under `with tunebench.torch.profile():` first"
            )
        finished = store.finished(target.device.key)
        for number, demand in enumerate(self._demands):
            try:
                problem = self._problems[number] = parse(demand.workload)
            except TunebenchError as error:  # of an operator that is not installed here
                self._settled.append(_item(demand, "unsuited", str(error)))
                continue
            if not again and demand.workload in finished and self._is_current(store, problem):
                self._settled.append(_item(demand, "known"))
            else:
                heapq.heappush(self._heap, (-demand.time_us, number, False))

    def _is_current(self, store: Store, problem: Workload) -> bool:
        """Tell whether the best of a problem comes from finalists, and from today's source."""
        best = store.best(str(problem), self._target.device.key, limit=1)
        predicts = self._target.runner == "offline"
        return bool(best) and (best[0].purpose == "finalist" or predicts) and _stands(best[0], problem)

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[tuple[Demand, Workload]]:
        """Hand out the first, over and over: it stays until it is dropped, lest Ctrl-C should lose it."""
        while self._heap:
            _, number, is_worth = self._heap[0]
            demand, problem = self._demands[number], self._problems[number]
            if is_worth:
                yield demand, problem
                continue
            try:
                heapq.heapreplace(self._heap, (-self._worth_us(demand, problem), number, True))
            except InputError as error:
                self._settled.append(_item(demand, "unsuited", str(error)))
                self.drop_first()

    def drop_first(self) -> None:
        """Take the first out: it is done with."""
        heapq.heappop(self._heap)

    def _worth_us(self, demand: Demand, problem: Workload) -> float:
        """Return how much of the time could be saved at most.

        Raises:
            InputError: if no variant can do the problem.
        """
        # A program finds some of its data in caches, and how much nobody knows.
        found, _ = candidate.find(problem, self._target.device, cache="warm")
        floor_us = min(float(one.bounds.us.min()) for one in found)
        return max(0.0, demand.time_us - demand.calls * floor_us)

    def rest(self) -> list[Item]:
        """Return what was not dropped, the most time first."""
        left = [_item(self._demands[number], "left") for _, number, _ in self._heap]
        return sorted((*self._settled, *left), key=lambda item: -item.time_us)


def _stands(entry: Record, problem: Workload) -> bool:
    try:
        variant = kernels.variant(entry.key.variant)
        variant.space.ordinals(entry.key.config)
        return not entry.stale and variant.revision(problem, entry.key.config) == entry.key.revision
    except TunebenchError:
        return False
