"""Plans of training on a cluster: parallelism, recomputation and sharding, found by branch and bound.

job = TrainingJob(network=network("llama-2-7b"), batch=256, seq=4096)
answer = plan_training(job, TrainingCluster.parse("8 x h100-sxm"))
print(answer.best.plan, answer.best.step.time_us)
"""

from tunebench.training.cluster.answer import ClusterAnswer, PlanSensitivity, ResourceGain, plan_training
from tunebench.training.cluster.copies import CopiesAnswer, CopiesJob, PricedCopies, plan_copies
from tunebench.training.cluster.device_memory import DeviceMemory
from tunebench.training.cluster.eager_memory import EagerMemory
from tunebench.training.cluster.framework import RUNNABLE, Emitted, Framework, emit, megatron_arguments
from tunebench.training.cluster.front import cost_front, draw_fronts
from tunebench.training.cluster.layer_time import LayerTimes
from tunebench.training.cluster.machine import TrainingCluster
from tunebench.training.cluster.mixed import MixedAnswer, MixedPlan, MixedSearch, PricedMixedPlan, plan_mixed
from tunebench.training.cluster.mixed_machine import MixedCluster, is_mixed
from tunebench.training.cluster.module import ModuleJob, plan_module
from tunebench.training.cluster.plan_file import write_plan
from tunebench.training.cluster.search import ClusterSearch, Objective, PlanProof, PricedPlan, SearchResult
from tunebench.training.cluster.space import (
    ClusterPlan,
    PlanSchedule,
    PlanTable,
    Sharding,
    TrainingJob,
    plan_space,
)
from tunebench.training.cluster.stage_time import Slowdown, StepPricer, StepTime

__all__ = [
    "RUNNABLE",
    "ClusterAnswer",
    "ClusterPlan",
    "ClusterSearch",
    "CopiesAnswer",
    "CopiesJob",
    "DeviceMemory",
    "EagerMemory",
    "Emitted",
    "Framework",
    "LayerTimes",
    "MixedAnswer",
    "MixedCluster",
    "MixedPlan",
    "MixedSearch",
    "ModuleJob",
    "Objective",
    "PlanProof",
    "PlanSchedule",
    "PlanSensitivity",
    "PlanTable",
    "PricedCopies",
    "PricedMixedPlan",
    "PricedPlan",
    "ResourceGain",
    "SearchResult",
    "Sharding",
    "Slowdown",
    "StepPricer",
    "StepTime",
    "TrainingCluster",
    "TrainingJob",
    "cost_front",
    "draw_fronts",
    "emit",
    "is_mixed",
    "megatron_arguments",
    "plan_copies",
    "plan_mixed",
    "plan_module",
    "plan_space",
    "plan_training",
    "write_plan",
]
