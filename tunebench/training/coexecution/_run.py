"""The state of one run along a path, and the check of a new path against eager mode."""

from __future__ import annotations

import functools
import math
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from tunebench.training.coexecution._call import (
    Call,
    Constant,
    Number,
    Structure,
    TensorSpec,
    Variable,
    replaced,
)
from tunebench.training.coexecution._function import Kind
from tunebench.training.coexecution._operator import allocates
from tunebench.training.coexecution._path import End, Node
from tunebench.training.coexecution._placeholder import become
from tunebench.training.coexecution._recorder import Recorder
from tunebench.training.coexecution._script import operation_result
from tunebench.training.coexecution._sizes import Numbers, Size, at, has_geometry, is_instance
from tunebench.training.coexecution._tensors import Reference, has_foreign_view

__all__ = ["Run", "difference", "rebuilt", "same_storage", "unseen"]


class Run:
    """Objects, values and numbers of an iteration, by index.

    Args:
        size: A number that all indices are smaller than.
        sizes: The sizes of the step's paths, by index.

    Attributes:
        objects: Tensor objects of the program, given or placeholders.
        values: Tensors with values, as far as they were computed and are needed.
        numbers: Python numbers that calls passed on.
        indices: Variables by identity of their objects.
        promised: Variables whose objects are placeholders.
        bound: What `keep` and `undo` are about.
    """

    def __init__(self, size: int, sizes: dict[int, Size] | None = None) -> None:
        self.objects: list[Any] = [None] * size
        self.values: list[Any] = [None] * size
        self.numbers = Numbers(sizes or {})
        self.indices: dict[int, int] = {}
        self.promised: set[int] = set()
        self._storages: dict[int, int] = {}
        self.bound: list[tuple[int, int | None, int]] = []

    def bind(self, index: int, spec: TensorSpec, tensor: Any, cache: list[Any]) -> bool:
        """Note that a given tensor is a variable; return False if it is not like its spec.

        Args:
            index: The variable.
            spec: What it must be like.
            tensor: The object.
            cache: A weak reference to the object that was checked last, and its storage; updated.
        """
        if spec.sized:
            if not has_geometry(tensor, spec, self.numbers):
                return False
            spec = at(spec, self.numbers)
        if cache[0]() is tensor and tensor is not None:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key != cache[1] or not _still_fits(tensor, spec):
                return False
        elif fits(tensor, spec):
            storage = tensor.untyped_storage()
            key = storage._cdata
            cache[:] = Reference(tensor), key
        else:
            return False
        if id(tensor) in self.indices:
            return False
        if self._storages.get(key, -1) != spec.alias or has_foreign_view(tensor) is not spec.shared:
            return False
        if spec.alias < 0:
            self._storages[key] = index
        self.bound.append((id(tensor), key if spec.alias < 0 else None, index))
        self.indices[id(tensor)] = index
        self.objects[index] = tensor
        self.values[spec.value] = tensor
        return True

    def keep(self) -> None:
        """Keep what was bound since the last call."""
        self.bound.clear()
        self.numbers.keep()

    def undo(self) -> None:
        """Remove the bindings that were made after the last call of `keep`."""
        for identity, key, index in self.bound:
            del self.indices[identity]
            if key is not None:
                del self._storages[key]
            self.objects[index] = None
        self.bound.clear()
        self.numbers.undo()

    def redeem(self, index: int, real: Tensor) -> None:
        """Turn the placeholder of a variable into a tensor with values."""
        self.promised.discard(index)
        become(self.objects[index], real)

    def draw(self, node: Node, states: Sequence[Tensor] = ()) -> None:
        """Run the operations of a call that draw random numbers.

        Args:
            node: The call.
            states: State of the random number generator before each draw; none to go on from the present one.
        """
        remaining = iter(states)
        for operation in node.host:
            if states and not allocates(operation.operator):
                torch.default_generator.set_state(next(remaining))
            results = operation_result(operation, self.values, self.numbers)
            for position, result in zip(operation.outputs, results, strict=True):
                if position is not None:
                    self.values[position] = result

    def real(self, index: int, specs: Sequence[TensorSpec]) -> Any:
        """Return the tensor of a variable, with values if its object is a placeholder."""
        return self.objects[index] if specs[index].given else self.values[specs[index].value]

    def result(self, pattern: Any) -> Any:
        """Return the result of a call to Python."""
        if isinstance(pattern, Variable):
            return self.objects[pattern.index]
        return replaced(
            pattern, lambda leaf: self.objects[leaf.index] if isinstance(leaf, Variable) else leaf.value
        )

    def bind_new(self, call: Call, result: Any) -> bool:
        """Note that new tensors are the results of a call; return False if they are not like them."""

        def binds(index: int, tensor: Any) -> bool:
            spec = call.specs.get(index)
            return spec is not None and self.bind(index, spec, tensor, unseen())

        return _all_match(call.outputs, result, binds)

    def has_sizes(self, call: Call, result: Any) -> bool:
        """Return whether tensors are like the results of a call; roots take their sizes."""

        def matches(index: int, tensor: Any) -> bool:
            spec = call.specs.get(index)
            return spec is None or spec.given or has_geometry(tensor, spec, self.numbers)

        return _all_match(call.outputs, result, matches)

    def pooled(self, node: Node) -> tuple[Any, ...] | None:
        """Return the placeholders of a call if nothing refers to them and nothing was added to them.

        Those of other sizes are of no use to another iteration.
        """
        if node.sized:
            return None
        made = [self.objects[index] for index, _ in node.made]
        for index, _ in node.made:
            self.objects[index] = None
        for each in made:
            if sys.getrefcount(each) > 3 or each.__dict__ or weakref.getweakrefcount(each):
                return None
        return tuple(made) or None


