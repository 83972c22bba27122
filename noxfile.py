"""Developer commands: `python3 -m nox --list` shows them, `python3 -m nox -s tests` runs one.

Each session has its own environment under `.nox/`, which later runs reuse. Arguments after `--` go to the
command of the session: `python3 -m nox -s tests -- tests/vocabulary -k space`.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path

import nox

if sys.version_info < (3, 11):  # noqa: UP036 (nox runs in whatever Python there is)
    sys.exit(f"tunebench needs Python 3.11 or later, and {sys.executable} is {sys.version.split()[0]}")

nox.needs_version = ">=2024.10.9"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "tests"]
nox.options.error_on_missing_interpreters = True

PYTHONS = ("3.11", "3.12", "3.13")
"""Versions of Python whose environments get the distributions."""

ARCHITECTURES = {
    "sm_80": "A100",
    "sm_86": "A10, RTX 3090",
    "sm_89": "L4, L40S, RTX 4090",
    "sm_90": "H100, H200",
    "sm_100": "B200",
    "sm_103": "B300",
    "sm_120": "RTX PRO 6000",
}
"""GPU architectures with an acceptance session, and products of each architecture."""

TORCH = ("torch==2.13.0", "expecttest>=0.3")
"""Tests run with one PyTorch version, because its OpInfo samples differ between versions."""

NVRTC = "13.0.88"
"""NVRTC that PyTorch for CUDA 13.0 pins, so that most users have it."""

RESOLVED = ("cuda", "postgres", "cluster", "plot", "dataframe", "notebook", "dashboard", "train")
"""Extras that `oldest` and `newest` install, besides HiGHS: `tests` and `docs` run with one PyTorch."""

FRAMEWORKS = ("accelerate>=1.15", "onnx>=1.18", "onnxscript>=0.5")
"""Training frameworks whose parsers read the plans that tests emit, and what reads and writes ONNX files."""

BASELINES = ("torch", "triton")
"""Packages that kernels are compared with on a GPU."""

GPU_MACHINE = (
    *("numpy==2.5.2", "numba==0.68.1", "llvmlite==0.50.0", "numba-cuda==0.30.4", "triton==3.6.0"),
    *("nvidia-cuda-nvrtc==13.0.88", "nvidia-nvjitlink==13.0.88", "nvidia-nvvm==13.0.88"),
    *("nvidia-cuda-runtime==13.0.96", "cuda-bindings==13.0.*", "cuda-core>=1.0", "cuda-pathfinder"),
    *("ml-dtypes>=0.5", "nvidia-ml-py>=13", "rich>=13.7", "typer>=0.15", "threadpoolctl>=3.5", "click"),
    *("shellingham", "markdown-it-py", "mdurl", "pygments", "annotated-doc", "typing-extensions"),
    *("tqdm", "pyyaml", "packaging", "markupsafe", "psutil"),
)
"""Packages of a machine with PyTorch 2.11 for CUDA 13.0, without PyTorch."""

CARRIED = ("optuna", "colorlog", "sqlalchemy", "alembic", "mako", "platformdirs")
"""Packages that such a machine may lack, which are carried there as wheels."""

LONG = (
    "architectures",
    "budget_schedulers",
    "busy_machine",
    "coexecution",
    "compile_matrix",
    "fusion",
    "gpu_rehearsal",
    "learned_pruner",
    "patched_models",
    "search",
)
"""Benchmarks that run only when named."""

TORCH_ROOMS = ("coexecution", "fitting", "pipeline_runtime")
"""Rooms of `tunebench.training` that need torch, whose tests `quick` leaves out."""

NOT_QUICK = ("browser", "cuda", "emulator", "gpu", "server", "slow", "torch")
"""Marks of the tests that `quick` leaves out."""

PROCESSES = min(8, (os.cpu_count() or 1) + 1)
"""Processes that run tests: one more than cores, because many tests wait for a server or a time limit."""

PARALLEL = (
    *(f"--numprocesses={PROCESSES}", "--max-worker-restart=0"),
    *("--dist=loadfile", "--no-loadscope-reorder"),
)
"""Arguments of pytest-xdist: one process runs a whole file, which sets up its fixtures once. Long files start
first (see tests/conftest.py). A process that ends is not replaced: with whole files, pytest-xdist would then
wait for its tests without end."""

BYTECODE = {"PYTHONDONTWRITEBYTECODE": ""}
"""Environment in which hundreds of processes that tests start compile the package once."""

INSTALLED = "TUNEBENCH_INSTALLED" in os.environ
"""Whether an earlier run with the same sources has installed what the sessions of tests need."""

SOURCES = ["tunebench", "kernels", "workloads", "db", "tests", "benchmarks", "docs", "noxfile.py", "setup.py"]


@nox.session
def quick(session: nox.Session) -> None:
    """Run the tests that need no compiler, torch, server or GPU; slow files are left out."""
    _install(session, "-e", ".[postgres,dashboard,dev]")
    left_out = " or ".join(NOT_QUICK)
    ignored = (
        "--ignore=tests/torch",
        "--ignore=tests/gpu",
        *(f"--ignore=tests/training/{name}" for name in TORCH_ROOMS),
    )
    session.run(
        "pytest",
        *PARALLEL,
        *_passed(),
        "--processor-time=10",
        *ignored,
        "-m",
        f"not ({left_out})",
        *session.posargs,
        env=BYTECODE,
    )


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests; those with a missing requirement (GPU, g++, PostgreSQL) are skipped with the reason."""
    _install(session, "-e", ".[cuda,postgres,cluster,dashboard,dev,docs,triton]", *FRAMEWORKS, torch=True)
    nvrtc = _install_nvrtc(session, NVRTC)
    session.run("pytest", *PARALLEL, *_passed(), "--processor-time=40", *session.posargs, env=BYTECODE)
    if all(argument.startswith("--") for argument in session.posargs):
        # Code for tensor cores is what compilers have been seen to treat differently. No test waits: a third
        # process would only import the modules once more.
        tensor_cores = ("-k", "test_default_compiles_without_problems and mma", "--numprocesses=2")
        _run_with_nvrtc(session, nvrtc, "pytest", *PARALLEL, *tensor_cores, "tests/compile/test_defaults.py")


