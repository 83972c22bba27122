"""Time per step of training programs in one run: eager PyTorch, fused optimizers, torch.compile, `coexecute`.

    python -m benchmarks.coexecution_time [--program NAME ...] [--size small] [--mode MODE ...]
                                          [--seconds 2400] [--out FILE.jsonl] [--table FILE.md]

Each program and size runs all modes in a process of its own, in blocks of 20 steps that take turns in an
order that is drawn again. Every mode begins step i with the same random state, so that all take the same
path. The first 100 steps of each mode are warm-up, with tracing and compilation. The budget of seconds is
divided among the programs. A mode whose first steps take more than a quarter of a program's share in a forked
process, such as for compilation, is left out; what torch compiled is on disk, so that the process that
measures takes it from there, and the next run of the command has more time for the rest.

In the modes ``exact`` and ``inductor`` the head of a step, one function of forward pass, backward pass and
update, is traced in the first steps, whatever that costs, and used whether or not it is faster. In use, heads
begin after 10 s of iterations, and are left if they are slower: 15 s of steps come before the first measured
one, in which all of this is decided.

The first 40 steps run in two more processes, forked before, one for eager mode and one for `coexecute` in
use: their processor time, peak of resident memory, and growth afterwards. torch runs on one thread;
`coexecute` has threads of its own, except in forked processes.
Each result is saved as one line as soon as it is known, and the same command runs only what is missing for
the present code, also after it was killed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib
import io
import itertools
import json
import math
import os
import random
import select
import signal
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.coexecution import SEED, Record, engine_revision, load, run_apart, save
from benchmarks.programs import State, Step, names, program
from tunebench.training import coexecute
from tunebench.training.coexecution import _whole_step

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

TEN = (
    "bert_metric", "dcgan", "dropblock", "faster_rcnn", "gpt2_lengths", "lstm_early_exit",
    "music_transformer", "sdpoint", "tree_network", "yolo_loss",
)  # fmt: skip
"""The training programs that were measured first."""

BLOCK = 20
"""Steps of a mode before another one takes its turn."""

WARM_UPS = 100
"""Steps of each mode before the first measured one."""

FIRST_STEPS = 40
"""Steps whose processor time is compared with that of eager mode."""

_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
"""Optimizers of torch that have a fused update on a processor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """A way to run a step.

    Attributes:
        wrap: Function from a step and its state to the step to run; None if there is no such step.
        has_head: Whether the head of the step is used at once.
        warm_up_s: Processor time of further steps before the first measured one, in seconds.
    """

    wrap: Callable[[Step, State], Step | None]
    has_head: bool = False
    warm_up_s: float = 0.0


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


def _with_head(step: Step, backend: Any = None) -> Step:
    wrapped = coexecute(step, backend=backend)
    wrapped._policy.reason = "its head is measured"
    return wrapped


def _fused(step: Step, state: State) -> Step | None:
    optimizers = [optimizer for optimizer in state.optimizers.values() if type(optimizer) in _FUSED]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["fused"] = True
    return step if optimizers else None


MODES = {
    "eager": Mode(wrap=lambda step, state: step),
    "fused": Mode(wrap=_fused),
    "torch.compile": Mode(wrap=lambda step, state: torch.compile(step)),
    "in use": Mode(wrap=lambda step, state: coexecute(step), warm_up_s=15.0),
    "exact": Mode(wrap=lambda step, state: _with_head(step), has_head=True),
    "inductor": Mode(wrap=lambda step, state: _with_head(step, "inductor"), has_head=True),
}
"""Ways to run a step; eager mode comes first."""


def sized(name: str, size: str) -> tuple[Step, State]:
    """Return the step and state of a program at a size."""
    module = importlib.import_module(f"benchmarks.programs.{name}")
    for constant, value in SIZES[size][name].items():
        setattr(module, constant, value)
    return program(name)(SEED)


# -- one program ---------------------------------------------------------------------------------------------


