"""`coexecute`: run whole iterations of a program beside a graph of their operations."""

from __future__ import annotations

import functools
import threading
import time
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import _len_torch_dispatch_stack

from tunebench.errors import InputError
from tunebench.torch.coexecution import _testing
from tunebench.torch.coexecution._function import optimizer_classes, optimizer_functions
from tunebench.torch.coexecution._iteration import Iteration
from tunebench.torch.coexecution._learning import learn
from tunebench.torch.coexecution._path import PathTree
from tunebench.torch.coexecution._policy import Policy
from tunebench.torch.coexecution.picture import feed_sites, fetch_sites, segment_runners
from tunebench.torch.coexecution.report import CoexecutionReport, Divergence, SegmentRuns
from tunebench.torch.coexecution.trace_graph import TraceGraph

__all__ = ["Coexecution", "coexecute"]


class Coexecution:
    """A step whose iterations are co-executed: a decorator, a context manager, or a decorated function.

    Attributes:
        graph: The merged traces of its iterations.
    """

    def __init__(self, step: Callable[..., Any] | None = None) -> None:
        self.graph = TraceGraph()
        self._step = step
        self._tree = PathTree()
        self._policy = Policy()
        self._segments: dict[tuple[str, str, int], list[Any]] = {}
        self._counts = Counter[str]()
        self._times: dict[str, float] = dict.fromkeys(
            ("traced", "diverged", "coexecuted", "graph", "waiting"), 0.0
        )
        self._divergences = Counter[tuple[str, str]]()
        self._fallbacks = Counter[tuple[str, str]]()
        self._active: list[tuple[Iteration | None, float]] = []
        _patch()
        weakref.finalize(self, _unpatch)
        if step is not None:
            functools.update_wrapper(self, step)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run an iteration; without a step, decorate one instead."""
        if self._step is None:
            (step,) = args
            return Coexecution(_checked(step))
        with self:
            return self._step(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Bind to an instance, like a function."""
        return self if instance is None else types.MethodType(self, instance)

    def __enter__(self) -> Coexecution:
        """Begin an iteration."""
        if getattr(_THREAD, "active", None) is not None:
            self._active.append((None, 0.0))
            return self
        if self._runs_eagerly():
            self._active.append((None, time.perf_counter()))
            _THREAD.active = self
            return self
        tree = self._tree if self._is_known() else None
        iteration = Iteration(tree, _testing.take(), threaded=self._policy.threaded())
        _THREAD.active = iteration
        self._active.append((iteration, time.perf_counter()))
        iteration.begin()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """End an iteration."""
        iteration, start = self._active.pop()
        if iteration is None:
            if start:
                _THREAD.active = None
                self._counts["eager"] += 1
                self._policy.add_eager(time.perf_counter() - start)
            return
        try:
            iteration.end(error)
        finally:
            _THREAD.active = None
            self._account(iteration, time.perf_counter() - start)

    def _runs_eagerly(self) -> bool:
        """Return whether the next iteration runs as without co-execution."""
        if _testing.is_forced():
            return False
        if torch.overrides._len_torch_function_stack() or _len_torch_dispatch_stack():
            self._fallbacks["?", "another mode of torch is active"] += 1
            return True
        return self._policy.runs_eagerly()

    def _is_known(self) -> bool:
        return bool(self._tree.root.choices)

    def _account(self, iteration: Iteration, seconds: float) -> None:
        """Count an iteration, and learn from its record."""
        outcome = iteration.outcome
        recorder = outcome.recorder
        outcome_is = (
            "coexecuted" if recorder is None else "traced" if outcome.divergence is None else "diverged"
        )
        self._counts[outcome_is] += 1
        self._policy.add(seconds, known=recorder is None, threaded=iteration.threaded)
        self._times[outcome_is] += seconds
        self._times["graph"] += outcome.graph_s
        self._times["waiting"] += outcome.waiting_s
        for segment, segment_s in outcome.segments:
            runs = self._segments.setdefault((segment.site, segment.runner, segment.operations), [0, 0.0])
            runs[0] += 1
            runs[1] += segment_s
        if outcome.divergence is not None:
            self._divergences[outcome.divergence] += 1
        if recorder is None and outcome.path and outcome.path[-1].end is not None:
            self._tree.use(outcome.path[-1].end)
        if recorder is not None:
            self.graph.add(recorder.trace)
            reason = learn(self._tree, recorder)
            if reason is not None:
                self._fallbacks[reason[1], reason[0]] += 1
            recorder.release()

    def report(self) -> CoexecutionReport:
        """Return what happened so far."""
        return CoexecutionReport(
            iterations=self._counts.total(),
            traced=self._counts["traced"],
            coexecuted=self._counts["coexecuted"],
            diverged=self._counts["diverged"],
            divergences=_listed(self._divergences),
            fallbacks=_listed(self._fallbacks),
            eager=self._counts["eager"],
            returned=self._policy.reason,
            operations=len(self.graph.operations()),
            blocks=max(0, len(self.graph.blocks()) - 2),
            traced_s=self._times["traced"],
            coexecuted_s=self._times["coexecuted"],
            graph_s=self._times["graph"],
            graph=TraceGraph(set(self.graph.edges)),
            runners=segment_runners(self._tree),
            fetches=fetch_sites(self._tree),
            feeds=feed_sites(self._tree),
            waiting_s=self._times["waiting"],
            segments=tuple(
                SegmentRuns(site=site, runner=runner, operations=operations, runs=runs, seconds=seconds)
                for (site, runner, operations), (runs, seconds) in sorted(
                    self._segments.items(), key=lambda each: -each[1][1]
                )
            ),
        )


