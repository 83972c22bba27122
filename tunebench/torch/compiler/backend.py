"""`compile`: a backend of `torch.compile` that runs groups of operations by tuned kernels.

AOTAutograd traces forward and backward. The operations of both are grouped for minimal time on the device:
measured where workloads were tuned, predicted elsewhere.
"""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from tunebench.device import Device
from tunebench.dispatch import preference
from tunebench.errors import InputError
from tunebench.graph.plan import PartitionPlan, plan
from tunebench.torch._aten_workload import signature
from tunebench.torch._tensor import device_of
from tunebench.torch.compiler._fused_call import FusedCall
from tunebench.torch.compiler._graph_rewriter import GraphRewriter
from tunebench.torch.compiler._translation import translate
from tunebench.torch.compiler.capture import Phase, constant_inputs, tracing_backend

__all__ = ["Backend", "backend", "backend_of", "compile", "plans"]


class Backend:
    """A backend of `torch.compile` that keeps the plans of the graphs it compiled.

    Args:
        name: Name of the model.
        benchmark: Whether to time groups against torch inside the model (see `compile`).
        check: Whether to compare the results of groups with torch's (see `compile`).

    Attributes:
        plans: Plan of each graph, in the order of compilation; backward graphs follow the first call that
            needs gradients.
        fused: Groups of each plan that tuned kernels may run, in the plan's order.
        skipped: Why other graphs were left to torch.
    """

    def __init__(self, name: str = "model", *, benchmark: bool = False, check: bool = False) -> None:
        self._name, self._benchmark, self._check = name, benchmark, check
        self.plans: list[PartitionPlan] = []
        self.fused: list[list[FusedCall]] = []
        self.skipped: list[str] = []
        self._traced = tracing_backend(self._compiled)

    def __call__(self, module: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        """Compile a graph that Dynamo traced."""
        compiled: Callable[..., Any] = self._traced(module, inputs)
        return compiled

    def _compiled(self, module: fx.GraphModule, phase: Phase) -> Callable[..., Any]:
        constants = constant_inputs(phase)
        dynamic = _dynamic_places(module)
        if not dynamic:
            return self._rewritten(module, phase, constants)
        return _Specialized(
            module, dynamic, lambda static: self._rewritten(static, phase, constants)
        ).__call__

    def _rewritten(
        self, module: fx.GraphModule, phase: Phase, constants: frozenset[int]
    ) -> Callable[..., Any]:
        found = _device(module)
        if isinstance(found, str):
            self._skip(found)
            return module.forward  # type: ignore[no-any-return]
        device, ordinal = found
        translation = translate(module.graph, self._name, phase, constants)
        preferred = preference()
        # Workloads that were not measured would run by torch anyway.
        partition = plan(translation.graph, device, preferred=preferred, measured_only=preferred == "faster")
        self.plans.append(partition)
        rewriter = GraphRewriter(
            module, translation, device, ordinal, benchmark=self._benchmark, check=self._check
        )
        rewritten = rewriter.rewrite((o.group, o.price.by == "tunebench") for o in partition.chosen)
        self.fused.append(rewriter.calls)
        return rewritten.forward  # type: ignore[no-any-return]

    def _skip(self, reason: str) -> None:
        self.skipped.append(reason)
        warnings.warn(f"torch runs a graph of {self._name}: {reason}", stacklevel=2)


class _Specialized:
    """A graph whose sizes change between calls, traced and compiled again for each set of sizes.

    Args:
        module: The graph.
        places: Places of the inputs whose sizes change; torch checks that the others stay the same.
        compiler: Compiles a graph with constant sizes.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        places: Sequence[int],
        compiler: Callable[[fx.GraphModule], Callable[..., Any]],
    ) -> None:
        self._module, self._places, self._compiler = module, places, compiler
        self._known: dict[tuple[Any, ...], Callable[..., Any]] = {}
        self._lock = threading.Lock()

    def __call__(self, *given: Any) -> Any:
        key = tuple(signature(given[place]) for place in self._places)
        known = self._known.get(key)
        if known is None:
            with self._lock:
                known = self._known.get(key) or self._known.setdefault(key, self._compiled(given))
        return known(*given)

    def _compiled(self, given: tuple[Any, ...]) -> Callable[..., Any]:
        if len(self._known) >= MOST_SIZES:
            return self._module.forward  # type: ignore[no-any-return]
        with torch.no_grad():
            static = make_fx(self._module, tracing_mode="fake")(*given)
        return self._compiler(static)


MOST_SIZES = 64
"""Sets of sizes of one graph that are compiled; torch runs the graph for all further sizes."""


def _dynamic_places(module: fx.GraphModule) -> tuple[int, ...]:
    """Return the places of a graph's inputs whose sizes change between calls."""
    values = [node.meta.get("val") for node in module.graph.nodes if node.op == "placeholder"]
    return tuple(
        place
        for place, value in enumerate(values)
        if isinstance(value, torch.SymInt) or (isinstance(value, torch.Tensor) and not _is_static(value))
    )


def _is_static(tensor: torch.Tensor) -> bool:
    return all(isinstance(extent, int) for extent in (*tensor.shape, *tensor.stride()))


def _device(module: fx.GraphModule) -> tuple[Device, int] | str:
    """Return the device of a graph's inputs and its ordinal, or why the graph is left to torch."""
    leaves = [leaf for node in module.graph.nodes for leaf in tree_leaves(node.meta.get("val"))]
    if any(isinstance(leaf, torch.Tensor) and not _is_static(leaf) for leaf in leaves):
        return "sizes that depend on data"
    inputs = [node.meta.get("val") for node in module.graph.nodes if node.op == "placeholder"]
    devices = {value.device for value in inputs if isinstance(value, torch.Tensor)}
    return device_of(devices.pop()) if len(devices) == 1 else f"tensors on {len(devices)} devices"


def backend(
    module: fx.GraphModule, inputs: Any, *, options: Mapping[str, bool] | None = None
) -> Callable[..., Any]:
    """Compile a graph that Dynamo traced: ``torch.compile(model, backend="tunebench")``.

    Args:
        module: The traced module.
        inputs: Example inputs.
        options: ``benchmark`` and ``check``, true or false (see `compile`).

    Raises:
        InputError: if an option is unknown.
    """
    given = dict(options or {})
    if not given.keys() <= {"benchmark", "check"} or not all(
        isinstance(value, bool) for value in given.values()
    ):
        raise InputError(
            f"the options of the backend tunebench are benchmark and check (true or false), got {options}"
        )
    return Backend(benchmark=given.get("benchmark", False), check=given.get("check", False))(module, inputs)


_backends: weakref.WeakKeyDictionary[Any, Backend] = weakref.WeakKeyDictionary()


def compile(  # noqa: A001 - torch's name
    model: nn.Module | Callable[..., Any] | None = None,
    *,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    benchmark: bool = False,
    check: bool = False,
) -> Any:
    """Compile a model: tuned kernels run groups of operations, torch runs the rest, gradients included.

    Groups are chosen at the first call with each kind of input, from the results in the database. A group's
    kernel runs where it is known to be faster than torch, unless `prefer` says otherwise.

    Args:
        model: A module, or a function of tensors. Without it, a decorator with these options is returned.
        fullgraph: Whether to raise if torch cannot trace the whole model.
        dynamic: Whether torch traces the model once for all sizes; None does so from the second size of an
            input on. Kernels are chosen for each set of sizes.
        benchmark: Whether to time each group with tuned kernels against torch over its first 22 calls inside
            the model, and then run the faster. A kernel's time in the model can differ from its time alone.
        check: Whether to compare each group with torch in float64 at its first call, on random data with the
            strides of its inputs. Torch runs a group that differs, with a warning. `benchmark` checks too.

    Returns:
        What `torch.compile` returns: a module with the parameters of the model, or a function.

    Raises:
        InputError: if the model is not callable.
    """
    if model is None:
        return functools.partial(
            compile, fullgraph=fullgraph, dynamic=dynamic, benchmark=benchmark, check=check
        )
    if not callable(model):
        raise InputError(f"expected a torch.nn.Module or a function, got {type(model).__name__}")
    made = Backend(getattr(model, "__name__", type(model).__name__), benchmark=benchmark, check=check)
    compiled = torch.compile(model, backend=made, fullgraph=fullgraph, dynamic=dynamic)
    _backends[compiled] = made
    return compiled


def plans(compiled: Any) -> tuple[PartitionPlan, ...]:
    """Return the plans of all graphs that a compiled model has compiled so far.

    Raises:
        InputError: if `compile` did not return it.
    """
    return tuple(backend_of(compiled).plans)


def backend_of(compiled: Any) -> Backend:
    """Return the backend of a compiled model.

    Raises:
        InputError: if `compile` did not return it.
    """
    if compiled not in _backends:
        raise InputError("expected a model that tunebench.torch.compile returned")
    return _backends[compiled]
