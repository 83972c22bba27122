"""Generated functions that follow a call on a known path: they check its arguments and make its result."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch

from tunebench.training.coexecution._call import (
    Constant,
    Number,
    Structure,
    TensorSpec,
    Variable,
    holds_tensor,
)
from tunebench.training.coexecution._function import Kind
from tunebench.training.coexecution._modes import thread_state
from tunebench.training.coexecution._path import Node
from tunebench.training.coexecution._placeholder import placeholder, placeholder_with
from tunebench.training.coexecution._run import unseen

__all__ = ["MISS", "follower"]

MISS = object()
"""The result of following another call."""


def follower(node: Node) -> Callable[..., Any]:
    """Return a function from an iteration and the arguments of a call to the result of the call.

    If the call is not that of the node, it returns `MISS`. It notes given tensors and numbers in the run of
    the iteration.
    """
    call = node.call
    writer = _Writer(node)
    writer.state()
    if call.kind is Kind.CREATE:
        writer.check("not holds_tensor((args, kwargs))")
    else:
        writer.arguments()
    writer.numbers()
    if (
        node.host
        or call.bounds
        or call.asks
        or node.segment is not None
        or call.kind not in (Kind.COMPUTE, Kind.OPTIMIZER)
    ):
        writer.lines.append("    return iteration.take(node, args, kwargs)")
    else:
        writer.promise()
    lines = ["def follow(iteration, args, kwargs):", "    run = iteration.run", "    objects = run.objects"]
    scope = writer.constants
    # This runs for every call of every iteration: generated code has no loops over patterns.
    source = "\n".join([*lines, *writer.lines])
    exec(compile(source, f"{__file__}: {call.site}", "exec"), scope)  # noqa: S102
    found: Callable[..., Any] = scope.pop("follow")  # or it would refer to itself
    return found


class _Writer:
    """Writes the body of a function."""

    def __init__(self, node: Node) -> None:
        self.lines: list[str] = []
        self.constants: dict[str, Any] = {
            "MISS": MISS, "node": node, "isnan": math.isnan, "copysign": math.copysign,
            "grad_enabled": torch.is_grad_enabled, "any_autocast": torch._C._is_any_autocast_enabled,
            "saved_hooks": torch._C._autograd._top_saved_tensors_default_hooks, "thread_state": thread_state,
            "dispatch_modes": torch._C._len_torch_dispatch_stack,
            "inference_mode": torch.is_inference_mode_enabled,
            "transforms": torch._C._functorch.peek_interpreter_stack,
            "placeholder": placeholder, "placeholder_with": placeholder_with,
            "holds_tensor": holds_tensor, "choices": node.choices,
        }  # fmt: skip
        self._node = node
        self._seen: set[int] = set()
        self._call = node.call
        self._count = itertools.count()
        self._sizes: list[tuple[str, int]] = []  # those of tensors, which may decide them, are checked before

    def state(self) -> None:
        """Check the modes of the thread."""
        state = self._call.state
        name = self.constant(state)
        self.check("dispatch_modes() == 0")
        if state[1] is None:
            self.check(f"grad_enabled() is {state[0]} and saved_hooks(False) is None")
            self.check("not inference_mode() and transforms() is None")
            self.check(f"not any_autocast() or thread_state() == {name}")
        else:
            self.check(f"thread_state() == {name}")

    def arguments(self) -> None:
        """Check the arguments, and note given tensors and numbers."""
        call = self._call
        self.check(f"len(args) == {len(call.args)}")
        for position, pattern in enumerate(call.args):
            self._nested(f"args[{position}]", pattern)
        if call.kwargs:
            self.check(f"kwargs is not None and len(kwargs) == {len(call.kwargs)}")
        else:
            self.check("not kwargs")
        for key, pattern in call.kwargs:
            self.check(f"{key!r} in kwargs")
            self._nested(f"kwargs[{key!r}]", pattern)
        for source, index in self._sizes:
            self.check(f"run.numbers.take({index}, {source})")

    def numbers(self) -> None:
        """Check the numbers of earlier calls."""
        for index, value in self._node.required.items():
            self._constant(f"run.numbers[{index}]", value)
        for one, two in self._node.equal:
            values = f"run.numbers[{one}]", f"run.numbers[{two}]"
            self.check("type({0}) is type({1}) and {0} == {1}".format(*values))

    def promise(self) -> None:
        """Make the placeholders of the result."""
        made = self._node.made
        if made:
            names = [f"p{index}" for index, _ in made]
            self.lines += ["    pool = node.pool", "    if pool is None:"]
            self.lines += [
                f"        {name} = {self._placeholder(spec)}"
                for name, (_, spec) in zip(names, made, strict=True)
            ]
            self.lines += ["    else:", f"        {', '.join(names)}, = pool", "        node.pool = None"]
            for name, (index, _) in zip(names, made, strict=True):
                self.lines.append(f"    objects[{index}] = {name}; run.indices[id({name})] = {index}")
        self._reach("    ")
        self.lines.append(f"    return {self._result(self._call.outputs)}")

    def _placeholder(self, spec: TensorSpec) -> str:
        if not spec.sized:
            return f"placeholder({self.constant(spec)})"
        shape, stride, offset = map(self._integers, spec.geometry())
        return f"placeholder_with({shape}, {stride}, {offset}, {self.constant(spec.dtype)})"

    def _integers(self, pattern: Any) -> str:
        if isinstance(pattern, tuple):
            return f"({''.join(self._integers(each) + ', ' for each in pattern)})"
        return f"run.numbers[{pattern.index}]" if isinstance(pattern, Number) else str(pattern)

    def _reach(self, indent: str) -> None:
        """Go on to the call."""
        if self._node.sized:
            self.lines.append(f"{indent}run.numbers.keep()")
        self.lines += [
            f"{indent}if iteration.diverge_at is not None: iteration.reached(node)",
            f"{indent}else:",
            f"{indent}    if run.bound: run.bound.clear()",
            f"{indent}    iteration.nodes.append(node); iteration.choices = choices",
        ]

    def _result(self, pattern: Any) -> str:
        if isinstance(pattern, Variable):
            return f"objects[{pattern.index}]"
        if isinstance(pattern, Structure):
            parts = "".join(self._result(each) + ", " for each in pattern.parts)
            return f"{self.constant(pattern.type)}(({parts}))"
        if isinstance(pattern, (tuple, list)):
            parts = "".join(self._result(each) + ", " for each in pattern)
            return f"[{parts}]" if isinstance(pattern, list) else f"({parts})"
        return self.constant(pattern.value)

    def check(self, condition: str) -> None:
        self.lines.append(f"    if not ({condition}): return MISS")

    def constant(self, value: Any) -> str:
        name = f"c{next(self._count)}"
        self.constants[name] = value
        return name

    def _value(self, source: str, pattern: Any) -> None:
        if isinstance(pattern, Variable):
            self._variable(source, pattern.index)
        elif isinstance(pattern, Number):
            self._number(source, pattern.index)
        elif isinstance(pattern, Constant):
            self._constant(source, pattern.value)
        elif type(pattern) is dict:
            self.check(f"type({source}) is dict and list({source}) == {list(pattern)!r}")
            for key, each in pattern.items():
                self._nested(f"{source}[{key!r}]", each)
        elif type(pattern) is tuple and pattern and pattern[0] == "slice":
            self.check(f"type({source}) is slice")
            for name, each in zip(("start", "stop", "step"), pattern[1:], strict=True):
                self._nested(f"{source}.{name}", each)
        else:
            kind = "list" if type(pattern) is list else "tuple"
            self.check(f"isinstance({source}, {kind}) and len({source}) == {len(pattern)}")
            for position, each in enumerate(pattern):
                self._nested(f"{source}[{position}]", each)

    def _nested(self, source: str, pattern: Any) -> None:
        if isinstance(pattern, Variable):
            return self._variable(source, pattern.index)
        name = f"v{next(self._count)}"
        self.lines.append(f"    {name} = {source}")
        return self._value(name, pattern)

    def _variable(self, source: str, index: int) -> None:
        spec = self._call.specs.get(index)
        if spec is not None and spec.given and index not in self._seen:
            self._seen.add(index)
            cache = self.constant(unseen())
            self.check(f"run.bind({index}, {self.constant(spec)}, {source}, {cache})")
        else:
            self.check(f"{source} is objects[{index}]")

    def _number(self, source: str, index: int) -> None:
        if index < 0:
            self._sizes.append((source, index))
            return
        if index in self._node.fixed:
            self._constant(source, self._node.fixed[index])
        else:
            self.check(f"type({source}) is {type(self._call.numbers[index]).__name__}")
        self.lines.append(f"    run.numbers[{index}] = {source}")

    def _constant(self, source: str, value: Any) -> None:
        if value is None or value is Ellipsis or isinstance(value, bool):
            self.check(f"{source} is {value!r}")
        elif isinstance(value, float) and value != value:
            self.check(f"type({source}) is float and isnan({source})")
        elif isinstance(value, float) and value == 0:
            sign = math.copysign(1, value)
            self.check(f"type({source}) is float and {source} == 0 and copysign(1, {source}) == {sign}")
        elif isinstance(value, complex):
            self.check(f"type({source}) is complex and repr({source}) == {repr(value)!r}")
        elif type(value) in (int, str):
            self.check(f"type({source}) is {type(value).__name__} and {source} == {value!r}")
        else:
            name = self.constant(value)
            self.check(f"type({source}) is {self.constant(type(value))} and {source} == {name}")
