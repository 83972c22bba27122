"""reduction by NumPy and by torch: the expression, the reduction, the expression of its result, in turn."""

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
from tunebench.workloads.operators.reduction import Reduction

if TYPE_CHECKING:
    from tunebench.workload import Array

__all__ = ["numpy_call", "torch_calls"]

Tensors = Mapping[str, Any]


def numpy_call(workload: Reduction, inputs: Mapping[str, Array]) -> BaselineCall | None:
    """Return NumPy's program, or None for erf and gelu, which NumPy lacks."""
    operations = numpy_operations()
    if any(step.operation not in operations for step in (*steps(workload.tree), *steps(workload.end))):
        return None
    reduce, axis = getattr(np, workload.reduce), _axis(workload)
    return _program(workload, single(inputs), operations, np.float32, lambda x: reduce(x, axis=axis))


def torch_calls(workload: Reduction, t: Tensors) -> dict[str, BaselineCall]:
    """Return torch's program, which rounds each step to the type of the inputs and sums in f32."""
    import torch

    reduce = {"max": torch.amax, "min": torch.amin}.get(workload.reduce) or getattr(torch, workload.reduce)
    axis, out = _axis(workload), torch_type(workload.out)
    operations = torch_operations(t[workload.whole_names[0]].device)
    call = _program(workload, t, operations, float, lambda x: reduce(x, dim=axis))
    if workload.out == workload.dtype:
        return {"torch": call}
    return {"torch": lambda: call().to(out)}


def _axis(workload: Reduction) -> int:
    return 1 if workload.axis == "cols" else 0


def _program(
    workload: Reduction,
    tensors: Tensors,
    operations: Operations,
    number: Callable[[float], Any],
    reduce: Callable[[Any], Any],
) -> BaselineCall:
    leaves, elements = program(workload.tree, operations)
    given = values(leaves, spread(workload, tensors), number)
    ends, finish = program(workload.end, operations)
    last, at = values(ends, {"x": None}, number), ends.index(Name("x"))

    def run() -> Any:
        return finish([*last[:at], reduce(elements(given)), *last[at + 1 :]])

    return run
