"""The workloads of a recorded profile, ordered by the time that tuning could save.

The possible saving of a workload is its recorded time minus its calls times its lower bound.
"""

from __future__ import annotations

import dataclasses
import heapq
import time
from collections.abc import Iterator

from tunebench import kernels
from tunebench.db.record import Demand, Record
from tunebench.db.store import Store
from tunebench.errors import InputError, TunebenchError
from tunebench.tuning.run import StartExecutor, deadline, tune_one
from tunebench.tuning.run_context import TuningSetup
from tunebench.tuning.summary import TuningSummary, WorkloadResult, WorkloadStatus
from tunebench.tuning.tunable import find_variants
from tunebench.tuning.weighted_workload import WeightedWorkload
from tunebench.tuning.workload_report import Progress, ProgressCallback, Report
from tunebench.workload import Workload
from tunebench.workloads import parse

__all__ = ["tune_profile"]


def tune_profile(
    setup: TuningSetup, start: StartExecutor, on_progress: ProgressCallback, *, retune: bool
) -> TuningSummary:
    """Tune the workloads of the profile of a device (see `tunebench.tune_from_profile`)."""
    began, until = time.monotonic(), deadline(setup.plan)
    queue = _ProfileQueue(setup, retune=retune)
    results: list[WorkloadResult] = []
    interrupted = False

    def number(progress: Progress) -> None:
        count = len(results) + len(queue)
        on_progress(dataclasses.replace(progress, index=len(results) + 1, count=count))

    try:
        for weighted in queue.workloads(until):
            report = tune_one(setup, weighted, start, number, until)
            results.append(queue.pop(report, limited=until is not None))
            interrupted = report.interrupted
            if interrupted:
                break
    except KeyboardInterrupt:
        interrupted = True
    return TuningSummary(
        kind="profile",
        device=setup.target.device.key,
        database=str(setup.store.location),
        results=(*results, *queue.rest()),
        interrupted=interrupted,
        wall_s=time.monotonic() - began,
    )


def _result(
    demand: Demand, state: WorkloadStatus, reason: str = "", report: Report | None = None
) -> WorkloadResult:
    return WorkloadResult(
        workload=demand.workload,
        count=demand.calls,
        recorded_us=demand.time_us,
        state=state,
        reason=reason,
        after_us=report.median_us if report is not None else None,
        report=report,
    )


class _ProfileQueue:
    """Workloads of a profile, the greatest possible saving first.

    The saving needs the bounds of all configurations. Because it never exceeds the recorded time, bounds are
    computed only for workloads that are next by their recorded time.

    Raises:
        InputError: if the profile of the device is empty.
    """

    def __init__(self, setup: TuningSetup, *, retune: bool) -> None:
        self._setup, store, device = setup, setup.store, setup.target.device.key
        self._settled: list[WorkloadResult] = []
        self._heap: list[tuple[float, int, bool]] = []
        self._demands = store.demand(device)
        self._workloads: dict[int, WeightedWorkload] = {}
        if not self._demands:
            raise InputError(
                f"nothing was recorded for {device} in database {store.location}: run a program "
                "under `with tunebench.torch.profile():` first"
            )
        finished = store.finished(device)
        for number, demand in enumerate(self._demands):
            try:
                workload = parse(demand.workload)
            except TunebenchError as error:  # the operator is not installed here
                self._settled.append(_result(demand, "unsuited", str(error)))
                continue
            self._workloads[number] = WeightedWorkload(workload=workload, count=demand.calls)
            if not retune and demand.workload in finished and self._is_current(store, workload):
                self._settled.append(_result(demand, "known"))
            else:
                heapq.heappush(self._heap, (-demand.time_us, number, False))

    def _is_current(self, store: Store, workload: Workload) -> bool:
        """Return whether the best record is a finalist of the current source."""
        best = store.best(str(workload), self._setup.target.device.key, limit=1)
        final = bool(best) and (best[0].purpose == "finalist" or self._setup.predicts)
        return final and _current(best[0], workload)

    def __len__(self) -> int:
        return len(self._heap)

    def workloads(self, until: float | None) -> Iterator[WeightedWorkload]:
        """Yield the first workload repeatedly, until `pop` removes it or the time limit is reached.

        It stays in the queue while it is tuned, so that Ctrl-C cannot lose it.
        """
        while self._heap and (until is None or time.monotonic() < until):
            _, number, is_saving = self._heap[0]
            demand, weighted = self._demands[number], self._workloads[number]
            if is_saving:
                weighted.find_variants(self._setup.target, self._setup.plan, ())
                yield weighted
                continue
            try:
                # The recorded time is an upper bound of the saving: once the front holds a saving, no other
                # workload can save more.
                saving_us = self._saving_us(demand, weighted.workload)
                heapq.heapreplace(self._heap, (-saving_us, number, True))
            except InputError as error:
                self._settled.append(_result(demand, "unsuited", str(error)))
                heapq.heappop(self._heap)

    def pop(self, report: Report, *, limited: bool) -> WorkloadResult:
        """Remove the first workload, and return its result.

        Args:
            report: The report of its run.
            limited: Whether the run has a time limit, which may be why no configuration succeeded.
        """
        demand = self._demands[heapq.heappop(self._heap)[1]]
        if report.config is not None:
            return _result(demand, "tuned", report=report)
        if report.interrupted or limited:
            return _result(demand, "left", report=report)
        return _result(demand, "unsuited", "no configuration succeeded", report)

    def _saving_us(self, demand: Demand, workload: Workload) -> float:
        """Return the possible saving, in microseconds.

        Raises:
            InputError: if no variant supports the workload.
        """
        # Some data of a program is in caches, an unknown part: assume all of it, for a sound bound.
        tunables, _ = find_variants(workload, self._setup.target.device, cache="warm")
        floor_us = min(float(tunable.bounds.us.min()) for tunable in tunables)
        return max(0.0, demand.time_us - demand.calls * floor_us)

    def rest(self) -> list[WorkloadResult]:
        """Return the workloads that were not tuned, the most recorded time first."""
        untuned = [_result(self._demands[number], "left") for _, number, _ in self._heap]
        return sorted((*self._settled, *untuned), key=lambda result: -result.recorded_us)


def _current(entry: Record, workload: Workload) -> bool:
    """Return whether a record is of the current source and space of its variant."""
    try:
        variant = kernels.variant(entry.key.variant)
        variant.space.ordinals(entry.key.config)
        return not entry.stale and variant.revision(workload, entry.key.config) == entry.key.revision
    except TunebenchError:
        return False
