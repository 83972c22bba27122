"""Products of matrices by wgmma whose tiles are copied as boxes: what gemm and gated_gemm share.

A variant derives from `WgmmaGemm` and writes the kernel, what it takes, and what it refuses.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator
from typing import Any, ClassVar, TypeVar

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.kernels.common import gemm, wgmma_tile
from tunebench.kernels.common.wgmma_tile import LINE_BYTES
from tunebench.space import Config, Constraint, Table
from tunebench.variant import Argument, Costs, CudaVariant, Launch, TensorMap, Tiling, ceil_div
from tunebench.workload import Workload
from tunebench.workloads.operators.gemm import Gemm

__all__ = ["WgmmaGemm", "constraints", "fits"]

W = TypeVar("W", bound=Workload)


# -- constraints --------------------------------------------------------------------------------------------


def fits(bm: Any, bn: Any, workload: Gemm) -> Any:
    """No tile may be twice as large as the problem if a smaller one exists; all must have a number."""
    worthwhile = ((bm < 2 * workload.m) | (bm == 64)) & ((bn < 2 * workload.n) | (bn == 64))
    return worthwhile & (gemm.blocks(workload, 1.0 * bm, 1.0 * bn) <= gemm.MAX_BLOCKS / 4)


def steps_are_lines(bk: Any, workload: Any) -> Any:
    """A step must be one line or two, and no step of two may be twice as long as k."""
    lines = bk * itemsize(workload.dtype) / LINE_BYTES
    return (lines == 1) | ((lines == 2) & (bk < 2 * workload.k))


def stages_have_tiles(bk: Any, stages: Any, workload: Any) -> Any:
    """The ring must not hold more than two tiles' steps."""
    return (stages == 2) | (stages <= 2 * ceil_div(workload.k, bk))


def cluster_has_tiles(bm: Any, bn: Any, cluster_m: Any, cluster_n: Any, workload: Any) -> Any:
    """Clusters are of one or two blocks, and there must be a tile for each."""
    both_busy = ((cluster_m == 1) | (bm < workload.m)) & ((cluster_n == 1) | (bn < workload.n))
    return (cluster_m * cluster_n <= 2) & both_busy


def constraints(matrices: int = 1) -> tuple[Constraint, ...]:
    """Return those of a space for `matrices` products of the same rows of a, all but `fits`."""

    def shared_memory_fits(
        bm: Any,
        bn: Any,
        bk: Any,
        consumers: Any,
        stages: Any,
        staged: Any,
        min_blocks: Any,
        workload: Any,
        device: Device,
    ) -> Any:
        """As many blocks as an SM is to hold must fit in its shared memory."""
        smem = wgmma_tile.smem_bytes(workload.dtype, bm, bn, bk, consumers, stages, staged, matrices=matrices)
        together = min_blocks * (smem + device.smem_reserved_bytes)
        return (smem <= device.smem_per_block_bytes) & (together <= device.smem_per_sm_bytes)

    return (
        wgmma_tile.consumers_share_the_tile,
        wgmma_tile.sums_stay_in_registers(matrices),
        steps_are_lines,
        stages_have_tiles,
        cluster_has_tiles,
        shared_memory_fits,
        lambda bm, cluster_m, group_m, workload: (group_m == 1) | (group_m * cluster_m * bm < 2 * workload.m),
    )


# -- the variant --------------------------------------------------------------------------------------------


