"""Accepts the GPU kernels on a real GPU: right, unsuspicious to the checkers, tuned, compared, and bounded.

    python -m tests.gpu.acceptance [--arch sm_90] [--out DIR] [--minutes 25] [--only verify,measure]

Steps, in this order:

conformance  every wrapper of a PTX instruction against its emulated twin, by lane and register
facts     what the device, its driver and the packages are, and what bandwidth and rate it reaches
verify    every CUDA and Numba-CUDA variant: many sizes, all types, several configurations, each isolated
sanitize  the same on small sizes under compute-sanitizer, where that is on the PATH
measure   tunes a fixed list of problems, into DIR/acceptance.db and, of what may be shipped, DIR/shipped
compare   the best of `measure` against torch, torch.compile and Triton, in turn, on random data
record    whole spaces, a line a configuration; no time may lie below its bound

Everything is written as it comes (see `_report.py`), so that a run that is cut off keeps what it had. Exit
status: 0 if all is well, 1 if something is wrong, 5 if there is no such GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.gpu._conformance import conformance
from tests.gpu._items import (
    RUN_TIMEOUT_S,
    TOLD,
    Item,
    Session,
    Tally,
    child,
    executor,
    gpu_candidates,
    in_turns,
    items_to_verify,
    run_items,
    shuffled,
    texts,
)
from tests.gpu._problems import RECORDED, SANITIZED, VERIFIED, measured
from tests.gpu._ratio import bandwidth_shares, best_of_each, fusion_gains, ratios, worth_comparing
from tests.gpu._report import Report
from tunebench.compile import unavailable
from tunebench.db.bundled import ship
from tunebench.db.store import open_store
from tunebench.device import Device, local_gpus
from tunebench.errors import TunebenchError
from tunebench.kernels import variants
from tunebench.measure.runner import versions
from tunebench.measure.timing import Protocol
from tunebench.outcome import Measured, Result
from tunebench.tuning import Plan, Progress, tune
from tunebench.variant import GpuVariant
from tunebench.workloads import parse

# -- what is done --------------------------------------------------------------------------------------------

STEPS = {
    "conformance": 0.04,
    "facts": 0.04,
    "verify": 0.20,
    "sanitize": 0.13,
    "measure": 0.26,
    "compare": 0.23,
    "record": 0.10,
}
"""Each step's share of the time; what one leaves, the next ones have."""

CONFIGURATIONS = 6
"""Configurations of each variant and problem that are verified: the default, then random ones."""

TOOLS = ("memcheck", "racecheck", "synccheck")
AT_ONCE = 4
"""Checkers that run at a time."""

DATABASE = "acceptance.db"

TURN = 100
"""Configurations of one space that are measured before those of another."""

ONCE = Protocol(warmups=0, min_samples=2, max_samples=2)
BRIEFLY = Protocol(min_samples=5, max_samples=15, max_s=0.2)
CONTEST_TIMEOUT_S = CHECKER_TIMEOUT_S = 240.0


# -- steps ---------------------------------------------------------------------------------------------------


