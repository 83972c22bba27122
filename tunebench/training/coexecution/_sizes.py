"""Sizes that change from iteration to iteration: integers of a path that follow from those of given tensors.

A size is a `Number` with a negative index. A root is the size of a given tensor, an integer that Python
passed to a call, or a size of a result that torch is asked for; other sizes are sums of products of roots.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tunebench.training.coexecution._call import Number, TensorSpec

__all__ = ["SAMPLES", "Numbers", "Size", "SizeFinder", "at", "has_geometry", "is_instance", "is_sized"]

_FEW_ROOTS = 3
"""Number of roots up to which products of three are tried, as in strides of scores (N, H, L, L)."""

SAMPLES = 3
"""Number of values of a root that must be known: two decide a formula of two coefficients, one checks it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """An integer of a path.

    Attributes:
        terms: Products of roots, each with a coefficient, whose sum it is; none for a root.
        least: For a root: the smallest value it may ever have.
        low: For a root: the smallest value that was recorded.
        high: For a root: the largest value that was recorded.
    """

    terms: tuple[tuple[int, tuple[int, ...]], ...] = ()
    least: int = 0
    low: int = 0
    high: int = 0

    def covers(self, value: int) -> bool:
        """Return whether a value of a root lies between those that were recorded."""
        return self.low <= value <= self.high

    def widened(self, value: int) -> Size:
        """Return the root after a value of it was recorded."""
        return replace(self, low=min(self.low, value), high=max(self.high, value))


class Numbers(dict[int, Any]):
    """Python numbers of an iteration, by index; sizes follow from their roots when they are asked for.

    Args:
        sizes: The sizes of a step's paths, by index.
        strict: Whether roots take only values that their sizes cover.
    """

    def __init__(self, sizes: dict[int, Size], *, strict: bool = True) -> None:
        super().__init__()
        self._sizes = sizes
        self._strict = strict
        self._new: list[int] = []

    def __missing__(self, index: int) -> int | None:
        """Compute a size; return None for a root without a value, and what follows from it."""
        size = self._sizes.get(index)
        if size is None or not size.terms:
            return None
        total = 0
        for coefficient, roots in size.terms:
            values: list[Any] = [self.get(root) for root in roots]
            if None in values:
                return None
            total += coefficient * math.prod(values)
        self[index] = total
        self._new.append(index)
        return total

    def take(self, index: int, value: Any) -> bool:
        """Return whether a size has a value; a root without one takes it, if it may have it."""
        if type(value) is not int:
            return False
        known = self[index]
        if known is not None:
            return bool(known == value)
        size = self._sizes[index]
        if size.terms or value < size.least or (self._strict and not size.covers(value)):
            return False
        self[index] = value
        self._new.append(index)
        return True

    def keep(self) -> None:
        """Keep the sizes that were found since the last call."""
        self._new.clear()

    def undo(self) -> None:
        """Forget the sizes that were found since the last call of `keep`."""
        for index in self._new:
            del self[index]
        self._new.clear()

    def copy(self, others: dict[int, Any] | None = None) -> Numbers:
        """Return a copy with other numbers added."""
        made = Numbers(self._sizes, strict=self._strict)
        made.update(self)
        made.update(others or {})
        return made

    def independent(self) -> dict[int, Any]:
        """Return the numbers that are no sums of others."""
        return {index: value for index, value in self.items() if index >= 0} | self.roots()

    def roots(self) -> dict[int, int]:
        """Return the values of roots."""
        return {index: value for index, value in self.items() if index < 0 and not self._sizes[index].terms}


# -- patterns ------------------------------------------------------------------------------------------------


def _is_size(leaf: Any) -> bool:
    return isinstance(leaf, Number) and leaf.index < 0


def is_sized(pattern: Any) -> bool:
    """Return whether a pattern of a call, or what is known about a tensor, holds sizes."""
    if isinstance(pattern, TensorSpec):
        return pattern.sized
    if isinstance(pattern, (tuple, list)):
        return any(map(is_sized, pattern))
    if isinstance(pattern, dict):
        return any(map(is_sized, pattern.values()))
    return _is_size(pattern)


def is_instance(pattern: Any, value: Any, numbers: Numbers) -> bool:
    """Return whether a pattern is a value for some numbers; roots take the integers in their places."""
    if pattern == value:
        return True
    if isinstance(pattern, Number):
        return pattern.index < 0 and numbers.take(pattern.index, getattr(value, "value", value))
    if isinstance(pattern, TensorSpec):
        return value.same_but_geometry(pattern) and is_instance(pattern.geometry(), value.geometry(), numbers)
    if isinstance(pattern, dict):
        return (
            isinstance(value, dict)
            and list(pattern) == list(value)
            and is_instance([*pattern.values()], [*value.values()], numbers)
        )
    if isinstance(pattern, (tuple, list)):
        return (
            isinstance(value, type(pattern))
            and len(pattern) == len(value)
            and all(is_instance(each, other, numbers) for each, other in zip(pattern, value, strict=True))
        )
    return False


