"""gemm by cuBLASLt: the algorithms of its list, called by `nvmath.linalg.advanced.Matmul` of nvmath-python.

cuBLASLt adds a bias to each row of a column-major result. The variant computes the transposed product,
c^T = op(b)^T op(a)^T, whose column-major form is c in row-major memory: `Matmul` writes it there, in place.
Bias, relu and the approximation of gelu by tanh are epilogues of the call. A residual is copied to c before
the call, which adds it (beta = 1).

The list depends on the GPU, the version of cuBLASLt, the alignment of the operands, and the limits on its
length (`RANKS`) and on temporary memory (`WORKSPACE_BYTES`), all of which are fixed here or part of a record.
Products of 8-bit types are left to `library_gpu`. Not run on a GPU.

Source: cuBLAS 13 documentation, cublasLtMatmulAlgoGetHeuristic; nvmath-python 1.0.0, matmulmod.py.
"""

from __future__ import annotations

import functools
import logging
import weakref
from typing import Any

from tunebench.activation import name_of
from tunebench.dtype import storage
from tunebench.errors import InputError
from tunebench.kernels.common.library_gpu import LibraryPlan, LibraryPlans
from tunebench.kernels.gemm._cpp_call import cublaslt_call
from tunebench.kernels.gemm._torch_product import factors
from tunebench.libraries import Tensors
from tunebench.space import Config
from tunebench.variant import CppCall
from tunebench.workloads.operators.gemm import Gemm

__all__ = ["EPILOGUES", "RANKS", "WORKSPACE_BYTES"]

RANKS = 16
WORKSPACE_BYTES = 32 * 2**20
"""Temporary memory that NVIDIA recommends on Hopper."""

EPILOGUES = {
    ("none", False): None,
    ("none", True): "BIAS",
    ("relu", False): "RELU",
    ("relu", True): "RELU_BIAS",
    ("gelu_tanh", False): "GELU",
    ("gelu_tanh", True): "GELU_BIAS",
}
"""Epilogue of cuBLASLt by activation and whether there is a bias."""


class _Product:
    """A planned product."""

    def __init__(self, workload: Gemm, rank: int, tensors: Tensors) -> None:
        from nvmath.linalg.advanced import Matmul, MatmulEpilog

        self._workload = workload
        a, b, c = _operands(workload, tensors)
        beta = 1.0 if workload.has_residual else 0.0
        self._matmul = Matmul(a, b, c, beta=beta, options=_options(workload))
        weakref.finalize(self, self._matmul.free).atexit = False
        epilogue = EPILOGUES[name_of(workload.activation), workload.has_bias]
        algorithms = self._matmul.plan(
            preferences={"limit": RANKS},
            epilog=epilogue and MatmulEpilog[epilogue],
            epilog_inputs=self._epilogue_inputs(tensors),
        )
        if rank >= len(algorithms):
            raise InputError(f"cuBLASLt lists {len(algorithms)} algorithms, none of rank {rank}: {workload}")
        self._algorithm = algorithms[rank]

    def __call__(self, tensors: Tensors) -> None:
        """Enqueue the product; `Matmul` keeps neither operands nor temporary memory."""
        a, b, c = _operands(self._workload, tensors)
        if self._workload.has_residual:
            tensors["c"].copy_(tensors["residual"])
        inputs = self._epilogue_inputs(tensors)
        self._matmul.reset_operands_unchecked(a=a, b=b, c=c, epilog_inputs=inputs)
        self._matmul.execute(algorithm=self._algorithm, release_workspace=True)
        self._matmul.release_operands()

    def _epilogue_inputs(self, tensors: Tensors) -> dict[str, Any] | None:
        return {"bias": tensors["bias"]} if self._workload.has_bias else None


def _operands(workload: Gemm, tensors: Tensors) -> tuple[Any, Any, Any]:
    """Return views of op(b)^T, op(a)^T and c^T."""
    a, b = factors(workload, tensors)
    c = tensors["c"] if workload.batch > 1 else tensors["c"][0]
    return b.transpose(-2, -1), a.transpose(-2, -1), c.transpose(-2, -1)


def _options(workload: Gemm) -> dict[str, Any]:
    """Return the options of `Matmul`."""
    options = {"inplace": True, "memory_limit": WORKSPACE_BYTES, "logger": _quiet_logger()}
    if workload.dtype == "tf32":
        from nvmath.linalg.advanced import MatmulComputeType

        options["compute_type"] = MatmulComputeType.COMPUTE_32F_FAST_TF32
    return options


@functools.cache
def _quiet_logger() -> logging.Logger:
    """Return a logger without the messages of each call, whose texts take time."""
    logger = logging.getLogger("tunebench.nvmath")
    logger.setLevel(logging.WARNING)
    return logger


class LibraryCublaslt(LibraryPlans[Gemm]):
    """Algorithms of cuBLASLt in the order of its list."""

    name, operator = "library_cublaslt", Gemm
    binding = "nvmath-python"
    libraries = ("nvidia-cublas", "nvidia-cublas-cu12")
    ranks = RANKS

    def supports(self, workload: Gemm) -> bool:
        """Return whether one call computes the workload: a residual cannot follow an activation."""
        stored = storage(workload.dtype)
        one_type = stored in ("f32", "f16", "bf16") and workload.out == stored and not workload.has_pre
        activated = name_of(workload.activation)
        ordered = activated == "none" or not workload.has_residual
        return one_type and ordered and (activated, workload.has_bias) in EPILOGUES

    def plan(self, workload: Gemm, rank: int, tensors: Tensors) -> LibraryPlan:
        """Return an algorithm of the list, planned."""
        return _Product(workload, rank, tensors)

    def cpp(self, workload: Gemm, config: Config) -> CppCall:
        """Return the same calls in C++."""
        epilogue = EPILOGUES[name_of(workload.activation), workload.has_bias]
        limits = {"ranks": RANKS, "workspace_bytes": WORKSPACE_BYTES}
        return cublaslt_call(workload, config["rank"], epilogue=epilogue, **limits)

    def calls(self, config: Config) -> str:
        """Return the function that is called."""
        return f"nvmath.linalg.advanced.Matmul with algorithm {config['rank']} of cuBLASLt's list"


VARIANT = LibraryCublaslt()
