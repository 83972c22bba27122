"""Times of workloads from public measurements of operators, summed up by `predict_models --measured`.

A measured time is that of one operation launched and timed alone, and includes launch overhead of the host.
The overhead is subtracted: for products the time of the smallest ones, for other operators the intercept of
a line through the smallest rows.
"""

from __future__ import annotations

import csv
import functools
import gzip
from collections import defaultdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tunebench.workload import Workload
from tunebench.workloads.networks import Operation
from tunebench.workloads.operators.attention import Attention
from tunebench.workloads.operators.elementwise import Elementwise
from tunebench.workloads.operators.gemm import Gemm
from tunebench.workloads.operators.layernorm import LayerNorm
from tunebench.workloads.operators.softmax import Softmax

__all__ = ["Measured"]

Array = NDArray[np.float64]

SMALLEST_ROWS = 80
LEAST_MS = 0.0025
"""Least time of a kernel in a queue, in milliseconds."""
PRODUCT_MS = 0.005
"""Time of the smallest products on the device itself, in milliseconds."""
PERSISTENT = 1024
"""Columns up to which PyTorch's softmax keeps a row in registers: times above and below differ in kind."""
ELEMENTWISE = {"gelu(x)": "gelu", "tanh(x)": "tanh", "relu(x)": "relu"}
"""Measured operators by expression; any other is timed as a sum of two tensors or a product with a number."""


class Measured:
    """Operator times of one device: products (B, M, N, K, ms), others (B, H, bytes, ms), by operator."""

    def __init__(self, tables: dict[str, Array]) -> None:
        self.tables = tables
        self.product_ms = max(0.0, float(np.percentile(tables["bmm"][:, -1], 1)) - PRODUCT_MS)
        lines = [_intercept(tables[name]) for name in ("add", "addu", "mulu", "relu", "tanh")]
        self.way_ms = max(0.0, float(np.median(lines)) - LEAST_MS)

    @classmethod
    def read(cls, path: Path) -> dict[str, Measured]:
        """Return the measurements of `neusight_ops.csv.gz` by device."""
        rows: dict[str, dict[str, list[list[float]]]] = defaultdict(lambda: defaultdict(list))
        with gzip.open(path, "rt", newline="") as file:
            for row in csv.DictReader(file):
                columns = (
                    ("B", "M", "N", "K") if row["op_group"] in ("bmm", "linear") else ("B", "H", "bytes")
                )
                numbers = [float(row[column]) for column in (*columns, "latency_ms")]
                rows[row["device"]][row["op"]].append(numbers)
        return {name: cls({op: np.array(of) for op, of in table.items()}) for name, table in rows.items()}

    def of(self, operation: Operation) -> float:
        """Return the time of all runs of an operation, in milliseconds."""
        way = 0.0
        if operation.alone:
            way = self.product_ms if isinstance(operation.workload, Gemm) else self.way_ms
        return operation.count * (self.ms(operation.workload) + way)

    @functools.cache  # noqa: B019 - as many as there are devices
    def ms(self, work: Workload) -> float:
        """Return the time of a workload in a queue, in milliseconds, from the nearest measured ones."""
        if isinstance(work, Gemm):
            return self._product_ms(work.batch, work.m, work.k, work.n)
        if isinstance(work, Attention):  # not measured: sum of its two products
            batch, of = work.batch * work.heads, work
            return self._product_ms(batch, of.seq_q, of.head_dim, of.seq_k) + self._product_ms(
                batch, of.seq_q, of.seq_k, of.head_dim
            )
        if isinstance(work, Elementwise):
            name = "add" if len(work.whole_names) == 2 else ELEMENTWISE.get(work.expression, "mulu")
            return self._bytes_ms(self.tables[name], work.traffic().total_bytes)
        if isinstance(work, Softmax):  # the gradient reads two tensors
            return self._rows_ms("softmax", work.rows, work.cols, 1.5 if work.is_backward else 1.0)
        assert isinstance(work, LayerNorm), work
        more = 2.0 if work.is_backward or work.has_residual else 1.0
        return self._rows_ms("ln", work.rows, work.cols, more)

    def _product_ms(self, batch: int, m: int, inner: int, n: int) -> float:
        """Return the time at the median throughput of the nearest four products, or of an exact match."""
        table = self.tables["linear" if batch == 1 else "bmm"]
        size = np.array([batch, m, inner, n], dtype=np.float64)
        far = np.abs(np.log(table[:, :4] / size)).sum(axis=1)
        near = table[np.argsort(far)[: 1 if far.min() < 1e-9 else 4]]
        times = np.maximum(near[:, 4] - self.product_ms, LEAST_MS)
        return float(np.median(times / near[:, :4].prod(axis=1)) * size.prod())

    def _bytes_ms(self, table: Array, nbytes: int) -> float:
        """Return the time at the median throughput of the nearest five rows; below all, of the largest."""
        order = np.argsort(np.abs(np.log(table[:, 2] / nbytes)))[:5]
        near = table[order] if nbytes >= table[:, 2].min() else table[np.argsort(-table[:, 2])[:50]]
        rate = np.median(near[:, 2] / np.maximum(near[:, 3] - self.way_ms, LEAST_MS))
        return max(LEAST_MS, nbytes / float(rate))

    def _rows_ms(self, name: str, rows: int, cols: int, more: float) -> float:
        """Return the time at the median time per element of the nearest three rows, multiplied by `more`."""
        table = self.tables[name]
        table = table[(table[:, 1] > PERSISTENT) == (cols > PERSISTENT)]
        far = 0.3 * np.abs(np.log(table[:, 0] / rows)) + np.abs(np.log(table[:, 1] / cols))
        near = table[np.argsort(far)[:3]]
        times = np.maximum(near[:, 3] - self.way_ms, LEAST_MS)
        return max(LEAST_MS, float(np.median(times / (near[:, 0] * near[:, 1]))) * rows * cols * more)


def _intercept(table: Array) -> float:
    """Return the time at zero bytes of a line through the smallest rows, by least relative squares."""
    smallest = table[np.argsort(table[:, 2])][:SMALLEST_ROWS]
    lines = np.stack([np.ones(len(smallest)), smallest[:, 2]], axis=1) / smallest[:, 3:4]
    return float(np.linalg.lstsq(lines, np.ones(len(smallest)), rcond=None)[0][0])
