"""A separate database and cache for each test, repeatable examples, and marks from requirements."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.fork_server import GC_THRESHOLDS, WORKER_MODULES, ForkServer, Programs, fork_workers
from tests.support import REQUIREMENTS, missing
from tunebench import kernels
from tunebench.device import local_cpu
from tunebench.measure import processor
from tunebench.testing.postgres import Server, serving

pytest_plugins = ["tests.passed", "tests.processor_time"]

settings.register_profile("repeatable", deadline=None, derandomize=True, database=None, max_examples=40)
settings.register_profile("exhaustive", settings.get_profile("repeatable"), max_examples=100)
settings.load_profile("repeatable")

_databases = itertools.count()

TORCH_FOLDERS = ("torch", "training/coexecution", "training/fitting", "training/pipeline_runtime")
"""Folders of tests/ in which every test is marked `torch`."""

FIXTURE_MARKS = {"cluster": "server", "server": "server"}
"""Marks of every test that uses a fixture."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that run more than the default share of a large space of cases."""
    parser.addoption(
        "--configs",
        type=int,
        default=1,
        help="configurations of each CUDA C++ variant to emulate per workload, and to count (default: 1)",
    )
    parser.addoption(
        "--every-sample",
        action="store_true",
        help="run all generated cases and samples, and compile the kernels that tests run by references",
    )
    parser.addoption(
        "--exhaustive",
        action="store_true",
        help="run also the tests marked `exhaustive`, which are left out by default, and more examples",
    )


SLOW_FILES = frozenset(
    {
        "benchmarks/test_activation_memory.py",
        "benchmarks/test_fusion_benchmark.py",
        "benchmarks/test_search_benchmark.py",
        "cache_file/test_recorded_files.py",
        "cli/test_cli_binary.py",
        "cli/test_cli_completion.py",
        "cli/test_cli_db.py",
        "compile/test_compile_matrix.py",
        "db/test_migrations.py",
        "db/test_store_faults.py",
        "db/test_stores.py",
        "dispatch/test_served_on_gpus.py",
        "dispatch/test_serving.py",
        "docs/test_examples.py",
        "docs/test_site.py",
        "executor/test_baseline_judge.py",
        "executor/test_executor.py",
        "executor/test_pruning_after_compile.py",
        "explanation/test_explanation.py",
        "export/test_export.py",
        "forecast/test_forecast_network.py",
        "forecast/test_forecast_public.py",
        "forecast/test_forecast_training.py",
        "graph/test_partition.py",
        "kernels/test_batchnorm_stats.py",
        "kernels/test_conv2d_variants.py",
        "kernels/test_elementwise.py",
        "kernels/test_gemm_variants.py",
        "kernels/test_grouped_gemm.py",
        "kernels/test_numba_cpu_variants.py",
        "kernels/test_numba_epilogue.py",
        "kernels/test_reduction.py",
        "kernels/test_softmax_cpu.py",
        "measure/test_cheating_kernels.py",
        "measure/test_cuda_runner.py",
        "packaging/test_distribution.py",
        "packaging/test_source.py",
        "training/memory/test_planner.py",
        "training/pipeline/test_optimiser.py",
        "search/test_samplers_of_studies.py",
        "search/test_surrogate.py",
        "testing/test_contracts.py",
        "training/pipeline_runtime/test_pipeline_runtime.py",
        "tuning/test_baseline_rounds.py",
        "tuning/test_profile.py",
        "tuning/test_replay.py",
        "tuning/test_size_range.py",
        "tuning/test_suite.py",
        "tuning/test_tuning.py",
        "tuning/test_warm.py",
        "vocabulary/test_bound_measured.py",
    }
)
"""Files of tests that tune, compile, train, migrate or install for real; all are marked `slow`."""


