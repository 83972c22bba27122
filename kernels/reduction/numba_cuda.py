"""reduction in Numba-CUDA, along either axis: threads take elements in turn and meet in shared memory.

The kernel is generated from the expression. Over rows of the matrix (`axis=cols`) `threads` share a row, and
a block has `others` rows. Over columns (`axis=rows`) `threads` go down a column, and a block has `others`
columns side by side. Nothing is split among blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.kernels.common.expression import compiled, least_operations, variable
from tunebench.kernels.common.numba_expression import NUMBA_CUDA_PRINTER as PRINTER
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Costs, Launch, NumbaCudaVariant, Scalar, Tiling, ceil_div
from tunebench.workloads.operators.reduction import Reduction

SPACE = Space(
    (
        Parameter("threads", (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024), "threads that share a result"),
        Parameter("others", (1, 2, 4, 8, 16, 32, 64, 128, 256), "results of a block"),
    ),
    (
        lambda threads, others: (threads * others >= 64) & (threads * others <= 1024),
        # Threads without an element are of no use, nor are those of results that there are not.
        lambda threads, others, workload: (
            ((threads * others == 64) & (others <= 2))
            | ((threads < 2 * workload.terms) & (others < 2 * workload.results))
        ),
        # Less than two sectors side by side waste what is fetched, unless rows are so short.
        lambda threads, others, workload: (
            (_beside(workload, threads, others) * itemsize(workload.dtype) >= 64)
            | (_beside(workload, threads, others) >= workload.cols)
            | ((threads * others == 64) & (others <= 2))
        ),
    ),
)
_TAKEN = {
    "sum": "total = total + each",
    "mean": "total = total + each",
    # A NaN stays one.
    "max": "total = each if each > total or each != each else total",
    "min": "total = each if each < total or each != each else total",
}

KERNEL = """
def reduction(@NAMES@, out, factor):
    met = cuda.shared.array((@SHAPE@), float32)
    t, r = cuda.threadIdx.@ALONG@, cuda.threadIdx.@ACROSS@
    result = cuda.blockIdx.x * others + r
    # A result that is missing has no elements; its threads still come to every barrier.
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
    cuda.syncthreads()
    half = threads // 2
    while half > 0:
        if t < half:
            each = met[@THEIRS@]
            total = met[@MINE@]
            @TAKEN@
            met[@MINE@] = total
        cuda.syncthreads()
        half //= 2
    if t == 0 and terms > 0:
        in_x = f32(met[@MINE@] * factor)
@ENDING@
        out[result] = @ENDED@
