"""Guards of Dynamo as words that hold: a traced head runs without a search of its objects in each step.

Dynamo's guards follow attributes and items from the variables of a step to each module and tensor. As long as
no dictionary on the way has another version, and no reference another value, they lead to the same objects.
So these words, the metadata of tensors, and the arguments are all that is compared.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from inspect import getattr_static
from types import CellType, FunctionType, MappingProxyType, MemberDescriptorType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._device
from torch import Tensor

from tunebench.training.coexecution._words import (
    CachedValue,
    Word,
    Words,
    are_supported,
    instance_words,
    list_words,
)

if TYPE_CHECKING:
    from tunebench.training.coexecution._head_graph import HeadGraph

__all__ = ["HeadGuards", "guards_hold", "head_guards"]

_FIXED = frozenset((
    "TYPE_MATCH", "ID_MATCH", "EQUALS_MATCH", "TRUE_MATCH", "FALSE_MATCH", "NONE_MATCH", "NOT_NONE",
    "LENGTH_CHECK", "DICT_LENGTH", "DICT_CONTAINS", "TENSOR_MATCH", "NO_TENSOR_ALIASING", "OBJECT_ALIASING",
))  # fmt: skip
"""Guards that depend on an object of which the words are compared, or on metadata of a tensor."""

_OF_NUMBERS = frozenset(["TYPE_MATCH", "EQUALS_MATCH", "TRUE_MATCH", "FALSE_MATCH", "NONE_MATCH", "ID_MATCH"])
"""Guards of arguments that are numbers or text, which are asked in each step."""

_OF_CONTAINERS = frozenset((
    "TYPE_MATCH", "LENGTH_CHECK", "DICT_LENGTH", "DICT_CONTAINS", "NOT_NONE", "NO_TENSOR_ALIASING",
))  # fmt: skip
"""Guards of arguments that are containers, which are asked in each step."""

_ITEMS = frozenset((
    "DictGetItemGuardAccessor", "GetItemGuardAccessor", "ListGetItemGuardAccessor",
    "TupleGetItemGuardAccessor",
))  # fmt: skip
"""What reads an item of a container."""

_AMBIENT = frozenset(["GLOBAL_STATE", "TORCH_FUNCTION_MODE_STACK", "DEFAULT_DEVICE", "LAMBDA_GUARD"])
"""Guards of the state of the thread."""

_SCALARS = (int, float, bool, str, type(None))
_IMMUTABLE = (*_SCALARS, bytes, complex, torch.dtype, torch.device, torch.Size)
_ABSENT = object()

Path = tuple[Any, ...]
"""Where an argument has a value: its position, and the keys of containers in it."""


class _UnsupportedError(Exception):
    """A guard is none that words can replace."""


class HeadGuards:
    """The guards of a traced head for a step with the same objects as now.

    Attributes:
        graph: The head.
        hits: Number of runs by these guards.
        hooks: That the head has no hooks, and optimizers the parameters of its record, while this is known.
        updates: Numbers of the updates in the head, while they are known.
    """

    def __init__(
        self, entry: Any, function: FunctionType, args: Sequence[Any], graph: HeadGraph, changing: set[int]
    ) -> None:
        code, original = entry.code, function.__code__
        if (
            code.co_freevars != original.co_freevars
            or len(args) != original.co_argcount
            or original.co_flags & 0x0C
        ):
            raise _UnsupportedError("the step has other arguments")
        self.graph = graph
        self.hits = 0
        self.hooks, self.updates = CachedValue(), CachedValue()
        self._original = function
        self._function = FunctionType(
            code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
        )
        self._function.__kwdefaults__ = function.__kwdefaults__
        cells = dict(zip(original.co_freevars, function.__closure__ or (), strict=True))
        self._names = original.co_varnames[: len(args)]
        self._cells = {name: cell.cell_contents for name, cell in cells.items()}
        scope = self._cells | dict(zip(self._names, args, strict=True))
        root = entry.guard_manager.root
        self._words: list[Word] = [
            *graph.method_words(),
            *((cell, "cell") for cell in cells.values()),
            *((function, kind) for kind in ("code", "defaults", "kwdefaults")),
            (vars(torch.utils._device), "tag"),
        ]
        self._changing = changing
        self._slots: list[tuple[Any, str, Any]] = []  # attributes that are no items of a dictionary
        self._items: list[tuple[dict[Any, Any], Any, Any]] = []
        self._asked_of: list[tuple[Callable[[Any], bool], dict[Any, Any], Any]] = []
        self._identical: list[tuple[int, Any]] = []
        self._asked: list[tuple[Callable[[Any], bool], Path]] = []
        self._distinct: list[Path] = []
        self._distinct_ids: set[int] = set()
        self._passed: dict[Path, Tensor] = {}
        self._geometry: dict[Path, tuple[list[int | None], list[int | None]]] = {}
        self._tensors: dict[int, Tensor] = {}
        self._globals = function.__globals__
        self._ambient = _state_guard(root)
        self._joint = root.get_epilogue_lambda_guards()
        for accessor, child in _children(root):
            self._walk_root(accessor, child, scope)
        self._paths = list(self._passed)
        self._fixed = list(self._tensors.values())
        geometry = [*self._geometry.values()]
        geometry += [(list(tensor.shape), list(tensor.stride())) for tensor in self._fixed]
        self._tensor_guards = torch._C._dynamo.guards.TensorGuards(
            *self._passed.values(),
            *self._fixed,
            dynamic_dims_sizes=[sizes for sizes, _ in geometry],
            dynamic_dims_strides=[strides for _, strides in geometry],
        )
        self._passed.clear()
        self._watched = Words(self._words)
        if not self.hold(function, args):
            raise _UnsupportedError("the same objects do not fit")

    def hold(self, function: Any, args: Sequence[Any]) -> bool:
        """Return whether Dynamo's guards hold for a function and its arguments."""
        if (
            function is not self._original
            or len(args) != len(self._names)
            or not self._watched.hold()
            or not self._ambient(None)
        ):
            return False
        return (
            all(args[position] is value for position, value in self._identical)
            and all(guard(_argument_at(args, path)) for guard, path in self._asked)
            and (not self._distinct or self._are_distinct(args))
            and (not self._joint or self._joint_hold(args))
            and all(getattr(owner, name, _ABSENT) is value for owner, name, value in self._slots)
            and all(owner.get(key, _ABSENT) is value for owner, key, value in self._items)
            and all(
                guard(owner if key is _ABSENT else owner.get(key, _ABSENT))
                for guard, owner, key in self._asked_of
            )
            and self._tensor_guards.check(*[_argument_at(args, path) for path in self._paths], *self._fixed)
        )

    def _joint_hold(self, args: Sequence[Any]) -> bool:
        """Return whether guards of several variables hold."""
        scope = self._cells | dict(zip(self._names, args, strict=True))
        return all(guard(scope) for guard in self._joint)

    def _are_distinct(self, args: Sequence[Any]) -> bool:
        """Return whether containers of the arguments differ from one another and from objects of the step."""
        identities = {id(_argument_at(args, path)) for path in self._distinct}
        return len(identities) == len(self._distinct) and identities.isdisjoint(self._distinct_ids)

    def run(self, args: Sequence[Any]) -> Any:
        """Run Dynamo's function for the step."""
        self.hits += 1
        return self._function(*args)

    def _walk_root(self, accessor: str, manager: Any, scope: dict[str, Any]) -> None:
        if accessor == "GlobalsGuardAccessor":
            self._walk(manager, self._globals)
            return
        match = re.match(r"FrameLocalsGuardAccessor\(key='(\w+)'", accessor)
        if match is None:
            raise _UnsupportedError(accessor)
        name = match[1]
        value = scope[name]
        if name not in self._names:
            self._walk(manager, value)
            return
        self._walk_argument(manager, value, (self._names.index(name),))

    def _walk_argument(self, manager: Any, value: Any, path: Path) -> None:
        """Note what to ask of an argument in each step."""
        guards, children = manager.get_leaf_guards(), _children(manager)
        kinds = {type(guard).__name__ for guard in guards}
        if isinstance(value, Tensor) and "TENSOR_MATCH" in kinds and not children:
            if not kinds <= _FIXED:
                raise _UnsupportedError(f"{kinds}")
            self._passed[path] = value
            self._geometry[path] = next(filter(None, map(_sizes_of_guard, guards)))
        elif type(value) in _SCALARS:
            if not kinds <= _OF_NUMBERS or children:
                raise _UnsupportedError(f"{kinds}")
            self._asked += [(guard, path) for guard in guards]
        elif type(value) in (dict, list, tuple):  # made anew for each step
            readers = {accessor.partition("(")[0] for accessor, _ in children}
            if type(manager).__name__ == "DictGuardManager" or not (
                kinds <= _OF_CONTAINERS and readers <= _ITEMS
            ):
                raise _UnsupportedError(f"{kinds}, {readers}")
            if "NO_TENSOR_ALIASING" in kinds:
                self._distinct.append(path)
            self._asked += [(guard, path) for guard in guards if type(guard).__name__ != "NO_TENSOR_ALIASING"]
            for accessor, child in children:
                key = ast.literal_eval(_argument(accessor))
                self._walk_argument(child, value[key], (*path, key))
        elif len(path) > 1 or isinstance(value, (list, tuple, dict, set)):
            raise _UnsupportedError("an argument that is made anew for each step")
        else:
            self._identical.append((path[0], value))
            self._walk(manager, value)

    def _walk(self, manager: Any, value: Any) -> None:
        """Note the words on which the guards of an object depend."""
        if not _is_immutable(value):
            self._words.append((value, "type"))
        for guard in manager.get_leaf_guards():
            if id(value) in self._changing and type(guard).__name__ in ("DICT_CONTAINS", "DICT_LENGTH"):
                self._asked_of.append((guard, value, _ABSENT))
            else:
                self._note(type(guard).__name__, value)
        if type(manager).__name__ == "DictGuardManager":
            self._note("DICT_LENGTH", value)
            items = list(dict.items(value))  # not in the order of an OrderedDict
            for index, pair in manager.get_key_value_managers().items():
                for part, child in zip(items[index], pair, strict=True):
                    if child is not None:
                        self._walk(child, part)
        for accessor, child in _children(manager):
            if id(value) in self._changing and accessor.startswith("DictGetItem"):
                self._walk_item(child, value, ast.literal_eval(_argument(accessor)))
            else:
                self._walk(child, self._child(accessor, value))

    def _walk_item(self, manager: Any, owner: dict[Any, Any], key: Any) -> None:
        """Note an item of a dictionary of which other items change."""
        value = owner[key]
        kinds = {type(guard).__name__ for guard in manager.get_leaf_guards()}
        if type(value) in _SCALARS and kinds <= _OF_NUMBERS and not manager.get_accessors():
            self._asked_of += [(guard, owner, key) for guard in manager.get_leaf_guards()]
            return
        self._items.append((owner, key, value))
        self._walk(manager, value)

    def changed(self) -> set[int]:
        """Return the dictionaries that changed, by identity."""
        return {id(owner) for owner, kind in self._watched.changed() if kind == "tag"}

    def _note(self, kind: str, value: Any) -> None:
        if kind not in _FIXED:
            raise _UnsupportedError(kind)
        if kind == "TENSOR_MATCH":
            self._tensors[id(value)] = value
        elif kind == "NO_TENSOR_ALIASING":
            self._distinct_ids.add(id(value))
        elif kind in ("DICT_LENGTH", "DICT_CONTAINS") or isinstance(value, dict):
            if not isinstance(value, MappingProxyType):  # of a type whose version is watched
                self._words.append((value, "tag"))
        elif kind in ("EQUALS_MATCH", "LENGTH_CHECK", "TRUE_MATCH", "FALSE_MATCH") and not _is_immutable(
            value
        ):
            if kind != "LENGTH_CHECK" or type(value) not in (list, tuple):
                raise _UnsupportedError(f"{kind} of {type(value).__name__}")
            if type(value) is list:
                self._words.append((value, "size"))

    def _child(self, accessor: str, value: Any) -> Any:
        """Return what an accessor reads of an object, and note the words on which this depends."""
        if accessor.startswith("GetAttrGuardAccessor"):
            name = _argument(accessor)
            is_slot = type(getattr_static(type(value), name, None)) is MemberDescriptorType
            if is_slot or (value is torch._VF and name not in vars(value)):
                self._words += [(value, "type"), (type(value), "version")]
                self._slots.append((value, name, getattr(value, name)))
                return self._slots[-1][2]
        read = _READERS.get(accessor.partition("(")[0])
        if read is None:
            raise _UnsupportedError(accessor)
        return read(self._words, value, _argument(accessor))


