"""Options of a run as the database stores them: which of them must be equal to resume it, and its repetition.

`RUN_OPTIONS` is the only list of what a run is made of. A new field of `Plan` needs an entry: a test compares
both. The trials of an interrupted run are charged to the next run only if every option that decides what is
searched or how it is measured is equal, so that all of them count in its search.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shlex
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunebench._command import command_line
from tunebench.db.record import InterruptedRun
from tunebench.errors import InputError
from tunebench.measure.observer import absolute_observers
from tunebench.measure.timing import Protocol
from tunebench.objective import FUNCTION
from tunebench.tuning.plan import Plan

__all__ = [
    "RUN_OPTIONS",
    "SHOWN_ID",
    "RunOption",
    "UnresumedRun",
    "changed_options",
    "is_same_search",
    "repeated_plan",
    "run_options",
    "unresumed",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOption:
    """How a field of `Plan` takes part in resuming and repeating a run.

    Attributes:
        flag: Option of `tunebench tune` that sets it; empty if the device decides.
        resumes: Whether a run with another value may resume an interrupted one.
        why: Reason for `resumes`.
    """

    flag: str
    resumes: bool
    why: str


def _must_equal(flag: str, why: str) -> RunOption:
    return RunOption(flag=flag, resumes=False, why=why)


def _may_differ(flag: str, why: str) -> RunOption:
    return RunOption(flag=flag, resumes=True, why=why)


RUN_OPTIONS: Mapping[str, RunOption] = {
    "sampler": _must_equal("--sampler", "proposes other configurations"),
    "seed": _must_equal("--seed", "proposes other configurations, and draws other inputs"),
    "variants": _must_equal("--variant", "searches other variants"),
    "audit": _must_equal("--audit", "runs other configurations"),
    "warm": _must_equal("--no-warm", "proposes other configurations"),
    "learned_pruner": _must_equal("--learned-pruner", "postpones other configurations"),
    "protocol": _must_equal("--cache", "times of other protocols do not compare"),
    "offline": _must_equal("", "predictions and measurements do not compare"),
    "timeout_s": _must_equal("--timeout", "decides which configurations fail"),
    "objectives": _must_equal("--objective", "proposes other configurations"),
    "require": _must_equal("--require", "proposes other configurations"),
    "observers": _may_differ("--observe", "observes the same measurements"),
    "metrics": _may_differ("--metric", "computed of the same measurements"),
    "variant_files": _may_differ("--variant-file", "only their variants count, and stale trials do not"),
    "trials": _may_differ("--trials", "a larger budget continues the same search"),
    "minutes": _may_differ("--minutes", "a longer time limit continues the same search"),
    "stop_at_gap": _may_differ("--stop-at-gap", "ends the same search earlier or later"),
    "retry_failed": _may_differ("--retry-failed", "repeats failed configurations of the same search"),
    "finalists": _may_differ("--finalists", "applies after the search"),
    "baselines": _may_differ("--no-baselines", "applies after the search"),
    "workers": _may_differ("--workers", "changes how many compile at a time, not what is measured"),
    "cluster": _may_differ("--cluster", "the key of the device does not depend on the worker that measures"),
}
"""Every field of `Plan`."""

SHOWN_ID = 12
"""Characters of the id of a run that messages and lists show, which `tune --repeat` accepts."""

SHARED_BUDGET = "shared_budget"
"""Stored next to the options: the suite whose budget the run shared; empty if it shared none."""


def run_options(
    plan: Plan, *, variants: Collection[str], predicts: bool, shared_budget: str = ""
) -> dict[str, Any]:
    """Return every option of a run, as plain data.

    Args:
        plan: The tuning plan.
        variants: Keys of the variants that are searched.
        predicts: Whether times are predicted, because the device is absent.
        shared_budget: Name of the suite or profile that shares the budget of the run.
    """
    options = {name: getattr(plan, name) for name in RUN_OPTIONS}
    is_restricted = plan.variants or plan.variant_files
    return {
        **options,
        "trials": plan.trial_budget,
        "variants": sorted(variants) if is_restricted else [],
        "variant_files": {str(Path(name).absolute()): _digest(Path(name)) for name in plan.variant_files},
        "protocol": dataclasses.asdict(plan.protocol),
        **plan.goal.stored(),
        "observers": list(absolute_observers(plan.observers)),
        "offline": predicts,
        SHARED_BUDGET: shared_budget,
    }


def _digest(path: Path) -> str:
    """Return a hash of the bytes of a file; empty if it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def _complete(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return stored options; an option that was added since has its default, as it had no effect before."""
    defaults = run_options(Plan(), variants=(), predicts=False)
    return {**defaults, **stored, "protocol": {**defaults["protocol"], **stored.get("protocol", {})}}


def is_same_search(options: Mapping[str, Any], stored: Mapping[str, Any]) -> bool:
    """Return whether a run may resume an interrupted run, given the stored options of both."""
    options, stored = _complete(options), _complete(stored)
    return all(options[name] == stored[name] for name, option in RUN_OPTIONS.items() if not option.resumes)


def changed_options(options: Mapping[str, Any], base: Mapping[str, Any] | None = None) -> str:
    """Return the options of a run that differ from others, as a user writes them for `tunebench tune`.

    Args:
        options: Stored options.
        base: Stored options to compare with. Default: those of a command without options.
    """
    complete, defaults = _complete(options), _complete(base or {})
    return " ".join(
        text
        for name in (*RUN_OPTIONS, SHARED_BUDGET)
        if complete[name] != defaults[name]
        for text in _written(name, complete[name], defaults[name])
    )


def _written(name: str, value: Any, default: Any) -> Iterator[str]:
    """Yield the parts of the text for an option whose value differs from `default`."""
    flag = RUN_OPTIONS[name].flag if name in RUN_OPTIONS else ""
    if name == SHARED_BUDGET:
        yield f"({value or 'a budget of its own'})"
    elif name == "offline":
        yield "(predicted)" if value else "(measured)"
    elif name == "protocol":
        changed = {field: value[field] for field in value if value[field] != default.get(field)}
        if "cache" in changed:
            yield f"{flag} {changed.pop('cache')}"
        yield from (f"({field}={setting})" for field, setting in changed.items())
    elif name == "metrics" and value:
        yield from (f"{flag} {shlex.quote(f'{metric}={text}')}" for metric, text in value.items())
    elif isinstance(value, bool):
        is_negative = flag.startswith("--no-")
        without = flag.replace("--no-", "--") if is_negative else f"(without {flag})"
        yield flag if value != is_negative else without
    elif value is None:
        yield f"(without {flag})"
    elif isinstance(value, list | tuple | dict):
        yield from (f"{flag} {shlex.quote(str(element))}" for element in value)
        if not value:
            yield f"(without {flag})"
    else:
        yield f"{flag} {shlex.quote(str(value))}"


# -- interrupted runs that another command does not resume -------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class UnresumedRun:
    """An interrupted run of the workload whose options differ, so that the report's run did not resume it.

    Attributes:
        id: Id of the run.
        started_at: Start, in ISO 8601, UTC.
        trials: Number of its trials.
        options: Its options that differ from those of the report's run; None for a run of an earlier version.
    """

    id: str
    started_at: str
    trials: int
    options: str | None

    def __str__(self) -> str:
        begun = f"run {self.id[:SHOWN_ID]} of {self.started_at[:16].replace('T', ' ')} UTC"
        ended = f"was interrupted after {self.trials} trial{'' if self.trials == 1 else 's'}"
        if self.options is None:
            return f"{begun}, of an earlier version that stored no options, {ended}; its results are kept"
        return f"{begun} with other options, {self.options}, {ended}"

    def command(self, db: str | None) -> str | None:
        """Return the command that continues the run; None if its options are unknown.

        Args:
            db: Value of `--db`; None for the default database.
        """
        return None if self.options is None else command_line("tune", repeat=self.id[:SHOWN_ID], db=db)


def unresumed(run: InterruptedRun, options: Mapping[str, Any]) -> UnresumedRun:
    """Return an interrupted run for the report of another one.

    Args:
        run: The interrupted run.
        options: Stored options of the other run.
    """
    return UnresumedRun(
        id=run.id,
        started_at=run.started_at.isoformat(),
        trials=run.trials,
        options=None if run.options is None else changed_options(run.options, options),
    )


# -- repetition --------------------------------------------------------------------------------------------


def repeated_plan(options: Mapping[str, Any], name: str) -> Plan:
    """Return the plan of a run, to repeat it.

    Args:
        options: Stored options of the run.
        name: The run in messages.

    Raises:
        InputError: if a variant file is gone or has changed, or the run shared its budget with others.
    """
    complete = _complete(options)
    if complete[SHARED_BUDGET]:
        raise InputError(
            f"{name} shared one budget with other workloads ({complete[SHARED_BUDGET]}) and cannot be "
            "repeated alone; repeat the whole command"
        )
    for path, digest in complete["variant_files"].items():
        if not Path(path).is_file():
            raise InputError(f"{name} cannot be repeated: its variant file {path} is gone; restore it")
        if _digest(Path(path)) != digest:
            raise InputError(
                f"{name} cannot be repeated: its variant file {path} has changed since; restore it, or tune "
                "the new one without --repeat"
            )
    for metric, text in complete["metrics"].items():
        if text.startswith(FUNCTION):
            raise InputError(f"{name} cannot be repeated: metric {metric} is a function of a program")
    fields = {
        **{name: complete[name] for name in RUN_OPTIONS},
        **{field: tuple(complete[field]) for field in ("objectives", "require", "observers")},
        "variants": tuple(complete["variants"]),
        "variant_files": tuple(complete["variant_files"]),
        "protocol": Protocol(**complete["protocol"]),
    }
    return Plan(**fields)
