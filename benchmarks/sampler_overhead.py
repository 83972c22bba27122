"""How long a sampler thinks: the time from an outcome to the next proposal, on synthetic spaces."""

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
"""Configurations of a space, and how many values its parameters have."""

NOT_VERIFIED = Verification(how="not verified", detail="synthetic")


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """Seconds until a sampler's first proposal, and from each outcome to the next one."""

    first_s: float
    then_s: tuple[float, ...]


def thinking(sampler: str, values: Sequence[int], proposals: int) -> Thinking:
    """Time a sampler over so many proposals in a space of parameters with so many values."""
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
    """Return a space where all is valid, as kernels' spaces look to a sampler, and its times in microseconds.

    Values double, two figures follow from four of them, and times grow with the distance from one
    configuration, each by up to a fifth more or less than that.
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
