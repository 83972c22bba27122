"""Heads of steps compiled by TorchInductor, whose kernels round in another way than those of eager mode.

The operations up to the first update by an optimizer are one graph, and the others a second one:
TorchInductor orders the operations of a graph anew, and an error that values of a tensor cause, such as an
index out of range, must come before any update.
"""

from __future__ import annotations

import operator
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor, fx

from tunebench.training.coexecution._call import Arithmetic, Number, Operation, Value, flat, replaced
from tunebench.training.coexecution._memory import copies_reason
from tunebench.training.coexecution._operator import may_raise
from tunebench.training.coexecution._script import script_runner
from tunebench.training.coexecution._tensors import NotUnderstoodError
from tunebench.training.coexecution._update import Times

__all__ = ["Compiled", "Compiler", "HeadOperations", "largest_difference"]

_ATEN = torch.ops.aten

_CHECKS = 2
"""Number of replays on copies that must be within the tolerance before compiled code is used."""

_COPIES = 3
"""Number of copies of all tensors that a check takes at most."""

_FLOOR = 2**-6
"""Part of the largest gradient below which the magnitude of a gradient does not count.

A gradient that is zero in exact arithmetic, such as that of a bias before a normalization, is rounding alone:
some 1e-7 of the largest one in f32.
"""

_ARITHMETIC: dict[str, Callable[..., Any]] = {
    f"aten::{name}": getattr(torch, name) for name in ("add", "sub", "mul", "div", "pow", "neg")
}

_SCALED = {_ATEN.addcdiv_.default: torch.div, _ATEN.addcmul_.default: torch.mul}
"""Operations that add a scaled quotient or product of two tensors, and how these are computed."""

