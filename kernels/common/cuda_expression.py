"""Expressions in CUDA C++: their operations, and one in x as an activation like those of epilogue.cuh."""

from __future__ import annotations

from tunebench.expression import Node, parse, steps
from tunebench.kernels.common.cuda import ctype, flag, helpers
from tunebench.kernels.common.expression import CodePrinter, variable
from tunebench.variant import ceil_div
from tunebench.workload import Tensor
from tunebench.workloads.operators._expression_workload import ExpressionWorkload

__all__ = [
    "INJECTED",
    "PRINTER",
    "filled",
    "function",
    "function_of",
    "injected",
    "parameters",
    "special",
    "threads_along",
]

PRINTER = CodePrinter(
    assign="  const float {0} = {1};",
    number="{0}f",
    operations={
        "neg": "-{0}",
        "add": "f32_op({0} + {1})",
        "sub": "f32_op({0} - {1})",
        "mul": "f32_op({0} * {1})",
        "div": "{0} / {1}",
        "max": "fmaxf({0}, {1})",
        "min": "fminf({0}, {1})",
        "abs": "fabsf({0})",
        "log": "logf({0})",
        "sqrt": "sqrtf({0})",
        "square": "f32_op({0} * {0})",
        "tanh": "tanhf({0})",
        "erf": "erff({0})",
        "step": "({0} > 0.0f ? 1.0f : 0.0f)",
        "exp": "fast_exp({0})",
        "rsqrt": "fast_rsqrt({0})",
        **{name: f"{name.capitalize()}()({{0}})" for name in ("gelu", "relu", "sigmoid", "silu")},
    },
)
"""Needs types.cuh, reduce.cuh and epilogue.cuh."""

INJECTED = "Injected"
"""What the activation is called that an expression becomes."""

_SHORT = frozenset({"neg", "add", "sub", "mul", "max", "min", "abs", "relu", "square", "step"})
_FEW = 8
"""Operations of an instruction or two each that may be repeated wherever an element is finished."""

_ACTIVATION = """
struct @NAME@ {
  static constexpr bool IS_LONG = @IS_LONG@;
  __device__ __forceinline__ float operator()(float in_x) const {
@ASSIGNMENTS@
    return @RESULT@;
  }
};
"""


def injected(expression: str) -> str:
    """Return the struct `Injected` that applies an expression in x, with the helpers that it needs."""
    tree = parse(expression)
    assignments, result = PRINTER.write(tree)
    operations = [step.operation for step in steps(tree)]
    is_long = len(operations) > _FEW or not _SHORT.issuperset(operations)
    text = filled(
        _ACTIVATION,
        NAME=INJECTED,
        IS_LONG=flag(is_long),
        ASSIGNMENTS="\n".join(f"  {line}" for line in assignments),
        RESULT=result,
    )
    return helpers("reduce") + text


# -- an expression as a function of inputs -------------------------------------------------------------------

# Words between @ stand for what the expression decides.
FUNCTION = r"""
__device__ __forceinline__ float @NAME@(@VALUES@) {
@ASSIGNMENTS@
  return @RESULT@;
}
"""


def filled(text: str, **pieces: str) -> str:
    """Return text with each word between @ replaced by its piece."""
    for word, piece in pieces.items():
        text = text.replace(f"@{word}@", piece)
    return text


def function(workload: ExpressionWorkload) -> str:
    """Return the device function `chain`, of an element of each input in order."""
    return function_of(workload.tree, tuple(tensor.name for tensor in workload.inputs()))


def function_of(tree: Node, inputs: tuple[str, ...], name: str = "chain") -> str:
    """Return the device function that computes an expression of f32 values."""
    assignments, result = PRINTER.write(tree)
    return filled(
        FUNCTION,
        NAME=name,
        VALUES=", ".join(f"float {variable(name)}" for name in inputs),
        ASSIGNMENTS="\n".join(assignments),
        RESULT=result,
    )


def parameters(workload: ExpressionWorkload) -> str:
    """Return the parameters of a kernel that stand for the inputs: pointers, and numbers."""

    def parameter(tensor: Tensor) -> str:
        if not tensor.shape:
            return f"float {variable(tensor.name)}"
        stored = "In" if tensor.dtype == workload.dtype else ctype(tensor.dtype)
        return f"const {stored}* __restrict__ {variable(tensor.name)}"

    return ", ".join(map(parameter, workload.inputs()))


def special(functions: dict[str, int]) -> int:
    """Return the results of the special-function unit that functions take."""
    each = {"exp": 1, "rsqrt": 1, "sigmoid": 2, "silu": 2}
    return sum(count * functions.get(name, 0) for name, count in each.items())


def threads_along(vectors: int) -> int:
    """Return a warp or more along a row, of which the fewest threads are idle at its end."""
    useful = [threads for threads in (32, 64, 128, 256) if threads < 2 * vectors]
    used = {threads: vectors / (ceil_div(vectors, threads) * threads) for threads in useful}
    fewer = max(threads for threads in (1, 2, 4, 8, 16) if threads == 1 or threads < 2 * vectors)
    return max(used, key=lambda threads: (round(used[threads], 1), threads), default=fewer)
