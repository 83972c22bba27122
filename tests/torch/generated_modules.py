"""Random modules of views, pointwise operations, reductions and products, as Python source.

A module is drawn as a list of instructions. An instruction picks its operands among the tensors that exist by
small integers, so every list is a valid module and Hypothesis can shrink it.
"""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["CHANGES", "Program", "generated", "programs"]

EXTENTS = (1, 2, 3, 4, 6, 8)
"""Extents of axes."""

LARGEST = 4096
"""Elements of the largest tensor."""

Instruction = tuple[str, int, int, int]
_counter = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A module and its inputs, as drawn.

    Attributes:
        shape: Shape of the first input.
        layout: How the elements of the inputs lie in memory.
        instructions: Operation and three numbers that select operands and attributes.
        frozen: Bit i freezes parameter i.
        input_gradients: Whether inputs need gradients.
        dtype: Type of inputs and parameters.
        change: Name of the way in which parameters change between two calls.
    """

    shape: tuple[int, ...]
    layout: str
    instructions: tuple[Instruction, ...]
    frozen: int
    input_gradients: bool
    dtype: torch.dtype
    change: str


class _Writer:
    """Writes the source of a module while it computes the shapes of the module's tensors."""

    def __init__(self, program: Program, x: Tensor) -> None:
        self.lines: list[str] = []
        self.tensors: dict[str, Tensor] = {"x": x}
        self.parameters: list[Tensor] = []
        self.modules: list[nn.Module] = []
        self.dtype = program.dtype

    def pick(self, number: int, accepts: Callable[[Tensor], bool] = lambda tensor: True) -> str | None:
        """Return the name of a tensor that is accepted, newest first."""
        names = [name for name, tensor in self.tensors.items() if accepts(tensor)][::-1]
        return names[number % len(names)] if names else None

    def parameter(self, *shape: int) -> str:
        """Add a parameter and return the expression that reads it."""
        generator = torch.Generator().manual_seed(len(self.parameters))
        self.parameters.append(torch.randn(shape, generator=generator).to(self.dtype) / 2)
        return f"self.p[{len(self.parameters) - 1}]"

    def add(self, expression: str) -> None:
        """Add a line that computes an expression, unless its result is too large or invalid."""
        space = {"torch": torch, "functional": functional, "self": _Namespace(self), **self.tensors}
        with torch.no_grad():
            try:
                result = eval(expression, space)
            except (RuntimeError, ValueError, IndexError):
                return
        if not isinstance(result, Tensor) or not 0 < result.numel() <= LARGEST or result.dim() > 5:
            return
        name = f"t{len(self.lines)}"
        self.lines.append(f"{name} = {expression}")
        self.tensors[name] = result


class _Namespace:
    def __init__(self, writer: _Writer) -> None:
        self.p, self.m = writer.parameters, writer.modules


Operation = Callable[[_Writer, int, int, int], str | None]
OPERATIONS: dict[str, Operation] = {}


def _operation(function: Operation) -> Operation:
    OPERATIONS[function.__name__.strip("_")] = function
    return function


def _is_matrix(tensor: Tensor) -> bool:
    return tensor.dim() >= 2


# -- views -------------------------------------------------------------------------------------------------


@_operation
def _permute(to: _Writer, a: int, b: int, c: int) -> str | None:
    if (x := to.pick(a, _is_matrix)) is None:
        return None
    orders = list(itertools.permutations(range(to.tensors[x].dim())))
    return f"{x}.permute{orders[(b * 7 + c) % len(orders)]}"


