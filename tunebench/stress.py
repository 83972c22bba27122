"""Stress inputs: finite and infinite values that reveal numerically unstable kernels, drawn by seed.

Standard normal inputs pass a softmax that does not subtract the maximum, and a variance by the mean of
squares. An operator therefore declares, for each input, the kinds of vectors with which its results are still
defined (`Stress`). Half of the vectors stay as drawn for timing, so that one launch checks both.

Each vector of an input (a row of logits, a column of a factor) is of one kind:

========= ==========================================================================================
kind      values
========= ==========================================================================================
large     normal, times 2**20 (f16: 2**9): exponentials and f16 overflow
logits    normal, times 2**6: exponentials overflow, and differences of logits still matter
offset    a mean near 100, 1024 times the deviation, of either sign: squares cancel, exponentials overflow
mixed     normal, times powers of 2 from 2**-10 to 2**10 (f16: 2**-5 to 2**5), with a mean square of 1
tiny      normal, times 2**-60 (f16: 2**-18, where most are subnormal)
denormal  normal, times 2**-130 (f16: 2**-18): subnormal, and 0 if a device flushes them
zeros     zeros of either sign
constant  one number of 3 bits, so that f32 sums are exact
sparse    normal, about 64 elements (a quarter if there are fewer than 256), and zeros
hidden    normal, an eighth of the elements minus infinity
infinite  normal, and an element of plus infinity
nan       normal, and an element of NaN
extreme   the most negative integer
========= ==========================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tunebench._lazy import np
from tunebench.dtype import DType, is_integer, numpy_dtype

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

    from tunebench.workload import Array

    Array32 = NDArray[numpy.float32]

__all__ = ["LARGEST_OFFSET", "SPARSE_ELEMENTS", "Stress", "StressKind", "stressed"]

StressKind = Literal[
    "large",
    "logits",
    "offset",
    "mixed",
    "tiny",
    "denormal",
    "zeros",
    "constant",
    "sparse",
    "hidden",
    "infinite",
    "nan",
    "extreme",
]

SPARSE_ELEMENTS = 64
"""Mean number of elements of a sparse vector that are not 0: few enough that f32 sums are almost exact."""
LARGEST_OFFSET = 128.0
"""Limit on the magnitude of an offset vector."""
OFFSET_RATIO = 1024.0
"""Ratio of the mean of an offset vector to its deviation."""
HIDDEN_SHARE = 0.125
"""Fraction of the elements of a hidden vector that are minus infinity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stress:
    """The kinds of vectors of an input.

    Attributes:
        kinds: Kinds besides the drawn values, the most telling first: an input of one vector has this one.
        axes: Axes along which a vector extends.
    """

    kinds: tuple[StressKind, ...]
    axes: tuple[int, ...] = (-1,)


def stressed(array: Array, dtype: DType, stress: Stress, rng: numpy.random.Generator) -> Array:
    """Return a copy of an input in which about half of the vectors are replaced by those of other kinds.

    Args:
        array: The input as drawn, in its stored type.
        dtype: Its type.
        stress: Kinds of vectors, and their axes.
        rng: Source of randomness.
    """
    last = tuple(range(-len(stress.axes), 0))
    vectors = np.moveaxis(array, stress.axes, last)
    rows = np.array(vectors, order="C").reshape(-1, math.prod(vectors.shape[last[0] :]))
    kind_of_row = _kinds_of_rows(len(rows), len(stress.kinds), rng)
    for index, kind in enumerate(stress.kinds):
        chosen = np.flatnonzero(kind_of_row == index)
        if len(chosen):
            normal = rows[chosen].astype(np.float32)
            values = _KINDS[kind](normal, dtype, rng)
            with np.errstate(over="ignore", invalid="ignore"):
                rows[chosen] = values.astype(rows.dtype)
    return np.ascontiguousarray(np.moveaxis(rows.reshape(vectors.shape), last, stress.axes))


