"""How many blocks of a kernel an SM holds at a time, and what keeps it from holding more."""

from __future__ import annotations

from dataclasses import dataclass

from tunebench.binary.compiled import Binary
from tunebench.binary.cubin import KernelResources, read_cubin
from tunebench.device import Device
from tunebench.errors import InputError
from tunebench.variant import Launch, ceil_div

__all__ = ["KernelUse", "Occupancy", "kernel_uses", "occupancy"]

WARP = 32
REGISTER_UNIT = 256
"""Registers are given to a warp by so many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """What an SM holds of one kernel at a time.

    Attributes:
        blocks: Resident blocks; 0 if not even one fits.
        warps: Their warps.
        most_warps: Warps that the SM can hold of any kernel.
        limits: Blocks that each resource would allow by itself.
    """

    blocks: int
    warps: int
    most_warps: int
    limits: dict[str, int]

    @property
    def limited_by(self) -> tuple[str, ...]:
        """The resources that allow the fewest blocks."""
        return tuple(name for name, blocks in self.limits.items() if blocks == self.blocks)


def occupancy(device: Device, *, threads: int, registers: int, smem_bytes: int) -> Occupancy:
    """Return what an SM of a GPU holds, all of its shared memory at the kernel's disposal.

    Args:
        device: The GPU; it need not be here.
        threads: Of a block.
        registers: Of a thread.
        smem_bytes: Static and dynamic shared memory of a block.

    Raises:
        InputError: if the device does not say how many threads and blocks its SMs hold.

    Source: CUDA C++ Programming Guide, "Multiprocessor Level"; units of allocation as in `cuda_occupancy.h`.
    """
    if not (device.threads_per_sm and device.blocks_per_sm and device.smem_per_sm_bytes):
        raise InputError(f"{device.name}: what its SMs hold is not described")
    warps, most_warps = ceil_div(threads, WARP), device.threads_per_sm // WARP
    unit = 256 if device.compute_capability < (8, 0) else 128
    held_bytes = ceil_div(smem_bytes + device.smem_reserved_bytes, unit) * unit
    # A warp's registers come from the file of one partition.
    per_warp = ceil_div(max(1, registers) * WARP, REGISTER_UNIT) * REGISTER_UNIT
    with_registers = device.registers_per_sm // device.partitions // per_warp * device.partitions
    limits = {
        "blocks": device.blocks_per_sm,
        "threads": most_warps // warps,
        "registers": with_registers // warps,
    }
    if held_bytes:
        limits["shared memory"] = device.smem_per_sm_bytes // held_bytes
    blocks = min(limits.values())
    return Occupancy(blocks=blocks, warps=blocks * warps, most_warps=most_warps, limits=limits)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelUse:
    """What one launch of a GPU binary takes of the device.

    Attributes:
        entry: The kernel as its source names it; empty for Numba, whose kernel has no such name.
        symbol: The kernel as the binary names it.
        launch: Grid, block and dynamic shared memory.
        used: Registers, static shared memory, stack and code of the kernel.
        occupancy: What an SM holds of it.
    """

    entry: str
    symbol: str
    launch: Launch
    used: KernelResources
    occupancy: Occupancy


def kernel_uses(binary: Binary, launches: tuple[Launch, ...], device: Device) -> tuple[KernelUse, ...]:
    """Return what each launch of a configuration takes of a GPU, which need not be here.

    Raises:
        InputError: as `occupancy` does.
    """
    entries = read_cubin(binary.payload)
    uses = []
    for symbol, launch in zip(binary.entries, launches, strict=True):
        used = entries[symbol]
        held = occupancy(
            device,
            threads=launch.block[0] * launch.block[1] * launch.block[2],
            registers=used.registers,
            smem_bytes=used.static_smem_bytes + launch.smem_bytes,
        )
        uses.append(KernelUse(entry=launch.entry, symbol=symbol, launch=launch, used=used, occupancy=held))
    return tuple(uses)
