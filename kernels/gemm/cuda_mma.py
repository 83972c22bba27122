"""gemm in CUDA C++ on tensor cores by mma.sync (sm_80 on): f16, bf16, tf32 and e4m3, and i8 summed in i32.

A block computes bm x bn results, a warp its share of them by instructions that take 32 bytes of k (m16n8k16
of 16-bit elements, m16n8k8 of tf32, m16n8k32 of 8-bit ones). Tiles of a and b travel by cp.async into
`stages` buffers of shared memory, so that `stages - 1` of them are under way while one is multiplied; one
barrier a tile. Buffers keep the order of global memory and are swizzled, so that ldmatrix reads them without
bank conflicts, transposing where it must. Results go to global memory from the fragments, or by way of shared
memory in accesses of 16 bytes.

Where c has few tiles, k is divided too: among `split_k` blocks a tile, or by sharing all steps of all tiles
out evenly among `stream_k` blocks. A second kernel adds the parts up, in the order of k.

Limits: cp.async copies 4 bytes or more, so that lines of matrices must be multiples of that. ldmatrix
transposes 16 bits and no fewer: 8-bit matrices whose k is not contiguous go through it in pairs, and results
are put in order at the end. sm_90 and sm_100 have no instruction of this kind for e4m3: there it is converted
and multiplied as f16.

Source: PTX ISA, "Warp-level matrix instructions" and "cp.async"; Kerr et al., "CUTLASS: fast linear algebra
in CUDA C++" (the hierarchy of tiles).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.kernels.common import gemm, mma_tile, prologue
from tunebench.kernels.common.cuda import first_product, helpers
from tunebench.kernels.common.cuda_expression import filled
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Costs, CudaVariant, Launch, Tiling, ceil_div
from tunebench.workload import Tensor
from tunebench.workloads.operators.gemm import Gemm

CONVERTED_SUMS, PAIRED_SUMS = 64, 32
"""Sums a thread may keep where e4m3 is converted on the way, and where it also comes in pairs: with twice as
many the compiler spills.
"""

LAUNCH_US = 3.5
"""What a second launch costs, about."""

READ_US = 1.5
"""What a read from memory takes where memory gives all it has, about."""


def _converts(workload: Gemm, device: Device) -> bool:
    """Return whether e4m3 becomes f16 to be multiplied: so it does in machine code for sm_90 and sm_100."""
    return workload.dtype == "e4m3" and device.compute_capability[0] in (9, 10)


def stages_have_tiles(bk: Any, split_k: Any, stages: Any, workload: Gemm) -> Any:
    """A block must have as many steps of k as buffers under way."""
    return (stages == 2) | (stages <= ceil_div(ceil_div(workload.k, bk), split_k) + 1)


SPACE = Space(
    (
        Parameter("bm", (16, 32, 64, 128, 256), "rows of c a block computes"),
        Parameter("bn", (16, 32, 64, 128, 256), "columns of c a block computes"),
        Parameter("warps_m", (1, 2, 4), "warps of a block along m"),
        Parameter("warps_n", (1, 2, 4), "warps of a block along n"),
        Parameter("bk", (16, 32, 64, 128), "elements of k in one buffer: a step"),
        Parameter("split_k", gemm.SPLITS, "blocks that share the steps of a tile"),
        Parameter("stream_k", gemm.STREAMS, "blocks that share the steps of all tiles; 0: a tile each"),
        Parameter("stages", (2, 3, 4, 5), "buffers: all but one are under way while it is multiplied"),
        Parameter("staged", (0, 1), "1: results are gathered in shared memory for wide stores"),
        Parameter("group_m", (1, 4, 8), "rows of tiles that blocks running together share"),
        Parameter("min_blocks", (1, 2, 3), "blocks an SM must be able to hold: limits registers"),
    ),
    (
        gemm.fits,
        mma_tile.tile_is_compact,
        mma_tile.warps_cover_the_tile,
        mma_tile.work_is_worth_the_warps,
        mma_tile.steps_are_of_use,
        gemm.split_is_of_use,
        gemm.stream_is_of_use,
        stages_have_tiles,
        mma_tile.copies_are_few(gemm.widths),
        mma_tile.shared_memory_fits(),
        mma_tile.min_blocks_is_of_use(64),
        lambda bm, group_m, workload: (group_m == 1) | (group_m * bm < 2 * workload.m),
        gemm.parts_are_few,
    ),
)

USUAL = (
    # bm, bn, warps_m, warps_n, bk in bytes, stages; largest first
    (128, 256, 2, 4, 64, 3),
    (128, 128, 2, 2, 64, 4),
    (128, 64, 2, 2, 64, 4),
    (64, 64, 2, 2, 128, 4),
    (32, 64, 2, 2, 128, 4),
    (32, 32, 2, 2, 128, 4),
    (16, 128, 1, 4, 128, 4),
    (16, 64, 1, 4, 128, 5),
    (16, 32, 1, 2, 128, 5),
    (16, 16, 1, 1, 128, 5),
)
"""Tiles that libraries ship."""

# Words between @ stand for what a function ahead of the product adds.
SOURCE = """
// c = activation(op(a) op(b) + bias) + residual, or parts of it for finish_tiles. C is the problem and the
// configuration.
template <class C>
__global__ void __launch_bounds__(C::THREADS, C::MIN_BLOCKS)
gemm_mma(const typename C::In* __restrict__ a, const typename C::In* __restrict__ b,
         const typename C::Out* __restrict__ bias, const typename C::Out* __restrict__ residual,@PARAMETERS@
         typename C::Out* __restrict__ c, Wide<typename C::In>* __restrict__ partial, int m, int n, int k,
         int group_m, int tiles, int parts) {
  using In = typename C::In;
  using Out = typename C::Out;
  using Sum = Wide<In>;
  using Grid = WarpGrid<C::BM, C::BN, C::WARPS_M, C::WARPS_N>;
  using TileA = @TILE@<In, C::BM, C::BK, C::A_K_CONTIGUOUS, C::VEC_A, C::THREADS>;
  using TileB = AsyncTile<In, C::BN, C::BK, C::B_K_CONTIGUOUS, C::VEC_B, C::THREADS>;
  static_assert(Grid::THREADS == C::THREADS, "the launch has a warp for each part of the tile");

  In* const shared = reinterpret_cast<In*>(dynamic_shared());
  const i64 pitch_a = C::A_K_CONTIGUOUS ? k : m, pitch_b = C::B_K_CONTIGUOUS ? k : n;
  const int steps = tiles_of(k, C::BK);
  C::Division::each_segment(tiles, steps, parts, [&](const Segment& segment) {
    const TileIndex tile = tile_at(segment.tile, tiles_of(m, C::BM), tiles_of(n, C::BN), group_m);
    const int row = tile.m * C::BM, column = tile.n * C::BN;  // what is left beyond them never overflows
    const int k0 = segment.first * C::BK;
    const In* const whole_a = a + tile.batch * (i64(m) * k);
    const In* const whole_b = b + tile.batch * (i64(k) * n);
    TileA of_a(tile_corner<C::A_K_CONTIGUOUS>(whole_a, row, k0, pitch_a), pitch_a, m - row@VECTORS@);
    TileB of_b(tile_corner<C::B_K_CONTIGUOUS>(whole_b, column, k0, pitch_b), pitch_b, n - column);
    Sum sums[Grid::M / 16][Grid::N / 8][4] = {};
    multiply_ahead<Grid, C::STAGES, C::BK>(sums, of_a, of_b, end_of<C::BK>(segment, steps, k) - k0, shared);

    if constexpr (sizeof(In) == 1) straighten<Grid, !C::A_K_CONTIGUOUS, !C::B_K_CONTIGUOUS>(sums);

    const auto store = [&](auto width, const auto& target, const auto& finish) {
      store_results<Grid, C::STAGED, decltype(width)::value>(sums, shared, target, finish);
    };
    if (C::Division::SOME_PARTS && segment.slot >= 0) {
      if constexpr (C::Division::SOME_PARTS)
        store(Number<4>(), slot_target<C::BM, C::BN>(partial, segment.slot, m - row), keep_sum<C::BN, Sum>());
    } else if constexpr (C::Division::SOME_WHOLE) {
      const i64 corner = tile.batch * (i64(m) * n) + i64(row) * n + column;
      const FinishOf<C> finish = {bias + column, n - column, residual + corner, n};
      store(Number<C::VEC_C>(), Target<Out>{c + corner, n, m - row, n - column}, finish);
    }
  });
}
"""

_PLAIN = {"PARAMETERS": "", "TILE": "AsyncTile", "VECTORS": ""}
_AHEAD = {
    "PARAMETERS": """
         const typename C::In* __restrict__ pre_scale, const typename C::In* __restrict__ pre_shift,""",
    "TILE": "PrologueAsyncTile",
    "VECTORS": ", PrologueVectors<In>{pre_scale + k0, pre_shift + k0}",
}


class CudaMmaGemm(CudaVariant[Gemm]):
    """Serves f16, bf16, tf32 and i8 on sm_80 and later, e4m3 on sm_89 and later."""

    name = "cuda_mma"
    operator = Gemm
    space = SPACE
    minimum_cc = (8, 0)

    def limits(self, workload: Gemm, device: Device) -> str | None:
        """Return what keeps this problem from tensor cores or from cp.async, or None."""
        if workload.dtype == "f32":
            return f"{self.key} multiplies f16, bf16, tf32, e4m3 and i8; f32 has no tensor-core instruction"
        if workload.dtype == "e4m3" and device.compute_capability < (8, 9):
            return f"{self.key} needs sm_89 or later to multiply e4m3"
        narrow = min(gemm.widths(workload)[:2]) * itemsize(workload.dtype)
        if narrow < mma_tile.COPY_BYTES:
            least = f"{mma_tile.COPY_BYTES} bytes or more"
            return f"{self.key} copies {least}: lines of a and b must be multiples of that"
        return gemm.too_many_blocks(workload, (tile[:2] for tile in USUAL))

    def default(self, workload: Gemm, device: Device) -> Config:
        """Return the usual tile, and division of k, that are estimated to take least."""
        ordered = sorted(
            self._usual(workload, device), key=lambda config: _estimate_us(workload, config, device)
        )
        return self.space.first_valid(ordered, workload=workload, device=device)

    def _usual(self, workload: Gemm, device: Device) -> Iterator[Config]:
        """Yield the usual tiles and divisions of k, as deep as k allows."""
        most_sums = mma_tile.MAX_SUMS
        if _converts(workload, device):
            most_sums = CONVERTED_SUMS if workload.trans == "nt" else PAIRED_SUMS
        for (bm, bn, warps_m, warps_n, line_bytes, deepest), split in itertools.product(USUAL, gemm.SPLITS):
            bk = mma_tile.usual_bk(line_bytes, workload)
            if bm * bn // mma_tile.threads(warps_m, warps_n) > most_sums:
                continue
            steps = ceil_div(ceil_div(workload.k, bk), split)
            groups = (1,) if split > 1 else (1, 4, 8)
            yield Config(
                {
                    "bm": bm,
                    "bn": bn,
                    "warps_m": warps_m,
                    "warps_n": warps_n,
                    "bk": bk,
                    "split_k": split,
                    "stream_k": 0,
                    "stages": max(2, min(deepest, steps + 1)),
                    "staged": 1,
                    "group_m": max(g for g in groups if g == 1 or g * bm < 2 * workload.m),
                    "min_blocks": 1,
                }
            )

    def tiles(self, workload: Gemm, config: Config) -> tuple[Tiling, ...]:
        """Return how blocks cut m, n and k."""
        return gemm.tiles(workload, config)

    def costs(self, workload: Gemm, table: Table, device: Device) -> Costs:
        """Count whole tiles: parts beyond the edge of c and the last step of k are multiplied as zeros.

        Adding parts of k up comes on top and is not counted.
        """
        size = itemsize(workload.dtype)
        names = ("bm", "bn", "bk", "warps_m", "warps_n")
        bm, bn, bk, warps_m, warps_n = (table[name].astype(np.float64) for name in names)
        share = gemm.shares(workload, table)
        length = share.steps * bk
        products, fragments = mma_tile.instructions(bm, bn, warps_m, warps_n, length * size)
        threads = mma_tile.threads(warps_m, warps_n)
        return Costs(
            blocks=share.blocks,
            full_blocks=share.full_blocks,
            threads=threads,
            smem_bytes=mma_tile.smem_bytes_of(table, workload.dtype),
            registers=np.minimum(bm * bn / threads + 16, 65536 // (threads * table["min_blocks"])),
            mma_flop=2 * bm * bn * length,
            mma_dtype=workload.dtype,
            sfu=bm * share.length * prologue.special_of_element(workload),
            smem_traffic_bytes=512 * fragments + length * size * (bm + bn),
            fill_bytes=mma_tile.fill_bytes(workload, gemm.widths(workload), bm, bn, share.length),
            instructions=products + fragments,
            # A warp adds 32 bytes of k to a sum by one instruction, and the next one waits for that sum.
            # Parts of a stream follow one another: a barrier stands between the stores of one and the next.
            chain_clocks=first_product(device) + length * size / 32 * device.mma_latency,
            serial_launches=share.launches,
        )

    def claims(self, workload: Gemm, config: Config) -> tuple[str, ...]:
        """Tensor cores, copies past registers, and ldmatrix, which transposes no 32-bit elements."""
        by_ldmatrix = workload.dtype != "tf32" or workload.trans != "tn"
        # e4m3 is multiplied by QMMA or, where there is none, by HMMA.
        products = {"i8": ["IMMA"], "e4m3": []}.get(workload.dtype, ["HMMA"])
        return (*products, "LDGSTS", *(["LDSM"] if by_ldmatrix else []))

    def source(self, workload: Gemm, config: Config) -> str:
        """Return the kernel for this problem's types and this configuration, for all sizes."""
        choices = mma_tile.choices(config, gemm.widths(workload))
        choices["Division"] = gemm.division(config)
        choice = gemm.constants("Choice", **gemm.problem(workload), **choices)
        shared = helpers("types", "ptx", "epilogue", "gemm", "gemm_parts", "gemm_mma")
        if not workload.has_pre:
            return shared + gemm.injected(workload) + choice + filled(SOURCE, **_PLAIN)
        ahead = prologue.struct(workload) + helpers("prologue", "prologue_mma")
        return shared + gemm.injected(workload) + ahead + choice + filled(SOURCE, **_AHEAD)

    def launches(self, workload: Gemm, config: Config) -> tuple[Launch, ...]:
        """Return the product, and what adds its parts up if k is divided."""
        product = Launch(
            entry="gemm_mma<Choice>",
            grid=(1, 1, 1),
            block=(mma_tile.threads(config["warps_m"], config["warps_n"]), 1, 1),
            arguments=(),
            smem_bytes=int(mma_tile.smem_bytes_of(config, workload.dtype)),
        )
        return gemm.divided_launches(workload, config, product)

    def scratch(self, workload: Gemm, config: Config) -> tuple[Tensor, ...]:
        """Return where parts of sums are kept, if k is divided."""
        return gemm.scratch(workload, config)

    def emulation_workload(self, workload: Gemm, config: Config) -> Gemm:
        """Return a problem of few tiles with the same edges."""
        # Each part of k should use its buffers again, as far as emulation can afford it.
        deep = config["stages"] + 1
        return gemm.shrink(workload, config, max(deep, min(deep * config["split_k"], 24)) - 1)