def guards_hold(entry: Any, function: Any, args: Sequence[Any]) -> bool:
    """Return whether Dynamo's guards of an entry hold, for arguments of a function that are all given."""
    names, cells = function.__code__.co_varnames[: len(args)], function.__closure__ or ()
    if len(args) != function.__code__.co_argcount or function.__code__.co_kwonlyargcount:
        return False
    scope = dict(zip(names, args, strict=True))
    with suppress(ValueError):  # a cell is empty
        scope |= {
            name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)
        }
    holds: bool = entry.guard_manager.root.check(scope)
    return holds


def head_guards(
    entry: Any, function: Any, args: Sequence[Any], graph: HeadGraph, changing: set[int]
) -> HeadGuards | None:
    """Return the guards of a traced head for the objects that a step now has, or None.

    Args:
        entry: Dynamo's entry for the head, whose guards hold.
        function: The function of Python that it replaces.
        args: Its arguments.
        graph: The head.
        changing: Dictionaries that change from step to step, by identity: their items are compared.
    """
    if not are_supported():
        return None
    try:
        return HeadGuards(entry, function, args, graph, changing)
    except Exception:  # private parts of another torch, or a guard of another kind: Dynamo's guards are asked
        return None


def _sizes_of_guard(guard: Any) -> tuple[list[int | None], list[int | None]] | None:
    """Return sizes and strides that a guard of a tensor asks for, with None for those that change."""
    match = re.search(r" size=(\[[^]]*\]), stride=(\[[^]]*\])", "".join(guard.verbose_code_parts()))
    return match and (ast.literal_eval(match[1]), ast.literal_eval(match[2]))


