"""Variants that call a library of a GPU by torch: cuBLAS, cuDNN, and torch's own kernels."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, TypeVar

from tunebench.kernels.common.library import Compute, LibraryProgram, LibraryPrograms, torch_baseline
from tunebench.space import Config
from tunebench.variant import LibraryGpuVariant, installed_version
from tunebench.workload import Workload

__all__ = ["TORCH", "LibraryGpu", "benchmarked"]

W = TypeVar("W", bound=Workload)

TORCH = LibraryProgram("torch", torch_baseline, "functions of torch, one after the other")
"""The program that is also the baseline. Verification refuses it where it rounds too often."""


class LibraryGpu(LibraryPrograms[W], LibraryGpuVariant[W]):
    """Programs of libraries of the GPU for one operator.

    Attributes:
        multiplies: Whether programs multiply matrices, for which torch has settings of precision.
    """

    name = "library_gpu"
    multiplies: ClassVar[bool] = False

    @classmethod
    def absence(cls, program: LibraryProgram) -> str | None:
        """Return why torch cannot run on a GPU of this machine, or None if it may."""
        version = installed_version(program.package)
        if version is not None and version.partition("+")[2].startswith("cpu"):
            return f"is installed without CUDA ({version})"
        return super().absence(program)

    def call(self, workload: W, config: Config, tensors: Mapping[str, Any]) -> Callable[[], object]:
        """Return the program of a configuration as a function without arguments."""
        return self._precise(workload, super().call(workload, config, tensors))

    def results(self, workload: W, config: Config) -> Compute:
        """Return the program of a configuration as a function from tensors of torch to new ones."""
        return self._precise(workload, super().results(workload, config))

    def is_traceable(self, workload: W, config: Config) -> bool:
        """Return whether compilers keep the functions of the program, which need no setting of torch."""
        return super().is_traceable(workload, config) and not self._depends_on_precision(workload)

    def _depends_on_precision(self, workload: W) -> bool:
        return self.multiplies and getattr(workload, "dtype", None) in ("f32", "tf32")

    def _precise(self, workload: W, call: Callable[..., Any]) -> Callable[..., Any]:
        if not self._depends_on_precision(workload):
            return call
        return _with_tf32(call, allowed=getattr(workload, "dtype", None) == "tf32")


def _with_tf32(call: Callable[..., Any], *, allowed: bool) -> Callable[..., Any]:
    """Return a function that runs with tf32 allowed or not, whatever the setting of the process is."""
    import torch

    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn

    @functools.wraps(call)
    def run(*arguments: Any) -> Any:
        if matmul.allow_tf32 is allowed and cudnn.allow_tf32 is allowed:
            return call(*arguments)
        before = torch.get_float32_matmul_precision()
        with _cudnn_settings(allow_tf32=allowed):
            try:
                torch.set_float32_matmul_precision("high" if allowed else "highest")
                return call(*arguments)
            finally:
                torch.set_float32_matmul_precision(before)

    return run


def benchmarked(compute: Compute) -> Compute:
    """Return a program for which cuDNN times its algorithms at the first call of each size.

    Args:
        compute: The program.
    """

    def run(tensors: Mapping[str, Any]) -> Any:
        import torch

        if torch.backends.cudnn.benchmark:
            return compute(tensors)
        with _cudnn_settings(benchmark=True):
            return compute(tensors)

    return run


def _cudnn_settings(**changed: bool) -> AbstractContextManager[None]:
    """Change settings of cuDNN for a block, also after `torch.backends.disable_global_flags`."""
    import torch

    cudnn = torch.backends.cudnn
    present = {name: getattr(cudnn, name) for name in inspect.signature(cudnn.flags).parameters}
    flags: Callable[..., AbstractContextManager[None]] = cudnn.flags
    return flags(**present | changed)
