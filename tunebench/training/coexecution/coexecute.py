"""`coexecute`: run whole iterations of a program beside a graph of their operations."""

from __future__ import annotations

import functools
import inspect
import math
import sys
import time
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch.utils._python_dispatch import _len_torch_dispatch_stack

from tunebench.errors import InputError
from tunebench.training.coexecution import _testing
from tunebench.training.coexecution._head_compiled import Compiler
from tunebench.training.coexecution._head_record import active_recorder
from tunebench.training.coexecution._iteration import Iteration
from tunebench.training.coexecution._learning import learn, release, return_memory
from tunebench.training.coexecution._modes import eager_reason, settings
from tunebench.training.coexecution._optimizer_step import OptimizerSteps
from tunebench.training.coexecution._patching import THREAD, patch, unpatch
from tunebench.training.coexecution._path import PathTree
from tunebench.training.coexecution._policy import Mode, Policy
from tunebench.training.coexecution._recorder import Recorder
from tunebench.training.coexecution._update import Updates
from tunebench.training.coexecution._whole_step import WholeSteps
from tunebench.training.coexecution.analysis import StepAnalysis, analyzed
from tunebench.training.coexecution.coexecution_report import CoexecutionReport, Divergence, SegmentRuns
from tunebench.training.coexecution.picture import feed_sites, fetch_sites, segment_runners
from tunebench.training.coexecution.trace_graph import TraceGraph

__all__ = ["Coexecution", "coexecute"]

Backend = Literal["inductor"]
"""Who compiles heads of steps."""

_TOLERANCE = 1e-4
"""Largest difference of compiled results over the largest magnitude of a tensor.

Source: results and gradients of compiled heads in f32 (vae, music_transformer) differ by up to 4.2e-7.
"""

_SETTINGS = 4
"""Number of settings of torch whose paths are kept, those that were used last."""

_WATCHED = 64
"""Number of eager iterations of a step before any runs unwatched."""

_UNWATCHED = 31
"""Number of eager iterations in a row without recorded updates and heads that run unwatched.

Source: watching takes 16 us of an iteration of 200 us (toy_item), since its code is not in the caches.
"""


@dataclass(frozen=True, slots=True)
class _Sites:
    """What the report says of call sites, ``file:line``.

    Attributes:
        runners: Who runs their operations.
        fetches: Those at which Python reads values of tensors.
        feeds: Those at which Python makes tensors of other values.
    """

    runners: dict[str, str] = field(default_factory=dict)
    fetches: frozenset[str] = frozenset()
    feeds: frozenset[str] = frozenset()

    @classmethod
    def of(cls, tree: PathTree) -> _Sites:
        """Return the sites of known paths."""
        return cls(segment_runners(tree), fetch_sites(tree), feed_sites(tree))


