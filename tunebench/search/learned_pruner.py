"""The learned pruner: postpones configurations that are unlikely to win, as estimated from measurements.

The time of a configuration here is about its time on other devices, times one factor for all. The
distribution of the residuals, the logarithms of the ratios, is learned from the configurations measured so
far; the probability to beat the incumbent is that of a low enough residual. Residuals are few and not normal,
so their distribution is the empirical one with an exponential tail below the lowest quarter. For times this
is a power law, which leaves rare exceptions possible. For a configuration without a time elsewhere, its lower
bound takes the place of that time.

Once the incumbent is good, every probability is small, so a threshold on each would decide nothing. Postponed
are the least likely configurations that together hold 1 % of the expected winners. Lower bounds are sound and
close configurations; postponed configurations stay open, come last, and do not count as closed in an
optimality proof.

Source of the rank estimate: Vovk, Gammerman and Shafer, "Algorithmic Learning in a Random World", 2005 (a new
value is among the k lowest of n + 1 exchangeable ones with probability k / (n + 1)). Of the tail: Coles, "An
Introduction to Statistical Modeling of Extreme Values", 2001 (excesses over a threshold, shape 0).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tunebench.search.sampler import Prospects

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

__all__ = [
    "LearnedPruner",
    "PostponedConfigs",
    "Residuals",
    "chances",
    "expected_log_us",
    "least_likely",
    "tail_between",
]

LEAST_MEASURED = 20
"""Configurations timed here and known elsewhere below which nothing is postponed."""

MISSED = 0.01
"""Largest fraction of the expected winners that may be among the postponed configurations."""

MOST_CHANCE = 0.005
"""Probability to beat the incumbent above which a configuration is never postponed."""

TAIL = 0.25
"""Fraction of the residuals, the lowest, to which the tail is fitted."""

TAIL_LOG = 0.2
"""Prior of the mean depth of the tail, with fewer than two other devices."""

TAIL_ROWS = 5
"""Weight of the prior depth, in residuals of the tail."""


@dataclass(frozen=True, slots=True)
class Residuals:
    """Distribution of log(time here / expected time).

    Attributes:
        ordered: Observed residuals, ascending; at least four.
        depth: Mean depth of the tail below its threshold.
    """

    ordered: Array
    depth: float

    @classmethod
    def of(cls, residuals: Array, depth_before: float = TAIL_LOG) -> Residuals:
        """Estimate the distribution.

        Args:
            residuals: Finite residuals in any order.
            depth_before: Prior of the depth of the tail.
        """
        ordered = np.sort(residuals)
        excess = ordered[_rank(ordered)] - ordered[: _rank(ordered)]
        depth = (excess.sum() + TAIL_ROWS * depth_before) / (len(excess) + TAIL_ROWS)
        return cls(ordered, float(depth))

    def below(self, least: Array) -> Array:
        """Return the probability that another residual is at most each of `least`."""
        count, rank = len(self.ordered), _rank(self.ordered)
        threshold = self.ordered[rank]
        by_rank = (np.searchsorted(self.ordered, least, side="right") + 1) / (count + 1)
        deeper = np.exp(np.minimum(0.0, least - threshold) / self.depth)
        chance: Array = np.where(least < threshold, (rank + 2) / (count + 1) * deeper, by_rank)
        return chance


def _rank(ordered: Array) -> int:
    """Return the index of the threshold of the tail."""
    return max(2, int(np.ceil(TAIL * len(ordered))) - 1)


def expected_log_us(elsewhere_us: tuple[Array, ...], rows: int) -> Array:
    """Return the mean log time of each configuration on other devices, on the scale of the best known device.

    Args:
        elsewhere_us: One column per device, in microseconds: infinite for a failure, NaN if unknown.
        rows: Number of configurations.

    Returns:
        The mean over the devices where it succeeded; infinite if it failed on all known devices, NaN if
        unknown on all.
    """
    columns = _aligned(elsewhere_us)
    if not len(columns):
        return np.full(rows, np.nan)
    ran = np.isfinite(columns)
    total = np.where(ran, columns, 0.0).sum(axis=0)
    mean = total / np.maximum(1, ran.sum(axis=0))
    never = np.where(np.isposinf(columns).any(axis=0), np.inf, np.nan)
    expected: Array = np.where(ran.any(axis=0), mean, never)
    return expected


def _aligned(elsewhere_us: tuple[Array, ...]) -> Array:
    """Return the logarithms of the columns, each shifted to the scale of the column with the most times."""
    columns = sorted((np.log(column) for column in elsewhere_us), key=_known, reverse=True)
    aligned = columns[:1]
    for column in columns[1:]:
        shared = np.isfinite(column) & np.isfinite(columns[0])
        if shared.sum() >= LEAST_MEASURED:
            # Devices differ by a factor, which is a shift of logarithms; the median resists the
            # configurations that behave differently.
            aligned.append(column - np.median(column[shared] - columns[0][shared]))
    return np.array(aligned)


def _known(column: Array) -> int:
    return int(np.isfinite(column).sum())


def tail_between(elsewhere_us: tuple[Array, ...]) -> float:
    """Return the tail depth of residuals between the two least similar of the other devices.

    Without two devices that share configurations, it is `TAIL_LOG`.
    """
    columns = _aligned(elsewhere_us)
    depths = []
    for i, first in enumerate(columns):
        for j, second in enumerate(columns):
            shared = np.isfinite(first) & np.isfinite(second)
            if i != j and shared.sum() >= LEAST_MEASURED:
                ordered = np.sort((first - second)[shared])
                depths.append(float(np.mean(ordered[_rank(ordered)] - ordered[: _rank(ordered)])))
    return max(depths, default=TAIL_LOG)


def chances(
    times_us: Array, expected: Array, bounds_us: Array, incumbent_us: float, depth: float = TAIL_LOG
) -> Array:
    """Return the probability of each configuration to be faster than the incumbent.

    Args:
        times_us: Times measured here, in microseconds: infinite for a failure, NaN if not measured.
        expected: Result of `expected_log_us`.
        bounds_us: Lower bound of each, in microseconds; 0 without a bound.
        incumbent_us: Best time so far, in microseconds.
        depth: Result of `tail_between`.

    Returns:
        One probability per row; NaN with too few measurements.
    """
    timed = np.isfinite(times_us)
    log_us = np.log(np.where(timed, times_us, 1.0))
    bound_log_us = np.log(np.where(bounds_us > 0, bounds_us, np.nan))
    by_bound = _chances_by(log_us, timed, bound_log_us, incumbent_us, TAIL_LOG)
    chance = _chances_by(log_us, timed, expected, incumbent_us, depth)
    chance = np.where(np.isnan(expected), by_bound, chance)
    failed = np.isposinf(expected)
    if failed.any() and timed.sum() >= LEAST_MEASURED:
        tried = failed & ~np.isnan(times_us)
        runs = ((tried & timed).sum() + 0.5) / (tried.sum() + 1)
        chance[failed] = runs / (timed.sum() + 1)  # if it runs, it is as likely to be the best as any other
    return chance


def _chances_by(log_us: Array, timed: Array, expected: Array, incumbent_us: float, depth: float) -> Array:
    """Return the probabilities by one kind of expected time; NaN without it or with too few measurements."""
    usable = np.isfinite(expected)
    learned = timed & usable
    chance = np.full(len(expected), np.nan)
    if learned.sum() >= LEAST_MEASURED:
        residuals = Residuals.of((log_us - expected)[learned], depth)
        chance[usable] = residuals.below(np.log(incumbent_us) - expected[usable])
    return chance


@dataclass(frozen=True, slots=True)
class PostponedConfigs:
    """Configurations that are postponed.

    Attributes:
        rows: A mask of the rows.
        winners: Expected number of them that beat the incumbent.
    """

    rows: Array
    winners: float

    @classmethod
    def none(cls, rows: int) -> PostponedConfigs:
        """Return an empty set of `rows` rows."""
        return cls(np.zeros(rows, dtype=bool), 0.0)

    @property
    def count(self) -> int:
        """Number of postponed configurations."""
        return int(self.rows.sum())


def least_likely(chance: Array, open_rows: Array) -> PostponedConfigs:
    """Return the open rows to postpone: the least likely, which hold `MISSED` of the expected winners.

    The likeliest row is never among them.

    Args:
        chance: Probability of each row to beat the incumbent; NaN is never postponed.
        open_rows: A mask of the open rows.
    """
    rows = np.flatnonzero(open_rows & ~np.isnan(chance))
    order = rows[np.argsort(chance[rows], kind="stable")]
    # Chances add up to the expected number of winners, of which this share may be postponed.
    tolerated = MISSED * chance[rows].sum()
    passed = order[(np.cumsum(chance[order]) < tolerated) & (chance[order] < MOST_CHANCE)]
    mask = np.zeros(len(chance), dtype=bool)
    mask[passed] = True
    return PostponedConfigs(mask, float(chance[passed].sum()))


class LearnedPruner:
    """Estimates which open configurations of a search are unlikely to win.

    Args:
        prospects: The configurations, their bounds and their times on other devices.
    """

    def __init__(self, prospects: Prospects) -> None:
        self._bounds_us = np.asarray(prospects.bounds_us, dtype=float)
        self._expected = expected_log_us(prospects.elsewhere_us, len(prospects.table))
        self._depth = tail_between(prospects.elsewhere_us)
        self._times_us = np.full(len(prospects.table), np.nan)

    def tell(self, row: int, time_us: float) -> None:
        """Add the time of a configuration, in microseconds; infinite if it failed."""
        self._times_us[row] = time_us

    def unlikely(self, open_rows: Array, incumbent_us: float) -> PostponedConfigs:
        """Return the open rows to postpone for now; further measurements may change them.

        Args:
            open_rows: A mask of the open rows.
            incumbent_us: Best time so far, in microseconds.
        """
        if np.isfinite(self._times_us).sum() < LEAST_MEASURED:
            return PostponedConfigs.none(len(open_rows))
        chance = chances(self._times_us, self._expected, self._bounds_us, incumbent_us, self._depth)
        return least_likely(chance, open_rows)
