"""`tunebench time`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tunebench._command import command_line
from tunebench._deprecation import warn_renamed
from tunebench.cli._option import Json, ModelInputs, ModelType, Training, VariantFiles
from tunebench.cli._option_group import grouped_options
from tunebench.cli._output import duration, emit, note, table
from tunebench.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from tunebench.graph import InputSpec
    from tunebench.torch import ModelTimes

__all__ = ["command"]

ROUNDS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeOptions:
    """The arguments and options of `tunebench time`."""

    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="FILE.py:FUNCTION or MODULE:FUNCTION that returns the model.",
            show_default=False,
        ),
    ]
    inputs: ModelInputs = None
    training: Training = False
    dtype: ModelType = None
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Device of this machine: cpu, or a GPU such as cuda:0. Default: GPU, else CPU.",
            show_default=False,
        ),
    ] = None
    rounds: Annotated[
        int,
        typer.Option(min=1, help="Timed runs of each implementation, alternating."),
    ] = ROUNDS
    torch_compile: Annotated[
        bool,
        typer.Option(help="Also time torch.compile, which needs a compiler."),
    ] = True
    library: Annotated[bool | None, typer.Option(hidden=True)] = None
    benchmark: Annotated[
        bool, typer.Option(help="Time each group against torch inside the model first, and keep the faster.")
    ] = True
    variant_file: VariantFiles = None


@grouped_options("options", TimeOptions)
def command(
    options: TimeOptions,
    as_json: Json = False,
) -> None:
    """Time a PyTorch model on this machine: eager torch, torch.compile, and tuned kernels.

    Tuned kernels run the groups of operations for which they were measured to be faster on this device: tune
    the suite that `tunebench extract --out` writes first. The model's file is executed and provides the
    weights; floating-point inputs are random, integer inputs are 0.
    """
    from tunebench.graph import InputSpec, load_factory, make_model

    if not options.inputs:
        raise InputError("the model needs its inputs: add --input SHAPE:TYPE for each argument")
    if options.library is not None:
        warn_renamed("--library", "--torch-compile")
    factory = load_factory(options.model)
    specs = [InputSpec.parse(text) for text in options.inputs]
    model_options = {
        "input": options.inputs,
        "dtype": options.dtype,
        "training": options.training,
        "variant_file": options.variant_file,
    }
    extract = functools.partial(command_line, "extract", options.model, **model_options)
    where = _where(options.device, extract)
    module = make_model(factory, specs, options.dtype)
    times = _timed(
        module,
        specs,
        where,
        rounds=options.rounds,
        training=options.training,
        torch_compile=options.torch_compile if options.library is None else options.library,
        benchmark=options.benchmark,
    )
    suite = f"suite/{type(module).__name__.lower()}.toml"
    tune = (
        extract(device=options.device, out="suite"),
        command_line("tune", suite=suite, device=options.device),
    )
    emit(as_json, times.to_json(), lambda to: _render(times, tune, to))


def _timed(model: Any, specs: list[InputSpec], where: str, **options: Any) -> ModelTimes:
    import torch

    from tunebench.torch import time_model

    torch.manual_seed(0)
    tensors = [spec.tensor() for spec in specs]
    drawn = [tensor.normal_() if tensor.is_floating_point() else tensor for tensor in tensors]
    note(f"compiling, then timing on {where}")
    return time_model(model.to(where), *(tensor.to(where) for tensor in drawn), **options)


def _where(device: str | None, extract: Callable[..., str]) -> str:
    """Return torch's name of a device of this machine; `extract` returns the command for other devices."""
    from tunebench import device as devices

    target = devices.find(device)
    if target == devices.local_cpu():
        return "cpu"
    local = devices.local_gpus()
    if target not in local:
        predict = extract(device=device)
        raise InputError(f"{target.name} is not in this machine; `{predict}` predicts times on it")
    name = (device or "").lower()
    return name if name.startswith("cuda") else f"cuda:{local.index(target)}"


def _render(times: ModelTimes, tune: Sequence[str], to: Console) -> None:
    rows = [
        (
            way,
            duration(us),
            times.ratio_text(way) if way in times.ratios else "1",
            f"{times.first_s[way]:.1f} s",
        )
        for way, us in times.us.items()
    ]
    headings = (
        "implementation",
        ">median time of a step",
        ">time relative to tunebench, 95 % interval",
        ">first step, which compiles",
    )
    to.print(table(*headings, rows=rows))
    groups = sorted(times.groups, key=lambda group: -group.us)
    if groups:
        lines = (
            (duration(g.us), duration(g.torch_us), duration(g.planned_us), g.by, " and ".join(g.workloads))
            for g in groups
        )
        to.print(table(">time", ">torch", ">planned", "run by", "workloads of the group", rows=lines))
    else:
        to.print("no group has a tuned kernel measured to be faster on this device; to tune them, run:")
        for line in tune:
            to.print(f"  {line}", soft_wrap=True)