class Running:
    """A step of a program in a mode, which runs in blocks.

    Args:
        name: Name of the program.
        size: Its size.
        mode: The mode; it must exist for the program.
    """

    def __init__(self, name: str, size: str, mode: str) -> None:
        step, self._state = sized(name, size)
        wrapped = MODES[mode].wrap(_with_own_code(step), self._state)
        if wrapped is None:
            raise ValueError("none")
        self.step = wrapped
        self._mode = MODES[mode]
        self._steps = 0

    def block(self, steps: int = BLOCK) -> tuple[float, float]:
        """Run some steps, whose results are read; return wall and processor time of a step in seconds."""
        wall_s = processor_s = 0.0
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            if self._mode.has_head:
                stack.enter_context(heads_at_once())
            for _ in range(steps):
                batch = self._state.batch(self._steps)
                torch.manual_seed(SEED + self._steps)
                self._steps += 1
                wall, processor = time.perf_counter(), time.process_time()
                self.step(*batch).item()
                wall_s += time.perf_counter() - wall
                processor_s += time.process_time() - processor
        self._state.effects.clear()
        return wall_s / steps, processor_s / steps

    def heads(self) -> int:
        """Return how many steps ran with a head so far."""
        return coexecute.report(self.step).heads if self._mode.has_head else 0


def _with_own_code(step: Any) -> Any:
    """Return a step with a copy of its code: Dynamo keeps what was compiled for all functions of one code."""
    code = step.__code__.replace()
    return FunctionType(code, step.__globals__, step.__name__, step.__defaults__, step.__closure__)


