"""Strided operands in Numba-CUDA: coordinates from a flat index, guards, and loads, with constant strides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tunebench.dtype import DType
from tunebench.kernels.common.expression import variable
from tunebench.kernels.common.numba_expression import cuda_array
from tunebench.kernels.common.numba_strided import affine, plus
from tunebench.workloads.common.strided_workload import StridedWorkload

__all__ = ["loads", "refusal", "stored", "valid"]


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
        for gather in operand.index.gathers:
            at = affine(gather.coefficients, index, gather.start)
            found = f"valid({cuda_array(gather.source)}[{at}], {gather.extent}, {gather.wraps})"
            place = plus(place, (gather.step, found))
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
    return {"bool": f"{text} != f32(0)", "i8": f"int({text})"}.get(dtype, text)


def valid() -> Callable[..., Any]:
    """Return the device function `(index, extent, wraps)` that checks an index.

    An index that is not valid stops the kernel, as in kernels of torch.
    """
    trap = _trap()

    def checked(index: Any, extent: Any, wraps: Any) -> Any:
        if wraps and index < 0:
            index += extent
        if index < 0 or index >= extent:
            trap()
        return index

    from numba import cuda

    made: Callable[..., Any] = cuda.jit(device=True, inline="always")(checked)
    return made


def _trap() -> Callable[[], None]:
    """Return the function that stops a kernel; the simulator, which has no intrinsics, raises."""
    from numba import config

    if config.ENABLE_CUDASIM:

        def raise_error() -> None:
            raise IndexError("an index is out of range")

        return raise_error
    from llvmlite import ir
    from numba import types
    from numba.cuda.extending import intrinsic

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [])
        known = builder.module.globals.get("llvm.trap")
        builder.call(known or ir.Function(builder.module, kind, "llvm.trap"), [])
        return context.get_dummy_value()

    @intrinsic  # type: ignore[untyped-decorator]
    def trap(_typing: Any) -> Any:
        return types.void(), generate

    found: Callable[[], None] = trap
    return found
