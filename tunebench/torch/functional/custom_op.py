"""Tuned kernels as custom operators of torch, and the dispatch of calls to them.

A call takes one of two paths. Plain tensors go directly to the kernel, with an autograd function around it
where gradients are needed, because torch's dispatcher costs several microseconds. Traced calls go through
`torch.ops.tunebench`: `torch.compile` and dispatch modes see one operator, which chooses its kernel when it
runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C import _len_torch_dispatch_stack
from torch._C._functorch import peek_interpreter_stack
from torch.nn import Parameter

from tunebench.dispatch import BoundKernel, DispatchedCall, Dispatcher, dispatcher, prefer, preference
from tunebench.dispatch.choice import BoundChoice
from tunebench.dispatch.watch import is_watched, notify
from tunebench.errors import InputError
from tunebench.torch._tensor import device_of, launch, library_results, may_use_tf32, stored_type
from tunebench.workload import Workload

__all__ = ["CustomOp", "OpCall", "OperandView", "dispatch", "is_differentiated", "not_twice", "run_by_torch"]

LIBRARY = torch.library.Library("tunebench", "DEF")
"""Registry of the custom operators: `torch.ops.tunebench`."""

_PLAIN = frozenset({torch.Tensor, Parameter})
_CACHE_SIZE = 65536
"""Distinct calls that are cached; a full cache is cleared."""

Shape = tuple[int, ...]
Operands = Sequence[Any]


@dataclass(frozen=True, slots=True)
class OperandView:
    """Conversion of a caller's tensor to an operand: swap two axes, expand, then reshape.

    Attributes:
        shape: Shape of the operand.
        swap: Two axes to swap, or None.
        expand: Shape to expand to before reshaping, or None.
        is_copied: Whether the kernel cannot read the tensor's memory, so that a copy is made.
    """

    shape: Shape
    swap: tuple[int, int] | None = None
    expand: Shape | None = None
    is_copied: bool = False

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor as the operator expects it."""
        if self.swap is not None:
            tensor = tensor.transpose(*self.swap)
        if self.expand is not None:
            tensor = tensor.expand(self.expand)
        return tensor.reshape(self.shape)


@dataclass(frozen=True, slots=True)
class OpCall:
    """A call of a public function as a call of a custom operator.

    Attributes:
        views: Conversion of each operand; None leaves it unchanged.
        attributes: The operator's arguments after its operands.
        shape: Shape of the first result; None leaves it unchanged.
        copy_reason: Why operands would be copied where torch copies nothing; None if they would not.
    """

    views: tuple[OperandView | None, ...]
    attributes: tuple[Any, ...] = ()
    shape: Shape | None = None
    copy_reason: str | None = None

    def arguments(self, operands: Operands) -> tuple[Any, ...]:
        """Return the operator's arguments."""
        pairs = zip(self.views, operands, strict=True)
        return (*(t if t is None or view is None else view.of(t) for view, t in pairs), *self.attributes)

    def result(self, made: Any) -> Any:
        """Return the operator's results, the first in the shape that the caller expects."""
        if self.shape is None:
            return made
        if isinstance(made, torch.Tensor):
            return made.reshape(self.shape)
        return (made[0].reshape(self.shape), *made[1:])


class CachedDispatch:
    """The operator call of one kind of function call, its workload, and the workloads of its gradients.

    Attributes:
        call: The operator call.
        dispatcher: Dispatcher of its workload.
        is_direct: Whether a kernel can read the operands' memory without a copy.
    """

    __slots__ = ("_gradients", "_op", "call", "dispatcher", "is_direct")

    def __init__(self, op: CustomOp, call: OpCall, workload_dispatcher: Dispatcher) -> None:
        self.call, self.dispatcher, self._op = call, workload_dispatcher, op
        is_copied = any(view is not None and view.is_copied for view in call.views)
        self.is_direct = call.copy_reason is None and not is_copied
        self._gradients: tuple[Dispatcher, ...] | None = None

    def has_tuned_gradient(self) -> bool:
        """Return whether a tuned kernel computes one of the gradients."""
        if self._gradients is None:
            where = self.dispatcher.device, self.dispatcher.ordinal
            workloads = self._op.gradients(self.dispatcher.workload)
            self._gradients = tuple(dispatcher(workload, *where) for workload in workloads)
        return any(gradient.bound_choice().kernel is not None for gradient in self._gradients)


