"""A Gaussian process over configurations, which predicts the times of configurations that are not measured.

Its covariance is the sum of two kernels: a Matern kernel of the distance, with a length scale per parameter,
and an exponential of the number of parameters that differ, which separates configurations that are close but
behave differently, as when one more register spills. The scales maximize the posterior by gradient ascent,
continued from call to call.

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
    Integers = NDArray[np.integer[Any]]

__all__ = ["Coordinates", "GaussianProcess", "Posterior", "expected_improvement"]

LENGTH_SPREAD = 1.5
"""Prior standard deviation of the logarithm of a length scale."""

LEAST_NOISE = 1e-4
"""Least noise variance, as a fraction of the process variance; it keeps the covariance invertible."""

RATE = 0.15
"""Learning rate of the ascent, in units of the logarithms of the scales."""


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Configurations as inputs of the process.

    Attributes:
        place: One row per configuration, one column per varying parameter or derived figure: the value scaled
            to 0 to 1, by logarithm if all values are positive.
        choice: One row per configuration, one column per varying parameter: index of its value among the
            values of all parameters.
        choices: Number of values of all parameters.
    """

    place: Array
    choice: Integers
    choices: int

    def __len__(self) -> int:
        return len(self.place)

    def take(self, rows: Any) -> Coordinates:
        """Return the given rows (indices or a mask)."""
        return Coordinates(self.place[rows], self.choice[rows], self.choices)

    def differing(self, other: Coordinates) -> Array:
        """Return the number of differing parameters between each row and each row of `other`."""
        count: Array = self.choice.shape[1] - self._chosen() @ other._chosen().T
        return count

    def _chosen(self) -> Array:
        """Return the one-hot encoding of `choice`; inner products count equal parameters."""
        chosen = np.zeros((len(self), self.choices), np.float32)
        np.put_along_axis(chosen, self.choice, 1.0, axis=1)
        return chosen

    @classmethod
    def of(cls, table: Table, figures: Mapping[str, Array]) -> Coordinates:
        """Return the coordinates of every row of a table.

        Args:
            table: The configurations.
            figures: Derived quantities, such as the number of threads: one non-negative number per row. Each
                that varies becomes a column of `place`.
        """
        scaled, choices, count = [], [], 0
        for parameter, ordinals in zip(table.space.parameters, table.ordinals.T, strict=True):
            if np.any(ordinals != ordinals[:1]):
                scaled.append(_between(_numbers(parameter.values)[ordinals]))
                choices.append(ordinals + count)
                count += len(parameter.values)
        scaled += [_between(figure) for figure in figures.values() if np.ptp(figure)]
        coordinates = np.array(scaled, np.float32).reshape(-1, len(table))
        choice = np.array(choices, np.int32).reshape(-1, len(table))
        return cls(coordinates.T.copy(), choice.T.copy(), count)


def _numbers(values: tuple[Any, ...]) -> Array:
    """Return ascending numbers unchanged, and other values by their index."""
    numeric = all(isinstance(value, int | float) for value in values) and sorted(values) == list(values)
    return np.array(values if numeric else range(len(values)), dtype=np.float64)


def _between(values: Array) -> Array:
    """Return values scaled to 0 to 1, by logarithm if all are positive."""
    spread = np.log(values) if values.min() > 0 else values
    scaled: Array = (spread - spread.min()) / np.ptp(spread)
    return scaled


@dataclass(frozen=True, slots=True)
class Posterior:
    """Posterior normal distribution of each configuration.

    Attributes:
        mean: Mean of the observed quantity.
        sigma: Standard deviation.
    """

    mean: Array
    sigma: Array