@_operation
def _reshape(to: _Writer, a: int, b: int, c: int) -> str | None:
    x = to.pick(a)
    shape = list(to.tensors[x].shape)
    if b % 2 and len(shape) > 1:
        at = c % (len(shape) - 1)
        shape[at : at + 2] = [shape[at] * shape[at + 1]]
    else:
        at = c % max(1, len(shape))
        extent = shape[at] if shape else 1
        first = next((n for n in (2, 3, 4) if extent % n == 0), 1)
        shape[at : at + 1] = [first, extent // first]
    return f"{x}.reshape({tuple(shape)})"


@_operation
def _expand(to: _Writer, a: int, b: int, c: int) -> str | None:
    x = to.pick(a)
    at = b % (to.tensors[x].dim() + 1)
    shape = list(to.tensors[x].shape)
    shape.insert(at, (1, 2, 3)[c % 3])
    return f"{x}.unsqueeze({at}).expand({tuple(shape)})"


@_operation
def _slice(to: _Writer, a: int, b: int, c: int) -> str | None:
    if (x := to.pick(a, lambda tensor: any(extent > 1 for extent in tensor.shape))) is None:
        return None
    axes = [axis for axis, extent in enumerate(to.tensors[x].shape) if extent > 1]
    axis = axes[b % len(axes)]
    part = ("1:", ":-1", "::2")[c % 3]
    return f"{x}[{':, ' * axis}{part}]"


@_operation
def _chunk(to: _Writer, a: int, b: int, c: int) -> str | None:
    if (x := to.pick(a, lambda tensor: any(extent % 2 == 0 for extent in tensor.shape))) is None:
        return None
    axes = [axis for axis, extent in enumerate(to.tensors[x].shape) if extent % 2 == 0]
    return f"{x}.chunk(2, {axes[b % len(axes)]})[{c % 2}]"


@_operation
def _squeeze(to: _Writer, a: int, b: int, c: int) -> str | None:
    x = to.pick(a)
    return f"{x}.squeeze()" if b % 2 else f"{x}.unsqueeze({c % (to.tensors[x].dim() + 1)})"


@_operation
def _contiguous(to: _Writer, a: int, b: int, c: int) -> str | None:
    x = to.pick(a)
    last = to.tensors[x].dim() == 4 and b % 2
    return f"{x}.contiguous(memory_format=torch.channels_last)" if last else f"{x}.contiguous()"


@_operation
def _cat(to: _Writer, a: int, b: int, c: int) -> str | None:
    if (x := to.pick(a, lambda tensor: tensor.dim() > 0)) is None:
        return None
    shape = to.tensors[x].shape
    y = to.pick(b, lambda tensor: tensor.shape == shape)
    return f"torch.cat([{x}, {y}], {c % len(shape)})"


@_operation
def _stack(to: _Writer, a: int, b: int, c: int) -> str | None:
    x = to.pick(a)
    shape = to.tensors[x].shape
    y = to.pick(b, lambda tensor: tensor.shape == shape)
    return f"torch.stack([{x}, {y}, {x}][{c % 2} :], {c % (len(shape) + 1)})"


@_operation
def _pad(to: _Writer, a: int, b: int, c: int) -> str | None:
    if (x := to.pick(a, lambda tensor: tensor.dim() > 0)) is None:
        return None
    amounts = (b % 3, c % 3) if to.tensors[x].dim() < 2 or a % 2 else (b % 3, c % 3, c % 2, b % 2)
    return f"functional.pad({x}, {amounts})"


@_operation
def _roll(to: _Writer, a: int, b: int, c: int) -> str | None:
    if (x := to.pick(a, lambda tensor: tensor.dim() > 0)) is None:
        return None
    axis = b % to.tensors[x].dim()
    return f"{x}.flip({axis})" if c % 3 == 0 else f"{x}.roll({c - 15}, {axis})"


@_operation
def _repeat(to: _Writer, a: int, b: int, c: int) -> str | None:
    x = to.pick(a)
    times = [1] * (to.tensors[x].dim() + b % 2)
    if not times:
        return None
    times[c % len(times)] = 2
    return f"{x}.repeat({times})"


# -- pointwise ---------------------------------------------------------------------------------------------

UNARY = (
    "torch.relu({})",
    "functional.gelu({})",
    "functional.silu({})",
    "torch.tanh({})",
    "torch.sigmoid({})",
    "functional.hardtanh({})",
    "functional.leaky_relu({})",
    "(0.5 * {} + 1)",
    "(-{})",
    "{}.abs()",
    "({} * {} / 2)",
)


@_operation
def _unary(to: _Writer, a: int, b: int, c: int) -> str | None:
    x = to.pick(a)
    return UNARY[b % len(UNARY)].format(x, x)


def _with_parameter(to: _Writer, x: str, number: int) -> str:
    """Return a parameter that broadcasts to a tensor: axes are kept, 1 or missing."""
    shape = to.tensors[x].shape
    extents = [extent if number >> axis & 1 else 1 for axis, extent in enumerate(shape)]
    while extents and extents[0] == 1 and number % 3:
        extents.pop(0)
    return to.parameter(*extents)


BINARY = ("({} + {})", "({} * {})", "({} - {})", "torch.maximum({}, {})", "torch.add({}, {}, alpha=0.5)")


@_operation
def _binary(to: _Writer, a: int, b: int, c: int) -> str | None:
    x = to.pick(a)
    y = to.pick(b, lambda tensor: _broadcasts(tensor.shape, to.tensors[x].shape))
    return BINARY[c % len(BINARY)].format(x, y)


@_operation
def _affine(to: _Writer, a: int, b: int, c: int) -> str | None:
    x = to.pick(a)
    return BINARY[c % len(BINARY)].format(x, _with_parameter(to, x, b))


@_operation
def _select(to: _Writer, a: int, b: int, c: int) -> str | None:
    x = to.pick(a)
    y = to.pick(b, lambda tensor: _broadcasts(tensor.shape, to.tensors[x].shape))
    return (
        f"torch.where({x} > {y}, {x}, {y} * 0.5)",
        f"{x}.masked_fill({y} < 0.25, -2.0)",
        f"({x} * ({y} >= 0.5))",
        f"({x} + (({x} > 0) & ({y} < 1) | ({y} == 0)))",
    )[c % 4]


@_operation
def _cast(to: _Writer, a: int, b: int, c: int) -> str | None:
    x = to.pick(a)
    return (f"({x}.float() * 2).to({x}.dtype)", f"({x} > 0).to({x}.dtype)")[b % 2]


@_operation
def _in_place(to: _Writer, a: int, b: int, c: int) -> str | None:
    x = to.pick(a)
    return (f"{x}.clone().mul_({x})", f"{x}.clone().relu_()", f"({x} + 1).add_({x}, alpha=2)")[b % 3]


def _broadcasts(shape_a: Sequence[int], shape_b: Sequence[int]) -> bool:
    pairs = itertools.zip_longest(reversed(shape_a), reversed(shape_b), fillvalue=1)
    return all(a == b or 1 in (a, b) for a, b in pairs)


# -- reductions and normalisations -------------------------------------------------------------------------


@_operation
def _reduce(to: _Writer, a: int, b: int, c: int) -> str | None:
    if (x := to.pick(a, lambda tensor: tensor.dim() > 0)) is None:
        return None
    axes = tuple(axis for axis in range(to.tensors[x].dim()) if (b + 1) >> axis & 1) or (-1,)
    return f"{x}.{('sum', 'mean', 'amax')[c % 3]}({axes}, keepdim={bool(c // 3 % 2)})"


@_operation
def _group_norm(to: _Writer, a: int, b: int, c: int) -> str | None:
    def has_groups(tensor: Tensor) -> bool:
        return tensor.dim() >= 3 and tensor.shape[1] % 2 == 0 and tensor[0, 0].numel() > 1

    if (x := to.pick(a, has_groups)) is None:
        return None
    channels = to.tensors[x].shape[1]
    return f"functional.group_norm({x}.contiguous(), 2, {to.parameter(channels)}, {to.parameter(channels)})"


@_operation
def _softmax(to: _Writer, a: int, b: int, c: int) -> str | None:
    if (x := to.pick(a, lambda tensor: tensor.dim() > 0)) is None:
        return None
    axis = (-1, -1, b % to.tensors[x].dim())[c % 3]
    return f"functional.{('softmax', 'log_softmax')[b % 2]}({x}, {axis})"


@_operation
def _layer_norm(to: _Writer, a: int, b: int, c: int) -> str | None:
    if (x := to.pick(a, lambda tensor: tensor.dim() > 0 and tensor.shape[-1] > 1)) is None:
        return None
    cols = to.tensors[x].shape[-1]
    return f"functional.layer_norm({x}, ({cols},), {to.parameter(cols)}, {to.parameter(cols)})"


# -- products ----------------------------------------------------------------------------------------------


@_operation
def _linear(to: _Writer, a: int, b: int, c: int) -> str | None:
    if (x := to.pick(a, _is_matrix)) is None:
        return None
    inner, outer = to.tensors[x].shape[-1], EXTENTS[b % len(EXTENTS)]
    if c % 3 == 0:
        return f"functional.linear({x}, {to.parameter(outer, inner)}, {to.parameter(outer)})"
    return (
        f"{x} @ {to.parameter(inner, outer)}"
        if c % 3 == 1
        else f"functional.linear({x}, {to.parameter(outer, inner)})"
    )


@_operation
def _matmul(to: _Writer, a: int, b: int, c: int) -> str | None:
    if (x := to.pick(a, _is_matrix)) is None:
        return None
    lead, k = to.tensors[x].shape[:-2], to.tensors[x].shape[-1]
    right = [
        (name, end)
        for name, y in to.tensors.items()
        for end in ("", ".mT")
        if _is_matrix(y) and y.shape[:-2] == lead and (y.shape[-1] if end else y.shape[-2]) == k
    ]
    if not right:
        return f"{x} @ {to.parameter(*lead, k, EXTENTS[b % len(EXTENTS)])}"
    name, end = right[b % len(right)]
    return f"{x} @ {name}{end}"


@_operation
def _addmm(to: _Writer, a: int, b: int, c: int) -> str | None:
    if (x := to.pick(a, lambda tensor: tensor.dim() in (2, 3))) is None:
        return None
    *lead, m, k = to.tensors[x].shape
    n = EXTENTS[b % len(EXTENTS)]
    right = to.parameter(*lead, k, n)
    existing = to.pick(c, lambda tensor: tuple(tensor.shape) in ((*lead, m, n), (*lead, n, m), (n,)))
    addend = existing or (to.parameter(*lead, n, m) if c % 2 else to.parameter(*lead, m, n))
    shape = to.tensors[existing].shape if existing else to.parameters[-1].shape
    if tuple(shape) != (*lead, m, n) and len(shape) > 1:
        addend += ".mT"
    return f"torch.{'baddbmm' if lead else 'addmm'}({addend}, {x}, {right})"


@_operation
def _einsum(to: _Writer, a: int, b: int, c: int) -> str | None:
    if (x := to.pick(a, lambda tensor: tensor.dim() == 3)) is None:
        return None
    p, q, r = to.tensors[x].shape
    n = EXTENTS[b % len(EXTENTS)]
    forms = (
        ("pqr,rn->pqn", (r, n)),
        ("pqr,prn->pqn", (p, r, n)),
        ("pqr,qrn->pqn", (q, r, n)),
        ("pqr,nqr->pn", (n, q, r)),
        ("pqr,npr->nqp", (n, p, r)),
        ("pqr,qnr->npq", (q, n, r)),
    )
    form, shape = forms[c % len(forms)]
    return f'torch.einsum("{form}", {x}, {to.parameter(*shape)})'


@_operation
def _attention(to: _Writer, a: int, b: int, c: int) -> str | None:
    def has_heads(tensor: Tensor) -> bool:
        return tensor.dim() == 4 and tensor.shape[-1] >= 2

    if (x := to.pick(a, has_heads)) is None:
        return None
    k = to.pick(b, lambda tensor: has_heads(tensor) and tensor.shape == to.tensors[x].shape)
    v = to.pick(c, lambda tensor: has_heads(tensor) and tensor.shape == to.tensors[x].shape)
    return f"functional.scaled_dot_product_attention({x}, {k}, {v}, is_causal={bool(c % 2)})"


@_operation
def _conv(to: _Writer, a: int, b: int, c: int) -> str | None:
    if (x := to.pick(a, lambda tensor: tensor.dim() == 4)) is None:
        return None
    channels, filters, taps = to.tensors[x].shape[1], EXTENTS[b % len(EXTENTS)], (1, 3)[c % 2]
    bias = f", {to.parameter(filters)}" if b % 2 else ", None"
    weight = to.parameter(filters, channels, taps, taps)
    return f"functional.conv2d({x}, {weight}{bias}, padding={taps // 2})"


@_operation
def _batch_norm(to: _Writer, a: int, b: int, c: int) -> str | None:
    if (x := to.pick(a, lambda tensor: tensor.dim() == 4 and tensor.numel() > tensor.shape[1])) is None:
        return None
    to.modules.append(nn.BatchNorm2d(to.tensors[x].shape[1]))
    if c % 2:
        to.modules[-1].eval()
    return f"self.m[{len(to.modules) - 1}]({x})"


# -- modules -----------------------------------------------------------------------------------------------


class _Module(nn.Module):
    def __init__(self, parameters: Sequence[Tensor], modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.p = nn.ParameterList([nn.Parameter(parameter.clone()) for parameter in parameters])
        self.m = nn.ModuleList(modules)


def _input(program: Program) -> Tensor:
    generator = torch.Generator().manual_seed(99)
    x = torch.randn(program.shape, generator=generator).to(program.dtype)
    if program.layout == "reversed" and x.dim() > 1:
        return x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim())))
    if program.layout == "channels last" and x.dim() == 4:
        return x.contiguous(memory_format=torch.channels_last)
    if program.layout == "gaps":
        return torch.stack([x, x], -1)[..., 0]
    return x


