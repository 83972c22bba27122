"""Schedules of pipeline parallelism, and their simulation.

    schedule = one_f_one_b(ranks=4, microbatches=16)
    simulation = simulate_pipeline(schedule, PipelineCosts.uniform(4))
    simulation.step_us, simulation.bubble, simulation.peak_bytes

A schedule lists the actions of each rank (`action`, `schedule`), `costs` has the time and memory of stages
and the links, `generators` makes named schedules, and `simulation` executes any schedule.
"""

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
    "ActionKind",
    "Interconnect",
    "LinearTransfer",
    "ListProblem",
    "ListRules",
    "MemoryTimeline",
    "PipelineAction",
    "PipelineCosts",
    "PipelineSchedule",
    "PipelineSimulation",
    "StageCosts",
    "Transfer",
    "bubble",
    "dualpipe_v",
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
