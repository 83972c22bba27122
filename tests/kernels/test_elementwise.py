"""Elementwise: every generated kernel computes its expression, within the error analysis."""

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
from tests.kernels.scalar_evaluation import MEANINGS, meant, rounded
from tests.support import needs_compiler
from tunebench.device import local_cpu
from tunebench.emulate.emulator import emulate
from tunebench.emulate.numba_simulator import simulate
from tunebench.errors import InputError
from tunebench.expression import FUNCTIONS, names, parse, steps
from tunebench.kernels.common import cuda_expression, numba_expression
from tunebench.kernels.common.expression import least_operations, lines, variable
from tunebench.kernels.common.numba_expression import by_libm, by_polynomials
from tunebench.kernels.elementwise import cuda_vector, numba_cpu, numba_cuda
from tunebench.libraries import elementwise as library
from tunebench.measure.verify import worst_error
from tunebench.space import Config
from tunebench.workloads.common import expression_value
from tunebench.workloads.common.expression_workload import ExpressionWorkload
from tunebench.workloads.operators.elementwise import Elementwise

chain = parser(Elementwise)

EVERY = (
    "max(exp(x),log(abs(y)+0.1))/sqrt(1+square(y))+rsqrt(2+square(x))-sigmoid(x)*relu(-y)"
    "+min(tanh(x),gelu(y))*silu(x-y)+erf(x)*step(y)+sin(x)*cos(y)+round(x*y)+where(lt(x,y),x,eq(x,y))-le(x,0.5)*ne(y,0)"
)


def test_every_function_is_lowered_everywhere() -> None:
    operations = {step.operation for step in steps(parse(EVERY))}
    assert operations == set(MEANINGS)
    unary = {name for name, count in FUNCTIONS.items() if count == 1}
    assert unary == set(expression_value.FUNCTIONS)
    for spelling in (cuda_expression.PRINTER, numba_expression.PRINTER, numba_expression.NUMBA_CUDA_PRINTER):
        assert set(spelling.operations) == set(MEANINGS)


def test_reference_matches_scalar_evaluation() -> None:
    workload = chain(f"rows=3,cols=5,dtype=f32,expression={EVERY}*a+b-c,vectors=a,scalars=b,columns=c")
    inputs, references = drawn(workload)
    for i, j in itertools.product(range(3), range(5)):
        given_here = {"x": inputs["x"][i, j], "y": inputs["y"][i, j], "a": inputs["a"][j], "b": inputs["b"]}
        given_here["c"] = inputs["c"][i]
        expected = meant(workload.tree, {name: float(value) for name, value in given_here.items()})
        assert references["out"].value[i, j] == pytest.approx(expected, rel=1e-12)


