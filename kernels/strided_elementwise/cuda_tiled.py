"""strided_elementwise in CUDA C++: tiles of two axes, transposed through shared memory.

The kernel is generated from the index maps, with sizes and strides as constants. A block computes a tile of
two axes: the last one, along which results are contiguous, and a second one, along which transposed operands
are contiguous. It loads transposed operands into shared memory with adjacent threads along the second axis,
and all others directly with adjacent threads along the last one. Loads and stores of global memory have
`vector` adjacent elements; only reads of shared memory are by single elements, since they are across. To
avoid bank conflicts, the vectors of a row are exchanged in shared memory, by the exclusive or of their number
and that of the row's vector. Without vectors, rows are padded by 4 bytes.

Source: Harris, "An Efficient Matrix Transpose in CUDA C/C++", NVIDIA, 2013.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.kernels.common.cuda import ctype
from tunebench.kernels.common.cuda_expression import claimed, special
from tunebench.kernels.common.cuda_strided import (
    LOOP_REGISTERS,
    Load,
    decoded,
    loads_of,
    parameters,
    place_of,
    prelude,
    spaced,
    widest,
)
from tunebench.kernels.common.expected import (
    LANES,
    PROLOGUE,
    STEP,
    converted,
    expression_instructions,
    l1_passes,
    sector_bytes,
)
from tunebench.kernels.common.strided import (
    capped,
    is_loaded_everywhere,
    least_of_element,
    own_elements,
    shrunk,
    transposed_axis,
)
from tunebench.kernels.common.warp_access import shared_passes
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Costs, CudaVariant, Execution, Launch, Tiling
from tunebench.workloads.operators.strided_elementwise import StridedElementwise

SPACE = Space(
    (
        Parameter("last", (16, 32, 64, 128), "indices of the last axis in a tile"),
        Parameter("second", (16, 32, 64, 128), "indices of the other axis in a tile"),
        Parameter("threads", (64, 128, 256, 512), "threads of a block"),
        Parameter("vector", (1, 2, 4, 8, 16), "adjacent elements of an access, up to 16 bytes"),
    ),
    (
        lambda last, second, threads, vector: (
            (last * second >= threads * vector) & (last * second <= MOST_ELEMENTS * threads)
        ),
        # A row of a tile has two vectors or more.
        lambda last, second, vector: (2 * vector <= last) & (2 * vector <= second),
        lambda vector, workload: (
            (workload.extents[-1] % vector == 0)
            & (workload.extents[_second(workload)] % vector == 0)
            & (vector * _widest_element(workload) <= 16)
        ),
        lambda last, workload: (last == 16) | (last < 2 * workload.extents[-1]),
        lambda second, workload: (second == 16) | (second < 2 * workload.extents[_second(workload)]),
        lambda last, second, vector, workload: _smem_bytes(workload, last, second, vector) <= 48 * 1024,
    ),
)

MOST_ELEMENTS = 32
"""Most elements of a thread."""

# Words between @ are replaced by text that depends on the workload.
KERNEL = r"""
// Place of an element in a tile with rows of SECOND elements of type T.
template <class T, int SECOND, int V>
__device__ __forceinline__ int place_in_tile(int row, int column) {
  if constexpr (V == 1) return row * (SECOND + 4 / int(sizeof(T))) + column;
  else return row * SECOND + (column / V ^ row / V % (SECOND / V)) * V + column % V;
}

// The same number, but the compiler does not see how it is computed: it would store some vectors by elements.
__device__ __forceinline__ size_t hidden(size_t offset) {
#ifdef TUNEBENCH_EMULATE
  return offset;
#else
  return offset >> 32 << 32 | __byte_perm(u32(offset), 0, 0x3210);
#endif
}