class WgmmaGemm(CudaVariant[W]):
    """A variant for Hopper of which a block's tile is of one product, or of several of the same rows of a.

    Attributes:
        matrices: Matrices b, as many as products; in `inputs` they follow a.
        entry: Name of the kernel.
        usual: Tiles that libraries ship, largest first: bm, bn, consumers.
    """

    minimum_cc = (9, 0)
    maximum_cc = (9, 0)
    matrices: ClassVar[int] = 1
    entry: ClassVar[str]
    usual: ClassVar[tuple[tuple[int, int, int], ...]]

    @abc.abstractmethod
    def product(self, workload: W) -> Gemm:
        """Return one of the products, with c as its result."""

    @abc.abstractmethod
    def arguments(self, workload: W, config: Config) -> tuple[Argument, ...]:
        """Return what the kernel takes after the maps of a and of each b."""

    def target(self, device: Device) -> str:
        """Return Hopper's own architecture: wgmma and setmaxnreg are in no other."""
        return "sm_90a"

    def default(self, workload: W, device: Device) -> Config:
        """Return the usual tile of which the busiest SM has the least to do."""
        whole = self.product(workload)

        def work(config: Config) -> int:
            bm, bn = config["bm"], config["bn"]
            rounds = ceil_div(gemm.blocks(whole, bm, bn), device.sm_count)
            # Multiplying a tile costs with its area, reading it with its edges.
            return int(rounds * (self.matrices * bm * bn + 48 * (bm + self.matrices * bn)))

        ordered = sorted(self._usual(whole, device), key=work)
        return self.space.first_valid(ordered, workload=workload, device=device)

    def _usual(self, whole: Gemm, device: Device) -> Iterator[Config]:
        """Yield the usual tiles, as deep as shared memory and k allow; in pairs if they fill the device."""
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
            room = device.smem_per_block_bytes - int(self._smem_bytes(whole, config))
            deepest = room // ((bm + self.matrices * bn) * LINE_BYTES + 16)
            yield Config({**config, "stages": min(8, max(2, 2 * ceil_div(whole.k, bk)), deepest)})

    def _smem_bytes(self, whole: Gemm, config: Any) -> Any:
        """Return the shared memory of a block, of a configuration or of a table of them."""
        names = ("bm", "bn", "bk", "consumers", "stages", "staged")
        values = (config[name] for name in names)
        return wgmma_tile.smem_bytes(whole.dtype, *values, matrices=self.matrices)

    def tiles(self, workload: W, config: Config) -> tuple[Tiling, ...]:
        """Return how blocks cut m, n and k."""
        return gemm.tiles(self.product(workload), config)

    def costs(self, workload: W, table: Table, device: Device) -> Costs:
        """Count tiles as blocks: it is they that SMs share out. Beyond the edge zeros are multiplied."""
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
            smem_bytes=self._smem_bytes(whole, table),
            mma_flop=self.matrices * 2 * bm * bn * padded_k,
            mma_dtype=whole.dtype,
            # Written and read once: how often wgmma reads an operand that its warps share is not published.
            smem_traffic_bytes=2 * size * padded_k * (bm + self.matrices * bn),
            # What the least block, at the corner of c, reads.
            fill_bytes=(of_a + self.matrices * of_b) * size,
            # Four warps issue each product of 64 rows, whether the tile has one consumer or all.
            instructions=self.matrices * 4 * bm / 64 * padded_k * size / 32,
            # A warpgroup adds 32 bytes of k by one product of 64 x bn: bn / 2 clocks of all tensor cores of
            # its SM, and the next adds to the same sums; sums of another b are others. In pingpong a block
            # has as many tiles under way as consumers. A tile waits for its first copy, but that may be while
            # the tile before is multiplied, unless there is none.
            chain_clocks=np.where(tiles <= device.sm_count, device.l2_latency, 0.0)
            + padded_k * size / 32 * bn / 2 / np.where(table["pingpong"] == 1, consumers, 1),
        )

    def claims(self, workload: W, config: Config) -> tuple[str, ...]:
        """Products of warpgroups, bulk tensor copies, and registers that move where they are scarce."""
        product = "QGMMA" if self.product(workload).dtype == "e4m3" else "HGMMA"
        return (product, "UTMALDG", *(["USETMAXREG"] if wgmma_tile.registers_move(config) else []))

    def choices(self, workload: W, config: Config) -> dict[str, str | bool | int]:
        """Return the constants that the configuration decides."""
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
        """Return one launch, of a block a tile or of as many as stay."""
        whole, cluster_m, cluster_n = self.product(workload), config["cluster_m"], config["cluster_n"]
        clusters = gemm.blocks(whole, config["bm"] * cluster_m, config["bn"] * cluster_n)
        return (
            Launch(
                entry=f"{self.entry}<Choice>",
                grid=(clusters * cluster_m * cluster_n, 1, 1),
                block=(wgmma_tile.threads(config["consumers"]), 1, 1),
                arguments=(*self._maps(workload, config), *self.arguments(workload, config)),
                smem_bytes=int(self._smem_bytes(whole, config)),
                cluster=cluster_m * cluster_n,
                blocks_per_sm=config["min_blocks"],
            ),
        )

    def _maps(self, workload: W, config: Config) -> Iterator[TensorMap]:
        """Yield how tiles of a are copied, and those of each b."""
        bm, bn, bk = (config[name] for name in ("bm", "bn", "bk"))
        trans, (a, *each_b) = self.product(workload).trans, workload.inputs()[: 1 + self.matrices]
        yield wgmma_tile.panel_map(a, trans[0] == "n", bm, bk, config["cluster_n"])
        for b in each_b:
            yield wgmma_tile.panel_map(b, trans[1] == "t", bn, bk, config["cluster_m"])
