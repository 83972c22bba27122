"""Time per step of training programs: eager PyTorch, torch.compile with inductor, and `coexecute`.

    python -m benchmarks.coexecution_time [--program NAME ...] [--size small] [--steps 160] [--out FILE.jsonl]
                                          [--table FILE.md]

Each program and size runs in a process of its own, which runs all modes: iteration i of one mode, then of the
next, in an order that is drawn again. Every mode begins iteration i with the same random state, so that all
take the same path. The first half of the iterations is warm-up, with tracing and compilation. torch runs on
one thread; `coexecute` has threads of its own. Each result is saved as one line as soon as it is known, and
the same command runs only what is missing for the present code, also after it was killed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import itertools
import json
import math
import random
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.coexecution import SEED, Record, engine_revision, load, run_apart, save
from benchmarks.programs import State, Step, names, program
from tunebench.training import coexecute
from tunebench.training.coexecution._testing import forced

SIZES: dict[str, dict[str, dict[str, int]]] = {
    "small": {name: {} for name in names()},
    "large": {
        "bert_metric": {"WIDTH": 256, "LENGTH": 64},
        "faster_rcnn": {"CHANNELS": 128},
        "gpt2_lengths": {"WIDTH": 256},
        "lstm_early_exit": {"WIDTH": 512},
        "music_transformer": {"WIDTH": 256, "LENGTH": 64},
        "sdpoint": {"CHANNELS": 64},
        "tree_network": {"WIDTH": 256},
    },
}
"""Constants of programs, by size and program; small programs keep theirs."""

MODES = ("eager", "torch.compile", "coexecute", "always")
"""Ways to run a step; always: `coexecute` that does not return to eager mode where that is faster."""


WRAPS: dict[str, Any] = {
    "eager": lambda step: step,
    "torch.compile": torch.compile,
    "coexecute": coexecute,
    "always": coexecute,
}


def sized(name: str, size: str) -> tuple[Step, State]:
    """Return the step and state of a program at a size."""
    module = importlib.import_module(f"benchmarks.programs.{name}")
    for constant, value in SIZES[size][name].items():
        setattr(module, constant, value)
    return program(name)(SEED)


def measure(name: str, size: str, steps: int) -> Record:
    """Return the times of every step of a program in seconds, by mode."""
    running: dict[str, tuple[Step, State]] = {}
    for mode in MODES:
        step, state = sized(name, size)
        running[mode] = (WRAPS[mode](step), state)
    wall: dict[str, list[float]] = {mode: [] for mode in MODES}
    processor: dict[str, list[float]] = {mode: [] for mode in MODES}
    errors: dict[str, str] = {}
    kinds: list[str] = []
    seen = _counts(running["always"][0])
    for iteration in range(steps):
        for mode in random.Random(iteration).sample(MODES, len(MODES)):
            if mode in errors:
                continue
            step, state = running[mode]
            batch = state.batch(iteration)
            torch.manual_seed(SEED + iteration)
            try:
                with forced() if mode == "always" else contextlib.nullcontext():
                    times = _timed(step, batch)
            except Exception as error:
                errors[mode] = f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"
                continue
            wall[mode].append(times[0])
            processor[mode].append(times[1])
        now = _counts(running["always"][0])
        kinds.append(next((kind for kind in now if now[kind] > seen[kind]), "none"))
        seen = now
    reports = {mode: coexecute.report(running[mode][0]) for mode in ("coexecute", "always")}
    step, state = running["eager"]
    with _OperationCounter() as counter, contextlib.redirect_stdout(io.StringIO()):
        step(*state.batch(steps))
    return {
        "wall_s": wall, "processor_s": processor, "errors": errors, "kinds": kinds,
        "operations": reports["always"].operations, "operations of a step": counter.count,
        "reports": {mode: str(report) for mode, report in reports.items()},
        "returned": reports["coexecute"].returned,
    }  # fmt: skip


class _OperationCounter(TorchDispatchMode):
    """Count the operations below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def _counts(step: Any) -> dict[str, int]:
    report = coexecute.report(step)
    return {"diverged": report.diverged, "traced": report.traced, "coexecuted": report.coexecuted}


def _timed(step: Step, batch: tuple[Any, ...]) -> tuple[float, float]:
    """Return the wall and processor time of a step whose result is read, in seconds."""
    with contextlib.redirect_stdout(io.StringIO()):
        wall, processor = time.perf_counter(), time.process_time()
        step(*batch).item()
        return time.perf_counter() - wall, time.process_time() - processor


# -- summary -------------------------------------------------------------------------------------------------


