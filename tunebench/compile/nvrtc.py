"""Compilation of CUDA C++ to a cubin by NVRTC: for any architecture, without a GPU and without a driver."""

from __future__ import annotations

import functools
import re
from importlib import metadata
from typing import Any, NamedTuple

from tunebench.binary.compiled import Binary, CompileError
from tunebench.binary.cubin import resources, spills
from tunebench.binary.ptxas_note import ptxas_notes
from tunebench.compile.cache import binary_key
from tunebench.compile.given_binary import binary_of
from tunebench.device import Device
from tunebench.errors import BrokenDependency, MissingDependency, install_command
from tunebench.space import Config
from tunebench.variant import OLDEST_CC, CudaVariant, including_line, strip_comments
from tunebench.workload import Workload

__all__ = [
    "CompiledSource",
    "carried_key_cuda",
    "compile_cuda",
    "compile_source",
    "key_cuda",
    "nvrtc_version",
    "ptx_of_cuda",
    "require_nvrtc",
]

_FLAGS = ("--std=c++17", "--device-as-default-execution-space", "--ptxas-options=-v")
"""Options of NVRTC besides the target.

NVRTC 13.0 rejects generic lambdas as host code, unless code without an annotation is for the device. Later
versions generate the same machine code with and without this option.
"""
_MOST_ERRORS = 5


@functools.cache
def nvrtc_version() -> str:
    """Return the version of NVRTC, such as ``"13.4.92"``, or ``"13.4"`` if it is not installed as a package.

    Raises:
        MissingDependency: NVRTC or its bindings are not installed.
    """
    try:
        from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:  # the library is loaded at its first use
        raise MissingDependency("NVRTC", "cuda") from error
    try:
        package = metadata.version("nvidia-cuda-nvrtc")
    except metadata.PackageNotFoundError:
        package = ""
    # The package's version has a build number, but counts only if the package is the library that was loaded.
    return package if package.startswith(f"{major}.{minor}.") else f"{major}.{minor}"


@functools.cache
def require_nvrtc() -> None:
    """Compile a kernel of one line, which loads every library that NVRTC needs.

    Raises:
        MissingDependency: NVRTC or its bindings are not installed.
        BrokenDependency: NVRTC is installed, but fails.
    """
    version = nvrtc_version()
    kernel, target = "__global__ void store(float* value) { *value = 1; }", "sm_{}{}".format(*OLDEST_CC)
    try:
        compile_source(kernel, ("store",), target)
    except CompileError as error:
        remedy = f"reinstall it: {install_command('cuda')} --force-reinstall"
        raise BrokenDependency(f"NVRTC {version}", "cuda", f"fails: {error}", remedy) from error


def key_cuda(variant: CudaVariant[Any], workload: Workload, config: Config, device: Device) -> str:
    """Return the cache key of what reaches NVRTC: source, entries, options, target, version.

    Args:
        variant: The kernel variant.
        workload: The workload to compile for.
        config: A valid point of the variant's space.
        device: The target; only its architecture counts.

    Raises:
        MissingDependency: NVRTC or its bindings are not installed.
    """
    return binary_key(*_key_parts(variant, workload, config, device), nvrtc_version())


def carried_key_cuda(variant: CudaVariant[Any], workload: Workload, config: Config, device: Device) -> str:
    """Return the key of a carried binary: what reaches NVRTC, whatever its version (see `key_cuda`)."""
    return binary_key("carried", *_key_parts(variant, workload, config, device))


def _key_parts(
    variant: CudaVariant[Any], workload: Workload, config: Config, device: Device
) -> tuple[str, ...]:
    entries = [launch.entry for launch in variant.launches(workload, config)]
    return (
        "cuda",
        strip_comments(variant.source(workload, config)),
        # In launch order, which is the order of the symbols in the binary.
        "\n".join(entries),
        *_FLAGS,
        variant.target(device),
        *variant.flags(workload, config),
    )


