"""Models as fused groups: coverage, predicted savings and correctness.

    python -m benchmarks.models predicted [--model resnet50]
    python -m benchmarks.models extracted [--model llama-3-8b]
    python -m benchmarks.models right [--model gpt2]

- `predicted`: an inference step and a training step in f16 on A100 and H100, which need not be in this
  machine: fraction of torch's time in operators of tunebench, and savings by fusion.
- `extracted`: as `tunebench extract` on H100, of models whose parameters take no memory: times of the plan
  with its interval, groups that may be faster once measured, and how long tracing and planning take.
- `right`: errors of outputs and gradients in float32 on this CPU against float64, with tuned kernels wherever
  possible, and torch's errors for comparison. Compiling kernels for the first time takes minutes.

Each part writes a Markdown table, row by row.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import tunebench.torch as served
from benchmarks.patched_models import AT_KINKS, step, within_limits
from benchmarks.table import write_table
from benchmarks.torch_models import (
    BasicBlock,
    Bert,
    Gpt2,
    Llama,
    LlamaSize,
    MobileNetV2,
    Resnet,
    Size,
    UNet,
    VitBlock,
)
from tunebench.device import described
from tunebench.graph import InputSpec, extract, plan_partition
from tunebench.torch import prefer

DEVICES = ("a100-80-sxm", "h100-sxm")
SEED = 7
LAST = torch.channels_last


@dataclass(frozen=True, kw_only=True)
class ModelCase:
    """A model and its inputs.

    Attributes:
        make: Returns the model with random weights.
        large: Input on a GPU.
        small: Shape of the input on a CPU; empty for a model that does not run there.
        dtype: Type of the parameters on a GPU.
        words: Size of the vocabulary of a text model; 0 for images.
        gradient_limit: Relative error that gradients may always have.
    """

    make: Callable[[], nn.Module]
    large: str
    small: tuple[int, ...] = ()
    dtype: str = "f16"
    words: int = 0
    gradient_limit: float = 0.0

    def model(self) -> nn.Module:
        """Return the model on the CPU, channels last for images."""
        torch.manual_seed(SEED)
        model = self.make()
        return model if self.words else model.to(memory_format=LAST)

    def inputs(self) -> Tensor:
        """Return a random input on the CPU."""
        torch.manual_seed(SEED)
        if self.words:
            return torch.randint(0, self.words, self.small)
        return torch.randn(self.small).contiguous(memory_format=LAST)


BERT = Size(words=30522, longest=512)
CASES = {
    "resnet50": ModelCase(
        make=Resnet,
        large="32x3x224x224:f16:channels_last",
        small=(1, 3, 224, 224),
        gradient_limit=AT_KINKS,
    ),
    "mobilenet-v2": ModelCase(
        make=MobileNetV2,
        large="32x3x224x224:f16:channels_last",
        small=(1, 3, 224, 224),
        gradient_limit=AT_KINKS,
    ),
    "bert-base": ModelCase(make=lambda: Bert(BERT), large="8x512:i64", small=(1, 128), words=BERT.words),
    "gpt2": ModelCase(make=lambda: Gpt2(Size()), large="8x512:i64", small=(1, 128), words=Size().words),
    "unet": ModelCase(
        make=lambda: UNet(width=32),
        large="8x3x256x256:f16:channels_last",
        small=(1, 3, 128, 128),
        gradient_limit=AT_KINKS,
    ),
}


EXTRACTED = {
    "llama-3-8b": ModelCase(make=lambda: Llama(LlamaSize()), large="4x2048:i64", dtype="bf16"),
    "resnet18": ModelCase(
        make=lambda: Resnet(blocks=(2, 2, 2, 2), expansion=1, block=BasicBlock),
        large="32x3x224x224:f16:channels_last",
    ),
    "vit-b, a block": ModelCase(make=VitBlock, large="32x197x768:f16"),
}
"""Models that are only extracted."""


# -- predicted -----------------------------------------------------------------------------------------------

PREDICTED = (
    "| model | step | device | operations | groups | in our operators | torch | one by one | in groups | "
    "traffic saved | gap |\n|---|---|---|---|---|---|---|---|---|---|---|"
)


def predicted(name: str, case: ModelCase, _: argparse.Namespace) -> Iterator[str]:
    """Yield a row for each step on each device."""
    spec = InputSpec.parse(case.large)
    for training in (False, True):
        graphs = extract(case.make, [spec], training=training, dtype="f16", device=described()[DEVICES[0]])
        for device in DEVICES:
            plans = [plan_partition(graph, described()[device]) for graph in graphs]
            library = sum(partition.torch_us for partition in plans)
            covered = sum(partition.coverage * partition.torch_us for partition in plans) / library
            cells = (
                name,
                "training" if training else "inference",
                device,
                sum(len(partition.graph.nodes) for partition in plans),
                sum(len(partition.chosen) for partition in plans),
                f"{covered:.1%}",
                f"{library / 1e3:.2f} ms",
                f"{sum(partition.alone_us for partition in plans) / 1e3:.2f} ms",
                f"{sum(partition.us for partition in plans) / 1e3:.2f} ms",
                f"{sum(partition.saved_bytes for partition in plans) / 1e6:.0f} MB",
                f"{max(partition.partition.gap for partition in plans):.2%}",
            )
            yield f"| {' | '.join(map(str, cells))} |"


# -- extracted -----------------------------------------------------------------------------------------------

PLANNED = (
    "| model | step | operations | groups | torch | one by one | in groups | 90 % interval | may be faster "
    "| traffic saved | traced and planned in |\n|---|---|---|---|---|---|---|---|---|---|---|"
)


def extracted(name: str, case: ModelCase, _: argparse.Namespace) -> Iterator[str]:
    """Yield a row for each step on H100."""
    device, spec = described()["h100-sxm"], InputSpec.parse(case.large)

    def make() -> nn.Module:
        with torch.device("meta"):
            return case.make().to(memory_format=LAST if spec.channels_last else torch.preserve_format)

    for training in (False, True):
        began = time.perf_counter()
        graphs = extract(make, [spec], training=training, dtype=case.dtype, device=device)
        plans = [plan_partition(graph, device) for graph in graphs]
        seconds = time.perf_counter() - began
        intervals = [plan.interval_us for plan in plans if plan.interval_us is not None]  # all, on a GPU
        low, high = (sum(interval[end] for interval in intervals) / 1e3 for end in (0, 1))
        cells = (
            name,
            "training" if training else "inference",
            sum(len(plan.graph.nodes) for plan in plans),
            sum(len(plan.chosen) for plan in plans),
            f"{sum(plan.torch_us for plan in plans) / 1e3:.2f} ms",
            f"{sum(plan.alone_us for plan in plans) / 1e3:.2f} ms",
            f"{sum(plan.us for plan in plans) / 1e3:.2f} ms",
            f"{low:.2f} to {high:.2f} ms",
            sum(len(plan.alternatives) for plan in plans),
            f"{sum(plan.saved_bytes for plan in plans) / 1e6:.0f} MB",
            f"{seconds:.1f} s",
        )
        yield f"| {' | '.join(map(str, cells))} |"


# -- right ---------------------------------------------------------------------------------------------------

RIGHT = (
    "| model | step | run by | error of outputs | error of the worst gradient | calls by tuned kernels "
    "| calls by torch |\n|---|---|---|---|---|---|---|"
)


def right(name: str, case: ModelCase, _: argparse.Namespace) -> Iterator[str]:
    """Yield a row for each step and implementation; exit if an error exceeds what rounding explains."""
    for training in (False, True):
        model, inputs = without_chance(case.model()).train(training), case.inputs()
        if not training:
            _settle(model, inputs, case)
        targets = torch.randint(0, 2, _targets(model, inputs))
        truth = step(copy.deepcopy(model).double(), inputs if case.words else inputs.double(), targets)
        by_torch = step(model, inputs, targets)
        torch._dynamo.reset()
        with prefer("tunebench"):
            tuned = step(model, inputs, targets, run=served.compile(model))
        mode = "training" if training else "eval mode"
        yield by_torch.row(name, mode, "torch", truth=truth)
        yield tuned.row(name, mode, "tunebench", truth=truth)
        if not within_limits(tuned, by_torch, truth, case.gradient_limit):
            output, gradient, worst = tuned.error(truth)
            raise SystemExit(f"{name}: wrong: {output:.2e}, {gradient:.2e} ({worst})")


def without_chance(model: nn.Module) -> nn.Module:
    """Disable dropout, of elements, attention and layers, so that runs are reproducible."""
    for module in model.modules():
        for name, value in vars(module).items():
            is_rate = "drop" in name or (name == "p" and "Drop" in type(module).__name__)
            if is_rate and isinstance(value, float):
                setattr(module, name, 0.0)
    return model


def _settle(model: nn.Module, inputs: Tensor, case: ModelCase) -> None:
    """Update running statistics, which are trivial in a new network."""
    if not case.words:
        model.train()
        with torch.no_grad():
            for _ in range(3):
                model(inputs)
        model.eval()


def _targets(model: nn.Module, inputs: Tensor) -> tuple[int, ...]:
    with torch.no_grad():
        shape = copy.deepcopy(model)(inputs).shape
    return (shape[0], *shape[2:])


PARTS: dict[str, tuple[str, Callable[[str, ModelCase, argparse.Namespace], Iterator[str]]]] = {
    "predicted": (PREDICTED, predicted),
    "extracted": (PLANNED, extracted),
    "right": (RIGHT, right),
}


def main(arguments: list[str] | None = None) -> None:
    """Run a part of the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("part", choices=list(PARTS))
    models = [*CASES, *EXTRACTED]
    parser.add_argument("--model", action="append", choices=models, help="run only this model; repeatable")
    parser.add_argument("--out", type=Path, help="file for the table")
    options = parser.parse_args(arguments)
    header, run = PARTS[options.part]
    cases = EXTRACTED if options.part == "extracted" else CASES
    rows = (row for name in options.model or cases for row in run(name, cases[name], options))
    write_table(header, rows, options.out)


if __name__ == "__main__":
    main()
