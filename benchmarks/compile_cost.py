"""Cost of compiling 12 models by tunebench, relative to torch.compile: seconds and memory of new processes.

    python -m benchmarks.compile_cost [--model Llama] [--step training] [--minutes 11] [--out PAGE]

Each time is that of a new process, forked from one that has imported torch and its compilers, from the call
of `compile` to the first result of a step: inference, or forward and backward. It includes everything that
tunebench imports then; `import tunebench.torch` itself is timed apart. Models are small, so that the step
takes little of the time.

- *empty*: the database has no record. *tuned*: for the `WINNERS` most frequent workloads of the model it has
  a record that makes tuned kernels faster than torch. The times in these records are made up, since only the
  cost of compiling is measured; the kernels are compiled beforehand, as `tune` does.
- *cold*: caches of inductor and of compiled graphs are empty. *warm*: they are those of the cold process.

Implementations alternate, and every other round reverses their order. Processor time includes that of
processes which compile. Needs torch only. Writes a Markdown page.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from benchmarks.torch_models import (
    Bert,
    DenseNet,
    DiffusionUNet,
    Gpt2,
    GraphNetwork,
    Llama,
    LlamaSize,
    MobileNetV2,
    Resnet,
    Size,
    UNet,
    Vgg,
    VitBlock,
    WaveNet,
)

SEED = 7
STEPS = ("inference", "training")
WINNERS = 3
"""Workloads of a model that the tuned database has as faster than torch."""

PRELOADED = ("torch._dynamo", "torch._inductor.compile_fx", "benchmarks.torch_models")
"""Modules that every process has imported before its clock starts."""

Way = Literal["torch.compile", "empty", "tuned"]
WAYS: tuple[Way, ...] = ("torch.compile", "empty", "tuned")
TARGETS = {("empty", "cold"): 1.05, ("empty", "warm"): 1.05, ("tuned", "cold"): 1.3, ("tuned", "warm"): 1.1}
"""Largest ratio to torch.compile that is wanted, by way and state of the caches."""
MEMORY_TARGET = 1.1


def _words(*shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randint(0, 500, shape),)


def _numbers(*shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(shape),)


_TEXT = Size(layers=1, width=128, heads=4, inner=256, words=500, longest=64)
MODELS: Mapping[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "ResNet": (lambda: Resnet(blocks=(1, 1), width=16, classes=10), _numbers(1, 3, 64, 64)),
    "MobileNetV2": (
        lambda: MobileNetV2(stages=((1, 8, 1, 1), (4, 16, 2, 2)), first=16, last=64, classes=10),
        _numbers(1, 3, 64, 64),
    ),
    "VGG": (lambda: Vgg((1, 1), width=16, inner=64, classes=10), _numbers(1, 3, 64, 64)),
    "DenseNet": (lambda: DenseNet((2, 2), growth=8, classes=10), _numbers(1, 3, 64, 64)),
    "U-Net": (lambda: UNet(width=8, levels=2), _numbers(1, 3, 32, 32)),
    "ViT block": (lambda: VitBlock(128, 4), _numbers(1, 49, 128)),
    "BERT": (lambda: Bert(_TEXT), _words(1, 64)),
    "GPT-2": (lambda: Gpt2(_TEXT), _words(1, 64)),
    "Llama": (
        lambda: Llama(LlamaSize(layers=1, width=128, heads=4, key_heads=2, inner=256, words=500)),
        _words(1, 64),
    ),
    "diffusion U-Net": (
        lambda: DiffusionUNet(32, (1,), text=32, heads=2),
        lambda: (torch.randn(1, 4, 16, 16), torch.randn(1, 32), torch.randn(1, 8, 32)),
    ),
    "graph network": (
        lambda: GraphNetwork(32, 2, 500),
        lambda: (torch.randint(0, 500, (100,)), torch.randint(0, 100, (2, 300))),
    ),
    "WaveNet": (lambda: WaveNet(16, 4, 8), _numbers(1, 8, 256)),
}
"""Model and inputs by name."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of compiling a step and running it once in a new process.

    Attributes:
        processor_s: Processor time, with that of processes that compiled.
        wall_s: Wall time.
        peak_mb: Largest resident memory of the process.
        import_s: Processor time of ``import tunebench.torch``, which the other times do not include.
        kernels: Groups that tuned kernels run.
    """

    processor_s: float
    wall_s: float
    peak_mb: float
    import_s: float
    kernels: int


# -- in the processes --------------------------------------------------------------------------------------


def step_of(name: str, step: str) -> tuple[nn.Module, Callable[[nn.Module], Any]]:
    """Return a model and a function that runs a step of it."""
    torch.manual_seed(SEED)
    make, draw = MODELS[name]
    model, inputs = make().train(step == "training"), draw()

    def run(called: nn.Module) -> Any:
        with torch.set_grad_enabled(step == "training"):
            result = called(*inputs)
            if step == "training":
                result.sum().backward()
        return result

    return model, run


def compile_once(name: str, step: str, way: Way) -> Cost:
    """Compile a step in this process and run it."""
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    model, run = step_of(name, step)
    began, kernels, import_s = _processor_s(), 0, 0.0
    if way != "torch.compile":
        import tunebench.torch as served

        import_s = _processor_s() - began
    began, before = time.perf_counter(), _processor_s()
    if way == "torch.compile":
        run(torch.compile(model))
    else:
        compiled = served.compile(model)
        run(compiled)
    wall_s = time.perf_counter() - began
    processor_s = _processor_s() - before
    if way != "torch.compile":
        kernels = sum(offer.price.by == "tunebench" for p in served.plans(compiled) for offer in p.chosen)
    return Cost(processor_s, wall_s, _peak_mb(), import_s, kernels)


def _processor_s() -> float:
    times = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in times)


def _peak_mb() -> float:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def tune_by_fiat(name: str, database: str) -> int:
    """Record the most frequent workloads of a model as faster than torch, and compile their kernels."""
    from tunebench.device import local_cpu
    from tunebench.graph.partition_plan import plan_partition
    from tunebench.torch.compiler.capture import capture

    winners: set[str] = set()
    for step in STEPS:
        counts: Counter[str] = Counter()
        torch.manual_seed(SEED)
        make, draw = MODELS[name]
        for translation in capture(make(), draw(), training=step == "training"):
            plan = plan_partition(translation.graph, local_cpu(), preferred="tunebench")
            counts += Counter(text for offer in plan.fused or plan.chosen for text in offer.group.workloads)
        winners |= {text for text, _ in counts.most_common(WINNERS)}
    for text in sorted(winners):
        _record(database, text)
    return len(winners)


def _record(database: str, text: str) -> None:
    from tunebench import kernels
    from tunebench.db import RunStart, TrialKey, Verdict, open_store
    from tunebench.device import local_cpu
    from tunebench.dispatch import bind
    from tunebench.outcome import Measured, Result, Verification
    from tunebench.variant import NumbaCpuVariant
    from tunebench.workloads import parse

    workload, device = parse(text), local_cpu()
    supporting = (v for v in kernels.variants(workload) if v.refuses(workload, device) is None)
    variant = next(v for v in supporting if isinstance(v, NumbaCpuVariant))
    config = variant.default(workload, device)
    key = TrialKey(
        device=device.key,
        workload=text,
        variant=variant.key,
        revision=variant.revision(workload, config),
        config=config,
    )
    outcome = Measured(
        median_us=1.0,
        ci_us=(1.0, 1.0),
        samples_us=(1.0,),
        cache="cold",
        verification=Verification(how="reference", detail="made up", worst=0.0),
    )
    versus = {"ratio": 1.5, "low": 1.4, "high": 1.6, "probability": 0.99}
    verdict = Verdict(versus_default="itself", comparison={"libraries": {"torch": versus}})
    with open_store(database) as store:
        store.begin_run(RunStart(device=device, workload=text, sampler="bound", seed=SEED))
        store.record(key, Result(outcome=outcome), purpose="finalist", bound_us=0.01, verdict=verdict)
    bind(workload, variant, config, device)


# -- processes ---------------------------------------------------------------------------------------------


def in_process(
    folder: Path,
    way: Way,
    function: Callable[..., Any],
    *arguments: Any,
    preloaded: Sequence[str] = PRELOADED,
) -> Any:
    """Call a function in a new process, with the caches and the database of a way to compile.

    Args:
        folder: Folder of all caches and databases.
        way: The way to compile.
        function: The function.
        arguments: Its arguments.
        preloaded: Modules that are imported before; the first call decides.
    """
    cache, database = ("torch", "none") if way == "torch.compile" else (way, way)
    settings = {
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/{cache}/inductor",
        "TUNEBENCH_CACHE": f"{folder}/{cache}/tunebench",
        "TUNEBENCH_DB": f"{folder}/{database}.db",
    }
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preloaded))
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, settings, function, arguments))
    process.start()
    sender.close()
    try:
        result = receiver.recv()
    except EOFError:
        result = RuntimeError("the process ended without a result")
    process.join()
    if isinstance(result, Exception):
        raise result
    return result


def _answer(sender: Any, settings: Mapping[str, str], function: Callable[..., Any], arguments: Any) -> None:
    os.environ.update(settings)
    try:
        sender.send(function(*arguments))
    except Exception as error:  # the process of the benchmark raises it
        sender.send(RuntimeError(f"{type(error).__name__}: {error}"))


def costs_of(
    name: str, steps: Iterable[str], repeat: int, kernels: Path
) -> Iterator[tuple[str, str, Way, list[Cost]]]:
    """Yield step, state of the caches, way and costs for each step of a model.

    Args:
        name: Name of the model.
        steps: Its steps.
        repeat: Warm processes of each way.
        kernels: Folder of compiled kernels, which models share.
    """
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        cache = folder / "tuned" / "tunebench"
        cache.mkdir(parents=True)
        (cache / "binaries").symlink_to(kernels)
        in_process(folder, "tuned", tune_by_fiat, name, f"{folder}/tuned.db")
        for step in steps:
            costs: dict[tuple[str, Way], list[Cost]] = {}
            for turn in range(1 + repeat):
                for way in WAYS if turn % 2 == 0 else reversed(WAYS):
                    cost = in_process(folder, way, compile_once, name, step, way)
                    costs.setdefault(("warm" if turn else "cold", way), []).append(cost)
            for (state, way), taken in sorted(costs.items()):
                yield step, state, way, taken


# -- page --------------------------------------------------------------------------------------------------

FIGURES: Mapping[str, Callable[[Cost], float]] = {
    "processor time": lambda cost: cost.processor_s,
    "wall time": lambda cost: cost.wall_s,
    "memory": lambda cost: cost.peak_mb,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Costs of a step by torch.compile and by tunebench, with caches in one state.

    Attributes:
        model: Name of the model.
        step: ``inference`` or ``training``.
        state: ``cold`` or ``warm``.
        costs: Median of each figure by way.
        kernels: Groups that tuned kernels run with the tuned database.
        import_s: Processor time of ``import tunebench.torch``.
    """

    model: str
    step: str
    state: str
    costs: Mapping[Way, Mapping[str, float]]
    kernels: int
    import_s: float

    def ratio(self, way: Way, figure: str) -> float:
        """Return a figure relative to torch.compile."""
        return self.costs[way][figure] / self.costs["torch.compile"][figure]

    def __str__(self) -> str:
        by_torch = self.costs["torch.compile"]
        cells = [
            *(self.model, self.step, self.state),
            f"{by_torch['processor time']:.1f} s",
            f"{by_torch['wall time']:.1f} s",
            f"{by_torch['memory']:.0f} MB",
            *(f"{self.ratio(way, figure):.2f}" for way in WAYS[1:] for figure in FIGURES),
            str(self.kernels),
        ]
        return f"| {' | '.join(cells)} |"


