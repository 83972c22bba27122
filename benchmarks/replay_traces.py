"""Best time after each trial of a search in a part of a recorded tuning space, kept in a file.

A search asks for the same configurations whether its trials come at once or a few at a time. So one course of
it tells what any way of sharing a budget out would have found.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.sampler_replays import Data, version
from tunebench.cache_file import RecordedSpace
from tunebench.outcome import Result
from tunebench.search.loop import Budget, optimality_proof, run_search
from tunebench.search.optimality_proof import violates
from tunebench.search.variant_search import Proposal, VariantSearch
from tunebench.tuning.replay import ReplayExecutor, Space

LONGEST = 300
"""Trials that a course is followed for."""

SAMPLER = "surrogate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Subspace:
    """A part of a recorded space that stands for a subspace: some parameters are fixed.

    Attributes:
        space: The recording: kernel and device.
        fixed: Parameters and their values.
    """

    space: str
    fixed: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        return f"{self.space}[{','.join(f'{name}={value}' for name, value in self.fixed)}]"

    def of(self, data: Data) -> Space:
        """Return it as a space."""
        return Space.of(part(data.space(self.space).recording, dict(self.fixed)))


def part(recording: RecordedSpace, fixed: dict[str, int]) -> RecordedSpace:
    """Return the rows of a recording in which parameters have these values."""
    mask = np.logical_and.reduce([recording.table[name] == value for name, value in fixed.items()])
    rows = np.flatnonzero(mask)
    failures = {place: recording.failures[row] for place, row in enumerate(rows) if row in recording.failures}
    return dataclasses.replace(
        recording,
        table=recording.table.take(rows),
        times_us=recording.times_us[rows],
        fastest_us=recording.fastest_us[rows],
        failures=failures,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchTrace:
    """How one search went.

    Attributes:
        subspace: Of what, as text.
        seed: Of the sampler.
        by: The sampler's version.
        best_us: The best time after each trial; infinite before the first success.
        floor_us: The lowest bound that was still open then; the best time if nothing was.
        optimum_us: The least time there is.
        median_us: The median of the space's times: what is believed of it beforehand, and taken where
            nothing has succeeded.
        ended: Whether nothing was left after that.
    """

    subspace: str
    seed: int
    by: str
    best_us: tuple[float, ...]
    floor_us: tuple[float, ...]
    optimum_us: float
    median_us: float
    ended: bool

    def __len__(self) -> int:
        return len(self.best_us)

    def time_us(self, trials: int) -> float:
        """Return the best time after so many trials."""
        best_us = self.best_us[min(trials, len(self)) - 1] if trials else math.inf
        return best_us if math.isfinite(best_us) else self.median_us

    def record(self) -> dict[str, Any]:
        """Return it as JSON knows it: times where they change."""
        told = dataclasses.asdict(self)
        return told | {name: _changes(told[name]) for name in ("best_us", "floor_us")} | {"asked": len(self)}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> SearchTrace:
        """Read what `record` returns."""
        asked = record.pop("asked")
        for name in ("best_us", "floor_us"):
            record[name] = _filled(record[name], asked)
        return cls(**record)


def _changes(values: tuple[float, ...]) -> list[tuple[int, float | None]]:
    changed = [i for i, value in enumerate(values) if i == 0 or value != values[i - 1]]
    return [(i, values[i] if math.isfinite(values[i]) else None) for i in changed]


def _filled(changes: list[tuple[int, float | None]], length: int) -> tuple[float, ...]:
    values = np.full(length, np.inf)
    for start, value in changes:
        values[start:] = math.inf if value is None else value
    return tuple(values.tolist())


def follow(space: Space, seed: int, *, trials: int = LONGEST, name: str = "") -> SearchTrace:
    """Search a space, a trial at a time, as `tune_suite` searches a subspace in rounds.

    Args:
        space: Where.
        seed: Of the sampler.
        trials: How far.
        name: Of the subspace.
    """
    search = VariantSearch(space.recording.kernel, space.prospects(), sampler=SAMPLER, seed=seed)
    best_us, floor_us, budget = list[float](), list[float](), Budget(trials=0)

    def on_result(proposal: Proposal, result: Result) -> None:
        if violates(result.outcome, proposal.bound_us):
            proposal.search.distrust()

    executor = ReplayExecutor(space.recording)
    for trial in range(1, trials + 1):
        budget.trials = trial
        run_search(
            [search],
            executor,
            budget,
            make_task=lambda proposal: proposal,
            claim=lambda proposal: True,
            on_result=on_result,
        )
        if budget.done < trial:
            break
        best_us.append(search.best_us)
        floor_us.append(optimality_proof([search], search.best_us).floor_us)
    return SearchTrace(
        subspace=name,
        seed=seed,
        by=version(SAMPLER) or "",
        best_us=tuple(best_us),
        floor_us=tuple(floor_us),
        optimum_us=float(space.recording.optimum_us),
        median_us=float(np.nanmedian(space.recording.times_us)),
        ended=len(best_us) < trials,
    )


class TraceFile:
    """Courses in a file, a line each; what is missing is made when it is asked for."""

    def __init__(self, path: Path, data: Data) -> None:
        self._path, self._data = path, data
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        found = map(SearchTrace.from_record, map(json.loads, lines))
        self._found = {(one.subspace, one.seed): one for one in found if one.by == version(SAMPLER)}

    def get(self, subspace: Subspace, seed: int) -> SearchTrace:
        """Return the course of a search of today's sampler."""
        key = (str(subspace), seed)
        if key not in self._found:
            made = self._found[key] = follow(_space(subspace, self._data), seed, name=str(subspace))
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(made.record()) + "\n")
        return self._found[key]

    def missing(self, subspaces: Iterable[Subspace], seeds: Iterable[int]) -> Iterator[tuple[Subspace, int]]:
        """Yield what is not made yet, seed by seed."""
        subspaces = tuple(subspaces)
        for seed in seeds:
            yield from ((one, seed) for one in subspaces if (str(one), seed) not in self._found)


@functools.cache
def _space(subspace: Subspace, data: Data) -> Space:
    return subspace.of(data)
