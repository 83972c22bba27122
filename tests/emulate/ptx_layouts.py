"""Places of elements as the PTX ISA states them: registers of lanes, bytes of shared memory, im2col pixels.

The emulator and the kernels compute the same places by formulas of their own; tests compare them with these.
Nothing here is taken from either. Source: PTX ISA 8.7, the section that each table names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

__all__ = [
    "FRAGMENTS",
    "SWIZZLES",
    "Fragment",
    "im2col_pixels",
    "ldmatrix_element",
    "matrix_descriptor",
    "shared_image",
    "wgmma_sum",
]

# -- fragments of mma ----------------------------------------------------------------------------------------


class Fragment(NamedTuple):
    """Sections "Matrix Fragments for mma.m16n8k8", "… mma.m16n8k16" (floating point), "… mma.m16n8k32".

    Attributes:
        k: Extent of the summed dimension.
        per_register: Elements of A or B in a 32-bit register, the first in its lowest bits.
    """

    k: int
    per_register: int

    def a(self, lane: int, i: int) -> tuple[int, int]:
        """Return row and column of element a_i of a lane."""
        group, column = lane >> 2, lane % 4
        if self.k == 8:
            return group if i in (0, 2) else group + 8, column if i in (0, 1) else column + 4
        if self.k == 16:
            row = group if 0 <= i < 2 or 4 <= i < 6 else group + 8
            return row, column * 2 + (i & 1) + (8 if i >= 4 else 0)
        row = group if 0 <= i < 4 or 8 <= i < 12 else group + 8
        return row, column * 4 + (i & 3) + (16 if i >= 8 else 0)

    def b(self, lane: int, i: int) -> tuple[int, int]:
        """Return row and column of element b_i of a lane."""
        group, row = lane >> 2, lane % 4
        if self.k == 8:
            return row if i == 0 else row + 4, group
        if self.k == 16:
            return row * 2 + (i & 1) + (8 if i >= 2 else 0), group
        return row * 4 + (i & 3) + (16 if i >= 4 else 0), group

    def d(self, lane: int, i: int) -> tuple[int, int]:
        """Return row and column of element c_i or d_i of a lane."""
        group, column = lane >> 2, lane % 4
        return group if i < 2 else group + 8, column * 2 + (i & 1)


FRAGMENTS = {8: Fragment(8, 1), 16: Fragment(16, 2), 32: Fragment(32, 4)}
"""By the extent of the summed dimension."""


def ldmatrix_element(lane: int, half: int, trans: bool) -> tuple[int, int]:
    """Return row and column of the 8 x 8 matrix that half a register of a lane receives.

    Section "Warp-level matrix load instruction: ldmatrix": a row is in four threads, two elements each;
    `.trans` loads the matrix in column-major format. Thread 8 i + r passes the address of row r of matrix
    i, which goes to register i.
    """
    row, column = lane // 4, lane % 4 * 2 + half
    return (column, row) if trans else (row, column)


def wgmma_sum(thread: int, i: int) -> tuple[int, int]:
    """Return row and column of element d_i of a thread of a warpgroup.

    Section "Register Fragments and Shared Memory Matrix Layouts", figure of D of wgmma.m64nNk16: warp w has
    rows 16 w to 16 w + 15, each eight columns as in the fragment of mma.m16n8k16.
    """
    row, column = FRAGMENTS[16].d(thread % 32, i % 4)
    return thread // 32 * 16 + row, i // 4 * 8 + column


# -- shared memory -------------------------------------------------------------------------------------------

SWIZZLES: dict[int, tuple[str, ...]] = {
    0: ("01234567",),
    32: ("01234567", "10325476"),
    64: ("01234567", "10325476", "23016745", "32107654"),
    128: (
        *("01234567", "10325476", "23016745", "32107654"),
        *("45670123", "54761032", "67452301", "76543210"),
    ),
}
"""Section "Swizzling Modes": the chunk of 16 bytes that is at each place of a line of 128 bytes.

