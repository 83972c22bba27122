"""Training programs under eager PyTorch, torch.compile and `coexecute`: equality, graph breaks and errors.

    python -m benchmarks.coexecution [--program NAME ...] [--steps 50] [--out FILE.jsonl] [--table FILE.md]

Each program of `benchmarks.programs` runs under each mode in a process of its own, with a time limit. Losses
and gradients of every step, final parameters, buffers and optimizer state, recorded effects, printed text and
random state are compared with eager. `coexecute` runs every known path beside Python, whether or not that is
faster. torch.compile runs with ``backend="eager"``: it captures
what it would for any backend, and the same kernels run as without it. This program times nothing.

Each result is saved as one line as soon as it is known. The same command runs only what is missing, also
after it was killed. ``--table`` writes all saved results as a table.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import hashlib
import io
import itertools
import json
import math
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._dynamo.utils import counters, get_compilation_metrics, set_compilation_metrics_limit

import tunebench
from benchmarks.programs import Make, State, Step, names, program
from tunebench.training import coexecute
from tunebench.training.coexecution._modes import SETTERS
from tunebench.training.coexecution._testing import forced

SEED = 7

TOLERANCE = 1e-5
"""Allowed difference over the largest magnitude of a group of tensors, where operations are compiled."""

Record = dict[str, Any]
Wrap = Callable[[Step], Step]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a program did.

    Attributes:
        tensors: Results, inputs and gradients of every step, and the final state, by name.
        effects: Values that the steps recorded.
        printed: Text that the steps printed.
        raised: Type and message of the exceptions that left steps, by iteration.
        other: Types of tensors in `tensors`, and values that are no tensors, by name.
        versions: Version counters of tensors in `tensors`, which in-place operations increment.
    """

    tensors: dict[str, Tensor]
    effects: list[Any]
    printed: str
    raised: dict[int, str]
    other: dict[str, Any]
    versions: dict[str, int]


# -- modes ---------------------------------------------------------------------------------------------------


def _compiled(step: Step, *, fullgraph: bool = False, scalars: bool = False) -> Step:
    torch._dynamo.config.capture_scalar_outputs = scalars
    compiled: Step = torch.compile(step, backend="eager", fullgraph=fullgraph)
    return compiled


