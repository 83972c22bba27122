"""Sizes that change from iteration to iteration: integers of a path that follow from those of given tensors.

A size is a `Number` with a negative index. A root is the size of a given tensor, or an integer that Python
passed to a call; other sizes are sums of products of roots.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from tunebench.torch.coexecution._call import Constant, Number, Structure, TensorSpec

__all__ = ["SAMPLES", "Numbers", "Size", "SizeFinder", "at", "has_geometry", "is_instance", "is_sized"]

_DEGREES = {1: 3, 2: 3, 3: 3}
"""Number of sizes in a product by number of roots, else 2: strides of attention scores (N, H, L, L) have 3."""

SAMPLES = 3
"""Number of values of a root that must be known: two decide a formula of two coefficients, one checks it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """An integer of a path.

    Attributes:
        terms: Products of roots, each with a coefficient; none for a root.
        denominator: What their sum is divided by.
        least: For a root: the smallest value it may ever have.
        low: For a root: the smallest value that was recorded.
        high: For a root: the largest value that was recorded.
        step: For a root: the number whose remainder decides which formulas are integers.
        remainders: For a root: the remainders that were recorded.
    """

    terms: tuple[tuple[int, tuple[int, ...]], ...] = ()
    denominator: int = 1
    least: int = 0
    low: int = 0
    high: int = 0
    step: int = 1
    remainders: frozenset[int] = frozenset({0})

    def covers(self, value: int) -> bool:
        """Return whether a value of a root lies between those that were recorded."""
        return self.low <= value <= self.high and value % self.step in self.remainders

    def widened(self, value: int) -> Size:
        """Return the root after a value of it was recorded."""
        return replace(
            self,
            low=min(self.low, value),
            high=max(self.high, value),
            remainders=self.remainders | {value % self.step},
        )


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
        """Compute a size; return None for a root without a value, or if the size is no integer."""
        size = self._sizes.get(index)
        if size is None or not size.terms:
            return None
        total = 0
        for coefficient, roots in size.terms:
            for root in roots:
                value = self[root]
                if value is None:
                    return None
                coefficient *= value
            total += coefficient
        value, rest = divmod(total, size.denominator)
        if rest:
            return None
        self[index] = value
        self._new.append(index)
        return value

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
    if isinstance(pattern, Structure):
        return is_sized(pattern.parts)
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
        return _same_but_geometry(pattern, value) and is_instance(
            _geometry(pattern), _geometry(value), numbers
        )
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


def _geometry(spec: TensorSpec) -> tuple[Any, ...]:
    return tuple(spec.shape), spec.stride, spec.offset


def _same_but_geometry(one: TensorSpec, two: TensorSpec) -> bool:
    geometry = {name: getattr(two, name) for name in ("shape", "stride", "offset", "sized")}
    return replace(one, **geometry) == two


def has_geometry(tensor: Any, spec: TensorSpec, numbers: Numbers) -> bool:
    """Return whether an object is a tensor with sizes, strides and offset of a spec; roots take its sizes."""
    return (
        isinstance(tensor, Tensor)
        and tensor.layout is torch.strided
        and is_instance(
            _geometry(spec), (tuple(tensor.shape), tensor.stride(), tensor.storage_offset()), numbers
        )
    )


def at(pattern: Any, numbers: Numbers) -> Any:
    """Return a pattern of a call, or what is known about a tensor, with integers in place of its sizes."""
    if isinstance(pattern, TensorSpec):
        return pattern if not pattern.sized else replace(
            pattern,
            shape=torch.Size(_integer(each, numbers) for each in pattern.shape),
            stride=tuple(_integer(each, numbers) for each in pattern.stride),
            offset=_integer(pattern.offset, numbers),
            sized=False,
        )  # fmt: skip
    if isinstance(pattern, Structure):
        return pattern.made(at(pattern.parts, numbers))
    if isinstance(pattern, dict):
        return {key: at(each, numbers) for key, each in pattern.items()}
    if isinstance(pattern, (tuple, list)):
        return type(pattern)(at(each, numbers) for each in pattern)
    return Constant(numbers[pattern.index]) if _is_size(pattern) else pattern


def _integer(pattern: Any, numbers: Numbers) -> Any:
    return numbers[pattern.index] if _is_size(pattern) else pattern


# -- formulas ------------------------------------------------------------------------------------------------


