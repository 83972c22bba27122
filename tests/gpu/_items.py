"""Configurations to run on the GPU, what runs them, and the books that are kept of it."""

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

from tests.gpu._report import Report
from tunebench._environment import cache_folder
from tunebench.bound import refine
from tunebench.compile import worker as compile_worker
from tunebench.device import Device
from tunebench.errors import InputError
from tunebench.executor import Executor
from tunebench.executor.local import LocalExecutor, Stage
from tunebench.measure import worker as measure_worker
from tunebench.measure.timing import Protocol
from tunebench.outcome import Measured, Result, to_json
from tunebench.task import Task
from tunebench.tuning import candidate as candidates
from tunebench.tuning.candidate import Candidate
from tunebench.variant import GpuVariant
from tunebench.workloads import parse

__all__ = [
    "Item",
    "Session",
    "Tally",
    "child",
    "executor",
    "gpu_candidates",
    "in_turns",
    "items_to_verify",
    "line_of",
    "problem_of",
    "run_items",
    "shuffled",
    "texts",
]

COMPILE_TIMEOUT_S, RUN_TIMEOUT_S = 120.0, 60.0
TOLD = 40
"""Problems of a step that the report quotes; the rest is in the step's lines."""


@dataclass
class Session:
    """What every step has: the device, the report, the folder, what to match, and when it must end."""

    device: Device
    report: Report
    folder: Path
    match: str = ""
    until: float = 0.0

    @property
    def left_s(self) -> float:
        """Seconds left to the step."""
        return self.until - time.monotonic()


@dataclass(frozen=True)
class Item:
    """One configuration to run."""

    text: str
    candidate: Candidate
    row: int

    def task(self, device: Device) -> Task:
        """Return what an executor is asked."""
        return Task(
            variant=self.candidate.variant,
            workload=parse(self.text),
            config=self.candidate.table.config(self.row),
            device=device,
            seed=1,
        )

    @property
    def bound_us(self) -> float:
        """No execution takes less."""
        return float(self.candidate.bounds.us[self.row])

    def __str__(self) -> str:
        config = self.candidate.table.config(self.row)
        return f"{self.text} {self.candidate.variant.key} {config}"


# -- which --------------------------------------------------------------------------------------------------


def texts(listed: Iterable[tuple[tuple[str, ...], str]]) -> list[str]:
    """Return every problem of a list, each of its types."""
    return [text.format(dtype=dtype) for types, text in listed for dtype in types]


def gpu_candidates(text: str, device: Device) -> tuple[list[Candidate], str | None]:
    """Return the GPU variants that can do a problem, and why there are none if there are none."""
    try:
        found, skipped = candidates.find(parse(text), device)
    except InputError as error:
        return [], str(error)
    mine = [candidate for candidate in found if isinstance(candidate.variant, GpuVariant)]
    return mine, None if mine else f"no GPU variant does {text}: {'; '.join(skipped.values())}"


def items_to_verify(problems: Iterable[str], count: int, device: Device) -> tuple[list[Item], list[str]]:
    """Return `count` configurations for each problem and variant, all defaults first, and what is amiss.

    A run that is cut off has then seen everything once before it sees anything twice.
    """
    turns: list[list[Item]] = [[] for _ in range(count)]
    amiss = []
    for text in problems:
        found, reason = gpu_candidates(text, device)
        amiss += [reason] if reason else []
        for candidate in found:
            default = candidate.table.row(candidate.variant.default(parse(text), device))
            if default is None:
                amiss.append(f"{candidate.variant.key}: the default for {text} is not in its space")
            others = [item for item in shuffled(text, candidate) if item.row != default]
            first = [] if default is None else [Item(text, candidate, default)]
            for turn, item in zip(turns, [*first, *others], strict=False):
                turn.append(item)
    return [item for turn in turns for item in turn], amiss


