"""Reduction: definition, errors of f32, and properties of the kernels."""

from __future__ import annotations

import itertools
import math
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels import kernel_checks as checks
from tests.kernels.kernel_checks import GENERATIONS, H100, drawn, parser
from tests.kernels.scalar_evaluation import meant, rounded
from tests.support import needs_compiler
from tunebench.device import local_cpu
from tunebench.emulate.emulator import emulate
from tunebench.errors import InputError
from tunebench.kernels.reduction import cuda_column, cuda_row, numba_cpu, numba_cuda
from tunebench.measure.verify import worst_error
from tunebench.space import Config
from tunebench.workloads import parse
from tunebench.workloads.common.expression_workload import ExpressionWorkload
from tunebench.workloads.operators.reduction import Reduction

JOIN: dict[str, Any] = {"sum": math.fsum, "mean": lambda x: math.fsum(x) / len(x), "max": max, "min": min}
F32 = np.float32


reduction = parser(Reduction)
# -- definition ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", ["cols", "rows"])
@pytest.mark.parametrize("reduce", JOIN)
def test_reference_matches_scalar_evaluation(reduce: str, axis: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys.modules[ExpressionWorkload.__module__], "ELEMENTS_AT_ONCE", 11
    )  # two rows at a time
    w = reduction(
        f"rows=7,cols=5,dtype=f32,expression=(x-m)*b*s,vectors=b,columns=m,scalars=s,reduce={reduce},"
        f"axis={axis},then=exp(tanh(x))"
    )
    inputs, references = drawn(w)
    t = {name: np.asarray(value, np.float64) for name, value in inputs.items()}
    single = {
        (i, j): meant(w.tree, {"x": t["x"][i, j], "m": t["m"][i], "b": t["b"][j], "s": float(t["s"])})
        for i, j in itertools.product(range(7), range(5))
    }
    for result in range(w.results):
        of_result = [v for (i, j), v in single.items() if (i if axis == "cols" else j) == result]
        assert len(of_result) == w.terms
        expected = math.exp(math.tanh(JOIN[reduce](of_result)))
        assert references["out"].value[result] == pytest.approx(expected, rel=1e-12)


def test_name_of_the_result_does_not_matter() -> None:
    workload = reduction("rows=4,cols=8,dtype=f32,expression=y,reduce=mean,then=rsqrt(ms + 0.00001)")
    assert str(workload) == "reduction:rows=4,cols=8,dtype=f32,expression=y,reduce=mean,then=rsqrt(x+1e-05)"
    assert parse(str(workload)) == workload
    plain = reduction("rows=4,cols=8,dtype=f32,expression=y,reduce=mean,then=total")
    assert str(plain) == "reduction:rows=4,cols=8,dtype=f32,expression=y,reduce=mean"
    assert plain.changed(reduce="max", then="(2*r)").then == "2*x"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("dimensions", "says"),
    [
        ("expression=x,reduce=product", "unknown value of reduction dimension reduce 'product'"),
        ("expression=x,reduce=sum,then=x+y", "then=x+y must have one name, that of the result, such as"),
        ("expression=x,reduce=sum,then=2", "it has none"),
        ("expression=x*r,reduce=sum,columns=q", "columns: no q in x*r"),
        ("expression=x*r,reduce=sum,columns=r,vectors=r", "r cannot be in vectors and in columns"),
        ("expression=2*r,reduce=sum,columns=r", "at least one input must be in none of vectors, scalars"),
        ("expression=x,reduce=sum,then=log(-abs(x))", "log(-abs(x)) of the sum of x may divide by 0, leave"),
        ("expression=1000+x,reduce=sum", "the sum of 1000+x may divide by 0, leave the domain of log"),
    ],
)
def test_errors_name_the_fault(dimensions: str, says: str) -> None:
    with pytest.raises(InputError) as raised:
        parse(f"reduction:rows=100,cols=1000,dtype=f16,{dimensions}")
    assert says in str(raised.value)


def test_sums_that_would_overflow_are_drawn_from_less() -> None:
    w = reduction("rows=131072,cols=2,dtype=f16,expression=x*r,columns=r,reduce=sum,axis=rows")
    inputs, references = drawn(w)
    assert 0.2 < np.abs(inputs["x"].astype(F32)).max() <= 0.25
    assert np.isfinite(references["out"].value.astype(np.float16)).all()
    # A mean, or a result in f32, needs no such range.
    for changed in (w.changed(reduce="mean"), w.changed(out="f32")):
        assert np.abs(changed.draw(np.random.default_rng(0))["x"].astype(F32)).max() > 3


