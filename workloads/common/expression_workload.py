"""Base of elementwise and reduction: an expression of matrices, row vectors, column vectors and scalars."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from tunebench._lazy import np
from tunebench.dtype import DType, numpy_dtype, underflow, unit_roundoff
from tunebench.errors import InputError
from tunebench.expression import Apply, Name, Node, Number, names, parse, steps
from tunebench.workload import Expression, Names, Reference, Size, Tensor, Tolerance, Workload
from tunebench.workloads.common.accumulation import row_blocks
from tunebench.workloads.common.expression_value import COMPARISONS, Range, evaluate, span

if TYPE_CHECKING:
    import numpy

    from tunebench.workload import Array, Array64

__all__ = ["DRAWN", "LARGEST_OUT", "WHOLE", "DrawnExpression", "ExpressionWorkload", "substitute"]

DRAWN: tuple[Range, ...] = ((-8.0, 8.0), (0.5, 1.5), (0.125, 0.875))
"""Ranges from which inputs are drawn: the first one in which the expression always has a value is used.

The first is the range of normal numbers: out of 1e12 none is expected outside.
"""
_EXPONENTS = (20, 15, 10, 7, 6, 5, 4)
NAN_SHARE = 0.02
"""Fraction of elements of an extreme input that are NaN."""
WIDE: tuple[Range, ...] = (
    *((-(2.0**exponent), 2.0**exponent) for exponent in _EXPONENTS),
    *((2.0**-exponent, 2.0**exponent) for exponent in _EXPONENTS),
)
"""Ranges of extreme inputs, the widest first; those of positive numbers last."""
WHOLE: Mapping[str, Range] = {"bool": (0.0, 1.0), "i8": (-128.0, 127.0)}
"""Range of each type of whole numbers."""
LARGEST_OUT: Mapping[str, float] = {"f16": 65504.0}
"""Largest number of a type, if it is less than that of f32."""
ELEMENTS_AT_ONCE = 2**20
"""Elements evaluated at a time, approximately: temporaries of a whole workload may not fit in memory."""


class DrawnExpression(Workload):
    """An expression of its inputs in f32, rounded once, whose inputs are drawn where it always has a value.

    Subclasses define the dimension `expression`, `inputs`, `outputs` and `evaluated`. By default each value
    of the expression is an element of the output.
    """

    aliases: ClassVar[Mapping[str, str]] = {"expr": "expression"}
    result: ClassVar[str] = "out"
    """Name of the output; no input may have it."""
    drawn_in: ClassVar[tuple[Range, ...]] = DRAWN

    if TYPE_CHECKING:

        @property
        def expression(self) -> str:
            """The expression in the input names."""

        @property
        def result_type(self) -> DType:
            """The type of the results."""

        def evaluated(self, inputs: Mapping[str, Array64]) -> Iterator[tuple[slice, Array64, Array64]]:
            """Yield the expression for parts of the first axis: indices, values, and error bounds of f32."""

        def _ranges(self, drawn: Range) -> dict[str, Range]:
            """Return the range of each input if values are drawn from a range."""

    def check(self) -> None:
        """Check that inputs can be drawn for which the expression has a value."""
        if self._drawn_between is None:
            raise InputError(
                f"{self.operator}: {self._meaning} may divide by 0, leave the domain of log, sqrt or rsqrt, "
                f"or overflow f32 or {self.result_type}, whether inputs are within "
                f"{', '.join(map(str, self.drawn_in))}: "
                "nothing could be checked. Keep arguments positive (abs(x)+0.01), or limit them (min, max)"
            )

    @property
    def tree(self) -> Node:
        """The expression, parsed."""
        return parse(self.expression)

    @property
    def _meaning(self) -> str:
        """The computed expression, for messages."""
        return self.expression

    def reference(self, inputs: Mapping[str, Array64]) -> dict[str, Reference]:
        """Evaluate a part of the first axis at a time, with a running error analysis as scale."""
        (out,) = self.outputs()
        value, error = np.empty((2, *out.shape))
        for part, value_there, error_there in self.evaluated(inputs):
            value[part], error[part] = value_there, error_there
        return {"out": self.rounded(value, error)}

    def rounded(self, value: Array64, error: Array64) -> Reference:
        """Return the reference for results in f32 that are then rounded to `result_type`.

        Args:
            value: Results in float64; for bool, every value except 0 is true. For i8, fractions are dropped.
            error: Error bounds of the results in f32.
        """
        if self.result_type == "i8":
            whole = np.trunc(value)
            error = np.maximum(np.trunc(value + error) - whole, whole - np.trunc(value - error))
            return Reference(value=whole, scale=error / self.tolerance().eps_acc)
        if self.result_type == "bool":  # either truth value is right where the error includes 0
            unclear = (error > 0) & (np.abs(value) <= error)
            scale = np.where(unclear, 1 / self.tolerance().eps_acc, 0.0)
            return Reference(value=(value != 0).astype(np.float64), scale=scale)
        # The final rounding applies to the value including its error; near zero f16 rounds by a constant.
        scale = error * ((1 + unit_roundoff(self.result_type)) / self.tolerance().eps_acc)
        return Reference(value=value, scale=scale + underflow(self.result_type) / self.tolerance().eps_acc)

    def tolerance(self) -> Tolerance:
        """Allow one rounding of the result, and the error bound of the running error analysis."""
        return Tolerance(
            eps_out=unit_roundoff(self.result_type),
            eps_acc=unit_roundoff("f32"),
            reason=f"one rounding to {self.result_type}; f32 errors are bounded element by element, "
            "operation by operation, with functions accurate to a few units in the last place",
        )

    def draw_stress(self, rng: numpy.random.Generator) -> dict[str, Array] | None:
        """Draw inputs of which half come from the widest range in which the expression has a value.

        Their magnitudes are spread over all powers of two; a quarter are 0 or numbers of the expression, if
        they are in the range: there it bends, as ``max(x,0)`` does. Where each value of the expression is a
        result, some are NaN, if the expression compares nothing.
        """
        widest = self._widest
        floating = [t for t in self.inputs() if t.shape and t.dtype in ("f32", "f16", "bf16")]
        if widest is None or not floating:
            return None
        tensors = self.draw(rng)
        for tensor in floating:
            values = _spread(widest, _numbers(self.tree), tensor.shape, rng)
            chosen = rng.random((*tensor.shape[:-1], 1)) < 0.5
            if chosen.size == 1:
                chosen = rng.random(tensor.shape) < 0.5
            drawn = tensors[tensor.name]
            tensors[tensor.name] = np.where(chosen, values.astype(drawn.dtype), drawn)
        if self.has_nan:
            tensors[floating[0].name][rng.random(floating[0].shape) < NAN_SHARE] = np.nan
        return tensors

    @property
    def has_nan(self) -> bool:
        """Whether extreme inputs have NaN: results are then NaN, unless an expression compares it."""
        return propagates_nan(self.tree) and self.result_type not in WHOLE

    @property
    def _widest(self) -> Range | None:
        """The first of `WIDE` that contains the range of drawn inputs and in which the result is finite."""
        low, high = self._drawn_between or (0.0, 0.0)
        narrow = any(tensor.dtype == "f16" for tensor in self.inputs())
        for wide in WIDE:
            if wide[0] > low or wide[1] < high or (narrow and wide[1] > LARGEST_OUT["f16"]):
                continue
            image = span(self.tree, self._ranges(wide))
            if image is not None and self._holds(image):
                return wide
        return self._drawn_between

    @functools.cached_property
    def _drawn_between(self) -> Range | None:
        """The first of `drawn_in` in which the result is finite for all inputs."""
        for drawn in self.drawn_in:
            image = span(self.tree, self._ranges(drawn))
            if image is not None and self._holds(image):
                return drawn
        return None

    def _holds(self, image: Range) -> bool:
        """Return whether the result's type can represent the results of all values in a range."""
        if self.result_type == "i8":
            return WHOLE["i8"][0] <= min(image) and max(image) <= WHOLE["i8"][1]
        return max(map(abs, image)) <= LARGEST_OUT.get(self.result_type, math.inf)

    def draw_by_rule(self, tensor: Tensor, rng: numpy.random.Generator) -> Array | None:
        """Draw uniformly from a range in which the expression always has a value, if not everywhere."""
        drawn = self._drawn_between
        if drawn is None or drawn == DRAWN[0] or tensor.dtype in WHOLE:
            return None
        if not tensor.shape and drawn[0] <= 0:
            return None
        array: Array = np.asarray(rng.uniform(*drawn, tensor.shape)).astype(numpy_dtype(tensor.dtype))
        return array


