"""Numbers as text for people."""

from __future__ import annotations

from decimal import Decimal

__all__ = ["duration", "significant"]


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
