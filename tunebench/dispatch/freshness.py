"""Generation of answers: choices are repeated when it changes."""

from __future__ import annotations

from tunebench import answer

__all__ = ["forget", "generation"]

_forgotten = 0


def generation() -> int:
    """Return a number that changes when answers may have changed; it costs a clock reading."""
    return answer.generation() + _forgotten


def forget() -> None:
    """Repeat every choice at its next use, after a change of anything it depends on."""
    global _forgotten
    _forgotten += 2**40  # greater than any generation returned before
