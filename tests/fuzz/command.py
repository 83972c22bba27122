"""Loop and command line of the fuzzers: numbered inputs of a seed, and counts of their outcomes."""

from __future__ import annotations

import argparse
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tunebench._figure import significant

__all__ = ["TimeLimitExceeded", "count_outcomes", "main", "time_limit"]

GIVE_UP = 20
"""Number of failures after which a run ends."""

LONGEST_TRACEBACK = 3000
"""Longest part of a traceback that is printed, in characters."""


class TimeLimitExceeded(BaseException):
    """The check of one input exceeded its time limit."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TimeLimitExceeded` in the block after a time limit, in seconds."""

    def ring(number: int, frame: object) -> None:
        raise TimeLimitExceeded(f"more than {significant(seconds)} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def count_outcomes(
    numbers: range, check: Callable[[int], Iterable[str]], failed: Callable[[int], str], *, limit_s: float
) -> Counter[str]:
    """Check numbered inputs and count their outcomes; failures are printed, and many of them end the run.

    Args:
        numbers: Numbers of the inputs.
        check: Checks the input of a number, and returns its outcomes; any exception is a failure.
        failed: Cleans up after a failure, and returns a description of the input.
        limit_s: Time limit of one input, in seconds.

    Returns:
        Number of inputs by outcome; ``"failed"`` counts the failures.
    """
    outcomes: Counter[str] = Counter()
    slowest = (0.0, 0)
    for number in numbers:
        began = time.perf_counter()
        try:
            with time_limit(limit_s):
                outcomes.update(check(number))
        except (Exception, TimeLimitExceeded):
            outcomes["failed"] += 1
            where = traceback.format_exc(limit=-6)[-LONGEST_TRACEBACK:]
            print(f"{failed(number)} failed:\n{where}", flush=True)
            if outcomes["failed"] >= GIVE_UP:
                print(f"{GIVE_UP} failures: the others are not checked", flush=True)
                break
        slowest = max(slowest, (time.perf_counter() - began, number))
        if number % 1000 == 999:
            print(
                f"{number + 1}: {dict(outcomes)}, slowest {slowest[0]:.2f} s (number {slowest[1]})",
                flush=True,
            )
    return outcomes


def main(
    doc: str | None,
    inputs: str,
    count: int,
    fuzz: Callable[[Path, argparse.Namespace], Counter[str]],
    *,
    keeps: bool = False,
) -> int:
    """Run the command line of a fuzzer, print the outcomes and the duration, and return the exit status.

    Args:
        doc: Description of the fuzzer, for ``--help``.
        inputs: What the inputs are, such as ``"files"``: the name of the option for their number.
        count: Default number of inputs.
        fuzz: Returns the number of inputs by outcome, from an empty folder and from arguments: `seed`,
            `numbers` (a range) and `out`.
        keeps: Accept ``--out``, a folder that keeps failing inputs.
    """
    arguments = _arguments(doc, inputs, count, keeps)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        outcomes = fuzz(Path(folder), arguments)
    seconds = time.perf_counter() - began
    print(f"{len(arguments.numbers)} {inputs} in {seconds:.0f} s: {dict(sorted(outcomes.items()))}")
    return 1 if outcomes["failed"] else 0


def _arguments(doc: str | None, inputs: str, count: int, keeps: bool) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        f"--{inputs}", dest="count", type=int, default=count, help=f"number of {inputs} (default: {count})"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed (default: 0)")
    parser.add_argument("--first", type=int, default=0, help=f"first number of the {inputs} (default: 0)")
    if keeps:
        parser.add_argument(
            "--out", type=Path, default=None, help=f"folder that keeps failing {inputs} (default: none)"
        )
    arguments = parser.parse_args()
    arguments.numbers = range(arguments.first, arguments.first + arguments.count)
    return arguments
