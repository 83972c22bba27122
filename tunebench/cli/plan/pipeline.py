"""`tunebench plan pipeline`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tunebench.cli._completion import schedules
from tunebench.cli._file import require_folder, require_plot
from tunebench.cli._option import Architecture, DeviceName, Json, gpus
from tunebench.cli._option_group import grouped_options
from tunebench.cli._output import console, emit, phases
from tunebench.cli.plan._pipeline_option import KnownStages, LinkChoice, ModelStages, option_bytes
from tunebench.cli.plan._pipeline_report import PipelineReport
from tunebench.errors import InputError
from tunebench.training.schedules.registry import SCHEDULES

if TYPE_CHECKING:
    from tunebench.training.pipeline import MicrobatchEstimate, PredictedStages, StageSource

__all__ = ["pipeline"]

POWERS = range(-2, 3)
"""Sizes of micro-batches to estimate: the given one times these powers of two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """The options of `tunebench plan pipeline` other than those of its stages and links."""

    device: DeviceName = None
    arch: Architecture = None
    stages: Annotated[
        int | None,
        typer.Option("--stages", min=1, help="Pipeline-parallel size: ranks of --tensor devices."),
    ] = None
    microbatches: Annotated[
        int,
        typer.Option(
            min=1, help="Number of micro-batches per step, with pipeline parallelism.", show_default=False
        ),
    ]
    schedule: Annotated[
        str,
        typer.Option(
            help="Pipeline parallelism: schedules to compare, NAME[,NAME] or all, of "
            f"{', '.join(SCHEDULES)}.",
            autocompletion=schedules,
        ),
    ] = "all"
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory of each device, such as 40GB. Default: that of the device.",
            show_default=False,
        ),
    ] = None
    balance: Annotated[
        bool,
        typer.Option(
            "--balance/--no-balance",
            help="Also balance the memory of each schedule by evictions to other ranks.",
        ),
    ] = True
    search: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0.0,
            help="Also search for better schedules, for that long; 0 for no search.",
        ),
    ] = 0.0
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Also plot the best schedule to this file (.html, .svg, .png, .pdf). Needs the extra plot.",
            show_default=False,
        ),
    ] = None
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json",
            help="Write a trace of the best schedule for Perfetto or Chrome.",
            show_default=False,
        ),
    ] = None
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.csv",
            help="Write the best schedule as torch.distributed.pipelining reads it.",
            show_default=False,
        ),
    ] = None


@grouped_options("options", PipelineOptions)
@grouped_options("links", LinkChoice)
@grouped_options("known", KnownStages)
@grouped_options("model", ModelStages)
def pipeline(
    model: ModelStages,
    known: KnownStages,
    links: LinkChoice,
    options: PipelineOptions,
    as_json: Json = False,
) -> None:
    """Compare schedules of pipeline parallelism: step time, bubble, memory of each rank, transfers.

    The stages are those of a model, with predicted times on devices that need not be present, or have known
    costs. Each schedule is simulated, also with balanced memory. The best one is the fastest that fits.
    Nothing is run.
    """
    _require_one_source(model, known, given_device=options.device is not None or options.arch is not None)
    for path in (options.trace, options.out):
        require_folder(path)
    require_plot(options.plot, ".html")
    limit = option_bytes("--memory", options.memory) if options.memory is not None else None
    source: StageSource
    predicted: PredictedStages | None = None
    if model.name is not None:
        if options.stages is None:
            raise InputError("--model needs --stages N, the number of ranks of the pipeline")
        target = gpus([options.device] if options.device is not None else None, options.arch)[0]
        source = predicted = model.stages(target, options.stages, links)
        limit = limit or target.usable_memory_bytes or None
    else:
        source = known.stages(options.stages, links)
    with phases(console(stderr=True)) as show:
        report = _compared(source, predicted, limit, options, show)
    try:
        _write(report, options.plot, options.trace, options.out)
    finally:  # a disk that is full must not lose the comparison
        emit(as_json, report.to_json(), report.render)


def _require_one_source(model: ModelStages, known_stages: KnownStages, *, given_device: bool) -> None:
    """Raise InputError unless all options are of one way to give the stages."""
    if [model.name is not None, known_stages.costs is not None, known_stages.given].count(True) != 1:
        raise InputError("give the stages by one of: --model NAME, --costs FILE, --forward-us MICROSECONDS")
    if model.name is None and (given_device or model != ModelStages()):
        raise InputError("--device and options of predicted stages, such as --tensor, need --model NAME")
    if not known_stages.given and replace(known_stages, costs=None) != KnownStages():
        raise InputError("options of known stages, such as --backward-us and --static, need --forward-us")


def _compared(
    source: StageSource,
    predicted: PredictedStages | None,
    limit: int | None,
    options: PipelineOptions,
    show: Callable[[str], None],
) -> PipelineReport:
    """Return the comparison of schedules, and the estimates of micro-batches of a model."""
    from tunebench.training.pipeline import compare_schedules

    names = None if options.schedule == "all" else [name.strip() for name in options.schedule.split(",")]
    show("predicting the stages")
    comparison = compare_schedules(
        source,
        options.microbatches,
        names=names,
        memory_bytes=limit,
        balanced=options.balance,
        search_s=options.search,
        watcher=lambda name: show(f"simulating {name}"),
    )
    return PipelineReport(
        source=source,
        predicted=predicted,
        microbatches=options.microbatches,
        memory_bytes=limit,
        comparison=comparison,
        estimates=_estimates(predicted, options.microbatches) if predicted is not None else {},
    )


def _estimates(predicted: PredictedStages, microbatches: int) -> dict[str, tuple[MicrobatchEstimate, ...]]:
    """Return the estimates of smaller and larger micro-batches, as given and with less memory."""
    from tunebench.training.pipeline import estimate_microbatches

    batch = predicted.microbatch * microbatches
    scaled = (predicted.microbatch * 2**power for power in POWERS)
    sizes = tuple(int(size) for size in scaled if size == int(size) and batch % int(size) == 0)
    if len(sizes) == 1:
        return {}
    variants = {"as given": predicted}
    megatron = predicted.stack == "megatron"
    if megatron and not predicted.flash_attention and predicted.dtype != "f32":
        variants["flash attention"] = replace(predicted, flash_attention=True, recompute="none")
    if megatron and predicted.recompute == "none" and not predicted.flash_attention:
        variants["selective recomputation"] = replace(predicted, recompute="selective")
    ranks = range(predicted.ranks)
    return {
        name: estimate_microbatches(
            lambda size, stages=stages: stages.with_microbatch(size).costs(ranks),  # type: ignore[misc]
            batch,
            sizes,
        )
        for name, stages in variants.items()
    }


def _write(report: PipelineReport, plot: Path | None, trace: Path | None, out: Path | None) -> None:
    """Write the files that were asked for, and name them in the report."""
    from tunebench.training.pipeline.trace import write_trace
    from tunebench.training.schedules import write_schedule

    chosen = report.chosen
    if out is not None:
        write_schedule(chosen.schedule, out)
        report.written.append(out)
    if trace is not None:
        write_trace(chosen.simulation, trace)
        report.written.append(trace)
    if plot is not None:
        from tunebench.training.pipeline.plot import draw

        try:
            draw(
                chosen.simulation,
                plot,
                title=f"{report.title}: {chosen.name}",
                limit_bytes=report.memory_bytes,
            )
        except OSError as error:
            raise InputError(f"cannot write the plot to {plot}: {error.strerror or error}") from None
        report.written.append(plot)
