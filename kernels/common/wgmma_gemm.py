"""Base class of matrix products on Hopper's tensor cores by wgmma.

The cuda_wgmma variants of gemm, gated_gemm and grouped_gemm derive from it. TMA copies tiles of a and b as
boxes into a ring of buffers. The device code is in gemm_wgmma.cuh.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator
from typing import Any, ClassVar

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.kernels.common import gemm, prologue, wgmma_tile
from tunebench.kernels.common.gemm_variant import Constants, GemmOperation, TiledGemm, W, traffic_of
from tunebench.kernels.common.product_execution import chosen, with_results
from tunebench.kernels.common.wgmma_tile import LINE_BYTES
from tunebench.space import Config, Constraint, Parameter, Table
from tunebench.variant import Argument, Costs, Execution, Launch, TensorMap, ceil_div
from tunebench.workloads.operators.gemm import Gemm

__all__ = ["RING", "Tiles", "WgmmaGemm", "constraints", "parts_of"]

Tiles = tuple[tuple[int, int, int, int], ...]
"""Tiles of a variant: bm, bn, consumers, pingpong."""

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


COPIED_PER_CLOCK, STORED_PER_CLOCK = 32.0, 24.0
"""Bytes that an SM reads from L2 and writes to it per clock: estimates, which only order defaults."""

LAUNCH_US = 3.5
"""Approximate cost of a second launch, in microseconds."""


# -- constraints --------------------------------------------------------------------------------------------


def tiles_fit(operation: GemmOperation) -> Constraint:
    """Return the constraint on the tiles of an operation."""

    def holds(bm: Any, bn: Any, workload: Any) -> Any:
        """Tiles must be less than twice as large as c unless no smaller one exists, and be countable."""
        worthwhile = ((bm < 2 * workload.m) | (bm == 64)) & ((bn < 2 * workload.n) | (bn == 64))
        # As floats: the number of tiles may exceed 64 bits.
        return worthwhile & (operation.most_blocks(workload, 1.0 * bm, 1.0 * bn) <= gemm.MAX_BLOCKS / 4)

    return holds


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


def constraints(operation: GemmOperation) -> tuple[Constraint, ...]:
    """Return the constraints of a space for an operation's products."""
    matrices = operation.MATRICES
    return (
        tiles_fit(operation),
        wgmma_tile.consumers_share_the_tile,
        wgmma_tile.sums_stay_in_registers(matrices),
        steps_are_lines,
        stages_have_tiles,
        cluster_has_tiles,
        wgmma_tile.shared_memory_fits(*wgmma_tile.TILE, matrices=matrices),
        lambda bm, cluster_m, group_m, workload: (group_m == 1) | (group_m * cluster_m * bm < 2 * workload.m),
    )


def parts_of(table: Table) -> Any:
    """Return the blocks that share a tile, for each configuration; 1 if the space does not divide k."""
    return table["split_k"].astype(np.float64) if "split_k" in table.space.names else np.ones(len(table))


# -- the variant --------------------------------------------------------------------------------------------


