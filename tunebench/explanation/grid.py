"""Occupancy of the SMs by the blocks of a launch, and wave quantization (tail effect)."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from tunebench._lazy import np
from tunebench.binary.occupancy import Occupancy, occupancy
from tunebench.device import Device
from tunebench.space import Config
from tunebench.variant import Costs, GpuVariant, Launch, Variant
from tunebench.workload import Workload

__all__ = ["BlockResources", "Waves", "blocks_and_waves"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Waves:
    """Waves in which the blocks of a launch run on the device.

    Attributes:
        blocks: Number of blocks; for persistent blocks, the number of tiles.
        sm_count: SMs of the device.
        blocks_per_sm: Most resident blocks per SM.
    """

    blocks: int
    sm_count: int
    blocks_per_sm: int

    @property
    def count(self) -> float:
        """Number of waves, with a fraction for the last one."""
        return self.blocks / (self.sm_count * self.blocks_per_sm)

    @property
    def last_blocks(self) -> int:
        """Blocks of the last wave."""
        wave = self.sm_count * self.blocks_per_sm
        return self.blocks - (math.ceil(self.blocks / wave) - 1) * wave

    @property
    def idle_sms(self) -> int:
        """SMs without a block of the last wave."""
        return max(0, self.sm_count - self.last_blocks)

    @property
    def used(self) -> float:
        """Share of the SM time in use; the rest is lost to wave quantization.

        All blocks are assumed to take the same time. The busiest SM has ``ceil(blocks / SMs)`` of them,
        whatever the number of resident blocks.
        """
        return self.blocks / (self.sm_count * math.ceil(self.blocks / self.sm_count))


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockResources:
    """Resources of a block, as known before compilation.

    Attributes:
        threads: Threads per block.
        registers: Registers per thread, at least.
        smem_bytes: Shared memory per block, at least.
        occupancy: Most resident blocks and warps per SM; None if the limits of the device are unknown.
    """

    threads: int
    registers: int
    smem_bytes: int
    occupancy: Occupancy | None

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-serialisable dictionary, including the resource that limits occupancy."""
        data = dataclasses.asdict(self)
        if self.occupancy is not None:
            data["occupancy"]["limited_by"] = list(self.occupancy.limited_by)
        return data


def blocks_and_waves(
    variant: Variant[Any], workload: Workload, config: Config, costs: Costs, device: Device
) -> tuple[BlockResources, Waves] | tuple[None, None]:
    """Return the resources of a block and the waves of all blocks; None twice without thread blocks.

    Both describe the main launch: the first one that matches the costs.

    Args:
        variant: The variant.
        workload: The workload.
        config: The configuration.
        costs: Costs of this configuration.
        device: The device.
    """
    if not isinstance(variant, GpuVariant):
        return None, None
    launch = _main(variant.launches(workload, config), costs)
    block = _block(launch, costs, device)
    resident = max(1, block.occupancy.blocks) if block.occupancy is not None else 1
    if launch.blocks_per_sm:
        resident = min(resident, launch.blocks_per_sm)
    waves = Waves(blocks=math.prod(launch.grid), sm_count=device.sm_count, blocks_per_sm=resident)
    return block, waves


def _main(launches: tuple[Launch, ...], costs: Costs) -> Launch:
    """Return the first launch with the threads and the shared memory of `costs`, or else the first of all."""
    threads, smem_bytes = float(np.max(costs.threads)), float(np.max(costs.smem_bytes))
    alike = (
        launch
        for launch in launches
        if math.prod(launch.block) == threads and launch.smem_bytes >= smem_bytes
    )
    return next(alike, launches[0])


def _block(launch: Launch, costs: Costs, device: Device) -> BlockResources:
    threads = math.prod(launch.block)
    registers = math.ceil(float(np.max(costs.registers)))
    smem_bytes = max(launch.smem_bytes, math.ceil(float(np.max(costs.smem_bytes))))
    used = {"threads": threads, "registers": registers, "smem_bytes": smem_bytes}
    limits_known = device.threads_per_sm and device.blocks_per_sm and device.smem_per_sm_bytes
    return BlockResources(**used, occupancy=occupancy(device, **used) if limits_known else None)