LONGEST = (
    "docs/test_examples.py",
    "executor/test_ray.py",
    "kernels/test_numba_cpu_variants.py",
    "executor/test_executor.py",
    "training/fitting/test_fit.py",
    "kernels/test_cuda_variants.py",
    "tuning/test_user_code_limits.py",
    "training/coexecution/test_whole_step.py",
    "torch/test_compiled_modules.py",
    "torch/test_torch_compile.py",
    "tuning/test_tuning.py",
    "export/test_export.py",
    "db/test_faults.py",
    "kernels/test_gemm_wgmma.py",
    "explanation/test_explanation.py",
    "training/pipeline_runtime/test_pipelined_model.py",
    "compile/test_defaults.py",
    "training/cluster/test_search.py",
    "db/test_stores.py",
    "kernels/test_row_edges.py",
    "kernels/test_costs.py",
    "report/dashboard/test_browser.py",
    "kernels/test_numba_cuda_variants.py",
    "training/fitting/test_planned_peaks.py",
    "docs/test_site.py",
    "gpu/test_gpu_acceptance.py",
    "gpu/test_gpu_conformance.py",
    "training/pipeline_runtime/test_pipeline_runtime.py",
    "dispatch/test_serving.py",
    "cli/test_hostile_folder.py",
    "kernels/test_conv2d_variants.py",
    "kernels/test_gemm_variants.py",
    "kernels/test_grouped_gemm.py",
    "training/pipeline_runtime/test_cluster_plan.py",
    "packaging/test_source.py",
    "compile/test_compile_matrix.py",
    "own_kernel/test_own_kernel.py",
    "torch/test_saved_models.py",
    "measure/test_cheating_kernels.py",
    "kernels/test_batchnorm_stats.py",
    "cli/test_cli_plan_cluster.py",
    "torch/test_torch.py",
    "torch/test_compiled_model_use.py",
    "workloads/test_operators.py",
    "training/fitting/test_remembered_step.py",
    "emulate/test_emulate_hopper.py",
    "training/pipeline/test_optimiser.py",
    "vocabulary/test_bound_measured.py",
    "measure/test_cuda_libraries.py",
    "measure/test_device_arrays.py",
    "training/fitting/test_distributed.py",
    "testing/test_contracts.py",
    "training/cluster/test_stage_time.py",
    "kernels/test_conv_wgmma.py",
    "measure/test_cuda_runner.py",
    "packaging/test_distribution.py",
    "torch/test_onnx.py",
    "own_kernel/test_triton_kernel.py",
    "answer/test_unavailable.py",
    "vocabulary/test_user_code.py",
    "torch/test_compiled_calls.py",
    "tuning/test_replay.py",
    "cache_file/test_recorded_files.py",
    "torch/test_library_answers.py",
    "export/test_lookup_table.py",
    "cli/test_cli_plan_pipeline.py",
    "tuning/test_warm.py",
    "kernels/test_activations.py",
    "tuning/test_suite.py",
    "report/test_one_number.py",
    "training/cluster/test_experts.py",
    "training/cluster/test_storage.py",
    "training/coexecution/test_programs.py",
    "docs/test_docstrings.py",
    "cli/test_cli_variant_file.py",
    "tuning/test_proof.py",
)
"""Files that take the longest, which start first, so that no process is left with a long file at the end.

Files whose tests mostly wait for other processes, such as `executor/test_ray.py`, alternate with files that
compute: a processor would be idle while several waited at once.
"""


NEW_WORKERS = (
    "db/test_faults.py",
    "db/test_store_faults.py",
    "executor/",
    "gpu/",
    "measure/",
    "packaging/",
    "tuning/test_user_code_limits.py",
)
"""Files and folders whose worker processes are new interpreters, as users have them: they test how workers
start, end and protect themselves. Elsewhere, workers are forks of a process that has imported what they
need, which saves seconds of processor time for each, and their finalists take few samples."""

