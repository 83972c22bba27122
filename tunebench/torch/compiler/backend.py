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
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch._dynamo.eval_frame import innermost_backend
from torch._inductor import list_mode_options, list_options
from torch.utils.weak import WeakTensorKeyDictionary

from tunebench._deprecation import warn_renamed
from tunebench.answer import tried_operators
from tunebench.dispatch import preference
from tunebench.dispatch.watch import is_watched
from tunebench.errors import InputError, TunebenchError, UnknownName
from tunebench.torch.compiler._compiled_graph import (
    Compiled,
    CompiledGraph,
    GraphCompiler,
    compiled_at_call,
)
from tunebench.torch.compiler._plan_cache import PlanKey, RememberedPlan, RememberedRace
from tunebench.torch.compiler._race import Race, Raced
from tunebench.torch.compiler.graph_key import input_device
from tunebench.torch.compiler.inductor import OWN_LIMIT, compile_by_inductor, rewrite_in_place

if TYPE_CHECKING:
    from tunebench.device import Device
    from tunebench.graph.partition_plan import PartitionPlan
    from tunebench.torch.compiler._fused_call import FusedCall
    from tunebench.torch.compiler._group_planner import GroupPlanner
    from tunebench.torch.compiler._plan_cache import PlannedGroup

__all__ = ["OPTIONS", "Backend", "backend", "backend_of", "compile", "plans", "register_compiled"]

OPTIONS = ("benchmark", "check")
"""Options of the backend that are true or false (see `compile`); the others are inductor's."""

_log = logging.getLogger(__name__)


