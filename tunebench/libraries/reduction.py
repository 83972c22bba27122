"""reduction by NumPy and by torch: the expression, the reduction, the expression of its result, in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tunebench._lazy import np
from tunebench.expression import Apply
from tunebench.libraries import LibraryCall, Tensors, single, torch_type
from tunebench.libraries._expression import Library, numpy_library, spread, torch_library
from tunebench.workloads.operators.reduction import Reduction

__all__ = ["numpy_call", "torch_call_into", "torch_calls"]


def numpy_call(workload: Reduction, inputs: Tensors) -> LibraryCall | None:
    """Return NumPy's program, or None for erf and gelu, which NumPy lacks."""
    library = numpy_library(workload.tree, workload.end)
    if library is None:
        return None
    reduce, axis = getattr(np, workload.reduce), _axis(workload)
    return _program(workload, single(inputs), library, lambda x: reduce(x, axis=axis))


def torch_calls(workload: Reduction, t: Tensors) -> dict[str, LibraryCall]:
    """Return torch's program, which rounds each step to the type of the inputs and sums in f32."""
    call = _torch_program(workload, t)
    if workload.out == workload.dtype:
        return {"torch": call}
    out = torch_type(workload.out)
    return {"torch": lambda: call().to(out)}


def torch_call_into(workload: Reduction, t: Tensors, out: Any) -> LibraryCall | None:
    """Return torch's program that overwrites and returns a tensor; None if another step follows the sum.

    Args:
        workload: The workload.
        t: A torch tensor for each input by name; a number for one of shape `()`.
        out: The tensor, in the shape of the output.
    """
    if workload.out != workload.dtype or isinstance(workload.end, Apply):
        return None
    return _torch_program(workload, t, out=out)


def _torch_program(workload: Reduction, t: Tensors, **into: Any) -> LibraryCall:
    import torch

    reduce = {"max": torch.amax, "min": torch.amin}.get(workload.reduce) or getattr(torch, workload.reduce)
    axis, library = _axis(workload), torch_library(t[workload.whole_names[0]].device)
    return _program(workload, t, library, lambda x: reduce(x, dim=axis, **into))


def _axis(workload: Reduction) -> int:
    return 1 if workload.axis == "cols" else 0


def _program(
    workload: Reduction, tensors: Tensors, library: Library, reduce: Callable[[Any], Any]
) -> LibraryCall:
    elements = library.function(workload.tree, spread(workload, tensors))
    finish = library.function(workload.end, {})
    return lambda: finish(reduce(elements()))
