"""Tensor maps: how Hopper's copy engine (TMA) reads a tensor, by boxes or by pixel columns (im2col)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from tunebench.dtype import DType, itemsize
from tunebench.errors import InputError

__all__ = ["TENSOR_MAP_TYPES", "PixelBox", "TensorMap"]

TENSOR_MAP_TYPES: Mapping[DType, str] = {
    "f32": "FLOAT32",
    "f16": "FLOAT16",
    "bf16": "BFLOAT16",
    "e4m3": "UINT8",
    "i8": "UINT8",
    "i32": "INT32",
}
"""Suffix of the driver's name of an element type, after CU_TENSOR_MAP_DATA_TYPE_.

The driver has no 8-bit type but UINT8, which is enough to copy elements.
"""

CORNER_BITS = {1: 16, 2: 8, 3: 5}
"""Bits of a signed corner, by the number of pixel dimensions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelBox:
    """Range of pixels that an im2col tensor map visits for one tap of a filter.

    A copy starts at a pixel of this box. It continues row by row, then image by image, until it has copied as
    many pixels as the map's box declares. The element copied for each pixel is the one at the pixel plus the
    copy's offsets (the distance of a tap from the first tap), or zero if that is outside the image.

    Dimensions are those of the image, innermost first (width, then height).

    Attributes:
        lower: First pixel of the box, relative to the image's first pixel: negative in the padding.
        upper: One past the last pixel of the box, relative to the image's end.
        strides: Distance from one pixel to the next, in pixels.

    Source: PTX ISA, "im2col mode"; CUDA Driver API, "cuTensorMapEncodeIm2col".
    """

    lower: tuple[int, ...]
    upper: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMap:
    """Descriptor of a tensor for Hopper's copy engine, passed by value in 128 bytes (a `CUtensorMap`).

    Dimensions are in the engine's order, innermost first: the reverse of a shape. Elements of a box outside
    the tensor read as zeros.

    Attributes:
        tensor: Name of the tensor.
        dtype: Type of its elements, as stored.
        extents: Elements along each dimension; with `pixel_box`: channels, image dimensions, images.
        strides_bytes: Distance between indices of each dimension except the innermost, in bytes.
        box: Elements of one copy along each dimension; with `pixel_box`: channels and pixels.
        swizzle_bytes: Length of the lines whose 16-byte chunks are permuted in shared memory; 0 for none.
        pixel_box: Pixels that a copy visits one after the other; None if a copy transfers a box.

    Raises:
        InputError: The driver would refuse to encode the tensor map.

    Source: CUDA Driver API, "cuTensorMapEncodeTiled" and "cuTensorMapEncodeIm2col".
    """

    tensor: str
    dtype: DType
    extents: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    box: tuple[int, ...]
    swizzle_bytes: Literal[0, 32, 64, 128] = 128
    pixel_box: PixelBox | None = None

    def __post_init__(self) -> None:
        rank, line_bytes = len(self.extents), self.box[0] * itemsize(self.dtype)
        box_rules = (
            self._rules_of_a_box() if self.pixel_box is None else self._rules_of_pixels(self.pixel_box)
        )
        every = (
            (len(self.strides_bytes) == rank - 1, "one stride for each dimension except the innermost"),
            (all(0 < extent <= 2**32 for extent in self.extents), "extents from 1 to 2**32"),
            (
                all(0 < stride < 2**40 and stride % 16 == 0 for stride in self.strides_bytes),
                "strides that are multiples of 16 bytes and below 2**40",
            ),
            (line_bytes % 16 == 0, "lines of the box that are multiples of 16 bytes"),
            (
                not self.swizzle_bytes or line_bytes <= self.swizzle_bytes,
                "lines of the box no longer than the swizzle",
            ),
        )
        for holds, rule in itertools.chain(box_rules, every):
            if not holds:
                raise InputError(f"a tensor map must have {rule}; got {self}")

    def _rules_of_a_box(self) -> Iterable[tuple[bool, str]]:
        rank = len(self.extents)
        yield 1 <= rank <= 5 and len(self.box) == rank, "1 to 5 dimensions, and a box of the same rank"
        yield all(0 < extent <= 256 for extent in self.box), "a box of 1 to 256 along each dimension"

    def _rules_of_pixels(self, pixels: PixelBox) -> Iterable[tuple[bool, str]]:
        corners, image = (pixels.lower, pixels.upper), self.extents[1:-1]
        alike = all(len(fact) == len(image) for fact in (*corners, pixels.strides))
        yield 1 <= len(image) <= 3 and alike, "channels, 1 to 3 dimensions of pixels, images"
        yield (
            len(self.box) == 2 and 0 < self.box[0] <= 256 and 0 < self.box[1] <= 1024,
            "a box of 1 to 256 channels and 1 to 1024 pixels",
        )
        limit = 1 << CORNER_BITS[len(image)] - 1
        yield (
            all(-limit <= corner < limit for both in corners for corner in both),
            f"corners from {-limit} to {limit - 1} for pixels of {len(image)} dimensions",
        )
        yield (
            all(size + up > low for size, low, up in zip(image, *corners, strict=True)),
            "at least one pixel between its corners",
        )
        yield all(1 <= stride <= 8 for stride in pixels.strides), "pixel strides from 1 to 8"
