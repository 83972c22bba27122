"""strided_elementwise by NumPy and by torch: views and copies, then one operation after the other."""

from __future__ import annotations

from tunebench._lazy import np
from tunebench.dtype import numpy_dtype
from tunebench.libraries import LibraryCall, Tensors, single, torch_type
from tunebench.libraries._expression import numpy_library, torch_library
from tunebench.libraries._strided import of_numpy, of_torch, program, torch_memory
from tunebench.workloads.operators.strided_elementwise import StridedElementwise

__all__ = ["numpy_call", "torch_calls"]


def numpy_call(workload: StridedElementwise, inputs: Tensors) -> LibraryCall | None:
    """Return NumPy's program, or None for erf and gelu, which NumPy lacks."""
    library = numpy_library(workload.tree)
    if library is None:
        return None
    compute = program(workload, single(inputs), library, of_numpy())
    stored = numpy_dtype(workload.dtype)
    return lambda: np.array(np.broadcast_to(compute(), workload.extents), stored, order="C")


def torch_calls(workload: StridedElementwise, t: Tensors) -> dict[str, LibraryCall]:
    """Return torch's program, which rounds each step to the type of its operands."""
    import torch

    out = torch_type(workload.dtype)
    device = next(iter(t.values())).device
    compute = program(workload, torch_memory(t), torch_library(device), of_torch())

    def call() -> torch.Tensor:
        computed = compute().expand(workload.extents)
        return computed.to(out, memory_format=torch.contiguous_format, copy=True)

    return {"torch": call}
