"""Convolutions of one tap as matrix products, by any CUDA C++ variant of gemm.

With a 1 x 1 filter at stride 1, without padding and channels last, images are matrices of pixels by channels,
and the filters a matrix of k by c. Nothing is copied; only names differ.

direction a             b         c           trans  summed over
fprop     x             w         y           nt     channels
dgrad     dy            w         dx          nn     filters
wgrad     dy            x         dw          tn     pixels
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

from tunebench.device import Device
from tunebench.space import Config, Constraint, Space, Table
from tunebench.variant import Costs, CudaVariant, Launch, TensorMap, Tiling
from tunebench.workload import Tensor
from tunebench.workloads.common.activation import IDENTITY
from tunebench.workloads.operators.conv2d import Conv2d
from tunebench.workloads.operators.gemm import Gemm

__all__ = ["Pointwise", "gemm_of", "on_products"]

_TRANS = {"fprop": "nt", "dgrad": "nn", "wgrad": "tn"}
_DIMENSIONS = {
    "fprop": {"m": "n*h*w", "n": "k", "k": "c"},
    "dgrad": {"m": "n*h*w", "n": "c", "k": "k"},
    "wgrad": {"m": "k", "n": "c", "k": "n*h*w"},
}
_TENSORS = {
    "fprop": {"a": "x", "b": "w", "c": "y"},
    "dgrad": {"a": "dy", "b": "w", "c": "dx"},
    "wgrad": {"a": "dy", "b": "x", "c": "dw"},
}


@functools.lru_cache(maxsize=256)
def gemm_of(workload: Conv2d) -> Gemm:
    """Return the gemm that computes a convolution of one tap; its epilogue must be one of gemm's."""
    extents = {"n*h*w": workload.n * workload.h * workload.w, "c": workload.c, "k": workload.k}
    m, n, k = (extents[_DIMENSIONS[workload.direction][name]] for name in "mnk")
    return Gemm(
        m=m,
        n=n,
        k=k,
        dtype=workload.dtype,
        trans=_TRANS[workload.direction],  # type: ignore[arg-type]
        epilogue=workload.epilogue,  # type: ignore[arg-type]
        act=workload.act,
        pre=workload.pre,
    )


def _conv_of(product: Gemm, like: Conv2d) -> Conv2d:
    """Return the convolution of one image, a line of pixels, that `product` computes."""
    extents = {dimension: getattr(product, name) for name, dimension in _DIMENSIONS[like.direction].items()}
    return dataclasses.replace(like, n=1, h=1, w=extents["n*h*w"], c=extents["c"], k=extents["k"])


def on_products(space: Space) -> Space:
    """Return the space of a gemm variant for convolutions: its constraints get the gemm as workload."""

    def seeing(constraint: Constraint) -> Constraint:
        @functools.wraps(constraint)
        def holds(**arguments: Any) -> Any:
            if "workload" in arguments:
                arguments["workload"] = gemm_of(arguments["workload"])
            return constraint(**arguments)

        return holds

    return Space(space.parameters, tuple(map(seeing, space.constraints)))


class Pointwise(CudaVariant[Conv2d]):
    """A variant of gemm that computes convolutions of one tap.

    Attributes:
        product: The variant of gemm; `space` and the range of architectures are the same.
    """

    operator = Conv2d
    product: ClassVar[CudaVariant[Gemm]]

    def target(self, device: Device) -> str:
        """Return the architecture to compile for."""
        return self.product.target(device)

    def limits(self, workload: Conv2d, device: Device) -> str | None:
        """Return why the convolution is not a gemm in memory, or why gemm refuses it, or None."""
        w = workload
        if (w.r, w.s, w.stride, w.pad, w.pad_w, w.groups, w.layout) != (1, 1, 1, 0, 0, 1, "nhwc"):
            return f"{self.key} computes 1 x 1 filters with stride=1, pad=0, groups=1, layout=nhwc"
        if w.epilogue not in Gemm.choices("epilogue"):
            return f"{self.key} supports the epilogues of gemm, not {w.epilogue}"
        if w.act != IDENTITY and w.has_residual:
            return f"{self.key} adds a residual after act={w.act}, as gemm does"
        if w.n * w.h * w.w >= 2**31:
            return f"{self.key} supports fewer than 2**31 pixels"
        reason = self.product.limits(gemm_of(w), device)
        return reason and reason.replace(self.product.key, self.key)

    def default(self, workload: Conv2d, device: Device) -> Config:
        """Return gemm's default."""
        return self.product.default(gemm_of(workload), device)

    def tiles(self, workload: Conv2d, config: Config) -> tuple[Tiling, ...]:
        """Return the tiling of pixels, filters and channels."""
        names = _DIMENSIONS[workload.direction]
        tiles = self.product.tiles(gemm_of(workload), config)
        return tuple(dataclasses.replace(tiling, dimension=names[tiling.dimension]) for tiling in tiles)

    def costs(self, workload: Conv2d, table: Table, device: Device) -> Costs:
        """Return gemm's costs."""
        return self.product.costs(gemm_of(workload), table, device)

    def claims(self, workload: Conv2d, config: Config) -> tuple[str, ...]:
        """Return the instructions that gemm claims."""
        return self.product.claims(gemm_of(workload), config)

    def source(self, workload: Conv2d, config: Config) -> str:
        """Return gemm's kernels."""
        return self.product.source(gemm_of(workload), config)

    def scratch(self, workload: Conv2d, config: Config) -> tuple[Tensor, ...]:
        """Return gemm's scratch."""
        return self.product.scratch(gemm_of(workload), config)

    def launches(self, workload: Conv2d, config: Config) -> tuple[Launch, ...]:
        """Return gemm's launches, with the tensors of the convolution."""
        names = _TENSORS[workload.direction]

        def renamed(argument: Any) -> Any:
            if isinstance(argument, TensorMap):
                return dataclasses.replace(argument, tensor=names[argument.tensor])
            return names.get(argument, argument) if isinstance(argument, str) else argument

        return tuple(
            dataclasses.replace(launch, arguments=tuple(map(renamed, launch.arguments)))
            for launch in self.product.launches(gemm_of(workload), config)
        )

    def emulation_workload(self, workload: Conv2d, config: Config) -> Conv2d:
        """Return gemm's emulation workload as a line of pixels."""
        product = gemm_of(workload)
        small = self.product.emulation_workload(product, config)
        return workload if small == product else _conv_of(small, workload)
