"""Shared objects of CPU kernels: equal results without Numba, threads, errors, keys and imports."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fork_server import Programs
from tests.kernels.test_numba_cpu_variants import DEFAULT
from tunebench import kernels
from tunebench.binary.compiled import Binary, CompileError
from tunebench.compile import shared_object as shared_objects
from tunebench.compile.cache import BinaryCache
from tunebench.compile.numba_cpu import key_numba_cpu
from tunebench.compile.shared_object import shared_object
from tunebench.device import local_cpu
from tunebench.dispatch import cpu, numba_threads, shared_kernel
from tunebench.dispatch.cpu import CpuKernel, SharedCpuKernel, bind_cpu
from tunebench.dispatch.kernel import cache
from tunebench.dtype import bits_dtype, bits_of
from tunebench.variant import NumbaCpuVariant
from tunebench.workload import Workload
from tunebench.workloads import parse

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared objects are made on Linux only")

QUICK = ("softmax:rows=11,cols=131,dtype=f16,prologue=scale+mask",)


def _variants(workload: Workload) -> Iterator[NumbaCpuVariant[Any]]:
    for variant in kernels.variants(workload):
        if isinstance(variant, NumbaCpuVariant) and variant.refuses(workload, local_cpu()) is None:
            yield variant


COMPILE = """
import sys
from tunebench.compile import compile_config
from tunebench.device import local_cpu
from tunebench.dispatch.kernel import cache
from tunebench.kernels import variant
from tunebench.workloads import parse

