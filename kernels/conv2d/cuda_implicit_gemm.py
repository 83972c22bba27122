"""conv2d in CUDA C++ as an implicit GEMM on FMA units: every direction, type, layout, stride and group.

The convolution is a product of matrices whose left operand is gathered from images while tiles of it go to
shared memory (`_conv_geometry.cuh`), where they are f32; a block holds a `bm` x `bn` tile of the result in
registers, each thread `tm` x `tn` of it. The next step along K is read from global memory while this one is
multiplied. What a strided gradient would multiply with zeros is left out: pixels are taken by residue class.

`split` cuts K into parts, summed by a second kernel in a fixed order, so results repeat bit by bit; the
epilogue is fused into whichever kernel writes the result. Loads are as wide as alignment allows and one element
where it allows none. Offsets have 64 bits where a tensor needs them. tf32 is served in full f32.

Source: Chetlur et al., "cuDNN: Efficient primitives for deep learning", 2014, on implicit GEMM; the register
tile is that of Volkov and Demmel, "Benchmarking GPUs to tune dense linear algebra", 2008.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import TYPE_CHECKING, Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import itemsize, storage
from tunebench.errors import ConfigError
from tunebench.kernels._conv import Tile, alignment, miniature, product, wide
from tunebench.kernels._cuda import ctype, helpers
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Argument, Costs, CudaVariant, Launch, Scalar, ceil_div
from tunebench.workload import Tensor
from tunebench.workloads.operators.conv2d import Conv2d

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Column = NDArray[Any]

MAX_GRID_X = 2**31 - 1
MAX_SCRATCH_BYTES = 2**30
SHARED_ACCESS = 4
"""Elements of f32 that one access to shared memory moves."""
REGISTERS_BESIDE_TILE = 40
"""Registers that addresses, fragments and loads under way need at least, for one thread without spills."""
SUM_THREADS = 256


def _tiles(workload: Conv2d, bm: Column, bn: Column) -> Column:
    """Return tiles of C, those of all groups and classes."""
    whole = product(workload)
    rows = sum(c.count * ceil_div(c.m, bm) for c in whole.classes)
    return rows * ceil_div(whole.n, bn) * workload.groups


# -- space ----------------------------------------------------------------------------------------------------


def fits_threads(bm: Column, bn: Column, tm: Column, tn: Column) -> Column:
    """A block has 64 to 256 threads, each with 8 elements of C or more, at most twice as long as wide."""
    threads = bm * bn // (tm * tn)
    return (threads >= 64) & (threads <= 256) & (tm * tn >= 8) & (tm <= 2 * tn) & (tn <= 2 * tm)


def fits_rows(bm: Column, workload: Conv2d) -> Column:
    """A tile has less than twice the rows there are, if there is a smaller one."""
    return (bm <= 32) | (bm < 2 * product(workload).m)


def fits_columns(bn: Column, workload: Conv2d) -> Column:
    """A tile has less than twice the columns there are, if there is a smaller one."""
    return (bn <= 16) | (bn < 2 * product(workload).n)


def fits_walk(walk: Column, workload: Conv2d) -> Column:
    """K runs by tap where there is one tap, flat where K is pixels; else either."""
    if workload.direction == "wgrad":
        return walk == "flat"
    return (walk == "by_tap") | (workload.r * workload.s > 1)


def fits_depth(bk: Column, walk: Column, workload: Conv2d) -> Column:
    """A step is shorter than twice what it runs along, if there is a shorter one."""
    whole = product(workload)
    extent = np.where(walk == "by_tap", whole.depth, max(1, whole.taps) * whole.depth)
    return (bk == 8) | (bk < 2 * extent)


def fits_alignment(vec: Column, walk: Column, workload: Conv2d) -> Column:
    """Loads are as wide as the alignment of A or B allows, half of that, or one element."""
    flat, by_tap = (max(alignment(workload, name)[:2]) for name in ("flat", "by_tap"))
    widest = np.where(walk == "by_tap", by_tap, flat)
    return (vec == 1) | ((vec <= widest) & (2 * vec >= widest))


def keeps_threads_busy(
    bm: Column, bn: Column, bk: Column, tm: Column, tn: Column, vec: Column, workload: Conv2d
) -> Column:
    """Wide loads leave no thread without one."""
    threads = bm * bn // (tm * tn)
    a, b, _ = alignment(workload, "flat")
    loads = np.minimum(bm * bk // np.minimum(vec, a), bn * bk // np.minimum(vec, b))
    return (vec == 1) | (loads >= threads)


def smem_bytes(bm: Column, bn: Column, bk: Column, stages: Column, workload: Conv2d) -> Column:
    """Return shared memory of a block; rows stored across K are padded (`SharedTile`)."""
    nhwc, wgrad = workload.layout == "nhwc", workload.direction == "wgrad"
    pad_a = SHARED_ACCESS if nhwc != wgrad else 0
    pad_b = SHARED_ACCESS if workload.direction == "fprop" or (wgrad and not nhwc) else 0
    return stages * bk * (bm + pad_a + bn + pad_b) * 4


def fits_shared(
    bm: Column, bn: Column, bk: Column, stages: Column, min_blocks: Column, workload: Conv2d, device: Device
) -> Column:
    """As many blocks as are promised fit the shared memory."""
    used = smem_bytes(bm, bn, bk, stages, workload)
    together = min_blocks * (used + device.smem_reserved_bytes)
    return (used <= device.smem_per_block_bytes) & (together <= device.smem_per_sm_bytes)


def fits_registers(
    bm: Column, bn: Column, tm: Column, tn: Column, min_blocks: Column, device: Device
) -> Column:
    """As many blocks as are promised fit the threads and, without spills, the registers."""
    threads = min_blocks * (bm * bn // (tm * tn))
    needed = tm * tn + tm + tn + REGISTERS_BESIDE_TILE
    room = np.minimum(device.registers_per_sm // threads, 255)
    return (threads <= device.threads_per_sm) & ((min_blocks == 1) | (needed <= room))


def fits_split(
    bm: Column, bn: Column, bk: Column, walk: Column, split: Column, workload: Conv2d, device: Device
) -> Column:
    """K is split only where blocks are few, into parts of 4 steps or more, whose sums fit the scratch."""
    whole = product(workload)
    few = _tiles(workload, bm, bn) * (split // 2) < 2 * device.sm_count
    long = whole.steps(whole.taps, bk, walk) >= 4 * split
    small = split * (workload.outputs()[0].size * 4) <= MAX_SCRATCH_BYTES
    return (split == 1) | (few & long & small)


def fits_raster(bm: Column, bn: Column, split: Column, raster: Column, workload: Conv2d) -> Column:
    """The order of tiles matters only if there are many, and both ways."""
    whole = product(workload)
    return (raster == "columns") | ((split == 1) & (whole.m > bm) & (whole.n > bn))


SPACE = Space(
    (
        Parameter("bm", (16, 32, 64, 128, 256), "rows of C a block computes"),
        Parameter("bn", (8, 16, 32, 64, 128), "columns of C a block computes"),
        Parameter("tm", (2, 4, 8), "rows of C a thread computes"),
        Parameter("tn", (2, 4, 8), "columns of C a thread computes"),
        Parameter("bk", (8, 16, 32), "length of a step along K"),
        Parameter("walk", ("by_tap", "flat"), "K tap by tap, or taps and channels as one index"),
        Parameter("vec", (1, 2, 4, 8), "most elements a thread loads from global memory at once"),
        Parameter("stages", (1, 2), "2: the next step is stored while this one is multiplied"),
        Parameter("split", (1, 2, 4, 8, 16, 32, 64, 128, 256), "parts of K, summed by a second kernel"),
        Parameter("raster", ("columns", "rows"), "which tiles of C run one after the other"),
        Parameter("min_blocks", (1, 2, 4), "blocks an SM must have registers for"),
    ),
    (
        fits_threads,
        fits_rows,
        fits_columns,
        fits_walk,
        fits_depth,
        fits_alignment,
        keeps_threads_busy,
        fits_shared,
        fits_registers,
        fits_split,
        fits_raster,
    ),
)


# -- source ----------------------------------------------------------------------------------------------------

_KERNELS = """
// One tile of C, or of a part of it: `parts` blocks share K, and write their sums `part_size` elements apart.
template <class T, class Out, class I, Direction DIRECTION, Layout LAYOUT, Walk WALK, int BM, int BN, int BK, int TM,
          int TN, int VEC_A, int VEC_B, int VEC_C, int STAGES, class E, int MIN_BLOCKS>
