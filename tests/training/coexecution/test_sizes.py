"""`coexecute` with sizes that change: equal to eager mode, and without a new record for each size."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: install tunebench[torch]")

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.coexecution import differences, run_program
from benchmarks.programs import Make, State, Step
from tunebench.training import coexecute
from tunebench.training.coexecution import _testing
from tunebench.training.coexecution._sizes import Numbers, Size, SizeFinder

WIDTH = 8
SHORTEST, LONGEST = 5, 24
ITERATIONS = 30

Compute = Callable[[nn.ModuleDict, Tensor, State], Tensor]


def _length(iteration: int) -> int:
    """Return the length of an iteration: first the shortest and the longest, then any between."""
    first = (11, SHORTEST, LONGEST, 12)
    return first[iteration] if iteration < len(first) else random.Random(iteration).randint(SHORTEST, LONGEST)


def _input(iteration: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(iteration))


def _program(compute: Compute, batch: Callable[[int], tuple[Tensor, ...]]) -> Make:
    def make(seed: int) -> tuple[Step, State]:
        torch.manual_seed(seed)
        network = nn.ModuleDict(
            {
                "project": nn.Linear(WIDTH, WIDTH),
                "words": nn.Embedding(LONGEST + 1, WIDTH),
                "norm": nn.LayerNorm(WIDTH),
                "conv": nn.Conv1d(WIDTH, WIDTH, 3, stride=2, padding=1),
                "scale": nn.BatchNorm1d(WIDTH),
            }
        )
        optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
        state = State(modules={"network": network}, optimizers={"adam": optimizer}, batch=batch)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = compute(network, x, state)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step, state

    return make


def _lengths(iteration: int) -> tuple[Tensor, ...]:
    return (_input(iteration, 2, _length(iteration), WIDTH),)


def _attention(network: nn.ModuleDict, x: Tensor, state: State) -> Tensor:
    count, length, _ = x.shape
    x = x + network["words"](torch.arange(length))
    heads = network["project"](network["norm"](x)).view(count, length, 2, -1).transpose(1, 2)
    mixed = functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    mixed = mixed.transpose(1, 2).reshape(count, length, WIDTH)
    state.effects.append((mixed.shape, mixed.stride()))
    return functional.mse_loss(mixed, x)


def _scores(network: nn.ModuleDict, x: Tensor, state: State) -> Tensor:
    scores = x @ network["project"](x).transpose(1, 2) / x.shape[1] ** 0.5
    future = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
    return (scores.masked_fill(future, -9.0).softmax(-1) @ x).square().mean()


def _flat(network: nn.ModuleDict, x: Tensor, state: State) -> Tensor:
    rows = network["scale"](network["project"](x.flatten(0, 1)))
    state.effects.append(len(rows))
    return functional.cross_entropy(functional.dropout(rows, 0.2), rows.detach().argmax(1))


def _convolution(network: nn.ModuleDict, x: Tensor, state: State) -> Tensor:
    convolved = network["conv"](network["conv"](x.transpose(1, 2)))
    return convolved.abs().sum() / convolved.shape[2]


def _in_place(network: nn.ModuleDict, x: Tensor, state: State) -> Tensor:
    rows = network["project"](x.clamp_(-1, 1)) * 1
    rows[:, 1:-1].mul_(0.5)
    rows[:, ::2] += 1
    part = rows.split([1, x.shape[1] - 1], 1)[1]

    return torch.cat([part, rows.flip(1)], 1).square().mean()


def _clamped(network: nn.ModuleDict, x: Tensor, state: State) -> Tensor:
    first = network["project"](x[:, :10])
    state.effects.append(first.shape)
    return first.square().mean() + functional.pad(x, (0, 0, 0, LONGEST - x.shape[1])).mean()


def _branches(network: nn.ModuleDict, x: Tensor, state: State) -> Tensor:
    hidden = network["project"](x)
    if x.shape[1] % 3 == 0:
        hidden = network["norm"](hidden).cumsum(1)
    elif hidden.mean() > 0:
        hidden = hidden.tanh()
    state.effects.append(hidden.sum().item())
    return hidden.square().mean()


def _parity(network: nn.ModuleDict, x: Tensor, state: State) -> Tensor:
    hidden = network["project"](x)
    if x.shape[1] % 2 == 0:
        state.effects.append(torch.tensor(hidden.tolist()).sum().item())
        hidden = hidden + torch.full((x.shape[1], WIDTH), 0.5)
    else:
        hidden = hidden + torch.randn_like(x) * 0.1
    if len(state.effects) % 2:
        hidden = hidden.sin()
    return hidden.square().mean() + torch.ones(x.shape[1]).sum()


def _counted(network: nn.ModuleDict, x: Tensor, state: State) -> Tensor:
    rows = x.flatten(0, 1)
    chosen = rows[rows[:, 0] > 0]
    hidden = network["project"](chosen)
    state.effects.append(chosen.shape)
    return hidden.sum() / max(1, len(chosen)) + hidden.amax(0).mean()


def _shifted(network: nn.ModuleDict, x: Tensor, state: State) -> Tensor:
    shift = random.Random(len(state.effects)).randint(1, 9)
    state.effects.append(shift)
    return (network["project"](x).roll(shift, 1) * x).mean() * 0.9 ** len(state.effects)


def _sized_gradient(network: nn.ModuleDict, x: Tensor, state: State) -> Tensor:
    x.requires_grad_(True)
    network["project"](x).tanh().sum().backward()
    assert x.grad is not None
    state.effects.append((x.grad.shape, x.grad.norm().item()))
    return network["project"](x.grad).square().mean()


COMPUTE: dict[str, Compute] = {
    "attention": _attention,
    "scores": _scores,
    "flat": _flat,
    "convolution": _convolution,
    "in place": _in_place,
    "clamped": _clamped,
    "branches": _branches,
    "parity": _parity,
    "counted": _counted,
    "shifted": _shifted,
    "sized gradient": _sized_gradient,
}

RECORDS = {
    "attention": 4,
    "scores": 4,
    "flat": 4,
    "convolution": 6,
    "in place": 5,
    "counted": 9,
    "shifted": 9,
}
"""At most so many iterations are recorded: the first, whose optimizer has no state yet, and some sizes."""


def _run(make: Make, iterations: int = ITERATIONS) -> Any:
    """Compare iterations with eager mode, and return the report."""
    steps: list[Any] = []

    def wrap(step: Step) -> Step:
        coexecuted: Step = coexecute(step)
        steps.append(coexecuted)
        return coexecuted

    expected = run_program(make, lambda step: step, iterations)
    with _testing.forced():
        got = run_program(make, wrap, iterations)
    assert differences(expected, got) == []
    return coexecute.report(steps[0])


@pytest.mark.parametrize("name", COMPUTE)
def test_sizes_that_change_equal_eager_mode(name: str) -> None:
    report = _run(_program(COMPUTE[name], _lengths))
    if name in RECORDS:
        assert report.traced + report.diverged <= RECORDS[name], report


def test_a_length_beyond_those_that_were_recorded_is_recorded_once() -> None:
    lengths = [7, 5, 9, 7, 8, 6, 12, 11, 10, 4, 1, 1, 5, 12, 1]

    def batch(iteration: int) -> tuple[Tensor, ...]:
        return (_input(iteration, 2, lengths[iteration], WIDTH),)

    report = _run(_program(_attention, batch), len(lengths))
    # The first, whose optimizer has no state yet, three lengths, 12, 4 and 1.
    assert report.traced + report.diverged == 7


def test_two_sizes_that_change_independently() -> None:
    def batch(iteration: int) -> tuple[Tensor, ...]:
        chance = random.Random(iteration)
        return (_input(iteration, chance.randint(2, 5), chance.randint(SHORTEST, LONGEST), WIDTH),)

    report = _run(_program(_attention, batch), 40)
    assert report.coexecuted >= 20


def test_parts_of_a_tensor_at_changing_places() -> None:
    whole = torch.randn(400, WIDTH, generator=torch.Generator().manual_seed(0))

    def batch(iteration: int) -> tuple[Tensor, ...]:
        start = 11 * iteration
        return (whole[start : start + 9],)

    def compute(network: nn.ModuleDict, x: Tensor, state: State) -> Tensor:
        return (network["project"](x)[1:] * x[:-1]).square().mean()

    report = _run(_program(compute, batch))
    assert report.traced + report.diverged <= 3 + 1


@pytest.mark.parametrize("name", ["attention", "counted", "in place"])
def test_leaving_a_path_with_sizes_at_any_call_is_invisible(name: str) -> None:
    """After some steps that are recorded, each step leaves the path two calls later than the one before."""
    make, recorded, places = _program(COMPUTE[name], _lengths), 7, 12
    expected = run_program(make, lambda step: step, recorded + places)
    steps: list[Any] = []

    def wrap(step: Step) -> Step:
        steps.append(coexecute(step))
        calls = itertools.chain([-1] * recorded, range(0, 2 * places, 2))

        def run(*inputs: Tensor) -> Tensor:
            with _testing.forced(), _testing.diverge_at(next(calls)):
                result: Tensor = steps[0](*inputs)
                return result

        return run

    assert differences(expected, run_program(make, wrap, recorded + places)) == []
    divergences = coexecute.report(steps[0]).divergences
    assert sum(place.count for place in divergences if place.reason == _testing.FORCED) >= 7


# -- formulas ------------------------------------------------------------------------------------------------


def _formula(roots: dict[int, tuple[int, ...]], values: tuple[int, ...]) -> Callable[..., Any] | None:
    """Return the function from values of roots to the value of a size."""
    sizes = {index: Size(low=min(lengths), high=max(lengths)) for index, lengths in roots.items()}
    finder = SizeFinder(sizes, roots)
    size = finder.size(values, least=None)
    if size is None:
        return None
    finder.add()
    return lambda **numbers: Numbers(sizes).copy(
        {-int(key[1:]): lengths for key, lengths in numbers.items()}
    )[size.index]


@pytest.mark.parametrize(
    ("function", "value"),
    [
        (lambda length: length, 20),
        (lambda length: 3 * length, 60),
        (lambda length: length - 1, 19),
        (lambda length: 2 * length - 1, 39),
        (lambda length: 4 * length * length, 1600),
        (lambda length: length * length + length, 420),
    ],
)
def test_a_size_follows_from_a_root(function: Callable[[int], int], value: int) -> None:
    lengths = (4, 10, 16, 17)
    formula = _formula({-1: lengths}, tuple(map(function, lengths)))
    assert formula is not None
    assert formula(r1=20) == value


def test_a_size_follows_from_two_roots() -> None:
    counts, lengths = (2, 3, 5, 2), (4, 9, 6, 8)
    formula = _formula(
        {-1: counts, -2: lengths}, tuple(7 * a * b * b for a, b in zip(counts, lengths, strict=True))
    )
    assert formula is not None
    assert formula(r1=4, r2=10) == 2800


def test_a_size_without_a_formula_is_not_found() -> None:
    assert _formula({-1: (4, 10, 16)}, (1, 7, 2)) is None
    assert _formula({-1: (4, 10, 16)}, (2, 5, 8)) is None  # rounding would be a guess
    assert _formula({-1: (4, 10, 16)}, (20, 110, 272)) is None  # so few would show a square by chance
    assert _formula({-1: (4, 10)}, (1, 7)) is None  # two values do not show a formula of two coefficients


def test_a_root_takes_values_between_those_that_were_recorded() -> None:
    sizes = {-1: Size(low=4, high=10)}
    for value, covered in ((4, True), (6, True), (12, False), (2, False)):
        assert Numbers(sizes).take(-1, value) is covered
        assert Numbers(sizes, strict=False).take(-1, value)
    assert not Numbers(sizes).take(-1, True)
    numbers = Numbers(sizes)
    assert numbers.take(-1, 6)
    assert not numbers.take(-1, 8)
    numbers.undo()
    assert numbers.take(-1, 8)
