"""A Gaussian process over configurations: what is believed of those not measured yet.

Two configurations are alike in two ways, and the process weighs both: by distance, parameter by parameter and
each to its own scale, and by the number of parameters that differ, which tells apart what is close and yet
behaves otherwise, as when one more register spills. The scales are learned from the measurements by a random
ascent of their likelihood that goes on from call to call.

Source: Rasmussen and Williams, "Gaussian Processes for Machine Learning", 2006 (chapters 2, 4.2 and 5.4);
Jones, Schonlau and Welch, "Efficient Global Optimization of Expensive Black-Box Functions", 1998 (expected
improvement).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tunebench.space import Table

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.floating[Any]]

__all__ = ["Belief", "Coordinates", "GaussianProcess", "expected_improvement"]

LENGTH_SPREAD = 2.6
"""Standard deviation of the logarithm of a length, before anything is known."""

LEAST_NOISE = 1e-4
"""Least variance of noise, as a share of that of the process: it keeps likeness invertible."""


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Configurations as the process sees them.

    Attributes:
        place: One row a configuration, one column a parameter or derived figure that varies: where its value
            stands between the least (0) and the greatest (1), by logarithm if all are positive.
        choice: One row a configuration, one column a value of such a parameter: 1 where it is chosen.
    """

    place: Array
    choice: Array

    def __len__(self) -> int:
        return len(self.place)

    def astype(self, kind: type[np.floating[Any]]) -> Coordinates:
        """Return the same in another precision."""
        return Coordinates(self.place.astype(kind), self.choice.astype(kind))

    def take(self, rows: Any) -> Coordinates:
        """Return the given rows (indices or a mask)."""
        return Coordinates(self.place[rows], self.choice[rows])

    @classmethod
    def of(cls, table: Table, figures: Mapping[str, Array]) -> Coordinates:
        """Return the coordinates of every row of a table.

        Args:
            table: The configurations.
            figures: What follows from each, such as its threads: one positive number or zero a row. Each
                is one more column of `place`, unless it is the same for all.
        """
        places, choices = [], []
        for i, parameter in enumerate(table.space.parameters):
            present, rank = np.unique(table.ordinals[:, i], return_inverse=True)
            if len(present) > 1:
                places.append(_between(_numbers([parameter.values[j] for j in present]))[rank])
                choices.append(np.equal.outer(rank, np.arange(len(present))))
        places += [_between(figure) for figure in figures.values() if np.ptp(figure)]
        none = np.zeros((len(table), 0), np.float32)
        return cls(
            np.stack(places, axis=1, dtype=np.float32) if places else none,
            np.concatenate(choices, axis=1, dtype=np.float32) if choices else none,
        )


def _numbers(values: list[Any]) -> Array:
    """Return ascending numbers as they are, and anything else by its rank."""
    numeric = all(isinstance(value, int | float) for value in values) and sorted(values) == values
    return np.array(values if numeric else range(len(values)), dtype=np.float64)


def _between(values: Array) -> Array:
    """Return where each value stands between the least and the greatest."""
    places = np.log(values) if values.min() > 0 else values
    scaled: Array = (places - places.min()) / np.ptp(places)
    return scaled


@dataclass(frozen=True, slots=True)
class _Scales:
    """What the likelihood decides; all but `share` as logarithms.

    Attributes:
        lengths: How far along each parameter configurations stay alike, as a share of its range.
        share: Logit of the part of the variance that goes with distance; the rest goes with differences.
        noise: Variance of what nothing explains, as a share of that of the rest.
        decay: How fast likeness falls with each parameter that differs.
    """

    lengths: Array
    share: float = 1.0
    noise: float = -5.0
    decay: float = 0.0

    def log_prior(self) -> float:
        """Return how likely these are before anything is measured: vague, so that data soon outweigh it."""
        return -0.5 * float(
            np.square(self.lengths / LENGTH_SPREAD).sum()
            + ((self.share - 1.0) / 1.5) ** 2
            + ((self.noise + 5.0) / 1.5) ** 2
            + (self.decay / 0.7) ** 2
        )

    def step(self, rng: np.random.Generator) -> _Scales:
        """Return a neighbour: some of these, moved a little."""
        moves = rng.normal(0.0, 0.5, len(self.lengths) + 3) * (rng.random(len(self.lengths) + 3) < 0.4)
        share, noise, decay = moves[-3:]
        return _Scales(self.lengths + moves[:-3], self.share + share, self.noise + noise, self.decay + decay)


