"""Functions ahead of a product in CUDA C++: their text, their tensors, and who cannot have one."""

from __future__ import annotations

from typing import Any

from tunebench.expression import names, parse, steps
from tunebench.kernels.common.cuda import flag, helpers
from tunebench.kernels.common.cuda_expression import PRINTER, filled, special
from tunebench.workloads.operators._activation import IDENTITY
from tunebench.workloads.operators._prologue import PREFIX, vectors

__all__ = ["applied", "operands", "preamble", "refusal", "special_of_element"]

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
    """Return the struct `Prologue` of a workload that has a function ahead, with the helpers that it needs.

    The text of an activation that is an expression comes before it, and has brought them along.
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


_PARAMETERS = """
          const typename C::In* __restrict__ pre_scale, const typename C::In* __restrict__ pre_shift,"""


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
    return filled(source, PARAMETERS=_PARAMETERS, TILE=prologue_tile, VECTORS=vectors)


def operands(workload: Any) -> tuple[str, str]:
    """Return the tensors that are scale and shift: the left operand for one there is not, and not read."""
    used, other = vectors(workload.pre), workload.inputs()[0].name
    scale, shift = (PREFIX + name if name in used else other for name in ("scale", "shift"))
    return scale, shift


def refusal(key: str, workload: Any) -> str | None:
    """Return why a variant that multiplies what it reads cannot do a problem; None if it can."""
    if workload.has_pre:
        return f"{key} multiplies what it reads as it is: it has no place for pre={workload.pre}"
    return None


def special_of_element(workload: Any) -> int:
    """Return the results of the special-function unit that an element of the operand takes at least."""
    counts: dict[str, int] = {}
    for step in steps(parse(workload.pre)):
        if "x" in names(step):
            counts[step.operation] = counts.get(step.operation, 0) + 1
    return special(counts)
