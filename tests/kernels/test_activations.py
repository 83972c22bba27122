"""Contract of every record of `tunebench.activation`: each lowering computes what torch computes."""

from __future__ import annotations

import functools
import operator
from typing import Any

import numpy as np
import pytest

from tests.kernels import kernel_checks as checks
from tests.kernels.kernel_checks import H100
from tests.support import needs_compiler, needs_torch
from tunebench import kernels
from tunebench.activation import ACTIVATIONS, DEFINITIONS, Activation
from tunebench.device import local_cpu
from tunebench.emulate.emulator import emulate
from tunebench.emulate.numba_simulator import simulate
from tunebench.expression import FUNCTIONS, SHORTHANDS, canonical, names, parse
from tunebench.kernels.common import cuda_expression
from tunebench.kernels.common.cuda import helpers
from tunebench.kernels.common.numba_expression import in_cuda, on_cpu
from tunebench.kernels.elementwise.cuda_vector import CudaVectorElementwise
from tunebench.libraries import elementwise, gated_gemm, gemm
from tunebench.measure.verify import draw, worst_error
from tunebench.space import Config
from tunebench.variant import CudaVariant, Launch, NumbaCpuVariant, NumbaCudaVariant, Scalar
from tunebench.workloads import parse as workload_of
from tunebench.workloads.common import expression_value as _expression
from tunebench.workloads.common.activation import apply

SUMS = np.concatenate([np.linspace(-20, 20, 4001), [-300.0, -90.0, -40.0, 40.0, 90.0, 300.0]])

every_activation = pytest.mark.parametrize("record", ACTIVATIONS.values(), ids=list(ACTIVATIONS))


def by_torch(record: Activation) -> Any:
    """Return torch's function of a tensor."""
    import torch

    return functools.partial(operator.attrgetter(record.torch)(torch), **record.arguments)


def workloads_of(record: Activation) -> list[str]:
    """Return a small workload of each operator that applies activations."""
    name = record.name
    return [
        f"gemm:m=9,n=17,k=33,dtype=f32,trans=nt,epilogue=bias,act={name}(x)",
        f"gated_gemm:m=9,n=17,k=33,dtype=f32,trans=nt,activation={name}",
        f"elementwise:rows=5,cols=33,dtype=f32,expression={name}(x+b)*y,vectors=b",
    ]


# -- the record ----------------------------------------------------------------------------------------------


@every_activation
def test_texts_are_canonical(record: Activation) -> None:
    assert canonical(record.definition) == record.definition
    assert names(parse(record.definition)) == ("x",)
    assert canonical(f"{record.name}(x)") == record.expression
    assert set(names(parse(record.gradient or "x"))) <= {"x", "y", "dy"}
    assert not record.backward or record.gradient
    if record.gradient:
        assert canonical(record.gradient) == record.gradient


@every_activation
def test_functions_of_expressions_and_definitions_are_apart(record: Activation) -> None:
    assert (record.name in FUNCTIONS) == record.is_function
    assert (record.name in SHORTHANDS) == (record.name in DEFINITIONS) == (not record.is_function)
    assert record.is_function or record.slope is None  # its errors are bounded by the definition's
    assert not record.functor or f"struct {record.functor} {{" in kernels.include("epilogue.cuh")


@every_activation
def test_the_definition_is_the_reference(record: Activation) -> None:
    value, error = _expression.evaluate(parse(record.definition), {"x": SUMS})
    assert np.isfinite(error).all()
    scale = 1 + np.abs(SUMS)  # a definition may cancel where the function of the language does not
    np.testing.assert_allclose(value / scale, apply(record.name, SUMS) / scale, rtol=0, atol=1e-15)


