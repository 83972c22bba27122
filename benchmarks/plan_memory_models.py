"""Memory plans of published models: overhead against budget, and the largest batch that fits a GPU.

    python -m benchmarks.plan_memory_models published
    python -m benchmarks.plan_memory_models batches [--model NAME] [--gpu GPU]
    python -m benchmarks.plan_memory_models check --model NAME --gpu GPU --batch 100 200
    python -m benchmarks.plan_memory_models curve --model NAME --gpu GPU --batch 100

Times are predicted, links to the host are the usual ones of each device, and models are on `meta`: nothing
is computed, on a GPU or otherwise. Bytes are those that operations request, except for `batches`: there the
segments of the model of PyTorch's caching allocator, fixed or expandable, must fit.

Published figures: Shah et al., "Memory optimization for deep networks" (MONeT), 2021, ResNet-50 with batch
184; Jain et al., "Checkmate: breaking the memory wall with optimal tensor rematerialization", 2020, VGG-19
with 224 x 224 images, at most one more forward pass, and no states of an optimizer.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx, nn

from benchmarks.torch_models import Bert, DenseNet, DiffusionUNet, Gpt2, MobileNetV2, Resnet, Size, UNet, Vgg
from tunebench.device import Device, described
from tunebench.errors import InputError
from tunebench.training.fitting.joint_step import JointStep
from tunebench.training.fitting.operation_time import predicted_times
from tunebench.training.fitting.profile import profile_step
from tunebench.training.memory import (
    MemoryPlan,
    PlanEffort,
    TrainingStep,
    device_use,
    host_link_of,
    largest_batch,
    least_bytes,
    memory_curve,
    plan_memory,
    plan_on_device,
    simulate,
    size_text,
    step_at,
    unplanned,
)

__all__ = ["CASES", "GPUS", "Case", "profiled", "retimed"]

GPUS = ("h100-sxm", "v100-sxm2")
MEMORY_BYTES = {"h100-sxm": 80 << 30, "v100-sxm2": 16 << 30}
"""Bytes of each GPU; V100 is sold with 16 GB and with 32 GB."""

CONTEXT_BYTES = 1 << 30
"""Bytes that the CUDA context and workspaces of libraries are assumed to take."""

EFFORT = PlanEffort(exact_operations=0, rounds=0, relaxed_size=0)
"""Effort of each plan of a search; the plans of a table have `FINAL`."""

FINAL = PlanEffort(exact_operations=0, rounds=8, relaxed_size=0)
RESOLUTION = 0.02
"""Fraction of a batch that a largest batch may be too small."""

MONET = {10.0: 3.2, 8.0: 5.6, 6.0: 9.3, 5.0: 12.0}
"""Overhead in percent by budget in GB."""

CHECKMATE = {"keep all": 167, "sqrt(n)": 197, "greedy": 266, "integer program": 289}
"""Largest batch of VGG-19 on 16 GB by strategy."""


class WithLoss(nn.Module):
    """A model and its loss: of logits against classes, or the mean square of other results."""

    def __init__(self, model: nn.Module, *, classes: bool) -> None:
        super().__init__()
        self.model, self.classes = model, classes

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the loss of inputs, the last of which is the target."""
        result = self.model(*inputs[:-1])
        if self.classes:
            return nn.functional.cross_entropy(result.float(), inputs[-1])
        return nn.functional.mse_loss(result.float(), inputs[-1])


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, its inputs and its optimizer.

    Attributes:
        make: Returns the model.
        inputs: Returns inputs and target of a batch, on `meta`, of type f32 or i64.
        classes: Whether the loss is that of logits against classes.
        half: Whether weights and activations are f16, with f32 copies of the weights in the optimizer.
        batches: Two batches to profile; sizes of others lie on the line through theirs.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[Tensor, ...]]
    classes: bool = True
    half: bool = False
    batches: tuple[int, int] = (32, 128)

    @functools.cached_property
    def model(self) -> nn.Module:
        """The model with its loss, on `meta`."""
        with torch.device("meta"):
            made = WithLoss(self.make(), classes=self.classes)
        return made.half() if self.half else made

    def given(self, batch: int) -> tuple[Tensor, ...]:
        """Return inputs and target of a batch."""
        *inputs, target = self.inputs(batch)
        cast = [tensor.half() if self.half and tensor.is_floating_point() else tensor for tensor in inputs]
        return (*cast, target)

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of AdamW: two f32 numbers per weight, and an f32 weight beside an f16 one."""
        return (12 if self.half else 8) * sum(weight.numel() for weight in self.model.parameters())


def _images(batch: int, size: int, classes: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
    target = torch.empty((batch, *classes), dtype=torch.long, device="meta")
    return torch.empty((batch, 3, size, size), device="meta"), target


def _words(batch: int, length: int) -> tuple[Tensor, Tensor]:
    words = torch.empty((batch, length), dtype=torch.long, device="meta")
    return words, torch.empty(batch * length, dtype=torch.long, device="meta")


def _latents(batch: int) -> tuple[Tensor, ...]:
    shapes = ((batch, 4, 64, 64), (batch, 320), (batch, 77, 768), (batch, 4, 64, 64))
    return tuple(torch.empty(shape, device="meta") for shape in shapes)


BERT_LARGE = Size(layers=24, width=1024, heads=16, inner=4096, words=30522, longest=512)
GPT2_LARGE = Size(layers=36, width=1280, heads=20, inner=5120)
CASES = {
    "ResNet-50": Case(make=Resnet, inputs=functools.partial(_images, size=224), batches=(64, 512)),
    "DenseNet-121": Case(make=DenseNet, inputs=functools.partial(_images, size=224), batches=(32, 256)),
    "BERT-large": Case(
        make=lambda: Bert(BERT_LARGE),
        inputs=functools.partial(_words, length=512),
        half=True,
        batches=(4, 64),
    ),
    "GPT-2 large": Case(
        make=lambda: Gpt2(GPT2_LARGE),
        inputs=functools.partial(_words, length=1024),
        half=True,
        batches=(2, 24),
    ),
    "U-Net": Case(
        make=UNet, inputs=functools.partial(_images, size=256, classes=(256, 256)), batches=(8, 64)
    ),
    "MobileNetV2": Case(make=MobileNetV2, inputs=functools.partial(_images, size=224), batches=(64, 512)),
    "diffusion U-Net": Case(make=DiffusionUNet, inputs=_latents, classes=False, half=True, batches=(4, 32)),
}
"""Models by name. Images are 224 x 224, those of the U-Net 256 x 256, latents 64 x 64."""


def profiled(case: Case, batch: int, device: Device, *, states: bool = True) -> JointStep:
    """Return the step of a batch on a device with its usual link to the host.

    Args:
        case: The model.
        batch: The batch.
        device: The device of the times.
        states: Whether to count the states of AdamW.
    """
    return profile_step(
        case.model,
        case.given(batch),
        device=device,
        link=host_link_of(device),
        other_bytes=case.state_bytes if states else 0,
    )


def retimed(joint: JointStep, device: Device) -> TrainingStep:
    """Return a profiled step with the times and the link of another device."""
    module = joint.graph.owning_module
    assert isinstance(module, fx.GraphModule)
    times = iter(predicted_times(module, device)([node for node in joint.nodes if node is not None]))
    operations = tuple(
        operation if node is None else replace(operation, time_us=next(times))
        for node, operation in zip(joint.nodes, joint.step.operations, strict=True)
    )
    return replace(joint.step, operations=operations, link=host_link_of(device))


# -- published figures ---------------------------------------------------------------------------------------


def published() -> None:
    """Print the tables beside published figures."""
    case = CASES["ResNet-50"]
    joint = profiled(case, 184, described()["p100-pcie"], states=False)
    print("| device | budget | MONeT | recompute | swap | both | lower bound of both | planning |")
    print("|---|---|---|---|---|---|---|---|")
    for name in ("p100-pcie", *GPUS):
        step = retimed(joint, described()[name])
        plain = simulate(step, unplanned(step))
        print(f"| {name} | none: {size_text(plain.peak_bytes)}, {plain.step_us / 1e3:.0f} ms |||||||")
        for budget_gb, overhead in MONET.items():
            began = time.process_time()
            variants = (step.without_link(), step.without_recomputation(), step)
            plans = [_planned(variant, int(budget_gb * 1e9), FINAL) for variant in variants]
            cells = [f"{plan.simulation.step_us / plain.step_us - 1:.1%}" if plan else "-" for plan in plans]
            lower = f"{plans[-1].lower_us / plain.step_us - 1:.1%}" if plans[-1] else "-"
            row = (name, f"{budget_gb} GB", f"{overhead} %", *cells, lower)
            print(f"| {' | '.join(row)} | {time.process_time() - began:.0f} s |", flush=True)
    _checkmate()


def _checkmate() -> None:
    """Print the largest batch of VGG-19 with at most one more forward pass."""
    case = Case(make=Vgg, inputs=functools.partial(_images, size=224), batches=(160, 320))
    device = described()["v100-sxm2"]
    joints = [profiled(case, batch, device, states=False) for batch in case.batches]
    boundary = joints[0].boundary
    print("\n| VGG-19 on 16 GB | largest batch | time per sample |\n|---|---|---|")
    for name, batch in CHECKMATE.items():
        print(f"| Checkmate, {name} | {batch} | |")
    for name, memory in (("16 GiB", 16 << 30), ("16 GB", 16 * 10**9)):
        line = _Line(case.batches, tuple(joint.step.without_link() for joint in joints))
        plain = line.largest_plain(memory)
        plain_us = line.time_us(line.at(plain)) / plain
        print(f"| no plan, {name} | {plain} | 1.00 |")

        def fits(batch: int, memory: int = memory, line: _Line = line) -> bool:
            step = line.at(batch)
            plan = _planned(step, memory, EFFORT)
            max_us = step.compute_us + sum(operation.time_us for operation in step.operations[:boundary])
            return plan is not None and plan.simulation.step_us <= max_us

        batch = largest_batch(fits, plain, resolution=0.005)
        plan = plan_memory(line.at(batch), memory, effort=EFFORT)
        per_sample = plan.simulation.step_us / batch / plain_us
        print(f"| plan, {name}, at most one more forward pass | {batch} | {per_sample:.2f} |", flush=True)


def _planned(step: TrainingStep, budget_bytes: int, effort: PlanEffort) -> MemoryPlan | None:
    try:
        return plan_memory(step, budget_bytes, effort=effort)
    except InputError:
        return None


# -- largest batches -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Line:
    """Steps of any batch, on the line through those of two batches."""

    batches: tuple[int, int]
    steps: tuple[TrainingStep, ...]

    def at(self, batch: int) -> TrainingStep:
        low, high = self.batches
        step = step_at(*self.steps, (batch - low) / (high - low))
        assert step is not None, "the batches have different operations"
        return step

    def time_us(self, step: TrainingStep) -> float:
        return simulate(step, unplanned(step)).step_us

    def largest_plain(self, budget_bytes: int) -> int:
        """Return the largest batch that fits by requested bytes without a plan."""

        def fits(batch: int) -> bool:
            step = self.at(batch)
            return simulate(step, unplanned(step)).peak_bytes <= budget_bytes

        return largest_batch(fits, self.batches[0])


MODES: dict[str, Callable[[TrainingStep], TrainingStep]] = {
    "recompute": TrainingStep.without_link,
    "swap": TrainingStep.without_recomputation,
    "both": lambda step: step,
}
MOST_TIME = 4 / 3
"""Largest time per sample, over that of the plain step: about that of one more forward pass."""


CUTS = (0.02, 0.06, 0.16)
"""Fractions of the budget that attempts leave to fragmentation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    """A search of batches that fit a device in segments of its allocator.

    Attributes:
        line: Steps by batch.
        device: The device.
        budget_bytes: Bytes of the segments.
        expandable: Whether segments are expandable.
    """

    line: _Line
    device: Device
    budget_bytes: int
    expandable: bool

    def plain(self) -> int:
        """Return the largest batch without a plan."""

        def fits(batch: int) -> bool:
            step = self.line.at(batch)
            return device_use(
                step, unplanned(step), self.device, self.budget_bytes, expandable_segments=self.expandable
            ).fits

        return largest_batch(fits, self.line.batches[0])

    def ratio(self, mode: str, batch: int, plain_us: float) -> float:
        """Return the time per sample of a plan that fits, over that without one; infinite if none fits."""
        step = MODES[mode](self.line.at(batch))
        requested = _planned(step, self.budget_bytes, EFFORT)
        if requested is None or requested.simulation.step_us / batch > MOST_TIME * plain_us:
            return math.inf  # plans that leave bytes to fragmentation take longer
        plan, use = plan_on_device(
            step,
            self.budget_bytes,
            self.device,
            effort=EFFORT,
            cuts=CUTS,
            expandable_segments=self.expandable,
        )
        return plan.simulation.step_us / batch / plain_us if use.fits else math.inf

    def row(self) -> list[str]:
        """Return the largest batch without a plan and in each mode, with times per sample, as cells.

        Raises:
            AssertionError: Plans of both kinds fit a smaller batch than those of one kind.
        """
        plain = self.plain()
        if not plain:
            return ["0", *"----"]
        plain_us = self.line.time_us(self.line.at(plain)) / plain
        batch_by_mode = dict.fromkeys(MODES, plain)
        for mode in MODES:
            start = max(batch_by_mode.values())
            batch_by_mode[mode] = largest_batch(
                lambda batch, mode=mode: self.ratio(mode, batch, plain_us) <= MOST_TIME,
                start if mode == "both" else plain,
                resolution=RESOLUTION,
            )
        assert batch_by_mode["both"] == max(batch_by_mode.values()), "plans of one kind fit a larger batch"
        cells = [
            f"{batch} ({self.ratio(mode, batch, plain_us):.2f})" for mode, batch in batch_by_mode.items()
        ]
        return [str(plain), *cells, f"{batch_by_mode['both'] / plain:.2f}"]


