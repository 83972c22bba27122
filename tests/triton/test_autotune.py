"""The drop-in for `triton.autotune` under faults that its users report, with kernels on the host."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import gc
import importlib.util
import inspect
import os
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import needs_fork, needs_torch, needs_triton

triton = pytest.importorskip("triton", reason="the extra `triton` is not installed")
torch = pytest.importorskip("torch", reason="the extra `torch` is not installed")
import triton.language as tl  # noqa: E402 - after the check that it is installed
from triton.compiler.errors import CompileTimeAssertionFailure  # noqa: E402
from triton.runtime.errors import AutotunerError, OutOfResources  # noqa: E402
from triton.runtime.jit import KernelInterface  # noqa: E402

import tunebench.triton  # noqa: E402
from tunebench.db import open_store  # noqa: E402
from tunebench.device import find  # noqa: E402
from tunebench.errors import InputError  # noqa: E402
from tunebench.triton import autotuner  # noqa: E402

pytestmark = [needs_triton, needs_torch]

TIMES = {32: 3.0, 64: 2.0, 128: 1.0, 256: 4.0}


def add(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) + 1, mask=at < n)


def moved(x, y, n, BLOCK: tl.constexpr):
    # The same code at another place, with a comment.
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)

    tl.store(y + at, tl.load(x + at, mask=at < n) + 1, mask=at < n)


class HostKernel(KernelInterface):  # type: ignore[misc]
    """A kernel that Python runs on the host.

    Args:
        body: Called with the arguments of a launch by name.
        function: The function that would be compiled.
    """

    def __init__(self, body: Callable[..., None], function: Any = add) -> None:
        self.fn, self.body = function, body
        self.arg_names = list(inspect.signature(function).parameters)
        self.block = 0

    def run(self, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        named = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
        self.block = named["BLOCK"]
        self.body(**{name: named[name] for name in self.arg_names})


def right(x: Any, y: Any, n: int, BLOCK: int) -> None:
    y.copy_(x + 1)


def config(block: int, **options: Any) -> Any:
    return triton.Config({"BLOCK": block}, **options)


class Program:
    """A program with a tuned kernel; each object is a new process as far as Triton's own caches go."""

    def __init__(self, db: Path, *, body: Any = right, function: Any = add, **arguments: Any) -> None:
        self.kernel = HostKernel(body, function)
        self.timed: list[int] = []
        arguments = {"configs": [config(32), config(64), config(128)], "key": ["n"], **arguments}
        if "space" in arguments:
            del arguments["configs"]
        decorate = tunebench.triton.autotune(db=db, do_bench=self.bench, **arguments)
        self.tuned = decorate(self.kernel)

    def bench(self, call: Any, quantiles: Any) -> list[float]:
        call()
        self.timed.append(self.kernel.block)
        return [TIMES[self.kernel.block]] * 3

    def __call__(self, n: int = 100) -> int:
        x, y = torch.arange(float(n)), torch.zeros(n)
        self.tuned[(1,)](x, y, n)
        assert torch.equal(y, torch.arange(float(n)) + 1)
        return int(self.tuned.best_config.kwargs["BLOCK"])


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotuner, "current_device", lambda: find("sm_90"))


@pytest.fixture
def db(tmp_path: Path) -> Path:
    return tmp_path / "t.db"