def has_geometry(tensor: Any, spec: TensorSpec, numbers: Numbers) -> bool:
    """Return whether an object is a tensor with sizes, strides and offset of a spec; roots take its sizes."""
    return (
        isinstance(tensor, Tensor)
        and tensor.layout is torch.strided
        and is_instance(
            spec.geometry(), (tuple(tensor.shape), tensor.stride(), tensor.storage_offset()), numbers
        )
    )


def at(spec: TensorSpec, numbers: Numbers) -> TensorSpec:
    """Return what is known about a tensor, with integers in place of its sizes."""
    if not spec.sized:
        return spec
    return replace(
        spec,
        shape=torch.Size(_integer(each, numbers) for each in spec.shape),
        stride=tuple(_integer(each, numbers) for each in spec.stride),
        offset=_integer(spec.offset, numbers),
        sized=False,
    )


def _integer(pattern: Any, numbers: Numbers) -> Any:
    return numbers[pattern.index] if _is_size(pattern) else pattern


# -- formulas ------------------------------------------------------------------------------------------------


class SizeFinder:
    """Finds how integers of recorded iterations follow from one another.

    Args:
        sizes: The sizes of a step's paths, by index; new ones are added by `add`.
        roots: Values of known roots in each of the iterations, by index.
    """

    def __init__(self, sizes: dict[int, Size], roots: dict[int, tuple[int, ...]]) -> None:
        self._sizes = sizes
        self.roots = dict(roots)
        self._found = {values: index for index, values in roots.items()}
        self._new: dict[int, Size] = {}

    def size(self, values: Sequence[int], *, least: int | None, bounded: bool = True) -> Number | None:
        """Return the size with these values in the iterations, or None if none is found.

        Args:
            values: Its values.
            least: The smallest value that it may have as a root; None if it is no root.
            bounded: Whether as a root it takes only values between those that were recorded.
        """
        key = tuple(values)
        if key in self._found:
            return Number(self._found[key])
        terms = self._sum(key, may_be_root=least is not None)
        if terms is not None:
            return self._added(key, Size(terms=terms))
        if (
            least is None
            or len(key) < SAMPLES + len(self.roots)
            or len(set(key)) < SAMPLES
            or min(key) < least
        ):
            return None
        low, high = (min(key), max(key)) if bounded else (least, sys.maxsize)
        root = self._added(key, Size(least=least, low=low, high=high))
        self.roots[root.index] = key
        return root

    def _added(self, values: tuple[int, ...], size: Size) -> Number:
        index = min(self._sizes | self._new, default=0) - 1
        self._new[index] = size
        self._found[values] = index
        return Number(index)

    def _sum(
        self, values: tuple[int, ...], *, may_be_root: bool
    ) -> tuple[tuple[int, tuple[int, ...]], ...] | None:
        """Return a multiple of a product, a multiple of one and an integer, or multiples of two products.

        There are many sums of two products, so one more record must agree, and a root is none.
        """
        products = list(self._products())
        for roots, product in products:
            factors = {
                divmod(value, each) if each else (0, 1) for value, each in zip(values, product, strict=True)
            }
            (factor, rest), *others = factors
            if not rest and not others:
                return ((factor, roots),)
        ones: tuple[tuple[int, ...], tuple[int, ...]] = ((), (1,) * len(values))
        sums = [(each, ones) for each in products]
        if len(values) > SAMPLES and not may_be_root:
            sums += itertools.combinations(products, 2)
        for (one, left), (two, right) in sums:
            coefficients = _coefficients(left, right, values)
            if coefficients is not None:
                return (coefficients[0], one), (coefficients[1], two)
        return None

    def _products(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        for degree in range(1, 4 if len(self.roots) <= _FEW_ROOTS else 3):
            for roots in itertools.combinations_with_replacement(self.roots, degree):
                columns = [self.roots[root] for root in roots]
                yield roots, tuple(math.prod(each) for each in zip(*columns, strict=True))

    def add(self) -> None:
        """Add the sizes that were found to those of the step's paths."""
        self._sizes.update(self._new)


def _coefficients(
    lefts: Sequence[int], rights: Sequence[int], values: Sequence[int]
) -> tuple[int, int] | None:
    """Return the integers with which two columns add up to a third in at least three rows; None without."""
    rows = sorted(set(zip(lefts, rights, values, strict=True)))
    if len(rows) < SAMPLES:
        return None
    (a, b, v), (c, d, w) = rows[0], rows[-1]
    determinant = a * d - b * c
    if not determinant:
        return None
    one, rest = divmod(v * d - b * w, determinant)
    two, other = divmod(a * w - v * c, determinant)
    fits = not rest and not other and all(one * left + two * right == value for left, right, value in rows)
    return (one, two) if fits else None
