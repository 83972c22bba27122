"""Tuning of kernels that fail in every way: each failure is the outcome of one configuration.

    python -m tunebench.testing.faults kernels

`kernel_faults` runs `tunebench tune` on a copy of `tunebench.testing.faulty_kernels`, twice. The first run
must end with exit code 0 and record an outcome of the expected class for every configuration, and measure the
right ones. The second run must know all of them, except for time-outs that were made under load.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunebench.db.store import open_store
from tunebench.outcome import first_error
from tunebench.testing import faulty_kernels
from tunebench.tuning.known_outcome import made_under_load

__all__ = ["KernelFaults", "kernel_faults", "tune_file"]

ALL_ROWS, FEW_ROWS = 33, 8
LIMIT_S = 1800.0
WORKER_MEMORY_GB = "1.5"


@dataclass(slots=True, kw_only=True)
class KernelFaults:
    """What two runs made of the configurations.

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
            lines.append(f"| {name} | {kind} | {first_error(reason)[:100].replace('|', '/')} |")
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
    found, before = KernelFaults(), _children_s()
    options = ("--timeout", str(timeout_s), "--trials", str(2 * len(expected)))
    first, second = (tune_file(folder, variant, workload, *options) for _ in range(2))
    found.processor_s = _children_s() - before
    found.exit_codes = [first.returncode, second.returncode]
    for run, ended in (("first", first), ("second", second)):
        if ended.returncode != 0:
            found.wrong.append(f"the {run} run ended with {ended.returncode}: {ended.stderr[-500:]}")
    if not found.wrong:
        _check_outcomes(folder / "faults.db", workload, expected, found)
        _check_rerun(json.loads(first.stdout), json.loads(second.stdout), len(expected), found)
    return found


def tune_file(folder: Path, variant: Path, workload: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run `tunebench tune` with a variant file and a database in a folder.

    Args:
        folder: The folder, also of the cache.
        variant: The variant file.
        workload: The workload.
        options: More options.
    """
    command = [sys.executable, "-m", "tunebench", "tune", "--workload", workload, "--device", "cpu"]
    command += ["--variant-file", str(variant), "--sampler", "random", "--no-warm", "--no-baselines"]
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
    database: Path, workload: str, expected: Mapping[str, tuple[str, ...]], found: KernelFaults
) -> None:
    """Compare the recorded outcomes with the expected classes."""
    outcomes = {}
    with open_store(database, read_only=True) as store:
        for record in store.history(workload):
            if record.purpose == "search":  # the newest attempt is the last one
                outcomes[str(record.key.config["fault"])] = record.result.outcome
    found.repeated = sum(map(made_under_load, outcomes.values()))
    for name, kinds in expected.items():
        outcome = outcomes.get(name)
        if outcome is None:
            found.wrong.append(f"{name}: no outcome was recorded")
            continue
        found.outcomes[name] = (outcome.kind, getattr(outcome, "reason", ""))
        slower = kinds == ("measured",) and outcome.kind == "aborted"  # correct, but clearly slower
        late = outcome.kind == "timed_out" and made_under_load(outcome)
        if outcome.kind not in kinds and not slower and not late:
            found.wrong.append(f"{name}: {outcome}"[:500])


def _check_rerun(
    first: Mapping[str, Any], second: Mapping[str, Any], count: int, found: KernelFaults
) -> None:
    """Check that the second run knew all outcomes, but for time-outs that were made under load."""
    repeated = sum(second["trials"].values())
    if second["cached"] < count - repeated or set(second["trials"]) - {"timed_out", "compile_failed"}:
        found.wrong.append(f"the second run knew {second['cached']} of {count}, and tried {second['trials']}")
    if repeated and not first["trials"].get("timed_out") and not first["trials"].get("compile_failed"):
        found.wrong.append(f"the second run tried {second['trials']} without a reason")


def _children_s() -> float:
    times = os.times()
    return times.children_user + times.children_system
