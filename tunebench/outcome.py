"""Outcomes of one configuration: a union in which only a success contains a time.

Source: the confidence interval of the median uses order statistics (Hollander and Wolfe, "Nonparametric
Statistical Methods", section 3.6), which assume no particular distribution.
"""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

__all__ = [
    "FAILURES",
    "VARIANT_FILE",
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
    "failure_of",
    "first_error",
    "from_json",
    "median_interval",
    "time_us",
    "to_json",
]

VARIANT_FILE = "variant_file"
"""Condition of a measurement of a user's variant: the path of its file."""

CacheState = Literal["cold", "warm"]
"""Whether the last-level cache was flushed before each sample; compare only times of equal state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """How a result was verified.

    Attributes:
        how: ``"reference"`` (run on the device), ``"compared"`` (the same, with the results of the default
            configuration, because the kernel has no reference), ``"emulated"`` (run on the host through the
            shim), ``"simulated"`` (by Numba or Triton), or ``"not verified"``.
        detail: Coverage of the check, or the reason why there was none.
        worst: Largest error as a fraction of the tolerance; below 1 passes.
        absolute: Largest difference from the reference; None if it was not recorded.
        relative: That difference as a fraction of the largest magnitude in the reference of its output; None
            if it was not recorded.
    """

    how: Literal["reference", "compared", "emulated", "simulated", "not verified"]
    detail: str
    worst: float | None = None
    absolute: float | None = None
    relative: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The configuration ran with a correct result, and was timed.

    Attributes:
        median_us: Median time of one run.
        ci_us: 95 % confidence interval of the median.
        samples_us: All samples, in the order taken.
        cache: Cache state of the samples.
        verification: How the result was verified.
        conditions: Conditions that decide whether measurements are comparable: clocks, throttling, power.
        metrics: Other observed values by name, such as ``energy_j``, and metrics computed of them.
    """

    kind: ClassVar[str] = "measured"
    median_us: float
    ci_us: tuple[float, float]
    samples_us: tuple[float, ...]
    cache: CacheState
    verification: Verification
    conditions: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """The configuration compiled for an absent device; its time is predicted by the model.

    Attributes:
        predicted_us: Expected time.
        verification: How the result was verified.
        low_us: Lower end of the 90 % prediction interval; None in records without an interval.
        high_us: Upper end.
        metrics: Metrics computed of the predicted time, by name.
    """

    kind: ClassVar[str] = "predicted"
    predicted_us: float
    verification: Verification
    low_us: float | None = None
    high_us: float | None = None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def interval_us(self) -> tuple[float, float] | None:
        """Both ends of the prediction interval, or None without an interval."""
        return (self.low_us, self.high_us) if self.low_us is not None and self.high_us is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Aborted:
    """The result was correct, but its first samples were clearly slower than the incumbent: no median."""

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
    """The configuration did not compile.

    Attributes:
        reason: Message of the compiler, or how it died.
        refused: False if the compiler crashed or hung, so that another attempt may succeed.
        conditions: Of a compiler that hung or lacked a resource, as of `TimedOut` and `LaunchFailed`.
    """

    kind: ClassVar[str] = "compile_failed"
    reason: str
    refused: bool = True
    conditions: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchFailed:
    """The configuration compiled, but the device or the runner refused to run it.

    Attributes:
        reason: Message of the driver or the runner.
        refused: Whether it exceeds a limit of the device, so that it can never run there.
        conditions: `attempts`, if a resource such as memory was exhausted in that many processes, while the
            machine had enough of it.
    """

    kind: ClassVar[str] = "launch_failed"
    reason: str
    refused: bool = False
    conditions: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongResult:
    """The configuration ran, and its output is outside the tolerance."""

    kind: ClassVar[str] = "wrong_result"
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedOut:
    """Verifying or measuring did not finish within the time limit; its worker was replaced.

    A compiler that does not finish is `CompileFailed` with `refused=False`.

    Attributes:
        reason: The limit that was exceeded.
        conditions: `limit_s`, `wall_s`, `processor_s` (of all processes of the worker), `waited_s` (for a
            processor), in seconds; `load`, the load average, and `cores`; `busy_elsewhere`, the share of all
            processors that other programs used. Unknown ones are missing.
    """

    kind: ClassVar[str] = "timed_out"
    reason: str
    conditions: Mapping[str, Any] = dataclasses.field(default_factory=dict)


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
    """Resource usage of one compiled entry function; None where it does not apply or is unknown.

    Attributes:
        registers: 32-bit registers per thread.
        static_smem_bytes: Static shared memory per block, without the system's reserve.
        dynamic_smem_bytes: Shared memory per block requested at launch.
        spill_bytes: Bytes of registers spilled to local memory per thread, stores plus loads.
        code_bytes: Size of the machine code.
    """

    registers: int | None = None
    static_smem_bytes: int | None = None
    dynamic_smem_bytes: int | None = None
    spill_bytes: int | None = None
    code_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Wall time of one trial by step, in seconds."""

    compile_s: float = 0.0
    verify_s: float = 0.0
    measure_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Result of an executor for one configuration.

    Attributes:
        outcome: Success with a time, or the kind of failure.
        resources: Resource usage of the binary, if it compiled.
        effort: Wall time by step.
        conditions: Versions, driver and host at the time of the run.
        bound_us: Lower bound with the resources of the binary, in microseconds; 0 if unknown. Not stored.
    """

    outcome: Outcome
    resources: Resources = Resources()
    effort: Effort = Effort()
    conditions: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    bound_us: float = 0.0