def _listed(places: Counter[tuple[str, str]]) -> tuple[Divergence, ...]:
    return tuple(
        Divergence(site=site, reason=reason, count=count)
        for (site, reason), count in sorted(places.items(), key=lambda each: (-each[1], each[0]))
    )


_THREAD = threading.local()
"""The co-execution that is active in a thread: a step within a step belongs to the outer one."""


_PATCHES: list[tuple[Any, str, Any, Any]] = []
"""Modules and classes of torch, names in them, the functions, and functions that iterations see."""

_LOCK = threading.Lock()
_USERS = [0]


def _patch() -> None:
    """Make functions that torch shows to no mode visible to iterations while a co-execution exists."""
    with _LOCK:
        _USERS[0] += 1
        if _USERS[0] > 1:
            return
        if not _PATCHES:
            _PATCHES.extend(_patches())
        for owner, name, _, visible in _PATCHES:
            setattr(owner, name, visible)
        torch.Tensor._make_subclass = _make_subclass


def _unpatch() -> None:
    with _LOCK:
        _USERS[0] -= 1
        if _USERS[0] == 0:
            for owner, name, function, _ in _PATCHES:
                setattr(owner, name, function)
            del torch.Tensor._make_subclass


def _patches() -> Iterator[tuple[Any, str, Any, Any]]:
    for module, name, function in optimizer_functions():
        yield module, name, function, _visible(function)
    for owner in optimizer_classes():
        if not getattr(owner.step, "hooked", False):  # as torch does for the first optimizer of the class
            owner.step = torch.optim.Optimizer.profile_hook_step(owner.step)
            owner.step.hooked = True
        yield owner, "step", owner.step, _native(owner.step, makes_states=owner is not torch.optim.SGD)
    optimizer = torch.optim.Optimizer
    yield optimizer, "zero_grad", optimizer.zero_grad, _clearing(optimizer.zero_grad)


def _active() -> Iteration | None:
    """Return the iteration of this thread that handles calls of torch, if there is one."""
    iteration = getattr(_THREAD, "active", None)
    return iteration if isinstance(iteration, Iteration) else None


_MAKE_SUBCLASS = torch.Tensor._make_subclass


def _make_subclass(*args: Any, **kwargs: Any) -> Any:
    """Construct a tensor of another class, such as a parameter."""
    iteration = _active()
    if iteration is None:
        return _MAKE_SUBCLASS(*args, **kwargs)
    return iteration.construct(_MAKE_SUBCLASS, args, kwargs)


def _visible(function: Any) -> Any:
    """Return a function that updates parameters, as iterations see it."""

    @functools.wraps(function)
    def update(*args: Any, **kwargs: Any) -> Any:
        iteration = _active()
        if iteration is None:
            return function(*args, **kwargs)
        return iteration.update(function, args, kwargs)

    return update


def _native(step: Any, *, makes_states: bool) -> Any:
    """Return the step of an optimizer that reads attributes without a call of the mode for each.

    Its function that updates parameters is still a call of the iteration.

    Args:
        step: The method.
        makes_states: Whether its first call makes states of parameters.
    """

    @functools.wraps(step)
    def stepped(self: Any, *args: Any, **kwargs: Any) -> Any:
        runs_others = args or kwargs or any(map(len, _hooks(self)))
        if _active() is None or runs_others or (makes_states and not _has_states(self)):
            return step(self, *args, **kwargs)
        with torch._C.DisableTorchFunction():
            return step(self)

    return stepped


def _hooks(optimizer: Any) -> tuple[Any, ...]:
    return (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
    )


def _has_states(optimizer: Any) -> bool:
    state = optimizer.state
    return all(state.get(each) for group in optimizer.param_groups for each in group["params"])


def _clearing(zero_grad: Any) -> Any:
    """Return ``zero_grad`` of optimizers as one call of an iteration."""

    @functools.wraps(zero_grad)
    def cleared(self: Any, set_to_none: bool = True) -> None:
        iteration = _active()
        if iteration is None or not set_to_none:
            return zero_grad(self, set_to_none)
        with torch._C.DisableTorchFunction():
            leaves = [
                each for group in self.param_groups for each in group["params"] if each.grad is not None
            ]
            iteration.clear_gradients(leaves)
        return None

    return cleared


def _checked(step: Any) -> Callable[..., Any]:
    if not callable(step):
        raise InputError(f"coexecute expects a function that runs one iteration, got {type(step).__name__}")
    checked: Callable[..., Any] = step
    return checked


class _Coexecute:
    """The type of `coexecute`, whose attribute `report` is a function."""

    def __call__(self, step: Callable[..., Any] | None = None) -> Coexecution:
        """Return a step whose iterations are co-executed.

        The step is a whole iteration: forward, loss, backward, optimizer, metrics, and any other Python. It
        gives the results and side effects of eager mode.

            @coexecute
            def step(batch): ...

            step(batch)
            print(coexecute.report(step))

            iteration = coexecute()
            for batch in batches:
                with iteration:
                    ...
            print(coexecute.report(iteration))

        Args:
            step: A function or method that runs one iteration. Without it, the result is a decorator and a
                context manager, one iteration per use.

        Raises:
            InputError: The step is not callable.
        """
        return Coexecution(_checked(step) if step is not None else None)

    def report(self, step: Any) -> CoexecutionReport:
        """Return what happened in the iterations of a co-executed step.

        Args:
            step: What `coexecute` returned, or a bound method that it decorates.

        Raises:
            InputError: The step is not co-executed.
        """
        found = getattr(step, "__func__", step)
        if not isinstance(found, Coexecution):
            raise InputError(
                f"expected a step decorated by coexecute, got {type(step).__name__}; add @coexecute"
            )
        return found.report()


coexecute = _Coexecute()
