"""`tunebench export`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tunebench import _environment
from tunebench.cli._choice import ConfigRequest, describe, in_words
from tunebench.cli._option import (
    Architecture,
    ConfigText,
    Gpus,
    Json,
    ReadDatabase,
    VariantFiles,
    VariantName,
    Workloads,
    target_device,
)
from tunebench.cli._option_group import grouped_options
from tunebench.cli._output import emit
from tunebench.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from tunebench.device import Device
    from tunebench.export import Format
    from tunebench.tuning.choice import ChosenConfig

__all__ = ["command"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest:
    """Command-line options that select a configuration, or the answers of a lookup table."""

    workload: Workloads = None
    device: Gpus = None
    arch: Architecture = None
    variant: VariantName = None
    variant_file: VariantFiles = None
    config: ConfigText = None
    db: ReadDatabase = None

    def single(self) -> ConfigRequest:
        """Return the request for one configuration.

        Raises:
            InputError: There is not one workload and one device.
        """
        if len(self.workload or ()) != 1 or len(self.device or ()) > 1:
            raise InputError("expected one --workload and one --device; --table takes several of both")
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        device = self.device[0] if self.device else None
        return ConfigRequest(**{**values, "workload": (self.workload or ("",))[0], "device": device})

    def devices(self) -> list[Device]:
        """Return the devices that were given, or this machine's."""
        if self.device and self.arch is not None:
            return [target_device(self.device[0], self.arch)]  # raises
        return [target_device(name, self.arch) for name in self.device or (None,)]


@grouped_options("asked", ExportRequest)
def command(
    asked: ExportRequest,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Folder to write to; created if it does not exist.", show_default=False
        ),
    ] = None,
    table: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Lookup table to write for C++, in place of --out: the best known configuration of each "
            "--workload on each --device. Default: all workloads with records.",
            show_default=False,
        ),
    ] = None,
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="Format: cubin, machine code; cu, CUDA C++ source for nvcc; py or cpp, Python module or C++ "
            "source that calls a library. The default is cubin, or for a library's call py, or cpp if only "
            "that exists.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Export a kernel with a launch manifest and an example in C++, or a lookup table for C++.

    The folder gets the kernels, manifest.json, and main.cpp with launch.h, which runs them with the CUDA
    driver API. The call of a library is a Python module or C++ source. It exports the given configuration, or
    else the best known one, or else the default; no GPU is needed. With --table it writes the answers of many
    lookups as one file, and the header that reads it.
    """
    if (out is None) == (table is None):
        raise InputError("expected one of --out FOLDER and --table FILE")
    if table is not None:
        _write_table(asked, table, as_json=as_json)
    elif out is not None:
        _write_kernel(asked.single(), out, form, as_json=as_json)


def _write_table(asked: ExportRequest, path: Path, *, as_json: bool) -> None:
    from tunebench.export.lookup_table import look_up_all, recorded_workloads, write_table

    if asked.variant is not None or asked.config is not None:
        raise InputError("--table contains the best known configurations: leave --variant and --config out")
    devices = asked.devices()
    texts = asked.workload or recorded_workloads(devices, asked.db)
    entries, missing = look_up_all(texts, devices, asked.db)
    files = write_table(entries, path)

    def render(to: Console) -> None:
        exact = sum(entry.answer.exact for entry in entries)
        to.print(f"{len(entries)} answers written to {path}, {exact} of them measured", soft_wrap=True)
        to.print(f"  {files[1]} reads them in C++17", soft_wrap=True)
        for name, reason in missing.items():
            to.print(f"  no answer for {name}: {reason}", soft_wrap=True)

    data = [{**entry.answer.to_json(), "device": entry.device.key} for entry in entries]
    emit(as_json, {"files": files, "answers": data, "missing": missing}, render)


def _write_kernel(request: ConfigRequest, out: Path, form: str | None, *, as_json: bool) -> None:
    from tunebench.compile import BinaryCache, compile_config
    from tunebench.export import MODULE, build_lines, default_format, write_export

    requested = None if form is None else _format(form)
    choice = request.choice()
    kind = requested or default_format(choice)
    cache = BinaryCache(_environment.binary_folder())
    binary = compile_config(choice.variant, choice.workload, choice.config, choice.device, cache)
    try:
        files = write_export(choice, binary, out, kind)
    except InputError as error:
        raise InputError(f"{error}{_alternative(request, choice)}") from error
    data = {**describe(choice), "files": files, "build": build_lines(choice, kind)}

    def render(to: Console) -> None:
        to.print(in_words(choice), soft_wrap=True)
        to.print(f"for {choice.workload} on {choice.device.key}", soft_wrap=True)
        for path in files:
            to.print(f"  {path}", soft_wrap=True)
        if kind == "py":
            to.print(f"To call it in {out}: from {Path(MODULE).stem} import run")
            return
        to.print(f"To build in {out}, {'with the library' if kind == 'cpp' else 'with the CUDA toolkit'}:")
        for line in (*build_lines(choice, kind), *(("./run",) if kind != "cpp" else ())):
            to.print(f"  {line}", soft_wrap=True)

    emit(as_json, data, render)


def _alternative(request: ConfigRequest, choice: ChosenConfig) -> str:
    """Return the best configuration that is compiled, for a call of a library that cannot be exported."""
    from tunebench._figure import duration
    from tunebench.tuning.choice import compiled_alternative
    from tunebench.variant import LibraryVariant

    if not isinstance(choice.variant, LibraryVariant):
        return ""
    kernel = compiled_alternative(choice, db=request.db)
    if kernel is None:
        return ""
    time = f"{duration(kernel.expected_us)}, {kernel.how}"
    return f". The best kernel that is compiled is {kernel.variant.key} {kernel.config} ({time})"


def _format(text: str) -> Format:
    from tunebench.errors import UnknownName
    from tunebench.export import FORMATS

    for form in FORMATS:
        if form == text:
            return form
    raise UnknownName("format", text, FORMATS)
