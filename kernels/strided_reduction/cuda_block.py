"""strided_reduction in CUDA C++: threads of a block share some results, and join their parts by shuffles.

The kernel is generated from the index maps, with sizes and strides as constants. A block has `results`
adjacent results, with `threads` threads for each. A thread reduces every `threads`-th vector of `vector`
elements, with `unroll` in flight and one result for each of those. Adjacent threads are along a reduced axis
(`lanes=reduced`), or along an axis of the results (`lanes=kept`), in each case the one along which operands
are contiguous. Few results are split: `split` blocks share them and store parts in scratch memory, and a
second launch joins the parts in a fixed order.

Source: Harris, "Optimizing Parallel Reduction in CUDA", 2007; Luitjens, "Faster Parallel Reductions on
Kepler", NVIDIA, 2014.
"""

from __future__ import annotations

import math
from typing import Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.kernels.common.cuda import ctype, helpers
from tunebench.kernels.common.cuda_expression import claimed, function_of, special
from tunebench.kernels.common.cuda_strided import (
    LOOP_REGISTERS,
    arguments,
    decoded,
    decoded_indices,
    held_registers,
    loads_of,
    parameters,
    place_of,
    prelude,
    spaced,
    touched,
    widest,
)
from tunebench.kernels.common.expected import (
    DECODED,
    PROLOGUE,
    STEP,
    converted,
    exchange,
    expression_instructions,
)
from tunebench.kernels.common.reduction import (
    END_ROWS,
    JOIN,
    MOST_BLOCKS,
    OTHER_REGISTERS,
    ROWS_AT_END,
    SMALL,
    SPLITS,
)
from tunebench.kernels.common.strided import (
    best_lanes,
    capped,
    is_loaded_everywhere,
    lane_axis,
    least_of_element,
    own_elements,
    shrunk,
)
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Costs, CudaVariant, Execution, Launch, Scalar, Tiling, ceil_div
from tunebench.workload import Tensor
from tunebench.workloads.operators.strided_reduction import StridedReduction

WARP = 32
LEAST_TURNS = 4
"""Least elements of a thread in each part of a split result."""


def _lane(workload: StridedReduction, *, reduced: bool) -> int:
    """Return the lane axis, or -1 if no axis of the index space belongs to the results."""
    axis = lane_axis(workload, reduced=reduced)
    return -1 if axis is None else axis


def _registers(workload: StridedReduction, vector: Any, unroll: Any) -> Any:
    """Return the registers that a thread needs, approximately."""
    return held_registers(workload, vector, unroll) + vector + unroll + OTHER_REGISTERS


