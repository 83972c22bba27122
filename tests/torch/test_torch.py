"""Functions of tunebench.torch: values, gradients, dispatch, and torch's tracers, modes and transforms.

Kernels are chosen as usual and run by the float64 references of their workloads, because compiling one takes
seconds. Tests that use `compiled_kernels` compile theirs, and with `--every-sample` all tests do.
"""

from __future__ import annotations

import functools
import os
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import tunebench.torch as served  # noqa: E402
from tests.fork_server import Programs  # noqa: E402
from tests.torch.reference_kernels import reference_bindings  # noqa: E402
from tunebench.dispatch import DispatchedCall, cpu, forget  # noqa: E402
from tunebench.errors import InputError  # noqa: E402
from tunebench.torch import _tensor  # noqa: E402
from tunebench.torch.functional import custom_op  # noqa: E402

functional = torch.nn.functional
EMPTY = "an empty tensor"
DIFFERS = "a stride or dilation that differs between the axes, or padding between opposite sides"
AXIS = "rows that are not along the last axis"

EXPECTED: dict[str, dict[str, int]] = {
    "matmul": {"tunebench": 12, EMPTY: 3},
    "nn.functional.linear": {"tunebench": 14, EMPTY: 4},
    "nn.functional.conv2d": {"tunebench": 20, DIFFERS: 10},
    "softmax": {"tunebench": 4, AXIS: 1, EMPTY: 1, "an axis that does not exist": 1},
    "log_softmax": {"tunebench": 4, AXIS: 1, EMPTY: 1, "an axis that does not exist": 1},
    "nn.functional.layer_norm": {
        "tunebench": 3,
        EMPTY: 1,
        "a normalisation without weight and bias": 1,
        "kernels need a positive eps, not -0.5": 1,
    },
    "nn.functional.rms_norm": {
        "tunebench": 1,
        EMPTY: 1,
        "a normalisation without weight": 1,
        "kernels need a positive eps, not None": 2,
        "kernels need a positive eps, not -0.5": 1,
    },
    "nn.functional.cross_entropy": {
        "tunebench": 5,
        "not rows of logits with one class each": 10,
        "weights, label smoothing or a deprecated reduction": 6,
    },
    "nn.functional.scaled_dot_product_attention": {
        "tunebench": 8,
        "a gradient of the mask": 1,
        "dropout": 12,
        "queries, keys and values of different kinds": 4,
    },
}
"""Samples of each operator by who runs them: a kernel, or torch for a reason."""


@pytest.fixture(autouse=True)
def _kernels_that_run(request: pytest.FixtureRequest) -> Iterator[None]:
    forget()
    if "compiled_kernels" in request.fixturenames or request.config.getoption("--every-sample"):
        yield
        return
    with reference_bindings():
        yield


def called(function: Callable[..., Any], *arguments: Any, **named: Any) -> tuple[Any, list[DispatchedCall]]:
    """Run a function with tuned kernels preferred; return its result and the dispatched calls."""
    calls: list[DispatchedCall] = []
    with served.watching(calls.append), served.prefer("tunebench"):
        return function(*arguments, **named), calls


def by(calls: list[DispatchedCall]) -> Counter[str]:
    return Counter(call.by for call in calls)


# -- OpInfo samples ------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", EXPECTED)
def test_opinfo_samples(name: str) -> None:
    pytest.importorskip("expecttest", reason="PyTorch's samples need the package expecttest")
    from tests.torch import opinfo

    assert opinfo.count(name, torch.float32) == EXPECTED[name]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["softmax", "nn.functional.layer_norm", "nn.functional.cross_entropy"])
def test_opinfo_samples_of_short_types(name: str, dtype: Any) -> None:
    pytest.importorskip("expecttest", reason="PyTorch's samples need the package expecttest")
    from tests.torch import opinfo

    assert opinfo.count(name, dtype) == EXPECTED[name]


# -- epilogues, expressions and reductions -------------------------------------------------------------------


