"""A workload of a weighted list: one alone, a size range, a profile, or the layers of a suite."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tunebench.db.record import Record
from tunebench.errors import InputError, NoCompiler, UnknownName
from tunebench.kernels import variants
from tunebench.tuning.budget_scheduler import TaskState
from tunebench.tuning.plan import Plan
from tunebench.tuning.run_context import RunContext
from tunebench.tuning.tunable import TunableVariant, TuningTarget, find_variants
from tunebench.workload import Workload
from tunebench.workloads import parse, suite

__all__ = ["WeightedWorkload", "find_any", "suite_workloads"]


@dataclass(slots=True, kw_only=True)
class WeightedWorkload:
    """One workload with its weight, and the state of its tuning.

    Attributes:
        workload: The workload.
        count: Number of calls: per inference of a suite, or recorded in a profile.
        layers: Names of the layers of a suite that are this workload.
        variants: The variants that support it, the one that is predicted fastest first.
        skipped: Why other variants do not, by key.
        context: Its run, once prepared.
        task_state: Its state in the budget scheduler, once prepared.
        before: The best record before the run, if any.
        refused: Why no variant supports it.
        error: The error that ended its run.
    """

    workload: Workload
    count: int = 1
    layers: tuple[str, ...] = ()
    variants: list[TunableVariant] = field(default_factory=list)
    skipped: Mapping[str, str] = field(default_factory=dict)
    context: RunContext | None = None
    task_state: TaskState | None = None
    before: Record | None = None
    refused: str = ""
    error: str = ""

    def find_variants(
        self, target: TuningTarget, plan: Plan, names: Sequence[str], *, compilable: bool = True
    ) -> None:
        """Find the variants that support the workload; does nothing the second time.

        Raises:
            UnknownName: if a name is of no variant of the operator.
            InputError: if no variant supports the workload.
        """
        if self.variants:
            return
        self.variants, self.skipped = find_variants(
            self.workload,
            target.device,
            names,
            cache=plan.protocol.cache,
            compilable=compilable,
            libraries=plan.baselines,
            present=target.runner != "offline",
        )

    @property
    def expected_us(self) -> float:
        """Predicted time of the best configuration, in microseconds."""
        return self.variants[0].predicted_us(self.variants[0].fastest())

    @property
    def best_us(self) -> float:
        """Best time so far, in microseconds; infinite before the first success."""
        return self.context.best_us if self.context is not None else math.inf

    @property
    def now_us(self) -> float:
        """Time of all calls now, in microseconds; predicted before the first success."""
        return self.count * (self.best_us if math.isfinite(self.best_us) else self.expected_us)


def suite_workloads(
    source: str | Path | Mapping[Workload | str, int], batch: int
) -> tuple[str, tuple[WeightedWorkload, ...]]:
    """Return the name and the workloads of a suite, of a TOML file, or of a mapping to counts; each once.

    Args:
        source: Name of a suite, path of a file, or workloads with their counts.
        batch: Samples per inference, of a suite or a file.

    Raises:
        InputError: if it cannot be read, has no workload, or a count is less than 1.
    """
    if isinstance(source, Mapping):
        if batch != 1:
            raise InputError("batch applies to suites and files; workloads of a mapping have their sizes")
        name = f"{len(source)} workloads"
        counts = [
            (parse(workload) if isinstance(workload, str) else workload, count, "")
            for workload, count in source.items()
        ]
    else:
        name = str(source)
        counts = [(layer.workload, layer.count, layer.name) for layer in suite(source, batch)]
    workloads: dict[str, WeightedWorkload] = {}
    for workload, count, layer in counts:
        if count < 1:
            raise InputError(f"{workload}: its count must be 1 or more, got {count}")
        weighted = workloads.setdefault(str(workload), WeightedWorkload(workload=workload, count=0))
        weighted.count += count
        weighted.layers += (layer,) if layer else ()
    if not workloads:
        raise InputError("there is no workload to tune: give at least one")
    return name, tuple(workloads.values())


def find_any(
    name: str,
    workloads: Sequence[WeightedWorkload],
    target: TuningTarget,
    plan: Plan,
    names: Sequence[str],
    *,
    compilable: bool = True,
) -> None:
    """Find the variants of each workload of a suite; at least one workload must have some.

    Args:
        name: Name of the suite, for the error.
        workloads: Its workloads.
        target: Where they are tuned.
        plan: The tuning plan.
        names: Names or keys of variants. Operators that have one of them are tuned with those variants only.
        compilable: Whether to skip variants that cannot be compiled here.

    Raises:
        UnknownName: if a name is of no variant of any workload.
        InputError: if no variant supports any of the workloads.
        NoCompiler: likewise, and some variant only lacks its compiler.
    """
    failure: type[InputError] = InputError
    offered = {name: None for weighted in workloads for name in _variant_names(weighted.workload)}
    for variant in names:
        if variant not in offered:
            raise UnknownName("variant", variant, offered)
    for weighted in workloads:
        suited = _variant_names(weighted.workload)
        try:
            weighted.find_variants(target, plan, [n for n in names if n in suited], compilable=compilable)
        except InputError as error:
            weighted.refused = str(error)
            failure = NoCompiler if isinstance(error, NoCompiler) else failure
        weighted.variants.sort(  # libraries last: their predicted times are floors
            key=lambda tunable: (not tunable.variant.is_predictable, tunable.predicted_us(tunable.fastest()))
        )
    if not any(weighted.variants for weighted in workloads):
        raise failure(f"nothing of {name} can be tuned: {workloads[0].refused}")


def _variant_names(workload: Workload) -> list[str]:
    return [name for variant in variants(workload) for name in (variant.name, variant.key)]
