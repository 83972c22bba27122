"""strided_reduction in Numba-CUDA: threads share a result and reduce through shared memory.

The kernel is generated from the index maps, with sizes and strides as constants. A block has `others` results
with `threads` threads each. Adjacent threads are along a reduced axis (`lanes=reduced`) or along an axis of
the results (`lanes=kept`), in each case the one along which operands are contiguous.
"""

from __future__ import annotations

from collections.abc import Callable

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.kernels.common.cuda_strided import decoded_indices, loads_of, touched
from tunebench.kernels.common.expected import (
    DECODED,
    LANES,
    NUMBA_ACCESS,
    NUMBA_REGISTERS,
    NUMBA_UNROLLED,
    PROLOGUE,
    STEP,
    converted,
    expression_instructions,
    tree_exchange,
)
from tunebench.kernels.common.expression import filled
from tunebench.kernels.common.numba_cuda_strided import loads, refusal, stored, valid
from tunebench.kernels.common.numba_expression import NUMBA_CUDA_PRINTER as PRINTER
from tunebench.kernels.common.numba_expression import cuda_array
from tunebench.kernels.common.numba_reduction import TAKEN, cuda_kernel, cuda_launches
from tunebench.kernels.common.numba_strided import decoded, indented
from tunebench.kernels.common.strided import (
    best_lanes,
    capped,
    is_loaded_everywhere,
    lane_axis,
    least_of_element,
    shrunk,
)
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Costs, Execution, Launch, NumbaCudaVariant, Tiling, ceil_div
from tunebench.workloads.operators.strided_reduction import StridedReduction

SPACE = Space(
    (
        Parameter(
            "lanes", ("reduced", "kept"), "axis of adjacent threads: a reduced one, or one of the results"
        ),
        Parameter("threads", tuple(2**n for n in range(11)), "threads that share a result"),
        Parameter("others", tuple(2**n for n in range(9)), "results of a block"),
    ),
    (
        lambda threads, others: (threads * others >= 64) & (threads * others <= 1024),
        lambda lanes, others, workload: (
            (lanes == "reduced") | ((lane_axis(workload, reduced=False) is not None) & (others >= 8))
        ),
        # Each thread should have an element, and each result of a block should exist.
        lambda lanes, threads, others, workload: (
            ((threads * others == 64) & (threads >= 8) & (others >= 8))
            | ((threads < 2 * workload.terms) & (others < 2 * workload.results))
        ),
    ),
)

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
    terms = @TERMS@ if result < @RESULTS@ else 0
    @DECODE@
    total = f32(neutral)
    for at in range(t, terms, threads):
        @DECODE_REDUCED@
        @LOADS@
        @ASSIGNMENTS@
        each = f32(@RESULT@)
        @TAKEN@
    met[@MINE@] = total
    reduce(met, r, t)
    if t == 0 and terms > 0:
        in_x = f32(met[@MINE@] * factor)
        @ENDING@
        out[@PLACE@] = @ENDED@
