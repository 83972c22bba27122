"""strided_elementwise in Numba-CUDA: a thread computes several results, one after the other.

The kernel is generated from the index maps, with sizes and strides as constants. A thread computes `turns`
results, `threads` apart; adjacent threads compute adjacent results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.kernels.common.cuda_strided import decoded_indices, loads_of, touched
from tunebench.kernels.common.expected import (
    DECODED,
    LANES,
    NUMBA_ACCESS,
    NUMBA_REGISTERS,
    PROLOGUE,
    STEP,
    converted,
    expression_instructions,
    l1_passes,
)
from tunebench.kernels.common.expression import compiled, filled
from tunebench.kernels.common.numba_cuda_strided import loads, refusal, stored, valid
from tunebench.kernels.common.numba_expression import NUMBA_CUDA_PRINTER as PRINTER
from tunebench.kernels.common.numba_expression import cuda_array
from tunebench.kernels.common.numba_strided import decoded, indented
from tunebench.kernels.common.strided import capped, is_loaded_everywhere, least_of_element, shrunk
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Costs, Execution, Launch, NumbaCudaVariant, Tiling
from tunebench.workloads.operators.strided_elementwise import StridedElementwise

SPACE = Space(
    (
        Parameter("threads", (64, 128, 256, 512, 1024), "threads of a block"),
        Parameter("turns", (1, 2, 4, 8, 16), "results that a thread computes in turn"),
    ),
    (
        lambda threads, turns, workload: (
            ((threads == 64) & (turns == 1)) | (1.0 * threads * turns < 2 * workload.elements)
        ),
    ),
)

KERNEL = """
def elementwise(@NAMES@, out):
    first = cuda.blockIdx.x * (@THREADS@ * @TURNS@) + cuda.threadIdx.x
    for turn in range(@TURNS@):
        flat = first + turn * @THREADS@
        if flat < @ELEMENTS@:
            @DECODE@
            @LOADS@
            @ASSIGNMENTS@
            out[@PLACE@] = @RESULT@
"""


class NumbaCudaStridedElementwise(NumbaCudaVariant[StridedElementwise]):
    """Variant for every expression and layout of f32, f16 and bool."""

    name = "numba_cuda"
    operator = StridedElementwise
    space = SPACE

    def limits(self, workload: StridedElementwise, device: Device) -> str | None:
        """Refuse bf16, whose conversions only a driver can link."""
        return refusal(self.key, workload)

    def default(self, workload: StridedElementwise, device: Device) -> Config:
        """Return blocks of up to 256 threads with 4 results each."""
        choices = (Config({"threads": t, "turns": n}) for n in (4, 2, 1) for t in (256, 128, 64))
        return self.space.first_valid(choices, workload=workload, device=device)

    def tiles(self, workload: StridedElementwise, config: Config) -> tuple[Tiling, ...]:
        """Return the tiles of results in the order of memory."""
        tile = config["threads"] * config["turns"]
        return (Tiling(dimension="elements", extent=workload.elements, tile=tile),)

    def costs(self, workload: StridedElementwise, table: Table, device: Device) -> Costs:
        """Count operations, loads and stores; functions are not counted."""
        elements = 1.0 * table["threads"] * table["turns"]
        read = sum(map(is_loaded_everywhere, workload.maps.values()))
        return Costs(
            blocks=workload.elements / elements,
            full_blocks=workload.elements // elements,
            threads=table["threads"],
            fma=least_of_element(workload, may_be_0=False)[0] * elements,
            accesses=(read + 1) * elements,
            execution=_execution(workload, table),
        )

    def generated(self, workload: StridedElementwise, config: Config) -> str:
        """Return the kernel of this workload."""
        assignments, result = PRINTER.write(workload.tree)
        axes = range(len(workload.extents))
        decode, index = decoded(axes, workload.extents, "flat")
        text = filled(
            KERNEL,
            NAMES=", ".join(map(cuda_array, workload.input_names)),
            THREADS=str(config["threads"]),
            TURNS=str(config["turns"]),
            ELEMENTS=str(workload.elements),
            PLACE=", ".join(index.values()),
            RESULT=stored(result, workload.dtype),
        )
        return indented(text, DECODE=decode, LOADS=loads(workload, index), ASSIGNMENTS=assignments)

    def kernel(self, workload: StridedElementwise, config: Config) -> Callable[..., None]:
        """Return the kernel of this workload; it takes the operands in order, then out."""
        import math

        import numpy as np
        from numba import cuda

        scope: dict[str, Any] = {"__name__": __name__, "cuda": cuda, "math": math, "f32": np.float32}
        scope |= {"valid": valid()} if workload.gathered else {}
        return compiled(self.generated(workload, config), "elementwise", scope)

    def launches(self, workload: StridedElementwise, config: Config) -> tuple[Launch, ...]:
        """Launch one block for each tile of results."""
        (tiling,) = self.tiles(workload, config)
        return (
            Launch(
                grid=(tiling.count, 1, 1),
                block=(config["threads"], 1, 1),
                arguments=(*workload.input_names, "out"),
            ),
        )

    def emulation_workload(self, workload: StridedElementwise, config: Config) -> StridedElementwise:
        """Return a full and a partial tile, approximately; strides stay."""
        (tiling,) = self.tiles(workload, config)
        return shrunk(workload, capped(workload, range(len(workload.extents)), tiling.tile + 1))


SAMPLE = 512
"""Results whose addresses are computed to count the sectors and lines that a block touches."""


def _execution(workload: StridedElementwise, table: Table) -> Execution:
    """Describe a block: a thread waits for the operands of each result, since arrays may overlap."""
    threads, turns = table["threads"], table["turns"]
    extents, size = dict(enumerate(workload.extents)), itemsize(workload.dtype)
    flat = workload.elements // 2 // SAMPLE * SAMPLE + np.arange(SAMPLE)
    loads = loads_of(workload, len(extents) - 1, 1)
    counts = touched(loads, decoded_indices(flat, tuple(extents), extents, {}))
    elements = 1.0 * threads * turns
    of_element = expression_instructions(workload.tree) + converted(size) * (1 + len(loads))
    of_element = of_element + DECODED * len(extents) + STEP + (1 + counts.accesses) * NUMBA_ACCESS
    gathered = any(operand.index.gathers for operand in workload.maps.values())
    return Execution(
        registers=NUMBA_REGISTERS,
        instructions=elements / LANES * of_element + threads / LANES * PROLOGUE,
        accesses=(counts.accesses + 1) * elements,
        passes=elements / LANES * (counts.passes + l1_passes(LANES, size)),
        l2_bytes=elements * (counts.sector_bytes + size),
        memory_waits=turns * (1 + gathered),
    )


VARIANT = NumbaCudaStridedElementwise()
