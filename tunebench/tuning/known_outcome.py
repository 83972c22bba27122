"""Whether a recorded outcome answers for its trial, or the trial is run again: one policy for all runs.

A success answers if it has the kind and the cache state of the run, and a failure for as long as nothing
suggests that another attempt may succeed. No failure is for ever: `Plan.retry_failed` repeats all of them.

| recorded | run again |
|---|---|
| time-out, also of a compiler | if today's limit is longer, or other programs used the processors |
| failure for lack of a resource | if it was not tried in a new process, as in earlier versions |
| compile failure by a fault of earlier versions | always |
| not verified for lack of a compiler | if there is one now |
| any failure | with `Plan.retry_failed` |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tunebench.emulate.host_compiler import find_compiler
from tunebench.fault import names_environment, names_mended_fault
from tunebench.outcome import (
    CompileFailed,
    LaunchFailed,
    Measured,
    Outcome,
    Predicted,
    TimedOut,
    failed,
)
from tunebench.tuning.workers import COMPILE_TIMEOUT_S, user_code_limit_s

if TYPE_CHECKING:
    from tunebench.tuning.run_context import TuningSetup

__all__ = ["BUSY_ELSEWHERE", "answers", "is_suspect", "made_under_load"]

BUSY_ELSEWHERE = 0.25
"""Share of all processors that other programs used, above which a time-out proves nothing."""


def answers(setup: TuningSetup, outcome: Outcome) -> bool:
    """Return whether a recorded outcome is used, so that this run does not repeat the trial.

    Args:
        setup: The plan, and whether times are predicted.
        outcome: An outcome that was recorded with the current source.
    """
    if failed(outcome):
        return not setup.plan.retry_failed and not is_suspect(outcome) and not _may_finish(setup, outcome)
    if isinstance(outcome, Predicted):
        check = outcome.verification
        lacked_compiler = check.how == "not verified" and names_environment(check.detail)
        return setup.predicts and not (lacked_compiler and find_compiler() is not None)
    return not isinstance(outcome, Measured) or outcome.cache == setup.plan.protocol.cache


def is_suspect(outcome: Outcome) -> bool:
    """Return whether an outcome is a fault of the environment or of tunebench, recorded as one of the kernel.

    Earlier versions recorded such faults. This version records a fault of the environment only after a second
    attempt in a new process.
    """
    if isinstance(outcome, CompileFailed) and names_mended_fault(outcome.reason):
        return True
    return (
        isinstance(outcome, CompileFailed | LaunchFailed)
        and names_environment(outcome.reason)
        and "attempts" not in outcome.conditions
    )


def made_under_load(outcome: Outcome) -> bool:
    """Return whether an outcome is a time-out that was made while other programs used the processors."""
    conditions = _time_out(outcome)
    if conditions is None:
        return False
    elsewhere, load, cores = (_number(conditions, name) for name in ("busy_elsewhere", "load", "cores"))
    if elsewhere is not None:
        return elsewhere > BUSY_ELSEWHERE
    return load is not None and cores is not None and load > cores


def _may_finish(setup: TuningSetup, outcome: Outcome) -> bool:
    """Return whether a configuration that timed out may finish in this run."""
    conditions = _time_out(outcome)
    if conditions is None:
        return False
    limit_s = _number(conditions, "limit_s")
    return limit_s is None or limit_s < _limit_s(setup, outcome) or made_under_load(outcome)


def _limit_s(setup: TuningSetup, outcome: Outcome) -> float:
    """Return today's limit of what timed out, in seconds; 0 for what no option changes."""
    limited = outcome.conditions.get("limited") if isinstance(outcome, CompileFailed | TimedOut) else None
    if limited == "user code":
        return user_code_limit_s(setup.plan)
    if limited == "call":
        return setup.plan.timeout_s if isinstance(outcome, TimedOut) else COMPILE_TIMEOUT_S
    return 0.0


def _time_out(outcome: Outcome) -> Mapping[str, Any] | None:
    """Return the conditions of a time-out, also of a compiler; None for other outcomes.

    Time-outs of earlier versions have none, and are repeated once.
    """
    if isinstance(outcome, TimedOut):
        return outcome.conditions
    if isinstance(outcome, CompileFailed) and "limit_s" in outcome.conditions:
        return outcome.conditions
    return None


def _number(conditions: Mapping[str, Any], name: str) -> float | None:
    """Return a condition that is a number; a database may contain anything."""
    value = conditions.get(name)
    return float(value) if isinstance(value, int | float) else None
