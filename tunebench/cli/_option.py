"""Options that several commands share, and functions for options."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from tunebench.cli import _completion
from tunebench.cli._output import json_stdout
from tunebench.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from tunebench.device import Device
    from tunebench.own_kernel import KernelDescription

__all__ = [
    "Architecture",
    "ConfigText",
    "Database",
    "DeviceName",
    "Devices",
    "Gpus",
    "Json",
    "LearnedPruner",
    "Metrics",
    "ModelInputs",
    "ModelType",
    "Objectives",
    "OptionalWorkload",
    "ReadDatabase",
    "Requirements",
    "StopAtGap",
    "StoredDevice",
    "Tolerance",
    "Training",
    "VariantFiles",
    "VariantName",
    "WorkloadText",
    "Workloads",
    "absent_device",
    "described_kernel",
    "device_filter",
    "gpus",
    "looked_up_device",
    "metrics_of",
    "renamed_flag",
    "split_devices",
    "target_device",
    "variant_files_option",
]


T = TypeVar("T")


def _database_option(callback: Callable[[str | None], str | None] | None = None) -> Any:
    return typer.Option(
        "--db",
        metavar="PATH|URL",
        help="Database: a file or an SQLAlchemy URL. Default: TUNEBENCH_DB, else the user data folder.",
        show_default=False,
        callback=callback,
    )


def _existing(db: str | None) -> str | None:
    """Return the database if it exists or is a server.

    Raises:
        DatabaseError: if a file was named that does not exist.
    """
    if db is not None:
        from tunebench.db.location import locate

        locate(db).require()
    return db


Database = Annotated[str | None, _database_option()]
"""Path or URL of the database; None without the option."""

ReadDatabase = Annotated[str | None, _database_option(_existing)]
"""Path or URL of a database that is only read; a file that was named must exist."""


def _reserve_stdout(context: typer.Context, requested: bool) -> bool:
    if requested:
        context.with_resource(json_stdout())
    return requested


Json = Annotated[
    bool,
    typer.Option(
        "--json", help="Print one JSON value on stdout, and nothing else.", callback=_reserve_stdout
    ),
]
"""Whether to print JSON in place of text."""

WorkloadText = Annotated[
    str,
    typer.Option(
        "--workload",
        "-w",
        metavar="TEXT",
        help="Workload: operator:dimension=value,… or suite/layer,dimension=value; also without --workload.",
        autocompletion=_completion.workloads,
    ),
]
"""Text of a workload."""

Workloads = Annotated[
    list[str] | None,
    typer.Option(
        "--workload",
        "-w",
        metavar="TEXT",
        help="Workload: operator:dimension=value,… or suite/layer,dimension=value; repeatable.",
        show_default=False,
        autocompletion=_completion.workloads,
    ),
]
"""Texts of workloads; None without the option."""

OptionalWorkload = Annotated[
    str | None,
    typer.Option(
        "--workload",
        "-w",
        metavar="TEXT",
        help="Workload: operator:dimension=value,… or suite/layer,dimension=value; a size may be a range.",
        show_default=False,
        autocompletion=_completion.workloads,
        rich_help_panel="What to tune",
    ),
]
"""Text of a workload; None without the option."""

StopAtGap = Annotated[
    float | None,
    typer.Option(
        min=1.0,
        metavar="GAP",
        help="Optimality gap at which the search stops, such as 1.05. Default: never.",
        show_default=False,
        rich_help_panel="Search",
    ),
]
"""Optimality gap at which the search stops; None never stops early."""

Objectives = Annotated[
    list[str] | None,
    typer.Option(
        "--objective",
        metavar="NAME[:min|max]",
        help="Quantity, metric or expression to optimise, such as energy_j or GFLOP/s:max; repeatable, "
        "several have a Pareto front. Default: time_us.",
        show_default=False,
        rich_help_panel="Search",
    ),
]
"""What a search optimises; None minimises the time."""

Requirements = Annotated[
    list[str] | None,
    typer.Option(
        "--require",
        metavar="COMPARISON",
        help="What the best must satisfy, such as 'error<=1e-3'; repeatable.",
        show_default=False,
        rich_help_panel="Search",
    ),
]
"""What the best must satisfy; None is nothing."""

Metrics = Annotated[
    list[str] | None,
    typer.Option(
        "--metric",
        metavar="NAME=EXPRESSION",
        help="Metric to compute and store, such as GFLOP/s=flops/time_us/1e3; repeatable.",
        show_default=False,
        rich_help_panel="Search",
    ),
]
"""Metrics to compute; `metrics_of` parses them."""

LearnedPruner = Annotated[
    bool,
    typer.Option(
        "--learned-pruner",
        help="Postpone configurations that are unlikely to win, as learned from measurements.",
        rich_help_panel="Search",
    ),
]
"""Whether to use the learned pruner."""

DeviceName = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="NAME|FILE",
        help="Device: a name, or a file that describes one. Default: GPU, else CPU.",
        show_default=False,
        autocompletion=_completion.devices,
    ),
]
"""Name of a device, present or absent, or a file that describes it; None without the option."""

StoredDevice = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="NAME|FILE",
        help="Device of the records: a name, or a file that describes one. Default: all devices.",
        show_default=False,
        autocompletion=_completion.devices,
    ),
]
"""Device whose records are read; None without the option, for all devices."""


def split_devices(names: list[str] | None) -> list[str] | None:
    """Return names that were repeated, or separated by commas; a comma in a stored key is not a separator.

    Args:
        names: Values of `--device`; None without the option.

    Raises:
        InputError: a name is empty.
    """
    if names is None:
        return None
    parts = [part for name in names for part in ([name] if Path(name).exists() else _NEXT_DEVICE.split(name))]
    if not all(parts):
        raise InputError(f"--device: expected names separated by commas, got {','.join(names)!r}")
    return parts


_NEXT_DEVICE = re.compile(r",(?!\w+=)")
"""Comma between two devices; keys such as x86_64-v4:amd-epyc,sm=2 have others."""

Gpus = Annotated[
    list[str] | None,
    typer.Option(
        "--device",
        metavar="NAME|FILE",
        help="Device: a GPU by name, or a file that describes one; repeatable, or separated by commas. "
        "Default: the GPU here.",
        show_default=False,
        autocompletion=_completion.devices,
        callback=split_devices,
    ),
]
"""Names of GPUs, present or absent, or files that describe them; None without the option."""


Devices = Annotated[
    list[str] | None,
    typer.Option(
        "--device",
        metavar="NAME|FILE",
        help="Device by name, architecture or stored key; repeatable, or separated by commas. Default: all.",
        show_default=False,
        autocompletion=_completion.devices,
        callback=split_devices,
    ),
]
"""Names of devices of records; None without the option."""


def _fraction(text: str) -> float:
    """Return a fraction from a text such as ``5%`` or ``0.05``."""
    number = str(text).strip()
    with contextlib.suppress(ValueError):
        value = float(number.removesuffix("%")) / (100 if number.endswith("%") else 1)
        if 0 <= value < math.inf:
            return value
    raise typer.BadParameter(f"expected a percentage or a fraction, such as 5% or 0.05, got {text!r}")


Tolerance = Annotated[
    float,
    typer.Option(
        metavar="PERCENT",
        help="Tolerance: slowdown that is no regression, such as 5% or 0.05. Default: 5%.",
        parser=_fraction,
        show_default=False,
    ),
]
"""Tolerated slowdown as a fraction of time."""

Architecture = Annotated[
    str | None,
    typer.Option(
        "--arch",
        metavar="NAME",
        help="Architecture, such as sm_90, in place of --device.",
        show_default=False,
    ),
]
"""An architecture, which selects its representative device; None without the option."""

ModelInputs = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        metavar="SHAPE:TYPE",
        help="Input of the model, such as 1x3x224x224:f16, 8x512:i64 or 8x3x64x64:f32:channels_last; "
        "repeatable, one per argument.",
        show_default=False,
    ),
]
"""Inputs of a model; None without the option."""

ModelType = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        help="Dtype of the model: f32, f16 or bf16. Default: that of its parameters or workloads, else f32.",
        show_default=False,
    ),
]
"""Dtype of the parameters of a model; None without the option."""

Training = Annotated[
    bool, typer.Option("--training", help="Training step of the model: forward and backward.")
]
"""Whether a model runs forward and backward."""

VariantName = Annotated[
    str | None,
    typer.Option(
        "--variant",
        metavar="NAME",
        help="Variant, by name or key.",
        show_default=False,
        autocompletion=_completion.variants,
    ),
]
"""Name or key of a variant; None without the option."""


def _load_variant_files(paths: list[Path] | None) -> list[Path] | None:
    """Load files with variants, and return them; a described kernel is written as one."""
    from tunebench.kernels import load_file

    files = [
        described_kernel(path).write()[0] if path.suffix in (".toml", ".json") else path
        for path in paths or ()
    ]
    for path in files:
        load_file(path)
    return files or paths


def described_kernel(path: Path) -> KernelDescription:
    """Return the kernel that a file in TOML or in the T1 format describes."""
    from tunebench.own_kernel import description_file, t1_file

    return t1_file.read(path) if path.suffix == ".json" else description_file.read(path)


def variant_files_option(panel: str | None = None) -> Any:
    """Return the option `--variant-file`, which loads users' files with variants before the command runs.

    Args:
        panel: Title of its group in the help; None for the common group.
    """
    return typer.Option(
        "--variant-file",
        metavar="FILE",
        help="Python file with a variant, and its operator if that is new, or the description of a "
        "kernel in TOML or T1 format; repeatable.",
        show_default=False,
        callback=_load_variant_files,
        rich_help_panel=panel,
    )


VariantFiles = Annotated[list[Path] | None, variant_files_option()]
"""Users' files with variants, which are loaded before the command runs; None without the option."""

