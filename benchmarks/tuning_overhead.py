"""Tuning overhead: trials per second with a kernel that does nothing, and overlap of compiling and measuring.

    python -m benchmarks.tuning_overhead [--trials 500]

Three results: milliseconds per trial of the whole loop (sampler, worker processes, one database transaction
to claim and one to record); the same without the database; and the wall time of delayed stages with overlap
of compiling and measuring, as for a GPU, and without, as on a CPU.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks import null_variant
from tunebench import device as devices
from tunebench.db.owner import new_owner
from tunebench.db.record import RunStart, TrialKey
from tunebench.db.store import open_store
from tunebench.executor.local import LocalExecutor
from tunebench.executor.process import ProcessStage
from tunebench.outcome import Result
from tunebench.search.loop import Budget, run_search
from tunebench.search.sampler import Prospects
from tunebench.search.variant_search import Proposal, VariantSearch
from tunebench.task import Task
from tunebench.workloads import parse

WORKLOAD = parse("softmax:rows=1,cols=1,dtype=f32")
DEVICE = devices.local_cpu()


def loop(
    executor: LocalExecutor,
    trials: int,
    claim: Callable[[Proposal], bool] = lambda proposal: True,
    on_result: Callable[[Proposal, Result], None] = lambda proposal, result: None,
) -> float:
    """Run trials and return the wall time in seconds.

    Args:
        executor: Executor with its workers.
        trials: Number of trials.
        claim: Claims a trial; False skips it.
        on_result: Called with each result.
    """
    table = null_variant.VARIANT.configs(WORKLOAD, DEVICE)
    search = VariantSearch(
        null_variant.VARIANT.key,
        Prospects(table=table, bounds_us=np.zeros(len(table))),
        sampler="bound",
        seed=0,
    )

    def make_task(proposal: Proposal) -> Task:
        return Task(variant=null_variant.VARIANT, workload=WORKLOAD, config=proposal.config, device=DEVICE)

    began = time.perf_counter()
    run_search(
        [search], executor, Budget(trials=trials), make_task=make_task, claim=claim, on_result=on_result
    )
    return time.perf_counter() - began


def executor(*, compile_s: float = 0.0, measure_s: float = 0.0, overlap: bool = True) -> LocalExecutor:
    """Return an executor whose workers have started.

    Args:
        compile_s: Delay of compiling, in seconds.
        measure_s: Delay of measuring, in seconds.
        overlap: Whether compiling may overlap measuring.
    """
    workers = LocalExecutor(
        compiling=ProcessStage(
            function=null_variant.compile_task,
            start=null_variant.start,
            start_arguments=(compile_s,),
            workers=2,
        ),
        measuring=ProcessStage(
            function=null_variant.measure_task, start=null_variant.start, start_arguments=(measure_s,)
        ),
        overlap=overlap,
    )
    loop(workers, 4)
    return workers


def recorded(trials: int) -> float:
    """Run trials with a database on disk and return the wall time in seconds."""
    with tempfile.TemporaryDirectory() as folder, open_store(Path(folder) / "a.db") as store:
        start = RunStart(device=DEVICE, workload=str(WORKLOAD), sampler="bound", seed=0)
        run_id, owner = store.begin_run(start), new_owner()

        def key(proposal: Proposal) -> TrialKey:
            return TrialKey(
                device=DEVICE.key,
                workload=str(WORKLOAD),
                variant=null_variant.VARIANT.key,
                revision="null",
                config=proposal.config,
            )

        with executor() as workers:
            return loop(
                workers,
                trials,
                claim=lambda proposal: store.claim(key(proposal), owner),
                on_result=lambda proposal, result: store.record(key(proposal), result, run_id=run_id),
            )


def main() -> None:
    """Print the overhead with and without the database, and the wall time with and without overlap."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=500, help="trials of each loop, default 500")
    trials = parser.parse_args().trials
    with executor() as workers:
        bare = loop(workers, trials)
    stored = recorded(trials)
    print(f"with database    {trials / stored:7.0f} trials/s  {stored / trials * 1e3:6.2f} ms per trial")
    print(f"without database {trials / bare:7.0f} trials/s  {bare / trials * 1e3:6.2f} ms per trial")
    for overlap in (True, False):
        with executor(compile_s=0.1, measure_s=0.05, overlap=overlap) as workers:
            wall = loop(workers, 40)
        print(
            f"40 trials of 0.1 s compiling (2 workers) and 0.05 s measuring, overlap={overlap}: {wall:.2f} s"
        )


if __name__ == "__main__":
    main()
