"""gated_gemm in CUDA C++ on Hopper's tensor cores by wgmma (sm_90a): f16 and bf16, summed in f32.

As gemm's cuda_wgmma, with two matrices b: a stage of the ring has a tile of a, one of b_gate and one of b_up,
and a warpgroup multiplies its rows of a by both before it waits. Its sums of both products stay in registers;
the activated first ones, times the second ones, are stored. A tile has half as many columns as one of gemm
for as many sums.

Limits: TMA reads lines that begin at multiples of 16 bytes, so that their lengths must be such.

Source: PTX ISA, "wgmma", "cp.async.bulk.tensor", "mbarrier", "setmaxnreg"; Shazeer, "GLU Variants Improve
Transformer", 2020.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.kernels import _gated, _wgmma_tile
from tunebench.kernels._cuda import helpers
from tunebench.kernels._gated import MATRICES
from tunebench.kernels._gemm import MAX_BLOCKS, constants
from tunebench.kernels._wgmma_tile import LINE_BYTES, MOST_EXTENT
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Argument, Costs, CudaVariant, Launch, Scalar, TensorMap, Tiling, ceil_div
from tunebench.workloads.operators.gated_gemm import GatedGemm

MOST_SUMS = 192
"""Sums of both products that a multiplying thread can keep."""


def _smem_bytes(workload: GatedGemm, config: Any) -> Any:
    """Return the shared memory of a block, of a configuration or of a table of them."""
    names = ("bm", "bn", "bk", "consumers", "stages", "staged")
    return _wgmma_tile.smem_bytes(workload.dtype, *(config[name] for name in names), matrices=MATRICES)


def fits(bm: Any, bn: Any, workload: GatedGemm) -> Any:
    """No tile may be twice as large as the problem if a smaller one exists; all must have a number."""
    worthwhile = ((bm < 2 * workload.m) | (bm == 64)) & ((bn < 2 * workload.n) | (bn == 64))
    return worthwhile & (_gated.blocks(workload, 1.0 * bm, 1.0 * bn) <= MAX_BLOCKS / 4)


def sums_stay_in_registers(bm: Any, bn: Any, consumers: Any, pingpong: Any, min_blocks: Any) -> Any:
    """A consumer's sums of both products must fit in its registers, and those of one wgmma as in gemm."""
    of_one = _wgmma_tile.sums_stay_in_registers(bm, bn, consumers, pingpong, min_blocks)
    needed = MATRICES * _wgmma_tile.sums(bm, bn, consumers, pingpong) + _wgmma_tile.OTHER_REGISTERS
    return of_one & (needed <= _wgmma_tile.consumer_registers(consumers, min_blocks))


def many_sums_are_staged(bm: Any, bn: Any, consumers: Any, pingpong: Any, staged: Any) -> Any:
    """Where sums take all registers there are, code for direct stores spills."""
    sums = MATRICES * _wgmma_tile.sums(bm, bn, consumers, pingpong)
    return (sums < MOST_SUMS) | (staged == 1)


def shared_memory_fits(
    bm: Any,
    bn: Any,
    bk: Any,
    consumers: Any,
    stages: Any,
    staged: Any,
    min_blocks: Any,
    workload: GatedGemm,
    device: Device,
) -> Any:
    """As many blocks as an SM is to hold must fit in its shared memory."""
    smem = _wgmma_tile.smem_bytes(workload.dtype, bm, bn, bk, consumers, stages, staged, matrices=MATRICES)
    together = min_blocks * (smem + device.smem_reserved_bytes)
    return (smem <= device.smem_per_block_bytes) & (together <= device.smem_per_sm_bytes)


def steps_are_lines(bk: Any, workload: GatedGemm) -> Any:
    """A step must be one line or two, and no step of two may be twice as long as k."""
    lines = bk * itemsize(workload.dtype) / LINE_BYTES
    return (lines == 1) | ((lines == 2) & (bk < 2 * workload.k))


def stages_have_tiles(bk: Any, stages: Any, workload: GatedGemm) -> Any:
    """The ring must not hold more than two tiles' steps."""
    return (stages == 2) | (stages <= 2 * ceil_div(workload.k, bk))


