"""conv2d in CUDA C++ as an implicit GEMM on the f32 units: every direction, type, layout, stride and group.

The convolution is a product of matrices whose left operand is gathered from images on its way to shared
memory (`conv.cuh`), where tiles are f32. A block holds `bm` x `bn` sums in registers, a thread
`tm` x `tn` of them, and reads the next step along K from global memory while it multiplies this one. What a
strided gradient would multiply with zeros is left out: pixels are taken by residue class of the stride.

`split` cuts K into parts that a second kernel sums in a fixed order, so that results repeat bit by bit; the
epilogue is part of whichever kernel writes the result. Loads are as wide as alignment allows, one element
where it allows nothing, and offsets have 64 bits where a tensor needs them. tf32 is served in full f32.

Source: Chetlur et al., "cuDNN: Efficient Primitives for Deep Learning", 2014, section 3.2; register tiles
after Volkov and Demmel, "Benchmarking GPUs to Tune Dense Linear Algebra", 2008.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from typing import Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import itemsize, storage
from tunebench.kernels.common import prologue
from tunebench.kernels.common.cuda import first_product, helpers
from tunebench.kernels.common.cuda_expression import filled
from tunebench.kernels.conv2d import _conv, _conv_emulation
from tunebench.kernels.conv2d._conv import alignment, product
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Costs, CudaVariant, Launch, Tiling, ceil_div
from tunebench.workload import Tensor
from tunebench.workloads.operators.conv2d import Conv2d

RUN = 4
"""Neighbours that a thread reads from shared memory, and stores, by one access of 16 bytes of f32."""
OTHER_REGISTERS, SPARE_REGISTERS = 20, 45
"""What a thread needs for sizes, digits and addresses without spills, and what the compiler takes on top."""


# -- space ------------------------------------------------------------------------------------------------


def block_is_reasonable(bm: Any, bn: Any, tm: Any, tn: Any) -> Any:
    """A block has 64 to 256 threads, each with 8 sums or more, in a shape near a square."""
    threads = bm * bn // (tm * tn)
    return (threads >= 64) & (threads <= 256) & (tm * tn >= 8) & (tm <= 2 * tn) & (tn <= 2 * tm)


def tile_is_of_use(bm: Any, bn: Any, workload: Conv2d) -> Any:
    """A tile must have less than twice the rows and columns there are, if there is a smaller one."""
    whole = product(workload)
    return ((bm <= 32) | (bm < 2 * whole.m)) & ((bn <= 16) | (bn < 2 * whole.n))


def width_is_of_use(vec: Any, walk: Any, workload: Conv2d) -> Any:
    """Loads must be as wide as the alignment of A or B allows, half of that, or one element."""
    flat, by_tap = (max(alignment(workload, name)[:2]) for name in ("flat", "by_tap"))
    widest = np.where(walk == "by_tap", by_tap, flat)
    return (vec == 1) | ((vec <= widest) & (2 * vec >= widest))


def all_threads_load(bm: Any, bn: Any, bk: Any, tm: Any, tn: Any, vec: Any, workload: Conv2d) -> Any:
    """Wide loads must not leave a thread without one."""
    a, b, _ = alignment(workload, "flat")
    loads = np.minimum(bm * bk // np.minimum(vec, a), bn * bk // np.minimum(vec, b))
    return (vec == 1) | (loads >= bm * bn // (tm * tn))


def _smem_bytes(workload: Conv2d, bm: Any, bn: Any, bk: Any, stages: Any) -> Any:
    """Return the shared memory of a block; lines that run along K are padded (`HeldTile`)."""
    pad_a, pad_b = (4 * along for along in _conv.along_k(workload))
    return stages * bk * (bm + pad_a + bn + pad_b) * 4


def shared_memory_fits(
    bm: Any, bn: Any, bk: Any, stages: Any, min_blocks: Any, workload: Conv2d, device: Device
) -> Any:
    """The tiles must fit in the shared memory of a block, and those of `min_blocks` in an SM's."""
    smem = _smem_bytes(workload, bm, bn, bk, stages)
    together = min_blocks * (smem + device.smem_reserved_bytes)
    return (smem <= device.smem_per_block_bytes) & (together <= device.smem_per_sm_bytes)


def _registers(workload: Conv2d, config: Mapping[str, Any]) -> Any:
    """Estimate the fewest registers a thread needs: sums, fragments, and what it carries to shared memory."""
    bm, bn, bk, tm, tn, vec = (config[name] for name in ("bm", "bn", "bk", "tm", "tn", "vec"))
    threads, size = bm * bn // (tm * tn), itemsize(storage(workload.dtype))
    a, b, _ = alignment(workload, "flat")
    along_a, along_b = _conv.along_k(workload)
    vec_a, vec_b = np.minimum(vec, a), np.minimum(vec, b)
    rows, deep_a = _conv.share(bm, bk, vec_a, threads, along_a)
    columns, deep_b = _conv.share(bn, bk, vec_b, threads, along_b)
    held = rows * deep_a * ceil_div(vec_a * size, 4) + columns * deep_b * ceil_div(vec_b * size, 4)
    return tm * tn + 2 * (tm + tn) + held + 3 * rows + columns + OTHER_REGISTERS


