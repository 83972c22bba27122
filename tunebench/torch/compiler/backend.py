"""`compile`: a backend of `torch.compile` that runs groups of operations by tuned kernels.

AOTAutograd traces forward and backward. The operations of both are grouped for minimal time on the device:
measured where workloads were tuned, predicted elsewhere.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn

from tunebench.device import Device
from tunebench.dispatch import preference
from tunebench.errors import InputError
from tunebench.graph.plan import PartitionPlan, plan
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

    Attributes:
        plans: Plan of each graph, in the order of compilation; backward graphs follow the first call that
            needs gradients.
        fused: Groups of each plan that tuned kernels may run, in the plan's order.
        skipped: Why other graphs were left to torch.
    """

    def __init__(self, name: str = "model", *, benchmark: bool = False) -> None:
        self._name, self._benchmark = name, benchmark
        self.plans: list[PartitionPlan] = []
        self.fused: list[list[FusedCall]] = []
        self.skipped: list[str] = []
        self._traced = tracing_backend(self._compiled)

    def __call__(self, module: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        """Compile a graph that Dynamo traced."""
        compiled: Callable[..., Any] = self._traced(module, inputs)
        return compiled

    def _compiled(self, module: fx.GraphModule, phase: Phase) -> Callable[..., Any]:
        inputs = [node.meta.get("val") for node in module.graph.nodes if node.op == "placeholder"]
        found = _device(inputs)
        if isinstance(found, str):
            self.skipped.append(found)
            return module.forward  # type: ignore[no-any-return]
        device, ordinal = found
        translation = translate(module.graph, self._name, phase, constant_inputs(module, phase))
        preferred = preference()
        # Workloads that were not measured would run by torch anyway.
        partition = plan(translation.graph, device, preferred=preferred, measured_only=preferred == "faster")
        self.plans.append(partition)
        rewriter = GraphRewriter(module, translation, device, ordinal, benchmark=self._benchmark)
        rewritten = rewriter.rewrite((o.group, o.price.by == "tunebench") for o in partition.chosen)
        self.fused.append(rewriter.calls)
        return rewritten.forward  # type: ignore[no-any-return]


def _device(inputs: list[Any]) -> tuple[Device, int] | str:
    """Return the device of a graph's inputs and its ordinal, or why the graph is left to torch."""
    if any(isinstance(value, torch.SymInt) for value in inputs):
        return "sizes that change between calls; compile with dynamic=False"
    devices = {value.device for value in inputs if isinstance(value, torch.Tensor)}
    return device_of(devices.pop()) if len(devices) == 1 else f"tensors on {len(devices)} devices"


def backend(
    module: fx.GraphModule, inputs: Any, *, options: Mapping[str, bool] | None = None
) -> Callable[..., Any]:
    """Compile a graph that Dynamo traced: ``torch.compile(model, backend="tunebench")``.

    Args:
        module: The traced module.
        inputs: Example inputs.
        options: ``{"benchmark": True}``, or nothing (see `compile`).

    Raises:
        InputError: if an option is unknown.
    """
    given = dict(options or {})
    benchmark = given.pop("benchmark", False)
    if given or not isinstance(benchmark, bool):
        raise InputError(f"the backend tunebench has one option, benchmark (true or false), got {options}")
    return Backend(benchmark=benchmark)(module, inputs)


_backends: weakref.WeakKeyDictionary[Any, Backend] = weakref.WeakKeyDictionary()


def compile(  # noqa: A001 - torch's name
    model: nn.Module | Callable[..., Any], *, fullgraph: bool = False, benchmark: bool = False
) -> Any:
    """Compile a model: tuned kernels run groups of operations, torch runs the rest, gradients included.

    Groups are chosen at the first call with each kind of input, from the results in the database. A group's
    kernel runs where it is known to be faster than torch, unless `prefer` says otherwise.

    Args:
        model: A module, or a function of tensors.
        fullgraph: Whether to raise if torch cannot trace the whole model.
        benchmark: Whether to time each group with tuned kernels against torch over its first 22 calls inside
            the model, and then run the faster. A kernel's time in the model can differ from its time alone.

    Returns:
        What `torch.compile` returns: a module with the parameters of the model, or a function.

    Raises:
        InputError: if the model is not callable.
    """
    if not callable(model):
        raise InputError(f"expected a torch.nn.Module or a function, got {type(model).__name__}")
    made = Backend(getattr(model, "__name__", type(model).__name__), benchmark=benchmark)
    compiled = torch.compile(model, backend=made, fullgraph=fullgraph, dynamic=False)
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
