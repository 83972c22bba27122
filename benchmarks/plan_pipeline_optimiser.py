"""Optimised pipeline schedules against named schedules, lower bounds and an integer program.

    python -m benchmarks.plan_pipeline_optimiser [--problems 200] [--exact 100] [--limit-s 3]

Problems are random: times, sizes, memory limits and links. Times are those of the simulation, on no GPU.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

from tunebench.training.pipeline import OptimisedSchedule, optimise_schedule
from tunebench.training.pipeline.exact_order import exact_order
from tunebench.training.pipeline.order_bound import available_bytes, stream_graph
from tunebench.training.schedules import (
    Interconnect,
    LinearTransfer,
    PipelineCosts,
    StageCosts,
    looped_placement,
    v_placement,
)

RESULT = Path(__file__).parent / "results" / "plan_pipeline" / "optimiser.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A pipeline to schedule.

    Attributes:
        placement: Rank of each stage.
        microbatches: Number of micro-batches.
        costs: Costs of the stages, and links.
        memory_bytes: Memory of each rank.
        split: Whether gradients of the weights may run apart.
    """

    placement: tuple[int, ...]
    microbatches: int
    costs: PipelineCosts
    memory_bytes: int | None
    split: bool

    def optimised(self, limit_s: float, *, exact: bool = True) -> OptimisedSchedule:
        """Return the best schedule found."""
        return optimise_schedule(
            self.placement,
            self.microbatches,
            self.costs,
            self.memory_bytes,
            self.split,
            limit_s,
            exact=exact,
        )


def random_problem(seed: int, *, small: bool) -> Problem:
    """Return a random problem.

    Args:
        seed: Its seed.
        small: Whether it has at most 4 ranks with one stage each, at most 6 micro-batches and instant links.
    """
    rng = random.Random(seed)
    ranks = rng.randint(2, 4 if small else 8)
    placement = looped_placement(ranks)
    if not small:
        placement = rng.choice([placement, looped_placement(ranks, 2), v_placement(ranks)])
    spread = rng.choice([0.0, 0.2, 0.8])  # of the times of stages
    forward, gradient, weight = (rng.uniform(50, 150) for _ in range(3))
    links = not small and rng.random() < 0.5

    def around(value: float) -> float:
        return value * (1 + spread * rng.uniform(-1, 1))

    stages = []
    for _ in placement:
        activation = round(around(1000))
        parts = around(gradient), around(weight)
        stages.append(
            StageCosts(
                forward_us=around(forward),
                input_gradient_us=parts[0],
                weight_gradient_us=parts[1],
                activation_bytes=activation,
                retained_bytes=round(activation * rng.choice([1.0, 0.6])),
                send_bytes=100 if links else 0,
                static_bytes=round(around(2000)),
            )
        )
    interconnect = None
    if links:
        # A transfer takes 1 % to 30 % of a forward pass inside a node, and up to four times that between.
        inside_us = forward * rng.uniform(0.01, 0.3)
        interconnect = Interconnect.grouped(
            ranks,
            rng.choice([2, 4, 8]),
            LinearTransfer(bytes_per_us=100 / inside_us),
            LinearTransfer(bytes_per_us=100 / (inside_us * rng.uniform(1, 4))),
        )
    costs = PipelineCosts(stages=tuple(stages), interconnect=interconnect)
    memory_bytes = None
    if rng.random() < 0.6:
        chunks = len(placement) // ranks
        in_flight = rng.uniform(1.5, ranks + 1)
        memory_bytes = max(costs.static_bytes(placement)) + round(in_flight * chunks * 1800)
    return Problem(
        placement=placement,
        microbatches=rng.randint(2, 6) if small else rng.randint(ranks, 4 * ranks),
        costs=costs,
        memory_bytes=memory_bytes,
        split=rng.random() < 0.7,
    )


def integer_optimum_us(problem: Problem) -> float | None:
    """Return the optimum of the integer program, which starts from no schedule; None if it was not solved."""
    whole_us = sum(
        stage.forward_us + stage.input_gradient_us + stage.weight_gradient_us
        for stage in problem.costs.stages
    )
    memory_bytes = problem.memory_bytes
    graph = stream_graph(
        problem.placement,
        problem.microbatches,
        problem.costs,
        memory_bytes=memory_bytes,
        split_backward=problem.split,
    )
    available = None
    if memory_bytes is not None:
        available = available_bytes(problem.placement, problem.costs, memory_bytes)
    # Doubled until there is a schedule: a tight limit makes the program easy.
    limit_us = 1.05 * graph.lower_bound_us()
    while limit_us < 2 * whole_us * problem.microbatches:
        optimum = exact_order(
            graph, problem.placement, problem.costs, limit_us=limit_us, limit_s=120.0, available=available
        )
        if not optimum.solved:
            return None
        if optimum.actions is not None:
            return optimum.lower_us
        limit_us *= 1.2
    raise AssertionError("one micro-batch after the other is a schedule")


