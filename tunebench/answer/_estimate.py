"""Answers for workloads that were not measured: from neighbours, other architectures, or the model.

The expected time of a neighbour's configuration is its measured time there, times the ratio of the model's
predictions for here and there. Errors of the model that both predictions share cancel out.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tunebench.answer._answer import Answer
from tunebench.answer._reader import AnswerReader, AnswerRow
from tunebench.answer._target import LookupTarget
from tunebench.bound import bound
from tunebench.db.figures import BaselineComparison
from tunebench.device import Device
from tunebench.errors import InputError, TunebenchError
from tunebench.forecast import predict_us
from tunebench.forecast.predicted_space import PredictedSpace, predicted_space
from tunebench.kernels import variant as find_variant
from tunebench.kernels import variants
from tunebench.measure.processor import with_stored_rates
from tunebench.outcome import CacheState
from tunebench.space import Config, Table
from tunebench.variant import Variant, exceeds_memory, unsuitable
from tunebench.workload import Workload
from tunebench.workloads import parse

__all__ = ["DOUBLING_MARGIN", "NEAREST_COUNT", "best_neighbour", "predicted_answer", "workload_distance"]

NEAREST_COUNT = 6
"""Number of nearest workloads that contribute candidates."""

MAX_TRIED = 8 * NEAREST_COUNT
"""Largest number of workloads that are tried if records of the nearest cannot be used."""

DOUBLING_MARGIN = 1.1
"""Margin per doubling of distance: a farther neighbour must be expected to be faster by this factor, and its
interval of the comparison with a baseline is wider by it. A choice, not a measurement.
"""

LAYOUT_DISTANCE = 1.0
"""Distance in doublings of a different fused operation or layout."""


@dataclass(frozen=True, slots=True)
class _NeighbourRecord:
    """A record of another workload or device, and the expected time of its configuration here."""

    view: AnswerReader
    row: AnswerRow
    distance: float
    expected_us: float
    bound_us: float

    @property
    def rank(self) -> float:
        """Expected time in microseconds, multiplied by a margin that grows with the distance."""
        return float(self.expected_us * DOUBLING_MARGIN**self.distance)


def best_neighbour(
    workload: Workload,
    device: Device,
    target: LookupTarget,
    views: Sequence[AnswerReader],
    variant: str | None,
    *,
    here: bool,
    accepts: Callable[[str, Config], bool] = lambda variant, config: True,
) -> Answer | None:
    """Return the best answer from measurements of near workloads; None if none can be used.

    Args:
        workload: The workload.
        device: The device.
        target: The same device, as records are selected.
        views: Databases, by priority.
        variant: Key of the only variant to consider.
        here: Use only this architecture (True), or only others (False).
        accepts: Whether a configuration of a variant, by its key, may be used.

    Raises:
        DatabaseError: if a database cannot be read.
    """
    near = [(view, *entry) for view in views for entry in _comparable_workloads(workload, view)]
    near.sort(key=lambda entry: entry[1])
    neighbours = _neighbour_records(workload, device, target, near, variant, here=here, accepts=accepts)
    best = min(neighbours, key=lambda candidate: candidate.rank, default=None)
    return None if best is None else _answer(workload, target, best, here=here)


def predicted_answer(
    workload: Workload,
    device: Device,
    variant: str | None,
    database: str,
    *,
    is_wrong: Callable[[str, Config], bool] = lambda variant, config: False,
    accepts: Callable[[str, Config], bool] = lambda variant, config: True,
) -> Answer | None:
    """Return the configuration with the shortest predicted time (see `PredictedSpace.unmeasured`).

    Args:
        workload: The workload.
        device: The device.
        variant: Key of the only variant to consider.
        database: Name of the database, for the answer.
        is_wrong: Whether a configuration of a variant, by its key, had a wrong result. A default is returned
            then; None if those of all variants are wrong, too.
        accepts: Whether a configuration of a variant, by its key, may be used. The fastest accepted one of
            each variant is considered.

    Raises:
        InputError: if no variant supports the workload on the device; the message lists the reasons.
    """
    reason = unsuitable(workload, device) or exceeds_memory(workload, device)
    if reason is not None:
        raise InputError(reason)
    device = with_stored_rates(device)
    refused, spaces = [], []
    for candidate in variants(workload):
        if variant not in (None, candidate.key) or not (candidate.is_predictable or variant):
            continue
        try:
            reason = candidate.refuses(workload, device)
            space = predicted_space(candidate, workload, device) if reason is None else None
            if space is not None:
                spaces.append(space)
                continue
        except TunebenchError as error:
            reason = str(error)
        refused.append(reason or f"{candidate.key} has no valid configuration for this workload")
    if not spaces:
        reasons = "; ".join(refused) or f"no installed variant matches {variant or workload.operator}"
        raise InputError(f"no variant supports {workload} on {device.name}: {reasons}")
    rows = [
        (space, row)
        for space in spaces
        for row in _rows_to_use(space, accepts)
        if not is_wrong(space.variant.key, space.table.config(row))
    ]
    if not rows:
        return None
    return _unmeasured(*min(rows, key=lambda pair: pair[0].predicted_us(pair[1])), database)


def _rows_to_use(space: PredictedSpace, accepts: Callable[[str, Config], bool]) -> list[int]:
    """Return the row to use unmeasured and that of the default, or else the fastest accepted row."""

    def is_accepted(row: int) -> bool:
        return accepts(space.variant.key, space.table.config(row))

    usual = [row for row in dict.fromkeys((space.unmeasured(), space.default_row)) if row is not None]
    accepted = list(filter(is_accepted, usual))
    if accepted:
        return accepted
    fastest_first = map(int, space.times_us.argsort(kind="stable"))
    return list(itertools.islice(filter(is_accepted, fastest_first), 1))


def _unmeasured(space: PredictedSpace, row: int, database: str) -> Answer:
    """Return the answer of a configuration of which nothing was measured."""
    config = space.table.config(row)
    kind = "default configuration" if row == space.default_row else "configuration"
    on_gpu = space.device.kind == "gpu"
    basis = "how its blocks execute" if on_gpu else "floors and a call, without an interval: tune it"
    return Answer(
        workload=str(space.workload),
        device=space.device.key,
        how="predicted",
        because=f"nothing comparable was measured: {kind} that is fastest by {basis}",
        variant=space.variant.key,
        config=config,
        expected_us=space.predicted_us(row),
        interval_us=space.interval_us(row),
        ci_us=None,
        bound_us=float(space.bounds.us[row]),
        cache=None,
        verification="not verified",
        revision=space.variant.revision(space.workload, config),
        recorded_at=None,
        database=database,
    )


# -- distance ----------------------------------------------------------------------------------------


def _comparable_workloads(workload: Workload, view: AnswerReader) -> Iterator[tuple[float, str, str]]:
    """Yield distance, device and text of every comparable workload of a database."""
    for device, text in view.workloads(workload.operator):
        compared = _parsed(text)
        distance = workload_distance(workload, compared) if compared is not None else None
        if distance is not None:
            yield distance, device, text


def _parsed(text: str) -> Workload | None:
    """Return a workload; None for one of another version that this version refuses."""
    try:
        return parse(text)
    except InputError:
        return None


def workload_distance(workload: Workload, compared: Workload) -> float | None:
    """Return the distance of two workloads in doublings of sizes; None if they are not comparable.

    The distance is Euclidean in the logarithms of the sizes. Fused operations and layouts may differ.
    Real-valued dimensions, such as an epsilon, do not count. Negative numbers must be equal.
    """
    allowed_changes = workload.allowed_changes
    squares = 0.0
    for name in workload.dimensions():
        mine, its = getattr(workload, name), getattr(compared, name)
        if mine == its:
            continue
        if isinstance(mine, int) and not isinstance(mine, bool) and min(mine, its) >= 0:
            squares += math.log2((mine + 1) / (its + 1)) ** 2  # a padding may be 0
        elif isinstance(mine, float):
            continue
        elif name in allowed_changes.fusions or name in allowed_changes.layouts:
            squares += LAYOUT_DISTANCE**2
        else:
            return None
    return math.sqrt(squares)


# -- expected times ----------------------------------------------------------------------------------


def _neighbour_records(
    workload: Workload,
    device: Device,
    target: LookupTarget,
    near: Iterable[tuple[AnswerReader, float, str, str]],
    variant: str | None,
    *,
    here: bool,
    accepts: Callable[[str, Config], bool],
) -> Iterator[_NeighbourRecord]:
    """Yield accepted candidates from the nearest workloads that have any."""
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
                candidate = _neighbour_record(view, row, distance, workload, device)
                if candidate is not None and accepts(row.variant, row.config):
                    offering.add(text)
                    yield candidate


def _neighbour_record(
    view: AnswerReader, row: AnswerRow, distance: float, workload: Workload, device: Device
) -> _NeighbourRecord | None:
    """Return a record as a candidate; None if it cannot run here or its source has changed."""
    source = _parsed(row.workload)
    try:
        variant = find_variant(row.variant)
        if source is None or variant.refuses(workload, device) is not None:
            return None
        config = variant.space.check(row.config, workload=workload, device=device)
        if variant.revision(source, config) != row.revision:
            return None
        target_forecast = _forecast(variant, config, workload, device, row.cache or "cold")
        source_forecast = _forecast(
            variant, config, source, _device_of(view, row) or device, row.cache or "cold"
        )
    except TunebenchError:
        return None
    expected_us = max(target_forecast.bound_us, row.time_us * target_forecast.us / source_forecast.us)
    return _NeighbourRecord(view, row, distance, expected_us, target_forecast.bound_us)


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
    bound_us: float


def _forecast(
    variant: Variant[Any], config: Config, workload: Workload, device: Device, cache: CacheState
) -> _Forecast:
    """Return the predicted time of a configuration."""
    table = Table(variant.space, np.array([variant.space.ordinals(config)], dtype=np.int16))
    costs = variant.costs(workload, table, device)
    traffic = workload.traffic()
    bounds = bound(costs, traffic, device, cache=cache, rows=1)
    expected = predict_us(bounds, costs, device, traffic, cache=cache)
    return _Forecast(float(expected[0]), float(bounds.us[0]))


def _answer(workload: Workload, target: LookupTarget, best: _NeighbourRecord, *, here: bool) -> Answer:
    row = best.row
    same = row.workload == str(workload)
    source = "this workload" if same else row.workload
    doubt: Callable[[BaselineComparison], BaselineComparison] = lambda versus: dataclasses.replace(  # noqa: E731
        versus,
        low=versus.low / DOUBLING_MARGIN**best.distance,
        high=None if versus.high is None else versus.high * DOUBLING_MARGIN**best.distance,
        time_us=None,
        ci_us=None,
        probability=None,
    )
    baselines = best.view.details(row).figures.baselines if row.device == target.key else {}
    return Answer(
        workload=str(workload),
        device=target.key,
        how="neighbour" if here else "other architecture",
        because=f"{source} took {row.time_us:.2f} us on {row.device}, scaled to this workload by the model",
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
