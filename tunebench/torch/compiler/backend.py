"""`compile`: a backend of `torch.compile` that runs groups of operations by tuned kernels.

AOTAutograd traces forward and backward. The operations of both are grouped for minimal time on the device:
measured where workloads were tuned, predicted elsewhere.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import logging
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.eval_frame import innermost_backend
from torch._inductor import list_mode_options, list_options
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from tunebench._deprecation import warn_renamed
from tunebench.answer import tried_operators
from tunebench.device import Device
from tunebench.dispatch import Preference, choose, preference
from tunebench.dispatch.watch import is_watched
from tunebench.errors import InputError, TunebenchError, UnknownName
from tunebench.graph.partition_plan import PartitionPlan, plan_partition
from tunebench.torch._tensor import device_of
from tunebench.torch.compiler._attention_pattern import fuse_attention
from tunebench.torch.compiler._compiled_graph import Compiled, CompiledGraph, is_static
from tunebench.torch.compiler._constant_folding import fold_constants
from tunebench.torch.compiler._fused_call import FusedCall
from tunebench.torch.compiler._graph_rewriter import GraphRewriter, fused_call
from tunebench.torch.compiler._group_check import difference
from tunebench.torch.compiler._kernel_operator import check_later_kernels
from tunebench.torch.compiler._race import Race, Raced
from tunebench.torch.compiler._rms_norm_pattern import fuse_rms_norms
from tunebench.torch.compiler._ungrouped import is_ungrouped, remember_ungrouped, ungrouped_key
from tunebench.torch.compiler.capture import OWN_LIMIT, Phase, constant_inputs
from tunebench.torch.compiler.decomposition import repeat_casts
from tunebench.torch.compiler.inductor import (
    compile_by_inductor,
    is_inference,
    is_repeatable,
    mutated_inputs,
    parts_of,
    rewrite_in_place,
)
from tunebench.torch.compiler.translation import translate
from tunebench.workloads import parse

__all__ = ["OPTIONS", "Backend", "backend", "backend_of", "compile", "plans", "register_compiled"]

OPTIONS = ("benchmark", "check")
"""Options of the backend that are true or false (see `compile`); the others are inductor's."""

_log = logging.getLogger(__name__)


