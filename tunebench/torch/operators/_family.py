"""A family of kernels as one operator of torch, and who runs a call of it.

A call comes one of two ways. Plain tensors go straight to the kernel, with a node of autograd around it where
gradients are needed: torch's dispatcher costs several microseconds. Calls that somebody looks at go through
`torch.ops.tunebench`, which `torch.compile` and dispatch modes see as one operator; it chooses when it runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._C import _len_torch_dispatch_stack
from torch._C._functorch import peek_interpreter_stack
from torch.nn import Parameter

from tunebench.dispatch import Call, Kernel, Problem, prefer, preference, problem
from tunebench.dispatch.choice import Made
from tunebench.dispatch.watch import tell, watched
from tunebench.errors import InputError
from tunebench.torch.operators._memory import device_of, launch, may_use_tf32, stored_type
from tunebench.workload import Workload

__all__ = ["LIBRARY", "Family", "Form", "View", "declined", "is_differentiated", "serve"]

LIBRARY = torch.library.Library("tunebench", "DEF")
"""Where our operators are registered: `torch.ops.tunebench`."""

_PLAIN = frozenset({torch.Tensor, Parameter})
_MOST_ROUTES = 65536
"""Distinct calls that are remembered; it starts anew beyond that."""

Shape = tuple[int, ...]
Operands = Sequence[Any]


@dataclass(frozen=True, slots=True)
class View:
    """How an operand is seen by the operator: axes swapped, expanded, then reshaped.

    Attributes:
        shape: In the end.
        swap: Two axes that change places, or None.
        expand: What it is expanded to before it is reshaped, or None.
        is_copied: Whether its memory is not what a kernel reads, so that a copy is made, by torch as well.
    """

    shape: Shape
    swap: tuple[int, int] | None = None
    expand: Shape | None = None
    is_copied: bool = False

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor as the operator takes it."""
        if self.swap is not None:
            tensor = tensor.transpose(*self.swap)
        if self.expand is not None:
            tensor = tensor.expand(self.expand)
        return tensor.reshape(self.shape)


@dataclass(frozen=True, slots=True)
class Form:
    """A call as one of an operator: how its operands are seen, what else it is told, and what comes out.

    Attributes:
        views: One for each operand; None leaves it as it is.
        told: What follows the operands.
        shape: That of the first result; None leaves it as it is.
        gathered: Why operands would be copied where torch copies nothing; None if they would not.
    """

    views: tuple[View | None, ...]
    told: tuple[Any, ...] = ()
    shape: Shape | None = None
    gathered: str | None = None

    @property
    def is_direct(self) -> bool:
        """Whether the operands' memory is already what a kernel reads."""
        return self.gathered is None and not any(view is not None and view.is_copied for view in self.views)

    def arguments(self, operands: Operands) -> tuple[Any, ...]:
        """Return what the operator takes."""
        seen = zip(self.views, operands, strict=True)
        return (*(t if t is None or view is None else view.of(t) for view, t in seen), *self.told)

    def result(self, made: Any) -> Any:
        """Return what the operator gave, in the shape that the caller expects."""
        if self.shape is None:
            return made
        if isinstance(made, torch.Tensor):
            return made.reshape(self.shape)
        return (made[0].reshape(self.shape), *made[1:])


class Route:
    """What became of one kind of call: its form, its problem, and those of its gradients."""

    __slots__ = ("_family", "_gradients", "form", "problem")

    def __init__(self, family: Family, form: Form, found: Problem) -> None:
        self.form, self.problem, self._family = form, found, family
        self._gradients: tuple[Problem, ...] | None = None

    def is_ours_backward(self) -> bool:
        """Tell whether a kernel of ours computes one of the gradients."""
        if self._gradients is None:
            workload, device, ordinal = self.problem.workload, self.problem.device, self.problem.ordinal
            self._gradients = tuple(problem(one, device, ordinal) for one in self._family.gradients(workload))
        return any(gradient.made().kernel is not None for gradient in self._gradients)