_WITH_TENSOR = {
    getattr(packet, overload): packet.Tensor
    for packet in (
        _ATEN.add, _ATEN.sub, _ATEN.mul, _ATEN.div, _ATEN.add_, _ATEN.sub_, _ATEN.mul_, _ATEN.div_,
        _ATEN.lt, _ATEN.le, _ATEN.gt, _ATEN.ge,
    )
    for overload in ("Tensor", "Scalar")
}  # fmt: skip
"""Operations whose number can be a tensor without dimensions, and the overload that takes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadOperations:
    """The operations of a recorded head, and where it gets its values.

    Attributes:
        operations: The operations, with those of updates.
        first_update: Position of the first operation of an update.
        listed: Indices of the values that are in a list, the first argument of the head's function.
        inputs: Indices of its further tensors.
        numbers: Indices of its Python numbers, which come after these.
        outputs: Indices of its results.
        gradients: Positions of the gradients among the results.
        types: Type of each value of the record.
    """

    operations: Sequence[Operation | Arithmetic]
    first_update: int
    listed: list[int]
    inputs: list[int]
    numbers: list[int]
    outputs: list[int]
    gradients: set[int]
    types: list[torch.dtype]


@dataclass(slots=True, kw_only=True)
class Compiler:
    """How heads of a step are compiled, and what that took.

    Attributes:
        tolerance: Largest difference over the largest magnitude of a tensor.
        seconds: Time of compilation and of checks in seconds.
        runs: Number of runs of compiled heads.
        reason: Why the last head that is not run by compiled code is not, or None.
    """

    tolerance: float
    seconds: float = 0.0
    runs: int = 0
    reason: str | None = None

    def compiled(self, head: HeadOperations, tensors: Sequence[Tensor]) -> Compiled | None:
        """Return a compiled head; None, with the reason, if it cannot be compiled."""
        start = time.perf_counter()
        self.reason = copies_reason(_COPIES * sum(tensor.nbytes for tensor in tensors))
        if self.reason is not None:
            return None
        try:
            return Compiled(self, head, tensors)
        except Exception as error:  # whatever the compiler raises: recorded operations run instead
            self.reason = f"{type(error).__name__}: {_first_line(error)}"
            return None
        finally:
            self.seconds += time.perf_counter() - start


class Compiled:
    """A head that is compiled: checked within the tolerance, then used where it is faster than the record.

    Attributes:
        refused: Whether it is not used any more.
        times: Its times and those of recorded operations.
    """

    def __init__(self, compiler: Compiler, head: HeadOperations, tensors: Sequence[Tensor]) -> None:
        self.refused = False
        self.times = Times()
        self._compiler = compiler
        self._head = head
        self._checks = 0
        self._listed = list(tensors[: len(head.listed)])
        self._geometry = _geometry(self._listed)
        self._indices = [*head.listed, *head.inputs]
        self._parts, self._outputs = _parts(head)
        self._functions: list[_Function] = []
        results = chain.from_iterable(part.outputs for part in self._parts)
        positions = {index: position for position, index in enumerate([*self._indices, *results])}
        self._reads = [[positions[index] for index in part.inputs] for part in self._parts]
        self._returns = [positions[index] for index in self._outputs]
        values = dict(zip(self._indices, tensors, strict=True))
        for part in self._parts:
            function = _Function(part, head, [values[index] for index in part.inputs])
            values.update(zip(part.outputs, function.examples, strict=True))
            function.examples = ()
            self._functions.append(function)

    @property
    def is_settled(self) -> bool:
        """Return whether it is decided what runs."""
        return self.refused or self.times.decided

    def is_turn(self, tensors: Callable[[], Sequence[Tensor]], numbers: Sequence[float]) -> bool:
        """Return whether it runs next, after its checks on copies of the tensors."""
        if not self.refused and self._checks < _CHECKS:
            self._check(tensors(), numbers)
        return (
            not self.refused
            and self.times.runs_record()
            and _geometry(self._listed) == self._geometry
            and not _share_memory(tensors())
        )

    def note(self, nanoseconds: int, *, compiled: bool) -> None:
        """Note the time of a run of compiled or recorded operations."""
        self._compiler.runs += compiled
        if self.is_settled:
            return
        self.times.add(nanoseconds, by_record=compiled)
        if self.times.decided and not self.times.runs_record():
            self._refuse("recorded operations are faster")

    def run(self, listed: Any, *arguments: Any) -> Sequence[Tensor]:
        """Run it as the function of the recorded head runs, with the same arguments."""
        count = len(self._head.inputs)
        values = [*self._listed, *arguments[:count]]
        numbers = torch.tensor(arguments[count:], dtype=torch.float64)
        for positions, function in zip(self._reads, self._functions, strict=True):
            values += function([values[position] for position in positions], numbers)
        return [values[position] for position in self._returns]

    def _refuse(self, reason: str) -> None:
        self.refused = True
        self._compiler.reason = reason
        self._functions.clear()

    def _check(self, tensors: Sequence[Tensor], numbers: Sequence[float]) -> None:
        """Compare it with recorded operations, which give the bits of eager mode, on copies of tensors."""
        start = time.perf_counter()
        state, optimizes = torch.get_rng_state(), torch._C._get_graph_executor_optimize()
        torch._C._set_graph_executor_optimize(False)
        try:
            with torch.no_grad():
                self._compare(tensors, numbers)
        except Exception as error:
            self._refuse(_first_line(error))
        finally:
            torch._C._set_graph_executor_optimize(optimizes)
            torch.set_rng_state(state)
        self._checks += 1
        self._compiler.seconds += time.perf_counter() - start

    def _compare(self, tensors: Sequence[Tensor], numbers: Sequence[float]) -> None:
        """Compare each part on the values that recorded operations gave it.

        An optimizer that divides a gradient by its own magnitude makes rounding large, so its results are not
        compared after gradients that differ.

        Raises:
            NotUnderstoodError: Results differ by more than the tolerance.
        """
        values = dict(zip(self._indices, map(_copy, tensors), strict=True))
        gradients = {self._outputs[position] for position in self._head.gradients}
        for part, function in zip(self._parts, self._functions, strict=True):
            arguments = [values[index] for index in part.inputs]
            actual, expected = self._results(part, function, arguments, numbers)
            if _layouts(actual) != _layouts(expected):
                raise NotUnderstoodError("compiled code gives tensors of other strides, or that share memory")
            values.update(zip(part.outputs, expected[len(arguments) :], strict=True))
            magnitudes = [_finite_magnitude(values[index]) for index in gradients if index in values]
            floor = _FLOOR * max(magnitudes, default=0.0)
            floors = [0.0] * len(arguments) + [floor if index in gradients else 0.0 for index in part.outputs]
            difference = largest_difference(expected, actual, floors)
            if not difference <= self._compiler.tolerance:
                raise NotUnderstoodError(
                    f"results differ by {difference:.1e} of their largest magnitude, "
                    f"more than the tolerance of {self._compiler.tolerance:.1e}"
                )

    def _results(
        self, part: _Part, function: _Function, arguments: list[Tensor], numbers: Sequence[float]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return arguments and results of a compiled part for copies, and of its recorded operations.

        Raises:
            NotUnderstoodError: They draw other random numbers.
        """
        copies = list(map(_copy, arguments))
        state = torch.get_rng_state()
        actual = function(copies, torch.tensor(numbers, dtype=torch.float64))
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        types: dict[int, type] = dict.fromkeys(self._head.numbers, float)
        exact = script_runner(part.operations, part.inputs, types, part.outputs)
        expected = exact(*arguments, *numbers) or ()
        if not torch.equal(after, torch.get_rng_state()):
            raise NotUnderstoodError("compiled code draws other random numbers")
        return [*copies, *actual], [*arguments, *expected]


