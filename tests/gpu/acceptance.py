"""Acceptance test of the GPU kernels on a real GPU, in two runs that fit into fifteen minutes.

    python -m tests.gpu.acceptance --prepare --out DIR                       # anywhere, with g++ and NVRTC
    python -m tests.gpu.acceptance --run A --previous FILE.tar.gz --out DIR    # on the GPU, 7 minutes
    python -m tests.gpu.acceptance --run B --previous FILE.tar.gz … --out DIR  # on the GPU, 4 minutes

Run A measures: `facts` describes the machine and compiles one default of each variant there, `wgmma` runs
every variant that uses wgmma, `headline` compares defaults with the libraries, `tune` tunes the worst ratios.
Run B checks: `conformance` runs PTX wrappers, `sanitize` runs compute-sanitizer, `record` measures whole
search spaces, `retry` repeats what failed in run A, and `verify` runs many sizes in the time left.

Each run reads tar files (`--previous`; later files replace files of earlier ones) and writes
DIR/acceptance.tar.gz while results come, so that a run that is killed keeps its results. Exit status: 0 if
all is well, 1 if a problem was found, 3 if the run had to be ended, 4 if nothing was measured, 5 if there is
no such GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tests.gpu.acceptance_report import ARCHIVE, AcceptanceReport
from tests.gpu.acceptance_run import AcceptanceRun
from tests.gpu.acceptance_steps import facts, record, sanitize, smoke, verify
from tests.gpu.carried import CARRIED, devices_of, write_carried
from tests.gpu.headline import TABLE, headline, headline_table, headline_text, retry, tune_worst, wgmma
from tests.gpu.wrapper_conformance import EXPECTED, conformance, write_expected
from tunebench.device import Device, architectures, local_gpus, representative

__all__ = ["INPUTS", "MINUTES", "RUNS", "dry_run", "find_device", "main", "run_steps", "step_seconds"]

RUNS: dict[str, dict[str, float]] = {
    "A": {"facts": 20, "wgmma": 75, "headline": 195, "tune": 115},
    "B": {"conformance": 40, "sanitize": 70, "record": 60, "retry": 50, "verify": 5},
}
"""Steps of each run, with their time in seconds; time left over goes to the later steps."""

MINUTES: dict[str, float] = {"A": 7.0, "B": 4.0}
"""Time limit of each run, in minutes, from the start of its process."""

RESERVE_S = 10.0
"""Time of a run that no step has: for imports, the last child to end, and the last tar file, in seconds."""

STEP_FUNCTIONS: dict[str, Callable[[AcceptanceRun], None]] = {
    "facts": facts,
    "wgmma": wgmma,
    "headline": headline,
    "tune": tune_worst,
    "conformance": conformance,
    "sanitize": sanitize,
    "record": record,
    "retry": retry,
    "verify": verify,
}

WHEELS = "wheels"
"""Folder of packages in the tar file of `--prepare`, which are installed before a run."""
INPUTS = (CARRIED, WHEELS, EXPECTED)
"""Files and folders of `--prepare`, which no run writes to its own tar file."""
NOTHING_MEASURED = 4
PROBLEMS_SHOWN = 20


def step_seconds(run: str, minutes: float) -> dict[str, float]:
    """Return the time of each step of a run with a time limit in minutes, in seconds."""
    steps = RUNS[run]
    scale = (60.0 * minutes - RESERVE_S) / sum(steps.values())
    return {step: seconds * scale for step, seconds in steps.items()}


def run_steps(session: AcceptanceRun, seconds: Mapping[str, float], end: float) -> int:
    """Run steps, print the problems and the headline table, and return the exit status.

    Args:
        session: The run.
        seconds: Time of each step; time left over goes to the later steps.
        end: Time of `session.clock` at which the last step ends; the time that the process took to start is
            taken from the steps in proportion.
    """
    report, start = session.report, session.clock()
    scale, until = (end - start) / sum(seconds.values()), start
    for step, share_s in seconds.items():
        until += share_s * scale
        session.until = until
        report.begin(step)
        report.say(f"{step}: {session.left_s:.0f} s")
        if session.left_s <= 0:
            report.put(step, undone=["no time left"])
            continue
        begun = session.clock()
        try:
            STEP_FUNCTIONS[step](session)
        except Exception as error:  # a failing step must not prevent the others
            problems = [*report.steps[step].get("problems", []), f"{type(error).__name__}: {error}"]
            report.put(step, problems=problems, traceback=traceback.format_exc())
        report.put(step, seconds=round(session.clock() - begun, 1))
    report.text(TABLE, headline_table(report.steps) + "\n")
    report.pack()
    problems = report.problems(seconds)
    for problem in problems[:PROBLEMS_SHOWN]:
        report.say(f"WRONG: {problem[:200]}")
    cut = [step for step in seconds if not report.steps[step]["complete"]]
    report.say(f"{len(problems)} problems; not complete: {', '.join(cut) or 'none'}")
    report.say(f"measured in this run: {session.measured}\n{headline_text(report.steps)}")
    if not session.measured:
        return NOTHING_MEASURED
    return 1 if problems else 0


def find_device(arch: str | None) -> Device:
    """Return the first GPU (of the given architecture); exit with status 5 if there is none."""
    gpus = local_gpus()
    for gpu in gpus:
        if arch in (None, gpu.architecture):
            return gpu
    present = ", ".join(f"{gpu.name} ({gpu.architecture})" for gpu in gpus) or "no NVIDIA GPU"
    print(
        f"acceptance needs a GPU{f' of {arch}' if arch else ''}; this machine has {present}", file=sys.stderr
    )
    raise SystemExit(5)


def prepare(options: argparse.Namespace, folder: Path) -> int:
    """Write a tar file with everything that run A needs from another machine, and return the exit status."""
    report = AcceptanceReport(folder, archives=[options.out / ARCHIVE])
    missing = write_expected(folder / EXPECTED)
    if missing:
        print("--prepare needs a C++ compiler: g++ or clang++", file=sys.stderr)
        return 1
    if options.wheels is not None:
        (folder / WHEELS).mkdir(exist_ok=True)
        for wheel in sorted(options.wheels.glob("*.whl")):
            shutil.copy2(wheel, folder / WHEELS)
    shutil.rmtree(folder / CARRIED, ignore_errors=True)
    problems = write_carried(folder / CARRIED, devices_of(options.arch or "sm_90"), report.say)
    for problem in problems:
        report.say(f"not carried: {problem[:300]}")
    report.pack()
    nbytes = (options.out / ARCHIVE).stat().st_size
    report.say(f"{options.out / ARCHIVE}, {nbytes / 1e6:.1f} MB: give it to each run as --previous")
    return 1 if problems else 0


def dry_run(options: argparse.Namespace, folder: Path) -> int:
    """Do what run A does before its first call of the driver, print the result, and return the exit status.

    That is: import everything, compile one default of each variant with the compilers of this machine, and
    look up every carried kernel.
    """
    product = representative(options.arch or "sm_90")
    session = AcceptanceRun(
        product, AcceptanceReport(folder), until=time.monotonic() + 60.0 * options.minutes
    )
    _use_carried(folder)
    session.report.begin("facts")
    answer = session.ask("imports", most_s=session.left_s)
    session.report.say(f"imports: {answer}")
    compiled = smoke(session)
    session.report.say(f"compile: {sum(reason is None for reason in compiled.values())} of {len(compiled)}")
    for key, reason in compiled.items():
        if reason is not None:
            session.report.say(f"{key}: {reason[:300]}")
    carried = session.ask("carried", product.architecture, most_s=session.left_s)
    session.report.say(f"carried: {carried}")
    failed = "problem" in answer or "problem" in carried or any(carried.get("missing", ["?"]))
    return 1 if failed or any(reason is not None for reason in compiled.values()) else 0


def _use_carried(folder: Path) -> None:
    """Let child processes use the carried binaries, if there are any."""
    if (folder / CARRIED).is_dir():
        os.environ["TUNEBENCH_CARRIED"] = str(folder / CARRIED)


@contextlib.contextmanager
def _ended_after(seconds: float, table: Callable[[], str] = str) -> Iterator[None]:
    """End this process after a time limit, with status 3: it may wait for a process that no signal ends.

    Args:
        seconds: The limit.
        table: Returns what to print then.
    """

    def end() -> None:
        print(f"the run did not end within {seconds:.0f} s; the tar file has its results", flush=True)
        print(table(), flush=True)
        os._exit(3)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def process_age_s() -> float:
    """Return the time since this process started, imports included, in seconds."""
    started = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19]
    uptime = Path("/proc/uptime").read_text(encoding="ascii").split()[0]
    return float(uptime) - float(started) / os.sysconf("SC_CLK_TCK")


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run", choices=sorted(RUNS), help="the run (default: A, then B)")
    parser.add_argument("--prepare", action="store_true", help="write what run A needs, without a GPU")
    parser.add_argument("--dry-run", action="store_true", help="do what run A does before it opens the GPU")
    parser.add_argument("--arch", help="architecture of the GPU, such as sm_90 (default: any)")
    parser.add_argument(
        "--out", type=Path, default=Path("acceptance"), help=f"folder of {ARCHIVE} (default: acceptance)"
    )
    parser.add_argument(
        "--copy", type=Path, help="folder of a copy of that file, for a second run on this machine"
    )
    parser.add_argument(
        "--previous",
        type=Path,
        nargs="+",
        help=f"tar files to start from (default: {ARCHIVE} in --out, if any)",
    )
    parser.add_argument("--wheels", type=Path, help="with --prepare: folder of wheels to add to the file")
    parser.add_argument(
        "--minutes", type=float, help="time limit of each run, in minutes (default: A 7, B 4)"
    )
    parser.add_argument("--match", default="", help="run only workloads whose text contains this string")
    options = parser.parse_args(arguments)
    if options.previous and not any(path.is_file() for path in options.previous):
        parser.error(f"--previous: there is no file {', '.join(map(str, options.previous))}")
    if options.wheels is not None and not any(options.wheels.glob("*.whl")):
        parser.error(f"--wheels: there is no wheel in {options.wheels}")
    if options.arch is not None and options.arch not in architectures():
        parser.error(f"--arch: unknown {options.arch}; known: {', '.join(architectures())}")
    options.runs = [options.run] if options.run else list(RUNS)
    return options


def main(arguments: list[str] | None = None) -> int:
    """Do the runs and return the highest exit status."""
    options = parsed(arguments)
    archive = options.out / ARCHIVE
    with tempfile.TemporaryDirectory(prefix="tunebench-acceptance-", ignore_cleanup_errors=True) as text:
        folder = Path(text)
        for previous in options.previous or ([archive] if archive.is_file() else []):
            if previous.is_file():
                AcceptanceReport.unpack(previous, folder)
            else:
                print(f"there is no {previous}: the run starts without it", flush=True)
        if options.prepare:
            return prepare(options, folder)
        if options.dry_run:
            options.minutes = options.minutes or MINUTES["A"]
            return dry_run(options, folder)
        device = find_device(options.arch)
        _use_carried(folder)
        return max(_do(run, options, device, folder) for run in options.runs)


def _do(run: str, options: argparse.Namespace, device: Device, folder: Path) -> int:
    """Do one run with a report in `folder`."""
    minutes = options.minutes or MINUTES[run]
    begun = time.monotonic()
    spent_s = process_age_s() if run == options.runs[0] else 0.0
    archives = [options.out / ARCHIVE, *([options.copy / ARCHIVE] if options.copy else [])]
    report = AcceptanceReport(folder, archives=archives, without=INPUTS)
    with _ended_after(60.0 * minutes - spent_s, lambda: headline_text(report.steps)):
        session = AcceptanceRun(device, report, options.match)
        end = begun - spent_s + 60.0 * minutes - RESERVE_S
        status = run_steps(session, step_seconds(run, minutes), end)
    session.report.say(f"{archives[0]}, {time.monotonic() - begun + spent_s:.0f} s")
    return status


if __name__ == "__main__":
    sys.exit(main())
