"""gated_gemm in CUDA C++ on Hopper's tensor cores by wgmma (sm_90a): f16 and bf16, summed in f32.

As gemm's cuda_wgmma, with two matrices b: each stage of the ring has a tile of a, one of b_gate and one of
b_up, and a consumer multiplies its rows of a by both before it waits. The sums of both products stay in
registers; the consumer stores activation(gate) * up. A tile has half as many columns as a tile of gemm with
the same number of sums.

Limits: TMA needs row lengths that are multiples of 16 bytes.

Source: PTX ISA, "wgmma", "cp.async.bulk.tensor", "mbarrier", "setmaxnreg"; Shazeer, "GLU Variants Improve
Transformer", 2020.
"""

from __future__ import annotations

from typing import Any

from tunebench.kernels.common import wgmma_gemm, wgmma_tile
from tunebench.kernels.common.wgmma_gemm import RING, WgmmaGemm, constraints
from tunebench.kernels.gated_gemm import _gated
from tunebench.kernels.gated_gemm._gated import MATRICES
from tunebench.space import Config, Parameter, Space
from tunebench.variant import Argument
from tunebench.workloads.operators.gated_gemm import GatedGemm
from tunebench.workloads.operators.gemm import Gemm

MOST_SUMS = 192
"""Sums of both products, per thread of a consumer, from which on results must be staged."""


def fits(bm: Any, bn: Any, workload: GatedGemm) -> Any:
    """Tiles must be less than twice as large as c unless no smaller one exists, and be countable."""
    return wgmma_gemm.fits(bm, bn, _gated.product(workload))


def many_sums_are_staged(bm: Any, bn: Any, consumers: Any, pingpong: Any, staged: Any) -> Any:
    """With this many sums, code that stores results without staging spills."""
    sums = MATRICES * wgmma_tile.sums(bm, bn, consumers, pingpong)
    return (sums < MOST_SUMS) | (staged == 1)


SPACE = Space(
    (
        Parameter("bm", (64, 128, 192, 256), "rows of c per tile"),
        Parameter("bn", (64, 128, 192), "columns of c per tile"),
        Parameter("bk", (64, 128), "elements of k per step, in one buffer"),
        *RING,
    ),
    (fits, many_sums_are_staged, *constraints(MATRICES)),
)

USUAL = (
    # bm, bn, consumers; largest first
    (128, 128, 2),
    (128, 64, 2),
    (64, 128, 1),
    (64, 64, 1),
)
"""The usual tiles of gemm with half as many columns."""

SOURCE = """
// c = activation(a op(b_gate)) * (a op(b_up)). C has all compile-time constants.
template <class C>
__global__ void __launch_bounds__(C::THREADS, C::MIN_BLOCKS)
gated_wgmma(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap gate_map,
            const __grid_constant__ TensorMap up_map, typename C::Out* __restrict__ c, int m, int n, int k,
            int group_m) {
  using Out = typename C::Out;
  u8* const ring = swizzled_shared();
  u8* const staging = ring + C::STAGES * STAGE_BYTES<C, 2>;
  const u32 buffers = shared_address(ring), barriers = shared_address(staging + C::STAGING_BYTES);
  const Tiles<C> tiles(m, n, 1, group_m);
  // Arguments: this warpgroup's sums of a tile, the tile's corner, and the first row of the sums in the tile.
  const auto store = [&](auto& sums, const TileIndex& corner, int first_row) {
    constexpr int BLOCKS = ROWS_OF_CONSUMER<C> / 64;
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) {
      gate<typename C::Activation>(sums[i], sums[BLOCKS + i]);
      const int row = corner.m + first_row + 64 * i;
      if (row >= m || corner.n >= n) continue;  // a tile beyond c, which only fills its cluster
      const Target<Out> target = {c + i64(row) * n + corner.n, n, m - row, n - corner.n};
      store_rows<C>(sums[i], staging, target, Finish<Out, Identity, false>{nullptr, n - corner.n});
    }
  };
  by_role<C>(
      barriers, [&] { copy_tiles<C>(buffers, barriers, tiles, k, a_map, gate_map, up_map); },
      [&](int consumer) { multiply_each<C, 2>(buffers, barriers, tiles, consumer, k, store); });
}
"""


class CudaWgmmaGatedGemm(WgmmaGemm[GatedGemm]):
    """f16 and bf16 on Hopper."""

    name = "cuda_wgmma"
    operator = GatedGemm
    operation = _gated
    space = SPACE
    usual = USUAL
    dtypes = ("f16", "bf16")
    entry = "gated_wgmma"
    headers = ("types", "ptx", "epilogue", "gemm", "gemm_mma", "ptx_hopper", "gemm_wgmma", "gated")
    text = SOURCE

    def product(self, workload: GatedGemm) -> Gemm:
        """Return one of the two products."""
        return _gated.product(workload)

    def arguments(self, workload: GatedGemm, config: Config) -> tuple[Argument, ...]:
        """Return c, then sizes."""
        return _gated.arguments(workload, config["group_m"])[1 + MATRICES :]


VARIANT = CudaWgmmaGatedGemm()
