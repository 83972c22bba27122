"""Guards of identity and absence that Dynamo lacks: objects that a trace takes for different ones, and names.

A trace that changes an object holds only while no other name leads to it, a comparison of objects only while
they stay the same or different ones, and the name of a builtin function only while no global has it. This
module imports Dynamo.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

from torch._dynamo.exc import unimplemented
from torch._dynamo.guards import GuardBuilder, install_guard, install_no_tensor_aliasing_guard
from torch._dynamo.source import (
    AttrSource,
    ClosureSource,
    DictGetItemSource,
    GetItemSource,
    GlobalSource,
    LocalCellSource,
    Source,
    is_from_optimizer_source,
    is_from_skip_guard_source,
)
from torch._dynamo.symbolic_convert import InliningInstructionTranslator, InstructionTranslatorBase
from torch._dynamo.variables import VariableTracker, builtin, object_protocol
from torch._dynamo.variables.base import NO_SUCH_SUBOBJ
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.misc import NewGlobalVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

__all__ = ["guard_changed_objects", "identity_changes"]

_VALUES = (int, float, complex, bool, str, bytes, type(None), type(Ellipsis), type)
"""Types whose objects Dynamo guards by value, or by identity already."""

_ADDRESS_HASH: Any = object.__hash__


def identity_changes(methods: list[Any]) -> list[tuple[Any, str, Callable[..., Any]]]:
    """Return changes of Dynamo: a module or class, the name of a function, and what it becomes.

    Args:
        methods: Attributes of classes that a trace needs as they are. Those that must be absent are added.
    """
    compare = partial(_compared, object_protocol.vt_identity_compare)
    return [
        (
            InstructionTranslatorBase,
            "load_builtin",
            partial(_builtin, InstructionTranslatorBase.load_builtin),
        ),
        (
            InliningInstructionTranslator,
            "get_globals_source_and_value",
            partial(_globals, InliningInstructionTranslator.get_globals_source_and_value),
        ),
        (object_protocol, "vt_identity_compare", compare),
        (builtin, "vt_identity_compare", compare),
        (object_protocol, "generic_hash_impl", partial(_hashed, object_protocol.generic_hash_impl)),
        (UserFunctionVariable, "bind_args", partial(_bound, UserFunctionVariable.bind_args)),
        (BuiltinVariable, "call_id", partial(_numbered, BuiltinVariable.call_id)),
        (
            UserDefinedObjectVariable,
            "var_getattr",
            partial(_attribute, UserDefinedObjectVariable.var_getattr, methods),
        ),
    ]


def guard_changed_objects(effects: Any) -> None:
    """Guard that objects that a trace changes are no others of their type that it met.

    Args:
        effects: Dynamo's side effects of the trace.
    """
    types = {key: type(value) for value in effects.keepalive for key in [id(value)]}
    modified = {id(variable) for variable in effects._get_modified_vars()}
    sources: dict[type, list[Source]] = {}
    changed: dict[type, list[Source]] = {}
    for key, variable in effects.id_to_variable.items():
        if _is_guarded(variable.source) and not isinstance(variable, NewGlobalVariable):
            sources.setdefault(types[key], []).append(variable.source)
            if id(variable) in modified:
                changed.setdefault(types[key], []).append(variable.source)
    for kind in changed:
        _guard_differ(sources[kind], changed[kind])


def _is_guarded(source: Source | None) -> bool:
    """Return whether Dynamo guards what a source leads to."""
    return not (
        source is None
        or isinstance(source, LocalCellSource)
        or is_from_skip_guard_source(source)
        or is_from_optimizer_source(source)
    )


def _guard_differ(sources: Iterable[Source], changed: Sequence[Source]) -> None:
    """Guard that objects differ from those that change."""
    first, *others = dict.fromkeys(sources)
    if others:
        install_guard(first.make_guard(partial(_differ, sources=(first, *others), changed=changed)))


def _differ(builder: Any, guard: Any, sources: Sequence[Source], changed: Sequence[Source]) -> None:
    """Add guards to Dynamo's: objects of sources differ from those that change.

    Dynamo has a guard for this in C++, but not for dictionaries whose items are all guarded in their order.
    """
    managers = {source: builder.get_guard_manager_from_source(source) for source in sources}
    dictionaries = [source for source in sources if type(managers[source]).__name__ == "DictGuardManager"]
    plain = [source for source in sources if source not in dictionaries]
    names = [source.name for source in plain]
    if len(plain) > 1:
        code = [f"differ({', '.join(names)})"]
        install_no_tensor_aliasing_guard(
            [managers[source] for source in plain], names, code, guard.user_stack
        )
    pairs = {frozenset((source, other)) for source in changed for other in dictionaries if source != other}
    if pairs:
        code = sorted(
            " is not ".join(sorted(builder.arg_ref(source.name) for source in pair)) for pair in pairs
        )
        builder.add_python_lambda_leaf_guard_to_root(code, code)


def _builtin(load: Any, self: Any, instruction: Any) -> Any:
    """Load a builtin, with a guard that no global has its name."""
    name = instruction.argval
    if self.output.global_scope is self.f_globals:
        install_guard(GlobalSource(name).make_guard(partial(_is_no_global, name=name)))
    else:
        source = self.get_globals_source_and_value(name)[2]
        if isinstance(source, AttrSource):
            _guard_absence(source.base, name)
        elif isinstance(source, DictGetItemSource):
            install_guard(source.base.make_guard(partial(GuardBuilder.DICT_NOT_CONTAINS, key=name)))
    return load(self, instruction)


def _globals(read: Any, self: Any, name: str) -> Any:
    """Return where a global of a function is; Dynamo looks it up by the name of the function's module."""
    module, variable, source = read(self, name)
    if isinstance(module, ModuleType) and vars(module) is not self.f_globals:
        reason = f"a function has other globals than the module {module.__name__}"
        unimplemented(gb_type="end of the head", context=reason, explanation=reason, hints=[])
    return module, variable, source