def cluster_has_tiles(bm: Any, bn: Any, cluster_m: Any, cluster_n: Any, workload: GatedGemm) -> Any:
    """Clusters are of one or two blocks, and there must be a tile for each."""
    both_busy = ((cluster_m == 1) | (bm < workload.m)) & ((cluster_n == 1) | (bn < workload.n))
    return (cluster_m * cluster_n <= 2) & both_busy


SPACE = Space(
    (
        Parameter("bm", (64, 128, 192, 256), "rows of c in a tile"),
        Parameter("bn", (64, 128, 192), "columns of c in a tile"),
        Parameter("bk", (64, 128), "steps of k in one buffer"),
        Parameter("stages", (2, 3, 4, 5, 6, 7, 8), "buffers of the ring"),
        Parameter("consumers", (1, 2, 3), "warpgroups that multiply"),
        Parameter("pingpong", (0, 1), "1: each multiplies a tile of its own while another stores"),
        Parameter("cluster_m", (1, 2), "blocks along m that share columns of b_gate and b_up"),
        Parameter("cluster_n", (1, 2), "blocks along n that share rows of a"),
        Parameter("staged", (0, 1), "1: results are gathered in shared memory for wide stores"),
        Parameter("group_m", (1, 4, 8, 16), "rows of tiles that blocks running together share"),
        Parameter("min_blocks", (1, 2), "blocks on an SM"),
    ),
    (
        fits,
        _wgmma_tile.consumers_share_the_tile,
        sums_stay_in_registers,
        many_sums_are_staged,
        steps_are_lines,
        stages_have_tiles,
        cluster_has_tiles,
        shared_memory_fits,
        lambda bm, cluster_m, group_m, workload: (group_m == 1) | (group_m * cluster_m * bm < 2 * workload.m),
    ),
)

USUAL = (
    # bm, bn, consumers; largest first
    (128, 128, 2),
    (128, 64, 2),
    (64, 128, 1),
    (64, 64, 1),
)
"""Those of gemm with half as many columns."""

SOURCE = """
// c = activation(a op(b_gate)) * (a op(b_up)). C is the problem and the configuration.
template <class C>
__global__ void __launch_bounds__(C::THREADS, C::MIN_BLOCKS)
gated_wgmma(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap gate_map,
            const __grid_constant__ TensorMap up_map, typename C::Out* __restrict__ c, int m, int n, int k,
            int group_m) {
  using Out = typename C::Out;
  u8* const ring = swizzled_shared();
  u8* const staging = ring + C::STAGES * STAGE_BYTES<C, 2>;
  const u32 buffers = shared_address(ring), barriers = shared_address(staging + C::STAGING_BYTES);
  const Tiles<C> tiles(m, n, 1, group_m);
  // Called with this warpgroup's sums of a tile, where the tile begins, and the first row in it of the sums.
  const auto store = [&](auto& sums, const TileIndex& corner, int first_row) {
    constexpr int BLOCKS = ROWS_OF_CONSUMER<C> / 64;
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) {
      gate<typename C::Activation>(sums[i], sums[BLOCKS + i]);
      const int row = corner.m + first_row + 64 * i;
      if (row >= m || corner.n >= n) continue;  // of a tile that only its cluster has
      const Target<Out> target = {c + i64(row) * n + corner.n, n, m - row, n - corner.n};
      store_rows<C>(sums[i], staging, target, Finish<Out, Identity, false>{nullptr, n - corner.n});
    }
  };
  by_role<C>(
      barriers, [&] { copy_tiles<C>(buffers, barriers, tiles, k, a_map, gate_map, up_map); },
      [&](int consumer) { multiply_each<C, 2>(buffers, barriers, tiles, consumer, k, store); });
}
"""