workload, chosen, cpu = parse(sys.argv[1]), variant(sys.argv[2]), local_cpu()
compile_config(chosen, workload, chosen.default(workload, cpu), cpu, cache())
"""


def _pair(
    workload: Workload, variant: NumbaCpuVariant[Any], programs: Programs
) -> tuple[CpuKernel, SharedCpuKernel]:
    """Return a kernel by Numba, and by the shared object of the same compilation.

    It is compiled in another process: in the one that compiles, calls may run functions that Numba optimised
    apart, which round differently.
    """
    config = variant.default(workload, local_cpu())
    binary = cache().get(key_numba_cpu(variant, workload, config))
    if binary is None:
        done = programs.run(["-c", COMPILE, str(workload), variant.key])
        assert done.returncode == 0, done.stderr
        binary = cache().get(key_numba_cpu(variant, workload, config))
    assert binary is not None
    entry = dataclasses.replace(binary, key=f"of a test: {binary.key}", payload=shared_object(binary))
    shared = shared_kernel.load(entry)
    assert shared is not None
    return bind_cpu(workload, variant, config, binary), SharedCpuKernel(workload, variant, config, shared)


def _arguments(kernel: CpuKernel, inputs: Mapping[str, Any]) -> list[Any]:
    outputs = {t.name: np.full(t.shape, 3, bits_dtype(t.dtype)) for t in kernel.outputs}
    values = {name: bits_of(np.ascontiguousarray(value)) for name, value in inputs.items()} | outputs
    return [values[t.name] if t.shape else float(inputs[t.name]) for t in kernel.tensors]


@pytest.mark.parametrize(
    "text", [t if t in QUICK else pytest.param(t, marks=pytest.mark.exhaustive) for t in DEFAULT]
)
def test_results_are_those_of_numba_bit_for_bit(text: str, programs: Programs) -> None:
    workload = parse(text)
    inputs = workload.draw(np.random.default_rng(0))
    for variant in _variants(workload):
        by_numba, shared = _pair(workload, variant, programs)
        expected, actual = _arguments(by_numba, inputs), _arguments(shared, inputs)
        by_numba(*expected)
        shared(*actual)
        for tensor, left, right in zip(shared.tensors, expected, actual, strict=True):
            assert not tensor.shape or left.tobytes() == right.tobytes(), (variant.key, tensor.name)


# -- errors --------------------------------------------------------------------------------------------------


def test_an_error_in_a_parallel_loop_is_a_status() -> None:
    import numba
    from numba import types
    from numba.core import serialize

    @numba.njit  # type: ignore[untyped-decorator]
    def positive(value: Any) -> Any:
        if value < 0:
            raise ValueError("negative")
        return value

    def checked(x: Any, y: Any) -> None:
        for i in numba.prange(x.shape[0]):
            y[i] = positive(x[i])

    array = types.Array(types.float32, 1, "C")
    dispatcher = numba.njit(parallel=True)(checked)
    cpu._start_threads()
    dispatcher.compile(types.void(array, array))
    (compiled,) = dispatcher.overloads.values()
    payload = serialize.dumps(compiled._reduce())
    binary = Binary(key="of a test", language="numba-cpu", target="", payload=payload)
    shared = shared_kernel.load(dataclasses.replace(binary, payload=shared_object(binary)))
    assert shared is not None
    x, y = np.array([1, 2, 3], np.float32), np.zeros(3, np.float32)
    constants = np.array([3, 4, 3, 4] * 2).tobytes()
    values = np.array([x.ctypes.data, y.ctypes.data]).tobytes()
    assert shared.run(constants, values) == 0
    assert y.tolist() == [1, 2, 3]
    x[1] = -1
    assert shared.run(constants, values) != 0
    x[1] = 1
    assert shared.run(constants, values) != 0  # and so for each call that follows


def test_an_address_is_that_of_the_first_element() -> None:
    array = np.arange(12.0).reshape(3, 4)
    array.flags.writeable = False
    for view in (array, array[1:], array.copy()):
        assert cpu._address(view) == view.ctypes.data


def test_numba_runs_what_failed(programs: Programs) -> None:
    workload = parse(QUICK[0])
    (variant,) = _variants(workload)
    by_numba, shared = _pair(workload, variant, programs)
    inputs = workload.draw(np.random.default_rng(0))
    expected, actual = _arguments(by_numba, inputs), _arguments(shared, inputs)
    by_numba(*expected)
    shared._function = lambda *_: 1
    shared(*actual)
    assert actual[-1].tobytes() == expected[-1].tobytes()


@pytest.mark.parametrize(
    ("linker", "reason"), [(None, "install binutils"), ("/bin/false", "no shared object: ")]
)
def test_without_a_working_linker_nothing_is_stored(
    linker: str | None, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shared_objects, "find_program", lambda _: linker)
    with pytest.raises(CompileError, match=reason):
        shared_objects._linked(b"")

    def refused(_: Any) -> bytes:
        return shared_objects._linked(b"")

    monkeypatch.setattr(shared_kernel, "shared_object", refused)
    binary = Binary(key="numba", language="numba-cpu", target="", payload=b"object code")
    shared_kernel.store("shared", binary, BinaryCache(tmp_path))
    assert not list(tmp_path.iterdir())


def test_an_entry_that_is_no_shared_object_is_not_loaded(tmp_path: Path) -> None:
    key, stored = "ab" * 16, BinaryCache(tmp_path)
    stored.put(Binary(key=key, language="numba-cpu", target="", payload=b"no shared object"))
    assert stored.get(key) is not None
    assert shared_kernel.find(key, stored) is None


# -- keys ----------------------------------------------------------------------------------------------------


def test_a_key_has_everything_that_decides_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = parse(QUICK[0])
    (variant,) = _variants(workload)
    config = variant.default(workload, local_cpu())

    def key(*, of: Workload = workload, **changes: Any) -> str | None:
        shared_kernel._machine.cache_clear()
        return shared_kernel.shared_key(variant, of, type(config)({**config, **changes}))

    keys = [key(), key(of=parse("softmax:rows=11,cols=131,dtype=f16")), key(passes=3)]
    for target, name, value in (
        (numba_threads, "numba_variables", {"NUMBA_NUM_THREADS": "17"}.copy),
        (shared_kernel, "_source", lambda: "another source"),
        (shared_kernel, "_processor", lambda: "another processor"),
        (shared_kernel, "installed_version", lambda _: "0.1"),
        (sys, "version", "4.0"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, value)
            keys.append(key())
    assert None not in keys
    assert len(set(keys)) == len(keys)
    assert key() == keys[0]


@pytest.mark.parametrize(
    "variables",
    [{"NUMBA_CPU_NAME": "haswell"}, {"NUMBA_THREADING_LAYER": "tbb"}, {"NUMBA_NUM_THREADS": "many"}],
)
def test_numba_decides_where_its_variables_may(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numba_threads, "numba_variables", lambda: variables)
    assert numba_threads.default_count() is None


def test_numbas_configuration_file_decides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert numba_threads.default_count()
    (tmp_path / ".numba_config.yaml").touch()
    assert numba_threads.default_count() is None


def test_source_that_changed_since_the_import_has_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shared_kernel._source()
    monkeypatch.setattr(shared_kernel, "_IMPORTED_NS", 0)
    assert shared_kernel._source() is None


def test_kernels_of_users_have_no_key() -> None:
    workload = parse(QUICK[0])
    (variant,) = _variants(workload)
    config = variant.default(workload, local_cpu())
    users = type("Users", (type(variant),), {"__module__": "theirs"})()
    assert shared_kernel.shared_key(users, workload, config) is None


# -- processes -----------------------------------------------------------------------------------------------

SERVE = """
import json, os, sys
import numpy as np
from tunebench.device import local_cpu
from tunebench.dispatch import bind, cpu, numba_threads
from tunebench.kernels import variant
from tunebench.workloads import parse

