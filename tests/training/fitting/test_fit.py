"""Training steps within a memory budget: peaks, gradients, swaps through files, and mistakes."""

from __future__ import annotations

import copy
import errno
import functools
import logging
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.distributed._tools.mem_tracker import MemTracker  # noqa: E402

from tests.fork_server import Programs  # noqa: E402
from tests.torch.reference_kernels import reference_kernels  # noqa: E402
from tunebench.device import described, local_cpu  # noqa: E402
from tunebench.errors import InputError  # noqa: E402
from tunebench.torch import compile as compile_model  # noqa: E402
from tunebench.torch import plans, prefer  # noqa: E402
from tunebench.torch.compiler.recurrent_layer import recurrent_layer  # noqa: E402
from tunebench.training.fitting import fitter, host_store  # noqa: E402
from tunebench.training.fitting.fit import fit  # noqa: E402
from tunebench.training.fitting.fitter import fitted_steps  # noqa: E402
from tunebench.training.fitting.host_store import FileStore  # noqa: E402
from tunebench.training.fitting.joint_step import OTHER, is_random  # noqa: E402
from tunebench.training.fitting.optimizer_state import state_bytes  # noqa: E402
from tunebench.training.fitting.profile import profile_step  # noqa: E402
from tunebench.training.fitting.step_time import measured_step  # noqa: E402
from tunebench.training.memory import (  # noqa: E402
    HostLink,
    PlanEffort,
    least_budget,
    plan_memory,
    simulate,
    unplanned,
    write_plan,
)
from tunebench.training.memory.schedule import Compute  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:Using .torch.compile.module")

EFFORT = PlanEffort(rounds=2)
SLOW_LINK = HostLink(to_host_gb_s=1.0, to_device_gb_s=1.0)
FAST_LINK = HostLink(to_host_gb_s=1e3, to_device_gb_s=1e3)
"""Link over which copies take less time than any operation, so that plans copy and recompute nothing."""


class Block(nn.Module):
    """A convolution with batch normalisation and dropout, and an attention of few heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.relu(self.norm(self.conv(x))))


class Network(nn.Module):
    """Blocks and a loss; views, slices and several results of one call are among its operations."""

    def __init__(self, blocks: int = 4, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.blocks(self.stem(x))
        small = nn.functional.avg_pool2d(x, 4)
        first, second = small.flatten(2).transpose(1, 2).chunk(2, dim=1)
        mixed = nn.functional.scaled_dot_product_attention(first[:, None], second[:, None], second[:, None])
        return nn.functional.cross_entropy(self.head(mixed[:, 0].mean(1) + x.mean((2, 3))), y)


@pytest.fixture
def network() -> Network:
    torch.manual_seed(0)
    return Network()


@pytest.fixture
def small_network() -> Network:
    """Return a network of few blocks, for what does not depend on their number."""
    torch.manual_seed(0)
    return Network(blocks=2)


DATA = (torch.linspace(-1, 1, 4 * 3 * 40 * 40).reshape(4, 3, 40, 40), torch.tensor([0, 1, 2, 3]))


def trained(run: Callable[..., Tensor], model: nn.Module, data: Any = DATA) -> list[Tensor]:
    """Return loss, gradients and buffers of one step."""
    torch.manual_seed(3)
    for parameter in model.parameters():
        parameter.grad = None
    loss = run(*data)
    loss.backward()
    gradients = [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]
    return [loss.detach(), *gradients, *(buffer.clone() for buffer in model.buffers())]


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


class Tracker(MemTracker):
    """MemTracker, which torch lets compiled functions run under only with this method."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


def measured_peak(
    run: Callable[..., Tensor], model: nn.Module, data: tuple[Tensor, ...] | None = None
) -> int:
    data = DATA if data is None else data
    for parameter in model.parameters():
        parameter.grad = None
    tracker = Tracker()
    tracker.track_external(model, *data)
    with tracker:
        run(*data).backward()
    return sum(by_kind["Total"] for by_kind in tracker.get_tracker_snapshot("peak").values())


@functools.cache
def unplanned_result() -> list[Tensor]:
    """Return the results of one step of the fixture's network without a plan."""
    torch.manual_seed(0)
    network = Network()
    return trained(fit(network, "100%"), network)


