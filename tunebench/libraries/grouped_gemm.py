"""grouped_gemm by NumPy and by torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tunebench._lazy import np
from tunebench.libraries import LibraryCall, Tensors, single
from tunebench.workloads.operators.grouped_gemm import GroupedGemm

if TYPE_CHECKING:
    from tunebench.workload import Array

__all__ = ["grouped_mm", "numpy_call", "torch_calls"]


def numpy_call(workload: GroupedGemm, inputs: Tensors) -> LibraryCall:
    """Return a loop over the groups in NumPy."""
    return _numpy(workload, single(inputs), workload.parts(inputs["offsets"]))


def _numpy(workload: GroupedGemm, t: Tensors, parts: list[tuple[int, slice]]) -> Callable[[], Array]:
    """Return a loop over the groups; group sizes are known beforehand, which saves this program time."""
    b = t["b"] if workload.trans == "nn" else t["b"].swapaxes(1, 2)
    c = np.empty((workload.m, workload.n), np.float32)

    def run() -> Array:
        for group, part in parts:
            np.matmul(t["a"][part], b[group], out=c[part])
        return c

    return run


def torch_calls(workload: GroupedGemm, t: Tensors) -> dict[str, LibraryCall]:
    """Return a loop over the groups, and torch's grouped product if it has one."""
    grouped = grouped_mm(workload, t)
    return {"torch": _torch(workload, t)} | ({} if grouped is None else {"torch grouped_mm": grouped})


def _torch(workload: GroupedGemm, t: Tensors) -> Callable[[], Any]:
    """Return a loop over the groups, on a GPU with one call of cuBLAS each; sizes are known beforehand."""
    b = t["b"] if workload.trans == "nn" else t["b"].transpose(1, 2)
    parts = workload.parts(t["offsets"].cpu().numpy())
    c = t["a"].new_empty(workload.m, workload.n)

    def run() -> Any:
        for group, part in parts:
            c[part] = t["a"][part] @ b[group]
        return c

    return run


def grouped_mm(workload: GroupedGemm, t: Tensors) -> Callable[[], Any] | None:
    """Return torch's grouped product, or None if torch lacks it: it requires bf16 and lines of 16 bytes.

    Args:
        workload: The workload.
        t: A torch tensor for each input by name.
    """
    if (workload.dtype, workload.out) != ("bf16", "bf16"):
        return None
    import torch

    # public since torch 2.10
    multiply = getattr(torch.nn.functional, "grouped_mm", getattr(torch, "_grouped_mm", None))
    if multiply is None or workload.n % 8 or workload.k % 8:
        return None
    if t["a"].is_cuda and torch.cuda.get_device_capability(t["a"].device) < (9, 0):
        return None  # versions before 2.10 raise there
    b = t["b"] if workload.trans == "nn" else t["b"].transpose(1, 2)
    group_ends = t["offsets"][1:]
    return lambda: multiply(t["a"], b, offs=group_ends)
