"""elementwise: out[i, j] = an expression of x[i, j], vectors at j, columns at i, and scalars."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from tunebench.dtype import DType
from tunebench.errors import InputError
from tunebench.expression import FUNCTIONS, Name, parse, write
from tunebench.workload import AllowedChanges, Category, Tensor, Workload, defaults_to
from tunebench.workloads.common.expression_value import flops
from tunebench.workloads.common.expression_workload import ExpressionWorkload, substitute

if TYPE_CHECKING:
    pass

__all__ = ["Elementwise", "neighbour"]


@dataclass(frozen=True, kw_only=True)
class Elementwise(ExpressionWorkload):
    """A chain of elementwise operations in one kernel, computed in f32 and rounded once.

    See `ExpressionWorkload` for the inputs. out (rows, cols). Vectors may have another type, `vector_dtype`:
    statistics are f32 where images are f16.
    """

    operator: ClassVar[str] = "elementwise"
    category: ClassVar[Category | None] = "elementwise"
    allowed_changes: ClassVar[AllowedChanges] = AllowedChanges(items=("rows",))

    vector_dtype: Literal["f32", "f16", "bf16"] = defaults_to("dtype")
    out: Literal["f32", "f16", "bf16"] = defaults_to("dtype")

    def check(self) -> None:
        """Refuse a `vector_dtype` without vectors."""
        if not self.vectors:
            object.__setattr__(self, "vector_dtype", self.dtype)
        super().check()

    @property
    def vector_type(self) -> DType:
        """The type of inputs of shape (cols,)."""
        return self.vector_dtype

    def outputs(self) -> tuple[Tensor, ...]:
        """Return out (rows, cols)."""
        return (Tensor(name="out", shape=(self.rows, self.cols), dtype=self.out),)

    def flops(self) -> int:
        """Count every distinct operation once per element; a copy counts as one."""
        return self.rows * self.cols * max(1, flops(self.tree))

    def unfused(self) -> tuple[Workload, ...]:
        """Return each operation separately, if there are two or more (see `ExpressionWorkload.apart`).

        There are no parts if one of them could not be checked alone because no inputs can be drawn for it.
        """
        apart = self.apart()
        if len(apart) < 2:
            return ()
        parts = []
        for alone, step in apart:
            out = self.out if step is apart[-1][1] else self.dtype
            try:
                parts.append(self.changed(expression=write(alone), out=out, **self.lists_of(alone)))
            except InputError:
                return ()
        return tuple(parts)


def neighbour(
    fused: str | tuple[str, ...],
    first: str,
    shape: tuple[int, int],
    dtype: DType,
    *,
    vectors: str = "",
    scalars: str = "",
) -> Workload:
    """Return as a separate elementwise workload the operations that a neighbouring operator fuses.

    Args:
        fused: Names joined by ``+``, or a tuple of them, in order of application: functions; `scale`, which
            multiplies; and other inputs, which are added. A tuple may contain an expression in x.
        first: Name of the tensor that the operations start from.
        shape: Rows and columns of the tensor, seen as a matrix.
        dtype: Type of the tensor.
        vectors: Names of inputs that are the same for all rows, joined by ``+``; names not in `fused` are
            ignored.
        scalars: Names of scalar inputs, likewise.

    Raises:
        InputError: If an expression makes the text too long, or no inputs can be drawn for it.
    """
    expression, applied = first, fused.split("+") if isinstance(fused, str) else fused
    for name in applied:
        if not name.isidentifier():
            expression = write(substitute(parse(name), {Name("x"): parse(expression)}))
        elif name in FUNCTIONS:
            expression = f"{name}({expression})"
        else:
            expression += f"*{name}" if name == "scale" else f"+{name}"
    lists = {
        key: "+".join(name for name in listed.split("+") if name in applied)
        for key, listed in (("vectors", vectors), ("scalars", scalars))
    }
    rows, cols = shape
    return Elementwise.from_dimensions(
        {"rows": rows, "cols": cols, "dtype": dtype, "expression": expression, **lists}
    )
