"""Predicted memory of a device as text and as data: its figures, their interval, and a verdict."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tunebench.training.cluster import TrainingCluster
    from tunebench.training.cluster.device_memory import DeviceMemory
    from tunebench.training.cluster.memory_verdict import MemoryVerdict

__all__ = ["limit_text", "memory_json", "memory_text"]


def limit_text(machine: TrainingCluster) -> str:
    """Return the memory of a device that plans may need, and the usable one."""
    from tunebench.training.memory import size_text

    return (
        f"{size_text(machine.limit_bytes)} of {size_text(machine.memory_bytes)} usable per device "
        f"(margin {machine.memory_margin:.0%})"
    )


def memory_json(memory: DeviceMemory, verdict: MemoryVerdict | None) -> dict[str, Any]:
    """Return the memory of a device by kind, its figures, and a verdict."""
    return {
        "rank": memory.rank,
        **memory.kinds,
        "allocated": memory.allocated,
        "reserved": memory.reserved,
        "total": memory.total,
        "needed": memory.needed,
        "verdict": {"name": verdict.name, **asdict(verdict)} if verdict else None,
    }


def memory_text(memory: DeviceMemory, verdict: MemoryVerdict | None) -> str:
    """Return the figures of a device: the one that decides with its interval, and whether it fits."""
    from tunebench.training.memory import size_text

    decides = ""
    if verdict is not None:
        decides = (
            f" (90 % interval {size_text(verdict.low)} to {size_text(verdict.high)}) of "
            f"{size_text(verdict.usable)} usable: {verdict.name}, probability {verdict.probability:.0%}"
        )
    needed, shown = size_text(memory.needed), size_text(memory.total)
    figures = f"{shown} by nvidia-smi, which decides{decides}"
    if memory.returned:
        figures = f"{needed} needed, which decides{decides}; {shown} by nvidia-smi where there is room"
    return (
        f"rank {memory.rank}: {figures}; {size_text(memory.reserved)} reserved and "
        f"{size_text(memory.allocated)} allocated by PyTorch"
    )
