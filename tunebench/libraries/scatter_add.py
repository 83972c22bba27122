"""scatter_add by NumPy and by torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunebench._lazy import np
from tunebench.libraries import LibraryCall, Tensors, single
from tunebench.workloads.operators.scatter_add import ScatterAdd

if TYPE_CHECKING:
    from tunebench.workload import Array

__all__ = ["numpy_call", "torch_calls"]


def numpy_call(workload: ScatterAdd, inputs: Tensors) -> LibraryCall:
    """Return the program that adds the rows to a copy of base, or to zeros, by NumPy."""
    tensors, places = single(inputs), workload.places(inputs["index"])
    taken = np.flatnonzero(places >= 0)

    def call() -> Array:
        shape = (workload.bins, workload.cols)
        out = tensors["base"].copy() if workload.base else np.zeros(shape, np.float32)
        np.add.at(out, places[taken], tensors["x"][taken])
        return out

    return call


def torch_calls(workload: ScatterAdd, t: Tensors) -> dict[str, LibraryCall]:
    """Return torch's gradient of an embedding, or `index_add`; types of 16 bits are added in f32."""
    import torch

    if workload.skipped >= 0 and workload.base:
        return {}
    dtype = t["x"].dtype

    def index() -> Any:
        indices = t["index"]
        return torch.where(indices < 0, indices + workload.bins, indices) if workload.wraps else indices

    def call() -> Any:
        if not workload.base:
            gradient = torch.ops.aten.embedding_dense_backward
            return gradient(t["x"].float(), index(), workload.bins, workload.skipped, False).to(dtype)
        return t["base"].float().index_add(0, index(), t["x"].float()).to(dtype)

    return {"torch": call}
