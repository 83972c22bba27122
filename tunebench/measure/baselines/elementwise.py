"""elementwise by NumPy and by torch: one operation after the other, as in a program without fusion."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tunebench._lazy import np
from tunebench.expression import Name, steps
from tunebench.measure.baselines import BaselineCall, single, torch_type
from tunebench.measure.baselines._expression import (
    Operations,
    numpy_operations,
    program,
    spread,
    torch_operations,
    values,
)
from tunebench.workloads.operators.elementwise import Elementwise

if TYPE_CHECKING:
    from tunebench.workload import Array

__all__ = ["numpy_call", "torch_calls"]

Tensors = Mapping[str, Any]


def numpy_call(workload: Elementwise, inputs: Mapping[str, Array]) -> BaselineCall | None:
    """Return NumPy's program, or None for erf and gelu, which NumPy lacks."""
    numpy_has = numpy_operations()
    if any(step.operation not in numpy_has for step in steps(workload.tree)):
        return None
    return _program(workload, single(inputs), numpy_has, np.float32)


def torch_calls(workload: Elementwise, t: Tensors) -> dict[str, BaselineCall]:
    """Return torch's program, which rounds each step to the type of its inputs."""
    out = torch_type(workload.out)
    call = _program(workload, t, torch_operations(t[workload.whole_names[0]].device), float)
    if workload.out == workload.dtype == workload.vector_dtype:
        return {"torch": call}
    return {"torch": lambda: call().to(out)}


def _program(
    workload: Elementwise, tensors: Tensors, operations: Operations, number: Callable[[float], Any]
) -> BaselineCall:
    """Return a function that computes the expression; a plain copy adds 0."""
    if isinstance(workload.tree, Name):
        (name,) = workload.whole_names
        return lambda: tensors[name] + number(0)
    leaves, run = program(workload.tree, operations)
    given = values(leaves, spread(workload, tensors), number)
    return lambda: run(given)
