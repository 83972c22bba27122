"""Schedules by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from tunebench.forecast.parallel.pipeline import (
    PipelineSchedule,
    gpipe,
    interleaved_1f1b,
    looped_bfs,
    one_f_one_b,
)

__all__ = ["named_schedules"]

_SCHEDULES: Mapping[str, Callable[[int, int], PipelineSchedule]] = MappingProxyType(
    {
        "gpipe": gpipe,
        "1f1b": one_f_one_b,
        "interleaved-1f1b": interleaved_1f1b,
        "looped-bfs": looped_bfs,
    }
)


def named_schedules() -> Mapping[str, Callable[[int, int], PipelineSchedule]]:
    """Return the schedules by name, each made from the numbers of ranks and micro-batches.

    Schedules with several stages on each rank have two.
    """
    return _SCHEDULES
