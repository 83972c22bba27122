"""The check of every run against its lower bound; a violation makes the bounds of the variant untrusted."""

from __future__ import annotations

from tunebench.bound import refined_us
from tunebench.db.record import FastestSample
from tunebench.outcome import Aborted, CacheState, Measured, Outcome, Resources
from tunebench.search.optimality_proof import violates
from tunebench.search.variant_search import VariantSearch
from tunebench.space import Config
from tunebench.task import Task
from tunebench.tuning.tunable import TunableVariant
from tunebench.tuning.workload_report import BoundViolation
from tunebench.workload import Workload

__all__ = ["BoundAudit", "task_bound_us"]


def task_bound_us(task: Task, resources: Resources, *, cache: CacheState) -> float:
    """Return the lower bound of a compiled configuration, in microseconds; 0 if its resources are unknown.

    Args:
        task: The configuration.
        resources: Registers, shared memory and spills of its binary.
        cache: Cache state of the measurements.
    """
    if resources.registers is None and resources.static_smem_bytes is None:
        return 0.0
    return refined_us(task.variant, task.workload, task.config, task.device, resources, cache=cache)


class BoundAudit:
    """Compares runs with their lower bounds and collects violations.

    Args:
        workload: The workload.
        cache: Cache state of measurements and bounds.
    """

    def __init__(self, workload: Workload, cache: CacheState) -> None:
        self._workload, self._cache = workload, cache
        self._violations: dict[tuple[str, Config], BoundViolation] = {}

    @property
    def violations(self) -> tuple[BoundViolation, ...]:
        """The fastest run of every configuration that was faster than its bound."""
        return tuple(self._violations.values())

    def stored_bound_us(self, variant: TunableVariant, config: Config, resources: Resources) -> float:
        """Return the lower bound of a stored trial with the resources of its binary, in microseconds."""
        task = Task(variant=variant.variant, workload=self._workload, config=config, device=variant.device)
        return task_bound_us(task, resources, cache=self._cache)

    def check(self, search: VariantSearch, config: Config, outcome: Outcome, bound_us: float) -> None:
        """Compare a new run with its bound."""
        if isinstance(outcome, Measured | Aborted) and violates(outcome, bound_us):
            self._violated(search, config, min(outcome.samples_us), bound_us, known=False)

    def check_stored(
        self, variant: TunableVariant, search: VariantSearch, row: int, fastest: FastestSample
    ) -> None:
        """Compare a stored run of the current source with the current bound."""
        if fastest.cache not in (None, self._cache):
            return
        bound_us, before_us = float(search.bounds_us[row]), fastest.bound_us or 0.0
        if (
            fastest.cache is None
        ):  # an aborted run has no cache state, but its stored bound is of the same one
            bound_us = min(bound_us, before_us)
        elif fastest.fastest_us < before_us:
            bound_us = max(bound_us, self.stored_bound_us(variant, fastest.config, fastest.resources))
        if fastest.fastest_us < bound_us:
            self._violated(search, fastest.config, fastest.fastest_us, bound_us, known=True)

    def _violated(
        self, search: VariantSearch, config: Config, fastest_us: float, bound_us: float, *, known: bool
    ) -> None:
        search.distrust()
        before = self._violations.get((search.key, config))
        if before is None or fastest_us < before.fastest_us:
            self._violations[search.key, config] = BoundViolation(
                variant=search.key, config=config, fastest_us=fastest_us, bound_us=bound_us, known=known
            )