def measure(name: str, size: str, seconds: float, chosen: list[str]) -> Record:
    """Return the times of a step in each block in seconds, by mode, within a budget of seconds after warm-up.

    ``heads`` has the share of steps with a head in each block of the mode ``exact``, from its first step on.
    """
    running = {mode: Running(name, size, mode) for mode in chosen}
    errors: dict[str, str] = {}
    wall: dict[str, list[float]] = {mode: [] for mode in running}
    processor: dict[str, list[float]] = {mode: [] for mode in running}
    heads: list[float] = []
    for mode in chosen:
        spent_s = 0.0
        while spent_s < MODES[mode].warm_up_s:
            spent_s += BLOCK * running[mode].block()[1]
    end = math.inf
    for block in itertools.count(-WARM_UPS // BLOCK):
        if block == 0:
            end = time.perf_counter() + seconds
        if time.perf_counter() > end and block > 1:
            break
        for mode in random.Random(block).sample(sorted(running), len(running)):
            if mode in errors:
                continue
            before = running[mode].heads()
            try:
                times = running[mode].block()
            except Exception as error:
                errors[mode] = f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"
                continue
            if mode == "exact":
                heads.append((running[mode].heads() - before) / BLOCK)
            if block >= 0:
                wall[mode].append(times[0])
                processor[mode].append(times[1])
    report = coexecute.report(running["exact"].step) if "exact" in running else None
    return {
        "wall_s": _rounded(wall), "processor_s": _rounded(processor), "errors": errors, "heads": heads,
        "no_head": report.plain_heads if report is not None else None,
    }  # fmt: skip


def _rounded(times: dict[str, list[float]]) -> dict[str, list[float]]:
    return {mode: [round(seconds, 7) for seconds in values] for mode, values in times.items()}


def start(name: str, size: str, mode: str, seconds: float) -> Record:
    """Run the first steps of a program alone; return their processor time and peak of memory, and growth.

    Two steps of another instance come before, in which libraries initialize, and do not count.
    """
    _run_steps(*sized(name, size), range(2))
    step, state = sized(name, size)
    wrapped = MODES[mode].wrap(step, state)
    assert wrapped is not None
    gc.collect()
    reset_peak()
    processor = time.process_time()
    _run_steps(wrapped, state, range(FIRST_STEPS))
    processor = time.process_time() - processor
    peak = peak_mib()
    gc.collect()
    warm, end, steps = resident_mib(), time.perf_counter() + seconds, 0
    while time.perf_counter() < end and steps < 1000:
        _run_steps(wrapped, state, range(FIRST_STEPS + steps, FIRST_STEPS + steps + 10))
        steps += 10
    gc.collect()
    return {"processor_s": processor, "peak_mib": peak, "growth_mib": resident_mib() - warm, "steps": steps}


def _run_steps(step: Step, state: State, iterations: range) -> None:
    for iteration in iterations:
        with contextlib.redirect_stdout(io.StringIO()):
            step(*state.batch(iteration)).item()
        state.effects.clear()


def resident_mib() -> float:
    """Return the resident memory of this process in MiB."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def reset_peak() -> None:
    """Let the peak of resident memory count from now on."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_mib() -> float:
    """Return the peak of resident memory of this process in MiB, without that of its parent."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 2**10


# -- summary -------------------------------------------------------------------------------------------------


def ratio(record: Record, mode: str, times: str = "wall_s") -> float:
    """Return the median over blocks of eager's time over that of a mode in the same round; NaN without."""
    pairs = list(zip(record[times]["eager"], record[times].get(mode, ()), strict=False))
    if mode in record["errors"] or not pairs or (MODES[mode].has_head and not any(record["heads"])):
        return math.nan
    ratios: list[float] = [eager / ours for eager, ours in pairs]
    return statistics.median(ratios)


def _gain(record: Record, mode: str, times: str) -> float:
    """Return the ratio of a mode, or that in use if it needs a head and there is none."""
    gain = ratio(record, mode, times)
    return ratio(record, "in use", times) if math.isnan(gain) and MODES[mode].has_head else gain


def steady(heads: list[float]) -> int | None:
    """Return the first step of the block from which nine of ten steps have a head, or None."""
    return next(
        (
            BLOCK * first
            for first, share in enumerate(heads)
            if min(share, statistics.fmean(heads[first:])) >= 0.9
        ),
        None,
    )


def _text(value: float) -> str:
    return "none" if math.isnan(value) else f"{value:.2f}"


def _columns(records: list[Record]) -> list[tuple[str, str]]:
    modes = [mode for mode in MODES if any(mode in record["wall_s"] for record in records)][1:]
    return [(mode, times) for mode in modes for times in ("wall_s", "processor_s")]


def table(records: list[Record]) -> str:
    """Return times, and what the first steps cost, as Markdown tables."""
    columns = _columns(records)
    labels = [f"{mode}{', processor' if times == 'processor_s' else ''}" for mode, times in columns]
    lines = [
        f"Speedup over eager mode, median over blocks of {BLOCK} steps: wall time, then processor time. "
        "Without a head, geometric means have the ratio in use.",
        "",
        f"| program | size | blocks | eager, ms | {' | '.join(labels)} |",
        f"|---|---|---|---|{'---|' * len(columns)}",
    ]
    for record in records:
        eager = record["wall_s"]["eager"]
        cells = [
            record["program"],
            record["size"],
            str(len(eager)),
            f"{_median_ms(eager)}",
        ]
        cells += [_text(ratio(record, mode, times)) for mode, times in columns]
        lines.append(f"| {' | '.join(cells)} |")
    for label, belongs in _GROUPS.items():
        group = [record for record in records if record["size"] == "small" and belongs(record["program"])]
        means = [_mean([_gain(record, mode, times) for record in group]) for mode, times in columns]
        if group:
            lines.append(f"| geometric mean of {label} | small | | | {' | '.join(map(_text, means))} |")
    return "\n".join([*lines, "", *_start_table(records)]) + "\n"


_GROUPS: dict[str, Callable[[str], bool]] = {
    "the first ten programs": lambda name: name in TEN,
    "the fifteen later programs": lambda name: name not in TEN and not name.startswith("toy_"),
    "the five toys": lambda name: name.startswith("toy_"),
}


def _start_table(records: list[Record]) -> Iterator[str]:
    yield (
        f"| program | size | steps with a head, exact, % | from step | first {FIRST_STEPS} steps in use: "
        "processor time over eager | peak memory of the process over eager | peak, MiB more "
        "| growth, MiB (steps) "
        "| why no head, and modes without a result |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for record in records:
        measured, first = record["heads"][WARM_UPS // BLOCK :], record.get("start", {})
        share = 100 * statistics.fmean(measured or [0.0])
        cells = [record["program"], record["size"], f"{share:.0f}", str(steady(record["heads"]) or "none")]
        if all(mode in first and "error" not in first[mode] for mode in ("eager", "in use")):
            eager, ours = first["eager"], first["in use"]
            cells += [_text(ours[key] / eager[key]) for key in ("processor_s", "peak_mib")]
            cells.append(f"{ours['peak_mib'] - eager['peak_mib']:.1f}")
            cells.append(f"{ours['growth_mib']:.1f} ({ours['steps']})")
        else:
            cells += ["none"] * 4
        failed = [
            f"{mode}: {error.splitlines()[0]}" for mode, error in record["errors"].items() if error != "none"
        ]
        remarks = [*([record["no_head"]] if not any(measured) and record["no_head"] else []), *failed]
        yield f"| {' | '.join(cells)} | {'; '.join(remarks).replace('|', ' ')[:200]} |"


def _median_ms(values: list[float]) -> str:
    return f"{statistics.median(values) * 1e3:.2f}" if values else "none"


def _mean(ratios: list[float]) -> float:
    """Return the geometric mean of the ratios that are known."""
    finite = [value for value in ratios if not math.isnan(value)]
    return statistics.geometric_mean(finite) if finite else math.nan


# -- all -----------------------------------------------------------------------------------------------------


def _saved(path: Path) -> dict[tuple[str, str], Record]:
    return {
        (record["program"], record["size"]): record
        for record in load(path)
        if record["revision"] == engine_revision()
    }


_IMPORT_S = 4.0
"""Time of a new process to import torch, in seconds, which counts to a program's share."""


def _forked(function: Callable[[], Record], limit_s: float) -> Record:
    """Return what a function returns in a forked process; torch must not have computed before."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        with os.fdopen(writes, "w", encoding="utf-8") as out:
            try:
                json.dump(function(), out)
            except Exception as error:
                message = f"{type(error).__name__}: {error}" if str(error) != "none" else "none"
                json.dump({"error": message}, out)
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads, encoding="utf-8") as made:
        is_made = bool(select.select([made], [], [], limit_s)[0])
        if not is_made:
            os.kill(child, signal.SIGKILL)
        text = made.read() if is_made else ""
    os.waitpid(child, 0)
    record: Record = json.loads(text) if text else {"error": f"no result within {limit_s:.0f} s"}
    return record


def _try(name: str, size: str, mode: str) -> Record:
    Running(name, size, mode).block()
    return {}


def _run_program(name: str, size: str, seconds: float, chosen: list[str]) -> Record:
    """Return the record of a program, measured in this process and two forked ones."""
    end = time.perf_counter() + seconds
    first = {
        mode: _forked(functools.partial(start, name, size, mode, seconds / 16), seconds)
        for mode in ("eager", "in use")
    }
    tried = {mode: _forked(functools.partial(_try, name, size, mode), seconds / 4) for mode in chosen[1:]}
    errors = {mode: record["error"] for mode, record in tried.items() if "error" in record}
    works = [mode for mode in chosen if mode not in errors]
    warm_up_s = sum(MODES[mode].warm_up_s for mode in works)
    record = measure(name, size, max(end - time.perf_counter() - warm_up_s, seconds / 8), works)
    return {"start": first, **record, "errors": errors | record["errors"]}


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coexecution_time")
    parser.add_argument("--program", action="append", choices=names(), help="program to run; default all")
    parser.add_argument("--size", action="append", choices=SIZES, help="size of programs; default small")
    parser.add_argument("--mode", action="append", choices=MODES, help="mode beside eager; default all")
    parser.add_argument(
        "--seconds", type=float, default=2400.0, help="time for all programs in seconds (default 2400)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("coexecution_time.jsonl"), help="file of saved results"
    )
    parser.add_argument("--table", type=Path, help="file for the table of all saved results")
    parser.add_argument("--one", nargs=2, metavar=("PROGRAM", "SIZE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no processes that outlive a forked one
    chosen = ["eager", *(mode for mode in arguments.mode or MODES if mode != "eager")]
    if arguments.one:
        warnings.simplefilter("ignore")
        name, size = arguments.one
        print(json.dumps(_run_program(name, size, arguments.seconds, chosen)))
        return 0
    asked = itertools.product(arguments.size or ["small"], arguments.program or names())
    missing = [(name, size) for size, name in asked if name in SIZES[size]]
    missing = [key for key in missing if key not in _saved(arguments.out)]
    end = time.perf_counter() + arguments.seconds
    for position, (name, size) in enumerate(missing):
        share = max(end - time.perf_counter(), 0.0) / (len(missing) - position)
        record = {"program": name, "size": size, "revision": engine_revision()}
        command = ["--one", name, size, "--seconds", str(max(share - _IMPORT_S, 2.0))]
        for mode in chosen:
            command += ["--mode", mode]
        record |= run_apart("coexecution_time", command, 4 * share + 60)
        save(arguments.out, record)
        print(_line(record), flush=True)
    if arguments.table:
        usable = [saved for saved in _saved(arguments.out).values() if "error" not in saved]
        arguments.table.write_text(table(usable), encoding="utf-8")
    return 0


def _line(record: Record) -> str:
    label = f"{record['program']}, {record['size']}"
    if "error" in record:
        return f"{label}: {record['error']}"
    modes = [mode for mode in MODES if mode in record["wall_s"] and mode != "eager"]
    ratios = ", ".join(f"{mode} {_text(ratio(record, mode))}" for mode in modes)
    return f"{label}: speedup over eager: {ratios} {record['errors'] or ''}"


if __name__ == "__main__":
    sys.exit(main())
