"""Plans of pipelines: schedules whose memory is balanced, made from the times and sizes of stages.

    schedule = balance(one_f_one_b(ranks=8, microbatches=32), costs)
    simulate_pipeline(schedule, costs).peak_bytes

Schedules and their simulation are in `tunebench.forecast.parallel.pipeline`.
"""

from tunebench.plan.pipeline.balance import balance, balance_at_limit, partners
from tunebench.plan.pipeline.named import named_schedules
from tunebench.plan.pipeline.transfers import with_transfers

__all__ = ["balance", "balance_at_limit", "named_schedules", "partners", "with_transfers"]
