"""Predicted time of a kernel from its machine code: registers, shared memory, instructions and loops.

A kernel whose author declares no costs is known by its binary alone. Each instruction is counted as often as
the loops around it run; loops are branches backwards. How often they run is not in the binary, and is passed.
The counts are expectations (`tunebench.variant.Execution`): no lower bound uses them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tunebench._lazy import np
from tunebench.binary.compiled import Binary, CompileError
from tunebench.binary.disassembly import sass
from tunebench.bound import refine
from tunebench.device import Device
from tunebench.errors import MissingDependency
from tunebench.forecast.execution import interval_us, predict_us
from tunebench.outcome import Resources
from tunebench.variant import Costs, Execution
from tunebench.workload import Traffic

__all__ = ["CodeForecast", "code_costs", "forecast_code"]

WARP = 32
INSTRUCTION_BYTES = 16
"""Size of an instruction from Volta on. Source: CUDA Binary Utilities."""

_LINE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z]\w*)((?:\.\w+)*)([^;]*);?")
_LABEL = re.compile(r"^(\.L_\w+):")
_TARGET = re.compile(r"`\((\.L_\w+)\)")
_GLOBAL = ("LDG", "STG", "LDGSTS", "ATOMG", "RED", "REDG")
_SHARED = ("LDS", "STS", "ATOMS", "LDSM", "STSM")
_LOCAL = ("LDL", "STL")
_ASYNCHRONOUS = ("HGMMA", "IGMMA", "QGMMA", "UTCHMMA", "UTCQMMA", "UTCIMMA")
_WIDTHS = {"128": 16, "64": 8, "U8": 1, "S8": 1, "U16": 2, "S16": 2}
_SPIN = 8
"""Instructions of the longest loop that only waits for a barrier in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeForecast:
    """Predicted time of a compiled kernel.

    Attributes:
        us: Expected time in microseconds, at least the lower bound.
        interval_us: 90 % prediction interval in microseconds.
    """

    us: float
    interval_us: tuple[float, float]


@dataclass(frozen=True, slots=True)
class _Instruction:
    name: str
    modifiers: tuple[str, ...]

    @property
    def width(self) -> int:
        """Bytes that a lane moves."""
        return next((_WIDTHS[modifier] for modifier in self.modifiers if modifier in _WIDTHS), 4)


def forecast_code(
    binary: Binary,
    costs: Costs,
    traffic: Traffic,
    device: Device,
    *,
    trips: Sequence[float] = (),
    stages: int = 2,
) -> CodeForecast:
    """Return the predicted time of a kernel of one launch.

    Without a disassembler, registers and shared memory alone distinguish binaries.

    Args:
        binary: The compiled kernel.
        costs: Lower bounds of its work, of one configuration.
        traffic: Bytes that any implementation must move.
        device: The GPU; it need not be present.
        trips: How often each loop of the source runs, outer ones first.
        stages: Iterations of a loop whose loads are under way at a time, plus one.
    """
    bounds = refine(costs, traffic, device, binary.resources, rows=1)
    warps = float(np.max(np.asarray(costs.threads))) / WARP
    expected = code_costs(costs, _code(binary), binary.resources, warps=warps, trips=trips, stages=stages)
    predicted = predict_us(bounds, expected, device, traffic)
    low, high = interval_us(predicted, bounds)
    return CodeForecast(us=float(predicted[0]), interval_us=(float(low[0]), float(high[0])))


def _code(binary: Binary) -> str:
    try:
        return sass(binary.payload)
    except (MissingDependency, CompileError):
        return ""


