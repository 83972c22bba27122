"""Host side of gated_gemm kernels: two products of gemm with the same a, computed by the same blocks.

Implements `tunebench.kernels.common.gemm_variant.GemmOperation`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

from tunebench.device import Device
from tunebench.kernels.common import cuda_expression, gemm
from tunebench.kernels.common.cuda import ctype
from tunebench.space import Table
from tunebench.variant import Scalar
from tunebench.workloads.operators.gated_gemm import GatedGemm
from tunebench.workloads.operators.gemm import Gemm

MATRICES = 2
"""Number of matrices b that the rows of a are multiplied by."""


@functools.lru_cache(maxsize=64)
def product(workload: GatedGemm) -> Gemm:
    """Return one of the two products; cached, because every constraint asks for it."""
    return workload.product()


def workload_constants(workload: GatedGemm) -> dict[str, str | bool | int]:
    """Return the compile-time constants that depend on the workload only; sizes are arguments."""
    return {
        "In": ctype(workload.dtype),
        "Out": ctype(workload.out),
        "Activation": cuda_expression.functor(workload.activation),
        "A_K_CONTIGUOUS": True,
        "B_K_CONTIGUOUS": workload.trans == "nt",
    }


def injected(workload: GatedGemm) -> str:
    """Return the source of an activation that epilogue.cuh lacks, or ""."""
    return cuda_expression.functor_source(workload.activation)


def arguments(workload: GatedGemm, group_m: int) -> tuple[str | Scalar, ...]:
    """Return the kernel's arguments: a, b_gate, b_up, c, then sizes."""
    sizes = (workload.m, workload.n, workload.k, group_m)
    return ("a", "b_gate", "b_up", "c", *(Scalar("int", size) for size in sizes))


def widths(workload: GatedGemm) -> tuple[int, int, int]:
    """Return the widest aligned access, in elements, to a, to either b and to c."""
    return gemm.widths(product(workload))


def usual_blocks(workload: GatedGemm, bm: Any, bn: Any) -> Any:
    """Return the number of tiles of bm x bn (numbers or columns) that cover c."""
    return gemm.blocks(product(workload), bm, bn)


most_blocks = usual_blocks


def grid(workload: GatedGemm, config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the grid in x, y and z: one block per tile."""
    return gemm.grid(product(workload), config)


def shares(workload: GatedGemm, table: Table, device: Device) -> gemm.Share:
    """Return the share of either product that a block computes, for each configuration."""
    return gemm.shares(product(workload), table, device)


def fits(bm: Any, bn: Any, workload: GatedGemm) -> Any:
    """Tiles must fit in one grid, and be less than twice as large as c unless no smaller one exists."""
    return gemm.fits(bm, bn, product(workload))


def too_many_blocks(workload: GatedGemm, tiles: Iterable[tuple[int, int]]) -> str | None:
    """Return why none of `tiles` (bm, bn) covers c in one grid, or None if one does."""
    return gemm.too_many_blocks(product(workload), tiles)


def shrink(
    workload: GatedGemm, config: Mapping[str, Any], stages: int, affordable_fma: int = gemm.AFFORDABLE_FMA
) -> GatedGemm:
    """Return a small workload with the same edges, alignment and pipeline (see `gemm.shrink`)."""
    small = gemm.shrink(product(workload), config, stages, affordable_fma // MATRICES)
    return dataclasses.replace(workload, m=small.m, n=small.n, k=small.k)
