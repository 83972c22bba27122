"""Compilation: binary keys, compilers by language, and messages of failures."""

from __future__ import annotations

import dataclasses
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fork_server import Programs
from tests.support import needs_cuda, needs_numba_cuda, needs_nvrtc
from tests.toy_variants import CONFIG, NumbaToy, Toy, ToyVariant
from tunebench import compile as compiling
from tunebench.binary.compiled import Binary
from tunebench.binary.cubin import read_cubin
from tunebench.compile import (
    BinaryCache,
    CompileError,
    carried_key,
    compile_config,
    numba_cuda,
    nvrtc,
    unavailable,
)
from tunebench.device import representative
from tunebench.emulate.emulator import EmulationFailed
from tunebench.emulate.numba_simulator import simulate
from tunebench.errors import BrokenDependency, MissingDependency, install_command
from tunebench.fault import names_mended_fault
from tunebench.space import Config
from tunebench.variant import Language, Launch
from tunebench.workload import Tensor

SM_80, SM_90 = representative("sm_80"), representative("sm_90")
SIGNATURE = "__global__ void toy(const float* x, float* y, float factor, int n) {"
RIGHT = ToyVariant(f"{SIGNATURE} y[threadIdx.x] = x[threadIdx.x] * factor; }}")

# -- NVRTC ---------------------------------------------------------------------------------------------------


@needs_nvrtc
def test_nvrtc_key_depends_on_source_entry_and_architecture() -> None:
    def key(text: str = "y[0] = 1;", n: int = 64, entry: str = "toy", **launch: Any) -> str:
        variant = ToyVariant(f"{SIGNATURE} {text} }}", entry=entry, **launch)
        return nvrtc.key_cuda(variant, Toy(n=n), CONFIG, SM_80)

    assert key() == key("/* so */ y[0]   =   1; /* it\n is */")
    assert key() == key(n=65)
    assert key() == key(block=128)
    assert key() != key("y[0] = 2;")
    assert key() != key('y[0] = 1; asm("// text");')
    assert key() != key(entry="other")
    assert key() != nvrtc.key_cuda(ToyVariant(f"{SIGNATURE} y[0] = 1; }}"), Toy(n=64), CONFIG, SM_90)


@needs_nvrtc
def test_binary_has_one_symbol_per_launch_in_launch_order() -> None:
    class Twice(ToyVariant):
        def launches(self, workload: Toy, config: Config) -> tuple[Launch, ...]:
            (launch,) = super().launches(workload, config)
            return tuple(dataclasses.replace(launch, entry=f"k<{n}>") for n in (7, 3, 7))

    source = f"template <int N> {SIGNATURE.replace('toy', 'k')} y[threadIdx.x] = N; }}"
    binary = nvrtc.compile_cuda(Twice(source), Toy(n=64), CONFIG, SM_90)
    assert [symbol.partition("Li")[2][:2] for symbol in binary.entries] == ["7E", "3E", "7E"]
    assert set(binary.entries) <= set(read_cubin(binary.payload))
    assert (binary.language, binary.target) == ("cuda", "sm_90")


@needs_nvrtc
def test_carried_binary_is_used_whatever_compiler_is_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = dataclasses.replace(
        nvrtc.compile_cuda(RIGHT, Toy(n=64), CONFIG, SM_90),
        key=carried_key(RIGHT, Toy(n=64), CONFIG, SM_90),
        compiler="NVRTC 12.9.1",
    )
    BinaryCache(tmp_path / "carried").put(made)
    monkeypatch.setattr(nvrtc, "nvrtc_version", lambda: "13.0.88")
    monkeypatch.setattr(nvrtc, "compile_source", lambda *_: pytest.fail("it must not compile"))
    monkeypatch.setenv("TUNEBENCH_CARRIED", str(tmp_path / "carried"))
    cache = BinaryCache(tmp_path / "cache")
    binary = compile_config(RIGHT, Toy(n=64), CONFIG, SM_90, cache)
    assert (binary.payload, binary.compiler) == (made.payload, "NVRTC 12.9.1")
    assert not (tmp_path / "cache").exists()  # its entries are those of the compiler that is installed
    monkeypatch.setattr(nvrtc, "compile_source", compile_anew := Recorded())
    with pytest.raises(CompileError, match="anew"):
        compile_config(RIGHT, Toy(n=64), CONFIG, SM_80, cache)  # of another architecture
    monkeypatch.delenv("TUNEBENCH_CARRIED")
    with pytest.raises(CompileError, match="anew"):
        compile_config(RIGHT, Toy(n=64), CONFIG, SM_90, cache)
    assert compile_anew.targets == ["sm_80", "sm_90"]


