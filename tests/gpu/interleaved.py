"""Interleaved timing of several programs of one workload, so that clock drift affects all equally."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tunebench.fault import DeviceLost
from tunebench.measure.timing import median_interval

__all__ = ["ContestJob", "TimedCall", "compare"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContestJob:
    """A workload to time with one variant and baselines.

    Attributes:
        workload: The workload.
        variant: Key of the variant; None times the baselines only.
        config: Its configuration; empty for the default.
        baselines: Baselines to time: `torch` (all its programs), `triton`.
        without: Names of programs to leave out.
    """

    workload: str
    variant: str | None
    config: str = ""
    baselines: tuple[str, ...] = ("torch", "triton")
    without: tuple[str, ...] = ()


@dataclass(frozen=True)
class TimedCall:
    """A program that computes the workload.

    Attributes:
        name: Name, unique among the programs compared.
        prepare: Prepares the program and returns a function that samples one round, in microseconds.
    """

    name: str
    prepare: Callable[[], Callable[[], Sequence[float]]]


def compare(
    calls: Iterable[TimedCall],
    *,
    rounds: int,
    ours: str | None,
    most_s: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
) -> Generator[str, None, list[dict[str, Any]]]:
    """Time programs in turn; a program that fails is dropped, with the reason.

    Args:
        calls: The programs.
        rounds: Rounds of samples of each program.
        ours: Name of the program that speedups are relative to; None computes no speedup.
        most_s: Time after which no other round begins, in seconds.
        clock: Monotonic clock, in seconds.

    Yields:
        The name of each program before it is prepared and before each of its rounds.

    Returns:
        One row per program, fastest first and failed ones last: `median_us`, `ci_us`, number of `samples`,
        `speedup` of `ours` over it (above 1: `ours` is faster).

    Raises:
        Exception: The error of a program that made the device unusable.
    """
    ready: dict[str, Callable[[], Sequence[float]]] = {}
    problems: dict[str, str] = {}
    samples: dict[str, list[float]] = {}
    for call in calls:
        yield call.name
        samples[call.name] = []
        try:
            ready[call.name] = call.prepare()
        except Exception as error:  # baselines may raise any exception; the reason is kept
            problems[call.name] = _reason(error)
    begun = clock()
    for turn in range(rounds):
        if turn and clock() - begun > most_s:
            break
        for name, take in list(ready.items()):
            yield name
            try:
                samples[name] += take()
            except Exception as error:  # likewise
                problems[name] = _reason(error)
                del ready[name]
    return _table(samples, problems, ours)


def _reason(error: Exception) -> str:
    """Return the reason of a failure, or raise it if it made the device unusable for this process."""
    if isinstance(error, DeviceLost) or type(error).__name__ == "AcceleratorError":
        raise error
    return f"{type(error).__name__}: {error}"[:500]


def _table(
    samples: dict[str, list[float]], problems: dict[str, str], ours: str | None
) -> list[dict[str, Any]]:
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
