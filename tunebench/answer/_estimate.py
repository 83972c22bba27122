"""What to expect of a problem that nobody timed: from its neighbours, other architectures, or the model.

A record of a neighbour tells what its configuration took there. What it takes here is taken to be that, times
what the model says the same configuration takes here over what it says of there: where the model is wrong, it
is wrong alike in both, so that only the differences between the two problems rest on it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tunebench.answer._answer import Answer, BaselineComparison
from tunebench.answer._reader import AnswerReader, AnswerRow
from tunebench.answer._target import LookupTarget
from tunebench.bound import bound
from tunebench.device import Device
from tunebench.errors import InputError, TunebenchError
from tunebench.forecast import interval_us, predict_us
from tunebench.kernels import variant as find_variant
from tunebench.kernels import variants
from tunebench.outcome import CacheState
from tunebench.space import Config, Table
from tunebench.variant import Variant
from tunebench.workload import Workload
from tunebench.workloads import parse

__all__ = ["DOUBLING_MARGIN", "NEAREST_COUNT", "best_neighbour", "default_answer"]

NEAREST_COUNT = 6
"""So many problems, the nearest ones, name candidates."""

MAX_TRIED = 8 * NEAREST_COUNT
"""So many are asked at most, where records of near ones cannot be used."""

DOUBLING_MARGIN = 1.1
"""What is inferred from a problem twice as large is doubted by so much: it must promise more than a nearer
one, and the interval in which it beats a library is so much wider. A choice, not a measurement.
"""

LAYOUT_DISTANCE = 1.0
"""What a fused operation or a layout that differs counts for, in doublings."""


@dataclass(frozen=True, slots=True)
class _NeighbourRecord:
    """A record of another problem or device, and what is expected of its configuration here."""

    view: AnswerReader
    row: AnswerRow
    distance: float
    expected_us: float
    bound_us: float

    @property
    def rank(self) -> float:
        return float(self.expected_us * DOUBLING_MARGIN**self.distance)


def best_neighbour(
    problem: Workload,
    device: Device,
    target: LookupTarget,
    views: Sequence[AnswerReader],
    variant: str | None,
    *,
    here: bool,
) -> Answer | None:
    """Return the best of what was timed for near problems; None if nothing is of use.

    Args:
        problem: What is to be computed.
        device: Where.
        target: The same, as records are chosen by.
        views: Databases, those first that come first.
        variant: Key of the only variant to consider.
        here: Whether on this architecture, or on all others.

    Raises:
        DatabaseError: if a database cannot be read.
    """
    near = [(view, *found) for view in views for found in _comparable_workloads(problem, view)]
    near.sort(key=lambda found: found[1])
    found = list(_neighbour_records(problem, device, target, near, variant, here=here))
    best = min(found, key=lambda candidate: candidate.rank, default=None)
    return None if best is None else _answer(problem, target, best, here=here)


def default_answer(problem: Workload, device: Device, variant: str | None, database: str) -> Answer:
    """Return the default configuration that the model expects to be fastest.

    Raises:
        InputError: if no variant can do the problem there, saying why for each.
    """
    refused, found = [], []
    for one in variants(problem):
        if variant not in (None, one.key):
            continue
        try:
            reason = one.refuses(problem, device)
            if reason is None:
                found.append(_default(one, problem, device, database))
                continue
        except TunebenchError as error:
            reason = str(error)
        refused.append(reason)
    if not found:
        reasons = "; ".join(refused) or f"{variant or problem.operator} has no variants that are installed"
        raise InputError(f"no variant can do {problem} on {device.name}: {reasons}")
    return min(found, key=lambda answer: answer.expected_us)


def _default(variant: Variant[Any], problem: Workload, device: Device, database: str) -> Answer:
    config = variant.space.check(variant.default(problem, device), workload=problem, device=device)
    forecast = _forecast(variant, config, problem, device, "cold")
    return Answer(
        workload=str(problem),
        device=device.key,
        how="predicted",
        because="nothing like it was timed: the default that is expected to be fastest",
        variant=variant.key,
        config=config,
        expected_us=forecast.us,
        interval_us=forecast.interval_us,
        ci_us=None,
        bound_us=forecast.bound_us,
        cache=None,
        verification="not verified",
        revision=variant.revision(problem, config),
        recorded_at=None,
        database=database,
    )


# -- how near --------------------------------------------------------------------------------------


def _comparable_workloads(problem: Workload, view: AnswerReader) -> Iterator[tuple[float, str, str]]:
    """Yield every problem of a database that is comparable: its distance, the device, its text."""
    for device, text in view.problems(problem.operator):
        other = _parsed(text)
        distance = _distance(problem, other) if other is not None else None
        if distance is not None:
            yield distance, device, text


@functools.lru_cache(maxsize=1 << 16)
def _parsed(text: str) -> Workload | None:
    """Return a workload; None for one that another version wrote and this one refuses."""
    try:
        return parse(text)
    except InputError:
        return None


def _distance(one: Workload, other: Workload) -> float | None:
    """Return how many doublings of sizes apart two problems are; None if they are not comparable.

    Sizes count by the logarithm of their ratio, as lengths of a vector do. What is fused, and layouts, may
    differ; real numbers, such as an eps, are no sizes and count for nothing.
    """
    allowed_changes = one.allowed_changes
    squares = 0.0
    for name in one.dimensions():
        mine, its = getattr(one, name), getattr(other, name)
        if mine == its:
            continue
        if isinstance(mine, int) and not isinstance(mine, bool):
            squares += math.log2((mine + 1) / (its + 1)) ** 2  # a padding may be 0
        elif isinstance(mine, float):
            continue
        elif name in allowed_changes.fusions or name in allowed_changes.layouts:
            squares += LAYOUT_DISTANCE**2
        else:
            return None
    return math.sqrt(squares)


# -- what to expect --------------------------------------------------------------------------------


def _neighbour_records(
    problem: Workload,
    device: Device,
    target: LookupTarget,
    near: Iterable[tuple[AnswerReader, float, str, str]],
    variant: str | None,
    *,
    here: bool,
) -> Iterator[_NeighbourRecord]:
    """Yield what may be served, from the nearest problems that have anything to offer."""
    offering: set[str] = set()
    tried: set[str] = set()
    for view, distance, key, text in near:
        if (key.partition(":")[0] == target.architecture) is not here:
            continue
        tried.add(text)
        if (text not in offering and len(offering) == NEAREST_COUNT) or len(tried) > MAX_TRIED:
            return
        for row in view.rows(text, target, variant, elsewhere=not here):
            if row.device == key and not row.predicted:
                candidate = _neighbour_record(view, row, distance, problem, device)
                if candidate is not None:
                    offering.add(text)
                    yield candidate


def _neighbour_record(
    view: AnswerReader, row: AnswerRow, distance: float, problem: Workload, device: Device
) -> _NeighbourRecord | None:
    """Return a record as a candidate; None if its configuration cannot run here or its source has changed."""
    source = _parsed(row.workload)
    try:
        variant = find_variant(row.variant)
        if source is None or variant.refuses(problem, device) is not None:
            return None
        config = variant.space.check(row.config, workload=problem, device=device)
        if variant.revision(source, config) != row.revision:
            return None
        here = _forecast(variant, config, problem, device, row.cache or "cold")
        there = _forecast(variant, config, source, _device_of(view, row) or device, row.cache or "cold")
    except TunebenchError:
        return None
    expected_us = max(here.bound_us, row.time_us * here.us / there.us)
    return _NeighbourRecord(view, row, distance, expected_us, here.bound_us)


def _device_of(view: AnswerReader, row: AnswerRow) -> Device | None:
    """Return the device of a record; None if its description is of another version."""
    descriptor = view.descriptor(row.device)
    try:
        return Device(**descriptor) if descriptor is not None else None
    except (TypeError, InputError):
        return None


@dataclass(frozen=True, slots=True)
class _Forecast:
    us: float
    interval_us: tuple[float, float]
    bound_us: float


def _forecast(
    variant: Variant[Any], config: Config, problem: Workload, device: Device, cache: CacheState
) -> _Forecast:
    """Return what the model expects of one configuration."""
    table = Table(variant.space, np.array([variant.space.ordinals(config)], dtype=np.int16))
    costs = variant.costs(problem, table, device)
    bounds = bound(costs, problem.traffic(), device, cache=cache, rows=1)
    expected = predict_us(bounds, costs, device)
    low, high = interval_us(expected, bounds)
    return _Forecast(float(expected[0]), (float(low[0]), float(high[0])), float(bounds.us[0]))


def _answer(problem: Workload, target: LookupTarget, best: _NeighbourRecord, *, here: bool) -> Answer:
    row = best.row
    same = row.workload == str(problem)
    what = "this problem" if same else row.workload
    doubt: Callable[[BaselineComparison], BaselineComparison] = lambda versus: dataclasses.replace(  # noqa: E731
        versus,
        low=versus.low / DOUBLING_MARGIN**best.distance,
        high=None if versus.high is None else versus.high * DOUBLING_MARGIN**best.distance,
    )
    baselines = best.view.baselines(row) if row.device == target.key else {}
    return Answer(
        workload=str(problem),
        device=target.key,
        how="neighbour" if here else "other architecture",
        because=f"{what} took {row.time_us:.2f} us on {row.device}; the rest is the model's",
        variant=row.variant,
        config=row.config,
        expected_us=best.expected_us,
        ci_us=None,
        bound_us=best.bound_us,
        cache=row.cache,
        verification=row.verification,
        revision=row.revision,
        recorded_at=row.recorded_at,
        database=str(best.view.location),
        baselines={name: doubt(versus) for name, versus in baselines.items()},
    )
