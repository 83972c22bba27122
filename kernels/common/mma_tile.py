"""Tiles of a block that multiplies by mma.sync: threads, shared memory, instruction counts and constraints.

Used by the cuda_mma variants of gemm, gated_gemm and grouped_gemm (through `mma_gemm`) and by implicit-GEMM
convolutions. Spaces have the parameters bm, bn, bk, warps_m, warps_n.
"""

from __future__ import annotations

from typing import Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import DType, itemsize
from tunebench.kernels.common.product_execution import INSTRUCTION_BYTES, LOOP_INSTRUCTIONS
from tunebench.variant import Execution

__all__ = [
    "COPY_BYTES",
    "MAX_SUMS",
    "TILE",
    "converts",
    "instructions",
    "least_bk",
    "main_loop",
    "multiplied_as",
    "reached_flop_per_clock",
    "smem_bytes",
    "threads",
    "tile_is_compact",
    "usual_bk",
    "warps_cover_the_tile",
    "work_is_worth_the_warps",
]

TILE = ("bm", "bn", "bk", "warps_m", "warps_n", "stages", "staged")
"""Parameters that decide the shared memory of a block."""

MAX_SUMS = 128
"""Most sums per thread: more do not stay in its 255 registers."""

COPY_BYTES = 4
"""Fewest bytes that cp.async copies."""

OTHER_REGISTERS = 40
"""Registers of a thread besides sums and fragments: addresses of copies and fragments, counters."""

HOPPER_SHARE = 0.63
"""Share of the tensor cores' rate that mma.sync reaches on sm_90, where wgmma reaches all of it.

Source: Luo et al., "Dissecting the NVIDIA Hopper architecture through microbenchmarking and multiple level
analysis", 2025 (62.9 % on average).
"""

CONVERTED_INSTRUCTIONS = 6.0
"""Instructions per product of e4m3 that ptxas converts to f16: two products, 4 conversions of operands."""

CONVERSION = 4 * 13.0
"""Instructions that convert a fragment of e4m3 to f16 where none does (`e4m3_to_f16` of ptx.cuh)."""


def threads(warps_m: Any, warps_n: Any) -> Any:
    """Return the threads of a block."""
    return 32 * warps_m * warps_n


