"""batchnorm_stats by libraries of the GPU."""

from __future__ import annotations

import functools

from tunebench.kernels.common.library import LibraryProgram, torch_baseline
from tunebench.kernels.common.library_gpu import TORCH, LibraryGpu
from tunebench.workloads.operators.batchnorm_stats import BatchNormStats

_synchronised = functools.partial(torch_baseline, name="torch-sync")


def _is_forward(workload: BatchNormStats) -> bool:
    return not workload.is_backward


class LibraryBatchNormStats(LibraryGpu[BatchNormStats]):
    """Statistics and gradients by torch."""

    operator = BatchNormStats
    programs = {
        "torch_sync": LibraryProgram(
            "torch", _synchronised, "torch's functions of synchronised batch normalisation", _is_forward
        ),
        "torch": TORCH,
    }


VARIANT = LibraryBatchNormStats()
