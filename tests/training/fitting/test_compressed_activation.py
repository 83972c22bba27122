"""Compressed activations: what they round, the errors of gradients, plans with them, and what stays exact."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, fx, nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from benchmarks.compressed_gradients import MODELS, gradient_error  # noqa: E402
from benchmarks.planned_peaks import LiveStorages  # noqa: E402
from tunebench.errors import InputError  # noqa: E402
from tunebench.training.fitting import compressed_activation, fitter  # noqa: E402
from tunebench.training.fitting.compressed_activation import (  # noqa: E402
    FORMATS,
    compress,
    compressible,
    restore,
)
from tunebench.training.fitting.fit import fit  # noqa: E402
from tunebench.training.fitting.fitter import FittedStep, fitted_steps  # noqa: E402
from tunebench.training.fitting.operation_time import measured_times  # noqa: E402
from tunebench.training.memory import PlanEffort  # noqa: E402

ROUNDING = {"fp8": 2.0**-4, "bf16": 2.0**-8}
"""Largest relative error of an element that is not far below the largest one of its block."""


def restored(tensor: Tensor, element: str) -> Tensor:
    dtype = FORMATS[element]
    memory = compress(tensor, dtype)
    return restore(memory, dtype, tuple(tensor.shape), tensor.stride(), tensor.dtype)


@pytest.mark.parametrize("element", FORMATS)
@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 7, 11),
        torch.randn(2, 8, 16, 16).to(memory_format=torch.channels_last),
        torch.randn(300, 300).T,
        1e-20 * torch.randn(257),
        1e30 * torch.randn(40, 40),
        torch.zeros(600),
        torch.randn(1025).bfloat16(),
    ],
    ids=["odd", "channels last", "transposed", "small", "large", "zeros", "bf16"],
)
def test_elements_are_rounded_and_memory_is_as_stated(element: str, tensor: Tensor) -> None:
    dtype = FORMATS[element]
    with LiveStorages([tensor]) as counted:
        memory = compress(tensor, dtype)
    nbytes = compressed_activation._compressed_bytes(tensor.numel(), dtype)
    workspace_bytes = compressed_activation._workspace_bytes(tensor.numel(), dtype)
    assert memory.nbytes == nbytes <= (1 + 1 / 32) * tensor.numel() * dtype.itemsize + 4
    assert counted.peak_bytes <= tensor.untyped_storage().nbytes() + nbytes + workspace_bytes
    result = restored(tensor, element)
    assert (result.stride(), result.dtype) == (tensor.stride(), tensor.dtype)
    tolerance = ROUNDING[element] * tensor.abs() + 2.0**-17 * tensor.abs().max()
    assert bool(((result - tensor).abs() <= tolerance).all())


def test_infinities_and_nan_are_not_lost() -> None:
    tensor = torch.randn(1024)
    tensor[3], tensor[600] = float("inf"), float("nan")
    result = restored(tensor, "fp8")
    assert not result[3].isfinite()
    assert result[512:768].isnan().any()
    assert result[256:512].isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "element", "bound"),
    [*((name, "fp8", 0.04) for name in MODELS), ("gated perceptron", "bf16", 0.003)],
)
def test_errors_of_gradients_are_bounded_and_losses_exact(name: str, element: str, bound: float) -> None:
    error = gradient_error(name, element)
    assert error.same_loss
    assert error.compressed > 8
    assert error.peak_bytes < 0.8 * error.plain_bytes
    assert 0 < error.total < bound
    assert error.worst < 2 * bound


class Exact(nn.Module):
    """Operations whose gradients read masks, indices, statistics and exponentials; one product."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.out = nn.Embedding(64, 128), nn.LayerNorm(128), nn.Linear(128, 128)

    def forward(self, indices: Tensor) -> Tensor:
        x = functional.dropout(self.table(indices), 0.1)
        x = torch.relu(self.norm(x))
        x = x / (1 + x.amax(-1, keepdim=True))
        heads = x.unflatten(-1, (2, 64)).transpose(1, 2)
        x = functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)
        return self.out(x.tanh().sigmoid()).log_softmax(-1)[..., 0].mean()


def planned(monkeypatch: pytest.MonkeyPatch, budget: str, **options: Any) -> tuple[FittedStep, Tensor, Any]:
    """Return a step of the gated model, whose compression takes no time."""

    def times(nodes: Sequence[fx.Node], room_bytes: int) -> list[float]:
        conversions = (compress, restore)
        return [
            0.0 if node.target in conversions else us
            for node, us in zip(nodes, measured_times(nodes, room_bytes), strict=True)
        ]

    monkeypatch.setattr(fitter, "measured_times", times)
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = MODELS["gated perceptron"]()
    fitted = fit(lambda x: model(x).square().mean(), budget, effort=PlanEffort(rounds=0), **options)
    fitted(x)
    with LiveStorages([*model.parameters(), x]) as counted:
        loss = fitted(x)
        loss.backward()
    (step,) = fitted_steps(fitted)
    assert counted.peak_bytes <= 1.005 * step.plan.simulation.peak_bytes
    return step, loss.detach(), [parameter.grad for parameter in model.parameters()]


@pytest.mark.slow
def test_plans_compress_what_is_cheaper_than_recomputation_and_remember_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("TUNEBENCH_CACHE", str(tmp_path))
    step, loss, gradients = planned(monkeypatch, "60%", compress="fp8")
    assert len(step.choice.compressed) > 3
    assert step.plan.simulation.peak_bytes <= step.plan.budget_bytes
    again, again_loss, again_gradients = planned(monkeypatch, "60%", compress="fp8")
    assert (again.remembered, again.choice) == (True, step.choice)
    assert torch.equal(loss, again_loss)
    assert all(map(torch.equal, gradients, again_gradients))
    whole, exact_loss, exact = planned(monkeypatch, "100%", compress="fp8")
    assert whole.choice.compressed == ()
    assert torch.equal(loss, exact_loss)
    assert not all(map(torch.equal, gradients, exact))


@pytest.mark.filterwarnings("ignore:Using .torch.compile.module")
def test_what_must_be_exact_is_not_compressed() -> None:
    model = Exact()
    fitted = fit(model, "100%", effort=PlanEffort(rounds=0))
    fitted(torch.arange(256).reshape(4, 64) % 64)
    (step,) = fitted_steps(fitted)
    names = {candidate.name for candidate in compressible(step.joint, "fp8")}
    # Not: masks of dropout and ReLU, arguments of division and maximum, attention, log-softmax, means, tanh
    # and sigmoid.
    assert names == {"getitem"}  # the result of dropout, which the normalisation reads


def test_another_format_is_refused() -> None:
    with pytest.raises(InputError, match="compress must be one of fp8, bf16, got 'int8'"):
        fit(nn.Linear(2, 2), "70%", compress="int8")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()
