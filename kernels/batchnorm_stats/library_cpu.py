"""batchnorm_stats by libraries of the processor."""

from __future__ import annotations

from tunebench.kernels.common.library_cpu import TORCH, LibraryCpu
from tunebench.workloads.operators.batchnorm_stats import BatchNormStats


class LibraryBatchNormStats(LibraryCpu[BatchNormStats]):
    """batchnorm_stats by torch."""

    operator = BatchNormStats
    programs = {"torch": TORCH}


VARIANT = LibraryBatchNormStats()
