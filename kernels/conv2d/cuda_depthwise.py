"""conv2d in CUDA C++ for groups of one channel and one filter (depthwise), in all directions.

Depthwise convolution moves a byte per few multiply-adds, so that the source should be read once. A thread
computes a tile of `rows` x `columns` pixels of `vec` channels. It reads the source lines of its tile one
after the other, each element once, and multiplies it by every tap it meets, in registers. Source pixels that
tiles share come from L1, or (`staged`) from shared memory, to which a block copies the source of all its
tiles. With channels last, neighbouring threads have neighbouring channels, in accesses of up to 16 bytes;
with channels first, neighbouring columns.

dgrad computes the pixels of dx, in tiles that begin at multiples of the stride, so that the compiler knows
which taps reach which pixel. wgrad keeps a sum per tap in registers, over all tiles of a block in its part of
the pixels (one of `split`). Its threads reduce by shuffles and shared memory; a second kernel sums the parts
in a fixed order.

Limits: one filter per channel (k = c), and filters whose taps fit in registers. tf32 is computed in full f32.

Source: Zhang, Lo and Lu, "High performance depthwise and pointwise convolutions on mobile devices", AAAI 2020
(rows kept in registers), here for threads of a GPU.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import storage
from tunebench.errors import InputError
from tunebench.kernels.common import prologue
from tunebench.kernels.common.cuda import ctype, helpers
from tunebench.kernels.common.gemm import alignment, constants
from tunebench.kernels.conv2d import _conv, _conv_emulation
from tunebench.kernels.conv2d._depthwise import (
    MAX_SPAN,
    SPACE,
    axes,
    block_tiles,
    by_value,
    registers,
    smem_bytes,
)
from tunebench.space import Config, Table
from tunebench.variant import Costs, CudaVariant, Launch, Scalar, Tiling, ceil_div
from tunebench.workload import Tensor
from tunebench.workloads.operators.conv2d import Conv2d

MAX_BLOCKS = 2**31 - 1
SUM_THREADS, SUM_WIDTH = 256, 32
"""Threads per block of `sum_partials`, and elements per block."""


# -- source -----------------------------------------------------------------------------------------------

SOURCE = """
// y, or dx: one tile per thread.
template <class C>
__global__ void __launch_bounds__(Threads<C>::COUNT, C::MIN_BLOCKS)
depthwise(const typename C::T* __restrict__ source, const typename C::T* __restrict__ w,
          const typename C::T* __restrict__ scale, const typename C::T* __restrict__ bias,
          const typename C::T* __restrict__ residual, typename C::T* __restrict__ out, int images,
          int channels, int rows, int columns, int source_rows, int source_columns, int row_shift,
          int column_shift) {
  using T = typename C::T;
  using E = typename C::E;
  const Extents x = {images, channels, rows, columns, source_rows, source_columns, row_shift, column_shift};
  const Corner block = corner_of<C>(int(blockIdx.x), x, true), tile = Threads<C>::of(block);
  T* const shared = reinterpret_cast<T*>(dynamic_shared());
  if constexpr (C::STAGED) {
    SharedPatch<C>::fill(shared, source, x, block);
    __syncthreads();
  }
  if (tile.channel >= channels || tile.row >= rows || tile.column >= columns) return;

  // The taps of neighbouring channels are contiguous in both layouts.
  float taps[C::VEC * C::R * C::S];
#pragma unroll
  for (int t = 0; t < C::R * C::S; ++t) {
    const Vec<T, C::VEC> values = load_vec<C::VEC>(w + tile.channel * (C::R * C::S) + t * C::VEC);
#pragma unroll
    for (int e = 0; e < C::VEC; ++e) taps[t * C::VEC + e] = to_float(values.at[e]);
  }
  float sums[C::ROWS][C::COLUMNS][C::VEC] = {};
  const auto meet = [&](int i, int j, int r, int s, const float (&values)[C::VEC]) {
#pragma unroll
    for (int e = 0; e < C::VEC; ++e)
      sums[i][j][e] = multiply_add(values[e], taps[(e * C::R + r) * C::S + s], sums[i][j][e]);
  };
  if constexpr (C::STAGED)
    each_meeting<C>(SharedPatch<C>(shared), meet);
  else
    each_meeting<C>(GlobalPatch<C>(source, x, tile), meet);

  constexpr int WIDTH = C::VEC * C::STORE;  // one of them is 1
  Vec<T, C::VEC> factors = {}, constants = {};
  if constexpr (E::SCALE) factors = load_vec<C::VEC>(scale + tile.channel);
  if constexpr (E::BIAS) constants = load_vec<C::VEC>(bias + tile.channel);
  each_access<C>(x, tile, [&](int i, int j, i64 offset) {
    Vec<T, WIDTH> added = {}, values;
    if constexpr (E::RESIDUAL) added = load_vec<WIDTH>(residual + offset);
#pragma unroll
    for (int e = 0; e < WIDTH; ++e) {
      const int column = C::NHWC ? 0 : e, channel = C::NHWC ? e : 0;
      values.at[e] = from_float<T>(E::apply(sums[i][j + column][channel], to_float(factors.at[channel]),
                                            to_float(constants.at[channel]), to_float(added.at[e])));
    }
    store_vec(out + offset, values);
  });
}

