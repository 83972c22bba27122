"""Heads of steps that run as one function: bits of eager mode, and what is refused."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import gc
import itertools
import pickle
import random
import sys
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.fork_server import Programs
from tunebench.training import coexecute
from tunebench.training.coexecution import (
    _head_graph,
    _head_sizes,
    _head_tracing,
    _memory,
    _whole_step,
    _words,
)
from tunebench.training.coexecution._call import Constant, flat
from tunebench.training.coexecution._head_copies import RepeatError, taken_back
from tunebench.training.coexecution._head_graph import HeadGraph
from tunebench.training.coexecution._head_record import OperationRecorder
from tunebench.training.coexecution._head_start import cut, starts
from tunebench.training.coexecution._words import are_supported

pytestmark = pytest.mark.slow

Make = Callable[[], tuple[Callable[..., Any], nn.Module]]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace at once, whatever it costs, and do not choose by time."""
    torch._dynamo.reset()
    monkeypatch.setattr(_whole_step, "_TRACE_S", 0.0)
    monkeypatch.setattr(_whole_step, "_SHARE", 1e6)
    monkeypatch.setattr(_whole_step.WholeSteps, "_decide", lambda self: None)
    monkeypatch.setattr(_whole_step.WholeSteps, "_is_eager_turn", lambda self: False)


class Doubled(nn.Module):  # type: ignore[misc]  # torch does not type it
    """A module whose method a test replaces."""

    def forward(self, x: Tensor) -> Tensor:
        """Return twice the input."""
        return x * 2


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), Doubled(), nn.Dropout(0.3), nn.Linear(6, 4))


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
        step: Any
        torch.manual_seed(0)
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
            except IndexError as error:
                outputs.append(str(error))
        results.append((outputs, states(model), torch.get_rng_state()))
    texts = [[output for output in each[0] if isinstance(output, str)] for each in results]
    assert texts[0] == texts[1]
    for each in results:
        each[0][:] = [output for output in each[0] if not isinstance(output, str)]
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0, equal_nan=True)
    heads = step._whole_steps
    heads.owner = step  # the step releases its heads when it is dropped
    return heads


def simple(forward: Callable[..., Tensor] = lambda model, x: model(x), **changes: Any) -> Make:
    def make() -> tuple[Callable[..., Any], nn.Module]:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        clear = changes.get("clear", lambda model, optimizer: optimizer.zero_grad())

        def step(x: Any) -> Tensor:
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


def test_head_ends_where_a_list_gets_a_value_that_is_read() -> None:
    logs: list[list[float]] = []

    def make() -> tuple[Callable[..., Any], nn.Module]:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        norms: list[float] = []
        logs.append(norms)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            norms.append(norm.item())
            optimizer.step()
            return loss.detach()

        return step, model

    assert compare(make, batches()).runs >= 3
    assert logs[0] == logs[1]
    assert len(logs[0]) == 14


def test_step_that_sets_the_training_mode_has_a_head(caplog: pytest.LogCaptureFixture) -> None:
    """Methods with a class cell, such as that which sets an attribute of a module, share it."""

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        model.train()
        return model(x)

    assert compare(simple(forward), batches()).runs >= 3
    assert "Error while creating guard" not in caplog.text


@pytest.mark.parametrize("are_proven", [True, False])
def test_replays_ask_dynamo_nothing(are_proven: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither functions that guards and code of Dynamo call, nor those that the step calls after its head."""
    if not are_proven:
        monkeypatch.setattr(_whole_step, "head_guards", lambda *args: None)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def logged(loss: Tensor) -> float:
        return float(loss.detach())

    def plain_step(x: Tensor) -> float:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return logged(loss)

    step = coexecute(plain_step)
    step._policy.reason = "by a test"
    inputs = batches(12)
    for (x,) in inputs[:10]:
        step(x)
    runs = step._whole_steps.runs
    asked: list[str] = []
    monkeypatch.setattr(
        _head_tracing._Callback, "__call__", lambda self, frame, *rest: asked.append(frame.f_code.co_name)
    )
    for (x,) in inputs[10:]:
        step(x)
    assert step._whole_steps.runs == runs + 2
    assert asked == []


def test_step_that_dynamo_no_longer_traces_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """While Dynamo is asked about each function, an iteration takes several times as long."""
    monkeypatch.setattr(
        _head_tracing._Callback, "__call__", lambda *args: torch._dynamo.types.ConvertFrameReturn()
    )
    monkeypatch.setattr(_whole_step, "_WASTED", 3)
    heads = compare(simple(), batches(40))
    assert "no trace of it stays valid" in heads.reason


def test_dropped_step_frees_its_model() -> None:
    """Its code stays, with Dynamo's cache, and so would what the heads hold."""

    def dropped() -> list[weakref.ref[Any]]:
        step, model = simple()()
        coexecuted = coexecute(step)
        coexecuted._policy.reason = "by a test"
        for (x,) in batches(12):
            coexecuted(x)
        assert coexecuted._whole_steps.runs > 0
        return [weakref.ref(owner) for owner in (coexecuted, step, model, model[0].weight)]

    references = dropped()
    gc.collect()
    assert [reference() for reference in references] == [None] * 4


def test_heads_that_would_take_much_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_memory, "resident_bytes", lambda: 4e3)
    heads = compare(simple(), batches(4))
    assert heads.runs == 0
    assert "too much to copy" in heads.reason


def test_record_holds_no_memory_of_results() -> None:
    """Values that are gone keep their numbers, although others get their memory."""
    with OperationRecorder() as recorder:
        for _ in range(4):
            result = torch.ones(1000) + 1
            storage = StorageWeakRef(result.untyped_storage())
            del result
            assert storage.expired()
    assert len(recorder.operations) == len(recorder.metadata) == len(recorder._indices) == 8


