"""Trace heads of steps by Dynamo: a graph with backward passes and updates as nodes, guards, side effects.

The head ends at the first thing after a backward pass that is not understood, at the latest after the
statement in which an optimizer steps. What follows runs as without co-execution, so nothing that Dynamo reads
is changed by code that it does not see, and lists that grow in each step decide nothing.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from tunebench.training.coexecution._head_reads import DECIDE, TracedReads, Ways
from tunebench.training.coexecution._optimizer_step import CLASSES
from tunebench.training.coexecution._patching import has_hooks

__all__ = ["BACKWARD", "CLEAR", "CLIP", "UPDATE", "Method", "active_optimizers", "traced"]

Method = tuple[type, str, Any]
"""A class, the name of an attribute, and what it was."""

_THREAD = threading.local()

_OF_TRACES = (
    str(Path(torch.__file__).with_name("_compile.py")),
    str(Path(torch.__file__).with_name("_dynamo")),
    str(Path(__file__).parent),
)
"""Files whose functions Dynamo does not trace, and the folder of this file."""

_CONFIG = {
    "trace_numpy": False,
    "allow_rnn": True,
    "track_nodes_for_deduplication": False,
    "allow_unspec_int_on_nn_module": True,
    "suppress_errors": True,
    "recompile_limit": 64,
    "error_on_recompile": False,
    "fail_on_recompile_limit_hit": False,
    "automatic_dynamic_local_pgo": False,
    "record_runtime_overhead": False,
    "guard_nn_modules": True,
    "guard_nn_modules_using_dict_tags": False,
    "skip_nnmodule_hook_guards": False,
    "skip_no_tensor_aliasing_guards_on_parameters": False,
    "skip_tensor_guards_with_matching_dict_tags": False,
    "use_recursive_dict_tags_for_guards": False,
    "use_lamba_guard_for_object_aliasing": False,
}
"""Options of Dynamo: no trace may end in an error, and no guard may be left out.

Guards of aliases are guards of both paths, not one function of all variables.
"""


def _is_fake(tensor: Tensor) -> bool:
    return isinstance(tensor, torch._subclasses.fake_tensor.FakeTensor)


def BACKWARD(loss: Tensor, retain_graph: bool | None) -> None:  # noqa: N802  # a node of a graph
    """Run a backward pass."""
    if not _is_fake(loss):
        loss.backward(retain_graph=retain_graph)


def CLEAR(position: int) -> None:  # noqa: N802
    """Clear the gradients of an active optimizer; only a graph that runs as it is calls it."""
    current: list[Optimizer] = _THREAD.optimizers
    current[position].zero_grad()


def UPDATE(position: int) -> None:  # noqa: N802
    """Let an active optimizer step; only a graph that runs as it is calls it."""
    current: list[Optimizer] = _THREAD.optimizers
    current[position].step()


def CLIP(parameters: list[Tensor], max_norm: float, norm_type: float) -> Tensor:  # noqa: N802
    """Clip gradients."""
    if _is_fake(parameters[0]):
        return torch.empty((), dtype=parameters[0].dtype)
    return clip_grad_norm_(parameters, max_norm, norm_type)


def _clipped(parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Clip gradients, as the trace sees it."""
    return CLIP(list(parameters), max_norm, norm_type)


@contextmanager
def active_optimizers(current: list[Optimizer]) -> Iterator[None]:
    """Set the optimizers that calls of `CLEAR` and `UPDATE` number in this thread."""
    before = getattr(_THREAD, "optimizers", None)
    _THREAD.optimizers = current
    try:
        yield
    finally:
        _THREAD.optimizers = before


def traced(
    step: Callable[..., Any],
    backend: Callable[..., Any],
    optimizers: list[Optimizer],
    methods: list[Method],
    reached: Callable[[int], None],
    count: Callable[[], None],
    *,
    with_updates: bool,
    fixed_numbers: bool,
    fixed_sizes: Callable[[], bool],
    ways: Ways,
) -> tuple[Callable[..., Any], Any]:
    """Return a function that runs the step, and traces its head where no trace of it is valid.

    While the second result is the thread's callback of evaluated frames, the step itself does this, without
    the preparations of the first trace.

    Args:
        step: A function of Python.
        backend: From a graph and examples of its inputs to the function that runs it.
        optimizers: The optimizers that traced heads clear or let step, which are appended.
        methods: The methods that the last trace looked through.
        reached: Called with the line of each instruction of the step that a trace reaches.
        count: Called before each trace.
        with_updates: Whether heads go on where an optimizer steps.
        fixed_numbers: Whether each value of a number of Python has a trace of its own.
        fixed_sizes: Whether each set of sizes has one in the next trace.
        ways: The ways that Python takes after it read values.
    """
    import torch._dynamo as dynamo

    for function in (BACKWARD, CLEAR, UPDATE, CLIP, DECIDE):
        torch.fx.node.has_side_effect(function)
    dynamo.allow_in_graph(CLIP)
    with patch.object(dynamo.eval_frame, "get_compiler_fn", lambda function: function):  # imports Inductor
        context = dynamo.optimize(backend)
    context.callback = _Callback(
        context.callback,
        step.__code__,
        count,
        partial(
            _opaque,
            partial(_of_optimizer, optimizers, with_updates),
            methods,
            reached,
            fixed_numbers,
            fixed_sizes,
            ways,
        ),
    )
    return context(step), context.callback