MODES: dict[str, Wrap] = {
    "default": _compiled,
    "fullgraph": functools.partial(_compiled, fullgraph=True),
    "capture_scalar_outputs": functools.partial(_compiled, scalars=True),
    "coexecute": coexecute,
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
    return run_program(program(name), wrap, steps, seed=seed)


def run_program(make: Make, wrap: Wrap, steps: int, *, seed: int = SEED, raises: bool = False) -> Run:
    """Run a program and return what it did.

    Args:
        make: Function that makes the program.
        wrap: Function that returns the step to run from the step of the program.
        steps: Number of iterations.
        seed: Seed of parameters, batches and random operations.
        raises: Whether an exception ends its iteration only, and not the run.
    """
    random.seed(seed)
    np.random.seed(seed)
    step, state = make(seed)
    step = wrap(step)
    seen = _Seen()
    raised: dict[int, str] = {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), _kept_settings(seen):
        for iteration in range(steps):
            batch = state.batch(iteration)
            try:
                seen.add(f"loss {iteration}", step(*batch))
            except Exception as error:
                if not raises:
                    raise
                raised[iteration] = f"{type(error).__name__}: {error}"
            for position, value in enumerate(batch):
                seen.add(f"input {iteration}.{position}", value)
            for key, module in state.modules.items():
                for path, parameter in module.named_parameters():
                    seen.add(f"gradient {iteration} {key}.{path}", parameter.grad)
    _see_final(state, seen)
    return Run(
        tensors=seen.tensors,
        effects=state.effects,
        printed=printed.getvalue(),
        raised=raised,
        other=seen.other,
        versions=seen.versions,
    )


class _Seen:
    """Copies of values at the time that they are added."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.other: dict[str, Any] = {}
        self.versions: dict[str, int] = {}

    def add(self, name: str, value: Any) -> None:
        """Add a value, unless it is None."""
        if isinstance(value, Tensor):
            self.tensors[name] = value.detach().clone()
            self.other[f"type of {name}"] = (
                type(value).__name__, value.requires_grad, value.stride(), value.is_inference()
            )  # fmt: skip
            if not value.is_inference():  # they have no version
                self.versions[name] = value._version
        elif value is not None:
            self.other[name] = copy.deepcopy(value)


@contextlib.contextmanager
def _kept_settings(seen: _Seen) -> Iterator[None]:
    """Add the settings of torch at the end to what was seen, and restore those of the start."""
    before = {key: getter() for key, getter in SETTERS.items()}
    try:
        yield
    finally:
        for (owner, name), getter in SETTERS.items():
            value = getter()
            seen.add(f"setting {name}", repr(value))
            if value != before[owner, name]:
                getattr(owner, name)(before[owner, name])


def _see_final(state: State, seen: _Seen) -> None:
    seen.add("random state", torch.get_rng_state())
    seen.add("random state of Python", random.getstate())
    seen.add("random state of NumPy", torch.from_numpy(np.random.get_state()[1].astype(np.int64)))  # type: ignore[index]
    for key, module in state.modules.items():
        for path, value in module.state_dict(keep_vars=True).items():
            seen.add(f"state {key}.{path}", value)
        for path, part in module.named_modules():
            for attribute, value in vars(part).items():
                if isinstance(value, (bool, int, float, str)):
                    seen.add(f"attribute {key}.{path}.{attribute}", value)
    for key, optimizer in state.optimizers.items():
        for number, values in optimizer.state_dict()["state"].items():
            for slot, value in values.items():
                seen.add(f"optimizer {key}.{number}.{slot}", value)
        for number, group in enumerate(optimizer.param_groups):
            seen.add(f"learning rate {key}.{number}", group["lr"])
    for key, value in [*state.tensors.items(), *state.memory.items()]:
        seen.add(f"memory {key}", value)


def differences(expected: Run, got: Run, tolerance: float = 0.0) -> list[str]:
    """Return what differs between two runs; empty if nothing does.

    Args:
        expected: The run to compare with.
        got: The other run.
        tolerance: Largest allowed difference of an element over the largest magnitude of its group: the
            gradients of a step, the parameters, and so on. With 0, tensors are equal to the last bit.
    """
    magnitudes = _magnitudes(expected.tensors)
    lines = [f"{key} only in one run" for key in sorted(expected.tensors.keys() ^ got.tensors.keys())]
    for key, left in expected.tensors.items():
        right = got.tensors.get(key, left)
        if left.shape != right.shape or left.dtype != right.dtype:
            lines.append(f"{key}: {tuple(left.shape)} {left.dtype}, got {tuple(right.shape)} {right.dtype}")
        elif not (error := relative_error(left, right, magnitudes.get(_group(key), 0.0))) <= tolerance:
            lines.append(f"{key}: relative error {error:.1e}")
    if expected.printed != got.printed:
        lines.append("printed text")
    if expected.effects != got.effects:
        lines.append("effects")
    for iteration in sorted(expected.raised.keys() | got.raised.keys()):
        left, right = expected.raised.get(iteration), got.raised.get(iteration)
        if left != right:
            lines.append(f"exception {iteration}: {left}, got {right}")
    for key in sorted(expected.other.keys() | got.other.keys()):
        left, right = expected.other.get(key), got.other.get(key)
        if repr(left) != repr(right):
            lines.append(f"{key}: {left!r:.80}, got {right!r:.80}")
    return lines


def version_differences(expected: Run, got: Run) -> list[str]:
    """Return the tensors whose version counters differ between two runs."""
    return [
        f"version of {key}: {version}, got {got.versions.get(key)}"
        for key, version in expected.versions.items()
        if version != got.versions.get(key)
    ]


def relative_error(left: Tensor, right: Tensor, magnitude: float) -> float:
    """Return the largest difference over a magnitude; elements that are both NaN are equal."""
    left, right = left.reshape(-1), right.reshape(-1)  # comparisons take at most 64 dimensions
    if left.is_floating_point():
        left, right = left.double(), right.double()  # torch compares no 8-bit floats
    same = (left == right) | (left.isnan() & right.isnan())
    if same.all():
        return 0.0
    if not (left[~same].isfinite() & right[~same].isfinite()).all():
        return math.inf
    return float((left.double() - right.double())[~same].abs().max()) / (magnitude or math.nan)


def _magnitudes(tensors: dict[str, Tensor]) -> dict[str, float]:
    """Return the largest finite magnitude of each group of tensors: a gradient can be 0 but for rounding."""
    magnitudes: dict[str, float] = {}
    for key, value in tensors.items():
        finite = value.double()
        finite = finite[finite.isfinite()].abs()
        if len(finite):
            magnitudes[_group(key)] = max(magnitudes.get(_group(key), 0.0), float(finite.max()))
    return magnitudes


def _group(key: str) -> str:
    """Return the name of a tensor without its last word: the gradients of a step, the parameters, ..."""
    return key.rpartition(" ")[0]


def examine(name: str, mode: str, steps: int) -> Record:
    """Run a program under eager and under a mode in this process, and return the record of the mode."""
    record: Record = {"program": name, "mode": mode, "steps": steps, "torch": torch.__version__}
    expected = run(name, lambda step: step, steps)
    set_compilation_metrics_limit(100_000)
    wrapped: list[Step] = []

    def wrap(step: Step) -> Step:
        wrapped.append(MODES[mode](step))
        return wrapped[0]

    try:
        with forced():
            got = run(name, wrap, steps)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        outcome: Record = {"error": f"{type(error).__name__}: {' '.join(lines[:2])[:200]}"}
    else:
        outcome = {"differences": differences(expected, got), "versions": version_differences(expected, got)}
        outcome["beyond tolerance"] = differences(expected, got, TOLERANCE)
        outcome["differences"], outcome["versions"] = outcome["differences"][:20], outcome["versions"][:20]
    counts = _counts_of_coexecution(wrapped[0]) if mode == "coexecute" else _counts()
    return {**record, **counts, **outcome}


def _counts_of_coexecution(step: Step) -> Record:
    report = coexecute.report(step)
    return {
        "traced": report.traced,
        "coexecuted": report.coexecuted,
        "diverged": report.diverged,
        "operations": report.operations,
        "revision": engine_revision(),
    }


def _counts() -> Record:
    """Return how often torch.compile broke the graph and compiled, in this process.

    A graph break counts once per compilation that meets it, not once per call. A recompilation is a further
    compilation of a frame that was compiled before.
    """
    compilations = [
        compile_id.compile_id for compile_id in get_compilation_metrics() if compile_id.compile_id is not None
    ]
    return {
        "graph_breaks": sum(counters["graph_break"].values()),
        "graphs": counters["stats"]["unique_graphs"],
        "recompilations": sum(not compile_id.split("_")[0].endswith("/0") for compile_id in compilations),
    }


def engine_revision() -> str:
    """Return a hash of the code that results depend on: the engine of `coexecute`, and the programs."""
    folders = [
        Path(tunebench.__file__).parent / "training" / "coexecution",
        Path(__file__).parent / "programs",
    ]
    files = [*(file for folder in folders for file in sorted(folder.rglob("*.py")))]
    files.append(Path(__file__).with_name("random_programs.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


# -- all -----------------------------------------------------------------------------------------------------


def load(path: Path) -> list[Record]:
    """Return the saved records; a last line that was cut off is left out."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            records.append(json.loads(line))
    return records


def save(path: Path, record: Record) -> None:
    """Append a record to the saved ones."""
    with path.open("a", encoding="utf-8") as out:
        out.write(json.dumps(record) + "\n")


def run_apart(module: str, arguments: list[str], timeout_s: float | None = None) -> Record:
    """Return the record that a module prints as its last line, run in another process, or the error.

    Args:
        module: Name of the module in this package.
        arguments: Arguments of its command.
        timeout_s: Time limit in seconds.
    """
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"no result within {timeout_s:g} s"}
    if done.returncode:
        return {"error": f"exit status {done.returncode}: {done.stderr.strip()[-300:]}"}
    record: Record = json.loads(done.stdout.splitlines()[-1])
    return record


