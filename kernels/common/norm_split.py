"""Forward variant of layernorm and rmsnorm for few long rows in CUDA C++ (norm_split.cuh).

If a GPU can run more blocks at a time than there are rows, each row is split into parts. One launch computes
the moments of each part. A second merges the moments of a row, and normalises its parts. The first part has
the edges of the row (row_edges.cuh).
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.kernels.common.cuda import helpers
from tunebench.kernels.common.expected import PROLOGUE, STEP, converted, exchange, l1_passes, sector_bytes
from tunebench.kernels.common.norm import forward_arguments, is_centred, norm_type, shifts_fit
from tunebench.kernels.common.row_block import (
    EDGE_PROLOGUE,
    OTHER_REGISTERS,
    WIDE_REGISTERS,
    edge_elements,
    kernels_for_rows,
    lines_of_access,
    shifted_instructions,
    widest_with_edges,
)
from tunebench.kernels.common.row_split import read_again_bytes
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Costs, CudaVariant, Execution, Launch, Scalar, Tiling, ceil_div
from tunebench.workload import Tensor
from tunebench.workloads.common.norm import Norm

__all__ = ["CudaSplitNorm"]

N = TypeVar("N", bound=Norm)

LEAST_COLS = 2048
"""Shorter rows are not worth two launches."""
ROWS_PER_SM = 4
"""More rows keep each SM busy without a split."""


def rows_are_few(parts: Any, workload: Norm, device: Device) -> Any:
    """More than eight blocks per SM are useless."""
    return workload.rows * (parts // 2) <= 8 * device.sm_count


SPACE = Space(
    (
        Parameter("threads", (64, 128, 256, 512, 1024), "threads that share a part"),
        Parameter("parts", (2, 4, 8, 16, 32, 64, 128, 256, 512), "parts of a row"),
        Parameter("vector", (1, 2, 4, 8), "elements of an access, up to 16 bytes"),
        Parameter("unroll", (1, 2, 4), "vectors that a thread has in flight"),
    ),
    (
        rows_are_few,
        lambda vector, workload: vector * itemsize(workload.dtype) <= 16,
        # Threads without a vector are useless.
        lambda threads, parts, vector, unroll, workload: (
            (unroll * threads * vector) * parts < 2 * workload.cols
        ),
        shifts_fit,
    ),
)


def _cut(workload: Norm, vector: Any, parts: Any) -> tuple[Any, Any]:
    """Return the vectors of a part, and the number of parts that have any; the arguments may be columns."""
    vectors = workload.cols // vector
    chunk = ceil_div(vectors, parts)
    return chunk, ceil_div(vectors, chunk)


class CudaSplitNorm(CudaVariant[N]):
    """Forward variant for few long rows of every type and prologue."""

    name = "cuda_split"
    direction = "forward"
    space = SPACE

    def limits(self, workload: N, device: Device) -> str | None:
        """Refuse short rows and many rows."""
        if workload.cols < LEAST_COLS or workload.rows > ROWS_PER_SM * device.sm_count:
            return f"{self.key} needs rows of {LEAST_COLS} or more elements, up to {ROWS_PER_SM} per SM"
        return None

    def default(self, workload: N, device: Device) -> Config:
        """Return wide accesses, and as many parts as give each SM two blocks of busy threads."""
        vector = widest_with_edges(workload)
        usual = [
            {"threads": threads, "parts": parts, "vector": vector, "unroll": unroll}
            for unroll in (2, 1)
            for threads in (256, 128, 64)
            for parts in (512, 256, 128, 64, 32, 16, 8, 4, 2)
            if parts == 2 or parts * workload.rows <= 2 * device.sm_count
        ]
        return SPACE.first_valid(usual, workload=workload, device=device)

    def tiles(self, workload: N, config: Config) -> tuple[Tiling, ...]:
        """Return the row of a block, and the elements of a part."""
        chunk, _ = _cut(workload, config["vector"], config["parts"])
        return (
            Tiling(dimension="rows", extent=workload.rows, tile=1),
            Tiling(dimension="cols", extent=workload.cols, tile=int(chunk * config["vector"])),
        )

    def costs(self, workload: N, table: Table, device: Device) -> Costs:
        """Count the operations of both launches for an element, at two per instruction.

        For layernorm: sum, deviation and square, or the affine map. For rmsnorm: the square only, which is
        less than the two products of the second launch.
        """
        chunk, parts = _cut(workload, table["vector"], table["parts"])
        elements = chunk * table["vector"] * 1.0
        tensors = 1 + workload.has_residual
        added = workload.has_bias + workload.has_residual
        return Costs(
            blocks=2.0 * workload.rows * workload.cols / elements,
            full_blocks=2
            * workload.rows
            * np.where(parts * chunk * table["vector"] == workload.cols, parts, parts - 1),
            threads=table["threads"],
            fma=elements * ((1.5 if is_centred(workload) else 0.5) + 0.5 * added),
            # The second launch may find the data of the first launch in a cache.
            fill_bytes=0.5 * tensors * np.maximum(0.0, elements * itemsize(workload.dtype) - 64.0),
            # The first launch writes the sum of inputs, if any, and the second the result.
            accesses=elements * (tensors + workload.has_residual) / table["vector"],
            chain_clocks=device.l2_latency,
            serial_launches=2,
            execution=self._execution(workload, table, device),
        )

    def _execution(self, workload: N, table: Table, device: Device) -> Execution:
        """Describe the mean of the blocks of both launches, with the waits of both: blocks are few."""
        threads, vector, unroll = (table[name] for name in ("threads", "vector", "unroll"))
        chunk, parts = _cut(workload, vector, table["parts"])
        size, warps, centred = itemsize(workload.dtype), threads / 32, is_centred(workload)
        turns = ceil_div(ceil_div(chunk, threads), unroll)
        read, written = 1 + workload.has_residual, 1 + workload.has_residual
        weights = 1 + centred + 2 * workload.has_bias
        moved = 2 * read + written + weights
        edged, edges = workload.cols % vector != 0, edge_elements(workload, vector)
        shifted = weights * shifted_instructions(edged, vector * size)
        pitch, run = workload.cols * size, 32 * vector * size
        part_bytes = sector_bytes(chunk * vector * size, pitch)
        exchanged = exchange(threads, threads, 1 + centred)
        total_bytes = float(read * workload.rows * workload.cols * size)
        of_element = (7.0 if centred else 4.0) + 2 * (read - 1 + workload.has_bias) + moved * converted(size)
        stored_bytes = written * chunk * vector * size / run * sector_bytes(run, pitch)
        return Execution(
            registers=read * vector * unroll + OTHER_REGISTERS + WIDE_REGISTERS * (vector > 1),
            instructions=0.5 * chunk / 32 * (vector * of_element + shifted)
            + warps * (PROLOGUE + EDGE_PROLOGUE * edged + STEP * turns)
            + 0.5 * exchanged.instructions,
            accesses=0.5 * (chunk * (moved + weights * edged) + edges / parts * moved + exchanged.accesses),
            passes=0.5
            * chunk
            / 32
            * ((moved - weights) * lines_of_access(edged, vector * size) + weights * (1 + edged))
            * l1_passes(32, vector * size),
            # Blocks of different rows share weights, but seldom an SM.
            l2_bytes=0.5 * ((2 * read + weights) * part_bytes + stored_bytes),
            # The second launch starts, and each warp waits for the moments of all parts, once or twice.
            memory_waits=turns + 1 + (1 + centred) * ceil_div(parts, 32),
            l2_waits=turns,
            shared_waits=exchanged.waits + 5.0 * (1 + centred),
            barriers=exchanged.barriers,
            memory_bytes=workload.traffic().total_bytes + read_again_bytes(total_bytes, device),
        )

    def scratch(self, workload: N, config: Config) -> tuple[Tensor, ...]:
        """Return the moments of each part."""
        _, parts = _cut(workload, config["vector"], config["parts"])
        return (Tensor(name="moments", shape=(workload.rows * parts, 2), dtype="f32"),)

    def source(self, workload: N, config: Config) -> str:
        """Return both kernels; the entries select the instantiations."""
        kernels = kernels_for_rows(helpers("norm", "norm_split"), workload, config)
        return helpers("types", "reduce", "row_block") + kernels

    def launches(self, workload: N, config: Config) -> tuple[Launch, ...]:
        """Launch a block for each part, twice."""
        chunk, parts = _cut(workload, config["vector"], config["parts"])
        shape = f"{config['threads']}, {config['vector']}, {config['unroll']}"
        sizes = (Scalar("int", int(parts)), Scalar("int", int(chunk)))
        return tuple(
            Launch(
                entry=f"norm_split_{step}<{norm_type(workload)}, {shape}>",
                grid=(int(workload.rows * parts), 1, 1),
                block=(config["threads"], 1, 1),
                arguments=(*forward_arguments(workload), "moments", *sizes),
            )
            for step in ("moments", "finish")
        )

    def emulation_workload(self, workload: N, config: Config) -> N:
        """Return up to two rows, whose parts have a batch of vectors per thread or one more."""
        batches = config["parts"] * config["threads"] * config["unroll"]
        cols = max(LEAST_COLS, (batches + config["parts"] - 1) * config["vector"])
        cols += (workload.cols - cols) % config["vector"]  # the same edges
        return dataclasses.replace(workload, rows=min(workload.rows, 2), cols=min(workload.cols, cols))