def rows_of(name: str, steps: Iterable[str], repeat: int, kernels: Path) -> Iterator[Row]:
    """Yield the rows of a model; arguments are those of `costs_of`."""
    medians: dict[tuple[str, str], dict[Way, dict[str, float]]] = {}
    groups: dict[tuple[str, str], int] = {}
    import_s: dict[tuple[str, str], float] = {}
    for step, state, way, costs in costs_of(name, steps, repeat, kernels):
        figures = {figure: statistics.median(map(read, costs)) for figure, read in FIGURES.items()}
        medians.setdefault((step, state), {})[way] = figures
        import_s[step, state] = max(import_s.get((step, state), 0.0), costs[0].import_s)
        groups[step, state] = max(groups.get((step, state), 0), costs[0].kernels)
    for (step, state), by_way in medians.items():
        key = (step, state)
        yield Row(
            model=name,
            step=step,
            state=state,
            costs=by_way,
            kernels=groups[key],
            import_s=import_s[key],
        )


def summary(rows: Iterable[Row]) -> Iterator[str]:
    """Yield a table of geometric means and largest ratios, with their targets."""
    rows = list(rows)
    yield "| database | caches | figure | geometric mean | largest | in | target | within it |"
    yield "|---" * 8 + "|"
    for (way, state), target in TARGETS.items():
        for figure in FIGURES:
            limit = MEMORY_TARGET if figure == "memory" else target
            ratios = {
                (row.model, row.step): row.ratio(way, figure)  # type: ignore[arg-type]
                for row in rows
                if row.state == state
            }
            if not ratios:
                continue
            worst = max(ratios, key=ratios.__getitem__)
            within = sum(ratio <= limit for ratio in ratios.values())
            yield (
                f"| {way} | {state} | {figure} | {statistics.geometric_mean(ratios.values()):.2f} "
                f"| {ratios[worst]:.2f} | {' '.join(worst)} | {limit} | {within} of {len(ratios)} |"
            )


