"""Configurations of an acceptance run, the executor that runs them, and the tally of their outcomes."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.gpu.acceptance_report import AcceptanceReport
from tunebench._environment import cache_folder
from tunebench.bound import refine
from tunebench.compile import worker as compile_worker
from tunebench.device import Device
from tunebench.errors import InputError
from tunebench.executor import WorkerExecutor
from tunebench.executor.local import LocalExecutor
from tunebench.executor.process import ProcessStage
from tunebench.measure import worker as measure_worker
from tunebench.measure.timing import Protocol
from tunebench.outcome import Measured, Result, to_json
from tunebench.task import Task
from tunebench.tuning import tunable
from tunebench.tuning.tunable import TunableVariant
from tunebench.variant import GpuVariant
from tunebench.workloads import parse

__all__ = [
    "AcceptanceItem",
    "AcceptanceRun",
    "OutcomeTally",
    "executor",
    "fault_of",
    "gpu_candidates",
    "in_turns",
    "items_to_verify",
    "line_of",
    "run_gpu_process",
    "run_items",
    "shuffled",
]

COMPILE_TIMEOUT_S, RUN_TIMEOUT_S = 120.0, 60.0
MOST_QUOTED = 40
"""Most problems per step in the report; all of them are in the step's JSON Lines file."""


@dataclass
class AcceptanceRun:
    """State that all steps share.

    Attributes:
        device: The GPU.
        report: The report.
        folder: Folder of the report and the database.
        match: Only workloads whose text contains this string are run.
        until: Monotonic time at which the current step must end, in seconds.
    """

    device: Device
    report: AcceptanceReport
    folder: Path
    match: str = ""
    until: float = 0.0

    @property
    def left_s(self) -> float:
        """Time left for the step, in seconds."""
        return self.until - time.monotonic()


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
        found, skipped = tunable.find_variants(parse(text), device)
    except InputError as error:
        return [], str(error)
    mine = [candidate for candidate in found if isinstance(candidate.variant, GpuVariant)]
    return mine, None if mine else f"no GPU variant supports {text}: {'; '.join(skipped.values())}"


def items_to_verify(
    workloads: Iterable[str], count: int, device: Device
) -> tuple[list[AcceptanceItem], list[str]]:
    """Return `count` configurations of each workload and variant, defaults first, and the problems found.

    Thus an interrupted run has verified every variant once before it verifies one twice.
    """
    turns: list[list[AcceptanceItem]] = [[] for _ in range(count)]
    problems = []
    for text in workloads:
        found, reason = gpu_candidates(text, device)
        problems += [reason] if reason else []
        for candidate in found:
            default = candidate.table.row(candidate.variant.default(parse(text), device))
            if default is None:
                problems.append(f"{candidate.variant.key}: the default for {text} is not in its space")
            others = [item for item in shuffled(text, candidate) if item.row != default]
            first = [] if default is None else [AcceptanceItem(text, candidate, default)]
            for turn, item in zip(turns, [*first, *others], strict=False):
                turn.append(item)
    return [item for turn in turns for item in turn], problems


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


def executor(device: Device, protocol: Protocol) -> LocalExecutor:
    """Return an executor with one compiling process per core and one measuring process."""
    setup = measure_worker.Setup(runner="cuda", device=device, protocol=protocol)
    return LocalExecutor(
        compiling=ProcessStage(
            function=compile_worker.compile_task,
            start=compile_worker.start,
            start_arguments=(cache_folder() / "binaries", ()),
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
    )


def run_items(
    items: Iterable[AcceptanceItem], on: WorkerExecutor[Task], device: Device, until: float
) -> Iterator[tuple[AcceptanceItem, Result | BaseException]]:
    """Run configurations until a monotonic time; yield each with its result or with the exception raised."""
    waiting, running = iter(items), {}
    while True:
        while len(running) < on.capacity and time.monotonic() < until:
            item = next(waiting, None)
            if item is None:
                break
            running[on.submit(item.task(device))] = item
        if not running:
            return
        done, _ = wait(running, timeout=1.0, return_when=FIRST_COMPLETED)
        if not done and time.monotonic() > until + RUN_TIMEOUT_S:
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
        self._reported_s = time.monotonic()

    def add(self, item: AcceptanceItem, result: Result | BaseException) -> None:
        """Count one result; report a problem at once, and progress every 5 seconds."""
        if isinstance(result, BaseException):
            kind, problem = "fault", f"{item}: {type(result).__name__}: {result}"
        else:
            kind, problem = result.outcome.kind, fault_of(item, result)
            self._session.report.line(self._step, line_of(item, result))
        self.outcomes[kind] += 1
        if problem is not None:
            self.problems.append(problem[:600])
            self._session.report.say(f"{self._step}: WRONG: {problem[:300]}")
        if time.monotonic() - self._reported_s > 5.0:
            self._reported_s = time.monotonic()
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
            **facts,
        )

    def end(self, **facts: Any) -> None:
        """Write the final entry."""
        self._write(complete=sum(self.outcomes.values()) == self._total, **facts)


def run_gpu_process(arguments: list[str], *, before: Iterable[str] = (), timeout_s: float) -> dict[str, Any]:
    """Run `gpu_process` in a new process and return its last answer.

    Args:
        arguments: Its command line.
        before: Command that runs the process, such as a checker.
        timeout_s: Time limit; the process group is killed after it.

    Returns:
        The last JSON line, plus `problem` if the process failed and `timed_out` if it was killed.
    """
    command = [*before, sys.executable, "-m", "tests.gpu.gpu_process", *arguments]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
        start_new_session=True,  # so that its children can be killed with it
    ) as process:
        try:
            output, errors = process.communicate(timeout=timeout_s)
            late = False
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, errors = process.communicate()
            late = True
    answers = [
        json.loads(line) for line in output.splitlines() if line.startswith("{") and line.endswith("}")
    ]
    answer: dict[str, Any] = answers[-1] if answers else {}
    if late:
        return {**answer, "problem": f"no answer within {timeout_s:.0f} s", "timed_out": True}
    if process.returncode != 0:
        lines = [line for line in (output + errors).splitlines() if line.strip()]
        return {**answer, "problem": f"exit status {process.returncode}: {' | '.join(lines[-12:])}"[:2000]}
    return answer or {"problem": "the process printed no answer"}
