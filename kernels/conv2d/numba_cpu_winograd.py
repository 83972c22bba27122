"""conv2d on the CPU by Winograd's minimal filtering: 3 x 3 filters, stride 1, layout nhwc, forward and dgrad.

Filters are transformed once. Then each thread takes blocks of tiles: it transforms their inputs, multiplies
each of the (m + 2)^2 elements as a matrix of tiles and channels by that of the filters, and transforms the
sums back, all in buffers of its own that stay in the second-level cache. Transforms work on vectors of
channels.

The gradient to the images is the same with mirrored filters, and another padding. See `_winograd` for the
algorithm and its errors, and `_numba_product` for the product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tunebench.device import Device
from tunebench.kernels.common.numba_cpu import address, jitted, load
from tunebench.kernels.common.numba_product import (
    BUFFER_BYTES,
    LANES,
    Blocking,
    micro_kernel,
    registers_hold,
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
    """Return what a thread works in: a patch, transformed inputs and sums of its tiles, a tile of pixels."""
    points, tiles = (m + 2) ** 2, mr * m_panels
    strips = ceil_div(results(workload), nr)
    return points * depth + points * tiles * depth + points * tiles * strips * nr + m * m * LANES


def buffers_fit(m: Any, mr: Any, m_panels: Any, nr: Any, depth: Any, workload: Conv2d) -> Any:
    """They must fit in the second-level cache, or be the smallest there are."""
    least = (mr * m_panels <= 8) & (depth == 64)
    return least | (4 * buffer_elements(workload, m, mr, m_panels, nr, depth) <= BUFFER_BYTES)


SPACE = Space(
    (
        Parameter("m", (2, 4), "outputs of a tile, each way"),
        Parameter("mr", (2, 4, 6, 8, 12), "tiles that are summed in registers"),
        Parameter("nr", (16, 32, 48), "channels of the output that are summed in registers"),
        Parameter("m_panels", (1, 2, 4, 8, 16), "strips of mr tiles in a block"),
        Parameter("depth", (64, 128, 256, 512), "channels that are transformed at once"),
        Parameter("unroll", (1, 4), "terms a turn of the innermost loop adds"),
    ),
    (
        lambda m, workload: (m == 2) | (summed(workload) >= _winograd.fewest_channels(4, workload)),
        registers_hold,
        buffers_fit,
        lambda nr, workload: (nr == 16) | (nr < 2 * results(workload)),
        lambda depth, workload: (depth == 64) | (depth < 2 * summed(workload)),
        lambda m, mr, m_panels, workload: (m_panels == 1) | (mr * m_panels < 2 * tile_count(workload, m)),
        # Depth that is no multiple of the unrolled terms would add what is not there.
        lambda unroll, workload: (unroll == 1) | (summed(workload) % unroll == 0),
    ),
)


class NumbaCpuWinograd(NumbaCpuVariant[Conv2d]):
    """Serves 3 x 3 filters with stride 1, nhwc, of every type but tf32, with every epilogue, and dgrad."""

    name = "numba_cpu_winograd"
    operator = Conv2d
    space = SPACE

    def limits(self, workload: Conv2d, device: Device) -> str | None:
        """Refuse other filters, other layouts, and sums so short that transforms cost the accuracy."""
        if workload.layout != "nhwc":
            return f"{self.key} takes layout=nhwc"
        if workload.dtype == "tf32":
            return f"{self.key} multiplies in f32"
        return _winograd.limits(workload)

    def default(self, workload: Conv2d, device: Device) -> Config:
        """Return the larger tile if it is accurate, and blocks that leave each core some."""
        m = 4 if summed(workload) >= _winograd.fewest_channels(4, workload) else 2
        mr, nr = usual_sums(device)
        depth = max(d for d in (64, 128, 256) if d == 64 or d < 2 * summed(workload))
        sizes = {"m": m, "mr": mr, "nr": nr if nr < 2 * results(workload) else 16, "unroll": 1}
        tiles = int(tile_count(workload, m))
        panels = [p for p in (8, 4, 2, 1) if p == 1 or mr * p * 2 * device.sm_count <= tiles]
        configs = (Config({**sizes, "m_panels": p, "depth": d}) for d in (depth, 64) for p in panels)
        return self.space.first_valid(configs, workload=workload, device=device)

    def tiles(self, workload: Conv2d, config: Config) -> tuple[Tiling, ...]:
        """Return how tiles cut rows and columns of an image."""
        _, height, width, _ = workload.outputs()[0].shape
        return (
            Tiling(dimension="h", extent=height, tile=config["m"]),
            Tiling(dimension="w", extent=width, tile=config["m"]),
        )

    def costs(self, workload: Conv2d, table: Table, device: Device) -> Costs:
        """Count the multiply-adds between the transforms, which are additions for the most part."""
        m = table["m"]
        products = (m + 2.0) ** 2 * tile_count(workload, m) * workload.c * workload.k
        return Costs(blocks=1, full_blocks=0, threads=1, fma=products)

    def arguments(self, workload: Conv2d, config: Config) -> tuple[Argument, ...]:
        """Pass the output for a missing scale, bias or residual (which is then not read)."""
        images = "x" if workload.direction == "fprop" else "dy"
        pad = workload.pad if workload.direction == "fprop" else 2 - workload.pad
        out = workload.outputs()[0].name
        return (images, "w", *epilogue_tensors(workload), out, Scalar("long long", pad))

    def kernel(self, workload: Conv2d, config: Config) -> Callable[..., None]:
        """Return the kernel `(images, filters, scale, bias, residual, out, pad)`."""
        import numba
        import numpy as np

        blocking = _blocking(config)
        m, nr, tiles_together = config["m"], config["nr"], blocking.mc
        points, depth = (m + 2) ** 2, config["depth"]
        transform_filters = _transform_filters(workload, m, nr)
        walk, address_of = _walk(workload, m, blocking), address()
        fixed = points * depth + points * tiles_together * depth + m * m * LANES
        # Asking while the kernel runs would put an address of this process into the machine code.
        workers = np.int64(numba.config.NUMBA_NUM_THREADS)

        def conv2d(
            images: Any, filters: Any, scale: Any, bias: Any, residual: Any, out: Any, pad: int
        ) -> None:
            own, wanted = images.shape[3], out.shape[3]
            strips = (wanted + nr - 1) // nr
            transformed = np.empty(strips * points * own * nr, np.float32)
            buffers = np.empty((workers, fixed + points * tiles_together * strips * nr), np.float32)
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
                shape = (high, wide, own, tall, long, wanted, down, across, pad)
                total = images.shape[0] * down * across
                for first in range(worker * tiles_together, total, workers * tiles_together):
                    count = min(tiles_together, total - first)
                    buffer = address_of(buffers[worker])
                    walk(operands, shape, address_of(transformed), buffer, np.int64(first), count)

        return conv2d


def _blocking(config: Config) -> Blocking:
    """Return the sizes of the product: the sums of each strip of channels lie apart."""
    sizes = {name: config[name] for name in ("mr", "nr", "m_panels", "depth", "unroll")}
    return Blocking(**sizes, n_panels=1, a_panel="rows")


def _transform_filters(workload: Conv2d, m: int, nr: int) -> Callable[..., None]:
    """Return what transforms a worker's share of the filters to (strips, points, own, nr).

    The filters (k, 3, 3, c) are read a vector of c at a time: channels that are summed over, or for dgrad
    those of the output, and then the taps in the opposite order.
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
        # A worker has its own strips of the output's channels, so that nobody else writes there.
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


