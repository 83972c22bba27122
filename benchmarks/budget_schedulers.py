"""Budget scheduling for a suite: time saved compared with equal shares and with shares by time.

    python -m benchmarks.budget_schedulers [replay] [--seeds 10] [--first 0] [--models 60] [--data DIR]
                                           [--out traces.jsonl]
    python -m benchmarks.budget_schedulers cpu [--trials 50] [--seed 0]

`replay`: workloads are parts of recorded spaces. A model draws 6 to 12 of them, each with a weight by which
its optimum takes 1 to 30 parts of the model's time. All rules see the same searches. The table shows the
final time of the model divided by that after equal shares: the geometric mean over models and seeds, its 95 %
interval (bootstrap over seeds), the middle 80 % of the ratios, and the fraction of models that are more than
1 % slower.

    equal       every workload gets the same number of trials
    by time     first rounds as below; then shares proportional to the model's time after them
    saving      the rule of `tunebench.tune_suite`
    hindsight   the best shares with knowledge of all searches: a limit that no rule can reach

Each search is saved when it ends. After Ctrl-C, the same command runs the missing searches only.

`cpu`: a few workloads on the CPU of this machine, tuned by `tune_suite` and with equal shares, each in a
fresh database. The recorded configurations of both are then measured alternately. Exit status: 0; 6 if
recorded spaces are missing; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.progress import track

from benchmarks import sampler_replays
from benchmarks.replay_traces import SearchTrace, Subspace, TraceFile
from benchmarks.sampler_replays import DATA, Data, markdown
from tunebench import Plan, parse, tune_all, tune_suite
from tunebench.answer import recorded
from tunebench.device import local_cpu
from tunebench.kernels import variant
from tunebench.outcome import time_us
from tunebench.task import Task
from tunebench.tuning.budget_scheduler import FIRST, FIRST_SHARE, BudgetScheduler, TaskState
from tunebench.tuning.tunable import tuning_target
from tunebench.tuning.workers import start_workers

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

SUBSPACES = (
    *(
        Subspace(space=f"gemm/{device}", fixed=(("SA", a), ("SB", b)))
        for device in ("RTX_2080_Ti", "RTX_3090")
        for a in (0, 1)
        for b in (0, 1)
    ),
    *(
        Subspace(space=f"convolution/{device}", fixed=fixed)
        for device in ("RTX_2080_Ti", "RTX_3060_laptop")
        for fixed in (
            (("use_padding", 0),),
            (("use_padding", 1),),
            (("block_size_x", 16), ("read_only", 1), ("use_padding", 0)),
            (("block_size_x", 64), ("read_only", 1), ("use_padding", 0)),
        )
    ),
    *(Subspace(space="convolution_milo/A100", fixed=(("use_shmem", value),)) for value in (0, 1)),
    *(
        Subspace(space="dedispersion_milo/A100", fixed=(("tile_stride_x", x), ("tile_stride_y", y)))
        for x in (0, 1)
        for y in (0, 1)
    ),
)
"""Workloads of the replay.

They have 188 to 4,489 configurations each. Some can be searched completely, and four have no lower bound.
"""

BUDGETS = (5, 10, 20, 40, 80)
"""Mean numbers of trials per workload."""

SIZES = (6, 12)
"""Smallest and largest number of workloads of a model."""

WEIGHTS = 30.0
"""Largest over smallest share of a workload in the model's time, at the optimum."""

SUITE = {
    "gemm:m=256,n=512,k=256,dtype=f32": 12,
    "gemm:m=256,n=256,k=512,dtype=f32": 12,
    "layernorm:rows=256,cols=256,dtype=f32": 24,
    "softmax:rows=1024,cols=256,dtype=f32": 12,
    "rmsnorm:rows=64,cols=256,dtype=f32": 1,
}
"""Workloads tuned on the CPU, with their call counts: part of a small transformer, and a rare workload."""


@dataclass(frozen=True, slots=True)
class Model:
    """Workloads of a model, as indices into a list, and the number of calls of each."""

    workloads: tuple[int, ...]
    counts: tuple[int, ...]

    def time_us(self, traces: Sequence[SearchTrace], trials: Sequence[int]) -> float:
        """Return the time of the model after tuning, in microseconds.

        Args:
            traces: Search of each workload of the model.
            trials: Trials spent on each workload.
        """
        per_workload = zip(self.counts, traces, trials, strict=True)
        return sum(count * trace.time_us(spent) for count, trace, spent in per_workload)