_TRACED = """
import sys, torch
from tests.fork_server import Programs
from tunebench.training import coexecute
from tunebench.training.coexecution import _whole_step

_whole_step._TRACE_S, _whole_step._SHARE = 0.0, 1e6
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

@coexecute
def step(x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()

step._policy.reason = "by a test"
before = set(sys.modules)
for _ in range(8):
    step(torch.ones(6, 8))
print(step._whole_steps.runs, *sorted({name.split(".")[0] for name in set(sys.modules) - before}))
print(len(set(sys.modules) - before))
"""


def test_trace_imports_little(tmp_path: Path, programs: Programs) -> None:
    """Inductor, torch.export and networkx are 400 modules, which take 20 MiB."""
    script = tmp_path / "traced.py"
    script.write_text(_TRACED, encoding="utf-8")
    ran = programs.run([str(script)])
    assert ran.returncode == 0, ran.stderr
    heads, count = ran.stdout.splitlines()
    assert int(heads.split()[0]) > 0
    assert "networkx" not in heads.split()
    assert int(count) < 100, heads


def test_draws_of_python_are_refused() -> None:
    def make() -> tuple[Callable[..., Any], nn.Module]:
        chance = random.Random(3)
        return simple(lambda model, x: model(x) * chance.random())()

    assert compare(make, batches()).runs == 0


def after_draws() -> tuple[Callable[..., Any], nn.Module]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    chance = random.Random(3)

    def step(*inputs: Tensor, scale: float = 1.0) -> Tensor:
        optimizer.zero_grad()
        x = inputs[0]
        if chance.random() < 0.5:
            x = x.flip(0)
        share = chance.choice((0.25, 0.5))
        loss = nn.functional.dropout(model(x), share).square().mean() * scale
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, model


def after_another_network() -> tuple[Callable[..., Any], nn.Module]:
    model = network()
    generator = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        generated = generator(x)
        optimizer.zero_grad()
        loss = model(generated.detach()).square().mean()
        loss.backward()
        optimizer.step()
        generator.zero_grad()
        model(generated).mean().backward()
        return loss.detach()

    return step, nn.ModuleList((generator, model))


@pytest.mark.parametrize("make", [after_draws, after_another_network])
def test_head_begins_after_statements_that_run_as_they_are(make: Make) -> None:
    """Draws decide numbers of the head; the history of another network goes around it."""
    heads = compare(make, batches(26))
    assert heads.reason is None
    assert heads.runs >= 3


def test_function_is_cut_where_its_variables_are_bound() -> None:
    def function(items: list[int], *rest: int, key: int = 3) -> Any:
        total = 0
        for item in items:
            total += item
        with torch.no_grad():
            last = total
        if total > 3:
            late = total
        key += total
        if rest is None:
            return None
        return (last, key) if rest else (last, key, late)

    code = function.__code__
    cuts = {start.line - code.co_firstlineno: start for start in starts(code)}
    assert {line: start.names for line, start in cuts.items()} == {
        2: ("items", "key", "rest", "total"),
        4: ("key", "rest", "total"),
        6: ("key", "last", "rest", "total"),
        7: ("key", "last", "rest", "total"),
        10: (),
    }
    for start in cuts.values():
        rest: list[Any] = []
        before, after = cut(function, start, lambda *values, rest=rest: rest[0](*values))
        rest.append(after)
        assert before([4], 1, key=2) == (4, 6)
        assert before([5]) == (5, 8, 5)
        with pytest.raises(UnboundLocalError):
            before([1])


def test_hooks_are_refused() -> None:
    def make() -> tuple[Callable[..., Any], nn.Module]:
        step, model = simple()()
        model[0].weight.register_hook(lambda gradient: gradient * 2)
        return step, model

    assert compare(make, batches()).runs == 0


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
    assert any(graph.reason for graph in heads._graphs)


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


def add_hook_of_node(model: nn.Module) -> None:
    weight = model[0].weight
    node = weight.view_as(weight).grad_fn.next_functions[0][0]
    model.node = node  # torch forgets hooks of nodes that nothing holds
    node.register_prehook(lambda gradients: (gradients[0] * 2,))


def replace_weight(model: nn.Module) -> None:
    torch.manual_seed(5)
    model[0].weight = nn.Parameter(torch.randn(6, 8))


def set_gradients(model: nn.Module) -> None:
    model[0].weight.grad = torch.ones(6, 8)
    model[4].weight.grad = None


def edit_memory(model: nn.Module) -> None:
    model[0].weight.detach().numpy()[:] += 0.5
    model[1].running_mean.numpy()[:] += 0.5
    model[4].weight.data[0] += 0.1


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "hook of a parameter": lambda model: model[0].weight.register_hook(lambda gradient: gradient * 2),
    "hook after accumulation": lambda model: model[0].weight.register_post_accumulate_grad_hook(
        lambda parameter: setattr(parameter, "grad", parameter.grad * 2)
    ),
    "hook of a node": add_hook_of_node,
    "hook of a module": lambda model: model[4].register_forward_pre_hook(lambda _, args: (args[0] * 2,)),
    "backward hook": lambda model: model[4].register_full_backward_hook(
        lambda _, ours, theirs: (ours[0] * 2,)
    ),
    "replaced weight": replace_weight,
    "replaced memory of a weight": lambda model: setattr(model[4].weight, "data", torch.ones(6, 4).t()),
    "edited memory": edit_memory,
    "gradients": set_gradients,
    "frozen weight": lambda model: model[0].weight.requires_grad_(False),
    "mode": lambda model: model.eval(),
    "probability": lambda model: setattr(model[3], "p", 0.6),
    "number of modules": lambda model: model.append(nn.Tanh()),
    "method of a module": lambda model: setattr(model[2], "forward", lambda x: x * 3),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_change_between_steps_is_noticed(change: Callable[[nn.Module], Any]) -> None:
    heads = compare(simple(), batches(12), lambda index, model: change(model) if index == 8 else None)
    assert 0 < heads.runs <= 7
    assert heads._proven_runs > 0 or not are_supported()


