"""Processor time of steps in eager mode, with heads of recorded operations, and with heads by TorchInductor.

    python -m benchmarks.coexecution_heads [--program NAME ...] [--seconds 60] [--out FILE.jsonl]

Blocks of 20 steps of each kind take turns in one process, on one thread. Ratios are medians over rounds of
blocks. Heads are traced in the first steps, whatever that costs, and are used whether or not they are faster
than eager mode; whether a head runs by compiled code or by recorded operations is decided as in use. A
program takes its seconds and the time of compilation.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.coexecution import SEED
from benchmarks.programs import State, names, program
from tunebench.training import coexecute
from tunebench.training.coexecution import _whole_step

PROGRAMS = ("music_transformer", "ddpm_ema", "vae", "distillation", "dropblock")
"""Programs of which Dynamo traces a head with an update."""

BLOCK = 20
WARM_UPS = 100
"""Steps of each kind before the first measured one: records, checks, and the choice by time."""


@contextlib.contextmanager
def heads_at_once() -> Iterator[None]:
    """Trace heads at once, and use them whether or not they are faster."""
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (_whole_step, "_TRACE_S", 0.0),
            (_whole_step, "_SHARE", 1e6),
            (_whole_step.WholeSteps, "_decide", lambda self: None),
            (_whole_step.WholeSteps, "_is_eager_turn", lambda self: False),
        ):
            stack.enter_context(patch.object(owner, name, value))
        yield


class Running:
    """A step of a program that is timed in blocks.

    Args:
        name: Name of the program.
        backend: Who runs its head; ``eager`` without a head.
    """

    def __init__(self, name: str, backend: str) -> None:
        step: Any
        step, self._state = program(name)(SEED)
        self.step = step
        if backend != "eager":
            self.step = coexecute(step, backend="inductor" if backend == "inductor" else None)
            self.step._policy.reason = "its head is measured"
        self._iteration = 0

    def block_s(self, count: int = BLOCK) -> float:
        """Return the processor time of a step in seconds, the mean of some steps."""
        state: State = self._state
        batches = [state.batch(self._iteration + index) for index in range(count)]
        self._iteration += count
        with contextlib.redirect_stdout(io.StringIO()):
            start = time.process_time()
            for batch in batches:
                self.step(*batch).item()
            seconds = time.process_time() - start
        state.effects.clear()
        return seconds / count


def measure(name: str, seconds: float) -> dict[str, Any]:
    """Return medians of times in milliseconds, ratios to eager mode, and what the report says.

    Args:
        name: Name of the program.
        seconds: Time of measured blocks in seconds.
    """
    kinds = {kind: Running(name, kind) for kind in ("eager", "recorded", "inductor")}
    for running in kinds.values():
        running.block_s(WARM_UPS)
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or not times["eager"]:
        for kind, running in kinds.items():
            times[kind].append(running.block_s())
    report = coexecute.report(kinds["inductor"].step)
    return {
        "program": name,
        "blocks": len(times["eager"]),
        "ms": {kind: round(statistics.median(values) * 1e3, 4) for kind, values in times.items()},
        "speedup": {
            kind: round(statistics.median(map(float.__truediv__, times["eager"], times[kind])), 3)
            for kind in ("recorded", "inductor")
        },
        "heads": report.heads, "compiled_heads": report.compiled_heads,
        "compile_s": round(report.compile_s, 1), "exact_heads": report.exact_heads,
        "plain_heads": report.plain_heads,
    }  # fmt: skip


def main() -> None:
    """Measure programs, print a line for each and the geometric means, and append lines to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--program", nargs="*", default=PROGRAMS, choices=names(), help="programs")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="time of measured blocks of a program in s"
    )
    parser.add_argument("--out", type=Path, help="file to which a line of JSON is appended for each program")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    with heads_at_once():
        for name in arguments.program:
            torch._dynamo.reset()
            rows.append(measure(name, arguments.seconds))
            line = json.dumps(rows[-1])
            print(line, flush=True)
            if arguments.out is not None:
                with arguments.out.open("a", encoding="utf-8") as file:
                    file.write(line + "\n")
    for kind in ("recorded", "inductor"):
        mean = math.exp(statistics.fmean(math.log(row["speedup"][kind]) for row in rows))
        print(f"geometric mean of eager / {kind}: {mean:.2f}")


if __name__ == "__main__":
    main()