class Backend:
    """A backend of `torch.compile` that keeps the plans of the graphs it compiled.

    Args:
        name: Name of the model.
        benchmark: When to time groups against torch inside the model (see `compile`).
        check: Whether to compare the results of groups with torch's (see `compile`).
        inductor: Options of inductor.

    Attributes:
        fused: Groups of each plan that this process made and that were planned for tuned kernels, in the
            plan's order.
        skipped: Why other graphs were left to torch, without a plan.
        seconds: Seconds of compilation so far: ``plan`` is the choice of groups, with loading and checking of
            their kernels; ``inductor`` is tracing by AOTAutograd and everything that torch does after it. A
            backward graph that inductor compiles at its first run is not included.
        reuse: Whether to use plans and compiled graphs of earlier processes.
    """

    def __init__(
        self,
        name: str = "model",
        *,
        benchmark: bool | None = None,
        check: bool = False,
        inductor: Mapping[str, Any] | None = None,
    ) -> None:
        self._name, self._benchmark, self._check = name, benchmark, check or bool(benchmark)
        self._inductor = dict(inductor or {})
        self._races: weakref.WeakSet[Raced] = weakref.WeakSet()
        self._plans: list[Callable[[], Sequence[PartitionPlan]]] = []
        self.fused: list[list[FusedCall]] = []
        self.skipped: list[str] = []
        self.seconds = {"plan": 0.0, "inductor": 0.0}
        self.reuse = not self._check

    @property
    def plans(self) -> list[PartitionPlan]:
        """Plan of each graph, in the order of compilation: inference, or forward and backward."""
        return [partition for partitions in self._plans for partition in partitions()]

    @property
    def needs_inductor(self) -> bool:
        """Whether an option applies to inductor alone."""
        return bool(self._benchmark or self._inductor)

    def race_next(self) -> None:
        """Make every graph whose race against torch is due later race at its next call."""
        for raced in tuple(self._races):
            raced.race_next()

    def __reduce__(self) -> tuple[Callable[[], Backend], tuple[()]]:
        """Copy and pickle the options alone: a copy of a compiled model compiles its own graphs."""
        copied = functools.partial(
            Backend, self._name, benchmark=self._benchmark, check=self._check, inductor=self._inductor
        )
        return copied, ()

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        """Compile a graph that Dynamo traced."""
        by_inductor = functools.partial(compile_by_inductor, config=self._inductor)
        for_all_sizes = functools.partial(self._compiled, sizes="all sizes")
        return CompiledGraph(module, inputs, self._compiled, for_all_sizes, by_inductor)

    def _compiled(
        self, module: fx.GraphModule, inputs: Sequence[Any], by_torch: GraphCompiler, sizes: str = ""
    ) -> Compiled:
        """Compile a graph, from its plan if an earlier process made one for the same sizes.

        Args:
            module: The graph.
            inputs: Its inputs.
            by_torch: Compiles it by inductor alone.
            sizes: ``all sizes`` if some change between calls; torch runs the operations that have them.
        """
        if preference() == "torch" or self._has_no_records(inputs):
            return by_torch(inputs)
        where = input_device(inputs)
        if preference() != "faster" or where is None:
            return self._compiled_anew(module, inputs, by_torch, None)
        mode = repr((sizes, sorted(self._inductor.items()), self._benchmark))
        key = PlanKey.of(module, inputs, where[0], mode)
        remembered = key.find()
        if remembered is not None and self._may_leave(remembered):
            self._leave(remembered.reason)
            return _watched(by_torch(inputs), where, lambda: remembered.groups)
        if remembered is not None and self.reuse and remembered.has_kernels(*where):
            return self._compiled_again(module, inputs, by_torch, key, remembered)
        ratio = None if remembered is None else remembered.race.ratio
        return self._compiled_anew(module, inputs, by_torch, key, ratio=ratio)

    def _may_leave(self, remembered: RememberedPlan) -> bool:
        """Return whether torch runs a graph with a plan: it has no groups, or torch won its race."""
        return not remembered.groups or (remembered.is_left_to_torch and self._benchmark is None)

    def _compiled_again(
        self,
        module: fx.GraphModule,
        inputs: Sequence[Any],
        by_torch: GraphCompiler,
        key: PlanKey,
        remembered: RememberedPlan,
    ) -> Compiled:
        """Compile a graph that has a plan: torch finds what it compiled for this plan in its caches."""
        began = time.monotonic()
        try:
            ours = compile_by_inductor(
                module, inputs, _plan_again, plan=remembered.compiled_as, config=self._inductor
            )
        except _PlanAgainError:  # torch's caches have been emptied, or the graph cannot be in them
            return self._compiled_anew(module, inputs, by_torch, key, ratio=remembered.race.ratio)
        self._plans.append(functools.cache(remembered.partitions))
        groups = list(remembered.groups)

        def end(race: Race) -> None:
            if race.winner == "torch":
                groups[:] = [group.left_to_torch(race.reason) for group in groups]
            key.remember_race(remembered.compiled_as, race.ratio, groups)

        ours = self._raced(ours, inputs, by_torch, remembered.race, end)
        self.seconds["inductor"] += time.monotonic() - began
        return _watched(ours, input_device(inputs), lambda: groups)

    def _compiled_anew(
        self,
        module: fx.GraphModule,
        inputs: Sequence[Any],
        by_torch: GraphCompiler,
        key: PlanKey | None,
        *,
        ratio: float | None = None,
    ) -> Compiled:
        """Plan and compile a graph, and remember the plan under its key.

        Args:
            module: The graph.
            inputs: Its inputs.
            by_torch: Compiles it by inductor alone.
            key: Key of the plan; None if it is not remembered.
            ratio: Result of the race that its kernels have won; None if they have not raced.
        """
        planner, began = self._planner(), time.monotonic()
        records = "" if key is None else key.records()
        plan = "" if key is None or not records or not self.reuse else key.plan_name(records)

        def end(race: Race) -> None:
            if race.winner == "torch":
                for call in planner.calls:
                    call.leave_to_torch(race.reason)
            if key is not None and plan:
                key.remember_race(plan, race.ratio, planner.groups)

        grouped = self._grouped(module, inputs, planner, plan)
        race = planner.race(time.monotonic() - began, ratio)
        ours = by_torch(inputs) if grouped is None else self._raced(grouped, inputs, by_torch, race, end)
        self._keep(planner)
        has_kernels = any(call.by == "tunebench" for call in planner.calls)
        # What missed a kernel may have it the next time.
        if key is not None and planner.plans and (not planner.calls or (plan and has_kernels)):
            key.remember(records, plan, planner.groups, planner.plans, race)
        self.seconds["inductor"] += time.monotonic() - began - planner.seconds
        return _watched(ours, input_device(inputs), lambda: planner.groups)

    def _grouped(
        self, module: fx.GraphModule, inputs: Sequence[Any], planner: GroupPlanner, plan: str
    ) -> Compiled | None:
        """Compile a graph with groups; return None if torch runs it."""
        from tunebench.torch.compiler._group_planner import NoGroupsError

        try:
            return compile_by_inductor(module, inputs, planner.rewritten, plan=plan, config=self._inductor)
        except NoGroupsError:
            return None
        except InputError as error:
            self._skip(str(error))
            return None

    def _raced(
        self,
        ours: Compiled,
        inputs: Sequence[Any],
        by_torch: GraphCompiler,
        race: RememberedRace,
        end: Callable[[Race], None],
    ) -> Compiled:
        """Return a graph that races against torch, or the graph itself if it has raced or must not.

        With `benchmark`, it races at its first call. By default, it races once its calls have taken as long
        as its compilation: compiling it for torch, too, then costs at most as much as the calls so far.
        """
        is_fixed = torch.are_deterministic_algorithms_enabled() or self._inductor.get("triton.cudagraphs")
        by_default = self._benchmark is None and preference() == "faster" and not is_fixed
        if race.mutated is None or race.ratio is not None or not (self._benchmark or by_default):
            return ours
        torch_graph = by_torch(inputs) if self._benchmark else None

        def compiler(arguments: Sequence[Any]) -> Compiled:
            return torch_graph or compiled_at_call(by_torch, arguments)

        def log_and_end(result: Race) -> None:
            _log.info("%s: %s runs a graph: %s", self._name, result.winner, result.reason)
            end(result)

        after_s = 0.0 if self._benchmark else race.seconds
        raced = Raced(ours, compiler, race.mutated, log_and_end, after_s=after_s)
        self._races.add(raced)
        return raced

    def _planner(self) -> GroupPlanner:
        from tunebench.torch.compiler._group_planner import GroupPlanner

        return GroupPlanner(name=self._name, check=self._check)

    def _keep(self, planner: GroupPlanner) -> None:
        """Keep the plans and the groups of a graph."""
        plans = planner.plans
        self._plans.append(lambda: plans)
        self.fused += planner.fused
        self.seconds["plan"] += planner.seconds

    def replace_groups(self, module: fx.GraphModule) -> None:
        """Replace groups of a joint graph by calls of their kernels, in place, where there are any."""
        inputs = [node.meta.get("val") for node in module.graph.find_nodes(op="placeholder")]
        if preference() == "torch" or self._has_no_records(inputs):
            return
        from tunebench.torch.compiler._group_planner import NoGroupsError

        planner = self._planner()
        try:
            rewrite_in_place(module, planner.rewritten)
        except NoGroupsError:
            return
        except InputError as error:
            self._skip(str(error))
        finally:
            self._keep(planner)

    def _has_no_records(self, inputs: Iterable[Any]) -> bool:
        """Return whether torch runs every group, since nothing was tuned on the device of the inputs."""
        where = input_device(inputs)
        if preference() != "faster" or where is None:
            return False
        try:
            if tried_operators(where[0]):
                return False
        except TunebenchError:  # each group says why
            return False
        self._leave(f"nothing was tuned on {where[0].name}")
        return True

    def _leave(self, reason: str) -> None:
        self.skipped.append(reason)
        _log.info("%s: torch runs a graph: %s", self._name, reason)

    def _skip(self, reason: str) -> None:
        self._leave(reason)
        warnings.warn(f"torch runs a graph of {self._name}: {reason}", stacklevel=2)


