"""The optimality gap of a search, from the records of its workload and the lower bounds of its search spaces.

`tune` and `report` take the gap from here, so that both print the same one. Only current records of one cache
state count. Status and bounds are those of `tunebench.search.optimality_proof`.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tunebench.db.record import Record
from tunebench.outcome import (
    Aborted,
    CacheState,
    Measured,
    Pruned,
    Resources,
    time_us,
)
from tunebench.search.optimality_proof import (
    ConfigStatus,
    OptimalityProof,
    certify,
    config_status,
    is_impossible,
)
from tunebench.space import Config, Table
from tunebench.task import Task
from tunebench.tuning.audit import task_bound_us
from tunebench.tuning.known_outcome import is_suspect
from tunebench.tuning.tunable import TunableVariant
from tunebench.workload import Workload

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "BoundedSpace",
    "bound_ratio",
    "bound_ratios",
    "bounded_spaces",
    "optimality_gaps",
    "optimality_proof_of",
    "searched_variants",
]

CLOSED = (ConfigStatus.TIMED, ConfigStatus.IMPOSSIBLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundedSpace:
    """The configurations of one variant with their lower bounds.

    Attributes:
        table: The configurations.
        bounds_us: Lower bound of each before compiling, in microseconds, `(n,)`.
        refined_us: Returns the bound of a configuration with the resources of its binary; None if unknown.
    """

    table: Table
    bounds_us: NDArray[np.float64]
    refined_us: Callable[[Config, Resources], float] | None = None


def bounded_spaces(
    workload: Workload, tunable: Iterable[TunableVariant], cache: CacheState
) -> dict[str, BoundedSpace]:
    """Return the search spaces of variants, by `Variant.key`.

    Args:
        workload: The workload.
        tunable: The variants.
        cache: Cache state of the bounds.
    """

    def refined_us(searched: TunableVariant, config: Config, resources: Resources) -> float:
        task = Task(variant=searched.variant, workload=workload, config=config, device=searched.device)
        return task_bound_us(task, resources, cache=cache)

    return {
        searched.variant.key: BoundedSpace(
            table=searched.table,
            bounds_us=searched.bounds.us,
            refined_us=functools.partial(refined_us, searched),
        )
        for searched in tunable
    }


def searched_variants(searched: Sequence[str], records: Iterable[Record]) -> list[str]:
    """Return the variants that the optimality gap of a best record covers.

    Args:
        searched: `Figures.searched` of the best; records of earlier versions do not state it.
        records: The records of the workload, from which it is then taken.
    """
    return sorted(searched or {record.key.variant for record in records})


def optimality_proof_of(
    records: Iterable[Record], spaces: Mapping[str, BoundedSpace], best_us: float, cache: CacheState
) -> OptimalityProof:
    """Return the optimality proof of a best time among the configurations of some spaces.

    Args:
        records: The records of one workload on one device, oldest first.
        spaces: The spaces, by `Variant.key`.
        best_us: The best time, in microseconds; infinite without one.
        cache: Cache state of the best.
    """
    by_variant: dict[str, list[Record]] = {key: [] for key in spaces}
    for record in _counted(records, cache):
        if record.key.variant in by_variant:
            by_variant[record.key.variant].append(record)
    states = [_state(spaces[key], by_variant[key]) for key in spaces]
    return certify(
        np.concatenate([bounds_us for bounds_us, _ in states]),
        np.concatenate([statuses for _, statuses in states]),
        best_us,
    )


def _counted(records: Iterable[Record], cache: CacheState) -> Iterator[Record]:
    """Yield the current records that say something of a configuration in this cache state."""
    for record in records:
        outcome = record.result.outcome
        if not record.stale and getattr(outcome, "cache", cache) == cache and not is_suspect(outcome):
            yield record


def _state(space: BoundedSpace, records: Sequence[Record]) -> tuple[NDArray[np.float64], NDArray[np.int8]]:
    """Return bounds and statuses of a space; a violated bound makes all bounds of the variant zero."""
    bounds_us = np.array(space.bounds_us, dtype=np.float64)
    statuses = np.full(len(space.table), ConfigStatus.UNTRIED, dtype=np.int8)
    preferred: dict[int, Record] = {}
    trusted = True
    for record in records:
        row = space.table.row(record.key.config)
        if row is None:
            continue
        trusted = trusted and not _violates(space, row, record)
        earlier = preferred.get(row)
        if earlier is None or _precedence(record) >= _precedence(earlier):
            preferred[row] = record
    for row, record in preferred.items():
        outcome = record.result.outcome
        if not is_impossible(outcome, float(bounds_us[row])):
            statuses[row] = config_status(outcome)
        if statuses[row] not in CLOSED:
            bounds_us[row] = max(bounds_us[row], _raised_us(record))
    return (bounds_us if trusted else np.zeros_like(bounds_us)), statuses


def _precedence(record: Record) -> tuple[bool, bool, int]:
    """Return which record of a trial counts: as `Reader.trial_outcomes`, with which a search resumes."""
    return isinstance(record.result.outcome, Measured), record.purpose == "search", record.id


def _raised_us(record: Record) -> float:
    """Return the bound that is known since a configuration was compiled, in microseconds."""
    outcome = record.result.outcome
    return max(record.bound_us or 0.0, outcome.bound_us if isinstance(outcome, Pruned) else 0.0)


def _violates(space: BoundedSpace, row: int, record: Record) -> bool:
    """Return whether a run was faster than its bound, as `BoundAudit.check_stored` decides it."""
    outcome = record.result.outcome
    if not isinstance(outcome, Measured | Aborted) or not outcome.samples_us:
        return False
    fastest_us, bound_us, stored_us = min(outcome.samples_us), float(space.bounds_us[row]), record.bound_us
    if isinstance(outcome, Aborted):  # it has no cache state, but its stored bound is of the same one
        return fastest_us < min(bound_us, stored_us or 0.0)
    if stored_us is not None and fastest_us < stored_us:
        refine = space.refined_us
        refined = stored_us if refine is None else refine(record.key.config, record.result.resources)
        bound_us = max(bound_us, refined)
    return fastest_us < bound_us


def optimality_gaps(
    records: Sequence[Record], spaces: Mapping[str, BoundedSpace], best: Record | None, cache: CacheState
) -> tuple[float | None, ...]:
    """Return the best time so far over the lowest bound of an open configuration, after each record.

    During a search the best so far is the least time, and from the first finalist on that of the finalists.
    The last gap is that of the best record, by `optimality_proof_of`. Records of other variants than those of
    `spaces` have no bound: the gap is then that of the variants of `spaces`.

    Args:
        records: The records of one workload on one device, oldest first.
        spaces: The spaces, by `Variant.key`.
        best: The best record.
        cache: Cache state of the best.

    Returns:
        The gaps; None before the first time, and from a violated bound on. Empty without spaces.
    """
    if not spaces:
        return ()
    counted = {record.id for record in _counted(records, cache)}
    lowest = [
        (float(us), variant, row)
        for variant, space in spaces.items()
        for row, us in enumerate(space.bounds_us)
    ]
    # A heap of all bounds, corrected only at its front (`_drop`): there are many more configurations than
    # records, and a scan per record would be quadratic.
    heapq.heapify(lowest)
    closed: set[tuple[str, int]] = set()
    raised: dict[tuple[str, int], float] = {}
    gaps: list[float | None] = []
    best_so_far = _BestSoFar()
    trusted = True
    for record in records:
        variant, outcome = record.key.variant, record.result.outcome
        row = spaces[variant].table.row(record.key.config) if variant in spaces else None
        if record.id in counted and row is not None:
            trusted = trusted and not _violates(spaces[variant], row, record)
            best_so_far.add(record)
            if config_status(outcome) in CLOSED:
                closed.add((variant, row))
            else:
                raised[variant, row] = max(_raised_us(record), raised.get((variant, row), 0.0))
        _drop(lowest, closed, raised)
        best_us = best_so_far.us
        floor_us = min(lowest[0][0], best_us) if lowest else best_us
        gaps.append(best_us / floor_us if trusted and math.isfinite(best_us) and floor_us > 0 else None)
    # The best record may not be the last one, and its gap must equal the stored one.
    if gaps and best is not None:
        us = time_us(best.result.outcome)
        gaps[-1] = None if us is None else optimality_proof_of(records, spaces, us, cache).gap
    return tuple(gaps)


@dataclass(slots=True)
class _BestSoFar:
    """The best time of a search: the least, and from the first finalist on that of the finalists."""

    search_us: float = math.inf
    finalist_us: float = math.inf

    def add(self, record: Record) -> None:
        """Take one more record into account."""
        took_us = time_us(record.result.outcome) or math.inf
        if record.purpose != "finalist":
            self.search_us = min(self.search_us, took_us)
        elif record.verdict.versus_default != "not faster":
            self.finalist_us = min(self.finalist_us, took_us)

    @property
    def us(self) -> float:
        """The best time in microseconds; infinite before the first."""
        return self.finalist_us if math.isfinite(self.finalist_us) else self.search_us


def bound_ratio(best_us: float, bound_us: float) -> float:
    """Return a time over a lower bound at measured rates, at least 1, since a kernel may beat such rates.

    Args:
        best_us: The time, in microseconds.
        bound_us: The bound, in microseconds, which must be positive.
    """
    return max(1.0, best_us / bound_us)


def bound_ratios(
    records: Iterable[Record], bound_us: float, best: Record, cache: CacheState
) -> tuple[float | None, ...]:
    """Return the best time so far over a lower bound at measured rates, after each record.

    Args:
        records: The records of one workload on one device, oldest first.
        bound_us: Lower bound of all configurations, in microseconds, which must be positive.
        best: The best record, whose ratio is the last one.
        cache: Cache state of the best.

    Returns:
        The ratios; None before the first time.
    """
    records = list(records)
    counted = {record.id for record in _counted(records, cache)}
    best_so_far = _BestSoFar()
    ratios: list[float | None] = []
    for record in records:
        if record.id in counted:
            best_so_far.add(record)
        is_timed = math.isfinite(best_so_far.us)
        ratios.append(bound_ratio(best_so_far.us, bound_us) if is_timed else None)
    us = time_us(best.result.outcome)
    if ratios and us is not None:
        ratios[-1] = bound_ratio(us, bound_us)
    return tuple(ratios)


def _drop(
    lowest: list[tuple[float, str, int]],
    closed: set[tuple[str, int]],
    raised: Mapping[tuple[str, int], float],
) -> None:
    """Remove closed configurations from the front of a heap, and put raised bounds in their place."""
    # Bounds only rise and closed configurations stay closed, so a front that is current is the least of all.
    while lowest:
        us, variant, row = lowest[0]
        if (variant, row) in closed:
            heapq.heappop(lowest)
        elif raised.get((variant, row), 0.0) > us:
            heapq.heapreplace(lowest, (raised[variant, row], variant, row))
        else:
            return
