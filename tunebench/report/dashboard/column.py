"""Columns of the lists: header, order and alignment of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tunebench.report.dashboard.catalogue import Line
from tunebench.report.dashboard.listing import Column
from tunebench.report.dashboard.plan_file import PlanEntry
from tunebench.report.dashboard.prediction import ComparedPrediction

__all__ = ["PLANS", "PREDICTIONS", "STALE", "TRIALS", "WORKLOADS", "StaleSpace", "line_tie"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleSpace:
    """Number of stale trials of a variant for a workload on a device."""

    line: Line
    variant: str
    trials: int


def line_tie(line: Line) -> str:
    """Return a text that differs between lines."""
    return f"{line.entry.workload}\n{line.device.key}"


WORKLOADS: tuple[Column[Line], ...] = (
    Column(name="workload", title="Workload", key=lambda line: line.entry.workload),
    Column(name="device", title="Device", key=lambda line: line.device.key),
    Column(name="time", title="Best time", key=lambda line: line.time_us, right=True),
    Column(
        name="how",
        title="How",
        key=lambda line: line.how,
        minor=True,
        hint="Measured on the device, predicted without one, measured and not verified (imported), or failed",
    ),
    Column(
        name="bound",
        title="Lowest bound",
        key=lambda line: line.bound_us,
        right=True,
        minor=True,
        hint="Lower bound of all configurations of the search, else the lowest one of those that were tried",
    ),
    Column(
        name="gap",
        title="Best / bound",
        key=lambda line: line.bound_ratio,
        right=True,
        hint="1 means that no configuration can be faster",
    ),
    Column(
        name="default",
        title="vs default",
        key=lambda line: line.default_ratio,
        right=True,
        minor=True,
        hint="Speedup of the best over the default configuration (higher is better)",
    ),
    Column(
        name="library",
        title="vs library",
        key=lambda line: line.library[1].ratio if line.library else None,
        right=True,
        hint="Speedup of the best over the fastest library (higher is better)",
    ),
    Column(name="trials", title="Trials", key=lambda line: line.entry.trials, right=True, minor=True),
    Column(name="stale", title="Stale", key=lambda line: line.entry.stale, right=True, minor=True),
    Column(
        name="newest",
        title="Newest",
        key=lambda line: line.entry.newest_at.timestamp() if line.entry.newest_at else None,
        minor=True,
    ),
)

STALE: tuple[Column[StaleSpace], ...] = (
    Column(name="trials", title="Stale trials", key=lambda row: row.trials, right=True),
    Column(name="workload", title="Workload", key=lambda row: row.line.entry.workload),
    Column(name="device", title="Device", key=lambda row: row.line.device.key),
    Column(name="variant", title="Variant", key=lambda row: row.variant, minor=True),
    Column(
        name="served",
        title="Answer of lookup",
        key=lambda row: ("stale" if row.line.best.stale else "current") if row.line.best else None,
        hint="Whether lookup returns a stale result, because there is no current one",
    ),
    Column(name="", title="Measure again", minor=True),
)

PREDICTIONS: tuple[Column[ComparedPrediction], ...] = (
    Column(name="workload", title="Workload", key=lambda row: row.line.entry.workload),
    Column(name="device", title="Device", key=lambda row: row.line.device.key),
    Column(name="method", title="Prediction", key=lambda row: row.method, minor=True),
    Column(name="predicted", title="Predicted", key=lambda row: row.predicted_us, right=True),
    Column(name="measured", title="Measured", key=lambda row: row.measured_us, right=True),
    Column(name="what", title="Of", key=lambda row: row.measured, minor=True),
    Column(name="ratio", title="Predicted / measured", key=lambda row: row.ratio, right=True),
    Column(
        name="error",
        title="Error",
        key=lambda row: row.error,
        right=True,
        minor=True,
        hint="|predicted / measured - 1|",
    ),
)

PLANS: tuple[Column[PlanEntry], ...] = (
    Column(name="plan", title="File", key=lambda plan: plan.name),
    Column(name="network", title="Network", key=lambda plan: _text_of(plan.job.get("network"))),
    Column(
        name="batch",
        title="Batch",
        key=lambda plan: _number_of(plan.job.get("batch")),
        right=True,
        minor=True,
    ),
    Column(name="", title="Plan"),
    Column(name="step", title="Step", key=lambda plan: plan.step_us, right=True),
    Column(
        name="mfu",
        title="MFU",
        key=lambda plan: plan.number("mfu"),
        right=True,
        hint="Model FLOPs utilisation",
    ),
    Column(
        name="memory",
        title="Memory, GiB",
        key=lambda plan: plan.number("memory_bytes"),
        right=True,
        minor=True,
        hint="Of a device",
    ),
)

TRIALS: tuple[Column[Any], ...] = (
    Column(name="time", title="Time", right=True),
    Column(name="outcome", title="Outcome"),
    Column(name="config", title="Configuration"),
    Column(name="variant", title="Variant", minor=True),
    Column(name="bound", title="Bound", right=True, minor=True),
    Column(name="recorded", title="Recorded", minor=True),
)


def _text_of(value: object) -> str | None:
    return None if value is None else str(value)


def _number_of(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
