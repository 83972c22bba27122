"""conv2d for Numba on the CPU as an implicit GEMM: patches are gathered while they are packed.

Layout nhwc multiplies pixels by filters, layout nchw filters by pixels, so that results are written in the
order in which they are stored. The gradient to the images (dgrad) is one product per residue of rows and
columns modulo the stride: within one residue, every pixel meets the same taps of the filter, so that no
products with zeros are computed. The gradient to the filters (wgrad) multiplies filters by patches, summed
over pixels.

A group of one filter fills one lane of a vector: depthwise convolutions of layout nhwc are left to
`numba_cpu_depthwise`, except those with huge filters.

Source: Chetlur et al., "cuDNN: Efficient Primitives for Deep Learning", 2014 (implicit GEMM); Dumoulin and
Visin, "A guide to convolution arithmetic for deep learning", 2016 (gradients). The product: `numba_product`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from tunebench.device import Device
from tunebench.kernels.common.numba_cpu import address, inlined, jitted, load, shared
from tunebench.kernels.common.numba_product import (
    PARAMETERS,
    Blocking,
    Operand,
    constraints,
    expert,
    stored_line,
    walker,
)
from tunebench.kernels.common.numba_prologue import taken_ahead
from tunebench.kernels.common.prologue import operands
from tunebench.kernels.conv2d._numba_conv import depthwise_limit, epilogue_tensors, finisher
from tunebench.space import Config, Space, Table
from tunebench.variant import Argument, Costs, NumbaCpuVariant, Scalar, ceil_div
from tunebench.workloads.operators.conv2d import Conv2d, ConvAxis


def extents(workload: Conv2d) -> tuple[int, int, int]:
    """Return the rows, columns and terms of the largest product of a convolution."""
    channels, filters = workload.c // workload.groups, workload.k // workload.groups
    taps = workload.r * workload.s
    if workload.direction == "wgrad":
        return filters, channels * taps, workload.n * workload.p * workload.q
    if workload.direction == "fprop":
        pixels, results, terms = workload.n * workload.p * workload.q, filters, channels * taps
    else:
        pixels = workload.n * ceil_div(workload.h, workload.stride) * ceil_div(workload.w, workload.stride)
        taps = ceil_div(workload.r, workload.stride) * ceil_div(workload.s, workload.stride)
        results, terms = channels, filters * taps
    return (pixels, results, terms) if workload.layout == "nhwc" else (results, pixels, terms)


class NumbaCpuConv2d(NumbaCpuVariant[Conv2d]):
    """Any size, type, layout, direction, group count, dilation and epilogue."""

    name = "numba_cpu"
    operator = Conv2d
    space = Space(PARAMETERS, constraints(extents))

    def limits(self, workload: Conv2d, device: Device) -> str | None:
        """Return why the depthwise variant, which is tens of times faster, should be used, or None."""
        if workload.groups > 1 and depthwise_limit(workload) is None:
            return f"{self.key} leaves depthwise convolutions of layout nhwc to numba_cpu_depthwise"
        return None

    def default(self, workload: Conv2d, device: Device) -> Config:
        """Return near-square tiles. Rows are packed as gathered, but filters of wgrad one pixel at a time."""
        transposed = workload.direction == "wgrad" and workload.layout == "nhwc"
        return expert(extents(workload), device, "columns" if transposed else "rows")

    def costs(self, workload: Conv2d, table: Table, device: Device) -> Costs:
        """Count the multiply-adds, padding included; dgrad skips those with pixels in the padding."""
        pairs = workload.n * workload.k * (workload.c // workload.groups)
        executed = workload.p * workload.q * workload.r * workload.s
        if workload.direction == "dgrad":
            executed = min(executed, math.prod(map(_met, workload.axes)))
        return Costs(blocks=1, full_blocks=0, threads=1, fma=float(pairs * executed))

    def arguments(self, workload: Conv2d, config: Config) -> tuple[Argument, ...]:
        """Return all tensors, another one for a missing vector or residual, then sizes."""
        first, second = (tensor.name for tensor in workload.inputs()[:2])
        sizes = (workload.stride, workload.pad, workload.pad_w, workload.dilation, workload.groups)
        return (
            *(first, second, *epilogue_tensors(workload), *operands(workload), workload.outputs()[0].name),
            *(Scalar("long long", size) for size in sizes),
            *Blocking(**config).arguments,
        )

    def kernel(self, workload: Conv2d, config: Config) -> Callable[..., None]:
        """Return the kernel of images, others, vectors, out, and sizes: stride, pads, dilation, groups, tile.

        Others are filters, or dy for wgrad. Vectors are scale, bias and residual, then scale and shift of the
        prologue.
        """
        import numba
        import numpy as np

        blocking = Blocking(**config)
        walk = walker(blocking, *_operands(workload), _write(workload), self.fastmath)
        plan, size, address_of = _plan(workload), blocking.buffer_size(), address()
        fprop, wgrad = workload.direction == "fprop", workload.direction == "wgrad"
        last = workload.layout == "nhwc"
        height, width, channel = (1, 2, 3) if last else (2, 3, 1)
        # A query inside the kernel would put an address of this process into the machine code.
        workers = np.int64(numba.config.NUMBA_NUM_THREADS)

        def conv2d(
            images: Any,
            others: Any,
            scale: Any,
            bias: Any,
            residual: Any,
            pre_scale: Any,
            pre_shift: Any,
            out: Any,
            stride: int,
            pad: int,
            pad_w: int,
            dilation: int,
            groups: int,
            mc: int,
            nc: int,
        ) -> None:
            filters = out if wgrad else others
            grid = others if wgrad else out
            r, s = filters.shape[height], filters.shape[width]
            taps, grids = plan(r, s, grid.shape[height], grid.shape[width], stride, pad, pad_w, dilation)
            own, results = images.shape[channel] // groups, grid.shape[channel] // groups
            kinds = grids.shape[0]
            sizes = np.empty((groups * kinds, 3), np.int64)
            for z in range(groups * kinds):
                met, pixels = grids[z % kinds, 0], images.shape[0] * grids[z % kinds, 1] * grids[z % kinds, 2]
                if wgrad:
                    sizes[z, 0], sizes[z, 1], sizes[z, 2] = results, met * own, pixels
                else:
                    sizes[z, 0 if last else 1], sizes[z, 1 if last else 0] = pixels, results
                    sizes[z, 2] = met * own
            step, spread = (stride, 1) if fprop or wgrad else (1, stride)
            high, wide = images.shape[height], images.shape[width]
            tall, long, whole = grid.shape[height], grid.shape[width], r * s
            buffers = np.empty((workers, size(mc, nc)), np.float32)
            for worker in numba.prange(workers):
                # Numba's parallel loops take arrays and numbers from outside, but no tuples.
                sources = address_of(images), address_of(others)
                ahead = address_of(pre_scale), address_of(pre_shift)
                inputs = (*sources, address_of(scale), address_of(bias), address_of(residual), *ahead)
                shape, target = (high, wide, own, results, groups, step), (tall, long, spread, whole, kinds)
                operands = (inputs, address_of(out), address_of(taps), address_of(grids), shape, target)
                buffer = address_of(buffers[worker])
                block = (mc, nc)
                walk(operands, address_of(sizes), groups * kinds, block, buffer, np.int64(worker), workers)

        return conv2d


def _met(axis: ConvAxis) -> int:
    """Return the number of pairs of a pixel and a tap on one axis that a multiple of the stride separates."""
    residues = (axis.offset(tap) % axis.stride for tap in range(axis.taps))
    return sum(max(0, ceil_div(axis.image - residue, axis.stride)) for residue in residues)


# Compiled functions take `operands`: (inputs, out, taps, grids, shape, target), all addresses except the last
# two:
#   inputs  images, others, scale, bias, residual, scale and shift of the prologue
#   taps    (kinds, r * s, 3): place in the filter; rows and columns from a pixel to the pixel it meets
#   grids   (kinds, 5): taps in use, rows and columns of pixels, row and column of the first pixel
#   shape   height and width of an image, its channels and those of the result in a group, groups, step
#   target  height and width of the grid's images, distance of its pixels there, r * s, kinds
# A product z is one group and one kind; only dgrad has more than one kind, the residues modulo the stride.


@shared
def _plan(workload: Conv2d) -> Callable[..., Any]:
    """Return the jitted function that computes taps and grids."""
    import numpy as np

    dgrad = workload.direction == "dgrad"

    @jitted()
    def plan(
        r: int, s: int, height: int, width: int, stride: int, pad: int, pad_w: int, dilation: int
    ) -> Any:
        residues = stride if dgrad else 1
        taps = np.empty((residues * residues, r * s, 3), np.int64)
        grids = np.empty((residues * residues, 5), np.int64)
        for kind in range(residues * residues):
            top, left = kind // residues, kind % residues
            met = 0
            for tap in range(r * s):
                down, right = tap // s * dilation - pad, tap % s * dilation - pad_w
                if dgrad:
                    if (top - down) % stride or (left - right) % stride:
                        continue
                    down, right = (top - down) // stride, (left - right) // stride
                taps[kind, met, 0], taps[kind, met, 1], taps[kind, met, 2] = tap, down, right
                met += 1
            grids[kind, 0], grids[kind, 3], grids[kind, 4] = met, top, left
            grids[kind, 1] = max(0, (height - top + residues - 1) // residues)
            grids[kind, 2] = max(0, (width - left + residues - 1) // residues)
        return taps, grids

    return plan


@shared
def _operands(workload: Conv2d) -> tuple[Operand, Operand]:
    """Return the readers of rows and columns of the product."""
    last, wgrad = workload.layout == "nhwc", workload.direction == "wgrad"
    # With channels last a line of patches runs over terms at a fixed pixel, else over pixels at a fixed term.
    line = _patches_nhwc(workload) if last else _patches_nchw(workload)
    patches = Operand(line=line, along="free" if last == wgrad else "depth")
    if wgrad:
        others = Operand(line=_gradients(workload), along="free" if last else "depth")
        return others, patches
    along = "free" if last and workload.direction == "dgrad" else "depth"
    filters = Operand(line=_filters(workload), along=along)  # type: ignore[arg-type]
    return (patches, filters) if last else (filters, patches)


def _pixel(workload: Conv2d) -> Callable[..., Any]:
    """Return the inlined function `(inputs, place, channel)` that reads an element with the prologue."""
    read = load(workload.inputs()[0].dtype)

    @inlined
    def as_it_is(inputs: Any, place: int, channel: int) -> Any:
        return read(inputs[0][place])

    if not workload.has_pre:
        return as_it_is
    taken = taken_ahead(workload)

    @inlined
    def ahead(inputs: Any, place: int, channel: int) -> Any:
        return taken(inputs[0], place, inputs[5], inputs[6], channel)

    return ahead


def _patches_nhwc(workload: Conv2d) -> Callable[[int], Callable[..., None]]:
    """Return the `line` of patches, channels last: a run of channels for each tap that one pixel meets."""
    import numpy as np

    pixel_of, zero = _pixel(workload), np.float32(0)

    @functools.cache
    def line(stride: int) -> Callable[..., None]:
        @jitted()
        def pack_line(
            operands: Any, z: int, pixel: int, start: int, count: int, panel: Any, offset: int
        ) -> None:
            inputs, _, taps, grids, shape, target = operands
            height, width, own, _, groups, step = shape
            kind, group = z % target[4], z // target[4]
            rows, cols = grids[kind * 5 + 1], grids[kind * 5 + 2]
            above = pixel // cols  # including rows of earlier images
            image = above // rows
            row, col = above - image * rows, pixel - above * cols
            tap, channel, done = start // own, start % own, 0
            while done < count:
                run = min(own - channel, count - done)
                entry = (kind * target[3] + tap) * 3
                y, x = row * step + taps[entry + 1], col * step + taps[entry + 2]
                to = offset + done * stride
                if 0 <= y < height and 0 <= x < width:
                    begin = (((image * height + y) * width + x) * groups + group) * own + channel
                    for t in range(run):
                        panel[to + t * stride] = pixel_of(inputs, begin + t, group * own + channel + t)
                else:
                    for t in range(run):
                        panel[to + t * stride] = zero
                tap, channel, done = tap + 1, 0, done + run

        return pack_line

    return line


def _patches_nchw(workload: Conv2d) -> Callable[[int], Callable[..., None]]:
    """Return the `line` of patches, channels first: a run of pixels for each row of the grid, for one tap."""
    import numpy as np

    pixel_of, zero = _pixel(workload), np.float32(0)

    @functools.cache
    def line(stride: int) -> Callable[..., None]:
        @jitted()
        def pack_line(
            operands: Any, z: int, term: int, start: int, count: int, panel: Any, offset: int
        ) -> None:
            inputs, _, taps, grids, shape, target = operands
            height, width, own, _, groups, step = shape
            kind, group = z % target[4], z // target[4]
            met, rows, cols = grids[kind * 5], grids[kind * 5 + 1], grids[kind * 5 + 2]
            channel, entry = term // met, (kind * target[3] + term % met) * 3
            down, right = taps[entry + 1], taps[entry + 2]
            above = start // cols
            image, done = above // rows, 0
            row, col = above - image * rows, start - above * cols
            while done < count:
                run = min(cols - col, count - done)
                y, x, to = row * step + down, col * step + right, offset + done * stride
                # Columns of the run from `low` up to `high` are inside the image.
                low, high = -x, width - x
                if step > 1:
                    low, high = -(x // step), (width - 1 - x) // step + 1
                low, high = min(run, max(0, low)), min(run, high)
                if y < 0 or y >= height or high <= low:
                    low, high = run, run
                begin = (((image * groups + group) * own + channel) * height + y) * width + x
                for t in range(low):
                    panel[to + t * stride] = zero
                for t in range(low, high):
                    panel[to + t * stride] = pixel_of(inputs, begin + t * step, group * own + channel)
                for t in range(high, run):
                    panel[to + t * stride] = zero
                done, col, row = done + run, 0, row + 1
                if row == rows:
                    row, image = 0, image + 1

        return pack_line

    return line


def _filters(workload: Conv2d) -> Callable[[int], Callable[..., None]]:
    """Return the `line` of filters: all terms of one, or for dgrad those of one tap or channel."""
    stored = workload.inputs()[1].dtype
    read = load(stored)

    @inlined
    def whole(operands: Any, z: int, fixed: int) -> Any:
        inputs, _, _, _, shape, target = operands
        return inputs[1], (z * shape[3] + fixed) * (shape[2] * target[3])

    @inlined
    def over_channels(operands: Any, z: int, term: int) -> Any:
        inputs, _, taps, _, shape, target = operands
        own, results = shape[2], shape[3]
        kind, group = z % target[4], z // target[4]
        tap, which = taps[(kind * target[3] + term // own) * 3], group * own + term % own
        return inputs[1], (which * target[3] + tap) * results

    @functools.cache
    def line(stride: int) -> Callable[..., None]:
        @jitted()
        def over_terms(
            operands: Any, z: int, channel: int, start: int, count: int, panel: Any, offset: int
        ) -> None:
            inputs, _, taps, grids, shape, target = operands
            filters, own, results = inputs[1], shape[2], shape[3]
            kind, group = z % target[4], z // target[4]
            met, first = grids[kind * 5], kind * target[3]
            tap, which = start % met, group * own + start // met
            for t in range(count):
                place = taps[(first + tap) * 3]
                panel[offset + t * stride] = read(filters[(which * results + channel) * target[3] + place])
                tap += 1
                if tap == met:
                    tap, which = 0, which + 1

        return over_terms

    if workload.direction == "fprop":
        return stored_line(stored, whole)
    return stored_line(stored, over_channels) if workload.layout == "nhwc" else line


def _gradients(workload: Conv2d) -> Callable[[int], Callable[..., None]]:
    """Return the `line` of dy for wgrad: the filters of one pixel, or the pixels of one filter."""
    stored = workload.inputs()[1].dtype
    read = load(stored)

    @inlined
    def over_filters(operands: Any, z: int, pixel: int) -> Any:
        gradients, results, groups = operands[0][1], operands[4][3], operands[4][4]
        return gradients, (pixel * groups + z) * results

    @functools.cache
    def line(stride: int) -> Callable[..., None]:
        @jitted()
        def over_pixels(
            operands: Any, z: int, which: int, start: int, count: int, panel: Any, offset: int
        ) -> None:
            gradients, results, groups = operands[0][1], operands[4][3], operands[4][4]
            pixels = operands[5][0] * operands[5][1]
            image, place, done = start // pixels, start % pixels, 0
            while done < count:
                run = min(pixels - place, count - done)
                begin = ((image * groups + z) * results + which) * pixels + place
                for t in range(run):
                    panel[offset + (done + t) * stride] = read(gradients[begin + t])
                done, place, image = done + run, 0, image + 1

        return over_pixels

    return stored_line(stored, over_filters) if workload.layout == "nhwc" else line


@shared
def _write(workload: Conv2d) -> Callable[..., None]:
    """Return the function that applies the epilogue to a part of a row of the product, and stores it."""
    finish = finisher(workload)

    @jitted()
    def channels_of_pixel(
        operands: Any, z: int, pixel: int, start: int, count: int, sums: Any, offset: int
    ) -> None:
        _, _, _, grids, shape, target = operands
        kind, group = z % target[4], z // target[4]
        rows, cols = grids[kind * 5 + 1], grids[kind * 5 + 2]
        y = grids[kind * 5 + 3] + pixel // cols % rows * target[2]
        x = grids[kind * 5 + 4] + pixel % cols * target[2]
        channel = group * shape[3] + start
        begin = ((pixel // (rows * cols) * target[0] + y) * target[1] + x) * shape[3] * shape[4] + channel
        for t in range(count):
            finish(operands, sums[offset + t], channel + t, begin + t)

    @jitted()
    def pixels_of_channel(
        operands: Any, z: int, which: int, start: int, count: int, sums: Any, offset: int
    ) -> None:
        _, _, _, grids, shape, target = operands
        kind, group, spread = z % target[4], z // target[4], target[2]
        rows, cols = grids[kind * 5 + 1], grids[kind * 5 + 2]
        top, left = grids[kind * 5 + 3], grids[kind * 5 + 4]
        channel = group * shape[3] + which
        image, row, col, done = start // (rows * cols), start // cols % rows, start % cols, 0
        while done < count:
            run = min(cols - col, count - done)
            y, x = top + row * spread, left + col * spread
            begin = ((image * shape[3] * shape[4] + channel) * target[0] + y) * target[1] + x
            for t in range(run):
                finish(operands, sums[offset + done + t], channel, begin + t * spread)
            done, col, row = done + run, 0, row + 1
            if row == rows:
                row, image = 0, image + 1

    @jitted()
    def terms_of_filter(
        operands: Any, z: int, which: int, start: int, count: int, sums: Any, offset: int
    ) -> None:
        _, _, _, _, shape, target = operands
        begin = (z * shape[3] + which) * shape[2] * target[3] + start
        for t in range(count):
            finish(operands, sums[offset + t], 0, begin + t)

    if workload.direction == "wgrad":
        return terms_of_filter
    return channels_of_pixel if workload.layout == "nhwc" else pixels_of_channel


VARIANT = NumbaCpuConv2d()
