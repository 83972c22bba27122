"""Numbers as text for people."""

from __future__ import annotations

from decimal import Decimal

__all__ = ["duration", "ratio", "significant"]


def significant(value: float, digits: int = 4) -> str:
    """Return a number with some significant digits, without an exponent from 1e-12 to 1e15.

    Args:
        value: The number.
        digits: Number of significant digits.
    """
    text = f"{value:.{digits}g}"
    return f"{Decimal(text):f}" if "e" in text and 1e-12 <= abs(value) < 1e15 else text


def duration(us: float) -> str:
    """Return a duration with a readable unit, from microseconds."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if abs(us) >= 10 * size:
            return f"{significant(us / size)} {unit}"
    return f"{significant(us)} us"


def ratio(value: float) -> str:
    """Return a ratio with two decimals from 0.1 to 100, two significant digits below, and none above."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if abs(value) >= 0.1 else significant(value, 2)