def _kinds_of_rows(rows: int, kinds: int, rng: numpy.random.Generator) -> NDArray[numpy.int64]:
    """Return the index of the kind of each row, or -1 where it stays as drawn, in random order."""
    position = np.arange(rows)
    assigned = np.where(position % 2 == 0, position // 2 % kinds, -1)
    return rng.permutation(assigned)


# -- kinds: normal rows in f32, the type, randomness -> rows in f32 -----------------------------------------


def _power(exponents: Mapping[str, int], default: int) -> Callable[..., Array32]:
    """Return a kind that multiplies by a power of two, which depends on the type."""

    def scaled(normal: Array32, dtype: DType, rng: numpy.random.Generator) -> Array32:
        return np.ldexp(normal, exponents.get(dtype, default))

    return scaled


def _signs(normal: Array32, rng: numpy.random.Generator) -> Array32:
    return rng.choice(np.array([-1, 1], np.float32), (len(normal), 1))


def _offset(normal: Array32, dtype: DType, rng: numpy.random.Generator) -> Array32:
    mean = rng.uniform(96.0, 127.0, (len(normal), 1)).astype(np.float32)
    return _signs(normal, rng) * mean * (1 + normal / np.float32(OFFSET_RATIO))


def _mixed(normal: Array32, dtype: DType, rng: numpy.random.Generator) -> Array32:
    reach = 5 if dtype == "f16" else 10
    values = np.ldexp(normal, rng.integers(-reach, reach + 1, normal.shape))
    rms = np.sqrt(np.square(values).mean(axis=1, keepdims=True))
    return np.where(rms > 0, values / np.where(rms > 0, rms, 1), values).astype(np.float32)


def _zeros(normal: Array32, dtype: DType, rng: numpy.random.Generator) -> Array32:
    return np.float32(0) * np.copysign(np.float32(1), normal)


def _constant(normal: Array32, dtype: DType, rng: numpy.random.Generator) -> Array32:
    value = rng.integers(1, 8, (len(normal), 1)).astype(np.float32)
    return np.broadcast_to(_signs(normal, rng) * np.ldexp(value, -2), normal.shape)


def _sparse(normal: Array32, dtype: DType, rng: numpy.random.Generator) -> Array32:
    length = normal.shape[1]
    kept = rng.random(normal.shape, dtype=np.float32) < max(0.25 * (length < 256), SPARSE_ELEMENTS / length)
    kept[np.arange(len(normal)), rng.integers(length, size=len(normal))] = True
    return np.where(kept, normal, np.float32(0))


def _hidden(normal: Array32, dtype: DType, rng: numpy.random.Generator) -> Array32:
    hidden = rng.random(normal.shape, dtype=np.float32) < HIDDEN_SHARE
    hidden[np.arange(len(normal)), rng.integers(normal.shape[1], size=len(normal))] = False
    return np.where(hidden, np.float32(-np.inf), normal)


def _with_one(value: float) -> Callable[..., Array32]:
    """Return a kind that replaces one element of each row."""

    def replaced(normal: Array32, dtype: DType, rng: numpy.random.Generator) -> Array32:
        rows = normal.copy()
        rows[np.arange(len(rows)), rng.integers(rows.shape[1], size=len(rows))] = value
        return rows

    return replaced


def _extreme(normal: Array32, dtype: DType, rng: numpy.random.Generator) -> Array32:
    least = np.iinfo(numpy_dtype(dtype)).min if is_integer(dtype) else 0
    return np.full(normal.shape, least, np.float32)


_KINDS: Mapping[str, Callable[[Array32, DType, numpy.random.Generator], Array32]] = {
    "large": _power({"f16": 9}, 20),
    "logits": _power({}, 6),
    "offset": _offset,
    "mixed": _mixed,
    "tiny": _power({"f16": -18}, -60),
    "denormal": _power({"f16": -18}, -130),
    "zeros": _zeros,
    "constant": _constant,
    "sparse": _sparse,
    "hidden": _hidden,
    "infinite": _with_one(float("inf")),
    "nan": _with_one(float("nan")),
    "extreme": _extreme,
}
