"""The CUDA runner without a GPU: on a fake driver, and with fakes of its dependencies."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.fake_driver.build import seen_by
from tests.fake_driver.nvml import WATTS
from tests.support import needs_cuda, needs_disassembler, needs_numba_cuda
from tests.toy_variants import NumbaToy, parameter_sizes
from tunebench import _environment, kernels
from tunebench.binary.disassembly import count_instructions, sass
from tunebench.compile import BinaryCache, compile_config
from tunebench.errors import DeviceError, MissingDependency
from tunebench.fault import DeviceLost, describe_exit
from tunebench.measure import _gpu, _sampler, _torch_gpu
from tunebench.measure._cache_flush import READ_PTX, Flush
from tunebench.measure._clock import Clock
from tunebench.measure._sampler import Sampler, Timing
from tunebench.measure.baseline import measure_baselines
from tunebench.measure.cuda import CudaRunner, kernel_arguments
from tunebench.measure.direct_launch import MappedTensor
from tunebench.measure.timing import Protocol
from tunebench.variant import GpuVariant, Scalar
from tunebench.workload import Tensor
from tunebench.workloads import parse

HERE = Path(__file__).parent

# -- against a driver of our own -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Outcome of every scenario of `measure_scenarios.py`."""
    return seen_by("measure_scenarios.py", tmp_path_factory.mktemp("driver"))


def test_two_gpus_measure_and_one_compares(seen: dict[str, Any]) -> None:
    assert {kind for kind, _ in seen["on two GPUs"]} == {"measured"}
    assert {gpu for _, gpu in seen["on two GPUs"]} == {"0000:01:00.0", "0000:02:00.0"}
    assert seen["on one GPU"] == [["measured", "0000:01:00.0"]] * 3


@pytest.mark.parametrize(
    ("scenario", "median_us"),
    [
        ("cold", 50),
        ("cold short", 4),
        ("warm", 50),
        ("warm short", 4),
        ("numba", 50),
        ("triton", 50),
        ("mapped", 50),
        ("mapped pixels", 50),
        ("mapped in a graph", 4),
        ("two launches", 100),
        ("shared memory", 50),
        ("another size", 50),
    ],
)
def test_correct_kernel_is_timed(seen: dict[str, Any], scenario: str, median_us: float) -> None:
    outcome = seen[scenario]
    assert outcome["kind"] == "measured", outcome
    assert outcome["median_us"] == pytest.approx(median_us, rel=1e-5)
    assert outcome["cache"] == ("warm" if "warm" in scenario or "graph" in scenario else "cold")
    assert outcome["verification"]["how"] == "reference"
    assert 0 <= outcome["verification"]["worst"] < 1


def test_power_and_energy_are_observed_on_a_fake_of_nvml(seen: dict[str, Any]) -> None:
    metrics = seen["observed right"]["metrics"]
    assert metrics["power_w"] == pytest.approx(WATTS, rel=0.2)  # the machine may be busy
    assert metrics["energy_j"] > 0
    assert (metrics["clock_mhz"], metrics["memory_clock_mhz"]) == (1755.0, 2619.0)
    assert metrics["power_updates_hz"] > 1
    assert seen["observed right"]["median_us"] == pytest.approx(50, rel=1e-5)  # observing is not timed
    assert seen["observed wrong"]["kind"] == "wrong_result"


def test_clocks_of_a_configuration_are_locked_while_it_is_measured(seen: dict[str, Any]) -> None:
    assert seen["at a clock"]["kind"] == "measured"
    assert seen["clock calls"] == [["lock", 1200, 1200], ["reset"]]


def test_short_runs_are_batched_with_warm_cache_and_noted_with_cold_cache(
    seen: dict[str, Any],
) -> None:
    assert seen["warm short"]["conditions"]["runs_in_a_sample"] == 100
    assert seen["cold short"]["conditions"]["resolution_us"] == 0.5
    assert "resolution_us" not in seen["cold"]["conditions"]


def test_thorough_task_takes_more_samples_verifies_twice_and_never_aborts(seen: dict[str, Any]) -> None:
    assert len(seen["thorough"]["samples_us"]) >= 30
    assert seen["thorough"]["verification"]["detail"].endswith("timed launches")


