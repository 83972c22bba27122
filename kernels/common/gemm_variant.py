"""Base class of CUDA C++ variants that compute matrix products by tiles of bm x bn.

`simt_gemm`, `mma_gemm` and `wgmma_gemm` derive one base class each from `TiledGemm`: for the FP32 units, for
tensor cores by mma.sync, and for Hopper's tensor cores by wgmma. A variant of gemm, gated_gemm or
grouped_gemm derives from one of these three, names its `operation`, and adds its space and its kernel.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Protocol, TypeVar

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.kernels.common import gemm
from tunebench.kernels.common.cuda import helpers
from tunebench.kernels.common.product_execution import line_bytes, operand_bytes, tile_extent
from tunebench.space import Config, Table
from tunebench.variant import Argument, CudaVariant, Launch, Tiling
from tunebench.workloads.operators.gated_gemm import GatedGemm
from tunebench.workloads.operators.gemm import Gemm
from tunebench.workloads.operators.grouped_gemm import GroupedGemm
from tunebench.workloads.operators.scaled_gemm import ScaledGemm

__all__ = ["GemmOperation", "TiledGemm", "Traffic", "W", "traffic_of"]

W = TypeVar("W", bound=Gemm | GatedGemm | GroupedGemm | ScaledGemm)

Constants = dict[str, str | bool | int]


class GemmOperation(Protocol):
    """Shapes, arguments and share of work of one operator's matrix products.

    Three modules implement it: `tunebench.kernels.common.gemm`, `gated_gemm._gated`,
    `grouped_gemm._grouped`, `scaled_gemm._scaled`.

    Attributes:
        MATRICES: Number of matrices b that the same rows of a are multiplied by.
    """

    MATRICES: int

    def widths(self, workload: Any) -> tuple[int, int, int]:
        """Return the widest aligned access to a, b and c, in elements."""

    def fits(self, bm: Any, bn: Any, workload: Any) -> Any:
        """Return whether tiles of bm x bn fit in one grid and are not much larger than c."""

    def too_many_blocks(self, workload: Any, tiles: Iterable[tuple[int, int]]) -> str | None:
        """Return why none of `tiles` (bm, bn) covers c in one grid, or None if one does."""

    def usual_blocks(self, workload: Any, bm: Any, bn: Any) -> Any:
        """Return the number of tiles of bm x bn in a typical run."""

    def most_blocks(self, workload: Any, bm: Any, bn: Any) -> Any:
        """Return the most tiles of bm x bn in any run."""

    def shares(self, workload: Any, table: Table, device: Device) -> gemm.Share:
        """Return the share of the product that the busiest blocks compute, for each configuration."""

    def workload_constants(self, workload: Any) -> Constants:
        """Return the compile-time constants that depend on the workload only."""

    def injected(self, workload: Any) -> str:
        """Return the source of an activation that epilogue.cuh lacks, or ""."""

    def grid(self, workload: Any, config: Config) -> tuple[int, int, int]:
        """Return the number of blocks in x, y and z."""

    def arguments(self, workload: Any, group_m: int) -> tuple[Argument, ...]:
        """Return the kernel's arguments: tensors, then sizes."""

    def shrink(self, workload: Any, config: Mapping[str, Any], stages: int, affordable_fma: int = ...) -> Any:
        """Return a small workload with the same edges, alignment and pipeline."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Expected traffic of a product's blocks, as columns.

    Attributes:
        rows: Mean rows of a tile within the matrices.
        columns: Mean columns of a tile within the matrices.
        tiles: Tiles of a typical run.
        operand_bytes: Bytes of all operands that memory delivers.
        blocks: Blocks of a typical run, over those of the run with the fewest.
        line_a, line_b: Bytes per element of k that a tile of a, or of b, takes in whole sectors.
    """

    rows: Any
    columns: Any
    tiles: Any
    operand_bytes: Any
    blocks: Any
    line_a: Any
    line_b: Any