def code_costs(
    costs: Costs, code: str, used: Resources, *, warps: float, trips: Sequence[float], stages: int
) -> Costs:
    """Return costs with what the machine code is expected to do besides; for predicted times only.

    Args:
        costs: Lower bounds of the work of one configuration.
        code: The machine code, from `sass`; empty if it is unknown.
        used: Resources of the binary.
        warps: Warps of a block.
        trips: As for `forecast_code`.
        stages: As for `forecast_code`.
    """
    instructions, loops = _parsed(code)
    runs = _runs(len(instructions), loops, trips)

    def total(weight: Callable[[_Instruction], float]) -> float:
        return warps * sum(times * weight(i) for times, i in zip(runs, instructions, strict=True))

    registers = float(used.registers or 16)
    accesses = total(lambda i: WARP * (i.name in _GLOBAL or i.name in _SHARED[:3] or i.name in _LOCAL))
    waits, prefetched = _waits(instructions, loops, trips)
    is_asynchronous = any(i.name in _ASYNCHRONOUS for i in instructions)
    longest = max((stop - start for start, stop in loops), default=len(instructions))
    execution = Execution(
        registers=registers,
        instructions=total(lambda i: 1.0) - accesses / WARP,
        accesses=accesses,
        passes=total(_passes),
        l2_bytes=total(lambda i: WARP * i.width * (i.name in _GLOBAL)),
        memory_waits=waits,
        prefetched_waits=prefetched / max(1, stages - 1),
        barriers=total(lambda i: i.name == "BAR") / warps,
        code_bytes=float(longest * INSTRUCTION_BYTES),
        asynchronous=float(is_asynchronous),
    )
    smem_bytes = float((used.static_smem_bytes or 0) + (used.dynamic_smem_bytes or 0))
    return dataclasses.replace(
        costs,
        registers=registers,
        smem_bytes=np.maximum(costs.smem_bytes, smem_bytes),
        sfu=np.maximum(costs.sfu, total(lambda i: WARP * (i.name == "MUFU"))),
        execution=execution,
    )


def _passes(instruction: _Instruction) -> float:
    """Return the passes of 128 bytes of a warp through shared memory, without bank conflicts."""
    if instruction.name in ("LDSM", "STSM"):
        return next((float(m) for m in reversed(instruction.modifiers) if m in ("2", "4")), 1.0)
    if instruction.name in _SHARED or instruction.name == "LDGSTS":
        return max(1.0, instruction.width / 4)
    return 0.0


def _parsed(code: str) -> tuple[list[_Instruction], list[tuple[int, int]]]:
    """Return the instructions, and first and last one plus one of each loop, outer loops first."""
    instructions: list[_Instruction] = []
    labels: dict[str, int] = {}
    loops = []
    for line in code.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif match := _LINE.match(line):
            predicate, name, modifiers, operands = match.groups()
            instructions.append(_Instruction(name, tuple(modifiers[1:].split("."))))
            if name == "EXIT" and not predicate:
                labels.clear()  # what follows is out of line, and returns by branches backwards
            target = _TARGET.search(operands)
            start = labels.get(target[1]) if name == "BRA" and target else None
            if start is not None and len(instructions) - start > _SPIN:
                loops.append((start, len(instructions)))
    return instructions, sorted(loops, key=lambda loop: (loop[0], -loop[1]))


def _trips_of(loops: Sequence[tuple[int, int]], trips: Sequence[float]) -> list[float]:
    """Return how often each loop runs: compilers split and add loops, which run as often as the longest."""
    if len(loops) == len(trips):
        return list(trips)
    return [max(trips, default=1.0)] * len(loops)


def _runs(count: int, loops: Sequence[tuple[int, int]], trips: Sequence[float]) -> list[float]:
    """Return how often each instruction runs."""
    runs = [1.0] * count
    for (start, stop), times in zip(loops, _trips_of(loops, trips), strict=True):
        for index in range(start, stop):
            runs[index] *= times
    return runs


def _waits(
    instructions: Sequence[_Instruction], loops: Sequence[tuple[int, int]], trips: Sequence[float]
) -> tuple[float, float]:
    """Return how often a warp waits for loads of loops, and for loads that run ahead of their use."""
    waits = prefetched = 0.0
    for (start, stop), times in zip(loops, _trips_of(loops, trips), strict=True):
        names = {instruction.name for instruction in instructions[start:stop]}
        prefetched += times * ("LDGSTS" in names)
        waits += times * ("LDG" in names)
    return waits, prefetched
