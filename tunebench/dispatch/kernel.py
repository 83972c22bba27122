"""A configuration bound to a problem: what is called with tensors, by position."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from tunebench._environment import cache_folder
from tunebench.compile import BinaryCache, compile_config
from tunebench.device import Device
from tunebench.errors import InputError
from tunebench.space import Config
from tunebench.variant import GpuVariant, NumbaCpuVariant, Variant
from tunebench.workload import Tensor, Workload

__all__ = ["Kernel", "bind", "cache", "unusable"]


class Kernel(ABC):
    """One configuration, compiled and loaded, with the arguments of one problem.

    It takes the problem's inputs, then its outputs, by position, laid out as the workload says. Threads may
    share it.

    Attributes:
        workload: The problem.
        variant: The implementation.
        config: Its configuration.
        outputs: What it writes.
        tensors: What it is called with, in order.
    """

    def __init__(self, workload: Workload, variant: Variant[Any], config: Config) -> None:
        self.workload, self.variant, self.config = workload, variant, config
        self.outputs: tuple[Tensor, ...] = workload.outputs()
        self.tensors: tuple[Tensor, ...] = (*workload.inputs(), *self.outputs)

    def __repr__(self) -> str:
        return f"<kernel of {self.variant.key} with {self.config} for {self.workload}>"

    @abstractmethod
    def run(self, *tensors: Any, **how: Any) -> None:
        """Run it on tensors that are known to be as the workload says; nothing is checked."""

    def _count(self, given: int) -> None:
        if given != len(self.tensors):
            names = ", ".join(tensor.name for tensor in self.tensors)
            raise InputError(
                f"{self.workload.operator} takes {len(self.tensors)} tensors ({names}), not {given}"
            )


def bind(
    workload: Workload, variant: Variant[Any], config: Config, device: Device, *, ordinal: int = 0
) -> Kernel:
    """Compile a configuration, or take it from the cache, and load it.

    Args:
        workload: The problem.
        variant: An implementation that does not refuse it.
        config: A valid point of the variant's space.
        device: This machine's processor, or one of its GPUs.
        ordinal: Which of the GPUs, in the driver's order.

    Raises:
        InputError: if the variant cannot do the problem on the device, or the configuration is not valid.
        CompileError: if it does not compile.
        MissingDependency: if the compiler, or what launches, is not installed.
    """
    reason = variant.refuses(workload, device)
    if reason is not None:
        raise InputError(reason)
    valid = variant.space.check(config, workload=workload, device=device)
    if isinstance(variant, NumbaCpuVariant):
        from tunebench.dispatch.cpu import bind_cpu

        return bind_cpu(workload, variant, valid)
    if isinstance(variant, GpuVariant):
        from tunebench.dispatch.gpu import GpuKernel

        binary = compile_config(variant, workload, valid, device, cache())
        return GpuKernel(workload, variant, valid, binary, ordinal)
    raise InputError(f"{variant.key} must derive from CudaVariant, NumbaCudaVariant or NumbaCpuVariant")


def cache() -> BinaryCache:
    """Return the cache of binaries that tuning has filled."""
    return BinaryCache(cache_folder() / "binaries")


def unusable(device: Device) -> str | None:
    """Return why no kernel of ours may run in this process on a device, or None if it may."""
    if device.kind != "cpu":
        return None
    from tunebench.dispatch.cpu import forked

    return forked()