class WgmmaGemm(TiledGemm[W]):
    """A variant for Hopper by wgmma and TMA.

    Attributes:
        usual: Tiles that libraries ship, largest first: bm, bn, consumers, pingpong.
        dtypes: Input types that the variant multiplies.
        accumulates: Value of `accumulate` of the workloads that it computes.
        multiplied: Call of the function that sums a tile, up to its first argument.
    """

    minimum_cc = (9, 0)
    maximum_cc = (9, 0)
    usual: ClassVar[Tiles]
    dtypes: ClassVar[tuple[str, ...]]
    accumulates: ClassVar[str] = "fast"
    multiplied: ClassVar[str] = "multiply<C>(memory.buffers"

    @abc.abstractmethod
    def product(self, workload: W) -> Gemm:
        """Return one of the products, with c as its result; all groups as one product."""

    @abc.abstractmethod
    def arguments(self, workload: W, config: Config) -> tuple[Argument, ...]:
        """Return the kernel's arguments after the tensor maps of a and of each b."""

    def products(self, table: Any) -> Any:
        """Return the instructions per 64 rows and 32 bytes of k: one for each matrix b (override)."""
        return self.operation.MATRICES

    def passes_of_b(self, workload: W) -> int:
        """Return how often each element of b is written to shared memory and read from there (override)."""
        return 1

    def producer_registers(self, workload: W) -> int:
        """Return the registers per thread of the producer's warpgroup (override)."""
        return wgmma_tile.PRODUCER_REGISTERS

    def usual_rows(self, workload: W) -> int:
        """Return the rows of a that are multiplied by the same b in a typical run (override)."""
        return self.product(workload).m

    def edge_rows(self, workload: W, bm: Any) -> Any:
        """Return the fewest rows of a in a tile of bm rows, in any run (override)."""
        m = self.product(workload).m
        return m - (ceil_div(m, bm) - 1) * bm

    def limits(self, workload: W, device: Device) -> str | None:
        """Return why wgmma or TMA cannot do this workload, or None if they can."""
        whole, key = self.product(workload), self.key
        if workload.dtype not in self.dtypes:
            listed = " and ".join(filter(None, (", ".join(self.dtypes[:-1]), self.dtypes[-1])))
            return f"{key} multiplies {listed}, not {workload.dtype}"
        if whole.accumulate != self.accumulates:
            return f"{key} is for accumulate={self.accumulates}, not {whole.accumulate}"
        if itemsize(workload.dtype) == 1 and workload.trans != "nt":
            return f"{key} multiplies {workload.dtype} with trans=nt only: k must be contiguous in a and b"
        if min(gemm.widths(whole)[:2]) * itemsize(workload.dtype) < 16:
            return f"{key} copies by TMA: the row lengths of a and b must be multiples of 16 bytes"
        if max(whole.m, whole.n, whole.k, whole.batch) > wgmma_tile.MOST_EXTENT:
            return f"{key} supports dimensions of up to {wgmma_tile.MOST_EXTENT} elements"
        fits = tiles_fit(self.operation)
        if not any(fits(bm, bn, workload) for bm, bn, *_ in self.usual):
            return f"c ({whole.batch}, {whole.m}, {whole.n}) has too many tiles for {key}"
        return None

    def target(self, device: Device) -> str:
        """Return sm_90a: only this target has wgmma and setmaxnreg."""
        return "sm_90a"

    def default(self, workload: W, device: Device) -> Config:
        """Return the usual tile with the lowest estimated time."""
        ordered = sorted(
            self._usual(workload, device), key=lambda config: self._estimate_clocks(workload, config, device)
        )
        return self.space.first_valid(ordered, workload=workload, device=device)

    def _estimate_clocks(self, workload: W, config: Config, device: Device) -> float:
        """Return the estimated time in clocks, to order configurations by.

        Copies overlap with products. In pingpong, the store of one tile overlaps with the products of the
        next; otherwise all wait for it.
        """
        whole, matrices = self.product(workload), self.operation.MATRICES
        bm, bn, parts = config["bm"], config["bn"], config.get("split_k", 1)
        length = ceil_div(ceil_div(whole.k, config["bk"]), parts) * config["bk"]
        tiles = self.operation.usual_blocks(workload, bm, bn)
        rounds = ceil_div(parts * tiles, device.sm_count)
        fma_per_clock = device.mma_flop_per_clock.get(whole.dtype, 1024.0) / 2
        lines = bm / config["cluster_n"] + matrices * bn / config["cluster_m"]
        products = matrices * bm * bn * length / fma_per_clock
        copies = lines * length * itemsize(whole.dtype) / COPIED_PER_CLOCK
        shared = self._shared_bytes(workload, bm, bn, length) / device.smem_bytes_per_clock
        store = bm * bn * (4 if parts > 1 else itemsize(whole.out)) / STORED_PER_CLOCK
        tile = max(products, copies, shared)
        clocks = rounds * max(tile, store) + store if config["pingpong"] else rounds * (tile + store)
        if parts > 1:  # more blocks do not make memory faster, and a second kernel reads the parts
            memory_us = workload.traffic().total_bytes / (device.dram_gb_s * 1e3)
            read = 4 * parts * tiles * bm * bn / (device.sm_count * COPIED_PER_CLOCK)
            clocks = max(clocks, memory_us * device.max_clock_mhz)
            clocks += LAUNCH_US * device.max_clock_mhz + read
        return float(clocks)

    def _shared_bytes(self, workload: W, bm: Any, bn: Any, k: Any) -> Any:
        """Return the bytes that pass through shared memory for a tile: written once, read once.

        How often wgmma reads an operand that its warps share is not published.
        """
        columns = self.operation.MATRICES * bn * self.passes_of_b(workload)
        return 2 * itemsize(workload.dtype) * k * (bm + columns)

    def _usual(self, workload: W, device: Device) -> Iterator[Config]:
        """Yield the usual tiles with the most stages that fit, in clusters of two if those keep SMs busy.

        Clusters are along m. Where b takes more passes, tiles are high, and clusters along n copy less.
        """
        whole, rows = self.product(workload), self.usual_rows(workload)
        for bm, bn, consumers, pingpong in self.usual:
            busy = 2 * self.operation.usual_blocks(workload, bm, bn) >= device.sm_count
            for cluster_m, cluster_n in ((2 if busy and bm < rows else 1, 1), (1, 2)):
                if cluster_n == 2 and not (busy and bn < whole.n and self.passes_of_b(workload) > 1):
                    continue
                config = {
                    "bm": bm,
                    "bn": bn,
                    "bk": LINE_BYTES // itemsize(whole.dtype),
                    "stages": 0,
                    "consumers": consumers,
                    "pingpong": pingpong,
                    "cluster_m": cluster_m,
                    "cluster_n": cluster_n,
                    "staged": 1,
                    "group_m": max(g for g in (1, 4, 8) if g == 1 or g * cluster_m * bm < 2 * rows),
                    "min_blocks": 1,
                }
                room = device.smem_per_block_bytes - int(self.smem_bytes(workload, config))
                deepest = room // ((bm + self.operation.MATRICES * bn) * LINE_BYTES + 24)
                yield Config(
                    {**config, "stages": min(8, max(2, 2 * ceil_div(whole.k, config["bk"])), deepest)}
                )

    def block_threads(self, config: Config) -> int:
        """Return the threads of a block."""
        return int(wgmma_tile.threads(config["consumers"]))

    def smem_bytes(self, workload: W, config: Any) -> Any:
        """Return the shared memory of a block, in bytes."""
        return wgmma_tile.smem_bytes(config, workload.dtype, self.operation.MATRICES)

    def costs(self, workload: W, table: Table, device: Device) -> Costs:
        """Count the fewest tiles of any run as blocks: persistent blocks share them.

        Parts beyond the edge multiply zeros, or rows of the next group.
        """
        names = ("bm", "bn", "bk", "consumers", "cluster_m", "cluster_n")
        bm, bn, bk, consumers, cluster_m, cluster_n = (table[name].astype(np.float64) for name in names)
        whole, parts = self.product(workload), parts_of(table)
        size, padded_k = itemsize(whole.dtype), ceil_div(ceil_div(whole.k, bk), parts) * bk
        tiles = gemm.blocks(whole, bm, bn) * parts
        rows, columns = self.edge_rows(workload, bm), whole.n - (ceil_div(whole.n, bn) - 1) * bn
        # The last part of k is the shortest.
        least_k = np.maximum(0, whole.k - (parts - 1) * padded_k)
        of_a = wgmma_tile.least_copied(rows, bm, least_k, bk, cluster_n, whole.trans[0] == "n")
        of_b = wgmma_tile.least_copied(columns, bn, least_k, bk, cluster_m, whole.trans[1] == "t")
        return Costs(
            blocks=tiles,
            full_blocks=tiles,
            threads=wgmma_tile.threads(consumers),
            smem_bytes=self.smem_bytes(workload, table),
            mma_flop=self.operation.MATRICES * 2 * bm * bn * padded_k,
            mma_dtype=whole.dtype,
            sfu=bm * least_k * prologue.special_of_element(whole),
            smem_traffic_bytes=self._shared_bytes(workload, bm, bn, padded_k),
            # Copies of the smallest tile, at the edge of c.
            fill_bytes=(of_a + self.operation.MATRICES * of_b) * size,
            # Four warps issue each product of 64 rows, whether the tile has one consumer or all.
            instructions=self.products(table) * 4 * bm / 64 * padded_k * size / 32,
            # A warpgroup adds 32 bytes of k by one product of 64 x bn, which takes bn / 2 clocks of all
            # tensor cores of its SM. The next product adds to the same sums; each matrix b has its own sums.
            # In pingpong a block works on as many tiles as it has consumers. A tile waits for its first copy,
            # unless the tile before hides that wait.
            chain_clocks=np.where(tiles <= device.sm_count, device.l2_latency, 0.0)
            + padded_k * size / 32 * bn / 2 / np.where(table["pingpong"] == 1, consumers, 1),
            serial_launches=1 + (parts > 1),
            execution=self._execution(workload, table, device),
        )

    def _execution(self, workload: W, table: Table, device: Device) -> Execution:
        """Count the steps of a tile, its epilogue, and the traffic in the order of persistent blocks."""
        whole, matrices = self.product(workload), self.operation.MATRICES
        size, out_size = itemsize(whole.dtype), itemsize(whole.out)
        cluster_m, cluster_n = (table[name].astype(np.float64) for name in ("cluster_m", "cluster_n"))
        bm, bn, bk = (table[name].astype(np.float64) for name in ("bm", "bn", "bk"))
        parts, tiles = parts_of(table), self.operation.usual_blocks(workload, bm, bn)
        length = np.where(parts > 1, ceil_div(ceil_div(whole.k, bk), parts) * bk, whole.k)
        division = gemm.divided(table, tiles, out_size, device)
        wave = np.minimum(tiles, device.sm_count * table["min_blocks"] / parts)
        traffic = traffic_of(self.operation, workload, table, device, wave=wave, cluster_m=cluster_m)
        loop = wgmma_tile.main_loop(
            table,
            size,
            length,
            products=self.products(table),
            columns=matrices * bn,
            passes_of_b=self.passes_of_b(workload),
            tiles=tiles * parts,
            device=device,
        )
        vec, has_residual = gemm.widths(whole)[2], getattr(workload, "has_residual", False)
        elements = whole.batch * whole.m * whole.n
        results = chosen(
            parts > 1,
            wgmma_tile.results(table, 4, 4, False),
            wgmma_tile.results(table, out_size, vec, has_residual),
        )
        return with_results(
            loop,
            results,
            device,
            instructions=prologue.operations_of_element(whole) * bm * length / 32,
            # Blocks of a cluster read a part each of what they share.
            l2_bytes=length * (traffic.line_a / cluster_n + matrices * traffic.line_b / cluster_m),
            further_clocks=division.finish_clocks,
            memory_bytes=traffic.operand_bytes
            + elements * out_size * (1 + has_residual)
            + division.memory_bytes(device),
            blocks=tiles * parts,
        )

    def claims(self, workload: W, config: Config) -> tuple[str, ...]:
        """Return warpgroup products, bulk tensor copies, and setmaxnreg where registers move."""
        product = {"e4m3": "QGMMA", "i8": "IGMMA"}.get(workload.dtype, "HGMMA")
        return (product, "UTMALDG", *(["USETMAXREG"] if wgmma_tile.registers_move(config) else []))

    def choices(self, workload: W, config: Config) -> Constants:
        """Return the compile-time constants that depend on the configuration."""
        names = ("bm", "bn", "bk", "stages", "consumers", "cluster_m", "cluster_n", "min_blocks")
        return {
            **{name.upper(): config[name] for name in names},
            "THREADS": wgmma_tile.threads(config["consumers"]),
            "PINGPONG": bool(config["pingpong"]),
            "STAGED": bool(config["staged"]),
            "STAGING_BYTES": int(wgmma_tile.staging_bytes(config["consumers"], config["staged"])),
            "VEC_C": gemm.widths(self.product(workload))[2],
            **wgmma_tile.moved_registers(config, self.producer_registers(workload)),
            "TileA": "PanelTile<In, BM, BK, A_K_CONTIGUOUS, CLUSTER_N>",
            "TileB": "PanelTile<In, BN, BK, B_K_CONTIGUOUS, CLUSTER_M>",
        }

    def launches(self, workload: W, config: Config) -> tuple[Launch, ...]:
        """Return one launch of persistent blocks, one tile per block at most."""
        cluster_m, cluster_n = config["cluster_m"], config["cluster_n"]
        tile = (config["bm"] * cluster_m, config["bn"] * cluster_n)
        clusters = int(self.operation.most_blocks(workload, *tile))
        return (
            Launch(
                entry=f"{self.entry}<Choice>",
                grid=(clusters * cluster_m * cluster_n, 1, 1),
                block=(self.block_threads(config), 1, 1),
                arguments=(*self.maps(workload, config), *self.arguments(workload, config)),
                smem_bytes=int(self.smem_bytes(workload, config)),
                cluster=cluster_m * cluster_n,
                blocks_per_sm=config["min_blocks"],
            ),
        )

    def maps(self, workload: W, config: Config) -> Iterator[TensorMap]:
        """Yield the tensor maps of a and of each b (override if there are more)."""
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
