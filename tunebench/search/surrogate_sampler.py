"""The default sampler: expected improvement of a Gaussian process.

The first configurations are those predicted to be fastest, if times are predicted, and others far apart from
them. After them, each proposal is the configuration with the greatest expected improvement, by a process
fitted to the logarithms of the times so far. If times on other devices are known, the fastest configurations
there come first, and the process learns how this device differs.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState
from threadpoolctl import ThreadpoolController

from tunebench.search.sampler import Prospects, TableSampler
from tunebench.search.study_space import StudySpace
from tunebench.search.surrogate import Coordinates, GaussianProcess, expected_improvement

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

__all__ = ["OBSERVED_US", "SurrogateSampler"]

OBSERVED_US = "observed_us"
"""User attribute of an aborted trial: its fastest sample, in microseconds."""

DESIGN = 12
"""Number of first configurations, which are far apart."""

PREDICTED = 6
"""How many of the first configurations are those predicted to be fastest.

The process does not learn from predictions: as its mean or as a coordinate they kept the search near what was
predicted, which cost .02 of the optimum after 100 trials on recorded spaces.
"""

RETRIED = 5
"""Number of first configurations with a warm start: the fastest elsewhere."""

DOUBTED = 3
"""Every n-th proposal ignores the times of other devices, which may mislead."""

DRAWS = 50
"""Random candidates for each first configuration; the one farthest from all others is taken."""

STEPS = 4
"""Steps of the ascent of the scales before each proposal."""

CANDIDATES = 20_000
"""Limit on candidates; of larger tables, neighbours of the best and a random sample are used."""

REACH = 8
"""Largest difference of ordinals between neighbours."""

MOST_OBSERVED = 400
"""Limit on observations of the process, whose cost grows with their cube."""


@dataclass(frozen=True, slots=True)
class _StudyHistory:
    """Trials of a study: rows with their costs (NaN for a failure), and running rows."""

    rows: Array
    costs: Array
    running: Array


@dataclass(frozen=True, slots=True)
class _SurrogateModel:
    """A model of the costs: an expected cost per row, and a process of the difference from it."""

    expected: Array
    process: GaussianProcess


class SurrogateSampler(TableSampler):
    """Proposes the configuration with the greatest expected improvement (arguments as `TableSampler`).

    The process models the logarithms of the values if all are positive, else the values.
    """

    def choose(self, study: Study) -> int:
        """Return the open row with the greatest expected improvement."""
        # Matrices are small, and compilers use all cores meanwhile.
        with _blas().limit(limits=1, user_api="blas"):
            return self._choose(study)

    def _choose(self, study: Study) -> int:
        seen = self._seen(study)
        begun = np.concatenate([seen.rows, seen.running])
        if len(begun) < (RETRIED if self._warm else DESIGN) or np.isfinite(seen.costs).sum() < 2:
            return self._first(begun)
        # The last model has no times of other devices.
        doubt = len(begun) >= DESIGN and len(begun) % DOUBTED == 0
        view, coordinates = self._models[-1 if doubt else 0], self._coordinates
        rows, costs = _most_informative(seen.rows, seen.costs)
        costs = costs - view.expected[rows]
        costs = np.where(np.isfinite(costs), costs, np.nanmax(costs))  # failures count as the slowest
        view.process.fit(coordinates.take(rows), costs, steps=STEPS)
        if len(seen.running):  # they are taken to come out as believed, so that others are tried meanwhile
            predicted = view.process.predict(coordinates.take(seen.running)).mean
            rows, costs = np.concatenate([rows, seen.running]), np.concatenate([costs, predicted])
            view.process.fit(coordinates.take(rows), costs, steps=0)
        candidates = self._candidates(rows[np.argsort(costs + view.expected[rows])[:3]])
        posterior = view.process.predict(coordinates.take(candidates))
        # The process models the difference from the expected cost, so the incumbent is shifted by it for each
        # candidate.
        least = float(np.nanmin(seen.costs)) - view.expected[candidates]
        return int(candidates[np.argmax(expected_improvement(posterior, least))])

    def _begin(self, space: StudySpace, prospects: Prospects) -> None:
        super()._begin(space, prospects)
        elsewhere = [_filled(np.log(column)) for column in prospects.elsewhere_us]
        figures = {**prospects.figures, "bound": prospects.bounds_us}
        figures |= {f"elsewhere {i}": np.exp(column) for i, column in enumerate(elsewhere)}
        self._coordinates = Coordinates.of(self.table, figures)
        self._predicted = prospects.predicted_us
        expected = [np.zeros(len(self.table))]
        self._warm = bool(elsewhere)
        if self._warm:
            expected.insert(0, np.mean(elsewhere, axis=0))
        columns = self._coordinates.place.shape[1]
        self._models = [_SurrogateModel(costs, GaussianProcess(columns)) for costs in expected]
        self._finished: dict[int, tuple[int, float] | None] = {}

    def _seen(self, study: Study) -> _StudyHistory:
        """Return the trials of the study; each finished one is read once."""
        assert self.space is not None
        running = []
        for trial in study.get_trials(deepcopy=False):
            if trial.number in self._finished:
                continue
            row = self.space.row(trial.params)
            if trial.state.is_finished():
                self._finished[trial.number] = None if row is None else (row, _value(trial))
            elif row is not None:
                running.append(row)
        entries = [entry for entry in self._finished.values() if entry is not None]
        rows, values = zip(*entries, strict=True) if entries else ((), ())
        costs = _costs(np.array(values, float), study.direction)
        return _StudyHistory(np.array(rows, int), costs, np.array(running, int))

    def _first(self, taken: Array) -> int:
        """Return an open row to start with: the fastest elsewhere, predicted, or far from proposed rows."""
        if self._warm and len(taken) < RETRIED:
            return int(np.argmin(np.where(self.open, self._models[0].expected, np.inf)))
        if self._predicted is not None and len(taken) < PREDICTED:
            return int(np.argmin(np.where(self.open, self._predicted, np.inf)))
        drawn = self._rng.choice(np.flatnonzero(self.open), DRAWS)
        if not len(taken):
            return int(drawn[0])
        apart = self._coordinates.place[drawn][:, None] - self._coordinates.place[taken]
        return int(drawn[np.argmax(np.square(apart).sum(axis=2).min(axis=1))])

    def _candidates(self, best: Array) -> Array:
        """Return the open rows; if they are too many, neighbours of the best and a random sample."""
        rows = np.flatnonzero(self.open)
        if len(rows) <= CANDIDATES:
            return rows
        near = self._rng.permutation(self._near(best))[: CANDIDATES // 2]
        random_rows = self._rng.choice(rows, CANDIDATES - len(near))
        candidates: Array = np.unique(np.concatenate([near, random_rows]))
        return candidates

    def _near(self, best: Array) -> Array:
        """Return the open rows that differ from a best row in one or two parameters, by at most `REACH`."""
        counts = np.array([len(parameter.values) for parameter in self.table.space.parameters])
        neighbours = []
        for centre in self.table.ordinals[best].astype(np.int64):
            values = [
                np.arange(max(0, k - REACH), min(count, k + REACH + 1))
                for k, count in zip(centre, counts, strict=True)
            ]
            for i in range(len(centre)):
                # Pairs of parameters; with i == j (a single parameter, or the last one) the second assignment
                # wins.
                for j in range(min(i + 1, len(centre) - 1), len(centre)):
                    changed = np.tile(centre, (len(values[i]), len(values[j]), 1))
                    changed[:, :, i] = values[i][:, None]
                    changed[:, :, j] = values[j]
                    neighbours.append(changed.reshape(-1, len(centre)))
        rows = np.unique(self.table.find(np.concatenate(neighbours)))
        rows = rows[rows >= 0]
        near: Array = rows[self.open[rows]]
        return near


@functools.cache
def _blas() -> ThreadpoolController:
    """Return the controller of BLAS threads, which wait long for each other next to busy compilers."""
    return ThreadpoolController()


def _filled(log_us: Array) -> Array:
    """Return log times minus their median: failures as the slowest, unknown ones as the median."""
    timed = np.isfinite(log_us)
    log_us = np.where(np.isposinf(log_us), log_us[timed].max(), log_us) - np.median(log_us[timed])
    filled: Array = np.where(np.isnan(log_us), 0.0, log_us)
    return filled


def _value(trial: FrozenTrial) -> float:
    """Return the value of a trial, NaN without one."""
    value = trial.value if trial.state == TrialState.COMPLETE else trial.user_attrs.get(OBSERVED_US)
    return math.nan if value is None else float(value)


def _costs(values: Array, direction: StudyDirection) -> Array:
    """Return costs to minimize: log values if all are positive; infinite values become NaN (failures)."""
    finite = np.where(np.isfinite(values), values, np.nan)
    if np.all(finite[np.isfinite(finite)] > 0):
        finite = np.log(finite)
    costs: Array = -finite if direction == StudyDirection.MAXIMIZE else finite
    return costs


def _most_informative(rows: Array, costs: Array) -> tuple[Array, Array]:
    """Return at most `MOST_OBSERVED` observations: the best, and the latest of the others."""
    if len(rows) <= MOST_OBSERVED:
        return rows, costs
    order = np.argsort(costs)  # NaN last
    best = order[: MOST_OBSERVED // 2]
    latest = np.sort(order[MOST_OBSERVED // 2 :])[-(MOST_OBSERVED - len(best)) :]
    chosen = np.concatenate([best, latest])
    return rows[chosen], costs[chosen]
