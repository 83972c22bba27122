"""A group as one call: by kernels of ours, or by torch."""

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
    """A problem, and what its tensors are."""

    problem: Dispatcher
    inputs: tuple[KernelInput, ...]
    outputs: tuple[KernelOutput, ...]


class FusedCall:
    """A group, by kernels of ours where they are known to be faster, else by torch.

    Attributes:
        group: What it does.
        by_torch: The same by torch.
        trial: What finds out which is the faster, if it is found out here.
        seen: What it was last called with, if `keeps_inputs` is true.
        keeps: Whether to keep that.
    """

    def __init__(
        self,
        group: FusedGroup,
        name: str,
        kernels: Sequence[GroupKernel],
        region: GroupRegion,
        trial: TorchComparison | None,
    ) -> None:
        self.__name__, self.group, self.trial = name, group, trial
        self._kernels, self._count = tuple(kernels), len(region.outputs)
        # Kernels of one problem each are held against torch's; of several, and in a trial, all together are.
        self._is_weighed = trial is not None or len(kernels) > 1
        self.by_torch = region.module.forward
        self.keeps_inputs, self.last_inputs = False, tuple[Tensor, ...]()

    def __call__(self, *given: Tensor) -> Any:
        """Run it on the tensors that its nodes read."""
        if self.keeps_inputs:
            self.last_inputs = given
        trial, made = self.trial, self._choices()
        if is_watched():
            self._report(made)
        if self._is_run_by_torch(made):
            return self.by_torch(*given)
        if trial is None or trial.winner is not None:
            return self._by_kernels(made, given)
        return trial.run(
            given[0].device, lambda: self._by_kernels(made, given), lambda: self.by_torch(*given)
        )

    @property
    def by(self) -> Literal["tunebench", "torch"]:
        """Whose kernels run it now."""
        return "torch" if self._is_run_by_torch(self._choices()) else "tunebench"

    def _choices(self) -> list[BoundChoice]:
        preferred = preference()
        if preferred == "faster" and self._is_weighed:
            preferred = "tunebench"
        return [kernel.problem.bound_choice(preferred) for kernel in self._kernels]

    def _is_run_by_torch(self, made: Sequence[BoundChoice]) -> bool:
        is_lost = self.trial is not None and self.trial.winner == "torch"
        return is_lost or any(one.kernel is None for one in made)

    def _report(self, made: Sequence[BoundChoice]) -> None:
        """Tell watchers whose kernels run it."""
        for kernel, one in zip(self._kernels, made, strict=True):
            if self.trial is not None and self.trial.winner == "torch" and one.kernel is not None:
                reason = f"in this model torch takes {self.trial.ratio:.2f} times as long"
                lost = KernelChoice(workload=kernel.problem.workload, reason=reason)
                kernel.problem.notify(BoundChoice(one.generation, lost, None))
            else:
                kernel.problem.notify(one)

    def _by_kernels(self, made: Sequence[BoundChoice], given: Sequence[Tensor]) -> Any:
        results: list[Any] = [None] * self._count
        known, device = list(given), given[0].device
        for kernel, one in zip(self._kernels, made, strict=True):
            written = [output.empty(device) for output in kernel.outputs]
            launch(one.kernel, [*(tensor.of(known) for tensor in kernel.inputs), *written])  # type: ignore[arg-type]
            for output, tensor in zip(kernel.outputs, written, strict=True):
                if output.is_intermediate:
                    known.append(tensor)
                if output.place is not None:
                    results[output.place] = output.expected(tensor)
        return results[0] if self._count == 1 else tuple(results)