class Recorded:
    """A compiler that fails, and the targets it was called for."""

    def __init__(self) -> None:
        self.targets: list[str] = []

    def __call__(self, source: str, entries: tuple[str, ...], target: str, flags: tuple[str, ...]) -> Any:
        self.targets.append(target)
        raise CompileError("anew")


def test_key_of_carried_binary_depends_on_what_is_compiled_only(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = MissingDependency("a compiler", "cuda")
    for module, function in ((nvrtc, "nvrtc_version"), (numba_cuda, "numba_cuda_versions")):
        monkeypatch.setattr(module, function, lambda: (_ for _ in ()).throw(absent))
    for variant in (RIGHT, NumbaToy()):
        key = carried_key(variant, Toy(n=64), CONFIG, SM_90)
        assert key == carried_key(variant, Toy(n=64), CONFIG, SM_90)
        assert key != carried_key(variant, Toy(n=64), CONFIG, SM_80)
    changed = ToyVariant(f"{SIGNATURE} y[0] = 1; }}")
    assert carried_key(RIGHT, Toy(n=64), CONFIG, SM_90) != carried_key(changed, Toy(n=64), CONFIG, SM_90)


@needs_nvrtc
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "float f = missing;",
            r'kernel\(\d+\): error: identifier "missing" is undefined `.*float f = missing',
        ),
        ("__shared__ float s[1 << 20]; s[n] = 1; __syncthreads(); y[0] = s[1];", "too much shared data"),
        ('asm("no.such.instruction;");', "Unknown modifier"),
    ],
)
def test_nvrtc_errors_are_quoted(text: str, message: str) -> None:
    with pytest.raises(CompileError, match=message):
        nvrtc.compile_cuda(ToyVariant(f"{SIGNATURE} {text} }}"), Toy(n=1), CONFIG, SM_80)


@needs_nvrtc
def test_unknown_entry_is_a_compile_error() -> None:
    with pytest.raises(CompileError, match='identifier "other" is undefined'):
        nvrtc.compile_cuda(ToyVariant(f"{SIGNATURE} }}", entry="other<3>"), Toy(n=1), CONFIG, SM_80)


@needs_nvrtc
def test_unknown_architecture_is_a_compile_error() -> None:
    device = dataclasses.replace(SM_80, architecture="sm_11")
    with pytest.raises(CompileError, match=r"sm_11.*gpu-architecture"):
        nvrtc.compile_cuda(RIGHT, Toy(n=1), CONFIG, device)


# -- Numba-CUDA ----------------------------------------------------------------------------------------------


@needs_numba_cuda
@pytest.mark.parametrize("device", [SM_80, SM_90], ids=lambda device: device.architecture)
def test_numba_cuda_compiles_to_a_cubin(device: Any) -> None:
    binary = numba_cuda.compile_numba_cuda(NumbaToy(), Toy(n=64), CONFIG, device)
    entry = read_cubin(binary.payload)[binary.entries[0]]
    assert binary.entries == (binary.entries[0],)
    assert entry.max_threads == 64
    assert entry.static_smem_bytes == 64 * 4
    assert binary.resources.spill_bytes == 0


@needs_numba_cuda
def test_numba_cuda_errors_are_quoted() -> None:
    with pytest.raises(CompileError, match="no_such_name"):
        numba_cuda.compile_numba_cuda(NumbaToy("unknown name"), Toy(n=64), CONFIG, SM_80)


@needs_numba_cuda
def test_numba_cuda_key_depends_on_block_and_architecture() -> None:
    variant = NumbaToy()
    key = numba_cuda.key_numba_cuda(variant, Toy(n=64), CONFIG, SM_80)
    assert key == numba_cuda.key_numba_cuda(variant, Toy(n=60), CONFIG, SM_80)
    assert key != numba_cuda.key_numba_cuda(variant, Toy(n=64), CONFIG, SM_90)
    assert key != numba_cuda.key_numba_cuda(NumbaToy(block=32), Toy(n=64), CONFIG, SM_80)


