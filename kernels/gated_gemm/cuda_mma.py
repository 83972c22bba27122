"""gated_gemm in CUDA C++ on tensor cores by mma.sync (sm_80 on): f16, bf16 and tf32, summed in f32.

A block computes the same bm x bn elements of both products, so that each tile of a is copied once, and each
of its fragments read once, for both. cp.async copies tiles of a, b_gate and b_up into `stages` swizzled
buffers, as in gemm's cuda_mma. A warp keeps two sums per result; it applies the activation to the first and
multiplies it by the second before it stores. The two products are never written to memory.

Limits: cp.async copies 4 bytes or more, so that the row lengths of the matrices must be multiples of 4 bytes.
k is not divided among blocks, because n is large where this operator is used.

Source: PTX ISA, "Warp-level matrix instructions" and "cp.async"; Shazeer, "GLU Variants Improve Transformer",
2020; NVIDIA CUTLASS, example "dual GEMM".
"""

from __future__ import annotations

from typing import Any

from tunebench.kernels.common import mma_gemm, mma_tile
from tunebench.kernels.common.mma_gemm import MmaGemm
from tunebench.kernels.gated_gemm import _gated
from tunebench.kernels.gated_gemm._gated import MATRICES
from tunebench.space import Parameter, Space
from tunebench.workloads.operators.gated_gemm import GatedGemm


def sums_stay_in_registers(bm: Any, bn: Any, warps_m: Any, warps_n: Any) -> Any:
    """The sums of both products must fit in the registers of a thread."""
    return MATRICES * bm * bn <= mma_tile.MAX_SUMS * mma_tile.threads(warps_m, warps_n)


SPACE = Space(
    (
        Parameter("bm", (16, 32, 64, 128, 256), "rows of c per block"),
        Parameter("bn", (16, 32, 64, 128), "columns of c per block"),
        *mma_gemm.WARPS,
        mma_gemm.BK,
        mma_gemm.STAGES,
        mma_gemm.STAGED,
        Parameter("group_m", (1, 4, 8), "rows of tiles that concurrent blocks share in L2"),
        Parameter("min_blocks", (1, 2, 3), "resident blocks per SM: limits registers per thread"),
    ),
    (
        *mma_gemm.constraints(_gated, other_registers=64),
        mma_tile.tile_is_compact,
        sums_stay_in_registers,
        mma_gemm.stages_have_tiles,
        mma_gemm.copies_are_few(_gated),
    ),
)

USUAL = (
    # bm, bn, warps_m, warps_n, bytes of bk, stages; largest first
    (128, 128, 2, 4, 64, 3),
    (128, 64, 2, 2, 64, 4),
    (64, 128, 2, 2, 64, 4),
    (64, 64, 2, 2, 128, 3),
    (32, 64, 2, 2, 128, 3),
    (32, 32, 2, 2, 128, 4),
    (16, 64, 1, 4, 128, 4),
    (16, 32, 1, 2, 128, 5),
    (16, 16, 1, 1, 128, 5),
    (16, 16, 1, 1, 64, 5),  # for accesses of one element
)
"""The usual tiles of gemm with half as many columns."""

SOURCE = """
// c = activation(a op(b_gate)) * (a op(b_up)). C has all compile-time constants.
template <class C>
__global__ void __launch_bounds__(C::THREADS, C::MIN_BLOCKS)
gated_mma(const typename C::In* __restrict__ a, const typename C::In* __restrict__ b_gate,
          const typename C::In* __restrict__ b_up, typename C::Out* __restrict__ c, int m, int n, int k,
          int group_m) {
  using In = typename C::In;
  using Out = typename C::Out;
  using Grid = WarpGrid<C::BM, C::BN, C::WARPS_M, C::WARPS_N>;
  using TileA = AsyncTile<In, C::BM, C::BK, true, C::VEC_A, C::THREADS>;
  using TileB = AsyncTile<In, C::BN, C::BK, C::B_K_CONTIGUOUS, C::VEC_B, C::THREADS>;
  static_assert(Grid::THREADS == C::THREADS, "the launch has a warp for each part of the tile");

  In* const shared = reinterpret_cast<In*>(dynamic_shared());
  const TileIndex tile = tile_of_block(tiles_of(m, C::BM), tiles_of(n, C::BN), group_m);
  const int row = tile.m * C::BM, column = tile.n * C::BN;  // the rest beyond them never overflows an int
  const i64 pitch_b = C::B_K_CONTIGUOUS ? k : n;
  const auto tile_of = [&](const In* b) {
    return TileB(tile_corner<C::B_K_CONTIGUOUS>(b, column, pitch_b), pitch_b, n - column);
  };
  TileA of_a(a + i64(row) * k, k, m - row);
  TilePair<TileB> of_b(tile_of(b_gate), tile_of(b_up));
  float sums[Grid::M / 16][2 * Grid::N / 8][4] = {};
  multiply_ahead<Grid, C::STAGES, C::BK>(sums, of_a, of_b, k, shared);

  float results[Grid::M / 16][Grid::N / 8][4];
  gate<typename C::Activation>(results, sums);
  const Target<Out> target = {c + i64(row) * n + column, n, m - row, n - column};
  const Finish<Out, Identity, false> finish = {nullptr, n - column};
  store_results<Grid, C::STAGED, C::VEC_C>(results, shared, target, finish);
}
"""


class CudaMmaGatedGemm(MmaGemm[GatedGemm]):
    """f16, bf16 and tf32 on sm_80 and later."""

    name = "cuda_mma"
    operator = GatedGemm
    operation = _gated
    space = SPACE
    usual = USUAL
    dtypes = "f16, bf16 and tf32"
    entry = "gated_mma"
    headers = ("types", "ptx", "epilogue", "gemm", "gemm_mma", "gated")
    text = SOURCE


VARIANT = CudaMmaGatedGemm()
