"""conv2d for Numba on the CPU by Winograd's minimal filtering: 3 x 3, stride 1, nhwc, fprop and dgrad.

Filters are transformed once. Then each thread takes blocks of tiles: it transforms their inputs, multiplies
each of the (m + 2)^2 elements as a matrix of tiles and channels by that of the filters, and transforms the
sums back, all in private buffers that stay in the second-level cache. Transforms work on vectors of channels.

dgrad is the same with mirrored filters and another padding. See `_winograd` for the algorithm and its errors,
and `numba_product` for the product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tunebench.device import Device
from tunebench.kernels.common.numba_cpu import address, jitted, load, shared
from tunebench.kernels.common.numba_product import (
    BUFFER_BYTES,
    LANES,
    registers_hold,
    strided_product,
    usual_sums,
)
from tunebench.kernels.conv2d import _winograd
from tunebench.kernels.conv2d._numba_conv import epilogue_tensors, finisher
from tunebench.kernels.conv2d._numba_sandwich import sandwich
from tunebench.kernels.conv2d._winograd import results, summed
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Argument, Costs, NumbaCpuVariant, Scalar, Tiling, ceil_div
from tunebench.workloads.operators.conv2d import Conv2d


def tile_count(workload: Conv2d, m: Any) -> Any:
    """Return the tiles of m x m pixels that cover all outputs."""
    _, height, width, _ = workload.outputs()[0].shape
    return workload.n * ceil_div(height, m) * ceil_div(width, m)


def buffer_elements(workload: Conv2d, m: Any, mr: Any, m_panels: Any, nr: Any, depth: Any) -> Any:
    """Return the elements of a thread's buffers: a patch, transformed inputs and sums, a tile of pixels."""
    points, tiles = (m + 2) ** 2, mr * m_panels
    strips = ceil_div(results(workload), nr)
    return points * depth + points * tiles * depth + points * tiles * strips * nr + m * m * LANES


def buffers_fit(m: Any, mr: Any, m_panels: Any, nr: Any, depth: Any, workload: Conv2d) -> Any:
    """The buffers must fit in the second-level cache, or be the smallest possible."""
    least = (mr * m_panels <= 8) & (depth == 64)
    return least | (4 * buffer_elements(workload, m, mr, m_panels, nr, depth) <= BUFFER_BYTES)


SPACE = Space(
    (
        Parameter("m", (2, 4), "outputs per tile in each direction"),
        Parameter("mr", (2, 4, 6, 8, 12), "tiles summed in registers"),
        Parameter("nr", (16, 32, 48), "channels of the output summed in registers"),
        Parameter("m_panels", (1, 2, 4, 8, 16), "strips of mr tiles per block"),
        Parameter("depth", (64, 128, 256, 512), "channels transformed together"),
        Parameter("unroll", (1, 4), "terms per iteration of the innermost loop"),
    ),
    (
        lambda m, workload: (m == 2) | (summed(workload) >= _winograd.fewest_channels(4, workload)),
        registers_hold,
        buffers_fit,
        lambda nr, workload: (nr == 16) | (nr < 2 * results(workload)),
        lambda depth, workload: (depth == 64) | (depth < 2 * summed(workload)),
        lambda m, mr, m_panels, workload: (m_panels == 1) | (mr * m_panels < 2 * tile_count(workload, m)),
        # A depth that is not a multiple of the unrolled terms would add elements that do not exist.
        lambda unroll, workload: (unroll == 1) | (summed(workload) % unroll == 0),
    ),
)


