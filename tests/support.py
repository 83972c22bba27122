"""Requirements of tests (`needs_*`), stand-in outcomes and executors, and waiting without a fixed delay."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tunebench import device, kernels
from tunebench.binary.disassembly import find_disassembler
from tunebench.compile import unavailable
from tunebench.db import RunStart, TrialKey, open_store
from tunebench.device import Device
from tunebench.emulate.host_compiler import find_compiler
from tunebench.executor import WorkerExecutor
from tunebench.outcome import CacheState, Measured, Outcome, Resources, Result, Verification, median_interval
from tunebench.variant import Variant
from tunebench.workload import Workload
from tunebench.workloads import parse

T = TypeVar("T")
V = TypeVar("V", bound=Variant[Any])

# -- requirements ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """Something a test needs that a machine may not have.

    Attributes:
        missing: Returns why the requirement is not met, or None.
        mark: The mark that selects tests with this requirement (see `markers` in pyproject.toml), if any.
    """

    missing: Callable[[], str | None]
    mark: str | None = None


def _package(name: str, extra: str | None = None) -> Callable[[], str | None]:
    reason = f"the extra `{extra}` is not installed" if extra else f"{name} is not installed"
    return lambda: None if importlib.util.find_spec(name) else reason


def _unless(is_met: Callable[[], Any], reason: str) -> Callable[[], str | None]:
    return lambda: None if is_met() else reason


def _no_browser() -> str | None:
    if not all(map(importlib.util.find_spec, ("playwright", "starlette", "uvicorn"))):
        return "playwright or the extra `dashboard` is not installed"
    return None if shutil.which("chromium") or shutil.which("google-chrome") else "Chromium is not installed"


def _no_postgres() -> str | None:
    from tunebench.testing.postgres import unavailable as missing

    return missing()


REQUIREMENTS = {
    "compiler": Requirement(
        missing=_unless(find_compiler, "no C++ compiler on this machine"), mark="emulator"
    ),
    "nvrtc": Requirement(missing=lambda: unavailable("cuda"), mark="cuda"),
    "numba-cuda": Requirement(missing=lambda: unavailable("numba-cuda"), mark="cuda"),
    "disassembler": Requirement(missing=_unless(find_disassembler, "no nvdisasm on this machine")),
    "gpu": Requirement(missing=_unless(device.local_gpus, "no GPU on this machine"), mark="gpu"),
    "no-gpu": Requirement(missing=lambda: "this machine has a GPU" if device.local_gpus() else None),
    "torch": Requirement(missing=_package("torch", "torch"), mark="torch"),
    "triton": Requirement(missing=lambda: unavailable("triton"), mark="cuda"),
    "postgres": Requirement(missing=_no_postgres, mark="server"),
    "browser": Requirement(missing=_no_browser, mark="browser"),
    "ray": Requirement(missing=_package("ray", "cluster"), mark="server"),
    "matplotlib": Requirement(missing=_package("matplotlib", "plot")),
    "pandas": Requirement(missing=_package("pandas", "dataframe")),
    "fork": Requirement(missing=_unless(lambda: hasattr(os, "fork"), "this system has no fork")),
    "fork-server": Requirement(missing=_unless(lambda: sys.platform == "linux", "forks need Linux")),
    "sqlite3": Requirement(
        missing=_unless(lambda: shutil.which("sqlite3"), "the sqlite3 shell is not installed")
    ),
}
"""Every requirement by its name, the argument of the mark `needs`."""

needs_compiler = pytest.mark.needs("compiler")
needs_nvrtc = pytest.mark.needs("nvrtc")
needs_numba_cuda = pytest.mark.needs("numba-cuda")
needs_cuda = pytest.mark.needs("nvrtc", "numba-cuda")
needs_disassembler = pytest.mark.needs("disassembler")
needs_gpu = pytest.mark.needs("gpu")
needs_no_gpu = pytest.mark.needs("no-gpu")
needs_torch = pytest.mark.needs("torch")
needs_triton = pytest.mark.needs("triton")
needs_triton_on_gpu = pytest.mark.needs("torch", "triton")
needs_postgres = pytest.mark.needs("postgres")
needs_browser = pytest.mark.needs("browser")
needs_ray = pytest.mark.needs("ray")
needs_matplotlib = pytest.mark.needs("matplotlib")
needs_pandas = pytest.mark.needs("pandas")
needs_fork = pytest.mark.needs("fork")
needs_sqlite3 = pytest.mark.needs("sqlite3")


@functools.cache
def missing(requirement: str) -> str | None:
    """Return why a requirement is not met on this machine, or None."""
    return REQUIREMENTS[requirement].missing()


# -- outcomes ----------------------------------------------------------------------------------------

VERIFIED = Verification(how="reference", detail="all elements", worst=0.25)
"""How every outcome of `measured` was verified unless the caller says otherwise."""


def measured(
    *samples_us: float,
    cache: CacheState = "cold",
    verification: Verification = VERIFIED,
    ci_us: tuple[float, float] | None = None,
    conditions: Mapping[str, Any] | None = None,
) -> Measured:
    """Return a measured outcome.

    Args:
        samples_us: Its samples; one is enough.
        cache: Cache state of the samples.
        verification: How the result was verified.
        ci_us: Confidence interval of the median; that of the samples by default.
        conditions: Clocks and other conditions of the measurement; none by default.
    """
    median_us, interval_us = median_interval(samples_us)
    return Measured(
        median_us=median_us,
        ci_us=ci_us or interval_us,
        samples_us=samples_us,
        cache=cache,
        verification=verification,
        conditions=conditions or {},
    )


def record_outcome(
    db: str | Path, workload: Workload | str, on: Device, variant: str, config: Any, outcome: Outcome
) -> None:
    """Record one outcome of a configuration in a database, with the variant's current source revision.

    Args:
        db: Path or URL of the database.
        workload: A workload or its text.
        on: Device of the record.
        variant: Key of the variant.
        config: A configuration or its text.
        outcome: The outcome.
    """
    workload = parse(workload) if isinstance(workload, str) else workload
    installed = kernels.variant(variant)
    config = installed.space.parse(config) if isinstance(config, str) else config
    with open_store(db) as store:
        store.begin_run(RunStart(device=on, workload=str(workload), sampler="bound", seed=0))
        key = TrialKey(
            device=on.key,
            workload=str(workload),
            variant=variant,
            revision=installed.revision(workload, config),
            config=config,
        )
        store.record(key, Result(outcome=outcome), bound_us=0.25)


class InstantExecutor(WorkerExecutor[T]):
    """Executor that answers at once, without a process.

    Args:
        answer: Returns the outcome of a task; an exception is raised by `submit`.
        capacity: Number of tasks in flight.

    Attributes:
        tasks: The answered tasks.
    """

    busy_s = 0.0

    def __init__(self, answer: Callable[[T], Outcome], capacity: int = 1) -> None:
        self._answer, self.capacity = answer, capacity
        self.tasks: list[T] = []

    def submit(self, task: T) -> Future[Result]:
        future: Future[Result] = Future()
        future.set_result(Result(outcome=self._answer(task), resources=Resources(code_bytes=8)))
        self.tasks.append(task)
        return future

    def close(self) -> None:
        """Do nothing: no task is running."""


# -- waiting -----------------------------------------------------------------------------------------


def until(condition: Callable[[], Any], what: str, limit_s: float = 120.0) -> Any:
    """Wait until a condition holds and return its value.

    Args:
        condition: Called every 10 ms until it returns something true.
        what: What is awaited, for the error.
        limit_s: Time until the wait fails; long, so that a busy machine does not reach it.

    Raises:
        AssertionError: The condition did not hold within the limit.
    """
    end = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {limit_s:g} s: {what}"
        time.sleep(0.01)
    return value


# -- variants ----------------------------------------------------------------------------------------


def package_variants(kind: type[V], operator: str | None = None) -> list[V]:
    """Return the variants of this package, without those of plugins and users' files.

    Args:
        kind: Base class of the variants, such as `CudaVariant`.
        operator: Name of their operator; None for all.
    """
    installed = kernels.variants(operator)
    return [
        v for v in installed if isinstance(v, kind) and type(v).__module__.startswith("tunebench.kernels.")
    ]
