"""Plans that fit a training step into less memory, by recomputation and by copies to the host.

    plan = plan_memory(step, budget_bytes=8 * 10**9)
    plan.simulation.step_us, plan.gap, plan.tensors

A `TrainingStep` states the operations of a step with their times and tensors. A `MemoryPlan` holds a schedule
of actions, which `simulate` executes to check it.
"""

from tunebench.training.memory.allocator import (
    Allocate,
    AllocatorUse,
    CachingAllocator,
    ExpandableAllocator,
    Release,
    allocator_use,
    memory_events,
)
from tunebench.training.memory.batch import largest_batch, step_at
from tunebench.training.memory.bound import least_bytes, lower_bound_us
from tunebench.training.memory.budget import budget_bytes, size_text
from tunebench.training.memory.device_plan import CUTS, DeviceUse, device_use, plan_on_device
from tunebench.training.memory.eviction import EvictionPolicy, evict
from tunebench.training.memory.exact import ExactResult, exact_schedule, least_budget_exact
from tunebench.training.memory.greedy import greedy_schedules
from tunebench.training.memory.host_link import host_link, host_link_of, host_links
from tunebench.training.memory.layers import LayerPlan, layer_plans, layers_above
from tunebench.training.memory.plan_file import read_plan, write_plan
from tunebench.training.memory.planner import (
    LeastBudget,
    MemoryPlan,
    PlanEffort,
    TensorPlan,
    least_budget,
    memory_curve,
    plan_memory,
)
from tunebench.training.memory.relaxation import relaxed_bound_us
from tunebench.training.memory.schedule import (
    Action,
    Compute,
    CopyIn,
    CopyOut,
    Free,
    Stage,
    schedule_of,
    unplanned,
    with_frees,
)
from tunebench.training.memory.simulation import Simulation, simulate
from tunebench.training.memory.step import HostLink, StepOperation, StepTensor, TrainingStep

__all__ = [
    "CUTS",
    "Action",
    "Allocate",
    "AllocatorUse",
    "CachingAllocator",
    "Compute",
    "CopyIn",
    "CopyOut",
    "DeviceUse",
    "EvictionPolicy",
    "ExactResult",
    "ExpandableAllocator",
    "Free",
    "HostLink",
    "LayerPlan",
    "LeastBudget",
    "MemoryPlan",
    "PlanEffort",
    "Release",
    "Simulation",
    "Stage",
    "StepOperation",
    "StepTensor",
    "TensorPlan",
    "TrainingStep",
    "allocator_use",
    "budget_bytes",
    "device_use",
    "evict",
    "exact_schedule",
    "greedy_schedules",
    "host_link",
    "host_link_of",
    "host_links",
    "largest_batch",
    "layer_plans",
    "layers_above",
    "least_budget",
    "least_budget_exact",
    "least_bytes",
    "lower_bound_us",
    "memory_curve",
    "memory_events",
    "plan_memory",
    "plan_on_device",
    "read_plan",
    "relaxed_bound_us",
    "schedule_of",
    "simulate",
    "size_text",
    "step_at",
    "unplanned",
    "with_frees",
    "write_plan",
]
