"""Interleaved timing of several programs of one workload, so that clock drift affects all equally."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tunebench.measure.timing import median_interval

__all__ = ["TimedCall", "compare"]


@dataclass(frozen=True)
class TimedCall:
    """A program that computes the workload.

    Attributes:
        name: Name, unique among the programs compared.
        prepare: Prepares the program and returns a function that samples one round, in microseconds.
    """

    name: str
    prepare: Callable[[], Callable[[], Sequence[float]]]


def compare(calls: Iterable[TimedCall], *, rounds: int, ours: str) -> list[dict[str, Any]]:
    """Time programs in turn; a program that fails is dropped, with the reason.

    Args:
        calls: The programs.
        rounds: Rounds of samples of each program.
        ours: Name of the program that speedups are relative to.

    Returns:
        One row per program, fastest first and failed ones last: `median_us`, `ci_us`, number of `samples`,
        and
        `speedup` of `ours` over it (above 1: `ours` is faster).
    """
    ready: dict[str, Callable[[], Sequence[float]]] = {}
    problems: dict[str, str] = {}
    samples: dict[str, list[float]] = {}
    for call in calls:
        samples[call.name] = []
        try:
            ready[call.name] = call.prepare()
        except Exception as error:  # baselines may raise any exception; the reason is kept
            problems[call.name] = f"{type(error).__name__}: {error}"[:500]
    for _ in range(rounds):
        for name, take in list(ready.items()):
            try:
                samples[name] += take()
            except Exception as error:  # likewise
                problems[name] = f"{type(error).__name__}: {error}"[:500]
                del ready[name]
    return _table(samples, problems, ours)


def _table(samples: dict[str, list[float]], problems: dict[str, str], ours: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name, taken in samples.items():
        if name in problems or not taken:
            rows.append({"name": name, "problem": problems.get(name, "no samples")})
        else:
            median_us, ci_us = median_interval(taken)
            rows.append({"name": name, "median_us": median_us, "ci_us": ci_us, "samples": len(taken)})
    own_us = next((row["median_us"] for row in rows if row["name"] == ours and "median_us" in row), None)
    for row in rows:
        if own_us is not None and "median_us" in row:
            row["speedup"] = row["median_us"] / own_us
    return sorted(rows, key=lambda row: row.get("median_us", float("inf")))