@pytest.mark.parametrize(
    ("budget", "swaps"), [("100%", False), ("60%", False), ("40%", False), ("30%", True)]
)
def test_peak_is_within_the_budget_and_as_predicted_and_gradients_are_equal(
    network: Network, tmp_path: Path, budget: str, swaps: bool
) -> None:
    expected = unplanned_result()
    where = {"swap_folder": tmp_path, "host_link": SLOW_LINK} if swaps else {}
    fitted = fit(network, budget, effort=EFFORT, **where)
    assert equal(trained(fitted, network), expected)
    (step,) = fitted_steps(fitted)
    peak = measured_peak(fitted, network)
    assert peak <= step.plan.budget_bytes
    # A copy that ends early frees its tensor before the plan does.
    assert peak == pytest.approx(step.plan.simulation.peak_bytes, rel=0.15 if swaps else 0.05)
    moved = any(tensor.copied_in_before for tensor in step.plan.tensors)
    recomputes = any(tensor.recomputed_before for tensor in step.plan.tensors)
    assert moved == swaps
    assert swaps or recomputes == (budget != "100%")
    assert not list(tmp_path.iterdir())


class Layout(nn.Module):
    """Weights whose gradients autograd copies: of other strides, expanded, or one of two weights."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        weights = {"strides": 1, "expanded": 1, "shared": 2}[kind]
        self.weights = nn.ParameterList(torch.randn(96, 48, 3, 3) for _ in range(weights))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "strides":  # the input has its channels last, and so has the gradient of the weight
            return nn.functional.conv2d(x.permute(0, 3, 1, 2), self.weights[0]).square().mean()
        if self.kind == "expanded":
            return self.weights[0].sum() + x.sum()
        return ((self.weights[0] + self.weights[1]) * x.sum()).square().mean()


@pytest.mark.parametrize("kind", ["strides", "expanded", "shared"])
def test_gradients_that_autograd_copies_are_in_the_peak(kind: str) -> None:
    model, x = Layout(kind), torch.linspace(-1, 1, 6 * 6 * 48).reshape(1, 6, 6, 48)
    fitted = fit(model, "100%", effort=EFFORT)
    fitted(x).backward()
    (step,) = fitted_steps(fitted)
    (*_, copies) = step.joint.step.operations
    assert copies.workspace_bytes == model.weights[0].nbytes
    assert measured_peak(fitted, model, (x,)) == pytest.approx(step.plan.simulation.peak_bytes, rel=0.005)


def test_swap_alone_gives_equal_gradients_also_with_slow_copies(
    network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = unplanned_result()
    fitted = fit(network, "35%", swap_folder=tmp_path, host_link=FAST_LINK, effort=EFFORT)
    copied = Tensor.copy_

    def slow(self: Tensor, *arguments: Any) -> Tensor:
        time.sleep(0.002)
        return copied(self, *arguments)

    monkeypatch.setattr(Tensor, "copy_", slow)
    assert equal(trained(fitted, network), expected)
    (step,) = fitted_steps(fitted)
    assert sum(bool(tensor.copied_in_before) for tensor in step.plan.tensors) > 5


def test_a_step_that_does_not_wait_for_copies_is_wrong(
    network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = unplanned_result()
    copied = Tensor.copy_
    monkeypatch.setattr(Tensor, "copy_", lambda *arguments: (time.sleep(0.05), copied(*arguments))[1])
    monkeypatch.setattr(FileStore, "wait", lambda self, memory: None)
    fitted = fit(network, "35%", swap_folder=tmp_path, host_link=FAST_LINK, effort=EFFORT)
    try:
        result = trained(fitted, network)
    except RuntimeError:  # autograd sees that a saved tensor is still written
        result = []
    assert not equal(result, expected)


def test_steps_of_adamw_with_accumulated_gradients_are_equal(small_network: Network) -> None:
    def trained_weights(budget: str) -> list[Tensor]:
        model = copy.deepcopy(small_network)
        torch.manual_seed(5)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        fitted = fit(model, budget, effort=EFFORT)
        for index in range(6):
            fitted(*DATA).backward()
            if index % 2:
                optimizer.step()
                optimizer.zero_grad()
        return [*model.parameters(), *model.buffers()]

    assert equal(trained_weights("60%"), trained_weights("100%"))


def test_results_of_eager_torch_are_reached_to_rounding(small_network: Network) -> None:
    small_network.blocks.apply(without_dropout)
    plain = copy.deepcopy(small_network)
    expected = trained(plain, plain)
    result = trained(fit(small_network, "60%", effort=EFFORT), small_network)
    assert equal(result, expected)


@pytest.mark.parametrize("budget", ["65%", "80%", "100%"])
def test_running_statistics_that_are_computed_are_kept_for_their_use(budget: str) -> None:
    torch.manual_seed(0)
    block = [nn.Conv2d(4, 4, 3, padding=1), nn.InstanceNorm2d(4, affine=True, track_running_stats=True)]
    body = nn.Sequential(*(copy.deepcopy(layer) for layer in (*block, nn.Tanh()) * 6))

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = body

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x).square().mean()

    model = Loss()
    plain = copy.deepcopy(model)
    data = (torch.randn(2, 4, 24, 24),)
    fitted = fit(model, budget, effort=EFFORT)
    for _ in range(2):
        result, expected = trained(fitted, model, data), trained(plain, plain, data)
        assert all(
            torch.allclose(actual, two, rtol=1e-4, atol=1e-6)
            for actual, two in zip(result, expected, strict=True)
        )


def test_autocast_is_kept(network: Network) -> None:
    def run(budget: str) -> list[Tensor]:
        model = copy.deepcopy(network)
        fitted = fit(model, budget, effort=EFFORT)

        def cast(*data: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return fitted(*data)

        return trained(cast, model)

    assert equal(run("45%"), run("100%"))


def test_new_shape_or_mode_makes_a_new_plan_or_none(small_network: Network) -> None:
    fitted = fit(small_network, "60%", effort=EFFORT)
    trained(fitted, small_network)
    larger = (torch.cat([DATA[0]] * 2), torch.cat([DATA[1]] * 2))
    copied_network = copy.deepcopy(small_network)
    result = trained(fitted, small_network, larger)
    plans = [step.plan for step in fitted_steps(fitted)]
    assert len(plans) == 2
    assert plans[1].budget_bytes > plans[0].budget_bytes
    assert equal(result, trained(fit(copied_network, "100%"), copied_network, larger))
    small_network.eval()
    with torch.no_grad():
        fitted(*DATA)
    assert len(fitted_steps(fitted)) == 2


@torch._dynamo.config.patch(recompile_limit=2)
def test_too_many_shapes_are_a_clear_error() -> None:
    fitted = fit(lambda x: (x.sin() * x).sum(), "100%")
    for size in (3, 4):
        fitted(torch.ones(size, requires_grad=True)).backward()
    with pytest.raises(InputError, match="at most 2 kinds of input"):
        fitted(torch.ones(5, requires_grad=True))


def test_changed_model_makes_a_new_plan(network: Network) -> None:
    fitted = fit(network, "50%", effort=EFFORT)
    trained(fitted, network)
    network.blocks[3] = nn.Identity()
    copied_network = copy.deepcopy(network)
    assert equal(trained(fitted, network), trained(fit(copied_network, "100%"), copied_network))
    assert len(fitted_steps(fitted)) == 2


class _Logging(nn.Module):
    """A model that logs, as those of transformers do, and one that decides by a value."""

    def __init__(self, *, decides: bool) -> None:
        super().__init__()
        self.layer, self.decides = nn.Linear(4, 1), decides

    def forward(self, x: Tensor) -> Tensor:
        _LOG.warning("a message")
        y = self.layer(x).mean()
        if self.decides and y > 0:
            y = y * 2
        return y


_LOG = logging.getLogger("model")


@pytest.mark.parametrize("change", ["hook", "pre-hook", "removed hook", "method"])
def test_what_changes_a_module_after_planning_makes_a_new_plan(change: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1, bias=False)), DATA[0].reshape(-1, 8)
    first = model[0]
    hook = first.register_forward_hook(lambda *_: _[-1] * 3) if change == "removed hook" else None
    fitted = fit(lambda x: model(x).mean(), "100%", effort=EFFORT)
    before = trained(fitted, model, (x,))
    if change == "hook":
        first.register_forward_hook(lambda module, inputs, output: output * 2)
    elif change == "pre-hook":
        first.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))
    elif hook is not None:
        hook.remove()
    else:
        first.forward = lambda x: nn.functional.linear(x, first.weight * 2, first.bias)
    after = trained(fitted, model, (x,))
    assert not equal(before, after)
    assert equal(after, trained(lambda x: model(x).mean(), model, (x,)))
    assert len(fitted_steps(fitted)) == 2


def test_parameters_and_buffers_that_the_step_does_not_read_are_in_the_budget() -> None:
    class Partial(Network):
        def __init__(self) -> None:
            super().__init__()
            self.unread = nn.Linear(64, 64)
            self.tied = nn.Linear(64, 64, bias=False)
            self.tied.weight = self.unread.weight
            self.register_buffer("mask", torch.zeros(100))

    torch.manual_seed(0)
    model = Partial()
    unread = 4 * (64 * 64 + 64 + 100)
    for network, more_bytes in ((Network(), 0), (model, unread)):
        fitted = fit(network, "60%", effort=EFFORT)
        fitted(*DATA).backward()
        (planned,) = fitted_steps(fitted)
        other = sum(tensor.size_bytes for tensor in planned.plan.step.tensors if tensor.role == OTHER)
        profiled = profile_step(network, DATA, device=described()["h100-sxm"]).step
        if not more_bytes:
            least_other = other
        assert other == least_other + more_bytes
        assert sum(tensor.size_bytes for tensor in profiled.tensors if tensor.role == OTHER) == more_bytes
    assert measured_peak(fitted, model) <= 1.005 * planned.plan.budget_bytes
    copied = copy.deepcopy(fitted)
    copied(*DATA).backward()
    (of_copy,) = fitted_steps(copied)
    assert sum(tensor.size_bytes for tensor in of_copy.plan.step.tensors if tensor.role == OTHER) == other


class _Noticing(nn.Module):
    """A recurrent layer after running statistics and dropout, whose parameters have hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.layer, self.hook_calls = Block(3), nn.RNN(3, 3), 0
        for parameter in self.parameters():
            parameter.register_hook(self._count)

    def _count(self, _: Tensor) -> None:
        self.hook_calls += 1

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.block(x).mean(3).permute(2, 0, 1))[0].square().mean()


