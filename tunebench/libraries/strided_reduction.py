"""strided_reduction by NumPy and by torch: the expression, the reduction and `then`, one after the other."""

from __future__ import annotations

from tunebench._lazy import np
from tunebench.dtype import numpy_dtype
from tunebench.libraries import LibraryCall, Tensors, single, torch_type
from tunebench.libraries._expression import numpy_library, torch_library
from tunebench.libraries._strided import of_numpy, of_torch, program, torch_memory
from tunebench.workloads.operators.strided_reduction import StridedReduction

__all__ = ["numpy_call", "torch_calls"]


def numpy_call(workload: StridedReduction, inputs: Tensors) -> LibraryCall | None:
    """Return NumPy's program, or None for erf and gelu, which NumPy lacks."""
    library = numpy_library(workload.tree, workload.end)
    if library is None:
        return None
    compute = program(workload, single(inputs), library, of_numpy())
    finish, reduce, axes = library.function(workload.end, {}), getattr(np, workload.reduce), _axes(workload)
    stored = numpy_dtype(workload.dtype)

    def call() -> np.ndarray:
        elements = np.broadcast_to(compute(), workload.extents)
        return np.asarray(finish(reduce(elements, axis=axes)), stored).reshape(workload.kept)

    return call


def torch_calls(workload: StridedReduction, t: Tensors) -> dict[str, LibraryCall]:
    """Return torch's program, which rounds each step to the type of its operands and sums in f32."""
    import torch

    reduce = {"max": torch.amax, "min": torch.amin}.get(workload.reduce) or getattr(torch, workload.reduce)
    axes, out = _axes(workload), torch_type(workload.dtype)
    library = torch_library(next(iter(t.values())).device)
    compute = program(workload, torch_memory(t), library, of_torch())
    finish = library.function(workload.end, {})

    def call() -> torch.Tensor:
        elements = compute().expand(workload.extents)
        reduced: torch.Tensor = finish(reduce(elements, dim=axes)).to(out)
        return reduced.reshape(workload.kept)

    return {"torch": call}


def _axes(workload: StridedReduction) -> tuple[int, ...]:
    rank = len(workload.extents)
    return tuple(range(rank - workload.axes, rank))
