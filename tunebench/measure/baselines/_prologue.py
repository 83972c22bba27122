"""Prologues of a product by NumPy and by torch: expressions of the left operand, written to memory first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tunebench._lazy import np
from tunebench.dtype import numpy_dtype, storage
from tunebench.expression import parse, steps
from tunebench.measure.baselines._expression import (
    Operations,
    numpy_operations,
    program,
    torch_operations,
    values,
)
from tunebench.workloads.operators._activation import IDENTITY
from tunebench.workloads.operators._prologue import PREFIX, vectors

if TYPE_CHECKING:
    from tunebench.workload import Array

__all__ = ["numpy_prologue", "torch_prologue"]


def numpy_prologue(
    workload: Any, tensors: Mapping[str, Array], shape: Sequence[int]
) -> Callable[[], Array] | None:
    """Return a function that computes the left operand in f32, rounded to its type; None if NumPy cannot.

    Args:
        workload: A workload with `pre` and `dtype`.
        tensors: All inputs, in f32.
        shape: Shape of scale and shift that broadcasts over the operand.
    """
    operand = tensors[workload.inputs()[0].name]
    operations = numpy_operations()
    if any(step.operation not in operations for step in steps(parse(workload.pre))):
        return None
    if workload.pre == IDENTITY:
        return lambda: operand
    run = _program(workload, tensors, shape, operations, np.float32)
    stored = storage(workload.dtype)
    if stored == "f32":
        return run
    return lambda: run().astype(numpy_dtype(stored)).astype(np.float32)


def torch_prologue(workload: Any, tensors: Mapping[str, Any], shape: Sequence[int]) -> Callable[[], Any]:
    """Return a function that computes the left operand; torch rounds each step to its type.

    Args:
        workload: A workload with `pre`.
        tensors: All inputs, as the product takes them.
        shape: Shape of scale and shift that broadcasts over the operand.
    """
    operand = tensors[workload.inputs()[0].name]
    if workload.pre == IDENTITY:
        return lambda: operand
    return _program(workload, tensors, shape, torch_operations(operand.device), float)


def _program(
    workload: Any,
    tensors: Mapping[str, Any],
    shape: Sequence[int],
    operations: Operations,
    number: Callable[[float], Any],
) -> Callable[[], Any]:
    leaves, run = program(parse(workload.pre), operations)
    known = {name: tensors[PREFIX + name].reshape(shape) for name in vectors(workload.pre)}
    given = values(leaves, {"x": tensors[workload.inputs()[0].name], **known}, number)
    return lambda: run(given)