HEAD = (
    "| model | step | caches | torch.compile: processor time | wall time | memory "
    "| empty: processor time | wall time | memory | tuned: processor time | wall time | memory "
    "| groups by kernels |\n" + "|---" * 13 + "|"
)


def page(rows: Iterable[Row], command: str, load: float) -> str:
    """Return the Markdown page of the results."""
    rows = list(rows)
    import_s = statistics.median(row.import_s for row in rows)
    return "\n".join(
        [
            "# Cost of compiling a model",
            "",
            f"Made by `{command}` on {platform.machine()} with {os.cpu_count()} cores,",
            f"torch {torch.__version__}; load average at the start {load:.2f}.",
            "",
            "Time from the call of `compile` to the first result of a step in a new process, and peak",
            "memory of that process. Columns of *empty* and *tuned* are relative to torch.compile in the",
            "same state of the caches (lower is better). Records of the tuned database have made-up times",
            f"for the {WINNERS} most frequent workloads of each step: this is the cost of compiling, not the",
            f"gain. `import tunebench.torch` takes another {import_s:.2f} s of processor time (median).",
            "",
            *summary(rows),
            "",
            HEAD,
            *map(str, rows),
            "",
        ]
    )


def main(arguments: list[str] | None = None) -> None:
    """Measure, print the page, and write it after each model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", action="append", choices=MODELS, help="only this model; repeatable")
    parser.add_argument("--step", action="append", choices=STEPS, help="only this step; repeatable")
    parser.add_argument("--repeat", type=int, default=1, help="warm processes of each kind")
    parser.add_argument("--minutes", type=float, default=11, help="start no further model after this time")
    parser.add_argument("--out", type=Path, help="Markdown page to write")
    options = parser.parse_args(arguments)
    load = os.getloadavg()[0]
    words = sys.argv[1:] if arguments is None else arguments
    command = " ".join(["python -m benchmarks.compile_cost", *words])
    rows: list[Row] = []
    end_s = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as kernels:
        for name in options.model or MODELS:
            if time.monotonic() > end_s:
                print(f"{name} is not measured: {options.minutes:g} minutes have passed", flush=True)
                continue
            for row in rows_of(name, options.step or STEPS, options.repeat, Path(kernels)):
                rows.append(row)
                print(row, flush=True)
            if options.out:
                options.out.write_text(page(rows, command, load), encoding="utf-8")
    print(page(rows, command, load))


if __name__ == "__main__":
    main()
