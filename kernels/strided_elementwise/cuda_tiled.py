"""strided_elementwise in CUDA C++: tiles of two axes, transposed through shared memory.

The kernel is generated from the index maps, with sizes and strides as constants. A block computes a tile of
two axes: the last one, along which results are contiguous, and a second one, along which transposed operands
are contiguous. It loads transposed operands into shared memory with adjacent threads along the second axis,
and all others directly with adjacent threads along the last one. Rows of a tile in shared memory are padded
by 4 bytes to avoid bank conflicts.

Source: Harris, "An Efficient Matrix Transpose in CUDA C/C++", NVIDIA, 2013.
"""

from __future__ import annotations

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
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Costs, CudaVariant, Execution, Launch, Tiling
from tunebench.workloads.operators.strided_elementwise import StridedElementwise

SPACE = Space(
    (
        Parameter("last", (16, 32, 64, 128), "indices of the last axis in a tile"),
        Parameter("second", (16, 32, 64, 128), "indices of the other axis in a tile"),
        Parameter("threads", (64, 128, 256, 512), "threads of a block"),
    ),
    (
        lambda last, second, threads: (last * second >= threads) & (last * second <= 16 * threads),
        lambda last, workload: (last == 16) | (last < 2 * workload.extents[-1]),
        lambda second, workload: (second == 16) | (second < 2 * workload.extents[_second(workload)]),
        lambda last, second, workload: _smem_bytes(workload, last, second) <= 48 * 1024,
    ),
)

# Words between @ are replaced by text that depends on the workload.
KERNEL = r"""
template <class Out, int LAST, int SECOND, int THREADS>
__global__ void __launch_bounds__(THREADS) strided_tiled(@PARAMETERS@, Out* __restrict__ out) {
  @TILES@
  const u32 tile = blockIdx.x / @TILES_LAST@u, outer = tile / @TILES_SECOND@u;
  const int first_last = int(blockIdx.x % @TILES_LAST@u) * LAST;
  const int first_second = int(tile % @TILES_SECOND@u) * SECOND;
  @DECODE@
#pragma unroll
  for (int n = 0; n < LAST * SECOND / THREADS; ++n) {
    const int place = n * THREADS + threadIdx.x, along = place % SECOND, across = place / SECOND;
    const int @AT_SECOND@ = first_second + along, @AT_LAST@ = first_last + across;
    if (@AT_SECOND@ >= @EXTENT_SECOND@ || @AT_LAST@ >= @EXTENT_LAST@) continue;
    @LOAD_TILES@
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < LAST * SECOND / THREADS; ++n) {
    const int place = n * THREADS + threadIdx.x, along = place % LAST, across = place / LAST;
    const int @AT_SECOND@ = first_second + across, @AT_LAST@ = first_last + along;
    if (@AT_SECOND@ >= @EXTENT_SECOND@ || @AT_LAST@ >= @EXTENT_LAST@) continue;
    @LOADS@
    out[@PLACE@] = from_float<Out>(chain(@ARGUMENTS@));
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


def _smem_bytes(workload: StridedElementwise, last: Any, second: Any) -> Any:
    """Return the bytes of the tiles in shared memory; for numbers or columns."""
    loads = loads_of(workload, len(workload.extents) - 1, 1)
    sizes = [itemsize(load.operand.dtype) for load in loads if _is_tiled(workload, load)]
    return sum(last * (second * size + 4) for size in sizes)


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
        """Return tiles of 32 by 32, or of 64 by 64 elements of 2 bytes or less, for 256 threads."""
        small = max(itemsize(operand.dtype) for operand in workload.maps.values()) <= 2
        extents = (64, 32, 16) if small else (32, 16)
        choices = (
            Config({"last": last, "second": second, "threads": threads})
            for last in extents
            for second in extents
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
        elements, axis = last * second, _second(workload)
        operations, functions = least_of_element(workload, may_be_0=True)
        fill, accesses, traffic = np.zeros(len(table)), 1.0, 0.0
        for load in loads_of(workload, len(workload.extents) - 1, 1):
            index, size, tiled = load.operand.index, itemsize(load.operand.dtype), _is_tiled(workload, load)
            if tiled:
                accesses, traffic = accesses + 2, traffic + 2.0 * size  # stored to shared memory, and loaded
            if not is_loaded_everywhere(load.operand):
                continue
            accesses += 1
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
            smem_bytes=_smem_bytes(workload, table["last"], table["second"]),
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
        loads = loads_of(workload, last, 1)
        tiled = [load for load in loads if _is_tiled(workload, load)]
        outer_axes = [axis for axis in extents if axis not in (last, second)]
        index = {axis: f"at_{axis}" for axis in extents}
        of_last, of_second, _ = self.tiles(workload, config)
        values = {
            load.name: f"to_float(tile_{load.name}[along][across])"
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
                f"const {load.held} {load.text(f'held_{load.name}', index)}"
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
        shape = ", ".join(str(config[name]) for name in ("last", "second", "threads"))
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
        return shrunk(workload, {**outer_extents, last: config["last"] + 3, second: config["second"] + 5})


def _tile(load: Load) -> str:
    """Return the declaration of an operand's tile in shared memory."""
    pad = 4 // itemsize(load.operand.dtype)
    return f"__shared__ {ctype(load.operand.dtype)} tile_{load.name}[LAST][SECOND + {pad}];"


