"""The optimality gap of the best configuration, and the proof that it is optimal.

A configuration is *open* if it may still be faster than the best: it has no time, and neither its lower bound
nor its outcome rules it out. The optimality gap is the best time over the lowest bound of an open
configuration. If no configuration is open, the best is proved optimal in its space, for the current sources
and compiler.

Only sound evidence closes a configuration: predictions of models and aborted runs do not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from tunebench._figure import significant
from tunebench.outcome import (
    Aborted,
    CompileFailed,
    Crashed,
    LaunchFailed,
    Measured,
    Outcome,
    TimedOut,
    WrongResult,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

__all__ = [
    "ConfigStatus",
    "OptimalityProof",
    "believable",
    "certify",
    "config_status",
    "is_impossible",
    "violates",
]


class ConfigStatus(IntEnum):
    """Status of a configuration in an optimality proof."""

    UNTRIED = 0
    """Not run, or only predicted: only its bound can close it."""
    TIMED = 1
    """It has a measured time."""
    IMPOSSIBLE = 2
    """It cannot run on this device, or its result is wrong."""
    ABORTED = 3
    """Aborted after its first samples, which proves nothing."""
    CRASHED = 4
    """Its worker crashed; a retry may succeed."""
    TIMED_OUT = 5
    """It exceeded the time limit; a longer limit may suffice."""
    FAILED = 6
    """It failed for a reason that may be temporary."""


_CLOSED = (ConfigStatus.TIMED, ConfigStatus.IMPOSSIBLE)


def config_status(outcome: Outcome) -> ConfigStatus:
    """Return the status of a configuration by its outcome."""
    match outcome:
        case Measured():
            return ConfigStatus.TIMED
        case WrongResult():
            return ConfigStatus.IMPOSSIBLE
        case CompileFailed() | LaunchFailed():
            return ConfigStatus.IMPOSSIBLE if outcome.refused else ConfigStatus.FAILED
        case Aborted():
            return ConfigStatus.ABORTED
        case Crashed():
            return ConfigStatus.CRASHED
        case TimedOut():
            return ConfigStatus.TIMED_OUT
    return ConfigStatus.UNTRIED  # predicted or pruned: the bound of its row decides


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimalityProof:
    """The optimality proof of a best time.

    Attributes:
        best_us: The best time, in microseconds.
        floor_us: Lower bound of all configurations, in microseconds: the lowest open bound or the best time.
        gap: `best_us / floor_us`; 1 if proved optimal, None if an open configuration has no bound.
        proved: Whether no configuration is open.
        timed: Number of configurations with a time.
        bounded: Number of configurations closed by their bounds.
        impossible: Number of configurations that cannot run or are wrong.
        open: Number of open configurations by status: `untried`, `aborted`, ….
    """

    best_us: float
    floor_us: float
    gap: float | None
    proved: bool
    timed: int
    bounded: int
    impossible: int
    open: Mapping[str, int]

    @property
    def open_count(self) -> int:
        """Number of open configurations."""
        return sum(self.open.values())

    def to_json(self) -> dict[str, Any]:
        """Return the proof as plain data; infinite times are None."""
        times = {"best_us": self.best_us, "floor_us": self.floor_us}
        finite = {name: us if math.isfinite(us) else None for name, us in times.items()}
        return {**asdict(self), **finite, "open_count": self.open_count}


def certify(bounds_us: Array, statuses: Array, best_us: float) -> OptimalityProof:
    """Return the optimality proof of the best time among configurations.

    Args:
        bounds_us: Sound lower bound of each configuration, in microseconds, `(n,)`; 0 without a bound.
        statuses: `ConfigStatus` of each, `(n,)`.
        best_us: The best time, in microseconds; infinite without one.
    """
    closed = np.isin(statuses, _CLOSED)
    # Strictly above: a bound that equals the best time does not rule out a tie.
    bounded = ~closed & (bounds_us > best_us)
    still_open = ~closed & ~bounded
    # Without open configurations the best time itself is the floor, and the gap is 1.
    floor_us = float(np.min(bounds_us, where=still_open, initial=best_us))
    counts = np.bincount(statuses[still_open], minlength=len(ConfigStatus))
    proved = math.isfinite(best_us) and not still_open.any()
    return OptimalityProof(
        best_us=best_us,
        floor_us=floor_us,
        gap=best_us / floor_us if math.isfinite(best_us) and floor_us > 0 else None,
        proved=proved,
        timed=int((statuses == ConfigStatus.TIMED).sum()),
        bounded=int(bounded.sum()),
        impossible=int((statuses == ConfigStatus.IMPOSSIBLE).sum()),
        open={kind.name.lower(): int(counts[kind]) for kind in ConfigStatus if counts[kind]},
    )


def is_impossible(outcome: Outcome, bound_us: float) -> bool:
    """Return whether a median is below its lower bound: it is then a finding, and no result.

    Args:
        outcome: The outcome of the run.
        bound_us: Its lower bound, in microseconds.
    """
    return isinstance(outcome, Measured) and outcome.median_us < bound_us


def believable(outcome: Outcome, bound_us: float) -> Outcome:
    """Return the outcome from which a search learns: a failure that may be temporary for an impossible time.

    Args:
        outcome: The outcome of the run.
        bound_us: Its lower bound, in microseconds.
    """
    if not is_impossible(outcome, bound_us):
        return outcome
    return LaunchFailed(reason=f"its median is below its lower bound of {significant(bound_us, 6)} us")


def violates(outcome: Outcome, bound_us: float) -> bool:
    """Return whether a run was faster than its lower bound, so that one of the two is wrong.

    The fastest sample decides, not the median, because the bound holds for every execution.

    Args:
        outcome: The outcome of the run.
        bound_us: Its lower bound, in microseconds.
    """
    samples_us = outcome.samples_us if isinstance(outcome, Measured | Aborted) else ()
    return bool(samples_us) and min(samples_us) < bound_us
