"""gated_gemm in CUDA C++ on the FP32 units: any type and size, multiplied and summed in f32.

A block computes the same bm x bn elements of both products, in the way of gemm's cuda_simt: steps of a,
b_gate and b_up go together through registers to shared memory, and a thread reads its values of a once for
its tm x tn sums of both products. It stores activation(gate) * up.

Source: Volkov and Demmel, "Benchmarking GPUs to tune dense linear algebra", 2008; Shazeer, "GLU Variants
Improve Transformer", 2020.
"""

from __future__ import annotations

from typing import Any

from tunebench.kernels.common import simt_gemm
from tunebench.kernels.common.simt_gemm import SimtGemm, usual_tiles
from tunebench.kernels.gated_gemm import _gated
from tunebench.space import Parameter, Space
from tunebench.workloads.operators.gated_gemm import GatedGemm

MAX_RESULTS = 64
"""Most results per thread, each of two sums: more do not stay in its 255 registers."""


def sums_stay_in_registers(tm: Any, tn: Any) -> Any:
    """The sums of both products must fit in the registers of a thread."""
    return tm * tn <= MAX_RESULTS


SPACE = Space(
    (
        Parameter("bm", (16, 32, 64, 128), "rows of c per block"),
        Parameter("bn", (16, 32, 64, 128), "columns of c per block"),
        Parameter("tm", (1, 2, 4, 8, 16), "rows of c per thread"),
        Parameter("tn", (2, 4, 8), "columns of c per thread"),
        simt_gemm.LANES_N,
        simt_gemm.BK,
        simt_gemm.STAGES,
        simt_gemm.GROUP_M,
    ),
    (*simt_gemm.constraints(_gated, other_registers=32), sums_stay_in_registers),
)

USUAL = usual_tiles(
    (128, 64, 8, 4, 8, 8),
    (64, 64, 8, 4, 8, 8),
    (64, 32, 4, 4, 8, 16),
    (32, 32, 4, 2, 8, 16),
    (32, 16, 2, 2, 8, 16),
    (16, 16, 2, 2, 8, 16),
)
"""The usual tiles of gemm with half as many columns, largest first."""

SOURCE = """
// c = activation(a op(b_gate)) * (a op(b_up)). C has all compile-time constants.
template <class C>
__global__ void __launch_bounds__(C::THREADS, 1)
gated_simt(const typename C::In* __restrict__ a, const typename C::In* __restrict__ b_gate,
           const typename C::In* __restrict__ b_up, typename C::Out* __restrict__ c, int m, int n, int k,
           int group_m) {
  using In = typename C::In;
  using Out = typename C::Out;
  using Grid = ThreadGrid<C::BM, C::BN, C::TM, C::TN, C::LANES_N>;
  using TileA = RegisterTile<In, C::BM, C::BK, true, C::VEC_A, C::THREADS>;
  using TileB = RegisterTile<In, C::BN, C::BK, C::B_K_CONTIGUOUS, C::VEC_B, C::THREADS>;
  static_assert(Grid::THREADS == C::THREADS, "the launch has a thread for each part of the tile");

  float* const shared = reinterpret_cast<float*>(dynamic_shared());
  const TileIndex tile = tile_of_block(tiles_of(m, C::BM), tiles_of(n, C::BN), group_m);
  const int row = tile.m * C::BM, column = tile.n * C::BN;  // the rest beyond them never overflows an int
  const i64 pitch_b = C::B_K_CONTIGUOUS ? k : n;
  const auto tile_of = [&](const In* b) {
    return TileB(tile_corner<C::B_K_CONTIGUOUS>(b, column, pitch_b), pitch_b, n - column);
  };
  TileA of_a(a + i64(row) * k, k, m - row);
  TilePair<TileB> of_b(tile_of(b_gate), tile_of(b_up));
  float sums[C::TM][2 * C::TN] = {};
  multiply_buffered<Grid, C::STAGES, C::BK>(sums, of_a, of_b, k, shared);

  float results[C::TM][C::TN];
  gate<typename C::Activation>(results, sums);
  const Target<Out> target = {c + i64(row) * n + column, n, m - row, n - column};
  store_sums<Grid, C::VEC_C>(results, target, Finish<Out, Identity, false>{nullptr, n - column});
}
"""


class CudaSimtGatedGemm(SimtGemm[GatedGemm]):
    """Any size, type, layout and activation."""

    name = "cuda_simt"
    operator = GatedGemm
    operation = _gated
    space = SPACE
    usual = USUAL
    entry = "gated_simt"
    headers = ("types", "epilogue", "gemm", "gemm_simt", "gated")
    text = SOURCE


VARIANT = CudaSimtGatedGemm()
