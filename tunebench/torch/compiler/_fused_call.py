"""A fused group as one call, run by tuned kernels or by torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef

from tunebench.dispatch import Dispatcher, LibraryKernel, Preference
from tunebench.graph.group import FusedGroup
from tunebench.torch._tensor import library_results
from tunebench.torch.compiler._kernel_check import store_wrong_result, wrong_result
from tunebench.torch.compiler._kernel_operator import KEEPS_PRIMITIVES, layouts_of, run_kernel
from tunebench.torch.compiler._region import GroupRegion, KernelInput, KernelOutput

__all__ = ["FusedCall", "GroupKernel"]


@dataclass(frozen=True, slots=True)
class GroupKernel:
    """A workload of a group, and the tensors that its kernel reads and writes.

    Attributes:
        dispatcher: Dispatcher of the workload.
        inputs: The tensors that it reads.
        outputs: The tensors that it writes.
        layouts: Their shapes, strides and types.
    """

    dispatcher: Dispatcher
    inputs: tuple[KernelInput, ...]
    outputs: tuple[KernelOutput, ...]
    layouts: str

    @property
    def library(self) -> LibraryKernel | None:
        """The call of a library that compiled graphs contain in place of a call of the kernel."""
        kernel = self.dispatcher.bound_choice("tunebench").kernel
        return (
            kernel if KEEPS_PRIMITIVES and isinstance(kernel, LibraryKernel) and kernel.is_traceable else None
        )

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the outputs as kernels write them."""
        library = self.library
        if library is None:
            return run_kernel(inputs, str(self.dispatcher.workload), self.layouts)
        read, written = layouts_of(self.layouts)
        laid_out = [spec.flat(spec.read(tensor)) for spec, tensor in zip(read, inputs, strict=True)]
        results = library_results(library, laid_out)
        assert results is not None
        return [spec.view(result) for spec, result in zip(written, results, strict=True)]


class FusedCall:
    """A group as a function of tensors, by tuned kernels.

    The function calls operators of torch only, so that it can be traced.

    Attributes:
        group: The group.
        region: Its nodes in the traced graph.
        kernels: Its workloads, in the order in which they run.
        limits: Number of valid indices, by the FX node of the indices.
        by: Which implementation runs the group in the compiled model.
        reason: Why torch runs it; empty if kernels do.
    """

    def __init__(
        self,
        group: FusedGroup,
        name: str,
        kernels: Sequence[GroupKernel],
        region: GroupRegion,
        limits: Mapping[fx.Node, int],
    ) -> None:
        self.__name__, self.group, self.region = name, group, region
        self.kernels, self._count = tuple(kernels), len(region.outputs)
        self.limits = limits
        self.by: Literal["tunebench", "torch"] = "tunebench"
        self.reason = ""

    def __call__(self, *tensors: Tensor) -> Any:
        """Run the group by tuned kernels on the tensors that its nodes read."""
        results: list[Any] = [None] * self._count
        values = list(tensors)
        for kernel in self.kernels:
            read = [read(values) for read in kernel.inputs]
            written = kernel.run(read)
            for output, tensor in zip(kernel.outputs, written, strict=True):
                if output.is_intermediate:
                    values.append(tensor)
                if output.place is not None:
                    results[output.place] = output.expected(tensor)
        return results[0] if self._count == 1 else tuple(results)

    def by_torch(self, *tensors: Tensor) -> Any:
        """Run the group by torch, operation by operation."""
        return self.region.module(*tensors)

    def leave_to_torch(self, reason: str) -> None:
        """Note that torch runs the group in the compiled model."""
        self.by, self.reason = "torch", reason

    @property
    def inlined(self) -> tuple[GroupKernel, ...]:
        """Workloads whose library the compiled graph calls by itself."""
        kernels = self.kernels if self.by == "tunebench" else ()
        return tuple(kernel for kernel in kernels if kernel.library is not None)

    def missing_kernel(self, preferred: Preference) -> str:
        """Return why no kernel runs a workload of the group; empty if kernels run all.

        Args:
            preferred: Which kernels to prefer. With `faster`, the kernel of a group of one workload must be
                known to be faster than torch; a group of several was compared with torch as a whole.
        """
        if preferred == "faster" and len(self.kernels) > 1:
            preferred = "tunebench"
        made = [kernel.dispatcher.bound_choice(preferred) for kernel in self.kernels]
        return next((choice.choice.reason for choice in made if choice.kernel is None), "")

    def store_wrong_kernels(self) -> None:
        """Store in the database which kernels of the group compute wrong results by themselves."""
        device = self.region.inputs[0].meta["val"].device
        for kernel in self.kernels:
            bound = kernel.dispatcher.bound_choice("tunebench").kernel
            if bound is not None and (reason := wrong_result(bound, device)):
                store_wrong_result(bound, kernel.dispatcher.device, reason)

    def drawn_inputs(self, draw: Callable[..., Tensor] = torch.randn) -> list[Tensor]:
        """Return random tensors with the strides of the group's inputs; views of one tensor share memory.

        Indices in memory are valid, and other integers are 0 or 1.

        Args:
            draw: Draws numbers: `torch.randn` or `torch.rand`.
        """
        memories: dict[Any, Tensor] = {}
        drawn = []
        valid: dict[Any, int] = {}
        for node, limit in self.limits.items():
            storage = StorageWeakRef(node.meta["val"].untyped_storage())
            valid[storage] = min(limit, valid.get(storage, limit))
        for traced in (node.meta["val"] for node in self.region.inputs):
            storage = StorageWeakRef(traced.untyped_storage())
            key = (storage, traced.dtype)
            if key not in memories:
                memories[key] = _memory(traced, draw, valid.get(storage, 2))
            shape, strides = traced.shape, traced.stride()
            drawn.append(memories[key].as_strided(shape, strides, traced.storage_offset()))
        return drawn


def _memory(traced: Tensor, draw: Callable[..., Tensor], limit: int) -> Tensor:
    """Return random numbers that fill the memory of a traced tensor; integers below a limit."""
    count = traced.untyped_storage().nbytes() // traced.element_size()
    if traced.is_floating_point():
        return draw(count, device=traced.device).to(traced.dtype)
    return torch.randint(0, limit, (count,), device=traced.device).to(traced.dtype)
