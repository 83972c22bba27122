"""strided_elementwise in CUDA C++: a thread computes vectors of adjacent results from direct loads.

The kernel is generated from the index maps, with sizes and strides as constants. A thread has `unroll`
vectors of `vector` adjacent results, `threads` vectors apart, and loads the operands of all before it
computes. An operand is loaded by one access if its elements are adjacent and aligned, once for all if it is
the same for all, and element by element otherwise. Results are stored by one access.

Source: NVIDIA, "CUDA Pro Tip: Increase Performance with Vectorized Memory Access".
"""

from __future__ import annotations

from typing import Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.kernels.common.cuda import ctype
from tunebench.kernels.common.cuda_expression import claimed, special
from tunebench.kernels.common.cuda_strided import (
    LOOP_REGISTERS,
    arguments,
    decoded,
    decoded_indices,
    held_registers,
    loads_of,
    parameters,
    prelude,
    spaced,
    touched,
    widest,
)
from tunebench.kernels.common.expected import (
    DECODED,
    LANES,
    PROLOGUE,
    STEP,
    converted,
    expression_instructions,
    l1_passes,
)
from tunebench.kernels.common.strided import (
    capped,
    is_loaded_everywhere,
    least_of_element,
    own_elements,
    shrunk,
)
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Costs, CudaVariant, Execution, Launch, Tiling
from tunebench.workloads.operators.strided_elementwise import StridedElementwise

OTHER_REGISTERS = 40
"""Registers of a thread in addition to loaded vectors: addresses, indices and temporaries of functions."""


def _registers(workload: StridedElementwise, vector: Any, unroll: Any) -> Any:
    """Return the registers that a thread needs, approximately."""
    return held_registers(workload, vector, unroll) + vector * 2 + OTHER_REGISTERS


