"""conv2d on the CPU as a product of matrices whose patches are gathered while packing (implicit GEMM).

Layout nhwc multiplies pixels by filters, layout nchw filters by pixels, so that results leave in the order in
which they are stored. The gradient to the images (dgrad) is one product for each residue of rows and columns
modulo the stride: within one, every pixel meets the same taps of the filter, and none is wasted on zeros.
The gradient to the filters (wgrad) multiplies filters by patches, summed over pixels.

Serves depthwise convolutions too, but slowly: a group of one filter fills one lane of a vector.
Source: Chetlur et al., "cuDNN: Efficient Primitives for Deep Learning", 2014 (implicit GEMM); Dumoulin and
Visin, "A guide to convolution arithmetic for deep learning", 2016 (gradients). The product: `_numba_product`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tunebench.device import Device
from tunebench.kernels._numba_cpu import load, store
from tunebench.kernels._numba_product import PARAMETERS, Operand, constraints, expert, inlined, walker
from tunebench.space import Config, Space, Table
from tunebench.variant import Argument, Costs, NumbaCpuVariant, Scalar, ceil_div
from tunebench.workloads.operators.conv2d import Conv2d


def extents(workload: Conv2d) -> tuple[int, int, int]:
    """Return rows, columns and terms of the (largest) product that a convolution comes to."""
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
    """Serves every size, type, layout, direction, group count, dilation and epilogue."""

    name = "numba_cpu"
    operator = Conv2d
    space = Space(PARAMETERS, constraints(extents))

    def default(self, workload: Conv2d, device: Device) -> Config:
        """Return square-ish tiles; rows stay as gathered, but filters of wgrad come a pixel at a time."""
        transposed = workload.direction == "wgrad" and workload.layout == "nhwc"
        return expert(extents(workload), device, "columns" if transposed else "rows")

    def costs(self, workload: Conv2d, table: Table, device: Device) -> Costs:
        """Count the multiply-adds, padding included; dgrad skips those whose pixel is in the padding."""
        pairs = workload.n * workload.k * (workload.c // workload.groups)
        executed = workload.p * workload.q * workload.r * workload.s
        if workload.direction == "dgrad":
            executed = min(executed, _met(workload, workload.h, workload.r) * _met(workload, workload.w, workload.s))
        return Costs(blocks=1, full_blocks=0, threads=1, fma=float(pairs * executed))

    def arguments(self, workload: Conv2d, config: Config) -> tuple[Argument, ...]:
        """Pass the output for a missing bias or residual (which is then not read)."""
        first, second = (tensor.name for tensor in workload.inputs()[:2])
        if workload.direction == "dgrad":
            first, second = "dy", "w"
        out = workload.outputs()[0].name
        bias = "bias" if workload.has_bias else out
        residual = "residual" if workload.has_residual else out
        sizes = (workload.stride, workload.pad, workload.dilation, workload.groups)
        return (first, second, bias, residual, out, *(Scalar("long long", size) for size in sizes))

    def kernel(self, workload: Conv2d, config: Config) -> Callable[..., None]:
        """Return the kernel `(images, others, bias, residual, out, stride, pad, dilation, groups)`.

        Others are filters, or dy for wgrad.
        """
        import numba
        import numpy as np

        walk = walker(config, *_operands(workload), _write(workload), self.fastmath)
        fprop, wgrad = workload.direction == "fprop", workload.direction == "wgrad"
        last = workload.layout == "nhwc"
        height, width, channel = (1, 2, 3) if last else (2, 3, 1)
        plan = _plan(workload)

        def conv2d(
            images: Any, others: Any, bias: Any, residual: Any, out: Any, stride: int, pad: int, dilation: int, groups: int
        ) -> None:
            filters = out if wgrad else others
            grid = others if wgrad else out
            r, s = filters.shape[height], filters.shape[width]
            taps, grids = plan(r, s, grid.shape[height], grid.shape[width], stride, pad, dilation)
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
            shape = (images.shape[height], images.shape[width], own, results, groups, step)
            target = (grid.shape[height], grid.shape[width], spread, r * s)
            arrays = (images.ravel(), others.ravel(), bias.ravel(), residual.ravel(), out.ravel())
            operands = (arrays, taps, grids, shape, target)
            workers = np.int64(numba.get_num_threads())
            for worker in numba.prange(workers):
                walk(operands, sizes, np.int64(worker), workers)

        return conv2d


def _met(workload: Conv2d, extent: int, taps: int) -> int:
    """Count pairs of a pixel and a tap, along one axis, that a multiple of the stride separates."""
    residues = ((tap * workload.dilation - workload.pad) % workload.stride for tap in range(taps))
    return sum(max(0, ceil_div(extent - residue, workload.stride)) for residue in residues)
