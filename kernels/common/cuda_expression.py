"""Expressions as CUDA C++: operations, device functions, loads of operands, and activations in x."""

from __future__ import annotations

from tunebench.activation import ACTIVATIONS
from tunebench.expression import Node, parse, steps
from tunebench.kernels.common.cuda import ctype, flag, helpers
from tunebench.kernels.common.expression import COMPARISONS, CodePrinter, filled, operands, variable
from tunebench.variant import ceil_div
from tunebench.workload import Tensor
from tunebench.workloads.common.expression_workload import ExpressionWorkload

__all__ = [
    "INJECTED",
    "PRINTER",
    "claimed",
    "column_loads",
    "filled",
    "function",
    "function_of",
    "functor",
    "functor_source",
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
        # NaN of either argument stays NaN, as in torch; fmaxf would drop it.
        "max": "({0} < {1} || {1} != {1} ? {1} : {0})",
        "min": "({1} < {0} || {1} != {1} ? {1} : {0})",
        "abs": "fabsf({0})",
        "cos": "cosf({0})",
        "sin": "sinf({0})",
        "log": "logf({0})",
        "round": "rintf({0})",
        "sqrt": "sqrtf({0})",
        "square": "f32_op({0} * {0})",
        "tanh": "tanhf({0})",
        "erf": "erff({0})",
        "step": "({0} > 0.0f ? 1.0f : 0.0f)",
        "where": "({0} != 0.0f ? {1} : {2})",
        **{name: f"({{0}} {symbol} {{1}} ? 1.0f : 0.0f)" for name, symbol in COMPARISONS.items()},
        "exp": "fast_exp({0})",
        "rsqrt": "fast_rsqrt({0})",
        **{name: f"{record.functor}()({{0}})" for name, record in ACTIVATIONS.items() if record.functor},
    },
)
"""Printer for CUDA C++; the code needs types.cuh, reduce.cuh and epilogue.cuh."""

INJECTED = "Injected"
"""Name of the struct that `injected` generates."""

_SHORT = frozenset(
    {"neg", "add", "sub", "mul", "max", "min", "abs", "relu", "round", "square", "step", "where"}
).union(COMPARISONS)
_FEW = 8
"""Most operations of an activation that kernels may repeat, of an instruction or two each."""

_ACTIVATION = """
struct @NAME@ {
  static constexpr bool IS_LONG = @IS_LONG@;
  __device__ __forceinline__ float operator()(float in_x) const {
@ASSIGNMENTS@
    return @RESULT@;
  }
};
"""


def functor(activation: str) -> str:
    """Return the C++ type of a functor that applies an activation.

    Args:
        activation: A name of `tunebench.activation`, or none.
    """
    return "Identity" if activation == "none" else ACTIVATIONS[activation].functor or INJECTED


def functor_source(activation: str) -> str:
    """Return the source of `functor`, or "" if epilogue.cuh has it.

    Args:
        activation: A name of `tunebench.activation`, or none.
    """
    return injected(ACTIVATIONS[activation].expression) if functor(activation) == INJECTED else ""


def injected(expression: str) -> str:
    """Return the struct `Injected` that applies an expression in x, together with the headers it needs."""
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

# Words between @ are replaced by text that depends on the expression.
FUNCTION = r"""
__device__ __forceinline__ float @NAME@(@VALUES@) {
@ASSIGNMENTS@
  return @RESULT@;
}
"""


def function(workload: ExpressionWorkload) -> str:
    """Return the device function `chain`, whose arguments are one element of each input in order."""
    return function_of(workload.tree, tuple(tensor.name for tensor in workload.inputs()))


def function_of(tree: Node, inputs: tuple[str, ...], name: str = "chain") -> str:
    """Return the device function that computes an expression of f32 values.

    Args:
        tree: The expression.
        inputs: Names of the parameters, in order.
        name: Name of the function.
    """
    assignments, result = PRINTER.write(tree)
    return filled(
        FUNCTION,
        NAME=name,
        VALUES=", ".join(f"float {variable(name)}" for name in inputs),
        ASSIGNMENTS="\n".join(assignments),
        RESULT=result,
    )


def parameters(workload: ExpressionWorkload) -> str:
    """Return the kernel parameters for the inputs: pointers for tensors, floats for scalars."""

    def parameter(tensor: Tensor) -> str:
        if not tensor.shape:
            return f"float {variable(tensor.name)}"
        stored = "In" if tensor.dtype == workload.dtype else ctype(tensor.dtype)
        return f"const {stored}* __restrict__ {variable(tensor.name)}"

    return ", ".join(map(parameter, workload.inputs()))


def column_loads(workload: ExpressionWorkload, row_exists: str, column_exists: str = "") -> dict[str, str]:
    """Return the template pieces of a kernel whose threads own columns and load several rows at once.

    The kernel holds vectors of whole inputs in ``held[n]``. The pieces are ``PARAMETERS``, ``LOAD_VECTORS``
    (before the loop over rows), ``EACH``, ``LOAD_EACH`` and ``WHOLE`` (within it), and ``ARGUMENTS`` of
    `chain`.

    Args:
        workload: The workload whose expression the kernel computes.
        row_exists: C++ condition under which the row ``row`` exists.
        column_exists: Text before the loads of vectors, such as an ``if``; empty if all columns exist.
    """
    vectors, columns = workload.vector_names, workload.column_names
    held = {name: f"to_float(held[n][{w}].at[i])" for w, name in enumerate(workload.whole_names)}
    held |= {name: f"line_{name}[i]" for name in vectors}
    held |= {name: f"each_{name}[n]" for name in columns}
    return {
        "PARAMETERS": parameters(workload),
        "LOAD_VECTORS": "\n".join(
            f"  float line_{name}[V];\n  {column_exists}load_floats({variable(name)} + column, line_{name});"
            for name in vectors
        ),
        "EACH": "".join(f"\n    float each_{name}[N];" for name in columns),
        "LOAD_EACH": "".join(
            f"\n      if ({row_exists}) each_{name}[n] = to_float({variable(name)}[row]);" for name in columns
        ),
        "WHOLE": ", ".join(map(variable, workload.whole_names)),
        "ARGUMENTS": operands(workload, held),
    }


def special(functions: dict[str, int]) -> int:
    """Return the results of the special-function unit that functions need.

    Args:
        functions: Calls of each function, by name.
    """
    each = {"exp": 1, "rsqrt": 1, "sigmoid": 2, "silu": 2}
    return sum(count * functions.get(name, 0) for name, count in each.items())


def claimed(tree: Node) -> tuple[str, ...]:
    """Return the instructions that the machine code of an expression must contain.

    These are loads and stores, and those of the special-function unit if a function should use it.
    """
    takes_special = special({step.operation: 1 for step in steps(tree)})
    return ("LDG", "STG", "MUFU") if takes_special else ("LDG", "STG")


def threads_along(vectors: int) -> int:
    """Return a warp or more along a row, such that the fewest threads are idle at its end."""
    useful = [threads for threads in (32, 64, 128, 256) if threads < 2 * vectors]
    used = {threads: vectors / (ceil_div(vectors, threads) * threads) for threads in useful}
    fewer = max(threads for threads in (1, 2, 4, 8, 16) if threads == 1 or threads < 2 * vectors)
    return max(used, key=lambda threads: (round(used[threads], 1), threads), default=fewer)
