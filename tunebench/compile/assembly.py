"""Machine code and PTX of one configuration, as text."""

from __future__ import annotations

from typing import Any

from tunebench.binary.disassembly import sass
from tunebench.compile import compile_config
from tunebench.compile.cache import BinaryCache
from tunebench.device import Device
from tunebench.errors import InputError
from tunebench.space import Config
from tunebench.variant import CudaVariant, NumbaCpuVariant, NumbaCudaVariant, Variant
from tunebench.workload import Workload

__all__ = ["machine_code", "ptx"]


def machine_code(
    variant: Variant[Any], workload: Workload, config: Config, device: Device, cache: BinaryCache
) -> str:
    """Return the machine code of one configuration as text: SASS, or the assembly of this processor.

    Raises:
        MissingDependency: if it is a GPU's and there is no disassembler.
        CompileError: if the disassembler, or the compiler, refuses it.
    """
    if isinstance(variant, NumbaCpuVariant):
        from tunebench.compile.numba_cpu import assembly_of_numba_cpu

        return assembly_of_numba_cpu(variant, workload, config)
    return sass(compile_config(variant, workload, config, device, cache).payload)


def ptx(variant: Variant[Any], workload: Workload, config: Config, device: Device) -> str:
    """Return the PTX of one configuration.

    Raises:
        InputError: if it is compiled for a processor, which has none.
        CompileError: if the compiler refuses it.
        MissingDependency: if the compiler is not installed.
    """
    if isinstance(variant, CudaVariant):
        from tunebench.compile.nvrtc import ptx_of_cuda

        return ptx_of_cuda(variant, workload, config, device)
    if isinstance(variant, NumbaCudaVariant):
        from tunebench.compile.numba_cuda import ptx_of_numba_cuda

        return ptx_of_numba_cuda(variant, workload, config, device)
    raise InputError(f"{variant.key} is compiled for a processor and has no PTX; --sass shows its assembly")
