"""Steps that returned to eager mode: run their heads as one function each, if that is faster."""

from __future__ import annotations

import inspect
import itertools
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

import torch
from torch.optim import Optimizer

from tunebench.training.coexecution._head_compiled import Compiler
from tunebench.training.coexecution._head_copies import RepeatError
from tunebench.training.coexecution._head_graph import HeadGraph, UnconfirmedError
from tunebench.training.coexecution._head_guards import HeadGuards, guards_hold, head_guards
from tunebench.training.coexecution._head_plan import NUMBER_DECIDES
from tunebench.training.coexecution._head_reads import DecidedOtherwiseError, Ways
from tunebench.training.coexecution._head_record import OperationRecorder
from tunebench.training.coexecution._head_start import Start, cut, starts
from tunebench.training.coexecution._head_tracing import Method, traced
from tunebench.training.coexecution._memory import return_freed_memory

__all__ = ["WholeSteps"]

_SHARE = 0.15
"""Part of the time of all iterations that traces, records and checks may cost."""

_TRACE_S = 1.5
"""Time of a trace in seconds, before one is measured.

Source: seven programs, 0.2 to 1.0 s on a busy machine.
"""

_TRACES = 24
"""Number of traces of a step, each for one set of sizes and values that Python looks at."""

_FIXED_TRACES = 2
"""Number of traces for one set of sizes each, before sizes that changed become symbols.

Two, because the last batch of an epoch is often smaller: a head of fixed sizes is proven and compiled.
"""

_TRIES = 8
"""Number of traces after which a step is left as it is if less than every fourth one was valid again."""

_STARTS = 5
"""Number of statements, after the first, at which heads may begin that are tried."""

_WASTED = 48
"""Number of iterations whose head is traced, recorded, checked or cannot run before a step is left as it is.

One more for four that run.
"""

_SETTLING = 6
"""Number of iterations more for each trace: a trace, two records, a plan and two checks."""

_BLOCK = 8
"""Number of iterations of one kind that are timed in turn: the first one finds caches of the other kind."""

_TIMED = 24
"""Number of iterations of which times are compared."""

_WARM_UPS = 3
"""Number of replays that are not timed, because TorchScript prepares a function in the first."""

_LATER = 64
"""One of so many blocks of iterations runs as in eager mode after the decision."""

_PROOFS, _PROOF_RUNS = 8, 32
"""Guards are prepared for the objects of a step so many times, and once more for so many runs by them."""

_CHANGING = 8
"""Number of dictionaries at most that change from step to step, and runs within which they first do."""

_GAIN = 0.97
"""Time of iterations with heads over eager mode's up to which heads are used."""


class Traces:
    """Traced heads of a step. Dynamo keeps them for as long as its code exists, and with them parameters."""

    def __init__(self) -> None:
        self._graphs: weakref.WeakSet[HeadGraph] = weakref.WeakSet()

    def add(self, graph: HeadGraph) -> None:
        """Add a head."""
        self._graphs.add(graph)

    def release(self) -> None:
        """Release what the heads hold. Dynamo's cache stays: this may run while Dynamo traces."""
        for graph in list(self._graphs):
            graph.release()