class Tripled(nn.Module):  # type: ignore[misc]
    """A module of another class."""

    def forward(self, x: Tensor) -> Tensor:
        """Return three times the input."""
        return x * 3


SCALE = 2.0


def scaled(x: Tensor) -> Tensor:
    return x * SCALE


def shifted(x: Tensor) -> Tensor:
    return x + 1


def test_proven_heads_notice_other_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each changes an object that Dynamo's guards reach: heads run without them between the changes."""
    code = scaled.__code__

    def make() -> tuple[Callable[..., Any], nn.Module]:
        model = network()
        model.steps = 0
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        factors, shift = [1.0, 2.0], 0.5

        def set_shift(value: float) -> None:
            nonlocal shift
            shift = value

        def step(x: Tensor) -> Tensor:
            model.steps += 1  # an attribute that changes in each step
            optimizer.zero_grad()
            loss = scaled(model(x) * factors[0] + shift).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        model.changes = {
            12: lambda: factors.__setitem__(0, 3.0),
            24: lambda: set_shift(0.25),
            36: lambda: monkeypatch.setitem(globals(), "SCALE", 3.0),
            48: lambda: setattr(scaled, "__code__", shifted.__code__),
            60: lambda: setattr(model[2], "__class__", Tripled),
        }
        return step, model

    def before(index: int, model: Any) -> None:
        if index == 0:
            monkeypatch.setitem(globals(), "SCALE", 2.0)
            scaled.__code__ = code
        model.changes.get(index, lambda: None)()

    try:
        heads = compare(make, batches(72), before)
    finally:
        scaled.__code__ = code
    assert heads.runs >= 20
    assert heads._proven_runs >= 15 or not are_supported()


class Factor:
    """A factor of a step, as an attribute of a class."""

    value = 2.0


class InheritedFactor(Factor):
    """A class that a test gives a factor of its own."""


@pytest.mark.parametrize("change", ["aliased list", "aliased tensor", "order of keys", "inherited attribute"])
def test_what_guards_of_dynamo_do_not_see_is_noticed(change: str) -> None:
    """Two paths that no longer lead to one object; keys that move; a class that shadows another one."""

    def make() -> tuple[Callable[..., Any], nn.Module]:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        shifts, scale = [0.5], torch.ones(4)
        all_shifts, scales = [shifts], [scale]
        weights = OrderedDict(first=2.0, second=3.0)
        factor = InheritedFactor()

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            output = model(x) * scale * scales[0] + shifts[0] + all_shifts[0][0]
            loss = output.square().mean() * list(weights.values())[0] * factor.value  # noqa: RUF015
            loss.backward()
            optimizer.step()
            return loss.detach()

        model.changes = {
            "aliased list": lambda: all_shifts.__setitem__(0, [5.0]),
            "aliased tensor": lambda: scales.__setitem__(0, torch.full((4,), 5.0)),
            "order of keys": lambda: weights.move_to_end("first"),
            "inherited attribute": lambda: setattr(InheritedFactor, "value", 3.0),
        }
        return step, model

    def before(index: int, model: Any) -> None:
        if index == 0 and "value" in vars(InheritedFactor):
            del InheritedFactor.value
        if index == 8:
            model.changes[change]()

    heads = compare(make, batches(12), before)
    assert 0 < heads.runs <= 7
    assert heads._proven_runs > 0 or not are_supported()


class Plain(nn.Module):  # type: ignore[misc]
    """An object whose attributes proven heads watch."""

    __setattr__ = object.__setattr__


def counter() -> tuple[Callable[[float], None], Callable[[], float]]:
    """Return functions that share a variable."""
    count = 1.0

    def set_count(value: float) -> None:
        nonlocal count
        count = value

    return set_count, lambda: count


def count_if(condition: Any) -> float:
    return 2.0 if condition else 1.0


def appended(first: Any, second: Any) -> float:
    first.log.append(1.0)
    return float(len(second.log))


def stored(first: Any, second: Any) -> float:
    first.values["x"] = 5.0
    value: float = sum(value for _, value in second.values.items())
    first.values["x"] = 1.0
    return value


def assigned(first: Any, second: Any) -> float:
    first.plain.value = 5.0
    value: float = second.plain.value
    first.plain.value = 1.0
    return value


def counted(first: Any, second: Any) -> float:
    first.counter[0](5.0)
    value: float = second.counter[1]()
    first.counter[0](1.0)
    return value


READS: dict[str, tuple[str, Callable[[Any, Any], float]]] = {
    "appended list": ("log", appended),
    "dictionary": ("values", stored),
    "attribute": ("plain", assigned),
    "variable": ("counter", counted),
    "identity of lists": ("log", lambda first, second: count_if(first.log is second.log)),
    "identity of functions": (
        "counter",
        lambda first, second: count_if(first.counter[0] is second.counter[0]),
    ),
    "equality": ("plain", lambda first, second: count_if(first.plain == second.plain)),
    "number": ("plain", lambda first, second: count_if(id(first.plain) == id(second.plain))),
    "key": ("plain", lambda first, second: first.weights[second.plain]),
}
"""What a step reads of two objects that become the same one, and the name of these."""


