"""Export of one configuration: its cubin or source, everything a launch needs, and an example in C++.

The exported files need neither tunebench nor Python: `main.cpp` loads the cubin through the CUDA driver. The
call of a library is exported as a Python module or a C++ source file that needs the library only.
"""

from __future__ import annotations

import json
import shlex
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from tunebench.errors import InputError, UnknownName
from tunebench.export.library_call import MODULE, cpp_call, write_library_call
from tunebench.export.manifest import manifest
from tunebench.export.table import tables
from tunebench.variant import CudaVariant, GpuVariant, LibraryVariant

if TYPE_CHECKING:
    from tunebench.compile import Binary
    from tunebench.tuning.choice import ChosenConfig

__all__ = [
    "BUILD",
    "FORMATS",
    "MODULE",
    "Format",
    "build_lines",
    "default_format",
    "stand_alone_source",
    "write_export",
]

Format = Literal["cubin", "cu", "py", "cpp"]
"""Form of the kernels: machine code, CUDA C++ for nvcc, or Python or C++ that calls a library."""

FORMATS: tuple[Format, ...] = get_args(Format)

BUILD = 'g++ -std=c++17 -O2 -I"$CUDA_HOME/include" -o run main.cpp -lcuda'
"""Command that builds the example if the CUDA toolkit is installed."""


def default_format(choice: ChosenConfig) -> Format:
    """Return the form in which a configuration is exported unless another one is requested.

    Args:
        choice: The configuration.
    """
    variant = choice.variant
    if not isinstance(variant, LibraryVariant):
        return "cubin"
    is_torch = variant.package(choice.config) == "torch"
    return "py" if is_torch or variant.cpp(choice.workload, choice.config) is None else "cpp"


def write_export(choice: ChosenConfig, binary: Binary, folder: Path, form: Format) -> tuple[Path, ...]:
    """Write one configuration into a folder, replacing the files of an earlier export.

    Args:
        choice: Configuration of a GPU variant.
        binary: The compiled configuration.
        folder: Output folder; created if it does not exist.
        form: One of `FORMATS`.

    Returns:
        The paths of the kernels, manifest, tables and example; of a library's call, its source and manifest.

    Raises:
        InputError: The variant has no such form, is compiled for a CPU, or has inputs that the example cannot
            generate; or a library's call depends on values of its inputs, or is not in C++.
    """
    variant = choice.variant
    if form not in FORMATS:
        raise UnknownName("format", form, FORMATS)
    if not isinstance(variant, GpuVariant | LibraryVariant):
        raise InputError(
            f"{variant.key} runs on a CPU; only GPU kernels can be exported, and calls of libraries"
        )
    if isinstance(variant, LibraryVariant) is not (form in ("py", "cpp")):
        raise InputError(f"{variant.key} has no form {form!r}; use --format {default_format(choice)}")
    if isinstance(variant, LibraryVariant):
        return write_library_call(choice, folder, "cpp" if form == "cpp" else "py")
    if form == "cu" and not isinstance(variant, CudaVariant):
        raise InputError(f"{variant.key} has no CUDA C++ source; use --format cubin")
    facts = manifest(choice, binary)
    files = {
        "manifest.json": json.dumps({"kernels": f"kernel.{form}", **facts}, indent=2) + "\n",
        "launch.h": tables(facts),
        "main.cpp": resources.files("tunebench.export").joinpath("main.cpp").read_text(encoding="utf-8"),
    }
    folder.mkdir(parents=True, exist_ok=True)
    kernels = folder / f"kernel.{form}"
    if form == "cubin":
        kernels.write_bytes(binary.payload)
    else:
        assert isinstance(variant, CudaVariant)
        kernels.write_text(stand_alone_source(choice), encoding="utf-8")
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return (kernels, *(folder / name for name in files))


def stand_alone_source(choice: ChosenConfig) -> str:
    """Return the CUDA C++ source of a configuration, with the kernels it launches instantiated."""
    variant = choice.variant
    assert isinstance(variant, CudaVariant)
    entries = [launch.entry for launch in variant.launches(choice.workload, choice.config)]
    # An instance of a template gets a separate symbol only if it is instantiated explicitly.
    asked = [f"template __global__ decltype({e}) {e};" for e in dict.fromkeys(entries) if "<" in e]
    lines = (
        f"// {variant.key} {choice.config}",
        f"// for {choice.workload} on {variant.target(choice.device)}",
        variant.source(choice.workload, choice.config).rstrip(),
        "",
        *asked,
    )
    return "\n".join(lines) + "\n"


def build_lines(choice: ChosenConfig, form: Format) -> tuple[str, ...]:
    """Return the commands that build the example in the exported folder.

    Args:
        choice: Exported configuration.
        form: One of `FORMATS`.
    """
    if form == "py":
        return ()
    if form == "cpp":
        return (cpp_call(choice).build,)
    if form == "cubin" or not isinstance(choice.variant, CudaVariant):
        return (BUILD,)
    target = choice.variant.target(choice.device)
    flags = " ".join(("-std=c++17", *map(shlex.quote, choice.variant.flags(choice.workload, choice.config))))
    return (f"nvcc {flags} -arch={target} -cubin -o kernel.cubin kernel.cu", BUILD)