sums = {}
for text in ("x+1", "exp(x)"):
    workload = parse(f"elementwise:rows=7,cols=9,dtype=f32,expression={text}")
    chosen = variant(f"{workload.operator}/numba_cpu")
    kernel = bind(workload, chosen, chosen.default(workload, local_cpu()), local_cpu())
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(t.shape, np.float32) if t.shape else 1.0 for t in kernel.tensors]
    kernel(*arrays)
    sums[text] = arrays[-1].tobytes().hex()
imported = sorted({name.partition(".")[0] for name in sys.modules} & {"numba", "llvmlite", "torch", "optuna"})
pool = numba_threads.started()
child = os.fork()
if child == 0:
    os._exit(0 if cpu.forked() else 3)
refused = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
counts = []
if pool is not None:  # Numba, imported later, has the same threads
    numba_threads.set_thread_count(1)
    import numba
    from numba.np.ufunc import parallel
    parallel._launch_threads()
    numba_threads.set_thread_count(1)
    counts = [numba.get_num_threads(), numba.threading_layer() == pool.layer]
print(json.dumps([sums, imported, refused, counts, type(kernel).__name__]))
"""


@pytest.mark.slow
def test_a_serving_process_imports_no_numba(tmp_path: Path) -> None:
    def run(**changes: str) -> list[Any]:
        variables = {**os.environ, "NUMBA_NUM_THREADS": "2", **changes}
        done = subprocess.run(
            [sys.executable, "-c", SERVE], env=variables, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        answer: list[Any] = json.loads(done.stdout)
        return answer

    shared_before = {"TUNEBENCH_CACHE": str(tmp_path / "cache")}
    results, imported, _, _, kind = run(**shared_before)
    assert (imported, kind) == (["llvmlite", "numba"], "CpuKernel")
    assert len({*results.values()}) == 2
    served = run(**shared_before)
    assert served == [results, [], True, [1, True], "SharedCpuKernel"]
    by_workqueue = run(**shared_before, NUMBA_THREADING_LAYER="workqueue")
    assert by_workqueue == [results, [], False, [1, True], "SharedCpuKernel"]
    by_numba = run(**shared_before, NUMBA_OPT="3")
    assert (by_numba[0], by_numba[-1]) == (results, "CpuKernel")
