"""Base class of e4m3 products by wgmma whose sums are promoted: those of a few steps are added in f32.

The cuda_wgmma_promoted variants of gemm and grouped_gemm derive from it. Tensor cores sum `promote` steps of
k with 13 fraction bits; the consumer adds these sums to totals in f32, in registers, and the next steps start
from zero. The device code is in promoted_wgmma.cuh.

Source: DeepSeek-AI, "DeepSeek-V3 technical report", 2024, section 3.3.2; DeepSeek, DeepGEMM.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.kernels.common import wgmma_tile
from tunebench.kernels.common.gemm_variant import Constants, GemmOperation, W
from tunebench.kernels.common.wgmma_gemm import Tiles, WgmmaGemm
from tunebench.space import Config, Constraint, Parameter, Table
from tunebench.variant import Costs, Execution, ceil_div
from tunebench.workloads.common.accumulation import PROMOTED_TERMS

__all__ = ["PROMOTE", "USUAL", "PromotedWgmmaGemm", "constraints"]

PROMOTE = Parameter("promote", (1, 2), "steps of k that tensor cores sum before the sum is added in f32")

SETS_OF_SUMS = 2
"""Sums of tensor cores, and totals."""

USUAL = (
    # bm, bn, consumers, pingpong; largest first
    (128, 192, 2, 0),
    (128, 128, 2, 0),
    (256, 64, 2, 0),
    (128, 64, 2, 0),
    (64, 128, 1, 0),
    (64, 64, 1, 0),
    (64, 192, 2, 1),
    (64, 128, 2, 1),
)
"""Tiles whose two sets of sums fit in registers."""


def groups_are_short(bk: Any, promote: Any) -> Any:
    """Tensor cores may sum at most 256 products."""
    return bk * promote <= PROMOTED_TERMS


def groups_have_steps(bk: Any, promote: Any, workload: Any) -> Any:
    """A tile must have more steps than half a group."""
    return (promote == 1) | (bk * promote < 2 * workload.k)


def constraints(operation: GemmOperation) -> tuple[Constraint, ...]:
    """Return the constraints of promotion, in addition to those of `wgmma_gemm`."""
    both = operation.MATRICES * SETS_OF_SUMS
    return (wgmma_tile.sums_stay_in_registers(both), groups_are_short, groups_have_steps)


class PromotedWgmmaGemm(WgmmaGemm[W]):
    """A variant by wgmma whose space has the parameter `promote`."""

    usual: ClassVar[Tiles] = USUAL
    dtypes: ClassVar[tuple[str, ...]] = ("e4m3",)
    accumulates = "f32"
    multiplied = "multiply_promoted<C>(memory.buffers"

    def costs(self, workload: W, table: Table, device: Device) -> Costs:
        """Count also the additions of promotion: one for each result and group of steps.

        The next products of a consumer overwrite what it adds, so that they wait for its additions.
        """
        costs = super().costs(workload, table, device)
        adds = self._groups(workload, table) * (table["bm"] * table["bn"]).astype(np.float64)
        turns = np.where(table["pingpong"] == 1, table["consumers"], 1)
        added = self._added_per_thread(workload, table)
        execution = costs.execution or Execution()
        # Consumers of one tile multiply while another one adds.
        adding = added / np.where(table["pingpong"] == 1, 1, table["consumers"])
        return dataclasses.replace(
            costs,
            fma=costs.fma + adds,
            instructions=costs.instructions + adds / 32,
            chain_clocks=costs.chain_clocks + added / turns,
            execution=dataclasses.replace(
                execution,
                instructions=execution.instructions + adds / 32,
                serial_clocks=execution.serial_clocks + adding,
            ),
        )

    def _groups(self, workload: W, config: Any) -> Any:
        """Return the groups of steps per tile, or per part of one."""
        parts = config["split_k"] if "split_k" in self.space.names else 1
        steps = ceil_div(ceil_div(self.product(workload).k, config["bk"]), parts)
        return ceil_div(steps, config["promote"])

    def _added_per_thread(self, workload: W, config: Any) -> Any:
        """Return the additions of a consumer's thread per tile: it issues at most one in a clock."""
        tile = (config["bm"], config["bn"], config["consumers"], config["pingpong"])
        return self._groups(workload, config) * wgmma_tile.sums(*tile)

    def _estimate_clocks(self, workload: W, config: Config, device: Device) -> float:
        """Return the estimated time in clocks. Other consumers multiply while one adds."""
        tiles = self.operation.usual_blocks(workload, config["bm"], config["bn"]) * config.get("split_k", 1)
        exposed = float(self._added_per_thread(workload, config) / config["consumers"])
        rounds = int(ceil_div(tiles, device.sm_count))
        return super()._estimate_clocks(workload, config, device) + rounds * exposed

    def _usual(self, workload: W, device: Device) -> Iterator[Config]:
        """Yield the usual tiles, promoted every step."""
        for config in super()._usual(workload, device):
            yield Config({**config, "promote": 1})

    def choices(self, workload: W, config: Config) -> Constants:
        """Return the compile-time constants that depend on the configuration."""
        return {**super().choices(workload, config), "PROMOTE": config["promote"]}

    def emulation_workload(self, workload: W, config: Config) -> W:
        """Return a workload of few tiles with the same edges, and of several groups of steps."""
        steps = max(config["stages"], 2 * config["promote"])
        small: W = self.operation.shrink(workload, config, steps, affordable_fma=wgmma_tile.AFFORDABLE_FMA)
        return small