def _empty(kernel: BoundKernel, shape: Shape | None, *arguments: Any) -> tuple[torch.Tensor, ...]:
    """Return memory for the results of a kernel, the first in the caller's shape if one is given."""
    device = arguments[0].device
    first, *further = kernel.outputs
    return (
        torch.empty(first.shape if shape is None else shape, dtype=stored_type(first.dtype), device=device),
        *(torch.empty(t.shape, dtype=stored_type(t.dtype), device=device) for t in further),
    )


def _arranged(kernel: BoundKernel, shape: Shape | None, *results: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return views of the results of a library as `_empty` allocates them."""
    shapes = [spec.shape for spec in kernel.outputs]
    if shape is not None:
        shapes[0] = shape
    return tuple(
        result if result.shape == expected else result.view(expected)
        for result, expected in zip(results, shapes, strict=True)
    )


@dataclass(eq=False)
class CustomOp:
    """A custom operator: its schema, its workload, and torch's implementation of the same.

    Attributes:
        schema: Schema as `torch.library` expects it: operands first, in the order of the workload's inputs.
        operands: Number of operands.
        workload: Returns the workload of a call from its arguments.
        fallback: torch's implementation, with the same arguments.
        fake: Returns results without memory, from the same arguments.
        gradients: Returns the workloads of the gradients.
        backward: Returns the gradients of all arguments from the autograd context and the results' gradients;
            None if the operator cannot be differentiated.
        save: Stores in the autograd context what `backward` reads: from the context, the arguments, the
            results.
        empty: Allocates the results from the kernel, the shape of the first result (None: the workload's)
            and the arguments.
        arrange: Returns the results of a library as `empty` allocates them, from the kernel, the same shape
            and contiguous tensors in the workload's layout, which may lack dimensions of size 1.
        prepare: Returns an operand in the workload's memory layout, from the operand and the attributes.
        finish: Returns the operator's results from the kernel's results and the arguments.
        check: Raises if the arguments would make a kernel read out of bounds.
        order: Returns the kernel's inputs from the arguments; by default the operands that are not None.
        key: Returns the attributes that the workload depends on; by default all.
        name: Name in `torch.ops.tunebench`.
        op: The registered operator.
    """

    schema: str
    operands: int
    workload: Callable[..., Workload]
    fallback: Callable[..., Any]
    fake: Callable[..., Any]
    gradients: Callable[[Any], Sequence[Workload]] = lambda workload: ()
    backward: Callable[..., Any] | None = None
    save: Callable[..., None] = lambda ctx, inputs, output: None
    empty: Callable[..., tuple[torch.Tensor, ...]] = _empty
    arrange: Callable[..., tuple[torch.Tensor, ...]] = _arranged
    prepare: Callable[..., torch.Tensor] = lambda tensor, *attributes: tensor.contiguous()
    finish: Callable[..., Any] | None = None
    check: Callable[..., None] | None = None
    order: Callable[..., Sequence[Any]] | None = None
    key: Callable[..., tuple[Any, ...]] = lambda *attributes: attributes
    name: str = field(init=False)
    op: Any = field(init=False)
    _dispatchers: dict[Any, Dispatcher | str] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.name = self.schema.partition("(")[0]
        LIBRARY.define(self.schema, tags=(torch.Tag.needs_fixed_stride_order,))
        for backend in ("CPU", "CUDA"):
            LIBRARY.impl(self.name, self._implement, backend)
        torch.library.register_fake(f"tunebench::{self.name}", self.fake, lib=LIBRARY)
        if self.backward is not None:
            torch.library.register_autograd(
                f"tunebench::{self.name}", self._run_backward, setup_context=self._set_up, lib=LIBRARY
            )
        self.op = getattr(torch.ops.tunebench, self.name).default

    # -- gradients -----------------------------------------------------------------------------------------

    def _set_up(self, ctx: Any, inputs: Any, output: Any) -> None:
        # Backward may run in another thread, where no preference is set.
        ctx.preference = preference()
        self.save(ctx, inputs, output)

    def _run_backward(self, ctx: Any, *gradients: Any) -> Any:
        assert self.backward is not None
        with prefer(ctx.preference):
            return self.backward(ctx, *gradients)

    @functools.cached_property
    def _autograd(self) -> Any:
        """The autograd function of calls that do not go through torch's dispatcher."""

        def forward(ctx: Any, *arguments: Any) -> Any:
            output = self._implement(*arguments)
            self._set_up(ctx, arguments, output)
            return output

        methods = {"forward": staticmethod(forward), "backward": staticmethod(self._run_backward)}
        return type(f"tunebench_{self.name}", (torch.autograd.Function,), methods)

    # -- calls ---------------------------------------------------------------------------------------------

    def find_dispatcher(self, arguments: Sequence[Any]) -> Dispatcher | str:
        """Return the workload of a call on its device, or why no kernel runs it."""
        first = arguments[0]
        key = (
            *[(a.shape, a.dtype) if isinstance(a, torch.Tensor) else a for a in arguments[: self.operands]],
            *self.key(*arguments[self.operands :]),
            first.device,
            may_use_tf32() if first.is_cuda else None,
        )
        cached = self._dispatchers.get(key)
        if cached is None:
            if len(self._dispatchers) >= _CACHE_SIZE:
                self._dispatchers.clear()
            cached = self._dispatchers[key] = self._find(arguments)
        return cached

    def _find(self, arguments: Sequence[Any]) -> Dispatcher | str:
        where = device_of(arguments[0].device)
        if isinstance(where, str):
            return where
        try:
            return dispatcher(self.workload(*arguments), *where)
        except InputError as error:
            return str(error)

    def __call__(self, *arguments: Any) -> Any:
        """Call the operator, without torch's dispatcher unless the call is traced."""
        if _is_traced() or peek_interpreter_stack() is not None:
            return self.op(*arguments)
        if self.backward is not None and is_differentiated(arguments):
            return self._autograd.apply(*arguments)
        return self._implement(*arguments)

    def _implement(self, *arguments: Any) -> Any:
        """Run the operator by the chosen implementation: a tuned kernel or torch."""
        workload_dispatcher = self.find_dispatcher(arguments)
        if isinstance(workload_dispatcher, str):
            return run_by_torch(self.name, workload_dispatcher, lambda: self.fallback(*arguments))
        made = workload_dispatcher.bound_choice()
        if is_watched():
            workload_dispatcher.notify(made)
        if made.kernel is None:
            return self.fallback(*arguments)
        if self.check is not None:
            self.check(*arguments)
        attributes = arguments[self.operands :]
        ready = [self.prepare(a, *attributes) if isinstance(a, torch.Tensor) else a for a in arguments]
        results = self.run(made, ready)
        return results if self.finish is None else self.finish(results, *arguments)

    def run(self, made: BoundChoice, arguments: Sequence[Any], shape: Shape | None = None) -> Any:
        """Run the chosen kernel on arguments in the workload's memory layout, and return its results."""
        assert made.kernel is not None
        if self.order is None:
            read = [a for a in arguments[: self.operands] if a is not None]
        else:
            read = [*self.order(*arguments)]
        results: Sequence[torch.Tensor] | None = library_results(made.kernel, read)
        if results is None:
            results = self.empty(made.kernel, shape, *arguments)
            launch(made.kernel, (*read, *results))
        else:
            results = self.arrange(made.kernel, shape, *results)
        return results[0] if len(results) == 1 else results


_dispatch_cache: dict[Any, CachedDispatch | str] = {}


def dispatch(
    op: CustomOp,
    function: str,
    operands: Operands,
    attributes: tuple[Any, ...],
    call_of: Callable[..., OpCall | str],
    fallback: Callable[[], Any],
    pick: Callable[[Any], Any] | None = None,
) -> Any:
    """Run a call of a public function by a tuned kernel or by torch.

    Args:
        op: The operator that would run it.
        function: Name of the function.
        operands: The call's tensors; None for those that are absent.
        attributes: The other arguments that decide the operator call; hashable.
        call_of: Returns the operator call from operands and attributes, reading shapes and strides alone; or
            why the operator cannot run it.
        fallback: torch's implementation.
        pick: Returns the function's result from the operator's; `fallback` returns it already.
    """
    if torch._C._get_tracing_state() is not None:
        return run_by_torch(function, "torch.jit.trace records torch's own operators", fallback)
    if _is_traced():
        call = call_of(*operands, *attributes)
        if not isinstance(call, str) and call.copy_reason is None:
            result = call.result(op.op(*call.arguments(operands)))
            return result if pick is None else pick(result)
        return run_by_torch(function, call if isinstance(call, str) else call.copy_reason or "", fallback)
    reason = _special_tensor_reason(operands)
    if reason is not None:
        return run_by_torch(function, reason, fallback)
    route = _cached_dispatch(op, function, operands, attributes, call_of)
    if isinstance(route, str):
        return run_by_torch(function, route, fallback)
    if route.call.copy_reason is not None and preference() != "tunebench":
        return run_by_torch(function, route.call.copy_reason, fallback)
    made = route.dispatcher.bound_choice()
    differentiated = is_differentiated(operands)
    if made.kernel is None and not (differentiated and route.has_tuned_gradient()):
        if is_watched():
            route.dispatcher.notify(made)
        return fallback()
    if made.kernel is None or differentiated or not route.is_direct:
        result = route.call.result(op(*route.call.arguments(operands)))
    else:
        if is_watched():
            route.dispatcher.notify(made)
        result = op.run(made, (*operands, *route.call.attributes), route.call.shape)
    return result if pick is None else pick(result)


def _cached_dispatch(
    op: CustomOp,
    function: str,
    operands: Operands,
    attributes: tuple[Any, ...],
    call_of: Callable[..., OpCall | str],
) -> CachedDispatch | str:
    key = (
        function,
        attributes,
        *[(t.shape, t.stride(), t.dtype, t.device) if isinstance(t, torch.Tensor) else t for t in operands],
        may_use_tf32() if operands[0].is_cuda else None,
    )
    route = _dispatch_cache.get(key)
    if route is None:
        if len(_dispatch_cache) >= _CACHE_SIZE:
            _dispatch_cache.clear()
        call = call_of(*operands, *attributes)
        if isinstance(call, str):
            route = call
        else:
            workload_dispatcher = op.find_dispatcher(call.arguments(operands))
            route = (
                workload_dispatcher
                if isinstance(workload_dispatcher, str)
                else CachedDispatch(op, call, workload_dispatcher)
            )
        _dispatch_cache[key] = route
    return route


def _is_traced() -> bool:
    """Return whether a tracer or a dispatch mode is active: calls must go through torch's dispatcher."""
    return (
        torch.compiler.is_compiling()
        or _len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
    )


def is_differentiated(arguments: Operands) -> bool:
    """Return whether autograd records a call with these arguments."""
    return torch.is_grad_enabled() and any(
        argument.requires_grad for argument in arguments if isinstance(argument, torch.Tensor)
    )


def _special_tensor_reason(operands: Operands) -> str | None:
    """Return why the tensors cannot be read as plain memory, or None if they can."""
    if peek_interpreter_stack() is not None:
        return "a torch.func transform is active"
    for operand in operands:
        if type(operand) in _PLAIN:
            if operand.is_neg():
                return "a tensor with the negative bit set"
        elif isinstance(operand, torch.Tensor):
            return f"expected a torch.Tensor or torch.nn.Parameter, got {type(operand).__name__}"
    return None


def run_by_torch(function: str, reason: str, fallback: Callable[[], Any]) -> Any:
    """Run a call by torch, and report the reason to watchers."""
    if not torch.compiler.is_compiling() and is_watched():
        notify(DispatchedCall(function=function, workload=None, by="torch", reason=reason))
    return fallback()


def not_twice(function: str) -> Callable[..., Any]:
    """Return the `backward` of a gradient operator that cannot be differentiated again."""

    def refuse(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError(
            f"the gradients of tunebench's {function} cannot be differentiated again; "
            "call it within tunebench.torch.prefer('torch')"
        )

    return refuse
