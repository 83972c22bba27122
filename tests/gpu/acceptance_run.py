"""Configurations of an acceptance run, the executor that runs them, and the tally of their outcomes."""

from __future__ import annotations

import dataclasses
import functools
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.gpu.acceptance_report import AcceptanceReport
from tests.gpu.child import ChildLimits, RunChild, last_answer, run_child
from tunebench._environment import binary_folder
from tunebench.bound import refine
from tunebench.compile import worker as compile_worker
from tunebench.device import Device
from tunebench.errors import InputError
from tunebench.executor import TaskRefused, WorkerExecutor
from tunebench.executor.local import LocalExecutor
from tunebench.executor.process import ProcessStage
from tunebench.kernels import variants
from tunebench.measure import worker as measure_worker
from tunebench.measure.timing import Protocol
from tunebench.outcome import Measured, Result, TimedOut, to_json
from tunebench.task import Task
from tunebench.tuning import tunable
from tunebench.tuning.tunable import TunableVariant
from tunebench.variant import GpuVariant, LibraryGpuVariant
from tunebench.workloads import parse

__all__ = [
    "AcceptanceItem",
    "AcceptanceRun",
    "HangCount",
    "OutcomeTally",
    "fault_of",
    "gpu_candidates",
    "in_turns",
    "items_to_verify",
    "library_items",
    "line_of",
    "run_items",
    "shuffled",
    "start_executor",
]

COMPILE_TIMEOUT_S, RUN_TIMEOUT_S = 60.0, 20.0
GRACE_S = 5.0
"""Time after the end of a step in which running configurations may still finish, in seconds."""
MOST_HANGS = 3
"""Hangs of a variant after which it is not run again in this run."""
MOST_QUOTED = 40
"""Most problems per step in the report; all of them are in the step's JSON Lines file."""


class HangCount:
    """Hangs of each variant in this run; a variant that hangs too often is not run again."""

    def __init__(self) -> None:
        self._hangs: Counter[str] = Counter()

    def add(self, variant: str) -> None:
        """Count a hang of a variant."""
        self._hangs[variant] += 1

    def allows(self, variant: str) -> bool:
        """Return whether the variant hung fewer than `MOST_HANGS` times."""
        return self._hangs[variant] < MOST_HANGS

    def refuse(self, task: Task) -> str | None:
        """Return why a task is not measured, for an executor."""
        key = task.variant.key
        return None if self.allows(key) else f"{key} hung {MOST_HANGS} times in this run"

    def count(self, task: Task, done: Future[Result]) -> None:
        """Count the hang of a task that is done, if it is one."""
        if not done.cancelled() and done.exception() is None and isinstance(done.result().outcome, TimedOut):
            self.add(task.variant.key)

    @property
    def stopped(self) -> list[str]:
        """Variants that are not run again."""
        return sorted(variant for variant in self._hangs if not self.allows(variant))


def start_executor(
    device: Device, protocol: Protocol, refuse: Callable[[Task], str | None]
) -> WorkerExecutor[Task]:
    """Return an executor with one compiling process per core and one measuring process.

    Args:
        device: The GPU.
        protocol: How samples are taken.
        refuse: Returns why a compiled task is not measured, or None.
    """
    setup = measure_worker.Setup(runner="cuda", device=device, protocol=protocol)
    return LocalExecutor(
        compiling=ProcessStage(
            function=compile_worker.compile_task,
            start=compile_worker.start,
            start_arguments=(binary_folder(), ()),
            workers=os.cpu_count() or 1,
            timeout_s=COMPILE_TIMEOUT_S,
        ),
        measuring=ProcessStage(
            function=measure_worker.measure,
            start=measure_worker.start,
            start_arguments=(setup,),
            timeout_s=RUN_TIMEOUT_S,
        ),
        overlap=True,
        refuse=refuse,
    )


