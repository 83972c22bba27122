"""`tunebench plan cluster`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from tunebench.cli._completion import optimizers, plan_values, stacks
from tunebench.cli._file import require_folder, require_plot
from tunebench.cli._option import Json, ModelInputs
from tunebench.cli._option_group import grouped_options
from tunebench.cli._output import console, emit, phases
from tunebench.cli.plan._cluster_report import ClusterReport
from tunebench.cli.plan._copies_report import CopiesReport
from tunebench.cli.plan._mixed_report import MixedReport
from tunebench.errors import InputError, UnknownName
from tunebench.optimizer import OPTIMIZERS, find_optimizer
from tunebench.stack import find_stack
from tunebench.training.schedules.registry import PLANNED_SCHEDULES

if TYPE_CHECKING:
    from tunebench.training.cluster import (
        ClusterAnswer,
        CopiesAnswer,
        MixedCluster,
        TrainingCluster,
        TrainingJob,
    )

__all__ = ["cluster"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """The options of `tunebench plan cluster`."""

    model: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE|FILE.py:FUNCTION",
            help="Model: a transformer or a residual network by name (`tunebench workloads` lists them), a "
            "config.json, or FILE.py:FUNCTION that returns a module whose result is its loss.",
            show_default=False,
        ),
    ]
    cluster: Annotated[
        str,
        typer.Option(
            metavar="TEXT|FILE.toml",
            help="Cluster, such as '64 x h100-sxm, 8 a node, nvlink4, net-400', '8 x a100-80-sxm + 8 x "
            "h100-sxm', or a TOML file.",
            show_default=False,
        ),
    ]
    batch: Annotated[
        int, typer.Option(min=1, help="Batch size: sequences of all devices together.", show_default=False)
    ]
    inputs: ModelInputs = None
    seq: Annotated[
        int,
        typer.Option(
            min=0,
            help="Model: tokens per sequence. Default: the most that it has positions for.",
            show_default=False,
        ),
    ] = 0
    objective: Annotated[
        str,
        typer.Option(help="What to minimise: time (of a step), memory (of a device) or cost (of a step)."),
    ] = "time"
    fix: Annotated[
        str,
        typer.Option(
            metavar="NAME=VALUE,…",
            help="Values that plans must have, such as tensor=8,schedule=1f1b|zbv. Schedules: "
            f"{', '.join(PLANNED_SCHEDULES)}.",
            show_default=False,
            autocompletion=plan_values,
        ),
    ] = ""
    top: Annotated[int, typer.Option(min=1, help="Number of plans to list.")] = 10
    dtype: Annotated[
        str,
        typer.Option(
            help="Dtype of parameters and activations: f16 or bf16. States of the optimizer are f32."
        ),
    ] = "bf16"
    fp8: Annotated[
        str,
        typer.Option(
            help="Scaling of 8-bit floats in linear layers (Transformer Engine): none, delayed or current."
        ),
    ] = "none"
    optimizer: Annotated[
        str,
        typer.Option(
            help=f"Training step: optimizer, one of {', '.join(OPTIMIZERS)}.", autocompletion=optimizers
        ),
    ] = "adamw"
    stack: Annotated[
        str,
        typer.Option(
            help="Model: software that runs it: megatron or megatron@2022 a transformer, eager or compiled "
            "PyTorch a residual network. Default: megatron or eager.",
            show_default=False,
            autocompletion=stacks,
        ),
    ] = ""
    tuning: Annotated[
        str,
        typer.Option(
            metavar="TUNING",
            help="Training step of a transformer: tuned (as NVIDIA publishes them) or typical (as others "
            "do). Default: that of the stack.",
            show_default=False,
        ),
    ] = ""
    calibrate: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.toml",
            help="Training step of a transformer: measured steps of the same device and stack, which move "
            "predicted times.",
            show_default=False,
        ),
    ] = None
    flash_attention: Annotated[
        bool,
        typer.Option(
            "--flash-attention/--no-flash-attention",
            help="Model: attention may be one kernel that stores no scores, or never is.",
        ),
    ] = True
    full_sharding: Annotated[
        bool,
        typer.Option(
            "--full-sharding/--no-full-sharding",
            help="Allow plans that also shard gradients (ZeRO-2) and parameters (ZeRO-3, FSDP); "
            "their times are optimistic.",
        ),
    ] = False
    user_buffers: Annotated[
        bool,
        typer.Option(
            "--user-buffers",
            help="Run collectives of sequence parallelism in parts beside products (Transformer Engine).",
        ),
    ] = False
    f32_gradients: Annotated[
        bool, typer.Option("--f32-gradients", help="Sum gradients in f32, with the memory for it.")
    ] = False
    fused_loss: Annotated[
        bool,
        typer.Option(
            "--fused-loss",
            help="Count the loss as one kernel with 16-bit logits, as in compiled programs. Default: as the "
            "framework runs it without compilation.",
        ),
    ] = False
    memory_margin: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=0.99,
            help="Share of the usable memory that plans leave free. Default: that of the cluster file, or "
            "0.07.",
            show_default=False,
        ),
    ] = None
    buffers: Annotated[
        str,
        typer.Option(
            "--framework",
            metavar="FRAMEWORK",
            help="Training step: framework whose buffers count in memory: megatron, deepspeed, fsdp or "
            "torchtitan. Default: that of --emit, or of the stack.",
            show_default=False,
        ),
    ] = ""
    cuda_graphs: Annotated[
        bool, typer.Option("--cuda-graphs", help="Launch kernels as CUDA graphs, without host time for each.")
    ] = False
    load_factor: Annotated[
        float,
        typer.Option(
            min=1.0,
            help="Model with experts: tokens of the busiest device of expert parallelism, relative to the "
            "mean.",
        ),
    ] = 1.0
    capacity_factor: Annotated[
        float | None,
        typer.Option(
            min=1.0,
            help="Model with experts: most tokens of an expert, relative to the mean; others are dropped. "
            "Default: none are dropped.",
            show_default=False,
        ),
    ] = None
    reasons: Annotated[
        bool,
        typer.Option(
            "--reasons/--no-reasons",
            help="Also plan with twice the memory, links and batch, and with slower predictions.",
        ),
    ] = True
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.toml",
            help="Write the best plan to this file, with arguments of Megatron-LM.",
            show_default=False,
        ),
    ] = None
    framework: Annotated[
        str,
        typer.Option(
            "--emit",
            metavar="FRAMEWORK",
            help="Print only the best plan, for megatron or torchtitan (a command), deepspeed (JSON) or "
            "fsdp (YAML of Accelerate).",
            show_default=False,
        ),
    ] = ""
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Also plot the fronts of time, memory and cost to this file (.png, .svg, .pdf). Needs the "
            "extra plot.",
            show_default=False,
        ),
    ] = None


@grouped_options("options", ClusterOptions)
def cluster(
    options: ClusterOptions,
    as_json: Json = False,
) -> None:
    """Find the best way to train a transformer on a cluster: parallelism, recomputation, sharding.

    Times are predicted for the kernels of Megatron-LM on devices that need not be present. The best plan is
    optimal for the model of time and memory. Nothing is run.
    """
    from tunebench.training.cluster import (
        RUNNABLE,
        Framework,
        MixedCluster,
        TrainingCluster,
        draw_fronts,
        is_mixed,
        plan_mixed,
        plan_training,
        write_plan,
    )
    from tunebench.training.cluster.search import Objective

    require_folder(options.out)
    require_plot(options.plot)
    if options.framework and options.framework not in get_args(Framework):
        raise UnknownName("framework", options.framework, get_args(Framework))
    if options.objective not in get_args(Objective):
        raise UnknownName("objective", options.objective, get_args(Objective))
    find_optimizer(options.optimizer)
    fixed = _fixed(options.fix)
    full_sharding = options.full_sharding or fixed.get("sharding") in ("gradients", "full")
    whole = {
        "--objective": options.objective != "time",
        "--full-sharding": full_sharding,
        "--out": options.out is not None,
        "--emit": bool(options.framework),
        "--plot": options.plot is not None,
    }
    if ":" in options.model or _is_residual(options.model):
        own = {
            "--seq": bool(options.seq),
            "--fix": bool(fixed),
            "--tuning": bool(options.tuning),
            "--calibrate": options.calibrate is not None,
        }
        _refuse({**own, **whole}, f"for {options.model}")
        copies = _module_plans(options) if ":" in options.model else _residual_plans(options)
        listed = CopiesReport(answer=copies, top=options.top)
        emit(as_json, listed.to_json(), listed.render)
        return
    if options.inputs:
        raise InputError("--input is for a module, FILE.py:FUNCTION: leave it out, and give --seq")
    job = _job(options, full_sharding=full_sharding)
    if is_mixed(options.cluster):
        measured = {"--calibrate": options.calibrate is not None}
        _refuse({**whole, **measured}, "on a cluster with different products")
        with phases(console(stderr=True)) as show:
            mixed = plan_mixed(
                job,
                _mixed_with_margin(MixedCluster.of(options.cluster), options),
                fixed=fixed,
                top=options.top,
                reasons=options.reasons,
                watcher=show,
            )
        mixed_report = MixedReport(answer=mixed)
        emit(as_json, mixed_report.to_json(), mixed_report.render)
        return
    machine = _with_margin(TrainingCluster.of(options.cluster), options)
    if options.calibrate is not None:
        job = _calibrated(job, machine, options)
    if options.framework:
        fixed = {**RUNNABLE[options.framework], **fixed}  # type: ignore[index]
    with phases(console(stderr=True)) as show:
        answer = plan_training(
            job,
            machine,
            objective=options.objective,  # type: ignore[arg-type]
            fixed=fixed,
            top=options.top,
            reasons=options.reasons and not options.framework,
            watcher=show,
        )
    report = ClusterReport(answer=answer)
    try:
        if options.out is not None and answer.best is not None:
            write_plan(options.out, answer.best, job)
            report.written.append(options.out)
        if options.plot is not None:
            draw_fronts(answer, options.plot)
            report.written.append(options.plot)
    finally:  # a disk that is full must not lose the plans
        if options.framework:
            _print_emitted(options.framework, answer, as_json)
        else:
            emit(as_json, report.to_json(), report.render)


def _residual_plans(options: ClusterOptions) -> CopiesAnswer:
    """Return the plans of a residual network, which data parallelism divides."""
    from tunebench.training.cluster import CopiesJob, TrainingCluster, plan_copies
    from tunebench.workloads.networks import network

    job = CopiesJob(
        network=network(options.model),
        batch=options.batch,
        dtype=options.dtype,  # type: ignore[arg-type]
        stack=options.stack or "eager",  # type: ignore[arg-type]
        optimizer=options.optimizer,
    )
    return plan_copies(job, _with_margin(TrainingCluster.of(options.cluster), options))


def _module_plans(options: ClusterOptions) -> CopiesAnswer:
    """Return the plans of a PyTorch module, which is traced."""
    from tunebench.graph import InputSpec, load_factory
    from tunebench.training.cluster import ModuleJob, TrainingCluster, plan_module

    if not options.inputs:
        raise InputError(
            "a module needs its inputs, with the batch of a device first: add --input SHAPE:TYPE for each "
            "argument"
        )
    if options.stack not in ("", "eager"):
        raise InputError(f"a module runs in eager PyTorch, got --stack {options.stack}: leave it out")
    specs = [InputSpec.parse(text) for text in options.inputs]
    machine = _with_margin(TrainingCluster.of(options.cluster), options)
    factory = load_factory(options.model)
    from tunebench.training.fitting.model_plan import ModelProfiler

    with phases(console(stderr=True)) as show:
        show("making the model")
        profiler = ModelProfiler(factory, specs, machine.device, optimizer="none")
        return plan_module(
            ModuleJob(profiler=profiler, batch=options.batch, optimizer=options.optimizer),
            machine,
            watcher=show,
        )


def _with_margin(machine: TrainingCluster, options: ClusterOptions) -> TrainingCluster:
    """Return a cluster with the margin of the options, if they have one."""
    if options.memory_margin is None:
        return machine
    return replace(machine, memory_margin=options.memory_margin)


def _mixed_with_margin(machine: MixedCluster, options: ClusterOptions) -> MixedCluster:
    """Return a cluster of several products with the margin of the options, if they have one."""
    return replace(machine, groups=tuple(_with_margin(group, options) for group in machine.groups))


def _is_residual(model: str) -> bool:
    from tunebench.workloads.networks import network
    from tunebench.workloads.networks.resnet import ResNet

    return isinstance(network(model), ResNet)


def _refuse(options: dict[str, bool], where: str) -> None:
    """Raise InputError for an option that is given and that some plans do not have."""
    for name, used in options.items():
        if used:
            raise InputError(
                f"{name} is not possible {where}: leave it out; it is for transformers on nodes of one "
                "product"
            )


def _print_emitted(framework: str, answer: ClusterAnswer, as_json: bool) -> None:
    """Print the best plan for a framework, and what its configuration cannot say to standard error."""
    from tunebench.training.cluster import emit as emit_plan

    if answer.best is None:
        raise InputError("no plan fits the memory: run without --emit to see what is missing")
    emitted = emit_plan(framework, answer.best.plan, answer.job)
    for note in () if as_json else emitted.notes:
        console(stderr=True).print(f"note: {note}", soft_wrap=True)
    emit(as_json, asdict(emitted), lambda to: to.print(emitted.text, end="", soft_wrap=True, highlight=False))


def _job(options: ClusterOptions, *, full_sharding: bool) -> TrainingJob:
    """Return the training of a transformer by Megatron-LM."""
    from tunebench.training.cluster import TrainingJob
    from tunebench.training.pipeline.activation import architecture_of
    from tunebench.workloads.networks import network

    transformer = network(options.model)
    stack = find_stack(options.stack or "megatron")
    architecture = architecture_of(transformer)
    seq = options.seq or architecture.positions or architecture.tokens
    if not seq:
        raise InputError(f"{options.model} has sequences of any length: add --seq TOKENS")
    return TrainingJob(
        network=transformer,
        batch=options.batch,
        seq=seq,
        dtype=options.dtype,  # type: ignore[arg-type]
        fp8=options.fp8,  # type: ignore[arg-type]
        flash=options.flash_attention,
        user_buffers=options.user_buffers,
        wide_gradients=options.f32_gradients,
        fused_loss=options.fused_loss,
        cuda_graphs=options.cuda_graphs,
        full_sharding=full_sharding,
        load_factor=options.load_factor,
        capacity_factor=options.capacity_factor,
        optimizer=options.optimizer,
        stack=stack.name,
        tuning=options.tuning,
        framework=options.buffers or options.framework or stack.framework,  # type: ignore[arg-type]
    )


def _calibrated(job: TrainingJob, machine: TrainingCluster, options: ClusterOptions) -> TrainingJob:
    """Return a job with the measured steps of `--calibrate`."""
    from tunebench.training.steps.calibration import calibrate
    from tunebench.training.steps.measured_file import read_measured

    assert options.calibrate is not None
    defaults = {
        "model": options.model,
        "stack": job.stack,
        "tuning": job.tuning,
        "dtype": job.dtype,
        "seq": job.seq,
    }
    return replace(
        job, calibration=calibrate(read_measured(options.calibrate, defaults, device=machine.device))
    )


def _fixed(text: str) -> dict[str, str]:
    """Return the items of `--fix`."""
    fixed = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not (name and equals and value):
            raise InputError(f"--fix {item!r}: expected NAME=VALUE, such as tensor=8")
        fixed[name] = value
    return fixed
