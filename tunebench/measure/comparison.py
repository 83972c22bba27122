"""Comparison of two configurations from rounds in which both were timed: is one faster beyond noise?

Each round yields one ratio of medians, so that a drift of the machine between rounds affects both alike. The
relevant noise is the variation between rounds, not between samples of one round: samples taken in a row share
the state of the machine. The confidence interval is therefore Student's, over the logarithms of the ratios.

Source: Kalibera and Jones, "Rigorous benchmarking in reasonable time", ISMM 2013 (repeat on the level that
varies, report ratios with intervals); Student's distribution for integer degrees of freedom by Abramowitz and
Stegun, "Handbook of mathematical functions", 26.7.3 and 26.7.4.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tunebench._lazy import np
from tunebench.errors import InputError

__all__ = ["Comparison", "compare", "randomization_probability", "student_probability", "student_quantile"]

LEVEL = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Speed of this configuration relative to another.

    Attributes:
        ratio: Time of the other over time of this one: above 1, this one is faster.
        low: Lower end of the 95 % confidence interval; 0 with a single round, which has no noise estimate.
        high: Upper end; infinite with a single round.
        probability: Probability that this one is faster than the other.
    """

    ratio: float
    low: float
    high: float
    probability: float

    @property
    def faster(self) -> bool:
        """Whether this one is faster beyond noise."""
        return self.low > 1

    @property
    def tied(self) -> bool:
        """Whether neither is faster beyond noise."""
        return self.low <= 1 <= self.high

    def to_json(self) -> dict[str, float | None]:
        """Return the comparison as JSON data; an infinite upper end is None."""
        return {**asdict(self), "high": self.high if math.isfinite(self.high) else None}


def compare(this: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> Comparison:
    """Compare two configurations by samples from rounds in which both were timed.

    Args:
        this: Samples of each round, in microseconds.
        other: Samples of the same rounds, in the same order.

    Raises:
        InputError: There is no round, or a round lacks samples of one configuration.
    """
    if not this or len(this) != len(other) or not all(map(len, (*this, *other))):
        raise InputError(
            f"expected samples of both configurations in every round, got {len(this)} and {len(other)} rounds"
        )
    medians = [(statistics.median(a), statistics.median(b)) for a, b in zip(this, other, strict=True)]
    logs = [math.log(b / a) for a, b in medians]
    mean = statistics.fmean(logs)
    if len(logs) < 2:
        return Comparison(ratio=math.exp(mean), low=0.0, high=math.inf, probability=0.5)
    error = statistics.stdev(logs) / math.sqrt(len(logs))
    reach = student_quantile((1 + LEVEL) / 2, len(logs) - 1) * error
    return Comparison(
        ratio=math.exp(mean),
        low=math.exp(mean - reach),
        high=math.exp(mean + reach),
        probability=_probability(mean, error, len(logs) - 1),
    )


def _probability(mean: float, error: float, freedom: int) -> float:
    """Return the confidence that a mean is above 0; without variation it is certain, or a tie."""
    if error == 0:
        return 0.5 if mean == 0 else float(mean > 0)
    return student_probability(mean / error, freedom)


def student_probability(t: float, freedom: int) -> float:
    """Return the cumulative probability of Student's distribution."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine, odd = math.cos(angle), freedom % 2
    total, term = 0.0, cosine if odd else 1.0
    for k in range(1, freedom // 2 + 1):
        total += term
        term *= cosine**2 * (2 * k / (2 * k + 1) if odd else (2 * k - 1) / (2 * k))
    inside = math.sin(angle) * total
    return 0.5 + ((angle + inside) / math.pi if odd else inside / 2)


@functools.cache
def student_quantile(probability: float, freedom: int) -> float:
    """Return the quantile of Student's distribution for a probability above one half."""
    low, high = 0.0, 1e6
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if student_probability(middle, freedom) < probability else (low, middle)
    return low


def randomization_probability(smaller: Sequence[float], larger: Sequence[float]) -> float:
    """Return the probability that random labels make one group at least this much smaller than the other.

    The test is exact if each sample got its label at random: then a small probability has no other cause than
    the label, whatever the noise. Of equal samples, those of the first group count as larger.

    Args:
        smaller: Samples of the group that is expected to be smaller.
        larger: Samples of the other group.

    Source: Wilcoxon, "Individual comparisons by ranking methods", 1945: the distribution of the rank sum.
    """
    labelled = sorted([(us, True) for us in smaller] + [(us, False) for us in larger])
    rank_sum = sum(rank for rank, (_, chosen) in enumerate(labelled, 1) if chosen)
    count, total = len(smaller), len(labelled)
    ways = np.zeros((count + 1, rank_sum + 1))  # by number of chosen ranks and their sum
    ways[0, 0] = 1
    for rank in range(1, min(total, rank_sum) + 1):
        ways[1:, rank:] += ways[:-1, : rank_sum + 1 - rank].copy()
    return float(ways[count].sum() / math.comb(total, count))
