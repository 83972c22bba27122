"""gemm in CUDA C++ on tensor cores by mma.sync (sm_80 on): f16, bf16, tf32 and e4m3 summed in f32, i8 in i32.

A block computes bm x bn results; each of its warps computes a part by instructions that take 32 bytes of k
(m16n8k16 for 16-bit elements, m16n8k8 for tf32, m16n8k32 for 8-bit elements). cp.async copies tiles of a and
b into `stages` buffers of shared memory: `stages - 1` copies are in flight while one tile is multiplied, with
one barrier per tile. Buffers keep the order of global memory and are swizzled, so that ldmatrix reads them,
transposing where needed, without bank conflicts. Results go to global memory from the fragments, or through
shared memory in accesses of 16 bytes.

Where c has few tiles, k is divided too: among `split_k` blocks per tile, or evenly over all steps of all
tiles among `stream_k` blocks. A second kernel sums the parts, in the order of k.

Limits: cp.async copies 4 bytes or more, so that the row lengths of a and b must be multiples of 4 bytes.
ldmatrix transposes 16-bit elements only: 8-bit matrices whose k is not contiguous are read in pairs, and the
results are reordered at the end. sm_80 to sm_88, sm_90 and sm_100 have no mma.sync for e4m3: it is converted
to f16 and multiplied.

Source: PTX ISA, "Warp-level matrix instructions" and "cp.async"; Kerr et al., "CUTLASS: fast linear algebra
in CUDA C++" (the hierarchy of tiles).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.kernels.common import gemm, mma_gemm, mma_tile
from tunebench.kernels.common.gemm_variant import Constants
from tunebench.kernels.common.mma_gemm import MmaGemm
from tunebench.kernels.gemm._divided import DividedGemm
from tunebench.space import Config, Parameter, Space
from tunebench.variant import ceil_div
from tunebench.workloads.operators.gemm import Gemm

CONVERTED_SUMS, PAIRED_SUMS = 64, 32
"""Most sums per thread where e4m3 is converted to f16, and where it is also read in pairs.