def test_kernel_far_above_incumbent_is_aborted(seen: dict[str, Any]) -> None:
    assert seen["hopeless"]["kind"] == "aborted"
    assert seen["hopeless"]["above_us"] == 1.0
    assert len(seen["hopeless"]["samples_us"]) == 2


@pytest.mark.parametrize(
    ("scenario", "reason"),
    [
        ("wrong", "y[999] is"),
        ("unwritten", "y[500] is nan"),
        ("mapped elsewhere", "is nan"),
        ("past the end", "the kernel wrote past the end of y"),
        ("overwrites its input", "times the tolerance"),
        ("replays a result", "in a timed launch: "),
        ("works only once", "in a timed launch: inf times the tolerance"),
        ("works only once, warm", "in a timed launch: inf times the tolerance"),
    ],
)
def test_wrong_result_is_reported(seen: dict[str, Any], scenario: str, reason: str) -> None:
    assert seen[scenario]["kind"] == "wrong_result"
    assert reason in seen[scenario]["reason"]


@pytest.mark.parametrize(("name", "median_us"), [("right", 50), ("short", 4)])
def test_correct_finalist_is_judged_from_another_process(
    seen: dict[str, Any], name: str, median_us: float
) -> None:
    outcome = seen[f"judged {name}"]
    assert outcome["kind"] == "measured", outcome
    assert outcome["median_us"] == pytest.approx(median_us, rel=1e-5)
    assert outcome["verification"]["detail"].endswith("launches, chosen at random")
    assert outcome["conditions"]["flushed_by"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("wrong", "y[999] is"),
        ("unwritten", "y[500] was not written"),
        ("past_the_end", "the kernel wrote past the end of y"),
        ("replays", "in a launch on new inputs: "),
        ("once", "y[0] was not written"),
        ("saves", "a launch takes 50 us on new inputs, but 10 us if a part of them differs"),
    ],
)
def test_finalist_that_saves_work_is_found_by_the_judge(seen: dict[str, Any], name: str, reason: str) -> None:
    outcome = seen[f"judged {name}"]
    assert outcome["kind"] == "wrong_result"
    assert reason in outcome["reason"]


def test_finalist_that_ends_its_process_has_that_outcome(seen: dict[str, Any]) -> None:
    assert seen["judged illegal"]["kind"] == "crashed"
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in seen["judged illegal"]["reason"]


def test_overwritten_inputs_are_uploaded_again(seen: dict[str, Any]) -> None:
    assert seen["after that"]["kind"] == "measured"


@pytest.mark.parametrize(
    ("scenario", "reason"),
    [
        ("block too large", "CUDA_ERROR_INVALID_VALUE"),
        ("no such kernel", "CUDA_ERROR_NOT_FOUND"),
        ("no cubin", "loading right"),
        ("wrong parameter", "[8, 8, 4, 4] bytes, but the launch passes [8, 8, 4, 8]"),
        ("map of another kernel", "[8, 8, 4, 4] bytes, but the launch passes [128, 8, 4, 4]"),
        ("too much shared memory", "1024 + 240000 bytes of shared memory"),
    ],
)
def test_refused_launch_keeps_reason_and_device(seen: dict[str, Any], scenario: str, reason: str) -> None:
    never = scenario == "too much shared memory"
    assert seen[scenario]["kind"] == ("CudaRefused" if never else "CudaError")
    assert reason in seen[scenario]["reason"]
    assert seen["another size"]["kind"] == "measured"  # it ran after all refused launches


def test_device_fault_makes_device_unusable_in_process(seen: dict[str, Any]) -> None:
    assert seen["fault"]["kind"] == "DeviceLost"
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in seen["fault"]["reason"]
    assert "toy/toy with unused=0" in seen["fault"]["reason"]
    assert seen["after the fault"]["kind"] == "DeviceLost"


def test_exit_status_of_worker_names_device_fault(seen: dict[str, Any]) -> None:
    assert seen["worker"]["kind"] == "crashed"
    assert "CUDA_ERROR_ILLEGAL_ADDRESS: the kernel read or wrote memory" in seen["worker"]["reason"]


