"""Seconds to the first result of a model in a new process: torch.compile, AOTInductor, and a saved model.

    python -m benchmarks.saved_models [--model GPT-2] [--repeat 3] [--out benchmarks/results/saved_models.md]

Each time is that of inference in a new process, forked from one that has imported torch, until the first
result. It includes all further imports, such as those of torch's compilers and of tunebench. torch.compile
finds its caches filled. AOTInductor loads a package of its own, which has the weights; tunebench loads a file
without them. Ways alternate. The database is the made-up one of `benchmarks.compile_cost`. Needs torch only.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import torch

from benchmarks.compile_cost import MODELS, SEED, _peak_mb, _processor_s, in_process, tune_by_fiat

Way = Literal["torch.compile", "AOTInductor", "tunebench"]
WAYS: tuple[Way, ...] = ("torch.compile", "AOTInductor", "tunebench")
MEASURED = ("ResNet", "ViT block", "GPT-2", "Llama")
PRELOADED = ("benchmarks.torch_models",)
CALLS = 50
"""Calls of a loaded model, of which the median time is stated."""

Figures = Mapping[str, float]
HEAD = "| model | way | wall time | processor time | memory | a later call | file |\n" + "|---" * 7 + "|"


def save(name: str, folder: str) -> None:
    """Save a model by AOTInductor alone and by tunebench."""
    import tunebench.torch as served

    warnings.simplefilter("ignore")
    torch.manual_seed(SEED)
    make, draw = MODELS[name]
    model, inputs = make().eval(), draw()
    with torch.no_grad():
        program = torch.export.export(model, inputs)
        torch._inductor.aoti_compile_and_package(program, package_path=f"{folder}/model.pt2")
    served.save(model, f"{folder}/model.tb", inputs)


def first_result(name: str, folder: str, way: Way) -> Figures:
    """Return the cost of the first result in this process, and the time of later calls."""
    warnings.simplefilter("ignore")
    torch.manual_seed(SEED)
    make, draw = MODELS[name]
    model, inputs = make().eval(), draw()
    began, before = time.perf_counter(), _processor_s()
    with torch.no_grad():
        if way == "torch.compile":
            run = torch.compile(model)
        elif way == "AOTInductor":
            run = torch._inductor.aoti_load_package(f"{folder}/model.pt2")
        else:
            import tunebench.torch as served

            run = served.load(f"{folder}/model.tb", model)
        result = run(*inputs)
        wall_s, processor_s = time.perf_counter() - began, _processor_s() - before
        torch.testing.assert_close(result, model(*inputs), rtol=1e-3, atol=1e-3)
        times_us = []
        for _ in range(CALLS):
            start = time.perf_counter_ns()
            run(*inputs)
            times_us.append((time.perf_counter_ns() - start) / 1e3)
    call_us = statistics.median(times_us)
    return {"wall_s": wall_s, "processor_s": processor_s, "peak_mb": _peak_mb(), "call_us": call_us}


def rows_of(name: str, repeat: int) -> Iterator[str]:
    """Yield the rows of a model."""
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)

        def call(way: Way) -> Figures:
            where: Literal["torch.compile", "tuned"] = "torch.compile" if way == "torch.compile" else "tuned"
            figures: Figures = in_process(folder, where, first_result, name, root, way, preloaded=PRELOADED)
            return figures

        in_process(folder, "tuned", tune_by_fiat, name, f"{root}/tuned.db", preloaded=PRELOADED)
        in_process(folder, "tuned", save, name, root, preloaded=PRELOADED)
        call("torch.compile")  # fills its caches
        taken: dict[Way, list[Figures]] = {way: [] for way in WAYS}
        for turn in range(repeat):
            for way in WAYS if turn % 2 == 0 else reversed(WAYS):
                taken[way].append(call(way))
        sizes = {"AOTInductor": folder / "model.pt2", "tunebench": folder / "model.tb"}
        for way, figures in taken.items():
            median = {key: statistics.median(run[key] for run in figures) for key in figures[0]}
            size = f"{sizes[way].stat().st_size / 1e6:.1f} MB" if way in sizes else "-"
            cells = [
                *(name, way, f"{median['wall_s']:.2f} s", f"{median['processor_s']:.2f} s"),
                *(f"{median['peak_mb']:.0f} MB", f"{median['call_us']:.0f} us", size),
            ]
            yield f"| {' | '.join(cells)} |"


def main(arguments: list[str] | None = None) -> None:
    """Measure, print the page, and write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", action="append", choices=MODELS, help="only this model; repeatable")
    parser.add_argument("--repeat", type=int, default=3, help="processes of each way")
    parser.add_argument("--out", type=Path, help="Markdown page to write")
    options = parser.parse_args(arguments)
    words = sys.argv[1:] if arguments is None else arguments
    command = " ".join(["python -m benchmarks.saved_models", *words])
    lines = [
        "# Seconds to the first result of a saved model",
        "",
        f"Made by `{command}` on {platform.machine()} with {os.cpu_count()} cores,",
        f"torch {torch.__version__}; load average at the start {os.getloadavg()[0]:.2f}. Inference in f32,",
        f"medians of {options.repeat} new processes, which have imported torch. torch.compile has its",
        "caches filled. The files of AOTInductor have the weights, those of tunebench have none.",
        "",
        HEAD,
    ]
    for name in options.model or MEASURED:
        for row in rows_of(name, options.repeat):
            print(row, flush=True)
            lines.append(row)
        if options.out:
            options.out.write_text("\n".join([*lines, ""]), encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