def test_array_parameters_follow_numba_array_descriptor() -> None:
    tensor = Tensor(name="x", shape=(5, 3, 2), dtype="f16")
    assert numba_cuda.array_parameters(tensor, 4096) == (0, 0, 30, 2, 4096, 5, 3, 2, 12, 4, 2)
    vector = Tensor(name="x", shape=(7,), dtype="f32")
    assert numba_cuda.array_parameters(vector, 1) == (0, 0, 7, 4, 1, 7, 4)


# -- Numba simulator -----------------------------------------------------------------------------------------


@needs_numba_cuda
def test_simulator_computes_the_kernel() -> None:
    x = np.arange(64, dtype=np.float32)
    y = simulate(NumbaToy(), Toy(n=60), CONFIG, {"x": x[:60], "factor": np.float32(2)})["y"]
    np.testing.assert_array_equal(y, 2 * x[:60])


@needs_numba_cuda
def test_simulator_reports_exceptions_and_timeouts() -> None:
    inputs = {"x": np.ones(60, np.float32), "factor": np.float32(2)}
    with pytest.raises(EmulationFailed, match="IndexError") as caught:
        simulate(NumbaToy("out of bounds"), Toy(n=60), CONFIG, inputs)
    assert not caught.value.timed_out
    with pytest.raises(EmulationFailed, match="did not finish") as caught:
        simulate(NumbaToy(), Toy(n=60), CONFIG, inputs, timeout_s=0.01)
    assert caught.value.timed_out


# -- compile_config ------------------------------------------------------------------------------------------


@needs_nvrtc
def test_cached_binary_gets_shared_memory_of_its_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = BinaryCache(tmp_path)
    first = compile_config(RIGHT, Toy(n=64), CONFIG, SM_80, cache)
    assert first.resources.dynamic_smem_bytes == 0
    monkeypatch.setattr(nvrtc, "compile_cuda", lambda *_: pytest.fail("compiled again"))
    cached = compile_config(ToyVariant(RIGHT._text, smem_bytes=512), Toy(n=7), CONFIG, SM_80, cache)
    assert cached.resources.dynamic_smem_bytes == 512
    assert (cached.key, cached.payload, cached.entries) == (first.key, first.payload, first.entries)