@nox.session
def exhaustive(session: nox.Session) -> None:
    """Run all tests and the sweeps that `tests` leaves out; write benchmarks/results/exhaustive/tests.json.

    Run it before a release, and commit what it writes: tests, failures and seconds by file.
    """
    _install(session, "-e", ".[cuda,postgres,cluster,dashboard,dev,docs]", *FRAMEWORKS, torch=True)
    report = _folder(session) / "tests.xml"
    sweeps = ("--exhaustive", "--every-sample", "--configs=5", f"--junitxml={report}")
    session.run("pytest", *PARALLEL, *sweeps, *session.posargs, env=BYTECODE, success_codes=[0, 1])
    if not session.posargs:
        nvrtc = _install_nvrtc(session, NVRTC)
        _run_with_nvrtc(session, nvrtc, "pytest", *PARALLEL, "--exhaustive", "tests/compile/test_defaults.py")
    result = Path("benchmarks", "results", "exhaustive", "tests.json")
    session.run("python", "-m", "tests.summary", str(report), str(result))


def _passed() -> tuple[str, ...]:
    """Return the option that runs each test once in all sessions with the same TUNEBENCH_PASSED_TESTS."""
    return tuple(f"--passed={path}" for path in filter(None, [os.environ.get("TUNEBENCH_PASSED_TESTS")]))


def _install(session: nox.Session, *requirements: str, torch: bool = False) -> None:
    """Install requirements by uv, which takes a fifth of pip's processor time, or by pip if uv cannot.

    PyTorch comes by pip, which takes the build that a machine is set up for.
    """
    if INSTALLED:
        return
    if torch:
        session.install("--no-compile", *TORCH)
    session.install("uv")
    try:
        session.run_install("uv", "pip", "install", "--quiet", "--system-certs", *requirements)
    except nox.command.CommandFailed:
        session.install(*requirements)