def drawn(*shape: int) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_()


FUSED: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "linear": (
        lambda x, w, b, r: served.linear(x, w, b, activation="gelu", residual=r),
        lambda x, w, b, r: functional.gelu(functional.linear(x, w, b)) + r,
        ((2, 4, 8), (16, 8), (16,), (2, 4, 16)),
    ),
    "linear relu": (
        lambda x, w, b: served.linear(x, w, b, activation="relu"),
        lambda x, w, b: functional.linear(x, w, b).relu(),
        ((8, 8), (16, 8), (16,)),
    ),
    "gated": (
        served.gated_linear,
        lambda x, g, u: functional.silu(functional.linear(x, g)) * functional.linear(x, u),
        ((8, 8), (16, 8), (16, 8)),
    ),
    "softmax": (
        lambda x, m: served.softmax(x, -1, scale=0.5, mask=m),
        lambda x, m: functional.softmax(0.5 * x + m, -1),
        ((4, 16), (4, 16)),
    ),
    "rms": (
        lambda x, w: served.rms_norm(x, (16,), w, 0.1),
        lambda x, w: functional.rms_norm(x, (16,), w, 0.1),
        ((4, 16), (16,)),
    ),
    "added": (
        lambda x, r, w, b, c: served.add_layer_norm(x, r, (16,), w, b, 0.1, input_bias=c),
        lambda x, r, w, b, c: (functional.layer_norm(x + r + c, (16,), w, b, 0.1), x + r + c),
        ((4, 16), (4, 16), (16,), (16,), (16,)),
    ),
    "conv": (
        lambda x, w, b, s, r: served.conv2d(x, w, b, 1, 1, scale=s, residual=r, relu=True),
        lambda x, w, b, s, r: (
            functional.conv2d(x, w, None, 1, 1) * s.view(-1, 1, 1) + b.view(-1, 1, 1) + r
        ).relu(),
        ((2, 4, 6, 6), (4, 4, 3, 3), (4,), (4,), (2, 4, 6, 6)),
    ),
}


