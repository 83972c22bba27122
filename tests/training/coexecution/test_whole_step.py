"""Heads of steps that run as one function: bits of eager mode, and what is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tunebench.training import coexecute
from tunebench.training.coexecution import _whole_step

pytestmark = pytest.mark.slow

Make = Callable[[], tuple[Callable[..., Any], nn.Module]]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace at once, whatever it costs, and do not choose by time."""
    monkeypatch.setattr(_whole_step, "_TRACE_S", 0.0)
    monkeypatch.setattr(_whole_step, "_SHARE", 1e6)
    monkeypatch.setattr(_whole_step.WholeSteps, "_decide", lambda self: None)
    monkeypatch.setattr(_whole_step.WholeSteps, "_is_eager_turn", lambda self: False)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4))


def states(model: nn.Module) -> list[Tensor]:
    return [
        *model.state_dict().values(),
        *(leaf.grad for leaf in model.parameters() if leaf.grad is not None),
    ]


def compare(
    make: Make,
    batches: list[tuple[Any, ...]],
    before: Callable[[int, nn.Module], Any] = lambda index, model: None,
) -> Any:
    """Run a step with and without co-execution, compare everything, and return the first one's heads."""
    results = []
    for coexecuted in (False, True):
        step, model = make()
        if coexecuted:
            step = coexecute(step)
            step._policy.reason = "by a test"
        torch.manual_seed(1)
        outputs: list[Any] = []
        for index, batch in enumerate(batches):
            before(index, model)
            try:
                outputs.append(step(*batch))
            except (IndexError, RuntimeError) as error:
                outputs.append(str(error))
        results.append((outputs, states(model), torch.get_rng_state()))
    texts = [[output for output in each[0] if isinstance(output, str)] for each in results]
    assert texts[0] == texts[1]
    for each in results:
        each[0][:] = [output for output in each[0] if not isinstance(output, str)]
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0, equal_nan=True)
    return step._whole_steps


def simple(forward: Callable[..., Tensor] = lambda model, x: model(x), **changes: Any) -> Make:
    def make() -> tuple[Callable[..., Any], nn.Module]:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        clear = changes.get("clear", lambda model, optimizer: optimizer.zero_grad())

        def step(x: Tensor) -> Tensor:
            clear(model, optimizer)
            loss = forward(model, x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step, model

    return make


def batches(count: int = 14) -> list[tuple[Tensor]]:
    chance = torch.Generator().manual_seed(2)
    return [(torch.randn(6, 8, generator=chance),) for _ in range(count)]


def test_head_runs_as_one_function() -> None:
    heads = compare(simple(), batches())
    assert heads.reason is None
    assert heads.runs >= 3


def test_draws_of_python_are_refused() -> None:
    def make() -> tuple[Callable[..., Any], nn.Module]:
        chance = random.Random(3)
        return simple(lambda model, x: model(x) * chance.random())()

    assert compare(make, batches()).runs == 0


def test_hooks_are_refused() -> None:
    def make() -> tuple[Callable[..., Any], nn.Module]:
        step, model = simple()()
        model[0].weight.register_hook(lambda gradient: gradient * 2)
        return step, model

    assert compare(make, batches()).runs == 0


def test_hook_that_is_added_later_runs() -> None:
    def before(index: int, model: nn.Module) -> None:
        if index == 10:
            model[0].weight.register_hook(lambda gradient: gradient * 2)

    heads = compare(simple(), batches(20), before)
    assert 0 < heads.runs < 10


def test_module_clears_gradients() -> None:
    compare(simple(clear=lambda model, optimizer: model.zero_grad()), batches())


def test_gradients_accumulate() -> None:
    compare(simple(clear=lambda model, optimizer: None), batches())


def test_error_leaves_what_eager_mode_leaves() -> None:
    def make() -> tuple[Callable[..., Any], nn.Module]:
        model = nn.ModuleDict({"words": nn.Embedding(5, 8), "net": network()})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        counts = [0]

        def step(x: Tensor, words: Tensor) -> tuple[Tensor, int]:
            counts[0] += 1
            optimizer.zero_grad()
            loss = (model["net"](x) + 1).mean() + model["words"](words).mean()
            loss.backward()
            optimizer.step()
            return loss.detach(), counts[0]

        return step, model

    words = [torch.tensor([index % 5 if index != 11 else 7]) for index in range(14)]
    heads = compare(make, [(x, word) for (x,), word in zip(batches(), words, strict=True)])
    assert heads.runs > 0
    assert heads.reason is not None


def test_number_that_changes_is_an_input() -> None:
    def make() -> tuple[Callable[..., Any], nn.Module]:
        model = network()
        optimizer = torch.optim.Adam(model.parameters())

        def step(x: Tensor, index: int) -> Tensor:
            loss = model(x).square().mean() * min(1.0, (index + 1) / 40)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return loss.detach()

        return step, model

    heads = compare(make, [(x, index) for index, (x,) in enumerate(batches(24))])
    assert heads.runs >= 3


def test_what_changes_between_steps_is_noticed() -> None:
    def before(index: int, model: nn.Module) -> None:
        if index == 8:
            model.eval()
        if index == 12:
            model.train()
        if index == 16:
            torch.set_default_dtype(torch.float64)
            torch.set_default_dtype(torch.float32)
            model[4].weight.requires_grad_(False)
        if index == 18:
            torch.use_deterministic_algorithms(True)

    try:
        assert compare(simple(), batches(24), before).runs > 0
    finally:
        torch.use_deterministic_algorithms(False)
