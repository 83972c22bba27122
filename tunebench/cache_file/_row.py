"""Trials of a recorded tuning space, in rows and in columns, for all file formats."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tunebench._device import product_name, products_named
from tunebench._lazy import np
from tunebench.errors import InputError
from tunebench.outcome import (
    CompileFailed,
    Effort,
    LaunchFailed,
    Measured,
    Outcome,
    Result,
    TimedOut,
    Verification,
    WrongResult,
    median_interval,
)
from tunebench.space import Config, Parameter, Space, Table, Value

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "MAX_ROWS",
    "MAX_VALUES",
    "RECORDED_AS",
    "DuplicateCheck",
    "RawTrial",
    "RecordedSpace",
    "RecordedTrial",
    "RejectedEntry",
    "TuningLog",
    "metrics_of",
    "printable",
    "problem_size_of",
    "refused_field",
    "value_of",
]

MAX_TEXT = 1000
"""Largest length of a text."""
MAX_PARAMETERS = 100
"""Largest number of parameters of a space."""
MAX_VALUES = 1 << 15
"""Largest number of values of a parameter: a `Table` stores 16-bit ordinals."""
MAX_METRICS = 100
"""Largest number of metrics of a row, and largest length of their names."""
MAX_ROWS = 1 << 21
"""Largest number of rows of a space."""
MAX_INTEGER = 1 << 63
"""Only integers below this magnitude are accepted."""

RECORDED_AS = "recorded as "
"""Prefix of the reason of a failure that another tuner recorded; the tuner's text follows."""

_UNVERIFIED = Verification(how="not verified", detail="recorded by another tuner")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSpace:
    """A tuning space with the recorded result of every configuration, on one device.

    Attributes:
        kernel: Name of the kernel; empty if a T4 file does not contain it.
        device: Name of the device as its driver reports it; empty if unknown.
        problem: Kernel Tuner's problem size; empty if unknown.
        table: The configurations.
        times_us: Time of each, in microseconds: the recorded average, or the median of tunebench's own
            measurements; NaN for a failure.
        fastest_us: Fastest sample of each, in microseconds; NaN for a failure.
        failures: Outcomes of the rows without a time.
        workload: Canonical text of its workload if a kernel of tunebench was tuned; else empty.
        metrics: Other recorded values by name, such as an energy; NaN where a row has none.
    """

    kernel: str
    device: str
    problem: tuple[int, ...]
    table: Table
    times_us: NDArray[np.float64]
    fastest_us: NDArray[np.float64]
    failures: Mapping[int, Outcome]
    workload: str = ""
    metrics: Mapping[str, NDArray[np.float64]] = dataclasses.field(default_factory=dict)

    def completed(
        self, *, kernel: str = "", device: str = "", problem: tuple[int, ...] = ()
    ) -> RecordedSpace:
        """Return the space with the metadata filled in that T4 files lack.

        Args:
            kernel: Name of the kernel.
            device: Name of the device.
            problem: Problem size.

        Raises:
            InputError: if the file contains another value.
        """
        mine, theirs = (product_name(name) if name else "" for name in (self.device, device))
        narrower = theirs in products_named(self.device)  # the file's name may be that of several products
        mine = theirs if narrower else mine
        for name, recorded, requested in (
            ("kernel", self.kernel, kernel),
            ("device", mine, theirs),
            ("problem", self.problem, problem),
        ):
            if recorded and requested and recorded != requested:
                raise InputError(f"{name}: the file contains {recorded}, not {requested}; remove the option")
        return dataclasses.replace(
            self,
            kernel=self.kernel or kernel,
            device=device if narrower else self.device or device,
            problem=self.problem or problem,
        )

    @property
    def optimum_us(self) -> float:
        """Shortest recorded time, in microseconds."""
        return float(np.nanmin(self.times_us))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTrial:
    """One configuration with its result.

    Attributes:
        config: The configuration, in the order of the space.
        result: Its result; `conditions` contains other values of the file, such as ``timestamp``.
    """

    config: Config
    result: Result

    @property
    def time_us(self) -> float:
        """Recorded time in microseconds, NaN for a failure: an average, if another tuner recorded it."""
        outcome = self.result.outcome
        if not isinstance(outcome, Measured):
            return math.nan
        return float(outcome.conditions.get("average_us", outcome.median_us))

    @property
    def fastest_us(self) -> float:
        """Fastest sample in microseconds, NaN for a failure."""
        outcome = self.result.outcome
        return min(*outcome.samples_us, self.time_us) if isinstance(outcome, Measured) else math.nan


@dataclass(frozen=True, slots=True)
class RejectedEntry:
    """A row that cannot be used: its location in the file, and the reason."""

    place: str
    reason: str

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"