def shuffled(text: str, candidate: Candidate) -> list[Item]:
    """Return every configuration of a candidate, in an order that is random and always the same."""
    rows = list(range(len(candidate.table)))
    random.Random(text).shuffle(rows)
    return [Item(text, candidate, row) for row in rows]


def in_turns(spaces: list[list[Item]], length: int) -> list[Item]:
    """Return the items of all spaces, `length` of each in turn: a change of problem costs a reference."""
    longest = max(map(len, spaces), default=0)
    return [item for at in range(0, longest, length) for space in spaces for item in space[at : at + length]]


# -- what came of them ---------------------------------------------------------------------------------------


def line_of(item: Item, result: Result) -> dict[str, Any]:
    """Return what is written of one configuration."""
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


def problem_of(item: Item, result: Result) -> str | None:
    """Return what is wrong with a configuration that was run, or None."""
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
    """Start processes that compile, and one that measures."""
    setup = measure_worker.Setup(runner="cuda", device=device, protocol=protocol)
    return LocalExecutor(
        compiling=Stage(
            function=compile_worker.compile_task,
            start=compile_worker.start,
            start_arguments=(cache_folder() / "binaries", ()),
            workers=os.cpu_count() or 1,
            timeout_s=COMPILE_TIMEOUT_S,
        ),
        measuring=Stage(
            function=measure_worker.measure,
            start=measure_worker.start,
            start_arguments=(setup,),
            timeout_s=RUN_TIMEOUT_S,
        ),
        overlap=True,
    )


def run_items(
    items: Iterable[Item], on: Executor[Task], device: Device, until: float
) -> Iterator[tuple[Item, Result | BaseException]]:
    """Run configurations until time is up; yield each with its result, or with what went wrong with us."""
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


class Tally:
    """Counts outcomes of a step and keeps its entry of the report."""

    def __init__(self, session: Session, step: str, total: int, problems: Iterable[str] = ()) -> None:
        self._session, self._step, self._total = session, step, total
        self.problems = list(problems)
        self.outcomes: Counter[str] = Counter()
        self._told = time.monotonic()

    def add(self, item: Item, result: Result | BaseException) -> None:
        """Count one; a problem is told at once, the rest every few seconds."""
        if isinstance(result, BaseException):
            kind, problem = "fault", f"{item}: {type(result).__name__}: {result}"
        else:
            kind, problem = result.outcome.kind, problem_of(item, result)
            self._session.report.line(self._step, line_of(item, result))
        self.outcomes[kind] += 1
        if problem is not None:
            self.problems.append(problem[:600])
            self._session.report.say(f"{self._step}: WRONG: {problem[:300]}")
        if time.monotonic() - self._told > 5.0:
            self._told = time.monotonic()
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
            problems=self.problems[:TOLD],
            **facts,
        )

    def end(self, **facts: Any) -> None:
        """Write the entry for good."""
        self._write(complete=sum(self.outcomes.values()) == self._total, **facts)


def child(arguments: list[str], *, before: Iterable[str] = (), timeout_s: float) -> dict[str, Any]:
    """Run `_child.py` in a process of its own; return the last it says, and `problem` if it ended badly."""
    command = [*before, sys.executable, "-m", "tests.gpu._child", *arguments]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
        start_new_session=True,  # so that what it started can be ended with it
    ) as process:
        try:
            said, complaint = process.communicate(timeout=timeout_s)
            late = False
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said, complaint = process.communicate()
            late = True
    answers = [json.loads(line) for line in said.splitlines() if line.startswith("{") and line.endswith("}")]
    answer: dict[str, Any] = answers[-1] if answers else {}
    if late:
        return {**answer, "problem": f"not done within {timeout_s:.0f} s", "timed_out": True}
    if process.returncode != 0:
        told = [line for line in (said + complaint).splitlines() if line.strip()]
        return {**answer, "problem": f"exit status {process.returncode}: {' | '.join(told[-12:])}"[:2000]}
    return answer or {"problem": "it printed nothing"}