ENVIRONMENT = {
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # more are processes, which import torch for a few kernels
    "TORCHINDUCTOR_VEC_ISA_OK": "1",  # else each empty cache compiles a program for each vector extension
    "OPENBLAS_NUM_THREADS": "1",  # its threads spin, too, for references of a few milliseconds
    "OMP_WAIT_POLICY": "passive",  # spinning threads take processors from other tests, and launches 10 ms
    "TUNEBENCH_CPU_CACHE": "1",  # flushed before each sample, which takes 0.1 s for the cache of a server
}
"""Variables of all tests and of the processes they start."""


def pytest_configure(config: pytest.Config) -> None:
    """Set the environment before modules of tests are imported.

    Handle Ctrl-C and a hang-up also if a shell started the tests in the background or by nohup, since tests
    send them to processes, which inherit what is ignored.
    """
    os.environ.update(ENVIRONMENT)
    if config.getoption("exhaustive"):
        settings.load_profile("exhaustive")
    else:
        _draw_no_constants()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _draw_no_constants() -> None:
    """Keep constants of imported modules out of examples of Hypothesis: a test alone would draw others.

    Hypothesis has no public setting for it. Versions without these private names draw the constants.
    """
    providers = sys.modules.get("hypothesis.internal.conjecture.providers")
    constants = getattr(providers, "_local_constants", None)
    if constants is not None and hasattr(providers, "_get_local_constants"):
        providers._get_local_constants = lambda: constants


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return one process more than processors, because tests wait for the processes that they start."""
    return (os.cpu_count() or 1) + 1


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect without garbage collection, which would visit the growing number of tests again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before pytest selects tests by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by folder, fixtures and requirements, and skip those with a requirement that is not met.

    Leave out those marked `exhaustive` without `--exhaustive`.
    """
    if not config.getoption("exhaustive"):
        sweeps = [item for item in items if item.get_closest_marker("exhaustive")]
        config.hook.pytest_deselected(items=sweeps)
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]
    folder = Path(__file__).parent
    ranks = {folder / file: rank for rank, file in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path, len(ranks)))
    for item in items:
        file = item.path.relative_to(folder)
        marks = {"slow" if file.as_posix() in SLOW_FILES else None}
        marks |= {"torch" if file.as_posix().startswith(f"{name}/") else None for name in TORCH_FOLDERS}
        marks |= {FIXTURE_MARKS.get(name) for name in getattr(item, "fixturenames", ())}
        needed = {name for mark in item.iter_markers("needs") for name in mark.args}
        marks |= {REQUIREMENTS[name].mark for name in needed}
        for mark in sorted(filter(None, marks)):
            item.add_marker(mark)
        for reason in filter(None, map(missing, sorted(needed))):
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """Refuse test modules that load users' variants on import, since all tests would see them.

    Then exempt what collection created from garbage collection.
    """
    if kernels.loaded_files():
        raise pytest.UsageError(f"load in a fixture, not on import: {', '.join(kernels.loaded_files())}")
    _spare_diagnoses_of_torch()
    gc.collect()
    gc.freeze()  # modules and tests: to visit them again and again takes a fifth of Numba's time
    gc.set_threshold(*GC_THRESHOLDS)


def _spare_diagnoses_of_torch() -> None:
    """Keep torch from printing every graph that it traces, and from timing its guards with empty caches."""
    if "torch" in sys.modules:
        # pytest captures loggers that do not propagate, and torch prints graphs if this one has a handler.
        logging.getLogger("torch.__trace").propagate = True
    guards = sys.modules.get("torch._dynamo.guards")
    if hasattr(guards, "profile_guard_manager"):
        guards.profile_guard_manager = lambda *arguments: 0.0  # type: ignore[union-attr]


KEPT_DAYS = 7
"""Days that a compiled kernel is kept for later runs of the tests."""