def compile_cuda(variant: CudaVariant[Any], workload: Workload, config: Config, device: Device) -> Binary:
    """Compile one configuration for the architecture of `device`.

    Args:
        variant: The kernel variant.
        workload: The workload to compile for.
        config: A valid point of the variant's space.
        device: The target; it need not be on this machine.

    Raises:
        CompileError: NVRTC or ptxas failed; the message quotes the first errors.
        MissingDependency: NVRTC or its bindings are not installed.
    """
    key = key_cuda(variant, workload, config, device)
    entries = tuple(launch.entry for launch in variant.launches(workload, config))
    target = variant.target(device)
    compiled = variant.compiled(workload, config)
    if compiled is not None:
        return binary_of(key, compiled, entries, target)
    source, flags = variant.source(workload, config), variant.flags(workload, config)
    cubin, symbols, log, _ = compile_source(source, entries, target, flags)
    return Binary(
        key=key,
        language="cuda",
        target=target,
        payload=cubin,
        entries=symbols,
        resources=resources(cubin, symbols, spills(log)),
        notes=ptxas_notes(log),
        compiler=f"NVRTC {nvrtc_version()}",
    )


def ptx_of_cuda(variant: CudaVariant[Any], workload: Workload, config: Config, device: Device) -> str:
    """Return the PTX of one configuration.

    Args:
        variant: The kernel variant.
        workload: The workload to compile for.
        config: A valid point of the variant's space.
        device: The target; it need not be on this machine.

    Raises:
        CompileError: NVRTC or ptxas failed; the message quotes the first errors.
        MissingDependency: NVRTC or its bindings are not installed.
    """
    nvrtc_version()
    entries = tuple(launch.entry for launch in variant.launches(workload, config))
    source, flags = variant.source(workload, config), variant.flags(workload, config)
    return compile_source(source, entries, variant.target(device), flags).ptx


class CompiledSource(NamedTuple):
    """Output of NVRTC; `log` lists spills and notes of ptxas."""

    cubin: bytes
    symbols: tuple[str, ...]
    log: str
    ptx: str


def compile_source(
    source: str, entries: tuple[str, ...], target: str, flags: tuple[str, ...] = ()
) -> CompiledSource:
    """Compile a source.

    Args:
        source: CUDA C++ without any #include.
        entries: Kernels, such as ``"toy<32>"``; the symbols of the result are in this order.
        target: Architecture, such as ``"sm_90a"``.
        flags: Further options of NVRTC; a language standard replaces C++17.

    Raises:
        CompileError: NVRTC or ptxas failed, and the message quotes the first errors; or the source includes
            another file.
    """
    including = including_line(source)
    if including is not None:
        raise CompileError(
            f"`{including}` reads another file; expected a source that contains all of its text"
        )
    from cuda.bindings import nvrtc

    program = _call(nvrtc.nvrtcCreateProgram(source.encode(), b"kernel", 0, [], []))
    try:
        for entry in dict.fromkeys(entries):
            _call(nvrtc.nvrtcAddNameExpression(program, entry.encode()))
        has_standard = any(flag.startswith(("--std", "-std")) for flag in flags)
        options = [*_FLAGS[has_standard:], f"--gpu-architecture={target}", *flags]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
        log = bytearray(_call(nvrtc.nvrtcGetProgramLogSize(program)))
        _call(nvrtc.nvrtcGetProgramLog(program, log))
        text = log.decode(errors="replace").rstrip("\0")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(f"NVRTC for {target}: {_first_errors(text)}")
        cubin = bytearray(_call(nvrtc.nvrtcGetCUBINSize(program)))
        _call(nvrtc.nvrtcGetCUBIN(program, cubin))
        ptx = bytearray(_call(nvrtc.nvrtcGetPTXSize(program)))
        _call(nvrtc.nvrtcGetPTX(program, ptx))
        symbols = [_call(nvrtc.nvrtcGetLoweredName(program, entry.encode())).decode() for entry in entries]
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return CompiledSource(bytes(cubin), tuple(symbols), text, ptx.decode(errors="replace").rstrip("\0"))


def _call(result: tuple[Any, ...]) -> Any:
    """Return the value of an NVRTC call without its status, and raise `CompileError` if the call failed."""
    status, *values = result
    if int(status) != 0:
        raise CompileError(f"NVRTC: {status.name}")
    return values[0] if values else None


def _first_errors(log: str) -> str:
    """Return the first errors of a compilation log, each with the source line it quotes."""
    matches = re.findall(r"^(.*\berror\b *:.*)(?:\n  (.*))?", log, re.MULTILINE)
    errors = [
        " ".join(f"{error} `{quoted.strip()}`".removesuffix(" ``").split()) for error, quoted in matches
    ]
    return "; ".join(errors[:_MOST_ERRORS]) or log.strip()[:500] or "no message"
