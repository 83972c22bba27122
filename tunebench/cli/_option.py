"""Options that several commands share, so that they read the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tunebench.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tunebench.device import Device

__all__ = [
    "Architecture",
    "ConfigText",
    "Database",
    "Json",
    "ModelInputs",
    "ModelType",
    "OptionalProblem",
    "Problem",
    "StopAtGap",
    "Target",
    "VariantFile",
    "VariantName",
    "absent_device",
    "gpus",
    "target_device",
]

Database = Annotated[
    str | None,
    typer.Option(
        "--db",
        metavar="PATH|URL",
        help="Database: a file, or an SQLAlchemy URL. Default: TUNEBENCH_DB, or else the user data folder.",
        show_default=False,
    ),
]
"""Which database; None where it is not given."""

Json = Annotated[bool, typer.Option("--json", help="Print one JSON value, and nothing else, on stdout.")]
"""Whether to print JSON instead of text for people."""

Problem = Annotated[
    str,
    typer.Option(
        "--workload", "-w", help="What to compute: operator:dimension=value,… or suite/layer,dimension=value."
    ),
]
"""Text of a workload."""

OptionalProblem = Annotated[
    str | None,
    typer.Option(
        "--workload",
        "-w",
        help="What to compute: operator:dimension=value,… or suite/layer,dimension=value.",
        show_default=False,
    ),
]
"""Text of a workload; None where something else says what to compute."""

StopAtGap = Annotated[
    float | None,
    typer.Option(
        min=1.0,
        metavar="GAP",
        help="End the search once the best time is proved to be within this factor of the optimum: 1.05.",
        show_default=False,
    ),
]
"""Optimality gap that is good enough; None searches on."""

Target = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="NAME|FILE",
        help="A device by name, or a file that describes one. Default: GPU, else CPU.",
        show_default=False,
    ),
]
"""Name of a device, which need not be here, or a file that describes it; None where it is not given."""

Architecture = Annotated[
    str | None,
    typer.Option("--arch", help="In place of --device: an architecture, such as sm_90.", show_default=False),
]
"""An architecture, for which its representative device stands; None where it is not given."""

ModelInputs = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        metavar="SHAPE:TYPE",
        help="What it is called with, such as 1x3x224x224:f16, 8x512:i64 or 8x3x64x64:f32:channels_last; "
        "once for each argument.",
        show_default=False,
    ),
]
"""What a model is called with; None where it is not given."""

ModelType = Annotated[
    str | None, typer.Option("--dtype", help="Type of the parameters: f32, f16, bf16.", show_default=False)
]
"""Type of a model's parameters; None where it is not given."""

VariantName = Annotated[
    str | None, typer.Option("--variant", help="Of this variant only, by name or key.", show_default=False)
]
"""Name or key of a variant; None where it is not given."""

VariantFile = Annotated[
    Path | None, typer.Option(help="Of the variant of this Python file.", show_default=False)
]
"""A user's file with a variant; None where it is not given."""

ConfigText = Annotated[
    str | None,
    typer.Option(
        "--config",
        metavar="NAME=VALUE,…",
        help="This configuration. Default: the best known, else what its variant would ship untuned.",
        show_default=False,
    ),
]
"""Text of a configuration; None where it is not given."""


def target_device(device: str | None, arch: str | None) -> Device:
    """Return the device that `--device` or `--arch` names, or this machine's.

    Raises:
        InputError: if both are given, or the name is unknown.
        DeviceError: if it is a GPU of this machine that is not there.
    """
    from tunebench import device as devices

    if device is not None and arch is not None:
        raise InputError("--device and --arch exclude each other: a device has its architecture")
    if arch is not None:
        return devices.representative(arch)
    return devices.find(None) if device is None else absent_device(device)


def absent_device(name: str) -> Device:
    """Return a device by its name, or from a file; what was assumed of a file's goes to stderr.

    Raises:
        InputError: if the file cannot be used, or the name is unknown.
        DeviceError: if it is a GPU of this machine that is not there.
    """
    from tunebench import datasheet
    from tunebench import device as devices

    if not datasheet.is_file(name):
        return devices.find(name)
    from tunebench.cli._output import console

    sheet = datasheet.read(name)
    for note in sheet.notes:
        console(stderr=True).print(f"{name}: {note}", soft_wrap=True)
    return sheet.device


def gpus(names: Sequence[str] | None) -> list[Device]:
    """Return the GPUs that were named, or this machine's first.

    Raises:
        InputError: if one is no GPU, or none is named and none is here; otherwise as `absent_device`.
    """
    from tunebench.device import local_gpus

    found = [absent_device(name) for name in names] if names else list(local_gpus()[:1])
    if not found:
        raise InputError("this machine has no GPU: name one by --device, see `tunebench devices`")
    for device in found:
        if device.kind != "gpu":
            raise InputError(f"{device.name} is no GPU: its times are measured, by `tunebench tune`")
    return found
