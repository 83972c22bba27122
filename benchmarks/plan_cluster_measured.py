"""Plans of a small GPT run by processes: losses, memory against the verdict, and times against predictions.

    python -m benchmarks.plan_cluster_measured [--parts PART …] [--steps 10] [--out FILE]

The processes are those of this machine, one thread each, which connect by Gloo (`plan_cluster_run`). Nothing
runs on a GPU. Progress is on the standard error.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from benchmarks.plan_cluster_gpt import one_process_losses
from benchmarks.plan_cluster_processor import calibrate, predicted_us
from benchmarks.plan_cluster_run import Measuring, losses_of, run_plan
from tunebench.training.cluster import ClusterPlan, EagerMemory, TrainingJob
from tunebench.workloads.networks import from_config

__all__ = ["JOB", "main", "plan_of"]

NETWORK = from_config(
    "gpt-small",
    {
        "model_type": "gpt2",
        "n_layer": 8,
        "n_embd": 256,
        "n_head": 8,
        "n_positions": 128,
        "vocab_size": 1024,
        "resid_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "tie_word_embeddings": False,
    },
)
JOB = TrainingJob(
    network=NETWORK, batch=16, seq=128, dtype="f32", gradient_overlap=False, tensor_overlap=False
)

STEPS = 5
"""Timed steps of a plan in each round."""

DEFAULTS = {
    "tensor": "1",
    "pipeline": "1",
    "data": "1",
    "chunks": "1",
    "microbatch": "2",
    "recompute": "none",
    "flash": "no",
    "sharding": "none",
    "states": "device",
}


def plan_of(text: str) -> ClusterPlan:
    """Return a plan from the values that differ from one device, such as ``"tensor=2,data=2"``."""
    fields = DEFAULTS | dict(item.split("=") for item in text.split(","))
    numbers = {name: int(fields.pop(name)) for name in ("tensor", "pipeline", "data", "chunks", "microbatch")}
    flash = fields.pop("flash") == "yes"
    return ClusterPlan(nodes=1, sequence_parallel=False, flash=flash, **numbers, **fields)  # type: ignore[arg-type]


PLANS = (
    "data=4",
    "tensor=4",
    "pipeline=4",
    "data=4,sharding=full",
    "tensor=2,data=2,sharding=full,recompute=full,states=host",
    "tensor=2,pipeline=2,recompute=selective,microbatch=4",
    "tensor=2,pipeline=2,flash=yes,states=nvme",
    "pipeline=2,data=2,sharding=optimizer,recompute=full,states=nvme",
    "pipeline=2,data=2,chunks=2,sharding=optimizer",
    "tensor=2,pipeline=2,data=2",
    "tensor=2,pipeline=2,data=2,sharding=optimizer,recompute=full,states=nvme",
    "tensor=2,pipeline=2,data=2,recompute=selective,states=host",
    "pipeline=2,data=4,microbatch=1,flash=yes,sharding=optimizer",
    "data=8,sharding=full,recompute=full",
)
"""Plans whose losses and memory are checked, as values that differ from one device."""


def progress(text: str) -> None:
    """Write a line of progress."""
    sys.stderr.write(f"{text}\n")


def result_table(steps: int) -> list[str]:
    """Return losses and memory of each plan."""
    rows, pricer = [], EagerMemory(JOB)
    for index, text in enumerate(PLANS):
        progress(f"losses and memory, plan {index + 1} of {len(PLANS)}: {text}")
        plan = plan_of(text)
        results = run_plan(JOB, plan, Measuring(steps=steps, memory=True))
        reference = one_process_losses(JOB, plan, steps)
        error = max(
            abs(loss / reference_loss - 1)
            for loss, reference_loss in zip(losses_of(results, plan), reference, strict=True)
        )
        verdicts = [pricer.of_rank(plan, result.stage) for result in results]
        worst = max(
            (
                verdict.total / result.peak_bytes - 1
                for verdict, result in zip(verdicts, results, strict=True)
            ),
            key=abs,
        )
        stored = [(result.host_bytes, result.nvme_bytes) for result in results]
        expected = [(verdict.host, verdict.nvme) for verdict in verdicts]
        outside = max(
            (abs(a - b) for pair in zip(stored, expected, strict=True) for a, b in zip(*pair, strict=True))
        )
        rows.append(
            f"{text} | {plan.devices} | {error:.1e} "
            f"| {max(result.peak_bytes for result in results) / 1e6:.2f} | "
            f"{max(verdict.total for verdict in verdicts) / 1e6:.2f} | {worst:+.1%} | "
            f"{max(host for host, _ in stored) / 1e6:.2f} | {max(nvme for _, nvme in stored) / 1e6:.2f} | "
            f"{outside}"
        )
        progress(rows[-1])
    return table(
        "plan | processes | largest relative error of a loss | largest peak by MemTracker, MB "
        "| largest verdict, MB | error of the verdict, largest of a rank | host memory of a rank, MB "
        "| file of a rank, MB | error of those two, bytes",
        rows,
    )


TIMED = (
    "data=8",
    "data=8,recompute=full",
    "data=8,sharding=optimizer",
    "data=8,sharding=full",
    "pipeline=2,data=4",
    "pipeline=4,data=2,microbatch=1",
    "pipeline=8,microbatch=1",
    "tensor=2,data=4",
    "tensor=2,pipeline=2,data=2",
    "tensor=4,data=2",
)
"""Plans whose times are compared, all on 8 processes."""


@dataclass(slots=True)
class Measured:
    """Steps of a plan.

    Attributes:
        steps_s: Time of each step, from the first process that starts to the last that ends.
        processor_s: Processor time of each step, of all processes.
        other_cores: Cores that other programs used, a mean for each round.
    """

    steps_s: list[float] = field(default_factory=list)
    processor_s: list[float] = field(default_factory=list)
    other_cores: list[float] = field(default_factory=list)

    def run(self, plan: ClusterPlan) -> None:
        """Add the steps of a round."""
        before, own_began_s, began = _busy_s(), _own_s(), time.monotonic()
        results = run_plan(JOB, plan, Measuring(steps=1, timed=STEPS))
        others_s = (_busy_s() - before) - (_own_s() - own_began_s)
        self.other_cores.append(others_s / (time.monotonic() - began))
        for spans in zip(*(result.spans for result in results), strict=True):
            self.steps_s.append(max(end for _, end in spans) - min(start for start, _ in spans))
        self.processor_s += map(sum, zip(*(result.processor_s for result in results), strict=True))


def _busy_s() -> float:
    """Return the seconds in which cores of this machine have worked, summed over cores (Linux)."""
    first = Path("/proc/stat").read_text(encoding="ascii").partition("\n")[0]
    user, nice, system, _, _, irq, softirq, *_ = map(int, first.split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    """Return the processor seconds of this process and of those that it started and that ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def time_table(rounds: int) -> list[str]:
    """Return the laws of this machine, and predicted and measured times of each plan."""
    laws = calibrate(progress)
    plans = [plan_of(text) for text in TIMED]
    predicted = [predicted_us(laws, JOB, plan) for plan in plans]
    measurements = [Measured() for _ in plans]
    for number in range(rounds):
        for text, plan, measured in zip(TIMED, plans, measurements, strict=True):
            progress(f"times, round {number + 1} of {rounds}: {text}")
            measured.run(plan)
    cores = os.cpu_count() or 1
    rows = [
        f"{text} | {1e3 * min(measurement.steps_s):.0f} | {1e3 * statistics.median(measurement.steps_s):.0f} "
        f"| {1e3 * min(measurement.processor_s) / cores:.0f} | {shared / 1e3:.0f} | {fixed / 1e3:.0f} "
        f"| {shared / 1e6 / min(measurement.steps_s):.2f} | {statistics.mean(measurement.other_cores):.2f}"
        for text, measurement, (fixed, shared) in zip(TIMED, measurements, predicted, strict=True)
    ]
    return [
        *table("probe | fixed, us | rate", list(laws.rows())),
        *table(
            "plan | shortest step, ms | median, ms | least processor time of all processes / cores, ms "
            "| predicted with shared cores, ms | predicted with a fixed share, ms "
            "| predicted with shared cores / shortest | cores used by other programs, mean",
            rows,
        ),
        *table(
            "Spearman's rank correlation of | shortest step | median | processor time",
            [
                f"{name} | "
                + " | ".join(f"{spearman(times, measures):.2f}" for measures in _measures(measurements))
                for name, times in (
                    ("predicted with shared cores", [shared for _, shared in predicted]),
                    ("predicted with a fixed share of a core", [fixed for fixed, _ in predicted]),
                )
            ],
        ),
    ]