def _children(manager: Any) -> list[tuple[str, Any]]:
    names = [accessor.repr() for accessor in manager.get_accessors()]
    return list(zip(names, manager.get_child_managers(), strict=True))


def _argument_at(args: Sequence[Any], path: Path) -> Any:
    """Return the value of an argument at a path, or an object that fits no guard if there is none."""
    value = args[path[0]]
    try:
        for key in path[1:]:
            value = value[key]
    except (IndexError, KeyError, TypeError):
        return _ABSENT
    return value


def _argument(accessor: str) -> str:
    """Return the text between the parentheses of an accessor."""
    return accessor.removesuffix(")").partition("(")[2]


def _state_guard(root: Any) -> Callable[[Any], bool]:
    """Return the guard of torch's state; a head checks the other guards of the thread itself."""
    guards = root.get_leaf_guards()
    states = [guard for guard in guards if type(guard).__name__ == "GLOBAL_STATE"]
    if len(states) != 1 or not all(map(_is_ambient, guards)):
        raise _UnsupportedError("a guard of the thread")
    guard: Callable[[Any], bool] = states[0]
    return guard


def _is_ambient(guard: Any) -> bool:
    kind = type(guard).__name__
    is_of_hooks = (
        kind != "LAMBDA_GUARD" or "top_saved_tensors_hooks ids == None" in guard.verbose_code_parts()[0]
    )
    return kind in _AMBIENT and is_of_hooks