Keys are the bytes of the swizzle; lines repeat after those listed.
"""

_MODES = {0: 0, 128: 1, 64: 2, 32: 3}


def swizzled_byte(at: int, swizzle_bytes: int) -> int:
    """Return where a swizzled copy or product has the byte that is at `at` without a swizzle."""
    lines = SWIZZLES[swizzle_bytes]
    line, chunk = lines[at // 128 % len(lines)], at % 128 // 16
    return at // 128 * 128 + line.index(str(chunk)) * 16 + at % 16


def matrix_descriptor(start: int, leading: int, stride: int, swizzle_bytes: int) -> int:
    """Return the 64-bit descriptor of a matrix in shared memory.

    Section "Matrix Descriptor Format": bits 13 to 0 the address, 29 to 16 the leading dimension byte
    offset, 45 to 32 the stride dimension byte offset, each as matrix-descriptor-encode(x) = (x & 0x3FFFF)
    >> 4; 51 to 49 the base offset, here 0; 63 to 62 the swizzle.
    """
    encoded = [(field & 0x3FFFF) >> 4 for field in (start, leading, stride)]
    return encoded[0] | encoded[1] << 16 | encoded[2] << 32 | _MODES[swizzle_bytes] << 62


class Canonical(NamedTuple):
    """A layout of a matrix (X, K) in units of 128 bits: shapes and strides, innermost first, of X and of K.

    Strides are numbers of elements; "lbo" and "sbo" are the leading and stride dimension byte offsets.
    """

    x: tuple[tuple[int, Any], ...]
    k: tuple[tuple[int, Any], ...]


def canonical(swizzle_bytes: int, x_major: bool, t: int) -> Canonical:
    """Return the canonical layout of a matrix.

    Section "Strides", table of canonical layouts, where T is the number of elements in 128 bits. The
    outermost extents are those that the instruction needs.

    Args:
        swizzle_bytes: Swizzle; 0 for none.
        x_major: Whether the matrix is M- or N-major; otherwise K-major.
        t: Elements in 128 bits.
    """
    many, w = 1 << 20, swizzle_bytes // 16
    if not x_major and not swizzle_bytes:  # ((8,m),(T,2k)) : ((1T,SBO),(1,LBO))
        return Canonical(((8, t), (many, "sbo")), ((t, 1), (many, "lbo")))
    if not x_major:  # ((8,m),(T,2k)) : ((2T,SBO),(1,T)) for 32 bytes; 4T for 64, 8T for 128
        return Canonical(((8, w * t), (many, "sbo")), ((t, 1), (many, t)))
    if not swizzle_bytes:  # ((T,1,m),(8,k)) : ((1,T,SBO),(1T,LBO))
        return Canonical(((t, 1), (1, t), (many, "sbo")), ((8, t), (many, "lbo")))
    # ((T,2,m),(8,k)) : ((1,T,LBO),(2T,SBO)) for 32 bytes; 4 for 64, 8 for 128
    return Canonical(((t, 1), (w, t), (many, "lbo")), ((8, w * t), (many, "sbo")))


def _offset(index: int, dimension: tuple[tuple[int, Any], ...], offsets: dict[str, int], size: int) -> int:
    """Return the byte offset of an index of one dimension of a canonical layout."""
    offset = 0
    for extent, step in dimension:
        offset += index % extent * (offsets[step] if isinstance(step, str) else step * size)
        index //= extent
    return offset


def shared_image(matrix: Any, swizzle_bytes: int, x_major: bool, leading: int, stride: int) -> Any:
    """Return shared memory, as one f32 for each element, that holds a matrix (X, K) of 32 bytes along K.

    Args:
        matrix: The matrix.
        swizzle_bytes: Swizzle; 0 for none.
        x_major: Whether the matrix is M- or N-major; otherwise K-major.
        leading: Leading dimension byte offset.
        stride: Stride dimension byte offset.
    """
    image = np.full(16384, np.nan, np.float32)
    size = 32 // matrix.shape[1]
    layout, offsets = canonical(swizzle_bytes, x_major, 16 // size), {"lbo": leading, "sbo": stride}
    for x, k in np.ndindex(matrix.shape):
        at = _offset(x, layout.x, offsets, size) + _offset(k, layout.k, offsets, size)
        image[swizzled_byte(at, swizzle_bytes) // size] = matrix[x, k]
    return image


# -- im2col --------------------------------------------------------------------------------------------------


def im2col_pixels(
    extents: tuple[int, int, int],
    lower: tuple[int, int],
    upper: tuple[int, int],
    strides: tuple[int, int],
    start: tuple[int, int, int],
    offsets: tuple[int, int],
) -> Iterator[tuple[int, int, int] | None]:
    """Yield the pixels that an im2col copy reads: (width, height, image), or None outside of the tensor.

    Section "im2col mode": the bounding box has its corners at `lower` and, from the far end, at `upper`;
    pixels are taken along W, then H, then N, `strides` apart ("Traversal Stride"), starting at the
    coordinates of the instruction; `offsets` of the instruction are added to each.

    Args:
        extents: Width, height, number of images.
        lower: Lower corner of the box: width, height.
        upper: Upper corner, from the last pixel.
        strides: Traversal strides: width, height.
        start: Coordinates of the instruction: width, height, image.
        offsets: Offsets of the instruction: width, height.
    """
    width, height, images = extents
    columns = range(lower[0], width + upper[0], strides[0])
    rows = range(lower[1], height + upper[1], strides[1])
    box = [(x, y, n) for n in range(images + 64) for y in rows for x in columns]
    for x, y, n in box[box.index(start) :]:
        at = (x + offsets[0], y + offsets[1], n)
        inside = all(0 <= position < extent for position, extent in zip(at, extents, strict=True))
        yield at if inside else None