@every_activation
@needs_torch
def test_the_reference_is_torch(record: Activation) -> None:
    import torch

    expected = by_torch(record)(torch.from_numpy(SUMS)).numpy()
    np.testing.assert_allclose(apply(record.name, SUMS), expected, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("name", [name for name, record in ACTIVATIONS.items() if record.slope is not None])
def test_no_activation_is_steeper_than_its_slope(name: str) -> None:
    x = np.linspace(-800, 800, 2_000_001)
    steepest, slope = np.abs(np.diff(apply(name, x)) / np.diff(x)).max(), ACTIVATIONS[name].slope
    assert slope is not None
    assert slope - 0.002 < steepest <= slope + 1e-9


@pytest.mark.parametrize("name", [name for name, record in ACTIVATIONS.items() if record.gradient])
@needs_torch
def test_the_gradient_is_that_of_torch(name: str) -> None:
    import torch

    record = ACTIVATIONS[name]
    # No argument is at a kink, where conventions differ.
    x = torch.linspace(-20.0003, 19.9998, 4001, dtype=torch.float64).requires_grad_()
    y = by_torch(record)(x)
    dy = torch.linspace(0.5, 1.5, x.numel(), dtype=torch.float64)
    (expected,) = torch.autograd.grad(y, x, dy)
    operands = {"x": x.detach().numpy(), "y": y.detach().numpy(), "dy": dy.numpy()}
    gradient, _ = _expression.evaluate(parse(record.gradient), operands)
    np.testing.assert_allclose(gradient, expected.numpy(), rtol=1e-7, atol=1e-9)  # torch has constants in f32
    if record.backward:
        argument = y.detach() if record.reads_result else x.detach()
        got = getattr(torch.ops.aten, record.backward)(dy, argument, **record.arguments)
        torch.testing.assert_close(got, expected)


# -- kernels -------------------------------------------------------------------------------------------------


class EveryFunctor(CudaVectorElementwise):
    """Row i of the output is the i-th activation of x: all functors in one executable."""

    def source(self, workload: Any, config: Config) -> str:
        """Return the functors, each generated one under its own name, and a kernel that applies them."""
        structs, rows = "", ""
        for index, name in enumerate(ACTIVATIONS):
            functor, made = cuda_expression.functor(name), cuda_expression.functor_source(name)
            if made:
                functor = f"Injected{index}"
                structs += "struct " + made.rpartition("struct ")[2].replace("Injected", functor)
            rows += f"  out[{index} * cols + i] = {functor}()(x[{index} * cols + i]);\n"
        kernel = (
            "__global__ void apply(const float* x, float* out, int cols) {\n  const int i = threadIdx.x;\n"
        )
        return helpers("types", "epilogue", "reduce") + structs + kernel + rows + "}\n"

    def launches(self, workload: Any, config: Config) -> tuple[Launch, ...]:
        """Return one block with a thread for each column."""
        arguments = ("x", "out", Scalar("int", workload.cols))
        return (Launch(entry="apply", grid=(1, 1, 1), block=(workload.cols, 1, 1), arguments=arguments),)


def assert_close_to_reference(name: str, x: Any, computed: Any) -> None:
    """Check values in f32 by the error analysis that kernels are verified with."""
    value, error = _expression.evaluate(parse(f"{name}(x)"), {"x": x.astype(np.float64)})
    assert np.all(np.abs(computed - value) <= np.maximum(error, 2.0**-23 * np.abs(value))), name


@needs_compiler
def test_cuda_computes_every_activation() -> None:
    x = np.linspace(-20, 20, 256, dtype=np.float32)
    workload = workload_of(f"elementwise:rows={len(ACTIVATIONS)},cols={x.size},dtype=f32,expression=x")
    variant = EveryFunctor()
    inputs = {"x": np.tile(x, (len(ACTIVATIONS), 1))}
    computed = emulate(variant, workload, variant.default(workload, H100), inputs)["out"]
    for name, row in zip(ACTIVATIONS, computed, strict=True):
        assert_close_to_reference(name, x, row)


@every_activation
def test_numba_cuda_computes_it(record: Activation) -> None:
    """Run the function that the kernels of gemm, gated_gemm and conv2d inline as plain Python."""
    function: Any = in_cuda(record.name)
    x = np.linspace(-20, 20, 81, dtype=np.float32)
    assert_close_to_reference(record.name, x, np.array([function.py_func(value) for value in x]))


@every_activation
def test_numba_on_the_processor_computes_it(record: Activation) -> None:
    import numba

    function, x = on_cpu(record.name), np.linspace(-20, 20, 1001, dtype=np.float32)

    @numba.njit(fastmath={"contract", "nsz"}, error_model="numpy")
    def loop(x: Any, y: Any) -> None:
        for i in range(x.size):
            y[i] = function(x[i])

    computed = np.empty_like(x)
    loop(x, computed)
    assert_close_to_reference(record.name, x, computed)


@needs_compiler
def test_kernels_apply_an_activation_without_a_functor() -> None:
    """Whole kernels: one of each language."""
    workload = workload_of("gated_gemm:m=9,n=17,k=33,dtype=f32,trans=nt,activation=mish")
    inputs = workload.draw(np.random.default_rng(1))
    for variant in kernels.variants("gated_gemm"):
        device = local_cpu() if isinstance(variant, NumbaCpuVariant) else H100
        if variant.refuses(workload, device) is not None:
            continue
        config = variant.default(workload, device)
        if isinstance(variant, CudaVariant):
            checks.assert_emulates_right(variant, workload, config, inputs)
        elif isinstance(variant, NumbaCudaVariant):
            checks.assert_right(workload, inputs, simulate(variant, workload, config, inputs))
        elif isinstance(variant, NumbaCpuVariant):
            checks.assert_right(workload, inputs, checks.run_on_cpu(variant, workload, config, inputs))


def test_another_activation_exceeds_the_tolerance() -> None:
    """A loose error analysis would hide a wrong lowering; names that differ in a tail are close together."""
    for name, wrong in (("gelu_tanh", "gelu"), ("mish", "silu"), ("hardsigmoid", "sigmoid")):
        workload = workload_of(f"gated_gemm:m=9,n=17,k=33,dtype=f32,activation={name}")
        drawn = draw(workload, 0)
        outputs = workload.changed(activation=wrong).reference(checks.exact(drawn.inputs))
        computed = {"c": outputs["c"].value.astype(np.float32)}
        assert worst_error(workload, computed, drawn.references) > 1


def test_names_without_a_functor_are_text_of_the_source() -> None:
    for name, record in ACTIVATIONS.items():
        generated = "" if record.functor else cuda_expression.injected(record.expression)
        assert cuda_expression.functor(name) == (record.functor or "Injected")
        assert cuda_expression.functor_source(name) == generated


# -- libraries and torch -------------------------------------------------------------------------------------


@every_activation
@needs_torch
def test_baselines_compute_it(record: Activation) -> None:
    import torch

    for text in workloads_of(record):
        workload: Any = workload_of(text)
        library: Any = {"gemm": gemm, "gated_gemm": gated_gemm, "elementwise": elementwise}.get(
            workload.operator
        )
        if library is None:
            continue
        drawn = draw(workload, 0)
        (out,) = workload.outputs()
        tensors = {name: torch.from_numpy(array) for name, array in drawn.inputs.items()}
        for call in library.torch_calls(workload, tensors).values():
            assert worst_error(workload, {out.name: call().numpy().reshape(out.shape)}, drawn.references) <= 1
        by_numpy = library.numpy_call(workload, drawn.inputs)
        if by_numpy is not None and record.name != "gelu":  # which NumPy approximates
            computed = np.asarray(by_numpy()).reshape(out.shape)
            assert worst_error(workload, {out.name: computed}, drawn.references) <= 2


@every_activation
@needs_torch
def test_torch_operators_compute_it(record: Activation) -> None:
    import torch

    from tunebench.torch import gated_linear, linear

    torch.manual_seed(0)
    x, w, u, b = (torch.randn(*shape, dtype=torch.float64) for shape in ((5, 8), (6, 8), (6, 8), (6,)))
    activate = by_torch(record)
    expected = activate(torch.nn.functional.linear(x, w, b))
    for activation in (record.name, f"{record.name}(x)"):
        torch.testing.assert_close(linear(x, w, b, activation=activation), expected)
    gated = activate(torch.nn.functional.linear(x, w)) * torch.nn.functional.linear(x, u)
    torch.testing.assert_close(gated_linear(x, w, u, activation=record.name), gated)


@every_activation
@needs_torch
def test_gradients_of_the_torch_operators(record: Activation) -> None:
    import torch

    from tunebench.torch.functional._activation import activation_gradient

    smooth = torch.linspace(-4.3, 4.1, 40, dtype=torch.float64)
    bends = torch.tensor([-3.0, 0.0, 3.0], dtype=torch.float64)  # of relu and the hard activations
    z = torch.cat([smooth, bends]).requires_grad_()
    dy = torch.linspace(0.5, 1.5, len(z), dtype=torch.float64)
    (expected,) = torch.autograd.grad(by_torch(record)(z), z, dy)
    with torch.no_grad():
        torch.testing.assert_close(activation_gradient(record.name, z.detach(), dy), expected)
    differentiable = activation_gradient(record.name, z, dy)
    torch.testing.assert_close(differentiable, expected)


@needs_torch
def test_softplus_has_no_expression() -> None:
    """`log(1+exp(x))` is 0 for x = -20, and its logarithm minus infinity; expressions have no `log1p`."""
    from tunebench.torch.compiler._aten_expression import expression_of

    assert expression_of("aten::softplus", {"self": "a", "beta": 1, "threshold": 20}) is None


@every_activation
@needs_torch
def test_aten_calls_are_read_as_the_name(record: Activation) -> None:
    from tunebench.torch.compiler._aten_expression import expression_of

    function = f"aten::{record.torch.rpartition('.')[2]}"
    text = expression_of(function, {"self": "a", **record.arguments})
    assert text is not None
    assert canonical(text) == canonical(f"{record.name}(a)")
    if record.backward:
        operands = {"grad_output": "g", "self": "a", "output": "r", **record.arguments}
        gradient = expression_of(f"aten::{record.backward}", operands)
        assert gradient is not None
        assert parse(gradient) == parse(record.gradient_of(x="a", y="r", dy="g"))


@pytest.mark.parametrize("name", [name for name, record in ACTIVATIONS.items() if record.module])
@needs_torch
def test_patch_fuses_its_module(name: str) -> None:
    from torch import nn

    from tunebench.torch.patching.modules import activation_of, may_fuse

    record = ACTIVATIONS[name]
    module = getattr(nn, record.module)(**record.arguments)
    assert activation_of(module) == name
    assert may_fuse([nn.Linear(4, 4), module])
