"""One co-executed iteration: Python runs with placeholders, and segments of its path run beside it."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tunebench.torch.coexecution._call import Call, Constant, Structure, Value, Variable, replaced
from tunebench.torch.coexecution._function import ALWAYS, Kind
from tunebench.torch.coexecution._path import Node, PathTree, matcher
from tunebench.torch.coexecution._placeholder import placeholder
from tunebench.torch.coexecution._recorder import Recorder, call_site, thread_state
from tunebench.torch.coexecution._run import Run, placeholders, real_arguments, rebuilt
from tunebench.torch.coexecution._segment import Segment

__all__ = ["Iteration", "Outcome"]

_ANSWERS: dict[Any, Callable[[Any], Any]] = {
    Tensor.is_leaf.__get__: lambda spec: spec.is_leaf,
    Tensor.requires_grad.__get__: lambda spec: spec.requires_grad,
}
"""Metadata of a placeholder that the object itself does not hold."""


class Diverged(Exception):
    """The iteration left the known paths."""


class Differs(Exception):
    """A call has the arguments of a known one, and another state of gradients."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What happened in an iteration.

    Attributes:
        recorder: The record, if it ran at least partly as in eager mode.
        divergence: Where and why it left the known paths.
        path: The nodes it followed.
        graph_s: Time in segments in seconds.
        waits: Number of times Python waited.
    """

    recorder: Recorder | None = None
    divergence: tuple[str, str] | None = None
    path: list[Node] = field(default_factory=list)
    graph_s: float = 0.0
    waits: int = 0


class Iteration(TorchFunctionMode):  # type: ignore[misc]  # torch does not type it
    """The mode in which an iteration runs: it handles every call of a function of torch.

    Args:
        tree: The known paths; None to record the iteration.
        diverge_at: Number of the call that counts as unknown, or None.
    """

    def __init__(self, tree: PathTree | None, diverge_at: int | None = None) -> None:
        super().__init__()
        self.outcome = Outcome()
        self._node = tree.root if tree is not None else None
        self._run = Run(tree.size) if tree is not None else None
        self._nodes = self.outcome.path
        self._gradients: dict[int, Variable | Value | None] = {}
        self._undo: dict[
            int, tuple[torch.UntypedStorage, torch.UntypedStorage, list[tuple[Tensor, int]]]
        ] = {}
        self._random: dict[int, Tensor] = {}
        self._fetched: dict[int, Any] = {}
        self._start = torch.is_grad_enabled()
        self._diverge_at = diverge_at
        self._exits = contextlib.ExitStack()

    # -- beginning and end -----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin the iteration."""
        if self._node is None:
            self._record()
        self._exits.enter_context(self)

    def end(self, error: BaseException | None) -> None:
        """End the iteration: everything it computed is there, as after eager mode."""
        try:
            if self._node is not None:
                with torch._C.DisableTorchFunction():
                    self._finish(error)
        finally:
            self._exits.close()
            self._run = None

    def _record(self) -> Recorder:
        recorder = Recorder()
        self.outcome.recorder = recorder
        if torch.utils._python_dispatch._len_torch_dispatch_stack() == 0:
            self._exits.enter_context(recorder.mode)
        else:
            recorder.refuse("another dispatch mode is active")
        return recorder

    # -- calls -----------------------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Handle a call of a function of torch."""
        kwargs = kwargs or {}
        if self._node is None:
            assert self.outcome.recorder is not None
            return self.outcome.recorder.call(func, args, kwargs)
        try:
            kind = ALWAYS.get(func, Kind.COMPUTE)
        except TypeError:
            kind = Kind.UNKNOWN
        if kind is Kind.METADATA:
            return self._metadata(func, args, kwargs)
        if kind is Kind.IGNORED:
            return func(*args, **kwargs)
        return self.follow(func, args, kwargs, kind)

    def update(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle a call of a function of an optimizer."""
        with torch._C.DisableTorchFunction():
            if self._node is None:
                assert self.outcome.recorder is not None
                return self.outcome.recorder.call(function, args, kwargs, Kind.OPTIMIZER)
            return self.follow(function, args, kwargs, Kind.OPTIMIZER)

    def _metadata(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._run is not None
        answer = _ANSWERS.get(func)
        if answer is not None:
            index = self._run.indices.get(id(args[0]))
            if index is not None:
                return answer(self._run.specs[index])
        return func(*args, **kwargs)

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], kind: Kind) -> Any:
        """Follow a call on the known paths, or leave them."""
        run = self._run
        assert self._node is not None
        assert run is not None
        if self._diverge_at is not None and len(self._nodes) >= self._diverge_at:
            self._diverge_at = None
            return self._diverge("forced", func, args, kwargs, kind)
        state = thread_state()
        for node in self._node.following:
            call = node.call
            if not node.live or call.function != func or call.state != state:
                continue
            if call.kind is Kind.CREATE and _holds_tensor((args, kwargs)):
                continue
            matches = node.matches
            if matches is None:
                matches = node.matches = matcher(node, set())
            if matches(args, kwargs, run):
                try:
                    return self._take(node, func, args, kwargs)
                except Differs:
                    pass
            run.undo()
        if kind is Kind.COMPUTE and not _holds_tensor((args, kwargs)):
            return self._outside(func, args, kwargs)
        return self._diverge("a call that is on no known path", func, args, kwargs, kind)

    def _outside(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call that uses no tensor; it concerns the path only if it makes one."""
        result = func(*args, **kwargs)
        if not _holds_tensor(result):
            return result
        recorder = self._leave("a new tensor that is on no known path")
        recorder.adopt(func, args, kwargs, result, Kind.CREATE)
        return result

    def _take(self, node: Node, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = node.call
        run = self._run
        assert run is not None
        try:
            result = _TAKING[call.kind](self, node, call, args, kwargs)
        except Diverged as reason:
            return self._diverge(str(reason), func, args, kwargs, call.kind)
        return self._reached(node, result) if call.kind is not Kind.CREATE else result

    def _reached(self, node: Node, result: Any) -> Any:
        if self._node is not None and self._run is not None:
            self._run.keep()
            self._node = node
            self._nodes.append(node)
        return result

    def _compute(self, node: Node, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = self._run
        assert run is not None
        if call.kind is Kind.BACKWARD:
            self._check_leaves(call)
        if node.host:
            self._random[len(self._nodes)] = torch.default_generator.get_state()
            run.draw(node)
        if call.waits:
            self._wait(node.segment)
            self._check_sizes(call)
        if call.kind is Kind.BACKWARD:
            for leaf, value in call.gradients:
                self._gradients[leaf] = Value(value)
            return None
        return self._promised(node, call)

    def _promised(self, node: Node, call: Call) -> Any:
        run = self._run
        assert run is not None
        if not node.made:
            node.made = tuple(placeholders(call))
        for index, spec in node.made:
            run.promise(index, spec, placeholder(spec))
        return _result(call.outputs, run)

    def _create(self, node: Node, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = self._run
        assert run is not None
        result = call.function(*args, **kwargs)
        assert self._node is not None
        for sibling in [node, *(each for each in self._node.following if each is not node)]:
            other = sibling.call
            if not sibling.live or other.kind is not Kind.CREATE or other.function != call.function:
                continue
            if other.state == call.state and _bound(other.outputs, result, other, run):
                return self._reached(sibling, result)
            run.undo()
        recorder = self._leave("a new tensor with another shape or type")
        recorder.adopt(call.function, args, kwargs, result, Kind.CREATE)
        return result

    def _fetch(self, node: Node, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = self._run
        assert run is not None
        self._wait(node.segment)
        given, named = real_arguments(call, run)
        with torch.no_grad():
            result = call.function(*given, **named)
        self._fetched[len(self._nodes)] = result
        return result

    def _state(self, node: Node, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return call.function(*args, **kwargs)

    def _get_gradient(self, node: Node, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = self._run
        assert run is not None
        leaf = call.args[0].index
        expected = call.outputs
        if leaf in self._gradients:
            found = self._gradients[leaf]
            if found is None and isinstance(expected, Constant):
                return None
            if found is None or isinstance(expected, Constant):
                raise Differs
            if isinstance(found, Value):
                if expected.index not in call.specs or call.specs[expected.index].value != found.index:
                    raise Differs
                self._gradients[leaf] = expected
                return self._promised(node, call)
            if found != expected:
                raise Differs
            return run.objects[found.index]
        gradient = args[0].grad
        if gradient is None and isinstance(expected, Constant):
            return None
        if gradient is None or isinstance(expected, Constant):
            raise Differs
        known = run.indices.get(id(gradient))
        if known is not None and known == expected.index:
            return gradient
        spec = call.specs.get(expected.index)
        if known is None and spec is not None and spec.given and run.bind(expected.index, spec, gradient):
            return gradient
        raise Differs

    def _set_gradient(self, node: Node, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value = call.args[1]
        self._gradients[call.args[0].index] = value if isinstance(value, Variable) else None

    def _check_leaves(self, call: Call) -> None:
        """Check that leaves have gradients and hooks as when the path was recorded."""
        run = self._run
        assert run is not None
        accumulated = dict(call.accumulated)
        for leaf in {index for index, _ in call.gradients} | accumulated.keys():
            tensor = run.objects[leaf]
            if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
                raise Differs
            expected = accumulated.get(leaf, -1)
            if leaf in self._gradients:
                found = self._gradients[leaf]
                index = found.index if isinstance(found, Variable) else None
                if isinstance(found, Value):
                    raise Differs
                if (-1 if index is None else index) != expected:
                    raise Differs
                continue
            gradient = tensor.grad
            if (gradient is None) != (expected < 0):
                raise Differs
            if gradient is None or run.indices.get(id(gradient)) == expected:
                continue
            spec = call.specs.get(expected)
            if spec is None or not run.bind(expected, spec, gradient):
                raise Differs

    def _check_sizes(self, call: Call) -> None:
        run = self._run
        assert run is not None
        for index, (shape, stride, *_) in call.checked.items():
            value = run.values[index]
            if value.shape != shape or value.stride() != stride:
                raise Diverged("sizes that depend on data")

    # -- segments --------------------------------------------------------------------------------------------

    def _wait(self, segment: Segment | None, *, final: bool = False) -> None:
        """Run what Python waits for."""
        if segment is None:
            return
        run = self._run
        assert run is not None
        if not final:
            self._save(segment)
        start = time.perf_counter()
        try:
            segment.run(run.values, run.numbers)
        except Exception as error:
            if final:
                raise
            raise Diverged(f"{type(error).__name__} in an operation") from error
        finally:
            self.outcome.graph_s += time.perf_counter() - start
            self.outcome.waits += 1

    def _save(self, segment: Segment) -> None:
        """Save what the segment is about to write, to be able to take it back."""
        run = self._run
        assert run is not None
        given = {spec.value for spec in run.specs.values() if spec.given} if segment.writes else set()
        for index in segment.writes:
            tensor = run.values[index]
            if tensor is None or index not in given:
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in self._undo:
                self._undo[storage._cdata] = (storage, storage.clone(), [])
            self._undo[storage._cdata][2].append((tensor, tensor._version))

    # -- divergence ------------------------------------------------------------------------------------------

    def _diverge(
        self, reason: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], kind: Kind | None = None
    ) -> Any:
        recorder = self._leave(reason)
        return recorder.call(func, args, kwargs, kind if kind is Kind.OPTIMIZER else None)

    def _leave(self, reason: str) -> Recorder:
        """Take back what the iteration's segments changed, and run its calls so far as in eager mode."""
        run, nodes = self._run, self._nodes
        assert run is not None
        site = call_site(sys._getframe(1))
        self.outcome.divergence = (site[-1] if site else "?", reason)
        self._node = None
        for storage, saved, tensors in self._undo.values():
            storage.copy_(saved)
            for tensor, version in reversed(tensors):
                torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))
        self._undo.clear()
        recorder = self._record()
        state, enabled = torch.default_generator.get_state(), torch.is_grad_enabled()
        torch._C._set_grad_enabled(self._start)
        for position, node in enumerate(nodes):
            if position in self._random:
                torch.default_generator.set_state(self._random[position])
            _replay(node, run, recorder, self._fetched.get(position))
        torch.default_generator.set_state(state)
        torch._C._set_grad_enabled(enabled)
        return recorder

    # -- end -------------------------------------------------------------------------------------------------

    def _finish(self, error: BaseException | None) -> None:
        run, node = self._run, self._node
        assert run is not None
        assert node is not None
        end = node.end
        if error is not None or end is None or not end.ready:
            self._leave("an exception" if error is not None else "an end that is on no known path")
            return
        escaping = [
            index
            for index, spec in run.specs.items()
            if not spec.given and sys.getrefcount(run.objects[index]) > 2
        ]
        if any(index not in end.escaping for index in escaping):
            self._leave("a tensor that outlives the iteration")
            return
        self._wait(end.segment, final=True)
        with torch.no_grad():
            self._hand_over(escaping)

    def _hand_over(self, escaping: list[int]) -> None:
        """Turn placeholders into tensors, and write gradients."""
        run = self._run
        assert run is not None
        for index in {
            *escaping,
            *(each.index for each in self._gradients.values() if isinstance(each, Variable)),
        }:
            if index in run.promised:
                run.redeem(index, run.values[run.specs[index].value].detach())
        for leaf, found in self._gradients.items():
            tensor = run.objects[leaf]
            if found is None:
                tensor.grad = None
            elif isinstance(found, Variable):
                tensor.grad = run.objects[found.index]
            else:
                tensor.grad = run.values[found.index]


def _replay(node: Node, run: Run, recorder: Recorder, fetched: Any) -> None:
    """Run a call as in eager mode, and turn the placeholders it gave to Python into its results."""
    call = node.call
    args, kwargs = rebuilt(call, run)
    if call.kind is Kind.CREATE:
        result = _result(call.outputs, run)
        recorder.adopt(call.function, args, kwargs, result, Kind.CREATE)
        return
    if call.kind is Kind.FETCH:
        recorder.adopt(call.function, args, kwargs, fetched, Kind.FETCH)
        return
    result = recorder.call(
        call.function, args, kwargs, Kind.OPTIMIZER if call.kind is Kind.OPTIMIZER else None
    )
    if call.kind is Kind.GET_GRADIENT and isinstance(call.outputs, Variable):
        promised = run.objects[call.outputs.index]
        if call.outputs.index in run.promised:
            index = recorder.index_of(result)
            with torch.no_grad():
                args[0].grad = None
                run.redeem(call.outputs.index, result)
                args[0].grad = promised
            if index is not None:
                recorder.rename(promised, index)
        return
    _adopt(call.outputs, result, run, recorder)


def _adopt(pattern: Any, result: Any, run: Run, recorder: Recorder) -> None:
    if isinstance(pattern, Variable):
        if pattern.index in run.promised:
            index = recorder.index_of(result)
            run.redeem(pattern.index, result)
            if index is not None:
                recorder.rename(run.objects[pattern.index], index)
    elif isinstance(pattern, Structure):
        for each, value in zip(pattern.parts, result, strict=True):
            _adopt(each, value, run, recorder)
    elif isinstance(pattern, (tuple, list)):
        for each, value in zip(pattern, result, strict=True):
            _adopt(each, value, run, recorder)


def _result(pattern: Any, run: Run) -> Any:
    """Return the result of a call to Python."""
    if isinstance(pattern, Variable):
        return run.objects[pattern.index]
    return replaced(
        pattern, lambda leaf: run.objects[leaf.index] if isinstance(leaf, Variable) else leaf.value
    )


def _bound(pattern: Any, result: Any, call: Call, run: Run) -> bool:
    """Bind new tensors to their variables; return whether they are like them."""
    if isinstance(pattern, Variable):
        spec = call.specs.get(pattern.index)
        return spec is not None and isinstance(result, Tensor) and run.bind(pattern.index, spec, result)
    if isinstance(pattern, Constant):
        return Constant(result) == pattern
    parts = pattern.parts if isinstance(pattern, Structure) else pattern
    return (
        isinstance(result, (tuple, list))
        and len(parts) == len(result)
        and all(_bound(each, value, call, run) for each, value in zip(parts, result, strict=True))
    )


def _holds_tensor(tree: Any) -> bool:
    if isinstance(tree, (tuple, list)):
        return any(_holds_tensor(each) for each in tree)
    if isinstance(tree, dict):
        return any(_holds_tensor(each) for each in tree.values())
    return isinstance(tree, Tensor)


_TAKING: dict[Kind, Any] = {
    Kind.COMPUTE: Iteration._compute,
    Kind.BACKWARD: Iteration._compute,
    Kind.OPTIMIZER: Iteration._compute,
    Kind.CREATE: Iteration._create,
    Kind.FETCH: Iteration._fetch,
    Kind.STATE: Iteration._state,
    Kind.GET_GRADIENT: Iteration._get_gradient,
    Kind.SET_GRADIENT: Iteration._set_gradient,
}
