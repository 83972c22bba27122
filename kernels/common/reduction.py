"""Base of the two reduction variants in CUDA C++: launches, joins of results, and costs of an element."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.kernels.common.cuda import ctype, helpers
from tunebench.kernels.common.cuda_expression import claimed, function, function_of, special
from tunebench.kernels.common.expression import least_operations
from tunebench.space import Config
from tunebench.variant import Argument, CudaVariant, Launch, Scalar, ceil_div
from tunebench.workload import Tensor
from tunebench.workloads.operators.reduction import Reduction

__all__ = [
    "END_ROWS",
    "JOIN",
    "LOOP_REGISTERS",
    "MOST_BLOCKS",
    "OTHER_REGISTERS",
    "ROWS_AT_END",
    "SMALL",
    "SPLITS",
    "CudaReduction",
    "fit",
    "fma_of_element",
    "sfu_of_element",
    "source",
]

SPLITS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Blocks that share a result, or a group of results."""
MOST_BLOCKS = 4
"""Blocks per SM above which nothing is split further."""
SMALL = 2**20
"""Most elements of an emulation workload, approximately."""
OTHER_REGISTERS = 40
"""Registers of a thread in addition to loaded vectors: addresses, loop state and temporaries of functions."""
LOOP_REGISTERS = 24
"""Registers of a thread in addition to loaded vectors, as far as short expressions need them."""
ROWS_AT_END = 4
"""Rows of a block, one warp each, in the launch that joins parts of rows."""
JOIN = {"sum": "Total", "mean": "Total", "max": "Greatest", "min": "Least"}
"""Struct that joins two results, by reduction."""

END_ROWS = r"""
// `partial` has (rows, parts); a warp has a row.
template <class Op, class Out>
__global__ void __launch_bounds__(128)
    end_rows(const float* __restrict__ partial, Out* __restrict__ out, float factor, int rows, int parts) {
  const int row = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
  const Op op;
  float total = Op::neutral();
  if (row < rows)
    for (int part = lane; part < parts; part += 32) total = op(total, partial[size_t(row) * parts + part]);
  total = warp_reduce<32>(total, op);
  if (lane == 0 && row < rows) out[row] = from_float<Out>(finish(total * factor));
}
"""
"""Kernel that joins parts of rows."""


def source(workload: Reduction, kernels: str) -> str:
    """Return the source of kernels that call `chain` and `finish`, with the headers they need.

    Args:
        workload: The workload, whose expressions become `chain` and `finish`.
        kernels: Source of the kernels.
    """
    made = function(workload) + function_of(workload.end, ("x",), "finish")
    return helpers("types", "reduce", "row_block", "epilogue") + made + helpers("reduction") + kernels


class CudaReduction(CudaVariant[Reduction]):
    """A reduction over one axis, whose blocks may share a result; a second launch then joins the parts.

    Attributes:
        axis: Axis that is reduced.
        kernels: Suffix of the kernels `reduce_` and `end_`.
        shape: Parameters that are template arguments; first the threads of a block along and across.
        at_end: Results of a block of the second launch, and threads for each.
    """

    operator = Reduction
    axis: ClassVar[str]
    kernels: ClassVar[str]
    shape: ClassVar[tuple[str, ...]]
    at_end: ClassVar[tuple[int, int]]

    @abstractmethod
    def blocks(self, workload: Reduction, config: Config) -> int:
        """Return the blocks among which the results are divided."""

    def limits(self, workload: Reduction, device: Device) -> str | None:
        """Refuse the other axis."""
        return None if workload.axis == self.axis else f"{self.key} supports axis={self.axis} only"

    def scratch(self, workload: Reduction, config: Config) -> tuple[Tensor, ...]:
        """Return memory for results of parts, if any: (rows, split) for rows, (split, cols) for columns."""
        split = config["split"]
        if split == 1:
            return ()
        shape = (workload.rows, split) if workload.axis == "cols" else (split, workload.cols)
        return (Tensor(name="partial", shape=shape, dtype="f32"),)

    def claims(self, workload: Reduction, config: Config) -> tuple[str, ...]:
        """Return loads and stores, and the special-function unit if a function should use it."""
        return claimed(workload.tree)

    def launches(self, workload: Reduction, config: Config) -> tuple[Launch, ...]:
        """Launch a block for every part of some results, and a second kernel if there are parts."""
        factor, split = Scalar("float", workload.factor), config["split"]
        sizes = (Scalar("int", workload.rows), Scalar("int", workload.cols))
        read = tuple(tensor.name for tensor in workload.inputs())
        first = Launch(
            entry=f"reduce_{self.kernels}<{self._types(workload, config)}>",
            grid=(self.blocks(workload, config), split, 1),
            block=(config[self.shape[0]] * config[self.shape[1]], 1, 1),
            arguments=(*read, "out" if split == 1 else "partial", factor, *sizes),
        )
        if split == 1:
            return (first,)
        results, threads = self.at_end
        sizes_at_end: tuple[Argument, ...] = (Scalar("int", workload.results), Scalar("int", split))
        last = Launch(
            entry=f"end_{self.kernels}<{JOIN[workload.reduce]}, {ctype(workload.out)}>",
            grid=(ceil_div(workload.results, results), 1, 1),
            block=(results * threads, 1, 1),
            arguments=("partial", "out", factor, *sizes_at_end),
        )
        return (first, last)

    def _types(self, workload: Reduction, config: Config) -> str:
        """Return the template arguments: join, input and result type, whether it is final, and the shape."""
        whole = config["split"] == 1
        stored = ctype(workload.out if whole else "f32")
        types = (JOIN[workload.reduce], ctype(workload.dtype), stored, str(whole).lower())
        return ", ".join((*types, *(str(config[name]) for name in self.shape)))


def fit(workload: Reduction, threads: Any, elements: Any, others: Any, device: Device) -> Any:
    """Return whether `elements` loaded elements and `others` f32 fit in a thread's registers.

    Args:
        workload: The workload.
        threads: Threads of a block.
        elements: Loaded elements that a thread holds.
        others: Further f32 values that a thread holds.
        device: The device, for its registers.
    """
    words = ceil_div(elements * itemsize(workload.dtype), 4) + others
    return words + OTHER_REGISTERS <= np.minimum(255, device.registers_per_sm // threads)


def fma_of_element(workload: Reduction) -> float:
    """Return the multiply-adds of an element; one may compute a product and the next term of the sum."""
    least, counts = least_operations(workload)
    return max(least, counts.get("add", 0) + 1.0) if workload.is_sum else least


def sfu_of_element(workload: Reduction) -> float:
    """Return the special functions of an element."""
    return float(special(least_operations(workload)[1]))