def _is_immutable(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_immutable, value))
    return type(value) in _IMMUTABLE


# -- what accessors of Dynamo read ---------------------------------------------------------------------------


def _item(words: list[Word], value: Any, text: str) -> Any:
    key = ast.literal_eval(text)
    if isinstance(value, MappingProxyType):  # of a type whose version is watched
        return value[key]
    if isinstance(value, dict):
        words.append((value, "tag"))
        return dict.__getitem__(value, key)
    if type(value) is list:
        words += list_words(value)
        return value[key]
    if not isinstance(value, tuple):
        raise _UnsupportedError(f"an item of a {type(value).__name__}")
    return tuple.__getitem__(value, key)


def _closure(words: list[Word], value: Any, text: str) -> Any:
    return value.__closure__  # that of a function does not change


def _dictionary(words: list[Word], value: Any, text: str = "") -> Any:
    words += instance_words(value)[:2]
    return value.__dict__


def _attribute(words: list[Word], value: Any, name: str) -> Any:
    if isinstance(value, FunctionType) and name in ("__code__", "__defaults__", "__kwdefaults__"):
        words.append((value, name.strip("_")))
        return getattr(value, name)
    if isinstance(value, CellType):
        words.append((value, "cell"))
        return value.cell_contents
    if name == "__dict__" and not isinstance(value, (type, FunctionType)):
        return _dictionary(words, value)
    if _has_own_attribute(value, name):
        words.append((vars(value), "tag"))
        if type(value) is not ModuleType:
            words += [(value, "type"), (type(value), "version")]
        return vars(value)[name]
    if isinstance(value, type) and getattr_static(value, name) is getattr(value, name):
        words.append((value, "version"))
        return getattr(value, name)
    raise _UnsupportedError(f"attribute {name} of a {type(value).__name__}")


