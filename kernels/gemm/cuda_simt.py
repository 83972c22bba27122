"""gemm in CUDA C++ on the ordinary units: tiles in shared memory, results in registers.

A block computes bm x bn results, a thread tm x tn of them in chunks of 4 x 4. It takes k in steps of bk: each
step is read from global memory into registers, `vec` elements at a time, while the previous one is
multiplied, then written to shared memory as f32, transposed where k is the contiguous dimension. All types
are multiplied and summed in f32 (tf32 and e4m3 more exactly than they ask for) and i8 in i32, and every size,
transpose and alignment is served: `vec` is a wish that each operand follows as far as its line length allows.
Where c has few tiles, `split_k` blocks share the steps of a tile, and a second kernel adds their sums up.

Source: Volkov and Demmel, "Benchmarking GPUs to tune dense linear algebra", 2008; Nath, Tomov and Dongarra,
"An improved MAGMA GEMM for Fermi GPUs", 2010 (two levels of blocking, chunks spread over lanes).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.kernels.common import gemm, prologue, simt_tile
from tunebench.kernels.common.cuda import first_product, helpers
from tunebench.kernels.common.cuda_expression import filled
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Costs, CudaVariant, Launch, Tiling
from tunebench.workload import Tensor
from tunebench.workloads.operators.gemm import Gemm


def _widths(vec: Any, bk: Any, workload: Gemm) -> tuple[Any, Any]:
    """Return the elements an access to a and to b really moves."""
    a, b = simt_tile.widths(gemm.widths(workload), workload.trans, bk)
    return np.minimum(vec, a), np.minimum(vec, b)


def width_is_of_use(vec: Any, bk: Any, workload: Gemm) -> Any:
    """Accesses must be single elements, or the widest that one of the operands can follow."""
    widest = np.maximum(*_widths(16, bk, workload))
    return (vec == 1) | (vec == widest)


def loads_fit_in_registers(bm: Any, bn: Any, tm: Any, tn: Any, bk: Any, vec: Any, workload: Gemm) -> Any:
    """A thread must load the next tile by 16 accesses or fewer."""
    a, b = _widths(vec, bk, workload)
    return bm * bk // a + bn * bk // b <= 16 * simt_tile.threads(bm, bn, tm, tn)


def shared_memory_fits(bm: Any, bn: Any, bk: Any, stages: Any, workload: Gemm, device: Device) -> Any:
    """The tiles must fit in the shared memory of a block."""
    return simt_tile.smem_bytes(workload.trans, bm, bn, bk, stages) <= device.smem_per_block_bytes


def registers_suffice(
    bm: Any, bn: Any, tm: Any, tn: Any, bk: Any, min_blocks: Any, workload: Gemm, device: Device
) -> Any:
    """`min_blocks` blocks must find registers on an SM for sums, fragments and the tile under way."""
    threads = simt_tile.threads(bm, bn, tm, tn)
    under_way = (bm + bn) * bk // threads * itemsize(workload.dtype) // 4
    needed = tm * tn + 2 * (tm + tn) + under_way + 24
    return needed <= np.minimum(255, device.registers_per_sm // (threads * min_blocks))


def min_blocks_is_of_use(
    bm: Any, bn: Any, tm: Any, tn: Any, bk: Any, stages: Any, min_blocks: Any, workload: Gemm, device: Device
) -> Any:
    """`min_blocks` must fit on an SM, and limit what the compiler would take of itself."""
    threads = min_blocks * simt_tile.threads(bm, bn, tm, tn)
    smem = simt_tile.smem_bytes(workload.trans, bm, bn, bk, stages) + device.smem_reserved_bytes
    fit = (threads <= device.threads_per_sm) & (min_blocks * smem <= device.smem_per_sm_bytes)
    return (min_blocks == 1) | (fit & (threads * (2 * tm * tn + 48) > device.registers_per_sm))


SPACE = Space(
    (
        Parameter("bm", (16, 32, 64, 128, 256), "rows of c a block computes"),
        Parameter("bn", (16, 32, 64, 128, 256), "columns of c a block computes"),
        Parameter("tm", (1, 2, 4, 8, 16), "rows of c a thread computes"),
        Parameter("tn", (2, 4, 8, 16), "columns of c a thread computes"),
        Parameter("lanes_n", (4, 8, 16), "lanes of a warp side by side along n"),
        Parameter("bk", (4, 8, 16, 32), "elements of k in shared memory together: a step"),
        Parameter("split_k", gemm.SPLITS, "blocks that share the steps of a tile"),
        Parameter("stages", (1, 2), "2: a second buffer saves one of two barriers per bk"),
        Parameter("vec", (1, 2, 4, 8, 16), "elements an access to a or b moves, where alignment allows"),
        Parameter("group_m", (1, 8), "rows of tiles that blocks running together share"),
        Parameter("min_blocks", (1, 2, 3, 4), "blocks an SM must be able to hold: limits registers"),
    ),
    (
        gemm.fits,
        gemm.split_is_of_use,
        simt_tile.threads_are_reasonable,
        simt_tile.tiles_are_compact,
        simt_tile.warps_cover_the_tile,
        shared_memory_fits,
        width_is_of_use,
        loads_fit_in_registers,
        registers_suffice,
        min_blocks_is_of_use,
        lambda bk, workload: (bk == 4) | (bk < 2 * workload.k),
        lambda bm, group_m, workload: (group_m == 1) | (bm < workload.m),
        lambda split_k, group_m, min_blocks: gemm.parts_are_few(split_k, 0, group_m, min_blocks),
    ),
)

USUAL = tuple(
    dict(zip(("bm", "bn", "tm", "tn", "lanes_n", "bk", "min_blocks"), values, strict=True))
    for values in (
        (128, 128, 8, 8, 8, 8, 2),
        (128, 64, 8, 4, 8, 8, 1),
        (64, 64, 4, 4, 8, 16, 1),
        (32, 64, 4, 4, 16, 16, 1),
        (32, 32, 2, 4, 8, 32, 1),
        (16, 32, 2, 4, 8, 16, 1),
        (16, 16, 2, 2, 8, 32, 1),
    )
)
"""Tiles that libraries ship, largest first."""

# Words between @ stand for what a function ahead of the product adds.
SOURCE = """
// c = activation(op(a) op(b) + bias) + residual, or parts of it for finish_tiles. C is the problem and the
// configuration.
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
    const int row = tile.m * C::BM, column = tile.n * C::BN;  // what is left beyond them never overflows
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