@pytest.mark.filterwarnings("ignore:.*as long as eager torch")
def test_a_measured_step_leaves_everything_as_it_is_within_its_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model, x = _Noticing(), torch.randn(4, 3, 16, 16, requires_grad=True)
    plain = copy.deepcopy(model)
    fitted = fit(model, "90%", effort=EFFORT)
    peaks: list[int] = []

    def measured(*args: Any, **kwargs: Any) -> Any:
        before = [*model.state_dict().values(), x, torch.get_rng_state()]
        before = [tensor.detach().clone() for tensor in before]
        versions = [tensor._version for tensor in (*model.state_dict().values(), x)]
        tracker = Tracker()
        tracker.track_external(model, x)
        with tracker:
            times = measured_step(*args, **kwargs)
        snapshot = tracker.get_tracker_snapshot("peak").values()
        peaks.append(sum(by_kind["Total"] for by_kind in snapshot))
        assert versions == [tensor._version for tensor in (*model.state_dict().values(), x)]
        after = [*model.state_dict().values(), x.detach(), torch.get_rng_state()]
        assert equal(before, after)
        assert all(tensor.grad is None for tensor in (x, *model.parameters()))
        return times

    monkeypatch.setattr(fitter, "measured_step", measured)
    result = trained(fitted, model, (x,))
    (planned,) = fitted_steps(fitted)
    assert planned.measured is not None
    assert planned.overhead == planned.measured.step_us / planned.measured.eager_us - 1
    monkeypatch.undo()
    (peak,) = peaks
    assert peak <= 1.005 * planned.plan.budget_bytes
    assert model.hook_calls == len([*model.parameters()])
    assert equal(result, trained(fit(plain, "100%"), plain, (x.detach().requires_grad_(),)))