@pytest.mark.parametrize(
    ("name", "was_same"),
    [*((name, False) for name in READS), ("variable", True), ("identity of functions", True)],
)
def test_objects_that_become_the_same_or_different_are_noticed(name: str, was_same: bool) -> None:
    """Dynamo guards neither that objects stay different, nor that a compared object stays the same one."""
    attribute, read = READS[name]

    def make() -> tuple[Callable[..., Any], nn.Module]:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        pair = nn.Module(), nn.Module()
        for owner in pair:
            owner.log, owner.values = [0.0] * 9, {"x": 1.0}
            owner.plain, owner.counter = Plain(), counter()
            owner.plain.value = 1.0
        first, second = pair
        object.__setattr__(first, "weights", {first.plain: 2.0, second.plain: 3.0})
        values = getattr(first, attribute), getattr(second, attribute)
        setattr(second, attribute, values[not was_same])

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean() * read(first, second)
            loss.backward()
            return loss.detach()

        model.change = lambda: setattr(second, attribute, values[was_same])
        return step, model

    def before(index: int, model: Any) -> None:
        if index == 8:
            model.change()

    heads = compare(make, batches(10), before)
    assert 0 < heads.runs <= 3
    assert heads._proven_runs > 0 or not are_supported()


class Answering(nn.Module):  # type: ignore[misc]
    """A module with an attribute that only a method answers."""

    def __getattr__(self, name: str) -> Any:
        return 2.0 if name == "answer" else super().__getattr__(name)


