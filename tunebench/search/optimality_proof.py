"""How much better than the best there may still be, and whether that is proved to be nothing.

A configuration is *open* if it may be faster than the best for all that is known: nobody has timed it, and
neither its bound nor what became of it closes it. The optimality gap is the best time over the lowest bound
that is open. With nothing open, the best is proved optimal in its space: no other configuration of it, as
compiled today, has a run that is faster.

Only what is sound closes. What a learned model believes does not, nor does a run that was given up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np

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

__all__ = ["ConfigStatus", "OptimalityProof", "certify", "config_status", "violates"]


class ConfigStatus(IntEnum):
    """What is known of one configuration, as far as an optimality proof goes."""

    UNTRIED = 0
    """Not run, or only predicted: its bound alone may close it."""
    TIMED = 1
    """It has a time of its own."""
    IMPOSSIBLE = 2
    """It cannot run here, or its result is wrong: it can never be served."""
    ABORTED = 3
    """Given up by its first samples, which is no proof."""
    CRASHED = 4
    """It took its worker down, which it may not do another time."""
    TIMED_OUT = 5
    """Not finished in the time allowed, which another limit may allow."""
    FAILED = 6
    """It failed for a reason that may pass."""


_CLOSED = (ConfigStatus.TIMED, ConfigStatus.IMPOSSIBLE)


def config_status(outcome: Outcome) -> ConfigStatus:
    """Return what an outcome says of its configuration."""
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
    return ConfigStatus.UNTRIED  # predicted, or pruned: the bound of its row says the rest


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimalityProof:
    """What is proved of the best.

    Attributes:
        best_us: Time of the best.
        floor_us: No configuration can be faster: the lowest open bound, or the best time if that is lower.
        gap: `best_us / floor_us`; 1 is proved optimal, None means that an open configuration has no bound.
        proved: Whether nothing is open.
        timed: Configurations with a time.
        bounded: Configurations that are closed by their bounds.
        impossible: Configurations that cannot run, or are wrong.
        open: Configurations that may be faster, by what is known of them: `untried`, `aborted`, ….
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
        """How many may be faster."""
        return sum(self.open.values())

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data; times that there are none of are None."""
        times = {"best_us": self.best_us, "floor_us": self.floor_us}
        known = {name: us if math.isfinite(us) else None for name, us in times.items()}
        return {**asdict(self), **known, "open_count": self.open_count}


def certify(bounds_us: Array, statuses: Array, best_us: float) -> OptimalityProof:
    """Return what is proved of the best time among configurations.

    Args:
        bounds_us: A sound bound of each configuration, in microseconds, `(n,)`; 0 where there is none.
        standings: The `ConfigStatus` of each, `(n,)`.
        best_us: The best time, in microseconds; infinite if nothing has a time.
    """
    closed = np.isin(statuses, _CLOSED)
    bounded = ~closed & (bounds_us > best_us)
    still_open = ~closed & ~bounded
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


def violates(outcome: Outcome, bound_us: float) -> bool:
    """Tell whether a run was faster than its bound allows, so that one of the two is wrong.

    The fastest sample decides, not the median: the bound speaks of every execution.
    """
    samples_us = outcome.samples_us if isinstance(outcome, Measured | Aborted) else ()
    return bool(samples_us) and min(samples_us) < bound_us