def test_conditions_contain_device_and_versions(seen: dict[str, Any]) -> None:
    assert seen["conditions"]["gpu"] == "NVIDIA H200"
    assert seen["conditions"]["cuda"] == "13.0"
    assert {"cuda-core", "cuda-bindings", "numpy"} <= set(seen["before"]) <= set(seen["conditions"])


def test_device_of_another_machine_is_refused(seen: dict[str, Any]) -> None:
    assert seen["another device"] == "v100 is not on this machine, which has: h200-sxm (sm_90, 132 SMs)"


# -- faults --------------------------------------------------------------------------------------------------


def test_every_fault_has_unique_exit_status() -> None:
    lost = DeviceLost("CUDA_ERROR_MISALIGNED_ADDRESS", "while testing")
    assert describe_exit(lost.status) is not None
    assert str(describe_exit(lost.status)).startswith("CUDA_ERROR_MISALIGNED_ADDRESS: ")
    assert lost.status != DeviceLost("CUDA_ERROR_ILLEGAL_ADDRESS", "").status


def test_unknown_fault_ends_worker_and_other_exit_statuses_are_no_faults() -> None:
    status = DeviceLost("CUDA_ERROR_OF_THE_FUTURE", "").status
    assert str(describe_exit(status)).startswith("CUDA_ERROR_UNKNOWN")
    assert [describe_exit(exit_status) for exit_status in (0, 1, -9, 77, 137)] == [None] * 5


def test_device_faults_can_be_pickled() -> None:
    import pickle

    lost = pickle.loads(pickle.dumps(DeviceLost("CUDA_ERROR_ASSERT", "here")))
    assert (lost.name, lost.detail, str(lost)) == ("CUDA_ERROR_ASSERT", "here", "CUDA_ERROR_ASSERT: here")


# -- missing packages and GPUs -------------------------------------------------------------------------------


def test_missing_cuda_core_names_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    with pytest.raises(MissingDependency, match=r"cuda-core .*pip install 'cuda-core"):
        CudaRunner(Protocol(), _device())


def test_missing_gpu_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_gpu, "local_gpus", lambda: ())
    monkeypatch.setattr(_gpu, "require_cuda_core", lambda: None)
    with pytest.raises(DeviceError, match="is not on this machine, which has: no NVIDIA GPU"):
        _gpu.open_gpu(_device())


def _device() -> Any:
    from tunebench.device import find

    return find("h100-sxm")


# -- sampling ------------------------------------------------------------------------------------------------


class FakeGpu:
    """A GPU that records enqueued work; each kernel and each read takes a fixed time."""

    def __init__(self, kernel_us: float, *, read_us: float = 30.0, host_us: float = 10.0) -> None:
        self.kernel_us, self.read_us, self.host_us = kernel_us, read_us, host_us
        self.log: list[str] = []
        self.now = self.loading_us = 0.0

    def launch(self, launches: Any) -> None:
        self._enqueue("run", self.kernel_us)

    def graph(self, launches: Any, count: int) -> int:
        return count

    def replay(self, graph: int) -> None:
        self._enqueue(f"graph of {graph}", graph * self.kernel_us)

    def read(self, address: int, nbytes: int) -> None:
        self._enqueue(f"read {nbytes}", self.read_us + self.loading_us)
        self.loading_us = 0.0

    def _enqueue(self, action: str, us: float) -> None:
        self.log.append(action)
        self.now += us

    def time(
        self, before: Callable[[], None], work: Callable[[], None], during: Callable[[], None]
    ) -> Timing:
        before()
        start = self.now
        self.log.append("|")
        work()
        during()
        self.log.append("wait")
        return Timing(self.now - start, self.host_us)


class FakeClock:
    """A clock that returns the given readings in order and then repeats the last one."""

    def __init__(self, *clocks_mhz: float | None, reasons: frozenset[str] = frozenset()) -> None:
        self._clocks, self._reasons = list(clocks_mhz), reasons

    def sm_mhz(self) -> float | None:
        return self._clocks.pop(0) if len(self._clocks) > 1 else self._clocks[0]

    def throttled_by(self) -> frozenset[str]:
        return self._reasons

    def surroundings(self) -> dict[str, Any]:
        return {"power_limit_w": 700.0}


