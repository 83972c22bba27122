"""Trace heads of steps by Dynamo: a graph with backward passes as nodes, guards, side effects of Python.

The head ends at the first thing after a backward pass that is not understood, at the latest where an
optimizer steps. What follows runs as without co-execution, so nothing that Dynamo reads is changed by
code that it does not see.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import CodeType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

__all__ = ["BACKWARD", "CLEAR", "Method", "optimizers", "traced"]

Method = tuple[type, str, Any]
"""A class, the name of an attribute, and what it was."""

_THREAD = threading.local()

_CONFIG = {
    "trace_numpy": False,
    "allow_unspec_int_on_nn_module": True,
    "suppress_errors": True,
    "recompile_limit": 64,
    "error_on_recompile": False,
    "fail_on_recompile_limit_hit": False,
    "automatic_dynamic_local_pgo": False,
    "guard_nn_modules": True,
    "guard_nn_modules_using_dict_tags": False,
    "skip_nnmodule_hook_guards": False,
    "skip_no_tensor_aliasing_guards_on_parameters": False,
    "skip_tensor_guards_with_matching_dict_tags": False,
    "use_recursive_dict_tags_for_guards": False,
}
"""Options of Dynamo: no trace may end in an error, and no guard may be left out."""


def _is_fake(tensor: Tensor) -> bool:
    return isinstance(tensor, torch._subclasses.fake_tensor.FakeTensor)


def BACKWARD(loss: Tensor, retain_graph: bool | None) -> None:  # noqa: N802  # a node of a graph
    """Run a backward pass."""
    if not _is_fake(loss):
        loss.backward(retain_graph=retain_graph)


def CLEAR(position: int) -> None:  # noqa: N802
    """Clear the gradients of an optimizer of `optimizers`; only a graph that runs as it is calls it."""
    current: list[Optimizer] = _THREAD.optimizers
    current[position].zero_grad()


def _clip(parameters: list[Tensor], max_norm: float, norm_type: float) -> Tensor:
    if _is_fake(parameters[0]):
        return torch.empty((), dtype=parameters[0].dtype)
    return clip_grad_norm_(parameters, max_norm, norm_type)


def _clipped(parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Clip gradients, as the trace sees it."""
    return _clip(list(parameters), max_norm, norm_type)


@contextmanager
def optimizers(current: list[Optimizer]) -> Iterator[None]:
    """Set the optimizers whose gradients the graphs of this thread clear."""
    before = getattr(_THREAD, "optimizers", None)
    _THREAD.optimizers = current
    try:
        yield
    finally:
        _THREAD.optimizers = before


def traced(
    step: Callable[..., Any],
    backend: Callable[..., Any],
    known: list[Optimizer],
    methods: list[Method],
    count: Callable[[], None],
) -> Callable[..., Any]:
    """Return a function that runs the step, and traces its head where no trace of it is valid.

    Args:
        step: A function of Python.
        backend: From a graph and examples of its inputs to the function that runs it.
        known: The optimizers that traced heads clear, which are appended.
        methods: The methods that the last trace looked through.
        count: Called before each trace.
    """
    import torch._dynamo as dynamo

    for function in (BACKWARD, CLEAR, _clip):
        torch.fx.node.has_side_effect(function)
    dynamo.allow_in_graph(_clip)
    context = dynamo.optimize(backend)
    context.callback = _Callback(context.callback, step.__code__, known, methods, count)
    compiled: Callable[..., Any] = context(step)
    return compiled


class _Callback:
    """What Dynamo calls for functions without a valid trace: only the step is traced."""

    def __init__(
        self,
        callback: Any,
        code: CodeType,
        known: list[Optimizer],
        methods: list[Method],
        count: Callable[[], None],
    ) -> None:
        self._torchdynamo_orig_backend = callback
        self._code = code
        self._known = known
        self._methods = methods
        self._count = count

    def __call__(self, frame: Any, entry: Any, state: Any) -> Any:
        """Trace the step, and run any other function as it is."""
        from torch._dynamo.convert_frame import compile_lock
        from torch._dynamo.types import ConvertFrameReturn, FrameAction, FrameExecStrategy

        if frame.f_code is not self._code:
            is_rest = frame.f_code.co_name.startswith("torch_dynamo_resume_in_")  # no function of the program
            action = FrameAction.SKIP if is_rest else FrameAction.DEFAULT
            strategy = FrameExecStrategy(action, action)
            return ConvertFrameReturn(frame_exec_strategy=strategy)
        self._count()
        self._methods.clear()
        try:
            with compile_lock, _opaque(self._known, self._methods):
                return self._torchdynamo_orig_backend(frame, entry, state)
        except Exception:  # private parts of another torch: the frame runs as it is
            return ConvertFrameReturn()


