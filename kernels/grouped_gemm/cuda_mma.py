"""grouped_gemm in CUDA C++ on tensor cores by mma.sync (sm_80 on): f16, bf16, tf32, e4m3, summed in f32.

One kernel does all groups. Its grid is as large as the most unfavourable split of rows asks for, divided by
the tiles a block takes in turn; each block walks along the offsets in device memory to the groups of its
tiles, and ends where there are no more. The host so needs no sizes, and an empty group costs one step of
the walk. A tile is computed as gemm's cuda_mma does it: cp.async into `stages` swizzled buffers, ldmatrix,
mma. Rows beyond the end of a group are zeros, though the rows of the next one are there.

Limits: cp.async copies 4 bytes or more, so that lines of matrices must be multiples of that. e4m3 needs
sm_89, and b along k.

Source: PTX ISA, "Warp-level matrix instructions" and "cp.async"; NVIDIA CUTLASS, grouped GEMM (persistent
blocks that visit the tiles of several problems); Gale et al., "MegaBlocks: Efficient sparse training with
mixture-of-experts", 2023.
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
from tunebench.kernels.grouped_gemm import _grouped
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Costs, CudaVariant, Launch, Tiling, ceil_div
from tunebench.workloads.operators.grouped_gemm import GroupedGemm

CONVERTED_SUMS = 64
"""Sums a thread may keep of e4m3, which compilers for sm_90 and sm_100 convert to f16 on the way."""


def sums_are_few(bm: Any, bn: Any, warps_m: Any, warps_n: Any, workload: GroupedGemm) -> Any:
    """A thread must not have more sums than stay in registers where its operands are converted."""
    few = bm * bn <= CONVERTED_SUMS * mma_tile.threads(warps_m, warps_n)
    return few | (workload.dtype != "e4m3")


SPACE = Space(
    (
        Parameter("bm", (16, 32, 64, 128), "rows of a group that a tile has"),
        Parameter("bn", (32, 64, 128, 256), "columns of c a tile has"),
        Parameter("warps_m", (1, 2, 4), "warps of a block along m"),
        Parameter("warps_n", (1, 2, 4), "warps of a block along n"),
        Parameter("bk", (16, 32, 64, 128), "steps of k in one buffer"),
        Parameter("stages", (2, 3, 4, 5), "buffers: all but one are under way while it is multiplied"),
        Parameter("staged", (0, 1), "1: results are gathered in shared memory for wide stores"),
        Parameter("group_m", (1, 8), "rows of tiles that blocks running together share"),
        _grouped.TILES_A_BLOCK,
        Parameter("min_blocks", (1, 2), "blocks an SM must be able to hold: limits registers"),
    ),
    (
        _grouped.fits,
        _grouped.turns_fill_the_device,
        mma_tile.warps_cover_the_tile,
        sums_are_few,
        mma_tile.work_is_worth_the_warps,
        mma_tile.steps_are_of_use,
        mma_tile.stages_have_tiles,
        mma_tile.shared_memory_fits(),
        mma_tile.min_blocks_is_of_use(72),
        lambda bm, bn: bn <= 8 * bm,
        lambda bm, group_m, workload: (group_m == 1) | (group_m * bm < 2 * workload.m),
    ),
)

USUAL = (
    # bm, bn, warps_m, warps_n, bk in bytes, stages; largest first
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
// c[rows of g] = a[rows of g] op(b[g]), some tiles a block in turn. C is the problem and the configuration.
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
    const int row = tile.m * C::BM, column = tile.n * C::BN;  // what is left beyond them never overflows
    const i64 first_row = i64(tiles.begin()) + row;
    const In* const matrix_b = b + tiles.group() * (i64(k) * n);
    TileA of_a(a + first_row * k, k, tiles.rows() - row);
    TileB of_b(tile_corner<C::B_K_CONTIGUOUS>(matrix_b, column, pitch_b), pitch_b, n - column);
    const Target<Out> target = {c + first_row * n + column, n, tiles.rows() - row, n - column};

    __syncthreads();  // all have done with the tile before, and what it left in shared memory
    float sums[Grid::M / 16][Grid::N / 8][4] = {};
    multiply_ahead<Grid, C::STAGES, C::BK>(sums, of_a, of_b, k, shared);

    const Finish<Out, Identity, false> finish = {nullptr, n - column};
    store_results<Grid, C::STAGED, C::VEC_C>(sums, shared, target, finish);
  }
}
"""


