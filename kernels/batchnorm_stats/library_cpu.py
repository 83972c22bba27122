"""batchnorm_stats by libraries of the processor."""

from __future__ import annotations

import dataclasses
import functools

from tunebench.kernels.common.library_cpu import (
    TORCH,
    LibraryCpu,
    LibraryProgram,
    bound_baseline,
    is_single,
    torch_baseline,
)
from tunebench.workloads.operators.batchnorm_stats import BatchNormStats


def _is_forward(workload: BatchNormStats) -> bool:
    return is_single(workload) and not workload.is_backward


def _is_backward(workload: BatchNormStats) -> bool:
    return is_single(workload) and workload.is_backward


_var_mean = functools.partial(torch_baseline, name="torch-plain")
_bound_var_mean = functools.partial(bound_baseline, name="torch-plain")


class LibraryBatchNormStats(LibraryCpu[BatchNormStats]):
    """Statistics and gradients by torch; its batch normalisation is less accurate than required."""

    operator = BatchNormStats
    programs = {
        "torch": dataclasses.replace(TORCH, supports=_is_backward),
        "torch_var_mean": LibraryProgram(
            "torch", _var_mean, "torch.var_mean", _is_forward, bind=_bound_var_mean
        ),
    }


VARIANT = LibraryBatchNormStats()
