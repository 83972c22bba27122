"""A backend of `torch.compile` that runs training steps by memory plans."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.eval_frame import OptimizeContext, innermost_backend
from torch._dynamo.exc import (
    BackendCompilerFailed,
    FailOnRecompileLimitHit,
    TorchRuntimeError,
    Unsupported,
    UserError,
)
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.graph import _BoxedCodeGen
from torch.utils._pytree import tree_leaves

from tunebench._foreign_file import interpreting
from tunebench._host import cores
from tunebench.errors import InputError
from tunebench.torch.compiler.capture import first_reason, onednn, whole_model_traced
from tunebench.torch.compiler.decomposition import DECOMPOSITIONS
from tunebench.torch.compiler.inductor import OWN_LIMIT, is_repeatable, mutated_inputs
from tunebench.torch.compiler.recurrent_layer import (
    divide_recurrent_layers,
    is_fused,
    keep_workspaces,
    recurrent_calls,
)
from tunebench.training.fitting.compressed_activation import compressed_graph
from tunebench.training.fitting.host_store import FileStore, HostStore, PinnedStore
from tunebench.training.fitting.joint_step import (
    JointStep,
    joint_step,
    layer_of,
    parameter_places,
    unread_bytes,
)
from tunebench.training.fitting.operation_time import (
    ThreadClock,
    Times,
    around_us,
    eager_times,
    measured_times,
)
from tunebench.training.fitting.optimizer_state import HostStates
from tunebench.training.fitting.plan_choice import (
    ChosenPlan,
    PlanChoice,
    choices,
    copy_us,
    fastest,
    room_bytes,
)
from tunebench.training.fitting.planned_graph import planned_graphs
from tunebench.training.fitting.redundant_copy import remove_redundant_copies
from tunebench.training.fitting.remembered_step import RememberedStep, TracedGraph, remembered_path
from tunebench.training.fitting.step_time import GraphTimer, StepTimes, measured_step
from tunebench.training.memory.budget import budget_bytes
from tunebench.training.memory.plan_file import content_of, plan_for, plan_of, read_plan
from tunebench.training.memory.planner import MemoryPlan, PlanEffort, plan_memory
from tunebench.training.memory.schedule import unplanned
from tunebench.training.memory.simulation import simulate
from tunebench.training.memory.step import HostLink

__all__ = ["FittedStep", "Fitter", "fitted_by", "fitted_steps", "is_fitted"]


@dataclass(frozen=True, kw_only=True)
class FittedStep:
    """A training step that runs as planned.

    Attributes:
        joint: Its operations and tensors.
        plan: Its plan.
        eager_us: Time of the step by eager torch in microseconds: that of the traced operations, with
            recurrent layers as eager torch runs them.
        view_us: Time of the views of the step in microseconds, which are no operations of the plan.
        call_us: Time of what torch does around a compiled step, in microseconds.
        measured: Times of a whole step with recurrent layers, measured before its first use; none if only its
            operations were.
        remembered: Whether the times and the plan are those of an earlier process.
        choice: Which saved tensors are compressed, and how many parameters have states on the host.
        state_bytes: Bytes of the optimizer's states that stay on the device.
        host_state_bytes: Bytes of those that are on the host between updates.
    """

    joint: JointStep
    plan: MemoryPlan
    eager_us: float
    view_us: float
    call_us: float
    measured: StepTimes | None = None
    remembered: bool = False
    choice: PlanChoice = field(default_factory=PlanChoice)
    state_bytes: int = 0
    host_state_bytes: int = 0

    @property
    def state_copy_us(self) -> float:
        """Predicted time of copying states to the device and back for an update, in microseconds."""
        return copy_us(self.host_state_bytes, self.plan.step.link)

    @property
    def predicted_overhead(self) -> float:
        """Time above that of eager torch, as a fraction of it, predicted from times of single operations."""
        return (self.plan.simulation.step_us + self.view_us + self.call_us) / self.eager_us - 1

    @property
    def overhead(self) -> float:
        """Time above that of eager torch, as a fraction of it: predicted where `measured` is none."""
        return self.predicted_overhead if self.measured is None else self.measured.overhead


class Fitter:
    """A backend of `torch.compile` that runs steps by memory plans.

    Args:
        budget: Budget of each step (see `fit`); none with a plan.
        plan: Plan of the step, or its file; none with a budget.
        other_bytes: Bytes on the device besides the step.
        swap_folder: On a processor, the folder for swapped tensors.
        link: Rates of copies to the host and back; measured by default.
        effort: How long to search for a plan.
        rewrite: Changes the joint graph before it is planned, for example to call kernels.
        element: Type of compressed activations (see `fit`); none to compress nothing.
        state_bytes: Bytes of the optimizer's states.
        states: The states, of which any may be on the host; none to leave them on the device.

    Attributes:
        steps: The steps that were planned so far.
        model: Returns the module, whose parameters and buffers are in the budget; none if it is a function.
    """

    def __init__(
        self,
        budget: int | str | None,
        plan: MemoryPlan | str | Path | None = None,
        other_bytes: int = 0,
        swap_folder: str | Path | None = None,
        link: HostLink | None = None,
        effort: PlanEffort | None = None,
        rewrite: Callable[[fx.GraphModule], None] | None = None,
        element: str | None = None,
        state_bytes: int = 0,
        states: HostStates | None = None,
    ) -> None:
        self._budget, self._given, self._other_bytes = budget, plan, other_bytes
        self._link, self._effort, self._element = link, effort, element
        self._options = (budget, plan, other_bytes, swap_folder, link, effort, rewrite, element, state_bytes)
        self._state_bytes, self._states = state_bytes, states
        self._rewrite = rewrite
        self._onednn = True
        self._graph = TracedGraph()
        self._parameters: frozenset[int] = frozenset()
        self._changed: frozenset[int] = frozenset()
        self._is_repeatable = True
        self._timer = GraphTimer()
        self._unwritten: RememberedStep | None = None
        self._unmeasured: Callable[[], None] | None = None
        self._unread_bytes = 0
        self._store: HostStore | None = None if swap_folder is None else FileStore(swap_folder)
        self.steps: list[FittedStep] = []
        self.model: Callable[[], nn.Module | None] = lambda: None

    def __reduce__(self) -> tuple[Callable[..., Fitter], tuple[Any, ...]]:
        """Copy and pickle the options alone: a copy of a fitted model plans its own steps.

        The optimizer's states are on the device in its plans: an optimizer belongs to one model.
        """
        return Fitter, self._options

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile a graph that Dynamo traced."""
        backend = aot_autograd(
            fw_compiler=self._boxed,
            bw_compiler=self._boxed,
            inference_compiler=self._boxed,
            partition_fn=self._partition,
            decompositions=None if self._rewrite is None else dict(DECOMPOSITIONS),
        )
        self._onednn = torch._C._get_mkldnn_enabled()
        self._parameters = parameter_places(inputs)
        self._unread_bytes = unread_bytes(self.model(), module, inputs)
        with unset_fake_temporarily():
            self._graph = self._traced(module, inputs)
        sample = _recurrent_sample(module)
        divide_recurrent_layers(module)
        step_count, self._unwritten = len(self.steps), None
        compiled = self._compiled(backend, module, inputs)
        if len(self.steps) > step_count and not self.steps[-1].remembered:
            self._unmeasured = functools.partial(self._measure, compiled, inputs, sample)
        return compiled

    def _compiled(
        self, backend: Callable[..., Any], module: fx.GraphModule, inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        """Return a graph as AOTAutograd compiles it."""
        remembered = self._graph.remembered
        # Groups for tuned kernels are looked for in the steps of recurrent layers.
        fused = self._onednn and self._rewrite is None and is_fused(module)
        fused = fused and (remembered is None or remembered.fused)
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(max(limit, _RECURSION_LIMIT))
        try:
            if fused:
                # The workspace of a whole layer may exceed a budget that its time steps fit.
                with contextlib.suppress(InputError), onednn(enabled=True):
                    return backend(module, inputs)  # type: ignore[no-any-return]
            self._graph = replace(self._graph, fused=False)
            with onednn(enabled=False):
                return backend(module, inputs)  # type: ignore[no-any-return]
        finally:
            sys.setrecursionlimit(limit)

    def measure(self) -> None:
        """Measure a step that was planned, where the caller does not notice it, and remember it.

        Dynamo's compilation must be over, because the first backward pass is compiled by its own.
        """
        unmeasured, self._unmeasured = self._unmeasured, None
        if unmeasured is not None:
            unmeasured()

    def _measure(
        self, compiled: Callable[..., Any], inputs: Sequence[Any], sample: Callable[[], Mapping[str, float]]
    ) -> None:
        """Measure and remember the step that was planned last."""
        fitted = self.steps[-1]
        measured = None
        recurrent_us = self._graph.recurrent_times()
        # Errors of other operations are those of both steps, planned and eager.
        if self._is_repeatable and recurrent_us:
            measured = measured_step(
                compiled,
                inputs,
                self._changed,
                self._timer,
                sample,
                graphs_us=fitted.plan.simulation.step_us + fitted.view_us,
                other_us=fitted.eager_us - sum(recurrent_us.values()),
                room_bytes=fitted.plan.budget_bytes - fitted.plan.simulation.peak_bytes,
            )
            self.steps[-1] = replace(fitted, measured=measured)
        if self._unwritten is not None and self._graph.path is not None:
            replace(self._unwritten, measured=measured).write(self._graph.path)

    def _partition(
        self, module: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **_: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Return the forward and the backward graph of a joint graph, as planned."""
        if self._rewrite is not None:
            self._rewrite(module)
        self._changed, self._is_repeatable = mutated_inputs(module), is_repeatable(module)
        keep_workspaces(module.graph)
        remove_redundant_copies(module.graph)
        mode = detect_fake_mode([node.meta.get("val") for node in module.graph.nodes])
        assert mode is not None
        with unset_fake_temporarily(), onednn(enabled=self._onednn):
            device = _device(module)
            store, link = self._host(device)
            joint_of = self._joint_of(module.graph, num_fwd_outputs, link, on_gpu=device.type == "cuda")
            fitted = self._restored(joint_of) or self._new(joint_of, on_gpu=device.type == "cuda")
            self._place_states(fitted, device)
            self.steps.append(fitted)
            _warn_if_slow(fitted, self._graph.recurrent_times())
        return planned_graphs(fitted.joint, fitted.plan.schedule, num_fwd_outputs, store, mode)

    def _joint_of(
        self, graph: fx.Graph, forward_results: int, link: HostLink | None, *, on_gpu: bool
    ) -> Callable[[PlanChoice, Times], JointStep]:
        """Return a function of a choice, which returns the joint step with it."""

        def joint_of(choice: PlanChoice, times: Times) -> JointStep:
            host_bytes = 0 if self._states is None else self._states.host_bytes(choice.host_states)
            read = functools.partial(
                joint_step,
                forward_results=forward_results,
                link=link,
                other_bytes=self._other_bytes + self._unread_bytes + self._state_bytes - host_bytes,
                on_gpu=on_gpu,
                parameters=self._parameters,
            )
            if not choice.compressed:
                return read(graph, times_us=times)
            assert self._element is not None
            plain = read(graph, times_us=lambda nodes: [0.0] * len(nodes))
            return read(compressed_graph(plain, choice.compressed, self._element).graph, times_us=times)

        return joint_of

    def _place_states(self, fitted: FittedStep, device: torch.device) -> None:
        """Keep the states in host memory that a plan has there."""
        if fitted.choice.host_states:
            assert self._states is not None
            assert self._store is not None
            room = room_bytes(fitted.joint.step, fitted.plan.budget_bytes)
            self._states.place(fitted.choice.host_states, self._store, device, room)

    def _traced(self, module: fx.GraphModule, inputs: Sequence[Any]) -> TracedGraph:
        """Return what is known about Dynamo's graph before AOTAutograd traces it."""
        path = None
        if self._given is None and self._rewrite is None:
            sizes = None if self._states is None else self._states.sizes
            path = remembered_path(module, inputs, repr((self._options, sizes, self._unread_bytes)))
        remembered = None if path is None else RememberedStep.read(path)
        if remembered is None:
            recurrent_times = _recurrent_times(module)
        else:
            recurrent_times = functools.partial(dict, remembered.recurrent_us)
        return TracedGraph(path=path, remembered=remembered, recurrent_times=recurrent_times)

    def _host(self, device: torch.device) -> tuple[HostStore | None, HostLink | None]:
        """Return the store and the link for a device."""
        if device.type == "meta":
            raise InputError(
                "the model is on the device meta: fit runs steps. Plan for an absent device by profile_step, "
                "or by the command plan memory"
            )
        if self._store is None and self._link is not None and device.type == "cpu":
            raise InputError("on a processor, host_link needs swap_folder: the folder for swapped tensors")
        if self._store is None and self._states is not None and device.type == "cpu":
            raise InputError("on a processor, host_states needs swap_folder: the folder for the states")
        if device.type == "cuda" and self._store is None:
            self._store = PinnedStore()
        if self._store is not None and self._link is None:
            remembered = self._graph.remembered
            known_link = None if remembered is None else remembered.link
            self._link = known_link or _measured_link(self._store, device)
        return self._store, self._link if self._store is not None else None

    def _restored(self, joint_of: Callable[[PlanChoice, Times], JointStep]) -> FittedStep | None:
        """Return the step as an earlier process measured and planned it; none if that is not known."""
        remembered = self._graph.remembered
        if remembered is None:
            return None
        try:
            with interpreting("the remembered plan"):
                joint = joint_of(remembered.choice, lambda nodes: remembered.times_us)
                plan = plan_of(remembered.plan, joint.step, "the remembered plan")
        except InputError:  # a damaged file, or that of another step
            return None
        chosen = ChosenPlan(choice=remembered.choice, joint=joint, plan=plan)
        fitted = self._fitted(chosen, remembered.eager_us, remembered.view_us, remembered.call_us)
        return replace(fitted, measured=remembered.measured, remembered=True)

    def _fitted(
        self,
        chosen: ChosenPlan,
        eager_us: float,
        view_us: float,
        call_us: float,
    ) -> FittedStep:
        host_bytes = 0 if self._states is None else self._states.host_bytes(chosen.choice.host_states)
        return FittedStep(
            joint=chosen.joint,
            plan=chosen.plan,
            eager_us=eager_us,
            view_us=view_us,
            call_us=call_us,
            choice=chosen.choice,
            state_bytes=self._state_bytes - host_bytes,
            host_state_bytes=host_bytes,
        )

    def _new(self, joint_of: Callable[[PlanChoice, Times], JointStep], *, on_gpu: bool) -> FittedStep:
        """Measure, plan and remember a step."""
        plain = joint_of(PlanChoice(), lambda nodes: [0.0] * len(nodes))
        times = _MeasuredTimes(room_bytes(plain.step, self._bytes(plain)))
        calls = [node for node in plain.graph.nodes if node.op == "call_function"]
        timed = [*zip(_layers(calls), times(calls), strict=True)]
        recurrent_us = self._graph.recurrent_times()
        other_us = sum(time_us for layer, time_us in timed if layer not in recurrent_us)
        eager_us = other_us + sum(recurrent_us.values())
        views = [node for node in calls if node not in plain.operation_of]
        view_us = 0.0 if on_gpu else sum(times(views))
        call_us = 0.0 if on_gpu else around_us()
        chosen = self._chosen(joint_of(PlanChoice(), times), lambda choice: joint_of(choice, times))
        if self._graph.path is not None:
            times_us = [
                operation.time_us
                for node, operation in zip(chosen.joint.nodes, chosen.joint.step.operations, strict=True)
                if node is not None
            ]
            self._unwritten = RememberedStep(
                times_us=times_us,
                eager_us=eager_us,
                view_us=view_us,
                call_us=call_us,
                recurrent_us=recurrent_us,
                fused=self._graph.fused,
                link=self._link,
                choice=chosen.choice,
                plan=content_of(chosen.plan),
            )
        return self._fitted(chosen, eager_us, view_us, call_us)

    def _chosen(self, joint: JointStep, joint_of: Callable[[PlanChoice], JointStep]) -> ChosenPlan:
        """Return the fastest plan of a step, and what it compresses and has on the host."""
        if self._given is not None:
            given = self._given
            plan = (
                plan_for(given, joint.step) if isinstance(given, MemoryPlan) else read_plan(given, joint.step)
            )
            return ChosenPlan(choice=PlanChoice(), joint=joint, plan=plan)
        budget = self._bytes(joint)
        return fastest(
            choices(joint, budget, self._element, self._states),
            lambda choice: joint if choice == PlanChoice() else joint_of(choice),
            lambda step: plan_memory(step, budget, effort=self._effort),
            budget,
            self._states,
        )

    def _bytes(self, joint: JointStep) -> int:
        """Return the bytes of the budget of a step, or of its plan."""
        whole_bytes = simulate(joint.step, unplanned(joint.step)).peak_bytes
        return whole_bytes if self._budget is None else budget_bytes(self._budget, whole_bytes)

    def _boxed(self, module: fx.GraphModule, _: Sequence[Any]) -> Callable[[list[Any]], Any]:
        """Return a callable that runs a graph and releases each tensor after its last use."""
        module.graph.set_codegen(_BoxedCodeGen())
        module.recompile()

        def run(values: list[Any]) -> Any:
            try:
                return self._timer(module, values)
            except BaseException:
                if self._store is not None:
                    self._store.abandon()
                raise

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


_SLOWER = 1.2
"""Ratio of times of the traced and the eager step above which a warning says so."""

_SHORTEST_US = 1000.0
"""Times of shorter steps are too uncertain for a warning."""

_RECURSION_LIMIT = 20_000
"""Python's limit while torch compiles its code for a step, which nests as deeply as the step has tensors."""


def _warn_if_slow(fitted: FittedStep, recurrent_us: Mapping[str, float]) -> None:
    """Warn if eager torch is much faster than what torch traced."""
    traced_us = fitted.plan.step.compute_us + fitted.view_us
    if recurrent_us and traced_us > max(_SLOWER * fitted.eager_us, _SHORTEST_US):
        warnings.warn(
            f"without recomputation, the {len(fitted.plan.step.operations)} operations that torch traced of "
            f"this step take {traced_us / fitted.eager_us:.1f} times as long as eager torch, because of its "
            f"recurrent layers: {', '.join(recurrent_us)}",
            stacklevel=2,
        )


class _MeasuredTimes:
    """Measures the times of calls, and those of equal name in a changed graph once.

    Args:
        room_bytes: Bytes for their tensors.
    """

    def __init__(self, room_bytes: int) -> None:
        self._room_bytes = room_bytes
        self._time_us_of: dict[str, float] = {}

    def __call__(self, nodes: Sequence[fx.Node]) -> list[float]:
        """Return the times of calls in microseconds."""
        new = [node for node in nodes if node.name not in self._time_us_of]
        if new:
            names = (node.name for node in new)
            self._time_us_of.update(zip(names, measured_times(new, self._room_bytes), strict=True))
        return [self._time_us_of[node.name] for node in nodes]


def _layers(calls: Sequence[fx.Node]) -> list[str]:
    """Return the module of each call; sums of gradients, which have none, are of that of their terms."""
    layers: dict[fx.Node, str] = {}
    for call in calls:
        terms = {layers.get(source, "") for source in call.all_input_nodes}
        is_sum = call.target is torch.ops.aten.add.Tensor and len(call.all_input_nodes) > 1 == len(terms)
        layers[call] = layer_of(call) or (terms.pop() if is_sum else "")
    return list(layers.values())


def _recurrent_times(module: fx.GraphModule) -> Callable[[], dict[str, float]]:
    """Return a function of the times of recurrent layers by eager torch, by module, which measures once."""
    return functools.cache(_recurrent_sample(module, once=False))


def _recurrent_sample(module: fx.GraphModule, *, once: bool = True) -> Callable[[], dict[str, float]]:
    """Return a function that runs recurrent layers by eager torch, and returns their times by module.

    Args:
        module: The graph that Dynamo traced.
        once: Whether to run each layer once, instead of the median of a few runs.
    """
    calls = [
        (layer_of(call), (call.target, call.args, call.kwargs))
        for call in recurrent_calls(module)
        if layer_of(call)
    ]

    def times() -> dict[str, float]:
        total_us: dict[str, float] = {}
        measured = eager_times([call for _, call in calls], once=once)
        for (layer, _), time_us in zip(calls, measured, strict=True):
            if time_us is not None:
                total_us[layer] = total_us.get(layer, 0.0) + time_us
        return total_us

    return times


def _device(module: fx.GraphModule) -> torch.device:
    """Return the device of a graph."""
    leaves = (leaf for node in module.graph.nodes for leaf in tree_leaves(node.meta.get("val")))
    device: torch.device = next(leaf.device for leaf in leaves if isinstance(leaf, Tensor))
    return device


def _measured_link(store: HostStore, device: torch.device) -> HostLink:
    """Return the rates and the latency of copies to the host and back."""
    small_s, large_s = (_copy_seconds(store, device, size) for size in (_SMALL_BYTES, _LARGE_BYTES))
    rates = (
        _LARGE_BYTES / max(1e-9, large - small) / 1e9 for small, large in zip(small_s, large_s, strict=True)
    )
    to_host, to_device = rates
    lost_fraction = 0.0 if device.type == "cuda" else _lost_fraction(store, large_s[0])
    return HostLink(
        to_host_gb_s=to_host,
        to_device_gb_s=to_device,
        latency_us=max(small_s) * 1e6,
        lost_fraction=lost_fraction,
    )


_SMALL_BYTES, _LARGE_BYTES = 1 << 10, 1 << 25


def _copy_seconds(store: HostStore, device: torch.device, size_bytes: int) -> tuple[float, float]:
    """Return the times of a copy of some bytes to the host and back, the shortest of a few each."""
    tensor = torch.ones(size_bytes, dtype=torch.uint8, device=device)
    out_s, back_s = [], []
    for _ in range(4):  # the first one also makes files, threads and streams
        began = time.perf_counter()
        host = store.copy_out(tensor)
        _complete(store, host, device)
        between = time.perf_counter()
        _complete(store, store.copy_in(host, device), device)
        out_s.append(between - began)
        back_s.append(time.perf_counter() - between)
        del host
    return min(out_s), min(back_s)


def _lost_fraction(store: HostStore, copy_s: float) -> float:
    """Return the fraction of the time of a copy that operations on a processor lose to it.

    Args:
        store: Memory on the host.
        copy_s: Time of a copy of `_LARGE_BYTES` to it in seconds.
    """
    memory = torch.ones(_LARGE_BYTES, dtype=torch.uint8)
    square, large = torch.ones(512, 512), torch.ones(1 << 20)
    # On one core, the copying thread is what the operations wait for.
    now_s = ThreadClock().now_s if cores() > 1 else time.perf_counter

    def operations_s(count: int, *, copying: bool) -> float:
        host = store.copy_out(memory) if copying else None
        began_s = now_s()
        for _ in range(count):
            torch.mm(square, square)  # computes
            torch.add(large, large)  # reads and writes memory
        elapsed_s = now_s() - began_s
        if host is not None:
            store.wait(host)
        return elapsed_s

    once_s = min(operations_s(1, copying=False) for _ in range(3))
    count = max(1, round(copy_s / max(1e-9, once_s)))
    alone_s, beside_s = (
        min(operations_s(count, copying=copying) for _ in range(3)) for copying in (False, True)
    )
    return min(1.0, max(0.0, (beside_s - alone_s) / max(1e-9, copy_s)))


def _complete(store: HostStore, memory: Tensor, device: torch.device) -> None:
    store.wait(memory)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _FittingContext(OptimizeContext):  # type: ignore[misc]
    """Dynamo's compilation of one model. A copy of the compiled module has a copy of this, which calls it."""

    @property
    def fitter(self) -> Fitter:
        """The backend."""
        return innermost_backend(self.callback).__self__  # type: ignore[no-any-return]

    def __call__(self, model: Any) -> Any:
        """Return a compiled module, or a compiled function or method with clear errors."""
        if isinstance(model, nn.Module):
            return super().__call__(model)  # calls this again with its method
        owner = getattr(model, "__self__", getattr(model, "__wrapped__", None))
        if isinstance(owner, nn.Module):
            self.fitter.model = weakref.ref(owner)
        return _with_clear_errors(super().__call__(model), owner if isinstance(owner, nn.Module) else model)


class _Tracing:
    """Dynamo's callback for a frame without a valid trace: traces a model as a whole, and measures its step.

    Args:
        callback: The callback of Dynamo.
    """

    def __init__(self, callback: Any) -> None:
        self._torchdynamo_orig_backend = callback

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with whole_model_traced(), torch._dynamo.config.patch(**_TRACING):
            traced = self._torchdynamo_orig_backend(*args, **kwargs)
            innermost_backend(self).__self__.measure()
        return traced


def fitted_by(fitter: Fitter, model: nn.Module | Callable[..., Any]) -> Any:
    """Return a model that a backend compiles; its calls raise this package's errors without those of torch.

    Args:
        fitter: The backend.
        model: A module, or a function of tensors.
    """
    # A method, because Dynamo copies the attributes of its backend, also those of an object.
    context = torch._dynamo.optimize(fitter.__call__, nopython=True, dynamic=False, **OWN_LIMIT)
    context.callback = _Tracing(context.callback)
    context.__class__ = _FittingContext
    fitted = context(model)
    if isinstance(fitted, nn.Module):
        # torch.compile of a fitted module would compile the model itself, without a plan.
        fitted._torchdynamo_wrapper_id = None
        fitted.__dict__.pop("get_compiler_config", None)
    else:
        _fitters[fitted] = fitter
    return fitted


_fitters: weakref.WeakKeyDictionary[Any, Fitter] = weakref.WeakKeyDictionary()
"""The backend of each function that `fitted_by` returned."""


def fitted_steps(fitted: Any) -> tuple[FittedStep, ...]:
    """Return the steps that a fitted model has planned so far.

    Args:
        fitted: Result of `fit`, or of `compile` with a memory budget.

    Raises:
        InputError: It was not returned by `fit`.
    """
    if not is_fitted(fitted):
        raise InputError(f"expected what tunebench.training.fit returned, got {type(fitted).__name__}")
    fitter = fitted.dynamo_ctx.fitter if isinstance(fitted, nn.Module) else _fitters[fitted]
    return tuple(fitter.steps)


def is_fitted(model: Any) -> bool:
    """Return whether `fit` returned a model, or the model that it is a copy of."""
    if isinstance(model, nn.Module):
        return isinstance(getattr(model, "dynamo_ctx", None), _FittingContext)
    return isinstance(model, Hashable) and model in _fitters


def _with_clear_errors(call: Callable[..., Any], model: Any) -> Callable[..., Any]:
    """Return a call that raises the errors of this package alone.

    Code around it that torch compiles calls it as it is: torch would trace into the model and lose its plan.
    """

    @functools.wraps(call, updated=())
    def clear(*args: Any, **kwargs: Any) -> Any:
        try:
            results = call(*args, **kwargs)
            _require_gradient(model, results)
            return results
        except BackendCompilerFailed as error:
            if isinstance(error.inner_exception, InputError):
                raise error.inner_exception from None
            raise
        except FailOnRecompileLimitHit as error:
            limit = torch._dynamo.config.recompile_limit
            raise InputError(
                f"torch traces a model for at most {limit} kinds of input: pad inputs to fewer shapes, or "
                "raise torch._dynamo.config.recompile_limit"
            ) from error
        except (Unsupported, UserError) as error:
            raise InputError(f"torch cannot trace the model as a whole: {first_reason(error)}") from error
        except TorchRuntimeError as error:
            raise InputError(f"the model fails with these inputs: {first_reason(error)}") from error

    separate: Any = torch.compiler.disable(clear, reason="tunebench.training.fit runs it by its own plan")
    separate._torchdynamo_wrapper_id = None  # or torch.compile would compile what is disabled
    return separate  # type: ignore[no-any-return]


def _require_gradient(model: Any, results: Any) -> None:
    """Raise InputError if a training step has no gradient."""
    training = model.training if isinstance(model, nn.Module) else True
    if not torch.is_grad_enabled() or not training:
        return
    leaves = tree_leaves(results)
    if all(isinstance(leaf, _VALUES) for leaf in leaves) and not any(
        isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves
    ):
        types = ", ".join(sorted({type(leaf).__name__ for leaf in leaves}))
        raise InputError(
            "the model returns no loss: expected a tensor that requires a gradient, got "
            f"{types or 'nothing'}. Return the loss, with parameters that require gradients; call the model "
            "under torch.no_grad() or in eval mode for results alone"
        )


_TRACING = {
    "optimize_ddp": False,  # one plan, not one for each bucket
    "skip_nnmodule_hook_guards": False,  # a hook that is added or removed later makes a new plan
}
"""Settings of Dynamo while it traces a model."""

_VALUES = (Tensor, bool, int, float, complex, str, type(None))
"""Types of results whose gradient is known: others may hold tensors."""