def facts(session: Session) -> None:
    """Write down what this is."""
    packages = ("torch", "triton", "numba", "numba-cuda", "cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc")
    more = (
        "nvidia-nvjitlink",
        "nvidia-nvvm",
        "nvidia-ml-py",
        "numpy",
        "optuna",
        "sqlalchemy",
        "alembic",
        "pebble",
    )
    asked = "name,driver_version,memory.total,clocks.max.sm,clocks.sm,power.limit,temperature.gpu"
    told = {
        "python": sys.version.split()[0],
        "device": dataclasses.asdict(session.device),
        "packages": versions(*packages, *more),
        "compilers": {name: unavailable(name) or "there" for name in ("cuda", "numba-cuda")},
        "nvidia-smi": _output(["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]),
        "compute-sanitizer": shutil.which("compute-sanitizer"),
    }
    session.report.put("facts", **told)
    session.report.say(f"{session.device.name}: {told['nvidia-smi']}; packages {told['packages']}")
    answer = child(["ceilings"], timeout_s=min(120.0, max(10.0, session.left_s)))
    session.report.put("facts", ceilings=answer, complete=True)
    session.report.say(f"reaches {answer}")


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"not told: {error}"


def verify(session: Session) -> None:
    """Run every variant on every problem and hold each result to its tolerance."""
    listed = [text for text in texts(VERIFIED) if session.match in text]
    items, refused = items_to_verify(listed, CONFIGURATIONS, session.device)
    tell = Tally(session, "verify", len(items), refused)
    with executor(session.device, ONCE) as on:
        for item, result in run_items(items, on, session.device, session.until):
            tell.add(item, result)
    tell.end()


def sanitize(session: Session) -> None:
    """Run each variant's default configurations on small problems under the checkers."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        session.report.put("sanitize", complete=True, skipped="compute-sanitizer is not on the PATH")
        session.report.say("sanitize: compute-sanitizer is not on the PATH")
        return
    small: dict[str, list[str]] = {}
    listed = [text for text in texts(SANITIZED) if session.match in text]
    for variant in variants():
        mine = [text for text in listed if variant.refuses(parse(text), session.device) is None]
        if isinstance(variant, GpuVariant) and mine:
            small[variant.key] = mine
    jobs = [(checker, key) for checker in TOOLS for key in small]
    problems: list[str] = []
    undone: list[str] = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        running = [pool.submit(_check, tool, *job, small[job[1]], session.until) for job in jobs]
        for future, (checker, key) in zip(running, jobs, strict=True):
            done, found = future.result()
            undone += [] if done else [f"{checker} {key}: {found}"]
            problems += [f"{checker} {key}: {found}"] if done and found else []
            session.report.say(f"sanitize: {checker} {key}: {found or 'clean'}"[:400])
            session.report.put("sanitize", total=len(jobs), problems=problems[:TOLD], undone=undone)
    session.report.put("sanitize", complete=not undone)


def _check(tool: str, checker: str, key: str, problems: list[str], until: float) -> tuple[bool, str]:
    """Run one checker on one variant; return whether it ran to its end, and what it found."""
    left_s = until - time.monotonic()
    if left_s < 10:
        return False, "no time left"
    command = [tool, "--tool", checker, "--error-exitcode", "99", "--print-limit", "3"]
    answer = child(["small", key, *problems], before=command, timeout_s=min(CHECKER_TIMEOUT_S, left_s))
    if "problem" in answer:
        return "timed_out" not in answer, str(answer["problem"])
    wrong = {text: out for text, out in answer["outcomes"].items() if out["kind"] != "measured"}
    return True, f"not measured: {wrong}" if wrong else ""


def measure(session: Session) -> None:
    """Tune each problem; a part of the time that is left is for each."""
    listed = [(text, trials) for text, trials in measured() if session.match in text]
    rows = session.report.rows_of_others("measure", dict(listed))
    problems: list[str] = []
    undone: list[str] = []
    for place, (text, trials) in enumerate(listed):
        limit_s = session.left_s / (len(listed) - place) * 1.5
        if session.left_s < 10:
            undone.append(text)
            continue
        try:
            report = tune(
                text,
                device=session.device,
                db=session.folder / DATABASE,
                plan=Plan(trials=trials, baselines=False, timeout_s=RUN_TIMEOUT_S),
                watcher=_stop_after(min(limit_s, session.left_s)),
            )
        except TunebenchError as error:
            problems.append(f"{text}: {error}")
        else:
            row = report.to_json()
            rows.append({**row, "config": str(report.config), "paths": _paths(session, report.workload)})
            failed = sum(
                n for kind, n in report.trials.items() if kind not in {"measured", "aborted", "pruned"}
            )
            problems += [f"{text}: {failed} trials failed: {dict(report.trials)}"] if failed else []
            problems += [] if report.median_us else [f"{text}: nothing could be measured"]
            problems += [f"{text}: {violation}" for violation in report.violations]
            session.report.say(
                f"measure: {text}: {_us(report.median_us)} by {report.variant} {report.config}, "
                f"default {_us(report.default_us)}, bound {_us(report.bound_us)}, {dict(report.trials)}"
            )
        session.report.put("measure", rows=rows, problems=problems[:TOLD])
    copy_gb_s = session.report.steps.get("facts", {}).get("ceilings", {}).get("copy_gb_s")
    fused, shares = fusion_gains(rows), bandwidth_shares(rows, copy_gb_s)
    for text, gain in fused.items():
        session.report.say(f"measure: {text}: {gain['gain']:.2f} times as fast as its parts")
    for text, share in shares.items():
        session.report.say(f"measure: {text}: {share:.3f} of a copy's bandwidth")
    facts = {"fusion": fused, "of_copy_bandwidth": shares, "shipped": _shipped(session)}
    session.report.put("measure", complete=not undone, undone=undone, **facts)


def _shipped(session: Session) -> dict[str, int]:
    """Write what may come with the package into DIR/shipped, to be added to db/shipped; return the counts."""
    database = session.folder / DATABASE
    if not database.exists():
        return {}
    with open_store(database, read_only=True) as store:
        written = ship(store, session.folder / "shipped")
    for path, count in written:
        session.report.say(f"measure: {count} records in {path}")
    return {path.name: count for path, count in written}


def _paths(session: Session, text: str) -> dict[str, dict[str, Any]]:
    """Return the best configuration of each variant for a problem."""
    with open_store(session.folder / DATABASE, read_only=True) as store:
        return best_of_each(store.best(text, session.device.key))


def _us(time_us: float | None) -> str:
    return "no time" if time_us is None else f"{time_us:.2f} us"


def _stop_after(seconds: float) -> Callable[[Progress], None]:
    """Return a watcher that ends a search, as Ctrl-C does, when its time is up."""
    end = time.monotonic() + seconds

    def watch(progress: Progress) -> None:
        if progress.phase == "search" and progress.done and time.monotonic() > end:
            raise KeyboardInterrupt

    return watch


def compare(session: Session) -> None:
    """Hold the best configurations against what others have."""
    problems: list[str] = []
    undone: list[str] = []
    known = session.report.steps.get("measure", {}).get("rows", [])
    best = [row for row in known if row["variant"] and session.match in row["workload"]]
    rows = session.report.rows_of_others("compare", [row["workload"] for row in best])
    for place, row in enumerate(best):
        if session.left_s < 20:
            undone.append(row["workload"])
            continue
        paths = worth_comparing(row["paths"])
        share_s = max(30.0, 1.5 * session.left_s / (len(best) - place))
        limit_s = min(CONTEST_TIMEOUT_S, share_s, session.left_s)
        answer = child(["contest", row["workload"], *paths], timeout_s=limit_s)
        rows.append({"workload": row["workload"], "bound_us": row["bound_us"], "paths": paths[::2], **answer})
        if "problem" in answer:
            # Who is late when all others are timed is the compiler that takes minutes.
            late = "timed_out" in answer and "rows" in answer
            (undone if late else problems).append(f"{row['workload']}: {answer['problem']}")
        session.report.say(f"compare: {row['workload']}: {_contest_line(answer)}")
        session.report.put("compare", rows=rows, problems=problems[:TOLD], ratios=ratios(rows))
    means = ratios(rows)["geometric_means"]
    for path, compared in means.items():
        told = ", ".join(f"{name} {m['ratio']:.3f} ({m['workloads']})" for name, m in compared.items())
        session.report.say(f"compare: {path}: times of others over ours, geometric means (workloads): {told}")
    if not best:
        problems.append("nothing to compare: run the step measure first, into the same folder")
    session.report.put("compare", complete=not undone, undone=undone, problems=problems[:TOLD])


def _contest_line(answer: dict[str, Any]) -> str:
    parts = [
        f"{row['name']} {row['median_us']:.2f} us"
        if "median_us" in row
        else f"{row['name']}: {row['problem']}"
        for row in answer.get("rows", [])
    ]
    return ", ".join([*parts, *([str(answer["problem"])] if "problem" in answer else [])])[:400]


def record(session: Session) -> None:
    """Measure whole spaces and hold each time to its bound; the spaces take turns, in parts."""
    spaces: list[list[Item]] = []
    missing: list[str] = []
    listed = ((text.format(dtype="f16"), key, most) for text, key, most in RECORDED)
    for text, key, most in listed:
        if session.match not in text:
            continue
        found = [c for c in gpu_candidates(text, session.device)[0] if c.variant.key == key]
        missing += [] if found else [f"{key} does not do {text}"]
        spaces += [shuffled(text, c)[:most] for c in found]
    items = in_turns(spaces, TURN)
    tell = Tally(session, "record", len(items), missing)
    closest: dict[str, float] = {}
    with executor(session.device, BRIEFLY) as on:
        for item, result in run_items(items, on, session.device, session.until):
            tell.add(item, result)
            if isinstance(result, Result) and isinstance(result.outcome, Measured) and item.bound_us:
                place = f"{item.text} {item.candidate.variant.key}"
                ratio = result.outcome.median_us / item.bound_us
                closest[place] = min(ratio, closest.get(place, ratio))
    tell.end(closest_to_bound=closest)


# -- the whole -----------------------------------------------------------------------------------------------


DO: dict[str, Callable[[Session], None]] = {
    "conformance": conformance,
    "facts": facts,
    "verify": verify,
    "sanitize": sanitize,
    "measure": measure,
    "compare": compare,
    "record": record,
}


def ends(chosen: list[str], minutes: float) -> dict[str, float]:
    """Return after how many seconds each chosen step must end, by the shares of `STEPS`."""
    total, spent, found = sum(STEPS[step] for step in chosen), 0.0, {}
    for step in chosen:
        spent += STEPS[step]
        found[step] = 60.0 * minutes * spent / total
    return found


def find_device(arch: str | None) -> Device:
    """Return the first GPU here, of an architecture if one is given; end with status 5 if there is none."""
    gpus = local_gpus()
    for gpu in gpus:
        if arch in (None, gpu.architecture):
            return gpu
    here = ", ".join(f"{gpu.name} ({gpu.architecture})" for gpu in gpus) or "no NVIDIA GPU"
    print(f"acceptance needs a GPU{f' of {arch}' if arch else ''}; this machine has {here}", file=sys.stderr)
    raise SystemExit(5)


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """Return what was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--arch", help="architecture the GPU must have, such as sm_90")
    parser.add_argument("--out", type=Path, default=Path("acceptance"), help="folder for the report")
    parser.add_argument("--minutes", type=float, default=25.0, help="time for all steps together")
    parser.add_argument("--only", default=",".join(STEPS), help=f"steps, of {', '.join(STEPS)}")
    parser.add_argument("--match", default="", help="only problems whose text has this in it")
    given = parser.parse_args(arguments)
    given.steps = [step for step in STEPS if step in given.only.split(",")]
    unknown = set(given.only.split(",")) - set(STEPS)
    if unknown:
        parser.error(f"unknown step {', '.join(sorted(unknown))}; known: {', '.join(STEPS)}")
    return given


def main(arguments: list[str] | None = None) -> int:
    """Run the steps, and tell in the end what was wrong."""
    given = parsed(arguments)
    device = find_device(given.arch)
    session = Session(device, Report(given.out), given.out, given.match)
    start = time.monotonic()
    limits = ends(given.steps, given.minutes)
    for step in given.steps:
        session.until = start + limits[step]
        session.report.begin(step)
        session.report.say(f"{step}: {session.left_s:.0f} s")
        begun = time.monotonic()
        try:
            DO[step](session)
        except Exception as error:  # whatever one step meets, the others are to be had
            problems = [*session.report.steps[step].get("problems", []), f"{type(error).__name__}: {error}"]
            session.report.put(step, problems=problems, traceback=traceback.format_exc())
        session.report.put(step, seconds=round(time.monotonic() - begun, 1))
    problems = session.report.problems(given.steps)
    for problem in problems:
        session.report.say(f"WRONG: {problem[:300]}")
    cut = [step for step in given.steps if not session.report.steps[step]["complete"]]
    session.report.say(f"{len(problems)} problems; not complete: {', '.join(cut) or 'none'}; {given.out}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