def _measures(measurements: Sequence[Measured]) -> list[list[float]]:
    """Return the shortest step, the median and the least processor time of each plan."""
    return [
        [min(measurement.steps_s) for measurement in measurements],
        [statistics.median(measurement.steps_s) for measurement in measurements],
        [min(measurement.processor_s) for measurement in measurements],
    ]


def spearman(values: Sequence[float], compared: Sequence[float]) -> float:
    """Return the rank correlation of two lists without equal values."""
    ranks = [np.argsort(np.argsort(series)) for series in (values, compared)]
    return float(np.corrcoef(*ranks)[0, 1])


def table(header: str, rows: Sequence[str]) -> list[str]:
    """Return a table in Markdown."""
    return [f"| {header} |", "|" + "---|" * (header.count("|") + 1), *(f"| {row} |" for row in rows), ""]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the plans and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="steps whose losses count (default: 10)")
    parser.add_argument("--rounds", type=int, default=1, help="times that each plan is run (default: 1)")
    titles = ["Losses and memory", "Times"]
    parser.add_argument("--parts", nargs="+", choices=titles, default=titles, help="tables to make")
    parser.add_argument("--out", type=Path, help="file for the tables")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    makers: dict[str, Callable[[], list[str]]] = {
        "Losses and memory": lambda: result_table(options.steps),
        "Times": lambda: time_table(options.rounds),
    }
    lines = [line for title in options.parts for line in (f"## {title}", "", *makers[title]())]
    load = ", ".join(f"{load_average:.1f}" for load_average in os.getloadavg())
    lines += [f"Load of the machine at the end (1, 5, 15 minutes): {load}; {os.cpu_count()} cores.", ""]
    if options.out:
        options.out.write_text("\n".join(lines))
    else:
        sys.stdout.write("\n".join(lines))


if __name__ == "__main__":
    main()