def failed(outcome: Outcome) -> bool:
    """Return whether the outcome is one of the failure classes."""
    return isinstance(outcome, FAILURES)


_COMPILER_PASS = re.compile(r"^(?:numba: )?Failed in \w+ mode pipeline")
_PLACE = re.compile(r'^\s*File "[^"]+", line \d+')


def first_error(reason: str) -> str:
    """Return the line of a failure's reason that names the error, with its place in the source.

    Numba puts it below lines that name its own passes.

    Args:
        reason: Reason of a failure: a message of one or more lines.
    """
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    named = next((line for line in lines if not _COMPILER_PASS.match(line)), lines[0] if lines else "")
    location = next(filter(_PLACE.match, lines), "")
    return f"{named} ({location.rstrip(':')})" if location and location not in named else named


def failure_of(outcome: Outcome) -> str | None:
    """Return class and first error of a failure, such as ``"crashed: worker exited with 3"``, or None."""
    return f"{outcome.kind}: {first_error(outcome.reason)}" if isinstance(outcome, FAILURES) else None


def time_us(outcome: Outcome) -> float | None:
    """Return the time of an outcome in microseconds, or None: only `Measured` and `Predicted` have one."""
    if isinstance(outcome, Measured):
        return outcome.median_us
    return outcome.predicted_us if isinstance(outcome, Predicted) else None


def to_json(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome as plain data, with its class under ``"kind"``; `from_json` is the inverse."""
    fields = {field.name: getattr(outcome, field.name) for field in dataclasses.fields(outcome)}
    if "verification" in fields:
        verification = dataclasses.asdict(fields["verification"])
        fields["verification"] = {
            name: value
            for name, value in verification.items()
            if value is not None or name not in ("absolute", "relative")
        }
    if not fields.get("metrics", True):
        del fields["metrics"]
    if isinstance(outcome, FAILURES) and not fields.get("conditions", True):
        del fields["conditions"]
    return {"kind": outcome.kind, **fields}


def from_json(data: Mapping[str, Any]) -> Outcome:
    """Return the outcome that `to_json` converted.

    Args:
        data: Fields of the outcome, and its class under ``"kind"``.

    Raises:
        KeyError: The kind is unknown.
        TypeError: The fields do not match the kind.
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

    Args:
        samples_us: At least one sample, in microseconds.

    Returns:
        The median, and the low and high ends of the interval, in microseconds.
    """
    ordered = sorted(samples_us)
    count = len(ordered)
    spread = 1.96 * math.sqrt(count) / 2
    low = max(0, math.floor(count / 2 - spread))
    high = min(count - 1, math.ceil(count / 2 + spread))
    return statistics.median(ordered), (ordered[low], ordered[high])
