"""gemm in CUDA C++ on the FP32 units, for any size, type, transpose and alignment.

A block computes bm x bn results, a thread tm x tn of them in chunks of 4 x 4. Each step of bk is read from
global memory into registers, up to `vec` elements per access, while the previous step is multiplied. It is
then written to shared memory as f32, transposed where k is contiguous. All floating-point types are
multiplied and summed in f32 (tf32 and e4m3 more exactly than required), i8 in i32. Where c has few tiles,
`split_k` blocks share the steps of a tile, and a second kernel sums their parts.

Source: Volkov and Demmel, "Benchmarking GPUs to tune dense linear algebra", 2008; Nath, Tomov and Dongarra,
"An improved MAGMA GEMM for Fermi GPUs", 2010 (two levels of blocking, chunks spread over lanes).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.kernels.common import gemm, simt_gemm
from tunebench.kernels.common.gemm_variant import Constants
from tunebench.kernels.common.simt_gemm import SimtGemm, usual_tiles
from tunebench.kernels.gemm._divided import DividedGemm
from tunebench.space import Config, Parameter, Space, takes_config
from tunebench.workloads.operators.gemm import Gemm


def width_is_useful(vec: Any, bk: Any, workload: Gemm) -> Any:
    """Accesses must be single elements, or the widest that a or b allows."""
    widest = np.maximum(*simt_gemm.widths(gemm, workload, {"vec": 16, "bk": bk}))
    return (vec == 1) | (vec == widest)


@takes_config("bm", "bn", "tm", "tn", "bk", "stages", "min_blocks")
def min_blocks_is_useful(config: Mapping[str, Any], workload: Gemm, device: Device) -> Any:
    """`min_blocks` must fit on an SM, and use fewer registers than the compiler would."""
    min_blocks, sums = config["min_blocks"], config["tm"] * config["tn"]
    threads = min_blocks * simt_gemm.threads(config)
    smem = simt_gemm.smem_bytes(workload.trans, config) + device.smem_reserved_bytes
    fit = (threads <= device.threads_per_sm) & (min_blocks * smem <= device.smem_per_sm_bytes)
    return (min_blocks == 1) | (fit & (threads * (2 * sums + 48) > device.registers_per_sm))


SPACE = Space(
    (
        Parameter("bm", (16, 32, 64, 128, 256), "rows of c per block"),
        Parameter("bn", (16, 32, 64, 128, 256), "columns of c per block"),
        Parameter("tm", (1, 2, 4, 8, 16), "rows of c per thread"),
        Parameter("tn", (2, 4, 8, 16), "columns of c per thread"),
        simt_gemm.LANES_N,
        simt_gemm.BK,
        Parameter("split_k", gemm.SPLITS, "blocks that share the steps of a tile"),
        simt_gemm.STAGES,
        Parameter("vec", (1, 2, 4, 8, 16), "elements per access to a or b, where alignment allows"),
        simt_gemm.GROUP_M,
        Parameter("min_blocks", (1, 2, 3, 4), "resident blocks per SM: limits registers per thread"),
    ),
    (
        *simt_gemm.constraints(gemm, other_registers=24, limited=("vec", "min_blocks")),
        gemm.split_is_useful,
        width_is_useful,
        min_blocks_is_useful,
        lambda split_k, group_m, min_blocks: gemm.parts_are_few(split_k, 0, group_m, min_blocks),
    ),
)

USUAL = usual_tiles(
    (128, 128, 8, 8, 8, 8, 2),
    (128, 64, 8, 4, 8, 8, 1),
    (64, 64, 4, 4, 8, 16, 1),
    (32, 64, 4, 4, 16, 16, 1),
    (32, 32, 2, 4, 8, 32, 1),
    (16, 32, 2, 4, 8, 16, 1),
    (16, 16, 2, 2, 8, 32, 1),
    names=("bm", "bn", "tm", "tn", "lanes_n", "bk", "min_blocks"),
)
"""Tiles that libraries ship, largest first."""

# A prologue fills in the words between @ (see `prologue.applied`).
SOURCE = """
// c = activation(op(a) op(b) + bias) + residual, or its parts for finish_tiles. C has the constants of
// the workload and of the configuration.
template <class C>
__global__ void __launch_bounds__(C::THREADS, C::MIN_BLOCKS)
gemm_simt(const typename C::In* __restrict__ a, const typename C::In* __restrict__ b,
          const typename C::Out* __restrict__ bias, const typename C::Out* __restrict__ residual,@PARAMETERS@
          typename C::Out* __restrict__ c, Wide<typename C::In>* __restrict__ partial, int m, int n, int k,
          int group_m, int tiles, int parts) {
  using In = typename C::In;
  using Out = typename C::Out;
  using Sum = Wide<In>;
  using Grid = ThreadGrid<C::BM, C::BN, C::TM, C::TN, C::LANES_N>;
  using TileA = @TILE@<In, C::BM, C::BK, C::A_K_CONTIGUOUS, C::VEC_A, C::THREADS>;
  using TileB = RegisterTile<In, C::BN, C::BK, C::B_K_CONTIGUOUS, C::VEC_B, C::THREADS>;
  static_assert(Grid::THREADS == C::THREADS, "the launch has a thread for each part of the tile");

  Sum* const shared = reinterpret_cast<Sum*>(dynamic_shared());
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
    Sum sums[C::TM][C::TN] = {};
    const int length = end_of<C::BK>(segment, steps, k) - k0;
    multiply_buffered<Grid, C::STAGES, C::BK>(sums, of_a, of_b, length, shared);

    if constexpr (C::Division::SOME_WHOLE) {
      const i64 corner = tile.batch * (i64(m) * n) + i64(row) * n + column;
      const Target<Out> target = {c + corner, n, m - row, n - column};
      const FinishOf<C> finish = {bias + column, n - column, residual + corner, n};
      store_sums<Grid, C::VEC_C>(sums, target, finish);
    } else {
      const Target<Sum> target = slot_target<C::BM, C::BN>(partial, segment.slot, m - row);
      store_sums<Grid, 4>(sums, target, keep_sum<C::BN, Sum>());
    }
  });
}
"""


def _two_blocks_spill(workload: Gemm, device: Device) -> bool:
    """Return whether half of the registers is too few for the largest usual tile.

    Source: spills that ptxas 13.0 and 13.5 report for defaults.
    """
    finds_both = {"bias", "residual"} <= set(workload.steps)
    widens = itemsize(workload.out) > itemsize(workload.dtype)
    return {
        (7, 5): finds_both,  # ptxas 13.0 only
        (10, 0): True,  # multiplies pairs, whose registers are neighbours
        (10, 3): True,
        (12, 0): widens,  # ptxas 13.0 only
    }.get(device.compute_capability, False)


class CudaSimtGemm(DividedGemm, SimtGemm[Gemm]):
    """Any size, type, transpose and epilogue."""

    name = "cuda_simt"
    space = SPACE
    text = SOURCE
    usual = USUAL
    entry = "gemm_simt"
    headers = ("types", "epilogue", "gemm", "gemm_parts", "gemm_simt")
    prologue_header = "prologue_simt"
    tile = "RegisterTile"
    prologue_tile = "PrologueTile"

    def further_defaults(self, workload: Gemm, chosen: Mapping[str, int], device: Device) -> dict[str, int]:
        """Return the division of k, the widest access, and 1 block per SM where 2 would spill."""
        split, bk = self._split(workload, chosen, device), chosen["bk"]
        single = split > 1 or _two_blocks_spill(workload, device)
        return {
            "split_k": split,
            "vec": max(v for v in (1, 2, 4, 8, 16) if width_is_useful(v, bk, workload)),
            "group_m": chosen["group_m"] if split == 1 else 1,
            "min_blocks": 1 if single else chosen["min_blocks"],
        }

    def _split(self, workload: Gemm, tile: Mapping[str, int], device: Device) -> int:
        """Return the number of parts of k, each worth a second launch, that gives every SM 8 warps."""
        warps, tiles = simt_gemm.threads(tile) // 32, gemm.blocks(workload, tile["bm"], tile["bn"])
        split = 1
        while tiles * split * warps < 8 * device.sm_count and tiles * split < 2 * device.sm_count:
            if 2 * split not in gemm.SPLITS or workload.k // (2 * split) < 512:
                break
            split *= 2
        return split

    def further_choices(self, config: Config) -> Constants:
        """Return the division of k."""
        return {"Division": gemm.division(config)}

    def emulation_workload(self, workload: Gemm, config: Config) -> Gemm:
        """Return a workload of few tiles with the same edges."""
        return gemm.shrink(workload, config, (config["stages"] + 1) * config["split_k"] - 1)


VARIANT = CudaSimtGemm()
