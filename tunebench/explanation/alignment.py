"""Whether lines of tensors begin where the widest accesses, and tensor cores, want them to.

Source: NVIDIA, "Matrix Multiplication Background User's Guide", "Tensor Core Requirements": multiples of 16
bytes, which are 8 elements of f16 and 16 of 8 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from tunebench.dtype import DType, itemsize
from tunebench.errors import InputError
from tunebench.workload import Tensor, Workload

__all__ = ["ACCESS_BYTES", "Alignment", "alignments"]

ACCESS_BYTES = 16
"""The widest access of a thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """How the lines of a tensor are aligned.

    Attributes:
        tensor: Its name.
        dtype: Its type.
        line: Elements of a line, which lie side by side.
        aligned_bytes: Every line begins at a multiple of so many bytes; 16 are all that is wanted.
        dimension: The dimension of the workload that may be padded to lengthen the lines, if there is one.
    """

    tensor: str
    dtype: DType
    line: int
    aligned_bytes: int
    dimension: str | None

    @property
    def wanted(self) -> int:
        """Elements of 16 bytes: a line should have a multiple."""
        return ACCESS_BYTES // itemsize(self.dtype)

    @property
    def full(self) -> bool:
        """Whether every line begins at a multiple of 16 bytes."""
        return self.aligned_bytes == ACCESS_BYTES


def alignments(workload: Workload) -> tuple[Alignment, ...]:
    """Return how each input and output that has lines is aligned; their first elements are."""
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
    """Return the largest power of two, up to 16, that divides the length of a line."""
    return min(line_bytes & -line_bytes, ACCESS_BYTES)


def _dimension(workload: Workload, tensor: Tensor) -> str | None:
    """Return the dimension that may be padded and that the length of a tensor's lines follows."""
    for name in workload.may_change().padding:
        try:
            doubled = workload.changed(**{name: 2 * getattr(workload, name)})
        except InputError:  # too large: nobody pads that
            continue
        shapes = {t.name: t.shape for t in (*doubled.inputs(), *doubled.outputs())}
        if shapes[tensor.name][-1] != tensor.shape[-1]:
            return name
    return None
