"""A fused group as one call, run by tuned kernels or by torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

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
    ) -> None:
        self.__name__, self.group, self.comparison = name, group, comparison
        self._kernels, self._count = tuple(kernels), len(region.outputs)
        # A single kernel was measured against torch; several kernels, or those compared, are chosen together.
        self._is_weighed = comparison is not None or len(kernels) > 1
        self.by_torch = region.module.forward
        self.keeps_inputs, self.last_inputs = False, tuple[Tensor, ...]()

    def __call__(self, *given: Tensor) -> Any:
        """Run the group on the tensors that its nodes read."""
        if self.keeps_inputs:
            self.last_inputs = given
        comparison, made = self.comparison, self._choices()
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
        return is_lost or any(one.kernel is None for one in made)

    def _report(self, made: Sequence[BoundChoice]) -> None:
        """Report the implementation of each workload to watchers."""
        for kernel, one in zip(self._kernels, made, strict=True):
            if self.comparison is not None and self.comparison.winner == "torch" and one.kernel is not None:
                reason = f"in this model torch takes {self.comparison.ratio:.2f} times as long"
                lost = KernelChoice(workload=kernel.dispatcher.workload, reason=reason)
                kernel.dispatcher.notify(BoundChoice(one.generation, lost, None))
            else:
                kernel.dispatcher.notify(one)

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