def _has_own_attribute(module: Any, name: str) -> bool:
    """Return whether an attribute of a module is in its dictionary only, and not of its class."""
    kind = type(module)
    return (
        isinstance(module, ModuleType)
        and getattr_static(kind, "__getattribute__") is getattr_static(ModuleType, "__getattribute__")
        and name in vars(module)
        and getattr_static(kind, name, None) is None
    )


def _of_function(name: str) -> Callable[[list[Word], Any, str], Any]:
    return lambda words, value, text: _attribute(words, value, name)


def _type(words: list[Word], value: Any, text: str) -> Any:
    words += [(value, "type"), (type(value), "version")]
    return type(value)


def _of_type(name: str) -> Callable[[list[Word], Any, str], Any]:
    def read(words: list[Word], value: Any, text: str) -> Any:
        words.append((value, "version"))
        return getattr(value, name)

    return read


_READERS: dict[str, Callable[[list[Word], Any, str], Any]] = {
    "DictGetItemGuardAccessor": _item,
    "GetItemGuardAccessor": _item,
    "ListGetItemGuardAccessor": _item,
    "TupleGetItemGuardAccessor": _item,
    "GetGenericDictGuardAccessor": _dictionary,
    "GetAttrGuardAccessor": _attribute,
    "ClosureGuardAccessor": _closure,
    "CodeGuardAccessor": _of_function("__code__"),
    "FuncDefaultsGuardAccessor": _of_function("__defaults__"),
    "FuncKwDefaultsGuardAccessor": _of_function("__kwdefaults__"),
    "TypeGuardAccessor": _type,
    "TypeMROGuardAccessor": _of_type("__mro__"),
    "TypeDictGuardAccessor": _of_type("__dict__"),
}
