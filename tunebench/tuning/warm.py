"""What is known beforehand: times of the same configurations on other devices, or for other sizes.

They are hints. A column of them tells the sampler what to expect, up to a factor, and it finds out by asking
how this device differs. Where a search has left but a few of them, only the best are tried first: searches of
recorded spaces that knew 50 or 200 configurations of another device found more by that than by a column
with gaps. Predictions and times of another cache state never count.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tunebench.db.reader import Reader
from tunebench.db.record import MeasuredSpace
from tunebench.device import Device
from tunebench.errors import InputError
from tunebench.outcome import CacheState
from tunebench.space import Config, Table
from tunebench.workload import Workload
from tunebench.workloads import parse

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Source", "WarmStart", "distance", "warm_starts"]

LEAST_TIMED = 20
"""Configurations that must have been timed at a place, or related problems are looked at as well."""

LEAST_KNOWN = 0.5
"""Share of the configurations that a place must know to tell what to expect."""

MOST_PLACES = 4
"""Places a variant learns from at most."""

RELATED = 2
"""Other problems a variant learns from at most, if nobody has tuned this one elsewhere."""

FARTHEST = 3.0
"""How far a related problem may be: three doublings of one dimension, or as many spread over several."""

FIRST = 5
"""How many of the best of a place are tried first."""


Use = Literal["expected", "tried first"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Records of one place that a search of one variant begins with.

    Attributes:
        variant: Key of the variant.
        device: Key of the device they are from.
        workload: The problem they are of.
        records: Configurations of today's space that were timed or failed there.
        use: Whether they say what to expect of each configuration, or the best of them are just tried first.
    """

    variant: str
    device: str
    workload: str
    records: int
    use: Use


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStart:
    """What a search of one variant begins with; nothing, if nothing is known.

    Attributes:
        elsewhere_us: A column a place that tells what to expect: microseconds, infinite for a failure, NaN
            where it is not known.
        first: What was fastest at the other places.
        sources: Where it is from.
    """

    elsewhere_us: tuple[NDArray[np.float64], ...] = ()
    first: tuple[Config, ...] = ()
    sources: tuple[Source, ...] = ()


def warm_starts(
    reader: Reader,
    problem: Workload,
    device: Device,
    tables: Mapping[str, Table],
    *,
    cache: CacheState,
    learns: bool = True,
) -> dict[str, WarmStart]:
    """Return what searches of some variants may begin with.

    What is sought first is the same problem on other devices of the same kind, or here by an earlier source;
    without that, the nearest problems of the same types, here or on other devices.

    Args:
        reader: Of the database.
        problem: The problem.
        device: Where it is to be tuned.
        tables: Today's configurations of each variant, by its key.
        cache: Cache state that will be timed in.
        learns: Whether the search can make use of more than the best.
    """
    here = (device.key, str(problem))
    places = reader.measured_spaces(problem.operator, tuple(tables), kind=device.kind, exclude=here)
    ranked = _ranked(places, problem, device)
    starts = {}
    for variant, table in tables.items():
        near = [place for place in ranked if place.variant == variant]
        read = functools.partial(_known, reader, table=table, cache=cache, here=here)
        starts[variant] = _start(near, read, str(problem), learns=learns)
    return starts


def _ranked(places: Sequence[MeasuredSpace], problem: Workload, device: Device) -> list[MeasuredSpace]:
    """Return the places near enough: nearest problem first, then the most alike device, then most records."""
    apart = {text: distance(problem, text) for text in {place.workload for place in places}}
    near = [place for place in places if apart[place.workload] <= FARTHEST]
    return sorted(
        near,
        key=lambda place: (
            apart[place.workload],
            place.device != device.key,
            place.architecture != device.architecture,
            -place.count,
            place.device,
        ),
    )


def distance(problem: Workload, text: str) -> float:
    """Return how many doublings lie between two problems of one operator, as the crow flies.

    Args:
        problem: The one.
        text: The other.

    Returns:
        Infinity if they differ in anything but sizes and real numbers (an eps), which count for nothing, or
        if the text is of no problem there is today.
    """
    try:
        other = parse(text)
    except InputError:
        return math.inf
    if type(other) is not type(problem):
        return math.inf
    squares = 0.0
    for field in dataclasses.fields(problem):
        mine, theirs = getattr(problem, field.name), getattr(other, field.name)
        if mine == theirs or isinstance(mine, float):
            continue
        if not (_is_size(mine) and _is_size(theirs)):
            return math.inf
        squares += math.log2(mine / theirs) ** 2
    return math.sqrt(squares)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


@dataclass(frozen=True, slots=True)
class _Known:
    """A place with what today's rows took there."""

    place: MeasuredSpace
    times_us: NDArray[np.float64]
    best: tuple[Config, ...]

    @property
    def timed(self) -> int:
        return int(np.isfinite(self.times_us).sum())

    @property
    def records(self) -> int:
        return int((~np.isnan(self.times_us)).sum())

    @property
    def enough(self) -> bool:
        """Whether no other problems need to be looked at."""
        return self.timed >= LEAST_TIMED

    @property
    def tells(self) -> bool:
        """Whether it says what to expect of each configuration."""
        return self.enough and self.records >= LEAST_KNOWN * len(self.times_us)

    def source(self, use: Use) -> Source:
        return Source(
            variant=self.place.variant,
            device=self.place.device,
            workload=self.place.workload,
            records=self.records,
            use=use,
        )


def _known(
    reader: Reader, place: MeasuredSpace, *, table: Table, cache: CacheState, here: tuple[str, str]
) -> _Known:
    times_us = np.full(len(table), np.nan)
    for config, took_us in reader.config_times(place, cache=cache, exclude=here):
        row = table.row(config)
        if row is not None:
            times_us[row] = took_us
    fastest = np.argsort(times_us)[:FIRST]  # NaN last
    return _Known(place, times_us, tuple(table.config(int(row)) for row in fastest if times_us[row] < np.inf))


def _start(
    places: Sequence[MeasuredSpace], read: Callable[[MeasuredSpace], _Known], problem: str, *, learns: bool
) -> WarmStart:
    """Choose among places, nearest first: this problem's, or else related ones that know enough."""
    same = [place for place in places if place.workload == problem]
    chosen = [one for one in map(read, same[:MOST_PLACES]) if one.timed]
    if not any(one.enough for one in chosen):
        related = (read(p) for p in places if p.workload != problem and p.count >= LEAST_TIMED)
        chosen += itertools.islice((one for one in related if one.enough), RELATED)
    told = [one.tells and learns for one in chosen]
    first = (one.best for one, tells in zip(chosen, told, strict=True) if not tells)
    return WarmStart(
        elsewhere_us=tuple(itertools.compress((one.times_us for one in chosen), told)),
        first=tuple(dict.fromkeys(itertools.chain.from_iterable(first))),
        sources=tuple(
            one.source("expected" if tells else "tried first")
            for one, tells in zip(chosen, told, strict=True)
        ),
    )