class Family:
    """One operator: its schema, its problems, and how torch does the same.

    Args:
        schema: As `torch.library` has it; the operands first, in the order of the workload's inputs.
        operands: How many there are.
        workload: The problem of a call, from its arguments.
        library: The same by torch's own operators, from the same arguments.
        fake: Results without memory, from the same arguments.
        gradients: The problems that its gradients are.
        empty: Memory for the results, from the kernel, the shape that the first is to have (None: as the
            workload says) and the arguments; contiguous, if not given.
        prepare: What makes an operand lie in memory as the workload says, from it and what follows the
            operands.
        finish: The operator's results, from what a kernel writes and the arguments.
        check: Refuses what would make a kernel read elsewhere, from the arguments.
        order: What a kernel reads, from the arguments; the operands that are given, if not given.
        key: What of the arguments after the operands the problem depends on, from those; all, if not given.
    """

    def __init__(
        self,
        schema: str,
        operands: int,
        workload: Callable[..., Workload],
        library: Callable[..., Any],
        fake: Callable[..., Any],
        *,
        gradients: Callable[[Any], Sequence[Workload]] = lambda workload: (),
        empty: Callable[..., tuple[torch.Tensor, ...]] | None = None,
        prepare: Callable[..., torch.Tensor] = lambda tensor, *told: tensor.contiguous(),
        finish: Callable[..., Any] | None = None,
        check: Callable[..., None] | None = None,
        order: Callable[..., Sequence[Any]] | None = None,
        key: Callable[..., tuple[Any, ...]] = lambda *told: told,
    ) -> None:
        self.name: str = schema.partition("(")[0]
        self.gradients = gradients
        self._operands, self._workload, self._library = operands, workload, library
        self._empty, self._prepare, self._finish, self._check = empty or _empty, prepare, finish, check
        self._order, self._key = order, key
        self._differentiated: Any = None
        self._problems: dict[Any, Problem | str] = {}
        LIBRARY.define(schema, tags=(torch.Tag.needs_fixed_stride_order,))
        for backend in ("CPU", "CUDA"):
            LIBRARY.impl(self.name, self._implement, backend)
        torch.library.register_fake(f"tunebench::{self.name}", fake, lib=LIBRARY)
        self.op: Any = getattr(torch.ops.tunebench, self.name).default

    def differentiate(self, backward: Callable[..., Any], save: Callable[..., None]) -> None:
        """Register gradients.

        Args:
            backward: Gradients of all arguments, from the context and those of the results.
            save: Keeps in the context what `backward` needs: from the context, the arguments, the results.
        """

        def setup(ctx: Any, inputs: Any, output: Any) -> None:
            # Backward may run in a thread of its own, where nobody has said what is preferred.
            ctx.preference = preference()
            save(ctx, inputs, output)

        @functools.wraps(backward)
        def run(ctx: Any, *given: Any) -> Any:
            with prefer(ctx.preference):
                return backward(ctx, *given)

        def forward(ctx: Any, *arguments: Any) -> Any:
            output = self._implement(*arguments)
            setup(ctx, arguments, output)
            return output

        torch.library.register_autograd(f"tunebench::{self.name}", run, setup_context=setup, lib=LIBRARY)
        methods = {"forward": staticmethod(forward), "backward": staticmethod(run)}
        self._differentiated = type(f"tunebench_{self.name}", (torch.autograd.Function,), methods)

    def problem(self, arguments: Sequence[Any]) -> Problem | str:
        """Return the problem that a call is, or why it is none of ours."""
        first = arguments[0]
        key = (
            *[(a.shape, a.dtype) if isinstance(a, torch.Tensor) else a for a in arguments[: self._operands]],
            *self._key(*arguments[self._operands :]),
            first.device,
            may_use_tf32() if first.is_cuda else None,
        )
        found = self._problems.get(key)
        if found is None:
            if len(self._problems) >= _MOST_ROUTES:
                self._problems.clear()
            found = self._problems[key] = self._find(arguments)
        return found

    def _find(self, arguments: Sequence[Any]) -> Problem | str:
        where = device_of(arguments[0].device)
        if isinstance(where, str):
            return where
        try:
            return problem(self._workload(*arguments), *where)
        except InputError as error:
            return str(error)

    def __call__(self, *arguments: Any) -> Any:
        """Call the operator: straight, where nobody looks."""
        if _is_seen() or peek_interpreter_stack() is not None:
            return self.op(*arguments)
        if self._differentiated is not None and is_differentiated(arguments):
            return self._differentiated.apply(*arguments)
        return self._implement(*arguments)

    def _implement(self, *arguments: Any) -> Any:
        """Run the operator, by whom it is chosen to be."""
        found = self.problem(arguments)
        if isinstance(found, str):
            _tell_declined(self.name, found)
            return self._library(*arguments)
        made = found.made()
        if watched():
            found.tell(made)
        if made.kernel is None:
            return self._library(*arguments)
        if self._check is not None:
            self._check(*arguments)
        told = arguments[self._operands :]
        ready = [self._prepare(a, *told) if isinstance(a, torch.Tensor) else a for a in arguments]
        results = self.run(made, ready)
        return results if self._finish is None else self._finish(results, *arguments)

    def run(self, made: Made, arguments: Sequence[Any], shape: Shape | None = None) -> Any:
        """Run our kernel on arguments whose memory is as the workload says, and return what it writes."""
        assert made.kernel is not None
        if self._order is None:
            read = [a for a in arguments[: self._operands] if a is not None]
        else:
            read = [*self._order(*arguments)]
        results = self._empty(made.kernel, shape, *arguments)
        launch(made.kernel, (*read, *results))
        return results[0] if len(results) == 1 else results