@pytest.mark.parametrize("name", FUSED)
def test_epilogues_have_right_values_and_gradients(name: str) -> None:
    ours, theirs, shapes = FUSED[name]
    operands = [drawn(*shape) for shape in shapes]
    (made, without), calls = called(lambda: (ours(*operands), _without_gradients(ours, operands)))
    exact = theirs(*[t.detach().double().requires_grad_() for t in operands])
    made, without, exact = (t if isinstance(t, tuple) else (t,) for t in (made, without, exact))
    assert by(calls) == {"tunebench": len(calls)}
    for actual, reference, expected in zip(made, without, exact, strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(reference.double(), expected, rtol=1e-5, atol=1e-5)
    slopes = [torch.linspace(0, 1, t.numel()).view_as(t) for t in made]
    gradients, calls = called(torch.autograd.grad, made, operands, slopes)
    doubles = [t.detach().double().requires_grad_() for t in operands]
    expected = theirs(*doubles)
    expected = expected if isinstance(expected, tuple) else (expected,)
    for actual, reference in zip(
        gradients, torch.autograd.grad(expected, doubles, [s.double() for s in slopes]), strict=True
    ):
        torch.testing.assert_close(actual.double(), reference, rtol=1e-5, atol=1e-4)
    assert by(calls) == {"tunebench": len(calls)}
    assert calls


def _without_gradients(function: Callable[..., Any], operands: list[Any]) -> Any:
    with torch.no_grad():
        return function(*operands)


def test_elementwise_expressions() -> None:
    x, b = drawn(4, 16).detach(), drawn(16).detach()
    y, calls = called(served.elementwise, "gelu(x+b)*s", x=x, b=b, s=0.5)
    torch.testing.assert_close(y, functional.gelu(x + b) * 0.5)
    assert by(calls) == {"tunebench": 1}
    y, calls = called(served.elementwise, "max(x,2)/s", x=drawn(4, 16), s=0.5)
    assert (y.requires_grad, by(calls)) == (True, {"torch": 1})
    torch.testing.assert_close(y, drawn(4, 16).clamp(min=2) / 0.5)
    with pytest.raises(Exception, match="operands are x"):
        served.elementwise("x+b", x=x)
    x, m = drawn(2, 3, 16).detach(), drawn(2, 3, 1).detach()
    y, (call,) = called(served.elementwise, "(x-m)*b", x=x, m=m, b=b)
    torch.testing.assert_close(y, (x - m) * b)
    assert str(call.workload).endswith("expression=(x-m)*b,vectors=b,columns=m")


REDUCED = {"sum": torch.sum, "mean": torch.mean, "max": torch.amax, "min": torch.amin}


@pytest.mark.parametrize(
    ("reduce", "axis", "problem"),
    [
        ("mean", (0, -3), "rows=6,cols=20,dtype=f32,expression=x*2,reduce=mean,axis=rows,then=tanh(x)"),
        ("max", None, "rows=1,cols=120,dtype=f32,expression=x*2,reduce=max,then=tanh(x)"),
    ],
)
def test_reductions(reduce: Any, axis: Any, problem: str) -> None:
    x = drawn(2, 3, 4, 5).detach()
    y, (call,) = called(served.reduce, "x*2", reduce=reduce, axis=axis, then="tanh(total)", x=x)
    over = axis if axis is not None else tuple(range(4))
    torch.testing.assert_close(y, REDUCED[reduce](x * 2, dim=over).tanh())
    assert (call.by, str(call.workload)) == ("tunebench", f"reduction:{problem}")


@pytest.mark.slow
def test_reductions_of_vectors_and_columns() -> None:
    x, b, m = drawn(2, 3, 16).detach(), drawn(16).detach(), drawn(2, 3, 1).detach()
    for axis in (-1, (0, 1)):
        y, (call,) = called(served.reduce, "(x-m)*b*s", axis=axis, x=x, m=m, b=b, s=2)
        torch.testing.assert_close(y, ((x - m) * b * 2).sum(axis), rtol=1e-5, atol=1e-5)
        assert (call.by, call.workload.lists_of(call.workload.tree)) == (  # type: ignore[union-attr]
            "tunebench",
            {"vectors": "b", "columns": "m", "scalars": "s"},
        )


def test_reductions_that_torch_runs() -> None:
    x = drawn(2, 3, 16)
    y, calls = called(served.reduce, "square(x)", axis=-1, x=x)  # gradients
    assert (y.requires_grad, by(calls)) == (True, {"torch": 1})
    plain = x.detach()
    y, (call,) = called(served.reduce, "square(x)", axis=1, x=plain)
    torch.testing.assert_close(y, plain.square().sum(1))
    assert call.reason == "axes that are neither the first nor the last"
    y, (call,) = called(served.reduce, "x*y", axis=(1,), x=plain[:, :1], y=plain[:1])
    torch.testing.assert_close(y, (plain[:, :1] * plain[:1]).sum(1))
    with pytest.raises(Exception, match="Known: max, mean, min, sum"):
        served.reduce("x", reduce="product", x=plain)
    with pytest.raises(Exception, match="then=x\\+y must have exactly one name"):
        served.reduce("x", then="x+y", x=plain)


def test_product_of_vectors_is_a_scalar() -> None:
    a, b = drawn(8).detach(), drawn(8).detach()
    y, (call,) = called(served.matmul, a, b)
    assert call.variant is not None
    torch.testing.assert_close(y, a @ b)


@pytest.mark.slow
def test_transposed_operands_are_not_copied() -> None:
    a, b = drawn(8, 8).detach(), drawn(16, 8).detach()
    (call,) = called(served.matmul, a, b.T)[1]
    assert str(call.workload) == "gemm:m=8,n=16,k=8,dtype=f32,trans=nt"
    last = drawn(2, 16, 6, 6).detach().contiguous(memory_format=torch.channels_last)
    filters = drawn(16, 1, 3, 3).detach().contiguous(memory_format=torch.channels_last)
    y, (call,) = called(served.conv2d, last, filters, groups=16)
    assert (call.variant, call.workload.layout) == ("conv2d/numba_cpu_depthwise", "nhwc")  # type: ignore[union-attr]
    assert y.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(y, functional.conv2d(last, filters, groups=16), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_operands_that_torch_does_not_copy_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = torch.randn(2, 4, 2, 8).transpose(1, 2)
    calls: list[DispatchedCall] = []
    with served.watching(calls.append):
        served.scaled_dot_product_attention(heads, heads, heads)
    assert calls[0].reason == "heads that are not contiguous"
    (call,) = called(served.scaled_dot_product_attention, heads, heads, heads)[1]
    assert call.by == "tunebench"  # preferring tuned kernels accepts the copy


# -- expressions as activations ------------------------------------------------------------------------------

TANH_GELU = "0.5*x*(1+tanh(0.7978845608028654*(x+0.044715*x*x*x)))"


@pytest.mark.slow
def test_layers_with_expression_as_activation() -> None:
    x, w, b = (t.detach() for t in (drawn(8, 8), drawn(16, 8), drawn(16)))
    y, calls = called(served.linear, x, w, b, activation=TANH_GELU)
    expected = functional.gelu(functional.linear(x, w, b).double(), approximate="tanh")
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    assert by(calls) == {"tunebench": 1}
    assert str(calls[0].workload) == f"gemm:m=8,n=16,k=8,dtype=f32,trans=nt,epilogue=bias,act={TANH_GELU}"


ENDS: dict[str, Callable[..., Any]] = {
    "max(min(x,6),0)": functional.relu6,
    TANH_GELU: functools.partial(functional.gelu, approximate="tanh"),
    "silu": functional.silu,
}


@pytest.mark.parametrize("activation", ENDS)
@pytest.mark.parametrize("is_image", [False, True])
def test_activations_have_gradients_of_any_order(activation: str, is_image: bool) -> None:
    """Gradients by torch where they are needed, and by the operator's own formulas."""
    if is_image:
        operands = (drawn(2, 4, 5, 5), drawn(4, 4, 3, 3), drawn(4), drawn(4))
        plain = functional.conv2d(operands[0], operands[1], None, padding=1)
        plain = plain * operands[3].view(-1, 1, 1) + operands[2].view(-1, 1, 1)
        x, w, b, s = operands
        geometry = (1, 1, 1, 1, activation, "nchw")
        with served.prefer("torch"):
            ours = served.conv2d(x, w, b, 1, 1, scale=s, activation=activation)
            direct = torch.ops.tunebench.conv2d(x, w, s, b, None, *geometry)
    else:
        operands = (drawn(8, 8), drawn(16, 8), drawn(16))
        plain = functional.linear(*operands)
        x, w, b = operands
        with served.prefer("torch"):
            ours = served.linear(x, w, b, activation=activation)
            direct = torch.ops.tunebench.gemm(x[None], w[None], b, None, "nt", activation)[0]
    expected = ENDS[activation](plain)
    slopes = torch.linspace(0, 1, expected.numel()).view_as(expected)
    with served.prefer("torch"):
        first, second, right = (_twice(y, operands, slopes) for y in (ours, direct, expected))
    for actual in (ours, direct):
        torch.testing.assert_close(actual, expected)
    for actual in (first, second):
        torch.testing.assert_close(actual, right, rtol=1e-3, atol=1e-3)


def _twice(y: Any, operands: tuple[Any, ...], slopes: Any) -> Any:
    once = torch.autograd.grad(y, operands, slopes, create_graph=True)
    size = sum(gradient.square().sum() for gradient in once)
    return once, torch.autograd.grad(size, operands, materialize_grads=True)


def test_workloads_name_their_activation() -> None:
    x, w, b = (t.detach() for t in (drawn(2, 4, 6, 6), drawn(4, 4, 3, 3), drawn(4)))
    epilogues = []
    for options in ({"activation": "max(min( x,6), 0)"}, {"activation": "relu(x)"}, {"relu": True}):
        calls: list[DispatchedCall] = []
        with served.watching(calls.append), served.prefer("torch"):
            served.conv2d(x, w, b, **options)
            served.linear(x, drawn(4, 6).detach(), activation="relu")
        epilogues.append([str(call.workload).partition("layout=nchw")[2] for call in calls if call.workload])
        assert str(calls[1].workload) == "gemm:m=48,n=4,k=6,dtype=f32,trans=nt,act=relu(x)"
    first_epilogues = [listed[0] for listed in epilogues]
    assert first_epilogues == [
        ",epilogue=bias,act=max(min(x,6),0)",
        ",epilogue=bias+relu",
        ",epilogue=bias+relu",
    ]


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"activation": "swish(x)"}, "unknown function"),
        ({"activation": "erf"}, r"erf\(x\)"),
        ({"activation": "x*y"}, "expression in x alone"),
        ({"activation": "tanh(x)", "relu": True}, "two activations"),
    ],
)
def test_invalid_activation_is_refused(how: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        served.conv2d(drawn(1, 1, 4, 4), drawn(1, 1, 3, 3), **how)
    if "relu" not in how:
        with pytest.raises(InputError, match=says):
            served.linear(drawn(4, 4), drawn(4, 4), **how)


# -- torch's checks of operators, tracers and modes ----------------------------------------------------------


def _cases() -> dict[str, tuple[Any, ...]]:
    classes = torch.arange(4) % 16
    heads = [drawn(1, n, 4, 8) for n in (4, 2, 2)]
    return {
        "gemm": (drawn(1, 8, 8), drawn(1, 16, 8), drawn(16), None, "nt", "relu"),
        "gated_gemm": (drawn(8, 8), drawn(16, 8), drawn(16, 8), "nt", "silu"),
        "conv2d": (drawn(2, 4, 6, 6), drawn(4, 4, 3, 3), None, drawn(4), None, 1, 1, 1, 1, "relu", "nchw"),
        "conv2d_input": (drawn(2, 4, 6, 6), drawn(4, 4, 3, 3), 6, 6, 1, 1, 1, 1, "nchw"),
        "conv2d_weight": (drawn(2, 4, 6, 6), drawn(2, 4, 6, 6), 3, 3, 1, 1, 1, 1, "nchw"),
        "softmax": (drawn(4, 16), drawn(4, 16), 0.5, False),
        "softmax_backward": (drawn(4, 16), drawn(4, 16), None, True),
        "norm": (drawn(4, 16), drawn(16), drawn(16), drawn(16), drawn(4, 16), True, 0.1),
        "norm_backward": tuple(
            t.detach() for t in (drawn(4, 16), drawn(16), drawn(4), drawn(4), drawn(4, 16))
        ),
        "cross_entropy": (drawn(4, 16), classes, -100),
        "cross_entropy_backward": (
            *(drawn(4, 16).detach(), classes, drawn(4).detach(), drawn(4).detach()),
            -100,
        ),
        "attention": (*heads, drawn(1, 4, 1, 4).detach(), True, 1.0),
        "attention_backward": (
            *(t.detach() for t in (*heads, drawn(1, 4, 4, 8), drawn(1, 4, 4), drawn(1, 4, 4, 8))),
            *(None, True, None),
        ),
        "elementwise": (
            *(drawn(4, 16).detach(), drawn(16).detach(), *[None] * 6),
            *("gelu(x+b)*s", "b", "", "s", [0.5]),
        ),
        "reduction": (
            *(drawn(4, 16).detach(), drawn(4).detach(), *[None] * 6),
            *("square(x-m)*s", "", "m", "s", [0.5], "mean", "cols", "rsqrt(x+2)"),
        ),
    }


def test_every_operator_has_a_check() -> None:
    names = {name.partition("::")[2].partition(".")[0] for name in torch._C._dispatch_get_all_op_names()
             if name.startswith("tunebench::")}  # fmt: skip
    # Tests of compiled, saved, ONNX and packed models run these.
    assert set(_cases()) == names - {"kernel", "saved_kernel", "onnx_node", "packed_linear"}


@pytest.mark.slow
@pytest.mark.parametrize("preferred", ["tunebench", "torch"])
def test_operators_pass_opcheck(preferred: Any, request: pytest.FixtureRequest) -> None:
    checks = ["test_schema", "test_faketensor"]  # of what an implementation returns, and where it writes
    if preferred == "torch" or request.config.getoption("--every-sample"):
        checks += ["test_autograd_registration", "test_aot_dispatch_dynamic"]
    with served.prefer(preferred):
        for name, arguments in _cases().items():
            torch.library.opcheck(getattr(torch.ops.tunebench, name).default, arguments, test_utils=checks)


@pytest.mark.parametrize("centred", [True, False])
def test_unsaved_statistics_are_recomputed_with_the_same_eps(centred: bool) -> None:
    x, w, b = drawn(4, 16), drawn(16), drawn(16)
    with served.prefer("torch"):
        y = torch.ops.tunebench.norm(x, w, b if centred else None, None, None, False, 0.1)[0]
    plain = functional.layer_norm(x, (16,), w, b, 0.1) if centred else functional.rms_norm(x, (16,), w, 0.1)
    torch.testing.assert_close(y, plain)
    slope = drawn(4, 16).detach()
    with served.prefer("torch"):
        gradients = torch.autograd.grad(y, (x, w), slope)
    for actual, expected in zip(gradients, torch.autograd.grad(plain, (x, w), slope), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_functions_under_torch_compile() -> None:
    x, w, b = drawn(4, 16), drawn(16), drawn(16)

    def network(x: Any) -> Any:
        return served.softmax(served.layer_norm(x, (16,), w, b), -1)

    compiled = torch.compile(network, backend="aot_eager", fullgraph=True)

    def run() -> Any:
        y = compiled(x)
        return y, torch.autograd.grad(y[:, 0].sum(), (x, w, b))

    (y, compiled_gradients), calls = called(run)
    with served.prefer("torch"):
        expected = network(x)
        gradients = torch.autograd.grad(expected[:, 0].sum(), (x, w, b))
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    for actual, expected_gradient in zip(compiled_gradients, gradients, strict=True):
        torch.testing.assert_close(actual, expected_gradient, rtol=1e-3, atol=1e-5)
    assert by(calls) == {"tunebench": 4}, [str(call) for call in calls]


def test_dispatch_mode_sees_one_operator() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    x = drawn(4, 16).detach()
    with Mode():
        called(served.softmax, x, -1)
    assert [name for name in seen if "view" not in name] == ["tunebench.softmax.default"]


def test_torch_runs_transforms_and_subclasses() -> None:
    x = drawn(3, 4, 16).detach()
    y, calls = called(torch.func.vmap(lambda row: served.softmax(row, -1)), x)
    torch.testing.assert_close(y, x.softmax(-1))
    assert calls[0].reason == "a torch.func transform is active"

    class Own(torch.Tensor):
        pass

    y, calls = called(served.softmax, x.as_subclass(Own), -1)
    assert (type(y), calls[0].by) == (Own, "torch")


# -- second gradients, autocast, errors ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (served.matmul, ((4, 8), (8, 8))),
        (lambda x, w: served.conv2d(x, w, padding=(1, 0)), ((1, 2, 4, 4), (2, 2, 3, 3))),
        (lambda x: served.softmax(x, -1, scale=0.5), ((4, 16),)),
        (lambda x: served.log_softmax(x, -1), ((4, 16),)),
    ],
)
def test_second_gradients(function: Any, shapes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def second(*operands: Any) -> Any:
        (first,) = torch.autograd.grad(function(*operands).square().sum(), operands[:1], create_graph=True)
        return torch.autograd.grad(first.square().sum(), operands)

    # The formulas do not depend on the implementation; torch's needs no compilation.
    with served.prefer("torch"):
        by_torch = second(*[drawn(*shape) for shape in shapes])
        monkeypatch.setattr(custom_op.CachedDispatch, "has_tuned_gradient", lambda _: True)
        by_tuned = second(*[drawn(*shape) for shape in shapes])
        monkeypatch.undo()
        expected = second(*[drawn(*shape).detach().double().requires_grad_() for shape in shapes])
    for plain, tuned_gradient, exact in zip(by_torch, by_tuned, expected, strict=True):
        torch.testing.assert_close(plain.double(), exact, rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(tuned_gradient.double(), exact, rtol=1e-4, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "call",
    [
        lambda: served.layer_norm(drawn(4, 16), (16,), drawn(16), drawn(16)),
        lambda: served.cross_entropy(drawn(4, 16), torch.arange(4)),
        lambda: served.scaled_dot_product_attention(*[drawn(1, 2, 4, 8)] * 3),
    ],
)
def test_missing_second_gradients_raise(call: Any) -> None:
    leaves: list[Any] = []

    def twice() -> None:
        y = call()
        node, stack = None, [y.grad_fn]
        while stack:
            node = stack.pop()
            if hasattr(node, "variable"):
                leaves.append(node.variable)
            stack += [parent for parent, _ in node.next_functions if parent is not None]
        (first, *_) = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
        first.square().sum().backward()

    with pytest.raises(RuntimeError, match="prefer"):
        called(twice)


@pytest.mark.slow
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_autocast_returns_the_same_types_as_torch(given: Any) -> None:
    x, w, v = (drawn(*shape).detach().to(given) for shape in ((8, 8), (16, 8), (8,)))
    image = drawn(2, 4, 6, 6).detach().to(given)
    pairs: dict[str, tuple[Any, Any]] = {
        "linear": (lambda: served.linear(x, w), lambda: functional.linear(x, w)),
        "softmax": (lambda: served.softmax(x, -1), lambda: functional.softmax(x, -1)),
        "norm": (
            lambda: served.layer_norm(x, (8,), v, v),
            lambda: functional.layer_norm(x, (8,), v, v),
        ),
        "conv": (lambda: served.conv2d(image, image), lambda: functional.conv2d(image, image)),
        "loss": (
            lambda: served.cross_entropy(x, torch.arange(8)),
            lambda: functional.cross_entropy(x, torch.arange(8)),
        ),
    }
    with torch.autocast("cpu", dtype=torch.bfloat16), served.prefer("torch"):
        for name, (ours, theirs) in pairs.items():
            assert ours().dtype == theirs().dtype, name
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, calls = called(served.linear, x, w)
    assert (y.dtype, by(calls), calls[0].workload.dtype) == (torch.bfloat16, {"tunebench": 1}, "bf16")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: served.matmul(*[drawn(4, 4).double()] * 2), "not torch.float64"),
        (lambda: served.linear(drawn(4, 4), drawn(4)), "shapes that torch's linear does not multiply"),
        (lambda: served.softmax(drawn(4, 4), 0), AXIS),
        (lambda: served.conv2d(drawn(1, 1, 4, 4), drawn(1, 1, 3, 3), stride=(1, 2)), DIFFERS),
        (lambda: served.layer_norm(drawn(4, 4), (4,)), "without weight and bias"),
        (lambda: served.rms_norm(drawn(4, 4), (4,), drawn(4)), "a positive eps, not None"),
        (lambda: served.cross_entropy(drawn(4, 4), torch.arange(4), label_smoothing=0.1), "smoothing"),
        (
            lambda: served.scaled_dot_product_attention(*[drawn(1, 1, 4, 4)] * 3, attn_mask=drawn(4, 4)),
            "a gradient of the mask",
        ),
    ],
)
def test_torch_runs_unsupported_calls_with_a_reason(call: Any, reason: str) -> None:
    with served.prefer("tunebench"):
        calls = served.dispatch_report(call)
    assert (calls[0].by, reason in calls[0].reason) == ("torch", True), calls[0].reason


