"""Optimality gap after each trial of a search, from its records and the bounds of its search spaces."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tunebench.db.record import Record
from tunebench.outcome import time_us
from tunebench.search.optimality_proof import ConfigStatus, config_status
from tunebench.space import Config, Table

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    SpaceBounds = Mapping[str, tuple[Table, NDArray[np.float64]]]

__all__ = ["optimality_gaps"]

CLOSED = (ConfigStatus.TIMED, ConfigStatus.IMPOSSIBLE)


def optimality_gaps(records: Sequence[Record], spaces: SpaceBounds) -> tuple[float | None, ...]:
    """Return the best time so far over the lowest bound of an open configuration, after each record.

    A configuration is open as in `tunebench.search.optimality_proof`. The gap is 1 once no open configuration
    has a bound below the best time. Records of other variants than those of `spaces` have no bound: the gap
    is then that of the variants of `spaces`.

    Args:
        records: The records of one workload on one device, oldest first.
        spaces: Configurations and their lower bounds in microseconds, by `Variant.key`.

    Returns:
        The gaps; None before the first time, and from a violated bound on.
    """
    lowest = [
        (float(us), variant, row)
        for variant, (_, bounds_us) in spaces.items()
        for row, us in enumerate(bounds_us)
    ]
    heapq.heapify(lowest)
    rows: dict[tuple[str, Config], int | None] = {}
    closed: set[tuple[str, int]] = set()
    raised: dict[tuple[str, int], float] = {}
    found: list[float | None] = []
    best_us, trusted = math.inf, True
    for record in records:
        variant, outcome = record.key.variant, record.result.outcome
        trusted = trusted and not record.violates_bound
        best_us = min(best_us, time_us(outcome) or math.inf)
        if variant in spaces:
            key = (variant, record.key.config)
            if key not in rows:
                rows[key] = spaces[variant][0].row(record.key.config)
            row = rows[key]
            if row is not None and config_status(outcome) in CLOSED:
                closed.add((variant, row))
            elif row is not None and record.bound_us is not None:  # its binary may raise the bound
                raised[variant, row] = max(record.bound_us, raised.get((variant, row), 0.0))
        _drop(lowest, closed, raised)
        floor_us = min(lowest[0][0], best_us) if lowest else best_us
        found.append(best_us / floor_us if trusted and math.isfinite(best_us) and floor_us > 0 else None)
    return tuple(found)


def _drop(
    lowest: list[tuple[float, str, int]],
    closed: set[tuple[str, int]],
    raised: Mapping[tuple[str, int], float],
) -> None:
    """Remove closed configurations from the front of a heap, and put raised bounds in their place."""
    while lowest:
        us, variant, row = lowest[0]
        if (variant, row) in closed:
            heapq.heappop(lowest)
        elif raised.get((variant, row), 0.0) > us:
            heapq.heapreplace(lowest, (raised[variant, row], variant, row))
        else:
            return
