"""Kernels that compute the float64 reference of their workload, so that tests of graphs compile nothing."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tunebench import kernels
from tunebench.dispatch import BoundKernel, KernelChoice
from tunebench.dispatch.choice import BoundChoice, Dispatcher
from tunebench.dtype import numpy_dtype
from tunebench.space import Config
from tunebench.workload import Workload

__all__ = ["ReferenceKernel", "forgotten_kernels", "reference_kernels"]


class ReferenceKernel(BoundKernel):
    """A kernel of any workload, in NumPy."""

    def run(self, *tensors: Any, **how: Any) -> None:
        """Compute the reference of the inputs and round it to the types of the outputs."""
        count = len(self.tensors) - len(self.outputs)
        inputs = {
            spec.name: np.asarray(
                given if not spec.shape else given.view(numpy_dtype(spec.dtype)), np.float64
            )
            for spec, given in zip(self.tensors[:count], tensors[:count], strict=True)
        }
        results = self.workload.reference(inputs)
        for spec, written in zip(self.outputs, tensors[count:], strict=True):
            written.view(numpy_dtype(spec.dtype))[...] = results[spec.name].value.reshape(spec.shape)


@contextlib.contextmanager
def reference_kernels() -> Iterator[set[Workload]]:
    """Run every workload by its reference; yield the workloads that ran."""
    ran: set[Workload] = set()

    def bound_choice(self: Dispatcher, preferred: Any = None) -> BoundChoice:
        ran.add(self.workload)
        return bound(self.workload)

    @functools.cache
    def bound(workload: Workload) -> BoundChoice:
        variant = kernels.variants(workload)[0]
        config = Config({})
        choice = KernelChoice(workload=workload, reason="reference", variant=variant, config=config)
        return BoundChoice(0, choice, ReferenceKernel(workload, variant, config))

    with pytest.MonkeyPatch.context() as patch, forgotten_kernels():
        patch.setattr(Dispatcher, "bound_choice", bound_choice)
        yield ran


@contextlib.contextmanager
def forgotten_kernels() -> Iterator[None]:
    """Forget the kernels that compiled models ran before and within the context."""
    from tunebench.torch.compiler import _kernel_operator

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_kernel_operator, "_checked", set())
        _kernel_operator._call.cache_clear()
        yield
        _kernel_operator._call.cache_clear()
