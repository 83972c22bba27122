"""Copies between heads and the buffers of CPU workers, for attention in Numba.

Arrays are raw addresses, and buffers are f32 (see `numba_cpu`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tunebench.dtype import DType
from tunebench.kernels.common.numba_cpu import jitted, load, store

__all__ = ["clearer", "packer", "widener", "writer"]


def packer(dtype: DType, length: int, nr: int, fastmath: frozenset[str]) -> Callable[..., None]:
    """Return the jitted `(source, begin, count, buffer, to)` that packs lines into strips of nr lines.

    A strip holds the first element of each of its lines, then the second of each, and so on.

    Args:
        dtype: Type of the elements.
        length: Elements of a line.
        nr: Lines of a strip.
        fastmath: LLVM fast-math flags.
    """
    read = load(dtype)

    @jitted(fastmath)
    def pack_line(source: Any, begin: int, buffer: Any, to: int) -> None:
        for d in range(length):
            buffer[to + d * nr] = read(source[begin + d])

    @jitted(fastmath)
    def pack(source: Any, begin: int, count: int, buffer: Any, to: int) -> None:
        for i in range(count):
            pack_line(source, begin + i * length, buffer, to + i // nr * (nr * length) + i % nr)

    return pack


def widener(dtype: DType, fastmath: frozenset[str]) -> Callable[..., None]:
    """Return the jitted `(source, begin, count, buffer, to)` that copies elements as f32."""
    read = load(dtype)

    @jitted(fastmath)
    def widen(source: Any, begin: int, count: int, buffer: Any, to: int) -> None:
        for i in range(count):
            buffer[to + i] = read(source[begin + i])

    return widen


def writer(dtype: DType, fastmath: frozenset[str]) -> Callable[..., None]:
    """Return the jitted `(sums, at, count, target, to, factor)` that scales, rounds and stores elements."""
    rounded = store(dtype)

    @jitted(fastmath)
    def write(sums: Any, at: int, count: int, target: Any, to: int, factor: Any) -> None:
        for i in range(count):
            target[to + i] = rounded(sums[at + i] * factor)

    return write


def clearer(fastmath: frozenset[str]) -> Callable[..., None]:
    """Return the jitted `(buffer, begin, count)` that clears elements."""
    import numpy as np

    zero = np.float32(0)

    @jitted(fastmath)
    def clear(buffer: Any, begin: int, count: int) -> None:
        for i in range(begin, begin + count):
            buffer[i] = zero

    return clear
