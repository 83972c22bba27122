"""grouped_gemm in CUDA C++ on Hopper's tensor cores by wgmma (sm_90a): f16, bf16 and e4m3, summed in f32.

As gemm's cuda_wgmma: persistent blocks, a ring of buffers that TMA fills, warpgroups that multiply from
there. The tiles are those of grouped_gemm's cuda_mma: producer and consumers each walk along the offsets in
device memory to the groups of their tiles, so that the host needs no group sizes. One tensor map covers the
rows of all groups, and one covers the matrices of all groups. The last tile of a group also copies rows of
the next group, whose products are not stored. A cluster's tiles belong to one group.

Limits: TMA needs row lengths that are multiples of 16 bytes. wgmma takes 8-bit operands only if k is
contiguous in both.

Source: PTX ISA, "wgmma", "cp.async.bulk.tensor", "mbarrier", "setmaxnreg"; NVIDIA CUTLASS, grouped GEMM
(persistent blocks that visit the tiles of several problems); DeepSeek, DeepGEMM (contiguous grouped layout).
"""

from __future__ import annotations

from typing import Any, ClassVar

from tunebench.kernels.common.wgmma_gemm import RING, Tiles, WgmmaGemm, constraints
from tunebench.kernels.grouped_gemm import _grouped
from tunebench.space import Config, Parameter, Space
from tunebench.variant import Argument
from tunebench.workloads.operators.gemm import Gemm
from tunebench.workloads.operators.grouped_gemm import GroupedGemm

SPACE = Space(
    (
        Parameter("bm", (64, 128, 192, 256), "rows of a group per tile"),
        Parameter("bn", (64, 128, 192, 256), "columns of c per tile"),
        Parameter("bk", (64, 128, 256), "elements of k per step, in one buffer"),
        *RING,
    ),
    constraints(_grouped),
)

USUAL = (
    # bm, bn, consumers, pingpong; largest first
    (128, 256, 2, 0),
    (256, 128, 2, 0),
    (128, 192, 2, 0),
    (128, 128, 2, 0),
    (64, 256, 1, 0),
    (64, 128, 1, 0),
    (64, 64, 1, 0),
    (128, 192, 2, 1),
    (128, 128, 2, 1),
    (64, 256, 2, 1),
    (64, 128, 2, 1),
)
"""Tiles that libraries ship."""

SOURCE = """
// Tiles of all groups. Those of a cluster are neighbours in one group, and may lie beyond its last row.
template <class C>
struct TilesOfGroups : ClusterTiles<C> {
  struct Corner : TileIndex {
    int end;  // row after the group's last
  };
  GroupedTiles<C::BM * C::CLUSTER_M> clusters;
  int n, group_m;

  __device__ __forceinline__ TilesOfGroups(const int* offsets, int groups, int columns, int of_group)
      : clusters(offsets, groups, tiles_of(columns, C::BN * C::CLUSTER_N)), n(columns), group_m(of_group) {}
  __device__ __forceinline__ bool reach(u32 index) { return clusters.reach(index); }
  // Column and row in c, and the group, whose matrix B is multiplied.
  __device__ __forceinline__ Corner corner(u32 index) const {
    const TileIndex tile = this->corner_in(clusters.tile(index, group_m));
    return {{clusters.group(), clusters.begin() + tile.m, tile.n}, clusters.begin() + clusters.rows()};
  }
  __device__ __forceinline__ int row_end(const Corner& corner) const { return corner.end; }
  static __device__ __forceinline__ int matrix_of_a(const TileIndex&) { return 0; }  // of all groups
};

// c[rows of g] = a[rows of g] op(b[g]). C has all compile-time constants.
template <class C>
__global__ void __launch_bounds__(C::THREADS, C::MIN_BLOCKS)
grouped_wgmma(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
              const int* __restrict__ offsets, typename C::Out* __restrict__ c, int groups, int n, int k,
              int group_m) {
  using Out = typename C::Out;
  const BlockMemory<C> memory;
  const TilesOfGroups<C> tiles(offsets, groups, n, group_m);
  const auto sum = [&](auto&&... state) { multiply<C>(memory.buffers, state...); };
  const auto store = [&](const auto& sums, int i, const TileIndex& first, int rows) {
    const Target<Out> target = {c + i64(first.m) * n + first.n, n, rows, n - first.n};
    store_rows<C>(sums[i], memory.staging, target, Finish<Out, Identity, false>{nullptr, n - first.n});
  };
  multiply_tiles<C>(memory, tiles, k, sum, store, a_map, b_map);
}
"""


class CudaWgmmaGroupedGemm(WgmmaGemm[GroupedGemm]):
    """f16, bf16 and e4m3 on Hopper."""

    name = "cuda_wgmma"
    operator = GroupedGemm
    operation = _grouped
    space = SPACE
    usual: ClassVar[Tiles] = USUAL
    dtypes: ClassVar[tuple[str, ...]] = ("f16", "bf16", "e4m3")
    entry = "grouped_wgmma"
    headers = ("types", "ptx", "epilogue", "gemm", "gemm_mma", "ptx_hopper", "gemm_wgmma", "grouped")
    text = SOURCE

    def product(self, workload: GroupedGemm) -> Gemm:
        """Return the product of all rows with one matrix."""
        return _grouped.product(workload)

    def usual_rows(self, workload: GroupedGemm) -> int:
        """Return the rows of a group if all sizes are equal."""
        return workload.m // workload.most_filled

    def edge_rows(self, workload: GroupedGemm, bm: Any) -> int:
        """Return 1: the last group may have one row in its last tile."""
        return 1

    def arguments(self, workload: GroupedGemm, config: Config) -> tuple[Argument, ...]:
        """Return offsets, c, then sizes."""
        return _grouped.arguments(workload, config["group_m"])[2:]


VARIANT = CudaWgmmaGroupedGemm()
