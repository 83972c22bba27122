"""Times of 12 models' steps by eager torch, torch.compile and tunebench, and their compile times.

    python -m benchmarks.measured_models [--model ViT-B/16] [--step training] [--untuned] [--rounds 20]
    python -m benchmarks.measured_models --tune 10
    python -m benchmarks.measured_models --device cuda

The implementations alternate: on this CPU in f32 with batches of 1, or with `--device cuda` in f16 (batch
normalisations in f32) at published sizes. Groups of operations run by kernels where the database has those
as faster (`--db`; without it, an empty one). Their results are compared with torch's first.

torch.compile and tunebench compile each step in a process with empty caches on disk, and again in a process
that finds them filled: *compiled in* and *with caches on disk*, both with the first step. Times of steps are
those of another process, which starts with the caches of tunebench.

With `--tune MINUTES`, the workloads of each step are tuned first, as a user would: those of the plan, and of
groups that may be faster once measured.

With `--untuned`, kernels run all groups that they can, by their default configurations, in one process and
without torch.compile.

Needs torchvision and transformers. Writes a Markdown table, row by row.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

import tunebench.torch as served
from benchmarks.architecture_models import MEASURED
from benchmarks.models import without_chance
from benchmarks.table import write_table
from tunebench.device import find
from tunebench.graph import extract, plan_partition
from tunebench.torch.compiler.capture import differentiable_results, in_training_mode
from tunebench.tuning import Plan, tune_suite
from tunebench.workload import Workload

Result = TypeVar("Result")

SEED = 7
STEPS = ("inference", "training")
WAYS = ("eager", "torch.compile", "tunebench")
HEAD = (
    "| model | step | eager | torch.compile | tunebench | eager / tunebench | torch.compile / tunebench "
    "| compiled by torch.compile in | by tunebench | with caches on disk | tunebench "
    "| groups for kernels | run by kernels | slowest kernel / torch |\n" + "|---" * 14 + "|"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step of a model to time.

    Attributes:
        name: Name of the model.
        device: ``cpu`` or ``cuda``.
        kind: ``inference``, or ``training``: forward and backward.
        untuned: Whether to run kernels that were not measured.
        benchmark: Whether graphs race against torch.compile at their first call, instead of the second.
        threads: Threads of a CPU; 0 for torch's default.
        tune_minutes: Time for tuning its workloads first; 0 for none.
    """

    name: str
    device: str
    kind: str
    untuned: bool
    benchmark: bool
    threads: int
    tune_minutes: float

    def tune(self) -> None:
        """Tune the workloads of the step, into the database of the environment."""
        warnings.simplefilter("ignore")
        case, device = MEASURED[self.device][self.name], find("cpu" if self.device == "cpu" else None)
        graphs = extract(
            lambda: without_chance(case.make()),
            case.specs(),
            training=self.kind == "training",
            device=device,
        )
        plans = [plan_partition(graph, device) for graph in graphs]
        counts = sum((plan.workloads + plan.alternative_workloads for plan in plans), Counter[str]())
        suite: dict[Workload | str, int] = dict(counts.items())
        summary = tune_suite(suite, device=device, plan=Plan(trials=1_000_000, minutes=self.tune_minutes))
        winners = Counter(result.report.variant for result in summary.results if result.report)
        print(
            f"{self.name}, {self.kind}: {len(counts)} workloads, "
            f"{sum(result.trials for result in summary.results)} trials, best: {dict(winners)}",
            file=sys.stderr,
            flush=True,
        )
        if summary.interrupted:
            sys.exit(130)

    def compile_seconds(self, way: str) -> float:
        """Compile the step in this process, and return the seconds with those of the first step."""
        model, inputs = self._prepared()
        training = self.kind == "training"
        with in_training_mode(model, training=training), torch.set_grad_enabled(training):
            began = time.perf_counter()
            compiled = (
                torch.compile(model, dynamic=False) if way == "torch.compile" else served.compile(model)
            )
            results = compiled(*inputs)
            if training:
                outputs = differentiable_results(results)
                torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
            if self.device == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter() - began

    def times(self, rounds: int, *, torch_compile: bool = True) -> served.ModelTimes:
        """Time the step in this process."""
        model, inputs = self._prepared()
        with served.prefer("tunebench" if self.untuned else "faster"):
            return served.time_model(
                model,
                *inputs,
                rounds=rounds,
                training=self.kind == "training",
                torch_compile=torch_compile,
                benchmark=self.benchmark or None,
            )

    def _prepared(self) -> tuple[nn.Module, list[torch.Tensor]]:
        """Return the model and its inputs on the device."""
        warnings.simplefilter("ignore")
        logging.disable(logging.ERROR)
        if self.threads:
            torch.set_num_threads(self.threads)
        case = MEASURED[self.device][self.name]
        torch.manual_seed(SEED)
        model, inputs = without_chance(case.make()), case.data()
        if any(spec.channels_last for spec in case.specs()):
            model = model.to(memory_format=torch.channels_last)
            inputs = [
                tensor.to(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor
                for tensor in inputs
            ]
        if self.device == "cuda":
            model, inputs = model.half().cuda(), [tensor.cuda() for tensor in inputs]
            for module in model.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.float()
        return model, inputs


def row(step: Step, rounds: int, database: Path | None) -> str:
    """Return the row of a step; without torch.compile if it runs kernels that were not measured."""
    with tempfile.TemporaryDirectory() as cache:
        if step.untuned:
            times = _in_process(step.times, cache, database, rounds, torch_compile=False)
            seconds = ["-", f"{times.first_s['tunebench']:.1f} s", "-", "-"]
        else:
            if step.tune_minutes:
                database = database or Path(cache, "tuned.db")
                _tune_in_process(step, cache, database)
            seconds = [
                f"{_in_process(step.compile_seconds, f'{cache}/{way}', database, way):.1f} s"
                for _ in range(2)  # the first time, caches are empty
                for way in WAYS[1:]
            ]
            times = _in_process(step.times, f"{cache}/tunebench", database, rounds)
    cells = [
        step.name,
        step.kind,
        *(f"{times.us[way] / 1e3:.1f} ms" if way in times.us else "-" for way in WAYS),
        *(times.ratio_text(way) if way in times.ratios else "-" for way in WAYS[:2]),
        *seconds,
        str(len(times.groups)),
        str(sum(group.by == "tunebench" for group in times.groups)),
        _slowest(times),
    ]
    return f"| {' | '.join(cells)} |"


def _slowest(times: served.ModelTimes) -> str:
    worst = max(
        (g for g in times.groups if g.by == "tunebench"), key=lambda g: g.us / g.torch_us, default=None
    )
    if worst is None:
        return "-"
    return f"{worst.us / worst.torch_us:.1f}: {' and '.join(worst.workloads)} ({worst.us:.0f} us)"


def _tune_in_process(step: Step, cache: str, database: Path) -> None:
    settings = {"TUNEBENCH_CACHE": f"{cache}/tunebench", "TUNEBENCH_DB": str(database)}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=_set, initargs=(settings,)) as pool:
        pool.submit(step.tune).result()