def generated(program: Program) -> tuple[nn.Module, Tensor, str]:
    """Return the module of a program, its input, and the source of its `forward`."""
    x = _input(program)
    writer = _Writer(program, x)
    for name, *numbers in program.instructions:
        if expression := OPERATIONS[name](writer, *numbers):
            writer.add(expression)
    names = list(writer.tensors)
    returned = [name for index, name in enumerate(names[1:]) if index == len(names) - 2 or index % 3 == 0]
    lines = ["def forward(self, x):", *writer.lines, f"return ({', '.join(returned or ['x + 1'])},)"]
    source = "\n    ".join(lines) + "\n"
    file = f"<generated {next(_counter)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    space: dict[str, Any] = {"torch": torch, "functional": functional}
    exec(compile(source, file, "exec"), space)
    model = type("Generated", (_Module,), {"forward": space["forward"]})(writer.parameters, writer.modules)
    for index, parameter in enumerate(model.p):
        parameter.requires_grad_(not program.frozen >> index & 1)
    x = x.requires_grad_(program.input_gradients)
    return model.to(program.dtype), x, source


def _numbers() -> st.SearchStrategy[int]:
    return st.integers(0, 30)


def programs() -> st.SearchStrategy[Program]:
    """Return a strategy of modules of 1 to 10 instructions."""
    instruction = st.tuples(st.sampled_from(sorted(OPERATIONS)), _numbers(), _numbers(), _numbers())
    return st.builds(
        Program,
        shape=st.lists(st.sampled_from(EXTENTS), min_size=1, max_size=4).map(tuple),
        layout=st.sampled_from(("contiguous", "reversed", "channels last", "gaps")),
        instructions=st.lists(instruction, min_size=1, max_size=10).map(tuple),
        frozen=st.integers(0, 255),
        input_gradients=st.booleans(),
        dtype=st.sampled_from((torch.float32, torch.float32, torch.float32, torch.bfloat16)),
        change=st.sampled_from(sorted(CHANGES)),
    )