@pytest.mark.parametrize(
    "change", ["global", "global of another module", "attribute", "attribute of the class"]
)
def test_names_that_shadow_others_are_noticed(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A builtin function by a global, what ``__getattr__`` answers by an attribute."""
    library: Any = types.ModuleType(f"library for {change}")  # Dynamo keeps modules by name
    exec("def length(items): return len(items)", vars(library))
    monkeypatch.setitem(sys.modules, library.__name__, library)

    def make() -> tuple[Callable[..., Any], nn.Module]:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        answering, items = Answering(), [1.0, 2.0]

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean() * sum(items) * library.length(items) * answering.answer
            loss.backward()
            return loss.detach()

        model.changes = {
            "global": lambda: globals().update(sum=lambda items: 7.0),
            "global of another module": lambda: vars(library).update(len=lambda items: 7),
            "attribute": lambda: vars(answering).update(answer=7.0),
            "attribute of the class": lambda: setattr(Answering, "answer", 7.0),
        }
        return step, model

    def restore() -> None:
        globals().pop("sum", None)
        vars(library).pop("len", None)
        if "answer" in vars(Answering):
            del Answering.answer

    def before(index: int, model: Any) -> None:
        if index == 0:
            restore()
        if index == 8:
            model.changes[change]()

    try:
        heads = compare(make, batches(10), before)
    finally:
        restore()
    assert 0 < heads.runs <= 3
    assert heads._proven_runs > 0 or not are_supported()


CALL, BACKWARD = nn.Module._call_impl, Tensor.backward


@pytest.mark.parametrize(
    ("owner", "name", "replacement"),
    [
        (Doubled.forward, "__code__", (lambda self, x: x * 3).__code__),
        (nn.Module, "_call_impl", lambda self, *args: CALL(self, *args) * 2),
        (Tensor, "backward", lambda self, **options: BACKWARD(self * 2)),
        (torch.autograd, "backward", lambda *args, **options: None),
        (torch.optim.SGD, "_init_group", lambda *args: False),
        (sys.modules["torch.optim.sgd"], "_single_tensor_sgd", lambda *args, **options: None),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_replaced_functions_are_noticed(owner: Any, name: str, replacement: Any) -> None:
    def before(index: int, model: nn.Module) -> None:
        if index == 0:
            patched.undo()
        if index == 8:
            patched.setattr(owner, name, replacement)

    with pytest.MonkeyPatch.context() as patched:
        heads = compare(simple(), batches(12), before)
    assert 0 < heads.runs <= 5
    assert "method" in heads._graphs[0].misfit


def test_inference_mode_raises_the_error_of_eager_mode() -> None:
    step = coexecute(simple()()[0])
    step._policy.reason = "by a test"
    inputs = batches(10)
    for (x,) in inputs:
        step(x)
    with torch.inference_mode(), pytest.raises(RuntimeError, match="does not require grad"):
        step(inputs[0][0])
    assert step._whole_steps.runs > 0


def test_heads_without_a_compiler_run_by_guards_of_dynamo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_words, "_library", lambda: None)
    heads = compare(simple(), batches(8))
    assert heads.runs > 0
    assert heads._proven_runs == 0


@pytest.mark.parametrize(
    "batch",
    [
        torch.ones(4, 8).double(), torch.ones(3, 8), torch.ones(8, 4).t(), None,
        torch._neg_view(torch.ones(4, 8)),
    ],
)  # fmt: skip
def test_proven_heads_notice_other_arguments(batch: Tensor | None) -> None:
    def make() -> tuple[Callable[..., Any], nn.Module]:
        model = nn.Linear(8, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor | None, scale: int) -> Tensor:
            optimizer.zero_grad()
            x = torch.zeros(2, 8) if x is None else x.float()
            loss = model(x).square().mean() * float(scale)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step, model

    usual = torch.ones(4, 8)
    heads = compare(
        make, [*[(usual, 2)] * 8, (batch, 2), (batch, 2), (usual, 3), (usual, 2), (usual, True), (usual, 2)]
    )
    assert heads._proven_runs > 0 or not are_supported()


def test_settings_and_classes_that_change_are_noticed() -> None:
    """Changes of the process, each for one step or two."""
    square, forward = Tensor.square, Doubled.forward
    originals: dict[str, Any] = {}

    def before(index: int, model: nn.Module) -> None:
        torch.use_deterministic_algorithms(index == 7)
        torch.set_default_dtype(torch.float64 if index == 8 else torch.float32)
        torch.set_num_threads(2 if index == 9 else 1)
        torch.autograd.set_detect_anomaly(index == 10)
        Doubled.forward = (lambda self, x: x * 3) if index in (11, 12) else forward  # type: ignore[method-assign]
        Tensor.square = Tensor.abs if index == 14 else square
        for owner, name in ((torch.optim.SGD, "step"), (sys.modules["torch.optim.sgd"], "sgd")):
            if index == 16:
                originals[name] = getattr(owner, name)
                setattr(owner, name, lambda *args, **kwargs: None)
            elif index == 17:
                setattr(owner, name, originals[name])

    threads = torch.get_num_threads()
    try:
        assert compare(simple(), batches(19), before).runs >= 4
    finally:
        Doubled.forward, Tensor.square = forward, square  # type: ignore[method-assign]
        torch.set_num_threads(threads)


def nested_batches() -> list[tuple[Any]]:
    """Return arguments that are a tuple with a mapping: seven of one kind, then others in turn with it."""
    usual = [{"x": x, "scale": 2.0, "mask": x[0] > 0} for (x,) in batches(20)]
    others = [
        {"x": usual[0]["x"], "mask": usual[0]["mask"], "scale": 3.0},
        {"x": usual[1]["x"].double().float()[:4], "scale": 2.0, "mask": usual[1]["mask"]},
        {"x": usual[2]["x"], "shift": 2.0, "mask": usual[2]["mask"]},
        {"x": usual[3]["x"], "scale": 2.0, "mask": usual[3]["mask"].float()},
        {**usual[4], "shift": 1.0},
        collections.OrderedDict(usual[5]),
    ]
    pairs = itertools.chain.from_iterable(zip(others, usual[7:], strict=False))
    return [(([batch], 1.0),) for batch in (*usual[:7], *pairs)] + [(([usual[0], usual[1]], 1.0),)]


def test_proven_heads_look_into_arguments() -> None:
    """Tensors in mappings in a list in a tuple, made anew for each step; other keys, sizes, lengths."""

    def forward(model: nn.Module, nested: Any) -> Tensor:
        (*_, batch), factor = nested
        x = batch["x"] * batch["mask"] * factor
        if "scale" in batch:
            x = x * batch["scale"]
        if "shift" in batch:
            x = x + batch["shift"]
        return model(x)

    heads = compare(simple(forward), nested_batches())
    assert heads._proven_runs > 1 or not are_supported()


def test_attribute_of_a_module_of_a_library_s_own_class_is_watched() -> None:
    """``torch.backends`` is no plain module; a setting in it changes for some steps."""

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        scale = 2.0 if torch.backends.mha.get_fastpath_enabled() else 3.0
        return model(x) * scale

    def before(index: int, model: nn.Module) -> None:
        torch.backends.mha.set_fastpath_enabled(index not in (11, 12))

    try:
        heads = compare(simple(forward), batches(18), before)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert heads._proven_runs > 0 or not are_supported()


def test_global_hooks_of_modules_run() -> None:
    handles: list[Any] = []

    def before(index: int, model: nn.Module) -> None:
        if index in (8, 10):
            handles.append(nn.modules.module.register_module_forward_hook(lambda _, args, result: result * 2))
        if index in (9, 11):
            handles.pop().remove()

    assert compare(simple(), batches(14), before).runs >= 3


def test_settings_that_a_step_changes_are_refused() -> None:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        torch.use_deterministic_algorithms(True)
        result = model(x)
        torch.use_deterministic_algorithms(False)
        return result

    heads = compare(simple(forward), batches(16))
    assert heads.runs == 0
    assert "_set_deterministic_algorithms" in heads.reason


def test_seed_in_a_step_is_refused() -> None:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return model(x)

    assert compare(simple(forward), batches(6)).runs == 0


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_have_heads(layer: type[nn.Module]) -> None:
    def make() -> tuple[Callable[..., Any], nn.Module]:
        model = layer(8, 4, num_layers=2, dropout=0.3, bidirectional=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = model(x)[0].square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step, model

    heads = compare(make, lengths(*[(3, 5)] * 12))
    assert heads.reason is None
    assert heads.runs >= 3


def test_tensors_are_iterated_as_in_eager_mode() -> None:
    """Rows come from one operation, whose gradient is one too."""

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        first, second = model[0](x)[:2]
        return sum((row * first for row in x[:, :6]), start=second)

    assert compare(simple(forward), batches()).runs >= 3


def lengths(*shapes: tuple[int, int]) -> list[tuple[Tensor]]:
    """Return batches (N, L, 8)."""
    chance = torch.Generator().manual_seed(2)
    return [(torch.randn(*shape, 8, generator=chance),) for shape in shapes]


def attention(model: nn.Module, x: Tensor) -> Tensor:
    """Return what depends on the number and length of sequences in several ways."""
    count, length = x.shape[0], x.shape[1] - 1
    hidden = model[0](x[:, 1:]).view(count, length, 2, 3).transpose(1, 2)
    mixed = nn.functional.scaled_dot_product_attention(hidden, hidden, hidden, is_causal=True)
    places = torch.arange(length, dtype=torch.float32) / length
    return model[4](mixed.transpose(1, 2).reshape(count * length, 6)) * places.repeat(count)[:, None]


@pytest.mark.parametrize("proves", [True, False])
def test_head_runs_for_sizes_that_change(proves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not proves:
        monkeypatch.setattr(_whole_step, "head_guards", lambda *args: None)
    chance = random.Random(0)
    shapes = [(chance.randint(2, 4), chance.randint(5, 12)) for _ in range(60)]
    heads = compare(simple(attention), lengths(*shapes))
    assert heads.reason is None
    assert heads._traces <= 6
    (sized,) = [graph for graph in heads._graphs if graph._sizes]
    assert sized.replays >= 12
    assert sized.reason is None


def test_sizes_with_other_operations_run_in_eager_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = _head_sizes.is_same_operation

    def differs_at_12(ours: Any, *others: Any) -> bool:
        return Constant(11) not in flat(ours.args) and compared(ours, *others)

    monkeypatch.setattr(_head_sizes, "is_same_operation", differs_at_12)
    shapes = [(3, 5 + index % 6) for index in range(40)] + [(3, 11 + index % 3) for index in range(12)]
    heads = compare(simple(attention), lengths(*shapes))
    (sized,) = [graph for graph in heads._graphs if graph._sizes]
    assert [key for key, values in sized._sizes._known.items() if values is None] == [(12,)]
    assert sized.replays >= 20


def test_integers_that_follow_from_sizes_in_another_way_are_refused() -> None:
    """Half a length is no sum of products of lengths."""
    heads = compare(
        simple(lambda model, x: model(x.narrow(1, 0, x.shape[1] // 2).flatten(0, 1))),
        lengths(*((3, 6 + index % 7) for index in range(30))),
    )
    (sized,) = [graph for graph in heads._graphs if graph._sizes]
    assert sized.replays == 0
    assert "follows from sizes in no known way" in str(sized.reason)


@pytest.mark.parametrize("context", [torch.no_grad, functools.partial(torch.autocast, "cpu", torch.bfloat16)])
def test_error_within_a_mode_leaves_the_mode(context: Callable[[], Any]) -> None:
    """In a record, a check, and a replay."""

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        with context():
            picked = x.flatten()[(x[:, 0] > 1e6).long() * 1000].sum()
        return model(x) + picked

    data = batches(20)
    for index in (1, 3, 5, 6, 8, 15):
        data[index][0][0, 0] = 1e7
    compare(simple(forward), data)
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


def test_error_at_another_size_takes_the_step_back() -> None:
    """A length that an index does not have."""
    indices = torch.tensor([0, 6])
    heads = compare(
        simple(lambda model, x: model(x.flatten(0, 1).index_select(0, indices)) * x.mean((0, 1))[0]),
        lengths(*((2, 4 + index % 5) for index in range(48)), (2, 3), (2, 6)),
    )
    assert heads.runs >= 8


def test_sizes_have_heads_of_their_own() -> None:
    """Each needs a trace, and five iterations until its record is trusted; momenta are made in another.

    The second size is traced when it comes again.
    """
    sizes = [(batch[: 4 + index % 2],) for index, (batch,) in enumerate(batches(16))]
    heads = compare(simple(), sizes)
    assert heads.runs == 4
    assert len(heads._graphs) == 2


def test_inputs_may_be_edited_after_the_step() -> None:
    def make() -> tuple[Callable[..., Any], nn.Module]:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor) -> Tensor:
            x = x.clone()
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            x.zero_()
            return loss.detach() + x.sum()

        return step, model

    assert compare(make, batches(12)).runs >= 3


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo looks at it
def test_compiled_and_cached_functions_run_as_they_are() -> None:
    """Dynamo would look through them: a backend of the program and a cache would be lost."""
    calls = []

    def backend(module: Any, examples: Any) -> Any:
        return lambda *args: [result * 2 for result in module(*args)]

    @functools.lru_cache
    def noise() -> Tensor:
        calls.append(1)
        return torch.randn(4)

    def make() -> tuple[Callable[..., Any], nn.Module]:
        noise.cache_clear()
        compiled = torch.compile(lambda x: x + 1, backend=backend)
        return simple(lambda model, x: compiled(model(x)) + noise())()

    assert compare(make, batches(6)).runs == 0
    assert len(calls) == 2


def test_step_runs_as_it_is_if_dynamo_has_other_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> tuple[Callable[..., Any], nn.Module]:
        model = network()

        def step(x: Tensor) -> Tensor:  # Dynamo skips its code from now on
            loss = model(x).square().mean()
            loss.backward()
            return loss.detach()

        return step, model

    monkeypatch.setitem(_head_tracing._CONFIG, "no such option", True)
    assert "Dynamo" in compare(make, batches(4)).reason


def test_step_with_a_head_is_pickled_as_its_function() -> None:
    step = coexecute(step_of_module)
    step._policy.reason = "by a test"
    for (x,) in batches(10):
        step(x)
    assert step._whole_steps.runs > 0
    assert pickle.loads(pickle.dumps(step))._whole_steps.runs == 0


MODEL = nn.Linear(8, 2)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.1)


def step_of_module(x: Tensor) -> Tensor:
    """Run a step that can be pickled by its name."""
    OPTIMIZER.zero_grad()
    loss = MODEL(x).square().mean()
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("slower", [True, False])
def test_heads_are_left_if_they_do_not_pay(slower: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock of the test takes one second for each look at it, and another time for heads."""
    now = [0.0]
    run = HeadGraph._replayed

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    def timed(self: HeadGraph, *args: Any) -> Any:
        now[0] += 0.5 if slower else -0.5
        return run(self, *args)

    monkeypatch.undo()
    monkeypatch.setattr(_whole_step, "_TRACE_S", 0.0)
    monkeypatch.setattr(_whole_step, "_SHARE", 1e6)
    monkeypatch.setattr(_whole_step, "time", types.SimpleNamespace(perf_counter=clock))
    monkeypatch.setattr(HeadGraph, "_replayed", timed)
    step = coexecute(simple()()[0])
    step._policy.reason = "by a test"
    for (x,) in batches(80):
        step(x)
    heads = step._whole_steps
    assert heads.runs >= 24, (heads.reason, [graph.reason or graph.misfit for graph in heads._graphs])
    assert (heads.reason is None) is not slower


def with_optimizer(make_optimizer: Callable[..., Any], body: Callable[..., Any]) -> Make:
    """Return what makes a model with its optimizer as an attribute, and a step."""

    def make() -> tuple[Callable[..., Any], nn.Module]:
        model = network()
        optimizer = make_optimizer(model)
        object.__setattr__(model, "optimizer", optimizer)
        return body(model, optimizer), model

    return make


def updating(model: nn.Module, optimizer: Any) -> Callable[..., Any]:
    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _group(model: Any) -> dict[str, Any]:
    return model.optimizer.param_groups[0]  # type: ignore[no-any-return]


def _load(model: Any) -> None:
    model.optimizer.load_state_dict(copy.deepcopy(model.optimizer.state_dict()))


def _replace_state(model: Any) -> None:
    state = model.optimizer.state[model[0].weight]
    state["exp_avg"] = torch.ones_like(state["exp_avg"])


def _hooked(model: Any) -> None:
    def halve(optimizer: Any, args: Any, kwargs: Any) -> None:
        model[0].weight.grad.mul_(0.5)

    model.handle = model.optimizer.register_step_pre_hook(halve)


def _hooked_globally(model: Any) -> None:
    def halve(optimizer: Any, args: Any, kwargs: Any) -> None:
        model[0].weight.detach().mul_(0.5)

    model.handle = register_optimizer_step_post_hook(halve)


def _replace_step(model: Any) -> None:
    step = type(model.optimizer).step

    def twice() -> None:
        step(model.optimizer)
        step(model.optimizer)

    model.optimizer.step = twice


class _Twice(torch.optim.Adam):
    """Steps twice."""

    def step(self, closure: Any = None) -> None:
        super().step()
        super().step()


def _set_class(model: Any, optimizer_class: type) -> None:
    model.optimizer.__class__ = optimizer_class


OPTIMIZER_CHANGES: dict[int, Callable[[Any], Any]] = {
    8: lambda model: _group(model).update(lr=0.05),
    10: lambda model: _group(model).update(weight_decay=0.1),
    18: _load,
    26: _replace_state,
    34: lambda model: model.optimizer.state[model[4].bias]["exp_avg_sq"].add_(0.1),
    36: _hooked,
    37: lambda model: model.handle.remove(),
    38: _hooked_globally,
    39: lambda model: model.handle.remove(),
    40: _replace_step,
    41: lambda model: vars(model.optimizer).pop("step"),
    42: lambda model: _group(model).update(lr=1),
    43: lambda model: _group(model).update(lr=0.01, betas=(0.5, 0.9)),
    47: lambda model: _set_class(model, _Twice),
    48: lambda model: _set_class(model, torch.optim.Adam),
    49: lambda model: setattr(model.optimizer, "zero_grad", lambda: None),
    50: lambda model: vars(model.optimizer).pop("zero_grad"),
    51: lambda model: _group(model)["params"].pop(),
    53: lambda model: model.optimizer.add_param_group({"params": [model[4].bias], "lr": 0.2}),
}


def test_changes_of_an_optimizer_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each changes what the update does, between two steps."""
    monkeypatch.setattr(_head_graph, "_PLANS", 16)
    make = with_optimizer(lambda model: torch.optim.Adam(model.parameters(), lr=0.1), updating)

    def before(index: int, model: nn.Module) -> None:
        if index in OPTIMIZER_CHANGES:
            OPTIMIZER_CHANGES[index](model)

    heads = compare(make, batches(56), before)
    assert heads.runs >= 16
    assert heads._with_updates


def test_optimizer_that_is_freed_leaves_its_head() -> None:
    """Dynamo empties the entry of a trace whose guarded object is gone."""

    def make() -> tuple[Callable[..., Any], nn.Module]:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def replace() -> None:
            nonlocal optimizer
            optimizer = torch.optim.SGD(model.parameters(), lr=0.2)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        model.replace = replace
        return step, model

    compare(make, batches(10), lambda index, model: model.replace() if index == 8 else None)


def test_update_is_part_of_the_head() -> None:
    """The optimizer's step is not called from Python, and all that it makes can be read afterwards."""
    kept: list[Any] = []

    def body(model: nn.Module, optimizer: Any) -> Callable[..., Any]:
        weight = model[0].weight
        average = weight.detach().clone()

        def step(x: Tensor) -> tuple[Tensor, ...]:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            with torch.no_grad():
                average.mul_(0.9).add_(weight, alpha=0.1)
            kept.append(weight.grad)
            return loss.detach(), average.clone(), weight.grad.norm(), weight.detach().clone()

        return step

    heads = compare(
        with_optimizer(lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), body),
        batches(12),
    )
    assert heads.runs >= 3
    assert [len(graph._plan.updates) for graph in heads._graphs] == [1]
    half = len(kept) // 2
    assert all(map(torch.equal, kept[:half], kept[half:]))