@dataclass(frozen=True, slots=True)
class _Scales:
    """Hyperparameters of the process.

    Attributes:
        logs: Logarithms of: the length scale of each column of `place`; the odds of the Matern kernel against
            the kernel of differences; the noise variance, as a fraction of the rest; the decay per differing
            parameter.
    """

    logs: Array

    @classmethod
    def usual(cls, columns: int) -> _Scales:
        """Return the mode of the prior."""
        return cls(np.concatenate([np.zeros(columns), _USUAL]))

    @property
    def lengths(self) -> Array:
        """Length scale of each column, as a fraction of its range."""
        return np.exp(self.logs[:-3])

    @property
    def share(self) -> float:
        """Weight of the Matern kernel; the kernel of differences has the remaining weight."""
        return 1.0 / (1.0 + math.exp(-self.logs[-3]))

    @property
    def noise(self) -> float:
        """Noise variance, as a fraction of the process variance."""
        return math.exp(self.logs[-2])

    @property
    def decay(self) -> float:
        """Decay of the correlation per differing parameter."""
        return math.exp(self.logs[-1])

    def log_prior(self) -> tuple[float, Array]:
        """Return the log prior and its gradient."""
        spread = np.concatenate([np.full(len(self.logs) - 3, LENGTH_SPREAD), _SPREAD])
        off = (self.logs - _Scales.usual(len(self.logs) - 3).logs) / spread
        return -0.5 * float(off @ off), -off / spread


_USUAL, _SPREAD = np.array([1.0, -5.0, 0.0]), np.array([1.5, 1.5, 0.7])
"""Prior mean and standard deviation of the logarithms of share, noise and decay."""


@dataclass(frozen=True, slots=True)
class _Fitted:
    """The factorized observations, as `predict` needs them.

    Attributes:
        inverse: Inverse of the Cholesky factor of their covariance.
        weights: `inverse` times the observations.
        variance: Variance of the process.
    """

    inverse: Array
    weights: Array
    variance: float


class GaussianProcess:
    """A Gaussian process for a few hundred observations; its scales persist between calls of `fit`.

    Args:
        columns: Number of columns of `Coordinates.place`.
    """

    def __init__(self, columns: int) -> None:
        self._scales = _Scales.usual(columns)
        self._momentum = _Momentum(columns + 3)

    def fit(self, seen: Coordinates, observed: Array, *, steps: int) -> None:
        """Fit the process to observations.

        Args:
            seen: Configurations of the observations.
            observed: One value per configuration.
            steps: Steps of the ascent of the scales.
        """
        self._seen = seen
        self._mean, self._spread = float(observed.mean()), float(observed.std()) or 1.0
        # The prior of the scales is for values of mean 0 and variance 1.
        standard = (observed - self._mean) / self._spread
        differing = seen.differing(seen).astype(np.float64)
        score, gradient, self._fitted = self._explain(self._scales, differing, standard)
        trial = self._scales
        for _ in range(steps):
            trial = _Scales(trial.logs + self._momentum.step(gradient))
            try:
                new, gradient, fitted = self._explain(trial, differing, standard)
            except np.linalg.LinAlgError:
                break
            # Steps of the ascent may go too far: keep the best scales, but continue from the last ones with
            # their momentum.
            if new > score:
                score, self._scales, self._fitted = new, trial, fitted

    def predict(self, where: Coordinates) -> Posterior:
        """Return the posterior of other configurations."""
        fitted, scales = self._fitted, self._scales
        stretch = np.float32(1) / scales.lengths.astype(np.float32)
        distance = _distance(self._seen.place * stretch, where.place * stretch)
        share, decay = np.float32(scales.share), np.float32(scales.decay)
        similarity = share * _matern(distance)
        if share < 1:
            similarity += (1 - share) * np.exp(-decay * self._seen.differing(where))
        across = fitted.inverse.astype(np.float32) @ similarity
        # In f32, rounding can make a variance negative where a configuration was observed.
        unexplained = np.maximum(np.float32(1e-9), 1 - np.einsum("ij,ij->j", across, across))
        return Posterior(
            mean=self._mean + self._spread * (fitted.weights.astype(np.float32) @ across),
            sigma=self._spread * np.sqrt(np.float32(fitted.variance) * unexplained),
        )

    def _explain(self, scales: _Scales, differing: Array, standard: Array) -> tuple[float, Array, _Fitted]:
        """Return the log posterior of scales, its gradient, and the factorized observations.

        The variance of the process is the one that maximizes the likelihood.

        Raises:
            LinAlgError: if the covariance is not positive definite.
        """
        count, share = len(standard), scales.share
        coordinates = self._seen.place.astype(np.float64) / scales.lengths
        distance = _distance(coordinates, coordinates)
        near, same = _matern(distance), np.exp(-scales.decay * differing)
        covariance = share * near + (1 - share) * same
        covariance[np.diag_indices(count)] += LEAST_NOISE + scales.noise
        lower = np.linalg.cholesky(covariance)
        inverse = np.linalg.inv(lower)
        weights = inverse @ standard
        # In closed form, so that the ascent has one scale less to find.
        variance = max(1e-12, float(weights @ weights) / count)
        prior, pull = scales.log_prior()
        score = prior - 0.5 * count * math.log(variance) - float(np.log(np.diag(lower)).sum())
        alpha = inverse.T @ weights
        slope = 0.5 * (
            np.outer(alpha, alpha) / variance - inverse.T @ inverse
        )  # derivative of the score by the covariance
        steep = slope * (share * 5 / 3 * (1 + distance) * np.exp(-distance))
        gradient = np.empty(len(scales.logs))
        # By the logarithm of each length: the sum over pairs of steep * (difference of places) ** 2, without
        # a matrix for each column.
        gradient[:-3] = 2 * (
            np.square(coordinates).T @ steep.sum(axis=1) - (coordinates * (steep @ coordinates)).sum(axis=0)
        )
        gradient[-3] = share * (1 - share) * float((slope * (near - same)).sum())
        gradient[-2] = scales.noise * float(np.trace(slope))
        gradient[-1] = (share - 1) * scales.decay * float((slope * same * differing).sum())
        return score, gradient + pull, _Fitted(inverse, weights, variance)