// dw, or its sums over each part of the pixels: a block has some channels, and takes tile after tile.
template <class C>
__global__ void __launch_bounds__(Threads<C>::COUNT, C::MIN_BLOCKS)
depthwise_wgrad(const typename C::T* __restrict__ source, const typename C::T* __restrict__ dy,
                typename C::Out* __restrict__ out, int images, int channels, int rows, int columns,
                int source_rows, int source_columns, int row_shift, int column_shift, int parts) {
  using T = typename C::T;
  const Extents x = {images, channels, rows, columns, source_rows, source_columns, row_shift, column_shift};
  int part = int(blockIdx.x);
  constexpr int DEPTH = Threads<C>::BLOCK_CHANNELS;
  const int first_channel = take(part, tiles_of(channels, DEPTH)) * DEPTH;
  const int tiles = images * tiles_of(rows, C::DOWN * C::ROWS) * tiles_of(columns, C::ACROSS * C::COLUMNS);
  const Steps<int> steps = steps_of_part(tiles, part, parts);
  T* const shared = reinterpret_cast<T*>(dynamic_shared());
  float sums[C::R][C::S][C::VEC] = {};
#pragma unroll 1
  for (int step = 0; step < steps.count; ++step) {
    Corner block = corner_of<C>(steps.begin + step, x, false);
    block.channel = first_channel;
    const Corner tile = Threads<C>::of(block);
    if constexpr (C::STAGED) {
      __syncthreads();  // all have read the previous tile
      SharedPatch<C>::fill(shared, source, x, block);
      __syncthreads();
    }
    if (tile.channel >= channels || tile.row >= rows || tile.column >= columns) continue;
    float gradients[C::ROWS][C::COLUMNS][C::VEC] = {};
    each_access<C>(x, tile, [&](int i, int j, i64 offset) {
      const Vec<T, C::VEC * C::STORE> values = load_vec<C::VEC * C::STORE>(dy + offset);
#pragma unroll
      for (int e = 0; e < C::VEC * C::STORE; ++e)
        gradients[i][j + (C::NHWC ? 0 : e)][C::NHWC ? e : 0] = to_float(values.at[e]);
    });
    const auto meet = [&](int i, int j, int r, int s, const float (&values)[C::VEC]) {
#pragma unroll
      for (int e = 0; e < C::VEC; ++e)
        sums[r][s][e] = multiply_add(values[e], gradients[i][j][e], sums[r][s][e]);
    };
    if constexpr (C::STAGED)
      each_meeting<C>(SharedPatch<C>(shared), meet);
    else
      each_meeting<C>(GlobalPatch<C>(source, x, tile), meet);
  }
  constexpr int TAPS = C::R * C::S;
  reduce_taps<C>(sums, reinterpret_cast<float*>(dynamic_shared()), [&](int channel, int tap, float sum) {
    if (first_channel + channel < channels)
      out[(i64(part) * channels + first_channel + channel) * TAPS + tap] = from_float<typename C::Out>(sum);
  });
}

