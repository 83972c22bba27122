"""Sampler overhead: time from an outcome to the next proposal, on synthetic spaces."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tunebench.outcome import Measured, Verification
from tunebench.search.sampler import Prospects
from tunebench.search.variant_search import VariantSearch
from tunebench.space import Parameter, Space

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

SIZES = {18_000: (5, 5, 6, 5, 6, 4), 1_000_000: (10,) * 6}
"""Numbers of values of the parameters, by size of the synthetic space in configurations."""

NOT_VERIFIED = Verification(how="not verified", detail="synthetic")


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """Time to the first proposal of a sampler, and from each outcome to the next proposal, in seconds."""

    first_s: float
    then_s: tuple[float, ...]


def thinking(sampler: str, values: Sequence[int], proposals: int) -> Thinking:
    """Measure the overhead of a sampler in a synthetic space.

    Args:
        sampler: Name of the sampler.
        values: Number of values of each parameter.
        proposals: Number of outcomes and proposals.
    """
    prospects, times_us = synthetic(values)
    began = time.perf_counter()
    search = VariantSearch("synthetic", prospects, sampler=sampler, seed=0)
    proposal = search.ask(np.inf)
    first_s, then_s = time.perf_counter() - began, []
    for _ in range(proposals):
        assert proposal is not None
        outcome = _measured(float(times_us[proposal.row]))
        began = time.perf_counter()
        search.tell(proposal, outcome)
        proposal = search.ask(search.best_us)
        then_s.append(time.perf_counter() - began)
    return Thinking(first_s=first_s, then_s=tuple(then_s))


def synthetic(values: Sequence[int]) -> tuple[Prospects, Array]:
    """Return a space in which everything is valid, and its times in microseconds.

    Parameters take powers of two. Two figures are products of two parameters each, as for real kernels. Times
    grow with the squared distance from one configuration, each multiplied by a random factor between 0.8 and
    1.2.
    """
    names = "abcdef"[: len(values)]
    parameters = [
        Parameter(name, tuple(2**i for i in range(count)), "made up")
        for name, count in zip(names, values, strict=True)
    ]
    table = Space(tuple(parameters)).enumerate()
    threads, smem = (table[first] * table[second] for first, second in ("ab", "cd"))
    away = np.square(table.ordinals - np.array(values) / 3).sum(axis=1)
    times_us = 100 + 10 * away * np.random.default_rng(0).uniform(0.8, 1.2, len(table))
    figures = {"threads": threads, "smem": smem}
    return Prospects(table=table, bounds_us=np.zeros(len(table)), figures=figures), times_us


def _measured(us: float) -> Measured:
    return Measured(median_us=us, ci_us=(us, us), samples_us=(us,), cache="warm", verification=NOT_VERIFIED)
