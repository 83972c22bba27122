"""grouped_gemm in CUDA C++ on the ordinary units: tiles in shared memory, results in registers.

Blocks find the tiles of their groups as cuda_mma's do: one kernel for all groups, sizes read on the device.
A tile is computed as gemm's cuda_simt does it: each step of bk is read into registers while the previous
one is multiplied, then written to shared memory as f32. All types are multiplied and summed in f32 (tf32
and e4m3 more exactly than they ask for), and every size, layout and alignment is served.

Source: Volkov and Demmel, "Benchmarking GPUs to tune dense linear algebra", 2008; Nath, Tomov and Dongarra,
"An improved MAGMA GEMM for Fermi GPUs", 2010; NVIDIA CUTLASS, grouped GEMM (blocks visit several problems).
"""

from __future__ import annotations

from typing import Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.kernels.common import simt_tile
from tunebench.kernels.common.cuda import first_product, helpers
from tunebench.kernels.common.gemm import constants
from tunebench.kernels.grouped_gemm import _grouped
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Costs, CudaVariant, Launch, Tiling, ceil_div
from tunebench.workloads.operators.grouped_gemm import GroupedGemm


def _smem_bytes(workload: GroupedGemm, bm: Any, bn: Any, bk: Any, stages: Any) -> Any:
    return simt_tile.smem_bytes(workload.trans, bm, bn, bk, stages)


def _widths(bk: Any, workload: GroupedGemm) -> tuple[Any, Any]:
    """Return the elements an access to a and to b moves."""
    return simt_tile.widths(_grouped.widths(workload), workload.trans, bk)


def loads_fit_in_registers(bm: Any, bn: Any, tm: Any, tn: Any, bk: Any, workload: GroupedGemm) -> Any:
    """A thread must load the next step by 16 accesses or fewer."""
    a, b = _widths(bk, workload)
    return bm * bk // a + bn * bk // b <= 16 * simt_tile.threads(bm, bn, tm, tn)


