"""Training programs under eager PyTorch and torch.compile: equality, graph breaks, recompilations and errors.

    python -m benchmarks.coexecution [--program NAME ...] [--steps 50] [--out FILE.jsonl] [--table FILE.md]

Each program of `benchmarks.programs` runs under each mode in a process of its own, with a time limit. Losses
and gradients of every step, final parameters, buffers and optimizer state, recorded effects, printed text and
random state are compared with eager to the last bit. torch.compile runs with ``backend="eager"``: it captures
what it would for any backend, and the same kernels run as without it. This program times nothing.

Each result is saved as one line as soon as it is known. The same command runs only what is missing, also
after it was killed. ``--table`` writes all saved results as a table.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters, get_compilation_metrics, set_compilation_metrics_limit

from benchmarks.programs import State, Step, names, program

SEED = 7

Record = dict[str, Any]
Wrap = Callable[[Step], Step]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a program did.

    Attributes:
        tensors: Losses and gradients of every step, and the final state, by name.
        effects: Values that the steps recorded.
        printed: Text that the steps printed.
    """

    tensors: dict[str, Tensor]
    effects: list[Any]
    printed: str


# -- modes ---------------------------------------------------------------------------------------------------


def _compiled(step: Step, *, fullgraph: bool = False, scalars: bool = False) -> Step:
    torch._dynamo.config.capture_scalar_outputs = scalars
    compiled: Step = torch.compile(step, backend="eager", fullgraph=fullgraph)
    return compiled


MODES: dict[str, Wrap] = {
    "default": _compiled,
    "fullgraph": functools.partial(_compiled, fullgraph=True),
    "capture_scalar_outputs": functools.partial(_compiled, scalars=True),
}
"""Ways to run a step that are compared with eager."""


# -- one program under one mode ------------------------------------------------------------------------------