def _is_of_trace(code: CodeType) -> bool:
    """Return whether guards and code of Dynamo call a function: unmarked, each call asks about it."""
    return (
        code.co_name.startswith("torch_dynamo_resume_in_")
        or code.co_name == "_as_tensor_fullprec"
        or code.co_filename.startswith(_OF_TRACES)
    )


class _Callback:
    """What Dynamo calls for functions without a valid trace: only the step is traced."""

    def __init__(
        self,
        callback: Any,
        code: CodeType,
        count: Callable[[], None],
        opaque: Callable[[], Any],
    ) -> None:
        self._torchdynamo_orig_backend = callback
        self._code = code
        self._count = count
        self._opaque = opaque

    def __call__(self, frame: Any, entry: Any, state: Any) -> Any:
        """Trace the step, and run any other function as it is."""
        from torch._dynamo.convert_frame import compile_lock
        from torch._dynamo.types import ConvertFrameReturn, FrameAction, FrameExecStrategy

        if frame.f_code is not self._code:
            is_program = not _is_of_trace(frame.f_code)
            action = FrameAction.DEFAULT if is_program else FrameAction.SKIP
            strategy = FrameExecStrategy(action, action)
            return ConvertFrameReturn(frame_exec_strategy=strategy)
        self._count()
        try:
            with compile_lock, self._opaque():
                return self._torchdynamo_orig_backend(frame, entry, state)
        except Exception:  # private parts of another torch: the frame runs as it is
            return ConvertFrameReturn()


@contextmanager
def _opaque(
    of_optimizer: Callable[..., Any],
    methods: list[Method],
    reached: Callable[[int], None],
    fixed_numbers: bool,
    fixed_sizes: Callable[[], bool],
    ways: Ways,
) -> Iterator[None]:
    """Let Dynamo trace backward passes and cleared gradients as nodes, and end traces where needed.

    Dynamo's guards do not see that a method of a class is replaced, so these are noted.
    """
    from torch._dynamo import config, decorators
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._dynamo.variables import builder, misc, user_defined
    from torch._dynamo.variables.functions import UserFunctionVariable, WrapperUserFunctionVariable
    from torch._dynamo.variables.optimizer import OptimizerVariable
    from torch._dynamo.variables.tensor import TensorVariable

    from tunebench.training.coexecution._head_identity import identity_changes
    from tunebench.training.coexecution._head_lists import AppendedLists

    methods.clear()
    changes: list[tuple[Any, str, Any]] = [
        (InstructionTranslator, "maybe_has_backedge", _is_before_backward),
        (InstructionTranslator, "step", partial(_instruction, reached, InstructionTranslator.step)),
        (TensorVariable, "method_backward", _backward),
        (TensorVariable, "method_attr_grad", partial(_gradient, TensorVariable.method_attr_grad)),
        (OptimizerVariable, "var_getattr", partial(of_optimizer, OptimizerVariable.var_getattr)),
        (
            UserFunctionVariable,
            "call_function",
            partial(_called, methods, UserFunctionVariable.call_function),
        ),
        (WrapperUserFunctionVariable, "call_function", _wrapped),
        (
            user_defined.UserDefinedObjectVariable,
            "get_source_by_walking_mro",
            partial(_inherited, methods, user_defined.UserDefinedObjectVariable.get_source_by_walking_mro),
        ),
        (
            GuardBuilder,
            "guard_on_dict_keys_and_order",
            partial(_with_order, GuardBuilder.guard_on_dict_keys_and_order),
        ),
        *AppendedLists().changes(),
        *identity_changes(methods),
        *TracedReads(ways, _end, (CLEAR, UPDATE, CLIP), BACKWARD).changes(),
        (builder, "_automatic_dynamic", partial(_sized, fixed_sizes(), builder._automatic_dynamic)),
        (decorators, "disable", partial(_undisturbed, decorators.disable)),
        *_lean(InstructionTranslator),
        *((module, "call_random_fn", _random) for module in (misc, user_defined)),
        # marks of sizes, five attributes of each tensor, decide nothing that is computed
        (torch._C._dynamo.guards.GuardManager, "add_dimension_marking_guard", lambda *args: None),
    ]
    logger = logging.getLogger("torch._dynamo")
    level = logger.level
    with ExitStack() as stack:
        for owner, name, change in changes:
            visible = _method(change) if isinstance(owner, type) else change
            stack.enter_context(patch.object(owner, name, visible))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        options = {"specialize_float": fixed_numbers, "capture_scalar_outputs": ways.are_traced}
        stack.enter_context(config.patch(_CONFIG | options))
        logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            logger.setLevel(level)


