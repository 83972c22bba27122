"""Occupancy: how many blocks of a kernel are resident on an SM, and which resource limits their number."""

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
"""Unit in which registers are allocated to a warp."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """Residency of one kernel on an SM.

    Attributes:
        blocks: Resident blocks; 0 if not even one fits.
        warps: Resident warps.
        most_warps: Maximum number of resident warps of any kernel.
        limits: Number of blocks that each resource alone would allow.
    """

    blocks: int
    warps: int
    most_warps: int
    limits: dict[str, int]

    @property
    def limited_by(self) -> tuple[str, ...]:
        """Resources that allow the fewest blocks."""
        return tuple(name for name, blocks in self.limits.items() if blocks == self.blocks)


def occupancy(device: Device, *, threads: int, registers: int, smem_bytes: int) -> Occupancy:
    """Return the occupancy of an SM, with all of its shared memory available to the kernel.

    Args:
        device: The GPU; it need not be on this machine.
        threads: Threads per block.
        registers: Registers per thread.
        smem_bytes: Static and dynamic shared memory per block.

    Raises:
        InputError: The device has no number of threads or blocks per SM.

    Source: CUDA C++ Programming Guide, "Multiprocessor Level"; units of allocation as in `cuda_occupancy.h`.
    """
    if not (device.threads_per_sm and device.blocks_per_sm and device.smem_per_sm_bytes):
        raise InputError(
            f"{device.name}: occupancy needs threads_per_sm, blocks_per_sm and smem_per_sm_bytes; "
            "add them to the device's description"
        )
    warps, most_warps = ceil_div(threads, WARP), device.threads_per_sm // WARP
    unit = 256 if device.compute_capability < (8, 0) else 128
    held_bytes = ceil_div(smem_bytes + device.smem_reserved_bytes, unit) * unit
    # A warp's registers come from the register file of one partition.
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
    """Resources that one launch of a GPU binary uses on a device.

    Attributes:
        entry: Name of the kernel in its source; empty for Numba.
        symbol: Name of the kernel in the binary.
        launch: Grid, block and dynamic shared memory.
        used: Registers, static shared memory, stack and code of the kernel.
        occupancy: Residency on an SM.
    """

    entry: str
    symbol: str
    launch: Launch
    used: KernelResources
    occupancy: Occupancy


def kernel_uses(binary: Binary, launches: tuple[Launch, ...], device: Device) -> tuple[KernelUse, ...]:
    """Return the resources that each launch of a configuration uses.

    Args:
        binary: Compiled from a variant for GPUs.
        launches: Launches of the same configuration.
        device: The GPU; it need not be on this machine.

    Raises:
        InputError: The device has no number of threads or blocks per SM.
    """
    entries = read_cubin(binary.payload)
    uses = []
    for symbol, launch in zip(binary.entries, launches, strict=True):
        used = entries[symbol]
        launch_occupancy = occupancy(
            device,
            threads=launch.block[0] * launch.block[1] * launch.block[2],
            registers=used.registers,
            smem_bytes=used.static_smem_bytes + launch.smem_bytes,
        )
        uses.append(
            KernelUse(entry=launch.entry, symbol=symbol, launch=launch, used=used, occupancy=launch_occupancy)
        )
    return tuple(uses)