SPACE = Space(
    (
        Parameter(
            "lanes", ("reduced", "kept"), "axis of adjacent threads: a reduced one, or one of the results"
        ),
        Parameter("threads", (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024), "threads that share a result"),
        Parameter("results", (1, 2, 4, 8, 16, 32, 64, 128, 256), "results of a block"),
        Parameter("vector", (1, 2, 4, 8), "adjacent elements of a thread, up to 16 bytes"),
        Parameter("unroll", (1, 2, 4, 8), "vectors that a thread has in flight"),
        Parameter("split", SPLITS, "blocks that share a result"),
    ),
    (
        lambda threads, results: (threads * results >= 64) & (threads * results <= 1024),
        # Shuffles join threads of a warp; further warps have one result.
        lambda lanes, threads, results: (lanes == "kept") | (threads <= WARP) | (results == 1),
        lambda lanes, threads, results, workload: (
            (lanes == "reduced")
            | ((_lane(workload, reduced=False) >= 0) & (threads <= WARP) & (results >= 8))
        ),
        lambda lanes, vector, workload: (
            (vector == 1)
            | (
                (lanes == "reduced")
                & (workload.extents[_lane(workload, reduced=True)] % vector == 0)
                & (vector * widest(workload, _lane(workload, reduced=True), stored=False) <= 16)
            )
        ),
        # Threads and results beyond the end are useless.
        lambda results, threads, workload: (
            (results < 2 * workload.results) | ((results * threads == 64) & (threads <= WARP))
        ),
        lambda threads, vector, unroll, workload: (
            ((threads <= WARP) & (unroll == 1) & (threads * vector < 64))
            | (1.0 * threads * vector * unroll < 2 * workload.terms)
        ),
        lambda threads, vector, split, workload: (
            (split == 1) | (1.0 * threads * vector * split * LEAST_TURNS <= workload.terms)
        ),
        lambda results, split, workload, device: (
            (split == 1)
            | (ceil_div(workload.results, results) * (split // 2) < MOST_BLOCKS * device.sm_count)
        ),
        lambda threads, results, vector, unroll, workload, device: (
            _registers(workload, vector, unroll)
            <= np.minimum(255, device.registers_per_sm // (threads * results))
        ),
    ),
)

# Words between @ are replaced by text that depends on the workload. A result beyond the end has no vectors;
# its threads still take part in reductions.
KERNEL = r"""
template <class Op, class Left, bool WHOLE, bool REDUCED_LANES, int THREADS, int RESULTS, int V, int N,
          int SPLIT>
__global__ void __launch_bounds__(THREADS * RESULTS)
    reduce_strided(@PARAMETERS@, Left* __restrict__ left, float factor) {
  const u32 thread = REDUCED_LANES ? threadIdx.x % THREADS : threadIdx.x / RESULTS;
  const u32 local = REDUCED_LANES ? threadIdx.x / THREADS : threadIdx.x % RESULTS;
  const u32 result = blockIdx.x * RESULTS + local;
  constexpr u32 VECTORS = @TERMS@u / V;
  const u32 begin = u32(u64(VECTORS) * blockIdx.y / SPLIT);
  const u32 end = result < @RESULTS@u ? u32(u64(VECTORS) * (blockIdx.y + 1) / SPLIT) : 0;
  @DECODE@
  const Op op;
  float totals[N];
#pragma unroll
  for (int n = 0; n < N; ++n) totals[n] = Op::neutral();
  for (u32 first = begin + thread; first < end; first += THREADS * N) {
    @HELD@
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const u32 vector = first + n * THREADS;
      if (vector >= end) continue;
      @DECODE_REDUCED@
      @LOADS@
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
      if (first + n * THREADS >= end) continue;
      float values[V];
#pragma unroll
      for (int i = 0; i < V; ++i) values[i] = chain(@ARGUMENTS@);
#pragma unroll
      for (int i = 1; i < V; ++i) values[0] = op(values[0], values[i]);
      totals[n] = op(totals[n], values[0]);
    }
  }
#pragma unroll
  for (int n = 1; n < N; ++n) totals[0] = op(totals[0], totals[n]);
  float total = totals[0];
  if constexpr (REDUCED_LANES) {
    total = reduce_row<THREADS>(total, op);
  } else if constexpr (THREADS > 1) {
    __shared__ float met[THREADS][RESULTS];
    met[thread][local] = total;
    __syncthreads();
    if (thread == 0) {
#pragma unroll
      for (int t = 1; t < THREADS; ++t) total = op(total, met[t][local]);
    }
  }
  if (thread != 0 || result >= @RESULTS@u) return;
  const size_t place = @PLACE@;
  if constexpr (WHOLE) {
    left[place] = from_float<Left>(finish(total * factor));
  } else {
    left[place * SPLIT + blockIdx.y] = total;
  }
}
"""


class CudaBlockStridedReduction(CudaVariant[StridedReduction]):
    """Variant for every expression, layout and type."""

    name = "cuda_block"
    operator = StridedReduction
    space = SPACE

    def default(self, workload: StridedReduction, device: Device) -> Config:
        """Return lanes along which operands are contiguous, and parts if results are few."""
        lanes = best_lanes(workload)
        if lanes == "kept":
            shapes = [(t, r) for r in (32, 64, 16, 8) for t in (8, 4, 16, 2, 32, 1)]
        else:
            threads = next((t for t in (4, 8, 16, 32, 64, 128) if workload.terms <= 16 * t), 256)
            shapes = [(t, max(1, 128 // t) if t <= WARP else 1) for t in (threads, threads // 2 or 1, 32, 64)]
            shapes += [(t, r) for t in (32, 16, 8, 4, 2, 1) for r in (2, 4, 8, 16, 32, 64)]
        choices = (
            Config({"lanes": lanes, "threads": t, "results": r, "vector": v, "unroll": n, "split": s})
            for t, r in shapes
            for s in reversed(SPLITS)
            if s == 1 or s * ceil_div(workload.results, r) <= 2 * device.sm_count
            for v in (8, 4, 2, 1)
            for n in (4, 2, 1)
        )
        return self.space.first_valid(choices, workload=workload, device=device)

    def tiles(self, workload: StridedReduction, config: Config) -> tuple[Tiling, ...]:
        """Return the results of a block, and its part of the elements or one vector of each thread."""
        part = config["threads"] * config["vector"]
        if config["split"] > 1:
            part = ceil_div(workload.terms // config["vector"], config["split"]) * config["vector"]
        return (
            Tiling(dimension="results", extent=workload.results, tile=config["results"]),
            Tiling(dimension="terms", extent=workload.terms, tile=int(part)),
        )

    def costs(self, workload: StridedReduction, table: Table, device: Device) -> Costs:
        """Count a part of a block's results: operations, loads, and bytes that no other block reads."""
        results = np.minimum(table["results"], workload.results)  # room for more results counts as full
        vector, split, threads = table["vector"], table["split"], table["threads"]
        part = workload.terms // vector // split * vector * 1.0
        elements = results * part
        least, counts = least_of_element(workload, may_be_0=True)
        fma = max(least, counts.get("add", 0) + 1.0) if workload.is_sum else least
        by_warps, by_memory = threads > WARP, (table["lanes"] == "kept") & (threads > 1)
        accesses, fill = np.zeros(len(table)), np.zeros(len(table))
        for lanes in ("reduced", "kept"):
            axis, with_lanes = _lane(workload, reduced=lanes == "reduced"), table["lanes"] == lanes
            # One sector at either end of each run along the lane axis may be shared with another block.
            extent = workload.extents[axis]
            runs = results * (part / extent + 2) if lanes == "reduced" else part * (results / extent + 2)
            for operand in workload.maps.values():
                if own_elements(operand) and operand.index.strides[axis] == 1:
                    run_bytes = np.maximum(0.0, elements * itemsize(operand.dtype) - 64.0 * runs)
                    fill += np.where(with_lanes, run_bytes, 0.0)
            for width in np.unique(vector[with_lanes]):
                for load in loads_of(workload, axis, int(width)):
                    if is_loaded_everywhere(load.operand):
                        accesses[with_lanes & (vector == width)] += load.accesses / int(width)
        adds = np.maximum(0.0, part // (threads * vector) // table["unroll"] - 1.0)
        smem_bytes = np.where(by_memory, threads * table["results"] * 4.0, 0.0)
        return Costs(
            blocks=workload.results / results * np.minimum(split, workload.terms / part),
            full_blocks=workload.results // results * split,
            threads=threads * table["results"],
            smem_bytes=np.where((table["lanes"] == "reduced") & by_warps, threads / 8.0, smem_bytes),
            fma=fma * elements,
            sfu=special(counts) * elements,
            fill_bytes=fill,
            accesses=accesses * elements,
            # The first load, sequential additions, and the exchange through shared memory.
            chain_clocks=np.where(fill > 0, device.l2_latency, 0.0)
            + workload.is_sum * adds * device.fma_latency
            + device.smem_latency * (by_memory | by_warps),
            serial_launches=np.where(split == 1, 1, 2),
            execution=_execution(workload, table),
        )

    def scratch(self, workload: StridedReduction, config: Config) -> tuple[Tensor, ...]:
        """Return memory for parts of results, (results, split), if any."""
        shape = (workload.results, config["split"])
        return (Tensor(name="partial", shape=shape, dtype="f32"),) if config["split"] > 1 else ()

    def source(self, workload: StridedReduction, config: Config) -> str:
        """Return the kernels of this workload."""
        extents, result_axes = dict(enumerate(workload.extents)), len(workload.extents) - workload.axes
        reduced_lanes = config["lanes"] == "reduced"
        lane = _lane(workload, reduced=reduced_lanes)
        loads = loads_of(workload, lane, config["vector"])
        index = {axis: f"at_{axis}" for axis in extents}
        # Adjacent threads have adjacent indices of the lane axis.
        order = [axis for axis in extents if axis != lane] + [lane]
        of_results = [axis for axis in order if axis < result_axes]
        of_terms = [axis for axis in order if axis >= result_axes]
        text = spaced(
            KERNEL,
            PARAMETERS=[parameters(workload)],
            TERMS=[str(workload.terms)],
            RESULTS=[str(workload.results)],
            DECODE=decoded("result", of_results, extents, {}),
            DECODE_REDUCED=decoded("vector", of_terms, extents, {lane: config["vector"]}),
            HELD=[f"{load.held} held_{load.name}[N];" for load in loads],
            LOADS=[load.text(f"held_{load.name}[n]", index) for load in loads],
            ARGUMENTS=[arguments(loads)],
            PLACE=[place_of(workload.extents[:result_axes])],
        )
        finish = function_of(workload.end, ("x",), "finish")
        return prelude(workload) + finish + helpers("reduction") + text + END_ROWS

    def claims(self, workload: StridedReduction, config: Config) -> tuple[str, ...]:
        """Return loads and stores, and the special-function unit if a function should use it."""
        return claimed(workload.tree)

    def launches(self, workload: StridedReduction, config: Config) -> tuple[Launch, ...]:
        """Launch a block for every part of some results, and a second kernel if there are parts."""
        factor, split = Scalar("float", workload.factor), config["split"]
        join, out = JOIN[workload.reduce], ctype(workload.dtype)
        shape = ", ".join(str(config[name]) for name in ("threads", "results", "vector", "unroll", "split"))
        whole, reduced = str(split == 1).lower(), str(config["lanes"] == "reduced").lower()
        first = Launch(
            entry=f"reduce_strided<{join}, {out if split == 1 else 'float'}, {whole}, {reduced}, {shape}>",
            grid=(ceil_div(workload.results, config["results"]), split, 1),
            block=(config["threads"] * config["results"], 1, 1),
            arguments=(*workload.input_names, "out" if split == 1 else "partial", factor),
        )
        if split == 1:
            return (first,)
        last = Launch(
            entry=f"end_rows<{join}, {out}>",
            grid=(ceil_div(workload.results, ROWS_AT_END), 1, 1),
            block=(ROWS_AT_END * WARP, 1, 1),
            arguments=("partial", "out", factor, Scalar("int", workload.results), Scalar("int", split)),
        )
        return (first, last)

    def emulation_workload(self, workload: StridedReduction, config: Config) -> StridedReduction:
        """Return 2 blocks of results and a partial one, and 3 iterations over elements; strides stay."""
        result_axes = len(workload.extents) - workload.axes
        results = capped(workload, range(result_axes), 2 * config["results"] + 1)
        turn = config["split"] * config["threads"] * config["vector"] * config["unroll"]
        terms = max(2 * config["split"] + 1, min(3 * turn, SMALL // math.prod(results.values() or [1])))
        of_terms = capped(workload, range(result_axes, len(workload.extents)), terms)
        return shrunk(workload, {**results, **of_terms}, config["vector"])


SAMPLED_THREADS, SAMPLED_TURNS = 256, 4
"""Threads and vectors of each whose addresses are computed to count sectors and lines."""


def _touched(
    workload: StridedReduction, lanes: str, threads: int, results: int, vector: int
) -> tuple[float, ...]:
    """Return the accesses, passes of a warp and bytes of sectors of a thread's vector."""
    reduced, extents = lanes == "reduced", dict(enumerate(workload.extents))
    result_axes, lane = len(extents) - workload.axes, _lane(workload, reduced=reduced)
    thread_id = np.arange(max(WARP, min(SAMPLED_THREADS, threads * results)))
    thread = thread_id % threads if reduced else thread_id // results
    local = thread_id // threads if reduced else thread_id % results
    order = [axis for axis in extents if axis != lane] + [lane]
    turns = np.arange(SAMPLED_TURNS)[:, None]
    of_results = decoded_indices(
        (local + 0 * turns).ravel(), [axis for axis in order if 0 <= axis < result_axes], extents, {}
    )
    of_terms = decoded_indices(
        (thread + threads * turns).ravel(),
        [axis for axis in order if axis >= result_axes],
        extents,
        {lane: vector},
    )
    counts = touched(loads_of(workload, lane, vector), {**of_results, **of_terms})
    return counts.accesses, counts.passes, counts.sector_bytes


def _execution(workload: StridedReduction, table: Table) -> Execution:
    """Describe a block: every `unroll` vectors a thread waits, then threads join their results."""
    names = ("lanes", "threads", "results", "vector", "unroll", "split")
    lanes, threads, results, vector, unroll, split = (table[name] for name in names)
    shapes = list(zip(lanes.tolist(), threads.tolist(), results.tolist(), vector.tolist(), strict=True))
    found = {shape: _touched(workload, *shape) for shape in set(shapes)}
    accesses, passes, sectors = np.array([found[shape] for shape in shapes]).T
    block, reduced = threads * results, lanes == "reduced"
    each = ceil_div(ceil_div(workload.terms // vector, split), threads)  # vectors of a thread
    turns, vectors = ceil_div(each, unroll), 1.0 * each * block
    of_element = 1 + expression_instructions(workload.tree)
    of_element = of_element + sum(converted(itemsize(o.dtype)) for o in workload.maps.values())
    of_vector = vector * of_element + DECODED * workload.axes + STEP / 2 + accesses
    by_shuffles = exchange(threads, block, 1)
    by_memory = ~reduced & (threads > 1)
    gathered = any(operand.index.gathers for operand in workload.maps.values())
    return Execution(
        registers=held_registers(workload, vector, unroll) + vector + unroll + LOOP_REGISTERS,
        instructions=vectors / WARP * of_vector
        + block / WARP * (PROLOGUE + STEP * turns)
        + np.where(reduced, by_shuffles.instructions, by_memory * 2.0 * block / WARP),
        accesses=accesses * vectors + np.where(reduced, by_shuffles.accesses, by_memory * 2.0 * block),
        passes=vectors / WARP * passes + by_memory * 2.0 * block / WARP,
        l2_bytes=sectors * vectors + 32.0 * results,
        # A second launch starts, and waits for the parts of a result.
        memory_waits=turns * (1 + gathered) + np.where(split > 1, 2, 0),
        shared_waits=np.where(reduced, by_shuffles.waits, by_memory * (1 + threads / 8)),
        barriers=np.where(reduced, by_shuffles.barriers, 1.0 * by_memory),
    )


VARIANT = CudaBlockStridedReduction()
