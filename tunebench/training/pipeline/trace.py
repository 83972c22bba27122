"""Trace of a simulated pipeline for Perfetto and Chrome (``chrome://tracing``).

Each rank is a process with threads for passes, sends and receives, and a counter of its memory.

Source: "Trace Event Format", Google, 2016; Perfetto reads it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tunebench.errors import InputError
from tunebench.training.schedules import ActionKind, PipelineSimulation

__all__ = ["trace_events", "write_trace"]

THREADS = ("compute", "send", "receive")
NAMES = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.INPUT_GRADIENT: "input gradient",
    ActionKind.WEIGHT_GRADIENT: "weight gradient",
    ActionKind.SEND_FORWARD: "output",
    ActionKind.SEND_BACKWARD: "gradient",
    ActionKind.EVICT: "eviction",
    ActionKind.LOAD: "load",
}


def write_trace(simulation: PipelineSimulation, path: str | Path) -> None:
    """Write the trace of a simulation as JSON.

    Raises:
        InputError: if the file cannot be written.
    """
    content = {"traceEvents": list(trace_events(simulation)), "displayTimeUnit": "ms"}
    try:
        Path(path).write_text(json.dumps(content), encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write the trace to {path}: {error.strerror or error}") from None


def trace_events(simulation: PipelineSimulation) -> Iterator[dict[str, Any]]:
    """Yield the events of a simulation; times are microseconds."""
    for rank in range(simulation.schedule.ranks):
        yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}
        yield {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}}
        for thread, name in enumerate(THREADS):
            yield {"ph": "M", "pid": rank, "tid": thread, "name": "thread_name", "args": {"name": name}}
    yield from _passes(simulation)
    yield from _transfers(simulation)
    yield from _memory(simulation)


def _passes(simulation: PipelineSimulation) -> Iterator[dict[str, Any]]:
    for rank, actions in enumerate(simulation.schedule.actions):
        times = zip(simulation.starts_us[rank].tolist(), simulation.ends_us[rank].tolist(), strict=True)
        for (stage, kind, microbatch), (start_us, end_us) in zip(actions, times, strict=True):
            if kind.computes:
                yield _slice(rank, 0, kind, stage, microbatch, start_us, end_us)


def _transfers(simulation: PipelineSimulation) -> Iterator[dict[str, Any]]:
    for transfer in simulation.transfers:
        for rank, thread in ((transfer.source, 1), (transfer.target, 2)):
            event = _slice(
                rank,
                thread,
                transfer.kind,
                transfer.stage,
                transfer.microbatch,
                transfer.start_us,
                transfer.end_us,
            )
            event["args"] |= {"from": transfer.source, "to": transfer.target}
            yield event


def _slice(
    rank: int, thread: int, kind: ActionKind, stage: int, microbatch: int, start_us: float, end_us: float
) -> dict[str, Any]:
    """Return a complete event."""
    return {
        "ph": "X",
        "pid": rank,
        "tid": thread,
        "name": f"{NAMES[kind]} {microbatch}",
        "cat": NAMES[kind],
        "ts": start_us,
        "dur": end_us - start_us,
        "args": {"stage": stage, "microbatch": microbatch},
    }


def _memory(simulation: PipelineSimulation) -> Iterator[dict[str, Any]]:
    for rank, timeline in enumerate(simulation.memory):
        for time_us, nbytes in zip(timeline.times_us.tolist(), timeline.nbytes.tolist(), strict=True):
            yield {"ph": "C", "pid": rank, "name": "memory", "ts": time_us, "args": {"bytes": nbytes}}