def _folder(session: nox.Session) -> Path:
    """Return a folder of a session. Unlike nox's own, it does not become the one for temporary files."""
    return Path(session.virtualenv.location).resolve()


def _install_nvrtc(session: nox.Session, version: str) -> Path:
    """Return a folder with a version of NVRTC, beside that of the session's environment."""
    folder = _folder(session) / f"nvrtc-{version}"
    if not folder.exists():
        session.install("--no-deps", "--target", str(folder), f"nvidia-cuda-nvrtc=={version}")
    return folder


def _run_with_nvrtc(session: nox.Session, folder: Path, *command: str) -> None:
    """Run a command with the NVRTC in a folder."""
    # The bindings use a library that is loaded already; its metadata come first on the path.
    libraries = folder / "nvidia" / "cu13" / "lib"
    first = {"LD_PRELOAD": libraries / "libnvrtc.so.13", "LD_LIBRARY_PATH": libraries, "PYTHONPATH": folder}
    session.run(*command, env={name: str(path) for name, path in first.items()})


@nox.session(python=PYTHONS[0])
def oldest(session: nox.Session) -> None:
    """Check the lowest versions that pyproject.toml allows: compile defaults, tune, import every extra."""
    _check_versions(session, "lowest-direct")


@nox.session(python=PYTHONS[-1])
def newest(session: nox.Session) -> None:
    """Check the newest versions that pyproject.toml allows, as `oldest`: `nox -s newest -- --arch sm_90`."""
    _check_versions(session, "highest")