def test_errors_are_those_of_torch() -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        called(served.matmul, drawn(4, 8), drawn(4, 8))
    for wrong in (16, -1):
        with pytest.raises(IndexError, match="out of bounds"):
            called(served.cross_entropy, drawn(4, 16), torch.full((4,), wrong))


# -- processes and threads -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("compiled_kernels")
def test_eight_concurrent_threads() -> None:
    wrong: list[Any] = []
    together = threading.Barrier(8)
    custom_op._dispatch_cache.clear()

    def work(seed: int) -> None:
        rows = torch.randn(seed + 4, 16, generator=torch.Generator().manual_seed(seed))
        together.wait()
        with served.prefer("tunebench"):
            for _ in range(30):
                x = rows.clone().requires_grad_()
                y = served.softmax(x, -1)
                y.square().sum().backward()
                z = rows.clone().requires_grad_()
                want = z.softmax(-1)
                want.square().sum().backward()
                if (y - want).abs().max() > 1e-4 or (x.grad - z.grad).abs().max() > 1e-3:
                    wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.usefixtures("compiled_kernels")
@pytest.mark.slow
def test_number_of_torch_threads_is_unchanged(programs: Programs) -> None:
    """Numba sets the number of OpenMP threads at its first kernel, and torch may share that OpenMP."""
    script = (
        "import torch\n"
        "torch.set_num_threads(1)\n"
        "from tunebench.torch import prefer, softmax\n"
        "with prefer('tunebench'):\n"
        "    softmax(torch.ones(4, 16), -1)\n"
        "print(torch.get_num_threads())\n"
    )
    run = programs.run(["-c", script])
    assert (run.returncode, run.stdout.split()) == (0, ["1"]), run.stderr


