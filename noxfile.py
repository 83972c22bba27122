"""Everything a developer runs: `python3 -m nox -s tests`, and what `python3 -m nox --list` tells.

A session makes its own environment under `.nox/` and reuses it the next time. What follows `--` goes to the
command it runs: `python3 -m nox -s tests -- tests/vocabulary -k space`.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

import nox

if sys.version_info < (3, 11):  # noqa: UP036 (nox runs in whatever Python there is)
    sys.exit(f"tunebench needs Python 3.11 or later, and {sys.executable} is {sys.version.split()[0]}")

nox.needs_version = ">=2024.10.9"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "tests"]
nox.options.error_on_missing_interpreters = True

ARCHITECTURES = {
    "sm_80": "A100",
    "sm_86": "A10, RTX 3090",
    "sm_89": "L4, L40S, RTX 4090",
    "sm_90": "H100, H200",
    "sm_100": "B200",
    "sm_120": "RTX PRO 6000",
}
"""GPU architectures with a session of their own, and products that have them."""

TORCH = ("torch==2.13.0", "expecttest>=0.3")
"""What serving is tested with: one version, since PyTorch's own samples differ from one to the next."""

LONG = ("allotment", "calibrated", "faults", "fusion", "fuzz_imports", "patched_models", "search")
"""Benchmarks that run only if they are named."""

SOURCES = ["tunebench", "kernels", "workloads", "db", "tests", "benchmarks", "docs", "noxfile.py", "setup.py"]


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests; what needs a GPU, g++ or PostgreSQL skips itself, with a reason, where there is none.

    Files are divided among processes, so that what a file has made once serves all of its tests.
    """
    session.install("-e", ".[cuda,postgres,cluster,dev]", *TORCH)
    session.run("pytest", "--numprocesses=auto", "--maxprocesses=8", "--dist=loadfile", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, formatting, types and who imports whom."""
    session.install("-e", ".[postgres,dev]")
    session.run("ruff", "check", *SOURCES)
    session.run("ruff", "format", "--check", *SOURCES)
    session.run("mypy")
    session.run("lint-imports", "--no-cache")


@nox.session
def docs(session: nox.Session) -> None:
    """Run every example of the README and of docs/."""
    session.install("-e", ".[cuda,dev]")
    session.run("pytest", "tests/docs", *session.posargs)


@nox.session
def tune(session: nox.Session) -> None:
    """Tune a workload: `nox -s tune -- --workload gemm:m=256,n=256,k=256,dtype=f32`."""
    _install_for_this_machine(session)
    session.run("tunebench", "tune", *session.posargs)


@nox.session(name="compile-matrix")
def compile_matrix(session: nox.Session) -> None:
    """Compile random configurations for every architecture: `nox -s compile-matrix -- --configs 20`."""
    session.install(".[cuda]")
    session.run("python", "benchmarks/compile_matrix.py", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Run the benchmarks whose figures the README quotes, or one: `nox -s bench -- overhead --trials 100`.

    Those in `LONG` run only if they are named: they take long, and `search` and `calibrated` read recordings
    that are no part of the project.
    """
    scripts = {
        path.stem: path
        for path in sorted(Path("benchmarks").glob("*.py"))
        if "__main__" in path.read_text(encoding="utf-8")  # the others help these
        and path.stem != "compile_matrix"  # takes hours, and has a session of its own
    }
    chosen = session.posargs[:1] or [name for name in scripts if name not in LONG]
    if unknown := set(chosen) - set(scripts):
        session.error(f"unknown benchmark: {', '.join(unknown)}; known: {', '.join(scripts)}")
    extras = {"search": "peers", "patched_models": "torch"}
    _install_for_this_machine(session, *(extras[name] for name in chosen if name in extras))
    for name in chosen:
        session.run("python", str(scripts[name]), *session.posargs[1:])


@nox.session(name="train-predictor")
def train_predictor(session: nox.Session) -> None:
    """Learn the model of `predict` again: `nox -s train-predictor -- --measured FILE` adds times of your own.

    Reads the public measurements that lie beside the checkout, and writes the model into the package and its
    errors on devices left out into benchmarks/results/predict.
    """
    data = Path("..", "shared", "data", "predict").resolve()
    if not data.is_dir():
        session.error(f"needs the public measurements of operators in {data}; see docs/predictor.md")
    session.install("-e", ".[train]")
    errors = "benchmarks/results/predict/errors.json"
    module = "tunebench.forecast.training"
    session.run("python", "-m", module, "--data", str(data), "--errors", errors, *session.posargs)


def _add_gpu_session(architecture: str, products: str) -> None:
    def accept(session: nox.Session) -> None:
        if not _has_driver():
            session.error(f"needs a GPU of {architecture} ({products}); this machine has no NVIDIA driver")
        session.install(".[cuda,dev]")
        listed = session.run("tunebench", "devices", "--json", silent=True)
        here = {device["architecture"] for device in json.loads(str(listed)) if device["known"] == "here"}
        if architecture not in here:
            session.error(f"needs a GPU of {architecture} ({products}); this machine has: {', '.join(here)}")
        session.run("python", "-m", "tests.gpu.acceptance", "--arch", architecture, *session.posargs)

    accept.__doc__ = f"Accept the CUDA kernels on a GPU of {architecture} ({products})."
    nox.session(name=f"gpu-{architecture}")(accept)


for _architecture, _products in ARCHITECTURES.items():
    _add_gpu_session(_architecture, _products)


def _install_for_this_machine(session: nox.Session, *extras: str) -> None:
    """Install the package as a user would: with some extras, and with what its GPU needs if there is one."""
    extras = (*extras, "cuda") if _has_driver() else extras
    session.install(f".[{','.join(extras)}]" if extras else ".")


def _has_driver() -> bool:
    """Tell whether this machine has a CUDA driver."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
