"""`coexecute`: run whole iterations of a program beside a graph of their operations."""

from __future__ import annotations

import functools
import threading
import time
import types
from collections.abc import Callable
from typing import Any

from tunebench.errors import InputError
from tunebench.torch.coexecution._tracer import OperationTracer
from tunebench.torch.coexecution.report import CoexecutionReport
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
        self._iterations = 0
        self._traced_s = 0.0
        self._active: list[tuple[OperationTracer, float]] = []
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
            self._active.append((None, 0.0))  # type: ignore[arg-type]
            return self
        tracer = OperationTracer()
        _THREAD.active = self
        self._active.append((tracer, time.perf_counter()))
        tracer.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """End an iteration and merge its trace."""
        tracer, start = self._active.pop()
        if tracer is None:
            return
        tracer.__exit__(*error)
        _THREAD.active = None
        self._iterations += 1
        self._traced_s += time.perf_counter() - start
        self.graph.add(tracer.trace)

    def report(self) -> CoexecutionReport:
        """Return what happened so far."""
        return CoexecutionReport(
            iterations=self._iterations,
            traced=self._iterations,
            coexecuted=0,
            diverged=0,
            divergences=(),
            operations=len(self.graph.operations()),
            blocks=max(0, len(self.graph.blocks()) - 2),
            traced_s=self._traced_s,
        )


_THREAD = threading.local()
"""The co-execution that is active in a thread: a step within a step belongs to the outer one."""


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
