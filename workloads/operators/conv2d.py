"""conv2d: y = epilogue(pre(x) * w), two-dimensional cross-correlation, and its two gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from tunebench._lazy import np
from tunebench.dtype import itemsize, storage, underflow, unit_roundoff
from tunebench.errors import InputError
from tunebench.stress import Stress, StressKind
from tunebench.workload import (
    AllowedChanges,
    Count,
    Expression,
    Part,
    Reference,
    Size,
    Tensor,
    Tolerance,
    Traffic,
    Workload,
    defaults_to,
)
from tunebench.workloads.common import accumulation
from tunebench.workloads.common import activation as activations
from tunebench.workloads.common import prologue as prologues
from tunebench.workloads.common.activation import IDENTITY
from tunebench.workloads.common.fused_product import FusedProduct

if TYPE_CHECKING:
    from tunebench.workload import Array64

__all__ = ["Conv2d", "ConvAxis"]

TRANSFORM_ERROR = 4.0
"""Factor by which Winograd's F(4 x 4, 3 x 3) may err more than a sum, with enough channels.

Measured in f32 for 64 to 1024 channels. Source: Lavin and Gray, "Fast Algorithms for Convolutional Neural
Networks", 2015 (larger tiles err more).
"""
_TRANSFORMED = f" ({TRANSFORM_ERROR:.0f} times for 3 x 3 filters of stride 1, for Winograd's algorithm)"
LARGEST_SCALE = 8.0
"""Largest scale that is drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvAxis:
    """Height or width of a convolution.

    Attributes:
        image: Pixels of x.
        output: Pixels of y.
        taps: Taps of a filter.
        pad: Zeros on each side of the image.
        stride: Stride of the filter.
        dilation: Distance between taps.
    """

    image: int
    output: int
    taps: int
    pad: int
    stride: int
    dilation: int

    def offset(self, tap: int) -> int:
        """Return the pixel that a tap multiplies for the first output; negative in the padding."""
        return tap * self.dilation - self.pad

    def outputs_of(self, tap: int) -> range:
        """Return the outputs for which a tap multiplies a pixel of the image."""
        offset = self.offset(tap)
        first = max(0, -(offset // self.stride))
        return range(first, min(self.output - 1, (self.image - 1 - offset) // self.stride) + 1)

    def smallest_image(self, outputs: int) -> int:
        """Return the fewest pixels of x that have a number of outputs."""
        return max(1, (outputs - 1) * self.stride + (self.taps - 1) * self.dilation + 1 - 2 * self.pad)


@dataclass(frozen=True, kw_only=True)
class Conv2d(FusedProduct):
    """Convolution of a batch of images, as in networks (the filter is not flipped), accumulated in f32.

    Dimensions: n images of c channels, h x w; k filters, r x s; stride and dilation, equal in both
    directions; pad zeros above and below, and pad_w to the left and right, by default as many; channels in
    `groups`. The output has k channels, p x q. A convolution of sequences has h=1, r=1 and pad=0.

    Tensors of layout nhwc: images x (n, h, w, c) and y (n, p, q, k), filters w (k, r, s, c / groups).
    Tensors of layout nchw: x (n, c, h, w) and y (n, k, p, q), filters w (k, c / groups, r, s).

    ========= ============================ ====== =================================
    direction reads                        writes sums over
    ========= ============================ ====== =================================
    fprop     x, w, and its epilogue's     y      r, s, channels of a group
    dgrad     dy (like y), w               dx     r, s, filters of a group
    wgrad     x, dy (like y)               dw     images and output pixels
    ========= ============================ ====== =================================

    Only fprop has an epilogue, in f32 before the one rounding: ``relu(sum * scale + bias + residual)``, or a
    part of that. Each filter has one scale and one bias, both (k,), as a trained batch normalisation yields.
    residual has the shape of y. In place of relu, `act` may be any expression in x, such as
    ``max(min(x,6),0)``; ``relu(x)`` after a bias becomes a part of the epilogue's name.

    fprop multiplies `pre` of each element of x, computed in f32 and rounded to the type of x: an expression
    in x, and in scale and shift, which hold one number for each input channel: ``relu(x*scale+shift)``. Those
    it uses are the inputs pre_scale and pre_shift, both (c,). The padding is 0 after `pre`, whatever the
    value of `pre` at 0. As for gemm, tf32 means f32 tensors rounded to 11 bits before multiplying.
    """

    operator: ClassVar[str] = "conv2d"
    aliases: ClassVar[Mapping[str, str]] = {"batch": "n", "padding": "pad"}
    summed: ClassVar[str] = "c"
    allowed_changes: ClassVar[AllowedChanges] = AllowedChanges(
        padding={"c": "zeros", "k": "zeros"},
        items=("n",),
        layouts=("layout",),
        fusions={"epilogue": "after", "act": "after", "pre": "before"},
    )

    n: Size
    c: Size
    h: Size
    w: Size
    k: Size
    r: Size
    s: Size
    stride: Size
    pad: Count
    dtype: Literal["f32", "tf32", "f16", "bf16"]
    layout: Literal["nchw", "nhwc"]
    dilation: Size = 1
    groups: Size = 1
    pad_w: Count = defaults_to("pad")
    direction: Literal["fprop", "dgrad", "wgrad"] = "fprop"
    epilogue: Literal[
        "none",
        "bias",
        "bias+relu",
        "bias+residual",
        "bias+residual+relu",
        "scale+bias",
        "scale+bias+relu",
        "scale+bias+residual",
        "scale+bias+residual+relu",
    ] = "none"
    act: Expression = IDENTITY
    pre: Expression = IDENTITY

    def check(self) -> None:
        """Refuse groups that do not divide channels, filters that do not fit, and gradient epilogues."""
        if self.c % self.groups or self.k % self.groups:
            raise InputError(f"conv2d: groups={self.groups} must divide c={self.c} and k={self.k}")
        axes = (("h", "pad", "r", self.r, self.padded[0]), ("w", "pad_w", "s", self.s, self.padded[1]))
        for name, pad, filter_name, taps, padded in axes:
            reach = (taps - 1) * self.dilation + 1
            if reach > padded:
                raise InputError(
                    f"conv2d: a filter with {filter_name}={taps}, dilation={self.dilation} covers {reach} "
                    f"and must fit in {name} + 2 {pad} = {padded}"
                )
        if self.direction != "fprop":
            for name, unused in (("epilogue", "none"), ("pre", IDENTITY), ("act", IDENTITY)):
                if (value := getattr(self, name)) != unused:
                    raise InputError(
                        f"conv2d: {name}={value} needs direction=fprop, not {self.direction}; leave it out"
                    )
        self._check_expressions(self.terms, LARGEST_SCALE if self.has_scale else 1.0)

    @property
    def padded(self) -> tuple[int, int]:
        """Height and width of the images with their padding."""
        return self.h + 2 * self.pad, self.w + 2 * self.pad_w

    @property
    def p(self) -> int:
        """Height of the output."""
        return (self.padded[0] - (self.r - 1) * self.dilation - 1) // self.stride + 1

    @property
    def q(self) -> int:
        """Width of the output."""
        return (self.padded[1] - (self.s - 1) * self.dilation - 1) // self.stride + 1

    @property
    def axes(self) -> tuple[ConvAxis, ConvAxis]:
        """Height and width."""
        steps = {"stride": self.stride, "dilation": self.dilation}
        return (
            ConvAxis(image=self.h, output=self.p, taps=self.r, pad=self.pad, **steps),
            ConvAxis(image=self.w, output=self.q, taps=self.s, pad=self.pad_w, **steps),
        )

    @property
    def has_scale(self) -> bool:
        """Whether the sums of each output channel are multiplied by a scale."""
        return "scale" in self.steps

    @property
    def has_relu(self) -> bool:
        """Whether negative results become 0."""
        return "relu" in self.steps

    @property
    def terms(self) -> int:
        """Number of products summed for one element of the output, those with padding included."""
        return {
            "fprop": self.c // self.groups * self.r * self.s,
            "dgrad": self.k // self.groups * self.r * self.s,
            "wgrad": self.n * self.p * self.q,
        }[self.direction]

    def _images(self, name: str) -> Tensor:
        channels, height, width = (
            (self.c, self.h, self.w) if name in {"x", "dx"} else (self.k, self.p, self.q)
        )
        shape = (height, width, channels) if self.layout == "nhwc" else (channels, height, width)
        return Tensor(name=name, shape=(self.n, *shape), dtype=storage(self.dtype))

    def _filters(self, name: str) -> Tensor:
        channels = self.c // self.groups
        shape = (self.r, self.s, channels) if self.layout == "nhwc" else (channels, self.r, self.s)
        return Tensor(name=name, shape=(self.k, *shape), dtype=storage(self.dtype))

    def inputs(self) -> tuple[Tensor, ...]:
        """Return the inputs of the direction: x, w and those of fused operations; dy and w; or x and dy."""
        if self.direction == "dgrad":
            return (self._images("dy"), self._filters("w"))
        if self.direction == "wgrad":
            return (self._images("x"), self._images("dy"))
        tensors = [self._images("x"), self._filters("w")]
        for name, is_there in (("scale", self.has_scale), ("bias", self.has_bias)):
            if is_there:
                tensors.append(Tensor(name=name, shape=(self.k,), dtype=storage(self.dtype)))
        if self.has_residual:
            tensors.append(self._images("residual"))
        return (*tensors, *prologues.tensors(self.pre, self.c, storage(self.dtype)))

    def stress(self) -> Mapping[str, Stress]:
        """Return extreme slices of both factors, one for each channel or image of the result.

        Errors of Winograd's algorithm are relative to the largest element of a tile: values of one result
        keep about the same size.
        """
        channel = 3 if self.layout == "nhwc" else 1
        of_channel = tuple(axis for axis in range(4) if axis != channel)
        of_first = (1, 2, 3)
        (first, of_first_factor), (second, of_second) = {
            "fprop": (("x", of_first), ("w", of_first)),
            "dgrad": (("dy", of_first), ("w", of_channel)),
            "wgrad": (("x", of_channel), ("dy", of_channel)),
        }[self.direction]
        bounded = self.has_pre or self.act != IDENTITY or storage(self.dtype) == "f16"
        sizes: tuple[StressKind, ...] = () if bounded else ("large", "tiny")
        sparse: tuple[StressKind, ...] = ("sparse",) if self.fewest_terms >= 64 else ()
        return {
            first: Stress(kinds=(*sizes, "constant", "zeros"), axes=of_first_factor),
            second: Stress(kinds=(*sparse, *sizes, "zeros"), axes=of_second),
        }

    def outputs(self) -> tuple[Tensor, ...]:
        """Return y, dx or dw."""
        if self.direction == "wgrad":
            return (self._filters("dw"),)
        return (self._images("y" if self.direction == "fprop" else "dx"),)

    def flops(self) -> int:
        """Count products and sums, including padding but not fused operations, as is customary."""
        return 2 * self.n * self.k * self.p * self.q * (self.c // self.groups) * self.r * self.s

    def part_count(self) -> int:
        """Return the number of images, whose outputs are independent; for wgrad the number of filters."""
        if self.direction == "wgrad":
            return self.k if self.groups == 1 else 1
        return self.n

    def part(self, index: int) -> Part:
        """Return one image with all filters; or one filter with all images, for its gradient.

        Args:
            index: Index of the image or filter, from 0.

        Raises:
            IndexError: If there is no such image or filter.
        """
        if not 0 <= index < self.part_count():
            raise IndexError(f"index {index} is out of range: {self} has {self.part_count()} parts")
        if self.part_count() == 1:
            return Part(workload=self, places={})
        part_slice = slice(index, index + 1)
        if self.direction != "wgrad":
            image = dict.fromkeys(("x", "y", "residual", "dx", "dy"), (part_slice,))
            return Part(workload=self.changed(n=1), places=image)
        channel = (slice(None), part_slice) if self.layout == "nchw" else (*[slice(None)] * 3, part_slice)
        return Part(workload=self.changed(k=1), places={"dy": channel, "dw": (part_slice,)})

    def traffic(self) -> Traffic:
        """Count only input elements that enter a product inside the image: a strided 1x1 skips most of x."""
        images, outputs, taps = (a * b for a, b in zip(*map(_touched, self.axes), strict=True))
        elements = {
            "x": self.n * images * self.c,
            "dy": self.n * outputs * self.k,
            "w": self.k * taps * (self.c // self.groups),
        }
        read = sum(elements.get(tensor.name, tensor.size) for tensor in self.inputs())
        written = sum(tensor.nbytes for tensor in self.outputs())
        return Traffic(read_bytes=read * itemsize(storage(self.dtype)), write_bytes=written)

    def reference(self, inputs: Mapping[str, Array64]) -> dict[str, Reference]:
        """Sum over the taps of the filter, each a matrix product."""
        name = self.outputs()[0].name
        value, scale = self._sums(inputs)
        if self.has_scale:
            factor = self._of_channels(inputs["scale"])
            value, scale = value * factor, scale * np.abs(factor)
        if self.has_bias:
            bias = self._of_channels(inputs["bias"])
            value, scale = value + bias, scale + np.abs(bias)
        if self.has_residual:
            value, scale = value + inputs["residual"], scale + np.abs(inputs["residual"])
        if self.has_relu:
            value = np.maximum(value, 0.0)
        eps, stored = self.tolerance().eps_acc, storage(self.dtype)
        if self.act != IDENTITY:
            value, scale = activations.spread(self.act, value, scale, eps, stored)
        scale += underflow(stored) / eps
        return {name: Reference(value=value, scale=scale)}

    def _sums(self, inputs: Mapping[str, Array64]) -> tuple[Array64, Array64]:
        """Return the output without epilogue, and the sum of magnitudes with the errors of `pre`."""
        magnitudes = {name: np.abs(tensor) for name, tensor in inputs.items()}
        excess = None
        if self.has_pre:
            shape = (-1,) if self.layout == "nhwc" else (-1, 1, 1)
            value, magnitude = self._with_prologue(inputs["x"], inputs, shape)
            excess = self._sum_taps({**magnitudes, "x": magnitude - np.abs(value)})
            inputs, magnitudes = {**inputs, "x": value}, {**magnitudes, "x": np.abs(value)}
        sums = self._sum_taps(inputs)
        if self.dtype == "f32":
            squares = {name: np.square(tensor) for name, tensor in inputs.items()}
            scale = np.sqrt(self._sum_taps(squares)) + np.abs(sums)
        else:
            scale = self._sum_taps(magnitudes)
        return sums, scale if excess is None else scale + excess

    def _of_channels(self, vector: Array64) -> Array64:
        """Return a vector with one number for each channel, broadcastable to images of the layout."""
        return vector if self.layout == "nhwc" else vector[:, None, None]

    def _sum_taps(self, inputs: Mapping[str, Array64]) -> Array64:
        """Return the output without epilogue, in the layout of the workload."""
        g, cg, kg = self.groups, self.c // self.groups, self.k // self.groups
        # Reshape images to (groups, n, height, width, channels of a group), filters to (groups, r, s, kg,
        # cg).
        like = next(iter(inputs.values()))
        x = np.zeros((g, self.n, *self.padded, cg), like=like)
        inside = x[:, :, self.pad : self.pad + self.h, self.pad_w : self.pad_w + self.w]
        y = np.zeros((g, self.n, self.p, self.q, kg), like=like)
        w = np.zeros((g, self.r, self.s, kg, cg), like=like)
        if "x" in inputs:
            inside[:] = self._grouped(inputs["x"])
        if "dy" in inputs:
            y[:] = self._grouped(inputs["dy"])
        if "w" in inputs:
            filters = inputs["w"] if self.layout == "nhwc" else inputs["w"].transpose(0, 2, 3, 1)
            w[:] = filters.reshape(g, kg, self.r, self.s, cg).transpose(0, 2, 3, 1, 4)
        for i, j, seen in self._taps(x):
            if self.direction == "fprop":
                y += seen @ w[:, i, j].transpose(0, 2, 1)[:, None, None]
            elif self.direction == "dgrad":
                seen += y @ w[:, i, j][:, None, None]
            else:
                w[:, i, j] = y.reshape(g, -1, kg).transpose(0, 2, 1) @ seen.reshape(g, -1, cg)
        if self.direction == "wgrad":
            filters = w.transpose(0, 3, 1, 2, 4).reshape(self.k, self.r, self.s, cg)
            return filters if self.layout == "nhwc" else filters.transpose(0, 3, 1, 2)
        return self._ungrouped(y if self.direction == "fprop" else inside)

    def _taps(self, padded: Array64) -> Iterator[tuple[int, int, Array64]]:
        """Yield each tap with a view of its pixels: (groups, n, p, q, channels of a group)."""
        for i in range(self.r):
            for j in range(self.s):
                top, start_column = i * self.dilation, j * self.dilation
                rows = slice(top, top + (self.p - 1) * self.stride + 1, self.stride)
                cols = slice(start_column, start_column + (self.q - 1) * self.stride + 1, self.stride)
                yield i, j, padded[:, :, rows, cols]

    def _grouped(self, images: Array64) -> Array64:
        last = images if self.layout == "nhwc" else images.transpose(0, 2, 3, 1)
        return last.reshape(*last.shape[:3], self.groups, -1).transpose(3, 0, 1, 2, 4)

    def _ungrouped(self, images: Array64) -> Array64:
        last = images.transpose(1, 2, 3, 0, 4).reshape(*images.shape[1:4], -1)
        return last if self.layout == "nhwc" else last.transpose(0, 3, 1, 2)

    def unfused(self) -> tuple[Workload, ...]:
        """Return the prologue as an elementwise chain, the convolution alone, and the epilogue as a chain.

        In nhwc a pixel is a row, and a tensor with one number per channel is a vector. In nchw each image has
        a row for every channel, and elementwise needs an element for each row: there are no parts then,
        unless no channel has its own scale, shift or bias.
        """
        last = self.layout == "nhwc"
        of_channels = self.applied or prologues.vectors(self.pre)
        if not (self.applied or self.has_pre) or (of_channels and not last):
            return ()
        shape = (self.n * self.h * self.w, self.c) if last else (self.n * self.c, self.h * self.w)
        return self._apart(shape, "vectors")

    @property
    def fewest_terms(self) -> int:
        """Smallest number of products summed for an output that sums any: those of one tap."""
        return {"fprop": self.c // self.groups, "dgrad": self.k // self.groups, "wgrad": self.n}[
            self.direction
        ]

    @property
    def may_be_transformed(self) -> bool:
        """Whether Winograd's algorithm applies, whose errors are a multiple of those of a sum."""
        plain = (self.r, self.s, self.stride, self.dilation) == (3, 3, 1, 1)
        return plain and self.direction != "wgrad" and self.dtype == "f32"

    def tolerance(self) -> Tolerance:
        """Allow one rounding of the result, and f32 sums of `terms` products in any order."""
        stored = storage(self.dtype)
        epilogue_steps = self.has_scale + self.has_bias + self.has_residual
        eps_acc = accumulation.error(self.terms, self.dtype, self.fewest_terms)
        return Tolerance(
            eps_out=unit_roundoff(stored),
            eps_acc=eps_acc * (TRANSFORM_ERROR if self.may_be_transformed else 1.0)
            + epilogue_steps * unit_roundoff("f32"),
            reason=f"one rounding to {stored}; "
            f"{accumulation.reason(self.dtype)}"
            f"{_TRANSFORMED if self.may_be_transformed else ''}; an f32 rounding per epilogue step",
        )


def _touched(axis: ConvAxis) -> tuple[int, int, int]:
    """Count, along one axis, the pixels, outputs and taps that enter a product inside the image."""
    seen: dict[int, list[tuple[int, int]]] = {}  # by residue: ranges of image positions, in strides
    used: list[tuple[int, int]] = []  # ranges of outputs
    for tap in range(axis.taps):
        if outputs := axis.outputs_of(tap):
            used.append((outputs.start, outputs.stop))
            shift, residue = divmod(axis.offset(tap), axis.stride)
            seen.setdefault(residue, []).append((outputs.start + shift, outputs.stop + shift))
    return sum(map(_union, seen.values())), _union(used), len(used)


def _union(ranges: list[tuple[int, int]]) -> int:
    """Return the number of integers in at least one of the half-open ranges."""
    total, reached = 0, None
    for start, end in sorted(ranges):
        begin = start if reached is None else max(start, reached)
        total += max(0, end - begin)
        reached = end if reached is None else max(end, reached)
    return total
