"""Copies between heads and the buffers of CPU workers, and biases of scores, for attention in Numba.

Arrays are raw addresses, and buffers are f32 (see `numba_cpu`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tunebench.dtype import DType
from tunebench.kernels.common.numba_cpu import jitted, load, store
from tunebench.workloads.operators.attention import LOWEST_BIAS, Attention

__all__ = ["bias_adder", "bias_line", "bias_name", "clearer", "packer", "widener", "writer"]


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


def bias_name(workload: Attention) -> str:
    """Return the name of the kernel's argument for the bias: without a bias q, which is not read as one."""
    return "bias" if workload.has_bias else "q"


def bias_line(workload: Attention) -> Callable[..., Any]:
    """Return the jitted `(head, query, heads, seq_q, seq_k)` that returns the place of a query's first bias.

    `head` counts the heads of the whole batch, `heads` those of one item.

    Args:
        workload: The workload.
    """
    import numpy as np

    of_batch, of_head, of_query = (axis in workload.bias for axis in "bhq")

    @jitted()
    def line(head: int, query: int, heads: int, seq_q: int, seq_k: int) -> Any:
        place = np.int64(head // heads if of_batch else 0)
        if of_head:
            place = place * heads + head % heads
        if of_query:
            place = place * seq_q + query
        return place * seq_k

    return line


def bias_adder(
    workload: Attention, factor: float, fastmath: frozenset[str], *, hides_lowest: bool = False
) -> Callable[..., None]:
    """Return the jitted `(bias, at, step, buffer, begin, end)` that adds `factor` times a bias to each score.

    Args:
        workload: The workload.
        factor: Factor that converts a bias to the unit of the scores in the buffer.
        fastmath: LLVM fast-math flags.
        hides_lowest: Whether biases up to `LOWEST_BIAS` hide their keys, as in the backward pass. By default
            finite ones count as `LOWEST_BIAS`, and only minus infinity hides a key.
    """
    import numpy as np

    read, unit, lowest = load(workload.dtype), np.float32(factor), np.float32(LOWEST_BIAS)
    hidden, other = np.float32(-np.inf), np.float32(-np.inf if hides_lowest else LOWEST_BIAS)

    @jitted(fastmath)
    def add(bias: Any, at: int, step: int, buffer: Any, begin: int, end: int) -> None:
        for j in range(end - begin):
            value = read(bias[at + j * step])
            if value <= lowest:
                value = hidden if value == hidden else other
            buffer[begin + j] += value * unit

    return add
