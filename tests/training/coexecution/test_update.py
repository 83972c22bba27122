"""Updates of parameters that run as one function give the bits of torch's optimizers."""

from __future__ import annotations

import copy
import functools
import gc
import math
import operator
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: install tunebench[torch]")

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.sgd import sgd

from benchmarks.coexecution import differences, run_program
from benchmarks.programs import Step, names, program
from tunebench.training import coexecute
from tunebench.training.coexecution import _update
from tunebench.training.coexecution._function import optimizer_functions
from tunebench.training.coexecution._patching import THREAD
from tunebench.training.coexecution._update import Updates

Make = Callable[[Any], Optimizer]

RECORDED: dict[str, Make] = {
    "adam": torch.optim.Adam,
    "adam, all options": lambda p: torch.optim.Adam(p, amsgrad=True, maximize=True, weight_decay=0.1),
    "adamw": torch.optim.AdamW,
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "nadam": torch.optim.NAdam,
}

REFUSED: dict[str, tuple[Make, str]] = {
    "radam": (torch.optim.RAdam, "decides by a number"),
    "rprop": (torch.optim.Rprop, "reads a tensor"),
    "asgd": (torch.optim.ASGD, "decides by a number"),
    "foreach": (lambda p: torch.optim.Adam(p, foreach=True), "lists of tensors"),
    "fused": (lambda p: torch.optim.Adam(p, fused=True), "lists of tensors"),
    "tensor": (lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-3)), "option lr"),
    "numpy": (lambda p: torch.optim.Adam(p, lr=np.float64(1e-3)), "option lr"),
}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record the first update."""
    monkeypatch.setattr(_update, "_CALLS", 0)


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use each record, whether or not it is faster here."""
    recorded = _update.recorded

    def chosen(*arguments: Any) -> Any:
        record = recorded(*arguments)
        record.times.decided = record.times._is_faster = True
        return record

    monkeypatch.setattr(_update, "recorded", chosen)


@contextmanager
def _handled_by(updates: Updates) -> Iterator[None]:
    """Let a record of updates handle the functions of optimizers."""
    functions = optimizer_functions()

    def handled(function: Any) -> Any:
        return lambda *args, **kwargs: updates.run(function, args, kwargs)

    try:
        for module, name, function in functions:
            setattr(module, name, handled(function))
        yield
    finally:
        for module, name, function in functions:
            setattr(module, name, function)


class _Pair:
    """Two equal networks with equal optimizers; the second is updated by records."""

    def __init__(self, make: Make) -> None:
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(7, 9), nn.BatchNorm1d(9), nn.Linear(9, 3))
        self.networks = copy.deepcopy(network), copy.deepcopy(network)
        self.optimizers = [make(network.parameters()) for network in self.networks]
        self.updates = Updates()

    def step(self, *, present: Callable[[int], bool] = lambda _: True) -> None:
        for position, (first, second) in enumerate(
            zip(*(network.parameters() for network in self.networks), strict=True)
        ):
            first.grad = torch.randn_like(first) if present(position) else None
            second.grad = first.grad.clone() if first.grad is not None else None
        self.optimizers[0].step()
        with _handled_by(self.updates):
            self.optimizers[1].step()

    def set(self, option: str, value: Any) -> None:
        for optimizer in self.optimizers:
            optimizer.param_groups[0][option] = value

    def assert_equal(self) -> None:
        for one, two in zip(*(optimizer.state.values() for optimizer in self.optimizers), strict=True):
            assert all(torch.equal(value, two[name]) for name, value in one.items())
        for first, second in zip(*(network.parameters() for network in self.networks), strict=True):
            assert torch.equal(first, second)
            assert first._version == second._version


@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.usefixtures("untimed")
def test_an_update_is_one_function_with_the_bits_of_the_optimizer(name: str) -> None:
    pair = _Pair(RECORDED[name])
    for step in range(8):
        pair.step()
        pair.set("lr", 0.1 / (step + 1))
    pair.assert_equal()
    assert pair.updates.runs >= 6
    assert not pair.updates.reasons


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.usefixtures("untimed")
def test_an_update_that_is_not_understood_runs_as_the_function_of_torch(name: str) -> None:
    make, reason = REFUSED[name]
    pair = _Pair(make)
    for _ in range(4):
        pair.step()
    pair.assert_equal()
    assert pair.updates.runs == 0
    assert reason in "".join(pair.updates.reasons.values())