def _lean(translator: type) -> list[tuple[Any, str, Any]]:
    """Return changes of Dynamo by which a trace does not import Inductor, torch.export and networkx.

    Answers to its questions are known for heads; its other parts serve compilers of torch.
    """
    from torch._dynamo import convert_frame, graph_region_tracker, output_graph
    from torch._dynamo.variables.higher_order_ops import LocalMapWrappedHigherOrderVariable

    return [
        (translator, "_throw_if_in_functorch", _check_transforms),
        (LocalMapWrappedHigherOrderVariable, "should_wrap_in_hop", lambda value: False),
        (graph_region_tracker, "InputPickler", lambda: None),
        (output_graph, "uninteresting_files", tuple),
        (output_graph.OutputGraph, "get_replayed_side_effect_source_refs", lambda graph, **options: []),
        (convert_frame, "_is_registered_backend", lambda backend: False),
    ]


def _method(function: Callable[..., Any]) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    return method


def _end(reason: str) -> None:
    """End the traced head."""
    from torch._dynamo.exc import unimplemented

    unimplemented(gb_type="end of the head", context=reason, explanation=reason, hints=[])


def _instruction(reached: Callable[[int], None], step: Any, self: Any) -> Any:
    """Process an instruction of the step, or end the head before a statement after an update."""
    reached(self.instructions[self.instruction_pointer].starts_line)
    is_done = getattr(self.output, "has_updates", False) and not self.stack
    if not (is_done and self.should_compile_partial_graph() and self.is_non_empty_graph()):
        return step(self)
    self.current_instruction = self.instructions[self.instruction_pointer]
    self.instruction_pointer += 1
    self.current_speculation = self.speculate()
    if not self.current_speculation.failed(self):
        self.current_speculation.fail_and_restart_analysis(False)
    self.step_graph_break(self.current_instruction)
    return False


def _is_before_backward(self: Any) -> bool:
    """Return whether a break leaves the frame as it is; later ones end the head, also in loops."""
    return not getattr(self.output, "has_opaque_nodes", False)


def _check_transforms(self: Any) -> None:
    """Refuse a step in a transform of torch.func."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        _end("a transform of functions is active")


def _check_pending(tx: Any) -> None:
    """End the head if Python changed a tensor object: Dynamo does this after the graph, so too late."""
    from torch._dynamo.variables.tensor import TensorVariable

    effects = tx.output.side_effects
    if effects.tensor_hooks or any(isinstance(item, TensorVariable) for item in effects.store_attr_mutations):
        _end("an attribute of a tensor is set")


def _node(tx: Any, function: Any, args: tuple[Any, ...]) -> Any:
    """Add a node that returns nothing."""
    from torch._dynamo.variables import ConstantVariable

    _check_pending(tx)
    proxy = tx.output.create_proxy("call_function", function, args, {})
    proxy.node.meta["example_value"] = None
    tx.output.has_opaque_nodes = True
    return ConstantVariable.create(None)


def _backward(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    retain = kwargs.pop("retain_graph", None)
    if args or kwargs:
        _end("a backward pass with arguments")
    value = None if retain is None else retain.as_python_constant()
    return _node(tx, BACKWARD, (self.as_proxy(), value))


def _gradient(read: Any, self: Any, tx: Any) -> Any:
    if getattr(tx.output, "has_opaque_nodes", False):
        _end("a gradient is read")
    return read(self, tx)


def _of_optimizer(
    optimizers: list[Optimizer], with_updates: bool, read: Any, self: Any, tx: Any, name: str
) -> Any:
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.variables import LambdaVariable

    optimizer = self.value
    if name != "zero_grad" and not (with_updates and name == "step"):
        _end("an attribute of an optimizer is read")

    def node(function: Any) -> Any:
        install_guard(self.source.make_guard(GuardBuilder.ID_MATCH))
        if not any(optimizer is other for other in optimizers):
            optimizers.append(optimizer)
        return _node(
            tx, function, (next(index for index, other in enumerate(optimizers) if other is optimizer),)
        )

    def cleared(*args: Any, **kwargs: Any) -> Any:
        sets_none = [argument.as_python_constant() is True for argument in (*args, *kwargs.values())]
        is_plain = "zero_grad" not in vars(optimizer) and type(optimizer).zero_grad is Optimizer.zero_grad
        if not all(sets_none) or not is_plain:
            _end("gradients are cleared in another way")
        is_absent = partial(GuardBuilder.NOT_PRESENT_IN_GENERIC_DICT, attr="zero_grad")
        install_guard(self.source.make_guard(is_absent))
        return node(CLEAR)

    def stepped(*args: Any, **kwargs: Any) -> Any:
        if args or kwargs or not _steps_as_recorded(optimizer):
            _end("an optimizer steps in another way")
        effects = tx.output.side_effects
        for belonging in _belongings(optimizer):
            variable = effects.id_to_variable.get(id(belonging))
            if variable is not None and variable.mutation_type is not None and effects.is_modified(variable):
                _end("what belongs to an optimizer is changed before its step")
        tx.output.has_updates = True
        return node(UPDATE)

    return LambdaVariable(cleared if name == "zero_grad" else stepped)


def _steps_as_recorded(optimizer: Optimizer) -> bool:
    """Return whether the step of an optimizer is one of torch's without hooks, which can be recorded."""
    assigned = vars(optimizer).get("step")
    return (
        type(optimizer) in CLASSES
        and (assigned is None or getattr(assigned, "_wrapped_by_lr_sched", False))
        and not has_hooks(optimizer)
    )