def _in_process(
    run: Callable[..., Result], cache: str, database: Path | None, *args: Any, **kwargs: Any
) -> Result:
    """Call a method of a step in a new process with a folder for everything that compilers cache."""
    settings = {
        "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor",
        "TUNEBENCH_CACHE": f"{cache}/tunebench",
        "TUNEBENCH_DB": str(database or f"{cache}/empty.db"),
    }
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=_set, initargs=(settings,)) as pool:
        return pool.submit(run, *args, **kwargs).result()


def _set(variables: Mapping[str, str]) -> None:
    os.environ.update(variables)


def rows(options: argparse.Namespace) -> Iterator[str]:
    """Yield the rows."""
    for name in options.model or MEASURED[options.device]:
        for kind in options.step or STEPS:
            step = Step(
                name=name,
                device=options.device,
                kind=kind,
                untuned=options.untuned,
                benchmark=options.benchmark,
                threads=options.threads,
                tune_minutes=options.tune,
            )
            try:
                yield row(step, options.rounds, options.db)
            except Exception as error:  # of a compiler, a kernel or a process; the other rows count
                yield f"| {name} | {kind} | {type(error).__name__}: {error} |"


def main(arguments: list[str] | None = None) -> None:
    """Time the models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--model", action="append", choices=list(MEASURED["cpu"]), help="only this; repeatable"
    )
    parser.add_argument("--step", action="append", choices=STEPS, help="only this; repeatable")
    parser.add_argument("--device", choices=list(MEASURED), default="cpu")
    parser.add_argument("--db", type=Path, help="database of tuned kernels")
    parser.add_argument("--untuned", action="store_true", help="run default configurations of kernels")
    parser.add_argument("--benchmark", action="store_true", help="race with torch.compile at the first call")
    parser.add_argument("--threads", type=int, default=0, help="threads of a CPU; default: torch's")
    parser.add_argument("--tune", type=float, default=0.0, metavar="MINUTES", help="tune each step first")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, help="file for the table")
    options = parser.parse_args(arguments)
    write_table(HEAD, rows(options), options.out)


if __name__ == "__main__":
    main()
