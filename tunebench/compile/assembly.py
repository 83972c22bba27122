"""Machine code and PTX of one configuration, as text."""

from __future__ import annotations

from typing import Any

from tunebench.binary.disassembly import sass
from tunebench.compile import compile_config
from tunebench.compile.cache import BinaryCache
from tunebench.device import Device
from tunebench.errors import InputError
from tunebench.space import Config
from tunebench.variant import (
    CudaVariant,
    LibraryVariant,
    NumbaCpuVariant,
    NumbaCudaVariant,
    TritonVariant,
    Variant,
)
from tunebench.workload import Workload

__all__ = ["machine_code", "ptx"]


def machine_code(
    variant: Variant[Any], workload: Workload, config: Config, device: Device, cache: BinaryCache
) -> str:
    """Return the machine code of one configuration as text: SASS, or assembly of this machine's processor.

    Args:
        variant: The kernel variant.
        workload: The workload to compile for.
        config: A valid point of the variant's space.
        device: The target; it need not be on this machine.
        cache: Binaries that are compiled already.

    Raises:
        InputError: The variant calls a library.
        MissingDependency: A GPU binary needs a disassembler, and none is installed.
        CompileError: The compiler or the disassembler failed.
    """
    if isinstance(variant, NumbaCpuVariant):
        from tunebench.compile.numba_cpu import assembly_of_numba_cpu

        return assembly_of_numba_cpu(variant, workload, config)
    if isinstance(variant, LibraryVariant):
        raise InputError(f"{variant.key} has no machine code of its own: it calls {variant.calls(config)}")
    return sass(compile_config(variant, workload, config, device, cache).payload)


def ptx(variant: Variant[Any], workload: Workload, config: Config, device: Device) -> str:
    """Return the PTX of one configuration.

    Args:
        variant: The kernel variant, written for a GPU.
        workload: The workload to compile for.
        config: A valid point of the variant's space.
        device: The target; it need not be on this machine.

    Raises:
        InputError: The variant is compiled for a processor, which has no PTX.
        CompileError: The compiler rejected the source.
        MissingDependency: The compiler is not installed.
    """
    if isinstance(variant, CudaVariant):
        from tunebench.compile.nvrtc import ptx_of_cuda

        return ptx_of_cuda(variant, workload, config, device)
    if isinstance(variant, NumbaCudaVariant):
        from tunebench.compile.numba_cuda import ptx_of_numba_cuda

        return ptx_of_numba_cuda(variant, workload, config, device)
    if isinstance(variant, TritonVariant):
        from tunebench.compile.triton import ptx_of_triton

        return ptx_of_triton(variant, workload, config, device)
    raise InputError(f"{variant.key} is compiled for a processor and has no PTX; --sass shows its assembly")
