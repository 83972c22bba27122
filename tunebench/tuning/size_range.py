"""Families of problems, tuned one after the other: `gemm:m=1..8192,n=4096,k=4096,dtype=f16`.

A range stands for its ends and the powers of two between them: what lies between two of those is served by
what was best for them (see `tunebench.answer`).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tunebench.errors import InputError
from tunebench.workload import Workload
from tunebench.workloads import parse

if TYPE_CHECKING:
    from tunebench.device import Device
    from tunebench.tuning.plan import Plan
    from tunebench.tuning.report import Progress, Report

__all__ = ["MOST", "family", "is_family", "tune_all"]

MOST = 256
"""Most problems that one text may stand for."""

_RANGE = re.compile(r"(?<==)(\d+)\.\.(\d+)(?=,|$)")


def is_family(text: str) -> bool:
    """Tell whether a text has a range."""
    return _RANGE.search(text) is not None


def family(text: str) -> tuple[Workload, ...]:
    """Return the problems that a text stands for: coarsely all over the range first, then ever more finely.

    Args:
        text: A workload in which sizes may be ranges, ``low..high``, both ends included.

    Raises:
        InputError: if a range is empty, one of the problems cannot be, or there are more than `MOST`.
    """
    ranges = [(int(low), int(high)) for low, high in _RANGE.findall(text)]
    for low, high in ranges:
        if not 1 <= low <= high:
            raise InputError(
                f"{text}: a range goes from a size up to a size, such as 1..8192; got {low}..{high}"
            )
    sizes = [_coarse_first(_sizes(low, high)) for low, high in ranges]
    count = math.prod(map(len, sizes))
    if count > MOST:
        raise InputError(f"{text} stands for {count} problems, more than {MOST}: narrow a range")
    form = _RANGE.sub("{}", text.replace("{", "{{").replace("}", "}}"))
    return tuple(dict.fromkeys(parse(form.format(*chosen)) for chosen in itertools.product(*sizes)))


def _sizes(low: int, high: int) -> list[int]:
    powers = (1 << exponent for exponent in range(low.bit_length(), high.bit_length()))
    return sorted({low, *(power for power in powers if low < power < high), high})


def _coarse_first(sizes: list[int]) -> list[int]:
    """Return sizes with both ends first, then the middle, the quarters and so on: any prefix covers all."""
    ordered, gaps = [sizes[-1], sizes[0]], [(0, len(sizes) - 1)]
    while gaps:
        low, high = gaps.pop(0)
        if high - low > 1:
            middle = (low + high) // 2
            ordered.append(sizes[middle])
            gaps += [(low, middle), (middle, high)]
    return list(dict.fromkeys(ordered))


def tune_all(
    problems: Iterable[Workload],
    *,
    device: Device | str | None = None,
    db: str | Path | None = None,
    plan: Plan | None = None,
    watcher: Callable[[Workload, Progress], None] | None = None,
) -> Iterator[Report]:
    """Tune one problem after the other, each beginning with what is known by then; Ctrl-C ends it.

    Args:
        problems: The problems, such as those of a `family`.
        device: As for `tune`.
        db: As for `tune`.
        plan: How to tune each of them.
        watcher: Is told which problem is at work, and of its progress.

    Yields:
        What was found for each; the last is of a run that was interrupted, if one was.

    Raises:
        InputError: if no variant can do a problem; otherwise as `tune`.
    """
    from tunebench.tuning import tune

    for problem in problems:

        def tell(progress: Progress, problem: Workload = problem) -> None:
            if watcher is not None:
                watcher(problem, progress)

        report = tune(problem, device=device, db=db, plan=plan, watcher=tell)
        yield report
        if report.interrupted:
            return