class Coexecution:
    """A step whose iterations are co-executed: a decorator, a context manager, or a decorated function.

    Attributes:
        graph: The merged traces of its iterations.
        reads: Number of calls that read values in recorded iterations, by call site.
    """

    def __init__(
        self,
        step: Callable[..., Any] | None = None,
        mode: Mode = "auto",
        tolerance: float | None = None,
    ) -> None:
        self.graph = TraceGraph()
        self.reads = Counter[str]()
        self._step = step
        self._tree = PathTree()
        self._trees: dict[tuple[Any, ...], PathTree] = {}
        self._sites = _Sites()
        self._policy = Policy(mode)
        self._updates = Updates()
        self._optimizer_steps = OptimizerSteps(self._updates)
        self._tolerance = tolerance
        self._whole_steps = WholeSteps(None if tolerance is None else Compiler(tolerance=tolerance))
        self._segments: dict[tuple[str, str, int], tuple[int, float]] = {}
        self._counts = Counter[str]()
        self._times: dict[str, float] = dict.fromkeys(
            ("traced", "diverged", "coexecuted", "graph", "waiting"), 0.0
        )
        self._divergences = Counter[tuple[str, str]]()
        self._fallbacks = Counter[tuple[str, str]]()
        self._active: list[tuple[Iteration | None, float]] = []
        self._unwatched = 0
        patch()
        weakref.finalize(self, unpatch)
        weakref.finalize(self, self._whole_steps.traces.release)
        if step is not None:
            functools.update_wrapper(self, step)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run an iteration; without a step, decorate one instead."""
        if self._step is None:
            (step,) = args
            return Coexecution(_checked(step), self._policy.mode, self._tolerance)
        if self._unwatched:
            self._unwatched -= 1
            return self._step(*args, **kwargs)
        if (
            self._policy.reason is not None
            and not self._tree.paths
            and getattr(THREAD, "active", None) is None
        ):
            return self._called_eagerly(self._step, *args, **kwargs)
        with self:
            return self._step(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Bind to an instance, like a function."""
        return self if instance is None else types.MethodType(self, instance)

    def __reduce__(self) -> Any:
        """Return how to pickle it: the step, its mode and tolerance. What was recorded stays in this process.

        A decorated function is pickled by its name, like a function.
        """
        module = sys.modules.get(getattr(self, "__module__", None) or "")
        name = getattr(self, "__qualname__", "")
        if module is not None and getattr(module, name, None) is self:
            return name
        return Coexecution, (self._step, self._policy.mode, self._tolerance)

    def __enter__(self) -> Coexecution:
        """Begin an iteration."""
        if getattr(THREAD, "active", None) is not None:
            self._active.append((None, 0.0))
            return self
        if self._runs_eagerly():
            self._active.append((None, time.perf_counter()))
            THREAD.active = self
            return self
        self._tree = self._tree_of(settings())
        tree = self._tree if self._is_known() else None
        iteration = Iteration(
            tree,
            _testing.take(),
            threaded=self._policy.threaded(),
            updated=self._updates.run,
            saves=self._policy.mode != "report",
        )
        THREAD.active = iteration
        self._active.append((iteration, time.perf_counter()))
        iteration.begin()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """End an iteration."""
        iteration, start = self._active.pop()
        if iteration is None:
            if start:
                THREAD.active = None
                self._counts["eager"] += 1
                self._policy.add_eager(time.perf_counter() - start)
            return
        try:
            iteration.end(error)
        finally:
            THREAD.active = None
            self._account(iteration, time.perf_counter() - start)

    def _called_eagerly(self, step: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run an iteration of a step that returned to eager mode."""
        if _testing.is_forced():
            with self:
                return step(*args, **kwargs)
        THREAD.active = self
        self._counts["eager"] += 1
        try:
            if self._policy.has_memory:
                return self._whole_steps.run(step, args, kwargs)
            return step(*args, **kwargs)
        finally:
            THREAD.active = None
            if self._updates.are_over and self._counts["eager"] > _WATCHED:
                self._leave_unwatched()

    def _leave_unwatched(self) -> None:
        """Let the next iterations run without this object, unless their heads are to be traced or run."""
        if not self._policy.has_memory or self._whole_steps.skip(_UNWATCHED):
            self._unwatched = _UNWATCHED
            self._counts["eager"] += _UNWATCHED

    def update(self, function: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Handle a call of a function of an optimizer in an iteration that runs as without co-execution."""
        recorder = active_recorder()
        if recorder is not None:
            recorder.update(function, args, kwargs)
        elif self._policy.mode == "report":
            function(*args, **kwargs)
        else:
            self._updates.run(function, args, kwargs)

    def step_optimizer(self, optimizer: torch.optim.Optimizer, step: Callable[..., Any]) -> Any:
        """Handle a step of an optimizer, without arguments and hooks, in such an iteration."""
        return (
            step(optimizer) if self._policy.mode == "report" else self._optimizer_steps.run(optimizer, step)
        )

    def _runs_eagerly(self) -> bool:
        """Return whether the next iteration runs as without co-execution."""
        if _testing.is_forced():
            return False
        if self._policy.runs_eagerly():
            return True
        modes = torch.overrides._len_torch_function_stack() or _len_torch_dispatch_stack()
        reason = "another mode of torch is active" if modes else eager_reason()
        if reason is not None:
            self._fallbacks["?", reason] += 1
        return reason is not None

    def _tree_of(self, state: tuple[Any, ...]) -> PathTree:
        """Return the paths that were recorded with some settings of torch."""
        tree = self._trees.pop(state, None) or PathTree()
        self._trees[state] = tree
        if len(self._trees) > _SETTINGS:
            self._trees.pop(next(iter(self._trees))).forget(0)
        return tree

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
        began = time.perf_counter()
        self._times[outcome_is] += seconds
        self._times["graph"] += outcome.graph_s
        self._times["waiting"] += outcome.waiting_s
        for segment, segment_s in outcome.segments:
            key = segment.site, segment.runner, segment.operations
            runs, seconds_before = self._segments.get(key, (0, 0.0))
            self._segments[key] = runs + 1, seconds_before + segment_s
        if outcome.divergence is not None:
            self._divergences[outcome.divergence] += 1
        if recorder is None and outcome.path and outcome.path[-1].end is not None:
            self._tree.use(outcome.path[-1].end)
        if recorder is not None:
            self._learn(recorder)
        self._policy.add(
            seconds,
            known=recorder is None,
            threaded=iteration.threaded,
            learning_s=time.perf_counter() - began,
        )
        if self._policy.reason is not None and self._tree.paths and not _testing.is_forced():
            self._sites = _Sites.of(self._tree)
            self._trees.clear()
            release(self._tree)

    def _learn(self, recorder: Recorder) -> None:
        """Learn the path of a record, unless the step is only reported."""
        self.graph.add(recorder.trace)
        self.reads.update(recorder.reads)
        reason = recorder.problem if self._policy.mode == "report" else learn(self._tree, recorder)
        if reason is not None:
            self._fallbacks[reason[1], reason[0]] += 1
            if not self.ready_paths() and not _testing.is_forced():
                self._policy.refuse(*reason)
        recorder.release()
        return_memory(recorder)

    def counts(self) -> dict[str, int]:
        """Return the number of iterations by outcome: ``traced``, ``diverged``, ``coexecuted``, ``eager``."""
        counts = {outcome: self._counts[outcome] for outcome in ("traced", "diverged", "coexecuted", "eager")}
        return counts | {"eager": counts["eager"] - self._unwatched}

    def ready_paths(self) -> int:
        """Return the number of paths that can be co-executed."""
        return sum(end.ready for _, end in self._tree.paths)

    def report(self) -> CoexecutionReport:
        """Return what happened so far."""
        sites = _Sites.of(self._tree) if self._tree.paths else self._sites
        counts = self.counts()
        compiler = self._whole_steps.compiler
        return CoexecutionReport(
            iterations=sum(counts.values()),
            traced=counts["traced"],
            coexecuted=counts["coexecuted"],
            diverged=counts["diverged"],
            divergences=_listed(self._divergences),
            fallbacks=_listed(self._fallbacks),
            eager=counts["eager"],
            returned=self._policy.reason,
            updates=self._updates.runs,
            heads=self._whole_steps.runs,
            plain_heads=self._whole_steps.reason,
            compiled_heads=compiler.runs if compiler is not None else 0,
            compile_s=compiler.seconds if compiler is not None else 0.0,
            exact_heads=compiler.reason if compiler is not None else None,
            plain_updates=dict(self._updates.reasons),
            operations=len(self.graph.operations()),
            blocks=max(0, len(self.graph.blocks()) - 2),
            traced_s=self._times["traced"],
            coexecuted_s=self._times["coexecuted"],
            graph_s=self._times["graph"],
            graph=TraceGraph(set(self.graph.edges)),
            runners=sites.runners,
            fetches=sites.fetches,
            feeds=sites.feeds,
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


def _checked(step: Any) -> Callable[..., Any]:
    if not callable(step):
        raise InputError(f"coexecute expects a function that runs one iteration, got {type(step).__name__}")
    body = inspect.unwrap(step.func if isinstance(step, functools.partial) else step)
    for function in (body, type(body).__call__):
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise InputError("coexecute expects a function that runs one iteration, got an async function")
        if inspect.isgeneratorfunction(function):
            raise InputError("coexecute expects a function that runs one iteration, got a generator function")
    checked: Callable[..., Any] = step
    return checked


class _Coexecute:
    """The type of `coexecute`, whose attribute `report` is a function."""

    def __call__(
        self,
        step: Callable[..., Any] | None = None,
        *,
        mode: Mode = "auto",
        backend: Backend | None = None,
        tolerance: float | None = None,
    ) -> Coexecution:
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
            mode: Which iterations are co-executed. ``auto``: those of steps that become faster; what is
                recorded, checked and taken back costs at most 15 % of the time of all iterations. ``always``:
                all whose path is known, from the first record on, for tests. ``report``: none; some are
                recorded for the report.
            backend: What runs the head of a step that returned to eager mode. None: recorded operations,
                with the bits of eager mode. ``inductor``: code compiled by TorchInductor, if its results are
                within the tolerance and it is faster than recorded operations. It compiles for seconds to
                minutes.
            tolerance: Largest difference of compiled results over the largest magnitude of a tensor, in the
                replays on copies that check it; 1e-4 by default. Only with a backend.

        Raises:
            InputError: The step is not callable, there is no such mode or backend, or the tolerance is not a
                positive number, or has no backend.
        """
        if mode not in get_args(Mode):
            raise InputError(f"expected a mode, one of {', '.join(get_args(Mode))}; got {mode!r}")
        if backend is None and tolerance is not None:
            raise InputError('a tolerance needs a backend that rounds, such as backend="inductor"')
        if backend is not None:
            if backend not in get_args(Backend):
                raise InputError(
                    f"expected a backend, one of {', '.join(get_args(Backend))}; got {backend!r}"
                )
            tolerance = _TOLERANCE if tolerance is None else tolerance
            if not 0 < tolerance < math.inf:
                raise InputError(f"expected a positive tolerance, got {tolerance!r}")
        return Coexecution(_checked(step) if step is not None else None, mode, tolerance)

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

    def analyze(self, step: Callable[..., Any], batches: Iterable[Any]) -> StepAnalysis:
        """Return where the Python of a step waits, and what co-execution or a fused update would gain.

        The step runs once for each batch and trains as without analysis: every other step is recorded or
        co-executed, with eager mode's results. Updates are timed on copies of parameters.

            print(coexecute.analyze(step, batches))

        Args:
            step: A function that runs one iteration and is not co-executed.
            batches: Its arguments, a tuple for each step; other values are a single argument. About 40 steps
                give stable medians.

        Raises:
            InputError: The step is not callable, or there are fewer than four batches.
        """
        return analyzed(Coexecution(_checked(step), "always"), step, batches)


coexecute = _Coexecute()