ConfigText = Annotated[
    str | None,
    typer.Option(
        "--config",
        metavar="NAME=VALUE,…",
        help="Configuration. Default: the best known one, else the default of the variant.",
        show_default=False,
    ),
]
"""Text of a configuration; None without the option."""


def target_device(device: str | None, arch: str | None) -> Device:
    """Return the device of `--device` or `--arch`, else that of this machine.

    Args:
        device: Name of a device, or a file that describes it.
        arch: Architecture.

    Raises:
        InputError: if both are given, or the name is unknown.
        DeviceError: if it names a missing GPU of this machine.
    """
    from tunebench import device as devices

    if device is not None and arch is not None:
        raise InputError("--device and --arch exclude each other: a device has its architecture")
    if arch is not None:
        return devices.representative(arch)
    return devices.find(None) if device is None else absent_device(device)


def looked_up_device(device: str | None, arch: str | None) -> Device | str | None:
    """Return the device of `--device` or `--arch` for a lookup: a name may be one that only records have.

    Raises:
        InputError: if both are given, or a file is invalid.
    """
    if arch is not None:
        return target_device(device, arch)
    from tunebench import datasheet

    return absent_device(device) if device is not None and datasheet.is_file(device) else device


def device_filter(device: str | None, arch: str | None) -> Callable[[Collection[str]], set[str]]:
    """Return a function that selects the keys of records of `--device` or `--arch`: all without either.

    The function raises UnknownName if a device has neither records nor a description.

    Args:
        device: Product in any spelling, architecture, key, or a file that describes a device.
        arch: Architecture.

    Raises:
        InputError: if both are given, the file is invalid, or the architecture is unknown.
    """
    from tunebench import datasheet
    from tunebench import device as devices

    if arch is not None:
        device = target_device(device, arch).architecture
    elif device is not None and datasheet.is_file(device):
        device = absent_device(device).key

    def select(keys: Collection[str]) -> set[str]:
        selected = {key for key in keys if device is None or devices.selects(device, key)}
        if selected or device is None or ",sm=" in device:
            return selected
        return {absent_device(device).key} & {*keys}

    return select


