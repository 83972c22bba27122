"""Contradictions between the figures of one measurement, which imports, merges and `verify` refuse."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tunebench._figure import significant
from tunebench.outcome import Measured, Outcome, Predicted

__all__ = ["contradictions"]

SHORTEST_US = 1e-3
"""Shortest time that a record may have, in microseconds: no clock resolves less, and no kernel is faster."""


def contradictions(outcome: Outcome, bound_us: float | None) -> Iterator[str]:
    """Yield why the figures of an outcome cannot all be true.

    Args:
        outcome: The outcome.
        bound_us: Its lower bound, in microseconds; None if unknown.
    """
    if isinstance(outcome, Measured):
        ranges = {"samples": (min(outcome.samples_us), max(outcome.samples_us)), "interval": outcome.ci_us}
        yield from _time_contradictions("median", outcome.median_us, ranges)
        if bound_us is not None and outcome.median_us < bound_us:
            median, bound = significant(outcome.median_us, 6), significant(bound_us, 6)
            yield f"its median of {median} us is below its lower bound of {bound} us"
        worst = outcome.verification.worst
        if worst is not None and not worst <= 1:
            yield f"it counts as measured with an error of {significant(worst, 6)} times the tolerance"
    elif isinstance(outcome, Predicted):
        interval = {} if outcome.interval_us is None else {"interval": outcome.interval_us}
        yield from _time_contradictions("predicted time", outcome.predicted_us, interval)


def _time_contradictions(name: str, us: float, ranges: Mapping[str, tuple[float, float]]) -> Iterator[str]:
    time = significant(us, 6)
    if us < SHORTEST_US:
        yield f"its {name} is {time} us, below the shortest possible time of {significant(SHORTEST_US)} us"
    for figure, (low_us, high_us) in ranges.items():
        if not low_us <= us <= high_us:
            interval = f"{significant(low_us, 6)} to {significant(high_us, 6)} us"
            yield f"its {name} of {time} us is outside of its {figure}, {interval}"