def forked(function: Callable[[], object]) -> int:
    """Call a function in a fork of this process, and return its process number."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks of processes with threads
        child = os.fork()
    if child == 0:
        status = 1
        try:
            function()
            status = 0
        finally:
            os._exit(status)
    return child


def recorded(db: Path) -> dict[int, str]:
    """Return the newest kind of outcome of each block size."""
    with open_store(db, read_only=True) as store:
        (space,) = {s for s in store.spaces() if s.variant == "triton_add/autotune"}
        trials = store.trial_outcomes(space.device, space.workload, space.variant)
    return {trial.config["BLOCK"]: trial.outcome.kind for trial in trials}


def test_takes_the_arguments_of_triton() -> None:
    theirs = set(inspect.signature(triton.autotune).parameters)
    ours = set(inspect.signature(tunebench.triton.autotune).parameters) - {"common"}
    assert theirs - ours == {
        *("prune_configs_by", "reset_to_zero", "restore_value", "pre_hook", "post_hook"),
        *("warmup", "rep", "use_cuda_graph", "do_bench", "cache_results"),
    }
    tuned = tunebench.triton.autotune(
        [config(32)], ["n"], warmup=1, rep=1, cache_results=True, restore_value=["x"], reset_to_zero=["y"]
    )(triton.jit(add))
    assert isinstance(tuned, triton.runtime.autotuner.Autotuner)
    with pytest.raises(InputError, match="either configs= or space="):
        tunebench.triton.autotune(key=["n"])


def test_results_outlive_the_program(db: Path) -> None:
    first = Program(db)
    assert first() == first() == 128
    assert first.timed[:3] == [32, 64, 128]
    assert sorted(first.timed[3:]) == [32, 32, 128, 128]  # the fastest and the default again, in turn
    later = Program(db)
    assert later() == 128
    assert later.timed == []
    assert later(200) == 128  # another key
    assert later.timed[0] == 32


def test_one_more_configuration_voids_nothing(db: Path) -> None:
    Program(db)()
    more = Program(db, configs=[config(32), config(256), config(64), config(128)])
    assert more() == 128
    assert more.timed[0] == 256
    assert set(more.timed[1:]) == {32, 128}
    fewer = Program(db, configs=[config(32), config(64)])
    assert fewer() == 64
    assert set(fewer.timed) <= {32, 64}


def test_code_and_not_its_place_decides(tmp_path: Path) -> None:
    assert autotuner.revision_of(add) == autotuner.revision_of(_renamed(moved, tmp_path))
    assert autotuner.revision_of(add) != autotuner.revision_of(moved)


def _renamed(function: Any, folder: Path) -> Any:
    """Return a function from another file, with the name `add`."""
    file = folder / "another_place.py"
    text = inspect.getsource(function).replace("def moved", "def add")
    file.write_text(f"import triton.language as tl\n\n\n\n{text}", encoding="utf-8")
    spec = importlib.util.spec_from_file_location("another_place", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.add


FAULTS: dict[str, BaseException] = {
    "does not compile": RuntimeError("PassManager::run failed"),
    "fails an assertion": CompileTimeAssertionFailure(None, None, "BLOCK is too large"),
    "exceeds the device": OutOfResources(300_000, 227_000, "shared memory"),
    "fails at launch": RuntimeError("Triton Error [CUDA]: invalid argument"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_bad_configuration_ends_nothing(db: Path, fault: str) -> None:
    def body(x: Any, y: Any, n: int, BLOCK: int) -> None:
        if BLOCK == 128:
            raise FAULTS[fault]
        right(x, y, n, BLOCK)

    program = Program(db, body=body)
    assert program() == 64
    assert recorded(db)[128] in ("compile_failed", "launch_failed")
    assert any("128" in name for name in next(iter(program.tuned.failures.values())))
    assert Program(db, body=body)() == 64


def test_bad_default_ends_nothing(db: Path) -> None:
    def body(x: Any, y: Any, n: int, BLOCK: int) -> None:
        if BLOCK == 32:
            raise RuntimeError("no")
        right(x, y, n, BLOCK)

    assert Program(db, body=body)() == 128


def test_failure_of_all_is_an_error_with_the_reasons(db: Path) -> None:
    def body(x: Any, y: Any, n: int, BLOCK: int) -> None:
        raise RuntimeError(f"no {BLOCK}")

    with pytest.raises(AutotunerError, match=r"every configuration of add failed: .*no 32.*no 128"):
        Program(db, body=body)()


@needs_fork
def test_process_that_a_configuration_ends_does_not_run_it_again(db: Path) -> None:
    def body(x: Any, y: Any, n: int, BLOCK: int) -> None:
        if BLOCK == 128 and os.getpid() != parent:
            os._exit(9)
        right(x, y, n, BLOCK)

    parent = os.getpid()
    child = forked(Program(db, body=body))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    program = Program(db, body=body)
    assert program() == 64
    assert 128 not in program.timed
    assert recorded(db)[128] == "crashed"


def test_nothing_is_tuned_in_a_graph(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program(db)
    with monkeypatch.context() as capture:
        capture.setattr(autotuner, "_is_capturing", lambda: True)
        with pytest.warns(RuntimeWarning, match="while a CUDA graph is captured"):
            assert program() == 32
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert program() == 32  # says it once
    assert program.timed == []
    assert program() == 128


@needs_fork
def test_ranks_tune_one_after_the_other_and_agree(db: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"

    def rank() -> None:
        program = Program(db)
        best = program()
        with log.open("a") as file:
            file.write(f"{best} {len(program.timed)}\n")

    children = [forked(rank) for _ in range(3)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    lines = sorted(log.read_text().splitlines())
    assert lines == ["128 0", "128 0", "128 7"]


def test_rank_that_need_not_wait_uses_the_default(db: Path) -> None:
    waiting: list[int] = []

    def body(x: Any, y: Any, n: int, BLOCK: int) -> None:
        if BLOCK == 128 and not waiting:
            waiting.append(0)
            with pytest.warns(RuntimeWarning, match="another process tunes it"):
                waiting[0] = Program(db, wait_s=0.0)()
        right(x, y, n, BLOCK)

    assert Program(db, body=body)() == 128
    assert waiting == [32]


def test_kernel_in_place_is_restored(db: Path) -> None:
    def body(x: Any, y: Any, n: int, BLOCK: int) -> None:
        y += x + 1

    assert Program(db, body=body)() == 128  # which checks y


def test_configuration_that_writes_a_part_is_refused(db: Path) -> None:
    def body(x: Any, y: Any, n: int, BLOCK: int) -> None:
        half = n // 2 if BLOCK == 128 else n
        y[:half] = x[:half] + 1

    assert Program(db, body=body)() == 64
    assert recorded(db)[128] == "wrong_result"


@pytest.mark.parametrize(("error", "best"), [(0.01, 64), (1e-7, 128)])
def test_wrong_result_is_refused_within_the_tolerance(db: Path, error: float, best: int) -> None:
    def body(x: Any, y: Any, n: int, BLOCK: int) -> None:
        y.copy_((x + 1) * (1 + (error if BLOCK == 128 else 0)))

    program = Program(db, body=body)
    x, y = torch.ones(8), torch.zeros(8)
    program.tuned[(1,)](x, y, 8)
    assert program.tuned.best_config.kwargs["BLOCK"] == best


def test_given_reference_refuses_a_wrong_default(db: Path) -> None:
    def body(x: Any, y: Any, n: int, BLOCK: int) -> None:
        y.copy_(x + (2 if BLOCK == 32 else 1))

    assert Program(db, body=body, reference=lambda x, **_: x + 1)() == 128
    assert recorded(db)[32] == "wrong_result"


def test_default_is_never_beaten_by_noise(db: Path) -> None:
    program = Program(db)
    seen: list[int] = []

    def bench(call: Any, quantiles: Any) -> list[float]:
        call()
        block = program.kernel.block
        seen.append(block)
        return [{32: 2.0, 64: 3.0}.get(block, 1.0 if seen.count(128) == 1 else 5.0)] * 3

    program.tuned._do_bench = bench
    assert program() == 32
    assert Program(db)() == 32  # as stored


def test_failure_keeps_no_tensor(db: Path) -> None:
    def body(x: Any, y: Any, n: int, BLOCK: int) -> None:
        if BLOCK == 128:
            raise OutOfResources(300_000, 227_000, "shared memory")
        right(x, y, n, BLOCK)

    program = Program(db, body=body)
    x, y = torch.ones(8), torch.zeros(8)
    gone = weakref.ref(x)
    program.tuned[(1,)](x, y, 8)
    del x, y
    gc.collect()
    assert gone() is None


def test_configurations_with_hooks_are_stored(db: Path) -> None:
    calls: list[Any] = []
    configs = [config(32), config(128, pre_hook=lambda values: calls.append(values["BLOCK"]))]
    assert Program(db, configs=configs)() == 128
    before = len(calls)
    later = Program(db, configs=configs)
    assert later() == 128
    assert later.timed == []
    assert len(calls) == before + 1


def test_tensors_reset_to_zero_are_zero_at_the_first_launch(db: Path) -> None:
    def body(x: Any, y: Any, n: int, BLOCK: int) -> None:
        y += x + 1

    assert Program(db, body=body, reset_to_zero=["y"])() == 128
    assert Program(db, body=body, restore_value=["y"])() == 128


def test_new_key_starts_with_what_was_fast_for_others(db: Path) -> None:
    Program(db, configs=[config(block) for block in (32, 64, 256, 128)])(100)
    program = Program(db, configs=[config(block) for block in (32, 64, 256, 128)], trials=2)
    assert program(128) == 128
    assert program.timed[:2] == [32, 128]


def test_space_and_pruning(db: Path) -> None:
    space = {"BLOCK": [32, 64, 128], "num_warps": [4, 8], "maxnreg": [0, 64]}
    pruned: list[int] = []

    def early(configs: list[Any], named: dict[str, Any], **_: Any) -> list[Any]:
        pruned.append(len(configs))
        return [c for c in configs if c.kwargs["BLOCK"] != 128]

    program = Program(
        db,
        space=space,
        constraint=lambda BLOCK, num_warps, maxnreg: num_warps == 4 or BLOCK > 32,
        prune_configs_by={"early_config_prune": early},
    )
    assert program() == 64
    assert pruned == [10]
    with pytest.raises(InputError, match="no configuration of space"):
        autotuner.configs_of(space, lambda **_: False)


def test_unusable_database_and_unknown_device_do_not_stop_a_program(
    db: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    db.write_text("this is no database, and long enough to be read as one" * 100)
    with pytest.warns(RuntimeWarning, match="results are not stored"):
        assert Program(db)() == 128
    monkeypatch.setattr(autotuner, "current_device", lambda: None)
    assert Program(db)() == 128


PROGRAM = """
import torch, triton, triton.language as tl
import tunebench.triton
from tunebench.device import find
from tunebench.triton import autotuner

autotuner.current_device = lambda: find("sm_90")
times = iter([2.0, 1.0, 1.0, 2.0, 1.0, 2.0])


def bench(call, quantiles):
    call()
    return [next(times)] * 3


@tunebench.triton.autotune(
    configs=[triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128}, num_warps=8)],
    key=["n"],
    do_bench=bench,
)
@triton.jit
def scale(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)


x = torch.randn(200)
y = torch.empty_like(x)
scale[lambda meta: (triton.cdiv(200, meta["BLOCK"]),)](x, y, 200)
assert torch.equal(y, 2 * x)
print(scale.best_config, len(scale.failures))
"""


def test_kernel_of_triton_in_its_interpreter(db: Path, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    ran = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "TRITON_INTERPRET": "1", "TUNEBENCH_DB": str(db)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    assert "BLOCK: 128, num_warps: 8" in ran.stdout
    with open_store(db, read_only=True) as store:
        (space,) = (s for s in store.spaces() if s.variant.startswith("triton_scale"))
    assert space.workload == "triton_scale:n=200,dtypes=float32+float32"
