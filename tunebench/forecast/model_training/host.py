"""Host time in public measurements of operators: its law, and its estimate for each device and operator.

The f32 operators of the public data were launched one at a time between two events. The host's time counts
until the kernel starts (lead), and until the second event is enqueued (floor):

    measured = max(floor, lead + kernel)

The floor hides kernels that end before the second event is enqueued. Both times belong to the host of the
measurement, not to the device, so they are estimated from the measurements of each device and operator and
kept apart from the time of the kernel. The time of a hidden kernel is read from the line through visible
kernels of its kind. The law was chosen from four by the errors on sizes that were left out of the fit
(`python -m benchmarks.host_time`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tunebench.forecast.library.kernel import Family
from tunebench.forecast.library.roofline_model import LAUNCH_US

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

__all__ = [
    "FLOOR_NOISE",
    "NO_HOST",
    "FittedLaw",
    "HostTime",
    "OperatorTable",
    "SeparatedTimes",
    "fit_law",
    "separate",
]

FEWEST = 30
"""Fewest rows to fit the law to."""

FEWEST_OF_KIND = 10
"""Fewest rows of a kernel that takes part in a fit: each kernel has its own rate."""

FEWEST_VISIBLE = 3
"""Fewest visible rows of a kernel to read the times of its hidden rows from the line through them."""

WAVES = (1, 2, 4)
"""Most blocks per SM of the kernels that the law is fitted to, in the order in which they are tried: kernels
of fewer waves follow the law more closely.
"""

LEADS = (0.3, 0.6, 0.9)
"""Leads from which fits start, as shares of the shortest times; the fit with the least cost is used."""

TOLERANCE = 0.02
"""Relative residual from which a row counts less in a fit: timings of the same kernel differ by as much."""

MOST_RESIDUAL = 0.1
"""Largest median residual, relative to the measured time, of a fit that counts."""

FLOOR_NOISE = 1.1
"""Factor by which times at the floor vary. On V100, the smallest batched products take 39 to 49 us."""

VISIBLE = (0.15, 0.95)
"""Share of rows above the floor: with fewer, the lead is not determined; with more, there is no floor."""

SHORTEST = 0.05
"""Share of rows, the shortest, whose measured minus analytic time limits a lead from another table."""


@dataclass(frozen=True, slots=True)
class HostTime:
    """The host's part in the measured time of an operator: ``max(floor_us, lead_us + kernel)``.

    Attributes:
        floor_us: Shortest measured time, of kernels that end before the host has enqueued the second event.
        lead_us: Time from the first event to the start of the kernel.
    """

    floor_us: float = 0.0
    lead_us: float = 0.0


NO_HOST = HostTime()
"""The host's part in times of the device alone."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OperatorTable:
    """Measurements of one operator on one device and host.

    Attributes:
        device: Name of the device.
        operator: Name of the operator.
        part: Part of the data set; parts were measured separately.
        family: Family of the kernels.
        us: (R,) measured times in microseconds.
        peak_us: (R,) analytic times of the kernels at peak rates, in microseconds; no kernel is faster.
        work: (R,) amount that the time of a kernel is proportional to; NaN where it is not known.
        waves: (R,) blocks per SM, rounded up.
        kind: (R,) name of the kernel. Kernels of one kind and number of waves have the same time per work.
    """

    device: str
    operator: str
    part: str
    family: Family
    us: Array
    peak_us: Array
    work: Array
    waves: Array
    kind: NDArray[np.str_]

    def fittable(self, waves: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the rows that the law can be fitted to, and the index of the kind of each.

        Args:
            waves: Most waves of a kernel.
        """
        rows = np.flatnonzero(np.isfinite(self.work) & (self.waves <= waves))
        names = np.char.add(self.kind, self.waves.astype(str))
        _, kind, counts = np.unique(names[rows], return_inverse=True, return_counts=True)
        rows = rows[counts[kind] >= FEWEST_OF_KIND]
        return rows, np.unique(names[rows], return_inverse=True)[1]


@dataclass(frozen=True, slots=True, eq=False)
class FittedLaw:
    """A fitted law: ``max(floor_us, lead_us + rates[kind] * work)``."""

    floor_us: float
    lead_us: float
    rates: Array

    def us(self, work: Array, kind: NDArray[np.int64]) -> Array:
        """Return the measured time of each row in microseconds."""
        longest: Array = np.maximum(self.floor_us, self.lead_us + self.rates[kind] * work)
        return longest


@dataclass(frozen=True, slots=True, eq=False)
class SeparatedTimes:
    """Measured times of a table, divided into host and kernel.

    Attributes:
        host: The host's part.
        kernel_us: (R,) times of the kernels in microseconds, including their launch on the device. NaN for
            kernels that the floor hides, if no visible kernel is of their kind.
    """

    host: HostTime
    kernel_us: Array


def fit_law(
    us: Array, work: Array, kind: NDArray[np.int64], *, floor: bool = True, lead: bool = True
) -> FittedLaw:
    """Fit the law by relative residuals, where large residuals count linearly.

    Args:
        us: (R,) measured times in microseconds.
        work: (R,) work of the kernels.
        kind: (R,) index of the kind of each kernel, from 0 without gaps.
        floor: Whether the law has a floor.
        lead: Whether the law has a lead.
    """
    from scipy.optimize import least_squares

    least = float(np.quantile(us, 0.05))
    fits = []
    # Without a floor, the law is linear in its terms: one start is enough.
    for share in LEADS if floor and lead else LEADS[:1]:
        rates = _rates(us - lead * share * least, work, kind)
        # Booleans as counts: the floor and the lead are parameters only if the law has them.
        start = np.array([*[least] * floor, *[share * least] * lead, *rates])
        fits.append(
            least_squares(
                lambda values: _law(values, floor, lead).us(work, kind) / us - 1,
                start,
                bounds=(0.0 if floor else -np.inf, np.inf),
                loss="soft_l1",
                f_scale=TOLERANCE,
                x_scale=start,
            )
        )
    return _law(min(fits, key=lambda solution: float(solution.cost)).x, floor, lead)


def _law(values: Array, floor: bool, lead: bool) -> FittedLaw:
    return FittedLaw(values[0] if floor else 0.0, values[int(floor)] if lead else 0.0, values[floor + lead :])


def _rates(us: Array, work: Array, kind: NDArray[np.int64]) -> Iterator[float]:
    """Yield the median time per work of the largest quarter of each kind."""
    for index in range(kind.max() + 1):
        rows = np.flatnonzero(kind == index)
        largest = rows[np.argsort(work[rows])][-max(3, len(rows) // 4) :]
        yield float(np.median(us[largest] / work[largest]))


def separate(tables: Sequence[OperatorTable]) -> list[SeparatedTimes]:
    """Divide the measured times of each table into host and kernel.

    A table whose law cannot be fitted gets the median lead of the first of these that have one: the same
    operator and device in another part of the data; the other operators of the device in the same part, if
    neither is a matrix product; the same operator on other devices. Its floor is then 0.
    """
    fitted = [_fitted(table) for table in tables]
    hosts = [separated.host if separated else None for separated in fitted]
    return [
        separated or SeparatedTimes(host := _elsewhere(table, tables, hosts), _visible_us(table.us, host))
        for separated, table in zip(fitted, tables, strict=True)
    ]


def _fitted(table: OperatorTable) -> SeparatedTimes | None:
    """Return the times by the law of the table itself; None if the measurements do not determine it.

    Only kernels of products are short enough to show a floor.
    """
    for waves in WAVES:
        rows, kind = table.fittable(waves)
        if len(rows) < FEWEST:
            continue
        us, work = table.us[rows], table.work[rows]
        law = fit_law(us, work, kind, floor=table.family == "product")
        visible = float(np.mean(us > FLOOR_NOISE * law.floor_us))
        if visible > VISIBLE[1]:
            law = fit_law(us, work, kind, floor=False)
        residual = float(np.median(np.abs(law.us(work, kind) / us - 1)))
        if visible > VISIBLE[0] and residual < MOST_RESIDUAL:
            return _by_law(table, law, rows, kind)
    return None


def _by_law(
    table: OperatorTable, law: FittedLaw, rows: NDArray[np.int64], kind: NDArray[np.int64]
) -> SeparatedTimes:
    """Return the times by a law; those of hidden kernels are on the line of visible kernels of their kind."""
    # The lead of the law contains the launch on the device, which belongs to the kernel.
    host = HostTime(float(law.floor_us), max(0.0, float(law.lead_us) - LAUNCH_US))
    hidden = table.us <= FLOOR_NOISE * host.floor_us
    # Of a kind that is always hidden, only an upper limit of the rate is known.
    rates = np.where(np.bincount(kind, ~hidden[rows]) >= FEWEST_VISIBLE, law.rates, np.nan)
    hidden_us = np.full_like(table.us, np.nan)
    most_us = FLOOR_NOISE * host.floor_us - host.lead_us
    hidden_us[rows] = np.clip(LAUNCH_US + rates[kind] * table.work[rows], LAUNCH_US, most_us)
    return SeparatedTimes(host, np.where(hidden, hidden_us, _visible_us(table.us, host)))


def _visible_us(us: Array, host: HostTime) -> Array:
    longest: Array = np.maximum(us - host.lead_us, LAUNCH_US)
    return longest


def _elsewhere(
    table: OperatorTable, tables: Sequence[OperatorTable], hosts: Sequence[HostTime | None]
) -> HostTime:
    leads_of = [(source, host.lead_us) for source, host in zip(tables, hosts, strict=True) if host]
    same_device = [(source, us) for source, us in leads_of if source.device == table.device]
    for leads in (
        [us for source, us in same_device if source.operator == table.operator],
        [
            us
            for source, us in same_device
            if table.family != "product" != source.family and source.part == table.part
        ],
        [us for source, us in leads_of if source.operator == table.operator],
    ):
        if leads:
            return HostTime(0.0, _limited(float(np.median(leads)), table))
    return NO_HOST


def _limited(lead_us: float, table: OperatorTable) -> float:
    """Return a lead that leaves the shortest kernels at least their time at peak rates."""
    shortest = table.us <= np.quantile(table.us, SHORTEST)
    max_lead_us = float(np.min(table.us[shortest] - table.peak_us[shortest]))
    return max(0.0, min(lead_us, max_lead_us))
