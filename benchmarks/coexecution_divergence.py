"""Forced divergence at every call of a function of torch in training programs: nothing differs from eager.

    python -m benchmarks.coexecution_divergence [--program NAME ...] [--out FILE.jsonl] [--table FILE.md]

After a warm-up, iteration i is made to leave the known paths at call i, so that the graph is cancelled, what
it changed is restored, and the iteration runs as in eager mode. Results, inputs and gradients of every
iteration, final parameters, buffers and optimizer state, printed text, effects and random state are compared
with a run in eager mode, to the last bit where the same kernels run. A process runs a window of calls. Each
window is saved as one line, and the same command runs only what is missing or failed for the present code,
also after it was killed.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.coexecution import (
    TOLERANCE,
    Record,
    differences,
    engine_revision,
    load,
    run,
    run_apart,
    save,
    version_differences,
)
from benchmarks.programs import Step, names
from tunebench.training import coexecute
from tunebench.training.coexecution._testing import FORCED, diverge_at, forced

PROGRAMS = ("bert_metric", "dcgan", "lstm_early_exit")
WARM_UP, WINDOW = 12, 48


def examine(name: str, first: int) -> Record:
    """Force a divergence at each call of a window, one per iteration, and return what differs from eager."""
    reached: list[int] = []

    def wrap(plain: Step) -> Step:
        step: Any = coexecute(plain)
        iteration = 0

        def diverging(*batch: Any) -> Tensor:
            nonlocal iteration
            iteration += 1
            if iteration <= WARM_UP:
                return step(*batch)
            call = first + iteration - WARM_UP - 1
            before = _forced(step)
            with diverge_at(call):
                result = step(*batch)
            if _forced(step) > before:
                reached.append(call)
            return result

        return diverging

    steps = WARM_UP + WINDOW
    expected = run(name, lambda step: step, steps)
    with forced():
        got = run(name, wrap, steps)
    return {
        "differences": differences(expected, got)[:5],
        "beyond tolerance": differences(expected, got, TOLERANCE)[:5],
        "versions": version_differences(expected, got)[:5],
        "reached": reached,
    }


def _forced(step: Any) -> int:
    return sum(
        divergence.count for divergence in coexecute.report(step).divergences if divergence.reason == FORCED
    )


def table(records: list[Record]) -> str:
    """Return the records as a Markdown table."""
    by_program: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        by_program[record["program"]].append(record)
    lines = ["| program | divergences forced | at calls | result |", "|---|---|---|---|"]
    for name, windows in sorted(by_program.items()):
        reached = [call for window in windows for call in window.get("reached", ())]
        wrong = [
            str(window_run.get("error") or window_run["beyond tolerance"])
            for window_run in windows
            if _differs(window_run)
        ]
        exact = all(not window_run.get("differences") for window_run in windows)
        result = "; ".join(wrong[:2]) or ("equal to the last bit" if exact else f"equal within {TOLERANCE:g}")
        calls = f"{min(reached)} to {max(reached)}" if reached else "none"
        lines.append(f"| {name} | {len(reached)} | {calls} | {result} |")
    return "\n".join(lines) + "\n"


def _differs(record: Record) -> bool:
    return "error" in record or bool(record["beyond tolerance"])


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status: 1 if a program differs from eager."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coexecution_divergence")
    parser.add_argument("--program", action="append", choices=names(), help=f"default {', '.join(PROGRAMS)}")
    parser.add_argument("--timeout-s", type=float, default=300, help="time limit per window (default 300)")
    parser.add_argument("--out", type=Path, default=Path("divergence.jsonl"), help="file of saved results")
    parser.add_argument("--table", type=Path, help="file for the table of all saved results")
    parser.add_argument("--one", nargs=2, metavar=("PROGRAM", "CALL"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    if arguments.one:
        warnings.simplefilter("ignore")
        name, first = arguments.one
        print(json.dumps(examine(name, int(first))))
        return 0
    for name in arguments.program or PROGRAMS:
        _run_missing(name, arguments)
    records = list(_saved(arguments.out).values())
    print(table(records))
    if arguments.table:
        arguments.table.write_text(table(records), encoding="utf-8")
    return int(any(_differs(record) for record in records))


def _run_missing(name: str, arguments: argparse.Namespace) -> None:
    """Run the windows of a program up to the first that lies behind the last call of every iteration."""
    first = 0
    while True:
        record = _saved(arguments.out).get((name, first))
        if record is None or "error" in record:
            record = {"program": name, "first": first, "revision": engine_revision()}
            record |= run_apart("coexecution_divergence", ["--one", name, str(first)], arguments.timeout_s)
            save(arguments.out, record)
            wrong = record.get("error") or record["beyond tolerance"]
            print(f"{name}, calls {first} to {first + WINDOW - 1}: {wrong or 'equal'}", flush=True)
        if not record.get("reached"):
            return
        first += WINDOW


def _saved(path: Path) -> dict[tuple[str, int], Record]:
    current = [record for record in load(path) if record["revision"] == engine_revision()]
    return {(record["program"], record["first"]): record for record in current}


if __name__ == "__main__":
    sys.exit(main())
