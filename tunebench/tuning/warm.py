"""Warm starts: records of the same configurations on other devices, or of related workloads.

They are hints. If most configurations are recorded elsewhere, their times become a column of the surrogate,
which learns how this device differs. If only few are recorded, the best of them are tried first: in recorded
spaces with 50 or 200 known configurations of another device, this found faster configurations than a column
with gaps. Predictions and times of another cache state are ignored.
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

__all__ = ["FARTHEST", "RELATED", "WarmStart", "WarmStartSource", "distance", "warm_starts"]

LEAST_TIMED = 20
"""Timed configurations of this workload elsewhere below which related workloads are used as well."""

LEAST_KNOWN = 0.5
"""Fraction of the configurations that must be recorded elsewhere to become a column of the surrogate."""

MOST_PLACES = 4
"""Limit on the devices from which a variant is warm-started."""

RELATED = 2
"""Limit on the related workloads, used if this workload was not tuned elsewhere."""

FARTHEST = 3.0
"""Largest distance of a related workload: three doublings of one dimension, or a mix of several."""

FUSION = 1.0
"""Distance of workloads of which one has another fused operation, such as a residual, in doublings."""

FIRST = 5
"""Number of best configurations elsewhere to try first."""


Use = Literal["expected", "tried first"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartSource:
    """Records of one device and workload that warm-start the search of one variant.

    Attributes:
        variant: Key of the variant.
        device: Key of the device of the records.
        workload: Workload of the records.
        records: Number of configurations in the current space that were timed or failed there.
        use: Whether they are a column of expected times, or their best are tried first.
    """

    variant: str
    device: str
    workload: str
    records: int
    use: Use


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStart:
    """The warm start of one variant; empty without records.

    Attributes:
        elsewhere_us: Columns of expected times, in microseconds: infinite for a failure, NaN if unknown.
        first: Configurations to try first.
        sources: The records used.
    """

    elsewhere_us: tuple[NDArray[np.float64], ...] = ()
    first: tuple[Config, ...] = ()
    sources: tuple[WarmStartSource, ...] = ()


def warm_starts(
    reader: Reader,
    workload: Workload,
    device: Device,
    tables: Mapping[str, Table],
    *,
    cache: CacheState,
    learns: bool = True,
) -> dict[str, WarmStart]:
    """Return the warm start of each variant.

    Records of the same workload on other devices of the same kind, or of an earlier source on this device,
    come first; without them, the nearest workloads of the same dtypes, on any device of that kind.

    Args:
        reader: The database.
        workload: The workload.
        device: The device to tune on.
        tables: Current configurations of each variant, by its key.
        cache: Cache state of the measurements.
        learns: Whether the search uses columns of expected times.

    Returns:
        The warm start of each variant, by its key.
    """
    present = (device.key, str(workload))
    spaces = reader.measured_spaces(workload.operator, tuple(tables), kind=device.kind, exclude=present)
    ranked = _ranked(spaces, workload, device)
    starts = {}
    for variant, table in tables.items():
        near = [space for space in ranked if space.variant == variant]
        read = functools.partial(_known, reader, table=table, cache=cache, exclude=present)
        starts[variant] = _start(near, read, str(workload), learns=learns)
    return starts


def _ranked(spaces: Sequence[MeasuredSpace], workload: Workload, device: Device) -> list[MeasuredSpace]:
    """Return the places within `FARTHEST`: by nearest workload, most similar device, most records."""
    apart = {text: _distance(workload, text) for text in {space.workload for space in spaces}}
    near = [space for space in spaces if apart[space.workload] <= FARTHEST]
    return sorted(
        near,
        key=lambda space: (
            apart[space.workload],
            space.device != device.key,
            space.architecture != device.architecture,
            -space.count,
            space.device,
        ),
    )


def _distance(workload: Workload, text: str) -> float:
    """Return the distance of a workload and a text, infinite if it is no valid workload."""
    try:
        return distance(workload, parse(text))
    except InputError:
        return math.inf


def distance(workload: Workload, compared: Workload) -> float:
    """Return the Euclidean distance of two workloads in the logarithm (base 2) of their sizes.

    Args:
        workload: The first workload.
        compared: The second.

    Returns:
        The distance; a fused operation counts `FUSION`, and real numbers such as an eps are ignored. Infinity
        if any other field differs.
    """
    if type(compared) is not type(workload):
        return math.inf
    squares = 0.0
    for field in dataclasses.fields(workload):
        mine, theirs = getattr(workload, field.name), getattr(compared, field.name)
        if mine == theirs or isinstance(mine, float):
            continue
        if field.name in workload.allowed_changes.fusions:
            squares += FUSION**2
            continue
        if not (_is_size(mine) and _is_size(theirs)):
            return math.inf
        squares += math.log2(mine / theirs) ** 2
    return math.sqrt(squares)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


@dataclass(frozen=True, slots=True)
class _Known:
    """A measured space with its times of the current configurations; NaN if it has none, inf if it failed."""

    place: MeasuredSpace
    times_us: NDArray[np.float64]
    best: tuple[Config, ...]

    @property
    def timed(self) -> int:
        """Number of configurations with a time."""
        return int(np.isfinite(self.times_us).sum())

    @property
    def records(self) -> int:
        """Number of configurations with a time or a failure."""
        return int((~np.isnan(self.times_us)).sum())

    @property
    def enough(self) -> bool:
        """Whether related workloads are unnecessary."""
        return self.timed >= LEAST_TIMED

    @property
    def is_column(self) -> bool:
        """Whether the times become a column of the surrogate."""
        return self.enough and self.records >= LEAST_KNOWN * len(self.times_us)

    def source(self, use: Use) -> WarmStartSource:
        """Return this space as a source of a warm start."""
        return WarmStartSource(
            variant=self.place.variant,
            device=self.place.device,
            workload=self.place.workload,
            records=self.records,
            use=use,
        )


def _known(
    reader: Reader, space: MeasuredSpace, *, table: Table, cache: CacheState, exclude: tuple[str, str]
) -> _Known:
    times_us = np.full(len(table), np.nan)
    for config, took_us in reader.config_times(space, cache=cache, exclude=exclude):
        row = table.row(config)
        # A space of an earlier version may have configurations that the current one lacks.
        if row is not None:
            times_us[row] = took_us
    fastest = np.argsort(times_us)[:FIRST]  # NaN last
    return _Known(space, times_us, tuple(table.config(int(row)) for row in fastest if times_us[row] < np.inf))


def _start(
    spaces: Sequence[MeasuredSpace], read: Callable[[MeasuredSpace], _Known], workload: str, *, learns: bool
) -> WarmStart:
    """Choose places, nearest first: of this workload, else related workloads with enough times."""
    same = [space for space in spaces if space.workload == workload]
    chosen = [source for source in map(read, same[:MOST_PLACES]) if source.timed]
    if not any(source.enough for source in chosen):
        # A generator: reading a space takes a query, and only the nearest with enough times are read.
        related = (read(p) for p in spaces if p.workload != workload and p.count >= LEAST_TIMED)
        chosen += itertools.islice((source for source in related if source.enough), RELATED)
    # A sparse column would teach the surrogate little; its best are tried first instead.
    columns = [source.is_column and learns for source in chosen]
    first = (source.best for source, column in zip(chosen, columns, strict=True) if not column)
    return WarmStart(
        elsewhere_us=tuple(itertools.compress((source.times_us for source in chosen), columns)),
        first=tuple(dict.fromkeys(itertools.chain.from_iterable(first))),
        sources=tuple(
            source.source("expected" if column else "tried first")
            for source, column in zip(chosen, columns, strict=True)
        ),
    )
