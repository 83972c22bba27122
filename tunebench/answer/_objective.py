"""Lookup of the best configuration of another objective than the time, among the records of one device."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tunebench import device as devices
from tunebench._command import command_line
from tunebench._figure import significant
from tunebench.answer._answer import Answer
from tunebench.answer._reader import AnswerRow
from tunebench.answer._target import LookupTarget, lookup_target
from tunebench.answer._validity import reason_invalid, reason_irreproducible
from tunebench.db.location import locate
from tunebench.device import Device
from tunebench.errors import LookupMiss
from tunebench.outcome import Measured, Predicted, time_us

if TYPE_CHECKING:
    from tunebench.db.record import Record
    from tunebench.objective import Goal

__all__ = ["lookup_goal"]


def lookup_goal(
    text: str,
    device: Device | str | None,
    db: str | Path | None,
    goal: Goal,
    variant: str | None = None,
    *,
    reproducible: bool = False,
) -> Answer:
    """Return the best recorded configuration by a goal; nothing is inferred from other workloads or devices.

    Measurements come before predictions, and cold caches before warm ones.

    Args:
        text: Canonical text of the workload.
        device: As in `tunebench.lookup`.
        db: As in `tunebench.lookup`.
        goal: One objective, and requirements.
        variant: Key of the only variant to consider.
        reproducible: As in `tunebench.answer.lookup_workload`.

    Raises:
        LookupMiss: No record has the objective and satisfies the requirements.
    """
    from tunebench.db.store import open_store

    target = lookup_target(device)
    location = locate(db)
    records: Sequence[Record] = ()
    if location.path is None or location.path.exists():
        with open_store(db, read_only=True) as store:
            records = store.history(text, target.key, variant)
    for group in _groups(records):
        best = _best(group, goal, target, device, reproducible=reproducible)
        if best is not None:
            return _answer(best, goal, str(location))
    asked = ", ".join(map(str, (*goal.chosen, *goal.requirements)))
    if reproducible:
        asked += " and reproducible results"
    command = command_line("tune", workload=text, objective=str(goal.chosen[0]), db=location.option)
    raise LookupMiss(f"no record of {text} on {target.key} has {asked}: `{command}` tunes for it")


def _groups(records: Iterable[Record]) -> list[list[Record]]:
    """Return the records by kind and cache state, in the order of preference; failures are in each."""
    groups: list[list[Record]] = [[], [], []]
    for record in records:
        outcome = record.result.outcome
        if isinstance(outcome, Measured):
            groups[outcome.cache == "warm"].append(record)
        elif isinstance(outcome, Predicted):
            groups[2].append(record)
        else:
            for group in groups:
                group.append(record)
    return groups


def _best(
    records: list[Record],
    goal: Goal,
    target: LookupTarget,
    device: Device | str | None,
    *,
    reproducible: bool,
) -> Record | None:
    """Return the best record whose source is unchanged, and whose results are reproducible if required."""
    from tunebench.db.goal_record import goal_records

    while best := goal_records(records, goal):
        row = _row(best[0], target)
        reason = reason_invalid(row, target, functools.partial(_described, device))
        if reason is None and reproducible:
            reason = reason_irreproducible(row.workload, row.variant, row.config)
        if reason is None:
            return best[0]
        records = [record for record in records if record.key != best[0].key]
    return None


def _described(device: Device | str | None) -> Device:
    return device if isinstance(device, Device) else devices.find(device)


def _row(record: Record, target: LookupTarget) -> AnswerRow:
    outcome = record.result.outcome
    us = time_us(outcome)
    assert isinstance(outcome, Measured | Predicted)
    assert us is not None
    return AnswerRow(
        device=record.key.device,
        architecture=target.architecture,
        workload=record.key.workload,
        variant=record.key.variant,
        config=record.key.config,
        revision=record.key.revision,
        predicted=isinstance(outcome, Predicted),
        cache=getattr(outcome, "cache", None),
        verification=outcome.verification.how,
        time_us=us,
        ci_us=getattr(outcome, "ci_us", None),
        bound_us=record.bound_us,
        recorded_at=record.recorded_at,
        measurement_id=record.id,
    )


def _answer(record: Record, goal: Goal, database: str) -> Answer:
    outcome, [objective] = record.result.outcome, goal.chosen
    values, us = goal.values(outcome), time_us(outcome)
    assert isinstance(outcome, Measured | Predicted)
    assert values is not None
    assert us is not None
    required = f", with {', '.join(map(str, goal.requirements))}" if goal.requirements else ""
    most = "greatest" if objective.maximize else "least"
    return Answer(
        workload=record.key.workload,
        device=record.key.device,
        how="predicted" if isinstance(outcome, Predicted) else "measured here",
        because=f"{most} {objective.name} of the recorded configurations{required}: {significant(values[0])}",
        variant=record.key.variant,
        config=record.key.config,
        expected_us=us,
        ci_us=getattr(outcome, "ci_us", None),
        interval_us=getattr(outcome, "interval_us", None),
        bound_us=record.bound_us,
        cache=getattr(outcome, "cache", None),
        verification=outcome.verification.how,
        revision=record.key.revision,
        recorded_at=record.recorded_at,
        database=database,
        metrics=dict(outcome.metrics),
    )