def _into_tile(load: Load, index: dict[int, str]) -> str:
    """Return the statements that load an element into the tile."""
    loaded = load.text(f"held_{load.name}", index)
    return f"const {load.held} {loaded}\n    tile_{load.name}[across][along] = held_{load.name}.at[0];"


def _execution(workload: StridedElementwise, table: Table) -> Execution:
    """Describe a block: loads of transposed operands, a barrier, then the other loads and results."""
    last, second, threads = (table[name] * 1.0 for name in ("last", "second", "threads"))
    elements, axis, out_size = last * second, _second(workload), itemsize(workload.dtype)
    loads = loads_of(workload, len(workload.extents) - 1, 1)
    run = np.minimum(last, workload.extents[-1])
    stored_runs = elements / last * sector_bytes(run * out_size, workload.extents[-1] * out_size)
    passes = elements / LANES * l1_passes(last, out_size)
    l2_bytes, accesses, direct, of_element = stored_runs, 1.0, False, converted(out_size)
    for load in loads:
        index, size = load.operand.index, itemsize(load.operand.dtype)
        tiled = _is_tiled(workload, load)
        of_lanes, along = (axis, second) if tiled else (len(workload.extents) - 1, last)
        step, others = abs(index.strides[of_lanes]), elements / along
        # Runs of adjacent elements; elements farther apart have sectors of their own.
        apart = np.minimum(32.0, size * step)
        run_bytes = along * apart if step else 0.0 * along
        pitch = max((abs(stride) for stride in index.strides), default=0) * size
        l2_bytes = l2_bytes + others * np.maximum(32.0, sector_bytes(run_bytes, pitch))
        lane_passes = l1_passes(along, size) if step == 1 else np.minimum(LANES, max(1, step * size / 4))
        passes = passes + elements / LANES * (lane_passes + 2 * tiled)
        accesses, direct = accesses + 1 + 2 * tiled, direct or not tiled
        of_element = of_element + converted(size)
    each = elements / threads
    of_element = of_element + expression_instructions(workload.tree) + 2 * STEP
    return Execution(
        registers=each * len(loads) + LOOP_REGISTERS,
        instructions=elements / LANES * of_element + threads / LANES * (2 * PROLOGUE),
        accesses=accesses * elements,
        passes=passes,
        l2_bytes=l2_bytes,
        memory_waits=1 + direct,
        shared_waits=1,
        barriers=1,
    )


VARIANT = CudaTiledStridedElementwise()