def batches(names: Sequence[str], gpus: Sequence[str]) -> None:
    """Print the largest batch of each model on each GPU."""
    columns = ("model", "GPU", "segments", "plain", *MODES, "both over plain", "CPU s")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    for name in names:
        case = CASES[name]
        joints = [profiled(case, batch, described()[GPUS[0]]) for batch in case.batches]
        for gpu, expandable in itertools.product(gpus, (False, True)):
            device = described()[gpu]
            line = _Line(case.batches, tuple(retimed(joint, device) for joint in joints))
            began = time.process_time()
            budget_bytes = MEMORY_BYTES[gpu] - CONTEXT_BYTES
            cells = _Search(line=line, device=device, budget_bytes=budget_bytes, expandable=expandable).row()
            spent = f"{time.process_time() - began:.0f}"
            segments = "expandable" if expandable else "fixed"
            print(f"| {' | '.join((name, gpu, segments, *cells, spent))} |", flush=True)


def check(name: str, gpu: str, plain: int, batch: int) -> None:
    """Print the time per sample with a plan over that without, from profiles at both batches."""
    device = described()[gpu]
    step = profiled(CASES[name], plain, device).step
    plain_us = simulate(step, unplanned(step)).step_us / plain
    step = profiled(CASES[name], batch, device).step
    plan, use = plan_on_device(step, MEMORY_BYTES[gpu] - CONTEXT_BYTES, device, effort=FINAL)
    ratio = plan.simulation.step_us / batch / plain_us
    print(f"{name}, {gpu}, batch {batch} with a plan over {plain} without: {ratio:.2f}, fits: {use.fits}")


