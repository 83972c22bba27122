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
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_leaves

from tunebench.device import Device
from tunebench.dispatch import Preference, preference
from tunebench.dispatch.cpu import forked
from tunebench.dispatch.watch import is_watched
from tunebench.errors import InputError
from tunebench.graph.plan import PartitionPlan, plan
from tunebench.torch._aten_workload import signature
from tunebench.torch._tensor import device_of
from tunebench.torch.compiler._fused_call import FusedCall
from tunebench.torch.compiler._graph_rewriter import GraphRewriter, fused_call
from tunebench.torch.compiler._group_check import difference
from tunebench.torch.compiler._inductor import compile_by_inductor, is_repeatable, mutated_inputs, parts_of
from tunebench.torch.compiler._race import Race, Raced
from tunebench.torch.compiler._translation import translate
from tunebench.torch.compiler.capture import Phase, constant_inputs

__all__ = ["Backend", "backend", "backend_of", "compile", "plans"]

Compiled = Callable[..., Any]
"""Runs a graph that Dynamo traced."""


class Backend:
    """A backend of `torch.compile` that keeps the plans of the graphs it compiled.

    Args:
        name: Name of the model.
        benchmark: Whether to time groups against torch inside the model (see `compile`).
        check: Whether to compare the results of groups with torch's (see `compile`).

    Attributes:
        plans: Plan of each graph, in the order of compilation: inference, or forward and backward.
        fused: Groups of each plan that were planned for tuned kernels, in the plan's order.
        skipped: Why other graphs were left to torch.
    """

    def __init__(self, name: str = "model", *, benchmark: bool = False, check: bool = False) -> None:
        self._name, self._benchmark, self._check = name, benchmark, check or benchmark
        self.plans: list[PartitionPlan] = []
        self.fused: list[list[FusedCall]] = []
        self.skipped: list[str] = []

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        """Compile a graph that Dynamo traced."""
        return _CompiledGraph(module, inputs, self._compiled)

    def _compiled(
        self, module: fx.GraphModule, inputs: Sequence[Any], by_torch: Callable[[], Compiled]
    ) -> Compiled:
        """Compile a graph with constant sizes.

        Args:
            module: The graph.
            inputs: Its inputs.
            by_torch: Compiles the graph by inductor alone.
        """
        if preference() == "torch":
            return by_torch()
        step = _Step()
        try:
            ours = compile_by_inductor(module, inputs, functools.partial(self._rewritten, step))
        except _NoGroupsError:
            ours = by_torch()
        except InputError as error:
            self._skip(str(error))
            ours = by_torch()
        else:
            if self._benchmark and step.may_repeat:
                ours = Raced(ours, by_torch(), step.mutated, functools.partial(self._decided, step))
        return _watched(ours, step.calls)

    def _decided(self, step: _Step, race: Race) -> None:
        """Note the result of a race."""
        if race.winner == "torch":
            for call in step.calls:
                call.leave_to_torch(f"in this model torch.compile takes {race.ratio:.2f} times as long")

    def _rewritten(self, step: _Step, module: fx.GraphModule) -> fx.GraphModule:
        """Return a graph of ATen operators with calls of kernels.

        Args:
            step: Receives the groups.
            module: The graph.

        Raises:
            InputError: if torch has to run the graph.
        """
        device, ordinal = _device(module)
        rewriter, planned = GraphRewriter(module), []
        for phase, part in parts_of(module).items():
            partition, calls = self._planned(part, phase, device, ordinal)
            planned.append((partition, calls))
            for call in calls:
                if call.by == "tunebench":
                    rewriter.replace(call)
        self.plans += [partition for partition, _ in planned]
        self.fused += [calls for _, calls in planned]
        step.calls += [call for _, calls in planned for call in calls]
        step.mutated, step.may_repeat = mutated_inputs(module), is_repeatable(module)
        if not any(call.by == "tunebench" for call in step.calls):
            raise _NoGroupsError
        return rewriter.rewrite()

    def _planned(
        self, part: fx.GraphModule, phase: Phase, device: Device, ordinal: int
    ) -> tuple[PartitionPlan, list[FusedCall]]:
        """Return the plan of a graph, and its groups that tuned kernels may run."""
        translation = translate(part.graph, self._name, phase, constant_inputs(phase))
        preferred = preference()
        # Workloads that were not measured would run by torch anyway.
        partition = plan(translation.graph, device, preferred=preferred, measured_only=preferred == "faster")
        groups = [offer.group for offer in partition.chosen if offer.price.by == "tunebench"]
        calls = [
            fused_call(translation, group, device, ordinal, f"{phase}_group_{place}")
            for place, group in enumerate(groups)
        ]
        with unset_fake_temporarily():
            for call in calls:
                self._decide(call, preferred)
        return partition, calls

    def _decide(self, call: FusedCall, preferred: Preference) -> None:
        """Leave a group to torch if no kernel runs it, or if its results are wrong."""
        reason = call.missing_kernel(preferred)
        if not reason and self._check and (reason := difference(call)):
            warnings.warn(f"torch runs {' and '.join(call.group.workloads)}: {reason}", stacklevel=2)
        if reason:
            call.leave_to_torch(reason)

    def _skip(self, reason: str) -> None:
        self.skipped.append(reason)
        warnings.warn(f"torch runs a graph of {self._name}: {reason}", stacklevel=2)


