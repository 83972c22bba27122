"""Gain of fusion: a fused workload compared with its parts, each tuned separately, and with torch.

    python -m benchmarks.fusion [--device cpu] [--trials 30] [--workload TEXT ...] [--finest]
                                [--cache warm] [--db FILE] [--out FILE.json]

The parts are those of `Workload.unfused`, for example a product and its epilogue as one elementwise chain.
With `--finest`, elementwise parts are divided further into one operation per kernel, as in a program without
a compiler.

The best configurations of the fused workload and of its parts are then measured again alternately, so that
drift of the machine affects all equally. Torch is measured alternately with the fused workload when that is
tuned.

On a CPU, use an idle machine (see `uptime`) without `nice`: next to eight busy processes, a process at
`nice 10` gets about 2 % of two cores and appears to hang. One or two busy processes distort the results: a
call waits to be scheduled. On two cores a kernel of 0.3 ms took 5.7 ms, so the figures of short kernels show
their number and not their time.
Products take minutes to tune even on an idle machine; stderr names the workload that is being tuned.

Caches are flushed before each run, so a part reads the output of the previous part from memory. Where that
output would still be in the last-level cache, the gain is overestimated. With `--cache warm`, everything that
fits is in the cache, including the inputs, for the fused workload and for its parts.

Trials in the database count: the same command continues an interrupted run. If no trial is missing, it tries
one more configuration and measures the best few again, with torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from tunebench import tune
from tunebench._environment import binary_folder
from tunebench.compile import Binary, BinaryCache, compile_config
from tunebench.db.store import open_store
from tunebench.device import Device, find
from tunebench.errors import InputError
from tunebench.executor.process import ProcessCaller, ProcessStage
from tunebench.kernels import variant, variants
from tunebench.measure.timing import Protocol
from tunebench.measure.worker import Setup, measure
from tunebench.measure.worker import start as start_worker
from tunebench.outcome import CacheState, Crashed, Measured, Result, TimedOut
from tunebench.task import Task
from tunebench.tuning import Plan, Report
from tunebench.workload import Workload
from tunebench.workloads import parse

CONV = "conv2d:n=8,c=64,h=56,w=56,k=64,r=3,s=3,stride=1,pad=1,dtype=f32,layout=nhwc"

WORKLOADS = (
    "gemm:m=512,n=3072,k=768,dtype=f32,epilogue=bias+gelu",
    "gemm:m=512,n=768,k=3072,dtype=f32,epilogue=bias+silu+residual",
    f"{CONV},epilogue=bias+relu",
    f"{CONV},epilogue=scale+bias+residual+relu",
    "softmax:rows=4096,cols=1024,dtype=f32,prologue=scale+mask",
    "layernorm:rows=4096,cols=1024,dtype=f32,prologue=bias+residual",
    "gated_gemm:m=512,n=2048,k=768,dtype=f32",
    "elementwise:rows=4096,cols=1024,dtype=f32,expression=gelu(x+bias)*y+z,vectors=bias",
)
RESULTS = Path(__file__).parent / "results" / "fusion"

ROUNDS = 5
"""Alternations between the fused workload and its parts."""

Row = dict[str, Any]
Tune = Callable[[Workload], Report]
Timed = Callable[[Sequence[Report]], list[float]]


def parsed(texts: Iterable[str], skipped: dict[str, str]) -> Iterator[Workload]:
    """Yield the fused workloads among texts.

    Args:
        texts: Workloads as text.
        skipped: Receives the reason for each text that is skipped.
    """
    for text in texts:
        try:
            workload = parse(text)
        except InputError as error:
            skipped[text] = str(error)
            continue
        if workload.unfused():
            yield workload
        else:
            skipped[text] = "nothing is fused, or no operator computes one of the parts"


def parts_of(workload: Workload, finest: bool) -> tuple[Workload, ...]:
    """Return the parts of a fused workload.

    Args:
        workload: The fused workload.
        finest: Whether to divide elementwise parts into single operations.
    """
    parts = workload.unfused()
    if not finest:
        return parts
    return tuple(single for part in parts for single in part.unfused() or (part,))


def row(workload: Workload, finest: bool, tuned: Tune, timed: Timed) -> Row:
    """Tune a workload and each different part once, and return their times.

    Args:
        workload: The fused workload.
        finest: Whether to divide elementwise parts into single operations.
        tuned: Tunes a workload and returns its report.
        timed: Measures the best configurations of several reports together, in microseconds.

    Raises:
        InputError: if no variant supports the workload or a part on the device.
    """
    whole, parts = tuned(workload), parts_of(workload, finest)
    reports = {part: tuned(part) for part in dict.fromkeys(parts)}
    times = timed([whole, *reports.values()])
    whole_us, us = times[0], dict(zip(reports, times[1:], strict=True))
    parts_us = sum(us[part] for part in parts)
    torch = next((baseline.median_us for baseline in whole.baselines if baseline.name == "torch"), None)
    return {
        "workload": str(workload),
        "whole": {"us": whole_us, **_found(whole)},
        "parts": [{"workload": str(part), "us": us[part], **_found(reports[part])} for part in parts],
        "parts_us": parts_us,
        "gain": parts_us / whole_us,
        "gain_over_torch": torch / _us(whole) if torch is not None else None,
    }


def _us(report: Report) -> float:
    if report.median_us is None:
        raise InputError(f"no configuration of {report.workload} succeeded on {report.device}")
    return report.median_us


def _found(report: Report) -> dict[str, Any]:
    return {
        "how": report.how,
        "variant": report.variant,
        "config": str(report.config),
    }


def lines(result: Row) -> Iterator[str]:
    """Yield the text lines of a row."""
    over_torch = result["gain_over_torch"]
    yield result["workload"]
    against = f", speedup over torch {over_torch:.2f}x" if over_torch is not None else ""
    yield (
        f"  {result['whole']['us']:.0f} us fused, {result['parts_us']:.0f} us in parts: "
        f"speedup {result['gain']:.2f}x{against}"
    )
    for part in result["parts"]:
        yield f"    {part['us']:.0f} us {part['workload']}"


def tuner(options: argparse.Namespace) -> Tune:
    """Return a function that tunes a workload with the trials that the database does not have yet."""
    device, protocol = find(options.device), dataclasses.replace(Plan().protocol, cache=options.cache)

    def tuned(workload: Workload) -> Report:
        missing = max(options.trials - known(workload, device, options.cache, options.db), 1)
        print(f"tuning {workload}: {missing} of {options.trials} trials", file=sys.stderr, flush=True)
        plan = Plan(trials=missing, protocol=protocol)
        report = tune(workload, device=options.device, db=options.db, plan=plan)
        if report.interrupted:
            sys.exit(130)
        return report

    return tuned


def known(workload: Workload, device: Device, cache: CacheState, db: Path) -> int:
    """Return the number of recorded trials from the current sources in one cache state.

    Args:
        workload: The workload.
        device: Device of the trials.
        cache: State of the caches during measurement.
        db: Database file.
    """
    with open_store(db) as store:
        trials = [
            (chosen, trial)
            for chosen in variants(workload)
            for trial in store.trial_outcomes(device.key, str(workload), chosen.key, cache=cache)
        ]
    return sum(
        chosen.revision(workload, trial.config) == trial.revision
        and (not isinstance(trial.outcome, Measured) or trial.outcome.cache == cache)
        for chosen, trial in trials
    )


def in_turn(device: Device, protocol: Protocol, timeout_s: float = Plan().timeout_s) -> Timed:
    """Return a function that measures the best configurations of reports alternately, in `ROUNDS` rounds.

    Each configuration has a separate process, which keeps its inputs and their reference from round to round:
    on a busy machine, computing them again takes far longer than the measurement. A timeout or crash raises
    `InputError`. Reports of predictions keep their times.

    Args:
        device: Device to measure on.
        protocol: Sampling protocol of each round.
        timeout_s: Time limit for verifying and measuring one configuration, in seconds.
    """
    runner: Literal["cpu", "cuda"] = "cpu" if device.kind == "cpu" else "cuda"
    stage = ProcessStage(
        function=measure,
        start=start_worker,
        start_arguments=(Setup(runner=runner, device=device, protocol=protocol),),
        timeout_s=timeout_s,
    )

    def timed(reports: Sequence[Report]) -> list[float]:
        if any(report.how != "measured" for report in reports):
            return [_us(report) for report in reports]
        samples: list[list[float]] = [[] for _ in reports]
        with ExitStack() as processes:
            ready = [
                (*_ready(tuned, device), processes.enter_context(ProcessCaller(stage))) for tuned in reports
            ]
            for _ in range(ROUNDS):
                for (task, binary, caller), taken in zip(ready, samples, strict=True):
                    taken += _samples_us(task, caller.call(task, binary, None))
        return [statistics.median(taken) for taken in samples]

    return timed


def _ready(report: Report, device: Device) -> tuple[Task, Binary]:
    """Return the best configuration of a report as a task, with its compiled binary."""
    chosen, workload = variant(str(report.variant)), parse(report.workload)
    config = chosen.space.parse(str(report.config))
    binary = compile_config(chosen, workload, config, device, BinaryCache(binary_folder()))
    return Task(variant=chosen, workload=workload, config=config, device=device, seed=1), binary


def _samples_us(task: Task, answer: Result | Crashed | TimedOut) -> tuple[float, ...]:
    outcome = answer.outcome if isinstance(answer, Result) else answer
    if isinstance(outcome, Measured):
        return outcome.samples_us
    raise InputError(f"{task.workload} with {task.config}: {getattr(outcome, 'reason', outcome.kind)}")


def save(path: Path, options: argparse.Namespace, rows: list[Row], skipped: Mapping[str, str]) -> None:
    """Write all rows so far as JSON.

    Args:
        path: Output file.
        options: Command-line arguments.
        rows: One row per fused workload.
        skipped: Reason for each skipped workload, by its text.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    facts = {"device": find(options.device).key, "trials": options.trials, "cache": options.cache}
    data = {**facts, "finest": options.finest, "rows": rows, "skipped": skipped}
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    """Tune each workload and its parts, and print each gain at once."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--device", default="cpu", help="device key; times for a device that is not present are predictions"
    )
    parser.add_argument("--trials", type=int, default=30, help="trials per workload, default 30")
    parser.add_argument(
        "--workload", action="append", help="fused workload instead of the default ones; repeatable"
    )
    parser.add_argument(
        "--finest", action="store_true", help="divide elementwise parts into single operations"
    )
    parser.add_argument(
        "--cache", choices=("cold", "warm"), default=Protocol().cache, help="state of the caches"
    )
    parser.add_argument(
        "--db", type=Path, default=Path(tempfile.gettempdir()) / "tunebench-fusion.db", help="database"
    )
    parser.add_argument(
        "--out", type=Path, help=f"JSON file of the results, default: named by architecture in {RESULTS}"
    )
    options = parser.parse_args(arguments)
    out = options.out or RESULTS / f"{find(options.device).architecture}.json"
    tuned, rows, skipped = tuner(options), list[Row](), dict[str, str]()
    timed = in_turn(find(options.device), dataclasses.replace(Plan().protocol, cache=options.cache))
    for workload in parsed(options.workload or WORKLOADS, skipped):
        try:
            rows.append(row(workload, options.finest, tuned, timed))
        except InputError as error:
            skipped[str(workload)] = str(error)
            continue
        print("\n".join(lines(rows[-1])), flush=True)
        save(out, options, rows, skipped)
    save(out, options, rows, skipped)
    for text, reason in skipped.items():
        print(f"skipped: {text}: {reason}")


if __name__ == "__main__":
    main()
