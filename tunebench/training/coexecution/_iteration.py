"""One co-executed iteration: Python runs with placeholders, and segments of its path run beside it."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily

from tunebench.training.coexecution._call import Call, Variable, holds_tensor
from tunebench.training.coexecution._function import (
    ALWAYS,
    NATIVE,
    SHARING,
    Kind,
    clear_gradients,
    makes_states,
    optimizer_functions,
)
from tunebench.training.coexecution._matching import MISS, follower
from tunebench.training.coexecution._modes import enter, thread_state, without_modes
from tunebench.training.coexecution._path import End, Node, PathTree
from tunebench.training.coexecution._placeholder import placeholder, spent, without_memory
from tunebench.training.coexecution._recorder import Recorder, call_site
from tunebench.training.coexecution._repeating import repeat
from tunebench.training.coexecution._run import Run, rebuilt, same_storage, unseen
from tunebench.training.coexecution._runner import GraphRunner, is_usable
from tunebench.training.coexecution._segment import Piece, Segment, Updated, UpdatePiece, called, running
from tunebench.training.coexecution._sizes import at, is_instance
from tunebench.training.coexecution._testing import FORCED

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
        waiting_s: Time in which Python waited for segments in seconds.
        segments: The segments that ran, with their times in seconds.
    """

    recorder: Recorder | None = None
    divergence: tuple[str, str] | None = None
    path: list[Node] = field(default_factory=list)
    graph_s: float = 0.0
    waiting_s: float = 0.0
    segments: list[tuple[Segment, float]] = field(default_factory=list)


