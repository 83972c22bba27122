"""Predicted and measured time of planned training steps on this processor, over eager torch.

    python -m benchmarks.plan_overhead [--model lstm] [--budget 80%] [--rounds 15] [--out FILE]
    python -m benchmarks.plan_overhead --second-process [--model lstm] [--out FILE]

Each model runs with budgets of 80, 60 and 40 % of the peak of its traced step, and without one ("100 %"), by
one thread. Eager and planned steps alternate; the measured overhead is the median over rounds of the ratio of
their processor times. `fit` predicts it from the times of operations (`FittedStep.predicted_overhead`), and
from a few whole planned steps (`FittedStep.overhead`). The table takes about six minutes.

Memory that is freed is not returned to the system, because the cost of getting it again depends on the order
of both kinds of steps.

With ``--second-process``, the table is that of the first step of two processes with a budget of 80 %: one
with an empty cache folder, and one that finds the times and the plan of the first.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.fit_models import MODELS as CLASSIFIERS
from benchmarks.fit_models import Loss
from benchmarks.table import write_table
from benchmarks.torch_models import DenseNet, MobileNetV2, WaveNet
from tunebench.errors import InputError
from tunebench.training import fit, fitted_steps
from tunebench.training.memory import PlanEffort

__all__ = ["BUDGETS", "MODELS", "overheads"]

BUDGETS = ("100%", "80%", "60%", "40%")


class _Mean(nn.Module):
    """A model whose loss is the mean square of its first result."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        result = self.model(x)
        return (result if isinstance(result, Tensor) else result[0]).square().mean()


def _classifier(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    model, *data = CLASSIFIERS[name]()
    return Loss(model), tuple(data)


def _regression(model: nn.Module, *shape: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return _Mean(model), (torch.randn(shape),)


def _perceptron() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(192, 192), nn.GELU())))


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    **{name: lambda name=name: _classifier(name) for name in CLASSIFIERS},  # type: ignore[misc]
    "mobilenet": lambda: _regression(MobileNetV2(), 2, 3, 96, 96),
    "densenet": lambda: _regression(DenseNet((3, 3, 3), 12, 24, 10), 4, 3, 64, 64),
    "wavenet": lambda: _regression(WaveNet(32, 10, 16), 4, 16, 1000),
    "lstm": lambda: _regression(nn.LSTM(128, 128, 2, batch_first=True), 16, 32, 128),
    "gru": lambda: _regression(nn.GRU(128, 128, 2, batch_first=True), 16, 32, 128),
    "perceptron": lambda: _regression(_perceptron(), 2048, 192),
}
"""Ten models with their losses, and their inputs."""


def _processor_s(run: Callable[..., Tensor], model: nn.Module, data: tuple[Tensor, ...]) -> float:
    model.zero_grad()
    began = time.process_time()
    run(*data).backward()
    return time.process_time() - began


def overheads(name: str, budget: str, rounds: int) -> dict[str, float] | str:
    """Return the overheads of a model within a budget, or why there is no plan.

    Args:
        name: Name of the model.
        budget: Budget of its step.
        rounds: Number of steps of each kind.
    """
    torch.manual_seed(0)
    model, data = MODELS[name]()
    fitted: Any = fit(model, budget, effort=PlanEffort(rounds=2))
    try:
        _processor_s(fitted, model, data)
    except InputError as error:
        return str(error)
    (step,) = fitted_steps(fitted)
    pairs = [[_processor_s(run, model, data) for run in (model, fitted)] for _ in range(rounds)]
    ratios = [planned / eager for eager, planned in pairs]
    quarters = statistics.quantiles(ratios, n=4)
    return {
        "eager_ms": 1e3 * statistics.median(eager for eager, _ in pairs),
        "predicted": step.predicted_overhead,
        "fitted": step.overhead,
        "measured": statistics.median(ratios) - 1,
        "low": quarters[0] - 1,
        "high": quarters[2] - 1,
    }


