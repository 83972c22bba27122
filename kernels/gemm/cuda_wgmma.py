"""gemm in CUDA C++ on Hopper's tensor cores by wgmma (sm_90a): f16, bf16 and e4m3, summed in f32.

Blocks stay, as many as the device holds, and take one tile of bm x bn results after the other. In each, one
warpgroup has bulk tensor copies (TMA) bring tiles of a and b into a ring of `stages` buffers; one to three
others multiply straight from there, one group of products always under way, and store. Either all of them
multiply one tile together, each its share of the rows, or they take turns (pingpong): one stores its tile
while another multiplies. Blocks of a cluster share what they copy: of two with the same rows of a, each
copies one half of them to both.

Registers move from the copying warpgroup, which needs few, to the multiplying ones. Tiles beyond the edge are
filled with zeros by the copies and cut off where results are stored.

Limits: TMA reads lines that begin at multiples of 16 bytes, so that their lengths must be such. wgmma takes
8-bit operands only if k is contiguous in both.

Source: PTX ISA, "wgmma", "cp.async.bulk.tensor", "mbarrier", "setmaxnreg"; CUTLASS 3, "Efficient GEMM in
CUDA" (warp specialisation, pingpong and cooperative kernels).
"""

from __future__ import annotations

from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.kernels.common import gemm, prologue, wgmma_tile
from tunebench.kernels.common.cuda import helpers
from tunebench.kernels.common.wgmma_gemm import WgmmaGemm, constraints, fits
from tunebench.kernels.common.wgmma_tile import MOST_EXTENT
from tunebench.space import Config, Parameter, Space
from tunebench.variant import Argument, Scalar
from tunebench.workloads.operators.gemm import Gemm

SPACE = Space(
    (
        Parameter("bm", (64, 128, 192, 256), "rows of c in a tile"),
        Parameter("bn", (64, 128, 192, 256), "columns of c in a tile"),
        Parameter("bk", (64, 128, 256), "steps of k in one buffer"),
        Parameter("stages", (2, 3, 4, 5, 6, 7, 8), "buffers of the ring"),
        Parameter("consumers", (1, 2, 3), "warpgroups that multiply"),
        Parameter("pingpong", (0, 1), "1: each multiplies a tile of its own while another stores"),
        Parameter("cluster_m", (1, 2), "blocks along m that share columns of b"),
        Parameter("cluster_n", (1, 2), "blocks along n that share rows of a"),
        Parameter("staged", (0, 1), "1: results are gathered in shared memory for wide stores"),
        Parameter("group_m", (1, 4, 8, 16), "rows of tiles that blocks running together share"),
        Parameter("min_blocks", (1, 2), "blocks on an SM"),
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
// c = activation(op(a) op(b) + bias) + residual. C is the problem and the configuration.
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
  // Called with this warpgroup's sums of a tile, where the tile begins, and the first row in it of the sums.
  const auto store = [&](const auto& sums, const TileIndex& corner, int first_row) {
#pragma unroll
    for (int i = 0; i < ROWS_OF_CONSUMER<C> / 64; ++i) {
      const int row = corner.m + first_row + 64 * i;
      if (row >= m || corner.n >= n) continue;  // of a tile that only its cluster has
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
    """Serves f16, bf16 and e4m3 on Hopper."""

    name = "cuda_wgmma"
    operator = Gemm
    space = SPACE
    entry = "gemm_wgmma"
    usual = USUAL

    def limits(self, workload: Gemm, device: Device) -> str | None:
        """Return what keeps this problem from wgmma or from TMA, or None."""
        if reason := prologue.refusal(self.key, workload):
            return reason
        if workload.dtype not in ("f16", "bf16", "e4m3"):
            return f"{self.key} multiplies f16, bf16 and e4m3, not {workload.dtype}"
        if workload.dtype == "e4m3" and workload.trans != "nt":
            return f"{self.key} multiplies e4m3 as trans=nt alone: k must be contiguous in both a and b"
        if min(gemm.widths(workload)[:2]) * itemsize(workload.dtype) < 16:
            return f"{self.key} copies by TMA: lines of a and b must be multiples of 16 bytes"
        if max(workload.m, workload.n, workload.k, workload.batch) > MOST_EXTENT:
            return f"{self.key} counts elements to {MOST_EXTENT} along a dimension"
        if not any(fits(bm, bn, workload) for bm, bn, _ in USUAL):
            return f"c ({workload.batch}, {workload.m}, {workload.n}) has too many tiles for {self.key}"
        return None

    def product(self, workload: Gemm) -> Gemm:
        """Return the problem itself."""
        return workload

    def source(self, workload: Gemm, config: Config) -> str:
        """Return the kernel for this problem's types and this configuration, for all sizes."""
        choice = gemm.constants("Choice", **gemm.problem(workload), **self.choices(workload, config))
        shared = ("types", "ptx", "epilogue", "gemm", "gemm_mma", "ptx_hopper", "gemm_wgmma")
        return helpers(*shared) + gemm.injected(workload) + choice + SOURCE

    def arguments(self, workload: Gemm, config: Config) -> tuple[Argument, ...]:
        """Return what the epilogue adds, c and sizes."""
        _, _, *others, group_m = gemm.arguments(workload, config["group_m"])
        return (*others, Scalar("int", workload.batch), group_m)

    def emulation_workload(self, workload: Gemm, config: Config) -> Gemm:
        """Return a problem of few tiles with the same edges."""
        return gemm.shrink(workload, config, config["stages"], affordable_fma=wgmma_tile.AFFORDABLE_FMA)


VARIANT = CudaWgmmaGemm()
