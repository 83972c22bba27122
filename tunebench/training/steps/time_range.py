"""An expected time with its prediction interval: `TimeRange`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tunebench.stack import Efficiency
from tunebench.training.interconnect.cluster import Link, ProcessGroup
from tunebench.training.interconnect.collective import reaches_of

__all__ = ["End", "TimeRange"]

End = Literal["low", "expected", "high"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeRange:
    """An expected time with its 90 % prediction interval, in microseconds.

    Sums and products combine equal ends: if kernels run as fast as possible, less communication is hidden
    behind them.
    """

    low_us: float = 0.0
    us: float = 0.0
    high_us: float = 0.0

    def __add__(self, other: TimeRange) -> TimeRange:
        return TimeRange.of(lambda end: self.at(end) + other.at(end))

    def __mul__(self, times: float) -> TimeRange:
        return TimeRange.of(lambda end: self.at(end) * times)

    def with_efficiency(self, efficiency: Efficiency | None) -> TimeRange:
        """Return the time with what software adds, and the error of that; the same time for None."""
        if efficiency is None:
            return self
        low_us, us, high_us = efficiency.apply(self.low_us, self.us, self.high_us)
        return TimeRange(low_us=low_us, us=us, high_us=high_us)

    def at(self, end: End) -> float:
        """Return one of the three times."""
        return {"low": self.low_us, "expected": self.us, "high": self.high_us}[end]

    @classmethod
    def of(cls, value: Callable[[End], float]) -> TimeRange:
        """Return the range whose three times are computed by a function."""
        return cls(low_us=value("low"), us=value("expected"), high_us=value("high"))

    @classmethod
    def of_communication(cls, us: float, link: ProcessGroup | Link) -> TimeRange:
        """Return the range of communication with this expected time, by a group of devices or on a link."""
        low, high = reaches_of(link)
        return cls(low_us=us * low, us=us, high_us=us * high)
