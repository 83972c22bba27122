"""How threads of a Numba-CUDA kernel share a tile of c, and what that takes: gemm and its kin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import storage
from tunebench.kernels.common.cuda import first_product
from tunebench.space import Constraint, Parameter, Table
from tunebench.variant import Costs, ceil_div

__all__ = ["PARAMETERS", "USUAL", "constraints", "costs", "refusal", "usual"]

MAX_STATIC_SMEM_BYTES = 48 * 1024
"""Most shared memory of fixed size. Source: CUDA C++ Programming Guide, "Compute Capabilities"."""

PARAMETERS = (
    Parameter("bm", (16, 32, 64, 128), "rows of c a block computes"),
    Parameter("bn", (16, 32, 64, 128), "columns of c a block computes"),
    Parameter("tm", (1, 2, 4, 8), "rows of c a thread computes"),
    Parameter("tn", (1, 2, 4, 8), "columns of c a thread computes"),
    Parameter("bk", (4, 8, 16, 32), "steps of k in shared memory together"),
)

USUAL = ((64, 64, 4, 4), (32, 32, 2, 2), (16, 32, 1, 2), (16, 16, 1, 1))
"""Tiles (bm, bn, tm, tn) that tutorials and libraries use, largest first."""


def _threads(bm: Any, bn: Any, tm: Any, tn: Any) -> Any:
    """Return the threads of a block."""
    return bm // tm * (bn // tn)


def _smem_bytes(bm: Any, bn: Any, bk: Any, matrices: int) -> Any:
    """Return the shared memory of a block: a last element pads each line of a tile."""
    return 4 * (bm * (bk + 1) + matrices * bk * (bn + 1))


def constraints(matrices: int = 1) -> tuple[Constraint, ...]:
    """Return those of `PARAMETERS`, for products of the same rows of a by `matrices` matrices b."""

    def threads_are_reasonable(bm: Any, bn: Any, tm: Any, tn: Any) -> Any:
        """A block has 64 to 1024 threads, and a thread at most 64 sums, all in registers."""
        count, sums = _threads(bm, bn, tm, tn), matrices * tm * tn
        return (count >= 64) & (count <= 1024) & (sums <= 64) & (count * (sums + 32) <= 65536)

    def static_smem_fits(bm: Any, bn: Any, bk: Any) -> Any:
        """The tiles must fit in shared memory of fixed size."""
        return _smem_bytes(bm, bn, bk, matrices) <= MAX_STATIC_SMEM_BYTES

    return (
        threads_are_reasonable,
        static_smem_fits,
        lambda bk, workload: (bk == 4) | (bk < 2 * workload.k),
    )


def refusal(workload: Any) -> str | None:
    """Return what types a variant takes, if not this problem's."""
    if storage(workload.dtype) != "f32" or workload.out != "f32":
        return f"takes and gives f32, not {workload.dtype} to {workload.out}"
    return None


def usual(
    workload: Any,
    device: Device,
    fits: Callable[[Any, Any, Any], Any],
    tiles: Callable[[Any, Any, Any], Any],
) -> dict[str, int]:
    """Return the largest of the usual tiles that still gives every SM a block.

    Args:
        workload: The problem, with k.
        device: Whose SMs are to be busy.
        fits: Of bm, bn and the problem: whether such tiles may be.
        tiles: Of the problem, bm and bn: how many there are.
    """
    usable = [tile for tile in USUAL if fits(tile[0], tile[1], workload)]
    full = [tile for tile in usable if tiles(workload, *tile[:2]) >= device.sm_count]
    bk = max(b for b in (4, 8, 16) if b == 4 or b < 2 * workload.k)
    return {**dict(zip(("bm", "bn", "tm", "tn"), (full or usable[-1:])[0], strict=True)), "bk": bk}


def costs(workload: Any, table: Table, device: Device, tiles: Any, matrices: int = 1) -> Costs:
    """Count whole tiles: parts beyond the edge of c and the last step of k are computed as zeros.

    Args:
        workload: The problem, with k.
        table: Configurations.
        device: Whose latencies hold.
        tiles: Tiles there are, a block each.
        matrices: Matrices b that the rows of a are multiplied by.
    """
    bm, bn, bk, tm, tn = (table[name].astype(np.float64) for name in ("bm", "bn", "bk", "tm", "tn"))
    padded_k, threads = ceil_div(workload.k, bk) * bk, _threads(bm, bn, tm, tn)
    reads, lines = tm + matrices * tn, bm + matrices * bn
    return Costs(
        blocks=tiles,
        full_blocks=tiles,
        threads=threads,
        smem_bytes=_smem_bytes(bm, bn, bk, matrices),
        fma=matrices * bm * bn * padded_k,
        # Each value is read on its own, in a pass of 128 bytes.
        smem_traffic_bytes=threads / 32 * padded_k * 128 * reads + 4 * padded_k * lines,
        accesses=padded_k * (threads * reads + lines),
        chain_clocks=first_product(device) + padded_k * device.fma_latency,
    )
