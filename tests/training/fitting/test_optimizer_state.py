"""States of optimizers in host memory: equal weights, bytes on the device during updates, and refusals."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402

from tunebench.errors import InputError  # noqa: E402
from tunebench.training.fitting.fit import fit  # noqa: E402
from tunebench.training.fitting.fitter import FittedStep, fitted_steps  # noqa: E402
from tunebench.training.fitting.host_store import FileStore, memory_of  # noqa: E402
from tunebench.training.fitting.optimizer_state import HostStates  # noqa: E402
from tunebench.training.memory import HostLink, PlanEffort  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:Using .torch.compile.module")

CPU = torch.device("cpu")
LINK = HostLink(to_host_gb_s=1.0, to_device_gb_s=1.0)
Make = Callable[[Iterable[Any]], torch.optim.Optimizer]


class CountingStore(FileStore):
    """A file store that counts the bytes of copied tensors that are alive on the device.

    Attributes:
        peak_bytes: Most bytes at once.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.peak_bytes = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def copy_out(self, tensor: Tensor) -> Tensor:
        self._note(memory_of(tensor))
        return super().copy_out(tensor)

    def copy_in(self, host: Tensor, device: torch.device) -> Tensor:
        memory = super().copy_in(host, device)
        self._note(memory)
        return memory

    def _note(self, memory: Tensor) -> None:
        storage = memory.untyped_storage()
        self._alive = {key: item for key, item in self._alive.items() if not item[0].expired()}
        self._alive.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._alive.values()))


def weights() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(16, 16), (4, 4), (16, 8), (8, 8), (16,), (3, 5), (32, 4)]
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def updated(optimizer: torch.optim.Optimizer, steps: int, *, closure: bool = False) -> list[Tensor]:
    """Return parameters after steps with gradients at random, of which one parameter has none at first."""
    generator = torch.Generator().manual_seed(steps)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for step in range(steps):
        gradients = [torch.randn(parameter.shape, generator=generator) for parameter in parameters]

        def loss(gradients: list[Tensor] = gradients, step: int = step) -> Tensor:
            for place, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
                parameter.grad = None if place == 2 and step == 0 else gradient
            return gradients[0].sum()

        if closure:
            assert optimizer.step(loss) == gradients[0].sum()
        else:
            loss()
            optimizer.step()
    return [parameter.detach().clone() for parameter in parameters]


OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "adam": lambda parameters: torch.optim.Adam(parameters, amsgrad=True, foreach=True),
    "fused adam": lambda parameters: torch.optim.Adam(parameters, fused=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, centered=True, momentum=0.5),
    "nadam": torch.optim.NAdam,
    "groups": lambda parameters: torch.optim.RAdam(
        [{"params": list(parameters)[:3], "lr": 0.5}, {"params": []}, {"params": list(parameters)[3:]}]
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_and_states_are_those_of_states_on_the_device(name: str, tmp_path: Path) -> None:
    make = OPTIMIZERS[name]
    expected = make(weights())
    weights_expected = updated(expected, 3)
    for count, parts in ((7, 3), (4, 1)):
        optimizer = make(weights())
        states, store = HostStates(optimizer), CountingStore(tmp_path)
        room_bytes = parts * states.sizes[0]
        updated_before = updated(optimizer, 0)  # no step yet
        assert len(updated_before) == 7
        states.place(count, store, CPU, room_bytes)
        assert all(map(torch.equal, updated(optimizer, 3), weights_expected))
        assert states.sizes[0] <= store.peak_bytes <= room_bytes
        moved, plain = optimizer.state_dict()["state"], expected.state_dict()["state"]
        assert moved.keys() == plain.keys()
        for parameter in plain:
            for key, value in plain[parameter].items():
                assert torch.equal(torch.as_tensor(moved[parameter][key]), torch.as_tensor(value))
        continued = make(weights())  # a continued run: its states are loaded before they are placed
        continued.load_state_dict(copy.deepcopy(expected.state_dict()))
        HostStates(continued).place(count, CountingStore(tmp_path), CPU, room_bytes)
        plain_continued = make(weights())
        plain_continued.load_state_dict(copy.deepcopy(expected.state_dict()))
        assert all(map(torch.equal, updated(continued, 2, closure=True), updated(plain_continued, 2)))
    assert not list(tmp_path.iterdir())


def test_parameters_that_are_added_are_updated_and_a_step_that_fails_changes_no_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer, expected = torch.optim.AdamW(weights()), torch.optim.AdamW(weights())
    store = FileStore(tmp_path)
    states = HostStates(optimizer)
    states.place(3, store, CPU, 3 * states.sizes[0])
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for group_of in (optimizer, expected):
        group_of.add_param_group({"params": [nn.Parameter(torch.ones(9))]})
    updated(optimizer, 1)
    scheduler.step()
    updated(expected, 1)
    for group in expected.param_groups:
        group["lr"] *= 0.5
    with monkeypatch.context() as patch:
        patch.setattr(store, "copy_in", lambda *arguments: (_ for _ in ()).throw(InputError("full")))
        with pytest.raises(InputError, match="full"):
            optimizer.step()
    assert [len(group["params"]) for group in optimizer.param_groups] == [7, 1]
    assert all(map(torch.equal, updated(optimizer, 2), updated(expected, 2)))


class Model(nn.Module):
    """Layers of many weights for few rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(24, 24) for _ in range(6)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def trained(**options: Any) -> tuple[list[Tensor], FittedStep]:
    torch._dynamo.reset()
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if "budget" in options:
        options |= {"optimizer": optimizer, "host_link": LINK}
    fitted = fit(model, effort=PlanEffort(rounds=0), **{"budget": "100%", **options})
    for _ in range(3):
        optimizer.zero_grad()
        fitted(torch.linspace(-1, 1, 4 * 24).reshape(4, 24)).backward()
        optimizer.step()
    (step,) = fitted_steps(fitted)
    return list(model.parameters()), step


def test_a_plan_moves_states_that_do_not_fit_and_a_second_process_does_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNEBENCH_CACHE", str(tmp_path))
    expected, _ = trained()
    (tmp_path / "swapped").mkdir()
    run = functools.partial(trained, budget="85%", host_states=True, swap_folder=tmp_path / "swapped")
    result, step = run()
    assert all(map(torch.equal, result, expected))
    parameter_bytes = sum(weight.nbytes for weight in expected)
    assert step.state_bytes + step.host_state_bytes == 2 * parameter_bytes
    assert 0 < step.state_bytes < 2 * parameter_bytes
    assert step.plan.step.static_bytes["optimizer and other memory"] == step.state_bytes
    assert step.plan.simulation.peak_bytes <= step.plan.budget_bytes
    assert step.state_copy_us == pytest.approx(step.host_state_bytes / 1e3, rel=0.01)
    result, remembered = run()
    assert remembered.remembered
    assert remembered.choice == step.choice
    assert all(map(torch.equal, result, expected))


class Normed(torch.optim.SGD):
    """Divides by the norm of all gradients."""

    def step(self, closure: Any = None) -> Any:
        gradients = [weight.grad for group in self.param_groups for weight in group["params"]]
        torch._foreach_div_(gradients, torch.linalg.vector_norm(torch.cat(gradients)).item())
        return super().step(closure)


class Flat(torch.optim.SGD):
    """Has its states in a list of its own."""

    def step(self, closure: Any = None) -> Any:
        self.moments = [weight.grad for group in self.param_groups for weight in group["params"]]
        return super().step(closure)


class Extended(torch.optim.AdamW):
    """Calls the step of a class whose step runs hooks as well, once that class has an instance."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def extended(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    torch.optim.AdamW(weights())  # its class runs hooks from now on
    return Extended(parameters)


def test_a_step_that_calls_one_with_hooks_is_refused_when_it_runs(tmp_path: Path) -> None:
    class Momentum(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for parameter in self.param_groups[0]["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["moment"] = 0.9 * state.get("moment", 0) + parameter.grad
                    parameter -= 0.1 * state["moment"]

    class Late(Momentum):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    optimizer = Late(weights())
    states = HostStates(optimizer)
    states.place(3, FileStore(tmp_path), CPU, 3 * states.sizes[0])
    updated(optimizer, 1)
    Momentum(weights())  # from now on, its step runs hooks
    with pytest.raises(InputError, match="that of Late calls the step of a class it extends"):
        updated(optimizer, 1)
    assert len(optimizer.param_groups[0]["params"]) == 7


@pytest.mark.parametrize(
    ("make", "options", "expected"),
    [
        (lambda p: torch.optim.LBFGS(p), {}, r"updates each parameter by itself.*small LBFGS .*fails"),
        (lambda p: Normed(p, momentum=0.9), {}, r"Normed updates two parameters together otherwise"),
        (lambda p: Flat(p, lr=0.1), {}, r"in optimizer.state, and Flat has none there"),
        (torch.optim.Adafactor, {}, r"states as large as .* and Adafactor has none there"),
        (extended, {}, r"that of Extended calls the step of a class it extends"),
        (torch.optim.AdamW, {"optimizer": None}, r"host_states needs optimizer: "),
        (torch.optim.AdamW, {"budget": None, "plan": "plan.json"}, r"compress and host_states need a budget"),
    ],
)
def test_what_cannot_be_in_host_memory_is_refused(make: Make, options: Any, expected: str) -> None:
    model = Model()
    optimizer = make(model.parameters())
    with pytest.raises(InputError, match=expected):
        fit(model, **{"budget": "80%", "optimizer": optimizer, "host_states": True, **options})


def test_a_processor_without_a_folder_and_a_budget_without_room_are_refused(tmp_path: Path) -> None:
    model = Model()
    fitted = fit(model, "80%", optimizer=torch.optim.AdamW(model.parameters()), host_states=True)
    with pytest.raises(InputError, match="on a processor, host_states needs swap_folder"):
        fitted(torch.ones(4, 24))
    with pytest.raises(InputError, match="while parameters are updated, and the largest parameter's take"):
        trained(budget="55%", host_states=True, swap_folder=tmp_path)


def test_an_optimizer_has_one_model(tmp_path: Path) -> None:
    optimizer = torch.optim.AdamW(weights())
    states = HostStates(optimizer)
    states.place(1, FileStore(tmp_path), CPU, states.sizes[0])
    assert list(itertools.accumulate(states.sizes))[-1] == states.host_bytes(states.count_for(1e9))
    with pytest.raises(InputError, match="for another model: make one for each"):
        HostStates(optimizer)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()
