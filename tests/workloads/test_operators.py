"""Requirements on every operator; each built-in one is included by its name.

References are compared with loops over single numbers, written here without NumPy's products. Tolerances are
tested with emulated kernels: correct ones must pass, and a single wrong element must fail.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args, get_origin

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tunebench.activation import ACTIVATIONS
from tunebench.dtype import is_integer, itemsize, numpy_dtype, storage
from tunebench.errors import InputError
from tunebench.measure.verify import share_of
from tunebench.workload import AtLeast, Expression, Reference, Workload
from tunebench.workloads import all_operators, parse
from tunebench.workloads.common.activation import apply
from tunebench.workloads.operators.conv2d import Conv2d
from tunebench.workloads.operators.cross_entropy import CrossEntropy
from tunebench.workloads.operators.gated_gemm import GatedGemm
from tunebench.workloads.operators.gemm import Gemm
from tunebench.workloads.operators.grouped_gemm import GroupedGemm
from tunebench.workloads.operators.layernorm import LayerNorm
from tunebench.workloads.operators.scaled_gemm import ScaledGemm
from tunebench.workloads.operators.scatter_add import ScatterAdd
from tunebench.workloads.operators.softmax import Softmax

Array = NDArray[Any]
OPERATORS = sorted(all_operators())


def _values(kind: Any, largest: int) -> st.SearchStrategy[Any]:
    if get_origin(kind) is Literal:
        return st.sampled_from(get_args(kind))
    if kind is bool:
        return st.booleans()
    base, *notes = get_args(kind)
    if notes == ["expression"]:
        return st.sampled_from(
            (
                "x",
                "gelu(x)",
                "max(x,0.1*x)",
                "max(x,gelu(y+bias))*2",
                "bias*x/(1+square(x))",
                "relu(x*scale+shift)",
            )
        )
    if notes == ["names"]:
        return st.sampled_from(("", "bias", "x"))
    if notes == ["activation"]:
        return st.sampled_from(tuple(ACTIVATIONS))
    if notes == ["shape"]:
        return st.sampled_from(("4x3x8", "7x1x6", "24", "2x3x4x5"))
    if notes == ["operands"]:
        return st.sampled_from(
            (
                "x.f32.24_1_3",
                "x.f16.6_2_0.at3.if1_0_0_-1_5",
                "x.bool.-1.at23",
                "x.i8.24_1_3",
                "y.bf16.0_8_1+x.f32.24_8_1+bias.f32.0_0_1",
                "shift.f16.0+x.f32.2+scale.f16.1",
            )
        )
    if notes == ["positive"]:
        return st.floats(1e-12, 1.0)
    assert base is int, f"teach this test to draw {kind}"
    smallest = next(note.minimum for note in notes if isinstance(note, AtLeast))
    return st.integers(smallest, largest)


@st.composite
def workloads_of(draw: st.DrawFn, cls: type[Workload], largest: int) -> Workload:
    """Draw a workload from the types of its dimensions, omitting some of those with a default."""
    types, chosen = cls.dimension_types(), {}
    for dimension in dataclasses.fields(cls):
        if dimension.default is dataclasses.MISSING or draw(st.booleans()):
            chosen[dimension.name] = draw(_values(types[dimension.name], largest))
    try:
        return cls(**chosen)
    except InputError:  # incompatible dimensions, such as groups that do not divide
        assume(False)
        raise


def _f64(inputs: Mapping[str, Array]) -> dict[str, Array]:
    return {name: np.asarray(value, dtype=np.float64) for name, value in inputs.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATORS)
def test_text_reads_back(name: str) -> None:
    cls = all_operators()[name]

    @given(workloads_of(cls, 2**31 - 1) | workloads_of(cls, 16), st.randoms(use_true_random=False))
    @settings(max_examples=50, suppress_health_check=[HealthCheck.filter_too_much], deadline=None)
    def check(workload: Workload, random: Any) -> None:
        text = str(workload)
        items = [f"{k}={v}" for k, v in cls.split_dimensions(text.removeprefix(f"{name}:")).items()]
        random.shuffle(items)
        parsed = parse(f"{name}:{','.join(items)}")
        assert parsed == workload
        assert str(parsed) == text
        for (
            item
        ) in items:  # a canonical text omits defaults: without an item it is another workload or invalid
            without = [dimension for dimension in items if dimension != item]
            try:
                assert parse(f"{name}:{','.join(without)}") != workload
            except InputError as error:
                assert str(error)  # noqa: PT017 - either way is right

    check()


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATORS)
def test_declarations_agree(name: str) -> None:
    """Shapes, types, traffic and FLOPs of any workload are consistent."""
    cls = all_operators()[name]

    @given(workloads_of(cls, 6), st.integers(0, 2**32 - 1))
    @settings(max_examples=60, suppress_health_check=[HealthCheck.filter_too_much], deadline=None)
    def check(workload: Workload, seed: int) -> None:
        inputs, outputs = workload.inputs(), workload.outputs()
        names = [tensor.name for tensor in (*inputs, *outputs)]
        assert len(set(names)) == len(names)
        assert all(tensor.dtype != "tf32" for tensor in (*inputs, *outputs))
        drawn = workload.draw(np.random.default_rng(seed))
        assert {t.name: (t.shape, numpy_dtype(t.dtype)) for t in inputs} == {
            name: (value.shape, value.dtype) for name, value in drawn.items()
        }
        references = workload.reference(_f64(drawn))
        assert {t.name: t.shape for t in outputs} == {n: r.value.shape for n, r in references.items()}
        for reference in references.values():
            assert reference.value.dtype == reference.scale.dtype == np.float64
            assert reference.scale.shape == reference.value.shape
            assert np.isfinite(reference.value).all()
            assert (reference.scale >= 0).all()
        traffic, tolerance = workload.traffic(), workload.tolerance()
        assert 0 <= traffic.read_bytes <= sum(tensor.nbytes for tensor in inputs)
        assert traffic.write_bytes == sum(tensor.nbytes for tensor in outputs)
        assert workload.flops() > 0
        integers = all(is_integer(tensor.dtype) for tensor in outputs)
        assert (tolerance.eps_out == 0) == (integers or all(tensor.dtype == "bool" for tensor in outputs))
        if integers and not workload.operator.startswith("strided"):
            assert tolerance.eps_acc == 0
        else:  # expressions are computed in f32, whatever their result is stored as
            assert 0 < tolerance.eps_acc < 1e-2
            assert tolerance.eps_out < 1e-2
        assert tolerance.reason

    check()


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATORS)
def test_parts_are_workloads(name: str) -> None:
    cls = all_operators()[name]

    @given(workloads_of(cls, 6), st.integers(0, 2**32 - 1))
    @settings(max_examples=30, suppress_health_check=[HealthCheck.filter_too_much], deadline=None)
    def check(workload: Workload, seed: int) -> None:
        inputs = workload.draw(np.random.default_rng(seed))
        whole = {output: r.value for output, r in workload.reference(_f64(inputs)).items()}
        covered = {output: np.zeros(value.shape, int) for output, value in whole.items()}
        for index in range(workload.part_count()):
            part = workload.part(index)
            for output, reference in part.workload.reference(_f64(part.of(inputs))).items():
                np.testing.assert_allclose(part.of(whole)[output], reference.value, rtol=1e-9, atol=1e-12)
                part.of(covered)[output][...] += 1
        assert all((count == 1).all() for count in covered.values())
        with pytest.raises(IndexError):
            workload.part(workload.part_count())

    check()


# -- allowed changes ---------------------------------------------------------------------------------

FILLERS = {"zeros": 0.0, "minus infinity": -math.inf}


@pytest.mark.parametrize("name", OPERATORS)
def test_allowed_changes_name_dimensions(name: str) -> None:
    cls = all_operators()[name]
    assert cls.category is not None
    allowed_changes, types = cls.allowed_changes, cls.dimension_types()
    assert allowed_changes.items or "shape" in cls.dimensions()  # extents within one text
    for dimension in (*allowed_changes.padding, *allowed_changes.items):
        assert any(isinstance(note, AtLeast) for note in get_args(types[dimension])), dimension
    for dimension in (*allowed_changes.layouts, *allowed_changes.fusions):
        assert len(cls.choices(dimension)) > 1 or types[dimension] == Expression
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    assert all(defaults[dimension] in (*cls.choices(dimension), "x") for dimension in allowed_changes.fusions)


@pytest.mark.parametrize("name", OPERATORS)
def test_changes_keep_what_follows(name: str) -> None:
    cls = all_operators()[name]

    @given(workloads_of(cls, 6))
    @settings(max_examples=30, suppress_health_check=[HealthCheck.filter_too_much], deadline=None)
    def check(workload: Workload) -> None:
        assert workload.changed() == workload
        for dimension in workload.may_change().items:
            doubled = workload.changed(**{dimension: 2 * getattr(workload, dimension)})
            assert doubled.flops() == 2 * workload.flops()
        for dtype in cls.choices("dtype"):
            dimensions = {**cls.split_dimensions(str(workload).partition(":")[2]), "dtype": dtype}
            try:
                expected = cls.from_dimensions(dimensions)
            except InputError:
                continue
            assert workload.changed(dtype=dtype) == expected

    check()


@pytest.mark.parametrize(
    ("name", "dimension"),
    [(name, dim) for name in OPERATORS for dim in all_operators()[name].allowed_changes.padding],
)
def test_padded_workload_contains_the_original_result(name: str, dimension: str) -> None:
    cls = all_operators()[name]

    @given(workloads_of(cls, 5), st.integers(1, 3), st.integers(0, 2**32 - 1))
    @settings(max_examples=40, suppress_health_check=[HealthCheck.filter_too_much], deadline=None)
    def check(workload: Workload, more: int, seed: int) -> None:
        if getattr(workload, "groups", 1) > 1 and name == "conv2d":
            return  # padding applies to the channels of a group, not to all channels
        longer = workload.changed(**{dimension: getattr(workload, dimension) + more})
        filler = FILLERS[workload.may_change().padding[dimension]]
        inputs, padded = _f64(workload.draw(np.random.default_rng(seed))), {}
        for tensor in longer.inputs():
            padded[tensor.name] = np.full(tensor.shape, filler)
            padded[tensor.name][tuple(map(slice, inputs[tensor.name].shape))] = inputs[tensor.name]
        with np.errstate(invalid="ignore"):  # infinite padding causes invalid operations in the scale
            computed = longer.reference(padded)
        for output, asked in workload.reference(inputs).items():
            part = computed[output].value[tuple(map(slice, asked.value.shape))]
            np.testing.assert_allclose(part, asked.value, rtol=1e-9, atol=1e-9)

    check()


# -- references against loops over single numbers -----------------------------------------------------------


def _activate(value: float, activation: str) -> float:
    if activation == "relu":
        return max(value, 0.0)
    if activation == "gelu":
        return value * 0.5 * (1 + math.erf(value / math.sqrt(2)))
    if activation in ("silu", "sigmoid"):
        return (value if activation == "silu" else 1.0) / (1 + math.exp(-value))
    return value


SLOPES = {"none": 1.0, "relu": 1.0, "gelu": 1.13, "silu": 1.1}


def _gemm(
    workload: Gemm, a: Array, b: Array, bias: Array | None = None, residual: Array | None = None
) -> tuple[Array, Array]:
    value, scale = np.zeros((2, workload.batch, workload.m, workload.n))
    for z, i, j in np.ndindex(value.shape):
        for p in range(workload.k):
            left = a[z, i, p] if workload.trans[0] == "n" else a[z, p, i]
            right = b[z, p, j] if workload.trans[1] == "n" else b[z, j, p]
            value[z, i, j] += left * right
            scale[z, i, j] += (left * right) ** 2  # the 2-norm of the products is that of f32
        scale[z, i, j] = math.sqrt(scale[z, i, j])
        if workload.activation != "none":
            scale[z, i, j] += abs(value[z, i, j])
        if bias is not None:
            value[z, i, j] += bias[j]
            scale[z, i, j] += abs(bias[j])
        value[z, i, j] = _activate(value[z, i, j], workload.activation)
        scale[z, i, j] *= SLOPES[workload.activation]
        if residual is not None:
            value[z, i, j] += residual[z, i, j]
            scale[z, i, j] += abs(residual[z, i, j])
    return value, scale


GEMMS = [
    Gemm(m=4, n=3, k=5, dtype="f32", batch=batch, trans=trans, epilogue=epilogue)  # type: ignore[arg-type]
    for trans, epilogue, batch in itertools.product(
        ("nn", "nt", "tn", "tt"), ("none", "bias", "bias+relu", "bias+gelu"), (1, 2)
    )
] + [
    Gemm(m=4, n=3, k=5, dtype="f32", batch=2, epilogue=epilogue)
    for epilogue in Gemm.choices("epilogue")
    if "silu" in epilogue or "residual" in epilogue
]


@pytest.mark.parametrize("workload", GEMMS, ids=str)
def test_gemm_equals_loops(workload: Gemm) -> None:
    inputs = _f64(workload.draw(np.random.default_rng(1)))
    value, scale = _gemm(workload, **inputs)
    reference = workload.reference(inputs)["c"]
    np.testing.assert_allclose(reference.value, value, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(reference.scale, scale, rtol=1e-12)


@pytest.mark.parametrize("trans", ["nn", "nt"])
@pytest.mark.parametrize("activation", ["silu", "gelu", "relu", "sigmoid"])
def test_gated_gemm_equals_two_products(trans: Any, activation: Any) -> None:
    workload = GatedGemm(m=5, n=4, k=6, dtype="f32", trans=trans, activation=activation)
    inputs = _f64(workload.draw(np.random.default_rng(1)))
    product = Gemm(m=5, n=4, k=6, dtype="f32", trans=trans)
    (gate, gates), (up, ups) = (
        _gemm(product, inputs["a"][None], inputs[b][None]) for b in ("b_gate", "b_up")
    )
    gates, ups = gates + np.abs(gate), ups + np.abs(up)
    reference, eps_acc = workload.reference(inputs)["c"], workload.tolerance().eps_acc
    shares = []
    for i, j in np.ndindex(5, 4):
        value = _activate(gate[0, i, j], activation)
        np.testing.assert_allclose(reference.value[i, j], value * up[0, i, j], rtol=1e-12, atol=1e-14)
        # Corners of the possible values of gate and up when each is off by `eps_acc` of its magnitude.
        off_gate, off_up = eps_acc * gates[0, i, j], eps_acc * ups[0, i, j]
        corners = [
            _activate(gate[0, i, j] + x * off_gate, activation) * (up[0, i, j] + y * off_up)
            for x, y in itertools.product((-1, 1), repeat=2)
        ]
        worst = max(abs(corner - value * up[0, i, j]) for corner in corners)
        shares.append(worst / (eps_acc * reference.scale[i, j]))
    # At most the tolerance, and close to it somewhere.
    assert 0.8 < max(shares) < 1 + 1e-6


@pytest.mark.parametrize(
    "text",
    [
        "gated_gemm:m=9,n=7,k=5,dtype=f16,trans=nt",
        *(
            f"gemm:m=9,n=7,k=5,dtype=f16,batch=3,trans={t},epilogue=bias+gelu+residual"
            for t in ("nn", "nt", "tn", "tt")
        ),
    ],
)
def test_a_block_of_a_product_is_that_block(text: str) -> None:
    workload: Any = parse(text)
    inputs = _f64(workload.draw(np.random.default_rng(2)))
    reference, last = workload.reference(inputs)["c"], getattr(workload, "batch", 1) - 1
    value, scale = (array.reshape(-1, 9, 7)[last] for array in (reference.value, reference.scale))
    for rows, cols in ((slice(0, 4), slice(0, 7)), (slice(8, 9), slice(3, 7)), (slice(2, 5), slice(6, 7))):
        block = workload.reference_block(inputs, last, rows, cols)
        np.testing.assert_allclose(block.value, value[rows, cols], rtol=1e-12)
        np.testing.assert_allclose(block.scale, scale[rows, cols], rtol=1e-12)


def test_gelu_keeps_its_accuracy_far_below_zero() -> None:
    # Phi(-10) = 7.61985302416e-24. Source: tables of the normal distribution.
    np.testing.assert_allclose(
        apply("gelu", np.array([-10.0, 0.0, 10.0])), [-7.61985302416e-23, 0.0, 10.0], rtol=1e-9
    )


def _at(images: Array, layout: str, n: int, c: int, h: int, w: int) -> Any:
    return images[n, h, w, c] if layout == "nhwc" else images[n, c, h, w]


def _products(workload: Conv2d) -> Any:
    """Yield the places in x, w and y of every product inside the image, in terms of (n, c, h, w) each."""
    cg, kg = workload.c // workload.groups, workload.k // workload.groups
    ranges = map(range, (workload.n, workload.k, workload.p, workload.q, cg, workload.r, workload.s))
    for n, k, p, q, c, r, s in itertools.product(*ranges):
        h = p * workload.stride - workload.pad + r * workload.dilation
        w = q * workload.stride - workload.pad_w + s * workload.dilation
        if 0 <= h < workload.h and 0 <= w < workload.w:
            yield (n, k // kg * cg + c, h, w), (k, c, r, s), (n, k, p, q)


def _conv2d(workload: Conv2d, inputs: Mapping[str, Array]) -> Array:
    """Return the output of any direction in nchw or kcrs order, without epilogue."""
    index_of = {"x": 0, "w": 1, "y": 2}
    left, right = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("x", "dy")}[workload.direction]
    written = workload.outputs()[0].name
    shape = workload.outputs()[0].shape
    out = np.zeros(shape if workload.layout == "nchw" else (shape[0], shape[3], shape[1], shape[2]))
    for indices in _products(workload):
        factor = _at(inputs[left], workload.layout, *indices[index_of[left.removeprefix("d")]])
        multiplicand = _at(inputs[right], workload.layout, *indices[index_of[right.removeprefix("d")]])
        out[indices[index_of[written.removeprefix("d")]]] += factor * multiplicand
    return out


CONVOLUTIONS = [
    parse(
        f"conv2d:n=2,c=4,h=5,w=6,k=6,r=3,s=2,stride={stride},pad={pad},dtype=f32,layout={layout},"
        f"dilation={dilation},groups={groups},direction={direction},pad_w={pad_w}"
    )
    for direction, layout, (stride, pad, pad_w, dilation, groups) in itertools.product(
        ("fprop", "dgrad", "wgrad"),
        ("nhwc", "nchw"),
        (
            (1, 0, 0, 1, 1),
            (1, 1, 1, 1, 1),
            (2, 1, 1, 1, 2),
            (2, 2, 0, 2, 1),
            (3, 1, 1, 2, 2),
            (1, 0, 3, 1, 2),
        ),
    )
]


@pytest.mark.parametrize("workload", CONVOLUTIONS, ids=str)
def test_conv2d_equals_loops(workload: Conv2d) -> None:
    inputs = _f64(workload.draw(np.random.default_rng(3)))
    reference = workload.reference(inputs)[workload.outputs()[0].name]
    value, squares = (
        _conv2d(workload, used) for used in (inputs, {k: np.square(v) for k, v in inputs.items()})
    )
    for result, right in (
        (reference.value, value),
        (reference.scale, np.sqrt(squares) + np.abs(value)),
    ):
        ordered = result if workload.layout == "nchw" else result.transpose(0, 3, 1, 2)
        np.testing.assert_allclose(ordered, right, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
@pytest.mark.parametrize("epilogue", [text for text in Conv2d.choices("epilogue") if text != "none"])
def test_conv2d_scales_then_adds_bias_and_residual_then_cuts_at_zero(layout: Any, epilogue: Any) -> None:
    workload = Conv2d(
        n=2, c=3, h=4, w=4, k=2, r=3, s=3, stride=1, pad=1, dtype="f32", layout=layout, epilogue=epilogue
    )
    inputs = _f64(workload.draw(np.random.default_rng(4)))
    plain = dataclasses.replace(workload, epilogue="none").reference(inputs)["y"]
    reference = workload.reference(inputs)["y"]
    for index in np.ndindex(plain.value.shape):
        channel = index[3] if layout == "nhwc" else index[1]
        factor, bias = inputs["scale"][channel] if "scale" in epilogue else 1.0, inputs["bias"][channel]
        residual = inputs["residual"][index] if "residual" in epilogue else 0.0
        expected = plain.value[index] * factor + bias + residual
        assert reference.value[index] == pytest.approx(max(0, expected) if "relu" in epilogue else expected)
        magnitude = plain.scale[index] * abs(factor) + abs(bias) + abs(residual)
        assert reference.scale[index] == pytest.approx(magnitude)


@given(workloads_of(Conv2d, 7))
@settings(max_examples=80, suppress_health_check=[HealthCheck.filter_too_much], deadline=None)
def test_conv2d_counts_each_touched_element_once(workload: Workload) -> None:
    assert isinstance(workload, Conv2d)
    assume(workload.n * workload.k * workload.p * workload.q * workload.c * workload.r * workload.s < 20_000)
    touched: dict[str, set[Any]] = {"x": set(), "w": set(), "dy": set()}
    for x, w, y in _products(workload):
        touched["x"].add(x)
        touched["w"].add(w)
        touched["dy"].add(y)
    vectors = {"scale", "bias", "pre_scale", "pre_shift"}
    further = sum(t.size for t in workload.inputs() if t.name in {*vectors, "residual"})
    read = sum(len(touched[t.name]) for t in workload.inputs() if t.name in touched) + further
    assert workload.traffic().read_bytes == read * itemsize(storage(workload.dtype))


def test_a_strided_1x1_reads_a_quarter() -> None:
    workload = parse("conv2d:n=2,c=16,h=56,w=56,k=32,r=1,s=1,stride=2,pad=0,dtype=f16,layout=nhwc")
    assert workload.traffic().read_bytes == 2 * (2 * 28 * 28 * 16 + 32 * 16)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ("groups=3", "groups=3 must divide c=4 and k=6"),
        ("r=8,dilation=1", "a filter with r=8, dilation=1 covers 8 and must fit in h + 2 pad = 7"),
        ("r=1,s=3,dilation=4", "a filter with s=3, dilation=4 covers 9 and must fit in w + 2 pad_w = 8"),
        ("direction=dgrad,epilogue=bias", "epilogue=bias needs direction=fprop, not dgrad"),
        ("layout=nhcw", "Known: nchw, nhwc"),
        ("pad=-1", "pad=-1 must be a whole number from 0"),
    ],
)
def test_conv2d_refuses_incompatible_dimensions(changes: str, says: str) -> None:
    base = "n=2,c=4,h=5,w=6,k=6,r=3,s=2,stride=1,pad=1,dtype=f32,layout=nhwc"
    dimensions = Conv2d.split_dimensions(base) | Conv2d.split_dimensions(changes)
    with pytest.raises(InputError) as caught:
        Conv2d.from_dimensions(dimensions)
    assert says in str(caught.value)


def _softmax(workload: Softmax, inputs: Mapping[str, Array]) -> Array:
    y = np.zeros((workload.rows, workload.cols))
    for i in range(workload.rows):
        z = [float(inputs["x"][i, j]) * float(inputs.get("scale", 1.0)) for j in range(workload.cols)]
        if "mask" in inputs:
            z = [value + float(inputs["mask"][i, j]) for j, value in enumerate(z)]
        y[i] = [math.exp(value) / math.fsum(map(math.exp, z)) for value in z]
    return y


@pytest.mark.parametrize("prologue", ["none", "scale", "mask", "scale+mask"])
def test_softmax_equals_loops(prologue: Any) -> None:
    workload = Softmax(rows=3, cols=7, dtype="f32", prologue=prologue)
    inputs = _f64(workload.draw(np.random.default_rng(5)))
    np.testing.assert_allclose(workload.reference(inputs)["y"].value, _softmax(workload, inputs), rtol=1e-12)


def test_log_softmax_is_the_logarithm() -> None:
    workload = Softmax(rows=3, cols=7, dtype="f32", prologue="scale+mask", log=True)
    inputs = _f64(workload.draw(np.random.default_rng(5)))
    np.testing.assert_allclose(workload.reference(inputs)["y"].value, np.log(_softmax(workload, inputs)))


def _slopes(function: Callable[[Array], float], x: Array) -> Array:
    """Return the central differences of a function of x, one element after the other."""
    slopes = np.zeros_like(x)
    for index in np.ndindex(x.shape):
        step = np.zeros_like(x)
        step[index] = 1e-5
        slopes[index] = (function(x + step) - function(x - step)) / 2e-5
    return slopes


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("prologue", ["none", "scale"])
def test_the_gradient_of_softmax_is_its_slope(prologue: Any, log: bool) -> None:
    forward = Softmax(rows=3, cols=4, dtype="f32", prologue=prologue, log=log)
    inputs = _f64(forward.draw(np.random.default_rng(6)))
    backward = forward.changed(direction="backward")
    operands = {**inputs, "y": forward.reference(inputs)["y"].value}
    operands["dy"] = np.random.default_rng(7).standard_normal((3, 4))

    def loss(x: Array) -> float:
        y = forward.reference({**inputs, "x": x})["y"].value
        return float((y * operands["dy"]).sum())

    dx = backward.reference(operands)["dx"].value
    np.testing.assert_allclose(dx, _slopes(loss, inputs["x"]), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("log", [False, True])
def test_backward_reads_what_forward_may_have_written(log: bool) -> None:
    workload = Softmax(rows=50, cols=30, dtype="f32", log=log, direction="backward")
    y = _f64(workload.draw(np.random.default_rng(8)))["y"]
    np.testing.assert_allclose((np.exp(y) if log else y).sum(axis=1), 1, rtol=1e-5)
    assert np.std(y) > 0.02


def test_the_gradient_of_softmax_takes_no_mask() -> None:
    with pytest.raises(InputError, match=r"prologue=scale\+mask needs direction=forward"):
        Softmax(rows=3, cols=4, dtype="f32", prologue="scale+mask", direction="backward")


def test_cross_entropy_equals_loops() -> None:
    workload = CrossEntropy(rows=5, cols=7, dtype="f32")
    inputs = _f64(workload.draw(np.random.default_rng(5)))
    references = workload.reference(inputs)
    for i in range(5):
        row = [float(value) for value in inputs["x"][i]]
        lse = math.log(math.fsum(map(math.exp, row)))
        assert references["lse"].value[i] == pytest.approx(lse, rel=1e-12)
        assert references["loss"].value[i] == pytest.approx(lse - row[int(inputs["target"][i])], rel=1e-12)


def test_the_reference_of_cross_entropy_goes_by_blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = CrossEntropy(rows=5, cols=7, dtype="f32")
    inputs = _f64(workload.draw(np.random.default_rng(5)))
    whole = workload.reference(inputs)["loss"]
    monkeypatch.setattr(sys.modules[CrossEntropy.__module__], "BLOCK_ELEMENTS", 15)
    by_blocks = workload.reference(inputs)["loss"]
    np.testing.assert_array_equal(by_blocks.value, whole.value)
    np.testing.assert_array_equal(by_blocks.scale, whole.scale)


def test_the_gradient_of_cross_entropy_is_its_slope() -> None:
    forward = CrossEntropy(rows=4, cols=3, dtype="f32")
    inputs = _f64(forward.draw(np.random.default_rng(6)))
    operands = {**inputs, "lse": forward.reference(inputs)["lse"].value}
    operands["dloss"] = np.random.default_rng(7).standard_normal(4)

    def loss(x: Array) -> float:
        return float((forward.reference({**inputs, "x": x})["loss"].value * operands["dloss"]).sum())

    backward = forward.changed(direction="backward")
    dx = backward.reference(operands)["dx"]
    np.testing.assert_allclose(dx.value, _slopes(loss, inputs["x"]), rtol=1e-6, atol=1e-8)
    block = backward.reference_block(operands, 0, slice(1, 3), slice(1, 3))  # type: ignore[attr-defined]
    np.testing.assert_array_equal(block.value, dx.value[1:3, 1:3])
    np.testing.assert_array_equal(block.scale, dx.scale[1:3, 1:3])


def test_inputs_of_cross_entropy_are_plausible() -> None:
    workload = CrossEntropy(rows=64, cols=1000, dtype="f16", direction="backward")
    inputs = workload.draw(np.random.default_rng(8))
    assert {0, 999} >= {inputs["target"].min() // 100 * 100, inputs["target"].max() // 100 * 100 + 99}
    p = np.exp(inputs["x"].astype(np.float64) - inputs["lse"][:, None]).sum(axis=1)
    assert 0.5 < p.min() < p.max() < 2


@pytest.mark.parametrize(
    "text",
    [
        "softmax:rows=5,cols=33,dtype=f32,prologue=scale,direction=backward",
        "softmax:rows=5,cols=33,dtype=f32,prologue=scale,log=true,direction=backward",
        "cross_entropy:rows=5,cols=33,dtype=f32,direction=backward",
    ],
)
def test_references_of_gradients_are_what_torch_derives(text: str) -> None:
    torch = pytest.importorskip("torch")
    workload = parse(text)
    rng = np.random.default_rng(9)
    forward = workload.changed(direction="forward")
    inputs = _f64(forward.draw(rng))
    right = {name: reference.value for name, reference in forward.reference(inputs).items()}
    x = torch.from_numpy(inputs["x"]).requires_grad_()
    if isinstance(workload, CrossEntropy):
        operands = {**inputs, "lse": right["lse"], "dloss": rng.standard_normal(5)}
        target = torch.from_numpy(inputs["target"].astype(np.int64))
        loss = torch.nn.functional.cross_entropy(x, target, reduction="none")
        loss.backward(torch.from_numpy(operands["dloss"]))
    else:
        assert isinstance(workload, Softmax)
        operands = {**inputs, "y": right["y"], "dy": rng.standard_normal((5, 33))}
        z = x * float(inputs["scale"])
        y = z.log_softmax(dim=1) if workload.log else z.softmax(dim=1)
        y.backward(torch.from_numpy(operands["dy"]))
    assert x.grad is not None
    np.testing.assert_allclose(
        workload.reference(operands)["dx"].value, x.grad.numpy(), rtol=1e-10, atol=1e-12
    )


def test_layernorm_equals_loops() -> None:
    workload = LayerNorm(rows=3, cols=7, dtype="f32")
    inputs = _f64(workload.draw(np.random.default_rng(6)))
    y = workload.reference(inputs)["y"].value
    for i in range(3):
        row = [float(value) for value in inputs["x"][i]]
        mean = math.fsum(row) / 7
        variance = math.fsum((value - mean) ** 2 for value in row) / 7
        for j, value in enumerate(row):
            normal = (value - mean) / math.sqrt(variance + 1e-5)
            assert y[i, j] == pytest.approx(normal * inputs["gamma"][j] + inputs["beta"][j], rel=1e-12)


# -- tolerances against emulated kernels --------------------------------------------------------------------


def _round_tf32(value: Array) -> Array:
    """Round f32 to 11 significant bits, to nearest."""
    bits = np.ascontiguousarray(value).view(np.uint32)
    return ((bits + np.uint32(0xFFF) + ((bits >> 13) & 1)) & np.uint32(0xFFFFE000)).view(np.float32)


def _operand(workload: Workload, value: Array) -> Array:
    if workload.dtype == "i8":
        return value.astype(np.int32)
    single = value.astype(np.float32)
    return _round_tf32(single) if workload.dtype == "tf32" else single


def _run_gemm(workload: Gemm, inputs: Mapping[str, Array], terms: int | None = None) -> Array:
    """Add products in sequence in f32, the order with the largest error; only the first `terms` if given."""
    a, b = (_operand(workload, inputs[name]) for name in ("a", "b"))
    a = a if workload.trans[0] == "n" else a.transpose(0, 2, 1)
    b = b if workload.trans[1] == "n" else b.transpose(0, 2, 1)
    c = np.zeros((workload.batch, workload.m, workload.n), a.dtype)
    for p in range(workload.k if terms is None else terms):
        c += a[:, :, p, None] * b[:, p, None, :]
    if workload.has_bias:
        c += inputs["bias"].astype(np.float32)
    if workload.activation == "relu":
        c = np.maximum(c, np.float32(0))
    elif workload.activation == "gelu":
        root = np.float32(math.sqrt(0.5))
        erf = np.array([math.erf(v) for v in (c * root).ravel()], np.float32).reshape(c.shape)
        c = np.float32(0.5) * c * (np.float32(1) + erf)
    elif workload.activation == "silu":
        c = c / (np.float32(1) + np.exp(np.minimum(-c, np.float32(80))))
    if workload.has_residual:
        c = c + inputs["residual"].astype(np.float32)
    return c.astype(numpy_dtype(workload.out))


def _run_gated_gemm(workload: GatedGemm, inputs: Mapping[str, Array], terms: int | None = None) -> Array:
    """Compute two products of gemm, and round once after they are multiplied."""
    sizes = {"m": workload.m, "n": workload.n, "k": workload.k, "trans": workload.trans}
    product = Gemm(**sizes, dtype=workload.dtype, out="f32")
    gate, up = (
        _run_gemm(product, {"a": inputs["a"][None], "b": inputs[b][None]}, terms)[0]
        for b in ("b_gate", "b_up")
    )
    if workload.activation == "relu":
        gate = np.maximum(gate, np.float32(0))
    elif workload.activation == "gelu":
        erf = np.array([math.erf(v * math.sqrt(0.5)) for v in gate.ravel()], np.float32).reshape(gate.shape)
        gate = np.float32(0.5) * gate * (np.float32(1) + erf)
    else:
        factor = gate if workload.activation == "silu" else np.float32(1)
        gate = factor / (np.float32(1) + np.exp(np.minimum(-gate, np.float32(80))))
    return (gate * up).astype(numpy_dtype(workload.out))


def _run_grouped_gemm(workload: GroupedGemm, inputs: Mapping[str, Array], terms: int | None = None) -> Array:
    """Compute each row of c as a separate product."""
    group = np.searchsorted(inputs["offsets"][1:], np.arange(workload.m), side="right")
    a, b = (_operand(workload, inputs[name]) for name in ("a", "b"))
    b = b if workload.trans == "nn" else b.transpose(0, 2, 1)
    c = np.zeros((workload.m, workload.n), np.float32)
    for p in range(workload.k if terms is None else terms):
        c += a[:, p, None] * b[group, p]
    return c.astype(numpy_dtype(workload.out))


def _run_scaled_gemm(workload: ScaledGemm, inputs: Mapping[str, Array], terms: int | None = None) -> Array:
    """Scale single elements in f32, round scaled weights to the type of a, and add product after product."""
    a, b = inputs["a"].astype(np.float32), inputs["b"]
    if workload.weight == "i4":
        nibbles = np.stack([b.view(np.uint8) & 15, b.view(np.uint8) >> 4], axis=-1).reshape(workload.n, -1)
        b = np.where(nibbles > 7, nibbles.astype(np.int8) - 16, nibbles)
    b, scale_b = b.astype(np.float32), inputs["scale_b"].astype(np.float32)
    c = np.zeros((workload.m, workload.n), np.float32)
    for p in range(workload.k if terms is None else terms):
        place = (slice(None), p // workload.group) if workload.scales == "group" else slice(None)
        left, right = a[:, p], b[:, p] * scale_b[place]
        if workload.is_quantized:
            left = left * inputs["scale_a"][place]
        elif workload.shift:
            right = right + inputs["shift"].astype(np.float32)[place]
        rounded = np.float32 if workload.is_quantized else numpy_dtype(workload.dtype)
        c += left[:, None] * right.astype(rounded).astype(np.float32)
    return c.astype(numpy_dtype(workload.out))


def _run_conv2d(workload: Conv2d, inputs: Mapping[str, Array], terms: int | None = None) -> Array:
    """Add one product after the other in f32 (1x1 filters only: a product of matrices)."""
    x, w = (_operand(workload, inputs[name]) for name in ("x", "w"))
    y = np.zeros((workload.n, workload.h, workload.w, workload.k), np.float32)
    for c in range(workload.c if terms is None else terms):
        y += x[..., c, None] * w[:, 0, 0, c]
    scale, bias, residual = (inputs[name].astype(np.float32) for name in ("scale", "bias", "residual"))
    return np.maximum(y * scale + bias + residual, np.float32(0)).astype(numpy_dtype(storage(workload.dtype)))


def _run_softmax(workload: Softmax, inputs: Mapping[str, Array], terms: int | None = None) -> Array:
    used = workload.cols if terms is None else terms
    scale = np.float32(inputs.get("scale", 1))
    if workload.is_backward:
        y, dy = (inputs[name].astype(np.float32) for name in ("y", "dy"))
        if workload.log:
            dx = dy - np.exp(y) * np.add.accumulate(dy[:, :used], axis=1)[:, -1:]
        else:
            dx = y * (dy - np.add.accumulate(y[:, :used] * dy[:, :used], axis=1)[:, -1:])
        return (scale * dx).astype(numpy_dtype(workload.dtype))
    z = inputs["x"].astype(np.float32) * scale + inputs["mask"].astype(np.float32)
    z = z - z.max(axis=1, keepdims=True)
    total = np.exp(z)[:, :used].sum(axis=1, keepdims=True)
    return (z - np.log(total) if workload.log else np.exp(z) / total).astype(numpy_dtype(workload.dtype))


def _run_cross_entropy(
    workload: CrossEntropy, inputs: Mapping[str, Array], terms: int | None = None
) -> Array:
    """Compute the loss, or the gradient, in which each element is one term."""
    x, target = inputs["x"].astype(np.float32), inputs["target"]
    if workload.is_backward:
        onehot = target[:, None] == np.arange(workload.cols)
        if terms is not None:  # the last column is left out: it is the class of no row
            onehot[:, terms:] = False
        dx = (np.exp(x - inputs["lse"][:, None]) - onehot) * inputs["dloss"][:, None]
        return dx.astype(numpy_dtype(workload.dtype))
    top = x.max(axis=1)
    powers = np.exp(x - top[:, None])[:, : workload.cols if terms is None else terms]
    lse = top + np.log(np.add.accumulate(powers, axis=1)[:, -1])
    return (lse - x[np.arange(workload.rows), target]).astype(np.float32)


def _run_layernorm(workload: LayerNorm, inputs: Mapping[str, Array], terms: int | None = None) -> Array:
    x, gamma, beta = (inputs[name].astype(np.float32) for name in ("x", "gamma", "beta"))
    used = workload.cols if terms is None else terms
    mean = np.add.accumulate(x[:, :used], axis=1)[:, -1:] / np.float32(workload.cols)
    squares = np.add.accumulate(np.square(x[:, :used] - mean), axis=1)[:, -1:] / np.float32(workload.cols)
    y = (x - mean) / np.sqrt(squares + np.float32(workload.eps)) * gamma + beta
    return y.astype(numpy_dtype(workload.dtype))


def _run_scatter_add(workload: ScatterAdd, inputs: Mapping[str, Array], terms: int | None = None) -> Array:
    out = inputs["base"].astype(np.float32) if workload.base else np.zeros(workload.outputs()[0].shape, "f4")
    places = workload.places(inputs["index"][:terms])
    np.add.at(out, places[places >= 0], inputs["x"][:terms][places >= 0].astype(np.float32))
    return out.astype(numpy_dtype(workload.dtype))


RUN: dict[str, Callable[..., Array]] = {
    "gemm": _run_gemm,
    "gated_gemm": _run_gated_gemm,
    "grouped_gemm": _run_grouped_gemm,
    "scaled_gemm": _run_scaled_gemm,
    "scatter_add": _run_scatter_add,
    "conv2d": _run_conv2d,
    "cross_entropy": _run_cross_entropy,
    "softmax": _run_softmax,
    "layernorm": _run_layernorm,
}

EMULATED = [
    *(
        f"gemm:m=61,n=67,k={k},dtype={d},epilogue=bias+gelu"
        for d in ("f32", "tf32", "f16", "bf16")
        for k in (1, 997)
    ),
    "gemm:m=61,n=67,k=1,dtype=f32,epilogue=bias+silu",
    "gemm:m=61,n=67,k=997,dtype=bf16,epilogue=bias+silu+residual",
    "gemm:m=32,n=32,k=20000,dtype=f32",
    "gemm:m=128,n=128,k=512,dtype=tf32,trans=tt,out=f16,epilogue=bias+relu",
    "gemm:m=1,n=1,k=1,dtype=f16,batch=4096",
    "gemm:m=61,n=67,k=1,dtype=e4m3,epilogue=bias+gelu",
    *(
        f"gated_gemm:m=61,n=67,k={k},dtype={d},activation={activation}"
        for d, k, activation in (
            ("f32", 997, "silu"),
            ("tf32", 499, "gelu"),
            ("f16", 1, "sigmoid"),
            ("bf16", 997, "relu"),
            ("f16", 300, "silu"),
        )
    ),
    *(f"grouped_gemm:groups=7,m=61,n=67,k=499,dtype={d},skew=zipf" for d in ("f32", "tf32", "f16", "bf16")),
    "grouped_gemm:groups=3,m=61,n=67,k=129,dtype=e4m3,trans=nt",
    "scaled_gemm:m=61,n=67,k=320,dtype=bf16,weight=i4,scales=group,shift=true",
    "scaled_gemm:m=61,n=67,k=499,dtype=f16",
    "scaled_gemm:m=61,n=67,k=320,dtype=e4m3,scales=group,out=f16",
    "scaled_gemm:m=61,n=67,k=320,dtype=i8,out=f32",
    "scatter_add:rows=4099,cols=67,bins=3,dtype=f32",
    "scatter_add:rows=997,cols=67,bins=61,dtype=bf16,base=true,wraps=true",
    "scatter_add:rows=61,cols=67,bins=99,dtype=f16,index=i32,skipped=5",
    "gemm:m=61,n=67,k=129,dtype=e4m3,trans=nt",
    "gemm:m=61,n=67,k=997,dtype=i8,trans=tn",
    *(
        f"conv2d:n=2,c=129,h=7,w=7,k=31,r=1,s=1,stride=1,pad=0,dtype={dtype},layout=nhwc,"
        "epilogue=scale+bias+residual+relu"
        for dtype in ("f32", "tf32", "f16", "bf16")
    ),
    *(
        f"softmax:rows=33,cols={c},dtype={d},prologue=scale+mask"
        for d in ("f32", "f16", "bf16")
        for c in (1, 4099)
    ),
    *(
        f"softmax:rows=33,cols={c},dtype={d},prologue=scale{more}"
        for c, d in ((67, "f16"), (4099, "f32"))
        for more in (",log=true,direction=backward", ",direction=backward", "+mask,log=true")
    ),
    *(f"cross_entropy:rows=133,cols={c},dtype={d}" for c, d in ((1, "f32"), (67, "f16"), (4099, "bf16"))),
    *(f"cross_entropy:rows=133,cols=67,dtype={d},direction=backward" for d in ("f32", "f16", "bf16")),
    *(f"layernorm:rows=33,cols={c},dtype={d}" for d in ("f32", "f16", "bf16") for c in (1, 2, 4099)),
]


def _share(workload: Workload, got: Array, reference: Reference) -> Array:
    """Return each element's error as a fraction of the tolerance."""
    tolerance = workload.tolerance()
    allowed = tolerance.eps_out * np.abs(reference.value) + tolerance.eps_acc * reference.scale
    return share_of(np.abs(got.astype(np.float64) - reference.value), allowed)


