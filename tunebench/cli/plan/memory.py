"""`tunebench plan memory`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tunebench.cli._completion import optimizers
from tunebench.cli._file import require_folder, require_plot
from tunebench.cli._option import (
    Architecture,
    DeviceName,
    Json,
    ModelInputs,
    ModelType,
    target_device,
)
from tunebench.cli._option_group import grouped_options
from tunebench.cli._output import console, emit, phases
from tunebench.cli.plan._memory_report import MemoryReport
from tunebench.errors import InputError
from tunebench.optimizer import OPTIMIZERS, find_optimizer

if TYPE_CHECKING:
    from tunebench.device import Device
    from tunebench.training.fitting.model_plan import ModelProfiler
    from tunebench.training.memory import HostLink

__all__ = ["memory"]

NO_LINK = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOptions:
    """The arguments and options of `tunebench plan memory`."""

    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="FILE.py:FUNCTION or MODULE:FUNCTION that returns the model. The model returns its loss.",
            show_default=False,
        ),
    ]
    inputs: ModelInputs = None
    dtype: ModelType = None
    device: DeviceName = None
    arch: Architecture = None
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory of the step: 24GB, 24GiB, 500MB, or 80% of the peak without a plan. Default: the "
            "memory of the device.",
            show_default=False,
        ),
    ] = None
    host_link: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|GB/S[:US]",
            help="Link to host memory: a name such as pcie5, GB/s such as 25:10 (with microseconds per copy) "
            "or none, which swaps nothing. Default: that of the device.",
            show_default=False,
        ),
    ] = None
    expandable_segments: Annotated[
        bool,
        typer.Option(
            "--expandable-segments",
            help="On a GPU: segments of PyTorch's allocator are expandable, as with "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.",
        ),
    ] = False
    optimizer: Annotated[
        str,
        typer.Option(
            help=f"Training step: optimizer, whose states take memory, one of {', '.join(OPTIMIZERS)}.",
            autocompletion=optimizers,
        ),
    ] = "adamw"
    max_batch: Annotated[
        bool, typer.Option("--max-batch", help="Find the largest batch that fits, and plan it.")
    ] = False
    curve: Annotated[bool, typer.Option("--curve", help="Also plan for smaller and larger budgets.")] = False
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Also plot the memory over the step to this file (.png, .svg, .pdf). Needs the extra plot.",
            show_default=False,
        ),
    ] = None
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="File for the plan.", show_default=False),
    ] = None


@grouped_options("options", MemoryOptions)
def memory(
    options: MemoryOptions,
    as_json: Json = False,
) -> None:
    """Plan a training step that fits into less memory, by recomputation and by copies to the host.

    Each saved tensor is kept, recomputed, or swapped to the host and back, for the least predicted time.
    The device need not be in this machine. The model's file is executed, the model is only traced. The
    memory is that of parameters, optimizer states, gradients, inputs, activations and results; on a GPU it
    includes the fragmentation of PyTorch's caching allocator.
    """
    from tunebench.graph import InputSpec, load_factory

    if not options.inputs:
        raise InputError("the model needs its inputs: add --input SHAPE:TYPE for each argument")
    find_optimizer(options.optimizer)
    target = target_device(options.device, options.arch)
    link = _host_link(options.host_link, target)
    sizes = _budget_reader(options.budget, target)
    if options.max_batch and options.budget is not None and options.budget.strip().endswith("%"):
        raise InputError("--max-batch needs a --budget in bytes, such as 24GB: a share depends on the batch")
    require_folder(options.out)
    require_plot(options.plot)
    specs = [InputSpec.parse(text) for text in options.inputs]
    factory = load_factory(options.model)
    from tunebench.training.fitting.model_plan import ModelProfiler

    with phases(console(stderr=True)) as show:
        show("making the model")
        profiler = ModelProfiler(
            factory, specs, target, link=link, dtype=options.dtype, optimizer=options.optimizer
        )
        report = _planned(profiler, sizes, options, show)
    try:
        _write(report, options.plot, options.out)
    finally:  # a disk that is full must not lose the plan
        emit(as_json, report.to_json(), report.render)


def _planned(
    profiler: ModelProfiler,
    sizes: Callable[[int], int],
    options: MemoryOptions,
    watcher: Callable[[str], None],
) -> MemoryReport:
    """Return the plan and what is known about it."""
    from tunebench.training.fitting.model_plan import BatchSearch
    from tunebench.training.memory import PlanEffort, device_use, memory_curve, plan_on_device, unplanned

    searched = None
    batch = None
    expandable = options.expandable_segments
    if options.max_batch:
        search = BatchSearch(profiler, sizes(0), watcher, expandable_segments=expandable)
        searched = (search.without_plan(), search.with_plan())
        batch = searched[1].batch or 1
    watcher("tracing the model")
    profile = profiler.profile(batch)
    step, device = profile.step, profiler.device
    plain = device_use(step, unplanned(step), device, 0, expandable_segments=expandable)
    budget_bytes = sizes(plain.simulation.peak_bytes)
    watcher("planning")
    if searched is not None and searched[1].plan is not None and searched[1].use is not None:
        plan, use = searched[1].plan, searched[1].use
    else:
        plan, use = plan_on_device(step, budget_bytes, device, expandable_segments=expandable)
    watcher("planning for other budgets")
    return MemoryReport(
        profile=profile,
        device=device,
        plan=plan,
        use=use,
        plain=plain,
        batches=searched,
        curve=memory_curve(step, effort=PlanEffort(exact_operations=0)) if options.curve else (),
    )


def _write(report: MemoryReport, plot: Path | None, out: Path | None) -> None:
    """Write the files that were asked for, and name them in the report."""
    from tunebench.training.memory import write_plan

    if out is not None:
        write_plan(report.plan, out)
        report.written.append(out)
    if plot is not None:
        from tunebench.training.memory.plot import draw

        try:
            draw(report.plan, report.layers(), plot, title=report.title)
        except OSError as error:
            raise InputError(f"cannot write the plot to {plot}: {error.strerror or error}") from None
        report.written.append(plot)


def _host_link(text: str | None, device: Device) -> HostLink | None:
    """Return the link of `--host-link`, else that of the device; a processor has none."""
    from tunebench.training.memory import host_link, host_link_of

    if text is not None:
        return None if text == NO_LINK else host_link(text)
    return host_link_of(device) if device.kind == "gpu" else None


def _budget_reader(text: str | None, device: Device) -> Callable[[int], int]:
    """Return a function from the peak without a plan to the budget in bytes."""
    from tunebench.training.memory import budget_bytes

    if text is not None:
        budget_bytes(text, 1)
        return lambda peak_bytes: budget_bytes(text, peak_bytes)
    if not device.memory_bytes:
        raise InputError(f"the memory of {device.name} is not known: add --budget SIZE, such as 24GB")
    return lambda _: device.usable_memory_bytes
