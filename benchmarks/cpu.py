"""Speedup by tuning on this machine's CPU: the best configuration over default, median, NumPy and torch.

    python -m benchmarks.cpu [--trials 20] [--workload TEXT ...] [--db FILE] [--out FILE.json]
    python -m benchmarks.cpu --table FILE.json ...

The second form prints the results of some settings side by side. A setting is the environment of the first
form: `taskset -c 0` for one thread, and for AVX2 `OPENBLAS_CORETYPE=Haswell ATEN_CPU_CAPABILITY=avx2
ONEDNN_MAX_CPU_ISA=AVX2 NUMBA_CPU_NAME=haswell`.

The search is a random sample of the valid configurations. From the sample come the default's percentile and
the median. An aborted configuration counts with the faster of its two samples, which underestimates its time.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tunebench import tune
from tunebench.answer import lookup_workload
from tunebench.db.store import open_store
from tunebench.device import local_cpu
from tunebench.kernels import variant
from tunebench.outcome import Aborted, Measured
from tunebench.tuning import Plan, Report
from tunebench.workloads import parse

CONV = "conv2d:n=8,c=64,h=56,w=56,k=64,r=3,s=3,stride=1,pad=1,dtype=f32,layout=nhwc"
DEPTHWISE = "conv2d:n=8,c=128,h=56,w=56,k=128,r=3,s=3,stride=1,pad=1,dtype=f32,layout=nhwc,groups=128"
ATTENTION = "attention:batch=1,heads=12,seq_q=512,head_dim=64,dtype=f32"

WORKLOADS = (
    "gemm:m=1024,n=1024,k=1024,dtype=f32",
    "gemm:m=512,n=3072,k=768,dtype=f32,epilogue=bias+gelu",
    "gemm:m=512,n=768,k=3072,dtype=f32,epilogue=bias+silu+residual",
    "gated_gemm:m=512,n=2048,k=768,dtype=f32",
    CONV,
    f"{CONV},direction=dgrad",
    f"{CONV},direction=wgrad",
    f"{CONV},epilogue=scale+bias+residual+relu",
    "conv2d:n=8,c=256,h=28,w=28,k=64,r=1,s=1,stride=1,pad=0,dtype=f32,layout=nhwc",
    DEPTHWISE,
    f"{DEPTHWISE},direction=dgrad",
    f"{DEPTHWISE},direction=wgrad",
    "softmax:rows=4096,cols=1024,dtype=f32",
    "softmax:rows=4096,cols=1024,dtype=f32,prologue=scale+mask",
    "softmax:rows=4096,cols=1024,dtype=f32,log=true",
    "softmax:rows=4096,cols=1024,dtype=f32,direction=backward",
    "cross_entropy:rows=512,cols=32000,dtype=f32",
    "cross_entropy:rows=512,cols=32000,dtype=f32,direction=backward",
    "layernorm:rows=4096,cols=1024,dtype=f32",
    "layernorm:rows=4096,cols=1024,dtype=f32,prologue=bias+residual",
    "layernorm:rows=4096,cols=1024,dtype=f32,direction=backward",
    "rmsnorm:rows=4096,cols=1024,dtype=f32",
    "rmsnorm:rows=4096,cols=1024,dtype=f32,direction=backward",
    ATTENTION,
    f"{ATTENTION},causal=true",
    f"{ATTENTION},causal=true,direction=backward",
    "attention:batch=4,heads=32,seq_q=1,head_dim=128,dtype=f32,seq_k=4096,heads_k=8",
    "elementwise:rows=4096,cols=1024,dtype=f32,expression=gelu(x+bias)*y+z,vectors=bias",
)
"""Workloads by default: every operator and direction, at sizes of small networks."""


def sample(workload: str, db: Path) -> dict[str, float]:
    """Return the time of each configuration of the search in microseconds, by configuration.

    Args:
        workload: Workload as text.
        db: Database of the search.
    """
    times: dict[str, float] = {}
    with open_store(db, read_only=True) as store:
        for entry in store.history(workload, local_cpu().key):
            outcome = entry.result.outcome
            if entry.purpose == "search" and isinstance(outcome, Measured | Aborted):
                key = str(entry.key.config)
                times[key] = outcome.median_us if isinstance(outcome, Measured) else min(outcome.samples_us)
    return times


def figures(report: Report, db: Path) -> dict[str, Any]:
    """Return one row of the table.

    Args:
        report: Result of tuning one workload.
        db: Database of the search.
    """
    assert report.variant is not None, report
    assert report.median_us is not None, report
    times = sample(report.workload, db)
    default = str(variant(report.variant).default(parse(report.workload), local_cpu()))
    faster = sum(us < times[default] for us in times.values())
    ordered = sorted(times.values())
    empty = db.with_name("none.db")
    untuned = lookup_workload(parse(report.workload), device="cpu", db=empty, quiet=True)
    libraries = {b.name: b.median_us / report.median_us for b in report.baselines}
    return {
        "workload": report.workload,
        "variant": report.variant,
        "untuned_us": times.get(str(untuned.config)),
        "predicted_us": untuned.expected_us,
        "config": str(report.config),
        "best_us": report.median_us,
        "ci_us": report.ci_us,
        "default_us": report.default_us,
        "speedup_over_default": report.default_us / report.median_us if report.default_us else None,
        "default_percentile": 100 * faster / len(times),
        "speedup_over_median": ordered[len(ordered) // 2] / report.median_us,
        "speedup_over": libraries,
        "bound_us": report.bound_us,
        "violations": [str(violation) for violation in report.violations],
        "trials": dict(report.trials),
        "seconds": dict(report.seconds),
    }


def table(files: Sequence[Path]) -> Iterator[str]:
    """Yield the lines of a Markdown table of some settings, whose names are those of their files.

    A cell has the variant that `lookup` answers with, its time, and that of the fastest library over it.
    """
    settings = {file.stem: json.loads(file.read_text())["rows"] for file in files}
    yield f"| workload | {' | '.join(settings)} |"
    yield f"|---|{'---|' * len(settings)}"
    rows_of = {name: {row["workload"]: row for row in rows} for name, rows in settings.items()}
    for workload in next(iter(rows_of.values())):
        cells = []
        for rows in rows_of.values():
            row = rows.get(workload)
            if row is None:
                cells.append("")
                continue
            name = row["variant"].partition("/")[2]
            called = f"{name} {row['config'].partition('=')[2]}" if name == "library_cpu" else name
            versus = min(row["speedup_over"].values(), default=math.nan)
            cells.append(f"{called}, {row['best_us'] / 1e3:.2f} ms, {versus:.2f}")
        yield f"| `{workload}` | {' | '.join(cells)} |"


def main() -> None:
    """Tune each workload, and print and save its row at once."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=20, help="trials per workload, default 20")
    parser.add_argument(
        "--workload", action="append", help="workload instead of the default ones; repeatable"
    )
    parser.add_argument("--db", type=Path, default=Path(tempfile.mkdtemp()) / "cpu.db")
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    parser.add_argument("--table", type=Path, nargs="+", help="print a table of results that were saved")
    options = parser.parse_args()
    if options.table:
        print("\n".join(table(options.table)))
        return
    rows = []
    for workload in options.workload or WORKLOADS:
        report = tune(
            workload, device="cpu", db=options.db, plan=Plan(trials=options.trials, sampler="random")
        )
        if report.interrupted:  # its results are kept; a signal ends the whole benchmark
            sys.exit(130)
        rows.append(figures(report, options.db))
        print(json.dumps(rows[-1]), flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps({"device": local_cpu().key, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