class Backend:
    """A backend of `torch.compile` that keeps the plans of the graphs it compiled.

    Args:
        name: Name of the model.
        benchmark: Whether to time groups against torch inside the model (see `compile`).
        check: Whether to compare the results of groups with torch's (see `compile`).
        inductor: Options of inductor.

    Attributes:
        plans: Plan of each graph, in the order of compilation: inference, or forward and backward.
        fused: Groups of each plan that were planned for tuned kernels, in the plan's order.
        skipped: Why other graphs were left to torch, without a plan.
        seconds: Seconds of compilation so far: ``plan`` is the choice of groups, with loading and checking of
            their kernels; ``inductor`` is tracing by AOTAutograd and everything that torch does after it. A
            backward graph that inductor compiles at its first run is not included.
    """

    def __init__(
        self,
        name: str = "model",
        *,
        benchmark: bool = False,
        check: bool = False,
        inductor: Mapping[str, Any] | None = None,
    ) -> None:
        self._name, self._benchmark, self._check = name, benchmark, check or benchmark
        self._inductor = dict(inductor or {})
        self.plans: list[PartitionPlan] = []
        self.fused: list[list[FusedCall]] = []
        self.skipped: list[str] = []
        self.seconds = {"plan": 0.0, "inductor": 0.0}

    @property
    def needs_inductor(self) -> bool:
        """Whether an option applies to inductor alone."""
        return self._benchmark or bool(self._inductor)

    def __reduce__(self) -> tuple[Callable[[], Backend], tuple[()]]:
        """Copy and pickle the options alone: a copy of a compiled model compiles its own graphs."""
        copied = functools.partial(
            Backend, self._name, benchmark=self._benchmark, check=self._check, inductor=self._inductor
        )
        return copied, ()

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        """Compile a graph that Dynamo traced."""
        by_inductor = functools.partial(compile_by_inductor, config=self._inductor)
        return CompiledGraph(module, inputs, self._compiled, by_inductor)

    def _compiled(
        self, module: fx.GraphModule, inputs: Sequence[Any], by_torch: Callable[[], Compiled]
    ) -> Compiled:
        """Compile a graph with constant sizes.

        Args:
            module: The graph.
            inputs: Its inputs.
            by_torch: Compiles the graph by inductor alone.
        """
        if preference() == "torch" or self._has_no_records(inputs):
            return by_torch()
        key = _key_of(module, inputs)
        if is_ungrouped(key):
            self._leave("no group ran by a tuned kernel when it was planned, and nothing was recorded since")
            return by_torch()
        step, began, planned_s = _Step(), time.monotonic(), self.seconds["plan"]
        try:
            rewrite = functools.partial(self._rewritten, step)
            ours = compile_by_inductor(module, inputs, rewrite, config=self._inductor)
        except _NoGroupsError:
            if not step.calls:  # what missed a kernel may have it the next time
                remember_ungrouped(key)
            ours = by_torch()
        except InputError as error:
            self._skip(str(error))
            ours = by_torch()
        else:
            if self._benchmark and step.may_repeat:
                ours = Raced(ours, by_torch(), step.mutated, functools.partial(self._end_race, step))
        self.seconds["inductor"] += time.monotonic() - began - (self.seconds["plan"] - planned_s)
        return _watched(ours, step.calls)

    def replace_groups(self, module: fx.GraphModule) -> None:
        """Replace groups of a joint graph by calls of their kernels, in place, where there are any."""
        inputs = [node.meta.get("val") for node in module.graph.find_nodes(op="placeholder")]
        if preference() == "torch" or self._has_no_records(inputs):
            return
        try:
            rewrite_in_place(module, functools.partial(self._rewritten, _Step()))
        except _NoGroupsError:
            return
        except InputError as error:
            self._skip(str(error))

    def _has_no_records(self, inputs: Iterable[Any]) -> bool:
        """Return whether torch runs every group, since nothing was tuned on the device of the inputs."""
        device = _device_of(inputs)
        if preference() != "faster" or device is None:
            return False
        try:
            if tried_operators(device):
                return False
        except TunebenchError:  # each group says why
            return False
        self._leave(f"nothing was tuned on {device.name}")
        return True

    def _end_race(self, step: _Step, race: Race) -> None:
        """Leave the groups of a graph to torch if torch won the race."""
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
        began = time.monotonic()
        device, ordinal = _device(module)
        if is_inference(module):
            fuse_attention(module.graph)
            fuse_rms_norms(module.graph)
        fold_constants(module)
        repeat_casts(module.graph)
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
        self.seconds["plan"] += time.monotonic() - began
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
        partition = plan_partition(
            translation.graph, device, preferred=preferred, measured_only=preferred == "faster"
        )
        groups = [offer.group for offer in partition.chosen if offer.price.by == "tunebench"]
        calls = [
            fused_call(translation, group, device, ordinal, f"{phase}_group_{index}")
            for index, group in enumerate(groups)
        ]
        with unset_fake_temporarily():
            for call in calls:
                self._decide(call, preferred)
        _log_plan(partition, calls, preferred)
        return partition, calls

    def _decide(self, call: FusedCall, preferred: Preference) -> None:
        """Leave a group to torch if no kernel runs it, or if its results are wrong."""
        reason = call.missing_kernel(preferred)
        if not reason and self._check:
            if reason := difference(call):
                call.store_wrong_kernels()
                warnings.warn(f"torch runs {' and '.join(call.group.workloads)}: {reason}", stacklevel=2)
            for workload in call.group.workloads:
                check_later_kernels(workload)
        if reason:
            call.leave_to_torch(reason)

    def _leave(self, reason: str) -> None:
        self.skipped.append(reason)
        _log.info("%s: torch runs a graph: %s", self._name, reason)

    def _skip(self, reason: str) -> None:
        self._leave(reason)
        warnings.warn(f"torch runs a graph of {self._name}: {reason}", stacklevel=2)


@dataclass(slots=True)
class _Step:
    """Groups and effects of a compiled graph.

    Attributes:
        calls: Its groups that were planned for tuned kernels, forward and backward.
        mutated: Places of inputs that it changes.
        may_repeat: Whether it can run several times, on copies of the inputs that it changes.
    """

    calls: list[FusedCall] = field(default_factory=list)
    mutated: frozenset[int] = frozenset()
    may_repeat: bool = True


def _watched(run: Compiled, calls: Sequence[FusedCall]) -> Compiled:
    """Return a compiled graph that reports the groups that torch runs to watchers."""
    if not calls:
        return run

    def watched(*arguments: Any) -> Any:
        result = run(*arguments)
        if is_watched():
            for call in calls:
                if call.by == "torch":
                    call.notify_watchers()
        return result

    return watched


class _NoGroupsError(Exception):
    """No group of a graph runs by tuned kernels."""