@pytest.mark.parametrize("language", ["numba-cuda", "numba-cpu"])
def test_compile_config_uses_compiler_of_the_language(
    language: Language, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tunebench.compile import numba_cpu
    from tunebench.kernels import variant
    from tunebench.workloads import parse

    module = {"numba-cuda": numba_cuda, "numba-cpu": numba_cpu}[language]
    suffix = language.replace("-", "_")
    made = Binary(key="k" * 32, language=language, target="t", payload=b"code")
    monkeypatch.setattr(module, f"key_{suffix}", lambda *_: made.key)
    monkeypatch.setattr(module, f"compile_{suffix}", lambda *_: made)
    workload = parse("softmax:rows=8,cols=64,dtype=f32")
    chosen = variant(f"softmax/{suffix}")
    config = chosen.default(workload, SM_80)
    assert compile_config(chosen, workload, config, SM_80, BinaryCache(tmp_path)).payload == b"code"


CHECKS: dict[str, tuple[Any, ...]] = {
    "cuda": (nvrtc.nvrtc_version, nvrtc.require_nvrtc),
    "numba-cuda": (numba_cuda.numba_cuda_versions, numba_cuda.require_numba_cuda),
}
"""Cached functions that check the compiler of a language."""


@pytest.fixture(params=CHECKS)
def language(request: pytest.FixtureRequest) -> Iterator[Language]:
    """Return a language whose compiler is checked again, in the test and after it."""
    name: Language = request.param
    for check in CHECKS[name]:
        check.cache_clear()
    yield name
    for check in CHECKS[name]:
        check.cache_clear()


def test_missing_dependency_names_pip_install(language: Language, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert install_command("cuda") in str(unavailable(language))
    with pytest.raises(MissingDependency):
        CHECKS[language][0]()


@needs_cuda
def test_failing_compiler_is_unavailable_with_versions_and_remedy(
    language: Language, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Installed packages that do not fit one another are found before any kernel is compiled."""
    if language == "cuda":

        def fail(*_: object) -> None:
            raise CompileError("failed to open libnvrtc-builtins.so")

        monkeypatch.setattr(nvrtc, "compile_source", fail)
        expected = ("NVRTC", nvrtc.nvrtc_version(), "libnvrtc-builtins", "--force-reinstall")
    else:
        from numba import cuda

        def fail(*_: object, **__: object) -> None:
            raise AttributeError("module 'numpy' has no attribute 'row_stack'")

        monkeypatch.setattr(cuda, "compile", fail)
        series = ".".join(np.__version__.split(".")[:2])
        expected = ("numba-cuda", f"numpy {np.__version__}", "row_stack", f"pip install 'numpy<{series}'")
    reason = unavailable(language)
    assert reason is not None
    assert all(text in reason for text in expected)
    assert "\n" not in reason
    if language == "numba-cuda":
        with pytest.raises(BrokenDependency, match="row_stack") as caught:
            compile_config(NumbaToy(), Toy(n=64), CONFIG, SM_80, BinaryCache(tmp_path))
        assert caught.value.exit_code == 6
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@needs_numba_cuda
def test_numba_cuda_does_not_need_removed_names_of_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy 2.5 removed `row_stack`, which numba-cuda 0.30 asks for when it is imported."""
    monkeypatch.delattr(np, "row_stack", raising=False)
    with numba_cuda.numpy_names_of_numba_cuda():
        assert callable(np.row_stack)
    assert not hasattr(np, "row_stack")


@needs_numba_cuda
def test_module_of_numba_instead_of_numba_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of numba-cuda are there, but its `.pth` file, which redirects `numba.cuda`, did not run."""
    from numba import cuda

    monkeypatch.delattr(cuda, "implementation")
    numba_cuda.require_numba_cuda.cache_clear()
    try:
        assert "older module" in str(unavailable("numba-cuda"))
    finally:
        numba_cuda.require_numba_cuda.cache_clear()


@needs_numba_cuda
def test_attribute_error_of_one_kernel_is_its_compile_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from numba import cuda

    numba_cuda.require_numba_cuda()

    def fail(*_: object, **__: object) -> None:
        raise AttributeError("no such lowering")

    monkeypatch.setattr(cuda, "compile", fail)
    with pytest.raises(CompileError, match="no such lowering"):
        numba_cuda.compile_numba_cuda(NumbaToy(), Toy(n=64), CONFIG, SM_80)


@needs_nvrtc
def test_generic_lambdas_compile() -> None:
    """NVRTC 13.0 takes them for host code unless an option says otherwise."""
    body = "const auto store = [&](auto value) { y[threadIdx.x] = value; }; store(x[0] * factor);"
    assert nvrtc.compile_cuda(ToyVariant(f"{SIGNATURE} {body} }}"), Toy(n=64), CONFIG, SM_90).payload


def test_numba_cpu_is_always_available() -> None:
    assert unavailable("numba-cpu") is None


WORKER = """
import gc, sys
from pathlib import Path
from tunebench.compile import worker

gc.unfreeze()  # what a process that this one is a fork of has exempted
worker.start(Path(sys.argv[1]), ())
counts = [gc.get_freeze_count()]
for _ in range(2):
    worker.compile_task(None)  # fails, as a kernel may
    counts.append(gc.get_freeze_count())
print(counts[0] == 0 < counts[1] == counts[2], gc.get_threshold()[0] > 2000)
"""


def test_workers_exempt_their_compiler_from_garbage_collection_once(
    programs: Programs, tmp_path: Path
) -> None:
    done = programs.run(["-c", WORKER, str(tmp_path)])
    assert done.stdout.split() == ["True", "True"], done.stderr


def test_exported_names_exist() -> None:
    assert all(hasattr(compiling, name) for name in compiling.__all__)


@pytest.mark.parametrize(
    ("reason", "mended"),
    [
        ("NVRTC for sm_90a: kernel(2309): error: … and host functions are not allowed in JIT mode. Co", True),
        ("AttributeError: module 'numpy' has no attribute 'row_stack'", True),
        ('NVRTC for sm_90a: kernel(3): error: identifier "missing" is undefined', False),
    ],
)
def test_failures_of_earlier_versions_are_tried_again(reason: str, mended: bool) -> None:
    assert names_mended_fault(reason) is mended
