"""A compiled configuration with the arguments of one workload, called with tensors by position."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from typing import Any

from tunebench._environment import binary_folder
from tunebench.compile import BinaryCache
from tunebench.errors import InputError
from tunebench.space import Config
from tunebench.variant import Variant
from tunebench.workload import Tensor, Workload

__all__ = ["BoundKernel", "cache"]

SMALL_BYTES, SMALL_FLOPS = 2**16, 2**20
"""Kernels with at most this traffic and these operations run on one thread: waking others takes longer.

torch's own limit is 32,768 elements (`at::internal::GRAIN_SIZE`).
"""


class BoundKernel(ABC):
    """A compiled and loaded configuration for one workload.

    It is called with the inputs, then the outputs of the workload, by position and in the workload's layout.
    Thread-safe.

    Attributes:
        workload: The workload.
        variant: The variant.
        config: Its configuration.
        outputs: Tensors that it writes.
        tensors: Tensors that it is called with, in order.
    """

    def __init__(self, workload: Workload, variant: Variant[Any], config: Config) -> None:
        self.workload, self.variant, self.config = workload, variant, config
        self.outputs: tuple[Tensor, ...] = workload.outputs()
        self.tensors: tuple[Tensor, ...] = (*workload.inputs(), *self.outputs)

    def __repr__(self) -> str:
        return f"<kernel of {self.variant.key} with {self.config} for {self.workload}>"

    @functools.cached_property
    def is_small(self) -> bool:
        """Whether one thread of a CPU runs the kernel as fast as several."""
        traffic_bytes = self.workload.traffic().total_bytes
        return traffic_bytes <= SMALL_BYTES and self.workload.flops() <= SMALL_FLOPS

    @abstractmethod
    def run(self, *tensors: Any, **options: Any) -> None:
        """Run on tensors that match the workload; nothing is checked."""

    def _count(self, count: int) -> None:
        if count != len(self.tensors):
            names = ", ".join(tensor.name for tensor in self.tensors)
            raise InputError(
                f"{self.workload.operator} expects {len(self.tensors)} tensors ({names}), got {count}"
            )


def cache() -> BinaryCache:
    """Return the cache of compiled binaries."""
    return BinaryCache(binary_folder())