SPACE = Space(
    (
        Parameter("threads", (64, 128, 256, 512, 1024), "threads of a block"),
        Parameter("vector", (1, 2, 4, 8, 16), "adjacent results of a thread, up to 16 bytes"),
        Parameter("unroll", (1, 2, 4, 8), "vectors that a thread has in flight"),
    ),
    (
        lambda vector, workload: (
            (workload.extents[-1] % vector == 0)
            & (vector * widest(workload, len(workload.extents) - 1, stored=True) <= 16)
        ),
        # Threads without a result are useless.
        lambda threads, vector, unroll, workload: (
            ((threads == 64) & (unroll == 1)) | (1.0 * threads * vector * unroll < 2 * workload.elements)
        ),
        lambda threads, vector, unroll, workload, device: (
            _registers(workload, vector, unroll) <= np.minimum(255, device.registers_per_sm // threads)
        ),
    ),
)

# Words between @ are replaced by text that depends on the workload.
KERNEL = r"""
template <class Out, int THREADS, int V, int N>
__global__ void __launch_bounds__(THREADS) strided_direct(@PARAMETERS@, Out* __restrict__ out) {
  constexpr u32 VECTORS = @ELEMENTS@u / V;
  const u32 first = blockIdx.x * (THREADS * N) + threadIdx.x;
  @HELD@
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const u32 vector = first + n * THREADS;
    if (vector >= VECTORS) continue;
    @DECODE@
    @LOADS@
  }
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const u32 vector = first + n * THREADS;
    if (vector >= VECTORS) continue;
    Vec<Out, V> result;
#pragma unroll
    for (int i = 0; i < V; ++i) result.at[i] = from_float<Out>(chain(@ARGUMENTS@));
    store_vec(out + size_t(vector) * V, result);
  }
}
"""


class CudaDirectStridedElementwise(CudaVariant[StridedElementwise]):
    """Variant for every expression, layout and type."""

    name = "cuda_direct"
    operator = StridedElementwise
    space = SPACE

    def default(self, workload: StridedElementwise, device: Device) -> Config:
        """Return the widest accesses, and up to 4 vectors in flight for each of 256 threads."""
        vectors, threads = (16, 8, 4, 2, 1), (256, 128, 64)
        choices = (
            Config({"threads": t, "vector": v, "unroll": n})
            for v in vectors
            for n in (4, 2, 1)
            for t in threads
        )
        return self.space.first_valid(choices, workload=workload, device=device)

    def tiles(self, workload: StridedElementwise, config: Config) -> tuple[Tiling, ...]:
        """Return the tiles of results in the order of memory."""
        tile = config["threads"] * config["vector"] * config["unroll"]
        return (Tiling(dimension="elements", extent=workload.elements, tile=tile),)

    def costs(self, workload: StridedElementwise, table: Table, device: Device) -> Costs:
        """Count a block's operations, loads and stores, and bytes that no other block reads."""
        vectors = 1.0 * table["threads"] * table["unroll"]
        elements, inner = vectors * table["vector"], workload.extents[-1]
        operations, functions = least_of_element(workload, may_be_0=True)
        fill, accesses = np.zeros(len(table)), np.ones(len(table))
        for operand in workload.maps.values():
            if own_elements(operand) and operand.index.strides[-1] == 1:
                # One sector at either end of each run may be shared with another block.
                runs = 1 if operand.index.is_contiguous else elements / inner + 2
                fill += np.maximum(0.0, elements * itemsize(operand.dtype) - 64.0 * runs)
        for vector in np.unique(table["vector"]):
            with_vector = table["vector"] == vector
            for load in loads_of(workload, len(workload.extents) - 1, int(vector)):
                if is_loaded_everywhere(load.operand):
                    accesses[with_vector] += load.accesses
        return Costs(
            blocks=workload.elements / elements,
            full_blocks=workload.elements // elements,
            threads=table["threads"],
            fma=operations * elements,
            sfu=special(functions) * elements,
            fill_bytes=fill,
            accesses=accesses * vectors,
            chain_clocks=np.where(fill > 0, device.l2_latency, 0.0),
            execution=_execution(workload, table),
        )

    def source(self, workload: StridedElementwise, config: Config) -> str:
        """Return the kernel of this workload."""
        last, extents = len(workload.extents) - 1, dict(enumerate(workload.extents))
        loads = loads_of(workload, last, config["vector"])
        index = {axis: f"at_{axis}" for axis in extents}
        text = spaced(
            KERNEL,
            PARAMETERS=[parameters(workload)],
            ELEMENTS=[str(workload.elements)],
            HELD=[f"{load.held} held_{load.name}[N];" for load in loads],
            DECODE=decoded("vector", tuple(extents), extents, {last: config["vector"]}),
            LOADS=[load.text(f"held_{load.name}[n]", index) for load in loads],
            ARGUMENTS=[arguments(loads)],
        )
        return prelude(workload) + text

    def claims(self, workload: StridedElementwise, config: Config) -> tuple[str, ...]:
        """Return loads and stores, and the special-function unit if a function should use it."""
        return claimed(workload.tree)

    def launches(self, workload: StridedElementwise, config: Config) -> tuple[Launch, ...]:
        """Launch one block for each tile of results."""
        (tiling,) = self.tiles(workload, config)
        shape = ", ".join(str(config[name]) for name in ("threads", "vector", "unroll"))
        return (
            Launch(
                entry=f"strided_direct<{ctype(workload.dtype)}, {shape}>",
                grid=(tiling.count, 1, 1),
                block=(config["threads"], 1, 1),
                arguments=(*workload.input_names, "out"),
            ),
        )

    def emulation_workload(self, workload: StridedElementwise, config: Config) -> StridedElementwise:
        """Return two full tiles and a partial one, approximately; strides stay."""
        (tiling,) = self.tiles(workload, config)
        axes = range(len(workload.extents))
        return shrunk(workload, capped(workload, axes, 2 * tiling.tile + 1), config["vector"])


SAMPLE = 512
"""Threads whose addresses are computed to count the sectors and lines that a block touches."""


def _execution(workload: StridedElementwise, table: Table) -> Execution:
    """Describe a block: all its loads are in flight together, after those of gathered indices."""
    threads, vector, unroll = (table[name] for name in ("threads", "vector", "unroll"))
    last, extents = len(workload.extents) - 1, dict(enumerate(workload.extents))
    accesses, passes, sectors = (np.zeros(len(table)) for _ in range(3))
    for width in np.unique(vector):
        loads, here = loads_of(workload, last, int(width)), vector == width
        flat = workload.elements // int(width) // 2 // SAMPLE * SAMPLE + np.arange(SAMPLE)
        counts = touched(loads, decoded_indices(flat, tuple(extents), extents, {last: int(width)}))
        accesses[here], passes[here], sectors[here] = counts.accesses, counts.passes, counts.sector_bytes
    vectors, out_size = 1.0 * threads * unroll, itemsize(workload.dtype)
    of_element = expression_instructions(workload.tree) + converted(out_size)
    of_element = of_element + sum(converted(itemsize(o.dtype)) for o in workload.maps.values())
    of_vector = vector * of_element + DECODED * len(extents) + STEP + accesses
    gathered = any(operand.index.gathers for operand in workload.maps.values())
    return Execution(
        registers=held_registers(workload, vector, unroll) + vector + LOOP_REGISTERS,
        instructions=vectors / LANES * of_vector + threads / LANES * PROLOGUE,
        accesses=(accesses + 1) * vectors,
        passes=vectors / LANES * (passes + l1_passes(LANES, vector * out_size)),
        l2_bytes=vectors * (sectors + vector * out_size),
        memory_waits=1 + gathered,
    )


VARIANT = CudaDirectStridedElementwise()
