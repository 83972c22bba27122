"""Optuna samplers that propose only valid, unseen configurations of a table.

They are ordinary `optuna.samplers.BaseSampler`s: any study whose objective suggests the parameters of the
table's space as categorical may use them. A running trial counts as taken. When the table is exhausted they
repeat a configuration at random, as any sampler must propose something; `TableSampler.exhausted` tells.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial

from tunebench.space import Table

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

__all__ = ["BoundSampler", "Prospects", "RandomTableSampler", "TableSampler", "distributions"]


@dataclass(frozen=True, kw_only=True)
class Prospects:
    """The valid configurations, and what is known of them before any is measured.

    Attributes:
        table: The configurations.
        bounds_us: Bound of each, in microseconds.
        figures: What else follows from each, such as its threads: by name, one number a row, none negative.
        elsewhere_us: What each took on other devices: a column a device, infinite for a failure, NaN where
            it is not known.
    """

    table: Table
    bounds_us: Array
    figures: Mapping[str, Array] = field(default_factory=dict)
    elsewhere_us: tuple[Array, ...] = ()


def distributions(table: Table) -> dict[str, BaseDistribution]:
    """Return the distribution of each parameter of a table's space."""
    return {p.name: CategoricalDistribution(p.values) for p in table.space.parameters}


class TableSampler(BaseSampler):
    """Proposes rows of a table, none twice; subclasses say which row next.

    Args:
        table: The valid configurations.
        seed: Seed of all that is random here.
    """

    def __init__(self, table: Table, *, seed: int) -> None:
        self.table = table
        self.open = np.ones(len(table), dtype=bool)
        """Rows that may still be proposed; a caller may close further rows, never open one."""
        self._rng = np.random.default_rng(seed)
        self._trials_seen = 0

    @property
    def exhausted(self) -> bool:
        """Whether every row has been proposed or closed."""
        return not self.open.any()

    def reseed_rng(self) -> None:
        """Draw a new seed, as Optuna does in parallel workers."""
        self._rng = np.random.default_rng()

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Return the whole space: parameters are drawn together, or constraints could not hold."""
        return distributions(self.table)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return the parameters of an open row, and close it."""
        self._close_proposed(study, trial)
        enqueued = trial.system_attrs.get("fixed_params")
        if enqueued is not None:  # Optuna overrides whatever is returned here
            self.close(enqueued)
            return {}
        if not len(self.table):
            return {}
        if self.exhausted:
            return dict(self.table.config(int(self._rng.integers(len(self.table)))))
        row = self.choose(study)
        self.open[row] = False
        return dict(self.table.config(row))

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Return a random value for a parameter that is not of the table."""
        if isinstance(param_distribution, CategoricalDistribution):
            return param_distribution.choices[int(self._rng.integers(len(param_distribution.choices)))]
        low, high = (getattr(param_distribution, end) for end in ("low", "high"))
        value = param_distribution.to_external_repr(self._rng.uniform(low, high))
        return round(value) if isinstance(low, int) else value

    def choose(self, study: Study) -> int:
        """Return an open row; at least one is open. The study must not be changed."""
        return int(self._rng.choice(np.flatnonzero(self.open)))

    def _close_proposed(self, study: Study, current: FrozenTrial) -> None:
        """Close the rows of trials that came from elsewhere: added, enqueued, or of another sampler."""
        for trial in study.get_trials(deepcopy=False)[self._trials_seen :]:
            if trial.number != current.number:
                self.close(trial.params)
        self._trials_seen = max(self._trials_seen, current.number)

    def close(self, values: Mapping[str, Any]) -> None:
        """Mark one configuration as taken, if it is a row of the table."""
        row = self.table.row(values)
        if row is not None:
            self.open[row] = False


class RandomTableSampler(TableSampler):
    """Uniform over the open rows."""


class BoundSampler(TableSampler):
    """Lowest bound first: what could be fastest is tried before what cannot; ties at random.

    Args:
        table: The valid configurations.
        bounds_us: Bound of each row, in microseconds.
        seed: Seed of all that is random here.
    """

    def __init__(self, table: Table, bounds_us: Array, *, seed: int) -> None:
        super().__init__(table, seed=seed)
        self._order = np.lexsort((self._rng.random(len(table)), np.asarray(bounds_us)))
        self._next = 0

    def choose(self, study: Study) -> int:
        """Return the open row of the lowest bound."""
        while not self.open[self._order[self._next]]:
            self._next += 1
        return int(self._order[self._next])
