"""Compile a configuration, or load it from the cache, and bind it to a workload on a device."""

from __future__ import annotations

from typing import Any

from tunebench.compile import compile_config
from tunebench.device import Device
from tunebench.dispatch.cpu import LibraryKernel, bind_cpu
from tunebench.dispatch.gpu import GpuKernel
from tunebench.dispatch.kernel import BoundKernel, cache
from tunebench.errors import InputError
from tunebench.space import Config
from tunebench.variant import GpuVariant, LibraryVariant, NumbaCpuVariant, Variant
from tunebench.workload import Workload

__all__ = ["bind"]


def bind(
    workload: Workload, variant: Variant[Any], config: Config, device: Device, *, ordinal: int = 0
) -> BoundKernel:
    """Compile a configuration, or load it from the cache, and return a kernel that can be called.

    Args:
        workload: The workload.
        variant: A variant that supports it.
        config: A valid point of the variant's space.
        device: This machine's processor, or one of its GPUs.
        ordinal: Index of the GPU, in the driver's order.

    Raises:
        InputError: if the variant does not support the workload on the device, or the configuration is
            invalid.
        CompileError: if it does not compile.
        MissingDependency: if the compiler or the launcher is not installed.
    """
    reason = variant.refuses(workload, device)
    if reason is not None:
        raise InputError(reason)
    valid = variant.space.check(config, workload=workload, device=device)
    if isinstance(variant, NumbaCpuVariant):
        return bind_cpu(workload, variant, valid)
    if isinstance(variant, LibraryVariant):
        return LibraryKernel(workload, variant, valid)
    if isinstance(variant, GpuVariant):
        binary = compile_config(variant, workload, valid, device, cache())
        return GpuKernel(workload, variant, valid, binary, ordinal)
    raise InputError(
        f"{variant.key} must derive from CudaVariant, NumbaCudaVariant, TritonVariant, NumbaCpuVariant or "
        "LibraryVariant"
    )