__global__ void __launch_bounds__(BM / TM * (BN / TN), MIN_BLOCKS)
    conv(const T* __restrict__ a, const T* __restrict__ b, const T* __restrict__ bias,
         const T* __restrict__ residual, Out* __restrict__ out, I n, I c, I h, I w, I k, I r, I s, I p, I q, I stride,
         I pad, I dilation, I groups, I tap_skip, I tap_shift, I row_classes, I column_classes, I row_tiles,
         I column_tiles, I rows_first, I parts, long long part_size) {
  using P = Product<DIRECTION, LAYOUT, WALK, I, BK>;
  using Grid = ThreadGrid<BM, BN, TM, TN, usual_lanes_n<BM, BN, TM, TN>()>;
  using A = TileA<T, I, P, BM, BK, VEC_A, Grid::THREADS>;
  using B = TileB<T, I, P, BN, BK, VEC_B, Grid::THREADS>;

  I rest = I(blockIdx.x) + I(gridDim.x) * I(blockIdx.y);
  const I inner = take(rest, rows_first ? row_tiles : column_tiles);
  const I outer = take(rest, rows_first ? column_tiles : row_tiles);
  const I residue_class = take(rest, row_classes * column_classes), part = take(rest, parts);
  const Sizes<I> sizes = {n, c, h, w, k, r, s, p, q, stride, pad, dilation, groups, tap_skip, tap_shift,
                          row_classes, column_classes};
  const P product(sizes, residue_class);
  const Corner<Out, I> corner = {out + part * part_size, rest, (rows_first ? inner : outer) * BM,
                                 (rows_first ? outer : inner) * BN};
  // The last row of the grid may have blocks too many, and some residue classes have fewer pixels than the first.
  if (corner.group >= groups || corner.row >= product.m) return;

  // Parts differ by a step at most.
  const I each = divide(product.steps, parts), longer = product.steps - each * parts;
  const I begin = part * each + (part < longer ? part : longer);
  I left = each + (part < longer ? 1 : 0);
  float sums[TM][TN] = {};
  if (left > 0) {
    A of_a(a, product, corner.group, corner.row);
    B of_b(b, product, corner.group, corner.column);
    const Digits<I> whole_step = product.whole_step();
    Digits<I> at = product.at_step(begin);
    of_a.load(product, at);
    of_b.load(product, at);
    float* const shared = reinterpret_cast<float*>(dynamic_shared());
    constexpr int STAGE = A::S::FLOATS + B::S::FLOATS;
    int stage = 0;  // where the tiles of this step begin, in floats
#pragma unroll 1
    for (; left > 0; --left) {
      float* const here = shared + stage;
      of_a.store(here);
      of_b.store(here + A::S::FLOATS);
      __syncthreads();
      if (left > 1) {  // the next step is under way while this one is multiplied
        at = product.next_step(at, whole_step);
        of_a.load(product, at);
        of_b.load(product, at);
      }
      multiply_tiles<Grid, BK, A::S::PITCH, B::S::PITCH>(sums, here, here + A::S::FLOATS);
      if (STAGES == 2)
        stage = STAGE - stage;  // whoever stores there again has passed the next barrier, so all have read it
      else
        __syncthreads();
    }
  }
  store_product<Grid, E, VEC_C>(sums, product, corner, bias, residual);
}

