"""Search history of a replayed search, in which a recorded tuning space replaces the device."""

from __future__ import annotations

from datetime import UTC, datetime

from tunebench._version import __version__
from tunebench.db.record import Record, TrialKey, Verdict
from tunebench.db.recorded_space import workload_of
from tunebench.device import Device
from tunebench.explanation.roofline import Roofline, roofline_of_work
from tunebench.kernels.recorded_kernel import RecordedKernel, find_recorded_kernel
from tunebench.outcome import Result
from tunebench.report.best_kernel import BestKernel, recorded_roofline
from tunebench.report.history import SearchHistory, record_us
from tunebench.tuning.proof import BoundedSpace, optimality_gaps
from tunebench.tuning.replay import ReplayResult, Space
from tunebench.workloads import parse

__all__ = ["replay_history"]


def replay_history(space: Space, done: ReplayResult) -> SearchHistory:
    """Return the history of a replayed search in the form of a search on its recorded device.

    Args:
        space: The recorded tuning space.
        done: The replayed search.
    """
    recording, device = space.recording, space.device
    key = device.key if device is not None else recording.device or "unknown"
    workload = workload_of(recording.kernel or "unknown", recording.problem)
    now = datetime.now(UTC)
    records = tuple(
        Record(
            id=number,
            key=TrialKey(
                device=key,
                workload=workload,
                variant=f"recorded/{recording.kernel or 'unknown'}",
                revision="recorded",
                config=trial.config,
            ),
            purpose="search",
            result=Result(outcome=trial.outcome),
            bound_us=trial.bound_us or None,
            seed=done.seed,
            run_id=None,
            recorded_at=now,
            stale=False,
            verdict=Verdict(),
        )
        for number, trial in enumerate(done.trials, start=1)
    )
    return SearchHistory(
        workload=workload,
        device=key,
        records=records,
        versions={"tunebench": __version__},
        described=device,
        optimum_us=recording.optimum_us,
        kernel=_of_replay(space, records),
        goal=done.goal,
    )


def _of_replay(space: Space, records: tuple[Record, ...]) -> BestKernel:
    missing = space.missing or "the recording has neither source nor resources"
    if space.bounds is None or space.device is None or not records:
        return BestKernel(missing=missing)
    return BestKernel(
        roofline=_roofline(space, space.device),
        gaps=optimality_gaps(
            records,
            {records[0].key.variant: BoundedSpace(table=space.recording.table, bounds_us=space.bounds.us)},
            min(records, key=record_us),
            "warm",
        ),
        missing=missing,
    )


def _roofline(space: Space, device: Device) -> Roofline | None:
    """Return the roofline of a recorded kernel, or of the workload of an exported variant."""
    recording = space.recording
    if recording.workload and space.costs is not None:
        workload = parse(recording.workload)
        return roofline_of_work(
            flops=workload.flops(),
            traffic=workload.traffic(),
            dtype=workload.dtype,
            costs=space.costs,
            device=device,
        )
    values = {parameter.name: parameter.values for parameter in recording.table.space.parameters}
    kernel = find_recorded_kernel(recording.kernel, values, recording.problem)
    assert isinstance(kernel, RecordedKernel)
    return recorded_roofline(kernel, recording.table.columns, device)
