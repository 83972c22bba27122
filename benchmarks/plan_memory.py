"""Time and optimality gap of plans that fit a training step into less memory.

    python -m benchmarks.plan_memory [--seeds 500] [--states 30000]

Chains of equal operations, random steps against exhaustive search, long chains with and without a link to the
host, and steps as large as those of known models. All steps are synthetic.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections import Counter
from collections.abc import Sequence

from benchmarks.plan_memory_reference import (
    TooManyStates,
    chain_operations,
    chain_step,
    fastest_us,
    random_step,
)
from benchmarks.plan_memory_steps import residual_step, transformer_step
from tunebench.training.memory import (
    HostLink,
    PlanEffort,
    TrainingStep,
    exact_schedule,
    greedy_schedules,
    least_bytes,
    lower_bound_us,
    memory_curve,
    plan_memory,
    relaxed_bound_us,
    simulate,
    unplanned,
)

__all__ = ["CHAINS", "greedy_us", "random_budget"]

CHAINS = {
    4: (9, 8),
    6: (18, 14, 13, 12),
    8: (31, 21, 19, 18, 17, 16),
    10: (48, 29, 25, 24, 23, 22, 21, 20),
}
"""Least number of operations of a chain of that many forward operations, for budgets of 4 tensors and
more."""


def random_budget(step: TrainingStep, seed: int) -> int:
    """Return a budget between the largest operation and just below the peak without a plan."""
    low, high = least_bytes(step), simulate(step, unplanned(step)).peak_bytes
    unit = math.gcd(*(tensor.size_bytes for tensor in step.tensors))
    least = -(-low // unit)
    return random.Random(seed).randint(least, max(least, (high - unit) // unit)) * unit


def greedy_us(step: TrainingStep, budget_bytes: int, rounds: int) -> float:
    """Return the time of the best schedule of the greedy search; infinite without one."""
    times = [
        simulate(step, schedule, budget_bytes=budget_bytes).step_us
        for schedule in greedy_schedules(step, budget_bytes, rounds=rounds)
    ]
    return times[-1] if times else math.inf


def chains() -> None:
    """Print least operations, those of the greedy search, and the lower bound of chains."""
    print("| n | budget | expected least | integer program | greedy | lower bound | solver CPU s |")
    print("|---|---|---|---|---|---|---|")
    for count, expected in CHAINS.items():
        step = chain_step(count)
        for budget, least in enumerate(expected, 4):
            start = time.process_time()
            result = exact_schedule(step, budget)
            spent_s = time.process_time() - start
            assert result.schedule is not None
            best_us = simulate(step, result.schedule, budget_bytes=budget).step_us
            greedy, lower = greedy_us(step, budget, 20), lower_bound_us(step, budget)
            print(
                f"| {count} | {budget} | {least} | {best_us:g} | {greedy:g} | {lower:.0f} | {spent_s:.2f} |",
                flush=True,
            )


def random_steps(seeds: int, states: int) -> None:
    """Print how plans of random steps compare with exhaustive search and with lower bounds."""
    counts: Counter[str] = Counter()
    greedy_gaps, bound_gaps, relaxed_gaps = [], [], []
    start = time.process_time()
    for seed in range(seeds):
        step = random_step(seed)
        budget = random_budget(step, seed)
        result = exact_schedule(step, budget)
        if result.schedule is None or not result.optimal:
            counts["not solved"] += 1
            continue
        best = simulate(step, result.schedule, budget_bytes=budget).step_us
        counts["solved"] += 1
        if simulate(step, unplanned(step)).peak_bytes <= budget:
            counts["needs no plan"] += 1
        else:
            counts[_searched(step, budget, best, states)] += 1
        bound = max(lower_bound_us(step, budget), relaxed_bound_us(step, budget))
        counts["below a bound"] += best < bound - 1e-6
        greedy_gaps.append(greedy_us(step, budget, 20) / best - 1)
        bound_gaps.append(1 - bound / best)
        relaxed_gaps.append(1 - exact_schedule(step, budget, relaxed=True).lower_us / best)
    print(f"\n{seeds} random steps, {time.process_time() - start:.0f} s of CPU time: {dict(counts)}")
    for name, gaps in (("greedy", greedy_gaps), ("bound", bound_gaps), ("relaxation", relaxed_gaps)):
        above = sum(gap > 1e-9 for gap in gaps)
        print(f"{name}: gap mean {sum(gaps) / len(gaps):.2%}, worst {max(gaps):.2%}, above 0 in {above}")


def longer_chains() -> None:
    """Print how far the greedy search is from the least operations of chains without a link."""
    budgets = (4, 5, 6, 7, 8, 10, 12, 16)
    print("\n| n | " + " | ".join(f"budget {budget}" for budget in budgets) + " |")
    print("|---|" + "---|" * len(budgets))
    for count in (20, 30, 40):
        cells = []
        for budget in budgets:
            least = chain_operations(count, budget)
            over = greedy_us(chain_step(count), budget, 20) / least - 1
            bound = lower_bound_us(chain_step(count), budget)
            stages = (6, 12, 24, 48, 80)
            relaxed = max(relaxed_bound_us(chain_step(count), budget, stages=number) for number in stages)
            cells.append(f"{least:g} (+{over:.1%}, -{1 - max(bound, relaxed) / least:.1%})")
        print(f"| {count} | " + " | ".join(cells) + " |", flush=True)


def _searched(step: TrainingStep, budget_bytes: int, best_us: float, states: int) -> str:
    """Return whether an exhaustive search found a faster schedule."""
    try:
        faster = fastest_us(step, budget_bytes, best_us - 1e-6, most_states=states)
    except TooManyStates:
        return "search stopped"
    return "confirmed by search" if faster is None else "faster by search"


def long_chains() -> None:
    """Print time, gap and CPU time of plans of long chains."""
    print("\n| n | budget | link | overhead | gap | CPU s |")
    print("|---|---|---|---|---|---|")
    link = HostLink(to_host_gb_s=0.5e-3, to_device_gb_s=0.5e-3)  # a copy takes as long as two operations
    for count, budget in ((100, 20), (100, 50), (500, 50), (500, 250), (1000, 100), (1000, 500)):
        for name, step in (("none", chain_step(count)), ("2 us", chain_step(count, link=link))):
            start = time.process_time()
            plan = plan_memory(step, budget, effort=PlanEffort(rounds=2))
            over = plan.simulation.step_us / step.compute_us - 1
            spent_s = time.process_time() - start
            print(
                f"| {count} | {budget} | {name} | {over:.1%} | {plan.gap:.1%} | {spent_s:.1f} |", flush=True
            )


def large_steps() -> None:
    """Print time, gap and CPU time of plans of synthetic steps as large as GPT-2 XL and ResNet-1202."""
    print("\n| step | operations | budget GB | overhead | gap | CPU s |")
    print("|---|---|---|---|---|---|")
    for name, step in (("GPT-2 XL", transformer_step()), ("ResNet-1202", residual_step())):
        low, peak = least_bytes(step), simulate(step, unplanned(step)).peak_bytes
        for part in (0.6, 0.4, 0.2):
            budget = int(part * peak)
            start = time.process_time()
            plan = plan_memory(step, budget)
            spent_s = time.process_time() - start
            over = plan.simulation.step_us / step.compute_us - 1
            row = f"| {name} | {len(step.operations)} | {budget / 1e9:.2f} of {peak / 1e9:.2f}"
            print(f"{row} | {over:.1%} | {plan.gap:.1%} | {spent_s:.1f} |", flush=True)
        start = time.process_time()
        memory_curve(step, [low + (peak - low) * tenth // 10 for tenth in range(1, 11)])
        spent_s = time.process_time() - start
        print(f"| {name} | {len(step.operations)} | curve of 10 | | | {spent_s:.1f} |", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seeds", type=int, default=500, help="number of random steps (default: %(default)s)"
    )
    parser.add_argument(
        "--states",
        type=int,
        default=30_000,
        help="most states of each exhaustive search (default: %(default)s)",
    )
    chosen = parser.parse_args(arguments)
    chains()
    random_steps(chosen.seeds, chosen.states)
    longer_chains()
    long_chains()
    large_steps()


if __name__ == "__main__":
    main()