def sampler(gpu: FakeGpu, clock: FakeClock, flush: Flush | None = None) -> Sampler:
    return Sampler(gpu, clock, (), flush=flush, max_clock_mhz=2000.0)  # type: ignore[arg-type]


def test_cold_sample_follows_cache_flush() -> None:
    gpu = FakeGpu(5.0)
    samples = sampler(gpu, FakeClock(2000.0), Flush(0, 123))
    gpu.log.clear()
    assert samples.sample_us() == 5.0
    assert gpu.log == ["read 123", "|", "run", "wait"]
    assert samples.conditions((5.0,))["flushed_by"] == "reading 123 bytes"


def test_poisoned_outputs_are_written_back_before_cold_sample() -> None:
    gpu = FakeGpu(5.0)
    flushed = Sampler(
        gpu,
        FakeClock(2000.0),  # type: ignore[arg-type]
        (),
        flush=Flush(0, 123),
        max_clock_mhz=2000.0,
        poison=lambda: gpu.log.append("poison"),
    )
    gpu.log.clear()
    flushed.sample_us()
    assert gpu.log == ["poison", "read 123", "|", "run", "wait"]


def test_clock_is_read_while_device_is_busy_with_the_sample() -> None:
    gpu, clock = FakeGpu(5.0), FakeClock(2000.0)
    samples = sampler(gpu, clock, Flush(0, 1))
    clock.sm_mhz = lambda: gpu.log.append("clock") or 1980.0  # type: ignore[func-returns-value, method-assign]
    gpu.log.clear()
    samples.sample_us()
    assert gpu.log[-3:] == ["run", "clock", "wait"]
    assert samples.conditions((5.0,))["clock_mhz"] == 1980.0


@needs_numba_cuda
@needs_disassembler
@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_90", "sm_100", "sm_120"])
def test_flush_reads_vectors_and_writes_nothing(target: str, tmp_path: Path) -> None:
    from cuda.bindings import nvjitlink

    handle = nvjitlink.create(1, [f"-arch={target}"])
    nvjitlink.add_data(handle, nvjitlink.InputType.PTX, READ_PTX, len(READ_PTX), "read")
    nvjitlink.complete(handle)
    cubin = bytearray(nvjitlink.get_linked_cubin_size(handle))
    nvjitlink.get_linked_cubin(handle, cubin)
    nvjitlink.destroy(handle)
    code = sass(bytes(cubin))
    assert "LDG.E.128.STRONG" in code
    assert not {"ST", "STG", "ATOM", "ATOMG", "RED"} & set(count_instructions(code))


def test_flush_repeats_until_it_hides_host_overhead() -> None:
    gpu = FakeGpu(5.0, read_us=10.0, host_us=24.0)
    samples = sampler(gpu, FakeClock(2000.0), Flush(0, 1))
    gpu.log.clear()
    samples.sample_us()
    assert gpu.log == ["read 1"] * 5 + ["|", "run", "wait"]


def test_first_read_which_loads_the_kernel_does_not_count_as_cover() -> None:
    gpu = FakeGpu(5.0, read_us=10.0, host_us=24.0)
    gpu.loading_us = 1000.0
    samples = sampler(gpu, FakeClock(2000.0), Flush(0, 1))
    gpu.log.clear()
    samples.sample_us()
    assert gpu.log == ["read 1"] * 5 + ["|", "run", "wait"]


def test_warm_sample_follows_identical_run() -> None:
    gpu = FakeGpu(25.0, host_us=30.0)
    samples = sampler(gpu, FakeClock(2000.0))
    gpu.log.clear()
    assert samples.sample_us() == 25.0
    assert gpu.log == ["run"] * 3 + ["|", "run", "wait"]


def test_short_warm_runs_are_timed_as_batch() -> None:
    gpu = FakeGpu(2.0)
    samples = sampler(gpu, FakeClock(2000.0))
    gpu.log.clear()
    assert samples.sample_us() == pytest.approx(2.0)
    assert gpu.log == ["graph of 200", "|", "graph of 200", "wait"]
    assert samples.conditions((2.0,))["runs_in_a_sample"] == 200