# -- changes of parameters ---------------------------------------------------------------------------------


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    return (
        tensor
        for tensor in itertools.chain(module.parameters(), module.buffers())
        if tensor.is_floating_point()
    )


def _in_place_change(module: nn.Module) -> None:
    with torch.no_grad():
        for tensor in _tensors(module):
            tensor.mul_(1.5)


def _data_change(module: nn.Module) -> None:
    for tensor in _tensors(module):
        tensor.data.mul_(1.5)


def _new_data(module: nn.Module) -> None:
    for tensor in _tensors(module):
        tensor.data = tensor.data * 1.5


def _numpy_change(module: nn.Module) -> None:
    for tensor in _tensors(module):
        if tensor.dtype == torch.float32:
            tensor.detach().numpy()[...] *= 1.5


def _loaded_state(module: nn.Module) -> None:
    state = module.state_dict()
    module.load_state_dict(
        {key: tensor * 1.5 if tensor.is_floating_point() else tensor for key, tensor in state.items()}
    )


CHANGES: dict[str, Callable[[nn.Module], None]] = {
    "in place": _in_place_change,
    "data": _data_change,
    "new data": _new_data,
    "numpy": _numpy_change,
    "state": _loaded_state,
}
"""Ways to change all parameters and buffers of a module."""
