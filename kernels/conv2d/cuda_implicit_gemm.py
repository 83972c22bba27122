"""conv2d in CUDA C++ as an implicit GEMM on the FP32 units, for any direction, type, layout and stride.

The convolution is a matrix product whose left operand is gathered from images on its way to shared memory
(`conv.cuh`), where tiles are f32. A block holds `bm` x `bn` sums in registers, a thread `tm` x `tn` of them.
It reads the next step along K from global memory while it multiplies this one. A strided gradient takes
pixels by residue class of the stride, so that it skips products with zeros.

`split` cuts K into parts that a second kernel sums in a fixed order, so that results are reproducible bit by
bit. The epilogue is part of the kernel that writes the result. Loads are as wide as alignment allows, down to
one element. Offsets have 64 bits where a tensor needs them. tf32 is computed in full f32.

Source: Chetlur et al., "cuDNN: Efficient Primitives for Deep Learning", 2014, section 3.2; register tiles
after Volkov and Demmel, "Benchmarking GPUs to Tune Dense Linear Algebra", 2008.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import itemsize, storage
from tunebench.kernels.common import prologue
from tunebench.kernels.common.cuda import first_product
from tunebench.kernels.common.product_execution import (
    INSTRUCTION_BYTES,
    LOOP_INSTRUCTIONS,
    START_CLOCKS,
    by_each,
    fragment_passes,
    resident,
    thread_results,
    tile_copy,
    with_results,
)
from tunebench.kernels.conv2d import _conv, _execution
from tunebench.kernels.conv2d._conv import alignment, product
from tunebench.kernels.conv2d._implicit_gemm import ImplicitGemm, Tile, steps_per_part
from tunebench.space import Config, Parameter, Space, Table, takes_config
from tunebench.variant import Costs, Execution, ceil_div
from tunebench.workloads.operators.conv2d import Conv2d

RUN = 4
"""Most neighbours that a thread reads from shared memory, or stores, by one access of 16 bytes."""
OTHER_REGISTERS, SPARE_REGISTERS = 20, 45
"""Registers per thread for sizes, digits and addresses, and those that the compiler takes in addition."""


# -- space ------------------------------------------------------------------------------------------------


def block_is_reasonable(bm: Any, bn: Any, tm: Any, tn: Any) -> Any:
    """A block has 64 to 256 threads, each with 8 sums or more, nearly square."""
    threads = bm * bn // (tm * tn)
    return (threads >= 64) & (threads <= 256) & (tm * tn >= 8) & (tm <= 2 * tn) & (tn <= 2 * tm)


def tile_is_useful(bm: Any, bn: Any, workload: Conv2d) -> Any:
    """A tile must have less than twice the rows and columns of C unless no smaller one exists."""
    whole = product(workload)
    return ((bm <= 32) | (bm < 2 * whole.m)) & ((bn <= 16) | (bn < 2 * whole.n))


def width_is_useful(vec: Any, walk: Any, workload: Conv2d) -> Any:
    """Loads must be as wide as the alignment of A or B allows, half as wide, or one element."""
    flat, by_tap = (max(alignment(workload, name)[:2]) for name in ("flat", "by_tap"))
    widest = np.where(walk == "by_tap", by_tap, flat)
    return (vec == 1) | ((vec <= widest) & (2 * vec >= widest))


def _threads(config: Any) -> Any:
    """Return the threads of a block."""
    return config["bm"] * config["bn"] // (config["tm"] * config["tn"])


@takes_config("bm", "bn", "bk", "tm", "tn", "vec")
def all_threads_load(config: Mapping[str, Any], workload: Conv2d) -> Any:
    """Wide loads must not leave a thread without one."""
    a, b, _ = alignment(workload, "flat")
    bm, bn, bk, vec = (config[name] for name in ("bm", "bn", "bk", "vec"))
    loads = np.minimum(bm * bk // np.minimum(vec, a), bn * bk // np.minimum(vec, b))
    return (vec == 1) | (loads >= _threads(config))


def _smem_bytes(workload: Conv2d, config: Any) -> Any:
    """Return the shared memory of a block in bytes; lines that run along K are padded (`HeldTile`)."""
    pad_a, pad_b = (4 * along for along in _conv.along_k(workload))
    return config["stages"] * config["bk"] * (config["bm"] + pad_a + config["bn"] + pad_b) * 4


@takes_config("bm", "bn", "bk", "stages", "min_blocks")
def shared_memory_fits(config: Mapping[str, Any], workload: Conv2d, device: Device) -> Any:
    """The tiles must fit in the shared memory of a block, and those of `min_blocks` in an SM's."""
    smem = _smem_bytes(workload, config)
    together = config["min_blocks"] * (smem + device.smem_reserved_bytes)
    return (smem <= device.smem_per_block_bytes) & (together <= device.smem_per_sm_bytes)


