"""The default sampler: believes what a Gaussian process says of the configurations not tried yet.

A few configurations far apart come first. From then on each proposal is the one whose time is expected to
fall furthest below the best, by a process fitted to the logarithms of the times so far.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from tunebench.search.sampler import Prospects, TableSampler
from tunebench.search.surrogate import Coordinates, GaussianProcess, expected_improvement

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

__all__ = ["OBSERVED_US", "SurrogateSampler"]

OBSERVED_US = "observed_us"
"""User attribute of a trial that failed to hold a time, yet ran so long: one that was aborted."""

DESIGN = 12
"""Configurations far apart that come first."""

RETRIED = 5
"""Configurations, fastest elsewhere, that come first where other devices are known."""

DRAWS = 50
"""Of so many drawn at random, the one furthest from all others joins the design."""

STEPS = 10
"""Scales that are tried before each proposal."""

CANDIDATES = 20_000
"""Configurations that the process is asked about; of larger tables, neighbours of the best and a sample."""

MOST_OBSERVED = 400
"""Observations that the process learns from: its cost grows with their cube."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """What the study knows: rows with the logarithms of their times (NaN if failed), and rows under way."""

    rows: Array
    log_us: Array
    under_way: Array


class SurrogateSampler(TableSampler):
    """Highest expected improvement first.

    Args:
        prospects: The valid configurations, and what is known of them before any is measured.
        seed: Seed of all that is random here.
    """

    def __init__(self, prospects: Prospects, *, seed: int) -> None:
        super().__init__(prospects.table, seed=seed)
        figures = {**prospects.figures, "bound": prospects.bounds_us}
        self._coordinates = Coordinates.of(prospects.table, figures)
        self._process = GaussianProcess(self._coordinates.place.shape[1], self._rng)
        self._expected = _expected(prospects.elsewhere_us, len(prospects.table))
        self._warm = bool(prospects.elsewhere_us)
        self._finished: dict[int, tuple[int, float] | None] = {}

    def choose(self, study: Study) -> int:
        """Return the open row that promises most."""
        seen = self._seen(study)
        begun = np.concatenate([seen.rows, seen.under_way])
        if len(begun) < (RETRIED if self._warm else DESIGN) or np.isfinite(seen.log_us).sum() < 2:
            return self._begin(begun)
        rows, log_us = _most_telling(seen.rows, seen.log_us)
        log_us = log_us - self._expected[rows]
        log_us = np.where(np.isfinite(log_us), log_us, np.nanmax(log_us))  # a failure is no better than that
        self._process.fit(self._coordinates.take(rows), log_us, steps=STEPS)
        if len(seen.under_way):  # they are taken to come out as believed, so that others are tried meanwhile
            believed = self._process.believe(self._coordinates.take(seen.under_way)).mean
            rows, log_us = np.concatenate([rows, seen.under_way]), np.concatenate([log_us, believed])
            self._process.fit(self._coordinates.take(rows), log_us, steps=0)
        candidates = self._candidates(rows[np.argsort(log_us + self._expected[rows])[:3]])
        belief = self._process.believe(self._coordinates.take(candidates))
        least = float(np.nanmin(seen.log_us)) - self._expected[candidates]
        return int(candidates[np.argmax(expected_improvement(belief, least))])

    def _seen(self, study: Study) -> _Seen:
        """Return what is known of the study's trials; one that has ended is read once."""
        under_way = []
        for trial in study.get_trials(deepcopy=False):
            if trial.number in self._finished:
                continue
            row = self.table.row(trial.params)
            if trial.state.is_finished():
                self._finished[trial.number] = None if row is None else (row, _log_us(trial))
            elif row is not None:
                under_way.append(row)
        known = [entry for entry in self._finished.values() if entry is not None]
        rows, log_us = zip(*known, strict=True) if known else ((), ())
        return _Seen(np.array(rows, int), np.array(log_us, float), np.array(under_way, int))

    def _begin(self, taken: Array) -> int:
        """Return an open row to begin with: fast elsewhere, if that is known, or far from all taken."""
        if self._warm and len(taken) < RETRIED:
            return int(np.argmin(np.where(self.open, self._expected, np.inf)))
        drawn = self._rng.choice(np.flatnonzero(self.open), DRAWS)
        if not len(taken):
            return int(drawn[0])
        apart = self._coordinates.place[drawn][:, None] - self._coordinates.place[taken]
        return int(drawn[np.argmax(np.square(apart).sum(axis=2).min(axis=1))])

    def _candidates(self, best: Array) -> Array:
        """Return the open rows, or of very many those near the best and a sample of the others."""
        rows = np.flatnonzero(self.open)
        if len(rows) <= CANDIDATES:
            return rows
        ordinals = self.table.ordinals
        differing = np.min([(ordinals[rows] != ordinals[row]).sum(axis=1) for row in best], axis=0)
        near, others = rows[differing <= 2], rows[differing > 2]
        near = self._rng.permutation(near)[: CANDIDATES // 2]
        return np.concatenate([near, self._rng.choice(others, CANDIDATES - len(near), replace=False)])


def _expected(elsewhere_us: tuple[Array, ...], rows: int) -> Array:
    """Return the logarithm of the time each configuration is expected to take, up to a constant.

    Failures elsewhere count as the slowest there, what is not known as usual.
    """
    columns = []
    for times_us in elsewhere_us:
        log_us = np.log(times_us)
        timed = np.isfinite(log_us)
        log_us = np.where(np.isposinf(log_us), log_us[timed].max(), log_us) - np.median(log_us[timed])
        columns.append(np.where(np.isnan(log_us), 0.0, log_us))
    expected: Array = np.mean(columns, axis=0) if columns else np.zeros(rows)
    return expected


def _log_us(trial: FrozenTrial) -> float:
    """Return the logarithm of a trial's time, NaN if it has none."""
    value = trial.value if trial.state == TrialState.COMPLETE else trial.user_attrs.get(OBSERVED_US)
    return math.log(value) if value is not None and value > 0 else math.nan


def _most_telling(rows: Array, log_us: Array) -> tuple[Array, Array]:
    """Of very many observations, return the fastest half of what can be afforded and the latest others."""
    if len(rows) <= MOST_OBSERVED:
        return rows, log_us
    order = np.argsort(log_us)  # NaN last
    fastest = order[: MOST_OBSERVED // 2]
    latest = np.sort(order[MOST_OBSERVED // 2 :])[-(MOST_OBSERVED - len(fastest)) :]
    kept = np.concatenate([fastest, latest])
    return rows[kept], log_us[kept]