def _examine_apart(name: str, mode: str, arguments: argparse.Namespace) -> Record:
    """Return the record of a program under a mode, computed in another process."""
    record = {"program": name, "mode": mode, "steps": arguments.steps, "revision": engine_revision()}
    command = ["--one", name, mode, "--steps", str(arguments.steps)]
    return {**record, **run_apart("coexecution", command, arguments.timeout_s)}


def table(records: list[Record]) -> str:
    """Return the records as two Markdown tables: torch.compile, and `coexecute`."""
    lines = [
        "| program | mode | result | graphs | graph breaks | recompilations |",
        "|---|---|---|---|---|---|",
    ]
    ours = ["| program | result | iterations traced | co-executed | diverged | operations |"]
    ours += ["|---|---|---|---|---|---|"]
    for record in records:
        start = f"| {record['program']} |"
        if record["mode"] == "coexecute":
            counts = [str(record.get(key, "")) for key in ("traced", "coexecuted", "diverged", "operations")]
            ours.append(f"{start} {_result(record)} | {' | '.join(counts)} |")
        else:
            counts = [str(record.get(key, "")) for key in ("graphs", "graph_breaks", "recompilations")]
            lines.append(f"{start} {record['mode']} | {_result(record)} | {' | '.join(counts)} |")
    return "\n".join([*lines, "", *ours]) + "\n"


