"""Compilation of a variant's configuration to a binary, for every language of variants.

`compile_config` is the entry point. To run a kernel without a GPU see `tunebench.emulate`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tunebench._environment import carried_folder
from tunebench.binary.compiled import Binary, CompileError
from tunebench.compile.cache import BinaryCache
from tunebench.device import Device
from tunebench.errors import InputError, MissingDependency
from tunebench.space import Config
from tunebench.variant import (
    CudaVariant,
    Language,
    LibraryVariant,
    NumbaCpuVariant,
    NumbaCudaVariant,
    TritonVariant,
    Variant,
)
from tunebench.workload import Workload

CompiledForGpu = CudaVariant[Any] | NumbaCudaVariant[Any] | TritonVariant[Any]

__all__ = ["Binary", "BinaryCache", "CompileError", "carried_key", "compile_config", "unavailable"]


def compile_config(
    variant: Variant[Any], workload: Workload, config: Config, device: Device, cache: BinaryCache
) -> Binary:
    """Compile one configuration, or return its binary from the folder of carried binaries or from the cache.

    Args:
        variant: The kernel variant; its base class selects the compiler.
        workload: The workload to compile for.
        config: A valid point of the variant's space.
        device: The target; it need not be on this machine.
        cache: Binaries by what reached the compiler.

    Returns:
        The binary, with the dynamic shared memory that this workload's launches request.

    Raises:
        CompileError: The compiler rejected the source.
        MissingDependency: The compiler is not installed, or does not work with the other packages.
    """
    if isinstance(variant, NumbaCpuVariant):
        from tunebench.compile.numba_cpu import compile_numba_cpu, key_numba_cpu

        key = key_numba_cpu(variant, workload, config)
        return cache.get_or_compile(key, lambda: compile_numba_cpu(variant, workload, config))
    if isinstance(variant, LibraryVariant):
        return _of_library(variant, workload, config)
    if not isinstance(variant, CudaVariant | NumbaCudaVariant | TritonVariant):
        raise InputError(
            "expected a subclass of CudaVariant, NumbaCudaVariant, TritonVariant, NumbaCpuVariant, "
            f"LibraryCpuVariant or LibraryGpuVariant, got {variant.key} ({type(variant).__name__})"
        )
    binary = _carried(variant, workload, config, device)
    if binary is None:
        binary = _compiled(variant, workload, config, device, cache)
    if isinstance(variant, TritonVariant):
        return binary  # its compiler decides the shared memory
    # Workloads share binaries, but may request different amounts of dynamic shared memory at launch.
    smem_bytes = max(launch.smem_bytes for launch in variant.launches(workload, config))
    return dataclasses.replace(
        binary, resources=dataclasses.replace(binary.resources, dynamic_smem_bytes=smem_bytes)
    )


def _of_library(variant: LibraryVariant[Any], workload: Workload, config: Config) -> Binary:
    """Return a binary without machine code: the library has it."""
    package, version = variant.package(config), variant.version(config)
    if version is None:
        raise InputError(f"{variant.key} with {config} needs {package}, which is not installed")
    return Binary(
        key=variant.revision(workload, config),
        language=variant.language,
        target=f"{package} {version}",
        payload=b"",
    )


def _compiled(
    variant: CompiledForGpu, workload: Workload, config: Config, device: Device, cache: BinaryCache
) -> Binary:
    """Compile a configuration for a GPU, or return its binary from the cache."""
    if isinstance(variant, CudaVariant):
        from tunebench.compile.nvrtc import compile_cuda, key_cuda

        key = key_cuda(variant, workload, config, device)
        return cache.get_or_compile(key, lambda: compile_cuda(variant, workload, config, device))
    if isinstance(variant, TritonVariant):
        from tunebench.compile.triton import compile_triton, key_triton

        key = key_triton(variant, workload, config, device)
        return cache.get_or_compile(key, lambda: compile_triton(variant, workload, config, device))
    from tunebench.compile.numba_cuda import compile_numba_cuda, key_numba_cuda

    key = key_numba_cuda(variant, workload, config, device)
    return cache.get_or_compile(key, lambda: compile_numba_cuda(variant, workload, config, device))


def _carried(variant: CompiledForGpu, workload: Workload, config: Config, device: Device) -> Binary | None:
    """Return the carried binary of a configuration, whatever version of the compiler made it, or None."""
    folder = carried_folder()
    return None if folder is None else BinaryCache(folder).get(carried_key(variant, workload, config, device))


def carried_key(variant: CompiledForGpu, workload: Workload, config: Config, device: Device) -> str:
    """Return the key under which a binary is carried to a machine with another compiler.

    It hashes the source, the flags and the architecture, but not the version of the compiler.

    Args:
        variant: The kernel variant.
        workload: The workload to compile for.
        config: A valid point of the variant's space.
        device: The target; only its architecture counts.
    """
    if isinstance(variant, CudaVariant):
        from tunebench.compile.nvrtc import carried_key_cuda

        return carried_key_cuda(variant, workload, config, device)
    if isinstance(variant, TritonVariant):
        from tunebench.compile.triton import carried_key_triton

        return carried_key_triton(variant, workload, config, device)
    from tunebench.compile.numba_cuda import carried_key_numba_cuda

    return carried_key_numba_cuda(variant, workload, config, device)


def unavailable(language: Language) -> str | None:
    """Return why variants of a language cannot be compiled on this machine, or None if they can.

    The first call for a language compiles a small kernel with its compiler.
    """
    try:
        if language == "cuda":
            from tunebench.compile.nvrtc import require_nvrtc

            require_nvrtc()
        elif language == "numba-cuda":
            from tunebench.compile.numba_cuda import require_numba_cuda

            require_numba_cuda()
        elif language == "triton":
            from tunebench.compile.triton import require_triton

            require_triton()
    except MissingDependency as error:
        return str(error)
    return None
