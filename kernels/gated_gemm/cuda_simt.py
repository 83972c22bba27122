"""gated_gemm in CUDA C++ on the ordinary units: every type and size, multiplied and summed in f32.

A block computes the same bm x bn elements of both products as gemm's cuda_simt does one: steps of a, b_gate
and b_up travel together through registers to shared memory, and a thread reads its values of a once for its
tm x tn sums of either product. It stores the activated first ones times the second ones.

Source: Volkov and Demmel, "Benchmarking GPUs to tune dense linear algebra", 2008; Shazeer, "GLU Variants
Improve Transformer", 2020.
"""

from __future__ import annotations

from typing import Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.kernels.common import simt_tile
from tunebench.kernels.common.cuda import first_product, helpers
from tunebench.kernels.common.gemm import constants
from tunebench.kernels.gated_gemm import _gated
from tunebench.kernels.gated_gemm._gated import MATRICES
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Costs, CudaVariant, Launch, Tiling, ceil_div
from tunebench.workloads.operators.gated_gemm import GatedGemm

MAX_SUMS = 64
"""Results a thread may have, each of two sums: beyond that they do not stay in its 255 registers."""


def _smem_bytes(workload: GatedGemm, bm: Any, bn: Any, bk: Any, stages: Any) -> Any:
    return simt_tile.smem_bytes(workload.trans, bm, bn, bk, stages, MATRICES)


def _widths(bk: Any, workload: GatedGemm) -> tuple[Any, Any]:
    """Return the elements an access to a and to either b moves."""
    return simt_tile.widths(_gated.widths(workload), workload.trans, bk)


def sums_stay_in_registers(tm: Any, tn: Any) -> Any:
    """A thread must have no more sums, of both products, than its registers hold."""
    return tm * tn <= MAX_SUMS


def loads_fit_in_registers(bm: Any, bn: Any, tm: Any, tn: Any, bk: Any, workload: GatedGemm) -> Any:
    """A thread must load the next step by 16 accesses or fewer."""
    a, b = _widths(bk, workload)
    return bm * bk // a + MATRICES * bn * bk // b <= 16 * simt_tile.threads(bm, bn, tm, tn)


