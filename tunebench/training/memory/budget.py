"""Memory budgets as text."""

from __future__ import annotations

import re
from decimal import ROUND_CEILING, Context, Decimal
from typing import Any

from tunebench._figure import significant
from tunebench.errors import InputError

__all__ = ["budget_bytes", "size_bytes", "size_text"]

_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[KMGT]?i?B)", re.IGNORECASE | re.ASCII)
_SHARE = re.compile(r"(\d+(?:\.\d+)?)\s*%", re.ASCII)


def budget_bytes(budget: int | str, whole_bytes: int) -> int:
    """Return a budget in bytes.

    Args:
        budget: Bytes, a text such as ``24GB`` (1e9) or ``24GiB`` (2**30), or a percentage such as ``80%``.
        whole_bytes: Bytes of which a percentage is taken.

    Raises:
        InputError: The budget is not a positive size, or a percentage above 100.
    """
    share = _SHARE.fullmatch(budget.strip()) if isinstance(budget, str) else None
    if share is not None and (percent := float(share[1])) > 0:
        if percent > 100:
            raise InputError(f"budget {budget!r} is above the peak without a plan: expected at most 100%")
        return int(percent / 100 * whole_bytes)
    size = _bytes(budget)
    if size is None:
        raise InputError(
            f"budget {budget!r} is no size: expected a size above 0 such as 24GB, 24GiB or 500MB, or a "
            "share of the peak without a plan, such as 80%"
        )
    return size


def size_bytes(size: int | str, name: str) -> int:
    """Return a size in bytes.

    Args:
        size: Bytes, or a text such as ``24GB`` (1e9) or ``24GiB`` (2**30).
        name: What has this size, for the message.

    Raises:
        InputError: It is not a positive size.
    """
    nbytes = _bytes(size)
    if nbytes is None:
        raise InputError(f"{name} {size!r} is no size: expected a size above 0 such as 24GB, 24GiB or 500MB")
    return nbytes


def _bytes(size: Any) -> int | None:
    """Return a positive size in bytes; none if it is not one."""
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    match = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    if match is None or not 0 < float(match["number"]) < 1e30:
        return None
    base = 1024 if "I" in match["unit"].upper() else 1000
    return int(float(match["number"]) * base ** "BKMGT".index(match["unit"][0].upper()))


def size_text(size_bytes: float, *, up: bool = False) -> str:
    """Return bytes with a readable unit, such as ``24.31 GB``; a GB has 1e9 bytes.

    Args:
        size_bytes: The bytes.
        up: Whether to round up, so that the text as a budget has at least these bytes.
    """
    for name, unit in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= unit:
            value = _UP.divide(Decimal(size_bytes), Decimal(unit)) if up else size_bytes / unit
            return f"{significant(float(value))} {name}"
    return f"{size_bytes:.0f} bytes"


_UP = Context(prec=4, rounding=ROUND_CEILING)