# -- errors of f32 -------------------------------------------------------------------------------------------


def in_f32(w: Reduction, inputs: Any, *, order: Any = None, missing: int = 0) -> Any:
    """Compute in f32 with each operation rounded, and the terms of a sum added sequentially."""
    spread = {name: x[:, None] if name in w.column_names else x for name, x in inputs.items()}
    elements = np.broadcast_to(rounded(w.tree, spread), (w.rows, w.cols))
    elements = elements if w.axis == "rows" else elements.T
    elements = elements[: len(elements) - missing]
    if order is not None:
        elements = elements[order.permutation(len(elements))]
    result = elements[0].copy()
    for element in elements[1:]:
        result = {"max": np.maximum, "min": np.minimum}.get(w.reduce, np.add)(result, element)
    result = result * F32(w.factor)
    return rounded(w.end, {"x": result})


ANALYSED = [
    "rows=50,cols=900,dtype=f32,expression=sigmoid(x)*square(y)+exp(b),vectors=b,reduce=sum",
    "rows=900,cols=50,dtype=f32,expression=square(x-m),columns=m,reduce=mean,axis=rows,then=rsqrt(x+1e-5)",
    "rows=50,cols=900,dtype=f32,expression=exp(x)*r,columns=r,reduce=max,then=log(x+20)",
    "rows=900,cols=50,dtype=f32,expression=tanh(x)-y,reduce=min,axis=rows",
]


@pytest.mark.parametrize("text", ANALYSED)
def test_rounding_each_operation_is_within_the_error_analysis(text: str) -> None:
    w = reduction(text)
    for seed in range(3):
        inputs, references = drawn(w, seed)
        got = in_f32(w, inputs, order=np.random.default_rng(seed))
        assert worst_error(w, {"out": got}, references) <= 1


@pytest.mark.parametrize("text", ANALYSED)
def test_slightly_wrong_results_exceed_the_error_analysis(text: str) -> None:
    """A result without one term, and one that is off by 400 units of f32 roundoff."""
    w = reduction(text)
    inputs, references = drawn(w)
    got = in_f32(w, inputs)
    assert worst_error(w, {"out": got * (1 + 400 * 2.0**-24)}, references) > 1
    # For an extreme, the missing term must be the extreme itself, somewhere among 50.
    least = in_f32(w, inputs, missing=1 if w.is_sum else 200)
    assert worst_error(w, {"out": least}, references) > 1


def test_error_of_an_extreme_is_that_of_its_candidates() -> None:
    w = reduction("rows=1,cols=2,dtype=f32,expression=exp(x),reduce=max")
    reference = w.reference({"x": np.array([[60.0, 0.0]])})["out"]
    alone = reduction("rows=1,cols=1,dtype=f32,expression=exp(x),reduce=max").reference(
        {"x": np.array([[60.0]])}
    )["out"]
    np.testing.assert_array_equal(reference.scale, alone.scale)


# -- the kernels ---------------------------------------------------------------------------------------------


def broken(reduce: str, axis: str) -> tuple[Reduction, dict[str, Any], Any]:
    """Return a workload with NaN of either sign and an infinity, and its results."""
    shift = {"max": -20, "min": 20}[reduce]  # no extreme is beyond 0
    w = reduction(f"rows=70,cols=130,dtype=f32,expression=x+s,scalars=s,reduce={reduce},axis={axis}")
    x = w.draw(np.random.default_rng(0))["x"]
    x[3, 7], x[5, 100], x[68, 9] = np.nan, -np.float32(np.nan), np.inf
    over = 1 if axis == "cols" else 0
    return w, {"x": x, "s": F32(shift)}, getattr(np, reduce)((x + F32(shift)).astype(np.float64), axis=over)


@pytest.mark.parametrize("axis", ["cols", "rows"])
@pytest.mark.parametrize("reduce", ["max", "min"])
def test_nan_propagates_on_cpu(reduce: str, axis: str) -> None:
    w, inputs, expected = broken(reduce, axis)
    config = Config({"block": 64 if axis == "rows" else 4, "parts": 2, "unroll": 1, "functions": "poly"})
    out = checks.run_on_cpu(numba_cpu.VARIANT, w, config, inputs)["out"]
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)