def ratio(record: Record, mode: str, times: str = "wall_s") -> float:
    """Return the median over steps after warm-up of eager's time over that of a mode; NaN without times."""
    pairs = list(zip(record[times]["eager"], record[times][mode], strict=False))
    if mode in record["errors"] or not pairs:
        return math.nan
    return statistics.median(eager / ours for eager, ours in pairs[len(pairs) // 2 :])


def _median_ms(values: list[float]) -> str:
    return f"{statistics.median(values) * 1e3:.2f}" if values else "none"


def _text(value: float) -> str:
    return "error" if math.isnan(value) else f"{value:.2f}"


def steady(kinds: list[str]) -> int:
    """Return the first step from which nine of ten steps are co-executed, or the number of steps."""
    for first in range(len(kinds)):
        later = kinds[first:]
        if kinds[first] == "coexecuted" and later.count("coexecuted") >= 0.9 * len(later):
            return first
    return len(kinds)


def table(records: list[Record]) -> str:
    """Return times, and the way to the steady state, as Markdown tables."""
    lines = [
        "| program | size | eager, ms | speedup of torch.compile | of coexecute | the same, processor time "
        "| of coexecute without return to eager | returned to eager |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for record in records:
        after = record["wall_s"]["eager"][record["steps"] // 2 :]
        ratios = [_text(ratio(record, mode, times)) for mode, times in _COLUMNS]
        ratios.append("yes" if record["returned"] else "no")
        lines.append(
            f"| {record['program']} | {record['size']} | {_median_ms(after)} | {' | '.join(ratios)} |"
        )
    for label, toys, size in _GROUPS:
        group = [
            program_record
            for program_record in records
            if program_record["program"].startswith("toy_") is toys and program_record["size"] == size
        ]
        if group:
            means = [
                _mean([ratio(program_record, mode, times) for program_record in group])
                for mode, times in _COLUMNS
            ]
            lines.append(f"| geometric mean of {label} | {size} | | {' | '.join(map(_text, means))} | |")
    lines += [
        "",
        "| program | size | steps until steady | traced | diverged | co-executed | ms of a traced step "
        "| of a diverged step | of a co-executed step | operations of a step | of the graph "
        "| recording and checking, µs per operation |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for record in records:
        lines.append(_steady_row(record))
    return "\n".join(lines) + "\n"


_COLUMNS = (
    ("torch.compile", "wall_s"),
    ("coexecute", "wall_s"),
    ("coexecute", "processor_s"),
    ("always", "wall_s"),
)
_GROUPS = (("programs", False, "small"), ("programs", False, "large"), ("toys", True, "small"))


def _mean(ratios: list[float]) -> float:
    """Return the geometric mean of the ratios that are known."""
    finite = [value for value in ratios if not math.isnan(value)]
    return statistics.geometric_mean(finite) if finite else math.nan


def _steady_row(record: Record) -> str:
    ours = record["wall_s"]["always"]
    by_kind = {
        kind: [
            seconds
            for seconds, kind_of_step in zip(ours, record["kinds"], strict=False)
            if kind_of_step == kind
        ]
        for kind in ("traced", "diverged", "coexecuted")
    }
    extra = [
        seconds - eager
        for seconds, eager, kind in zip(ours, record["wall_s"]["eager"], record["kinds"], strict=False)
        if kind == "traced"
    ]
    counts = [str(record["kinds"].count(kind)) for kind in by_kind]
    times = [_median_ms(values) for values in by_kind.values()]
    count = record["operations of a step"]
    per_operation = f"{statistics.median(extra) / count * 1e6:.1f}" if extra else "none"
    cells = [record["program"], record["size"], str(steady(record["kinds"])), *counts, *times]
    return f"| {' | '.join([*cells, str(count), str(record['operations']), per_operation])} |"


# -- all -----------------------------------------------------------------------------------------------------


def _saved(path: Path) -> dict[tuple[str, str, int], Record]:
    return {
        (record["program"], record["size"], record["steps"]): record
        for record in load(path)
        if record["revision"] == engine_revision()
    }


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coexecution_time")
    parser.add_argument("--program", action="append", choices=names(), help="program to run; default all")
    parser.add_argument("--size", action="append", choices=SIZES, help="size of programs; default all")
    parser.add_argument("--steps", type=int, default=160, help="iterations per mode (default 160)")
    parser.add_argument(
        "--timeout-s", type=float, default=900, help="time limit per program in seconds (default 900)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("coexecution_time.jsonl"), help="file of saved results"
    )
    parser.add_argument("--table", type=Path, help="file for the table of all saved results")
    parser.add_argument("--one", nargs=2, metavar=("PROGRAM", "SIZE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    if arguments.one:
        warnings.simplefilter("ignore")
        name, size = arguments.one
        print(json.dumps(measure(name, size, arguments.steps)))
        return 0
    for size, name in itertools.product(arguments.size or SIZES, arguments.program or names()):
        if name not in SIZES[size] or (name, size, arguments.steps) in _saved(arguments.out):
            continue
        record = {"program": name, "size": size, "steps": arguments.steps, "revision": engine_revision()}
        command = ["--one", name, size, "--steps", str(arguments.steps)]
        record |= run_apart("coexecution_time", command, arguments.timeout_s)
        save(arguments.out, record)
        print(_line(record), flush=True)
    if arguments.table:
        usable = [saved for saved in _saved(arguments.out).values() if "error" not in saved]
        arguments.table.write_text(table(usable), encoding="utf-8")
    return 0


def _line(record: Record) -> str:
    start = f"{record['program']}, {record['size']}"
    if "error" in record:
        return f"{start}: {record['error']}"
    ratios = ", ".join(f"{mode} {_text(ratio(record, mode))}" for mode in MODES[1:])
    return f"{start}: speedup over eager: {ratios} {record['errors'] or ''}"


if __name__ == "__main__":
    sys.exit(main())
