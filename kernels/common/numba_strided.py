"""Loop nests of strided operators on the CPU, generated for a workload with constant sizes and strides.

Two axes of the index space are loops of one function, which vectorises: the *lane* axis is the inner loop, a
second axis the outer one. A task has a block of both, and fixed indices along all other axes. Guards are
tested where they change, not for each element: a block is divided at their limits, and each set of operands
that can exist together has a function of its own, in which the others are 0.

An index that is read from memory and is not valid sets a byte, by which the kernel raises at its end, and
counts as 0 until then.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tunebench.dtype import DType
from tunebench.expression import Apply, Name, Node, Number, names
from tunebench.index_map import Guard
from tunebench.kernels.common.expression import compiled, filled, function_text, variable
from tunebench.kernels.common.numba_cpu import address, jitted, load, store
from tunebench.kernels.common.numba_expression import PRINTER, by_libm, by_polynomials
from tunebench.workloads.common.expression_workload import substitute
from tunebench.workloads.common.strided_workload import StridedWorkload

__all__ = ["Nest", "Part", "addressed", "affine", "decoded", "indented", "plus", "strided_scope"]

MOST_SETS = 12
"""Most sets of operands that have a function each; if there are more, one function tests its operands."""
MOST_COMBINATIONS = 4096
"""Most combinations of limits that are enumerated."""

BLOCK = """
def block(@ADDRESSES@, @PLACES@, i, last_i, first_j, last_j@STATE@):
    @BEFORE@
    while i < last_i:
        rows = last_i - i
        @CUT_ROWS@
        j = first_j
        while j < last_j:
            count = last_j - j
            @CUT_LANES@
            @EXIST@
            @CALLS@
            j += count
        i += rows
    @AFTER@
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limit:
    """A guard, mirrored such that its coefficient along the lane axis, or else the second, is not negative.

    Attributes:
        name: Name of the variable that holds the limited sum of a block's first element.
        operand: Name of the operand.
        guard: The condition.
        lane: Step of the sum along the lane axis.
        second: Step of the sum along the second axis.
    """

    name: str
    operand: str
    guard: Guard
    lane: int
    second: int

    @property
    def here(self) -> str:
        """Text of the limited sum at the element (i, j) of a block."""
        return plus(self.name, (self.second, "i"), (self.lane, "j"))

    @property
    def change(self) -> str:
        """Text of the steps along the lane axis, or else the second, until the condition changes."""
        return f"until({self.here}, {self.lane or self.second}, {self.guard.extent})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a block in which a fixed set of operands exists; one generated function computes it.

    Attributes:
        nest: The loops.
        operands: Operands that it reads, in the order of its parameters.
        tree: The expression of these operands, named ``p0``, ``p1``, …
        flags: Operands that do not exist everywhere; the function takes a flag for each.
    """

    nest: Nest
    operands: tuple[str, ...]
    tree: Node
    flags: tuple[str, ...]

    @property
    def parameters(self) -> str:
        """First parameters of the function: address, offset and step of each operand, and the flags."""
        names = [name for place, _ in enumerate(self.operands) for name in (place, *self._gathers(place))]
        of_operands = (f"at_{name}, from_{name}, step_{name}, " for name in names)
        invalid = ["invalid_at, "] if self.nest.gathered else []
        return "".join([*of_operands, *(f"exist_{name}, " for name in self.flags), *invalid])

    def _gathers(self, place: int) -> list[str]:
        """Return the suffix of the variables of each gather of an operand."""
        gathers = self.nest.operands[self.operands[place]].index.gathers
        return [f"{place}_{number}" for number in range(len(gathers))]

    def values(self, suffix: str = "") -> str:
        """Return the names of the operands' values, separated by commas."""
        return ", ".join(f"{variable(f'p{place}')}{suffix}" for place in range(len(self.operands)))

    def loads(self, *, hoisted: bool, row: str = "i", suffix: str = "") -> list[str]:
        """Return assignments of the operands' values.

        Args:
            hoisted: Whether to load operands that do not depend on the lane axis, or the others.
            row: Text of the index along the second axis; that along the lane axis is j.
            suffix: Suffix of the names.
        """
        made = []
        for place, name in enumerate(self.operands):
            index = self.nest.operands[name].index
            read, is_hoisted = self._element(place, index.strides, row), not self._uses_lane(index.rows())
            for gather, variables in zip(index.gathers, self._gathers(place), strict=True):
                if self._uses_lane([gather.coefficients]) is not hoisted:
                    at = self._element(variables, gather.coefficients, row)
                    value = f"valid(at_{variables}[{at}], {gather.extent}, {gather.wraps}, invalid_at)"
                    value = f"{value} if exist_{name} else 0" if name in self.flags else value
                    made.append(f"index_{variables}{suffix} = {value}")
                read = plus(read, (gather.step, f"index_{variables}{suffix}"))
            if is_hoisted is not hoisted:
                continue
            value = f"read_{self.nest.operands[name].dtype}(at_{place}[{read}])"
            value = f"{value} if exist_{name} else f32(0)" if name in self.flags else value
            made.append(f"{variable(f'p{place}')}{suffix} = {value}")
        return made

    def _uses_lane(self, rows: Sequence[Sequence[int]]) -> bool:
        """Return whether any of some rows of factors has a step along the lane axis."""
        return any(row[self.nest.lane] for row in rows)

    def _element(self, name: int | str, row: Sequence[int], second: str) -> str:
        """Return the text of the offset of an element in the memory of an operand or of its indices."""
        across, lane = self.nest.steps(row)
        return plus(f"from_{name}", (int(across != 0), f"({second}) * step_{name}"), (lane, "j"))

    def expression(self) -> tuple[list[str], str]:
        """Return the assignments of the expression's steps, and the text of its value."""
        assignments, result = PRINTER.write(self.tree)
        return [line.strip() for line in assignments], result