@needs_compiler
@pytest.mark.parametrize("axis", ["cols", "rows"])
def test_nan_propagates_in_cuda(axis: str) -> None:
    variant = cuda_row.VARIANT if axis == "cols" else cuda_column.VARIANT
    for reduce in ("max", "min"):
        w, inputs, expected = broken(reduce, axis)
        config = variant.default(w, H100)
        assert config["split"] > 1 or axis == "cols"
        np.testing.assert_array_equal(emulate(variant, w, config, inputs)["out"], expected.astype(F32))


@needs_compiler
def test_results_of_many_parts_are_joined() -> None:
    rows = reduction("rows=2,cols=2600,dtype=f32,expression=square(x),reduce=sum")
    split = Config({"row_threads": 64, "rows": 1, "vector": 1, "unroll": 1, "split": 64})
    columns = reduction("rows=90,cols=5,dtype=f16,expression=square(x),reduce=sum,axis=rows,out=f32")
    parts = Config({"col_threads": 8, "row_threads": 8, "vector": 1, "unroll": 1, "split": 16})
    for variant, w, config in ((cuda_row.VARIANT, rows, split), (cuda_column.VARIANT, columns, parts)):
        assert variant.configs(w, H100).row(config) is not None
        checks.assert_emulates_right(variant, w, config)


@given(
    rows=st.sampled_from([1, 2, 3, 7, 64, 1000, 2**20]),
    cols=st.sampled_from([1, 2, 3, 5, 8, 100, 131, 1024, 4096, 50257, 2**24]),
    dtype=st.sampled_from(["f32", "f16", "bf16"]),
    axis=st.sampled_from(["cols", "rows"]),
    rest=st.sampled_from(["x", "gelu(x+b)*r,vectors=b,columns=r", "a+b+c+d+e+f+x+y,vectors=e+f"]),
)
@settings(max_examples=40, deadline=None)
def test_the_default_is_a_valid_configuration(rows: int, cols: int, dtype: str, axis: str, rest: str) -> None:
    w = reduction(f"rows={rows},cols={cols},dtype={dtype},axis={axis},reduce=mean,expression={rest}")
    gpu = cuda_row.VARIANT if axis == "cols" else cuda_column.VARIANT
    for variant in (gpu, numba_cuda.VARIANT):
        for device in GENERATIONS:
            table = variant.configs(w, device)
            assert table.row(variant.default(w, device)) is not None
            costs = variant.costs(w, table, device)
            assert np.isfinite(costs.accesses * costs.blocks).all()
            checks.assert_work_is_not_overstated(w, costs)
    processor = numba_cpu.VARIANT
    assert processor.configs(w, local_cpu()).row(processor.default(w, local_cpu())) is not None


def test_few_results_keep_the_device_busy() -> None:
    for variant, text in (
        (cuda_row.VARIANT, "rows=1,cols=16777216,dtype=f32,expression=x,reduce=sum"),
        (cuda_column.VARIANT, "rows=65536,cols=768,dtype=f16,expression=x,reduce=sum,axis=rows"),
    ):
        w = reduction(text)
        first, last = variant.launches(w, variant.default(w, H100))
        assert first.grid[0] * first.grid[1] >= H100.sm_count
        assert last.arguments[:2] == ("partial", "out")
    many = reduction("rows=65536,cols=49,dtype=f16,expression=x,reduce=mean")
    assert len(cuda_row.VARIANT.launches(many, cuda_row.VARIANT.default(many, H100))) == 1


def test_emulation_workloads_keep_row_alignment_and_are_small() -> None:
    w = reduction("rows=1048576,cols=4104,dtype=f16,expression=x*b,vectors=b,reduce=sum")
    for variant, work in ((cuda_row.VARIANT, w), (cuda_column.VARIANT, w.changed(axis="rows"))):
        table = variant.configs(work, H100)
        for row in range(0, len(table), 13):
            config = table.config(row)
            small = variant.emulation_workload(work, config)
            assert small.cols % config["vector"] == 0
            assert small.rows * small.cols < 2**23
