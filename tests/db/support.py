"""Devices, trials and outcomes that the tests of the database share, and threads that run together."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sqlite3
import subprocess
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests import support
from tunebench.db import MeasurementBatch, NewMeasurement, RunStart, TrialKey, new_owner, open_store
from tunebench.db.store import Store
from tunebench.device import Device, described
from tunebench.outcome import (
    Aborted,
    CompileFailed,
    Crashed,
    LaunchFailed,
    Measured,
    Outcome,
    Predicted,
    Pruned,
    Result,
    TimedOut,
    Verification,
    WrongResult,
)
from tunebench.space import Config

DEVICE = described()["h100-sxm"]
TWIN = described()["h100-pcie"]
WORKLOAD = "softmax:rows=64,cols=64,dtype=f32"
VARIANT = "softmax/example"
UNPROVED = Verification(how="not verified", detail="g++ is not installed")
GOLDEN = Path(__file__).parent.parent / "golden"


def measured(median_us: float, **changes: Any) -> Measured:
    low_us, high_us = median_us * 0.99, median_us * 1.01
    conditions = {"sm_clock_mhz": 1980}
    return support.measured(
        median_us, high_us, low_us, ci_us=(low_us, high_us), conditions=conditions, **changes
    )


def result(median_us: float = 1.0) -> Result:
    return Result(outcome=measured(median_us))


EVERY_OUTCOME: tuple[Outcome, ...] = (
    measured(12.5),
    Predicted(predicted_us=3.0, verification=UNPROVED),
    Aborted(samples_us=(99.0, 98.5), above_us=20.0),
    Pruned(bound_us=8.0, incumbent_us=7.0),
    CompileFailed(reason="error: expected ';'"),
    LaunchFailed(reason="too many resources"),
    WrongResult(reason="y[0, 3] is 7, not 0.1"),
    TimedOut(reason="no answer within 10 s"),
    TimedOut(reason="no answer within 10 s", conditions={"limited": "call", "limit_s": 10.0, "cores": 2}),
    CompileFailed(reason="MemoryError", refused=False, conditions={"attempts": 2}),
    Crashed(reason="signal 11"),
)

WITH_METRICS: tuple[Outcome, ...] = (
    dataclasses.replace(measured(12.5), metrics={"energy_j": 0.0021, "GFLOP/s": 12.5}),
    Predicted(predicted_us=3.0, verification=UNPROVED, metrics={"GFLOP/s": 99.0}),
)


def key(
    number: int = 0, *, device: Device = DEVICE, revision: str = "r1", variant: str = VARIANT
) -> TrialKey:
    config = Config({"tile": number, "ratio": 0.5, "order": "nk"})
    return TrialKey(device=device.key, workload=WORKLOAD, variant=variant, revision=revision, config=config)


def begin(store: Store, device: Device = DEVICE) -> str:
    return store.begin_run(RunStart(device=device, workload=WORKLOAD, sampler="bound", seed=7, host="here"))


def filled(path: Path, count: int = 3, key: Callable[[int], TrialKey] = key) -> Path:
    """Create a database with measurements of `count` trials, the fastest first."""
    with open_store(path) as store:
        begin(store)
        for number in range(count):
            store.record(key(number), result(1.0 + number))
    return path


def batch(*measurements: NewMeasurement) -> MeasurementBatch:
    return MeasurementBatch(
        start=RunStart(device=DEVICE, workload=WORKLOAD, sampler="import", seed=0), measurements=measurements
    )


def added(number: int, outcome: Outcome, **changes: Any) -> NewMeasurement:
    return NewMeasurement(key=key(number), result=Result(outcome=outcome), **changes)


def served(store: Store) -> list[tuple[int, float, bool]]:
    return [
        (entry.key.config["tile"], entry.result.outcome.median_us, entry.stale)  # type: ignore[union-attr]
        for entry in store.best(WORKLOAD)
    ]


def load_golden(revision: str, path: Path) -> None:
    """Create a database of an earlier schema with the rows of its golden file."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript((GOLDEN / f"schema_{revision}.sql").read_text(encoding="utf-8"))


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = datetime.now(UTC)

    def __call__(self) -> datetime:
        return self.now


def dead_owner() -> str:
    space, _, token = new_owner().rsplit(":", 2)
    ended = subprocess.Popen(["true"])
    ended.wait()
    return f"{space}:{ended.pid}:{token}"


@contextlib.contextmanager
def unprivileged() -> Iterator[None]:
    """Act as a user without write permission, even if tests run as root."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def in_threads(works: list[Callable[[], None]]) -> None:
    """Run functions at the same time, and wait until all have ended."""
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