@dataclass
class AcceptanceRun:
    """State that all steps share.

    Attributes:
        device: The GPU.
        report: The report.
        match: Only workloads whose text contains this string are run.
        until: Time of `clock` at which the current step must end, in seconds.
        child: Function that runs child processes.
        start_executor: Function that returns the executor of a step (see `start_executor`).
        clock: Monotonic clock, in seconds.
        hangs: Hangs of each variant.
        measured: Number of results so far: timed or checked programs.
        ranks: Variants of each workload, the one predicted fastest first.
    """

    device: Device
    report: AcceptanceReport
    match: str = ""
    until: float = 0.0
    child: RunChild = run_child
    start_executor: Callable[..., WorkerExecutor[Task]] = start_executor
    clock: Callable[[], float] = time.monotonic
    hangs: HangCount = field(default_factory=HangCount)
    measured: int = 0
    ranks: dict[str, list[str]] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Folder of the report and the database."""
        return self.report.folder

    @property
    def left_s(self) -> float:
        """Time left for the step, in seconds."""
        return self.until - self.clock()

    def ask(self, *arguments: str, most_s: float, before: Iterable[str] = ()) -> dict[str, Any]:
        """Return the last answer of a child process.

        Args:
            *arguments: Command line of `tests.gpu.gpu_process`.
            most_s: Time limit, in seconds; less if the step ends earlier.
            before: Command that runs the process, such as a checker.
        """
        limits = ChildLimits(total_s=max(0.0, min(most_s, self.left_s)))
        return last_answer(self.child(arguments, limits, tuple(before)))


@dataclass(frozen=True)
class AcceptanceItem:
    """A configuration to run."""

    text: str
    candidate: TunableVariant
    row: int

    def task(self, device: Device) -> Task:
        """Return the task for an executor."""
        return Task(
            variant=self.candidate.variant,
            workload=parse(self.text),
            config=self.candidate.table.config(self.row),
            device=device,
            seed=1,
        )

    @property
    def bound_us(self) -> float:
        """Lower bound, in microseconds."""
        return float(self.candidate.bounds.us[self.row])

    def __str__(self) -> str:
        config = self.candidate.table.config(self.row)
        return f"{self.text} {self.candidate.variant.key} {config}"


# -- selection --------------------------------------------------------------------------------------


def gpu_candidates(text: str, device: Device) -> tuple[list[TunableVariant], str | None]:
    """Return the candidates of a workload's GPU variants, and the reason if there are none."""
    try:
        # Carried binaries need no compiler here.
        candidates, skipped = tunable.find_variants(parse(text), device, compilable=False)
    except InputError as error:
        return [], str(error)
    gpu_variants = [candidate for candidate in candidates if isinstance(candidate.variant, GpuVariant)]
    reason = None if gpu_variants else f"no GPU variant supports {text}: {'; '.join(skipped.values())}"
    return gpu_variants, reason


def items_to_verify(
    workloads: Iterable[str], count: int, device: Device, in_time: Callable[[], bool] = lambda: True
) -> tuple[list[AcceptanceItem], list[str]]:
    """Return `count` configurations of each workload and variant, and the problems found.

    Defaults come first, those of variants that use wgmma before all others, so that an interrupted run has
    verified every variant once before it verifies one twice. Programs of libraries follow the defaults.
    Workloads that are not reached in time are left out.
    """
    turns: list[list[AcceptanceItem]] = [[] for _ in range(count)]
    problems, reached = [], []
    for text in workloads:
        if not in_time():
            break
        reached.append(text)
        candidates, reason = gpu_candidates(text, device)
        problems += [reason] if reason else []
        for candidate in candidates:
            default = candidate.table.row(candidate.variant.default(parse(text), device))
            if default is None:
                problems.append(f"{candidate.variant.key}: the default for {text} is not in its space")
            further = [item for item in shuffled(text, candidate) if item.row != default]
            first = [] if default is None else [AcceptanceItem(text, candidate, default)]
            for turn, item in zip(turns, [*first, *further], strict=False):
                turn.append(item)
    for turn in turns:
        turn.sort(key=lambda item: "wgmma" not in item.candidate.variant.key)
    turns[0] += library_items(reached, device)
    return [item for turn in turns for item in turn], problems


def library_items(workloads: Iterable[str], device: Device) -> list[AcceptanceItem]:
    """Return each call of a library, on the first workload that it supports; of plans the first two ranks."""
    items: dict[tuple[str, str], AcceptanceItem] = {}
    for text in workloads:
        workload = parse(text)
        for library in (v for v in variants(workload) if isinstance(v, LibraryGpuVariant)):
            try:
                (candidate,), _ = tunable.find_variants(workload, device, [library.name], compilable=False)
            except InputError:  # a package is not installed, or torch has no such function
                continue
            for row in range(len(candidate.table)):
                config = candidate.table.config(row)
                several_calls = config.get("program") == "torch"  # which may round too often
                if not several_calls and config.get("rank", 0) <= 1:
                    items.setdefault((library.key, str(config)), AcceptanceItem(text, candidate, row))
    return list(items.values())


def shuffled(text: str, candidate: TunableVariant) -> list[AcceptanceItem]:
    """Return every configuration of a candidate in a random but fixed order."""
    rows = list(range(len(candidate.table)))
    random.Random(text).shuffle(rows)
    return [AcceptanceItem(text, candidate, row) for row in rows]


def in_turns(spaces: list[list[AcceptanceItem]], length: int) -> list[AcceptanceItem]:
    """Return the items of all spaces, `length` of each in turn (each change costs a reference)."""
    longest = max(map(len, spaces), default=0)
    return [item for at in range(0, longest, length) for space in spaces for item in space[at : at + length]]


