"""A calibrated pruner: which configurations are unlikely to win, learned from records; a guess and no proof.

What a configuration takes here is about what it took on other devices, times one factor for all. How the
logarithms of the ratios (residuals) scatter is learned from the configurations measured so far: the chance to
beat the incumbent is that of a residual low enough. Residuals are few and not normal, so their distribution
is that of the residuals themselves, with an exponential tail below the lowest quarter: for times that is a
power law, in which far exceptions stay thinkable. What was never tried elsewhere is judged in the same way,
with its bound in the place of its time elsewhere.

Every chance is small once the incumbent is good, so that none decides by itself: passed over are the least
likely that together hold one in a hundred of the winners to be expected. The bound is sound, and closes
configurations; what is passed over stays open, comes last, and no optimality proof counts it as closed.

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
"""Configurations timed here, and known elsewhere, below which nothing is passed over."""

MISSED = 0.01
"""Share of the winners to be expected that those passed over may hold together."""

MOST_CHANCE = 0.005
"""Whatever is likelier than this to beat the incumbent is never passed over."""

TAIL = 0.25
"""Share of the residuals, the lowest, that the tail is fitted to."""

TAIL_LOG = 0.2
"""Mean depth of the tail before anything is measured, where fewer than two other devices tell it."""

TAIL_ROWS = 5
"""The depth known beforehand counts as much as so many residuals of the tail."""


@dataclass(frozen=True, slots=True)
class Residuals:
    """How log(time here / time expected) is distributed.

    Attributes:
        ordered: Those that were seen, ascending; at least four.
        depth: Mean depth of the tail below its threshold.
    """

    ordered: Array
    depth: float

    @classmethod
    def of(cls, residuals: Array, depth_before: float = TAIL_LOG) -> Residuals:
        """Learn from residuals.

        Args:
            residuals: In any order, finite.
            depth_before: What the depth of the tail is believed to be before they are seen.
        """
        ordered = np.sort(residuals)
        excess = ordered[_rank(ordered)] - ordered[: _rank(ordered)]
        depth = (excess.sum() + TAIL_ROWS * depth_before) / (len(excess) + TAIL_ROWS)
        return cls(ordered, float(depth))

    def below(self, least: Array) -> Array:
        """Return the chance that another residual is as low as each of `least`."""
        count, rank = len(self.ordered), _rank(self.ordered)
        threshold = self.ordered[rank]
        by_rank = (np.searchsorted(self.ordered, least, side="right") + 1) / (count + 1)
        deeper = np.exp(np.minimum(0.0, least - threshold) / self.depth)
        chance: Array = np.where(least < threshold, (rank + 2) / (count + 1) * deeper, by_rank)
        return chance


def _rank(ordered: Array) -> int:
    """Return where the tail begins."""
    return max(2, int(np.ceil(TAIL * len(ordered))) - 1)


def expected_log_us(elsewhere_us: tuple[Array, ...], rows: int) -> Array:
    """Return the logarithm of what each configuration takes elsewhere, on the scale of the best known device.

    Args:
        elsewhere_us: A column a device: infinite for a failure, NaN where it is not known.
        rows: Number of configurations.

    Returns:
        The mean over the devices on which it ran; infinite if it failed wherever it was tried, NaN if
        it was tried nowhere.
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
    """Return the logarithms of the columns, shifted by a factor each to the one that knows most."""
    columns = sorted((np.log(column) for column in elsewhere_us), key=_known, reverse=True)
    aligned = columns[:1]
    for column in columns[1:]:
        shared = np.isfinite(column) & np.isfinite(columns[0])
        if shared.sum() >= LEAST_MEASURED:
            aligned.append(column - np.median(column[shared] - columns[0][shared]))
    return np.array(aligned)


def _known(column: Array) -> int:
    return int(np.isfinite(column).sum())


def tail_between(elsewhere_us: tuple[Array, ...]) -> float:
    """Return how deep the tail of residuals is between other devices: that of the two least alike.

    With fewer than two devices that know the same configurations, it is `TAIL_LOG`.
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
    """Return the chance of each configuration to be faster than the incumbent.

    Args:
        times_us: What was measured here: infinite for a failure, NaN where nothing was yet.
        expected: Of `expected_log_us`.
        bounds_us: Bound of each; zero where there is none.
        incumbent_us: Best time so far.
        depth: Of `tail_between`.

    Returns:
        A probability a row; NaN where too little is known to tell.
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
        chance[failed] = runs / (timed.sum() + 1)  # like any other that runs, it is the best of so many
    return chance


def _chances_by(log_us: Array, timed: Array, expected: Array, incumbent_us: float, depth: float) -> Array:
    """Return the chances of what is expected to take so long; NaN elsewhere, or if too little is timed."""
    usable = np.isfinite(expected)
    learned = timed & usable
    chance = np.full(len(expected), np.nan)
    if learned.sum() >= LEAST_MEASURED:
        residuals = Residuals.of((log_us - expected)[learned], depth)
        chance[usable] = residuals.below(np.log(incumbent_us) - expected[usable])
    return chance


@dataclass(frozen=True, slots=True)
class PostponedConfigs:
    """Configurations that are passed over.

    Attributes:
        rows: Which: a mask.
        winners: How many of them are expected to beat the incumbent.
    """

    rows: Array
    winners: float

    @classmethod
    def none(cls, rows: int) -> PostponedConfigs:
        """Pass over nothing."""
        return cls(np.zeros(rows, dtype=bool), 0.0)

    @property
    def count(self) -> int:
        """How many are passed over."""
        return int(self.rows.sum())


def least_likely(chance: Array, open_rows: Array) -> PostponedConfigs:
    """Return which open rows to pass over: the least likely, holding `MISSED` of the winners to be expected.

    It is never all of them: what is likeliest holds more than that.

    Args:
        chance: Of each to beat the incumbent; of NaN nothing is known, and it is never passed over.
        open_rows: Which are open: a mask.
    """
    rows = np.flatnonzero(open_rows & ~np.isnan(chance))
    order = rows[np.argsort(chance[rows], kind="stable")]
    tolerated = MISSED * chance[rows].sum()
    passed = order[(np.cumsum(chance[order]) < tolerated) & (chance[order] < MOST_CHANCE)]
    mask = np.zeros(len(chance), dtype=bool)
    mask[passed] = True
    return PostponedConfigs(mask, float(chance[passed].sum()))


class LearnedPruner:
    """Says of a search's open configurations which are unlikely to win, by what was measured so far.

    Args:
        prospects: The configurations and what is known of them elsewhere.
    """

    def __init__(self, prospects: Prospects) -> None:
        self._bounds_us = np.asarray(prospects.bounds_us, dtype=float)
        self._expected = expected_log_us(prospects.elsewhere_us, len(prospects.table))
        self._depth = tail_between(prospects.elsewhere_us)
        self._times_us = np.full(len(prospects.table), np.nan)

    def tell(self, row: int, time_us: float) -> None:
        """Learn what a configuration took here, infinite if it failed."""
        self._times_us[row] = time_us

    def unlikely(self, open_rows: Array, incumbent_us: float) -> PostponedConfigs:
        """Return what to pass over for now among the open rows; what is measured may change it either way."""
        if np.isfinite(self._times_us).sum() < LEAST_MEASURED:
            return PostponedConfigs.none(len(open_rows))
        chance = chances(self._times_us, self._expected, self._bounds_us, incumbent_us, self._depth)
        return least_likely(chance, open_rows)