def test_run_that_does_no_work_after_the_first_of_a_batch_is_found() -> None:
    assert _sampler.skipped_reason(12.0, 4.0) is None
    reason = _sampler.skipped_reason(60.0, 4.0)
    assert reason is not None
    assert "60 us on poisoned outputs, but 4 us in a batch" in reason


def test_run_below_timer_resolution_is_batched() -> None:
    assert sampler(FakeGpu(0.0), FakeClock(2000.0)).conditions((0.0,))["runs_in_a_sample"] == 800


def test_samples_at_low_clock_are_discarded_after_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(_sampler.time, "sleep", pauses.append)
    gpu = FakeGpu(50.0)
    clock = FakeClock(1400.0, 1499.0, 1500.0, reasons=frozenset({"software power cap"}))
    samples = sampler(gpu, clock, Flush(0, 1))
    gpu.log.clear()
    samples.sample_us()
    assert gpu.log.count("run") == 3
    assert pauses == [_sampler.RECOVERY_S] * 2
    facts = samples.conditions((50.0,))
    assert facts["discarded_samples"] == 2
    assert facts["clock_mhz"] == facts["lowest_clock_mhz"] == 1500.0
    assert facts["throttled_by"] == ["software power cap"]
    assert "samples_at_low_clock" not in facts


def test_low_clock_without_throttle_reason_gets_load_instead_of_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_sampler.time, "sleep", lambda seconds: pytest.fail("it must not pause"))
    samples = sampler(FakeGpu(50.0), FakeClock(345.0, 1980.0), Flush(0, 1))
    samples.sample_us()
    assert samples.conditions((50.0,))["discarded_samples"] == 1


def test_persistently_low_clock_is_accepted_and_noted() -> None:
    samples = sampler(FakeGpu(50.0), FakeClock(345.0), Flush(0, 1))
    for _ in range(3):
        samples.sample_us()
    facts = samples.conditions((50.0,))
    assert facts["discarded_samples"] == _sampler.MOST_DISCARDED
    assert facts["samples_at_low_clock"] == 3


def test_unreadable_clock_discards_no_samples() -> None:
    samples = sampler(FakeGpu(50.0), FakeClock(None), Flush(0, 1))
    samples.sample_us()
    assert set(samples.conditions((50.0,))) == {"power_limit_w", "flushed_by"}


# -- the clock -----------------------------------------------------------------------------------------------


class FakeNvml:
    """The used part of pynvml, for a GPU that reports no temperature."""

    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        pass

    def nvmlInit(self) -> None: ...  # noqa: N802

    def nvmlDeviceGetHandleByPciBusId(self, bus: str) -> str:  # noqa: N802
        if bus != "0000:01:00.0":
            raise self.NVMLError("Not Found")
        return "handle"

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:  # noqa: N802
        return 1755

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:  # noqa: N802
        return 0x1 | 0x4 | 0x40

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: str) -> int:  # noqa: N802
        return 700_000

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:  # noqa: N802
        return 123_400

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:  # noqa: N802
        raise self.NVMLError("Not Supported")

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "580.95.05"


def test_clock_is_read_from_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    clock = Clock("0000:01:00.0")
    assert clock.problem is None
    assert clock.sm_mhz() == 1755.0
    assert clock.throttled_by() == {"software power cap", "hardware thermal slowdown"}
    assert clock.surroundings() == {"power_limit_w": 700.0, "power_w": 123.4}
    assert clock.driver() == "580.95.05"


@pytest.mark.parametrize(
    ("module", "reason"),
    [(None, "nvidia-ml-py is not installed"), (FakeNvml(), "NVML: Not Found")],
)
def test_unreadable_clock_reports_reason(monkeypatch: pytest.MonkeyPatch, module: Any, reason: str) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", module)
    clock = Clock("0000:02:00.0")
    assert clock.problem == reason
    assert clock.sm_mhz() is None
    assert clock.throttled_by() == frozenset()
    assert clock.surroundings() == {"clocks": f"not read: {reason}"}
    assert clock.driver() is None


# -- parameters ----------------------------------------------------------------------------------------------

TENSORS = {
    "x": Tensor(name="x", shape=(3, 5), dtype="f16"),
    "scale": Tensor(name="scale", shape=(), dtype="f32"),
    "half": Tensor(name="half", shape=(), dtype="f16"),
}
INPUTS = {"scale": np.float32(1.5), "half": np.float16(-2.0)}