class Nest:
    """The loops over two axes of a strided workload.

    Args:
        workload: The workload.
        lane: Axis of the inner loop.
        second: Axis of the outer loop, or None if there is none.
        write: Returns the text of the function ``@RUN@`` for a part of a block.
    """

    def __init__(
        self, workload: StridedWorkload, lane: int, second: int | None, write: Callable[[Part], str]
    ) -> None:
        self.lane, self.second = lane, second
        self.operands, self.gathered = workload.maps, workload.gathered
        self.limits = tuple(self._limits())
        self.guarded = tuple(dict.fromkeys(one.operand for one in self.limits))
        self.names: dict[str, str] = {}
        """Name of each generated function, by its text: parts that differ in names of operands share it."""
        self.parts: list[tuple[frozenset[str], Part, str]] = []
        for exists in _sets(workload) or (None,):
            part = self._part(workload.tree, exists)
            name = self.names.setdefault(write(part), f"run_{len(self.names)}")
            self.parts.append((exists or frozenset(), part, name))

    def steps(self, row: Sequence[int]) -> tuple[int, int]:
        """Return the steps of a row of coefficients along the second axis and the lane axis."""
        return 0 if self.second is None else row[self.second], row[self.lane]

    def place(self, first: str, row: Sequence[int]) -> str:
        """Return the text of an offset plus that of the element (i, j) of a block."""
        second, lane = self.steps(row)
        return plus(first, (second, "i"), (lane, "j"))

    def _limits(self) -> list[_Limit]:
        made = []
        for name, operand in self.operands.items():
            for number, guard in enumerate(operand.index.guards):
                second, lane = self.steps(guard.coefficients)
                upward = _mirrored(guard) if (lane or second) < 0 else guard
                second, lane = self.steps(upward.coefficients)
                of_block = f"limit_{name}_{number}"
                made.append(_Limit(name=of_block, operand=name, guard=upward, lane=lane, second=second))
        return made

    def _part(self, tree: Node, exists: frozenset[str] | None) -> Part:
        """Return the part in which a set of operands exists; None for all, with flags."""
        tree = _without(tree, frozenset() if exists is None else frozenset(self.operands) - exists)
        operands = names(tree)
        flags = tuple(name for name in operands if exists is None and name in self.guarded)
        tree = substitute(tree, {Name(name): Name(f"p{place}") for place, name in enumerate(operands)})
        return Part(nest=self, operands=operands, tree=tree, flags=flags)

    # -- generated code ----------------------------------------------------------------------------------

    @property
    def passed(self) -> str:
        """Arguments of a kernel for the addresses of operands."""
        operands = [addressed(variable(name), one.dtype) for name, one in self.operands.items()]
        indices = [addressed(variable(name), dtype) for name, (dtype, _) in self.gathered.items()]
        return ", ".join([*operands, *indices, *(["address_of(invalid)"] if indices else [])])

    @property
    def begin(self) -> list[str]:
        """First statements of a kernel: a byte that is set if an index is not valid, and another one."""
        return ["invalid = np.zeros(2, np.uint8)"] if self.gathered else []

    @property
    def marked(self) -> list[str]:
        """First statements of a task: a store without which Numba reads the byte before the tasks run."""
        return ["invalid[1] = 0"] if self.gathered else []

    @property
    def end(self) -> list[str]:
        """Last statements of a kernel, which raise if an index is not valid."""
        names = ", ".join(self.gathered)
        raised = f'    raise IndexError("an index in {names} is out of range")'
        return ["if invalid[0]:", raised] if self.gathered else []

    def _rows(self, name: str) -> list[tuple[str, Sequence[int], int]]:
        """Return the name of the offset, the steps and the start of an operand, then of its indices."""
        index, first = self.operands[name].index, f"{variable(name)}_from"
        gathers = enumerate(index.gathers)
        of_gathers = ((f"{first}_{number}", one.coefficients, one.start) for number, one in gathers)
        return [(first, index.strides, index.start), *of_gathers]

    def located(self, index: Mapping[int, str]) -> str:
        """Return the arguments of `block` that locate it: offsets of operands and indices, limited sums.

        Args:
            index: Text of the index along each axis that is not 0.
        """
        rows = [(row, start) for name in self.operands for _, row, start in self._rows(name)]
        rows += [(one.guard.coefficients, one.guard.start) for one in self.limits]
        return ", ".join(affine(row, index, start) for row, start in rows)

    def text(self, call: str, *, state: str, before: Sequence[str] = (), after: Sequence[str] = ()) -> str:
        """Return the functions of parts, and the function `block`, which calls one of them for each part.

        Args:
            call: Text of a call, with ``{run}`` for the function and ``{at}`` for its first arguments. A part
                begins at (i, j) of the block and has `rows` and `count` indices.
            state: Further parameters of the function.
            before: First statements.
            after: Last statements.
        """
        exist: dict[str, list[str]] = {}
        for one in self.limits:
            exist.setdefault(one.operand, []).append(f"0 <= {one.here} < {one.guard.extent}")
        cut_rows = [
            "rows = 1" if o.lane else f"rows = min(rows, {o.change})" for o in self.limits if o.second
        ]
        block = filled(
            BLOCK,
            ADDRESSES=", ".join(
                [
                    *(f"{variable(name)}_at" for name in (*self.operands, *self.gathered)),
                    *(["invalid_at"] if self.gathered else []),
                ]
            ),
            PLACES=", ".join(
                [
                    *(first for name in self.operands for first, _, _ in self._rows(name)),
                    *(o.name for o in self.limits),
                ]
            ),
            STATE=state,
        )
        block = indented(
            block,
            BEFORE=before,
            CUT_ROWS=cut_rows,
            CUT_LANES=[f"count = min(count, {one.change})" for one in self.limits if one.lane],
            EXIST=[f"exist_{name} = {' and '.join(parts)}" for name, parts in exist.items()],
            CALLS=self._calls(call),
            AFTER=after,
        )
        return "".join(text.replace("@RUN@", name) for text, name in self.names.items()) + block

    def _calls(self, call: str) -> list[str]:
        """Return the statements that call the function for the operands that exist."""
        made: list[str] = []
        for number, (exists, part, name) in enumerate(self.parts):
            given = [*map(self._given, part.operands), *(f"exist_{flag}" for flag in part.flags)]
            given += ["invalid_at"] if self.gathered else []
            text = call.format(run=name, at="".join(f"{argument}, " for argument in given))
            if number == len(self.parts) - 1:
                return [*made, "else:", f"    {text}"] if made else [text]
            tests = [f"exist_{name}" if name in exists else f"not exist_{name}" for name in self.guarded]
            made += [f"{'elif' if number else 'if'} {' and '.join(tests)}:", f"    {text}"]
        return made

    def _given(self, name: str) -> str:
        """Return the arguments for an operand and its indices: address, offset, step of the second axis."""
        gathers = self.operands[name].index.gathers
        addresses = [f"{variable(one)}_at" for one in (name, *(gather.source for gather in gathers))]
        rows = zip(addresses, self._rows(name), strict=True)
        return ", ".join(
            f"{at}, {self.place(first, row)}, {self.steps(row)[0]}" for at, (first, row, _) in rows
        )

    def compile(self, text: str, scope: dict[str, Any], fastmath: frozenset[str]) -> None:
        """Compile the functions of parts and `block`, and add them to the globals of the generated code.

        Args:
            text: The generated code.
            scope: Its globals.
            fastmath: LLVM fast-math flags.
        """
        for name in (*self.names.values(), "block"):
            scope[name] = jitted(fastmath)(compiled(function_text(text, name), name, dict(scope)))