# -- results ------------------------------------------------------------------------------------------


def line_of(item: AcceptanceItem, result: Result) -> dict[str, Any]:
    """Return the JSON Lines entry of one configuration."""
    outcome = to_json(result.outcome)
    if "samples_us" in outcome:
        outcome["samples_us"] = [round(us, 3) for us in outcome["samples_us"]]
    return {
        "workload": item.text,
        "variant": item.candidate.variant.key,
        "config": dict(item.candidate.table.config(item.row)),
        "bound_us": item.bound_us,
        "outcome": outcome,
        "resources": dataclasses.asdict(result.resources),
        "effort": dataclasses.asdict(result.effort),
    }


def fault_of(item: AcceptanceItem, result: Result) -> str | None:
    """Return the problem with a configuration that was run (not measured, or below its bound), or None."""
    outcome = result.outcome
    if not isinstance(outcome, Measured):
        return f"{item}: {outcome.kind}: {getattr(outcome, 'reason', '')}"
    fastest = min(outcome.samples_us)
    refined = refine(
        item.candidate.variant.costs(
            parse(item.text), item.candidate.table.take([item.row]), item.candidate.device
        ),
        parse(item.text).traffic(),
        item.candidate.device,
        result.resources,
        cache=outcome.cache,
        rows=1,
    )
    for bound_us, name in ((item.bound_us, "bound"), (float(refined.us[0]), "refined bound")):
        if fastest < bound_us * (1 - 1e-6):
            return f"{item}: {fastest:.3f} us is below its {name} of {bound_us:.3f} us"
    return None


def run_items(
    session: AcceptanceRun, items: Iterable[AcceptanceItem], protocol: Protocol
) -> Iterator[tuple[AcceptanceItem, Result | BaseException]]:
    """Run configurations until the step ends; yield each with its result or with the exception raised.

    A configuration of a variant that hung too often is not run; `TaskRefused` is its exception.

    Args:
        session: The run.
        items: The configurations.
        protocol: How samples are taken.
    """
    waiting, running = iter(items), {}
    with session.start_executor(session.device, protocol, session.hangs.refuse) as on:
        while True:
            while len(running) < on.capacity and session.left_s > 0:
                item = next(waiting, None)
                if item is None:
                    break
                task = item.task(session.device)
                future = on.submit(task)
                # Before the executor measures the next task, which may be of the same variant.
                future.add_done_callback(functools.partial(session.hangs.count, task))
                running[future] = item
            if not running:
                return
            done, _ = wait(running, timeout=1.0, return_when=FIRST_COMPLETED)
            if not done and session.left_s < -GRACE_S:
                return
            for future in done:
                yield running.pop(future), _answer(future)


def _answer(future: Future[Result]) -> Result | BaseException:
    error = future.exception()
    return error if error is not None else future.result()


class OutcomeTally:
    """Counts of a step's outcomes, which keep the step's entry of the report up to date."""

    def __init__(self, session: AcceptanceRun, step: str, total: int, problems: Iterable[str] = ()) -> None:
        self._session, self._step, self._total = session, step, total
        self.problems = list(problems)
        self.outcomes: Counter[str] = Counter()
        self._reported_s = session.clock()

    def add(self, item: AcceptanceItem, result: Result | BaseException) -> None:
        """Count one result; report a problem at once, and progress every 5 seconds."""
        problem = None
        if isinstance(result, TaskRefused):
            kind = "left out"
        elif isinstance(result, BaseException):
            kind, problem = "fault", f"{item}: {type(result).__name__}: {result}"
        else:
            kind, problem = result.outcome.kind, fault_of(item, result)
            self._session.measured += isinstance(result.outcome, Measured)
            self._session.report.line(self._step, line_of(item, result))
        self.outcomes[kind] += 1
        if problem is not None:
            self.problems.append(problem[:600])
            self._session.report.say(f"{self._step}: WRONG: {problem[:300]}")
        if self._session.clock() - self._reported_s > 5.0:
            self._reported_s = self._session.clock()
            self._write()

    def _write(self, **facts: Any) -> None:
        done = sum(self.outcomes.values())
        self._session.report.say(f"{self._step}: {done} of {self._total}, {dict(self.outcomes)}")
        self._session.report.put(
            self._step,
            done=done,
            total=self._total,
            outcomes=dict(self.outcomes),
            problem_count=len(self.problems),
            problems=self.problems[:MOST_QUOTED],
            stopped=self._session.hangs.stopped,
            **facts,
        )

    def end(self, **facts: Any) -> None:
        """Write the final entry; `stopped` lists the variants that hung too often."""
        whole = sum(self.outcomes.values()) == self._total and not self.outcomes["left out"]
        self._write(complete=whole, **facts)