class SizeFinder:
    """Finds how integers of recorded iterations follow from one another.

    Args:
        sizes: The sizes of a step's paths, by index; new ones are added by `add`.
        known: Values of known roots in each of the iterations, by index.
    """

    def __init__(self, sizes: dict[int, Size], known: dict[int, tuple[int, ...]]) -> None:
        self._sizes = sizes
        self._next = min(sizes, default=0) - 1
        self.new: dict[int, Size] = {}
        self.values: dict[int, tuple[int, ...]] = dict(known)
        self._found: dict[tuple[int, ...], int] = {values: index for index, values in known.items()}

    def size(self, values: Sequence[int], *, least: int | None) -> Number | None:
        """Return the size with these values in the iterations, or None if none is found.

        Args:
            values: Its values.
            least: The smallest value that it may have as a root; None if it is no root.
        """
        key = tuple(values)
        index = self._found.get(key)
        if index is None:
            formula = next(self._formulas(key, may_be_root=least is not None), None)
            if formula is not None:
                index = self._added(key, formula)
            elif least is not None and self._may_be_root(key, least):
                index = self._added(key, Size(least=least, low=min(key), high=max(key)))
                self.values[index] = key
        return None if index is None else Number(index)

    def _may_be_root(self, values: tuple[int, ...], least: int) -> bool:
        return (
            len(values) >= SAMPLES + len(self.values) and len(set(values)) >= SAMPLES and min(values) >= least
        )

    def _added(self, values: tuple[int, ...], size: Size) -> int:
        index = self._next
        self._next -= 1
        self.new[index] = size
        self._found[values] = index
        return index

    def _formulas(self, values: tuple[int, ...], *, may_be_root: bool) -> Iterator[Size]:
        """Return multiples of a product, then of a root and an integer, then sums of two products.

        A root could be such a sum by chance.
        """
        products = list(self._products())
        for roots, product in products:
            if all(product):
                first, *others = (Fraction(value, each) for value, each in zip(values, product, strict=True))
                if all(each == first for each in others):
                    yield from _sums([(first, roots)])
        ones = (1,) * len(values)
        for roots, product in products:
            factors = _factors(product, ones, values)
            if factors is not None:
                yield from _sums([(factors[0], roots), (factors[1], ())])
        if not may_be_root:
            for (one, left), (two, right) in itertools.combinations(products, 2):
                factors = _factors(left, right, values)
                if factors is not None and all(factor.denominator == 1 for factor in factors):
                    yield from _sums([(factors[0], one), (factors[1], two)])

    def _products(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        for degree in range(1, _DEGREES.get(len(self.values), 2) + 1):
            for roots in itertools.combinations_with_replacement(self.values, degree):
                columns = [self.values[root] for root in roots]
                yield roots, tuple(math.prod(each) for each in zip(*columns, strict=True))

    def add(self) -> None:
        """Add the sizes that were found to those of the step's paths."""
        for size in list(self.new.values()):
            for _, roots in size.terms:
                for root in roots:
                    known = self.new.get(root) or self._sizes[root]
                    step = math.lcm(known.step, size.denominator)
                    if step != known.step or root in self.new:
                        remainders = frozenset(value % step for value in self.values[root])
                        self.new[root] = replace(known, step=step, remainders=remainders)
        self._sizes.update(self.new)


def _sums(terms: list[tuple[Fraction, tuple[int, ...]]]) -> Iterator[Size]:
    """Return the size that is a sum of products, if the remainder of one root decides that it is an integer."""
    denominator = math.lcm(*(factor.denominator for factor, _ in terms))
    if denominator == 1 or len({root for _, roots in terms for root in roots}) == 1:
        yield Size(
            terms=tuple((int(factor * denominator), roots) for factor, roots in terms),
            denominator=denominator,
        )


def _factors(
    lefts: Sequence[int], rights: Sequence[int], values: Sequence[int]
) -> tuple[Fraction, Fraction] | None:
    """Return two factors with which two columns add up to a third in at least three rows; None without."""
    rows = sorted(set(zip(lefts, rights, values, strict=True)))
    if len(rows) < SAMPLES:
        return None
    (a, b, v), (c, d, w) = rows[0], rows[-1]
    determinant = a * d - b * c
    if not determinant:
        return None
    one, two = Fraction(v * d - b * w, determinant), Fraction(a * w - v * c, determinant)
    return (one, two) if all(one * left + two * right == value for left, right, value in rows) else None
