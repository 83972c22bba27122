"""Steps of the acceptance run that describe the machine, verify, sanitize and record."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from tests.gpu.acceptance_run import (
    MOST_QUOTED,
    AcceptanceItem,
    AcceptanceRun,
    OutcomeTally,
    gpu_candidates,
    in_turns,
    items_to_verify,
    run_items,
    shuffled,
)
from tests.gpu.acceptance_workloads import RECORDED, REFERENCES, SANITIZED, VERIFIED
from tunebench.compile import unavailable
from tunebench.kernels import variants
from tunebench.measure.runner import versions
from tunebench.measure.timing import Protocol
from tunebench.outcome import Measured, Result
from tunebench.variant import GpuVariant
from tunebench.workloads import parse

__all__ = ["facts", "record", "sanitize", "verify"]

CONFIGURATIONS = 6
"""Configurations to verify of each variant and workload: the default, then random ones."""

TOOLS = ("memcheck", "racecheck", "synccheck")
AT_ONCE = 4
"""Checkers to run concurrently."""

TURN = 100
"""Configurations of one search space to measure before switching to another."""

ONCE = Protocol(warmups=0, min_samples=2, max_samples=2)
BRIEFLY = Protocol(min_samples=5, max_samples=15, max_s=0.2)
REFERENCE_DIFFERENCE = 1e-9
"""Largest difference of a reference on the GPU from that on the host, relative to its largest element."""
PACKAGES = (
    *("torch", "triton", "numba", "numba-cuda", "cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc"),
    *("nvidia-nvjitlink", "nvidia-nvvm", "nvidia-ml-py", "numpy", "optuna", "sqlalchemy", "alembic"),
)
"""Packages whose versions `facts` records."""
CEILINGS_S, CHECKER_TIMEOUT_S = 40.0, 60.0


def facts(session: AcceptanceRun) -> None:
    """Record the device, driver and packages, measure what the device reaches, and check references on it."""
    asked = "name,driver_version,memory.total,clocks.max.sm,clocks.sm,power.limit,temperature.gpu"
    gathered = {
        "python": sys.version.split()[0],
        "device": dataclasses.asdict(session.device),
        "packages": versions(*PACKAGES),
        "compilers": {name: unavailable(name) or "available" for name in ("cuda", "numba-cuda")},
        "nvidia-smi": _output(["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]),
        "compute-sanitizer": shutil.which("compute-sanitizer"),
    }
    session.report.put("facts", **gathered)
    session.report.say(f"{session.device.name}: {gathered['nvidia-smi']}; packages {gathered['packages']}")
    answer = session.ask("ceilings", most_s=CEILINGS_S)
    session.report.put("facts", ceilings=answer)
    session.report.say(f"measured {answer}")
    compared = session.ask("references", *REFERENCES, most_s=CEILINGS_S)
    differences = compared.get("differences", {})
    wrong = [
        f"the reference of {text} on the GPU differs by {difference:.3g} from that on the host"
        for text, difference in differences.items()
        if not difference <= REFERENCE_DIFFERENCE
    ]
    complete = "problem" not in answer and "problem" not in compared
    session.report.put("facts", references=compared, problems=wrong, complete=complete)
    session.report.say(f"references: {len(differences)} compared, {len(wrong)} differ")


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"not available: {error}"


def verify(session: AcceptanceRun) -> None:
    """Run every variant, those that use wgmma first, on every workload, and compare with the reference."""
    listed = [text for text in VERIFIED if session.match in text]
    items, refused = items_to_verify(listed, CONFIGURATIONS, session.device)
    tally = OutcomeTally(session, "verify", len(items), refused)
    for item, result in run_items(session, items, ONCE):
        tally.add(item, result)
    tally.end()


def sanitize(session: AcceptanceRun) -> None:
    """Run each variant's default configuration on small workloads under compute-sanitizer."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        session.report.put("sanitize", complete=True, skipped="compute-sanitizer is not on the PATH")
        session.report.say("sanitize: compute-sanitizer is not on the PATH")
        return
    small: dict[str, list[str]] = {}
    listed = [text for text in SANITIZED if session.match in text]
    for variant in sorted(variants(), key=lambda variant: "wgmma" not in variant.key):
        mine = [text for text in listed if variant.refuses(parse(text), session.device) is None]
        if isinstance(variant, GpuVariant) and mine:
            small[variant.key] = mine
    jobs = [(checker, key) for checker in TOOLS for key in small]
    problems: list[str] = []
    undone: list[str] = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        running = [pool.submit(_check, session, tool, *job, small[job[1]]) for job in jobs]
        for future, (checker, key) in zip(running, jobs, strict=True):
            done, found = future.result()
            undone += [] if done else [f"{checker} {key}: {found}"]
            problems += [f"{checker} {key}: {found}"] if done and found else []
            session.report.say(f"sanitize: {checker} {key}: {found or 'clean'}"[:400])
            session.report.put("sanitize", total=len(jobs), problems=problems[:MOST_QUOTED], undone=undone)
    session.report.put("sanitize", complete=not undone)


def _check(
    session: AcceptanceRun, tool: str, checker: str, key: str, workloads: list[str]
) -> tuple[bool, str]:
    """Run one checker on one variant; return whether it finished, and its findings."""
    if session.left_s < 10:
        return False, "no time left"
    if not session.hangs.allows(key):
        return False, "the variant hung too often"
    command = [tool, "--tool", checker, "--error-exitcode", "99", "--print-limit", "3"]
    answer = session.ask("small", key, *workloads, most_s=CHECKER_TIMEOUT_S, before=command)
    outcomes = answer.get("outcomes", {})
    if "timed_out" in answer:
        return False, f"{len(outcomes)} of {len(workloads)} workloads: {answer['problem']}"
    if "problem" in answer:
        return True, str(answer["problem"])
    wrong = {text: out for text, out in outcomes.items() if out["kind"] != "measured"}
    return True, f"not measured: {wrong}" if wrong else ""


def record(session: AcceptanceRun) -> None:
    """Measure whole search spaces in turns and compare each time with its lower bound."""
    spaces: list[list[AcceptanceItem]] = []
    missing: list[str] = []
    for text, key, most in RECORDED:
        if session.match not in text:
            continue
        found = [c for c in gpu_candidates(text, session.device)[0] if c.variant.key == key]
        missing += [] if found else [f"{key} does not support {text}"]
        spaces += [shuffled(text, c)[:most] for c in found]
    items = in_turns(spaces, TURN)
    tally = OutcomeTally(session, "record", len(items), missing)
    closest: dict[str, float] = {}
    for item, result in run_items(session, items, BRIEFLY):
        tally.add(item, result)
        if isinstance(result, Result) and isinstance(result.outcome, Measured) and item.bound_us:
            place = f"{item.text} {item.candidate.variant.key}"
            ratio = result.outcome.median_us / item.bound_us
            closest[place] = min(ratio, closest.get(place, ratio))
    tally.end(closest_to_bound=closest)
