"""Machine code of a Numba kernel, and of none of the functions that it calls by itself.

Numba optimises every function and translates it to machine code, then links its optimised code into each
caller and does both again: the body of a parallel loop is translated four times, and a function that it
calls five times. Only the code of the kernel is ever run. Here, functions are optimised and stay LLVM's
intermediate representation, and wrappers of loops are optimised as parts of the kernel only.

Functions with an entry for Python (a user's own) are compiled at once, as by Numba: Python may call them.

Source: `CPUCodeLibrary` in Numba's `core/codegen.py`, whose methods are overridden.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from numba.core.codegen import JITCodeLibrary
from numba.core.compiler_lock import global_compiler_lock
from numba.core.environment import lookup_environment

__all__ = ["linked_once"]

_LOOP_BODY = "__numba_parfor_gufunc"
"""Beginning of the names of bodies of parallel loops: Numba makes entries for Python that nothing calls."""


class _Library(JITCodeLibrary):  # type: ignore[misc]
    """Code of a function, which leaves the functions that it calls uncompiled."""

    def add_linking_library(self, library: Any) -> None:
        if isinstance(library, _Part):
            self._linking_libraries.append(library)
        else:
            super().add_linking_library(library)

    def finalize(self) -> None:
        """Compile it, and set the objects with which it raises exceptions; Numba sets one per library."""
        super().finalize()
        for variable in self._final_module.global_variables:
            environment = lookup_environment(variable.name)
            if environment is not None:
                self._codegen.set_env(variable.name, environment)


class _Part(_Library):
    """Code of a function that a kernel calls; it is translated by itself only if Python or others need it."""

    _shared_module: Any

    def get_pointer_to_function(self, name: str) -> int:
        """Return the address of an entry for Python, 0 without one."""
        defined = {function.name for function in self.get_defined_functions()}
        if self._is_loop_body or (not self._finalized and name not in defined):
            return 0
        return super().get_pointer_to_function(name)  # type: ignore[no-any-return]

    @property
    def _is_loop_body(self) -> bool:
        return str(self.name).startswith(_LOOP_BODY)

    def _ensure_finalized(self) -> None:
        if not self._is_loop_body:  # which Numba compiles before it links it
            super()._ensure_finalized()

    def _get_module_for_linking(self) -> Any:
        """Return the code with that of the functions it calls, which other code may link several times."""
        if self._finalized or self._shared_module is not None:
            return self._shared_module or super()._get_module_for_linking()
        for library in dict.fromkeys(self._linking_libraries):
            self._reload_init.update(library._reload_init)
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        if self._object_caching_enabled:  # a function, and not a wrapper of Numba's
            # Loops are vectorised here: inlined into their callers, some would not be, or worse.
            self._optimize_final_module()
        module = self._final_module.clone()
        for function in module.functions:
            if not function.is_declaration and function.linkage.name == "external":
                function.linkage = "linkonce_odr"
        self._shared_module = module
        return module


@contextlib.contextmanager
def linked_once(codegen: Any, kernel: str) -> Iterator[None]:
    """Return a context in which functions that a kernel calls are translated as parts of it only.

    Args:
        codegen: Numba's generator of code for this processor.
        kernel: Qualified name of the kernel's function.
    """

    def create_library(name: str) -> JITCodeLibrary:
        return (_Library if name == kernel else _Part)(codegen, name)

    def set_env(name: str, environment: Any) -> None:
        if codegen._engine.is_symbol_defined(name):  # else of a part, which no engine has
            type(codegen).set_env(codegen, name, environment)

    with global_compiler_lock:  # which compiling takes, too
        codegen.create_library, codegen.set_env = create_library, set_env
        try:
            yield
        finally:
            del codegen.create_library, codegen.set_env