class _Momentum:
    """Gradient ascent with momentum and a step size per scale (Adam).

    Source: Kingma and Ba, "Adam: a method for stochastic optimization", 2015.
    """

    def __init__(self, size: int) -> None:
        self._mean, self._square, self._count = np.zeros(size), np.zeros(size), 0

    def step(self, gradient: Array) -> Array:
        """Return the next step."""
        self._count += 1
        self._mean += 0.2 * (gradient - self._mean)
        self._square += 0.05 * (np.square(gradient) - self._square)
        mean, square = self._mean / (1 - 0.8**self._count), self._square / (1 - 0.95**self._count)
        step: Array = RATE * mean / (np.sqrt(square) + 1e-8)
        return step


def _distance(x: Array, y: Array) -> Array:
    """Return the distance of each row of `x` from each of `y`, times the root of 5."""
    # |x - y|^2 = |x|^2 + |y|^2 - 2 x y: one matrix product instead of all differences.
    squares = np.square(x).sum(axis=1)[:, None] + np.square(y).sum(axis=1) - 2 * (x @ y.T)
    distance: Array = np.sqrt(np.maximum(0, 5 * squares))
    return distance


def _matern(distance: Array) -> Array:
    """Return the Matern 5/2 correlation at distances of `_distance`."""
    correlation: Array = (1 + distance * (1 + distance / 3)) * np.exp(-distance)
    return correlation


def expected_improvement(posterior: Posterior, least: Array) -> Array:
    """Return the expected improvement of each configuration below its `least`.

    Args:
        posterior: Posterior of the configurations.
        least: Value to improve on, one per configuration.
    """
    u = (least - posterior.mean) / posterior.sigma
    density = np.exp(-0.5 * np.square(u)) / math.sqrt(2.0 * math.pi)
    gain: Array = posterior.sigma * (u * _normal_cdf(u) + density)
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