def in_memory(parameters: tuple[Any, ...]) -> list[bytes]:
    """Return the bytes that cuda-core passes to the driver for each parameter."""
    holder = pytest.importorskip("cuda.core._kernel_arg_handler").ParamHolder(parameters)
    pointers = (ctypes.c_void_p * len(parameters)).from_address(holder.ptr)
    sizes = [8 if isinstance(parameter, int) else parameter.nbytes for parameter in parameters]
    return [ctypes.string_at(pointer, size) for pointer, size in zip(pointers, sizes, strict=True)]


def test_parameters_are_passed_in_their_c_types() -> None:
    arguments = ("x", Scalar("int", -7), Scalar("long long", 2**40), Scalar("float", 0.25), "scale", "half")
    parameters = kernel_arguments(None, arguments, TENSORS, {"x": 0x7F00_0000_1000}, INPUTS)  # type: ignore[arg-type]
    assert in_memory(parameters) == [
        np.int64(0x7F00_0000_1000).tobytes(),
        np.int32(-7).tobytes(),
        np.int64(2**40).tobytes(),
        np.float32(0.25).tobytes(),
        np.float32(1.5).tobytes(),
        np.float16(-2.0).tobytes(),
    ]


def test_numba_array_is_passed_as_nine_words() -> None:
    parameters = kernel_arguments(NumbaToy(), ("x", Scalar("int", 3)), TENSORS, {"x": 4096}, INPUTS)
    words = (0, 0, 15, 2, 4096, 3, 5, 10, 2)
    assert in_memory(parameters) == [*(np.int64(word).tobytes() for word in words), np.int32(3).tobytes()]


def test_number_out_of_range_of_c_type_is_refused() -> None:
    with pytest.raises(OverflowError):
        kernel_arguments(None, (Scalar("int", 2**31),), {}, {}, {})  # type: ignore[arg-type]


@needs_cuda
@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("gemm/cuda_simt", "gemm:m=70,n=72,k=64,dtype=f32,epilogue=bias"),
        (
            "conv2d/cuda_implicit_gemm",
            "conv2d:n=1,c=8,h=9,w=9,k=8,r=3,s=3,stride=1,pad=1,dtype=f16,layout=nhwc",
        ),
        ("softmax/cuda_block", "softmax:rows=5,cols=77,dtype=f32,prologue=scale+mask"),
        ("softmax/numba_cuda", "softmax:rows=5,cols=77,dtype=f32,prologue=scale+mask"),
        ("layernorm/cuda_block", "layernorm:rows=5,cols=77,dtype=bf16"),
        ("gemm/cuda_wgmma", "gemm:m=70,n=72,k=64,dtype=bf16,epilogue=bias"),
    ],
)
def test_launch_parameters_match_compiled_kernel(key: str, text: str) -> None:
    pytest.importorskip("cuda.bindings", reason="cuda-bindings are not installed")
    workload, device, variant = parse(text), _device(), kernels.variant(key)
    assert isinstance(variant, GpuVariant)
    config = variant.default(workload, device)
    binary = compile_config(variant, workload, config, device, BinaryCache(_environment.binary_folder()))
    tensors = variant.tensors(workload, config)
    inputs = {t.name: np.float32(1) for t in workload.inputs() if not t.shape}
    for launch, symbol in zip(variant.launches(workload, config), binary.entries, strict=True):
        parameters = kernel_arguments(variant, launch.arguments, tensors, dict.fromkeys(tensors, 256), inputs)
        passed = [
            parameter.nbytes if isinstance(parameter, MappedTensor) else len(in_memory((parameter,))[0])
            for parameter in parameters
        ]
        assert passed == parameter_sizes(binary.payload, symbol)


# -- torch as a baseline -------------------------------------------------------------------------------------


