"""Matrix products in Numba-CUDA: shared code of the numba_cuda variants of gemm, gated_gemm and grouped_gemm.

A block keeps tiles of a and b in shared arrays, and a thread tm x tn results, spread over the tile.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import storage
from tunebench.kernels.common import gemm
from tunebench.kernels.common.cuda import first_product
from tunebench.kernels.common.gemm_variant import GemmOperation, W, traffic_of
from tunebench.kernels.common.product_execution import (
    INSTRUCTION_BYTES,
    LOOP_INSTRUCTIONS,
    START_CLOCKS,
    resident,
    thread_results,
    with_results,
)
from tunebench.space import Config, Constraint, Parameter, Space, Table
from tunebench.variant import Costs, Execution, Launch, NumbaCudaVariant, Tiling

__all__ = ["NumbaCudaTiledGemm", "space_of"]

MAX_STATIC_SMEM_BYTES = 48 * 1024
"""Most static shared memory per block. Source: CUDA C++ Programming Guide, "Compute Capabilities"."""

OTHER_REGISTERS = 40
"""Registers of a thread besides sums and operands: sizes and strides of arrays in 64 bits, counters."""

COPY_INSTRUCTIONS = 15.0
"""Instructions of a lane to copy an element: place in the tile, bounds, and address in 64 bits."""

PARAMETERS = (
    Parameter("bm", (16, 32, 64, 128), "rows of c per block"),
    Parameter("bn", (16, 32, 64, 128), "columns of c per block"),
    Parameter("tm", (1, 2, 4, 8), "rows of c per thread"),
    Parameter("tn", (1, 2, 4, 8), "columns of c per thread"),
    Parameter("bk", (4, 8, 16, 32), "elements of k per step in shared memory"),
)
GROUP_M = Parameter("group_m", (1, 8), "rows of tiles that concurrent blocks share in L2")

USUAL = ((64, 64, 4, 4), (32, 32, 2, 2), (16, 32, 1, 2), (16, 16, 1, 1))
"""Tiles (bm, bn, tm, tn) that tutorials and libraries use, largest first."""


def _threads(bm: Any, bn: Any, tm: Any, tn: Any) -> Any:
    """Return the threads of a block."""
    return bm // tm * (bn // tn)


def _smem_bytes(bm: Any, bn: Any, bk: Any, matrices: int) -> Any:
    """Return the shared memory of a block in bytes: each line of a tile has one padding element."""
    return 4 * (bm * (bk + 1) + matrices * bk * (bn + 1))


def _constraints(operation: GemmOperation) -> tuple[Constraint, ...]:
    """Return the constraints on `PARAMETERS` for the products of an operator."""
    matrices = operation.MATRICES

    def threads_are_reasonable(bm: Any, bn: Any, tm: Any, tn: Any) -> Any:
        """A block has 64 to 1024 threads, and a thread at most 64 sums, all in registers."""
        count, sums = _threads(bm, bn, tm, tn), matrices * tm * tn
        return (count >= 64) & (count <= 1024) & (sums <= 64) & (count * (sums + 32) <= 65536)

    def static_smem_fits(bm: Any, bn: Any, bk: Any) -> Any:
        """The tiles must fit in static shared memory."""
        return _smem_bytes(bm, bn, bk, matrices) <= MAX_STATIC_SMEM_BYTES

    return (
        operation.fits,
        threads_are_reasonable,
        static_smem_fits,
        lambda bk, workload: (bk == 4) | (bk < 2 * workload.k),
    )


def _group_is_useful(bm: Any, group_m: Any, workload: Any) -> Any:
    """Rows of tiles are grouped only if there are several."""
    return (group_m == 1) | (bm < workload.m)


def space_of(operation: GemmOperation, *, with_group: bool = True) -> Space:
    """Return the search space for the products of an operator.

    Args:
        operation: The operator's products.
        with_group: Whether the space has `GROUP_M`.
    """
    if not with_group:
        return Space(PARAMETERS, _constraints(operation))
    return Space((*PARAMETERS, GROUP_M), (*_constraints(operation), _group_is_useful))


class NumbaCudaTiledGemm(NumbaCudaVariant[W]):
    """A variant in Numba-CUDA whose blocks compute tiles of bm x bn results of f32.

    Attributes:
        operation: Shapes and share of work of the operator's products.
    """

    operation: GemmOperation

    @abc.abstractmethod
    def arguments(self, workload: W) -> tuple[str, ...]:
        """Return the names of the tensors that the kernel takes."""

    def limits(self, workload: W, device: Device) -> str | None:
        """Return why types or the grid do not fit, or None if they do."""
        if storage(workload.dtype) != "f32" or workload.out != "f32":
            return f"{self.key} reads and writes f32, not {workload.dtype} to {workload.out}"
        return self.operation.too_many_blocks(workload, (tile[:2] for tile in USUAL))

    def default(self, workload: W, device: Device) -> Config:
        """Return the largest usual tile that still gives every SM a block."""
        operation = self.operation
        usable = [tile for tile in USUAL if operation.fits(*tile[:2], workload)]
        full = [tile for tile in usable if operation.usual_blocks(workload, *tile[:2]) >= device.sm_count]
        bm, bn, tm, tn = (full or usable[-1:])[0]
        bk = max(b for b in (4, 8, 16) if b == 4 or b < 2 * workload.k)
        chosen = {"bm": bm, "bn": bn, "tm": tm, "tn": tn, "bk": bk, "group_m": 8 if bm < workload.m else 1}
        return Config({name: chosen[name] for name in self.space.names})

    def tiles(self, workload: W, config: Config) -> tuple[Tiling, ...]:
        """Return the tiling of m, n and k."""
        return gemm.tiles(workload, config)

    def costs(self, workload: W, table: Table, device: Device) -> Costs:
        """Count whole tiles: parts beyond the edge of c and the last step of k are computed as zeros."""
        matrices, share = self.operation.MATRICES, self.operation.shares(workload, table, device)
        bm, bn, bk, tm, tn = (table[name].astype(np.float64) for name in ("bm", "bn", "bk", "tm", "tn"))
        threads, reads, lines = _threads(bm, bn, tm, tn), tm + matrices * tn, bm + matrices * bn
        return Costs(
            blocks=share.blocks,
            full_blocks=share.full_blocks,
            threads=threads,
            smem_bytes=_smem_bytes(bm, bn, bk, matrices),
            fma=matrices * bm * bn * share.length,
            # A thread reads values one by one, each in a pass of 128 bytes per warp.
            smem_traffic_bytes=threads / 32 * share.length * 128 * reads + 4 * share.length * lines,
            accesses=share.length * (threads * reads + lines),
            chain_clocks=first_product(device) + share.length * device.fma_latency,
            execution=self._execution(workload, table, share, device),
        )

    def _execution(self, workload: W, table: Table, share: gemm.Share, device: Device) -> Execution:
        """Count the copy of each step, element by element, its products, and the traffic of whole tiles."""
        matrices = self.operation.MATRICES
        bm, bn, bk, tm, tn = (table[name].astype(np.float64) for name in ("bm", "bn", "bk", "tm", "tn"))
        threads, length, steps = _threads(bm, bn, tm, tn), share.length, share.length / bk
        warps, columns, lines = threads / 32, matrices * tn, bm + matrices * bn
        registers = tm * columns + tm + columns + OTHER_REGISTERS
        # Lines of memory that a load of 32 neighbours touches.
        lines_a = np.maximum(1, 32 / bk) if workload.trans[0] == "n" else 1.0
        lines_b = np.maximum(1, 32 / bk) if workload.trans[1] == "t" else np.maximum(1, 32 / bn)
        copied = bm * (1 + lines_a) + matrices * bn * (1 + lines_b)
        at_once = device.sm_count * resident(threads, registers, _smem_bytes(bm, bn, bk, matrices), device)
        tiles = self.operation.usual_blocks(workload, bm, bn)
        wave = np.minimum(tiles, at_once)
        traffic = traffic_of(self.operation, workload, table, device, wave=wave)
        has_residual = getattr(workload, "has_residual", False)
        # Neighbours of a row are in neighbouring lanes.
        results = thread_results(bm, bn, tm, tn, np.minimum(32, bn / tn), 4, 1, has_residual)
        elements = getattr(workload, "batch", 1) * workload.m * workload.n
        loop = Execution(
            registers=registers,
            instructions=length * (warps * tm * columns + COPY_INSTRUCTIONS * lines / 32)
            + LOOP_INSTRUCTIONS * warps * steps,
            accesses=length * (threads * (tm + columns) + 2 * lines),
            passes=length * (warps * (tm + columns) + copied / 32),
            # Every step waits for its copies: about four are under way at the same time.
            memory_waits=steps * (np.ceil(bm * bk / threads / 4) + np.ceil(matrices * bn * bk / threads / 4)),
            shared_waits=length / 4,
            barriers=2 * steps,
            code_bytes=INSTRUCTION_BYTES * bk * (tm * columns + tm + columns),
            iterations=length,
        )
        return with_results(
            loop,
            results,
            device,
            l2_bytes=share.used_length * (traffic.line_a + matrices * traffic.line_b),
            serial_clocks=START_CLOCKS,
            memory_bytes=traffic.operand_bytes + 4 * elements * (1 + has_residual),
            blocks=share.blocks * traffic.blocks,
        )

    def launches(self, workload: W, config: Config) -> tuple[Launch, ...]:
        """Return one launch, of one block per tile."""
        return (
            Launch(
                grid=self.operation.grid(workload, config),
                block=(config["bn"] // config["tn"], config["bm"] // config["tm"], 1),
                arguments=self.arguments(workload),
            ),
        )

    def emulation_workload(self, workload: W, config: Config) -> W:
        """Return a workload of one or two tiles, not quite full: the simulator is slow."""
        bm, bn, bk = (config[name] for name in ("bm", "bn", "bk"))
        tiles_n = 2 if bm * bn * bk <= 4096 else 1
        return dataclasses.replace(
            workload,
            m=min(workload.m, bm - 3),
            n=min(workload.n, tiles_n * bn - 5),
            k=min(workload.k, 2 * bk - 3),
        )
