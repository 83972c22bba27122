"""Calls of compiled modules: changed parameters and sizes, checked groups, random modules."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, given, settings

torch = pytest.importorskip("torch", reason="the extra `torch` is not installed")

from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import tunebench.torch as served  # noqa: E402
from tests.support import measured, record_outcome  # noqa: E402
from tests.torch.compiled_check import Function, check, results  # noqa: E402
from tests.torch.generated_modules import CHANGES, Program, generated, programs  # noqa: E402
from tests.torch.reference_kernels import (  # noqa: E402
    ReferenceKernel,
    forgotten_kernels,
    reference_bindings,
    reference_kernels,
)
from tunebench import kernels  # noqa: E402
from tunebench.cli import run as run_cli  # noqa: E402
from tunebench.device import local_cpu  # noqa: E402
from tunebench.dispatch import DispatchedCall, choice  # noqa: E402
from tunebench.torch.compiler import _kernel_operator  # noqa: E402
from tunebench.torch.compiler._kernel_operator import (  # noqa: E402
    KernelTensor,
    layouts_of,
    layouts_text,
)
from tunebench.torch.compiler.backend import backend_of  # noqa: E402
from tunebench.workloads import parse  # noqa: E402

R = torch.randn


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)


@pytest.mark.inductor
def test_results_that_read_no_input_are_new_in_each_call() -> None:
    def model(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        steps = torch.arange(4.0) * 2
        return x + steps, steps, torch.zeros_like(x)

    x = R(3, 4)
    torch._dynamo.reset()
    compiled = served.compile(model)
    with reference_kernels(), served.prefer("tunebench"), torch.no_grad():
        for _ in range(2):
            results = compiled(x)
            torch.testing.assert_close(results, model(x))
            for result in results[1:]:
                result.add_(1.0)  # as callers may


@pytest.mark.inductor
@pytest.mark.parametrize("memory_planning", [False, True])
def test_inductor_allocates_results_of_kernels_that_nothing_reads(
    memory_planning: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        mixed = functional.scaled_dot_product_attention(q, k, v)  # also logarithms of sums
        again = functional.scaled_dot_product_attention(mixed, k, v)
        mixed[0, 0, 2:4] = 0.0
        weight, bias = k[0, 0, 0], k[0, 1, 0]
        (normalized, _, _), (_, mean, _) = (
            torch.native_layer_norm(tensor, (16,), weight, bias, 1e-5) for tensor in (mixed, again)
        )
        return mixed, mixed.transpose(1, 2), normalized.chunk(2, 2)[1], mean

    torch._dynamo.reset()
    compiled, tensors = served.compile(model), [R(1, 2, 8, 16) for _ in "qkv"]
    monkeypatch.setattr(_kernel_operator._KernelCall, "results", None)  # what torch's dispatcher calls
    with (
        reference_kernels() as ran,
        served.prefer("tunebench"),
        torch._inductor.config.patch(memory_planning=memory_planning),
        torch.no_grad(),
    ):
        for _ in range(2):
            torch.testing.assert_close(compiled(*tensors), model(*tensors))
    assert {workload.operator for workload in ran} >= {"attention", "layernorm"}


def test_layouts_need_no_escape_in_generated_code() -> None:
    read = (KernelTensor((2, 3), (1, 2), torch.bfloat16, 6), KernelTensor((), (), torch.int64))
    written = (KernelTensor((4,), (1,), torch.float32),)
    text = layouts_text(read, written)
    assert not {'"', "\\"} & set(text)
    assert layouts_of(text) == layouts_of(text.replace("'", '"')) == (read, written)  # as saved earlier


def test_constant_batch_norm_follows_every_change_of_its_statistics() -> None:
    for change in CHANGES:
        model = nn.Sequential(nn.Conv2d(4, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU()).eval()
        assert check(model, [R(2, 4, 6, 6)], training=False, change=change) == {"conv2d"}


def test_module_made_in_inference_mode_is_compiled() -> None:
    with torch.inference_mode():
        model = nn.Sequential(nn.Conv2d(4, 4, 3, bias=False), nn.BatchNorm2d(4)).eval()
        assert check(model, [R(2, 4, 6, 6)], training=False) == {"conv2d"}


@torch._dynamo.config.patch(recompile_limit=3)
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_each_batch_size_runs_by_kernels(training: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16))
    for compiled in (served.compile(model), torch.compile(model, backend="tunebench")):
        for count in (4, 5, 7, 4, 9, 11):  # more than torch recompiles
            x = R(count, 8)
            with reference_kernels() as ran, served.prefer("tunebench"):
                ours = results(compiled, [x], training=training)
            assert {"gemm", "layernorm"} <= {workload.operator for workload in ran}
            for tensors in zip(ours, results(model, [x], training=training), strict=True):
                torch.testing.assert_close(*tensors, rtol=1e-4, atol=1e-4)
        torch._dynamo.reset()


@pytest.mark.parametrize("fault", [1.01, float("nan"), float("inf")])
def test_check_drops_a_group_whose_results_differ(fault: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: ReferenceKernel, *tensors: Any, **options: Any) -> None:
        correct(self, *tensors)
        if self.workload.operator == "layernorm":
            tensors[len(self.workload.inputs())][0, 3] *= fault

    correct = ReferenceKernel.run
    model, x = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16)), R(4, 8)
    torch._dynamo.reset()
    compiled = served.compile(model, check=True)
    with reference_kernels(), served.prefer("tunebench"), torch.no_grad():
        monkeypatch.setattr(ReferenceKernel, "run", wrong)
        with pytest.warns(UserWarning, match="torch runs layernorm.* differ from torch's"):
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-6)
        calls: list[DispatchedCall] = []
        with served.watching(calls.append):
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-6)
    assert {call.function: call.by for call in calls} == {"gemm": "tunebench", "layernorm": "torch"}
    assert [bool(call.reason) for call in backend_of(compiled).fused[0]] == [False, True]


SOFTMAX = "softmax:rows=4,cols=16,dtype=f32"


class FaultyKernel(ReferenceKernel):
    """A kernel that is wrong for some configurations."""

    faulty: ClassVar[set[str]] = set()
    ran: ClassVar[list[str]] = []

    def run(self, *tensors: Any, **options: Any) -> None:
        super().run(*tensors)
        self.ran.append(str(self.config))
        if str(self.config) in self.faulty:
            tensors[-1][0, 3] *= 1.5


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[type[FaultyKernel]]:
    def bind(workload: Any, variant: Any, config: Any, device: Any, *, ordinal: int) -> FaultyKernel:
        return FaultyKernel(workload, variant, config)

    torch._dynamo.reset()
    monkeypatch.setenv("TUNEBENCH_DB", str(tmp_path / "results.db"))
    monkeypatch.setattr(choice, "_dispatchers", {})  # an equal choice keeps its kernel
    monkeypatch.setattr(choice, "bind", bind)
    monkeypatch.setattr(FaultyKernel, "faulty", set())
    monkeypatch.setattr(FaultyKernel, "ran", [])
    with forgotten_kernels():
        yield FaultyKernel


def softmax_of_rows(*, check: bool) -> Any:
    return served.compile(lambda x: functional.softmax(x, -1), check=check)


def test_configuration_with_wrong_results_is_stored_and_not_used_again(
    faulty: type[FaultyKernel], capsys: pytest.CaptureFixture[str]
) -> None:
    x = R(4, 16)
    with served.prefer("tunebench"), torch.no_grad():
        softmax_of_rows(check=False)(x)
        (config,) = set(faulty.ran)
        faulty.faulty.add(config)
        with pytest.warns(UserWarning, match="torch runs softmax"):
            torch.testing.assert_close(softmax_of_rows(check=True)(x), x.softmax(-1))
        faulty.ran.clear()
        calls: list[DispatchedCall] = []
        with served.watching(calls.append):  # as another process would
            torch.testing.assert_close(softmax_of_rows(check=False)(x), x.softmax(-1))
    assert faulty.ran == []
    assert all(call.by == "torch" for call in calls)
    assert run_cli(["show", "--workload", SOFTMAX, "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "wrong_result" in shown
    assert "times the tolerance; y[0,3] is" in shown


@pytest.mark.parametrize("is_faulty", [False, True])
def test_kernel_that_replaces_another_is_checked_before_it_runs(
    is_faulty: bool, faulty: type[FaultyKernel]
) -> None:
    x, variant, workload, device = R(4, 16), kernels.variant("softmax/numba_cpu"), parse(SOFTMAX), local_cpu()
    with served.prefer("tunebench"), torch.no_grad():
        model = softmax_of_rows(check=True)
        model(x)
        (first,) = set(faulty.ran)
        table = variant.space.enumerate(workload=workload, device=device)
        replacement = next(config for config in map(table.config, range(len(table))) if str(config) != first)
        record_outcome(os.environ["TUNEBENCH_DB"], workload, device, variant.key, replacement, measured(1.0))
        faulty.faulty |= {str(replacement)} if is_faulty else set()
        with pytest.warns(UserWarning, match="is not used for softmax") if is_faulty else nullcontext():
            torch.testing.assert_close(model(x), x.softmax(-1))
        assert faulty.ran[-1] == (first if is_faulty else str(replacement))
        torch.testing.assert_close(model(x), x.softmax(-1))


def test_kernels_use_as_many_threads_as_torch() -> None:
    import numba

    before = torch.get_num_threads()
    with reference_bindings(), served.prefer("tunebench"):
        served.softmax(R(4, 8), -1)
    numba.get_num_threads()  # starts threads, which lifts the limit if none of them was started before
    try:
        for count in (1, min(2, numba.config.NUMBA_NUM_THREADS), 1):
            torch.set_num_threads(count)
            with reference_bindings(), served.prefer("tunebench"):
                served.softmax(R(256, 64), -1)
                assert numba.get_num_threads() == count
                served.softmax(R(4, 8), -1)  # waking another thread would take longer
                assert numba.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("function", [functional.silu, torch.sigmoid, functional.gelu])
def test_activations_of_extreme_numbers_are_those_of_torch(
    function: Callable[[Tensor], Tensor], serial_kernels: None
) -> None:
    x = torch.tensor([-3e38, -1e38, -1e30, -1e4, -100.0, -88.0, -20.0, 0.0, 20.0, 88.0, 100.0, 1e38])
    x, y = (x.clone().requires_grad_() for _ in range(2))
    with served.prefer("tunebench"):
        ours = served.compile(function)(x)
        ours.sum().backward()
    expected = function(y)
    expected.sum().backward()
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-30)
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-5, atol=1e-30)


def test_part_of_a_rolled_tensor_that_is_outside_of_a_gradient_is_not_read(
    request: pytest.FixtureRequest,
) -> None:
    def function(x: Tensor) -> Tensor:
        rolled = x.roll(-1, 0)
        half = rolled.chunk(2, 0)[1]
        return rolled.sum() + (x * x).sum() + (half * half).sum()

    source = R(16)
    x, y = (source.clone()[::2].detach().requires_grad_() for _ in range(2))
    is_compiled = request.config.getoption("--every-sample")
    with nullcontext() if is_compiled else reference_kernels(), served.prefer("tunebench"):
        gradient = torch.autograd.grad(served.compile(function)(x), x)[0]
    torch.testing.assert_close(gradient, torch.autograd.grad(function(y), y)[0])


def test_memory_between_elements_of_a_gradient_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    empty_strided, filled = torch.empty_strided, 0

    def with_signaling_nan(size: Any, stride: Any, **options: Any) -> Tensor:
        nonlocal filled
        tensor = empty_strided(size, stride, **options)
        if type(tensor) is Tensor and tensor.dtype == torch.bfloat16:  # of the step in bfloat16, not traced
            extent = tensor.untyped_storage().nbytes() // 2
            tensor.as_strided((extent,), (1,)).view(torch.int16).fill_(0x7F81)
            filled += extent > tensor.numel()
        return tensor

    monkeypatch.setattr(torch, "empty_strided", with_signaling_nan)
    half = Function(lambda x: x.chunk(2, 1)[1])
    x = R(3, 6, 3).bfloat16().permute(2, 1, 0).contiguous().permute(2, 1, 0).requires_grad_()
    check(half, [x], training=True)
    assert filled


def test_generated_modules_agree_with_float64(request: pytest.FixtureRequest) -> None:
    count = 2000 if request.config.getoption("--every-sample") else 12

    @settings(max_examples=count, suppress_health_check=list(HealthCheck), deadline=None)
    @given(programs())
    def run(program: Program) -> None:
        for training in (False, True):
            model, x, source = generated(program)
            check(model, [x], training=training, change=program.change, say=f"{program}\n{source}")

    run()