def _key_of(module: fx.GraphModule, inputs: Sequence[Any]) -> str:
    """Return the key of a graph for which only faster kernels are wanted; empty for others."""
    device = _device_of(inputs)
    return ungrouped_key(module, inputs, device) if preference() == "faster" and device is not None else ""


def _device_of(inputs: Iterable[Any]) -> Device | None:
    """Return the device of a graph's inputs; None if they are on several, or on one without kernels."""
    devices = {value.device for value in inputs if isinstance(value, torch.Tensor)}
    device = device_of(devices.pop()) if len(devices) == 1 else ""
    return None if isinstance(device, str) else device[0]


def _device(module: fx.GraphModule) -> tuple[Device, int]:
    """Return the device of a graph's inputs and its ordinal.

    Raises:
        InputError: if tuned kernels cannot run the graph.
    """
    leaves = [leaf for node in module.graph.nodes for leaf in tree_leaves(node.meta.get("val"))]
    if any(isinstance(leaf, torch.Tensor) and not is_static(leaf) for leaf in leaves):
        raise InputError("sizes that depend on data")
    inputs = [node.meta.get("val") for node in module.graph.nodes if node.op == "placeholder"]
    devices = {value.device for value in inputs if isinstance(value, torch.Tensor)}
    device = device_of(devices.pop()) if len(devices) == 1 else f"tensors on {len(devices)} devices"
    if isinstance(device, str):
        raise InputError(device)
    return device


def _log_plan(partition: PartitionPlan, calls: Iterable[FusedCall], preferred: Preference) -> None:
    """Log a plan: its time, each group, and each operation left to torch with the reason."""
    if not _log.isEnabledFor(logging.INFO):
        return
    head, *lines = str(partition).splitlines()
    _log.info("%s", head)
    planned = iter(calls)
    for line, offer in zip(lines, partition.chosen, strict=True):
        if offer.price.by == "tunebench":
            reasons = {next(planned).reason}
        else:
            reasons = {
                choose(parse(text), partition.device, preferred).reason for text in offer.group.workloads
            }
        _log.info("%s", " ".join([line, *(f"({reason})" for reason in reasons if reason)]))
    for offer in partition.rejected:
        _log.debug("  not fused, %.1f us longer: %s", -offer.saved_us, " and ".join(offer.group.workloads))