def _first_line(error: BaseException) -> str:
    return f"{error}".strip().split("\n")[0][:200]


def largest_difference(
    expected: Sequence[Tensor], actual: Sequence[Tensor], floors: Sequence[float] | None = None
) -> float:
    """Return the largest difference between tensors over the largest magnitude of the expected one.

    It is infinite where tensors without fractions differ, or where not the same elements are finite.

    Args:
        expected: Tensors.
        actual: Tensors of the same shapes.
        floors: The least magnitude of each.
    """
    largest = 0.0
    for reference, tensor, floor in zip(expected, actual, floors or [0.0] * len(expected), strict=True):
        if not (reference.is_floating_point() or reference.is_complex()):
            if not torch.equal(reference, tensor):
                return float("inf")
            continue
        finite = reference.isfinite()
        if not torch.equal(finite, tensor.isfinite()) or not torch.equal(
            reference[~finite].nan_to_num(), tensor[~finite].nan_to_num()
        ):
            return float("inf")
        difference = _magnitude((reference - tensor)[finite])
        if difference:
            largest = max(largest, difference / max(_magnitude(reference[finite]), floor, 1e-300))
    return largest


def _magnitude(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _finite_magnitude(tensor: Tensor) -> float:
    return _magnitude(tensor[tensor.isfinite()])


def _geometry(tensors: Sequence[Tensor]) -> list[Any]:
    """Return shapes and strides, which compiled code does not check."""
    return [*map(Tensor.size, tensors), *map(Tensor.stride, tensors)]


def _share_memory(tensors: Sequence[Tensor]) -> bool:
    """Return whether two tensors share memory: compiled code may read one before it writes another."""
    return len({tensor.untyped_storage()._cdata for tensor in tensors}) < len(tensors)


def _copy(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides."""
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return copy.copy_(tensor.detach())


def _layouts(tensors: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    """Return shapes, strides and types of tensors, and which of them share memory."""
    storages = [tensor.untyped_storage()._cdata for tensor in tensors]
    return [
        (tensor.shape, tensor.stride(), tensor.dtype, storages.index(storage))
        for tensor, storage in zip(tensors, storages, strict=True)
    ]


# -- parts ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Part:
    """Operations that are compiled together.

    Attributes:
        operations: The operations.
        inputs: Indices of the values that exist before.
        outputs: Indices of its results.
    """

    operations: Sequence[Operation | Arithmetic]
    inputs: list[int]
    outputs: list[int]


def _parts(head: HeadOperations) -> tuple[list[_Part], list[int]]:
    """Return the operations before the first update, the others, and the indices of the results.

    Raises:
        NotUnderstoodError: Two results are the same memory.
    """
    before, after = head.operations[: head.first_update], head.operations[head.first_update :]
    same = _same_tensors(before)
    after = [_renamed(entry, same) for entry in after]
    results = [same.get(index, index) for index in head.outputs]
    if len(set(results)) < len(results):
        raise NotUnderstoodError("two results share memory")
    computed = {output for entry in before if isinstance(entry, Operation) for output in entry.outputs}
    reads = {*chain.from_iterable(map(_reads, before))}, {*chain.from_iterable(map(_reads, after))}
    inputs = [*head.listed, *head.inputs]
    carried = sorted(index for index in computed & (reads[1] | set(results)) if index is not None)
    parts = [
        _Part(before, [index for index in inputs if index in reads[0]], carried),
        _Part(
            after,
            [index for index in (*inputs, *carried) if index in reads[1]],
            [index for index in results if index not in computed],
        ),
    ]
    return [part for part in parts if part.operations], results


def _same_tensors(operations: Sequence[Operation | Arithmetic]) -> dict[int, int]:
    """Return values that are the memory and geometry of others, detached or written in place, and these."""
    same: dict[int, int] = {}
    for entry in operations:
        if not isinstance(entry, Operation) or len(entry.outputs) != 1 or entry.outputs[0] is None:
            continue
        if entry.operator is _ATEN.detach.default or _writes_in_place(entry.operator):
            same[entry.outputs[0]] = same.get(entry.args[0].index, entry.args[0].index)
    return same


def _writes_in_place(function: Any) -> bool:
    """Return whether an operator writes its first argument and returns it; not all whose names end so do."""
    schema = function._schema
    aliases = [value.alias_info for value in (*schema.arguments[:1], *schema.returns)]
    return len(aliases) == 2 and all(alias is not None and alias.is_write for alias in aliases)


def _renamed(entry: Operation | Arithmetic, indices: dict[int, int]) -> Operation | Arithmetic:
    """Return an operation that reads other values."""

    def leaf(item: Any) -> Any:
        return Value(indices.get(item.index, item.index)) if isinstance(item, Value) else item

    if isinstance(entry, Arithmetic):
        return replace(entry, args=replaced(entry.args, leaf))
    named = tuple((name, replaced(value, leaf)) for name, value in entry.kwargs)
    return replace(entry, args=replaced(entry.args, leaf), kwargs=named)


def _reads(entry: Operation | Arithmetic) -> list[int]:
    if isinstance(entry, Operation):
        return list(entry.reads())
    return [leaf.index for leaf in entry.args if isinstance(leaf, Value)]


def _functional(function: Any) -> Any:
    """Return the operator that makes a new tensor of what an operator writes in place."""
    name = function._schema.name.removeprefix("aten::").removesuffix("_")
    return getattr(getattr(_ATEN, name, None), function._overloadname, function)


def _uncompiled(tensors: Sequence[Tensor]) -> NoReturn:
    raise NotUnderstoodError("TorchInductor compiled nothing")


class _Function:
    """A part that is compiled, called with a list of tensors and a vector of numbers.

    Attributes:
        examples: Results for copies of the examples.
    """

    def __init__(self, part: _Part, head: HeadOperations, examples: Sequence[Tensor]) -> None:
        graph = _Writer(part, head, [example.dtype for example in examples]).graph
        if _share_memory(examples):
            raise NotUnderstoodError("two inputs of a part share memory")
        copies = [*map(_copy, examples), torch.ones(len(head.numbers), dtype=torch.float64)]
        self._written: list[int] = []
        self._call: Callable[..., Any] = _uncompiled
        state = torch.get_rng_state()
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._compile(fx.GraphModule({}, graph), copies)
            self.examples: Sequence[Tensor] = self._call([*copies])
        finally:
            torch.set_rng_state(state)

    def __call__(self, tensors: Sequence[Tensor], numbers: Tensor) -> Sequence[Tensor]:
        """Run it, and count versions of the tensors that it writes, as operations of torch do."""
        results: Sequence[Tensor] = self._call([*tensors, numbers])
        torch.autograd.graph.increment_version([tensors[position] for position in self._written])
        return results

    def _compile(self, module: fx.GraphModule, examples: Sequence[Tensor]) -> None:
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner
        from torch._inductor.decomposition import select_decomp_table

        raising = {_functional(node.target) for node in module.graph.nodes if "may_raise" in node.meta}

        def inner(graph: fx.GraphModule, inputs: Any, **options: Any) -> Any:
            nodes = list(graph.graph.nodes)
            placeholders = [node for node in nodes if node.op == "placeholder"]
            written = {node.args[0] for node in nodes if node.target is _ATEN.copy_.default}
            self._written = [position for position, node in enumerate(placeholders) if node in written]
            for node in nodes:
                if node.target in raising:
                    node.meta["should_fallback"] = True
            _compute_numbers_once(graph.graph)
            graph.recompile()
            self._call = compile_fx_inner(graph, inputs, **options)
            return self._call

        table = {op: rule for op, rule in select_decomp_table().items() if op not in raising}
        with config.patch(fallback_random=True, size_asserts=False):
            compile_fx(module, examples, inner_compile=inner, decompositions=table)


def _is_number(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.ndim == 0 and value.dtype is torch.float64


def _compute_numbers_once(graph: fx.Graph) -> None:
    """Write computed numbers, such as powers of bias corrections, to a vector that the operations read.

    TorchInductor would compute them again for each element of a tensor.
    """
    nodes = list(graph.nodes)
    users = {
        node: [user for user in node.users if not _is_number(user)]
        for node in nodes
        if node.op == "call_function" and _is_number(node) and node.target is not _ATEN.select.int
    }
    used = [node for node, reading in users.items() if reading]
    if len(used) < 2 or any(user.op == "output" for node in used for user in users[node]):
        return
    last = [node for node in nodes if node.op == "placeholder"][-1]
    needed = _ancestors(used)
    for node in nodes:
        if node in needed and node.op != "placeholder":
            last.append(node)
            last = node

    def added(function: Any, *args: Any) -> fx.Node:
        nonlocal last
        with graph.inserting_after(last):
            last = graph.call_function(function, args)
        last.meta["val"] = function(*fx.map_arg(args, lambda node: node.meta["val"]))
        return last

    vector = added(_ATEN.cat.default, [added(_ATEN.unsqueeze.default, node, 0) for node in used])
    for position, node in enumerate(used):
        read = added(_ATEN.select.int, vector, 0, position)
        for user in users[node]:
            user.replace_input_with(node, read)


def _ancestors(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Return nodes and all that they are computed from."""
    needed: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            pending += node.all_input_nodes
    return needed


class _Writer:
    """Writes a part as a graph whose numbers are elements of a vector of f64, its last input."""

    def __init__(self, part: _Part, head: HeadOperations, types: Sequence[torch.dtype]) -> None:
        self.graph = fx.Graph()
        self._values = {index: self.graph.placeholder(f"value_{index}") for index in part.inputs}
        self._types = dict(enumerate(head.types)) | dict(zip(part.inputs, types, strict=True))
        vector = self.graph.placeholder("numbers")
        self._numbers = {
            index: self.graph.call_function(_ATEN.select.int, (vector, 0, position))
            for position, index in enumerate(head.numbers)
        }
        for entry in part.operations:
            if isinstance(entry, Arithmetic):
                self._numbers[entry.output] = self._number(entry)
            else:
                self._add(entry)
        self.graph.output(tuple(self._values[index] for index in part.outputs))

    def _number(self, entry: Arithmetic) -> fx.Node:
        args = replaced(entry.args, self._leaf)
        if not any(isinstance(arg, fx.Node) for arg in args):
            raise NotUnderstoodError("a number is computed of constants")
        if entry.operator == "aten::Float":
            return self.graph.call_function(_ATEN._to_copy.default, args, {"dtype": torch.float64})
        return self.graph.call_function(_ARITHMETIC[entry.operator], args)

    def _add(self, entry: Operation) -> None:
        types = [self._types[index] for index in entry.reads()]
        for output in entry.outputs:
            if output is not None and types:
                self._types.setdefault(output, types[0])
        leaves = list(flat((entry.args, tuple(value for _, value in entry.kwargs))))
        if any(isinstance(leaf, Number) for leaf in leaves):
            result = self._with_number(entry)
        else:
            result = self.graph.call_function(
                entry.operator,
                replaced(entry.args, self._leaf),
                {name: replaced(value, self._leaf) for name, value in entry.kwargs},
            )
        if may_raise(entry, types):
            result.meta["may_raise"] = True
        if len(entry.operator._schema.returns) == 1 and not entry.is_list:
            if entry.outputs[0] is not None:
                self._values[entry.outputs[0]] = result
            return
        for position, output in enumerate(entry.outputs):
            if output is not None:
                self._values[output] = self.graph.call_function(operator.getitem, (result, position))

    def _leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, Value):
            return self._values[leaf.index]
        return self._numbers[leaf.index] if isinstance(leaf, Number) else leaf.value

    def _with_number(self, entry: Operation) -> fx.Node:
        """Call an operation with a number that is a tensor without dimensions, of the type of the others."""
        call, function = self.graph.call_function, entry.operator
        types = [self._types[index] for index in (*entry.reads(), *entry.outputs) if index is not None]
        dtype = next((dtype for dtype in reversed(types) if dtype.is_floating_point), torch.float64)

        def converted(leaf: Any) -> Any:
            value = self._leaf(leaf)
            return (
                call(_ATEN._to_copy.default, (value,), {"dtype": dtype})
                if isinstance(leaf, Number)
                else value
            )

        args = replaced(entry.args, converted)
        kwargs = {name: replaced(value, converted) for name, value in entry.kwargs}
        if function is _ATEN.scalar_tensor.default:
            return args[0]
        if function in _SCALED and set(kwargs) == {"value"}:
            part = call(torch.mul, (call(_SCALED[function], args[1:]), kwargs["value"]))
            return call(_ATEN.add_.Tensor, (args[0], part))
        if function is _ATEN.lerp_.Scalar and not kwargs:
            part = call(torch.mul, (call(torch.sub, (args[1], args[0])), args[2]))
            return call(_ATEN.add_.Tensor, (args[0], part))
        if function in _WITH_TENSOR and len(args) == 2 and set(kwargs) <= {"alpha"}:
            operand = args[1] if "alpha" not in kwargs else call(torch.mul, (args[1], kwargs["alpha"]))
            return call(_WITH_TENSOR[function], (args[0], operand))
        raise NotUnderstoodError(f"{function.name()} gets a number that changes")