def absent_device(name: str) -> Device:
    """Return a device by name or from a file; assumptions about a file are printed to stderr.

    Raises:
        InputError: if the file is invalid, or the name is unknown.
        DeviceError: if it names a missing GPU of this machine.
    """
    from tunebench import datasheet
    from tunebench import device as devices

    if not datasheet.is_file(name):
        return devices.find(name)
    from tunebench.cli._output import note

    sheet = datasheet.read(name)
    for remark in sheet.notes:
        note(f"{name}: {remark}")
    return sheet.device


def gpus(names: Sequence[str] | None, arch: str | None = None) -> list[Device]:
    """Return the named GPUs, else that of an architecture, else the first GPU of this machine.

    Args:
        names: Names of GPUs, or files that describe them.
        arch: Architecture, which excludes names.

    Raises:
        InputError: if a name is not of a GPU, or there is neither a name nor a GPU; otherwise as
            `absent_device`.
    """
    from tunebench.device import local_gpus

    if arch is not None:
        devices = [target_device(names[0] if names else None, arch)]
    else:
        devices = [absent_device(name) for name in names] if names else list(local_gpus()[:1])
    if not devices:
        raise InputError("this machine has no GPU: name one by --device; `tunebench devices` lists them")
    for device in devices:
        if device.kind != "gpu":
            raise InputError(f"{device.name} is not a GPU, as this command needs; tune measures on a CPU")
    return devices


def renamed_flag(new: str) -> Callable[[typer.CallbackParam, T], T]:
    """Return a callback for a deprecated option, which warns on stderr and names the new option."""

    def warn(param: typer.CallbackParam, value: T) -> T:
        if value:
            from tunebench.cli._output import console

            console(stderr=True).print(f"warning: {param.opts[0]} is deprecated; use {new}", soft_wrap=True)
        return value

    return warn


def metrics_of(texts: Sequence[str] | None) -> dict[str, str]:
    """Return metrics by name, from texts such as ``GFLOP/s=flops/time_us/1e3``.

    Raises:
        InputError: A text has no name, or no expression.
    """
    metrics = {}
    for text in texts or ():
        name, equals, source = text.partition("=")
        if not equals or not name.strip() or not source.strip():
            raise InputError(
                f"a metric is NAME=EXPRESSION, such as GFLOP/s=flops/time_us/1e3; got {text[:100]!r}"
            )
        metrics[name.strip()] = source.strip()
    return metrics
