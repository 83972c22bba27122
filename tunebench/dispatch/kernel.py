"""A compiled configuration with the arguments of one workload, called with tensors by position."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from tunebench._environment import cache_folder
from tunebench.compile import BinaryCache
from tunebench.errors import InputError
from tunebench.space import Config
from tunebench.variant import Variant
from tunebench.workload import Tensor, Workload

__all__ = ["BoundKernel", "cache"]


class BoundKernel(ABC):
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


def cache() -> BinaryCache:
    """Return the cache of binaries that tuning has filled."""
    return BinaryCache(cache_folder() / "binaries")
