"""The runner for GPUs that are not present: emulation and predicted times."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from tests.support import needs_compiler
from tests.toy_variants import CONFIG, Toy, ToyVariant
from tunebench import device, kernels
from tunebench.binary.compiled import Binary
from tunebench.emulate.emulator import EmulationFailed
from tunebench.errors import InputError
from tunebench.measure import offline
from tunebench.measure.offline import OfflineRunner
from tunebench.measure.timing import Protocol
from tunebench.outcome import Outcome, Predicted, WrongResult
from tunebench.space import Config
from tunebench.task import Task
from tunebench.variant import CudaVariant, NumbaCudaVariant, Variant
from tunebench.workload import Workload
from tunebench.workloads import parse

H100 = device.find("h100-sxm")
BINARY = Binary(key="", language="cuda", target="sm_90", payload=b"")


KERNEL = 'extern "C" __global__ void toy(const float* x, float* y, float factor, int n) {{ {body} }}'
RIGHT = KERNEL.format(body="for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = x[i] * factor;")
WRONG = KERNEL.format(body="for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = x[i] + factor;")
UNWRITTEN = KERNEL.format(body="for (int i = threadIdx.x; i < n - 1; i += blockDim.x) y[i] = x[i] * factor;")
# Each value passes through shared memory to the thread after, and nothing waits for it: right if threads run
# one after the other from the first.
RACING = KERNEL.format(
    body="""__shared__ float s[64];
    const int t = threadIdx.x;
    s[t] = x[t] * factor;
    if (t > 0) y[t - 1] = s[t - 1];
    if (t == 63) y[t] = s[t];"""
)
ENDLESS = KERNEL.format(body="for (volatile int i = 0;; i = 1 - i) y[0] = x[0];")


def run(variant: Variant[Any], workload: Workload, config: Config, **task: Any) -> Outcome:
    task = {"predicted_us": 12.5, "interval_us": (7.0, 24.0), "seed": 3, **task}
    runner = OfflineRunner(Protocol())
    asked = Task(variant=variant, workload=workload, config=config, device=H100, **task)
    return runner.run(asked, BINARY, None)[0]


def run_toy(text: str, n: int = 64, **task: Any) -> Outcome:
    return run(ToyVariant(text), Toy(n=n), CONFIG, **task)


@needs_compiler
def test_correct_kernel_is_emulated_in_every_order_and_gets_predicted_time() -> None:
    outcome = run_toy(RIGHT, n=100)
    assert isinstance(outcome, Predicted)
    assert outcome.predicted_us == 12.5
    assert outcome.interval_us == (7.0, 24.0)
    assert outcome.verification.how == "emulated"
    assert outcome.verification.detail == (
        "every element of toy:n=100, threads in forward, reverse, random order"
    )
    assert outcome.verification.worst is not None
    assert outcome.verification.worst < 1


@needs_compiler
@pytest.mark.parametrize(("text", "reason"), [(WRONG, "times the tolerance"), (UNWRITTEN, "y[63] is nan")])
def test_wrong_kernel_is_reported_as_wrong_result(text: str, reason: str) -> None:
    outcome = run_toy(text)
    assert isinstance(outcome, WrongResult)
    assert outcome.reason.startswith("emulated on toy:n=64, threads in forward order: ")
    assert reason in outcome.reason


@needs_compiler
def test_race_is_detected_by_another_thread_order() -> None:
    outcome = run_toy(RACING)
    assert isinstance(outcome, WrongResult)
    assert "threads in reverse order" in outcome.reason


@needs_compiler
def test_crash_in_emulation_is_wrong_result() -> None:
    outcome = run_toy(KERNEL.format(body="y[n + 100000000] = x[0] * factor;"))
    assert isinstance(outcome, WrongResult)


@needs_compiler
def test_unfinished_emulation_is_not_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline, "EMULATION_TIMEOUT_S", 0.5)
    outcome = run_toy(ENDLESS)
    assert isinstance(outcome, Predicted)
    assert outcome.verification.how == "not verified"
    assert "0.5 s" in outcome.verification.detail


def test_missing_host_compiler_skips_verification_with_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    outcome = run_toy(WRONG)
    assert isinstance(outcome, Predicted)
    assert outcome.verification.how == "not verified"
    assert outcome.verification.worst is None
    assert "install a C++ compiler" in outcome.verification.detail


@needs_compiler
def test_source_refused_by_host_compiler_is_not_verified() -> None:
    outcome = run_toy(KERNEL.format(body="no_such_function(x);"))
    assert isinstance(outcome, Predicted)
    assert outcome.verification.how == "not verified"
    assert "no_such_function" in outcome.verification.detail


@needs_compiler
@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("softmax/cuda_block", "softmax:rows=100000,cols=300,dtype=f16"),
        ("layernorm/cuda_block", "layernorm:rows=50000,cols=100,dtype=f32"),
        ("rmsnorm/cuda_backward", "rmsnorm:rows=50000,cols=100,dtype=bf16,direction=backward"),
    ],
)
def test_large_workload_is_verified_on_emulation_workload(key: str, text: str) -> None:
    workload, variant = parse(text), kernels.variant(key)
    assert isinstance(variant, CudaVariant)
    config = variant.default(workload, H100)
    outcome = run(variant, workload, config)
    assert isinstance(outcome, Predicted)
    assert outcome.verification.how == "emulated"
    assert str(variant.emulation_workload(workload, config)) in outcome.verification.detail


# -- Numba-CUDA ----------------------------------------------------------------------------------------------


def softmax() -> tuple[NumbaCudaVariant[Any], Workload]:
    workload = parse("softmax:rows=2,cols=40,dtype=f32")
    variant = kernels.variant("softmax/numba_cuda")
    assert isinstance(variant, NumbaCudaVariant)
    return variant, workload


def test_numba_cuda_kernel_is_simulated() -> None:
    pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")
    variant, workload = softmax()
    outcome = run(variant, workload, variant.default(workload, H100))
    assert isinstance(outcome, Predicted), outcome
    assert outcome.verification.how == "simulated"


@pytest.mark.parametrize(
    ("reason", "timed_out", "expected"),
    [
        ("simulation: AttributeError: shfl_sync", False, Predicted),
        ("simulation: IndexError: index 9 is out of bounds", False, WrongResult),
        ("simulation did not finish in 45 s", True, Predicted),
    ],
)
def test_feature_missing_from_simulator_is_not_a_kernel_failure(
    monkeypatch: pytest.MonkeyPatch, reason: str, timed_out: bool, expected: type[Any]
) -> None:
    def fails(*arguments: Any, **options: Any) -> Mapping[str, Any]:
        raise EmulationFailed(reason, timed_out)

    monkeypatch.setattr(offline, "simulate", fails)
    variant, workload = softmax()
    outcome = run(variant, workload, variant.default(workload, H100))
    assert isinstance(outcome, expected)
    if isinstance(outcome, Predicted):
        assert outcome.verification.how == "not verified"
        assert outcome.verification.detail == reason


def test_wrong_simulated_result_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline, "simulate", lambda *a, **k: {"y": np.zeros((2, 40), np.float32)})
    variant, workload = softmax()
    monkeypatch.setattr(type(variant), "emulation_workload", lambda self, w, c: w)
    outcome = run(variant, workload, variant.default(workload, H100))
    assert isinstance(outcome, WrongResult)
    assert outcome.reason.startswith(f"simulated on {workload}: ")


# -- misuse --------------------------------------------------------------------------------------------------


def test_task_without_predicted_time_is_refused() -> None:
    with pytest.raises(InputError, match="needs predicted_us"):
        run_toy(RIGHT, predicted_us=None)


def test_cpu_variant_is_refused() -> None:
    workload = parse("softmax:rows=2,cols=40,dtype=f32")
    with pytest.raises(InputError, match="does not run on a GPU"):
        run(kernels.variant("softmax/numba_cpu"), workload, Config({}))
