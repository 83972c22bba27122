"""The search space of an Optuna study as a table of configurations, or a table as such a space."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from tunebench.errors import InputError
from tunebench.space import Parameter, Space, Table

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

__all__ = ["Constraint", "StudySpace"]

Constraint = Callable[[Mapping[str, Any]], bool]
"""Says whether parameters, by name, are valid together."""

MOST_POINTS = 1 << 20
"""Of larger spaces the table holds a random sample of so many points, less what the constraint forbids."""

MOST_LEVELS = 1000
"""Values of a range of integers or of steps that are told apart."""

LEVELS = 65
"""Values that stand for a continuous range."""


@dataclass(frozen=True, kw_only=True)
class StudySpace:
    """What a study suggests, and the rows that stand for it.

    Attributes:
        distributions: By name, as the study suggests them.
        table: The valid configurations; its parameters are in the order of `distributions`.
        levels: The values of each parameter, as the study knows them, in the order of the table's.
    """

    distributions: Mapping[str, BaseDistribution]
    table: Table
    levels: tuple[tuple[Any, ...], ...]

    @classmethod
    def of_table(cls, table: Table) -> StudySpace:
        """Return the space whose parameters are those of a table, each categorical."""
        parameters = table.space.parameters
        return cls(
            distributions={p.name: CategoricalDistribution(p.values) for p in parameters},
            table=table,
            levels=tuple(p.values for p in parameters),
        )

    @classmethod
    def of(
        cls,
        distributions: Mapping[str, BaseDistribution],
        constraint: Constraint | None,
        rng: np.random.Generator,
    ) -> StudySpace:
        """Enumerate a search space; a continuous range becomes a grid, a very large space a sample.

        Raises:
            InputError: if no configuration is valid, or there are more than 2**63.
        """
        most = int(2 ** (62 / len(distributions)))
        levels = tuple(_levels(distribution, most) for distribution in distributions.values())
        space = Space(
            tuple(Parameter(f"p{i}", _places(values), "of the study") for i, values in enumerate(levels))
        )
        points = _points(tuple(map(len, levels)), rng)
        if constraint is not None:
            names = tuple(distributions)
            valid = [
                bool(
                    constraint({name: levels[i][k] for i, (name, k) in enumerate(zip(names, p, strict=True))})
                )
                for p in points
            ]
            points = points[np.array(valid, dtype=bool)]
        if not len(points):
            raise InputError(f"no configuration of {', '.join(distributions)} satisfies the constraint")
        return cls(distributions=dict(distributions), table=Table(space, points), levels=levels)

    def row(self, params: Mapping[str, Any]) -> int | None:
        """Return the row of a trial's parameters, or None if they are none of the table's.

        What lies between the values of a range counts as the nearest of them.
        """
        found = []
        for (name, distribution), levels in zip(self.distributions.items(), self.levels, strict=True):
            if name not in params or not _contains(distribution, params[name]):
                return None
            if isinstance(distribution, CategoricalDistribution):
                found.append(int(distribution.to_internal_repr(params[name])))
            else:
                found.append(int(np.argmin(np.abs(np.array(levels) - params[name]))))
        row = int(self.table.find(np.array([found]))[0])
        return row if row >= 0 else None

    def rows_with(self, params: Mapping[str, Any]) -> Array:
        """Return which rows have the given values of some parameters."""
        agree = np.ones(len(self.table), dtype=bool)
        for i, (name, distribution) in enumerate(self.distributions.items()):
            if name in params:
                places = [_same(distribution, level, params[name]) for level in self.levels[i]]
                agree &= np.array(places)[self.table.ordinals[:, i]]
        return agree

    def params(self, row: int) -> dict[str, Any]:
        """Return the parameters of a row, as the study knows them."""
        ordinals = self.table.ordinals[row]
        return {
            name: levels[k] for name, levels, k in zip(self.distributions, self.levels, ordinals, strict=True)
        }


def _levels(distribution: BaseDistribution, most: int) -> tuple[Any, ...]:
    """Return the values of a parameter, or at most so many that stand for its range, ascending."""
    if isinstance(distribution, CategoricalDistribution):
        return tuple(distribution.choices)
    assert isinstance(distribution, IntDistribution | FloatDistribution), distribution
    low, high, step = distribution.low, distribution.high, distribution.step
    spread = np.geomspace if distribution.log else np.linspace
    if step is None:
        between = spread(low, high, min(LEVELS, most))[1:-1]
        return (low,) if low == high else (low, *map(float, between), high)
    count = round((high - low) / step) + 1
    places = np.arange(count)
    if count > min(MOST_LEVELS, most):
        evenly = spread(low, high, min(MOST_LEVELS, most)) - low
        places = np.unique(np.round(evenly / step).astype(np.int64))
    return tuple(min(high, low + int(place) * step) for place in places)


def _places(levels: tuple[Any, ...]) -> tuple[int | float, ...]:
    """Return ascending numbers as they are, so that they have distances, and anything else by its rank."""
    numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in levels)
    if numeric and all(a < b for a, b in itertools.pairwise(levels)):
        return levels
    return tuple(range(len(levels)))


def _points(counts: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Return every combination of so many values, or a sample of them: ascending rows of ordinals."""
    if math.prod(counts) <= MOST_POINTS:
        return np.indices(counts, dtype=np.int16).reshape(len(counts), -1).T
    drawn = np.stack([rng.integers(count, size=MOST_POINTS, dtype=np.int16) for count in counts], axis=1)
    unique: Array = np.unique(drawn, axis=0)
    return unique


def _contains(distribution: BaseDistribution, value: Any) -> bool:
    if isinstance(distribution, CategoricalDistribution):
        return value in distribution.choices
    assert isinstance(distribution, IntDistribution | FloatDistribution), distribution
    return isinstance(value, int | float) and distribution.low <= value <= distribution.high


def _same(distribution: BaseDistribution, level: Any, value: Any) -> bool:
    """Tell whether a level is what a fixed value stands for."""
    if isinstance(distribution, CategoricalDistribution):
        return bool(level == value)
    return math.isclose(level, value, rel_tol=1e-9, abs_tol=1e-12)
