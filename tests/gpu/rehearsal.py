"""Rehearsal of the acceptance runs without a GPU: injected faults, and a clock that counts assumed costs.

The code of the runs and of their child processes is the real one. A stand-in replaces what opens the device
(the functions of `gpu_process` that compile, launch, tune and call torch) and what starts processes. Each use
of it costs the seconds of `COST_S` on a fake clock. They are assumptions, not measured on a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import numpy as np

from tests.gpu import (
    acceptance,
    acceptance_run,
    acceptance_steps,
    acceptance_workloads,
    gpu_process,
    headline,
    wrapper_conformance,
)
from tests.gpu.acceptance_report import ARCHIVE, AcceptanceReport
from tests.gpu.acceptance_run import GRACE_S, RUN_TIMEOUT_S, AcceptanceRun
from tests.gpu.acceptance_workloads import smoke_workloads
from tests.gpu.child import ChildLimits
from tests.gpu.interleaved import TimedCall
from tests.gpu.wrapper_case import WrapperVariant
from tests.gpu.wrapper_conformance import CASES
from tests.support import measured
from tunebench import device
from tunebench.db import open_store
from tunebench.executor import TaskRefused, WorkerExecutor
from tunebench.outcome import CompileFailed, Crashed, Outcome, Resources, Result, TimedOut, WrongResult
from tunebench.task import Task

__all__ = ["COST_S", "SECONDS", "SLOW_S", "Fault", "RunFigures", "rehearse"]

H100 = device.find("h100-sxm")
SECONDS = {run: 60.0 * minutes for run, minutes in acceptance.MINUTES.items()}
"""Time limit of each run, in seconds."""

COST_S: Mapping[str, float] = {
    "ranking": 0.1,  # the variants of a workload by their predicted times
    "start": 4.0,  # Python, imports, the context of the device
    "start of torch": 8.0,
    "case": 0.3,  # loaded, run and compared
    "element": 30e-9,  # of an input: drawn twice concurrently (20 ns each here), copied
    "output": 8e-9,  # an element of an output: verified on the host (8 ns here)
    "round": 0.5,  # timed once: `gpu_process.INTERLEAVED` allows 0.3 s
    "torch": 1.0,
    "triton": 12.0,  # compiles eight tile shapes
    "facts": 4.0,  # copy, product and references
    "smoke": 0.5,  # one default of each variant, on 16 processes
    "workers": 8.0,  # worker processes of a search
    "task": 0.15,  # verified and timed, while others are compiled
    "crash": 5.0,  # until the next process measures
    "check": 2.5,  # a checker on one variant, six at once
}
"""Assumed costs in seconds; those of the host are measured (see `benchmarks/results/gpu_rehearsal.md`)."""


SLOW_S = 19.0
"""Time of each use of a slow program: just less than the limit of `headline`."""


class _Hang(BaseException):
    """The device never answers."""


class _Crash(BaseException):
    """The process dies."""


class _Killed(BaseException):
    """Something ends the whole run."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault to inject.

    Attributes:
        step: Step in which it occurs; empty for every step.
        kind: What happens. A slow program takes `SLOW_S` for each use, and its kernel is 50 times slower. The
            compilers of that machine do not compile a refused program: only carried machine code runs.
        program: Part of the name of the programs that have it; empty for all.
        run: Run in which it occurs; empty for every run.
    """

    step: str
    kind: Literal["hang", "crash", "wrong", "slow", "refused"]
    program: str = ""
    run: str = ""


@dataclass(frozen=True, slots=True)
class RunFigures:
    """What a run brought back.

    Attributes:
        run: Name of the run.
        wall_s: Time by the fake clock, in seconds.
        figures: Headline workloads with a time of a variant and of a library.
        replaced: Those of them with another variant than the one predicted fastest.
        missing: Headline workloads without such figures.
        tuned: Headline workloads with a tuned configuration that was compared.
        problems: Problems of the steps of the run.
        stopped: Variants that hung too often.
        complete: Steps that were complete.
        status: Exit status; None if the run was killed.
    """

    run: str
    wall_s: float
    figures: int
    replaced: int
    missing: tuple[str, ...]
    tuned: int
    problems: int
    stopped: tuple[str, ...]
    complete: tuple[str, ...]
    status: int | None


@dataclass
class StandIn:
    """Stand-in for the device and for child processes.

    Attributes:
        faults: Faults to inject.
        kill_s: Time at which the run is killed, in seconds; None never kills it.
        now: The fake clock, in seconds.
        report: Report of the present run.
        session: The present run.
        carries: Whether machine code is carried.
        ranked_texts: Workloads whose variants were ranked in the run.
    """

    faults: Sequence[Fault]
    kill_s: float | None = None
    now: float = 0.0
    report: AcceptanceReport | None = None
    session: AcceptanceRun | None = None
    carries: bool = True
    ranked_texts: set[str] = field(default_factory=set)

    def clock(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds
        if self.kill_s is not None and self.now >= self.kill_s:
            raise _Killed

    def use(self, program: str, seconds: float, slow_s: float = SLOW_S) -> bool:
        """Spend the time of a program, with its fault; return whether its result is wrong.

        Args:
            program: Name of the program.
            seconds: Its time.
            slow_s: Its time if it is slow.
        """
        step = list(self.report.before)[-1] if self.report else ""
        kinds = {f.kind for f in self.faults if f.step in ("", step) and f.program in program}
        if "hang" in kinds:
            raise _Hang
        self.spend(slow_s if "slow" in kinds else seconds)
        if "crash" in kinds:
            raise _Crash
        return "wrong" in kinds

    def refuses(self, program: str) -> bool:
        """Return whether the compilers of the machine refuse a program."""
        return any(fault.kind == "refused" and fault.program in program for fault in self.faults)

    def us(self, program: str) -> float:
        """Return the time of a kernel, in microseconds."""
        return 5000.0 if any(f.kind == "slow" and f.program in program for f in self.faults) else 100.0

    def ranked(self, session: Any, text: str) -> list[str]:
        """Return the variants of a workload; a workload is ranked once in a run."""
        if text not in self.ranked_texts:
            self.ranked_texts.add(text)
            self.spend(COST_S["ranking"])
        return list(_ranked(text))

    # -- child processes ------------------------------------------------------------------------------

    def child(
        self, arguments: Sequence[str], limits: ChildLimits, before: Sequence[str] = ()
    ) -> Iterator[dict[str, Any]]:
        """Run a child in this process (see `tests.gpu.child.RunChild`)."""
        begun = last = self.now
        count = 0
        try:
            if arguments[0] != "smoke":  # which runs beside another child
                self.spend(COST_S["start of torch" if arguments[0] in ("contest", "facts") else "start"])
            for answer in gpu_process.answers(arguments):
                if self.now - last > limits.next_s(count, last - begun):
                    raise _Hang
                yield answer
                last, count = self.now, count + 1
        except _Hang:
            self.now = last
            self.spend(limits.next_s(count, last - begun))
            yield {"problem": "no answer", "timed_out": True}
        except _Crash:
            yield {"problem": "exit status -11"}

    def on_device(self, _: Any) -> Any:
        """Return the function that runs cases of `conformance`; all outputs are expected to be zero."""

        def run(variant: Any, workload: Any, config: Any, inputs: Any) -> Any:
            outputs = np.zeros((workload.threads, workload.out_words), np.int32)
            if self.use(variant.case.name, COST_S["case"]):
                outputs[1, 0] = 1
            return {"outputs": outputs}

        return run

    def run(self, runner: Any, variant: Any, workload: Any, config: Any, on: Any) -> Outcome:
        """Run one configuration."""
        if self.refuses(variant.key) and not self.carries:
            self.spend(COST_S["smoke"])
            return CompileFailed(reason="refused")
        outputs = sum(tensor.size for tensor in workload.outputs())
        if self.use(variant.key, COST_S["round"] + COST_S["output"] * outputs):
            return WrongResult(reason="y[0] is 1, must be 0")
        return measured(*[self.us(variant.key)] * 20)

    def baselines(
        self, gpu: Any, runner: Any, workload: Any, on: Any, names: Sequence[str]
    ) -> list[TimedCall]:
        """Return the libraries; Triton has the product, attention, softmax and layernorm, forward."""
        self.spend(COST_S["element"] * sum(tensor.size for tensor in workload.inputs()))
        forward = getattr(workload, "direction", "forward") == "forward" and workload.operator != "conv2d"
        available = [name for name in names if name != "triton" or forward]
        return [TimedCall(name, functools.partial(self._library, name)) for name in available]

    def _library(self, name: str) -> Any:
        if self.use(name, COST_S[name]):
            raise RuntimeError("expected a relative error below 0.01, got 1")

        def take() -> list[float]:
            self.use(name, COST_S["round"])
            return [110.0] * 20

        return take

    def tuned(self, text: str, trials: str, minutes: str, database: str, *variants: str) -> dict[str, Any]:
        """Tune a workload."""
        open_store(Path(database)).close()
        wrong = self.use(variants[0], COST_S["workers"] + 60.0 * float(minutes) + 2.0)
        report = {
            "workload": text,
            "variant": variants[0],
            "config": "",
            "median_us": None if wrong else 90.0,
        }
        return {"tuned": {**report, "trials": {}, "violations": []}}

    def small(self, key: str, texts: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Run small workloads under a checker."""
        kind = "wrong_result" if self.use(key, COST_S["check"]) else "measured"
        yield {"outcomes": {text: {"kind": kind} for text in texts}}

    def facts(self, texts: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Measure the device and compare references."""
        wrong = self.use("facts", COST_S["facts"])
        yield {"ceilings": {"copy_gb_s": 1.0}, "differences": dict.fromkeys(texts, 1.0 if wrong else 0.0)}

    def smoke(self, architecture: str, workers: str) -> Iterator[dict[str, Any]]:
        """Compile one default of each variant, while `facts` measures: that takes longer."""
        for key in smoke_workloads(H100):
            yield {"compiled": key, "reason": "refused" if self.refuses(key) else None}

    def is_carried(self, *_: Any) -> bool:
        return self.carries

    def start_executor(self, on: Any, protocol: Any, refuse: Any) -> WorkerExecutor[Task]:
        return _Executor(self, refuse)


class _Executor(WorkerExecutor[Task]):
    """Executor whose tasks are done at once, at their cost on the fake clock."""

    capacity = 33
    busy_s = 0.0

    def __init__(self, stand_in: StandIn, refuse: Any) -> None:
        self._stand_in, self._refuse = stand_in, refuse

    def submit(self, task: Task) -> Future[Result]:
        future: Future[Result] = Future()
        if (reason := self._refuse(task)) is not None:
            future.set_exception(TaskRefused(reason))
        else:
            future.set_result(Result(outcome=self._outcome(task), resources=Resources()))
        return future

    def _outcome(self, task: Task) -> Outcome:
        self._spend(COST_S["task"])
        if self._stand_in.refuses(task.variant.key):
            return CompileFailed(reason="refused")
        try:
            wrong = self._stand_in.use(task.variant.key, 0.0, min(SLOW_S, self._most_s()))
        except _Hang:
            self._spend(RUN_TIMEOUT_S)
            return TimedOut(reason="no answer")
        except _Crash:
            self._spend(COST_S["crash"])
            return Crashed(reason="killed")
        return WrongResult(reason="y[0] is 1, must be 0") if wrong else measured(1e9)

    def _most_s(self) -> float:
        """Return the time that a step still waits for a task: until `GRACE_S` after its end."""
        assert self._stand_in.session is not None
        return max(0.0, self._stand_in.session.left_s + GRACE_S)

    def _spend(self, seconds: float) -> None:
        self._stand_in.spend(min(seconds, self._most_s()))

    def close(self) -> None: ...


# -- the runs ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _replaced(stand_in: StandIn) -> Iterator[None]:
    """Replace what opens the device, and cache what takes processor time only."""
    device_functions = {
        "find": lambda _: H100,
        "clock": stand_in.clock,
        "ContestRunner": lambda *_: None,
        "TorchGpu": lambda _: None,
        "run": stand_in.run,
        "_baselines": stand_in.baselines,
        "_release": lambda: None,
        "tuned": stand_in.tuned,
        "small": stand_in.small,
        "facts": stand_in.facts,
        "smoke": stand_in.smoke,
        "on_device": stand_in.on_device,
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(gpu_process, **device_functions))
        expected = {"write_expected": lambda *_, **__: [], "_read_expected": lambda _: _zeros()}
        stack.enter_context(mock.patch.multiple(wrapper_conformance, **expected))
        stack.enter_context(mock.patch.object(headline, "ranked", stand_in.ranked))
        stack.enter_context(mock.patch.object(headline, "is_carried", stand_in.is_carried))
        shutil = SimpleNamespace(which=lambda name: name)
        steps = {"shutil": shutil, "AT_ONCE": 1, "items_to_verify": _items}
        stack.enter_context(mock.patch.multiple(acceptance_steps, **steps))
        yield


_real_ranked, _real_items = headline.ranked, acceptance_run.items_to_verify


@functools.cache
def _ranked(text: str) -> tuple[str, ...]:
    session: Any = SimpleNamespace(device=H100, ranks={})
    return tuple(_real_ranked(session, text))


def _items(workloads: Sequence[str], count: int, *_: Any) -> Any:
    return _cached_items(tuple(workloads), count)


@functools.cache
def _cached_items(workloads: tuple[str, ...], count: int) -> Any:
    return _real_items(workloads, count, H100)


@functools.cache
def _zeros() -> dict[str, Any]:
    """Return the expected outputs of every case: zeros."""
    workloads = {wrapper_conformance._key(case): WrapperVariant(case).workload for case in CASES}
    return {key: np.zeros((w.threads, w.out_words), np.int32) for key, w in workloads.items()}


def rehearse(
    faults: Sequence[Fault],
    folder: Path,
    *,
    runs: Sequence[str] = ("A", "B"),
    kills_s: Mapping[str, float] | None = None,
    carries: bool = True,
) -> list[RunFigures]:
    """Rehearse runs in turn, each continuing from the tar file of those before it.

    Args:
        faults: Faults to inject.
        folder: Folder for the reports and the tar files.
        runs: The runs.
        kills_s: Time at which a run is killed, by its name, in seconds from its start.
        carries: Whether machine code is carried.
    """
    figures = []
    previous: Path | None = None
    for run in runs:
        now = [fault for fault in faults if fault.run in ("", run)]
        stand_in = StandIn(now, (kills_s or {}).get(run), carries=carries)
        work, archive = folder / f"run {run}", folder / f"out {run}" / ARCHIVE
        work.mkdir(parents=True)
        if previous is not None:
            AcceptanceReport.unpack(previous, work)
        status = None
        with _replaced(stand_in), contextlib.suppress(_Killed):
            status = _run(run, stand_in, work, archive)
        previous = archive if archive.is_file() else previous
        figures.append(_figures(run, stand_in.now, previous, folder / f"again {run}", status))
    return figures


def _run(run: str, stand_in: StandIn, work: Path, archive: Path) -> int:
    output = io.StringIO()
    # A run that is not killed needs its tar file at the end only.
    now = (lambda: 0.0) if stand_in.kill_s is None else stand_in.clock
    report = AcceptanceReport(work, archives=[archive], say=lambda line: output.write(f"{line}\n"), now=now)
    session = AcceptanceRun(
        H100,
        report,
        child=stand_in.child,
        start_executor=stand_in.start_executor,
        clock=stand_in.clock,
    )
    stand_in.spend(COST_S["start"])
    stand_in.report, stand_in.session = report, session
    seconds = acceptance.step_seconds(run, acceptance.MINUTES[run])
    return acceptance.run_steps(session, seconds, SECONDS[run] - acceptance.RESERVE_S)


def _figures(run: str, wall_s: float, archive: Path | None, folder: Path, status: int | None) -> RunFigures:
    """Return what the tar file of a run says."""
    steps: dict[str, Any] = {}
    if archive is not None:
        AcceptanceReport.unpack(archive, folder)
        steps = AcceptanceReport(folder, say=lambda line: None).steps
    rows = {row["workload"]: row for row in steps.get("headline", {}).get("rows", []) if _compared(row)}
    mine = [steps[step] for step in acceptance.RUNS[run] if step in steps]
    return RunFigures(
        run=run,
        wall_s=wall_s,
        figures=len(rows),
        replaced=sum(row["variant"] != _ranked(text)[0] for text, row in rows.items()),
        missing=tuple(text for text in acceptance_workloads.HEADLINE if text not in rows),
        tuned=sum(_compared(row) for row in steps.get("tune", {}).get("rows", [])),
        problems=sum(len(step.get("problems", [])) for step in mine),
        stopped=tuple(sorted({key for step in mine for key in step.get("stopped", [])})),
        complete=tuple(name for name in acceptance.RUNS[run] if steps.get(name, {}).get("complete")),
        status=status,
    )


def _compared(row: Mapping[str, Any]) -> bool:
    timed = {entry["name"] for entry in row["rows"] if "median_us" in entry}
    return row["variant"] in timed and len(timed) > 1