// Sums the parts of each element in a fixed order: 32 neighbours per block, 8 threads each.
template <class T>
__global__ void __launch_bounds__(256)
sum_partials(const float* __restrict__ partial, T* __restrict__ out, int parts, int size) {
  __shared__ float sums[8][32];
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32, i = int(blockIdx.x) * 32 + lane;
  float sum = 0.0f;
  if (i < size)
    for (int part = warp; part < parts; part += 8) sum += partial[i64(part) * size + i];
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp > 0 || i >= size) return;
  sum = 0.0f;
#pragma unroll
  for (int j = 0; j < 8; ++j) sum += sums[j][lane];
  out[i] = from_float<T>(sum);
}
"""


def _choice(workload: Conv2d, config: Config) -> dict[str, str | bool | int]:
    """Return the compile-time constants; sizes of images are arguments."""
    w, (tall, wide), stored = workload, axes(workload), ctype(workload.dtype)
    columns, nhwc = config["columns"] * wide.unit, w.layout == "nhwc"
    return {
        "T": stored,
        "Out": stored if config["split"] == 1 else "float",
        "E": _conv.epilogue(w, split=1),
        "NHWC": nhwc,
        "BACKWARD": wide.backward,
        "R": w.r,
        "S": w.s,
        "STRIDE": w.stride,
        "DILATION": w.dilation,
        "ROW_REMAINDER": tall.remainder,
        "COLUMN_REMAINDER": wide.remainder,
        "ROWS": config["rows"] * tall.unit,
        "COLUMNS": columns,
        # Columns per access to pixels; with channels last, an access has several channels of one column.
        "STORE": 1 if nhwc else min(alignment(wide.extent, storage(w.dtype)), columns & -columns),
        "STAGED": bool(config["staged"]),
        **{name.upper(): config[name] for name in ("vec", "channels", "across", "down", "min_blocks")},
    }


# -- defaults ---------------------------------------------------------------------------------------------


def _usual(workload: Conv2d, device: Device) -> Iterator[Config]:
    """Yield the configurations that an expert would try, best first; the last ones fit any workload."""
    w, (tall, wide), nhwc = workload, axes(workload), workload.layout == "nhwc"
    shapes = ((4, 2), (2, 2), (4, 1), (2, 1), (1, 1)) if nhwc else ((8, 2), (4, 2), (4, 1), (2, 1), (1, 1))
    # An SM can hold 512 threads of these, or 384 of wgrad; large filters take more registers.
    room = (168 if w.direction == "wgrad" else 128, 255)
    for max_registers, threads, vec, (rows, columns) in itertools.product(
        room, (128, 64), (8, 4, 2, 1), shapes
    ):
        if registers(w, rows, columns, vec) > max_registers:
            continue
        tiles = {
            "channels": ceil_div(w.c, vec),
            "across": ceil_div(wide.extent, columns * wide.unit),
            "down": ceil_div(tall.extent, rows * tall.unit),
        }
        # Threads run along the contiguous dimension first, then along columns and rows; the rest are idle.
        values: dict[str, Any] = {"rows": rows, "columns": columns, "vec": vec}
        threads_left = threads
        for name in ("channels", "across", "down") if nhwc else ("across", "down", "channels"):
            values[name] = min(threads_left, 64, 1 << (tiles[name] - 1).bit_length())
            threads_left //= values[name]
        values |= {"down": values["down"] * threads_left, "staged": 0, "min_blocks": 1}
        for split in _splits(w, values, device):
            yield Config({name: {**values, "split": split}[name] for name in SPACE.names})


def _splits(workload: Conv2d, values: Mapping[str, Any], device: Device) -> Iterator[int]:
    """Yield the numbers of parts that give each SM about four blocks, then others."""
    if workload.direction == "wgrad":
        for blocks in (4, 2, 1):
            target = blocks * device.sm_count // int(block_tiles(workload, values)[0])
            yield min(1024, 1 << max(0, target.bit_length() - 1))
    yield 1


# -- the variant ------------------------------------------------------------------------------------------


class CudaDepthwise(CudaVariant[Conv2d]):
    """Any type, layout, direction and epilogue, where each channel is a group with one filter."""

    name = "cuda_depthwise"
    operator = Conv2d
    space = SPACE

    def limits(self, workload: Conv2d, device: Device) -> str | None:
        """Return why groups, filters, strides or images are too large, or None."""
        if reason := prologue.refusal(self.key, workload):
            return reason
        w, (tall, wide) = workload, axes(workload)
        if w.groups != w.c or w.k != w.c:
            return (
                f"{self.key} needs groups of one channel and one filter: groups={w.groups}, c={w.c}, k={w.k}"
            )
        if registers(w, 1, 1, 1) > 255 or max(tall.span(1), wide.span(1)) > MAX_SPAN:
            filters = f"{w.r} x {w.s} taps, dilation {w.dilation}, stride {w.stride}"
            return f"{self.key} keeps taps and a line of pixels in registers: {filters} are too many"
        if w.c * max(math.prod(w.padded), w.p * w.q) >= _conv.NARROW:
            return f"{self.key} supports images of fewer than {_conv.NARROW} elements, padding included"
        if w.n * w.c * tall.extent * wide.extent > MAX_BLOCKS:
            return f"{self.key} supports up to {MAX_BLOCKS} pixels of all channels"
        return None

    def default(self, workload: Conv2d, device: Device) -> Config:
        """Return the widest accesses and largest tile with room for several blocks per SM, in 128 threads."""
        return self.space.first_valid(_usual(workload, device), workload=workload, device=device)

    def tiles(self, workload: Conv2d, config: Config) -> tuple[Tiling, ...]:
        """Return the tiling of the pixels by threads; those beyond the pixels are idle."""
        return tuple(
            Tiling(dimension=axis.name, extent=axis.extent, tile=config[name] * axis.unit)
            for axis, name in zip(axes(workload), ("rows", "columns"), strict=True)
        )

    def costs(self, workload: Conv2d, table: Table, device: Device) -> Costs:
        """Count whole tiles of threads: taps in the padding are multiplied as zeros.

        Reads are those of the tile with most padding. They may hit in L1.
        """
        w, (tall, wide), wgrad = workload, axes(workload), workload.direction == "wgrad"
        config = {name: table[name].astype(np.float64) for name in table.space.names}
        rows, columns, vec = config["rows"], config["columns"], config["vec"]
        threads = config["channels"] * config["across"] * config["down"]
        all_tiles = w.n * (w.c / vec) * ceil_div(tall.extent, rows * tall.unit)
        all_tiles = all_tiles * ceil_div(wide.extent, columns * wide.unit)
        # Blocks of wgrad have many tiles: only the work of all blocks together is certain.
        blocks = block_tiles(w, config)[0] * config["split"] if wgrad else all_tiles / threads
        tiles_per_block = all_tiles / blocks
        products, reads, read = rows * columns * vec * w.r * w.s, 1.0, 1.0
        for axis, name in ((tall, "rows"), (wide, "columns")):
            reads = reads * by_value(axis.reads, table[name])
            read = read * by_value(axis.fewest_inside, table[name])
        staged = table["staged"] > 0
        # Taps are read as vectors too.
        accesses = np.where(staged, reads, read) + (0 if wgrad else w.r * w.s)
        # From sm_100 on, one instruction can do two multiply-adds.
        packed = 2.0 if device.compute_capability >= (10, 0) else 1.0
        return Costs(
            blocks=blocks,
            full_blocks=0.0 if wgrad else _whole_blocks(w, config),
            threads=threads,
            smem_bytes=smem_bytes(w, table.columns),
            fma=tiles_per_block * products,
            smem_traffic_bytes=np.where(staged, tiles_per_block / 32 * reads * 128, 0.0),
            accesses=tiles_per_block * accesses,
            instructions=tiles_per_block / 32 * (products / packed + accesses),
            chain_clocks=0.0
            if wgrad
            else device.l1_latency + tall.most_taps * wide.most_taps * device.fma_latency,
            serial_launches=1 + (table["split"] > 1),
        )

    def claims(self, workload: Conv2d, config: Config) -> tuple[str, ...]:
        """Return multiply-adds, and shuffles where lanes of a warp sum the taps of the same channel."""
        together = config["across"] * config["down"]
        if workload.layout == "nhwc":
            together = 32 // config["channels"]
        return ("FFMA", "SHFL") if workload.direction == "wgrad" and together > 1 else ("FFMA",)

    def source(self, workload: Conv2d, config: Config) -> str:
        """Return the kernels for this filter and this configuration; image sizes are arguments."""
        choice = constants("Choice", **_choice(workload, config))
        shared = helpers("types", "epilogue", "gemm", "conv", "depthwise")
        return shared + _conv.injected(workload) + choice + SOURCE

    def scratch(self, workload: Conv2d, config: Config) -> tuple[Tensor, ...]:
        """Return the partial sums, if the pixels are split."""
        return _conv.scratch(workload, config["split"])

    def launches(self, workload: Conv2d, config: Config) -> tuple[Launch, ...]:
        """Return the launch of the convolution, and that of the sum of its parts if the pixels are split."""
        w, (tall, wide), split, out = workload, axes(workload), config["split"], workload.outputs()[0]
        wgrad, (deep, high, long) = w.direction == "wgrad", block_tiles(workload, config)
        extents = (tall.extent, wide.extent, tall.source, wide.source)
        sizes = (w.n, w.c, *extents, tall.shift, wide.shift, *([split] if wgrad else []))
        tensors = tuple(tensor.name for tensor in w.inputs()[:2])
        tensors += () if wgrad else _conv.epilogue_tensors(w)
        target = out.name if split == 1 else "partial"
        first = Launch(
            entry="depthwise_wgrad<Choice>" if wgrad else "depthwise<Choice>",
            grid=(deep * (split if wgrad else w.n * high * long), 1, 1),
            block=(config["channels"] * config["across"] * config["down"], 1, 1),
            arguments=(*tensors, target, *(Scalar("int", size) for size in sizes)),
            smem_bytes=int(smem_bytes(w, config)),
        )
        second = Launch(
            entry=f"sum_partials<{ctype(w.dtype)}>",
            grid=(ceil_div(out.size, SUM_WIDTH), 1, 1),
            block=(SUM_THREADS, 1, 1),
            arguments=("partial", out.name, Scalar("int", split), Scalar("int", out.size)),
        )
        return (first,) if split == 1 else (first, second)

    def emulation_workload(self, workload: Conv2d, config: Config) -> Conv2d:
        """Return a workload of two tiles in each direction that ends within them as the large one does."""
        w, (tall, wide) = workload, axes(workload)
        c = _conv_emulation.least(w.c, config["channels"] * config["vec"], 2)
        height = _conv_emulation.least(tall.extent, config["down"] * config["rows"] * tall.unit, 2)
        width = _conv_emulation.least(wide.extent, config["across"] * config["columns"] * wide.unit, 2)
        if w.direction != "dgrad":
            along = zip(w.axes, (height, width), strict=True)
            height, width = (axis.smallest_image(outputs) for axis, outputs in along)
        few = replace(w, n=min(w.n, 2), c=c, k=c, groups=c)
        try:
            return replace(few, h=height, w=width)
        except InputError:  # the filter does not fit in so few pixels of dx
            return few


def _whole_blocks(workload: Conv2d, config: Mapping[str, Any]) -> Any:
    """Return the number of blocks in which all threads have a tile that begins inside the image."""
    (tall, wide), channels = axes(workload), config["channels"] * config["vec"]
    rows = ceil_div(tall.extent, config["rows"] * tall.unit)
    columns = ceil_div(wide.extent, config["columns"] * wide.unit)
    return workload.n * (workload.c // channels) * (rows // config["down"]) * (columns // config["across"])


VARIANT = CudaDepthwise()
