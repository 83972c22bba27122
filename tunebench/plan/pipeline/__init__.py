"""Plans of pipeline parallelism: which schedule, and which layers on which stage."""

from tunebench.plan.pipeline.named import named_schedules

__all__ = ["named_schedules"]
