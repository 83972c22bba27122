"""Memory plans as JSON files.

    write_plan(plan, "plan.json")
    plan = read_plan("plan.json", step)

A file holds the schedule and a digest of the step, not the step itself. `read_plan` accepts a file only for a
step with the same operations, tensors and sizes, and executes the schedule in the simulator. The times of the
step may be others, such as those of another device.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tunebench._foreign_file import interpreting, read_table
from tunebench._private_file import replaceable
from tunebench.errors import InputError
from tunebench.training.memory.bound import lower_bound_us
from tunebench.training.memory.planner import MemoryPlan
from tunebench.training.memory.schedule import Action, Compute, CopyIn, CopyOut, Free
from tunebench.training.memory.simulation import simulate
from tunebench.training.memory.step import TrainingStep

__all__ = ["content_of", "plan_for", "plan_of", "read_plan", "write_plan"]

FORMAT = "tunebench memory plan"
VERSION = 1

LARGEST_BYTES = 256 << 20
"""Largest size of a file."""

_KINDS: Mapping[str, Callable[[int], Action]] = {
    "run": Compute,
    "free": Free,
    "copy out": CopyOut,
    "copy in": CopyIn,
}


def write_plan(plan: MemoryPlan, path: str | Path) -> None:
    """Write a plan to a file, replacing an existing file atomically.

    Args:
        plan: The plan.
        path: File to write.

    Raises:
        InputError: The file cannot be written.
    """
    path = replaceable(Path(path))
    part = path.with_name(f".{path.name}.part")
    try:
        try:
            part.write_text(json.dumps(content_of(plan), allow_nan=False) + "\n", encoding="utf-8")
            # A reader sees the old file or the new one, never a part of it.
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"cannot write the plan to {path}: {error.strerror or error}") from None


def read_plan(path: str | Path, step: TrainingStep) -> MemoryPlan:
    """Return the plan that a file holds, with times and bytes of the given step.

    Args:
        path: File that `write_plan` wrote.
        step: The training step.

    Raises:
        InputError: The file cannot be read, is damaged, or holds a plan of another step.
    """
    content = read_table(path, "plan ", LARGEST_BYTES)
    if content.get("format") != FORMAT:
        raise InputError(f"{path} is not a memory plan: expected a file that `tunebench plan memory` wrote")
    if content.get("version") != VERSION:
        raise InputError(
            f"{path} is a memory plan of version {content.get('version')!r}, expected {VERSION}: plan again"
        )
    with interpreting(f"{path} is damaged"):
        return plan_of(content, step, str(path))


def plan_for(plan: MemoryPlan, step: TrainingStep) -> MemoryPlan:
    """Return a plan with times and bytes of another profile of the same step.

    Args:
        plan: The plan.
        step: The training step.

    Raises:
        InputError: The plan is of another step.
    """
    return plan_of(content_of(plan), step, "the plan")


def content_of(plan: MemoryPlan) -> dict[str, Any]:
    """Return what a file holds of a plan, as values of JSON."""
    kinds = {kind: name for name, kind in _KINDS.items()}
    return {
        "format": FORMAT,
        "version": VERSION,
        "step": {
            "operations": len(plan.step.operations),
            "tensors": len(plan.step.tensors),
            "resident_bytes": plan.step.resident_bytes,
            "digest": _digest(plan.step),
            "times_digest": _times_digest(plan.step),
        },
        "link": None if plan.step.link is None else asdict(plan.step.link),
        "budget_bytes": plan.budget_bytes,
        "peak_bytes": plan.simulation.peak_bytes,
        "step_us": plan.simulation.step_us,
        "lower_us": plan.lower_us,
        "optimal": plan.optimal,
        "schedule": [[kinds[type(action)], _index(action)] for action in plan.schedule],
    }


def plan_of(content: Mapping[str, Any], step: TrainingStep, path: str) -> MemoryPlan:
    """Return the plan of a file's content.

    Args:
        content: What `content_of` returned, or what somebody has put in its place.
        step: The training step.
        path: What the content is, for messages.

    Raises:
        KeyError, TypeError, ValueError: The content is damaged.
        InputError: The plan is of another step.
    """
    _require_same_step(content["step"], step, path)
    schedule = tuple(_action(entry) for entry in content["schedule"])
    budget_bytes = _integer(content["budget_bytes"])
    for action in schedule:
        targets = step.operations if isinstance(action, Compute) else step.tensors
        if not 0 <= _index(action) < len(targets):
            raise ValueError(f"the step has no {action}")
    try:
        simulation = simulate(step, schedule, budget_bytes=budget_bytes)
    except InputError as error:
        raise InputError(f"{path} does not fit this step: {error}. Plan again.") from None
    # With other times the schedule is still valid, but its lower bound and proof of optimality are not.
    same_times = content["step"]["times_digest"] == _times_digest(step)
    lower_us = lower_bound_us(step, budget_bytes)
    if same_times:
        lower_us = max(lower_us, min(float(content["lower_us"]), simulation.step_us))
    return MemoryPlan(
        step=step,
        budget_bytes=budget_bytes,
        schedule=schedule,
        simulation=simulation,
        lower_us=lower_us,
        optimal=same_times and content["optimal"] is True,
    )


def _require_same_step(described: Mapping[str, Any], step: TrainingStep, path: str) -> None:
    if described["digest"] == _digest(step):
        return
    planned = f"{described['operations']} operations on {described['tensors']} tensors"
    actual = f"{len(step.operations)} operations on {len(step.tensors)} tensors"
    difference = (
        f"planned {planned}, given {actual}" if planned != actual else "its operations or sizes differ"
    )
    raise InputError(
        f"{path} is of another training step ({difference}): plan again for this model, these inputs and "
        "this version of torch"
    )


def _action(entry: Any) -> Action:
    kind, index = entry
    if kind not in _KINDS:
        raise ValueError(f"{kind!r} is not an action: expected one of {', '.join(_KINDS)}")
    return _KINDS[kind](_integer(index))


def _integer(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"expected a whole number, found {value!r}")
    return value


def _index(action: Action) -> int:
    """Return the operation or tensor of an action."""
    return action.operation if isinstance(action, Compute) else action.tensor


def _digest(step: TrainingStep) -> str:
    """Return a digest of what a schedule depends on: operations, tensors and sizes, not times."""
    tensors = [(tensor.name, tensor.size_bytes, tensor.resident) for tensor in step.tensors]
    operations = [
        (
            operation.name,
            operation.inputs,
            operation.outputs,
            operation.workspace_bytes,
            operation.recomputable,
        )
        for operation in step.operations
    ]
    return _hash([tensors, operations, step.results])


def _times_digest(step: TrainingStep) -> str:
    """Return a digest of the times of operations and copies."""
    link = None if step.link is None else asdict(step.link)
    return _hash([[operation.time_us for operation in step.operations], link])


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
