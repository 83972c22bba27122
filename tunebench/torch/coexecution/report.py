"""What happened in the iterations of a co-executed step."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CoexecutionReport", "Divergence"]


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
        fallbacks: Why and where iterations could only run as in eager mode, most frequent first.
        eager: Iterations that ran as without co-execution, to time them or because that is faster.
        returned: Why the step runs as without co-execution from now on; None if it is co-executed.
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
    fallbacks: tuple[Divergence, ...] = ()
    eager: int = 0
    returned: str | None = None

    def __str__(self) -> str:
        """Return the report as lines of text."""
        lines = [
            f"iterations: {self.iterations} ({self.traced} traced, {self.coexecuted} co-executed, "
            f"{self.diverged} diverged, {self.eager} eager)",
            f"trace graph: {self.operations} operations in {self.blocks} basic blocks",
            f"time of traced iterations: {self.traced_s * 1e3:.1f} ms",
        ]
        lines += [f"diverged at {each.site}: {each.reason} ({each.count})" for each in self.divergences]
        lines += [
            f"only in eager mode because of {each.site}: {each.reason} ({each.count})"
            for each in self.fallbacks
        ]
        if self.returned is not None:
            lines.append(f"runs as without co-execution: {self.returned}")
        return "\n".join(lines)