def registers_suffice(
    bm: Any, bn: Any, tm: Any, tn: Any, bk: Any, vec: Any, min_blocks: Any, workload: Conv2d, device: Device
) -> Any:
    """`min_blocks` blocks must fit on an SM with few spills, and limit what the compiler would take."""
    threads = min_blocks * (bm * bn // (tm * tn))
    needed = _registers(workload, {"bm": bm, "bn": bn, "bk": bk, "tm": tm, "tn": tn, "vec": vec})
    room = np.minimum(device.registers_per_sm // threads, 255)
    fits = (threads <= device.threads_per_sm) & (needed <= room)
    return fits & ((min_blocks == 1) | (needed + SPARE_REGISTERS > room))


SPACE = Space(
    (
        Parameter("bm", (16, 32, 64, 128, 256), "rows of C a block computes"),
        Parameter("bn", (8, 16, 32, 64, 128), "columns of C a block computes"),
        Parameter("tm", (2, 4, 8), "rows of C a thread computes"),
        Parameter("tn", (2, 4, 8), "columns of C a thread computes"),
        Parameter("bk", (8, 16, 32), "length of a step along K"),
        _conv.WALK,
        Parameter("vec", (1, 2, 4, 8), "elements an access to A or B moves, where alignment allows"),
        Parameter("stages", (1, 2), "2: a second buffer saves one of two barriers a step"),
        _conv.SPLIT,
        _conv.RASTER,
        Parameter("min_blocks", (1, 2, 4), "blocks an SM must be able to hold: limits registers"),
    ),
    (
        block_is_reasonable,
        tile_is_of_use,
        _conv.walk_is_of_use,
        lambda bk, walk, workload: _conv.step_is_of_use(bk, walk, 8, workload),
        width_is_of_use,
        all_threads_load,
        shared_memory_fits,
        registers_suffice,
        _conv.split_is_of_use,
        _conv.order_matters,
    ),
)


# -- source -----------------------------------------------------------------------------------------------

# Words between @ stand for what a function ahead of the product adds.
SOURCE = """
// One tile of C, or of a part of it: `parts` blocks share K, and write their sums `part_size` elements apart.
template <class T, class Out, class I, Direction DIRECTION, Layout LAYOUT, Walk WALK, int BM, int BN, int BK,
          int TM, int TN, int VEC_A, int VEC_B, int VEC_C, int STAGES, class E, int MIN_BLOCKS>
__global__ void __launch_bounds__(BM / TM * (BN / TN), MIN_BLOCKS)
conv(const T* __restrict__ a, const T* __restrict__ b, const T* __restrict__ scale,
     const T* __restrict__ bias, const T* __restrict__ residual,@PARAMETERS@ Out* __restrict__ out,
     I n, I c, I h, I w, I k, I r, I s, I p, I q, I stride, I pad, I dilation, I groups,
     I tap_skip, I tap_shift, I row_classes, I column_classes, I row_tiles, I column_tiles, I rows_first,
     I parts, i64 part_size) {
  using P = Product<DIRECTION, LAYOUT, WALK, I, BK>;
  using Grid = ThreadGrid<BM, BN, TM, TN, usual_lanes_n<BM, BN, TM, TN>()>;
  using ShareA = Share<BM, BK, VEC_A, Grid::THREADS, P::A_ALONG_K>;
  using ShareB = Share<BN, BK, VEC_B, Grid::THREADS, P::B_ALONG_K>;
  using TileA = @TILE@<T, ShareA, BM, BK, VEC_A, P::A_ALONG_K>;
  using TileB = HeldTile<T, ShareB, BN, BK, VEC_B, P::B_ALONG_K>;

  const Sizes<I> sizes = {n, c, h, w, k, r, s, p, q, stride, pad, dilation, groups, tap_skip, tap_shift,
                          row_classes, column_classes};
  const BlockWork<I> work = work_of_block(TileCounts<I>{row_tiles, column_tiles, rows_first, parts}, sizes);
  const P product(sizes, work.residue_class);
  const Destination<T, Out, I> to = {out + work.part * part_size, scale, bias, residual,
                                     work.group, work.row * BM, work.column * BN};
  // The last row of the grid may have blocks too many; some residue classes have fewer pixels than the first.
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
    int stage = 0;  // where the tiles of this step begin, in floats
#pragma unroll 1
    for (; steps.count > 0; --steps.count) {
      float* const here = shared + stage;
      of_a.store(here);
      of_b.store(here + TileA::FLOATS);
      __syncthreads();
      if (steps.count > 1) {  // the next step is under way while this one is multiplied
        at = product.next_step(at, whole_step);
        of_a.load(from_a, product, at);
        of_b.load(from_b, product, at);
      }
      multiply_tiles<Grid, BK, TileA::PITCH, TileB::PITCH>(sums, here, here + TileA::FLOATS);
      if (STAGES == 2)
        stage = STAGE - stage;  // whoever stores there again has passed the next barrier, so all have read it
      else
        __syncthreads();
    }
  }
  store_sums_of<Grid, E, VEC_C>(sums, product, to);
}
"""


_HELPERS = ("types", "epilogue", "gemm", "gemm_simt", "conv", "conv_simt")
_AHEAD = {
    "PARAMETERS": " const T* __restrict__ pre_scale, const T* __restrict__ pre_shift,",
    "TILE": "PrologueHeldTile",
    "VECTORS": """(
        PrologueVectors<T>{pre_scale + to.group * product.depth, pre_shift + to.group * product.depth})""",
}


@functools.cache
def _source() -> str:
    return helpers(*_HELPERS) + filled(SOURCE, PARAMETERS="", TILE="HeldTile", VECTORS="")


def _source_ahead(workload: Conv2d) -> str:
    """Return the same with a function of what is multiplied, which is a part of it."""
    activation = _conv.injected(workload)
    ahead = prologue.struct(workload) + helpers("prologue", "conv_prologue")
    return helpers(*_HELPERS) + activation + ahead + filled(SOURCE, **_AHEAD)


def _entry(workload: Conv2d, config: Config, index: str) -> str:
    """Return the name of the main kernel: all that is compiled in. `index` is the C++ type of offsets."""
    a, b, c = alignment(workload, config["walk"])
    along_n = workload.layout == "nhwc" and workload.direction != "wgrad"
    run = min(RUN, config["tn" if along_n else "tm"])
    parts = (
        *_conv.choices(workload, config, index),
        *(config[name] for name in ("bm", "bn", "bk", "tm", "tn")),
        *(min(a, config["vec"]), min(b, config["vec"]), min(c, run)),
        *(config["stages"], _conv.epilogue(workload, config["split"]), config["min_blocks"]),
    )
    return f"conv<{', '.join(map(str, parts))}>"


# -- what is usual ----------------------------------------------------------------------------------------

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

Shape = tuple[int, int, int, int]


def _usual(workload: Conv2d, tile: Shape, others: Mapping[str, int]) -> Config:
    """Return the configuration of a tile with what goes well with it."""
    whole = product(workload)
    # Tap by tap leaves the end of each tap's last step empty; a flat index costs carries.
    flat = workload.direction == "wgrad" or (workload.r * workload.s > 1 and whole.depth % 8 != 0)
    long = whole.depth % 16 == 0 or (flat and whole.taps * whole.depth >= 64)
    wide_loads = itemsize(storage(workload.dtype)) == 2 and max(tile[:2]) < 128
    values: dict[str, Any] = dict(zip(("bm", "bn", "tm", "tn"), tile, strict=True))
    values |= {"bk": 16 if long and wide_loads else 8, "walk": "flat" if flat else "by_tap"}
    values |= {"stages": 2, "raster": "columns", **others}
    return Config({name: values[name] for name in SPACE.names})


def _estimate(workload: Conv2d, device: Device, tile: Shape, split: int) -> float:
    """Return about how long a tile takes, in multiply-adds of one SM: good enough to order tiles."""
    bm, bn, tm, tn = tile
    whole = product(workload)
    blocks = whole.tiles(bm, bn) * split
    work = whole.work(bm, bn, 8, "flat") / blocks
    # Each multiply-add needs its share of a read from shared memory; 8 warps hide what they wait for.
    per_sm = ceil_div(blocks, device.sm_count)
    warps = per_sm * bm * bn // (tm * tn * 32)
    busy = min(1.0, warps / 8) / (1.0 + 1.0 / tm + 1.0 / tn)
    # A second launch takes some microseconds, and a byte of DRAM as long as about 5 multiply-adds.
    summing = 3e5 + 40 * split * workload.outputs()[0].size / device.sm_count if split > 1 else 0.0
    return float(per_sm * work / busy + summing)


# -- the variant ------------------------------------------------------------------------------------------


class CudaImplicitGemm(CudaVariant[Conv2d]):
    """Serves every size, type, layout, direction and epilogue."""

    name = "cuda_implicit_gemm"
    operator = Conv2d
    space = SPACE

    def limits(self, workload: Conv2d, device: Device) -> str | None:
        """Refuse only what no device's memory holds, and padding beyond 64-bit offsets."""
        return _conv.limits(workload)

    def default(self, workload: Conv2d, device: Device) -> Config:
        """Return the usual tile and parts of K that are estimated best, with the widest loads that fit."""
        choices = itertools.product(USUAL, _conv.SPLITS)
        ordered = sorted(choices, key=lambda choice: _estimate(workload, device, *choice))
        configs = (
            _usual(workload, tile, {"split": split, "vec": vec, "min_blocks": min_blocks})
            for tile, split in ordered
            for vec, min_blocks in itertools.product((8, 4, 2, 1), (2, 1))
        )
        return self.space.first_valid(configs, workload=workload, device=device)

    def tiles(self, workload: Conv2d, config: Config) -> tuple[Tiling, ...]:
        """Return how blocks cut the product that the convolution is."""
        return _conv.tiles(workload, config)

    def costs(self, workload: Conv2d, table: Table, device: Device) -> Costs:
        """Count whole tiles: what lies beyond an edge of C, in the padding, or beyond K is computed as zeros.

        Reads of images and filters may hit in L1, so that nothing is certain to come from L2.
        """
        names = ("bm", "bn", "bk", "tm", "tn", "split")
        bm, bn, bk, tm, tn, split = (table[name].astype(np.float64) for name in names)
        whole, walk = product(workload), table["walk"]
        # Parts differ by a step at most; the shortest one of a class with most taps stands for all of those.
        length = np.floor(whole.steps(whole.taps, bk, walk) / split) * bk
        full = bm * bn * length
        threads = bm * bn / (tm * tn)
        down, across = bm / tm, bn / tn
        lanes_m = np.minimum(down, 32 / np.minimum(across, 8))  # `usual_lanes_n` in conv_simt.cuh
        run_m, run_n = np.minimum(tm, RUN), np.minimum(tn, RUN)
        reads = tm / run_m * np.maximum(128, 4 * lanes_m * run_m)
        reads = reads + tn / run_n * np.maximum(128, 4 * 32 / lanes_m * run_n)
        # sm_100 on can do two multiply-adds by one instruction.
        packed = 2.0 if device.compute_capability >= (10, 0) else 1.0
        return Costs(
            # By their work: those of other classes have fewer taps.
            blocks=np.minimum(
                whole.tiles(bm, bn) * split, whole.work(bm, bn, bk, walk) / np.maximum(1.0, full)
            ),
            full_blocks=whole.tiles(bm, bn, most_taps=True) * split,
            threads=threads,
            smem_bytes=_smem_bytes(workload, bm, bn, bk, table["stages"]),
            registers=np.minimum(tm * tn + 8, device.registers_per_sm // (threads * table["min_blocks"])),
            fma=full,
            smem_traffic_bytes=length * (4 * (bm + bn) + threads / 32 * reads),
            accesses=length * (threads * (tm / run_m + tn / run_n) + (bm + bn) / 4),
            instructions=length * threads / 32 * (tm * tn / packed + tm / run_m + tn / run_n),
            chain_clocks=np.where(length > 0, first_product(device) + length * device.fma_latency, 0.0),
        )

    def source(self, workload: Conv2d, config: Config) -> str:
        """Return the kernels as templates: all that is compiled in is in the names of the entries."""
        if workload.has_pre:
            return _source_ahead(workload)
        return _source() + _conv.injected(workload)

    def scratch(self, workload: Conv2d, config: Config) -> tuple[Tensor, ...]:
        """Return the sums of the parts of K, if it is split."""
        return _conv.scratch(workload, config["split"])

    def launches(self, workload: Conv2d, config: Config) -> tuple[Launch, ...]:
        """Return the product, a block a tile, and the sum of its parts if K is split."""
        threads = config["bm"] * config["bn"] // (config["tm"] * config["tn"])
        smem = _smem_bytes(workload, *(config[name] for name in ("bm", "bn", "bk", "stages")))
        return _conv.launches(workload, config, functools.partial(_entry, workload, config), threads, smem)

    def emulation_workload(self, workload: Conv2d, config: Config) -> Conv2d:
        """Return a workload of few tiles that fills them, and ends within them, alike."""
        # A step to begin with, one that is loaded early, and the last; for each part, up to a few.
        steps = max(3, min(config["split"], 16))
        tile = _conv_emulation.Tile(
            m=config["bm"], n=config["bn"], k=config["bk"], steps=steps, walk=config["walk"]
        )
        return _conv_emulation.emulation_workload(workload, tile)


VARIANT = CudaImplicitGemm()
