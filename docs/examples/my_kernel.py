"""Squared distances between two sets of points: a new operator and a kernel for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from tunebench.device import Device
from tunebench.dtype import unit_roundoff
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Costs, NumbaCpuVariant
from tunebench.workload import Reference, Size, Tensor, Tolerance, Workload


# The operator. Its fields are the dimensions: distance:n=1000,m=2000,dim=64
@dataclass(frozen=True, kw_only=True)
class Distance(Workload):
    """d[i, j] = sum over k of (x[i, k] - y[j, k])**2, for x (n, dim) and y (m, dim)."""

    operator: ClassVar[str] = "distance"

    n: Size
    m: Size
    dim: Size
    dtype: Literal["f32"] = "f32"

    def inputs(self) -> tuple[Tensor, ...]:
        return (
            Tensor(name="x", shape=(self.n, self.dim), dtype="f32"),
            Tensor(name="y", shape=(self.m, self.dim), dtype="f32"),
        )

    def outputs(self) -> tuple[Tensor, ...]:
        return (Tensor(name="d", shape=(self.n, self.m), dtype="f32"),)

    def flops(self) -> int:
        return 3 * self.n * self.m * self.dim

    def reference(self, inputs: Mapping[str, Any]) -> dict[str, Reference]:
        x, y = inputs["x"], inputs["y"]
        squares = (x**2).sum(axis=1)[:, None] + (y**2).sum(axis=1)[None, :]
        return {"d": Reference(value=squares - 2 * x @ y.T, scale=squares)}

    def tolerance(self) -> Tolerance:
        u = unit_roundoff("f32")
        reason = "one rounding of the result; a sum of dim products has about sqrt(dim) roundings of error"
        return Tolerance(eps_out=u, eps_acc=4 * self.dim**0.5 * u, reason=reason)


# The variant. Every choice is a parameter; constraints exclude combinations of choices.
class DistanceNumba(NumbaCpuVariant[Distance]):
    """Blocks of rows in parallel, by blocks of columns that stay in the cache."""

    name = "numba_cpu"
    operator = Distance
    space = Space(
        (
            Parameter("form", ("difference", "expanded"), "sum of (x - y)**2, or x**2 + y**2 - 2 x y"),
            Parameter("row_block", (1, 2, 4, 8, 16, 32), "rows per unit of work of a thread"),
            Parameter("col_block", (16, 32, 64, 128, 256, 512), "columns per block"),
        ),
        (lambda row_block, workload: (row_block == 1) | (row_block <= workload.n),),
    )

    def default(self, workload: Distance, device: Device) -> Config:
        """Return the configuration that you would ship untuned; the report compares with it."""
        return Config({"form": "difference", "row_block": 1, "col_block": 64})

    def costs(self, workload: Distance, table: Table, device: Device) -> Costs:
        """Return lower bounds of the multiply-adds, for all configurations at once."""
        each = np.where(table["form"] == "expanded", 1.0, 2.0)
        return Costs(blocks=1, full_blocks=0, threads=1, fma=each * workload.n * workload.m * workload.dim)

    def kernel(self, workload: Distance, config: Config) -> Callable[..., None]:
        """Return the kernel; it takes inputs, then outputs, as C-contiguous arrays."""
        import numba

        row_block, col_block = config["row_block"], config["col_block"]
        expanded = config["form"] == "expanded"
        two, zero = np.float32(2), np.float32(0)

        @numba.njit(fastmath=set(self.fastmath))
        def dot(a: Any, i: int, b: Any, j: int) -> Any:
            total = zero
            for k in range(a.shape[1]):
                total += a[i, k] * b[j, k]
            return total

        @numba.njit(fastmath=set(self.fastmath))
        def apart(a: Any, i: int, b: Any, j: int) -> Any:
            total = zero
            for k in range(a.shape[1]):
                total += (a[i, k] - b[j, k]) * (a[i, k] - b[j, k])
            return total

        def distance(x: Any, y: Any, d: Any) -> None:
            n, m = len(x), len(y)
            for block in numba.prange((n + row_block - 1) // row_block):
                squares = np.empty(col_block, np.float32)
                for first in range(0, m, col_block):
                    last = min(m, first + col_block)
                    for j in range(first, last):
                        squares[j - first] = dot(y, j, y, j) if expanded else zero
                    for i in range(block * row_block, min(n, (block + 1) * row_block)):
                        square = dot(x, i, x, i) if expanded else zero
                        for j in range(first, last):
                            if expanded:
                                d[i, j] = square + squares[j - first] - two * dot(x, i, y, j)
                            else:
                                d[i, j] = apart(x, i, y, j)

        return distance


VARIANT = DistanceNumba()