def _empty(kernel: Kernel, shape: Shape | None, *arguments: Any) -> tuple[torch.Tensor, ...]:
    """Return memory for the results of a kernel, the first in a shape of the caller's, if given."""
    device = arguments[0].device
    first, *others = kernel.outputs
    return (
        torch.empty(shape or first.shape, dtype=stored_type(first.dtype), device=device),
        *(torch.empty(t.shape, dtype=stored_type(t.dtype), device=device) for t in others),
    )


_routes: dict[Any, Route | str] = {}


def serve(
    family: Family,
    function: str,
    operands: Operands,
    told: tuple[Any, ...],
    form: Callable[..., Form | str],
    library: Callable[[], Any],
    pick: Callable[[Any], Any] | None = None,
) -> Any:
    """Run a call of one of our functions by whoever is chosen for it.

    Args:
        family: The operator that would run it.
        function: Name of the function.
        operands: Its tensors, None for those that are not given.
        told: What else decides the form; hashable.
        form: Finds the form of the call, from operands and `told`, by shapes and strides alone; or why the
            operator cannot do it.
        library: torch's own call.
        pick: What is made of the results, of the operator or of a kernel; `library` has done it already.
    """
    if _is_seen():
        found = form(*operands, *told)
        if not isinstance(found, str) and found.gathered is None:
            result = found.result(family.op(*found.arguments(operands)))
            return result if pick is None else pick(result)
        return declined(function, found if isinstance(found, str) else found.gathered or "", library)
    reason = _foreign(operands)
    if reason is not None:
        return declined(function, reason, library)
    route = _route(family, function, operands, told, form)
    if isinstance(route, str):
        return declined(function, route, library)
    if route.form.gathered is not None and preference() != "tunebench":
        return declined(function, route.form.gathered, library)
    made = route.problem.made()
    differentiated = is_differentiated(operands)
    if made.kernel is None and not (differentiated and route.is_ours_backward()):
        if watched():
            route.problem.tell(made)
        return library()
    if made.kernel is None or differentiated or not route.form.is_direct:
        result = route.form.result(family(*route.form.arguments(operands)))
    else:
        if watched():
            route.problem.tell(made)
        result = family.run(made, (*operands, *route.form.told), route.form.shape)
    return result if pick is None else pick(result)


def _route(
    family: Family, function: str, operands: Operands, told: tuple[Any, ...], form: Callable[..., Form | str]
) -> Route | str:
    key = (
        function,
        told,
        *[(t.shape, t.stride(), t.dtype, t.device) if isinstance(t, torch.Tensor) else t for t in operands],
        may_use_tf32() if operands[0].is_cuda else None,
    )
    route = _routes.get(key)
    if route is None:
        if len(_routes) >= _MOST_ROUTES:
            _routes.clear()
        route = _routes[key] = _find_route(family, operands, told, form)
    return route


def _find_route(
    family: Family, operands: Operands, told: tuple[Any, ...], form: Callable[..., Form | str]
) -> Route | str:
    found = form(*operands, *told)
    if isinstance(found, str):
        return found
    problem = family.problem(found.arguments(operands))
    return problem if isinstance(problem, str) else Route(family, found, problem)


def _is_seen() -> bool:
    """Tell whether calls are traced or seen by a mode: the dispatcher must know of them."""
    return (
        torch.compiler.is_compiling()
        or _len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
    )


def is_differentiated(arguments: Operands) -> bool:
    """Tell whether autograd is to know of a call with these arguments."""
    return torch.is_grad_enabled() and any(
        argument.requires_grad for argument in arguments if isinstance(argument, torch.Tensor)
    )


def _foreign(operands: Operands) -> str | None:
    """Return why tensors are not plain memory, or None if they are."""
    if peek_interpreter_stack() is not None:
        return "a transform of torch.func is at work"
    for operand in operands:
        if isinstance(operand, torch.Tensor) and (type(operand) not in _PLAIN or operand.is_neg()):
            return f"it is no plain tensor, but {type(operand).__name__}"
    return None


def declined(function: str, reason: str, library: Callable[[], Any]) -> Any:
    """Have torch do what no kernel can, and tell watchers why."""
    _tell_declined(function, reason)
    return library()


def _tell_declined(function: str, reason: str) -> None:
    if not torch.compiler.is_compiling() and watched():
        tell(Call(function=function, workload=None, by="torch", reason=reason))
