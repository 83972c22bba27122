"""Expressions as Numba code in f32: operations, functions, and operands of generated kernels.

On the CPU, functions are polynomials, which vectorise, or calls of libm.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tunebench.activation import ACTIVATIONS
from tunebench.dtype import DType
from tunebench.expression import parse, steps
from tunebench.kernels.common.expression import COMPARISONS, CodePrinter, compiled, operands, variable
from tunebench.kernels.common.numba_cpu import address, exp2, inlined, load, store
from tunebench.kernels.common.numba_epilogue import FAST, erf
from tunebench.workloads.common.activation import IDENTITY
from tunebench.workloads.common.expression_workload import ExpressionWorkload

__all__ = [
    "NUMBA_CUDA_PRINTER",
    "PRINTER",
    "TWO_FORMS",
    "by_libm",
    "by_polynomials",
    "cpu_elements",
    "cpu_parameters",
    "cpu_scope",
    "cuda_array",
    "cuda_load",
    "cuda_parameters",
    "has_two_forms",
    "in_cuda",
    "on_cpu",
]

Functions = dict[str, Callable[..., Any]]

TWO_FORMS = ("erf", "exp", "gelu", "log", "sigmoid", "silu", "tanh")
"""Functions that have a polynomial and a libm form."""

_ALIKE = {
    "neg": "-{0}",
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "abs": "abs({0})",
    "step": "(f32(1) if {0} > f32(0) else f32(0))",
    "square": "{0} * {0}",
    "where": "({1} if {0} != f32(0) else {2})",
    # NaN of either argument stays NaN, as in torch. LLVM turns the comparisons into selections.
    "max": "({1} if {0} < {1} or {1} != {1} else {0})",
    "min": "({1} if {1} < {0} or {1} != {1} else {0})",
    "relu": "(f32(0) if {0} < f32(0) else {0})",
    **{name: f"(f32(1) if {{0}} {symbol} {{1}} else f32(0))" for name, symbol in COMPARISONS.items()},
}
"""Operations with the same text for CPUs and GPUs."""

PRINTER = CodePrinter(
    assign="        {0} = {1}",
    number="f32({0})",
    operations={
        **_ALIKE,
        "cos": "np.cos({0})",
        "round": "f32(np.rint({0}))",
        "sin": "np.sin({0})",
        "sqrt": "np.sqrt({0})",
        "rsqrt": "f32(1) / np.sqrt({0})",
        **{name: f"{name}({{0}})" for name in TWO_FORMS},
    },
)

NUMBA_CUDA_PRINTER = CodePrinter(
    assign="{0} = {1}",
    number="f32({0})",
    operations={
        **_ALIKE,
        **{name: f"f32(math.{name}({{0}}))" for name in ("cos", "erf", "exp", "log", "sin", "sqrt", "tanh")},
        # Numba-CUDA has no rint: a sum with 2**23 has no place for fractions. Larger numbers are whole.
        "round": "({0} + f32(math.copysign(f32(8388608), {0})) - f32(math.copysign(f32(8388608), {0}))"
        " if abs({0}) < f32(8388608) else {0})",
        "rsqrt": "f32(1) / f32(math.sqrt({0}))",
        "gelu": "f32(0.5) * {0} * (f32(1) + f32(math.erf({0} * f32(0.7071067811865476))))",
        "sigmoid": "f32(1) / (f32(1) + f32(math.exp(-{0})))",
        "silu": "{0} / (f32(1) + f32(math.exp(-{0})))",
    },
)


def has_two_forms(workload: ExpressionWorkload) -> bool:
    """Return whether the expression of a workload contains one of `TWO_FORMS`."""
    return any(step.operation in TWO_FORMS for step in steps(workload.tree))


def by_libm() -> Functions:
    """Return the libm form of `TWO_FORMS`: one call of the C library per element."""
    import numpy as np

    one, half, root = np.float32(1), np.float32(0.5), np.float32(math.sqrt(0.5))

    @inlined
    def erf(x: Any) -> Any:
        return np.float32(math.erf(x))

    @inlined
    def exp(x: Any) -> Any:
        return np.exp(x)

    @inlined
    def gelu(x: Any) -> Any:
        return half * x * (one + math.erf(x * root))

    @inlined
    def log(x: Any) -> Any:
        return np.log(x)

    @inlined
    def sigmoid(x: Any) -> Any:
        return one / (one + np.exp(-x))

    @inlined
    def silu(x: Any) -> Any:
        return x / (one + np.exp(-x))

    @inlined
    def tanh(x: Any) -> Any:
        return np.tanh(x)

    return {
        "erf": erf,
        "exp": exp,
        "gelu": gelu,
        "log": log,
        "sigmoid": sigmoid,
        "silu": silu,
        "tanh": tanh,
    }


def by_polynomials() -> Functions:
    """Return the polynomial form of `TWO_FORMS`; exponentials are powers of two (see `numba_cpu.exp2`)."""
    import numpy as np

    power, log2_e = exp2(), np.float32(math.log2(math.e))
    one, two, highest = np.float32(1), np.float32(2), np.float32(129)

    @inlined
    def exp(x: Any) -> Any:
        t = x * log2_e
        # An exponent less by one, then twice the power: 2**127.5 is finite, and 2**129 must be infinite.
        return power((highest if t > highest else t) - one) * two

    return {
        "erf": erf(),
        "exp": exp,
        "log": _log(),
        "tanh": _tanh(),
        **{name: FAST[name]() for name in ("gelu", "sigmoid", "silu")},
    }


def _log() -> Callable[..., Any]:
    """Return log by the series of 2 artanh.

    With x = 2**e m and m around 1, log m = 2 artanh s for s = (m - 1) / (m + 1). The first term that is left
    out is 3e-9 of the result, since |s| is at most 0.1716. ln 2 is split so that e times its first part is
    exact.
    """
    import numpy as np

    least, place, lowest, up = np.int32(0x3F3504F3), np.int32(23), np.float32(2.0**-126), np.float32(2.0**23)
    zero, one, two, infinite = np.float32(0), np.float32(1), np.float32(2), np.float32(np.inf)
    high, low = np.float32(45426 / 65536), np.float32(math.log(2) - 45426 / 65536)
    c3, c5, c7, c9 = (np.float32(2 / n) for n in (3, 5, 7, 9))

    @inlined
    def log(x: Any) -> Any:
        tiny = x < lowest
        bits = np.float32(x * up if tiny else x).view(np.int32)
        e = np.int32(np.int32(bits - least) >> place)
        m = np.int32(bits - np.int32(e << place)).view(np.float32)
        s = (m - one) / (m + one)
        t = s * s
        k = np.float32(e) - (np.float32(23) if tiny else zero)
        series = two * s + s * t * (c3 + t * (c5 + t * (c7 + t * c9)))
        # log 0 is minus infinity; NaN and negative arguments give NaN.
        outside = -infinite if x == zero else (x if x > zero else np.float32(np.nan))
        return k * high + (k * low + series) if zero < x < infinite else outside

    return log


def _tanh() -> Callable[..., Any]:
    """Return tanh by its Taylor series up to 0.5, where the exponential form cancels, and by that form above.

    The first term that is left out is 1e-8 of the result at 0.5.
    """
    import numpy as np

    power, zero, one, edge = exp2(), np.float32(0), np.float32(1), np.float32(0.5)
    minus_two_log2_e = np.float32(-2 * math.log2(math.e))
    c3, c5, c7, c9 = map(np.float32, (-1 / 3, 2 / 15, -17 / 315, 62 / 2835))
    c11, c13, c15 = map(np.float32, (-1382 / 155925, 21844 / 6081075, -929569 / 638512875))

    @inlined
    def tanh(x: Any) -> Any:
        s = x * x
        series = x + x * s * (c3 + s * (c5 + s * (c7 + s * (c9 + s * (c11 + s * (c13 + s * c15))))))
        small = power(abs(x) * minus_two_log2_e)
        far = (one - small) / (one + small)
        return series if abs(x) < edge else (-far if x < zero else far)

    return tanh


# -- an expression in x as a function ------------------------------------------------------------------------


def on_cpu(activation: str) -> Callable[[Any], Any]:
    """Return the inlined f32 function of an activation for the CPU.

    Args:
        activation: A name of `tunebench.activation`, none, or an expression in x.
    """
    import numpy as np

    if activation in FAST:
        return FAST[activation]()
    return _function(_expression(activation), PRINTER, {"np": np, **by_polynomials()})


def in_cuda(activation: str) -> Callable[[Any], Any]:
    """Return the inlined f32 function of an activation for Numba-CUDA; compiling it needs no driver.

    Args:
        activation: A name of `tunebench.activation`, none, or an expression in x.
    """
    return _function(_expression(activation), NUMBA_CUDA_PRINTER, {"math": math})


def _expression(activation: str) -> str:
    if activation == "none":
        return IDENTITY
    return ACTIVATIONS[activation].expression if activation in ACTIVATIONS else activation


def _function(expression: str, spelling: CodePrinter, scope: dict[str, Any]) -> Callable[[Any], Any]:
    import numpy as np

    assignments, result = spelling.write(parse(expression))
    lines = [f"    {line.strip()}" for line in (*assignments, f"return f32({result})")]
    source = "\n".join(["def activation(in_x):", *lines, ""])
    return inlined(compiled(source, "activation", {"__name__": __name__, "f32": np.float32, **scope}))


# -- operands of generated kernels ---------------------------------------------------------------------------


def cpu_parameters(workload: ExpressionWorkload, *, over_rows: bool = False) -> tuple[str, str]:
    """Return the parameters of a CPU loop, and the arguments that its kernel passes.

    Arrays are passed as addresses, named ``<variable>_at``. An input that is constant over a row is passed as
    the f32 value of row ``i``.

    Args:
        workload: The workload whose expression the loop computes.
        over_rows: Whether the loop processes several rows, and takes addresses of such inputs instead.
    """
    addresses = [*workload.whole_names, *workload.vector_names, *(workload.column_names if over_rows else ())]
    passed = {name: f"address_of({variable(name)})" for name in addresses}
    if not over_rows:
        passed |= {name: f"read(address_of({variable(name)})[i])" for name in workload.column_names}
    return operands(workload, {name: f"{variable(name)}_at" for name in addresses}), operands(
        workload, passed
    )


def cpu_elements(workload: ExpressionWorkload, row: str = "") -> dict[str, str]:
    """Return the text by which a CPU loop reads element j of each matrix and vector as f32, by input name.

    Args:
        workload: The workload whose expression the loop computes.
        row: Text of the offset from the row at ``begin``, such as ``2 * cols + ``.
    """
    elements = {name: f"read({variable(name)}_at[begin + {row}j])" for name in workload.whole_names}
    # The text names the type, so that the revision depends on it.
    read = "read" if workload.vector_type == workload.dtype else f"read_{workload.vector_type}"
    return elements | {n: f"{read}({variable(n)}_at[column + j])" for n in workload.vector_names}


def cpu_scope(workload: ExpressionWorkload, out: DType, functions: str) -> dict[str, Any]:
    """Return the globals of generated CPU kernels: conversions, `address_of` and functions.

    Args:
        workload: The workload whose inputs are read.
        out: Type of the result.
        functions: ``poly`` or ``libm``, the form of `TWO_FORMS`.
    """
    import numba
    import numpy as np

    scope: dict[str, Any] = {"__name__": __name__, "numba": numba, "np": np, "f32": np.float32}
    scope |= {"read": load(workload.dtype), "write": store(out)}
    scope[f"read_{workload.vector_type}"] = load(workload.vector_type)
    return scope | {"address_of": address(), **(by_libm() if functions == "libm" else by_polynomials())}


def cuda_array(name: str) -> str:
    """Return the name of an array parameter of a Numba-CUDA kernel."""
    return f"all_{name}"


def cuda_parameters(workload: ExpressionWorkload) -> str:
    """Return the parameters of a Numba-CUDA kernel for the inputs: arrays and scalars."""
    return operands(workload, {t.name: cuda_array(t.name) for t in workload.inputs() if t.shape})


def cuda_load(name: str, index: str) -> str:
    """Return the assignment that loads an element of an input as f32.

    Args:
        name: Name of the input.
        index: Text of the index.
    """
    return f"{variable(name)} = f32({cuda_array(name)}[{index}])"