def propagates_nan(node: Node) -> bool:
    """Return whether the value of an expression is NaN if one of its names is: it compares nothing."""
    if not isinstance(node, Apply):
        return True
    compares = node.operation in ("where", "step", *COMPARISONS)
    return not compares and all(map(propagates_nan, node.arguments))


def _numbers(node: Node) -> tuple[float, ...]:
    """Return the numbers of an expression, of either sign."""
    if isinstance(node, Number):
        return (node.value, -node.value)
    return tuple(number for argument in getattr(node, "arguments", ()) for number in _numbers(argument))


def _spread(
    between: Range, numbers: tuple[float, ...], shape: tuple[int, ...], rng: numpy.random.Generator
) -> Array64:
    """Return numbers of all magnitudes in a range, some of them 0 or from `numbers`."""
    low, high = between
    least = low if low > 0 else min(2.0**-20, high)
    values = np.exp2(rng.uniform(math.log2(least), math.log2(high), shape))
    if low < 0:
        values *= rng.choice((-1.0, 1.0), shape)
    special = np.array([number for number in (0.0, *numbers) if low <= number <= high] or [high])
    at = rng.integers(len(special), size=shape)
    spread: Array64 = np.where(rng.random(shape) < 0.25, special[at], np.clip(values, low, high))
    return spread