class NumbaCpuWinograd(NumbaCpuVariant[Conv2d]):
    """3 x 3 filters at stride 1, nhwc, of any type but tf32, with every epilogue; fprop and dgrad."""

    name = "numba_cpu_winograd"
    operator = Conv2d
    space = SPACE

    def limits(self, workload: Conv2d, device: Device) -> str | None:
        """Return why filter, layout or number of channels do not fit, or None."""
        if workload.layout != "nhwc":
            return f"{self.key} supports layout nhwc"
        if workload.dtype == "tf32":
            return f"{self.key} multiplies f32, not tf32"
        return _winograd.limits(workload)

    def default(self, workload: Conv2d, device: Device) -> Config:
        """Return the largest accurate tile, and blocks that give each core several."""
        m = 4 if summed(workload) >= _winograd.fewest_channels(4, workload) else 2
        mr, nr = usual_sums(device)
        depth = max(d for d in (64, 128, 256) if d == 64 or d < 2 * summed(workload))
        sizes = {"m": m, "mr": mr, "nr": nr if nr < 2 * results(workload) else 16, "unroll": 1}
        tiles = int(tile_count(workload, m))
        panels = [p for p in (8, 4, 2, 1) if p == 1 or mr * p * 2 * device.sm_count <= tiles]
        configs = (Config({**sizes, "m_panels": p, "depth": d}) for d in (depth, 64) for p in panels)
        return self.space.first_valid(configs, workload=workload, device=device)

    def tiles(self, workload: Conv2d, config: Config) -> tuple[Tiling, ...]:
        """Return the tiling of rows and columns of an image."""
        _, height, width, _ = workload.outputs()[0].shape
        return (
            Tiling(dimension="h", extent=height, tile=config["m"]),
            Tiling(dimension="w", extent=width, tile=config["m"]),
        )

    def costs(self, workload: Conv2d, table: Table, device: Device) -> Costs:
        """Count the multiply-adds between the transforms; the transforms are mostly additions."""
        m = table["m"]
        products = (m + 2.0) ** 2 * tile_count(workload, m) * workload.c * workload.k
        return Costs(blocks=1, full_blocks=0, threads=1, fma=products)

    def arguments(self, workload: Conv2d, config: Config) -> tuple[Argument, ...]:
        """Return all tensors, the output for a missing scale, bias or residual, then padding and tiles."""
        images = "x" if workload.direction == "fprop" else "dy"
        pad = workload.pad if workload.direction == "fprop" else 2 - workload.pad
        out = workload.outputs()[0].name
        sizes = (pad, config["mr"] * config["m_panels"])
        tensors = (images, "w", *epilogue_tensors(workload), out)
        return (*tensors, *(Scalar("long long", size) for size in sizes))

    def kernel(self, workload: Conv2d, config: Config) -> Callable[..., None]:
        """Return the kernel `(images, filters, scale, bias, residual, out, pad, tiles)`."""
        import numba
        import numpy as np

        m, nr, depth = config["m"], config["nr"], config["depth"]
        points = (m + 2) ** 2
        transform_filters = _transform_filters(workload, m, nr)
        walk, address_of = _walk(workload, config), address()
        # A query inside the kernel would put an address of this process into the machine code.
        workers = np.int64(numba.config.NUMBA_NUM_THREADS)

        def conv2d(
            images: Any,
            filters: Any,
            scale: Any,
            bias: Any,
            residual: Any,
            out: Any,
            pad: int,
            tiles: int,
        ) -> None:
            own, wanted = images.shape[3], out.shape[3]
            strips = (wanted + nr - 1) // nr
            transformed = np.empty(strips * points * own * nr, np.float32)
            patches, sums = points * depth * (1 + tiles), points * tiles * strips * nr
            buffers = np.empty((workers, patches + sums + m * m * LANES), np.float32)
            high, wide = images.shape[1], images.shape[2]
            tall, long = out.shape[1], out.shape[2]
            for worker in numba.prange(workers):
                of_filters, buffer = address_of(filters), address_of(buffers[worker])
                transform_filters(
                    of_filters, address_of(transformed), buffer, own, wanted, np.int64(worker), workers
                )
            down, across = (tall + m - 1) // m, (long + m - 1) // m
            for worker in numba.prange(workers):
                # Numba's parallel loops take arrays and numbers from outside, but no tuples.
                added = (address_of(scale), address_of(bias), address_of(residual))
                operands = ((address_of(images), address_of(filters), *added), address_of(out))
                shape = (high, wide, own, tall, long, wanted, down, across, pad, tiles)
                total = images.shape[0] * down * across
                for first in range(worker * tiles, total, workers * tiles):
                    count = min(tiles, total - first)
                    buffer = address_of(buffers[worker])
                    walk(operands, shape, address_of(transformed), buffer, np.int64(first), count)

        return conv2d