def registers_suffice(
    bm: Any, bn: Any, tm: Any, tn: Any, bk: Any, workload: GroupedGemm, device: Device
) -> Any:
    """A block must find registers on an SM for sums, fragments, the step under way and the walk."""
    threads = simt_tile.threads(bm, bn, tm, tn)
    under_way = (bm + bn) * bk // threads * itemsize(workload.dtype) // 4
    needed = tm * tn + 2 * (tm + tn) + under_way + 40
    return needed <= np.minimum(255, device.registers_per_sm // threads)


SPACE = Space(
    (
        Parameter("bm", (16, 32, 64, 128), "rows of a group that a tile has"),
        Parameter("bn", (16, 32, 64, 128), "columns of c a tile has"),
        Parameter("tm", (1, 2, 4, 8), "rows of c a thread computes"),
        Parameter("tn", (2, 4, 8), "columns of c a thread computes"),
        Parameter("lanes_n", (4, 8, 16), "lanes of a warp side by side along n"),
        Parameter("bk", (4, 8, 16, 32), "steps of k in shared memory together"),
        Parameter("stages", (1, 2), "2: a second buffer saves one of two barriers per bk"),
        Parameter("group_m", (1, 8), "rows of tiles that blocks running together share"),
        _grouped.TILES_A_BLOCK,
    ),
    (
        _grouped.fits,
        _grouped.turns_fill_the_device,
        simt_tile.threads_are_reasonable,
        simt_tile.tiles_are_compact,
        simt_tile.warps_cover_the_tile,
        loads_fit_in_registers,
        registers_suffice,
        lambda bm, bn, bk, stages, workload, device: (
            _smem_bytes(workload, bm, bn, bk, stages) <= device.smem_per_block_bytes
        ),
        lambda bk, workload: (bk == 4) | (bk < 2 * workload.k),
        lambda bm, group_m, workload: (group_m == 1) | (bm < workload.m),
    ),
)

USUAL = tuple(
    dict(zip(("bm", "bn", "tm", "tn", "lanes_n", "bk"), values, strict=True))
    for values in (
        (128, 128, 8, 8, 8, 8),
        (64, 128, 8, 4, 16, 8),
        (64, 64, 4, 4, 8, 16),
        (32, 64, 4, 4, 16, 16),
        (32, 32, 2, 4, 8, 32),
        (16, 32, 2, 4, 8, 16),
        (16, 16, 2, 2, 8, 32),
    )
)
"""Tiles that libraries ship, largest first."""

SOURCE = """
// c[rows of g] = a[rows of g] op(b[g]), some tiles a block in turn. C is the problem and the configuration.
template <class C>
__global__ void __launch_bounds__(C::THREADS, 1)
grouped_simt(const typename C::In* __restrict__ a, const typename C::In* __restrict__ b,
             const int* __restrict__ offsets, typename C::Out* __restrict__ c, int groups, int n, int k,
             int group_m) {
  using In = typename C::In;
  using Out = typename C::Out;
  using Sum = Wide<In>;
  using Grid = ThreadGrid<C::BM, C::BN, C::TM, C::TN, C::LANES_N>;
  using TileA = RegisterTile<In, C::BM, C::BK, true, C::VEC_A, C::THREADS>;
  using TileB = RegisterTile<In, C::BN, C::BK, C::B_K_CONTIGUOUS, C::VEC_B, C::THREADS>;
  static_assert(Grid::THREADS == C::THREADS, "the launch has a thread for each part of the tile");
  Sum* const shared = reinterpret_cast<Sum*>(dynamic_shared());
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

    Sum sums[C::TM][C::TN] = {};
    // All have read what the tile before left in shared memory: its last step ends with a barrier.
    multiply_buffered<Grid, C::STAGES, C::BK>(sums, of_a, of_b, k, shared);

    const Finish<Out, Identity, false> finish = {nullptr, n - column};
    store_sums<Grid, C::VEC_C>(sums, target, finish);
  }
}
"""


class CudaSimtGroupedGemm(CudaVariant[GroupedGemm]):
    """Serves every size, type and layout of b."""

    name = "cuda_simt"
    operator = GroupedGemm
    space = SPACE

    def limits(self, workload: GroupedGemm, device: Device) -> str | None:
        """Return why c takes more tiles than can be numbered, or None."""
        return _grouped.too_many_tiles(workload, tuple((tile["bm"], tile["bn"]) for tile in USUAL))

    def default(self, workload: GroupedGemm, device: Device) -> Config:
        """Return the largest tile that still gives every SM one if groups are of one size."""
        usable = [t for t in USUAL if _grouped.fits(t["bm"], t["bn"], workload)]
        full = [t for t in usable if _grouped.usual_tiles(workload, t["bm"], t["bn"]) >= device.sm_count]
        tile = (full or usable[-1:])[0]
        bk = max(b for b in (4, 8, 16, 32) if b == 4 or (b <= tile["bk"] and b < 2 * workload.k))
        chosen = {
            **tile,
            "bk": bk,
            "stages": 2,
            "group_m": 8 if tile["bm"] < workload.m else 1,
            "tiles_a_block": _grouped.widest_turns(tile["bm"], tile["bn"], workload, device),
        }
        return Config({name: chosen[name] for name in SPACE.names})

    def tiles(self, workload: GroupedGemm, config: Config) -> tuple[Tiling, ...]:
        """Return how blocks cut m, n and k, if one group has all rows."""
        return _grouped.tiles(workload, config)

    def costs(self, workload: GroupedGemm, table: Table, device: Device) -> Costs:
        """Count the tiles there are if one group has all rows, and what each block has of them at least.

        Parts of a tile beyond its group, or the edge of c, and of the last step of k are computed as zeros.
        Reads of a and b may hit in L1, so that nothing is certain to come from L2.
        """
        bm, bn, bk, tm, tn = (table[name].astype(np.float64) for name in ("bm", "bn", "bk", "tm", "tn"))
        threads = simt_tile.threads(bm, bn, tm, tn)
        padded_k = ceil_div(workload.k, bk) * bk
        term = simt_tile.term(table, device)
        share = _grouped.share(workload, bm, bn, table["tiles_a_block"].astype(np.float64), device)
        length = share.tiles * padded_k
        return Costs(
            blocks=share.blocks,
            full_blocks=share.full_blocks,
            threads=threads,
            smem_bytes=_smem_bytes(workload, bm, bn, bk, table["stages"]),
            registers=np.minimum(tm * tn + 16, 65536 // threads),
            fma=length * term.fma,
            smem_traffic_bytes=length * term.smem_bytes,
            accesses=length * term.accesses,
            instructions=length * term.instructions,
            # Tiles follow one another: a barrier stands between the stores of one and the next.
            chain_clocks=first_product(device) + length * device.fma_latency,
        )

    def source(self, workload: GroupedGemm, config: Config) -> str:
        """Return the kernel for this problem's types and this configuration, for all sizes."""
        vec_a, vec_b = _widths(config["bk"], workload)
        vec_c = min(config["tn"], 4, _grouped.widths(workload)[2])
        widths = {"VEC_A": int(vec_a), "VEC_B": int(vec_b), "VEC_C": vec_c}
        names = ("bm", "bn", "bk", "tm", "tn", "lanes_n", "stages")
        choices = {name.upper(): config[name] for name in names}
        threads = simt_tile.threads(config["bm"], config["bn"], config["tm"], config["tn"])
        choice = constants("Choice", **_grouped.problem(workload), THREADS=threads, **choices, **widths)
        return helpers("types", "epilogue", "gemm", "gemm_simt", "grouped") + choice + SOURCE

    def launches(self, workload: GroupedGemm, config: Config) -> tuple[Launch, ...]:
        """Return one launch for all groups."""
        bm, bn = config["bm"], config["bn"]
        return (
            Launch(
                entry="grouped_simt<Choice>",
                grid=_grouped.grid(workload, bm, bn, config["tiles_a_block"]),
                block=(simt_tile.threads(bm, bn, config["tm"], config["tn"]), 1, 1),
                arguments=_grouped.arguments(workload, config["group_m"]),
                smem_bytes=_smem_bytes(workload, bm, bn, config["bk"], config["stages"]),
            ),
        )

    def emulation_workload(self, workload: GroupedGemm, config: Config) -> GroupedGemm:
        """Return a problem of few groups and tiles with the same edges."""
        return _grouped.shrink(workload, config, config["stages"])


VARIANT = CudaSimtGroupedGemm()