def draw(optima_us: Sequence[float], models: int) -> list[Model]:
    """Draw random models, the same in every run.

    Args:
        optima_us: Fastest time of each workload, in microseconds.
        models: Number of models.
    """
    rng, drawn = np.random.default_rng(0), []
    for _ in range(models):
        chosen = rng.choice(len(optima_us), int(rng.integers(SIZES[0], SIZES[1] + 1)), replace=False)
        weights = np.exp(rng.uniform(0.0, np.log(WEIGHTS), len(chosen)))
        times_us = np.array([optima_us[i] for i in chosen])
        counts = np.maximum(1, np.round(weights * times_us.max() / times_us)).astype(int)
        drawn.append(Model(tuple(chosen.tolist()), tuple(counts.tolist())))
    return drawn


# -- rules that divide a budget ------------------------------------------------------------------------------

Share = Callable[[Sequence[int], Sequence[SearchTrace], int], list[int]]
"""A rule: the trials of each workload, from the numbers of calls, the searches and the total budget."""


def _even(
    shares: Sequence[float], spent: list[int], traces: Sequence[SearchTrace], trials_left: int
) -> list[int]:
    """Distribute the remaining trials one by one, each to the workload furthest below its share.

    Args:
        shares: Share of each workload; only ratios matter.
        spent: Trials of each workload so far; changed in place.
        traces: Search of each workload, which limits its trials.
        trials_left: Trials to distribute.
    """
    since = list(spent)
    for _ in range(trials_left):
        able = [i for i, trace in enumerate(traces) if spent[i] < len(trace)]
        if not able:
            break
        spent[min(able, key=lambda i: (spent[i] - since[i] + 1) / shares[i])] += 1
    return spent


def equal(counts: Sequence[int], traces: Sequence[SearchTrace], total: int) -> list[int]:
    """Give every workload the same number of trials; trials that one cannot use go to the others."""
    return _even([1.0] * len(traces), [0] * len(traces), traces, total)


