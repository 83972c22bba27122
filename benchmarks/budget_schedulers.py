"""What giving trials where they save most is worth, against equal shares and shares by time.

    python -m benchmarks.budget_schedulers [replay] [--seeds 10] [--first 0] [--models 60] [--out traces.jsonl]
                                   [--data DIR]
    python -m benchmarks.budget_schedulers cpu [--trials 50] [--seed 0]

`replay`: problems are parts of recorded spaces, models draw 6 to 12 of them, each with a weight by which its
optimum takes 1 to 30 parts of the model's time. Every way of sharing a budget out sees the same searches.
Told is the model's time in the end as a ratio to that of equal shares: the geometric mean over models and
seeds with its 95 % interval (by bootstrap over seeds), the middle 80 % of the ratios, and how many lose more
than 1 %.

    equal       every problem has as many trials, one after the other
    by time     first rounds as below; then shares in proportion to the model's time after these
    saving      as `tunebench.tune_suite` does
    hindsight   the best there is, of whoever knows all traces beforehand: no rule can reach it

Courses are kept as they are made, and the same command goes on from there, also after Ctrl-C.

`cpu`: a few problems on this machine's processor, tuned by `tune_suite` and with equal shares, each in a
fresh database; what both serve is then timed in turn. Exit status: 0, 6 if recordings are missing, 130 after
Ctrl-C.
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

from benchmarks.replay_traces import SearchTrace, Subspace, TraceFile
from benchmarks.sampler_replays import Data
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

DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "recorded"
"""Where recordings are by default: beside the checkout."""

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
"""188 to 4,489 configurations each; some can be searched to their end, and four have no bound."""

BUDGETS = (5, 10, 20, 40, 80)
"""Trials for each problem, on average."""

SIZES = (6, 12)
"""Problems of a model: at least, and at most."""

WEIGHTS = 30.0
"""The largest part of a model's time over the smallest, at the optimum."""

RESAMPLES = 10_000

SUITE = {
    "gemm:m=256,n=512,k=256,dtype=f32": 12,
    "gemm:m=256,n=256,k=512,dtype=f32": 12,
    "layernorm:rows=256,cols=256,dtype=f32": 24,
    "softmax:rows=1024,cols=256,dtype=f32": 12,
    "rmsnorm:rows=64,cols=256,dtype=f32": 1,
}
"""What is tuned on the processor: some of a small transformer's problems, and one that hardly matters."""


@dataclass(frozen=True, slots=True)
class Model:
    """Problems, by their place in a list, and how often each is run."""

    problems: tuple[int, ...]
    counts: tuple[int, ...]

    def time_us(self, traces: Sequence[SearchTrace], trials: Sequence[int]) -> float:
        """Return what it takes after so many trials of each problem."""
        each = zip(self.counts, traces, trials, strict=True)
        return sum(count * trace.time_us(made) for count, trace, made in each)


def draw(optima_us: Sequence[float], models: int) -> list[Model]:
    """Draw models of problems whose optima are given; the same ones every time."""
    rng, drawn = np.random.default_rng(0), []
    for _ in range(models):
        chosen = rng.choice(len(optima_us), int(rng.integers(SIZES[0], SIZES[1] + 1)), replace=False)
        weights = np.exp(rng.uniform(0.0, np.log(WEIGHTS), len(chosen)))
        times_us = np.array([optima_us[i] for i in chosen])
        counts = np.maximum(1, np.round(weights * times_us.max() / times_us)).astype(int)
        drawn.append(Model(tuple(chosen.tolist()), tuple(counts.tolist())))
    return drawn


# -- ways of sharing a budget out ----------------------------------------------------------------------------

Share = Callable[[Sequence[int], Sequence[SearchTrace], int], list[int]]
"""Returns the trials of each problem, from counts, traces and the budget."""


def _even(shares: Sequence[float], made: list[int], traces: Sequence[SearchTrace], left: int) -> list[int]:
    """Give what is left out trial by trial, to whoever is furthest behind its share."""
    since = list(made)
    for _ in range(left):
        able = [i for i, trace in enumerate(traces) if made[i] < len(trace)]
        if not able:
            break
        made[min(able, key=lambda i: (made[i] - since[i] + 1) / shares[i])] += 1
    return made


def equal(counts: Sequence[int], traces: Sequence[SearchTrace], total: int) -> list[int]:
    """Give every problem as much; what one cannot use goes to the others."""
    return _even([1.0] * len(traces), [0] * len(traces), traces, total)


