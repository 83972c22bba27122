"""Base class of gemm in CUDA C++ that may divide k among blocks, and may compute a prologue of a."""

from __future__ import annotations

from typing import ClassVar

from tunebench.kernels.common import gemm, prologue
from tunebench.kernels.common.gemm_variant import TiledGemm
from tunebench.space import Config
from tunebench.variant import Launch
from tunebench.workload import Tensor
from tunebench.workloads.operators.gemm import Gemm

__all__ = ["DividedGemm"]


class DividedGemm(TiledGemm[Gemm]):
    """A variant whose parameters divide k: a second kernel sums the parts.

    Attributes:
        prologue_header: Header file (.cuh) that a prologue needs.
        tile: C++ class that copies tiles of a.
        prologue_tile: C++ class that copies tiles of a and applies the prologue.
    """

    operator = Gemm
    operation = gemm
    prologue_header: ClassVar[str]
    tile: ClassVar[str]
    prologue_tile: ClassVar[str]

    def preamble(self, workload: Gemm) -> str:
        """Return the source of the activation, if it is an expression, and of the prologue, if any."""
        return gemm.injected(workload) + prologue.preamble(workload, self.prologue_header)

    def kernel_text(self, workload: Gemm, config: Config) -> str:
        """Return the source of the kernel, with a prologue if the workload has one."""
        return prologue.applied(self.text, workload, tile=self.tile, prologue_tile=self.prologue_tile)

    def launches(self, workload: Gemm, config: Config) -> tuple[Launch, ...]:
        """Return the launch of the product, and that of the sum of its parts if k is divided."""
        return gemm.divided_launches(workload, config, *super().launches(workload, config))

    def scratch(self, workload: Gemm, config: Config) -> tuple[Tensor, ...]:
        """Return the partial sums, if k is divided."""
        return gemm.scratch(workload, config)
