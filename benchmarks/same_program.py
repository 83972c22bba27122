"""Time of one program of torch as an answer over its time as a baseline; the two should be equal.

    python -m benchmarks.same_program [WORKLOAD ...] [--rounds 12]

As an answer, a program copies its result into the caller's array; as a baseline, it returns a new tensor. The
default workloads have small results, whose copy takes no notable time. Rounds alternate between the two, and
the ratio has a 95 % confidence interval over the rounds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tunebench.device import Device, find
from tunebench.kernels import variant
from tunebench.measure.comparison import compare
from tunebench.outcome import Measured
from tunebench.space import Config
from tunebench.task import Task
from tunebench.tuning.baseline_rounds import BaselineRounds, stage_for
from tunebench.tuning.plan import Plan
from tunebench.tuning.tunable import TuningTarget
from tunebench.tuning.workers import start_workers
from tunebench.workload import Workload
from tunebench.workloads import parse

WORKLOADS = (
    "conv2d:n=8,c=128,h=56,w=56,k=128,r=3,s=3,stride=1,pad=1,dtype=f32,layout=nhwc,groups=128,direction=wgrad",
    "conv2d:n=8,c=256,h=28,w=28,k=64,r=1,s=1,stride=1,pad=0,dtype=f32,layout=nhwc",
    "reduction:rows=4096,cols=1024,dtype=f32,expression=x,reduce=sum",
    "gemm:m=256,n=256,k=4096,dtype=f32",
)


def ratio_line(workload: Workload, device: Device, rounds: int) -> str:
    """Return the ratio of both times, with its interval."""
    chosen, plan = variant(f"{workload.operator}/library_cpu"), Plan()
    answers: list[tuple[float, ...]] = []
    caller = stage_for(device)().caller()
    baselines = BaselineRounds(workload, device, plan.protocol, caller, rounds=4)
    with start_workers(TuningTarget(device=device, runner="cpu"), plan) as workers, caller:
        for number in range(rounds):
            task = Task(
                variant=chosen,
                workload=workload,
                config=Config({"program": "torch"}),
                device=device,
                seed=number,
                thorough=True,
            )
            outcome = workers.submit(task).result().outcome
            if not isinstance(outcome, Measured):
                return f"{workload}: {outcome}"
            answers.append(outcome.samples_us)
            baselines.time()
    versus = compare([timed["torch"].samples_us for timed in baselines.rounds], answers)
    return f"{workload}: answer / baseline {versus.ratio:.3f} ({versus.low:.3f} to {versus.high:.3f})"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line per workload."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=WORKLOADS, help="workloads of torch")
    parser.add_argument("--rounds", type=int, default=12, help="rounds of both (default: 12)")
    chosen = parser.parse_args(arguments)
    for text in chosen.workloads:
        sys.stdout.write(ratio_line(parse(text), find("cpu"), chosen.rounds) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