ELSEWHERE = {
    "attention",
    "batchnorm_stats",
    "elementwise",
    "reduction",
    "rmsnorm",
    "strided_elementwise",
    "strided_reduction",
}
"""Operators whose tolerance has a separate test module, such as tests/workloads/test_attention.py."""


def test_every_operator_is_emulated() -> None:
    assert {text.partition(":")[0] for text in EMULATED} == set(RUN)
    assert set(RUN) | ELSEWHERE == set(OPERATORS)


@pytest.mark.parametrize("text", EMULATED)
def test_correct_kernel_is_within_tolerance(text: str) -> None:
    workload = parse(text)
    inputs = workload.draw(np.random.default_rng(8))
    reference = workload.reference(_f64(inputs))[workload.outputs()[0].name]
    share = _share(workload, RUN[workload.operator](workload, inputs), reference)
    assert share.max() < 1
    # A tolerance far above actual errors would hide mistakes: it must be of their order.
    if workload.outputs()[0].size > 1000 and not is_integer(workload.outputs()[0].dtype):
        assert share.max() > 1e-3


@pytest.mark.parametrize("text", [text for text in EMULATED if "k=1," not in text and "cols=1," not in text])
def test_a_kernel_without_the_last_term_is_not_within_tolerance(text: str) -> None:
    """Emulate a kernel whose innermost loop ends one term early."""
    workload = parse(text)
    inputs = workload.draw(np.random.default_rng(9))
    reference = workload.reference(_f64(inputs))[workload.outputs()[0].name]
    run = RUN[workload.operator]
    along_cols = dict.fromkeys(("softmax", "layernorm", "cross_entropy"), "cols")
    terms = {"conv2d": "c", "scatter_add": "rows", **along_cols}.get(workload.operator, "k")
    wrong = _share(workload, run(workload, inputs, terms=getattr(workload, terms) - 1), reference)
    assert wrong.max() > 1


