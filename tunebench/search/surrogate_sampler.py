"""The default sampler: believes what a Gaussian process says of the configurations not tried yet.

A few configurations far apart come first. From then on each proposal is the one whose time is expected to
fall furthest below the best, by a process fitted to the logarithms of the times so far. Where it is known
what configurations took on other devices, the fastest there come first, and the process learns how this one
differs.
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
"""User attribute of a trial that failed to hold a time, yet ran so long: one that was aborted."""

DESIGN = 12
"""Configurations far apart that come first."""

RETRIED = 5
"""Configurations, fastest elsewhere, that come first where other devices are known."""

DOUBTED = 3
"""Of so many proposals one does without what is known of other devices: it may mislead."""

DRAWS = 50
"""Of so many drawn at random, the one furthest from all others joins the design."""

STEPS = 4
"""Steps towards better scales before each proposal."""

CANDIDATES = 20_000
"""Configurations that the process is asked about; of larger tables, neighbours of the best and a sample."""

REACH = 8
"""Neighbours have values at most so many places away."""

MOST_OBSERVED = 400
"""Observations that the process learns from: its cost grows with their cube."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """What the study knows: rows with what each cost (NaN if it failed), and rows under way."""

    rows: Array
    costs: Array
    under_way: Array


@dataclass(frozen=True, slots=True)
class _View:
    """One way to see the configurations: what each is expected to cost beforehand, and what adds to that."""

    expected: Array
    process: GaussianProcess


class SurrogateSampler(TableSampler):
    """Highest expected improvement first (see `TableSampler` for what may be searched).

    The process learns logarithms where all values are positive, and the values themselves otherwise.
    """

    def choose(self, study: Study) -> int:
        """Return the open row that promises most."""
        with _blas().limit(limits=1, user_api="blas"):
            return self._choose(study)

    def _choose(self, study: Study) -> int:
        seen = self._seen(study)
        begun = np.concatenate([seen.rows, seen.under_way])
        if len(begun) < (RETRIED if self._warm else DESIGN) or np.isfinite(seen.costs).sum() < 2:
            return self._first(begun)
        doubt = len(begun) >= DESIGN and len(begun) % DOUBTED == 0
        view, places = self._views[-1 if doubt else 0], self._coordinates
        rows, costs = _most_telling(seen.rows, seen.costs)
        costs = costs - view.expected[rows]
        costs = np.where(np.isfinite(costs), costs, np.nanmax(costs))  # a failure is no better than that
        view.process.fit(places.take(rows), costs, steps=STEPS)
        if len(seen.under_way):  # they are taken to come out as believed, so that others are tried meanwhile
            believed = view.process.believe(places.take(seen.under_way)).mean
            rows, costs = np.concatenate([rows, seen.under_way]), np.concatenate([costs, believed])
            view.process.fit(places.take(rows), costs, steps=0)
        candidates = self._candidates(rows[np.argsort(costs + view.expected[rows])[:3]])
        belief = view.process.believe(places.take(candidates))
        least = float(np.nanmin(seen.costs)) - view.expected[candidates]
        return int(candidates[np.argmax(expected_improvement(belief, least))])

    def _begin(self, space: StudySpace, prospects: Prospects) -> None:
        super()._begin(space, prospects)
        elsewhere = [_filled(np.log(column)) for column in prospects.elsewhere_us]
        figures = {**prospects.figures, "bound": prospects.bounds_us}
        figures |= {f"elsewhere {i}": np.exp(column) for i, column in enumerate(elsewhere)}
        self._coordinates = Coordinates.of(self.table, figures)
        expected = [np.zeros(len(self.table))]
        self._warm = bool(elsewhere)
        if self._warm:
            expected.insert(0, np.mean(elsewhere, axis=0))
        columns = self._coordinates.place.shape[1]
        self._views = [_View(costs, GaussianProcess(columns)) for costs in expected]
        self._finished: dict[int, tuple[int, float] | None] = {}

    def _seen(self, study: Study) -> _Seen:
        """Return what is known of the study's trials; one that has ended is read once."""
        assert self.space is not None
        under_way = []
        for trial in study.get_trials(deepcopy=False):
            if trial.number in self._finished:
                continue
            row = self.space.row(trial.params)
            if trial.state.is_finished():
                self._finished[trial.number] = None if row is None else (row, _value(trial))
            elif row is not None:
                under_way.append(row)
        known = [entry for entry in self._finished.values() if entry is not None]
        rows, values = zip(*known, strict=True) if known else ((), ())
        costs = _costs(np.array(values, float), study.direction)
        return _Seen(np.array(rows, int), costs, np.array(under_way, int))

    def _first(self, taken: Array) -> int:
        """Return an open row to begin with: fast elsewhere, if that is known, or far from all taken."""
        if self._warm and len(taken) < RETRIED:
            return int(np.argmin(np.where(self.open, self._views[0].expected, np.inf)))
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
        near = self._rng.permutation(self._near(best))[: CANDIDATES // 2]
        others = self._rng.choice(rows, CANDIDATES - len(near))
        candidates: Array = np.unique(np.concatenate([near, others]))
        return candidates

    def _near(self, best: Array) -> Array:
        """Return the open rows of which one or two parameters differ a little from one of the best."""
        counts = np.array([len(parameter.values) for parameter in self.table.space.parameters])
        found = []
        for centre in self.table.ordinals[best].astype(np.int64):
            values = [
                np.arange(max(0, k - REACH), min(count, k + REACH + 1))
                for k, count in zip(centre, counts, strict=True)
            ]
            for i in range(len(centre)):
                for j in range(min(i + 1, len(centre) - 1), len(centre)):
                    changed = np.tile(centre, (len(values[i]), len(values[j]), 1))
                    changed[:, :, i] = values[i][:, None]
                    changed[:, :, j] = values[j]
                    found.append(changed.reshape(-1, len(centre)))
        rows = np.unique(self.table.find(np.concatenate(found)))
        rows = rows[rows >= 0]
        near: Array = rows[self.open[rows]]
        return near


@functools.cache
def _blas() -> ThreadpoolController:
    """Return the hold on linear algebra, whose threads wait long for each other beside busy compilers."""
    return ThreadpoolController()


def _filled(log_us: Array) -> Array:
    """Return logarithms of times less their median: failures as the slowest, what is not known as usual."""
    timed = np.isfinite(log_us)
    log_us = np.where(np.isposinf(log_us), log_us[timed].max(), log_us) - np.median(log_us[timed])
    filled: Array = np.where(np.isnan(log_us), 0.0, log_us)
    return filled


def _value(trial: FrozenTrial) -> float:
    """Return a trial's value, NaN if it has none."""
    value = trial.value if trial.state == TrialState.COMPLETE else trial.user_attrs.get(OBSERVED_US)
    return math.nan if value is None else float(value)


def _costs(values: Array, direction: StudyDirection) -> Array:
    """Return what is to be made small: logarithms of positive values; infinite values count as failures."""
    finite = np.where(np.isfinite(values), values, np.nan)
    if np.all(finite[np.isfinite(finite)] > 0):
        finite = np.log(finite)
    costs: Array = -finite if direction == StudyDirection.MAXIMIZE else finite
    return costs


def _most_telling(rows: Array, costs: Array) -> tuple[Array, Array]:
    """Of very many observations, return the best half of what can be afforded and the latest others."""
    if len(rows) <= MOST_OBSERVED:
        return rows, costs
    order = np.argsort(costs)  # NaN last
    best = order[: MOST_OBSERVED // 2]
    latest = np.sort(order[MOST_OBSERVED // 2 :])[-(MOST_OBSERVED - len(best)) :]
    kept = np.concatenate([best, latest])
    return rows[kept], costs[kept]