class CudaWgmmaGatedGemm(CudaVariant[GatedGemm]):
    """Serves f16 and bf16 on Hopper."""

    name = "cuda_wgmma"
    operator = GatedGemm
    space = SPACE
    minimum_cc = (9, 0)
    maximum_cc = (9, 0)

    def target(self, device: Device) -> str:
        """Return Hopper's own architecture: wgmma and setmaxnreg are in no other."""
        return "sm_90a"

    def limits(self, workload: GatedGemm, device: Device) -> str | None:
        """Return what keeps this problem from wgmma or from TMA, or None."""
        if workload.dtype not in ("f16", "bf16"):
            return f"{self.key} multiplies f16 and bf16, not {workload.dtype}"
        if min(_gated.widths(workload)[:2]) * itemsize(workload.dtype) < 16:
            return f"{self.key} copies by TMA: lines of a and of either b must be multiples of 16 bytes"
        if max(workload.m, workload.n, workload.k) > MOST_EXTENT:
            return f"{self.key} counts elements to {MOST_EXTENT} along a dimension"
        if not any(fits(bm, bn, workload) for bm, bn, _ in USUAL):
            return f"c ({workload.m}, {workload.n}) has too many tiles for {self.key}"
        return None

    def default(self, workload: GatedGemm, device: Device) -> Config:
        """Return the usual tile of which the busiest SM has the least to do."""

        def work(config: Config) -> int:
            bm, bn = config["bm"], config["bn"]
            rounds = ceil_div(_gated.blocks(workload, bm, bn), device.sm_count)
            # Multiplying a tile costs with its area, reading it with its edges.
            return int(rounds * (MATRICES * bm * bn + 48 * (bm + MATRICES * bn)))

        ordered = sorted(self._usual(workload, device), key=work)
        return self.space.first_valid(ordered, workload=workload, device=device)

    def _usual(self, workload: GatedGemm, device: Device) -> Iterator[Config]:
        """Yield the usual tiles, as deep as shared memory and k allow; in pairs if they fill the device."""
        for bm, bn, consumers in USUAL:
            bk = LINE_BYTES // itemsize(workload.dtype)
            paired = bm < workload.m and _gated.blocks(workload, bm, bn) >= device.sm_count
            cluster_m = 2 if paired else 1
            config = {
                "bm": bm,
                "bn": bn,
                "bk": bk,
                "stages": 0,
                "consumers": consumers,
                "pingpong": 0,
                "cluster_m": cluster_m,
                "cluster_n": 1,
                "staged": 1,
                "group_m": max(g for g in (1, 4, 8) if g == 1 or g * cluster_m * bm < 2 * workload.m),
                "min_blocks": 1,
            }
            room = device.smem_per_block_bytes - int(_smem_bytes(workload, config))
            deepest = room // ((bm + MATRICES * bn) * LINE_BYTES + 16)
            yield Config({**config, "stages": min(8, max(2, 2 * ceil_div(workload.k, bk)), deepest)})

    def tiles(self, workload: GatedGemm, config: Config) -> tuple[Tiling, ...]:
        """Return how blocks cut m, n and k."""
        return _gated.tiles(workload, config)

    def costs(self, workload: GatedGemm, table: Table, device: Device) -> Costs:
        """Count tiles as blocks: it is they that SMs share out. Beyond the edge zeros are multiplied."""
        names = ("bm", "bn", "bk", "consumers", "cluster_m", "cluster_n")
        bm, bn, bk, consumers, cluster_m, cluster_n = (table[name].astype(np.float64) for name in names)
        size = itemsize(workload.dtype)
        padded_k = ceil_div(workload.k, bk) * bk
        tiles = _gated.blocks(workload, bm, bn)
        return Costs(
            blocks=tiles,
            full_blocks=tiles,
            threads=_wgmma_tile.threads(consumers),
            smem_bytes=_smem_bytes(workload, table),
            mma_flop=MATRICES * 2 * bm * bn * padded_k,
            mma_dtype=workload.dtype,
            # Written and read once: how often wgmma reads an operand that its warps share is not published.
            smem_traffic_bytes=2 * size * padded_k * (bm + MATRICES * bn),
            fill_bytes=self._fill_bytes(workload, bm, bn, bk, cluster_m, cluster_n),
            # Four warps issue each product of 64 rows, whether the tile has one consumer or all.
            instructions=MATRICES * 4 * bm / 64 * padded_k * size / 32,
            # As of gemm's cuda_wgmma, of one product: the other is added to sums of its own.
            chain_clocks=np.where(tiles <= device.sm_count, device.l2_latency, 0.0)
            + padded_k * size / 32 * bn / 2 / np.where(table["pingpong"] == 1, consumers, 1),
        )

    def _fill_bytes(
        self, workload: GatedGemm, bm: Any, bn: Any, bk: Any, cluster_m: Any, cluster_n: Any
    ) -> Any:
        """Return what the least block, at the corner of c, reads (see `_wgmma_tile.least_copied`)."""
        of_a = _wgmma_tile.least_copied(workload.m, bm, workload.k, bk, cluster_n, True)
        of_b = _wgmma_tile.least_copied(workload.n, bn, workload.k, bk, cluster_m, workload.trans == "nt")
        return (of_a + MATRICES * of_b) * itemsize(workload.dtype)

    def claims(self, workload: GatedGemm, config: Config) -> tuple[str, ...]:
        """Products of warpgroups, bulk tensor copies, and registers that move where they are scarce."""
        return ("HGMMA", "UTMALDG", *(["USETMAXREG"] if _wgmma_tile.registers_move(config) else []))

    def source(self, workload: GatedGemm, config: Config) -> str:
        """Return the kernel for this problem's types and this configuration, for all sizes."""
        names = ("bm", "bn", "bk", "stages", "consumers", "cluster_m", "cluster_n", "min_blocks")
        choices: dict[str, str | bool | int] = {name.upper(): config[name] for name in names}
        choices |= {
            "THREADS": _wgmma_tile.threads(config["consumers"]),
            "PINGPONG": bool(config["pingpong"]),
            "STAGED": bool(config["staged"]),
            "STAGING_BYTES": _wgmma_tile.staging_bytes(config["consumers"], config["staged"]),
            "VEC_C": _gated.widths(workload)[2],
            **_wgmma_tile.moved_registers(config),
            "TileA": "PanelTile<In, BM, BK, A_K_CONTIGUOUS, CLUSTER_N>",
            "TileB": "PanelTile<In, BN, BK, B_K_CONTIGUOUS, CLUSTER_M>",
        }
        choice = constants("Choice", **_gated.problem(workload), **choices)
        shared = ("types", "ptx", "epilogue", "gemm", "gemm_mma", "ptx_hopper", "gemm_wgmma", "gated")
        return helpers(*shared) + choice + SOURCE

    def launches(self, workload: GatedGemm, config: Config) -> tuple[Launch, ...]:
        """Return one launch, of a block a tile or of as many as stay."""
        cluster_m, cluster_n = config["cluster_m"], config["cluster_n"]
        clusters = _gated.blocks(workload, config["bm"] * cluster_m, config["bn"] * cluster_n)
        return (
            Launch(
                entry="gated_wgmma<Choice>",
                grid=(int(clusters) * cluster_m * cluster_n, 1, 1),
                block=(_wgmma_tile.threads(config["consumers"]), 1, 1),
                arguments=self._arguments(workload, config),
                smem_bytes=int(_smem_bytes(workload, config)),
                cluster=cluster_m * cluster_n,
                blocks_per_sm=config["min_blocks"],
            ),
        )

    def _arguments(self, workload: GatedGemm, config: Config) -> tuple[Argument | TensorMap, ...]:
        a, *both = workload.inputs()
        bm, bn, bk = (config[name] for name in ("bm", "bn", "bk"))
        along_k = workload.trans == "nt"
        return (
            _wgmma_tile.panel_map(a, True, bm, bk, config["cluster_n"]),
            *(_wgmma_tile.panel_map(b, along_k, bn, bk, config["cluster_m"]) for b in both),
            "c",
            *(Scalar("int", size) for size in (workload.m, workload.n, workload.k, config["group_m"])),
        )

    def miniature(self, workload: GatedGemm, config: Config) -> GatedGemm:
        """Return a problem of few tiles with the same edges."""
        return _gated.shrink(workload, config, config["stages"], affordable_fma=_wgmma_tile.AFFORDABLE_FMA)


VARIANT = CudaWgmmaGatedGemm()