def test_rates_that_the_step_sets_by_another_name() -> None:
    """Dynamo changes the dictionary after the graph, so the head must end before the update."""

    def body(model: nn.Module, optimizer: Any) -> Callable[..., Any]:
        group = optimizer.param_groups[0]

        def step(x: Tensor, index: int) -> Tensor:
            group["lr"] = 0.1 if index < 9 else 0.1 / index
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    make = with_optimizer(lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), body)
    compare(make, [(x, index) for index, (x,) in enumerate(batches(14))])


def test_update_in_a_function_of_the_step() -> None:
    """A head goes on to the end of a function that steps: other updates, and gradients that are cleared.

    Learning rates follow a schedule.
    """

    def make() -> tuple[Callable[..., Any], nn.Module]:
        model = nn.ModuleList([network(), nn.Linear(4, 1)])
        optimizers = [
            torch.optim.AdamW(model[0].parameters()),
            torch.optim.SGD(model[1].parameters(), lr=0.1),
        ]
        schedule = torch.optim.lr_scheduler.StepLR(optimizers[0], 2, 0.5)

        def train(x: Tensor) -> Tensor:
            features = model[0](x)
            first = model[1](features.detach()).mean()
            first.backward()
            optimizers[1].step()
            second = features.square().mean() - model[1](features).mean()
            second.backward()
            optimizers[0].step()
            optimizers[0].zero_grad()
            optimizers[1].zero_grad()
            return first.detach() + second.detach()

        def step(x: Tensor, index: int) -> Tensor:
            loss = train(x)
            schedule.step()
            if index == 9:
                raise IndexError("after the update")
            return loss

        return step, model

    heads = compare(make, [(batch, index) for index, (batch,) in enumerate(batches(14))])
    assert heads.runs >= 3
    assert any(graph._plan is not None and len(graph._plan.updates) == 2 for graph in heads._graphs)