def smem_bytes(config: Any, dtype: DType, matrices: int = 1) -> Any:
    """Return the shared memory of a block in bytes: the buffers of tiles, reused later for results.

    Args:
        config: A configuration with `TILE`, or a table of them.
        dtype: Type of a and b.
        matrices: Number of matrices b. Their results pass through shared memory as one tile.
    """
    bm, bn, bk, warps_m, warps_n, stages, staged = (config[name] for name in TILE)
    tiles = stages * (bm + matrices * bn) * bk * itemsize(dtype)
    results = staged * 4 * warps_m * warps_n * 16 * (bn // warps_n + 8)
    return np.maximum(tiles, results)


def least_bk(dtype: DType) -> int:
    """Return the shortest step along k: one instruction of 8-bit elements, two of tf32."""
    return max(16, 32 // itemsize(dtype))


def usual_bk(line_bytes: int, workload: Any) -> int:
    """Return the longest step of up to `line_bytes` that is less than twice k, or the shortest step."""
    least, longest = least_bk(workload.dtype), line_bytes // itemsize(workload.dtype)
    return max(b for b in (16, 32, 64, 128) if b == least or (least < b <= longest and b < 2 * workload.k))


def instructions(table: Any, line_bytes: Any, matrices: int = 1) -> tuple[Any, Any]:
    """Return the mma instructions that a block's warps issue, and the fragments that they read.

    A warp reads its fragments of 16 x 32 bytes, 512 in all, once per 32 bytes of k.

    Args:
        table: Configurations with bm, bn, warps_m and warps_n.
        line_bytes: Bytes along k, in whole steps.
        matrices: Number of matrices b.
    """
    bm, bn, warps_m, warps_n = (table[name].astype(np.float64) for name in ("bm", "bn", "warps_m", "warps_n"))
    rounds = warps_m * warps_n * line_bytes / 32
    rows, columns = bm / warps_m, matrices * bn / warps_n
    return rounds * (rows / 16 * columns / 8), rounds * (rows / 16 + columns / 16)


def converts(dtype: DType, device: Device) -> bool:
    """Return whether e4m3 is converted to f16 before it is multiplied: before sm_89, on sm_90 and sm_100."""
    return dtype == "e4m3" and (_without_e4m3(device) or device.compute_capability[0] in (9, 10))


def multiplied_as(dtype: DType, device: Device) -> DType:
    """Return the type of the tensor-core instructions: f16 for e4m3 on devices without the type."""
    return "f16" if dtype == "e4m3" and _without_e4m3(device) else dtype


def _without_e4m3(device: Device) -> bool:
    return device.compute_capability < (8, 9)


def reached_flop_per_clock(dtype: DType, device: Device) -> float:
    """Return the FLOPs per clock of an SM that mma.sync reaches; infinite without tensor cores for the type.

    Args:
        dtype: Type of the operands.
        device: Device that executes it.
    """
    share = HOPPER_SHARE if device.compute_capability[0] == 9 else 1.0
    return share * device.mma_flop_per_clock.get(dtype, np.inf)


def main_loop(
    table: Any,
    dtype: DType,
    length: Any,
    *,
    copies: Any,
    passing_l1: Any,
    along_k: tuple[bool, bool],
    device: Device,
    matrices: int = 1,
) -> Execution:
    """Return how a block executes the main loop of gemm_mma.cuh (`multiply_ahead`), without its epilogue.

    Args:
        table: Configurations with `TILE` and min_blocks.
        dtype: Type of a and b.
        length: Elements of k that a block multiplies, in whole steps.
        copies: Copies to shared memory by lanes, per element of k.
        passing_l1: Bytes of these copies that pass L1, per element of k.
        along_k: Whether neighbours along k are neighbours in memory, for a and b.
        device: Device that executes it.
        matrices: Number of matrices b.
    """
    names = ("bm", "bn", "bk", "warps_m", "warps_n", "stages")
    bm, bn, bk, warps_m, warps_n, stages = (table[name].astype(np.float64) for name in names)
    size, warps = itemsize(dtype), warps_m * warps_n
    line_bytes, steps, columns = length * size, length / bk, matrices * bn
    products, fragments = instructions(table, line_bytes, matrices)
    of_a, of_b = bm / warps_m / 16, columns / warps_n / 16  # fragments of a warp
    # A fragment is read by ldmatrix, or by four loads where 32-bit elements would be transposed.
    share_a = of_a / (of_a + of_b)
    loaded = share_a * (size == 4 and not along_k[0]) + (1 - share_a) * (size == 4 and not along_k[1])
    reordered = share_a * (size == 1 and not along_k[0]) + (1 - share_a) * (size == 1 and not along_k[1])
    changed = 4 * (size == 4) + 4 * reordered  # rounded to tf32; bytes of pairs permuted
    if multiplied_as(dtype, device) != dtype:
        changed = changed + CONVERSION
        multiplied = products * 2
    else:
        multiplied = products * (CONVERTED_INSTRUCTIONS if converts(dtype, device) else 1)
    most_registers = device.registers_per_sm / (32 * warps * table["min_blocks"]) // 8 * 8
    sums, both_halves = bm * columns / (32 * warps), 2 + 2 * converts(dtype, device)
    registers = sums + 4 * both_halves * (of_a + of_b) + OTHER_REGISTERS
    rate = reached_flop_per_clock("f16" if converts(dtype, device) else dtype, device)
    return Execution(
        # The compiler keeps to `min_blocks` by fewer fragments at a time.
        registers=np.where(table["min_blocks"] > 1, np.minimum(registers, most_registers), registers),
        instructions=multiplied + fragments * (1 + changed) + LOOP_INSTRUCTIONS * warps * steps,
        accesses=length * copies + 128 * loaded * fragments,
        # Swizzled tiles have no bank conflicts.
        passes=(512 * fragments + line_bytes * (bm + columns) + length * passing_l1) / 128,
        prefetched_waits=steps / (stages - 1),
        # Fragments of a step are loaded while those before are multiplied, except the first ones.
        shared_waits=steps,
        barriers=steps,
        code_bytes=INSTRUCTION_BYTES * (products + fragments) / (warps * np.maximum(1, steps)),
        iterations=steps,
        tensor_clocks=2 * bm * columns * length / rate,
    )


# -- constraints --------------------------------------------------------------------------------------------


def tile_is_compact(bm: Any, bn: Any) -> Any:
    """The sides of a block's tile must differ by a factor of 8 at most."""
    return (bm <= 8 * bn) & (bn <= 8 * bm)


def warps_cover_the_tile(bm: Any, bn: Any, warps_m: Any, warps_n: Any) -> Any:
    """A warp must have multiples of 16 x 16 results, whose sides differ by a factor of 4 at most."""
    m, n = bm // warps_m, bn // warps_n
    return (m >= 16) & (n >= 16) & (m * n <= 32 * MAX_SUMS) & (m <= 4 * n) & (n <= 4 * m)


def work_is_worth_the_warps(bm: Any, bn: Any, warps_m: Any, warps_n: Any) -> Any:
    """A block must have 8 warps or fewer, and 32 x 32 results per warp if it has more than 4."""
    warps = warps_m * warps_n
    return (warps <= 8) & ((warps <= 4) | (bm * bn >= 1024 * warps))
