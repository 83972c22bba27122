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
from typing import TYPE_CHECKING, Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import itemsize, storage
from tunebench.kernels import include
from tunebench.kernels._conv import Tile, alignment, miniature, product, wide
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
    """A block has 64 to 256 threads, each with 8 to 64 elements of C."""
    threads = bm * bn // (tm * tn)
    return (threads >= 64) & (threads <= 256) & (tm * tn >= 8) & (tm <= bm) & (tn <= bn)


def fits_rows(bm: Column, workload: Conv2d) -> Column:
    """A tile has less than twice the rows there are, if a smaller one exists."""
    return (bm == 16) | (bm < 2 * product(workload).m)


def fits_columns(bn: Column, workload: Conv2d) -> Column:
    """A tile has less than twice the columns there are, if a smaller one exists."""
    return (bn == 8) | (bn < 2 * product(workload).n)


def fits_walk(walk: Column, workload: Conv2d) -> Column:
    """K runs by tap where there is one tap, flat where K is pixels; else either."""
    if workload.direction == "wgrad":
        return walk == "flat"
    return (walk == "by_tap") | (workload.r * workload.s > 1)


def fits_depth(bk: Column, walk: Column, workload: Conv2d) -> Column:
    """A step is shorter than twice what it runs along, if a shorter one exists."""
    whole = product(workload)
    extent = np.where(walk == "by_tap", whole.depth, max(1, whole.taps) * whole.depth)
    return (bk == 8) | (bk < 2 * extent)


def fits_alignment(vec: Column, walk: Column, workload: Conv2d) -> Column:
    """Loads are no wider than the alignment of A or B allows."""
    flat, by_tap = (max(alignment(workload, name)[:2]) for name in ("flat", "by_tap"))
    return vec <= np.where(walk == "by_tap", by_tap, flat)


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
    few = _tiles(workload, bm, bn) * (split // 2) < 4 * device.sm_count
    long = whole.steps(whole.taps, bk, walk) >= 4 * split
    small = split * (workload.outputs()[0].size * 4) <= MAX_SCRATCH_BYTES
    return (split == 1) | (few & long & small)


def fits_raster(bm: Column, bn: Column, raster: Column, workload: Conv2d) -> Column:
    """The order of tiles matters only if both directions have some."""
    whole = product(workload)
    return (raster == "columns") | ((whole.m > bm) & (whole.n > bn))


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
  using O = Owned<BM, BN, TM, TN>;
  using TileA = SharedTile<BM, BK, P::A_ALONG_K>;
  using TileB = SharedTile<BN, BK, P::B_ALONG_K>;
  extern __shared__ __align__(16) float shared[];

  I rest = I(blockIdx.x) + I(gridDim.x) * I(blockIdx.y);
  const I first_tiles = rows_first ? row_tiles : column_tiles;
  const I tile_first = take(rest, first_tiles), tile_second = take(rest, rows_first ? column_tiles : row_tiles);
  const I residue_class = take(rest, row_classes * column_classes), part = take(rest, parts), group = rest;
  const P product({n, c, h, w, k, r, s, p, q, stride, pad, dilation, groups, tap_skip, tap_shift, row_classes,
                   column_classes}, residue_class);
  const I first_row = (rows_first ? tile_first : tile_second) * BM;
  const I first_column = (rows_first ? tile_second : tile_first) * BN;
  // Residue classes have unlike numbers of rows, and the last row of the grid may have blocks too many.
  if (group >= groups || first_row >= product.m) return;

  const I each = divide(product.steps, parts), longer = product.steps - each * parts;
  const I begin = part * each + (part < longer ? part : longer), end = begin + each + (part < longer ? 1 : 0);
  const O owned;
  float sums[TM][TN] = {};
  if (begin < end) {
    a += product.a_group(group);
    b += product.b_group(group);
    LoaderA<T, P, I, BM, BK, VEC_A, O::THREADS> load_a(product, first_row);
    LoaderB<T, P, I, BN, BK, VEC_B, O::THREADS> load_b(product, first_column);
    const Digits<I> whole_step = product.whole_step();
    Digits<I> at = product.at_step(begin);
    load_a.load(a, product, at);
    load_b.load(b, product, at);
    int stage = 0;
    for (I step = begin; step < end; ++step) {
      float* const tile_a = shared + stage * (TileA::SIZE + TileB::SIZE);
      float* const tile_b = tile_a + TileA::SIZE;
      store_shared(tile_a, load_a.share, load_a.held);
      store_shared(tile_b, load_b.share, load_b.held);
      __syncthreads();
      if (step + 1 < end) {
        at = product.next_step(at, whole_step);
        load_a.load(a, product, at);
        load_b.load(b, product, at);
      }
      multiply<BK, TileA::PITCH, TileB::PITCH>(tile_a, tile_b, owned, sums);
      // With two stages the barrier of the next step comes before anyone overwrites this one.
      if (STAGES == 1) __syncthreads();
      else stage ^= 1;
    }
  }
  store_owned<E, VEC_C>(out + part * part_size, bias, residual, product, group, first_row, first_column, owned, sums);
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
    names = ("_types.cuh", "_epilogue.cuh", "_conv_geometry.cuh", "_conv_simt.cuh")
    return "\n".join((*map(include, names), _KERNELS))


# -- the variant --------------------------------------------------------------------------------------------------

_CTYPE = {"f32": "float", "f16": "half_t", "bf16": "bf16_t"}


def _widths(workload: Conv2d, config: Config) -> tuple[int, int, int]:
    """Return how many elements of A, B and C move at once."""
    a, b, c = alignment(workload, config["walk"])
    along_n = workload.layout == "nhwc" and workload.direction != "wgrad"
    run = min(SHARED_ACCESS, config["tn"] if along_n else config["tm"])
    return min(a, config["vec"]), min(b, config["vec"]), min(c, run)


def _epilogue(workload: Conv2d) -> str:
    flags = (workload.has_bias, workload.has_residual, workload.has_relu)
    return f"Epilogue<{', '.join(str(flag).lower() for flag in flags)}>"


def _threads(config: Config) -> int:
    threads: int = config["bm"] * config["bn"] // (config["tm"] * config["tn"])
    return threads


class CudaImplicitGemm(CudaVariant[Conv2d]):
    """Serves every workload."""

    name = "cuda_implicit_gemm"
    operator = Conv2d
    space = SPACE

    def default(self, workload: Conv2d, device: Device) -> Config:
        """Return the largest tile that leaves no SM idle, and parts of K where even small ones do."""
        whole = product(workload)
        wgrad, one_tap = workload.direction == "wgrad", workload.r * workload.s == 1
        best, least = None, float("inf")
        for tile in _TILES:
            for split in (1, 2, 4, 8, 16, 32, 64, 128, 256):
                pass
        assert best is not None
        return best

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
        blocks = self._grid_tiles(workload, config)
        return ()

    def miniature(self, workload: Conv2d, config: Config) -> Conv2d:
        """Return a workload of a few tiles."""
        steps = max(3, min(config["split"], 16))
        tile = Tile(m=config["bm"], n=config["bn"], k=config["bk"], steps=steps, walk=config["walk"])
        return miniature(workload, tile)


VARIANT = CudaImplicitGemm()
