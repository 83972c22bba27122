"""Kernels that compute the float64 reference of their workload, so that tests of graphs compile nothing."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tunebench import kernels
from tunebench.device import Device
from tunebench.dispatch import BoundKernel, KernelChoice, choice
from tunebench.dispatch.choice import BoundChoice, Dispatcher
from tunebench.dtype import bits_dtype, numpy_dtype
from tunebench.errors import InputError
from tunebench.space import Config
from tunebench.variant import Variant
from tunebench.workload import Tensor, Workload

__all__ = ["ReferenceKernel", "forgotten_kernels", "reference_bindings", "reference_kernels"]


class ReferenceKernel(BoundKernel):
    """A kernel of any workload, in NumPy."""

    def run(self, *tensors: Any, **options: Any) -> None:
        """Compute the reference of the inputs and round it to the types of the outputs.

        Compiled code would read arrays of another shape, type or layout out of bounds: they are refused.
        """
        arrays = [_typed(spec, tensor) for spec, tensor in zip(self.tensors, tensors, strict=True)]
        count = len(self.tensors) - len(self.outputs)
        # Kernels round NaN of a generated module silently, and skip what lies between the elements of a
        # strided tensor, where nothing was written.
        with np.errstate(invalid="ignore"):
            inputs = {
                spec.name: np.asarray(array, np.float64)
                for spec, array in zip(self.tensors[:count], arrays[:count], strict=True)
            }
            results = self.workload.reference(inputs)
            for spec, output in zip(self.outputs, arrays[count:], strict=True):
                output[...] = results[spec.name].value.reshape(spec.shape)


def _typed(spec: Tensor, array: Any) -> Any:
    """Return an array in the type of its tensor, of which compiled code reads 16-bit floats as integers."""
    if not spec.shape:
        return array
    stored = bits_dtype(spec.dtype)
    assert (array.shape, array.dtype) == (spec.shape, stored), f"{spec} from {array.shape} {array.dtype}"
    assert array.flags.c_contiguous, f"{spec} is strided"
    return array.view(numpy_dtype(spec.dtype))


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
        made = KernelChoice(workload=workload, reason="reference", variant=variant, config=config)
        return BoundChoice(0, made, ReferenceKernel(workload, variant, config))

    with pytest.MonkeyPatch.context() as patch, forgotten_kernels():
        patch.setattr(Dispatcher, "bound_choice", bound_choice)
        yield ran


@contextlib.contextmanager
def reference_bindings() -> Iterator[None]:
    """Choose variants and configurations as usual, and run the reference in place of what they compile to."""

    def bind(
        workload: Workload, variant: Variant[Any], config: Config, device: Device, *, ordinal: int = 0
    ) -> BoundKernel:
        if (reason := variant.refuses(workload, device)) is not None:
            raise InputError(reason)
        valid = variant.space.check(config, workload=workload, device=device)
        return ReferenceKernel(workload, variant, valid)

    with pytest.MonkeyPatch.context() as patch, forgotten_kernels():
        _forget_bindings()
        patch.setattr(choice, "bind", bind)
        yield
        _forget_bindings()


def _forget_bindings() -> None:
    """Bind every kernel again at its next use, although its choice is the same."""
    for dispatcher in choice._dispatchers.values():
        dispatcher._made.clear()


@contextlib.contextmanager
def forgotten_kernels() -> Iterator[None]:
    """Forget the kernels that compiled models ran before and within the context."""
    from tunebench.torch.compiler import _kernel_operator

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_kernel_operator, "_checked", set())
        _kernel_operator._call.cache_clear()
        yield
        _kernel_operator._call.cache_clear()