def _result(record: Record) -> str:
    if "error" in record:
        return "error: " + " ".join(record["error"].replace("|", "\\|").split())
    if not record["differences"]:
        return "equal to the last bit"
    beyond = record["beyond tolerance"]
    if not beyond:
        return f"equal within {TOLERANCE:g}"
    marker = ": relative error "
    errors = [float(difference.rpartition(marker)[2]) for difference in beyond if marker in difference]
    untyped = [difference for difference in beyond if marker not in difference]
    tensors = [f"{len(errors)} tensors by up to {max(errors):.0e}"] if errors else []
    return f"different: {'; '.join([*tensors, *untyped[:2]])}"


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coexecution")
    parser.add_argument("--program", action="append", choices=names(), help="program to run; default all")
    parser.add_argument("--mode", action="append", choices=MODES, help="mode to run under; default all")
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
        name, mode = arguments.one
        print(json.dumps(examine(name, mode, arguments.steps)))
        return 0
    for name, mode in itertools.product(arguments.program or names(), arguments.mode or MODES):
        if (name, mode, arguments.steps) in _saved(arguments.out):
            continue
        record = _examine_apart(name, mode, arguments)
        save(arguments.out, record)
        print(f"{name} {mode}: {_result(record)}", flush=True)
    if arguments.table:
        arguments.table.write_text(table(list(_saved(arguments.out).values())), encoding="utf-8")
    return 0


def _saved(path: Path) -> dict[tuple[str, str, int], Record]:
    """Return the saved records that the present code would give again, sorted by program, mode and steps."""
    saved = {(record["program"], record["mode"], record["steps"]): record for record in load(path)}
    current = {
        key: record
        for key, record in saved.items()
        if record["mode"] != "coexecute" or record.get("revision", engine_revision()) == engine_revision()
    }
    return dict(sorted(current.items(), key=lambda item: (item[0][0], list(MODES).index(item[0][1]))))


if __name__ == "__main__":
    sys.exit(main())
