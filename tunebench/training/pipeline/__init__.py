"""Plans of pipelines: schedules whose memory is balanced, made from the times and sizes of stages.

    schedule = balance(one_f_one_b(ranks=8, microbatches=32), costs)
    simulate_pipeline(schedule, costs).peak_bytes

Schedules and their simulation are in `tunebench.training.schedules`.
"""

from tunebench.training.pipeline.activation import ActivationMemory
from tunebench.training.pipeline.balance import balance, balance_at_limit, partners
from tunebench.training.pipeline.comparison import (
    ComparedSchedule,
    Comparison,
    SkippedSchedule,
    StageSource,
    compare_schedules,
)
from tunebench.training.pipeline.estimator import (
    MicrobatchEstimate,
    balanced_in_flight,
    estimate_microbatches,
    microbatch_speedup,
)
from tunebench.training.pipeline.given import GivenStages, read_stages, write_stages
from tunebench.training.pipeline.optimiser import OptimisedSchedule, optimise_schedule
from tunebench.training.pipeline.order_bound import step_lower_bound_us
from tunebench.training.pipeline.predicted import PredictedStages
from tunebench.training.pipeline.transfers import with_transfers
from tunebench.training.schedules.registry import named_schedules

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
    "write_stages",
]
