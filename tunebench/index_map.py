"""Affine maps from an index space to offsets in memory: strides, broadcasts, permutations, slices, padding.

An `IndexMap` describes how a kernel reads one operand: element ``i`` of an N-dimensional index space is at
offset ``start + sum(i * strides)`` of the operand's memory. A stride of 0 broadcasts. A `Guard` limits the
elements that exist; the operand is 0 elsewhere, as for padding and for the parts of a concatenation. A
`Gather` adds a number that is read from memory, as for an embedding.

An axis can be split into several, and adjacent axes can be merged if the steps of every operand permit it.
`simplified` returns the form with the fewest axes.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tunebench._lazy import np

__all__ = ["Gather", "Guard", "IndexMap", "common_shape", "row_major", "simplified"]

MOST_KNOWN = 2**14
"""Most results that are kept of each method: the groups of a model have many maps in common."""

MOST_COUNTED = 2**20
"""Most offsets of overlapping axes that are counted exactly; a lower bound replaces a larger count."""


@dataclass(frozen=True, slots=True)
class Guard:
    """The condition ``0 <= start + sum(i * coefficients) < extent`` for an element to exist.

    Attributes:
        coefficients: Factor of the index along each axis.
        start: Constant term.
        extent: Exclusive upper limit.
    """

    coefficients: tuple[int, ...]
    start: int
    extent: int

    def span(self, shape: Sequence[int], coefficients: Sequence[int] | None = None) -> tuple[int, int]:
        """Return the smallest and largest value of the limited sum over all indices of a shape."""
        low, high = _span(shape, self.coefficients if coefficients is None else coefficients)
        return self.start + low, self.start + high

    def holds_everywhere(self, shape: Sequence[int]) -> bool:
        """Return whether the condition holds for all indices of a shape."""
        low, high = self.span(shape)
        return low >= 0 and high < self.extent


@dataclass(frozen=True, slots=True)
class Gather:
    """A summand of an offset that is read from memory: an index times a step.

    The index of an element is the integer at offset ``start + sum(i * coefficients)`` of `source`. It must be
    from 0 to ``extent - 1``, or from ``-extent`` if negative indices count from the end.

    Attributes:
        source: Name of the tensor of indices.
        coefficients: Step in its memory along each axis.
        start: Offset of the first index.
        step: Factor of an index in the offset of the operand.
        extent: Number of different indices.
        wraps: Whether negative indices count from the end.
    """

    source: str
    coefficients: tuple[int, ...]
    start: int
    step: int
    extent: int
    wraps: bool = False


@dataclass(frozen=True, slots=True)
class IndexMap:
    """The offset in memory of each element of an index space.

    Attributes:
        shape: Extents of the index space, outermost first.
        strides: Step in memory along each axis, in elements.
        start: Offset of the first element.
        guards: Conditions for an element to exist; the operand is 0 where one of them does not hold.
        gathers: Indices in memory that are added to the offset. They are read where the guards hold.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int = 0
    guards: tuple[Guard, ...] = ()
    gathers: tuple[Gather, ...] = ()

    @classmethod
    def contiguous(cls, shape: Sequence[int]) -> IndexMap:
        """Return the map of a C-contiguous tensor."""
        return cls(tuple(shape), row_major(shape))

    @property
    def elements(self) -> int:
        """Number of elements of the index space."""
        return math.prod(self.shape)

    @property
    def is_contiguous(self) -> bool:
        """Whether elements are read in the order of memory, from its beginning and without gaps."""
        steps = zip(self.shape, self.strides, row_major(self.shape), strict=True)
        is_plain = not self.start and not self.guards and not self.gathers
        return is_plain and all(e == 1 or s == r for e, s, r in steps)

    def indices(self, gather: Gather) -> IndexMap:
        """Return the map of the indices that a gather of this map reads."""
        return IndexMap(self.shape, gather.coefficients, gather.start, self.guards)

    def rows(self) -> tuple[tuple[int, ...], ...]:
        """Return all rows of factors along the axes: strides, and coefficients of guards and gathers."""
        guards, gathers = ([term.coefficients for term in terms] for terms in (self.guards, self.gathers))
        return (self.strides, *guards, *gathers)

    def with_rows(self, shape: Sequence[int], change: Callable[[tuple[int, ...]], Sequence[int]]) -> IndexMap:
        """Return the same map over other axes.

        Args:
            shape: Extents of the new axes.
            change: Returns a row of factors along the new axes.
        """

        def changed(term: Any) -> Any:
            return dataclasses.replace(term, coefficients=tuple(change(term.coefficients)))

        strides = tuple(change(self.strides))  # `change` is called in the order of `rows`
        guards, gathers = tuple(map(changed, self.guards)), tuple(map(changed, self.gathers))
        return IndexMap(tuple(shape), strides, self.start, guards, gathers)

    @functools.lru_cache(MOST_KNOWN)  # noqa: B019 - bounded
    def offsets(self) -> tuple[int, int]:
        """Return limits of the offsets that are read: at most the smallest one, and at least the largest.

        If guards exclude one another, nothing is read, and the limits are 0.
        """
        if any(first > last for first, last in map(self._permitted, self.guards)):
            return 0, 0
        low = high = self.start
        free = set(range(len(self.shape)))
        for guard, axes, step in self._guarded_dimensions():
            limits = [step * end for end in self._permitted(guard)]
            low, high = low + min(limits), high + max(limits)
            free -= axes
        rest = sorted(free)
        below, above = _span([self.shape[a] for a in rest], [self.strides[a] for a in rest])
        gathered = [(gather.extent - 1) * gather.step for gather in self.gathers]
        below += sum(end for end in gathered if end < 0)
        above += sum(end for end in gathered if end > 0)
        return low + below, high + above

    def _permitted(self, guard: Guard) -> tuple[int, int]:
        """Return the smallest and largest ``sum(i * coefficients)`` that all guards of this sum permit."""
        low, high = _span(self.shape, guard.coefficients)
        for same_sum in self.guards:
            if same_sum.coefficients == guard.coefficients:
                low, high = max(low, -same_sum.start), min(high, same_sum.extent - 1 - same_sum.start)
        return low, high

    def _guarded_dimensions(self) -> Iterator[tuple[Guard, frozenset[int], int]]:
        """Yield guards that limit the index along a dimension of the operand: guard, axes, step in memory."""
        taken: set[int] = set()
        for guard in self.guards:
            axes = frozenset(axis for axis, factor in enumerate(guard.coefficients) if factor)
            steps = {(self.strides[axis], guard.coefficients[axis]) for axis in axes}
            quotients = {stride // factor for stride, factor in steps if stride % factor == 0}
            if axes and not axes & taken and len(quotients) == 1 and all(s % f == 0 for s, f in steps):
                taken |= axes
                yield guard, axes, quotients.pop()

    # -- other shapes ----------------------------------------------------------------------------------------

    @functools.lru_cache(MOST_KNOWN)  # noqa: B019 - bounded
    def split(self, shape: tuple[int, ...]) -> IndexMap:
        """Return the map over a finer shape.

        Args:
            shape: Extents; each extent of this map is the product of consecutive ones (see `common_shape`).
        """
        parts = list(_nested(self.shape, shape))

        def spread(row: Sequence[int]) -> tuple[int, ...]:
            steps = zip(row, parts, strict=True)
            return tuple(step * inner for step, part in steps for inner in row_major(part))

        return self.with_rows(shape, spread)

    @functools.lru_cache(MOST_KNOWN)  # noqa: B019 - bounded
    def after(self, view: IndexMap) -> IndexMap | None:
        """Return the composition of two maps: this map at the positions that another one reads.

        Positions outside of the view's guards do not matter. An index that the view gathers is an index of
        this map; no guard or gather of this map may depend on it.

        Args:
            view: Map to positions among the elements of this map, counted in their order.

        Returns:
            A map over the shape of `view`, whose axes may be split; None if there is no affine map.
        """
        axes = list(zip(view.shape, view.strides, view._limits(), strict=True))
        pieces = [piece for axis in axes for piece in _pieces(*axis, self.shape)]
        shape = tuple(extent for extent, _, _ in pieces)
        digits = [_digits(stride, self.shape) for _, stride, _ in pieces]
        gathered = [_digits(gather.step, self.shape) for gather in view.gathers]
        if any(_dot(digit, row) for digit in gathered for row in self.rows()[1:]):
            return None
        base = view.start + sum(low * stride for _, stride, (low, _) in pieces)
        first = list(_digits(base, self.shape))
        counts = [high - low + 1 for _, _, (low, high) in pieces]
        counts += [gather.extent for gather in view.gathers]
        for axis, extent in enumerate(self.shape):
            low, high = _span(counts, [digit[axis] for digit in (*digits, *gathered)])
            if first[axis] + low < 0 or first[axis] + high >= extent:
                return None
            first[axis] -= sum(
                low * digit[axis] for digit, (_, _, (low, _)) in zip(digits, pieces, strict=True)
            )

        def composed(row: Sequence[int]) -> tuple[int, ...]:
            return tuple(_dot(digit, row) for digit in digits)

        def moved(term: Any) -> Any:
            start = term.start + _dot(first, term.coefficients)
            return dataclasses.replace(term, coefficients=composed(term.coefficients), start=start)

        read = view.split(shape)
        gathers = tuple(
            dataclasses.replace(gather, step=_dot(digit, self.strides))
            for digit, gather in zip(gathered, read.gathers, strict=True)
        )
        return IndexMap(
            shape,
            composed(self.strides),
            self.start + _dot(first, self.strides),
            (*map(moved, self.guards), *read.guards),
            (*map(moved, self.gathers), *gathers),
        )

    def _limits(self) -> list[tuple[int, int]]:
        """Return the first and the last index along each axis that guards of this axis alone permit."""
        limits = [(0, extent - 1) for extent in self.shape]
        for guard in self.guards:
            axes = [axis for axis, factor in enumerate(guard.coefficients) if factor]
            if len(axes) == 1 and guard.coefficients[axes[0]] == 1:
                low, high = limits[axes[0]]
                limits[axes[0]] = max(low, -guard.start), min(high, guard.extent - 1 - guard.start)
        return limits

    # -- memory ----------------------------------------------------------------------------------------------

    @functools.lru_cache(MOST_KNOWN)  # noqa: B019 - bounded
    def touched(self) -> int:
        """Return the number of distinct offsets that are read, or a lower bound of it.

        For gathers it is the expected number, for random indices of which each is as likely as any other.
        """
        dimensions = [self._gathered()] if self.gathers else []
        free = {axis for axis, (e, s) in enumerate(zip(self.shape, self.strides, strict=True)) if e > 1 and s}
        for guard, axes, step in self._guarded_dimensions():
            free -= axes
            if step:
                limited = [(self.shape[axis], guard.coefficients[axis]) for axis in sorted(axes)]
                dimensions.append((abs(step), *_count_within(limited, guard)))
        for group in _overlapping([(self.shape[axis], abs(self.strides[axis])) for axis in free]):
            (_, step), (count, span) = group[0], _count(group)
            dimensions.append((step, count, span // step))
        total, covered = 1, 0
        for step, count, span in sorted(dimensions):
            if count == 0 or step > covered:  # else offsets may coincide, and only one index counts
                total, covered = total * count, covered + span * step
        return total

    def _gathered(self) -> tuple[int, int, int]:
        """Return the smallest step of the gathers, the expected number of different indices, the largest."""
        along = {axis for gather in self.gathers for axis, factor in enumerate(gather.coefficients) if factor}
        along = {axis for axis in along if not self.strides[axis]}
        count = math.prod(self.shape[axis] for axis in along)
        if len(self.gathers) == 1:
            (gather,) = self.gathers
            row = tuple(factor if axis in along else 0 for axis, factor in enumerate(gather.coefficients))
            count = IndexMap(self.shape, row, gather.start, self.guards).touched()
        extent = math.prod(gather.extent for gather in self.gathers)
        return min(abs(gather.step) for gather in self.gathers), _different(count, extent), extent - 1


def simplified(maps: Sequence[IndexMap], inner: int = 0) -> tuple[list[IndexMap], int]:
    """Return maps over the same index space with as few axes as possible.

    Axes of extent 1 and guards that always hold are left out. Adjacent axes are merged if all maps step from
    one to the other as in a contiguous tensor. One axis of extent 1 is left if there is no other.

    Args:
        maps: Maps of the same shape.
        inner: Number of innermost axes that are not merged with the others, such as the axes of a reduction.

    Returns:
        The maps, and the number of their axes that come from the `inner` ones.
    """
    shape = maps[0].shape
    maps = [
        dataclasses.replace(
            index, guards=tuple(guard for guard in index.guards if not guard.holds_everywhere(shape))
        )
        for index in maps
    ]
    rows = [row for index in maps for row in index.rows()]
    extents: list[int] = []
    steps: list[list[int]] = []
    inner_axes = 0
    for axis, extent in enumerate(shape):
        axis_steps, is_inner = [row[axis] for row in rows], axis >= len(shape) - inner
        if extent == 1:
            continue
        may_merge = bool(extents) and bool(inner_axes) == is_inner
        if may_merge and steps[-1] == [step * extent for step in axis_steps]:
            extents[-1], steps[-1] = extents[-1] * extent, axis_steps
        else:
            extents.append(extent)
            steps.append(axis_steps)
            inner_axes += is_inner
    if not extents:
        extents, steps, inner_axes = [1], [[0] * len(rows)], min(inner, 1)
    merged = zip(*steps, strict=True)
    return [index.with_rows(extents, lambda row: next(merged)) for index in maps], inner_axes


def common_shape(shapes: Iterable[Sequence[int]]) -> tuple[int, ...] | None:
    """Return the coarsest shape that splits all shapes of the same size; None if their axes do not nest."""
    boundaries: set[int] = {1}
    total = 1
    for shape in shapes:
        total = math.prod(shape)
        boundaries |= set(itertools.accumulate(reversed(shape), int.__mul__))
    ordered = sorted(boundaries)
    if ordered[-1] != total or any(after % before for before, after in itertools.pairwise(ordered)):
        return None
    return tuple(after // before for before, after in itertools.pairwise(ordered))[::-1]


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a C-contiguous tensor."""
    return tuple(itertools.accumulate(reversed(shape[1:]), int.__mul__, initial=1))[::-1] if shape else ()


def _nested(shape: Sequence[int], finer: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield, for each extent, the consecutive extents of a finer shape whose product it is."""
    rest = list(finer)
    for axis, extent in enumerate(shape):
        part: list[int] = []
        while math.prod(part) < extent or (rest and axis == len(shape) - 1):
            part.append(rest.pop(0))
        yield tuple(part)


def _span(shape: Sequence[int], row: Sequence[int]) -> tuple[int, int]:
    """Return the smallest and the largest sum of indices times coefficients."""
    extremes = [(extent - 1) * step for extent, step in zip(shape, row, strict=True)]
    return sum(end for end in extremes if end < 0), sum(end for end in extremes if end > 0)


def _digits(position: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the indices of a position in row-major order; all are negative for a negative position."""
    sign, rest, digits = (-1 if position < 0 else 1), abs(position), []
    for step in row_major(shape):
        digits.append(sign * (rest // step))
        rest %= step
    return tuple(digits)


def _digit_axes(extent: int, stride: int, shape: Sequence[int]) -> list[tuple[int, int]]:
    """Split an axis of positions where it passes to the next axis of a shape: extents and strides."""
    for step, size in zip(row_major(shape), shape, strict=True):
        factor, rest = divmod(abs(stride), step)
        if not stride or not 0 < factor < size:
            continue
        count = size // factor
        if rest or size % factor or extent <= count or extent % count:
            break
        return [*_digit_axes(extent // count, stride * count, shape), (count, stride)]
    return [(extent, stride)]


def _pieces(
    extent: int, stride: int, limits: tuple[int, int], shape: Sequence[int]
) -> list[tuple[int, int, tuple[int, int]]]:
    """Split an axis of positions as `_digit_axes`, unless guards limit it: extents, strides and limits."""
    if limits != (0, extent - 1):
        return [(extent, stride, limits)]
    return [(count, step, (0, count - 1)) for count, step in _digit_axes(extent, stride, shape)]


def _overlapping(axes: Iterable[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Yield the groups of axes, as extents and strides, whose offsets may coincide; smaller strides first."""
    group: list[tuple[int, int]] = []
    for extent, stride in sorted(axes, key=lambda axis: axis[1]):
        if group and stride > sum((e - 1) * s for e, s in group):
            yield group
            group = []
        group.append((extent, stride))
    if group:
        yield group


def _sums(axes: Sequence[tuple[int, int]]) -> np.ndarray | None:
    """Return the distinct sums of indices times coefficients, ascending; None if there are too many."""
    sums = np.zeros(1, np.int64)
    for extent, factor in axes:
        if len(sums) * extent > MOST_COUNTED:
            return None
        sums = np.unique(sums[:, None] + np.arange(extent) * factor)
    return sums


def _count(axes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the number of distinct sums, or a lower bound of it, and the largest sum."""
    span = sum((extent - 1) * factor for extent, factor in axes)
    values = _sums(axes) if len(axes) > 1 else None
    return (axes[0][0] if values is None else len(values)), span


def _count_within(axes: Sequence[tuple[int, int]], guard: Guard) -> tuple[int, int]:
    """Return the number of distinct limited sums that a guard permits, or a lower bound, and their range."""
    low, high = guard.span([extent for extent, _ in axes], [factor for _, factor in axes])
    first, last = max(low, 0), min(high, guard.extent - 1)
    values = _sums(axes)
    if values is None:
        return 1, last - first
    values = values + guard.start
    return int(((values >= 0) & (values < guard.extent)).sum()), last - first


def _different(count: int, extent: int) -> int:
    """Return the expected number of different values of random indices below an extent, at least 1."""
    if count == 0 or extent == 1:
        return min(count, extent)
    return max(1, round(-extent * math.expm1(count * math.log1p(-1 / extent))))


def _dot(first: Sequence[int], second: Sequence[int]) -> int:
    return sum(a * b for a, b in zip(first, second, strict=True))