@contextmanager
def _opaque(known: list[Optimizer], methods: list[Method]) -> Iterator[None]:
    """Let Dynamo trace backward passes and cleared gradients as nodes, and end traces where needed.

    Dynamo's guards do not see that a method of a class is replaced, so these are noted.
    """
    from torch._dynamo import config, decorators
    from torch._dynamo.variables import builder, misc, user_defined
    from torch._dynamo.variables.functions import UserFunctionVariable, WrapperUserFunctionVariable
    from torch._dynamo.variables.optimizer import OptimizerVariable
    from torch._dynamo.variables.tensor import TensorVariable

    changes: list[tuple[Any, str, Any]] = [
        (TensorVariable, "method_backward", _backward),
        (TensorVariable, "method_attr_grad", partial(_gradient, TensorVariable.method_attr_grad)),
        (OptimizerVariable, "var_getattr", partial(_of_optimizer, known, OptimizerVariable.var_getattr)),
        (
            UserFunctionVariable,
            "call_function",
            partial(_called, methods, UserFunctionVariable.call_function),
        ),
        (WrapperUserFunctionVariable, "call_function", _wrapped),
        (builder, "_automatic_dynamic", partial(_with_fixed_sizes, builder._automatic_dynamic)),
        (decorators, "disable", partial(_undisturbed, decorators.disable)),
        *((module, "call_random_fn", _random) for module in (misc, user_defined)),
    ]
    logger = logging.getLogger("torch._dynamo")
    level = logger.level
    with ExitStack() as stack:
        for owner, name, change in changes:
            visible = _method(change) if isinstance(owner, type) else change
            stack.enter_context(patch.object(owner, name, visible))
        stack.enter_context(config.patch(_CONFIG))
        logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            logger.setLevel(level)


def _method(function: Callable[..., Any]) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    return method


def _end(reason: str) -> None:
    """End the traced head."""
    from torch._dynamo.exc import unimplemented

    unimplemented(gb_type="end of the head", context=reason, explanation=reason, hints=[])


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


def _of_optimizer(known: list[Optimizer], read: Any, self: Any, tx: Any, name: str) -> Any:
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.variables import LambdaVariable

    if name != "zero_grad":
        _end("an attribute of an optimizer is read")

    def cleared(*args: Any, **kwargs: Any) -> Any:
        sets_none = [argument.as_python_constant() is True for argument in (*args, *kwargs.values())]
        if not all(sets_none) or "zero_grad" in vars(self.value) or not _is_plain(self.value):
            _end("gradients are cleared in another way")
        install_guard(self.source.make_guard(GuardBuilder.ID_MATCH))
        if not any(self.value is optimizer for optimizer in known):
            known.append(self.value)
        position = next(index for index, optimizer in enumerate(known) if optimizer is self.value)
        return _node(tx, CLEAR, (position,))

    return LambdaVariable(cleared)


def _is_plain(optimizer: Optimizer) -> bool:
    return type(optimizer).zero_grad is Optimizer.zero_grad


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


def _undisturbed(disable: Any, function: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Return a graph's function as it is: it turns Dynamo off itself, also for the rest of the step."""
    runs_graph = getattr(function, "turns_dynamo_off", False)
    return function if runs_graph else disable(function, *args, **kwargs)


def _wrapped(self: Any, tx: Any, *args: Any) -> Any:
    """End the head: Dynamo would look through a cache, or through a function that is compiled already."""
    _end("a function that is cached or compiled is called")


def _with_fixed_sizes(
    context: Any, tensor: Any, tx: Any, source: Any, static_shapes: bool, *args: Any, **kwargs: Any
) -> Any:
    """Trace each set of sizes by itself: a recorded head has the sizes of its record as constants."""
    return context(tensor, tx, source, True, *args, **kwargs)


def _random(*args: Any, **kwargs: Any) -> Any:
    return _end("Python draws a random number")