def by_time(counts: Sequence[int], traces: Sequence[SearchTrace], total: int) -> list[int]:
    """Give first rounds, then shares proportional to the model's time after them."""
    first = max(1, min(FIRST, int(FIRST_SHARE * total) // len(traces)))
    spent = _even([1.0] * len(traces), [0] * len(traces), traces, min(total, first * len(traces)))
    shares = [count * trace.time_us(first) for count, trace in zip(counts, traces, strict=True)]
    return _even(shares, spent, traces, total - sum(spent))


def saving(counts: Sequence[int], traces: Sequence[SearchTrace], total: int) -> list[int]:
    """Divide the budget as `tune_suite` does, which sees only the trials made so far."""
    accounts = {
        number: TaskState(count=count, expected_us=trace.median_us)
        for number, (count, trace) in enumerate(zip(counts, traces, strict=True))
    }
    allotment, trials_left = BudgetScheduler(accounts, total), total
    while (turn := allotment.next(trials_left)) is not None:
        number, trials = turn
        account, trace = accounts[number], traces[number]
        spent = min(trials, len(trace) - account.trials)
        trials_left -= spent
        now = account.trials + spent
        account.update(
            trials=now,
            best_us=trace.best_us[now - 1],
            floor_us=trace.floor_us[now - 1],
            closed=spent < trials,
        )
    return [account.trials for account in accounts.values()]


def hindsight(counts: Sequence[int], traces: Sequence[SearchTrace], total: int) -> list[int]:
    """Return the best possible shares with at least one trial each, by dynamic programming over workloads."""
    least_us: Array = np.where(np.arange(total + 1) == 0, 0.0, np.inf)
    choices = []
    for count, trace in zip(counts, traces, strict=True):
        after_us, choice = np.full(total + 1, np.inf), np.zeros(total + 1, dtype=int)
        for trials in range(1, min(len(trace), total) + 1):
            candidate = least_us[: total + 1 - trials] + count * trace.time_us(trials)
            better = candidate < after_us[trials:]
            after_us[trials:][better], choice[trials:][better] = candidate[better], trials
        least_us = after_us
        choices.append(choice)
    trials_left, spent = int(least_us.argmin()), []
    for choice in reversed(choices):
        spent.append(int(choice[trials_left]))
        trials_left -= spent[-1]
    return spent[::-1]


WAYS: Mapping[str, Share] = {"by time": by_time, "saving": saving, "hindsight": hindsight}


# -- report --------------------------------------------------------------------------------------------------


def ratios(
    models: Sequence[Model], traces: Sequence[Sequence[SearchTrace]], each: int
) -> tuple[dict[str, Array], Array]:
    """Return the final times of all models under each rule.

    Args:
        models: The models.
        traces: Search of every workload, by seed.
        each: Mean number of trials per workload.

    Returns:
        By rule, the time divided by that after equal shares, `(seeds, models)`; and the time after equal
        shares divided by the optimum, `(seeds, models)`.
    """
    time_ratios: dict[str, Array] = {way: np.ones((len(traces), len(models))) for way in WAYS}
    off = np.ones((len(traces), len(models)))
    for seed, of_seed in enumerate(traces):
        for number, model in enumerate(models):
            model_traces, total = [of_seed[i] for i in model.workloads], each * len(model.workloads)
            equal_us = model.time_us(model_traces, equal(model.counts, model_traces, total))
            pairs = zip(model.counts, model_traces, strict=True)
            off[seed, number] = equal_us / sum(count * trace.optimum_us for count, trace in pairs)
            for way, share in WAYS.items():
                time_ratios[way][seed, number] = (
                    model.time_us(model_traces, share(model.counts, model_traces, total)) / equal_us
                )
    return time_ratios, off


def geometric(values: Array) -> float:
    """Return the geometric mean."""
    return float(np.exp(np.log(values).mean()))


def interval(values: Array) -> tuple[float, float]:
    """Return the 95 % interval of the geometric mean of `(seeds, models)` values, by bootstrap over seeds."""
    low, high = np.exp(sampler_replays.interval(np.log(values)))
    return float(low), float(high)


def table(models: Sequence[Model], traces: Sequence[Sequence[SearchTrace]]) -> str:
    """Return a Markdown table of the ratios for all rules and budgets."""
    head = (
        "trials per workload",
        "equal shares / optimum",
        "rule",
        "time / equal shares (lower is better)",
        "95 % interval",
        "middle 80 %",
        "models > 1 % slower",
    )
    rows = []
    for mean_trials in BUDGETS:
        time_ratios, off = ratios(models, traces, mean_trials)
        for way, values in time_ratios.items():
            low, high = interval(values)
            middle = np.quantile(values, (0.1, 0.9))
            spread = f"{middle[0]:.3f} to {middle[1]:.3f}"
            rows.append(
                (
                    *(str(mean_trials), f"{geometric(off):.3f}", way, f"{geometric(values):.3f}"),
                    *(f"{low:.3f} to {high:.3f}", spread, f"{100 * (values > 1.01).mean():.0f} %"),
                )
            )
    return markdown(head, rows)


def replayed(options: argparse.Namespace) -> int:
    """Run the missing searches and print the table; return the exit status."""
    data = Data(options.data)
    if not data.has_all(part.space for part in SUBSPACES):
        return 6
    traces, console = TraceFile(options.out, data), Console(stderr=True)
    seeds = range(options.first, options.first + options.seeds)
    todo = list(traces.missing(SUBSPACES, seeds))
    print(f"{len(todo)} of {len(SUBSPACES) * len(seeds)} searches to run", file=sys.stderr)
    try:
        for subspace, seed in track(todo, "searching", console=console, disable=not console.is_terminal):
            traces.get(subspace, seed)
    except KeyboardInterrupt:
        return 130
    traces_by_seed = [[traces.get(part, seed) for part in SUBSPACES] for seed in seeds]
    models = draw([trace.optimum_us for trace in traces_by_seed[0]], options.models)
    print(f"{len(models)} models, {len(traces_by_seed)} seeds\n\n{table(models, traces_by_seed)}")
    return 0


# -- on this machine's CPU -----------------------------------------------------------------------------------

TURNS = 8
"""Number of times the recorded configurations are measured again."""

Times = dict[str, list[float]]
"""Times of each workload in microseconds, one per turn, by the workload's text."""


def measured(trials: int, seed: int) -> str:
    """Tune the suite under both rules, measure the results alternately, and return a Markdown table.

    Args:
        trials: Total budget of each rule.
        seed: Seed of the searches.
    """
    plan = Plan(trials=trials, seed=seed, baselines=False)
    alike = dataclasses.replace(plan, trials=trials // len(SUITE))
    with tempfile.TemporaryDirectory() as folder:
        dbs = [Path(folder) / f"{way}.db" for way in ("equal", "saving")]
        for report in tune_all(map(parse, SUITE), device="cpu", db=dbs[0], plan=alike):
            print(f"equal: {report.workload} {sum(report.trials.values())} trials", file=sys.stderr)
        summary = tune_suite(SUITE, device="cpu", db=dbs[1], plan=plan)
        trials_of = {part.workload: part.trials for part in summary.results}
        print(f"saving: {trials_of}", file=sys.stderr)
        return _compared(trials_of, *_in_turn(dbs, seed))


def _in_turn(dbs: Sequence[Path], seed: int) -> tuple[Times, ...]:
    """Measure the answers of all databases alternately for each workload; every second turn is reversed."""
    times_us: tuple[Times, ...] = tuple({text: [] for text in SUITE} for _ in dbs)
    with start_workers(tuning_target("cpu"), Plan(seed=seed)) as executor:
        for turn in range(TURNS):
            for text in SUITE:
                for index in range(len(dbs))[:: 1 if turn % 2 == 0 else -1]:
                    outcome = executor.submit(_served(text, dbs[index])).result().outcome
                    times_us[index][text].append(time_us(outcome) or np.nan)
    return times_us


def _served(text: str, db: Path) -> Task:
    workload = parse(text)
    answer = recorded(workload, device="cpu", db=db)
    assert answer is not None
    return Task(
        variant=variant(answer.variant),
        workload=workload,
        config=answer.config,
        device=local_cpu(),
        thorough=True,
    )


def _compared(trials_of: Mapping[str, int], equal_us: Times, saving_us: Times) -> str:
    head = ("workload", "calls", "trials", "equal, us", "saving, us", "saving / equal")
    rows = []
    for text, count in SUITE.items():
        equal_times, saving_times = np.array(equal_us[text]), np.array(saving_us[text])
        cells = (
            f"{np.median(equal_times):.1f}",
            f"{np.median(saving_times):.1f}",
            f"{np.median(saving_times / equal_times):.3f}",
        )
        rows.append((text, str(count), str(trials_of[text]), *cells))
    models = [sum(SUITE[text] * np.array(us) for text, us in way.items()) for way in (equal_us, saving_us)]
    model_ratios = models[1] / models[0]
    cells = (*(f"{np.median(model):.0f}" for model in models), f"{np.median(model_ratios):.3f}")
    rows.append(("all", "", str(sum(trials_of.values())), *cells))
    turns = (
        f"ratio of all workloads in the {TURNS} turns: {model_ratios.min():.3f} to {model_ratios.max():.3f}"
    )
    return f"{markdown(head, rows)}\n\n{turns}"


def main(arguments: list[str] | None = None) -> int:
    """Run one part of the benchmark and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", nargs="?", choices=("replay", "cpu"), default="replay")
    parser.add_argument("--seeds", type=int, default=10, help="searches per workload, default 10")
    parser.add_argument("--first", type=int, default=0, help="first seed, default 0")
    parser.add_argument("--models", type=int, default=60, help="number of random models, default 60")
    parser.add_argument(
        "--out", type=Path, default=Path("traces.jsonl"), help="file of the searches, default traces.jsonl"
    )
    parser.add_argument("--data", type=Path, default=DATA, help="folder of recorded spaces")
    parser.add_argument("--trials", type=int, default=50, help="cpu: total budget in trials, default 50")
    parser.add_argument("--seed", type=int, default=0, help="cpu: seed of the searches, default 0")
    options = parser.parse_args(arguments)
    if options.part == "cpu":
        print(measured(options.trials, options.seed))
        return 0
    return replayed(options)


if __name__ == "__main__":
    sys.exit(main())