def test_parts_of_the_reference_join(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = chain("rows=7,cols=5,dtype=f16,expression=gelu(x+b)*y*r,vectors=b,columns=r")
    _, whole = drawn(workload)
    monkeypatch.setattr(sys.modules[ExpressionWorkload.__module__], "ELEMENTS_AT_ONCE", 10)
    _, parts = drawn(workload)
    np.testing.assert_array_equal(whole["out"].value, parts["out"].value)
    np.testing.assert_array_equal(whole["out"].scale, parts["out"].scale)


# -- random expressions --------------------------------------------------------------------------------------


@st.composite
def expressions(draw: st.DrawFn, depth: int = 4) -> str:
    """Draw an expression over x, y (whole), v (a vector) and s (a scalar)."""
    if depth == 0 or draw(st.integers(0, 5)) == 0:
        return draw(st.sampled_from(("x", "x", "y", "v", "s", "0.5", "3")))
    kind = draw(st.sampled_from(("infix", "function", "neg")))
    first = draw(expressions(depth=depth - 1))
    if kind == "neg":
        return f"(-{first})"
    if kind == "infix":
        return f"({first}{draw(st.sampled_from('+-*/'))}{draw(expressions(depth=depth - 1))})"
    function = draw(st.sampled_from(sorted(FUNCTIONS)))
    further = [draw(expressions(depth=depth - 1)) for _ in range(FUNCTIONS[function] - 1)]
    return f"{function}({','.join([first, *further])})"


def workload_of(expression: str) -> Elementwise | None:
    """Return a small workload of an expression; None if it has no value, or no input of the full shape."""
    used = names(parse(expression))
    lists = [f",{key}={name}" for key, name in (("vectors", "v"), ("scalars", "s")) if name in used]
    try:
        return chain(f"rows=6,cols=10,dtype=f32,expression={expression}{''.join(lists)}")
    except InputError:
        return None


@given(expressions(), st.integers(0, 2**32 - 1))
@settings(max_examples=150)
def test_rounding_each_operation_is_within_the_error_analysis(expression: str, seed: int) -> None:
    workload = workload_of(expression)
    if workload is None:
        return
    inputs, references = drawn(workload, seed)
    got = np.broadcast_to(rounded(workload.tree, inputs), (6, 10))
    assert np.isfinite(references["out"].value).all()
    assert worst_error(workload, {"out": got}, references) <= 1


@given(st.floats(-8, 8), st.floats(0, 2))
def test_functions_stay_within_their_error_propagation(x: float, e: float) -> None:
    for name, function in expression_value.FUNCTIONS.items():
        least = function.domain[0]
        if x - e > max(least, -1e30):
            change = max(abs(MEANINGS[name](x + way * e) - MEANINGS[name](x)) for way in (-1, 1))
            assert change <= float(function.spread(np.float64(x), np.float64(e))) + 1e-9 * (1 + change), name


@given(expressions(), st.data())
def test_an_expression_stays_within_its_range(expression: str, data: st.DataObject) -> None:
    tree, ranges = (
        parse(expression),
        {"x": (-8.0, 8.0), "y": (0.5, 1.5), "v": (0.125, 0.875), "s": (0.5, 1.5)},
    )
    image = expression_value.span(tree, ranges)
    if image is not None:
        for _ in range(4):
            value = meant(tree, {name: data.draw(st.floats(*limits)) for name, limits in ranges.items()})
            slack = 1e-9 * (1 + abs(value))
            assert image[0] - slack <= value <= image[1] + slack


@given(expressions(), st.integers(0, 2**32 - 1))
@settings(max_examples=100)
def test_generated_code_computes_the_expression(expression: str, seed: int) -> None:
    """Run the Python code that Numba would compile, and the NumPy calls."""
    workload = workload_of(expression)
    if workload is None:
        return
    inputs, references = drawn(workload, seed)
    f32 = np.float32
    two_forms = {
        name: np.vectorize(lambda x, name=name: f32(MEANINGS[name](float(x))), otypes=[f32])
        for name in numba_expression.TWO_FORMS
    }
    for spelling in (numba_expression.PRINTER, numba_expression.NUMBA_CUDA_PRINTER):
        assignments, result = spelling.write(workload.tree)
        text = "\n".join([*(line.strip() for line in assignments), f"result = {result}"])
        got = np.empty((6, 10), f32)
        for i, j in np.ndindex(got.shape):
            scope: dict[str, Any] = {"f32": f32, "np": np, "math": math, **two_forms}
            for name, array in inputs.items():
                index = {2: (i, j), 1: (j,), 0: ()}[np.ndim(array)]
                scope[variable(name)] = f32(array[index])
            exec(text, scope)
            got[i, j] = scope["result"]
        assert worst_error(workload, {"out": got}, references) <= 1, text
    call = library.numpy_call(workload, inputs)
    if call is not None:
        assert worst_error(workload, {"out": np.broadcast_to(call(), (6, 10))}, references) <= 1


@pytest.mark.parametrize("place", range(4))
def test_slightly_wrong_operations_exceed_the_error_analysis(place: int) -> None:
    """Change an operation by 20 units of f32 roundoff: a loose error analysis would hide mistakes."""
    workload = chain("rows=40,cols=50,dtype=f32,expression=gelu(x+v)*y-0.5*tanh(x),vectors=v")
    inputs, references = drawn(workload)
    wrong = sorted({"add", "gelu", "mul", "tanh"})[place]
    right = MEANINGS[wrong]
    try:
        MEANINGS[wrong] = lambda *arguments: right(*arguments) * (1 + 20 * 2.0**-24)
        got = rounded(workload.tree, inputs)
    finally:
        MEANINGS[wrong] = right
    assert worst_error(workload, {"out": got}, references) > 1


# -- the kernels ---------------------------------------------------------------------------------------------


def over_all_exponents(workload: Elementwise) -> dict[str, Any]:
    """Return inputs whose x makes exponentials larger and smaller than in tuning."""
    inputs, _ = drawn(workload)
    x = np.linspace(-80, 79, inputs["x"].size).reshape(inputs["x"].shape)
    inputs["x"] = x.astype(inputs["x"].dtype)
    return inputs


@needs_compiler
@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_cuda_computes_every_function(dtype: str) -> None:
    workload = chain(f"rows=6,cols=33,dtype={dtype},expression={EVERY}*s+v,vectors=v,scalars=s,out=f32")
    config = cuda_vector.VARIANT.default(workload, H100)
    checks.assert_emulates_right(cuda_vector.VARIANT, workload, config, over_all_exponents(workload))


@pytest.mark.parametrize("functions", ["poly", "libm"])
def test_cpu_computes_every_function(functions: str) -> None:
    workload = chain(f"rows=2,cols=4096,dtype=f32,expression={EVERY}*s+v,vectors=v,scalars=s")
    config = Config({"chunk": 256, "row_block": 2, "functions": functions})
    inputs = over_all_exponents(workload)
    checks.assert_right(workload, inputs, checks.run_on_cpu(numba_cpu.VARIANT, workload, config, inputs))


@pytest.mark.parametrize("functions", [by_polynomials, by_libm])
def test_nan_and_extreme_values_are_computed_correctly(functions: Any) -> None:
    import numba

    x = np.array([0, -0.0, np.inf, -np.inf, np.nan, 1e-40, 3e38, -3e38, 100, -100, 1, -1e-30], np.float32)
    made = functions()
    with np.errstate(all="ignore"):
        expected = {
            "exp": np.exp(x),
            "log": np.log(x),
            "tanh": np.tanh(x),
            "erf": [math.erf(v) for v in x],
            "sigmoid": 1 / (1 + np.exp(-x.astype(np.float64))),
        }
    for name, right in expected.items():
        function = made[name]

        @numba.njit
        def over(x: Any, y: Any, function: Any = function) -> None:
            for i in range(len(x)):
                y[i] = function(x[i])

        got = np.empty_like(x)
        over(x, got)
        np.testing.assert_allclose(got, right, rtol=1e-6, atol=1e-37, err_msg=name)


TIES = [-2.5, -1.5, -0.5, -0.0, 0.0, 0.5, 1.5, 2.5, 0.49999997, 8388607.5, 4194304.5, 1e30, -1e30, np.inf]
"""Numbers between two whole ones, at which torch.round takes the even one, and numbers without fractions."""


@needs_compiler
def test_ties_are_rounded_to_even_and_nan_stays() -> None:
    workload = chain("rows=1,cols=15,dtype=f32,expression=round(x)")
    x = np.array([[*TIES, np.nan]], np.float32)
    config = numba_cpu.VARIANT.default(workload, local_cpu())
    outputs = [checks.run_on_cpu(numba_cpu.VARIANT, workload, config, {"x": x})["out"]]
    for variant, run in ((cuda_vector.VARIANT, emulate), (numba_cuda.VARIANT, simulate)):
        outputs += run(variant, workload, variant.default(workload, H100), {"x": x}).values()
    for output in outputs:
        np.testing.assert_array_equal(output, np.rint(x))


def nan_inputs() -> tuple[Elementwise, dict[str, Any], Any]:
    """Return a workload with NaN in either argument of max and min and in that of relu, and its result."""
    w = chain("rows=1,cols=6,dtype=f32,expression=max(x,y)+min(y,z)+relu(z)+max(min(z,6),0)")
    nan, unit = np.float32(np.nan), np.float32(1)
    x, y, z = np.full((3, 1, 6), unit)
    x[0, 0], y[0, 1], z[0, 2], z[0, 3] = nan, nan, nan, -nan
    return w, {"x": x, "y": y, "z": z}, [nan, nan, nan, nan, 4, 4]


def test_nan_of_any_argument_of_max_min_and_relu_stays_nan_on_cpu() -> None:
    w, inputs, expected = nan_inputs()
    config = numba_cpu.VARIANT.default(w, local_cpu())
    (output,) = checks.run_on_cpu(numba_cpu.VARIANT, w, config, inputs).values()
    np.testing.assert_array_equal(output[0], expected)


@needs_compiler
def test_nan_of_any_argument_of_max_min_and_relu_stays_nan_in_cuda() -> None:
    w, inputs, expected = nan_inputs()
    for variant, run in ((cuda_vector.VARIANT, emulate), (numba_cuda.VARIANT, simulate)):
        (output,) = run(variant, w, variant.default(w, H100), inputs).values()
        np.testing.assert_array_equal(output[0], expected)


def test_rows_are_joined_without_vectors_and_columns() -> None:
    assert lines(chain("rows=64,cols=6,dtype=f16,expression=x*2")) == (1, 384)
    assert lines(chain("rows=4096,cols=1024,dtype=f16,expression=x*y")) == (1024, 4096)
    assert lines(chain("rows=6,cols=3,dtype=f16,expression=x*y")) == (3, 6)
    for key in ("vectors", "columns"):
        assert lines(chain(f"rows=64,cols=6,dtype=f16,expression=x*b,{key}=b")) == (64, 6)


def test_vectors_may_be_of_another_type() -> None:
    made = chain("rows=4,cols=8,dtype=f16,expression=(x-m)*r+y,vectors=m+r,vector_dtype=f32")
    assert {t.name: t.dtype for t in made.inputs()} == {"x": "f16", "m": "f32", "r": "f32", "y": "f16"}
    assert made.out == "f16"
    assert [(str(part.vector_dtype), part.vectors) for part in made.unfused()] == [
        ("f32", "m"),
        ("f32", "r"),
        ("f16", ""),
    ]
    plain = chain("rows=4,cols=8,dtype=f16,expression=x+y,vector_dtype=f32")
    assert plain == chain("rows=4,cols=8,dtype=f16,expression=x+y")  # no input is a vector
    for variant in (cuda_vector.VARIANT, numba_cpu.VARIANT):
        device = local_cpu() if variant is numba_cpu.VARIANT else H100
        config = variant.default(made, device)
        alike = made.changed(vector_dtype="f16")
        assert variant.revision(made, config) != variant.revision(alike, config)


def test_least_operations_of_an_element() -> None:
    def least(expression: str, more: str = "") -> tuple[float, dict[str, int]]:
        return least_operations(chain(f"rows=4,cols=4,dtype=f32,expression={expression}{more}"))

    assert least("x*y+z*x-y")[0] == 2  # two products, each with a sum in the same instruction
    assert least("(x+y)*(x+y)")[0] == 1  # the sum is computed once
    assert least("max(x*y,y*x)+max(x*x,square(x))")[0] == 2  # in any order
    assert least("max(x-y,abs(y-x))*max(-x*y,x*-y)")[0] == 2  # with any sign
    assert least("exp(x+y)-exp(y+x)")[1]["exp"] == 1
    assert least("2*x+1")[0] == 0  # a compiler may need no instruction for constants
    assert least("x*(a*b+a)", ",vectors=a+b")[0] == 1  # values that all rows share may be computed once
    assert least("exp(x)*exp(x)+exp(y)")[1]["exp"] == 2
    assert least("eq(x,y)*eq(y,x)+ne(x,y)")[1]["eq"] == 1
    assert least("lt(x,y)-lt(y,x)")[1]["lt"] == 2  # these depend on the order
    assert least("where(x,y,z)+where(y,x,z)")[1]["where"] == 2


def test_revision_depends_on_the_expression() -> None:
    first, two = (chain(f"rows=8,cols=64,dtype=f32,expression={text}") for text in ("x+y", "x-y"))
    for variant in (cuda_vector.VARIANT, numba_cuda.VARIANT, numba_cpu.VARIANT):
        device = local_cpu() if variant is numba_cpu.VARIANT else H100
        config = variant.default(first, device)
        assert variant.revision(first, config) != variant.revision(two, config)
        assert variant.revision(first, config) == variant.revision(
            chain("rows=8,cols=64,dtype=f32,expression=x + y"), config
        )


@given(
    rows=st.sampled_from([1, 2, 3, 7, 64, 1000, 2**20]),
    cols=st.sampled_from([1, 2, 3, 5, 8, 100, 131, 1024, 4096, 50257, 2**21]),
    dtype=st.sampled_from(["f32", "f16", "bf16"]),
    out=st.sampled_from(["f32", "f16"]),
    rest=st.sampled_from(["x*2", "gelu(x+b)*y,vectors=b", "a+b+c+d+e+f+x+y,vectors=e+f"]),
)
@settings(max_examples=60)
def test_the_default_is_a_valid_configuration(rows: int, cols: int, dtype: str, out: str, rest: str) -> None:
    workload = chain(f"rows={rows},cols={cols},dtype={dtype},out={out},expression={rest}")
    for variant in (cuda_vector.VARIANT, numba_cuda.VARIANT):
        for device in GENERATIONS:
            table = variant.configs(workload, device)
            assert table.row(variant.default(workload, device)) is not None
            costs = variant.costs(workload, table, device)
            elements = np.broadcast_to(np.asarray(costs.blocks), len(table))
            tiles = [variant.tiles(workload, table.config(row)) for row in (0, len(table) - 1)]
            for tiling, count in zip(tiles, elements[[0, -1]], strict=True):
                area = tiling[0].tile * tiling[1].tile
                assert count * area == pytest.approx(workload.rows * workload.cols)
    processor = numba_cpu.VARIANT
    assert processor.configs(workload, local_cpu()).row(processor.default(workload, local_cpu())) is not None


def test_emulation_workloads_keep_line_alignment() -> None:
    workload = chain("rows=4096,cols=4104,dtype=f16,expression=gelu(x+b),vectors=b")
    table = cuda_vector.VARIANT.configs(workload, H100)
    for row in range(0, len(table), 7):
        config = table.config(row)
        small = cuda_vector.VARIANT.emulation_workload(workload, config)
        assert small.cols % config["vector"] == 0
        assert small.rows * small.cols <= 2**20