class WholeSteps:
    """A step whose head may run as one function.

    Attributes:
        compiler: How heads are compiled, or None.
        reason: Why none does any more, or None.
    """

    def __init__(self, compiler: Compiler | None = None) -> None:
        self.compiler = compiler
        self.reason: str | None = None
        self.traces = Traces()
        self._graphs: list[HeadGraph] = []
        self._earlier_runs = 0
        self._optimizers: list[Optimizer] = []
        self._compiled: Callable[..., Any] | None = None
        self._callback: Any = None
        self._with_updates = True
        self._fixed_numbers = False
        self._code: CodeType | None = None
        self._methods: list[Method] = []
        self._starts: list[Start] | None = None
        self._guards: dict[int, HeadGuards] = {}  # by way
        self._ways = Ways()
        self._proofs = self._proven_runs = 0
        self._changing: set[int] = set()
        self._before: Callable[..., Any] | None = None
        self._body: FunctionType | None = None
        self._line = 0
        self._cuts = 0
        self._problems: list[str] = []
        self._traces = 0
        self._lacks_trace = True
        self._asks = False
        self._total_s = 0.0
        self._cost_s = 0.0
        self._trace_s = _TRACE_S
        self._count = 0
        self._wasted = 0
        self._warmed = 0
        self._decided = False
        self._eager: deque[float] = deque(maxlen=_TIMED)
        self._replayed: deque[float] = deque(maxlen=_TIMED)
        self._lost: deque[float] = deque(maxlen=4 * _TIMED)

    @property
    def runs(self) -> int:
        """Return the number of iterations whose head ran as one function."""
        return self._earlier_runs + self._current_runs()

    def _current_runs(self) -> int:
        """Return the number of these iterations with the heads that were traced last."""
        return sum(graph.replays for graph in self._graphs)

    def run(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an iteration."""
        if self.reason is not None:
            return step(*args, **kwargs)
        start = time.perf_counter()
        self._count += 1
        if self._compiled is None and self._affords():
            self._prepare(step)
        if self._compiled is None or self._is_eager_turn():
            result = step(*args, **kwargs)
            self._eager.append(time.perf_counter() - start)
        else:
            result = self._run_compiled(step, args, kwargs, start)
        self._total_s += time.perf_counter() - start
        self._decide()
        return result

    def skip(self, iterations: int) -> bool:
        """Return whether the next iterations run as in eager mode, and count their time as that of the last.

        Args:
            iterations: Number of iterations, which are not run by this object.
        """
        if self.reason is None:
            if self._compiled is not None or not self._eager or self._affords():
                return False
            self._total_s += iterations * self._eager[-1]
        return True

    def _affords(self) -> bool:
        """Return whether the next iteration may trace."""
        return self._traces < _TRACES and self._cost_s + self._trace_s <= _SHARE * self._total_s

    def _prepare(self, step: Callable[..., Any]) -> None:
        function = getattr(step, "__func__", step)
        if not inspect.isfunction(function) or sys.gettrace() is not None:
            self.reason = "the step is no plain function"
            return
        body = self._body or step
        try:
            if self._starts is None:
                self._starts = starts(function.__code__)
            self._code = getattr(body, "__func__", body).__code__
            self._compiled, self._callback = traced(
                body,
                _weakly(self._graph),  # Dynamo holds it for good
                self._optimizers,
                self._methods,
                self._set_line,
                self._count_trace,
                with_updates=self._with_updates,
                fixed_numbers=self._fixed_numbers,
                fixed_sizes=_weakly(self._has_fixed_sizes),
                ways=self._ways,
            )
        except Exception as error:  # Dynamo may not support this version of Python
            self.reason = f"Dynamo cannot trace: {error}".split("\n")[0][:200]

    def _graph(self, module: torch.fx.GraphModule, examples: Any) -> HeadGraph:
        graph = HeadGraph(module, self._optimizers, tuple(self._methods), self._ways, self.compiler)
        self._graphs.append(graph)
        self.traces.add(graph)
        return graph

    def _count_trace(self) -> None:
        self._traces += 1

    def _has_fixed_sizes(self) -> bool:
        """Return whether the next trace is for one set of sizes."""
        return self._traces <= _FIXED_TRACES

    def _set_line(self, line: int) -> None:
        self._line = line

    def _is_eager_turn(self) -> bool:
        block = self._count // _BLOCK
        return self._warmed >= _WARM_UPS and block % (_LATER if self._decided else 2) == 0

    def _run_compiled(self, step: Callable[..., Any], args: Any, kwargs: Any, start: float) -> Any:
        """Run an iteration whose head may run as one function."""
        replays, traces, self._asks = self.runs, self._traces, False
        ran = sum(graph.runs for graph in self._graphs)
        if self._before is None:
            result = self._run_head(step, args, kwargs)
        else:
            bound = (step.__self__,) if inspect.ismethod(step) else ()
            result = self._before(*bound, *args, **kwargs)
        seconds = time.perf_counter() - start
        if self._traces > traces:
            self._lacks_trace = False
        elif sum(graph.runs for graph in self._graphs) == ran:
            self._lacks_trace = True
        if self.runs > replays:
            if not all(graph.is_settled for graph in self._graphs):
                return result
            self._warmed += 1
            if self._warmed > _WARM_UPS:
                self._replayed.append(seconds)
                self._lost.append(0.0)
            return result
        if self._ways.is_missed and self._eager:
            self._lost.append(seconds - min(self._eager))
        if self._asks or self._traces > traces or sum(graph.runs for graph in self._graphs) > ran:
            self._cost_s += seconds - (min(self._eager) if self._eager else 0.0)
            if self._traces > traces:
                self._trace_s = seconds
            self._wasted += 1
            self._give_up(step)
        return result

    def _run_rest(self, *args: Any) -> Any:
        """Run the statements from the head on."""
        assert self._body is not None
        return self._run_head(self._body, args, {})

    def _run_head(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run what begins with the head."""
        self._ways.begin()
        turns = True
        while turns:
            try:
                result = self._call(step, args, kwargs)
                self._ways.end(is_taken=True)
                return result
            except DecidedOtherwiseError as error:
                unconfirmed = None
                turns = self._ways.turn(error, self._graphs)
                if not turns and self._affords():
                    turns = self._lacks_trace = self._ways.add(error)
            except RepeatError as error:
                unconfirmed = error.graph if isinstance(error, UnconfirmedError) else None
                turns = False
        self._ways.end(is_taken=False)
        return self._repeat(unconfirmed, step, args, kwargs)

    def _call(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an iteration by a valid trace; without one, trace it if that is affordable."""
        if not self._traces:
            assert self._compiled is not None
            self._asks = True
            return self._compiled(*args, **kwargs)
        if not kwargs:
            values = (step.__self__, *args) if inspect.ismethod(step) else args
            guards = self._proven(getattr(step, "__func__", step), values)
            if guards is not None:
                return self._run_proven(guards, values)
        # Without a callback, traces are used, but nothing is traced. A callback is asked about each function
        # that the step calls, also after its head, so it waits for an iteration without a valid trace.
        self._asks = self._lacks_trace and self._affords()
        callback = self._callback if self._asks else False
        before = torch._C._dynamo.eval_frame.set_eval_frame(callback)
        try:
            return step(*args, **kwargs)
        finally:
            torch._C._dynamo.eval_frame.set_eval_frame(before)

    def _proven(self, function: Callable[..., Any], values: tuple[Any, ...]) -> HeadGuards | None:
        """Return guards that hold for the arguments of a function and that need no search, or None."""
        way = self._ways.current
        guards = self._guards.get(way)
        if guards is not None:
            if guards.hold(function, values):
                return guards
            changed = guards.changed()
            if guards.hits <= _CHANGING and len(changed) <= _CHANGING:
                self._changing |= changed
            del self._guards[way]
        if self._proofs >= _PROOFS + self._proven_runs // _PROOF_RUNS or not any(
            graph.is_ready for graph in self._graphs
        ):
            return None
        entries = torch._dynamo.eval_frame._debug_get_cache_entry_list(function.__code__)
        present = [entry for entry in entries if entry.code is not None]  # the guarded object is not freed
        valid = (entry for entry in present if guards_hold(entry, function, values))
        for entry in itertools.islice(valid, 1):
            heads = [function.__globals__.get(name) for name in entry.code.co_names]
            for graph in [graph for graph in self._graphs if any(graph is head for head in heads)]:
                if graph.is_ready and graph.has_methods():
                    self._proofs += 1
                    proof = head_guards(entry, function, values, graph, self._changing)
                    if proof is not None:
                        self._guards[way] = proof
        return self._guards.get(way)

    def _run_proven(self, guards: HeadGuards, values: tuple[Any, ...]) -> Any:
        """Run an iteration by guards that hold."""
        before = torch._C._dynamo.eval_frame.set_eval_frame(None)
        guards.graph.proof = guards
        self._proven_runs += 1
        try:
            return guards.run(values)
        finally:
            guards.graph.proof = None
            torch._C._dynamo.eval_frame.set_eval_frame(before)

    def _repeat(self, unconfirmed: HeadGraph | None, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run an iteration in eager mode, and compare its operations with those of a head."""
        if unconfirmed is None:
            return step(*args, **kwargs)
        recorder = OperationRecorder()
        try:
            with recorder:
                return step(*args, **kwargs)
        finally:
            recorder.release()
            unconfirmed.confirm(recorder)

    def _give_up(self, step: Callable[..., Any]) -> None:
        """Let heads begin or end elsewhere that do not run as one function, or leave the step as it is."""
        if not self._fixed_numbers and any(graph.reason == NUMBER_DECIDES for graph in self._graphs):
            self._release()
            self._fixed_numbers = True
            self._forget(with_updates=self._with_updates)
            return
        reason = self._problem()
        if reason is None:
            return
        self._problems.append(reason)
        has_backward = any(graph.has_backward for graph in self._graphs)
        has_memory = not any(graph.lacks_memory for graph in self._graphs)
        are_refused = has_backward and all(graph.reason for graph in self._graphs)
        self._release()
        if are_refused and self._with_updates:
            self._forget(with_updates=False)
        elif not has_backward and self._ways.are_read and not self._ways.are_traced:
            self._ways.are_traced = True
            self._forget(with_updates=True)
        elif has_memory and self._begin_later(
            getattr(step, "__func__", step), 0 if has_backward else self._line
        ):
            self._forget(with_updates=True)
        else:
            self.reason = self._problems[0]

    def _problem(self) -> str | None:
        """Return why heads do not run as one function, or None."""
        reasons = [graph.reason for graph in self._graphs if graph.reason is not None]
        if self._traces and not self._graphs:
            return "Dynamo does not understand the step up to its backward pass"
        if reasons and len(reasons) == len(self._graphs):
            return f"the head of the step cannot run as one function: {reasons[-1]}"
        runs = self._current_runs()
        if self._traces >= _TRIES and 4 * sum(graph.runs for graph in self._graphs) < 5 * self._traces:
            return f"the step was traced {self._traces} times, and no trace stays valid"
        if self._wasted > _WASTED + _SETTLING * len(self._graphs) + runs // 4:
            misfits = [graph.misfit for graph in self._graphs if graph.misfit is not None]
            problems = reasons + misfits or ["no trace of it stays valid"]
            return f"the head of the step seldom runs as one function: {problems[-1]}"
        return None

    def _forget(self, *, with_updates: bool) -> None:
        """Forget heads, to trace others."""
        self._earlier_runs = self.runs
        self._graphs = []
        self._with_updates = with_updates
        self._traces = self._wasted = 0

    def _begin_later(self, function: Callable[..., Any], line: int) -> bool:
        """Let heads begin at the next statement after a line, and return whether there is one."""
        later = self._starts or []
        while later and later[0].line <= line:
            later.pop(0)
        if not later or self._cuts == _STARTS:
            return False
        self._cuts += 1
        self._before, self._body = cut(function, later.pop(0), _weakly(self._run_rest))
        return True

    def _decide(self) -> None:
        """Leave a step as it is that does not become faster."""
        are_timed = len(self._eager) == len(self._replayed) == _TIMED
        if self.reason is not None or not are_timed or self._count % _BLOCK:
            return
        eager_s, replayed_s = (sorted(times)[_TIMED // 4] for times in (self._eager, self._replayed))
        replayed_s += sum(self._lost) / len(self._lost)  # by iterations whose values decided otherwise
        self._decided = True
        if replayed_s > _GAIN * eager_s:
            self.reason = (
                f"with its head as one function it takes {replayed_s * 1e3:.2f} ms, "
                f"in eager mode {eager_s * 1e3:.2f} ms"
            )
            self._release()

    def _release(self) -> None:
        """Release traces, their guards, and records."""
        for graph in self._graphs:
            graph.release()
        if self._code is not None:
            torch._C._dynamo.eval_frame.reset_code(self._code)
        self._compiled = self._callback = self._code = None
        self._guards.clear()
        self._ways.forget()
        return_freed_memory()


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a method of an object that it does not hold."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        bound = reference()
        assert bound is not None
        return bound(*args)

    return call
