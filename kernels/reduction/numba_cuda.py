"""Reduction in Numba-CUDA over either axis: threads share a result and reduce through shared memory.

The kernel is generated from the expression. With `axis=cols`, `threads` threads share a row, and a block has
`others` rows. With `axis=rows` they share a column, and a block has `others` adjacent columns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from tunebench.device import Device
from tunebench.kernels.common.expected import expression_instructions
from tunebench.kernels.common.expression import filled, least_operations
from tunebench.kernels.common.numba_cuda_results import NumbaCudaResults, result_space
from tunebench.kernels.common.numba_expression import NUMBA_CUDA_PRINTER as PRINTER
from tunebench.kernels.common.numba_expression import cuda_array, cuda_load, cuda_parameters
from tunebench.kernels.common.numba_reduction import TAKEN, cuda_kernel, cuda_launches
from tunebench.space import Config, Table
from tunebench.variant import Costs, Launch
from tunebench.workloads.operators.reduction import Reduction

KERNEL = """
def join(met, r, t, other):
    total, each = met[@MINE@], met[@THEIRS@]
    @TAKEN@
    met[@MINE@] = total

def reduction(@NAMES@, out, factor):
    met = cuda.shared.array((@SHAPE@), float32)
    t, r = cuda.threadIdx.@ALONG@, cuda.threadIdx.@ACROSS@
    result = cuda.blockIdx.x * others + r
    # A result beyond the end has no elements; its threads still reach every barrier.
    terms = @ARRAY@.shape[@OVER@] if result < out.shape[0] else 0
    total = f32(neutral)
    if terms > 0:
@LOAD_OF_RESULT@
        for at in range(t, terms, threads):
@LOAD@
@ASSIGNMENTS@
            each = f32(@RESULT@)
            @TAKEN@
    met[@MINE@] = total
    reduce(met, r, t)
    if t == 0 and terms > 0:
        in_x = f32(met[@MINE@] * factor)
@ENDING@
        out[result] = @ENDED@
"""


def _reduces_rows(workload: Reduction) -> bool:
    return workload.axis == "cols"


class NumbaCudaReduction(NumbaCudaResults[Reduction]):
    """Variant for every expression and size of f32 and f16, over either axis."""

    operator = Reduction
    space = result_space(_reduces_rows, "result")
    reduces_rows = staticmethod(_reduces_rows)

    def limits(self, workload: Reduction, device: Device) -> str | None:
        """Refuse bf16, whose conversions only a driver can link."""
        return f"{self.key} does not support bf16" if "bf16" in (workload.dtype, workload.out) else None

    def costs(self, workload: Reduction, table: Table, device: Device) -> Costs:
        """Count operations, and bytes that no other block reads; functions are not counted."""
        whole, (least, counts) = len(workload.whole_names), least_operations(workload)
        each = max(least, counts.get("add", 0) + 1.0) if workload.is_sum else least
        shared = self.result_costs(
            workload,
            table,
            device,
            matrices=whole,
            chain=workload.is_sum,
            instructions=1 + expression_instructions(workload.tree),
        )
        elements = 1.0 * table["others"] * workload.terms
        return dataclasses.replace(
            shared, smem_bytes=4.0 * table["threads"] * table["others"], fma=elements * each
        )

    def generated(self, workload: Reduction, config: Config) -> str:
        """Return the kernel of this expression."""
        over_cols = workload.axis == "cols"
        assignments, result = PRINTER.write(workload.tree)
        ending, ended = PRINTER.write(workload.end)
        # Inputs that all elements of a result share are loaded once.
        common, single = (
            (workload.column_names, workload.vector_names)
            if over_cols
            else (workload.vector_names, workload.column_names)
        )
        place = "result, at" if over_cols else "at, result"
        loads = [cuda_load(name, place) for name in workload.whole_names]
        loads += [cuda_load(name, "at") for name in single]
        return filled(
            KERNEL,
            NAMES=cuda_parameters(workload),
            SHAPE="others, threads" if over_cols else "threads, others",
            ALONG="x" if over_cols else "y",
            ACROSS="y" if over_cols else "x",
            ARRAY=cuda_array(workload.whole_names[0]),
            OVER="1" if over_cols else "0",
            LOAD_OF_RESULT="\n".join(f"        {cuda_load(name, 'result')}" for name in common),
            LOAD="\n".join(f"            {line}" for line in loads),
            ASSIGNMENTS="\n".join(f"            {line}" for line in assignments),
            RESULT=result,
            TAKEN=TAKEN[workload.reduce],
            MINE="r, t" if over_cols else "t, r",
            THEIRS="r, other" if over_cols else "other, r",
            ENDING="\n".join(f"        {line}" for line in ending),
            ENDED=ended,
        )

    def kernel(self, workload: Reduction, config: Config) -> Callable[..., None]:
        """Return the kernel of this expression; it takes the inputs in order, out, and the factor of sums."""
        return cuda_kernel(workload, config, self.generated(workload, config))

    def launches(self, workload: Reduction, config: Config) -> tuple[Launch, ...]:
        """Launch one block for every `others` results."""
        names = (tensor.name for tensor in workload.inputs())
        return cuda_launches(workload, config, names, reduced_lanes=workload.axis == "cols")

    def emulation_workload(self, workload: Reduction, config: Config) -> Reduction:
        """Return a full and a partial block of results, of up to three elements per thread and one more."""
        results = min(workload.results, config["others"] + 1)
        terms = min(workload.terms, 3 * config["threads"] + 1)
        rows, cols = (results, terms) if workload.axis == "cols" else (terms, results)
        return dataclasses.replace(workload, rows=rows, cols=cols)


VARIANT = NumbaCudaReduction()