def backend(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph that Dynamo traced: ``torch.compile(model, backend="tunebench")``.

    Args:
        module: The traced module.
        inputs: Example inputs.
        mode: A mode of `torch.compile` (see `compile`).
        options: Values of `OPTIONS`, and options of inductor.

    Raises:
        InputError: if the mode or an option is unknown.
    """
    made = Backend(**_checked_options(mode, options))
    compiled = made(module, inputs)
    parameter_index = next(
        (parameter_index for parameter_index, value in enumerate(inputs) if isinstance(value, nn.Parameter)),
        None,
    )
    if parameter_index is None:
        return compiled
    last: Any = None

    def run(*arguments: Any) -> Any:
        nonlocal last
        if arguments[parameter_index] is not last:  # modules of the same structure share the graph
            last = arguments[parameter_index]
            _by_parameter.setdefault(last, {})[made] = None
        return compiled(*arguments)

    return run


def _checked_options(mode: str | None, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the arguments of `Backend` of a mode and options.

    Raises:
        InputError: if the mode or an option is unknown, or the value of an option is not true or false.
    """
    modes, passed = list_mode_options(), dict(options or {})
    if mode is not None and mode not in modes:
        raise UnknownName("mode", mode, modes)
    chosen = {name: passed.pop(name) for name in OPTIONS if name in passed}
    for name, value in chosen.items():
        if not isinstance(value, bool):
            raise InputError(f"expected option {name!r} to be true or false, got {value!r}")
    option_names = {option.replace("-", "_") for option in list_options()} if passed else set[str]()
    unknown = next((name for name in passed if name.replace("-", "_") not in option_names), None)
    if unknown is not None:
        raise UnknownName(
            "option",
            unknown,
            (*OPTIONS, *difflib.get_close_matches(unknown, option_names), "inductor's options"),
        )
    if (mode or "").startswith("max-autotune"):
        chosen.setdefault("benchmark", True)
    return {**chosen, "inductor": {**modes[mode or "default"], **passed}}


_compiled: weakref.WeakKeyDictionary[Any, Backend] = weakref.WeakKeyDictionary()
"""Backend of each model that `compile` returned."""
_by_parameter: Any = WeakTensorKeyDictionary()
"""Backends of the graphs that ran with a parameter and were compiled with ``backend="tunebench"``."""


def compile(  # noqa: A001 - torch's name
    model: nn.Module | Callable[..., Any] | None = None,
    *,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    benchmark: bool = False,
    check: bool = False,
    memory_budget: int | str | None = None,
) -> Any:
    """Compile a model with gradients: tuned kernels run groups of operations, inductor compiles the rest.

    Groups are chosen at the first call with each kind of input, from the results in the database. A group's
    kernel runs where it is known to be faster than torch, unless `prefer` says otherwise. Where nothing was
    tuned on the device, torch compiles the model as without tunebench, at no further cost.

    Args:
        model: A module, or a function of tensors. Without it, a decorator with these options is returned.
        fullgraph: Whether to raise if torch cannot trace the whole model.
        dynamic: Whether torch traces the model once for all sizes. With None, torch does so when an input
            has a second size. Kernels are chosen for each set of sizes.
        mode: A mode of `torch.compile`, which applies to what inductor compiles; ``max-autotune`` sets
            `benchmark` too.
        options: `benchmark` and `check` by name, and options of inductor.
        benchmark: Whether to also compile without groups, run both alternately at the first call, and keep
            the faster one. A kernel's time in the model can differ from its time alone.
        check: Whether to compare each group with torch in float64, on random data with the strides of its
            inputs. Torch runs a group that differs, with a warning. `benchmark` checks too.
        memory_budget: Deprecated; use ``tunebench.training.fit(model, budget, tuned_kernels=True)``.

    Returns:
        What `torch.compile` returns: a module with the parameters of the model, or a function. Copies and
        pickles of the module compile again at their first call.

    Raises:
        InputError: if the model is not callable, or the mode or an option is unknown.
    """
    checked = _checked_options(mode, options)
    if model is None:
        return functools.partial(
            compile,
            fullgraph=fullgraph,
            dynamic=dynamic,
            mode=mode,
            options=options,
            benchmark=benchmark,
            check=check,
            memory_budget=memory_budget,
        )
    checked |= {name: True for name, value in (("benchmark", benchmark), ("check", check)) if value}
    if not callable(model):
        raise InputError(f"expected a torch.nn.Module or a function, got {type(model).__name__}")
    made = Backend(getattr(model, "__name__", type(model).__name__), **checked)
    if memory_budget is not None:
        if dynamic or made.needs_inductor:
            raise InputError(
                "a memory budget excludes dynamic sizes, modes, benchmark and options of inductor"
            )
        warn_renamed("compile(memory_budget=...)", "tunebench.training.fit(..., tuned_kernels=True)")
        fit = importlib.import_module("tunebench.training").fit
        return fit(model, memory_budget, tuned_kernels=True, check=checked.get("check", False))
    compiled = torch.compile(model, backend=made, fullgraph=fullgraph, dynamic=dynamic, **OWN_LIMIT)
    register_compiled(compiled, made)
    return compiled


def register_compiled(compiled: Any, made_by: Backend) -> None:
    """Remember the backend of a compiled model, so that `plans` and `backend_of` know it.

    Args:
        compiled: A module or function that torch compiled.
        made_by: The backend whose groups it runs.
    """
    _compiled[compiled] = made_by


def plans(compiled: Any) -> tuple[PartitionPlan, ...]:
    """Return the plans of all graphs that a compiled model has compiled so far.

    A graph has none where nothing was tuned on the device, and where it had no groups when it was compiled
    before, unless tuned kernels are preferred (`prefer`).

    Args:
        compiled: Result of `compile` or ``torch.compile(module, backend="tunebench")``, or a copy of it.

    Raises:
        InputError: if it was not compiled by tunebench.
    """
    return tuple(plan for made in _backends_of(compiled) for plan in made.plans)


def backend_of(compiled: Any) -> Backend:
    """Return the backend of a model that `compile` returned.

    Raises:
        InputError: if it was compiled otherwise.
    """
    (made,) = _backends_of(compiled)
    return made


def _backends_of(compiled: Any) -> Sequence[Backend]:
    if compiled in _compiled:
        return (_compiled[compiled],)
    context = getattr(compiled, "dynamo_ctx", None)
    compiler = getattr(context and innermost_backend(context.callback), "compiler_fn", None)
    if isinstance(compiler, Backend):
        return (compiler,)
    parameters = compiled.parameters() if isinstance(compiled, nn.Module) else ()
    backends = dict.fromkeys(made for parameter in parameters for made in _by_parameter.get(parameter, ()))
    if not backends and compiler is not backend:
        raise InputError(
            "expected what tunebench.torch.compile returned, or a module with parameters that "
            'torch.compile(module, backend="tunebench") compiled'
        )
    return tuple(backends)
