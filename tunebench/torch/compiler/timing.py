"""`time_model`: time of a model's step by eager torch, `torch.compile` and tuned kernels."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tunebench._deprecation import warn_renamed
from tunebench.errors import InputError
from tunebench.outcome import median_interval
from tunebench.torch.compiler._race import time_in_turn, timed
from tunebench.torch.compiler.backend import backend_of
from tunebench.torch.compiler.backend import compile as compile_ours
from tunebench.torch.compiler.capture import differentiable_results, in_training_mode

__all__ = ["GroupTime", "ModelTimes", "time_model"]

WARM_UP = 3
"""Untimed calls of each implementation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTime:
    """Time of a group that tuned kernels may run.

    Attributes:
        workloads: Canonical texts of the workloads that the group computes.
        planned_us: Measured or predicted time for which it was chosen.
        by: Implementation that runs it in the model.
        us: Median time of a call by tuned kernels, on tensors with the strides of those in the model.
        torch_us: Median time of the same call by torch, operation by operation.
    """

    workloads: tuple[str, ...]
    planned_us: float
    by: Literal["tunebench", "torch"]
    us: float
    torch_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTimes:
    """Times of a model's step; the implementations alternate.

    Attributes:
        us: Median time of each implementation: ``eager``, ``torch.compile`` and ``tunebench``.
        ratios: Median over the rounds of each implementation's time over tunebench's; above 1, tunebench is
            faster.
        ratios_95: Their 95 % confidence intervals; below 6 rounds, the range of the rounds.
        first_s: Seconds of the first step of each implementation, which compiles; less if earlier processes
            left compiled code in caches on disk. That of tunebench plans anew and compares its groups with
            torch, which `compile` alone does not.
        groups: Times of the groups that tuned kernels may run, in running order.
        rounds: Timed runs of each implementation.
    """

    us: Mapping[str, float]
    ratios: Mapping[str, float]
    ratios_95: Mapping[str, tuple[float, float]]
    first_s: Mapping[str, float]
    groups: tuple[GroupTime, ...]
    rounds: int

    def ratio_text(self, way: str) -> str:
        """Return the ratio of an implementation and its interval, such as ``1.77 [1.75, 1.80]``."""
        low, high = self.ratios_95[way]
        return f"{self.ratios[way]:.2f} [{low:.2f}, {high:.2f}]"

    def to_json(self) -> dict[str, Any]:
        """Return the times as plain data."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        """Return one line per implementation, then one per group."""
        lines = [
            f"{way:<14} {us / 1e3:10.3f} ms, first step {self.first_s[way]:.1f} s"
            for way, us in self.us.items()
        ]
        lines += [
            f"{way} takes {self.ratio_text(way)} times as long as tunebench (95 % interval)"
            for way in self.ratios
        ]
        if self.groups:
            lines.append(f"{'us':>10} {'torch us':>10} {'planned us':>10}  group")
        lines += [
            f"{g.us:>10.1f} {g.torch_us:>10.1f} {g.planned_us:>10.1f}  {' and '.join(g.workloads)}"
            for g in self.groups
        ]
        return "\n".join(lines)


def time_model(
    model: nn.Module,
    *inputs: Tensor,
    rounds: int = 20,
    training: bool = False,
    torch_compile: bool = True,
    benchmark: bool | None = None,
    library: bool | None = None,
) -> ModelTimes:
    """Time a model's step by eager torch, by `torch.compile` and by `tunebench.torch.compile`.

    The model's mode, gradients and buffers are restored afterwards.

    Args:
        model: The model.
        inputs: Its inputs, on its device.
        rounds: Timed runs of each implementation; they alternate.
        training: Whether a step is forward and backward, with gradients of ones for everything the model
            returns, instead of inference.
        torch_compile: Whether to time `torch.compile` too, which needs a compiler.
        benchmark: Value of `benchmark` of `compile`. By default, graphs race against torch after the first
            step, as they would later.
        library: Deprecated name of `torch_compile`.

    Raises:
        InputError: if there are no rounds, no inputs, or no parameters to train.
    """
    if library is not None:
        warn_renamed("time_model(library=...)", "time_model(torch_compile=...)")
        torch_compile = library
    if rounds < 1 or not inputs:
        raise InputError("time_model needs at least one round and one input")
    if training and not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError("the model has no parameters to train: time an inference step instead")
    with in_training_mode(model, training=training), torch.set_grad_enabled(training):
        before = {parameter: parameter.grad for parameter in model.parameters()}
        try:
            step = functools.partial(_train, tuple(before)) if training else _infer
            return _timed(model, inputs, rounds, step, torch_compile=torch_compile, benchmark=benchmark)
        finally:
            for parameter, gradient in before.items():
                parameter.grad = gradient


Step = Callable[[Callable[..., Any], tuple[Tensor, ...]], None]
"""Runs a model's step once."""


def _infer(run: Callable[..., Any], inputs: tuple[Tensor, ...]) -> None:
    run(*inputs)


def _train(parameters: Sequence[Tensor], run: Callable[..., Any], inputs: tuple[Tensor, ...]) -> None:
    results = differentiable_results(run(*inputs))
    for parameter in parameters:
        parameter.grad = None
    torch.autograd.backward(results, [torch.ones_like(result) for result in results])


def _timed(
    model: nn.Module,
    inputs: tuple[Tensor, ...],
    rounds: int,
    step: Step,
    *,
    torch_compile: bool,
    benchmark: bool | None,
) -> ModelTimes:
    ours = compile_ours(model, benchmark=benchmark, check=True)
    ways: dict[str, Callable[..., Any]] = {"eager": model}
    if torch_compile:
        ways["torch.compile"] = torch.compile(model, dynamic=False)
    ways["tunebench"] = ours
    device = inputs[0].device
    calls = {way: functools.partial(step, run, inputs) for way, run in ways.items()}
    first_s = {way: timed(device, call) / 1e6 for way, call in calls.items()}
    backend_of(ours).race_next()  # in the untimed steps
    times = time_in_turn(calls, device, (rounds, rounds), 0.0, WARM_UP)
    medians = {
        way: median_interval([a / b for a, b in zip(samples_us, times["tunebench"], strict=True)])
        for way, samples_us in times.items()
        if way != "tunebench"
    }
    return ModelTimes(
        us={way: statistics.median(samples_us) for way, samples_us in times.items()},
        ratios={way: ratio for way, (ratio, _) in medians.items()},
        ratios_95={way: interval for way, (_, interval) in medians.items()},
        first_s=first_s,
        groups=_groups(ours, rounds, device),
        rounds=rounds,
    )


def _groups(compiled: Any, rounds: int, device: torch.device) -> tuple[GroupTime, ...]:
    """Time each group on random tensors with the strides of those in the model."""
    backend = backend_of(compiled)
    fused = [run for runs in backend.fused for run in runs]
    chosen = [offer.price for plan in backend.plans for offer in plan.chosen if offer.price.by == "tunebench"]
    groups = []
    for run, price in zip(fused, chosen, strict=True):
        inputs = run.drawn_inputs()
        ways: dict[str, Callable[..., Any]] = {"us": run, "torch_us": run.by_torch}
        calls = {name: functools.partial(way, *inputs) for name, way in ways.items()}
        with torch.no_grad():
            times = time_in_turn(calls, device, (rounds, rounds), 0.0, WARM_UP)
        medians = {name: statistics.median(samples) for name, samples in times.items()}
        workloads = run.group.workloads
        groups.append(GroupTime(workloads=workloads, planned_us=price.us, by=run.by, **medians))
    return tuple(groups)