@pytest.mark.parametrize("text", [text for text in EMULATED if "cols=1," not in text])
def test_one_element_of_another_place_is_not_within_tolerance(text: str) -> None:
    """Emulate a kernel that writes a neighbour's result to the last element of its output."""
    workload = parse(text)
    inputs = workload.draw(np.random.default_rng(10))
    reference = workload.reference(_f64(inputs))[workload.outputs()[0].name]
    got = RUN[workload.operator](workload, inputs).reshape(-1)
    right = reference.value.reshape(-1)
    unlike = np.flatnonzero(np.abs(right - right[-1]) > 0.05 * np.abs(right).max())
    got[-1] = got[unlike[-1]]
    share = _share(workload, got.reshape(reference.value.shape), reference)
    assert share.max() > 1
    assert share.argmax() == got.size - 1


@pytest.mark.parametrize("step", [4, 8, 16])
def test_tensor_cores_that_truncate_are_within_tolerance(step: int) -> None:
    """Emulate tensor cores that add a few exact products at once, rounding the sum towards zero."""
    workload = Gemm(m=64, n=64, k=4096, dtype="f16", out="f32")
    exact = _f64(workload.draw(np.random.default_rng(11)))
    c = np.zeros((64, 64))
    for p in range(0, workload.k, step):
        c += exact["a"][0, :, p : p + step] @ exact["b"][0, p : p + step]
        c = (c.view(np.int64) & ~np.int64(2**29 - 1)).view(np.float64)  # keep 24 of 53 bits
    assert _share(workload, c[None], workload.reference(exact)["c"]).max() < 0.5


