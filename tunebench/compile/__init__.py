"""Source to binary: how each language of a variant is compiled, and what of it can be had here.

`compile_config` is the one entrance. Emulation (`emulate`, for CUDA C++) and simulation (`simulate`, for
Numba-CUDA) stand beside it: they run a variant where there is no GPU.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tunebench.binary.compiled import Binary, CompileError
from tunebench.compile.cache import BinaryCache
from tunebench.device import Device
from tunebench.errors import InputError, MissingDependency
from tunebench.space import Config
from tunebench.variant import CudaVariant, Language, NumbaCpuVariant, NumbaCudaVariant, Variant
from tunebench.workload import Workload

__all__ = ["Binary", "BinaryCache", "CompileError", "compile_config", "unavailable"]


def compile_config(
    variant: Variant[Any], workload: Workload, config: Config, device: Device, cache: BinaryCache
) -> Binary:
    """Compile one configuration, or take it from the cache if the same has reached the compiler before.

    Returns:
        The binary; its dynamic shared memory is that of this workload's launches.

    Raises:
        CompileError: if the compiler refuses it.
        MissingDependency: if the compiler is not installed.
    """
    if isinstance(variant, CudaVariant):
        from tunebench.compile.nvrtc import compile_cuda, key_cuda

        key = key_cuda(variant, workload, config, device)
        binary = cache.get_or_compile(key, lambda: compile_cuda(variant, workload, config, device))
    elif isinstance(variant, NumbaCudaVariant):
        from tunebench.compile.numba_cuda import compile_numba_cuda, key_numba_cuda

        key = key_numba_cuda(variant, workload, config, device)
        binary = cache.get_or_compile(key, lambda: compile_numba_cuda(variant, workload, config, device))
    elif isinstance(variant, NumbaCpuVariant):
        from tunebench.compile.numba_cpu import compile_numba_cpu, key_numba_cpu

        key = key_numba_cpu(variant, workload, config)
        return cache.get_or_compile(key, lambda: compile_numba_cpu(variant, workload, config))
    else:
        raise InputError(f"{variant.key} must derive from CudaVariant, NumbaCudaVariant or NumbaCpuVariant")
    # Binaries are shared by workloads, which may ask for different amounts at launch.
    smem_bytes = max(launch.smem_bytes for launch in variant.launches(workload, config))
    return dataclasses.replace(
        binary, resources=dataclasses.replace(binary.resources, dynamic_smem_bytes=smem_bytes)
    )


def unavailable(language: Language) -> str | None:
    """Return why variants of a language cannot be compiled here, or None if they can."""
    try:
        if language == "cuda":
            from tunebench.compile.nvrtc import nvrtc_version

            nvrtc_version()
        elif language == "numba-cuda":
            from tunebench.compile.numba_cuda import numba_cuda_versions

            numba_cuda_versions()
    except MissingDependency as error:
        return str(error)
    return None