@pytest.mark.usefixtures("untimed")
def test_other_options_and_other_gradients_are_other_records() -> None:
    pair = _Pair(lambda p: torch.optim.AdamW(p, weight_decay=0.1))
    for weight_decay in (0.1, 0.2, 0.0, 0.0, 0.3):
        pair.set("weight_decay", weight_decay)
        pair.step()
    assert pair.updates.runs == 3  # the first update, and that without decay, are recorded
    for _ in range(2):
        pair.step(present=lambda position: position != 2)
    pair.set("lr", 1)  # an integer is a constant
    for _ in range(2):
        pair.step()
    pair.assert_equal()
    assert pair.updates.runs == 5


@pytest.mark.usefixtures("untimed")
def test_sparse_gradients_and_subclasses_run_as_the_function_of_torch() -> None:
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    updates = Updates()
    with _handled_by(updates):
        table(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
    assert updates.runs == 0
    assert "no plain tensor" in updates.reasons["sgd"]


def _hidden(parameters: list[Tensor], gradients: list[Tensor], *, lr: float) -> None:
    parameters[0].add_(gradients[0], alpha=-math.sqrt(lr))


def _drawn(parameters: list[Tensor], gradients: list[Tensor], *, lr: float) -> None:
    parameters[0].add_(torch.randn_like(gradients[0]), alpha=-lr)


@pytest.mark.parametrize(("update", "reason"), [(_hidden, "other results"), (_drawn, "randn_like")])
@pytest.mark.usefixtures("untimed")
def test_what_no_record_shows_is_refused(update: Callable[..., None], reason: str) -> None:
    updates = Updates()
    parameter, expected = torch.ones(3), torch.ones(3)
    gradient = torch.arange(3.0)
    states = []
    for lr in (0.5, 0.25, 0.125):
        state = torch.get_rng_state()
        with torch.no_grad():
            update([expected], [gradient], lr=lr)
            states.append(torch.get_rng_state())
            torch.set_rng_state(state)
            updates.run(update, ([parameter], [gradient]), {"lr": lr})
        assert torch.equal(states[-1], torch.get_rng_state())
    assert torch.equal(parameter, expected)
    assert updates.runs == 0
    assert reason in "".join(updates.reasons.values())


def test_large_parameters_are_not_copied() -> None:
    updates = Updates()
    with torch.no_grad():
        updates.run(sgd, ([torch.zeros(300, 300)], [torch.ones(300, 300)], []), _options())
    assert "large" in updates.reasons["sgd"]


def _options() -> dict[str, Any]:
    return {"weight_decay": 0.0, "momentum": 0.0, "lr": 0.1, "dampening": 0.0, "nesterov": False,
            "maximize": False}  # fmt: skip


@pytest.mark.parametrize("faster", [True, False])
def test_the_faster_way_is_chosen_after_runs_that_are_not_timed(faster: bool) -> None:
    times = _update.Times()
    runs = 0
    while not times.decided:
        by_record = times.runs_record()
        is_warmup = by_record and runs < _update._WARMUPS
        times.add(10**6 if is_warmup else 1 if by_record == faster else 2, by_record=by_record)
        runs += 1
    assert times.runs_record() is faster
    assert runs == 2 * _update._TIMED + _update._WARMUPS


def test_a_record_that_is_slower_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    add = _update.Times.add
    monkeypatch.setattr(
        _update.Times,
        "add",
        lambda self, _, *, by_record: add(self, 2 if by_record else 1, by_record=by_record),
    )
    pair = _Pair(torch.optim.Adam)
    for _ in range(40):
        pair.step()
    pair.assert_equal()
    assert pair.updates.reasons == {"adam": "torch's function is faster"}
    assert pair.updates.runs == _update._TIMED + _update._WARMUPS


def _returned(step: Callable[..., Any]) -> Any:
    """Return a co-executed step that has returned to eager mode."""
    wrapped = coexecute(step)
    wrapped._policy.reason = "a test"
    return wrapped


@pytest.mark.parametrize("before", [0, 0.0])
def test_update_that_makes_momenta_leaves_known_paths(before: float) -> None:
    """SGD's function puts new momenta into a list of the optimizer, which a known path would not see."""

    def losses(wrap: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]) -> list[float]:
        torch.manual_seed(0)
        network = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=before)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = network(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        wrapped, values = wrap(step), []
        for iteration in range(20):
            if iteration == 6:
                optimizer.param_groups[0]["momentum"] = 0.9
            elif iteration == 14:
                optimizer.state.clear()
            values.append(wrapped(torch.randn(4, 3)).item())
        return values

    assert losses(lambda step: coexecute(step, mode="always")) == losses(lambda step: step)


def test_step_without_recorded_updates_and_heads_runs_unwatched_and_is_counted() -> None:
    watched: list[bool] = []

    def step() -> None:
        watched.append(getattr(THREAD, "active", None) is not None)

    wrapped = _returned(step)
    for _ in range(200):
        wrapped()
    assert all(watched[:64])
    assert 2 <= sum(watched[64:]) <= 8
    assert (
        coexecute.report(wrapped).eager
        == coexecute.report(wrapped).iterations
        == wrapped.counts()["eager"]
        == 200
    )


@pytest.mark.usefixtures("untimed")
def test_step_with_recorded_updates_is_watched() -> None:
    watched: list[bool] = []
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step() -> None:
        watched.append(getattr(THREAD, "active", None) is not None)
        weight.grad = torch.ones(3)
        optimizer.step()

    wrapped = _returned(step)
    for _ in range(120):
        wrapped()
    assert all(watched)
    assert coexecute.report(wrapped).updates > 50


@pytest.mark.parametrize("name", ["dqn_replay", "lstm_early_exit", "tree_network"])
@pytest.mark.usefixtures("untimed")
def test_programs_that_returned_to_eager_mode_run_updates_as_functions(name: str) -> None:
    steps: list[Any] = []

    def wrap(step: Step) -> Step:
        steps.append(_returned(step))
        wrapped: Step = steps[-1]
        return wrapped

    expected, actual = (run_program(program(name), way, 10) for way in (lambda step: step, wrap))
    assert differences(expected, actual) == []
    report = coexecute.report(steps[-1])
    assert report.updates > 5
    assert f"{report.updates} updates" in str(report)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", names())
@pytest.mark.usefixtures("untimed")
def test_all_programs_have_the_bits_of_eager_mode(name: str) -> None:
    if name == "bert_metric":
        pytest.importorskip("sklearn")
    expected, actual = (run_program(program(name), way, 20) for way in (lambda step: step, _returned))
    assert differences(expected, actual) == []


class _Steps(_Pair):
    """A pair whose second optimizer is stepped in a co-executed step that returned to eager mode."""

    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.step_function = _returned(lambda: self.optimizers[1].step())
        self.updates = self.step_function._updates

    def step(self, *, present: Callable[[int], bool] = lambda _: True) -> None:
        for position, (first, second) in enumerate(
            zip(*(network.parameters() for network in self.networks), strict=True)
        ):
            first.grad = torch.randn_like(first) if present(position) else None
            second.grad = first.grad.clone() if first.grad is not None else None
        self.optimizers[0].step()
        self.step_function()

    def loops(self, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        """Return a list that gets an entry for each loop over the parameters of the second optimizer."""
        entries: list[Any] = []
        optimizer, collect = self.optimizers[1], type(self.optimizers[1])._init_group

        def counted(self: Any, *args: Any) -> Any:
            if self is optimizer:
                entries.append(args)
            return collect(self, *args)

        monkeypatch.setattr(type(optimizer), "_init_group", counted)
        return entries


@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.usefixtures("untimed")
def test_a_step_of_an_optimizer_has_no_loop_over_parameters(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = _Steps(RECORDED[name])
    loops = pair.loops(monkeypatch)
    for step in range(8):
        pair.step()
        pair.set("lr", 0.1 / (step + 1))
    pair.assert_equal()
    assert len(loops) <= 3  # states are made, the update is recorded, the step is prepared
    assert pair.updates.runs >= 6


def _replace_state(optimizer: Optimizer) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def _replace_moment(optimizer: Optimizer) -> None:
    state = next(iter(optimizer.state.values()))
    state["exp_avg"] = state["exp_avg"] * 2


def _replace_states_of_a_parameter(optimizer: Optimizer) -> None:
    parameter = optimizer.param_groups[0]["params"][1]
    optimizer.state[parameter] = {name: value * 1 for name, value in optimizer.state[parameter].items()}


def _add_group(optimizer: Optimizer) -> None:
    torch.manual_seed(1)
    optimizer.add_param_group({"params": [nn.Parameter(torch.randn(2))], "lr": 0.5})


def _drop_parameter(optimizer: Optimizer) -> None:
    del optimizer.param_groups[0]["params"][2]


def _set_decay(optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["weight_decay"] = 0.25


def _set_betas(optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["betas"] = (0.5, 0.75)


def _set_integer_rate(optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 1


def _set_scale(optimizer: Optimizer) -> None:
    optimizer.grad_scale = None


def _double_gradients(optimizer: Optimizer) -> None:
    def hook(stepped: Optimizer, _args: Any, _kwargs: Any) -> None:
        for parameter in stepped.param_groups[0]["params"]:
            parameter.grad.mul_(2)

    optimizer.register_step_pre_hook(hook)


@pytest.mark.parametrize(
    "change",
    [_replace_state, _replace_moment, _replace_states_of_a_parameter, _add_group, _drop_parameter, _set_decay,
     _set_betas, _set_integer_rate, _set_scale, _double_gradients],
)  # fmt: skip
@pytest.mark.usefixtures("untimed")
def test_a_step_follows_what_the_program_changes(change: Callable[[Optimizer], None]) -> None:
    pair = _Steps(torch.optim.Adam)
    for _ in range(4):
        pair.step()
    assert pair.updates.runs == 3
    for optimizer in pair.optimizers:
        change(optimizer)
    for _ in range(3):
        pair.step()
    pair.assert_equal()


@pytest.mark.usefixtures("untimed")
def test_a_parameter_without_gradient_is_not_updated() -> None:
    pair = _Steps(torch.optim.Adam)
    for step in range(9):
        omitted = 2 if step % 3 else -1
        pair.step(present=functools.partial(operator.ne, omitted))
    pair.assert_equal()


@pytest.mark.usefixtures("untimed")
def test_a_step_that_is_only_reported_runs_updates_as_in_eager_mode() -> None:
    pair = _Steps(torch.optim.Adam)
    pair.step_function = coexecute(pair.step_function._step, mode="report")
    for _ in range(4):
        pair.step()
    pair.assert_equal()
    assert coexecute.report(pair.step_function).updates == 0


def test_an_update_is_recorded_after_many_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_update, "_CALLS", 5)
    pair = _Pair(torch.optim.SGD)
    for _ in range(6):
        pair.step()
    assert pair.updates.runs == 0
    pair.step()
    assert pair.updates.runs == 1


@pytest.mark.usefixtures("untimed")
def test_an_optimizer_that_is_gone_is_not_kept() -> None:
    pair = _Steps(torch.optim.Adam)
    for _ in range(4):
        pair.step()
    gone = weakref.ref(pair.optimizers[1])
    pair.optimizers.clear()
    gc.collect()
    assert gone() is None


@pytest.mark.usefixtures("untimed")
def test_gradients_of_an_optimizer_with_hooks_are_not_kept() -> None:
    pair = _Pair(torch.optim.Adam)
    pair.step()
    (parameter, *_) = pair.networks[1].parameters()
    pair.step()
    assert pair.updates.runs
    assert parameter.grad is not None
    gradient = weakref.ref(parameter.grad)
    parameter.grad = None
    gc.collect()
    assert gradient() is None