@pytest.mark.filterwarnings("ignore:.*as long as eager torch")
def test_a_step_is_not_measured_where_the_caller_would_notice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TUNEBENCH_CACHE", str(tmp_path))
    fitted = fit(_Noticing(), "100%", effort=EFFORT)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        fitted(torch.randn(4, 3, 16, 16)).backward()
    (planned,) = fitted_steps(fitted)
    assert planned.measured is None
    assert planned.overhead == planned.predicted_overhead


@pytest.mark.parametrize("kind", ["sparse", "mkldnn", "uninitialised"])
def test_tensors_without_strided_memory_are_not_in_the_budget(kind: str) -> None:
    network = Network()
    if kind == "uninitialised":
        network.later = nn.LazyLinear(2)
    else:
        unread = torch.eye(9)
        network.register_buffer("unread", unread.to_sparse() if kind == "sparse" else unread.to_mkldnn())
    fitted = fit(network, "100%", effort=EFFORT)
    fitted(*DATA).backward()
    assert len(fitted_steps(fitted)) == 1


def test_messages_to_a_logger_are_left_out() -> None:
    model = _Logging(decides=False)
    fit(model, "100%")(torch.ones(2, 4)).backward()
    assert model.layer.bias.grad is not None


def test_what_cannot_be_traced_is_named_by_its_line() -> None:
    with pytest.raises(InputError, match=rf"branching.* \({re.escape(__file__)}:\d+\)"):
        fit(_Logging(decides=True), "100%")(torch.ones(2, 4))


