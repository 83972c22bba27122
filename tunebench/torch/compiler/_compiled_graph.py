"""Graph that is compiled anew for each preference and each set of sizes.

Compiling takes seconds, so a set of sizes must recur before it is compiled: the n-th set is compiled at its
n^2-th call, but never at its first one, and the graph for all sizes runs it before. A graph for all sizes in
which kernels run counts as the first set. A cache of keys and values that grows with each token has a new
length in each call; in n^2 generated sequences it is compiled for about n lengths. A model that is called
with few sizes is soon compiled for all of them. In the graph for all sizes, kernels run the groups whose
sizes are constant, such as the linear layers of a new token.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import fx
from torch._dynamo.convert_frame import compile_lock

from tunebench.dispatch import preference
from tunebench.dispatch.cpu import forked
from tunebench.torch._aten_workload import signature
from tunebench.torch._layout import is_static

__all__ = ["Compiled", "CompiledGraph", "GraphCompiler", "compiled_at_call"]

Compiled = Callable[..., Any]
"""Runs a graph that Dynamo traced."""
GraphCompiler = Callable[[Sequence[Any]], Compiled]
"""Compiles a graph for the sizes of some inputs."""

Compiler = Callable[[fx.GraphModule, Sequence[Any], GraphCompiler], Compiled]
"""Compiles a graph for its inputs, or by the function that compiles it by torch alone."""

MOST_SIZES = 64
"""Sets of sizes of one graph that are compiled; the graph for all sizes runs further ones."""

FEWEST_CALLS = 2
"""Calls with a set of sizes before which it is never compiled: one call does not show that it recurs."""


class CompiledGraph:
    """A graph that Dynamo traced, compiled for each preference, and for each set of sizes if they change.

    Args:
        module: The graph.
        inputs: Its inputs while Dynamo traces; sizes may be symbolic.
        compiler: Compiles the graph for constant sizes; its last argument compiles it by inductor alone.
        for_all_sizes: Compiles the graph for all sizes, while Dynamo traces it.
        by_inductor: Compiles a graph by inductor alone.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        inputs: Sequence[Any],
        compiler: Compiler,
        for_all_sizes: Compiler,
        by_inductor: Callable[[fx.GraphModule, Sequence[Any]], Compiled],
    ) -> None:
        self._module, self._compiler, self._by_inductor = module, compiler, by_inductor
        self._places = _dynamic_places(module)
        self._known: dict[tuple[Any, ...], Compiled] = {}
        self._calls = Counter[tuple[Any, ...]]()
        self._by_torch: Compiled | None = None
        self._for_all_sizes: Compiled | None = None
        self._is_full = False
        self._is_on_cpu = any(
            isinstance(value, torch.Tensor) and value.device.type == "cpu" for value in inputs
        )
        if not self._places:
            self._known[preference(),] = self._compiled(inputs)
        elif preference() == "faster":
            self._for_all_sizes = for_all_sizes(module, inputs, self._torch)
        else:
            self._for_all_sizes = self._torch(inputs)

    def __call__(self, *arguments: Any) -> Any:
        if forked() and self._is_on_cpu:  # kernels use threads, which a forked process lacks
            return self._module(*arguments)
        key = (preference(), *(signature(arguments[index]) for index in self._places))
        compiled = self._known.get(key) or self._while_rare(key)
        if compiled is None:
            with _compiling():
                compiled = self._known.get(key) or self._new(key, arguments)
        return compiled(*arguments)

    def _new(self, key: tuple[Any, ...], inputs: Sequence[Any]) -> Compiled:
        """Compile the graph for new sizes, or return that for all sizes if sizes are too many."""
        if len(self._known) < MOST_SIZES:
            return self._known.setdefault(key, self._compiled(inputs))
        if not self._is_full:
            self._is_full = True
            warnings.warn(
                f"a graph gets no kernels for further sizes of its inputs: it is compiled for {MOST_SIZES}; "
                "pad inputs to fewer sizes",
                stacklevel=3,
            )
        return self._for_any_size()

    def _while_rare(self, key: tuple[Any, ...]) -> Compiled | None:
        """Return what runs sizes that are not to be compiled, or not yet; None if they are."""
        if self._for_all_sizes is None:
            return None
        has_kernels, preferred = self._by_torch is None, preference()
        if self._is_full or (preferred == "torch" and not has_kernels):
            return self._for_any_size()
        if preferred == "tunebench":
            return None
        self._calls[key] += 1
        if self._calls[key] >= max(FEWEST_CALLS, (len(self._known) + 1 + has_kernels) ** 2):
            return None
        return self._for_any_size()

    def _for_any_size(self) -> Compiled:
        """Return the graph for all sizes; eager torch if kernels run in it while torch is preferred."""
        assert self._for_all_sizes is not None
        has_kernels = self._by_torch is None
        return self._module if has_kernels and preference() == "torch" else self._for_all_sizes

    def _compiled(self, inputs: Sequence[Any]) -> Compiled:
        return self._compiler(self._module, inputs, self._torch)

    def _torch(self, inputs: Sequence[Any]) -> Compiled:
        """Return the graph compiled by inductor alone, for the given sizes or for all."""
        if self._by_torch is not None:
            return self._by_torch
        compiled = self._by_inductor(self._module, inputs)
        if not self._places or self._for_all_sizes is None:  # the sizes are those that Dynamo traced
            self._by_torch = compiled
        return compiled


def compiled_at_call(compiler: GraphCompiler, arguments: Sequence[Any]) -> Compiled:
    """Compile a graph at one of its calls.

    Args:
        compiler: Compiles the graph.
        arguments: Arguments of the call.
    """
    with _compiling():
        return compiler(arguments)


@contextmanager
def _compiling() -> Iterator[None]:
    """Compile at a call as Dynamo does: in one thread at a time, while other threads may run compiled models.

    Tracing replaces `torch.nn.Module.__call__`, which Dynamo reads in other threads, and sets a flag for
    which Dynamo refuses their calls unless torch says that it compiles.
    """
    session = getattr(torch.compiler, "_compile_session_context", nullcontext)  # older versions refuse them
    with compile_lock, session():
        yield


def _dynamic_places(module: fx.GraphModule) -> tuple[int, ...]:
    """Return the places of a graph's inputs whose sizes change between calls."""
    inputs = module.graph.find_nodes(op="placeholder")
    values = [node.meta.get("example_value", node.meta.get("val")) for node in inputs]
    return tuple(
        index
        for index, value in enumerate(values)
        if isinstance(value, torch.SymInt) or (isinstance(value, torch.Tensor) and not is_static(value))
    )
