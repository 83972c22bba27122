"""Base class of matrix products on tensor cores by mma.sync (sm_80 on).

The cuda_mma variants of gemm, gated_gemm and grouped_gemm derive from it. Tiles of a and b travel by cp.async
into `stages` buffers of shared memory. The device code is in gemm_mma.cuh.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.kernels.common import gemm, mma_tile, prologue
from tunebench.kernels.common.cuda import first_product
from tunebench.kernels.common.gemm_variant import Constants, GemmOperation, TiledGemm, W, traffic_of
from tunebench.kernels.common.product_execution import (
    START_CLOCKS,
    Results,
    chosen,
    direct_results,
    resident,
    staged_results,
    with_results,
)
from tunebench.space import Config, Constraint, Parameter, Table, takes_config
from tunebench.variant import Costs, Execution, ceil_div

__all__ = ["BK", "STAGED", "STAGES", "WARPS", "MmaGemm", "constraints", "copies_are_few", "stages_have_tiles"]

WARPS = (
    Parameter("warps_m", (1, 2, 4), "warps of a block along m"),
    Parameter("warps_n", (1, 2, 4), "warps of a block along n"),
)
BK = Parameter("bk", (16, 32, 64, 128), "elements of k per step, in one buffer")
STAGES = Parameter("stages", (2, 3, 4, 5), "buffers in shared memory; copies run stages - 1 steps ahead")
STAGED = Parameter("staged", (0, 1), "1: store results through shared memory, in wide accesses")

MAX_COPIES = 32
"""Most copies per thread for one step, each with its own address: with more, sums spill."""


# -- constraints --------------------------------------------------------------------------------------------


def steps_are_useful(bk: Any, workload: Any) -> Any:
    """A step must be 128 bytes or shorter, and less than twice k unless no shorter one exists."""
    least = mma_tile.least_bk(workload.dtype)
    return (bk >= least) & (bk * itemsize(workload.dtype) <= 128) & ((bk == least) | (bk < 2 * workload.k))


def stages_have_tiles(bk: Any, stages: Any, workload: Any) -> Any:
    """There must be at least as many steps of k as copies under way."""
    return (stages == 2) | (stages <= ceil_div(workload.k, bk) + 1)


def copies_are_few(operation: GemmOperation) -> Constraint:
    """Return the constraint on the copies per thread."""

    @takes_config("bm", "bn", "bk", "warps_m", "warps_n")
    def holds(config: Mapping[str, Any], workload: Any) -> Any:
        """A thread must fill its share of the tiles by 32 copies or fewer."""
        vec_a, vec_b, _ = operation.widths(workload)
        bm, bn, bk, warps_m, warps_n = config.values()
        copies = bm * bk // vec_a + operation.MATRICES * bn * bk // vec_b
        return copies <= MAX_COPIES * mma_tile.threads(warps_m, warps_n)

    return holds


def constraints(operation: GemmOperation, other_registers: int) -> tuple[Constraint, ...]:
    """Return the constraints that the spaces of all operators share.

    Args:
        operation: The operator's products.
        other_registers: Registers per thread that do not hold sums.
    """
    matrices = operation.MATRICES

    def work_is_worth_the_warps(bm: Any, bn: Any, warps_m: Any, warps_n: Any) -> Any:
        """A block must have 8 warps or fewer, and 32 x 32 sums per warp if it has more than 4."""
        return mma_tile.work_is_worth_the_warps(bm, matrices * bn, warps_m, warps_n)

    @takes_config(*mma_tile.TILE)
    def shared_memory_fits(config: Mapping[str, Any], workload: Any, device: Device) -> Any:
        """The buffers must fit in the shared memory of a block."""
        return mma_tile.smem_bytes(config, workload.dtype, matrices) <= device.smem_per_block_bytes

    @takes_config(*mma_tile.TILE, "min_blocks")
    def min_blocks_is_useful(config: Mapping[str, Any], workload: Any, device: Device) -> Any:
        """`min_blocks` must fit on an SM without spills, and use fewer registers than the compiler would."""
        threads, min_blocks = mma_tile.threads(config["warps_m"], config["warps_n"]), config["min_blocks"]
        smem = mma_tile.smem_bytes(config, workload.dtype, matrices) + device.smem_reserved_bytes
        sums = matrices * config["bm"] * config["bn"] // threads
        return (min_blocks == 1) | (
            (min_blocks * threads <= device.threads_per_sm)
            & (min_blocks * smem <= device.smem_per_sm_bytes)
            & (min_blocks * threads * (sums + sums // 4 + other_registers) <= device.registers_per_sm)
            & (min_blocks * threads * (2 * sums + 64) > device.registers_per_sm)
        )

    return (
        operation.fits,
        mma_tile.warps_cover_the_tile,
        work_is_worth_the_warps,
        steps_are_useful,
        shared_memory_fits,
        min_blocks_is_useful,
        lambda bm, group_m, workload: (group_m == 1) | (group_m * bm < 2 * workload.m),
    )


# -- the variant --------------------------------------------------------------------------------------------


class MmaGemm(TiledGemm[W]):
    """A variant on tensor cores by mma.sync.

    Attributes:
        usual: Tiles that libraries ship, largest first: bm, bn, warps_m, warps_n, bytes of a step, stages.
        dtypes: Input types that the operator has on tensor cores, for messages.
    """

    minimum_cc = (8, 0)
    usual: ClassVar[tuple[tuple[int, int, int, int, int, int], ...]]
    dtypes: ClassVar[str]

    def limits(self, workload: W, device: Device) -> str | None:
        """Return why tensor cores or cp.async cannot do this workload, or None if they can."""
        if workload.dtype == "f32":
            return f"{self.key} multiplies {self.dtypes}; f32 has no tensor-core instruction"
        # Tensor cores sum products of f16, to which e4m3 is converted, in f32.
        converted = mma_tile.converts(workload.dtype, device)
        if getattr(workload, "accumulate", "fast") == "f32" and not converted:
            return f"{self.key} has no accumulate=f32 on {device.architecture}, whose e4m3 sums are shorter"
        if min(self.operation.widths(workload)[:2]) * itemsize(workload.dtype) < mma_tile.COPY_BYTES:
            least = f"{mma_tile.COPY_BYTES} bytes or more"
            return f"{self.key} copies {least}: the row lengths of a and b must be multiples of that"
        return self.operation.too_many_blocks(workload, (tile[:2] for tile in self.usual))

    def default(self, workload: W, device: Device) -> Config:
        """Return the usual tile with the least work for the busiest SM."""
        operation = self.operation

        def work(config: Config) -> int:
            bm, bn = config["bm"], config["bn"]
            rounds = ceil_div(operation.usual_blocks(workload, bm, bn), device.sm_count)
            # The cost of multiplying a tile grows with its area, that of reading it with its edges.
            return int(rounds * (operation.MATRICES * bm * bn + 48 * (bm + operation.MATRICES * bn)))

        ordered = sorted(self.usual_configs(workload, device), key=work)
        return self.space.first_valid(ordered, workload=workload, device=device)

    def usual_configs(self, workload: W, device: Device) -> Iterator[Config]:
        """Yield a configuration for each usual tile, with as many stages as k allows."""
        groups = next(p.values for p in self.space.parameters if p.name == "group_m")
        for bm, bn, warps_m, warps_n, line_bytes, deepest in self.usual:
            bk = mma_tile.usual_bk(min(line_bytes, self.longest_step(workload)), workload)
            yield Config(
                {
                    "bm": bm,
                    "bn": bn,
                    "warps_m": warps_m,
                    "warps_n": warps_n,
                    "bk": bk,
                    "stages": max(2, min(deepest, ceil_div(workload.k, bk) + 1)),
                    "staged": 1,
                    "group_m": max(int(g) for g in groups if g == 1 or int(g) * bm < 2 * workload.m),
                    "min_blocks": 1,
                }
            )

    def longest_step(self, workload: W) -> int:
        """Return the most bytes of k per step of a usual configuration (override)."""
        return 128

    def costs(self, workload: W, table: Table, device: Device) -> Costs:
        """Count whole tiles: parts beyond the edge of c and the last step of k are multiplied as zeros.

        The sum of parts of k by a second kernel is not counted.
        """
        size, matrices = itemsize(workload.dtype), self.operation.MATRICES
        names = ("bm", "bn", "warps_m", "warps_n")
        bm, bn, warps_m, warps_n = (table[name].astype(np.float64) for name in names)
        share = self.operation.shares(workload, table, device)
        line_bytes, threads = share.length * size, mma_tile.threads(warps_m, warps_n)
        products, fragments = mma_tile.instructions(table, line_bytes, matrices)
        # The smallest tile, at the edge of c. Only copies of 16 bytes bypass L1.
        columns = workload.n - (ceil_div(workload.n, bn) - 1) * bn
        wide_a, wide_b = (width * size == 16 for width in self.operation.widths(workload)[:2])
        return Costs(
            blocks=share.blocks,
            full_blocks=share.full_blocks,
            threads=threads,
            smem_bytes=self.smem_bytes(workload, table),
            registers=np.minimum(matrices * bm * bn / threads + 16, 65536 // (threads * table["min_blocks"])),
            mma_flop=matrices * 2 * bm * bn * share.length,
            mma_dtype=mma_tile.multiplied_as(workload.dtype, device),
            sfu=bm * share.used_length * share.special_per_element,
            smem_traffic_bytes=512 * fragments + line_bytes * (bm + matrices * bn),
            fill_bytes=(wide_a * share.edge_rows + wide_b * matrices * columns) * share.used_length * size,
            instructions=products + fragments,
            # A warp adds 32 bytes of k to a sum by one instruction, and the next instruction needs that sum.
            # Tiles of one block follow one another: a barrier separates the stores of one from the next.
            chain_clocks=first_product(device) + line_bytes / 32 * device.mma_latency,
            serial_launches=share.launches,
            execution=self._execution(workload, table, share, device),
        )

    def _execution(self, workload: W, table: Table, share: gemm.Share, device: Device) -> Execution:
        """Count the main loop, the epilogue, and the traffic of whole tiles in the usual order."""
        matrices, size, out_size = self.operation.MATRICES, itemsize(workload.dtype), itemsize(workload.out)
        names = ("bm", "bn", "warps_m", "warps_n")
        bm, bn, warps_m, warps_n = (table[name].astype(np.float64) for name in names)
        vec_a, vec_b, vec_c = self.operation.widths(workload)
        narrow_a, narrow_b = vec_a * size < 16, vec_b * size < 16
        prepared = prologue.operations_of_element(workload)
        loop = mma_tile.main_loop(
            table,
            workload.dtype,
            share.length,
            # With a prologue, a thread also loads what it has copied of a, and stores it again.
            copies=bm / vec_a * (3 if prepared else 1) + matrices * bn / vec_b,
            passing_l1=size * (narrow_a * bm + narrow_b * matrices * bn),
            along_k=(workload.trans[0] == "n", workload.trans[1] == "t"),
            device=device,
            matrices=matrices,
        )
        threads = mma_tile.threads(warps_m, warps_n)
        at_once = device.sm_count * resident(
            threads, loop.registers, self.smem_bytes(workload, table), device
        )
        tiles = self.operation.usual_blocks(workload, bm, bn)
        division = gemm.divided(table, tiles, out_size, device)
        wave = np.minimum(tiles, at_once / division.blocks_a_tile)
        traffic = traffic_of(self.operation, workload, table, device, wave=wave)
        whole, part = (
            self._results(table, size_of_sum, vec, has_residual)
            for size_of_sum, vec, has_residual in (
                (out_size, vec_c, getattr(workload, "has_residual", False)),
                (4, 4, False),
            )
        )
        tiles_in_turn = share.length / (np.ceil(workload.k / table["bk"]) * table["bk"])
        segments = np.maximum(division.segments, tiles_in_turn)
        results = whole.times(segments - division.parts).plus(part.times(division.parts))
        elements = getattr(workload, "batch", 1) * workload.m * workload.n
        return with_results(
            loop,
            results,
            device,
            instructions=prepared * bm * share.length / 32,
            l2_bytes=share.used_length * (traffic.line_a + matrices * traffic.line_b),
            memory_waits=segments - 1,
            barriers=segments * (1 + table["staged"]),
            serial_clocks=segments * START_CLOCKS,
            further_clocks=division.finish_clocks,
            memory_bytes=traffic.operand_bytes
            + elements * out_size * (1 + getattr(workload, "has_residual", False))
            + division.memory_bytes(device),
            blocks=share.blocks * traffic.blocks,
        )

    def _results(self, table: Table, size: int, vec: int, has_residual: bool) -> Results:
        """Count the epilogue of a tile."""
        names = ("bm", "bn", "warps_m", "warps_n")
        bm, bn, warps_m, warps_n = (table[name].astype(np.float64) for name in names)
        tile = (bm, bn, bm / warps_m, bn / warps_n, size, vec, has_residual)
        return chosen(table["staged"] > 0, staged_results(*tile), direct_results(*tile))

    def claims(self, workload: W, config: Config) -> tuple[str, ...]:
        """Return tensor-core instructions, cp.async, and ldmatrix, which transposes no 32-bit elements."""
        by_ldmatrix = workload.dtype != "tf32" or workload.trans != "tn"
        # e4m3 is multiplied by QMMA or, where there is none, by HMMA.
        products = {"i8": ["IMMA"], "e4m3": []}.get(workload.dtype, ["HMMA"])
        return (*products, "LDGSTS", *(["LDSM"] if by_ldmatrix else []))

    def block_threads(self, config: Config) -> int:
        """Return the threads of a block."""
        return int(mma_tile.threads(config["warps_m"], config["warps_n"]))

    def smem_bytes(self, workload: W, config: Any) -> Any:
        """Return the shared memory of a block, in bytes."""
        return mma_tile.smem_bytes(config, workload.dtype, self.operation.MATRICES)

    def choices(self, workload: W, config: Config) -> Constants:
        """Return the compile-time constants that depend on the configuration."""
        names = ("bm", "bn", "bk", "warps_m", "warps_n", "stages", "min_blocks")
        widths = self.operation.widths(workload)
        return {
            **{name.upper(): config[name] for name in names},
            "THREADS": self.block_threads(config),
            "STAGED": bool(config["staged"]),
            **dict(zip(("VEC_A", "VEC_B", "VEC_C"), widths, strict=True)),
        }
