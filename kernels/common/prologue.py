"""Prologue of gemm and conv2d in CUDA C++: a function applied to the left operand before it is multiplied.

The function is an expression (`pre`) of an element x, a scale and a shift. It becomes the struct `Prologue`,
a functor that the tiles of prologue_simt.cuh, prologue_mma.cuh and conv_prologue*.cuh apply to elements on
their way to the main loop.
"""

from __future__ import annotations

from typing import Any

from tunebench.expression import names, parse, steps
from tunebench.kernels.common.cuda import flag, helpers
from tunebench.kernels.common.cuda_expression import PRINTER, filled, special
from tunebench.workloads.common.activation import IDENTITY
from tunebench.workloads.common.prologue import PREFIX, vectors

__all__ = [
    "PARAMETERS",
    "applied",
    "is_cheap",
    "operands",
    "operations_of_element",
    "preamble",
    "refusal",
    "special_of_element",
]

_CHEAP = {"add", "sub", "mul", "abs", "max", "min", "relu", "square"}

_STRUCT = """
struct Prologue {
  static constexpr bool HAS_SCALE = @HAS_SCALE@, HAS_SHIFT = @HAS_SHIFT@;
  __device__ __forceinline__ float operator()(float in_x, float in_scale, float in_shift) const {
@ASSIGNMENTS@
    return @RESULT@;
  }
};
"""


def _struct(workload: Any) -> str:
    """Return the struct `Prologue` of a workload that has a prologue, with the headers that it needs.

    An activation that is an expression precedes it and includes these headers already.
    """
    assignments, result = PRINTER.write(parse(workload.pre))
    used = vectors(workload.pre)
    text = filled(
        _STRUCT,
        HAS_SCALE=flag("scale" in used),
        HAS_SHIFT=flag("shift" in used),
        ASSIGNMENTS="\n".join(f"  {line}" for line in assignments),
        RESULT=result,
    )
    return text if workload.act != IDENTITY else helpers("reduce") + text


def preamble(workload: Any, header: str) -> str:
    """Return the struct `Prologue` and the headers that apply it, or "" for a workload without a prologue.

    Args:
        workload: A gemm or conv2d.
        header: Name of the .cuh file with the tiles that apply the prologue.
    """
    return _struct(workload) + helpers("prologue", header) if workload.has_pre else ""


PARAMETERS = """
          const typename C::In* __restrict__ pre_scale, const typename C::In* __restrict__ pre_shift,"""
"""Parameters of a kernel with a prologue, which are added to its text."""


def applied(source: str, workload: Any, *, tile: str, prologue_tile: str) -> str:
    """Return a gemm kernel whose tiles of a have the prologue of the workload, if it has one.

    Args:
        source: The kernel, with @PARAMETERS@, @TILE@ and @VECTORS@ where the prologue adds text.
        workload: The gemm.
        tile: Class template of tiles of a without a prologue.
        prologue_tile: The same with a prologue.
    """
    if not workload.has_pre:
        return filled(source, PARAMETERS="", TILE=tile, VECTORS="")
    vectors = ", PrologueVectors<In>{pre_scale + k0, pre_shift + k0}"
    return filled(source, PARAMETERS=PARAMETERS, TILE=prologue_tile, VECTORS=vectors)


def operands(workload: Any) -> tuple[str, str]:
    """Return the tensors for scale and shift, or the left operand for a missing one, which is not read."""
    used, other = vectors(workload.pre), workload.inputs()[0].name
    scale, shift = (PREFIX + name if name in used else other for name in ("scale", "shift"))
    return scale, shift


def refusal(key: str, workload: Any) -> str | None:
    """Return why a variant without prologues refuses a workload, or None if the workload has none."""
    if workload.has_pre:
        return f"{key} does not support a prologue: pre={workload.pre}"
    return None


def is_cheap(workload: Any) -> bool:
    """Return whether each step of the prologue is one instruction or two, which need no registers."""
    return {step.operation for step in steps(parse(workload.pre))} <= _CHEAP


def operations_of_element(workload: Any) -> int:
    """Return the instructions of the prologue per element, about one for each step; 0 without a prologue."""
    return len(steps(parse(workload.pre))) if getattr(workload, "has_pre", False) else 0


def special_of_element(workload: Any) -> int:
    """Return a lower bound of the special-function results that the prologue takes per element."""
    counts: dict[str, int] = {}
    for step in steps(parse(workload.pre)):
        if "x" in names(step):
            counts[step.operation] = counts.get(step.operation, 0) + 1
    return special(counts)