def _estimate_us(workload: Gemm, config: Config, device: Device) -> float:
    """Return about how long a configuration takes: to order configurations by."""
    bm, bn, split, bk = (config[name] for name in ("bm", "bn", "split_k", "bk"))
    blocks = gemm.blocks(workload, bm, bn) * split
    per_sm = ceil_div(blocks, device.sm_count)
    # Multiplying a tile costs with its area, reading it with its edges; 8 warps hide what they wait for.
    steps = ceil_div(ceil_div(workload.k, bk), split)
    work = per_sm * (bm * bn + 48 * (bm + bn)) * steps * bk
    busy = min(1.0, per_sm * config["warps_m"] * config["warps_n"] / 8)
    dtype = "f16" if _converts(workload, device) else workload.dtype
    rate = device.mma_flop_per_clock.get(dtype, 1024.0) / 2 * device.max_clock_mhz
    # Memory gives its bandwidth only to as many bytes under way as it gives in the time of one read.
    smem = int(mma_tile.smem_bytes_of(config, workload.dtype)) + device.smem_reserved_bytes
    resident = min(blocks, device.sm_count * max(1, device.smem_per_sm_bytes // smem))
    lines = min(bm, workload.m) + min(bn, workload.n)
    under_way = resident * (config["stages"] - 1) * lines * bk * itemsize(workload.dtype)
    bytes_per_us = min(device.dram_gb_s * 1e3, under_way / READ_US)
    # A second launch takes some microseconds, and parts are written and read.
    parts_us = LAUNCH_US + 8 * blocks * bm * bn / (device.dram_gb_s * 1e3) if split > 1 else 0.0
    return float(max(work / busy / rate, workload.traffic().total_bytes / bytes_per_us) + parts_us)


VARIANT = CudaMmaGemm()
