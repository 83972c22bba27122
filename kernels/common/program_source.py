"""The source of a library's program: the definitions of this package that the program uses, and no others.

Records of a program stay valid when other programs, checks, texts or annotations change, and when its
functions move to another module.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tunebench.variant import dumped_tree

__all__ = ["Definition", "method", "program", "source_of"]

Definition = tuple[str, str]
"""Module, and name of a function, class or constant of its top level."""

_PACKAGES = ("tunebench.kernels.", "tunebench.libraries")
_UNUSED = ("supports", "calls", "accepts_matrices", "is_traceable")
"""Fields of `LibraryProgram` without effect on what its functions do."""
_DISPATCHED = ("torch_calls", "numpy_call")
"""Functions of `tunebench.libraries` that call those of the operator's module."""


@dataclass(frozen=True, slots=True)
class _Module:
    """The top level of a module.

    Attributes:
        definitions: Definitions by name, without docstrings and annotations.
        imports: Imported definitions of the followed packages by their names here.
        modules: Imported modules of those packages by their names here.
    """

    definitions: dict[str, ast.AST] = field(default_factory=dict)
    imports: dict[str, Definition] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)


@functools.cache
def source_of(operator: str, *roots: tuple[str, ast.AST]) -> str:
    """Return the syntax of all definitions that pieces of code use, in an order that ignores where they are.

    Args:
        operator: Name of the operator, whose module `tunebench.libraries` calls.
        roots: Pieces of code, each with the module it is in.
    """
    waiting = list(roots)
    texts, seen = set(), set()
    while waiting:
        module, node = waiting.pop()
        texts.add(dumped_tree(node))
        for used in _used(module, node, operator):
            defined = _defined(used)
            if defined is not None and defined not in seen:
                seen.add(defined)
                waiting.append((defined[0], _module(defined[0]).definitions[defined[1]]))
    return "\0".join(sorted(texts))


def program(module: str, class_name: str, name: str) -> ast.AST:
    """Return what a class states about one of its programs; about all if they are not written as a table.

    Args:
        module: Module of the class.
        class_name: Name of the class.
        name: Name of the program.
    """
    table = next(
        statement.value
        for statement in _class(module, class_name).body
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "programs"
    )
    if isinstance(table, ast.Dict):
        for key, value in zip(table.keys, table.values, strict=True):
            if isinstance(key, ast.Constant) and key.value == name:
                return value
    return table


def method(module: str, class_name: str, name: str) -> ast.AST:
    """Return a method of a class.

    Args:
        module: Module of the class.
        class_name: Name of the class.
        name: Name of the method.
    """
    body = _class(module, class_name).body
    return next(node for node in body if isinstance(node, ast.FunctionDef) and node.name == name)


def _class(module: str, name: str) -> ast.ClassDef:
    definition = _module(module).definitions[name]
    assert isinstance(definition, ast.ClassDef), name
    return definition


def _used(module: str, node: ast.AST, operator: str) -> Iterator[Definition]:
    """Return the definitions that a piece of code names; local variables hide them."""
    names, parts = _module(module), list(ast.walk(node))
    arguments = {part.arg for part in parts if isinstance(part, ast.arg)}
    stored = {p.id for p in parts if isinstance(p, ast.Name) and isinstance(p.ctx, ast.Store)}
    for part in parts:
        if isinstance(part, ast.Name) and part.id not in arguments | stored:
            yield names.imports.get(part.id, (module, part.id))
        elif isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name):
            imported = names.modules.get(part.value.id)
            if imported is not None:
                yield imported, part.attr
                if imported == "tunebench.libraries" and part.attr in _DISPATCHED:
                    yield f"{imported}.{operator}", part.attr


def _defined(named: Definition) -> Definition | None:
    """Return where a name is defined, which may be another module than it is imported from, or None."""
    module = _module(named[0])
    if named[1] in module.definitions:
        return named
    return _defined(module.imports[named[1]]) if named[1] in module.imports else None


@functools.cache
def _module(name: str) -> _Module:
    """Return the top level of a module of the followed packages; empty if there is no such module."""
    module, file = _Module(), _file(name)
    if file is None:
        return module
    tree = _Reduced().visit(ast.parse(file.read_text(encoding="utf-8")))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            module.definitions[node.name] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            module.definitions[node.targets[0].id] = node.value
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            _add_imports(module, node)
    module.definitions.pop("LibraryProgram", None)
    return module


def _add_imports(module: _Module, node: ast.ImportFrom) -> None:
    package = node.module or ""
    for alias in node.names:
        name, local_name = f"{package}.{alias.name}", alias.asname or alias.name
        if name.startswith(_PACKAGES) and _file(name) is not None:
            module.modules[local_name] = name
        elif package.startswith(_PACKAGES):
            module.imports[local_name] = (package, alias.name)


def _file(name: str) -> Path | None:
    """Return the file of a module, or None if there is no such module."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # the name before the last point is none of a package
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin)


class _Reduced(ast.NodeTransformer):
    """Removes what does not run: docstrings, annotations, and descriptions of programs."""

    def visit_Module(self, node: ast.Module) -> ast.AST:
        return self._without_docstring(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return self._without_docstring(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self._without_docstring(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        self.generic_visit(node)
        if node.value is None:
            return node
        return ast.Assign(targets=[node.target], value=node.value)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        called = ast.unparse(node.func)
        if called == "LibraryProgram":
            node.args = node.args[:2] + node.args[4:5]  # package, compute, write
        if called in ("LibraryProgram", "dataclasses.replace"):
            node.keywords = [word for word in node.keywords if word.arg not in _UNUSED]
        return node

    def _without_docstring(self, node: ast.AST) -> ast.AST:
        self.generic_visit(node)
        body: list[ast.stmt] = node.body  # type: ignore[attr-defined]
        first = body[0] if body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and len(body) > 1:
            del body[0]
        return node