class _PlanAgainError(Exception):
    """Torch's caches do not have the graph of a remembered plan."""


def _plan_again(module: fx.GraphModule) -> fx.GraphModule:
    raise _PlanAgainError


def _watched(
    run: Compiled, where: tuple[Device, int] | None, groups: Callable[[], Iterable[PlannedGroup]]
) -> Compiled:
    """Return a compiled graph that reports to watchers what it does not report by itself."""
    if where is None or not groups():
        return run

    def watched(*arguments: Any) -> Any:
        result = run(*arguments)
        if is_watched():
            for group in groups():
                group.notify_watchers(*where)
        return result

    return watched


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
    benchmark: bool | None = None,
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
        benchmark: When each graph races against torch, since a kernel's time in the model can differ from its
            time alone: the graph is also compiled without groups, both run alternately, and the faster one
            stays. With True, at the first call; with False, never. By default, once it has run for as long as
            compiling it took, and later processes use the result; never with deterministic algorithms, CUDA
            graphs, or preferred kernels.
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
    if benchmark is not None:
        checked["benchmark"] = benchmark
    if check:
        checked["check"] = True
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

    A graph has none where nothing was tuned on the device, and where it had no groups, or torch was faster,
    when another process compiled it, unless tuned kernels are preferred (`prefer`).

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