class DuplicateCheck:
    """Detection of duplicate configurations; stores only digests."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def check(self, config: Config) -> None:
        """Add a configuration.

        Raises:
            InputError: if an equal one was added before.
        """
        # Compare values and text: 1 equals 1.0 and True, and 1 has the text of "1".
        equal = repr([v if isinstance(v, str) or v != int(v) else int(v) for v in config.values()])
        names = {_digest(equal), _digest(str(config))}
        if names & self._seen:
            raise InputError(f"the configuration occurs twice: {config}")
        self._seen |= names


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=12).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningLog:
    """Contents of a cache file: the recorded trials of one space on one device.

    Attributes:
        kernel: Name of the kernel; empty if unknown.
        device: Name of the device; empty if unknown.
        problem: Kernel Tuner's problem size; empty if unknown.
        workload: Canonical text if a kernel of tunebench was tuned; else empty.
        names: Parameter names, outermost first.
        values: Declared order of the values of parameters, if the file contains it.
        rows: The trials, each configuration once.
        units: Units of metrics, if the file contains them.
    """

    kernel: str = ""
    device: str = ""
    problem: tuple[int, ...] = ()
    workload: str = ""
    names: tuple[str, ...]
    values: Mapping[str, tuple[Value, ...]] = dataclasses.field(default_factory=dict)
    rows: tuple[RecordedTrial, ...]
    units: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 < len(self.names) <= MAX_PARAMETERS:
            raise InputError(f"a space needs 1 to {MAX_PARAMETERS} parameters, got {len(self.names)}")
        Space(tuple(Parameter(name, (0,), "validates the name") for name in self.names))

    def recorded_space(self) -> RecordedSpace:
        """Return the trials as columns, in the order of their space.

        Raises:
            InputError: if no trial has a time, or the space is too large.
        """
        if not any(isinstance(row.result.outcome, Measured) for row in self.rows):
            raise InputError(f"none of {len(self.rows)} configurations has a time")
        space = Space(tuple(Parameter(name, self.values_of(name), "recorded") for name in self.names))
        ordinal_of = [{value: ordinal for ordinal, value in enumerate(p.values)} for p in space.parameters]
        ordinals = np.array(
            [
                [
                    ordinals_of[row.config[name]]
                    for name, ordinals_of in zip(self.names, ordinal_of, strict=True)
                ]
                for row in self.rows
            ],
            dtype=np.int16,
        )
        keys = space.keys(ordinals)
        order = np.argsort(keys)
        if len(np.unique(keys)) != len(keys):
            raise InputError("a configuration occurs twice")
        placed = [self.rows[i] for i in order]
        return RecordedSpace(
            kernel=self.kernel,
            device=self.device,
            problem=self.problem,
            workload=self.workload,
            table=Table(space, ordinals[order]),
            times_us=np.array([row.time_us for row in placed]),
            fastest_us=np.array([row.fastest_us for row in placed]),
            failures={
                index: row.result.outcome
                for index, row in enumerate(placed)
                if not isinstance(row.result.outcome, Measured)
            },
            metrics=_columns([metrics_of(row.result.outcome) for row in placed]),
        )

    def values_of(self, name: str) -> tuple[Value, ...]:
        """Return the values that occur, in the declared order if it contains them all, else ascending."""
        present = {row.config[name] for row in self.rows}
        if len(present) > MAX_VALUES:
            raise InputError(f"parameter {name} has {len(present)} values, more than {MAX_VALUES}")
        declared = tuple(value for value in self.values.get(name, ()) if value in present)
        if set(declared) == present and len(declared) == len(present):
            return declared
        return tuple(sorted(present, key=lambda value: (isinstance(value, str), value)))


def metrics_of(outcome: Outcome) -> Mapping[str, float]:
    """Return the metrics of a measurement; empty for all other outcomes."""
    return outcome.metrics if isinstance(outcome, Measured) else {}


def _columns(rows: Sequence[Mapping[str, float]]) -> dict[str, NDArray[np.float64]]:
    """Return the metrics of rows as columns, with NaN where a row lacks one."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: np.array([row.get(name, math.nan) for row in rows], dtype=np.float64) for name in names}


_refused = functools.partial(LaunchFailed, refused=True)

