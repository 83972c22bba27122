"""`compile`: a model whose groups of operations run by tuned kernels, and the rest by torch.

It is a backend of `torch.compile`. AOTAutograd traces forward and backward; both are grouped, each group by
what it takes on the device: measured where it was tuned, predicted elsewhere.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn

from tunebench.dispatch import preference
from tunebench.errors import InputError
from tunebench.graph.plan import PartitionPlan, plan
from tunebench.torch._tensor import device_of
from tunebench.torch.compiler._fused_call import FusedCall
from tunebench.torch.compiler._graph_rewriter import rewrite_groups
from tunebench.torch.compiler._translation import translate
from tunebench.torch.compiler.capture import Phase, constant_inputs, tracing_backend

__all__ = ["Backend", "backend", "backend_of", "compile", "plans"]


class Backend:
    """A backend of `torch.compile`; it remembers the plans of what it has compiled.

    Args:
        name: Of the model.
        benchmark: Whether groups are timed against torch inside the model (see `compile`).

    Attributes:
        plans: Of each graph, in the order in which they were compiled; backward ones come with the first call
            that needs gradients.
        fused: The groups of each plan that kernels of ours may run, in the order of the plan.
        left: Why graphs were left to torch as they were.
    """

    def __init__(self, name: str = "model", *, benchmark: bool = False) -> None:
        self._name, self._benchmark = name, benchmark
        self.plans: list[PartitionPlan] = []
        self.fused: list[list[FusedCall]] = []
        self.skipped: list[str] = []
        self._traced = tracing_backend(self._compiled)

    def __call__(self, module: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        """Compile what torch has traced."""
        compiled: Callable[..., Any] = self._traced(module, inputs)
        return compiled

    def _compiled(self, module: fx.GraphModule, phase: Phase) -> Callable[..., Any]:
        tensors = [node.meta.get("val") for node in module.graph.nodes if node.op == "placeholder"]
        reason = _refusal(tensors)
        if reason is not None:
            self.skipped.append(reason)
            return module.forward  # type: ignore[no-any-return]
        found = device_of(next(t for t in tensors if isinstance(t, torch.Tensor)).device)
        assert not isinstance(found, str)
        device, ordinal = found
        translation = translate(module.graph, self._name, phase, constant_inputs(module, phase))
        preferred = preference()
        # What was not timed would be run by torch in any case, group by group.
        made = plan(translation.graph, device, preferred=preferred, measured_only=preferred == "faster")
        self.plans.append(made)
        chosen = [(offer.group, offer.price.by == "tunebench") for offer in made.chosen]
        written, ours = rewrite_groups(
            module, translation, chosen, device, ordinal, benchmark=self._benchmark
        )
        self.fused.append(ours)
        return written.forward  # type: ignore[no-any-return]


def _refusal(tensors: list[Any]) -> str | None:
    """Return why a graph of such tensors is left to torch, or None."""
    there = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
    if any(isinstance(tensor, torch.SymInt) for tensor in tensors):
        return "sizes that change from call to call; compile with dynamic=False"
    devices = {tensor.device for tensor in there}
    if len(devices) != 1:
        return f"tensors on {len(devices)} devices"
    found = device_of(devices.pop())
    return found if isinstance(found, str) else None


def backend(
    module: fx.GraphModule, inputs: Any, *, options: Mapping[str, bool] | None = None
) -> Callable[..., Any]:
    """Compile what torch has traced: ``torch.compile(model, backend="tunebench")``.

    Args:
        module: What was traced.
        inputs: What it is called with.
        options: ``{"benchmark": True}``, or nothing (see `compile`).

    Raises:
        InputError: naming an option that there is not.
    """
    given = dict(options or {})
    benchmark = given.pop("benchmark", False)
    if given or not isinstance(benchmark, bool):
        raise InputError(f"the backend tunebench has one option, benchmark: true or false; got {options}")
    return Backend(benchmark=benchmark)(module, inputs)


_backends: weakref.WeakKeyDictionary[Any, Backend] = weakref.WeakKeyDictionary()


def compile(  # noqa: A001 - torch's name
    model: nn.Module | Callable[..., Any], *, fullgraph: bool = False, benchmark: bool = False
) -> Any:
    """Compile a model: groups of operations by tuned kernels, the rest by torch, gradients included.

    Which operations are grouped is decided at the first call of each kind, by what is in the database then.
    Whether a group's kernel runs is decided as for all served calls: where it is known to be faster, unless
    `prefer` says otherwise.

    Args:
        model: A module, or a function of tensors.
        fullgraph: Whether it is an error if torch cannot trace all of it.
        benchmark: Whether each group that kernels of ours may run is timed against torch inside the model,
            over its first 22 calls, and then run by the faster: alone a kernel may take another time.

    Returns:
        What `torch.compile` returns: a module with the parameters of the model, or a function.

    Raises:
        InputError: if it cannot be called.
    """
    if not callable(model):
        raise InputError(f"compile takes a module or a function, not {type(model).__name__}")
    made = Backend(getattr(model, "__name__", type(model).__name__), benchmark=benchmark)
    compiled = torch.compile(model, backend=made, fullgraph=fullgraph, dynamic=False)
    _backends[compiled] = made
    return compiled


def plans(compiled: Any) -> tuple[PartitionPlan, ...]:
    """Return the plans of what `compile` returned, of all graphs that were compiled so far.

    Raises:
        InputError: if `compile` did not return it.
    """
    return tuple(backend_of(compiled).plans)


def backend_of(compiled: Any) -> Backend:
    """Return the backend that compiles what `compile` returned.

    Raises:
        InputError: if `compile` did not return it.
    """
    if compiled not in _backends:
        raise InputError("this is nothing that tunebench.torch.compile returned")
    return _backends[compiled]
