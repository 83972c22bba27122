"""Times and plans of steps that are remembered between processes, and files that hold something else."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from tests.fork_server import Programs  # noqa: E402
from tunebench.training.fitting import fitter  # noqa: E402
from tunebench.training.fitting.fit import fit  # noqa: E402
from tunebench.training.fitting.fitter import FittedStep, fitted_steps  # noqa: E402
from tunebench.training.fitting.operation_time import measured_times  # noqa: E402
from tunebench.training.fitting.remembered_step import RememberedStep  # noqa: E402
from tunebench.training.memory import plan_memory  # noqa: E402

DATA = torch.linspace(-1, 1, 512 * 8).reshape(512, 8)


class Calls:
    """Counts measurements and searches for plans."""

    def __init__(self) -> None:
        self.measured = self.planned = 0

    def measured_times(self, *args: Any, **kwargs: Any) -> Any:
        self.measured += 1
        return measured_times(*args, **kwargs)

    def plan_memory(self, *args: Any, **kwargs: Any) -> Any:
        self.planned += 1
        return plan_memory(*args, **kwargs)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    counted = Calls()
    monkeypatch.setattr(fitter, "measured_times", counted.measured_times)
    monkeypatch.setattr(fitter, "plan_memory", counted.plan_memory)
    return counted


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of remembered plans in an empty cache folder."""
    monkeypatch.setenv("TUNEBENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "memory_plans"


def step_of(budget: str = "60%", rows: int = 512) -> tuple[FittedStep, list[Tensor]]:
    """Return the planned step of a small model, and its gradients."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())))
    fitted = fit(lambda x: model(x).square().mean(), budget)
    fitted(DATA[:rows]).backward()
    (step,) = fitted_steps(fitted)
    return step, [weight.grad for weight in model.parameters() if weight.grad is not None]


SECOND = """
import sys
from tests.training.fitting import test_remembered_step as tested
calls = tested.Calls()
tested.fitter.measured_times, tested.fitter.plan_memory = calls.measured_times, calls.plan_memory
step, gradients = tested.step_of()
print(step.remembered, calls.measured, calls.planned, step.plan.schedule == tested.step_of()[0].plan.schedule)
"""


@pytest.mark.slow
def test_a_second_process_neither_measures_nor_plans(cache: Path, calls: Calls, programs: Programs) -> None:
    first, gradients = step_of()
    assert (first.remembered, calls.measured, calls.planned) == (False, 1, 1)
    again, equal_gradients = step_of()
    assert (again.remembered, calls.measured, calls.planned) == (True, 1, 1)
    assert again.plan == first.plan
    assert (again.eager_us, again.overhead) == (first.eager_us, first.overhead)
    assert all(map(torch.equal, gradients, equal_gradients))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    environment["TUNEBENCH_CACHE"] = str(cache.parent)
    threads = f"import torch; torch.set_num_threads({torch.get_num_threads()})\n"
    done = programs.run(["-c", threads + SECOND], environment=environment, folder=cache.parent)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "0", "0", "True"]


@pytest.mark.slow
def test_what_decides_the_plan_makes_another_one(
    cache: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: list[Callable[[], Any]] = [
        step_of,
        lambda: step_of("70%"),
        lambda: step_of(rows=256),
        lambda: monkeypatch.setattr(torch, "__version__", "0.0") or step_of(),
    ]
    for number, change in enumerate(changes, start=1):
        change()
        assert calls.planned == number
        assert len(list(cache.iterdir())) == number


def _without(key: str) -> Callable[[bytes], bytes]:
    return lambda content: json.dumps(
        {name: value for name, value in json.loads(content).items() if name != key}
    ).encode()


def _with(**values: Any) -> Callable[[bytes], bytes]:
    return lambda content: json.dumps({**json.loads(content), **values}).encode()


def _with_plan(**values: Any) -> Callable[[bytes], bytes]:
    def changed(content: bytes) -> bytes:
        stored = json.loads(content)
        return json.dumps({**stored, "plan": {**stored["plan"], **values}}).encode()

    return changed


UNREADABLE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "half": lambda content: content[: len(content) // 2],
    "binary": lambda content: bytes(range(256)),
    "a list": lambda content: b"[]",
    "nested": lambda content: b"[" * 100_000,
    "no times": _without("times_us"),
    "negative times": _with(eager_us=-1.0),
    "no link": _with(link={"to_host_gb_s": 1.0}),
}

UNFIT: dict[str, Callable[[bytes], bytes]] = {
    "few times": _with(times_us=[1.0]),
    "no plan": _with(plan={}),
    "a foreign plan": _with_plan(step={"digest": "0", "operations": 1, "tensors": 1}),
    "an empty schedule": _with_plan(schedule=[]),
    "operations out of order": _with_plan(schedule=[["run", 3], ["run", 0]]),
    "a budget of no bytes": _with_plan(budget_bytes=0),
}


@pytest.mark.slow
def test_damaged_and_foreign_files_are_replaced(cache: Path, calls: Calls) -> None:
    gradients = step_of()[1]
    (path,) = cache.iterdir()
    content = path.read_bytes()
    for name, damage in UNREADABLE.items():
        path.write_bytes(damage(content))
        assert RememberedStep.read(path) is None, name
    for number, (name, damage) in enumerate(UNFIT.items(), start=2):
        path.write_bytes(damage(content))
        step, new_gradients = step_of()
        assert (step.remembered, calls.planned) == (False, number), name
        assert all(map(torch.equal, gradients, new_gradients)), name
    assert step_of()[0].remembered


@pytest.mark.slow
def test_a_full_disk_and_a_folder_of_others_lose_nothing(
    cache: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, target: Path) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        assert not step_of()[0].remembered
    assert not list(cache.iterdir())
    step_of()
    (path,) = cache.iterdir()
    path.chmod(0o666)  # as if another user had written it
    assert not step_of()[0].remembered
    assert calls.planned == 3


@pytest.mark.slow
def test_processes_that_plan_at_once_leave_one_file(cache: Path, tmp_path: Path, programs: Programs) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    together = """
import os, torch
torch.set_num_threads(1)
from tests.training.fitting.test_remembered_step import step_of
child = os.fork()
step, _ = step_of()
assert step_of()[0].remembered
if child:
    assert os.waitpid(child, 0)[1] == 0
print("planned", flush=True)
"""
    environment["TUNEBENCH_CACHE"] = str(cache.parent)
    done = programs.run(["-c", together], environment=environment, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["planned", "planned"]
    assert [path.suffix for path in cache.iterdir()] == [".json"]