"""


class NumbaCudaStridedReduction(NumbaCudaVariant[StridedReduction]):
    """Variant for every expression and layout of f32, f16 and bool."""

    name = "numba_cuda"
    operator = StridedReduction
    space = SPACE

    def limits(self, workload: StridedReduction, device: Device) -> str | None:
        """Refuse bf16, whose conversions only a driver can link."""
        return refusal(self.key, workload)

    def default(self, workload: StridedReduction, device: Device) -> Config:
        """Return lanes along which operands are contiguous, and up to 256 threads for a result."""
        lanes = best_lanes(workload)
        threads = next((t for t in (8, 16, 32, 64, 128) if workload.terms <= 4 * t), 256)
        pairs = [(t, others) for others in (32, 64, 16, 8) for t in (8, 16, 4, 2, 1)]
        if lanes == "reduced":
            pairs = [(t, max(1, 128 // t)) for t in (threads, threads // 2, 32)] + pairs
        pairs += [(t, 64 // t) for t in (8, 4, 2, 1)]
        choices = (Config({"lanes": lanes, "threads": t, "others": others}) for t, others in pairs)
        return self.space.first_valid(choices, workload=workload, device=device)

    def tiles(self, workload: StridedReduction, config: Config) -> tuple[Tiling, ...]:
        """Return the results of a block, and the elements that its threads reduce at a time."""
        return (
            Tiling(dimension="results", extent=workload.results, tile=config["others"]),
            Tiling(dimension="terms", extent=workload.terms, tile=config["threads"]),
        )

    def costs(self, workload: StridedReduction, table: Table, device: Device) -> Costs:
        """Count operations and loads; functions are not counted."""
        least, counts = least_of_element(workload, may_be_0=False)
        joins = workload.is_sum and not any(o.index.guards for o in workload.maps.values())
        read = sum(map(is_loaded_everywhere, workload.maps.values()))
        elements = 1.0 * table["others"] * workload.terms
        return Costs(
            blocks=workload.results / table["others"],
            full_blocks=workload.results // table["others"],
            threads=table["threads"] * table["others"],
            smem_bytes=4.0 * table["threads"] * table["others"],
            fma=max(least, counts.get("add", 0) + 1.0 if joins else 0.0) * elements,
            accesses=read * elements,
            chain_clocks=device.smem_latency,
            execution=_execution(workload, table),
        )

    def generated(self, workload: StridedReduction, config: Config) -> str:
        """Return the kernel of this workload."""
        reduced = config["lanes"] == "reduced"
        lane, kept = lane_axis(workload, reduced=reduced), len(workload.extents) - workload.axes
        # Adjacent threads have adjacent indices of the lane axis.
        order = sorted(range(len(workload.extents)), key=lambda axis: (axis == lane, axis))
        decode, of_result = decoded([axis for axis in order if axis < kept], workload.extents, "result")
        decode_reduced, of_terms = decoded([a for a in order if a >= kept], workload.extents, "at")
        assignments, result = PRINTER.write(workload.tree)
        ending, ended = PRINTER.write(workload.end)
        text = filled(
            KERNEL,
            NAMES=", ".join(map(cuda_array, workload.input_names)),
            SHAPE="others, threads" if reduced else "threads, others",
            ALONG="x" if reduced else "y",
            ACROSS="y" if reduced else "x",
            TERMS=str(workload.terms),
            RESULTS=str(workload.results),
            RESULT=result,
            TAKEN=TAKEN[workload.reduce],
            MINE="r, t" if reduced else "t, r",
            THEIRS="r, other" if reduced else "other, r",
            PLACE=", ".join(of_result[axis] for axis in range(kept)) or "0",
            ENDED=stored(ended, workload.dtype),
        )
        return indented(
            text,
            DECODE=decode,
            DECODE_REDUCED=decode_reduced,
            LOADS=loads(workload, {**of_result, **of_terms}),
            ASSIGNMENTS=assignments,
            ENDING=ending,
        )

    def kernel(self, workload: StridedReduction, config: Config) -> Callable[..., None]:
        """Return the kernel of this workload; it takes the operands in order, out, and the factor of sums."""
        functions = {"valid": valid()} if workload.gathered else {}
        return cuda_kernel(workload, config, self.generated(workload, config), functions)

    def launches(self, workload: StridedReduction, config: Config) -> tuple[Launch, ...]:
        """Launch one block for every `others` results."""
        return cuda_launches(
            workload, config, workload.input_names, reduced_lanes=config["lanes"] == "reduced"
        )

    def emulation_workload(self, workload: StridedReduction, config: Config) -> StridedReduction:
        """Return a full and a partial block of results, of up to three elements per thread; strides stay."""
        kept = len(workload.extents) - workload.axes
        results = capped(workload, range(kept), config["others"] + 1)
        terms = capped(workload, range(kept, len(workload.extents)), 3 * config["threads"])
        return shrunk(workload, {**results, **terms})


def _touched(workload: StridedReduction, lanes: str, threads: int, others: int) -> tuple[float, ...]:
    """Return the accesses, passes of a warp and bytes of sectors of an element, from those of some warps."""
    extents, kept = dict(enumerate(workload.extents)), len(workload.extents) - workload.axes
    reduced = lanes == "reduced"
    lane = lane_axis(workload, reduced=reduced)
    assert lane is not None
    thread_id = np.arange(max(LANES, min(256, threads * others)))
    thread = thread_id % threads if reduced else thread_id // others
    local = thread_id // threads if reduced else thread_id % others
    order, turns = sorted(extents, key=lambda axis: (axis == lane, axis)), np.arange(4)[:, None]
    of_results = decoded_indices(
        (local + 0 * turns).ravel(), [axis for axis in order if axis < kept], extents, {}
    )
    of_terms = decoded_indices(
        (thread + threads * turns).ravel(), [axis for axis in order if axis >= kept], extents, {}
    )
    counts = touched(loads_of(workload, lane, 1), {**of_results, **of_terms})
    return counts.accesses, counts.passes, counts.sector_bytes


def _execution(workload: StridedReduction, table: Table) -> Execution:
    """Describe a block: a thread waits for some elements at a time, then threads join their results."""
    lanes, threads, others = (table[name] for name in ("lanes", "threads", "others"))
    shapes = list(zip(lanes.tolist(), threads.tolist(), others.tolist(), strict=True))
    found = {shape: _touched(workload, *shape) for shape in set(shapes)}
    accesses, passes, sectors = np.array([found[shape] for shape in shapes]).T
    each, block = ceil_div(workload.terms, threads), threads * others
    elements, exchanged = 1.0 * each * block, tree_exchange(threads, block, 1)
    of_element = 1 + expression_instructions(workload.tree) + DECODED * workload.axes + STEP / 2
    of_element = of_element + accesses * (NUMBA_ACCESS + converted(itemsize(workload.dtype)))
    gathered = any(operand.index.gathers for operand in workload.maps.values())
    return Execution(
        registers=NUMBA_REGISTERS,
        instructions=elements / LANES * of_element + block / LANES * PROLOGUE + exchanged.instructions,
        accesses=accesses * elements + exchanged.accesses,
        passes=elements / LANES * passes,
        l2_bytes=elements * sectors + 32.0 * others,
        memory_waits=np.ceil(each / NUMBA_UNROLLED) * (1 + gathered),
        shared_waits=exchanged.waits,
        barriers=exchanged.barriers,
    )


VARIANT = NumbaCudaStridedReduction()
