"""Strided operators: canonical texts, refusals, traffic, and references against NumPy's own views."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.kernel_checks import drawn, exact, parser
from tunebench.errors import InputError
from tunebench.workload import Traffic
from tunebench.workloads.operators.strided_elementwise import StridedElementwise
from tunebench.workloads.operators.strided_reduction import StridedReduction

elementwise, reduction = parser(StridedElementwise), parser(StridedReduction)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("shape=2x3x4,dtype=f32,expression=x,operands=x.f32.12_4_1", "shape=24,…,operands=x.f32.1"),
        ("shape=2x1x4,dtype=f32,expression=x,operands=x.f16.1_9_2", "shape=2x4,…,operands=x.f16.1_2"),
        ("shape=2x3x4,dtype=f32,expression=x,operands=x.f32.0_4_1", "shape=2x12,…,operands=x.f32.0_1"),
        ("shape=6,dtype=f32,expression=x,operands=x.f32.1.if1_0_6", "shape=6,…,operands=x.f32.1"),
        ("shape=1x1,dtype=f32,expression=x,operands=x.f32.5_7.at3", "shape=1,…,operands=x.f32.0.at3"),
        (
            "shape=4x6,dtype=f32,expression=y-x,operands=x.f32.6_1+y.f32.1_4",
            "shape=4x6,…,operands=y.f32.1_4+x.f32.6_1",
        ),
    ],
)
def test_equal_computations_have_one_text(text: str, canonical: str) -> None:
    workload = elementwise(text)
    shape, operands = canonical.split(",…,operands=")
    assert (f"shape={workload.shape}", workload.operands) == (shape, operands)


def test_reduced_axes_are_not_merged_with_the_others() -> None:
    whole = reduction("shape=2x3x4x5,dtype=f32,expression=x,operands=x.f32.60_20_5_1,reduce=sum,axes=2")
    assert (whole.shape, whole.axes, whole.kept, whole.terms) == ("6x20", 1, (6,), 20)
    every = reduction("shape=2x3,dtype=f32,expression=x,operands=x.f32.3_1,reduce=max,axes=2")
    assert (every.shape, every.axes, every.kept) == ("6", 1, (1,))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("shape=3x,dtype=f32,expression=x,operands=x.f32.1", "shape='3x' must be extents of 1 or more"),
        (
            "shape=3,dtype=f32,expression=x,operands=x.f32.1_1",
            "must be NAME.TYPE.STRIDES with a stride for each",
        ),
        ("shape=3,dtype=f32,expression=x,operands=x.i32.1", "types: f32, f16, bf16, bool, i8"),
        ("shape=3,dtype=f32,expression=x,operands=x.f32.1+x.f32.1", "each name once"),
        ("shape=3,dtype=f32,expression=x,operands=x.f32.-1", r"reads offsets \(-2, 0\)"),
        ("shape=3,dtype=f32,expression=x+y,operands=x.f32.1", "must be the names of x\\+y: x, y; got x"),
        ("shape=3,dtype=f32,expression=out,operands=out.f32.1", "No operand may be named out"),
        ("shape=3,dtype=f32,expression=1/x,operands=x.f32.1.if1_-1_9", "may divide by 0"),
        ("shape=65536x65536,dtype=f32,expression=x,operands=x.f32.0_1", "of at most 2147483647 elements"),
    ],
)
def test_invalid_operands_are_refused(text: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        elementwise(text)


def test_reduction_over_more_axes_than_there_are_is_refused() -> None:
    with pytest.raises(InputError, match="axes=3 is more than the axes of shape=4x5"):
        reduction("shape=4x5,dtype=f32,expression=x,operands=x.f32.5_1,reduce=sum,axes=3")
    with pytest.raises(InputError, match="have one element"):
        reduction("shape=4x1,dtype=f32,expression=x,operands=x.f32.1_1,reduce=sum")


def test_traffic_counts_each_touched_element_once() -> None:
    broadcast = elementwise("shape=8x6,dtype=f16,expression=x+y,operands=x.f32.12_2+y.f16.0_1")
    assert broadcast.traffic() == Traffic(read_bytes=48 * 4 + 6 * 2, write_bytes=96)
    windows = reduction("shape=7x3,dtype=f32,expression=x,operands=x.f32.2_1,reduce=max")
    assert windows.traffic() == Traffic(read_bytes=15 * 4, write_bytes=28)


def test_references_read_transposes_slices_and_broadcasts() -> None:
    workload = elementwise(
        "shape=5x4x3,dtype=f32,expression=x*y-z,operands=x.f32.1_10_40.at5+y.f32.0_1_0+z.f16.-3_0_-1.at14"
    )
    inputs, references = drawn(workload)
    x, y, z = (exact(inputs)[name] for name in "xyz")
    swapped = np.resize(x, 120).reshape(3, 4, 10)[:, :, 5:].transpose(2, 1, 0)
    expected = swapped * y[:, None] - z.reshape(5, 3)[::-1, ::-1][:, None, :]
    np.testing.assert_allclose(references["out"].value, expected)


def test_guards_concatenate_and_pad() -> None:
    joined = elementwise(
        "shape=3x9,dtype=f32,expression=x+y,operands=x.f32.4_1.if0_1_0_4+y.f32.3_1.at-4.if0_1_-4_3"
    )
    inputs, references = drawn(joined)
    x, y = exact(inputs)["x"].reshape(3, 4), exact(inputs)["y"].reshape(3, 3)
    padded = np.pad(np.concatenate([x, y], axis=1), ((0, 0), (0, 2)))
    np.testing.assert_array_equal(references["out"].value, padded)


def test_mean_over_padded_windows_is_an_average_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "shape=2x5x5x3x3,dtype=f32,expression=x,reduce=mean,axes=2,operands=x.f32.81_18_2_9_1.at-10"
    workload = reduction(f"{text}.if0_2_0_1_0_-1_9.if0_0_2_0_1_-1_9")
    inputs, references = drawn(workload)
    images = np.pad(exact(inputs)["x"].reshape(2, 9, 9), ((0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(images, (3, 3), axis=(1, 2))[:, ::2, ::2]
    np.testing.assert_allclose(references["out"].value, windows.mean((3, 4)))
    monkeypatch.setattr("tunebench.workloads.common.strided_workload.ELEMENTS_AT_ONCE", 10)
    _, parts = drawn(workload)
    np.testing.assert_array_equal(parts["out"].value, references["out"].value)


def test_results_of_type_bool_are_true_unless_the_value_is_0() -> None:
    workload = elementwise(
        "shape=64,dtype=bool,expression=c*x-c*x+c*0.5+0*y,operands=c.bool.1+x.f32.1+y.f32.1"
    )
    inputs, references = drawn(workload)
    np.testing.assert_array_equal(references["out"].value, inputs["c"].astype(float))
    unclear = elementwise("shape=64,dtype=bool,expression=x-y,operands=x.f32.1+y.f32.1")
    same = {name: np.ones(64, np.float32) for name in "xy"}
    assert set(unclear.reference(exact(same))["out"].value.tolist()) == {0.0}


def test_results_of_type_i8_are_values_without_fraction_that_the_type_has() -> None:
    workload = elementwise("shape=6,dtype=i8,expression=clamp(x*s,-128,127),operands=x.f32.1+s.f32.0")
    values = np.array([-300, -1.75, -0.5, 0.99, 3, 300], np.float32)
    reference = workload.reference(exact({"x": values, "s": np.ones(1, np.float32)}))["out"]
    np.testing.assert_array_equal(reference.value, [-128, -1, 0, 0, 3, 127])
    allowed = reference.scale * workload.tolerance().eps_acc
    np.testing.assert_array_equal(allowed, [0, 0, 0, 0, 1, 0])  # a product just below 3 is stored as 2
    with pytest.raises(InputError, match="overflow f32 or i8"):
        elementwise("shape=6,dtype=i8,expression=x+y,operands=x.f32.1+y.i8.1")


def test_bool_operands_are_drawn_as_0_and_1() -> None:
    workload = elementwise("shape=64,dtype=bool,expression=1-c,operands=c.bool.1")
    inputs, references = drawn(workload)
    assert set(inputs["c"].tolist()) == {False, True}
    assert set(references["out"].value.tolist()) == {0.0, 1.0}


ROWS = "shape=7x5,dtype=f32,expression=x,operands=x.f32.0_1.wraprow.i64.1_0_2_5_11"


def test_references_gather_rows() -> None:
    workload = elementwise(ROWS)
    inputs, references = drawn(workload)
    assert inputs["row"].shape == (9,)
    assert -11 <= inputs["row"].min() < 0 <= inputs["row"].max() < 11
    np.testing.assert_array_equal(references["out"].value, inputs["x"].reshape(11, 5)[inputs["row"][2:]])


def test_reference_raises_for_an_index_that_is_not_valid() -> None:
    workload = elementwise(ROWS)
    inputs, _ = drawn(workload)
    inputs["row"][5] = 11
    with pytest.raises(IndexError, match="row has an index out of range for 11 elements"):
        workload.reference(exact(inputs))


def test_traffic_counts_the_rows_that_random_indices_name() -> None:
    few = elementwise("shape=3x8,dtype=f16,expression=x,operands=x.f16.0_1.byi.i64.1_0_0_8_1000000")
    assert few.traffic().read_bytes == 3 * 8 * 2 + 3 * 8
    all_rows = elementwise("shape=900x8,dtype=f16,expression=x,operands=x.f16.0_1.byi.i32.1_0_0_8_4")
    assert all_rows.traffic().read_bytes == 4 * 8 * 2 + 900 * 4
    pairs = "operands=x.f16.0_1.byi.i64.1_0_0_800_100.byj.i64.1_0_0_8_100"
    assert elementwise(f"shape=9x8,dtype=f16,expression=x,{pairs}").traffic().read_bytes == 9 * (8 * 2 + 16)


@pytest.mark.parametrize(
    "operands",
    ["x.f32.0_1.byx.i64.1_0_0_5_11", "x.f32.0_1.byi.i64.1_0_0_5_11.byi.i32.0_1_0_1_3"],
)
def test_indices_have_one_type_and_their_own_name(operands: str) -> None:
    with pytest.raises(InputError, match="must have one type, and a name that no operand has"):
        elementwise(f"shape=7x5,dtype=f32,expression=x,operands={operands}")