def _belongings(optimizer: Optimizer) -> Iterator[Any]:
    """Return the objects in which an optimizer keeps options and states."""
    yield optimizer
    yield vars(optimizer)
    yield optimizer.defaults
    yield optimizer.param_groups
    yield optimizer.state
    for group in optimizer.param_groups:
        yield group
        yield group["params"]
    yield from optimizer.state.values()


def _called(methods: list[Method], call: Any, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    _note(methods, self.fn, getattr(self, "obj", None) or (args[0] if args else None))
    if self.fn is clip_grad_norm_:
        _check_pending(tx)
        if not {"error_if_nonfinite", "foreach"}.isdisjoint(kwargs) or len(args) > 3:
            _end("gradients are clipped with other options")
        return call(type(self)(_clipped), tx, args, kwargs)
    return call(self, tx, args, kwargs)


def _note(methods: list[Method], function: Any, variable: Any) -> None:
    """Note a method that is called on an object."""
    value = getattr(variable, "value", None)
    owner = value if isinstance(value, type) else type(value)
    attribute = getattr(owner, function.__name__, None)
    method = owner, function.__name__, attribute
    if variable is None or attribute is None or method in methods:
        return
    if getattr(attribute, "fget", attribute) is function or getattr(attribute, "__func__", None) is function:
        methods.append(method)


def _inherited(methods: list[Method], read: Any, self: Any, tx: Any, name: str) -> Any:
    """Note an attribute of a class: Dynamo's guards do not see that a subclass gets its own."""
    method = type(self.value), name, getattr(type(self.value), name, None)
    if not any(method[:2] == noted[:2] for noted in methods):
        methods.append(method)
    return read(self, tx, name)


def _with_order(guard_keys: Any, self: Any, value: dict[Any, Any], guard: Any) -> None:
    """Guard the order of an OrderedDict, which ``move_to_end`` changes unseen by Dynamo's guards."""
    from torch._dynamo.guards import _get_closure_vars

    guard_keys(self, value, guard)
    if isinstance(value, OrderedDict):
        code = [f"list({self.arg_ref(guard)}) == ___keys"]
        self.add_python_lambda_leaf_guard_to_root(code, code, {**_get_closure_vars(), "___keys": list(value)})


def _undisturbed(disable: Any, function: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Return a graph's function as it is: it turns Dynamo off itself, also for the rest of the step."""
    runs_graph = getattr(function, "turns_dynamo_off", False)
    return function if runs_graph else disable(function, *args, **kwargs)


def _wrapped(self: Any, tx: Any, *args: Any) -> Any:
    """End the head: Dynamo would look through a cache, or through a function that is compiled already."""
    _end("a function that is cached or compiled is called")


def _sized(
    is_fixed: bool,
    context: Any,
    tensor: Any,
    tx: Any,
    source: Any,
    is_static: bool,
    *rest: Any,
    **options: Any,
) -> Any:
    """Trace sizes as constants, or as symbols if they changed between traces, which Dynamo notes."""
    sizes = context(tensor, tx, source, is_static, *rest, **options)
    return context(tensor, tx, source, True, *rest, **options) if is_fixed else sizes


def _random(*args: Any, **kwargs: Any) -> Any:
    return _end("Python draws a random number")
