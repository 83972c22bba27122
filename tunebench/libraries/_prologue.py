"""Prologues of a product by NumPy and by torch: expressions of the left operand, written to memory first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tunebench._lazy import np
from tunebench.dtype import numpy_dtype, storage
from tunebench.expression import parse
from tunebench.libraries import Tensors
from tunebench.libraries._expression import Library, numpy_library, torch_library
from tunebench.workloads.common.activation import IDENTITY
from tunebench.workloads.common.prologue import PREFIX, vectors

__all__ = ["numpy_prologue", "torch_prologue"]


def numpy_prologue(workload: Any, tensors: Tensors, shape: Sequence[int]) -> Callable[[], Any] | None:
    """Return a function that computes the left operand in f32, rounded to its type; None if NumPy cannot.

    Args:
        workload: A workload with `pre` and `dtype`.
        tensors: All inputs, in f32.
        shape: Shape of scale and shift that broadcasts over the operand.
    """
    if workload.pre == IDENTITY:
        return _unchanged(workload, tensors)
    library = numpy_library(parse(workload.pre))
    if library is None:
        return None
    run = _program(workload, tensors, shape, library)
    stored = storage(workload.dtype)
    if stored == "f32":
        return run
    return lambda: run().astype(numpy_dtype(stored)).astype(np.float32)


def torch_prologue(workload: Any, tensors: Tensors, shape: Sequence[int]) -> Callable[[], Any]:
    """Return a function that computes the left operand; torch rounds each step to its type.

    Args:
        workload: A workload with `pre`.
        tensors: All inputs, as the product takes them.
        shape: Shape of scale and shift that broadcasts over the operand.
    """
    if workload.pre == IDENTITY:
        return _unchanged(workload, tensors)
    device = tensors[workload.inputs()[0].name].device
    return _program(workload, tensors, shape, torch_library(device))


def _unchanged(workload: Any, tensors: Tensors) -> Callable[[], Any]:
    operand = tensors[workload.inputs()[0].name]
    return lambda: operand


def _program(workload: Any, tensors: Tensors, shape: Sequence[int], library: Library) -> Callable[[], Any]:
    operand = tensors[workload.inputs()[0].name]
    operands = {name: tensors[PREFIX + name].reshape(shape) for name in vectors(workload.pre)}
    return library.function(parse(workload.pre), {"x": operand, **operands})