@dataclass(frozen=True, slots=True)
class Belief:
    """What is believed of some configurations: a normal distribution of each.

    Attributes:
        mean: Of the quantity that was observed.
        sigma: Its standard deviation.
    """

    mean: Array
    sigma: Array


class GaussianProcess:
    """Learns from a few hundred observations; what it has learned of the scales stays for the next.

    Args:
        columns: Of `Coordinates.place`.
        rng: Of the ascent.
    """

    def __init__(self, columns: int, rng: np.random.Generator) -> None:
        self._rng = rng
        self._scales = _Scales(rng.normal(0.0, 0.3, columns))

    def fit(self, seen: Coordinates, observed: Array, *, steps: int) -> None:
        """Take over observations, after `steps` trials of other scales.

        Args:
            seen: Where they were made.
            observed: One figure each.
            steps: More cost more and explain more.
        """
        self._seen = seen
        self._mean, self._spread = float(observed.mean()), float(observed.std()) or 1.0
        standard = (observed - self._mean) / self._spread
        best, self._fitted = self._factors(self._scales, standard)
        for _ in range(steps):
            scales = self._scales.step(self._rng)
            score, factors = self._factors(scales, standard)
            if score > best:
                best, self._scales, self._fitted = score, scales, factors

    def believe(self, where: Coordinates) -> Belief:
        """Return what the observations say of other configurations."""
        inverse, weights, variance = self._fitted
        across = inverse @ _likeness(self._scales, self._seen, where)
        unexplained = np.maximum(1e-9, 1.0 - np.square(across).sum(axis=0))
        return Belief(
            mean=self._mean + self._spread * (weights @ across),
            sigma=self._spread * np.sqrt(variance * unexplained),
        )

    def _factors(self, scales: _Scales, standard: Array) -> tuple[float, tuple[Array, Array, float]]:
        """Return the log posterior of scales, and what `believe` needs of them.

        The variance of the process is integrated out: it is the one that explains the observations best.
        """
        count = len(standard)
        exact = self._seen.astype(np.float64)
        covariance = _likeness(scales, exact, exact)
        covariance[np.diag_indices(count)] += max(LEAST_NOISE, math.exp(scales.noise))
        lower = np.linalg.cholesky(covariance)
        inverse = np.linalg.inv(lower)
        weights = inverse @ standard
        variance = max(1e-12, float(weights @ weights) / count)
        score = -0.5 * count * math.log(variance) - float(np.log(np.diag(lower)).sum()) + scales.log_prior()
        return score, (inverse.astype(np.float32), weights.astype(np.float32), variance)


def _likeness(scales: _Scales, a: Coordinates, b: Coordinates) -> Array:
    """Return the correlation of each of `a` with each of `b`: Matern 5/2, and a power of the differences."""
    kind = a.place.dtype
    stretch = np.exp(-scales.lengths).astype(kind)
    share = kind.type(1.0 / (1.0 + math.exp(-scales.share)))
    x, y = a.place * stretch, b.place * stretch
    squares = np.square(x).sum(axis=1)[:, None] + np.square(y).sum(axis=1) - 2 * (x @ y.T)
    distance = np.sqrt(np.maximum(0, 5 * squares))
    smooth = (1 + distance + np.square(distance) / 3) * np.exp(-distance)
    differing = a.choice[:1].sum() - a.choice @ b.choice.T
    likeness: Array = share * smooth + (1 - share) * np.exp(-kind.type(math.exp(scales.decay)) * differing)
    return likeness


def expected_improvement(belief: Belief, least: Array) -> Array:
    """Return by how much each is expected to fall below its own `least`."""
    u = (least - belief.mean) / belief.sigma
    density = np.exp(-0.5 * np.square(u)) / math.sqrt(2.0 * math.pi)
    gain: Array = belief.sigma * (u * _normal_cdf(u) + density)
    return gain


def _normal_cdf(u: Array) -> Array:
    """Return the standard normal distribution function to 1e-7.

    Source: Abramowitz and Stegun, "Handbook of Mathematical Functions", 26.2.17.
    """
    t = 1.0 / (1.0 + 0.2316419 * np.abs(u))
    series = t * (0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))))
    tail = np.exp(-0.5 * np.square(u)) / math.sqrt(2.0 * math.pi) * series
    cdf: Array = np.where(u > 0, 1.0 - tail, tail)
    return cdf
