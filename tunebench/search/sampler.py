"""Optuna samplers that propose only valid, unseen configurations of a table.

They are `optuna.samplers.BaseSampler`s for studies of one objective. The configurations are those of a table,
or those of a search space that satisfy a constraint; without either, a sampler uses the parameters that all
trials so far have in common. Other parameters are drawn at random. The configuration of a running trial is
not proposed again. When no configuration is left, a random one is repeated, because a sampler must propose
one; see `TableSampler.exhausted`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.search_space import IntersectionSearchSpace
from optuna.study import Study
from optuna.trial import FrozenTrial

from tunebench.errors import InputError
from tunebench.search.study_space import Constraint, StudySpace
from tunebench.space import Table

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

__all__ = ["BoundSampler", "Prospects", "RandomTableSampler", "TableSampler"]


@dataclass(frozen=True, kw_only=True)
class Prospects:
    """The valid configurations of a search, with prior knowledge of their times.

    Attributes:
        table: The configurations.
        bounds_us: Lower bound of each, in microseconds.
        figures: Derived quantities by name, such as the number of threads: one non-negative number per row.
        elsewhere_us: Times on other devices, in microseconds: one column per device, infinite for a failure,
            NaN if unknown.
        predicted_us: Predicted times, in microseconds; None if there are none. They only order proposals.
    """

    table: Table
    bounds_us: Array
    figures: Mapping[str, Array] = field(default_factory=dict)
    elsewhere_us: tuple[Array, ...] = ()
    predicted_us: Array | None = None


class TableSampler(BaseSampler):
    """Base class of samplers that propose each configuration of a table once; subclasses define `choose`.

    Args:
        prospects: The configurations; the parameters of the study are those of the table, all categorical.
        space: In place of `prospects`, the distributions of the study by name. A continuous range is searched
            on a grid, a space of more than a million points by a random sample.
        constraint: Returns whether parameters, by name, are valid together; for `space`.
        seed: Seed of the sampler.

    Raises:
        InputError: if both are given, or no point of `space` satisfies `constraint`.
    """

    def __init__(
        self,
        prospects: Prospects | None = None,
        *,
        space: Mapping[str, BaseDistribution] | None = None,
        constraint: Constraint | None = None,
        seed: int | None = None,
    ) -> None:
        if prospects is not None and (space is not None or constraint is not None):
            raise InputError(
                "a sampler takes either a table of valid configurations or a search space, got both"
            )
        self._rng = np.random.default_rng(seed)
        self._independent = RandomSampler(seed)
        self._common = IntersectionSearchSpace()
        self._constraint = constraint
        self._declared = prospects is not None or space is not None
        self._lock = threading.RLock()
        self.space: StudySpace | None = None
        if prospects is not None:
            self._begin(StudySpace.of_table(prospects.table), prospects)
        elif space is not None:
            self._start_space(space)

    @property
    def exhausted(self) -> bool:
        """Whether every configuration has been proposed or closed."""
        return self.space is not None and not self.open.any()

    def reseed_rng(self) -> None:
        """Draw a new seed; Optuna calls this in parallel workers."""
        self._rng = np.random.default_rng()
        self._independent.reseed_rng()

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Return all known parameters: constraints need them drawn together."""
        if self._declared:
            assert self.space is not None
            return dict(self.space.distributions)
        return self._common.calculate(study)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return the parameters of an open configuration, and close the configuration.

        Raises:
            ValueError: if the study has more than one objective.
        """
        self._require_one_objective(study)
        if not search_space:
            return {}
        with self._lock:
            if self.space is None or search_space != self.space.distributions:
                self._start_space(search_space)
            assert self.space is not None
            self._close_proposed(study, trial)
            row = self._next(study, trial.system_attrs.get("fixed_params", {}))
            return {} if row is None else self.space.params(row)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Return a random value for a parameter outside the known space.

        Raises:
            ValueError: if the study has more than one objective.
        """
        self._require_one_objective(study)
        return self._independent.sample_independent(study, trial, param_name, param_distribution)

    def choose(self, study: Study) -> int:
        """Return an open row; at least one is open. Must not change the study."""
        return int(self._rng.choice(np.flatnonzero(self.open)))

    def close(self, params: Mapping[str, Any]) -> None:
        """Close a configuration, if it is in the table."""
        assert self.space is not None
        row = self.space.row(params)
        if row is not None:
            self.open[row] = False

    def _begin(self, space: StudySpace, prospects: Prospects) -> None:
        """Start on a table; subclasses may extend this."""
        self.space, self.table = space, prospects.table
        self.open = np.ones(len(self.table), dtype=bool)
        """Mask of the rows that may be proposed; callers may change it."""
        self._trials_seen = 0

    def _start_space(self, distributions: Mapping[str, BaseDistribution]) -> None:
        """Start on a search space."""
        space = StudySpace.of(distributions, self._constraint, self._rng)
        self._begin(space, Prospects(table=space.table, bounds_us=np.zeros(len(space.table))))

    def _next(self, study: Study, fixed: Mapping[str, Any]) -> int | None:
        """Return the row to propose, and close it; None if no row has the fixed values of an enqueued trial.

        Optuna overrides the fixed parameters anyway; the others must be valid together with them.
        """
        assert self.space is not None
        if fixed:
            agreeing = np.flatnonzero(self.space.rows_with(fixed))
            unseen = agreeing[self.open[agreeing]]
            rows = unseen if len(unseen) else agreeing
            row = int(self._rng.choice(rows)) if len(rows) else None
        elif not len(self.table):
            row = None
        else:
            row = int(self._rng.integers(len(self.table))) if self.exhausted else self.choose(study)
        if row is not None:
            self.open[row] = False
        return row

    def _close_proposed(self, study: Study, current: FrozenTrial) -> None:
        """Close the rows of trials that were added, enqueued or proposed by another sampler."""
        ended = True
        # Read each trial once. The count stops at the first trial that still runs, because others may change
        # it.
        for trial in study.get_trials(deepcopy=False)[self._trials_seen :]:
            if trial.number != current.number:
                self.close(trial.params)
            ended = (
                ended and trial.state.is_finished()
            )  # trials of other processes may get their parameters later
            self._trials_seen += ended

    def _require_one_objective(self, study: Study) -> None:
        if len(study.directions) > 1:
            raise ValueError("expected a study of one objective")

    def __getstate__(self) -> dict[str, Any]:
        # A sampler may be pickled, for example for parallel workers; a lock cannot.
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state | {"_lock": threading.RLock()}


class RandomTableSampler(TableSampler):
    """Proposes open rows uniformly at random, also in studies of several objectives."""

    def _require_one_objective(self, study: Study) -> None:
        """Accept any number of objectives: values are not read."""


class BoundSampler(TableSampler):
    """Proposes the open row with the lowest bound first; ties are broken at random."""

    def choose(self, study: Study) -> int:
        """Return the open row with the lowest bound."""
        return int(self._order[np.argmax(self.open[self._order])])

    def _begin(self, space: StudySpace, prospects: Prospects) -> None:
        super()._begin(space, prospects)
        # Sorted once: `choose` then takes the first open row. Random numbers break ties between equal bounds.
        self._order = np.lexsort((self._rng.random(len(self.table)), np.asarray(prospects.bounds_us)))