@pytest.mark.usefixtures("compiled_kernels")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_forked_child_runs_kernels_without_numba_threads() -> None:
    x = drawn(4, 16).detach()
    with served.prefer("tunebench"):
        served.softmax(x, -1)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)  # as workers of a DataLoader do: torch's threads are gone after the fork
            y, calls = called(served.softmax, x, -1)
            right = torch.allclose(y, x.softmax(-1))
            os.write(write, f"{right} {calls[0].by} {cpu.forked() is not None}".encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        printed = pipe.read()
    _, status = os.waitpid(child, 0)
    assert status == 0
    right, ran, gone = printed.split()
    assert right == "True"
    assert ran == ("torch" if gone == "True" else "tunebench")


# -- deprecated names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new"), [("record", "profile"), ("Recording", "DemandProfile"), ("explain", "dispatch_report")]
)
def test_deprecated_names_warn(old: str, new: str) -> None:
    with pytest.warns(FutureWarning, match=f"torch.{old} is deprecated .* use tunebench.torch.{new}"):
        renamed = getattr(served, old)
    assert renamed is getattr(served, new)


def test_views_between_multiples_of_an_access_are_copied_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a view may start anywhere in memory; kernels access 16 bytes at once."""
    stream = types.SimpleNamespace(cuda_stream=7)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: stream)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    given: list[Any] = []
    kernel: Any = types.SimpleNamespace(scratch_bytes=0, run=lambda *addresses, **_: given.extend(addresses))
    logits = torch.randn(3, 257).to(torch.bfloat16)
    _tensor._launch_on_gpu(kernel, (logits, logits[1:], 0.5), torch.device("cuda", 0))
    assert given[0] == logits.data_ptr()
    assert given[1] not in (logits[1:].data_ptr(), logits.data_ptr())
    assert given[1] % 16 == 0
    assert given[2] == 0.5
    assert torch.equal(_tensor.aligned(logits[1:]), logits[1:])