def run(name: str, wrap: Wrap, steps: int, seed: int = SEED) -> Run:
    """Run a program and return what it did.

    Args:
        name: Name of the program.
        wrap: Function that returns the step to run from the step of the program.
        steps: Number of iterations.
        seed: Seed of parameters, batches and random operations.
    """
    step, state = program(name)(seed)
    step = wrap(step)
    tensors: dict[str, Tensor] = {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for iteration in range(steps):
            tensors[f"loss {iteration}"] = step(*state.batch(iteration)).clone()
            for key, module in state.modules.items():
                for path, parameter in module.named_parameters():
                    if parameter.grad is not None:
                        tensors[f"gradient {iteration} {key}.{path}"] = parameter.grad.clone()
    tensors |= _final(state)
    return Run(tensors=tensors, effects=state.effects, printed=printed.getvalue())


def _final(state: State) -> dict[str, Tensor]:
    tensors = {"random state": torch.get_rng_state()}
    for key, module in state.modules.items():
        tensors |= {f"state {key}.{path}": value.clone() for path, value in module.state_dict().items()}
    for key, optimizer in state.optimizers.items():
        for number, values in optimizer.state_dict()["state"].items():
            for slot, value in values.items():
                if value is not None:
                    tensors[f"optimizer {key}.{number}.{slot}"] = torch.as_tensor(value).clone()
    return tensors


def differences(expected: Run, got: Run) -> list[str]:
    """Return what differs between two runs, to the last bit; empty if nothing does."""
    found = [f"{key} only in one run" for key in sorted(expected.tensors.keys() ^ got.tensors.keys())]
    for key, left in expected.tensors.items():
        right = got.tensors.get(key, left)
        if left.shape != right.shape or left.dtype != right.dtype:
            found.append(f"{key}: {tuple(left.shape)} {left.dtype}, got {tuple(right.shape)} {right.dtype}")
        elif not torch.equal(left, right):
            error = (left.double() - right.double()).abs().max() / left.double().abs().max()
            found.append(f"{key}: relative error {error.item():.1e}")
    if expected.printed != got.printed:
        found.append("printed text")
    if expected.effects != got.effects:
        found.append("effects")
    return found


def examine(name: str, mode: str, steps: int) -> Record:
    """Run a program under eager and under a mode in this process, and return the record of the mode."""
    record: Record = {"program": name, "mode": mode, "steps": steps, "torch": torch.__version__}
    expected = run(name, lambda step: step, steps)
    set_compilation_metrics_limit(100_000)
    try:
        found: Record = {"differences": differences(expected, run(name, MODES[mode], steps))}
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        found = {"error": f"{type(error).__name__}: {lines[0][:160]}"}
    return {**record, **_counts(), **found}


def _counts() -> Record:
    """Return how often torch.compile broke the graph and compiled, in this process.

    A graph break counts once per compilation that meets it, not once per call. A recompilation is a further
    compilation of a frame that was compiled before.
    """
    compilations = [each.compile_id for each in get_compilation_metrics() if each.compile_id is not None]
    return {
        "graph_breaks": sum(counters["graph_break"].values()),
        "graphs": counters["stats"]["unique_graphs"],
        "recompilations": sum(not each.split("_")[0].endswith("/0") for each in compilations),
    }


# -- all -----------------------------------------------------------------------------------------------------


def load(path: Path) -> list[Record]:
    """Return the saved records; a last line that was cut off is left out."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            records.append(json.loads(line))
    return records


def _examine_apart(name: str, mode: str, arguments: argparse.Namespace) -> Record:
    """Return the record of a program under a mode, computed in another process."""
    command = [sys.executable, "-m", "benchmarks.coexecution", "--one", name, mode]
    command += ["--steps", str(arguments.steps)]
    record: Record = {"program": name, "mode": mode, "steps": arguments.steps}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=arguments.timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return {**record, "error": f"no result within {arguments.timeout_s:g} s"}
    if done.returncode:
        return {**record, "error": f"exit status {done.returncode}: {done.stderr.strip()[-160:]}"}
    found: Record = json.loads(done.stdout.splitlines()[-1])
    return found


def table(records: list[Record]) -> str:
    """Return the records as a Markdown table."""
    lines = ["| program | mode | equal to eager | graphs | graph breaks | recompilations | error |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for record in records:
        differing = record.get("differences")
        equal = (
            "no result" if differing is None else "no: " + "; ".join(differing[:2]) if differing else "yes"
        )
        counts = [str(record.get(key, "")) for key in ("graphs", "graph_breaks", "recompilations")]
        error = record.get("error", "").replace("|", "\\|")
        lines.append(f"| {record['program']} | {record['mode']} | {equal} | {' | '.join(counts)} | {error} |")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coexecution")
    parser.add_argument("--program", action="append", choices=names(), help="program to run; default all")
    parser.add_argument("--steps", type=int, default=50, help="iterations per program (default 50)")
    parser.add_argument(
        "--timeout-s", type=float, default=300, help="time limit per run in seconds (default 300)"
    )
    parser.add_argument("--out", type=Path, default=Path("coexecution.jsonl"), help="file of saved results")
    parser.add_argument("--table", type=Path, help="file for the table of all saved results")
    parser.add_argument("--one", nargs=2, metavar=("PROGRAM", "MODE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    if arguments.one:
        print(json.dumps(examine(*arguments.one, arguments.steps)))
        return 0
    identity = ("program", "mode", "steps")
    done = {tuple(record[key] for key in identity) for record in load(arguments.out)}
    for name in arguments.program or names():
        for mode in MODES:
            if (name, mode, arguments.steps) in done:
                continue
            record = _examine_apart(name, mode, arguments)
            with arguments.out.open("a", encoding="utf-8") as out:
                out.write(json.dumps(record) + "\n")
            print(record, flush=True)
    if arguments.table:
        arguments.table.write_text(table(load(arguments.out)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
