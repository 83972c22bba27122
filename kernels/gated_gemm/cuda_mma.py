"""gated_gemm in CUDA C++ on tensor cores by mma.sync (sm_80 on): f16, bf16 and tf32, summed in f32.

A block computes the same bm x bn elements of both products, so that each tile of a is copied, and each of its
fragments read, once for both. Tiles of a, b_gate and b_up travel together by cp.async into `stages` swizzled
buffers, as gemm's cuda_mma has it; a warp keeps two sums of each of its results, and multiplies the activated
first by the second before it stores. What lies between the two products of an unfused layer is never written.

Limits: cp.async copies 4 bytes or more, so that lines of matrices must be multiples of that. k is not divided
among blocks: n is long where this operator is used.

Source: PTX ISA, "Warp-level matrix instructions" and "cp.async"; Shazeer, "GLU Variants Improve Transformer",
2020; NVIDIA CUTLASS, example "dual GEMM".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.kernels.common import mma_tile
from tunebench.kernels.common.cuda import first_product, helpers
from tunebench.kernels.common.gemm import constants
from tunebench.kernels.gated_gemm import _gated
from tunebench.kernels.gated_gemm._gated import MATRICES
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Costs, CudaVariant, Launch, Tiling, ceil_div
from tunebench.workloads.operators.gated_gemm import GatedGemm


def sums_stay_in_registers(bm: Any, bn: Any, warps_m: Any, warps_n: Any) -> Any:
    """A thread must have no more sums, of both products, than its registers hold."""
    return MATRICES * bm * bn <= mma_tile.MAX_SUMS * mma_tile.threads(warps_m, warps_n)


def work_is_worth_the_warps(bm: Any, bn: Any, warps_m: Any, warps_n: Any) -> Any:
    """A block must have 8 warps or fewer, and give each 32 x 32 sums if it has more than 4."""
    return mma_tile.work_is_worth_the_warps(bm, MATRICES * bn, warps_m, warps_n)


SPACE = Space(
    (
        Parameter("bm", (16, 32, 64, 128, 256), "rows of c a block computes"),
        Parameter("bn", (16, 32, 64, 128), "columns of c a block computes"),
        Parameter("warps_m", (1, 2, 4), "warps of a block along m"),
        Parameter("warps_n", (1, 2, 4), "warps of a block along n"),
        Parameter("bk", (16, 32, 64, 128), "elements of k in one buffer: a step"),
        Parameter("stages", (2, 3, 4, 5), "buffers: all but one are under way while it is multiplied"),
        Parameter("staged", (0, 1), "1: results are gathered in shared memory for wide stores"),
        Parameter("group_m", (1, 4, 8), "rows of tiles that blocks running together share"),
        Parameter("min_blocks", (1, 2, 3), "blocks an SM must be able to hold: limits registers"),
    ),
    (
        _gated.fits,
        mma_tile.tile_is_compact,
        mma_tile.warps_cover_the_tile,
        sums_stay_in_registers,
        work_is_worth_the_warps,
        mma_tile.steps_are_of_use,
        mma_tile.stages_have_tiles,
        mma_tile.copies_are_few(_gated.widths, MATRICES),
        mma_tile.shared_memory_fits(MATRICES),
        mma_tile.min_blocks_is_of_use(64, MATRICES),
        lambda bm, group_m, workload: (group_m == 1) | (group_m * bm < 2 * workload.m),
    ),
)

USUAL = (
    # bm, bn, warps_m, warps_n, bk in bytes, stages; largest first
    (128, 128, 2, 4, 64, 3),
    (128, 64, 2, 2, 64, 4),
    (64, 128, 2, 2, 64, 4),
    (64, 64, 2, 2, 128, 3),
    (32, 64, 2, 2, 128, 3),
    (32, 32, 2, 2, 128, 4),
    (16, 64, 1, 4, 128, 4),
    (16, 32, 1, 2, 128, 5),
    (16, 16, 1, 1, 128, 5),
    (16, 16, 1, 1, 64, 5),  # where elements are copied one by one
)
"""Those of gemm with half as many columns."""

SOURCE = """
// c = activation(a op(b_gate)) * (a op(b_up)). C is the problem and the configuration.
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
  const int row = tile.m * C::BM, column = tile.n * C::BN;  // what is left beyond them never overflows
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


