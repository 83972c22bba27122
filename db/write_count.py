"""Number of write transactions of this process: a lookup compares it to notice new records."""

from __future__ import annotations

__all__ = ["count_write", "writes"]

writes = 0
"""Transactions that wrote, in this process: `lookup` returns their records at once."""


def count_write() -> None:
    """Count one more transaction of this process."""
    global writes
    writes += 1