def exact_lines(count: int) -> Iterable[str]:
    """Compare the optimiser with the integer program on small problems, and return lines of the report."""
    solved = equal = searched = bounded = 0
    for seed in range(count):
        problem = random_problem(seed, small=True)
        optimum_us = integer_optimum_us(problem)
        if optimum_us is None:
            continue
        solved += 1
        both = [problem.optimised(60.0, exact=exact) for exact in (True, False)]
        steps = [optimised.simulation.step_us for optimised in both]
        assert min(steps) >= optimum_us * (1 - 1e-6), f"seed {seed}: {steps} beat the optimum {optimum_us}"
        equal += steps[0] <= optimum_us * (1 + 1e-6)
        searched += steps[1] <= optimum_us * (1 + 1e-6)
        bounded += both[1].lower_bound_us >= optimum_us * (1 - 1e-6)
    yield f"| random problems | {count} |"
    yield f"| integer program solved to optimality | {solved} |"
    yield f"| optimiser equals the optimum | {equal} |"
    yield f"| optimiser without its integer program equals the optimum | {searched} |"
    yield f"| lower bound without the integer program equals the optimum | {bounded} |"


def summary(schedules: Sequence[OptimisedSchedule]) -> str:
    """Return one row: problems, named schedules that fit, gains over them, gaps."""
    gains = [
        1 - schedule.simulation.step_us / schedule.best_named_us
        for schedule in schedules
        if schedule.best_named_us < inf
    ]
    gaps = [schedule.gap for schedule in schedules]
    columns = [
        f"{len(schedules)}",
        f"{len(gains)}",
        f"{sum(gain < 0 for gain in gains)}",
        f"{sum(gains) / max(len(gains), 1):.2%}",
        f"{max(gains, default=0):.2%}",
        f"{sum(gap == 0 for gap in gaps)}",
        f"{sum(gaps) / max(len(gaps), 1):.2%}",
        f"{max(gaps, default=0):.2%}",
    ]
    return " | ".join(columns)


def random_lines(count: int, limit_s: float) -> Iterable[str]:
    """Optimise random problems and return lines of the report."""
    optimised = []
    took_s = []
    for seed in range(1000, 1000 + count):
        problem = random_problem(seed, small=False)
        begin = time.perf_counter()
        optimised.append((problem, problem.optimised(limit_s)))
        took_s.append(time.perf_counter() - begin)
    groups = {
        "all": optimised,
        "without a memory limit": [pair for pair in optimised if pair[0].memory_bytes is None],
        "with a memory limit": [pair for pair in optimised if pair[0].memory_bytes is not None],
        "instant links": [pair for pair in optimised if pair[0].costs.interconnect is None],
        "links": [pair for pair in optimised if pair[0].costs.interconnect is not None],
        "split backward passes": [pair for pair in optimised if pair[0].split],
        "whole backward passes": [pair for pair in optimised if not pair[0].split],
    }
    for name, members in groups.items():
        yield f"| {name} | {summary([pair[1] for pair in members])} |"
    yield ""
    yield f"Time of a search: {sum(took_s) / len(took_s):.1f} s in the mean, {max(took_s):.1f} s at most."


def main() -> None:
    """Write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--problems", type=int, default=200, help="random problems, default 200")
    parser.add_argument("--exact", type=int, default=100, help="small problems, default 100")
    parser.add_argument("--limit-s", type=float, default=3.0, help="time limit of a search in s, default 3")
    options = parser.parse_args()
    random_problem(0, small=False).optimised(60.0)  # compiles
    command = (
        "python -m benchmarks.plan_pipeline_optimiser "
        f"--problems {options.problems} --exact {options.exact} --limit-s {options.limit_s:g}"
    )
    lines = [
        "# Optimised pipeline schedules",
        "",
        f"`{command}`, on 2 shared CPU cores. Times are simulated; nothing is run on a GPU.",
        "",
        f"## {options.exact} small problems against an integer program",
        "",
        "2 to 4 ranks with one stage each, 2 to 6 micro-batches, instant links, random times and memory "
        "limits. The integer program of the comparison starts from no schedule. Equal means to 1e-6.",
        "",
        "| | problems |",
        "|---|---|",
        *exact_lines(options.exact),
        "",
        f"## {options.problems} problems against named schedules and the lower bound",
        "",
        "2 to 8 ranks with one stage, two stages in a loop or two in a V; 1 to 4 micro-batches per rank; "
        "times of stages that differ by up to 80 %; memory for 1.5 micro-batches up to more than the ranks; "
        "transfers of 1 % to 120 % of a forward pass. The named schedule is the fastest one with the same "
        "placement that fits the memory, and whose backward passes are whole where the problem does "
        "not split them. Gain: time of the step saved. Gap: time of the step over its lower bound, as a "
        "share of the bound.",
        "",
        "| problems | number | a named schedule fits | slower than it | mean gain | largest gain | gap is 0 "
        "| mean gap | largest gap |",
        "|---|---|---|---|---|---|---|---|---|",
        *random_lines(options.problems, options.limit_s),
        "",
    ]
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text("\n".join(lines), encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