@dataclass(slots=True)
class _Step:
    """What a compiled graph does.

    Attributes:
        calls: Its groups that were planned for tuned kernels, forward and backward.
        mutated: Places of inputs that it changes.
        may_repeat: Whether running it several times on copies of these inputs has no other effect.
    """

    calls: list[FusedCall] = field(default_factory=list)
    mutated: frozenset[int] = frozenset()
    may_repeat: bool = True


def _watched(run: Compiled, calls: Sequence[FusedCall]) -> Compiled:
    """Return a compiled graph that reports the groups that torch runs to watchers."""
    if not calls:
        return run

    def watched(*given: Any) -> Any:
        result = run(*given)
        if is_watched():
            for call in calls:
                if call.by == "torch":
                    call.report()
        return result

    return watched


class _NoGroupsError(Exception):
    """No group of a graph runs by tuned kernels."""


class _CompiledGraph:
    """A graph that Dynamo traced, compiled for each preference, and for each set of sizes if they change.

    Args:
        module: The graph.
        inputs: Its inputs while Dynamo traces; sizes may be symbolic.
        compiler: Compiles the graph for constant sizes.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        inputs: Sequence[Any],
        compiler: Callable[[fx.GraphModule, Sequence[Any], Callable[[], Compiled]], Compiled],
    ) -> None:
        self._module, self._compiler = module, compiler
        self._places = _dynamic_places(module)
        self._known: dict[tuple[Any, ...], Compiled] = {}
        self._by_torch: Compiled | None = None
        self._lock = threading.RLock()
        self._is_on_cpu = any(isinstance(one, torch.Tensor) and one.device.type == "cpu" for one in inputs)
        if self._places:
            self._by_torch = compile_by_inductor(module, inputs)
        else:
            self._known[preference(),] = self._compiled(inputs)

    def __call__(self, *given: Any) -> Any:
        if forked() and self._is_on_cpu:  # kernels use threads, which a forked process lacks
            return self._module(*given)
        key = (preference(), *(signature(given[place]) for place in self._places))
        known = self._known.get(key)
        if known is None:
            with self._lock:
                known = self._known.get(key) or self._known.setdefault(key, self._compiled(given))
        return known(*given)

    def _compiled(self, inputs: Sequence[Any]) -> Compiled:
        if len(self._known) >= MOST_SIZES:
            return self._torch(inputs)
        return self._compiler(self._module, inputs, functools.partial(self._torch, inputs))

    def _torch(self, inputs: Sequence[Any]) -> Compiled:
        """Return the graph compiled by inductor alone."""
        if self._by_torch is None:
            self._by_torch = compile_by_inductor(self._module, inputs)
        return self._by_torch


MOST_SIZES = 64
"""Sets of sizes of one graph that are compiled; torch runs the graph for all further sizes."""


def _dynamic_places(module: fx.GraphModule) -> tuple[int, ...]:
    """Return the places of a graph's inputs whose sizes change between calls."""
    inputs = module.graph.find_nodes(op="placeholder")
    values = [node.meta.get("example_value", node.meta.get("val")) for node in inputs]
    return tuple(
        place
        for place, value in enumerate(values)
        if isinstance(value, torch.SymInt) or (isinstance(value, torch.Tensor) and not _is_static(value))
    )


def _is_static(tensor: torch.Tensor) -> bool:
    return all(isinstance(extent, int) for extent in (*tensor.shape, *tensor.stride()))


def _device(module: fx.GraphModule) -> tuple[Device, int]:
    """Return the device of a graph's inputs and its ordinal.

    Raises:
        InputError: if tuned kernels cannot run the graph.
    """
    leaves = [leaf for node in module.graph.nodes for leaf in tree_leaves(node.meta.get("val"))]
    if any(isinstance(leaf, torch.Tensor) and not _is_static(leaf) for leaf in leaves):
        raise InputError("sizes that depend on data")
    inputs = [node.meta.get("val") for node in module.graph.nodes if node.op == "placeholder"]
    devices = {value.device for value in inputs if isinstance(value, torch.Tensor)}
    found = device_of(devices.pop()) if len(devices) == 1 else f"tensors on {len(devices)} devices"
    if isinstance(found, str):
        raise InputError(found)
    return found


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
    """Compile a model with gradients: tuned kernels run groups of operations, inductor compiles the rest.

    Groups are chosen at the first call with each kind of input, from the results in the database. A group's
    kernel runs where it is known to be faster than torch, unless `prefer` says otherwise.

    Args:
        model: A module, or a function of tensors. Without it, a decorator with these options is returned.
        fullgraph: Whether to raise if torch cannot trace the whole model.
        dynamic: Whether torch traces the model once for all sizes; None does so from the second size of an
            input on. Kernels are chosen for each set of sizes.
        benchmark: Whether to compile without groups too, run both alternately at the first call, and keep the
            faster. A kernel's time in the model can differ from its time alone.
        check: Whether to compare each group with torch in float64, on random data with the strides of its
            inputs. Torch runs a group that differs, with a warning. `benchmark` checks too.

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
