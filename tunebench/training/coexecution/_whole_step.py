"""Steps that returned to eager mode: run their heads as one function each, if that is faster."""

from __future__ import annotations

import inspect
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from tunebench.training.coexecution._head_graph import HeadGraph, OperationRecorder, RepeatError, UnseenError
from tunebench.training.coexecution._head_tracing import traced

__all__ = ["WholeSteps"]

_SHARE = 0.15
"""Part of the time of all iterations that traces, records and checks may cost."""

_TRACE_S = 1.5
"""Time of the first trace in seconds, before one is measured. Source: seven programs, 0.2 to 1.0 s on a busy machine."""

_TRACES = 6
"""Number of traces after which a step whose traces do not stay valid is left as it is."""

_SEEN = 5
"""Number of iterations of eager mode whose operations are compared with those of traced heads."""

_TIMED = 24
"""Number of iterations of which times are compared."""

_WARM_UPS = 3
"""Number of replays that are not timed, because TorchScript prepares a function in the first."""

_LATER = 64
"""One of so many iterations runs as in eager mode after the decision."""


class WholeSteps:
    """A step whose head may run as one function.

    Attributes:
        runs: Number of iterations whose head ran as one function.
        reason: Why none does any more, or None.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._graphs: list[HeadGraph] = []
        self._optimizers: list[Optimizer] = []
        self._compiled: Callable[..., Any] | None = None
        self._traces_next = True
        self._observes_next = True
        self._seen: list[OperationRecorder] = []
        self._traces = 0
        self._observed = 0
        self._eager_s = 0.0
        self._cost_s = 0.0
        self._count = 0
        self._warmed = 0
        self._decided = False
        self._eager: deque[float] = deque(maxlen=_TIMED)
        self._replayed: deque[float] = deque(maxlen=_TIMED)

    @property
    def runs(self) -> int:
        """Return the number of iterations whose head ran as one function."""
        return sum(graph.replays for graph in self._graphs)

    def run(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an iteration."""
        if self.reason is not None:
            return step(*args, **kwargs)
        start = time.perf_counter()
        self._count += 1
        if self._compiled is None and not self._affords():
            return self._timed(step, args, kwargs, start)
        if self._compiled is None:
            self._prepare(step)
        if self.reason is not None or self._is_eager_turn():
            return self._timed(step, args, kwargs, start)
        if self._observes_next:
            return self._observe(step, args, kwargs)
        return self._run_compiled(step, args, kwargs, start)

    def _affords(self) -> bool:
        return _SHARE * self._eager_s > _TRACE_S

    def _prepare(self, step: Callable[..., Any]) -> None:
        function = getattr(step, "__func__", step)
        if not inspect.isfunction(function) or sys.gettrace() is not None:
            self.reason = "the step is no plain function"
            return
        try:
            self._compiled = traced(step, self._graph, self._optimizers, self._count_trace)
        except Exception as error:  # Dynamo may not support this version of Python
            self.reason = f"Dynamo cannot trace: {error}".split("\n")[0][:200]

    def _graph(self, module: torch.fx.GraphModule, examples: Any) -> HeadGraph:
        graph = HeadGraph(module, self._optimizers, self._seen)
        self._graphs.append(graph)
        return graph

    def _count_trace(self) -> None:
        self._traces += 1

    def _is_eager_turn(self) -> bool:
        return self._count % (_LATER if self._decided else 2) == 0 and self._warmed >= _WARM_UPS

    def _timed(self, step: Callable[..., Any], args: Any, kwargs: Any, start: float) -> Any:
        result = step(*args, **kwargs)
        seconds = time.perf_counter() - start
        self._eager_s += seconds
        self._eager.append(seconds)
        self._decide()
        return result

    def _observe(self, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run an iteration in eager mode, and compare its operations with those of the traced heads."""
        self._observed += 1
        self._observes_next = False
        recorder = OperationRecorder()
        start = time.perf_counter()
        with recorder:
            result = step(*args, **kwargs)
        recorder.release()
        if recorder.problem is None:
            self._seen.append(recorder)
        self._spent(time.perf_counter() - start)
        return result

    def _run_compiled(self, step: Callable[..., Any], args: Any, kwargs: Any, start: float) -> Any:
        replays, traces = self.runs, self._traces
        before = sum(graph.runs for graph in self._graphs)
        try:
            result = self._call(step, args, kwargs)
        except UnseenError:
            self._observes_next = self._traces_next = True
            if self._observed >= _SEEN:
                self.reason = "eager mode runs other operations than the traced head"
            return step(*args, **kwargs)
        except RepeatError as error:
            self.reason = f"the head of the step cannot run as one function: {error.__cause__ or error}"[:300]
            return step(*args, **kwargs)
        seconds = time.perf_counter() - start
        self._traces_next = sum(graph.runs for graph in self._graphs) == before
        if self.runs > replays:
            self._warmed += 1
            if self._warmed > _WARM_UPS:
                self._replayed.append(seconds)
                self._decide()
        else:
            self._spent(seconds)
            self._give_up(traced_now=self._traces > traces)
        return result

    def _call(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an iteration by a valid trace; without one, trace it if the last one had none either."""
        if self._traces_next:
            assert self._compiled is not None
            return self._compiled(*args, **kwargs)
        before = torch._C._dynamo.eval_frame.set_eval_frame(False)  # traces are used, but nothing is traced
        try:
            return step(*args, **kwargs)
        finally:
            torch._C._dynamo.eval_frame.set_eval_frame(before)

    def _spent(self, seconds: float) -> None:
        self._cost_s += seconds

    def _give_up(self, *, traced_now: bool) -> None:
        """Leave a step as it is whose heads do not run as one function."""
        reasons = [graph.reason for graph in self._graphs if graph.reason is not None]
        if self._traces and not self._graphs:
            self.reason = "Dynamo does not understand the step up to its backward pass"
        elif reasons and len(reasons) == len(self._graphs):
            self.reason = f"the head of the step cannot run as one function: {reasons[-1]}"
        elif self._traces > _TRACES:
            self.reason = f"the step was traced {self._traces} times, and no trace stays valid"
        elif not traced_now and self._cost_s > _SHARE * (self._eager_s + self._cost_s) + _TRACE_S:
            self.reason = "records and checks of the head cost more than they may"
        if self.reason is not None:
            self._release()

    def _decide(self) -> None:
        if len(self._eager) < _TIMED or len(self._replayed) < _TIMED:
            return
        eager_s, replayed_s = (sorted(times)[_TIMED // 4] for times in (self._eager, self._replayed))
        self._decided = True
        if replayed_s >= eager_s:
            self.reason = (
                f"its head as one function takes {replayed_s * 1e3:.2f} ms, eager mode {eager_s * 1e3:.2f} ms"
            )
            self._release()

    def _release(self) -> None:
        self._compiled = None
