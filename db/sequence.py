"""Order of measurements from two databases: each keeps its own order, and clocks decide between them.

Ids decide which measurement of a trial is the newest, because a clock may be set back or be wrong by years.
Merged measurements therefore get ids at their place in the order. A measurement was made no later than those
recorded after it in the same database, and no later than now, whatever its clock said.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

__all__ = ["IncomingMeasurement", "MergedIds", "interleave"]


@dataclass(frozen=True, slots=True)
class IncomingMeasurement:
    """A measurement that is merged.

    Attributes:
        id: Its id in the source.
        recorded_at: Time of the measurement.
        after: Target id of the last measurement before it in the source that the target already contains; or
            0.
    """

    id: int
    recorded_at: datetime
    after: int


@dataclass(frozen=True, slots=True)
class MergedIds:
    """New ids that ascend in the order of recording.

    Attributes:
        moved: New id of each measurement of the target that follows a merged one, by its old id.
        arrived: Target id of each merged measurement, by its source id.
    """

    moved: dict[int, int]
    arrived: dict[int, int]


def interleave(
    present: Sequence[tuple[int, datetime]], arrivals: Sequence[IncomingMeasurement], free: int, now: datetime
) -> MergedIds:
    """Return the ids under which two sequences of measurements become one.

    Args:
        present: Ids and times of the target's measurements, in order.
        arrivals: Measurements to merge, in order.
        free: First unused id; all greater ids are unused.
        now: Current time.
    """
    moved: dict[int, int] = {}
    arrived: dict[int, int] = {}
    for arrival, id_ in _in_order(present, arrivals, now):
        if arrival is not None:
            arrived[arrival.id] = free
        elif arrived:
            moved[id_] = free
        else:
            continue  # measurements before the first merged one keep their ids
        free += 1
    return MergedIds(moved, arrived)


def _in_order(
    present: Sequence[tuple[int, datetime]], arrivals: Sequence[IncomingMeasurement], now: datetime
) -> Iterator[tuple[IncomingMeasurement | None, int]]:
    latest_arrivals = _latest_possible((arrival.recorded_at for arrival in arrivals), now)
    latest_here = _latest_possible((recorded_at for _, recorded_at in present), now)
    position = 0
    for (id_, _), latest in zip(present, latest_here, strict=True):
        while (
            position < len(arrivals) and arrivals[position].after < id_ and latest_arrivals[position] < latest
        ):
            yield arrivals[position], 0
            position += 1
        yield None, id_
    for arrival in arrivals[position:]:
        yield arrival, 0


def _latest_possible(moments: Iterable[datetime], now: datetime) -> list[datetime]:
    """Return the latest possible time of each measurement of a sequence."""
    backwards = [now, *reversed(list(moments))]
    return list(itertools.accumulate(backwards, min))[:0:-1]