def strided_scope(workload: StridedWorkload, functions: str) -> dict[str, Any]:
    """Return the globals of generated kernels: conversions, `address_of`, `until` and functions.

    Args:
        workload: The workload whose operands are read.
        functions: ``poly`` or ``libm``, the form of `TWO_FORMS`.
    """
    import numba
    import numpy as np

    scope: dict[str, Any] = {"__name__": __name__, "numba": numba, "np": np, "f32": np.float32}
    for operand in workload.maps.values():
        scope[f"read_{operand.dtype}"] = load(operand.dtype)
    scope |= {"write": store(workload.dtype), "address_of": address(), "until": _until()}
    if workload.gathered:
        scope["valid"] = _valid()
    return scope | (by_libm() if functions == "libm" else by_polynomials())


def addressed(array: str, dtype: DType) -> str:
    """Return the text of the address of an array; elements of type bool are read and written as bytes."""
    return f"address_of({array}{'.view(np.uint8)' if dtype == 'bool' else ''})"


def affine(row: Sequence[int], index: Mapping[int, str], start: int) -> str:
    """Return the text of a constant plus the sum of indices times coefficients.

    Args:
        row: Coefficients.
        index: Text of the index along some axes; it is 0 along the others.
        start: The constant.
    """
    return plus(str(start), *((row[axis], text) for axis, text in index.items()))


