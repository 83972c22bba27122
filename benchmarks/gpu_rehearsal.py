"""Rehearsal of the acceptance on a GPU: which headline figures come out with a fault in each step.

    python -m benchmarks.gpu_rehearsal [--out benchmarks/results/gpu_rehearsal.md]

No GPU is needed, and nothing is measured: the costs and the kernel times are assumed
(`tests/gpu/rehearsal.py`).
"""

from __future__ import annotations

import argparse
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.gpu.acceptance_workloads import HEADLINE
from tests.gpu.rehearsal import COST_S, SECONDS, SLOW_S, Fault, RunFigures, rehearse

KINDS = ("hang", "crash", "wrong", "slow")
PLACES = (
    ("conformance", "wgmma", "cases of wgmma"),
    ("wgmma", "gemm/cuda_wgmma", "gemm/cuda_wgmma"),
    ("wgmma", "wgmma", "every variant that uses wgmma"),
    ("headline", "gemm/cuda_wgmma", "gemm/cuda_wgmma"),
    ("headline", "wgmma", "every variant that uses wgmma"),
    ("headline", "torch", "torch"),
    ("headline", "triton", "Triton"),
    ("facts", "", "copy, product and references"),
    ("tune", "", "every program"),
    ("record", "", "every program"),
    ("sanitize", "", "every program"),
    ("", "wgmma", "every variant that uses wgmma, and its cases"),
    ("", "cuda", "every variant"),
)
"""Step (empty: every step), part of the names of the faulty programs, and the programs in words."""

REFUSED = (
    ("gemm", "every product"),
    ("wgmma", "every variant that uses wgmma"),
    ("numba_cuda", "every Numba-CUDA variant"),
    ("cuda", "every variant"),
)
"""Part of the names of the variants that the compilers of the machine refuse, and the variants in words."""

PAGE = """# Rehearsal of the acceptance on a GPU

Written by `python -m benchmarks.gpu_rehearsal`. **Not run on a GPU**: the runs and their child processes are
the real code, over a stand-in for the device and a fake clock. Run A may take {limits[A]:.0f} s, run B
{limits[B]:.0f} s, from the start of the process. Assumed costs:
{costs}.

Each row injects one fault into every use of the named programs in the named step. A headline figure came out
if a variant and a library were timed on the workload; there are {total}. "Replaced" counts figures of another
variant than the one predicted fastest, because that one failed. A hang lasts until its time limit. A slow
program takes {slow:.0f} s for each use. A refused variant is not compiled by that machine's compilers. Exit
status 4: nothing was measured.

| {header} |
|{rule}|
"""
HEADER = (
    "step",
    "fault",
    "programs",
    "figures after run A",
    "after run B",
    "replaced",
    "tuned",
    "wall time of runs A, B (s)",
    "exit status of A, B",
    "stopped after three hangs",
)


@dataclass(frozen=True, slots=True)
class Scenario:
    """Faults, as the table names them."""

    step: str
    fault: str
    programs: str
    faults: tuple[Fault, ...] = ()
    kills_s: tuple[tuple[str, float], ...] = ()
    carries: bool = True


def scenarios() -> Iterator[Scenario]:
    """Yield the rows of the table: no fault, a fault in each step, and killed runs."""
    yield Scenario("none", "none", "")
    for step, program, words in PLACES:
        for kind in KINDS:
            yield Scenario(step or "every step", kind, words, (Fault(step, kind, program),))
    for program, words in REFUSED:
        for carries in (True, False):
            which = "machine code is carried" if carries else "nothing is carried"
            fault = (Fault("", "refused", program),)
            yield Scenario("every step", "refused", f"{words}; {which}", fault, carries=carries)
    for run, second in (("A", 60.0), ("A", 200.0), ("A", 350.0), ("B", 100.0)):
        yield Scenario("none", f"run {run} is killed after {second:.0f} s", "", (), ((run, second),))


def row(scenario: Scenario, runs: Sequence[RunFigures]) -> str:
    """Return a row of the table."""
    stopped = sorted({key for run in runs for key in run.stopped})
    cells = [
        scenario.step,
        scenario.fault,
        scenario.programs,
        f"{runs[0].figures} of {len(HEADLINE)}",
        f"{runs[1].figures} of {len(HEADLINE)}",
        str(runs[1].replaced),
        str(runs[1].tuned),
        ", ".join(f"{run.wall_s:.0f}" for run in runs),
        ", ".join("killed" if run.status is None else str(run.status) for run in runs),
        ", ".join(f"`{key}`" for key in stopped),
    ]
    return f"| {' | '.join(cells)} |"


def rehearsed(scenario: Scenario) -> str:
    """Rehearse a scenario and return its row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        runs = rehearse(
            scenario.faults, Path(folder), kills_s=dict(scenario.kills_s), carries=scenario.carries
        )
    return row(scenario, runs)


def main() -> None:
    """Rehearse every scenario and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="file of the page (default: standard output only)")
    parser.add_argument("--workers", type=int, help="number of processes (default: one per core)")
    options = parser.parse_args()
    costs = ", ".join(f"{name} {seconds:g} s" for name, seconds in COST_S.items())
    costs = "\n".join(textwrap.wrap(costs, 110))
    table = {"header": " | ".join(HEADER), "rule": "---|" * (len(HEADER) - 1) + "---"}
    page = PAGE.format(costs=costs, limits=SECONDS, slow=SLOW_S, total=len(HEADLINE), **table)
    with ProcessPoolExecutor(options.workers) as pool:
        for line in pool.map(rehearsed, scenarios()):
            page += f"{line}\n"
            print(line, flush=True)
    if options.out:
        options.out.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
