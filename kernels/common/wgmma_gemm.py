"""Base class of matrix products on Hopper's tensor cores by wgmma.

The cuda_wgmma variants of gemm and gated_gemm derive from it. TMA copies tiles of a and b as boxes into a
ring of buffers. The device code is in gemm_wgmma.cuh.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator
from typing import Any, ClassVar, TypeVar

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.kernels.common import gemm, wgmma_tile
from tunebench.kernels.common.gemm_variant import Constants, TiledGemm
from tunebench.kernels.common.wgmma_tile import LINE_BYTES
from tunebench.space import Config, Constraint, Parameter, Table
from tunebench.variant import Argument, Costs, Launch, TensorMap, ceil_div
from tunebench.workloads.operators.gated_gemm import GatedGemm
from tunebench.workloads.operators.gemm import Gemm

__all__ = ["RING", "WgmmaGemm", "constraints", "fits"]

W = TypeVar("W", bound=Gemm | GatedGemm)

RING = (
    Parameter("stages", (2, 3, 4, 5, 6, 7, 8), "buffers of the ring in shared memory"),
    Parameter("consumers", (1, 2, 3), "warpgroups that multiply"),
    Parameter("pingpong", (0, 1), "1: each consumer multiplies its own tile while another stores"),
    Parameter("cluster_m", (1, 2), "blocks of a cluster along m, which share columns of b"),
    Parameter("cluster_n", (1, 2), "blocks of a cluster along n, which share rows of a"),
    Parameter("staged", (0, 1), "1: store results through shared memory, in wide accesses"),
    Parameter("group_m", (1, 4, 8, 16), "rows of tiles that concurrent blocks share in L2"),
    Parameter("min_blocks", (1, 2), "resident blocks per SM"),
)


# -- constraints --------------------------------------------------------------------------------------------


def fits(bm: Any, bn: Any, workload: Gemm) -> Any:
    """Tiles must be less than twice as large as c unless no smaller one exists, and be countable."""
    worthwhile = ((bm < 2 * workload.m) | (bm == 64)) & ((bn < 2 * workload.n) | (bn == 64))
    return worthwhile & (gemm.blocks(workload, 1.0 * bm, 1.0 * bn) <= gemm.MAX_BLOCKS / 4)


def steps_are_lines(bk: Any, workload: Any) -> Any:
    """A step must be one line, or two lines that are less than twice k."""
    lines = bk * itemsize(workload.dtype) / LINE_BYTES
    return (lines == 1) | ((lines == 2) & (bk < 2 * workload.k))


def stages_have_tiles(bk: Any, stages: Any, workload: Any) -> Any:
    """The ring must hold the steps of two tiles at most."""
    return (stages == 2) | (stages <= 2 * ceil_div(workload.k, bk))


def cluster_has_tiles(bm: Any, bn: Any, cluster_m: Any, cluster_n: Any, workload: Any) -> Any:
    """A cluster has one or two blocks, and there must be a tile for each."""
    both_busy = ((cluster_m == 1) | (bm < workload.m)) & ((cluster_n == 1) | (bn < workload.n))
    return (cluster_m * cluster_n <= 2) & both_busy


def constraints(matrices: int = 1) -> tuple[Constraint, ...]:
    """Return the constraints of a space for products of a with `matrices` matrices b, except `fits`."""
    return (
        wgmma_tile.consumers_share_the_tile,
        wgmma_tile.sums_stay_in_registers(matrices),
        steps_are_lines,
        stages_have_tiles,
        cluster_has_tiles,
        wgmma_tile.shared_memory_fits(*wgmma_tile.TILE, matrices=matrices),
        lambda bm, cluster_m, group_m, workload: (group_m == 1) | (group_m * cluster_m * bm < 2 * workload.m),
    )


# -- the variant --------------------------------------------------------------------------------------------


class WgmmaGemm(TiledGemm[W]):
    """A variant for Hopper by wgmma and TMA.

    Attributes:
        usual: Tiles that libraries ship, largest first: bm, bn, consumers.
        dtypes: Input types that the variant multiplies.
    """

    minimum_cc = (9, 0)
    maximum_cc = (9, 0)
    usual: ClassVar[tuple[tuple[int, int, int], ...]]
    dtypes: ClassVar[tuple[str, ...]]

    @abc.abstractmethod
    def product(self, workload: W) -> Gemm:
        """Return one of the products, with c as its result."""

    @abc.abstractmethod
    def arguments(self, workload: W, config: Config) -> tuple[Argument, ...]:
        """Return the kernel's arguments after the tensor maps of a and of each b."""

    def limits(self, workload: W, device: Device) -> str | None:
        """Return why wgmma or TMA cannot do this workload, or None if they can."""
        whole, key = self.product(workload), self.key
        if workload.dtype not in self.dtypes:
            listed = f"{', '.join(self.dtypes[:-1])} and {self.dtypes[-1]}"
            return f"{key} multiplies {listed}, not {workload.dtype}"
        if workload.dtype == "e4m3" and workload.trans != "nt":
            return f"{key} multiplies e4m3 with trans=nt only: k must be contiguous in both a and b"
        if min(gemm.widths(whole)[:2]) * itemsize(workload.dtype) < 16:
            return f"{key} copies by TMA: the row lengths of a and b must be multiples of 16 bytes"
        if max(whole.m, whole.n, whole.k, whole.batch) > wgmma_tile.MOST_EXTENT:
            return f"{key} supports dimensions of up to {wgmma_tile.MOST_EXTENT} elements"
        if not any(fits(bm, bn, whole) for bm, bn, _ in self.usual):
            return f"c ({whole.batch}, {whole.m}, {whole.n}) has too many tiles for {key}"
        return None

    def target(self, device: Device) -> str:
        """Return sm_90a: only this target has wgmma and setmaxnreg."""
        return "sm_90a"

    def default(self, workload: W, device: Device) -> Config:
        """Return the usual tile with the least work for the busiest SM."""
        whole = self.product(workload)

        def work(config: Config) -> int:
            bm, bn = config["bm"], config["bn"]
            rounds = ceil_div(gemm.blocks(whole, bm, bn), device.sm_count)
            # The cost of multiplying a tile grows with its area, that of reading it with its edges.
            return int(
                rounds * (self.operation.MATRICES * bm * bn + 48 * (bm + self.operation.MATRICES * bn))
            )

        ordered = sorted(self._usual(workload, device), key=work)
        return self.space.first_valid(ordered, workload=workload, device=device)

    def _usual(self, workload: W, device: Device) -> Iterator[Config]:
        """Yield the usual tiles with the most stages that fit; as clusters of two if they fill the device."""
        whole = self.product(workload)
        for bm, bn, consumers in self.usual:
            bk = LINE_BYTES // itemsize(whole.dtype)
            paired = bm < whole.m and gemm.blocks(whole, bm, bn) >= device.sm_count
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
                "group_m": max(g for g in (1, 4, 8) if g == 1 or g * cluster_m * bm < 2 * whole.m),
                "min_blocks": 1,
            }
            room = device.smem_per_block_bytes - int(self.smem_bytes(workload, config))
            deepest = room // ((bm + self.operation.MATRICES * bn) * LINE_BYTES + 16)
            yield Config({**config, "stages": min(8, max(2, 2 * ceil_div(whole.k, bk)), deepest)})

    def block_threads(self, config: Config) -> int:
        """Return the threads of a block."""
        return int(wgmma_tile.threads(config["consumers"]))

    def smem_bytes(self, workload: W, config: Any) -> Any:
        """Return the shared memory of a block, in bytes."""
        return wgmma_tile.smem_bytes(config, workload.dtype, self.operation.MATRICES)

    def costs(self, workload: W, table: Table, device: Device) -> Costs:
        """Count tiles as blocks, as persistent blocks share tiles. Parts beyond the edge multiply zeros."""
        names = ("bm", "bn", "bk", "consumers", "cluster_m", "cluster_n")
        bm, bn, bk, consumers, cluster_m, cluster_n = (table[name].astype(np.float64) for name in names)
        whole = self.product(workload)
        size, padded_k = itemsize(whole.dtype), ceil_div(whole.k, bk) * bk
        tiles = gemm.blocks(whole, bm, bn)
        of_a = wgmma_tile.least_copied(whole.m, bm, whole.k, bk, cluster_n, whole.trans[0] == "n")
        of_b = wgmma_tile.least_copied(whole.n, bn, whole.k, bk, cluster_m, whole.trans[1] == "t")
        return Costs(
            blocks=tiles,
            full_blocks=tiles,
            threads=wgmma_tile.threads(consumers),
            smem_bytes=self.smem_bytes(workload, table),
            mma_flop=self.operation.MATRICES * 2 * bm * bn * padded_k,
            mma_dtype=whole.dtype,
            # Written once and read once. How often wgmma reads an operand that its warps share is not
            # published.
            smem_traffic_bytes=2 * size * padded_k * (bm + self.operation.MATRICES * bn),
            # Copies of the smallest tile, at the edge of c.
            fill_bytes=(of_a + self.operation.MATRICES * of_b) * size,
            # Four warps issue each product of 64 rows, whether the tile has one consumer or all.
            instructions=self.operation.MATRICES * 4 * bm / 64 * padded_k * size / 32,
            # A warpgroup adds 32 bytes of k by one product of 64 x bn, which takes bn / 2 clocks of all
            # tensor cores of its SM. The next product adds to the same sums; each matrix b has its own sums.
            # In pingpong a block works on as many tiles as it has consumers. A tile waits for its first copy,
            # unless the tile before hides that wait.
            chain_clocks=np.where(tiles <= device.sm_count, device.l2_latency, 0.0)
            + padded_k * size / 32 * bn / 2 / np.where(table["pingpong"] == 1, consumers, 1),
        )

    def claims(self, workload: W, config: Config) -> tuple[str, ...]:
        """Return warpgroup products, bulk tensor copies, and setmaxnreg where registers move."""
        product = "QGMMA" if self.product(workload).dtype == "e4m3" else "HGMMA"
        return (product, "UTMALDG", *(["USETMAXREG"] if wgmma_tile.registers_move(config) else []))

    def choices(self, workload: W, config: Config) -> Constants:
        """Return the compile-time constants that depend on the configuration."""
        names = ("bm", "bn", "bk", "stages", "consumers", "cluster_m", "cluster_n", "min_blocks")
        return {
            **{name.upper(): config[name] for name in names},
            "THREADS": wgmma_tile.threads(config["consumers"]),
            "PINGPONG": bool(config["pingpong"]),
            "STAGED": bool(config["staged"]),
            "STAGING_BYTES": wgmma_tile.staging_bytes(config["consumers"], config["staged"]),
            "VEC_C": gemm.widths(self.product(workload))[2],
            **wgmma_tile.moved_registers(config),
            "TileA": "PanelTile<In, BM, BK, A_K_CONTIGUOUS, CLUSTER_N>",
            "TileB": "PanelTile<In, BN, BK, B_K_CONTIGUOUS, CLUSTER_M>",
        }

    def launches(self, workload: W, config: Config) -> tuple[Launch, ...]:
        """Return one launch of persistent blocks, one tile per block at most."""
        whole, cluster_m, cluster_n = self.product(workload), config["cluster_m"], config["cluster_n"]
        clusters = gemm.blocks(whole, config["bm"] * cluster_m, config["bn"] * cluster_n)
        return (
            Launch(
                entry=f"{self.entry}<Choice>",
                grid=(clusters * cluster_m * cluster_n, 1, 1),
                block=(self.block_threads(config), 1, 1),
                arguments=(*self._maps(workload, config), *self.arguments(workload, config)),
                smem_bytes=int(self.smem_bytes(workload, config)),
                cluster=cluster_m * cluster_n,
                blocks_per_sm=config["min_blocks"],
            ),
        )

    def _maps(self, workload: W, config: Config) -> Iterator[TensorMap]:
        """Yield the tensor maps of a and of each b."""
        bm, bn, bk = (config[name] for name in ("bm", "bn", "bk"))
        trans, (a, *each_b) = self.product(workload).trans, workload.inputs()[: 1 + self.operation.MATRICES]
        yield wgmma_tile.panel_map(a, trans[0] == "n", bm, bk, config["cluster_n"])
        for b in each_b:
            yield wgmma_tile.panel_map(b, trans[1] == "t", bn, bk, config["cluster_m"])

    def emulation_workload(self, workload: W, config: Config) -> W:
        """Return a workload of few tiles with the same edges."""
        small: W = self.operation.shrink(
            workload, config, config["stages"], affordable_fma=wgmma_tile.AFFORDABLE_FMA
        )
        return small
