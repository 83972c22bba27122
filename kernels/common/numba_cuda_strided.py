"""Strided operands in Numba-CUDA: coordinates from a flat index, guards, and loads, with constant strides."""

from __future__ import annotations

from collections.abc import Mapping

from tunebench.dtype import DType
from tunebench.kernels.common.expression import variable
from tunebench.kernels.common.numba_expression import cuda_array
from tunebench.kernels.common.numba_strided import affine
from tunebench.workloads.operators._strided import StridedWorkload

__all__ = ["loads", "refusal", "stored"]


def refusal(key: str, workload: StridedWorkload) -> str | None:
    """Return why a variant refuses a workload: only a driver can link conversions of bf16."""
    types = (workload.dtype, *(operand.dtype for operand in workload.maps.values()))
    return f"{key} does not support bf16" if "bf16" in types else None


def loads(workload: StridedWorkload, index: Mapping[int, str]) -> list[str]:
    """Return the statements that load an element of each operand as f32; 0 if it does not exist.

    Args:
        workload: The workload.
        index: Text of the index along each axis.
    """
    made = []
    for name, operand in workload.maps.items():
        place = affine(operand.index.strides, index, operand.index.start)
        exists = " and ".join(
            f"0 <= {affine(guard.coefficients, index, guard.start)} < {guard.extent}"
            for guard in operand.index.guards
        )
        if exists:
            made += [f"{variable(name)} = f32(0)", f"if {exists}:"]
        made.append(f"{'    ' if exists else ''}{variable(name)} = f32({cuda_array(name)}[{place}])")
    return made


def stored(text: str, dtype: DType) -> str:
    """Return the text of an f32 value converted for a store; bool is true unless the value is 0."""
    return f"{text} != f32(0)" if dtype == "bool" else text