def test_gradients_from_before_a_step_are_used() -> None:
    """The step clears them at its end, after the head; one parameter is in no loss."""

    def body(model: nn.Module, optimizer: Any) -> Callable[..., Any]:
        def step(x: Tensor) -> tuple[Tensor, Tensor]:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach(), model.spare.detach().clone()

        return step

    def optimizer(model: Any) -> Any:
        object.__setattr__(model, "spare", nn.Parameter(torch.ones(2)))
        return torch.optim.SGD([*model.parameters(), model.spare], lr=0.1, momentum=0.9)

    def before(index: int, model: Any) -> None:
        if index == 8:
            model.spare.grad = torch.ones(2)
        if index == 10:
            model[0].weight.grad = torch.ones(6, 8)

    assert compare(with_optimizer(optimizer, body), batches(12), before).runs >= 2


def appending(read: Callable[[list[Any]], float]) -> Make:
    """Return what makes a step that appends to a list before its backward pass, and then reads it."""

    def make() -> tuple[Callable[..., Any], nn.Module]:
        model = nn.Linear(8, 2)
        log: list[Any] = []

        def step(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            log.append(1.0)
            (loss * read(log)).backward()
            return loss.detach()

        return step, model

    return make


def test_what_is_taken_back_counts_no_version() -> None:
    """Messages of errors contain versions."""
    x = torch.ones(3)
    with contextlib.suppress(RepeatError), taken_back((x,), []):
        x.add_(1)
        raise RepeatError
    assert x._version == 0
    assert torch.equal(x, torch.ones(3))


def test_lists_that_only_grow_decide_nothing() -> None:
    """Values are appended in the order of the step, also if lists are replaced or become the same one."""
    logs: list[Any] = []

    def make() -> tuple[Callable[..., Any], nn.Module]:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        history: dict[str, list[Any]] = {"losses": [], "means": []}
        object.__setattr__(model, "history", history)
        logs.append(history)

        def step(x: Tensor, index: int) -> Tensor:
            optimizer.zero_grad()
            means = history["means"]
            means.append([{"x": x.mean()}])
            output = model(x)
            loss = output.square().mean()
            history["losses"].append(loss.detach())
            means.append((index, "mean", output.detach().mean()))
            history["losses"].append(means)
            if index == 11:
                raise IndexError("before the backward pass")
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step, model

    def before(index: int, model: Any) -> None:
        if index == 8:
            model.history["means"] = []
        if index == 10:
            model.history["losses"] = model.history["means"]

    heads = compare(make, [(x, index) for index, (x,) in enumerate(batches(14))], before)
    assert heads.runs >= 3  # the lists become the same one, which is another trace
    texts = [repr(history) for history in logs]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "read",
    [
        len, sum, lambda log: log[-1] * len(log), lambda log: 2.0 if log == [1.0] else 1.0,
        lambda log: 2.0 if log else 1.0, lambda log: float(1.0 in log), lambda log: len(str(log)),
        lambda log: next(iter(log)), lambda log: len([*log, 1.0]), lambda log: len(log + log),
        lambda log: 2.0 if log != [1.0, 1.0] else 3.0, lambda log: 2.0 if log > [1.0] else 1.0,
    ],
)  # fmt: skip
def test_lists_that_grow_and_are_read(read: Callable[[list[Any]], float]) -> None:
    compare(appending(read), batches(4))


def test_counter_is_a_number_of_the_head() -> None:
    """It equals a constant of the step in one of its records."""

    def make() -> tuple[Callable[..., Any], nn.Module]:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.calls = 0

        def step(x: Tensor) -> Tensor:
            model.calls += 1
            loss = model(x).square().mean() * 5 / model.calls + model.calls
            optimizer.zero_grad()
            loss.backward()
            return loss.detach()

        return step, model

    assert compare(make, batches(24)).runs >= 5