def plus(first: str, *terms: tuple[int, str]) -> str:
    """Return the text of a sum of a term and products of a number and a text."""
    parts = [f"{text}" if factor == 1 else f"{text} * {factor}" for factor, text in terms if factor]
    return " + ".join([*([first] if first != "0" or not parts else []), *parts])


def decoded(axes: Sequence[int], extents: Sequence[int], flat: str) -> tuple[list[str], dict[int, str]]:
    """Return the statements that decode a flat index, and the text of the index along each axis.

    Args:
        axes: Axes to decode, outermost first.
        extents: Extents of all axes.
        flat: Name of the variable that holds the flat index.
    """
    statements, step = [], 1
    for axis in reversed(axes):
        inside = "" if axis == axes[0] else f" % {extents[axis]}"
        statements.append(f"at_{axis} = {flat}{'' if step == 1 else f' // {step}'}{inside}")
        step *= extents[axis]
    return statements, {axis: f"at_{axis}" for axis in axes}


def indented(template: str, **pieces: Sequence[str]) -> str:
    """Return a template with each line ``@WORD@`` replaced by the statements of that name, indented alike."""
    for word, statements in pieces.items():

        def written(found: re.Match[str], statements: Sequence[str] = statements) -> str:
            return "".join(f"{found[1]}{statement}\n" for statement in statements)

        template = re.sub(rf"^( *)@{word}@\n", written, template, flags=re.MULTILINE)
    return template


