"""Lists that a step only appends to, such as logs, as Dynamo traces them in heads: they decide nothing.

Dynamo guards the length and the elements of each list that it meets, so a step that appends before its
backward pass would need a trace in each iteration. This module imports Dynamo.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

from torch._dynamo.bytecode_transformation import create_instruction
from torch._dynamo.exc import UnspecializeRestartAnalysis
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables import ConstantVariable, ListVariable, VariableTracker
from torch._dynamo.variables.base import ValueMutationExisting
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.misc import GetAttrVariable

from tunebench.training.coexecution._head_identity import guard_changed_objects

__all__ = ["AppendedLists"]


class AppendedLists:
    """The lists of one trace that the step appends to.

    A trace restarts at the first ``append`` of a list, with a variable that supports ``append`` alone. Any
    other use of the list restarts the trace once more, with Dynamo's own variable of the list.
    """

    def __init__(self) -> None:
        self._appended: dict[int, list[Any]] = {}
        self._read: set[int] = set()
        self._order = itertools.count()

    def changes(self) -> list[tuple[Any, str, Callable[..., Any]]]:
        """Return changes of Dynamo: a class, the name of a method, and what it becomes."""
        return [
            (VariableBuilder, "_wrap", partial(self._wrap, VariableBuilder._wrap)),
            (ListVariable, "call_method", partial(self._call, ListVariable.call_method)),
            (ListVariable, "var_getattr", partial(self._attribute, ListVariable.var_getattr)),
            (SideEffects, "codegen_update_mutated", partial(_write, SideEffects.codegen_update_mutated)),
        ]

    def note_read(self, value: list[Any]) -> None:
        """Restart the trace, with Dynamo's own variable of the list."""
        self._read.add(id(value))
        raise UnspecializeRestartAnalysis(restart_reason="a list that grows is read")

    def position(self) -> int:
        """Return the position of the next value among all that are appended."""
        return next(self._order)

    def _wrap(self, wrap: Any, builder: Any, value: Any) -> Any:
        is_appended = type(value) is list and self._appended.get(id(value)) is value
        if not is_appended or id(value) in self._read:
            return wrap(builder, value)
        builder.install_guards(GuardBuilder.TYPE_MATCH)
        variable = _AppendedList(self, value, source=builder.source)
        return builder.tx.output.side_effects.track_mutable(value, variable)

    def _call(self, call: Any, variable: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        self._restart(variable, tx, name)
        return call(variable, tx, name, args, kwargs)

    def _attribute(self, read: Any, variable: Any, tx: Any, name: str) -> Any:
        """Read an attribute: a trace may end before the method ``append`` is called."""
        self._restart(variable, tx, name)
        return read(variable, tx, name)

    def _restart(self, variable: Any, tx: Any, name: str) -> None:
        """Restart the trace if a list that was there before is only appended to."""
        if name == "append" and isinstance(variable.mutation_type, ValueMutationExisting):
            effects = tx.output.side_effects
            for value in effects.keepalive:
                is_list = type(value) is list and effects.id_to_variable.get(id(value)) is variable
                if is_list and id(value) not in self._read:
                    self._appended[id(value)] = value
                    raise UnspecializeRestartAnalysis(restart_reason="a list grows")


class _AppendedList(VariableTracker):  # type: ignore[misc]  # torch does not type it
    """A list that the step appends to, of which nothing is read.

    Attributes:
        value: The list.
        added: What the trace appends.
        positions: Positions of these among all values that are appended.
    """

    def __init__(self, lists: AppendedLists, value: list[Any], **options: Any) -> None:
        super().__init__(**options)
        self.lists = lists
        self.value = value
        self.added: list[Any] = []
        self.positions: list[int] = []

    def python_type(self) -> type:
        """Return the type of the list."""
        return list

    def call_method(self, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Note a value that is appended."""
        if name != "append" or len(args) != 1 or kwargs:
            self.read()
        tx.output.side_effects.mutation(self)
        self.added.append(args[0])
        self.positions.append(self.lists.position())
        return ConstantVariable.create(None)

    def var_getattr(self, tx: Any, name: str) -> Any:
        """Return the method ``append``."""
        return _AppendMethod(self, name) if name == "append" else self.read()

    def read(self, *args: Any, **kwargs: Any) -> Any:
        """Restart the trace."""
        self.lists.note_read(self.value)

    call_obj_hasattr = as_proxy = as_python_constant = unpack_var_sequence = read
    has_unpack_var_sequence = force_unpack_var_sequence = has_force_unpack_var_sequence = read


class _AppendMethod(GetAttrVariable):  # type: ignore[misc]
    """The method ``append`` of such a list, which code after the trace may call."""

    def as_python_constant(self) -> Any:
        """Refuse, as any variable does that is no constant: the list is an object of the step."""
        return VariableTracker.as_python_constant(self)


def _write(write: Any, effects: Any, codegen: Any, *args: Any, **kwargs: Any) -> None:
    """Write code that loads lists and values before any change, and appends after all other changes."""
    guard_changed_objects(effects)
    lists = [variable for variable in effects._get_modified_vars() if isinstance(variable, _AppendedList)]
    appends = sorted(
        (
            (position, variable.source, value)
            for variable in lists
            for position, value in zip(variable.positions, variable.added, strict=True)
        ),
        key=lambda append: append[0],
    )
    names = []
    for _, source, value in appends:
        names.append((codegen.new_var(), codegen.new_var()))
        for name, item in zip(names[-1], (source, value), strict=True):
            codegen(item)
            codegen.store(name)
    for variable in lists:
        variable.mutation_type.is_modified = False
    write(effects, codegen, *args, **kwargs)
    for variable in lists:
        variable.mutation_type.is_modified = True
    for target, name in names:
        codegen.append_output(codegen.create_load(target))
        codegen.load_method("append")
        codegen.append_output(codegen.create_load(name))
        codegen.call_method(1)
        codegen.append_output(create_instruction("POP_TOP"))
