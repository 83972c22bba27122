"""Variants that call a library of the processor: torch (oneDNN, MKL) or NumPy (its BLAS)."""

from __future__ import annotations

from typing import Any, TypeVar

from tunebench import libraries
from tunebench.errors import InputError
from tunebench.kernels.common.library import (
    TORCH,
    Compute,
    LibraryProgram,
    LibraryPrograms,
    Write,
    is_single,
    torch_baseline,
)
from tunebench.libraries import Tensors
from tunebench.variant import LibraryCpuVariant
from tunebench.workload import Workload

__all__ = [
    "NUMPY",
    "TORCH",
    "Compute",
    "LibraryCpu",
    "LibraryProgram",
    "Write",
    "is_single",
    "torch_baseline",
]

W = TypeVar("W", bound=Workload)


class LibraryCpu(LibraryPrograms[W], LibraryCpuVariant[W]):
    """Programs of libraries of the processor for one operator."""

    name = "library_cpu"


def _numpy(workload: Workload) -> Compute:
    def compute(inputs: Tensors) -> Any:
        call = libraries.numpy_call(workload, inputs)
        if call is None:
            raise InputError(f"numpy does not compute {workload}")
        return call()

    return compute


def _suits_numpy(workload: Any) -> bool:
    """Return whether NumPy computes a workload; its gelu is less accurate than required."""
    inexact = getattr(workload, "activation", "") == "gelu" or getattr(workload, "has_pre", False)
    return is_single(workload) and not inexact


NUMPY = LibraryProgram("numpy", _numpy, "functions of numpy, one after the other", _suits_numpy)
"""The program that is also the baseline, in f32."""