def traffic_of(
    operation: GemmOperation,
    workload: Any,
    table: Table,
    device: Device,
    *,
    wave: Any,
    cluster_m: Any = 1,
) -> Traffic:
    """Return the expected traffic of tiles of bm x bn.

    Args:
        operation: The operator's products.
        workload: Workload of that operator.
        table: Configurations with bm, bn, bk, and group_m if the space has it.
        device: Device that executes it.
        wave: Tiles that are computed at the same time.
        cluster_m: Tiles along m that a row of tiles of `group_m` has.
    """
    bm, bn, bk = (table[name].astype(np.float64) for name in ("bm", "bn", "bk"))
    size, (m, n, k) = itemsize(workload.dtype), (workload.m, workload.n, workload.k)
    products = getattr(workload, "batch", 1) * getattr(workload, "most_filled", 1)
    rows_of_product = m / getattr(workload, "most_filled", 1)
    tiles, tiles_n = operation.usual_blocks(workload, bm, bn), np.ceil(n / bn)
    tiles_m = tiles / (products * tiles_n)
    group_m = table["group_m"].astype(np.float64) if "group_m" in table.space.names else 1.0
    read_bytes = operand_bytes(
        rows_of_product * k * size,
        operation.MATRICES * n * k * size,
        tiles_m,
        tiles_n,
        height=group_m * cluster_m,
        wave=wave,
        device=device,
    )
    rows, columns = rows_of_product / tiles_m, tile_extent(n, bn)
    along_a, along_b = workload.trans[0] == "n", workload.trans[1] == "t"
    pitch_a, pitch_b = (k if along_a else m) * size, (k if along_b else n) * size
    return Traffic(
        rows=rows,
        columns=columns,
        tiles=tiles,
        operand_bytes=products * read_bytes,
        blocks=tiles / (getattr(workload, "batch", 1) * np.ceil(m / bm) * tiles_n),
        line_a=line_bytes(rows, bm, bk, size, pitch_a, along_a),
        line_b=line_bytes(columns, bn, bk, size, pitch_b, along_b),
    )


class TiledGemm(CudaVariant[W]):
    """A CUDA C++ variant whose blocks compute tiles of bm x bn results in steps of bk along k.

    Attributes:
        operation: Shapes and arguments of the operator's products.
        entry: Name of the kernel, a template over the struct `Choice` of compile-time constants.
        headers: Header files (.cuh) that the kernel needs, in order.
        text: CUDA C++ source of the kernel.
    """

    operation: GemmOperation
    entry: ClassVar[str]
    headers: ClassVar[tuple[str, ...]]
    text: ClassVar[str]

    @abc.abstractmethod
    def choices(self, workload: W, config: Config) -> Constants:
        """Return the compile-time constants that depend on the configuration."""

    @abc.abstractmethod
    def block_threads(self, config: Config) -> int:
        """Return the threads of a block."""

    @abc.abstractmethod
    def smem_bytes(self, workload: W, config: Any) -> Any:
        """Return the shared memory of a block, in bytes, for a configuration or a table of them."""

    def preamble(self, workload: W) -> str:
        """Return source that the headers do not have: an injected activation; a prologue (override)."""
        return self.operation.injected(workload)

    def kernel_text(self, workload: W, config: Config) -> str:
        """Return the source of the kernel (override if it depends on workload or configuration)."""
        return self.text

    def source(self, workload: W, config: Config) -> str:
        """Return the translation unit for this workload's types and this configuration, for all sizes."""
        constants = self.operation.workload_constants(workload) | self.choices(workload, config)
        choice = gemm.constants("Choice", **constants)
        return helpers(*self.headers) + self.preamble(workload) + choice + self.kernel_text(workload, config)

    def tiles(self, workload: W, config: Config) -> tuple[Tiling, ...]:
        """Return the tiling of m, n and k."""
        return gemm.tiles(workload, config)

    def launches(self, workload: W, config: Config) -> tuple[Launch, ...]:
        """Return the launch of the kernel."""
        return (
            Launch(
                entry=f"{self.entry}<Choice>",
                grid=self.operation.grid(workload, config),
                block=(self.block_threads(config), 1, 1),
                arguments=self.operation.arguments(workload, config["group_m"]),
                smem_bytes=int(self.smem_bytes(workload, config)),
            ),
        )

    def emulation_workload(self, workload: W, config: Config) -> W:
        """Return a workload of few tiles with the same edges."""
        small: W = self.operation.shrink(workload, config, config["stages"])
        return small