With twice as many, the compiler spills.
"""

LAUNCH_US = 3.5
"""Approximate cost of a second launch, in microseconds."""

READ_US = 1.5
"""Approximate latency of a read from memory at full bandwidth, in microseconds."""


def stages_have_tiles(bk: Any, split_k: Any, stages: Any, workload: Gemm) -> Any:
    """A block must have at least as many steps of k as copies under way."""
    return (stages == 2) | (stages <= ceil_div(ceil_div(workload.k, bk), split_k) + 1)


SPACE = Space(
    (
        Parameter("bm", (16, 32, 64, 128, 256), "rows of c per block"),
        Parameter("bn", (16, 32, 64, 128, 256), "columns of c per block"),
        *mma_gemm.WARPS,
        mma_gemm.BK,
        Parameter("split_k", gemm.SPLITS, "blocks that share the steps of a tile"),
        Parameter(
            "stream_k", gemm.STREAMS, "blocks that share the steps of all tiles; 0: one tile per block"
        ),
        mma_gemm.STAGES,
        mma_gemm.STAGED,
        Parameter("group_m", (1, 4, 8), "rows of tiles that concurrent blocks share in L2"),
        Parameter("min_blocks", (1, 2, 3), "resident blocks per SM: limits registers per thread"),
    ),
    (
        *mma_gemm.constraints(gemm, other_registers=64),
        mma_tile.tile_is_compact,
        gemm.split_is_useful,
        gemm.stream_is_useful,
        stages_have_tiles,
        mma_gemm.copies_are_few(gemm),
        gemm.parts_are_few,
    ),
)

USUAL = (
    # bm, bn, warps_m, warps_n, bytes of bk, stages; largest first
    (128, 256, 2, 4, 64, 3),
    (128, 128, 2, 2, 64, 4),
    (128, 64, 2, 2, 64, 4),
    (64, 64, 2, 2, 128, 4),
    (32, 64, 2, 2, 128, 4),
    (32, 32, 2, 2, 128, 4),
    (16, 128, 1, 4, 128, 4),
    (16, 64, 1, 4, 128, 5),
    (16, 32, 1, 2, 128, 5),
    (16, 16, 1, 1, 128, 5),
)
"""Tiles that libraries ship."""

# A prologue fills in the words between @ (see `prologue.applied`).
SOURCE = """
// c = activation(op(a) op(b) + bias) + residual, or its parts for finish_tiles. C has the constants of
// the workload and of the configuration.
template <class C>
__global__ void __launch_bounds__(C::THREADS, C::MIN_BLOCKS)
gemm_mma(const typename C::In* __restrict__ a, const typename C::In* __restrict__ b,
         const typename C::Out* __restrict__ bias, const typename C::Out* __restrict__ residual,@PARAMETERS@
         typename C::Out* __restrict__ c, Wide<typename C::In>* __restrict__ partial, int m, int n, int k,
         int group_m, int tiles, int parts) {
  using In = typename C::In;
  using Out = typename C::Out;
  using Sum = Wide<In>;
  using Grid = WarpGrid<C::BM, C::BN, C::WARPS_M, C::WARPS_N>;
  using TileA = @TILE@<In, C::BM, C::BK, C::A_K_CONTIGUOUS, C::VEC_A, C::THREADS>;
  using TileB = AsyncTile<In, C::BN, C::BK, C::B_K_CONTIGUOUS, C::VEC_B, C::THREADS>;
  static_assert(Grid::THREADS == C::THREADS, "the launch has a warp for each part of the tile");

  In* const shared = reinterpret_cast<In*>(dynamic_shared());
  const i64 pitch_a = C::A_K_CONTIGUOUS ? k : m, pitch_b = C::B_K_CONTIGUOUS ? k : n;
  const int steps = tiles_of(k, C::BK);
  C::Division::each_segment(tiles, steps, parts, [&](const Segment& segment) {
    const TileIndex tile = tile_at(segment.tile, tiles_of(m, C::BM), tiles_of(n, C::BN), group_m);
    const int row = tile.m * C::BM, column = tile.n * C::BN;  // the rest beyond them never overflows an int
    const int k0 = segment.first * C::BK;
    const In* const whole_a = a + tile.batch * (i64(m) * k);
    const In* const whole_b = b + tile.batch * (i64(k) * n);
    TileA of_a(tile_corner<C::A_K_CONTIGUOUS>(whole_a, row, k0, pitch_a), pitch_a, m - row@VECTORS@);
    TileB of_b(tile_corner<C::B_K_CONTIGUOUS>(whole_b, column, k0, pitch_b), pitch_b, n - column);
    Sum sums[Grid::M / 16][Grid::N / 8][4] = {};
    multiply_ahead<Grid, C::STAGES, C::BK>(sums, of_a, of_b, end_of<C::BK>(segment, steps, k) - k0, shared);

    if constexpr (sizeof(In) == 1) straighten<Grid, !C::A_K_CONTIGUOUS, !C::B_K_CONTIGUOUS>(sums);

    const auto store = [&](auto width, const auto& target, const auto& finish) {
      store_results<Grid, C::STAGED, decltype(width)::value>(sums, shared, target, finish);
    };
    if (C::Division::SOME_PARTS && segment.slot >= 0) {
      if constexpr (C::Division::SOME_PARTS)
        store(Number<4>(), slot_target<C::BM, C::BN>(partial, segment.slot, m - row), keep_sum<C::BN, Sum>());
    } else if constexpr (C::Division::SOME_WHOLE) {
      const i64 corner = tile.batch * (i64(m) * n) + i64(row) * n + column;
      const FinishOf<C> finish = {bias + column, n - column, residual + corner, n};
      store(Number<C::VEC_C>(), Target<Out>{c + corner, n, m - row, n - column}, finish);
    }
  });
}
"""


class CudaMmaGemm(DividedGemm, MmaGemm[Gemm]):
    """f16, bf16, tf32, i8 and e4m3 on sm_80 and later."""

    name = "cuda_mma"
    space = SPACE
    text = SOURCE
    usual = USUAL
    dtypes = "f16, bf16, tf32, e4m3 and i8"
    entry = "gemm_mma"
    headers = ("types", "ptx", "epilogue", "gemm", "gemm_parts", "gemm_mma")
    prologue_header = "prologue_mma"
    tile = "AsyncTile"
    prologue_tile = "PrologueAsyncTile"

    def default(self, workload: Gemm, device: Device) -> Config:
        """Return the usual tile and division of k with the lowest estimated time."""
        ordered = sorted(
            self.usual_configs(workload, device), key=lambda config: _estimate_us(workload, config, device)
        )
        return self.space.first_valid(ordered, workload=workload, device=device)

    def usual_configs(self, workload: Gemm, device: Device) -> Iterator[Config]:
        """Yield a configuration for each usual tile and division of k, with as many stages as k allows."""
        most_sums = mma_tile.MAX_SUMS
        if mma_tile.converts(workload.dtype, device):
            most_sums = CONVERTED_SUMS if workload.trans == "nt" else PAIRED_SUMS
        for config, split in itertools.product(super().usual_configs(workload, device), gemm.SPLITS):
            if config["bm"] * config["bn"] > most_sums * self.block_threads(config):
                continue
            steps = ceil_div(ceil_div(workload.k, config["bk"]), split)
            stages = max(2, min(config["stages"], steps + 1))
            group_m = config["group_m"] if split == 1 else 1
            yield Config({**config, "split_k": split, "stream_k": 0, "stages": stages, "group_m": group_m})

    def choices(self, workload: Gemm, config: Config) -> Constants:
        """Return the compile-time constants that depend on the configuration, with the division of k."""
        return {**super().choices(workload, config), "Division": gemm.division(config)}

    def emulation_workload(self, workload: Gemm, config: Config) -> Gemm:
        """Return a workload of few tiles with the same edges."""
        # Each part of k should use its buffers again, as far as emulation can afford it.
        deep = config["stages"] + 1
        return gemm.shrink(workload, config, max(deep, min(deep * config["split_k"], 24)) - 1)


def _estimate_us(workload: Gemm, config: Config, device: Device) -> float:
    """Return the estimated time of a configuration in microseconds, to order configurations by."""
    bm, bn, split, bk = (config[name] for name in ("bm", "bn", "split_k", "bk"))
    blocks = gemm.blocks(workload, bm, bn) * split
    per_sm = ceil_div(blocks, device.sm_count)
    # The cost of multiplying a tile grows with its area, that of reading it with its edges.
    # 8 warps hide latency.
    steps = ceil_div(ceil_div(workload.k, bk), split)
    work = per_sm * (bm * bn + 48 * (bm + bn)) * steps * bk
    busy = min(1.0, per_sm * config["warps_m"] * config["warps_n"] / 8)
    dtype = "f16" if mma_tile.converts(workload.dtype, device) else workload.dtype
    rate = device.mma_flop_per_clock.get(dtype, 1024.0) / 2 * device.max_clock_mhz
    # Full bandwidth needs as many bytes in flight as memory delivers during the latency of one read.
    smem = int(mma_tile.smem_bytes(config, workload.dtype)) + device.smem_reserved_bytes
    resident = min(blocks, device.sm_count * max(1, device.smem_per_sm_bytes // smem))
    lines = min(bm, workload.m) + min(bn, workload.n)
    under_way = resident * (config["stages"] - 1) * lines * bk * itemsize(workload.dtype)
    bytes_per_us = min(device.dram_gb_s * 1e3, under_way / READ_US)
    # A divided k costs a second launch, and partial sums are written and read.
    parts_us = LAUNCH_US + 8 * blocks * bm * bn / (device.dram_gb_s * 1e3) if split > 1 else 0.0
    return float(max(work / busy / rate, workload.traffic().total_bytes / bytes_per_us) + parts_us)


VARIANT = CudaMmaGemm()
