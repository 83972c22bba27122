"""A fused group as one call, run by tuned kernels or by torch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from tunebench.dispatch import Dispatcher, KernelChoice, preference
from tunebench.dispatch.choice import BoundChoice
from tunebench.dispatch.watch import is_watched
from tunebench.graph.group import FusedGroup
from tunebench.torch._tensor import launch
from tunebench.torch.compiler._region import GroupRegion, KernelInput, KernelOutput
from tunebench.torch.compiler._torch_comparison import TorchComparison

__all__ = ["FusedCall", "GroupKernel"]


@dataclass(frozen=True, slots=True)
class GroupKernel:
    """A workload of a group, and how to obtain its tensors."""

    dispatcher: Dispatcher
    inputs: tuple[KernelInput, ...]
    outputs: tuple[KernelOutput, ...]


class FusedCall:
    """A group, run by tuned kernels where they are known to be faster, else by torch.

    Attributes:
        group: The group.
        by_torch: Runs the group by torch.
        comparison: Comparison with torch inside the model, if there is one.
        mismatch: How the results of the kernels differ from torch's; empty if no check found a difference.
        last_inputs: Inputs of the last call, if `keeps_inputs` is true.
        keeps_inputs: Whether to keep the inputs of the last call.
    """

    def __init__(
        self,
        group: FusedGroup,
        name: str,
        kernels: Sequence[GroupKernel],
        region: GroupRegion,
        comparison: TorchComparison | None,
        *,
        check: bool = False,
    ) -> None:
        self.__name__, self.group, self.comparison = name, group, comparison
        self._kernels, self._count = tuple(kernels), len(region.outputs)
        # A single kernel was measured against torch; several kernels, or those compared, are chosen together.
        self._is_weighed = comparison is not None or len(kernels) > 1
        self.by_torch = region.module.forward
        self.keeps_inputs, self.last_inputs = False, tuple[Tensor, ...]()
        self.mismatch, self._is_unchecked = "", check

    def __call__(self, *given: Tensor) -> Any:
        """Run the group on the tensors that its nodes read."""
        if self.keeps_inputs:
            self.last_inputs = given
        comparison, made = self.comparison, self._choices()
        if self._is_unchecked and not self._is_run_by_torch(made):
            self._check(made, given)
        if is_watched():
            self._report(made)
        if self._is_run_by_torch(made):
            return self.by_torch(*given)
        if comparison is None or comparison.winner is not None:
            return self._by_kernels(made, given)
        return comparison.run(
            given[0].device, lambda: self._by_kernels(made, given), lambda: self.by_torch(*given)
        )

    @property
    def by(self) -> Literal["tunebench", "torch"]:
        """Which implementation runs the group now."""
        return "torch" if self._is_run_by_torch(self._choices()) else "tunebench"

    def _choices(self) -> list[BoundChoice]:
        preferred = preference()
        if preferred == "faster" and self._is_weighed:
            preferred = "tunebench"
        return [kernel.dispatcher.bound_choice(preferred) for kernel in self._kernels]

    def _is_run_by_torch(self, made: Sequence[BoundChoice]) -> bool:
        is_lost = self.comparison is not None and self.comparison.winner == "torch"
        return is_lost or bool(self.mismatch) or any(one.kernel is None for one in made)

    def _report(self, made: Sequence[BoundChoice]) -> None:
        """Report the implementation of each workload to watchers."""
        reason = self.mismatch
        if not reason and self.comparison is not None and self.comparison.winner == "torch":
            reason = f"in this model torch takes {self.comparison.ratio:.2f} times as long"
        for kernel, one in zip(self._kernels, made, strict=True):
            if reason and one.kernel is not None:
                lost = KernelChoice(workload=kernel.dispatcher.workload, reason=reason)
                kernel.dispatcher.notify(BoundChoice(one.generation, lost, None))
            else:
                kernel.dispatcher.notify(one)

    def _check(self, made: Sequence[BoundChoice], given: Sequence[Tensor]) -> None:
        """Compare the kernels with torch on random data with the strides of the inputs."""
        if given[0].is_cuda and torch.cuda.is_current_stream_capturing():
            return
        self._is_unchecked = False
        ours, by_torch, exact = self._results(made, _drawn(given, torch.randn))
        if not all(torch.isfinite(tensor).all() for tensor in exact):  # a root or a quotient of any number
            ours, by_torch, exact = self._results(made, _drawn(given, torch.rand))
        errors = [_excess(*tensors) for tensors in zip(ours, by_torch, exact, strict=True)]
        if max(errors, default=0.0) > 1:
            workloads = " and ".join(self.group.workloads)
            self.mismatch = f"its results differ from torch's by {max(errors):.3g} times the allowed error"
            warnings.warn(f"torch runs {workloads}: {self.mismatch}", stacklevel=3)

    def _results(self, made: Sequence[BoundChoice], given: Sequence[Tensor]) -> tuple[list[Tensor], ...]:
        """Return the results of the kernels, of torch, and of torch in float64 where it has the operators."""
        with torch.no_grad():
            ours, by_torch = _listed(self._by_kernels(made, given)), _listed(self.by_torch(*given))
            try:
                return ours, by_torch, _listed(self.by_torch(*map(_as_double, given)))
            except RuntimeError:
                return ours, by_torch, by_torch

    def _by_kernels(self, made: Sequence[BoundChoice], given: Sequence[Tensor]) -> Any:
        results: list[Any] = [None] * self._count
        known, device = list(given), given[0].device
        for kernel, one in zip(self._kernels, made, strict=True):
            written = [output.empty(device) for output in kernel.outputs]
            launch(one.kernel, [*(read(known) for read in kernel.inputs), *written])  # type: ignore[arg-type]
            for output, tensor in zip(kernel.outputs, written, strict=True):
                if output.is_intermediate:
                    known.append(tensor)
                if output.place is not None:
                    results[output.place] = output.expected(tensor)
        return results[0] if self._count == 1 else tuple(results)


def _drawn(tensors: Sequence[Tensor], draw: Callable[..., Tensor]) -> list[Tensor]:
    """Return random numbers in the place of tensors: the same strides, and shared memory where they share it.

    Tensors that are not floating-point are kept.
    """
    memories: dict[tuple[int, torch.dtype], Tensor] = {}
    drawn = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        key = (storage.data_ptr(), tensor.dtype)
        if tensor.is_floating_point() and key not in memories:
            count = storage.nbytes() // tensor.element_size()
            memories[key] = draw(count, device=tensor.device).to(tensor.dtype)
        memory = memories.get(key)
        drawn.append(
            tensor
            if memory is None
            else memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        )
    return drawn


def _as_double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _listed(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)


def _excess(ours: Tensor, by_torch: Tensor, exact: Tensor) -> float:
    """Return the error of a result as a multiple of the allowed error.

    The allowed error is 4 times torch's plus 64 roundings of the largest element. The error is infinite if
    the result is finite in other places than the exact one.
    """
    if not ours.is_floating_point():
        return 0.0 if torch.equal(ours, by_torch) else float("inf")
    rounding = torch.finfo(ours.dtype).eps
    ours, by_torch, exact = ours.double(), by_torch.double(), exact.double()
    is_finite = torch.isfinite(exact)
    if not torch.equal(torch.isfinite(ours), is_finite):
        return float("inf")
    ours, by_torch, exact = (torch.where(is_finite, tensor, 0.0) for tensor in (ours, by_torch, exact))
    allowed = 4 * (by_torch - exact).abs().max() + 64 * rounding * exact.abs().max()
    difference = (ours - exact).abs().max()
    return float(difference / allowed) if difference > 0 else 0.0
