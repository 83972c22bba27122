"""elementwise by NumPy and by torch: one operation after the other, as in a program without fusion."""

from __future__ import annotations

from tunebench.expression import Name
from tunebench.libraries import LibraryCall, Tensors, single, torch_type
from tunebench.libraries._expression import Library, numpy_library, spread, torch_library
from tunebench.workloads.operators.elementwise import Elementwise

__all__ = ["numpy_call", "torch_calls"]


def numpy_call(workload: Elementwise, inputs: Tensors) -> LibraryCall | None:
    """Return NumPy's program, or None for erf and gelu, which NumPy lacks."""
    library = numpy_library(workload.tree)
    return None if library is None else _program(workload, single(inputs), library)


def torch_calls(workload: Elementwise, t: Tensors) -> dict[str, LibraryCall]:
    """Return torch's program, which rounds each step to the type of its inputs."""
    out = torch_type(workload.out)
    call = _program(workload, t, torch_library(t[workload.whole_names[0]].device))
    if workload.out == workload.dtype == workload.vector_dtype:
        return {"torch": call}
    return {"torch": lambda: call().to(out)}


def _program(workload: Elementwise, tensors: Tensors, library: Library) -> LibraryCall:
    """Return a function that computes the expression; a plain copy adds 0."""
    if isinstance(workload.tree, Name):
        (name,) = workload.whole_names
        return lambda: tensors[name] + library.number(0)
    return library.function(workload.tree, spread(workload, tensors))