class FakeTorch:
    """The part of torch that timing on a GPU uses; a product takes 70 microseconds, a flush 30."""

    uint8, bfloat16 = "uint8", "bfloat16"

    def __init__(self, available: bool = True) -> None:
        self.now = 0.0
        self.set: dict[str, Any] = {}
        self.cuda = SimpleNamespace(
            is_available=lambda: available,
            set_device=lambda device: None,
            synchronize=lambda: None,
            Event=lambda enable_timing: FakeEvent(self),
            current_stream=lambda: SimpleNamespace(cuda_stream=7),
        )
        self.backends = SimpleNamespace(cudnn=SimpleNamespace(allow_tf32=True, benchmark=False))
        self.__version__ = "0"

    def device(self, kind: str, index: int) -> tuple[str, int]:
        return (kind, index)

    def from_numpy(self, array: Any) -> FakeTensor:
        return FakeTensor(self, array)

    def set_float32_matmul_precision(self, precision: str) -> None:
        self.set["precision"] = precision

    def inference_mode(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class FakeTensor:
    def __init__(self, torch: FakeTorch, array: Any) -> None:
        self.torch, self.array = torch, array

    def __getitem__(self, index: int) -> FakeTensor:
        return FakeTensor(self.torch, self.array[index])

    def to(self, device: Any) -> FakeTensor:
        return self

    def matmul(self, other: FakeTensor) -> None:
        assert self.array.shape == (8, 16)
        assert other.array.shape == (16, 4)
        self.torch.now += 70.0


class FakeOpened:
    """The part of `Gpu` that torch's flush uses: a flush takes 30 microseconds."""

    pci_bus_id = "0000:01:00.0"

    def __init__(self, torch: FakeTorch) -> None:
        self._torch = torch

    def allocate(self, nbytes: int) -> int:
        self._torch.set["flush"] = nbytes
        return 1 << 20

    def read(self, address: int, nbytes: int, stream: int) -> None:
        assert (address, nbytes, stream) == (1 << 20, self._torch.set["flush"], 7)
        self._torch.now += 30.0


class FakeEvent:
    def __init__(self, torch: FakeTorch) -> None:
        self.torch, self.at = torch, 0.0

    def record(self) -> None:
        self.at = self.torch.now

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: FakeEvent) -> float:
        return (end.at - self.at) / 1e3


@pytest.fixture
def fake_torch(monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    torch = FakeTorch()
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(
        sys.modules, "torch.nn", SimpleNamespace(functional=SimpleNamespace(relu=None, gelu=None))
    )
    monkeypatch.setattr(_torch_gpu, "local_gpus", lambda: (_device(),))
    monkeypatch.setattr(_torch_gpu, "open_gpu", lambda device: FakeOpened(torch))
    return torch


@pytest.mark.parametrize(("dtype", "precision"), [("f32", "highest"), ("tf32", "high")])
def test_torch_baseline_is_timed_like_kernels(fake_torch: FakeTorch, dtype: str, precision: str) -> None:
    workload = parse(f"gemm:m=8,n=4,k=16,dtype={dtype}")
    (timed,) = measure_baselines(workload, _device(), Protocol(min_samples=3, max_samples=3))
    assert timed.name == "torch"
    assert timed.median_us == pytest.approx(70.0)
    assert fake_torch.set == {"flush": 2 * _device().l2_bytes, "precision": precision}
    assert fake_torch.backends.cudnn.allow_tf32 is (dtype == "tf32")


def test_no_baseline_if_torch_finds_no_gpu(fake_torch: FakeTorch) -> None:
    fake_torch.cuda.is_available = lambda: False
    assert measure_baselines(parse("gemm:m=8,n=4,k=16,dtype=f32"), _device(), Protocol()) == []


# -- threads of NumPy's products -----------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["import numpy; {limit}", "{limit}; import numpy"])
def test_verifying_process_multiplies_with_one_thread(order: str) -> None:
    script = f"""
import ctypes
from tunebench.measure._blas import _loaded, in_one_thread
{order.format(limit="in_one_thread()")}
numpy.ones((2, 2)) @ numpy.ones((2, 2))
for path in _loaded():
    library = ctypes.CDLL(path)
    for name in ("openblas_get_num_threads", "openblas_get_num_threads64_"):
        for found in (name, "scipy_" + name):
            if hasattr(library, found):
                print(getattr(library, found)())
"""
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    ran = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    if not ran.stdout:
        pytest.skip("NumPy has no OpenBLAS here")
    assert set(ran.stdout.split()) == {"1"}
