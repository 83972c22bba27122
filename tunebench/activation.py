"""Activation functions: one record for each name, from which all lowerings start.

To add an activation, add a record to `ACTIVATIONS` with its definition as an expression in x. Its reference,
error bound, CUDA C++ and Numba code, costs, NumPy and torch baselines, torch operators and ATen readers then
follow from the record, and the contract tests in `tests/kernels/test_activations.py` run for it.

Expressions write a new activation out: ``hardsigmoid(x)`` is stored as ``min(max(x+3,0),6)/6``. Those with
`is_function` are functions of expressions, whose texts keep the name. Each language has code for them that is
faster or more accurate than the definition: `FUNCTIONS` in `workloads/common/expression_value.py`, and the
printers in `kernels/common/cuda_expression.py` and `kernels/common/numba_expression.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ACTIVATIONS", "DEFINITIONS", "Activation", "name_of"]

_VARIABLE = re.compile(r"\b(?:dy|x|y)\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """A function of one number that networks apply to sums.

    Attributes:
        name: Name in expressions, in `gated_gemm`, and in `tunebench.torch`.
        definition: Value as an expression in x of more basic functions.
        torch: The function of torch that computes it, as an attribute path of the module `torch`.
        arguments: Keyword arguments of torch's function, which torch's module has as attributes.
        module: Class of `torch.nn` that `tunebench.torch.patch` fuses with a linear layer before it, or "".
        gradient: Gradient of x as an expression in x, dy (the gradient of the result) and y (the result); ""
            if only automatic differentiation computes it.
        backward: ATen's operator for the gradient, of dy and y if `gradient` has y, else of dy and x; "" if
            there is none.
        aliases: Other names in configurations of HuggingFace models.
        is_function: Whether expressions keep the name, and each language has code for it.
        functor: Struct of `kernels/common/epilogue.cuh` that computes it, or "" to generate one.
        slope: Steepest slope, rounded up: an error of x grows at most by this factor. None for the running
            error analysis of the definition, which every activation that is no function has.
        roundings: Error at an exact x in roundings to f32 per unit of |x|, if `slope` is not None.
    """

    name: str
    definition: str
    torch: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    module: str = ""
    gradient: str = ""
    backward: str = ""
    aliases: tuple[str, ...] = ()
    is_function: bool = False
    functor: str = ""
    slope: float | None = None
    roundings: int = 0

    @property
    def expression(self) -> str:
        """The activation as an expression in x, in the form that workloads store."""
        return f"{self.name}(x)" if self.is_function else self.definition

    @property
    def reads_result(self) -> bool:
        """Whether the gradient is a function of the result, not of x."""
        return "y" in _VARIABLE.findall(self.gradient)

    def gradient_of(self, **operands: str) -> str:
        """Return the gradient in parentheses as an expression in other operands.

        Args:
            operands: Text in place of x, y and dy.
        """
        return f"({_VARIABLE.sub(lambda match: operands[match[0]], self.gradient)})"


_SMALL = "min(max(x,-13),13)"  # beyond, the density is 0 in f32, and the square may overflow
_TANH_OF_GELU = "tanh(x*(0.7978845608028654+0.0356774081363*square(x)))"
_SOFTPLUS = "max(x,0)+log(1+exp(-abs(x)))"

_RECORDS = (
    Activation(
        name="relu",
        definition="max(x,0)",
        torch="relu",
        module="ReLU",
        gradient="where(le(x,0),0,dy)",
        is_function=True,
        functor="Relu",
        slope=1.0,
    ),
    # The exact form. The slope Phi(x) + x phi(x) has its maximum 1.1290 at x = sqrt(2). erff is accurate to 2
    # units in the last place, and 1 + erf cancels where x is negative.
    # Source: Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016.
    Activation(
        name="gelu",
        definition="0.5*x*(1+erf(x*0.7071067811865476))",
        torch="nn.functional.gelu",
        arguments={"approximate": "none"},
        module="GELU",
        gradient=(
            f"dy*(0.5*(1+erf(x*0.7071067811865476))+{_SMALL}*0.3989422804014327*exp(-0.5*square({_SMALL})))"
        ),
        backward="gelu_backward",
        is_function=True,
        functor="Gelu",
        slope=1.13,
        roundings=6,
    ),
    # tanh of sqrt(2 / pi) (x + 0.044715 x**3) in place of the error function. Source: likewise.
    Activation(
        name="gelu_tanh",
        definition=f"0.5*x*(1+{_TANH_OF_GELU})",
        torch="nn.functional.gelu",
        arguments={"approximate": "tanh"},
        gradient=(
            f"dy*0.5*(1+{_TANH_OF_GELU}"
            f"+x*(1-square({_TANH_OF_GELU}))*(0.7978845608028654+0.1070322244089*square(x)))"
        ),
        backward="gelu_backward",
        aliases=("gelu_pytorch_tanh",),
    ),
    # The slope s + x s (1 - s) with the logistic function s has its maximum 1.0998 at x = 2.40. The power in
    # 1 + e**-x is accurate to |x| + 2 units where it matters, and its weight is less than one half. Source:
    # Elfwing, Uchibe and Doya, "Sigmoid-weighted linear units for neural network function approximation in
    # reinforcement learning", 2017.
    Activation(
        name="silu",
        definition="x*sigmoid(x)",
        torch="nn.functional.silu",
        module="SiLU",
        gradient="dy*sigmoid(x)*(1+x*(1-sigmoid(x)))",
        backward="silu_backward",
        aliases=("swish",),
        is_function=True,
        functor="Silu",
        slope=1.1,
        roundings=6,
    ),
    # `roundings` are those of the value and of |x| / 4.
    Activation(
        name="sigmoid",
        definition="1/(1+exp(-x))",
        torch="sigmoid",
        gradient="dy*y*(1-y)",
        backward="sigmoid_backward",
        is_function=True,
        functor="Sigmoid",
        slope=0.25,
        roundings=6,
    ),
    Activation(
        name="tanh",
        definition="2/(1+exp(-2*x))-1",
        torch="tanh",
        gradient="dy*(1-y*y)",
        backward="tanh_backward",
        is_function=True,
    ),
    Activation(
        name="hardsigmoid",
        definition="min(max(x+3,0),6)/6",
        torch="nn.functional.hardsigmoid",
        gradient="where(lt(abs(x),3),dy/6,0)",
        backward="hardsigmoid_backward",
    ),
    # Source: Howard et al., "Searching for MobileNetV3", 2019.
    Activation(
        name="hardswish",
        definition="x*min(max(x+3,0),6)/6",
        torch="nn.functional.hardswish",
        module="Hardswish",
        gradient="where(le(x,-3),0,where(lt(x,3),dy*(x/3+0.5),dy))",
        backward="hardswish_backward",
    ),
    # Source: Misra, "Mish: a self regularized non-monotonic activation function", 2019.
    Activation(
        name="mish",
        definition=f"x*tanh({_SOFTPLUS})",
        torch="nn.functional.mish",
        gradient=f"dy*(tanh({_SOFTPLUS})+x*sigmoid(x)*(1-square(tanh({_SOFTPLUS}))))",
        backward="mish_backward",
    ),
)

ACTIVATIONS: Mapping[str, Activation] = {record.name: record for record in _RECORDS}
"""All activations by name."""

DEFINITIONS: Mapping[str, str] = {
    record.name: record.definition for record in _RECORDS if not record.is_function
}
"""Definitions of the activations that expressions write out, by name."""

_NAMES = {record.expression: record.name for record in _RECORDS}


def name_of(activation: str) -> str:
    """Return the name of an activation that workloads store as an expression; other texts unchanged.

    Args:
        activation: A name, none, or an expression in x.
    """
    return _NAMES.get(activation, activation)