@shared
def _transform_filters(workload: Conv2d, m: int, nr: int) -> Callable[..., None]:
    """Return the function that transforms a worker's share of the filters to (strips, points, own, nr).

    The filters (k, 3, 3, c) are read a vector of c at a time. c are the summed channels; for dgrad they are
    the channels of the output, and the taps are read in reverse.
    """
    import numpy as np

    n, points = m + 2, (m + 2) ** 2
    read, zero = load(workload.inputs()[1].dtype), np.float32(0)
    fprop = workload.direction == "fprop"
    to_points = sandwich(_winograd.transform(m).filter)

    @jitted()
    def transform(
        filters: Any, to: Any, buffer: Any, own: int, wanted: int, worker: int, workers: int
    ) -> None:
        taps, made = 0, 9 * LANES
        inner = own if fprop else wanted
        # Each worker has its own strips of the output's channels, so that workers write to separate memory.
        for strip in range(worker, (wanted + nr - 1) // nr, workers):
            base, begin = strip * points * own * nr, strip * nr
            end = min(begin + nr, wanted)
            for at in range(base, base + (points * own * nr if end < begin + nr else 0)):
                to[at] = zero
            for outer in range(begin if fprop else 0, end if fprop else own):
                for first in range(0 if fprop else begin, own if fprop else end, LANES):
                    count = min(LANES, (own if fprop else end) - first)
                    for tap in range(9):
                        place = (outer * 9 + (tap if fprop else 8 - tap)) * inner + first
                        for lane in range(count):
                            buffer[taps + tap * LANES + lane] = read(filters[place + lane])
                    to_points(buffer, taps, 3 * LANES, LANES, buffer, made, n * LANES, LANES)
                    for point in range(points):
                        for lane in range(count):
                            value = buffer[made + point * LANES + lane]
                            if fprop:
                                to[base + (point * own + first + lane) * nr + outer - begin] = value
                            else:
                                to[base + (point * own + outer) * nr + first + lane - begin] = value

    return transform


def _walk(workload: Conv2d, config: Config) -> Callable[..., None]:
    """Return `(operands, shape, filters, buffer, first, count)`, which computes a block of tiles."""
    import numpy as np

    m, depth, mr, nr = config["m"], config["depth"], config["mr"], config["nr"]
    points = (m + 2) ** 2
    transformed = points * depth
    multiply = strided_product(mr, nr, a_strides=(depth, 1), b_pitch=nr, unroll=config["unroll"])
    gather, finish, zero = _gather(workload, m, depth), _store_tile(workload, m, nr, depth), np.float32(0)

    @jitted()
    def walk(operands: Any, shape: Any, filters: Any, buffer: Any, first: int, count: int) -> None:
        own, wanted, tiles = shape[2], shape[5], shape[9]
        sums = transformed + points * tiles * depth
        strips, panels = (wanted + nr - 1) // nr, (count + mr - 1) // mr
        for at in range(sums, sums + strips * points * tiles * nr):
            buffer[at] = zero
        for start in range(0, own, depth):
            terms = min(depth, own - start)
            for tile in range(count):
                gather(operands, shape, first + tile, start, terms, buffer, transformed + tile * depth)
            for strip in range(strips):
                for point in range(points):
                    b_at = ((strip * points + point) * own + start) * nr
                    for panel in range(panels):
                        a_at = transformed + (point * tiles + panel * mr) * depth
                        to = sums + ((strip * points + point) * tiles + panel * mr) * nr
                        multiply(terms, buffer, a_at, filters, b_at, buffer, to, nr)
        for tile in range(count):
            finish(operands, shape, first + tile, buffer, sums + tile * nr)

    return walk


@shared
def _gather(workload: Conv2d, m: int, depth: int) -> Callable[..., None]:
    """Return the function that transforms the inputs of one tile, with zeros outside the image.

    Its arguments are `(operands, shape, tile, start, terms, buffer, to)`, for channels from `start` on.
    Inputs inside the image that need no conversion are read in place.
    """
    import numpy as np

    n = m + 2
    read, zero = load(workload.inputs()[0].dtype), np.float32(0)
    in_place = workload.inputs()[0].dtype == "f32"
    to_points = sandwich(_winograd.transform(m).input)

    @jitted()
    def gather(operands: Any, shape: Any, tile: int, start: int, terms: int, buffer: Any, to: int) -> None:
        images = operands[0][0]
        high, wide, own, down, across, pad = shape[0], shape[1], shape[2], shape[6], shape[7], shape[8]
        apart = shape[9] * depth
        above = tile // across
        top, left = above % down * m - pad, tile % across * m - pad
        image = above // down
        inside = top >= 0 and left >= 0 and top + n <= high and left + n <= wide
        if in_place and inside and terms % LANES == 0:
            at = ((image * high + top) * wide + left) * own + start
            for channel in range(0, terms, LANES):
                to_points(images, at + channel, wide * own, own, buffer, to + channel, n * apart, apart)
            return
        padded = (terms + LANES - 1) // LANES * LANES
        for i in range(n):
            for j in range(n):
                y, x, patch = top + i, left + j, (i * n + j) * depth
                got = 0
                if y >= 0 and y < high and x >= 0 and x < wide:
                    got, at = terms, ((image * high + y) * wide + x) * own + start
                    for t in range(terms):
                        buffer[patch + t] = read(images[at + t])
                for t in range(got, padded):
                    buffer[patch + t] = zero
        for channel in range(0, padded, LANES):
            to_points(buffer, channel, n * depth, depth, buffer, to + channel, n * apart, apart)

    return gather


@shared
def _store_tile(workload: Conv2d, m: int, nr: int, depth: int) -> Callable[..., None]:
    """Return the function that transforms the sums of one tile back, and stores its pixels."""
    n, points = m + 2, (m + 2) ** 2
    from_points = sandwich(_winograd.transform(m).output)
    finish = finisher(workload)

    @jitted()
    def store_tile(operands: Any, shape: Any, tile: int, buffer: Any, sums: int) -> None:
        tall, long, wanted, down, across, tiles = shape[3], shape[4], shape[5], shape[6], shape[7], shape[9]
        strips, apart = (wanted + nr - 1) // nr, tiles * nr
        pixels = points * depth * (1 + tiles) + strips * points * apart  # after the patches and the sums
        above = tile // across
        top, left, image = above % down * m, tile % across * m, above // down
        for channel in range(0, wanted, LANES):
            strip = channel // nr
            at = sums + strip * points * apart + channel - strip * nr
            from_points(buffer, at, n * apart, apart, buffer, pixels, m * LANES, LANES)
            count = min(LANES, wanted - channel)
            for i in range(min(m, tall - top)):
                for j in range(min(m, long - left)):
                    place = ((image * tall + top + i) * long + left + j) * wanted + channel
                    for lane in range(count):
                        value = buffer[pixels + (i * m + j) * LANES + lane]
                        finish(operands, value, channel + lane, place + lane)

    return store_tile


VARIANT = NumbaCpuWinograd()