class CudaMmaGatedGemm(CudaVariant[GatedGemm]):
    """Serves f16, bf16 and tf32 on sm_80 and later."""

    name = "cuda_mma"
    operator = GatedGemm
    space = SPACE
    minimum_cc = (8, 0)

    def limits(self, workload: GatedGemm, device: Device) -> str | None:
        """Return what keeps this problem from tensor cores or from cp.async, or None."""
        if workload.dtype == "f32":
            return f"{self.key} multiplies f16, bf16 and tf32; f32 has no tensor-core instruction"
        narrow = min(_gated.widths(workload)[:2]) * itemsize(workload.dtype)
        if narrow < mma_tile.COPY_BYTES:
            least = f"{mma_tile.COPY_BYTES} bytes or more"
            return f"{self.key} copies {least}: lines of a and of either b must be multiples of that"
        return _gated.too_many_blocks(workload, (tile[:2] for tile in USUAL))

    def default(self, workload: GatedGemm, device: Device) -> Config:
        """Return the usual tile of which the busiest SM has the least to do."""

        def work(config: Config) -> int:
            bm, bn = config["bm"], config["bn"]
            rounds = ceil_div(_gated.blocks(workload, bm, bn), device.sm_count)
            # Multiplying a tile costs with its area, reading it with its edges.
            return int(rounds * (MATRICES * bm * bn + 48 * (bm + MATRICES * bn)))

        ordered = sorted(self._usual(workload), key=work)
        return self.space.first_valid(ordered, workload=workload, device=device)

    def _usual(self, workload: GatedGemm) -> Iterator[Config]:
        """Yield the usual tiles, as deep as k allows."""
        for bm, bn, warps_m, warps_n, line_bytes, deepest in USUAL:
            bk = mma_tile.usual_bk(line_bytes, workload)
            yield Config(
                {
                    "bm": bm,
                    "bn": bn,
                    "warps_m": warps_m,
                    "warps_n": warps_n,
                    "bk": bk,
                    "stages": max(2, min(deepest, ceil_div(workload.k, bk) + 1)),
                    "staged": 1,
                    "group_m": max(g for g in (1, 4, 8) if g == 1 or g * bm < 2 * workload.m),
                    "min_blocks": 1,
                }
            )

    def tiles(self, workload: GatedGemm, config: Config) -> tuple[Tiling, ...]:
        """Return how blocks cut m, n and k."""
        return _gated.tiles(workload, config)

    def costs(self, workload: GatedGemm, table: Table, device: Device) -> Costs:
        """Count whole tiles: parts beyond the edge of c and the last step of k are multiplied as zeros."""
        size = itemsize(workload.dtype)
        names = ("bm", "bn", "bk", "warps_m", "warps_n")
        bm, bn, bk, warps_m, warps_n = (table[name].astype(np.float64) for name in names)
        padded_k = ceil_div(workload.k, bk) * bk
        products, fragments = mma_tile.instructions(bm, bn, warps_m, warps_n, padded_k * size, MATRICES)
        threads, blocks = mma_tile.threads(warps_m, warps_n), _gated.blocks(workload, bm, bn)
        return Costs(
            blocks=blocks,
            full_blocks=blocks,
            threads=threads,
            smem_bytes=mma_tile.smem_bytes_of(table, workload.dtype, MATRICES),
            registers=np.minimum(MATRICES * bm * bn / threads + 16, 65536 // (threads * table["min_blocks"])),
            mma_flop=MATRICES * 2 * bm * bn * padded_k,
            mma_dtype=workload.dtype,
            smem_traffic_bytes=512 * fragments + padded_k * size * (bm + MATRICES * bn),
            fill_bytes=mma_tile.fill_bytes(workload, _gated.widths(workload), bm, bn, workload.k, MATRICES),
            instructions=products + fragments,
            # A warp adds 32 bytes of k to a sum by one instruction, and the next one waits for that sum.
            chain_clocks=first_product(device) + padded_k * size / 32 * device.mma_latency,
        )

    def claims(self, workload: GatedGemm, config: Config) -> tuple[str, ...]:
        """Tensor cores, copies past registers, and ldmatrix, which a's tiles are always read by."""
        return ("HMMA", "LDGSTS", "LDSM")

    def source(self, workload: GatedGemm, config: Config) -> str:
        """Return the kernel for this problem's types and this configuration, for all sizes."""
        choices = mma_tile.choices(config, _gated.widths(workload))
        choice = constants("Choice", **_gated.problem(workload), **choices)
        return helpers("types", "ptx", "epilogue", "gemm", "gemm_mma", "gated") + choice + SOURCE

    def launches(self, workload: GatedGemm, config: Config) -> tuple[Launch, ...]:
        """Return one launch of a block a tile."""
        return (
            Launch(
                entry="gated_mma<Choice>",
                grid=(int(_gated.blocks(workload, config["bm"], config["bn"])), 1, 1),
                block=(mma_tile.threads(config["warps_m"], config["warps_n"]), 1, 1),
                arguments=_gated.arguments(workload, config["group_m"]),
                smem_bytes=int(mma_tile.smem_bytes_of(config, workload.dtype, MATRICES)),
            ),
        )

    def emulation_workload(self, workload: GatedGemm, config: Config) -> GatedGemm:
        """Return a problem of few tiles with the same edges."""
        return _gated.shrink(workload, config, config["stages"])


VARIANT = CudaMmaGatedGemm()
