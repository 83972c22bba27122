"""Acceptance test of the GPU kernels on a real GPU, in three runs of at most nine minutes each.

    python -m tests.gpu.acceptance --prepare --out DIR                          # on any machine with g++
    python -m tests.gpu.acceptance --run 1 --out DIR [--previous FILE.tar.gz]   # on the GPU; then 2, then 3

Run 1 finds out what works and how fast the defaults are: `conformance` runs every PTX wrapper, `wgmma` every
variant that uses wgmma, `headline` compares defaults with the libraries, `facts` describes the machine. Run 2
repeats what failed in run 1 and the comparison, and `tune` tunes the worst ratios. Run 3 checks everything:
`verify` on many sizes and all dtypes, `record` whole search spaces, `sanitize` by compute-sanitizer.

Each run reads the results of the earlier ones from a tar file (`--previous`, by default the one in DIR) and
writes DIR/acceptance.tar.gz while results come, so that a run that is killed keeps its results. Exit status:
0 if all is well, 1 if a problem was found, 3 if the run had to be ended, 5 if there is no such GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from tests.gpu.acceptance_report import ARCHIVE, AcceptanceReport
from tests.gpu.acceptance_run import AcceptanceRun
from tests.gpu.acceptance_steps import facts, record, sanitize, verify
from tests.gpu.headline import TABLE, headline, headline_table, tune_worst, wgmma
from tests.gpu.wrapper_conformance import EXPECTED, conformance, write_expected
from tunebench.device import Device, local_gpus

__all__ = ["RUNS", "find_device", "main", "run_steps"]

RUNS: dict[int, dict[str, float]] = {
    1: {"conformance": 0.22, "wgmma": 0.19, "headline": 0.54, "facts": 0.05},
    2: {"conformance": 0.10, "wgmma": 0.10, "headline": 0.40, "tune": 0.40},
    3: {"verify": 0.50, "record": 0.25, "sanitize": 0.25},
}
"""Steps of each run, with their fraction of its time; time left over goes to the later steps."""

STEP_FUNCTIONS: dict[str, Callable[[AcceptanceRun], None]] = {
    "conformance": conformance,
    "wgmma": wgmma,
    "headline": headline,
    "facts": facts,
    "tune": tune_worst,
    "verify": verify,
    "record": record,
    "sanitize": sanitize,
}
RENAMED = {"measure": "tune", "compare": "headline"}
"""Former names of steps, which `--only` accepts in this version."""

MINUTES = 9.0
PROBLEMS_SHOWN = 20
OVERRUN_S = 20.0
"""Time after the end of a run after which its process ends itself, whatever it waits for, in seconds."""


def ends(fractions: Mapping[str, float], seconds: float) -> dict[str, float]:
    """Return the end of each step, in seconds from the start of the run.

    Args:
        fractions: Fraction of the time of each step, in any unit.
        seconds: Time of the run.
    """
    total, spent, found = sum(fractions.values()), 0.0, {}
    for step, fraction in fractions.items():
        spent += fraction
        found[step] = seconds * spent / total
    return found


def run_steps(session: AcceptanceRun, fractions: Mapping[str, float], seconds: float) -> int:
    """Run steps, print the headline table and the problems, and return the exit status.

    Args:
        session: The run.
        fractions: Fraction of the time of each step.
        seconds: Time of all steps together.
    """
    report, start = session.report, session.clock()
    for step, end in ends(fractions, seconds).items():
        session.until = start + end
        report.begin(step)
        report.say(f"{step}: {session.left_s:.0f} s")
        begun = session.clock()
        try:
            STEP_FUNCTIONS[step](session)
        except Exception as error:  # a failing step must not prevent the others
            problems = [*report.steps[step].get("problems", []), f"{type(error).__name__}: {error}"]
            report.put(step, problems=problems, traceback=traceback.format_exc())
        report.put(step, seconds=round(session.clock() - begun, 1))
    table = headline_table(report.steps)
    report.text(TABLE, table + "\n")
    report.pack()
    problems = report.problems(fractions)
    for problem in problems[:PROBLEMS_SHOWN]:
        report.say(f"WRONG: {problem[:300]}")
    cut = [step for step in fractions if not report.steps[step]["complete"]]
    report.say(f"{len(problems)} problems; not complete: {', '.join(cut) or 'none'}")
    report.say(f"headline figures so far:\n{table}")
    return 1 if problems else 0


def find_device(arch: str | None) -> Device:
    """Return the first GPU (of the given architecture); exit with status 5 if there is none."""
    gpus = local_gpus()
    for gpu in gpus:
        if arch in (None, gpu.architecture):
            return gpu
    here = ", ".join(f"{gpu.name} ({gpu.architecture})" for gpu in gpus) or "no NVIDIA GPU"
    print(f"acceptance needs a GPU{f' of {arch}' if arch else ''}; this machine has {here}", file=sys.stderr)
    raise SystemExit(5)


def prepare(out: Path, folder: Path) -> int:
    """Write a tar file with the expected outputs of `conformance`, and return the exit status."""
    report = AcceptanceReport(folder, archive=out / ARCHIVE)
    missing = write_expected(folder / EXPECTED)
    if missing:
        print("--prepare needs a C++ compiler: g++ or clang++", file=sys.stderr)
        return 1
    report.pack()
    report.say(f"{out / ARCHIVE}: give it to the first run as --previous")
    return 0


@contextlib.contextmanager
def _ended_after(seconds: float) -> Iterator[None]:
    """End this process after a time limit, with status 3: it may wait for a process that no signal ends."""

    def end() -> None:
        print(f"the run did not end within {seconds:.0f} s; the tar file has its results", flush=True)
        os._exit(3)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run", type=int, choices=sorted(RUNS), help="the run (default: all, in turn)")
    parser.add_argument("--prepare", action="store_true", help="compute the expected outputs, without a GPU")
    parser.add_argument("--arch", help="architecture of the GPU, such as sm_90 (default: any)")
    parser.add_argument(
        "--out", type=Path, default=Path("acceptance"), help=f"folder of {ARCHIVE} (default: acceptance)"
    )
    parser.add_argument(
        "--previous", type=Path, help=f"tar file of the earlier runs (default: {ARCHIVE} in --out, if any)"
    )
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help="time limit of each run, in minutes (default: 9)"
    )
    parser.add_argument("--only", default="", help="deprecated: comma-separated steps to run instead")
    parser.add_argument("--match", default="", help="run only workloads whose text contains this string")
    options = parser.parse_args(arguments)
    if options.previous is not None and not options.previous.is_file():
        parser.error(f"--previous: there is no file {options.previous}")
    names = [RENAMED.get(name, name) for name in options.only.split(",") if name]
    if names:
        warnings.warn("--only is deprecated: use --run", DeprecationWarning, stacklevel=2)
    if unknown := set(names) - set(STEP_FUNCTIONS):
        parser.error(f"unknown step {', '.join(sorted(unknown))}; known: {', '.join(STEP_FUNCTIONS)}")
    options.runs = _chosen(names, options.run)
    return options


def _chosen(names: Iterable[str], run: int | None) -> list[dict[str, float]]:
    """Return the fractions of the runs to do: one of the named steps, the given run, or all runs."""
    if names := set(names):
        every = {step: fraction for steps in RUNS.values() for step, fraction in steps.items()}
        return [{step: every[step] for step in STEP_FUNCTIONS if step in names}]
    return list(RUNS.values()) if run is None else [RUNS[run]]


def main(arguments: list[str] | None = None) -> int:
    """Do the runs and return the highest exit status."""
    options = parsed(arguments)
    archive = options.out / ARCHIVE
    with tempfile.TemporaryDirectory(prefix="tunebench-acceptance-", ignore_cleanup_errors=True) as folder:
        previous = options.previous or (archive if archive.is_file() else None)
        if previous is not None:
            AcceptanceReport.unpack(previous, Path(folder))
        if options.prepare:
            return prepare(options.out, Path(folder))
        with _ended_after(60.0 * options.minutes * len(options.runs) + OVERRUN_S):
            return _do(options, Path(folder), archive)


def _do(options: argparse.Namespace, folder: Path, archive: Path) -> int:
    """Do the runs with a report in `folder`."""
    device = find_device(options.arch)
    status = 0
    for fractions in options.runs:
        begun = time.monotonic()
        session = AcceptanceRun(device, AcceptanceReport(folder, archive=archive), options.match)
        status = max(status, run_steps(session, fractions, 60.0 * options.minutes))
        session.report.say(f"{archive}, {time.monotonic() - begun:.0f} s")
    return status


if __name__ == "__main__":
    sys.exit(main())
