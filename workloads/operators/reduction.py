"""reduction: out[i] = then(the sum, mean, maximum or minimum over j of an expression of x[i, j])."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from tunebench.errors import InputError
from tunebench.expression import Apply, Name, write
from tunebench.stress import Stress, StressKind
from tunebench.workload import (
    AllowedChanges,
    Category,
    Expression,
    Reference,
    Tensor,
    Workload,
    defaults_to,
)
from tunebench.workloads.common.expression_value import flops
from tunebench.workloads.common.expression_workload import ExpressionWorkload, propagates_nan, substitute
from tunebench.workloads.common.reduced_expression import Reduce, ReducedExpression
from tunebench.workloads.operators.elementwise import Elementwise

if TYPE_CHECKING:
    from tunebench.workload import Array64

__all__ = ["Reduction"]


@dataclass(frozen=True, kw_only=True)
class Reduction(ReducedExpression, ExpressionWorkload):
    """An expression reduced over one axis in one kernel, computed in f32 and rounded once.

    See `ExpressionWorkload` for the inputs of the expression. `axis` is the reduced axis, as in NumPy:

    ==== ============ ===========
    axis over         out
    ==== ============ ===========
    cols each row     (rows,)
    rows each column  (cols,)
    ==== ============ ===========

    `then` is applied to each result before rounding: an expression of one name, which is replaced by x. The
    order of summation is not fixed.
    """

    operator: ClassVar[str] = "reduction"
    category: ClassVar[Category | None] = "reduction"
    allowed_changes: ClassVar[AllowedChanges] = AllowedChanges(items=("rows",))

    reduce: Reduce
    axis: Literal["cols", "rows"] = "cols"
    then: Expression = "x"
    out: Literal["f32", "f16", "bf16"] = defaults_to("dtype")

    @property
    def terms(self) -> int:
        """Number of elements that are reduced to one result."""
        return self.cols if self.axis == "cols" else self.rows

    @property
    def results(self) -> int:
        """Number of elements of out."""
        return self.rows if self.axis == "cols" else self.cols

    def may_change(self) -> AllowedChanges:
        """Return rows as independent items, unless the reduction is over rows."""
        return self.allowed_changes if self.axis == "cols" else AllowedChanges()

    def outputs(self) -> tuple[Tensor, ...]:
        """Return out (rows,) or (cols,)."""
        return (Tensor(name="out", shape=(self.results,), dtype=self.out),)

    def stress(self) -> Mapping[str, Stress]:
        """Return sparse, equal, shifted and NaN vectors along the reduced axis of inputs of all elements."""
        kinds: tuple[StressKind, ...] = ("sparse", "offset", "constant")
        if propagates_nan(self.tree) and propagates_nan(self.end):
            kinds = (*kinds, "nan")
        along = Stress(kinds=kinds, axes=(-1 if self.axis == "cols" else 0,))
        return dict.fromkeys(self.whole_names, along)

    def flops(self) -> int:
        """Count the expression and one reduction per element, and `then` per result."""
        expression_flops = self.rows * self.cols * (flops(self.tree) + 1)
        return expression_flops + self.results * (flops(self.end) + (self.reduce == "mean"))

    def reference(self, inputs: Mapping[str, Array64]) -> dict[str, Reference]:
        """Evaluate some rows at a time and reduce them, with a running error analysis as scale."""
        over_cols = self.axis == "cols"
        parts = ((value, error) for _, value, error in self.evaluated(inputs))
        return {"out": self.rounded(*self.reduced(parts, (int(over_cols),), joined=not over_cols))}

    def unfused(self) -> tuple[Workload, ...]:
        """Return the elementwise chain, the reduction alone, and `then` as a chain.

        There are no parts if only one of these is present, or if one could not be checked alone.
        """
        parts: list[Workload] = []
        prefix, shape = self.step_prefix, {"rows": self.rows, "cols": self.cols, "dtype": self.dtype}
        try:
            plain = Reduction.from_dimensions(
                {**shape, "expression": f"{prefix}0", "reduce": self.reduce, "axis": self.axis}
            )
            if isinstance(self.tree, Apply):
                lists = self.lists_of(self.tree)
                parts.append(Elementwise.from_dimensions({**shape, "expression": self.expression, **lists}))
            else:
                plain = plain.changed(expression=self.expression)
            if isinstance(self.end, Apply):
                ended = substitute(self.end, {Name("x"): Name(f"{prefix}{len(parts)}")})
                vector = {"rows": 1, "cols": self.results, "dtype": self.dtype, "out": self.out}
                parts += [plain, Elementwise.from_dimensions({**vector, "expression": write(ended)})]
            else:
                parts.append(plain.changed(out=self.out))
        except InputError:
            return ()
        return tuple(parts) if len(parts) > 1 else ()
