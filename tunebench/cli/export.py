"""`tunebench export`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tunebench import _environment
from tunebench.cli._choice import ConfigRequest, describe, in_words
from tunebench.cli._option import Json
from tunebench.cli._option_group import grouped_options
from tunebench.cli._output import emit

if TYPE_CHECKING:
    from rich.console import Console

    from tunebench.export import Format

__all__ = ["command"]


@grouped_options("asked", ConfigRequest)
def command(
    asked: ConfigRequest,
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Folder to write to; created if it does not exist.")
    ],
    form: Annotated[
        str, typer.Option("--format", help="Format: cubin, machine code; cu, CUDA C++ source for nvcc.")
    ] = "cubin",
    as_json: Json = False,
) -> None:
    """Export a kernel with a launch manifest and an example in C++.

    The folder gets the kernels, manifest.json, and main.cpp with launch.h, which runs them with the CUDA
    driver API. It exports the given configuration, or else the best known one, or else the default; no GPU is
    needed.
    """
    from tunebench.compile import BinaryCache, compile_config
    from tunebench.export import build_lines, write_export

    kind = _format(form)
    choice = asked.choice()
    cache = BinaryCache(_environment.binary_folder())
    binary = compile_config(choice.variant, choice.workload, choice.config, choice.device, cache)
    files = write_export(choice, binary, out, kind)
    data = {**describe(choice), "files": files, "build": build_lines(choice, kind)}

    def render(to: Console) -> None:
        to.print(in_words(choice), soft_wrap=True)
        to.print(f"for {choice.workload} on {choice.device.key}", soft_wrap=True)
        for path in files:
            to.print(f"  {path}", soft_wrap=True)
        to.print(f"To build in {out}, with the CUDA toolkit:")
        for line in (*build_lines(choice, kind), "./run"):
            to.print(f"  {line}", soft_wrap=True)

    emit(as_json, data, render)


def _format(text: str) -> Format:
    from tunebench.errors import UnknownName
    from tunebench.export import FORMATS

    for form in FORMATS:
        if form == text:
            return form
    raise UnknownName("format", text, FORMATS)
