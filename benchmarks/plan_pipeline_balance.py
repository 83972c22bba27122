"""Balanced memory where it pays: a larger micro-batch that fits the memory of four ranks only with evictions.

    python -m benchmarks.plan_pipeline_balance [--rounds 20] [--out FILE]

The model stores the scores of attention, without flash attention. Its batch is divided into micro-batches of
one or of two sequences. The memory of each rank is limited to what balanced 1F1B is planned to need with two,
which 1F1B alone exceeds. Peaks are counted by storages in one step, without the batch.

The ranks are processes of this machine, one thread each, which connect by Gloo. A round runs one step of each
case, in turns; gains are medians and quartiles of the ratios within rounds. Processor time is the sum over
ranks, with the threads that send. Nothing runs on a GPU.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.plan_pipeline_measured import counted_peak, run_ranks, state_of
from tunebench.training import measure_pipeline, pipelined
from tunebench.training.pipeline.balance import balance
from tunebench.training.pipeline_runtime.runtime import PipelineRun
from tunebench.training.schedules import PipelineCosts, PipelineSchedule, one_f_one_b, simulate_pipeline

__all__ = ["main"]

RANKS, BATCH = 4, 32
WIDTH, HEADS, LENGTH, BLOCKS = 32, 4, 64, 2
SMALL, LARGE = 1, 2
"""Sequences of a micro-batch."""
SLOWDOWN = 0.5
"""Share by which the balanced schedule may be longer: times of a shared machine vary."""
CASES = ("small", "large", "large, balanced")


class Block(nn.Module):
    """A transformer layer that stores the scores of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inputs, self.outputs = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.feed = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU())
        self.forth = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, length, width)."""
        heads = self.inputs(self.norm(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        query, key, value = heads
        scores = (query @ key.transpose(-1, -2) * (WIDTH // HEADS) ** -0.5).softmax(-1)
        x = x + self.outputs((scores @ value).transpose(1, 2).flatten(2))
        return x + self.forth(self.feed(x))


def _stage() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(BLOCKS)))


def rank_rows(rank: int, ranks: int, rounds: int) -> dict[str, Any]:
    """Return plans, peaks and times of each case on one rank."""
    torch.manual_seed(1)
    x = torch.randn(BATCH, LENGTH, WIDTH)
    inputs, target = [x] * (rank == 0), x if rank == ranks - 1 else None
    plans: dict[str, tuple[PipelineSchedule, PipelineCosts]] = {}
    for name, size in (("small", SMALL), ("large", LARGE)):
        plain = one_f_one_b(ranks, BATCH // size)
        run = pipelined(_stage(), plain, loss_fn=nn.functional.mse_loss, timeout_s=120)
        plans[name] = plain, measure_pipeline(run, *inputs, target=target, repeats=9)
    plain, costs = plans["large"]
    plans["large, balanced"] = balance(plain, costs, slowdown=SLOWDOWN), costs
    rows: dict[str, Any] = {}
    steps: dict[str, Callable[[], Any]] = {}
    for name, (schedule, costs) in plans.items():
        stage = _stage()
        run = pipelined(stage, schedule, loss_fn=nn.functional.mse_loss, costs=costs, timeout_s=120)
        steps[name] = step = functools.partial(run.step, *inputs, target=target)
        step()
        rows[name] = {
            "planned": simulate_pipeline(run.schedule, costs).peak_bytes,
            "measured": counted_peak([x, *state_of({rank: stage})], step) - x.nbytes,
            "evictions": _evictions(run),
            "spans": [],
            "processor_s": [],
        }
    for index in range(rounds):
        for name in (*CASES[index % 3 :], *CASES[: index % 3]):
            dist.barrier()
            began, processor_began = time.monotonic(), time.process_time()
            steps[name]()
            rows[name]["processor_s"].append(time.process_time() - processor_began)
            rows[name]["spans"].append((began, time.monotonic()))
    return rows


def _evictions(run: PipelineRun) -> int:
    return sum(str(action).startswith(f"{action.stage}EVICT") for action in run.schedule.actions[run.rank])


HEADER = (
    "sequences in a micro-batch | schedule | evictions | planned peak, MB | measured peak, MB | fits "
    "| processor time of a step, ms | time of a step, ms"
)


def table(results: Sequence[dict[str, Any]]) -> list[str]:
    """Return the table of all cases, and the gains, as lines."""
    limit = max(results[0]["large, balanced"]["planned"])
    lines = [f"| {HEADER} |", "|" + "---|" * (HEADER.count("|") + 1)]
    processor_s, wall_s = _seconds(results)
    for name in CASES:
        planned = max(results[0][name]["planned"])
        cells = (
            SMALL if name == "small" else LARGE,
            "1f1b balanced" if "balanced" in name else "1f1b",
            sum(rows[name]["evictions"] for rows in results),
            f"{planned / 1e6:.2f}",
            f"{max(rows[name]['measured'] for rows in results) / 1e6:.2f}",
            "yes" if planned <= limit else "no",
            f"{1e3 * statistics.median(processor_s[name]):.0f}",
            f"{1e3 * statistics.median(wall_s[name]):.0f}",
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += ["", f"Limit of each rank: {limit / 1e6:.2f} MB."]
    for label, seconds in (("processor time", processor_s), ("time", wall_s)):
        for other in ("small", "large"):
            ratios = [
                before / after
                for before, after in zip(seconds[other], seconds["large, balanced"], strict=True)
            ]
            low, middle, high = statistics.quantiles(ratios, n=4)
            lines.append(
                f"{label}, {other} over large balanced: {middle:.2f} (quartiles {low:.2f} to {high:.2f})"
            )
    return lines


def _seconds(results: Sequence[dict[str, Any]]) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the processor time of all ranks, and the time from the first start to the last end, per step."""
    processor_s, wall_s = {}, {}
    for name in CASES:
        processor_s[name] = [
            sum(step) for step in zip(*(rows[name]["processor_s"] for rows in results), strict=True)
        ]
        wall_s[name] = [
            max(end for _, end in step) - min(start for start, _ in step)
            for step in zip(*(rows[name]["spans"] for rows in results), strict=True)
        ]
    return processor_s, wall_s


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all cases and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="steps of each case (default: 20)")
    parser.add_argument("--out", type=Path, help="file for the table")
    options = parser.parse_args(arguments)
    results, _, _ = run_ranks(RANKS, lambda rank, ranks: rank_rows(rank, ranks, options.rounds))
    lines = table(results)
    print("\n".join(lines))
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
