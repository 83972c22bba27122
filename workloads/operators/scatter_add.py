"""scatter_add: out[index[j], :] = the sum of the rows x[j, :] with that index, added to base."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from tunebench._lazy import np
from tunebench.dimension import AtLeast
from tunebench.dtype import itemsize, numpy_dtype, underflow, unit_roundoff
from tunebench.errors import InputError
from tunebench.stress import Stress
from tunebench.workload import AllowedChanges, Category, Reference, Size, Tensor, Tolerance, Traffic, Workload
from tunebench.workloads.common.accumulation import F32, sum_error_of

if TYPE_CHECKING:
    import numpy

    from tunebench.workload import Array, Array64

__all__ = ["ScatterAdd"]


@dataclass(frozen=True, kw_only=True)
class ScatterAdd(Workload):
    """Rows of x (rows, cols) added to rows of out (bins, cols), in f32 and rounded once.

    ========= ================================ =====================================
    dimension tensor                           meaning
    ========= ================================ =====================================
    index     index (rows,), of this type      row of out to which a row of x goes
    base      base (bins, cols), if true       added to the sums
    skipped                                    index of rows of x that are left out
    wraps                                      whether -1 is the last row of out
    ========= ================================ =====================================

    x, base and out are of `dtype`. It is the gradient of an embedding, where `skipped` is the index of its
    padding, and a sum over the edges of a graph at each node. A row of out without rows of x is 0, or that of
    base. The order of a sum is not fixed. Indices are drawn from all valid ones with equal probability.

    No kernel writes memory by an index that is not valid. The CPU's kernels raise `IndexError`, and kernels
    on a GPU trap, which makes the next call of CUDA's driver fail.
    """

    operator: ClassVar[str] = "scatter_add"
    category: ClassVar[Category | None] = "reduction"
    allowed_changes: ClassVar[AllowedChanges] = AllowedChanges(items=("rows",))

    rows: Size
    cols: Size
    bins: Size
    dtype: Literal["f32", "f16", "bf16"]
    index: Literal["i64", "i32"] = "i64"
    base: bool = False
    skipped: Annotated[int, AtLeast(-1)] = -1
    wraps: bool = False

    def check(self) -> None:
        """Refuse a skipped index that is not valid, or that several indices may name."""
        if self.skipped >= self.bins or (self.wraps and self.skipped >= 0):
            raise InputError(
                f"{self.operator}: skipped={self.skipped} must be less than bins={self.bins}, and cannot be "
                "combined with wraps=true"
            )

    def inputs(self) -> tuple[Tensor, ...]:
        """Return x and index, and base if there is one."""
        base = (Tensor(name="base", shape=(self.bins, self.cols), dtype=self.dtype),) if self.base else ()
        return (
            Tensor(name="x", shape=(self.rows, self.cols), dtype=self.dtype),
            Tensor(name="index", shape=(self.rows,), dtype=self.index),
            *base,
        )

    def outputs(self) -> tuple[Tensor, ...]:
        """Return out (bins, cols)."""
        return (Tensor(name="out", shape=(self.bins, self.cols), dtype=self.dtype),)

    def flops(self) -> int:
        """Count an addition for each element of x."""
        return self.rows * self.cols

    def traffic(self) -> Traffic:
        """Return the bytes of all tensors, without the expected share of rows that are skipped."""
        of_tensors = super().traffic()
        skipped = self.rows / self.bins * self.cols * itemsize(self.dtype) if self.skipped >= 0 else 0.0
        return Traffic(read_bytes=of_tensors.read_bytes - int(skipped), write_bytes=of_tensors.write_bytes)

    def draw_by_rule(self, tensor: Tensor, rng: numpy.random.Generator) -> Array | None:
        """Draw valid indices."""
        if tensor.name != "index":
            return None
        first = -self.bins if self.wraps else 0
        drawn: Array = rng.integers(first, self.bins, tensor.shape).astype(numpy_dtype(tensor.dtype))
        return drawn

    def stress(self) -> Mapping[str, Stress]:
        """Return sparse, equal, zero and NaN columns, and columns of very different magnitudes."""
        return {"x": Stress(kinds=("mixed", "sparse", "constant", "zeros", "nan"), axes=(0,))}

    def reference(self, inputs: Mapping[str, Array64]) -> dict[str, Reference]:
        """Add the rows of each bin, with the error of f32 sums as scale.

        Raises:
            IndexError: An index is not valid.
        """
        places = self.places(inputs["index"])
        taken = np.flatnonzero(places >= 0)
        order = taken[np.argsort(places[taken], kind="stable")]
        used, starts, counts = np.unique(places[order], return_index=True, return_counts=True)
        shape = (self.bins, self.cols)
        value = inputs["base"] * 1.0 if self.base else np.zeros(shape)
        squares, terms = np.square(value), np.where(np.abs(value) > 0.0, 1.0, 0.0)
        if len(order):
            x = inputs["x"][order]
            value[used] += np.add.reduceat(x, starts, axis=0)
            squares[used] += np.add.reduceat(np.square(x), starts, axis=0)
            terms[used] += counts[:, None] * 1.0
        scale = sum_error_of(value, squares, terms) * ((1 + unit_roundoff(self.dtype)) / F32)
        return {"out": Reference(value=value, scale=scale + underflow(self.dtype) / F32)}

    def places(self, index: Array64) -> numpy.ndarray[tuple[int, ...], numpy.dtype[numpy.int64]]:
        """Return the row of out for each row of x; -1 for rows that are left out.

        Args:
            index: Indices (rows,).

        Raises:
            IndexError: An index is not valid.
        """
        places = np.asarray(index).astype(np.int64)
        if self.wraps:
            places = np.where(places < 0, places + self.bins, places)
        if ((places < 0) | (places >= self.bins)).any():
            raise IndexError(f"an index is out of range for {self.bins} rows")
        return np.where(places == self.skipped, -1, places) if self.skipped >= 0 else places

    def tolerance(self) -> Tolerance:
        """Allow one rounding of the result, and f32 sums of the terms in any order."""
        return Tolerance(
            eps_out=unit_roundoff(self.dtype),
            eps_acc=F32,
            reason=f"one rounding to {self.dtype}; f32 sums of n terms err by 4 u sqrt(n) of their 2-norm "
            "and of the sum with overwhelming probability (Higham and Mary 2020)",
        )
