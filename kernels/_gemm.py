"""What variants of gemm written in CUDA C++ share on the Python side: types, alignment, arguments, grids."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from tunebench.dtype import DType, itemsize
from tunebench.kernels._cuda import ctype
from tunebench.variant import Scalar, ceil_div
from tunebench.workloads.operators.gemm import Gemm

__all__ = [
    "MAX_BLOCKS",
    "alignment",
    "arguments",
    "blocks",
    "constants",
    "fits",
    "problem",
    "shrink",
    "widths",
]

MAX_BLOCKS = 2**31 - 1
"""Most blocks along x of a grid. Source: CUDA C++ Programming Guide, "Compute Capabilities"."""

AFFORDABLE_FMA = 10_000_000
"""Multiply-adds that emulation does in a fraction of a second."""

_ACTIVATION = {"none": "Identity", "relu": "Relu", "gelu": "Gelu"}


def constants(name: str, **values: str | bool | int) -> str:
    """Return a C++ struct of compile-time constants; text becomes a type."""
    lines = []
    for key, value in values.items():
        kind = "bool" if isinstance(value, bool) else "int"
        declared = f"using {key} =" if isinstance(value, str) else f"static constexpr {kind} {key} ="
        lines.append(f"  {declared} {value if isinstance(value, str) else int(value)};")
    return "\n".join([f"struct {name} {{", *lines, "};"]) + "\n"


def problem(workload: Gemm) -> dict[str, str | bool | int]:
    """Return the constants that the problem decides, whatever the configuration; sizes are arguments."""
    return {
        "In": ctype(workload.dtype),
        "Out": ctype(workload.out),
        "Activation": _ACTIVATION[workload.activation],
        "HAS_BIAS": workload.has_bias,
        "A_K_CONTIGUOUS": workload.trans[0] == "n",
        "B_K_CONTIGUOUS": workload.trans[1] == "t",
    }


def arguments(workload: Gemm, group_m: int) -> tuple[str | Scalar, ...]:
    """Return what the kernels take: a, b, bias (c in its place if there is none, not read), c, sizes."""
    sizes = (workload.m, workload.n, workload.k, group_m)
    return ("a", "b", "bias" if workload.has_bias else "c", "c", *(Scalar("int", size) for size in sizes))


def alignment(extent: int, dtype: DType) -> int:
    """Return the most elements, up to 16 bytes, that an access to lines of `extent` elements may have."""
    return min(extent & -extent, 16 // itemsize(dtype))


def widths(workload: Gemm) -> tuple[int, int, int]:
    """Return the widest aligned access, in elements, to a, b and c. Their first elements are aligned."""
    a = workload.k if workload.trans[0] == "n" else workload.m
    b = workload.k if workload.trans[1] == "t" else workload.n
    return (
        alignment(a, workload.dtype),
        alignment(b, workload.dtype),
        alignment(workload.n, workload.out),
    )


def blocks(workload: Gemm, bm: Any, bn: Any) -> Any:
    """Return the number of tiles of bm x bn (numbers or columns) that cover c, over the whole batch."""
    return workload.batch * ceil_div(workload.m, bm) * ceil_div(workload.n, bn)


def fits(bm: Any, bn: Any, workload: Gemm) -> Any:
    """Tiles must fit in one grid, and none may be twice as large as the problem if a smaller one exists."""
    worthwhile = ((bm < 2 * workload.m) | (bm <= 16)) & ((bn < 2 * workload.n) | (bn <= 16))
    # As floats: the product of three dimensions may exceed 64 bits.
    return worthwhile & (blocks(workload, 1.0 * bm, 1.0 * bn) <= MAX_BLOCKS)


def too_many_blocks(workload: Gemm, tiles: Iterable[tuple[int, int]]) -> str | None:
    """Return why none of `tiles` (bm, bn) covers c in one grid, or None if one does."""
    if any(fits(bm, bn, workload) for bm, bn in tiles):
        return None
    return f"c ({workload.batch}, {workload.m}, {workload.n}) takes more than {MAX_BLOCKS} blocks"


def shrink(workload: Gemm, config: Mapping[str, Any], stages: int) -> Gemm:
    """Return a small problem with the same edges, alignment and pipeline as `workload`.

    Every dimension keeps its remainder by the tile, so that edge tiles and the widths of accesses stay what
    they are; m and n keep as many full tiles beside it as emulation can afford, up to two, and k enough of
    them that each of `stages` buffers is used again.
    """

    def keep(extent: int, tile: int, tiles: int) -> int:
        # 16 elements are at least 16 bytes of any type: a multiple of them stays aligned.
        tile, tiles = max(16, tile), ceil_div(tile * tiles, max(16, tile))
        return min(extent, tile * tiles + extent % tile)

    for tiles_m, tiles_n, batch in ((2, 2, 2), (1, 2, 2), (1, 1, 2), (1, 1, 1)):
        small = dataclasses.replace(
            workload,
            m=keep(workload.m, config["bm"], tiles_m),
            n=keep(workload.n, config["bn"], tiles_n),
            k=keep(workload.k, config["bk"], stages + 1),
            batch=min(workload.batch, batch),
        )
        if small.flops() <= 2 * AFFORDABLE_FMA:
            break
    return small
