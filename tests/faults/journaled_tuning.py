"""A real tuning session with a stand-in executor, whose store journals every committed measurement.

The journal is a file next to the database, flushed after each line. Whatever fault is injected, the database
must contain every line of it.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tunebench.db.store
from tunebench import device as devices
from tunebench.bound import bound
from tunebench.db.location import locate
from tunebench.db.record import NewMeasurement
from tunebench.db.store import Store
from tunebench.device import Device
from tunebench.executor import WorkerExecutor
from tunebench.kernels import load_file
from tunebench.outcome import Crashed, Measured, Outcome, Result, Verification
from tunebench.space import Config, Parameter, Space, Table
from tunebench.task import Task
from tunebench.tuning.plan import Plan
from tunebench.tuning.run import tune_one
from tunebench.tuning.run_context import TuningSetup
from tunebench.tuning.tunable import TunableVariant, TuningTarget
from tunebench.tuning.weighted_workload import WeightedWorkload
from tunebench.variant import Costs, Variant
from tunebench.workloads.operators.softmax import Softmax

__all__ = [
    "VARIANT",
    "journal_of_cli",
    "journaled_store",
    "outcomes",
    "register_variant",
    "run_cli",
    "tune",
    "tune_forever",
    "workload",
]

SIDE = 16
"""Values of each of the two parameters of `StandInVariant`."""


class StandInVariant(Variant[Softmax]):
    """A variant with 256 configurations that compute nothing; the default is the slowest."""

    name = "stand_in"
    operator = Softmax
    language = "numba-cpu"
    space = Space(
        (Parameter("a", tuple(range(SIDE)), "nothing"), Parameter("b", tuple(range(SIDE)), "nothing"))
    )

    def default(self, workload: Softmax, device: Device) -> Config:
        """Return the first configuration."""
        return Config({"a": 0, "b": 0})

    def costs(self, workload: Softmax, table: Table, device: Device) -> Costs:
        """Return costs of no work."""
        return Costs(blocks=1, full_blocks=0, threads=1)

    def revision(self, workload: Softmax, config: Config) -> str:
        """Return a constant revision, because nothing is compiled."""
        return "stand_in"


VARIANT = StandInVariant()


def workload(number: int) -> Softmax:
    """Return the workload with the given number."""
    return Softmax(rows=1, cols=number + 1, dtype="f32")


def outcome_of(workload: str, config: Config) -> Outcome:
    """Return the outcome of a configuration: a fixed time, or a crash for one configuration in sixteen."""
    drawn = zlib.crc32(f"{workload} {config}".encode())
    if config == Config({"a": 0, "b": 0}):
        drawn, us = 1, 1e6
    else:
        us = 10 + drawn % 100_003 / 100
    if drawn % 16 == 0:
        return Crashed(reason=f"signal {drawn % 64}")
    return Measured(
        median_us=us,
        ci_us=(us * 0.999, us * 1.001),
        samples_us=(us * 0.999, us, us * 1.001),
        cache="cold",
        verification=Verification(how="reference", detail="all elements", worst=0.0),
    )


def register_variant() -> None:
    """Register the variant for lookups, like a variant of a user's file."""
    load_file(__file__)


def outcomes(workload: Softmax) -> Iterator[Outcome]:
    """Yield the outcome of every configuration."""
    for a, b in itertools.product(range(SIDE), repeat=2):
        yield outcome_of(str(workload), Config({"a": a, "b": b}))


class _StandInExecutor(WorkerExecutor[Task]):
    """Executor that returns prepared outcomes after 0 to 5 ms."""

    capacity = 3

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    @property
    def busy_s(self) -> float:
        """Always 0: nothing is compiled or measured."""
        return 0.0

    def submit(self, task: Task) -> Future[Result]:
        """Return a finished future, after 0 to 5 ms."""
        time.sleep(self._random.choice((0.0, 0.0, 0.001, 0.005)))
        future: Future[Result] = Future()
        future.set_result(Result(outcome=outcome_of(str(task.workload), task.config)))
        return future

    def close(self) -> None:
        """Do nothing: no task is running."""


class JournaledStore(Store):
    """A store that journals each measurement after committing it."""

    journal: int

    def record_together(
        self, measurements: Sequence[NewMeasurement], *, run_id: str | None = None
    ) -> list[int]:
        """Record measurements, then write and flush their journal lines."""
        ids = super().record_together(measurements, run_id=run_id)
        lines = [
            json.dumps(_line(id_, measurement)) + "\n"
            for id_, measurement in zip(ids, measurements, strict=True)
        ]
        os.write(self.journal, "".join(lines).encode())
        os.fsync(self.journal)
        return ids


def _line(measurement: int, addition: NewMeasurement) -> list[Any]:
    key, outcome = addition.key, addition.result.outcome
    median_us = getattr(outcome, "median_us", None)
    return [measurement, key.workload, str(key.config), addition.purpose, outcome.kind, median_us]


@contextmanager
def journaled_store(db: str, journal: Path) -> Iterator[JournaledStore]:
    """Open a database with a journal file."""
    store = JournaledStore(locate(db))
    store.journal = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    with store:
        yield store


def tune(store: Store, workload: Softmax, seed: int, trials: int = SIDE * SIDE) -> None:
    """Tune a workload as `tunebench.tune` does, with the stand-in executor.

    Args:
        store: The open database.
        workload: The workload to tune.
        seed: Seed of the sampler and of the executor's delays.
        trials: Number of trials.
    """
    device = devices.local_cpu()
    table = VARIANT.configs(workload, device)
    costs = VARIANT.costs(workload, table, device)
    traffic = workload.traffic()
    bounds = bound(costs, traffic, device, cache="cold", rows=len(table))
    tunables = [
        TunableVariant(
            variant=VARIANT,
            workload=workload,
            table=table,
            costs=costs,
            bounds=bounds,
            device=device,
            traffic=traffic,
        )
    ]
    plan = Plan(trials=trials, sampler="random", seed=seed, baselines=False, warm=False)
    target = TuningTarget(device=device, runner="cpu")
    setup = TuningSetup(target=target, plan=plan, store=store)
    weighted = WeightedWorkload(workload=workload, variants=tunables)
    with _StandInExecutor(seed) as executor:
        tune_one(setup, weighted, lambda: executor, lambda progress: None)


def tune_forever(db: str, journal: Path, seed: int, workloads: int) -> None:
    """Tune workloads one after the other, starting at the last one in the database.

    Args:
        db: Path or URL of the database.
        journal: The journal file.
        seed: Seed of the sampler.
        workloads: Number of the last workload.
    """
    with journaled_store(db, journal) as store:
        for number in range(max(0, store.stats().workloads - 1), workloads):
            tune(store, workload(number), seed)


def run_cli(db: str, journal: str, *arguments: str) -> int:
    """Run a command of tunebench whose store has a journal, and return its exit code."""
    journal_of_cli(journal)
    from tunebench import cli

    return cli.run([*arguments, "--db", db])


def journal_of_cli(journal: str) -> None:
    """Give the stores that commands of this process open a journal."""
    JournaledStore.journal = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    setattr(tunebench.db.store, "Store", JournaledStore)  # noqa: B010 (mypy refuses the assignment)
