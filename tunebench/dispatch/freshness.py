"""Whether what was chosen still stands: choices are made anew when answers may have changed."""

from __future__ import annotations

from tunebench import answer

__all__ = ["forget", "generation"]

_forgotten = 0


def generation() -> int:
    """Return a number that changes when answers may have changed; it costs a look at the clock."""
    return answer.generation() + _forgotten


def forget() -> None:
    """Have every choice made anew, now: for whoever has just changed what they depend on."""
    global _forgotten
    _forgotten += 2**40  # no number that was returned before can come again
