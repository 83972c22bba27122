"""Variants that call a library of the processor: torch (oneDNN, MKL) or NumPy (its BLAS)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

from tunebench import libraries
from tunebench.errors import InputError
from tunebench.kernels.common.library import (
    TORCH,
    Compute,
    LibraryProgram,
    LibraryPrograms,
    Write,
    bound_baseline,
    copied,
    is_single,
    torch_baseline,
)
from tunebench.libraries import Tensors
from tunebench.variant import LibraryCpuVariant
from tunebench.workload import Workload

__all__ = [
    "NUMPY",
    "NUMPY_PRODUCT",
    "TORCH",
    "Compute",
    "LibraryCpu",
    "LibraryProgram",
    "Write",
    "bound_baseline",
    "copied",
    "is_single",
    "torch_baseline",
]

W = TypeVar("W", bound=Workload)


class LibraryCpu(LibraryPrograms[W], LibraryCpuVariant[W]):
    """Programs of libraries of the processor for one operator."""

    name = "library_cpu"


def _numpy(workload: Workload) -> Compute:
    return lambda inputs: _numpy_call(workload, inputs)()


def _bound_numpy(workload: Workload, inputs: Tensors, *outputs: Any) -> Callable[[], object]:
    return copied(_numpy_call(workload, inputs), *outputs)


def _write_numpy_product(workload: Workload) -> Write:
    return lambda inputs, output: _numpy_call(workload, inputs, output)()


def _numpy_call(workload: Workload, inputs: Tensors, out: Any = None) -> libraries.LibraryCall:
    call = libraries.numpy_call(workload, inputs, out)
    if call is None:
        raise InputError(f"numpy does not compute {workload}")
    return call


def _suits_numpy(workload: Any) -> bool:
    """Return whether NumPy computes a workload; its gelu is less accurate than required."""
    inexact = getattr(workload, "activation", "") == "gelu" or getattr(workload, "has_pre", False)
    return is_single(workload) and not inexact


NUMPY = LibraryProgram(
    "numpy", _numpy, "functions of numpy, one after the other", _suits_numpy, bind=_bound_numpy
)
"""The program that is also the baseline, in f32."""

NUMPY_PRODUCT = dataclasses.replace(NUMPY, write=_write_numpy_product, bind=_numpy_call)
"""The program of gemm and gated_gemm, whose BLAS writes into the caller's array."""