def _without(tree: Node, absent: frozenset[str]) -> Node:
    """Return an expression in which some names are 0, without additions of 0."""
    if isinstance(tree, Name):
        return Number(0.0) if tree.name in absent else tree
    if not isinstance(tree, Apply):
        return tree
    arguments = tuple(_without(argument, absent) for argument in tree.arguments)
    if tree.operation in ("add", "sub") and arguments[1] == Number(0.0):
        return arguments[0]
    if tree.operation == "add" and arguments[0] == Number(0.0):
        return arguments[1]
    return Apply(tree.operation, arguments)


def _mirrored(guard: Guard) -> Guard:
    """Return the same condition with coefficients of the other sign."""
    coefficients = tuple(-factor for factor in guard.coefficients)
    return Guard(coefficients, guard.extent - 1 - guard.start, guard.extent)


def _sets(workload: StridedWorkload) -> list[frozenset[str]] | None:
    """Return the sets of operands that may exist together, or None if there are many.

    Guards with the same coefficients have the same limited sum, but for a constant. Their limits divide its
    range into parts in which none of them changes.
    """
    forms: dict[tuple[int, ...], set[int]] = {}
    guards: dict[str, list[Guard]] = {}
    for name, operand in workload.maps.items():
        for guard in operand.index.guards:
            upward = _mirrored(guard) if next(filter(None, guard.coefficients), 0) < 0 else guard
            guards.setdefault(name, []).append(upward)
            cuts = forms.setdefault(upward.coefficients, set())
            cuts |= {-upward.start, upward.extent - upward.start}
    parts = []
    for form, cuts in forms.items():
        low, high = Guard(form, 0, 1).span(workload.extents)
        parts.append([low, *sorted(cut for cut in cuts if low < cut <= high)])
    if math.prod(map(len, parts)) > MOST_COMBINATIONS:
        return None
    found: dict[frozenset[str], None] = {}
    for combination in itertools.product(*parts):
        sums = dict(zip(forms, combination, strict=True))
        absent = {
            name
            for name, limits in guards.items()
            if not all(0 <= one.start + sums[one.coefficients] < one.extent for one in limits)
        }
        found[frozenset(workload.maps) - absent] = None
    return list(found) if len(found) <= MOST_SETS else None


def _until() -> Callable[..., Any]:
    """Return the jitted function of the steps until a limited sum enters or leaves its range."""

    @jitted()
    def until(value: Any, step: Any, extent: Any) -> Any:
        end = 0 if value < 0 else extent
        return (end - value + step - 1) // step if value < end else 1 << 60

    return until


def _valid() -> Callable[..., Any]:
    """Return the jitted function that checks an index; an index that is not valid sets a byte, and is 0."""

    @jitted()
    def valid(index: Any, extent: Any, wraps: Any, invalid_at: Any) -> Any:
        if wraps and index < 0:
            index += extent
        if index < 0 or index >= extent:
            invalid_at[0] = 1
            return 0
        return index

    return valid