@pytest.mark.parametrize("promoted_every", [0, 128, 256])
@pytest.mark.parametrize("k", [1, 8, 64, 512, 4096])
def test_tensor_cores_that_keep_13_bits_of_e4m3_are_within_tolerance(k: int, promoted_every: int) -> None:
    """Emulate tensor cores that cut 32 products and the sum at the last bit of the largest, then add them."""
    workload = Gemm(m=64, n=64, k=k, dtype="e4m3", out="f32", accumulate="f32" if promoted_every else "fast")
    exact = _f64(workload.draw(np.random.default_rng(12)))
    c, total = np.zeros((2, 64, 64))
    for p in range(0, k, 32):
        if promoted_every and p % promoted_every == 0:
            total, c = total + c, np.zeros((64, 64))
        products = exact["a"][0, :, p : p + 32, None] * exact["b"][0, None, p : p + 32, :]
        terms = np.concatenate([c[:, None], products], axis=1)
        last_place = np.exp2(np.floor(np.log2(np.abs(terms).max(axis=1))) - 13)
        c = (np.trunc(terms / last_place[:, None]) * last_place[:, None]).sum(axis=1)
    share = _share(workload, (total + c)[None], workload.reference(exact)["c"]).max()
    assert share < 0.9
    assert share > (0.03 if promoted_every else 0.05) or k == 1


