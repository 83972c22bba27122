"""`coexecute` equals eager mode: one small training program for each feature of PyTorch and Python."""

from __future__ import annotations

import gc
import io
import itertools
import multiprocessing
import random
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: install tunebench[torch]")

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.coexecution import TOLERANCE, differences, run_program
from benchmarks.programs import Make, State, Step
from tests.fork_server import Programs
from tunebench.training import coexecute
from tunebench.training.coexecution import _learning, _patching, _runner
from tunebench.training.coexecution._iteration import Iteration
from tunebench.training.coexecution._policy import Policy
from tunebench.training.coexecution._runner import GraphRunner
from tunebench.training.coexecution._segment import Piece
from tunebench.training.coexecution._testing import forced

ITERATIONS = 8

Feature = Callable[[], tuple[Step, State]]

FEATURES: dict[str, Feature] = {}
"""Functions that make a program, by the name of what the program uses."""


def _feature(make: Feature) -> Feature:
    FEATURES[make.__name__.strip("_")] = make
    return make


def _network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def _batch(iteration: int, count: int = 6) -> tuple[Tensor, Tensor]:
    own = torch.Generator().manual_seed(iteration)
    return torch.randn(count, 4, generator=own), torch.randint(2, (count,), generator=own)


def _state(**modules: nn.Module) -> State:
    optimizers = {name: torch.optim.Adam(module.parameters(), lr=0.01) for name, module in modules.items()}
    return State(modules=modules, optimizers=optimizers, batch=_batch)


def _updated(state: State, loss: Tensor) -> Tensor:
    for optimizer in state.optimizers.values():
        optimizer.zero_grad()
    loss.backward()
    for optimizer in state.optimizers.values():
        optimizer.step()
    return loss.detach()


@_feature
def in_place_and_views() -> tuple[Step, State]:
    state = _state(network=_network())
    total = state.tensors["total"] = torch.zeros(6, 2)

    def step(x: Tensor, y: Tensor) -> Tensor:
        scaled = x.clone()
        rows = scaled.view(3, 2, 4)
        rows[1].mul_(2)
        scaled.T[0] += 1
        first, last = scaled.chunk(2)
        first.add_(last)
        output = state.modules["network"](scaled)
        total.add_(output.detach()).clamp_(-3, 3)
        total[:, 0] = total[:, 1]
        state.effects.append((scaled._version, rows.is_contiguous(), scaled.T.stride()))
        output = output * 1
        output[0].zero_()
        output.view(-1)[3:5].mul_(0.5)
        return _updated(state, functional.cross_entropy(output, y))

    return step, state


@_feature
def aliased_inputs() -> tuple[Step, State]:
    state = _state(network=_network())
    whole = state.tensors["whole"] = torch.randn(12, 4)

    def step(x: Tensor, y: Tensor) -> Tensor:
        for part in (whole[:6], whole[3:9], x, whole[::2]):
            part.mul_(0.9)
            whole[4] += x[0]
        loss = functional.cross_entropy(state.modules["network"](whole[:6] + whole[6:]), y)
        return _updated(state, loss)

    def batch(iteration: int) -> tuple[Tensor, Tensor]:
        return (whole[1:7] if iteration % 2 else _batch(iteration)[0]), _batch(iteration)[1]

    return step, State(modules=state.modules, optimizers=state.optimizers, batch=batch, tensors=state.tensors)


@_feature
def an_input_written_in_place() -> tuple[Step, State]:
    state = _state(network=_network())

    def step(x: Tensor, y: Tensor) -> Tensor:
        x.sub_(x.mean(0)).div_(x.std(0))
        y[0] = 1 - y[0]
        _updated(state, functional.cross_entropy(state.modules["network"](x), y))
        return x

    return step, state


@_feature
def numpy_writes_before_a_path_is_left() -> tuple[Step, State]:
    state = _state(network=_network())

    def step(x: Tensor, y: Tensor) -> Tensor:
        count = len(state.effects)
        rows = x.clone()
        rows.numpy()[0] += count >= 5  # nothing in the iterations that are recorded first
        doubled = rows * 2
        rows.numpy()[1] -= count >= 5
        rows.mul_(0.5)
        output = state.modules["network"](rows + doubled)
        if count >= 6:
            output = output.tanh()
        state.effects.append(output.sum().item())
        return _updated(state, functional.cross_entropy(output, y))

    return step, state


