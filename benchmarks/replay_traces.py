"""Traces of searches: the best time after each trial in a part of a recorded tuning space, saved in a file.

A search asks for the same configurations whether its trials run all at once or a few at a time. So one trace
shows the result of the search under every rule that divides a budget.
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
"""Trials of a trace, unless the space ends earlier."""

SAMPLER = "surrogate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Subspace:
    """A part of a recorded space: the configurations with fixed values of some parameters.

    Attributes:
        space: Name of the recorded space, kernel and device.
        fixed: Parameters and their values.
    """

    space: str
    fixed: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        return f"{self.space}[{','.join(f'{name}={value}' for name, value in self.fixed)}]"

    def of(self, data: Data) -> Space:
        """Return the part as a space to search."""
        return Space.of(part(data.space(self.space).recording, dict(self.fixed)))


def part(recording: RecordedSpace, fixed: dict[str, int]) -> RecordedSpace:
    """Return the rows of a recorded space with the given values.

    Args:
        recording: The recorded space.
        fixed: Values by parameter.
    """
    mask = np.logical_and.reduce([recording.table[name] == value for name, value in fixed.items()])
    rows = np.flatnonzero(mask)
    failures = {index: recording.failures[row] for index, row in enumerate(rows) if row in recording.failures}
    return dataclasses.replace(
        recording,
        table=recording.table.take(rows),
        times_us=recording.times_us[rows],
        fastest_us=recording.fastest_us[rows],
        failures=failures,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchTrace:
    """Course of one search.

    Attributes:
        subspace: Text of the `Subspace`.
        seed: Seed of the sampler.
        by: Version of the sampler.
        best_us: Best time after each trial, in microseconds; infinite before the first success.
        floor_us: Lowest bound of the open configurations after each trial; the best time if none is open.
        optimum_us: Shortest time of the part.
        median_us: Median time of the part: the expectation before the search, and the time before a success.
        ended: Whether the search tried all open configurations.
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
        """Return the best time after a number of trials, in microseconds."""
        best_us = self.best_us[min(trials, len(self)) - 1] if trials else math.inf
        return best_us if math.isfinite(best_us) else self.median_us

    def record(self) -> dict[str, Any]:
        """Return the JSON form, in which times are stored where they change."""
        fields = dataclasses.asdict(self)
        return (
            fields | {name: _changes(fields[name]) for name in ("best_us", "floor_us")} | {"asked": len(self)}
        )

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> SearchTrace:
        """Return the trace from its JSON form."""
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
    """Search a space trial by trial, as `tune_suite` searches a workload in rounds, and return the trace.

    Args:
        space: Space to search.
        seed: Seed of the sampler.
        trials: Longest trace.
        name: Text of the `Subspace`.
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
    """File of traces, one per line; a missing trace is made on request."""

    def __init__(self, path: Path, data: Data) -> None:
        self._path, self._data = path, data
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        traces = map(SearchTrace.from_record, map(json.loads, lines))
        self._found = {
            (trace.subspace, trace.seed): trace for trace in traces if trace.by == version(SAMPLER)
        }

    def get(self, subspace: Subspace, seed: int) -> SearchTrace:
        """Return the trace of a search by the current sampler, and make it if the file has none.

        Args:
            subspace: Part of a recorded space.
            seed: Seed of the sampler.
        """
        key = (str(subspace), seed)
        if key not in self._found:
            made = self._found[key] = follow(_space(subspace, self._data), seed, name=str(subspace))
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(made.record()) + "\n")
        return self._found[key]

    def missing(self, subspaces: Iterable[Subspace], seeds: Iterable[int]) -> Iterator[tuple[Subspace, int]]:
        """Yield the missing traces, seed by seed.

        Args:
            subspaces: Parts of recorded spaces.
            seeds: Seeds of the sampler.
        """
        subspaces = tuple(subspaces)
        for seed in seeds:
            yield from (
                (subspace, seed) for subspace in subspaces if (str(subspace), seed) not in self._found
            )


@functools.cache
def _space(subspace: Subspace, data: Data) -> Space:
    return subspace.of(data)
