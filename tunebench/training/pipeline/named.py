"""Schedules by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from tunebench.training.schedules import (
    PipelineSchedule,
    dualpipe_v,
    gpipe,
    interleaved_1f1b,
    interleaved_zero_bubble,
    looped_bfs,
    one_f_one_b,
    v_half,
    v_min,
    zb_h1,
    zb_h2,
    zbv,
)

__all__ = ["named_schedules"]

_SCHEDULES: Mapping[str, Callable[[int, int], PipelineSchedule]] = MappingProxyType(
    {
        "gpipe": gpipe,
        "1f1b": one_f_one_b,
        "interleaved-1f1b": interleaved_1f1b,
        "looped-bfs": looped_bfs,
        "zb-h1": zb_h1,
        "zb-h2": zb_h2,
        "interleaved-zb": interleaved_zero_bubble,
        "zbv": zbv,
        "v-half": v_half,
        "v-min": v_min,
        "dualpipe-v": dualpipe_v,
    }
)


def named_schedules() -> Mapping[str, Callable[[int, int], PipelineSchedule]]:
    """Return the schedules by name, each made from the numbers of ranks and micro-batches.

    Schedules with several stages on each rank have two.
    """
    return _SCHEDULES
