"""Schedules of pipeline parallelism, and their simulation.

    schedule = one_f_one_b(ranks=4, microbatches=16)
    simulation = simulate_pipeline(schedule, PipelineCosts.uniform(4))
    simulation.step_us, simulation.bubble, simulation.peak_bytes

A schedule lists the actions of each rank (`action`, `schedule`), `costs` has the time and memory of stages
and the links, `generators` and `zero_bubble` make named schedules, `registry` has what is known of each of
them, and `simulation` executes any schedule.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tunebench._lazy import lazy_names

if TYPE_CHECKING:
    from tunebench.training.schedules.action import ActionKind, PipelineAction
    from tunebench.training.schedules.costs import (
        Interconnect,
        LinearTransfer,
        PipelineCosts,
        StageCosts,
        link_transfer,
    )
    from tunebench.training.schedules.generators import (
        bubble,
        gpipe,
        interleaved_1f1b,
        looped_bfs,
        one_f_one_b,
    )
    from tunebench.training.schedules.list_scheduler import (
        ListProblem,
        ListRules,
        list_problem,
        list_schedule,
        list_times,
    )
    from tunebench.training.schedules.registry import SCHEDULES, NamedSchedule, find_schedule
    from tunebench.training.schedules.schedule import (
        PipelineSchedule,
        looped_placement,
        read_schedule,
        schedule_of,
        v_placement,
        write_schedule,
    )
    from tunebench.training.schedules.simulation import (
        MemoryTimeline,
        PipelineSimulation,
        Transfer,
        simulate_pipeline,
    )
    from tunebench.training.schedules.zero_bubble import (
        dualpipe_v,
        interleaved_zero_bubble,
        v_half,
        v_min,
        v_schedule,
        zb_h1,
        zb_h2,
        zbv,
    )

__all__ = [
    "SCHEDULES",
    "ActionKind",
    "Interconnect",
    "LinearTransfer",
    "ListProblem",
    "ListRules",
    "MemoryTimeline",
    "NamedSchedule",
    "PipelineAction",
    "PipelineCosts",
    "PipelineSchedule",
    "PipelineSimulation",
    "StageCosts",
    "Transfer",
    "bubble",
    "dualpipe_v",
    "find_schedule",
    "gpipe",
    "interleaved_1f1b",
    "interleaved_zero_bubble",
    "link_transfer",
    "list_problem",
    "list_schedule",
    "list_times",
    "looped_bfs",
    "looped_placement",
    "one_f_one_b",
    "read_schedule",
    "schedule_of",
    "simulate_pipeline",
    "v_half",
    "v_min",
    "v_placement",
    "v_schedule",
    "write_schedule",
    "zb_h1",
    "zb_h2",
    "zbv",
]

_LAZY = {
    "ActionKind": "action",
    "PipelineAction": "action",
    "Interconnect": "costs",
    "LinearTransfer": "costs",
    "PipelineCosts": "costs",
    "StageCosts": "costs",
    "link_transfer": "costs",
    "bubble": "generators",
    "gpipe": "generators",
    "interleaved_1f1b": "generators",
    "looped_bfs": "generators",
    "one_f_one_b": "generators",
    "ListProblem": "list_scheduler",
    "ListRules": "list_scheduler",
    "list_problem": "list_scheduler",
    "list_schedule": "list_scheduler",
    "list_times": "list_scheduler",
    "SCHEDULES": "registry",
    "NamedSchedule": "registry",
    "find_schedule": "registry",
    "PipelineSchedule": "schedule",
    "looped_placement": "schedule",
    "read_schedule": "schedule",
    "schedule_of": "schedule",
    "v_placement": "schedule",
    "write_schedule": "schedule",
    "MemoryTimeline": "simulation",
    "PipelineSimulation": "simulation",
    "Transfer": "simulation",
    "simulate_pipeline": "simulation",
    "dualpipe_v": "zero_bubble",
    "interleaved_zero_bubble": "zero_bubble",
    "v_half": "zero_bubble",
    "v_min": "zero_bubble",
    "v_schedule": "zero_bubble",
    "zb_h1": "zero_bubble",
    "zb_h2": "zero_bubble",
    "zbv": "zero_bubble",
}
"""Module of each name. They are imported at their first use: some need Numba, and the registry does not."""


__getattr__ = lazy_names(__name__, _LAZY)