_FAILURE_OUTCOMES: dict[str, Callable[..., Outcome]] = {
    "CompilationFailedConfig": CompileFailed,
    "RuntimeFailedConfig": _refused,
    "InvalidConfig": _refused,
    "compile": CompileFailed,
    "runtime": _refused,
    "constraints": _refused,
    "correctness": WrongResult,
    "timeout": TimedOut,
}
"""Outcome of each failure name of other tuners; any other name is a failed launch.

Kernel Tuner uses `RuntimeFailedConfig` if a launch asks for more resources than the device has.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RawTrial:
    """Unchecked values of one configuration in a file.

    Attributes:
        values: Parameters, and possibly other fields.
        time: The time, or the name of a failure.
        unit_us: Microseconds per unit of `time`.
        samples: All samples.
        reason: Further text on a failure.
        refused: False for a failure of tunebench's own that may be temporary; other tuners do not write it.
        compiling, verifying, measuring, framework, search: Wall times of the phases.
        others_unit_us: Microseconds per unit of all other times.
        timestamp: Time of the measurement.
        metrics: Other fields; numbers among them are metrics.
    """

    values: Mapping[str, Any]
    time: Any
    unit_us: float = 1e3
    samples: Any = ()
    reason: Any = None
    refused: Any = None
    compiling: Any = None
    verifying: Any = None
    measuring: Any = None
    framework: Any = None
    search: Any = None
    others_unit_us: float = 1e3
    timestamp: Any = None
    metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def row(self, names: Iterable[str]) -> RecordedTrial:
        """Return the checked trial.

        Args:
            names: Parameter names.

        Raises:
            InputError: if a value is missing or invalid.
        """
        config = Config({name: value_of(self.values, name) for name in names})
        return RecordedTrial(
            config=config,
            result=Result(outcome=self._outcome(), effort=self._effort(), conditions=self._conditions()),
        )

    def _outcome(self) -> Outcome:
        if isinstance(self.time, str):
            reason = self.reason if isinstance(self.reason, str) and self.reason else self.time
            kind = _FAILURE_OUTCOMES.get(self.time, LaunchFailed)
            outcome = kind(reason=RECORDED_AS + printable(reason.removeprefix(RECORDED_AS)))
            if self.refused is False and isinstance(outcome, CompileFailed | LaunchFailed):
                return dataclasses.replace(outcome, refused=False)
            return outcome
        samples = self.samples if isinstance(self.samples, list) else ()
        average_us = _microseconds(self.time, self.unit_us)
        samples_us = [_microseconds(sample, self.others_unit_us) for sample in samples]
        median_us, ci_us = median_interval(samples_us or [average_us])
        return Measured(
            median_us=median_us,
            ci_us=ci_us,
            samples_us=tuple(samples_us or [average_us]),
            cache="warm",  # other tuners do not flush; a lower bound for warm caches also holds for cold ones
            verification=_UNVERIFIED,
            conditions={"average_us": average_us},
            metrics=dict(itertools.islice(_numbers(self.metrics), MAX_METRICS)),
        )

    def _effort(self) -> Effort:
        return Effort(
            compile_s=self._seconds(self.compiling) or 0.0,
            verify_s=self._seconds(self.verifying) or 0.0,
            measure_s=self._seconds(self.measuring) or 0.0,
        )

    def _seconds(self, value: Any) -> float | None:
        """Return a duration in seconds; None if it is invalid."""
        valid = _is_number(value) and 0 <= value < math.inf
        return value / (1e6 / self.others_unit_us) if valid else None

    def _conditions(self) -> dict[str, Any]:
        seconds = {"framework_s": self._seconds(self.framework), "search_s": self._seconds(self.search)}
        stamp = self.timestamp if isinstance(self.timestamp, str) and self.timestamp.isprintable() else None
        conditions = {**seconds, "timestamp": stamp[:MAX_TEXT] if stamp else None}
        return {name: value for name, value in conditions.items() if value is not None}


def refused_field(outcome: Outcome) -> dict[str, bool]:
    """Return the field that marks a failure as possibly temporary; empty for all other outcomes.

    The formats have no names for crashes and time limits of the compiler. Without this field such a failure
    would be read back as refused, which closes the configuration in an optimality proof.
    """
    closed = isinstance(outcome, Measured | WrongResult) or getattr(outcome, "refused", False)
    return {} if closed else {"refused": False}


def _numbers(fields: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the fields whose values are finite numbers; lists of readings and texts are no metrics."""
    for name, value in fields.items():
        is_name = 0 < len(name) <= MAX_METRICS and name.isprintable()
        if is_name and _is_number(value) and math.isfinite(value):
            yield name, value


def _is_number(value: Any) -> bool:
    """Return whether a value is a number that a float can represent."""
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < MAX_INTEGER
    return isinstance(value, float)


def value_of(values: Mapping[str, Any], name: str) -> Value:
    """Return the value of a parameter.

    Args:
        values: Fields of a configuration.
        name: Name of the parameter.

    Raises:
        InputError: if it is missing, or not a valid parameter value.
    """
    if name not in values:
        raise InputError(f"a configuration lacks the parameter {name!r}")
    value = values[name]
    match value:
        # With commas two configurations could have the same text; databases do not store unprintable text.
        case str() if len(value) <= MAX_TEXT and value.isprintable() and "," not in value:
            return value
        case int() if abs(value) < MAX_INTEGER:
            return value
        case float() if math.isfinite(value):
            return value
    raise InputError(
        f"parameters must be numbers or text without commas, got {name}={printable(repr(value))}"
    )


def printable(text: str) -> str:
    """Return text as one line of printable characters."""
    return "".join(c if c.isprintable() else " " for c in text[:MAX_TEXT])


def _microseconds(time: Any, unit_us: float) -> float:
    if not _is_number(time) or not 0 < time * unit_us < math.inf:
        raise InputError(f"a time must be positive, got {printable(repr(time))}")
    return float(time * unit_us)


def problem_size_of(size: Any) -> tuple[int, ...]:
    """Return a problem size as integers; empty if it is missing or has another form."""
    sizes = size if isinstance(size, list) else [size]
    valid = all(isinstance(s, int) and _is_number(s) and s > 0 for s in sizes)
    return tuple(sizes) if valid and len(sizes) <= MAX_PARAMETERS else ()