def _registers(workload: Conv2d, config: Mapping[str, Any]) -> Any:
    """Return an estimate of the registers per thread: sums, fragments, and pending loads."""
    bm, bn, bk, tm, tn, vec = (config[name] for name in ("bm", "bn", "bk", "tm", "tn", "vec"))
    threads, size = _threads(config), itemsize(storage(workload.dtype))
    a, b, _ = alignment(workload, "flat")
    along_a, along_b = _conv.along_k(workload)
    vec_a, vec_b = np.minimum(vec, a), np.minimum(vec, b)
    rows, deep_a = _conv.share(bm, bk, vec_a, threads, along_a)
    columns, deep_b = _conv.share(bn, bk, vec_b, threads, along_b)
    loaded = rows * deep_a * ceil_div(vec_a * size, 4) + columns * deep_b * ceil_div(vec_b * size, 4)
    return tm * tn + 2 * (tm + tn) + loaded + 3 * rows + columns + OTHER_REGISTERS


@takes_config("bm", "bn", "tm", "tn", "bk", "vec", "min_blocks")
def registers_suffice(config: Mapping[str, Any], workload: Conv2d, device: Device) -> Any:
    """`min_blocks` must fit on an SM with few spills, and use fewer registers than the compiler would."""
    threads = config["min_blocks"] * _threads(config)
    needed, room = _registers(workload, config), np.minimum(device.registers_per_sm // threads, 255)
    fits = (threads <= device.threads_per_sm) & (needed <= room)
    return fits & ((config["min_blocks"] == 1) | (needed + SPARE_REGISTERS > room))


SPACE = Space(
    (
        Parameter("bm", (16, 32, 64, 128, 256), "rows of C per block"),
        Parameter("bn", (8, 16, 32, 64, 128), "columns of C per block"),
        Parameter("tm", (2, 4, 8), "rows of C per thread"),
        Parameter("tn", (2, 4, 8), "columns of C per thread"),
        Parameter("bk", (8, 16, 32), "length of a step along K"),
        _conv.WALK,
        Parameter("vec", (1, 2, 4, 8), "elements per access to A or B, where alignment allows"),
        Parameter("stages", (1, 2), "buffers in shared memory; 2 saves one of two barriers per step"),
        _conv.SPLIT,
        _conv.RASTER,
        Parameter("min_blocks", (1, 2, 4), "resident blocks per SM: limits registers per thread"),
    ),
    (
        block_is_reasonable,
        tile_is_useful,
        _conv.walk_is_useful,
        lambda bk, walk, workload: _conv.step_is_useful(bk, walk, 8, workload),
        width_is_useful,
        all_threads_load,
        shared_memory_fits,
        registers_suffice,
        _conv.split_is_useful,
        _conv.order_matters,
    ),
)


# -- source -----------------------------------------------------------------------------------------------

# A prologue fills in the words between @ (see `with_prologue`).
SOURCE = """
// One tile of C, or a partial sum of it: `parts` blocks share K and write sums `part_size` elements apart.
template <class T, class Out, class I, Direction DIRECTION, Layout LAYOUT, Walk WALK, int BM, int BN, int BK,
          int TM, int TN, int VEC_A, int VEC_B, int VEC_C, int STAGES, class E, int MIN_BLOCKS>
__global__ void __launch_bounds__(BM / TM * (BN / TN), MIN_BLOCKS)
conv(const T* __restrict__ a, const T* __restrict__ b, const T* __restrict__ scale,
     const T* __restrict__ bias, const T* __restrict__ residual,@PARAMETERS@ Out* __restrict__ out,
     I n, I c, I h, I w, I k, I r, I s, I p, I q, I stride, I pad, I pad_w, I dilation,
     I groups, I tap_skip, I tap_shift, I row_classes, I column_classes, I row_tiles, I column_tiles,
     I rows_first, I parts, i64 part_size) {
  using P = Product<DIRECTION, LAYOUT, WALK, I, BK>;
  using Grid = ThreadGrid<BM, BN, TM, TN, usual_lanes_n<BM, BN, TM, TN>()>;
  using ShareA = Share<BM, BK, VEC_A, Grid::THREADS, P::A_ALONG_K>;
  using ShareB = Share<BN, BK, VEC_B, Grid::THREADS, P::B_ALONG_K>;
  using TileA = @TILE@<T, ShareA, BM, BK, VEC_A, P::A_ALONG_K>;
  using TileB = HeldTile<T, ShareB, BN, BK, VEC_B, P::B_ALONG_K>;

  const Sizes<I> sizes = {n, c, h, w, k, r, s, p, q, stride, pad, pad_w, dilation, groups, tap_skip,
                          tap_shift, row_classes, column_classes};
  const BlockWork<I> work = work_of_block(TileCounts<I>{row_tiles, column_tiles, rows_first, parts}, sizes);
  const P product(sizes, work.residue_class);
  const Destination<T, Out, I> to = {out + work.part * part_size, scale, bias, residual,
                                     work.group, work.row * BM, work.column * BN};
  // The grid may have more blocks than tiles; some residue classes have fewer pixels than the first.
  if (to.group >= groups || to.row >= product.m) return;

  Steps<I> steps = steps_of_part(product.steps, work.part, parts);
  float sums[TM][TN] = {};
  if (steps.count > 0) {
    const ReaderA<T, I, P, ShareA> from_a(a, product, to.group, to.row);
    const ReaderB<T, I, P, ShareB> from_b(b, product, to.group, to.column);
    TileA of_a@VECTORS@;
    TileB of_b;
    const Digits<I> whole_step = product.whole_step();
    Digits<I> at = product.at_step(steps.begin);
    of_a.load(from_a, product, at);
    of_b.load(from_b, product, at);
    float* const shared = reinterpret_cast<float*>(dynamic_shared());
    constexpr int STAGE = TileA::FLOATS + TileB::FLOATS;
    int stage = 0;  // offset of the tiles of this step, in floats
#pragma unroll 1
    for (; steps.count > 0; --steps.count) {
      float* const here = shared + stage;
      of_a.store(here);
      of_b.store(here + TileA::FLOATS);
      __syncthreads();
      if (steps.count > 1) {  // the next step is loaded while this one is multiplied
        at = product.next_step(at, whole_step);
        of_a.load(from_a, product, at);
        of_b.load(from_b, product, at);
      }
      multiply_tiles<Grid, BK, TileA::PITCH, TileB::PITCH>(sums, here, here + TileA::FLOATS);
      if (STAGES == 2)
        stage = STAGE - stage;  // stored to again only after the next barrier, when all have read it
      else
        __syncthreads();
    }
  }
  store_sums_of<Grid, E, VEC_C>(sums, product, to);
}
"""


# -- the variant ------------------------------------------------------------------------------------------

USUAL = (
    (128, 128, 8, 8),
    (128, 64, 8, 8),
    (64, 128, 8, 8),
    (64, 64, 8, 4),
    (128, 32, 8, 4),
    (32, 64, 4, 4),
    (64, 32, 4, 4),
    (128, 16, 8, 4),
    (32, 32, 4, 4),
    (16, 64, 4, 4),
    (64, 16, 4, 4),
    (128, 8, 4, 4),
    (32, 16, 4, 2),
)
"""Tiles that an expert would try, largest first: bm, bn, tm, tn."""


class CudaImplicitGemm(ImplicitGemm):
    """Any size, type, layout, direction and epilogue."""

    name = "cuda_implicit_gemm"
    space = SPACE
    entry = "conv"
    headers = ("types", "epilogue", "gemm", "gemm_simt", "conv", "conv_simt")
    prologue_header = "conv_prologue"
    text = SOURCE
    without_prologue = {"PARAMETERS": "", "TILE": "HeldTile", "VECTORS": ""}
    with_prologue = {
        "PARAMETERS": " const T* __restrict__ pre_scale, const T* __restrict__ pre_shift,",
        "TILE": "PrologueHeldTile",
        "VECTORS": """(
        PrologueVectors<T>{pre_scale + to.group * product.depth, pre_shift + to.group * product.depth})""",
    }
    extents = ("bm", "bn", "bk", "tm", "tn")
    usual = USUAL
    least_step = 8
    summing_cost = (3e5, 40)

    def usual_configs(self, workload: Conv2d, tile: Tile, split: int) -> Iterator[Config]:
        """Yield the usual configurations of a tile, widest loads first."""
        bm, bn, tm, tn = tile
        whole = product(workload)
        # By tap, the last step of each tap is partly empty; a flat index costs carries.
        flat = workload.direction == "wgrad" or (workload.r * workload.s > 1 and whole.depth % 8 != 0)
        long = whole.depth % 16 == 0 or (flat and whole.taps * whole.depth >= 64)
        wide_loads = itemsize(storage(workload.dtype)) == 2 and max(bm, bn) < 128
        chosen: dict[str, Any] = {
            "bm": bm,
            "bn": bn,
            "tm": tm,
            "tn": tn,
            "bk": 16 if long and wide_loads else 8,
        }
        chosen |= {"walk": "flat" if flat else "by_tap", "stages": 2, "split": split, "raster": "columns"}
        for vec, min_blocks in itertools.product((8, 4, 2, 1), (2, 1)):
            values = {**chosen, "vec": vec, "min_blocks": min_blocks}
            yield Config({name: values[name] for name in SPACE.names})

    def warps_and_overhead(self, tile: Tile) -> tuple[int, float]:
        """Return the warps of a block, and the reads of shared memory per multiply-add."""
        bm, bn, tm, tn = tile
        return bm * bn // (tm * tn * 32), 1.0 / tm + 1.0 / tn

    def access_widths(self, workload: Conv2d, config: Config) -> tuple[int, int, int]:
        """Return the elements per access to A, B and C."""
        a, b, c = alignment(workload, config["walk"])
        along_n = workload.layout == "nhwc" and workload.direction != "wgrad"
        run = min(RUN, config["tn" if along_n else "tm"])
        return min(a, config["vec"]), min(b, config["vec"]), min(c, run)

    def block_threads(self, config: Config) -> int:
        """Return the threads of a block."""
        return int(_threads(config))

    def smem_bytes(self, workload: Conv2d, config: Any) -> Any:
        """Return the shared memory of a block, in bytes."""
        return _smem_bytes(workload, config)

    def pipeline_steps(self, config: Config) -> int:
        """Return 3: a first step, one that is loaded early, and a last one."""
        return 3

    def costs(self, workload: Conv2d, table: Table, device: Device) -> Costs:
        """Count whole tiles: padding and parts beyond an edge of C or beyond K are computed as zeros.

        Reads of images and filters may hit in L1, so that no traffic from L2 is certain.
        """
        bm, bn, tm, tn = (table[name].astype(np.float64) for name in ("bm", "bn", "tm", "tn"))
        length = steps_per_part(workload, table)
        blocks, full_blocks = self.blocks(workload, table)
        threads = bm * bn / (tm * tn)
        down, across = bm / tm, bn / tn
        lanes_m = np.minimum(down, 32 / np.minimum(across, 8))  # `usual_lanes_n` in conv_simt.cuh
        run_m, run_n = np.minimum(tm, RUN), np.minimum(tn, RUN)
        reads = tm / run_m * np.maximum(128, 4 * lanes_m * run_m)
        reads = reads + tn / run_n * np.maximum(128, 4 * 32 / lanes_m * run_n)
        # From sm_100 on, one instruction can do two multiply-adds.
        packed = 2.0 if device.compute_capability >= (10, 0) else 1.0
        return Costs(
            blocks=blocks,
            full_blocks=full_blocks,
            threads=threads,
            smem_bytes=_smem_bytes(workload, table),
            registers=np.minimum(tm * tn + 8, device.registers_per_sm // (threads * table["min_blocks"])),
            fma=bm * bn * length,
            smem_traffic_bytes=length * (4 * (bm + bn) + threads / 32 * reads),
            accesses=length * (threads * (tm / run_m + tn / run_n) + (bm + bn) / 4),
            instructions=length * threads / 32 * (tm * tn / packed + tm / run_m + tn / run_n),
            chain_clocks=np.where(length > 0, first_product(device) + length * device.fma_latency, 0.0),
            serial_launches=np.where(table["split"] > 1, 2, 1),
            execution=self._execution(workload, table, length, device),
        )

    def _execution(self, workload: Conv2d, table: Table, length: Any, device: Device) -> Execution:
        """Count the main loop, the epilogue, and the traffic of whole tiles."""
        names = ("bm", "bn", "tm", "tn", "bk", "stages", "vec", "min_blocks")
        bm, bn, tm, tn, bk, stages, vec, min_blocks = (table[name].astype(np.float64) for name in names)
        size, whole = itemsize(storage(workload.dtype)), product(workload)
        threads, steps = bm * bn / (tm * tn), length / bk
        warps, (along_a, along_b) = threads / 32, _conv.along_k(workload)
        vec_a, vec_b = (np.minimum(vec, _execution.by_walk(workload, table, operand)) for operand in (0, 1))
        copies = (
            tile_copy(table["bm"], table["bk"], vec_a, size, along_a),
            tile_copy(table["bn"], table["bk"], vec_b, size, along_b),
        )
        lanes_n = 32 / np.minimum(bm / tm, 32 / np.minimum(bn / tn, 8))
        run_m, run_n = np.minimum(tm, RUN), np.minimum(tn, RUN)
        reads_m, reads_n = warps * tm / run_m, warps * tn / run_n
        addresses = bm / vec_a * _execution.ADDRESSING["A"] + bn / vec_b * _execution.ADDRESSING["B"]
        registers = np.minimum(
            _registers(workload, {name: table[name] for name in self.space.names}),
            device.registers_per_sm / (threads * min_blocks) // 8 * 8,
        )
        loop = Execution(
            registers=registers,
            instructions=length * warps * tm * tn
            + length * (addresses + (size < 4) * (bm + bn)) / 32
            + length * prologue.operations_of_element(workload) * bm / 32
            + LOOP_INSTRUCTIONS * warps * steps,
            accesses=length * 32 * (reads_m + reads_n) + steps * sum(copy.accesses for copy in copies),
            passes=length * reads_m * by_each(fragment_passes, lanes_n, run_m, 1)
            + length * reads_n * by_each(fragment_passes, lanes_n, run_n, 0)
            + steps * sum(copy.passes for copy in copies),
            # A step is loaded into registers while the one before is multiplied.
            prefetched_waits=steps,
            shared_waits=steps,
            barriers=np.where(stages == 1, 2, 1) * steps,
            code_bytes=INSTRUCTION_BYTES * bk * (tm * tn + tm / run_m + tn / run_n),
            iterations=length,
        )
        at_once = device.sm_count * resident(threads, registers, _smem_bytes(workload, table), device)
        traffic = _execution.traffic_of(
            workload,
            table,
            device,
            whole,
            height=np.where(table["raster"] == "rows", np.ceil(whole.m / bm), 1.0),
            wave=np.minimum(whole.tiles(bm, bn) * table["split"], at_once),
        )
        along_n = workload.layout == "nhwc" and workload.direction != "wgrad"
        # Neighbours of a result run along n, or along m.
        across = (bm, bn, tm, tn, lanes_n) if along_n else (bn, bm, tn, tm, 32 / lanes_n)
        run = run_n if along_n else run_m
        results = _execution.results_of(
            workload,
            table,
            alignment(workload, "by_tap")[2],
            lambda size, vec, residual: thread_results(*across, size, np.minimum(vec, run), residual),
        )
        return with_results(
            loop,
            results,
            device,
            l2_bytes=length * (traffic.line_a + traffic.line_b),
            serial_clocks=START_CLOCKS,
            further_clocks=traffic.sum_clocks,
            memory_bytes=traffic.memory_bytes,
        )


VARIANT = CudaImplicitGemm()