// Sums the parts of each element of C in order; channel i / inner % channels has its bias.
template <class T, class I, class E>
__global__ void __launch_bounds__(256)
    sum_parts(const float* __restrict__ partial, const T* __restrict__ bias, const T* __restrict__ residual,
              T* __restrict__ out, I parts, I size, I inner, I channels) {
  const I i = I(blockIdx.x) * 256 + threadIdx.x;
  if (i >= size) return;
  float sum = 0.0f;
  for (I part = 0; part < parts; ++part) sum += partial[part * (long long)size + i];
  float of_channel = 0.0f, added = 0.0f;
  if constexpr (E::BIAS) {
    const I outer = divide(i, inner);
    of_channel = to_float(bias[outer - divide(outer, channels) * channels]);
  }
  if constexpr (E::RESIDUAL) added = to_float(residual[i]);
  out[i] = from_float<T>(E::apply(sum, of_channel, added));
}
"""


@functools.cache
def _source() -> str:
    return helpers("types", "epilogue", "gemm", "gemm_simt", "conv_geometry", "conv_simt") + _KERNELS


# -- the variant --------------------------------------------------------------------------------------------------


def _threads(config: Config) -> int:
    threads: int = config["bm"] * config["bn"] // (config["tm"] * config["tn"])
    return threads


def _epilogue(workload: Conv2d) -> str:
    flags = (workload.has_bias, workload.has_residual, workload.has_relu)
    return f"Epilogue<{', '.join(str(flag).lower() for flag in flags)}>"


def _entry(workload: Conv2d, config: Config, index: str) -> str:
    """Return the name of the main kernel: all that is compiled in."""
    a, b, c = alignment(workload, config["walk"])
    along_n = workload.layout == "nhwc" and workload.direction != "wgrad"
    run = min(SHARED_ACCESS, config["tn" if along_n else "tm"])
    stored, split = ctype(workload.dtype), config["split"] > 1
    parts = (
        *(stored, "float" if split else stored, index),
        *(workload.direction.upper(), workload.layout.upper(), config["walk"].upper()),
        *(config[name] for name in ("bm", "bn", "bk", "tm", "tn")),
        *(min(a, config["vec"]), min(b, config["vec"]), min(c, run)),
        *(config["stages"], "Epilogue<false, false, false>" if split else _epilogue(workload)),
        config["min_blocks"],
    )
    return f"conv<{', '.join(map(str, parts))}>"


def _residue_classes(workload: Conv2d) -> tuple[int, int]:
    """Return how many residue classes of the stride rows and columns of pixels have."""
    if workload.direction != "dgrad":
        return 1, 1
    return min(workload.stride, workload.h), min(workload.stride, workload.w)


def _sizes(workload: Conv2d) -> tuple[int, ...]:
    """Return what the kernels know of the workload, in their order."""
    w = workload
    tap_skip = w.stride // math.gcd(w.stride, w.dilation)
    return (
        *(w.n, w.c // w.groups, w.h, w.w, w.k // w.groups, w.r, w.s, w.p, w.q),
        *(w.stride, w.pad, w.dilation, w.groups),
        *(tap_skip, tap_skip * w.dilation // w.stride),
        *_residue_classes(w),
    )


# What an expert would try first, largest first: bm, bn, tm, tn.
_TILES = (
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
_SPLITS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def _usual(workload: Conv2d, tile: tuple[int, int, int, int], split: int, vec: int) -> Config:
    """Return a tile with what goes well with it."""
    bm, bn, tm, tn = tile
    whole = product(workload)
    taps, half = workload.r * workload.s, itemsize(storage(workload.dtype)) == 2
    # Tap by tap wastes the end of the last step of each tap, and saves the carries of a flat index.
    flat = workload.direction == "wgrad" or (taps > 1 and whole.depth % 8 != 0)
    long = whole.depth % 16 == 0 or (flat and whole.taps * whole.depth >= 64)
    bk = 16 if half and long and max(bm, bn) < 128 else 8
    values = {
        **{"bm": bm, "bn": bn, "tm": tm, "tn": tn, "bk": bk, "walk": "flat" if flat else "by_tap", "vec": vec},
        **{"stages": 2, "split": split, "raster": "columns", "min_blocks": 2 if tm * tn == 64 else 1},
    }
    return Config(values)


def _estimate(workload: Conv2d, device: Device, tile: tuple[int, int, int, int], split: int) -> float:
    """Return the time of a tile, in multiply-adds of one SM: enough to order tiles, no forecast."""
    bm, bn, tm, tn = tile
    whole = product(workload)
    steps = sum(c.count * ceil_div(c.m, bm) * ceil_div(c.taps * whole.depth, 8) for c in whole.classes)
    tiles = sum(c.count * ceil_div(c.m, bm) for c in whole.classes) * ceil_div(whole.n, bn) * workload.groups
    blocks = tiles * split
    each = ceil_div(steps * ceil_div(whole.n, bn) * workload.groups, blocks) * 8 * bm * bn
    # Each multiply-add needs its share of a read from shared memory, and 8 warps hide what they wait for.
    per_sm = ceil_div(blocks, device.sm_count)
    warps = per_sm * bm * bn // (tm * tn * 32)
    busy = min(1.0, warps / 8) / (1.0 + 1.0 / tm + 1.0 / tn)
    # A second launch, and a byte of DRAM costs as much as 5 multiply-adds on most devices.
    summing = (300_000 + 40 * split * workload.outputs()[0].size / device.sm_count) if split > 1 else 0.0
    return float(per_sm * each / busy + summing)


def _read_bytes(bm: Column, bn: Column, tm: Column, tn: Column) -> Column:
    """Return the bytes a warp reads from shared memory for one index of K, at least 128 an access (`Owned`)."""
    down, across = bm // tm, bn // tn
    lanes_down = np.minimum(down, 32 // np.minimum(across, 8))
    run_a, run_b = np.minimum(tm, SHARED_ACCESS), np.minimum(tn, SHARED_ACCESS)
    a = tm // run_a * np.maximum(128, 4 * lanes_down * run_a)
    b = tn // run_b * np.maximum(128, 4 * (32 // lanes_down) * run_b)
    found: Column = a + b
    return found


class CudaImplicitGemm(CudaVariant[Conv2d]):
    """Serves every workload."""

    name = "cuda_implicit_gemm"
    operator = Conv2d
    space = SPACE

    def default(self, workload: Conv2d, device: Device) -> Config:
        """Return the tile and the parts of K that are estimated best, with the widest loads there can be."""
        choices = itertools.product(_TILES, _SPLITS)
        for tile, split in sorted(choices, key=lambda choice: _estimate(workload, device, *choice)):
            for vec in (8, 4, 2, 1):
                config = _usual(workload, tile, split, vec)
                if self._holds(config, workload, device):
                    return config
        raise ConfigError(f"{self.key} has no configuration for {workload} on {device.name}")

    def _holds(self, config: Config, workload: Conv2d, device: Device) -> bool:
        try:
            self.space.check(config, workload=workload, device=device)
        except ConfigError:
            return False
        return True

    def costs(self, workload: Conv2d, table: Table, device: Device) -> Costs:
        """Count the products of whole tiles, which edge tiles execute too, and accesses to shared memory."""
        whole = product(workload)
        bm, bn, bk, tm, tn = (table[name] for name in ("bm", "bn", "bk", "tm", "tn"))
        tiles = {c: c.count * ceil_div(c.m, bm) * ceil_div(whole.n, bn) * workload.groups for c in whole.classes}
        steps = {c: whole.steps(c.taps, bk, table["walk"]) for c in whole.classes}
        # Parts of K differ by a step; the shortest one of the class with most taps stands for all.
        part = np.maximum(1, whole.steps(whole.taps, bk, table["walk"]) // table["split"])
        full = [c for c in whole.classes if c.taps == whole.taps]
        length = part * bk if whole.taps else 0 * bk
        threads = bm * bn // (tm * tn)
        return Costs(
            blocks=sum(tiles[c] * steps[c] for c in whole.classes) / part,
            full_blocks=sum(tiles[c] for c in full) * table["split"],
            threads=threads,
            smem_bytes=smem_bytes(bm, bn, bk, table["stages"], workload),
            registers=np.maximum(16, tm * tn + 8),
            fma=1.0 * bm * bn * length,
            smem_traffic_bytes=1.0 * length * (4 * (bm + bn) + threads // 32 * _read_bytes(bm, bn, tm, tn)),
        )

    def source(self, workload: Conv2d, config: Config) -> str:
        """Return both kernels as templates: what differs is in the name they are called by."""
        return _source()

    def scratch(self, workload: Conv2d, config: Config) -> tuple[Tensor, ...]:
        """Return the sums of parts of K, if it is split."""
        if config["split"] == 1:
            return ()
        shape = (config["split"], workload.outputs()[0].size)
        return (Tensor(name="partial", shape=shape, dtype="f32"),)

    def launches(self, workload: Conv2d, config: Config) -> tuple[Launch, ...]:
        """Return the product, and the sum of its parts if K is split."""
        split = config["split"] > 1
        bias = "bias" if workload.has_bias else workload.inputs()[0].name  # not read if there is none
        residual = "residual" if workload.has_residual else workload.inputs()[0].name
        a, b = (tensor.name for tensor in workload.inputs()[:2])
        out = workload.outputs()[0].name
        size = workload.outputs()[0].size
        whole = product(workload)
        row_tiles, column_tiles = ceil_div(whole.m, config["bm"]), ceil_div(whole.n, config["bn"])
        classes = math.prod(_residue_classes(workload))
        blocks = row_tiles * column_tiles * classes * config["split"] * workload.groups
        index = "i64" if wide(workload, blocks) else "i32"
        integer = functools.partial(Scalar, "long long" if index == "i64" else "int")
        smem = int(smem_bytes(*(config[name] for name in ("bm", "bn", "bk", "stages")), workload))
        launch = Launch(
            entry=_entry(workload, config, index),
            grid=(min(blocks, MAX_GRID_X), ceil_div(blocks, MAX_GRID_X), 1),
            block=(_threads(config), 1, 1),
            arguments=(
                *(a, b, bias, residual, "partial" if split else out),
                *map(integer, _sizes(workload)),
                *map(integer, (row_tiles, column_tiles, config["raster"] == "rows", config["split"])),
                Scalar("long long", size if split else 0),
            ),
            smem_bytes=smem,
        )
        if not split:
            return (launch,)
        inner = 1 if workload.layout == "nhwc" else workload.p * workload.q
        total = Launch(
            entry=f"sum_parts<{ctype(workload.dtype)}, {index}, {_epilogue(workload)}>",
            grid=(ceil_div(size, SUM_THREADS), 1, 1),
            block=(SUM_THREADS, 1, 1),
            arguments=(
                *("partial", bias, residual, out),
                *map(integer, (config["split"], size, inner, workload.k)),
            ),
        )
        return (launch, total)

    def miniature(self, workload: Conv2d, config: Config) -> Conv2d:
        """Return a workload of a few tiles."""
        steps = max(3, min(config["split"], 16))
        tile = Tile(m=config["bm"], n=config["bn"], k=config["bk"], steps=steps, walk=config["walk"])
        return miniature(workload, tile)


VARIANT = CudaImplicitGemm()