def _compiled_folder(config: pytest.Config, base: Path) -> Path:
    """Return the cache of the tests, in which earlier runs left compiled kernels.

    A kernel's key has everything that reaches the compiler, so that an old entry is never wrong. Without
    pytest's cache, the folder is new, and shared by all processes of this run.
    """
    if getattr(config, "cache", None) is None:
        return base / "cache"
    folder = Path(config.cache.mkdir("compiled"))  # type: ignore[union-attr]
    folder.chmod(0o700)
    if "PYTEST_XDIST_WORKER" not in os.environ or os.environ["PYTEST_XDIST_WORKER"] == "gw0":
        oldest = time.time() - KEPT_DAYS * 24 * 3600
        for path in folder.rglob("*"):
            with contextlib.suppress(OSError):
                unused = max(path.stat().st_atime, path.stat().st_mtime) < oldest
                if path.is_file() and (unused or path.parent == folder):
                    path.unlink()
    return folder


def _store_rates() -> None:
    """Store rates of this machine, whose measurement takes seconds at each run on a busy machine."""
    rates = processor.ProcessorRates(gb_s=60.0, gflop_s=250.0, busy=False)
    processor.store_rates(local_cpu(), rates)


@pytest.fixture(scope="session", autouse=True)
def _session_folder(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Path]:
    """Keep tests, and the processes they start, away from the user's database and cache."""
    folder = tmp_path_factory.mktemp("session")
    base = tmp_path_factory.getbasetemp()  # of this process; its parent is shared by all xdist workers
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TUNEBENCH_DB", str(folder / "fixtures.db"))
        patch.setenv("TUNEBENCH_CACHE", str(_compiled_folder(pytestconfig, shared)))
        patch.setenv("TUNEBENCH_CONFIG", "none")
        _store_rates()
        patch.delenv("TUNEBENCH_DEBUG", raising=False)
        patch.delenv("COLUMNS", raising=False)  # xdist workers have this variable
        yield folder


@pytest.fixture(autouse=True)
def _own_database(_session_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNEBENCH_DB", str(_session_folder / f"{next(_databases)}.db"))


@pytest.fixture(scope="module", autouse=True)
def _own_variants() -> Iterator[None]:
    """Unload the variants and operators of users' files that the tests of a module loaded."""
    with kernels.variant_file_scope():
        yield


@pytest.fixture(scope="session")
def _worker_server(_session_folder: Path) -> Iterator[Callable[[], ForkServer]]:
    """Return the server whose forks are worker processes; it starts when it is first called."""
    servers: list[ForkServer] = []

    def server() -> ForkServer:
        if not servers:
            torch = [] if missing("torch") else ["torch"]
            servers.append(ForkServer.start([*WORKER_MODULES, *torch], "tests.fork_server:prepare_workers"))
        return servers[0]

    yield server
    for started in servers:
        started.close()


@pytest.fixture(scope="module", autouse=True)
def _workers(request: pytest.FixtureRequest, _worker_server: Callable[[], ForkServer]) -> Iterator[None]:
    """Let worker processes be forks, unless the module tests their start."""
    file = request.path.relative_to(Path(__file__).parent).as_posix()
    if missing("fork-server") or file.startswith(NEW_WORKERS):
        yield
        return
    restore = fork_workers(_worker_server)
    yield
    restore()


@pytest.fixture(scope="session")
def programs(_worker_server: Callable[[], ForkServer]) -> Programs:
    """Return what runs Python programs in processes that have imported torch and Numba."""
    return Programs(None if missing("fork-server") else _worker_server)


@pytest.fixture
def learns() -> Iterator[None]:
    """Skip without scikit-learn; limit its thread pools to one thread, since idle threads spin."""
    for name in ("sklearn", "scipy"):
        pytest.importorskip(name, reason="the extra `train` is not installed")
    with pytest.importorskip("threadpoolctl").threadpool_limits(limits=1):
        yield


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A PostgreSQL server of this session."""
    if reason := missing("postgres"):
        pytest.skip(reason)
    with serving() as running:
        yield running