@dataclass(frozen=True, kw_only=True)
class ExpressionWorkload(DrawnExpression):
    """An expression of the elements of a matrix, computed in f32; subclasses define the use of its values.

    Tensors: each name of the expression is an input, in the order of first use. Names in `vectors` are
    (cols,), the same for all rows; names in `columns` are (rows,), the same for a whole row; names in
    `scalars` are () f32; all others are (rows, cols), and there is at least one of them.

    Functions: abs, erf, exp, gelu (the exact one), log, max, min, relu, round (half to even), rsqrt, sigmoid,
    silu, sqrt, square, step (1 where its argument is positive, else 0), tanh; eq, le, lt, ne (1 where they
    hold, else 0); where(c, x, y) (x where c is not 0, else y).
    """

    rows: Size
    cols: Size
    dtype: Literal["f32", "f16", "bf16"]
    expression: Expression
    vectors: Names = ""
    scalars: Names = ""
    columns: Names = ""

    if TYPE_CHECKING:  # the last dimension of every subclass

        @property
        def out(self) -> DType:
            """The type of the result."""

    def check(self) -> None:
        """Check the lists of names against the expression, and that inputs can be drawn for it."""
        used, lists = names(self.tree), self._lists
        for name, listed in lists.items():
            if unknown := set(listed) - set(used):
                raise InputError(
                    f"{self.operator}: {name}: no {', '.join(sorted(unknown))} in {self.expression}; "
                    f"it has {', '.join(used) or 'no names'}"
                )
        for (first, first_names), (second, second_names) in itertools.combinations(lists.items(), 2):
            if both := set(first_names) & set(second_names):
                raise InputError(
                    f"{self.operator}: {', '.join(sorted(both))} cannot be in {first} and in {second}"
                )
        if self.result in used:
            raise InputError(f"{self.operator}: {self.result} is the result; give the input another name")
        if not self.whole_names:
            raise InputError(
                f"{self.operator}: at least one input must be in none of vectors, scalars and columns"
            )
        super().check()

    @property
    def result_type(self) -> DType:
        """The type of the results."""
        return self.out

    @property
    def _lists(self) -> dict[str, tuple[str, ...]]:
        return {
            "vectors": self.vector_names,
            "scalars": self.scalar_names,
            "columns": self.column_names,
        }

    @property
    def vector_type(self) -> DType:
        """The type of inputs of shape (cols,)."""
        return self.dtype

    @property
    def vector_names(self) -> tuple[str, ...]:
        """Inputs of shape (cols,)."""
        return _listed(self.vectors)

    @property
    def scalar_names(self) -> tuple[str, ...]:
        """Inputs of shape ()."""
        return _listed(self.scalars)

    @property
    def column_names(self) -> tuple[str, ...]:
        """Inputs of shape (rows,)."""
        return _listed(self.columns)

    @property
    def whole_names(self) -> tuple[str, ...]:
        """Inputs of shape (rows, cols)."""
        listed = set(itertools.chain(*self._lists.values()))
        return tuple(name for name in names(self.tree) if name not in listed)

    def inputs(self) -> tuple[Tensor, ...]:
        """Return the inputs, in the order of first use."""
        return tuple(map(self._input, names(self.tree)))

    def _input(self, name: str) -> Tensor:
        if name in self.scalar_names:
            return Tensor(name=name, shape=(), dtype="f32")
        if name in self.vector_names:
            return Tensor(name=name, shape=(self.cols,), dtype=self.vector_type)
        shape = (self.rows,) if name in self.column_names else (self.rows, self.cols)
        return Tensor(name=name, shape=shape, dtype=self.dtype)

    def evaluated(self, inputs: Mapping[str, Array64]) -> Iterator[tuple[slice, Array64, Array64]]:
        """Yield the expression for some rows at a time: the rows, the values, and the error bounds of f32."""
        whole, columns = set(self.whole_names), set(self.column_names)
        for part in row_blocks(self.rows, self.cols, ELEMENTS_AT_ONCE):
            operands = {}
            for name, array in inputs.items():
                of_part = array[part] if name in whole or name in columns else array
                operands[name] = of_part[:, None] if name in columns else of_part
            value, error = evaluate(self.tree, operands)
            yield part, value, np.broadcast_to(error, value.shape)

    def apart(self) -> tuple[tuple[Node, Node], ...]:
        """Return each operation as a separate step with the subexpression that it computes, in order.

        Steps read the results of earlier steps as step0, step1 and so on. A part that is constant along a row
        or a column is no separate kernel: it stays in the operations that use it.
        """
        whole, prefix = set(self.whole_names), self.step_prefix
        named: dict[Node, Node] = {}
        parts: list[tuple[Node, Node]] = []
        for step in steps(self.tree):
            if whole & set(names(step)):
                alone = Apply(
                    step.operation, tuple(substitute(argument, named) for argument in step.arguments)
                )
                named[step] = Name(f"{prefix}{len(parts)}")
                parts.append((alone, step))
        return tuple(parts)

    @property
    def step_prefix(self) -> str:
        """Prefix of the names of step results, which no input name has."""
        prefix = "step"
        while any(name.startswith(prefix) for name in names(self.tree)):
            prefix += "_"
        return prefix

    def lists_of(self, tree: Node) -> dict[str, str]:
        """Return `vectors`, `scalars` and `columns` as dimensions, limited to the names of an expression."""
        used = names(tree)
        return {key: "+".join(name for name in used if name in all_) for key, all_ in self._lists.items()}

    def _ranges(self, drawn: Range) -> dict[str, Range]:
        """Return the range of each input if values are drawn from a range."""
        scalar = drawn if drawn[0] > 0 else (0.5, 1.5)  # as `Workload.draw` draws them
        return {name: scalar if name in self.scalar_names else drawn for name in names(self.tree)}


def _listed(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split("+")))


def substitute(node: Node, replacements: Mapping[Node, Node]) -> Node:
    """Return an expression with subexpressions replaced.

    Args:
        node: The expression.
        replacements: Replacements by subexpression.
    """
    if node in replacements or not isinstance(node, Apply):
        return replacements.get(node, node)
    return Apply(node.operation, tuple(substitute(argument, replacements) for argument in node.arguments))