class _Experts(nn.Module):
    """Two experts: of all rows by weights, or of the rows that chose them."""

    def __init__(self, *, chosen: bool) -> None:
        super().__init__()
        self.gate, self.chosen = nn.Linear(4, 2), chosen
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weights, total = self.gate(x).softmax(-1), torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            if self.chosen:
                rows = torch.where(weights.argmax(-1) == index)[0]
                total = total.index_add(0, rows, expert(x[rows]))
            else:
                total = total + weights[:, index : index + 1] * expert(x)
        return total.square().mean()


def test_experts_of_all_rows_are_planned_and_those_of_chosen_rows_refused_by_line() -> None:
    model, data = _Experts(chosen=False), (torch.linspace(-1, 1, 24).reshape(6, 4),)
    expected = trained(model, model, data)
    assert equal(trained(fit(model, "100%"), model, data), expected)
    with pytest.raises(InputError, match=rf"depend on values.* \({re.escape(__file__)}:\d+\)"):
        fit(_Experts(chosen=True), "100%")(*data)


def test_backward_hooks_of_modules_are_refused_by_line() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model[1].register_full_backward_hook(lambda module, inputs, outputs: None)
    with pytest.raises(InputError, match=rf"backwards hooks.* \({re.escape(__file__)}:\d+\)"):
        fit(lambda x: model(x).square().mean(), "100%")(torch.ones(2, 4))


def test_impossible_budget_names_the_least(network: Network) -> None:
    with pytest.raises(InputError, match=r"no plan of this step fits .* least"):
        fit(network, 1000)(*DATA)


