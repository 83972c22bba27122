"""What happened in the iterations of a co-executed step."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tunebench.training.coexecution.picture import trace_graph_svg
from tunebench.training.coexecution.trace_graph import TraceGraph

__all__ = ["CoexecutionReport", "Divergence", "SegmentRuns", "advice"]

_ADVICE = {
    "saved-tensor hooks": "use checkpoint only where memory needs it",
    "hooks": "remove the hooks, or do their work after the backward pass",
    "Python function of autograd": "use functions of torch that autograd differentiates",
    "backward of a leaf": "call backward of a result of operations",
    "backward reaches": "use every parameter's module within the step",
    "before the iteration": "detach carried state where the step ends, not where the next one begins",
    "outlives the iteration": "detach it",
    "other results": "report it: co-execution must give the results of eager mode",
    "as a number": "pass a number, such as alpha=rate.item() (not possible for LBFGS, which does so itself)",
    "random numbers": "draw from torch.rand or torch.randn and transform the draws",
    "requires_grad_ changed": "make the tensor before the step, with requires_grad=True",
    "in place": "use the function that returns a new tensor, such as index_add for index_add_",
    "is not understood": "move the call out of the step",
    "does not see": "move the call out of the step",
    "returned a": "make the call before the step",
    "an argument of": "pass tensors and Python numbers",
    "shows the history": "print tensor.detach()",
    "weak reference": "keep what it needs instead",
    " raised ": "check what the call gets before it",
    "graph of its own": "there is no way yet to co-execute second derivatives",
    "setting of torch": "change it before the first step",
    "anomaly detection": "turn it off; steps with collectives run in eager mode",
    "denormal": "do not call torch.set_flush_denormal",
    "generator of its own": "seed torch's own generator instead",
    "inference mode": "use torch.no_grad",
    "mode is active": "leave the mode before the step",
    "mode of torch is active": "leave the mode before the step",
    "transform of functions": "call torch.func before the step, or use torch.autograd.grad",
    "from elsewhere": "pass the tensor to the step as an argument",
    "shares the memory": "clone what NumPy or another library shares",
    "with another type": "clone the tensor before it is viewed with another type",
    "has layout": "use dense tensors of the processor",
    "quantized": "use tensors that are not quantized, and resolve_conj",
    "a tensor is a ": "use plain tensors and parameters",
    "no operator of ATen": "use operators of torch",
    "outside of torch's Python functions": "call the function of torch in Python",
}
"""What to change so that a step can be co-executed, by words of the reason; the first that fits counts."""


def advice(reason: str) -> str | None:
    """Return what to change in a step that only runs as in eager mode for a reason, or None."""
    return next((change for words, change in _ADVICE.items() if words in reason), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """A place where iterations left the paths known before.

    Attributes:
        site: File and line, ``file:line``.
        reason: What was new there.
        count: Number of iterations.
    """

    site: str
    reason: str
    count: int

    def __str__(self) -> str:
        """Return the place, the reason and the number of iterations."""
        return f"{self.site}: {self.reason} ({self.count} iteration{'s' if self.count != 1 else ''})"


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentRuns:
    """Runs of a segment: operations up to a place where Python waits for values.

    Attributes:
        site: File and line at which it ends, or the end of the iteration.
        runner: Who runs it: TorchScript or Python.
        operations: Number of its operations.
        runs: Number of runs.
        seconds: Time of all runs in seconds.
    """

    site: str
    runner: str
    operations: int
    runs: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CoexecutionReport:
    """Counts and times of all iterations of a step.

    Attributes:
        iterations: Number of iterations.
        traced: Iterations that ran as in eager mode and were traced.
        coexecuted: Iterations whose operations all ran beside Python.
        diverged: Iterations that began on a known path and left it.
        divergences: Where iterations left the known paths, most frequent first.
        operations: Number of operations in the trace graph.
        blocks: Number of basic blocks in the trace graph.
        traced_s: Time of traced iterations in seconds.
        coexecuted_s: Time of co-executed iterations in seconds.
        graph_s: Time in segments of the graph in seconds.
        waiting_s: Time in which Python waited for segments in seconds.
        segments: The segments that ran and who ran them, those with most time first.
        fallbacks: Why and where iterations could only run as in eager mode, most frequent first.
        eager: Iterations that ran as without co-execution, to time them or because that is faster.
        returned: Why the step runs as without co-execution from now on; None if it is co-executed.
        updates: Updates by optimizers of torch that ran as one recorded function each.
        heads: Eager iterations whose part up to the backward pass, or to the update, ran as one function.
        plain_heads: Why that of no further iteration does, or None.
        compiled_heads: Those of these iterations whose function was compiled code, within a tolerance.
        compile_s: Time of compiling and checking such code in seconds.
        exact_heads: Why recorded operations run instead of compiled code, or None.
        plain_updates: Why updates run as in eager mode, by torch's function.
        graph: The merged traces.
        runners: Who runs the operations of a call site, ``file:line``, of paths that can be co-executed.
        fetches: Call sites at which Python reads values of tensors.
        feeds: Call sites at which Python makes tensors of other values.
    """

    iterations: int
    traced: int
    coexecuted: int
    diverged: int
    divergences: tuple[Divergence, ...]
    operations: int
    blocks: int
    traced_s: float
    coexecuted_s: float = 0.0
    graph_s: float = 0.0
    waiting_s: float = 0.0
    segments: tuple[SegmentRuns, ...] = ()
    fallbacks: tuple[Divergence, ...] = ()
    eager: int = 0
    returned: str | None = None
    updates: int = 0
    heads: int = 0
    plain_heads: str | None = None
    compiled_heads: int = 0
    compile_s: float = 0.0
    exact_heads: str | None = None
    plain_updates: Mapping[str, str] = field(default_factory=dict)
    graph: TraceGraph = field(default_factory=TraceGraph, repr=False)
    runners: Mapping[str, str] = field(default_factory=dict, repr=False)
    fetches: frozenset[str] = field(default=frozenset(), repr=False)
    feeds: frozenset[str] = field(default=frozenset(), repr=False)

    def __str__(self) -> str:
        """Return the report as lines of text."""
        lines = [
            f"iterations: {self.iterations} ({self.traced} traced, {self.coexecuted} co-executed, "
            f"{self.diverged} diverged, {self.eager} eager)",
            f"trace graph: {self.operations} operations in {self.blocks} basic blocks",
            f"time of traced iterations: {self.traced_s * 1e3:.1f} ms",
        ]
        if self.coexecuted:
            python_s = self.coexecuted_s - self.waiting_s
            lines.append(
                f"time of co-executed iterations: {self.coexecuted_s * 1e3:.1f} ms "
                f"(Python {python_s * 1e3:.1f}, graph {self.graph_s * 1e3:.1f}, "
                f"waiting for the graph {self.waiting_s * 1e3:.1f})"
            )
        lines += [
            f"segment to {each.site}: {each.operations} operations by {each.runner}, {each.runs} runs, "
            f"{each.seconds * 1e3:.1f} ms"
            for each in self.segments[:10]
        ]
        lines += [f"left the known paths at {divergence}" for divergence in self.divergences]
        lines += [
            f"only in eager mode because of {fallback}"
            + (f"; {change}" if (change := advice(fallback.reason)) else "")
            for fallback in self.fallbacks
        ]
        if self.returned is not None:
            lines.append(f"runs as without co-execution: {self.returned}")
        if self.heads:
            lines.append(
                f"{self.heads} eager iterations ran up to the backward pass or the update as one function"
            )
        if self.compiled_heads:
            lines.append(f"{self.compiled_heads} of these functions were compiled")
        if self.compile_s:
            lines.append(f"time to compile and check them: {self.compile_s:.1f} s")
        if self.exact_heads is not None:
            lines.append(f"recorded operations run instead of compiled code: {self.exact_heads}")
        if self.plain_heads is not None:
            lines.append(
                f"no further part up to a backward pass or an update runs as one function: {self.plain_heads}"
            )
        if self.updates:
            lines.append(f"{self.updates} updates ran as one function each")
        lines += [
            f"updates by {name} run as in eager mode: {reason}" for name, reason in self.plain_updates.items()
        ]
        return "\n".join(lines)

    def to_svg(self) -> str:
        """Return a picture of the trace graph: source lines, the paths between them, and who runs them."""
        title = f"{self.iterations} iterations"
        counts = (f"{self.traced} traced", f"{self.coexecuted} co-executed", f"{self.diverged} diverged")
        return trace_graph_svg(
            self.graph,
            title=f"Trace graph of {title}\n{', '.join([*counts, f'{self.eager} eager'])}",
            runners=self.runners,
            fetches=self.fetches,
            feeds=self.feeds,
        )

    def write_svg(self, path: str | Path) -> None:
        """Write the picture of `to_svg` to a file."""
        Path(path).write_text(self.to_svg(), encoding="utf-8")

    def _repr_html_(self) -> str:
        """Return the report with its picture, for notebooks."""
        return f"<pre>{html.escape(str(self))}</pre>\n{self.to_svg()}"
