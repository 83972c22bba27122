"""The order of measurements from two databases: each keeps its own, and between them the clock decides.

Which measurement of a trial is the newest is told by ids, since a clock may be set back or be wrong by
years; so what is merged in must get ids that stand where it belongs. Whatever its clock said, nothing was
recorded later than what was recorded after it in the same database, nor later than now.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

__all__ = ["IncomingMeasurement", "MergedIds", "interleave"]


@dataclass(frozen=True, slots=True)
class IncomingMeasurement:
    """A measurement that is merged in.

    Attributes:
        id: Its id where it comes from.
        recorded_at: When it was recorded.
        after: Id here of the last one that was recorded before it there, too, and is here already; or 0.
    """

    id: int
    recorded_at: datetime
    after: int


@dataclass(frozen=True, slots=True)
class MergedIds:
    """New ids, so that ids ascend in the order of recording.

    Attributes:
        moved: Of those here that come after one that arrives, by the id they have.
        arrived: Of those that arrive, by the id they have there.
    """

    moved: dict[int, int]
    arrived: dict[int, int]


def interleave(
    here: Sequence[tuple[int, datetime]], arrivals: Sequence[IncomingMeasurement], free: int, now: datetime
) -> MergedIds:
    """Return ids under which two sequences become one.

    Args:
        here: Ids and moments of those that are here, in their order.
        arrivals: Those that arrive, in theirs.
        free: The first id that is free; all above it are.
        now: The time.
    """
    moved: dict[int, int] = {}
    arrived: dict[int, int] = {}
    for arrival, id_ in _in_order(here, arrivals, now):
        if arrival is not None:
            arrived[arrival.id] = free
        elif arrived:
            moved[id_] = free
        else:
            continue  # what is before all that arrives stays as it is
        free += 1
    return MergedIds(moved, arrived)


def _in_order(
    here: Sequence[tuple[int, datetime]], arrivals: Sequence[IncomingMeasurement], now: datetime
) -> Iterator[tuple[IncomingMeasurement | None, int]]:
    latest_arrivals = _latest_possible((arrival.recorded_at for arrival in arrivals), now)
    latest_here = _latest_possible((recorded_at for _, recorded_at in here), now)
    place = 0
    for (id_, _), latest in zip(here, latest_here, strict=True):
        while place < len(arrivals) and arrivals[place].after < id_ and latest_arrivals[place] < latest:
            yield arrivals[place], 0
            place += 1
        yield None, id_
    for arrival in arrivals[place:]:
        yield arrival, 0


def _latest_possible(moments: Iterable[datetime], now: datetime) -> list[datetime]:
    """Return when each of a sequence was recorded at the latest."""
    backwards = [now, *reversed(list(moments))]
    return list(itertools.accumulate(backwards, min))[:0:-1]
