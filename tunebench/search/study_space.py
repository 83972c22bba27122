"""Conversion between the search space of an Optuna study and a table of configurations."""

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
"""Returns whether parameters, by name, are valid together."""

MOST_POINTS = 1 << 20
"""Size of the random sample of larger spaces, before the constraint is applied."""

MOST_LEVELS = 1000
"""Limit on the values of a range of integers or steps; longer ranges are thinned out."""

LEVELS = 65
"""Grid points of a continuous range."""


@dataclass(frozen=True, kw_only=True)
class StudySpace:
    """The distributions of a study, and the table of its valid configurations.

    Attributes:
        distributions: The distributions by parameter name.
        table: The valid configurations; its parameters are in the order of `distributions`.
        levels: The values of each parameter in the study, in the order of the table.
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

        Args:
            distributions: The distributions by parameter name.
            constraint: Returns whether parameters are valid together; None allows all.
            rng: Draws the sample.

        Raises:
            InputError: if no configuration is valid, or there are more than 2**63.
        """
        # The table numbers its configurations in 63 bits: limit the levels of each parameter so that all fit.
        max_levels = int(2 ** (62 / len(distributions)))
        levels = tuple(_levels(distribution, max_levels) for distribution in distributions.values())
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
        """Return the row of the parameters of a trial, or None if there is none.

        A value between two grid points counts as the nearer one.
        """
        ordinals = []
        for (name, distribution), levels in zip(self.distributions.items(), self.levels, strict=True):
            if name not in params or not _contains(distribution, params[name]):
                return None
            if isinstance(distribution, CategoricalDistribution):
                ordinals.append(int(distribution.to_internal_repr(params[name])))
            else:
                ordinals.append(int(np.argmin(np.abs(np.array(levels) - params[name]))))
        row = int(self.table.find(np.array([ordinals]))[0])
        return row if row >= 0 else None

    def rows_with(self, params: Mapping[str, Any]) -> Array:
        """Return a mask of the rows with the given values of some parameters."""
        agree = np.ones(len(self.table), dtype=bool)
        for i, (name, distribution) in enumerate(self.distributions.items()):
            if name in params:
                matches = [_same(distribution, level, params[name]) for level in self.levels[i]]
                agree &= np.array(matches)[self.table.ordinals[:, i]]
        return agree

    def params(self, row: int) -> dict[str, Any]:
        """Return the parameters of a row, with the values of the study."""
        ordinals = self.table.ordinals[row]
        return {
            name: levels[k] for name, levels, k in zip(self.distributions, self.levels, ordinals, strict=True)
        }


def _levels(distribution: BaseDistribution, max_levels: int) -> tuple[Any, ...]:
    """Return the values of a parameter, ascending; of a long range at most `max_levels` of them."""
    if isinstance(distribution, CategoricalDistribution):
        return tuple(distribution.choices)
    assert isinstance(distribution, IntDistribution | FloatDistribution), distribution
    low, high, step = distribution.low, distribution.high, distribution.step
    spread = np.geomspace if distribution.log else np.linspace
    if step is None:
        between = spread(low, high, min(LEVELS, max_levels))[1:-1]
        return (low,) if low == high else (low, *map(float, between), high)
    count = round((high - low) / step) + 1
    multiples = np.arange(count)
    if count > min(MOST_LEVELS, max_levels):
        evenly = spread(low, high, min(MOST_LEVELS, max_levels)) - low
        multiples = np.unique(np.round(evenly / step).astype(np.int64))
    return tuple(min(high, low + int(multiple) * step) for multiple in multiples)


def _places(levels: tuple[Any, ...]) -> tuple[int | float, ...]:
    """Return ascending numbers unchanged, which keeps distances, and other values by their index."""
    numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in levels)
    if numeric and all(a < b for a, b in itertools.pairwise(levels)):
        return levels
    return tuple(range(len(levels)))


def _points(counts: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Return all combinations of ordinals, or a sample of them, in ascending rows."""
    if math.prod(counts) <= MOST_POINTS:
        # int16 holds the ordinals of MOST_LEVELS values, in a quarter of the memory.
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
    """Return whether a level equals a fixed value."""
    if isinstance(distribution, CategoricalDistribution):
        return bool(level == value)
    return math.isclose(level, value, rel_tol=1e-9, abs_tol=1e-12)