def registers_suffice(
    bm: Any, bn: Any, tm: Any, tn: Any, bk: Any, workload: GatedGemm, device: Device
) -> Any:
    """A block must find registers on an SM for sums, fragments and the step under way."""
    threads = simt_tile.threads(bm, bn, tm, tn)
    under_way = (bm + MATRICES * bn) * bk // threads * itemsize(workload.dtype) // 4
    needed = MATRICES * tm * tn + 2 * (tm + MATRICES * tn) + under_way + 32
    return needed <= np.minimum(255, device.registers_per_sm // threads)


SPACE = Space(
    (
        Parameter("bm", (16, 32, 64, 128), "rows of c a block computes"),
        Parameter("bn", (16, 32, 64, 128), "columns of c a block computes"),
        Parameter("tm", (1, 2, 4, 8, 16), "rows of c a thread computes"),
        Parameter("tn", (2, 4, 8), "columns of c a thread computes"),
        Parameter("lanes_n", (4, 8, 16), "lanes of a warp side by side along n"),
        Parameter("bk", (4, 8, 16, 32), "elements of k in shared memory together: a step"),
        Parameter("stages", (1, 2), "2: a second buffer saves one of two barriers per bk"),
        Parameter("group_m", (1, 8), "rows of tiles that blocks running together share"),
    ),
    (
        _gated.fits,
        simt_tile.threads_are_reasonable,
        simt_tile.tiles_are_compact,
        simt_tile.warps_cover_the_tile,
        sums_stay_in_registers,
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
        (128, 64, 8, 4, 8, 8),
        (64, 64, 8, 4, 8, 8),
        (64, 32, 4, 4, 8, 16),
        (32, 32, 4, 2, 8, 16),
        (32, 16, 2, 2, 8, 16),
        (16, 16, 2, 2, 8, 16),
    )
)
"""Those of gemm with half as many columns, largest first."""

SOURCE = """
// c = activation(a op(b_gate)) * (a op(b_up)). C is the problem and the configuration.
template <class C>
__global__ void __launch_bounds__(C::THREADS, 1)
gated_simt(const typename C::In* __restrict__ a, const typename C::In* __restrict__ b_gate,
           const typename C::In* __restrict__ b_up, typename C::Out* __restrict__ c, int m, int n, int k,
           int group_m) {
  using In = typename C::In;
  using Out = typename C::Out;
  using Grid = ThreadGrid<C::BM, C::BN, C::TM, C::TN, C::LANES_N>;
  using TileA = RegisterTile<In, C::BM, C::BK, true, C::VEC_A, C::THREADS>;
  using TileB = RegisterTile<In, C::BN, C::BK, C::B_K_CONTIGUOUS, C::VEC_B, C::THREADS>;
  static_assert(Grid::THREADS == C::THREADS, "the launch has a thread for each part of the tile");

  float* const shared = reinterpret_cast<float*>(dynamic_shared());
  const TileIndex tile = tile_of_block(tiles_of(m, C::BM), tiles_of(n, C::BN), group_m);
  const int row = tile.m * C::BM, column = tile.n * C::BN;  // what is left beyond them never overflows
  const i64 pitch_b = C::B_K_CONTIGUOUS ? k : n;
  const auto tile_of = [&](const In* b) {
    return TileB(tile_corner<C::B_K_CONTIGUOUS>(b, column, pitch_b), pitch_b, n - column);
  };
  TileA of_a(a + i64(row) * k, k, m - row);
  TilePair<TileB> of_b(tile_of(b_gate), tile_of(b_up));
  float sums[C::TM][2 * C::TN] = {};
  multiply_buffered<Grid, C::STAGES, C::BK>(sums, of_a, of_b, k, shared);

  float results[C::TM][C::TN];
  gate<typename C::Activation>(results, sums);
  const Target<Out> target = {c + i64(row) * n + column, n, m - row, n - column};
  store_sums<Grid, C::VEC_C>(results, target, Finish<Out, Identity, false>{nullptr, n - column});
}
"""


class CudaSimtGatedGemm(CudaVariant[GatedGemm]):
    """Serves every size, type, layout and activation."""

    name = "cuda_simt"
    operator = GatedGemm
    space = SPACE

    def limits(self, workload: GatedGemm, device: Device) -> str | None:
        """Return why c takes more blocks than a grid has, or None."""
        return _gated.too_many_blocks(workload, ((tile["bm"], tile["bn"]) for tile in USUAL))

    def default(self, workload: GatedGemm, device: Device) -> Config:
        """Return the largest tile that still gives every SM a block, in its usual shape."""
        usable = [t for t in USUAL if _gated.fits(t["bm"], t["bn"], workload)]
        full = [t for t in usable if _gated.blocks(workload, t["bm"], t["bn"]) >= device.sm_count]
        tile = (full or usable[-1:])[0]
        bk = max(b for b in (4, 8, 16, 32) if b == 4 or (b <= tile["bk"] and b < 2 * workload.k))
        chosen = {**tile, "bk": bk, "stages": 2, "group_m": 8 if tile["bm"] < workload.m else 1}
        return Config({name: chosen[name] for name in SPACE.names})

    def tiles(self, workload: GatedGemm, config: Config) -> tuple[Tiling, ...]:
        """Return how blocks cut m, n and k."""
        return _gated.tiles(workload, config)

    def costs(self, workload: GatedGemm, table: Table, device: Device) -> Costs:
        """Count whole tiles: parts beyond the edge of c and the last step of k are computed as zeros.

        Reads of a and b may hit in L1, so that nothing is certain to come from L2.
        """
        bm, bn, bk, tm, tn = (table[name].astype(np.float64) for name in ("bm", "bn", "bk", "tm", "tn"))
        threads, blocks = simt_tile.threads(bm, bn, tm, tn), _gated.blocks(workload, bm, bn)
        padded_k = ceil_div(workload.k, bk) * bk
        term = simt_tile.term(table, device, MATRICES)
        return Costs(
            blocks=blocks,
            full_blocks=blocks,
            threads=threads,
            smem_bytes=_smem_bytes(workload, bm, bn, bk, table["stages"]),
            registers=np.minimum(MATRICES * tm * tn + 16, 65536 // threads),
            fma=padded_k * term.fma,
            smem_traffic_bytes=padded_k * term.smem_bytes,
            accesses=padded_k * term.accesses,
            instructions=padded_k * term.instructions,
            # f32 is added in the order of the source, one term after the other.
            chain_clocks=first_product(device) + padded_k * device.fma_latency,
        )

    def source(self, workload: GatedGemm, config: Config) -> str:
        """Return the kernel for this problem's types and this configuration, for all sizes."""
        vec_a, vec_b = _widths(config["bk"], workload)
        names = ("bm", "bn", "bk", "tm", "tn", "lanes_n", "stages")
        choices: dict[str, str | bool | int] = {name.upper(): config[name] for name in names}
        choices |= {
            "THREADS": simt_tile.threads(config["bm"], config["bn"], config["tm"], config["tn"]),
            "VEC_A": int(vec_a),
            "VEC_B": int(vec_b),
            "VEC_C": min(config["tn"], 4, _gated.widths(workload)[2]),
        }
        choice = constants("Choice", **_gated.problem(workload), **choices)
        return helpers("types", "epilogue", "gemm", "gemm_simt", "gated") + choice + SOURCE

    def launches(self, workload: GatedGemm, config: Config) -> tuple[Launch, ...]:
        """Return one launch of a block a tile."""
        bm, bn = config["bm"], config["bn"]
        return (
            Launch(
                entry="gated_simt<Choice>",
                grid=(int(_gated.blocks(workload, bm, bn)), 1, 1),
                block=(simt_tile.threads(bm, bn, config["tm"], config["tn"]), 1, 1),
                arguments=_gated.arguments(workload, config["group_m"]),
                smem_bytes=_smem_bytes(workload, bm, bn, config["bk"], config["stages"]),
            ),
        )

    def emulation_workload(self, workload: GatedGemm, config: Config) -> GatedGemm:
        """Return a problem of few tiles with the same edges."""
        return _gated.shrink(workload, config, config["stages"])


VARIANT = CudaSimtGatedGemm()
