"""How to tune: what a caller may choose."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from tunebench.errors import InputError, UnknownName
from tunebench.measure.timing import Protocol
from tunebench.search.variant_search import SAMPLERS

__all__ = ["Plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How to tune.

    Attributes:
        trials: Distinct configurations that may be launched or fail; known and masked ones are free.
        sampler: A name of `tunebench.search.variant_search.SAMPLERS`.
        seed: Seed of all that is random: the search, the inputs.
        variants: Names or keys of the variants to try; all that can, if empty.
        variant_files: Users' files with a variant each; these alone are tried, unless `variants` names more.
        protocol: How samples are taken.
        offline: Whether to compile, emulate and predict only, even if the device is here.
        workers: Processes that compile; 0 is one for each core.
        timeout_s: Longest that verifying and timing one configuration may take.
        stop_at_gap: Optimality gap that ends the search (`tunebench.search.optimality_proof`); None searches on.
        audit: How many configurations that the bound prunes are run all the same, as a share of the trials.
        finalists: How many of the best are timed again at the end, beside the defaults of their variants.
        baselines: Whether to time libraries at the end.
        warm: Whether to begin with what is known of other devices and of related problems. A `random` sample
            stays one: only the calibrated pruner makes use of it there.
        calibrated: Whether to pass over what is unlikely to win, as long as anything else is open.
        cluster: Address of the Ray cluster that measures: ``"ray://host:10001"``; ``"host:6379"`` or
            ``"auto"`` from one of its nodes; ``"local"`` for one on this machine. None takes this machine
            alone.
        minutes: After so many no configuration is begun any more; finalists are timed all the same. None is
            as long as it takes.
    """

    trials: int = 50
    sampler: str = "surrogate"
    seed: int = 0
    variants: tuple[str, ...] = ()
    variant_files: tuple[str, ...] = ()
    protocol: Protocol = field(default_factory=Protocol)
    offline: bool = False
    workers: int = 0
    timeout_s: float = 60.0
    stop_at_gap: float | None = None
    audit: float = 0.02
    finalists: int = 3
    baselines: bool = True
    warm: bool = True
    calibrated: bool = False
    cluster: str | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        if self.trials < 1 or self.timeout_s <= 0 or self.workers < 0 or self.finalists < 1:
            raise InputError("trials and finalists must be 1 or more, timeout positive, workers 0 or more")
        if self.stop_at_gap is not None and not self.stop_at_gap >= 1:
            raise InputError(
                f"stop_at_gap is best time / lowest open bound, 1 or more; got {self.stop_at_gap}"
            )
        if not 0 <= self.audit <= 1:
            raise InputError(f"audit is a share of the trials, from 0 to 1; got {self.audit}")
        if self.minutes is not None and not 0 <= self.minutes < math.inf:
            raise InputError(f"minutes must be a finite number, 0 or more; got {self.minutes}")
        if self.sampler not in SAMPLERS:
            raise UnknownName("sampler", self.sampler, SAMPLERS)