# -- curves --------------------------------------------------------------------------------------------------


def curve(name: str, gpu: str, batch: int) -> None:
    """Print times and peaks against budgets, and check what holds for all of them."""
    step = profiled(CASES[name], batch, described()[gpu], states=False).step
    plain = simulate(step, unplanned(step))
    low = least_bytes(step)
    budgets = [low + (plain.peak_bytes - low) * twelfth // 12 for twelfth in range(13)]
    curves = {
        mode: {plan.budget_bytes: plan for plan in memory_curve(form(step), budgets, effort=EFFORT)}
        for mode, form in MODES.items()
    }
    print(f"| budget | {' | '.join(MODES)} | peak of both |\n|{'---|' * (len(MODES) + 2)}")
    for budget in budgets:
        plans = [plan_at.get(budget) for plan_at in curves.values()]
        cells = [f"{plan.simulation.step_us / plain.step_us:.3f}" if plan else "-" for plan in plans]
        peak = size_text(curves["both"][budget].simulation.peak_bytes)
        print(f"| {size_text(budget)} | {' | '.join(cells)} | {peak} |")
        alone = [plan.simulation.step_us for plan in plans if plan is not None]
        assert alone[-1] == min(alone), "a plan of one kind is faster"
        assert all(plan.simulation.peak_bytes <= budget for plan in plans if plan is not None)
    simulations = [plan.simulation for plan in curves["both"].values()]
    for smaller, larger in itertools.pairwise(simulations):
        assert smaller.peak_bytes <= larger.peak_bytes, "a larger budget has a smaller peak"
        assert smaller.step_us >= larger.step_us, "a larger budget takes longer"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", choices=("published", "batches", "check", "curve"))
    parser.add_argument("--model", choices=tuple(CASES), nargs="*", help="models of `batches` (default: all)")
    parser.add_argument(
        "--gpu", choices=GPUS, nargs="*", default=GPUS, help="GPUs of `batches` (default: all)"
    )
    parser.add_argument(
        "--batch", type=int, nargs="+", help="batch of `curve`; batches of `check`, without and with a plan"
    )
    chosen = parser.parse_args(arguments)
    if chosen.table == "published":
        published()
    elif chosen.table == "curve":
        curve(chosen.model[0], chosen.gpu[0], *chosen.batch)
    elif chosen.table == "check":
        check(chosen.model[0], chosen.gpu[0], *chosen.batch)
    else:
        batches(chosen.model or tuple(CASES), chosen.gpu)


if __name__ == "__main__":
    main()
