"""Times programs for one problem against each other, in turn: a drift of the machine meets all alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tunebench.measure.timing import median_interval

__all__ = ["Contender", "compare"]


@dataclass(frozen=True)
class Contender:
    """A program for the problem.

    Attributes:
        name: Unique in its contest.
        prepare: Makes it ready and returns what takes the samples of one round, in microseconds.
    """

    name: str
    prepare: Callable[[], Callable[[], Sequence[float]]]


def compare(contenders: Iterable[Contender], *, rounds: int, ours: str) -> list[dict[str, Any]]:
    """Let contenders take turns; one that fails is out, with the reason, and the others go on.

    Returns:
        One row a contender, fastest first and those that failed last: `median_us`, `ci_us`, the number of
        samples, and `speedup` of ours over it (above 1: ours is faster).
    """
    ready: dict[str, Callable[[], Sequence[float]]] = {}
    problems: dict[str, str] = {}
    samples: dict[str, list[float]] = {}
    for contender in contenders:
        samples[contender.name] = []
        try:
            ready[contender.name] = contender.prepare()
        except Exception as error:  # libraries may raise anything; the reason is kept
            problems[contender.name] = f"{type(error).__name__}: {error}"[:500]
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
