"""Plans of pipelines: schedules whose memory is balanced, made from the times and sizes of stages.

    schedule = balance(one_f_one_b(ranks=8, microbatches=32), costs)
    simulate_pipeline(schedule, costs).peak_bytes

Schedules and their simulation are in `tunebench.forecast.parallel.pipeline`.
"""

from tunebench.plan.pipeline.activation import ActivationMemory
from tunebench.plan.pipeline.balance import balance, balance_at_limit, partners
from tunebench.plan.pipeline.comparison import (
    ComparedSchedule,
    Comparison,
    SkippedSchedule,
    StageSource,
    compare_schedules,
)
from tunebench.plan.pipeline.estimator import (
    MicrobatchEstimate,
    balanced_in_flight,
    estimate_microbatches,
    microbatch_speedup,
)
from tunebench.plan.pipeline.given import GivenStages, read_stages
from tunebench.plan.pipeline.named import named_schedules
from tunebench.plan.pipeline.optimiser import OptimisedSchedule, optimise_schedule
from tunebench.plan.pipeline.order_bound import step_lower_bound_us
from tunebench.plan.pipeline.predicted import PredictedStages
from tunebench.plan.pipeline.transfers import with_transfers

__all__ = [
    "ActivationMemory",
    "ComparedSchedule",
    "Comparison",
    "GivenStages",
    "MicrobatchEstimate",
    "OptimisedSchedule",
    "PredictedStages",
    "SkippedSchedule",
    "StageSource",
    "balance",
    "balance_at_limit",
    "balanced_in_flight",
    "compare_schedules",
    "estimate_microbatches",
    "microbatch_speedup",
    "named_schedules",
    "optimise_schedule",
    "partners",
    "read_stages",
    "step_lower_bound_us",
    "with_transfers",
]