def by_time(counts: Sequence[int], traces: Sequence[SearchTrace], total: int) -> list[int]:
    """Give first rounds, then shares by the model's time after these."""
    first = max(1, min(FIRST, int(FIRST_SHARE * total) // len(traces)))
    made = _even([1.0] * len(traces), [0] * len(traces), traces, min(total, first * len(traces)))
    shares = [count * trace.time_us(first) for count, trace in zip(counts, traces, strict=True)]
    return _even(shares, made, traces, total - sum(made))


def saving(counts: Sequence[int], traces: Sequence[SearchTrace], total: int) -> list[int]:
    """Give as `tune_suite` does; nobody sees further than the trials that were made."""
    accounts = {
        number: TaskState(count=count, expected_us=trace.median_us)
        for number, (count, trace) in enumerate(zip(counts, traces, strict=True))
    }
    allotment, left = BudgetScheduler(accounts, total), total
    while (turn := allotment.next(left)) is not None:
        number, trials = turn
        account, trace = accounts[number], traces[number]
        made = min(trials, len(trace) - account.trials)
        left -= made
        now = account.trials + made
        account.update(
            trials=now,
            best_us=trace.best_us[now - 1],
            floor_us=trace.floor_us[now - 1],
            closed=made < trials,
        )
    return [account.trials for account in accounts.values()]


def hindsight(counts: Sequence[int], traces: Sequence[SearchTrace], total: int) -> list[int]:
    """Give what turns out best, by dynamic programming over problems: every problem has a trial at least."""
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
    left, made = int(least_us.argmin()), []
    for choice in reversed(choices):
        made.append(int(choice[left]))
        left -= made[-1]
    return made[::-1]


WAYS: Mapping[str, Share] = {"by time": by_time, "saving": saving, "hindsight": hindsight}


# -- what is told --------------------------------------------------------------------------------------------


def ratios(
    models: Sequence[Model], traces: Sequence[Sequence[SearchTrace]], each: int
) -> tuple[dict[str, Array], Array]:
    """Return times over that of equal shares by way, `(seeds, models)`, and that over the optimum.

    Args:
        models: The models.
        traces: Of every problem, by seed.
        each: Trials for each problem, on average.
    """
    found: dict[str, Array] = {way: np.ones((len(traces), len(models))) for way in WAYS}
    off = np.ones((len(traces), len(models)))
    for seed, made in enumerate(traces):
        for number, model in enumerate(models):
            own, total = [made[i] for i in model.problems], each * len(model.problems)
            equal_us = model.time_us(own, equal(model.counts, own, total))
            pairs = zip(model.counts, own, strict=True)
            off[seed, number] = equal_us / sum(count * trace.optimum_us for count, trace in pairs)
            for way, share in WAYS.items():
                found[way][seed, number] = model.time_us(own, share(model.counts, own, total)) / equal_us
    return found, off


def geometric(values: Array) -> float:
    """Return the geometric mean."""
    return float(np.exp(np.log(values).mean()))


def interval(values: Array) -> tuple[float, float]:
    """Return the 95 % interval of the geometric mean of `(seeds, models)` values, by bootstrap over seeds."""
    drawn = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.exp(np.percentile(np.log(values).mean(axis=1)[drawn].mean(axis=1), (2.5, 97.5)))
    return float(low), float(high)


def table(models: Sequence[Model], traces: Sequence[Sequence[SearchTrace]]) -> str:
    """Return the ratios of all ways at all budgets, as a table."""
    head = ("trials a problem", "equal / optimum", "way", "time / equal", "95 %", "middle 80 %", "lose > 1 %")
    rows = [head, ("---",) * len(head)]
    for each in BUDGETS:
        found, off = ratios(models, traces, each)
        for way, values in found.items():
            low, high = interval(values)
            middle = np.quantile(values, (0.1, 0.9))
            spread = f"{middle[0]:.3f} to {middle[1]:.3f}"
            rows.append(
                (
                    *(str(each), f"{geometric(off):.3f}", way, f"{geometric(values):.3f}"),
                    *(f"{low:.3f} to {high:.3f}", spread, f"{100 * (values > 1.01).mean():.0f} %"),
                )
            )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def replayed(asked: argparse.Namespace) -> int:
    """Make the traces that are missing, and print the table."""
    data = Data(asked.data)
    if absent := {one.space for one in SUBSPACES if not data.path(one.space).exists()}:
        print(
            f"no recording of {', '.join(sorted(absent))} in {asked.data}: --data names another",
            file=sys.stderr,
        )
        return 6
    traces, console = TraceFile(asked.out, data), Console(stderr=True)
    seeds = range(asked.first, asked.first + asked.seeds)
    todo = list(traces.missing(SUBSPACES, seeds))
    print(f"{len(todo)} of {len(SUBSPACES) * len(seeds)} searches to make", file=sys.stderr)
    try:
        for problem, seed in track(todo, "searching", console=console, disable=not console.is_terminal):
            traces.get(problem, seed)
    except KeyboardInterrupt:
        return 130
    made = [[traces.get(one, seed) for one in SUBSPACES] for seed in seeds]
    models = draw([trace.optimum_us for trace in made[0]], asked.models)
    print(f"{len(models)} models, {len(made)} seeds\n\n{table(models, made)}")
    return 0


# -- on this processor ---------------------------------------------------------------------------------------

TURNS = 8
"""How often what was found is timed again."""

Times = dict[str, list[float]]
"""What each problem took in each turn, by its text."""


def measured(trials: int, seed: int) -> str:
    """Tune the suite both ways, time what both serve in turn, and return that as a table."""
    plan = Plan(trials=trials, seed=seed, baselines=False)
    alike = dataclasses.replace(plan, trials=trials // len(SUITE))
    with tempfile.TemporaryDirectory() as folder:
        dbs = [Path(folder) / f"{way}.db" for way in ("equal", "saving")]
        for report in tune_all(map(parse, SUITE), device="cpu", db=dbs[0], plan=alike):
            print(f"equal: {report.workload} {sum(report.trials.values())} trials", file=sys.stderr)
        found = tune_suite(SUITE, device="cpu", db=dbs[1], plan=plan)
        given = {part.workload: part.trials for part in found.parts}
        print(f"saving: {given}", file=sys.stderr)
        return _compared(given, *_in_turn(dbs, seed))


def _in_turn(dbs: Sequence[Path], seed: int) -> tuple[Times, ...]:
    """Time what each database serves of each problem, one after the other, every second turn backwards."""
    times_us: tuple[Times, ...] = tuple({text: [] for text in SUITE} for _ in dbs)
    with start_workers(tuning_target("cpu"), Plan(seed=seed)) as executor:
        for turn in range(TURNS):
            for text in SUITE:
                for one in range(len(dbs))[:: 1 if turn % 2 == 0 else -1]:
                    outcome = executor.submit(_served(text, dbs[one])).result().outcome
                    times_us[one][text].append(time_us(outcome) or np.nan)
    return times_us


def _served(text: str, db: Path) -> Task:
    problem = parse(text)
    answer = recorded(problem, device="cpu", db=db)
    assert answer is not None
    return Task(
        variant=variant(answer.variant),
        workload=problem,
        config=answer.config,
        device=local_cpu(),
        thorough=True,
    )


def _compared(given: Mapping[str, int], equal_us: Times, saving_us: Times) -> str:
    rows = [("problem", "runs", "trials", "equal, us", "saving, us", "ratio"), ("---",) * 6]
    for text, count in SUITE.items():
        one, other = np.array(equal_us[text]), np.array(saving_us[text])
        cells = (f"{np.median(one):.1f}", f"{np.median(other):.1f}", f"{np.median(other / one):.3f}")
        rows.append((text, str(count), str(given[text]), *cells))
    models = [sum(SUITE[text] * np.array(us) for text, us in way.items()) for way in (equal_us, saving_us)]
    each = models[1] / models[0]
    cells = (*(f"{np.median(model):.0f}" for model in models), f"{np.median(each):.3f}")
    rows.append(("all", "", str(sum(given.values())), *cells))
    lines = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"{lines}\n\nall, in each of {TURNS} turns: {each.min():.3f} to {each.max():.3f}"


def main(arguments: list[str] | None = None) -> int:
    """Print the figures that are asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", nargs="?", choices=("replay", "cpu"), default="replay")
    parser.add_argument("--seeds", type=int, default=10, help="searches of each problem")
    parser.add_argument("--first", type=int, default=0, help="the first seed of them")
    parser.add_argument("--models", type=int, default=60, help="models that are drawn")
    parser.add_argument("--out", type=Path, default=Path("traces.jsonl"), help="where traces are kept")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of recordings")
    parser.add_argument("--trials", type=int, default=50, help="cpu: the budget")
    parser.add_argument("--seed", type=int, default=0, help="cpu: of the searches")
    asked = parser.parse_args(arguments)
    if asked.part == "cpu":
        print(measured(asked.trials, asked.seed))
        return 0
    return replayed(asked)


if __name__ == "__main__":
    sys.exit(main())