def _check_versions(session: nox.Session, resolution: str) -> None:
    """Install the versions that a resolver chooses, and use each of them.

    Arguments of the session go to the compilation of defaults (benchmarks/compilers.py).
    """
    folder = Path(session.create_tmp()).resolve()
    session.install("uv", "packaging")
    further, pinned = folder / "further.txt", folder / f"{resolution}.txt"
    declared = nox.project.load_toml("pyproject.toml")["project"]["optional-dependencies"]
    texts = [text for extra in ("torch", "dev") for text in declared[extra]]
    further.write_text("\n".join(text for text in texts if text.startswith(("highspy", "pebble", "pytest>"))))
    extras = [argument for extra in RESOLVED for argument in ("--extra", extra)]
    resolve = ("uv", "pip", "compile", "--quiet", "pyproject.toml", str(further), *extras)
    chosen = (
        "--resolution",
        resolution,
        "--python-version",
        str(session.python),
        "--output-file",
        str(pinned),
    )
    session.run(*resolve, *chosen, silent=True)
    session.run("uv", "pip", "install", "--quiet", "-r", str(pinned))
    session.install("--no-deps", "-e", ".")
    session.run("python", "-m", "tests.packaging.imports")
    database, workload = str(folder / f"{resolution}.db"), "softmax:rows=64,cols=256,dtype=f32"
    Path(database).unlink(missing_ok=True)  # of an earlier run, which may have another schema
    session.run("tunebench", "tune", workload, "--device", "cpu", "--trials", "2", "--db", database)
    session.run("tunebench", "lookup", workload, "--device", "cpu", "--db", database)
    session.run("tunebench", "report", "--db", database, "--out", str(folder / "report.html"))
    session.run("tunebench", "tune", "--help", silent=True)
    session.run("python", "-m", "benchmarks.compilers", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, formatting, types and who imports whom."""
    _install(session, "-e", ".[postgres,dashboard,dev]")
    session.run("ruff", "check", *SOURCES)
    session.run("ruff", "format", "--check", *SOURCES)
    session.run("mypy")
    session.run("lint-imports", "--no-cache")


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation site into site/ with executed notebooks, and run every example of docs/."""
    _install(session, "-e", ".[cuda,dev,docs,torch]", torch=True)
    environment = {"NO_MKDOCS_2_WARNING": "1", "TUNEBENCH_EXECUTE_NOTEBOOKS": "true"}
    session.run("mkdocs", "build", env=environment)
    session.run("pytest", "tests/docs", *session.posargs)


@nox.session(python=PYTHONS)
def packages(session: nox.Session) -> None:
    """Build wheel and sdist, install each in an empty environment, and tune there: `nox -s packages-3.12`."""
    folder = Path(session.create_tmp()).resolve()
    session.install("build")
    session.run("python", "-m", "build", "--outdir", str(folder))
    workload = "softmax:rows=64,cols=256,dtype=f32"
    for suffix in (".whl", ".tar.gz"):
        (built,) = folder.glob(f"*{suffix}")
        session.install("--force-reinstall", str(built))
        database = str(folder / f"{suffix.strip('.')}.db")
        with session.chdir(folder):  # the source tree must not be imported
            session.run("tunebench", "tune", workload, "--device", "cpu", "--trials", "2", "--db", database)
            session.run("tunebench", "lookup", workload, "--device", "cpu", "--db", database)
            session.run("tunebench", "report", "--db", database, "--out", "report.html")
            session.run("tunebench", "predict", workload, "--device", "h100-sxm")
        session.run("python", "-m", "pip", "check")


@nox.session
def licences(session: nox.Session) -> None:
    """List the licence of every package that tunebench needs: `nox -s licences -- postgres dashboard`."""
    extras = session.posargs or ["cuda", "postgres", "cluster", "plot", "dataframe", "dashboard"]
    _install(session, "-e", f".[{','.join(extras)}]")
    session.run("python", "-m", "tests.packaging.licences", *extras)


@nox.session
def tune(session: nox.Session) -> None:
    """Tune a workload: `nox -s tune -- --workload gemm:m=256,n=256,k=256,dtype=f32`."""
    _install_for_this_machine(session)
    session.run("tunebench", "tune", *session.posargs)


@nox.session(name="compile-matrix")
def compile_matrix(session: nox.Session) -> None:
    """Compile random configurations for every architecture: `nox -s compile-matrix -- --configs 20`."""
    session.install(".[cuda]")
    session.run("python", "-m", "benchmarks.compile_matrix", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Run the benchmarks that the docs quote, or one: `nox -s bench -- tuning_overhead --trials 100`.

    Those in `LONG` run only when named. `search`, `learned_pruner` and `budget_schedulers` read recorded
    tuning spaces that are not part of the project.
    """
    benchmarks = [
        path.stem
        for path in sorted(Path("benchmarks").glob("*.py"))
        if "__main__" in path.read_text(encoding="utf-8")
    ]
    chosen = session.posargs[:1] or [name for name in benchmarks if name not in LONG]
    if unknown := set(chosen) - set(benchmarks):
        session.error(f"unknown benchmark: {', '.join(unknown)}; known: {', '.join(benchmarks)}")
    extras = {"coexecution": "torch", "search": "peers", "patched_models": "torch"}
    _install_for_this_machine(session, *(extras[name] for name in chosen if name in extras))
    for name in chosen:
        session.run("python", "-m", f"benchmarks.{name}", *session.posargs[1:])


@nox.session
def faults(session: nox.Session) -> None:
    """Kill tuners and servers at random and check every record: `nox -s faults -- sqlite --kills 200`."""
    session.install("-e", ".[postgres,dev]")
    session.run("python", "-m", "tests.faults", *session.posargs)


@nox.session(name="fuzz-imports")
def fuzz_imports(session: nox.Session) -> None:
    """Import corrupt files and check the database after each: `nox -s fuzz-imports -- --files 100000`."""
    _fuzz(session, "imports")


@nox.session(name="fuzz-databases")
def fuzz_databases(session: nox.Session) -> None:
    """Read and write damaged databases: `nox -s fuzz-databases -- --files 10000`."""
    _fuzz(session, "databases")


@nox.session(name="fuzz-files")
def fuzz_files(session: nox.Session) -> None:
    """Read corrupt files of models, devices, clusters, plans: `nox -s fuzz-files -- --files 100000`."""
    _fuzz(session, "foreign_files")


@nox.session(name="fuzz-workloads")
def fuzz_workloads(session: nox.Session) -> None:
    """Parse nearly valid workload texts: `nox -s fuzz-workloads -- --texts 100000`."""
    _fuzz(session, "workload_texts")


def _fuzz(session: nox.Session, module: str) -> None:
    session.install("-e", ".[dev]")
    session.run("python", "-m", f"tests.fuzz.{module}", *session.posargs)


@nox.session(name="train-predictor")
def train_predictor(session: nox.Session) -> None:
    """Train the model of `predict`: `nox -s train-predictor -- --measured FILE` adds your measurements.

    Reads the public measurements in ../shared/data/predict. Writes the model into the package, and its errors
    on held-out devices to benchmarks/results/predict.
    """
    data = Path("..", "shared", "data", "predict").resolve()
    if not data.is_dir():
        session.error(f"needs the public measurements of operators in {data}; see docs/predictor.md")
    session.install("-e", ".[train]")
    errors = "benchmarks/results/predict/errors.json"
    module = "tunebench.forecast.model_training"
    session.run("python", "-m", module, "--data", str(data), "--errors", errors, *session.posargs)


@nox.session(name="acceptance-dry-run", python="3.12")
def acceptance_dry_run(session: nox.Session) -> None:
    """Do what the acceptance on a GPU does before it opens the device, with the packages of such a machine.

    Exit status 1 if a default does not compile there; `-- --previous FILE.tar.gz` checks the carried kernels.
    """
    session.install("--no-deps", *GPU_MACHINE, *CARRIED, "-e", ".")
    session.run("python", "-m", "tests.gpu.acceptance", "--dry-run", *session.posargs)


def _add_gpu_session(architecture: str, products: str) -> None:
    def accept(session: nox.Session) -> None:
        if not _has_driver():
            session.error(f"needs a GPU of {architecture} ({products}); this machine has no NVIDIA driver")
        wheels, arguments = _offline(session)
        session.install(*wheels, ".[cuda,dev]", *BASELINES)
        listed = session.run("tunebench", "devices", "--json", silent=True)
        here = {device["architecture"] for device in json.loads(str(listed)) if device["known"] == "here"}
        if architecture not in here:
            session.error(f"needs a GPU of {architecture} ({products}); this machine has: {', '.join(here)}")
        session.run("python", "-m", "tests.gpu.acceptance", "--arch", architecture, *arguments)

    accept.__doc__ = f"Accept the CUDA kernels on a GPU of {architecture} ({products}); `--offline WHEELS`."
    nox.session(name=f"gpu-{architecture}")(accept)


def _offline(session: nox.Session) -> tuple[list[str], list[str]]:
    """Return the arguments of pip, and of the session's command without `--offline WHEELS`.

    With `--offline WHEELS`, packages come from the wheels in that folder, which must have every dependency
    and those of the build (`setuptools`), and no network is needed.
    """
    arguments = list(session.posargs)
    if "--offline" not in arguments:
        return [], arguments
    at = arguments.index("--offline")
    if at + 1 == len(arguments) or not Path(arguments[at + 1]).is_dir():
        session.error("--offline needs a folder of wheels")
    return ["--no-index", "--find-links", arguments[at + 1]], arguments[:at] + arguments[at + 2 :]


for _architecture, _products in ARCHITECTURES.items():
    _add_gpu_session(_architecture, _products)


def _install_for_this_machine(session: nox.Session, *extras: str) -> None:
    """Install the package with the given extras, and with the extra `cuda` if this machine has a driver."""
    extras = (*extras, "cuda") if _has_driver() else extras
    session.install(f".[{','.join(extras)}]" if extras else ".")


def _has_driver() -> bool:
    """Return whether this machine has a CUDA driver."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