"""


def _beside(workload: Reduction, threads: Any, others: Any) -> Any:
    """Return the elements of a row that a block takes side by side."""
    return threads if workload.axis == "cols" else others


class NumbaCudaReduction(NumbaCudaVariant[Reduction]):
    """Serves every expression and size of f32 and f16, both axes."""

    name = "numba_cuda"
    operator = Reduction
    space = SPACE

    def limits(self, workload: Reduction, device: Device) -> str | None:
        """Refuse bf16: Numba-CUDA converts it by functions that only a driver can link."""
        return f"{self.key} does not do bf16" if "bf16" in (workload.dtype, workload.out) else None

    def default(self, workload: Reduction, device: Device) -> Config:
        """Return up to 256 threads a row; of columns 32 side by side, and 8 threads down each."""
        if workload.axis == "cols":
            threads = next((t for t in (8, 16, 32, 64, 128) if workload.cols <= 4 * t), 256)
            pairs = [(t, max(1, 128 // t)) for t in (threads, threads // 2, 128, 64)]
        else:
            pairs = [(t, others) for others in (32, 64, 16, 8, 4, 2, 1) for t in (8, 16, 4, 32, 64, 2, 1)]
        choices = [Config({"threads": t, "others": others}) for t, others in [*pairs, (64, 1)]]
        return self.space.first_valid(choices, workload=workload, device=device)

    def tiles(self, workload: Reduction, config: Config) -> tuple[Tiling, ...]:
        """Return how blocks cut results, and threads what is reduced."""
        over, across = ("cols", "rows") if workload.axis == "cols" else ("rows", "cols")
        return (
            Tiling(dimension=across, extent=workload.results, tile=config["others"]),
            Tiling(dimension=over, extent=workload.terms, tile=config["threads"]),
        )

    def costs(self, workload: Reduction, table: Table, device: Device) -> Costs:
        """Count the operations, and the bytes that nobody else reads; functions count as none."""
        threads, others, size = table["threads"], table["others"], float(itemsize(workload.dtype))
        elements, whole = 1.0 * others * workload.terms, len(workload.whole_names)
        least, counts = least_operations(workload)
        if workload.axis == "cols":
            own_bytes = np.maximum(0.0, elements * size - 64.0)
        else:
            own_bytes = workload.terms * np.maximum(0.0, others * size - 64.0)
        return Costs(
            blocks=workload.results / others,
            full_blocks=workload.results // others,
            threads=threads * others,
            smem_bytes=4.0 * threads * others,
            fma=elements * (max(least, counts.get("add", 0) + 1.0) if workload.is_sum else least),
            fill_bytes=whole * own_bytes,
            accesses=whole * elements,
            # The first load, one addition after the other, and what threads leave each other.
            chain_clocks=np.where(own_bytes > 0, device.l2_latency, device.l1_latency)
            + workload.is_sum * (ceil_div(workload.terms, threads) - 1) * device.fma_latency
            + device.smem_latency,
        )

    def generated(self, workload: Reduction, config: Config) -> str:
        """Return the kernel of this expression."""
        over_cols = workload.axis == "cols"
        assignments, result = PRINTER.write(workload.tree)
        ending, ended = PRINTER.write(workload.end)
        # Prefixes keep arrays, their elements and all other variables apart.
        arrays = {t.name: f"all_{t.name}" for t in workload.inputs() if t.shape}
        # What all elements of a result have in common is read once.
        common, single = (
            (workload.column_names, workload.vector_names)
            if over_cols
            else (workload.vector_names, workload.column_names)
        )
        place = "result, at" if over_cols else "at, result"
        loads = [f"{variable(name)} = f32({arrays[name]}[{place}])" for name in workload.whole_names]
        loads += [f"{variable(name)} = f32({arrays[name]}[at])" for name in single]
        pieces = {
            "NAMES": ", ".join(arrays.get(t.name, variable(t.name)) for t in workload.inputs()),
            "SHAPE": "others, threads" if over_cols else "threads, others",
            "ALONG": "x" if over_cols else "y",
            "ACROSS": "y" if over_cols else "x",
            "ARRAY": arrays[workload.whole_names[0]],
            "OVER": "1" if over_cols else "0",
            "LOAD_OF_RESULT": "\n".join(
                f"        {variable(name)} = f32({arrays[name]}[result])" for name in common
            ),
            "LOAD": "\n".join(f"            {line}" for line in loads),
            "ASSIGNMENTS": "\n".join(f"            {line}" for line in assignments),
            "RESULT": result,
            "TAKEN": _TAKEN[workload.reduce],
            "MINE": "r, t" if over_cols else "t, r",
            "THEIRS": "r, t + half" if over_cols else "t + half, r",
            "ENDING": "\n".join(f"        {line}" for line in ending),
            "ENDED": ended,
        }
        text = KERNEL
        for word, piece in pieces.items():
            text = text.replace(f"@{word}@", piece)
        return text

    def kernel(self, workload: Reduction, config: Config) -> Callable[..., None]:
        """Return the kernel of this expression: inputs in order, out, and what sums are multiplied by."""
        import math

        import numpy as np
        from numba import cuda, float32

        neutral = {"max": -math.inf, "min": math.inf}.get(workload.reduce, 0.0)
        scope: dict[str, Any] = {"__name__": __name__, "cuda": cuda, "math": math, "f32": np.float32}
        scope |= {"float32": float32, "neutral": neutral, **{name: config[name] for name in self.space.names}}
        return compiled(self.generated(workload, config), "reduction", scope)

    def launches(self, workload: Reduction, config: Config) -> tuple[Launch, ...]:
        """Launch a block for every few results."""
        threads, others = config["threads"], config["others"]
        names = (tensor.name for tensor in workload.inputs())
        return (
            Launch(
                grid=(ceil_div(workload.results, others), 1, 1),
                block=(threads, others, 1) if workload.axis == "cols" else (others, threads, 1),
                arguments=(*names, "out", Scalar("float", workload.factor)),
            ),
        )

    def emulation_workload(self, workload: Reduction, config: Config) -> Reduction:
        """Return one full block of results and a cut one, of at most three elements a thread and one more."""
        results = min(workload.results, config["others"] + 1)
        terms = min(workload.terms, 3 * config["threads"] + 1)
        rows, cols = (results, terms) if workload.axis == "cols" else (terms, results)
        return dataclasses.replace(workload, rows=rows, cols=cols)


VARIANT = NumbaCudaReduction()