def test_plan_for_this_device_runs_also_from_a_file_and_that_of_another_step_is_refused(
    network: Network, tmp_path: Path
) -> None:
    expected = unplanned_result()
    step = profile_step(network, DATA, device=local_cpu()).step
    plan = plan_memory(step, simulate(step, unplanned(step)).peak_bytes // 2, effort=EFFORT)
    write_plan(plan, tmp_path / "plan.json")
    for plan_or_path in (plan, tmp_path / "plan.json"):
        copied_network = copy.deepcopy(network)
        assert equal(trained(fit(copied_network, plan=plan_or_path), copied_network), expected)
        with pytest.raises(InputError, match="of another training step"):
            fit(Network(blocks=1), plan=plan_or_path)(*DATA)


def test_model_that_torch_cannot_trace_is_refused() -> None:
    def broken(x: Tensor) -> Tensor:
        return x * float(str(x.sum().item()))

    with pytest.raises(InputError, match="cannot trace the model as a whole"):
        fit(broken, "50%")(torch.ones(2, requires_grad=True))


@pytest.mark.filterwarnings("ignore:.*as long as eager torch")
@pytest.mark.parametrize(
    ("kind", "budget"),
    [(nn.RNN, "75%"), pytest.param(nn.GRU, "75%", marks=pytest.mark.exhaustive), (nn.LSTM, "85%")],
)
def test_recurrent_layers_have_plans(kind: Any, budget: str) -> None:
    torch.manual_seed(0)
    layer = kind(8, 16, num_layers=2, batch_first=True)
    plain = copy.deepcopy(layer)
    data = (torch.randn(4, 12, 8),)

    def loss(run: nn.Module) -> Callable[..., Tensor]:
        return lambda x: run(x)[0].square().mean()

    result = trained(fit(loss(layer), budget, effort=EFFORT), layer, data)
    expected = trained(loss(plain), plain, data)
    assert all(
        torch.allclose(actual, two, rtol=1e-4, atol=1e-6)
        for actual, two in zip(result, expected, strict=True)
    )


@pytest.mark.filterwarnings("ignore:.*as long as eager torch")
@pytest.mark.parametrize(
    ("kind", "bidirectional"), [pytest.param(nn.GRU, False, marks=pytest.mark.exhaustive), (nn.LSTM, True)]
)
def test_recurrent_layers_with_dropout_have_the_gradients_of_eager_torch(
    kind: Any, bidirectional: bool
) -> None:
    torch.manual_seed(0)
    layer = kind(8, 16, num_layers=2, dropout=0.5, bidirectional=bidirectional)
    x = torch.randn(8, 4, 8)
    fitted = fit(lambda x: layer(x)[0].square().mean(), "90%", effort=EFFORT)

    def gradients(run: Callable[[Tensor], Tensor]) -> list[Tensor]:
        layer.zero_grad()
        torch.manual_seed(1)
        run(x).backward()
        return [parameter.grad for parameter in layer.parameters()]

    ours, eager = gradients(fitted), gradients(lambda x: layer(x)[0].square().mean())
    same = torch.equal if kind is nn.LSTM else functools.partial(torch.allclose, rtol=1e-4, atol=1e-7)
    assert all(map(same, ours, eager))
    (step,) = fitted_steps(fitted)
    fused = sum(node is not None and node.target is recurrent_layer for node in step.joint.nodes)
    assert fused == (4 if kind is nn.LSTM else 0)
    assert measured_peak(fitted, layer, (x,)) <= 1.005 * step.plan.budget_bytes


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: torch.rand(x.shape, device=x.device),
        lambda x: torch.randn_like(x),
        lambda x: torch.randint(0, 9, x.shape).float(),
        lambda x: torch.normal(x.detach(), 1.0),
        lambda x: torch.bernoulli(x.detach().sigmoid()),
    ],
    ids=["rand", "randn_like", "randint", "normal", "bernoulli"],
)
def test_random_numbers_are_repeated_whatever_draws_them(draw: Callable[[Tensor], Tensor]) -> None:
    layer, x = nn.Linear(8, 8), torch.linspace(-1, 1, 512 * 8).reshape(512, 8)

    def step(x: Tensor) -> Tensor:
        for _ in range(4):
            x = torch.tanh(layer(x)) * draw(x)
        return x.square().mean()

    whole = fit(step, "100%", effort=EFFORT)
    expected = trained(whole, layer, (x,))
    state = torch.get_rng_state()
    least = least_budget(fitted_steps(whole)[0].plan.step, effort=EFFORT).budget_bytes
    fitted = fit(step, least, effort=EFFORT)
    assert equal(trained(fitted, layer, (x,)), expected)
    assert torch.equal(torch.get_rng_state(), state)
    (planned,) = fitted_steps(fitted)
    nodes, schedule = planned.joint.nodes, planned.plan.schedule
    runs = Counter(action.operation for action in schedule if isinstance(action, Compute))
    assert any(count > 1 and nodes[index] and is_random(nodes[index]) for index, count in runs.items())
    assert measured_peak(fitted, layer, (x,)) <= 1.005 * planned.plan.budget_bytes


@pytest.mark.slow
def test_overhead_is_over_eager_torch_and_a_slow_trace_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = nn.Sequential(nn.GRU(4, 4)), torch.randn(4, 2, 4)

    def step(x: Tensor) -> Tensor:
        return layer(x)[0].square().mean()

    monkeypatch.setattr(fitter, "eager_times", lambda calls, once: [1.0 for _ in calls])
    monkeypatch.setattr(fitter, "_SHORTEST_US", 0.0)
    fitted = fit(step, "100%", effort=EFFORT)
    with pytest.warns(UserWarning, match=r"operations that torch traced .* recurrent layers: 0"):
        fitted(x).backward()
    (planned,) = fitted_steps(fitted)
    layers = fitter._layers([node for node in planned.joint.graph.nodes if node.op == "call_function"])
    assert layers.count("") < 10  # the loss; sums of gradients are of the layer
    # All but the loss is the layer.
    assert 1 < planned.eager_us < planned.plan.step.compute_us / 1.2
    planned_us = planned.plan.simulation.step_us + planned.view_us + planned.call_us
    assert planned.predicted_overhead == pytest.approx(planned_us / planned.eager_us - 1)


