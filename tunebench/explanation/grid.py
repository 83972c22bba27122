"""How the blocks of a launch fill the SMs: occupancy, and the waves they come in."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from tunebench._lazy import np
from tunebench.binary.occupancy import Occupancy, occupancy
from tunebench.device import Device
from tunebench.space import Config
from tunebench.variant import Costs, CudaVariant, Launch, NumbaCudaVariant, Variant
from tunebench.workload import Workload

__all__ = ["BlockResources", "Waves", "blocks_and_waves"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Waves:
    """How the blocks of a launch come to run: as many at a time as the device holds.

    Attributes:
        blocks: Blocks launched; of those that stay and take tiles in turn, the tiles.
        sm_count: SMs of the device.
        blocks_per_sm: Blocks that an SM holds at a time, at most.
    """

    blocks: int
    sm_count: int
    blocks_per_sm: int

    @property
    def count(self) -> float:
        """Waves, the last one in part."""
        return self.blocks / (self.sm_count * self.blocks_per_sm)

    @property
    def last_blocks(self) -> int:
        """Blocks of the last wave."""
        wave = self.sm_count * self.blocks_per_sm
        return self.blocks - (math.ceil(self.blocks / wave) - 1) * wave

    @property
    def idle_sms(self) -> int:
        """SMs that have no block of the last wave."""
        return max(0, self.sm_count - self.last_blocks)

    @property
    def used(self) -> float:
        """The share of the SMs' time that is used: wave quantization takes the rest.

        Blocks are taken to last alike. The busiest SM has ``ceil(blocks / SMs)``, however many run at a time.
        """
        return self.blocks / (self.sm_count * math.ceil(self.blocks / self.sm_count))


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockResources:
    """What a block takes of an SM, before the compiler has told.

    Attributes:
        threads: Its threads.
        registers: Registers of a thread, at least.
        smem_bytes: Shared memory, at least.
        occupancy: What an SM holds of such blocks, at most; None if the device does not say what it can hold.
    """

    threads: int
    registers: int
    smem_bytes: int
    occupancy: Occupancy | None

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data, with what limits the occupancy."""
        data = dataclasses.asdict(self)
        if self.occupancy is not None:
            data["occupancy"]["limited_by"] = list(self.occupancy.limited_by)
        return data


def blocks_and_waves(
    variant: Variant[Any], workload: Workload, config: Config, costs: Costs, device: Device
) -> tuple[BlockResources, Waves] | tuple[None, None]:
    """Return what a block of a configuration takes, and how all of them fill the SMs.

    Both are of the launch that does the work: the first that its costs may be of. None if it is not launched
    in blocks.

    Args:
        variant: The implementation.
        workload: The problem.
        config: The configuration.
        costs: Of this configuration alone.
        device: Where it is to run.
    """
    if not isinstance(variant, CudaVariant | NumbaCudaVariant):
        return None, None
    launch = _main(variant.launches(workload, config), costs)
    block = _block(launch, costs, device)
    resident = max(1, block.occupancy.blocks) if block.occupancy is not None else 1
    if launch.blocks_per_sm:
        resident = min(resident, launch.blocks_per_sm)
    waves = Waves(blocks=math.prod(launch.grid), sm_count=device.sm_count, blocks_per_sm=resident)
    return block, waves


def _main(launches: tuple[Launch, ...], costs: Costs) -> Launch:
    """Return the first launch with the threads and the shared memory of `costs`, or the first of all."""
    threads, smem_bytes = float(np.max(costs.threads)), float(np.max(costs.smem_bytes))
    alike = (one for one in launches if math.prod(one.block) == threads and one.smem_bytes >= smem_bytes)
    return next(alike, launches[0])


def _block(launch: Launch, costs: Costs, device: Device) -> BlockResources:
    threads = math.prod(launch.block)
    registers = math.ceil(float(np.max(costs.registers)))
    smem_bytes = max(launch.smem_bytes, math.ceil(float(np.max(costs.smem_bytes))))
    told = device.threads_per_sm and device.blocks_per_sm and device.smem_per_sm_bytes
    held = occupancy(device, threads=threads, registers=registers, smem_bytes=smem_bytes) if told else None
    return BlockResources(threads=threads, registers=registers, smem_bytes=smem_bytes, occupancy=held)