template <class Out, int LAST, int SECOND, int THREADS, int V>
__global__ void __launch_bounds__(THREADS) strided_tiled(@PARAMETERS@, Out* __restrict__ out) {
  @TILES@
  const u32 tile = blockIdx.x / @TILES_LAST@u, outer = tile / @TILES_SECOND@u;
  const int first_last = int(blockIdx.x % @TILES_LAST@u) * LAST;
  const int first_second = int(tile % @TILES_SECOND@u) * SECOND;
  @DECODE@
#pragma unroll
  for (int n = 0; n < LAST * SECOND / V / THREADS; ++n) {
    const int place = n * THREADS + threadIdx.x;
    const int along = place % (SECOND / V) * V, across = place / (SECOND / V);
    const int @AT_SECOND@ = first_second + along, @AT_LAST@ = first_last + across;
    if (@AT_SECOND@ >= @EXTENT_SECOND@ || @AT_LAST@ >= @EXTENT_LAST@) continue;
    @LOAD_TILES@
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < LAST * SECOND / V / THREADS; ++n) {
    const int place = n * THREADS + threadIdx.x;
    const int along = place % (LAST / V) * V, across = place / (LAST / V);
    const int @AT_SECOND@ = first_second + across, @AT_LAST@ = first_last + along;
    if (@AT_SECOND@ >= @EXTENT_SECOND@ || @AT_LAST@ >= @EXTENT_LAST@) continue;
    @LOADS@
    Vec<Out, V> result;
#pragma unroll
    for (int i = 0; i < V; ++i) result.at[i] = from_float<Out>(chain(@ARGUMENTS@));
    store_vec(out + hidden(@PLACE@), result);
  }
}
"""


def _second(workload: StridedElementwise) -> int:
    """Return the axis along which transposed operands are contiguous; the last one if there are none."""
    last = len(workload.extents) - 1
    axis = transposed_axis(workload, last)
    return last if axis is None else axis


def _is_tiled(workload: StridedElementwise, load: Load) -> bool:
    """Return whether an operand goes through shared memory."""
    strides = load.operand.index.strides
    return 0 < abs(strides[_second(workload)]) < abs(strides[-1])


def _smem_bytes(workload: StridedElementwise, last: Any, second: Any, vector: Any) -> Any:
    """Return the bytes of the tiles in shared memory; for numbers or columns."""
    return sum(last * (second * size + 4 * (vector == 1)) for size in _tiled_sizes(workload))


def _tiled_sizes(workload: StridedElementwise) -> list[int]:
    """Return the bytes of an element of each operand that goes through shared memory."""
    loads = loads_of(workload, len(workload.extents) - 1, 1)
    return [itemsize(load.operand.dtype) for load in loads if _is_tiled(workload, load)]


def _widest_element(workload: StridedElementwise) -> int:
    """Return the bytes of the largest element that is accessed by vectors."""
    stored = widest(workload, len(workload.extents) - 1, stored=True)
    return max(stored, widest(workload, _second(workload), stored=False), *_tiled_sizes(workload))


def _loads(workload: StridedElementwise, vector: int) -> tuple[Load, ...]:
    """Return how a thread loads each operand: into a tile along the second axis, others along the last."""
    along, tiled = (
        loads_of(workload, axis, vector) for axis in (len(workload.extents) - 1, _second(workload))
    )
    return tuple(
        into_tile if _is_tiled(workload, load) else load for load, into_tile in zip(along, tiled, strict=True)
    )


class CudaTiledStridedElementwise(CudaVariant[StridedElementwise]):
    """Variant for expressions with an operand that is contiguous along another axis than the last."""

    name = "cuda_tiled"
    operator = StridedElementwise
    space = SPACE

    def limits(self, workload: StridedElementwise, device: Device) -> str | None:
        """Refuse workloads whose operands are all best read along the last axis."""
        if transposed_axis(workload, len(workload.extents) - 1) is None:
            return f"{self.key} needs an operand that is contiguous along another axis than the last"
        return None

    def default(self, workload: StridedElementwise, device: Device) -> Config:
        """Return tiles of 32 by 32, or of 64 by 64 elements of 2 bytes or less, and the widest accesses."""
        small = max(itemsize(operand.dtype) for operand in workload.maps.values()) <= 2
        extents = (64, 32, 16) if small else (32, 16)
        choices = (
            Config({"last": last, "second": second, "threads": threads, "vector": vector})
            for last in extents
            for second in extents
            for vector in (16, 8, 4, 2, 1)
            for threads in (256, 128, 64)
        )
        return self.space.first_valid(choices, workload=workload, device=device)

    def tiles(self, workload: StridedElementwise, config: Config) -> tuple[Tiling, ...]:
        """Return the tiles of both axes, and the product of the others."""
        second = _second(workload)
        other_elements = math.prod(e for axis, e in enumerate(workload.extents[:-1]) if axis != second)
        return (
            Tiling(dimension="last axis", extent=workload.extents[-1], tile=config["last"]),
            Tiling(dimension="second axis", extent=workload.extents[second], tile=config["second"]),
            Tiling(dimension="other axes", extent=other_elements, tile=1),
        )

    def costs(self, workload: StridedElementwise, table: Table, device: Device) -> Costs:
        """Count a tile's operations, loads and stores, and bytes that no other block reads."""
        last, second = 1.0 * table["last"], 1.0 * table["second"]
        elements, axis, vectors = last * second, _second(workload), table["vector"]
        operations, functions = least_of_element(workload, may_be_0=True)
        fill, accesses, traffic = np.zeros(len(table)), 1.0 / vectors, 0.0
        for load in loads_of(workload, len(workload.extents) - 1, 1):
            index, size, tiled = load.operand.index, itemsize(load.operand.dtype), _is_tiled(workload, load)
            if tiled:  # stored to shared memory, and loaded
                accesses, traffic = accesses + 1.0 / vectors + 1, traffic + 2.0 * size
            if not is_loaded_everywhere(load.operand):
                continue
            accesses += 1.0 / vectors
            # One sector at either end of each run may be shared with another block.
            if own_elements(load.operand) and index.strides[axis if tiled else -1] == 1:
                runs, run = (last, second) if tiled else (second, last)
                fill += runs * np.maximum(0.0, run * size - 64.0)
        full = [workload.extents[-1] // table["last"], workload.extents[axis] // table["second"]]
        other_elements = workload.elements // (workload.extents[-1] * workload.extents[axis])
        return Costs(
            blocks=workload.elements / elements,
            full_blocks=full[0] * full[1] * other_elements,
            threads=table["threads"],
            smem_bytes=_smem_bytes(workload, table["last"], table["second"], vectors),
            fma=operations * elements,
            sfu=special(functions) * elements,
            smem_traffic_bytes=traffic * elements,
            fill_bytes=fill,
            accesses=accesses * elements,
            chain_clocks=device.smem_latency + np.where(fill > 0, device.l2_latency, 0.0),
            execution=_execution(workload, table),
        )

    def source(self, workload: StridedElementwise, config: Config) -> str:
        """Return the kernel of this workload."""
        extents, second = dict(enumerate(workload.extents)), _second(workload)
        last = len(extents) - 1
        loads = _loads(workload, config["vector"])
        tiled = [load for load in loads if _is_tiled(workload, load)]
        outer_axes = [axis for axis in extents if axis not in (last, second)]
        index = {axis: f"at_{axis}" for axis in extents}
        of_last, of_second, _ = self.tiles(workload, config)
        values = {
            load.name: f"to_float(tile_{load.name}[{_place(load, 'along + i', 'across')}])"
            if load in tiled
            else load.element(f"held_{load.name}")
            for load in loads
        }
        text = spaced(
            KERNEL,
            PARAMETERS=[parameters(workload)],
            TILES=[_tile(load) for load in tiled],
            TILES_LAST=[str(of_last.count)],
            TILES_SECOND=[str(of_second.count)],
            DECODE=decoded("outer", outer_axes, extents, {}),
            AT_LAST=[f"at_{last}"],
            AT_SECOND=[f"at_{second}"],
            EXTENT_LAST=[str(extents[last])],
            EXTENT_SECOND=[str(extents[second])],
            LOAD_TILES=[_into_tile(load, index) for load in tiled],
            LOADS=[
                f"{load.held} held_{load.name};\n    {load.text(f'held_{load.name}', index)}"
                for load in loads
                if load not in tiled
            ],
            PLACE=[place_of(workload.extents)],
            ARGUMENTS=[", ".join(values.values())],
        )
        return prelude(workload) + text

    def claims(self, workload: StridedElementwise, config: Config) -> tuple[str, ...]:
        """Return accesses of global and shared memory, and the special-function unit if it should be used."""
        return (*claimed(workload.tree), "LDS", "STS")

    def launches(self, workload: StridedElementwise, config: Config) -> tuple[Launch, ...]:
        """Launch one block for each tile."""
        shape = ", ".join(str(config[name]) for name in ("last", "second", "threads", "vector"))
        count = math.prod(tiling.count for tiling in self.tiles(workload, config))
        return (
            Launch(
                entry=f"strided_tiled<{ctype(workload.dtype)}, {shape}>",
                grid=(count, 1, 1),
                block=(config["threads"], 1, 1),
                arguments=(*workload.input_names, "out"),
            ),
        )

    def emulation_workload(self, workload: StridedElementwise, config: Config) -> StridedElementwise:
        """Return a full and a partial tile of both axes, and two indices of each other one."""
        last, second = len(workload.extents) - 1, _second(workload)
        outer_axes = [axis for axis in range(last) if axis != second]
        outer_extents = capped(workload, outer_axes, 2)
        extents = {**outer_extents, last: config["last"] + 3, second: config["second"] + 5}
        return shrunk(workload, extents, config["vector"])


def _tile(load: Load) -> str:
    """Return the declaration of an operand's tile in shared memory."""
    dtype = ctype(load.operand.dtype)
    pad = f"(V == 1 ? {4 // itemsize(load.operand.dtype)} : 0)"
    return f"__shared__ alignas(16) {dtype} tile_{load.name}[LAST * (SECOND + {pad})];"


def _place(load: Load, row: str, column: str) -> str:
    """Return the text of the place of an element in its tile."""
    return f"place_in_tile<{ctype(load.operand.dtype)}, SECOND, V>({row}, {column})"


def _into_tile(load: Load, index: dict[int, str]) -> str:
    """Return the statements that load elements into the tile; equal elements are loaded once."""
    held = f"held_{load.name}"
    loaded = f"{load.held} {held};\n    {load.text(held, index)}"
    return f"{loaded}\n    store_vec(tile_{load.name} + {_place(load, 'across', 'along')}, {held});"


@functools.lru_cache(256)
def _read_passes(last: int, second: int, vector: int, size: int) -> int:
    """Return the passes of a warp's read of shared memory: an element of each lane's vector of results.

    Args:
        last: Indices of the last axis in a tile.
        second: Indices of the other axis in a tile.
        vector: Adjacent results of a thread.
        size: Bytes of an element.
    """
    lane = np.arange(LANES)
    row, column = lane % (last // vector) * vector, lane // (last // vector)
    if vector == 1:
        place = row * (second + 4 // size) + column
    else:
        exchanged = column // vector ^ row // vector % (second // vector)
        place = row * second + exchanged * vector + column % vector
    return shared_passes(place * size // 4, 1)


def _execution(workload: StridedElementwise, table: Table) -> Execution:
    """Describe a block: loads of transposed operands, a barrier, then the other loads and results."""
    last, second, threads, vector = (table[name] * 1.0 for name in ("last", "second", "threads", "vector"))
    elements, out_size = last * second, itemsize(workload.dtype)
    run = np.minimum(last, workload.extents[-1])
    loads = loads_of(workload, len(workload.extents) - 1, 1)
    tiled = [load for load in loads if _is_tiled(workload, load)]
    stored_bytes = elements / last * sector_bytes(run * out_size, workload.extents[-1] * out_size)
    of_element: Any = converted(out_size)
    of_element += sum(converted(itemsize(load.operand.dtype)) for load in loads)
    of_element = of_element + expression_instructions(workload.tree) + 2 * STEP / vector
    of_loads = [_passes_of_load(workload, load, table) for load in loads]
    accesses: Any = 1 / vector + sum(counts[0] for counts in of_loads) + len(tiled) * (1 / vector + 1)
    passes: Any = l1_passes(last / vector, vector * out_size) / vector + sum(counts[1] for counts in of_loads)
    for size in (itemsize(load.operand.dtype) for load in tiled):
        columns = (table[name] for name in ("last", "second", "vector"))
        reads = np.array([_read_passes(*map(int, row), size) for row in zip(*columns, strict=True)])
        passes = passes + _words(vector, size) + reads
    held = sum(_words(vector, itemsize(load.operand.dtype)) for load in loads)
    return Execution(
        registers=elements / threads * held + vector + LOOP_REGISTERS,
        instructions=elements / LANES * of_element + threads / LANES * (2 * PROLOGUE),
        accesses=accesses * elements,
        passes=passes * elements / LANES,
        l2_bytes=stored_bytes + sum(_loaded_bytes(workload, load, last, second) for load in loads),
        memory_waits=1 + (len(tiled) < len(loads)),
        shared_waits=1,
        barriers=1,
    )


def _words(vector: Any, size: int) -> Any:
    """Return the words of an element in vectors, which registers hold and a warp's access passes."""
    return np.maximum(1.0, vector * size / 4) / vector


def _loaded_bytes(workload: StridedElementwise, load: Load, last: Any, second: Any) -> Any:
    """Return the bytes of the sectors that a block loads of an operand.

    Args:
        workload: The workload.
        load: The operand.
        last: Indices of the last axis in a tile.
        second: Indices of the other axis in a tile.
    """
    index, size, tiled = load.operand.index, itemsize(load.operand.dtype), _is_tiled(workload, load)
    of_lanes, along = (_second(workload), second) if tiled else (len(workload.extents) - 1, last)
    step = abs(index.strides[of_lanes])
    # Runs of adjacent elements; elements farther apart have sectors of their own.
    run_bytes = along * np.minimum(32.0, size * step) if step else 0.0 * along
    pitch = max((abs(stride) for stride in index.strides), default=0) * size
    return last * second / along * np.maximum(32.0, sector_bytes(run_bytes, pitch))


def _passes_of_load(workload: StridedElementwise, load: Load, table: Table) -> tuple[Any, Any]:
    """Return the loads of an element from global memory, and their passes through L1 for a warp.

    A vector that is not aligned is loaded by single elements, which are a vector apart for adjacent lanes.
    """
    vector, size, tiled = 1.0 * table["vector"], itemsize(load.operand.dtype), _is_tiled(workload, load)
    of_lanes, along = (
        (_second(workload), table["second"]) if tiled else (len(workload.extents) - 1, table["last"])
    )
    step = abs(load.operand.index.strides[of_lanes])
    by_vector = {
        int(width): next(made for made in _loads(workload, int(width)) if made.name == load.name).accesses
        == 1
        for width in np.unique(table["vector"])
    }
    whole = np.array([by_vector[int(width)] for width in table["vector"]])
    accesses = np.where(whole, 1 / vector, 1.0)
    if step == 1:
        wide = l1_passes(along / vector, vector * size) / vector
        return accesses, np.where(whole, wide, np.minimum(LANES, vector * size / 4))
    return accesses, accesses * np.minimum(LANES, np.maximum(1.0, vector * step * size / 4))


VARIANT = CudaTiledStridedElementwise()
