"""grouped_gemm: rows of a belong to groups, and each group has its own matrix (mixture of experts)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from tunebench._lazy import np
from tunebench.dtype import itemsize, storage, underflow, unit_roundoff
from tunebench.errors import InputError
from tunebench.stress import Stress
from tunebench.workload import (
    MAX_SIZE,
    AllowedChanges,
    Category,
    Reference,
    Size,
    Tensor,
    Tolerance,
    Traffic,
    Workload,
    defaults_to,
)
from tunebench.workloads.common import accumulation

if TYPE_CHECKING:
    import numpy

    from tunebench.workload import Array, Array64

__all__ = ["GroupedGemm"]


@dataclass(frozen=True, kw_only=True)
class GroupedGemm(Workload):
    """c[rows of g] = a[rows of g] @ op(b[g]) for each group g, accumulated in f32.

    The rows of group g are ``offsets[g]`` up to ``offsets[g + 1]``. Group sizes are data, known only on the
    device when the kernel runs: groups may be empty, and one may have all rows. All tensors are row-major:
    a (m, k), sorted by group; b (groups, k, n), or (groups, n, k) if `trans` is nt; offsets (groups + 1,)
    i32, rising from 0 to m; c (m, n). The types tf32 and e4m3 are multiplied as in `Gemm`.

    `skew` is the distribution of drawn group sizes: each row takes a group at random, with equal
    probability (uniform), with weight 1 / r for the r-th most frequent group (zipf), or all rows take the
    same group (one). `accumulate` is the accuracy of e4m3 sums, as in `Gemm`.
    """

    operator: ClassVar[str] = "grouped_gemm"
    category: ClassVar[Category | None] = "dot product"
    allowed_changes: ClassVar[AllowedChanges] = AllowedChanges(
        padding={"n": "zeros", "k": "zeros"}, items=("m",), layouts=("trans",)
    )

    groups: Size
    m: Size
    n: Size
    k: Size
    dtype: Literal["f32", "tf32", "f16", "bf16", "e4m3"]
    trans: Literal["nn", "nt"] = "nn"
    skew: Literal["uniform", "zipf", "one"] = "uniform"
    out: Literal["f32", "f16", "bf16"] = defaults_to("dtype")
    accumulate: Literal["fast", "f32"] = "fast"

    def check(self) -> None:
        """Refuse so large a number of groups that groups + 1 offsets exceed the size limit."""
        accumulation.check(self.operator, self.accumulate, self.dtype)
        if self.groups == MAX_SIZE:
            raise InputError(f"{self.operator}: groups={self.groups} must be below {MAX_SIZE}")

    def default_of(self, dimension: str, followed: Any) -> Any:
        """Return the storage type of a and b as the default type of c, or bf16 where it is too narrow."""
        return {"e4m3": "bf16"}.get(followed, storage(followed))

    @property
    def most_filled(self) -> int:
        """Largest possible number of groups that have rows."""
        return min(self.groups, self.m)

    def inputs(self) -> tuple[Tensor, ...]:
        """Return a, b and offsets."""
        b_shape = (self.k, self.n) if self.trans == "nn" else (self.n, self.k)
        stored = storage(self.dtype)
        return (
            Tensor(name="a", shape=(self.m, self.k), dtype=stored),
            Tensor(name="b", shape=(self.groups, *b_shape), dtype=stored),
            Tensor(name="offsets", shape=(self.groups + 1,), dtype="i32"),
        )

    def stress(self) -> Mapping[str, Stress]:
        """Return rows of a and columns of op(b) of the kinds of `accumulation.factors`."""
        return accumulation.factors(self.dtype, (-1, -2 if self.trans == "nn" else -1), self.out)

    def outputs(self) -> tuple[Tensor, ...]:
        """Return c (m, n)."""
        return (Tensor(name="c", shape=(self.m, self.n), dtype=self.out),)

    def flops(self) -> int:
        """Count products and sums, which do not depend on the group sizes."""
        return 2 * self.m * self.n * self.k

    def traffic(self) -> Traffic:
        """Count the matrix of one group only: if all rows belong to one group, no other matrix is read."""
        a, b, offsets = (tensor.nbytes for tensor in self.inputs())
        return Traffic(
            read_bytes=a + b // self.groups + offsets,
            write_bytes=self.m * self.n * itemsize(self.out),
        )

    def draw_by_rule(self, tensor: Tensor, rng: numpy.random.Generator) -> Array | None:
        """Draw offsets with the group sizes of `skew`; a and b may hold any numbers."""
        if tensor.name != "offsets":
            return None
        weights = {
            "uniform": np.ones(self.groups),
            "zipf": 1.0 / np.arange(1, self.groups + 1),
            "one": np.arange(self.groups) == 0,
        }[self.skew]
        sizes = rng.multinomial(self.m, rng.permutation(weights / weights.sum()))
        offsets: Array = np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)
        return offsets

    # -- reference -------------------------------------------------------------------------------

    def reference(self, inputs: Mapping[str, Array64]) -> dict[str, Reference]:
        """Compute all of c, one group after the other."""
        return {"c": self.reference_block(inputs, 0, slice(0, self.m), slice(0, self.n))}

    def reference_block(
        self, inputs: Mapping[str, Array64], batch_index: int, rows: slice, cols: slice
    ) -> Reference:
        """Compute only ``c[rows, cols]``, so that parts of a large product can be checked.

        Args:
            inputs: As for `reference`.
            batch_index: Always 0: there is one c.
            rows: Rows of c, with unit step.
            cols: Columns of c, with unit step.

        Returns:
            Value and scale, both of the shape of the block.
        """
        value, scale = np.empty((2, rows.stop - rows.start, cols.stop - cols.start))
        for group, part in self.parts(inputs["offsets"], rows):
            a, b = inputs["a"][part], self._matrix(inputs, group)[:, cols]
            part_rows = slice(part.start - rows.start, part.stop - rows.start)
            value[part_rows] = a @ b
            scale[part_rows] = accumulation.product_scale(
                a, b, self.k, self.dtype, promoted=self.accumulate == "f32"
            )
        return Reference(value=value, scale=scale + underflow(self.out) / self.tolerance().eps_acc)

    def reference_sums(
        self, inputs: Mapping[str, Array64], batch_index: int, signs: Array64, width: int
    ) -> Reference:
        """Compute signed sums of runs of c's columns without computing c (see `Gemm.reference_sums`).

        Args:
            inputs: As for `reference`.
            batch_index: Always 0: there is one c.
            signs: One factor for each column of c, (n,).
            width: Columns per run; the last run may be shorter.

        Returns:
            Value (m, ceil(n / width)) and scale, at least the root of the sum of the squared scales of the
            run's elements.
        """
        starts = np.arange(0, self.n, width)
        value, scale = np.empty((2, self.m, len(starts)))
        for group, part in self.parts(inputs["offsets"]):
            a, b = inputs["a"][part], self._matrix(inputs, group)
            value[part] = a @ np.add.reduceat(b * signs, starts, axis=1)
            if self.dtype == "f32":
                scale[part] = np.sqrt(np.square(a) @ np.add.reduceat(np.square(b), starts, axis=1))
                continue
            lengths = np.sqrt(np.square(a).sum(axis=1))
            scale[part] = lengths[:, None] * np.sqrt(np.add.reduceat(np.square(b).sum(axis=0), starts))
        least = math.sqrt(width) * underflow(self.out) / self.tolerance().eps_acc
        return Reference(value=value, scale=scale + least)

    def parts(self, offsets: Array, rows: slice | None = None) -> list[tuple[int, slice]]:
        """Return each group that has rows, with its rows.

        Args:
            offsets: Start of each group and the end of the last, (groups + 1,).
            rows: Rows to keep; default all.
        """
        rows = slice(0, self.m) if rows is None else rows
        boundaries = np.clip(offsets.astype(np.int64), rows.start, rows.stop).tolist()
        parts = [(group, slice(*boundaries[group : group + 2])) for group in range(self.groups)]
        return [(group, part) for group, part in parts if part.start < part.stop]

    def _matrix(self, inputs: Mapping[str, Array64], group: int) -> Array64:
        """Return the matrix (k, n) of a group."""
        stored: Array64 = inputs["b"][group]
        return stored if self.trans == "nn" else stored.T

    def tolerance(self) -> Tolerance:
        """Allow one rounding of the result, and f32 sums of k products in any order."""
        promoted = self.accumulate == "f32"
        reason = f"one rounding to {self.out}; {accumulation.reason(self.dtype, promoted=promoted)}"
        eps_acc = accumulation.error(self.k, self.dtype, promoted=promoted)
        eps_out = unit_roundoff(self.out) + accumulation.relative_error(self.k, self.dtype)
        return Tolerance(eps_out=eps_out, eps_acc=eps_acc, reason=reason)
