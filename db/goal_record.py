"""The records that answer a goal: the best of an objective, or the Pareto front of several."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tunebench.db.record import RECORDED, Record, TrialKey
from tunebench.errors import InputError
from tunebench.objective import FUNCTION, Goal, resource_quantities, workload_quantities
from tunebench.outcome import FAILURES, Measured, Predicted, WrongResult
from tunebench.workloads import parse

__all__ = ["completed_record", "goal_records", "stored_goal"]


def goal_records(records: Iterable[Record], goal: Goal) -> list[Record]:
    """Return the records that no other one dominates, the best of the first objective first.

    With one objective, it is the best alone. As in `answer_v1`, a trial is represented by its newest success,
    unless it failed since or ever had a wrong result; a measurement of tunebench must be verified and not
    below its lower bound; and of times, once finalists were measured only they count, if they beat their
    default beyond noise.

    Args:
        records: Records of one workload on one device, of one kind and one cache state, oldest first.
        goal: The objectives and requirements.
    """
    current = [completed_record(record, goal) for record in _current(records)]
    finalists = [record for record in current if record.purpose == "finalist"]
    if goal.is_time and finalists:
        current = _beyond_noise(finalists, goal)
    return [current[index] for index in goal.front([record.result.outcome for record in current])]


def _beyond_noise(finalists: Sequence[Record], goal: Goal) -> list[Record]:
    """Return the finalists without those that do not beat their default, if the goal allows the default."""
    defaults = {
        record.key.variant
        for record in finalists
        if record.verdict.versus_default == "itself" and goal.allows(record.result.outcome)
    }
    return [
        record
        for record in finalists
        if record.verdict.versus_default != "not faster" or record.key.variant not in defaults
    ]


def completed_record(record: Record, goal: Goal) -> Record:
    """Return a record with the metrics of a goal, as far as its quantities are known.

    Args:
        record: The record.
        goal: The metrics, objectives and requirements.
    """
    try:
        sizes = (
            {}
            if record.key.workload.startswith(RECORDED)
            else workload_quantities(parse(record.key.workload))
        )
    except InputError:  # of an operator that is not loaded
        sizes = {}
    quantities = sizes | resource_quantities(record.key.config, record.result.resources)
    outcome = goal.completed(record.result.outcome, quantities)
    return dataclasses.replace(record, result=dataclasses.replace(record.result, outcome=outcome))


def stored_goal(options: Mapping[str, Any] | None) -> Goal:
    """Return the goal of a run; metrics that were functions of a program are left out.

    Args:
        options: Stored options of the run; None without any.
    """
    stored = options or {}
    metrics = {
        name: text for name, text in stored.get("metrics", {}).items() if not text.startswith(FUNCTION)
    }
    try:
        return Goal.parse(
            metrics=metrics, objectives=stored.get("objectives", ()), require=stored.get("require", ())
        )
    except InputError:  # of another version
        return Goal()


def _current(records: Iterable[Record]) -> Sequence[Record]:
    """Return the newest success of each trial that may answer."""
    newest: dict[TrialKey, Record] = {}
    wrong: set[TrialKey] = set()
    for record in records:
        outcome = record.result.outcome
        if isinstance(outcome, WrongResult):
            wrong.add(record.key)
        elif isinstance(outcome, Measured | Predicted) and not record.stale:
            newest[record.key] = record
        elif isinstance(outcome, FAILURES):
            newest.pop(record.key, None)
    return [record for key, record in newest.items() if key not in wrong and _may_answer(record)]


def _may_answer(record: Record) -> bool:
    outcome = record.result.outcome
    if not isinstance(outcome, Measured) or record.key.workload.startswith(RECORDED):
        return True
    return outcome.verification.how != "not verified" and outcome.median_us >= (record.bound_us or 0.0)