def _is_no_global(builder: Any, guard: Any, name: str) -> None:
    """Add a guard to Dynamo's: no global has a name."""
    builder.get_global_guard_manager().add_dict_contains_guard(
        False, name, [f"not ___dict_contains({name!r}, G)"], guard.user_stack
    )


def _guard_absence(source: Source, name: str) -> None:
    """Guard that an object has no attribute of its own."""
    install_guard(source.make_guard(partial(GuardBuilder.NOT_PRESENT_IN_GENERIC_DICT, attr=name)))


def _attribute(read: Any, methods: list[Any], self: Any, tx: Any, name: str) -> Any:
    """Read an attribute; one that neither object nor class has, such as by ``__getattr__``, stays absent."""
    owner, value = type(self.value), self.value
    is_absent = not any(name in vars(base) for base in owner.__mro__)
    if is_absent and name not in getattr(value, "__dict__", {name}) and _is_guarded(self.source):
        _guard_absence(self.source, name)
        if not any((owner, name) == method[:2] for method in methods):
            methods.append((owner, name, None))
    return read(self, tx, name)


def _compared(compare: Any, left: VariableTracker, right: VariableTracker) -> Any:
    """Compare the identity of two objects, with a guard that the result stays."""
    result = compare(left, right)
    sources = left.source, right.source
    if result is None or sources[0] == sources[1] or not all(map(_is_guarded, sources)):
        return result
    if not _has_identity(left) or not _has_identity(right) or left.python_type() is not right.python_type():
        return result
    if result.as_python_constant():
        install_guard(sources[0].make_guard(partial(GuardBuilder.DUPLICATE_INPUT, source_b=sources[1])))
    else:
        _guard_differ(sources, sources)
    return result


def _bound(bind: Any, self: Any, tx: Any, *args: Any) -> Any:
    """Bind arguments and variables of a function; one that another function has, too, stays that variable."""
    effects = tx.output.side_effects
    for index, cell in enumerate(self.fn.__closure__ or () if _leads_to(tx, self.source, self.fn) else ()):
        source = GetItemSource(ClosureSource(self.source), index)
        if cell in effects and effects[cell].source not in (None, source):
            for alias in filter(_is_guarded, (source, effects[cell].source)):
                install_guard(alias.make_guard(GuardBuilder.ID_MATCH))
    return bind(self, tx, *args)


def _leads_to(tx: Any, source: Source | None, function: Any) -> bool:
    """Return whether Dynamo guards a source that leads to a function, not to its module."""
    if source is None or not _is_guarded(source):
        return False
    try:
        scope = {"L": tx.output.local_scope, "G": tx.output.global_scope}
        return source.get_value(scope, {}, {}) is function
    except Exception:  # a name of Dynamo's own
        return False


def _has_identity(variable: VariableTracker) -> bool:
    try:
        return not issubclass(variable.python_type(), _VALUES)
    except NotImplementedError:
        return False


def _guard_identity(variable: VariableTracker) -> None:
    """Guard that a source leads to the same object."""
    if _is_guarded(variable.source) and _has_identity(variable):
        install_guard(variable.source.make_guard(GuardBuilder.ID_MATCH))


def _hashed(hashed: Any, tx: Any, variable: VariableTracker) -> Any:
    """Return a hash, with a guard if it is the object's address."""
    value = variable.get_real_python_backed_value()
    if value is not NO_SUCH_SUBOBJ and type(value).__hash__ is _ADDRESS_HASH:
        _guard_identity(variable)
    return hashed(tx, variable)


def _numbered(numbered: Any, self: Any, tx: Any, *args: VariableTracker) -> Any:
    """Return the number of an object, with a guard that it stays the same object."""
    for variable in args:
        _guard_identity(variable)
    return numbered(self, tx, *args)
