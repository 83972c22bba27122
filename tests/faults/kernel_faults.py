"""Tuning of kernels that fail in every way: each failure is the outcome of one configuration.

    python -m tests.faults kernels

`kernel_faults` runs `tunebench tune` on a copy of `tests.faults.faulty_kernels`, twice. The first run
must end with exit code 0 and record an outcome of the expected class for every configuration, and measure the
right ones. The second run must know all of them, except for time-outs that were made under load.

`busy_machine` tunes right kernels while other programs use all processors, and again when these have ended:
no configuration may be lost.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults import faulty_kernels
from tunebench.db.store import open_store
from tunebench.outcome import Outcome, failed, first_error
from tunebench.tuning.known_outcome import made_under_load

__all__ = ["BusyMachine", "KernelFaults", "busy_machine", "kernel_faults", "tune_file"]

_UNPRINTED = re.compile(r"\x1b\[[\d;]*\w|[\x00-\x1f]|/[^ ]*/(?=faulty\.py)")
"""Colours and control characters, and the folder of the variant file."""

ALL_ROWS, FEW_ROWS = 33, 8
LIMIT_S = 1800.0
WORKER_MEMORY_GB = "1.5"

BUSY_WORKLOAD = "softmax:rows=64,cols=64,dtype=f32"
WARM_UP_S = 5.0
"""Time for the other programs to start, in seconds."""

LOOP = f"import time; end = time.monotonic() + {LIMIT_S}\nwhile time.monotonic() < end: pass"
"""Another program, which ends by itself if this one is killed."""


@dataclass(slots=True, kw_only=True)
class KernelFaults:
    """Outcomes of the configurations in two runs.

    Attributes:
        outcomes: Class and reason of the outcome of each fault, by name.
        exit_codes: Exit codes of the runs.
        repeated: Number of time-outs under load, which the second run repeats.
        processor_s: Processor time of both runs, in seconds.
        wrong: What differs from what is expected, one line each.
    """

    outcomes: dict[str, tuple[str, str]] = field(default_factory=dict)
    exit_codes: list[int] = field(default_factory=list)
    repeated: int = 0
    processor_s: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def table(self) -> str:
        """Return a Markdown table of the outcomes."""
        lines = ["| the kernel | ends as | reason |", "|---|---|---|"]
        for name, (kind, reason) in self.outcomes.items():
            text = _UNPRINTED.sub("", first_error(reason))[:100].replace("|", "/")
            lines.append(f"| {name} | {kind} | {text} |")
        return "\n".join(lines)


def kernel_faults(folder: Path, *, every: bool, timeout_s: float = 10.0) -> KernelFaults:
    """Tune all faulty kernels, or a few of them, twice.

    Args:
        folder: Folder for the database, the cache and the variant.
        every: Whether to tune all; otherwise those of `faulty_kernels.QUICK`.
        timeout_s: Time limit of one configuration, in seconds.
    """
    variant = folder / "faulty.py"
    shutil.copy(faulty_kernels.__file__, variant)
    workload = f"softmax:rows={ALL_ROWS if every else FEW_ROWS},cols=8,dtype=f32"
    expected = dict.fromkeys(faulty_kernels.RIGHT, ("measured",)) | {
        name: kinds
        for name, kinds in faulty_kernels.EXPECTED.items()
        if every or name in faulty_kernels.QUICK
    }
    faults, children_before_s = KernelFaults(), _children_s()
    options = ("--timeout", str(timeout_s), "--trials", str(2 * len(expected)))
    first, second = (tune_file(folder, variant, workload, *options) for _ in range(2))
    faults.processor_s = _children_s() - children_before_s
    faults.exit_codes = [first.returncode, second.returncode]
    for run, ended in (("first", first), ("second", second)):
        if ended.returncode != 0:
            faults.wrong.append(f"the {run} run ended with {ended.returncode}: {ended.stderr[-500:]}")
    if not faults.wrong:
        _check_outcomes(folder / "faults.db", workload, expected, faults)
        _check_rerun(json.loads(first.stdout), json.loads(second.stdout), len(expected), faults)
    return faults


@dataclass(slots=True, kw_only=True)
class BusyMachine:
    """Outcomes of correct kernels on a busy machine, and later on an idle one.

    Attributes:
        load: Load average at the end of the first run.
        busy: Number of configurations by outcome after the run on the busy machine.
        later: The same after the later run.
        lost: Configurations that failed and would not be tried again, in text form.
        exit_codes: Exit codes of the runs.
    """

    load: float = 0.0
    busy: dict[str, int] = field(default_factory=dict)
    later: dict[str, int] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    exit_codes: list[int] = field(default_factory=list)


def busy_machine(folder: Path, *, programs: int = 8, timeout_s: float = 1.0, trials: int = 6) -> BusyMachine:
    """Tune right kernels while other programs loop, and again after they ended.

    Args:
        folder: Folder for the database and the cache.
        programs: Number of other programs.
        timeout_s: Time limit of one configuration, in seconds.
        trials: Number of configurations to try.
    """
    machine = BusyMachine()
    options = ("--variant", "numba_cpu", "--timeout", str(timeout_s), "--trials", str(trials))
    with _looping(programs):
        time.sleep(WARM_UP_S)
        ended = tune_file(folder, None, BUSY_WORKLOAD, *options)
        machine.load = round(os.getloadavg()[0], 1)
    machine.exit_codes.append(ended.returncode)
    machine.busy = _count(_newest(folder, BUSY_WORKLOAD))
    ended = tune_file(folder, None, BUSY_WORKLOAD, *options)
    machine.exit_codes.append(ended.returncode)
    newest = _newest(folder, BUSY_WORKLOAD)
    machine.later = _count(newest)
    machine.lost = [
        name for name, outcome in newest.items() if failed(outcome) and not made_under_load(outcome)
    ]
    return machine


@contextlib.contextmanager
def _looping(programs: int) -> Iterator[None]:
    """Run programs that use a processor each."""
    running = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(programs)]
    try:
        yield
    finally:
        for program in running:
            program.kill()
            program.wait()


def _newest(folder: Path, workload: str) -> dict[str, Outcome]:
    """Return the newest outcome of each configuration of a search."""
    with open_store(folder / "faults.db", read_only=True) as store:
        records = [record for record in store.history(workload) if record.purpose == "search"]
        return {f"{record.key.variant} {record.key.config}": record.result.outcome for record in records}


def _count(outcomes: Mapping[str, Outcome]) -> dict[str, int]:
    return dict(Counter(outcome.kind for outcome in outcomes.values()))


def tune_file(
    folder: Path, variant: Path | None, workload: str, *options: str
) -> subprocess.CompletedProcess[str]:
    """Run `tunebench tune` with a variant file and a database in a folder.

    Args:
        folder: The folder, also of the cache.
        variant: The variant file; None for variants of tunebench.
        workload: The workload.
        options: More options.
    """
    command = [sys.executable, "-m", "tunebench", "tune", "--workload", workload, "--device", "cpu"]
    command += [] if variant is None else ["--variant-file", str(variant)]
    command += ["--sampler", "random", "--no-warm", "--no-baselines"]
    command += ["--finalists", "1", "--db", str(folder / "faults.db"), "--json", *options]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=LIMIT_S,
        check=False,
        env={
            **os.environ,
            "TUNEBENCH_CACHE": str(folder / "cache"),
            "TUNEBENCH_WORKER_MEMORY": WORKER_MEMORY_GB,
        },
    )


def _check_outcomes(
    database: Path, workload: str, expected: Mapping[str, tuple[str, ...]], faults: KernelFaults
) -> None:
    """Compare the recorded outcomes with the expected classes."""
    outcomes = {}
    with open_store(database, read_only=True) as store:
        for record in store.history(workload):
            if record.purpose == "search":  # the newest attempt is the last one
                outcomes[str(record.key.config["fault"])] = record.result.outcome
    faults.repeated = sum(map(made_under_load, outcomes.values()))
    for name, kinds in expected.items():
        outcome = outcomes.get(name)
        if outcome is None:
            faults.wrong.append(f"{name}: no outcome was recorded")
            continue
        faults.outcomes[name] = (outcome.kind, getattr(outcome, "reason", ""))
        slower = kinds == ("measured",) and outcome.kind == "aborted"  # correct, but clearly slower
        late = outcome.kind == "timed_out" and made_under_load(outcome)
        if outcome.kind not in kinds and not slower and not late:
            faults.wrong.append(f"{name}: {outcome}"[:500])


def _check_rerun(
    first: Mapping[str, Any], second: Mapping[str, Any], count: int, faults: KernelFaults
) -> None:
    """Check that the second run knew all outcomes, but for time-outs that were made under load."""
    repeated = sum(second["trials"].values())
    if second["cached"] < count - repeated or set(second["trials"]) - {"timed_out", "compile_failed"}:
        faults.wrong.append(
            f"the second run knew {second['cached']} of {count}, and tried {second['trials']}"
        )
    if repeated and not first["trials"].get("timed_out") and not first["trials"].get("compile_failed"):
        faults.wrong.append(f"the second run tried {second['trials']} without a reason")


def _children_s() -> float:
    times = os.times()
    return times.children_user + times.children_system