def _all_match(pattern: Any, result: Any, matches: Callable[[int, Any], bool]) -> bool:
    """Return whether the tensors of a result match the variables in its pattern."""
    if isinstance(pattern, Variable):
        return isinstance(result, Tensor) and matches(pattern.index, result)
    if isinstance(pattern, Constant):
        return Constant(result) == pattern
    parts = pattern.parts if isinstance(pattern, Structure) else pattern
    return (
        isinstance(result, (tuple, list))
        and len(parts) == len(result)
        and all(_all_match(each, value, matches) for each, value in zip(parts, result, strict=True))
    )


def unseen() -> list[Any]:
    """Return the cache of `Run.bind` for a variable whose object was not checked yet."""
    return [_nothing, 0]


def _nothing() -> None:
    """Return None, like a weak reference to a tensor that is gone."""


def _still_fits(tensor: Tensor, spec: TensorSpec) -> bool:
    """Return whether a tensor object that matched its spec before still matches it.

    Compared is what can change while the object stays the same.
    """
    return (
        tensor.requires_grad is spec.requires_grad
        and tensor.shape == spec.shape
        and tensor.is_leaf is spec.is_leaf
        and tensor.stride() == spec.stride
        and tensor.dtype is spec.dtype
        and tensor.storage_offset() == spec.offset
        and not tensor._backward_hooks
    )


def fits(tensor: Any, spec: TensorSpec) -> bool:
    """Return whether an object is a tensor like its spec."""
    return (
        (type(tensor) is Parameter or type(tensor) is Tensor)
        and tensor.layout is torch.strided
        and tensor.shape == spec.shape
        and tensor.dtype is spec.dtype
        and tensor.requires_grad is spec.requires_grad
        and tensor.stride() == spec.stride
        and tensor.storage_offset() == spec.offset
        and tensor.is_leaf is spec.is_leaf
        and tensor.is_cpu
        and not tensor._backward_hooks
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.is_inference()
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and not torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python)
    )


