"""conv2d in Numba-CUDA: direct convolution, fprop only.

A block computes `pixels` output pixels of `filters * per_thread` filters of one group; a thread computes one
pixel of `per_thread` filters, so that it uses each element of the image that often. Filters go through shared
memory, one tap and `chunk` channels at a time; images through the caches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import itemsize, storage
from tunebench.kernels.common.numba_expression import in_cuda
from tunebench.kernels.common.numba_prologue import ahead_in_cuda
from tunebench.kernels.common.prologue import operands
from tunebench.kernels.conv2d._conv import epilogue_tensors, pairs_inside
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Costs, Execution, Launch, NumbaCudaVariant, Scalar, Tiling, ceil_div
from tunebench.workloads.common.activation import IDENTITY
from tunebench.workloads.common.prologue import vectors
from tunebench.workloads.operators.conv2d import Conv2d

MAX_BLOCKS = 2**31 - 1

OTHER_REGISTERS = 40
"""Registers of a thread besides sums: sizes and strides of arrays in 64 bits, counters."""

ADDRESSING = 8.0
"""Instructions of a lane for the address of an element in 64 bits."""

SPACE = Space(
    (
        Parameter("pixels", (16, 32, 64, 128, 256), "output pixels per block, one per thread"),
        Parameter("filters", (1, 2, 4, 8, 16), "threads of a block that share a pixel"),
        Parameter("per_thread", (1, 2, 4, 8), "filters per thread"),
        Parameter("chunk", (4, 8, 16), "channels of a tap in shared memory together"),
    ),
    (
        lambda pixels, filters: (pixels * filters >= 64) & (pixels * filters <= 256),
        # Threads without a filter, and channels that do not exist, would be idle.
        lambda filters, per_thread, workload: (
            (filters * per_thread == 1) | (filters * per_thread < 2 * (workload.k // workload.groups))
        ),
        lambda chunk, workload: (chunk == 4) | (chunk < 2 * (workload.c // workload.groups)),
    ),
)


def _tiles(workload: Conv2d, config: Any) -> tuple[Any, Any]:
    """Return the number of tiles of pixels, and of filters in all groups (numbers or columns)."""
    pixels = workload.n * workload.p * workload.q
    width = config["filters"] * config["per_thread"]
    return ceil_div(pixels, config["pixels"]), workload.groups * ceil_div(
        workload.k // workload.groups, width
    )


class NumbaCudaConv2d(NumbaCudaVariant[Conv2d]):
    """fprop of any size in f32 and f16, with epilogue; tf32 in full f32."""

    name = "numba_cuda"
    operator = Conv2d
    space = SPACE

    def limits(self, workload: Conv2d, device: Device) -> str | None:
        """Return why direction, type or grid do not fit, or None. Only a driver can link bf16 conversions."""
        if workload.direction != "fprop":
            return f"{self.key} computes fprop only"
        if workload.dtype == "bf16":
            return f"{self.key} does not support bf16"
        if ceil_div(workload.n * workload.p * workload.q, 16) * workload.k > MAX_BLOCKS:
            return f"{self.key} supports up to {MAX_BLOCKS} blocks"
        return None

    def default(self, workload: Conv2d, device: Device) -> Config:
        """Return blocks of 128 threads, a warp per tile of pixels, and up to 4 filters per thread."""
        k, c = workload.k // workload.groups, workload.c // workload.groups
        width = max(f for f in (1, 2, 4, 8, 16) if f == 1 or f < 2 * k)
        filters = min(4, width)
        per_thread = min(4, width // filters)
        chunk = max(value for value in (4, 8, 16) if value == 4 or value < 2 * c)
        pixels = 128 // filters
        return Config({"pixels": pixels, "filters": filters, "per_thread": per_thread, "chunk": chunk})

    def tiles(self, workload: Conv2d, config: Config) -> tuple[Tiling, ...]:
        """Return the tiling of pixels, of the filters of a group, and of its channels."""
        pixels, width = workload.n * workload.p * workload.q, config["filters"] * config["per_thread"]
        return (
            Tiling(dimension="n*p*q", extent=pixels, tile=config["pixels"]),
            Tiling(dimension="k", extent=workload.k // workload.groups, tile=width),
            Tiling(dimension="c", extent=workload.c // workload.groups, tile=config["chunk"]),
        )

    def costs(self, workload: Conv2d, table: Table, device: Device) -> Costs:
        """Count the products inside images, averaged over all blocks: those with padding have fewer.

        A warp reads the filters of a channel in accesses of 16 bytes at best.
        """
        w = workload
        pixel_tiles, filter_tiles = _tiles(w, table)
        width, per_thread = table["filters"] * table["per_thread"], table["per_thread"]
        fma = float(w.n * pairs_inside(w) * (w.c // w.groups)) * width / pixel_tiles
        return Costs(
            blocks=1.0 * pixel_tiles * filter_tiles,
            full_blocks=0.0,
            threads=table["pixels"] * table["filters"],
            smem_bytes=4.0 * table["chunk"] * width,
            fma=fma,
            smem_traffic_bytes=fma / (32 * per_thread) * ceil_div(per_thread, 4) * 128,
            execution=self._execution(workload, table, fma),
        )

    def _execution(self, workload: Conv2d, table: Table, fma: Any) -> Execution:
        """Count the copy of filters, chunk by chunk, and the loop over channels, which loads each pixel."""
        w = workload
        names = ("pixels", "filters", "per_thread", "chunk")
        pixels, filters, per_thread, chunk = (table[name].astype(np.float64) for name in names)
        channels, taps, size = w.c // w.groups, w.r * w.s, itemsize(storage(w.dtype))
        threads, width = pixels * filters, filters * per_thread
        chunks, loads = taps * np.ceil(channels / chunk), fma / width / pixels  # of a thread
        copies = chunks * chunk * width
        # Neighbouring lanes load neighbouring pixels, which are whole lines of channels apart in nhwc.
        lines = np.minimum(32, pixels) if w.layout == "nhwc" else np.maximum(1, 32 * size / 128)
        warps = threads / 32
        return Execution(
            registers=per_thread + OTHER_REGISTERS,
            instructions=fma / 32 + ADDRESSING * (warps * loads + copies / 32),
            accesses=threads * loads * (1 + per_thread) + 2 * copies + threads * per_thread,
            passes=warps * loads * (lines + per_thread * np.maximum(1, 32 / pixels)) + 2 * copies / 32,
            # L1 holds the lines of a pixel for the taps of a row.
            l2_bytes=size * (w.r * pixels * channels + copies + pixels * width),
            # About four loads are under way at the same time.
            memory_waits=chunks * np.ceil(chunk * width / threads / 4),
            l2_waits=loads / 4,
            shared_waits=loads / 4,
            barriers=2 * chunks,
            iterations=loads,
        )

    def kernel(self, workload: Conv2d, config: Config) -> Callable[..., None]:  # noqa: C901 - may call nothing
        """Return the kernel of x, w, scale, bias, residual, vectors of the prologue, y, and sizes."""
        import numpy as np
        from numba import cuda, float32

        pixels, threads_k, chunk = config["pixels"], config["filters"], config["chunk"]
        per_thread = config["per_thread"]
        width, threads = threads_k * per_thread, pixels * threads_k
        nhwc, has_scale, has_bias = workload.layout == "nhwc", workload.has_scale, workload.has_bias
        has_residual, has_relu = workload.has_residual, workload.has_relu
        has_ahead, ahead, is_half = workload.has_pre, ahead_in_cuda(workload), workload.dtype == "f16"
        has_factor, has_shift = (name in vectors(workload.pre) for name in ("scale", "shift"))
        zero, activate, activates = np.float32(0), in_cuda(workload.act), workload.act != IDENTITY

        def conv2d(  # noqa: C901 - likewise
            x: Any,
            w: Any,
            scale: Any,
            bias: Any,
            residual: Any,
            pre_scale: Any,
            pre_shift: Any,
            y: Any,
            stride: int,
            pad: int,
            pad_w: int,
            dilation: int,
            groups: int,
        ) -> None:
            if nhwc:
                images, height, columns, _ = x.shape
                filters, taps_r, taps_s, channels = w.shape
                _, rows_out, columns_out, _ = y.shape
            else:
                images, _, height, columns = x.shape
                filters, channels, taps_r, taps_s = w.shape
                _, _, rows_out, columns_out = y.shape
            shared = cuda.shared.array((chunk, width), float32)
            sums = cuda.local.array(per_thread, float32)
            for f in range(per_thread):
                sums[f] = zero
            tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
            of_group = filters // groups
            tiles_k = (of_group + width - 1) // width
            tile = cuda.blockIdx.x % (tiles_k * groups)
            group, first = tile // tiles_k, tile % tiles_k * width
            pixel = cuda.blockIdx.x // (tiles_k * groups) * pixels + tx
            image = pixel // (rows_out * columns_out)
            p, q = pixel // columns_out % rows_out, pixel % columns_out

            for tap in range(taps_r * taps_s):
                r, s = tap // taps_s, tap % taps_s
                i, j = p * stride - pad + r * dilation, q * stride - pad_w + s * dilation
                inside = image < images and i >= 0 and i < height and j >= 0 and j < columns
                for start in range(0, channels, chunk):
                    # Every thread must reach every barrier, even without a pixel.
                    cuda.syncthreads()
                    for element in range(ty * pixels + tx, chunk * width, threads):
                        c, f = element % chunk, element // chunk
                        value = zero
                        if start + c < channels and first + f < of_group:
                            k = group * of_group + first + f
                            if nhwc:
                                value = np.float32(w[k, r, s, start + c])
                            else:
                                value = np.float32(w[k, start + c, r, s])
                        shared[c, f] = value
                    cuda.syncthreads()
                    for c in range(min(chunk, channels - start) if inside else 0):
                        channel = group * channels + start + c
                        if nhwc:
                            value = np.float32(x[image, i, j, channel])
                        else:
                            value = np.float32(x[image, channel, i, j])
                        if has_ahead:
                            factor, added = zero, zero
                            if has_factor:
                                factor = np.float32(pre_scale[channel])
                            if has_shift:
                                added = np.float32(pre_shift[channel])
                            value = ahead(value, factor, added)
                            if is_half:
                                value = np.float32(np.float16(value))
                        for f in range(per_thread):
                            sums[f] += value * shared[c, ty * per_thread + f]

            mine = min(per_thread, of_group - first - ty * per_thread) if image < images else 0
            # The number of iterations must be constant, or sums would not stay in registers.
            for f in range(per_thread):
                if f < mine:
                    k = group * of_group + first + ty * per_thread + f
                    value = sums[f]
                    if has_scale:
                        value *= np.float32(scale[k])
                    if has_bias:
                        value += np.float32(bias[k])
                    if has_residual and nhwc:
                        value += np.float32(residual[image, p, q, k])
                    elif has_residual:
                        value += np.float32(residual[image, k, p, q])
                    if has_relu and value < zero:
                        value = zero
                    if activates:
                        value = activate(value)
                    if nhwc:
                        y[image, p, q, k] = value
                    else:
                        y[image, k, p, q] = value

        return conv2d

    def launches(self, workload: Conv2d, config: Config) -> tuple[Launch, ...]:
        """Return one launch of a block per tile; x is passed for a missing scale, bias or residual."""
        pixel_tiles, filter_tiles = _tiles(workload, config)
        numbers = (workload.stride, workload.pad, workload.pad_w, workload.dilation, workload.groups)
        return (
            Launch(
                grid=(pixel_tiles * filter_tiles, 1, 1),
                block=(config["pixels"], config["filters"], 1),
                arguments=(
                    *("x", "w", *epilogue_tensors(workload), *operands(workload), "y"),
                    *(Scalar("int", number) for number in numbers),
                ),
            ),
        )

    def emulation_workload(self, workload: Conv2d, config: Config) -> Conv2d:
        """Return a workload of few tiles that are partly full: the simulator is slow."""
        w, groups = workload, min(workload.groups, 2)
        k = min(w.k // w.groups, config["filters"] * config["per_thread"] + 1)
        c = min(w.c // w.groups, config["chunk"] + 1)
        n, r, s = min(w.n, 2), min(w.r, 2), min(w.s, 2)
        q = min(w.q, 8)
        p = min(w.p, ceil_div(config["pixels"] + 1, n * q))
        small = replace(w, n=n, c=c * groups, k=k * groups, r=r, s=s, groups=groups)
        h, width = (axis.smallest_image(outputs) for axis, outputs in zip(small.axes, (p, q), strict=True))
        return replace(small, h=h, w=width)


VARIANT = NumbaCudaConv2d()