def test_sums_of_e4m3_in_f32_have_a_smaller_tolerance() -> None:
    limits = {
        (k, accumulate): Gemm(m=1, n=1, k=k, dtype="e4m3", accumulate=accumulate).tolerance().eps_acc
        for k in (64, 256, 1024, 16384)
        for accumulate in ("fast", "f32")
    }
    assert all(limits[k, "f32"] == limits[k, "fast"] for k in (64, 256))
    assert limits[1024, "f32"] < limits[1024, "fast"] / 2
    assert limits[16384, "f32"] < limits[16384, "fast"] / 15


def test_a_probability_that_is_not_a_normal_number_may_be_zero_in_a_gradient() -> None:
    workload = parse("cross_entropy:rows=1,cols=2,dtype=f32,direction=backward")
    inputs = {
        "x": np.array([[0.0, -87.4]]),
        "target": np.array([0]),
        "lse": np.array([0.0]),
        "dloss": np.array([3.5]),
    }
    gradient, tolerance = workload.reference(inputs)["dx"], workload.tolerance()
    value, scale = gradient.value[0, 1], gradient.scale[0, 1]
    assert 2.0**-126 < value < 3.5 * 2.0**-126  # the probability alone is below the normal numbers
    assert value <= tolerance.eps_acc * scale < 4 * 2.0**-126
