"""reduction by NumPy and by torch: the expression, the reduction, the expression of its result, in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tunebench._lazy import np
from tunebench.libraries import LibraryCall, Tensors, single, torch_type
from tunebench.libraries._expression import Library, numpy_library, spread, torch_library
from tunebench.workloads.operators.reduction import Reduction

__all__ = ["numpy_call", "torch_calls"]


def numpy_call(workload: Reduction, inputs: Tensors) -> LibraryCall | None:
    """Return NumPy's program, or None for erf and gelu, which NumPy lacks."""
    library = numpy_library(workload.tree, workload.end)
    if library is None:
        return None
    reduce, axis = getattr(np, workload.reduce), _axis(workload)
    return _program(workload, single(inputs), library, lambda x: reduce(x, axis=axis))


def torch_calls(workload: Reduction, t: Tensors) -> dict[str, LibraryCall]:
    """Return torch's program, which rounds each step to the type of the inputs and sums in f32."""
    import torch

    reduce = {"max": torch.amax, "min": torch.amin}.get(workload.reduce) or getattr(torch, workload.reduce)
    axis, out = _axis(workload), torch_type(workload.out)
    library = torch_library(t[workload.whole_names[0]].device)
    call = _program(workload, t, library, lambda x: reduce(x, dim=axis))
    if workload.out == workload.dtype:
        return {"torch": call}
    return {"torch": lambda: call().to(out)}


def _axis(workload: Reduction) -> int:
    return 1 if workload.axis == "cols" else 0


def _program(
    workload: Reduction, tensors: Tensors, library: Library, reduce: Callable[[Any], Any]
) -> LibraryCall:
    elements = library.function(workload.tree, spread(workload, tensors))
    finish = library.function(workload.end, {})
    return lambda: finish(reduce(elements()))
