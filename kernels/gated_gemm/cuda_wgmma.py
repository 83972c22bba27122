"""gated_gemm in CUDA C++ on Hopper's tensor cores by wgmma (sm_90a): f16 and bf16, summed in f32.

As gemm's cuda_wgmma, with two matrices b: each stage of the ring has a tile of a, one of b_gate and one of
b_up, and a consumer multiplies its rows of a by both before it waits. Where one instruction can have the
columns of both tiles, they are adjacent in shared memory and a is read once. The sums of both products stay
in registers; the consumer stores activation(gate) * up. A tile has half as many columns as a tile of gemm
with the same number of sums.

Limits: TMA needs row lengths that are multiples of 16 bytes.

Source: PTX ISA, "wgmma", "cp.async.bulk.tensor", "mbarrier", "setmaxnreg"; Shazeer, "GLU Variants Improve
Transformer", 2020.
"""

from __future__ import annotations

from typing import Any

from tunebench._lazy import np
from tunebench.kernels.common import wgmma_tile
from tunebench.kernels.common.gemm_variant import Constants
from tunebench.kernels.common.wgmma_gemm import RING, WgmmaGemm, constraints
from tunebench.kernels.gated_gemm import _gated
from tunebench.kernels.gated_gemm._gated import MATRICES
from tunebench.space import Config, Parameter, Space
from tunebench.variant import Argument
from tunebench.workloads.operators.gated_gemm import GatedGemm
from tunebench.workloads.operators.gemm import Gemm

WIDEST = 256
"""Most columns of one wgmma."""

MOST_SUMS = 192
"""Sums of both products, per thread of a consumer, from which on results must be staged."""


def many_sums_are_staged(bm: Any, bn: Any, consumers: Any, pingpong: Any, staged: Any) -> Any:
    """With this many sums, code that stores results without staging spills."""
    sums = MATRICES * wgmma_tile.sums(bm, bn, consumers, pingpong)
    return (sums < MOST_SUMS) | (staged == 1)


def joined(bn: Any, consumers: Any, min_blocks: Any) -> Any:
    """Return whether one instruction multiplies both matrices: it has room for their columns and sums."""
    room = wgmma_tile.launched_registers(consumers, min_blocks)
    return (MATRICES * bn <= WIDEST) & (MATRICES * bn // 2 + wgmma_tile.INSTRUCTION_REGISTERS <= room)


SPACE = Space(
    (
        Parameter("bm", (64, 128, 192, 256), "rows of c per tile"),
        Parameter("bn", (64, 128, 192), "columns of c per tile"),
        Parameter("bk", (64, 128), "elements of k per step, in one buffer"),
        *RING,
    ),
    (many_sums_are_staged, *constraints(_gated)),
)

USUAL = (
    # bm, bn, consumers, pingpong; largest first
    (128, 128, 2, 0),
    (128, 64, 2, 0),
    (64, 128, 1, 0),
    (64, 64, 1, 0),
    (128, 64, 2, 1),
    (64, 128, 2, 1),
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
  constexpr int BLOCKS = ROWS_OF_CONSUMER<C> / 64;
  const BlockMemory<C, 2> memory;
  const Tiles<C> tiles(m, n, 1, group_m);
  // Gates at once: until then, the sums of both products take most registers.
  const auto sum = [&](auto& sums, auto&&... state) {
    multiply<C, 2, C::WIDTH>(memory.buffers, sums, state...);
    gate_in_place<typename C::Activation, BLOCKS, C::BN / 8>(sums);
  };
  const auto store = [&](auto& sums, int i, const TileIndex& first, int rows) {
    const auto& results = reinterpret_cast<const float(&)[1][C::BN / 8][4]>(sums[i]);
    const Target<Out> target = {c + i64(first.m) * n + first.n, n, rows, n - first.n};
    store_rows<C>(results, memory.staging, target, Finish<Out, Identity, false>{nullptr, n - first.n});
  };
  multiply_tiles<C, 2, C::WIDTH>(memory, tiles, k, sum, store, a_map, gate_map, up_map);
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

    def products(self, table: Any) -> Any:
        """Return the instructions per 64 rows and 32 bytes of k: one if it multiplies both matrices."""
        return np.where(joined(table["bn"], table["consumers"], table["min_blocks"]), 1, MATRICES)

    def choices(self, workload: GatedGemm, config: Config) -> Constants:
        """Return the compile-time constants, with columns per instruction and the layout of tiles of b."""
        at_once = MATRICES if joined(config["bn"], config["consumers"], config["min_blocks"]) else 1
        return {
            **super().choices(workload, config),
            "WIDTH": at_once * config["bn"],
            "TileB": f"PanelTile<In, BN, BK, B_K_CONTIGUOUS, CLUSTER_M, {at_once}>",
        }

    def arguments(self, workload: GatedGemm, config: Config) -> tuple[Argument, ...]:
        """Return c, then sizes."""
        return _gated.arguments(workload, config["group_m"])[1 + MATRICES :]


VARIANT = CudaWgmmaGatedGemm()
