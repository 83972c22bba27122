"""Memory of co-executed training programs: growth over 1,000 steps, and the peak against eager PyTorch.

    python -m benchmarks.coexecution_memory [--program NAME ...] [--out FILE.jsonl] [--table FILE.md]

Each program runs in eager mode, always co-executed, and as in use, where a slow step returns to eager mode.
Each run has a process of its own and a size at which tensors, not imports, take the memory. Resident memory
counts from after the program was made. Growth is from step 200 to the last step.
Each result is saved as one line as soon as it is known. The same command runs only what is missing or failed
for the present code, also after it was killed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import itertools
import json
import sys
import warnings
from pathlib import Path

import torch

from benchmarks.coexecution import Record, engine_revision, load, run_apart, save
from benchmarks.coexecution_time import SIZES, peak_mib, reset_peak, resident_mib, sized
from benchmarks.programs import names
from tunebench.training import coexecute
from tunebench.training.coexecution._testing import forced

WARM_UP = 200
"""Steps before growth counts."""

MODES = ("eager", "coexecute", "in use")


def measure(name: str, mode: str, steps: int) -> Record:
    """Run a program in this process and return its memory in MiB, and the number of its tensors."""
    size = "large" if name in SIZES["large"] else "small"
    step, state = sized(name, size)
    # Libraries initialise at the first operation of a kind, which is no memory of the program.
    torch.nn.functional.conv2d(torch.ones(1, 1, 8, 8), torch.ones(1, 1, 3, 3))
    if mode != "eager":
        step = coexecute(step)
    always = forced if mode == "coexecute" else contextlib.nullcontext
    start = resident_mib()
    reset_peak()
    for iteration in range(steps):
        with contextlib.redirect_stdout(io.StringIO()), always():
            step(*state.batch(iteration))
        state.effects.clear()
        if iteration == min(WARM_UP, steps // 2):
            gc.collect()
            warm, tensors = resident_mib(), _tensors()
    gc.collect()
    return {
        "size": size, "peak_mib": peak_mib() - start,
        "growth_mib": resident_mib() - warm, "tensor_growth": _tensors() - tensors,
    }  # fmt: skip


def _tensors() -> int:
    return sum(issubclass(type(object_), torch.Tensor) for object_ in gc.get_objects())


def table(records: list[Record]) -> str:
    """Return the records as a Markdown table."""
    lines = [
        "| program | size | peak eager, MiB | peak always co-executed, MiB | ratio "
        "| peak in use, MiB | ratio | growth eager, MiB | growth always co-executed, MiB "
        "| growth in use, MiB | further tensors, always co-executed |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    by_mode = {(record["program"], record["mode"]): record for record in records}
    for name in sorted({record["program"] for record in records}):
        runs = [by_mode.get((name, mode)) for mode in MODES]
        if None in runs:
            continue
        eager, always, used = (record for record in runs if record is not None)
        cells = [name, eager["size"], f"{eager['peak_mib']:.0f}"]
        for run in (always, used):
            cells += [f"{run['peak_mib']:.0f}", f"{run['peak_mib'] / eager['peak_mib']:.2f}"]
        cells += [f"{run['growth_mib']:.1f}" for run in (eager, always, used)]
        lines.append(f"| {' | '.join(cells)} | {always['tensor_growth']} |")
    return "\n".join(lines) + "\n"


def _saved(path: Path) -> dict[tuple[str, str, int], Record]:
    return {
        (record["program"], record["mode"], record["steps"]): record
        for record in load(path)
        if "error" not in record and (record["mode"] == "eager" or record["revision"] == engine_revision())
    }


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coexecution_memory")
    parser.add_argument("--program", action="append", choices=names(), help="program to run; default all")
    parser.add_argument("--steps", type=int, default=1000, help="iterations per mode (default 1000)")
    parser.add_argument(
        "--out", type=Path, default=Path("coexecution_memory.jsonl"), help="file of saved results"
    )
    parser.add_argument("--table", type=Path, help="file for the table of all saved results")
    parser.add_argument("--one", nargs=2, metavar=("PROGRAM", "MODE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    if arguments.one:
        warnings.simplefilter("ignore")
        name, mode = arguments.one
        print(json.dumps(measure(name, mode, arguments.steps)))
        return 0
    for name, mode in itertools.product(arguments.program or names(), MODES):
        if (name, mode, arguments.steps) in _saved(arguments.out):
            continue
        record = {"program": name, "mode": mode, "steps": arguments.steps, "revision": engine_revision()}
        record |= run_apart("coexecution_memory", ["--one", name, mode, "--steps", str(arguments.steps)])
        save(arguments.out, record)
        print(record, flush=True)
    if arguments.table:
        arguments.table.write_text(table(list(_saved(arguments.out).values())), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
