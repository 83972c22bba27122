"""Plan files: written, read, and refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.plan_memory_reference import chain_step, random_step
from tunebench.errors import InputError
from tunebench.training.memory import (
    HostLink,
    MemoryPlan,
    PlanEffort,
    least_budget,
    plan_memory,
    read_plan,
    write_plan,
)

LINK = HostLink(to_host_gb_s=1e-3, to_device_gb_s=1e-3)
EFFORT = PlanEffort(exact_operations=0, rounds=2, relaxed_size=0)
STEP = chain_step(5, link=LINK)


def _plan() -> MemoryPlan:
    return plan_memory(STEP, 4, effort=EFFORT)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    write_plan(_plan(), path)
    return path


def test_a_plan_that_is_written_and_read_is_the_same(tmp_path: Path) -> None:
    for seed in range(5):
        step = random_step(seed)
        plan = plan_memory(step, least_budget(step, effort=EFFORT).budget_bytes, effort=EFFORT)
        write_plan(plan, tmp_path / "plan.json")
        assert read_plan(tmp_path / "plan.json", step) == plan
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]


def test_a_step_with_other_times_takes_the_schedule_but_no_proof(written: Path) -> None:
    plan = _plan()
    data = json.loads(written.read_text())
    written.write_text(json.dumps(data | {"optimal": True}))
    assert read_plan(written, plan.step).optimal
    slower = replace(
        plan.step,
        operations=tuple(
            replace(operation, time_us=2 * operation.time_us) for operation in plan.step.operations
        ),
    )
    reread = read_plan(written, slower)
    assert reread.schedule == plan.schedule
    assert reread.simulation.compute_us == 2 * plan.simulation.compute_us
    assert not reread.optimal


def test_a_plan_of_another_step_is_refused(written: Path) -> None:
    with pytest.raises(
        InputError, match=r"another training step.*planned 10 operations.*given 12 operations"
    ):
        read_plan(written, chain_step(6, link=LINK))
    with pytest.raises(InputError, match=r"operations or sizes differ.*plan again"):
        read_plan(written, chain_step(5, size_bytes=2, link=LINK))


def test_a_plan_that_swaps_needs_a_link(tmp_path: Path) -> None:
    step = chain_step(5, link=LINK).without_recomputation()
    write_plan(plan_memory(step, 4, effort=EFFORT), tmp_path / "plan.json")
    with pytest.raises(InputError, match=r"does not fit this step.*needs a link.*Plan again"):
        read_plan(tmp_path / "plan.json", step.without_link())


def _without(key: str) -> Callable[[dict[str, Any]], None]:
    return lambda data: data.pop(key)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda data: data.update(format="other"), "not a memory plan"),
        (lambda data: data.update(version=2), "of version 2, expected 1: plan again"),
        (_without("step"), "damaged: 'step' is missing"),
        (_without("budget_bytes"), "damaged: 'budget_bytes' is missing"),
        (lambda data: data.update(budget_bytes="8"), "expected a whole number, found '8'"),
        (lambda data: data.update(budget_bytes=1), "does not fit this step: .*above 1"),
        (lambda data: data.update(schedule=7), "damaged: 'int' object is not iterable"),
        (lambda data: data["schedule"].pop(0), "does not fit this step: invalid schedule at action 0"),
        (
            lambda data: data["schedule"].append(["fly", 0]),
            "'fly' is not an action: expected one of run, free",
        ),
        (lambda data: data["schedule"].append(["run", 10]), r"the step has no Compute\(operation=10\)"),
        (lambda data: data["schedule"].append(["free", -1]), r"the step has no Free\(tensor=-1\)"),
        (lambda data: data["schedule"].append(["free", True]), "expected a whole number, found True"),
        (lambda data: data["schedule"].append(["free"]), "damaged: not enough values"),
        (lambda data: data["schedule"].append([["x"], 1]), "damaged: "),
    ],
)
def test_a_damaged_file_is_refused_with_the_reason(
    written: Path, change: Callable[[dict[str, Any]], None], found: str
) -> None:
    data = json.loads(written.read_text())
    change(data)
    written.write_text(json.dumps(data))
    with pytest.raises(InputError, match=found):
        read_plan(written, _plan().step)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10**6), st.binary(max_size=3))
def test_a_file_with_other_bytes_is_refused_or_read(written: Path, place: int, other: bytes) -> None:
    good = written.read_bytes()
    at = place % len(good)
    damaged = written.with_name("damaged.json")
    damaged.write_bytes(good[:at] + other + good[at + 1 :])
    try:
        plan = read_plan(damaged, STEP)
    except InputError as error:
        refused = str(error)
    else:
        assert plan.simulation.peak_bytes <= plan.budget_bytes
        return
    assert str(damaged) in refused


def test_files_that_cannot_be_read_or_written_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"plan .*none\.json cannot be read: No such file"):
        read_plan(tmp_path / "none.json", STEP)
    (tmp_path / "list.json").write_text("[" * 100_000)
    with pytest.raises(InputError, match="is nested more than 32 levels deep"):
        read_plan(tmp_path / "list.json", STEP)
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(InputError, match="must be an object"):
        read_plan(tmp_path / "other.json", STEP)
    with pytest.raises(InputError, match=r"cannot write the plan to .*: Not a directory"):
        write_plan(_plan(), tmp_path / "other.json" / "plan.json")
    with pytest.raises(InputError, match=r"cannot write the plan to .*: Is a directory"):
        write_plan(_plan(), tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"list.json", "other.json"}
