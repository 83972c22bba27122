"""Variant whose kernel does nothing, and stages with a fixed delay, for `tuning_overhead.py`."""

from __future__ import annotations

import time
from typing import Any

from tests.faults.journaled_tuning import StandInVariant
from tunebench.binary.compiled import Binary
from tunebench.outcome import Effort, Measured, Result, Verification
from tunebench.space import Parameter, Space
from tunebench.task import Task


class Null(StandInVariant):
    """Variant with ten thousand configurations of a kernel that does nothing."""

    name = "null"
    space = Space(
        (Parameter("a", tuple(range(100)), "nothing"), Parameter("b", tuple(range(100)), "nothing"))
    )


VARIANT = Null()
_delay_s = 0.0


def start(delay_s: float) -> None:
    """Set the duration of each stage call, in seconds."""
    global _delay_s
    _delay_s = delay_s


def compile_task(_task: Task) -> Binary:
    """Return an empty binary after the delay."""
    time.sleep(_delay_s)
    return Binary(key="null", language="numba-cpu", target="", payload=b"")


def measure_task(_task: Task, _binary: Binary, _abort_above_us: float | None) -> Result:
    """Return a result of ten samples, as many as a real measurement has, after the delay."""
    time.sleep(_delay_s)
    outcome: Any = Measured(
        median_us=1.0,
        ci_us=(1.0, 1.0),
        samples_us=(1.0,) * 10,
        cache="cold",
        verification=Verification(how="reference", detail="", worst=0.0),
    )
    return Result(outcome=outcome, effort=Effort(measure_s=_delay_s))
