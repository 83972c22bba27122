"""Index maps against NumPy: every map is expanded to the offsets of all elements."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunebench.index_map import Gather, Guard, IndexMap, common_shape, row_major, simplified

MISSING = -(2**40)


def expanded(index_map: IndexMap) -> np.ndarray:
    """Return the offset of each element in order; MISSING where a guard does not hold."""
    index = np.stack(np.meshgrid(*map(np.arange, index_map.shape), indexing="ij"), -1).reshape(
        -1, len(index_map.shape)
    )
    offsets = index_map.start + index @ np.array(index_map.strides, np.int64)
    for guard in index_map.guards:
        limited = guard.start + index @ np.array(guard.coefficients, np.int64)
        offsets = np.where((limited >= 0) & (limited < guard.extent), offsets, MISSING)
    return offsets


@st.composite
def views(draw: st.DrawFn, elements: int) -> IndexMap:
    """Return a permuted, sliced, broadcast or flipped view of a contiguous tensor with some elements."""
    shape = draw(st.sampled_from([s for s in SHAPES if math.prod(s) == elements]))
    strides, extents, start = list(row_major(shape)), list(shape), 0
    for axis in range(len(shape)):
        if draw(st.booleans()):
            first = draw(st.integers(0, extents[axis] - 1))
            start, extents[axis] = start + first * strides[axis], extents[axis] - first
        if draw(st.integers(0, 5)) == 0:
            start, strides[axis] = start + (extents[axis] - 1) * strides[axis], -strides[axis]
    order = draw(st.permutations(range(len(shape))))
    extents, strides = [extents[a] for a in order], [strides[a] for a in order]
    if draw(st.booleans()):
        position = draw(st.integers(0, len(extents)))
        extents.insert(position, 3)
        strides.insert(position, 0)
    return IndexMap(tuple(extents), tuple(strides), start)


SHAPES = [
    s for n in (1, 2, 3, 4) for s in itertools.product((1, 2, 3, 4, 6), repeat=n) if math.prod(s) in (24, 36)
]


@st.composite
def padded(draw: st.DrawFn) -> IndexMap:
    """Return a map of a matrix in which rows or windows of columns are limited."""
    rows, cols, pad = draw(st.integers(1, 5)), draw(st.integers(1, 6)), draw(st.integers(0, 2))
    taps, step = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    outputs = (cols + 2 * pad - taps) // step + 1
    if outputs < 1:
        outputs = 1
    shape, strides = (rows, outputs, taps), (cols, step, 1)
    return IndexMap(shape, strides, -pad, (Guard((0, step, 1), -pad, cols),))


def limited(view: IndexMap, axis: int, first: int, count: int) -> IndexMap:
    """Return a wider view of which a range of indices along an axis reads the elements of a view."""
    shape = tuple(extent + 3 if axis == position else extent for position, extent in enumerate(view.shape))
    coefficients = tuple(int(axis == position) for position in range(len(shape)))
    start = view.start - first * view.strides[axis]
    guard = Guard(coefficients, -first, min(count, view.shape[axis]))
    return IndexMap(shape, view.strides, start, (guard,))


@given(st.data())
def test_composition_reads_the_element_at_the_position_of_the_view(data: st.DataObject) -> None:
    inner = data.draw(st.sampled_from((24, 36)).flatmap(views))
    outer = data.draw(views(inner.elements) if inner.elements in (24, 36) else views(24))
    if data.draw(st.booleans()):
        axis = data.draw(st.integers(0, len(outer.shape) - 1))
        first = data.draw(st.integers(-2, outer.shape[axis]))
        outer = limited(outer, axis, first, data.draw(st.integers(1, 4)))
    positions = expanded(outer)
    if max(positions) >= inner.elements:
        return
    composed = inner.after(outer)
    if composed is not None:
        exists = positions != MISSING
        read = np.where(exists, expanded(inner)[np.where(exists, positions, 0)], MISSING)
        assert (expanded(composed) == read).all()


@given(st.data())
def test_simplified_maps_read_the_same_elements(data: st.DataObject) -> None:
    view = data.draw(views(24) | padded())
    plain_map = IndexMap.contiguous(view.shape)
    inner = data.draw(st.integers(0, len(view.shape)))
    (simple, plain), inner_axes = simplified([view, plain_map], inner)
    assert (expanded(simple) == expanded(view)).all()
    assert (expanded(plain) == expanded(plain_map)).all()
    assert math.prod(simple.shape[len(simple.shape) - inner_axes :]) == math.prod(
        view.shape[len(view.shape) - inner :]
    )


@given(views(24) | views(36) | padded())
def test_counts_and_limits_of_offsets_are_those_of_all_elements(found: IndexMap) -> None:
    offsets = expanded(found)
    read = set(offsets[offsets != MISSING])
    low, high = found.offsets()
    assert not read or (low <= min(read) and max(read) <= high)
    assert found.touched() == len(read)


def test_guards_that_exclude_one_another_read_nothing() -> None:
    never = Guard((1,), 7, 4)
    first, later = Guard((1,), 0, 1), Guard((1,), -3, 4)
    assert IndexMap((8,), (1,), 7, (never, first)).offsets() == (0, 0)
    assert IndexMap((8,), (1,), -3, (first, later)).offsets() == (0, 0)
    assert IndexMap((8,), (1,), -3, (later, Guard((1,), 0, 5))).offsets() == (0, 1)


def test_guards_of_several_axes_limit_the_offsets_of_windows() -> None:
    windows = IndexMap((4, 3), (2, 1), -1, (Guard((2, 1), -1, 8),))
    assert windows.offsets() == (0, 7)
    assert windows.touched() == 8


def test_views_that_cross_rows_of_a_slice_have_no_affine_map() -> None:
    half = IndexMap((4, 3), (6, 1))
    assert half.after(IndexMap((6,), (2,))) is None
    assert half.after(IndexMap((6, 2), (2, 1))) is None


def test_axes_are_split_where_a_view_passes_from_one_axis_to_the_next() -> None:
    transposed = IndexMap((4, 3), (1, 4))
    assert transposed.after(IndexMap((12,), (1,))) == IndexMap((4, 3), (1, 4))
    assert transposed.after(IndexMap((2, 3), (6, 1))) == IndexMap((2, 3), (2, 4))


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [(((6, 4), (24,)), (6, 4)), (((6, 4), (2, 12)), (2, 3, 4)), (((6, 4), (8, 3)), None)],
)
def test_common_shape_is_the_coarsest_split(shapes: tuple[tuple[int, ...], ...], expected: object) -> None:
    assert common_shape(shapes) == expected


def test_split_maps_read_the_same_elements() -> None:
    whole = IndexMap((6, 4), (1, 6), 2, (Guard((1, 0), -1, 4),))
    assert (expanded(whole.split((2, 3, 2, 2))) == expanded(whole)).all()


def test_split_keeps_axes_of_one_element() -> None:
    assert IndexMap((4,), (3,)).split((2, 2, 1)) == IndexMap((2, 2, 1), (6, 3, 3))


def test_composition_needs_positions_within_the_guards_only() -> None:
    halves = IndexMap((6, 4), (8, 1), 4)
    padded_rows = IndexMap((6, 8), (4, 1), -2, (Guard((0, 1), -2, 4),))
    assert halves.after(padded_rows) == IndexMap((6, 8), (8, 1), 2, (Guard((0, 1), -2, 4),))


ROWS = IndexMap((7, 5), (0, 1), gathers=(Gather("rows", (1, 0), 0, 5, 11),))


def test_composition_with_a_gather_is_affine_in_the_index() -> None:
    transposed = IndexMap((11, 5), (1, 11), 3)
    assert transposed.after(ROWS) == IndexMap((7, 5), (0, 11), 3, (), (Gather("rows", (1, 0), 0, 1, 11),))


def test_composition_is_refused_if_a_guard_or_a_gather_depends_on_an_index() -> None:
    assert IndexMap((11, 5), (5, 1), 0, (Guard((1, 0), 0, 9),)).after(ROWS) is None
    assert IndexMap((11, 5), (0, 1), gathers=(Gather("others", (1, 0), 0, 5, 4),)).after(ROWS) is None
    assert IndexMap((10, 5), (5, 1)).after(ROWS) is None


def test_view_of_gathered_elements_reads_their_indices() -> None:
    second = IndexMap((3, 5), (10, 1), 5)
    assert ROWS.after(second) == IndexMap((3, 5), (0, 1), 0, (), (Gather("rows", (2, 0), 1, 5, 11),))
