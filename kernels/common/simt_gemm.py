"""Base class of matrix products on the FP32 units (SIMT).

The cuda_simt variants of gemm, gated_gemm and grouped_gemm derive from it. A thread keeps tm x tn sums per
matrix b in registers; a step of bk goes through registers to shared memory, as f32. The device code is in
gemm_simt.cuh.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.kernels.common import gemm, prologue
from tunebench.kernels.common.cuda import first_product
from tunebench.kernels.common.gemm_variant import Constants, GemmOperation, TiledGemm, W, traffic_of
from tunebench.kernels.common.product_execution import (
    INSTRUCTION_BYTES,
    LOOP_INSTRUCTIONS,
    START_CLOCKS,
    by_each,
    fragment_passes,
    resident,
    thread_results,
    tile_copy,
    with_results,
)
from tunebench.space import Config, Constraint, Parameter, Table, takes_config
from tunebench.variant import Costs, Execution

__all__ = [
    "BK",
    "GROUP_M",
    "LANES_N",
    "STAGES",
    "SimtGemm",
    "constraints",
    "smem_bytes",
    "threads",
    "usual_tiles",
    "widths",
]

MAX_SUMS = 128
"""Most sums of one matrix b per thread: more do not stay in its 255 registers."""

MAX_LOADS = 16
"""Most loads per thread for one step."""

OTHER_REGISTERS = 30
"""Registers of a thread besides sums, operands and loaded values: addresses, counters."""

LANES_N = Parameter("lanes_n", (4, 8, 16), "lanes of a warp along n")
BK = Parameter("bk", (4, 8, 16, 32), "elements of k per step in shared memory")
STAGES = Parameter("stages", (1, 2), "buffers in shared memory; 2 saves one of two barriers per step")
GROUP_M = Parameter("group_m", (1, 8), "rows of tiles that concurrent blocks share in L2")

_TILE = ("bm", "bn", "tm", "tn")


def threads(config: Any) -> Any:
    """Return the threads of a block, for a configuration or a table of them."""
    return config["bm"] * config["bn"] // (config["tm"] * config["tn"])


def smem_bytes(trans: str, config: Any, matrices: int = 1) -> Any:
    """Return the shared memory of a block in bytes: a transposed tile has 4 more floats per line."""
    a_pitch, b_pitch = config["bm"] + 4 * (trans[0] == "n"), config["bn"] + 4 * (trans[1] == "t")
    return 4 * config["stages"] * config["bk"] * (a_pitch + matrices * b_pitch)


def widths(operation: GemmOperation, workload: Any, config: Any) -> tuple[Any, Any]:
    """Return the elements per access to a and to b: limited by alignment, bk, and `vec` if present."""
    (a, b, _), bk = operation.widths(workload), config["bk"]
    a = np.minimum(a, bk) if workload.trans[0] == "n" else a
    b = np.minimum(b, bk) if workload.trans[1] == "t" else b
    return (np.minimum(config["vec"], a), np.minimum(config["vec"], b)) if "vec" in config else (a, b)


def usual_tiles(
    *rows: tuple[int, ...], names: tuple[str, ...] = (*_TILE, "lanes_n", "bk")
) -> tuple[dict[str, int], ...]:
    """Return rows of values as parameters by name."""
    return tuple(dict(zip(names, row, strict=True)) for row in rows)


# -- constraints --------------------------------------------------------------------------------------------


def threads_are_reasonable(bm: Any, bn: Any, tm: Any, tn: Any) -> Any:
    """A block has 32 to 512 threads, and a thread at most MAX_SUMS sums."""
    count = bm * bn // (tm * tn)
    return (count >= 32) & (count <= 512) & (tm * tn <= MAX_SUMS)


def tiles_are_compact(bm: Any, bn: Any, tm: Any, tn: Any) -> Any:
    """The sides of a block's tile, and of a thread's, must differ by a factor of 4 at most."""
    return (bm <= 4 * bn) & (bn <= 4 * bm) & (tm <= 4 * tn) & (tn <= 4 * tm)


def warps_cover_the_tile(bm: Any, bn: Any, tm: Any, tn: Any, lanes_n: Any) -> Any:
    """A warp's results must tile the block's in both directions."""
    return (bm % (32 // lanes_n * tm) == 0) & (bn % (lanes_n * tn) == 0)


def constraints(
    operation: GemmOperation, other_registers: int, limited: tuple[str, ...] = ()
) -> tuple[Constraint, ...]:
    """Return the constraints that the spaces of all operators share.

    Args:
        operation: The operator's products.
        other_registers: Registers per thread for addresses and counters.
        limited: Names of the space's parameters that constraints also depend on: "vec", "min_blocks".
    """
    matrices = operation.MATRICES
    vec, min_blocks = ((name,) if name in limited else () for name in ("vec", "min_blocks"))

    @takes_config(*_TILE, "bk", *vec)
    def loads_fit_in_registers(config: Mapping[str, Any], workload: Any) -> Any:
        """A thread must load the next step by 16 accesses or fewer."""
        a, b = widths(operation, workload, config)
        loads = config["bm"] * config["bk"] // a + matrices * config["bn"] * config["bk"] // b
        return loads <= MAX_LOADS * threads(config)

    @takes_config(*_TILE, "bk", *min_blocks)
    def registers_suffice(config: Mapping[str, Any], workload: Any, device: Device) -> Any:
        """The SM must have registers for the sums, fragments and pending loads of `min_blocks` blocks."""
        bm, bn, tm, tn, bk = (config[name] for name in (*_TILE, "bk"))
        pending = (bm + matrices * bn) * bk // threads(config) * itemsize(workload.dtype) // 4
        needed = matrices * tm * tn + 2 * (tm + matrices * tn) + pending + other_registers
        resident = threads(config) * config.get("min_blocks", 1)
        return needed <= np.minimum(255, device.registers_per_sm // resident)

    @takes_config("bm", "bn", "bk", "stages")
    def shared_memory_fits(config: Mapping[str, Any], workload: Any, device: Device) -> Any:
        """The tiles must fit in the shared memory of a block."""
        return smem_bytes(workload.trans, config, matrices) <= device.smem_per_block_bytes

    return (
        operation.fits,
        threads_are_reasonable,
        tiles_are_compact,
        warps_cover_the_tile,
        loads_fit_in_registers,
        registers_suffice,
        shared_memory_fits,
        lambda bk, workload: (bk == 4) | (bk < 2 * workload.k),
        lambda bm, group_m, workload: (group_m == 1) | (bm < workload.m),
    )


# -- the variant --------------------------------------------------------------------------------------------


class SimtGemm(TiledGemm[W]):
    """A variant on the FP32 units, for every size and alignment.

    Attributes:
        usual: Tiles that libraries ship, largest first, as parameters by name.
    """

    usual: ClassVar[tuple[Mapping[str, int], ...]]

    def limits(self, workload: W, device: Device) -> str | None:
        """Return why c takes more blocks than a grid has, or None."""
        return self.operation.too_many_blocks(workload, ((tile["bm"], tile["bn"]) for tile in self.usual))

    def default(self, workload: W, device: Device) -> Config:
        """Return the largest usual tile that still gives every SM a block."""
        operation = self.operation
        usable = [tile for tile in self.usual if operation.fits(tile["bm"], tile["bn"], workload)]
        blocks = (operation.usual_blocks(workload, tile["bm"], tile["bn"]) for tile in usable)
        full = [tile for tile, count in zip(usable, blocks, strict=True) if count >= device.sm_count]
        tile = (full or usable[-1:])[0]
        bk = max(b for b in (4, 8, 16, 32) if b == 4 or (b <= tile["bk"] and b < 2 * workload.k))
        chosen = {**tile, "bk": bk, "stages": 2, "group_m": 8 if tile["bm"] < workload.m else 1}
        chosen |= self.further_defaults(workload, chosen, device)
        return Config({name: chosen[name] for name in self.space.names})

    def further_defaults(self, workload: W, chosen: Mapping[str, int], device: Device) -> dict[str, int]:
        """Return the default values of parameters that only this operator has (override)."""
        return {}

    def costs(self, workload: W, table: Table, device: Device) -> Costs:
        """Count whole tiles: parts beyond the edge of c and the last step of k are computed as zeros.

        Reads of a and b may hit in L1, so that no traffic from L2 is certain. The sum of parts of k by a
        second kernel is not counted.
        """
        matrices = self.operation.MATRICES
        bm, bn, tm, tn, lanes_n = (table[name].astype(np.float64) for name in (*_TILE, "lanes_n"))
        share = self.operation.shares(workload, table, device)
        length, block_threads = share.length, bm * bn // (tm * tn)
        warps = block_threads / 32
        # Reading a chunk takes a pass of at least 128 bytes, more if the chunks of all lanes are larger.
        chunk_m, chunk_n = np.minimum(tm, 4), np.minimum(tn, 4)
        pass_m = np.maximum(128.0, 32 // lanes_n * chunk_m * 4)
        pass_n = np.maximum(128.0, lanes_n * chunk_n * 4)
        of_a, of_b, lines = tm / chunk_m, matrices * tn / chunk_n, bm + matrices * bn
        # From sm_100 on, one instruction can do two multiply-adds.
        packed = 2.0 if device.compute_capability >= (10, 0) else 1.0
        min_blocks = table["min_blocks"] if "min_blocks" in self.space.names else 1
        # f32 sums are added in the order of the source; integer sums may be added in any order.
        chain = 0.0 if workload.dtype == "i8" else length * device.fma_latency
        return Costs(
            blocks=share.blocks,
            full_blocks=share.full_blocks,
            threads=block_threads,
            smem_bytes=self.smem_bytes(workload, table),
            registers=np.minimum(matrices * tm * tn + 16, 65536 // (block_threads * min_blocks)),
            fma=length * (matrices * bm * bn),
            sfu=bm * share.used_length * share.special_per_element,
            smem_traffic_bytes=length * (warps * (of_a * pass_m + of_b * pass_n) + 4 * lines),
            # A thread loads a chunk at once; tiles are stored four values at a time, or fewer.
            accesses=length * (32 * warps * (of_a + of_b) + lines / 4),
            instructions=length * (warps * (matrices * tm * tn / packed + of_a + of_b)),
            chain_clocks=first_product(device) + chain,
            serial_launches=share.launches,
            execution=self._execution(workload, table, share, device),
        )

    def _execution(self, workload: W, table: Table, share: gemm.Share, device: Device) -> Execution:
        """Count the main loop, the epilogue, and the traffic of whole tiles in the usual order."""
        matrices, size, out_size = self.operation.MATRICES, itemsize(workload.dtype), itemsize(workload.out)
        names = (*_TILE, "lanes_n", "bk", "stages")
        bm, bn, tm, tn, lanes_n, bk, stages = (table[name].astype(np.float64) for name in names)
        block_threads, length, steps = bm * bn / (tm * tn), share.length, share.length / bk
        warps, columns = block_threads / 32, matrices * tn
        along_a, along_b = workload.trans[0] == "n", workload.trans[1] == "t"
        vec_a, vec_b = widths(self.operation, workload, {name: table[name] for name in self.space.names})
        copies = (
            tile_copy(table["bm"], table["bk"], vec_a, size, along_a),
            tile_copy(table["bn"], table["bk"], vec_b, size, along_b).times(matrices),
        )
        chunk_m, chunk_n = np.minimum(tm, 4), np.minimum(tn, 4)
        reads = warps * (tm / chunk_m + columns / chunk_n)
        read_passes = warps * (
            tm / chunk_m * by_each(fragment_passes, lanes_n, chunk_m, 1)
            + columns / chunk_n * by_each(fragment_passes, lanes_n, chunk_n, 0)
        )
        min_blocks = table["min_blocks"] if "min_blocks" in self.space.names else 1 + 0 * bm
        pending = (bm + matrices * bn) * bk / block_threads * size / 4
        needed = tm * columns + 2 * (tm + columns) + pending + OTHER_REGISTERS
        registers = np.where(
            min_blocks > 1,
            np.minimum(needed, device.registers_per_sm / (block_threads * min_blocks) // 8 * 8),
            needed,
        )
        multiplied = length * warps * tm * columns
        loop = Execution(
            registers=registers,
            # Values are widened one by one.
            instructions=multiplied
            + length * (bm + matrices * bn) / 32 * (size < 4)
            + LOOP_INSTRUCTIONS * warps * steps,
            accesses=length * 32 * reads + steps * sum(copy.accesses for copy in copies),
            passes=length * read_passes + steps * sum(copy.passes for copy in copies),
            # A step is loaded into registers while the one before is multiplied.
            prefetched_waits=steps,
            shared_waits=steps,
            barriers=np.where(stages == 1, 2, 1) * steps,
            code_bytes=INSTRUCTION_BYTES * bk * (tm * columns + tm / chunk_m + columns / chunk_n),
            iterations=length,
        )
        tiles = self.operation.usual_blocks(workload, bm, bn)
        division = gemm.divided(table, tiles, out_size, device)
        at_once = device.sm_count * resident(
            block_threads, registers, self.smem_bytes(workload, table), device
        )
        wave = np.minimum(tiles, at_once / division.blocks_a_tile)
        traffic = traffic_of(self.operation, workload, table, device, wave=wave)
        vec_c, has_residual = self.operation.widths(workload)[2], getattr(workload, "has_residual", False)
        whole = thread_results(bm, bn, tm, tn, lanes_n, out_size, np.minimum(vec_c, chunk_n), has_residual)
        part = thread_results(bm, bn, tm, tn, lanes_n, 4, chunk_n, False)
        tiles_in_turn = length / (np.ceil(workload.k / bk) * bk)
        segments = np.maximum(division.segments, tiles_in_turn)
        results = whole.times(segments - division.parts).plus(part.times(division.parts))
        elements = getattr(workload, "batch", 1) * workload.m * workload.n
        return with_results(
            loop,
            results,
            device,
            instructions=prologue.operations_of_element(workload) * bm * length / 32,
            l2_bytes=share.used_length * (traffic.line_a + matrices * traffic.line_b),
            memory_waits=segments - 1,
            serial_clocks=segments * START_CLOCKS,
            further_clocks=division.finish_clocks,
            memory_bytes=traffic.operand_bytes
            + elements * out_size * (1 + has_residual)
            + division.memory_bytes(device),
            blocks=share.blocks * traffic.blocks,
        )

    def block_threads(self, config: Config) -> int:
        """Return the threads of a block."""
        return int(threads(config))

    def smem_bytes(self, workload: W, config: Any) -> Any:
        """Return the shared memory of a block, in bytes."""
        return smem_bytes(workload.trans, config, self.operation.MATRICES)

    def choices(self, workload: W, config: Config) -> Constants:
        """Return the compile-time constants that depend on the configuration."""
        names = (*_TILE[:2], "bk", *_TILE[2:], "lanes_n", "stages", "min_blocks")
        vec_a, vec_b = widths(self.operation, workload, config)
        return {
            "THREADS": self.block_threads(config),
            **{name.upper(): config[name] for name in names if name in config},
            **self.further_choices(config),
            "VEC_A": int(vec_a),
            "VEC_B": int(vec_b),
            "VEC_C": min(config["tn"], 4, self.operation.widths(workload)[2]),
        }

    def further_choices(self, config: Config) -> Constants:
        """Return compile-time constants that only this operator's kernel has (override)."""
        return {}