def rebuilt(call: Call, run: Run, tensor: Callable[[int], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call of a run.

    Args:
        call: The call.
        run: The run.
        tensor: Function from a variable among them to the tensor in its place.
    """

    def leaf(pattern: Any) -> Any:
        if isinstance(pattern, Variable):
            return tensor(pattern.index)
        return run.numbers[pattern.index] if isinstance(pattern, Number) else pattern.value

    args = tuple(_unsliced(each, leaf) for each in call.args)
    return args, {key: _unsliced(value, leaf) for key, value in call.kwargs}


def _unsliced(pattern: Any, leaf: Any) -> Any:
    if type(pattern) is tuple and pattern and pattern[0] == "slice":
        return slice(*(_unsliced(each, leaf) for each in pattern[1:]))
    if type(pattern) is tuple:
        return tuple(_unsliced(each, leaf) for each in pattern)
    if type(pattern) is list:
        return [_unsliced(each, leaf) for each in pattern]
    if type(pattern) is dict:
        return {key: _unsliced(each, leaf) for key, each in pattern.items()}
    return replaced(pattern, leaf)


# -- check against eager mode --------------------------------------------------------------------------------


def difference(recorder: Recorder, nodes: list[Node], end: End, sizes: dict[int, Size]) -> str | None:
    """Run the segments of a path on a recorded iteration; return how results differ, or None.

    This can be done once: the segments write what the record saved.
    """
    state = torch.default_generator.get_state()
    try:
        return _Shadow(recorder, sizes).difference(nodes, end)
    finally:
        torch.default_generator.set_state(state)


class _Shadow:
    """A second run of a recorded iteration on the saved copies of its inputs, which it overwrites."""

    def __init__(self, recorder: Recorder, sizes: dict[int, Size]) -> None:
        self._recorder = recorder
        self._run = Run(recorder.size, sizes)
        self._copies = {key: copy for key, (_, copy) in recorder.tensors.saved.items()}

    def difference(self, nodes: list[Node], end: End) -> str | None:
        run = self._run
        is_instance_of = functools.partial(is_instance, numbers=run.numbers)
        for node, call in zip(nodes, self._recorder.calls, strict=True):
            for index, spec in call.specs.items():
                if spec.given:
                    run.objects[index] = run.values[spec.value] = self._copy(
                        self._recorder.tensors.given[index]
                    )
            for index, value in call.numbers.items():
                run.numbers[index] = value
            if node.sized and not node.call.same_but_numbers(call, is_instance_of):
                return f"sizes at {call.site} do not follow from those before"
            if call.random_states:
                run.draw(node, call.random_states)
            if node.segment is not None:
                node.segment.run(run.values, run.numbers)
            if call.kind is Kind.FETCH and call.result is not None and not self._same_fetch(call):
                return f"{call.site} fetches another value"
            for index in node.drops:
                run.values[index] = None
        if end.segment is not None:
            end.segment.run(run.values, run.numbers)
        return self._differing_state(end)

    def _copy(self, tensor: Tensor) -> Tensor:
        copy = self._copies.get(tensor.untyped_storage()._cdata)
        if copy is None:
            return tensor
        made = torch.empty(0, dtype=tensor.dtype).set_(
            copy, tensor.storage_offset(), tensor.shape, tensor.stride()
        )
        return made.requires_grad_() if tensor.requires_grad else made

    def _same_fetch(self, call: Call) -> bool:
        with torch.no_grad():
            real = functools.partial(self._run.real, specs=self._recorder.tensors.specs)
            args, kwargs = rebuilt(call, self._run, real)
            return _same_result(call.function(*args, **kwargs), call.result)

    def _differing_state(self, end: End) -> str | None:
        for key, (storage, _) in self._recorder.tensors.saved.items():
            if not same_storage(storage, self._copies[key]):
                return "a tensor has other contents after the iteration"
        for index, found in end.gradients.items():
            leaf = self._recorder.tensors.object(index)
            if leaf is not None and not same(leaf.grad, self._run.values[end.specs[found.index].value]):
                return "a gradient differs"
        for index in end.escaping:
            tensor = self._recorder.tensors.object(index)
            if tensor is not None and not same(tensor, self._run.values[end.specs[index].value]):
                return "a result differs"
        return None


def same(one: Tensor | None, two: Tensor | None) -> bool:
    """Return whether two tensors are equal to the last bit."""
    if (
        one is None
        or two is None
        or one.shape != two.shape
        or one.dtype != two.dtype
        or one.stride() != two.stride()
    ):
        return one is two
    with torch.no_grad():
        left, right = (each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (one, two))
        return bool(torch.equal(left, right))


def same_storage(one: torch.UntypedStorage, two: torch.UntypedStorage) -> bool:
    """Return whether two storages have the same bytes."""
    left, right = (torch.empty(0, dtype=torch.uint8).set_(each) for each in (one, two))
    return bool(torch.equal(left, right))


def _same_result(one: Any, two: Any) -> bool:
    if isinstance(one, np.ndarray):
        return bool(one.dtype == two.dtype and one.shape == two.shape and one.tobytes() == two.tobytes())
    if isinstance(one, float):
        return one == two or (math.isnan(one) and math.isnan(two))
    return repr(one) == repr(two) if isinstance(one, list) else bool(one == two)
