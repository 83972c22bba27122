"""Units of columns of times: all times of a column have one unit, which its header names."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from tunebench._figure import significant

__all__ = ["ColumnUnit", "unit_of"]

_UNITS = (("h", 3.6e9), ("min", 6e7), ("s", 1e6), ("ms", 1e3), ("us", 1.0))
"""Units with their microseconds, the longest first."""
_DIGITS = 4
"""Significant digits of the median of a column; its decimals are those of all its times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnUnit:
    """Unit of a column: its name, its microseconds, and the number of decimals."""

    name: str
    us: float
    decimals: int

    def text(self, value_us: float) -> str:
        """Return a time without its unit, with three significant digits where the decimals have fewer."""
        value = value_us / self.us
        is_rounded = 0 < abs(value) < 10.0 ** (2 - self.decimals)
        return significant(value, 3) if is_rounded else f"{value:,.{self.decimals}f}"


def unit_of(times_us: Iterable[float | None]) -> ColumnUnit:
    """Return the largest unit of a column of times in which their median is at least 1, else the smallest.

    Args:
        times_us: The times in microseconds; None for an empty cell.
    """
    times = [abs(us) for us in times_us if us is not None and math.isfinite(us)]
    middle_us = median(times) if times else 1.0
    name, size = next(((name, size) for name, size in _UNITS if middle_us >= size), _UNITS[-1])
    whole_digits = max(1, math.floor(math.log10(middle_us / size)) + 1) if middle_us > 0 else 1
    return ColumnUnit(name=name, us=size, decimals=min(3, max(0, _DIGITS - whole_digits)))
