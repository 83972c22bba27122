"""grouped_gemm in CUDA C++ on tensor cores by mma.sync (sm_80 on): f16, bf16, tf32, e4m3, summed in f32.

One kernel computes all groups. The grid is sized for the split of rows with the most tiles, divided by the
tiles per block. Each block walks along the offsets in device memory to the groups of its tiles, and exits
when there are no more. So the host needs no group sizes, and an empty group costs one step of the walk. A
tile is computed as in gemm's cuda_mma: cp.async into `stages` swizzled buffers, ldmatrix, mma. Rows beyond
the end of a group are read as zeros.

Limits: cp.async copies 4 bytes or more, so that the row lengths of the matrices must be multiples of 4 bytes.
e4m3 needs k contiguous in b.

Source: PTX ISA, "Warp-level matrix instructions" and "cp.async"; NVIDIA CUTLASS, grouped GEMM (persistent
blocks that visit the tiles of several problems); Gale et al., "MegaBlocks: Efficient sparse training with
mixture-of-experts", 2023.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tunebench.device import Device
from tunebench.kernels.common import mma_gemm, mma_tile
from tunebench.kernels.common.mma_gemm import MmaGemm
from tunebench.kernels.grouped_gemm import _grouped
from tunebench.space import Config, Parameter, Space
from tunebench.workloads.operators.grouped_gemm import GroupedGemm

CONVERTED_SUMS = 64
"""Most sums per thread for e4m3, which compilers for sm_90 and sm_100 convert to f16 first."""


def sums_are_few(bm: Any, bn: Any, warps_m: Any, warps_n: Any, workload: GroupedGemm) -> Any:
    """The sums of a thread must fit in its registers where its operands are converted."""
    few = bm * bn <= CONVERTED_SUMS * mma_tile.threads(warps_m, warps_n)
    return few | (workload.dtype != "e4m3")


SPACE = Space(
    (
        Parameter("bm", (16, 32, 64, 128), "rows of a group per tile"),
        Parameter("bn", (32, 64, 128, 256), "columns of c per tile"),
        *mma_gemm.WARPS,
        mma_gemm.BK,
        mma_gemm.STAGES,
        mma_gemm.STAGED,
        Parameter("group_m", (1, 8), "rows of tiles that concurrent blocks share in L2"),
        _grouped.TILES_A_BLOCK,
        Parameter("min_blocks", (1, 2), "resident blocks per SM: limits registers per thread"),
    ),
    (
        *mma_gemm.constraints(_grouped, other_registers=72),
        _grouped.turns_fill_the_device,
        sums_are_few,
        mma_gemm.stages_have_tiles,
        lambda bm, bn: bn <= 8 * bm,
    ),
)

USUAL = (
    # bm, bn, warps_m, warps_n, bytes of bk, stages; largest first
    (128, 256, 2, 4, 64, 3),
    (128, 128, 2, 2, 64, 4),
    (64, 128, 2, 2, 128, 3),
    (64, 64, 2, 2, 128, 4),
    (32, 64, 2, 2, 128, 4),
    (16, 64, 1, 4, 128, 5),
    (16, 32, 1, 2, 128, 5),
)
"""Tiles that libraries ship."""

SOURCE = """
// c[rows of g] = a[rows of g] op(b[g]), several tiles per block in turn. C has all compile-time constants.
template <class C>
__global__ void __launch_bounds__(C::THREADS, C::MIN_BLOCKS)
grouped_mma(const typename C::In* __restrict__ a, const typename C::In* __restrict__ b,
            const int* __restrict__ offsets, typename C::Out* __restrict__ c, int groups, int n, int k,
            int group_m) {
  using In = typename C::In;
  using Out = typename C::Out;
  using Grid = WarpGrid<C::BM, C::BN, C::WARPS_M, C::WARPS_N>;
  using TileA = AsyncTile<In, C::BM, C::BK, true, C::VEC_A, C::THREADS>;
  using TileB = AsyncTile<In, C::BN, C::BK, C::B_K_CONTIGUOUS, C::VEC_B, C::THREADS>;
  static_assert(Grid::THREADS == C::THREADS, "the launch has a warp for each part of the tile");
  In* const shared = reinterpret_cast<In*>(dynamic_shared());
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

    __syncthreads();  // all have done with the previous tile and its shared memory
    float sums[Grid::M / 16][Grid::N / 8][4] = {};
    multiply_ahead<Grid, C::STAGES, C::BK>(sums, of_a, of_b, k, shared);

    const Finish<Out, Identity, false> finish = {nullptr, n - column};
    store_results<Grid, C::STAGED, C::VEC_C>(sums, shared, target, finish);
  }
}
"""


class CudaMmaGroupedGemm(MmaGemm[GroupedGemm]):
    """f16, bf16, tf32 and e4m3 on sm_80 and later."""

    name = "cuda_mma"
    operator = GroupedGemm
    operation = _grouped
    space = SPACE
    usual = USUAL
    dtypes = "f16, bf16, tf32 and e4m3"
    entry = "grouped_mma"
    headers = ("types", "ptx", "epilogue", "gemm", "gemm_mma", "grouped")
    text = SOURCE

    def limits(self, workload: GroupedGemm, device: Device) -> str | None:
        """Return why tensor cores or cp.async cannot do this workload, or None if they can."""
        if reason := super().limits(workload, device):
            return reason
        if workload.dtype == "e4m3" and workload.trans != "nt":
            return f"{self.key} reads e4m3 along k: trans must be nt, not {workload.trans}"
        return None

    def longest_step(self, workload: GroupedGemm) -> int:
        """Return 64 bytes for e4m3: with longer steps of what is converted first, registers spill."""
        return 64 if workload.dtype == "e4m3" else 128

    def usual_configs(self, workload: GroupedGemm, device: Device) -> Iterator[Config]:
        """Yield a configuration for each usual tile, with as many turns as leave each SM a block."""
        for config in super().usual_configs(workload, device):
            turns = _grouped.widest_turns(config["bm"], config["bn"], workload, device)
            yield Config({**config, "tiles_a_block": turns})


VARIANT = CudaMmaGroupedGemm()
