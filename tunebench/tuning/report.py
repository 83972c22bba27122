"""What a run tells: its progress while it goes on, its report at the end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tunebench.executor import Fleet
from tunebench.measure.baseline import Baseline
from tunebench.measure.comparison import Comparison
from tunebench.search.optimality_proof import OptimalityProof
from tunebench.space import Config
from tunebench.tuning.warm import Source

__all__ = ["Progress", "Report", "Tie", "Violation", "Watcher"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a run stands; given to the watcher after every trial.

    Attributes:
        phase: ``"search"``, ``"finalists"`` or ``"baselines"``.
        done: Trials of this phase that are done.
        total: Trials of this phase.
        outcomes: How many trials of the search ended in each class.
        masked: Configurations that no run could make the best.
        cached: Configurations whose outcome was known already.
        best_us: Best time so far, if any.
        bound_us: No configuration can be faster.
        seconds_left: Expected rest of the phase, if there is a basis for it.
        elsewhere: Records of other devices or problems that the search began with.
        unlikely: Open configurations that the calibrated pruner passes over.
        device: Key of the device: runs for several may go on side by side.
        fleet: The workers of a cluster, if it is one that measures.
        waiting: What the run waits for, in one line; empty while it goes on.
    """

    phase: str
    done: int
    total: int
    outcomes: Mapping[str, int]
    masked: int
    cached: int
    best_us: float | None
    bound_us: float
    seconds_left: float | None
    elsewhere: int = 0
    unlikely: int = 0
    device: str = ""
    fleet: Fleet | None = None
    waiting: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A run that was faster than its bound allows: one of the two is wrong, and the bound prunes no more.

    Attributes:
        variant: Key of the variant.
        config: The configuration.
        fastest_us: Its fastest sample.
        bound_us: Its bound.
        known: Whether it was recorded by an earlier run.
    """

    variant: str
    config: Config
    fastest_us: float
    bound_us: float
    known: bool

    def __str__(self) -> str:
        when = ", as was recorded before" if self.known else ""
        return (
            f"{self.variant} with {self.config} took {self.fastest_us:.4g} us, and its bound says "
            f"{self.bound_us:.4g}{when}: until that is resolved, its bounds prune and prove nothing"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tie:
    """A configuration that noise does not tell from the best.

    Attributes:
        variant: Key of its variant.
        config: The configuration.
        median_us: Its time.
    """

    variant: str
    config: Config
    median_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a run found.

    Attributes:
        workload: Canonical text of the problem.
        device: Key of the device.
        how: ``"measured"`` or ``"predicted"``; None if no configuration succeeded.
        variant: Key of the best variant.
        config: Its best configuration: its default, unless another beats that beyond noise.
        median_us: Time of that, measured or predicted.
        ci_us: 95 % confidence interval of a measured median.
        is_default: Whether the best is that default.
        default_us: Time of the same variant's default configuration, if it succeeded.
        baselines: What libraries take, fastest first.
        bound_us: No configuration of any variant can be faster; 0 once a bound is violated.
        gap: `median_us` over the lowest bound that is still open (see `optimality_proof`), 1 if it is proved
            optimal; None if something open has no bound. Of a prediction, `predicted / bound_us`.
        optimality proof: What is proved of the best among the configurations of all variants that were searched;
            None of a prediction, which proves nothing of time.
        assumed: Whether the bound, and with it the optimality proof, rests on assumed rates.
        outside: Variants of the operator that were not searched: the optimality proof says nothing of them.
        versus: How the best stands to the `default`, the `runner_up` and the `baseline`, as far as they
            were timed in the same rounds.
        ties: Configurations that noise does not tell from the best, fastest first.
        violations: Runs that were faster than their bounds.
        audited: How many configurations were run to check the bound that had pruned them.
        trials: How many trials ended in each outcome class.
        masked: Configurations that no run could make the best.
        cached: Configurations whose outcome was known already.
        seconds: Wall time, and its parts: compile, verify, measure (summed over workers) and overhead.
        database: Where the records are.
        interrupted: Whether the run was stopped before its budget was spent.
        skipped: Variants that were not tried, and libraries that could not be timed, each with the reason;
            `baselines` if all libraries were given up.
        warm: Records of other devices and of related problems that the search began with.
        unlikely: Open configurations that the calibrated pruner passed over: unlikely to win, never proved.
        unlikely_winners: How many of those are expected to be faster than the best, all the same.
        interval_us: What nine of ten times lie between, where `median_us` is predicted.
        fleet: The workers of a cluster, if it was one that measured.
        stopped: Why the run ended early, where it was not asked to.
    """

    workload: str
    device: str
    how: str | None
    variant: str | None
    config: Config | None
    median_us: float | None
    ci_us: tuple[float, float] | None
    is_default: bool
    default_us: float | None
    baselines: tuple[Baseline, ...]
    bound_us: float
    gap: float | None
    optimality_proof: OptimalityProof | None
    assumed: bool
    outside: tuple[str, ...]
    versus: Mapping[str, Comparison]
    ties: tuple[Tie, ...]
    violations: tuple[Violation, ...]
    audited: int
    trials: Mapping[str, int]
    masked: int
    cached: int
    seconds: Mapping[str, float]
    database: str
    interrupted: bool
    skipped: Mapping[str, str]
    warm: tuple[Source, ...] = ()
    unlikely: int = 0
    unlikely_winners: float = 0.0
    interval_us: tuple[float, float] | None = None
    fleet: Fleet | None = None
    stopped: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data, with the fastest baseline under `baseline` and `baseline_us`."""
        data = dataclasses.asdict(self)
        data["config"] = dict(self.config) if self.config is not None else None
        for name in ("ties", "violations"):
            data[name] = [{**one, "config": dict(one["config"])} for one in data[name]]
        data["optimality_proof"] = (
            self.optimality_proof.to_json() if self.optimality_proof is not None else None
        )
        data["versus"] = {name: found.to_json() for name, found in self.versus.items()}
        for baseline in data["baselines"]:
            del baseline["samples_us"]
        fastest = self.baselines[0] if self.baselines else None
        data["baseline"] = fastest.name if fastest else None
        data["baseline_us"] = fastest.median_us if fastest else None
        return data


Watcher = Callable[[Progress], None]
"""Is told where a run stands after every trial."""