class Iteration(TorchFunctionMode):  # type: ignore[misc]  # torch does not type it
    """The mode in which an iteration runs: it handles every call of a function of torch.

    Args:
        tree: The known paths; None to record the iteration.
        diverge_at: Number of the call that counts as unknown, or None.
        threaded: Whether pieces run in another thread, concurrently with Python.
        updated: What runs functions of optimizers that update parameters.
        saves: Whether memory is saved that a recorded iteration writes.
    """

    def __init__(
        self,
        tree: PathTree | None,
        diverge_at: int | None = None,
        *,
        threaded: bool = False,
        updated: Updated = called,
        saves: bool = True,
    ) -> None:
        super().__init__()
        self.outcome = Outcome()
        self.run = Run(tree.size, tree.sizes) if tree is not None else Run(0)
        self.choices = tree.root.choices if tree is not None and diverge_at != 0 else None
        self.nodes = self.outcome.path
        self._gradients: dict[int, Tensor | None] = {}
        self._undo: dict[
            int, tuple[torch.UntypedStorage, torch.UntypedStorage, list[tuple[Tensor, int]]]
        ] = {}
        self._random: dict[int, Tensor] = {}
        self._fetched: dict[int, Any] = {}
        self._shared: dict[int, Tensor] = {}
        self._contents: dict[int, torch.UntypedStorage] = {}
        self._written: dict[int, list[tuple[int, torch.UntypedStorage]]] = {}
        self.diverge_at = diverge_at
        self.threaded = threaded and is_usable()
        self._updated = updated
        self._saves = saves
        self._ends = False
        self._graph = GraphRunner()
        self._exits = contextlib.ExitStack()

    # -- beginning and end -----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin the iteration."""
        if self.choices is None:
            self._record(Recorder(saves=self._saves))
        self._exits.enter_context(self)

    def end(self, error: BaseException | None) -> None:
        """End the iteration: everything it computed is there, as after eager mode."""
        self._ends = True
        try:
            if self.choices is not None:
                with torch._C.DisableTorchFunction(), _pop_mode_temporarily():
                    self._finish(error)
        finally:
            self._exits.close()
            self._graph.end()
            self.run = Run(0)

    def _record(self, recorder: Recorder) -> None:
        """Record the operations of the rest of the iteration."""
        self.outcome.recorder = recorder
        self._exits.enter_context(recorder.watching_drops())
        if torch.utils._python_dispatch._len_torch_dispatch_stack() == 0:
            self._exits.enter_context(recorder.mode)
        else:
            recorder.refuse("another dispatch mode is active")

    # -- calls -----------------------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Handle a call of a function of torch."""
        choices = self.choices
        if choices is None:
            assert self.outcome.recorder is not None
            return self.outcome.recorder.call(func, args, kwargs or {})
        if func in NATIVE:
            return func(*args, **kwargs) if kwargs else func(*args)
        for node in choices:
            if func == node.call.function:
                follow = node.follow
                if follow is None:
                    node.taking = _TAKING[node.call.kind]
                    follow = node.follow = follower(node)
                result = follow(self, args, kwargs)
                if result is not MISS:
                    return result
                self.run.undo()
        return self._unexpected(func, args, kwargs or {})

    def update(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle a call of a function of an optimizer."""
        with torch._C.DisableTorchFunction():
            if self.choices is not None and makes_states(args, kwargs):
                self._leave("an update that makes states of parameters")
            if self.choices is None:
                assert self.outcome.recorder is not None
                return self.outcome.recorder.call(function, args, kwargs, Kind.OPTIMIZER)
            return self.__torch_function__(function, (), args, kwargs)

    def clear_gradients(self, leaves: list[Tensor]) -> None:
        """Set the attribute ``grad`` of leaves to None."""
        if leaves:
            self.__torch_function__(clear_gradients, (), tuple(leaves))

    def construct(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle the construction of a tensor of another class, which torch shows to no mode."""
        with torch._C.DisableTorchFunction():
            return self.__torch_function__(function, (), args, kwargs)

    def need_values(self, reason: str) -> None:
        """Leave the known paths before code of torch that no mode sees gets tensors, which must have values.

        Args:
            reason: What gets them.
        """
        if self.choices is not None and not self._ends:
            with torch._C.DisableTorchFunction():
                self._leave(reason)

    def change_setting(self, name: str) -> None:
        """Run the rest of the iteration as in eager mode, before a setting of torch changes.

        Args:
            name: The function of torch that changes it.
        """
        reason = f"{name.removeprefix('_')} changes a setting of torch within the step"
        with torch._C.DisableTorchFunction():
            if self.choices is not None:
                self._leave(reason)
            assert self.outcome.recorder is not None
            self.outcome.recorder.refuse(reason)

    def _unexpected(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle a call that followed the call before it on no known path."""
        try:
            kind = ALWAYS.get(func, Kind.COMPUTE)
        except TypeError:
            kind = Kind.UNKNOWN
        if kind is Kind.METADATA:
            answer = _ANSWERS.get(func)
            if answer is not None and self.nodes:
                index = self.run.indices.get(id(args[0]))
                if index is not None:
                    return answer(self.nodes[-1].specs[index])
            return func(*args, **kwargs)
        if kind is Kind.IGNORED:
            return func(*args, **kwargs)
        if kind is Kind.COMPUTE and not holds_tensor((args, kwargs)) and func not in _UPDATES:
            return self._outside(func, args, kwargs)
        return self._diverge("a call that is on no known path", func, args, kwargs)

    def _outside(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call that uses no tensor; it concerns the path only if it makes one."""
        result = func(*args, **kwargs)
        if not holds_tensor(result):
            return result
        recorder = self._leave("a new tensor that is on no known path")
        recorder.adopt(func, args, kwargs, result, Kind.CREATE)
        return result

    def take(self, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Run a call of a known path."""
        call = node.call
        if self._shared:
            self._note_writes()
        try:
            result = node.taking(self, node, call, args, kwargs or {})
        except Differs:
            return MISS
        except Diverged as reason:
            return self._diverge(str(reason), call.function, args, kwargs or {})
        if self._shared:
            self._note_contents()
        if node.drops:
            self._graph.drop(self.run.values, node.drops)
        if self.choices is not None and call.kind is not Kind.CREATE:
            self.reached(node)
        return result

    def reached(self, node: Node) -> None:
        """Go on to a call."""
        self.run.keep()
        self.nodes.append(node)
        self.choices = node.choices
        if len(self.nodes) == self.diverge_at:
            self.choices = []

    def _compute(self, node: Node, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = self.run
        if call.kind is Kind.BACKWARD:
            self._check_leaves(call)
        if node.host:
            self._random[len(self.nodes)] = torch.default_generator.get_state()
            run.draw(node)
        if not all(bound.holds(run.values[bound.value]) for bound in call.bounds):
            raise Diverged("indices out of range")
        if node.segment is not None:
            self._run(node.segment)
        if call.waits:
            self._check_sizes(call)
        if call.asks:
            self._ask_sizes(call)
        self._promise(node)
        if call.kind is Kind.BACKWARD:
            for leaf, gradient in call.gradients:
                self._set(leaf, run.objects[gradient])
            return None
        return run.result(call.outputs)

    def _promise(self, node: Node) -> None:
        """Make the placeholders of a call."""
        run = self.run
        pool, node.pool = node.pool, None
        for position, (index, spec) in enumerate(node.made):
            made = pool[position] if pool is not None else placeholder(at(spec, run.numbers))
            run.objects[index] = made
            run.indices[id(made)] = index

    def _create(self, node: Node, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = self.run
        result = call.function(*args, **kwargs)
        assert self.choices is not None
        for sibling in [node, *(each for each in self.choices if each is not node)]:
            other = sibling.call
            if other.kind is not Kind.CREATE or other.function != call.function:
                continue
            if other.state == call.state and sibling.allows(run.numbers) and run.bind_new(other, result):
                self.reached(sibling)
                return result
            run.undo()
        recorder = self._leave("a new tensor with another shape or type")
        recorder.adopt(call.function, args, kwargs, result, Kind.CREATE)
        return result

    def _fetch(self, node: Node, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = self.run
        self._run(node.segment)
        given, named = rebuilt(call, run, functools.partial(run.real, specs=node.specs))
        with torch.no_grad():
            result = call.function(*given, **named)
        self._fetched[len(self.nodes)] = result
        if call.function in SHARING and isinstance(call.args[0], Variable):
            index = call.args[0].index
            self._shared[index] = run.real(index, node.specs)
        return result

    def _note_contents(self) -> None:
        """Note the contents of memory that other code may write, such as NumPy."""
        self._contents = {index: tensor.untyped_storage().clone() for index, tensor in self._shared.items()}

    def _note_writes(self) -> None:
        """Record writes of other code since the last call, so that a divergence can repeat them."""
        for index, tensor in self._shared.items():
            storage = tensor.untyped_storage()
            if not same_storage(storage, self._contents[index]):
                self._written.setdefault(len(self.nodes), []).append((index, storage.clone()))
        self._note_contents()

    def _state(self, node: Node, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return call.function(*args, **kwargs)

    def _set_gradient(self, node: Node, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves = call.args if call.function is clear_gradients else call.args[:1]
        value = None if call.function is clear_gradients else args[1]
        for leaf in leaves:
            self._set(leaf.index, value)

    def _set(self, leaf: int, gradient: Tensor | None) -> None:
        """Set the attribute ``grad`` of a leaf."""
        tensor = self.run.objects[leaf]
        if leaf not in self._gradients:
            self._gradients[leaf] = tensor.grad
        tensor.grad = gradient

    def _check_leaves(self, call: Call) -> None:
        """Check that leaves have gradients and hooks as when the path was recorded."""
        run = self.run
        accumulated = dict(call.accumulated)
        for leaf in {index for index, _ in call.gradients} | accumulated.keys():
            tensor = run.objects[leaf]
            if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
                raise Differs
            expected = accumulated.get(leaf)
            gradient = tensor.grad
            if gradient is None and expected is None:
                continue
            if gradient is None or not isinstance(expected, Variable):
                raise Differs
            if run.indices.get(id(gradient)) == expected.index:
                continue
            spec = call.specs.get(expected.index)
            if spec is None or not run.bind(expected.index, spec, gradient, unseen()):
                raise Differs

    def _check_sizes(self, call: Call) -> None:
        run = self.run
        for index, known in call.checked.items():
            value = run.values[index]
            found = (tuple(value.shape), value.stride(), value.storage_offset(), value.dtype)
            if not is_instance(known, found, run.numbers):
                raise Diverged("sizes that depend on data")

    def _ask_sizes(self, call: Call) -> None:
        """Find sizes of results by a run of the call on tensors without memory."""
        objects = self.run.objects
        args, kwargs = rebuilt(call, self.run, lambda index: without_memory(objects[index]))
        with torch.no_grad():
            result = call.function(*args, **kwargs)
        if not self.run.has_sizes(call, result):
            raise Diverged("sizes that do not follow from others")

    # -- segments --------------------------------------------------------------------------------------------

    def _run(self, segment: Segment, *, final: bool = False) -> None:
        """Begin the operations of a segment, and wait for what Python needs."""
        values, numbers = self.run.values, self.run.numbers
        saved = segment.saved_parts if final else len(segment.parts)
        can_take_back = True
        start, beside = time.perf_counter(), self._graph.seconds
        try:
            with running():
                for position, part in enumerate(segment.parts):
                    if position < saved:
                        self._save(part)
                    if isinstance(part, Piece) and part.beside and self.threaded:
                        self._graph.start(part, values, numbers)
                    else:
                        self._graph.take(values, part.inputs, part.touches, part.changes)
                        began = time.perf_counter()
                        can_take_back = position < saved
                        if isinstance(part, UpdatePiece):
                            part.run(values, numbers, self._updated)
                        else:
                            part.run(values, numbers)
                        self.outcome.graph_s += time.perf_counter() - began
                    self._graph.drop(values, part.drops)
                if segment.waits:
                    needs = segment.needs
                    self._graph.take(values, segment.reads, needs, needs if segment.shares else frozenset())
        except Exception as error:
            if not can_take_back:
                raise
            raise Diverged(f"{type(error).__name__} in an operation") from error
        finally:
            seconds = time.perf_counter() - start
            self.outcome.graph_s += self._graph.seconds - beside
            if segment.waits or not self.threaded:
                self.outcome.waiting_s += seconds
            self.outcome.segments.append((segment, seconds))

    def _save(self, part: Piece | UpdatePiece) -> None:
        """Save the memory that a part of a segment will write, so that a divergence can restore it."""
        for index in part.writes:
            tensor = self.run.objects[index]
            storage = tensor.untyped_storage()
            if storage._cdata not in self._undo:
                self._undo[storage._cdata] = (storage, storage.clone(), [])
            self._undo[storage._cdata][2].append((tensor, tensor._version))

    # -- divergence ------------------------------------------------------------------------------------------

    def _diverge(self, reason: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recorder = self._leave(reason)
        return recorder.call(func, args, kwargs, Kind.OPTIMIZER if func in _UPDATES else None)

    def _leave(self, reason: str) -> Recorder:
        """Take back what the iteration's segments changed, and run its calls so far as in eager mode."""
        nodes = self.nodes
        self._graph.stop()
        self._note_writes()
        site = call_site(sys._getframe(1))
        reason = FORCED if len(nodes) == self.diverge_at else reason
        self.outcome.divergence = (site[-1] if site else "?", reason)
        self.choices = None
        recorder = self.outcome.recorder = Recorder(saves=self._saves)
        state = thread_state()
        with without_modes():
            self._take_back()
            repeat(self.nodes, self.run, recorder, self._random, self._fetched, self._written)
        enter(state)
        self._record(recorder)
        return recorder

    def _take_back(self) -> None:
        """Undo what segments wrote to given tensors and gradients."""
        for storage, saved, tensors in self._undo.values():
            storage.copy_(saved)
            for tensor, version in reversed(tensors):
                torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))
        self._undo.clear()
        for leaf, gradient in self._gradients.items():
            self.run.objects[leaf].grad = gradient

    # -- end -------------------------------------------------------------------------------------------------

    def _finish(self, error: BaseException | None) -> None:
        run = self.run
        end = self.nodes[-1].end if self.nodes else None
        if error is not None or end is None or not end.ready:
            self._leave("an exception" if error is not None else "an end that is on no known path")
            return
        escaping = [
            index for node in self.nodes for index, _ in node.made if sys.getrefcount(run.objects[index]) > 2
        ]
        if any(index not in end.escaping for index in escaping):
            self._leave("a tensor that outlives the iteration")
            return
        try:
            self._run(end.segment, final=True)
        except Diverged as reason:
            self._leave(str(reason))
            return
        with torch.no_grad():
            self._hand_over(escaping, end)
        for node in self.nodes:
            node.pool = run.pooled(node)

    def _hand_over(self, escaping: list[int], end: End) -> None:
        """Turn placeholders into tensors, and write gradients."""
        run, specs = self.run, end.specs
        promised: list[tuple[Tensor, int]] = []
        for leaf in self._gradients:
            tensor = run.objects[leaf]
            gradient = tensor.grad
            index = run.indices.get(id(gradient)) if gradient is not None else None
            if index is not None and not specs[index].given:
                promised.append((tensor, index))
                tensor.grad = None
        for index in escaping:
            if not specs[index].given:
                real = run.values[specs[index].value].detach()
                run.redeem(index, spent(real, end.histories[index]) if index in end.histories else real)
        for tensor, index in promised:
            tensor.grad = run.objects[index] if index in escaping else run.values[specs[index].value].detach()


_UPDATES = {function for _, _, function in optimizer_functions()}
_TAKING: dict[Kind, Any] = {
    Kind.COMPUTE: Iteration._compute,
    Kind.BACKWARD: Iteration._compute,
    Kind.OPTIMIZER: Iteration._compute,
    Kind.CREATE: Iteration._create,
    Kind.FETCH: Iteration._fetch,
    Kind.STATE: Iteration._state,
    Kind.SET_GRADIENT: Iteration._set_gradient,
}
