"""`coexecute.analyze`: where the Python of a step waits, and what would make the step faster."""

from __future__ import annotations

import contextlib
import copy
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tunebench.errors import InputError
from tunebench.training.coexecution.coexecution_report import CoexecutionReport, advice

if TYPE_CHECKING:
    from tunebench.training.coexecution.coexecute import Coexecution

__all__ = ["Reads", "StepAnalysis", "UpdateTimes", "analyzed"]

_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
"""Optimizers of torch that have a fused update on a processor."""

_UPDATES = 15
"""Number of updates whose median time is compared."""

_WARM_UP = 2
"""Number of steps before times count: libraries initialize, and optimizers make their states."""

_PLACES = 3
"""Number of places at which steps left the known paths that are named."""

_WORTH = 0.02
"""Part of a step's time from which on a gain is advised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """A place at which Python reads values of tensors, and waits for them.

    Attributes:
        site: File and line, ``file:line``.
        per_step: Mean number of reads in a step.
    """

    site: str
    per_step: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateTimes:
    """Times of an optimizer's update, on copies of its parameters.

    Attributes:
        optimizer: Its class.
        update_ms: Median time as the step makes it, in milliseconds.
        fused_ms: Median time with ``fused=True``, in milliseconds.
    """

    optimizer: str
    update_ms: float
    fused_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAnalysis:
    """What happens in a step, and what would be gained.

    Attributes:
        steps: Number of steps.
        eager_ms: Median time of a step in eager mode in milliseconds.
        coexecuted_ms: Median time of a step that took a known path, in milliseconds; None without one.
        paths: Number of paths that can be co-executed.
        reads: Where Python reads values, most frequent first.
        updates: Times of optimizers that have a fused update and do not use it.
        report: What happened in the steps that were recorded and co-executed: every other one.
    """

    steps: int
    eager_ms: float
    coexecuted_ms: float | None
    paths: int
    reads: tuple[Reads, ...]
    updates: tuple[UpdateTimes, ...]
    report: CoexecutionReport

    def advice(self) -> tuple[str, ...]:
        """Return what to change, as sentences."""
        lines = []
        for update in self.updates:
            gain = (update.update_ms - update.fused_ms) / self.eager_ms
            if gain >= _WORTH:
                lines.append(f"Pass fused=True to {update.optimizer}: a step takes {gain:.0%} less time.")
        lines += [
            f"{read.site} reads values {read.per_step:.1f} times a step: read them once, or less often."
            for read in self.reads
            if read.per_step >= 2
        ]
        reasons = {
            place.reason: f"{place.site}: {change}"
            for place in self.report.fallbacks
            if (change := advice(place.reason))
        }
        lines += [f"To be co-executed, at {change}." for change in reasons.values()]
        if self.coexecuted_ms is None and not self.report.fallbacks and self.report.divergences:
            site = self.report.divergences[0].site
            lines.append(
                f"To be co-executed, steps must repeat a path: at {site} they went on in another way than "
                "before, by a branch, a loop of another length, or another size."
            )
        if self.coexecuted_ms is not None and self.coexecuted_ms < (1 - _WORTH) * self.eager_ms:
            gain = 1 - self.coexecuted_ms / self.eager_ms
            lines.append(f"Decorate the step with coexecute: a step takes {gain:.0%} less time.")
        return tuple(lines)

    def __str__(self) -> str:
        """Return the analysis as lines of text."""
        lines = [f"eager mode: {self.eager_ms:.2f} ms a step, median of {self.steps} steps"]
        if self.coexecuted_ms is None:
            lines.append("co-execution: no step took a known path")
        else:
            speed = self.eager_ms / self.coexecuted_ms
            lines.append(
                f"co-execution: {self.coexecuted_ms:.2f} ms a step, {self.paths} known paths, "
                f"{speed:.2f} of eager mode's speed"
            )
        lines += [
            f"Python reads values at {read.site}, {read.per_step:.1f} times a step" for read in self.reads
        ]
        lines += [
            f"update by {update.optimizer}: {update.update_ms:.3f} ms, fused {update.fused_ms:.3f} ms"
            for update in self.updates
        ]
        lines += [f"left the known paths at {place}" for place in self.report.divergences[:_PLACES]]
        lines += [f"only in eager mode because of {place}" for place in self.report.fallbacks]
        return "\n".join([*lines, *(f"advice: {line}" for line in self.advice())])


def analyzed(coexecution: Coexecution, step: Callable[..., Any], batches: Iterable[Any]) -> StepAnalysis:
    """Return the analysis of a step; see `coexecute.analyze`.

    Args:
        coexecution: The step, co-executed on every known path.
        step: The step.
        batches: Its arguments, a tuple for each step; other values are a single argument.

    Raises:
        InputError: There are fewer than four batches.
    """
    eager: list[float] = []
    coexecuted: list[float] = []
    optimizers: dict[int, torch.optim.Optimizer] = {}
    number = 0
    for number, batch in enumerate(batches, start=1):
        arguments = batch if isinstance(batch, tuple) else (batch,)
        if number <= _WARM_UP or number % 2:
            around = _noticing(optimizers) if number <= _WARM_UP else contextlib.nullcontext()
            with around:
                eager.append(_timed(step, arguments))
        else:
            before = coexecution.counts()["coexecuted"]
            seconds = _timed(coexecution, arguments)
            if coexecution.counts()["coexecuted"] > before:
                coexecuted.append(seconds)
    if number < 2 * _WARM_UP:
        raise InputError(f"expected at least {2 * _WARM_UP} batches, one for each step; got {number}")
    report = coexecution.report()
    return StepAnalysis(
        steps=number,
        eager_ms=statistics.median(eager[_WARM_UP:]) * 1e3,
        coexecuted_ms=statistics.median(coexecuted) * 1e3 if coexecuted else None,
        paths=coexecution.ready_paths(),
        reads=_reads(coexecution, report),
        updates=tuple(filter(None, map(_update_times, optimizers.values()))),
        report=report,
    )


def _timed(step: Callable[..., Any], arguments: tuple[Any, ...]) -> float:
    start = time.perf_counter()
    step(*arguments)
    return time.perf_counter() - start


@contextlib.contextmanager
def _noticing(optimizers: dict[int, torch.optim.Optimizer]) -> Iterator[None]:
    """Note the optimizers that update parameters."""

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        optimizers[id(optimizer)] = optimizer

    handle = register_optimizer_step_pre_hook(note)
    try:
        yield
    finally:
        handle.remove()


def _reads(coexecution: Coexecution, report: CoexecutionReport) -> tuple[Reads, ...]:
    recorded = max(report.traced + report.diverged, 1)
    return tuple(
        Reads(site=site, per_step=count / recorded) for site, count in coexecution.reads.most_common()
    )


def _update_times(optimizer: torch.optim.Optimizer) -> UpdateTimes | None:
    """Return the times of an optimizer's update; None if it has no other one."""
    if type(optimizer) not in _FUSED or any(group.get("fused") for group in optimizer.param_groups):
        return None
    copies = [copy.deepcopy(optimizer) for _ in range(2)]
    for group in copies[1].param_groups:
        group["foreach"], group["fused"] = None, True
    for parameter in (p for made in copies for group in made.param_groups for p in group["params"]):
        parameter.grad = torch.full_like(parameter, 1e-3)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(_UPDATES):
        for made, seconds in zip(copies, times, strict=True):
            seconds.append(_timed(type(made).step, (made,)))
    medians = [statistics.median(seconds) * 1e3 for seconds in times]
    return UpdateTimes(optimizer=type(optimizer).__name__, update_ms=medians[0], fused_ms=medians[1])
