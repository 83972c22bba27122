"""Counts of instructions and bytes of an emulated kernel, to compare with the costs a variant declares."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields

__all__ = ["Counts", "LaunchCounts", "WorkCounts", "read_counts"]

_DTYPES = {"s8": "i8"}
"""Types of matrix instructions whose PTX name differs from the name in tunebench."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkCounts:
    """Work executed by a block, or by several blocks together.

    Attributes:
        fma: Multiply-adds and other full-rate f32 instructions, per lane, of the wrappers in `types.cuh`.
        sfu: Results of the special-function unit (exp2, rsqrt, …).
        smem_traffic_bytes: Distinct bytes of each warp access to shared memory, at least 128 per access.
        smem_passes: Passes over the 32 banks of 4 bytes that these accesses take.
        bank_conflicts: Passes beyond the first of each access, or of each part of an access that is served at
            a time: half a warp for 8 bytes per lane, a quarter for 16 bytes and for a matrix of ldmatrix.
        fill_bytes: Bytes that the block fetches: each byte once for ordinary loads, every byte of copies that
            bypass L1.
        accesses: Loads, stores and atomics of shared memory and tensors, per participating lane.
        longest_fma: Largest `fma` of one thread: an upper limit of the longest chain in a thread.
        warp_instructions: Instructions of whole warps by name: ``f32`` and ``special`` (those of the busiest
            lane), ``ld.shared``, ``cp.async``, ``ldmatrix``, ``mma.m16n8k16.f16``, ``__syncthreads``, …

    Source: parts of an access: measurements such as Jia et al., "Dissecting the NVIDIA Volta GPU
    architecture via microbenchmarking", 2018. Banks: CUDA C++ Programming Guide, "Shared Memory".
    """

    fma: int = 0
    sfu: int = 0
    smem_traffic_bytes: int = 0
    smem_passes: int = 0
    bank_conflicts: int = 0
    fill_bytes: int = 0
    accesses: int = 0
    longest_fma: int = 0
    warp_instructions: Mapping[str, int] = field(default_factory=dict)

    @property
    def instructions(self) -> int:
        """Warp instructions of all counted kinds."""
        return sum(self.warp_instructions.values())

    @property
    def mma_flop(self) -> Mapping[str, int]:
        """FLOPs of matrix instructions, by the type of their inputs."""
        flop: Counter[str] = Counter()
        for name, count in self.warp_instructions.items():
            if shape := re.search(r"mma.*\.m(\d+)n(\d+)k(\d+)\.(\w+)$", name):
                warps = 4 if name.startswith("wgmma") else 1  # warps that execute one instruction together
                size = int(shape[1]) * int(shape[2]) * int(shape[3])
                flop[_DTYPES.get(shape[4], shape[4])] += 2 * size * count // warps
        return dict(flop)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchCounts:
    """Work executed by one launch.

    Attributes:
        threads: Threads per block.
        smem_bytes: Shared memory per block, static and dynamic.
        read_bytes: Distinct bytes read from tensors.
        written_bytes: Distinct bytes written to tensors.
        blocks: Work of each block, in the order in which the blocks ran.
    """

    threads: int
    smem_bytes: int
    read_bytes: int
    written_bytes: int
    blocks: tuple[WorkCounts, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Work executed by a run, launch by launch."""

    launches: tuple[LaunchCounts, ...]

    @property
    def blocks(self) -> tuple[WorkCounts, ...]:
        """Work of each block of all launches."""
        return tuple(block for launch in self.launches for block in launch.blocks)

    @property
    def total(self) -> WorkCounts:
        """Work of all blocks together."""
        return _sum(self.blocks)

    def describe(self) -> str:
        """Return a line per launch, such as ``4 blocks of 128 threads: fma 65536, ld.shared 512, …``."""
        lines = []
        for launch in self.launches:
            work = _sum(launch.blocks)
            figures = {item.name: getattr(work, item.name) for item in fields(WorkCounts)[:-1]}
            figures |= {"read_bytes": launch.read_bytes, "written_bytes": launch.written_bytes}
            figures |= work.warp_instructions
            text = ", ".join(f"{name} {value}" for name, value in figures.items() if value)
            lines.append(f"{len(launch.blocks)} blocks of {launch.threads} threads: {text}")
        return "\n".join(lines)


def read_counts(text: str) -> Counts:
    """Parse the emulator's report: a line `block NAME=COUNT …` for each block, then a line `launch …`."""
    launches: list[LaunchCounts] = []
    blocks: list[WorkCounts] = []
    for line in text.splitlines():
        kind, *words = line.split()
        figures = {name: int(value) for name, _, value in (word.rpartition("=") for word in words)}
        if kind == "launch":
            launches.append(LaunchCounts(**figures, blocks=tuple(blocks)))
            blocks = []
        else:
            named = {item.name: figures.pop(item.name) for item in fields(WorkCounts)[:-1]}
            blocks.append(WorkCounts(**named, warp_instructions=figures))
    return Counts(launches=tuple(launches))


def _sum(works: Collection[WorkCounts]) -> WorkCounts:
    figures: Counter[str] = Counter()
    instructions: Counter[str] = Counter()
    for work in works:
        figures.update({item.name: getattr(work, item.name) for item in fields(WorkCounts)[:-1]})
        instructions.update(work.warp_instructions)
    figures["longest_fma"] = max((work.longest_fma for work in works), default=0)
    return WorkCounts(**figures, warp_instructions=dict(instructions))
