"""Alignment of tensor rows to 16 bytes, for the widest memory accesses and for tensor cores.

Source: NVIDIA, "Matrix Multiplication Background User's Guide", "Tensor Core Requirements": multiples of 16
bytes, which are 8 elements of f16 and 16 elements of 8 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from tunebench.dtype import DType, itemsize
from tunebench.errors import InputError
from tunebench.workload import Tensor, Workload

__all__ = ["ACCESS_BYTES", "Alignment", "alignments"]

ACCESS_BYTES = 16
"""Widest memory access of a thread, in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """Alignment of the rows of a tensor.

    Attributes:
        tensor: Name of the tensor.
        dtype: Type of its elements.
        line: Number of contiguous elements in a row.
        aligned_bytes: Power of two that divides the address of every row, at most 16.
        dimension: Dimension of the workload to pad for longer rows; None if there is none.
    """

    tensor: str
    dtype: DType
    line: int
    aligned_bytes: int
    dimension: str | None

    @property
    def wanted(self) -> int:
        """Number of elements in 16 bytes. The row length should be a multiple of it."""
        return ACCESS_BYTES // itemsize(self.dtype)

    @property
    def full(self) -> bool:
        """Whether every row starts at a multiple of 16 bytes."""
        return self.aligned_bytes == ACCESS_BYTES


def alignments(workload: Workload) -> tuple[Alignment, ...]:
    """Return the alignment of each input and output with rows, given that its first element is aligned."""
    return tuple(
        Alignment(
            tensor=tensor.name,
            dtype=tensor.dtype,
            line=tensor.shape[-1],
            aligned_bytes=_aligned_bytes(tensor.shape[-1] * itemsize(tensor.dtype)),
            dimension=_dimension(workload, tensor),
        )
        for tensor in (*workload.inputs(), *workload.outputs())
        if len(tensor.shape) > 1
    )


def _aligned_bytes(line_bytes: int) -> int:
    """Return the largest power of two, up to 16, that divides the length of a row."""
    return min(line_bytes & -line_bytes, ACCESS_BYTES)


def _dimension(workload: Workload, tensor: Tensor) -> str | None:
    """Return the dimension that may be padded and that determines the length of a tensor's rows."""
    for name in workload.may_change().padding:
        try:
            doubled = workload.changed(**{name: 2 * getattr(workload, name)})
        except InputError:  # too large to be padded
            continue
        shapes = {t.name: t.shape for t in (*doubled.inputs(), *doubled.outputs())}
        if shapes[tensor.name][-1] != tensor.shape[-1]:
            return name
    return None
