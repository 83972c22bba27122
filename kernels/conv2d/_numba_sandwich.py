"""M X M^T for a small constant M and a square X of vectors, for Numba on the CPU: Winograd's transforms.

The code is unrolled LLVM vectors, because LLVM does not reliably vectorise loops over arrays. Rows of M that
differ only in some signs, as those of opposite points do, share their work.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from tunebench.kernels.common.numba_product import LANES, Vectors

__all__ = ["sandwich"]

Matrix = tuple[tuple[float, ...], ...]


@functools.cache
def sandwich(matrix: Matrix) -> Callable[..., None]:
    """Return the intrinsic that multiplies a square of vectors by a matrix from the left and from the right.

    Its arguments are `(source, at, row, column, target, to, to_row, to_column)`: addresses of f32, offsets of
    the first vectors, and distances between vectors that are neighbours in a column and in a row.

    Args:
        matrix: (rows, columns); the source has columns x columns vectors, the target rows x rows.
    """
    from llvmlite import ir
    from numba import types
    from numba.extending import intrinsic

    height, width, index = len(matrix), len(matrix[0]), ir.IntType(64)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, at, row, column, target, to, to_row, to_column = arguments

        def offset(first: Any, i: int, by_row: Any, j: int, by_column: Any) -> Any:
            steps = builder.add(builder.mul(by_row, index(i)), builder.mul(by_column, index(j)))
            return builder.add(first, steps)

        vectors = _Sums(builder)
        columns = [
            vectors.times(matrix, [vectors.load(source, offset(at, i, row, j, column)) for i in range(width)])
            for j in range(width)
        ]
        for i in range(height):
            for j, value in enumerate(vectors.times(matrix, [column[i] for column in columns])):
                vectors.store(value, target, offset(to, i, to_row, j, to_column))
        return context.get_dummy_value()

    @intrinsic  # type: ignore[untyped-decorator]
    def transform(
        _typing: Any,
        source: Any,
        at: Any,
        row: Any,
        column: Any,
        target: Any,
        to: Any,
        to_row: Any,
        to_column: Any,
    ) -> Any:
        offset = types.int64
        return types.void(source, offset, offset, offset, target, offset, offset, offset), generate

    return transform  # type: ignore[no-any-return]


class _Sums(Vectors):
    """Sums of vectors with constant coefficients, as LLVM instructions."""

    def times(self, matrix: Matrix, vectors: Sequence[Any]) -> list[Any]:
        """Return a matrix times a column of vectors. Rows that differ only in signs share work."""
        found: list[Any] = []
        while len(found) < len(matrix):
            one = matrix[len(found)]
            other = matrix[len(found) + 1] if len(found) + 1 < len(matrix) else ()
            if any(one) and len(other) and all(abs(a) == abs(b) for a, b in zip(one, other, strict=True)):
                found += self._pair(one, other, vectors)
            else:
                found.append(self._sum(one, vectors))
        return found

    def _pair(self, one: Sequence[float], other: Sequence[float], vectors: Sequence[Any]) -> list[Any]:
        """Return two sums that differ in signs only: the common part plus and minus the rest."""
        alike = self._sum([a if a == b else 0.0 for a, b in zip(one, other, strict=True)], vectors)
        opposite = self._sum([a if a != b else 0.0 for a, b in zip(one, other, strict=True)], vectors)
        return [self.builder.fadd(alike, opposite), self.builder.fsub(alike, opposite)]

    def _sum(self, coefficients: Sequence[float], vectors: Sequence[Any]) -> Any:
        """Return the sum of vectors with coefficients; those of 1 come first and need no multiplication."""
        terms = sorted(
            ((c, v) for c, v in zip(coefficients, vectors, strict=True) if c),
            key=lambda term: abs(term[0]) != 1,
        )
        total = None
        for coefficient, vector in terms:
            if total is None:
                total = vector if coefficient == 1 else self.builder.fmul(self._constant(coefficient), vector)
            elif abs(coefficient) == 1:
                add = self.builder.fadd if coefficient == 1 else self.builder.fsub
                total = add(total, vector)
            else:
                total = self.fma(self._constant(coefficient), vector, total)
        return total

    def _constant(self, value: float) -> Any:
        from llvmlite import ir

        return ir.Constant(self.kind, [ir.Constant(ir.FloatType(), value)] * LANES)