@pytest.mark.filterwarnings("ignore:.*as long as eager torch")
@pytest.mark.slow
def test_lstm_whose_workspace_exceeds_the_budget_runs_by_its_time_steps() -> None:
    layer, x = nn.LSTM(16, 64), torch.randn(16, 32, 16)
    fused = fit(lambda x: layer(x)[0].square().mean(), "100%", effort=EFFORT)
    fused(x).backward()
    (step,) = fitted_steps(fused)
    fitted = fit(
        lambda x: layer(x)[0].square().mean(), step.plan.simulation.peak_bytes * 3 // 5, effort=EFFORT
    )
    fitted(x).backward()
    (smaller,) = fitted_steps(fitted)
    assert len(smaller.plan.step.operations) > 10 * len(step.plan.step.operations)
    assert measured_peak(fitted, layer, (x,)) <= smaller.plan.budget_bytes


def test_model_that_decides_by_a_value_is_refused() -> None:
    norm = nn.BatchNorm1d(4, momentum=None)  # its average divides by the number of batches

    with pytest.raises(InputError, match="cannot trace the model as a whole"):
        fit(lambda x: norm(x).square().sum(), "100%")(torch.randn(3, 4, requires_grad=True))


@pytest.mark.parametrize("budget", ["", "0GB", "-1GB", "ten GB", 0, -5, True])
def test_budget_that_is_no_size_is_refused(network: Network, budget: Any) -> None:
    with pytest.raises(InputError, match="is no size: expected a size above 0"):
        fit(network, budget)


