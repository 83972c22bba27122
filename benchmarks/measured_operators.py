"""Times of workloads from public measurements of operators, summed up by `predict_models --measured`.

A measured time is that of one operation launched and timed alone, and includes the host. The host's lead is
subtracted, and kernels that the host's floor hides are left out (see `benchmarks.host_time`).
"""

from __future__ import annotations

import csv
import functools
import gzip
from collections import defaultdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tunebench.forecast.library.roofline_model import LAUNCH_US
from tunebench.forecast.model_training.data import DEVICES
from tunebench.forecast.model_training.host import FLOOR_NOISE, HostTime
from tunebench.forecast.network import DISPATCH_US
from tunebench.workload import Workload
from tunebench.workloads.networks import Operation
from tunebench.workloads.operators.attention import Attention
from tunebench.workloads.operators.elementwise import Elementwise
from tunebench.workloads.operators.gemm import Gemm
from tunebench.workloads.operators.layernorm import LayerNorm
from tunebench.workloads.operators.softmax import Softmax

__all__ = ["Measured", "host_times"]

Array = NDArray[np.float64]

LEAST_MS = LAUNCH_US / 1e3
"""Least time of a kernel, in milliseconds."""
PERSISTENT = 1024
"""Columns up to which PyTorch's softmax keeps a row in registers: times above and below differ in kind."""
ELEMENTWISE = {"gelu(x)": "gelu", "tanh(x)": "tanh", "relu(x)": "relu"}
"""Measured operators by expression; any other is timed as a sum of two tensors or a product with a number."""


def host_times() -> dict[tuple[str, str, str], HostTime]:
    """Return the published host times of `benchmarks.host_time`, by device, operator and part of the data."""
    path = Path(__file__).parent / "results" / "predict" / "host_time.csv"
    with path.open(newline="") as file:
        return {
            (row["device"], row["operator"], row["part"]): HostTime(
                float(row["floor_us"]), float(row["lead_us"])
            )
            for row in csv.DictReader(file)
        }


class Measured:
    """Kernel times of one device: products (B, M, N, K, ms), others (B, H, bytes, ms), by operator."""

    def __init__(self, tables: dict[str, Array]) -> None:
        self.tables = tables

    @classmethod
    def read(cls, path: Path) -> dict[str, Measured]:
        """Return the measurements of `neusight_ops.csv.gz` by device."""
        hosts = host_times()
        rows: dict[str, dict[str, list[list[float]]]] = defaultdict(lambda: defaultdict(list))
        with gzip.open(path, "rt", newline="") as file:
            for row in csv.DictReader(file):
                host = hosts[DEVICES[row["device"]], row["op"], row["split"]]
                us = 1e3 * float(row["latency_ms"])
                if us <= FLOOR_NOISE * host.floor_us:
                    continue
                columns = (
                    ("B", "M", "N", "K") if row["op_group"] in ("bmm", "linear") else ("B", "H", "bytes")
                )
                kernel_ms = max((us - host.lead_us) / 1e3, LEAST_MS)
                rows[row["device"]][row["op"]].append([*(float(row[name]) for name in columns), kernel_ms])
        return {
            name: cls({op: np.array(op_rows) for op, op_rows in table.items()})
            for name, table in rows.items()
        }

    def of(self, operation: Operation) -> float:
        """Return the time of all runs of an operation, in milliseconds."""
        host_us = DISPATCH_US[isinstance(operation.workload, Gemm)] if operation.alone else 0.0
        return operation.count * (self.ms(operation.workload) + host_us / 1e3)

    @functools.cache  # noqa: B019 - as many as there are devices
    def ms(self, work: Workload) -> float:
        """Return the time of a workload in a queue, in milliseconds, from the nearest measured ones."""
        if isinstance(work, Gemm):
            return self._product_ms(work.batch, work.m, work.k, work.n)
        if isinstance(work, Attention):  # not measured: sum of its two products
            batch, attention = work.batch * work.heads, work
            return self._product_ms(
                batch, attention.seq_q, attention.head_dim, attention.seq_k
            ) + self._product_ms(batch, attention.seq_q, attention.seq_k, attention.head_dim)
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
        return float(np.median(near[:, 4] / near[:, :4].prod(axis=1)) * size.prod())

    def _bytes_ms(self, table: Array, nbytes: int) -> float:
        """Return the time at the median throughput of the nearest five rows; below all, of the largest."""
        order = np.argsort(np.abs(np.log(table[:, 2] / nbytes)))[:5]
        near = table[order] if nbytes >= table[:, 2].min() else table[np.argsort(-table[:, 2])[:50]]
        rate = np.median(near[:, 2] / near[:, 3])
        return max(LEAST_MS, nbytes / float(rate))

    def _rows_ms(self, name: str, rows: int, cols: int, more: float) -> float:
        """Return the time at the median time per element of the nearest three rows, multiplied by `more`."""
        table = self.tables[name]
        table = table[(table[:, 1] > PERSISTENT) == (cols > PERSISTENT)]
        far = 0.3 * np.abs(np.log(table[:, 0] / rows)) + np.abs(np.log(table[:, 1] / cols))
        near = table[np.argsort(far)[:3]]
        return max(LEAST_MS, float(np.median(near[:, 3] / (near[:, 0] * near[:, 1]))) * rows * cols * more)
