"""gemm in CUDA C++ on Hopper's tensor cores by wgmma (sm_90a): f16, bf16 and e4m3, summed in f32.

Persistent blocks compute one tile of bm x bn results after the other. A producer warpgroup copies tiles of a
and b by TMA into a ring of `stages` buffers; one to three consumer warpgroups multiply from there, with one
group of wgmma always in flight, and store. Consumers share the rows of one tile (cooperative), or take turns
with whole tiles (pingpong): one stores while another multiplies. Blocks of a cluster share copies: of two
blocks with the same rows of a, each copies one half of the tile to both.

The producer releases registers to the consumers. Copies fill tiles beyond the edge with zeros; stores skip
them.

Limits: TMA needs row lengths that are multiples of 16 bytes. wgmma takes 8-bit operands only if k is
contiguous in both.

Source: PTX ISA, "wgmma", "cp.async.bulk.tensor", "mbarrier", "setmaxnreg"; CUTLASS 3, "Efficient GEMM in
CUDA" (warp specialisation, pingpong and cooperative kernels).
"""

from __future__ import annotations

from tunebench.device import Device
from tunebench.kernels.common import gemm, prologue
from tunebench.kernels.common.wgmma_gemm import RING, WgmmaGemm, constraints, fits
from tunebench.space import Config, Parameter, Space
from tunebench.variant import Argument, Scalar
from tunebench.workloads.operators.gemm import Gemm

SPACE = Space(
    (
        Parameter("bm", (64, 128, 192, 256), "rows of c per tile"),
        Parameter("bn", (64, 128, 192, 256), "columns of c per tile"),
        Parameter("bk", (64, 128, 256), "elements of k per step, in one buffer"),
        *RING,
    ),
    (fits, *constraints()),
)

USUAL = (
    # bm, bn, consumers; largest first
    (128, 256, 2),
    (256, 128, 2),
    (128, 192, 2),
    (128, 128, 2),
    (128, 64, 2),
    (64, 128, 1),
    (64, 64, 1),
)
"""Tiles that libraries ship."""

SOURCE = """
// c = activation(op(a) op(b) + bias) + residual. C has all compile-time constants.
template <class C>
__global__ void __launch_bounds__(C::THREADS, C::MIN_BLOCKS)
gemm_wgmma(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
           const typename C::Out* __restrict__ bias, const typename C::Out* __restrict__ residual,
           typename C::Out* __restrict__ c, int m, int n, int k, int batch, int group_m) {
  using Out = typename C::Out;
  u8* const ring = swizzled_shared();
  u8* const staging = ring + C::STAGES * STAGE_BYTES<C>;
  const u32 buffers = shared_address(ring), barriers = shared_address(staging + C::STAGING_BYTES);
  const Tiles<C> tiles(m, n, batch, group_m);
  // Arguments: this warpgroup's sums of a tile, the tile's corner, and the first row of the sums in the tile.
  const auto store = [&](const auto& sums, const TileIndex& corner, int first_row) {
#pragma unroll
    for (int i = 0; i < ROWS_OF_CONSUMER<C> / 64; ++i) {
      const int row = corner.m + first_row + 64 * i;
      if (row >= m || corner.n >= n) continue;  // a tile beyond c, which only fills its cluster
      const i64 at = corner.batch * (i64(m) * n) + i64(row) * n + corner.n;
      const Target<Out> target = {c + at, n, m - row, n - corner.n};
      const FinishOf<C> finish = {bias + corner.n, n - corner.n, residual + at, n};
      store_rows<C>(sums[i], staging, target, finish);
    }
  };
  by_role<C>(
      barriers, [&] { copy_tiles<C>(buffers, barriers, tiles, k, a_map, b_map); },
      [&](int consumer) { multiply_each<C>(buffers, barriers, tiles, consumer, k, store); });
}
"""


class CudaWgmmaGemm(WgmmaGemm[Gemm]):
    """f16, bf16 and e4m3 on Hopper."""

    name = "cuda_wgmma"
    operator = Gemm
    operation = gemm
    space = SPACE
    usual = USUAL
    dtypes = ("f16", "bf16", "e4m3")
    entry = "gemm_wgmma"
    headers = ("types", "ptx", "epilogue", "gemm", "gemm_mma", "ptx_hopper", "gemm_wgmma")
    text = SOURCE

    def limits(self, workload: Gemm, device: Device) -> str | None:
        """Return why wgmma or TMA cannot do this workload, or None if they can."""
        return prologue.refusal(self.key, workload) or super().limits(workload, device)

    def product(self, workload: Gemm) -> Gemm:
        """Return the workload itself."""
        return workload

    def preamble(self, workload: Gemm) -> str:
        """Return an activation that is an expression, if the workload has one."""
        return gemm.injected(workload)

    def arguments(self, workload: Gemm, config: Config) -> tuple[Argument, ...]:
        """Return bias, residual, c, then sizes."""
        _, _, *others, group_m = gemm.arguments(workload, config["group_m"])
        return (*others, Scalar("int", workload.batch), group_m)


VARIANT = CudaWgmmaGemm()