def _walk(workload: Conv2d, m: int, blocking: Blocking) -> Callable[..., None]:
    """Return what computes a block of tiles: `(operands, shape, filters, buffer, first, count)`."""
    import numpy as np

    points, tiles, depth, mr, nr = (m + 2) ** 2, blocking.mc, blocking.depth, blocking.mr, blocking.nr
    transformed = points * depth
    sums = transformed + points * tiles * depth
    multiply, zero = micro_kernel(blocking), np.float32(0)
    gather, finish = _gather(workload, m, blocking), _store_tile(workload, m, blocking)

    @jitted()
    def walk(operands: Any, shape: Any, filters: Any, buffer: Any, first: int, count: int) -> None:
        own, wanted = shape[2], shape[5]
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
                        multiply(terms, buffer, a_at, filters, b_at, buffer, to)
        for tile in range(count):
            finish(operands, shape, first + tile, buffer, sums + tile * nr)

    return walk


def _gather(workload: Conv2d, m: int, blocking: Blocking) -> Callable[..., None]:
    """Return what transforms the inputs of one tile, zeros for those outside the image.

    It is called with `(operands, shape, tile, start, terms, buffer, to)` for channels from `start` on. Inputs
    that need no conversion, and lie inside, are read where they are.
    """
    import numpy as np

    n, depth = m + 2, blocking.depth
    read, zero = load(workload.inputs()[0].dtype), np.float32(0)
    in_place = workload.inputs()[0].dtype == "f32"
    to_points = sandwich(_winograd.transform(m).input)
    apart = blocking.mc * depth

    @jitted()
    def gather(operands: Any, shape: Any, tile: int, start: int, terms: int, buffer: Any, to: int) -> None:
        images = operands[0][0]
        high, wide, own, down, across, pad = shape[0], shape[1], shape[2], shape[6], shape[7], shape[8]
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


def _store_tile(workload: Conv2d, m: int, blocking: Blocking) -> Callable[..., None]:
    """Return what transforms the sums of one tile back, and stores its pixels inside the output."""
    n, points, tiles, nr = m + 2, (m + 2) ** 2, blocking.mc, blocking.nr
    from_points = sandwich(_winograd.transform(m).output)
    finish = finisher(workload)
    pixels_at = (
        points * blocking.depth + points * tiles * blocking.depth
    )  # sums begin here; pixels follow them
    apart = tiles * nr

    @jitted()
    def store_tile(operands: Any, shape: Any, tile: int, buffer: Any, sums: int) -> None:
        tall, long, wanted, down, across = shape[3], shape[4], shape[5], shape[6], shape[7]
        strips = (wanted + nr - 1) // nr
        pixels = pixels_at + strips * points * apart
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
