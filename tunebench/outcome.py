"""What became of one configuration: a union in which only a success holds a time.

Source: the interval of the median is by order statistics (Hollander and Wolfe, "Nonparametric Statistical
Methods", section 3.6), which assumes nothing of the distribution.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

__all__ = [
    "FAILURES",
    "Aborted",
    "CacheState",
    "CompileFailed",
    "Crashed",
    "Effort",
    "LaunchFailed",
    "Measured",
    "Outcome",
    "Predicted",
    "Pruned",
    "Resources",
    "Result",
    "TimedOut",
    "Verification",
    "WrongResult",
    "failed",
    "from_json",
    "median_interval",
    "time_us",
    "to_json",
]

CacheState = Literal["cold", "warm"]
"""Whether the last-level cache was flushed before each sample; times of unlike states never compare."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """How a result was proved right.

    Attributes:
        how: ``"reference"`` (run on the device), ``"emulated"`` (run on the host through the shim),
            ``"simulated"`` (Numba's simulator), or ``"not verified"``.
        detail: What was covered, or why nothing was.
        worst: Largest error seen as a share of what the tolerance allows; below 1 passes.
    """

    how: Literal["reference", "emulated", "simulated", "not verified"]
    detail: str
    worst: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The configuration ran, its result was correct, and this is its time.

    Attributes:
        median_us: Median time of one run.
        ci_us: 95 % confidence interval of the median.
        samples_us: All samples, in the order taken.
        cache: Cache state of the samples.
        verification: How the result was verified.
        conditions: Conditions that make measurements comparable or not: clocks, throttling, power.
    """

    kind: ClassVar[str] = "measured"
    median_us: float
    ci_us: tuple[float, float]
    samples_us: tuple[float, ...]
    cache: CacheState
    verification: Verification
    conditions: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """The configuration compiled for an absent device; its time is predicted by the model.

    Attributes:
        predicted_us: Expected time.
        verification: How the result was verified.
        low_us: Lower end of the 90 % prediction interval; None in records without an interval.
        high_us: Upper end.
    """

    kind: ClassVar[str] = "predicted"
    predicted_us: float
    verification: Verification
    low_us: float | None = None
    high_us: float | None = None

    @property
    def interval_us(self) -> tuple[float, float] | None:
        """Both ends of the interval, where it has one."""
        return (self.low_us, self.high_us) if self.low_us is not None and self.high_us is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Aborted:
    """The result was correct, but the first samples were hopeless against the incumbent; it has no median."""

    kind: ClassVar[str] = "aborted"
    samples_us: tuple[float, ...]
    above_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """The configuration was not run: its lower bound exceeds the incumbent."""

    kind: ClassVar[str] = "pruned"
    bound_us: float
    incumbent_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileFailed:
    """The compiler refused it.

    Attributes:
        reason: What it said.
        refused: False if the compiler crashed or hung instead, and may do otherwise another time.
    """

    kind: ClassVar[str] = "compile_failed"
    reason: str
    refused: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchFailed:
    """It compiled, but the device or the runner refused to run it.

    Attributes:
        reason: What was said.
        refused: Whether it asks for what the device has not, so that it can never run there.
    """

    kind: ClassVar[str] = "launch_failed"
    reason: str
    refused: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongResult:
    """The configuration ran, and its output is outside the tolerance."""

    kind: ClassVar[str] = "wrong_result"
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedOut:
    """The configuration did not finish within the time limit; its worker was replaced."""

    kind: ClassVar[str] = "timed_out"
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Crashed:
    """The configuration crashed its worker, which was replaced."""

    kind: ClassVar[str] = "crashed"
    reason: str


Outcome = (
    Measured | Predicted | Aborted | Pruned | CompileFailed | LaunchFailed | WrongResult | TimedOut | Crashed
)

FAILURES = (CompileFailed, LaunchFailed, WrongResult, TimedOut, Crashed)
"""The classes of failure, each with a `reason`."""

_CLASSES: dict[str, Any] = {cls.kind: cls for cls in (Measured, Predicted, Aborted, Pruned, *FAILURES)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What the compiler really used, for one entry function; None where it does not apply or is not told.

    Attributes:
        registers: 32-bit registers a thread.
        static_smem_bytes: Static shared memory a block, without what the system reserves.
        dynamic_smem_bytes: Shared memory a block asked for at launch.
        spill_bytes: Bytes of registers spilled to local memory, stores plus loads, a thread.
        code_bytes: Size of the machine code.
    """

    registers: int | None = None
    static_smem_bytes: int | None = None
    dynamic_smem_bytes: int | None = None
    spill_bytes: int | None = None
    code_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Where the wall time of one trial went, in seconds."""

    compile_s: float = 0.0
    verify_s: float = 0.0
    measure_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What an executor returns for one configuration.

    Attributes:
        outcome: What became of it.
        resources: What its binary uses, if it compiled.
        effort: Where the wall time went.
        conditions: What it ran under: versions, driver, host.
        bound_us: Lower bound with the resources of the binary, in microseconds; 0 if unknown. Not stored.
    """

    outcome: Outcome
    resources: Resources = Resources()
    effort: Effort = Effort()
    conditions: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    bound_us: float = 0.0


def failed(outcome: Outcome) -> bool:
    """Tell whether the outcome is one of the failure classes."""
    return isinstance(outcome, FAILURES)


def time_us(outcome: Outcome) -> float | None:
    """Return the time an outcome holds, or None: only `Measured` and `Predicted` hold one."""
    if isinstance(outcome, Measured):
        return outcome.median_us
    return outcome.predicted_us if isinstance(outcome, Predicted) else None


def to_json(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome as plain data, with its class under ``"kind"``; `from_json` reads it back."""
    fields = {field.name: getattr(outcome, field.name) for field in dataclasses.fields(outcome)}
    if "verification" in fields:
        fields["verification"] = dataclasses.asdict(fields["verification"])
    return {"kind": outcome.kind, **fields}


def from_json(data: Mapping[str, Any]) -> Outcome:
    """Rebuild an outcome from `to_json`.

    Raises:
        KeyError: if its kind is unknown.
        TypeError: if its fields do not fit its kind.
    """
    fields = {name: value for name, value in data.items() if name != "kind"}
    for name in ("ci_us", "samples_us"):
        if name in fields:
            fields[name] = tuple(fields[name])
    if isinstance(fields.get("verification"), Mapping):
        fields["verification"] = Verification(**fields["verification"])
    outcome: Outcome = _CLASSES[data["kind"]](**fields)
    return outcome


def median_interval(samples_us: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Return the median and its 95 % confidence interval.

    Below 6 samples no such interval exists, and the range of the samples is returned.
    """
    ordered = sorted(samples_us)
    count = len(ordered)
    spread = 1.96 * math.sqrt(count) / 2
    low = max(0, math.floor(count / 2 - spread))
    high = min(count - 1, math.ceil(count / 2 + spread))
    return statistics.median(ordered), (ordered[low], ordered[high])
