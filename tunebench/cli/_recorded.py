"""Command-line options of recorded spaces: the metadata that a file in T4 format lacks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tunebench.cli._option import absent_device
from tunebench.errors import InputError, UnknownName

if TYPE_CHECKING:
    from tunebench.tuning.replay import Space

__all__ = [
    "OptionalRecordedFile",
    "RecordedDevice",
    "RecordedFile",
    "RecordedKernel",
    "RecordedSizes",
    "space_of",
]

_FILE = typer.Argument(metavar="FILE", help="Cache file of Kernel Tuner, or a file in T4 format.")

RecordedFile = Annotated[Path, _FILE]
"""Path of a recorded space."""

OptionalRecordedFile = Annotated[Path | None, _FILE]
"""Path of a recorded space; None without the argument."""

RecordedKernel = Annotated[
    str,
    typer.Option(
        "--kernel", metavar="NAME", help="Kernel. Default: the one that the file names.", show_default=False
    ),
]
"""Name of the recorded kernel; empty if the file contains it."""

RecordedDevice = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="NAME|FILE",
        help="Device: a name, or a file that describes one. Default: the one that the file names.",
        show_default=False,
    ),
]
"""Name of the recorded device, or a file that describes it; empty if the recording names the device."""

RecordedSizes = Annotated[
    str,
    typer.Option(
        "--problem",
        metavar="SIZES",
        help="Problem size, such as 4096x4096. Default: the one that the file names.",
        show_default=False,
    ),
]
"""Problem size of the recorded kernel; empty if the file contains it."""


def space_of(path: Path, kernel: str, device: str, problem: str) -> Space:
    """Read a recorded space; options fill in the metadata that the file lacks.

    Args:
        path: The cache file.
        kernel: Name of the kernel; empty if not given.
        device: Name of the device, or a file that describes it; empty if not given.
        problem: Problem size such as ``4096x4096``; empty if not given.

    Raises:
        InputError: if the file cannot be read or contradicts an option, or `problem` is not a list of sizes.
        UnknownName: if there is no such device or kernel.
    """
    from tunebench import datasheet
    from tunebench import device as devices
    from tunebench.cache_file import read
    from tunebench.kernels.recorded_kernel import RECORDED_KERNELS
    from tunebench.tuning.replay import Space

    if problem and not re.fullmatch(r"[0-9]+(x[0-9]+)*", problem):
        raise InputError(f"--problem must be sizes such as 4096x4096, got {problem!r}")
    described = absent_device(device) if datasheet.is_file(device) else None
    product = devices.find_product(device).name if device and described is None else ""
    if kernel and kernel not in (recorded_kernels := {recorded.kernel for recorded in RECORDED_KERNELS}):
        raise UnknownName("recorded kernel", kernel, recorded_kernels)
    sizes = tuple(map(int, problem.split("x"))) if problem else ()
    return Space.of(read(path).completed(kernel=kernel, device=product, problem=sizes), described)
