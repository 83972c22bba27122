"""Triton baselines of a workload: kernels as in Triton's tutorials, verified before they are timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tunebench.device import Device
from tunebench.libraries import torch_type
from tunebench.workload import Workload
from tunebench.workloads.operators.attention import Attention
from tunebench.workloads.operators.gemm import Gemm
from tunebench.workloads.operators.layernorm import LayerNorm
from tunebench.workloads.operators.rmsnorm import RmsNorm
from tunebench.workloads.operators.softmax import Softmax

__all__ = ["TritonProgram", "factors", "triton_program"]

Call = Callable[[], Any]
Tensors = Mapping[str, Any]


@dataclass(frozen=True)
class TritonProgram:
    """A Triton program that computes a workload.

    Attributes:
        run: Computes the workload; the first call compiles and autotunes.
        output: The torch tensor of the first output.
    """

    run: Call
    output: Any

    def checked(self, right: Any) -> Call:
        """Return `run` after verifying its result.

        Args:
            right: The expected output, computed by torch.

        Raises:
            RuntimeError: The relative error of the result is 1 % or more.
        """
        self.run()
        error = float((self.output.float() - right.float()).norm() / right.float().norm())
        if not error < 1e-2:
            raise RuntimeError(f"expected a relative error below 0.01, got {error:.3g}")
        return self.run


def triton_program(workload: Workload, tensors: Tensors, device: Device) -> TritonProgram | None:
    """Return the Triton program of a workload, or None if there is none.

    Args:
        workload: The workload.
        tensors: A torch tensor on the device for each input.
        device: The GPU.
    """
    if isinstance(workload, Gemm):
        return _gemm(workload, tensors, device)
    if isinstance(workload, Attention):
        return _attention(workload, tensors)
    if isinstance(workload, Softmax | LayerNorm | RmsNorm):
        return _rows(workload, tensors)
    return None


def factors(workload: Gemm, t: Tensors) -> tuple[Any, Any]:
    """Return the matrices (m, k) and (k, n) of one product, without a copy."""
    a = t["a"][0] if workload.trans[0] == "n" else t["a"][0].T
    b = t["b"][0] if workload.trans[1] == "n" else t["b"][0].T
    return a, b


def _gemm(workload: Gemm, t: Tensors, device: Device) -> TritonProgram | None:
    if workload.batch > 1 or workload.epilogue != "none" or workload.activation != "none":
        return None
    if workload.dtype == "e4m3" and device.compute_capability < (8, 9):
        return None
    if workload.accumulate == "f32":  # the program does not promote sums
        return None
    import torch

    from tests.gpu.triton_gemm import matmul

    a, b = factors(workload, t)
    c = torch.full((workload.m, workload.n), -1, dtype=torch_type(workload.out), device=a.device)
    precision = "tf32" if workload.dtype == "tf32" else "ieee"
    return TritonProgram(lambda: matmul(a, b, c, precision), c)


def _attention(workload: Attention, t: Tensors) -> TritonProgram | None:
    if workload.direction == "backward" or workload.dtype == "f32":
        return None
    from tests.gpu.triton_attention import attention

    o = t["q"].new_full(t["q"].shape, -1)
    lse = t["q"].new_empty(t["q"].shape[:3], dtype=o.float().dtype)
    return TritonProgram(lambda: attention(t["q"], t["k"], t["v"], o, lse, causal=workload.causal), o)


def _rows(workload: Softmax | LayerNorm | RmsNorm, t: Tensors) -> TritonProgram | None:
    from tests.gpu import triton_rows as rows

    if (
        workload.cols > rows.LONGEST
        or set(t) - {"x", "scale", "gamma", "beta"}
        or len(workload.outputs()) > 1
    ):
        return None
    if isinstance(workload, Softmax) and workload.log:
        return None
    y = t["x"].new_full(t["x"].shape, -1)
    if isinstance(workload, LayerNorm):
        return TritonProgram(lambda: rows.layernorm(t["x"], t["gamma"], t["beta"], y, workload.eps), y)
    if isinstance(workload, RmsNorm):
        return TritonProgram(lambda: rows.rmsnorm(t["x"], t["gamma"], y, workload.eps), y)
    return TritonProgram(lambda: rows.softmax(t["x"], y, t.get("scale", 1.0)), y)
