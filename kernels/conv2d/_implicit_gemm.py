"""Base class of implicit-GEMM convolutions in CUDA C++.

`cuda_implicit_gemm` and `cuda_implicit_gemm_mma` derive from it. The convolution is a product of matrices
whose left operand is gathered from images on its way to shared memory (conv.cuh). A variant adds its space,
its kernel, and the costs of its inner loop.
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Iterable
from typing import Any, ClassVar

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.kernels.common import prologue
from tunebench.kernels.common.cuda import helpers
from tunebench.kernels.common.cuda_expression import filled
from tunebench.kernels.conv2d import _conv, _conv_emulation
from tunebench.kernels.conv2d._conv import product
from tunebench.space import Config, Table
from tunebench.variant import CudaVariant, Launch, Tiling, ceil_div
from tunebench.workload import Tensor
from tunebench.workloads.operators.conv2d import Conv2d

__all__ = ["ImplicitGemm", "Tile", "steps_per_part"]

Tile = tuple[int, ...]


def steps_per_part(workload: Conv2d, table: Table) -> Any:
    """Return the elements of K of the shortest part, in whole steps, of a class with most taps."""
    whole, bk = product(workload), table["bk"].astype(np.float64)
    return np.floor(whole.steps(whole.taps, bk, table["walk"]) / table["split"]) * bk


class ImplicitGemm(CudaVariant[Conv2d]):
    """An implicit-GEMM convolution in CUDA C++.

    Attributes:
        entry: Name of the kernel.
        headers: Header files (.cuh) that the kernel needs, in order.
        prologue_header: Header file that applies a prologue.
        text: Source of the kernel, with words between @ where a prologue adds text.
        without_prologue: Text for these words without a prologue.
        with_prologue: Text for these words with a prologue.
        extents: Parameters that are template arguments, in order.
        usual: Tiles that an expert would try, largest first.
        least_step: Shortest step along K.
        summing_cost: Cost of the second launch of a split K, and of summing one element, in multiply-adds.
    """

    operator = Conv2d
    entry: ClassVar[str]
    headers: ClassVar[tuple[str, ...]]
    prologue_header: ClassVar[str]
    text: ClassVar[str]
    without_prologue: ClassVar[dict[str, str]]
    with_prologue: ClassVar[dict[str, str]]
    extents: ClassVar[tuple[str, ...]]
    usual: ClassVar[tuple[Tile, ...]]
    least_step: ClassVar[int]
    summing_cost: ClassVar[tuple[float, int]]

    @abc.abstractmethod
    def usual_configs(self, workload: Conv2d, tile: Tile, split: int) -> Iterable[Config]:
        """Yield the usual configurations of a tile, best first."""

    @abc.abstractmethod
    def warps_and_overhead(self, tile: Tile) -> tuple[int, float]:
        """Return the warps of a block, and the time of its reads relative to that of its multiply-adds."""

    @abc.abstractmethod
    def access_widths(self, workload: Conv2d, config: Config) -> tuple[int, int, int]:
        """Return the elements per access to A, B and C."""

    @abc.abstractmethod
    def block_threads(self, config: Config) -> int:
        """Return the threads of a block."""

    @abc.abstractmethod
    def smem_bytes(self, workload: Conv2d, config: Any) -> Any:
        """Return the shared memory of a block in bytes, for a configuration or a table of them."""

    @abc.abstractmethod
    def pipeline_steps(self, config: Config) -> int:
        """Return the steps along K that take every path of the main loop once."""

    def limits(self, workload: Conv2d, device: Device) -> str | None:
        """Return why offsets or the grid exceed 64 bits, or None."""
        return _conv.limits(workload)

    def default(self, workload: Conv2d, device: Device) -> Config:
        """Return the usual tile and number of parts of K with the lowest estimated time."""
        choices = itertools.product(self.usual, _conv.SPLITS)
        ordered = sorted(choices, key=lambda choice: self._estimate(workload, device, *choice))
        configs = (config for tile, split in ordered for config in self.usual_configs(workload, tile, split))
        return self.space.first_valid(configs, workload=workload, device=device)

    def _estimate(self, workload: Conv2d, device: Device, tile: Tile, split: int) -> float:
        """Return the estimated time of a tile, in multiply-adds of one SM, to order tiles by."""
        bm, bn, *_ = tile
        whole, (warps, overhead) = product(workload), self.warps_and_overhead(tile)
        blocks = whole.tiles(bm, bn) * split
        work = whole.work(bm, bn, self.least_step, "flat") / blocks
        per_sm = ceil_div(blocks, device.sm_count)
        # 8 warps hide latency.
        busy = min(1.0, per_sm * warps / 8) / (1.0 + overhead)
        launch, cost_per_output = self.summing_cost
        summing = (
            launch + cost_per_output * split * workload.outputs()[0].size / device.sm_count
            if split > 1
            else 0.0
        )
        return float(per_sm * work / busy + summing)

    def blocks(self, workload: Conv2d, table: Table) -> tuple[Any, Any]:
        """Return the number of blocks, counted by their work, and of blocks that do the work of a full tile.

        Blocks of residue classes with fewer taps count as a fraction.
        """
        bm, bn, bk, split = (table[name].astype(np.float64) for name in ("bm", "bn", "bk", "split"))
        whole, full = product(workload), bm * bn * steps_per_part(workload, table)
        by_work = whole.work(bm, bn, bk, table["walk"]) / np.maximum(1.0, full)
        full_blocks = whole.tiles(bm, bn, most_taps=True) * split
        return np.minimum(whole.tiles(bm, bn) * split, by_work), full_blocks

    def tiles(self, workload: Conv2d, config: Config) -> tuple[Tiling, ...]:
        """Return the tiling of the product that the convolution is."""
        return _conv.tiles(workload, config)

    def source(self, workload: Conv2d, config: Config) -> str:
        """Return the kernels as templates: the names of the entries hold all compile-time constants."""
        headers, activation = helpers(*self.headers), _conv.injected(workload)
        if not workload.has_pre:
            return headers + filled(self.text, **self.without_prologue) + activation
        preamble = prologue.preamble(workload, self.prologue_header)
        return headers + activation + preamble + filled(self.text, **self.with_prologue)

    def scratch(self, workload: Conv2d, config: Config) -> tuple[Tensor, ...]:
        """Return the partial sums, if K is split."""
        return _conv.scratch(workload, config["split"])

    def launches(self, workload: Conv2d, config: Config) -> tuple[Launch, ...]:
        """Return the launch of the product, and that of the sum of its parts if K is split."""

        def entry(index: str) -> str:
            arguments = (
                *_conv.choices(workload, config, index),
                *(config[name] for name in self.extents),
                *self.access_widths(workload, config),
                *(config["stages"], _conv.epilogue(workload, config["split"]), config["min_blocks"]),
            )
            return f"{self.entry}<{', '.join(map(str, arguments))}>"

        smem = int(self.smem_bytes(workload, config))
        return _conv.launches(workload, config, entry, self.block_threads(config), smem)

    def emulation_workload(self, workload: Conv2d, config: Config) -> Conv2d:
        """Return a workload of few tiles with the same edges."""
        # One step per part of K, up to 16 parts.
        steps = max(self.pipeline_steps(config), min(config["split"], 16))
        tile = _conv_emulation.Tile(
            m=config["bm"], n=config["bn"], k=config["bk"], steps=steps, walk=config["walk"]
        )
        return _conv_emulation.emulation_workload(workload, tile)
