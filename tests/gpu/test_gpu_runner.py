"""The runner for GPUs, on a real GPU."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import needs_gpu
from tests.toy_variants import CONFIG, Toy, ToyVariant
from tunebench import _environment, device, kernels
from tunebench.compile import BinaryCache, compile_config
from tunebench.device import Device, find
from tunebench.errors import DeviceError
from tunebench.executor.process import ProcessCaller, ProcessStage
from tunebench.measure import worker
from tunebench.measure.baseline import measure_baselines
from tunebench.measure.cuda import CudaRunner
from tunebench.measure.timing import Protocol
from tunebench.measure.worker import Setup
from tunebench.outcome import Crashed, Measured, Outcome, Result, TimedOut, WrongResult
from tunebench.space import Config
from tunebench.task import Task
from tunebench.variant import GpuVariant, Variant
from tunebench.workload import Workload
from tunebench.workloads import parse

pytestmark = needs_gpu

COLD = Protocol(min_samples=5, max_samples=10)
WARM = Protocol(cache="warm", min_samples=5, max_samples=10)
KERNEL = 'extern "C" __global__ void toy(const float* x, float* y, float factor, int n) {{ {body} }}'
LOOP = "for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = x[i] * factor;"
RIGHT = KERNEL.format(body=LOOP)
BAD = {
    "wrong": (LOOP.replace("* factor", "* factor + (i == n - 1)"), "times the tolerance"),
    "unwritten": (LOOP.replace("i < n", "i < n - 1"), "is nan"),
    "past the end": (LOOP + " if (threadIdx.x == 0) y[n + 3] = 0;", "wrote past the end of y"),
}
DEADLY = {
    "illegal address": ("*(float*)16 = factor;", "CUDA_ERROR_ILLEGAL_ADDRESS"),
    "misaligned address": ("*(double*)((char*)y + 4) = factor;", "CUDA_ERROR_MISALIGNED_ADDRESS"),
    "trap": ('asm("trap;");', "CUDA_ERROR_"),
}
TOY = Toy(n=1000)


@pytest.fixture(scope="module")
def gpu() -> Device:
    return find("cuda")


def compiled(variant: Variant[Any], workload: Workload, config: Config, on: Device) -> Any:
    return compile_config(variant, workload, config, on, BinaryCache(_environment.binary_folder()))


def ask(variant: Variant[Any], workload: Workload, config: Config, on: Device, **options: Any) -> Task:
    return Task(variant=variant, workload=workload, config=config, device=on, seed=5, **options)


class Runs:
    """One runner, as in a worker process."""

    def __init__(self, protocol: Protocol, on: Device) -> None:
        self.runner, self.on = CudaRunner(protocol, on), on

    def __call__(
        self, variant: Variant[Any], workload: Workload = TOY, config: Config = CONFIG, **options: Any
    ) -> Outcome:
        binary = compiled(variant, workload, config, self.on)
        return self.runner.run(ask(variant, workload, config, self.on, **options), binary, None)[0]

    def toy(self, text: str, **launch: Any) -> Outcome:
        return self(ToyVariant(text, **launch))


@pytest.fixture
def run(gpu: Device) -> Runs:
    return Runs(COLD, gpu)


def test_correct_kernel_is_verified_and_timed(run: Runs) -> None:
    outcome = run.toy(RIGHT)
    assert isinstance(outcome, Measured), outcome
    assert 0 < outcome.median_us < 1000
    assert outcome.verification.worst is not None
    assert outcome.verification.worst < 1
    assert run.runner.conditions()["cuda"] >= "12"


def test_a_warm_short_kernel_is_batched(gpu: Device) -> None:
    outcome = Runs(WARM, gpu).toy(RIGHT)
    assert isinstance(outcome, Measured), outcome
    assert outcome.conditions["runs_in_a_sample"] > 1


def test_a_cold_run_is_slower_than_a_warm_one_that_fits_the_cache(gpu: Device) -> None:
    workload = parse("softmax:rows=2048,cols=2048,dtype=f32")
    variant = kernels.variant("softmax/cuda_block")
    config = variant.default(workload, gpu)
    cold, warm = (Runs(protocol, gpu)(variant, workload, config) for protocol in (COLD, WARM))
    assert isinstance(cold, Measured), cold
    assert isinstance(warm, Measured), warm
    assert cold.median_us > warm.median_us


@pytest.mark.parametrize("case", BAD)
def test_wrong_kernel_is_detected_and_harmless(run: Runs, case: str) -> None:
    body, reason = BAD[case]
    outcome = run.toy(KERNEL.format(body=body))
    assert isinstance(outcome, WrongResult), outcome
    assert reason in outcome.reason
    assert isinstance(run.toy(RIGHT), Measured)


def test_inputs_that_a_kernel_overwrote_are_restored(run: Runs) -> None:
    spoils = run.toy(KERNEL.format(body="((float*)x)[0] = y[0] = 1e9f;"))
    assert isinstance(spoils, WrongResult)
    assert isinstance(run.toy(RIGHT), Measured)


def test_a_refused_launch_keeps_the_device(run: Runs) -> None:
    with pytest.raises(DeviceError, match="CUDA_ERROR_INVALID_VALUE"):
        run.toy(RIGHT, block=2048)
    assert isinstance(run.toy(RIGHT), Measured)


def test_a_block_may_have_more_than_48_kilobytes_of_shared_memory(run: Runs) -> None:
    body = "extern __shared__ float s[]; s[threadIdx.x + 15000] = factor; __syncthreads();" + LOOP
    smem_bytes = 60 * 1024 + 256
    if run.on.smem_per_block_bytes < smem_bytes:
        pytest.skip("this device has less")
    assert isinstance(run.toy(KERNEL.format(body=body), smem_bytes=smem_bytes), Measured)


def test_too_much_shared_memory_is_refused(run: Runs) -> None:
    with pytest.raises(DeviceError, match="bytes of shared memory"):
        run.toy(RIGHT, smem_bytes=512 * 1024)


def test_a_binary_of_another_architecture_is_refused(run: Runs) -> None:
    other_device = find("a100-80-sxm" if run.on.compute_capability[0] != 8 else "h100-sxm")
    variant = ToyVariant(RIGHT)
    binary = compiled(variant, TOY, CONFIG, other_device)
    with pytest.raises(DeviceError, match="CUDA_ERROR_"):
        run.runner.run(ask(variant, TOY, CONFIG, run.on), binary, None)
    assert isinstance(run.toy(RIGHT), Measured)


# -- runs in a worker process ------------------------------------------------------------------------


def in_a_worker(text: str, on: Device, timeout_s: float = 60.0) -> Any:
    setup = Setup(runner="cuda", device=on, protocol=COLD)
    stage = ProcessStage(
        function=worker.measure, start=worker.start, start_arguments=(setup,), timeout_s=timeout_s
    )
    variant = ToyVariant(text)
    with ProcessCaller(stage) as caller:
        return caller.call(ask(variant, TOY, CONFIG, on), compiled(variant, TOY, CONFIG, on), None)


@pytest.mark.parametrize("case", DEADLY)
def test_gpu_fault_crashes_the_worker_with_its_name(gpu: Device, case: str) -> None:
    body, name = DEADLY[case]
    died = in_a_worker(KERNEL.format(body=body), gpu)
    assert isinstance(died, Crashed), died
    assert name in died.reason
    alive = in_a_worker(RIGHT, gpu)
    assert isinstance(alive, Result)
    assert isinstance(alive.outcome, Measured), alive.outcome


def test_a_kernel_that_hangs_is_stopped(gpu: Device) -> None:
    body = "volatile float* v = y; v[0] = 0; while (v[0] == 0) {}"
    assert isinstance(in_a_worker(KERNEL.format(body=body), gpu, timeout_s=20.0), TimedOut)
    alive = in_a_worker(RIGHT, gpu)
    assert isinstance(alive, Result)
    assert isinstance(alive.outcome, Measured), alive.outcome


# -- default configurations ----------------------------------------------------------------------------------

SMALL = (
    "gemm:m=130,n=72,k=96,dtype={dtype},epilogue=bias+gelu",
    "conv2d:n=2,c=16,h=9,w=11,k=24,r=3,s=3,stride=1,pad=1,dtype={dtype},layout=nhwc",
    "softmax:rows=33,cols=1000,dtype={dtype},prologue=scale+mask",
    "layernorm:rows=33,cols=1000,dtype={dtype}",
    "layernorm:rows=33,cols=1000,dtype={dtype},prologue=bias+residual,stats=true",
    "layernorm:rows=33,cols=1000,dtype={dtype},direction=backward",
    "batchnorm_stats:rows=1000,cols=72,dtype={dtype}",
    "batchnorm_stats:rows=1000,cols=72,dtype={dtype},direction=backward",
    "rmsnorm:rows=3,cols=40000,dtype={dtype},prologue=residual",
    "rmsnorm:rows=33,cols=1000,dtype={dtype},direction=backward",
)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("text", SMALL)
def test_every_default_configuration_is_correct(run: Runs, text: str, dtype: str) -> None:
    workload = parse(text.format(dtype=dtype))
    able = [v for v in kernels.variants(workload) if v.refuses(workload, run.on) is None]
    assert able
    for variant in able:
        assert isinstance(variant, GpuVariant)
        outcome = run(variant, workload, variant.default(workload, run.on))
        assert isinstance(outcome, Measured), (variant.key, outcome)


def test_a_large_product_is_verified_in_parts(run: Runs) -> None:
    workload = parse("gemm:m=4096,n=4100,k=4096,dtype=f16")
    variant = kernels.variant("gemm/cuda_mma")
    outcome = run(variant, workload, variant.default(workload, run.on), thorough=True)
    assert isinstance(outcome, Measured), outcome
    assert "in signed sums" in outcome.verification.detail


def test_torch_baseline_is_timed(gpu: Device) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    baselines = measure_baselines(parse("softmax:rows=4096,cols=1024,dtype=f32"), gpu, COLD)
    assert [baseline.name for baseline in baselines] == ["torch"]
    assert 0 < baselines[0].median_us < 10_000


def test_gpu_is_found() -> None:
    assert device.local_gpus()