_PLAIN = {"PARAMETERS": "", "TILE": "RegisterTile", "VECTORS": ""}
_AHEAD = {
    "PARAMETERS": """
          const typename C::In* __restrict__ pre_scale, const typename C::In* __restrict__ pre_shift,""",
    "TILE": "PrologueTile",
    "VECTORS": ", PrologueVectors<In>{pre_scale + k0, pre_shift + k0}",
}


class CudaSimtGemm(CudaVariant[Gemm]):
    """Serves every size, type, transpose and epilogue."""

    name = "cuda_simt"
    operator = Gemm
    space = SPACE

    def limits(self, workload: Gemm, device: Device) -> str | None:
        """Return why c takes more blocks than a grid has, or None."""
        return gemm.too_many_blocks(workload, ((tile["bm"], tile["bn"]) for tile in USUAL))

    def default(self, workload: Gemm, device: Device) -> Config:
        """Return the largest tile that still gives every SM a block, in its usual shape."""
        usable = [t for t in USUAL if gemm.fits(t["bm"], t["bn"], workload)]
        full = [t for t in usable if gemm.blocks(workload, t["bm"], t["bn"]) >= device.sm_count]
        tile = (full or usable[-1:])[0]
        if device.compute_capability[0] == 10:  # it multiplies pairs, whose registers make two blocks spill
            tile = {**tile, "min_blocks": 1}
        bk = max(b for b in (4, 8, 16, 32) if b == 4 or (b <= tile["bk"] and b < 2 * workload.k))
        widest = max(v for v in (1, 2, 4, 8, 16) if width_is_of_use(v, bk, workload))
        split = self._split(workload, tile, device)
        group_m = 8 if tile["bm"] < workload.m and split == 1 else 1
        chosen = {**tile, "bk": bk, "split_k": split, "stages": 2, "vec": widest, "group_m": group_m}
        chosen["min_blocks"] = tile["min_blocks"] if split == 1 else 1
        return Config({name: chosen[name] for name in SPACE.names})

    def _split(self, workload: Gemm, tile: Mapping[str, int], device: Device) -> int:
        """Return in how many parts, each worth a second launch, k gives every SM 8 warps."""
        warps = simt_tile.threads(tile["bm"], tile["bn"], tile["tm"], tile["tn"]) // 32
        tiles = gemm.blocks(workload, tile["bm"], tile["bn"])
        found = 1
        while tiles * found * warps < 8 * device.sm_count and tiles * found < 2 * device.sm_count:
            if 2 * found not in gemm.SPLITS or workload.k // (2 * found) < 512:
                break
            found *= 2
        return found

    def tiles(self, workload: Gemm, config: Config) -> tuple[Tiling, ...]:
        """Return how blocks cut m, n and k."""
        return gemm.tiles(workload, config)

    def costs(self, workload: Gemm, table: Table, device: Device) -> Costs:
        """Count whole tiles: parts beyond the edge of c and the last step of k are computed as zeros.

        Reads of a and b may hit in L1, so that nothing is certain to come from L2. Adding parts of k up comes
        on top and is not counted.
        """
        bm, bn, bk, tm, tn = (table[name].astype(np.float64) for name in ("bm", "bn", "bk", "tm", "tn"))
        threads, term = simt_tile.threads(bm, bn, tm, tn), simt_tile.term(table, device)
        share = gemm.shares(workload, table)
        length = share.steps * bk
        return Costs(
            blocks=share.blocks,
            full_blocks=share.full_blocks,
            threads=threads,
            smem_bytes=simt_tile.smem_bytes(workload.trans, bm, bn, bk, table["stages"]),
            registers=np.minimum(tm * tn + 16, 65536 // (threads * table["min_blocks"])),
            fma=length * term.fma,
            sfu=bm * share.length * prologue.special_of_element(workload),
            smem_traffic_bytes=length * term.smem_bytes,
            accesses=length * term.accesses,
            instructions=length * term.instructions,
            chain_clocks=self._chain(workload, length, device),
            serial_launches=share.launches,
        )

    def _chain(self, workload: Gemm, length: Any, device: Device) -> Any:
        """Return the clocks of sums of so many terms.

        f32 is added in the order of the source, one term after the other; whole numbers may be in any order.
        """
        terms = 0.0 if workload.dtype == "i8" else length * device.fma_latency
        return first_product(device) + terms

    def source(self, workload: Gemm, config: Config) -> str:
        """Return the kernel for this problem's types and this configuration, for all sizes."""
        vec_a, vec_b = _widths(config["vec"], config["bk"], workload)
        vec_c = min(config["tn"], 4, gemm.widths(workload)[2])
        widths = {"VEC_A": int(vec_a), "VEC_B": int(vec_b), "VEC_C": vec_c}
        names = ("bm", "bn", "bk", "tm", "tn", "lanes_n", "stages", "min_blocks")
        choices: dict[str, str | bool | int] = {name.upper(): config[name] for name in names}
        choices["Division"] = gemm.division(config)
        threads = simt_tile.threads(config["bm"], config["bn"], config["tm"], config["tn"])
        choice = gemm.constants("Choice", **gemm.problem(workload), THREADS=threads, **choices, **widths)
        shared = helpers("types", "epilogue", "gemm", "gemm_parts", "gemm_simt")
        if not workload.has_pre:
            return shared + gemm.injected(workload) + choice + filled(SOURCE, **_PLAIN)
        ahead = prologue.struct(workload) + helpers("prologue", "prologue_simt")
        return shared + gemm.injected(workload) + ahead + choice + filled(SOURCE, **_AHEAD)

    def launches(self, workload: Gemm, config: Config) -> tuple[Launch, ...]:
        """Return the product, and what adds its parts up if k is divided."""
        bm, bn = config["bm"], config["bn"]
        product = Launch(
            entry="gemm_simt<Choice>",
            grid=(1, 1, 1),
            block=(simt_tile.threads(bm, bn, config["tm"], config["tn"]), 1, 1),
            arguments=(),
            smem_bytes=simt_tile.smem_bytes(workload.trans, bm, bn, config["bk"], config["stages"]),
        )
        return gemm.divided_launches(workload, config, product)

    def scratch(self, workload: Gemm, config: Config) -> tuple[Tensor, ...]:
        """Return where parts of sums are kept, if k is divided."""
        return gemm.scratch(workload, config)

    def emulation_workload(self, workload: Gemm, config: Config) -> Gemm:
        """Return a problem of few tiles with the same edges."""
        deep = config["stages"] + 1
        return gemm.shrink(workload, config, deep * config["split_k"] - 1)


VARIANT = CudaSimtGemm()