class CudaMmaGroupedGemm(CudaVariant[GroupedGemm]):
    """Serves f16, bf16 and tf32 on sm_80 and later, e4m3 on sm_89 and later."""

    name = "cuda_mma"
    operator = GroupedGemm
    space = SPACE
    minimum_cc = (8, 0)

    def limits(self, workload: GroupedGemm, device: Device) -> str | None:
        """Return what keeps this problem from tensor cores or from cp.async, or None."""
        if workload.dtype == "f32":
            return f"{self.key} multiplies f16, bf16, tf32 and e4m3; f32 has no tensor-core instruction"
        if workload.dtype == "e4m3" and device.compute_capability < (8, 9):
            return f"{self.key} needs sm_89 or later to multiply e4m3"
        if workload.dtype == "e4m3" and workload.trans != "nt":
            return f"{self.key} reads e4m3 along k: trans must be nt, not {workload.trans}"
        narrow = min(_grouped.widths(workload)[:2]) * itemsize(workload.dtype)
        if narrow < mma_tile.COPY_BYTES:
            least = f"{mma_tile.COPY_BYTES} bytes or more"
            return f"{self.key} copies {least}: lines of a and b must be multiples of that"
        return _grouped.too_many_tiles(workload, tuple(tile[:2] for tile in USUAL))

    def default(self, workload: GroupedGemm, device: Device) -> Config:
        """Return the usual tile of which the busiest SM has the least to do if groups are of one size."""

        def work(config: Config) -> int:
            bm, bn = config["bm"], config["bn"]
            rounds = ceil_div(_grouped.usual_tiles(workload, bm, bn), device.sm_count)
            # Multiplying a tile costs with its area, reading it with its edges.
            return int(rounds * (bm * bn + 48 * (bm + bn)))

        ordered = sorted(self._usual(workload, device), key=work)
        return self.space.first_valid(ordered, workload=workload, device=device)

    def _usual(self, workload: GroupedGemm, device: Device) -> Iterator[Config]:
        """Yield the usual tiles, as deep as k allows, as many of them a block as leave each SM a block."""
        for bm, bn, warps_m, warps_n, line_bytes, deepest in USUAL:
            # Longer steps of what is converted on the way spill.
            longest = 64 if workload.dtype == "e4m3" else line_bytes
            bk = mma_tile.usual_bk(min(line_bytes, longest), workload)
            yield Config(
                {
                    "bm": bm,
                    "bn": bn,
                    "warps_m": warps_m,
                    "warps_n": warps_n,
                    "bk": bk,
                    "stages": max(2, min(deepest, ceil_div(workload.k, bk) + 1)),
                    "staged": 1,
                    "group_m": max(g for g in (1, 8) if g == 1 or g * bm < 2 * workload.m),
                    "tiles_a_block": _grouped.widest_turns(bm, bn, workload, device),
                    "min_blocks": 1,
                }
            )

    def tiles(self, workload: GroupedGemm, config: Config) -> tuple[Tiling, ...]:
        """Return how blocks cut m, n and k, if one group has all rows."""
        return _grouped.tiles(workload, config)

    def costs(self, workload: GroupedGemm, table: Table, device: Device) -> Costs:
        """Count the tiles there are if one group has all rows, and what each block has of them at least.

        Parts of a tile beyond its group, or the edge of c, and of the last step of k are multiplied as zeros.
        """
        size = itemsize(workload.dtype)
        names = ("bm", "bn", "bk", "warps_m", "warps_n")
        bm, bn, bk, warps_m, warps_n = (table[name].astype(np.float64) for name in names)
        padded_k = ceil_div(workload.k, bk) * bk
        products, fragments = mma_tile.instructions(bm, bn, warps_m, warps_n, padded_k * size)
        threads = mma_tile.threads(warps_m, warps_n)
        share = _grouped.share(workload, bm, bn, table["tiles_a_block"].astype(np.float64), device)
        return Costs(
            blocks=share.blocks,
            full_blocks=share.full_blocks,
            threads=threads,
            smem_bytes=mma_tile.smem_bytes_of(table, workload.dtype),
            registers=np.minimum(bm * bn / threads + 16, 65536 // (threads * table["min_blocks"])),
            mma_flop=share.tiles * 2 * bm * bn * padded_k,
            mma_dtype=workload.dtype,
            smem_traffic_bytes=share.tiles * (512 * fragments + padded_k * size * (bm + bn)),
            fill_bytes=share.tiles * self._fill_bytes(workload, bn),
            instructions=share.tiles * (products + fragments),
            # A warp adds 32 bytes of k to a sum by one instruction, and the next one waits for that sum.
            # Tiles follow one another: a barrier stands between the stores of one and the next.
            chain_clocks=first_product(device) + share.tiles * padded_k * size / 32 * device.mma_latency,
        )

    def _fill_bytes(self, workload: GroupedGemm, bn: Any) -> Any:
        """Return what the least tile copies past L1: one row of a, and the columns of the last tile."""
        size = itemsize(workload.dtype)
        columns = workload.n - (ceil_div(workload.n, bn) - 1) * bn
        wide_a, wide_b = (width * size == 16 for width in _grouped.widths(workload)[:2])
        return (wide_a + wide_b * columns) * workload.k * size

    def source(self, workload: GroupedGemm, config: Config) -> str:
        """Return the kernel for this problem's types and this configuration, for all sizes."""
        choices = mma_tile.choices(config, _grouped.widths(workload))
        choice = constants("Choice", **_grouped.problem(workload), **choices)
        return helpers("types", "ptx", "epilogue", "gemm", "gemm_mma", "grouped") + choice + SOURCE

    def launches(self, workload: GroupedGemm, config: Config) -> tuple[Launch, ...]:
        """Return one launch for all groups."""
        return (
            Launch(
                entry="grouped_mma<Choice>",
                grid=_grouped.grid(workload, config["bm"], config["bn"], config["tiles_a_block"]),
                block=(mma_tile.threads(config["warps_m"], config["warps_n"]), 1, 1),
                arguments=_grouped.arguments(workload, config["group_m"]),
                smem_bytes=int(mma_tile.smem_bytes_of(config, workload.dtype)),
            ),
        )

    def claims(self, workload: GroupedGemm, config: Config) -> tuple[str, ...]:
        """Tensor cores, copies past registers, and ldmatrix, which a's tiles are always read by."""
        # e4m3 is multiplied by QMMA or, where there is none, by HMMA.
        return (*(() if workload.dtype == "e4m3" else ("HMMA",)), "LDGSTS", "LDSM")

    def emulation_workload(self, workload: GroupedGemm, config: Config) -> GroupedGemm:
        """Return a problem of few groups and tiles with the same edges."""
        return _grouped.shrink(workload, config, config["stages"])


VARIANT = CudaMmaGroupedGemm()
