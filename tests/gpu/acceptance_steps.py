"""Steps of the acceptance runs that describe the machine, verify, sanitize and record."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

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
from tests.gpu.acceptance_workloads import (
    RECORDED,
    REFERENCES,
    SANITIZED_FIRST,
    VERIFIED,
    small_workloads,
    smoke_workloads,
)
from tests.gpu.child import ChildLimits
from tunebench.kernels import variant
from tunebench.measure.runner import versions
from tunebench.measure.timing import Protocol
from tunebench.outcome import Measured, Result

__all__ = ["facts", "record", "sanitize", "smoke", "verify"]

CONFIGURATIONS = 6
"""Configurations to verify of each variant and workload: the default, then random ones."""

TOOLS = ("memcheck", "racecheck", "synccheck")
AT_ONCE = 6
"""Checkers to run concurrently."""
CHECKED_VARIANTS = 6
"""Variants to check."""

TURN = 20
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
LEAST_VERIFY_S = 3.0
"""Time of `verify` that is kept for running the configurations that were listed, in seconds."""
COMPILERS = 16
"""Most processes that compile at the same time."""
CHECKER_TIMEOUT_S = 30.0


def facts(session: AcceptanceRun) -> None:
    """Record device, driver, packages and compilers, what the device reaches, and check references on it.

    The processors compile while the device is measured.
    """
    asked = "name,driver_version,memory.total,clocks.max.sm,clocks.sm,power.limit,temperature.gpu"
    gathered = {
        "python": sys.version.split()[0],
        "device": dataclasses.asdict(session.device),
        "packages": versions(*PACKAGES),
        "nvidia-smi": _output(["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]),
        "compute-sanitizer": shutil.which("compute-sanitizer"),
    }
    session.report.put("facts", **gathered)
    session.report.say(f"{session.device.name}: {gathered['nvidia-smi']}; packages {gathered['packages']}")
    with ThreadPoolExecutor(1) as pool:
        compiling = pool.submit(smoke, session)
        answer = session.ask("facts", *REFERENCES, most_s=session.left_s)
        compiled = compiling.result()
    differences = answer.get("differences", {})
    wrong = [
        f"the reference of {text} on the GPU differs by {difference:.3g} from that on the host"
        for text, difference in differences.items()
        if not difference <= REFERENCE_DIFFERENCE
    ]
    refused = [f"{key} does not compile here: {reason}"[:400] for key, reason in compiled.items() if reason]
    complete = "problem" not in answer and len(compiled) == len(smoke_workloads(session.device))
    session.report.put(
        "facts", measured=answer, compiled=compiled, problems=[*wrong, *refused], complete=complete
    )
    session.report.say(f"warm copy and product: {answer.get('ceilings', answer)}")
    session.report.say(
        f"references: {len(differences)} compared, {len(wrong)} differ; compiled {len(compiled)} defaults, "
        f"{len(refused)} refused"
    )


def smoke(session: AcceptanceRun) -> dict[str, str | None]:
    """Compile one default of each variant with the compilers of this machine, without carried binaries.

    Returns:
        Why each variant does not compile, or None; a variant without an answer in time is missing.
    """
    compiled: dict[str, str | None] = {}
    limits = ChildLimits(total_s=session.left_s)
    for answer in session.child(["smoke", session.device.architecture, str(COMPILERS)], limits):
        if "compiled" in answer:
            compiled[answer["compiled"]] = answer["reason"]
        else:
            session.report.say(f"compile: {answer}"[:300])
    return compiled


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"not available: {error}"


def verify(session: AcceptanceRun) -> None:
    """Run every variant, those that use wgmma first, on every workload, and compare with the reference."""
    listed = [text for text in VERIFIED if session.match in text]
    items, refused = items_to_verify(
        listed, CONFIGURATIONS, session.device, lambda: session.left_s > LEAST_VERIFY_S
    )
    tally = OutcomeTally(session, "verify", len(items), refused)
    for item, result in run_items(session, items, ONCE):
        tally.add(item, result)
    tally.end()
    if session.left_s <= 0:
        session.report.put("verify", complete=False)


def sanitize(session: AcceptanceRun) -> None:
    """Run defaults on small workloads under compute-sanitizer, those of variants that failed first."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        session.report.put("sanitize", complete=True, skipped="compute-sanitizer is not on the PATH")
        session.report.say("sanitize: compute-sanitizer is not on the PATH")
        return
    small: dict[str, list[str]] = {}
    failed = _failed_variants(session)
    listed = dict.fromkeys([*(key for key in failed if "wgmma" in key), *SANITIZED_FIRST])
    for key in list(listed)[:CHECKED_VARIANTS]:
        texts = [text for text in small_workloads(variant(key), session.device) if session.match in text]
        small |= {key: texts} if texts else {}
    jobs = [(checker, key) for checker in TOOLS for key in small]
    problems: list[str] = []
    undone: list[str] = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        running = [pool.submit(_check, session, tool, *job, small[job[1]]) for job in jobs]
        for future, (checker, key) in zip(running, jobs, strict=True):
            done, problem = future.result()
            session.measured += done
            undone += [] if done else [f"{checker} {key}: {problem}"]
            problems += [f"{checker} {key}: {problem}"] if done and problem else []
            session.report.say(f"sanitize: {checker} {key}: {problem or 'clean'}"[:400])
            session.report.put("sanitize", total=len(jobs), problems=problems[:MOST_QUOTED], undone=undone)
    session.report.put("sanitize", complete=not undone)


def _failed_variants(session: AcceptanceRun) -> list[str]:
    """Return the variants that failed in run A."""
    steps = session.report.steps
    return sorted({key for step in ("wgmma", "headline") for key in steps.get(step, {}).get("failed", [])})


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
    """Measure small search spaces in turns and compare each time with its lower bound and its prediction."""
    spaces: list[list[AcceptanceItem]] = []
    missing: list[str] = []
    for text, key in RECORDED:
        if session.match not in text:
            continue
        candidates = [c for c in gpu_candidates(text, session.device)[0] if c.variant.key == key]
        missing += [] if candidates else [f"{key} does not support {text}"]
        spaces += [shuffled(text, c) for c in candidates]
    items = in_turns(spaces, TURN)
    tally = OutcomeTally(session, "record", len(items), missing)
    closest: dict[str, float] = {}
    predicted: dict[str, list[float]] = {}
    for item, result in run_items(session, items, BRIEFLY):
        tally.add(item, result)
        if isinstance(result, Result) and isinstance(result.outcome, Measured) and item.bound_us:
            searched = f"{item.text} {item.candidate.variant.key}"
            ratio = result.outcome.median_us / item.bound_us
            closest[searched] = min(ratio, closest.get(searched, ratio))
            forecast_us = item.candidate.predicted_us(item.row)
            predicted.setdefault(searched, []).append(result.outcome.median_us / forecast_us)
    tally.end(closest_to_bound=closest, over_prediction=_quantiles(predicted))


def _quantiles(ratios: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Return the 5 %, 50 % and 95 % quantiles of each list of ratios: measured over predicted time."""
    return {searched: np.quantile(values, (0.05, 0.5, 0.95)).tolist() for searched, values in ratios.items()}