def test_missing_swap_folder_is_refused(network: Network, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot swap to folder .*absent"):
        fit(network, "50%", swap_folder=tmp_path / "absent")


def test_copies_on_a_processor_have_the_measured_price(
    small_network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 0 <= fitter._lost_fraction(FileStore(tmp_path), 0.01) <= 1
    monkeypatch.setattr(fitter, "_lost_fraction", lambda store, copy_s: 0.75)
    fitted = fit(small_network, "100%", swap_folder=tmp_path, effort=EFFORT)
    fitted(*DATA)
    link = fitted_steps(fitted)[0].plan.step.link
    assert link is not None
    assert link.lost_fraction == 0.75


def failing(call: Callable[..., Any], errors: list[BaseException | None]) -> Callable[..., Any]:
    """Return a function whose next calls raise these errors, or pass on to a call where there is none."""

    def run(*arguments: Any) -> Any:
        error = errors.pop(0) if errors else None
        if error is not None:
            raise error
        return call(*arguments)

    return run


def test_step_that_ends_early_leaves_nothing_behind_and_the_next_step_is_right(
    network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = unplanned_result()
    before = copy.deepcopy(network.state_dict())
    errors: list[BaseException | None] = []
    full = [None, None, None, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))]
    monkeypatch.setattr(host_store.os, "posix_fallocate", failing(os.posix_fallocate, full))
    # The step keeps the method that the store has when the plan is made.
    monkeypatch.setattr(FileStore, "copy_in", failing(FileStore.copy_in, errors))
    fitted = fit(network, "35%", swap_folder=tmp_path, host_link=FAST_LINK, effort=EFFORT)
    with pytest.raises(InputError, match="No space left on device"):
        trained(fitted, network)
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    assert not list(tmp_path.iterdir())
    for error in (RuntimeError, KeyboardInterrupt):
        errors[:] = [None, None, error()]
        with pytest.raises(error):
            trained(fitted, network)
        assert not list(tmp_path.iterdir())
        network.load_state_dict(before)  # the step had changed running statistics
        assert equal(trained(fitted, network), expected)
        network.load_state_dict(before)


def test_compiled_model_within_a_budget_recomputes_fused_groups_by_one_kernel(network: Network) -> None:
    plain = copy.deepcopy(network)
    plain.blocks.apply(without_dropout)
    network.blocks.apply(without_dropout)
    expected = trained(plain, plain)
    with prefer("tunebench"), reference_kernels() as ran:
        fitted = fit(network, "60%", tuned_kernels=True)
        result = trained(fitted, network)
    (step,) = fitted_steps(fitted)
    calls = [node for node in step.joint.nodes if node is not None and "tunebench" in str(node.target)]
    assert len(calls) > 5
    assert len(ran) > 2
    assert plans(fitted)
    recomputed = [planned.tensor for planned in step.plan.tensors if planned.recomputed_before]
    producers = step.plan.step.producers()
    assert any(step.joint.nodes[producers[tensor]] in calls for tensor in recomputed)
    assert step.plan.simulation.peak_bytes <= step.plan.budget_bytes
    for ours, theirs in zip(result, expected, strict=True):
        # By norm: kernels round otherwise than torch, and a ReLU near zero may flip.
        assert (ours - theirs).double().norm() <= 0.01 * theirs.double().norm() + 1e-4


def without_dropout(module: nn.Module) -> None:
    if isinstance(module, nn.Dropout):
        module.p = 0.0


def test_memory_budget_of_compile_is_deprecated_and_excludes_options_of_inductor(network: Network) -> None:
    with pytest.warns(FutureWarning, match="tuned_kernels=True"):
        assert plans(compile_model(network, memory_budget="50%")) == ()
    for options in ({"benchmark": True}, {"dynamic": True}, {"mode": "max-autotune"}):
        with pytest.raises(InputError, match="a memory budget excludes"):
            compile_model(network, memory_budget="50%", **options)


DISTRIBUTED = """
import os, sys, torch
from torch import nn
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tunebench.training import fit
from tests.training.fitting.test_fit import Network, DATA, without_dropout

def weights(budget):
    torch.manual_seed(0)
    model = Network(blocks=2)
    model.blocks.apply(without_dropout)
    run = DistributedDataParallel(fit(model, budget) if budget else model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        run(DATA[0] + rank, DATA[1]).backward()
        optimizer.step()
    return list(model.parameters())

torch.set_num_threads(1)
child = os.fork()  # two ranks that import torch once
rank = int(child == 0)
dist.init_process_group("gloo", store=dist.FileStore("store", 2), rank=rank, world_size=2)
assert all(map(torch.equal, weights("60%"), weights(None)))
print("equal", rank, flush=True)
dist.destroy_process_group()
if child:
    assert os.waitpid(child, 0)[1] == 0
"""


def test_ranks_of_distributed_data_parallel_have_equal_weights_with_and_without_a_plan(
    tmp_path: Path, programs: Programs
) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = programs.run(["-c", DISTRIBUTED], environment=environment, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("equal") == 2


def test_states_of_optimizers_are_counted(small_network: Network) -> None:
    weights = sum(parameter.numel() * 4 for parameter in small_network.parameters())
    assert state_bytes(torch.optim.AdamW(small_network.parameters())) == 2 * weights
    assert state_bytes(torch.optim.SGD(small_network.parameters(), lr=0.1, momentum=0.9)) == weights
    assert state_bytes(torch.optim.SGD(small_network.parameters(), lr=0.1)) == 0
    fitted = fit(small_network, "100%", optimizer=torch.optim.AdamW(small_network.parameters()))
    fitted(*DATA)
    plain = fit(copy.deepcopy(small_network), "100%")
    plain(*DATA)
    peaks = [fitted_steps(fitted_model)[0].plan.simulation.peak_bytes for fitted_model in (fitted, plain)]
    assert peaks[0] - peaks[1] == 2 * weights


def test_profile_for_another_device_has_the_operations_of_the_step_that_runs(network: Network) -> None:
    fitted = fit(copy.deepcopy(network), "100%")
    fitted(*DATA)
    ran = fitted_steps(fitted)[0].joint
    with torch.device("meta"):
        absent = Network()
    profile = profile_step(absent, DATA, device=local_cpu())
    assert [operation.name for operation in profile.step.operations] == [
        operation.name for operation in ran.step.operations
    ]
    assert [tensor.size_bytes for tensor in profile.step.tensors] == [
        tensor.size_bytes for tensor in ran.step.tensors
    ]
    assert {"stem", "blocks.0.conv", "blocks.3.norm", "head"} <= set(profile.layers)


def test_profile_predicts_times_of_an_absent_gpu_and_plans_for_it(network: Network) -> None:
    link = HostLink(to_host_gb_s=25.0, to_device_gb_s=25.0)
    step = profile_step(network, DATA, device=described()["h100-sxm"], link=link).step
    assert all(operation.time_us > 0 for operation in step.operations if operation.inputs)
    least = least_budget(step).budget_bytes
    assert least < 0.6 * simulate(step, unplanned(step)).peak_bytes
    with pytest.raises(InputError, match="returns nothing that requires a gradient"):
        profile_step(nn.Identity(), DATA[:1], device=described()["h100-sxm"])
    integers = torch.zeros(2, 4, dtype=torch.int64)
    with pytest.raises(
        InputError, match=r"must read tensors of one type, found torch.float32 and torch.int64"
    ):
        profile_step(nn.Linear(4, 4), [integers], device=described()["h100-sxm"])


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()