@_feature
def a_transform_of_functions_in_a_rare_branch() -> tuple[Step, State]:
    state = _state(network=_network())

    def step(x: Tensor, y: Tensor) -> Tensor:
        output = state.modules["network"](x)
        state.effects.append(len(state.effects))
        if len(state.effects) == 7:
            output = torch.func.vmap(torch.sin)(output)
            state.effects.append(
                torch.func.grad(lambda value: (value * output.detach()).sum())(x[:, :2]).sum().item()
            )
        return _updated(state, functional.cross_entropy(output, y))

    return step, state


@_feature
def no_grad() -> tuple[Step, State]:
    student, teacher = _network(), _network().requires_grad_(False)
    state = _state(student=student)
    state.modules["teacher"] = teacher

    def step(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher(x).softmax(-1)
        state.effects.append((wanted.requires_grad, torch.is_grad_enabled()))
        loss = _updated(state, functional.cross_entropy(student(x), wanted))
        with torch.no_grad():
            for mean, value in zip(teacher.parameters(), student.parameters(), strict=True):
                mean.lerp_(value, 0.1)
        return loss

    return step, state


@_feature
def autocast() -> tuple[Step, State]:
    state = _state(network=_network())

    def step(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = state.modules["network"](x)
            state.effects.append(output.dtype)
            loss = functional.cross_entropy(output.float(), y)
        return _updated(state, loss)

    return step, state


@_feature
def hooks() -> tuple[Step, State]:
    network = _network()
    state = _state(network=network)
    network[0].register_forward_hook(lambda module, inputs, output: output * 2)
    network[2].register_full_backward_hook(lambda module, into, out: state.effects.append(len(into)))
    network[2].weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    network[0].bias.register_post_accumulate_grad_hook(lambda bias: bias.grad.mul_(0.5))
    network[0].register_forward_pre_hook(lambda module, inputs: sys.stdout.write(f"{inputs[0].sum()}"))

    def step(x: Tensor, y: Tensor) -> Tensor:
        output = network(x)
        output.register_hook(lambda gradient: state.effects.append(gradient.norm().item()))
        return _updated(state, functional.cross_entropy(output, y))

    return step, state


@_feature
def gradient_accumulation() -> tuple[Step, State]:
    state = _state(network=_network())
    optimizer = state.optimizers["network"]
    seen = itertools.count(1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        for inputs, labels in zip(x.chunk(2), y.chunk(2), strict=True):
            loss = functional.cross_entropy(state.modules["network"](inputs), labels) / 4
            loss.backward()
        if next(seen) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=len(state.effects) % 2 == 0)
            state.effects.append("update")
        return loss.detach()

    return step, state


@_feature
def clipping_by_norm() -> tuple[Step, State]:
    state = _state(network=_network())

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer = state.optimizers["network"]
        optimizer.zero_grad()
        loss = functional.cross_entropy(state.modules["network"](x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(state.modules["network"].parameters(), 0.3)
        if norm > 0.5:
            nn.utils.clip_grad_value_(state.modules["network"].parameters(), 0.05)
        sys.stdout.write(f"norm {norm:.6f}")
        optimizer.step()
        return loss.detach()

    return step, state


@_feature
def learning_rates() -> tuple[Step, State]:
    network = _network()
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=60)
    state = State(modules={"network": network}, optimizers={"adamw": optimizer}, batch=_batch)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = _updated(state, functional.cross_entropy(network(x), y))
        schedule.step()
        return loss

    return step, state


@_feature
def branches_on_values() -> tuple[Step, State]:
    state = _state(network=_network())

    def step(x: Tensor, y: Tensor) -> Tensor:
        output = state.modules["network"](x)
        if output.mean() > 0:
            output = output.square()
            state.effects.append("positive")
        while output.abs().max().item() > 0.5:
            output = output * 0.8
        for row in output[:2]:
            if row.argmax().item() == 1:
                output = output + row
        if output.isnan().any() or not torch.allclose(output, output):
            raise AssertionError
        return _updated(state, functional.cross_entropy(output, y))

    return step, state


@_feature
def variable_lengths() -> tuple[Step, State]:
    network = nn.ModuleDict({"words": nn.Embedding(9, 4), "cell": nn.Linear(4, 4), "head": nn.Linear(4, 9)})
    state = _state(network=network)

    def step(words: Tensor) -> Tensor:
        hidden = network["words"](words)
        scores = network["cell"](hidden) @ hidden.transpose(1, 2)
        future = torch.ones(words.shape[1], words.shape[1], dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(future, -1e9).softmax(-1) @ hidden
        output = network["head"](mixed)[:, :-1]
        return _updated(state, functional.cross_entropy(output.reshape(-1, 9), words[:, 1:].reshape(-1)))

    def batch(iteration: int) -> tuple[Tensor]:
        length = random.Random(iteration).randint(3, 12)
        return (torch.randint(9, (2, length), generator=torch.Generator().manual_seed(iteration)),)

    return step, State(modules=state.modules, optimizers=state.optimizers, batch=batch)


@_feature
def attributes() -> tuple[Step, State]:
    network = _network()
    network.calls, network.scale, network.last = 0, 1.0, None
    state = _state(network=network)

    def step(x: Tensor, y: Tensor) -> Tensor:
        network.calls += 1
        network.scale *= 0.95
        output = network(x) * network.scale
        if network.last is not None:
            output = output + 0.1 * network.last
        network.last = output.detach()
        if network.calls == 4:
            network.train(False)
        state.effects.append((network.calls, network.training))
        return _updated(state, functional.cross_entropy(output, y))

    return step, state


@_feature
def generators() -> tuple[Step, State]:
    state = _state(network=_network())

    def outputs(x: Tensor) -> Iterator[Tensor]:
        for rows in x.split(2):
            sys.stdout.write("next")
            yield state.modules["network"](rows)

    endless = itertools.accumulate(itertools.repeat(1.0), lambda value, _: value * 0.9)

    def step(x: Tensor, y: Tensor) -> Tensor:
        output = torch.cat([each * next(endless) for each in outputs(x)])
        return _updated(state, functional.cross_entropy(output, y))

    return step, state


@_feature
def exceptions() -> tuple[Step, State]:
    state = _state(network=_network())
    calls = itertools.count()

    def step(x: Tensor, y: Tensor) -> Tensor:
        call = next(calls)
        try:
            x @ x
        except RuntimeError as error:
            state.effects.append(str(error))
        try:
            if x.sum().item() > 0:
                raise KeyError(round(x.sum().item(), 4))
        except KeyError as error:
            state.effects.append(error.args)
        finally:
            x = x * 2
        loss = functional.cross_entropy(state.modules["network"](x), y)
        if call in (3, 6):
            raise ValueError(f"loss {loss.item():.6f} in call {call}")
        loss = _updated(state, loss)
        if call == 5:
            raise StopIteration("after the update")
        return loss

    return step, state


@_feature
def saving_in_the_middle() -> tuple[Step, State]:
    state = _state(network=_network())

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer, network = state.optimizers["network"], state.modules["network"]
        optimizer.zero_grad()
        loss = functional.cross_entropy(network(x), y)
        loss.backward()
        optimizer.step()
        stream = io.BytesIO()
        torch.save({"network": network.state_dict(), "optimizer": optimizer.state_dict()}, stream)
        stream.seek(0)
        saved = torch.load(stream)
        state.effects.append([value.sum().item() for value in saved["network"].values()])
        if len(state.effects) == 4:
            network.load_state_dict({key: value * 0.5 for key, value in saved["network"].items()})
        return loss.detach()

    return step, state


@_feature
def two_networks_that_compete() -> tuple[Step, State]:
    maker, judge = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    state = _state(maker=maker, judge=judge)

    def step(x: Tensor, y: Tensor) -> Tensor:
        made = maker(torch.randn(len(x), 3))
        state.optimizers["judge"].zero_grad()
        loss = functional.softplus(-judge(x)).mean() + functional.softplus(judge(made.detach())).mean()
        loss.backward()
        state.optimizers["judge"].step()
        if loss.item() < 1.6:
            state.optimizers["maker"].zero_grad()
            functional.softplus(-judge(made)).mean().backward()
            state.optimizers["maker"].step()
        return loss.detach()

    return step, state


@_feature
def second_derivatives_and_custom_functions() -> tuple[Step, State]:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return gradient * 2 + 0 * x

    state = _state(network=_network())

    def step(x: Tensor, y: Tensor) -> Tensor:
        x = x.requires_grad_()
        output = state.modules["network"](Doubled.apply(x))
        loss = functional.cross_entropy(output, y)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return _updated(state, loss + slope.norm())

    return step, state


@_feature
def random_numbers() -> tuple[Step, State]:
    state = _state(network=nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.4), nn.Linear(8, 2)))
    own = torch.Generator().manual_seed(3)

    def step(x: Tensor, y: Tensor) -> Tensor:
        x = x + 0.1 * torch.randn(x.shape, generator=own) + 0.1 * torch.randn_like(x)
        order = torch.randperm(len(x))
        if torch.rand(()).item() < 0.5:
            torch.manual_seed(random.randrange(99))
        x.bernoulli_(0.9)
        return _updated(state, functional.cross_entropy(state.modules["network"](x[order]), y))

    return step, state


@pytest.mark.parametrize("name", FEATURES)
def test_a_coexecuted_program_equals_eager(name: str) -> None:
    def make(seed: int) -> tuple[Step, State]:
        torch.manual_seed(seed)
        return FEATURES[name]()

    _check(make)


def _check(make: Make) -> Any:
    """Compare a program with eager, and return the report of its step."""
    wrapped: list[Step] = []

    def wrap(step: Step) -> Step:
        wrapped.append(coexecute(step))
        return wrapped[0]

    expected = run_program(make, lambda step: step, ITERATIONS, raises=True)
    with forced():
        got = run_program(make, wrap, ITERATIONS, raises=True)
    assert differences(expected, got, TOLERANCE) == []
    return coexecute.report(wrapped[0])


def test_workers_of_a_data_loader_feed_a_coexecuted_step() -> None:
    def losses(wrap: Callable[[Step], Step]) -> list[float]:
        torch.manual_seed(5)
        state = _state(network=_network())

        def step(x: Tensor, y: Tensor) -> Tensor:
            return _updated(state, functional.cross_entropy(state.modules["network"](x), y))

        step = wrap(step)
        data = TensorDataset(torch.randn(20, 4), torch.randint(2, (20,)))
        loader = DataLoader(data, batch_size=6, shuffle=True, num_workers=1)
        return [step(*batch).item() for _ in range(2) for batch in loader]

    with forced():
        assert losses(coexecute) == pytest.approx(losses(lambda step: step), rel=TOLERANCE)


def _losses_of_rank(wrap: Callable[[Step], Step], rank: int) -> list[float]:
    torch.manual_seed(3)
    network = nn.parallel.DistributedDataParallel(_network())
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(network(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = wrap(step)
    found = [step(*_batch(2 * iteration + rank)).item() for iteration in range(ITERATIONS)]
    return found + [value.sum().item() for value in network.parameters()]


def _parallel(rank: int, address: str, results: Any) -> None:
    torch.set_num_threads(1)  # threads of the parent do not exist in a forked process
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    with forced():
        results.put((_losses_of_rank(lambda step: step, rank), _losses_of_rank(coexecute, rank)))
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed")
def test_data_parallel_processes_equal_eager(tmp_path: Path) -> None:
    forking = multiprocessing.get_context("fork")
    results = forking.SimpleQueue()
    arguments = (f"file://{tmp_path / 'store'}", results)
    processes = [forking.Process(target=_parallel, args=(rank, *arguments)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    (eager, ours), (other, _) = results.get(), results.get()
    assert ours == pytest.approx(eager, rel=TOLERANCE)
    assert eager[ITERATIONS:] == other[ITERATIONS:] != eager[:ITERATIONS]


def test_a_segment_that_runs_within_autocast_casts_nothing_again() -> None:
    network = _network()

    @coexecute
    def step(x: Tensor) -> float:
        total = network(x).sum()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return float(total.item())

    with forced():
        found = [step(torch.ones(3, 4)) for _ in range(4)]
    assert found == [network(torch.ones(3, 4)).sum().item()] * 4
    assert coexecute.report(step).coexecuted == 3


class Reversed(torch.autograd.Function):  # type: ignore[misc]  # torch does not type it
    """A function of autograd that reverses gradients."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        """Return the input."""
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        """Return the gradient, reversed."""
        return -gradient


class Labelled(Tensor):  # type: ignore[misc]
    """A tensor of a class of the program."""


def _with_backward_hook(x: Tensor) -> Tensor:
    module = nn.Tanh()
    module.register_full_backward_hook(lambda module, into, out: (into[0] * 2,))
    return module(x)  # type: ignore[no-any-return]


UNSEEN: list[Callable[[Tensor], Tensor]] = [
    Reversed.apply,
    _with_backward_hook,
    lambda x: checkpoint(torch.tanh, x, use_reentrant=False),
    lambda x: checkpoint(torch.tanh, x, use_reentrant=True),
    lambda x: x.as_subclass(Labelled).as_subclass(Tensor),
]


@pytest.mark.parametrize("function", UNSEEN, ids=range(len(UNSEEN)))
def test_code_of_torch_that_no_mode_sees_gets_values(function: Callable[[Tensor], Tensor]) -> None:
    """It is called first in an iteration that follows a known path."""
    network = _network()

    def step(x: Tensor, is_called: bool) -> tuple[Tensor, Tensor]:
        network.zero_grad()
        output = network(x)
        loss = (function(output) if is_called else output).square().sum()
        loss.backward()
        return loss.detach(), network[0].weight.grad.clone()

    coexecuted = coexecute(step, mode="always")
    for is_called in (False, False, False, True, False):
        eager, ours = (run(torch.ones(3, 4), is_called) for run in (step, coexecuted))
        assert all(map(torch.equal, eager, ours))
    assert coexecute.report(coexecuted).coexecuted >= 2


def test_a_tensor_of_inference_mode_raises_the_error_of_eager_mode() -> None:
    network = _network()

    @coexecute(mode="always")
    def step(x: Tensor) -> None:
        network(x).sum().backward()

    for _ in range(3):
        step(torch.ones(3, 4))
    with torch.inference_mode():
        x = torch.ones(3, 4)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
        step(x)


def test_autocast_around_several_steps_keeps_its_casts() -> None:
    """Eager mode computes with weights as they were when autocast cast them first."""
    results = []
    for mode in (None, "always"):
        torch.manual_seed(0)
        network = _network()

        def step(x: Tensor, network: nn.Module = network) -> Tensor:
            loss = network(x).float().square().sum()
            network.zero_grad()
            loss.backward()
            with torch.no_grad():
                for parameter in network.parameters():
                    parameter.sub_(parameter.grad, alpha=0.01)
            return loss.detach()

        run = step if mode is None else coexecute(step, mode="always")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            results.append([run(torch.ones(3, 4)) for _ in range(4)])
    assert results[0] == results[1]


def test_a_parameter_can_be_made_of_a_result() -> None:
    network = _network()
    with_parameter = False

    @coexecute
    def step(x: Tensor) -> float:
        total = network(x).detach()
        if with_parameter:
            return float((nn.Parameter(total) * 2).sum().item())
        return float(total.sum().item())

    with forced():
        plain, *_ = [step(torch.ones(3, 4)) for _ in range(3)]
        with_parameter = True
        assert step(torch.ones(3, 4)) == pytest.approx(2 * plain)


@pytest.mark.parametrize("wrong", [7, -1])
def test_an_index_out_of_range_raises_where_eager_mode_does(wrong: int) -> None:
    def outcome(wrap: Callable[[Any], Any]) -> tuple[list[str], list[Tensor], Any]:
        torch.manual_seed(1)
        network = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 3))
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        seen: list[str] = []

        def step(tokens: Tensor, labels: Tensor) -> None:
            optimizer.zero_grad()
            scores = network(tokens)
            seen.append("scores")
            functional.cross_entropy(scores, labels).backward()
            seen.append("gradients")
            optimizer.step()

        step = wrap(step)
        labels = torch.tensor([0, 2, -100])
        with forced():
            for tokens in ([1, 2, 3], [3, 2, 1], [0, 6, 6], [0, wrong, 1], [4, 4, 4]):
                try:
                    step(torch.tensor(tokens), labels)
                except IndexError as error:
                    seen.append(str(error))
            with pytest.raises(IndexError, match="out of bounds"):
                step(torch.tensor([1, 2, 3]), torch.tensor([0, 1, 3]))
        return seen, [each.detach() for each in network.parameters()], step

    seen, expected, _ = outcome(lambda step: step)
    found, parameters, step = outcome(coexecute)
    assert found == seen
    assert all(torch.equal(one, two) for one, two in zip(expected, parameters, strict=True))
    assert coexecute.report(step).coexecuted >= 2


@pytest.mark.parametrize("threaded", [False, True])
def test_gradients_of_weights_beside_the_backward_pass_are_those_of_eager_mode(
    threaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    begin = GraphRunner.start

    def start(self: GraphRunner, *args: Any) -> None:
        started.append(args)
        begin(self, *args)

    monkeypatch.setattr(Policy, "threaded", lambda self: threaded)
    monkeypatch.setattr(GraphRunner, "start", start)

    def trained(wrap: Callable[[Any], Any]) -> list[Tensor]:
        torch.manual_seed(1)
        network = nn.Sequential(
            nn.Conv2d(3, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3),
            nn.Flatten(),
            nn.Linear(1152, 5),
        )
        optimizer = torch.optim.Adam(network.parameters(), lr=0.01)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = network(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        step = wrap(step)
        with forced():
            losses = [step(torch.randn(16, 3, 16, 16)) for _ in range(8)]
        return [*losses, *network.state_dict().values()]

    expected, found = trained(lambda step: step), trained(coexecute)
    assert all(torch.equal(one, two) for one, two in zip(expected, found, strict=True))
    assert bool(started) is threaded


_SUMS = """
import sys, torch
from torch import nn
from tunebench.training import coexecute
from tunebench.training.coexecution import _runner
from tunebench.training.coexecution._policy import Policy
from tunebench.training.coexecution._testing import forced

Policy.threaded = lambda self: True

def sums(x: torch.Tensor) -> torch.Tensor:
    return x.tanh().sum() + x.sum()

def forked(x: torch.Tensor) -> torch.jit.Future[torch.Tensor]:
    return torch.jit.fork(sums, x)

if __name__ == "__main__":
    fork = torch.jit.script(forked)

    def train(wrap):
        torch.manual_seed(1)
        layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(7200, 9)]
        network = nn.Sequential(*layers)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
        def step(x):
            optimizer.zero_grad()
            loss = network(x).square().mean()
            loss.backward()
            optimizer.step()
        step = wrap(step)
        with forced():
            for _ in range(4):
                step(torch.randn(16, 3, 32, 32))
        return list(network.parameters())

    for before, count in ((1, 2), (2, 1)):
        torch.set_num_threads(before)
        for future in [fork(torch.randn(1 << 17)) for _ in range(8)]:
            future.wait()  # the threads have the number of before now
        torch.set_num_threads(count)
        pairs = list(zip(train(lambda step: step), train(coexecute)))
        print(all(torch.equal(one, two) for one, two in pairs), _runner.is_usable())
"""


def test_threads_of_torch_get_the_number_of_threads_of_the_step(tmp_path: Path, programs: Programs) -> None:
    """First more threads than before, then fewer: the number decides the order of sums."""
    script = tmp_path / "sums.py"
    script.write_text(_SUMS, encoding="utf-8")
    ran = programs.run([str(script)])
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["True"] * 4


_FORKED = """
import os, torch
from tunebench.training.coexecution import _runner

def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2

def forked(x: torch.Tensor) -> torch.jit.Future[torch.Tensor]:
    return torch.jit.fork(doubled, x)

torch.jit.script(forked)(torch.ones(3)).wait()
for _ in range(20):
    child = os.fork()
    if not child:
        os._exit(_runner.is_usable())
    assert os.waitpid(child, 0)[1] == 0
print(_runner.is_usable())
child = os.fork()
if not child:
    os._exit(_runner.is_usable())
assert os.waitpid(child, 0)[1] == 0
"""


def test_a_forked_process_uses_no_threads(tmp_path: Path, programs: Programs) -> None:
    script = tmp_path / "forked.py"
    script.write_text(_FORKED, encoding="utf-8")
    ran = programs.run([str(script)])
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["True"]


def test_threads_that_do_not_come_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_runner, "_THREADS", _runner._Threads())
    monkeypatch.setattr(_runner, "_WAIT_S", 0.05)
    barrier, more = threading.Barrier, torch.get_num_interop_threads() + 1
    monkeypatch.setattr(threading, "Barrier", lambda count: barrier(more))
    assert not _runner.is_usable()
    assert not _runner.is_usable()


@pytest.mark.parametrize(("limit", "value", "paths"), [("_PATHS", 2, 2), ("_OPERATIONS", 0, 1)])
def test_paths_that_were_not_taken_for_long_are_forgotten(
    monkeypatch: pytest.MonkeyPatch, limit: str, value: int, paths: int
) -> None:
    monkeypatch.setattr(_learning, limit, value)

    @coexecute
    def step(x: Tensor, times: int) -> float:
        for _ in range(times):
            x = x * 2
        return float(x.sum().item())

    x = torch.ones(3)
    with forced():
        for times in (1, 2, 1, 3, 1, 2, 1, 1):
            assert step(x, times) == 3 * 2**times
            assert len(step._tree.paths) <= paths
    report = coexecute.report(step)
    diverged, coexecuted = {2: (3, 4), 1: (6, 1)}[paths]
    assert (report.traced, report.diverged, report.coexecuted) == (1, diverged, coexecuted)


def test_values_of_a_threaded_iteration_are_let_go_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    started: list[int] = []
    hand_over, start = Iteration._hand_over, GraphRunner.start

    def counted(iteration: Iteration, escaping: list[int], end: Any) -> None:
        held.append(sum(each is not None and each.numel() > 1 for each in iteration.run.values))
        hand_over(iteration, escaping, end)

    def counting(self: GraphRunner, *args: Any) -> None:
        started.append(len(held))
        start(self, *args)

    monkeypatch.setattr(Iteration, "_hand_over", counted)
    monkeypatch.setattr(GraphRunner, "start", counting)
    monkeypatch.setattr(Policy, "threaded", lambda self: True)
    weight = torch.randn(256, 256) / 16

    @coexecute
    def step(x: Tensor) -> Tensor:
        for _ in range(40):
            x = x @ weight
            if x[0, 0].item() > 1e9:
                break
        return x

    with forced():
        for _ in range(4):
            step(torch.ones(256, 256))
    assert len(started) > 5
    assert max(held) < 12


def test_a_loss_is_returned_with_its_spent_history() -> None:
    def losses(wrap: Callable[[Any], Any]) -> tuple[list[Tensor], Any]:
        torch.manual_seed(1)
        network = _network()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = network(x).square().sum()
            loss.backward()
            optimizer.step()
            return loss

        step = wrap(step)
        with forced():
            return [step(torch.ones(3, 4) * i) for i in range(5)], step

    expected, _ = losses(lambda step: step)
    found, step = losses(coexecute)
    assert coexecute.report(step).coexecuted == 3
    assert [repr(one) for one in found] == [repr(one) for one in expected]
    messages = []
    for loss in (expected[-1], found[-1]):
        assert loss.requires_grad
        assert not loss.is_leaf
        with pytest.raises(RuntimeError, match="a second time") as raised:
            loss.backward()
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


def test_a_result_whose_history_can_be_used_runs_as_in_eager_mode() -> None:
    network = _network()

    @coexecute
    def step(x: Tensor) -> Tensor:
        return network(x).sum()

    with forced():
        results = [step(torch.ones(3, 4)) for _ in range(3)]
    results[-1].backward()
    assert all(each.grad is not None for each in network.parameters())
    assert coexecute.report(step).coexecuted == 0


def test_backward_passes_that_keep_the_graph_are_coexecuted() -> None:
    def gradients(wrap: Callable[[Any], Any]) -> tuple[list[Tensor], Any]:
        torch.manual_seed(1)
        network = _network()

        def step(x: Tensor) -> None:
            network.zero_grad()
            loss = network(x).square().sum()
            loss.backward(retain_graph=True)
            (loss * 0.5).backward()

        step = wrap(step)
        with forced():
            for i in range(4):
                step(torch.ones(3, 4) * i)
        return [each.grad for each in network.parameters()], step

    expected, _ = gradients(lambda step: step)
    found, step = gradients(coexecute)
    assert coexecute.report(step).coexecuted >= 2
    assert all(torch.equal(one, two) for one, two in zip(expected, found, strict=True))


def test_functions_of_torch_are_restored_when_no_coexecution_exists() -> None:
    gc.collect()  # co-executions of other tests, which Python has not freed yet
    assert not _patching._USERS[0]
    optimizer = torch.optim.SGD(_network().parameters(), lr=0.1)
    names = [
        (torch.optim.Optimizer, "zero_grad"),
        (torch.optim.SGD, "step"),
        (sys.modules["torch.optim.sgd"], "sgd"),
    ]
    before = [vars(owner)[name] for owner, name in names]
    step = coexecute(optimizer.step)
    during = [vars(owner)[name] for owner, name in names]
    assert all(one is not two for one, two in zip(before, during, strict=True))
    del step
    gc.collect()
    assert [vars(owner)[name] for owner, name in names] == before
    assert "_make_subclass" not in vars(torch.Tensor)
    assert not _runner._LAST


def test_a_number_that_changes_reaches_the_backward_pass_of_every_branch() -> None:
    def gradients(wrap: Callable[[Any], Any]) -> list[Tensor]:
        torch.manual_seed(1)
        layer, scale = nn.Linear(4, 1), 1.0

        def step(x: Tensor, clears: bool) -> None:
            loss = (layer(x) * scale).sum()
            if clears:
                layer.zero_grad()
            loss.backward()

        step, found = wrap(step), []
        for clears in (False, False, False, True, True, False, True, True, False):
            scale *= 0.9
            step(torch.ones(2, 4), clears)
            found.append(layer.weight.grad.clone())
        return found

    with forced():
        assert all(map(torch.equal, gradients(coexecute), gradients(lambda step: step)))


def test_a_number_that_became_an_input_of_one_path_is_not_stale_on_paths_that_leave_it() -> None:
    def results(wrap: Callable[[Any], Any]) -> tuple[list[float], Any]:
        torch.manual_seed(1)
        layer, scale, found = nn.Linear(4, 4), 1.0, []

        def step(x: Tensor, kind: str) -> float:
            result = layer(x) * scale
            if kind == "plain":
                return result.sum().item()
            noise = torch.rand(4)
            if kind == "noise":
                return (result + noise).sum().item()
            return (result + noise.amax()).sum().item()

        step = wrap(step)
        for kind in ("noise", "amax", "plain", "noise", "plain", "noise", "amax", "noise", "plain", "amax"):
            scale *= 0.9
            found.append(step(torch.ones(2, 4), kind))
        for kind in ("noise", "amax", "plain"):
            for _ in range(3):
                found.append(step(torch.ones(2, 4), kind))
        return found, step

    with forced():
        found, step = results(coexecute)
        assert found == results(lambda step: step)[0]
    assert coexecute.report(step).coexecuted == 13


class _Seen(TorchDispatchMode):
    """A mode that notes the operations that it sees."""

    def __init__(self, seen: list[Any]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **kwargs or {})


def _saving(seen: list[Any]) -> Any:
    return saved_tensors_hooks(
        lambda tensor: (seen.append(tuple(tensor.shape)), tensor)[1], lambda tensor: tensor
    )


_MODES: dict[str, Callable[[Tensor, nn.Module, list[Any], Any], object]] = {
    "inference": lambda x, layer, seen, mode: mode(torch.inference_mode),
    "dispatch mode": lambda x, layer, seen, mode: mode(lambda: _Seen(seen)),
    "saved-tensor hooks": lambda x, layer, seen, mode: mode(lambda: _saving(seen)),
    "checkpoint": lambda x, layer, seen, mode: checkpoint(layer, x, use_reentrant=False).sum().item(),
    "vmap": lambda x, layer, seen, mode: torch.func.vmap(lambda row: row.sum())(x).tolist(),
    "grad": lambda x, layer, seen, mode: torch.func.grad(lambda y: (x * y).sum())(x).tolist(),
    "jvp": lambda x, layer, seen, mode: torch.func.jvp(torch.sin, (x,), (x,))[1].tolist(),
}


@pytest.mark.parametrize("is_known", [False, True], ids=["new calls", "known calls"])
@pytest.mark.parametrize("name", _MODES)
def test_a_mode_of_torch_is_entered_in_the_middle_of_a_known_path(name: str, is_known: bool) -> None:
    def make(seed: int) -> tuple[Step, State]:
        torch.manual_seed(seed)
        network, other = _network(), nn.Linear(4, 2)
        state = _state(network=network, other=other)
        turns = itertools.count()

        def step(x: Tensor, y: Tensor) -> Tensor:
            hidden = functional.dropout(network(x), 0.2)
            seen: list[Any] = []
            chosen = next(turns) in (2, 3, 6)

            def within(mode: Callable[[], Any]) -> None:
                with mode():
                    state.effects.append((x * (1 if is_known else 2)).is_inference())

            if chosen:
                state.effects.append(_MODES[name](x, other, seen, within))
            elif is_known:
                state.effects.append((x * 1).is_inference())
            state.effects.append(seen)
            return _updated(state, functional.cross_entropy(hidden + other(x), y))

        return step, state

    report = _check(make)
    assert report.coexecuted >= 2
    assert any("active" in each.reason for each in report.fallbacks)


def test_parameters_that_are_not_initialized_run_as_in_eager_mode() -> None:
    def make(seed: int) -> tuple[Step, State]:
        torch.manual_seed(seed)
        network = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.Linear(8, 2))
        state = State(modules={"network": network}, optimizers={}, batch=_batch)

        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = functional.cross_entropy(network(x), y)
            network.zero_grad()
            loss.backward()
            return loss.detach()

        return step, state

    assert _check(make).coexecuted > 3


def test_a_backward_pass_frees_what_the_forward_pass_saved_as_it_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(32, 32), nn.Tanh())))

    @coexecute(mode="always")
    def step(x: Tensor) -> float:
        network.zero_grad()
        loss = network(x).square().mean()
        value = float(loss.item())  # the forward pass ends here
        loss.backward()
        return value

    x, live = torch.randn(2048, 32), []
    given = {x.data_ptr(), *(parameter.data_ptr() for parameter in network.parameters())}
    run = Piece.run

    def counted(piece: Piece, values: list[Any], numbers: dict[int, Any]) -> None:
        tensors = {tensor.data_ptr(): tensor.nbytes for tensor in values if tensor is not None}
        live.append(sum(size for pointer, size in tensors.items() if pointer not in given))
        run(piece, values, numbers)

    monkeypatch.setattr(Policy, "threaded", lambda self: False)
    losses = [step(x) for _ in range(3)]
    monkeypatch.setattr(Piece, "run", counted)
    assert [step(x)] == losses[:1]
    assert coexecute.report(step).coexecuted >= 2
    assert live[-1] < max(live) / 3
