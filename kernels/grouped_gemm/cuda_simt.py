"""grouped_gemm in CUDA C++ on the FP32 units, for any size, type, layout of b and alignment.

One kernel computes all groups, as in cuda_mma: blocks read the group sizes on the device. A tile is computed
as in gemm's cuda_simt: each step of bk is read into registers while the previous one is multiplied, then
written to shared memory as f32. All types are multiplied and summed in f32 (tf32 and e4m3 more exactly than
required).

Source: Volkov and Demmel, "Benchmarking GPUs to tune dense linear algebra", 2008; Nath, Tomov and Dongarra,
"An improved MAGMA GEMM for Fermi GPUs", 2010; NVIDIA CUTLASS, grouped GEMM (blocks visit several problems).
"""

from __future__ import annotations

from collections.abc import Mapping

from tunebench.device import Device
from tunebench.kernels.common import simt_gemm
from tunebench.kernels.common.simt_gemm import SimtGemm, usual_tiles
from tunebench.kernels.grouped_gemm import _grouped
from tunebench.space import Parameter, Space
from tunebench.workloads.operators.grouped_gemm import GroupedGemm

SPACE = Space(
    (
        Parameter("bm", (16, 32, 64, 128), "rows of a group per tile"),
        Parameter("bn", (16, 32, 64, 128), "columns of c per tile"),
        Parameter("tm", (1, 2, 4, 8), "rows of c per thread"),
        Parameter("tn", (2, 4, 8), "columns of c per thread"),
        simt_gemm.LANES_N,
        simt_gemm.BK,
        simt_gemm.STAGES,
        simt_gemm.GROUP_M,
        _grouped.TILES_A_BLOCK,
    ),
    (*simt_gemm.constraints(_grouped, other_registers=40), _grouped.turns_fill_the_device),
)

USUAL = usual_tiles(
    (128, 128, 8, 8, 8, 8),
    (64, 128, 8, 4, 16, 8),
    (64, 64, 4, 4, 8, 16),
    (32, 64, 4, 4, 16, 16),
    (32, 32, 2, 4, 8, 32),
    (16, 32, 2, 4, 8, 16),
    (16, 16, 2, 2, 8, 32),
)
"""Tiles that libraries ship, largest first."""

SOURCE = """
// c[rows of g] = a[rows of g] op(b[g]), several tiles per block in turn. C has all compile-time constants.
template <class C>
__global__ void __launch_bounds__(C::THREADS, 1)
grouped_simt(const typename C::In* __restrict__ a, const typename C::In* __restrict__ b,
             const int* __restrict__ offsets, typename C::Out* __restrict__ c, int groups, int n, int k,
             int group_m) {
  using In = typename C::In;
  using Out = typename C::Out;
  using Sum = Wide<In>;
  using Grid = ThreadGrid<C::BM, C::BN, C::TM, C::TN, C::LANES_N>;
  using TileA = RegisterTile<In, C::BM, C::BK, true, C::VEC_A, C::THREADS>;
  using TileB = RegisterTile<In, C::BN, C::BK, C::B_K_CONTIGUOUS, C::VEC_B, C::THREADS>;
  static_assert(Grid::THREADS == C::THREADS, "the launch has a thread for each part of the tile");
  Sum* const shared = reinterpret_cast<Sum*>(dynamic_shared());
  const i64 pitch_b = C::B_K_CONTIGUOUS ? k : n;

  GroupedTiles<C::BM> tiles(offsets, groups, tiles_of(n, C::BN));
#pragma unroll 1
  for (u32 index = blockIdx.x; tiles.reach(index); index += gridDim.x) {
    const TileIndex tile = tiles.tile(index, group_m);
    const int row = tile.m * C::BM, column = tile.n * C::BN;  // the rest beyond them never overflows an int
    const i64 first_row = i64(tiles.begin()) + row;
    const In* const matrix_b = b + tiles.group() * (i64(k) * n);
    TileA of_a(a + first_row * k, k, tiles.rows() - row);
    TileB of_b(tile_corner<C::B_K_CONTIGUOUS>(matrix_b, column, pitch_b), pitch_b, n - column);
    const Target<Out> target = {c + first_row * n + column, n, tiles.rows() - row, n - column};

    Sum sums[C::TM][C::TN] = {};
    // All have read the previous tile from shared memory: its last step ends with a barrier.
    multiply_buffered<Grid, C::STAGES, C::BK>(sums, of_a, of_b, k, shared);

    const Finish<Out, Identity, false> finish = {nullptr, n - column};
    store_sums<Grid, C::VEC_C>(sums, target, finish);
  }
}
"""


class CudaSimtGroupedGemm(SimtGemm[GroupedGemm]):
    """Any size, type and layout of b."""

    name = "cuda_simt"
    operator = GroupedGemm
    operation = _grouped
    space = SPACE
    usual = USUAL
    entry = "grouped_simt"
    headers = ("types", "epilogue", "gemm", "gemm_simt", "grouped")
    text = SOURCE

    def further_defaults(
        self, workload: GroupedGemm, chosen: Mapping[str, int], device: Device
    ) -> dict[str, int]:
        """Return as many tiles per block as leave each SM a block."""
        return {"tiles_a_block": _grouped.widest_turns(chosen["bm"], chosen["bn"], workload, device)}


VARIANT = CudaSimtGroupedGemm()
