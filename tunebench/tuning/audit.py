"""Every run is held against its bound: one that is faster makes the bounds of its variant worthless."""

from __future__ import annotations

from tunebench.bound import refined_us
from tunebench.db.record import FastestSample
from tunebench.device import Device
from tunebench.outcome import Aborted, CacheState, Measured, Outcome, Resources
from tunebench.search.optimality_proof import violates
from tunebench.search.variant_search import VariantSearch
from tunebench.space import Config
from tunebench.tuning.candidate import Candidate
from tunebench.tuning.report import Violation
from tunebench.workload import Workload

__all__ = ["Audit"]


class Audit:
    """What runs say of the bounds.

    Args:
        problem: The problem.
        device: Where it runs.
        cache: Cache state that times are taken in, and bounds are for.
    """

    def __init__(self, problem: Workload, device: Device, cache: CacheState) -> None:
        self._problem, self._device, self._cache = problem, device, cache
        self._violations: dict[tuple[str, Config], Violation] = {}

    @property
    def violations(self) -> tuple[Violation, ...]:
        """The fastest run of every configuration that was faster than its bound."""
        return tuple(self._violations.values())

    def refined_us(self, candidate: Candidate, config: Config, resources: Resources) -> float:
        """Return the bound of a configuration with what its binary uses; 0 where that is not told."""
        if resources.registers is None and resources.static_smem_bytes is None:
            return 0.0
        return refined_us(
            candidate.variant, self._problem, config, self._device, resources, cache=self._cache
        )

    def check(self, search: VariantSearch, config: Config, outcome: Outcome, bound_us: float) -> None:
        """Hold a run of today against its bound."""
        if isinstance(outcome, Measured | Aborted) and violates(outcome, bound_us):
            self._violated(search, config, min(outcome.samples_us), bound_us, known=False)

    def recall(self, candidate: Candidate, search: VariantSearch, row: int, found: FastestSample) -> None:
        """Hold a stored run of today's source against today's bound."""
        if found.cache not in (None, self._cache):
            return
        bound_us, before_us = float(search.bounds_us[row]), found.bound_us or 0.0
        if found.cache is None:  # an aborted run does not tell its cache, but its bound was of the same
            bound_us = min(bound_us, before_us)
        elif found.fastest_us < before_us:
            bound_us = max(bound_us, self.refined_us(candidate, found.config, found.resources))
        if found.fastest_us < bound_us:
            self._violated(search, found.config, found.fastest_us, bound_us, known=True)

    def _violated(
        self, search: VariantSearch, config: Config, fastest_us: float, bound_us: float, *, known: bool
    ) -> None:
        search.distrust()
        before = self._violations.get((search.key, config))
        if before is None or fastest_us < before.fastest_us:
            self._violations[search.key, config] = Violation(
                variant=search.key, config=config, fastest_us=fastest_us, bound_us=bound_us, known=known
            )
