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
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import numpy as np

from tests.gpu import acceptance, acceptance_run, acceptance_steps, gpu_process, headline, wrapper_conformance
from tests.gpu.acceptance_report import ARCHIVE, AcceptanceReport
from tests.gpu.acceptance_run import RUN_TIMEOUT_S, AcceptanceRun
from tests.gpu.child import ChildLimits
from tests.gpu.interleaved import TORCH_COMPILE, TimedCall
from tests.gpu.wrapper_case import WrapperVariant
from tests.gpu.wrapper_conformance import CASES
from tests.support import measured
from tunebench import device
from tunebench.db import open_store
from tunebench.executor import TaskRefused, WorkerExecutor
from tunebench.outcome import Crashed, Outcome, Resources, Result, TimedOut, WrongResult
from tunebench.task import Task

__all__ = ["SECONDS", "Fault", "RunFigures", "rehearse"]

H100 = device.find("h100-sxm")
SECONDS = 60.0 * acceptance.MINUTES

COST_S: Mapping[str, float] = {
    "start": 4.0,  # Python, imports, the context of the device
    "start of torch": 8.0,
    "case": 0.5,  # compiled, run and compared
    "element": 20e-9,  # of an input: drawn, rounded, copied
    "variant": 2.5,  # compiled and verified for the first time
    "round": 1.0,  # verified, and timed once
    "torch": 1.0,
    "triton": 12.0,  # compiles eight tile shapes
    TORCH_COMPILE: 40.0,
    "ceilings": 6.0,
    "task": 0.3,  # verified and timed, while others are compiled
    "crash": 5.0,  # until the next process measures
    "check": 5.0,  # a checker on one variant, four at once
}
"""Assumed costs in seconds."""


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
        kind: What happens. A slow program takes 20 s for each use, and its kernel is 50 times slower.
        program: Part of the name of the programs that have it; empty for all.
        run: Number of the run in which it occurs; 0 for every run.
    """

    step: str
    kind: Literal["hang", "crash", "wrong", "slow"]
    program: str = ""
    run: int = 0


@dataclass(frozen=True, slots=True)
class RunFigures:
    """What a run brought back.

    Attributes:
        run: Number of the run.
        wall_s: Time by the fake clock, in seconds.
        figures: Headline workloads with a time of a variant and of a library.
        replaced: Those of them with another variant than the one predicted fastest.
        missing: Headline workloads without such figures.
        tuned: Headline workloads with a tuned configuration that was compared.
        problems: Problems of the steps of the run.
        stopped: Variants that hung too often.
        complete: Steps that were complete.
    """

    run: int
    wall_s: float
    figures: int
    replaced: int
    missing: tuple[str, ...]
    tuned: int
    problems: int
    stopped: tuple[str, ...]
    complete: tuple[str, ...]


@dataclass
class StandIn:
    """Stand-in for the device and for child processes.

    Attributes:
        faults: Faults to inject.
        kill_s: Time at which the run is killed, in seconds; None never kills it.
        now: The fake clock, in seconds.
        report: Report of the present run.
    """

    faults: Sequence[Fault]
    kill_s: float | None = None
    now: float = 0.0
    report: AcceptanceReport | None = None

    def clock(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds
        if self.kill_s is not None and self.now >= self.kill_s:
            raise _Killed

    def use(self, program: str, seconds: float) -> bool:
        """Spend the time of a program, with its fault; return whether its result is wrong."""
        step = list(self.report.before)[-1] if self.report else ""
        kinds = {f.kind for f in self.faults if f.step in ("", step) and f.program in program}
        if "hang" in kinds:
            raise _Hang
        self.spend(20.0 if "slow" in kinds else seconds)
        if "crash" in kinds:
            raise _Crash
        return "wrong" in kinds

    def us(self, program: str) -> float:
        """Return the time of a kernel, in microseconds."""
        return 5000.0 if any(f.kind == "slow" and f.program in program for f in self.faults) else 100.0

    # -- child processes ------------------------------------------------------------------------------

    def child(
        self, arguments: Sequence[str], limits: ChildLimits, before: Sequence[str] = ()
    ) -> Iterator[dict[str, Any]]:
        """Run a child in this process (see `tests.gpu.child.RunChild`)."""
        begun = last = self.now
        count = 0
        try:
            self.spend(COST_S["start of torch" if arguments[0] == "contest" else "start"])
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
        if self.use(variant.key, COST_S["round"]):
            return WrongResult(reason="y[0] is 1, must be 0")
        return measured(*[self.us(variant.key)] * 20)

    def baselines(self, gpu: Any, workload: Any, on: Any, names: Sequence[str]) -> list[TimedCall]:
        """Return the libraries; Triton has the product, attention, softmax and layernorm, forward."""
        self.spend(COST_S["element"] * sum(tensor.size for tensor in workload.inputs()))
        forward = getattr(workload, "direction", "forward") == "forward" and workload.operator != "conv2d"
        there = [name for name in names if name != "triton" or forward]
        return [TimedCall(name, functools.partial(self._library, name)) for name in there]

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
        self.use(variants[0], 60.0 * float(minutes) + 10.0)
        report = {"workload": text, "variant": variants[0], "config": "", "median_us": 90.0}
        return {"tuned": {**report, "trials": {}, "violations": []}}

    def small(self, key: str, texts: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Run small workloads under a checker."""
        kind = "wrong_result" if self.use(key, COST_S["check"]) else "measured"
        yield {"outcomes": {text: {"kind": kind} for text in texts}}

    def ceilings(self) -> dict[str, Any]:
        self.use("ceilings", COST_S["ceilings"])
        return {"copy_gb_s": 1.0}

    def references(self, texts: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Compare references."""
        wrong = self.use("references", COST_S["start of torch"])
        yield {"differences": dict.fromkeys(texts, 1.0 if wrong else 0.0)}

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
        try:
            wrong = self._stand_in.use(task.variant.key, COST_S["task"])
        except _Hang:
            self._stand_in.spend(RUN_TIMEOUT_S)
            return TimedOut(reason="no answer")
        except _Crash:
            self._stand_in.spend(COST_S["crash"])
            return Crashed(reason="killed")
        return WrongResult(reason="y[0] is 1, must be 0") if wrong else measured(1e9)

    def close(self) -> None: ...


# -- the runs ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _replaced(stand_in: StandIn) -> Iterator[None]:
    """Replace what opens the device, and cache what takes processor time only."""
    device_functions = {
        "find": lambda _: H100,
        "clock": stand_in.clock,
        "CudaRunner": lambda *_: None,
        "TorchGpu": lambda _: None,
        "run": stand_in.run,
        "_baselines": stand_in.baselines,
        "_release": lambda: None,
        "tuned": stand_in.tuned,
        "small": stand_in.small,
        "ceilings": stand_in.ceilings,
        "references": stand_in.references,
        "on_device": stand_in.on_device,
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(gpu_process, **device_functions))
        expected = {"write_expected": lambda *_, **__: [], "_read_expected": lambda _: _zeros()}
        stack.enter_context(mock.patch.multiple(wrapper_conformance, **expected))
        stack.enter_context(mock.patch.object(headline, "ranked", lambda _, text: list(_ranked(text))))
        shutil = SimpleNamespace(which=lambda name: name)
        steps = {"shutil": shutil, "AT_ONCE": 1, "items_to_verify": _items}
        stack.enter_context(mock.patch.multiple(acceptance_steps, **steps))
        yield


_real_ranked, _real_items = headline.ranked, acceptance_run.items_to_verify


@functools.cache
def _ranked(text: str) -> tuple[str, ...]:
    session: Any = SimpleNamespace(device=H100)
    return tuple(_real_ranked(session, text))


def _items(workloads: Sequence[str], count: int, _: Any) -> Any:
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
    runs: Sequence[int] = (1, 2, 3),
    kills_s: Mapping[int, float] | None = None,
) -> list[RunFigures]:
    """Rehearse runs in turn, each continuing from the tar file of those before it.

    Args:
        faults: Faults to inject.
        folder: Folder for the reports and the tar files.
        runs: The runs.
        kills_s: Time at which a run is killed, by its number, in seconds from its start.
    """
    found = []
    previous: Path | None = None
    for run in runs:
        now = [fault for fault in faults if fault.run in (0, run)]
        stand_in = StandIn(now, (kills_s or {}).get(run))
        work, archive = folder / f"run {run}", folder / f"out {run}" / ARCHIVE
        work.mkdir(parents=True)
        if previous is not None:
            AcceptanceReport.unpack(previous, work)
        with _replaced(stand_in), contextlib.suppress(_Killed):
            _run(run, stand_in, work, archive)
        previous = archive if archive.is_file() else previous
        found.append(_figures(run, stand_in.now, previous, folder / f"again {run}"))
    return found


def _run(run: int, stand_in: StandIn, work: Path, archive: Path) -> None:
    said = io.StringIO()
    report = AcceptanceReport(
        work, archive=archive, say=lambda line: said.write(f"{line}\n"), now=stand_in.clock
    )
    stand_in.report = report
    session = AcceptanceRun(
        H100,
        report,
        child=stand_in.child,
        start_executor=stand_in.start_executor,
        clock=stand_in.clock,
    )
    acceptance.run_steps(session, acceptance.RUNS[run], SECONDS)


def _figures(run: int, wall_s: float, archive: Path | None, folder: Path) -> RunFigures:
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
        missing=tuple(text for text in headline.HEADLINE if text not in rows),
        tuned=sum(_compared(row) for row in steps.get("tune", {}).get("rows", [])),
        problems=sum(len(step.get("problems", [])) for step in mine),
        stopped=tuple(sorted({key for step in mine for key in step.get("stopped", [])})),
        complete=tuple(name for name in acceptance.RUNS[run] if steps.get(name, {}).get("complete")),
    )


def _compared(row: Mapping[str, Any]) -> bool:
    timed = {one["name"] for one in row["rows"] if "median_us" in one}
    return row["variant"] in timed and len(timed) > 1