def _row(name: str, budget: str, result: dict[str, float] | str) -> str:
    if isinstance(result, str):
        least = result.partition("; ")[2].partition(". ")[0]
        return f"| {name} | {budget} | | {least} | | | | |"
    points = [100 * abs(result[kind] - result["measured"]) for kind in ("predicted", "fitted")]
    quartiles = f"{result['low']:+.1%} to {result['high']:+.1%}"
    return (
        f"| {name} | {budget} | {result['eager_ms']:.1f} | {result['predicted']:+.1%} "
        f"| {result['fitted']:+.1%} | {result['measured']:+.1%} ({quartiles}) "
        f"| {points[0]:.1f} | {points[1]:.1f} |"
    )


def _print_first_step(name: str) -> None:
    """Print the processor time and the wall time of the first step of this process as JSON, in seconds."""
    torch.manual_seed(0)
    model, data = MODELS[name]()
    fitted: Any = fit(model, "80%")
    began = time.perf_counter()
    processor_s = _processor_s(fitted, model, data)
    (step,) = fitted_steps(fitted)
    print(json.dumps([processor_s, time.perf_counter() - began, step.remembered]))


def _process_rows(names: Iterable[str]) -> Iterator[str]:
    """Return the rows of the first steps of two processes with one cache folder."""
    for name in names:
        steps = []
        with tempfile.TemporaryDirectory() as folder:
            for _ in range(2):
                command = [sys.executable, "-m", "benchmarks.plan_overhead", "--first-step", name]
                environment = {**os.environ, "TUNEBENCH_CACHE": folder}
                done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
                if done.returncode:
                    raise RuntimeError(done.stderr)
                steps.append(json.loads(done.stdout.splitlines()[-1]))
        (cold_s, cold_wall_s, cold_known), (warm_s, warm_wall_s, warm_known) = steps
        if (cold_known, warm_known) != (False, True):
            raise RuntimeError(
                f"only the second process must find a plan of {name}, found by the first: {cold_known}, "
                f"by the second: {warm_known}. Run it again without changes of the source files"
            )
        yield (
            f"| {name} | {cold_s:.1f} | {warm_s:.1f} | {cold_s / warm_s:.1f} "
            f"| {cold_wall_s:.1f} | {warm_wall_s:.1f} |"
        )


_REMEMBERED = ("resnet", "gpt2", "mobilenet", "densenet", "lstm")
"""Models of the table of two processes."""

_KEEPS_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}
"""Settings of glibc, which it reads at the start of a process."""


def main() -> None:
    """Run the command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, action="append", help="models (default: all)")
    parser.add_argument("--budget", choices=BUDGETS, action="append", help="budgets (default: all)")
    parser.add_argument("--rounds", type=int, default=15, help="steps of each kind (default: 15)")
    parser.add_argument("--out", type=Path, help="file for the table")
    parser.add_argument(
        "--second-process", action="store_true", help="times of the first step in two processes instead"
    )
    parser.add_argument("--first-step", choices=MODELS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not _KEEPS_MEMORY.items() <= os.environ.items():
        command = [sys.executable, "-m", "benchmarks.plan_overhead", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **_KEEPS_MEMORY})
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if arguments.first_step:
        _print_first_step(arguments.first_step)
        return
    if arguments.second_process:
        header = (
            "| model | first process, processor s | second process, processor s "
            "| first over second (higher is better) | first, wall s | second, wall s |\n"
            "|---|---|---|---|---|---|"
        )
        write_table(header, _process_rows(arguments.model or _REMEMBERED), arguments.out)
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TUNEBENCH_CACHE"] = folder  # operations are timed now
        header = (
            "| model | budget | eager, ms | overhead from operations | from whole steps (`overhead`) "
            "| measured (quartiles) | points apart, operations | points apart, whole steps |\n"
            "|---|---|---|---|---|---|---|---|"
        )
        rows = _rows(arguments.model or MODELS, arguments.budget or BUDGETS, arguments.rounds)
        write_table(header, rows, arguments.out)


def _rows(names: Iterable[str], budgets: Iterable[str], rounds: int) -> Iterator[str]:
    for name in names:
        for budget in budgets:
            yield _row(name, budget, overheads(name, budget, rounds))


if __name__ == "__main__":
    main()
